"""Batches that wait for their transaction's coordinator (R31): order, grouping, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.broker.coordination.verification import Verifications
from kafkalite.broker.tasks import TaskSet
from kafkalite.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    InvalidTxnStateError,
    LocalProtocolError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
)
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.header import BatchHeader, parse_header
from kafkalite.testing import VirtualClock


def header_of(sequence: int, *, epoch: int = 0, producer_id: int = 7) -> BatchHeader:
    return parse_header(
        build_batch(
            [b"v"],
            timestamps_ms=1,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
    )


class FakeHosted:
    """A partition that remembers what was appended. ``open`` are the (id, epoch) with an open transaction."""

    def __init__(self, number: int = 0) -> None:
        self.key = TopicPartition("t", number)
        self.log: list[tuple[int, int, int]] = []
        self.open: set[tuple[int, int]] = set()
        self.errors: list[Exception] = []

    def needs_verification(self, header: BatchHeader) -> bool:
        return (header.producer_id, header.producer_epoch) not in self.open

    def append(
        self, batch: Any, header: BatchHeader, now_ms: int, acks: int, is_verified: bool = False
    ) -> tuple[Any, int]:
        if self.errors:
            raise self.errors.pop(0)
        assert is_verified or not self.needs_verification(header)
        self.open.add((header.producer_id, header.producer_epoch))
        self.log.append((header.producer_id, header.producer_epoch, header.base_sequence))
        return SimpleNamespace(base_offset=len(self.log) - 1)


class World:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, list[TopicPartition]]] = []
        self.answers: list[asyncio.Future[None]] = []
        self.hosted = {number: FakeHosted(number) for number in range(3)}
        self.outcomes: list[Any] = []
        self.failures: list[BaseException] = []
        self.tasks = TaskSet(self.failures.append)
        leaders: Any = SimpleNamespace(leader=lambda _, number: self.hosted[number])
        self.waiting = Verifications(self.verify, leaders, VirtualClock(), self.tasks)

    async def verify(self, name: str, producer_id: int, epoch: int, keys: Sequence[TopicPartition]) -> None:
        self.asked.append((name, producer_id, epoch, list(keys)))
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]

    def send(self, sequence: int, *, partition: int = 0, epoch: int = 0, hosted: Any = None) -> Any:
        header = header_of(sequence, epoch=epoch)

        def then(appended: Any, error: Exception | None) -> None:
            self.outcomes.append((partition, epoch, sequence, error))

        where = hosted or self.hosted[partition]
        return self.waiting.append(where, memoryview(b""), header, "txn", -1, then)

    async def response(self, number: int = 0, error: Exception | None = None) -> None:
        if error is None:
            self.answers[number].set_result(None)
        else:
            self.answers[number].set_exception(error)
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.tasks.cancel()
    assert not made.failures


async def test_an_open_transaction_does_not_wait(world: World) -> None:
    world.hosted[0].open.add((7, 0))
    assert world.send(5) is not None
    assert not world.asked
    assert len(world.waiting) == 0


async def test_the_first_waits_and_the_others_behind_it(world: World) -> None:
    assert [world.send(number) for number in range(3)] == [None] * 3
    await turns()
    assert world.asked == [("txn", 7, 0, [TopicPartition("t", 0)])]
    assert world.hosted[0].log == []
    await world.response()
    assert world.hosted[0].log == [(7, 0, 0), (7, 0, 1), (7, 0, 2)]
    assert [(sequence, error) for _, _, sequence, error in world.outcomes] == [
        (0, None),
        (1, None),
        (2, None),
    ]
    assert world.send(3) is not None


async def test_an_error_of_the_verification_fails_the_waiting_batches(world: World) -> None:
    world.send(0)
    await turns()
    await world.response(error=LocalProtocolError("that broker does not know AddPartitionsToTxn"))
    ((_, _, _, error),) = world.outcomes
    assert isinstance(error, LocalProtocolError)
    assert len(world.waiting) == 0


async def test_partitions_of_one_turn_are_verified_together(world: World) -> None:
    for partition in (0, 1, 2):
        world.send(0, partition=partition)
    await turns()
    assert [keys for _, _, _, keys in world.asked] == [[TopicPartition("t", n) for n in range(3)]]
    await world.response()
    assert [hosted.log for hosted in world.hosted.values()] == [[(7, 0, 0)]] * 3


async def test_a_later_partition_is_verified_on_its_own(world: World) -> None:
    world.send(0)
    await turns()
    world.send(0, partition=1)
    await turns()
    assert len(world.asked) == 2
    await world.response(1)
    assert (world.hosted[0].log, world.hosted[1].log) == ([], [(7, 0, 0)])
    await world.response(0)
    assert world.hosted[0].log == [(7, 0, 0)]


async def test_a_refusal_fails_every_batch_of_that_transaction(world: World) -> None:
    refusal = InvalidTxnStateError("it has ended")
    world.send(0)
    world.send(1)
    await turns()
    world.send(0, epoch=1)
    await world.response(0, refusal)
    assert [error for *_, error in world.outcomes] == [refusal, refusal]
    assert world.asked[1:] == [("txn", 7, 1, [TopicPartition("t", 0)])], "the next one asks for itself"
    await world.response(1)
    assert world.hosted[0].log == [(7, 1, 0)]


async def test_batches_behind_a_retriable_error_are_not_appended(world: World) -> None:
    error = NotEnoughReplicasError("not now")
    world.hosted[0].errors.append(error)
    world.send(0)
    world.send(1)
    await turns()
    await world.response()
    assert [outcome[-1] for outcome in world.outcomes] == [error, error]
    assert world.hosted[0].log == []
    assert world.send(0) is None, "it asks again"
    await turns()
    await world.response(1)
    assert world.hosted[0].log == [(7, 0, 0)]


async def test_another_producers_batches_do_not_wait(world: World) -> None:
    world.send(0)
    other = header_of(0, producer_id=8)
    world.hosted[0].open.add((8, 0))
    assert world.waiting.append(
        world.hosted[0],
        memoryview(b""),
        other,
        "other",
        -1,
        lambda *_: None,  # type: ignore[arg-type]
    )
    await turns()
    await world.response()
    assert world.hosted[0].log == [(8, 0, 0), (7, 0, 0)]


async def test_a_partition_that_was_created_again_meanwhile_takes_no_batch(world: World) -> None:
    world.send(0)
    await turns()
    world.hosted[0] = FakeHosted()
    await world.response()
    assert isinstance(world.outcomes[0][-1], NotLeaderOrFollowerError)
    assert world.hosted[0].log == []


@pytest.mark.parametrize("error", [ConcurrentTransactionsError("busy"), InvalidTxnStateError("no")])
async def test_refused_batches_leave_nothing_behind(world: World, error: BrokerError) -> None:
    for _ in range(3):
        world.send(0)
        await turns()
        await world.response(len(world.answers) - 1, error)
    assert len(world.outcomes) == len(world.asked) == 3
    assert len(world.waiting) == 0


async def test_a_batch_sent_from_a_callback_keeps_the_order(world: World) -> None:
    """A batch sent while the batches before it are being appended goes behind them."""
    seen: list[int] = []

    def then(_: Any, error: Exception | None) -> None:
        seen.append(0)
        world.send(2)

    hosted: Any = world.hosted[0]
    world.waiting.append(hosted, memoryview(b""), header_of(0), "txn", -1, then)
    world.send(1)
    await turns()
    await world.response()
    assert world.hosted[0].log == [(7, 0, 0), (7, 0, 1), (7, 0, 2)]


async def test_a_stop_drops_waiting_batches(world: World) -> None:
    world.send(0)
    await turns()
    await world.tasks.cancel()
    assert len(world.waiting) == 0
    assert world.outcomes == []
