"""Prebuilt batches, several in flight: ``queue_batch`` of every producer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite import Broker, Consumer, Producer, TransactionGroup, TransactionGroupWriter, sync
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    CorruptBatchError,
    DeliveryFailedError,
    ErrorCode,
    MessageTooLargeError,
    RecordTooLargeError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionStateError,
    UnknownTopicOrPartitionError,
)
from kafkalite.protocol.api import ApiKey
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.header import parse_header


def builder_of(*values: bytes) -> RecordBatchBuilder:
    builder = RecordBatchBuilder()
    builder.extend(values, timestamps_ms=5)
    return builder


def producer_of(broker: Any, **settings: Any) -> Producer:
    servers = broker.bootstrap_servers if isinstance(broker, Broker) else broker.address
    return Producer(servers, linger_ms=0, **settings)


# --- a scripted broker -----------------------------------------------------------------------------------


async def test_several_batches_in_flight_keep_their_order(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 2
    held = asyncio.Event()
    async with producer_of(fake_broker) as producer:
        await producer.partitions_for("t")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(hold=held))
        deliveries = [await producer.queue_batch("t", 0, builder_of(b"%d" % i, b"+")) for i in range(10)]
        other = await producer.queue_batch("t", 1, build_batch([b"other"], timestamps_ms=9))
        assert not any(one.done() for one in deliveries)
        with pytest.raises(asyncio.InvalidStateError):
            deliveries[0].result()
        with pytest.raises(asyncio.InvalidStateError):
            deliveries[0].exception()
        assert "closed" in repr(deliveries[0])
        held.set()
        found = [await one for one in deliveries]
        assert [one.base_offset for one in found] == list(range(0, 20, 2))
        assert {(one.topic, one.partition, one.record_count, one.timestamp_ms) for one in found} == {
            ("t", 0, 2, 5)
        }
        assert (await other).timestamp_ms == 9
        assert deliveries[9].done() and deliveries[9].exception() is None
        assert deliveries[9].result() == found[9]
    assert fake_broker.values("t") == [value for i in range(10) for value in (b"%d" % i, b"+")]
    sequences = [parse_header(batch).base_sequence for batch in fake_broker.logs["t", 0].batches]
    assert sequences == list(range(0, 20, 2))


async def test_no_more_than_buffer_memory_is_in_flight(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    held = asyncio.Event()
    settings: dict[str, Any] = {"buffer_memory": 4000, "max_request_size": 2000, "batch_size": 1000}
    async with producer_of(fake_broker, max_block_ms=20, **settings) as producer:
        await producer.partitions_for("t")
        fake_broker.always[ApiKey.PRODUCE] = make_fault(hold=held)
        queued = []
        with pytest.raises(BufferFullError, match="stayed full for 20 ms"):
            while True:
                queued.append(await producer.queue_batch("t", 0, builder_of(b"x" * 900)))
        assert 3 <= len(queued) <= 4
        assert producer.statistics().free_bytes >= 0
        held.set()
        await producer.flush()
        assert all(one.done() for one in queued)
        assert producer.statistics().free_bytes == 4000


async def test_the_users_buffer_is_left_alone_and_a_builder_may_go_on(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    mine = build_batch([b"mine"], timestamps_ms=1)
    before = bytes(mine)
    builder = builder_of(b"a")
    async with producer_of(fake_broker) as producer:
        first = await producer.queue_batch("t", 0, mine)
        second = await producer.queue_batch("t", 0, builder)
        builder.append(b"b", None, 6)
        third = await producer.queue_batch("t", 0, builder)
        await producer.flush()
        assert [one.result().base_offset for one in (first, second, third)] == [0, 1, 2]
    assert bytes(mine) == before
    assert fake_broker.values("t") == [b"mine", b"a", b"a", b"b"]


async def test_invalid_batches_are_refused_at_once(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with producer_of(fake_broker, max_request_size=1000, buffer_memory=10_000) as producer:
        with pytest.raises(CorruptBatchError):
            await producer.queue_batch("t", 0, b"no batch at all")
        with pytest.raises(RecordTooLargeError, match="build smaller batches"):
            await producer.queue_batch("t", 0, builder_of(b"x" * 2000))
        with pytest.raises(UnknownTopicOrPartitionError):
            await producer.queue_batch("t", 7, builder_of(b"x"))
    with pytest.raises(ClientClosedError):
        await producer.queue_batch("t", 0, builder_of(b"x"))


@pytest.mark.parametrize("looks", [False, True])
async def test_an_unseen_failure_is_raised_by_flush(fake_broker: Any, make_fault: Any, looks: bool) -> None:
    fake_broker.topics["t"] = 1
    async with producer_of(fake_broker) as producer:
        await producer.partitions_for("t")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(code=int(ErrorCode.MESSAGE_TOO_LARGE)))
        delivery = await producer.queue_batch("t", 0, builder_of(b"a", b"b"))
        if looks:
            with pytest.raises(MessageTooLargeError):
                await delivery
            await producer.flush()
        else:
            with pytest.raises(DeliveryFailedError) as failure:
                await producer.flush()
            assert failure.value.record_count == 2
        assert isinstance(delivery.exception(), MessageTooLargeError)


async def test_a_lost_connection_neither_repeats_nor_reorders(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    async with producer_of(fake_broker, retry_backoff_ms=1) as producer:
        await producer.partitions_for("t")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(close=True, serve_first=True))
        deliveries = [await producer.queue_batch("t", 0, builder_of(b"%d" % i)) for i in range(6)]
        assert [(await one).base_offset for one in deliveries] == list(range(6))
    assert fake_broker.values("t") == [b"%d" % i for i in range(6)]


# --- a real broker ---------------------------------------------------------------------------------------


async def _committed(broker: Broker, count: int) -> list[bytes | None]:
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    values: list[bytes | None] = []
    async with Consumer("t", bootstrap_servers=broker.bootstrap_servers, **settings) as consumer:
        while len(values) < count:
            values += [record.value for record in await consumer.get_many(timeout_ms=3000)]
        values += [record.value for record in await consumer.get_many(timeout_ms=20)]
    return values


async def test_queued_batches_are_part_of_the_transaction() -> None:
    async with Broker(listeners="inproc://") as broker:
        async with producer_of(broker, transactional_id="x") as producer:
            with pytest.raises(TransactionStateError):
                await producer.queue_batch("t", 0, builder_of(b"outside"))
            async with producer.transaction():
                for i in range(5):
                    await producer.queue_batch("t", 0, builder_of(b"%d" % i))
            await producer.begin_transaction()
            gone = await producer.queue_batch("t", 0, builder_of(b"never"))
            await producer.abort_transaction()
            assert gone.done()
            async with producer.transaction():
                await producer.queue_batch("t", 0, builder_of(b"5"))
        assert await _committed(broker, 6) == [b"%d" % i for i in range(6)]


async def test_after_a_failed_batch_the_transaction_can_only_be_aborted() -> None:
    async with (
        Broker(listeners="inproc://") as broker,
        producer_of(broker, transactional_id="x", max_request_size=2_000_000) as producer,
    ):
        await producer.begin_transaction()
        await producer.queue_batch("t", 0, builder_of(b"good"))
        await producer.queue_batch("t", 0, builder_of(b"x" * 1_200_000))  # above the topic's limit
        with pytest.raises(TransactionAbortableError):
            await producer.commit_transaction()
        await producer.abort_transaction()


async def test_a_writer_of_a_group_prepares_when_all_is_acknowledged() -> None:
    async with Broker(listeners="inproc://") as broker:
        servers = broker.bootstrap_servers
        async with TransactionGroupWriter("app", 0, "m", servers) as writer:
            deliveries = [await writer.queue_batch("t", 0, builder_of(b"%d" % i)) for i in range(8)]
            prepared = await writer.prepare()
            assert all(one.done() for one in deliveries)
            with pytest.raises(TransactionStateError):
                await writer.queue_batch("t", 0, builder_of(b"late"))
        async with TransactionGroup("app", servers) as group:
            await group.finish(0, [prepared], wait_ms=5000)
        assert await _committed(broker, 8) == [b"%d" % i for i in range(8)]


def test_the_blocking_twins() -> None:
    with sync.Broker(listeners="inproc://") as broker:
        servers = broker.bootstrap_servers
        with sync.Producer(servers, linger_ms=60_000, max_request_size=2_000_000) as producer:
            producer.send("t", b"first", partition=0)
            pendings = [producer.queue_batch("t", 0, builder_of(b"%d" % i), timeout=10) for i in range(20)]
            assert [one.result(10).base_offset for one in pendings] == list(range(1, 21))
            assert pendings[0].done() and pendings[0].exception(1) is None
            assert "PendingBatchDelivery" in repr(pendings[0])
            failed = producer.queue_batch("t", 0, builder_of(b"x" * 1_200_000))
            with pytest.raises(MessageTooLargeError):
                failed.result(10)
            assert isinstance(failed.exception(10), MessageTooLargeError)
            with pytest.raises(RecordTooLargeError):
                producer.queue_batch("t", 0, builder_of(b"x" * 3_000_000))
        with sync.TransactionGroupWriter("app", 0, "m", servers) as writer:
            writer.queue_batch("t", 0, builder_of(b"group"))
            assert writer.prepare(10) is not None
        with sync.Producer(servers, transactional_id="x") as producer:
            producer.begin_transaction()
            gone = producer.queue_batch("t", 0, builder_of(b"never"))
            producer.abort_transaction()
            assert gone.exception(10) is None or isinstance(gone.exception(10), TransactionAbortedError)
