"""The Spark bridge beside Spark's own parquet and text, in one session and in alternation.

One task reads a text file of log lines and writes it to a topic, exactly once and at least once, to parquet
and to text; then one task reads each of them back into nothing. A round measures each format once, so changes
of the machine's speed affect all of them. A ratio is the median of the ratios of the rounds. The processor
time counts the JVM, its Python workers and, for topics, the broker.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.harness import Row, ServerProcess, plain_row, scratch_dir, server
from benchmarks.spark import running_session
from kafkalite.client.blocking.admin import Admin
from kafkalite.model import TopicPartition
from sparkbridge.local.spark_session import missing_requirements

ROWS: Final = 3_000_000
WRITE_ROUNDS: Final = 7
READ_ROUNDS: Final = 5
WARM_UPS: Final = 1
PARTITIONS: Final = 3
ALL_COLUMNS: Final = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
#: What a format must reach of Spark's parquet, or exactly once of at least once.
TARGET: Final = 0.9
TICKS: Final = os.sysconf("SC_CLK_TCK")

_numbers = count()


class Run(NamedTuple):
    """One job: seconds, and seconds of processors."""

    wall_s: float
    cpu_s: float


def log_lines(path: Path, rows: int) -> None:
    """Write a text file of about 100 bytes a line: addresses, times, paths and sizes that vary."""
    with path.open("w") as file:
        for first in range(0, rows, 10_000):
            file.writelines(
                f"10.{number % 251}.{number % 83}.{number % 199} - - [23/Nov/2026:09:{number // 60 % 60:02}:"
                f'{number % 60:02} +0000] "GET /shop/items/{number * 2_654_435_761 % 1_000_003:06} HTTP/1.1" '
                f"{(200, 200, 200, 304, 404)[number % 5]} {number * 40_503 % 65_521}\n"
                for number in range(first, min(first + 10_000, rows))
            )


def _processes(root: int) -> Iterator[int]:
    """Yield ``root`` and the processes that it started, directly or not."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it ended
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    while found:
        process = found.pop()
        yield process
        found += parents.get(process, [])


def _cpu_s(root: int) -> float:
    """Return the processor time of ``root`` and all processes that it started, also those that ended."""
    ticks = 0
    for process in _processes(root):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICKS


class Bench:
    """The jobs of the comparison."""

    def __init__(self, spark: Any, broker: ServerProcess, directory: Path) -> None:
        self._spark = spark
        self._broker = broker
        self._directory = directory
        self._servers = f"127.0.0.1:{broker.port}"
        self._jvm = spark.sparkContext._gateway.proc.pid
        self._input = directory / "input.txt"
        log_lines(self._input, ROWS)
        spark.conf.set("spark.sql.files.maxPartitionBytes", str(4 << 30))
        spark.conf.set("spark.sql.files.minPartitionNum", "1")  # one task
        self._lines = spark.read.text(str(self._input))
        assert self._lines.rdd.getNumPartitions() == 1

    def _timed(self, job: Callable[[], None]) -> Run:
        def cpu_s() -> float:
            return _cpu_s(self._jvm) + self._broker.cpu_seconds()

        cpu, start = cpu_s(), time.perf_counter()
        job()
        return Run(time.perf_counter() - start, cpu_s() - cpu)

    def write_topic(self, *, exactly_once: bool) -> Run:
        topic = f"written-{next(_numbers)}"
        with Admin(self._servers) as admin:
            admin.create_topic(topic, partitions=PARTITIONS)
            run = self._timed(self._topic_writer(topic, exactly_once).save)
            ends = admin.list_offsets([TopicPartition(topic, each) for each in range(PARTITIONS)], "latest")
            assert sum(end.offset for end in ends.values()) >= ROWS
            admin.delete_topics([topic])
        return run

    def _topic_writer(self, topic: str, exactly_once: bool) -> Any:
        return (
            self._lines.write.format("kafkalite")
            .option("kafka.bootstrap.servers", self._servers)
            .option("topic", topic)
            .option("exactlyOnce", str(exactly_once).lower())
            .mode("append")
        )

    def write_files(self, kind: str) -> Run:
        path = self._directory / f"written-{next(_numbers)}"
        run = self._timed(lambda: self._lines.write.format(kind).save(str(path)))
        shutil.rmtree(path)
        return run

    def prepare_reads(self) -> None:
        """Write the topic and the parquet file that are read; the text is the input."""
        with Admin(self._servers) as admin:
            admin.create_topic("read", partitions=1)
        self._topic_writer("read", True).save()
        self._lines.write.parquet(str(self._directory / "read.parquet"))

    def read_topic(self, schema: str) -> Run:
        reader = self._spark.read.format("kafkalite").option("subscribe", "read").schema(schema)
        return self._read(reader.option("kafka.bootstrap.servers", self._servers).load())

    def read_parquet(self) -> Run:
        return self._read(self._spark.read.parquet(str(self._directory / "read.parquet")))

    def read_text(self) -> Run:
        return self._read(self._lines)

    def _read(self, frame: Any) -> Run:
        return self._timed(lambda: frame.write.format("noop").mode("overwrite").save())


def _rounds(measures: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in measures}
    names = list(measures)
    for number in range(WARM_UPS + rounds):
        for name in names if number % 2 else reversed(names):
            run = measures[name]()
            if number >= WARM_UPS:
                runs[name].append(run)
    return runs


def _rows(kind: str, runs: Mapping[str, list[Run]], targets: Mapping[str, str]) -> list[Row]:
    """Return a row of rates for each format, compared with the format that ``targets`` names for it."""
    rows = []
    for name, measured in runs.items():
        rate = ROWS / statistics.median(run.wall_s for run in measured)
        cpu = statistics.median(run.cpu_s for run in measured) / ROWS * 1e6
        walls = sorted(run.wall_s for run in measured)
        workload = (
            f"{ROWS:,} log lines, one task; {cpu:.2f} s of processors for a million rows; "
            f"{ROWS / walls[-1] / 1e6:.2f} to {ROWS / walls[0] / 1e6:.2f} M/s"
        )
        yardstick = targets.get(name)
        if yardstick is None:
            rows.append(plain_row(f"{kind}, {name}", workload, rate, "rows/s"))
            continue
        pairs = list(zip(measured, runs[yardstick], strict=True))
        ratio = statistics.median(theirs.wall_s / ours.wall_s for ours, theirs in pairs)
        cpu_ratio = statistics.median(ours.cpu_s / theirs.cpu_s for ours, theirs in pairs)
        workload += f"; yardstick: {yardstick}, {cpu_ratio:.2f} of its processor time"
        rows.append(
            Row(
                f"{kind}, {name}",
                workload,
                rate,
                "rows/s",
                rate / ratio,
                ratio,
                f"≥ {TARGET:g} × yardstick",
                ratio >= TARGET,
            )
        )
    return rows


def run() -> list[Row]:
    missing = missing_requirements()
    if missing:
        print("Spark is not measured: " + "; ".join(missing))
        return []
    with (
        scratch_dir() as path,
        server("kafkalite", "--dir", f"{path}/log", "--durability", "page-cache") as broker,
        running_session() as spark,
    ):
        bench = Bench(spark, broker, Path(path))
        writes = _rounds(
            {
                "exactly once": lambda: bench.write_topic(exactly_once=True),
                "at least once": lambda: bench.write_topic(exactly_once=False),
                "parquet": lambda: bench.write_files("parquet"),
                "text": lambda: bench.write_files("text"),
            },
            WRITE_ROUNDS,
        )
        bench.prepare_reads()
        reads = _rounds(
            {
                "all columns": lambda: bench.read_topic(ALL_COLUMNS),
                "value alone": lambda: bench.read_topic("value string"),
                "parquet": bench.read_parquet,
                "text": bench.read_text,
            },
            READ_ROUNDS,
        )
    once = _rows(
        "write",
        {"exactly once": writes["exactly once"], "at least once": writes["at least once"]},
        {"exactly once": "at least once"},
    )[:1]
    once = [replace(once[0], name="write, exactly once beside at least once")]
    parquet = {"exactly once": "parquet", "at least once": "parquet"}
    return [*_rows("write", writes, parquet), *once, *_rows("read", reads, {"value alone": "parquet"})]
