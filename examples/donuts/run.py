"""A donut shop sells in three countries while its brokers fail and return: python examples/donuts/run.py

Three brokers store every purchase three times. The controllers form a separate quorum, so that two of the
three brokers may fail. Everything runs on this machine, in processes that are really killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kafkalite import Admin, Consumer, Producer, RecordMetadata, TopicPartition
from kafkalite.errors import KafkaliteError, NotEnoughReplicasError
from kafkalite.testing import ProcessCluster

COUNTRIES = ("US", "CA", "MX")  # the index is the partition
MENU = ("glazed", "maple", "chocolate", "jelly", "cruller")
TOPIC = "Purchases"
TWIN = "Purchases-strict"  # a purchase must be on two brokers to be acknowledged
FAILOVER_LIMIT_S = 3.0
PATIENCE_S = 30.0


class Story:
    """Prints the events, with the seconds since the shop opened."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:5.1f} s  {text}", flush=True)

    @staticmethod
    def table(titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        lines = [tuple(map(str, row)) for row in (titles, *rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
        print()
        for line in lines:
            print(
                "         "
                + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            )
        print(flush=True)


@dataclass
class Shop:
    """Sells in every country continuously, and keeps the metadata of each acknowledged purchase."""

    producer: Producer
    receipts: dict[int, RecordMetadata] = field(default_factory=dict)
    _next: int = 0
    _last_sale_s: dict[int, float] = field(default_factory=dict)
    _longest_wait_s: dict[int, float] = field(default_factory=dict)
    _sold: asyncio.Event = field(default_factory=asyncio.Event)

    async def sell(self, partition: int) -> None:
        """Sell in one country. Each purchase is sent when the previous one is acknowledged."""
        while True:
            number, self._next = self._next, self._next + 1
            purchase = {"id": number, "country": COUNTRIES[partition], "donut": MENU[number % len(MENU)]}
            value = json.dumps(purchase).encode()
            receipt = await self.producer.send(
                TOPIC, value, key=COUNTRIES[partition].encode(), partition=partition
            )
            self.receipts[number] = receipt
            now_s = time.monotonic()
            waited_s = now_s - self._last_sale_s.get(partition, now_s)
            self._longest_wait_s[partition] = max(waited_s, self._longest_wait_s.get(partition, 0.0))
            self._last_sale_s[partition] = now_s
            self._sold.set()
            self._sold = asyncio.Event()
            await asyncio.sleep(0.005)

    def begin_chapter(self) -> int:
        """Reset the longest waits, and return the number of purchases so far."""
        self._longest_wait_s.clear()
        return len(self.receipts)

    async def until_sold_everywhere(self) -> None:
        """Return when a purchase that was sent after this call is acknowledged in every country."""
        began_s = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            while any(self._last_sale_s.get(each, 0.0) <= began_s for each in range(len(COUNTRIES))):
                await self._sold.wait()

    def longest_waits(self) -> str:
        return " ".join(
            f"{name} {1000 * self._longest_wait_s.get(partition, 0.0):.0f}"
            for partition, name in enumerate(COUNTRIES)
        )


async def leaders(cluster: ProcessCluster, topic: str = TOPIC) -> list[int]:
    """Return the leader of each partition, -1 if it has none."""
    view = await cluster.view()
    return [each.state.leader_id for each in view.partitions if each.name.topic == topic]


async def until(holds: Callable[[list[int]], bool], cluster: ProcessCluster) -> float:
    """Wait until ``holds(leaders)`` is true. Return the elapsed seconds."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(KafkaliteError):  # the broker that receives the request was just killed
                if holds(await leaders(cluster)):
                    return time.monotonic() - began_s
            await asyncio.sleep(0.02)


async def is_refused(cluster: ProcessCluster) -> str:
    """Return the error of the strict topic. Called when only one broker is left."""
    async with Producer(
        cluster.bootstrap_servers, retries=0, enable_idempotence=False, request_timeout_ms=5_000
    ) as producer:
        try:
            await producer.send(TWIN, b"one more", partition=0)
        except NotEnoughReplicasError as refused:
            return refused.code.name
    raise AssertionError("the twin took a purchase with one of three replicas, against min.insync.replicas=2")


async def read_all(cluster: ProcessCluster, topic: str) -> list[Any]:
    """Return every record of the topic."""
    partitions = [TopicPartition(topic, number) for number in range(len(COUNTRIES))]
    records: list[Any] = []
    async with Consumer(bootstrap_servers=cluster.bootstrap_servers) as consumer:
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        ends = await consumer.end_offsets(partitions)
        async with asyncio.timeout(PATIENCE_S):
            while any(consumer.position(each) < ends[each] for each in partitions):
                records += await consumer.get_many(timeout_ms=1_000)
    return records


async def fetch(cluster: ProcessCluster, topic: str, partition: int, offset: int) -> Any:
    """Return the record at an address."""
    async with Consumer(bootstrap_servers=cluster.bootstrap_servers) as consumer:
        place = TopicPartition(topic, partition)
        consumer.assign([place])
        await consumer.seek(place, offset)
        (record, *_) = await consumer.get_many(1, timeout_ms=5_000)
        return record


async def create_topics(cluster: ProcessCluster) -> None:
    async with Admin(cluster.bootstrap_servers) as admin:
        await admin.create_topic(TOPIC, len(COUNTRIES), 3, configs={"min.insync.replicas": "1"})
        await admin.create_topic(TWIN, len(COUNTRIES), 3, configs={"min.insync.replicas": "2"})
    await cluster.wait(is_whole=True, brokers=3, topics=(TOPIC, TWIN))


async def play(cluster: ProcessCluster, story: Story) -> None:
    story.tell("three brokers (1, 2, 3) and three controllers (101, 102, 103) are up")
    await create_topics(cluster)
    at_first = await leaders(cluster)
    assert sorted(at_first) == [1, 2, 3], f"three partitions, three leaders; not {at_first}"
    story.tell(f"topic {TOPIC}: a partition for each of {', '.join(COUNTRIES)}, led by {at_first}")
    chapters: list[tuple[Any, ...]] = []

    async with Producer(cluster.bootstrap_servers, acks="all", linger_ms=0) as producer:
        for number in range(30):
            await producer.send(TWIN, b"%d" % number, partition=number % len(COUNTRIES))
        shop = Shop(producer)
        async with asyncio.TaskGroup() as counters:
            selling = [counters.create_task(shop.sell(partition)) for partition in range(len(COUNTRIES))]
            await asyncio.sleep(1.0)

            async def end_chapter(title: str, before: int) -> None:
                led = " ".join(map(str, await leaders(cluster)))
                chapters.append((title, led, len(shop.receipts) - before, shop.longest_waits()))

            await shop.until_sold_everywhere()
            await end_chapter("all is well", 0)

            before = shop.begin_chapter()
            await cluster.kill(3)
            story.tell("broker 3 is killed")
            took_s = await until(lambda led: set(led) <= {1, 2}, cluster)
            assert took_s <= FAILOVER_LIMIT_S, f"the failover took {took_s:.1f} s"
            await shop.until_sold_everywhere()
            story.tell(f"its partition has a new leader after {took_s:.2f} s, and is sold in again")
            await asyncio.sleep(1.0)
            await end_chapter("broker 3 dead", before)

            before = shop.begin_chapter()
            await cluster.kill(2)
            story.tell("broker 2 is killed")
            took_s = await until(lambda led: set(led) == {1}, cluster)
            await shop.until_sold_everywhere()
            story.tell(f"broker 1 leads everything after {took_s:.2f} s, and sells on alone")
            await asyncio.sleep(1.0)
            await end_chapter("brokers 2, 3 dead", before)
            story.tell(f"the twin topic, min.insync.replicas=2, refuses: {await is_refused(cluster)}")
            twins = await read_all(cluster, TWIN)
            assert len(twins) == 30, f"30 purchases were stored in the twin, and {len(twins)} are read"
            story.tell("and is still read: all of its 30 purchases")

            before = shop.begin_chapter()
            await cluster.start(wait=False)
            story.tell("brokers 2 and 3 return")
            await cluster.wait(is_whole=True, brokers=3)
            story.tell("every partition is on three brokers again")
            await until(lambda led: led == at_first, cluster)
            story.tell(f"and led as at first: {at_first}")
            await shop.until_sold_everywhere()
            await end_chapter("all is well again", before)
            for counter in selling:
                counter.cancel()

    story.table(("", "leaders", "sold", "longest wait between sales, ms"), chapters)
    await check(cluster, story, shop)


async def check(cluster: ProcessCluster, story: Story, shop: Shop) -> None:
    """Check that every acknowledged purchase exists exactly once, at its acknowledged address."""
    records = await read_all(cluster, TOPIC)
    stored: dict[int, list[Any]] = {}
    for record in records:
        stored.setdefault(json.loads(record.value)["id"], []).append(record)
    lost = [number for number in shop.receipts if number not in stored]
    doubled = [number for number, copies in stored.items() if len(copies) > 1]
    assert not lost, f"acknowledged and lost: {lost[:10]}"
    assert not doubled, f"stored twice: {doubled[:10]}"
    for number, receipt in shop.receipts.items():
        (record,) = stored[number]
        assert (record.partition, record.offset) == (receipt.partition, receipt.offset)
    story.tell(f"{len(shop.receipts):,} purchases acknowledged, 0 lost, 0 twice")

    receipt = shop.receipts[len(shop.receipts) // 2]
    record = await fetch(cluster, receipt.topic, receipt.partition, receipt.offset)
    assert json.loads(record.value)["id"] == len(shop.receipts) // 2
    story.tell(f"{record.address} can be fetched again: {record.value.decode()}")


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="donuts-") as directory:
        settings = {
            # Leadership returns to the preferred replicas within seconds. With the defaults it takes longer.
            "leader.imbalance.check.interval.seconds": 1,
            "leader.imbalance.per.broker.percentage": 0,
        }
        cluster = ProcessCluster(directory, brokers=3, controllers=3, settings=settings)
        story = Story()
        async with cluster:
            await play(cluster, story)


if __name__ == "__main__":
    if "--verbose" not in sys.argv:
        logging.getLogger("kafkalite").setLevel(logging.ERROR)  # killed brokers are expected here
    asyncio.run(main())
