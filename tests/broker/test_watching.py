"""Fetches (``handlers/fetch.py``) of partitions that are only watched (``max_bytes`` 0): no data, and no
wait when there is some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.errors import ErrorCode
from kafkalite.protocol.messages import data
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

Make = Callable[..., Any]
LONG_MS = 60_000


def watch(*offsets: int, wait_ms: int = 0, min_bytes: int = 1, level: int = 0) -> data.FetchRequest:
    """Return a fetch that watches partitions 0, 1 ... from those offsets on."""
    asked = [data.FetchPartition("t", number, -1, offset, 0) for number, offset in enumerate(offsets)]
    return data.FetchRequest(wait_ms, min_bytes, 2**20, level, asked)


async def parked(broker: Broker) -> None:
    await eventually(lambda: broker.statistics().waiting_requests)


async def test_a_watched_partition_returns_its_offsets_and_no_data(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of(b"a", b"b", b"c")
    await wire.call(produce(batch), batch)
    for offset in (0, 1, 3):
        wire.send(watch(offset))
        answer = await wire.response()
        (told,) = answer.message.partitions
        assert (told.error_code, told.high_watermark, told.last_stable_offset) == (0, 3, 3)
        assert (told.log_start_offset, told.length_bytes, len(answer.payload)) == (0, 0, 0)
    await wire.call(data.DeleteRecordsRequest(1000, [data.DeleteRecordsPartition("t", 0, 2)]))
    (told,) = (await wire.call(watch(2))).partitions
    assert (told.log_start_offset, told.high_watermark) == (2, 3)


@pytest.mark.parametrize("offset", [-1, 0, 4])
async def test_the_errors_are_those_of_any_fetch(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, offset: int
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of(b"a", b"b", b"c")
    await wire.call(produce(batch), batch)
    await wire.call(data.DeleteRecordsRequest(1000, [data.DeleteRecordsPartition("t", 0, 1)]))
    outside, unknown = (await wire.call(watch(offset, 0, wait_ms=LONG_MS))).partitions
    assert outside.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert (outside.log_start_offset, outside.high_watermark) == (1, 3)
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("min_bytes", [1, 2**30])
async def test_new_data_ends_the_wait_whatever_min_bytes(
    broker: Broker, wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, min_bytes: int
) -> None:
    await wire.call(new_topic("t", 2))
    async with WireClient(broker.address) as reader:
        reader.send(watch(0, 0, wait_ms=LONG_MS, min_bytes=min_bytes))
        await parked(broker)
        batch = batch_of(b"a")
        await wire.call(produce(batch), batch)
        first, second = (await reader.response()).message.partitions
        assert (first.high_watermark, second.high_watermark) == (1, 0)
        assert (first.length_bytes, second.length_bytes) == (0, 0)
        # Data that was there before counts too.
        (told, _) = (await reader.call(watch(0, 0, wait_ms=LONG_MS, min_bytes=min_bytes))).partitions
        assert told.high_watermark == 1
    assert broker.statistics().waiting_requests == 0


async def test_without_new_data_the_response_is_sent_in_time(wire: WireClient, new_topic: Make) -> None:
    await wire.call(new_topic("t"))
    (told,) = (await wire.call(watch(0, wait_ms=10))).partitions
    assert (told.error_code, told.high_watermark, told.length_bytes) == (0, 0, 0)


async def test_watched_partitions_can_be_mixed_with_others(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t", 2))
    batch = batch_of(b"a")
    await wire.call(produce(batch), batch)
    asked = [data.FetchPartition("t", 1, -1, 0, 0), data.FetchPartition("t", 0, -1, 0, 2**20)]
    watched, read = (await wire.call(data.FetchRequest(LONG_MS, 1, 2**20, 0, asked))).partitions
    assert (watched.length_bytes, read.length_bytes) == (0, len(batch))


async def test_a_watcher_of_committed_records_is_woken_by_the_marker(
    broker: Broker, wire: WireClient, new_topic: Make
) -> None:
    await wire.call(new_topic("t", durability="page-cache"))
    hosted = broker.partitions.leader("t", 0)
    now_ms = 1_700_000_000_000
    batch = build_batch([b"v"], producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)
    async with WireClient(broker.address) as reader:
        reader.send(watch(0, wait_ms=LONG_MS, level=1))
        await parked(broker)
        hosted.append(batch, check(batch), now_ms, -1, is_verified=True)
        for _ in range(20):
            await asyncio.sleep(0)
        assert broker.statistics().waiting_requests == 1
        (plain,) = (await wire.call(watch(0, wait_ms=LONG_MS))).partitions
        assert (plain.high_watermark, plain.last_stable_offset) == (1, 0)
        hosted.append_marker(1, 1, 0, True, now_ms)
        (told,) = (await reader.response()).message.partitions
        assert (told.high_watermark, told.last_stable_offset) == (2, 2)
        assert (told.length_bytes, told.aborted) == (0, [])


async def test_a_watcher_that_is_gone_is_released(broker: Broker, new_topic: Make) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        wire.send(watch(0, wait_ms=LONG_MS))
        await parked(broker)
    await eventually(lambda: not broker.statistics().connection_count)
    assert broker.statistics().waiting_requests == 0
