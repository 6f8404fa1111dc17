"""What a log knows of its idempotent producers: the last five batches of each, with their sequences.

A pure function of the log's batches from the oldest snapshot on (R27), but for when a producer was last
heard of. It answers, for a batch that is to be appended, whether it comes next, was appended before, or
must be refused (R28). Sequences count a producer's records in this partition from 0, for each epoch anew,
and wrap from 2^31 - 1 to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kafkalite import mutants
from kafkalite.errors import (
    InvalidProducerEpochError,
    InvalidRecordError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP
from kafkalite.records.header import BatchHeader

KEPT_BATCHES: Final = 5  #: as many as a producer may have in flight
SEQUENCES: Final = 2**31


class SequencedBatch(NamedTuple):
    """One batch of a producer. Both ends of both ranges are inclusive."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int


class ProducerState:
    """One producer. Invariant: ``batches`` are its latest of ``epoch``, one to five, in order."""

    __slots__ = ("batches", "epoch", "last_append_ms")

    def __init__(self, epoch: int, last_append_ms: int, batches: list[SequencedBatch]) -> None:
        self.epoch = epoch
        self.last_append_ms = last_append_ms  #: wall clock here; NO_TIMESTAMP: found in the log
        self.batches = batches

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProducerState):
            return NotImplemented
        return (self.epoch, self.batches) == (other.epoch, other.batches)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ProducerState epoch {self.epoch} {self.batches}>"


class ProducerStates:
    """{producer id: its state} of one log."""

    __slots__ = ("_producers",)

    def __init__(self, producers: dict[int, ProducerState] | None = None) -> None:
        self._producers = producers if producers is not None else {}

    def __len__(self) -> int:
        return len(self._producers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerStates) and self._producers == other._producers

    __hash__ = None  # type: ignore[assignment]

    def get(self, producer_id: int) -> ProducerState | None:
        return self._producers.get(producer_id)

    def check(self, header: BatchHeader) -> SequencedBatch | None:
        """None if the batch comes next; the batch it repeats if it was appended before (R28).

        A repetition of one older than the kept five has NO_OFFSET as base offset, and ends before the
        oldest kept. Raises InvalidRecordError (no sequence), UnknownProducerIdError,
        InvalidProducerEpochError, OutOfOrderSequenceNumberError.
        """
        first = header.base_sequence
        if first < 0 or header.producer_epoch < 0:
            raise InvalidRecordError(f"a batch of producer {header.producer_id} without epoch or sequence")
        producer = self._producers.get(header.producer_id)
        if producer is not None and header.producer_epoch == producer.epoch:
            if first == (producer.batches[-1].last_sequence + 1) % SEQUENCES:
                return None
            found = _repeated(producer.batches, first, (first + header.last_offset_delta) % SEQUENCES)
            if found is not None:
                return None if "R28-no-dedup" in mutants.ACTIVE else found
        elif producer is not None and header.producer_epoch < producer.epoch:
            raise InvalidProducerEpochError(
                f"producer {header.producer_id} is in epoch {producer.epoch}; the batch is of"
                f" {header.producer_epoch}"
            )
        elif first == 0:
            return None
        if "R28-no-gap-check" in mutants.ACTIVE:
            return None
        if producer is None:
            raise UnknownProducerIdError(
                f"producer {header.producer_id} is not known here, and the batch begins with sequence {first}"
            )
        expected = 0
        if header.producer_epoch == producer.epoch:
            expected = (producer.batches[-1].last_sequence + 1) % SEQUENCES
        raise OutOfOrderSequenceNumberError(
            f"producer {header.producer_id} in epoch {header.producer_epoch} is expected to go on with"
            f" sequence {expected}; the batch begins with {first}"
        )

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
        """A batch of an idempotent producer stands in the log. Called for each one, in order."""
        last_sequence = (first_sequence + last_offset - base_offset) % SEQUENCES
        batch = SequencedBatch(first_sequence, last_sequence, base_offset, last_offset, max_timestamp_ms)
        producer = self._producers.get(producer_id)
        if producer is None or producer.epoch != epoch:
            self._producers[producer_id] = ProducerState(epoch, now_ms, [batch])
            return
        producer.last_append_ms = now_ms
        batches = producer.batches
        batches.append(batch)
        if len(batches) > KEPT_BATCHES:
            del batches[0]

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forget who was not heard of for ``expiration_ms`` (R29). Returns how many that were.

        The time of one that was found in the log, not heard, begins now: its records may be dated at will.
        """
        gone: list[int] = []
        for producer_id, producer in self._producers.items():
            if producer.last_append_ms == NO_TIMESTAMP:
                producer.last_append_ms = now_ms
            elif now_ms - producer.last_append_ms >= expiration_ms:
                gone.append(producer_id)
        for producer_id in gone:
            del self._producers[producer_id]
        return len(gone)

    # --- as text ---------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """One line per producer: id, epoch, last append, and its batches with colons between the fields."""
        for producer_id in sorted(self._producers):
            producer = self._producers[producer_id]
            batches = " ".join(":".join(map(str, batch)) for batch in producer.batches)
            yield f"{producer_id} {producer.epoch} {producer.last_append_ms} {batches}"

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> ProducerStates:
        """Raises ValueError for anything but what ``lines`` gives."""
        producers: dict[int, ProducerState] = {}
        for line in lines:
            producer_id, epoch, last_append_ms, *texts = line.split()
            fields = [text.split(":") for text in texts]
            if not fields or any(len(one) != len(SequencedBatch._fields) for one in fields):
                raise ValueError(f"not the batches of a producer: {line!r}")
            batches = [SequencedBatch._make(map(int, one)) for one in fields]
            producers[int(producer_id)] = ProducerState(int(epoch), int(last_append_ms), batches)
        return cls(producers)


def _repeated(batches: list[SequencedBatch], first: int, last: int) -> SequencedBatch | None:
    for batch in batches:
        if (batch.first_sequence, batch.last_sequence) == (first, last):
            return batch
    oldest = batches[0]
    # How far before the oldest one: in a circle, what is less than half of it away counts as before.
    before_oldest = (oldest.first_sequence - 1 - last) % SEQUENCES
    if before_oldest < SEQUENCES // 2 and (oldest.first_sequence - first) % SEQUENCES < SEQUENCES // 2:
        return SequencedBatch(first, last, NO_OFFSET, oldest.base_offset - 1, NO_TIMESTAMP)
    return None
