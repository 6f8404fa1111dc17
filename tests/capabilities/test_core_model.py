"""Capabilities A: the core model, each shown end to end against an embedded broker."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, RecordAddress, Table, TopicPartition
from kafkalite.protocol.messages import data
from kafkalite.testing import VirtualClock
from kafkalite.testing.wire import WireClient
from proof.waiting import settle

DAY_MS = 24 * 60 * 60 * 1000


async def _read(servers: str, count: int, *topics: str) -> list:
    async with Consumer(*topics, bootstrap_servers=servers, auto_offset_reset="earliest") as consumer:
        records: list = []
        while len(records) < count:
            got = await consumer.get_many(count - len(records), timeout_ms=10_000)
            assert got, f"only {len(records)} of {count} records came"
            records += got
        return records


async def test_many_producers_and_many_consumers_share_a_topic() -> None:
    """A1"""
    async with Broker() as broker:
        servers = broker.bootstrap_servers

        async def produce(name: int) -> None:
            async with Producer(servers) as producer:
                for i in range(40):
                    await producer.send("shared", f"{name}-{i}".encode())

        async with Admin(servers) as admin:
            await admin.create_topic("shared", partitions=2)
        await asyncio.gather(*(produce(name) for name in range(5)))
        seen = await asyncio.gather(*(_read(servers, 200, "shared") for _ in range(5)))
        expected = Counter(f"{name}-{i}".encode() for name in range(5) for i in range(40))
        for records in seen:
            assert Counter(record.value for record in records) == expected


async def test_replay_rebuilds_the_same_state_also_after_a_restart(tmp_path: Path) -> None:
    """A2"""

    async def fold(servers: str) -> tuple[dict, str]:
        state: dict = {}
        digest = hashlib.sha256()
        for record in await _read(servers, 500, "state"):
            state[record.key] = record.value
            digest.update(repr(record[2:]).encode())
        return state, digest.hexdigest()

    async with Broker(log_dirs=str(tmp_path / "data")) as broker:
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send_many(
                "state",
                [b"%d" % i for i in range(500)],
                keys=[b"k%d" % (i % 17) for i in range(500)],
                partition=0,
            )
        first = await fold(broker.bootstrap_servers)
        assert await fold(broker.bootstrap_servers) == first
    async with Broker(log_dirs=str(tmp_path / "data")) as broker:
        assert await fold(broker.bootstrap_servers) == first
    assert first[0][b"k0"] == b"493"


async def test_a_thousand_topics_without_leakage() -> None:
    """A3"""
    names = [f"topic-{i:04}" for i in range(1000)]
    async with Broker(listeners="inproc://") as broker, Admin(broker.bootstrap_servers) as admin:
        for first in range(0, 1000, 250):
            await admin.create_topics(dict.fromkeys(names[first : first + 250], 1))
        assert sorted(topic.name for topic in await admin.list_topics()) == names
        async with Producer(broker.bootstrap_servers) as producer:
            for name in names:
                producer.send_nowait(name, name.encode())
            await producer.flush()
        for record in await _read(broker.bootstrap_servers, 1000, *names):
            assert (record.value, record.offset) == (record.topic.encode(), 0)


async def test_partitions_are_logs_of_their_own() -> None:
    """A4"""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=4)
        async with Producer(broker.bootstrap_servers) as producer:
            for partition in range(4):
                await producer.send_many("t", [b"x"] * (partition * 10 + 1), partition=partition)
        partitions = [TopicPartition("t", p) for p in range(4)]
        ends = await admin.list_offsets(partitions, "latest")
        assert [ends[p].offset for p in partitions] == [1, 11, 21, 31]


async def test_topic_partition_offset_addresses_one_record() -> None:
    """A5"""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("Purchases", partitions=2)
        async with Producer(broker.bootstrap_servers) as producer:
            for partition in (0, 1):
                await producer.send_many(
                    "Purchases", [b"%d-%d" % (partition, i) for i in range(50)], partition=partition
                )
        async with Consumer(bootstrap_servers=broker.bootstrap_servers) as consumer:
            for partition in (0, 1):
                address = RecordAddress.parse(f"Purchases-{partition}-31")
                tp = TopicPartition(address.topic, address.partition)
                consumer.assign([tp])
                await consumer.seek(tp, address.offset)
                (record,) = await consumer.get_many(1, timeout_ms=5000)
                assert (record.address, record.value) == (address, b"%d-31" % partition)
                await consumer.seek_to_beginning(tp)
                records = await consumer.get_many(50, timeout_ms=5000)
                assert [r.offset for r in records] == list(range(len(records)))


async def test_order_holds_inside_a_partition() -> None:
    """A6, B7, C8, G-order: what was sent first has the lower offset; no promise across partitions."""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=4)
        async with Producer(broker.bootstrap_servers, linger_ms=1) as producer:
            for i in range(4000):
                producer.send_nowait("t", b"%d" % i, key=b"%d" % (i % 40))
            await producer.flush()
        last: dict = {}
        offsets: dict = {}
        for record in await _read(broker.bootstrap_servers, 4000, "t"):
            assert int(record.value) > last.get(record.key, -1)
            last[record.key] = int(record.value)
            assert record.offset == offsets.get(record.partition, -1) + 1
            offsets[record.partition] = record.offset


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
async def test_keys_and_values_are_opaque_bytes(codec: str | None) -> None:
    """A7"""
    pairs = [(os.urandom(i % 50), os.urandom(i * 7 % 300)) for i in range(100)]
    pairs += [(b"", b""), (None, b"v"), (b"k", None), (None, None)]
    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers, compression_type=codec) as producer:
            for key, value in pairs:
                producer.send_nowait("t", value, key=key, partition=0)
            await producer.flush()
        records = await _read(broker.bootstrap_servers, len(pairs), "t")
        assert [(record.key, record.value) for record in records] == pairs


async def test_a_record_has_key_value_timestamp_and_headers() -> None:
    """A8: repeated header names keep their order; create time and append time are both there."""
    headers = [("a", b"1"), ("b", None), ("a", b""), ("ü", bytes(range(256)))]
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("created", partitions=1)
        await admin.create_topic(
            "appended", partitions=1, configs={"message.timestamp.type": "LogAppendTime"}
        )
        async with Producer(broker.bootstrap_servers) as producer:
            for topic in ("created", "appended"):
                await producer.send(topic, b"v", key=b"k", timestamp_ms=1_000_000, headers=headers)
        (created,) = await _read(broker.bootstrap_servers, 1, "created")
        (appended,) = await _read(broker.bootstrap_servers, 1, "appended")
        assert created.headers == appended.headers == tuple(headers)
        assert (created.timestamp_ms, created.timestamp_type.name) == (1_000_000, "CREATE_TIME")
        assert appended.timestamp_type.name == "LOG_APPEND_TIME"
        assert appended.timestamp_ms > 1_600_000_000_000


async def test_a_closed_segment_never_changes(tmp_path: Path) -> None:
    """A9, C4: neither producing nor consuming touches what was written."""
    data = tmp_path / "data"

    def digests() -> dict[str, str]:
        logs = sorted(data.rglob("*-0/*.log"))  # of the partition, not of the metadata
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in logs}

    async with Broker(log_dirs=str(data)) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=1, configs={"segment.bytes": "4096"})
        async with Producer(broker.bootstrap_servers) as producer:
            for _ in range(20):
                await producer.send("t", os.urandom(1000))
            before = digests()
            active = max(before)
            assert len(before) > 3
            for _ in range(20):
                await producer.send("t", os.urandom(1000))
        await _read(broker.bootstrap_servers, 40, "t")
        after = digests()
        for path, digest in before.items():
            if path != active:
                assert after[path] == digest


async def test_linger_gathers_records_into_few_requests() -> None:
    """A11, B11"""
    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers, linger_ms=50, batch_size=1_000_000) as producer:
            await producer.send("t", b"first")
            before = broker.statistics().requests["PRODUCE"]
            for i in range(1000):
                producer.send_nowait("t", b"%d" % i)
            await producer.flush()
            assert broker.statistics().requests["PRODUCE"] - before <= 3
        records = await _read(broker.bootstrap_servers, 1001, "t")
        assert [int(record.value) for record in records[1:]] == list(range(1000))


async def test_a_batch_is_sent_when_it_has_enough_records_or_has_waited_long_enough() -> None:
    """B11: batch.max.messages and linger.ms."""
    async with Broker() as broker:
        settings = {"linger_ms": 60_000, "batch_max_messages": 10}
        async with Producer(broker.bootstrap_servers, **settings) as producer:
            await producer.send_many("t", [b"first"])
            before = broker.statistics().requests["PRODUCE"]
            deliveries = [producer.send_nowait("t", b"x") for _ in range(10)]
            await settle()
            assert broker.statistics().requests["PRODUCE"] == before, "it lingers"
            lingering = producer.send_nowait("t", b"x")
            async with asyncio.timeout(30):
                await asyncio.gather(*deliveries)
            assert not lingering.done()
            assert broker.statistics().requests["PRODUCE"] == before + 1
        async with Producer(broker.bootstrap_servers, linger_ms=1) as producer, asyncio.timeout(30):
            await producer.send_nowait("t", b"x")


async def test_consuming_costs_requests_by_size_not_by_record() -> None:
    """A13: no acknowledgement per record, nor per poll. The consumer commits an offset when it closes."""
    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send_many("t", [b"x" * 10] * 10_000, partition=0)
        before = Counter(broker.statistics().requests)
        async with Consumer(
            "t", bootstrap_servers=broker.bootstrap_servers, group_id="g", auto_offset_reset="earliest"
        ) as consumer:
            count = 0
            while count < 10_000:
                count += len(await consumer.get_many(100, timeout_ms=10_000))
        spent = Counter(broker.statistics().requests) - before
        assert spent["OFFSET_COMMIT"] == 1
        assert spent.total() < 30


async def test_a_broker_keeps_no_state_of_its_readers() -> None:
    """A14: each fetch is answered from the offset that it names, and leaves no memory in use."""
    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers, batch_size=300) as producer:
            for number in range(100):
                await producer.send("t", b"%d" % number, partition=0)
        async with WireClient(broker.address) as one, WireClient(broker.address) as two:

            async def fetch(number: int) -> None:
                wire, offset = (one, two)[number % 2], number * 37 % 100
                asked = data.FetchPartition("t", 0, -1, offset, 1)
                await wire.call(data.FetchRequest(0, 1, 1, 0, [asked]))
                assert int.from_bytes(wire.last_payload[:8], "big") == offset, "the base offset of the batch"

            for number in range(20):
                await fetch(number)
            tracemalloc.start()
            try:
                for number in range(300):
                    await fetch(number)
                gc.collect()
                kept_bytes, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert kept_bytes / 300 < 500


async def test_retention_of_minus_one_keeps_a_record_for_a_year() -> None:
    """A15"""
    clock = VirtualClock()
    async with Broker(clock=clock) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("kept", partitions=1, configs={"retention.ms": "-1"})
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send("kept", b"old", timestamp_ms=clock.wall_ms())
            await clock.advance(366 * DAY_MS)
            await producer.send("kept", b"new", timestamp_ms=clock.wall_ms())
        assert [r.value for r in await _read(broker.bootstrap_servers, 2, "kept")] == [b"old", b"new"]


async def test_a_stream_is_one_topic_whatever_its_partitions() -> None:
    """A16, B1"""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        for name, partitions in (("one", 1), ("four", 4)):
            await admin.create_topic(name, partitions=partitions)
        async with Producer(broker.bootstrap_servers, batch_size=100) as producer:
            for i in range(200):
                producer.send_nowait("one", b"%d" % i)
                producer.send_nowait("four", b"%d" % i)
            await producer.flush()
        expected = [b"%d" % i for i in range(200)]
        assert [r.value for r in await _read(broker.bootstrap_servers, 200, "one")] == expected
        four = await _read(broker.bootstrap_servers, 200, "four")
        assert sorted(r.value for r in four) == sorted(expected)
        assert {r.partition for r in four} == {0, 1, 2, 3}


async def test_a_topic_reads_as_a_table() -> None:
    """A17: a message is a row, as it was sent and as the latest of its key, also in Arrow."""
    pytest.importorskip("pyarrow")
    async with Broker() as broker, Producer(broker.bootstrap_servers) as producer:
        servers = broker.bootstrap_servers
        await producer.send_many("t", [b"a", b"b", b"c"], keys=[b"1", None, b"1"], partition=0)
        async with Consumer("t", bootstrap_servers=servers, auto_offset_reset="earliest") as consumer:
            rows = (await consumer.to_arrow(timeout_ms=5000)).to_pydict()
        assert [rows[name] for name in ("topic", "partition", "offset")] == [["t"] * 3, [0] * 3, [0, 1, 2]]
        assert (rows["key"], rows["value"]) == ([b"1", None, b"1"], [b"a", b"b", b"c"])
        async with Table("t", bootstrap_servers=servers) as table:
            assert table == {b"1": b"c"}
            assert table.record(b"1").offset == 2
            await producer.send_many("t", [b"d", None], keys=[b"2", b"1"], partition=0)
            changes = [(change.key, change.old, change.new) for change in await table.refresh()]
            assert changes == [(b"2", None, b"d"), (b"1", b"c", None)]
            assert table.to_arrow().to_pydict() == {"key": [b"2"], "value": [b"d"]}
            following = asyncio.create_task(table.next_change())
            await producer.send("t", b"e", key=b"2", partition=0)
            change = await following
            assert change is not None
            assert (change.old, change.new, table[b"2"]) == (b"d", b"e", b"e")
