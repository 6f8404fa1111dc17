"""The sink in Spark, for what only Spark can show. Options and errors are tested without it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kafkalite
from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import TransactionalIdNotFoundError
from kafkalite.model import Record, TopicPartition
from kafkalite.testing import SyncCluster
from sparkbridge import foreach_batch

NewTopic = Callable[..., str]

TIMEOUT_S = 60
KEPT = {"retention.ms": "-1"}  # for records with old timestamps


def committed(broker: SyncCluster, topic: str, partitions: int = 1) -> list[Record]:
    """Return the records that a read_committed reader sees now, up to the last stable offsets."""

    async def read() -> list[Record]:
        settings: Any = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        found: list[Record] = []
        async with kafkalite.Consumer(bootstrap_servers=broker.bootstrap_servers, **settings) as consumer:
            consumer.assign([TopicPartition(topic, number) for number in range(partitions)])
            ends = await consumer.end_offsets(consumer.assignment())
            async with asyncio.timeout(20):
                while not all(not end or position(consumer, tp) >= end for tp, end in ends.items()):
                    found.extend(await consumer.get_many(timeout_ms=50))
        return sorted(found, key=lambda record: (record.partition, record.offset))

    def position(consumer: Any, tp: TopicPartition) -> int:
        at = consumer.positions().get(tp)
        return -1 if at is None else int(at.offset)

    return asyncio.run(read())


def values(broker: SyncCluster, topic: str, partitions: int = 1) -> list[str]:
    return sorted((record.value or b"").decode() for record in committed(broker, topic, partitions))


class Files:
    """A stream of text lines: each file is one batch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.count = 0

    def add(self, *lines: str) -> None:
        self.count += 1
        hidden = self.directory.parent / f"{self.count}.txt"
        hidden.write_text("\n".join(lines) + "\n")
        hidden.rename(self.directory / hidden.name)

    def stream(self, spark: Any) -> Any:
        return spark.readStream.option("maxFilesPerTrigger", 1).text(str(self.directory))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "files")


@pytest.fixture
def sink(broker: SyncCluster, checkpoint: str) -> Callable[..., Any]:
    """Return the writer with its options: ``sink(frame.writeStream, topic)``."""

    def of(writer: Any, topic: str, **options: str) -> Any:
        writer = writer.format("kafkalite").option("kafka.bootstrap.servers", broker.bootstrap_servers)
        writer = writer.option("checkpointLocation", checkpoint).option("topic", topic)
        return writer.options(**options)

    return of


def run_all(writer: Any) -> None:
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(TIMEOUT_S)


def test_a_batch_job_and_the_same_job_again(spark: Any, broker: SyncCluster, new_topic_on: NewTopic) -> None:
    topic = new_topic_on("out", partitions=3, configs=KEPT)
    frame = spark.range(0, 1_000, 1, 3).selectExpr(
        "CAST(id AS STRING) AS key",
        "CAST(id * 2 AS STRING) AS value",
        "array(struct('n' AS key, CAST(CAST(id AS STRING) AS BINARY) AS value)) AS headers",
        "timestamp_millis(1700000000000 + id) AS timestamp",
    )
    for _ in range(2):
        writer = frame.write.format("kafkalite").mode("append")
        writer = writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", topic)
        writer.option("txnAppId", f"job-{topic}").option("txnVersion", 1).save()
    records = committed(broker, topic, 3)
    assert {record.key: record.value for record in records} == {
        str(number).encode(): str(number * 2).encode() for number in range(1_000)
    }
    assert len(records) == 1_000
    for record in records:
        number = int(record.key or b"")
        assert record.headers == (("n", str(number).encode()),)
        assert record.timestamp_ms == 1_700_000_000_000 + number


def test_a_wrong_column_fails_before_the_job(spark: Any, broker: SyncCluster) -> None:
    writer = spark.range(1).write.format("kafkalite").mode("append").option("topic", "out")
    with pytest.raises(Exception, match="there is no column 'value', only 'id'"):
        writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).save()
    with pytest.raises(Exception, match="can't be overwritten"):
        writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).mode("overwrite").save()


def test_unreachable_brokers_fail_before_the_job(spark: Any) -> None:
    writer = spark.range(1).selectExpr("CAST(id AS STRING) AS value").write.format("kafkalite").mode("append")
    writer = writer.option("kafka.bootstrap.servers", "127.0.0.1:1").option("topic", "out")
    with pytest.raises(Exception, match=r"the sink's brokers were not reached within 0\.2 s"):
        writer.option("kafka.request.timeout.ms", "200").save()


def written_partitions(broker: SyncCluster, sink_id: str) -> list[TopicPartition]:
    """Return the partitions with records of open transactions."""
    with Admin(broker.bootstrap_servers) as admin:
        try:
            writers = admin.describe_transaction_group(sink_id).writers
        except TransactionalIdNotFoundError:
            return []
    return [partition for writer in writers for partition in writer.partitions]


def test_a_query_stopped_in_a_batch_leaves_nothing_open(
    spark: Any, broker: SyncCluster, new_topic_on: NewTopic, files: Files, sink: Callable[..., Any]
) -> None:
    topic = new_topic_on("out")
    files.add("first", "slow")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1")
    try:
        slowly = (
            "CASE value WHEN 'slow' THEN java_method('java.lang.Thread', 'sleep', 60000L) "
            "ELSE rpad(value, 900000, ' ') END AS value"  # large enough to be sent at once
        )
        query = sink(files.stream(spark).coalesce(1).selectExpr(slowly).writeStream, topic).start()
        deadline_s = time.monotonic() + TIMEOUT_S
        while not written_partitions(broker, f"spark-{query.id}"):
            assert query.isActive and time.monotonic() < deadline_s, query.exception()
            time.sleep(0.05)
        query.stop()
        assert written_partitions(broker, f"spark-{query.id}") == []
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert values(broker, topic) == []


def test_restarts_from_the_checkpoint(
    spark: Any, broker: SyncCluster, new_topic_on: NewTopic, files: Files, sink: Callable[..., Any]
) -> None:
    topic = new_topic_on("out", partitions=2)
    files.add("a", "b")
    files.add("c")
    run_all(sink(files.stream(spark).writeStream, topic))
    files.add("d", "e")
    run_all(sink(files.stream(spark).writeStream, topic))
    run_all(sink(files.stream(spark).writeStream, topic))
    assert values(broker, topic, 2) == ["a", "b", "c", "d", "e"]


def test_a_batch_committed_but_not_logged_is_not_written_again(
    spark: Any,
    broker: SyncCluster,
    new_topic_on: NewTopic,
    files: Files,
    sink: Callable[..., Any],
    checkpoint: str,
) -> None:
    """The driver died between the sink's commit and Spark's commit log."""
    topic = new_topic_on("out")
    files.add("a")
    files.add("b")
    run_all(sink(files.stream(spark).writeStream, topic))
    (Path(checkpoint) / "commits" / "1").unlink()
    (Path(checkpoint) / "commits" / ".1.crc").unlink(missing_ok=True)
    files.add("c")
    run_all(sink(files.stream(spark).writeStream, topic))
    assert values(broker, topic) == ["a", "b", "c"]


def test_a_failed_task_is_retried_and_its_rows_are_visible_once(
    spark: Any, broker: SyncCluster, new_topic_on: NewTopic, files: Files, sink: Callable[..., Any]
) -> None:
    from pyspark.sql.functions import udf

    topic = new_topic_on("out", partitions=2)
    lines = [f"{number}-{'x' * 2_000}" for number in range(3_000)]
    files.add(*lines)

    def fails_first(line: str) -> str:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        if line.startswith("2500-") and context.attemptNumber() == 0:
            raise RuntimeError("on purpose, when some of it is written")
        return line

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "700")
    try:
        frame = files.stream(spark).select(udf(fails_first, "string", useArrow=False)("value").alias("value"))
        run_all(sink(frame.writeStream, topic))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert values(broker, topic, 2) == sorted(lines)
    with Admin(broker.bootstrap_servers) as admin:
        ends = admin.list_offsets([TopicPartition(topic, number) for number in range(2)], "latest")
    assert sum(end.offset for end in ends.values()) > len(lines) + 100, "the first attempt wrote nothing"


def test_complete_mode(
    spark: Any, broker: SyncCluster, new_topic_on: NewTopic, files: Files, sink: Callable[..., Any]
) -> None:
    topic = new_topic_on("out")
    files.add("a", "b", "a")
    files.add("b")
    counts = files.stream(spark).groupBy("value").count()
    frame = counts.selectExpr("value AS key", "CAST(count AS STRING) AS value")
    run_all(sink(frame.writeStream.outputMode("complete"), topic))
    written = [
        ((record.key or b"").decode(), (record.value or b"").decode()) for record in committed(broker, topic)
    ]
    assert sorted(written[:2]) == [("a", "2"), ("b", "1")]
    assert sorted(written[2:]) == [("a", "2"), ("b", "2")]


def test_update_mode_goes_through_foreach_batch(
    spark: Any,
    broker: SyncCluster,
    new_topic_on: NewTopic,
    files: Files,
    sink: Callable[..., Any],
    checkpoint: str,
) -> None:
    topic = new_topic_on("out")
    files.add("a", "b", "a")
    files.add("b")
    counts = files.stream(spark).groupBy("value").count()
    frame = counts.selectExpr("to_json(struct(value AS word, count)) AS value")
    with pytest.raises(Exception, match=r"(?i)does not support.*update|update.*not support"):
        run_all(sink(frame.writeStream.outputMode("update"), topic))

    write = foreach_batch(
        {"kafka.bootstrap.servers": broker.bootstrap_servers}, topic=topic, sinkName=f"counts-{topic}"
    )

    def write_twice(batch: Any, batch_id: int) -> None:
        write(batch, batch_id)
        write(batch, batch_id)

    writer = frame.writeStream.outputMode("update").foreachBatch(write_twice)
    run_all(writer.option("checkpointLocation", f"{checkpoint}-2"))
    written = [json.loads(record.value or b"") for record in committed(broker, topic)]
    assert sorted((one["word"], one["count"]) for one in written) == [("a", 2), ("b", 1), ("b", 2)]


def test_at_least_once(
    spark: Any, broker: SyncCluster, new_topic_on: NewTopic, files: Files, sink: Callable[..., Any]
) -> None:
    topic = new_topic_on("out")
    files.add("a", "b")
    run_all(sink(files.stream(spark).writeStream, topic, exactlyOnce="false"))
    assert values(broker, topic) == ["a", "b"]


def test_a_copy_from_source_to_sink_is_equal(
    spark: Any, broker: SyncCluster, new_topic_on: NewTopic, sink: Callable[..., Any]
) -> None:
    source, topic = (new_topic_on(name, partitions=3, configs=KEPT) for name in ("in", "out"))

    async def fill() -> None:
        async with kafkalite.Producer(broker.bootstrap_servers) as producer:
            for number in range(300):
                key = None if number % 5 == 0 else b"k%d" % (number % 7)
                headers = [("h", b"%d" % number)] if number % 3 == 0 else []
                producer.send_nowait(
                    source,
                    None if number % 11 == 0 else b"%d" % number,
                    key,
                    partition=number % 3,
                    timestamp_ms=1_700_000_000_000 + number,
                    headers=headers,
                )

    asyncio.run(fill())
    frame = (
        spark.readStream.format("kafkalite")
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("maxOffsetsPerTrigger", "100")
        .load()
    )
    run_all(sink(frame.writeStream, topic))

    def content(name: str) -> list[Any]:
        return [
            (one.partition, one.key, one.value, one.timestamp_ms, tuple(one.headers))
            for one in committed(broker, name, 3)
        ]

    assert content(topic) == content(source)
    assert len(content(topic)) == 300
