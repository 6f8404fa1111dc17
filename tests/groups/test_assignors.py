"""The assignors: balanced, sticky, co-partitioned, and each partition exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.groups.assignors import ASSIGNORS, range_, uniform
from kafkalite.groups.member import TopicIdPartition

COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4)
ALIKE = st.integers(1, 7).map(lambda count: {f"m{number}": frozenset("abcd") for number in range(count)})
MIXED = st.dictionaries(
    st.sampled_from([f"m{number}" for number in range(6)]),
    st.sets(st.sampled_from("abcd")).map(frozenset),
    min_size=1,
)


def loads(targets):
    return {member: len(partitions) for member, partitions in targets.items()}


def moved(before, after):
    """Return the partitions that moved away from a member that is still there."""
    return sum(len(partitions - after[member]) for member, partitions in before.items() if member in after)


@pytest.mark.parametrize("assignor", ASSIGNORS)
@settings(derandomize=True, deadline=None)
@given(counts=COUNTS, members=MIXED, then=MIXED, more=COUNTS)
def test_each_partition_goes_to_one_subscriber(assignor, counts, members, then, more):
    assign = ASSIGNORS[assignor]
    first = assign(members, counts, {})
    for subscribers, shape, targets in ((members, counts, first), (then, more, assign(then, more, first))):
        assert targets.keys() == subscribers.keys()
        owned = Counter(partition for partitions in targets.values() for partition in partitions)
        subscribed = {topic for topics in subscribers.values() for topic in topics}
        wanted = {(topic, n) for topic, count in shape.items() if topic in subscribed for n in range(count)}
        assert owned == Counter(wanted)
        for member, partitions in targets.items():
            assert {partition.topic_id for partition in partitions} <= subscribers[member]
    assert assign(then, more, first) == assign(then, more, first)


@pytest.mark.parametrize("assignor", ASSIGNORS)
@settings(derandomize=True, deadline=None)
@given(
    counts=COUNTS,
    members=ALIKE,
    had=st.dictionaries(
        st.sampled_from([f"m{number}" for number in range(7)]),
        st.frozensets(st.builds(TopicIdPartition, st.sampled_from("abcd"), st.integers(0, 9))),
    ),
)
def test_a_partition_that_two_had_goes_to_one(assignor, counts, members, had):
    targets = ASSIGNORS[assignor](members, counts, had)
    owned = Counter(partition for partitions in targets.values() for partition in partitions)
    assert owned == Counter((topic, n) for topic, count in counts.items() for n in range(count))


@settings(derandomize=True, deadline=None)
@given(counts=COUNTS, members=ALIKE, then=ALIKE)
def test_uniform_is_balanced_and_moves_no_more_than_it_must(counts, members, then):
    before = uniform(members, counts, {})
    after = uniform(then, counts, before)
    assert max(loads(after).values()) - min(loads(after).values()) <= 1
    total = sum(counts.values())
    quota, extra = divmod(total, len(then))
    # Every member keeps its partitions, up to its share; the larger shares go to members that had most.
    had = sorted((len(before.get(member, ())) for member in then), reverse=True)
    must_move = sum(max(0, count - quota - (rank < extra)) for rank, count in enumerate(had))
    assert moved(before, after) == must_move
    assert uniform(then, counts, after) == after


@settings(derandomize=True, deadline=None)
@given(counts=COUNTS, members=MIXED, then=MIXED)
def test_uniform_with_different_subscriptions_leaves_no_move_that_would_level(counts, members, then):
    after = uniform(then, counts, uniform(members, counts, {}))
    load = loads(after)
    for member, partitions in after.items():
        for topic in {partition.topic_id for partition in partitions}:
            for other, topics in then.items():
                if topic in topics:
                    assert load[member] - load[other] < 2
    assert uniform(then, counts, after) == after


@settings(derandomize=True, deadline=None)
@given(count=st.integers(0, 12), members=ALIKE, then=ALIKE)
def test_range_gives_equal_topics_in_equal_ways(count, members, then):
    counts = {"a": count, "b": count}
    before = range_(members, counts, {})
    after = range_(then, counts, before)
    for partitions in after.values():
        numbers = {
            topic: sorted(number for other, number in partitions if other == topic) for topic in counts
        }
        assert numbers["a"] == numbers["b"]
        assert not numbers["a"] or numbers["a"] == list(range(numbers["a"][0], numbers["a"][-1] + 1))
    assert max(loads(after).values()) - min(loads(after).values()) <= 2


def test_range_keeps_the_order_of_existing_members():
    counts = {"a": 6}
    topics = frozenset("a")
    before = range_(dict.fromkeys(["x", "y", "z"], topics), counts, {})
    after = range_(dict.fromkeys(["a-new-one", "x", "y", "z"], topics), counts, before)
    assert [sorted(n for _, n in after[m]) for m in ["x", "y", "z", "a-new-one"]] == [
        [0, 1],
        [2, 3],
        [4],
        [5],
    ]


@pytest.mark.parametrize("assignor", ASSIGNORS)
def test_no_members_and_no_topics(assignor):
    assign = ASSIGNORS[assignor]
    assert assign({}, {"a": 3}, {}) == {}
    assert assign({"m": frozenset()}, {"a": 3}, {}) == {"m": frozenset()}
    assert assign({"m": frozenset("b")}, {}, {}) == {"m": frozenset()}
