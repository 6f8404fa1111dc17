"""Where Raft runs: inline in order, or in a thread until it is stopped."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kafkalite.raft.runner import InlineRunner, ThreadRunner
from proof.waiting import eventually


async def test_inline_calls_come_in_order_and_not_at_once():
    runner, heard = InlineRunner(), []
    for number in range(3):
        runner.call(heard.append, number)
    runner.offload(lambda: "done", heard.append)
    runner.offload(lambda: 1 // 0, lambda outcome: heard.append(type(outcome)))
    assert heard == []
    await asyncio.sleep(0)
    assert heard == [0, 1, 2, "done", ZeroDivisionError]
    assert runner.loop is asyncio.get_running_loop()


def test_inline_on_a_closed_loop_does_nothing():
    loop = asyncio.new_event_loop()
    loop.close()
    InlineRunner(loop).call(pytest.fail, "a stopped runner called")


async def test_a_thread_runs_calls_in_order_on_its_own_loop():
    runner, heard, done = ThreadRunner("raft-test"), [], threading.Event()
    runner.start()
    with pytest.raises(AssertionError, match="already"):
        runner.start()
    for number in range(100):
        runner.call(heard.append, number)
    runner.call(lambda: heard.append(threading.current_thread().name))
    runner.call(lambda: runner.offload(threading.get_ident, lambda ident: (heard.append(ident), done.set())))
    assert await asyncio.to_thread(done.wait, 10)
    assert heard[:101] == [*range(100), "raft-test"]
    assert heard[101] != threading.get_ident()
    runner.stop()
    runner.stop()
    runner.call(pytest.fail, "a stopped runner called")


async def test_tasks_left_on_the_thread_are_cancelled():
    runner, has_begun, ended = ThreadRunner(), threading.Event(), threading.Event()
    runner.start()

    async def wait_for_ever():
        has_begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    runner.call(lambda: setattr(runner, "task", runner.loop.create_task(wait_for_ever())))
    await eventually(has_begun.is_set)
    runner.stop()
    assert ended.is_set()


def test_a_runner_that_was_not_started_has_no_loop():
    with pytest.raises(AssertionError, match="start the runner first"):
        _ = ThreadRunner().loop
