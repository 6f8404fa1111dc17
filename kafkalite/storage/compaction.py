"""Compaction: keeps only the latest record of each key.

Pure: it takes bytes and returns bytes. A pass reads the closed segments three times, in order of offsets:

1. ``Survey`` reads all headers. It finds the aborted and the undecided transactions, and the batches that the
   producers' states still need (R27). The pass ends before the first undecided transaction.
2. ``LatestOffsets`` reads the keys of batches that were never compacted: {key: offset of its latest record}.
3. ``Rewriter`` reads the batches from the log start on and returns those that stay.

Offsets never change. Removed records leave a gap batch (``records.gaps``), so that a compacted log has no
missing offsets, and damage in it is detected as in any other log (R24). The rules and their reasons:

* A record is removed if a later committed record has the same key. Records without a key stay.
* Records of aborted transactions are removed. Records of committed transactions lose their producer id and
  transactional bit. Records of undecided transactions are never reached.
* If a producer's state refers to a batch of which records are removed, the first gap in that batch describes
  it, so that a repetition of the batch and the next sequence are still recognized (R28). The description
  stays as long as the state refers to the batch. A transactional batch of this kind stays unchanged.
* A batch that would not become smaller keeps all its records.
* A tombstone is removed if an earlier pass, which ended at least ``delete.retention.ms`` ago, has compacted
  all offsets up to it, so that a consumer that reads from the start has received the tombstone. It stays if
  an older record of its key remains in a batch that keeps all its records or cannot be read. The caller
  limits the offsets of removed tombstones, and allows none while an absent replica may have the older records
  but not the tombstone (R41).
* An abort marker stays, because the index of aborted transactions refers to it. A commit marker is removed
  after the same time as a tombstone, at the earliest after a day. It stays if a batch of its transaction
  stayed unchanged. A producer's last marker stays, because it carries the producer's epoch (R31). The last
  commit marker before an abort marker of the same producer stays, too. Otherwise a replica that was absent
  since before the commit would take the abort for the end of the committed transaction.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from kafkalite.errors import KafkaliteError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import NO_OFFSET, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, NO_TIMESTAMP
from kafkalite.records.batch import Columns, RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.control import MARKER_BYTES, parse_marker
from kafkalite.records.gaps import (
    DESCRIBED_GAP_BYTES,
    GAP_BYTES,
    ReplacedBatch,
    build_gap,
    is_gap,
    replaced_by,
)
from kafkalite.records.header import (
    CONTROL_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    check,
    scan_producers,
    stamp_producer,
)
from kafkalite.storage.producer_state import ProducerStates

#: Keys up to this length are used as map keys. Longer keys become a digest that is one byte longer than this.
_SHORT_KEY_BYTES: Final = 32
_TRANSACTION_BITS: Final = TRANSACTIONAL_BIT | CONTROL_BIT
_ALL_COMMITTED: Final = 2**63 - 1

#: The approximate memory for one key of a map: its bytes, its offset, and their slots in a dictionary.
BYTES_PER_KEY: Final = 200
#: The maximum number of keys of which a superseded record stays. Above it, all later tombstones stay.
_MAX_PINNED_KEYS: Final = 100_000
#: The maximum number of keys that one pass remembers for the next one.
_MAX_REMEMBERED: Final = 100_000


def map_key(key: bytes) -> bytes:
    """Return the map key that stands for ``key``: the key itself, or a 33-byte hash if it is longer than 32
    bytes."""
    if len(key) <= _SHORT_KEY_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=_SHORT_KEY_BYTES + 1).digest()


def _map_keys(keys: Sequence[bytes | None]) -> Sequence[bytes | None]:
    for key in keys:
        if key is not None and len(key) > _SHORT_KEY_BYTES:
            return [None if one is None else map_key(one) for one in keys]
    return keys


class Survey:
    """Reads the headers of all batches of a pass: from the start of the first segment to the end of the last.

    Call ``take`` for all batches, then ``finish``.
    """

    __slots__ = ("_before_aborts", "_last_markers", "_states")

    def __init__(self) -> None:
        self._states = ProducerStates()
        self._last_markers: dict[int, int] = {}
        self._before_aborts: set[int] = set()

    def take(self, batches: memoryview) -> None:
        """Read the headers of complete batches. Every batch must be passed once, in order of offsets. Raises
        CorruptBatchError for a malformed marker."""
        states = self._states
        for position, attributes, base, last_delta, max_ms, *producer, _ in scan_producers(
            batches, 0, len(batches)
        ):
            producer_id, epoch, sequence = producer
            if producer_id == NO_PRODUCER_ID:
                if attributes & CONTROL_BIT and (replaced := replaced_by(batches, position, attributes)):
                    states.note_replaced(replaced, NO_TIMESTAMP)
                continue
            last = base + last_delta
            if attributes & _TRANSACTION_BITS:
                marker = batches[position : position + MARKER_BYTES]
                states.note_transactional(
                    marker, attributes, producer_id, epoch, sequence, base, last, max_ms, NO_TIMESTAMP
                )
                if attributes & CONTROL_BIT:
                    if not parse_marker(marker).is_commit and producer_id in self._last_markers:
                        self._before_aborts.add(self._last_markers[producer_id])
                    self._last_markers[producer_id] = base
            elif sequence >= 0:
                states.note(producer_id, epoch, sequence, base, last, max_ms, NO_TIMESTAMP)
        states.forget_stable(_ALL_COMMITTED)  # because only committed batches are surveyed

    def finish(self, end_offset: int, is_known: Callable[[int], bool]) -> Facts:
        """Return the result up to ``end_offset`` (exclusive). ``is_known`` returns whether the log still has
        state for a producer id."""
        aborted: dict[int, tuple[list[int], list[int]]] = {}
        for one in self._states.aborted:
            firsts, lasts = aborted.setdefault(one.producer_id, ([], []))
            firsts.append(one.first_offset)
            lasts.append(one.last_offset)
        kept = {
            batch.base_offset
            for producer_id, state in self._states
            if is_known(producer_id)
            for batch in state.batches
        }
        markers = {offset for producer_id, offset in self._last_markers.items() if is_known(producer_id)}
        end = min(self._states.open.values(), default=end_offset)
        return Facts(end, aborted, kept, markers | self._before_aborts)


class Facts(NamedTuple):
    """The result of a survey. Every transaction before ``end_offset`` (exclusive) is decided.

    ``aborted``: by producer id, the first and last offsets (inclusive) of its aborted transactions,
    ascending. ``kept_batches``: base offsets of the batches to which producers' states refer, including
    batches that only a gap still describes. ``kept_markers``: offsets of the markers that stay.
    """

    end_offset: int
    aborted: dict[int, tuple[list[int], list[int]]]
    kept_batches: set[int]
    kept_markers: set[int]

    def is_aborted(self, producer_id: int, offset: int) -> bool:
        """Whether a transactional batch at ``offset`` is part of an aborted transaction of the producer."""
        ranges = self.aborted.get(producer_id)
        if ranges is None:
            return False
        number = bisect_right(ranges[0], offset) - 1
        return number >= 0 and offset <= ranges[1][number]


Remembered = dict[bytes | None, int]
"""{map key: offset of its latest record} of the keys that the next pass needs, because a superseded record
stayed or a tombstone may be removed."""


class LatestOffsets:
    """Maps each map key to the offset of its latest record in the batches that were read. The keys of
    ``remembered`` are in the map from the beginning.

    ``end_offset`` (exclusive) is the end of the last batch that was read. ``is_full``: the map has at least
    the maximum number of keys, so no further batch should be read.
    """

    __slots__ = ("_max_keys", "end_offset", "offsets")

    def __init__(self, max_keys: int, remembered: Remembered) -> None:
        """``remembered`` are the keys that the previous pass stored for this one. ``max_keys`` limits the
        number of other keys."""
        self._max_keys = max(max_keys, 1) + len(remembered)
        self.offsets: dict[bytes | None, int] = dict(remembered)
        self.end_offset = NO_OFFSET

    @property
    def is_full(self) -> bool:
        return len(self.offsets) >= self._max_keys

    def take(self, batch: memoryview, facts: Facts) -> None:
        """Read a complete batch below ``facts.end_offset``. Raises CorruptBatchError if it is damaged."""
        header = check(batch)
        self.end_offset = header.next_offset
        if header.is_control or (
            header.is_transactional and facts.is_aborted(header.producer_id, header.base_offset)
        ):
            return
        keys = _readable_keys(batch, header)
        if keys is not None:
            offsets = range(header.base_offset, header.next_offset)
            self.offsets.update(zip(_map_keys(keys), offsets, strict=True))
            self.offsets.pop(None, None)


def _readable_keys(batch: memoryview, header: BatchHeader) -> list[bytes | None] | None:
    """Return the keys of a batch, or None if no record has a key or the keys cannot be read."""
    if not header.is_columnar:
        return None
    try:
        return RecordBatch.checked(header, batch).keys()
    except KafkaliteError:  # the CRC is valid, so the producer wrote a malformed batch
        return None


class Written(NamedTuple):
    """A batch of the new segment. The time index uses ``max_timestamp_ms``; ``next_offset`` is exclusive."""

    data: Buffer
    base_offset: int
    next_offset: int
    max_timestamp_ms: int


class Horizons(NamedTuple):
    """The offsets (exclusive) below which tombstones and commit markers may be removed."""

    tombstones: int
    markers: int


class Rewriter:
    """Takes every batch of the segments in order, and returns the batches that stay.

    ``has_changed``: whether the output has differed from the input since the caller last set the field to
    False, except for merged gap batches. ``removed_records``: the number of removed records.
    """

    def __init__(
        self, facts: Facts, latest: LatestOffsets, end_offset: int, horizons: Horizons, remembered: Remembered
    ) -> None:
        """Batches at or above ``end_offset``, which is a batch boundary, stay unchanged, except gap batches,
        which may be merged.

        A tombstone may be removed only if it is in ``remembered``: only then does ``latest`` contain its key,
        so that this pass also removes every older record of the key.
        """
        self._facts = facts
        self._remembered = remembered
        self.remembered: Remembered = {}  #: the tombstones and markers found, for the next pass
        self._latest = latest.offsets
        self._end_offset = end_offset
        self._horizons = horizons
        self._gap: tuple[int, int, int] | None = None  # pending: base offset, next offset, leader epoch
        # Set if superseded records of unknown keys stay: a batch is unreadable, or too many keys are pinned.
        self._keeps_tombstones = False
        self._held: set[int] = set()  # producers with unchanged transactional batches before their marker
        self._pinned: set[bytes | None] = set()  # keys of which a superseded record stays
        self.has_changed = False
        self.removed_records = 0

    def take(self, batch: memoryview) -> list[Written]:
        """Take one batch. Return the output batches that are now complete, if any. Raises CorruptBatchError
        if the batch is damaged."""
        header = check(batch)
        if is_gap(header):
            return self._take_gap(batch, header)
        if header.base_offset >= self._end_offset:
            return self._whole(batch, header)
        if header.is_control:
            return self._take_marker(batch, header)
        is_kept = header.base_offset in self._facts.kept_batches
        if header.is_transactional and self._facts.is_aborted(header.producer_id, header.base_offset):
            return self._whole(batch, header) if is_kept else self._remove(header)
        if not header.is_columnar:
            return self._opaque(batch, header)
        try:
            return self._take_records(batch, header, is_kept=is_kept)
        except KafkaliteError:  # the CRC is valid, so the producer wrote a malformed batch
            return self._opaque(batch, header)

    def flush(self) -> list[Written]:
        """End the pending gap, and return it as gap batches; empty if there is none. The caller must call
        this at the end of each new segment."""
        gap, self._gap = self._gap, None
        if gap is None:
            return []
        base_offset, next_offset, leader_epoch = gap
        return [
            Written(
                build_gap(first, min(first + MAX_RECORDS_PER_BATCH, next_offset) - first, leader_epoch),
                first,
                min(first + MAX_RECORDS_PER_BATCH, next_offset),
                NO_TIMESTAMP,
            )
            for first in range(base_offset, next_offset, MAX_RECORDS_PER_BATCH)
        ]

    def _skip(
        self, base_offset: int, next_offset: int, leader_epoch: int, replaced: ReplacedBatch | None = None
    ) -> list[Written]:
        """Add the removed offsets [``base_offset``, ``next_offset``) to the pending gap. Return the gap
        batches that are now complete.

        If the leader epoch of the pending gap differs, that gap ends, and the offsets begin the next one. If
        ``replaced`` is given, the pending gap ends, and the offsets become a gap of their own, which
        describes ``replaced``.
        """
        if replaced is not None:
            data = build_gap(base_offset, next_offset - base_offset, leader_epoch, replaced)
            return [*self.flush(), Written(data, base_offset, next_offset, NO_TIMESTAMP)]
        gap = self._gap
        if gap is not None and gap[2] == leader_epoch:
            self._gap = (gap[0], next_offset, leader_epoch)
            return []
        before = self.flush()
        self._gap = (base_offset, next_offset, leader_epoch)
        return before

    def _take_gap(self, batch: memoryview, header: BatchHeader) -> list[Written]:
        replaced = replaced_by(batch, 0, header.attributes)
        if replaced is not None:
            if replaced.base_offset in self._facts.kept_batches:
                return self._whole(batch, header)
            self.has_changed = True
        return self._skip(header.base_offset, header.next_offset, header.leader_epoch)

    def _remove(self, header: BatchHeader, replaced: ReplacedBatch | None = None) -> list[Written]:
        self.has_changed = True
        if not header.is_control:
            self.removed_records += header.record_count
        return self._skip(header.base_offset, header.next_offset, header.leader_epoch, replaced)

    def _whole(self, batch: Buffer, header: BatchHeader) -> list[Written]:
        written = Written(batch, header.base_offset, header.next_offset, header.max_timestamp_ms)
        return [*self.flush(), written]

    def _take_marker(self, batch: memoryview, header: BatchHeader) -> list[Written]:
        is_held = header.producer_id in self._held
        self._held.discard(header.producer_id)
        if (
            is_held
            or header.base_offset in self._facts.kept_markers
            or header.base_offset >= self._horizons.markers
            or not parse_marker(batch).is_commit
        ):
            return self._whole(batch, header)
        return self._remove(header)

    def _opaque(self, batch: memoryview, header: BatchHeader) -> list[Written]:
        self._keeps_tombstones = True
        return self._keep(batch, header, is_kept=True)

    def _keep(self, batch: memoryview, header: BatchHeader, *, is_kept: bool) -> list[Written]:
        """Keep all records of a batch. Unless ``is_kept``, clear the producer id and the transactional bit of
        a transactional batch."""
        if not header.is_transactional:
            return self._whole(batch, header)
        if is_kept:
            self._held.add(header.producer_id)
            return self._whole(batch, header)
        self.has_changed = True
        plain = bytearray(batch)
        stamp_producer(plain, NO_PRODUCER_ID, NO_PRODUCER_EPOCH, NO_SEQUENCE)
        return self._whole(plain, header)

    def _take_records(self, batch: memoryview, header: BatchHeader, *, is_kept: bool) -> list[Written]:
        records = RecordBatch.checked(header, batch)
        keys = records.keys()
        if keys is None:
            return self._keep(batch, header, is_kept=is_kept)
        mapped = _map_keys(keys)
        latest = self._latest.get
        stays = [
            latest(key, NO_OFFSET) <= offset
            for key, offset in zip(mapped, range(header.base_offset, header.next_offset), strict=True)
        ]
        columns: Columns | None = None
        if header.base_offset < self._horizons.tombstones and not self._keeps_tombstones:
            columns = records.columns()
            if None in columns.values:
                self._drop_tombstones(stays, mapped, columns)
        if all(stays):
            return self._keep(batch, header, is_kept=is_kept)
        replaced = ReplacedBatch.of(header) if is_kept else None
        if not (is_kept and header.is_transactional):
            if not any(stays) and (replaced is None or len(batch) > DESCRIBED_GAP_BYTES):
                return self._remove(header, replaced)
            pieces = self._pieces(batch, header, columns or records.columns(), stays, replaced)
            if pieces is not None:
                self.has_changed = True
                self.removed_records += stays.count(False)
                return pieces
        for key, stay in zip(mapped, stays, strict=True):
            if not stay:
                self._pin(key)
        return self._keep(batch, header, is_kept=is_kept)

    def _pin(self, key: bytes | None) -> None:
        """Record that the log still contains a superseded record of ``key``, so that the key's tombstone
        stays."""
        if len(self._pinned) < _MAX_PINNED_KEYS:
            self._pinned.add(key)
            self._remember(key, self._latest[key])
        elif key not in self._pinned:
            self._keeps_tombstones = True

    def _drop_tombstones(self, stays: list[bool], mapped: Sequence[bytes | None], columns: Columns) -> None:
        horizon = self._horizons.tombstones
        rows = zip(columns.values, mapped, columns.offsets, strict=True)
        for number, (value, key, offset) in enumerate(rows):
            if value is not None or key is None or offset >= horizon or not stays[number]:
                continue
            if key not in self._pinned and self._remembered.get(key) == offset:
                stays[number] = False
            else:
                self._remember(key, offset)

    def _remember(self, key: bytes | None, offset: int) -> None:
        if len(self.remembered) < _MAX_REMEMBERED:
            self.remembered[key] = offset

    def _pieces(
        self,
        batch: memoryview,
        header: BatchHeader,
        columns: Columns,
        stays: Sequence[bool],
        replaced: ReplacedBatch | None,
    ) -> list[Written] | None:
        """Return the output for a batch of which only the records with True in ``stays`` remain: a batch for
        each run of such records, and the gap batches that are complete. Return None if the output would not
        be smaller than the batch. ``replaced``, if given, becomes the description of the first gap."""
        runs = list(_runs(stays))
        gap_count = len(runs) - 1 + (not stays[0]) + (not stays[-1])
        size_bytes = gap_count * GAP_BYTES
        if replaced is not None:
            size_bytes += DESCRIBED_GAP_BYTES - GAP_BYTES
        if size_bytes + len(runs) * GAP_BYTES >= len(batch):
            return None
        pieces: list[Written] = []
        for start, end in runs:
            piece = _piece(header, columns, start, end)
            size_bytes += len(piece.data)
            pieces.append(piece)
        if size_bytes >= len(batch):
            return None
        written: list[Written] = []
        offset = header.base_offset
        for piece in pieces:
            if piece.base_offset > offset:
                written += self._skip(offset, piece.base_offset, header.leader_epoch, replaced)
                replaced = None
            written += self.flush()
            written.append(piece)
            offset = piece.next_offset
        if offset < header.next_offset:
            written += self._skip(offset, header.next_offset, header.leader_epoch, replaced)
        return written


def _runs(stays: Sequence[bool]) -> Iterable[tuple[int, int]]:
    """Yield (start, end) of each run of True values. Ends are exclusive."""
    start: int | None = None
    for number, stay in enumerate(stays):
        if stay and start is None:
            start = number
        elif not stay and start is not None:
            yield start, number
            start = None
    if start is not None:
        yield start, len(stays)


def _piece(header: BatchHeader, columns: Columns, start: int, end: int) -> Written:
    """Return the records with indexes [``start``, ``end``) as a batch without a producer id."""
    timestamps = columns.timestamps
    base_offset = header.base_offset + start
    data = build_batch(
        columns.values[start:end],
        None if columns.keys is None else columns.keys[start:end],
        timestamps if isinstance(timestamps, int) else timestamps[start:end],
        None if columns.headers is None else columns.headers[start:end],
        header.codec,
        timestamp_type=header.timestamp_type,
        base_offset=base_offset,
        leader_epoch=header.leader_epoch,
    )
    max_timestamp_ms = timestamps if isinstance(timestamps, int) else max(timestamps[start:end])
    return Written(data, base_offset, header.base_offset + end, max_timestamp_ms)
