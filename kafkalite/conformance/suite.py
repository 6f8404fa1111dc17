"""Runs the checks of a server's conformance to the protocol.

A check is a function that raises ``Violation`` if the server violates the protocol. The modules
``frame_checks``, ``record_checks`` and ``coordinator_checks`` declare the checks. A run uses topics and
groups with names of its own, and deletes them at the end. Its transactional ids remain until the server
forgets unused ones.
"""

# Tests: tests/conformance/test_suite.py

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kafkalite.conformance.coordinator_checks import COORDINATOR_CHECKS
from kafkalite.conformance.declared import Check
from kafkalite.conformance.frame_checks import FRAME_CHECKS
from kafkalite.conformance.peer import Cluster, Peer, Violation
from kafkalite.conformance.record_checks import RECORD_CHECKS
from kafkalite.errors import ConnectionFailedError, RecordError
from kafkalite.rng import system_rng

CHECKS: Final[tuple[Check, ...]] = (*FRAME_CHECKS, *RECORD_CHECKS, *COORDINATOR_CHECKS)
PASSED: Final = "passed"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"  #: this machine lacks a library that the check needs
LATE: Final = "not run"  #: the time limit had passed


class Result(NamedTuple):
    """The result of one check. ``detail`` is the reason unless the check has passed."""

    name: str
    section: str
    status: str
    detail: str
    duration_ms: int


def run(
    address: str,
    *,
    limit_s: float,
    is_wanted: Callable[[str], bool] = lambda _: True,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Yield the result of each wanted check. Checks that have not begun after ``limit_s`` get the status
    LATE.

    Raises ConnectionFailedError if the server cannot be reached at the beginning.
    """
    Peer(address, handshake=False).close()
    cluster = Cluster(address, f"conformance-{system_rng().randbytes(4).hex()}")
    begin = monotonic()
    try:
        for check in CHECKS:
            if not is_wanted(check.name):
                continue
            started = monotonic()
            if started - begin > limit_s:
                yield Result(check.name, check.section, LATE, f"{limit_s:g} s are over", 0)
                continue
            status, detail = _outcome(check, cluster)
            yield Result(check.name, check.section, status, detail, round((monotonic() - started) * 1000))
    finally:
        cluster.clean_up()


def _outcome(check: Check, cluster: Cluster) -> tuple[str, str]:
    try:
        check.function(cluster)
    except Violation as violation:
        cluster.forget()  # a response may still arrive on an open connection
        return FAILED, str(violation)
    except ConnectionFailedError as error:
        cluster.forget()
        return FAILED, error.message
    except RecordError as error:
        if "cramjam" in str(error):
            return SKIPPED, error.message
        return FAILED, f"a batch in a response cannot be read: {error.message}"
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # The server sent another response than the check expects.
        cluster.forget()
        return FAILED, f"an unexpected response: {error!r}"
    return PASSED, ""
