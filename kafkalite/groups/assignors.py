"""The assignors ``uniform`` and ``range``, which assign partitions to members.

Both are deterministic and pure. Each partition of a subscribed topic is assigned to exactly one of the
members that subscribe to the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from kafkalite.groups.member import NO_PARTITIONS, Partitions, TopicIdPartition

Subscribers = Mapping[str, frozenset[str]]
"""{member: ids of its subscribed topics}, ordered by the member's instance id, or member id without one."""
Counts = Mapping[str, int]
"""{topic id: partition count}"""
Targets = Mapping[str, Partitions]
"""{member: partitions assigned to it}"""


def uniform(members: Subscribers, counts: Counts, previous: Targets) -> dict[str, Partitions]:
    """Return the new target of each member. Partitions are spread evenly, and few of them move.

    ``previous`` has the targets of the previous assignment. If all members have the same subscription, their
    numbers of partitions differ by at most one, and as few partitions move as this allows. Otherwise, the
    owner of a partition has at most one partition more than any other subscriber of the partition's topic.
    """
    if not members:
        return {}
    subscriptions = set(members.values())
    if len(subscriptions) == 1:
        return _uniform_alike(members, counts, previous, next(iter(subscriptions)))
    return _uniform_mixed(members, counts, previous)


def _uniform_alike(
    members: Subscribers, counts: Counts, previous: Targets, topics: frozenset[str]
) -> dict[str, Partitions]:
    everything = [
        TopicIdPartition(topic_id, number)
        for topic_id in sorted(topics)
        for number in range(counts.get(topic_id, 0))
    ]
    unowned = set(everything)
    quota, extra = divmod(len(everything), len(members))
    kept: dict[str, Partitions] = {}
    # Two members never have the same previous partition in practice. If they do, the first one keeps it.
    for member in members:
        kept[member] = previous.get(member, NO_PARTITIONS) & unowned
        unowned -= kept[member]
    unowned.update(everything)
    # The members with the most partitions are the first to exceed the quota by one, so that few partitions
    # move.
    by_load = sorted(members, key=lambda member: -len(kept[member]))
    targets: dict[str, Partitions] = {}
    room: deque[tuple[str, int]] = deque()
    for rank, member in enumerate(by_load):
        limit = quota + (rank < extra)
        mine = kept[member]
        if len(mine) > limit:
            mine = frozenset(sorted(mine)[:limit])
        targets[member] = mine
        unowned -= mine
        if len(mine) < limit:
            room.append((member, limit - len(mine)))
    gains: dict[str, list[TopicIdPartition]] = {member: [] for member, _ in room}
    for partition in sorted(unowned):
        member, free = room.popleft()
        gains[member].append(partition)
        if free > 1:
            room.append((member, free - 1))
    for member, gained in gains.items():
        targets[member] = targets[member].union(gained)
    return targets


def _uniform_mixed(members: Subscribers, counts: Counts, previous: Targets) -> dict[str, Partitions]:
    subscribers: dict[str, list[str]] = {}
    for member, topics in members.items():
        for topic_id in topics:
            if topic_id in counts:
                subscribers.setdefault(topic_id, []).append(member)
    owned: dict[str, set[TopicIdPartition]] = {member: set() for member in members}
    unowned: list[TopicIdPartition] = []
    owner_before = {partition: member for member in members for partition in previous.get(member, ())}
    # Assign topics with few subscribers first, because their partitions have the fewest possible owners.
    for topic_id in sorted(subscribers, key=lambda topic_id: (len(subscribers[topic_id]), topic_id)):
        for number in range(counts[topic_id]):
            partition = TopicIdPartition(topic_id, number)
            owner = owner_before.get(partition)
            if owner is not None and topic_id in members[owner]:
                owned[owner].add(partition)
            else:
                unowned.append(partition)
    for partition in unowned:
        member = min(subscribers[partition.topic_id], key=lambda member: len(owned[member]))
        owned[member].add(partition)
    _level(owned, subscribers)
    return {member: frozenset(partitions) for member, partitions in owned.items()}


def _level(owned: dict[str, set[TopicIdPartition]], subscribers: Mapping[str, list[str]]) -> None:
    """Move partitions to subscribers of the same topic that own at least two fewer than the owner, until no
    such move is left. ``owned`` is changed in place.

    Each move decreases the sum of the squared loads, so the loop ends.
    """
    has_moved = True
    while has_moved:
        has_moved = False
        for member in sorted(owned, key=lambda member: -len(owned[member])):
            mine = owned[member]
            for topic_id in sorted({partition.topic_id for partition in mine}):
                of_topic = sorted((p for p in mine if p.topic_id == topic_id), reverse=True)
                for partition in of_topic:
                    least = min(subscribers[topic_id], key=lambda other: len(owned[other]))
                    if len(mine) - len(owned[least]) < 2:
                        break
                    mine.remove(partition)
                    owned[least].add(partition)
                    has_moved = True


def range_(members: Subscribers, counts: Counts, previous: Targets) -> dict[str, Partitions]:
    """Return the new target of each member: one contiguous range, possibly empty, of each subscribed topic.

    Topics with equal partition counts and equal subscribers are divided in the same way, so partition n of
    two such topics belongs to the same member, as joins of topics require (co-partitioning). Members get
    ranges in the order of the mean position of their previous partitions, and members without any come last,
    so that few partitions move.
    """

    def rank(member: str) -> tuple[bool, float]:
        before = [p for p in previous.get(member, ()) if counts.get(p.topic_id)]
        if not before:
            return (True, 0.0)
        return (False, sum(p.partition / counts[p.topic_id] for p in before) / len(before))

    in_order = sorted(members, key=rank)
    targets: dict[str, list[TopicIdPartition]] = {member: [] for member in members}
    for topic_id in sorted(counts):
        subscribed = [member for member in in_order if topic_id in members[member]]
        if not subscribed:
            continue
        quota, extra = divmod(counts[topic_id], len(subscribed))
        begin = 0
        for index, member in enumerate(subscribed):
            end = begin + quota + (index < extra)
            targets[member].extend(TopicIdPartition(topic_id, number) for number in range(begin, end))
            begin = end
    return {member: frozenset(partitions) for member, partitions in targets.items()}


ASSIGNORS: Final[Mapping[str, Callable[[Subscribers, Counts, Targets], dict[str, Partitions]]]] = {
    "uniform": uniform,
    "range": range_,
}
