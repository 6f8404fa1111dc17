"""Capabilities B: the producer, each shown end to end against an embedded broker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter, defaultdict

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, TopicPartition
from kafkalite.errors import KafkaliteError


async def _read(servers: str, count: int, *topics: str) -> list:
    async with Consumer(*topics, bootstrap_servers=servers, auto_offset_reset="earliest") as consumer:
        records: list = []
        while len(records) < count:
            got = await consumer.get_many(count - len(records), timeout_ms=10_000)
            assert got, f"only {len(records)} of {count} records came"
            records += got
        return records


async def _spread(partitioner: object, sends: list[tuple], partitions: int = 3) -> list:
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=partitions)
        async with Producer(broker.bootstrap_servers, partitioner=partitioner, batch_size=300) as producer:
            for key, value in sends:
                producer.send_nowait("t", value, key=key)
            await producer.flush()
        return await _read(broker.bootstrap_servers, len(sends), "t")


async def test_records_without_a_key_spread_evenly() -> None:
    """B2: round-robin by batch."""
    counts = Counter(r.partition for r in await _spread("roundrobin", [(None, b"x" * 10)] * 9000))
    largest_batch = 300
    assert set(counts) == {0, 1, 2}
    assert max(counts.values()) - min(counts.values()) <= largest_batch


async def test_a_key_has_one_partition_for_ever() -> None:
    """B3: the same in another process, and the same as Kafka's (murmur2)."""
    keys = [b"key-%d" % i for i in range(1000)]
    placed: dict = defaultdict(set)
    for record in await _spread("roundrobin", [(key, b"x") for key in keys * 10], partitions=7):
        placed[record.key].add(record.partition)
    assert len(placed) == 1000
    assert {len(partitions) for partitions in placed.values()} == {1}
    code = (
        "from kafkalite.records.partitioners import partition_for_key\n"
        "print([partition_for_key(b'key-%d' % i, 7) for i in range(1000)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str([placed[key].pop() for key in keys])


@pytest.mark.parametrize("partitioner", ["random", "sticky", "hash"])
async def test_other_partitioners_reach_every_partition(partitioner: str) -> None:
    """B4"""
    sends = [(b"%d" % i if partitioner == "hash" else None, b"x" * 20) for i in range(3000)]
    counts = Counter(record.partition for record in await _spread(partitioner, sends))
    assert set(counts) == {0, 1, 2}


async def test_a_rule_of_the_business_chooses_the_partition() -> None:
    """B5: the donut shop's countries."""
    countries = {b"CA": 0, b"US": 1, b"MX": 2}

    def by_country(topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        return countries[key or b"US"]

    records = await _spread(by_country, [(key, b"donut") for key in list(countries) * 20])
    assert all(record.partition == countries[record.key] for record in records)


async def test_an_explicit_partition_is_kept_and_checked() -> None:
    """B6"""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=3)
        async with Producer(broker.bootstrap_servers) as producer:
            assert (await producer.send("t", b"x", partition=2)).partition == 2
            for wrong in (3, -1):
                with pytest.raises(KafkaliteError, match="partition"):
                    await producer.send("t", b"x", partition=wrong)


async def test_send_nowait_returns_at_once_and_tells_the_offset_later() -> None:
    """B8, B9: the callback is called exactly once."""
    async with Broker() as broker, Producer(broker.bootstrap_servers, linger_ms=20) as producer:
        await producer.send("t", b"warm")
        called: list = []
        start = time.perf_counter()
        delivery = producer.send_nowait("t", b"x")
        delivery.add_callback(called.append)
        assert time.perf_counter() - start < 0.01
        assert not delivery.done()
        metadata = await delivery
        await asyncio.sleep(0)
        assert (metadata.topic, metadata.offset) == ("t", 1)
        assert called == [delivery]
        assert delivery.result() == metadata


async def test_send_returns_when_the_record_can_be_read() -> None:
    """B10"""
    async with Broker() as broker, Producer(broker.bootstrap_servers) as producer:
        metadata = await producer.send("t", b"x")
        async with Admin(broker.bootstrap_servers) as admin:
            partition = TopicPartition("t", metadata.partition)
            assert (await admin.list_offsets([partition], "latest"))[partition].offset == metadata.offset + 1


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_compression_shrinks_what_is_stored(codec: str) -> None:
    """B12: the broker stores the batch as it came; codecs may be mixed in a partition."""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=1)
        sizes = {}
        for compression in (None, codec):
            async with Producer(broker.bootstrap_servers, compression_type=compression) as producer:
                before = sum(p.size_bytes for p in await admin.describe_log_dirs(["t"]))
                await producer.send_many("t", [b"the same words again and again"] * 1000)
                sizes[compression] = sum(p.size_bytes for p in await admin.describe_log_dirs(["t"])) - before
        assert sizes[codec] < sizes[None] / 3
        assert len(await _read(broker.bootstrap_servers, 2000, "t")) == 2000


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_acks(acks: object) -> None:
    """B13 on one broker: acks=0 tells no offset; every record arrives."""
    async with Broker() as broker, Producer(broker.bootstrap_servers, acks=acks) as producer:
        metadata = await producer.send("t", b"x")
        assert metadata.offset == (-1 if acks == 0 else 0)
        assert len(await _read(broker.bootstrap_servers, 1, "t")) == 1


async def test_kafkas_property_names_are_accepted() -> None:
    """B19"""
    async with Broker() as broker:
        properties = {
            "bootstrap.servers": broker.bootstrap_servers,
            "linger.ms": 0,
            "request.required.acks": "1",
        }
        async with Producer(**properties) as producer:
            assert (await producer.send("t", b"x")).offset == 0
