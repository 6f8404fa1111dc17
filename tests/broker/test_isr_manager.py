"""IsrManager: proposals are sent together, repeated without a decision, and take effect with the metadata
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.broker.replication import isr_manager
from kafkalite.broker.replication.isr_manager import IsrManager
from kafkalite.clock import SystemClock
from kafkalite.errors import RequestTimedOutError
from kafkalite.metadata.image import BrokerState, ClusterImage
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    AlterPartitionResponse,
    ChangedPartition,
    PartitionChange,
)
from proof.waiting import eventually


class FakePartition:
    """Proposes one change until its epoch has moved on; counts undecided proposals."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = ("t", number)
        self.leads_followers = True
        self.partition_epoch = 3
        self.is_leader = True
        self.is_awaiting_replica = False
        self.is_pending = False
        self.undecided_count = 0

    def propose_isr(self, now_ms: int, *, lag_time_max_ms: int, live: Any) -> PartitionChange | None:
        assert (live(1), live(2), live(3)) == (11, None, None)
        if self.is_pending or self.partition_epoch > 3:
            return None
        self.is_pending = True
        return PartitionChange("t", self.number, 0, 3, [1, 2], [-1, 5])

    def on_undecided(self) -> None:
        self.undecided_count += 1
        self.is_pending = False


class FakeChannel:
    """The controller. ``answer`` returns its result for one change."""

    def __init__(self, answer: Callable[[PartitionChange], ChangedPartition]) -> None:
        self.answer = answer
        self.requests: list[AlterPartitionRequest] = []
        self.failures = 0
        self.is_silent = False

    async def send(self, request: AlterPartitionRequest, timeout_ms: int) -> AlterPartitionResponse:
        self.requests.append(request)
        if self.is_silent:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise RequestTimedOutError("no response")
        return AlterPartitionResponse(0, None, [self.answer(change) for change in request.partitions])


def accepted(change: PartitionChange) -> ChangedPartition:
    return ChangedPartition("t", change.partition, 0, None, 1, 0, change.isr, change.partition_epoch + 1)


def refused(change: PartitionChange) -> ChangedPartition:
    return ChangedPartition("t", change.partition, 107, "not now", 1, 0, [1], change.partition_epoch)


def partition(number: int) -> Any:
    return FakePartition(number)


def manager(channel: FakeChannel, partitions: list[Any]) -> IsrManager:
    led = SimpleNamespace(led=lambda: partitions)
    made = IsrManager(
        SystemClock(),
        led,  # type: ignore[arg-type]
        channel,  # type: ignore[arg-type]
        node_id=1,
        lag_ms=100,
        on_awaited=lambda _: None,
    )
    brokers = {1: BrokerState(1, 11, (), None, 0), 2: BrokerState(2, 12, (), None, 0, is_fenced=True)}
    made.image = ClusterImage(brokers=brokers)
    made.broker_epoch = 11
    return made


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isr_manager, "RETRY_MS", 5)


async def _run(made: IsrManager, until: Callable[[], object]) -> None:
    passes = (made.send_forever(), made.look_forever(), made.end_waits_forever())
    tasks = [asyncio.ensure_future(one) for one in passes]
    try:
        async with asyncio.timeout(30):
            await eventually(until)
    finally:
        for task in tasks:
            task.cancel()


async def test_proposals_of_one_turn_go_together_and_wait_for_the_metadata() -> None:
    channel = FakeChannel(accepted)
    several = [partition(number) for number in range(3)]
    made = manager(channel, several)
    for one in several:
        made.consider(one)
    await _run(made, lambda: channel.requests and not made._gathered)
    (request,) = channel.requests
    assert (request.node_id, request.broker_epoch, len(request.partitions)) == (1, 11, 3)
    assert not any(one.undecided_count for one in several)  # the image has the result


async def test_a_decision_missing_from_the_metadata_is_proposed_again() -> None:
    channel = FakeChannel(accepted)
    one = partition(0)
    made = manager(channel, [one])
    made.look_around()
    await _run(made, lambda: len(channel.requests) >= 2)
    assert one.undecided_count


async def test_after_a_refusal_or_a_lost_response_the_same_is_proposed_again() -> None:
    """R14: neither means that the change was not made."""
    channel = FakeChannel(refused)
    channel.failures = 2
    one = partition(0)
    made = manager(channel, [one])
    made.consider(one)
    await _run(made, lambda: len(channel.requests) >= 4)
    assert one.undecided_count >= 3
    assert all(request.partitions == channel.requests[0].partitions for request in channel.requests)


async def test_a_wait_for_a_joining_replica_ends_without_the_controller() -> None:
    """Otherwise acks=all would wait until a controller responds."""

    class Waiting(FakePartition):
        checks = 0

        def propose_isr(self, now_ms: int, *, lag_time_max_ms: int, live: Any) -> None:
            self.checks += 1
            self.is_awaiting_replica = self.checks < 3

    channel = FakeChannel(accepted)
    channel.is_silent = True
    one: Any = Waiting(1)
    made = manager(channel, [])
    made.consider(partition(0))
    made.consider(one)
    await _run(made, lambda: channel.requests and one.checks >= 3)
    assert not one.is_awaiting_replica


async def test_a_decision_already_in_the_image_needs_no_response() -> None:
    channel = FakeChannel(accepted)
    one = partition(0)
    made = manager(channel, [one])
    made.consider(one)
    one.partition_epoch = 4
    await _run(made, lambda: channel.requests and not made._awaited)
    assert one.undecided_count == 0
