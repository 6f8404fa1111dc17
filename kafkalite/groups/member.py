"""One member of a group: what it asked for, what it is to own, and what it may hold now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kafkalite.limits import MAX_INTEGERS_PER_LIST
from kafkalite.protocol.messages.groups import AssignedTopic

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
STATIC_LEAVE_EPOCH: Final = -2


class TopicIdPartition(NamedTuple):
    """A partition of one incarnation of a topic: a topic that was created anew has another id."""

    topic_id: str
    partition: int


Partitions = frozenset[TopicIdPartition]
NO_PARTITIONS: Final[Partitions] = frozenset()


class Subscription(NamedTuple):
    """What a member said it wants."""

    instance_id: str | None
    client_id: str
    host: str
    rebalance_timeout_ms: int
    topics: tuple[str, ...]  #: sorted, each once
    pattern: str | None
    assignor: str | None


class CurrentAssignment(NamedTuple):
    """What a member may hold now.

    Invariants: ``assigned`` and ``revoking`` are disjoint; the member holds at most their union; no partition
    is in those of two members (R38). ``revoking`` only gains partitions together with a new ``member_epoch``,
    so a heartbeat at that epoch was sent by who knows of them.
    """

    member_epoch: int  #: the group's epoch when it was last told; STATIC_LEAVE_EPOCH: away, holds nothing
    previous_epoch: int  #: the oldest it may still name: its first, or the last that it did name
    assigned: Partitions
    revoking: Partitions  #: to be given back, and not yet confirmed


NOTHING_HELD: Final = CurrentAssignment(0, 0, NO_PARTITIONS, NO_PARTITIONS)


class Member(NamedTuple):
    """The durable state of a member."""

    subscription: Subscription
    target: Partitions  #: what it will hold once everybody else has let go of it
    current: CurrentAssignment

    @property
    def is_settled(self) -> bool:
        """Whether it holds exactly what it should."""
        return self.target == self.current.assigned and not self.current.revoking

    @property
    def state(self) -> str:
        """Stable, Unrevoked (must give back) or Unreleased (waits for others)."""
        if self.current.revoking or not self.current.assigned <= self.target:
            return "Unrevoked"
        return "Stable" if self.target == self.current.assigned else "Unreleased"


def partitions_of(topics: Iterable[AssignedTopic]) -> Partitions:
    """What a member states that it holds, as a set."""
    return frozenset(
        [TopicIdPartition(topic.topic_id, number) for topic in topics for number in topic.partitions]
    )


def by_topic(partitions: Partitions) -> dict[str, list[int]]:
    """The partitions' numbers by topic id, both in order."""
    found: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(topic_id, []).append(number)
    return found


def assigned_topics(partitions: Partitions, names: Mapping[str, str]) -> list[AssignedTopic]:
    """The set as it goes on the wire: lists of bounded length, in order."""
    return [
        AssignedTopic(topic_id, names.get(topic_id, ""), part)
        for topic_id, numbers in by_topic(partitions).items()
        for part in _parts(numbers)
    ]


def _parts(numbers: Sequence[int]) -> Iterable[list[int]]:
    for start in range(0, len(numbers), MAX_INTEGERS_PER_LIST):
        yield list(numbers[start : start + MAX_INTEGERS_PER_LIST])
