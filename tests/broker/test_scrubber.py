"""R53: the broker reads all logs in the background; in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.errors import ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.testing.wire import WireClient

Make = Callable[..., Any]

MINUTE_MS = 60_000
RATE = 65_536
#: Long enough that only the scrubber runs.
OTHERS = {"log_retention_check_interval_ms": 10**9, "log_cleaner_backoff_ms": 10**9}


async def fill(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make, count: int, value_bytes: int
) -> HostedPartition:
    """Write ``count`` batches into segments of 4096 bytes or one batch, and read none."""
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **{"segment.bytes": "4096"}))
        for _ in range(count):
            batch = batch_of(b"x" * value_bytes)
            await wire.call(produce(batch), batch)
    return next(hosted for hosted in broker.partitions if hosted.key.topic == "t")


async def test_every_log_is_read_once_in_each_interval_at_a_bounded_rate(
    new_topic: Make, batch_of: Make, produce: Make
) -> None:
    clock = VirtualClock()
    settings: dict[str, Any] = {
        "log_scrub_interval_ms": 10 * MINUTE_MS,
        "log_scrub_max_bytes_per_second": RATE,
        "log_initial_task_delay_ms": MINUTE_MS,
        **OTHERS,
    }
    async with Broker(
        log_dirs="/d", listeners="inproc://", clock=clock, filesystem=MemoryFileSystem(), **settings
    ) as broker:
        hosted = await fill(broker, new_topic, batch_of, produce, 20, 20_000)
        size_bytes = hosted.partition.log.size_bytes
        await clock.advance(MINUTE_MS - 100)
        assert broker.statistics().scrubbed_bytes == 0
        await clock.advance(1_000)
        assert 0 < broker.statistics().scrubbed_bytes < size_bytes, "it pauses"
        await clock.advance(size_bytes * 1000 // RATE + 1_000)
        assert broker.statistics().scrubs_completed == 1
        assert broker.statistics().scrubbed_bytes == size_bytes
        await clock.advance(8 * MINUTE_MS)
        assert broker.statistics().scrubs_completed == 1
        await clock.advance(2 * MINUTE_MS + size_bytes * 1000 // RATE)
        assert broker.statistics().scrubs_completed == 2


@pytest.mark.parametrize("interval_ms", [MINUTE_MS, 0])
async def test_damage_that_nobody_reads_is_found_unless_the_interval_is_0(
    interval_ms: int, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    """The only replica stays readable as far as it is sound, and refuses writes."""
    clock, disk = VirtualClock(), MemoryFileSystem()
    async with Broker(
        log_dirs="/d",
        listeners="inproc://",
        clock=clock,
        filesystem=disk,
        log_scrub_interval_ms=interval_ms,
        log_initial_task_delay_ms=1_000,
        **OTHERS,
    ) as broker:
        hosted = await fill(broker, new_topic, batch_of, produce, 30, 500)
        second = hosted.partition.log._segments.segments[1]
        disk.open(second.path()).write_at(300, b"\xff\xff")
        await clock.advance(5_000)
        assert hosted.is_damaged == bool(interval_ms)
        if not interval_ms:
            return
        assert hosted.partition.log.damage is not None
        assert hosted.partition.log.damage.sound_end_offset == second.base_offset
        async with WireClient(broker.address) as wire:
            batch = batch_of(b"y")
            (refused,) = (await wire.call(produce(batch), batch)).partitions
            assert refused.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            (read,) = (await wire.call(fetch(0))).partitions
            assert (read.error_code, read.length_bytes > 0) == (0, True)
        assert broker.partitions.find(TopicPartition("t", 0)) is hosted
        await clock.advance(MINUTE_MS)
        assert broker.statistics().scrubs_completed >= 2, "a damaged log is skipped"
