"""Logs move between the data directories of a node while they are used, and no step loses a record (R85)."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast

import pytest

from kafkalite import Admin
from kafkalite.broker.partitions.hosted_partition import HostedPartition, _Relocating
from kafkalite.errors import KafkaStorageError, LogDirNotFoundError, NotLeaderOrFollowerError
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.storage.log_copy import LogCopy
from kafkalite.storage.log_dirs import LogDirs
from kafkalite.storage.log_store import LogStore
from kafkalite.testing import Cluster

T = TopicPartition("t", 0)


def path_of(cluster: Cluster, node_id: int = 1) -> str | None:
    found = [s.path for s in cluster.brokers[node_id].partitions.directories() if T in s.logs]
    assert len(found) < 2
    return found[0] if found else None


def other(cluster: Cluster, node_id: int = 1) -> str:
    (found,) = [path for path in cluster.directories(node_id) if path != path_of(cluster, node_id)]
    return found


async def move(cluster: Cluster, path: str, node_id: int = 1) -> None:
    async with Admin(cluster.bootstrap_servers) as admin:
        await admin.alter_replica_log_dirs(node_id, {T: path})


async def values(cluster: Cluster) -> list[bytes]:
    return [record.value or b"" for record in await cluster.records("t")]


def names(cluster: Cluster, path: str) -> list[str]:
    filesystem = cluster.nodes[1].filesystem
    assert filesystem is not None
    return [name for name in filesystem.list_dir(path) if name.endswith("-0") or "damaged" in name]


class TestMoves:
    async def test_the_records_and_later_ones_are_in_the_other_directory(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t", configs={"segment.bytes": "1024"})
            await cluster.produce("t", [b"%d" % n * 100 for n in range(40)])
            before = await values(cluster)
            target, source = other(cluster), path_of(cluster)
            await move(cluster, target)
            await cluster.wait_until(lambda: path_of(cluster) == target)
            await cluster.produce("t", [b"after"])
            assert await values(cluster) == [*before, b"after"]
            assert names(cluster, str(source)) == []
            await cluster.restart()
            assert path_of(cluster) == target
            assert await values(cluster) == [*before, b"after"]
            await cluster.kill()
            await cluster.start()
            assert (await values(cluster), path_of(cluster)) == ([*before, b"after"], target)

    async def test_an_empty_log_moves(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            target = other(cluster)
            await move(cluster, target)
            await cluster.wait_until(lambda: path_of(cluster) == target)
            await cluster.produce("t", [b"1"])
            await cluster.crash()
            await cluster.start()
            assert (await values(cluster), path_of(cluster)) == ([b"1"], target)

    async def test_a_log_with_deleted_records_moves(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t", configs={"segment.bytes": "1024"})
            await cluster.produce("t", [b"%d" % n * 100 for n in range(40)])
            async with Admin(cluster.bootstrap_servers) as admin:
                await admin.delete_records({T: 15})
            before = await values(cluster)
            assert len(before) == 25
            target = other(cluster)
            await move(cluster, target)
            await cluster.wait_until(lambda: path_of(cluster) == target)
            assert await values(cluster) == before

    @pytest.mark.parametrize("role", ["leader", "follower"])
    async def test_a_replica_moves_under_load(self, role: str) -> None:
        async with Cluster(brokers=3, disks=2) as cluster:
            await cluster.create_topic("t", replication_factor=3)
            leader = cluster.leader("t")
            node_id = leader if role == "leader" else leader % 3 + 1
            target = other(cluster, node_id)
            sent: list[bytes] = []

            async def produce() -> None:
                async with cluster.producer() as producer:
                    while path_of(cluster, node_id) != target or len(sent) < 20:
                        value = b"%d" % len(sent)
                        await producer.send("t", value)
                        sent.append(value)

            producing = asyncio.create_task(produce())
            await cluster.wait_until(lambda: len(sent) > 5)
            await move(cluster, target, node_id)
            await producing
            assert await values(cluster) == sent
            assert cluster.leader("t") == leader  # no election
            hosted = cluster.brokers[node_id].partitions.find(T)
            assert hosted is not None
            await cluster.wait_until(lambda: hosted.log_end_offset == len(sent))
            await cluster.kill(*(n for n in (1, 2, 3) if n not in (node_id, node_id % 3 + 1)))
            assert await values(cluster) == sent

    async def test_transactions_go_on(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            target = other(cluster)
            async with cluster.producer(transactional_id="x") as producer, producer.transaction():
                await producer.send("t", b"1")
                await move(cluster, target)
                await cluster.wait_until(lambda: path_of(cluster) == target)
                await producer.send("t", b"2")
            assert await values(cluster) == [b"1", b"2"]

    async def test_a_rate_bounds_the_copy_and_it_can_be_cancelled(self) -> None:
        async with Cluster(disks=2, replica_alter_log_dirs_io_max_bytes_per_second=1) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"1"])
            source, target = path_of(cluster), other(cluster)
            await move(cluster, target)
            async with Admin(cluster.bootstrap_servers) as admin:
                (_, second) = sorted(
                    (await admin.describe_directories())[1], key=lambda one: one.path == target
                )
                assert list(second.copies) == [T]
                await admin.alter_replica_log_dirs(1, {T: str(source)})
                assert all(not one.copies for one in (await admin.describe_directories())[1])
            assert path_of(cluster) == source

    async def test_impossible_moves_are_refused(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            target = other(cluster)
            async with Admin(cluster.bootstrap_servers) as admin:
                with pytest.raises(LogDirNotFoundError, match="/nowhere is no working data directory"):
                    await admin.alter_replica_log_dirs(1, {T: "/nowhere"})
                with pytest.raises(NotLeaderOrFollowerError):
                    await admin.alter_replica_log_dirs(1, {TopicPartition("t", 9): target})
                hosted = cluster.broker.partitions.find(T)
                assert hosted is not None
                hosted.mark_damaged("for this test")
                with pytest.raises(KafkaStorageError, match="is offline"):
                    await admin.alter_replica_log_dirs(1, {T: target})


class Killed(Exception):
    pass


STEPS = [
    (LogCopy, "begin"),
    (LogCopy, "append"),
    (LogCopy, "sync"),
    (LogCopy, "make_durable"),
    (LogCopy, "complete"),
    (LogDirs, "complete_copy"),
    (LogDirs, "replace_by_copy"),
    (LogStore, "retire_moved"),
    (LogStore, "take_copy"),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
async def test_a_broker_that_ends_at_a_step_loses_nothing(
    owner: type, step: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, step)

    def end(*arguments: Any) -> Any:
        if when == "after":
            original(*arguments)
        raise Killed

    async with Cluster(disks=2) as cluster:
        await cluster.create_topic("t")
        await cluster.produce("t", [b"1", b"2", b"3"])
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, end)
            await move(cluster, other(cluster))
            await cluster.wait_until(lambda: not cluster.broker.is_running)
            with pytest.raises(Killed):
                await cluster.broker.wait_stopped()
        await cluster.start()
        assert await values(cluster) == [b"1", b"2", b"3"]
        assert path_of(cluster)  # in one directory
        await cluster.produce("t", [b"4"])
        target = other(cluster)
        await move(cluster, target)
        await cluster.wait_until(lambda: path_of(cluster) == target)
        await cluster.crash()
        await cluster.start()
        assert await values(cluster) == [b"1", b"2", b"3", b"4"]


class Recorder:
    """Records the names of the methods that are called. ``finish`` fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_arguments: Any) -> None:
            self.calls.append(name)
            if name == "finish":
                raise AssertionError("for this test")

        return call


class TestFailures:
    async def test_a_full_target_leaves_the_log_where_it_is(self, caplog: pytest.LogCaptureFixture) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"1" * 1000] * 20)
            source, target = path_of(cluster), other(cluster)
            filesystem: Any = cluster.filesystem
            filesystem.capacity_bytes = filesystem.used_bytes() + 500
            await move(cluster, target)
            await cluster.wait_until(lambda: "log not moved" in caplog.text)
            filesystem.heal()
            assert path_of(cluster) == source
            await cluster.produce("t", [b"2"])
            assert len(await values(cluster)) == 21

    async def test_a_target_that_fails_at_the_end_leaves_the_log_where_it_is(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"1"])
            source, target = path_of(cluster), other(cluster)

            def refuse(_copy: LogCopy) -> None:
                raise OSError(5, "the disk has failed")

            monkeypatch.setattr(LogCopy, "complete", refuse)
            await move(cluster, target)
            await cluster.wait_until(lambda: "log not moved" in caplog.text)
            assert path_of(cluster) == source
            await cluster.produce("t", [b"2"])
            assert await values(cluster) == [b"1", b"2"]

    @pytest.mark.parametrize("fails", ["source", "target"])
    async def test_a_disk_that_fails_before_the_exchange_changes_nothing(
        self, fails: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"1"])
            source, target = path_of(cluster), other(cluster)
            complete = LogDirs.complete_copy

            def refuse(_store: LogStore, _directory: str) -> None:
                raise OSError(5, "the disk has failed")

            def fail(dirs: LogDirs, copy: LogCopy) -> None:
                complete(dirs, copy)
                if fails == "target":
                    dirs.fail(target, "EIO")
                else:
                    monkeypatch.setattr(LogStore, "_retire", refuse)

            monkeypatch.setattr(LogDirs, "complete_copy", fail)
            await move(cluster, target)
            await cluster.wait_until(lambda: "log not moved" in caplog.text)
            monkeypatch.undo()
            assert path_of(cluster) == source
            await cluster.produce("t", [b"2"])
            assert await values(cluster) == [b"1", b"2"]

    async def test_a_copy_begins_after_the_jobs_that_change_the_log(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R41: a compaction that was queued before the move would change segments under the copy."""
        idle_log, begin_copy = HostedPartition.idle_log, LogDirs.begin_copy
        is_changing = True
        events: list[str] = []

        def idle(hosted: HostedPartition) -> Any:
            if hosted.is_moving:
                events.append("changing" if is_changing else "idle")
            return None if is_changing else idle_log(hosted)

        def begin(*arguments: Any) -> LogCopy:
            events.append("copy")
            return begin_copy(*arguments)

        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"1"])
            target = other(cluster)
            monkeypatch.setattr(HostedPartition, "idle_log", idle)
            monkeypatch.setattr(LogDirs, "begin_copy", begin)
            await move(cluster, target)
            await cluster.wait_until(lambda: events.count("changing") > 2)
            is_changing = False
            await cluster.wait_until(lambda: path_of(cluster) == target)
            assert events.index("copy") > events.index("idle")
            assert await values(cluster) == [b"1"]

    async def test_a_log_that_grows_with_each_step_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        append = LogCopy.append
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"0"])
            target = other(cluster)
            hosted = cluster.broker.partitions.find(T)
            assert hosted is not None
            log: Any = hosted.partition.log
            copied = 0

            def grow(copy: LogCopy, found: Any, now_ms: int) -> None:
                nonlocal copied
                append(copy, found, now_ms)
                copied += 1
                if not log._is_frozen and copied < 100:
                    log.append(bytearray(build_batch([b"x"])), now_ms=now_ms, leader_epoch=0)

            monkeypatch.setattr(LogCopy, "append", grow)
            await move(cluster, target)
            await cluster.wait_until(lambda: path_of(cluster) == target)
            assert copied < 100

    async def test_a_dropped_relocation_lets_the_follower_fetch(self) -> None:
        async with Cluster() as cluster:
            await cluster.create_topic("t")
            hosted: Any = cluster.broker.partitions.find(T)
            listener, work = Recorder(), Recorder()
            hosted.listener = listener
            hosted._disk.begin_sync()
            assert hosted.relocate(work)
            hosted.complete_work()
            hosted._disk.end_sync()
            hosted.listener = None
            assert (work.calls, listener.calls) == (["give_up"], ["on_progress"])

    async def test_a_relocation_with_a_bug_unfreezes_the_log(self) -> None:
        async with Cluster() as cluster:
            await cluster.create_topic("t")
            hosted: Any = cluster.broker.partitions.find(T)
            work = Recorder()
            future: Any = Future()
            future.set_result(None)
            with pytest.raises(AssertionError, match="for this test"):
                hosted._end_relocation(_Relocating(cast("Any", work), future), None)
            assert work.calls == ["finish", "give_up"]

    async def test_a_deleted_topic_ends_its_move(self) -> None:
        async with Cluster(disks=2, replica_alter_log_dirs_io_max_bytes_per_second=1_000_000) as cluster:
            await cluster.create_topic("t")
            await cluster.produce("t", [b"1" * 1000] * 100)
            await move(cluster, other(cluster))
            async with Admin(cluster.bootstrap_servers) as admin:
                await admin.delete_topics(["t"])
            await cluster.create_topic("t")
            await cluster.produce("t", [b"2"])
            assert await values(cluster) == [b"2"]
