"""A consumer's membership in a group (KIP-848). Pure: responses are inputs, requests are results.

The coordinator assigns partitions. The member adds and revokes them at its own pace::

    assigned    the partitions that the coordinator assigned in its last response
    owned       the partitions that the member holds: the user reads or still processes them
    revoking    owned but not assigned: to be revoked
    adding      assigned but not owned: to be added

Only ``release``, ``take`` and ``on_expelled`` change ``owned``. The coordinator assigns a partition to
another member only after this member has reported an ``owned`` without it (R38), or is no longer a member. So
the member may still commit between the response that revokes a partition and ``release``.
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

JOINING: Final = 0  #: the member epoch before joining
LEAVING: Final = -1
LEAVING_FOR_A_WHILE: Final = -2  #: the epoch that a static member sends when it leaves but will return
_UNCHANGED: Final = -1

Partitions = Mapping[TopicPartition, str]
"""{partition: topic id}. A topic that is created again has a new id, and therefore new partitions."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """The settings of a member, which never change."""

    group_id: str
    member_id: str
    instance_id: str | None
    assignor: str | None
    max_poll_interval_ms: int


class Membership:
    """The state of one member. Invariant: while the epoch is JOINING, ``assigned`` is empty."""

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
        """The group id, member id, epoch and instance id, which identify this member in commits."""
        settings = self.settings
        return GroupMetadata(settings.group_id, settings.member_id, self.epoch, settings.instance_id)

    def subscribe(self, topics: Iterable[str], pattern: str | None) -> None:
        """Subscribe to ``topics`` and to the topics whose whole name matches ``pattern``.

        The next request reports the subscription.
        """
        self._topics = tuple(dict.fromkeys(topics))
        self._pattern = pattern or ""
        self._is_subscription_sent = False

    def revoking(self) -> dict[TopicPartition, str]:
        """Return the owned partitions that the member must revoke, {partition: topic id}."""
        return {tp: topic_id for tp, topic_id in self.owned.items() if self.assigned.get(tp) != topic_id}

    def adding(self) -> dict[TopicPartition, str]:
        """Return the assigned partitions that the member may add now, {partition: topic id}."""
        return {tp: topic_id for tp, topic_id in self.assigned.items() if tp not in self.owned}

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove these partitions from ``owned``."""
        for tp in partitions:
            del self.owned[tp]

    def take(self, partitions: Partitions) -> None:
        """Add these partitions to ``owned``."""
        self.owned.update(partitions)

    @property
    def has_changes_to_send(self) -> bool:
        """Whether the member has changes to report, so that the next heartbeat should be sent at once."""
        return not self.is_member or self._sent_owned != self.owned or not self._is_subscription_sent

    @property
    def waits_for_user(self) -> bool:
        """Whether the user's next call must add or revoke partitions."""
        return bool(self.revoking() or self.adding())

    def request(self, max_wait_ms: int) -> ConsumerGroupHeartbeatRequest:
        """Return the next heartbeat request.

        The coordinator may hold its response for ``max_wait_ms``, unless the request joins the group.
        """
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
        """Return the request to leave the group.

        Unless ``is_for_good``, a static member keeps its partitions if it returns within the session timeout.
        """
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

    def on_response(
        self, request: ConsumerGroupHeartbeatRequest, response: ConsumerGroupHeartbeatResponse
    ) -> bool:
        """Apply a response and return whether the assignment changed. Outdated responses are ignored."""
        if request.member_epoch == JOINING:
            if self.is_member:
                return False  # the response to a repeated join
        elif not self.is_member or response.member_epoch < self.epoch:
            return False
        self.heartbeat_interval_ms = response.heartbeat_interval_ms
        self.session_timeout_ms = response.session_timeout_ms
        self.epoch = response.member_epoch
        if response.member_epoch != request.member_epoch:
            self._sent_owned = None  # send it again, because it counts only at the new epoch (R38)
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
        """After a request without a response, report the owned partitions again in the next request."""
        self._sent_owned = None

    def on_expelled(self) -> dict[TopicPartition, str]:
        """Handle leaving or an expulsion. Return the lost partitions, which other members may already own.

        The next request joins the group again.
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
