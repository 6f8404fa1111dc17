"""Replicas that move by themselves to brokers with fewer (auto.rebalance.enable)."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import BrokerLoad, BrokerState, ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.reassignment_commands import reassigning
from kafkalite.metadata.rebalance_commands import MAX_MOVES, RebalanceReplicas, rebalance_replicas

LEVELS = {"metadata.version": 2}


def cluster(placed: list[tuple[int, ...]], racks: dict[int, str | None], *, down: int = 0) -> ClusterImage:
    """Return an image with one topic, whose partitions are on these brokers and in sync."""
    states = tuple(PartitionState(replicas, replicas, replicas[0], 0, 0) for replicas in placed)
    topic = TopicImage("a" * 32, "t", states)
    brokers = {
        node_id: BrokerState(node_id, node_id, (), rack, 0, is_fenced=node_id == down)
        for node_id, rack in racks.items()
    }
    return ClusterImage(
        topics={"t": topic},
        topics_by_id={topic.topic_id: topic},
        brokers=brokers,
        loads=loads(placed),
        levels=LEVELS,
    )


def replay(image: ClusterImage, records: Any) -> ClusterImage:
    return Delta(image).replay_all(records).apply(image.metadata_offset + 1)


def loads(placed: list[tuple[int, ...]]) -> dict[int, BrokerLoad]:
    everywhere = {node_id for replicas in placed for node_id in replicas}
    return {
        node_id: BrokerLoad(
            sum(replicas[0] == node_id for replicas in placed),
            sum(node_id in replicas for replicas in placed),
        )
        for node_id in everywhere
    }


def rebalanced(image: ClusterImage) -> tuple[ClusterImage, int]:
    """Let all moves complete at once. Return (the image afterwards, how many replicas have moved)."""
    moved = 0
    while (decision := rebalance_replicas(image, RebalanceReplicas())).reply:
        assert len(decision.reply) <= MAX_MOVES
        after = replay(image, decision.records)
        placed = [state.final_replicas for state in after.topics["t"].partitions]
        moved += len(decision.reply)
        racks = {node_id: broker.rack for node_id, broker in image.brokers.items()}
        image = cluster(placed, racks)
    return image, moved


def counts(image: ClusterImage) -> list[int]:
    return [image.loads[node_id].replicas if node_id in image.loads else 0 for node_id in image.brokers]


def test_a_new_broker_gets_its_share_of_replicas_and_of_leaders() -> None:
    placed = [((n % 3) + 1, ((n + 1) % 3) + 1) for n in range(30)]
    image, moved = rebalanced(cluster(placed, dict.fromkeys((1, 2, 3, 4))))
    assert counts(image) == [15, 15, 15, 15]
    assert moved == 15
    led = [image.loads[node_id].preferred_leaders for node_id in (1, 2, 3, 4)]
    assert max(led) - min(led) <= 2, led


def test_a_few_partitions_move_at_a_time() -> None:
    image = cluster([(1,)] * 50, dict.fromkeys((1, 2)))
    decision = rebalance_replicas(image, RebalanceReplicas())
    assert (len(decision.reply), len(decision.records)) == (MAX_MOVES, MAX_MOVES)
    moving = replay(image, decision.records)
    assert {
        (topic.topic_id, number): state.target_replicas for topic, number, state in reassigning(moving)
    } == decision.reply
    assert rebalance_replicas(moving, RebalanceReplicas()).reply == {}


def test_nothing_moves_within_one_replica_or_while_a_broker_is_down() -> None:
    assert (
        rebalance_replicas(cluster([(1,), (1,), (2,)], dict.fromkeys((1, 2))), RebalanceReplicas()).reply
        == {}
    )
    down = cluster([(1,)] * 6, dict.fromkeys((1, 2, 3)), down=3)
    assert rebalance_replicas(down, RebalanceReplicas()).reply == {}


def test_partitions_that_lack_a_replica_stay() -> None:
    image = cluster([(1, 2)] * 4, dict.fromkeys((1, 2, 3)))
    behind = tuple(state._replace(isr=(1,)) for state in image.topics["t"].partitions)
    topic = image.topics["t"]._replace(partitions=behind)
    image = ClusterImage(
        topics={"t": topic},
        topics_by_id={topic.topic_id: topic},
        brokers=image.brokers,
        loads=image.loads,
        levels=LEVELS,
    )
    assert rebalance_replicas(image, RebalanceReplicas()).reply == {}


def test_a_partition_keeps_its_racks() -> None:
    image, _ = rebalanced(cluster([(1, 2)] * 8, {1: "a", 2: "b", 3: "b"}))
    assert counts(image) == [8, 4, 4]
    assert all({1} < set(state.replicas) for state in image.topics["t"].partitions)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_cluster_without_racks_is_balanced_with_the_fewest_moves(
    brokers: int, count: int, rng: Any
) -> None:
    nodes = list(range(1, brokers + 1))
    factor = rng.randint(1, max(1, brokers - 1))
    busy = nodes[: max(factor, brokers - 1)]
    placed = [tuple(rng.sample(busy, factor)) for _ in range(count)]
    before = counts(cluster(placed, dict.fromkeys(nodes)))
    image, moved = rebalanced(cluster(placed, dict.fromkeys(nodes)))
    after = counts(image)
    assert max(after) - min(after) <= 1
    share, more = divmod(sum(before), brokers)
    best = sorted([share + 1] * more + [share] * (brokers - more))
    assert moved == sum(max(0, have - want) for have, want in zip(sorted(before), best, strict=True))
