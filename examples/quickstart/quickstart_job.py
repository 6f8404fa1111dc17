"""The quickstart's job: produces records, consumes them, and compares the two.

It starts a broker with the embedded defaults (durability fsync) on a data directory, and creates a topic with
three partitions. Every line of the file is produced with its first word as the key. All records are consumed,
and their number and the order of the records of each key are compared.
"""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from donut_purchases import purchases

from kafkalite.cli.output import percentile, show_ms
from kafkalite.cli.progress import bar_on
from kafkalite.model import Record, TopicPartition
from kafkalite.rng import seeded_rng

if TYPE_CHECKING:
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.client.producer.producer import Producer

PARTITION_COUNT: Final = 3
LINES_PER_SEND: Final = 250
MAX_LINE_BYTES: Final = 12 * 1024 * 1024
_ROUND_TRIPS: Final = 100
_POLL_MS: Final = 10_000
# Apache's "combined" and "common" formats: client, identity, user, [time], "request", status, size, ...
_ACCESS_LOG_LINE = re.compile(rb'(\S+) \S+ \S+ \[[^\]]*\] "(?:[^"\\]|\\.)*" ([0-9]{3}) ')

Keyed = tuple[bytes | None, bytes]


@dataclass(slots=True)
class Tally:
    """A summary of records. Equal tallies have the same records, in the same order for each key."""

    count: int = 0
    size_bytes: int = 0
    per_key: dict[bytes | None, int] = field(default_factory=dict)  #: checksum over the values of each key

    def add(self, key: bytes | None, value: bytes) -> None:
        self.count += 1
        self.size_bytes += len(value)
        self.per_key[key] = zlib.crc32(len(value).to_bytes(4, "big") + value, self.per_key.get(key, 0))


@dataclass(slots=True)
class Job:
    file: Path | None
    made_up_count: int
    seed: int
    quiet: bool = False
    startup_seconds: float = 0.0
    sent: Tally = field(default_factory=Tally)
    received: Tally = field(default_factory=Tally)
    produce_seconds: float = 0.0
    consume_seconds: float = 0.0
    ack_seconds: list[float] = field(default_factory=list)
    round_trip_seconds: list[float] = field(default_factory=list)
    per_partition: Counter[int] = field(default_factory=Counter)
    partitions_of_key: dict[bytes | None, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    unparseable_count: int = 0
    strayed: int = 0  #: records in a partition other than that of the first record with their key

    @property
    def topic(self) -> str:
        return "Purchases" if self.file is None else "access-log"

    @property
    def is_access_log(self) -> bool:
        """Whether the pipeline can run: the file is an access log, or the pipeline finds or generates one."""
        return self.file is None or bool(self.counts)

    @property
    def counted_by(self) -> str:
        return "country" if self.file is None else "status"

    async def run(self, directory: str) -> None:
        from kafkalite import Admin, Broker, Consumer, Producer

        started = time.perf_counter()
        async with Broker(listeners=("127.0.0.1:0",), log_dirs=directory) as broker:
            self.startup_seconds = time.perf_counter() - started
            servers = broker.bootstrap_servers
            self._say(f"A broker is up on {servers}, {show_ms(self.startup_seconds)} after its start.")
            async with Admin(servers) as admin:
                longest = {"max.message.bytes": str(MAX_LINE_BYTES)}
                await admin.create_topic(self.topic, PARTITION_COUNT, 1, configs=longest)
                await admin.create_topic("round-trip", 1, 1)
            self._say(f"Topic {self.topic!r} has {PARTITION_COUNT} partitions. Acknowledged means: on disk.")
            async with Producer(servers, linger_ms=0, max_request_size=MAX_LINE_BYTES) as producer:
                await self._produce(producer)
                async with Consumer(bootstrap_servers=servers, max_poll_records=10_000) as consumer:
                    await self._consume(consumer)
                async with Consumer(bootstrap_servers=servers) as consumer:
                    await self._round_trips(producer, consumer)

    def _say(self, text: str) -> None:
        if not self.quiet:
            click.echo(text)

    async def _produce(self, producer: Producer) -> None:
        total_bytes = None if self.file is None else self.file.stat().st_size
        bar = bar_on(sys.stderr, "in ", total_bytes=total_bytes, total_records=self.made_up_count)
        started = time.perf_counter()
        source = iter(self._source())
        try:
            while part := list(islice(source, LINES_PER_SEND)):
                sent_at = time.perf_counter()
                await producer.send_many(self.topic, [value for _, value in part], [key for key, _ in part])
                self.ack_seconds.append(time.perf_counter() - sent_at)
                for key, value in part:
                    self.sent.add(key, value)
                bar.advance_records(len(part))
                bar.advance_bytes(sum(len(value) + 1 for _, value in part))
        finally:
            bar.close()
        self.produce_seconds = time.perf_counter() - started

    def _source(self) -> Iterable[Keyed]:
        if self.file is None:
            return purchases(self.made_up_count, seeded_rng(self.seed))
        return _keyed_lines(self.file)

    async def _consume(self, consumer: Consumer) -> None:
        consumer.assign([TopicPartition(self.topic, partition) for partition in range(PARTITION_COUNT)])
        await consumer.seek_to_beginning()
        bar = bar_on(sys.stderr, "out", total_records=self.sent.count)
        started = time.perf_counter()
        try:
            while self.received.count < self.sent.count:
                records = await consumer.get_many(10_000, timeout_ms=_POLL_MS)
                if not records:
                    return
                for record in records:
                    self._take(record)
                bar.advance_records(len(records))
        finally:
            bar.close()
            self.consume_seconds = time.perf_counter() - started

    def _take(self, record: Record) -> None:
        value = record.value or b""
        self.received.add(record.key, value)
        self.per_partition[record.partition] += 1
        if (
            record.key is not None
            and self.partitions_of_key.setdefault(record.key, record.partition) != record.partition
        ):
            self.strayed += 1
        label = _label(value) if self.file is not None else (record.key or b"").decode()
        if label is None:
            self.unparseable_count += 1
        else:
            self.counts[label] += 1

    async def _round_trips(self, producer: Producer, consumer: Consumer) -> None:
        """Measure the time from sending one record until a consumer in a long poll receives it."""
        partition = TopicPartition("round-trip", 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning()
        for number in range(_ROUND_TRIPS):
            sent_at = time.perf_counter()
            acknowledged = producer.send_nowait(partition.topic, b"%d" % number, partition=0)
            await consumer.get_many(1, timeout_ms=_POLL_MS)
            self.round_trip_seconds.append(time.perf_counter() - sent_at)
            await acknowledged

    # --- results

    def problems(self) -> list[str]:
        found: list[str] = []
        if self.received.count != self.sent.count:
            found.append(f"{self.sent.count:,} records in, {self.received.count:,} out")
        differing = sum(
            self.sent.per_key.get(key) != self.received.per_key.get(key)
            for key in self.sent.per_key.keys() | self.received.per_key.keys()
            if key is not None  # records without a key are spread over partitions and have no order
        )
        if differing:
            found.append(f"{differing:,} keys whose records differ or changed their order")
        if self.strayed:
            found.append(f"{self.strayed:,} records in another partition than the first of their key")
        return found

    def document(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "records_in": self.sent.count,
            "records_out": self.received.count,
            "bytes": self.sent.size_bytes,
            "keys": len(self.received.per_key),
            "in_equals_out": not self.problems(),
            "records_per_partition": {str(p): self.per_partition[p] for p in range(PARTITION_COUNT)},
            f"count_by_{self.counted_by}": dict(sorted(self.counts.items())),
            "unparseable": self.unparseable_count,
            "broker_start_ms": self.startup_seconds * 1e3,
            "produce_per_second": self.sent.count / self.produce_seconds if self.produce_seconds else None,
            "consume_per_second": self.received.count / self.consume_seconds
            if self.consume_seconds
            else None,
            "acknowledged_ms": _p50_p99(self.ack_seconds),
            "round_trip_ms": _p50_p99(self.round_trip_seconds),
        }


def _p50_p99(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"p50": percentile(seconds, 50) * 1e3, "p99": percentile(seconds, 99) * 1e3}


def _keyed_lines(path: Path) -> Iterator[Keyed]:
    """Yield (first word, line) for each line without its newline. The first word is the key."""
    with path.open("rb") as stream:
        for line in stream:
            value = line.removesuffix(b"\n")
            words = value.split(None, 1)
            yield (words[0] if words else None), value


def _label(line: bytes) -> str | None:
    """Return the HTTP status in a line of an access log, or None for other lines."""
    match = _ACCESS_LOG_LINE.match(line)
    return None if match is None else match.group(2).decode()
