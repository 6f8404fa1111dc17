"""Types shared by the coordinators of groups and of transactions.

A coordinator is a state machine whose state is replayed from one partition of an internal topic. ``decide``
reads the state and returns records and a reply, without changing the state. The broker appends the records as
one batch, replays them at once, and notes the log end offset. It sends the reply, even to a read, when the
log is committed up to that offset. So no reply shows state that may still be lost (R36, R39, R40).
"""

# Tests: tests/groups/test_machine.py, tests/transactions/test_machine.py

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kafkalite.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID


class Instant(NamedTuple):
    """A point in time on both clocks: the monotonic one for timeouts, the wall clock for timestamps."""

    monotonic_ms: int
    wall_ms: int


class StateRecord(NamedTuple):
    """One record of an internal topic. A ``value`` of None deletes the key (a tombstone)."""

    key: bytes
    value: bytes | None


class Caller(NamedTuple):
    """The sender of a request. Descriptions of groups show its ``client_id`` and ``host``."""

    client_id: str
    host: str
    connection: int = 0  #: increases with each connection that the broker accepts (R56); 0: unknown


class TopicShape(NamedTuple):
    """The id and the partition count of a topic."""

    topic_id: str
    partition_count: int


Topics = Mapping[str, TopicShape]
"""All topics by name. Every change of a topic gives a new mapping object, so ``is`` detects changes."""


class Decision(NamedTuple):
    """The records to append for a request, and the reply to send when they are committed.

    ``records`` become one batch, so either all or none are appended. If ``producer_id`` is set, the batch is
    part of that producer's transaction, and its records take effect when the transaction is committed.
    """

    records: tuple[StateRecord, ...] = ()
    reply: Any = None  #: a response struct; None if there is no request (``tick``)
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
