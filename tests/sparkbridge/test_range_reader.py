"""read_range: the rows that one task reads, mostly from a log in memory, otherwise over TCP."""

from __future__ import annotations

import subprocess
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

import kafkalite.sync as kafkalite
from kafkalite.errors import (
    ConnectionFailedError,
    CorruptBatchError,
    KafkaliteError,
    OffsetOutOfRangeError,
    RecordError,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import AbortedTransaction
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.gaps import build_gap
from kafkalite.records.header import stamp
from kafkalite.testing import SyncCluster
from sparkbridge.brokers.cluster import Fetched, SparkCluster, TopicInfo
from sparkbridge.errors import DataLossError, DataLossWarning
from sparkbridge.offsets import OffsetRange, TopicSnapshot
from sparkbridge.options import SourceOptions
from sparkbridge.source import range_reader
from sparkbridge.source.range_reader import TARGET_BYTES, TARGET_ROWS, read_range
from sparkbridge.source.schema import arrow_schema, source_schema

ROOT = Path(__file__).resolve().parents[2]
KEYED = StructType([StructField("offset", LongType()), StructField("value", StringType())])


def options(servers: str = "nowhere:1", **given: str) -> SourceOptions:
    known = {"kafka.bootstrap.servers": servers, "subscribe": "t", "startingOffsets": "earliest"}
    return SourceOptions.parse(known | given, is_stream=False)


class Log:
    """A partition's log and the broker that serves it, with the interface of SparkCluster."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, bytes]] = []  # base offset, next offset, bytes
        self.open: dict[int, int] = {}  # producer to the first offset of its transaction
        self.aborted: list[tuple[int, int, int]] = []  # producer, first offset, offset of the marker
        self.start = self.end = 0
        self.stable: int | None = None
        self.topic_id = "id-1"
        self.calls: list[tuple[str, int]] = []
        self.is_deleted = False
        self.on_send: Callable[[int], None] = lambda offset: None
        self.on_receive: Callable[[int], None] = lambda offset: None

    # --- writing

    def add(self, batch: bytearray, count: int = 1) -> None:
        stamp(batch, base_offset=self.end, leader_epoch=0)
        self.batches.append((self.end, self.end + count, bytes(batch)))
        self.end += count

    def write(self, *values: bytes | None, producer: int | None = None, **settings: Any) -> None:
        if producer is not None:
            settings |= {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
            settings["transactional"] = True
            self.open.setdefault(producer, self.end)
        self.add(build_batch(list(values), **settings), len(values))

    def mark(self, producer: int, *, is_commit: bool) -> None:
        first = self.open.pop(producer, None)
        if first is not None and not is_commit:
            self.aborted.append((producer, first, self.end))
        self.add(build_marker(producer, 0, 0, is_commit, 5))

    # --- requests

    def index_of(self, offset: int) -> int:
        """Return the index of the batch that contains ``offset``."""
        return bisect_right(self.batches, offset, key=lambda batch: batch[1])

    def topics(self, *, names: Any = None, pattern: Any = None) -> dict[str, TopicInfo]:
        self.calls.append(("topics", -1))
        return {} if self.is_deleted else {"t": TopicInfo(self.topic_id, 1)}

    def avoid_last_responder(self) -> None:
        self.calls.append(("avoid", -1))

    def snapshot(self, topics: Any) -> dict[str, TopicSnapshot]:
        assert topics == {"t": [0]}
        if self.is_deleted:
            return {}
        return {"t": TopicSnapshot(self.topic_id, (self.start,), (self.end,))}

    def send_fetch(self, tp: TopicPartition, offset: int, *, max_bytes: int, max_wait_ms: int = 0) -> Any:
        assert tp == ("t", 0)
        self.calls.append(("send", offset))
        self.on_send(offset)
        return (offset, max_bytes)

    def receive_fetch(self, token: Any) -> Fetched:
        offset, max_bytes = token
        self.calls.append(("receive", offset))
        self.on_receive(offset)
        if self.is_deleted:
            raise UnknownTopicOrPartitionError("t-0")
        if not self.start <= offset <= self.end:
            raise OffsetOutOfRangeError(f"t-0: {offset}")
        stable = self.end if self.stable is None else self.stable
        chosen: list[bytes] = []
        for _, next_offset, batch in islice(self.batches, self.index_of(offset), None):
            max_bytes -= len(batch)
            if next_offset > stable or (chosen and max_bytes < 0):
                break
            chosen.append(batch)
        payload = memoryview(bytearray(b"".join(chosen)))
        first_batch = self.index_of(offset)
        bounds = [
            bound for batch in self.batches[first_batch : first_batch + len(chosen)] for bound in batch[:2]
        ]
        aborted = [
            AbortedTransaction(producer, first)
            for producer, first, marker in self.aborted
            if bounds and first < bounds[-1] and marker >= bounds[0]
        ]
        return Fetched(payload, aborted, self.end, stable, self.start)

    def read(self, start: int, end: int, schema: Any = KEYED, topic_id: str = "", **given: str) -> Any:
        range_ = OffsetRange("t", 0, start, end, topic_id)
        cluster: Any = self
        return read_range(cluster, range_, options(**given), schema)

    def rows(self, start: int, end: int, **given: Any) -> list[tuple[int, str | None]]:
        return [tuple(row.values()) for rows in self.read(start, end, **given) for row in rows.to_pylist()]  # type: ignore[misc]


@pytest.fixture
def log() -> Log:
    return Log()


def numbered(log: Log, count: int, per_batch: int = 1) -> list[tuple[int, str]]:
    """Fill the log, and return what a reader must read."""
    first = log.end
    for base in range(first, first + count, per_batch):
        log.write(*(b"v%d" % offset for offset in range(base, min(base + per_batch, first + count))))
    return [(offset, f"v{offset}") for offset in range(first, first + count)]


# --- rows ----------------------------------------------------------------------------------------


def test_an_empty_range_sends_no_request(log: Log) -> None:
    assert list(log.read(7, 7, topic_id="id-1")) == []
    assert log.calls == []


@pytest.mark.parametrize(("start", "end"), [(0, 100), (3, 97), (10, 20), (15, 16), (99, 100)])
def test_exactly_the_range_is_returned_whatever_the_batches(log: Log, start: int, end: int) -> None:
    written = numbered(log, 100, per_batch=10)
    assert log.rows(start, end) == written[start:end]


def test_whole_schema_is_the_one_spark_checks(log: Log) -> None:
    log.write(b"a", keys=[b"k"], timestamps_ms=5, headers=[[("h", b"1")]])
    schema = source_schema(include_headers=True)
    (rows,) = log.read(0, 1, schema=schema)
    assert rows.schema == arrow_schema(schema)
    (row,) = rows.to_pylist()
    assert (row["key"], row["topic"], row["partition"], row["headers"]) == (
        b"k",
        "t",
        0,
        [{"key": "h", "value": b"1"}],
    )


def test_the_next_fetch_is_sent_before_rows_are_returned_and_none_beyond_the_end(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "LEAST_BYTES", 0)
    values = [b"x" * 1000] * 600
    for _ in range(4):
        log.write(*values)
    read = log.read(0, 2400)
    given = 0
    for rows in read:
        given += rows.num_rows
        sent = max(offset for call, offset in log.calls if call == "send")
        assert sent == min(given, 1800)
    assert given == 2400
    assert log.calls == [
        ("send", 0),
        ("receive", 0),
        ("send", 600),
        ("receive", 600),
        ("send", 1200),
        ("receive", 1200),
        ("send", 1800),
        ("receive", 1800),
    ]


def test_a_fetch_that_cannot_be_sent_ahead_is_sent_when_it_is_needed(log: Log) -> None:
    written = numbered(log, 30, per_batch=10)
    refusals = iter([False, True])

    def refuse(offset: int) -> None:
        if next(refusals, False):
            raise ConnectionFailedError("no broker")

    log.on_send = refuse
    small = {"kafka.max.partition.fetch.bytes": "1"}
    assert log.rows(0, 30, **small) == written
    sent = [offset for call, offset in log.calls if call == "send"]
    assert sent == [0, 10, 10, 20], "a byte at most, so one batch an answer; the second was refused once"


def test_small_batches_are_joined_and_each_record_batch_is_of_bounded_size(log: Log) -> None:
    written = numbered(log, 25_000)
    given = list(log.read(0, 25_000))
    assert [tuple(row.values()) for rows in given for row in rows.to_pylist()] == written
    assert all(rows.num_rows <= TARGET_ROWS for rows in given)
    assert all(2 * rows.num_rows >= TARGET_ROWS for rows in given[:-1])


def test_small_responses_are_joined(log: Log) -> None:
    written = numbered(log, 40)
    log.on_receive = lambda offset: setattr(log, "stable", offset + 1)  # one record per response
    (rows,) = log.read(0, 40)
    assert [tuple(row.values()) for row in rows.to_pylist()] == written


@pytest.mark.parametrize(("count", "value_bytes"), [(64, 100_000), (100_000, 3), (1, 5_000_000)])
def test_a_batch_that_is_far_too_large_is_returned_in_parts(log: Log, count: int, value_bytes: int) -> None:
    log.write(*[b"x" * value_bytes] * count)
    given = list(log.read(0, count))
    assert sum(rows.num_rows for rows in given) == count
    assert pa.concat_arrays([rows["offset"] for rows in given]).to_pylist() == list(range(count))
    for rows in given:
        assert rows.num_rows <= TARGET_ROWS
        assert rows.num_rows == 1 or rows.num_rows * value_bytes <= 2 * TARGET_BYTES


def test_a_compressed_answer_is_not_one_record_batch(log: Log) -> None:
    for _ in range(30):
        log.write(*[b"x" * 1000] * 300, codec=4)
    given = list(log.read(0, 9000))
    assert sum(rows.num_rows for rows in given) == 9000
    assert all(rows.num_rows * 1000 <= 2 * TARGET_BYTES for rows in given)


# --- invisible records ---------------------------------------------------------------------------


def test_gaps_and_markers_are_no_loss(log: Log) -> None:
    numbered(log, 2)
    log.add(build_gap(0, 50, 0), 50)
    log.write(b"t", producer=7)
    log.mark(7, is_commit=True)
    numbered(log, 1)
    log.add(build_gap(0, 10, 0), 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert log.rows(0, log.end) == [(0, "v0"), (1, "v1"), (52, "t"), (54, "v54")]
        assert log.rows(20, 40) == []


def test_aborted_transactions_are_dropped_when_read_committed(log: Log) -> None:
    log.write(b"a0", producer=7)
    log.write(b"c1", producer=8)
    log.write(b"p2")
    log.mark(7, is_commit=False)
    log.mark(8, is_commit=True)
    log.write(b"c5", producer=7)
    log.mark(7, is_commit=True)
    assert log.rows(0, 7) == [(1, "c1"), (2, "p2"), (5, "c5")]
    uncommitted = {"kafka.isolation.level": "read_uncommitted"}
    assert log.rows(0, 7, **uncommitted) == [(0, "a0"), (1, "c1"), (2, "p2"), (5, "c5")]


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from([None, 7, 8]), st.integers(1, 4)),
    st.tuples(st.just("mark"), st.sampled_from([7, 8]), st.booleans()),
    st.tuples(st.just("gap"), st.none(), st.integers(1, 5)),
)


@given(
    steps=st.lists(STEPS, max_size=30),
    bounds=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    max_bytes=st.sampled_from([1, 400, 2000]),
    is_read_committed=st.booleans(),
)
def test_any_range_of_any_log(
    steps: list[tuple[str, int, Any]], bounds: tuple[int, int], max_bytes: int, is_read_committed: bool
) -> None:
    log = Log()
    written: dict[int, str] = {}
    undecided: dict[int, dict[int, str]] = {7: {}, 8: {}}
    for what, producer, detail in [*steps, ("mark", 7, False), ("mark", 8, True)]:
        if what == "write":
            rows = {log.end + index: f"v{log.end + index}" for index in range(detail)}
            (written if producer is None else undecided[producer]).update(rows)
            log.write(*map(str.encode, rows.values()), producer=producer)
        elif what == "mark":
            if detail or not is_read_committed:
                written.update(undecided[producer])
            undecided[producer] = {}
            log.mark(producer, is_commit=detail)
        else:
            log.add(build_gap(0, detail, 0), detail)
    start, end = (min(bound, log.end) for bound in sorted(bounds))
    given_options = {"kafka.max.partition.fetch.bytes": str(max_bytes)}
    if not is_read_committed:
        given_options["kafka.isolation.level"] = "read_uncommitted"
    expected = [(offset, value) for offset, value in sorted(written.items()) if start <= offset < end]
    assert log.rows(start, end, **given_options) == expected


# --- damage --------------------------------------------------------------------------------------


def test_a_damaged_batch_is_named_by_its_offset(log: Log) -> None:
    numbered(log, 5)
    base, next_offset, batch = log.batches[3]
    log.batches[3] = (base, next_offset, batch[:-3] + b"\0\0\0")
    with pytest.raises(CorruptBatchError, match=r"^t-0@3: the batch can't be read: .*CRC"):
        log.rows(0, 5)


def test_bytes_that_are_not_a_batch_are_named_by_their_offset(log: Log) -> None:
    numbered(log, 2)
    log.batches.append((2, 3, b"rubbish"))
    log.end = 3
    with pytest.raises(CorruptBatchError, match=r"^t-0@2: 7 bytes of a response are not a record batch"):
        log.rows(0, 3)


def test_kafka_s_own_rows_are_named_by_their_address(log: Log) -> None:
    from kafkalite.records.header import seal

    batch = build_batch([b"a"])
    batch[22] = 0
    seal(batch)
    log.add(batch)
    with pytest.raises(RecordError, match=r"^t-0@0: the batch can't be read: .*rows, not columns"):
        log.rows(0, 1)


# --- losses --------------------------------------------------------------------------------------

IGNORED = {"failOnDataLoss": "false"}
ONE_BY_ONE = {"kafka.max.partition.fetch.bytes": "1"}  # one batch per response


def test_log_start_beyond_the_position_is_a_loss(log: Log) -> None:
    numbered(log, 100)
    log.start = 30
    with pytest.raises(
        DataLossError, match=r"t-0 offsets 10 to 30: the log now starts at 30.*failOnDataLoss"
    ):
        log.rows(10, 50)


def test_reading_continues_at_the_log_start_when_loss_is_allowed(log: Log) -> None:
    written = numbered(log, 100)
    log.start = 30
    with pytest.warns(DataLossWarning, match="t-0 offsets 10 to 30: the log now starts at 30"):
        assert log.rows(10, 50, **IGNORED) == written[30:50]
    with pytest.warns(DataLossWarning, match="t-0 offsets 10 to 20: the log now starts at 30"):
        assert log.rows(10, 20, **IGNORED) == []


def test_a_log_start_that_overtakes_a_read(log: Log) -> None:
    for _ in range(4):
        log.write(*[b"x" * 1000] * 600)

    def overtake(offset: int) -> None:
        if offset == 1200:
            log.start = 2000

    log.on_receive = overtake
    with pytest.raises(DataLossError, match="offsets 1200 to 2000: the log now starts at 2000"):
        log.rows(0, 2400)
    log.start = 0
    with pytest.warns(DataLossWarning, match="offsets 1200 to 2000"):
        offsets = [offset for offset, _ in log.rows(0, 2400, **IGNORED)]
    assert offsets == [*range(1200), *range(2000, 2400)]


def test_range_beyond_the_log_s_end_is_a_loss(log: Log) -> None:
    numbered(log, 10)
    with pytest.raises(DataLossError, match="t-0 offsets 15 to 20: the log now ends at 10"):
        log.rows(15, 20)
    with pytest.warns(DataLossWarning, match="the log now ends at 10"):
        assert log.rows(15, 20, **IGNORED) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda log: setattr(log, "is_deleted", True), "the topic was deleted"),
        (lambda log: setattr(log, "topic_id", "id-2"), "the topic was deleted and created again"),
    ],
)
def test_a_deleted_or_replaced_topic_is_a_loss(log: Log, change: Callable[[Log], None], why: str) -> None:
    numbered(log, 10)
    change(log)
    with pytest.raises(DataLossError, match=rf"t-0 offsets 2 to 8: {why} \(set failOnDataLoss"):
        log.rows(2, 8, topic_id="id-1")
    with pytest.warns(DataLossWarning, match=why):
        assert log.rows(2, 8, topic_id="id-1", **IGNORED) == []


@pytest.mark.parametrize(
    ("topic_id", "why"), [("", "the partition was deleted"), ("id-1", "the topic was deleted")]
)
def test_a_topic_deleted_while_it_is_read_is_a_loss(log: Log, topic_id: str, why: str) -> None:
    numbered(log, 10)
    log.on_receive = lambda offset: setattr(log, "is_deleted", True)
    with pytest.raises(DataLossError, match=f"t-0 offsets 2 to 8: {why}"):
        log.rows(2, 8, topic_id=topic_id)


def test_a_leader_that_does_not_know_an_existing_partition_is_asked_again(log: Log) -> None:
    written = numbered(log, 10)
    left = [UnknownTopicOrPartitionError("t-0")] * 2

    def refuse(offset: int) -> None:
        if left:
            raise left.pop()

    log.on_receive = refuse
    assert log.rows(2, 8, topic_id="id-1") == written[2:8]
    assert not left


def test_a_leader_that_never_knows_its_partition_is_an_error_and_no_loss(log: Log) -> None:
    numbered(log, 10)

    def refuse(offset: int) -> None:
        raise UnknownTopicOrPartitionError("t-0")

    log.on_receive = refuse
    with pytest.raises(UnknownTopicOrPartitionError):
        log.rows(2, 8, topic_id="id-1", **IGNORED, **{"kafkaConsumer.pollTimeoutMs": "100"})


def test_topic_of_the_same_id_is_read(log: Log) -> None:
    written = numbered(log, 10)
    assert log.rows(2, 8, topic_id="id-1") == written[2:8]
    asked = [("send", 2), ("receive", 2), ("topics", -1)]
    assert log.calls == asked, "once, behind the answer, whose records so are known to be of this topic"


def test_a_read_excludes_objects_from_collection(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    uses: list[str] = []
    monkeypatch.setattr(range_reader, "spare_collections", uses.append)
    written = numbered(log, 10)
    assert log.rows(2, 2) == []
    assert log.rows(2, 8) == written[2:8]
    assert uses == ["read"]


def test_a_first_response_of_another_topic_is_not_returned(log: Log) -> None:
    numbered(log, 10)
    log.on_receive = lambda offset: setattr(log, "topic_id", "id-2")
    with pytest.warns(DataLossWarning, match="t-0 offsets 2 to 8: the topic was deleted and created again"):
        assert log.rows(2, 8, topic_id="id-1", **IGNORED) == []


@pytest.mark.parametrize("given", [{}, IGNORED])
def test_a_topic_created_again_while_it_is_read_fails_the_task(log: Log, given: dict[str, str]) -> None:
    """Even with failOnDataLoss=false: returned rows may be of another topic."""
    numbered(log, 10)
    log.on_receive = lambda offset: setattr(log, "topic_id", "id-2" if offset > 4 else "id-1")
    with pytest.raises(DataLossError, match=r"t-0: .* created again while offsets 2 to 8"):
        log.rows(2, 8, topic_id="id-1", **ONE_BY_ONE, **given)


def test_a_topic_deleted_and_created_again_is_reported_once(log: Log) -> None:
    written = numbered(log, 10)

    def refuse(offset: int) -> None:
        if offset > 4:
            log.topic_id = "id-2"
            raise UnknownTopicOrPartitionError("t-0")

    log.on_receive = refuse
    with pytest.warns(
        DataLossWarning, match="offsets 5 to 8: the topic was deleted and created again"
    ) as told:
        assert log.rows(2, 8, topic_id="id-1", **ONE_BY_ONE, **IGNORED) == written[2:5]
    assert len(told) == 1


def test_a_broker_that_lags_behind_does_not_fail_a_read_at_its_end(log: Log) -> None:
    written = numbered(log, 10)
    ids = iter(["id-1", "id-0", "id-1"])
    log.topics = lambda **_: {"t": TopicInfo(next(ids), 1)}  # type: ignore[method-assign]
    assert log.rows(2, 8, topic_id="id-1", **ONE_BY_ONE) == written[2:8]
    assert list(ids) == []


def test_brokers_that_stop_after_the_last_record_do_not_fail_the_task(log: Log) -> None:
    written = numbered(log, 10)
    rows = log.read(2, 8, topic_id="id-1", **ONE_BY_ONE)
    read = next(rows).to_pylist()

    def away(**_: Any) -> Any:
        raise ConnectionFailedError("no broker responds")

    log.topics = away  # type: ignore[method-assign]
    assert list(rows) == []
    assert [tuple(row.values()) for row in read] == written[2:8]


def test_a_topic_deleted_after_the_last_record_is_no_loss(log: Log) -> None:
    written = numbered(log, 10)
    rows = log.read(2, 8, topic_id="id-1", **ONE_BY_ONE)
    read = next(rows).to_pylist()
    log.is_deleted = True
    assert list(rows) == []
    assert [tuple(row.values()) for row in read] == written[2:8]


def test_a_leader_that_does_not_know_its_end_yet_is_asked_again(log: Log) -> None:
    written = numbered(log, 10)
    refusals = iter([True, True])

    def refuse(offset: int) -> None:
        if next(refusals, False):
            raise OffsetOutOfRangeError("t-0")

    log.on_receive = refuse
    assert log.rows(0, 10) == written


def test_an_end_that_never_becomes_readable_is_named(log: Log) -> None:
    numbered(log, 10)
    log.end = 12
    limit = {"kafkaConsumer.pollTimeoutMs": "20"}
    with pytest.raises(RequestTimeoutError, match=r"t-0: offset 10 did not .* 20 ms.*pollTimeoutMs"):
        log.rows(0, 12, **limit)
    log.stable = 5
    with pytest.raises(
        RequestTimeoutError, match=r"offset 5 did not .* ends at 10, .* below 5 .*kl txn list"
    ):
        log.rows(0, 10, **limit)


@pytest.mark.parametrize("error", [ConnectionFailedError, RequestTimeoutError])
def test_a_leader_that_is_away_for_long_is_waited_for(log: Log, error: type[KafkaliteError]) -> None:
    """For kafkaConsumer.pollTimeoutMs, as in the connector, not only for kafka.request.timeout.ms."""
    written = numbered(log, 10)
    failures = iter(range(3))

    def fail(offset: int) -> None:
        if next(failures, None) is not None:
            raise error("away")

    log.on_receive = fail
    assert log.rows(0, 10) == written
    failures = iter(range(1_000_000))
    with pytest.raises(error, match="away"):
        log.rows(0, 10, **{"kafkaConsumer.pollTimeoutMs": "20"})


def test_the_time_that_rows_take_does_not_count(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "CHUNK_BYTES", 1)
    numbered(log, 2 * TARGET_ROWS, per_batch=TARGET_ROWS)
    now_s = [0.0]
    monkeypatch.setattr(range_reader.time, "monotonic", lambda: now_s[0])
    batches = log.read(0, 2 * TARGET_ROWS)
    assert next(batches).num_rows == TARGET_ROWS
    now_s[0] += 3_600
    failures = [ConnectionFailedError("away")]

    def fail(offset: int) -> None:
        if failures:
            raise failures.pop()

    log.on_receive = fail
    assert sum(rows.num_rows for rows in batches) == TARGET_ROWS


def test_log_that_now_ends_inside_of_the_range_is_a_loss(log: Log) -> None:
    """The planned records no longer exist: the batch must not fail for ever."""
    written = numbered(log, 10)
    limit = {"kafkaConsumer.pollTimeoutMs": "20"}
    with pytest.raises(DataLossError, match="t-0 offsets 10 to 12: the log now ends at 10"):
        log.rows(0, 12, **limit)
    with pytest.warns(DataLossWarning, match="offsets 10 to 12"):
        assert log.rows(0, 12, **limit, **IGNORED) == written


@pytest.mark.parametrize("lags", [lambda log: {}, lambda log: {"t": TopicInfo("an older one", 1)}])
def test_a_topic_is_missing_only_if_the_next_broker_confirms_it(log: Log, lags: Any) -> None:
    """With failOnDataLoss=false one broker's response would skip the whole range."""
    written = numbered(log, 10)
    results = iter([lags(log), lags(log)])
    now = log.topics
    log.topics = lambda **names: next(results, now(**names))  # type: ignore[method-assign]
    assert log.rows(0, 10, topic_id="id-1", **IGNORED) == written
    assert log.calls.count(("avoid", -1)) == 2


# --- over TCP ------------------------------------------------------------------------------------


def read_all(cluster: SyncCluster, range_: OffsetRange, **given: str) -> list[tuple[Any, ...]]:
    wanted = options(cluster.bootstrap_servers, **given)
    batches = read_range(SparkCluster.shared(wanted.client), range_, wanted, KEYED)
    return [tuple(row.values()) for rows in batches for row in rows.to_pylist()]


def test_records_of_a_broker(cluster: SyncCluster, topic: str) -> None:
    values = [b"v%d" % number for number in range(5000)]
    cluster.produce(topic, values, partition=1)
    expected = [(number, f"v{number}") for number in range(5000)]
    assert read_all(cluster, OffsetRange(topic, 1, 0, 5000)) == expected
    assert read_all(cluster, OffsetRange(topic, 1, 4321, 4322)) == expected[4321:4322]


def test_transactions_of_a_broker(cluster: SyncCluster, topic: str) -> None:
    with kafkalite.Producer(cluster.bootstrap_servers, transactional_id=topic) as producer:
        for number in range(6):
            transaction = producer.transaction()
            try:
                with transaction:
                    producer.send(topic, b"v%d" % number, partition=0)
                    producer.flush()
                    if number % 3 == 0:
                        raise KeyError(number)
            except KeyError:
                pass
    shared = SparkCluster.shared(options(cluster.bootstrap_servers).client)
    end = shared.snapshot({topic: [0]})[topic].ends[0]
    assert end == 12, "six records and six markers"
    assert [value for _, value in read_all(cluster, OffsetRange(topic, 0, 0, end))] == [
        "v1",
        "v2",
        "v4",
        "v5",
    ]
    uncommitted = {"kafka.isolation.level": "read_uncommitted"}
    assert len(read_all(cluster, OffsetRange(topic, 0, 0, end), **uncommitted)) == 6


def test_an_abandoned_read_keeps_the_connection_usable(cluster: SyncCluster, topic: str) -> None:
    cluster.produce(topic, [b"x" * 1000] * 5000, partition=0)
    wanted = options(cluster.bootstrap_servers)
    shared = SparkCluster.shared(wanted.client)
    read: Iterator[Any] = read_range(shared, OffsetRange(topic, 0, 0, 5000), wanted, KEYED)
    next(read)
    del read
    assert len(read_all(cluster, OffsetRange(topic, 0, 10, 4000))) == 3990


def test_a_topic_created_again_is_noticed(cluster: SyncCluster, topic: str) -> None:
    cluster.produce(topic, [b"a"] * 10, partition=0)
    wanted = options(cluster.bootstrap_servers)
    topic_id = SparkCluster.shared(wanted.client).topics(names=[topic])[topic].topic_id
    range_ = OffsetRange(topic, 0, 0, 10, topic_id)
    assert len(read_all(cluster, range_)) == 10
    with kafkalite.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topics([topic])
        admin.create_topic(topic, partitions=3)
    cluster.produce(topic, [b"b"] * 10, partition=0)
    with pytest.raises(DataLossError, match="created again"):
        read_all(cluster, range_)


def test_records_deleted_before_they_were_read(cluster: SyncCluster, topic: str) -> None:
    cluster.produce(topic, [b"a"] * 10, partition=0)
    cluster.produce(topic, [b"b"] * 10, partition=0)
    with kafkalite.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(topic, 0): 10})
    with pytest.raises(DataLossError, match="offsets 3 to 10: the log now starts at 10"):
        read_all(cluster, OffsetRange(topic, 0, 3, 20))
    with pytest.warns(DataLossWarning, match="offsets 3 to 10"):
        assert len(read_all(cluster, OffsetRange(topic, 0, 3, 20), **IGNORED)) == 10


# --- memory --------------------------------------------------------------------------------------

MEMORY_BOUND_MIB = 32

READER = """
import sys
import pyarrow, pyspark.sql.pandas.types
from sparkbridge.brokers.cluster import SparkCluster
from sparkbridge.offsets import OffsetRange
from sparkbridge.options import SourceOptions
from sparkbridge.source.range_reader import read_range
from sparkbridge.source.schema import source_schema

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024

servers, topic, count, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = SourceOptions.parse(
    {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}, is_stream=False
)
cluster = SparkCluster.shared(options.client)
cluster.topics(names=[topic])
before = status("VmRSS")
read_bytes = 0
for _ in range(times):
    for rows in read_range(cluster, OffsetRange(topic, 0, 0, count), options, source_schema()):
        read_bytes += pyarrow.compute.sum(pyarrow.compute.binary_length(rows["value"])).as_py()
print(read_bytes, status("VmHWM") - before)
"""


def test_300_megabytes_are_read_in_bounded_memory(cluster: SyncCluster, topic: str) -> None:
    """The peak above the memory before the first fetch: two responses, their rows, and slack."""
    count, times = 60_000, 5
    for _ in range(6):
        cluster.produce(topic, [b"x" * 1000] * (count // 6), partition=0)
    arguments = [cluster.bootstrap_servers, topic, str(count), str(times)]
    finished = subprocess.run(
        [sys.executable, "-c", READER, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    read_bytes, grown_mib = finished.stdout.split()
    assert int(read_bytes) == 300_000_000
    assert float(grown_mib) < MEMORY_BOUND_MIB
