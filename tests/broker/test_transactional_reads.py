"""What readers and operators see of transactions: Fetch, ListOffsets, DescribeProducers (R11, R33).

The transactions are written directly to the partition, as by the handlers of produce and of markers.
Covers ``handlers/fetch.py``, ``handlers/data.py`` and ``handlers/transactions.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.broker.broker import Broker
from kafkalite.broker.handlers import HANDLERS
from kafkalite.broker.handlers.transactions import describe_producers
from kafkalite.errors import ErrorCode
from kafkalite.model import LATEST
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import data, transactions
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check
from kafkalite.replication.partition import Partition
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

Make = Callable[..., Any]
SOON_S = 5.0


class Writer:
    """Writes to one partition of the broker, as its handlers would."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def plain(self, size: int = 5) -> None:
        batch = build_batch([b"v" * size], timestamps_ms=self.now_ms())
        self.partition.append(batch, check(batch), self.now_ms(), -1)

    def part(self, producer: int, sequence: int = 0, *, epoch: int = 0, size: int = 5) -> Any:
        batch = build_batch(
            [b"v" * size],
            timestamps_ms=self.now_ms(),
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        return self.partition.append(batch, check(batch), self.now_ms(), -1, is_verified=True)

    def marker(self, producer: int, *, is_commit: bool, epoch: int = 1) -> Any:
        return self.partition.append_marker(producer, epoch, 0, is_commit, self.now_ms())


@pytest_asyncio.fixture
async def writer(broker: Broker, wire: WireClient, new_topic: Make) -> Writer:
    await wire.call(new_topic("t", durability="page-cache"))
    return Writer(broker.partitions.leader("t", 0))


def fetch(offset: int = 0, *, level: int = 1, wait_ms: int = 0, min_bytes: int = 1) -> data.FetchRequest:
    asked = data.FetchPartition("t", 0, -1, offset, 2**20)
    return data.FetchRequest(wait_ms, min_bytes, 2**20, level, [asked])


def listed(level: int, timestamp_ms: int = LATEST) -> data.ListOffsetsRequest:
    return data.ListOffsetsRequest(level, [data.ListOffsetsPartition("t", 0, -1, timestamp_ms)])


async def read(wire: WireClient, offset: int = 0, **options: Any) -> Any:
    (partition,) = (await wire.call(fetch(offset, **options))).partitions
    return partition


def pairs(partition: Any) -> list[tuple[int, int]]:
    return [(one.producer_id, one.first_offset) for one in partition.aborted]


async def test_readers_of_committed_records_receive_the_aborted_transactions(
    wire: WireClient, writer: Writer
) -> None:
    writer.plain()  # 0
    writer.part(1)  # 1
    writer.part(2)  # 2
    writer.part(1, 1)  # 3
    writer.marker(1, is_commit=False)  # 4
    writer.part(3)  # 5
    writer.marker(3, is_commit=True)  # 6
    everything = await read(wire, level=0)
    assert (everything.high_watermark, everything.last_stable_offset, everything.aborted) == (7, 2, [])
    stable = await read(wire)
    assert (stable.high_watermark, stable.last_stable_offset) == (7, 2)
    assert 0 < stable.length_bytes < everything.length_bytes
    assert pairs(stable) == [(1, 1)]
    writer.marker(2, is_commit=False)  # 7
    stable = await read(wire)
    assert (stable.last_stable_offset, pairs(stable)) == (8, [(1, 1), (2, 2)])
    assert pairs(await read(wire, 5)) == [(2, 2)]
    assert (await read(wire, 8)).aborted == []
    assert (await read(wire, level=0)).aborted == []


async def test_the_end_of_committed_records_is_the_last_stable_offset(
    wire: WireClient, writer: Writer
) -> None:
    writer.plain()
    writer.part(1)
    ends = [(await wire.call(listed(level))).partitions[0].offset for level in (0, 1)]
    assert ends == [2, 1]
    writer.marker(1, is_commit=True)
    assert (await wire.call(listed(1))).partitions[0].offset == 3


@pytest.mark.parametrize("request_of", [fetch, listed])
async def test_an_unknown_isolation_level_is_refused(
    wire: WireClient, writer: Writer, request_of: Make
) -> None:
    answer = await wire.call(request_of(level=2))
    assert isinstance(answer, RequestError)
    assert answer.error_code == ErrorCode.INVALID_REQUEST


async def test_a_waiting_reader_wakes_when_the_transaction_ends_not_before(
    wire: WireClient, writer: Writer, broker: Broker
) -> None:
    writer.part(1, size=5_000)
    waiting = asyncio.ensure_future(wire.call(fetch(wait_ms=60_000, min_bytes=4_000)))
    await eventually(lambda: len(broker._services.waiters))
    for sequence in range(1, 20):
        writer.part(1, sequence)
        await asyncio.sleep(0)
    assert not waiting.done()
    writer.marker(1, is_commit=True)
    (partition,) = (await asyncio.wait_for(waiting, SOON_S)).partitions
    assert (partition.last_stable_offset, partition.aborted) == (21, [])
    assert partition.length_bytes > 5_000


async def test_a_waiting_reader_gets_records_before_the_open_transaction(
    wire: WireClient, writer: Writer, broker: Broker
) -> None:
    waiting = asyncio.ensure_future(wire.call(fetch(wait_ms=60_000)))
    await eventually(lambda: len(broker._services.waiters))
    writer.plain()
    writer.part(1)
    (partition,) = (await asyncio.wait_for(waiting, SOON_S)).partitions
    assert (partition.high_watermark, partition.last_stable_offset) == (2, 1)


async def test_a_waiting_reader_receives_an_error_when_the_topic_is_deleted(
    wire: WireClient, writer: Writer, broker: Broker
) -> None:
    from kafkalite.protocol.messages import admin

    writer.part(1)
    async with WireClient(broker.address) as other:
        waiting = asyncio.ensure_future(other.call(fetch(wait_ms=60_000)))
        await eventually(lambda: len(broker._services.waiters))
        await wire.call(admin.DeleteTopicsRequest(5_000, ["t"]))
        (partition,) = (await asyncio.wait_for(waiting, SOON_S)).partitions
    assert partition.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_markers_are_awaited_as_any_batch(broker: Broker, wire: WireClient, new_topic: Make) -> None:
    await wire.call(new_topic("t", durability="fsync"))
    writer = Writer(broker.partitions.leader("t", 0))
    writer.part(1)
    appended = writer.marker(1, is_commit=True)
    assert writer.partition.high_watermark <= appended.last_offset
    committed = asyncio.get_running_loop().create_future()
    broker._services.waiters.committed(writer.partition.key, appended.last_offset + 1, committed.set_result)
    assert await asyncio.wait_for(committed, SOON_S) is None
    assert writer.partition.last_stable_offset == 2
    assert writer.marker(1, is_commit=True).is_duplicate


async def test_state_of_a_coordinator_is_synced_as_any_batch(
    broker: Broker, wire: WireClient, new_topic: Make
) -> None:
    await wire.call(new_topic("t", durability="fsync"))
    writer = Writer(broker.partitions.leader("t", 0))
    waiting = asyncio.ensure_future(wire.call(fetch(wait_ms=60_000)))
    await eventually(lambda: len(broker._services.waiters))
    batch = build_batch([b"v"], [b"k"], timestamps_ms=0)
    appended = writer.partition.append_state(batch, check(batch), 0)
    assert (appended.base_offset, writer.partition.high_watermark) == (0, 0)
    (partition,) = (await asyncio.wait_for(waiting, SOON_S)).partitions
    assert partition.high_watermark == 1


def describe(*partitions: tuple[str, int]) -> transactions.DescribeProducersRequest:
    return transactions.DescribeProducersRequest([transactions.TxnPartition(*one) for one in partitions])


async def test_operators_see_the_open_transactions(wire: WireClient, writer: Writer) -> None:
    handler = HANDLERS[ApiKey.DESCRIBE_PRODUCERS]
    assert handler.__wrapped__ is describe_producers  # type: ignore[attr-defined]
    writer.part(9)
    writer.part(9, 1)
    writer.part(4)
    writer.marker(4, is_commit=True)
    answer = await wire.call(describe(("t", 0), ("t", 5), ("nothing", 0)))
    described, *absent = answer.partitions
    assert [one.error_code for one in absent] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 2
    ended, opened = described.producers
    assert (ended.producer_id, ended.producer_epoch, ended.last_sequence) == (4, 1, -1)
    assert (ended.transaction_start_offset, ended.coordinator_epoch) == (-1, 0)
    assert (opened.producer_id, opened.producer_epoch, opened.last_sequence) == (9, 0, 1)
    assert (opened.transaction_start_offset, opened.coordinator_epoch) == (0, -1)
    assert abs(opened.last_timestamp_ms - writer.now_ms()) < 60_000


async def test_after_a_restart_a_producer_has_the_time_of_its_records(
    wire: WireClient, writer: Writer
) -> None:
    appended = writer.part(9)
    writer.partition.log._producers.states = None  # as after a restart
    ((producer,),) = ((await wire.call(describe(("t", 0)))).partitions[0].producers,)
    assert abs(producer.last_timestamp_ms - writer.now_ms()) < 60_000
    assert appended.base_offset == producer.transaction_start_offset == 0
