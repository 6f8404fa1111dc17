"""An accepted older copy of the metadata: nothing is used twice, and no sound log counts as damaged."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, TopicPartition
from kafkalite.errors import DataDirectoryError, StorageError
from kafkalite.raft.journal import JOURNAL_FILE
from kafkalite.raft.older_metadata import SKIPPED_LEADER_EPOCHS, MetadataLoss, accept_older_metadata
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.layout import LEADER_EPOCHS_FILE, METADATA_DIRECTORY, NODE_FILE, VOTERS_FILE

Work = Callable[[Broker], Awaitable[Any]]


class Node:
    """A single node whose metadata can be replaced by an older copy."""

    def __init__(self, path: Path) -> None:
        self.data, self.copy = path / "data", path / "copy"
        self.metadata = self.data / METADATA_DIRECTORY
        self.journal = self.metadata / JOURNAL_FILE
        self.rng = random.Random(1)
        self.settings: dict[str, Any] = {}

    async def run(self, *work: Work, is_killed: bool = False) -> list[Any]:
        """Start the node, return the results of ``work``, and stop the node."""
        broker = Broker(log_dirs=str(self.data), listeners="127.0.0.1:0", **self.settings)
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

    def accept(self) -> MetadataLoss:
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
    assert node.accept().known_offset > 0
    assert {path.name: path.read_bytes() for path in node.metadata.iterdir()} == before
    assert await node.run(produce, next_producer_id) == [1, 2_000]


async def test_an_accepted_loss_needs_metadata_of_a_single_node(node: Node) -> None:
    with pytest.raises(DataDirectoryError, match="not formatted"):
        node.accept()
    await node.run(create, produce)
    shutil.rmtree(node.metadata)
    identity = (node.data / NODE_FILE).read_bytes()
    (node.data / NODE_FILE).unlink()
    with pytest.raises(DataDirectoryError, match=r"has the data of a node, but no node\.json"):
        node.accept()
    (node.data / NODE_FILE).write_bytes(identity)
    (node.data / VOTERS_FILE).write_text("1,2,3\n")
    with pytest.raises(DataDirectoryError, match="not the directory of a single node") as caught:
        node.accept()
    assert "--rejoin" in caught.value.hint


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Node], Any]] = {
    "first byte": lambda node: flip(node.journal, 0),
    "middle": lambda node: flip(node.journal, 0.5),
    "last byte": lambda node: flip(node.journal, 0.9999),
    "cut": lambda node: node.journal.write_bytes(node.journal.read_bytes()[:-200]),
    "empty": lambda node: node.journal.write_bytes(b""),
    "no journal": lambda node: node.journal.unlink(),
    "a directory": lambda node: (node.journal.unlink(), node.journal.mkdir()),
    "no metadata": lambda node: shutil.rmtree(node.metadata),
}


async def refusal(node: Node) -> tuple[int, str]:
    """Return the records in doubt, and the directory in the command of the hint."""
    with pytest.raises(StorageError) as caught:
        await node.run()
    found = re.search(r"at least (\d+) records? in doubt.*'kl log accept-loss ([^']+)'", caught.value.hint)
    assert found is not None, caught.value
    return int(found[1]), found[2]


async def read(broker: Broker, topic: str = "t") -> list[bytes | None]:
    async with Consumer(topic, bootstrap_servers=broker.address, auto_offset_reset="earliest") as consumer:
        return [one.value for one in await consumer.get_many(timeout_ms=5_000)]


async def commit(broker: Broker) -> None:
    async with Admin(broker.address) as admin:
        await admin.alter_group_offsets("g", {TopicPartition("t", 0): 1})


async def committed(broker: Broker) -> int:
    async with Admin(broker.address) as admin:
        return (await admin.committed_offsets("g"))[TopicPartition("t", 0)].offset


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_r45_damaged_metadata_names_the_command_that_brings_all_sound_logs_back(
    node: Node, damage: Callable[[Node], Any]
) -> None:
    await node.run(create, produce, lambda broker: create(broker, "u"), commit)
    await node.run(produce)
    before = node.journal.read_bytes()
    damage(node)
    damaged = node.journal.read_bytes() if node.journal.is_file() else None
    in_doubt, directory = await refusal(node)
    assert (in_doubt > 0, directory) == (True, str(node.metadata))
    loss = node.accept()
    assert loss.lost_records == in_doubt
    kept = [path.read_bytes() for path in map(Path, loss.kept) if path.is_file()]
    assert damaged in (None, *kept)
    assert before != damaged
    assert node.accept().lost_records == 0
    found = await node.run(read, committed, produce, lambda broker: create(broker, "new"), damages)
    assert found == [[b"x"] * 2, 1, 2, None, []]
    assert await node.run(topics, produce, damages) == [{"new", "t", "u"}, 3, []]


async def topics(broker: Broker) -> set[str]:
    return {name for name in broker.controller.image.topics if not name.startswith("__")}


async def configs(broker: Broker) -> dict[str, Any]:
    image = broker.controller.image
    return {name: dict(image.topic_configs(name)) for name in image.topics}


async def test_topics_from_logs_lose_no_record_by_retention_or_compaction(node: Node) -> None:
    """The settings are lost: default retention could delete what the topic was meant to keep."""
    _, _, _, before = await node.run(create, produce, commit, configs)
    shutil.rmtree(node.metadata)
    assert node.accept().created == ["__consumer_offsets", "t"]
    (after,) = await node.run(configs)
    assert after["t"] == {"retention.ms": "-1", "retention.bytes": "-1"}
    kept = before["__consumer_offsets"]
    kept.pop("segment.bytes")
    assert after["__consumer_offsets"] == kept


async def test_topics_that_an_older_copy_lacks_are_created_from_their_logs(node: Node) -> None:
    await node.run(create, produce)
    node.keep_copy()
    await node.run(delete, create, produce, produce, lambda broker: create(broker, "u"))
    node.restore_copy()
    assert node.accept().created == ["t", "u"]
    assert await node.run(read, topics, produce, damages) == [[b"x"] * 2, {"t", "u"}, 2, []]


async def test_a_damaged_snapshot_is_replaced_by_what_the_logs_show(node: Node) -> None:
    node.settings["metadata_log_max_record_bytes_between_snapshots"] = 1024
    await node.run(create, produce, commit, *[lambda broker: create(broker, "u"), produce, produce])
    flip(node.metadata / "raft.snapshot", 0.5)
    await refusal(node)
    assert len(node.accept().kept) == 2
    assert await node.run(read, committed, produce, damages) == [[b"x"] * 3, 1, 3, []]


@pytest.mark.parametrize("damage", ["middle", "no metadata", "snapshot"])
async def test_an_interrupted_repair_can_be_repeated(node: Node, damage: str) -> None:
    """After each call that changes the disk, the repair ends as by a kill, and is then repeated."""
    node.settings["metadata_log_max_record_bytes_between_snapshots"] = (
        1024 if damage == "snapshot" else 1 << 20
    )
    await node.run(create, produce, commit)
    await node.run(produce)
    if damage == "snapshot":
        flip(node.metadata / "raft.snapshot", 0.5)
    else:
        DAMAGES[damage](node)
    shutil.copytree(node.data, node.copy)
    for calls in range(100):
        shutil.rmtree(node.data)
        shutil.copytree(node.copy, node.data)
        try:
            accept_older_metadata(cast(Any, Interrupted(calls)), str(node.metadata), node.rng)
        except Killed:
            node.accept()
            assert await node.run(read, committed, damages) == [[b"x"] * 2, 1, []], calls
        else:
            assert calls >= 3
            return
    raise AssertionError("the repair never ends")


class Killed(BaseException): ...


class Interrupted(RealFileSystem):
    """A file system whose call number ``calls`` of those that change the disk raises."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        self._count()
        super().write_atomically(path, data, sync_name=sync_name)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def make_dirs(self, path: str) -> None:
        self._count()
        super().make_dirs(path)
