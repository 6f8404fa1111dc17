"""The source in Spark, for what only a JVM can show; see also tests/sparkbridge/test_stream_reader.py."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from kafkalite import sync
from kafkalite.model import TopicPartition
from kafkalite.records.partitioners import partition_for_key
from kafkalite.testing.sync_cluster import SyncCluster
from sparkbridge.listener import BatchProgress, ProgressListener

QUERY_TIMEOUT_S = 60


def numbered(first: int, until: int) -> list[bytes]:
    return [b"%06d" % number for number in range(first, until)]


@pytest.fixture
def admin(broker: SyncCluster) -> Iterator[sync.Admin]:
    with sync.Admin(broker.bootstrap_servers) as opened:
        yield opened


@pytest.fixture
def source(spark: Any, broker: SyncCluster) -> Callable[..., Any]:
    """Return a DataFrame of the source: ``source("in", streams=True, startingOffsets="earliest")``."""

    def load(topic: str = "", *, streams: bool = False, schema: str = "", **options: Any) -> Any:
        reader = (spark.readStream if streams else spark.read).format("kafkalite")
        reader = reader.option("kafka.bootstrap.servers", broker.bootstrap_servers)
        if topic:
            reader = reader.option("subscribe", topic)
        if schema:
            reader = reader.schema(schema)
        return reader.options(**{name.replace("__", "."): value for name, value in options.items()}).load()

    return load


@pytest.fixture
def copied(spark: Any, source: Callable[..., Any], checkpoint: str) -> Callable[..., Any]:
    """Run a query to the end of the existing records; return it, and the values that this run has read."""

    def run(topic: str = "", **options: Any) -> tuple[Any, list[bytes]]:
        frame = source(topic, streams=True, **options).select("value")
        rows: list[bytes] = []
        writer = frame.writeStream.foreachBatch(
            lambda batch, _: rows.extend(bytes(row.value) for row in batch.collect())
        )
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_TIMEOUT_S)
        return query, sorted(rows)

    return run


def test_a_batch_has_the_columns_of_sparks_kafka_connector(
    source: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str]
) -> None:
    topic = new_topic_on("columns", partitions=2)
    with sync.Producer(broker.bootstrap_servers) as producer:
        producer.send(
            topic, b"v", b"k", partition=1, timestamp_ms=1_700_000_000_123, headers=[("h", b"1"), ("h", None)]
        )
        producer.send(topic, None, None, partition=0, timestamp_ms=0)
        producer.flush()
    frame = source(topic, includeHeaders=True)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    first, second = frame.orderBy("partition").collect()
    assert (first.key, first.value, first.offset) == (None, None, 0)
    assert (bytes(second.key), bytes(second.value), second.topic) == (b"k", b"v", topic)
    assert second.timestamp.astimezone(UTC) == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert [(header.key, header.value) for header in second.headers] == [("h", b"1"), ("h", None)]


def test_a_schema_of_the_user_is_a_projection(
    source: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str]
) -> None:
    topic = new_topic_on("projection")
    broker.produce(topic, numbered(0, 5))
    frame = source(topic, schema="offset bigint, value string")
    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [
        (number, f"{number:06}") for number in range(5)
    ]
    with pytest.raises(Exception, match="no column 'ofset'; did you mean 'offset'"):
        source(topic, schema="ofset bigint").collect()
    with pytest.raises(Exception, match=r"can't be int.*it is bigint"):
        source(topic, schema="offset int").collect()


def test_filters_return_the_same_rows_pushed_down_or_not(
    spark: Any, source: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str]
) -> None:
    topic = new_topic_on("filters", partitions=2)
    for partition in range(2):
        broker.produce(topic, numbered(0, 50), partition=partition)
    setting = "spark.sql.python.filterPushdown.enabled"
    is_on = spark.conf.get(setting)
    task_counts = []
    try:
        for value in ("true", "false"):
            spark.conf.set(setting, value)
            frame = source(topic).where("partition = 1 and offset >= 45 and topic like 'filters%'")
            assert [row.offset for row in frame.orderBy("offset").collect()] == list(range(45, 50))
            task_counts.append(frame.rdd.getNumPartitions())
    finally:
        spark.conf.set(setting, is_on)
    assert task_counts == [1, 2], "a partition that can't match has no task"


def test_invalid_options_fail_at_load(source: Callable[..., Any]) -> None:
    with pytest.raises(AnalysisException, match="exactly one of assign, subscribe and subscribePattern"):
        source()


def test_a_topic_is_a_view_in_sql_and_never_a_table_that_cannot_be_read(
    spark: Any, broker: SyncCluster, new_topic_on: Callable[..., str]
) -> None:
    """Spark passes the options of a temporary view and of WITH to the source, and none of a table."""
    topic = new_topic_on("sql")
    broker.produce(topic, numbered(0, 3))
    options = f"('kafka.bootstrap.servers' '{broker.bootstrap_servers}', 'subscribe' '{topic}')"
    with pytest.raises(Exception, match=r"CREATE TABLE can't define a topic.*CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE inferred USING kafkalite OPTIONS {options}")
    assert not spark.catalog.tableExists("inferred")
    spark.sql(f"CREATE TEMPORARY VIEW topic_view USING kafkalite OPTIONS {options}")
    assert spark.sql("SELECT count(value) FROM topic_view").first()[0] == 3
    spark.sql(f"CREATE TABLE declared (value BINARY) USING kafkalite OPTIONS {options}")
    try:
        with pytest.raises(Exception, match=r"no option is set.*SELECT … FROM name WITH"):
            spark.sql("SELECT * FROM declared").collect()
        given = options.replace("' '", "' = '")
        assert spark.sql(f"SELECT count(value) FROM declared WITH {given}").first()[0] == 3
    finally:
        spark.sql("DROP TABLE declared")
        spark.sql("DROP VIEW topic_view")


def test_available_now_reads_several_batches_and_a_later_run_the_rest(
    copied: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str], spark: Any
) -> None:
    topic = new_topic_on("available", partitions=2)
    for partition in range(2):
        broker.produce(topic, numbered(100 * partition, 100 * partition + 100), partition=partition)
    seen: list[BatchProgress] = []
    listener = ProgressListener(seen.append)
    spark.streams.addListener(listener)
    try:
        options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 80}
        query, rows = copied(topic, **options)
        assert rows == numbered(0, 200)
        assert [progress.numInputRows for progress in query.recentProgress] == [80, 80, 40]
        broker.produce(topic, numbered(200, 250), partition=1)
        _, rows = copied(topic, **options)
        assert rows == numbered(200, 250)
    finally:
        spark.streams.removeListener(listener)
    assert [(batch.row_count, batch.lag) for batch in seen[:3]] == [(80, 120), (80, 40), (40, 0)]


def test_retention_that_overtakes_the_query_fails_it_or_is_skipped(
    copied: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str], admin: sync.Admin
) -> None:
    topic = new_topic_on("retention")
    broker.produce(topic, numbered(0, 10))
    copied(topic, startingOffsets="earliest")
    broker.produce(topic, numbered(10, 100))
    admin.delete_records({TopicPartition(topic, 0): 55})
    with pytest.raises(StreamingQueryException, match=f"{topic}-0 offsets 10 to 55.*set failOnDataLoss"):
        copied(topic, startingOffsets="earliest")
    _, rows = copied(topic, startingOffsets="earliest", failOnDataLoss=False)
    assert rows == numbered(55, 100)


def test_the_progress_of_a_query_is_the_lag_of_its_group(
    copied: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str], admin: sync.Admin
) -> None:
    topic = new_topic_on("lag")
    broker.produce(topic, numbered(0, 30))
    group = f"group-of-{topic}"
    copied(topic, startingOffsets="earliest", kafka__group__id=group)
    broker.produce(topic, numbered(30, 42))
    assert [(each.partition.topic, each.lag) for each in admin.group_lag(group)] == [(topic, 12)]


def test_a_pattern_adds_a_topic_created_while_the_query_runs(
    source: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str], checkpoint: str
) -> None:
    first = new_topic_on("pattern")
    broker.produce(first, [b"first"])
    rows: list[bytes] = []
    frame = source(streams=True, subscribePattern="pattern-.*", startingOffsets="earliest")
    query = (
        frame.writeStream.foreachBatch(
            lambda batch, _: rows.extend(bytes(row.value) for row in batch.collect())
        )
        .option("checkpointLocation", checkpoint)
        .start()
    )
    query.processAllAvailable()
    assert rows == [b"first"]
    broker.produce(new_topic_on("pattern"), [b"second"])
    query.processAllAvailable()
    query.stop()
    assert rows == [b"first", b"second"]


def _stream_reader_processes() -> set[int]:
    """Return the process ids of this run's stream readers: each query has one."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                command = (path / "cmdline").read_bytes()
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"python_streaming_source_runner" in command and os.getpid() in {parent, grandparent}:
                found.add(int(path.name))
    return found


def test_killing_the_reader_replays_the_same_offsets(
    source: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str], checkpoint: str
) -> None:
    """The reader is killed within a batch whose end is logged; later records belong to the next batch."""
    topic = new_topic_on("killed", partitions=2)
    for partition in range(2):
        broker.produce(topic, numbered(100 * partition, 100 * partition + 100), partition=partition)
    batches: dict[int, list[list[bytes]]] = {}

    def start(*, is_deadly: bool) -> Any:
        def take(batch: Any, batch_id: int) -> None:
            batches.setdefault(batch_id, []).append(sorted(bytes(row.value) for row in batch.collect()))
            if is_deadly and batch_id == 1:
                (victim,) = _stream_reader_processes()
                os.kill(victim, signal.SIGKILL)
                broker.produce(topic, numbered(200, 300), partition=0)
                raise RuntimeError("the batch does not end either")

        frame = source(topic, streams=True, startingOffsets="earliest", maxOffsetsPerTrigger=80)
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
        return writer.trigger(availableNow=True).start()

    with pytest.raises(StreamingQueryException):
        start(is_deadly=True).awaitTermination(QUERY_TIMEOUT_S)
    logged = (Path(checkpoint) / "offsets" / "1").read_text()
    assert start(is_deadly=False).awaitTermination(QUERY_TIMEOUT_S)
    assert (Path(checkpoint) / "offsets" / "1").read_text() == logged
    assert json.loads(logged.splitlines()[-1])[topic] == {"0": 80, "1": 80}
    assert len(batches[1]) == 2
    assert batches[1][0] == batches[1][1]
    read = Counter(value for attempts in batches.values() for value in attempts[-1])
    assert read == Counter(numbered(0, 300))


def test_two_topics_are_joined_and_partitioned_by_another_key(
    source: Callable[..., Any], broker: SyncCluster, new_topic_on: Callable[..., str], checkpoint: str
) -> None:
    """Orders by number and payments by order become amounts by country, whose partition the key decides."""
    orders, payments = new_topic_on("orders", partitions=2), new_topic_on("payments", partitions=3)
    amounts = new_topic_on("amounts", partitions=4)
    countries = ["US", "CA", "MX", "NZ", "FR"]
    with sync.Producer(broker.bootstrap_servers) as producer:
        for number in range(200):
            producer.send(orders, countries[number % 5].encode(), b"%d" % number)
            if number % 2 == 0:
                producer.send(payments, b"%d" % (number * 10), b"%d" % number)
        producer.flush()

    def stream(topic: str, value: str) -> Any:
        frame = source(topic, streams=True, startingOffsets="earliest")
        return frame.selectExpr("CAST(key AS STRING) AS number", f"CAST(value AS STRING) AS {value}")

    joined = stream(orders, "country").join(stream(payments, "amount"), "number")
    writer = joined.selectExpr("country AS key", "amount AS value").writeStream.format("kafkalite")
    writer = writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", amounts)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_TIMEOUT_S)
    written = [(record.key, record.value, record.partition) for record in broker.records(amounts)]
    assert sorted((key, value) for key, value, _ in written) == sorted(
        (countries[number % 5].encode(), b"%d" % (number * 10)) for number in range(0, 200, 2)
    )
    assert all(partition == partition_for_key(key or b"", 4) for key, _, partition in written)
