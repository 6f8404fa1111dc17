"""Declares checks of a server."""

# Tests: tests/conformance/test_suite.py

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kafkalite.conformance.peer import Cluster

CheckFunction = Callable[[Cluster], None]


class Check(NamedTuple):
    """One check of a rule in ``section`` of ``docs/protocol.md``. ``function`` raises Violation if the server
    violates it."""

    name: str
    section: str
    function: CheckFunction


class Checks(list[Check]):
    """The checks of one module, in the order of their declaration."""

    def check(self, name: str, section: str) -> Callable[[CheckFunction], CheckFunction]:
        """Declare the decorated function as the check ``name``."""

        def declare(function: CheckFunction) -> CheckFunction:
            self.append(Check(name, section, function))
            return function

        return declare
