"""Elections after unclean stops: which replicas are compared, how long the others are waited for."""

from __future__ import annotations

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.records import NO_LEADER
from kafkalite.metadata.recovery import COMPARE_WAIT_MS, ReplaceShortLeaders, ReplicaReports
from kafkalite.protocol.messages.cluster import ReplicaReport

TIMEOUT_MS = ControllerSettings().unclean_recovery_timeout_ms


def roles(state):
    return (state.leader, state.isr, state.elr, state.unverified)


def restart(cluster, *node_ids, **how):
    """Register new processes after kill -9, and let them replay that."""
    for node_id in node_ids:
        cluster.register(node_id, synced=True, **how)
    for node_id in node_ids:
        cluster.unfence(node_id)


def kill_all(cluster):
    for node_id in (2, 3, 1):
        cluster.fence(node_id)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 3), ())


def kill_all_again(cluster, reports):
    """Kill all nodes, elect a leader of two, and kill that, so that there were leaders in several epochs."""
    kill_all(cluster)
    restart(cluster, 1, 3)
    for node_id in (1, 3):
        cluster.report(reports, node_id, 0, 100)
    assert cluster.recover(reports)[0].verdict.leader == 1
    cluster.fence(1)
    restart(cluster, 1)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 3), (1, 3))


def only(waiting):
    """Return the one partition that waits."""
    (found,) = waiting.values()
    return found


@pytest.fixture
def reports(cluster):
    return ReplicaReports(cluster.settings)


def test_r46_members_that_restarted_uncleanly_are_compared(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 3), (1, 3))
    cluster.report(reports, 1, 0, 100)
    assert cluster.recover(reports) == []
    cluster.report(reports, 3, 0, 300)
    ((_, _, verdict),) = cluster.recover(reports)
    assert (verdict.leader, verdict.is_late) == (3, False)
    # The other one may lack records that the leader has: it stays unverified until it is in sync.
    assert roles(cluster.state()) == (3, (3,), (1,), (1,))
    cluster.propose([1, 3])
    assert roles(cluster.state()) == (3, (1, 3), (), ())


def test_r57_members_that_register_before_the_leader_is_fenced_suffice(cluster, reports):
    """All are killed. The leader's session goes on for a while, and it does not return."""
    cluster.leaders_confirm = False  # its process has ended
    restart(cluster, 2, 3)
    assert roles(cluster.state()) == (1, (1,), (2, 3), (2, 3))
    cluster.fence(1)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 2, 3), (2, 3))
    cluster.report(reports, 2, 0, 100)
    assert cluster.recover(reports) == []
    cluster.report(reports, 3, 0, 100)
    assert cluster.recover(reports)[0].verdict.leader == 2
    assert roles(cluster.state()) == (2, (2,), (1, 3), (1, 3))


def test_r57_a_dead_broker_that_is_elected_takes_no_eligibility(cluster):
    """2 is killed with the others, and leads by the metadata until its session is over."""
    cluster.leaders_confirm = False
    cluster.register(1, synced=True)
    assert roles(cluster.state()) == (2, (2, 3), (1,), (1,))
    cluster.register(3, synced=True)
    cluster.fence(2)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 2, 3), (1, 3))


def test_r57_without_the_rule_a_complete_member_is_waited_for(cluster, reports, mutant):
    mutant("R57-controller-clears")
    restart(cluster, 2, 3)
    cluster.fence(1)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 3), (3,))
    for node_id in (2, 3):
        cluster.report(reports, node_id, 0, 100)
    assert cluster.recover(reports) == []


def test_r46_without_the_rule_the_first_member_that_returns_leads(cluster, mutant):
    mutant("R46-first-returns")
    kill_all(cluster)
    restart(cluster, 1)
    assert cluster.state().leader == 1


def test_r46_the_last_epoch_counts_before_the_end(cluster, reports, mutant):
    kill_all_again(cluster, reports)
    cluster.report(reports, 1, 0, 900)
    cluster.report(reports, 3, 1, 100)
    mutant("R46-longest")
    command = reports.due(cluster.image, 0)
    assert cluster.submit(command)[0].verdict.leader == 1


def test_r46_a_later_epoch_wins_over_a_longer_log(cluster, reports):
    kill_all_again(cluster, reports)
    cluster.report(reports, 1, 0, 900)
    cluster.report(reports, 3, 1, 100)
    assert cluster.recover(reports)[0].verdict.leader == 3


def test_r46_a_replica_that_holds_more_than_every_member_leads(cluster, reports):
    """2 left the ISR only because its registration came first: it may hold what a member has lost."""
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    cluster.report(reports, 2, 0, 400)
    assert cluster.recover(reports, TIMEOUT_MS) == []  # no member vouches for it
    cluster.report(reports, 1, 0, 100)
    cluster.report(reports, 3, 0, 300)
    assert cluster.recover(reports)[0].verdict.leader == 2
    assert roles(cluster.state()) == (2, (2,), (1, 3), (1, 3))


def test_r46_a_log_below_the_end_that_a_damaged_one_had_waits_for_all_replicas(cluster, reports):
    """Both members were cut, and only one of them knows it. The other replica had left the ISR."""
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.report(reports, 1, 0, 52, is_damaged=True, committed_end=54)
    cluster.report(reports, 3, 0, 52)
    assert cluster.recover(reports) == []
    assert only(reports.waiting(cluster.image, 0)).verdict.waits_for == (2,)
    restart(cluster, 2)
    cluster.report(reports, 2, 0, 60)
    ((_, _, verdict),) = cluster.recover(reports)
    assert (verdict.leader, verdict.is_late) == (2, False)


def test_r46_a_damaged_log_is_waited_for_no_longer_than_a_missing_one(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.report(reports, 1, 0, 52, is_damaged=True, committed_end=54)
    cluster.report(reports, 3, 0, 52)
    assert cluster.recover(reports, TIMEOUT_MS - 1) == []
    ((_, _, verdict),) = cluster.recover(reports, TIMEOUT_MS)
    assert (verdict.leader, verdict.waits_for, verdict.is_late) == (3, (2,), True)


def test_r46_a_log_with_a_batch_of_an_epoch_without_a_leader_is_damaged(cluster, reports):
    """The checksum of a batch does not cover its leader epoch: one changed bit made a shorter log win."""
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.report(reports, 1, cluster.state().leader_epoch, 100)
    cluster.report(reports, 3, 0, 300)
    ((_, _, verdict),) = cluster.recover(reports)
    assert verdict.leader == 3


def test_r46_of_equal_logs_the_first_member_leads(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    for node_id in (2, 3, 1):
        cluster.report(reports, node_id, 0, 300)
    assert cluster.recover(reports)[0].verdict.leader == 1


@pytest.mark.parametrize("how", [{"clean": True}, None], ids=["stopped cleanly", "never stopped"])
def test_r46_a_member_that_kept_its_log_leads_at_once(cluster, how):
    kill_all(cluster)
    if how is not None:
        cluster.register(3, **how)
    cluster.unfence(3)
    assert roles(cluster.state()) == (3, (3,), (1,), ())


def test_r46_an_unclean_stop_counts_until_the_replica_is_in_sync(cluster):
    kill_all(cluster)
    restart(cluster, 3)
    cluster.register(3, clean=True)  # what was lost before is not found by stopping in order
    cluster.unfence(3)
    assert roles(cluster.state()) == (NO_LEADER, (), (1, 3), (3,))


def test_the_kill_of_a_leader_with_live_followers_elects_at_once(cluster):
    restart(cluster, 1)
    assert roles(cluster.state()) == (2, (2, 3), (), ())


def test_r46_the_last_in_sync_replica_waits_briefly_for_others_to_compare_with(new_metadata):
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2, 3):
        metadata.register(node_id)
        metadata.unfence(node_id)
    metadata.create("orders", factor=3)
    for node_id in (2, 3, 1):
        metadata.fence(node_id)
    restart(metadata, 1)
    assert roles(metadata.state()) == (NO_LEADER, (), (1,), (1,))
    reports = ReplicaReports(metadata.settings)
    metadata.report(reports, 1, 0, 100)
    assert metadata.recover(reports, COMPARE_WAIT_MS - 1) == []
    assert only(reports.waiting(metadata.image, 0)).verdict.waits_for == (2, 3)
    ((_, _, verdict),) = metadata.recover(reports, COMPARE_WAIT_MS)
    assert (verdict.leader, verdict.is_late) == (1, False)


def test_the_only_replica_of_a_partition_needs_no_comparison(new_metadata):
    metadata = new_metadata(brokers=0)
    metadata.register(1)
    metadata.unfence(1)
    metadata.create("orders")
    restart(metadata, 1)
    assert roles(metadata.state()) == (1, (1,), (), ())


def test_r24_the_only_replica_leads_again_when_its_damage_was_accepted(new_metadata):
    metadata = new_metadata(brokers=0)
    metadata.register(1)
    metadata.unfence(1)
    metadata.create("orders")
    restart(metadata, 1, damaged=metadata.damaged(("orders", 0)))
    assert roles(metadata.state()) == (NO_LEADER, (), (), ())
    restart(metadata, 1)
    assert roles(metadata.state()) == (1, (1,), (), ())
    metadata.lose(1, ("orders", 0))
    assert roles(metadata.state()) == (NO_LEADER, (), (), ())


# --- R47: waiting


def test_r47_a_missing_member_is_waited_for_until_the_timeout(cluster, reports, mutant):
    kill_all(cluster)
    restart(cluster, 1, 2)
    cluster.report(reports, 1, 0, 300)
    cluster.report(reports, 2, 0, 300)
    assert cluster.recover(reports, TIMEOUT_MS - 1) == []
    assert only(reports.waiting(cluster.image, 7)).verdict.waits_for == (3,)
    assert only(reports.waiting(cluster.image, 7)).waited_ms == 7
    ((_, _, verdict),) = cluster.recover(reports, TIMEOUT_MS)
    assert (verdict.leader, verdict.waits_for, verdict.is_late) == (1, (3,), True)


def test_r47_without_the_rule_a_member_that_lost_records_leads(cluster, reports, mutant):
    mutant("R47-no-wait")
    kill_all(cluster)
    restart(cluster, 1)
    cluster.report(reports, 1, 0, 100)
    assert cluster.recover(reports)[0].verdict.leader == 1


@pytest.mark.parametrize(("strategy", "waits_ms"), [("none", None), ("aggressive", COMPARE_WAIT_MS)])
def test_r47_the_strategy_decides_how_long(cluster, strategy, waits_ms):
    cluster.settings = ControllerSettings(unclean_recovery_strategy=strategy)
    reports = ReplicaReports(cluster.settings)
    kill_all(cluster)
    restart(cluster, 1, 2)
    cluster.report(reports, 1, 0, 300)
    cluster.report(reports, 2, 0, 300)
    if waits_ms is None:
        assert cluster.recover(reports, 10**12) == []
    else:
        assert cluster.recover(reports, waits_ms - 1) == []
        assert cluster.recover(reports, waits_ms)[0].verdict.leader == 1


def test_r47_a_known_damage_ends_the_wait_for_that_member(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, damaged=cluster.damaged(("orders", 0)))
    restart(cluster, 2, 3)
    assert roles(cluster.state()) == (NO_LEADER, (), (3,), (3,))
    cluster.report(reports, 1, 0, 100, is_damaged=True)
    cluster.report(reports, 3, 0, 300)
    assert cluster.recover(reports)[0].verdict.leader == 3


def test_r47_reports_of_ended_processes_and_epochs_do_not_count(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.report(reports, 1, 0, 300)
    restart(cluster, 1)
    cluster.report(reports, 3, 0, 100)
    assert cluster.recover(reports) == []
    cluster.report(reports, 1, 0, 200, leader_epoch=cluster.state().leader_epoch - 1)
    assert cluster.recover(reports) == []
    cluster.report(reports, 1, 0, 200)
    assert cluster.recover(reports)[0].verdict.leader == 1


def test_reports_of_partitions_with_a_leader_are_dropped(cluster, reports):
    cluster.report(reports, 1, 0, 300)
    assert cluster.recover(reports, TIMEOUT_MS) == []
    assert reports.waiting(cluster.image, 0) == {}


# --- R48: known losses


def test_r48_a_log_that_ends_below_the_high_watermark_does_not_lead(cluster, reports):
    cluster.checkpoint(200)
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.report(reports, 1, 0, 100)
    cluster.report(reports, 3, 0, 300)
    ((_, _, verdict),) = cluster.recover(reports)
    assert (verdict.leader, verdict.short) == (3, (1,))
    assert roles(cluster.state()) == (3, (3,), (), ())


def test_r48_with_short_members_only_the_partition_waits(cluster, reports, mutant):
    cluster.checkpoint(200)
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    cluster.report(reports, 1, 0, 100)
    cluster.report(reports, 2, 0, 300)
    cluster.report(reports, 3, 0, 150)
    assert cluster.recover(reports, 10 * TIMEOUT_MS) == []
    waiting = only(reports.waiting(cluster.image, 0))
    assert (waiting.verdict.short, waiting.verdict.waits_for) == ((1, 3), ())
    mutant("R48-clamped")
    cluster.report(reports, 2, 0, 300)
    assert cluster.recover(reports, 0)[0].verdict.leader == 2


def test_without_a_complete_member_the_partition_waits_for_all_replicas(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.report(reports, 1, 0, 100, is_damaged=True)
    cluster.report(reports, 3, 0, 100, is_damaged=True)
    assert cluster.recover(reports) == []
    assert only(reports.waiting(cluster.image, 0)).verdict.waits_for == (2,)


def test_r48_what_a_live_replica_knows_to_be_committed_counts(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.unfence(2)
    cluster.report(reports, 2, 0, 260, committed_end=250)
    cluster.report(reports, 1, 0, 100)
    cluster.report(reports, 3, 0, 200)
    assert cluster.recover(reports, TIMEOUT_MS) == []


def test_an_operator_elects_the_most_complete_replica(cluster, reports):
    cluster.checkpoint(400)
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    for node_id, end in ((1, 100), (2, 250), (3, 200)):
        cluster.report(reports, node_id, 0, end)
    epoch = cluster.state().leader_epoch
    cluster.elect(("orders", 0), unclean=True, ends_of=lambda key: reports.ends_of(cluster.image, key))
    state = cluster.state()
    assert (state.leader, state.isr) == (2, (2,))
    assert (state.leader_epoch, state.loss_epoch) == (epoch + 1, epoch + 1)
    assert not cluster.image.high_watermarks


def test_r49_an_unclean_election_is_recorded_for_ever(cluster):
    kill_all(cluster)
    cluster.unfence(2)
    assert cluster.state().loss_epoch == -1
    cluster.elect(("orders", 0), unclean=True)
    accepted = cluster.state().leader_epoch
    assert (cluster.state().leader, cluster.state().loss_epoch) == (2, accepted)
    cluster.unfence(3)
    cluster.propose([2, 3])
    cluster.fence(2)
    state = cluster.state()
    assert (state.leader, state.leader_epoch, state.loss_epoch) == (3, accepted + 1, accepted)


# --- R50: short leaders


def refusal(cluster, node_id, *, end=300, leader_epoch=None):
    state = cluster.state()
    epoch = state.leader_epoch if leader_epoch is None else leader_epoch
    report = ReplicaReport(cluster.image.topics["orders"].topic_id, 0, epoch, 0, end, False, 250, 100)
    return ReplaceShortLeaders(node_id, cluster.epoch(node_id), (report,))


def test_r50_a_replica_with_committed_records_replaces_a_leader_without(cluster, reports, mutant):
    kill_all(cluster)
    restart(cluster, 1, 3)
    cluster.fence(3)
    cluster.report(reports, 1, 0, 100)
    assert cluster.recover(reports, 0) == []
    assert cluster.recover(reports, TIMEOUT_MS)[0].verdict.leader == 1
    cluster.unfence(3)
    assert roles(cluster.state()) == (1, (1,), (3,), (3,))
    before = cluster.state()
    assert cluster.submit(refusal(cluster, 3, leader_epoch=before.leader_epoch - 1)) == []
    assert cluster.submit(refusal(cluster, 1)) == [("orders", 0, False)]
    assert cluster.submit(refusal(cluster, 3)) == [("orders", 0, True)]
    assert roles(cluster.state()) == (3, (3,), (), ())
    assert cluster.state().leader_epoch == before.leader_epoch + 1
    assert cluster.submit(ReplaceShortLeaders(3, 1, ())).code == ErrorCode.STALE_BROKER_EPOCH


def test_r50_a_leader_that_may_have_committed_records_stays(cluster, reports):
    """Both logs have records that were acknowledged: the choice is an operator's."""
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    cluster.report(reports, 1, 0, 300)
    cluster.report(reports, 3, 0, 300)
    cluster.recover(reports)
    cluster.propose([1, 2])
    assert cluster.submit(refusal(cluster, 3)) == [("orders", 0, False)]
    assert cluster.state().leader == 1


def test_r50_a_leader_stays_if_it_committed_records_before_its_follower_restarted(cluster, reports):
    kill_all(cluster)
    restart(cluster, 1, 2, 3)
    cluster.report(reports, 1, 0, 100)
    cluster.report(reports, 3, 0, 100)
    cluster.recover(reports)
    cluster.propose([1, 3])  # from now on both commit records
    cluster.fence(3)
    restart(cluster, 3)
    assert roles(cluster.state()) == (1, (1,), (3,), (3,))  # as if nothing had been committed
    assert cluster.submit(refusal(cluster, 2)) == [("orders", 0, False)]
    assert cluster.state().leader == 1


def test_the_description_names_what_is_waited_for_and_why(cluster, reports):
    def described():
        return [
            (
                each.leader_id,
                each.waited_ms,
                each.waits_for,
                [(one.node_id, one.state) for one in each.replicas],
            )
            for each in reports.describe(cluster.image, 9)
        ]

    assert described() == []
    cluster.checkpoint(200)
    kill_all(cluster)
    restart(cluster, 1, 2)
    assert described() == [(NO_LEADER, -1, [], [(1, "unverified")])]
    cluster.report(reports, 1, 0, 100)
    cluster.report(reports, 2, 0, 300)
    assert described() == [(NO_LEADER, 9, [3], [(1, "short"), (2, "reported")])]
    reports.take_damaged(1, cluster.damaged(("orders", 0)))
    assert described() == [(NO_LEADER, 9, [3], [(1, "damaged"), (2, "reported")])]
    cluster.elect(("orders", 0), unclean=True)
    reports.take_damaged(1, [])
    assert described() == []


# --- R51: older copies of a data directory


@pytest.mark.parametrize(
    ("starts", "directory", "is_restored"),
    [(6, None, False), (9, None, False), (5, None, True), (2, None, True), (1, "f" * 32, False)],
)
def test_r51_a_count_of_starts_that_does_not_grow_is_an_older_copy(cluster, starts, directory, is_restored):
    cluster.register(1, clean=True, starts=5)
    cluster.unfence(1)
    cluster.propose([1, 2, 3])
    for node_id in (3, 2):
        cluster.fence(node_id)
    cluster.register(1, clean=True, starts=starts, directory=directory)
    broker = cluster.image.brokers[1]
    assert (broker.is_restored, broker.start_count) == (is_restored, starts)
    assert (1 in cluster.state().elr) == (not is_restored and directory is None)


@pytest.mark.parametrize(("starts", "is_led"), [(1, True), (2, False)])
def test_r51_a_lost_count_says_nothing_of_the_only_replica(cluster, starts, is_led):
    cluster.register(1, clean=True, starts=5)
    cluster.unfence(1)
    for node_id in (3, 2):
        cluster.fence(node_id)
    cluster.create("alone")
    cluster.register(1, clean=True, starts=starts)
    cluster.unfence(1)
    assert (cluster.image.topics["alone"].partitions[0].leader == 1) == is_led


def test_r51_without_the_rule_an_older_copy_leads(cluster, mutant):
    mutant("R51-older-copy")
    for node_id in (3, 2, 1):
        cluster.fence(node_id)
    cluster.register(1, clean=True, starts=5)
    cluster.register(1, clean=True, starts=2)
    cluster.unfence(1)
    assert cluster.state().leader == 1
