"""The group coordinator: decides requests and expirations for the groups of one partition.

``decide`` and ``tick`` return records; replaying them changes the groups. These methods change only
volatile state directly: the time of each member's last request and the partitions in it. A new
coordinator receives both with the next heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, TopicShape
from kafkalite.errors import BrokerError, ErrorCode, GroupIdNotFoundError, NonEmptyGroupError
from kafkalite.groups import record_codec
from kafkalite.groups.description import describe_groups, list_groups
from kafkalite.groups.expiry import Expiry
from kafkalite.groups.group import Group
from kafkalite.groups.heartbeat import HeartbeatRules
from kafkalite.groups.member import NO_PARTITIONS, NOTHING_HELD
from kafkalite.groups.offset_rules import OffsetRules, offset_tombstone
from kafkalite.groups.offsets import OffsetKey, PendingOffsets
from kafkalite.groups.pattern_cache import PatternCache
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_PRODUCER_ID
from kafkalite.protocol.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    DeletedGroup,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)

Topics = Mapping[str, TopicShape]
_Decide = Callable[[Any, Caller, Instant, Topics], Decision]
_NONE: Final = int(ErrorCode.NONE)


class GroupMachine:
    """The groups of one partition of ``__consumer_offsets``.

    Callers pass ``decide`` and ``tick`` a new mapping object after every change of a topic and the same
    object otherwise, because pattern matches are cached by its identity.
    """

    def __init__(self, settings: GroupSettings | None = None) -> None:
        self.settings = settings or GroupSettings()
        self.groups: dict[str, Group] = {}  #: without those that are ``is_gone``
        self._pending = PendingOffsets()
        patterns = PatternCache()
        self._heartbeats = HeartbeatRules(self.groups, self.settings, patterns)
        self._offsets = OffsetRules(self.groups, self._pending, self.settings, patterns)
        self._expiry = Expiry(self.groups, self._pending, self.settings, patterns)
        self.has_update = self._heartbeats.has_update
        self._decisions: dict[type, _Decide] = {
            ConsumerGroupHeartbeatRequest: self._heartbeats.decide,
            OffsetCommitRequest: lambda request, _, now, topics: self._offsets.commit(request, now, topics),
            TxnOffsetCommitRequest: lambda request, _, now, topics: self._offsets.commit_in_transaction(
                request, now, topics
            ),
            OffsetFetchRequest: lambda request, _, now, topics: self._offsets.fetch(request, topics),
            OffsetDeleteRequest: lambda request, _, now, topics: self._offsets.delete(request, topics),
            ListGroupsRequest: lambda request, _, now, topics: Decision(
                reply=list_groups(self.groups.values(), request)
            ),
            DescribeGroupsRequest: lambda request, _, now, topics: Decision(
                reply=describe_groups(self.groups, request, now)
            ),
            DeleteGroupsRequest: self._delete_groups,
        }

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def __bool__(self) -> bool:
        return True

    def decide(self, command: Any, caller: Caller, now: Instant, topics: Topics) -> Decision:
        """Return the changes and the response of a request. Raises a BrokerError for a refused request."""
        return self._decisions[type(command)](command, caller, now, topics)

    def tick(self, now: Instant, topics: Topics) -> Decision:
        """Return changes due by time or caused by changed topics, at most about a thousand records."""
        return Decision(tuple(self._expiry.tick(now, topics)))

    def next_deadline_ms(self) -> int | None:
        """Return when ``tick`` may have something to do (monotonic)."""
        return self._expiry.next_deadline_ms()

    def on_loaded(self, now: Instant) -> None:
        """Start all sessions, after all records are replayed."""
        for group in self.groups.values():
            group.on_loaded(now)
        self._expiry.begin(now)

    def _delete_groups(
        self, request: DeleteGroupsRequest, _: Caller, now: Instant, topics: Topics
    ) -> Decision:
        records: list[StateRecord] = []
        results: list[DeletedGroup] = []
        for group_id in dict.fromkeys(request.group_ids):
            group = self.groups.get(group_id)
            error: BrokerError | None = None
            if group is None:
                error = GroupIdNotFoundError(f"there is no group {group_id!r}")
            elif group.members:
                error = NonEmptyGroupError(f"group {group_id!r} has members: {len(group.members)}")
            else:
                keys = {*group.offsets, *((k.topic, k.partition) for k in self._pending.keys_of(group_id))}
                records += [offset_tombstone(group_id, topic, number) for topic, number in sorted(keys)]
                records += self._expiry.tombstones(group)
            outcome = (_NONE, None) if error is None else (int(error.code), str(error))
            results.append(DeletedGroup(group_id, *outcome))
        return Decision(tuple(records), DeleteGroupsResponse(_NONE, None, results))

    # --- replay

    def replay(self, record: StateRecord, now: Instant, *, producer_id: int = NO_PRODUCER_ID) -> None:
        """Replay a record of the log. If ``producer_id`` is given, the record belongs to that producer's
        open transaction.

        Raises StorageError for an unknown kind or version of record.
        """
        key, value = record
        parts = record_codec.parse_key(key)
        kind, group_id = parts[0], parts[1]
        if kind == record_codec.OFFSET:
            self.replay_offset(OffsetKey(group_id, parts[2], parts[3]), value, producer_id)
            return
        group = self.groups.get(group_id)
        if group is None:
            if value is None:
                return
            group = self.groups[group_id] = Group(group_id)
        if kind == record_codec.GROUP:
            group.replay_group(None if value is None else record_codec.parse_group(value))
        elif kind == record_codec.EVENT:
            group.replay_event(parts[2], None if value is None else record_codec.parse_event(value))
        else:
            self._replay_member(group, kind, parts[2], value, now)
        if value is None:
            self._drop_if_gone(group)

    def _replay_member(
        self, group: Group, kind: int, member_id: str, value: bytes | None, now: Instant
    ) -> None:
        if kind == record_codec.SUBSCRIPTION:
            subscription = None if value is None else record_codec.parse_subscription(value)
            group.replay_subscription(member_id, subscription, now)
        elif kind == record_codec.TARGET:
            target, names = (NO_PARTITIONS, {}) if value is None else record_codec.parse_target(value)
            group.replay_target(member_id, target, names, now)
        else:
            current, names = (NOTHING_HELD, {}) if value is None else record_codec.parse_current(value)
            group.replay_current(member_id, current, names, now)
        if member_id in group.members:
            self._expiry.expect(group.session_deadline_ms(member_id, self.settings.session_timeout_ms))

    def replay_offset(self, key: OffsetKey, value: bytes | None, producer_id: int) -> None:
        if producer_id != NO_PRODUCER_ID:
            self._pending.add(producer_id, key, value)
            return
        if self._pending:
            self._pending.overrule(key)
        self._put_offset(key, value)

    def _put_offset(self, key: OffsetKey, value: bytes | None) -> None:
        group_id, topic, partition = key
        group = self.groups.get(group_id)
        if group is None:
            if value is None:
                return
            group = self.groups[group_id] = Group(group_id)
        group.offsets.put(topic, partition, value)
        if value is None:
            self._drop_if_gone(group)

    def _drop_if_gone(self, group: Group) -> None:
        if group.is_gone:
            self.groups.pop(group.group_id, None)

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        """Apply or drop the producer's pending offsets, because its marker was written (R35)."""
        for key, value in self._pending.end(producer_id, is_commit=is_commit):
            self._put_offset(key, value)

    def durable(self) -> object:
        """Return the state that the records determine, for comparing two replays."""
        groups = {group_id: group.durable() for group_id, group in self.groups.items()}
        return groups, self._pending.state()
