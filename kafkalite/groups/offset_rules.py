"""Rules for committed offsets: who may commit, which offsets are valid, who may read (R35, R39, R40)."""

# Tests: tests/groups/test_offsets.py

from __future__ import annotations

from collections.abc import Mapping

from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, Topics
from kafkalite.errors import (
    BrokerError,
    ErrorCode,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidGroupIdError,
    InvalidRequestError,
    OffsetMetadataTooLargeError,
    PolicyViolationError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    UnstableOffsetCommitError,
)
from kafkalite.groups.group import Group, Session, new_group
from kafkalite.groups.heartbeat import MAX_NAME_LENGTH, check_instance
from kafkalite.groups.member import Member
from kafkalite.groups.offsets import OffsetKey, PendingOffsets
from kafkalite.groups.pattern_cache import PatternCache
from kafkalite.groups.record_codec import OFFSET, OffsetValue, key_of, record
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP
from kafkalite.protocol.messages.groups import (
    CommittedOffset,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

_NONE = int(ErrorCode.NONE)
_Commit = OffsetCommitRequest | TxnOffsetCommitRequest


class OffsetRules:
    """Decides requests that commit, fetch and delete offsets of one coordinator's groups."""

    def __init__(
        self,
        groups: Mapping[str, Group],
        pending: PendingOffsets,
        settings: GroupSettings,
        patterns: PatternCache,
    ) -> None:
        self._groups = groups
        self._pending = pending
        self._settings = settings
        self._patterns = patterns

    def commit(self, request: _Commit, caller: Caller, now: Instant, topics: Topics) -> Decision:
        """Commit each valid offset; each invalid one gets its own error in the response.

        The offsets of a TxnOffsetCommitRequest are pending until its transaction ends. Raises
        InvalidGroupIdError, and the errors of ``check_member`` (R35, R39), ``check_connection`` (R56) and
        ``new_group`` (S26).
        """
        self.check_member(request)
        if not 0 < len(request.group_id) <= MAX_NAME_LENGTH:
            raise InvalidGroupIdError(f"a group id has 1 to {MAX_NAME_LENGTH} characters")
        group = self._groups.get(request.group_id) or new_group(
            self._groups, request.group_id, self._settings
        )
        session = group.sessions.get(request.member_id)
        if session is not None and isinstance(request, OffsetCommitRequest):
            self.check_connection(request, caller, session)
            session.commit_connection = caller.connection
        left_count = self._settings.max_offsets - group.offsets.used
        may_exceed = len(request.offsets) > left_count
        records: list[StateRecord] = []
        results: list[CommittedOffset] = []
        for entry in request.offsets:
            try:
                topic_id = self._check_offset(entry, topics)
                if may_exceed and self._adds_offset(request, group, entry):
                    left_count -= 1
                    self._check_offset_count(request.group_id, left_count)
            except BrokerError as error:
                results.append(_result(entry, entry.topic_id, NO_TIMESTAMP, error))
                continue
            value = OffsetValue(entry.offset, entry.leader_epoch, entry.metadata, now.wall_ms, topic_id)
            records.append(record(OFFSET, value, request.group_id, entry.topic, entry.partition))
            results.append(_result(entry, topic_id, now.wall_ms, None))
        if isinstance(request, OffsetCommitRequest):
            return Decision(tuple(records), OffsetCommitResponse(_NONE, None, results))
        reply = TxnOffsetCommitResponse(_NONE, None, results)
        return Decision(tuple(records), reply, request.producer_id, request.producer_epoch)

    def _adds_offset(self, request: _Commit, group: Group, entry: CommittedOffset) -> bool:
        """Whether the group uses more of group.max.offsets after this commit (S26)."""
        key = OffsetKey(request.group_id, entry.topic, entry.partition)
        if isinstance(request, TxnOffsetCommitRequest):
            is_repeated = self._pending.has(request.producer_id, key)
            return not is_repeated and group.offsets.adds(entry.topic, entry.partition)
        return not self._pending.is_pending(key) and group.offsets.adds(entry.topic, entry.partition)

    def _check_offset_count(self, group_id: str, left_count: int) -> None:
        if left_count < 0:
            raise PolicyViolationError(
                f"group {group_id!r} would have more than group.max.offsets={self._settings.max_offsets}"
                " offsets, committed or in open transactions",
                hint="end open transactions ('kl txn list'), or raise group.max.offsets",
            )

    def check_member(self, request: _Commit | OffsetFetchRequest) -> None:
        """Raise a BrokerError if the sender may not commit or fetch offsets (R35, R39).

        The sender may if it is a member and states its current epoch, or if the group has no members and the
        request states a negative epoch. A commit must not state the instance id of another member.
        """
        group = self._groups.get(request.group_id)
        if not isinstance(request, OffsetFetchRequest):
            check_instance(group, request.instance_id, request.member_id)
        member = group.members.get(request.member_id) if group is not None else None
        if member is None:
            if request.member_epoch >= 0 or (group is not None and group.members):
                who = f"member {request.member_id!r}" if request.member_id else "a client that is no member"
                raise UnknownMemberIdError(
                    f"{who} can't commit or fetch offsets of group {request.group_id!r}"
                    + (f", which has {len(group.members)} members" if group is not None else "")
                )
            return
        self.check_member_epoch(request, member)

    def check_member_epoch(self, request: _Commit | OffsetFetchRequest, member: Member) -> None:
        """Raise StaleMemberEpochError unless the request has the member's current epoch (R39)."""
        if request.member_epoch != member.current.member_epoch:
            raise StaleMemberEpochError(
                f"member {request.member_id} of group {request.group_id!r} is at epoch"
                f" {member.current.member_epoch}, not {request.member_epoch}"
            )

    def check_connection(self, request: OffsetCommitRequest, caller: Caller, session: Session) -> None:
        """Raise InvalidRequestError if the member has already committed on a newer connection (R56).

        A member commits on one connection at a time, so it sent this commit before those on the newer
        connection.
        """
        if caller.connection < session.commit_connection:
            raise InvalidRequestError(
                f"member {request.member_id} of group {request.group_id!r} has committed on a newer"
                " connection: a late commit could move its offsets back",
                hint="send all commits of a member on one connection",
            )

    def _check_offset(self, entry: CommittedOffset, topics: Topics) -> str:
        """Return the id of the offset's topic. Raises a BrokerError if the offset is invalid."""
        shape = topics.get(entry.topic)
        if shape is None or not 0 <= entry.partition < shape.partition_count:
            raise UnknownTopicOrPartitionError(f"partition {entry.topic}-{entry.partition} does not exist")
        if entry.topic_id and entry.topic_id != shape.topic_id:
            raise UnknownTopicIdError(
                f"topic {entry.topic} has the id {shape.topic_id} now, not {entry.topic_id}"
            )
        if entry.offset < 0:
            raise InvalidRequestError(f"{entry.topic}-{entry.partition}: offset {entry.offset} is negative")
        metadata_bytes = len(entry.metadata.encode()) if entry.metadata else 0
        if metadata_bytes > self._settings.offset_metadata_max_bytes:
            raise OffsetMetadataTooLargeError(
                f"{entry.topic}-{entry.partition}: {metadata_bytes} bytes of metadata exceed the limit of"
                f" {self._settings.offset_metadata_max_bytes}"
            )
        return shape.topic_id

    def fetch(self, request: OffsetFetchRequest, topics: Topics) -> Decision:
        """Return the committed offsets. If the request states a member id and epoch, raises the errors of
        ``check_member``."""
        if request.member_id and request.member_epoch >= 0:
            self.check_member(request)
        group = self._groups.get(request.group_id)
        if request.partitions is not None:
            wanted = [(entry.topic, entry.partition) for entry in request.partitions]
        else:
            found = set(group.offsets) if group is not None else set()
            if request.require_stable and group is not None:
                found.update(group.offsets.staged)
            wanted = sorted(found)
        offsets: list[CommittedOffset] = []
        for topic, partition in wanted:
            value = group.offsets.get(topic, partition) if group is not None else None
            shape = topics.get(topic)
            if value is not None and (shape is None or shape.topic_id != value.topic_id):
                value = None  # it was committed for an earlier topic with this name
            key = OffsetKey(request.group_id, topic, partition)
            if request.require_stable and self._pending.is_pending(key):
                error = UnstableOffsetCommitError(
                    f"an open transaction has an offset of group {request.group_id!r} for {topic}-{partition}"
                )
                offsets.append(_fetched(topic, partition, None, error))
            elif value is not None or request.partitions is not None:
                offsets.append(_fetched(topic, partition, value, None))
        return Decision(reply=OffsetFetchResponse(_NONE, None, offsets))

    def delete(self, request: OffsetDeleteRequest, topics: Topics) -> Decision:
        """Delete the requested offsets, except those of topics to which a member subscribes.

        Raises GroupIdNotFoundError.
        """
        group = self._groups.get(request.group_id)
        if group is None:
            raise GroupIdNotFoundError(f"there is no group {request.group_id!r}")
        subscribed: set[str] = set()
        for member in group.members.values():
            subscribed.update(member.subscription.topics)
            subscribed.update(self._patterns.matches(member.subscription.pattern, topics))
        records: list[StateRecord] = []
        offsets: list[CommittedOffset] = []
        for entry in request.partitions:
            error = None
            if entry.topic in subscribed:
                error = GroupSubscribedToTopicError(
                    f"members of group {request.group_id!r} subscribe to {entry.topic}"
                )
            elif group.offsets.get(entry.topic, entry.partition) is not None or self._pending.is_pending(
                OffsetKey(request.group_id, entry.topic, entry.partition)
            ):
                records.append(offset_tombstone(request.group_id, entry.topic, entry.partition))
            offsets.append(_fetched(entry.topic, entry.partition, None, error))
        return Decision(tuple(records), OffsetDeleteResponse(_NONE, None, offsets))


def offset_tombstone(group_id: str, topic: str, partition: int) -> StateRecord:
    """Return the record that deletes a committed offset."""
    return StateRecord(key_of(OFFSET, group_id, topic, partition), None)


def _result(
    entry: CommittedOffset, topic_id: str, commit_ms: int, error: BrokerError | None
) -> CommittedOffset:
    """Return the response entry, without the metadata text, for one offset of a commit."""
    value = OffsetValue(entry.offset, entry.leader_epoch, None, commit_ms, topic_id)
    return _fetched(entry.topic, entry.partition, value, error)


def _fetched(
    topic: str, partition: int, value: OffsetValue | None, error: BrokerError | None
) -> CommittedOffset:
    found = value or OffsetValue(NO_OFFSET, NO_EPOCH, None, NO_TIMESTAMP, "")
    outcome = (_NONE, None) if error is None else (int(error.code), str(error))
    return CommittedOffset(topic, partition, *found, *outcome)
