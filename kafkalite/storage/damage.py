"""Damage: describes a log whose records are lost or cannot be trusted, and finds its intact batches.

A damaged log can be read up to its sound end, but not written. The local node only marks the log as damaged.
In a cluster the controller decides how the log is repaired; on a single node the operator does (R24).
"""

# Tests: tests/storage/test_log.py

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.errors import CorruptBatchError
from kafkalite.limits import MIB
from kafkalite.records.header import HEADER_BYTES, MAGIC, BatchHeader, check, parse_header, scan, total_length

#: The offline command that accepts the loss of the records that cannot be read.
ACCEPT_COMMAND: Final = "kl log accept-loss"


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage of one log.

    ``sound_end_offset`` is exclusive: the records below it are intact and can be read. ``records_in_doubt``
    is the number of offsets at or above it that are known to have been written, but whose records are lost or
    cannot be trusted; None if it is unknown. If the end of the log is lost, more may be missing: the records
    that were written after the last saved recovery point.
    """

    cause: str
    sound_end_offset: int
    records_in_doubt: int | None
    hint: str

    def __str__(self) -> str:
        return f"{self.summary}; {self.hint}"

    @property
    def known_end_offset(self) -> int:
        """An offset that the log end is known to have reached. The log may have had more records."""
        return self.sound_end_offset + (self.records_in_doubt or 0)

    @property
    def summary(self) -> str:
        """The description without the hint."""
        count = (
            "an unknown number of" if self.records_in_doubt is None else f"at least {self.records_in_doubt}"
        )
        return f"{self.cause}; sound below offset {self.sound_end_offset}, {count} records in doubt"


def repair_hint(directory: str, leader_epoch: int | None = None) -> str:
    """Return advice for the operator of a damaged log that has no other replica. ``leader_epoch``: the leader
    epoch of the partition if the log has batches of a later one, else None."""
    command = f"{ACCEPT_COMMAND} {directory}"
    if leader_epoch is not None:
        command += f" --leader-epoch {leader_epoch}"
    return f"restore {directory}, or stop the broker and accept the loss with '{command}'"


class Found(NamedTuple):
    """An intact batch, and its position in the file."""

    position: int
    header: BatchHeader


class Intact(NamedTuple):
    """Adjacent intact batches: offsets [start_offset, end_offset) at positions [position, end)."""

    position: int
    end: int
    start_offset: int
    end_offset: int
    last_position: int  #: of the last batch


#: base offset, batch length, magic, last offset delta: enough to skip most bytes that are not a batch.
_CANDIDATE: Final = struct.Struct(">qi4xb6xi")
_MAGIC_POSITION: Final = 16
_OFFSET_BYTES: Final = 8
#: After damage, a base offset that is farther ahead than this is not plausible.
_MAX_DISTANCE: Final = 1 << 40


def find_batch(view: memoryview, position: int, from_offset: int) -> Found | None:
    """Return the first intact batch at or after ``position`` with a base offset in [``from_offset``,
    ``from_offset`` + _MAX_DISTANCE); None if there is none.

    Every byte position is tried, since the length field of a damaged batch cannot be trusted. Zeros are
    skipped fast.
    """
    magic = bytes((MAGIC,))
    begin, length = position, len(view)
    while begin + _MAGIC_POSITION < length:
        part = bytes(view[begin + _MAGIC_POSITION : begin + _MAGIC_POSITION + MIB])
        at = part.find(magic)
        while at >= 0:
            header = batch_at(view, begin + at, from_offset)
            if header is not None:
                return Found(begin + at, header)
            at = part.find(magic, at + 1)
        begin += MIB
    return None


def batch_at(view: memoryview, position: int, from_offset: int) -> BatchHeader | None:
    """Return the header of the batch at ``position`` if the batch is intact and its base offset is in
    [``from_offset``, ``from_offset`` + _MAX_DISTANCE); else None."""
    if position + _CANDIDATE.size > len(view):
        return None
    base_offset, _, _, last_offset_delta = _CANDIDATE.unpack_from(view, position)
    if not from_offset <= base_offset < from_offset + _MAX_DISTANCE or last_offset_delta < 0:
        return None
    try:
        header = parse_header(view, position)
        return check(view[position : position + header.length_bytes])
    except CorruptBatchError:
        return None


def head_of(view: memoryview) -> BatchHeader | None:
    """Return the header of the first batch. Return None if the batch is damaged or its base offset is
    _MAX_DISTANCE or more. The base offset may be wrong, because the CRC does not cover it."""
    return batch_at(view, 0, 0)


def intact_runs(view: memoryview, position: int, from_offset: int) -> Iterator[Intact]:
    """Yield the runs of intact batches at or after ``position``, in order of offsets.

    ``from_offset`` is the offset that is expected at ``position``. At the end of a run, the end offset of the
    run is expected. The CRC does not cover the base offset of a batch, so some batches with a correct CRC are
    skipped:

    * A batch with a lower base offset than expected is a copy of an earlier batch, or misplaced (see
      ``misplaced_runs``).
    * If a batch has a higher base offset than expected, that offset may be damaged. The batch is skipped if
      it is directly followed by an intact batch whose base offset is at least the expected one and at most
      that of the skipped batch. It is also skipped if it lies where the expected batch should be and is not
      directly followed by an intact batch that continues it.
    """
    found = find_batch(view, position, from_offset)
    while found is not None:
        first, header = found.position, found.header
        if header.base_offset > from_offset:
            behind = batch_at(view, first + header.length_bytes, from_offset)
            is_continued = behind is not None and behind.base_offset == header.next_offset
            is_copy = behind is not None and behind.base_offset <= header.base_offset
            if is_copy or (first == position and not is_continued):
                found = find_batch(view, first + 1, from_offset)
                continue
        run = _run_at(view, found)
        yield run
        position, from_offset = run.end, run.end_offset
        found = find_batch(view, position, from_offset)


def misplaced_runs(
    view: memoryview, from_offset: int, runs: Sequence[Intact], end_offset: int
) -> list[Intact]:
    """Return the runs of intact batches that are at the wrong position in the file: they lie outside of
    ``runs``, the result of ``intact_runs``, and no other run has their offsets.

    The file should have the offsets [``from_offset``, ``end_offset``), or up to the end of the last run if
    that is higher. A batch with a damaged base offset looks like a misplaced one. So a run of a single batch
    is returned only if it ends at the end of these offsets, or if it fills completely, alone or with other
    single batches, a range of offsets that the other runs lack.
    """
    chosen, single = list(runs), list[Intact]()
    end_offset = max([end_offset, *(one.end_offset for one in runs)])
    ends = [0, *(one.end for one in runs)]
    for begin, end in zip(ends, [*(one.position for one in runs), len(view)], strict=True):
        position = begin
        while (found := find_batch(view[:end], position, from_offset)) is not None:
            run = _run_at(view[:end], found)
            position = run.end
            if run.end_offset <= end_offset:
                if run.last_position > run.position:
                    _insert(chosen, run)
                else:
                    single.append(run)
    chosen.sort(key=_start_of)
    single.sort(key=_start_of)
    starts = {*(one.start_offset for one in chosen), end_offset}
    bounds = {from_offset, *(one.end_offset for one in chosen)}
    chain: list[Intact] = []
    for run in single:
        if not chain or chain[-1].end_offset != run.start_offset:
            chain = []
            if run.start_offset not in bounds and run.end_offset != end_offset:
                continue
        chain.append(run)
        if run.end_offset in starts:
            for one in chain:
                _insert(chosen, one)
            chain = []
    known = set(runs)
    return [one for one in chosen if one not in known]


def _start_of(run: Intact) -> int:
    return run.start_offset


def _insert(chosen: list[Intact], run: Intact) -> None:
    """Insert ``run`` into ``chosen``, a list in order of offsets, unless it overlaps a run in the list."""
    at = bisect_right(chosen, run.start_offset, key=_start_of)
    if at and chosen[at - 1].end_offset > run.start_offset:
        return
    if at == len(chosen) or run.end_offset <= chosen[at].start_offset:
        chosen.insert(at, run)


def _run_at(view: memoryview, found: Found) -> Intact:
    """Return the run of adjacent intact batches that begins with ``found``."""
    end, end_offset, last = found.position, found.header.base_offset, found.position
    following: BatchHeader | None = found.header
    while following is not None and following.base_offset == end_offset:
        last = end
        end += following.length_bytes
        end_offset = following.next_offset
        following = batch_at(view, end, end_offset)
    return Intact(found.position, end, found.header.base_offset, end_offset, last)


def batch_placed_at(view: memoryview, position: int, offset: int) -> BatchHeader | None:
    """Return the header of the batch at ``position``, with ``offset`` as its base offset, if the batch is
    intact except for its base offset, which the CRC does not cover; else None."""
    try:
        batch = bytearray(view[position : position + total_length(view, position)])
        batch[:_OFFSET_BYTES] = offset.to_bytes(_OFFSET_BYTES, "big")
        return check(batch)
    except CorruptBatchError:
        return None


def is_complete(view: memoryview, position: int) -> bool:
    """Whether the damaged batch at ``position`` was written completely, so that no crash has cut it off.

    After an interrupted write, the rest of the batch is missing, or zero up to the end of the file.
    """
    rest = bytes(view[position:]).rstrip(b"\0")
    try:
        header = parse_header(view, position)
    except CorruptBatchError:
        return len(rest) >= HEADER_BYTES
    return len(rest) >= header.length_bytes


def is_copy(view: memoryview, position: int) -> bool:
    """Whether the bytes at ``position`` are a copy of an earlier batch of the segment, so that no record is
    lost if they are cut off."""
    try:
        header = parse_header(view, position)
    except CorruptBatchError:
        return False
    batch = view[position : position + header.length_bytes]
    return any(
        base_offset == header.base_offset and view[start : start + length] == batch
        for start, base_offset, _, _, length in scan(view, 0, position)
    )
