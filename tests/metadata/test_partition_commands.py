"""ISR proposals, elections, balancing and high watermarks: acceptances, and the effects of refusals."""

from __future__ import annotations

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.metadata import partition_commands
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.partition_commands import BalanceLeaders
from kafkalite.metadata.records import NO_LEADER
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    CheckpointHighWatermarksRequest,
    PartitionHighWatermark,
)


def roles(state):
    return (state.leader, state.isr, state.elr, state.last_known_elr)


def test_r13_an_accepted_proposal_is_the_isr_and_moves_the_partition_epoch(cluster):
    before = cluster.state()
    answer = cluster.propose([1, 2])
    after = cluster.state()
    assert (answer.error_code, answer.isr, answer.partition_epoch) == (0, [1, 2], before.partition_epoch + 1)
    assert (after.isr, after.partition_epoch) == ((1, 2), answer.partition_epoch)
    assert after.leader_epoch == before.leader_epoch == answer.leader_epoch
    # Stored in the order of the replicas, whatever the order of the request.
    cluster.propose([3, 2, 1])
    assert cluster.state().isr == (1, 2, 3)


def test_r13_the_partition_epoch_is_compared(cluster, mutant):
    old = cluster.proposal([1])
    cluster.propose([1, 2])
    image = cluster.image
    answer = cluster.submit(old).partitions[0]
    assert (answer.error_code, answer.isr) == (ErrorCode.INVALID_UPDATE_VERSION, [1, 2])
    assert cluster.image is image
    mutant("R13-no-cas")
    assert cluster.submit(old).partitions[0].error_code == 0


def test_r13_only_the_leader_in_its_epoch_may_propose(cluster):
    old = cluster.proposal([1, 2])
    cluster.fence(1)
    cluster.unfence(1)
    image = cluster.image
    assert cluster.submit(old).partitions[0].error_code == ErrorCode.FENCED_LEADER_EPOCH
    answer = cluster.propose([1, 2], sender=1)
    assert (answer.error_code, answer.leader_id) == (ErrorCode.NEW_LEADER_ELECTED, 2)
    answer = cluster.propose([2, 3], leader_epoch=99)
    assert answer.error_code == ErrorCode.NEW_LEADER_ELECTED
    assert cluster.image is image


def test_r13_an_earlier_process_of_the_leader_is_refused(cluster):
    image = cluster.image
    assert cluster.propose([1, 2], broker_epoch=0).error_code == ErrorCode.STALE_BROKER_EPOCH
    unknown = cluster.submit(AlterPartitionRequest(9, 1, []))
    assert (unknown.error_code, unknown.partitions) == (ErrorCode.BROKER_ID_NOT_REGISTERED, [])
    assert cluster.image is image


def test_an_unknown_resource_cannot_be_changed(cluster):
    answer = cluster.propose([1], topic_id="f" * 32)
    assert (answer.error_code, answer.partition_epoch) == (ErrorCode.UNKNOWN_TOPIC_ID, -1)
    for number in (1, -1):
        answer = cluster.propose([1], partition=number)
        assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


REFUSED = [
    ({"isr": [2, 3]}, ErrorCode.INVALID_REQUEST, "must include the leader 1"),
    ({"isr": [1, 2, 9]}, ErrorCode.INVALID_REQUEST, "only replicas of"),
    ({"isr": [1, 2, 2]}, ErrorCode.INVALID_REQUEST, "has duplicates"),
    ({"isr": [1, 2], "isr_broker_epochs": [-1]}, ErrorCode.INVALID_REQUEST, "differs in length"),
    ({"isr": [1, 2, 3]}, ErrorCode.INELIGIBLE_REPLICA, "broker 3 is not live"),
]


@pytest.mark.parametrize(("how", "code", "message"), REFUSED)
def test_r14_a_refusal_on_the_merits_is_durable(cluster, how, code, message, mutant):
    cluster.fence(3)
    before = cluster.state()
    proposal = cluster.proposal(how.pop("isr"), **how)
    answer = cluster.submit(proposal).partitions[0]
    assert answer.error_code == code
    assert message in answer.error_message
    after = cluster.state()
    assert after.partition_epoch == answer.partition_epoch == before.partition_epoch + 1
    assert roles(after) == roles(before)
    assert after.leader_epoch == before.leader_epoch
    # A delayed copy has an old epoch, and is refused although its content is valid now.
    cluster.unfence(3)
    image = cluster.image
    assert cluster.submit(proposal).partitions[0].error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert cluster.image is image
    mutant("R14-revert")
    before = cluster.state()
    cluster.propose([2, 3])
    assert cluster.state() == before


def test_r13_a_replica_joins_in_the_epoch_it_was_seen_in(cluster, mutant):
    cluster.fence(3)
    cluster.unfence(3)
    seen = cluster.proposal([1, 2, 3])
    cluster.register(3, clean=True)
    cluster.unfence(3)
    answer = cluster.submit(seen).partitions[0]
    assert answer.error_code == ErrorCode.INELIGIBLE_REPLICA
    assert "but is registered with epoch" in answer.error_message
    mutant("R13-no-broker-epoch")
    assert cluster.propose([1, 2, 3], isr_broker_epochs=[-1, -1, 0]).error_code == 0
    assert cluster.state().isr == (1, 2, 3)


def test_r13_members_that_stay_need_no_epoch(cluster):
    assert cluster.propose([1, 2], isr_broker_epochs=[-1, -1]).error_code == 0


def test_r12_a_broker_that_shuts_down_does_not_join_an_isr(cluster):
    cluster.begin_shutdown(3)
    assert cluster.state().isr == (1, 2)
    assert cluster.propose([1, 2, 3]).error_code == ErrorCode.INELIGIBLE_REPLICA


def test_r14_a_proposal_without_a_change_is_written_too(cluster):
    before = cluster.state().partition_epoch
    assert cluster.propose([1, 2, 3]).partition_epoch == before + 1


def test_r16_a_leader_that_shrinks_below_the_minimum_keeps_the_leavers_eligible(cluster):
    cluster.propose([1, 2])
    assert roles(cluster.state()) == (1, (1, 2), (), ())
    cluster.propose([1])
    assert roles(cluster.state()) == (1, (1,), (2,), ())
    cluster.propose([1, 3])
    assert roles(cluster.state()) == (1, (1, 3), (), ())


def test_r16_as_many_as_there_are_replicas_are_enough(cluster):
    cluster.create("small", factor=1, configs={"min.insync.replicas": "3"})
    node_id = cluster.state("small").leader
    cluster.fence(node_id)
    assert roles(cluster.state("small")) == (NO_LEADER, (), (node_id,), ())
    cluster.unfence(node_id)
    assert roles(cluster.state("small")) == (node_id, (node_id,), (), ())


def test_one_partition_twice_in_a_request_is_changed_once(cluster):
    request = cluster.proposal([1, 2])
    twice = request._replace(partitions=request.partitions * 2)
    first, second = cluster.submit(twice).partitions
    assert (first.error_code, second.error_code) == (0, ErrorCode.INVALID_UPDATE_VERSION)
    assert second.partition_epoch == first.partition_epoch == cluster.state().partition_epoch


# --- min.insync.replicas


def test_r16_a_smaller_minimum_ends_eligibility_before_the_leader_can_know_of_it(cluster):
    cluster.fence(3)
    cluster.fence(2)
    assert cluster.state().elr == (2,)
    offset = cluster.image.metadata_offset
    cluster.alter("topic", "orders", {"min.insync.replicas": "1"})
    assert roles(cluster.state()) == (1, (1,), (), ())
    assert cluster.image.metadata_offset == offset + 1


def test_r16_a_minimum_that_is_still_not_met_leaves_the_eligible_ones(cluster):
    cluster.alter("topic", "orders", {"min.insync.replicas": "3"})
    cluster.fence(3)
    cluster.fence(2)
    cluster.alter("topic", "orders", {"min.insync.replicas": "2"})
    assert cluster.state().elr == (2, 3)
    cluster.alter("topic", "orders", {"min.insync.replicas": None})
    assert cluster.state().elr == ()


def test_r16_the_controllers_own_minimum_is_written_to_new_topics(new_metadata):
    """A leader uses its own broker's default, the controller the topic's config: both must be the same
    number.
    """
    settings = ControllerSettings(topic_defaults={"min.insync.replicas": 2, "retention.ms": 5})
    metadata = new_metadata(brokers=3, settings=settings)
    metadata.create("a", factor=3)
    metadata.create("b", factor=3, configs={"min.insync.replicas": "1"})
    assert metadata.image.topic_configs("a") == {"min.insync.replicas": "2"}
    assert metadata.image.topic_configs("b") == {"min.insync.replicas": "1"}


# --- elections


def test_the_preferred_replica_leads_again_when_asked(cluster):
    cluster.create("audit", factor=1)
    cluster.fence(1)
    cluster.unfence(1)
    (answer,) = cluster.elect(("orders", 0)).partitions
    assert answer.error_code == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert (answer.leader_id, answer.error_message) == (2, "broker 1 is not in sync")
    cluster.propose([1, 2, 3])
    before = cluster.state()
    (answer,) = cluster.elect(("orders", 0)).partitions
    assert (answer.error_code, answer.leader_id) == (0, 1)
    after = cluster.state()
    assert (after.leader, after.isr) == (1, (1, 2, 3))
    assert (after.leader_epoch, after.partition_epoch) == (
        before.leader_epoch + 1,
        before.partition_epoch + 1,
    )
    (answer,) = cluster.elect(("orders", 0)).partitions
    assert answer.error_code == ErrorCode.ELECTION_NOT_NEEDED


def test_asked_for_all_only_those_are_answered_that_needed_it(cluster):
    cluster.create("audit", partitions=3, factor=3)
    cluster.fence(1)
    cluster.unfence(1)
    for name, topic in cluster.image.topics.items():
        for number in range(len(topic.partitions)):
            cluster.propose([1, 2, 3], name, number)
    elected = cluster.elect().partitions
    assert [(item.error_code, item.leader_id) for item in elected] == [(0, 1)] * 2
    assert cluster.elect().partitions == []


def test_elections_of_unknown_and_repeated_partitions_are_refused(cluster):
    answers = cluster.elect(("orders", 0), ("orders", 0), ("orders", 7), ("none", 0)).partitions
    assert [answer.error_code for answer in answers] == [
        ErrorCode.ELECTION_NOT_NEEDED,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def leaderless(cluster):
    """Two power losses with a page cache: 3 left long ago, 1 and 2 have lost their ends."""
    for node_id in (3, 2, 1):
        cluster.fence(node_id)
    for node_id in (1, 2):
        cluster.register(node_id)
    assert roles(cluster.state()) == (NO_LEADER, (), (), (1, 2))


def test_an_unclean_election_needs_a_request_and_prefers_formerly_eligible_replicas(cluster):
    cluster.checkpoint(100)
    leaderless(cluster)
    (answer,) = cluster.elect(("orders", 0), unclean=True).partitions
    assert answer.error_code == ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
    cluster.unfence(3)
    cluster.unfence(2)
    assert cluster.state().leader == NO_LEADER
    (answer,) = cluster.elect(unclean=True).partitions
    assert (answer.error_code, answer.leader_id) == (0, 2)
    assert roles(cluster.state()) == (2, (2,), (), (1,))
    assert cluster.image.high_watermarks == {}  # committed records may be lost
    (answer,) = cluster.elect(("orders", 0), unclean=True).partitions
    assert answer.error_code == ErrorCode.ELECTION_NOT_NEEDED


def test_an_unclean_election_takes_an_eligible_replica_while_there_is_one(cluster):
    for node_id in (3, 2, 1):
        cluster.fence(node_id)
    cluster.unfence(3)
    cluster.checkpoint(100, sender=3)
    cluster.unfence(2)
    assert roles(cluster.state()) == (2, (2,), (1,), ())


def test_a_topic_may_allow_unclean_elections(cluster):
    leaderless(cluster)
    cluster.unfence(3)
    cluster.alter("topic", "orders", {"unclean.leader.election.enable": "true"})
    assert roles(cluster.state()) == (3, (3,), (), (1, 2))
    # As in Kafka: a live replica leads, although 3 might return with more records.
    cluster.fence(3)
    assert roles(cluster.state()) == (NO_LEADER, (), (3,), (1, 2))
    cluster.unfence(1)
    assert roles(cluster.state()) == (1, (1,), (3,), (2,))


@pytest.mark.parametrize("is_static", [True, False])
def test_a_broker_may_allow_unclean_elections_for_all_topics(cluster, is_static):
    leaderless(cluster)
    option = "unclean.leader.election.enable"
    if is_static:
        cluster.settings = ControllerSettings(topic_defaults={option: True})
    else:
        cluster.settings = ControllerSettings(node_id=1)
        cluster.alter("broker", "1", {option: "true"})
    cluster.unfence(3)
    assert cluster.state().leader == 3
    cluster.fence(3)
    cluster.alter("topic", "orders", {option: "false"})
    cluster.register(3)
    cluster.unfence(3)
    assert cluster.state().leader == NO_LEADER


# --- balance


def test_balancing_elects_preferred_leaders_above_the_imbalance_limit(new_metadata):
    metadata = new_metadata(brokers=3, settings=ControllerSettings(imbalance_per_broker_percentage=40))
    metadata.create("orders", partitions=9, factor=3)
    states = metadata.image.topics["orders"].partitions
    of_one = [number for number, state in enumerate(states) if state.replicas[0] == 1]
    metadata.fence(1)
    metadata.unfence(1)
    assert metadata.submit(BalanceLeaders()) == 0  # it is not in sync with any partition yet
    for number in range(9):
        metadata.propose([1, 2, 3], number=number)
    metadata.elect(("orders", of_one[0]))
    assert metadata.submit(BalanceLeaders()) == 2
    assert [state.leader for state in metadata.image.topics["orders"].partitions] == [
        state.replicas[0] for state in states
    ]
    metadata.fence(1)
    metadata.unfence(1)
    metadata.propose([1, 2, 3], number=of_one[0])
    metadata.propose([1, 2, 3], number=of_one[1])
    metadata.elect(("orders", of_one[0]), ("orders", of_one[1]))
    metadata.propose([1, 2, 3], number=of_one[2])
    assert metadata.submit(BalanceLeaders()) == 0  # one of three is not more than 40 per cent


def test_one_pass_of_the_balance_is_bounded(new_metadata, monkeypatch):
    monkeypatch.setattr(partition_commands, "MAX_ELECTIONS_PER_BALANCE", 2)
    metadata = new_metadata(brokers=2)
    metadata.create("orders", partitions=8, factor=2)
    metadata.fence(1)
    metadata.unfence(1)
    for number in range(8):
        metadata.propose([1, 2], number=number)
    assert [metadata.submit(BalanceLeaders()) for _ in range(3)] == [2, 2, 0]


# --- high watermarks


def test_the_high_watermarks_of_a_request_are_one_record(cluster):
    cluster.create("audit", factor=1)
    assert cluster.checkpoint(10).recorded_count == 1
    topic_id = cluster.image.topics["orders"].topic_id
    assert cluster.image.high_watermarks == {(topic_id, 0): 10}
    image = cluster.image
    for end, changes in [(10, {}), (9, {}), (20, {"leader_epoch": 7}), (20, {"sender": 2})]:
        assert cluster.checkpoint(end, **changes).recorded_count == 0
    assert cluster.image is image
    assert cluster.checkpoint(20).recorded_count == 1
    assert cluster.image.high_watermarks == {(topic_id, 0): 20}


def test_a_checkpoint_of_an_unknown_partition_is_skipped(cluster):
    image = cluster.image
    gone = [PartitionHighWatermark("f" * 32, 0, 0, 5), PartitionHighWatermark("f" * 32, -1, 0, 5)]
    topic_id = cluster.image.topics["orders"].topic_id
    gone.append(PartitionHighWatermark(topic_id, 1, 0, 5))
    request = CheckpointHighWatermarksRequest(1, cluster.epoch(1), gone)
    assert cluster.submit(request).recorded_count == 0
    stale = cluster.submit(request._replace(broker_epoch=0))
    assert (stale.error_code, stale.recorded_count) == (ErrorCode.STALE_BROKER_EPOCH, 0)
    assert cluster.image is image


def test_a_deleted_topic_takes_its_high_watermarks_along(cluster):
    cluster.checkpoint(10)
    cluster.delete("orders")
    assert cluster.image.high_watermarks == {}
    cluster.create("orders")
    assert cluster.image.high_watermarks == {}
