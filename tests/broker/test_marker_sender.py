"""The markers of decided transactions: when, where, how often, and until when they are sent (R32, R33)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.broker.coordination import marker_sender
from kafkalite.broker.coordination.marker_sender import MarkerSender
from kafkalite.broker.server.responses import Refusal, Reply
from kafkalite.broker.tasks import TaskSet
from kafkalite.errors import ConnectionFailedError, ErrorCode
from kafkalite.protocol.messages.transactions import (
    TxnMarker,
    TxnPartition,
    TxnPartitionResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
    WrittenMarker,
)
from kafkalite.transactions.commands import MarkersWritten, PendingMarker
from proof.waiting import eventually, settle


def marker(name: str = "txn", *at: tuple[str, int], epoch: int = 1, is_commit: bool = True) -> PendingMarker:
    partitions = tuple(TxnPartition(*one) for one in at or (("t", 0),))
    return PendingMarker(name, 7, epoch, is_commit, partitions)


class FakeShard:
    """A coordinator whose decisions are ``pending``, committed up to ``high_watermark``."""

    def __init__(self) -> None:
        self.machine = self
        self.coordinator_epoch = 3
        self.is_closed = False
        self.end_offset = 10
        self.high_watermark = 10
        self.pending: list[PendingMarker] = []
        self.written: list[MarkersWritten] = []
        self.refusals: list[ErrorCode] = []

    def pending_markers(self) -> list[PendingMarker]:
        return list(self.pending)

    def submit(self, command: Any) -> Any:
        if self.refusals:
            return Refusal(self.refusals.pop(0), "not now")
        self.written.append(command)
        self.pending = [one for one in self.pending if one.transactional_id != command.transactional_id]
        return Reply(None)


class World:
    def __init__(self) -> None:
        self.leaders = {"t": [1, 2, 1]}
        self.sent: list[tuple[int, list[TxnMarker]]] = []
        self.faults: list[Callable[[TxnPartition], int] | Exception] = []
        self.completed: list[str] = []
        self.failures: list[BaseException] = []
        self.tasks = TaskSet(self.failures.append)
        self.gate = asyncio.Event()
        self.gate.set()
        loop = asyncio.get_running_loop()
        self.sender = MarkerSender(self.send, self.image, self.tasks, loop, self.completed.append)
        self.shard = FakeShard()

    def image(self) -> Any:
        topics = {
            name: SimpleNamespace(partitions=[SimpleNamespace(leader=leader) for leader in leaders])
            for name, leaders in self.leaders.items()
        }
        return SimpleNamespace(topics=topics)

    async def send(self, node_id: int, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        self.sent.append((node_id, request.markers))
        await self.gate.wait()
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        code = fault or (lambda _: 0)
        return WriteTxnMarkersResponse(
            0,
            None,
            [
                WrittenMarker(
                    one.producer_id,
                    0,
                    None,
                    [TxnPartitionResult(*at, code(at), None) for at in one.partitions],
                )
                for one in request.markers
            ],
        )

    def places(self) -> list[tuple[int, list[int]]]:
        """Return the node and the partitions of each request."""
        return [
            (node_id, [at.partition for one in markers for at in one.partitions])
            for node_id, markers in self.sent
        ]

    async def done(self) -> None:
        async with asyncio.timeout(30):
            await eventually(lambda: not len(self.sender))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(marker_sender, "FIRST_RETRY_MS", 1)
    monkeypatch.setattr(marker_sender, "MAX_RETRY_MS", 4)
    made = World()
    yield made
    made.sender.close()
    await made.tasks.cancel()
    assert not made.failures


async def test_each_leader_is_sent_its_own_markers(world: World) -> None:
    world.shard.pending = [marker("a", ("t", 0), ("t", 1), ("t", 2)), marker("b", ("t", 1), is_commit=False)]
    world.sender.on_change(world.shard)
    await world.done()
    assert world.places() == [(1, [0, 2]), (2, [1, 1])]
    (_, (a, b)) = world.sent[1]
    assert (a.is_commit, b.is_commit) == (True, False)
    assert (a.producer_id, a.producer_epoch, a.coordinator_epoch) == (7, 1, 3)
    assert {one.transactional_id: one.partitions for one in world.shard.written} == {
        "a": tuple(TxnPartition("t", n) for n in range(3)),
        "b": (TxnPartition("t", 1),),
    }
    assert sorted(world.completed) == ["a", "b"]


async def test_nothing_is_sent_before_the_decision_is_committed(world: World) -> None:
    """R32"""
    world.shard.pending = [marker()]
    world.shard.high_watermark = 9
    world.sender.on_change(world.shard)
    await turns()
    assert world.sent == []
    world.shard.end_offset = 12  # records of others
    world.shard.high_watermark = 10
    world.sender.on_change(world.shard)
    await world.done()
    assert world.places() == [(1, [0])]


async def test_a_marker_is_sent_once_however_often_the_shard_changes(world: World) -> None:
    world.shard.pending = [marker()]
    world.gate.clear()
    for _ in range(5):
        world.sender.on_change(world.shard)
        await turns()
    world.gate.set()
    await world.done()
    assert len(world.sent) == len(world.shard.written) == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda _: ErrorCode.NOT_LEADER_OR_FOLLOWER,
        lambda _: ErrorCode.REQUEST_TIMED_OUT,
        lambda at: ErrorCode.NOT_ENOUGH_REPLICAS if at.partition == 2 else 0,
        ConnectionFailedError("gone"),
    ],
)
async def test_markers_that_were_not_written_are_sent_again(world: World, fault: Any) -> None:
    """R32: complete when all are written, and not before."""
    world.shard.pending = [marker("txn", ("t", 0), ("t", 2))]
    world.faults = [fault, fault, fault]
    world.sender.on_change(world.shard)
    await asyncio.sleep(0)
    await turns()
    assert world.shard.written == []
    await world.done()
    assert len(world.sent) == 4
    assert len(world.shard.written) == 1


async def test_a_later_marker_implies_that_this_one_is_written(world: World) -> None:
    world.shard.pending = [marker()]
    world.faults = [lambda _: ErrorCode.INVALID_PRODUCER_EPOCH]
    world.sender.on_change(world.shard)
    await world.done()
    assert len(world.sent) == len(world.shard.written) == 1


async def test_deleted_partitions_need_no_marker(world: World) -> None:
    world.shard.pending = [marker("some", ("gone", 0), ("t", 0)), marker("none", ("gone", 0), ("t", 9))]
    world.sender.on_change(world.shard)
    await world.done()
    assert world.places() == [(1, [0])]
    assert sorted(world.completed) == ["none", "some"]


async def test_a_marker_waits_for_a_leader_and_is_sent_to_the_new_one(world: World) -> None:
    world.leaders["t"][0] = -1
    world.shard.pending = [marker()]
    world.sender.on_change(world.shard)
    await settle()
    assert world.sent == []
    world.leaders["t"][0] = 5
    world.sender.on_image(world.image())
    await world.done()
    assert world.places() == [(5, [0])]


async def test_a_former_coordinator_sends_no_markers(world: World) -> None:
    world.shard.pending = [marker("txn", ("t", 0), ("t", 1))]
    world.faults = [ConnectionFailedError("gone")] * 2
    world.gate.clear()
    world.sender.on_change(world.shard)
    await turns()
    assert len(world.sent) == 2
    world.shard.is_closed = True
    world.sender.on_close(world.shard)
    world.gate.set()
    await settle()
    assert len(world.sent) == 2
    assert world.shard.written == []
    assert len(world.sender) == 0


async def test_a_completion_that_could_not_be_recorded_is_repeated(world: World) -> None:
    world.shard.pending = [marker()]
    world.shard.refusals = [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    world.sender.on_change(world.shard)
    async with asyncio.timeout(30):
        await eventually(lambda: world.shard.written)
    assert len(world.sent) == 2, "the marker is idempotent"


async def test_requests_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_sender, "MAX_PARTITIONS_PER_REQUEST", 10)
    world.leaders["t"] = [1] * 95
    world.gate.clear()
    world.shard.pending = [marker(f"n{n}", *(("t", at) for at in range(95))) for n in range(2)]
    world.sender.on_change(world.shard)
    await turns()
    assert len(world.sent) == marker_sender.MAX_IN_FLIGHT
    world.gate.set()
    await world.done()
    assert sum(len(partitions) for _, partitions in world.places()) == 190
    assert max(len(partitions) for _, partitions in world.places()) == 10


async def test_the_next_transaction_of_an_id_is_another_one(world: World) -> None:
    world.shard.pending = [marker(epoch=1)]
    world.sender.on_change(world.shard)
    await world.done()
    world.shard.pending = [marker(epoch=2)]
    world.sender.on_change(world.shard)
    await world.done()
    assert [one.producer_epoch for one in world.shard.written] == [1, 2]
