"""Compaction in a broker: beside produce and fetch, on every replica, and over restarts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Producer
from kafkalite.broker.broker import Broker
from kafkalite.broker.partitions.cleaner import Cleaner
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.errors import ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages import admin, data
from kafkalite.records.batch import iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.storage.checkpoints import decode_compaction
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually, settle

Make = Callable[..., Any]

COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.1"}


def cleaner_of(broker: Broker) -> Cleaner:
    cleaner = broker.housekeeping.cleaner
    assert cleaner is not None
    return cleaner


def hosted_of(broker: Broker, topic: str = "t") -> HostedPartition:
    return broker.partitions.by_id(broker.image.topics[topic].topic_id, 0)


def content(hosted: HostedPartition) -> list[tuple[int, bytes | None, bytes | None]]:
    """(offset, key, value) of every record there."""
    log = hosted.partition.log
    found: list[tuple[int, bytes | None, bytes | None]] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        piece = log.read(offset, max_bytes=1 << 20, up_to=log.log_end_offset)
        for buffer in piece.buffers:
            for batch in iter_batches(buffer):
                if not batch.header.is_control:
                    columns = batch.columns()
                    keys = columns.keys or [None] * len(batch)
                    found += zip(columns.offsets, keys, columns.values, strict=True)
        offset = piece.next_offset
    return found


def state(hosted: HostedPartition) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for _, key, value in content(hosted):
        assert key is not None
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


async def send(wire: WireClient, number: int, *, acks: int = -1) -> None:
    batch = build_batch([b"v%d" % number + bytes(100)] * 3, [b"k%d" % (number % 5), b"a", b"b"])
    asked = data.ProducePartition("t", 0, len(batch))
    answer = await wire.call(data.ProduceRequest(acks, 5_000, None, [asked]), batch)
    assert answer.partitions[0].error_code == 0


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_compacted_topic_keeps_the_latest_of_each_key(
    is_on_disk: bool, tmp_path: Path, new_topic: Make, fetch: Make
) -> None:
    directory = str(tmp_path / "data") if is_on_disk else None
    async with (
        Broker(listeners="inproc://", log_dirs=directory) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", **COMPACTED))
        for number in range(100):
            await send(wire, number)
        hosted = hosted_of(broker)
        before = state(hosted)
        size_bytes = hosted.partition.log.size_bytes
        if not is_on_disk:
            await cleaner_of(broker).clean()
            assert hosted.partition.log.size_bytes == size_bytes, "what is not synced yet is left alone"
            await settle()  # the cleaner has requested a sync
        await cleaner_of(broker).clean()
        assert state(hosted) == before
        assert hosted.partition.log.size_bytes < size_bytes / 4
        assert cleaner_of(broker).pass_count >= 1
        assert cleaner_of(broker).bytes_freed > size_bytes / 2
        (answer,) = (await wire.call(fetch(0))).partitions  # also from the middle of a gap
        assert answer.error_code == 0
        assert answer.length_bytes > 0
        await send(wire, 100)
        found = content(hosted)
    if directory is not None:
        async with Broker(listeners="inproc://", log_dirs=directory) as broker:
            assert content(hosted_of(broker)) == found
            points = Path(hosted_of(broker).partition.log.directory, "compaction").read_bytes()
            assert decode_compaction(points, "compaction").compacted_to > 0


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("producer_count", [1, 20])
async def test_compaction_does_not_stop_at_the_last_batches_of_producers(
    is_on_disk: bool, producer_count: int, tmp_path: Path, new_topic: Make
) -> None:
    """The closed segments of a log are reduced to the latest record of each key, without a checkpoint."""
    directory = str(tmp_path / "data") if is_on_disk else None
    settings = {"cleanup.policy": "compact", "segment.bytes": "20000", "min.cleanable.dirty.ratio": "0.01"}
    async with (
        Broker(listeners="inproc://", log_dirs=directory, **{"log.cleaner.backoff.ms": 50}) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", **settings))
        keys = [b"k%d" % (number % 50) for number in range(200)]
        for _ in range(producer_count):
            async with Producer(broker.bootstrap_servers) as producer:
                for _ in range(20 // producer_count):
                    await producer.send_many("t", [bytes(100)] * 200, keys=keys)
        hosted = hosted_of(broker)
        await eventually(
            lambda: len(content(hosted)) == 250, "50 keys, and 200 records in the active segment"
        )
        assert {key for _, key, _ in content(hosted)} == set(keys)


async def test_requests_are_answered_while_a_log_is_compacted(tmp_path: Path, new_topic: Make) -> None:
    settings = COMPACTED | {"segment.bytes": str(1 << 20)}
    async with (
        Broker(listeners="inproc://", log_dirs=str(tmp_path / "data")) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", **settings))
        hosted = hosted_of(broker)
        for number in range(150):
            keys = [b"k%d" % (one % 400) for one in range(1000)]
            batch = build_batch([b"v%d" % number] * 1000, keys)
            asked = data.ProducePartition("t", 0, len(batch))
            await wire.call(data.ProduceRequest(-1, 5_000, None, [asked]), batch)
        end = hosted.partition.log.log_end_offset
        work = asyncio.create_task(cleaner_of(broker).clean())
        waits: list[float] = []
        while not work.done():
            began = time.perf_counter()
            await asyncio.sleep(0)
            waits.append(time.perf_counter() - began)
            await send(wire, len(waits))
        await work
        assert len(waits) > 20
        assert sorted(waits)[len(waits) // 2] < 0.01
        assert hosted.partition.log.log_end_offset > end
        assert cleaner_of(broker).pass_count >= 1


async def test_a_stop_during_compaction_leaves_a_complete_log(tmp_path: Path, new_topic: Make) -> None:
    for steps in (1, 8, 30):
        directory = str(tmp_path / f"data{steps}")
        async with Broker(listeners="inproc://", log_dirs=directory) as broker:
            async with WireClient(broker.address) as wire:
                await wire.call(new_topic("t", **COMPACTED))
                for number in range(60):
                    await send(wire, number)
            before = state(hosted_of(broker))
            work = asyncio.create_task(cleaner_of(broker).clean())
            for _ in range(steps):
                await asyncio.sleep(0.001)  # a thread compacts meanwhile
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        async with Broker(listeners="inproc://", log_dirs=directory) as broker:
            assert state(hosted_of(broker)) == before
            await cleaner_of(broker).clean()
            assert state(hosted_of(broker)) == before
        left = [one.name for one in (tmp_path / f"data{steps}").rglob("*") if one.suffix in {".tmp", ".swap"}]
        assert left == []


async def test_a_topic_deleted_while_it_is_compacted(new_topic: Make, tmp_path: Path) -> None:
    async with Broker(listeners="inproc://", log_dirs=str(tmp_path / "data")) as broker:
        async with WireClient(broker.address) as wire:
            await wire.call(new_topic("t", **COMPACTED))
            for number in range(60):
                await send(wire, number)
            work = asyncio.create_task(cleaner_of(broker).clean())
            await asyncio.sleep(0.003)  # in the middle of the pass
            deleted = await wire.call(admin.DeleteTopicsRequest(5_000, ["t"]))
            assert deleted.topics[0].error_code == ErrorCode.NONE
        await work


async def test_a_compacted_topic_has_no_retention_by_age_or_size(new_topic: Make) -> None:
    settings = COMPACTED | {"retention.ms": "1", "retention.bytes": "1"}
    async with Broker(listeners="inproc://") as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **settings))
        for number in range(30):
            await send(wire, number)
        await broker.housekeeping.retain()
        hosted = hosted_of(broker)
        assert hosted.log_start_offset == 0
    both = settings | {"cleanup.policy": "compact,delete"}
    async with Broker(listeners="inproc://") as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **both))
        for number in range(30):
            await send(wire, number)
        await settle()
        await broker.housekeeping.retain()
        await eventually(lambda: hosted_of(broker).log_start_offset > 0)


async def test_a_replica_that_was_away_catches_up_from_compacted_ones() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=COMPACTED)
        leader_id = cluster.leader("t")
        for number in range(40):
            async with WireClient(cluster.brokers[leader_id].address) as wire:
                await send(wire, number)
        away = next(one for one in cluster.brokers if one != leader_id)
        await cluster.kill(away)
        async with WireClient(cluster.brokers[leader_id].address) as wire:
            for number in range(40, 100):
                await send(wire, number)
        leader = hosted_of(cluster.brokers[leader_id])
        before = state(leader)
        for node_id, broker in cluster.brokers.items():
            if node_id != away:
                await cleaner_of(broker).clean()
        assert state(leader) == before
        await cluster.restart(away)
        back = hosted_of(cluster.brokers[away])
        await eventually(lambda: back.partition.log.log_end_offset == leader.partition.log.log_end_offset)
        assert state(back) == before
        assert back.partition.log.leader_epochs == leader.partition.log.leader_epochs
        async with WireClient(cluster.brokers[leader_id].address) as wire:
            await send(wire, 100)
        await eventually(lambda: back.partition.log.log_end_offset == leader.partition.log.log_end_offset)
        await cleaner_of(cluster.brokers[away]).clean()
        assert state(back) == state(leader)


async def test_r41_a_tombstone_is_removed_only_while_every_replica_is_known_to_have_it(
    new_topic: Make,
) -> None:
    """``proof.sim.directed.forgets_unheard`` shows what happens otherwise."""
    async with Broker(listeners="inproc://") as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **COMPACTED, **{"delete.retention.ms": "0"}))
        batch = build_batch([None], [b"deleted"])
        await wire.call(
            data.ProduceRequest(-1, 5_000, None, [data.ProducePartition("t", 0, len(batch))]), batch
        )
        hosted = hosted_of(broker)

        async def has_tombstone(*, is_isolated: bool) -> bool:
            """After more than enough passes, during which the image may be outdated if ``is_isolated``."""
            for _ in range(4):
                for number in range(15):
                    await send(wire, number)
                broker.housekeeping.checkpoint()  # syncs records that no request waits for
                await eventually(
                    lambda: hosted.partition.log.synced_end_offset == hosted.partition.log.log_end_offset
                )
                before = cleaner_of(broker).pass_count
                broker._services.node.session_end_ms = 0 if is_isolated else math.inf
                await cleaner_of(broker).clean()
                broker._services.node.session_end_ms = math.inf
                assert cleaner_of(broker).pass_count > before
            return any(key == b"deleted" for _, key, _ in content(hosted))

        assert await has_tombstone(is_isolated=True)
        assert not await has_tombstone(is_isolated=False)


async def test_r41_a_pass_that_removes_tombstones_ends_when_a_replica_falls_out_of_sync(
    new_topic: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have copied an old record already, and would not receive the tombstone."""
    async with Broker(listeners="inproc://") as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **COMPACTED))
        for number in range(60):
            await send(wire, number)
        hosted, cleaner = hosted_of(broker), cleaner_of(broker)
        broker.housekeeping.checkpoint()
        await eventually(lambda: not hosted.partition.log.has_unsynced)
        size_bytes, answers = hosted.partition.log.size_bytes, [True, False]
        monkeypatch.setattr(Cleaner, "may_forget", lambda *_: answers.pop(0) if answers else False)
        await cleaner.clean()
        assert (answers, hosted.partition.log.size_bytes) == ([], size_bytes)
        await cleaner.clean()  # which keeps tombstones
        assert hosted.partition.log.size_bytes < size_bytes


async def test_a_consumer_skips_offsets_that_were_compacted_away() -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("t", configs=COMPACTED)
        broker = cluster.broker
        async with WireClient(broker.address) as wire:
            for number in range(60):
                await send(wire, number)
        broker.housekeeping.checkpoint()
        await settle()
        await cleaner_of(broker).clean()
        expected = content(hosted_of(broker))
        assert len(expected) < 60
        async with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
            seen = []
            while len(seen) < len(expected):
                seen += await consumer.get_many(max_records=500, timeout_ms=5_000)
            assert [(one.offset, one.key, one.value) for one in seen] == expected
            assert consumer.position(TopicPartition("t", 0)) == 180


async def test_a_damaged_log_is_not_compacted_and_logged_once(
    tmp_path: Path, new_topic: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker(listeners="inproc://", log_dirs=str(tmp_path / "data")) as broker:
        async with WireClient(broker.address) as wire:
            await wire.call(new_topic("t", **COMPACTED))
            for number in range(60):
                await send(wire, number)
        hosted = hosted_of(broker)
        first = Path(hosted.partition.log.directory) / f"{0:020d}.log"
        with first.open("r+b") as file:
            file.seek(100)
            byte = file.read(1)
            file.seek(100)
            file.write(bytes([byte[0] ^ 1]))
        names = sorted(first.parent.iterdir())
        for _ in range(2):
            await cleaner_of(broker).clean()
        told = [one for one in caplog.records if "can't be compacted" in one.getMessage()]
        assert len(told) == 1
        assert sorted(first.parent.iterdir()) == names
        assert hosted.partition.log.offline_reason is None
