"""Placement: distinct replicas, leaders in turn, racks used before they are repeated."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.metadata.image import BrokerState
from kafkalite.metadata.placement import leader_position, place


def broker(node_id: int, rack: str | None = None) -> BrokerState:
    return BrokerState(node_id, 1, (), rack, 0)


@st.composite
def clusters(draw):
    racks = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=8))
    brokers = [broker(node_id, rack) for node_id, rack in enumerate(racks, 1)]
    factor = draw(st.integers(1, len(brokers)))
    return draw(st.permutations(brokers)), factor


@settings(derandomize=True, deadline=None)
@given(clusters(), st.integers(0, 30), st.integers(0, 100))
def test_replicas_are_distinct_and_spread(cluster, count, start):
    brokers, factor = cluster
    rack_of = {each.node_id: each.rack for each in brokers}
    placed = place(brokers, range(count), factor, start=start)
    assert len(placed) == count
    leaders = Counter(replicas[0] for replicas in placed)
    assert max(leaders.values(), default=0) - min((leaders[n] for n in rack_of), default=0) <= 1
    for replicas in placed:
        assert len(replicas) == len(set(replicas)) == factor
        assert len({rack_of[node_id] for node_id in replicas}) == min(factor, len(set(rack_of.values())))


@settings(derandomize=True, deadline=None)
@given(clusters(), st.integers(1, 20), st.integers(1, 20))
def test_added_partitions_go_on_where_the_first_ones_ended(cluster, first_count, added_count):
    brokers, factor = cluster
    total = first_count + added_count
    first = place(brokers, range(first_count), factor, start=3)
    start = leader_position(brokers, first[0][0])
    added = place(brokers, range(first_count, total), factor, start=start)
    assert first + added == place(brokers, range(total), factor, start=3)


def test_followers_of_one_leader_differ_from_turn_to_turn():
    brokers = [broker(node_id) for node_id in (1, 2, 3)]
    placed = place(brokers, range(6), 2)
    assert placed == [(1, 2), (2, 3), (3, 1), (1, 3), (2, 1), (3, 2)]


def test_the_position_of_a_broker_that_left_is_the_first():
    assert leader_position([broker(1), broker(2)], 2) == 1
    assert leader_position([broker(1), broker(2)], 9) == 0


def test_more_replicas_than_brokers_are_a_broken_invariant():
    with pytest.raises(AssertionError):
        place([broker(1)], range(1), 2)
