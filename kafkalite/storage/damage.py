"""Damage: describes a log whose records are lost or cannot be trusted, and finds its intact batches.

A damaged log is read-only up to its sound end. The local node only marks it. In a cluster the controller
decides how it is repaired, and on a single node the operator (R24).
"""

# Tests: tests/storage/test_log.py

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.errors import CorruptBatchError
from kafkalite.limits import MIB
from kafkalite.records.header import HEADER_BYTES, MAGIC, BatchHeader, check, parse_header

#: The offline command that accepts the loss of the records that cannot be read.
ACCEPT_COMMAND: Final = "kl log accept-loss"


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage of one log.

    ``sound_end_offset`` is exclusive: the records below it are intact and can be read.
    ``records_in_doubt`` is the number of offsets from there on that are known to have been written, and
    that no intact batch has; None if it is unknown.
    """

    cause: str
    sound_end_offset: int
    records_in_doubt: int | None
    hint: str

    def __str__(self) -> str:
        count = "an unknown number of" if self.records_in_doubt is None else str(self.records_in_doubt)
        state = f"sound below offset {self.sound_end_offset}, {count} records in doubt"
        return f"{self.cause}; {state}; {self.hint}"


def repair_hint(directory: str) -> str:
    """Return what an operator can do about a damaged log that has no other replica."""
    return f"restore {directory}, or stop the broker and accept the loss with '{ACCEPT_COMMAND} {directory}'"


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
    first_epoch: int  #: the leader epoch of the first batch
    last_epoch: int


#: base offset, batch length, magic, last offset delta: enough to skip most bytes that are not a batch.
_CANDIDATE: Final = struct.Struct(">qi4xb6xi")
_MAGIC_POSITION: Final = 16
#: An offset farther ahead is not plausible behind a damaged batch of the same log.
_MAX_DISTANCE: Final = 1 << 40


def find_batch(view: memoryview, position: int, from_offset: int) -> Found | None:
    """Return the first intact batch at or after ``position`` with a base offset of at least ``from_offset``.

    Any alignment is tried, since the length of a damaged batch cannot be trusted. Zeros are skipped fast.
    """
    magic = bytes((MAGIC,))
    begin, length = position, len(view)
    while begin + _MAGIC_POSITION < length:
        part = bytes(view[begin + _MAGIC_POSITION : begin + _MAGIC_POSITION + MIB])
        at = part.find(magic)
        while at >= 0:
            header = _batch_at(view, begin + at, from_offset)
            if header is not None:
                return Found(begin + at, header)
            at = part.find(magic, at + 1)
        begin += MIB
    return None


def _batch_at(view: memoryview, position: int, from_offset: int) -> BatchHeader | None:
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
    """Return the header of the first batch, or None if it is damaged. The CRC does not cover its base
    offset."""
    return _batch_at(view, 0, 0)


def intact_runs(view: memoryview, position: int, from_offset: int) -> Iterator[Intact]:
    """Yield the runs of intact batches at or after ``position``, in order of offsets.

    ``from_offset`` is the offset that is expected at ``position``. The CRC does not cover a batch's base
    offset, so three kinds of batch are skipped although their CRC is correct: a batch that directly follows
    another one but has a higher offset than expected, because its base offset is damaged; one whose offset is
    higher than expected and that a batch with a lower offset follows, for the same reason; and batches with
    lower offsets than expected, which are copies of earlier batches.
    """
    found = find_batch(view, position, from_offset)
    while found is not None:
        first, header = found.position, found.header
        if header.base_offset > from_offset:
            behind = _batch_at(view, first + header.length_bytes, from_offset)
            if first == position or (behind is not None and behind.base_offset <= header.base_offset):
                found = find_batch(view, first + 1, from_offset)
                continue
        end, end_offset, last_epoch = first, header.base_offset, header.leader_epoch
        following: BatchHeader | None = header
        while following is not None and following.base_offset == end_offset:
            end += following.length_bytes
            end_offset, last_epoch = following.next_offset, following.leader_epoch
            following = _batch_at(view, end, end_offset)
        yield Intact(first, end, header.base_offset, end_offset, header.leader_epoch, last_epoch)
        position, from_offset = end, end_offset
        found = find_batch(view, position, from_offset)


def is_complete(view: memoryview, position: int, offset: int) -> bool:
    """Whether all bytes of the bad batch at ``position`` were written, so that no crash cut it off.

    After an interrupted write, the rest of the batch is missing, or zero up to the end of the file. A batch
    with a lower offset than ``offset``, the next offset of the log, is a copy of an earlier batch and does
    not count.
    """
    rest = bytes(view[position:]).rstrip(b"\0")
    try:
        header = parse_header(view, position)
    except CorruptBatchError:
        return len(rest) >= HEADER_BYTES
    return header.base_offset >= offset and len(rest) >= header.length_bytes
