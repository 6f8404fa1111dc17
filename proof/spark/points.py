"""The points at which a copying query is killed, and a plan of when each strikes.

A plan is text, so that it can be an option: ``task-fails@3,before-commit@7`` strikes at the first opportunity
in or after batch 3, and so on. Each point strikes once in a query's life. A flag in a directory that all
processes share records that it has.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from kafkalite.errors import KafkaliteError

#: {point: the process that is killed or the task that fails}, in the order within a batch.
POINTS: Final[Mapping[str, str]] = {
    "latest-start": "driver JVM, first batch of a query that starts at latest",
    "planned": "driver JVM, offsets logged and ranges planned, no task begun",
    "stream-reader-killed": "the process that plans for the source",
    "reader-killed": "Python worker in the middle of reading a range",
    "writer-killed": "Python worker in the middle of its share of a batch",
    "writer-killed-late": "Python worker, its slice written, not reported",
    "task-fails": "task, its share written",
    "executor-killed": "executor JVM in the middle of a share",
    "leader-killed": "broker that leads a partition of the output, in the middle of a share",
    "coordinator-killed": "broker that coordinates the sink's transactions, shares written, nothing decided",
    "before-commit": "driver JVM, shares written, nothing decided",
    "after-commit": "driver JVM, batch decided, not in Spark's commit log",
}
#: Points that kill the driver.
KILLS_DRIVER: Final = frozenset({"latest-start", "planned", "before-commit", "after-commit"})
#: Points that end the query, but not the driver.
KILLS_QUERY: Final = frozenset({"stream-reader-killed"})
#: Points that request a fault from outside and wait until it has happened.
KILLS_BROKER: Final = frozenset({"leader-killed", "coordinator-killed"})

DIRECTORY_OPTION: Final = "faults.directory"
PLAN_OPTION: Final = "faults.plan"
HELP_LIMIT_S: Final = 90.0
_POLL_S: Final = 0.02


class Planned(NamedTuple):
    """The source's plan of one batch, identified by the batch's end offsets."""

    end: dict[str, Any]
    ranges: tuple[tuple[str, int, int, int], ...]  #: topic, partition, first offset, end offset (exclusive)


class InjectedFailure(Exception):
    """A task failure that a plan requested."""


def plan_text(plan: Mapping[str, int]) -> str:
    return ",".join(f"{point}@{batch_id}" for point, batch_id in plan.items())


class FaultPlan:
    """The plan in one process. It can be pickled, because it is sent to tasks."""

    def __init__(self, directory: str | os.PathLike[str], text: str = "") -> None:
        self.directory = Path(directory)
        self.batches = {point: int(batch_id) for point, _, batch_id in _words(text)}
        if unknown := self.batches.keys() - POINTS.keys():
            raise KafkaliteError(f"no such points: {', '.join(sorted(unknown))}", hint=", ".join(POINTS))

    def strikes(self, point: str, batch_id: int) -> bool:
        """Whether to strike now. True only once for each directory."""
        if batch_id < self.batches.get(point, batch_id + 1):
            return False
        try:
            with (self.directory / f"struck-{point}").open("x") as flag:
                flag.write(str(batch_id))
        except FileExistsError:
            return False
        return True

    def struck(self) -> dict[str, int]:
        """Return the points that have struck, with the batch of each."""
        flags = self.directory.glob("struck-*")
        return {flag.name.removeprefix("struck-"): int(flag.read_text() or -1) for flag in flags}

    # --- the current batch, for processes that do not receive it from Spark

    def on_committed(self, batch_id: int) -> None:
        _write(self.directory / "committed", str(batch_id))

    @property
    def current_batch_id(self) -> int:
        """The batch after the last committed one, from 0. It is one too high while a batch is run again."""
        try:
            return int((self.directory / "committed").read_text()) + 1
        except FileNotFoundError:
            return 0

    # --- plans of the source

    def record(self, planned: Planned) -> None:
        line = json.dumps([planned.end, planned.ranges]) + "\n"
        file = os.open(self.directory / "planned.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def planned(self) -> list[Planned]:
        """Return all recorded plans, the oldest first."""
        path = self.directory / "planned.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Planned(end, tuple(map(tuple, ranges))) for end, ranges in map(json.loads, lines)]

    # --- requests

    def ask(self, what: str) -> None:
        """Request ``what``, and return when it is marked as ``done``. Raises TimeoutError."""
        _write(self.directory / f"asked-{what}", "")
        deadline_s = time.monotonic() + HELP_LIMIT_S
        while not (self.directory / f"done-{what}").exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the request {what!r} was not done within {HELP_LIMIT_S:g} s")
            time.sleep(_POLL_S)

    def asked(self) -> list[str]:
        """Return the requests that are not done."""
        names = sorted(path.name.removeprefix("asked-") for path in self.directory.glob("asked-*"))
        return [name for name in names if not (self.directory / f"done-{name}").exists()]

    def done(self, what: str) -> None:
        _write(self.directory / f"done-{what}", "")


def _words(text: str) -> list[tuple[str, str, str]]:
    return [word.strip().partition("@") for word in text.split(",") if word.strip()]


def _write(path: Path, text: str) -> None:
    """Write atomically, because other processes read the file meanwhile."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


# --- killing ---------------------------------------------------------------------------------------


def java_ancestor(process_id: int | None = None) -> int:
    """Return the JVM above this process: the driver's, or an executor's. Raises ProcessLookupError."""
    current = process_id or os.getpid()
    while current > 1:
        current = int(Path(f"/proc/{current}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{current}/comm").read_text().strip() == "java":
            return current
    raise ProcessLookupError("no JVM among the ancestors")


def kill_this_process() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


def kill_jvm(*, and_this_process: bool) -> None:
    """Send SIGKILL to the JVM above this process. A worker may survive its executor for a while."""
    os.kill(java_ancestor(), signal.SIGKILL)
    if and_this_process:
        kill_this_process()
