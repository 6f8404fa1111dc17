"""One consumer group: the state that is replayed from records, and the sessions of its members, which are
only in memory."""

# Tests: tests/groups/test_machine.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kafkalite.coordinator_types import Instant
from kafkalite.errors import PolicyViolationError
from kafkalite.groups.member import (
    NO_PARTITIONS,
    NOTHING_HELD,
    STATIC_LEAVE_EPOCH,
    CurrentAssignment,
    Member,
    Partitions,
    Subscription,
    TopicIdPartition,
)
from kafkalite.groups.offsets import Offsets
from kafkalite.groups.record_codec import GroupState
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_TIMESTAMP
from kafkalite.protocol.messages.groups import GroupEvent

EMPTY: Final = "Empty"
RECONCILING: Final = "Reconciling"
STABLE: Final = "Stable"
DEAD: Final = "Dead"

NO_STATE: Final = GroupState(0, "", NO_TIMESTAMP, {})
_NO_SUBSCRIPTION: Final = Subscription(None, "", "", 0, (), None, None)
_NEW_MEMBER: Final = Member(_NO_SUBSCRIPTION, NO_PARTITIONS, NOTHING_HELD)


@dataclass(slots=True)
class Session:
    """The state of a member that is kept only in memory. A new coordinator restarts every session."""

    last_seen_ms: int  #: monotonic time of the last request, or of the start of the session
    revoke_deadline_ms: int | None = None  #: monotonic end of the rebalance timeout; None if not running
    named_epoch: int = 0  #: the epoch in the member's last accepted request
    stated: Partitions | None = None  #: the partitions that the member listed last; None before the first
    commit_connection: int = 0  #: the newest connection on which the member has committed


class Group:
    """The state of one group.

    Invariants: ``owners`` maps a partition to the member that owns it or must still release it. There is at
    most one such member (R38). ``instances`` maps the instance ids of ``members`` to member ids. ``sessions``
    and ``members`` have the same keys.
    """

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.state: GroupState = NO_STATE
        self.members: dict[str, Member] = {}
        self.sessions: dict[str, Session] = {}
        self.instances: dict[str, str] = {}
        self.owners: dict[TopicIdPartition, str] = {}
        self.names: dict[str, str] = {}  #: topic id -> name; includes deleted topics that members still own
        self.offsets = Offsets()
        self._events: dict[int, GroupEvent] = {}

    @property
    def group_epoch(self) -> int:
        return self.state.group_epoch

    @property
    def is_gone(self) -> bool:
        """Whether the group has no records left and can be dropped."""
        return not (self.members or self.offsets or self._events) and self.state is NO_STATE

    @property
    def journal(self) -> list[GroupEvent]:
        """The causes of the newest generations (at most JOURNAL_SIZE), from oldest to newest."""
        return sorted(self._events.values(), key=lambda event: event.group_epoch)

    @property
    def event_slots(self) -> list[int]:
        return sorted(self._events)

    def describe_state(self) -> str:
        """Return Empty, Reconciling or Stable. Kafka's state Assigning does not occur in kafkalite."""
        if not self.members:
            return EMPTY
        is_settled = all(
            member.is_settled or member.current.member_epoch == STATIC_LEAVE_EPOCH
            for member in self.members.values()
        )
        return STABLE if is_settled else RECONCILING

    def replay_group(self, state: GroupState | None) -> None:
        """Replay the record of the group's state. None means that the record was deleted."""
        self.state = state or NO_STATE
        if state is not None:
            if len(self.names) > 2 * len(state.topics) + 16:
                held = {partition.topic_id for partition in self.owners}
                self.names = {id_: name for id_, name in self.names.items() if id_ in held}
            self.names.update((topic_id, name) for name, (topic_id, _) in state.topics.items())

    def replay_subscription(self, member_id: str, subscription: Subscription | None, now: Instant) -> None:
        """Replay the record of a member's subscription. None means that the record was deleted."""
        member = self._member(member_id, now)
        instance_id = member.subscription.instance_id
        if instance_id is not None and self.instances.get(instance_id) == member_id:
            del self.instances[instance_id]
        if subscription is not None and subscription.instance_id is not None:
            self.instances[subscription.instance_id] = member_id
        self._put(member_id, member._replace(subscription=subscription or _NO_SUBSCRIPTION))

    def replay_target(
        self, member_id: str, target: Partitions, names: Mapping[str, str], now: Instant
    ) -> None:
        """Replay a member's target. ``names`` maps the topic ids of the target to names."""
        self.names.update(names)
        self._put(member_id, self._member(member_id, now)._replace(target=target))

    def replay_current(
        self, member_id: str, current: CurrentAssignment, names: Mapping[str, str], now: Instant
    ) -> None:
        """Replay a member's current assignment. ``names`` maps its topic ids to names."""
        self.names.update(names)
        member = self._member(member_id, now)
        before = member.current
        owners = self.owners
        if before.revoking or not before.assigned <= current.assigned:
            for partition in before.assigned | before.revoking:
                if owners.get(partition) == member_id:
                    del owners[partition]
        owners.update(dict.fromkeys(current.assigned, member_id))
        owners.update(dict.fromkeys(current.revoking, member_id))
        session = self.sessions[member_id]
        if not current.revoking:
            session.revoke_deadline_ms = None
        elif session.revoke_deadline_ms is None or before.revoking.isdisjoint(current.revoking):
            session.revoke_deadline_ms = now.monotonic_ms + member.subscription.rebalance_timeout_ms
        self._put(member_id, member._replace(current=current))

    def replay_event(self, slot: int, event: GroupEvent | None) -> None:
        """Replay the event in ``slot``: the cause of a generation. None means that its record was deleted."""
        if event is None:
            self._events.pop(slot, None)
        else:
            self._events[slot] = event

    def _member(self, member_id: str, now: Instant) -> Member:
        member = self.members.get(member_id)
        if member is None:
            self.sessions[member_id] = Session(now.monotonic_ms)
            return _NEW_MEMBER
        return member

    def _put(self, member_id: str, member: Member) -> None:
        # A member has three records and is deleted by three tombstones. Compaction may have removed some
        # records of an earlier member, so a member is removed when all three are gone, not at a single
        # tombstone.
        if member == _NEW_MEMBER:
            self.members.pop(member_id, None)
            del self.sessions[member_id]
        else:
            self.members[member_id] = member

    def on_loaded(self, now: Instant) -> None:
        """Restart all sessions and revocation deadlines, because a new coordinator takes over."""
        for member_id, session in self.sessions.items():
            member = self.members[member_id]
            session.last_seen_ms = now.monotonic_ms
            session.revoke_deadline_ms = (
                now.monotonic_ms + member.subscription.rebalance_timeout_ms
                if member.current.revoking
                else None
            )

    def session_deadline_ms(self, member_id: str, session_timeout_ms: int) -> int:
        """Return the monotonic end of the member's session or rebalance timeout, whichever is earlier."""
        session = self.sessions[member_id]
        deadline_ms = session.last_seen_ms + session_timeout_ms
        if session.revoke_deadline_ms is not None:
            return min(deadline_ms, session.revoke_deadline_ms)
        return deadline_ms


def new_group(groups: Mapping[str, Group], group_id: str, settings: GroupSettings) -> Group:
    """Return a new group, which the caller may add to ``groups``.

    Raises PolicyViolationError if ``groups`` already has group.max.count groups (S26).
    """
    if len(groups) >= settings.max_count:
        raise PolicyViolationError(
            f"the coordinator of group {group_id!r} has group.max.count={settings.max_count} groups",
            hint="delete unused groups, or raise group.max.count",
        )
    return Group(group_id)
