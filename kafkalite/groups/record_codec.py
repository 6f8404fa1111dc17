"""Encodes the records of ``__consumer_offsets`` as msgpack arrays.

::

    key                                             value; its first element is its version
    [1, group]                                      group epoch, assignor, emptied_ms, topics
    [2, group, member]                              subscription
    [3, group, member]                              target assignment
    [4, group, member]                              epochs and current assignment
    [5, group, group_epoch modulo 64]               an event: the cause of a generation
    [6, group, topic, partition]                    a committed offset

A set of partitions is ``[[topic_id, topic, [partition, ...]], ...]``. The keys of events repeat after 64
generations, so that compaction keeps the last 64 events of a group. An unknown kind or version raises
StorageError, because skipping a record would lead to another state than that of the coordinator that wrote
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, get_type_hints

import msgpack

from kafkalite.coordinator_types import StateRecord
from kafkalite.errors import StorageError
from kafkalite.groups.member import CurrentAssignment, Partitions, Subscription, TopicIdPartition, by_topic
from kafkalite.protocol.messages.groups import GroupEvent

GROUP: Final = 1
SUBSCRIPTION: Final = 2
TARGET: Final = 3
CURRENT: Final = 4
EVENT: Final = 5
OFFSET: Final = 6

JOURNAL_SIZE: Final = 64  #: events per group
_VERSION: Final = 0

_pack = msgpack.Packer().pack  # one packer for all records, because packb would create one for each call
_unpack = msgpack.unpackb

Names = Mapping[str, str]
"""Topic id -> name."""
Shapes = Mapping[str, tuple[str, int]]
"""Topic name -> (topic id, partition count)."""


class GroupState(NamedTuple):
    """The value of the record of a group's state."""

    group_epoch: int
    assignor: str
    emptied_ms: int  #: wall clock at which the last member left; NO_TIMESTAMP while the group has members
    topics: Shapes  #: the subscribed topics at the last assignment


class Target(NamedTuple):
    """The value of the record of a member's target."""

    partitions: Partitions


class OffsetValue(NamedTuple):
    """The value of the record of a committed offset. ``CommittedOffset`` documents its fields."""

    offset: int
    leader_epoch: int
    metadata: str | None
    commit_ms: int
    topic_id: str


def _pack_set(partitions: Partitions, names: Names) -> list[Any]:
    return [[id_, names.get(id_, ""), numbers] for id_, numbers in by_topic(partitions).items()]


def _unpack_set(packed: list[Any], names: dict[str, str]) -> Partitions:
    names.update((topic_id, name) for topic_id, name, _ in packed)
    return frozenset([TopicIdPartition(id_, number) for id_, _, numbers in packed for number in numbers])


class _Form(NamedTuple):
    """Encodes and decodes the fields of one type. Sets of partitions are stored with their topics' names."""

    pack: Callable[[Any, Names], Any]
    unpack: Callable[[Any, dict[str, str]], Any]


#: {type of a field: its form}. Fields of all other types are stored unchanged.
_FORMS: Final[dict[Any, _Form]] = {
    tuple[str, ...]: _Form(lambda strings, _: strings, lambda strings, _: tuple(strings)),
    Partitions: _Form(_pack_set, _unpack_set),
    Shapes: _Form(
        lambda topics, _: [[name, *shape] for name, shape in sorted(topics.items())],
        lambda topics, _: {name: (topic_id, count) for name, topic_id, count in topics},
    ),
}


class _Layout(NamedTuple):
    key_length: int
    value_type: Any
    forms: tuple[tuple[int, _Form], ...]  #: (index of a field, its form)


def _layout(key_length: int, value_type: Any) -> _Layout:
    hints = get_type_hints(value_type)
    types = [hints[name] for name in value_type._fields]
    forms = [(index, _FORMS[hint]) for index, hint in enumerate(types) if hint in _FORMS]
    return _Layout(key_length, value_type, tuple(forms))


_LAYOUTS: Final = {
    GROUP: _layout(2, GroupState),
    SUBSCRIPTION: _layout(3, Subscription),
    TARGET: _layout(3, Target),
    CURRENT: _layout(3, CurrentAssignment),
    EVENT: _layout(3, GroupEvent),
    OFFSET: _layout(4, OffsetValue),
}


def key_of(kind: int, group_id: str, *rest: str | int) -> bytes:
    """Return the encoded key ``[kind, group_id, *rest]`` of a record."""
    key: bytes = _pack((kind, group_id, *rest))
    return key


def parse_key(key: bytes) -> list[Any]:
    """Return the decoded key ``[kind, group_id, ...]``. Raises StorageError if the key is malformed or its
    kind unknown."""
    try:
        parts: list[Any] = _unpack(key)
        layout = _LAYOUTS.get(parts[0])
    except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
        raise _damaged(f"the key {key[:80]!r} can't be read") from error
    if layout is None or len(parts) != layout.key_length:
        raise _damaged(f"the key {key[:80]!r} is of an unknown kind")
    return parts


def record(kind: int, value: Iterable[Any], *key: str | int, names: Names | None = None) -> StateRecord:
    """Return an encoded record of the given kind. ``key`` is the record's key without the kind.

    ``names`` maps topic ids to the names that are stored with them in sets of partitions. For an id without a
    name, "" is stored.
    """
    fields = [_VERSION, *value]
    for index, form in _LAYOUTS[kind].forms:
        fields[index + 1] = form.pack(fields[index + 1], names or {})
    return StateRecord(_pack((kind, *key)), _pack(fields))


def parse(kind: int, value: bytes) -> tuple[Any, dict[str, str]]:
    """Return (the decoded value, {topic id: name} for its sets of partitions).

    Raises StorageError if the value is malformed or its version is unknown.
    """
    layout, names = _LAYOUTS[kind], dict[str, str]()
    try:
        version, *fields = _unpack(value)
        if version == _VERSION:
            for index, form in layout.forms:
                fields[index] = form.unpack(fields[index], names)
            return layout.value_type(*fields), names
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise _damaged(f"the value {value[:80]!r} can't be read") from error
    raise _damaged(f"version {version!r} is unknown")


def _damaged(what: str) -> StorageError:
    return StorageError(
        f"__consumer_offsets: {what}", hint="it was written by a later version of kafkalite, or is damaged"
    )
