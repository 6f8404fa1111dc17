"""Which brokers hold the replicas of new partitions.

Leaders go round the brokers one by one, so within a topic no broker leads two partitions more than another.
The other replicas are the next brokers on the circle, on racks not used yet as long as there are any, and
the circle is shifted by one after every turn, so that the load of a dead leader falls on all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest

from kafkalite.metadata.image import BrokerState


def place(
    brokers: Iterable[BrokerState],
    partitions: range,
    replication_factor: int,
    *,
    start: int = 0,
) -> list[tuple[int, ...]]:
    """Replicas of each partition numbered in ``partitions``, the leader first.

    ``start`` is the place on the circle of brokers where partition 0 has its leader; any int. There must
    be at least ``replication_factor`` brokers.
    """
    circle = _circle(brokers)
    assert 1 <= replication_factor <= len(circle), f"{replication_factor} replicas on {len(circle)} brokers"
    return [
        _replicas(circle, start + partition, partition // len(circle), replication_factor)
        for partition in partitions
    ]


def leader_position(brokers: Iterable[BrokerState], node_id: int) -> int:
    """Where on the circle of brokers ``node_id`` stands; 0 when it is not there."""
    ids = [broker.node_id for broker in _circle(brokers)]
    return ids.index(node_id) if node_id in ids else 0


def _circle(brokers: Iterable[BrokerState]) -> list[BrokerState]:
    """The brokers in turns over the racks, so that neighbours share no rack where that is possible."""
    by_rack: dict[str, list[BrokerState]] = {}
    for broker in sorted(brokers, key=lambda each: each.node_id):
        by_rack.setdefault(broker.rack or "", []).append(broker)
    turns = zip_longest(*(by_rack[rack] for rack in sorted(by_rack)))
    return [broker for broker in chain.from_iterable(turns) if broker is not None]


def _replicas(circle: list[BrokerState], position: int, shift: int, count: int) -> tuple[int, ...]:
    size = len(circle)
    leader = circle[position % size]
    chosen = [leader.node_id]
    if count == 1:
        return (leader.node_id,)
    followers = [circle[(position + 1 + (shift + step) % (size - 1)) % size] for step in range(size - 1)]
    racks = {leader.rack}
    for broker in followers:
        if len(chosen) < count and broker.rack not in racks:
            chosen.append(broker.node_id)
            racks.add(broker.rack)
    for broker in followers:
        if len(chosen) < count and broker.node_id not in chosen:
            chosen.append(broker.node_id)
    return tuple(chosen)
