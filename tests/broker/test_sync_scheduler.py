"""Group commit: one round at a time, appends gather, each log receives the result of its own sync."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from kafkalite.broker.partitions.inline_executor import InlineExecutor
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from proof.waiting import eventually


class Work:
    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self) -> None:
        self.log.thread = threading.current_thread()
        self.log.gate.wait()
        if self.log.error is not None:
            raise self.log.error


class Log:
    def __init__(self, *, has_work: bool = True) -> None:
        self.has_work = has_work
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.begun = 0
        self.outcomes: list[Exception | None] = []
        self.thread: threading.Thread | None = None

    def begin_sync(self) -> Work | None:
        self.begun += 1
        return Work(self) if self.has_work else None

    def finish_sync(self, work: Any, error: Exception | None) -> None:
        self.outcomes.append(error)


def _never(error: BaseException) -> None:
    raise AssertionError(f"not expected: {error!r}")


def _scheduler(executor: Executor, on_broken: Any = _never) -> SyncScheduler[Log]:
    return SyncScheduler(asyncio.get_running_loop(), executor, on_broken)


async def test_marks_during_a_round_gather_in_the_next() -> None:
    log, other = Log(), Log()
    log.gate.clear()
    with ThreadPoolExecutor(1) as executor:
        scheduler = _scheduler(executor)
        scheduler.mark(log)
        scheduler.mark(log)
        await eventually(lambda: log.thread is not None)
        for _ in range(10):
            scheduler.mark(log)
            scheduler.mark(other)
        assert (log.begun, other.begun) == (1, 0)
        log.gate.set()
        await scheduler.drain()
    assert (log.begun, other.begun) == (2, 1)
    assert log.outcomes == [None, None]
    assert (scheduler.round_count, scheduler.synced_count) == (2, 3)
    assert log.thread is not threading.current_thread()


async def test_a_failed_sync_is_reported_to_its_log_alone() -> None:
    bad, good = Log(), Log()
    bad.error = OSError("input/output error")
    with ThreadPoolExecutor(1) as executor:
        scheduler = _scheduler(executor)
        scheduler.mark(bad)
        scheduler.mark(good)
        await scheduler.drain()
    assert bad.outcomes == [bad.error]
    assert good.outcomes == [None]


async def test_with_an_inline_executor_rounds_run_on_the_loop() -> None:
    log, idle = Log(), Log(has_work=False)
    scheduler = _scheduler(InlineExecutor())
    scheduler.mark(log)
    scheduler.mark(idle)
    assert log.outcomes == []
    await scheduler.drain()
    assert log.outcomes == [None]
    assert idle.outcomes == []
    assert log.thread is threading.current_thread()
    await scheduler.drain()


async def test_a_forgotten_or_discarded_log_is_not_synced() -> None:
    deleted, dropped = Log(), Log()
    scheduler = _scheduler(InlineExecutor())
    scheduler.mark(deleted)
    scheduler.forget(deleted)
    scheduler.mark(dropped)
    await scheduler.drain(discard=True)
    assert deleted.begun == dropped.begun == 0


@pytest.mark.parametrize("method", ["begin_sync", "finish_sync"])
async def test_a_broken_invariant_is_reported_and_not_swallowed(method: str) -> None:
    broken: list[BaseException] = []
    log = Log()

    def fail(*_arguments: object) -> None:
        raise AssertionError("broken")

    setattr(log, method, fail)
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
    scheduler = _scheduler(InlineExecutor(), broken.append)
    scheduler.mark(log)
    for _ in range(3):
        await asyncio.sleep(0)
    assert [str(error) for error in broken] == ["broken"]
    assert len(seen) == 1


async def test_a_postponed_log_is_synced_later_unless_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kafkalite.broker.partitions.sync_scheduler.RETRY_S", 0.0)
    log, other = Log(), Log()
    scheduler = _scheduler(InlineExecutor())
    scheduler.postpone(log)
    scheduler.postpone(other)
    scheduler.forget(other)
    assert log.begun == 0
    await eventually(lambda: log.outcomes == [None])
    assert other.begun == 0
