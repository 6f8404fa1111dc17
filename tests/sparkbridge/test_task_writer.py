"""The records that a task attempt sends: batches, limits, order. The test plays the tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa

from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import InvalidTopicError, RecordError, RecordTooLargeError
from kafkalite.model import Record, TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder
from kafkalite.records.partitioners import partition_for_key
from kafkalite.testing import SyncCluster
from sparkbridge.options import SinkOptions
from sparkbridge.sink import task_writer
from sparkbridge.sink.schema import SinkColumns
from sparkbridge.sink.task_writer import TaskIdentity, TopicWriter, write_task

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {
    "value": pa.binary(),
    "key": pa.binary(),
    "headers": HEADERS,
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}

_numbers = count(1)


def batch_of(**columns: Any) -> Any:
    arrays = [pa.array(values, TYPES[name]) for name, values in columns.items()]
    return pa.record_batch(arrays, names=list(columns))


def columns_of(batch: Any) -> SinkColumns:
    return SinkColumns(**{name: batch.schema.get_field_index(name) for name in batch.schema.names})


def options(cluster: SyncCluster, topic: str | None, **given: str) -> SinkOptions:
    settings = {"kafka.bootstrap.servers": cluster.bootstrap_servers, **given}
    return SinkOptions.parse(settings if topic is None else {**settings, "topic": topic}, is_stream=True)


def task(partition: int = 0, batch_id: int = 0) -> TaskIdentity:
    number = next(_numbers)
    return TaskIdentity(f"sink-{number}", batch_id, "query", f"attempt-{number}", partition)


def write(cluster: SyncCluster, topic: str | None, *batches: Any, **given: str) -> list[Record]:
    """Write at least once, and return the records of the topic by partition."""
    given = {"exactlyOnce": "false", **given}
    columns = columns_of(batches[0])
    columns = columns if topic is None else columns._replace(topic=None)
    write_task(iter(batches), columns, options(cluster, topic, **given), task())
    return [] if topic is None else cluster.records(topic)


@pytest.fixture(autouse=True)
def _no_producers_left() -> Iterator[None]:
    yield
    for producer in list(task_writer._producers.values()):
        task_writer._forget_producer(producer)


def test_every_column_is_written(cluster: SyncCluster) -> None:
    topic = "of-long-ago"
    cluster.create_topic(topic, partitions=3, configs={"retention.ms": "-1"})
    when = datetime(2024, 5, 6, 7, 8, 9, 123_000, tzinfo=UTC)
    records = write(
        cluster,
        topic,
        batch_of(
            value=[b"v", None],
            key=[b"k", b""],
            headers=[[("a", b"1"), ("b", None), ("a", b"")], []],
            partition=[2, 2],
            timestamp=[when, when],
        ),
    )
    first, second = records
    assert (first.partition, first.key, first.value) == (2, b"k", b"v")
    assert first.timestamp_ms == int(when.timestamp() * 1000)
    assert first.headers == (("a", b"1"), ("b", None), ("a", b""))
    assert (second.partition, second.key, second.value, second.headers) == (2, b"", None, ())


def test_a_row_without_timestamp_has_the_time_of_writing(cluster: SyncCluster, topic: str) -> None:
    import time

    before_ms = time.time_ns() // 1_000_000
    plain, null = write(cluster, topic, batch_of(value=[b"1"])), None
    null = write(cluster, topic, batch_of(value=[b"2"], timestamp=[None]))
    after_ms = time.time_ns() // 1_000_000
    assert all(before_ms <= record.timestamp_ms <= after_ms for record in [*plain, *null])


def test_topics_by_the_row(cluster: SyncCluster, topic: str) -> None:
    other = f"{topic}-other"
    cluster.create_topic(other)
    write(cluster, None, batch_of(value=[b"1", b"2", b"3"], topic=[topic, other, topic]))
    assert [record.value for record in cluster.records(topic)] == [b"1", b"3"]
    assert [record.value for record in cluster.records(other)] == [b"2"]


def test_keys_keep_their_order_over_many_batches(cluster: SyncCluster, topic: str) -> None:
    keys = [b"k%d" % number for number in range(10)]
    batches = [
        batch_of(value=[b"%d-%d" % (round_, number) for number in range(10)], key=keys)
        for round_ in range(50)
    ]
    records = write(cluster, topic, *batches, **{"kafka.max.request.size": "2000"})
    for number, key in enumerate(keys):
        own = [record for record in records if record.key == key]
        assert {record.partition for record in own} == {partition_for_key(key, 3)}
        assert [record.value for record in own] == [b"%d-%d" % (round_, number) for round_ in range(50)]


def test_each_batch_of_rows_without_key_goes_to_the_next_partition(cluster: SyncCluster, topic: str) -> None:
    batches = [batch_of(value=[b"x" * 900]) for _ in range(6)]
    records = write(cluster, topic, *batches, **{"kafka.max.request.size": "1100"})
    assert sorted(record.partition for record in records) == [0, 0, 1, 1, 2, 2]


def test_rows_without_key_among_others_go_to_every_partition(cluster: SyncCluster, topic: str) -> None:
    batches = [batch_of(value=[b"x" * 900, b"y" * 900], key=[None, b"k"]) for _ in range(6)]
    records = write(cluster, topic, *batches, **{"kafka.max.request.size": "1100"})
    assert {record.partition for record in records if record.key is None} == {0, 1, 2}
    assert {record.partition for record in records if record.key} == {partition_for_key(b"k", 3)}


def test_tasks_begin_with_different_partitions(cluster: SyncCluster, topic: str) -> None:
    batch = batch_of(value=[b"x"])
    for partition in range(3):
        write_task(
            iter([batch]), columns_of(batch), options(cluster, topic, exactlyOnce="false"), task(partition)
        )
    assert sorted(record.partition for record in cluster.records(topic)) == [0, 1, 2]


def test_batches_are_no_larger_than_the_topic_allows(cluster: SyncCluster, topic: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.alter_configs("topic", topic, {"max.message.bytes": "5000"})
    records = write(cluster, topic, batch_of(value=[b"x" * 500] * 100))
    assert len(records) == 100


def test_a_row_that_the_topic_does_not_accept(cluster: SyncCluster, topic: str) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.alter_configs("topic", topic, {"max.message.bytes": "5000"})
    with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes"):
        write(cluster, topic, batch_of(value=[b"x" * 6_000]))


def test_the_error_for_a_large_row_names_every_setting_that_it_needs(
    cluster: SyncCluster, topic: str
) -> None:
    row = batch_of(value=[b"x" * 40_000_000])
    with pytest.raises(RecordTooLargeError) as refused:
        write(cluster, topic, row)
    hint = refused.value.hint
    needed = re.search(r"to (\d+) or more", hint)
    assert needed is not None
    assert all(
        name in hint for name in ("max.message.bytes", "kafka.max.request.size", "kafka.buffer.memory")
    )
    with Admin(cluster.bootstrap_servers) as admin:
        admin.alter_configs("topic", topic, {"max.message.bytes": needed[1]})
    settings = {"kafka.max.request.size": needed[1], "kafka.buffer.memory": needed[1]}
    assert [len(record.value or b"") for record in write(cluster, topic, row, **settings)] == [40_000_000]


def test_a_missing_topic(cluster: SyncCluster) -> None:
    with pytest.raises(InvalidTopicError):
        write(cluster, None, batch_of(value=[b"1"], topic=["no/such topic"]))


def test_a_null_topic_fails_the_task(cluster: SyncCluster, topic: str) -> None:
    with pytest.raises(RecordError, match="a row has no topic"):
        write(cluster, None, batch_of(value=[b"1"], topic=[None]))


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_compression(cluster: SyncCluster, topic: str, codec: str) -> None:
    batch = batch_of(value=[b"x" * 100] * 1_000)
    records = write(cluster, topic, batch, **{"kafka.compression.type": codec})
    assert [record.value for record in records] == [b"x" * 100] * 1_000


def test_no_rows_open_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "out"}
    empty = batch_of(value=[])
    written = write_task(iter([empty]), columns_of(empty), SinkOptions.parse(given, is_stream=True), task())
    assert (written.rows, written.prepared) == (0, None)


class CountingProducer:
    """Records batches, and how many bytes were open when each one was sent."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.sizes: list[int] = []
        self.values: dict[int, list[bytes | None]] = {}

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in range(self.partitions)]

    def queue_batch(self, topic: str, partition: int, batch: RecordBatchBuilder) -> None:
        built = batch.build()
        self.sizes.append(len(built))
        self.values.setdefault(partition, []).extend(record.value for record in RecordBatch(built))


def test_open_batches_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand partitions, none of which fills a batch."""
    monkeypatch.setattr(task_writer, "MAX_OPEN_BYTES", 100_000)
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 1 << 20)
    producer = CountingProducer(1_000)
    given = SinkOptions.parse({"kafka.bootstrap.servers": "unused:1", "topic": "t"}, is_stream=True)
    batch = batch_of(value=[b"x" * 100] * 1_000, partition=list(range(1_000)))
    outlet = TopicWriter(producer, columns_of(batch), given, task())
    for _ in range(5):
        outlet.write(batch)
        assert outlet._open_bytes <= 100_000
    outlet.flush()
    assert outlet._open_bytes == 0
    assert sum(producer.sizes) > 500_000


def test_batches_are_filled_over_arrow_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 50_000)
    producer = CountingProducer(1)
    given = SinkOptions.parse({"kafka.bootstrap.servers": "unused:1", "topic": "t"}, is_stream=True)
    batch = batch_of(value=[b"x" * 100] * 10)
    outlet = TopicWriter(producer, columns_of(batch), given, task())
    for _ in range(500):
        outlet.write(batch)
    outlet.flush()
    assert max(producer.sizes) <= 50_000
    assert min(producer.sizes[:-1]) > 35_000


def test_few_rows_do_not_keep_their_arrow_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rare key among common ones: otherwise a task would keep every batch."""
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 1 << 20)
    given = SinkOptions.parse({"kafka.bootstrap.servers": "unused:1", "topic": "t"}, is_stream=True)
    batch = batch_of(value=[b"x" * 1_000] * 1_000, partition=[0] * 999 + [1])
    outlet = TopicWriter(CountingProducer(2), columns_of(batch), given, task())
    for _ in range(20):
        outlet.write(batch)
    held = outlet._open["t", 1].records
    assert sum(records.row_count for records in held) == 20
    assert sum(records.values.get_total_buffer_size() for records in held) < 50_000


def outlet_to(producer: CountingProducer, batch: Any, **given: str) -> TopicWriter:
    options = {"kafka.bootstrap.servers": "unused:1", "topic": "t", **given}
    return TopicWriter(producer, columns_of(batch), SinkOptions.parse(options, is_stream=True), task())


def test_joined_batches_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 1_000)
    producer = CountingProducer(1)
    outlet = outlet_to(producer, batch_of(value=[b""]))
    for size_bytes in (600, 390):  # with the 5 bytes of overhead per record exactly the limit
        outlet.write(batch_of(value=[b"x" * size_bytes]))
    outlet.flush()
    assert max(producer.sizes) <= 1_000


def test_many_small_slices_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Arrow slice of one row needs far more memory than its bytes."""
    monkeypatch.setattr(task_writer, "MAX_OPEN_BYTES", 1_000_000)
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 1 << 20)
    batch = batch_of(value=[b"x"] * 1_000, partition=list(range(1_000)))
    outlet = outlet_to(CountingProducer(1_000), batch)
    outlet.write(batch)
    pieces = sum(len(waiting.records) for waiting in outlet._open.values())
    assert 0 < pieces * task_writer.PIECE_BYTES <= 1_000_000


def test_small_slices_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their fixed costs would allow batches of a few rows only."""
    monkeypatch.setattr(task_writer, "MAX_OPEN_BYTES", 1_000_000)
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 1 << 20)
    batch = batch_of(value=[b"x"] * 50, partition=list(range(50)))
    producer = CountingProducer(50)
    outlet = outlet_to(producer, batch)
    for _ in range(100):
        outlet.write(batch)
    assert not producer.sizes, "nothing had to go early"
    outlet.flush()
    assert sum(map(len, producer.values.values())) == 5_000
    assert outlet._open_bytes == 0


@pytest.mark.parametrize("partitions", [1, 2, 5])
@pytest.mark.parametrize("partitioner", ["roundrobin", "sticky", "hash", "random"])
def test_rows_of_a_partition_are_sent_in_input_order(
    monkeypatch: pytest.MonkeyPatch, partitions: int, partitioner: str
) -> None:
    """With and without key, with and without partition, in Arrow batches of one kind and of all."""
    monkeypatch.setattr(task_writer, "_max_message_bytes", lambda options, topic: 700)
    rng = Random(partitions)
    producer = CountingProducer(partitions)
    outlet = outlet_to(producer, batch_of(value=[b""], key=[None], partition=[None]), partitioner=partitioner)
    row_count = 0
    for _ in range(300):
        keyed, placed = rng.choice([0, 0, 0.3, 1]), rng.choice([0, 0, 0.3])
        rows: list[tuple[bytes, bytes | None, int | None]] = []
        for _ in range(rng.randrange(1, 8)):
            key = b"k%d" % rng.randrange(9) if rng.random() < keyed else None
            partition = rng.randrange(partitions) if rng.random() < placed else None
            kind = "free" if key is None and partition is None else "bound"
            rows.append((f"{kind} {row_count:06}".encode(), key, partition))
            row_count += 1
        values, keys, given = zip(*rows, strict=True)
        outlet.write(batch_of(value=values, key=keys, partition=given))
    outlet.flush()
    assert sum(map(len, producer.values.values())) == row_count
    for found in producer.values.values():
        texts = [(value or b"").decode() for value in found]
        for kind in ("free", "bound"):
            own = [text for text in texts if text.startswith(kind)]
            assert own == sorted(own)
        if partitions == 1:
            assert [text.split()[1] for text in texts] == sorted(text.split()[1] for text in texts)
