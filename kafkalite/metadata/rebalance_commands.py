"""Decides which replicas move by themselves so that brokers hold equal numbers (``auto.rebalance.enable``).

``balance`` plans all moves of a cluster, by bytes and rates too, but its time grows with the square of the
number of partitions, and the controller must not stop for it. This decision finds a few moves at a time: from
the brokers with the most replicas to those with the fewest. Each move brings the cluster nearer to its
balance, so that their number is the least possible.
"""

# Tests: tests/metadata/test_rebalance_commands.py

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kafkalite.metadata.decision import Decision, edit_records, min_insync_replicas
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.features import REASSIGNMENTS, allows
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.reassignment_commands import reassigning
from kafkalite.metadata.records import MetadataRecord

#: How many partitions move at a time.
MAX_MOVES: Final = 10


@dataclass(frozen=True, slots=True)
class RebalanceReplicas:
    """Begin to move replicas to the brokers with the fewest. The reply is the set of the partitions that
    move, as (topic, partition)."""


def rebalance_replicas(image: ClusterImage, _command: RebalanceReplicas) -> Decision:
    """Decide the command ``RebalanceReplicas``.

    Nothing moves while a reassignment is in progress, or while a registered broker is not live: it may
    return, and its replicas are missing meanwhile. Only partitions move of which all replicas are in sync. A
    partition keeps its number of racks. Nothing moves at a level of metadata.version without reassignments.
    """
    live = image.live_brokers()
    if not allows(image.levels, REASSIGNMENTS):
        return Decision(frozenset())
    if len(live) < len(image.brokers) or next(reassigning(image), None) is not None:
        return Decision(frozenset())
    held: Counter[int] = Counter(dict.fromkeys(live, 0))
    led: Counter[int] = Counter(dict.fromkeys(live, 0))
    for node_id in live & image.loads.keys():
        held[node_id], led[node_id] = image.loads[node_id].replicas, image.loads[node_id].preferred_leaders
    racks = {node_id: image.brokers[node_id].rack for node_id in live}
    moved: set[tuple[str, int]] = set()
    records: list[MetadataRecord] = []
    while len(moved) < MAX_MOVES:
        found = _next_move(image, moved, held, led, racks)
        if found is None:
            break
        topic, number, state, source, target = found
        moved.add((topic.name, number))
        held[source] -= 1
        held[target] += 1
        if state.replicas[0] == source:
            led[source] -= 1
            led[target] += 1
        edit = PartitionEdit(state, min_insync_replicas(image, topic))
        edit.reassign(tuple(target if node_id == source else node_id for node_id in state.replicas))
        records += edit_records(image, topic.topic_id, number, edit)
    return Decision(frozenset(moved), records)


def _next_move(
    image: ClusterImage,
    moved: set[tuple[str, int]],
    held: Mapping[int, int],
    led: Mapping[int, int],
    racks: Mapping[int, str | None],
) -> tuple[TopicImage, int, PartitionState, int, int] | None:
    """Return (topic, partition, its state, the broker that loses the replica, the one that gets it), or None
    if no move makes the numbers of replicas more equal."""
    for source, target in _pairs(held):
        wants_leader = led[source] - led[target] > 1
        other = None
        for topic in image.topics.values():
            for number, state in enumerate(topic.partitions):
                if (topic.name, number) in moved or not _may_move(state, source, target, racks):
                    continue
                if (state.replicas[0] == source) == wants_leader:
                    return topic, number, state, source, target
                other = other or (topic, number, state, source, target)
        if other is not None:
            return other
    return None


def _pairs(held: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (broker with more replicas, broker with fewer), the largest difference first, while it is above
    1."""
    pairs = [(held[few] - held[many], many, few) for many in held for few in held]
    for difference, many, few in sorted(pairs):
        if difference > -2:
            return
        yield many, few


def _may_move(state: PartitionState, source: int, target: int, racks: Mapping[int, str | None]) -> bool:
    replicas = state.replicas
    if source not in replicas or target in replicas or set(state.isr) != set(replicas):
        return False
    before = {racks[node_id] for node_id in replicas}
    after = {racks[target if node_id == source else node_id] for node_id in replicas}
    return len(after) >= len(before)
