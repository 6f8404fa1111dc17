"""What the coordinators of groups and of transactions have in common: values in, a decision out.

A coordinator is a machine on the records of one partition of an internal topic. ``decide`` looks at its
state and returns records and a reply, and changes nothing. The broker appends the records as one batch,
replays them at once, and releases the reply when everything that the log held at that moment is committed:
so also an answer that only read never tells what may yet vanish (R36, R39, R40).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kafkalite.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID


class Instant(NamedTuple):
    """One moment by both clocks: sessions and time-outs are measured, what is written down is dated."""

    monotonic_ms: int
    wall_ms: int


class StateRecord(NamedTuple):
    """One record of an internal topic. A ``value`` of None removes the key (a tombstone)."""

    key: bytes
    value: bytes | None


class Caller(NamedTuple):
    """Who asks, as far as a coordinator cares: for descriptions, never for decisions."""

    client_id: str
    host: str


class TopicShape(NamedTuple):
    """What a coordinator needs to know of a topic."""

    topic_id: str
    partition_count: int


class Decision(NamedTuple):
    """What is to be made durable, and what is to be answered then.

    ``records`` become one batch: all of them, or none. With a ``producer_id`` the batch is part of that
    producer's transaction: its records take effect when the transaction is committed.
    """

    records: tuple[StateRecord, ...] = ()
    reply: Any = None  #: a response struct; None where nobody waits (``tick``)
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
