"""Raft's metadata log on three voters: the time of a commit, and the cost of an idle voter.

All three run in this process, each on its own thread and loop, with journals on one real disk; messages
pass between the loops. So a commit is two syncs, one after the other, and four changes of thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, plain_row, time_row
from kafkalite.metadata.records import TopicRecord
from kafkalite.raft.raft_quorum import RaftQuorum
from kafkalite.raft.runner import ThreadRunner
from kafkalite.rng import seeded_rng
from kafkalite.storage.disk import RealFileSystem

VOTERS = (1, 2, 3)
COMMITS = 500
IDLE_S = 5.0


class _Machine:
    """A state machine without state."""

    def load(self, offset: int, records: Any) -> None:
        pass

    def apply(self, offset: int, records: Any) -> None:
        pass

    def snapshot(self) -> Any:
        raise AssertionError("the log is too short for one")

    def fail(self, error: BaseException) -> None:
        raise error


class _Link:
    def __init__(self, sender: int, runner: ThreadRunner, receive: Callable[[int, bytes], None]) -> None:
        self._sender, self._runner, self._receive = sender, runner, receive

    def send(self, message: bytes) -> None:
        self._runner.call(self._receive, self._sender, message)


@contextlib.asynccontextmanager
async def _voters(directory: Path) -> AsyncIterator[list[RaftQuorum]]:
    runners = {i: ThreadRunner(f"raft-{i}") for i in VOTERS}
    quorums = {}
    for i, runner in runners.items():
        runner.start()
        quorum = quorums[i] = RaftQuorum(
            RealFileSystem(),
            str(directory / str(i)),
            node_id=i,
            voters=VOTERS,
            runner=runner,
            rng=seeded_rng(i),
        )
        quorum.attach(_Machine())
        await quorum.start()
    for a in VOTERS:
        for b in VOTERS:
            if a != b:
                link = _Link(a, runners[b], quorums[b].node.transport.receive)
                runners[a].call(quorums[a].node.transport.attach, b, link)
    try:
        while not any(quorum.is_leader for quorum in quorums.values()):
            await asyncio.sleep(0.01)
        yield list(quorums.values())
    finally:
        for quorum in quorums.values():
            await quorum.stop()
        for runner in runners.values():
            runner.stop()


async def _measure() -> tuple[list[float], list[float], float]:
    with tempfile.TemporaryDirectory() as name:
        async with _voters(Path(name)) as quorums:
            leader = next(quorum for quorum in quorums if quorum.is_leader)
            commits, reads = [], []
            for number in range(COMMITS):
                begun = time.perf_counter()
                await leader.commit([TopicRecord(f"{number:032x}", f"topic-{number}")], leader.offset)
                commits.append((time.perf_counter() - begun) * 1000)
                begun = time.perf_counter()
                await leader.read_index()
                reads.append((time.perf_counter() - begun) * 1000)
            spent, begun = time.process_time(), time.perf_counter()
            await asyncio.sleep(IDLE_S)
            idle = (time.process_time() - spent) / (time.perf_counter() - begun) / len(VOTERS)
            return commits, reads, idle * 100


def run() -> list[Row]:
    commits, reads, idle = asyncio.run(_measure())
    quantiles = statistics.quantiles(commits, n=100)
    return [
        time_row(
            "raft commit p50",
            f"{COMMITS} commits of one record, one after the other; 3 voters, journals on one disk",
            quantiles[49],
            "ms",
            at_most=3.0,
        ),
        plain_row("raft commit p99", "the same", quantiles[98], "ms"),
        plain_row("raft read-index p50", "between the commits", statistics.median(reads), "ms"),
        time_row(
            "raft idle", f"3 voters, nothing to do for {IDLE_S:g} s, of one core each", idle, "%", at_most=1.5
        ),
    ]
