"""The state of a log's producers: the last five batches of each, and which transactions are open.

It follows from the log's batches and markers from the oldest snapshot on (R27), except for the time of
a producer's last append. It decides whether a new batch is next in sequence, was appended before, or
must be refused (R28). Sequences count a producer's records in this partition from 0 in each epoch, and
wrap from 2^31 - 1 to 0.

A producer's transaction is open here from its first batch to the marker that ends it. The marker has
the transaction's epoch plus one, which becomes the producer's epoch, so that late batches are refused
(R31).
"""

from __future__ import annotations

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
from kafkalite.records.header import CONTROL_BIT, BatchHeader, Buffer
from kafkalite.storage.aborted_index import ABORTED, Aborted, AbortedIndex

KEPT_BATCHES: Final = 5  #: the maximum number of batches that a producer may have in flight
SEQUENCES: Final = 2**31

_ENDED: Final = "ended"


class SequencedBatch(NamedTuple):
    """One batch of a producer. Both ends of both ranges are inclusive."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int


class EndedTransaction(NamedTuple):
    """A transaction with its marker at ``marker_offset``; both offsets are inclusive."""

    first_offset: int
    marker_offset: int


class OpenTransaction(NamedTuple):
    """A transaction without its marker here. ``start_offset`` is the offset of its first batch."""

    producer_id: int
    producer_epoch: int
    start_offset: int


@dataclass(slots=True)
class ProducerState:
    """One producer. Invariant: ``batches`` are the last five of ``epoch`` with a sequence, in order."""

    epoch: int
    last_append_ms: int = field(compare=False)  #: wall clock; NO_TIMESTAMP: restored from the log
    batches: list[SequencedBatch]
    coordinator_epoch: int = NO_EPOCH  #: of the last marker; NO_EPOCH before any
    transaction_start_offset: int = NO_OFFSET  #: NO_OFFSET: no transaction is open here

    def is_from_current_coordinator(self, coordinator_epoch: int) -> bool:
        """Whether a marker's coordinator is not older than that of the producer's last marker (R32)."""
        return coordinator_epoch >= self.coordinator_epoch

    def fence(self, marker_epoch: int) -> None:
        """Adopt the epoch of a marker: late batches of the transaction that it ended are refused (R31)."""
        self.epoch = marker_epoch
        self.batches = []


class ProducerStates:
    """{producer id: state} of one log.

    Invariants: ``open`` is {producer id: first offset} of each open transaction, in ascending order of
    offsets; ``aborted`` has every aborted transaction whose marker is still in the log.
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
        #: Transactions whose marker may be uncommitted, in the order of the markers.
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

    def check(self, header: BatchHeader) -> SequencedBatch | None:
        """Return None if the batch is next in sequence, or the batch that it repeats (R28).

        A repeated batch older than the last five is returned with NO_OFFSET as base offset. Raises
        InvalidRecordError (no sequence), UnknownProducerIdError, InvalidProducerEpochError,
        OutOfOrderSequenceNumberError.
        """
        first = header.base_sequence
        if first < 0 or header.producer_epoch < 0:
            raise InvalidRecordError(f"a batch of producer {header.producer_id} without epoch or sequence")
        producer = self._producers.get(header.producer_id)
        if producer is not None and header.producer_epoch == producer.epoch:
            batches = producer.batches
            if first == ((batches[-1].last_sequence + 1) % SEQUENCES if batches else 0):
                return None
            found = _repeated(batches, first, (first + header.last_offset_delta) % SEQUENCES)
            if found is not None:
                return found
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
        """Whether a batch of that epoch would begin a transaction here, so that the coordinator must add
        the partition first (R31). A batch of an earlier epoch needs no verification: it is refused."""
        producer = self._producers.get(producer_id)
        if producer is None or epoch > producer.epoch:
            return True
        return epoch == producer.epoch and producer.transaction_start_offset == NO_OFFSET

    def check_open(self, header: BatchHeader) -> None:
        """Raise an error if the batch does not belong to its producer's open transaction, if there is one.

        Raises InvalidTxnStateError: the batch is not transactional; ConcurrentTransactionsError: it is
        of a later transaction; InvalidProducerEpochError: of an earlier epoch.
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
        """Whether a marker must be appended; False if the log has it already.

        A marker ends a transaction of an earlier epoch than its own. An open transaction of the same
        epoch is a later one, which a repeated marker must not end. Raises
        TransactionCoordinatorFencedError, InvalidProducerEpochError.
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
    ) -> None:
        """Add a batch of an idempotent producer. Called for each batch, in order.

        For a batch that is part of a transaction, ``note_open`` is called first.
        """
        last_sequence = (first_sequence + last_offset - base_offset) % SEQUENCES
        batch = SequencedBatch(first_sequence, last_sequence, base_offset, last_offset, max_timestamp_ms)
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

    def note_open(self, producer_id: int, epoch: int, base_offset: int, now_ms: int) -> None:
        """Add a batch that is part of a transaction: the first one opens it here."""
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
    ) -> None:
        """Add a batch whose ``attributes`` have the transactional or the control bit.

        ``batch`` need only have the length of a marker. Raises CorruptBatchError for a bad marker.
        """
        if attributes & CONTROL_BIT:
            is_commit, coordinator_epoch = parse_marker(batch)
            self.note_marker(producer_id, epoch, coordinator_epoch, base_offset, now_ms, is_commit=is_commit)
            return
        self.note_open(producer_id, epoch, base_offset, now_ms)
        if first_sequence >= 0:
            self.note(producer_id, epoch, first_sequence, base_offset, last_offset, max_timestamp_ms, now_ms)

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
        """Add a marker at ``offset``: it ends the producer's transaction here."""
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
        """Return the producer, marked as active now. A marker counts too: its epoch must not expire (R29)."""
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = ProducerState(epoch, now_ms, [])
        producer.last_append_ms = now_ms
        return producer

    def forget_stable(self, high_watermark: int) -> None:
        """Forget the ended transactions whose marker is below ``high_watermark``: they are stable."""
        ended = self.ended
        count = 0
        while count < len(ended) and ended[count].marker_offset < high_watermark:
            count += 1
        del ended[:count]

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the high watermark, or the first offset of a transaction that is open or whose marker is
        not committed, if that is less (R33). Exclusive. The high watermark never moves back."""
        return min(self.first_open_offset(high_watermark), self.first_uncommitted_offset(high_watermark))

    def first_open_offset(self, high_watermark: int) -> int:
        """Return the first offset of the oldest open transaction, or ``high_watermark`` if that is less."""
        return min(high_watermark, next(iter(self.open.values()), high_watermark))

    def first_uncommitted_offset(self, high_watermark: int) -> int:
        """Return the first offset of an ended transaction whose marker is uncommitted, or the argument."""
        self.forget_stable(high_watermark)
        return min((one.first_offset for one in self.ended), default=high_watermark)

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions without a marker here, by first offset."""
        return [
            OpenTransaction(producer_id, self._producers[producer_id].epoch, first_offset)
            for producer_id, first_offset in self.open.items()
        ]

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers that were inactive for ``expiration_ms`` (R29). Returns their number.

        A producer with an open transaction is kept. For a producer restored from the log the time
        begins now, because the timestamps of its records are arbitrary.
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

    # --- as text ---------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """Yield the content of a snapshot.

        One line per producer: id, epoch, last append, coordinator epoch, first offset of its open
        transaction, and its batches with colons between the fields. Then the ended transactions:
        ``ended`` first if their marker may be uncommitted, ``aborted`` for the index.
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
        """Parse the output of ``lines``. Raises ValueError for other text."""
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


def _producer(text: str) -> ProducerState:
    epoch, last_append_ms, coordinator_epoch, start_offset, *texts = text.split()
    fields = [one.split(":") for one in texts]
    if any(len(one) != len(SequencedBatch._fields) for one in fields):
        raise ValueError(f"not the batches of a producer: {text!r}")
    batches = [SequencedBatch._make(map(int, one)) for one in fields]
    return ProducerState(int(epoch), int(last_append_ms), batches, int(coordinator_epoch), int(start_offset))


def _repeated(batches: list[SequencedBatch], first: int, last: int) -> SequencedBatch | None:
    for batch in batches:
        if (batch.first_sequence, batch.last_sequence) == (first, last):
            return batch
    if not batches:
        return None
    oldest = batches[0]
    # The distance before the oldest batch. Sequences wrap: a distance of less than half counts as before.
    before_oldest = (oldest.first_sequence - 1 - last) % SEQUENCES
    if before_oldest < SEQUENCES // 2 and (oldest.first_sequence - first) % SEQUENCES < SEQUENCES // 2:
        return SequencedBatch(first, last, NO_OFFSET, oldest.base_offset - 1, NO_TIMESTAMP)
    return None
