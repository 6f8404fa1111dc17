"""Runs a Spark session with the features that pipelines use, so that its JVM archives the loaded classes.

``fast_start`` runs it as ``python -m sparkbridge.local.warm_up ARCHIVE`` with SPARK_HOME set.
"""

# Tests: tests/spark/test_session.py

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.functions import col, count, timestamp_millis, window

from sparkbridge.local.spark_session import launch_environment, recommended_settings

ROWS = 100


def _rows() -> Iterator[Any]:
    yield pyarrow.RecordBatch.from_pydict({"value": list(range(ROWS))})


class _Reader(DataSourceReader):
    def partitions(self) -> list[Any]:
        return [InputPartition(0)]

    def read(self, partition: Any) -> Iterator[Any]:
        return _rows()


class _StreamReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"rows": ROWS}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        return [InputPartition(0)] if start != end else []

    def read(self, partition: Any) -> Iterator[Any]:
        return _rows()


class _StreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[Any]) -> Any:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[Any], batchId: int) -> None:
        pass


class WarmUpSource(DataSource):
    """A source of the numbers below ROWS, and a stream sink that discards them."""

    @classmethod
    def name(cls) -> str:
        return "kafkalite_warm_up"

    def schema(self) -> str:
        return "value bigint"

    def reader(self, schema: Any) -> Any:
        return _Reader()

    def streamReader(self, schema: Any) -> Any:
        return _StreamReader()

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return _StreamWriter()


def _use(spark: Any, directory: str) -> None:
    spark.dataSource.register(WarmUpSource)
    frame = spark.read.format(WarmUpSource.name()).load()
    frame.write.parquet(f"{directory}/rows")
    spark.read.parquet(f"{directory}/rows").groupBy("value").count().collect()
    stream = spark.readStream.format(WarmUpSource.name()).load()
    copied = stream.writeStream.format(WarmUpSource.name()).option(
        "checkpointLocation", f"{directory}/copied"
    )
    timed = stream.withColumn("time", timestamp_millis(col("value"))).withWatermark("time", "1 second")
    windows = timed.groupBy(window("time", "10 seconds")).agg(count("*").alias("rows"))
    counted = windows.writeStream.format("noop").option("checkpointLocation", f"{directory}/counted")
    for writer in (copied, counted):
        query = writer.start()
        query.processAllAvailable()
        query.stop()


def main(archive: str) -> None:
    """Run the warm-up and wait for its JVM to end. The JVM writes ``archive`` as it ends."""
    settings = recommended_settings("local[2]", is_short_lived=True)
    settings["spark.driver.extraJavaOptions"] += f" -XX:ArchiveClassesAtExit={archive}"
    builder = SparkSession.builder.appName("warm-up").config("spark.log.level", "OFF")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with launch_environment("local[2]"):
        spark = builder.getOrCreate()
    with tempfile.TemporaryDirectory() as directory:
        _use(spark, directory)
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # ends the JVM, which then writes the archive
    gateway.proc.wait()


if __name__ == "__main__":
    main(sys.argv[1])
