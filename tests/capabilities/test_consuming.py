"""Capabilities C: the consumer without a group, each shown end to end against an embedded broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kafkalite import Admin, Broker, Consumer, Producer, TopicPartition
from kafkalite.errors import NoOffsetError
from proof.waiting import settle

T0 = TopicPartition("t", 0)


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    """A broker whose topic t has a hundred records in one partition, a second apart in time."""
    async with Broker() as running, Producer(running.bootstrap_servers) as producer:
        for first in range(0, 100, 10):
            await producer.send_many(
                "t",
                [b"%d" % i for i in range(first, first + 10)],
                partition=0,
                timestamps_ms=[1_000_000 + i * 1000 for i in range(first, first + 10)],
            )
        yield running


async def _values(consumer: Consumer, count: int) -> list[int]:
    records: list = []
    while len(records) < count:
        got = await consumer.get_many(count - len(records), timeout_ms=5000)
        assert got
        records += got
    return [int(record.value) for record in records]


async def test_nothing_is_pushed_to_a_consumer_that_does_not_ask(broker: Broker) -> None:
    """C1: fetch names the offset and gets what stands there. Without a fetch, nothing is sent."""
    async with Consumer(bootstrap_servers=broker.bootstrap_servers) as consumer:
        consumer.assign([T0])
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send("t", b"100", partition=0)
        await consumer.seek(T0, 42)
        await settle()
        assert broker.statistics().requests.get("FETCH", 0) == 0
        assert broker.statistics().fetched_bytes == 0
        assert await _values(consumer, 3) == [42, 43, 44]
        assert consumer.position(T0) == 45


async def test_subscribe_by_list_and_by_pattern(broker: Broker) -> None:
    """C2"""
    servers = broker.bootstrap_servers
    async with Producer(servers) as producer:
        for topic in ("logs-a", "logs-b", "other"):
            await producer.send(topic, topic.encode())
    async with Consumer(
        "logs-a", "other", bootstrap_servers=servers, auto_offset_reset="earliest"
    ) as consumer:
        async with asyncio.timeout(30):
            topics = {record.topic for record in [await consumer.getone(), await consumer.getone()]}
        assert topics == {"logs-a", "other"}
    async with Consumer(
        pattern="logs-.*", bootstrap_servers=servers, auto_offset_reset="earliest"
    ) as consumer:
        async with asyncio.timeout(30):
            topics = {record.topic for record in [await consumer.getone(), await consumer.getone()]}
        assert topics == {"logs-a", "logs-b"}


async def test_any_range_is_replayed_any_number_of_times(broker: Broker) -> None:
    """C3, C4"""
    async with Consumer(bootstrap_servers=broker.bootstrap_servers) as consumer:
        consumer.assign([T0])
        for _ in range(3):
            await consumer.seek(T0, 17)
            assert await _values(consumer, 20) == list(range(17, 37))
        await consumer.seek_to_beginning(T0)
        assert await _values(consumer, 1) == [0]
        await consumer.seek_to_timestamp(T0, 1_000_000 + 55_500)
        assert await _values(consumer, 2) == [56, 57]
        await consumer.seek_to_end(T0)
        assert await consumer.get_many(10, timeout_ms=50) == []
        assert (await consumer.beginning_offsets([T0]))[T0] == 0
        assert (await consumer.end_offsets([T0]))[T0] == 100


async def test_a_consumer_reports_its_position_and_lag(broker: Broker) -> None:
    """C10"""
    async with Consumer(bootstrap_servers=broker.bootstrap_servers) as consumer:
        consumer.assign([T0])
        await consumer.seek(T0, 90)
        await _values(consumer, 5)
        assert consumer.position(T0) == 95
        assert (await consumer.lag())[T0] == 5


async def test_timestamps_are_found_to_the_record(broker: Broker) -> None:
    async with Consumer(bootstrap_servers=broker.bootstrap_servers) as consumer:
        for wanted, offset in ((0, 0), (1_000_000, 0), (1_000_001, 1), (1_034_000, 34), (1_099_000, 99)):
            found = (await consumer.offsets_for_times({T0: wanted}))[T0]
            assert found is not None
            assert (found.offset, found.timestamp_ms) == (offset, 1_000_000 + offset * 1000)
        assert (await consumer.offsets_for_times({T0: 1_099_001}))[T0] is None


async def test_reading_is_possible_only_inside_the_log(broker: Broker) -> None:
    """C11: below the log start, auto.offset.reset decides."""
    async with Admin(broker.bootstrap_servers) as admin:
        await admin.delete_records({T0: 60})
    async with Consumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="latest") as consumer:
        consumer.assign([T0])
        await consumer.seek(T0, 5)
        assert await consumer.get_many(10, timeout_ms=200) == []
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send("t", b"100", partition=0)
        assert await _values(consumer, 1) == [100]
    for reset, expected in (("earliest", [60, 61]), ("none", None)):
        async with Consumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset=reset) as consumer:
            consumer.assign([T0])
            await consumer.seek(T0, 5)
            if expected is None:
                with pytest.raises(NoOffsetError):
                    await consumer.get_many(1, timeout_ms=5000)
            else:
                assert await _values(consumer, 2) == expected


async def test_a_parked_fetch_is_answered_by_the_next_append(broker: Broker) -> None:
    """C15: long poll, far below fetch.max.wait.ms."""
    servers = broker.bootstrap_servers
    async with Consumer(bootstrap_servers=servers, fetch_max_wait_ms=30_000) as consumer:
        consumer.assign([T0])
        await consumer.seek_to_end(T0)
        waiting = asyncio.ensure_future(consumer.get_many(1, timeout_ms=30_000))
        await settle()
        assert not waiting.done()
        async with Producer(servers) as producer:
            await producer.send("t", b"100", partition=0)
        async with asyncio.timeout(30):
            (record,) = await waiting
        assert record.value == b"100"


async def test_pause_and_resume(broker: Broker) -> None:
    servers = broker.bootstrap_servers
    async with Consumer(bootstrap_servers=servers) as consumer:
        consumer.assign([T0])
        await consumer.seek(T0, 0)
        assert await _values(consumer, 1) == [0]
        consumer.pause(T0)
        assert await consumer.get_many(10, timeout_ms=50) == []
        consumer.resume(T0)
        assert await _values(consumer, 1) == [1]
