"""The consumer against a broker with faults."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from typing import Any

import pytest

from kafkalite.client.cluster import list_offsets
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    ConnectionFailedError,
    CorruptBatchError,
    ErrorCode,
    KafkaStorageError,
    LogTruncationError,
    NoOffsetError,
    NotSubscribedError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
)
from kafkalite.model import Record, TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.records.builder import build_batch
from kafkalite.records.header import HEADER_BYTES, seal
from kafkalite.rng import seeded_rng
from proof.waiting import eventually, settle

FAST = {
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 5,
    "reconnect_backoff_ms": 1,
    "reconnect_backoff_max_ms": 5,
}
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def _consumer(broker: Any, *topics: str, **settings: Any) -> Consumer:
    given = {"auto_offset_reset": "earliest", **FAST, **settings}
    return Consumer(*topics, bootstrap_servers=broker.address, rng=seeded_rng(1), **given)


def _fill(broker: Any, topic: str = "t", partitions: int = 1, count: int = 30, per_batch: int = 10) -> None:
    broker.topics[topic] = partitions
    for partition in range(partitions):
        for first in range(0, count, per_batch):
            numbers = range(first, first + per_batch)
            broker.append(
                topic,
                partition,
                build_batch([b"%d" % i for i in numbers], None, [1000 + 10 * i for i in numbers]),
            )


def _numbers(records: list[Record]) -> list[int]:
    return [int(record.value or b"") for record in records]


async def _read(consumer: Consumer, count: int) -> list[int]:
    records: list[Record] = []
    async with asyncio.timeout(30):
        while len(records) < count:
            records += await consumer.get_many(count - len(records), timeout_ms=5000)
    return _numbers(records)


# --- reading -------------------------------------------------------------------------------------


async def test_iteration_returns_every_record_in_order(fake_broker: Any) -> None:
    _fill(fake_broker, partitions=2)
    last: dict[int, int] = {}
    async with _consumer(fake_broker, "t") as consumer:
        count = 0
        async for record in consumer:
            assert record.offset == last.get(record.partition, -1) + 1
            last[record.partition] = record.offset
            count += 1
            if count == 60:
                break
        assert consumer.position(T0) == consumer.position(T1) == 30


async def test_a_loop_that_is_left_loses_nothing(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t") as consumer:
        seen = []
        for _ in range(3):
            async for record in consumer:
                seen.append(record.offset)
                if len(seen) % 4 == 0:
                    break
        assert consumer.position(T0) == 12
        one = await consumer.get_one(timeout_ms=1000)
        assert one is not None and one.offset == 12
        assert seen == list(range(12))
        (batch, last) = await consumer.get_batches(timeout_ms=1000)
        assert (batch.from_offset, len(batch), len(last)) == (13, 7, 10)
    assert consumer.assignment() == []


async def test_get_many_honours_its_bounds(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t", max_poll_records=7) as consumer:
        assert _numbers(await consumer.get_many(timeout_ms=1000)) == list(range(7))
        assert _numbers(await consumer.get_many(15, timeout_ms=1000)) == list(range(7, 22))
        assert await consumer.get_many(0) == []
        assert await _read(consumer, 8) == list(range(22, 30))
        assert await consumer.get_many(timeout_ms=20) == []
        assert await consumer.get_one(timeout_ms=0) is None


async def test_a_long_poll_wakes_with_the_append(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _consumer(fake_broker, "t", fetch_max_wait_ms=30_000) as consumer:
        waiting = asyncio.ensure_future(consumer.get_many())
        async with asyncio.timeout(20):
            await eventually(lambda: fake_broker.count(ApiKey.FETCH))
        await settle()  # without a response, and without a resend
        assert (waiting.done(), fake_broker.count(ApiKey.FETCH)) == (False, 1)
        fake_broker.append("t", 0, build_batch([b"1"]))
        assert _numbers(await asyncio.wait_for(waiting, 30)) == [1]


async def test_nothing_is_fetched_before_the_first_call_for_records(fake_broker: Any) -> None:
    """C1"""
    _fill(fake_broker)
    async with _consumer(fake_broker, "t") as consumer:
        await settle()
        assert fake_broker.count(ApiKey.FETCH) == 0
        assert repr(consumer) == "<Consumer open, 1 partitions @ 1 brokers, 0 bytes fetched ahead>"


async def test_fetching_runs_ahead_within_bounds(fake_broker: Any) -> None:
    _fill(fake_broker, count=1000)
    async with _consumer(fake_broker, "t", max_partition_fetch_bytes=500, fetch_max_bytes=2000) as consumer:
        await consumer.get_many(1, timeout_ms=1000)
        await settle()
        ahead = sum(state.buffered_bytes for state in consumer._assigned.partitions.values())
        assert 0 < ahead <= 1500
        assert await _read(consumer, 999) == list(range(1, 1000))


async def test_columns_and_arrow(fake_broker: Any) -> None:
    pytest.importorskip("pyarrow")
    _fill(fake_broker, count=20)
    async with _consumer(fake_broker, "t") as consumer:
        await consumer.seek(T0, 5)
        (first, second) = await consumer.get_batches(timeout_ms=1000)
        assert [len(first), len(second)] == [5, 10]
        assert _numbers(first.records()) == [5, 6, 7, 8, 9]
        await consumer.seek(T0, 5)
        table = await consumer.to_arrow(timeout_ms=1000)
        assert table.column_names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
        assert table["offset"].to_pylist() == list(range(5, 20))
        assert set(table["topic"].to_pylist()) == {"t"}
        empty = await consumer.to_arrow(timeout_ms=1)
        assert (empty.num_rows, empty.schema) == (0, table.schema)


# --- assignment ----------------------------------------------------------------------------------


async def test_a_pattern_finds_topics_created_later(fake_broker: Any) -> None:
    _fill(fake_broker, "logs-a", count=10)
    _fill(fake_broker, "other", count=10)
    async with _consumer(
        fake_broker, pattern="logs-.*", auto_offset_reset="latest", metadata_max_age_ms=10
    ) as consumer:
        assert consumer.assignment() == [TopicPartition("logs-a", 0)]
        assert await consumer.get_many(timeout_ms=10) == []
        _fill(fake_broker, "logs-b", count=10)
        found: list[Record] = []
        async with asyncio.timeout(30):
            while len(found) < 10:
                found += await consumer.get_many(timeout_ms=50)
        assert {record.topic for record in found} == {"logs-b"}
        assert _numbers(found) == list(range(10)), "what is new is read from its beginning"


async def test_latest_begins_at_the_opening(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t", auto_offset_reset="latest") as consumer:
        fake_broker.append("t", 0, build_batch([b"30"]))
        assert await _read(consumer, 1) == [30]


async def test_subscription_and_assignment_replace_each_other(fake_broker: Any) -> None:
    _fill(fake_broker, "t", 2)
    _fill(fake_broker, "u", 1)
    async with _consumer(fake_broker, "t") as consumer:
        consumer.assign([T1])
        assert consumer.assignment() == [T1]
        assert await _read(consumer, 3) == [0, 1, 2]
        consumer.assign([T0, T1])
        assert consumer.position(T1) == 3
        consumer.subscribe("u")
        records: list[Record] = []
        while not records:
            records = await consumer.get_many(timeout_ms=1000)
        assert {record.topic for record in records} == {"u"}
        consumer.subscribe(pattern="t|u")
        async with asyncio.timeout(30):
            while len(consumer.assignment()) < 3:
                await consumer.get_many(timeout_ms=5)
        assert consumer.subscription() == []
        consumer.assign([])
        with pytest.raises(NotSubscribedError, match="no topics to read"):
            await consumer.get_many(timeout_ms=5)
        for wrong in ((), ("a",)):
            with pytest.raises(ClientError, match="either to topics or to a pattern"):
                consumer.subscribe(*wrong, pattern="b" if wrong else None)


async def test_a_consumer_without_topics_raises_instead_of_waiting(fake_broker: Any) -> None:
    async with _consumer(fake_broker) as consumer:
        for read in (consumer.get_many(), consumer.getone(), anext(aiter(consumer))):
            with pytest.raises(NotSubscribedError, match="subscribe"):
                await asyncio.wait_for(read, 30)


@pytest.mark.parametrize("timeout_ms", [None, 20])
async def test_a_topic_that_is_missing_after_subscribe_is_an_error(
    fake_broker: Any, monkeypatch: Any, timeout_ms: int | None
) -> None:
    monkeypatch.setattr(list_offsets, "MISSING_TOPIC_GRACE_MS", 100)
    fake_broker.auto_create = 0
    async with _consumer(fake_broker) as consumer:
        consumer.subscribe(["missing"])
        assert consumer.subscription() == ["missing"]
        with pytest.raises(UnknownTopicOrPartitionError, match="missing"):
            async with asyncio.timeout(30):
                while True:
                    assert await consumer.get_many(timeout_ms=timeout_ms) == []
        fake_broker.topics["missing"] = 1  # created at last
        fake_broker.append("missing", 0, build_batch([b"x"]))
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(UnknownTopicOrPartitionError):
                    assert (await consumer.getone()).value == b"x"
                    break


async def test_reads_after_subscribe_wait_for_brokers_that_do_not_respond(
    fake_broker: Any, make_fault: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(list_offsets, "MISSING_TOPIC_GRACE_MS", 50)
    fake_broker.append("t", 0, build_batch([b"x"]))
    async with _consumer(fake_broker) as consumer, asyncio.timeout(30):
        fake_broker.always[ApiKey.METADATA] = make_fault(close=True)
        consumer.subscribe(["t"])
        assert await consumer.getmany(timeout_ms=0) == {}
        reading = asyncio.ensure_future(consumer.getone())
        await asyncio.wait({reading}, timeout=0.3)
        assert not reading.done()
        assert consumer._cluster.last_error is not None
        del fake_broker.always[ApiKey.METADATA]
        assert (await reading).value == b"x"


async def test_assign_forgets_the_topics_of_subscribe(fake_broker: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(list_offsets, "MISSING_TOPIC_GRACE_MS", 50)
    _fill(fake_broker)
    fake_broker.auto_create = 0
    async with _consumer(fake_broker) as consumer:
        consumer.subscribe(["missing"])
        consumer.assign([T0])
        assert await _read(consumer, 1) == [0]


async def test_a_pattern_that_matches_no_topic_is_logged(fake_broker: Any, caplog: Any) -> None:
    async with _consumer(fake_broker, pattern="nothing.*"):
        assert "no topic matches the pattern yet pattern=nothing.*" in caplog.text


async def test_aiokafkas_names(fake_broker: Any) -> None:
    _fill(fake_broker, partitions=2)
    consumer = await _consumer(fake_broker, "t", auto_offset_reset="earliest").start()
    assert (await consumer.getone()).offset == 0
    found: dict[TopicPartition, list[Record]] = {}
    while len(found) < 2:
        found |= await consumer.getmany(timeout_ms=5000, max_records=5)
    assert {tp: {record.partition for record in records} for tp, records in found.items()} == {
        T0: {0},
        T1: {1},
    }
    await consumer.stop()
    with pytest.raises(ClientClosedError):
        await consumer.getone()


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
async def test_an_outdated_response_keeps_positions(fake_broker: Any, make_fault: Any, reset: str) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t", auto_offset_reset=reset, fetch_max_wait_ms=10) as consumer:
        await consumer.seek(T0, 10)
        assert await _read(consumer, 5) == list(range(10, 15))
        fake_broker.always[ApiKey.METADATA] = make_fault(code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        consumer._cluster.request_refresh(urgent=True)
        async with asyncio.timeout(30):
            await eventually(lambda: consumer._cluster.metadata.partition_count("t") is None)
        assert consumer.position(T0) == 15
        del fake_broker.always[ApiKey.METADATA]
        assert await _read(consumer, 15) == list(range(15, 30))
        fake_broker.append("t", 0, build_batch([b"30"]))
        assert await _read(consumer, 1) == [30]


async def test_a_deleted_topic_is_dropped(fake_broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalite.client.consumer.subscription.FORGET_AFTER_MS", 20)
    _fill(fake_broker)
    async with _consumer(fake_broker, "t") as consumer:
        fake_broker.auto_create = 0
        del fake_broker.topics["t"]
        consumer._cluster.request_refresh(urgent=True)
        async with asyncio.timeout(30):
            await eventually(lambda: not consumer.assignment())


async def test_a_missing_topic(fake_broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalite.client.cluster.list_offsets.MISSING_TOPIC_GRACE_MS", 200)
    fake_broker.auto_create = 0
    with pytest.raises(UnknownTopicOrPartitionError):
        await _consumer(fake_broker, "missing").start()
    async with _consumer(fake_broker) as consumer:
        consumer.assign([TopicPartition("missing", 0)])
        with pytest.raises(UnknownTopicOrPartitionError):
            await consumer.get_many(timeout_ms=1000)
        fake_broker.topics["t"] = 1
        with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 0, not 1"):
            await consumer.end_offsets([T1])


# --- positions -----------------------------------------------------------------------------------


async def test_seeking_everywhere(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, auto_offset_reset="latest") as consumer:
        consumer.assign([T0])
        assert consumer.position(T0) is None
        await consumer.seek(T0, 17)
        assert await _read(consumer, 3) == [17, 18, 19]
        await consumer.seek_to_beginning()
        assert await _read(consumer, 2) == [0, 1]
        await consumer.seek_to_timestamp(T0, 1000 + 10 * 12 + 1)
        assert await _read(consumer, 1) == [13]
        await consumer.seek_to_timestamp(T0, 10**9)
        assert consumer.position(T0) == 30
        await consumer.seek_to_beginning(T0)
        await consumer.seek_to_end([T0])
        assert await consumer.lag() == {T0: 0}
        await consumer.seek(T0, 5)
        assert await consumer.lag() == {T0: 25}
        assert await consumer.beginning_offsets([T0]) == {T0: 0}
        with pytest.raises(ClientError, match="t-1 is not assigned"):
            await consumer.seek(T1, 0)
        with pytest.raises(ClientError, match="below 0"):
            await consumer.seek(T0, -1)
        with pytest.raises(ClientError, match="not assigned"):
            consumer.pause([T1])


async def test_a_seek_during_a_long_poll_does_not_wait_for_its_end(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t", fetch_max_wait_ms=60_000) as consumer:
        assert await _read(consumer, 30) == list(range(30))
        assert await consumer.get_many(timeout_ms=10) == [], "the poll goes on"
        async with asyncio.timeout(30):
            await consumer.seek(T0, 28)
            assert await _read(consumer, 2) == [28, 29]


async def test_seeking_inside_a_loop(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t") as consumer:
        seen = []
        async for record in consumer:
            seen.append(record.offset)
            if seen == [0, 1, 2]:
                await consumer.seek(T0, 25)
            if record.offset == 29:
                break
        assert seen == [0, 1, 2, 25, 26, 27, 28, 29]


async def test_pause_and_resume(fake_broker: Any) -> None:
    _fill(fake_broker, partitions=2)
    async with _consumer(fake_broker, "t") as consumer:
        seen: list[Record] = []
        async for record in consumer:
            seen.append(record)
            if len(seen) == 3:
                consumer.pause(TopicPartition("t", record.partition))
                assert consumer.paused() == [TopicPartition("t", record.partition)]
            if len(seen) == 33:
                break
        first = seen[0].partition
        assert [record.partition for record in seen] == [first] * 3 + [1 - first] * 30
        assert await consumer.get_many(timeout_ms=5) == []
        consumer.resume()
        assert await _read(consumer, 27) == list(range(3, 30))


async def test_offsets_for_times_are_exact(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker) as consumer:
        for wanted, offset in ((0, 0), (1000, 0), (1001, 1), (1095, 10), (1290, 29)):
            found = (await consumer.offsets_for_times({T0: wanted}))[T0]
            assert found is not None
            assert (found.offset, found.timestamp_ms) == (offset, 1000 + 10 * offset)
        assert await consumer.offsets_for_times({T0: 1291}) == {T0: None}


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
async def test_out_of_range(fake_broker: Any, reset: str) -> None:
    """C11"""
    _fill(fake_broker)
    fake_broker.logs["t", 0].start = 20
    async with _consumer(fake_broker, auto_offset_reset=reset) as consumer:
        consumer.assign([T0])
        await consumer.seek(T0, 3)
        if reset == "none":
            with pytest.raises(NoOffsetError) as failure:
                await consumer.get_many(timeout_ms=1000)
            assert isinstance(failure.value.__cause__, OffsetOutOfRangeError)
        else:
            waiting = asyncio.ensure_future(consumer.get_many(timeout_ms=1000))
            await settle()
            fake_broker.append("t", 0, build_batch([b"30"]))
            assert _numbers(await waiting)[0] == (20 if reset == "earliest" else 30)


async def test_no_position_and_no_policy(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        with pytest.raises(NoOffsetError, match="seek"):
            await consumer.get_many(timeout_ms=1000)


# --- failures ------------------------------------------------------------------------------------


async def test_temporary_errors_and_lost_connections(fake_broker: Any, make_fault: Any) -> None:
    _fill(fake_broker)
    fake_broker.fault(
        ApiKey.FETCH,
        make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER)),
        make_fault(close=True),
        make_fault(refuse=int(ErrorCode.SHUTTING_DOWN)),
        make_fault(code=int(ErrorCode.UNKNOWN_LEADER_EPOCH)),
    )
    fake_broker.fault(
        ApiKey.LIST_OFFSETS, make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER)), make_fault(close=True)
    )
    async with _consumer(fake_broker, "t") as consumer:
        assert await _read(consumer, 30) == list(range(30))


async def test_the_consumer_follows_the_leader(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    _fill(first)
    async with _consumer(first, "t") as consumer:
        assert await _read(consumer, 30) == list(range(30))
        first.leaders["t", 0] = 2
        first.epochs["t", 0] = 2
        second.append("t", 0, build_batch([b"30"]))
        first.disconnect()
        assert await _read(consumer, 1) == [30]
    assert second.count(ApiKey.FETCH) >= 1


async def test_a_broker_that_restarts_is_found_again(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t") as consumer:
        assert await _read(consumer, 30) == list(range(30))
        await fake_broker.stop()
        waiting = asyncio.ensure_future(consumer.get_many())
        await settle()
        await fake_broker.start()
        fake_broker.append("t", 0, build_batch([b"30"]))
        assert _numbers(await asyncio.wait_for(waiting, 30)) == [30]


async def test_a_partition_without_leader_waits_for_one(fake_broker: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t") as consumer:
        fake_broker.leaders["t", 0] = -1
        fake_broker.epochs["t", 0] = 2
        consumer._cluster.request_refresh(urgent=True)
        await settle()
        assert await consumer.get_many(timeout_ms=20) == []
        fake_broker.leaders["t", 0] = 1
        fake_broker.epochs["t", 0] = 3
        assert await _read(consumer, 30) == list(range(30))


async def test_records_before_an_error_come_first(fake_broker: Any) -> None:
    _fill(fake_broker, count=10)
    damaged = build_batch([b"10"], None, 1)
    fake_broker.append("t", 0, damaged)
    stored = bytearray(fake_broker.logs["t", 0].batches[-1])
    stored[-3] ^= 1
    fake_broker.logs["t", 0].batches[-1] = bytes(stored)
    fake_broker.append("t", 0, build_batch([b"11"]))
    async with _consumer(fake_broker, "t") as consumer:
        assert _numbers(await consumer.get_many(timeout_ms=1000)) == list(range(10))
        with pytest.raises(CorruptBatchError, match="t-0: the batch at offset 10"):
            await consumer.get_many(timeout_ms=1000)
        await consumer.seek_to_beginning()
        assert len(await consumer.get_batches(timeout_ms=1000)) == 1
        await consumer.seek(T0, 11)
        assert await _read(consumer, 1) == [11], "an error that a seek resolved is not raised"


async def test_r24_a_storage_error_after_records_of_another_partition_is_raised(fake_broker: Any) -> None:
    _fill(fake_broker, partitions=2, count=10)
    async with _consumer(fake_broker) as consumer:
        consumer.assign([T0, T1])
        await consumer.seek_to_beginning()
        record = await consumer.get_one(timeout_ms=1000)
        assert record is not None
        (other,) = {T0, T1} - {TopicPartition("t", record.partition)}
        consumer._assigned.partitions[other].forget()
        error = KafkaStorageError("t-1: the log is damaged")
        error.topic_partition = other
        consumer._assigned.partitions[other].error = error
        assert len(await consumer.get_many(timeout_ms=1000)) == 9
        with pytest.raises(KafkaStorageError, match="t-1"):
            await consumer.get_many(timeout_ms=1000)


async def test_the_error_of_a_lookup_that_nobody_awaits_any_more_is_no_noise(
    fake_broker: Any, make_fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Seed 700917: the assignment changed while the first positions were looked up."""
    _fill(fake_broker, partitions=2)
    code = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    async with _consumer(fake_broker) as consumer:
        consumer.assign([T0])
        held = asyncio.Event()
        fake_broker.fault(ApiKey.LIST_OFFSETS, make_fault(hold=held, code=code))
        assert await consumer.get_many(timeout_ms=1) == []
        await eventually(lambda: fake_broker.count(ApiKey.LIST_OFFSETS))  # the fault is for this lookup
        first = consumer._finding
        assert first is not None
        consumer.assign([T0, T1])
        reading = asyncio.ensure_future(consumer.get_many(timeout_ms=5000))
        await eventually(lambda: consumer._finding is not None and len(consumer._finding[0]) == 2)
        held.set()
        assert len(await reading) > 0
        await asyncio.wait([first[1]])
        del first
        gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("by", ["records", "batches", "iteration"])
async def test_s22_an_unreadable_batch_can_be_skipped(fake_broker: Any, by: str) -> None:
    fake_broker.append("t", 0, build_batch([b"0", b"1"]))
    garbage = build_batch([b"2", b"3"], None, 1)
    garbage[HEADER_BYTES:] = b"\xff" * (len(garbage) - HEADER_BYTES)
    seal(garbage)
    fake_broker.append("t", 0, garbage)
    fake_broker.append("t", 0, build_batch([b"4"]))

    async def read(consumer: Any) -> list[int]:
        if by == "iteration":
            return _numbers([record async for record in consumer])
        if by == "records":
            return _numbers(await consumer.get_many(timeout_ms=1000))
        batches = await consumer.get_batches(timeout_ms=1000)
        return _numbers([record for batch in batches for record in batch.records()])

    async with _consumer(fake_broker, "t") as consumer:
        if by == "records":
            assert await read(consumer) == [0, 1]
        with pytest.raises(CorruptBatchError, match="t-0: the batch at offset 2 can't be read") as raised:
            await read(consumer)
        error = raised.value
        assert (error.topic_partition, error.offset, error.next_offset) == (T0, 2, 4)
        assert error.topic_partition is not None and error.next_offset is not None
        await consumer.seek(error.topic_partition, error.next_offset)
        assert _numbers([await consumer.get_one(timeout_ms=1000)]) == [4]


async def test_a_final_error_is_raised(fake_broker: Any, make_fault: Any) -> None:
    _fill(fake_broker)
    fake_broker.fault(ApiKey.FETCH, make_fault(code=int(ErrorCode.UNSUPPORTED_VERSION)))
    async with _consumer(fake_broker, "t") as consumer:
        with pytest.raises(UnsupportedVersionError):
            async for _ in consumer:
                pass


async def test_list_offsets_that_never_come(fake_broker: Any, make_fault: Any) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker) as consumer:
        consumer.assign([T0])
        fake_broker.always[ApiKey.LIST_OFFSETS] = make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        assert await consumer.get_many(timeout_ms=30) == []


# --- life ----------------------------------------------------------------------------------------


async def test_closing_ends_a_wait(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    consumer = await _consumer(fake_broker, "t").start()
    waiting = asyncio.ensure_future(consumer.get_many())
    await settle()
    await consumer.close()
    with pytest.raises(ClientClosedError):
        await waiting
    await consumer.close()
    with pytest.raises(ClientClosedError, match="the consumer is closed"):
        await consumer.get_many()
    with pytest.raises(ClientClosedError, match="starts once"):
        await consumer.start()


async def test_before_it_is_opened(fake_broker: Any) -> None:
    consumer = _consumer(fake_broker, "t")
    with pytest.raises(ClientClosedError, match="the consumer is new"):
        await consumer.get_many()
    with pytest.raises(ConnectionFailedError):
        await Consumer(bootstrap_servers="inproc://nobody", **FAST).start()


async def test_a_cancelled_wait_loses_nothing(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _consumer(fake_broker, "t") as consumer:
        waiting = asyncio.ensure_future(consumer.get_many())
        await settle()
        waiting.cancel()
        await asyncio.sleep(0)
        _fill(fake_broker)
        assert await _read(consumer, 30) == list(range(30))


async def test_a_consumer_left_open_is_a_resource_warning(fake_broker: Any) -> None:
    consumer = await _consumer(fake_broker).start()
    cluster = consumer._cluster
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cluster._on_change = None
        del consumer
        gc.collect()
    assert any("was never closed" in str(warning.message) for warning in caught)
    await cluster.close()


async def test_many_consumers_open_and_close(fake_broker: Any) -> None:
    """C14"""
    _fill(fake_broker, count=10)
    for _ in range(50):
        async with _consumer(fake_broker, "t") as consumer:
            assert len(await consumer.get_many(timeout_ms=1000)) == 10
    for _ in range(10):
        await asyncio.sleep(0)
    assert not fake_broker.connections


# --- leaders change ------------------------------------------------------------------------------


def _move(brokers: list[Any], node_id: int, tp: TopicPartition = T0) -> None:
    """Make another node lead, in the next epoch."""
    broker = brokers[0]
    broker.leaders[tp] = node_id
    broker.epochs[tp] = broker.epochs.get(tp, 1) + 1
    broker.logs[tp].epoch = broker.epochs[tp]


async def test_reading_continues_at_the_new_leader(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    _fill(first, count=30)
    async with _consumer(first, "t") as consumer:
        assert await _read(consumer, 30) == list(range(30))
        for leader in (2, 1, 2):
            _move(fake_cluster, leader)
            start = first.logs[T0].end
            _fill(first, count=10)
            assert await _read(consumer, 10) == list(range(10))
            assert consumer.position(T0) == start + 10
    assert first.count(ApiKey.OFFSETS_FOR_LEADER_EPOCH) + second.count(ApiKey.OFFSETS_FOR_LEADER_EPOCH) == 3


async def test_lost_records_after_an_unclean_election(
    fake_cluster: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = fake_cluster[0]
    _fill(first, count=30)
    async with _consumer(first, "t") as consumer:
        assert await _read(consumer, 30) == list(range(30))
        first.logs[T0].truncate(20)
        _move(fake_cluster, 2)
        _fill(first, count=40)
        assert await _read(consumer, 40) == list(range(40)), "from where the logs part"
    assert "first_lost=20" in caplog.text


async def test_lost_records_are_an_error_without_a_policy(fake_cluster: list[Any]) -> None:
    first = fake_cluster[0]
    _fill(first, count=30)
    async with _consumer(first, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        await consumer.seek(T0, 0)
        assert await _read(consumer, 30) == list(range(30))
        first.logs[T0].truncate(20)
        _move(fake_cluster, 2)
        with pytest.raises(LogTruncationError) as caught:
            await consumer.get_many(timeout_ms=2000)
        await consumer.seek(T0, caught.value.diverging_offset)
        _fill(first, count=10)
        assert await _read(consumer, 10) == list(range(10))


async def test_a_silent_leader_is_abandoned_for_the_new_one(fake_cluster: list[Any], make_fault: Any) -> None:
    first = fake_cluster[0]
    _fill(first, count=10)
    async with _consumer(first, "t", fetch_max_wait_ms=20) as consumer:
        assert await _read(consumer, 10) == list(range(10))
        for api in (ApiKey.FETCH, ApiKey.METADATA):
            first.always[api] = make_fault(drop=True)
        before = first.count(ApiKey.FETCH)
        waiting = asyncio.ensure_future(_read(consumer, 10))
        await eventually(lambda: first.count(ApiKey.FETCH) > before)
        _move(fake_cluster, 2)
        _fill(first, count=10)
        async with asyncio.timeout(30):
            assert await waiting == list(range(10))


async def test_a_topic_that_subscribing_creates_is_named_in_one_warning(
    fake_broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(fake_broker)
    async with _consumer(fake_broker, "t", "typo") as consumer:
        await eventually(lambda: "typo" in fake_broker.topics)
        assert len(await _read(consumer, 30)) == 30
    warnings_given = [
        record.getMessage() for record in caplog.records if "created topic" in record.getMessage()
    ]
    assert warnings_given == [
        "created topic typo (1 partition); allow.auto.create.topics=false prevents that"
    ]
