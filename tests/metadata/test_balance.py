"""Balancing: even loads, few bytes, no constraint broken, nothing moved twice.

The bounds are computed apart from the planner: no plan of any kind can do better.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import InvalidReplicationFactorError
from kafkalite.metadata.balance import TOLERANCE, Host, Measure, PlacedPartition, plan_balance, plan_drain

MEASURES = pytest.mark.parametrize("measure", Measure, ids=lambda measure: measure.value)


def weight(partition, measure):
    if measure is Measure.PARTITIONS:
        return 1
    return partition.size_bytes if measure is Measure.BYTES else partition.rate


def apply(partitions, plan):
    new = {(move.topic, move.partition): move.new_replicas for move in plan.moves}
    return [each._replace(replicas=new.get(each[:2], each.replicas)) for each in partitions]


def loads_of(hosts, partitions, measure, *, leaders=False):
    loads = {host.node_id: 0 for host in hosts}
    for each in partitions:
        for node_id in each.replicas[:1] if leaders else each.replicas:
            loads[node_id] += weight(each, measure)
    return loads


def racks_of(hosts, node_ids):
    racks = {host.node_id: host.rack for host in hosts}
    return {racks[node_id] for node_id in node_ids}


def skewed_cluster(seed):
    """Return a random cluster of 3 to 30 brokers, up to a quarter of them empty, with up to 2,000 partitions.

    Sizes are log-normal, rates are proportional but for a random factor, and some brokers are popular.
    """
    rng = random.Random(seed)
    count, partition_count = rng.randint(3, 30), rng.randint(60, 2_000)
    old = count - rng.randint(0, max(1, count // 4))
    factor, rack_count = rng.randint(1, min(3, old)), rng.choice([1, 1, 2, 3])
    hosts = [
        Host(node_id, "abc"[node_id % rack_count] if rack_count > 1 else None) for node_id in range(count)
    ]
    sigma, skew = rng.choice([0.5, 1, 1.5, 2]), rng.choice([0, 0.5, 1, 1.5])
    popularity = [(place + 1) ** -skew for place in range(old)]
    rng.shuffle(popularity)
    partitions = []
    for number in range(partition_count):
        replicas: list[int] = []
        while len(replicas) < factor:
            chosen = rng.choices(range(old), popularity)[0]
            used = {node_id % rack_count for node_id in replicas}
            is_spread = chosen % rack_count not in used or len(used) == min(old, rack_count)
            if chosen not in replicas and is_spread:
                replicas.append(chosen)
        rate = rng.lognormvariate(10, sigma)
        size = int(rate * 86_400 * rng.lognormvariate(0, 0.5))
        partitions.append(
            PlacedPartition(f"t{number % 17}", number, tuple(replicas), replicas[0], size, rate)
        )
    return hosts, partitions


def least_maximum(hosts, partitions, measure):
    """Return a load that some broker has at least in any placement with the same constraints.

    It is the greatest of the mean load, the largest partition, and for each rack the mean load of the
    replicas that cannot be in other racks.
    """
    members = Counter(host.rack for host in hosts)
    total = largest = 0.0
    forced: defaultdict[str | None, float] = defaultdict(float)
    for each in partitions:
        each_weight, factor = weight(each, measure), len(each.replicas)
        total += each_weight * factor
        largest = max(largest, each_weight)
        in_one = factor - len(racks_of(hosts, each.replicas)) + 1  # replicas that one rack may have
        for rack in members:
            elsewhere = sum(min(in_one, members[other]) for other in members if other != rack)
            forced[rack] += each_weight * max(0, factor - elsewhere)
    return max(total / len(hosts), largest, *(forced[rack] / members[rack] for rack in members))


def least_bytes(hosts, partitions, after, measure):
    """Return bytes that any plan copies at least if the load of each broker ends between the lowest and the
    highest load in its rack in ``after``.

    A broker above the highest load loses at least the difference, and at best by the replicas with the fewest
    bytes for their load, the last one in part. Each of them is copied to another broker, so the sum over all
    brokers is a bound. The same holds for the replicas that brokers below the lowest load receive.
    """

    def cheapest(replicas, needed):
        cost = 0.0
        for size, load in sorted(
            ((size, load) for size, load in replicas if load), key=lambda r: r[0] / r[1]
        ):
            if needed <= 0:
                break
            part = min(1.0, needed / load)
            cost, needed = cost + part * size, needed - part * load
        return cost

    now, then = loads_of(hosts, partitions, measure), loads_of(hosts, after, measure)
    held = defaultdict(list)
    for each in partitions:
        for node_id in each.replicas:
            held[node_id].append((each.size_bytes, weight(each, measure)))
    in_rack = defaultdict(list)
    for host in hosts:
        in_rack[host.rack].append(then[host.node_id])
    leaving = lacking = 0.0
    for host in hosts:
        leaving += cheapest(held[host.node_id], now[host.node_id] - max(in_rack[host.rack]))
        lacking += max(0, min(in_rack[host.rack]) - now[host.node_id])
    return max(leaving, cheapest([replica for replicas in held.values() for replica in replicas], lacking))


@pytest.mark.parametrize(("measure", "factor"), [("partitions", 1.2), ("bytes", 1.2), ("rates", 1.7)])
def test_twenty_skewed_clusters_end_within_5_percent_of_the_best_with_few_bytes(measure, factor):
    """By rates, the least bytes take parts of partitions with few bytes for their rate. No plan can do so."""
    measure = Measure(measure)
    for seed in range(20):
        hosts, partitions = skewed_cluster(seed)
        plan = plan_balance(hosts, partitions, measure)
        after = apply(partitions, plan)
        best = least_maximum(hosts, partitions, measure)
        if measure is Measure.PARTITIONS:
            best = math.ceil(best)
        most_loaded = max(loads_of(hosts, after, measure).values())
        assert most_loaded <= best * (1 + TOLERANCE) * 1.000001, (seed, most_loaded / best)
        least = least_bytes(hosts, partitions, after, measure)
        assert least * 0.999999 <= plan.bytes_to_copy <= factor * least, (seed, plan.bytes_to_copy / least)


@MEASURES
def test_new_brokers_get_their_share(measure):
    hosts, partitions = skewed_cluster(11)
    present = {node_id for each in partitions for node_id in each.replicas}
    new = {host.node_id for host in hosts} - present
    after = loads_of(hosts, apply(partitions, plan_balance(hosts, partitions, measure)), measure)
    mean = sum(after.values()) / len(after)
    assert new
    assert all(after[node_id] >= mean * (1 - TOLERANCE) - 1 for node_id in new)


@MEASURES
def test_thirty_brokers_with_two_thousand_partitions_take_seconds_and_not_minutes(measure):
    rng = random.Random(7)
    hosts = [Host(node_id, "abc"[node_id % 3]) for node_id in range(30)]
    partitions = []
    for number in range(2_000):
        replicas = tuple(rng.randrange(9) * 3 + rack for rack in range(3))
        size = int(rng.lognormvariate(20, 1.5))
        partitions.append(
            PlacedPartition("t", number, replicas, replicas[0], size, rng.lognormvariate(10, 1.5))
        )
    began = time.process_time()
    plan = plan_balance(hosts, partitions, measure)
    assert time.process_time() - began < 15  # about one, without coverage and on a quiet machine
    assert plan.moves


# --- exhaustive search on small clusters -----------------------------------------------------------


def small_cluster(seed):
    rng = random.Random(seed)
    count = rng.randint(3, 4)
    hosts = [Host(node_id, rng.choice("ab")) for node_id in range(count)]
    partitions = []
    for number in range(rng.randint(3, 6)):
        replicas = tuple(rng.sample(range(rng.randint(2, count)), rng.randint(1, 2)))
        size = int(rng.lognormvariate(10, 1))
        partitions.append(PlacedPartition("t", number, replicas, replicas[0], size, size / 10))
    return hosts, partitions


def best_maximum(hosts, partitions, measure):
    """Return the least possible load of the most loaded broker, from all placements."""
    reached = {(0,) * len(hosts)}
    for each in partitions:
        rack_count = len(racks_of(hosts, each.replicas))
        choices = [
            chosen
            for chosen in itertools.combinations(range(len(hosts)), len(each.replicas))
            if len(racks_of(hosts, chosen)) >= rack_count
        ]
        reached = {
            tuple(load + weight(each, measure) * (node_id in chosen) for node_id, load in enumerate(loads))
            for loads in reached
            for chosen in choices
        }
    return min(map(max, reached))


@MEASURES
def test_small_clusters_end_within_5_percent_of_the_best_of_all_placements(measure):
    """Local search does not always solve the puzzle of a few partitions: one cluster of 40 may be worse."""
    worse = []
    for seed in range(40):
        hosts, partitions = small_cluster(seed)
        after = apply(partitions, plan_balance(hosts, partitions, measure))
        best = best_maximum(hosts, partitions, measure)
        if max(loads_of(hosts, after, measure).values()) > best * (1 + TOLERANCE):
            worse.append(seed)
    assert len(worse) <= 1, worse


@MEASURES
def test_leaders_of_small_clusters_end_within_5_percent_of_the_best_of_all_choices(measure):
    worse = []
    for seed in range(40):
        hosts, partitions = small_cluster(seed)
        plan = plan_balance(hosts, partitions, measure, leaders_only=True)
        best = min(
            max(
                Counter(
                    {
                        n: sum(weight(p, measure) for p, c in zip(partitions, leaders, strict=True) if c == n)
                        for n in set(leaders)
                    }
                ).values()
            )
            for leaders in itertools.product(*(each.replicas for each in partitions))
        )
        after = loads_of(hosts, apply(partitions, plan), measure, leaders=True)
        if max(after.values()) > best * (1 + TOLERANCE):
            worse.append(seed)
    assert len(worse) <= 1, worse


# --- leaders ---------------------------------------------------------------------------------------


@MEASURES
def test_leaders_are_spread_without_copying_a_byte(measure):
    rng = random.Random(3)
    hosts = [Host(node_id) for node_id in range(9)]
    partitions = []
    for number in range(900):
        replicas = tuple(sorted(rng.sample(range(9), 3)))  # so that broker 0 leads a third, and 8 nothing
        partitions.append(
            PlacedPartition(
                "t", number, replicas, replicas[0], int(rng.lognormvariate(20, 1)), rng.lognormvariate(5, 1)
            )
        )
    plan = plan_balance(hosts, partitions, measure, leaders_only=True)
    assert plan.bytes_to_copy == 0
    assert all(set(move.replicas) == set(move.new_replicas) for move in plan.moves)
    loads = loads_of(hosts, apply(partitions, plan), measure, leaders=True)
    assert max(loads.values()) <= sum(loads.values()) / 9 * (1 + TOLERANCE)
    assert min(loads.values()) >= sum(loads.values()) / 9 * (1 - TOLERANCE)


# --- any cluster -----------------------------------------------------------------------------------


@st.composite
def clusters(draw):
    count = draw(st.integers(1, 7))
    flags = st.sampled_from([True, True, True, False])
    hosts = [
        Host(
            node_id,
            draw(st.sampled_from([None, "a", "b", "c"])),
            draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])),
            draw(flags),
            not draw(flags),
        )
        for node_id in range(1, count + 1)
    ]
    sizes = st.one_of(st.integers(0, 5), st.integers(0, 1_000_000))
    partitions = []
    for number in range(draw(st.integers(0, 14))):
        replicas = draw(st.permutations(range(1, count + 1)))[: draw(st.integers(1, min(4, count)))]
        leader = draw(st.sampled_from([*replicas, replicas[0], -1]))
        partitions.append(
            PlacedPartition("t", number, tuple(replicas), leader, draw(sizes), float(draw(sizes)))
        )
    return hosts, partitions


def planned(cluster, measure, **options):
    try:
        return plan_balance(*cluster, measure, **options)
    except InvalidReplicationFactorError:
        live = {host.node_id for host in cluster[0] if host.is_live and not host.is_draining}
        draining = {host.node_id for host in cluster[0] if host.is_draining}
        assert any(
            draining & set(each.replicas) and len(each.replicas) > len(live | set(each.replicas) - draining)
            for each in cluster[1]
        )
        return None


any_cluster = settings(derandomize=True, deadline=None, max_examples=300)
modes = st.sampled_from([{}, {"leaders_only": True}, {"only_draining": True}])


@any_cluster
@given(clusters(), st.sampled_from(Measure), modes)
def test_no_plan_breaks_a_constraint(cluster, measure, options):
    hosts, partitions = cluster
    plan = planned(cluster, measure, **options)
    if plan is None:
        return
    targets = {host.node_id for host in hosts if host.is_live and not host.is_draining}
    draining = {host.node_id for host in hosts if host.is_draining}
    dead = {host.node_id for host in hosts if not host.is_live} - draining
    reachable = racks_of(hosts, targets | dead)
    for old, new in zip(partitions, apply(partitions, plan), strict=True):
        assert len(new.replicas) == len(set(new.replicas)) == len(old.replicas)
        added, removed = set(new.replicas) - set(old.replicas), set(old.replicas) - set(new.replicas)
        assert added <= targets
        assert not removed & dead
        if old.leader < 0:
            assert new.replicas == old.replicas
            assert ((old.topic, old.partition) in plan.stuck) == (
                bool(draining & set(old.replicas)) and not options.get("leaders_only")
            )
        elif not options.get("leaders_only"):
            assert not draining & set(new.replicas)
        if options.get("only_draining"):
            assert removed <= draining
        if options.get("leaders_only"):
            assert not added
        before, after = racks_of(hosts, old.replicas), racks_of(hosts, new.replicas)
        if draining & set(old.replicas):
            assert len(after) >= min(len(before), len(reachable)) - len(dead)
        else:
            assert len(after) >= len(before)


@any_cluster
@given(clusters(), st.sampled_from(Measure), modes, st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_its_input(cluster, measure, options, rng):
    hosts, partitions = cluster
    plan = planned(cluster, measure, **options)
    if plan is not None:
        shuffled = rng.sample(hosts, len(hosts)), rng.sample(partitions, len(partitions))
        assert plan_balance(*shuffled, measure, **options) == plan


@any_cluster
@given(clusters(), st.sampled_from(Measure), modes)
def test_a_balanced_cluster_gives_no_moves(cluster, measure, options):
    """The cluster that results from a plan is as balanced as the planner can make it."""
    plan = planned(cluster, measure, **options)
    if plan is not None:
        after = apply(cluster[1], plan)
        assert plan_balance(cluster[0], after, measure, **options).moves == ()


@any_cluster
@given(clusters(), st.sampled_from(Measure), modes)
def test_the_plan_reaches_the_loads_that_it_states(cluster, measure, options):
    hosts, partitions = cluster
    plan = planned(cluster, measure, **options)
    if plan is None:
        return
    after = apply(partitions, plan)
    for placed, side in ((partitions, "before"), (after, "after")):
        stated = {each.node_id: getattr(each, side) for each in plan.hosts}
        for kind, field in (("partitions", "replicas"), ("bytes", "size_bytes"), ("rates", "rate")):
            loads = loads_of(hosts, placed, Measure(kind))
            assert {node_id: getattr(load, field) for node_id, load in stated.items()} == loads
    copied = sum(
        each.size_bytes * len(set(each.replicas) - set(old.replicas))
        for old, each in zip(partitions, after, strict=True)
    )
    assert plan.bytes_to_copy == copied == sum(each.bytes_in for each in plan.hosts)
    assert copied == sum(each.bytes_out for each in plan.hosts)


@any_cluster
@given(clusters(), st.sampled_from(Measure))
def test_live_brokers_end_no_further_from_even(cluster, measure):
    hosts = [host._replace(is_live=True, is_draining=False, capacity=1.0) for host in cluster[0]]
    partitions = cluster[1]
    plan = plan_balance(hosts, partitions, measure)
    before, after = loads_of(hosts, partitions, measure), loads_of(hosts, apply(partitions, plan), measure)
    largest = max((weight(each, measure) for each in partitions), default=0)
    assert max(after.values()) <= max(*before.values(), 2 * largest, 1)


# --- draining and time -----------------------------------------------------------------------------


def test_draining_moves_only_the_replicas_of_that_broker_to_the_emptiest_ones():
    hosts = [Host(node_id) for node_id in (1, 2, 3, 4)]
    sizes = (8, 4, 2, 1)
    partitions = [PlacedPartition("t", number, (1, 2), 2, size) for number, size in enumerate(sizes)]
    plan = plan_drain(hosts, partitions, [1])
    assert {move.partition: move.new_replicas for move in plan.moves} == {
        0: (3, 2),
        1: (4, 2),
        2: (4, 2),
        3: (4, 2),
    }
    assert plan.bytes_to_copy == 15
    assert {each.node_id: (each.bytes_in, each.bytes_out) for each in plan.hosts} == {
        1: (0, 0),
        2: (0, 15),
        3: (8, 0),
        4: (7, 0),
    }


def test_draining_needs_a_broker_for_each_replica():
    hosts = [Host(node_id) for node_id in (1, 2, 3)]
    with pytest.raises(
        InvalidReplicationFactorError, match="t-0 has 3 replicas, and 2 other brokers are live"
    ):
        plan_drain(hosts, [PlacedPartition("t", 0, (1, 2, 3), 1, 5)], [3])


def test_the_only_replica_of_a_dead_broker_stays_and_is_named():
    hosts = [Host(1), Host(2), Host(3, is_live=False)]
    partitions = [PlacedPartition("t", 0, (3,), -1, 5), PlacedPartition("t", 1, (3, 1), 1, 5)]
    plan = plan_drain(hosts, partitions, [3])
    assert plan.stuck == (("t", 0),)
    assert [(move.partition, move.new_replicas) for move in plan.moves] == [(1, (2, 1))]


def test_a_broker_that_drains_the_last_one_of_its_rack_keeps_as_many_racks_as_there_are():
    hosts = [Host(1, "a"), Host(2, "b"), Host(3, "c"), Host(4, "a"), Host(5, "b")]
    plan = plan_drain(hosts, [PlacedPartition("t", 0, (1, 3), 1, 5)], [3])
    assert plan.moves[0].new_replicas in {(1, 2), (1, 5)}


def test_the_duration_is_that_of_the_busiest_broker():
    hosts = [Host(1), Host(2), Host(3)]
    plan = plan_drain(hosts, [PlacedPartition("t", n, (1, 2), 2, 1_000, 10.0) for n in range(3)], [1])
    assert plan.duration_s(100.0) == pytest.approx(3_000 / 70)
    assert plan.duration_s(30.0) == math.inf
