"""Decides heartbeats, by which a member joins, stays, releases partitions and leaves (KIP-848).

::

    member_epoch   known member                                        unknown member
    0              receives its assignment again                       joins
    -1             is removed; its partitions become available         UNKNOWN_MEMBER_ID
    -2             static: owns nothing, but keeps its target          UNKNOWN_MEMBER_ID
    current        is reconciled, and receives any change              UNKNOWN_MEMBER_ID
    previous ...   missed a response; receives the assignment again    UNKNOWN_MEMBER_ID
    other, > 0     FENCED_MEMBER_EPOCH                                 UNKNOWN_MEMBER_ID

"previous ..." means all epochs since the last one that the member sent: it may have missed several responses.
If a request with such an epoch lists partitions outside of the member's assignment, the member receives
FENCED_MEMBER_EPOCH instead.

An unknown member may have the instance id of an existing member. With epoch 0 it replaces that member if that
member has left with epoch -2; otherwise it receives UNRELEASED_INSTANCE_ID. With any other epoch it receives
FENCED_INSTANCE_ID.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kafkalite.coordinator_types import Caller, Decision, Instant, Topics
from kafkalite.errors import (
    ErrorCode,
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupMaxSizeReachedError,
    InvalidGroupIdError,
    InvalidRequestError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)
from kafkalite.groups.change import GroupChange
from kafkalite.groups.group import Group, new_group
from kafkalite.groups.member import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    Member,
    Partitions,
    Subscription,
    assigned_topics,
    partitions_of,
)
from kafkalite.groups.pattern_cache import PatternCache
from kafkalite.groups.settings import GroupSettings
from kafkalite.limits import MAX_REBALANCE_TIMEOUT_MS
from kafkalite.protocol.messages.groups import (
    AssignedTopic,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

MAX_NAME_LENGTH: Final = 255  # characters in a group id, member id or instance id
_NONE: Final = int(ErrorCode.NONE)


class HeartbeatRules:
    """Decides the heartbeats of all members of the groups of one coordinator."""

    def __init__(self, groups: Mapping[str, Group], settings: GroupSettings, patterns: PatternCache) -> None:
        self._groups = groups
        self._settings = settings
        self._patterns = patterns

    def decide(
        self, request: ConsumerGroupHeartbeatRequest, caller: Caller, now: Instant, topics: Topics
    ) -> Decision:
        """Return the changes and the response for a heartbeat. Raises a BrokerError if it is refused."""
        epoch = request.member_epoch
        if epoch > JOIN_EPOCH:
            return self._stay(request, now, topics)
        _check_names(request)
        if epoch == JOIN_EPOCH:
            return self._join(request, caller, now, topics)
        if epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
            return self._leave(request, now, topics)
        raise InvalidRequestError(f"member epoch {epoch} is not valid: it is -2, -1, 0 or more")

    def has_update(self, request: ConsumerGroupHeartbeatRequest) -> bool:
        """Whether the response to the heartbeat must be sent now, because it has a change or an error.

        If False, the response would contain no change of the assignment, so the coordinator may hold it back.
        ``decide`` then returns records only if the member has not yet received the current group epoch.
        """
        group = self._groups.get(request.group_id)
        member = group.members.get(request.member_id) if group is not None else None
        if group is None or member is None:
            return True
        current = member.current
        if request.member_epoch != current.member_epoch:
            return True
        if _subscription(request, member.subscription) is not member.subscription:
            return True
        if request.owned is not None:
            owned = partitions_of(request.owned)
            if owned != group.sessions[request.member_id].stated or not current.revoking <= owned:
                return True
        assigned, target = current.assigned, member.target
        if assigned == target:
            return False
        if not assigned <= target:
            return True
        owners = group.owners
        return any(partition not in owners for partition in target - assigned)

    def _stay(self, request: ConsumerGroupHeartbeatRequest, now: Instant, topics: Topics) -> Decision:
        group = self._groups.get(request.group_id)
        member = group.members.get(request.member_id) if group is not None else None
        if group is None or member is None:
            return self.refuse_unknown(request, group)
        member_id, epoch, before = request.member_id, request.member_epoch, member.current
        owned = None if request.owned is None else partitions_of(request.owned)
        session = group.sessions[member_id]
        _check_epoch(request, member, max(before.previous_epoch, session.named_epoch), owned)
        subscription = _subscription(request, member.subscription)
        is_changed = subscription is not member.subscription
        if is_changed:
            self._check_subscription(subscription)
        session.last_seen_ms = now.monotonic_ms
        session.named_epoch = epoch
        if owned is not None:
            session.stated = owned = before.assigned if owned == before.assigned else owned
        if (
            epoch == before.member_epoch == group.group_epoch
            and not is_changed
            and not before.revoking
            and member.target == before.assigned
        ):
            sends_assignment = session.stated is not before.assigned and session.stated != before.assigned
            assignment = assigned_topics(before.assigned, group.names) if sends_assignment else None
            return Decision(reply=self._response(request, epoch, assignment))
        change = GroupChange(group, self._settings, self._patterns, topics, now)
        if is_changed:
            change.subscribe(member_id, subscription)
            if subscription[4:] != member.subscription[4:]:
                change.rebalance("SubscriptionChanged", f"member {member_id} changed its subscription")
        current = change.reconcile(member_id, epoch, owned)
        sends_assignment = (
            epoch != current.member_epoch
            or current.assigned is not before.assigned
            or session.stated != current.assigned
        )
        assignment = assigned_topics(current.assigned, change.names) if sends_assignment else None
        return Decision(tuple(change.records), self._response(request, current.member_epoch, assignment))

    def refuse_unknown(self, request: ConsumerGroupHeartbeatRequest, group: Group | None) -> Decision:
        """Raise FencedInstanceIdError if another member now has the instance id (R38), otherwise
        UnknownMemberIdError."""
        check_instance(group, request.instance_id, request.member_id)
        raise UnknownMemberIdError(f"group {request.group_id!r} has no member {request.member_id}")

    def _join(
        self, request: ConsumerGroupHeartbeatRequest, caller: Caller, now: Instant, topics: Topics
    ) -> Decision:
        group_id, member_id = request.group_id, request.member_id
        group = self._groups.get(group_id) or new_group(self._groups, group_id, self._settings)
        subscription = _first_subscription(request, caller)
        self._check_subscription(subscription)
        change = GroupChange(group, self._settings, self._patterns, topics, now)
        predecessor_id = self._predecessor(group, member_id, subscription.instance_id)
        if predecessor_id is not None:
            before = group.members[predecessor_id].subscription
            change.succeed(member_id, predecessor_id, subscription)
            if before[4:] != subscription[4:]:
                change.rebalance(
                    "SubscriptionChanged", f"{_who(member_id, subscription)} changed its subscription"
                )
        else:
            if len(group.members) >= self._settings.max_size:
                raise GroupMaxSizeReachedError(
                    f"group {group.group_id!r} has {len(group.members)} members, which is the limit"
                )
            change.subscribe(member_id, subscription)
            change.rebalance("MemberJoined", f"{_who(member_id, subscription)} joined")
        current = change.reconcile(member_id, JOIN_EPOCH, None)
        session = group.sessions.get(member_id)
        if session is not None:
            session.last_seen_ms, session.stated = now.monotonic_ms, None
        assignment = assigned_topics(current.assigned, change.names)
        return Decision(tuple(change.records), self._response(request, current.member_epoch, assignment))

    def _predecessor(self, group: Group, member_id: str, instance_id: str | None) -> str | None:
        """Return the id of the existing member with this member id or instance id, or None.

        Raises InvalidRequestError if the member with this member id has another instance id. Raises
        UnreleasedInstanceIdError if another member has this instance id and has not left.
        """
        member = group.members.get(member_id)
        if member is not None:
            if member.subscription.instance_id != instance_id:
                raise InvalidRequestError(
                    f"member {member_id} of group {group.group_id!r} can't change its instance id"
                )
            return member_id
        other_id = group.instances.get(instance_id) if instance_id is not None else None
        if other_id is not None and group.members[other_id].current.member_epoch != STATIC_LEAVE_EPOCH:
            raise UnreleasedInstanceIdError(
                f"instance {instance_id} of group {group.group_id!r} is member {other_id}, which has not left"
            )
        return other_id

    def _leave(self, request: ConsumerGroupHeartbeatRequest, now: Instant, topics: Topics) -> Decision:
        group = self._groups.get(request.group_id)
        member_id = request.member_id
        member = group.members.get(member_id) if group is not None else None
        if group is None or member is None:
            return self.refuse_unknown(request, group)
        change = GroupChange(group, self._settings, self._patterns, topics, now)
        if request.member_epoch == LEAVE_EPOCH:
            change.remove([member_id])
            change.rebalance("MemberLeft", f"{_who(member_id, member.subscription)} left")
        else:
            if member.subscription.instance_id is None:
                raise InvalidRequestError(
                    f"member {member_id} has no instance id, so it must leave with epoch -1"
                )
            change.step_out(member_id)
            group.sessions[member_id].last_seen_ms = now.monotonic_ms
        reply = self._response(request, request.member_epoch)
        return Decision(tuple(change.records), reply)

    def _check_subscription(self, subscription: Subscription) -> None:
        if subscription.assignor is not None and subscription.assignor not in self._settings.assignors:
            raise UnsupportedAssignorError(
                f"assignor {subscription.assignor!r} does not exist here; these do:"
                f" {', '.join(self._settings.assignors)}"
            )
        if subscription.pattern is not None:
            self._patterns.check(subscription.pattern)

    def _response(
        self,
        request: ConsumerGroupHeartbeatRequest,
        member_epoch: int,
        assignment: list[AssignedTopic] | None = None,
    ) -> ConsumerGroupHeartbeatResponse:
        intervals = (self._settings.heartbeat_interval_ms, self._settings.session_timeout_ms)
        return ConsumerGroupHeartbeatResponse(
            _NONE, None, request.member_id, member_epoch, *intervals, assignment
        )


def check_instance(group: Group | None, instance_id: str | None, member_id: str) -> None:
    """Raise FencedInstanceIdError if the instance id now belongs to another member."""
    if group is None or instance_id is None:
        return
    other_id = group.instances.get(instance_id)
    if other_id is not None and other_id != member_id:
        raise FencedInstanceIdError(
            f"instance {instance_id} of group {group.group_id!r} is member {other_id} now, not {member_id}"
        )


def _check_names(request: ConsumerGroupHeartbeatRequest) -> None:
    if not 0 < len(request.group_id) <= MAX_NAME_LENGTH:
        raise InvalidGroupIdError(f"a group id has 1 to {MAX_NAME_LENGTH} characters")
    if not 0 < len(request.member_id) <= MAX_NAME_LENGTH:
        raise InvalidRequestError(f"a member id has 1 to {MAX_NAME_LENGTH} characters")
    if request.instance_id is not None and not 0 < len(request.instance_id) <= MAX_NAME_LENGTH:
        raise InvalidRequestError(f"an instance id has 1 to {MAX_NAME_LENGTH} characters")


def _check_epoch(
    request: ConsumerGroupHeartbeatRequest, member: Member, oldest_epoch: int, owned: Partitions | None
) -> None:
    epoch, current = request.member_epoch, member.current
    if request.instance_id is not None and request.instance_id != member.subscription.instance_id:
        raise FencedInstanceIdError(
            f"member {request.member_id} of group {request.group_id!r} is not instance {request.instance_id}"
        )
    if epoch == current.member_epoch:
        return
    is_known = oldest_epoch <= epoch < current.member_epoch
    if not is_known or (owned is not None and not owned <= current.assigned | current.revoking):
        raise FencedMemberEpochError(
            f"member {request.member_id} of group {request.group_id!r} is at epoch {current.member_epoch},"
            f" not {epoch}"
        )


def _first_subscription(request: ConsumerGroupHeartbeatRequest, caller: Caller) -> Subscription:
    if request.subscribed_topics is None and not request.subscribed_pattern:
        raise InvalidRequestError("a member that joins must name topics or a pattern to subscribe to")
    if request.rebalance_timeout_ms <= 0:
        raise InvalidRequestError("a member that joins must give its rebalance timeout")
    if request.owned:
        raise InvalidRequestError("a member that joins can't own partitions")
    return Subscription(
        request.instance_id,
        caller.client_id,
        caller.host,
        min(request.rebalance_timeout_ms, MAX_REBALANCE_TIMEOUT_MS),
        tuple(sorted({*(request.subscribed_topics or ())})),
        request.subscribed_pattern or None,
        request.assignor,
    )


def _subscription(request: ConsumerGroupHeartbeatRequest, before: Subscription) -> Subscription:
    """Return ``before`` with the changes in the request, or ``before`` itself if there are none."""
    topics, pattern, assignor = request.subscribed_topics, request.subscribed_pattern, request.assignor
    timeout_ms = min(request.rebalance_timeout_ms, MAX_REBALANCE_TIMEOUT_MS)
    if topics is None and pattern is None and assignor is None and timeout_ms == -1:
        return before
    changed = before._replace(
        rebalance_timeout_ms=timeout_ms if timeout_ms > 0 else before.rebalance_timeout_ms,
        topics=tuple(sorted(set(topics))) if topics is not None else before.topics,
        pattern=(pattern or None) if pattern is not None else before.pattern,
        assignor=assignor if assignor is not None else before.assignor,
    )
    return before if changed == before else changed


def _who(member_id: str, subscription: Subscription) -> str:
    instance = f"instance {subscription.instance_id}, " if subscription.instance_id is not None else ""
    return f"member {member_id} ({instance}client {subscription.client_id} at {subscription.host})"
