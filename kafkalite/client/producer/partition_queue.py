"""The batches of one partition, waiting and in flight, in the order of its log. Pure.

An *in-flight batch* is sent as one record batch. When it is first sent, it gets a position among the
partition's in-flight batches and, from an idempotent producer, a *sequence number*. It keeps both, so that
every retry sends the same bytes and the leader recognises duplicates (KIP-98, KIP-360, R28). A queue has
one of these states::

    normal      batches are sent in order, up to the limit: first those to be resent, then new ones
    held        a batch failed: nothing is sent until all responses have arrived and the retry pause is over

A batch that has a sequence number and expired or failed for good is *abandoned*. It keeps its position,
because the leader refuses batches after a gap in the sequence. If a later batch is acknowledged, there is no
gap. Otherwise the partition continues in the next producer epoch.

A batch is *maybe written* after an attempt whose result is unknown. From then on it is never packed again,
only resent byte for byte. A batch that is certainly not written may be packed again under the next epoch. In
this case, later batches of the same epoch cannot be written either.

In a transaction, all partitions use the identity of the transaction: one epoch, and sequences from 0 in each
partition (R31). There is no next epoch, so a batch that is packed again reuses its unused sequence numbers.
After an abandoned batch, no new batch is sent, because such a transaction can only be aborted.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
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
from kafkalite.model import MAX_PRODUCER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.header import Codec, parse_header, stamp_producer
from kafkalite.records.single import NO_PRODUCER, build_single

#: Leaders remember this many batches of a producer, so they cannot detect duplicates of older ones.
MAX_IN_FLIGHT: Final = 5
SEQUENCES: Final = 2**31  #: sequence numbers count records and wrap around to 0

# While a batch is in flight, the next is sent only when this much waits, so that small batches are combined.
PIPELINED_BYTES: Final = 128 * 1024

#: After these errors the batch is certainly not in the log. After any other error it may be in the log.
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
    """The next step for an in-flight batch after an error."""

    RESEND = enum.auto()  #: resend the same bytes after a pause
    #: Resend the same bytes when the batches before it are done. This is not a failure of this batch.
    RESEND_IN_ORDER = enum.auto()
    REPACK = enum.auto()  #: pack its records again under the next producer epoch
    FAIL = enum.auto()  #: fail its records with the error


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A record batch that was sent or is sent next. It holds one pending batch or several coalesced ones.

    Invariant: ``producer`` does not change after the batch was first sent, so every attempt sends the same
    bytes.
    """

    queue: PartitionQueue
    batches: list[PendingBatch]
    size_bytes: int
    awaits_response: bool = False
    failures: int = 0
    collisions: int = 0  #: attempts refused because the previous transaction had not ended
    encoded: Encoded | None = None
    producer: tuple[int, int, int] = NO_PRODUCER  #: id, epoch, sequence of the first record
    has_position: bool = False  #: whether it has been sent at least once
    number: int = 0  #: how many batches of the queue were sent before it; valid once it has a position
    was_first: bool = False  #: all batches before it were decided when it was last sent
    maybe_written: bool = False  #: it has a sequence, and an attempt may have written it
    is_void: bool = False  #: certainly not written, and never to be written with its sequence
    is_abandoned: bool = False  #: failed for good, but keeps its position

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
        """Return the bytes of the record batch. They are built once, so that a retry sends the same bytes."""
        if self.encoded is None:
            transactional = self.queue.is_transactional
            if self.batches[0].prebuilt is None:
                self.encoded = _encode(self.batches, codec, level, self.producer, transactional)
            else:
                self.encoded = _stamped(self.batches[0], self.producer, transactional)
        return self.encoded


def _stamped(batch: PendingBatch, producer: tuple[int, int, int], transactional: bool) -> Encoded:
    """Return the prebuilt bytes with this producer id, epoch and sequence.

    If bytes that the user owns must be changed, they are copied first.
    """
    prebuilt = batch.prebuilt
    assert prebuilt is not None, "the batch is prebuilt"
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


@dataclass(slots=True, eq=False, repr=False)
class PartitionQueue:
    """The batches of one partition in log order: first ``in_flight``, then ``closed``, then ``open``.

    Invariants: each record is in only one of these three. With an idempotent producer, the sequences of
    in-flight batches, including abandoned ones, are consecutive up to ``next_sequence``, except for gaps
    where batches were acknowledged. Unless ``is_held``, batches that await a response precede those that must
    be resent, and no batch is sent for the first time while an abandoned batch is in flight.
    """

    tp: TopicPartition
    max_in_flight: int = 1
    open: PendingBatch | None = None
    closed: deque[PendingBatch] = field(default_factory=deque)
    #: Batches that were sent and are not decided, in the order of their sequences.
    in_flight: deque[InFlightBatch] = field(default_factory=deque)
    is_held: bool = False
    retry_at_ms: int = 0  #: when to resend; valid while held, if no response is outstanding
    node_id: int = -1  #: the node to which the in-flight batches were sent
    last_error: Exception | None = None  #: the error of the last attempt, if it failed
    #: False after the broker refused a coalesced batch as too large (the topic's max.message.bytes).
    coalesce: bool = True
    # The identity of the next batch. Each partition has its own epochs: leaders compare epochs by partition,
    # and no other producer has this producer id.
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
    next_sequence: int = NO_SEQUENCE
    sent_count: int = 0  #: batches that got a position
    needs_producer_id: bool = False  #: the current producer id cannot be used any more
    is_transactional: bool = False  #: the identity belongs to a transaction

    def __post_init__(self) -> None:
        assert 1 <= self.max_in_flight <= MAX_IN_FLIGHT, "leaders remember no more batches"

    @property
    def awaits_response(self) -> bool:
        return any(flight.awaits_response for flight in self.in_flight)

    @property
    def _has_abandoned(self) -> bool:
        return any(flight.is_abandoned for flight in self.in_flight)

    @property
    def _is_full(self) -> bool:
        """Whether a new batch must wait until the first in-flight batch is decided.

        Acknowledged batches after the first one count, too: if the first one is resent, the leader recognises
        the duplicate only among the last MAX_IN_FLIGHT batches (R28).
        """
        return self.sent_count - self.in_flight[0].number >= self.max_in_flight

    @property
    def must_resolve(self) -> bool:
        """Whether all responses have arrived and ``resolve`` must be called before another batch is sent."""
        if self.awaits_response:
            return False
        return self.is_held or (
            bool(self.in_flight) and all(flight.is_abandoned for flight in self.in_flight)
        )

    def may_send(self, now_ms: int) -> bool:
        """Whether there is a batch that order, linger and pauses permit to be sent now. The caller must also
        check the leader and the producer id."""
        if self.in_flight:
            if self.is_held:
                return False
            if self.next_resend() is not None:
                return True
            if self._is_full or not self._has_full_batch():
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
        """Return the first in-flight batch that must be resent, or None."""
        for flight in self.in_flight:
            if not flight.awaits_response and not flight.is_abandoned:
                return flight
        return None

    def assign_producer_id(self, producer_id: int) -> None:
        """Continue with a newly allocated producer id, from epoch 0 and sequence 0."""
        assert not self.in_flight, "batches that were sent keep their identity"
        assert producer_id != self.producer_id, "the same id would reuse sequence numbers"
        self.producer_id, self.producer_epoch, self.next_sequence = producer_id, 0, 0
        self.needs_producer_id = False

    def join_transaction(self, producer_id: int, producer_epoch: int) -> None:
        """Continue with the identity of a transaction, from sequence 0."""
        assert not self.in_flight and self.producer_id == NO_PRODUCER_ID, "the previous transaction has ended"
        self.producer_id, self.producer_epoch, self.next_sequence = producer_id, producer_epoch, 0
        self.is_transactional = True

    def leave_transaction(self) -> None:
        """Drop the transaction's identity and all in-flight batches, whose responses will be ignored.

        Leaders refuse late batches, because their epoch ends with the transaction (R31).
        """
        for flight in self.in_flight:
            flight.awaits_response = False
        self.in_flight.clear()
        self.is_held = self.needs_producer_id = self.is_transactional = False
        self.producer_id, self.producer_epoch = NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        self.next_sequence = NO_SEQUENCE

    def mark_sent(self, flight: InFlightBatch, node_id: int) -> None:
        """Record that ``flight`` is sent now, for the first time or as a retry."""
        assert not (self.is_held or flight.awaits_response or flight.is_abandoned), "it may not be sent now"
        if not flight.has_position:
            if self.producer_id != NO_PRODUCER_ID:
                assert not self.needs_producer_id, "assign_producer_id() first"
                flight.producer = (self.producer_id, self.producer_epoch, self.next_sequence)
                self.next_sequence = flight.next_sequence
            flight.has_position = True
            flight.number = self.sent_count
            self.sent_count += 1
            self.in_flight.append(flight)
        flight.was_first = self._is_first(flight)
        flight.awaits_response = True
        self.node_id = node_id

    def _is_first(self, flight: InFlightBatch) -> bool:
        """Whether only abandoned batches precede ``flight``."""
        for before in self.in_flight:
            if before is flight:
                return True
            if not before.is_abandoned:
                return False
        return False

    # --- responses -----------------------------------------------------------------------------

    def acknowledge(self, flight: InFlightBatch) -> None:
        """Remove an acknowledged batch, and the abandoned batches before it, which have left no gap."""
        flight.awaits_response = False
        in_flight = self.in_flight
        if in_flight[0] is flight:
            in_flight.popleft()
            return
        flights, position = list(in_flight), in_flight.index(flight)
        in_flight.clear()
        in_flight.extend(before for before in flights[:position] if not before.is_abandoned)
        in_flight.extend(flights[position + 1 :])

    def judge(self, flight: InFlightBatch, error: Exception, retries: int, *, was_sent: bool) -> Fate:
        """Return the next step for a batch after ``error``, and hold the partition's in-flight batches.

        ``retries`` is the option of that name. ``was_sent`` is False if the batch was not written to a
        connection.
        """
        flight.awaits_response = False
        self.is_held = True
        is_certain = not was_sent or (isinstance(error, BrokerError) and error.code in _NOT_WRITTEN)
        if flight.is_sequenced and not is_certain:
            flight.maybe_written = True
        fate = self._fate(flight, error, retries)
        if fate is Fate.REPACK or (fate is Fate.FAIL and not flight.maybe_written):
            assert not flight.maybe_written, "a batch that may be written is never packed again"
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
                self.coalesce = False  # only coalescing made the batch too large: stop coalescing
                return Fate.REPACK
            return Fate.FAIL
        if not is_retriable(error):
            return Fate.FAIL
        if isinstance(error, ConcurrentTransactionsError):
            flight.collisions += 1  # the condition ends without a change of the batch
            return Fate.RESEND
        flight.failures += 1
        return Fate.RESEND if flight.failures <= retries else Fate.FAIL

    def _fate_of_gap(self, flight: InFlightBatch, error: Exception) -> Fate:
        """Return the next step for a batch that was refused because the leader lacks preceding records."""
        if not flight.was_first:
            # The batches before it were undecided when it was sent. Resend it after them.
            return Fate.RESEND_IN_ORDER
        if self.is_transactional:
            return Fate.FAIL  # leaders keep the records of an open transaction (R29), so records were lost
        if flight.maybe_written or flight.producer[2] <= 0:
            return Fate.FAIL  # it may be written, so packing it again could duplicate it
        if self.in_flight[0] is not flight:
            return Fate.REPACK  # the leader lacks an abandoned batch
        # All batches before it were acknowledged. Retention may have removed them; a loss must be reported.
        return Fate.REPACK if isinstance(error, UnknownProducerIdError) else Fate.FAIL

    def abandon(self, flight: InFlightBatch) -> None:
        """Mark ``flight``, whose records have all failed, as abandoned. Remove it if it has no sequence."""
        assert not flight.awaits_response and flight.all_done, "its response may still arrive"
        self.is_held = True
        if flight.is_sequenced:
            flight.is_abandoned = True
            flight.is_void = flight.is_void or not flight.maybe_written
            flight.encoded = None
        else:
            self.in_flight.remove(flight)

    def resolve(self) -> bool:
        """After all responses have arrived, decide whether to resend batches or to pack them again.

        If the sequence has a gap and no later batch can have been written, the next epoch starts. In a
        transaction, the epoch stays, and numbering restarts at the first unused sequence. Returns True if
        in-flight batches must be resent. Then the queue stays held.
        """
        assert self.must_resolve, "responses are outstanding"
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
