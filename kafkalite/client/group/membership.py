"""A consumer's side of its membership in a group (KIP-848). Pure: answers go in, the next request comes out.

The coordinator says what the member may hold; the member takes it up and gives back in its own time::

    assigned    what the coordinator lets it hold, as of its last answer
    owned       what it holds: the user reads it, or is still busy with what was read of it
    revoking    owned and not assigned: to be given back
    adding      assigned and not owned: to be taken up

``owned`` is changed only by ``release`` and ``take``, and the coordinator gives a partition to somebody else
only after it was told that it is not in ``owned`` any more (R38). So between the answer that takes one away
and ``release``, the member may commit what it has read of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kafkalite.limits import MAX_INTEGERS_PER_LIST
from kafkalite.model import GroupMetadata, TopicPartition
from kafkalite.protocol.messages.groups import (
    AssignedTopic,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

JOINING: Final = 0  #: as a member epoch: not a member (yet)
LEAVING: Final = -1
LEAVING_FOR_A_WHILE: Final = -2  #: a static member, which will be back
_UNCHANGED: Final = -1

Partitions = Mapping[TopicPartition, str]
"""{partition: topic id}. A topic made anew has another id: its partitions are other partitions."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """What does not change while the consumer lives; names and units are the options'."""

    group_id: str
    member_id: str
    instance_id: str | None
    assignor: str | None
    max_poll_interval_ms: int


class Membership:
    """Invariants: epoch JOINING means that nothing is assigned; what is owned was assigned once."""

    def __init__(self, settings: MemberSettings) -> None:
        self.settings = settings
        self.epoch = JOINING
        self.assigned: dict[TopicPartition, str] = {}
        self.owned: dict[TopicPartition, str] = {}
        self.heartbeat_interval_ms = 0
        self.session_timeout_ms = 0
        self._topics: tuple[str, ...] = ()
        self._pattern = ""
        self._is_subscription_sent = False
        self._sent_owned: dict[TopicPartition, str] | None = None  # None: unknown to the coordinator

    def __repr__(self) -> str:
        return (
            f"<Membership in {self.settings.group_id!r} at epoch {self.epoch}, owns {len(self.owned)} "
            f"of {len(self.assigned)} assigned>"
        )

    @property
    def is_member(self) -> bool:
        return self.epoch > JOINING

    @property
    def metadata(self) -> GroupMetadata:
        """As whom this member commits."""
        settings = self.settings
        return GroupMetadata(settings.group_id, settings.member_id, self.epoch, settings.instance_id)

    # --- what the user does --------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str], pattern: str | None) -> None:
        """Want these topics, or those whose whole name matches ``pattern``, from the next request on."""
        self._topics = tuple(dict.fromkeys(topics))
        self._pattern = pattern or ""
        self._is_subscription_sent = False

    def revoking(self) -> dict[TopicPartition, str]:
        """What must be given back."""
        return {tp: topic_id for tp, topic_id in self.owned.items() if self.assigned.get(tp) != topic_id}

    def adding(self) -> dict[TopicPartition, str]:
        """What may be taken up now."""
        return {tp: topic_id for tp, topic_id in self.assigned.items() if tp not in self.owned}

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """These were given back: the user is done with them."""
        for tp in partitions:
            del self.owned[tp]

    def take(self, partitions: Partitions) -> None:
        """These are held from now on."""
        self.owned.update(partitions)

    # --- what is sent --------------------------------------------------------------------------

    @property
    def has_changes_to_send(self) -> bool:
        """Whether the next request need not wait for the next interval."""
        return not self.is_member or self._sent_owned != self.owned or not self._is_subscription_sent

    @property
    def waits_for_user(self) -> bool:
        """Whether the user must do something before there is anything to tell."""
        return bool(self.revoking() or self.adding())

    def request(self, max_wait_ms: int) -> ConsumerGroupHeartbeatRequest:
        """The next request; its answer may wait ``max_wait_ms`` for news."""
        settings = self.settings
        is_joining = not self.is_member
        tells_all = is_joining or not self._is_subscription_sent
        owned = None if not is_joining and self._sent_owned == self.owned else _as_topics(self.owned)
        return ConsumerGroupHeartbeatRequest(
            settings.group_id,
            settings.member_id,
            self.epoch,
            settings.instance_id,
            settings.max_poll_interval_ms if is_joining else _UNCHANGED,
            list(self._topics) if tells_all else None,
            self._pattern if tells_all else None,
            settings.assignor if is_joining else None,
            owned,
            0 if is_joining else max_wait_ms,
        )

    def leave_request(self, *, is_for_good: bool) -> ConsumerGroupHeartbeatRequest:
        """The last request. A static member leaves for a while, and keeps its partitions, unless for good."""
        settings = self.settings
        stays = settings.instance_id is not None and not is_for_good
        epoch = LEAVING_FOR_A_WHILE if stays else LEAVING
        return ConsumerGroupHeartbeatRequest(
            settings.group_id,
            settings.member_id,
            epoch,
            settings.instance_id,
            _UNCHANGED,
            None,
            None,
            None,
            None,
            0,
        )

    # --- what comes back -----------------------------------------------------------------------

    def on_response(
        self, request: ConsumerGroupHeartbeatRequest, response: ConsumerGroupHeartbeatResponse
    ) -> bool:
        """Take in the answer to ``request``. Whether it brought something for the user to do.

        An answer older than one that was taken in already is passed over.
        """
        if request.member_epoch == JOINING:
            if self.is_member:
                return False  # the answer to a join that was sent twice
        elif not self.is_member or response.member_epoch < self.epoch:
            return False
        self.heartbeat_interval_ms = response.heartbeat_interval_ms
        self.session_timeout_ms = response.session_timeout_ms
        self.epoch = response.member_epoch
        if response.member_epoch != request.member_epoch:
            self._sent_owned = None  # to be said again: only at the new epoch it counts (R38)
        elif request.owned is not None:
            self._sent_owned = _as_partitions(request.owned)
        if request.subscribed_topics is not None:
            told = (tuple(request.subscribed_topics), request.subscribed_pattern or "")
            self._is_subscription_sent = told == (self._topics, self._pattern)
        if response.assignment is None:
            return False
        self._sent_owned = None
        before = self.assigned
        self.assigned = _as_partitions(response.assignment)
        return self.assigned != before

    def on_failure(self) -> None:
        """An answer was lost, and what it told with it: state again what is owned, to be told again."""
        self._sent_owned = None

    def on_expelled(self) -> dict[TopicPartition, str]:
        """The coordinator does not know this member any more, or we left: join anew.

        Returns what was owned. It is lost: another member may have it already.
        """
        lost, self.owned, self.assigned = self.owned, {}, {}
        self.epoch = JOINING
        self._sent_owned = None
        self._is_subscription_sent = False
        return lost


def _as_topics(partitions: Partitions) -> list[AssignedTopic]:
    numbers: dict[tuple[str, str], list[int]] = {}
    for (topic, partition), topic_id in partitions.items():
        numbers.setdefault((topic_id, topic), []).append(partition)
    return [
        AssignedTopic(topic_id, topic, sorted(of_topic)[first : first + MAX_INTEGERS_PER_LIST])
        for (topic_id, topic), of_topic in numbers.items()
        for first in range(0, len(of_topic), MAX_INTEGERS_PER_LIST)
    ]


def _as_partitions(topics: Iterable[AssignedTopic]) -> dict[TopicPartition, str]:
    return {
        TopicPartition(topic.topic, partition): topic.topic_id
        for topic in topics
        for partition in topic.partitions
    }
