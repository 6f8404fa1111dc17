"""Reassignments: a partition's replicas are replaced by others (KIP-455), R60 to R62."""

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.metadata.controller import decide
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.placement import add_replicas
from kafkalite.metadata.reassignment_commands import ContinueReassignments
from kafkalite.protocol.messages.admin import (
    AlterPartitionReassignmentsRequest,
    ListPartitionReassignmentsRequest,
    PartitionReassignment,
    ReassignedPartition,
)


@pytest.fixture
def five(new_metadata):
    """Five live brokers, and the topic orders on 1, 2 and 3, with min.insync.replicas=2."""
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2, 3):
        metadata.register(node_id)
        metadata.unfence(node_id)
    metadata.create("orders", factor=3, configs={"min.insync.replicas": "2"})
    for node_id in (4, 5):
        metadata.register(node_id)
        metadata.unfence(node_id)
    lead(metadata, metadata.state().replicas[0])
    return metadata


def lead(metadata, node_id):
    assert metadata.state().leader == node_id


def reassign(metadata, replicas, name="orders", number=0, *, may_change_factor=False):
    item = PartitionReassignment(name, number, replicas)
    response = metadata.submit(AlterPartitionReassignmentsRequest(1_000, may_change_factor, [item]))
    return ErrorCode(response.partitions[0].error_code)


def cancel(metadata, name="orders"):
    return reassign(metadata, None, name)


def ongoing(metadata, partitions=None):
    return metadata.submit(ListPartitionReassignmentsRequest(1_000, partitions)).partitions


def original(metadata):
    return list(metadata.state().replicas)


def test_new_replicas_are_added_and_begin_out_of_sync(five) -> None:
    a, b, c = original(five)
    before = five.state()
    assert reassign(five, [a, b, 4]) == 0
    state = five.state()
    assert state.replicas == (a, b, c, 4)
    assert state.isr == (a, b, c)
    assert state.adding_replicas == (4,)
    assert state.removing_replicas == (c,)
    assert state.original_replicas == (a, b, c)
    assert state.replica_epoch(4) == state.partition_epoch == before.partition_epoch + 1
    assert state.leader_epoch == before.leader_epoch  # nothing was removed


def test_the_isr_that_has_the_new_replicas_ends_the_reassignment(five) -> None:
    a, b, c = original(five)
    reassign(five, [a, 4, 5])
    epoch = five.state().leader_epoch
    assert five.propose([a, b, c, 4]).error_code == 0
    assert five.state().is_reassigning
    result = five.propose([a, b, c, 4, 5])
    assert (result.error_code, result.isr) == (0, [a, 4, 5])
    state = five.state()
    assert state.replicas == state.isr == (a, 4, 5)
    assert (state.target_replicas, state.added_replicas) == ((), ())
    assert (state.leader, state.leader_epoch) == (a, epoch + 1)  # R61


def test_a_leader_that_leaves_is_succeeded_by_a_replica_of_the_target(five) -> None:
    a, b, c = original(five)
    reassign(five, [4, 5, b])
    five.propose([a, b, c, 4, 5])
    assert (five.state().leader, five.state().replicas) == (4, (4, 5, b))


def test_it_waits_until_enough_of_the_target_are_in_sync(five) -> None:
    """R60: with 4 alone in sync, an acknowledged record would have one copy."""
    a, b, c = original(five)
    reassign(five, [4, b, c])
    five.fence(b)
    five.fence(c)
    five.propose([a, 4])
    assert five.state().is_reassigning
    five.unfence(b)
    five.propose([a, b, 4])
    assert five.state().replicas == (4, b, c)


@pytest.mark.parametrize("is_in_file", [True, False])
def test_the_default_of_min_insync_replicas_counts(five, is_in_file) -> None:
    """R60: without an override of the topic, its leader uses the broker's default."""
    a, b, c = original(five)
    five.alter("topic", "orders", {"min.insync.replicas": None})
    if is_in_file:
        five.settings = ControllerSettings(topic_defaults={"min.insync.replicas": 2})
    else:
        five.settings = ControllerSettings(node_id=5)
        five.alter("broker", "5", {"min.insync.replicas": "2"})
    reassign(five, [4, b, c])
    five.fence(b)
    five.fence(c)
    five.propose([a, 4])
    five.submit(ContinueReassignments())
    reassign(five, [4, b, c])
    assert set(five.state().isr) == {a, 4}
    five.unfence(b)
    five.propose([a, b, 4])
    assert five.state().replicas == (4, b, c)


def test_it_does_not_wait_for_a_replica_that_is_kept(five) -> None:
    """As Kafka's controller: a dead replica that stays delays nothing if enough others are in sync."""
    a, b, c = original(five)
    five.fence(c)
    reassign(five, [4, b, c])
    five.propose([a, b, 4])
    assert five.state().replicas == (4, b, c)
    assert five.state().isr == (4, b)


def test_replicas_are_removed_at_once_when_none_is_added(five) -> None:
    a, b, _ = original(five)
    assert reassign(five, [a, b], may_change_factor=True) == 0
    assert five.state().replicas == (a, b)
    assert ongoing(five) == []


def test_another_order_of_the_same_replicas_changes_only_the_preferred_leader(five) -> None:
    a, b, c = original(five)
    before = five.state()
    assert reassign(five, [c, a, b]) == 0
    assert five.state().replicas == five.state().isr == (c, a, b)
    assert (five.state().leader, five.state().leader_epoch) == (a, before.leader_epoch)


@pytest.mark.parametrize("in_sync", [[], [4]])
def test_a_cancellation_returns_to_the_original_replicas(five, in_sync) -> None:
    a, b, c = original(five)
    reassign(five, [4, 5, a])
    five.propose([a, b, c, *in_sync])
    epoch = five.state().leader_epoch
    assert cancel(five) == 0
    state = five.state()
    assert state.replicas == state.isr == (a, b, c)
    assert not state.is_reassigning
    assert state.leader_epoch == epoch + 1
    assert cancel(five) == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


def test_a_cancellation_waits_for_copies_of_what_a_new_replica_holds(five) -> None:
    """The leader is the last original replica in sync: 4 has the only other copy of the last records."""
    a, b, c = original(five)
    reassign(five, [4, 5, b])
    five.propose([a, b, c, 4])
    five.fence(b)
    five.fence(c)
    five.propose([a, 4])
    assert cancel(five) == 0
    state = five.state()
    assert state.replicas == (a, b, c, 4)  # 5 had no role
    assert (state.adding_replicas, state.removing_replicas) == ((), (4,))
    five.unfence(b)
    five.propose([a, b, 4])
    assert five.state().replicas == (a, b, c)
    assert five.state().isr == (a, b)


def test_a_new_target_replaces_the_running_one(five) -> None:
    a, b, c = original(five)
    reassign(five, [a, b, 4])
    since = five.state().replica_epoch(4)
    assert reassign(five, [a, 4, 5]) == 0
    state = five.state()
    assert state.replicas == (a, b, c, 4, 5)
    assert state.removing_replicas == (b, c)
    assert state.replica_epoch(4) == since
    assert state.replica_epoch(5) == state.partition_epoch
    assert reassign(five, [a, b, 5]) == 0
    assert five.state().replicas == (a, b, c, 5)  # 4 had no role yet
    assert five.state().leader_epoch == state.leader_epoch + 1
    five.propose([a, b, c, 5])
    assert five.state().replicas == (a, b, 5)


def test_a_replica_that_returns_has_a_new_epoch(five) -> None:
    a, b, _ = original(five)
    reassign(five, [a, b, 4])
    first = five.state().replica_epoch(4)
    cancel(five)
    reassign(five, [a, b, 4])
    assert five.state().replica_epoch(4) > first
    before, after = five.deltas[-3].after, five.image
    delta = Delta.to_snapshot(before, after.to_records())  # both changes at once
    delta.apply(after.metadata_offset)
    changes = delta.local_changes(4)
    assert len(changes.deleted) == len(changes.created) == 1


@pytest.mark.parametrize(
    ("replicas", "code"),
    [
        ([], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([1, 2, 2], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([1, 2, 9], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([1, 2], ErrorCode.INVALID_REPLICATION_FACTOR),
        ([1, 2, 3, 4], ErrorCode.INVALID_REPLICATION_FACTOR),
        (None, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
    ],
)
def test_what_is_refused(five, replicas, code) -> None:
    before = five.image
    assert reassign(five, replicas) == code
    assert five.image is before


def test_other_refusals(five) -> None:
    assert reassign(five, [1], may_change_factor=True) == ErrorCode.INVALID_REPLICATION_FACTOR
    assert reassign(five, [1, 2, 3], "trades") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert reassign(five, [1, 2, 3], number=1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_refused_partition_does_not_prevent_the_others(five) -> None:
    items = [PartitionReassignment("orders", 7, [1, 2, 3]), PartitionReassignment("orders", 0, [1, 4, 5])]
    response = five.submit(AlterPartitionReassignmentsRequest(1_000, False, items))
    assert [one.error_code for one in response.partitions] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0]
    assert five.state().is_reassigning


def test_reassignments_are_listed(five) -> None:
    a, b, c = original(five)
    five.create("trades", factor=1)
    assert ongoing(five) == []
    reassign(five, [a, 4, 5])
    (found,) = ongoing(five)
    assert tuple(found) == ("orders", 0, [a, b, c, 4, 5], [4, 5], [b, c], [a, b, c])
    assert ongoing(five, [ReassignedPartition("orders", 0), ReassignedPartition("trades", 0)]) == [found]
    assert ongoing(five, [ReassignedPartition("trades", 0), ReassignedPartition("x", 3)]) == []


def test_the_only_copy_leads_again_after_an_unclean_stop(new_metadata) -> None:
    """A replica that was added and never in sync has no record that the original one lacks."""
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2):
        metadata.register(node_id)
        metadata.unfence(node_id)
    metadata.create("orders", factor=1)
    holder = metadata.state().leader
    reassign(metadata, [3 - holder])
    metadata.register(holder)  # page-cache, unclean
    metadata.unfence(holder)
    assert metadata.state().leader == holder
    assert metadata.propose([1, 2]).error_code == 0
    assert metadata.state().replicas == (3 - holder,)


def test_an_unclean_election_prefers_an_original_replica(five) -> None:
    a, b, c = original(five)
    reassign(five, [4, 5, a])
    for node_id in (a, b, c):
        five.register(node_id, directory="f" * 32)  # their disks are gone
    assert five.state().leader == -1
    five.unfence(c)
    five.elect(("orders", 0), unclean=True)
    assert five.state().leader == c


def _fence(metadata, node_id):
    metadata.fence(node_id)


def _restart(metadata, node_id):
    metadata.register(node_id)


def _lose_log(metadata, node_id):
    metadata.lose(node_id, ("orders", 0))


def _allow(metadata, node_id):
    metadata.alter("topic", "orders", {"unclean.leader.election.enable": "false"})
    metadata.fence(node_id)
    metadata.alter("topic", "orders", {"unclean.leader.election.enable": "true"})


@pytest.mark.parametrize("stop", [_fence, _restart, _lose_log, _allow])
def test_no_empty_log_is_elected_automatically(new_metadata, stop) -> None:
    """R60: the move would end with the empty log, and the original replica would delete the only copy."""
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2):
        metadata.register(node_id)
        metadata.unfence(node_id)
    metadata.create("orders", factor=1, configs={"unclean.leader.election.enable": "true"})
    holder = metadata.state().leader
    reassign(metadata, [3 - holder])
    stop(metadata, holder)
    metadata.submit(ContinueReassignments())
    assert (metadata.state().leader, metadata.state().replicas) == (-1, (holder, 3 - holder))
    metadata.elect(("orders", 0), unclean=True)  # an operator accepts the loss
    assert metadata.state().leader == (holder if stop is _lose_log else 3 - holder)


def test_partitions_under_reassignment_keep_their_leader_in_a_balance(five) -> None:
    from kafkalite.metadata.partition_commands import BalanceLeaders

    a, b, c = original(five)
    five.begin_shutdown(a)
    five.fence(a)
    five.unfence(a)
    five.propose([a, b, c])
    assert five.state().leader == b
    reassign(five, [b, c, 4])
    assert five.submit(BalanceLeaders()) == 0
    cancel(five)
    assert five.submit(BalanceLeaders()) == 1


def test_new_partitions_get_the_factor_of_the_target(five) -> None:
    a, _, _ = original(five)
    reassign(five, [a, 4], may_change_factor=True)
    five.grow("orders", 2)
    assert len(five.state("orders", 1).replicas) == 2


def test_a_deleted_topic_ends_its_reassignments(five) -> None:
    a, b, _ = original(five)
    reassign(five, [a, b, 4])
    five.delete("orders")
    assert ongoing(five) == []
    assert five.image.loads == {}


def test_a_lower_minimum_lets_a_reassignment_finish(five) -> None:
    a, b, c = original(five)
    reassign(five, [4, b, c])
    five.fence(b)
    five.fence(c)
    five.propose([a, 4])
    five.alter("topic", "orders", {"min.insync.replicas": "1"})
    assert five.submit(ContinueReassignments()) == 1
    assert (five.state().replicas, five.state().leader) == ((4, b, c), 4)
    assert five.submit(ContinueReassignments()) == 0


def test_internal_topics_grow_when_brokers_join(new_metadata) -> None:
    metadata = new_metadata(brokers=0)
    metadata.register(1)
    metadata.unfence(1)
    metadata.create("__consumer_offsets", partitions=4, factor=1)
    command = ContinueReassignments((("__consumer_offsets", 3), ("__transaction_state", 3)))
    assert metadata.submit(command) == 0
    for node_id in (2, 3, 4, 5):
        metadata.register(node_id)
        metadata.unfence(node_id)
    assert metadata.submit(command) == 4
    assert metadata.submit(command) == 0
    held = [node_id for n in range(4) for node_id in metadata.state("__consumer_offsets", n).replicas]
    assert sorted(held) == [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    state = metadata.state("__consumer_offsets", 0)
    metadata.propose(state.replicas, "__consumer_offsets")
    assert len(metadata.state("__consumer_offsets").isr) == 3
    assert metadata.submit(command) == 0


def test_a_cancellation_lets_an_internal_topic_grow_to_a_live_broker(new_metadata) -> None:
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2):
        metadata.register(node_id)
        metadata.unfence(node_id)
    metadata.fence(2)
    metadata.create("__consumer_offsets", partitions=1, factor=1)
    metadata.unfence(2)
    command = ContinueReassignments((("__consumer_offsets", 2),))
    assert metadata.submit(command) == 1
    metadata.register(3)
    metadata.unfence(3)
    metadata.fence(2)
    assert metadata.submit(command) == 0  # 2 may only restart
    assert cancel(metadata, "__consumer_offsets") == 0
    assert metadata.submit(command) == 1
    assert metadata.state("__consumer_offsets").replicas == (1, 3)


@pytest.mark.parametrize("factor", [1, 2])
def test_an_internal_topic_has_fewer_replicas_if_fewer_are_configured(new_metadata, factor) -> None:
    metadata = new_metadata(brokers=2)
    metadata.create("__consumer_offsets", factor=2)
    assert reassign(metadata, [1], "__consumer_offsets", may_change_factor=True) == 0
    changed = metadata.submit(ContinueReassignments((("__consumer_offsets", factor),)))
    assert changed == factor - 1


def test_added_replicas_are_in_other_racks_if_possible() -> None:
    racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    assert add_replicas((1,), 2, racks, {3: 5, 4: 1}) == (1, 4)
    assert add_replicas((1, 4), 3, racks, {}) == (1, 4, 2)
    assert add_replicas((1, 4), 9, racks, {}) == (1, 4, 2, 3)
    assert add_replicas((9,), 2, racks, {}) == (9, 1)


def test_a_repeated_request_changes_nothing(five) -> None:
    a, b, _ = original(five)
    reassign(five, [a, b, 4])
    before = five.image
    assert reassign(five, [a, b, 4]) == 0
    assert five.image is before


def test_a_decision_is_pure(five) -> None:
    item = PartitionReassignment("orders", 0, [1, 4, 5])
    command = AlterPartitionReassignmentsRequest(1_000, False, [item])
    steps = [decide(five.image, command, now_ms=1, rng=five.rng, settings=five.settings) for _ in range(2)]
    assert steps[0] == steps[1]
    assert not five.state().is_reassigning
