"""What waits for one partition, and what is on its way there, in the order the log shall have it. Pure.

A *shipment* is what travels as one record batch. When it leaves for the first time it gets a place in the
partition's *window* and, from an idempotent producer, a *sequence*: it keeps both for life, so that every
retry sends the same bytes, and the leader can tell a repetition from news (KIP-98, KIP-360, R28)::

    flowing     all of the window is in flight, in order; new shipments may join while there is room
    held        one came back with an error: nothing leaves until all the others are back too, then the
                whole window goes again, in order
    given up    expired, or refused for good: it stays in the window as a *tombstone*, because the leader
                will refuse what follows a hole in the sequence. An acknowledgement of a later one shows
                that there is no hole; else the partition starts anew in the next producer epoch

A shipment is *in doubt* once an attempt ended without a certain "not written". What is in doubt is only ever
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
MAX_WINDOW: Final = 5
SEQUENCES: Final = 2**31  #: they count records and wrap to 0

# While a shipment is in flight, the next leaves only with this much in it: what waits travels together.
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
    """What becomes of a shipment that came back with an error."""

    AGAIN = enum.auto()  #: the same bytes, after a pause
    NEXT = enum.auto()  #: the same bytes, as soon as what is before it is done; no failure of its own
    ANEW = enum.auto()  #: its batches, packed anew under the next producer epoch
    FAILED = enum.auto()  #: its batches fail with the error


@dataclass(slots=True, eq=False)
class Shipment:
    """What travels as one record batch: one pending batch or several coalesced ones, in order.

    Invariant: once ``producer`` has a sequence, ``encoded`` never changes.
    """

    queue: PartitionQueue
    batches: list[PendingBatch]
    size_bytes: int
    in_flight: bool = False
    failures: int = 0
    collisions: int = 0  #: how often the transaction before this one was still being ended
    encoded: Encoded | None = None
    producer: tuple[int, int, int] = NO_PRODUCER  #: id, epoch, sequence of the first record
    has_place: bool = False  #: it has left once
    was_first: bool = False  #: on its last departure nothing before it was undecided
    in_doubt: bool = False  #: it has a sequence, and an attempt may have written it
    is_void: bool = False  #: certainly not written, and never to be under its sequence
    given_up: bool = False  #: a tombstone

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
        "held",
        "is_transactional",
        "needs_producer_id",
        "next_sequence",
        "node_id",
        "open",
        "producer_epoch",
        "producer_id",
        "retry_at_ms",
        "tp",
        "window",
        "window_size",
    )

    def __init__(self, tp: TopicPartition, window_size: int = 1) -> None:
        assert 1 <= window_size <= MAX_WINDOW, "a leader remembers no more"
        self.tp = tp
        self.open: PendingBatch | None = None
        self.closed: deque[PendingBatch] = deque()
        #: Shipments that have left and are not decided, in the order of their sequences.
        self.window: deque[Shipment] = deque()
        self.window_size = window_size
        self.held = False
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
    def is_empty(self) -> bool:
        return not self.window and not self.closed and self.open is None

    @property
    def any_in_flight(self) -> bool:
        return any(shipment.in_flight for shipment in self.window)

    @property
    def _has_tombstones(self) -> bool:
        return any(shipment.given_up for shipment in self.window)

    @property
    def is_back(self) -> bool:
        """Whether nothing is in flight, and something must be decided before anything else leaves."""
        if self.any_in_flight:
            return False
        return self.held or (bool(self.window) and all(shipment.given_up for shipment in self.window))

    def may_send(self, now_ms: int) -> bool:
        """Whether something may leave now, as far as this side knows."""
        if self.window:
            if self.held:
                return False
            if self.next_again() is not None:
                return True
            if len(self.window) >= self.window_size or not self._fills_a_shipment():
                return False
            if self._has_tombstones or self.needs_producer_id:
                return False
        return bool(self.closed) or (self.open is not None and self.open.linger_until_ms <= now_ms)

    def _fills_a_shipment(self) -> bool:
        size_bytes = 0
        for batch in self.closed:
            size_bytes += batch.size_bytes
            if size_bytes >= PIPELINED_BYTES or batch.prebuilt is not None:
                return True
        return False

    def next_again(self) -> Shipment | None:
        """The first shipment of the window that has to leave again."""
        for shipment in self.window:
            if not shipment.in_flight and not shipment.given_up:
                return shipment
        return None

    def adopt(self, producer_id: int) -> None:
        """Go on under a producer id of this producer's own, from its first epoch and sequence."""
        assert not self.window, "what has left keeps its identity"
        assert producer_id != self.producer_id, "the same would begin again at a sequence it has used"
        self.producer_id, self.producer_epoch, self.next_sequence = producer_id, 0, 0
        self.needs_producer_id = False

    def join_transaction(self, producer_id: int, producer_epoch: int) -> None:
        """Go on under a transaction's identity, from its first sequence."""
        assert not self.window and self.producer_id == NO_PRODUCER_ID, "the transaction before has ended"
        self.producer_id, self.producer_epoch, self.next_sequence = producer_id, producer_epoch, 0
        self.is_transactional = True

    def leave_transaction(self) -> None:
        """Forget its identity, and what was on its way under it: those answers mean nothing any more.

        Late batches can do no harm: their epoch ends with the transaction (R31).
        """
        for shipment in self.window:
            shipment.in_flight = False
        self.window.clear()
        self.held = self.needs_producer_id = self.is_transactional = False
        self.producer_id, self.producer_epoch = NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        self.next_sequence = NO_SEQUENCE

    def depart(self, shipment: Shipment, node_id: int) -> None:
        """``shipment`` leaves now, for the first time or again."""
        assert not (self.held or shipment.in_flight or shipment.given_up), "not in line"
        if not shipment.has_place:
            if self.producer_id != NO_PRODUCER_ID:
                assert not self.needs_producer_id, "adopt() first"
                shipment.producer = (self.producer_id, self.producer_epoch, self.next_sequence)
                self.next_sequence = shipment.next_sequence
            shipment.has_place = True
            self.window.append(shipment)
        shipment.was_first = self._is_first(shipment)
        shipment.in_flight = True
        self.node_id = node_id

    def _is_first(self, shipment: Shipment) -> bool:
        """Whether only tombstones stand before it."""
        for before in self.window:
            if before is shipment:
                return True
            if not before.given_up:
                return False
        return False

    # --- what came back ------------------------------------------------------------------------

    def acknowledge(self, shipment: Shipment) -> None:
        """It is in the log, and so is all that has a lower sequence: tombstones before it are resolved."""
        shipment.in_flight = False
        window = self.window
        if window[0] is shipment:
            window.popleft()
            return
        position = window.index(shipment)
        kept = [before for index, before in enumerate(window) if index < position and not before.given_up]
        after = list(window)[position + 1 :]
        window.clear()
        window.extend(kept)
        window.extend(after)

    def judge(self, shipment: Shipment, error: Exception, retries: int, *, has_left: bool) -> Fate:
        """What becomes of a shipment that is back with ``error``; the window is held from here.

        ``has_left`` is False when it was not even written to a connection.
        """
        shipment.in_flight = False
        self.held = True
        is_certain = not has_left or (isinstance(error, BrokerError) and error.code in _NOT_WRITTEN)
        if shipment.is_sequenced and not is_certain:
            shipment.in_doubt = True
        fate = self._fate(shipment, error, retries)
        if fate is Fate.ANEW or (fate is Fate.FAILED and not shipment.in_doubt):
            assert not shipment.in_doubt, "what may be written is never packed anew"
            shipment.is_void = True
        return fate

    def _fate(self, shipment: Shipment, error: Exception, retries: int) -> Fate:
        if isinstance(error, OutOfOrderSequenceNumberError | UnknownProducerIdError):
            return self._fate_of_gap(shipment, error)
        if isinstance(error, InvalidProducerEpochError):
            self.needs_producer_id = True
            return Fate.FAILED
        if isinstance(error, MessageTooLargeError) and not shipment.in_doubt:
            if sum(not batch.done for batch in shipment.batches) > 1:
                self.coalesce = False  # coalescing was ours, not the user's: undo it, from now on
                return Fate.ANEW
            return Fate.FAILED
        if not is_retriable(error):
            return Fate.FAILED
        if isinstance(error, ConcurrentTransactionsError):
            shipment.collisions += 1  # it passes by itself
            return Fate.AGAIN
        shipment.failures += 1
        return Fate.AGAIN if shipment.failures <= retries else Fate.FAILED

    def _fate_of_gap(self, shipment: Shipment, error: Exception) -> Fate:
        """The leader misses what is before this one."""
        if not shipment.was_first:
            return Fate.NEXT  # what is before it was undecided when it left; it comes after that
        if self.is_transactional:
            return Fate.FAILED  # nothing of an open transaction is ever forgotten (R29): it was lost
        if shipment.in_doubt or shipment.producer[2] <= 0:
            return Fate.FAILED  # maybe written, maybe lost: packed anew it could be there twice
        if self.window[0] is not shipment:
            return Fate.ANEW  # it misses what was given up
        # All before it was acknowledged. What retention has forgotten does no harm; a loss must be told.
        return Fate.ANEW if isinstance(error, UnknownProducerIdError) else Fate.FAILED

    def give_up(self, shipment: Shipment) -> None:
        """All of it has failed: it leaves a tombstone if it had a sequence."""
        assert not shipment.in_flight and shipment.all_done, "its outcome may still come"
        self.held = True
        if shipment.is_sequenced:
            shipment.given_up = True
            shipment.is_void = shipment.is_void or not shipment.in_doubt
            shipment.encoded = None
        else:
            self.window.remove(shipment)

    def settle(self) -> bool:
        """Everything is back. Starts the next epoch if there is a hole and nothing behind it in doubt.

        In a transaction, goes back to the sequence of what is packed anew instead.
        Returns whether part of the window has to leave again under its sequence; then it is still held.
        """
        assert self.is_back, "the others are not back yet"
        self.held = True
        is_void = False
        for shipment in self.window:
            is_void = shipment.is_void = is_void or shipment.is_void
            shipment.in_doubt = shipment.in_doubt and not is_void
        live = [shipment for shipment in self.window if not shipment.given_up]
        has_hole = is_void or len(live) < len(self.window) or self.needs_producer_id
        if live and (not has_hole or any(shipment.in_doubt for shipment in live)):
            return True
        for shipment in reversed(live):
            self.closed.extendleft(batch for batch in reversed(shipment.batches) if not batch.done)
        first_sequence = self.window[0].producer[2] if self.window else NO_SEQUENCE
        is_whole = len(live) == len(self.window)
        self.window.clear()
        self.held = False
        if has_hole and self.is_transactional:
            self.needs_producer_id = self.needs_producer_id or not is_whole
            self.next_sequence = first_sequence
        elif has_hole and self.producer_id != NO_PRODUCER_ID:
            self.producer_epoch += 1
            self.next_sequence = 0
            self.needs_producer_id = self.needs_producer_id or self.producer_epoch > MAX_PRODUCER_EPOCH
        return False

    def check(self) -> None:
        """Assert the invariants; for tests, which call it after every step."""
        sequence = None
        for shipment in self.window:
            assert shipment.has_place and not (shipment.given_up and shipment.in_flight)
            if shipment.is_sequenced:
                assert shipment.producer[:2] == (self.producer_id, self.producer_epoch)
                assert _follows(sequence, shipment.producer[2]), "out of order"
                sequence = shipment.next_sequence
        assert _follows(sequence, self.next_sequence), "a sequence would be used twice"
        assert len(self.window) <= self.window_size
        if not self.held:
            flights = [shipment.in_flight for shipment in self.window if not shipment.given_up]
            assert flights == sorted(flights, reverse=True), "something overtook what is before it"


def _follows(end: int | None, sequence: int) -> bool:
    """Whether ``sequence`` is at or after ``end``, on the circle."""
    return end is None or (sequence - end) % SEQUENCES < SEQUENCES // 2
