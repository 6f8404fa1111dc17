"""Measure the memory of the Python workers while data flows from source to sink.

::

    python -m proof.spark.memory --megabytes 1000 --value-bytes 1000

One query under ``local[2]`` copies a topic of that size in as few batches as Spark chooses. The resident
memory of every Python process below the driver is sampled from /proc. The output is counted and summed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import crc32c

from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.model import TopicPartition
from kafkalite.testing.process_cluster import ProcessCluster
from proof.spark.drivers import Driver
from sparkbridge.errors import FastStartError
from sparkbridge.local import fast_start

PARTITIONS: Final = 2
SAMPLE_S: Final = 0.1
#: The JVM is not measured.
SETTINGS: Final = {"spark.master": "local[2]", "spark.log.level": "OFF", "spark.driver.memory": "1g"}
LIMIT_S: Final = 900.0
_CHUNK: Final = 10_000
_PAGE_BYTES: Final = 4096


class Content(NamedTuple):
    """A summary of a topic's values. Equal multisets of values have equal summaries."""

    records: int
    sum_of_crcs: int


EMPTY: Final = Content(0, 0)


@dataclass(slots=True)
class Usage:
    """The memory of the Python processes, in MiB."""

    peak: dict[int, float] = field(default_factory=dict)  #: by process
    samples: list[tuple[float, float, float]] = field(default_factory=list)  #: (seconds, largest, total)
    input: Content = EMPTY
    output: Content = EMPTY
    copy_s: float = 0.0

    @property
    def largest(self) -> float:
        return max(self.peak.values(), default=0.0)

    @property
    def together(self) -> float:
        return max((each[2] for each in self.samples), default=0.0)

    def largest_in(self, part: slice) -> float:
        """Return the size of the largest process in a part of the samples taken while data flowed."""
        return max((each[1] for each in self.samples[part]), default=0.0)


def python_processes(ancestor: int) -> dict[int, float]:
    """Return the resident MiB of each Python process below ``ancestor``, by process id."""
    parents: dict[int, int] = {}
    sizes: dict[int, float] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            words = (directory / "stat").read_text().rpartition(")")
            resident = int((directory / "statm").read_text().split()[1]) * _PAGE_BYTES / 2**20
        except (OSError, ProcessLookupError):
            continue  # the process has ended meanwhile
        number = int(directory.name)
        parents[number] = int(words[2].split()[1])
        if "(python" in words[0]:
            sizes[number] = resident

    def is_below(number: int) -> bool:
        while number > 1:
            number = parents.get(number, 0)
            if number == ancestor:
                return True
        return False

    return {number: size for number, size in sizes.items() if is_below(number)}


async def _fill(servers: str, topic: str, count: int, value_bytes: int) -> Content:
    records, total = 0, 0
    async with Producer(servers) as producer:
        for start in range(0, count, _CHUNK):
            numbers = range(start, min(start + _CHUNK, count))
            values = [b"%020d" % number + b"." * (value_bytes - 20) for number in numbers]
            await producer.send_many(topic, values, partition=(start // _CHUNK) % PARTITIONS)
            records += len(values)
            total += sum(map(crc32c.crc32c, values))
    return Content(records, total)


async def _content(servers: str, topic: str) -> Content:
    keys = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    records, total = 0, 0
    async with Consumer(
        bootstrap_servers=servers, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:
        ends = await consumer.end_offsets(keys)
        consumer.assign(keys)
        while any((consumer.position(key) or 0) < ends[key] for key in keys):
            for record in await consumer.get_many(_CHUNK, timeout_ms=1_000):
                records += 1
                total += crc32c.crc32c(record.value or b"")
    return Content(records, total)


async def measure(directory: Path, *, megabytes: int, value_bytes: int) -> Usage:
    """Copy ``megabytes`` (10^6 bytes each) and measure. Raises AssertionError if the query fails."""
    usage = Usage()
    async with ProcessCluster(
        directory / "nodes", brokers=1, settings={"durability": "page-cache"}
    ) as cluster:
        servers = cluster.bootstrap_servers
        async with Admin(servers) as admin:
            for topic in ("in", "out"):
                await admin.create_topic(topic, PARTITIONS, 1)
        usage.input = await _fill(servers, "in", megabytes * 1_000_000 // value_bytes, value_bytes)
        driver = Driver(SETTINGS, directory / "driver.log")
        try:
            await driver.start()
            began_s = time.monotonic()
            order = {
                "format": "kafkalite",
                "transform": ["key", "value"],
                "source": {
                    "kafka.bootstrap.servers": servers,
                    "subscribe": "in",
                    "startingOffsets": "earliest",
                },
                "sink": {"kafka.bootstrap.servers": servers, "topic": "out"},
                "checkpoint": str(directory / "checkpoint"),
                "until": "available-now",
            }
            copying = asyncio.create_task(driver.run(order, LIMIT_S))
            while not copying.done():
                for number, size in (sizes := python_processes(driver.process_id)).items():
                    usage.peak[number] = max(usage.peak.get(number, 0.0), size)
                second = time.monotonic() - began_s
                usage.samples.append((second, max(sizes.values(), default=0.0), sum(sizes.values())))
                await asyncio.wait([copying], timeout=SAMPLE_S)
            answer = await copying
            usage.copy_s = time.monotonic() - began_s
            if not answer.startswith("ended"):
                raise AssertionError(f"{answer}\n{driver.tail()}")
        finally:
            await driver.close()
        usage.output = await _content(servers, "out")
    return usage


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if the output is complete and no process exceeded the limit."""
    parser = argparse.ArgumentParser(prog="python -m proof.spark.memory", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--value-bytes", type=int, default=1_000)
    parser.add_argument("--limit-mib", type=float, default=300.0, help="for one Python process")
    chosen = parser.parse_args(arguments)
    with contextlib.suppress(FastStartError):
        fast_start.make_class_archive()
    with tempfile.TemporaryDirectory(prefix="kafkalite-spark-memory-") as name:
        usage = asyncio.run(measure(Path(name), megabytes=chosen.megabytes, value_bytes=chosen.value_bytes))
    half = len(usage.samples) // 2
    sys.stdout.write(
        f"copied        {usage.output.records:,} records of {chosen.value_bytes} bytes "
        f"in {usage.copy_s:.1f} s, the session's start included\n"
        f"same content  {usage.input == usage.output}\n"
        f"largest       {usage.largest:.0f} MiB resident, of {len(usage.peak)} Python processes\n"
        f"first half    {usage.largest_in(slice(0, half)):.0f} MiB the largest\n"
        f"second half   {usage.largest_in(slice(half, None)):.0f} MiB the largest\n"
        f"together      {usage.together:.0f} MiB\n"
    )
    return 0 if usage.input == usage.output and usage.largest <= chosen.limit_mib else 1


if __name__ == "__main__":
    sys.exit(main())
