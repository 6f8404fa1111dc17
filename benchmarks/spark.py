"""The Spark source: a task's read alone and through Spark, and the latency of a micro-batch.

The yardstick of rates through Spark is a source that returns one prepared RecordBatch repeatedly: the
speed of Spark without any fetching. The yardstick of latency is Spark's own rate source. The fixed cost
of a query, measured with one row, is subtracted from our rates and from the yardstick's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import uvloop

from benchmarks.harness import ROOT, Row, paired, plain_row, rate_row, scratch_dir, server, time_row

ROWS = 3_000_000
VALUE = b"x" * 100
ROWS_PER_BATCH = 8_000  # of the yardstick; a megabyte holds about as many of ours
VALUE_ONLY = "value binary"
RUNS = 3
WARM_UPS = 3
LATENCY_BATCHES = 60


# --- the log ----------------------------------------------------------------------------------------


async def _fill(port: int, topic: str, rows: int, batch_bytes: int) -> None:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.producer.producer import Producer

    async with Admin(f"127.0.0.1:{port}") as admin:
        await admin.create_topic(topic, partitions=1)
    values = [VALUE] * 100_000
    async with Producer(f"127.0.0.1:{port}", acks=1, batch_size=batch_bytes) as producer:
        for _ in range(rows // len(values)):
            await producer.send_many(topic, values)
        await producer.flush()


# --- read_range by itself ---------------------------------------------------------------------------


def _read(port: int, topic: str, schema: Any) -> float:
    from sparkbridge.brokers.cluster import SparkCluster
    from sparkbridge.offsets import OffsetRange
    from sparkbridge.options import SourceOptions
    from sparkbridge.source.range_reader import read_range

    settings = {
        "kafka.bootstrap.servers": f"127.0.0.1:{port}",
        "subscribe": topic,
        "startingOffsets": "earliest",
    }
    options = SourceOptions.parse(settings, is_stream=False)
    cluster = SparkCluster.shared(options.client)
    start = time.perf_counter()
    rows: int = sum(
        batch.num_rows for batch in read_range(cluster, OffsetRange(topic, 0, 0, ROWS), options, schema)
    )
    assert rows == ROWS
    return rows / (time.perf_counter() - start)


def _alone(port: int) -> list[Row]:
    from pyspark.sql.types import BinaryType, StructField, StructType

    from sparkbridge.source.schema import source_schema

    value_only = StructType([StructField("value", BinaryType())])
    workload = f"{ROWS:,} × 100 bytes, broker in another process, page cache"
    return [
        rate_row(
            "read_range, value alone",
            f"{workload}, 1 MiB batches",
            statistics.median(_read(port, "large", value_only) for _ in range(RUNS)),
            "rows/s",
            at_least=3_500_000,
        ),
        rate_row(
            "read_range, all columns",
            f"{workload}, 1 MiB batches",
            statistics.median(_read(port, "large", source_schema()) for _ in range(RUNS)),
            "rows/s",
            at_least=3_500_000,
        ),
        plain_row(
            "read_range, all columns, small batches",
            f"{workload}, 16 KiB batches",
            statistics.median(_read(port, "small", source_schema()) for _ in range(RUNS)),
            "rows/s",
        ),
    ]


# --- through Spark ----------------------------------------------------------------------------------


@contextlib.contextmanager
def running_session() -> Iterator[Any]:
    """Yield a Spark session with two cores and the recommended settings. Its JVM ends with the block."""
    from sparkbridge.local.spark_session import session

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the workers, which need this module
    spark = session("kafkalite-bench", master="local[2]", settings={"spark.log.level": "ERROR"})
    try:
        yield spark
    finally:
        gateway = spark.sparkContext._gateway
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)
        type(spark.sparkContext)._gateway = type(spark.sparkContext)._jvm = (
            None  # the next session would use it
        )


def _prepared_source() -> Any:
    """Return the yardstick's DataSource: one RecordBatch repeatedly, with the schema that the user gives."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class PreparedReader(DataSourceReader):
        def __init__(self, rows: int, schema: Any) -> None:
            self.rows = rows
            self.schema = schema

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(0)]

        def read(self, partition: Any) -> Iterator[Any]:
            from kafkalite.records.batch import RecordBatch
            from kafkalite.records.builder import build_batch
            from sparkbridge.source.columns import SparkBatchBuilder
            from sparkbridge.source.schema import arrow_schema

            count = min(self.rows, ROWS_PER_BATCH)
            made = RecordBatch(build_batch([VALUE] * count, timestamps_ms=1_700_000_000_000))
            builder = SparkBatchBuilder(arrow_schema(self.schema), "prepared", 0)
            builder.add(made, 0, count)
            batch = builder.build()
            for first in range(0, self.rows, count):
                yield batch.slice(0, min(count, self.rows - first))

    class Prepared(DataSource):
        @classmethod
        def name(cls) -> str:
            return "prepared"

        def reader(self, schema: Any) -> Any:
            return PreparedReader(int(self.options["rows"]), schema)

    return Prepared


def _seconds(query: Any) -> float:
    start = time.perf_counter()
    query.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - start


def _rate(query: Callable[[int], Any]) -> float:
    """Return the rows per second of one task, without the time for one row."""
    fixed_s = min(_seconds(query(1)) for _ in range(RUNS))
    return ROWS / (_seconds(query(ROWS)) - fixed_s)


def _through_spark(spark: Any, port: int) -> list[Row]:
    from sparkbridge.source.schema import source_schema

    spark.dataSource.register(_prepared_source())
    all_columns = source_schema()

    def ours(schema: Any) -> Callable[[int], Any]:
        def query(rows: int) -> Any:
            reader = spark.read.format("kafkalite").option("kafka.bootstrap.servers", f"127.0.0.1:{port}")
            reader = reader.option("subscribe", "large").option("startingOffsets", "earliest")
            return reader.option("endingOffsets", f'{{"large":{{"0":{rows}}}}}').schema(schema).load()

        return query

    def prepared(schema: Any) -> Callable[[int], Any]:
        return lambda rows: spark.read.format("prepared").option("rows", rows).schema(schema).load()

    rows: list[Row] = []
    for name, schema in (("value alone", VALUE_ONLY), ("all columns", all_columns)):
        for _ in range(WARM_UPS):  # let the JVM compile its code
            _seconds(ours(schema)(ROWS))
        measured, yardstick = paired(lambda: _rate(ours(schema)), lambda: _rate(prepared(schema)), RUNS)
        rows.append(
            plain_row(f"no broker, {name}", "one RecordBatch again and again → noop", yardstick, "rows/s")
        )
        rows.append(
            rate_row(
                f"source through Spark, {name}",
                f"{ROWS:,} × 100 bytes → noop, one task",
                measured,
                "rows/s",
                at_least=2_500_000,
            )
        )
        rows.append(
            rate_row(
                f"the same, {name}, against no broker",
                "the two figures above",
                measured,
                "rows/s",
                yardstick=yardstick,
                at_least=0.7,
            )
        )
    return rows


# --- latency ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _trickle(port: int, topic: str) -> Iterator[None]:
    """Send a record every 10 ms while the block runs, so that no micro-batch waits for one."""
    from kafkalite.sync import Producer

    stopped = threading.Event()

    def produce() -> None:
        with Producer(f"127.0.0.1:{port}", acks=1, linger_ms=0) as producer:
            while not stopped.wait(0.01):
                producer.send(topic, VALUE)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


class BatchTimes(NamedTuple):
    """Medians over micro-batches, milliseconds."""

    whole_ms: float
    parts: str  #: Spark's own names for them


def batch_times(
    stream: Any,
    sink: Mapping[str, str],
    checkpoint: str,
    feed: contextlib.AbstractContextManager[None] | None,
) -> BatchTimes:
    """Measure micro-batches of ``stream`` from trigger to commit, without the first ten.

    ``sink`` is a format and its options. ``feed`` writes the input of the stream; None: it generates
    its rows.
    """
    writer = stream.writeStream.option("checkpointLocation", checkpoint)
    for name, value in sink.items():
        writer = writer.format(value) if name == "format" else writer.option(name, value)
    query = writer.start()
    try:
        with feed or contextlib.nullcontext():
            progress = _progress_of(query)
        if feed is not None:
            query.processAllAvailable()  # an interrupted batch leaves error messages of its workers
    finally:
        query.stop()
    durations = [each["durationMs"] for each in progress[10:]]
    medians = {name: statistics.median(each.get(name, 0) for each in durations) for name in durations[0]}
    whole_ms = medians.pop("triggerExecution")
    return BatchTimes(whole_ms, ", ".join(f"{name} {ms:.0f}" for name, ms in medians.items() if ms >= 1))


def _progress_of(query: Any) -> list[Any]:
    deadline_s = time.monotonic() + 120
    while query.isActive:
        progress = [each for each in query.recentProgress if each["numInputRows"]]
        if len(progress) >= LATENCY_BATCHES or (len(progress) > 20 and time.monotonic() > deadline_s):
            return progress
        time.sleep(0.2)
    raise RuntimeError(f"the query ended: {query.exception()}")


def _latency(spark: Any, port: int, path: str) -> list[Row]:
    servers = {"kafka.bootstrap.servers": f"127.0.0.1:{port}"}
    reader = spark.readStream.format("kafkalite").options(**servers).option("startingOffsets", "latest")
    ours = reader.option("subscribe", "trickle").load()
    rate = spark.readStream.format("rate").option("rowsPerSecond", 100).option("numPartitions", 1).load()
    noop = {"format": "noop"}
    sink = {"format": "kafkalite", **servers, "topic": "copied"}
    measures: dict[str, Callable[[str], BatchTimes]] = {
        "rate → noop": lambda checkpoint: batch_times(rate, noop, checkpoint, None),
        "source → noop": lambda checkpoint: batch_times(ours, noop, checkpoint, _trickle(port, "trickle")),
        "source → sink, at least once": lambda checkpoint: batch_times(
            ours, {**sink, "exactlyOnce": "false"}, checkpoint, _trickle(port, "trickle")
        ),
        "source → sink": lambda checkpoint: batch_times(ours, sink, checkpoint, _trickle(port, "trickle")),
    }
    times = {name: measure(f"{path}/checkpoint-{name}") for name, measure in measures.items()}
    yardstick = times["rate → noop"].whole_ms
    rows = []
    for name, (whole_ms, parts) in times.items():
        workload = f"a hundred rows a second, one task, recommended settings, median; {parts}"
        rows.append(
            plain_row(f"micro-batch, {name}", workload, whole_ms, "ms")
            if name == "rate → noop"
            else time_row(f"micro-batch, {name}", workload, whole_ms, "ms", yardstick=yardstick, at_most=3.0)
        )
    return rows


def run() -> list[Row]:
    from sparkbridge.local.spark_session import missing_requirements

    missing = missing_requirements()
    if missing:
        print("Spark is not measured: " + "; ".join(missing))
        return []
    with scratch_dir() as path, server("kafkalite", "--dir", f"{path}/log") as ours:
        uvloop.run(_fill(ours.port, "large", ROWS, 1024 * 1024))
        uvloop.run(_fill(ours.port, "small", ROWS, 16 * 1024))
        for topic in ("trickle", "copied"):
            uvloop.run(_fill(ours.port, topic, 0, 1024))
        rows = _alone(ours.port)
        with running_session() as spark:
            rows += _through_spark(spark, ours.port)
            rows += _latency(spark, ours.port, path)
        return rows
