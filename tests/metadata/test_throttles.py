"""Which replicas a throttle limits, and at which rate (KIP-73)."""

from __future__ import annotations

import pytest

from kafkalite.metadata.throttles import (
    FOLLOWER_RATE,
    FOLLOWER_REPLICAS,
    LEADER_RATE,
    LEADER_REPLICAS,
    UNLIMITED,
    Throttle,
    items_text,
    replica_items,
    throttle_of,
)


def test_a_rate_comes_from_the_broker_and_the_replicas_from_the_topics(metadata):
    metadata.create("a", configs={LEADER_REPLICAS: "0:1,2:1,3:2", FOLLOWER_REPLICAS: "1:1"})
    metadata.create("b", configs={LEADER_REPLICAS: "*"})
    metadata.create("c", configs={LEADER_REPLICAS: "0:11"})
    metadata.alter("broker", "1", {LEADER_RATE: "500"})
    as_leader = throttle_of(metadata.image, 1, LEADER_RATE, LEADER_REPLICAS, UNLIMITED)
    assert as_leader == Throttle(500, {"a": frozenset({0, 2}), "b": None, "c": frozenset()})
    assert [as_leader.covers("a", number) for number in range(4)] == [True, False, True, False]
    assert as_leader.covers("b", 7)
    assert not as_leader.covers("c", 0)
    assert not as_leader.covers("d", 0)
    as_follower = throttle_of(metadata.image, 1, FOLLOWER_RATE, FOLLOWER_REPLICAS, 70)
    assert as_follower == Throttle(70, {"a": frozenset({1})})


def test_a_change_of_another_option_parses_no_list_again(metadata):
    metadata.create("a", configs={LEADER_REPLICAS: ",".join(f"{number}:1" for number in range(1_000))})
    before = throttle_of(metadata.image, 1, LEADER_RATE, LEADER_REPLICAS, UNLIMITED).listed["a"]
    metadata.alter("broker", "1", {LEADER_RATE: "500"})
    after = throttle_of(metadata.image, 1, LEADER_RATE, LEADER_REPLICAS, UNLIMITED).listed["a"]
    assert len(after) == 1_000
    assert after is before
    assert len(throttle_of(metadata.image, 2, LEADER_RATE, LEADER_REPLICAS, UNLIMITED).listed["a"]) == 0


def test_without_a_rate_nothing_is_limited(metadata):
    metadata.create("a", configs={LEADER_REPLICAS: "*"})
    assert not throttle_of(metadata.image, 1, LEADER_RATE, LEADER_REPLICAS, UNLIMITED).covers("a", 0)


@pytest.mark.parametrize(
    ("items", "text"), [(set(), None), ({"10:1", "2:3", "2:1"}, "2:1,2:3,10:1"), ({"*", "0:1"}, "*,0:1")]
)
def test_lists_of_replicas_are_written_in_order(items, text):
    assert items_text(items) == text
    assert replica_items(text) == items
