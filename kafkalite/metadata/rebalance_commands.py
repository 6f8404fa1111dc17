"""Decides which replicas move by themselves so that brokers hold equal numbers (``auto.rebalance.enable``).

``balance`` plans all moves of a cluster, by bytes and rates too, but its time grows with the square of the
number of partitions, and the controller must not stop for it. This decision finds a few moves at a time: from
the brokers with the most replicas to those with the fewest. Each move brings the cluster nearer to its
balance, so that their number is the least possible.
"""

# Tests: tests/metadata/test_rebalance_commands.py

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kafkalite.metadata.decision import Decision, edit_records, min_insync_replicas
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.features import REASSIGNMENTS, allows
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.reassignment_commands import reassigning
from kafkalite.metadata.records import MetadataRecord

#: How many partitions move at a time.
MAX_MOVES: Final = 10

_Placed: TypeAlias = tuple[TopicImage, int, PartitionState]
"""(topic, partition, its state)"""


@dataclass(frozen=True, slots=True)
class RebalanceReplicas:
    """Begin to move replicas to the brokers with the fewest. The reply is {(topic id, partition): its target
    replicas} of the partitions that move."""


def rebalance_replicas(image: ClusterImage, _command: RebalanceReplicas) -> Decision:
    """Decide the command ``RebalanceReplicas``.

    Nothing moves while a reassignment is in progress, or while a registered broker is not live: it may
    return, and its replicas are missing meanwhile. Only partitions move of which all replicas are in sync. A
    partition keeps its number of racks. Nothing moves at a level of metadata.version without reassignments.
    """
    live = image.live_brokers()
    if not allows(image.levels, REASSIGNMENTS):
        return Decision({})
    if len(live) < len(image.brokers) or next(reassigning(image), None) is not None:
        return Decision({})
    held: Counter[int] = Counter(dict.fromkeys(live, 0))
    led: Counter[int] = Counter(dict.fromkeys(live, 0))
    for node_id in live & image.loads.keys():
        held[node_id], led[node_id] = image.loads[node_id].replicas, image.loads[node_id].preferred_leaders
    racks = {node_id: image.brokers[node_id].rack for node_id in live}
    held_by = _partitions_by_broker(image, {many for many, _ in _pairs(held)})
    vain: set[tuple[int, int]] = set()
    moved: dict[tuple[str, int], tuple[int, ...]] = {}
    records: list[MetadataRecord] = []
    while len(moved) < MAX_MOVES:
        found = _next_move(held_by, vain, moved, held, led, racks)
        if found is None:
            break
        (topic, number, state), source, target = found
        held[source] -= 1
        held[target] += 1
        if state.replicas[0] == source:
            led[source] -= 1
            led[target] += 1
        edit = PartitionEdit(state, min_insync_replicas(image, topic))
        replicas = tuple(target if node_id == source else node_id for node_id in state.replicas)
        moved[topic.topic_id, number] = replicas
        edit.reassign(replicas)
        records += edit_records(image, topic.topic_id, number, edit)
    return Decision(moved, records)


def _partitions_by_broker(image: ClusterImage, brokers: Container[int]) -> dict[int, list[_Placed]]:
    """Return the partitions that have a replica on each of ``brokers``, and all replicas in sync."""
    found: dict[int, list[_Placed]] = defaultdict(list)
    if brokers:
        for topic in image.topics.values():
            for number, state in enumerate(topic.partitions):
                if set(state.isr) == set(state.replicas):
                    for node_id in state.replicas:
                        if node_id in brokers:
                            found[node_id].append((topic, number, state))
    return found


def _next_move(
    held_by: Mapping[int, Sequence[_Placed]],
    vain: set[tuple[int, int]],
    moved: Container[tuple[str, int]],
    held: Mapping[int, int],
    led: Mapping[int, int],
    racks: Mapping[int, str | None],
) -> tuple[_Placed, int, int] | None:
    """Return (partition, the broker that loses the replica, the one that gets it), or None if no move makes
    the numbers of replicas more equal.

    ``vain`` has the pairs of brokers between which no partition may move; those found are added to it.
    """
    for source, target in _pairs(held):
        if (source, target) in vain:
            continue
        wants_leader = led[source] - led[target] > 1
        other = None
        for placed in held_by.get(source, ()):
            topic, number, state = placed
            if (topic.topic_id, number) in moved or not _may_move(state, source, target, racks):
                continue
            if (state.replicas[0] == source) == wants_leader:
                return placed, source, target
            other = other or placed
        if other is not None:
            return other, source, target
        vain.add((source, target))
    return None


def is_overruled(image: ClusterImage, topic_id: str, number: int, target: tuple[int, ...]) -> bool:
    """Whether a move to ``target`` that ``RebalanceReplicas`` began was cancelled or given another target, so
    that an operator wants something else. False if the topic was deleted."""
    state = image.partition_of(topic_id, number)
    return state is not None and set(state.target_replicas or state.replicas) != set(target)


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
    if target in replicas:
        return False
    if racks[target] == racks[source]:
        return True
    before = {racks[node_id] for node_id in replicas}
    after = {racks[target if node_id == source else node_id] for node_id in replicas}
    return len(after) >= len(before)
