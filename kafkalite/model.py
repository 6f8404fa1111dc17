"""The vocabulary: the values every floor speaks in, and the sentinels of the protocol.

Records and addresses are ``NamedTuple``: immutable, and built at C speed (``map(Record._make, zip(...))``
makes several million a second, which a frozen dataclass cannot).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, NewType, TypeVar

from kafkalite.limits import MAX_TOPIC_NAME_LENGTH

BrokerId = NewType("BrokerId", int)
LeaderEpoch = NewType("LeaderEpoch", int)

#: What the names of topics begin with that belong to the brokers.
INTERNAL_PREFIX: Final = "__"

NO_OFFSET: Final = -1
NO_EPOCH: Final = -1
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
MAX_PRODUCER_EPOCH: Final = 2**15 - 1  #: the last of a producer id, 16 bits on the wire
NO_SEQUENCE: Final = -1
NO_BROKER_EPOCH: Final = -1  #: of a broker that is not registered

# Timestamps with a meaning of their own in ListOffsets (Kafka's numbers).
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3


class Acks(enum.IntEnum):
    """What a produce request waits for. The name in configuration is ``0``, ``1`` or ``all``."""

    NONE = 0
    LEADER = 1
    ALL = -1


class TimestampType(enum.IntEnum):
    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class IsolationLevel(enum.IntEnum):
    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class RecordAddress(NamedTuple):
    """Topic-Partition-Offset, the address of one record: ``Purchases-1-456332``."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> RecordAddress:
        """``Purchases-1-456332`` -> its parts; the topic may itself hold hyphens. Raises ValueError."""
        parts = text.rsplit("-", 2)
        if len(parts) != 3 or not parts[0] or not (_is_decimal(parts[1]) and _is_decimal(parts[2])):
            raise ValueError(f"{text!r} is not Topic-Partition-Offset, for example Purchases-1-456332")
        return cls(parts[0], int(parts[1]), int(parts[2]))


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19


Headers = tuple[tuple[str, bytes | None], ...]
"""A record's headers: (name, value) in the order they were sent; a name may repeat."""


class Record(NamedTuple):
    """One record as a consumer sees it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: bytes | None
    value: bytes | None
    headers: Headers

    @property
    def address(self) -> RecordAddress:
        return RecordAddress(self.topic, self.partition, self.offset)


class RecordMetadata(NamedTuple):
    """Where an acknowledged record stands. ``offset`` is NO_OFFSET (-1) with ``acks=0``."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp_ms: int
    leader_epoch: int


class OffsetAndMetadata(NamedTuple):
    """What a group commits for a partition (R40)."""

    offset: int  #: of the next record to be read
    leader_epoch: int = NO_EPOCH  #: of the last record read
    metadata: str | None = None  #: the application's own words


class GroupMetadata(NamedTuple):
    """Who commits: a member of a group at its epoch, or nobody's member ("" at NO_EPOCH)."""

    group_id: str
    member_id: str = ""
    member_epoch: int = NO_EPOCH
    instance_id: str | None = None


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Step(Generic[R]):
    """What a deciding machine returns: state changes to make durable, and what to answer then.

    ``replies`` are (ticket, response) pairs to release only after every one of ``records`` is committed.
    ``next_deadline_ms`` is when the shell must call ``tick`` again, or None.
    """

    records: tuple[R, ...] = ()
    replies: tuple[tuple[int, Any], ...] = ()
    next_deadline_ms: int | None = None


_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def topic_name_problem(name: str) -> str | None:
    """Why ``name`` can't be a topic's name, or None when it can: Kafka's rule, 1 to 249 of [a-zA-Z0-9._-]."""
    if not name:
        return "a topic name must not be empty"
    if name in {".", ".."}:
        return f"a topic name must not be {name!r}"
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return f"a topic name has at most {MAX_TOPIC_NAME_LENGTH} characters, this one has {len(name)}"
    if _TOPIC_NAME.fullmatch(name) is None:
        return f"topic name {name!r} holds a character outside [a-zA-Z0-9._-]"
    return None
