"""The asyncio loop around a plan: steps in order, retries, early ends of pauses."""

from __future__ import annotations

import asyncio

import pytest

from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import CallPlan, CallRules, judge_broker_error
from kafkalite.client.cluster.retry import Backoff
from kafkalite.errors import ConnectionFailedError, MessageTooLargeError, NotLeaderOrFollowerError


class Target:
    """Two nodes; each attempt raises the next error of ``errors``, if any."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.steps: list[str] = []

    async def locate(self) -> int:
        self.steps.append("locate")
        return 1 + self.steps.count("locate")

    async def dial(self, node_id: int | None) -> int:
        self.steps.append(f"dial {node_id}")
        return node_id or 0

    async def send(self, connection: int, timeout_ms: int) -> str:
        self.steps.append(f"send {connection}")
        if self.errors:
            raise self.errors.pop(0)
        return "response"

    async def pause(self, duration_ms: int) -> None:
        self.steps.append("pause")

    async def drive(self, timeout_ms: int = 1_000_000) -> str:
        rules = CallRules(judge_broker_error, Backoff(100_000, 100_000))
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        plan = CallPlan(rules, now_ms=now_ms, timeout_ms=timeout_ms)
        return await drive(plan, locate=self.locate, dial=self.dial, send=self.send, pause=self.pause)


async def test_it_takes_the_steps_in_order() -> None:
    target = Target()
    assert await target.drive() == "response"
    assert target.steps == ["locate", "dial 2", "send 2"]


async def test_it_locates_again_after_a_pause_that_ends_early() -> None:
    target = Target(NotLeaderOrFollowerError())
    async with asyncio.timeout(30):
        assert await target.drive() == "response"
    assert target.steps == ["locate", "dial 2", "send 2", "pause", "locate", "dial 3", "send 3"]


async def test_it_raises_the_error_that_the_plan_gives_up_with() -> None:
    with pytest.raises(MessageTooLargeError):
        await Target(MessageTooLargeError()).drive()
    with pytest.raises(ConnectionFailedError, match="lost"):
        await Target(ConnectionFailedError("lost")).drive(timeout_ms=10)


async def test_other_exceptions_end_it() -> None:
    with pytest.raises(ZeroDivisionError):
        await Target(ZeroDivisionError()).drive()
