"""Collects the records by which one decision changes one group. The group changes when they are replayed."""

# Tests: tests/groups/test_heartbeat.py

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kafkalite.coordinator_types import Instant, StateRecord, Topics
from kafkalite.groups import record_codec
from kafkalite.groups.assignors import ASSIGNORS
from kafkalite.groups.group import Group
from kafkalite.groups.member import (
    NO_PARTITIONS,
    NOTHING_HELD,
    STATIC_LEAVE_EPOCH,
    CurrentAssignment,
    Member,
    Partitions,
    Subscription,
)
from kafkalite.groups.pattern_cache import PatternCache
from kafkalite.groups.record_codec import GroupState
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_TIMESTAMP
from kafkalite.protocol.messages.groups import GroupEvent


class GroupChange:
    """The state of a group after a decision, and the ``records`` whose replay leads to that state.

    Call only the methods that are needed, in this order: ``subscribe``, ``remove``, ``step_out`` or
    ``succeed``, then ``rebalance`` for a new generation, then ``reconcile`` for the member that sent the
    request. ``reconcile`` takes the owners of partitions from the state before the change, except that
    partitions of removed members have no owner.
    """

    def __init__(
        self, group: Group, settings: GroupSettings, patterns: PatternCache, topics: Topics, now: Instant
    ) -> None:
        self.members = dict(group.members)
        self.group_epoch = group.group_epoch
        self.names = group.names
        self.records: list[StateRecord] = []
        self._group = group
        self._settings = settings
        self._patterns = patterns
        self._topics = topics
        self._now = now

    def subscribe(self, member_id: str, subscription: Subscription) -> None:
        """Add a member or change its subscription."""
        before = self.members.get(member_id)
        if before is None:
            self.members[member_id] = Member(subscription, NO_PARTITIONS, NOTHING_HELD)
        elif before.subscription == subscription:
            return
        else:
            self.members[member_id] = before._replace(subscription=subscription)
        self._record(record_codec.SUBSCRIPTION, subscription, member_id)

    def remove(self, member_ids: Iterable[str]) -> None:
        """Remove members. Their partitions are then available to the other members."""
        group_id = self._group.group_id
        for member_id in member_ids:
            del self.members[member_id]
            for kind in (record_codec.SUBSCRIPTION, record_codec.TARGET, record_codec.CURRENT):
                self.records.append(StateRecord(record_codec.key_of(kind, group_id, member_id), None))

    def step_out(self, member_id: str) -> None:
        """Let a static member leave temporarily. The member then owns nothing, but keeps its target."""
        away = CurrentAssignment(STATIC_LEAVE_EPOCH, 0, NO_PARTITIONS, NO_PARTITIONS)
        self._put_current(member_id, away)

    def succeed(self, member_id: str, predecessor_id: str, subscription: Subscription) -> None:
        """Let the member ``predecessor_id`` join again as ``member_id``, and keep its target.

        The two ids differ if a static member has got a new member id.
        """
        target = self.members[predecessor_id].target
        if member_id != predecessor_id:
            self.remove([predecessor_id])
            self.subscribe(member_id, subscription)
            self._put_target(member_id, target)
        else:
            self.subscribe(member_id, subscription)
        if self.members[member_id].current.member_epoch == STATIC_LEAVE_EPOCH:
            self.members[member_id] = self.members[member_id]._replace(current=NOTHING_HELD)

    def _put_target(self, member_id: str, target: Partitions) -> None:
        self.members[member_id] = self.members[member_id]._replace(target=target)
        self._record(record_codec.TARGET, [target], member_id)

    def _put_current(self, member_id: str, current: CurrentAssignment) -> None:
        self.members[member_id] = self.members[member_id]._replace(current=current)
        self._record(record_codec.CURRENT, current, member_id)

    def _record(self, kind: int, value: Iterable[Any], *key: str | int) -> None:
        key = (self._group.group_id, *key)
        self.records.append(record_codec.record(kind, value, *key, names=self.names))

    def subscribed_shapes(self) -> dict[str, tuple[str, int]]:
        """Return {name: (topic id, partition count)} of the existing topics that have subscribers."""
        names: set[str] = set()
        for subscription in {member.subscription[4:6]: None for member in self.members.values()}:
            names.update(subscription[0])
            names.update(self._patterns.matches(subscription[1], self._topics))
        topics = self._topics
        return {
            name: (topics[name].topic_id, topics[name].partition_count) for name in names if name in topics
        }

    def rebalance(self, cause: str, detail: str) -> None:
        """Begin a new generation: increment the group epoch, and compute all targets. Record ``cause`` and
        ``detail`` as the reason."""
        group = self._group
        self.group_epoch += 1
        shapes = self.subscribed_shapes()
        self.names = {**group.names, **{topic_id: name for name, (topic_id, _) in shapes.items()}}
        assignor = self._choose_assignor()
        self._assign(assignor, shapes)
        emptied_ms = NO_TIMESTAMP if self.members else self._now.wall_ms
        state = GroupState(self.group_epoch, assignor, emptied_ms, shapes)
        event = GroupEvent(
            self.group_epoch,
            self._now.wall_ms,
            cause,
            detail,
            len(self.members),
            sum(count for _, count in shapes.values()),
        )
        self._record(record_codec.GROUP, state)
        # The keys of events repeat, so this event replaces that of the generation JOURNAL_SIZE earlier.
        self._record(record_codec.EVENT, event, self.group_epoch % record_codec.JOURNAL_SIZE)

    def _choose_assignor(self) -> str:
        """Return the assignor that most members requested. In a tie, the configuration's order decides."""
        known = self._settings.assignors
        votes = Counter(
            member.subscription.assignor
            for member in self.members.values()
            if member.subscription.assignor in known
        )
        return max(known, key=lambda name: votes[name])

    def _assign(self, assignor: str, shapes: Mapping[str, tuple[str, int]]) -> None:
        members = self.members
        topic_ids: dict[tuple[tuple[str, ...], str | None], frozenset[str]] = {}
        subscribers: dict[str, frozenset[str]] = {}
        for member_id in sorted(members, key=lambda id_: (members[id_].subscription.instance_id or id_, id_)):
            subscription = members[member_id].subscription
            wanted = (subscription.topics, subscription.pattern)
            if wanted not in topic_ids:
                names = {*subscription.topics, *self._patterns.matches(subscription.pattern, self._topics)}
                topic_ids[wanted] = frozenset([shapes[name][0] for name in names if name in shapes])
            subscribers[member_id] = topic_ids[wanted]
        counts = dict(shapes.values())
        previous = {member_id: member.target for member_id, member in members.items()}
        targets = ASSIGNORS[assignor](subscribers, counts, previous)
        for member_id, target in targets.items():
            if target != members[member_id].target:
                self._put_target(member_id, target)

    def reconcile(self, member_id: str, stated_epoch: int, owned: Partitions | None) -> CurrentAssignment:
        """Bring a member's assignment as close to its target as the other members allow. Return the new
        assignment (R38).

        ``stated_epoch`` and ``owned`` are the member epoch and the partitions in its heartbeat; ``owned`` is
        None if the heartbeat does not list them. A partition to revoke counts as released when a heartbeat
        *with the current member epoch* does not list it. The member sent that heartbeat after it had received
        the revocation, whereas a heartbeat sent before has an earlier epoch.
        """
        member = self.members[member_id]
        current, target = member.current, member.target
        revoking = current.revoking
        if revoking and owned is not None and stated_epoch == current.member_epoch:
            revoking &= owned
        assigned = current.assigned
        if self.group_epoch != current.member_epoch:
            # A revocation requires a new epoch (see the docstring). Without one there is nothing to revoke.
            revoking |= assigned - target
            assigned &= target
        if len(assigned) != len(target):
            assigned |= self.available_to(member_id, target - assigned - revoking)
        if assigned == current.assigned:
            assigned = current.assigned  # reuse the same object, which makes comparisons cheap
        # The first epoch of a member is the oldest that it may send. A lower epoch is from an earlier member.
        previous_epoch = max(current.previous_epoch, stated_epoch) or self.group_epoch
        new = CurrentAssignment(self.group_epoch, previous_epoch, assigned, revoking)
        if new[0] != current[0] or new[2:] != current[2:]:
            self._put_current(member_id, new)
            return new
        return current

    def available_to(self, member_id: str, wanted: Partitions) -> Partitions:
        """Return those of the ``wanted`` partitions that no other member owns (R38)."""
        owners, members = self._group.owners, self.members
        return frozenset(
            [
                partition
                for partition in wanted
                if (owner := owners.get(partition)) is None or owner == member_id or owner not in members
            ]
        )
