"""Types that several packages use, and the special values of the protocol.

Records and addresses are named tuples because these are built faster than frozen dataclasses.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NewType

from kafkalite.limits import MAX_TOPIC_NAME_LENGTH

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    K = TypeVar("K", default=bytes | None)
    V = TypeVar("V", default=bytes | None)
else:
    from typing import TypeVar

    K = TypeVar("K")
    V = TypeVar("V")

BrokerId = NewType("BrokerId", int)
LeaderEpoch = NewType("LeaderEpoch", int)

#: Prefix of internal topics.
INTERNAL_PREFIX: Final = "__"
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"

NO_OFFSET: Final = -1
NO_EPOCH: Final = -1
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
MAX_PRODUCER_EPOCH: Final = 2**15 - 1  #: 16 bits on the wire
NO_SEQUENCE: Final = -1
NO_BROKER_EPOCH: Final = -1  #: the epoch of a broker that is not registered

# Special timestamps of ListOffsets, with Kafka's numbers.
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3


#: The name in a ``QuotaEntity`` that stands for all names without a quota of their own.
DEFAULT_ENTITY: Final = ""


class QuotaEntity(NamedTuple):
    """What a quota applies to: a user, a client id, a user with a client id, or an IP address (KIP-546).

    A field that is None is not part of the entity. DEFAULT_ENTITY stands for all names that have no quota of
    their own.
    """

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    def __str__(self) -> str:
        """Return the entity as text, such as ``user alice, default client id``."""
        named = [(key.replace("_", " "), name) for key, name in self._asdict().items() if name is not None]
        return ", ".join(f"{kind} {name}" if name else f"default {kind}" for kind, name in named)


class Acks(enum.IntEnum):
    """The values ``0``, ``1`` and ``all`` of the option ``acks``: the acknowledgement to wait for."""

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
    """The address of one record, Topic-Partition-Offset: ``Purchases-1-456332``."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> RecordAddress:
        """Parse ``Purchases-1-456332``; the topic may contain hyphens. Raises ValueError."""
        parts = text.rsplit("-", 2)
        if len(parts) != 3 or not parts[0] or not (_is_decimal(parts[1]) and _is_decimal(parts[2])):
            raise ValueError(f"{text!r} is not Topic-Partition-Offset, for example Purchases-1-456332")
        return cls(parts[0], int(parts[1]), int(parts[2]))


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19


Headers = tuple[tuple[str, bytes | None], ...]
"""A record's headers: (name, value) in the order they were sent; a name may repeat."""

RecordHeaders = Sequence[tuple[str, str | bytes | None]]
"""Headers as producers accept them: text is sent as UTF-8."""


class Record(NamedTuple, Generic[K, V]):
    """One record as consumers receive it. Key and value are bytes or None, unless they are deserialized."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: K
    value: V
    headers: Headers

    @property
    def address(self) -> RecordAddress:
        return RecordAddress(self.topic, self.partition, self.offset)


class ProducerRecord(NamedTuple):
    """A record to send, with the arguments of send(): ``producer.send(ProducerRecord("orders", b"..."))``."""

    topic: str
    value: Any = None
    key: Any = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: RecordHeaders = ()


class RecordMetadata(NamedTuple):
    """The address and timestamp of a record that was sent.

    ``offset`` is NO_OFFSET (-1) with ``acks=0``, and in the call of an interceptor for a record that failed.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp_ms: int
    leader_epoch: int


class OffsetAndMetadata(NamedTuple):
    """A committed offset of a group in one partition (R40)."""

    offset: int  #: the next offset to read
    leader_epoch: int = NO_EPOCH  #: leader epoch of the last record read
    metadata: str | None = None  #: free text of the application


class GroupMetadata(NamedTuple):
    """The sender of an offset commit: a member with its epoch, or a client that is not a member.

    In the second case, ``member_id`` is empty and ``member_epoch`` is NO_EPOCH.
    """

    group_id: str
    member_id: str = ""
    member_epoch: int = NO_EPOCH
    instance_id: str | None = None


_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+")


#: The names that ``is_host_name`` accepts, for error messages.
HOST_WORDS: Final = "a valid host name: UTF-8 without spaces, and 1 to 63 characters between its dots"


def is_host_name(host: str) -> bool:
    """Whether a resolver accepts ``host``: a host name, or an IP address without brackets.

    The parts between dots have 1 to 63 characters, after their conversion to ASCII (RFC 1035, RFC 3490).
    """
    try:
        host.encode()  # fails for bytes that are not UTF-8, such as those of an argument of a command
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable() and " " not in host


def topic_name_problem(name: str) -> str | None:
    """Return the reason why ``name`` is not a valid topic name, or None if it is valid (S14).

    A valid name has 1 to 249 of the characters [a-zA-Z0-9._-], and is not ``.`` or ``..``.
    """
    if not name:
        return "a topic name must not be empty"
    if name in {".", ".."}:
        return f"a topic name must not be {name!r}"
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return f"a topic name has at most {MAX_TOPIC_NAME_LENGTH} characters, this one has {len(name)}"
    if _TOPIC_NAME.fullmatch(name) is None:
        return f"topic name {name!r} contains a character outside [a-zA-Z0-9._-]"
    return None
