"""Consumers that read from followers: which one a leader names, and what it returns (R65, R66, KIP-392)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.errors import (
    FencedLeaderEpochError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    UnknownLeaderEpochError,
)
from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_EPOCH, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.header import TRANSACTIONAL_BIT, parse_header, seal, stamp
from kafkalite.replication.leader import PartitionLeader
from kafkalite.replication.partition import Partition
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem

NOW_MS = 1_700_000_000_000


class Follower:
    """The replica of broker 2, which follows broker 1 in epoch 3."""

    def __init__(self, *, isr: tuple[int, ...] = (1, 2), loss_epoch: int = NO_EPOCH) -> None:
        filesystem = MemoryFileSystem()
        filesystem.make_dirs("/d")
        self.log = Log.create(filesystem, "/d/log", LogConfig(durability="page-cache"))
        self.partition = Partition(TopicPartition("t", 0), "a" * 32, self.log, broker_id=2)
        self.follow(isr=isr)

    def follow(
        self, epoch: int = 3, version: int = 1, isr: tuple[int, ...] = (1, 2), leader: int = 1
    ) -> None:
        self.partition.become_follower(PartitionState((1, 2), isr, leader, epoch, version))

    def receive(
        self, *batches: bytes | bytearray, high_watermark: int = 0, start: int = 0, **changes: Any
    ) -> Any:
        """Append batches of the leader at this log's end, and learn its high watermark."""
        data, end = bytearray(), self.log.log_end_offset
        for batch in batches:
            copy = bytearray(batch)
            stamp(copy, base_offset=end, leader_epoch=3)
            end += parse_header(copy).last_offset_delta + 1
            data += copy
        answer = ReplicaFetchedPartition(
            "a" * 32, 0, 0, None, self.partition.leader_epoch, high_watermark, start, -1, -1, len(data)
        )._replace(**changes)
        return self.partition.on_fetched(answer, memoryview(data), now_ms=NOW_MS)

    def read(self, offset: int, *, epoch: int = 3, is_committed_only: bool = False) -> int:
        """Return the end of the records that a consumer reads at ``offset``."""
        self.partition.check_serves_near(epoch)
        return self.partition.read_as_follower(offset, 1 << 20, is_committed_only).next_offset


def records(count: int, **changes: Any) -> bytearray:
    return bytearray(build_batch([b"v"] * count, None, NOW_MS, **changes))


def test_r65_a_follower_serves_below_the_high_watermark_that_it_knows() -> None:
    follower = Follower()
    step = follower.receive(records(3), records(4), high_watermark=3)
    assert step.high_watermark_moved
    assert (follower.log.log_end_offset, follower.read(0), follower.read(3)) == (7, 3, 3)
    with pytest.raises(OffsetNotAvailableError, match="records below 3"):
        follower.read(4)
    with pytest.raises(OffsetNotAvailableError):
        follower.read(7)
    with pytest.raises(OffsetOutOfRangeError):
        follower.read(8)
    assert not follower.receive(high_watermark=3).high_watermark_moved
    assert follower.receive(high_watermark=9).high_watermark_moved
    assert follower.read(4) == 7, "never beyond its own log"


def test_r65_below_the_log_start_is_out_of_this_followers_range() -> None:
    follower = Follower()
    follower.receive(records(3), records(4), high_watermark=7, start=3)
    with pytest.raises(OffsetOutOfRangeError):
        follower.read(2)
    assert follower.read(3) == 7


def test_r65_a_follower_serves_only_its_leader_epoch() -> None:
    follower = Follower()
    follower.receive(records(1), high_watermark=1)
    assert follower.read(0, epoch=NO_EPOCH) == 1
    with pytest.raises(FencedLeaderEpochError):
        follower.read(0, epoch=2)
    with pytest.raises(UnknownLeaderEpochError):
        follower.read(0, epoch=4)


def test_r65_a_follower_serves_only_while_it_is_in_sync() -> None:
    follower = Follower(isr=(1,))
    follower.receive(records(1), high_watermark=1)
    with pytest.raises(NotLeaderOrFollowerError, match="not in sync"):
        follower.read(0)
    follower.follow(version=2)
    assert follower.read(0) == 1
    follower.follow(version=1, isr=(1,))  # an older state
    assert follower.read(0) == 1
    follower.follow(version=3, isr=(1,))
    with pytest.raises(NotLeaderOrFollowerError):
        follower.read(0)
    follower.follow(epoch=4, version=4, leader=-1)
    with pytest.raises(NotLeaderOrFollowerError):
        follower.read(0, epoch=4)
    follower.partition.become_leader(PartitionState((1, 2), (1, 2), 2, 5, 5))
    with pytest.raises(NotLeaderOrFollowerError):
        follower.read(0, epoch=5)


def test_r65_a_follower_serves_only_after_the_leader_has_compared_the_logs() -> None:
    """After an unclean election its records below the high watermark may be others than the leader's."""
    follower = Follower()
    follower.receive(records(3), records(4), high_watermark=7)
    assert follower.read(0) == 7
    state = PartitionState((1, 2), (1, 2), 1, 5, 5)._replace(loss_epoch=5)
    follower.partition.become_follower(state)
    with pytest.raises(OffsetNotAvailableError, match="not compared"):
        follower.read(0, epoch=5)
    step = follower.receive(diverging_epoch=3, diverging_end_offset=3)
    assert step.truncated_to == 3
    with pytest.raises(OffsetNotAvailableError, match="not compared"):
        follower.read(0, epoch=5)
    follower.receive(high_watermark=3)
    assert follower.read(0, epoch=5) == 3


def test_r65_a_damaged_follower_does_not_serve() -> None:
    follower = Follower()
    follower.receive(records(1), high_watermark=1)
    follower.log.mark_damaged("by the test")
    with pytest.raises(KafkaStorageError, match="by the test"):
        follower.read(0)


def test_r33_a_follower_serves_transactions_as_the_leader_does() -> None:
    follower = Follower()

    def part(producer_id: int) -> bytearray:
        batch = records(1, producer_id=producer_id, producer_epoch=0, base_sequence=0)
        batch[22] |= TRANSACTIONAL_BIT
        seal(batch)
        return batch

    abort = build_marker(8, 1, 0, False, NOW_MS)
    follower.receive(records(1), part(8), part(9), abort, high_watermark=4)
    assert follower.read(0) == 4
    assert follower.read(0, is_committed_only=True) == 2, "the transaction of producer 9 is open"
    assert follower.partition.aborted_between(0, 4) == [(8, 1)]
    follower.receive(build_marker(9, 1, 0, True, NOW_MS), high_watermark=4)
    assert follower.read(0, is_committed_only=True) == 2, "the marker is not known to be committed"
    follower.receive(high_watermark=5)
    assert follower.read(0, is_committed_only=True) == 5


@pytest.fixture
def leader() -> PartitionLeader:
    """Broker 1 leads; 2 and 3 are in sync, 4 is not."""
    leader = PartitionLeader(
        1,
        leader_epoch=0,
        replicas=(1, 2, 3, 4, 5),
        isr=(1, 2, 3, 5),
        epoch_start_offset=0,
        high_watermark=0,
        min_insync_replicas=1,
    )
    for node_id, progress, start in ((2, 7, 0), (3, 9, 5), (4, 9, 0)):
        leader.on_fetch(
            node_id,
            broker_epoch=1,
            progress=progress,
            synced_end_offset=progress,
            log_start_offset=start,
            leader_end_offset=9,
            now_ms=0,
        )
    return leader


@pytest.mark.parametrize(
    ("offset", "near", "expected"),
    [
        (6, {2, 3, 4, 5}, 3),  # the most caught-up one
        (6, {2}, 2),
        (3, {2, 3}, 2),  # 3 begins at 5
        (8, {2}, None),  # 2 ends at 7
        (6, {4}, None),  # not in sync
        (0, {5}, None),  # in sync, but has not fetched from this leader
        (6, set(), None),
        (0, {1}, None),
    ],
)
def test_r66_a_leader_names_the_most_caught_up_follower(
    leader: PartitionLeader, offset: int, near: set[int], expected: int | None
) -> None:
    assert leader.near_replica(offset, near.__contains__) == expected


def test_r66_only_for_offsets_that_the_leader_can_read(new_leader: Callable[..., Any]) -> None:
    leader = new_leader(isr=(1, 2), durability="page-cache")
    leader.append(b"a", b"b")
    partition = leader.partition

    def fetch(offset: int) -> None:
        partition.on_replica_fetch(
            2,
            broker_epoch=1,
            leader_epoch=0,
            fetch_offset=offset,
            last_epoch=0 if offset else NO_EPOCH,
            synced_end_offset=offset,
            log_start_offset=0,
            now_ms=0,
        )

    fetch(2)
    assert partition.high_watermark == 2
    everywhere: Callable[[int], bool] = lambda _: True  # noqa: E731
    assert [partition.near_replica(offset, everywhere) for offset in (0, 2, 3)] == [2, 2, None]
    leader.append(b"c")
    assert partition.near_replica(3, everywhere) is None, "not committed"
    leader.log.delete_before(1)
    assert partition.near_replica(0, everywhere) is None, "out of range: the leader answers"
    partition.resign()
    assert partition.near_replica(1, everywhere) is None
