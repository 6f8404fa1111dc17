"""The in-sync set: joining, leaving, pending proposals (R6, R8, R9, R12 to R15)."""

from __future__ import annotations

import pytest

from kafkalite.errors import LogOfflineError, NotEnoughReplicasAfterAppendError, NotEnoughReplicasError
from kafkalite.metadata.image import PartitionState
from kafkalite.replication.partition import PartitionSettings


class Isr:
    """A leader with followers 2 and 3, which fetch by offsets alone."""

    def __init__(self, new_leader, *, isr=(1, 2, 3), minimum=1, records=0, **config) -> None:
        self.leader = new_leader(
            lead=False,
            settings=PartitionSettings(min_insync_replicas=minimum),
            **{"durability": "page-cache", **config},
        )
        self.partition = self.leader.partition
        self.now_ms = 1_000
        self.epochs = {2: 20, 3: 30}
        self.state(isr, version=0)
        for _ in range(records):
            self.leader.append(b"x", acks=1)

    def state(self, isr, *, version, epoch=0):
        state = PartitionState((1, 2, 3), isr, 1, epoch, version)
        return self.partition.become_leader(state, now_ms=self.now_ms)

    def fetch(self, replica_id, offset, *, synced=None, last_epoch=0, broker_epoch=None):
        return self.partition.on_replica_fetch(
            replica_id,
            broker_epoch=broker_epoch or self.epochs[replica_id],
            leader_epoch=self.partition.leader_epoch,
            fetch_offset=offset,
            last_epoch=last_epoch if offset else -1,
            synced_end_offset=offset if synced is None else synced,
            log_start_offset=0,
            now_ms=self.now_ms,
        )

    def propose(self, lag=10_000):
        return self.partition.propose_isr(self.now_ms, lag_time_max_ms=lag, live=self.epochs.get)


def test_r7_a_follower_counts_for_what_it_has_synced(new_leader):
    isr = Isr(new_leader, records=5)
    isr.fetch(2, 5, synced=1)
    isr.fetch(3, 5)
    assert isr.partition.high_watermark == 5  # with the page cache its log end counts
    isr = Isr(new_leader, records=5, durability="fsync")
    isr.leader.sync()
    isr.fetch(2, 5, synced=1)
    assert isr.fetch(3, 5, synced=9).moved
    assert isr.partition.high_watermark == 1
    assert isr.fetch(2, 5).moved
    assert isr.partition.high_watermark == 5


def test_r4_a_leader_with_a_damaged_log_truncates_no_follower(new_leader):
    """Its epochs may be wrong, and a follower removed an acknowledged record."""
    isr = Isr(new_leader, records=5)
    isr.partition.log._go_offline("damaged")
    with pytest.raises(LogOfflineError, match="damaged"):
        isr.fetch(2, 9)


def test_r4_a_diverging_fetch_does_not_count(new_leader):
    isr = Isr(new_leader, records=5)
    isr.fetch(3, 5)
    result = isr.fetch(2, 9)
    assert (result.diverging, result.moved) == ((0, 5), False)
    assert isr.partition.high_watermark == 0
    isr.fetch(2, 5)
    assert isr.partition.high_watermark == 5


def test_r12_a_replica_joins_with_all_committed_records_and_the_start_of_the_epoch(new_leader):
    isr = Isr(new_leader, isr=(1,), records=3)
    assert isr.partition.high_watermark == 3
    isr.fetch(2, 2)
    assert isr.propose() is None
    assert isr.fetch(2, 3).may_join
    change = isr.propose()
    assert (change.isr, change.isr_broker_epochs) == ([1, 2], [-1, 20])
    assert (change.leader_epoch, change.partition_epoch) == (0, 0)


def test_r12_the_start_of_the_epoch_counts_where_the_high_watermark_lags(new_leader):
    isr = Isr(new_leader, isr=(1, 3), records=3)
    isr.state((1, 3), version=1, epoch=2)
    assert isr.partition.high_watermark == 0
    assert not isr.fetch(2, 2).may_join
    assert isr.fetch(2, 3).may_join


def test_r68_a_replica_joins_with_what_it_had_synced_when_it_reached_the_high_watermark(new_leader):
    isr = Isr(new_leader, isr=(1,), records=3)
    assert not isr.fetch(2, 3, synced=0).may_join
    assert isr.propose() is None
    isr.leader.append(b"more", acks=1)
    assert not isr.fetch(2, 4, synced=2).may_join
    assert isr.fetch(2, 4, synced=3).may_join  # with the page cache, records since then need no sync
    assert isr.propose().isr == [1, 2]


def test_r68_a_replica_that_has_left_or_opens_a_session_must_sync_again(new_leader):
    isr = Isr(new_leader, isr=(1, 3), records=3)
    isr.fetch(3, 3, synced=0)
    assert isr.partition.high_watermark == 3  # a replica that is in sync counts by its log end
    isr.state((1,), version=1)
    isr.leader.append(b"more", acks=1)
    assert not isr.fetch(3, 4, synced=3).may_join
    assert isr.fetch(3, 4, synced=4).may_join
    isr.partition.forget_follower(3)
    assert not isr.fetch(3, 4, synced=3).may_join


def test_r68_what_must_be_synced_reaches_the_start_of_the_epoch(new_leader):
    isr = Isr(new_leader, isr=(1, 3), records=3)
    isr.state((1, 3), version=1, epoch=2)
    isr.fetch(2, 2, synced=0)  # at the high watermark, 0, and before the start of the epoch
    assert not isr.fetch(2, 3, synced=2).may_join
    assert isr.fetch(2, 3, synced=3).may_join


def test_r68_a_replica_that_lags_or_has_joined_must_sync_again(new_leader):
    isr = Isr(new_leader, isr=(1,), records=3)
    isr.fetch(2, 3, synced=0)
    isr.leader.append(b"more", acks=1)
    isr.now_ms += 10_001
    assert isr.propose() is None
    assert not isr.fetch(2, 4, synced=3).may_join
    assert isr.fetch(2, 4, synced=4).may_join
    isr.state((1, 2), version=1)
    isr.state((1,), version=2)  # it has left before it fetched again
    isr.leader.append(b"more", acks=1)
    assert not isr.fetch(2, 5, synced=4).may_join


def test_r68_the_high_watermark_does_not_wait_for_a_sync(new_leader):
    isr = Isr(new_leader, isr=(1,), records=3)
    isr.fetch(2, 3, synced=0)
    isr.leader.append(b"more", acks=1)
    assert not isr.fetch(2, 3, synced=0).may_join
    assert (isr.propose(), isr.partition.is_awaiting_replica) == (None, False)
    assert isr.fetch(2, 3, synced=3).may_join  # soon
    assert (isr.propose(), isr.partition.is_awaiting_replica) == (None, True)


def test_r12_r13_only_the_live_incarnation_that_fetched_joins(new_leader):
    isr = Isr(new_leader, isr=(1,))
    isr.fetch(2, 0)
    isr.epochs[2] = 21  # registered again since
    assert isr.propose() is None
    del isr.epochs[2]  # fenced
    assert isr.propose() is None
    isr.epochs[2] = 20
    assert isr.propose() is not None


def test_r12_a_replica_that_stopped_fetching_joins_only_by_another_fetch(new_leader):
    isr = Isr(new_leader, isr=(1, 3), records=2)
    isr.fetch(3, 2)
    isr.fetch(2, 2)
    isr.partition.forget_follower(2)
    assert isr.propose() is None
    assert isr.partition.high_watermark == 2
    isr.fetch(2, 2)
    assert isr.propose().isr == [1, 2, 3]
    isr.partition.resign()
    isr.partition.forget_follower(2)  # a replica that does not lead has no followers


def test_r8_a_replica_in_sync_that_stopped_fetching_holds_the_high_watermark_back(new_leader):
    isr = Isr(new_leader, records=2)
    isr.fetch(2, 2)
    isr.partition.forget_follower(2)
    assert not isr.fetch(3, 2).moved
    assert isr.fetch(2, 2).moved
    assert isr.partition.high_watermark == 2


def test_r14_while_a_decision_is_due_nothing_else_is_proposed(new_leader):
    isr = Isr(new_leader, isr=(1,))
    isr.fetch(2, 0)
    first = isr.propose()
    assert isr.propose() is None
    assert not isr.fetch(3, 0).may_join
    isr.partition.on_undecided()
    assert isr.propose() == first
    isr.state((1, 2), version=1)
    assert isr.partition.in_sync_replicas == {1, 2}
    assert isr.propose().isr == [1, 2, 3]


def test_r8_a_replica_that_may_have_been_admitted_holds_the_high_watermark_back(new_leader):
    isr = Isr(new_leader, isr=(1,))
    isr.fetch(2, 0)
    isr.propose()
    isr.leader.append(b"x")
    assert isr.partition.high_watermark == 0
    isr.partition.on_undecided()
    isr.leader.append(b"x")
    assert isr.partition.high_watermark == 0
    assert isr.fetch(2, 1).moved
    assert isr.partition.high_watermark == 1
    assert isr.state((1,), version=1)  # the refusal is in the metadata: 2 is out
    assert isr.partition.high_watermark == 2
    assert (isr.partition.in_sync_replicas, isr.partition.partition_epoch) == ({1}, 1)


def test_r14_a_proposal_stands_without_a_greater_partition_epoch(new_leader):
    isr = Isr(new_leader, isr=(1,))
    isr.fetch(2, 0)
    change = isr.propose()
    assert not isr.state((1,), version=0)
    isr.partition.on_undecided()
    isr.leader.append(b"x")
    assert isr.partition.high_watermark == 0
    assert isr.propose() == change


def test_an_older_state_changes_nothing(new_leader):
    isr = Isr(new_leader, isr=(1,))
    isr.state((1, 2, 3), version=2)
    isr.state((1, 2), version=1)
    assert (isr.partition.in_sync_replicas, isr.partition.partition_epoch) == ({1, 2, 3}, 2)


def test_r15_a_replica_that_does_not_keep_up_leaves(new_leader):
    isr = Isr(new_leader)
    isr.now_ms += 5_000
    isr.leader.append(b"x")
    isr.fetch(2, 1)
    isr.now_ms += 5_001
    assert isr.propose().isr == [1, 2]


def test_r15_an_idle_partition_keeps_its_isr(new_leader):
    isr = Isr(new_leader, records=2)
    isr.fetch(2, 2)
    isr.fetch(3, 2)
    for _ in range(5):
        isr.now_ms += 60_000
        assert isr.propose() is None
    isr.leader.append(b"x")
    isr.now_ms += 9_000
    assert isr.propose() is None
    isr.now_ms += 2_000
    assert isr.propose().isr == [1]


def test_r15_a_replica_that_is_always_a_little_behind_stays(new_leader):
    isr = Isr(new_leader)
    for number in range(50):
        isr.leader.append(b"x")
        isr.leader.append(b"x")
        isr.now_ms += 1_000
        isr.fetch(2, 2 * number)
        isr.fetch(3, 2 * number + 1)
        assert isr.propose(lag=4_000) is None


def test_r6_waiting_for_all_ends_when_too_few_are_left(new_leader):
    isr = Isr(new_leader, minimum=2, records=1)
    assert isr.partition.acknowledgement_error is None
    isr.state((1,), version=1)
    error = isr.partition.acknowledgement_error
    assert isinstance(error, NotEnoughReplicasAfterAppendError)
    with pytest.raises(NotEnoughReplicasError):
        isr.leader.append(b"y")
    isr.fetch(2, 1)
    isr.fetch(3, 1)
    assert isr.partition.high_watermark == 0  # R9
    assert isr.state((1, 2), version=2)
    assert (isr.partition.high_watermark, isr.partition.acknowledgement_error) == (1, None)


def test_r6_more_in_sync_than_there_are_replicas_is_never_met(new_leader):
    isr = Isr(new_leader, minimum=4)
    with pytest.raises(NotEnoughReplicasError):
        isr.leader.append(b"y")


def test_a_replica_that_does_not_lead_has_no_followers(new_leader):
    partition = new_leader(lead=False).partition
    assert partition.propose_isr(0, lag_time_max_ms=0, live={}.get) is None
    partition.on_undecided()
    assert partition.in_sync_replicas == frozenset()
    assert partition.low_watermark == 0
