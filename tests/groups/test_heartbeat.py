"""KIP-848 as members see it, one test per rule."""

from __future__ import annotations

import pytest

from kafkalite.errors import (
    ErrorCode,
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupMaxSizeReachedError,
    InvalidGroupIdError,
    InvalidRegularExpressionError,
    InvalidRequestError,
    PolicyViolationError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)
from kafkalite.groups.settings import GroupSettings
from kafkalite.limits import MAX_REBALANCE_TIMEOUT_MS
from proof.groups.world import Consumer, Coordinator, settle, topic_id


@pytest.mark.parametrize(("members", "shares"), [(1, [3]), (2, [1, 2]), (3, [1, 1, 1]), (4, [0, 1, 1, 1])])
def test_three_partitions_and_up_to_four_members(consumer, members, shares):
    consumers = [consumer(f"m{number}") for number in range(members)]
    settle(*consumers)
    assert sorted(len(c.owned) for c in consumers) == shares
    assert sorted(number for c in consumers for number in c.numbers) == [0, 1, 2]


def test_two_groups_each_get_everything(consumer):
    first, second = consumer("m1"), consumer("m2", group_id="other")
    settle(first, second)
    assert first.numbers == second.numbers == [0, 1, 2]


def test_r38_a_partition_waits_for_its_owner(coordinator, consumer):
    first = consumer("m1")
    first.settle()
    first.beat()
    second = consumer("m2")
    assert not second.assigned
    first.beat()
    assert len(first.assigned) == 2
    second.beat()
    assert not second.assigned  # revoked, but not released
    assert coordinator.state == "Reconciling"
    states = {member.member_id: member.state for member in coordinator.describe().members}
    assert states == {"m1": "Unrevoked", "m2": "Unreleased"}
    assert not coordinator.machine.has_update(second.request())
    first.give_back()
    first.beat()
    assert coordinator.machine.has_update(second.request())
    second.beat()
    assert len(second.assigned) == 1
    assert coordinator.state == "Stable"


def test_r38_needs_its_rule(consumer, mutant):
    first = consumer("m1")
    first.settle()
    first.beat()
    mutant("R38-hand-over-early")
    assert consumer("m2").assigned & first.owned


def test_r38_a_give_back_that_was_sent_before_the_member_knew_does_not_count(coordinator, consumer):
    """A late duplicate of an empty ``owned`` does not release partitions that were assigned since."""
    first = consumer("m1")
    early = first.request()  # at this epoch it owns nothing yet
    assert early.owned == []
    first.beat()
    first.settle()
    first.beat()
    second = consumer("m2")
    first.beat()  # one partition is revoked, and not released yet
    for _ in range(2):
        coordinator.ask(early)
        second.beat()
        assert not second.assigned


def test_a_lost_answer_is_given_again(coordinator, consumer):
    first = consumer("m1")
    first.settle()
    first.beat()
    consumer("m2")
    epoch = first.epoch
    first.beat(is_lost=True)
    assert first.epoch == epoch
    coordinator.reload()
    first.beat()
    assert first.epoch == epoch + 1
    assert len(first.assigned) == 2


def test_several_lost_answers_are_no_reason_to_fence(coordinator, consumer):
    first = consumer("m1")
    first.settle()
    first.beat()
    for number in range(3):
        consumer(f"n{number}")
        first.beat(is_lost=True)
    first.beat()
    assert first.epoch == 4


def test_a_lost_join_is_joined_again_without_a_new_generation(coordinator, consumer):
    first = Consumer(coordinator, "m1", "t")
    first.beat(is_lost=True)
    first.join()
    assert (first.epoch, len(first.assigned)) == (1, 3)
    assert coordinator.causes == ["MemberJoined"]


def test_other_epochs_are_fenced(coordinator, consumer):
    first = consumer("m1")
    first.settle()
    first.beat()
    second = consumer("m2")
    first.beat()
    first.beat()
    for epoch in (1, 3):
        with pytest.raises(FencedMemberEpochError, match="is at epoch 2"):
            coordinator.ask(first.request(epoch))
    second.beat()
    assert coordinator.describe().group_epoch == 2


def test_an_earlier_epoch_with_partitions_it_never_had_is_fenced(coordinator, consumer):
    first = consumer("m1")
    consumer("m2")
    first.beat(is_lost=True)
    first.owned = frozenset({(topic_id("t"), 9)})
    with pytest.raises(FencedMemberEpochError):
        first.beat()


def test_an_expelled_member_is_unknown(coordinator, consumer, mutant):
    first = consumer("m1")
    coordinator.advance(45_000)
    assert coordinator.state == "Empty"
    with pytest.raises(UnknownMemberIdError, match="no member m1"):
        first.beat()
    mutant("R38-expelled-stays")
    first.beat()


def test_a_repeated_join_does_not_bring_an_expelled_member_back(coordinator, consumer):
    first = consumer("m1")
    first.settle()
    first.beat()
    join = first.request(0)
    coordinator.advance(45_000)
    coordinator.ask(join)  # a late duplicate starts the member again, without the knowledge of its process
    with pytest.raises(FencedMemberEpochError):
        first.beat()


def test_a_silent_member_is_expelled_and_the_others_get_its_partitions(coordinator, consumer):
    first, second = consumer("m1"), consumer("m2")
    settle(first, second)
    for _ in range(9):
        coordinator.advance(5_000)
        first.beat()
        first.settle()
    assert first.numbers == [0, 1, 2]
    event = coordinator.describe().journal[-1]
    assert event.cause == "MemberExpired"
    assert event.detail == "member m2 sent nothing for 45000 ms"
    assert event.member_count == 1


def test_a_member_that_does_not_give_back_is_expelled(coordinator, consumer):
    first = consumer("m1", rebalance_timeout_ms=20_000)
    first.settle()
    first.beat()
    second = consumer("m2")
    for _ in range(4):
        first.beat()
        second.beat()
        coordinator.advance(5_000)
    assert coordinator.causes[-1] == "MemberFenced"
    with pytest.raises(UnknownMemberIdError):
        first.beat()
    second.beat()
    assert len(second.assigned) == 3


def test_s25_no_member_keeps_a_partition_for_ever(coordinator, consumer):
    first = consumer("m1", rebalance_timeout_ms=2**63 - 1)
    first.settle()
    first.beat()
    second = consumer("m2")
    for _ in range(MAX_REBALANCE_TIMEOUT_MS // 40_000):
        first.beat()
        second.beat()
        coordinator.advance(40_000)
    with pytest.raises(UnknownMemberIdError):
        first.beat()
    assert coordinator.causes[-1] == "MemberFenced"


def test_a_new_coordinator_starts_all_sessions_again(coordinator, consumer):
    first = consumer("m1")
    coordinator.advance(40_000)
    coordinator.reload()
    coordinator.advance(40_000)
    first.beat()
    coordinator.advance(5_000)
    assert coordinator.causes == ["MemberJoined"]


def test_leaving_frees_at_once(coordinator, consumer):
    first, second = consumer("m1"), consumer("m2")
    settle(first, second)
    first.leave()
    assert coordinator.machine.has_update(second.request())
    second.beat()
    assert len(second.assigned) == 3
    second.leave()
    assert coordinator.state == "Empty"
    assert coordinator.causes == ["MemberJoined", "MemberJoined", "MemberLeft", "MemberLeft"]
    with pytest.raises(UnknownMemberIdError):
        second.beat() if second.epoch else coordinator.ask(second.request(-1))


# --- static members


def test_a_static_member_returns_to_its_partitions(coordinator, consumer):
    first, second = consumer("m1", instance_id="one"), consumer("m2", instance_id="two")
    settle(first, second)
    owned, epoch = first.owned, second.epoch
    first.leave(-2)
    coordinator.reload()
    assert not coordinator.machine.has_update(second.request())
    again = consumer("m9", instance_id="one")
    assert again.assigned == owned
    assert coordinator.describe().group_epoch == epoch
    assert coordinator.causes == ["MemberJoined"] * 2
    with pytest.raises(FencedInstanceIdError, match="is member m9 now, not m1"):
        coordinator.ask(first.request(epoch))


def test_a_static_member_that_stays_away_is_expelled(coordinator, consumer):
    first, second = consumer("m1", instance_id="one"), consumer("m2", instance_id="two")
    settle(first, second)
    first.leave(-2)
    for _ in range(9):
        coordinator.advance(5_000)
        second.beat()
    second.settle()
    assert second.numbers == [0, 1, 2]


def test_partitions_of_a_static_member_are_free_for_a_new_target(coordinator, consumer):
    first = consumer("m1", instance_id="one")
    settle(first)
    first.leave(-2)
    second = consumer("m2")
    assert len(second.assigned) == 1  # at once: the member that is away owns nothing
    again = consumer("m3", instance_id="one")
    assert len(again.assigned) == 2


def test_an_instance_that_lives_is_not_replaced(coordinator, consumer):
    consumer("m1", instance_id="one")
    with pytest.raises(UnreleasedInstanceIdError, match="is member m1, which has not left"):
        consumer("m2", instance_id="one")


def test_a_member_that_is_away_is_fenced_until_it_joins(coordinator, consumer):
    first = consumer("m1", instance_id="one")
    coordinator.ask(first.request(-2))
    with pytest.raises(FencedMemberEpochError):
        first.beat()
    first.on_expelled()
    first.join()
    assert len(first.assigned) == 3


def test_only_a_static_member_leaves_for_a_while(consumer):
    with pytest.raises(InvalidRequestError, match="no instance id"):
        consumer("m1").leave(-2)


# --- subscriptions


def test_a_pattern_matches_whole_names_and_no_internal_topic(coordinator, consumer):
    coordinator.set_topics(orders=1, orders2=1, old_orders=1, __orders=1)
    first = consumer("m1", "none", pattern="_*orders.?")
    assert {topic for topic, _ in first.assigned} == {topic_id("orders"), topic_id("orders2")}
    coordinator.set_topics(orders=1, orders3=2)
    assert coordinator.machine.has_update(first.request())
    first.beat()
    first.settle()
    first.beat()
    assert len(first.owned) == 3
    detail = coordinator.describe().journal[-1].detail
    assert detail == "orders2 was deleted; orders3 was created, with 2 partitions"


@pytest.mark.parametrize("pattern", ["(", "a{9999}", "x" * 250])
def test_a_pattern_that_is_none_is_refused(consumer, pattern):
    with pytest.raises(InvalidRegularExpressionError, match="pattern"):
        consumer("m1", pattern=pattern)


def test_a_topic_that_grows_or_is_created_again_is_assigned_again(coordinator, consumer):
    first = consumer("m1")
    settle(first)
    coordinator.set_topics(t=5)
    settle(first)
    assert first.numbers == [0, 1, 2, 3, 4]
    coordinator.set_topics(t=(5, 1))
    settle(first)
    assert {topic for topic, _ in first.owned} == {topic_id("t", 1)}
    coordinator.set_topics()
    settle(first)
    assert not first.owned
    assert [event.detail for event in coordinator.describe().journal[1:]] == [
        "t has 5 partitions, not 3",
        "t was created again, with 5 partitions",
        "t was deleted",
    ]


def test_a_changed_subscription_is_a_new_generation(coordinator, consumer):
    coordinator.set_topics(t=3, u=2)
    first = consumer("m1")
    request = first.request()
    coordinator.ask(request._replace(subscribed_topics=["t"]))
    assert coordinator.causes == ["MemberJoined"]
    request = request._replace(subscribed_topics=["u", "t"])
    assert coordinator.machine.has_update(request)
    first.on_answer(request, coordinator.ask(request))
    assert len(first.assigned) == 5
    assert coordinator.causes[-1] == "SubscriptionChanged"


def test_most_votes_choose_the_assignor(coordinator, consumer):
    consumer("m1")
    assert coordinator.describe().assignor == "uniform"
    consumer("m2", assignor="range")
    assert coordinator.describe().assignor == "range"
    consumer("m3", assignor="uniform")
    assert coordinator.describe().assignor == "uniform"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"group_id": ""}, InvalidGroupIdError),
        ({"group_id": "g" * 256}, InvalidGroupIdError),
        ({"member_id": ""}, InvalidRequestError),
        ({"instance_id": ""}, InvalidRequestError),
        ({"member_epoch": -3}, InvalidRequestError),
        ({"rebalance_timeout_ms": -1}, InvalidRequestError),
        ({"subscribed_topics": None}, InvalidRequestError),
        ({"assignor": "sticky"}, UnsupportedAssignorError),
    ],
)
def test_an_invalid_join_is_refused(coordinator, changes, error):
    request = Consumer(coordinator, "m1", "t").request()
    with pytest.raises(error):
        coordinator.ask(request._replace(**changes))
    assert not coordinator.machine.groups


def test_s26_a_coordinator_has_a_greatest_number_of_groups():
    coordinator = Coordinator(GroupSettings(max_count=2), t=3)
    Consumer(coordinator, "m1", "t").join()
    coordinator.commit({("t", 0): 1}, group_id="h")
    with pytest.raises(PolicyViolationError, match=r"group\.max\.count=2"):
        coordinator.ask(Consumer(coordinator, "m2", "t").request()._replace(group_id="i"))
    with pytest.raises(PolicyViolationError):
        coordinator.commit({("t", 0): 1}, group_id="i")
    Consumer(coordinator, "m2", "t").join()
    coordinator.commit({("t", 0): 2}, group_id="h")


def test_s26_a_group_has_a_greatest_number_of_offsets():
    coordinator = Coordinator(GroupSettings(max_offsets=2), t=3)
    refused = ErrorCode.POLICY_VIOLATION
    assert coordinator.commit({("t", 0): 1, ("t", 1): 1, ("t", 2): 1}) == [0, 0, refused]
    assert coordinator.commit({("t", 2): 1, ("t", 1): 2}) == [refused, 0]


@pytest.mark.parametrize("reloads", [True, False])
@pytest.mark.parametrize("is_commit", [True, False])
def test_s26_offsets_in_open_transactions_count(is_commit, reloads):
    coordinator = Coordinator(GroupSettings(max_offsets=3), t=6)
    refused = ErrorCode.POLICY_VIOLATION

    def commit(producer_id, *partitions):
        codes = coordinator.commit({("t", each): 1 for each in partitions}, producer_id=producer_id)
        if reloads:
            coordinator.reload()
        return codes

    assert commit(None, 0) == [0]
    assert commit(70, 0, 1) == [0, 0]
    assert commit(71, 1, 2) == [0, refused], "1 is in two transactions"
    assert commit(71, 0) == [refused], "0 would be in two"
    assert commit(70, 0, 1) == [0, 0], "repeated"
    assert commit(None, 2) == [refused]
    assert commit(None, 1) == [0], "the direct commit of 1 replaces those in both transactions"
    assert commit(None, 2) == [0]
    coordinator.end_transaction(70, is_commit=is_commit)
    coordinator.end_transaction(71, is_commit=is_commit)
    assert commit(None, 3) == [refused]
    assert len(coordinator.committed()) == 3


@pytest.mark.parametrize("is_commit", [True, False])
def test_s26_groups_that_only_open_transactions_have_count(is_commit):
    coordinator = Coordinator(GroupSettings(max_count=1), t=3)
    assert coordinator.commit({("t", 0): 1}, group_id="g", producer_id=70) == [0]
    with pytest.raises(PolicyViolationError, match=r"group\.max\.count=1"):
        coordinator.commit({("t", 0): 1}, group_id="h", producer_id=71)
    coordinator.end_transaction(70, is_commit=is_commit)
    assert list(coordinator.machine.groups) == ["g"] * is_commit


def test_s26_many_transactions_on_one_offset_are_bounded():
    """The state of a coordinator does not grow with the number of transactions."""
    coordinator = Coordinator(GroupSettings(max_offsets=10), t=1)
    codes = [coordinator.commit({("t", 0): 1}, producer_id=number)[0] for number in range(100)]
    assert codes == [0] * 10 + [ErrorCode.POLICY_VIOLATION] * 90
    assert len(coordinator.machine._pending._by_producer) == 10


def test_a_group_has_a_greatest_size():
    coordinator = Coordinator(GroupSettings(max_size=2), t=3)
    for number in range(2):
        Consumer(coordinator, f"m{number}", "t").join()
    with pytest.raises(GroupMaxSizeReachedError, match="has 2 members"):
        Consumer(coordinator, "m9", "t").join()


# --- updates


def test_a_heartbeat_without_an_update_is_held(coordinator, consumer):
    first, second = consumer("m1"), consumer("m2")
    settle(first, second)
    for member in (first, second):
        request = member.request()
        assert not coordinator.machine.has_update(request)
        decision = coordinator.machine.decide(request, ("", ""), coordinator.now, coordinator.topics)
        assert decision.reply.assignment is None
    coordinator.advance(45_000)
    assert coordinator.machine.has_update(first.request())  # it was expelled, and must receive that


def test_a_repeated_statement_of_owned_partitions_is_no_update(coordinator, consumer):
    first = consumer("m1")
    request = first.request()
    assert request.owned == []
    assert coordinator.machine.has_update(request)
    assert coordinator.ask(request).assignment  # it states less than its assignment
    assert not coordinator.machine.has_update(request)
    assert coordinator.ask(request).assignment  # until it states all of it


def test_the_journal_keeps_the_last_64_causes(coordinator, consumer):
    consumer("m1")
    for number in range(40):
        consumer(f"n{number}").leave()
    coordinator.reload()
    epochs = [event.group_epoch for event in coordinator.describe().journal]
    assert epochs == list(range(81 - 63, 82))
