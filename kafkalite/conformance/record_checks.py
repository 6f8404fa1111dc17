"""Checks of record batches: Produce, Fetch, offsets, and producing without duplicates."""

# Tests: tests/conformance/test_suite.py

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from kafkalite.conformance.declared import Checks
from kafkalite.conformance.peer import SHORT_MS, Answer, Cluster, Peer, expect, name_of
from kafkalite.model import EARLIEST, LATEST, MAX_TIMESTAMP
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.data import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchRequestV1,
    InitProducerIdRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ProducedPartition,
    ProducePartition,
    ProduceRequest,
)
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.header import ATTRIBUTES_POSITION, HEADER_BYTES, Codec, seal, total_length

RECORD_CHECKS: Final = Checks()
check = RECORD_CHECKS.check
_MIB: Final = 1 << 20
_LEADER_FIELDS: Final = 16  # the bytes at the beginning of a batch that the leader may change


def batch_of(*values: bytes, **options: Any) -> bytearray:
    """Return a batch with these record values, no keys, and the current time."""
    return build_batch(list(values), None, time.time_ns() // 1_000_000, **options)


def produce(
    peer: Peer, topic: str, batch: bytes | bytearray, *, acks: int = -1, transactional_id: str | None = None
) -> ProducedPartition:
    """Produce one batch to partition 0 and return the partition's result. Raises Violation."""
    request = ProduceRequest(acks, SHORT_MS, transactional_id, [ProducePartition(topic, 0, len(batch))])
    answer = peer.ask(request, bytes(batch))
    expect(answer.error, "NONE", "Produce")
    result: ProducedPartition = answer.message.partitions[0]
    return result


def fetch(
    peer: Peer, topic: str, offset: int, *, max_bytes: int = _MIB, isolation: int = 0, wait_ms: int = 0
) -> tuple[FetchedPartition, bytes]:
    """Fetch partition 0 and return (result, batches). Raises Violation."""
    partition = FetchPartition(topic, 0, -1, offset, max_bytes)
    answer = peer.ask(FetchRequest(wait_ms, 1, max_bytes, isolation, [partition]))
    expect(answer.error, "NONE", "Fetch")
    return answer.message.partitions[0], answer.payload


def appended(peer: Peer, topic: str, batch: bytes | bytearray, what: str, **options: Any) -> int:
    """Produce a batch that must be appended, and return its base offset. Raises Violation."""
    result = produce(peer, topic, batch, **options)
    expect(name_of(result.error_code), "NONE", what)
    return int(result.base_offset)


def refused(peer: Peer, topic: str, batch: bytes | bytearray, error: str, what: str, **options: Any) -> None:
    """Raise Violation unless a batch is refused with ``error``, and nothing is appended."""
    before = end_of(peer, topic)
    result = produce(peer, topic, batch, **options)
    expect(name_of(result.error_code), error, what)
    expect(result.base_offset, -1, f"{what}: base offset")
    expect(end_of(peer, topic), before, f"{what}: the end of the log")


def first_batch(payload: bytes) -> RecordBatch:
    """Return the first batch of a payload. Raises CorruptBatchError."""
    return RecordBatch(payload[: total_length(payload)])


def end_of(peer: Peer, topic: str, isolation: int = 0) -> int:
    """Return the high watermark of partition 0, or with ``isolation`` 1 the last stable offset."""
    return int(list_offset(peer, topic, LATEST, isolation).offset)


def list_offset(peer: Peer, topic: str, timestamp_ms: int, isolation: int = 0) -> Any:
    """Return the result of ListOffsets for partition 0. Raises Violation."""
    asked = [ListOffsetsPartition(topic, 0, -1, timestamp_ms)]
    answer = peer.ask(ListOffsetsRequest(isolation, asked))
    expect(answer.error, "NONE", "ListOffsets")
    return answer.message.partitions[0]


def _round_trip(cluster: Cluster, batch: bytearray, what: str) -> None:
    """Produce a batch and fetch it. Raise Violation if bytes were changed that a leader must not change."""
    topic = cluster.topic()
    peer = cluster.leader(topic)
    appended(peer, topic, batch_of(b"before", b"it"), what)
    offset = appended(peer, topic, batch, what)
    expect(offset, 2, f"{what}: base offset")
    result, payload = fetch(peer, topic, offset)
    expect(name_of(result.error_code), "NONE", f"{what}: Fetch")
    expect(
        payload[_LEADER_FIELDS:] == batch[_LEADER_FIELDS:], True, f"{what}: the fetched bytes are the same"
    )
    found = RecordBatch(payload)
    expect(found.header.base_offset, offset, f"{what}: base offset of the fetched batch")
    sent = RecordBatch(bytes(batch)).records(topic, 0)
    for before, after in zip(sent, found.records(topic, 0), strict=True):
        expect((after.key, after.value), (before.key, before.value), what)
        expect(after.headers, before.headers, what)


@check("produce.round-trip", "6")
def _plain(cluster: Cluster) -> None:
    _round_trip(cluster, batch_of(b"one", b"two", b"three"), "a batch")


@check("produce.nulls-and-headers", "5")
def _nulls(cluster: Cluster) -> None:
    headers: list[list[tuple[str, bytes | None]]] = [[("a", b"1"), ("a", None)], [], [("\u00e9", b"")]]
    keys = [b"k", None, b""]
    batch = build_batch([None, b"", b"v"], keys, [5, 3, 7], headers)
    _round_trip(cluster, batch, "nulls, empty values and headers")


@check("produce.wide-timestamps", "5")
def _wide(cluster: Cluster) -> None:
    now_ms = time.time_ns() // 1_000_000
    batch = build_batch([b"old", b"new"], None, [now_ms - 2**33, now_ms])
    _round_trip(cluster, batch, "timestamps of 8 bytes")


def _declare_codec(codec: Codec) -> None:
    @check(f"produce.codec-{codec}", "5")
    def _codec(cluster: Cluster) -> None:
        _round_trip(cluster, batch_of(b"a" * 2000, b"b" * 2000, codec=codec), f"a batch with {codec}")


for _each in Codec:
    if _each is not Codec.NONE:
        _declare_codec(_each)


def _changed(batch: bytearray, change: Callable[[bytearray], None], *, is_sealed: bool = True) -> bytearray:
    copy = bytearray(batch)
    change(copy)
    if is_sealed:
        seal(copy)
    return copy


def _set_attributes(value: int) -> Callable[[bytearray], None]:
    def change(batch: bytearray) -> None:
        batch[ATTRIBUTES_POSITION : ATTRIBUTES_POSITION + 2] = value.to_bytes(2, "big")

    return change


@check("produce.checksum", "5")
def _checksum(cluster: Cluster) -> None:
    topic = cluster.topic()
    batch = batch_of(b"value" * 10)
    for position in (ATTRIBUTES_POSITION, 30, HEADER_BYTES + 20, len(batch) - 1):
        damaged = bytearray(batch)
        damaged[position] ^= 1
        refused(cluster.leader(topic), topic, damaged, "CORRUPT_MESSAGE", f"byte {position} is wrong")


@check("produce.layout", "5")
def _layout(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    batch = batch_of(b"one", b"two")
    cases: dict[str, Callable[[bytearray], None]] = {
        "a record count that is not that of the columns": lambda b: b.__setitem__(slice(57, 61), b"\0\0\0\3"),
        "a last offset delta that is not the count - 1": lambda b: b.__setitem__(slice(23, 27), b"\0\0\0\2"),
        "magic 1": lambda b: b.__setitem__(16, 1),
        "a length that is not the batch's": lambda b: b.__setitem__(slice(8, 12), b"\0\0\0\x40"),
        "a body that is no array of four": lambda b: b.__setitem__(HEADER_BYTES, 0x93),
    }
    for what, change in cases.items():
        refused(peer, topic, _changed(batch, change), "CORRUPT_MESSAGE", what)


@check("produce.attributes", "5")
def _attributes(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    batch = batch_of(b"value")
    for attributes, error in (
        (0x0000, "UNSUPPORTED_FOR_MESSAGE_FORMAT"),
        (0x0507, "UNSUPPORTED_COMPRESSION_TYPE"),
        (0x000F, "INVALID_TIMESTAMP"),
        (0x0027, "INVALID_RECORD"),
        (0x0017, "INVALID_RECORD"),
    ):
        changed = _changed(batch, _set_attributes(attributes))
        refused(peer, topic, changed, error, f"attributes {attributes:#06x}")
    refused(peer, topic, build_marker(1, 0, 0, True, 0), "INVALID_RECORD", "a marker")


@check("produce.acks", "6")
def _acks(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    for number, acks in enumerate((0, 1, -1)):
        expect(appended(peer, topic, batch_of(b"v"), f"acks {acks}", acks=acks), number, "base offset")
    request = ProduceRequest(2, SHORT_MS, None, [])
    expect(peer.ask(request).error, "INVALID_REQUIRED_ACKS", "acks 2")


@check("produce.partitions", "6")
def _partitions(cluster: Cluster) -> None:
    topic, other = cluster.topic(), cluster.name("missing")
    batch = bytes(batch_of(b"v"))
    size = len(batch)
    peer = cluster.leader(topic)
    asked = [ProducePartition(other, 0, size), ProducePartition(topic, 0, size)]
    results = peer.ask(ProduceRequest(-1, SHORT_MS, None, asked), batch * 2).message.partitions
    expect(
        [(one.topic, name_of(one.error_code)) for one in results],
        [(other, "UNKNOWN_TOPIC_OR_PARTITION"), (topic, "NONE")],
        "results in the order of the request, each by itself",
    )
    asked = [ProducePartition(topic, 0, size)] * 2
    answer: Answer = peer.ask(ProduceRequest(-1, SHORT_MS, None, asked), batch * 2)
    expect(answer.error, "INVALID_REQUEST", "a partition twice in one request")


@check("produce.max-message-bytes", "4")
def _max_message_bytes(cluster: Cluster) -> None:
    topic = cluster.topic(max_message_bytes="2000")
    peer = cluster.leader(topic)
    appended(peer, topic, batch_of(b"v" * 1000), "a batch below max.message.bytes")
    refused(peer, topic, batch_of(b"v" * 3000), "MESSAGE_TOO_LARGE", "a batch above max.message.bytes")


@check("produce.timestamps", "5")
def _timestamps(cluster: Cluster) -> None:
    topic = cluster.topic()
    batch = build_batch([b"v"], None, 5)

    def below(changed: bytearray) -> None:
        changed[27:35] = (-2).to_bytes(8, "big", signed=True)

    refused(cluster.leader(topic), topic, _changed(batch, below), "CORRUPT_MESSAGE", "a timestamp below -1")


# --- producing without duplicates --------------------------------------------------------------------


def _producer(peer: Peer, producer_id: int = -1, epoch: int = -1) -> tuple[int, int]:
    answer = peer.ask(InitProducerIdRequest(None, 60_000, producer_id, epoch))
    expect(answer.error, "NONE", "InitProducerId")
    return answer.message.producer_id, answer.message.producer_epoch


def _sequenced(value: bytes, producer: tuple[int, int], sequence: int, count: int = 1) -> bytearray:
    options = {"producer_id": producer[0], "producer_epoch": producer[1], "base_sequence": sequence}
    return batch_of(*[value] * count, **options)


@check("idempotence.repetition", "5.1")
def _repetition(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    producer = _producer(peer)
    batches = [_sequenced(b"v%d" % number, producer, 2 * number, 2) for number in range(5)]
    offsets = [appended(peer, topic, batch, "the next sequence") for batch in batches]
    expect(offsets, [0, 2, 4, 6, 8], "base offsets")
    again = [appended(peer, topic, batch, "a batch again") for batch in batches]
    expect(again, offsets, "a batch again has the offset of its first copy")
    expect(end_of(peer, topic), 10, "the end of the log after repetitions")


@check("idempotence.gap", "5.1")
def _gap(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    producer = _producer(peer)
    error = "OUT_OF_ORDER_SEQUENCE_NUMBER"
    first = _sequenced(b"first", producer, 0)
    appended(peer, topic, first, "sequence 0")
    refused(peer, topic, _sequenced(b"v", producer, 2), error, "a gap in the sequences")
    refused(peer, topic, _sequenced(b"other", producer, 0), error, "other bytes with the same sequence")
    for number in range(1, 6):
        appended(peer, topic, _sequenced(b"v", producer, number), "the next sequence")
    refused(peer, topic, first, error, "a batch older than the last five")


@check("idempotence.unknown-producer", "5.1")
def _unknown_producer(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    batch = _sequenced(b"v", _producer(peer), 7)
    refused(peer, topic, batch, "UNKNOWN_PRODUCER_ID", "sequence 7 of an unknown producer")


@check("idempotence.epochs", "5.1")
def _epochs(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    former = _producer(peer)
    appended(peer, topic, _sequenced(b"v", former, 0), "sequence 0")
    later = _producer(peer, *former)
    expect(later, (former[0], former[1] + 1), "the next epoch")
    appended(peer, topic, _sequenced(b"v", later, 0), "sequence 0 of the next epoch")
    refused(peer, topic, _sequenced(b"v", former, 1), "INVALID_PRODUCER_EPOCH", "a batch of an older epoch")
    without = _sequenced(b"v", (former[0], -1), -1)
    refused(peer, topic, without, "INVALID_RECORD", "a producer id without epoch and sequence")


# --- reading -----------------------------------------------------------------------------------------


@check("fetch.offsets", "6")
def _offsets(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    for _ in range(3):
        appended(peer, topic, batch_of(b"a", b"b", b"c"), "a batch")
    result, payload = fetch(peer, topic, 4)
    expect(first_batch(payload).header.base_offset, 3, "the batch with offset 4 begins at")
    expect((result.high_watermark, result.log_start_offset), (9, 0), "high watermark and log start")
    result, payload = fetch(peer, topic, 9)
    expect((name_of(result.error_code), payload), ("NONE", b""), "a fetch at the high watermark")
    result, _ = fetch(peer, topic, 10)
    expect(name_of(result.error_code), "OFFSET_OUT_OF_RANGE", "a fetch above the high watermark")
    expect((result.log_start_offset, result.high_watermark), (0, 9), "the bounds in it")


@check("fetch.first-batch", "6")
def _first_batch(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    batch = batch_of(b"v" * 500)
    for _ in range(3):
        appended(peer, topic, batch, "a batch")
    _, payload = fetch(peer, topic, 0, max_bytes=1)
    expect(len(payload), len(batch), "bytes for max_bytes 1: the first batch whole")
    _, payload = fetch(peer, topic, 0, max_bytes=2 * len(batch) + 5)
    expect(len(payload), 2 * len(batch), "bytes for max_bytes above two batches")


@check("fetch.long-poll", "6")
def _long_poll(cluster: Cluster) -> None:
    topic = cluster.topic()
    begin = time.monotonic()
    fetch(cluster.leader(topic), topic, 0, wait_ms=300)
    expect(time.monotonic() - begin >= 0.29, True, "an empty fetch waits for max_wait_ms")
    leader = cluster.leader(topic)
    with Peer(leader.address) as reader:
        asked = [FetchPartition(topic, 0, -1, 0, _MIB)]
        request = FetchRequest(10_000, 1, _MIB, 0, asked)
        number = reader.post(request)
        appended(leader, topic, batch_of(b"v"), "a batch")
        answer = reader.answer(ApiKey.FETCH, number)
        expect(time.monotonic() - begin < 5, True, "a long poll ends when data arrives")
        expect(answer.message.partitions[0].high_watermark, 1, "its high watermark")


@check("fetch.watching", "6")
def _watching(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    appended(peer, topic, batch_of(b"v"), "a batch")
    result, payload = fetch(peer, topic, 0, max_bytes=0, wait_ms=5_000)
    expect((result.high_watermark, payload), (1, b""), "a watched partition has offsets and no data")


@check("fetch.rack", "6")
def _rack(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    if not peer.offers(FetchRequestV1):
        return
    batch = batch_of(b"v")
    appended(peer, topic, batch, "a batch")
    for rack in (None, "a rack in which no node is"):
        asked = [FetchPartition(topic, 0, -1, 0, _MIB)]
        answer = peer.ask(FetchRequestV1(0, 1, _MIB, 0, asked, rack))
        expect(answer.error, "NONE", "Fetch in version 1")
        expect(answer.message.preferred_read_replicas, [], "replicas near that rack")
        expect(len(answer.payload), len(batch), "bytes from the leader")


@check("fetch.isolation-level", "6")
def _isolation(cluster: Cluster) -> None:
    topic = cluster.topic()
    asked = [FetchPartition(topic, 0, -1, 0, _MIB)]
    answer = cluster.leader(topic).ask(FetchRequest(0, 1, _MIB, 2, asked))
    expect(answer.error, "INVALID_REQUEST", "isolation level 2")


@check("fetch.leader-epoch", "6")
def _leader_epoch(cluster: Cluster) -> None:
    topic = cluster.topic()
    asked = [FetchPartition(topic, 0, 1_000_000, 0, _MIB)]
    answer = cluster.leader(topic).ask(FetchRequest(0, 1, _MIB, 0, asked))
    expect(name_of(answer.message.partitions[0].error_code), "UNKNOWN_LEADER_EPOCH", "a newer leader epoch")


@check("offsets.list", "6")
def _list(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    now_ms = time.time_ns() // 1_000_000
    for shift in (0, 1000, 500):
        appended(peer, topic, build_batch([b"v", b"w"], None, now_ms + shift), "a batch")
    found = [list_offset(peer, topic, time_ms) for time_ms in (EARLIEST, LATEST, MAX_TIMESTAMP)]
    expect([one.offset for one in found], [0, 6, 2], "the offsets of -2, -1 and -3")
    expect([one.timestamp_ms for one in found], [-1, -1, now_ms + 1000], "their timestamps")
    expect(list_offset(peer, topic, now_ms + 1).offset, 2, "the first batch that is not older")
    expect(list_offset(peer, topic, now_ms + 2000).offset, -1, "the offset of a time after all records")
    expect(name_of(list_offset(peer, topic, -4).error_code), "INVALID_REQUEST", "the time -4")


@check("offsets.delete-records", "6")
def _delete(cluster: Cluster) -> None:
    topic = cluster.topic()
    peer = cluster.leader(topic)
    for _ in range(3):
        appended(peer, topic, batch_of(b"v"), "a batch")

    def delete(before: int) -> Any:
        asked = [DeleteRecordsPartition(topic, 0, before)]
        return peer.ask(DeleteRecordsRequest(SHORT_MS, asked)).message.partitions[0]

    expect(delete(2).log_start_offset, 2, "the log start after DeleteRecords")
    expect(name_of(fetch(peer, topic, 1)[0].error_code), "OFFSET_OUT_OF_RANGE", "a fetch below it")
    expect(name_of(delete(4).error_code), "OFFSET_OUT_OF_RANGE", "a deletion above the high watermark")
    expect(delete(LATEST).log_start_offset, 3, "the log start after a deletion of everything")
