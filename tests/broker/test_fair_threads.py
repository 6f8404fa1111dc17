"""Threads that hosts have in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kafkalite.broker.server.fair_threads import FairThreads


class Blocked:
    """One thread that is busy until ``release`` is set, and the order in which functions have run."""

    def __init__(self) -> None:
        self.threads: FairThreads[str] = FairThreads(1, "test")
        self.release = threading.Event()
        self.ran: list[str] = []
        self.first = self.threads.run("busy", self._wait)

    def _wait(self) -> str:
        assert self.release.wait(10)
        return "first"

    def run(self, host: str, name: str) -> asyncio.Future[str]:
        def note() -> str:
            self.ran.append(name)
            return name

        return self.threads.run(host, note)


@pytest_asyncio.fixture
async def blocked() -> AsyncIterator[Blocked]:
    made = Blocked()
    yield made
    made.release.set()
    made.threads.close()


async def test_a_host_with_many_functions_delays_another_by_one(blocked: Blocked) -> None:
    """S24"""
    many = [blocked.run("flood", f"flood {number}") for number in range(100)]
    good = blocked.run("good", "good")
    late = blocked.run("late", "late")
    blocked.release.set()
    assert await blocked.first == "first"
    assert await good == "good"
    assert await late == "late"
    assert blocked.ran[:3] == ["flood 0", "good", "late"]
    assert await asyncio.gather(*many) == [f"flood {number}" for number in range(100)]


async def test_a_cancelled_function_never_runs(blocked: Blocked) -> None:
    cancelled, last = blocked.run("a", "cancelled"), blocked.run("a", "last")
    cancelled.cancel()
    blocked.release.set()
    assert await last == "last"
    assert blocked.ran == ["last"]


async def test_cancelled_functions_take_neither_memory_nor_turns(blocked: Blocked) -> None:
    cancelled = [blocked.run("flood", "cancelled") for _ in range(100)]
    good, last = blocked.run("good", "good"), blocked.run("flood", "last")
    for one in cancelled:
        one.cancel()
    await asyncio.sleep(0)
    assert {host: len(queue) for host, queue in blocked.threads._waiting.items()} == {"flood": 1, "good": 1}
    blocked.release.set()
    assert await asyncio.gather(good, last) == ["good", "last"]
    assert blocked.ran == ["last", "good"]


async def test_a_result_that_nobody_awaits_any_more_frees_its_thread(blocked: Blocked) -> None:
    blocked.first.cancel()
    blocked.release.set()
    assert await blocked.run("a", "next") == "next"


async def test_an_error_is_that_of_the_function(blocked: Blocked) -> None:
    def fail() -> str:
        raise ValueError("x")

    failing = blocked.threads.run("a", fail)
    blocked.release.set()
    with pytest.raises(ValueError, match="x"):
        await failing
    assert await blocked.run("a", "next") == "next"


async def test_functions_that_wait_when_the_threads_end_are_cancelled(blocked: Blocked) -> None:
    waiting = blocked.run("a", "never")
    blocked.threads.close()
    blocked.release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await blocked.first == "first"
    assert blocked.ran == []
