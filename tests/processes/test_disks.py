"""One node's disk is full, or has a damaged file: the cluster goes on, and is in sync again afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kafkalite import Admin, Consumer, Producer, TopicPartition
from kafkalite.errors import KafkaliteError, TopicAlreadyExistsError
from kafkalite.testing import ProcessCluster
from proof.histories.history import check
from proof.processes.workload import Workload
from proof.waiting import eventually

pytestmark = pytest.mark.slow

TOPIC = "ledger"
PARTITIONS = 3
SMALL_DISK_BYTES = 48 * 2**20
HEALING_LIMIT_S = 40.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a small file system in memory."""
    with mounted_disk(tmp_path / "small") as place:
        yield place


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[dict[int, Path]]:
    """Yield a small file system in memory for each of three nodes."""
    with ExitStack() as stack:
        yield {number: stack.enter_context(mounted_disk(tmp_path / f"disk-{number}")) for number in (1, 2, 3)}


@contextmanager
def mounted_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    size = f"size={SMALL_DISK_BYTES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(
            f"a full disk is not tested: no tmpfs can be mounted here ({mounted.stderr.decode().strip()})"
        )
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def create_topic(cluster: ProcessCluster, **configs: str) -> None:
    settings = {"min.insync.replicas": "2"} | {
        name.replace("_", "."): value for name, value in configs.items()
    }
    async with Admin(cluster.bootstrap_servers) as admin:
        await admin.create_topic(TOPIC, PARTITIONS, 3, configs=settings)
    await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])


async def assert_nothing_is_lost(load: Workload) -> None:
    await load.stop()
    await load.read_finally()
    anomalies = check(load.history)
    assert not anomalies, "\n".join(map(str, anomalies))
    assert load.history.acknowledged > 100


async def test_a_full_disk_stops_one_node_from_writing_until_there_is_room_again(
    tmp_path: Path, small_disk: Path
) -> None:
    """ENOSPC is refused before any damage (R26): the partitions that the node leads can be read, not
    written.
    """
    on_small = {3: {"log.dirs": str(small_disk / "node-3")}}
    async with ProcessCluster(
        tmp_path / "nodes", node_settings=on_small, settings={"replica.lag.time.max.ms": 2000}
    ) as cluster:
        await create_topic(cluster)
        async with Workload(
            lambda: cluster.bootstrap_servers, TOPIC, PARTITIONS, padding_bytes=8_000
        ) as load:
            await load.until_served(20)
            ballast = small_disk / "ballast"
            fill(ballast)
            await until_in_sync_only_where_it_leads(cluster, 3)
            ballast.unlink()
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
            await load.until_served(40)
            await assert_nothing_is_lost(load)
    assert "no space left" in cluster.nodes[3].log
    assert all(node.log.count("Traceback") == 0 for node in cluster.nodes.values())


async def test_when_all_disks_are_full_no_node_exits_and_all_goes_on_when_there_is_room(
    tmp_path: Path, small_disks: dict[int, Path]
) -> None:
    """The metadata cannot be written either, because something else fills the disks (R54)."""
    on_small = {number: {"log.dirs": str(disk / "data")} for number, disk in small_disks.items()}
    settings = {"metadata.log.max.record.bytes.between.snapshots": "1024"}
    async with ProcessCluster(tmp_path / "nodes", node_settings=on_small, settings=settings) as cluster:
        await create_topic(cluster)
        async with (
            Producer(cluster.bootstrap_servers, delivery_timeout_ms=4_000, max_block_ms=4_000) as producer,
            Admin(cluster.bootstrap_servers) as admin,
        ):
            first = await producer.send(TOPIC, b"before", partition=0)
            for disk in small_disks.values():
                fill(disk / "ballast")
            with pytest.raises(KafkaliteError, match=r"no space left for .*: node \d has \d+ bytes free"):
                while True:  # the space that was allocated before takes some records
                    await producer.send(TOPIC, os.urandom(100_000), partition=0)
            for number in range(12):
                with suppress(KafkaliteError):
                    await admin.create_topic(f"topic-{number}", 3, 3)
            shown = await kl("cluster", "status", "-b", cluster.bootstrap_servers)
            for node_id in cluster.nodes:
                assert re.search(rf"broker {node_id} refuses records in \d+ logs?: no space left", shown), (
                    shown
                )

            await cluster.kill(3)
            await cluster.start_node(3)  # its start needs room, too
            await eventually(lambda: "it is started again" in cluster.nodes[3].log)
            processes = {node_id: node.process for node_id, node in cluster.nodes.items()}
            for disk in small_disks.values():
                (disk / "ballast").unlink()
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
            for number in range(12):
                with suppress(TopicAlreadyExistsError):
                    await admin.create_topic(f"topic-{number}", 3, 3)
                await producer.send(f"topic-{number}", b"after")
            last = await producer.send(TOPIC, b"after", partition=0)
            assert first.offset == 0 < last.offset
        assert {node_id: node.process for node_id, node in cluster.nodes.items()} == processes
        assert all(node.is_running for node in cluster.nodes.values())
        assert all(node.log.count("Traceback") == 0 for node in cluster.nodes.values())


async def kl(*words: str) -> str:
    """Return what ``kl`` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kafkalite", *words, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode()


def fill(file: Path) -> None:
    """Leave no byte free."""
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(65536))
        except OSError:
            pass
        try:
            while True:
                stream.write(b"\0")
        except OSError:
            pass


async def until_in_sync_only_where_it_leads(cluster: ProcessCluster, node_id: int) -> None:
    async with asyncio.timeout(HEALING_LIMIT_S):
        while True:
            view = await cluster.view(1)
            if all(
                node_id not in each.state.isr or node_id == each.state.leader_id for each in view.partitions
            ):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("thrown_away", ["the partition", "the disk"])
async def test_damage_is_never_served_and_discarded_data_is_replicated_again(
    tmp_path: Path, thrown_away: str
) -> None:
    data = tmp_path / "nodes" / "node-2"
    async with ProcessCluster(tmp_path / "nodes") as cluster:
        await create_topic(cluster, segment_bytes=str(2**20))
        (own,) = [each.name for each in (await cluster.view()).partitions if each.state.leader_id == 2]
        async with Workload(
            lambda: cluster.bootstrap_servers, TOPIC, PARTITIONS, padding_bytes=8_000
        ) as load:
            await eventually(lambda: load.history.acknowledged >= 1_000)
            await cluster.kill(2)
            damaged = damage_a_closed_segment(data, own.partition)
            await cluster.start_node(2)
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)

            # Segments that were closed long ago are not read at a start. The first reader's request finds the
            # damage; a sound replica leads, and the damaged one is filled again (R43, R52).
            async with Admin(cluster.bootstrap_servers) as admin:
                assert (await admin.elect_leaders([own]))[own] == 2
            await read(cluster.bootstrap_servers, own)
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
            await eventually(lambda: list(data.glob(f"{damaged.parent.name}.damaged-*")))
            (kept,) = data.glob(f"{damaged.parent.name}.damaged-*")
            assert await verified(damaged.parent) == 0
            assert (kept / damaged.name).exists()

            # An empty directory is filled by the other nodes too, and the node votes as before.
            await cluster.terminate(2)
            shutil.rmtree(data if thrown_away == "the disk" else damaged.parent)
            await cluster.start_node(2)
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
            await load.until_served(20)
            await assert_nothing_is_lost(load)
            async with Admin(cluster.bootstrap_servers) as admin:
                assert (await admin.elect_leaders([own]))[own] == 2
            await read(cluster.bootstrap_servers, own)
        assert await verified(data / damaged.parent.name) == 0


async def test_a_node_without_its_metadata_refuses_to_start_without_rejoin(tmp_path: Path) -> None:
    """It may have voted already and has lost that vote, so it refuses to start without the setting."""
    async with ProcessCluster(tmp_path / "nodes") as cluster:
        await create_topic(cluster)
        await cluster.kill(2)
        shutil.rmtree(tmp_path / "nodes" / "node-2" / "__cluster_metadata")
        await cluster.start_node(2)
        process = cluster.nodes[2].process
        assert process is not None
        assert await asyncio.wait_for(process.wait(), 30) == 1
        assert "--rejoin" in cluster.nodes[2].tail(5)

        await cluster.start_node(2, "--rejoin")
        await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
        await cluster.restart(2)  # without the setting again
        await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)


async def read(servers: str, partition: TopicPartition) -> None:
    """Read a partition from its beginning to its end. Raises the consumer's errors."""
    async with Consumer(bootstrap_servers=servers) as consumer:
        consumer.assign([partition])
        await consumer.seek_to_beginning()
        end = (await consumer.end_offsets([partition]))[partition]
        async with asyncio.timeout(20):
            while (consumer.position(partition) or 0) < end:
                await consumer.get_many(10_000, timeout_ms=500)


async def verified(directory: Path) -> int:
    """Return the exit code of ``kl log verify``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kafkalite",
        "log",
        "verify",
        str(directory),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return await process.wait()


def damage_a_closed_segment(data: Path, partition: int) -> Path:
    """Flip bits in the middle of the oldest of several segments."""
    (directory,) = [each for each in data.iterdir() if each.name.endswith(f"-{partition}")]
    segments = sorted(directory.glob("*.log"))
    assert len(segments) >= 2, segments
    place = segments[0].stat().st_size // 2
    with segments[0].open("r+b") as stream:
        stream.seek(place)
        found = stream.read(64)
        stream.seek(place)
        stream.write(bytes(byte ^ 0xFF for byte in found))
        os.fsync(stream.fileno())
    return segments[0]


async def test_a_failed_and_replaced_disk_of_two_takes_only_its_partitions(tmp_path: Path) -> None:
    """R81, R82: other brokers lead the partitions on the lost disk, and fill the one that replaces it."""
    disks = {number: tmp_path / f"second-{number}" for number in (1, 2, 3)}
    on_two = {
        number: {"log.dirs": f"{tmp_path}/nodes/node-{number},{disk}"} for number, disk in disks.items()
    }
    async with ProcessCluster(tmp_path / "nodes", node_settings=on_two) as cluster:
        await create_topic(cluster)
        async with (
            Workload(lambda: cluster.bootstrap_servers, TOPIC, PARTITIONS) as load,
            Admin(cluster.bootstrap_servers) as admin,
        ):
            await load.until_served(20)
            lost = {one.name for one in disks[2].iterdir() if one.name.endswith(("-0", "-1", "-2"))}
            assert lost
            disks[2].rename(tmp_path / "away")
            await eventually(lambda: "data directory failed" in cluster.nodes[2].log)

            async def is_led_elsewhere() -> bool:
                failed = (await admin.describe_directories([TOPIC]))[2][1]
                (topic,) = await admin.describe_topics([TOPIC])
                leaders = {one.partition: one.leader_id for one in topic.partitions}
                return bool(failed.failure) and all(leaders[tp.partition] != 2 for tp in failed.size_bytes)

            while not await is_led_elsewhere():
                await asyncio.sleep(0.05)
            await load.until_served(20)
            assert cluster.nodes[2].process.returncode is None  # type: ignore[union-attr]
            await cluster.kill(2)
            await cluster.start_node(2)
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
            assert lost <= {one.name for one in disks[2].iterdir()}
            await load.until_served(20)
            await assert_nothing_is_lost(load)
