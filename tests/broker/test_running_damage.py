"""R43: bytes change under a running broker that has written them itself, and a reader notices it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafkalite.broker.broker import Broker
from kafkalite.errors import ErrorCode
from kafkalite.storage.log import Log
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.wire import WireClient

Make = Callable[..., Any]


async def test_r43_records_that_are_fetched_again_are_checked_first(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    """A payload has changed. The second fetch of the reader makes the broker check the batch."""
    disk = MemoryFileSystem()
    async with (
        Broker(log_dirs="/d", listeners="inproc://", filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t"))
        for number in range(5):
            batch = batch_of(b"%d" % number * 100)
            await wire.call(produce(batch), batch)
        hosted = next(one for one in broker.partitions if one.key.topic == "t")
        log = hosted.partition.log
        disk.open(log._segments.last.path()).write_at(log.size_bytes * 3 // 5 + 100, b"\xff\xfe")
        (read,) = (await wire.call(fetch(0))).partitions
        assert (read.error_code, hosted.is_damaged) == (0, False), "this process has written it"
        (read,) = (await wire.call(fetch(3))).partitions
        assert read.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "kl log accept-loss" in read.error_message
        assert log.damage is not None
        assert log.damage.sound_end_offset == 3
        (refused,) = (await wire.call(produce(batch), batch)).partitions
        assert refused.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        (read,) = (await wire.call(fetch(0))).partitions
        assert (read.error_code, read.length_bytes > 0) == (0, True)


async def test_r43_records_that_are_fetched_in_order_are_not_checked_again(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make, monkeypatch: Any
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(Log, "check_again", lambda _self, found: checked.append(found))
    async with (
        Broker(log_dirs="/d", listeners="inproc://", filesystem=MemoryFileSystem()) as broker,
        WireClient(broker.address) as wire,
        WireClient(broker.address) as other,
    ):
        await wire.call(new_topic("t"))
        for number in range(5):
            batch = batch_of(b"%d" % number * 100)
            await wire.call(produce(batch), batch)
            await wire.call(fetch(number))
        await other.call(fetch(0))
        assert checked == []
        await other.call(fetch(2))
        assert len(checked) == 1
