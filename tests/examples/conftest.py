"""The quickstart in this process: arguments in, exit code and text out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from quickstart import quickstart as command

from kafkalite.cli.app import run


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def quickstart(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def invoke(*arguments: str | Path) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments], command=command, name="bin/quickstart")
        return Result(code, *capfd.readouterr())

    return invoke
