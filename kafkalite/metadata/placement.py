"""Chooses the brokers for the replicas of new partitions.

- The preferred leader of a new partition is a broker that is the preferred leader of the fewest partitions of
  the topic. Among these brokers, it is the one that is the preferred leader of the fewest partitions of all
  topics.

- Followers are placed in racks that the partition does not use yet, as long as there are any.

- The followers of one leader rotate over the brokers, so that the load of a failed leader is spread over all
  others.

- Among brokers that are equal so far, the follower is the one with the fewest replicas of the topic, then the
  one with the fewest replicas of all topics.

- Among brokers that are still equal, the next one on a circle is chosen. Neighbours on the circle are in
  different racks if possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Final

from kafkalite.metadata.image import BrokerLoad, BrokerState

_NO_LOAD: Final = BrokerLoad(0, 0)


def place(
    brokers: Iterable[BrokerState],
    count: int,
    replication_factor: int,
    *,
    start: int = 0,
    present: Sequence[tuple[int, ...]] = (),
    loads: Mapping[int, BrokerLoad] | None = None,
) -> list[tuple[int, ...]]:
    """Return the replicas of each of ``count`` new partitions of one topic, the preferred leader first.

    The brokers form a circle. Choices among equal brokers begin at the position ``start`` (any int) plus the
    number of existing partitions. ``present`` has the replicas of the topic's existing partitions, ``loads``
    the load of each broker from all topics. There must be at least ``replication_factor`` brokers.
    """
    circle = _circle(brokers)
    size = len(circle)
    assert 1 <= replication_factor <= size, f"{replication_factor} replicas on {size} brokers"
    start = (start + len(present)) % size
    circle = circle[start:] + circle[:start]
    tally = _Tally(circle, loads or {})
    for replicas in present:
        tally.add(replicas)
    placed: list[tuple[int, ...]] = []
    for _ in range(count):
        replicas = tally.next(replication_factor)
        tally.add(replicas)
        placed.append(replicas)
    return placed


def add_replicas(
    replicas: Sequence[int], replication_factor: int, racks: Mapping[int, str | None], held: Mapping[int, int]
) -> tuple[int, ...]:
    """Return ``replicas`` followed by further brokers, up to ``replication_factor`` replicas or as many as
    there are brokers.

    ``racks`` has the rack of each broker that may get a replica, and may have others. ``held`` has the number
    of replicas of each broker. A further replica is in a rack that the partition does not use yet if there is
    one, and among these brokers on the one with the fewest replicas.
    """
    chosen = list(replicas)
    while len(chosen) < replication_factor and racks.keys() - set(chosen):
        used = {racks[node_id] for node_id in chosen if node_id in racks}
        rest = [node_id for node_id in sorted(racks) if node_id not in chosen]
        chosen.append(min(rest, key=lambda node_id: (racks[node_id] in used, held.get(node_id, 0))))
    return tuple(chosen)


def keep_replicas(
    replicas: Sequence[int], replication_factor: int, in_sync: Collection[int]
) -> tuple[int, ...]:
    """Return ``replication_factor`` of ``replicas`` in their order: those in ``in_sync`` before others, the
    first ones before the last."""
    best = sorted(replicas, key=lambda node_id: node_id not in in_sync)[:replication_factor]
    return tuple(node_id for node_id in replicas if node_id in best)


class _Tally:
    """Counts the replicas of this topic that are placed so far. Also has each broker's load from all topics
    before the placement."""

    def __init__(self, circle: list[BrokerState], loads: Mapping[int, BrokerLoad]) -> None:
        self._size = len(circle)
        self._racks = {broker.node_id: broker.rack for broker in circle}
        self._positions = {broker.node_id: position for position, broker in enumerate(circle)}
        self._loads = {broker.node_id: loads.get(broker.node_id, _NO_LOAD) for broker in circle}
        self._leading: Counter[int] = Counter()
        self._holding: Counter[int] = Counter()
        self._following: Counter[tuple[int, int, int]] = Counter()  # (leader, replica index, node) -> count

    def add(self, replicas: tuple[int, ...]) -> None:
        leader = replicas[0]
        self._leading[leader] += 1
        for place_number, node_id in enumerate(replicas):
            self._holding[node_id] += 1
            self._following[leader, place_number, node_id] += 1

    def next(self, replication_factor: int) -> tuple[int, ...]:
        leading, loads = self._leading, self._loads
        leader = min(
            self._positions,
            key=lambda node_id: (
                leading[node_id],
                loads[node_id].preferred_leaders,
                self._positions[node_id],
            ),
        )
        chosen = [leader]
        while len(chosen) < replication_factor:
            chosen.append(self._next_follower(chosen))
        return tuple(chosen)

    def _next_follower(self, chosen: list[int]) -> int:
        leader, place_number = chosen[0], len(chosen)
        used_racks = {self._racks[node_id] for node_id in chosen}

        def rank(node_id: int) -> tuple[bool, int, int, int, int]:
            distance = (self._positions[node_id] - self._positions[leader]) % self._size
            return (
                self._racks[node_id] in used_racks,
                self._following[leader, place_number, node_id],
                self._holding[node_id],
                self._loads[node_id].replicas,
                distance,
            )

        return min((node_id for node_id in self._positions if node_id not in chosen), key=rank)


def _circle(brokers: Iterable[BrokerState]) -> list[BrokerState]:
    """Return the brokers in an order that alternates racks, so that neighbours are in different racks if
    possible."""
    by_rack: dict[str, list[BrokerState]] = {}
    for broker in sorted(brokers, key=lambda each: each.node_id):
        by_rack.setdefault(broker.rack or "", []).append(broker)
    turns = zip_longest(*(by_rack[rack] for rack in sorted(by_rack)))
    return [broker for broker in chain.from_iterable(turns) if broker is not None]
