"""The group coordinator: decides the requests for its groups, and when members, offsets and groups expire.

One coordinator has the groups of one partition of ``__consumer_offsets``. ``decide`` and ``tick`` return
records; the groups change when these are replayed. Apart from caches, ``decide`` directly changes only the
members' ``Session`` objects, which are not in the log. A new coordinator gets their content from the next
requests.
"""

from __future__ import annotations

from typing import Any, Final

from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, Topics
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

_NONE: Final = int(ErrorCode.NONE)


class GroupMachine:
    """The groups of one partition of ``__consumer_offsets``.

    The argument ``topics`` of ``decide`` and ``tick`` must be a new mapping object after every change of a
    topic, because the machine detects changes by the identity of the object.
    """

    def __init__(self, settings: GroupSettings | None = None) -> None:
        self.settings = settings or GroupSettings()
        self.groups: dict[str, Group] = {}  #: by group id, without groups that are ``is_gone``
        self._pending = PendingOffsets(self._stage)
        patterns = PatternCache()
        self._heartbeats = HeartbeatRules(self.groups, self.settings, patterns)
        self._offsets = OffsetRules(self.groups, self._pending, self.settings, patterns)
        self._expiry = Expiry(self.groups, self.settings, patterns)
        self.has_update = self._heartbeats.has_update

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def __bool__(self) -> bool:
        return True

    def decide(self, command: Any, caller: Caller, now: Instant, topics: Topics) -> Decision:
        """Return the changes and the response for a request. Raises a BrokerError if it is refused."""
        match command:
            case ConsumerGroupHeartbeatRequest():
                return self._heartbeats.decide(command, caller, now, topics)
            case OffsetCommitRequest() | TxnOffsetCommitRequest():
                return self._offsets.commit(command, caller, now, topics)
            case OffsetFetchRequest():
                return self._offsets.fetch(command, topics)
            case OffsetDeleteRequest():
                return self._offsets.delete(command, topics)
            case ListGroupsRequest():
                return Decision(reply=list_groups(self.groups.values(), command))
            case DescribeGroupsRequest():
                return Decision(reply=describe_groups(self.groups, command, now))
            case DeleteGroupsRequest():
                return self._delete_groups(command)
        raise TypeError(f"a group coordinator does not handle {type(command).__name__}")

    def tick(self, now: Instant, topics: Topics) -> Decision:
        """Return records of due expirations and topic changes. If many groups change, later calls return the
        rest."""
        return Decision(tuple(self._expiry.tick(now, topics)))

    def next_deadline_ms(self) -> int | None:
        """Return the monotonic time at which ``tick`` must run next, or None if nothing is scheduled."""
        return self._expiry.next_deadline_ms()

    def on_loaded(self, now: Instant) -> None:
        """Restart all sessions, and schedule the first checks of ``tick``. Called after the last replay."""
        for group in self.groups.values():
            group.on_loaded(now)
        self._expiry.begin(now)

    def _delete_groups(self, request: DeleteGroupsRequest) -> Decision:
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
                keys = {*group.offsets, *group.offsets.staged}
                records += [offset_tombstone(group_id, topic, number) for topic, number in sorted(keys)]
                records += self._expiry.tombstones(group)
            outcome = (_NONE, None) if error is None else (int(error.code), str(error))
            results.append(DeletedGroup(group_id, *outcome))
        return Decision(tuple(records), DeleteGroupsResponse(_NONE, None, results))

    def replay(self, record: StateRecord, now: Instant, *, producer_id: int = NO_PRODUCER_ID) -> None:
        """Replay a record of the log. If the record is part of an open transaction, ``producer_id`` is that
        transaction's producer id.

        Raises StorageError if the record is malformed or its kind or version is unknown. The value of an
        offset is not checked here, but when it is read.
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
        parsed, names = (None, {}) if value is None else record_codec.parse(kind, value)
        match kind:
            case record_codec.GROUP:
                group.replay_group(parsed)
            case record_codec.EVENT:
                group.replay_event(parts[2], parsed)
            case record_codec.SUBSCRIPTION:
                group.replay_subscription(parts[2], parsed, now)
            case record_codec.TARGET:
                group.replay_target(parts[2], parsed.partitions if parsed else NO_PARTITIONS, names, now)
            case record_codec.CURRENT:
                group.replay_current(parts[2], parsed or NOTHING_HELD, names, now)
        if len(parts) > 2 and parts[2] in group.members:
            self._expiry.expect(group.session_deadline_ms(parts[2], self.settings.session_timeout_ms))
        if value is None:
            self._drop_if_gone(group)

    def replay_offset(self, key: OffsetKey, value: bytes | None, producer_id: int) -> None:
        if producer_id != NO_PRODUCER_ID:
            self._pending.add(producer_id, key, value)
            return
        if self._pending:
            self._pending.overrule(key)
        self._put_offset(key, value)

    def _stage(self, key: OffsetKey, change: int) -> None:
        """Count the offsets of a group in open transactions. They keep a group, and limits count it (S26)."""
        group = self.groups.get(key.group_id)
        if group is None:
            group = self.groups[key.group_id] = Group(key.group_id)
        group.offsets.stage(key.topic, key.partition, change)
        self._drop_if_gone(group)

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
        """Apply a transaction's pending offsets, or drop them if ``is_commit`` is False (R35)."""
        for key, value in self._pending.end(producer_id, is_commit=is_commit):
            self._put_offset(key, value)
