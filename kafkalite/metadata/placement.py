"""Chooses the brokers for the replicas of new partitions.

- The numbers of partitions of one topic that any two brokers lead differ by at most one. If the partitions
  cannot be divided equally, brokers that are preferred leaders of the fewest other partitions lead one more.

- Followers are placed in racks that the partition does not use yet, as long as there are any.

- The followers of one leader rotate over the brokers, so that the load of a failed leader is spread over all
  others.

- Among brokers that are equal so far, the one with the fewest replicas is chosen. If several have equally
  few, the next one on a circle is chosen, on which neighbours are in different racks if possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

    The brokers form a circle; ``start`` (any int) is the position at which choices among equal brokers begin.
    ``present`` has the replicas of the topic's existing partitions, ``loads`` the load of each broker from
    all topics. There must be at least ``replication_factor`` brokers.
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


class _Tally:
    """Counts the replicas placed so far in this topic, and each broker's load from other topics."""

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
