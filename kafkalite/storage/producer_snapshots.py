"""The state of a log's producers and transactions: in memory once needed, saved in snapshots.

A snapshot ``<20-digit offset>.producers`` holds the state that results from all batches below its offset. If
the state is in memory, a snapshot is written when a segment is closed, at an orderly stop, and every
SNAPSHOT_EVERY_BYTES in the active segment. So the state is restored from the newest snapshot and a scan of
the headers after it. Snapshots have a checksum, name their log and offset, and are written without a sync: a
torn or missing snapshot, or one of another log (R42), only makes the scan longer. A log is not scanned until
its producers are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from kafkalite.errors import CorruptBatchError, CorruptLogError, StorageExhaustedError
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.model import NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.records.control import MARKER_BYTES
from kafkalite.records.gaps import replaced_by
from kafkalite.records.header import CONTROL_BIT, TRANSACTIONAL_BIT, scan_producers
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import LogState, decode_producers, encode_producers
from kafkalite.storage.filesystem import FileSystem, unlink_existing
from kafkalite.storage.producer_state import ProducerStates
from kafkalite.storage.segment import Segment
from kafkalite.storage.segment_list import SegmentList

logger = logging.getLogger(__name__)

_TRANSACTION_BITS: Final = TRANSACTIONAL_BIT | CONTROL_BIT

#: The maximum number of bytes to scan when producers are restored, if no snapshot failed.
SNAPSHOT_EVERY_BYTES: Final = 64 * MIB


class ProducerSnapshots:
    """The producer states of one log, and their snapshots on disk.

    Invariants: ``states`` covers all batches of the log, or at least the sound part of a damaged log. It is
    None if the states are not loaded yet, or were discarded by ``truncate``. ``_offsets`` are the offsets of
    the snapshots on disk that may be used, ascending.
    """

    __slots__ = ("_directory", "_fs", "_offsets", "_saved_bytes", "states")

    def __init__(self, fs: FileSystem, directory: str, offsets: Iterable[int] | None = None) -> None:
        """``offsets`` are the offsets of the snapshots on disk; None for a new log, which has no
        producers."""
        self._fs = fs
        self._directory = directory
        self._offsets = sorted(offsets or ())
        self._saved_bytes = 0  # the size of the active segment at the last snapshot
        self.states: ProducerStates | None = ProducerStates() if offsets is None else None

    def load(
        self, segments: SegmentList, state: LogState, log_start_offset: int, end_offset: int
    ) -> ProducerStates:
        """Restore the states as of ``end_offset``: the log end, or the sound end of a damaged log. Raises
        CorruptLogError, also for a malformed marker; OSError."""
        states, offset = self._newest(state, end_offset)
        for segment in segments:
            if segment.next_offset <= offset or segment.base_offset >= end_offset:
                continue
            _walk(states, segment, offset)
        states.aborted.delete_before(log_start_offset)
        self.states = states
        return states

    def _newest(self, state: LogState, end_offset: int) -> tuple[ProducerStates, int]:
        """Return (states, offset) of the newest snapshot that is valid for a log that ends at ``end_offset``,
        or (empty, 0). Remove the newer snapshots, which are not valid."""
        while self._offsets:
            offset = self._offsets[-1]
            states = self._read(offset, state) if offset <= end_offset else None
            if states is not None:
                return states, offset
            self._remove(offset)
        return ProducerStates(), 0

    def _read(self, offset: int, state: LogState) -> ProducerStates | None:
        path = self._path(offset)
        try:
            states, truncations = decode_producers(self._fs.read_bytes(path), path)
        except (CorruptLogError, ValueError, FileNotFoundError) as error:
            logger.warning("producers not read %s", Fields(path=path, error=error))
            return None
        return states if state.cap(offset, truncations) == offset else None

    def save(self, offset: int, truncations: int, active_bytes: int, keep_from: int) -> None:
        """Write a snapshot as of ``offset``, which is the log end, if the states are in memory.

        The new snapshot replaces the snapshots above ``keep_from``, the base offset of the segment that ends
        at ``offset``. ``truncations`` is the log's truncation count, ``active_bytes`` the size of the active
        segment. Errors are only logged.
        """
        self._saved_bytes = active_bytes
        if self.states is None or (self._offsets and self._offsets[-1] == offset):
            return
        path = self._path(offset)
        try:
            file = self._fs.open(path, create=True)
            file.truncate(0)
            file.write_at(0, encode_producers(self.states, truncations, path))
            file.close()
            self._offsets.append(offset)
            for replaced in [one for one in self._offsets if keep_from < one < offset]:
                self._remove(replaced)
        except (OSError, StorageExhaustedError) as error:
            logger.warning("producers not saved %s", Fields(path=path, error=error))

    def is_due(self, active_bytes: int) -> bool:
        """Whether enough bytes were appended since the last snapshot to write another one."""
        return self.states is not None and active_bytes - self._saved_bytes >= SNAPSHOT_EVERY_BYTES

    def truncate(self, end_offset: int) -> None:
        """Remove the snapshots above ``end_offset``, the new log end, and discard all states in memory
        (``states`` becomes None)."""
        self.states = None
        self._saved_bytes = 0
        for offset in [one for one in self._offsets if one > end_offset]:
            self._remove(offset)

    def limit_to(self, end_offset: int) -> None:
        """Forget the snapshots above ``end_offset``, the sound end of a damaged log, but keep their files."""
        self._offsets = [one for one in self._offsets if one <= end_offset]

    def delete_before(self, log_start_offset: int) -> None:
        """Remove the snapshots at or below the log start, except the newest of them. In memory, remove the
        aborted transactions that end below the log start."""
        if self.states is not None:
            self.states.aborted.delete_before(log_start_offset)
        passed = [one for one in self._offsets if one <= log_start_offset]
        for offset in passed[:-1]:
            self._remove(offset)

    def _remove(self, offset: int) -> None:
        self._offsets.remove(offset)
        unlink_existing(self._fs, [self._path(offset)])

    def _path(self, offset: int) -> str:
        return layout.join(self._directory, layout.producers_file_name(offset))


def _walk(states: ProducerStates, segment: Segment, offset: int) -> None:
    """Add every batch of ``segment`` from ``offset`` on to ``states``. Raises CorruptLogError."""
    start = segment.find(offset).position if offset > segment.base_offset else 0
    view = segment.view()
    for position, attributes, base_offset, last_delta, max_ms, *producer, crc in scan_producers(
        view, start, segment.size_bytes
    ):
        producer_id, epoch, sequence = producer
        if base_offset < offset:
            continue
        if producer_id == NO_PRODUCER_ID:
            if attributes & CONTROL_BIT and (replaced := replaced_by(view, position, attributes)):
                states.note_replaced(replaced, NO_TIMESTAMP)
            continue
        last_offset = base_offset + last_delta
        batch = (producer_id, epoch, sequence, base_offset, last_offset, max_ms, NO_TIMESTAMP, crc)
        if attributes & _TRANSACTION_BITS:
            try:
                states.note_transactional(view[position : position + MARKER_BYTES], attributes, *batch)
            except CorruptBatchError as error:
                raise CorruptLogError(
                    path=segment.path(), position=position, expected="a marker", actual=error.message
                ) from error
        else:
            states.note(*batch)
