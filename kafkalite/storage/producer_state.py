"""The state of a log's producers: the last five batches of each producer, and the open transactions.

The state follows from the log's batches and markers (R27), except for the time of a producer's last append.
The state determines whether a new batch is next in sequence, is a repetition, or must be refused (R28). The
sequence numbers of a producer's records in this partition begin at 0 in each epoch, and wrap from 2^31 - 1 to
0. A batch with the same sequences as a stored batch is its repetition only if the checksums are equal, too
(exceptions: ``SequencedBatch.is_repeated_by``). Otherwise another client used the producer's id, and the
batch is not in the log.

A producer's transaction is open here from its first batch until its marker. The marker has the transaction's
epoch plus one. This becomes the producer's epoch, so that late batches are refused (R31).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kafkalite.errors import (
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTxnStateError,
    OutOfOrderSequenceNumberError,
    TransactionCoordinatorFencedError,
    UnknownProducerIdError,
)
from kafkalite.model import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP
from kafkalite.records.control import parse_marker
from kafkalite.records.gaps import ReplacedBatch
from kafkalite.records.header import CONTROL_BIT, BatchHeader, Buffer, log_append_time_crc
from kafkalite.storage.aborted_index import ABORTED, Aborted, AbortedIndex

KEPT_BATCHES: Final = 5  #: the maximum number of batches that a producer may have in flight
SEQUENCES: Final = 2**31
UNKNOWN_CRC: Final = -1  #: of a batch in a snapshot that has no checksums

_ENDED: Final = "ended"


class SequencedBatch(NamedTuple):
    """One batch of a producer. The ranges of offsets and of sequences are inclusive at both ends.

    ``crc`` is the checksum of the batch in the log.
    """

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    crc: int = UNKNOWN_CRC

    def is_repeated_by(self, header: BatchHeader, batch: Buffer) -> bool:
        """Whether ``batch``, which has the same sequences, is a repetition of this stored batch: its checksum
        is equal (R28), or the checksum of the stored batch is unknown.

        If the topic uses LogAppendTime, the leader stamped the stored batch, which changed its CRC. So the
        CRC that ``batch`` would have with the append time of the stored batch is also compared.
        """
        if self.crc in (header.crc, UNKNOWN_CRC):
            return True
        return self.crc == log_append_time_crc(batch, self.max_timestamp_ms)


class EndedTransaction(NamedTuple):
    """A transaction whose marker is at ``marker_offset``. Both offsets are inclusive."""

    first_offset: int
    marker_offset: int


class OpenTransaction(NamedTuple):
    """A transaction without a marker in this log. ``start_offset`` is the offset of its first batch."""

    producer_id: int
    producer_epoch: int
    start_offset: int


@dataclass(slots=True)
class ProducerState:
    """The state of one producer. Invariant: ``batches`` are its last batches of ``epoch``, at most five."""

    epoch: int
    last_append_ms: int = field(compare=False)  #: wall clock; NO_TIMESTAMP if restored from the log
    batches: list[SequencedBatch]
    coordinator_epoch: int = NO_EPOCH  #: of the last marker; NO_EPOCH before the first
    transaction_start_offset: int = NO_OFFSET  #: NO_OFFSET if no transaction is open here

    def is_from_current_coordinator(self, coordinator_epoch: int) -> bool:
        """Whether a marker with ``coordinator_epoch`` is from the current coordinator: the epoch is at least
        that of the producer's last marker (R32)."""
        return coordinator_epoch >= self.coordinator_epoch

    def fence(self, marker_epoch: int) -> None:
        """Adopt the epoch of a marker, so that late batches of the ended transaction are refused (R31)."""
        self.epoch = marker_epoch
        self.batches = []


class ProducerStates:
    """The states of a log's producers, by producer id.

    Invariants: ``open`` is {producer id: first offset} of the open transactions, in ascending order of
    offsets. ``aborted`` has every aborted transaction of which a batch is in the log.
    """

    __slots__ = ("_producers", "aborted", "ended", "open")

    def __init__(self, producers: dict[int, ProducerState] | None = None) -> None:
        self._producers = producers if producers is not None else {}
        opened = (
            (one.transaction_start_offset, producer_id)
            for producer_id, one in self._producers.items()
            if one.transaction_start_offset != NO_OFFSET
        )
        self.open: dict[int, int] = {producer_id: first for first, producer_id in sorted(opened)}
        #: Transactions whose markers may be uncommitted, in the order of the markers.
        self.ended: list[EndedTransaction] = []
        self.aborted = AbortedIndex()

    def __len__(self) -> int:
        return len(self._producers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProducerStates):
            return NotImplemented
        return self._producers == other._producers and self.aborted == other.aborted

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[tuple[int, ProducerState]]:
        return iter(self._producers.items())

    def get(self, producer_id: int) -> ProducerState | None:
        return self._producers.get(producer_id)

    # --- checks before an append -----------------------------------------------------------------------

    def check(self, header: BatchHeader, batch: Buffer) -> SequencedBatch | None:
        """Return None if ``batch`` is next in sequence. If it is a repetition, return the stored batch (R28).

        Raises InvalidRecordError if the batch has no epoch or sequence; UnknownProducerIdError,
        InvalidProducerEpochError, OutOfOrderSequenceNumberError. The last error is also raised if the batch
        has lower sequences than the producer's last five batches (the log may contain the batch), or if it
        has the sequences but not the content of one of these five (the log does not contain the batch).
        """
        first = header.base_sequence
        if first < 0 or header.producer_epoch < 0:
            raise InvalidRecordError(f"a batch of producer {header.producer_id} without epoch or sequence")
        producer = self._producers.get(header.producer_id)
        if producer is not None and header.producer_epoch == producer.epoch:
            batches = producer.batches
            if first == ((batches[-1].last_sequence + 1) % SEQUENCES if batches else 0):
                return None
            last = (first + header.last_offset_delta) % SEQUENCES
            for known in batches:
                if (known.first_sequence, known.last_sequence) == (first, last):
                    if known.is_repeated_by(header, batch):
                        return known
                    raise _other_content(header, known)
        elif producer is not None and header.producer_epoch < producer.epoch:
            raise _old_epoch(header, producer)
        elif first == 0:
            return None
        if producer is None:
            raise UnknownProducerIdError(
                f"producer {header.producer_id} is unknown here, and the batch begins with sequence {first}"
            )
        expected = 0
        if header.producer_epoch == producer.epoch and producer.batches:
            expected = (producer.batches[-1].last_sequence + 1) % SEQUENCES
        raise OutOfOrderSequenceNumberError(
            f"producer {header.producer_id} in epoch {header.producer_epoch} is expected to continue with"
            f" sequence {expected}; the batch begins with {first}"
        )

    def needs_verification(self, producer_id: int, epoch: int) -> bool:
        """Whether a batch of that epoch would begin a transaction here, so that the coordinator must first
        add the partition (R31). False for an earlier epoch, because such a batch is refused."""
        producer = self._producers.get(producer_id)
        if producer is None or epoch > producer.epoch:
            return True
        return epoch == producer.epoch and producer.transaction_start_offset == NO_OFFSET

    def check_open(self, header: BatchHeader) -> None:
        """Raise an error if the batch does not belong to the open transaction of its producer.

        Raises InvalidTxnStateError if the batch is not transactional, and ConcurrentTransactionsError if it
        is of a later epoch. Raises InvalidProducerEpochError if it is of an earlier epoch than the producer,
        even if no transaction is open.
        """
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return
        if header.producer_epoch < producer.epoch:
            raise _old_epoch(header, producer)
        if producer.transaction_start_offset == NO_OFFSET:
            return
        since = f"producer {header.producer_id} has had a transaction open here since offset"
        if not header.is_transactional:
            raise InvalidTxnStateError(
                f"{since} {producer.transaction_start_offset}; the batch is not part of it",
                hint="end the transaction first, or use another producer",
            )
        if header.producer_epoch > producer.epoch:
            raise ConcurrentTransactionsError(
                f"{since} {producer.transaction_start_offset}, in epoch {producer.epoch}; the batch is of"
                f" epoch {header.producer_epoch}"
            )

    def check_marker(self, producer_id: int, epoch: int, coordinator_epoch: int) -> bool:
        """Whether a marker must be appended: its epoch is later than the producer's, or the producer is
        unknown. If the epochs are equal, the log already contains the marker.

        An open transaction with the epoch of the marker began after the marker was first appended, and a
        repetition of the marker must not end it. Raises TransactionCoordinatorFencedError if the coordinator
        epoch is older than that of the producer's last marker; InvalidProducerEpochError.
        """
        producer = self._producers.get(producer_id)
        if producer is None:
            return True
        if not producer.is_from_current_coordinator(coordinator_epoch):
            raise TransactionCoordinatorFencedError(
                f"producer {producer_id} has a marker of coordinator epoch {producer.coordinator_epoch};"
                f" this one is of {coordinator_epoch}"
            )
        if epoch < producer.epoch:
            raise InvalidProducerEpochError(
                f"producer {producer_id} is in epoch {producer.epoch}; the marker is of {epoch}"
            )
        return epoch > producer.epoch

    # --- appended batches ------------------------------------------------------------------------------

    def note(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        base_offset: int,
        last_offset: int,
        max_timestamp_ms: int,
        now_ms: int,
        crc: int = UNKNOWN_CRC,
    ) -> None:
        """Add a batch of an idempotent producer. Called for each batch, in log order.

        ``crc`` is the checksum in the log. For a transactional batch, ``note_open`` must be called first.
        """
        last_sequence = (first_sequence + last_offset - base_offset) % SEQUENCES
        batch = SequencedBatch(first_sequence, last_sequence, base_offset, last_offset, max_timestamp_ms, crc)
        producer = self._producers.get(producer_id)
        if producer is None:
            self._producers[producer_id] = ProducerState(epoch, now_ms, [batch])
            return
        producer.last_append_ms = now_ms
        if producer.epoch != epoch:
            producer.epoch = epoch
            producer.batches = [batch]
            return
        batches = producer.batches
        batches.append(batch)
        if len(batches) > KEPT_BATCHES:
            del batches[0]

    def note_replaced(self, replaced: ReplacedBatch, now_ms: int) -> None:
        """Add the batch that a gap describes, unless it is known already."""
        producer = self._producers.get(replaced.producer_id)
        known = producer.batches if producer is not None and producer.epoch == replaced.epoch else []
        if all(batch.base_offset != replaced.base_offset for batch in known):
            offsets = (replaced.base_offset, replaced.last_offset)
            times = (replaced.max_timestamp_ms, now_ms)
            sequence = replaced.first_sequence
            self.note(replaced.producer_id, replaced.epoch, sequence, *offsets, *times, replaced.crc)

    def note_open(self, producer_id: int, epoch: int, base_offset: int, now_ms: int) -> None:
        """Add a transactional batch. The first batch of a transaction opens it in this log."""
        producer = self._active(producer_id, epoch, now_ms)
        if producer.epoch != epoch:
            producer.epoch = epoch
            producer.batches = []
        if producer.transaction_start_offset == NO_OFFSET:
            producer.transaction_start_offset = base_offset
            self.open[producer_id] = base_offset

    def note_transactional(
        self,
        batch: Buffer,
        attributes: int,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        base_offset: int,
        last_offset: int,
        max_timestamp_ms: int,
        now_ms: int,
        crc: int = UNKNOWN_CRC,
    ) -> None:
        """Add a batch whose ``attributes`` have the transactional or the control bit.

        At most the length of a marker is read from ``batch``. Raises CorruptBatchError for a malformed
        marker.
        """
        if attributes & CONTROL_BIT:
            is_commit, coordinator_epoch = parse_marker(batch)
            self.note_marker(producer_id, epoch, coordinator_epoch, base_offset, now_ms, is_commit=is_commit)
            return
        self.note_open(producer_id, epoch, base_offset, now_ms)
        if first_sequence >= 0:
            times = (max_timestamp_ms, now_ms)
            self.note(producer_id, epoch, first_sequence, base_offset, last_offset, *times, crc)

    def note_marker(
        self,
        producer_id: int,
        epoch: int,
        coordinator_epoch: int,
        offset: int,
        now_ms: int,
        *,
        is_commit: bool,
    ) -> None:
        """Add the marker at ``offset``, which ends the producer's transaction in this log."""
        producer = self._active(producer_id, epoch, now_ms)
        producer.coordinator_epoch = coordinator_epoch
        producer.fence(epoch)
        producer.transaction_start_offset = NO_OFFSET
        first_offset = self.open.pop(producer_id, NO_OFFSET)
        if first_offset == NO_OFFSET:
            return
        self.ended.append(EndedTransaction(first_offset, offset))
        if not is_commit:
            bound = next(iter(self.open.values()), offset + 1)
            self.aborted.add(Aborted(producer_id, first_offset, offset, bound))

    def _active(self, producer_id: int, epoch: int, now_ms: int) -> ProducerState:
        """Return the producer's state, or a new one, with ``now_ms`` as the time of its last append (R29)."""
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = ProducerState(epoch, now_ms, [])
        producer.last_append_ms = now_ms
        return producer

    def forget_stable(self, high_watermark: int) -> None:
        """Forget the ended transactions that are stable: their markers are below ``high_watermark``."""
        ended = self.ended
        count = 0
        while count < len(ended) and ended[count].marker_offset < high_watermark:
            count += 1
        del ended[:count]

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the last stable offset (exclusive): the lowest of the high watermark and the first offsets
        of all transactions that are open or whose marker is uncommitted (R33). ``high_watermark`` must never
        decrease between calls."""
        return min(self.first_open_offset(high_watermark), self.first_uncommitted_offset(high_watermark))

    def first_open_offset(self, high_watermark: int) -> int:
        """Return the first offset of the oldest open transaction, but at most ``high_watermark``."""
        return min(high_watermark, next(iter(self.open.values()), high_watermark))

    def first_uncommitted_offset(self, high_watermark: int) -> int:
        """Return the lowest first offset of the transactions whose marker is uncommitted, or
        ``high_watermark`` if there are none. Forget the other ended transactions."""
        self.forget_stable(high_watermark)
        return min((one.first_offset for one in self.ended), default=high_watermark)

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions without a marker in this log, by first offset."""
        return [
            OpenTransaction(producer_id, self._producers[producer_id].epoch, first_offset)
            for producer_id, first_offset in self.open.items()
        ]

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers that were inactive for ``expiration_ms`` (R29), and return their number.

        A producer with an open transaction is kept. For a producer restored from the log, the time begins
        with the first call, because the timestamps of its records are arbitrary.
        """
        gone: list[int] = []
        for producer_id, producer in self._producers.items():
            if producer.last_append_ms == NO_TIMESTAMP:
                producer.last_append_ms = now_ms
            elif now_ms - producer.last_append_ms >= expiration_ms and producer_id not in self.open:
                gone.append(producer_id)
        for producer_id in gone:
            del self._producers[producer_id]
        return len(gone)

    def expires_ms(self, expiration_ms: int) -> float:
        """Return the earliest time in milliseconds when ``expire`` with this ``expiration_ms`` changes
        something: infinity if no producer can expire, minus infinity if the time of a producer has not begun
        yet."""
        return min(
            (
                -math.inf if one.last_append_ms == NO_TIMESTAMP else one.last_append_ms + expiration_ms
                for producer_id, one in self._producers.items()
                if producer_id not in self.open
            ),
            default=math.inf,
        )

    # --- as text ---------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """Yield the lines of a snapshot.

        First, one line for each producer: id, epoch, last append, coordinator epoch, first offset of its open
        transaction, and its batches, whose fields are separated by colons. Then one line for each transaction
        in ``ended``, which begins with ``ended``. Then one line for each entry of the aborted index, which
        begins with ``aborted``.
        """
        for producer_id in sorted(self._producers):
            one = self._producers[producer_id]
            batches = (":".join(map(str, batch)) for batch in one.batches)
            fields = (one.epoch, one.last_append_ms, one.coordinator_epoch, one.transaction_start_offset)
            yield " ".join((str(producer_id), *map(str, fields), *batches))
        for ended in self.ended:
            yield f"{_ENDED} {ended.first_offset} {ended.marker_offset}"
        yield from self.aborted.lines()

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> ProducerStates:
        """Parse the output of ``lines``. Raises ValueError if it is malformed."""
        producers: dict[int, ProducerState] = {}
        ended: list[EndedTransaction] = []
        aborted = AbortedIndex()
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind == _ENDED:
                first_offset, marker_offset = map(int, rest.split())
                ended.append(EndedTransaction(first_offset, marker_offset))
            elif kind == ABORTED:
                aborted.add_line(rest)
            else:
                producers[int(kind)] = _producer(rest)
        states = cls(producers)
        states.ended, states.aborted = ended, aborted
        return states


def _old_epoch(header: BatchHeader, producer: ProducerState) -> InvalidProducerEpochError:
    return InvalidProducerEpochError(
        f"producer {header.producer_id} is in epoch {producer.epoch}; the batch is of {header.producer_epoch}"
    )


def _other_content(header: BatchHeader, known: SequencedBatch) -> OutOfOrderSequenceNumberError:
    return OutOfOrderSequenceNumberError(
        f"producer {header.producer_id} in epoch {header.producer_epoch} has another batch with sequences"
        f" {known.first_sequence} to {known.last_sequence}, at offset {known.base_offset}: this one has CRC"
        f" {header.crc:#010x}, and is not in the log"
    )


def _producer(text: str) -> ProducerState:
    epoch, last_append_ms, coordinator_epoch, start_offset, *texts = text.split()
    fields = [one.split(":") for one in texts]
    # Snapshots of earlier versions have no CRC.
    if any(len(one) not in (len(SequencedBatch._fields) - 1, len(SequencedBatch._fields)) for one in fields):
        raise ValueError(f"not the batches of a producer: {text!r}")
    batches = [SequencedBatch(*map(int, one)) for one in fields]
    return ProducerState(int(epoch), int(last_append_ms), batches, int(coordinator_epoch), int(start_offset))
