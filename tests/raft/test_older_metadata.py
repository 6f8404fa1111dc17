"""An accepted older copy of the metadata: nothing is used twice, and no sound log counts as damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Admin, Broker, Producer
from kafkalite.errors import DataDirectoryError
from kafkalite.raft.older_metadata import SKIPPED_LEADER_EPOCHS, accept_older_metadata
from kafkalite.storage.accept_loss import AcceptedLoss
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.layout import LEADER_EPOCHS_FILE, METADATA_DIRECTORY

Work = Callable[[Broker], Awaitable[Any]]


class Node:
    """A single node whose metadata can be replaced by an older copy."""

    def __init__(self, path: Path) -> None:
        self.data, self.copy = path / "data", path / "copy"
        self.metadata = self.data / METADATA_DIRECTORY
        self.rng = random.Random(1)

    async def run(self, *work: Work, is_killed: bool = False) -> list[Any]:
        """Start the node, return the results of ``work``, and stop the node."""
        broker = Broker(log_dirs=str(self.data), listeners="127.0.0.1:0")
        await broker.start()
        try:
            return [await one(broker) for one in work]
        finally:
            await (broker.kill() if is_killed else broker.stop())

    def keep_copy(self) -> None:
        shutil.copytree(self.metadata, self.copy)

    def restore_copy(self) -> None:
        shutil.rmtree(self.metadata)
        shutil.copytree(self.copy, self.metadata)

    def accept(self) -> AcceptedLoss:
        return accept_older_metadata(RealFileSystem(), str(self.metadata), self.rng)

    @property
    def leader_epochs(self) -> Path:
        (path,) = self.data.glob(f"*-0/{LEADER_EPOCHS_FILE}")
        return path


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def create(broker: Broker, topic: str = "t") -> None:
    async with Admin(broker.address) as admin:
        await admin.create_topic(topic, partitions=1)


async def delete(broker: Broker, topic: str = "t") -> None:
    async with Admin(broker.address) as admin:
        await admin.delete_topics([topic])


async def produce(broker: Broker) -> int:
    """Return the offset of one record of a new producer. The broker allocates a block of producer ids."""
    async with Producer(broker.address) as producer:
        return (await producer.send("t", b"x", partition=0)).offset


async def next_producer_id(broker: Broker) -> int:
    return broker.controller.image.next_producer_id


async def leader_epoch(broker: Broker) -> int:
    state = broker.controller.image.partition("t", 0)
    assert state is not None
    return state.leader_epoch


async def damages(broker: Broker) -> list[str]:
    return [hosted.offline_reason for hosted in broker.partitions if hosted.offline_reason]


@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_first_start_after_an_accepted_loss_finds_no_damage(node: Node, is_killed: bool) -> None:
    await node.run(create, produce)
    node.keep_copy()
    for _ in range(3):
        await node.run(produce)
    await node.run(produce, is_killed=is_killed)
    node.restore_copy()
    with pytest.raises(DataDirectoryError, match="older copy"):
        await node.run()
    node.accept()
    assert await node.run(produce, damages) == [5, []]


async def test_r27_no_producer_id_is_assigned_twice(node: Node) -> None:
    """The same copy may be restored twice."""
    await node.run(create, produce)
    node.keep_copy()
    used = []
    for _ in range(3):
        used += await node.run(next_producer_id, produce, next_producer_id)
        node.restore_copy()
        node.accept()
    first, second, third = used[:3], used[3:6], used[6:]
    assert first[0] == 1_000
    assert min(second[0], third[0]) > first[2]
    assert abs(second[0] - third[0]) > 1_000_000
    assert max(second[2], third[2]) < 1 << 49


async def test_leader_epochs_continue_after_the_last_one_that_the_log_has_recorded(node: Node) -> None:
    await node.run(create, produce)
    node.keep_copy()
    await node.run(produce)
    for _ in range(2):
        (before,) = await node.run(leader_epoch)
        node.restore_copy()
        node.accept()
        _, after, found = await node.run(produce, leader_epoch, damages)
        assert (after > before + SKIPPED_LEADER_EPOCHS // 2, found) == (True, [])


async def test_an_unreadable_leader_epochs_file_is_replaced_by_the_skipped_epochs(node: Node) -> None:
    await node.run(create, produce)
    node.keep_copy()
    await node.run(produce)
    node.leader_epochs.write_bytes(b"?")
    node.restore_copy()
    node.accept()
    assert await node.run(produce, leader_epoch, damages) == [2, SKIPPED_LEADER_EPOCHS + 1, []]


async def test_a_topic_that_was_deleted_since_the_copy_returns_empty_and_without_damage(node: Node) -> None:
    await node.run(create, produce)
    node.keep_copy()
    await node.run(delete)
    node.restore_copy()
    node.accept()
    assert await node.run(produce, damages) == [0, []]


async def test_metadata_that_is_not_older_stays_as_it_is(node: Node) -> None:
    await node.run(create, produce)
    before = {path.name: path.read_bytes() for path in node.metadata.iterdir()}
    assert node.accept().log_end_offset > 0
    assert {path.name: path.read_bytes() for path in node.metadata.iterdir()} == before
    assert await node.run(produce, next_producer_id) == [1, 2_000]


async def test_an_accepted_loss_needs_metadata_of_a_single_node(node: Node, tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match="not formatted"):
        node.accept()
    await node.run(create, produce)
    shutil.rmtree(node.metadata)
    with pytest.raises(DataDirectoryError, match="restore"):
        node.accept()
