"""Every API against a broker in memory, over the wire. Covers the modules of ``broker/handlers``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.handlers import HANDLERS
from kafkalite.errors import ErrorCode
from kafkalite.limits import MAX_RESOURCES_PER_REQUEST
from kafkalite.model import EARLIEST, LATEST, MAX_TIMESTAMP
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import admin, data, groups, metadata, security, transactions
from kafkalite.records.header import HEADER, HEADER_BYTES, seal
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually, settle

Make = Callable[..., Any]


def test_every_api_has_a_handler() -> None:
    assert HANDLERS.keys() == APIS.keys()


# --- produce ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", [0, 1, -1])
@pytest.mark.parametrize("durability", ["fsync", "page-cache"])
async def test_batches_get_dense_offsets_whatever_the_acks(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, acks: int, durability: str
) -> None:
    await wire.call(new_topic("t", durability=durability))
    for expected in (0, 3, 6):
        batch = batch_of(b"a", b"b", b"c")
        (result,) = (await wire.call(produce(batch, acks=acks), batch)).partitions
        assert (result.error_code, result.base_offset, result.log_start_offset) == (0, expected, 0)


async def test_each_partition_has_its_own_result(wire: WireClient, new_topic: Make, batch_of: Make) -> None:
    await wire.call(new_topic("t", 2))
    good, bad = batch_of(b"good"), batch_of(b"bad")
    bad[-1] ^= 1
    request = data.ProduceRequest(
        -1,
        1000,
        None,
        [
            data.ProducePartition("t", 0, len(bad)),
            data.ProducePartition("t", 1, len(good)),
            data.ProducePartition("t", 7, len(good)),
            data.ProducePartition("nothing", 0, len(good)),
        ],
    )
    answer = await wire.call(request, bad, good, good, good)
    assert [(p.error_code, p.base_offset) for p in answer.partitions] == [
        (ErrorCode.CORRUPT_MESSAGE, -1),
        (0, 0),
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1),
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1),
    ]
    assert "partitions 0 to 1, not 7" in answer.partitions[2].error_message


def _with_codec(batch: bytearray, attributes: int) -> bytearray:
    batch[21:23] = attributes.to_bytes(2, "big")
    seal(batch)
    return batch


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        (0b110, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (0b111 | 6 << 8, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (0b111 | 1 << 4, ErrorCode.INVALID_RECORD),
        (0b111 | 1 << 5, ErrorCode.INVALID_RECORD),
        (0b000, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),  # rows in Kafka's format
        (0b001, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),  # the same, gzipped
    ],
)
async def test_attributes_decide_which_batches_are_accepted(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, attributes: int, code: ErrorCode
) -> None:
    await wire.call(new_topic("t"))
    batch = _with_codec(batch_of(), attributes)
    answer = await wire.call(produce(batch), batch)
    assert answer.partitions[0].error_code == code


@pytest.mark.parametrize("transactional_id", [None, "txn"])
@pytest.mark.parametrize(
    "body", [b"garbage", b"\x94\xc0\xc0\xc0\xc0"], ids=["garbage", "a million of nothing"]
)
async def test_s22_a_batch_that_no_reader_could_unpack_is_not_stored(
    wire: WireClient, new_topic: Make, batch_of: Make, body: bytes, transactional_id: str | None
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of()[:HEADER_BYTES] + body
    HEADER.pack_into(batch, 0, 0, len(batch) - 12, 0, 2, 0, 7, 999_999, 1, 1, -1, -1, -1, 1_000_000)
    seal(batch)
    partition = data.ProducePartition("t", 0, len(batch))
    answer = await wire.call(data.ProduceRequest(-1, 1000, transactional_id, [partition]), batch)
    assert answer.partitions[0].error_code == ErrorCode.CORRUPT_MESSAGE
    listed = await wire.call(data.ListOffsetsRequest(0, [data.ListOffsetsPartition("t", 0, -1, LATEST)]))
    assert listed.partitions[0].offset == 0


@pytest.mark.parametrize("size", [0, 1, 60])
async def test_bytes_too_short_for_a_batch_are_corrupt(
    wire: WireClient, new_topic: Make, produce: Make, size: int
) -> None:
    await wire.call(new_topic("t"))
    answer = await wire.call(produce(bytes(size)), bytes(size))
    assert answer.partitions[0].error_code == ErrorCode.CORRUPT_MESSAGE


async def test_a_batch_over_the_topics_limit_is_refused(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t", **{"max.message.bytes": "1000"}))
    batch = batch_of(b"x" * 2000)
    answer = await wire.call(produce(batch), batch)
    assert answer.partitions[0].error_code == ErrorCode.MESSAGE_TOO_LARGE


async def test_a_timestamp_from_the_far_future_is_refused(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of(timestamp_ms=int(time.time() * 1000) + 7_200_000)
    answer = await wire.call(produce(batch), batch)
    assert answer.partitions[0].error_code == ErrorCode.INVALID_TIMESTAMP


async def test_unknown_acks_refuse_the_request(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of()
    answer = await wire.call(produce(batch, acks=2), batch)
    assert isinstance(answer, RequestError)
    assert answer.error_code == ErrorCode.INVALID_REQUIRED_ACKS


async def test_all_with_too_few_in_sync_is_refused_and_one_is_not(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, broker: Broker
) -> None:
    """R6, R9: acks=1 is acknowledged once it is on the leader's disk, but not readable."""
    await wire.call(new_topic("t", **{"min.insync.replicas": "2"}))
    batch = batch_of()
    answer = await wire.call(produce(batch, acks=-1), batch)
    assert answer.partitions[0].error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    answer = await wire.call(produce(batch, acks=1), batch)
    assert (answer.partitions[0].error_code, answer.partitions[0].base_offset) == (0, 0)
    (hosted,) = broker.partitions
    assert (hosted.partition.log.synced_end_offset, hosted.high_watermark) == (1, 0)


async def test_a_producer_that_waits_too_long_times_out(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, broker: Broker
) -> None:
    await wire.call(new_topic("t"))
    broker._scheduler.mark = lambda _log: None  # type: ignore[method-assign]
    batch = batch_of()
    for acks in (1, -1):
        answer = await wire.call(produce(batch, acks=acks, timeout_ms=20), batch)
        assert answer.partitions[0].error_code == ErrorCode.REQUEST_TIMED_OUT
        assert "the batch is in the log" in answer.partitions[0].error_message
    assert broker.statistics().waiting_requests == 2  # cancelled, and skipped when the time comes


async def test_log_append_time_is_the_brokers(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t", **{"message.timestamp.type": "LogAppendTime"}))
    batch = batch_of(timestamp_ms=5)
    before_ms = time.time_ns() // 1_000_000
    (result,) = (await wire.call(produce(batch), batch)).partitions
    assert before_ms <= result.log_append_time_ms <= time.time_ns() // 1_000_000


# --- fetch -----------------------------------------------------------------------------------------


async def test_records_are_fetched_byte_for_byte(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of(b"a", b"b")
    await wire.call(produce(batch), batch)
    (result,) = (await wire.call(fetch(1))).partitions  # inside the batch, which is returned completely
    assert (result.error_code, result.high_watermark, result.log_start_offset) == (0, 2, 0)
    assert result.length_bytes == len(batch)
    stored = bytes(wire.last_payload)
    assert stored[16:] == bytes(batch)[16:]  # except base offset and leader epoch


async def test_a_fetch_waits_for_bytes_and_is_woken_by_them(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    async with WireClient(broker.address) as reader, WireClient(broker.address) as writer:
        await writer.call(new_topic("t"))
        batch = batch_of(b"a")
        reader.send(fetch(0, max_wait_ms=60_000, min_bytes=2 * len(batch)))
        await eventually(lambda: broker.statistics().waiting_requests)
        await writer.call(produce(batch), batch)
        assert broker.statistics().waiting_requests == 1
        await writer.call(produce(batch), batch)
        answer = await reader.response()
        assert answer.message.partitions[0].length_bytes == 2 * len(batch)


async def test_a_fetch_that_is_woken_too_early_waits_on(
    broker: Broker, wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    """With followers, a leader can only estimate how many bytes became readable."""
    await wire.call(new_topic("t"))
    async with WireClient(broker.address) as other:
        pending = asyncio.create_task(other.call(fetch(0, max_wait_ms=3_600_000, min_bytes=400)))
        await eventually(lambda: broker.statistics().waiting_requests)
        (hosted,) = broker.partitions
        for _ in range(3):
            broker._waiters.on_high_watermark(hosted.key, hosted.high_watermark, 10**9)
            await settle()
        assert not pending.done()
        batch = batch_of(b"x" * 400)
        await wire.call(produce(batch), batch)
        assert (await pending).partitions[0].length_bytes == len(batch)
        empty = await other.call(fetch(1, max_wait_ms=30))
        assert empty.partitions[0].length_bytes == 0


async def test_a_fetch_without_data_is_answered_in_time(
    wire: WireClient, new_topic: Make, fetch: Make, broker: Broker
) -> None:
    await wire.call(new_topic("t"))
    (result,) = (await wire.call(fetch(0, max_wait_ms=10))).partitions
    assert (result.error_code, result.length_bytes) == (0, 0)
    assert broker.statistics().waiting_requests == 0


async def test_the_fetch_of_a_client_that_is_gone_is_released(
    broker: Broker, new_topic: Make, fetch: Make
) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        wire.send(fetch(0, max_wait_ms=60_000))
        await eventually(lambda: broker.statistics().waiting_requests)
    await eventually(lambda: not broker.statistics().connection_count)
    assert broker.statistics().waiting_requests == 0


@pytest.mark.parametrize("offset", [-1, 2, 2**62])
async def test_an_offset_out_of_range_returns_the_range(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, fetch: Make, offset: int
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of()
    await wire.call(produce(batch), batch)
    (result,) = (await wire.call(fetch(offset, max_wait_ms=60_000))).partitions
    assert result.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert (result.log_start_offset, result.high_watermark) == (0, 1)


async def test_the_response_stays_under_its_limit_except_for_the_first_batch(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t", 3))
    batch = batch_of(b"x" * 1000)
    for partition in range(3):
        for _ in range(2):
            await wire.call(produce(batch, partition=partition), batch)
    size = len(batch)

    async def lengths(max_bytes: int, each: int = 2**20) -> list[int]:
        asked = [data.FetchPartition("t", n, -1, 0, each) for n in range(3)]
        answer = await wire.call(data.FetchRequest(0, 1, max_bytes, 0, asked))
        return [p.length_bytes for p in answer.partitions]

    assert await lengths(10) == [size, 0, 0]
    assert await lengths(3 * size) == [2 * size, size, 0]
    assert await lengths(2**20) == [2 * size] * 3
    assert await lengths(2**20, each=size) == [size] * 3
    assert await lengths(0, each=1) == [size, 0, 0]
    assert await lengths(2**20, each=0) == [0, 0, 0]  # watched: tests/broker/test_watching.py


async def test_a_partition_that_fails_does_not_delay_the_others(
    wire: WireClient, new_topic: Make, fetch: Make
) -> None:
    await wire.call(new_topic("t"))
    asked = [data.FetchPartition(name, 0, -1, 0, 100) for name in ("t", "nothing")]
    answer = await wire.call(data.FetchRequest(60_000, 1, 100, 0, asked))
    assert [p.error_code for p in answer.partitions] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]


async def test_clients_are_fenced_by_the_epoch_they_know(
    wire: WireClient, new_topic: Make, fetch: Make
) -> None:
    await wire.call(new_topic("t"))
    codes = [(await wire.call(fetch(0, epoch=epoch))).partitions[0].error_code for epoch in (0, 1, -2)]
    assert codes == [0, ErrorCode.UNKNOWN_LEADER_EPOCH, ErrorCode.FENCED_LEADER_EPOCH]


# --- offsets ---------------------------------------------------------------------------------------


async def test_offsets_are_listed_by_time_and_by_name(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    for timestamp_ms in (100, 300, 200):
        batch = batch_of(b"a", b"b", timestamp_ms=timestamp_ms)
        await wire.call(produce(batch), batch)

    async def listed(timestamp_ms: int, partition: int = 0) -> tuple[int, int, int]:
        asked = [data.ListOffsetsPartition("t", partition, -1, timestamp_ms)]
        (found,) = (await wire.call(data.ListOffsetsRequest(0, asked))).partitions
        return found.error_code, found.offset, found.timestamp_ms

    assert await listed(EARLIEST) == (0, 0, -1)
    assert await listed(LATEST) == (0, 6, -1)
    assert await listed(MAX_TIMESTAMP) == (0, 2, 300)
    assert await listed(0) == (0, 0, 100)
    assert await listed(150) == (0, 2, 300)
    assert await listed(301) == (0, -1, -1)
    assert await listed(-9) == (ErrorCode.INVALID_REQUEST, -1, -1)
    assert await listed(0, partition=1) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1)


async def test_the_end_of_a_leader_epoch_is_returned(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of()
    await wire.call(produce(batch), batch)
    asked = [[data.EpochPartition("t", 0, -1, 0)], [data.EpochPartition("t", 0, 5, 0)]]
    answers = [await wire.call(data.OffsetsForLeaderEpochRequest(one)) for one in asked]
    (known,), (fenced,) = (answer.partitions for answer in answers)
    assert (known.error_code, known.leader_epoch, known.end_offset) == (0, 0, 1)
    assert fenced.error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


async def test_deleted_records_are_gone(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    await wire.call(new_topic("t"))
    for _ in range(3):
        batch = batch_of()
        await wire.call(produce(batch), batch)

    async def delete(before_offset: int) -> tuple[int, int]:
        asked = [data.DeleteRecordsPartition("t", 0, before_offset)]
        (result,) = (await wire.call(data.DeleteRecordsRequest(1000, asked))).partitions
        return result.error_code, result.log_start_offset

    assert await delete(2) == (0, 2)
    assert await delete(1) == (0, 2)
    assert await delete(4) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert (await wire.call(fetch(1))).partitions[0].error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert await delete(LATEST) == (0, 3)


# --- metadata --------------------------------------------------------------------------------------


async def test_metadata_names_brokers_topics_and_leaders(
    wire: WireClient, broker: Broker, new_topic: Make
) -> None:
    await wire.call(new_topic("b", 2))
    await wire.call(groups.FindCoordinatorRequest(0, ["g"]))
    answer = await wire.call(metadata.MetadataRequest(None, False))
    assert answer.cluster_id == broker.cluster_id
    assert answer.controller_id == 1
    assert [(b.node_id, b.address) for b in answer.brokers] == [(1, broker.address)]
    assert [(t.name, t.is_internal, len(t.partitions)) for t in answer.topics] == [
        ("__consumer_offsets", True, 50),
        ("b", False, 2),
    ]
    assert {(p.leader_id, p.leader_epoch, *p.isr) for t in answer.topics for p in t.partitions} == {(1, 0, 1)}


async def test_an_unknown_topic_is_created_only_when_both_sides_agree(wire: WireClient) -> None:
    refused = await wire.call(metadata.MetadataRequest(["t"], False))
    assert refused.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    created = await wire.call(metadata.MetadataRequest(["t", "t", "u"], True))
    assert [(t.name, t.error_code, len(t.partitions)) for t in created.topics] == [("t", 0, 1), ("u", 0, 1)]


async def test_a_broker_may_refuse_to_create_topics() -> None:
    async with (
        Broker(listeners="inproc://", auto_create_topics_enable=False) as broker,
        WireClient(broker.address) as wire,
    ):
        answer = await wire.call(metadata.MetadataRequest(["t"], True))
        assert answer.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("name", ["../x", "..", "", "a/b", "a\x00b", "x" * 250, "tοpic"])
async def test_names_that_could_reach_a_path_never_do(wire: WireClient, new_topic: Make, name: str) -> None:
    answer = await wire.call(metadata.MetadataRequest([name], True))
    assert answer.topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    created = await wire.call(new_topic(name))
    assert created.topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


async def test_a_topic_that_cannot_be_created_says_why() -> None:
    async with (
        Broker(listeners="inproc://", default_replication_factor=3) as broker,
        WireClient(broker.address) as wire,
    ):
        answer = await wire.call(metadata.MetadataRequest(["t"], True))
        assert answer.topics[0].error_code == ErrorCode.INVALID_REPLICATION_FACTOR
        assert "larger than the number of live brokers" in answer.topics[0].error_message


async def test_a_request_for_too_many_topics_is_refused(wire: WireClient) -> None:
    answer = await wire.call(metadata.MetadataRequest([str(n) for n in range(10_001)], False))
    assert answer.error_code == ErrorCode.INVALID_REQUEST


async def test_the_cluster_describes_itself(wire: WireClient, broker: Broker) -> None:
    answer = await wire.call(metadata.DescribeClusterRequest())
    assert answer.cluster_id == broker.cluster_id
    assert answer.metadata_offset > 0
    assert [b.address for b in answer.brokers] == [broker.address]


# --- topics and configs ----------------------------------------------------------------------------


async def test_topics_are_created_grown_and_deleted(
    wire: WireClient, broker: Broker, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    assert (await wire.call(new_topic("t"))).topics[0].error_code == 0
    assert (await wire.call(new_topic("t"))).topics[0].error_code == ErrorCode.TOPIC_ALREADY_EXISTS
    grown = await wire.call(admin.CreatePartitionsRequest(1000, False, [admin.PartitionCount("t", 3)]))
    assert grown.topics[0].error_code == 0
    assert broker.statistics().partition_count == 3
    batch = batch_of()
    assert (await wire.call(produce(batch, partition=2), batch)).partitions[0].error_code == 0
    deleted = await wire.call(admin.DeleteTopicsRequest(1000, ["t", "nothing"]))
    assert [t.error_code for t in deleted.topics] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert broker.statistics().partition_count == 0
    gone = await wire.call(produce(batch, partition=2), batch)
    assert gone.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_controller_that_takes_too_long_is_a_timeout(
    wire: WireClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_command: object) -> None:
        await asyncio.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(broker._services.controller, "submit", never)
        answer = await wire.call(admin.CreateTopicsRequest(5, False, []))
    assert answer.error_code == ErrorCode.REQUEST_TIMED_OUT


async def test_a_broken_invariant_in_a_woken_fetch_stops_the_broker(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(listeners="inproc://")
    await broker.start()
    async with WireClient(broker.address) as reader, WireClient(broker.address) as writer:
        await writer.call(new_topic("t"))
        reader.send(fetch(0, max_wait_ms=60_000))
        await eventually(lambda: broker.statistics().waiting_requests)
        (hosted,) = broker.partitions

        def explode(*_arguments: object) -> None:
            raise AssertionError("the invariant")

        monkeypatch.setattr(type(hosted.partition), "read", explode)
        batch = batch_of()
        writer.send(produce(batch), batch)
        with pytest.raises(AssertionError, match="the invariant"):
            await broker.wait_stopped()
        await reader.closed()


async def test_a_topic_created_again_under_its_name_is_empty(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    batch = batch_of()
    for _ in range(2):
        await wire.call(new_topic("t"))
        assert (await wire.call(produce(batch), batch)).partitions[0].base_offset == 0
        await wire.call(admin.DeleteTopicsRequest(1000, ["t"]))


async def test_deleting_a_topic_ends_the_wait_for_it(broker: Broker, new_topic: Make, fetch: Make) -> None:
    async with WireClient(broker.address) as reader, WireClient(broker.address) as other:
        await other.call(new_topic("t"))
        reader.send(fetch(0, max_wait_ms=60_000))
        await eventually(lambda: broker.statistics().waiting_requests)
        await other.call(admin.DeleteTopicsRequest(1000, ["t"]))
        answer = await reader.response()
        assert answer.message.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_broker_may_refuse_to_delete() -> None:
    async with (
        Broker(listeners="inproc://", delete_topic_enable=False) as broker,
        WireClient(broker.address) as wire,
    ):
        answer = await wire.call(admin.DeleteTopicsRequest(1000, ["t"]))
        assert answer.topics[0].error_code == ErrorCode.POLICY_VIOLATION


async def _entry(wire: WireClient, kind: str, name: str, key: str) -> tuple[str | None, str, bool]:
    answer = await wire.call(admin.DescribeConfigsRequest([admin.ConfigResource(kind, name)]))
    entry = next(e for e in answer.resources[0].entries if e.name == key)
    return entry.value, entry.source, entry.read_only


async def test_configs_have_value_and_source_and_can_be_altered(wire: WireClient, new_topic: Make) -> None:
    await wire.call(new_topic("t"))
    assert await _entry(wire, "topic", "t", "retention.ms") == ("604800000", "default", False)

    async def alter(kind: str, name: str, key: str, value: str | None) -> int:
        change = admin.ConfigChange(kind, name, key, value)
        answer = await wire.call(admin.AlterConfigsRequest(False, [change]))
        code: int = answer.resources[0].error_code
        return code

    assert await alter("broker", "1", "log.retention.ms", "5000") == 0
    assert await _entry(wire, "topic", "t", "retention.ms") == ("5000", "broker", False)
    assert await _entry(wire, "broker", "1", "log.retention.ms") == ("5000", "broker", False)
    assert await alter("topic", "t", "retention.ms", "7000") == 0
    assert await _entry(wire, "topic", "t", "retention.ms") == ("7000", "topic", False)
    assert await alter("topic", "t", "retention.ms", None) == 0
    assert await _entry(wire, "topic", "t", "retention.ms") == ("5000", "broker", False)
    assert await alter("topic", "t", "retention.ms", "soon") == ErrorCode.INVALID_CONFIG
    assert await _entry(wire, "broker", "1", "node.id") == ("1", "default", True)
    assert await _entry(wire, "broker", "1", "listeners") == ("inproc://", "broker", True)
    assert await _entry(wire, "broker", "1", "cluster.id") == (None, "default", True)


async def test_altered_configs_are_in_force_at_once(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    change = admin.ConfigChange("topic", "t", "max.message.bytes", "100")
    await wire.call(admin.AlterConfigsRequest(False, [change]))
    batch = batch_of(b"x" * 500)
    answer = await wire.call(produce(batch), batch)
    assert answer.partitions[0].error_code == ErrorCode.MESSAGE_TOO_LARGE


async def test_configs_of_unknown_resources_are_refused(wire: WireClient) -> None:
    asked = [admin.ConfigResource(*pair) for pair in (("topic", "t"), ("broker", "2"), ("planet", "x"))]
    answer = await wire.call(admin.DescribeConfigsRequest(asked))
    assert [r.error_code for r in answer.resources] == [
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUEST,
    ]


async def test_s25_too_many_resources_are_refused(wire: WireClient) -> None:
    asked = [admin.ConfigResource("topic", "t")] * (MAX_RESOURCES_PER_REQUEST + 1)
    answer = await wire.call(admin.DescribeConfigsRequest(asked))
    assert (answer.error_code, answer.error_message) == (
        ErrorCode.INVALID_REQUEST,
        "DescribeConfigsRequest.resources: at most 200 elements in one request, found 201",
    )


async def test_s25_too_many_users_or_states_are_refused_and_the_connection_stays_open(
    wire: WireClient,
) -> None:
    for request, words in (
        (
            security.DescribeUserScramCredentialsRequest([f"u{number}" for number in range(1_001)]),
            "DescribeUserScramCredentialsRequest.users: at most 1000 elements in one request, found 1001",
        ),
        (groups.ListGroupsRequest(["Dead"] * 17), "ListGroupsRequest.states: at most 16 elements"),
        (
            transactions.ListTransactionsRequest(["Ongoing"] * 17, 0),
            "ListTransactionsRequest.states: at most 16 elements",
        ),
    ):
        answer = await wire.call(request)
        assert answer.error_code == ErrorCode.INVALID_REQUEST
        assert words in answer.error_message
    assert (await wire.call(groups.ListGroupsRequest(["Dead"] * 16))).error_code == 0


async def test_errors_of_ten_thousand_long_names_fit_in_a_response(wire: WireClient) -> None:
    name = "x" * 240
    invalid = [f"!{name}{number}" for number in range(10_000)]
    described = (await wire.call(metadata.MetadataRequest(invalid, False))).topics
    assert {one.error_code for one in described} == {ErrorCode.INVALID_TOPIC_EXCEPTION}
    assert invalid[99] in described[99].error_message and described[100].error_message is None
    asked = [data.ListOffsetsPartition(name, number, -1, LATEST) for number in range(10_000)]
    listed = (await wire.call(data.ListOffsetsRequest(0, asked))).partitions
    assert {one.error_code for one in listed} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert name in listed[99].error_message and listed[100].error_message is None
    deleted = (await wire.call(admin.DeleteTopicsRequest(1000, [f"{name}{n}" for n in range(9_000)]))).topics
    assert {one.error_code for one in deleted} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


async def test_the_log_directory_lists_what_is_stored(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t", 2))
    batch = batch_of(b"a", b"b")
    await wire.call(produce(batch, partition=1), batch)
    answer = await wire.call(admin.DescribeLogDirsRequest(["t"]))
    assert [(p.partition, p.size_bytes, p.log_end_offset) for p in answer.partitions] == [
        (0, 0, 0),
        (1, len(batch), 2),
    ]
    assert (await wire.call(admin.DescribeLogDirsRequest(["u"]))).partitions == []


# --- versions, failures ----------------------------------------------------------------------------


async def test_the_handshake_lists_every_api(wire: WireClient) -> None:
    assert set(wire._wire._versions) == set(APIS)


async def test_a_fault_in_a_handler_affects_one_request(
    wire: WireClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    async def explode_later(*_arguments: object) -> None:
        raise ZeroDivisionError("a later bug")

    for bug in (explode, explode_later):
        monkeypatch.setitem(HANDLERS, ApiKey.DESCRIBE_CLUSTER, bug)
        answer = await wire.call(metadata.DescribeClusterRequest())
        assert answer.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
        assert "incident-" in answer.error_message
    assert (await wire.call(metadata.MetadataRequest(None, False))).error_code == 0
    assert broker.is_running
    assert broker.statistics().failed_requests == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_broken_invariant_stops_the_broker(
    monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    def explode(*_arguments: object) -> None:
        raise AssertionError("the invariant")

    async def explode_later(*_arguments: object) -> None:
        raise AssertionError("the invariant")

    monkeypatch.setitem(HANDLERS, ApiKey.DESCRIBE_CLUSTER, explode_later if is_async else explode)
    broker = Broker(listeners="inproc://")
    await broker.start()
    async with WireClient(broker.address) as wire:
        wire.send(metadata.DescribeClusterRequest())
        with pytest.raises(AssertionError, match="the invariant"):
            await broker.wait_stopped()
        await wire.closed()
    assert not broker.is_running
