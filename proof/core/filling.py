"""The schedule of R69: an empty replica of a compacted log copies a part of it from each of two leaders.

Three partitions are real, on real logs; there is no controller and no network. The leaders have compacted the
same records differently, as they do: broker 2 has removed a tombstone, broker 1 still has the deleted record.
The invariant: a caught-up replica has no key that the log's records delete.
"""

from __future__ import annotations

from typing import Final

from kafkalite.errors import OffsetOutOfRangeError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.batch import iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check, total_length
from kafkalite.replication.partition import Partition
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import PAGE_CACHE, LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.compaction import run_pass
from proof.core.parts import TOPIC_ID, ViolationError

_CONFIG: Final = LogConfig(
    durability=PAGE_CACHE, is_compacted=True, delete_retention_ms=0, preallocate_min_bytes=0
)
_DELETED: Final = b"deleted"
_KEYS: Final = (_DELETED, b"a", b"b", b"a", _DELETED, b"b", b"a")
_NOW_MS: Final = 1


class Replica:
    """One broker's replica of a compacted partition."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        fs = MemoryFileSystem()
        fs.make_dirs("/data")
        self.log = Log.create(fs, "/data/log", _CONFIG)
        self.partition = Partition(TopicPartition("t", 0), TOPIC_ID, self.log, broker_id=node_id)

    def take(self, state: PartitionState) -> None:
        if state.leader == self.node_id:
            self.partition.become_leader(state)
        else:
            self.partition.become_follower(state)

    def append(self, key: bytes, value: bytes | None) -> None:
        batch = bytearray(build_batch([value], [key], timestamps_ms=_NOW_MS))
        self.partition.append(batch, check(batch), _NOW_MS)

    def fetch(self, leader: Replica, *, batches: int = 100) -> None:
        """Copy at most ``batches`` batches from the leader."""
        position = self.partition.fetch_position()
        asked = position._asdict()
        del asked["version"]
        code, data = 0, b""
        try:
            leader.partition.on_replica_fetch(self.node_id, broker_epoch=1, now_ms=_NOW_MS, **asked)
            data = b"".join(leader.partition.read_for_replica(position.fetch_offset, 1 << 20).buffers)
        except OffsetOutOfRangeError:
            code = 1
        end = 0
        for _ in range(batches):
            end += total_length(data, end) if end < len(data) else 0
        answer = ReplicaFetchedPartition(
            TOPIC_ID,
            0,
            code,
            None,
            leader.partition.leader_epoch,
            leader.partition.high_watermark,
            leader.log.log_start_offset,
            -1,
            -1,
            end,
        )
        self.partition.on_fetched(answer, memoryview(data)[:end], now_ms=_NOW_MS, asked=position)

    def compact(self) -> None:
        """Compact all committed records, as the cleaner does while all replicas are in sync."""
        self.log.roll()
        sync = self.log.begin_sync()
        if sync is not None:
            sync.run()
            self.log.finish_sync(sync, None)
        work = self.log.begin_compaction(_NOW_MS, self.partition.high_watermark, 1_000)
        assert work is not None
        run_pass(self.log, work, _NOW_MS)

    def table(self) -> dict[bytes | None, bytes | None]:
        """Return the latest value of each key; a deleted key has none."""
        found: dict[bytes | None, bytes | None] = {}
        offset = self.log.log_start_offset
        while offset < self.log.log_end_offset:
            piece = self.log.read(offset, max_bytes=1 << 20, up_to=self.log.log_end_offset)
            for batch in (one for buffer in piece.buffers for one in iter_batches(buffer)):
                if batch.header.is_control:
                    continue  # a gap
                columns = batch.columns()
                found.update(zip(columns.keys or [], columns.values, strict=True))
            offset = piece.next_offset
        return {key: value for key, value in found.items() if value is not None}


def two_leaders() -> None:
    """Schedule: a replica copies a record from one leader, and the end of the log from another one, which has
    removed the tombstone of that record."""
    first, second, added = (Replica(node_id) for node_id in (1, 2, 3))
    state = PartitionState((1, 2), (1, 2), 1, 0, 0)
    for replica in (first, second):
        replica.take(state)
    for number, key in enumerate(_KEYS):
        first.append(key, None if number == 4 else b"%d" % number)
    for _ in range(2):
        second.fetch(first)
    for _ in range(3):  # the second pass remembers the tombstone, the third one removes it
        second.compact()
        first.append(b"a", b"later")
        for _ in range(2):
            second.fetch(first)
    growing = PartitionState((1, 2, 3), (1, 2), 1, 0, 1, target_replicas=(2, 3), added_replicas=((3, 1),))
    for replica in (first, second, added):
        replica.take(growing)
    added.fetch(first, batches=2)
    for replica in (first, second, added):
        replica.take(growing._replace(leader=2, leader_epoch=1, partition_epoch=2))
    for _ in range(4):
        first.fetch(second)
        added.fetch(second)
    assert added.log.log_end_offset == second.log.log_end_offset
    if added.table() != second.table():
        raise ViolationError(f"R69: {added.table().keys() - second.table().keys()} were deleted")
