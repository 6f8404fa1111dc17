"""The sink of the Spark bridge: one task's writer alone, and the same under Spark beside its noop sink."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

import pyarrow as pa

from benchmarks.harness import Row, paired, plain_row, rate_row, scratch_dir, server
from benchmarks.spark import running_session
from kafkalite.client.blocking.admin import Admin
from sparkbridge.options import SinkOptions
from sparkbridge.sink.commit import commit_batch
from sparkbridge.sink.schema import SinkColumns
from sparkbridge.sink.task_writer import TaskIdentity, write_task

VALUE_BYTES = 100
ROWS_PER_BATCH = 10_000  # as Spark sends them
BATCHES = 300
SPARK_ROWS = 4_000_000
PARTITIONS = 3
KEYS = 1_000

_batch_ids = count()


class Task:
    """The writer of one task, with its rows in memory."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        values = pa.array([b"x" * VALUE_BYTES] * ROWS_PER_BATCH)
        keys = pa.array([b"key-%d" % (number % KEYS) for number in range(ROWS_PER_BATCH)])
        self._plain = pa.record_batch([values], names=["value"])
        self._keyed = pa.record_batch([values, keys], names=["value", "key"])

    def rate(self, *, exactly_once: bool, keyed: bool = False) -> float:
        """Return rows per second, from the first one until all are acknowledged or committed."""
        options = SinkOptions.parse(
            {
                "kafka.bootstrap.servers": self._servers,
                "topic": "task",
                "exactlyOnce": str(exactly_once).lower(),
            },
            is_stream=True,
        )
        batch_id = next(_batch_ids)
        task = TaskIdentity("bench", batch_id, "bench", f"attempt-{batch_id}", 0)
        columns = SinkColumns(0, key=1) if keyed else SinkColumns(0)
        batches = repeat(self._keyed if keyed else self._plain, BATCHES)
        start = time.perf_counter()
        written = write_task(iter(batches), columns, options, task)
        commit_batch(options, [written])
        return written.rows / (time.perf_counter() - start)

    def one_row_ms(self, *, exactly_once: bool) -> float:
        """Return the milliseconds of a task with one row, including its commit."""
        options = SinkOptions.parse(
            {
                "kafka.bootstrap.servers": self._servers,
                "topic": "task",
                "exactlyOnce": str(exactly_once).lower(),
            },
            is_stream=True,
        )
        batch_id = next(_batch_ids)
        task = TaskIdentity("bench", batch_id, "bench", f"attempt-{batch_id}", 0)
        start = time.perf_counter()
        commit_batch(options, [write_task(iter([self._plain.slice(0, 1)]), SinkColumns(0), options, task)])
        return (time.perf_counter() - start) * 1e3


def _task_rows(servers: str) -> list[Row]:
    task = Task(servers)
    task.rate(exactly_once=False)
    once, least = paired(lambda: task.rate(exactly_once=True), lambda: task.rate(exactly_once=False))
    workload = f"one task's writer, {ROWS_PER_BATCH:,}-row Arrow batches, {VALUE_BYTES}-byte values"
    rows = [
        rate_row("sink, at least once", f"{workload}, until acknowledged", least, "rows/s", at_least=1e6),
        rate_row(
            "sink, exactly once",
            f"{workload}, join to committed; yardstick: at least once",
            once,
            "rows/s",
            yardstick=least,
            at_least=0.7,
        ),
    ]
    keyed = task.rate(exactly_once=True, keyed=True)
    rows.append(plain_row("sink, exactly once, keys", f"{workload}, {KEYS:,} keys", keyed, "rows/s"))
    for exactly_once, name in ((False, "at least once"), (True, "exactly once")):
        samples = sorted(task.one_row_ms(exactly_once=exactly_once) for _ in range(101))
        rows.append(plain_row(f"sink, one row {name}", "task and commit, median of 101", samples[50], "ms"))
    return rows


def _counting_sink() -> Any:
    """Return the yardstick's DataSource, which only counts the rows of its RecordBatches."""
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

    class CountingWriter(DataSourceArrowWriter):
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            self.count = sum(batch.num_rows for batch in iterator)
            return WriterCommitMessage()

    class CountingSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "counting"

        def writer(self, schema: Any, overwrite: bool) -> CountingWriter:
            return CountingWriter()

    return CountingSource


def _spark_rates(spark: Any, servers: str) -> dict[str, float]:
    """Return {sink: rows per second of a job with one task}, the median of three after a warm-up."""
    frame = spark.range(0, SPARK_ROWS, 1, 1).selectExpr(
        f"rpad(CAST(id AS STRING), {VALUE_BYTES}, 'x') AS value"
    )
    spark.dataSource.register(_counting_sink())

    def measure(writer: Any) -> float:
        start = time.perf_counter()
        writer.mode("append").save()
        return SPARK_ROWS / (time.perf_counter() - start)

    def to_topic(exactly_once: str) -> Any:
        writer = frame.write.format("kafkalite").option("kafka.bootstrap.servers", servers)
        return writer.option("topic", "spark").option("exactlyOnce", exactly_once)

    writers = {
        "noop": frame.write.format("noop"),
        "counting": frame.write.format("counting"),
        "at least once": to_topic("false"),
        "exactly once": to_topic("true"),
    }
    rates: dict[str, list[float]] = {name: [] for name in writers}
    for _ in range(4):
        for name, writer in writers.items():
            rates[name].append(measure(writer))
    return {name: sorted(measured[1:])[1] for name, measured in rates.items()}


def _spark_rows(servers: str) -> list[Row]:
    with running_session() as spark:
        rates = _spark_rates(spark, servers)
    workload = f"spark.range to {VALUE_BYTES}-byte values, one task, a job of {SPARK_ROWS:,} rows"
    return [
        plain_row("spark, noop sink", f"{workload}, no Python in it", rates["noop"], "rows/s"),
        plain_row("spark, counting sink", f"{workload}, Arrow to Python", rates["counting"], "rows/s"),
        rate_row("spark, sink at least once", workload, rates["at least once"], "rows/s", at_least=1e6),
        plain_row(
            "the same, against the counting sink",
            "the two figures above",
            rates["at least once"] / rates["counting"],
            "×",
        ),
        rate_row(
            "spark, sink exactly once",
            f"{workload}; yardstick: at least once",
            rates["exactly once"],
            "rows/s",
            yardstick=rates["at least once"],
            at_least=0.7,
        ),
    ]


def run() -> list[Row]:
    rows: list[Row] = []
    with scratch_dir() as path, server("kafkalite", "--dir", path, "--durability", "page-cache") as ours:
        servers = f"127.0.0.1:{ours.port}"
        with Admin(servers) as admin:
            for topic in ("task", "spark"):
                admin.create_topic(topic, partitions=PARTITIONS)
        rows += _task_rows(servers)
        rows += _spark_rows(servers)
    return rows
