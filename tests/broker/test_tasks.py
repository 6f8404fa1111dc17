"""TaskSet: failures are reported, and no task outlives its owner."""

from __future__ import annotations

import asyncio

from kafkalite.broker.partitions.inline_executor import InlineExecutor
from kafkalite.broker.tasks import TaskSet


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
    await asyncio.sleep(0)
    assert len(tasks) == 0
    assert failures == []
    await tasks.cancel()


def test_the_inline_executor_has_run_when_submit_returns() -> None:
    executor = InlineExecutor()
    assert executor.submit(pow, 2, 3).result(0) == 8
    assert isinstance(executor.submit(int, "x").exception(0), ValueError)
