"""Directed schedules of clients that harm others. Each violates a guarantee if its rule is removed.

``DIRECTED`` is {mutant: schedule}. A schedule returns the violation, or None.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import HeldResponse, PendingResults, Reply
from kafkalite.broker.server.server import REQUESTS_PER_TURN
from kafkalite.coordinator_types import Caller, Instant
from kafkalite.errors import ErrorCode, PolicyViolationError, broker_error
from kafkalite.groups.settings import GroupSettings
from kafkalite.limits import MAX_GROUPS_PER_REQUEST, MAX_WAIT_MS
from kafkalite.protocol.messages.admin import CreateTopicsRequest, NewTopic
from kafkalite.protocol.messages.data import FetchPartition, FetchRequest, ProducePartition, ProduceRequest
from kafkalite.protocol.messages.groups import DeleteGroupsRequest
from kafkalite.protocol.messages.metadata import DescribeClusterRequest
from kafkalite.records.builder import build_batch
from kafkalite.records.header import HEADER_BYTES, seal
from kafkalite.testing.wire import WireClient
from kafkalite.transactions.commands import InitProducerId
from kafkalite.transactions.machine import TransactionMachine, TransactionSettings
from proof.groups.world import Consumer, Coordinator

_TOPIC: Final = "t"
_CALLER: Final = Caller("app", "10.0.0.1")
_REQUESTS_OF_FLOOD: Final = 20 * REQUESTS_PER_TURN


async def _produce_garbage() -> str | None:
    """Check that a batch with a garbage body and a correct checksum is refused (S22)."""
    batch = bytearray(build_batch([b"x" * 100] * 10, timestamps_ms=1))
    batch[HEADER_BYTES:] = b"\xff" * (len(batch) - HEADER_BYTES)
    seal(batch)
    async with _broker() as broker, WireClient(broker.address) as wire:
        await wire.call(CreateTopicsRequest(1_000, False, [NewTopic(_TOPIC, 1, 1, {})]))
        part = ProducePartition(_TOPIC, 0, len(batch))
        response = await wire.call(ProduceRequest(-1, 1_000, None, [part]), bytes(batch))
    if response.partitions[0].error_code:
        return None
    return "a batch was acknowledged that no consumer can read"


async def _fetch_repeatedly() -> str | None:
    """Check that a request that names a partition twice is refused (S23)."""
    async with _broker() as broker, WireClient(broker.address) as wire:
        await wire.call(CreateTopicsRequest(1_000, False, [NewTopic(_TOPIC, 1, 1, {})]))
        parts = [FetchPartition(_TOPIC, 0, -1, 0, 100)] * 1_000
        response = await wire.call(FetchRequest(0, 0, 100, 0, parts))
    if response.error_code:
        return None
    return f"a request read one partition {len(response.partitions)} times"


async def _flood() -> str | None:
    """Check that a connection with many requests at once is served in turns, and others in between (S24)."""
    async with _broker() as broker, WireClient(broker.address) as quiet, WireClient(broker.address) as flood:
        for one in (quiet, flood):
            await one.call(DescribeClusterRequest())
        *_, served = broker._server._connections  # the last one connected
        until = served.received_requests + _REQUESTS_OF_FLOOD
        frames = [flood.encode(DescribeClusterRequest()) for _ in range(_REQUESTS_OF_FLOOD)]
        flood.send_raw(b"".join(frames))
        most = 0
        while served.received_requests < until:
            before = served.received_requests
            await quiet.call(DescribeClusterRequest())
            most = max(most, served.received_requests - before)
    if most > _REQUESTS_OF_FLOOD // 2:
        return f"{most} requests of one connection were served before one of another"
    return None


async def _lose_track() -> str | None:
    """Check that a produce request whose outcome is unknown gets a retriable error (R30)."""

    def fail(_result: Any, error: Exception) -> int:
        return translate(error).error_code

    response = PendingResults(asyncio.get_running_loop(), [0], fail, Reply)
    response.expect(0)
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    response.begin(1, "not acknowledged within %d ms").then(done.set_result)
    error = broker_error((await done).message[0], "")
    return None if error.retriable else f"the outcome is unknown, and the error is final: {error!r}"


class _Timers:
    """A loop that records the seconds of each timer."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    def call_later(self, delay_s: float, _callback: object) -> None:
        self.delays_s.append(delay_s)


async def _wait_for_weeks() -> str | None:
    """Check that a long poll for 25 days is answered after MAX_WAIT_MS (S25)."""
    timers: Any = _Timers()
    HeldResponse(timers, 2**31, lambda: None).offer(None)
    waits_ms = max(timers.delays_s) * 1000
    return None if waits_ms <= MAX_WAIT_MS else f"a request waits for {waits_ms:.0f} ms"


async def _name_many_groups() -> str | None:
    """Check that a request for more groups than the limit is refused as a whole (S25)."""
    async with _broker() as broker, WireClient(broker.address) as wire:
        names = [f"group-{number}" for number in range(MAX_GROUPS_PER_REQUEST + 1)]
        response = await wire.call(DeleteGroupsRequest(names))
    return None if response.error_code else f"one request deleted {len(response.groups)} groups"


async def _create_many_topics() -> str | None:
    """Check that no topic is created beyond max.topics (S26)."""
    async with _broker(max_topics=1) as broker, WireClient(broker.address) as wire:
        topics = [NewTopic(f"topic-{number}", 1, 1, {}) for number in range(2)]
        response = await wire.call(CreateTopicsRequest(1_000, False, topics))
    codes = [topic.error_code for topic in response.topics]
    return None if codes == [0, ErrorCode.POLICY_VIOLATION] else "a cluster has more topics than max.topics"


async def _create_many_groups() -> str | None:
    """Check that no group is created beyond group.max.count, by a member or a commit (S26)."""
    coordinator = Coordinator(GroupSettings(max_count=1), t=1)
    coordinator.commit({(_TOPIC, 0): 1})
    with suppress(PolicyViolationError):
        coordinator.commit({(_TOPIC, 0): 1}, group_id="other")
        return "a commit adds a group beyond group.max.count"
    with suppress(PolicyViolationError):
        coordinator.ask(Consumer(coordinator, "member", _TOPIC).request()._replace(group_id="other"))
        return "a member adds a group beyond group.max.count"
    return None


async def _commit_many_offsets() -> str | None:
    """Check that no offset is added beyond group.max.offsets (S26)."""
    codes = Coordinator(GroupSettings(max_offsets=1), t=2).commit({(_TOPIC, 0): 1, (_TOPIC, 1): 1})
    if codes != [0, ErrorCode.POLICY_VIOLATION]:
        return "a group has more than group.max.offsets"
    coordinator = Coordinator(GroupSettings(max_offsets=1), t=2)
    coordinator.commit({(_TOPIC, 0): 1}, producer_id=1)
    codes = coordinator.commit({(_TOPIC, 1): 1}, producer_id=2)
    return None if codes == [ErrorCode.POLICY_VIOLATION] else "transactions exceed group.max.offsets"


async def _use_many_names() -> str | None:
    """Check that no transactional id is added beyond transactional.id.max.count (S26)."""
    machine = TransactionMachine(TransactionSettings(max_count=1))
    now = Instant(1, 1)
    for record in machine.decide(
        InitProducerId("a", 1_000, reserved_producer_id=1), _CALLER, now, {}
    ).records:
        machine.replay(record, now)
    with suppress(PolicyViolationError):
        machine.decide(InitProducerId("b", 1_000, reserved_producer_id=2), _CALLER, now, {})
        return "a coordinator has more names than transactional.id.max.count"
    return None


def _broker(**settings: Any) -> Broker:
    return Broker(listeners="127.0.0.1:0", **settings)


def _run(schedule: Callable[[], Any]) -> Callable[[], str | None]:
    def run() -> str | None:
        logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
        violation: str | None = asyncio.run(schedule())
        return violation

    return run


DIRECTED: Final = {
    "S22-unreadable": _run(_produce_garbage),
    "S23-repeated": _run(_fetch_repeatedly),
    "S24-all-at-once": _run(_flood),
    "S25-wait-uncut": _run(_wait_for_weeks),
    "S25-uncounted": _run(_name_many_groups),
    "S26-topics-unlimited": _run(_create_many_topics),
    "S26-groups-unlimited": _run(_create_many_groups),
    "S26-offsets-unlimited": _run(_commit_many_offsets),
    "S26-staged-uncounted": _run(_commit_many_offsets),
    "S26-names-unlimited": _run(_use_many_names),
    "R30-unknown-is-final": _run(_lose_track),
}
