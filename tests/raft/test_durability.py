"""The controller on a complete file system: acknowledged changes survive, in memory and on the real disk."""

from __future__ import annotations

import asyncio
import random

import pytest

from kafkalite.clock import SystemClock
from kafkalite.errors import LogOfflineError
from kafkalite.metadata.features import SUPPORTED
from kafkalite.protocol.messages.admin import CreateTopicsRequest, DeleteTopicsRequest, NewTopic
from kafkalite.protocol.messages.cluster import RegisterBrokerRequestV1
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.rng import seeded_rng
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.memory_filesystem import MemoryFileSystem

REGISTER = RegisterBrokerRequestV1(1, "a" * 32, "d" * 32, ["a:1"], None, -1, True, [], 0, list(SUPPORTED))


def create(name):
    return CreateTopicsRequest(0, False, [NewTopic(name, 2, 1, {"retention.ms": "1000"})])


async def started(filesystem, directory, kit):
    quorum = SingleQuorum(filesystem, directory, executor=kit.InlineExecutor(), snapshot_min_bytes=1_500)
    node = ControllerNode(quorum, 1, SystemClock(), seeded_rng(1))
    await node.start()
    await node.submit(REGISTER)
    return node


@pytest.mark.parametrize("seed", range(40))
async def test_after_a_failed_sync_and_a_power_loss_every_answered_topic_is_there(kit, seed):
    rng = random.Random(seed)
    disk = MemoryFileSystem(crashable=True)
    disk.make_dirs("/data")
    disk.sync_dir("/")
    expected, uncertain = set(), None
    for life in range(4):
        node = await started(disk, "/data/meta", kit)
        names = node.image.topics.keys()
        assert names == expected or names == expected | {uncertain}
        expected, uncertain = set(names), f"uncertain-{life}"
        for number in range(rng.randrange(12)):
            name = f"t-{life}-{number}"
            await node.submit(create(name))
            expected.add(name)
            if rng.randrange(4) == 0:
                victim = rng.choice(sorted(expected))
                await node.submit(DeleteTopicsRequest(0, [victim]))
                expected.remove(victim)
        disk.fail_next_sync(3)
        with pytest.raises(LogOfflineError):
            await node.submit(create(uncertain))
        await node.stop()
        disk.fail_next_sync(0)
        disk.crash(rng)


async def test_a_full_disk_takes_nothing_and_loses_nothing(kit):
    disk = MemoryFileSystem(capacity_bytes=2_000)
    node = await started(disk, "/meta", kit)
    created = 0
    for number in range(40):
        try:
            await node.submit(create(f"t{number}"))
        except Exception as error:
            assert "no space left" in str(error)
            break
        created += 1
    assert 0 < created < 40
    disk.capacity_bytes = None
    await node.submit(create("more"))
    await node.stop()
    again = await started(disk, "/meta", kit)
    assert again.image.topics.keys() == {*(f"t{number}" for number in range(created)), "more"}
    await again.stop()


async def test_a_restart_on_the_real_disk_with_real_threads(tmp_path):
    directory = str(tmp_path / "meta")
    images = []
    for life in range(3):
        quorum = SingleQuorum(RealFileSystem(), directory, snapshot_min_bytes=4_000)
        node = ControllerNode(quorum, 1, SystemClock(), seeded_rng(life))
        await node.start()
        if images:
            assert node.image == images[-1]
        await node.submit(REGISTER)
        await asyncio.gather(*(node.submit(create(f"t-{life}-{number}")) for number in range(30)))
        for number in range(5):
            await node.submit(create(f"u-{life}-{number}"))
        images.append(node.image)
        await node.stop()
    assert len(images[-1].topics) == 105
    assert (tmp_path / "meta" / "raft.snapshot").exists()
