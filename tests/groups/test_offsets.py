"""Committed offsets: permission, storage and reads (R35, R39, R40)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import (
    ErrorCode,
    FencedInstanceIdError,
    GroupIdNotFoundError,
    InvalidGroupIdError,
    InvalidRequestError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from kafkalite.groups.offsets import OffsetKey, Offsets, PendingOffsets
from kafkalite.protocol.messages.groups import (
    DeleteGroupsRequest,
    GroupPartition,
    ListGroupsRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)
from proof.groups.world import settle, topic_id

T0, T1 = ("t", 0), ("t", 1)
OK = 0
UNSTABLE = int(ErrorCode.UNSTABLE_OFFSET_COMMIT)
NONE = (-1, OK)
TXN, OTHER_TXN = 7_000, 7_001


def test_r40_an_offset_is_kept_with_its_epoch_and_metadata(coordinator):
    assert coordinator.commit({T0: 42}, metadata="from the test") == [OK]
    coordinator.reload()
    (entry,) = coordinator.ask(OffsetFetchRequest("g", "", -1, False, None)).offsets
    assert (entry.offset, entry.leader_epoch, entry.metadata) == (42, 7, "from the test")
    assert entry.topic_id == topic_id("t")
    assert entry.commit_ms == coordinator.now.wall_ms
    assert coordinator.committed(T1) == {T1: NONE}
    assert coordinator.committed(T0, group_id="other") == {T0: NONE}


def test_r39_only_the_members_commit_while_there_are_any(coordinator, consumer, mutant):
    first = consumer("m1")
    with pytest.raises(UnknownMemberIdError, match="a client that is no member can't commit"):
        coordinator.commit({T0: 1})
    with pytest.raises(UnknownMemberIdError, match="'m2' can't commit"):
        coordinator.commit({T0: 1}, member_id="m2", epoch=1)
    assert coordinator.commit({T0: 1}, member_id="m1", epoch=1) == [OK]
    first.leave()
    with pytest.raises(UnknownMemberIdError):
        coordinator.commit({T0: 1}, member_id="m1", epoch=1)
    assert coordinator.commit({T0: 2}) == [OK]
    consumer("m3")
    mutant("R39-any-member")
    assert coordinator.commit({T0: 1}) == [OK]


def test_r39_only_the_current_epoch_commits(coordinator, consumer, mutant):
    first = consumer("m1")
    settle(first, consumer("m2"))
    assert first.epoch == 2
    for epoch in (1, 3):
        with pytest.raises(StaleMemberEpochError, match="is at epoch 2"):
            coordinator.commit({T0: 1}, member_id="m1", epoch=epoch)
    coordinator.reload()
    assert coordinator.commit({T0: 1}, member_id="m1", epoch=2) == [OK]
    mutant("R39-any-epoch")
    assert coordinator.commit({T0: 1}, member_id="m1", epoch=1) == [OK]


def test_r56_a_commit_on_an_older_connection_is_refused(coordinator, consumer):
    first, _ = consumer("m1"), consumer("m2")
    settle(first)
    who = {"member_id": "m1", "epoch": first.epoch}
    assert coordinator.commit({T0: 10}, **who, connection=4) == [OK]
    assert coordinator.commit({T0: 30}, **who, connection=7) == [OK]
    with pytest.raises(InvalidRequestError, match="newer connection"):
        coordinator.commit({T0: 20}, **who, connection=4)
    assert coordinator.commit({T0: 31}, **who, connection=7) == [OK]
    assert coordinator.commit({T1: 5}, member_id="m2", epoch=2, connection=4) == [OK], "of another member"
    coordinator.commit({T1: 6}, **who, connection=4, producer_id=TXN)  # comes from a producer
    assert coordinator.committed(T0, T1) == {T0: (31, OK), T1: (5, OK)}


def test_r39_a_replaced_instance_does_not_commit(coordinator, consumer):
    first = consumer("m1", instance_id="one")
    first.leave(-2)
    consumer("m2", instance_id="one")
    with pytest.raises(FencedInstanceIdError):
        coordinator.commit({T0: 1}, member_id="m1", epoch=1, instance_id="one")


def test_an_invalid_offset_is_refused_alone(coordinator):
    codes = coordinator.commit({T0: 1, ("t", 3): 1, ("u", 0): 1, T1: -1})
    assert codes == [
        OK,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_REQUEST,
    ]
    assert coordinator.commit({T1: 1}, metadata="ü" * 2_049) == [ErrorCode.OFFSET_METADATA_TOO_LARGE]
    assert coordinator.commit({T1: 1}, topic_id="f" * 32) == [ErrorCode.UNKNOWN_TOPIC_ID]
    assert coordinator.commit({T1: 1}, topic_id=topic_id("t")) == [OK]
    assert coordinator.committed() == {T0: (1, OK), T1: (1, OK)}
    with pytest.raises(InvalidGroupIdError):
        coordinator.commit({T0: 1}, group_id="")


def test_an_offset_of_a_topic_that_was_created_again_is_void(coordinator):
    coordinator.commit({T0: 1})
    coordinator.set_topics(t=(3, 1))
    assert coordinator.committed() == {}
    assert coordinator.committed(T0) == {T0: NONE}
    coordinator.commit({T0: 2})
    assert coordinator.committed() == {T0: (2, OK)}


def test_offsets_of_a_deleted_topic_are_forgotten(coordinator):
    coordinator.set_topics(t=3_000, u=1)
    for first in range(0, 3_000, 1_000):
        coordinator.commit({("t", number): 1 for number in range(first, first + 1_000)})
    coordinator.commit({("u", 0): 1})
    coordinator.topics = {name: shape for name, shape in coordinator.topics.items() if name != "t"}
    assert coordinator.tick() >= 3  # bounded portions
    assert len(coordinator.machine.groups["g"].offsets) == 1
    coordinator.reload()


def test_a_fetching_member_is_checked(coordinator, consumer):
    consumer("m1")
    assert coordinator.committed(T0, member_id="m1", epoch=1) == {T0: NONE}
    with pytest.raises(StaleMemberEpochError):
        coordinator.committed(T0, member_id="m1", epoch=2)
    with pytest.raises(UnknownMemberIdError):
        coordinator.committed(T0, member_id="m2", epoch=1)
    assert coordinator.committed(T0) == {T0: NONE}


# --- transactions


@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("reloads", [True, False])
def test_r35_offsets_take_effect_with_the_marker(coordinator, is_commit, reloads):
    coordinator.commit({T0: 1})
    assert coordinator.commit({T0: 5, T1: 6}, producer_id=TXN) == [OK, OK]
    if reloads:
        coordinator.reload()
    assert coordinator.committed() == {T0: (1, OK)}
    assert coordinator.committed(T0, T1, require_stable=True) == {T0: (-1, UNSTABLE), T1: (-1, UNSTABLE)}
    assert coordinator.committed(require_stable=True).keys() == {T0, T1}
    assert coordinator.committed(("t", 2), require_stable=True) == {("t", 2): NONE}
    coordinator.end_transaction(TXN, is_commit=is_commit)
    if reloads:
        coordinator.reload()
    expected = {T0: (5, OK), T1: (6, OK)} if is_commit else {T0: (1, OK)}
    assert coordinator.committed(require_stable=True) == expected


def test_r35_only_members_at_their_epoch_take_part(coordinator, consumer, mutant):
    first = consumer("m1")
    settle(first, consumer("m2"))
    with pytest.raises(StaleMemberEpochError):
        coordinator.commit({T0: 1}, member_id="m1", epoch=1, producer_id=TXN)
    with pytest.raises(UnknownMemberIdError):
        coordinator.commit({T0: 1}, producer_id=TXN)
    assert coordinator.commit({T0: 1}, member_id="m1", epoch=2, producer_id=TXN) == [OK]
    mutant("R35-member-unchecked")
    assert coordinator.commit({T0: 1}, producer_id=TXN) == [OK]


def test_r35_needs_its_rules(coordinator, mutant):
    coordinator.commit({T0: 5}, producer_id=TXN)
    mutant("R35-unstable-read")
    assert coordinator.committed(T0, require_stable=True) == {T0: NONE}
    mutant("R35-visible-at-once")
    coordinator.commit({T1: 5}, producer_id=TXN)
    assert coordinator.committed(T1) == {T1: (5, OK)}


def test_a_decision_in_a_transaction_names_its_producer(coordinator):
    coordinator.commit({T0: 5}, producer_id=TXN)
    assert [producer_id for producer_id, _ in coordinator.log] == [TXN]


def test_the_later_offset_in_the_log_counts(coordinator):
    coordinator.commit({T0: 5}, producer_id=TXN)
    coordinator.commit({T0: 9})
    assert coordinator.committed(T0, require_stable=True) == {T0: (9, OK)}  # nothing can change that
    coordinator.end_transaction(TXN, is_commit=True)
    coordinator.reload()
    assert coordinator.committed(T0) == {T0: (9, OK)}


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "end"]), st.integers(-1, 3), st.integers(0, 2)), max_size=40
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(STEPS)
def test_markers_in_any_order_have_the_result_of_compaction(steps):
    """A compacted log has the last committed record of each key, and no markers."""
    offsets = Offsets()
    pending = PendingOffsets(lambda key, change: offsets.stage(key.topic, key.partition, change))
    effective, log = {}, []
    ended = {}

    def put(key, value):
        offsets.put(key.topic, key.partition, value)
        if value is None:
            effective.pop(key, None)
        else:
            effective[key] = value

    for number, (what, producer_id, partition) in enumerate(steps):
        key = OffsetKey("g", "t", partition)
        value = b"%d" % number if what == "put" else None
        if what == "end":
            is_commit = bool(partition)
            ended[producer_id] = is_commit
            for index, (owner, *rest) in enumerate(log):
                if owner == producer_id >= 0:
                    log[index] = (-1 if is_commit else None, *rest)
            for changed, packed in pending.end(producer_id, is_commit=is_commit):
                put(changed, packed)
        elif producer_id >= 0:
            pending.add(producer_id, key, value)
            log.append((producer_id, key, value))
        else:
            pending.overrule(key)
            put(key, value)
            log.append((-1, key, value))
        transactions = Counter(key for staged in pending._by_producer.values() for key in staged)
        at_least_once = {key: max(count, key in effective) for key, count in transactions.items()}
        assert offsets.used == sum((dict.fromkeys(effective, 1) | at_least_once).values())
    expected = {}
    for owner, key, value in log:
        if owner == -1:
            expected[key] = value
    assert effective == {key: value for key, value in expected.items() if value is not None}
    still_open = {key for index, (owner, key, _) in enumerate(log) if owner is not None and owner >= 0}
    assert {key[1:] for key in still_open if pending.is_pending(key)} == set(offsets.staged)


# --- deleting


def test_offsets_of_topics_that_are_read_are_not_deleted(coordinator, consumer):
    coordinator.set_topics(t=3, u=1)
    coordinator.commit({T0: 1, ("u", 0): 2})
    first = consumer("m1", "none", pattern="t")
    request = OffsetDeleteRequest("g", [GroupPartition("t", 0), GroupPartition("u", 0)])
    codes = [entry.error_code for entry in coordinator.ask(request).offsets]
    assert codes == [ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC, OK]
    assert coordinator.committed() == {T0: (1, OK)}
    first.leave()
    coordinator.ask(request)
    assert coordinator.committed() == {}
    with pytest.raises(GroupIdNotFoundError):
        coordinator.ask(OffsetDeleteRequest("other", []))


def test_only_a_group_without_members_is_deleted(coordinator, consumer):
    first = consumer("m1")
    coordinator.commit({T0: 1}, member_id="m1", epoch=1)
    coordinator.commit({T1: 1}, group_id="tools")

    def delete(*names):
        return [group.error_code for group in coordinator.ask(DeleteGroupsRequest(list(names))).groups]

    assert delete("g", "tools", "none") == [ErrorCode.NON_EMPTY_GROUP, OK, ErrorCode.GROUP_ID_NOT_FOUND]
    first.leave()
    coordinator.commit({T1: 1}, producer_id=TXN)
    assert delete("g", "g") == [OK]
    coordinator.end_transaction(TXN, is_commit=True)
    coordinator.reload()
    assert not coordinator.machine.groups
    assert coordinator.describe().error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert coordinator.describe().state == "Dead"


def test_groups_are_listed_by_state(coordinator, consumer):
    settle(consumer("m1"), consumer("m2", group_id="h"))
    coordinator.commit({T0: 1}, group_id="tools")
    consumer("m3", group_id="h")

    def listed(*states):
        return [(g.group_id, g.state) for g in coordinator.ask(ListGroupsRequest(list(states))).groups]

    assert listed() == [("g", "Stable"), ("h", "Reconciling"), ("tools", "Empty")]
    assert listed("stable", "EMPTY") == [("g", "Stable"), ("tools", "Empty")]
    assert listed("Assigning") == listed("Dead") == []
