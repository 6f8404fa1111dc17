"""What waits for one partition, and what is on its way there, in the order the log shall have it. Pure.

A *flight* is what travels as one record batch. When it leaves for the first time it gets a place in the
partition's *window* and, from an idempotent producer, a *sequence*: it keeps both for life, so that every
retry sends the same bytes, and the leader can tell a repetition from news (KIP-98, KIP-360, R28)::

    flowing     all of the window is in flight, in order; new flights may join while there is room
    held        one came back with an error: nothing leaves until all the others are back too, then the
                whole window goes again, in order
    given up    expired, or refused for good: it stays in the window as a *tombstone*, because the leader
                will refuse what follows a hole in the sequence. An acknowledgement of a later one shows
                that there is no hole; else the partition starts anew in the next producer epoch

A flight is *in doubt* once an attempt ended without a certain "not written". What is in doubt is only ever
sent again byte for byte. What is certainly not written may be packed anew under the next epoch; and behind
something that is not written nothing of the same epoch can be.

In a transaction the identity is the transaction's: one epoch and sequences from 0 in each partition (R31).
There is no next epoch of the partition's own. What is packed anew takes the sequences that it had, which
nobody has used; behind a tombstone nothing leaves any more, for such a transaction can only be aborted.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kafkalite.client.cluster.retry import is_retriable
from kafkalite.client.producer.pending_batch import Encoded, PendingBatch
from kafkalite.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    ErrorCode,
    InvalidProducerEpochError,
    MessageTooLargeError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)
from kafkalite.model import (
    MAX_PRODUCER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TopicPartition,
)
from kafkalite.records.builder import build_batch
from kafkalite.records.header import Codec, parse_header, stamp_producer
from kafkalite.records.single import NO_PRODUCER, build_single

#: As many batches of a producer as a leader remembers: of a longer window it could not tell repetitions.
MAX_IN_FLIGHT: Final = 5
SEQUENCES: Final = 2**31  #: they count records and wrap to 0

# While a flight is in flight, the next leaves only with this much in it: what waits travels together.
PIPELINED_BYTES: Final = 128 * 1024

#: After these the attempt has certainly left nothing in the log. After any other error it may have.
_NOT_WRITTEN: Final = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUIRED_ACKS,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)


class Fate(enum.Enum):
    """What becomes of a flight that came back with an error."""

    RESEND = enum.auto()  #: the same bytes, after a pause
    RESEND_IN_ORDER = (
        enum.auto()
    )  #: the same bytes, as soon as what is before it is done; no failure of its own
    REPACK = enum.auto()  #: its batches, packed anew under the next producer epoch
    FAIL = enum.auto()  #: its batches fail with the error


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """What travels as one record batch: one pending batch or several coalesced ones, in order.

    Invariant: once ``producer`` has a sequence, ``encoded`` never changes.
    """

    queue: PartitionQueue
    batches: list[PendingBatch]
    size_bytes: int
    awaits_response: bool = False
    failures: int = 0
    collisions: int = 0  #: how often the transaction before this one was still being ended
    encoded: Encoded | None = None
    producer: tuple[int, int, int] = NO_PRODUCER  #: id, epoch, sequence of the first record
    has_position: bool = False  #: it has left once
    was_first: bool = False  #: on its last departure nothing before it was undecided
    maybe_written: bool = False  #: it has a sequence, and an attempt may have written it
    is_void: bool = False  #: certainly not written, and never to be under its sequence
    is_abandoned: bool = False  #: a tombstone

    @property
    def record_count(self) -> int:
        return sum(batch.record_count for batch in self.batches)

    @property
    def is_sequenced(self) -> bool:
        return self.producer[0] != NO_PRODUCER_ID

    @property
    def next_sequence(self) -> int:
        return (self.producer[2] + self.record_count) % SEQUENCES

    @property
    def all_done(self) -> bool:
        return all(batch.done for batch in self.batches)

    def encode(self, codec: Codec, level: int | None) -> Encoded:
        """The record batch's bytes; built once, so that a retry sends the same."""
        if self.encoded is None:
            transactional = self.queue.is_transactional
            if self.batches[0].prebuilt is None:
                self.encoded = _encode(self.batches, codec, level, self.producer, transactional)
            else:
                self.encoded = _stamped(self.batches[0], self.producer, transactional)
        return self.encoded


def _stamped(batch: PendingBatch, producer: tuple[int, int, int], transactional: bool) -> Encoded:
    """The prebuilt bytes with this producer's identity in them; the user's own buffer is left alone."""
    prebuilt = batch.prebuilt
    assert prebuilt is not None, "there is something to stamp"
    if producer == NO_PRODUCER and (
        batch.owns_prebuilt or parse_header(prebuilt).producer_id == NO_PRODUCER_ID
    ):
        return prebuilt
    own = prebuilt if batch.owns_prebuilt and isinstance(prebuilt, bytearray) else bytearray(prebuilt)
    stamp_producer(own, *producer, transactional=transactional)
    return own


def _encode(
    batches: list[PendingBatch],
    codec: Codec,
    level: int | None,
    producer: tuple[int, int, int],
    transactional: bool,
) -> bytes | bytearray:
    if len(batches) == 1:
        batch = batches[0]
        if batch.record_count == 1 and batch.is_plain and codec is Codec.NONE and batch.timestamps[0] >= 0:
            value = batch.values[0]
            if value is not None:
                key = batch.keys[0] if batch.keys else None
                return build_single(value, key, batch.timestamps[0], producer, transactional)
        values, keys, timestamps, headers = batch.values, batch.keys, batch.timestamps, batch.headers
    else:
        values = list(chain.from_iterable(batch.values for batch in batches))
        timestamps = list(chain.from_iterable(batch.timestamps for batch in batches))
        keys = headers = None
        if any(batch.keys is not None for batch in batches):
            keys = list(chain.from_iterable(batch.keys or [None] * len(batch.values) for batch in batches))
        if any(batch.headers is not None for batch in batches):
            headers = list(
                chain.from_iterable(batch.headers or [()] * len(batch.values) for batch in batches)
            )
    producer_id, producer_epoch, base_sequence = producer
    return build_batch(
        values,
        keys,
        timestamps,
        headers,
        codec=codec,
        level=level,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
    )


class PartitionQueue:
    """Invariants: ``window`` is before ``closed``, which is before ``open``; no record is in two of them.

    Of an idempotent producer: the sequences of the window follow each other, tombstones included, up to
    ``next_sequence``; what is missing between was acknowledged. Unless ``held``, what is in flight goes
    before what is not (tombstones aside), and nothing new joins a window with tombstones.
    """

    __slots__ = (
        "closed",
        "coalesce",
        "in_flight",
        "is_held",
        "is_transactional",
        "max_in_flight",
        "needs_producer_id",
        "next_sequence",
        "node_id",
        "open",
        "producer_epoch",
        "producer_id",
        "retry_at_ms",
        "tp",
    )

    def __init__(self, tp: TopicPartition, max_in_flight: int = 1) -> None:
        assert 1 <= max_in_flight <= MAX_IN_FLIGHT, "a leader remembers no more"
        self.tp = tp
        self.open: PendingBatch | None = None
        self.closed: deque[PendingBatch] = deque()
        #: Shipments that have left and are not decided, in the order of their sequences.
        self.in_flight: deque[InFlightBatch] = deque()
        self.max_in_flight = max_in_flight
        self.is_held = False
        self.retry_at_ms = 0  #: while held and nothing is in flight
        self.node_id = -1  #: where what is in flight went
        #: False once the broker found a coalesced batch too large (max.message.bytes of the topic).
        self.coalesce = True
        # The identity of what leaves next. Each partition counts its epochs by itself: leaders compare them
        # by partition, and nobody else has this producer id.
        self.producer_id = NO_PRODUCER_ID
        self.producer_epoch = NO_PRODUCER_EPOCH
        self.next_sequence = NO_SEQUENCE
        self.needs_producer_id = False  #: the one it has is of no use any more
        self.is_transactional = False  #: the identity is that of a transaction

    @property
    def awaits_response(self) -> bool:
        return any(flight.awaits_response for flight in self.in_flight)

    @property
    def _has_abandoned(self) -> bool:
        return any(flight.is_abandoned for flight in self.in_flight)

    @property
    def must_resolve(self) -> bool:
        """Whether nothing is in flight, and something must be decided before anything else leaves."""
        if self.awaits_response:
            return False
        return self.is_held or (
            bool(self.in_flight) and all(flight.is_abandoned for flight in self.in_flight)
        )

    def may_send(self, now_ms: int) -> bool:
        """Whether something may leave now, as far as this side knows."""
        if self.in_flight:
            if self.is_held:
                return False
            if self.next_resend() is not None:
                return True
            if len(self.in_flight) >= self.max_in_flight or not self._has_full_batch():
                return False
            if self._has_abandoned or self.needs_producer_id:
                return False
        return bool(self.closed) or (self.open is not None and self.open.linger_until_ms <= now_ms)

    def _has_full_batch(self) -> bool:
        size_bytes = 0
        for batch in self.closed:
            size_bytes += batch.size_bytes
            if size_bytes >= PIPELINED_BYTES or batch.prebuilt is not None:
                return True
        return False

    def next_resend(self) -> InFlightBatch | None:
        """The first flight of the window that has to leave again."""
        for flight in self.in_flight:
            if not flight.awaits_response and not flight.is_abandoned:
                return flight
        return None

    def assign_producer_id(self, producer_id: int) -> None:
        """Go on under a producer id of this producer's own, from its first epoch and sequence."""
        assert not self.in_flight, "what has left keeps its identity"
        assert producer_id != self.producer_id, "the same would begin again at a sequence it has used"
        self.producer_id, self.producer_epoch, self.next_sequence = producer_id, 0, 0
        self.needs_producer_id = False

    def join_transaction(self, producer_id: int, producer_epoch: int) -> None:
        """Go on under a transaction's identity, from its first sequence."""
        assert not self.in_flight and self.producer_id == NO_PRODUCER_ID, "the transaction before has ended"
        self.producer_id, self.producer_epoch, self.next_sequence = producer_id, producer_epoch, 0
        self.is_transactional = True

    def leave_transaction(self) -> None:
        """Forget its identity, and what was on its way under it: those answers mean nothing any more.

        Late batches can do no harm: their epoch ends with the transaction (R31).
        """
        for flight in self.in_flight:
            flight.awaits_response = False
        self.in_flight.clear()
        self.is_held = self.needs_producer_id = self.is_transactional = False
        self.producer_id, self.producer_epoch = NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        self.next_sequence = NO_SEQUENCE

    def mark_sent(self, flight: InFlightBatch, node_id: int) -> None:
        """``flight`` leaves now, for the first time or again."""
        assert not (self.is_held or flight.awaits_response or flight.is_abandoned), "not in line"
        if not flight.has_position:
            if self.producer_id != NO_PRODUCER_ID:
                assert not self.needs_producer_id, "assign_producer_id() first"
                flight.producer = (self.producer_id, self.producer_epoch, self.next_sequence)
                self.next_sequence = flight.next_sequence
            flight.has_position = True
            self.in_flight.append(flight)
        flight.was_first = self._is_first(flight)
        flight.awaits_response = True
        self.node_id = node_id

    def _is_first(self, flight: InFlightBatch) -> bool:
        """Whether only tombstones stand before it."""
        for before in self.in_flight:
            if before is flight:
                return True
            if not before.is_abandoned:
                return False
        return False

    # --- what came back ------------------------------------------------------------------------

    def acknowledge(self, flight: InFlightBatch) -> None:
        """It is in the log, and so is all that has a lower sequence: tombstones before it are resolved."""
        flight.awaits_response = False
        in_flight = self.in_flight
        if in_flight[0] is flight:
            in_flight.popleft()
            return
        position = in_flight.index(flight)
        kept = [
            before for index, before in enumerate(in_flight) if index < position and not before.is_abandoned
        ]
        after = list(in_flight)[position + 1 :]
        in_flight.clear()
        in_flight.extend(kept)
        in_flight.extend(after)

    def judge(self, flight: InFlightBatch, error: Exception, retries: int, *, was_sent: bool) -> Fate:
        """What becomes of a flight that is back with ``error``; the window is held from here.

        ``was_sent`` is False when it was not even written to a connection.
        """
        flight.awaits_response = False
        self.is_held = True
        is_certain = not was_sent or (isinstance(error, BrokerError) and error.code in _NOT_WRITTEN)
        if flight.is_sequenced and not is_certain:
            flight.maybe_written = True
        fate = self._fate(flight, error, retries)
        if fate is Fate.REPACK or (fate is Fate.FAIL and not flight.maybe_written):
            assert not flight.maybe_written, "what may be written is never packed anew"
            flight.is_void = True
        return fate

    def _fate(self, flight: InFlightBatch, error: Exception, retries: int) -> Fate:
        if isinstance(error, OutOfOrderSequenceNumberError | UnknownProducerIdError):
            return self._fate_of_gap(flight, error)
        if isinstance(error, InvalidProducerEpochError):
            self.needs_producer_id = True
            return Fate.FAIL
        if isinstance(error, MessageTooLargeError) and not flight.maybe_written:
            if sum(not batch.done for batch in flight.batches) > 1:
                self.coalesce = False  # coalescing was ours, not the user's: undo it, from now on
                return Fate.REPACK
            return Fate.FAIL
        if not is_retriable(error):
            return Fate.FAIL
        if isinstance(error, ConcurrentTransactionsError):
            flight.collisions += 1  # it passes by itself
            return Fate.RESEND
        flight.failures += 1
        return Fate.RESEND if flight.failures <= retries else Fate.FAIL

    def _fate_of_gap(self, flight: InFlightBatch, error: Exception) -> Fate:
        """The leader misses what is before this one."""
        if not flight.was_first:
            return Fate.RESEND_IN_ORDER  # what is before it was undecided when it left; it comes after that
        if self.is_transactional:
            return Fate.FAIL  # nothing of an open transaction is ever forgotten (R29): it was lost
        if flight.maybe_written or flight.producer[2] <= 0:
            return Fate.FAIL  # maybe written, maybe lost: packed anew it could be there twice
        if self.in_flight[0] is not flight:
            return Fate.REPACK  # it misses what was given up
        # All before it was acknowledged. What retention has forgotten does no harm; a loss must be told.
        return Fate.REPACK if isinstance(error, UnknownProducerIdError) else Fate.FAIL

    def abandon(self, flight: InFlightBatch) -> None:
        """All of it has failed: it leaves a tombstone if it had a sequence."""
        assert not flight.awaits_response and flight.all_done, "its outcome may still come"
        self.is_held = True
        if flight.is_sequenced:
            flight.is_abandoned = True
            flight.is_void = flight.is_void or not flight.maybe_written
            flight.encoded = None
        else:
            self.in_flight.remove(flight)

    def resolve(self) -> bool:
        """Everything is back. Starts the next epoch if there is a hole and nothing behind it in doubt.

        In a transaction, goes back to the sequence of what is packed anew instead.
        Returns whether part of the window has to leave again under its sequence; then it is still held.
        """
        assert self.must_resolve, "the others are not back yet"
        self.is_held = True
        is_void = False
        for flight in self.in_flight:
            is_void = flight.is_void = is_void or flight.is_void
            flight.maybe_written = flight.maybe_written and not is_void
        live = [flight for flight in self.in_flight if not flight.is_abandoned]
        has_hole = is_void or len(live) < len(self.in_flight) or self.needs_producer_id
        if live and (not has_hole or any(flight.maybe_written for flight in live)):
            return True
        for flight in reversed(live):
            self.closed.extendleft(batch for batch in reversed(flight.batches) if not batch.done)
        first_sequence = self.in_flight[0].producer[2] if self.in_flight else NO_SEQUENCE
        is_whole = len(live) == len(self.in_flight)
        self.in_flight.clear()
        self.is_held = False
        if has_hole and self.is_transactional:
            self.needs_producer_id = self.needs_producer_id or not is_whole
            self.next_sequence = first_sequence
        elif has_hole and self.producer_id != NO_PRODUCER_ID:
            self.producer_epoch += 1
            self.next_sequence = 0
            self.needs_producer_id = self.needs_producer_id or self.producer_epoch > MAX_PRODUCER_EPOCH
        return False
