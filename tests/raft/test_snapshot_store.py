"""Snapshots on disk and in chunks: a damaged or incomplete one is refused."""

from __future__ import annotations

import pytest

from kafkalite.errors import StorageError
from kafkalite.raft.frames import frame
from kafkalite.raft.snapshot_store import Snapshot, SnapshotStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of

SNAPSHOT = "/meta/raft.snapshot"


def test_the_bytes_are_as_documented():
    disk = MemoryFileSystem()
    disk.make_dirs("/meta")
    store = SnapshotStore(disk, "/meta", chunk_bytes=10)
    store.store(Snapshot((b"\x00abc", 2, 1), (b"\x01", 3, 1), 2, b"records"))
    value = ["kafkalite-raft-snapshot", 1, [b"\x00abc", 2, 1], [b"\x01", 3, 1], 2, b"records"]
    assert disk.read_bytes(SNAPSHOT) == frame(value)


def test_a_damaged_snapshot_is_refused_wherever_it_is():
    disk = MemoryFileSystem()
    disk.make_dirs("/meta")
    store = SnapshotStore(disk, "/meta", chunk_bytes=10)
    store.store(Snapshot((b"\x00a", 2, 1), (b"\x00b", 3, 1), 3, b"records"))
    whole = disk.read_bytes(SNAPSHOT)
    for at in range(len(whole)):
        rotten = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        for data in (rotten, whole[:at]):
            broken = SnapshotStore(
                disk_with_files({**tree_of(disk), SNAPSHOT: data}), "/meta", chunk_bytes=10
            )
            with pytest.raises(StorageError):
                broken.open()


def test_chunks_make_a_snapshot_unless_one_is_missing():
    disk = MemoryFileSystem()
    disk.make_dirs("/meta")
    store = SnapshotStore(disk, "/meta", chunk_bytes=7)
    assert store.getTransmissionData("node") is None
    snapshot = Snapshot((b"\x00a", 2, 1), (b"\x00b", 3, 1), 3, b"records")
    store.store(snapshot)
    assert store.exists
    chunks = []
    while not chunks or not chunks[-1][2]:
        chunks.append(store.getTransmissionData("node"))
    assert len(chunks) > 3
    assert [first for _, first, _ in chunks] == [True] + [False] * (len(chunks) - 1)

    def received(these):
        other = SnapshotStore(MemoryFileSystem(), "/other", chunk_bytes=7)
        return [other.receive(data, is_first=first, is_last=last) for data, first, last in these][-1]

    assert received(chunks) == snapshot
    assert received(chunks[1:]) is None
    assert received(chunks[:1] + chunks[2:]) is None
    assert received([*chunks[:3], *chunks]) == snapshot
    store.getTransmissionData("node")
    store.cancelTransmisstion("node")
    assert store.getTransmissionData("node")[1]
