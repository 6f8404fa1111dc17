"""``kl bench``: quick measurements of a broker, without any set-up.

If no brokers are given by ``-b``, the environment or a context, the command starts an embedded broker in a
temporary directory, with the default durability. The topic of the benchmark is deleted afterwards. To compare
versions, use ``make bench``, which also measures the machine itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import TimedOutError
from kafkalite.cli.invocation import Invocation, apply, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import percentile, print_document, show_ms
from kafkalite.model import TopicPartition
from kafkalite.rng import seeded_rng, system_rng

F = TypeVar("F", bound=Callable[..., Any])

_PERCENTS: Final = (50, 95, 99, 99.9)
_PATIENCE_MS: Final = 10_000
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: ``record_count`` records, each with a value of ``value_bytes`` bytes.

    ``records_per_send`` is the number of records in one call of ``send_many``. If it is 1, ``send_nowait`` is
    called instead.
    """

    record_count: int
    value_bytes: int
    records_per_send: int
    partition_count: int
    settings: dict[str, Any]  #: producer settings by dotted name
    topic_configs: dict[str, str]


@dataclass(slots=True)
class Outcome:
    records: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def document(self, what: str, broker: str, workload: Workload) -> dict[str, Any]:
        """Return the unrounded results to print. ``mib_per_second`` counts the bytes of values only."""
        document: dict[str, Any] = {
            "benchmark": what,
            "broker": broker,
            "records": self.records,
            "value_bytes": workload.value_bytes,
            "records_per_send": workload.records_per_send,
            "partitions": workload.partition_count,
            "seconds": self.seconds,
            "records_per_second": self.records / self.seconds if self.seconds else 0.0,
            "mib_per_second": self.records * workload.value_bytes / _MIB / self.seconds
            if self.seconds
            else 0.0,
        }
        if self.latencies:
            document["latency_ms"] = {
                f"p{percent:g}": percentile(self.latencies, percent) * 1e3 for percent in _PERCENTS
            } | {"max": max(self.latencies) * 1e3}
        return document


_IN_BULK: Final = (
    invocation.number_option(
        "--send", default=1000, show_default=True, help="Records per send_many(); 1 uses send_nowait()."
    ),
    invocation.number_option("--partitions", default=1, show_default=True),
)


def _workload_options(default_count: int, *more: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        return apply(
            function,
            invocation.number_option("-n", "--records", default=default_count, show_default=True),
            invocation.number_option("--size", default=100, show_default=True, help="Bytes per value."),
            *more,
            click.option("-z", "--compression", default="none", show_default=True, help="Codec."),
            click.option("--acks", type=click.Choice(["0", "1", "all"]), default="all", show_default=True),
            click.option(
                "--durability",
                type=click.Choice(["fsync", "page-cache"]),
                help="Durability of the topic.  [default: the broker's]",
            ),
            listing_options,
        )

    return decorate


def _workload(
    records: int,
    size: int,
    compression: str,
    acks: str,
    durability: str | None,
    send: int = 1,
    partitions: int = 1,
) -> Workload:
    settings = {"compression.type": compression, "acks": acks}
    configs = {} if durability is None else {"durability": durability}
    return Workload(records, size, send, partitions, settings, configs)


@click.group(cls=Group)
def bench() -> None:
    """Benchmark a broker (-b), or an embedded one."""


@bench.command("produce")
@_workload_options(200_000, *_IN_BULK)
def bench_produce(**options: Any) -> None:
    """Measure records sent per second and, unless --send is 1, the latency of send_many()."""
    _run("produce", _workload(**options), _produce)


@bench.command("consume")
@_workload_options(500_000, *_IN_BULK)
def bench_consume(**options: Any) -> None:
    """Fill a topic, then measure consumed records per second."""
    _run("consume", _workload(**options), _consume)


@bench.command("e2e")
@_workload_options(500)
def bench_e2e(**options: Any) -> None:
    """Measure the time from sending a record until a waiting consumer has it, one record at a time."""
    _run("e2e", _workload(**options), _end_to_end)


def _run(
    what: str, workload: Workload, measure: Callable[[Invocation, str, Workload], Awaitable[Outcome]]
) -> None:
    current = invocation.current()

    async def main() -> dict[str, Any]:
        async with _some_broker(current) as broker, _own_topic(current, workload) as topic:
            outcome = await measure(current, topic, workload)
            return outcome.document(what, broker, workload)

    document = invocation.run_command(main)
    if current.output in {"table", "wide"}:
        _print_for_people(document)
    else:
        print_document(document, "json" if current.output == "name" else current.output)


def _print_for_people(document: dict[str, Any]) -> None:
    shown = document | {
        "records": f"{document['records']:,}",
        "seconds": f"{document['seconds']:.3f}",
        "records_per_second": f"{document['records_per_second']:,.0f}",
        "mib_per_second": f"{document['mib_per_second']:,.1f}",
    }
    latencies = shown.pop("latency_ms", None)
    if latencies is not None:
        shown["latency"] = "  ".join(f"{name} {show_ms(ms / 1e3)}" for name, ms in latencies.items())
    print_document(shown, "table")


@asynccontextmanager
async def _some_broker(current: Invocation) -> AsyncIterator[str]:
    """Yield a text that names the measured broker: the configured one, or an embedded one started here."""
    if current.bootstrap_source != "default":
        yield current.bootstrap_servers
        return
    from kafkalite.broker.broker import Broker

    with tempfile.TemporaryDirectory(prefix="kl-bench-") as directory:
        async with Broker(listeners=("127.0.0.1:0",), log_dirs=directory) as broker:
            current.bootstrap = broker.bootstrap_servers
            yield "embedded, on disk, same process"


@asynccontextmanager
async def _own_topic(current: Invocation, workload: Workload) -> AsyncIterator[str]:
    topic = f"kl-bench-{system_rng().randbytes(4).hex()}"
    async with connect.admin(current) as admin:
        await admin.create_topic(topic, workload.partition_count, 1, configs=workload.topic_configs)
        try:
            yield topic
        finally:
            await admin.delete_topics([topic])


def _values(workload: Workload) -> list[bytes]:
    """Return 1,000 values of random hexadecimal text, which compresses to about half its size."""
    rng = seeded_rng(1)
    return [
        rng.randbytes((workload.value_bytes + 1) // 2).hex().encode()[: workload.value_bytes]
        for _ in range(1000)
    ]


async def _produce(current: Invocation, topic: str, workload: Workload) -> Outcome:
    outcome = Outcome()
    pool = _values(workload)
    batch = [pool[number % len(pool)] for number in range(workload.records_per_send)]
    async with connect.producer(current, **workload.settings) as producer:
        await producer.partitions_for(topic)
        started = time.perf_counter()
        if workload.records_per_send == 1:
            await _single_sends(producer, topic, pool, workload.record_count, outcome)
        while outcome.records < workload.record_count:
            part = batch[: workload.record_count - outcome.records]
            sent_at = time.perf_counter()
            await producer.send_many(topic, part)
            outcome.latencies.append(time.perf_counter() - sent_at)
            outcome.records += len(part)
        outcome.seconds = time.perf_counter() - started
    return outcome


async def _single_sends(producer: Any, topic: str, pool: list[bytes], count: int, outcome: Outcome) -> None:
    """Send ``count`` records with ``send_nowait``, as fast as the buffer accepts them, and flush."""
    from kafkalite.errors import BufferFullError

    for number in range(count):
        value = pool[number % len(pool)]
        try:
            producer.send_nowait(topic, value)
        except BufferFullError:
            await producer.wait_for_room()
            producer.send_nowait(topic, value)
    await producer.flush()
    outcome.records = count


async def _consume(current: Invocation, topic: str, workload: Workload) -> Outcome:
    filled = await _produce(current, topic, workload)
    outcome = Outcome()
    async with connect.consumer(current, **{"max.poll.records": 10_000}) as consumer:
        consumer.assign([TopicPartition(topic, partition) for partition in range(workload.partition_count)])
        await consumer.seek_to_beginning()
        started = time.perf_counter()
        while outcome.records < filled.records:
            records = await consumer.get_many(10_000, timeout_ms=_PATIENCE_MS)
            if not records:
                raise TimedOutError(f"no record for {_PATIENCE_MS / 1000:g} s after {outcome.records:,}")
            outcome.records += len(records)
        outcome.seconds = time.perf_counter() - started
    return outcome


async def _end_to_end(current: Invocation, topic: str, workload: Workload) -> Outcome:
    outcome = Outcome()
    (value, *_) = _values(workload)
    partition = TopicPartition(topic, 0)
    settings = workload.settings | {"linger.ms": 0}
    async with connect.producer(current, **settings) as producer, connect.consumer(current) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning()
        started = time.perf_counter()
        for _ in range(workload.record_count):
            sent_at = time.perf_counter()
            acknowledged = producer.send_nowait(topic, value, partition=0)
            if not await consumer.get_many(1, timeout_ms=_PATIENCE_MS):
                raise TimedOutError(
                    f"record {outcome.records + 1:,} did not arrive in {_PATIENCE_MS / 1000:g} s"
                )
            outcome.latencies.append(time.perf_counter() - sent_at)
            await acknowledged
            outcome.records += 1
        outcome.seconds = time.perf_counter() - started
    return outcome
