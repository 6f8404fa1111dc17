"""A member's heartbeats without a network; time passes only in the link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite import TopicPartition
from kafkalite.client.config import consumer_config
from kafkalite.client.group.heartbeats import Heartbeats
from kafkalite.client.group.membership import MemberSettings, Membership
from kafkalite.errors import KafkaliteError, UnknownMemberIdError
from kafkalite.protocol.messages.groups import AssignedTopic, ConsumerGroupHeartbeatResponse

SESSION_MS = 45_000
T0 = TopicPartition("t", 0)


def _answer(epoch: int, *partitions: int) -> ConsumerGroupHeartbeatResponse:
    assignment = [AssignedTopic("i", "t", list(partitions))]
    return ConsumerGroupHeartbeatResponse(0, None, "m", epoch, 5_000, SESSION_MS, assignment)


async def _run(script: list[tuple[int, Any]]) -> list[Any]:
    """Run heartbeats with these responses after these times (ms), and return the events of the owner."""
    now_ms = 0
    heard: list[Any] = []
    heartbeats: Heartbeats
    at_end = asyncio.Event()

    class Link:
        async def attempt(self, request: Any, **_: Any) -> Any:
            nonlocal now_ms
            if not script:
                at_end.set()
                await asyncio.Event().wait()
            took_ms, answer = script.pop(0)
            now_ms += took_ms
            if isinstance(answer, Exception):
                raise answer
            return answer

    def spawn(work: Any) -> asyncio.Task[None]:
        return asyncio.ensure_future(work)

    def on_assignment() -> None:
        heard.append(sorted(heartbeats.membership.assigned))

    def on_expelled(error: KafkaliteError) -> None:
        heartbeats.membership.on_expelled()
        heard.append(type(error))

    cluster: Any = SimpleNamespace(long_poll_ms={}, now_ms=lambda: now_ms, rng=random.Random(1), spawn=spawn)
    config = consumer_config({"group.id": "g", "bootstrap.servers": "x:1", "retry.backoff.ms": 1})
    membership = Membership(MemberSettings("g", "m", None, None, 1000))
    membership.subscribe(["t"], None)
    failed: Callable[[KafkaliteError], None] = heard.append
    link: Any = Link()
    heartbeats = Heartbeats(
        cluster,
        config,
        link,
        membership,
        on_assignment=on_assignment,
        on_expelled=on_expelled,
        on_failed=failed,
    )
    task = asyncio.ensure_future(heartbeats._run())
    async with asyncio.timeout(20):
        await at_end.wait()
    task.cancel()
    return heard


async def test_a_response_updates_the_assignment() -> None:
    assert await _run([(SESSION_MS - 1, _answer(1, 0))]) == [[T0]]


@pytest.mark.parametrize("late_ms", [SESSION_MS, 10 * SESSION_MS])
async def test_a_response_read_after_the_session_timeout_is_refused(late_ms: int) -> None:
    """The process was stopped meanwhile: another member may own the partitions (R38)."""
    heard = await _run([(late_ms, _answer(1, 0)), (1, UnknownMemberIdError("gone")), (1, _answer(3))])
    assert heard == [UnknownMemberIdError, []]
