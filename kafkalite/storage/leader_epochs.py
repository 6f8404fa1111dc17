"""The leader epochs of one log: (leader epoch, start offset), both strictly increasing.

The entries follow from the log's batches, except that the last entry may belong to a leader that has not yet
written (R2). Replication uses the entries to find the end offset of an epoch (R4). The CRC of a batch does
not cover its leader epoch, so the entries also show whether the epoch of a stored batch has changed (R58).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from kafkalite.errors import CorruptBatchError
from kafkalite.model import NO_EPOCH


class EpochEntry(NamedTuple):
    leader_epoch: int
    start_offset: int


class EpochEnd(NamedTuple):
    """A leader epoch and its end offset (exclusive)."""

    leader_epoch: int
    end_offset: int


class LeaderEpochs:
    """The leader epochs of a log. Invariant: the lists of epochs and of start offsets have equal length, and
    both strictly increase."""

    __slots__ = ("epochs", "start_offsets")

    def __init__(self, entries: Iterable[EpochEntry | tuple[int, int]] = ()) -> None:
        self.epochs: list[int] = []
        self.start_offsets: list[int] = []
        for leader_epoch, start_offset in entries:
            self.assign(leader_epoch, start_offset)

    @property
    def latest_epoch(self) -> int:
        """The latest leader epoch, or NO_EPOCH (-1)."""
        return self.epochs[-1] if self.epochs else NO_EPOCH

    def entries(self) -> list[EpochEntry]:
        return [EpochEntry(*pair) for pair in zip(self.epochs, self.start_offsets, strict=True)]

    def entries_below(self, end_offset: int) -> list[EpochEntry]:
        """Return the entries that start below ``end_offset``."""
        return [entry for entry in self.entries() if entry.start_offset < end_offset]

    def assign(self, leader_epoch: int, start_offset: int) -> None:
        """Begin ``leader_epoch``, which must not be older than the latest epoch, at ``start_offset``.

        Entries that start there or later are removed, because they have no batches (R5). Has no effect if the
        epoch is the latest one.
        """
        if leader_epoch == self.latest_epoch:
            return
        assert leader_epoch > self.latest_epoch, (leader_epoch, self.latest_epoch)
        self.truncate_from_end(start_offset)
        self.epochs.append(leader_epoch)
        self.start_offsets.append(start_offset)

    def end_offset_for(self, leader_epoch: int, log_end_offset: int) -> EpochEnd:
        """Return the largest known epoch that is at most ``leader_epoch``, and its end offset (R4).

        The end is the start of the next known epoch, or the log end. If all known epochs are newer, return
        ``leader_epoch`` and the start of the oldest known epoch. If none is known, return (``leader_epoch``,
        0). KIP-101 defines this; KIP-279 explains why the epoch is returned too.
        """
        if not self.epochs:
            return EpochEnd(leader_epoch, 0)
        index = bisect_right(self.epochs, leader_epoch)
        if index == 0:
            return EpochEnd(leader_epoch, self.start_offsets[0])
        end = self.start_offsets[index] if index < len(self.epochs) else log_end_offset
        return EpochEnd(self.epochs[index - 1], end)

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the batch with ``offset``, or NO_EPOCH (-1) if all entries start above it."""
        index = bisect_right(self.start_offsets, offset)
        return self.epochs[index - 1] if index else NO_EPOCH

    def check(self, leader_epoch: int, last_offset: int) -> None:
        """Raise CorruptBatchError if the entries have another epoch than ``leader_epoch`` for the batch that
        ends with ``last_offset`` (R58)."""
        expected = self.epoch_at(last_offset)
        if leader_epoch != expected != NO_EPOCH:
            raise CorruptBatchError(
                f"leader epoch {leader_epoch} at offset {last_offset}, where epoch {expected} is recorded"
            )

    def copy(self) -> LeaderEpochs:
        return LeaderEpochs(self.entries())

    def truncate_from_end(self, end_offset: int) -> None:
        """Remove the entries that start at or above ``end_offset`` (R5)."""
        index = bisect_left(self.start_offsets, end_offset)
        del self.epochs[index:]
        del self.start_offsets[index:]

    def truncate_from_start(self, start_offset: int) -> None:
        """Remove each epoch whose next epoch starts at or below ``start_offset``. If the oldest remaining
        epoch starts below that offset, it starts there from now on."""
        index = bisect_right(self.start_offsets, start_offset) - 1
        if index >= 0:
            del self.epochs[:index]
            del self.start_offsets[:index]
            self.start_offsets[0] = start_offset
