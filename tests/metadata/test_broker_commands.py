"""Registration, fencing, shutdown and lost replicas of brokers, and their effects on partitions."""

from __future__ import annotations

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.metadata.broker_commands import (
    BeginShutdown,
    FenceBroker,
    LoseReplicas,
    UnfenceBroker,
    heartbeat_change,
    may_shut_down,
)
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.records import NO_LEADER
from kafkalite.protocol.messages.admin import UnregisterBrokerRequest
from kafkalite.protocol.messages.cluster import (
    AllocateProducerIdsRequest,
    BrokerHeartbeatRequest,
    DamagedReplica,
)


def roles(state):
    return (state.leader, state.isr, state.elr, state.last_known_elr)


def epochs(state):
    return (state.leader_epoch, state.partition_epoch)


def kill(cluster, *node_ids):
    for node_id in node_ids:
        cluster.fence(node_id)


def test_r20_a_registered_broker_is_fenced_until_it_has_replayed_its_registration(new_metadata):
    metadata = new_metadata(brokers=0)
    reply = metadata.register(1)
    assert reply.broker_epoch == reply.metadata_offset == metadata.image.metadata_offset == 1
    assert metadata.image.brokers[1].is_fenced
    assert metadata.image.live_brokers() == frozenset()
    metadata.unfence(1)
    assert metadata.image.live_brokers() == {1}


def test_the_only_node_is_live_as_soon_as_it_is_registered(new_metadata):
    metadata = new_metadata(brokers=0, settings=ControllerSettings(is_single_node=True))
    metadata.register(1)
    metadata.create("orders")
    state = metadata.state()
    assert roles(state) == (1, (1,), (), ())
    # Its next process leads again, in an epoch of its own.
    metadata.register(1)
    assert roles(metadata.state()) == (1, (1,), (), ())
    assert epochs(metadata.state()) == (state.leader_epoch + 1, state.partition_epoch + 1)
    # So it does if its node.json was written again, with another directory id.
    metadata.register(1, directory="another")
    assert roles(metadata.state()) == (1, (1,), (), ())


def test_r20_a_repeated_registration_gets_the_same_response(cluster):
    reply = cluster.register(2, incarnation="a" * 32)
    image = cluster.image
    assert cluster.register(2, incarnation="a" * 32) == reply
    assert cluster.image is image


def test_r20_a_registration_ends_the_earlier_leaderships_in_the_same_entry(cluster):
    before = cluster.state()
    assert before.leader == 1
    earlier = cluster.epoch(1)
    offset = cluster.image.metadata_offset
    cluster.leaders_confirm = False
    cluster.register(1, clean=True)
    assert cluster.image.metadata_offset == offset + 1
    assert cluster.epoch(1) > earlier
    assert roles(cluster.state()) == (2, (2, 3), (1,), ())
    assert epochs(cluster.state()) == (before.leader_epoch + 1, before.partition_epoch + 1)


def test_r20_without_the_rule_the_earlier_process_would_go_on_leading(cluster, mutant):
    mutant("R20-no-fencing")
    cluster.register(1, clean=True)
    assert roles(cluster.state()) == (1, (1, 2, 3), (), ())
    assert not cluster.image.brokers[1].is_fenced


@pytest.mark.parametrize(
    ("how", "eligible"),
    [
        ({"clean": True}, True),
        ({"synced": True}, True),
        ({}, False),
        ({"clean": True, "directory": "f" * 32}, False),
        ({"synced": True, "directory": "f" * 32}, False),
    ],
    ids=["clean", "synced", "unclean", "clean, other disk", "synced, other disk"],
)
def test_r20_a_replica_that_may_have_lost_its_tail_is_not_eligible(cluster, how, eligible):
    kill(cluster, 3, 2)
    assert roles(cluster.state()) == (1, (1,), (2,), ())
    cluster.register(2, **how)
    state = cluster.state()
    assert (2 in state.elr) == eligible
    assert 2 not in state.isr
    remembered = (2,) if not eligible and "directory" not in how else ()
    assert state.last_known_elr == remembered


def test_r20_a_topic_with_page_cache_durability_needs_clean_stops(cluster):
    cluster.alter("topic", "orders", {"durability": "page-cache"})
    kill(cluster, 3, 2)
    cluster.register(2, synced=True)
    assert roles(cluster.state()) == (1, (1,), (), (2,))


@pytest.mark.parametrize(
    ("file_has_fsync", "broker", "topic", "eligible"),
    [
        (True, "page-cache", None, False),
        (True, "page-cache", "fsync", True),
        (True, "fsync", "page-cache", False),
        (False, "fsync", None, False),
        (False, None, "fsync", False),
    ],
)
def test_r20_the_durability_in_effect_counts(cluster, file_has_fsync, broker, topic, eligible):
    """A topic's override precedes the broker's. One with fsync may be newer than the records, so it does not
    count against the configuration file."""
    cluster.alter("broker", "2", {"durability": broker})
    cluster.alter("topic", "orders", {"durability": topic})
    kill(cluster, 3, 2)
    cluster.register(2, synced=file_has_fsync)
    assert (2 in cluster.state().elr) == eligible


def test_r20_the_last_in_sync_replica_that_lost_its_tail_does_not_lead_again(cluster):
    kill(cluster, 3, 2, 1)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 2), ())
    cluster.register(1)
    cluster.unfence(1)
    assert roles(cluster.state()) == (NO_LEADER, (), (2,), (1,))
    cluster.register(2, clean=True)
    cluster.unfence(2)
    assert roles(cluster.state()) == (2, (2,), (), (1,))


def test_r20_without_the_rule_it_would_lead_with_records_missing(cluster, mutant):
    mutant("R20-unclean-stays")
    kill(cluster, 3, 2, 1)
    cluster.register(1)
    cluster.unfence(1)
    assert cluster.state().leader == 1


def test_r20_a_marker_of_another_session_is_none(cluster):
    kill(cluster, 3, 2)
    request = cluster.image.brokers[2]
    cluster.register(2)  # unclean: the replica is not eligible
    assert cluster.state().last_known_elr == (2,)
    assert cluster.epoch(2) > request.broker_epoch


def test_the_only_replica_stays_eligible(new_metadata):
    metadata = new_metadata(brokers=0)
    metadata.register(1)
    metadata.unfence(1)
    metadata.create("orders")
    metadata.register(1)
    assert roles(metadata.state()) == (NO_LEADER, (), (1,), ())
    metadata.unfence(1)
    assert roles(metadata.state()) == (1, (1,), (), ())
    # With another disk nothing is left: an operator has to decide.
    metadata.register(1, directory="f" * 32)
    metadata.unfence(1)
    assert roles(metadata.state()) == (NO_LEADER, (), (), ())


def test_r24_replicas_found_damaged_are_out_of_isr_and_elr_and_are_not_remembered(cluster):
    cluster.register(1, clean=True, damaged=cluster.damaged(("orders", 0)))
    cluster.unfence(1)
    assert roles(cluster.state()) == (2, (2, 3), (), ())
    kill(cluster, 3)
    cluster.register(3, clean=True, damaged=cluster.damaged(("orders", 0)))
    assert roles(cluster.state()) == (2, (2,), (), ())


def test_r26_a_replica_that_goes_offline_hands_over(cluster):
    before = cluster.state()
    assert cluster.lose(1, ("orders", 0)) is None
    assert roles(cluster.state()) == (2, (2, 3), (), ())
    assert epochs(cluster.state()) == (before.leader_epoch + 1, before.partition_epoch + 1)
    cluster.lose(1, ("orders", 0))
    assert roles(cluster.state()) == (2, (2, 3), (), ()), "once more: another leader epoch, no other change"
    assert 1 in cluster.image.live_brokers()


def test_r23_a_fenced_broker_leads_nothing_and_is_in_no_isr(cluster):
    cluster.create("audit", partitions=6, factor=3)
    cluster.fence(2)
    assert cluster.image.brokers[2].is_fenced
    for topic in cluster.image.topics.values():
        for state in topic.partitions:
            assert 2 not in state.isr
            assert state.leader in {1, 3}


def test_r16_leavers_below_min_insync_replicas_stay_eligible_and_the_isr_may_become_empty(cluster):
    kill(cluster, 3)
    assert roles(cluster.state()) == (1, (1, 2), (), ())
    kill(cluster, 2)
    assert roles(cluster.state()) == (1, (1,), (2,), ())
    kill(cluster, 1)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 2), ())
    # 3 left while the others could still commit: it must not lead, even if all others are dead.
    cluster.unfence(3)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 2), ())
    # An eligible replica becomes the only ISR member.
    cluster.unfence(2)
    assert roles(cluster.state()) == (2, (2,), (1,), ())


def test_r16_with_enough_in_sync_no_other_replica_is_eligible(cluster):
    kill(cluster, 3, 2)
    cluster.unfence(2)
    assert cluster.state().elr == (2,)
    cluster.unfence(3)
    cluster.propose([1, 3])
    assert roles(cluster.state()) == (1, (1, 3), (), ())


def test_r16_without_the_rule_the_last_member_is_kept(cluster, mutant):
    mutant("R16-no-elr")
    kill(cluster, 3, 2, 1)
    assert roles(cluster.state()) == (NO_LEADER, (1,), (), ())


def test_every_loss_and_gain_of_a_leader_is_an_epoch(cluster):
    seen = [epochs(cluster.state())]
    for change in (cluster.fence, cluster.unfence):
        for node_id in (3, 2, 1):
            change(node_id)
            seen.append(epochs(cluster.state()))
    leader_epochs = [leader for leader, _ in seen]
    assert leader_epochs == [0, 0, 0, 1, 1, 2, 2]
    assert [partition for _, partition in seen] == [0, 2, 3, 4, 4, 5, 5], "and a confirmation (R57)"


@pytest.mark.parametrize("command", [FenceBroker, UnfenceBroker, BeginShutdown])
def test_r20_of_an_earlier_process_nothing_is_done(cluster, command):
    image = cluster.image
    reply = cluster.submit(command(2, cluster.epoch(2) - 1))
    assert reply.code == ErrorCode.STALE_BROKER_EPOCH
    assert cluster.submit(command(9, 1)).code == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert cluster.submit(LoseReplicas(9, 1, ())).code == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert cluster.image is image


def test_an_unchanged_value_is_not_written(cluster):
    image = cluster.image
    cluster.unfence(1)
    assert cluster.image is image
    cluster.fence(1)
    image = cluster.image
    cluster.fence(1)
    cluster.begin_shutdown(1)
    assert cluster.image is image


def test_a_broker_that_shuts_down_hands_over_and_gets_nothing_new(cluster):
    cluster.create("alone", factor=1)
    cluster.create("pair", partitions=3, factor=2)
    node_id = cluster.state("alone").leader
    cluster.begin_shutdown(node_id)
    broker = cluster.image.brokers[node_id]
    assert broker.is_shutting_down and not broker.is_fenced and not broker.is_live
    for topic in ("orders", "pair"):
        for state in cluster.image.topics[topic].partitions:
            assert state.leader != node_id
            assert node_id not in state.isr
    # No other broker can lead this one: it leads until it stops, and may stop.
    assert roles(cluster.state("alone")) == (node_id, (node_id,), (), ())
    assert may_shut_down(cluster.image, node_id)
    refused = cluster.create("more", factor=3).topics[0]
    assert refused.error_code == ErrorCode.INVALID_REPLICATION_FACTOR
    assert f"live brokers, 2 (not alive or shutting down: {node_id})" in refused.error_message
    assert cluster.propose([1, 2, 3]).error_code == ErrorCode.INELIGIBLE_REPLICA
    image = cluster.image
    cluster.begin_shutdown(node_id)
    assert cluster.image is image
    cluster.fence(node_id)
    assert roles(cluster.state("alone")) == (NO_LEADER, (), (node_id,), ())
    stopped = cluster.image.brokers[node_id]
    assert stopped.is_fenced and stopped.is_shutting_down, "an orderly stop differs from a broker's silence"
    cluster.unfence(node_id)
    assert cluster.image.brokers[node_id].is_live


def test_a_shutdown_continues_when_another_replica_is_in_sync(cluster):
    kill(cluster, 2, 3)
    cluster.begin_shutdown(1)
    assert roles(cluster.state()) == (1, (1,), (3,), ())
    cluster.unfence(2)
    assert may_shut_down(cluster.image, 1)
    cluster.propose([1, 2])
    assert not may_shut_down(cluster.image, 1)
    cluster.begin_shutdown(1)
    assert cluster.state().leader == 2
    assert may_shut_down(cluster.image, 1)


# --- heartbeats


def heartbeat(cluster, node_id, offset=None, *, wants_shutdown=False, damaged=()):
    offset = cluster.image.metadata_offset if offset is None else offset
    return BrokerHeartbeatRequest(node_id, cluster.epoch(node_id), offset, wants_shutdown, list(damaged))


def test_a_heartbeat_of_a_live_broker_changes_nothing(cluster):
    assert heartbeat_change(cluster.image, heartbeat(cluster, 1, 0)) == []


def test_r22_a_broker_comes_alive_when_it_has_replayed_its_registration(cluster, mutant):
    reply = cluster.register(1)
    for offset in range(reply.metadata_offset):
        assert heartbeat_change(cluster.image, heartbeat(cluster, 1, offset)) == []
    change = heartbeat_change(cluster.image, heartbeat(cluster, 1, reply.metadata_offset))
    assert change == [UnfenceBroker(1, reply.broker_epoch)]
    mutant("R22-stale-metadata")
    assert heartbeat_change(cluster.image, heartbeat(cluster, 1, 0)) == change


def test_a_heartbeat_begins_a_shutdown_and_continues_it_only_if_needed(cluster):
    request = heartbeat(cluster, 1, wants_shutdown=True)
    assert heartbeat_change(cluster.image, request) == [BeginShutdown(1, cluster.epoch(1))]
    cluster.begin_shutdown(1)
    assert heartbeat_change(cluster.image, request) == []
    cluster.fence(1)
    assert heartbeat_change(cluster.image, request) == []


def test_a_damaged_replica_is_in_every_heartbeat_and_written_once(cluster):
    damaged = [*cluster.damaged(("orders", 0)), DamagedReplica("f" * 32, 0)]
    request = heartbeat(cluster, 1, damaged=damaged)
    (change,) = heartbeat_change(cluster.image, request)
    assert change == LoseReplicas(1, cluster.epoch(1), tuple(cluster.damaged(("orders", 0))))
    cluster.submit(change)
    assert heartbeat_change(cluster.image, request, known_damaged=damaged) == []


def test_only_the_damaged_replicas_of_a_broker_are_lost(cluster):
    cluster.create("audit", partitions=2, factor=3)
    before = cluster.state("audit", 1)
    cluster.lose(1, ("audit", 0))
    assert 1 not in cluster.state("audit", 0).isr
    assert cluster.state("audit", 1) == before


def test_a_damaged_replica_out_of_sync_gets_one_new_leader_epoch(cluster):
    """R52: it may have reported a position of its damaged log in the present one."""
    leader = cluster.state("orders").leader
    victim = next(each for each in cluster.state("orders").replicas if each != leader)
    cluster.propose([each for each in cluster.state("orders").isr if each != victim])
    before = cluster.state("orders")
    request = heartbeat(cluster, victim, damaged=cluster.damaged(("orders", 0)))
    (change,) = heartbeat_change(cluster.image, request)
    cluster.submit(change)
    after = cluster.state("orders")
    assert (after.leader, after.isr) == (leader, before.isr)
    assert after.leader_epoch == before.leader_epoch + 1
    assert heartbeat_change(cluster.image, request, known_damaged=request.damaged) == []


# --- producer ids


def test_producer_ids_are_given_out_once(cluster):
    blocks = []
    for node_id in (1, 2, 1):
        reply = cluster.submit(AllocateProducerIdsRequest(node_id, cluster.epoch(node_id)))
        assert reply.error_code == 0
        blocks.append((reply.first_producer_id, reply.id_count))
    assert blocks == [(0, 1_000), (1_000, 1_000), (2_000, 1_000)]
    image = cluster.image
    assert Delta(EMPTY).replay_all(image.to_records()).apply(image.metadata_offset) == image
    stale = cluster.submit(AllocateProducerIdsRequest(1, 0))
    assert (stale.error_code, stale.id_count) == (ErrorCode.STALE_BROKER_EPOCH, 0)
    assert cluster.image is image


def test_placement_counts_loads_and_skips_fenced_brokers(cluster):
    for number in range(5):
        cluster.create(f"t{number}", factor=1)
    leads = {node_id: load.preferred_leaders for node_id, load in cluster.image.loads.items()}
    assert leads == {1: 2, 2: 2, 3: 2}
    cluster.fence(3)
    cluster.create("late", partitions=4, factor=2)
    for state in cluster.image.topics["late"].partitions:
        assert set(state.replicas) == {1, 2}


def unregister(metadata, node_id):
    return metadata.submit(UnregisterBrokerRequest(node_id)).error_code


def test_a_broker_without_replicas_is_unregistered_and_its_id_retired(cluster):
    cluster.register(4)
    cluster.unfence(4)
    cluster.alter("broker", "4", {"durability": "page-cache"})
    assert unregister(cluster, 1) == ErrorCode.INVALID_REQUEST  # it has a replica
    assert unregister(cluster, 9) == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert unregister(cluster, 4) == 0
    image = cluster.image
    assert 4 not in image.brokers
    assert image.retired_brokers == {4}
    assert not image.configs_of("broker", "4")
    answer = cluster.register(4, directory="f" * 32)
    assert answer.error_code == ErrorCode.POLICY_VIOLATION
    assert "retired" in answer.error_message
    assert Delta(EMPTY).replay_all(image.to_records()).apply(image.metadata_offset) == image
    assert Delta.to_snapshot(image, []).apply(0).retired_brokers == frozenset()


def test_a_voter_stays_registered(cluster):
    """Its process would stop, for ever: with the last of a majority, or the only node, the whole cluster."""
    cluster.register(4)
    cluster.settings = ControllerSettings(voters=frozenset({4}))
    response = cluster.submit(UnregisterBrokerRequest(4))
    assert response.error_code == ErrorCode.INVALID_REQUEST
    assert "node 4 is a voter" in response.error_message
    assert 4 in cluster.image.brokers
