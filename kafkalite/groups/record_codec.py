"""The records of ``__consumer_offsets``: msgpack arrays.

::

    key                                             value, each beginning with its version
    [1, group]                                      group: epoch, assignor, emptied_ms, topics
    [2, group, member]                              subscription
    [3, group, member]                              target assignment
    [4, group, member]                              epochs and current assignment
    [5, group, group_epoch modulo 64]               an event: the cause of that generation
    [6, group, topic, partition]                    a committed offset

A set of partitions is ``[[topic_id, topic, [partition, ...]], ...]``. The events are a ring of keys, so
that compaction keeps the last 64 of a group. An unknown kind or version is refused, because skipping a
record would lead to a state that differs from the state of the coordinator that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgpack

from kafkalite.coordinator_types import StateRecord
from kafkalite.errors import StorageError
from kafkalite.groups.member import (
    CurrentAssignment,
    Partitions,
    Subscription,
    TopicIdPartition,
    by_topic,
)
from kafkalite.protocol.messages.groups import GroupEvent

GROUP: Final = 1
SUBSCRIPTION: Final = 2
TARGET: Final = 3
CURRENT: Final = 4
EVENT: Final = 5
OFFSET: Final = 6

JOURNAL_SIZE: Final = 64
_VERSION: Final = 0

_pack = msgpack.Packer().pack  # one packer for all records, because packb creates one per call
_unpack = msgpack.unpackb


class GroupState(NamedTuple):
    """The value of a group's own record."""

    group_epoch: int
    assignor: str
    emptied_ms: int  #: wall clock when the last member left; NO_TIMESTAMP while the group has members
    #: the topics of the assignment: name -> (topic id, partition count)
    topics: Mapping[str, tuple[str, int]]


class OffsetValue(NamedTuple):
    """The value of a committed offset."""

    offset: int
    leader_epoch: int
    metadata: str | None
    commit_ms: int
    topic_id: str


def key_of(kind: int, group_id: str, *rest: str | int) -> bytes:
    """Return the key of a record."""
    key: bytes = _pack((kind, group_id, *rest))
    return key


def parse_key(key: bytes) -> list[Any]:
    """Return ``[kind, group_id, ...]``. Raises StorageError for an unknown key."""
    try:
        parts: list[Any] = _unpack(key)
        kind = parts[0]
    except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
        raise _damaged(f"the key {key[:80]!r} can't be read") from error
    if kind not in _KEY_LENGTHS or len(parts) != _KEY_LENGTHS[kind]:
        raise _damaged(f"the key {key[:80]!r} is of an unknown kind")
    return parts


_KEY_LENGTHS: Final = {GROUP: 2, SUBSCRIPTION: 3, TARGET: 3, CURRENT: 3, EVENT: 3, OFFSET: 4}


def _damaged(what: str) -> StorageError:
    return StorageError(
        f"__consumer_offsets: {what}", hint="it was written by a later version of kafkalite, or is damaged"
    )


def group_record(group_id: str, state: GroupState) -> StateRecord:
    """Return the group's own record."""
    topics = [[name, topic_id, count] for name, (topic_id, count) in sorted(state.topics.items())]
    value = _pack((_VERSION, state.group_epoch, state.assignor, state.emptied_ms, topics))
    return StateRecord(key_of(GROUP, group_id), value)


def parse_group(value: bytes) -> GroupState:
    """Parse the value of ``group_record``. Raises StorageError."""
    group_epoch, assignor, emptied_ms, topics = _fields(value, 4)
    return GroupState(group_epoch, assignor, emptied_ms, {name: (id_, count) for name, id_, count in topics})


def subscription_record(group_id: str, member_id: str, subscription: Subscription) -> StateRecord:
    """Return the record of a member's subscription."""
    return StateRecord(key_of(SUBSCRIPTION, group_id, member_id), _pack((_VERSION, *subscription)))


def parse_subscription(value: bytes) -> Subscription:
    """Parse the value of ``subscription_record``. Raises StorageError."""
    fields = _fields(value, 7)
    fields[4] = tuple(fields[4])
    return Subscription._make(fields)


def target_record(group_id: str, member_id: str, target: Partitions, names: Mapping[str, str]) -> StateRecord:
    """Return the record of a member's target."""
    return StateRecord(key_of(TARGET, group_id, member_id), _pack((_VERSION, _pack_set(target, names))))


def parse_target(value: bytes) -> tuple[Partitions, dict[str, str]]:
    """Return (target, names by topic id). Raises StorageError."""
    names: dict[str, str] = {}
    (packed,) = _fields(value, 1)
    return _parse_set(packed, names), names


def current_record(
    group_id: str, member_id: str, current: CurrentAssignment, names: Mapping[str, str]
) -> StateRecord:
    """Return the record of a member's current assignment."""
    value = _pack(
        (
            _VERSION,
            current.member_epoch,
            current.previous_epoch,
            _pack_set(current.assigned, names),
            _pack_set(current.revoking, names),
        )
    )
    return StateRecord(key_of(CURRENT, group_id, member_id), value)


def parse_current(value: bytes) -> tuple[CurrentAssignment, dict[str, str]]:
    """Return (current assignment, names by topic id). Raises StorageError."""
    names: dict[str, str] = {}
    member_epoch, previous_epoch, assigned, revoking = _fields(value, 4)
    return (
        CurrentAssignment(
            member_epoch, previous_epoch, _parse_set(assigned, names), _parse_set(revoking, names)
        ),
        names,
    )


def event_record(group_id: str, event: GroupEvent) -> StateRecord:
    """Return the record of a generation's cause. It replaces the event of the generation 64 earlier."""
    key = key_of(EVENT, group_id, event.group_epoch % JOURNAL_SIZE)
    return StateRecord(key, _pack((_VERSION, *event)))


def parse_event(value: bytes) -> GroupEvent:
    """Parse the value of ``event_record``. Raises StorageError."""
    return GroupEvent(*_fields(value, 6))


def offset_record(group_id: str, topic: str, partition: int, value: OffsetValue) -> StateRecord:
    """Return the record of a committed offset."""
    return StateRecord(_pack((OFFSET, group_id, topic, partition)), _pack((_VERSION, *value)))


def parse_offset(value: bytes) -> OffsetValue:
    """Parse the value of ``offset_record``. Raises StorageError."""
    return OffsetValue(*_fields(value, 5))


def _fields(value: bytes, count: int) -> list[Any]:
    fields: list[Any]
    try:
        version, *fields = _unpack(value)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _damaged(f"the value {value[:80]!r} can't be read") from error
    if version != _VERSION or len(fields) != count:
        raise _damaged(f"version {version!r} with {len(fields)} fields is unknown")
    return fields


def _pack_set(partitions: Partitions, names: Mapping[str, str]) -> list[Any]:
    return [[id_, names.get(id_, ""), numbers] for id_, numbers in by_topic(partitions).items()]


def _parse_set(packed: list[Any], names: dict[str, str]) -> Partitions:
    for topic_id, name, _ in packed:
        names[topic_id] = name
    return frozenset([TopicIdPartition(id_, number) for id_, _, numbers in packed for number in numbers])
