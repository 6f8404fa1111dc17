"""One member of a group: its subscription, its target and its current assignment."""

# Tests: tests/groups/test_heartbeat.py

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kafkalite.limits import MAX_INTEGERS_PER_LIST
from kafkalite.protocol.messages.groups import AssignedTopic

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
STATIC_LEAVE_EPOCH: Final = -2


class TopicIdPartition(NamedTuple):
    """A partition, identified by topic id, because a topic that is created again has another id."""

    topic_id: str
    partition: int


Partitions = frozenset[TopicIdPartition]
NO_PARTITIONS: Final[Partitions] = frozenset()


class Subscription(NamedTuple):
    """The topics and the pattern to which a member subscribes, and the member's other properties."""

    instance_id: str | None
    client_id: str
    host: str
    rebalance_timeout_ms: int
    topics: tuple[str, ...]  #: sorted, without duplicates
    pattern: str | None
    assignor: str | None


class CurrentAssignment(NamedTuple):
    """The partitions that a member may own at present.

    Invariants: ``assigned`` and ``revoking`` are disjoint. The member owns no partition outside of them. No
    partition is in the sets of two members (R38). ``revoking`` gains partitions only together with a new
    ``member_epoch``, so a member that sends that epoch has received the request to release them.
    """

    member_epoch: int  #: the epoch in its last response; STATIC_LEAVE_EPOCH while it is away and owns nothing
    previous_epoch: int  #: the oldest epoch that it may still send
    assigned: Partitions
    revoking: Partitions  #: partitions that the member must release and has not yet released


NOTHING_HELD: Final = CurrentAssignment(0, 0, NO_PARTITIONS, NO_PARTITIONS)


class Member(NamedTuple):
    """The state of a member that is stored in the log."""

    subscription: Subscription
    target: Partitions  #: its assignment once all other members have released these partitions
    current: CurrentAssignment

    @property
    def is_settled(self) -> bool:
        """Whether the member owns exactly its target and has nothing to release."""
        return self.target == self.current.assigned and not self.current.revoking

    @property
    def state(self) -> str:
        """Return Unrevoked (must release partitions), Unreleased (lacks some of its target) or Stable."""
        if self.current.revoking or not self.current.assigned <= self.target:
            return "Unrevoked"
        return "Stable" if self.target == self.current.assigned else "Unreleased"


def partitions_of(topics: Iterable[AssignedTopic]) -> Partitions:
    """Return the partitions in a member's request as a set."""
    return frozenset(
        [TopicIdPartition(topic.topic_id, number) for topic in topics for number in topic.partitions]
    )


def by_topic(partitions: Partitions) -> dict[str, list[int]]:
    """Return {topic id: partition numbers}, both sorted."""
    found: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(topic_id, []).append(number)
    return found


def assigned_topics(partitions: Partitions, names: Mapping[str, str]) -> list[AssignedTopic]:
    """Return the partitions as response entries, sorted. ``names`` maps topic ids to names."""
    return [
        AssignedTopic(topic_id, names.get(topic_id, ""), part)
        for topic_id, numbers in by_topic(partitions).items()
        for part in _parts(numbers)
    ]


def _parts(numbers: Sequence[int]) -> Iterable[list[int]]:
    for start in range(0, len(numbers), MAX_INTEGERS_PER_LIST):
        yield list(numbers[start : start + MAX_INTEGERS_PER_LIST])
