"""Plans which replicas and leaderships to move so that the brokers of a cluster are loaded evenly.

A broker's load is its number of replicas, their bytes, or the bytes per second that producers write to
them (``Measure``). Its share is the mean load for its capacity, in its rack if the racks cannot be loaded
evenly. A partition that is larger than the share counts as one share, because it cannot be divided. A load
is balanced if it is within TOLERANCE of the share; a number of replicas, if it is the share rounded up or
down.

``plan_balance`` moves replicas, then makes other replicas preferred leaders, until the loads are balanced or
no change improves them. A partition keeps its number of replicas, on distinct brokers in as many racks as
before. Brokers that are not live neither receive nor lose replicas, but those to drain lose all.

docs/adr/0027-balancing-by-transfer-and-local-search.md gives the reasons for the algorithm, with figures.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.errors import InvalidReplicationFactorError
from kafkalite.metadata.spreading import Bin, Item, Spreader

#: How far the load of a broker in bytes or bytes per second may be from its share.
TOLERANCE: Final = 0.05


class Measure(enum.Enum):
    """What the load of a broker is."""

    PARTITIONS = "partitions"  #: the number of replicas
    BYTES = "bytes"  #: their sizes
    RATES = "rates"  #: the bytes per second written to them


class Host(NamedTuple):
    """A broker that may hold replicas."""

    node_id: int
    rack: str | None = None  #: brokers without one count as one rack
    capacity: float = 1.0  #: relative to other brokers; above 0
    is_live: bool = True  #: neither fenced nor shutting down
    is_draining: bool = False  #: all replicas shall leave it


class PlacedPartition(NamedTuple):
    """A partition with the load that each replica of it is."""

    topic: str
    partition: int
    replicas: tuple[int, ...]  #: node ids, at least one; the first is the preferred leader
    leader: (
        int  #: node id, or -1. Replicas of a partition without a leader do not move: nothing can be copied
    )
    size_bytes: int = 0  #: of one replica
    rate: float = 0.0  #: bytes per second that producers write
    in_sync: tuple[int, ...] = ()  #: in-sync replicas on live brokers; not used here


class Move(NamedTuple):
    """New replicas of a partition. The old ones in another order change only the preferred leader."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    new_replicas: tuple[int, ...]
    size_bytes: int  #: of one replica
    rate: float
    leader: int

    @property
    def added(self) -> tuple[int, ...]:
        return tuple(node_id for node_id in self.new_replicas if node_id not in self.replicas)

    @property
    def removed(self) -> tuple[int, ...]:
        return tuple(node_id for node_id in self.replicas if node_id not in self.new_replicas)

    @property
    def bytes_to_copy(self) -> int:
        return self.size_bytes * len(self.added)


class Load(NamedTuple):
    """The load of a broker. A broker leads the partitions whose preferred leader it is."""

    replicas: int = 0
    size_bytes: int = 0
    rate: float = 0.0
    leaders: int = 0
    leader_bytes: int = 0
    leader_rate: float = 0.0


class HostPlan(NamedTuple):
    """The effect of a plan on one broker."""

    node_id: int
    before: Load
    after: Load
    bytes_in: int  #: copied to the broker
    bytes_out: int  #: copied from the broker, as the leader of partitions that get new replicas
    rate_in: float  #: bytes per second that producers write meanwhile, and that are copied too
    rate_out: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to move, sorted by topic and partition, and the effect on each broker, sorted by node id."""

    moves: tuple[Move, ...]
    hosts: tuple[HostPlan, ...]
    #: Replicas (topic, partition) on draining brokers that cannot move, because the partition has no leader.
    stuck: tuple[tuple[str, int], ...] = ()

    @property
    def bytes_to_copy(self) -> int:
        return sum(move.bytes_to_copy for move in self.moves)

    def duration_s(self, throttle: float) -> float:
        """Return the seconds that the moves take if each broker sends and receives ``throttle`` bytes per
        second for them, or infinity if producers write as fast as that to the moved partitions.
        """
        assert throttle > 0
        times = [0.0]
        for host in self.hosts:
            for size, rate in ((host.bytes_in, host.rate_in), (host.bytes_out, host.rate_out)):
                if size:
                    times.append(size / (throttle - rate) if throttle > rate else math.inf)
        return max(times)


def plan_balance(
    hosts: Iterable[Host],
    partitions: Iterable[PlacedPartition],
    measure: Measure,
    *,
    leaders_only: bool = False,
    only_draining: bool = False,
) -> Plan:
    """Return the moves that balance the load of the brokers.

    ``leaders_only`` changes only preferred leaders, which copies no bytes. ``only_draining`` moves only the
    replicas of draining brokers, to the least loaded brokers. A new replica takes the place of the old one in
    the order. Raises InvalidReplicationFactorError if a draining broker leaves too few live brokers for a
    partition.
    """
    cluster = _Cluster(hosts, partitions, measure)
    if not leaders_only:
        cluster.drain()
        cluster.spread_replicas(only_draining)
    if not only_draining:
        cluster.spread_leaders()
    return cluster.plan()


def plan_drain(
    hosts: Iterable[Host], partitions: Iterable[PlacedPartition], node_ids: Collection[int]
) -> Plan:
    """Return the moves that take all replicas off the brokers ``node_ids``, to those with the fewest bytes.

    Raises InvalidReplicationFactorError if too few live brokers are left for a partition.
    """
    marked = [host._replace(is_draining=host.is_draining or host.node_id in node_ids) for host in hosts]
    return plan_balance(marked, partitions, Measure.BYTES, only_draining=True)


class _Cluster:
    """The placement while it is planned. ``replicas[n]`` is the new list of partition n."""

    def __init__(
        self, hosts: Iterable[Host], partitions: Iterable[PlacedPartition], measure: Measure
    ) -> None:
        self.hosts = {host.node_id: host for host in sorted(hosts)}
        self.partitions = sorted(partitions)
        self.measure = measure
        self.replicas = [list(each.replicas) for each in self.partitions]
        self.targets = [host.node_id for host in self.hosts.values() if host.is_live and not host.is_draining]
        self._target_set = frozenset(self.targets)
        self.racks = {host.node_id: host.rack or "" for host in self.hosts.values()}
        #: The number of racks that each partition keeps, 1 if all brokers are in one rack.
        self.rack_counts = [len(self._racks_of(each.replicas)) for each in self.partitions]
        self.weights = [self._weight(each) for each in self.partitions]
        self.stuck: list[tuple[str, int]] = []

    def _racks_of(self, node_ids: Iterable[int]) -> set[str]:
        return {self.racks.get(node_id, "") for node_id in node_ids}

    def _weight(self, partition: PlacedPartition) -> float:
        if self.measure is Measure.PARTITIONS:
            return 1
        return partition.size_bytes if self.measure is Measure.BYTES else partition.rate

    # --- shares ----------------------------------------------------------------------------------------

    def _share(self, weights: Iterable[float]) -> tuple[float, float, bool]:
        """Return (the share of a broker with capacity 1, the weight that larger weights count as, whether
        there is enough for every broker).
        """
        left = sorted((weight for weight in weights if weight > 0), reverse=True)
        capacities = [self.hosts[node_id].capacity for node_id in self.targets]
        total, capacity, largest = math.fsum(left), math.fsum(capacities), max(capacities)
        if self.measure is Measure.PARTITIONS:
            return total / capacity, 1.0, True
        for weight in left:
            if capacity <= largest * 1e-9:
                break
            if weight <= total / capacity * largest:
                return total / capacity, total / capacity * largest, True
            total -= weight
            capacity -= largest
        return (left[-1] / largest, left[-1], False) if left else (0.0, 0.0, False)

    def _rack_shares(self, share: float, most: float) -> dict[str, float]:
        """Return the share of a broker with capacity 1 in each rack.

        A small or large rack may be unable to hold its share, because partitions have to be in several racks.
        """
        racks: dict[str, list[int]] = {}
        for node_id in self.targets:
            racks.setdefault(self.racks[node_id], []).append(node_id)
        if len(racks) == 1:
            return dict.fromkeys(racks, share)
        capacities = {rack: sum(self.hosts[node_id].capacity for node_id in racks[rack]) for rack in racks}
        least, largest = dict.fromkeys(racks, 0.0), dict.fromkeys(racks, 0.0)
        total = 0.0
        for number, replicas in enumerate(self.replicas):
            present = sum(node_id in self._target_set for node_id in replicas)
            # The number of replicas that may share a rack with another one.
            spare = len(replicas) - self.rack_counts[number]
            weight = min(self.weights[number], most)
            total += weight * present
            for rack, members in racks.items():
                largest[rack] += weight * min(present, spare + 1, len(members))
                must = self.rack_counts[number] == len(racks)
                least[rack] += weight * max(must, present - len(self.targets) + len(members))
        low, high = 0.0, total / min(capacities.values())
        for _ in range(100):  # the level at which the racks hold the total
            level = (low + high) / 2
            held = sum(min(max(level * capacities[rack], least[rack]), largest[rack]) for rack in racks)
            low, high = (level, high) if held < total else (low, level)
        return {
            rack: min(max(high * capacities[rack], least[rack]), largest[rack]) / capacities[rack]
            for rack in racks
        }

    def _bins(
        self, shares: Mapping[str, float], is_enough: bool, fixed: Mapping[int, float]
    ) -> dict[int, Bin]:
        bins: dict[int, Bin] = {}
        for node_id in self.targets:
            capacity = self.hosts[node_id].capacity
            middle = shares[self.racks[node_id]] * capacity
            if self.measure is Measure.PARTITIONS:
                low, high = float(math.floor(middle + 1e-6)), float(math.ceil(middle - 1e-6))
            else:
                low, high = middle * (1 - TOLERANCE) if is_enough else 0.0, middle * (1 + TOLERANCE)
            bins[node_id] = Bin(capacity, low, high, fixed.get(node_id, 0.0))
        return bins

    # --- replicas --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Move each replica of a draining broker to the least loaded broker that may hold it."""
        draining = {host.node_id for host in self.hosts.values() if host.is_draining}
        if not draining:
            return
        loads = dict.fromkeys(self.targets, 0.0)
        leaving: list[tuple[float, int, int]] = []
        for number, replicas in enumerate(self.replicas):
            for index, node_id in enumerate(replicas):
                if node_id in loads:
                    loads[node_id] += self.weights[number]
                elif node_id in draining:
                    leaving.append((-self.weights[number], number, index))
        for weight, number, index in sorted(leaving):
            partition, replicas = self.partitions[number], self.replicas[number]
            if partition.leader < 0:
                self.stuck.append((partition.topic, partition.partition))
                continue
            free = [node_id for node_id in self.targets if node_id not in replicas]
            if not free:
                raise InvalidReplicationFactorError(
                    f"node {replicas[index]} cannot be drained: {partition.topic}-{partition.partition} has"
                    f" {len(replicas)} replicas, and {len(self.targets)} other brokers are live; add"
                    " a broker, or lower the replication factor"
                )
            rest = self._racks_of(replicas[:index] + replicas[index + 1 :])
            counts = {node_id: len(rest | {self.racks[node_id]}) for node_id in free}
            self.rack_counts[number] = min(self.rack_counts[number], max(counts.values()))

            def order(node_id: int, weight: float = -weight) -> tuple[float, int]:
                return ((loads[node_id] + weight) / self.hosts[node_id].capacity, node_id)

            target = min(
                (node_id for node_id in free if counts[node_id] >= self.rack_counts[number]), key=order
            )
            replicas[index] = target
            loads[target] -= weight

    def spread_replicas(self, only_draining: bool) -> None:
        if not self.targets:
            return
        targets = self._target_set
        share, most, is_enough = self._share(
            self.weights[number]
            for number, replicas in enumerate(self.replicas)
            for node_id in replicas
            if node_id in targets
        )
        slots: list[tuple[int, int]] = []
        items: list[Item] = []
        fixed: dict[int, float] = {}
        for number, partition in enumerate(self.partitions):
            weight = min(self.weights[number], most)
            for index, node_id in enumerate(self.replicas[number]):
                home = partition.replicas[index]
                if node_id not in targets:
                    continue
                if partition.leader < 0 or (only_draining and home == node_id):
                    fixed[node_id] = fixed.get(node_id, 0.0) + weight
                else:
                    slots.append((number, index))
                    items.append(Item(weight, partition.size_bytes, home))
        places = [self.replicas[number][index] for number, index in slots]
        bins = self._bins(self._rack_shares(share, most), is_enough, fixed)
        Spreader(items, places, bins, _ReplicaConstraints(self, slots)).spread()

    # --- leaders ---------------------------------------------------------------------------------------

    def spread_leaders(self) -> None:
        """Make other replicas preferred leaders, except of partitions that have no leader, or whose preferred
        leader is not live.
        """
        chosen = [
            number
            for number, replicas in enumerate(self.replicas)
            if replicas[0] in self._target_set and self.partitions[number].leader >= 0
        ]
        if not chosen:
            return
        share, _, is_enough = self._share(self.weights[number] for number in chosen)
        items = [Item(self.weights[number], 1.0, self.replicas[number][0]) for number in chosen]
        places = [item.home for item in items]
        bins = self._bins(dict.fromkeys(self.racks.values(), share), is_enough, {})
        spreader = Spreader(items, places, bins, _LeaderConstraints(self.replicas, chosen))
        spreader.spread()
        for number, leader in zip(chosen, spreader.places, strict=True):
            replicas = self.replicas[number]
            at = replicas.index(leader)
            replicas[0], replicas[at] = replicas[at], replicas[0]

    # --- result ----------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        moves = tuple(
            Move(
                partition.topic,
                partition.partition,
                partition.replicas,
                tuple(replicas),
                partition.size_bytes,
                partition.rate,
                partition.leader,
            )
            for partition, replicas in zip(self.partitions, self.replicas, strict=True)
            if tuple(replicas) != partition.replicas
        )
        before = _loads(self.partitions, [each.replicas for each in self.partitions])
        after = _loads(self.partitions, self.replicas)
        sums = {node_id: [0, 0, 0.0, 0.0] for node_id in self.hosts}
        for move in moves:
            for node_id in move.added:
                sums[node_id][0] += move.size_bytes
                sums[node_id][2] += move.rate
            if move.leader in sums:
                sums[move.leader][1] += move.bytes_to_copy
                sums[move.leader][3] += move.rate * len(move.added)
        hosts = tuple(
            HostPlan(
                node_id,
                before.get(node_id, Load()),
                after.get(node_id, Load()),
                int(sums[node_id][0]),
                int(sums[node_id][1]),
                sums[node_id][2],
                sums[node_id][3],
            )
            for node_id in self.hosts
        )
        return Plan(moves, hosts, tuple(dict.fromkeys(sorted(self.stuck))))


class _ReplicaConstraints:
    """Replicas of a partition are on distinct brokers, in as many racks as before."""

    def __init__(self, cluster: _Cluster, slots: Sequence[tuple[int, int]]) -> None:
        self._replicas = cluster.replicas
        self._slots = slots
        self._racks = cluster.racks
        self._rack_counts = cluster.rack_counts

    def allows(self, item: int, target: int) -> bool:
        number, index = self._slots[item]
        replicas = self._replicas[number]
        if target in replicas:
            return False
        count = self._rack_counts[number]
        if count == 1 or self._racks[target] == self._racks.get(replicas[index], ""):
            return True
        racks = {self._racks.get(node_id, "") for at, node_id in enumerate(replicas) if at != index}
        return len(racks) + (self._racks[target] not in racks) >= count

    def on_moved(self, item: int, _source: int, target: int) -> None:
        number, index = self._slots[item]
        self._replicas[number][index] = target


class _LeaderConstraints:
    """The preferred leader is one of the replicas."""

    def __init__(self, replicas: Sequence[Sequence[int]], chosen: Sequence[int]) -> None:
        self._replicas = replicas
        self._chosen = chosen

    def allows(self, item: int, target: int) -> bool:
        return target in self._replicas[self._chosen[item]]

    def on_moved(self, item: int, source: int, target: int) -> None:
        """Do nothing: leaderships of different partitions do not depend on each other."""


def _loads(partitions: Sequence[PlacedPartition], placed: Sequence[Sequence[int]]) -> dict[int, Load]:
    found: dict[int, Load] = {}
    for partition, replicas in zip(partitions, placed, strict=True):
        for index, node_id in enumerate(replicas):
            replica_count, size, rate, leaders, leader_bytes, leader_rate = found.get(node_id, Load())
            found[node_id] = Load(
                replica_count + 1,
                size + partition.size_bytes,
                rate + partition.rate,
                leaders + (index == 0),
                leader_bytes + (partition.size_bytes if index == 0 else 0),
                leader_rate + (partition.rate if index == 0 else 0.0),
            )
    return found
