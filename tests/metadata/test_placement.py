"""Placement: distinct replicas, leaders in turn, racks used before they are repeated, idle brokers first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.metadata.image import BrokerLoad, BrokerState
from kafkalite.metadata.placement import keep_replicas, place


def broker(node_id: int, rack: str | None = None) -> BrokerState:
    return BrokerState(node_id, 1, (), rack, 0)


@st.composite
def clusters(draw):
    racks = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=8))
    brokers = [broker(node_id, rack) for node_id, rack in enumerate(racks, 1)]
    factor = draw(st.integers(1, len(brokers)))
    return draw(st.permutations(brokers)), factor


loads = st.dictionaries(st.integers(1, 8), st.builds(BrokerLoad, st.integers(0, 9), st.integers(0, 9)))


def spread(counts, brokers):
    values = [counts[each.node_id] for each in brokers]
    return max(values) - min(values)


@settings(derandomize=True, deadline=None)
@given(clusters(), st.integers(0, 30), st.integers(0, 100), loads)
def test_replicas_are_distinct_and_spread(cluster, count, start, loads):
    brokers, factor = cluster
    rack_of = {each.node_id: each.rack for each in brokers}
    placed = place(brokers, count, factor, start=start, loads=loads)
    assert len(placed) == count
    assert spread(Counter(replicas[0] for replicas in placed), brokers) <= 1
    for replicas in placed:
        assert len(replicas) == len(set(replicas)) == factor
        assert len({rack_of[node_id] for node_id in replicas}) == min(factor, len(set(rack_of.values())))


@settings(derandomize=True, deadline=None)
@given(clusters(), st.integers(1, 20), st.integers(1, 20), st.integers(0, 8), loads)
def test_added_partitions_keep_the_leaders_even(cluster, first_count, added_count, start, loads):
    brokers, factor = cluster
    first = place(brokers, first_count, factor, start=start)
    added = place(brokers, added_count, factor, present=first, loads=loads)
    assert spread(Counter(replicas[0] for replicas in first + added), brokers) <= 1


@settings(derandomize=True, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 9))
def test_without_racks_the_followers_of_every_leader_are_even(size, turns, start):
    brokers = [broker(node_id) for node_id in range(1, size + 1)]
    placed = place(brokers, turns * size * (size - 1), 2, start=start)
    assert set(Counter(placed).values()) == {turns}


def test_followers_of_one_leader_differ_from_turn_to_turn():
    brokers = [broker(node_id) for node_id in (1, 2, 3)]
    placed = place(brokers, 6, 2)
    assert placed == [(1, 2), (2, 3), (3, 1), (1, 3), (2, 1), (3, 2)]


def test_the_remainder_goes_to_the_brokers_with_the_least():
    brokers = [broker(node_id) for node_id in (1, 2, 3)]
    loads = {1: BrokerLoad(5, 9), 2: BrokerLoad(4, 9), 3: BrokerLoad(0, 1)}
    assert [replicas[0] for replicas in place(brokers, 5, 1, loads=loads)] == [3, 2, 1, 3, 2]
    assert place(brokers, 1, 2, start=1, loads={1: BrokerLoad(0, 0), 2: BrokerLoad(1, 8)}) == [(3, 1)]


def test_a_new_broker_leads_new_topics_until_it_has_caught_up():
    brokers = [broker(node_id) for node_id in (1, 2, 3)]
    loads = {1: BrokerLoad(10, 10), 2: BrokerLoad(10, 10)}
    assert {place(brokers, 1, 1, start=start, loads=loads)[0] for start in range(6)} == {(3,)}


def test_more_replicas_than_brokers_are_a_broken_invariant():
    with pytest.raises(AssertionError):
        place([broker(1)], 1, 2)


def test_replicas_in_sync_are_kept_in_their_order():
    assert keep_replicas((1, 2, 3), 2, (1, 2, 3)) == (1, 2)
    assert keep_replicas((1, 2, 3), 2, (2, 3)) == (2, 3)
    assert keep_replicas((1, 2, 3), 2, (3,)) == (1, 3)
    assert keep_replicas((1, 2, 3), 1, (3,)) == (3,)
