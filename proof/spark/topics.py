"""Writes the input of a copy, with all cases that a source must handle, and reads the output."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from proof.spark.verdict import Seen

_SHARE = 50
_PAUSE_S = 0.02
_MARKERS_LIMIT_S = 30.0


async def fill(servers: str, topic: str, partitions: int, count: int, *, first: int = 0) -> None:
    """Write ``count`` records with few keys to each partition: plain, in transactions, and aborted ones.

    Returns when a read_committed reader can read them all, because a commit is acknowledged before its
    markers are written.
    """
    async with Producer(servers) as plain, Producer(servers, transactional_id=f"fill-{topic}") as careful:
        for number, start in enumerate(range(first, first + count, _SHARE)):
            numbers = range(start, min(start + _SHARE, first + count))
            if number % 3 == 0:
                await _send(plain, topic, partitions, numbers, b"record")
                await plain.flush()
                continue
            if number % 3 == 1:
                await careful.begin_transaction()
                await _send(careful, topic, partitions, range(start, start + 7), b"ABORTED")
                await careful.abort_transaction()
            await careful.begin_transaction()
            await _send(careful, topic, partitions, numbers, b"record")
            await careful.commit_transaction()
    if left := await open_transactions(servers, topic, partitions, _MARKERS_LIMIT_S):
        raise TimeoutError(f"after {_MARKERS_LIMIT_S:g} s: {'; '.join(left)}")


async def _send(producer: Producer, topic: str, partitions: int, numbers: range, what: bytes) -> None:
    for partition in range(partitions):
        for number in numbers:
            key = b"%d-%d" % (partition, number % 7)
            producer.send_nowait(topic, b"%s %d of %d" % (what, number, partition), key, partition=partition)
    await producer.flush()


async def ends(servers: str, topic: str, partitions: int) -> dict[int, int]:
    """Return the end of each partition for a read_committed reader (exclusive)."""
    async with Consumer(bootstrap_servers=servers, isolation_level="read_committed") as consumer:
        found = await consumer.end_offsets([TopicPartition(topic, number) for number in range(partitions)])
    return {tp.partition: offset for tp, offset in found.items()}


async def read_all(
    servers: str, topic: str, partitions: int, *, starts: dict[int, int] | None = None
) -> list[Seen]:
    """Return all committed records, or those from ``starts`` on (inclusive, by partition)."""
    keys = [TopicPartition(topic, number) for number in range(partitions)]
    found: list[Seen] = []
    async with Consumer(
        bootstrap_servers=servers, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:
        last = await consumer.end_offsets(keys)
        consumer.assign(keys)
        while any((consumer.position(key) or 0) < last[key] for key in keys):
            for record in await consumer.get_many(10_000, timeout_ms=1_000):
                if record.offset >= (starts or {}).get(record.partition, 0):
                    found.append(Seen(record.partition, record.offset, record.key, record.value))
    return found


async def open_transactions(servers: str, topic: str, partitions: int, limit_s: float) -> list[str]:
    """Return the transactions that still hold read_committed readers back after ``limit_s``."""
    keys = [TopicPartition(topic, number) for number in range(partitions)]
    deadline_s = time.monotonic() + limit_s
    committed = Consumer(bootstrap_servers=servers, isolation_level="read_committed")
    uncommitted = Consumer(bootstrap_servers=servers, isolation_level="read_uncommitted")
    async with Admin(servers) as admin, committed, uncommitted:
        while True:
            problems = ["no broker responded"]
            with suppress(KafkaliteError):
                problems = [
                    f"{tp}: producer {one.producer_id} has one open, from {one.transaction_start_offset} on"
                    for tp, producers in (await admin.describe_producers(keys)).items()
                    for one in producers
                    if one.transaction_start_offset is not None
                ]
                # A transaction stays open for readers until its marker is on all replicas.
                stable, ends = await committed.end_offsets(keys), await uncommitted.end_offsets(keys)
                problems += [
                    f"{tp}: committed up to {stable[tp]} of {ends[tp]}"
                    for tp in keys
                    if stable[tp] < ends[tp]
                ]
            if not problems or time.monotonic() > deadline_s:
                return problems
            await asyncio.sleep(_PAUSE_S)
