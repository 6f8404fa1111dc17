"""Following: positions, valid responses, and where a log is truncated (R1, R3, R4, R5, R10, R48, R49)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import (
    CorruptBatchError,
    FencedLeaderEpochError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    ShortLeaderError,
    StaleBrokerEpochError,
    UnknownLeaderEpochError,
)
from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_EPOCH, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.batch import iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.records.gaps import GAP_BYTES
from kafkalite.records.header import check, total_length
from kafkalite.replication.follower import EpochEnd, diverging_at, truncation_target
from kafkalite.replication.partition import Partition
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.compaction import run_pass

NOW_MS = 1_700_000_000_000


class Node:
    """A replica on broker ``node_id``, with the steps of a fetcher."""

    def __init__(self, node_id: int, **config) -> None:
        fs = MemoryFileSystem()
        fs.make_dirs("/d")
        self.node_id = node_id
        self.log = Log.create(fs, "/d/log", LogConfig(**{"durability": "page-cache", **config}))
        self.partition = Partition(TopicPartition("t", 0), "a" * 32, self.log, broker_id=node_id)

    def role(self, leader: int, epoch: int, version: int = 0, isr=(1, 2, 3)) -> None:
        state = PartitionState((1, 2, 3), isr, leader, epoch, version)
        if leader == self.node_id:
            self.partition.become_leader(state)
        else:
            self.partition.become_follower(state)

    def write(self, *values: bytes) -> None:
        for value in values:
            batch = bytearray(build_batch([value], timestamps_ms=NOW_MS))
            self.partition.append(batch, check(batch), NOW_MS)

    def ask(self, leader: Node, position=None, *, broker_epoch=1, **changes):
        """The leader's response to this follower's fetch: (response, bytes)."""
        position = position or self.partition.fetch_position()
        asked = {**position._asdict(), **changes}
        del asked["version"]
        code, data, diverging = 0, b"", (-1, -1)
        try:
            result = leader.partition.on_replica_fetch(
                self.node_id, broker_epoch=broker_epoch, now_ms=NOW_MS, **asked
            )
        except OffsetOutOfRangeError:
            code = 1
        else:
            diverging = result.diverging or diverging
            if result.diverging is None:
                data = b"".join(leader.partition.read_for_replica(position.fetch_offset, 1 << 20).buffers)
        partition = leader.partition
        answer = ReplicaFetchedPartition(
            "a" * 32,
            0,
            code,
            None,
            partition.leader_epoch,
            partition.high_watermark,
            leader.log.log_start_offset,
            *diverging,
            len(data),
        )
        return answer, memoryview(data)

    def fetch(self, leader: Node):
        position = self.partition.fetch_position()
        answer, data = self.ask(leader, position)
        return self.partition.on_fetched(answer, data, now_ms=NOW_MS, asked=position)

    def delete_before(self, offset: int) -> None:
        self.log.delete_before(self.partition.deletion_end(offset))

    def bytes(self) -> bytes:
        log = self.log
        found = log.read(log.log_start_offset, max_bytes=1 << 20, up_to=log.log_end_offset)
        return b"".join(found.buffers)


@pytest.fixture
def pair() -> tuple[Node, Node]:
    leader, follower = Node(1), Node(2)
    leader.role(1, 0)
    follower.role(1, 0)
    return leader, follower


def test_a_follower_gets_the_leaders_bytes_and_its_high_watermark(pair):
    leader, follower = pair
    leader.role(1, 0, version=1, isr=(1, 2))
    leader.write(b"a", b"b")
    step = follower.fetch(leader)
    assert (step.appended_bytes, step.truncated_to) == (len(leader.bytes()), None)
    assert follower.partition.high_watermark == 0
    assert follower.bytes() == leader.bytes()
    follower.fetch(leader)  # reports what it has, and receives that this is committed
    assert follower.partition.high_watermark == leader.partition.high_watermark == 2
    assert (follower.partition.role, follower.partition.leader_id, follower.partition.leader_epoch) == (
        "follower",
        1,
        0,
    )


def test_r10_the_high_watermark_of_a_follower_ends_with_its_log(pair):
    leader, follower = pair
    leader.write(b"a", b"b", b"c")
    answer, data = follower.ask(leader)
    position = follower.partition.fetch_position()
    first = data[: len(data) // 3]
    answer = answer._replace(high_watermark=3)
    follower.partition.on_fetched(answer, first, now_ms=NOW_MS, asked=position)
    assert follower.partition.high_watermark == 1
    answer = answer._replace(high_watermark=0)  # a new leader that knows less
    follower.partition.on_fetched(answer, data[:0], now_ms=NOW_MS)
    assert follower.partition.high_watermark == 1


def test_r1_damaged_batches_and_batches_out_of_order_are_refused(pair):
    leader, follower = pair
    leader.write(b"a", b"b")
    answer, data = follower.ask(leader)
    damaged = bytearray(data)
    damaged[-1] ^= 1
    for wrong in (damaged, data[len(data) // 2 :]):
        with pytest.raises(CorruptBatchError):
            follower.partition.on_fetched(answer, memoryview(wrong), now_ms=NOW_MS)
    assert follower.log.log_end_offset == 0


def test_r3_batches_of_a_younger_epoch_than_the_leaders_are_refused(pair):
    leader, follower = pair
    leader.role(1, 4, version=1)
    leader.write(b"a")
    position = follower.partition.fetch_position()
    answer, data = follower.ask(leader, position, leader_epoch=4)
    with pytest.raises(CorruptBatchError, match="leader epoch 4 from a leader of epoch 0"):
        follower.partition.on_fetched(answer._replace(leader_epoch=0), data, now_ms=NOW_MS)


def test_r3_a_response_to_an_earlier_fetch_is_ignored(pair):
    leader, follower = pair
    leader.write(b"a")
    position = follower.partition.fetch_position()
    answer, data = follower.ask(leader, position)
    again = (answer, data)
    assert not follower.partition.on_fetched(answer, data, now_ms=NOW_MS, asked=position).is_ignored
    assert follower.partition.on_fetched(*again, now_ms=NOW_MS, asked=position).is_ignored
    follower.role(3, 1, version=1)
    assert follower.partition.on_fetched(*again, now_ms=NOW_MS).is_ignored
    follower.partition.resign()
    assert follower.partition.on_fetched(*again, now_ms=NOW_MS).is_ignored


def test_r3_a_sync_does_not_make_a_response_invalid(pair):
    leader, follower = Node(1, durability="fsync"), Node(2, durability="fsync")
    leader.role(1, 0)
    follower.role(1, 0)
    leader.write(b"a")
    follower.fetch(leader)
    before = follower.partition.fetch_position()
    work = follower.log.begin_sync()
    work.run()
    follower.log.finish_sync(work, None)
    after = follower.partition.fetch_position()
    assert (before.synced_end_offset, after.synced_end_offset) == (0, 1)
    assert before.version == after.version


def test_r3_the_leader_refuses_other_epochs_strangers_and_earlier_incarnations(pair):
    leader, follower = pair
    leader.role(1, 5, version=1)
    follower.role(1, 5, version=1)
    for epoch, error in ((4, FencedLeaderEpochError), (6, UnknownLeaderEpochError)):
        with pytest.raises(error):
            follower.ask(leader, leader_epoch=epoch)
    with pytest.raises(NotLeaderOrFollowerError, match="broker 9 has no replica"):
        leader.partition.on_replica_fetch(
            9,
            broker_epoch=1,
            leader_epoch=5,
            fetch_offset=0,
            last_epoch=-1,
            synced_end_offset=0,
            log_start_offset=0,
            now_ms=0,
        )
    follower.ask(leader, broker_epoch=7)
    with pytest.raises(StaleBrokerEpochError):
        follower.ask(leader, broker_epoch=6)
    with pytest.raises(NotLeaderOrFollowerError):
        leader.ask(follower, position=follower.partition.fetch_position())


def test_r4_a_diverging_log_is_truncated_where_the_epochs_meet_and_does_not_count():
    old, new, third = Node(1), Node(2), Node(3)
    for node in (old, new, third):
        node.role(1, 0)
    old.write(b"a")
    new.fetch(old)
    old.write(b"lost", b"lost too")
    for node in (new, old, third):
        node.role(2, 1, version=1)
    new.write(b"b")
    step = old.fetch(new)
    assert (step.truncated_to, old.log.log_end_offset) == (1, 1)
    assert new.partition.high_watermark == 0
    old.fetch(new)
    assert old.bytes() == new.bytes()


def test_r4_kip_279_epochs_that_the_leader_never_saw_need_a_second_round():
    """1 has epochs 0 and 2, 2 has 0 and 1, and leads in 3."""
    first, second = Node(1), Node(2)
    first.role(1, 0)
    second.role(1, 0)
    first.write(b"a")
    second.fetch(first)
    second.role(2, 1, version=1)
    second.write(b"only at 2")
    first.role(1, 2, version=2)
    first.write(b"only at 1", b"only at 1 as well")
    second.role(2, 3, version=3)
    second.write(b"b")
    first.role(2, 3, version=3)
    steps = [first.fetch(second) for _ in range(4)]
    assert steps[0].truncated_to == 1
    assert first.bytes() == second.bytes()


def test_r4_lookups_and_their_ends():
    assert diverging_at(3, 10, EpochEnd(3, 10)) is None
    assert diverging_at(3, 10, EpochEnd(3, 12)) is None
    assert diverging_at(3, 10, EpochEnd(3, 9)) == (3, 9)
    assert diverging_at(3, 10, EpochEnd(2, 20)) == (2, 20)
    assert truncation_target(9, EpochEnd(2, 20), 12) == 9
    assert truncation_target(20, EpochEnd(2, 7), 12) == 7
    assert truncation_target(20, EpochEnd(2, 20), 12) == 12


def test_r4_an_empty_leader_makes_its_follower_empty():
    leader, follower = Node(1), Node(2)
    follower.role(2, 0)
    follower.write(b"a", b"b")
    leader.role(1, 1, version=1)
    follower.role(1, 1, version=1)
    assert follower.fetch(leader).truncated_to == 0
    assert follower.partition.fetch_position().last_epoch == NO_EPOCH
    assert not follower.fetch(leader).is_ignored


def test_r5_an_epoch_without_a_record_is_dropped_when_the_leadership_ends():
    node = Node(2)
    node.role(2, 0)
    node.write(b"a")
    node.role(2, 3, version=1)
    assert node.log.latest_epoch == 3
    node.role(1, 4, version=2)
    assert node.partition.fetch_position().last_epoch == 0


def test_a_follower_far_behind_starts_over_where_the_leaders_log_starts(pair):
    leader, follower = pair
    leader.role(1, 0, version=1, isr=(1,))
    leader.write(b"a")
    follower.fetch(leader)
    leader.write(*[b"x"] * 5)
    leader.delete_before(4)
    step = follower.fetch(leader)
    assert (step.truncated_to, follower.log.log_start_offset, follower.log.log_end_offset) == (4, 4, 4)
    assert follower.partition.high_watermark == 4
    follower.fetch(leader)
    assert follower.log.log_end_offset == 6
    assert follower.bytes() == leader.bytes()


def test_a_leaders_log_that_starts_within_a_batch_can_be_followed(pair):
    leader, follower = pair
    leader.role(1, 0, version=1, isr=(1,))
    batch = bytearray(build_batch([b"a", b"b", b"c"], timestamps_ms=NOW_MS))
    leader.partition.append(batch, check(batch), NOW_MS)
    leader.delete_before(2)
    for _ in range(3):
        follower.fetch(leader)
    assert (follower.log.log_start_offset, follower.log.log_end_offset) == (2, 3)
    assert follower.bytes() == leader.bytes()


def compacted(node: Node) -> None:
    """Compact all committed records, here and now."""
    node.log.roll()
    work = node.log.begin_sync()
    work.run()
    node.log.finish_sync(work, None)
    done = node.log.begin_compaction(1, node.partition.high_watermark, 1000)
    assert run_pass(node.log, done, 1)


def contents(node: Node) -> dict[bytes, bytes]:
    """The latest value of each key that is not deleted."""
    found: dict[bytes, bytes] = {}
    for batch in iter_batches(node.bytes()):
        if not batch.header.is_control:
            columns = batch.columns()
            found.update(zip(columns.keys, columns.values, strict=True))
    return {key: value for key, value in found.items() if value is not None}


def test_r4_a_follower_between_a_compacted_and_another_leader_goes_back_to_where_a_batch_begins():
    first, second, follower = (Node(number, is_compacted=True) for number in (1, 2, 3))
    nodes = (first, second, follower)
    for version, isr in enumerate([(1, 2, 3), (1, 2)]):  # the follower has been in sync
        for node in nodes:
            node.role(1, 0, version=version, isr=isr)
    for keys in ([b"a", b"b"], [b"a", b"b", b"c"], [b"a"], [b"b"]):
        batch = bytearray(build_batch([bytes(300)] * len(keys), keys, timestamps_ms=NOW_MS))
        first.partition.append(batch, check(batch), NOW_MS)
        second.fetch(first)
        second.fetch(first)
    compacted(first)  # offsets 0 to 3 are a gap now, and the batch from 2 to 4 is only its last record
    position = follower.partition.fetch_position()
    answer, data = follower.ask(first, position)
    follower.partition.on_fetched(answer, data[:GAP_BYTES], now_ms=NOW_MS, asked=position)
    assert follower.log.log_end_offset == 4
    for node in nodes:
        node.role(2, 1, version=2, isr=(2,))
    position = follower.partition.fetch_position()
    answer, data = follower.ask(second, position)
    assert check(data[: total_length(data)]).base_offset == 2
    behind = answer._replace(high_watermark=4)  # not known to be committed
    with pytest.raises(CorruptBatchError, match="the next has offset 4"):
        follower.partition.on_fetched(behind, data, now_ms=NOW_MS, asked=position)
    assert follower.fetch(second).truncated_to == 0
    for _ in range(2):
        follower.fetch(second)
    assert follower.bytes() == second.bytes()
    assert follower.partition.high_watermark == second.partition.high_watermark


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_a_follower_catches_up_while_leaders_that_compacted_differently_take_turns(seed):
    """Both have removed tombstones before they had to wait for the new replica (R41, R69)."""
    rng = random.Random(seed)
    nodes = [
        Node(number, is_compacted=True, segment_bytes=4096, delete_retention_ms=0) for number in (1, 2, 3)
    ]
    leaders, late = nodes[:2], nodes[2]
    for node in nodes:
        node.role(1, 0, isr=(1, 2))
    latest = {}
    for count in range(60):
        keys = [b"%d" % rng.randrange(6) for _ in range(rng.randrange(1, 6))]
        values = [
            b"%d %d " % (count, number) + bytes(200) if rng.randrange(4) else None
            for number in range(len(keys))
        ]
        latest.update(zip(keys, values, strict=True))
        batch = bytearray(build_batch(values, keys, timestamps_ms=NOW_MS))
        leaders[0].partition.append(batch, check(batch), NOW_MS)
        for _ in range(2):
            leaders[1].fetch(leaders[0])
        if rng.randrange(6) == 0:
            compacted(rng.choice(leaders))
    epoch = 0
    for _ in range(400):
        if rng.randrange(4) == 0 and epoch < 30:
            epoch += 1
            elected = rng.choice((1, 2))
            for node in nodes:
                node.role(elected, epoch, isr=(1, 2))
        leader = next(one for one in leaders if one.partition.is_leader)
        other = leaders[leader is leaders[0]]
        other.fetch(leader)
        position = late.partition.fetch_position()
        answer, data = late.ask(leader, position)
        end = 0
        for _ in range(rng.randrange(1, 3)):
            end += total_length(data, end) if end < len(data) else 0
        late.partition.on_fetched(answer, data[:end], now_ms=NOW_MS, asked=position)
    assert late.log.log_end_offset == leader.log.log_end_offset
    assert late.partition.high_watermark == leader.partition.high_watermark
    for node in nodes:
        assert contents(node) == {key: value for key, value in latest.items() if value is not None}


@pytest.mark.parametrize("is_compacted", [True, False])
def test_r69_a_replica_that_was_never_in_sync_starts_over_under_another_leader(is_compacted):
    first, second, added = (Node(number, is_compacted=is_compacted) for number in (1, 2, 3))
    nodes = (first, second, added)
    for node in nodes:
        node.role(1, 0, isr=(1, 2))
    for value in (b"a", b"b"):
        batch = bytearray(build_batch([value], [b"key"], timestamps_ms=NOW_MS))
        first.partition.append(batch, check(batch), NOW_MS)
    for _ in range(2):
        second.fetch(first)
    added.fetch(first)
    for node in nodes:
        node.role(1, 1, version=1, isr=(1, 2))  # the same leader in another epoch
    assert added.partition.fetch_position().fetch_offset == 2
    for node in nodes:
        node.role(2, 2, version=2, isr=(1, 2))
    assert added.partition.fetch_position().fetch_offset == (0 if is_compacted else 2)
    assert added.fetch(second).truncated_to == (0 if is_compacted else None)
    added.fetch(second)
    assert added.bytes() == second.bytes()
    for node in nodes:
        node.role(2, 2, version=3)  # in sync now
    for node in nodes:
        node.role(1, 3, version=4, isr=(1, 2))
    assert added.partition.fetch_position().fetch_offset == 2


def test_r69_a_replica_starts_over_where_the_leader_counts_it():
    first, second, added = (Node(number, is_compacted=True) for number in (1, 2, 3))
    for node in (first, second, added):
        node.role(1, 0, isr=(1, 2))
    first.write(b"a", b"b", b"c")
    for _ in range(2):
        second.fetch(first)
    first.delete_before(1)  # the second has not deleted it yet
    added.fetch(first)
    added.fetch(first)
    assert added.log.log_start_offset == 1
    for node in (second, added):
        node.role(2, 1, version=1, isr=(1, 2))
    assert (second.log.log_start_offset, added.partition.fetch_position().fetch_offset) == (0, 1)
    assert added.fetch(second).truncated_to == 1
    added.fetch(second)
    assert (added.log.log_start_offset, added.log.log_end_offset) == (1, 3)


def test_r69_a_replica_goes_on_if_the_same_leader_returns_after_a_time_without_one():
    leader, added = Node(1, is_compacted=True), Node(3, is_compacted=True)
    for node in (leader, added):
        node.role(1, 0, isr=(1,))
    leader.write(b"a")
    added.fetch(leader)
    for leader_id, epoch in ((-1, 1), (1, 2)):  # the leader restarts
        added.role(leader_id, epoch, version=epoch, isr=())
        assert added.partition.fetch_position().fetch_offset == 1
    for leader_id, epoch in ((-1, 3), (2, 4)):
        added.role(leader_id, epoch, version=epoch, isr=())
    assert added.partition.fetch_position().fetch_offset == 0


@pytest.mark.parametrize("added", [(), ((3, 1),)])
@pytest.mark.parametrize("is_replacement", [True, False])
def test_r69_after_a_restart_the_leader_that_filled_a_replica_is_unknown(added, is_replacement):
    leader, follower = Node(1), Node(3, is_compacted=True)
    for node in (leader, follower):
        node.role(1, 0, isr=(1,))
    leader.write(b"a")
    follower.fetch(leader)
    state = PartitionState((1, 2, 3), (1,), 1, 0, 2, added_replicas=added)
    again = Partition(
        follower.partition.key, "a" * 32, follower.log, broker_id=3, is_replacement=is_replacement
    )
    again.become_follower(state)
    assert again.fetch_position().fetch_offset == (0 if added or is_replacement else 1)


def test_r71_a_log_that_must_start_over_is_kept_after_an_unclean_election():
    leader, added = Node(1, is_compacted=True), Node(3, is_compacted=True)
    for node in (leader, added):
        node.role(1, 0, isr=(1,))
    leader.write(b"a")
    added.fetch(leader)
    added.partition.become_follower(PartitionState((1, 2, 3), (2,), 2, 1, 1, loss_epoch=1))
    assert added.log.damage is not None
    assert "the unclean election in epoch 1" in added.log.damage.cause
    assert (added.log.log_start_offset, added.log.log_end_offset) == (0, 1)


def test_r71_a_log_may_have_what_an_unclean_election_lost_until_it_is_compared(pair):
    leader, follower = pair
    assert not follower.partition.may_have_lost_records(1)  # it is empty
    leader.write(b"a", b"b")
    for _ in range(2):
        follower.fetch(leader)
    assert not follower.partition.may_have_lost_records(0)
    assert follower.partition.may_have_lost_records(1)
    for node in pair:
        node.role(1, 1, version=1)
    assert follower.partition.may_have_lost_records(1)
    follower.fetch(leader)  # the leader compares the logs
    assert not follower.partition.may_have_lost_records(1)
    assert follower.partition.may_have_lost_records(2)
    leader.write(b"c")
    follower.fetch(leader)
    for node in pair:
        node.role(1, 2, version=2)
    assert not follower.partition.may_have_lost_records(1)  # it has a later batch


def test_a_follower_deletes_what_its_leader_has_deleted(pair):
    leader, follower = pair
    leader.role(1, 0, version=1, isr=(1,))
    leader.write(b"a", b"b", b"c")
    follower.fetch(leader)
    leader.delete_before(2)
    assert leader.partition.low_watermark == 2  # 2 is not in sync
    leader.role(1, 0, version=2, isr=(1, 2))
    assert leader.partition.low_watermark == 0
    assert follower.fetch(leader).log_start_moved
    follower.fetch(leader)
    assert (follower.log.log_start_offset, leader.partition.low_watermark) == (2, 2)


def test_a_refused_offset_inside_the_leaders_log_is_an_error(pair):
    leader, follower = pair
    leader.write(b"a")
    follower.fetch(leader)
    answer, data = follower.ask(leader)
    refused = answer._replace(error_code=1, log_start_offset=0)
    with pytest.raises(OffsetOutOfRangeError):
        follower.partition.on_fetched(refused, data[:0], now_ms=NOW_MS)
    with pytest.raises(FencedLeaderEpochError):
        follower.partition.on_fetched(answer._replace(error_code=74, leader_epoch=9), data, now_ms=NOW_MS)


def test_an_offline_log_does_not_follow(pair):
    leader, follower = pair
    follower.log.offline_reason = "write failed"
    with pytest.raises(KafkaStorageError):
        follower.partition.fetch_position()
    answer = ReplicaFetchedPartition("a" * 32, 0, 0, None, 0, 0, 0, -1, -1, 0)
    with pytest.raises(KafkaStorageError):
        follower.partition.on_fetched(answer, memoryview(b""), now_ms=NOW_MS)
    with pytest.raises(NotLeaderOrFollowerError):
        leader.partition.fetch_position()


def test_a_partition_without_a_leader_for_a_while():
    node = Node(1)
    node.role(1, 0)
    node.write(b"a")
    node.role(-1, 1, version=1)
    assert (node.partition.role, node.partition.leader_id, node.partition.is_leader) == (
        "follower",
        -1,
        False,
    )
    node.role(-1, 1, version=2)
    assert node.partition.partition_epoch == 2
    node.role(1, 2, version=3)
    assert node.log.leader_epochs == [(0, 0), (2, 1)]


def test_a_new_leader_starts_from_the_high_watermark_in_the_metadata():
    node = Node(1)
    node.role(2, 0)
    source = Node(2)
    source.role(2, 0)
    source.write(b"a", b"b")
    node.fetch(source)
    state = PartitionState((1, 2, 3), (1, 2), 1, 1, 1)
    node.partition.become_leader(state, known_high_watermark=1)
    assert node.partition.high_watermark == 1
    state = state._replace(leader_epoch=2, partition_epoch=2)
    node.partition.become_leader(state, known_high_watermark=2)
    assert node.partition.high_watermark == 2
    assert node.log.damage is None


def test_r48_a_log_that_ends_below_the_high_watermark_is_damaged(mutant):
    node = Node(1)
    node.role(1, 0)
    node.write(b"a", b"b")
    node.role(2, 1)
    state = PartitionState((1, 2, 3), (1,), 1, 2, 2)
    node.partition.become_leader(state, known_high_watermark=9)
    damage = node.log.damage
    assert (damage.sound_end_offset, damage.records_in_doubt) == (2, 7)
    assert "ends at 2 below the committed offset 9" in node.partition.offline_reason
    with pytest.raises(KafkaStorageError, match="below the committed offset 9"):
        node.write(b"c")


def test_r48_without_the_rule_the_loss_is_hidden(mutant):
    mutant("R48-clamped")
    node = Node(1)
    node.partition.become_leader(PartitionState((1, 2, 3), (1,), 1, 2, 2), known_high_watermark=9)
    assert node.log.damage is None


def committed_pair() -> tuple[Node, Node]:
    """A follower with four committed records, and a replica that has lost all but one of them."""
    old, follower, short = Node(3), Node(2), Node(1)
    for node in (old, follower, short):
        node.role(3, 0, isr=(3,))
    old.write(b"a")
    short.fetch(old)
    old.write(b"b", b"c", b"d")
    follower.fetch(old)
    assert follower.partition.high_watermark == 4
    short.role(1, 1)
    return short, follower


def test_r49_a_follower_keeps_committed_records_that_its_leader_lacks():
    short, follower = committed_pair()
    follower.role(1, 1)
    with pytest.raises(ShortLeaderError, match="leader 1 of t-0 lacks 3 committed records") as caught:
        follower.fetch(short)
    assert (caught.value.offset, caught.value.committed_end) == (1, 4)
    assert follower.log.log_end_offset == 4


def test_r49_an_unclean_election_accepts_the_loss():
    short, follower = committed_pair()
    state = PartitionState((1, 2, 3), (1,), 1, 1, 1, loss_epoch=1)
    follower.partition.become_follower(state)
    step = follower.fetch(short)
    assert (step.truncated_to, step.lost_records) == (1, 3)
    assert follower.log.log_end_offset == 1


def test_r49_a_loss_that_was_accepted_earlier_accepts_no_other():
    short, follower = committed_pair()
    state = PartitionState((1, 2, 3), (1,), 1, 1, 1, loss_epoch=0)
    follower.partition.become_follower(state)
    with pytest.raises(ShortLeaderError):
        follower.fetch(short)


@pytest.mark.parametrize(("isr", "elr", "is_kept"), [((1,), (2,), True), ((1,), (), False)])
def test_r49_after_a_restart_the_metadata_has_the_high_watermark_of_a_member(isr, elr, is_kept):
    short, follower = committed_pair()
    again = Partition(follower.partition.key, "a" * 32, follower.log, broker_id=2)
    follower.partition = again
    state = PartitionState((1, 2, 3), isr, 1, 1, 1, elr)
    again.become_follower(state, known_high_watermark=3)
    assert again.committed_end == (3 if is_kept else 0)
    if is_kept:
        with pytest.raises(ShortLeaderError, match="lacks 2 committed records"):
            follower.fetch(short)
    else:
        assert follower.fetch(short).truncated_to == 1


def test_r49_without_the_rule_a_short_leader_deletes_committed_records(mutant):
    mutant("R49-any-truncation")
    short, follower = committed_pair()
    follower.role(1, 1)
    assert follower.fetch(short).truncated_to == 1
