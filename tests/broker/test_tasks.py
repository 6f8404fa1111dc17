"""TaskSet: failures are reported, and no task outlives its owner."""

from __future__ import annotations

import asyncio
from functools import partial

from kafkalite.broker.partitions.inline_executor import InlineExecutor
from kafkalite.broker.tasks import Signal, TaskSet


async def test_a_failing_task_is_reported() -> None:
    failures: list[BaseException] = []
    tasks = TaskSet(failures.append)

    async def fail() -> None:
        raise ValueError("no")

    async def work() -> None:
        return None

    await asyncio.wait([tasks.start(fail(), name="f"), tasks.start(work(), name="w")])
    await asyncio.sleep(0)
    assert [str(error) for error in failures] == ["no"]
    assert len(tasks) == 0


async def test_cancel_ends_all_and_is_no_failure() -> None:
    failures: list[BaseException] = []
    tasks = TaskSet(failures.append)
    for number in range(3):
        tasks.start(asyncio.sleep(60), name=str(number))
    await tasks.cancel()
    assert len(tasks) == 0
    assert failures == []
    await tasks.cancel()


async def test_a_signal_starts_a_task_once_and_not_after_a_cancel() -> None:
    tasks = TaskSet(lambda error: None)
    early, late, never = Signal(), Signal(), Signal()
    started: list[str] = []

    async def run(name: str) -> None:
        started.append(name)

    early.set()
    for name, signal in (("early", early), ("late", late), ("never", never)):
        tasks.start_when(signal, partial(run, name), name=name)
    await asyncio.sleep(0)
    assert started == ["early"]
    for _ in range(2):
        late.set()
        late.clear()
    await asyncio.sleep(0)
    assert started == ["early", "late"]
    await tasks.cancel()
    never.set()
    await asyncio.sleep(0)
    assert started == ["early", "late"]


async def test_cancel_waits_for_tasks_that_end_slowly() -> None:
    tasks = TaskSet(lambda error: None)
    ended: list[str] = []

    async def end_slowly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append("slow")

    tasks.start(end_slowly(), name="slow")
    tasks.start(asyncio.sleep(60), name="quick")
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended == ["slow"]
    assert len(tasks) == 0


def test_the_inline_executor_has_run_when_submit_returns() -> None:
    executor = InlineExecutor()
    assert executor.submit(pow, 2, 3).result(0) == 8
    assert isinstance(executor.submit(int, "x").exception(0), ValueError)


async def test_a_cancel_that_was_begun_is_completed_and_not_repeated() -> None:
    failures: list[BaseException] = []
    tasks = TaskSet(failures.append)
    ended: list[str] = []

    async def end_slowly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("slow")

    async def fail_at_the_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("no")

    for coroutine in (asyncio.sleep(60), end_slowly(), fail_at_the_end()):
        tasks.start(coroutine, name="task")
    await asyncio.sleep(0)
    tasks.begin_cancel()
    await asyncio.sleep(0)
    tasks.start(asyncio.sleep(60), name="late")
    await tasks.cancel()
    assert ended == ["slow"]
    assert [str(error) for error in failures] == ["no"], "reported once"
    assert len(tasks) == 0
    await asyncio.sleep(0)
    assert [str(error) for error in failures] == ["no"]
