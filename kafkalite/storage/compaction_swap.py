"""Replaces segments by a compacted segment with the same offsets. A crash leaves the old or the new segments.

The new segment is written and synced under a temporary name. Then these steps follow::

    rename it to <base offset>-<next offset>-<replaced>-<content>.swap      the swap is decided
    sync the directory                                                      from here on
    unlink the other segments of these offsets and all their indexes, sync the directory
    rename it to <base offset>.log, replacing the old one, sync the directory

If a start finds a ``.swap`` file, it repeats the steps in the last two lines. The sync between them ensures
that no old segment reappears beside the new one after a crash.

``<replaced>`` is a digest of the log's directory name and of all batch headers of the first old segment, and
``<content>`` one of the new segment. The headers have the CRCs of the batches. So a swap file of another log,
or an older one whose segments have been replaced since, is recognized and set aside (R42). The cleanup policy
of the topic is not compared, because it may have changed after the swap was decided.
"""

# Tests: tests/storage/test_compaction.py

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import CorruptBatchError, CorruptLogError, WrongFileTypeError
from kafkalite.log_fields import Fields
from kafkalite.records.header import HEADER_BYTES, check, scan, total_length
from kafkalite.storage import layout
from kafkalite.storage.filesystem import Buffer, FileSystem, damaged_name
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)

_DIGEST_BYTES: Final = 8


class SegmentDigest:
    """A digest of the batch headers of a segment, including the CRCs. Names of swap files contain it."""

    __slots__ = ("_hash",)

    def __init__(self, log_name: str = "") -> None:
        """``log_name`` is the name of the log's directory if the digest is to identify the log, too."""
        self._hash = hashlib.blake2b(log_name.encode(), digest_size=_DIGEST_BYTES)

    def take(self, batch: Buffer) -> None:
        """Add the next batch."""
        self._hash.update(batch[:HEADER_BYTES])

    @property
    def value(self) -> str:
        """The digest of the batches so far: 16 hex digits."""
        return self._hash.hexdigest()


@dataclass(slots=True, eq=False)
class SwapWork:
    """One swap. ``run`` blocks and may run in any thread. Meanwhile nothing else may remove the log's files.

    ``old`` are the segments that ``new`` replaces, in order. ``is_decided``: the swap can no longer be
    undone. ``is_done``: the log uses the new segment.
    """

    fs: FileSystem
    directory: str
    old: list[Segment]
    new: Segment
    temporary_path: str
    swap_name: str  #: the name of the swap file
    truncations: int  #: the log's truncation count when the old segments were read
    is_decided: bool = False
    is_done: bool = False

    def run(self) -> None:
        """Replace the old segments by the new one, which is complete and synced at ``temporary_path``. Raises
        OSError, StorageExhaustedError."""
        fs = self.fs
        path = layout.join(self.directory, self.swap_name)
        try:
            fs.rename(self.temporary_path, path)
        finally:
            self.is_decided = fs.exists(path)
        fs.sync_dir(self.directory)
        names = [
            layout.segment_file_name(segment.base_offset, suffix)
            for segment in self.old
            for suffix in layout.SEGMENT_SUFFIXES
        ]
        _take_place(fs, self.directory, self.swap_name, [one for one in names if fs.exists(self._join(one))])

    def _join(self, name: str) -> str:
        return layout.join(self.directory, name)


def _take_place(fs: FileSystem, directory: str, swap_name: str, names: Sequence[str]) -> None:
    """Unlink the files ``names`` of the old segments, then give the swap file its final name. The directory
    is synced after each of the two steps."""
    swap = layout.parse_swap_file_name(swap_name)
    assert swap is not None
    target = layout.segment_file_name(swap.base_offset, layout.LOG_SUFFIX)
    for name in reversed(names):
        if name != target:
            fs.unlink(layout.join(directory, name))
    fs.sync_dir(directory)
    fs.rename(layout.join(directory, swap_name), layout.join(directory, target))
    fs.sync_dir(directory)


def finish_swaps(fs: FileSystem, directory: str, names: list[str]) -> list[str]:
    """Complete the swaps that a crash interrupted. Takes and returns the names of the files in the directory.

    A ``.swap`` file for which ``swap_problem`` returns a problem is renamed to a name with ``.damaged-``, and
    the segments stay. Raises the errors of ``swap_problem``, with that file and the segments unchanged.
    """
    for name in [one for one in names if layout.parse_swap_file_name(one) is not None]:
        swap = layout.parse_swap_file_name(name)
        assert swap is not None
        path = layout.join(directory, name)
        problem = swap_problem(fs, directory, name, names)
        if problem is not None:
            kept = damaged_name(fs, path)
            fs.rename(path, kept)
            fs.sync_dir(directory)
            logger.error("compacted segment refused %s", Fields(path=path, kept=kept, problem=problem))
        else:
            logger.warning("compaction finished %s", Fields(path=path))
            old = [one for one in names if _replaces(swap, layout.parse_segment_file_name(one))]
            _take_place(fs, directory, name, old)
        names = fs.list_dir(directory)
    return names


def swap_problem(fs: FileSystem, directory: str, name: str, names: Sequence[str]) -> str | None:
    """Return why the swap of the file ``name`` must not be completed, or None if it must (R42).

    ``names`` are the names of all files in the directory. A swap must be completed if the name of its file
    identifies the log, the first segment to be replaced and the batches of the file. The first segment stays
    until the last step of a swap, so it is there after every crash.

    Raises CorruptLogError if the swap must not be completed, but segments are missing whose records only this
    file may have; OSError.
    """
    swap = layout.parse_swap_file_name(name)
    assert swap is not None
    path = layout.join(directory, name)
    parsed = [one for one in map(layout.parse_segment_file_name, names) if one is not None]
    bases = sorted(one.base_offset for one in parsed if one.suffix == layout.LOG_SUFFIX)
    old = [one for one in bases if swap.base_offset <= one < swap.next_offset]
    ends: list[int] = []
    replaced = ""
    for base_offset in old:
        digest = SegmentDigest(layout.name_of(directory))
        old_path = layout.join(directory, layout.segment_file_name(base_offset, layout.LOG_SUFFIX))
        ends.append(_read_headers(fs, old_path, base_offset, digest))
        if base_offset == swap.base_offset:
            replaced = digest.value
    following = [one for one in bases if old and one > old[0]]
    is_whole = all(end == base for end, base in zip(ends, following, strict=False))
    if not replaced or replaced != swap.replaced:
        problem = "it was not written to replace the segment that is there"
        if is_whole:
            return problem
        raise CorruptLogError(path=path, position=0, expected="the segments that are missing", actual=problem)
    try:
        _check(fs, path, swap)
    except CorruptLogError as error:
        if is_whole and ends[-1] >= swap.next_offset:
            return error.message
        raise
    return None


def _replaces(swap: layout.SwapFileName, file: layout.SegmentFileName | None) -> bool:
    return file is not None and swap.base_offset <= file.base_offset < swap.next_offset


def _read_headers(fs: FileSystem, path: str, offset: int, digest: SegmentDigest) -> int:
    """Add the batches of a segment file to ``digest``, as far as they are contiguous from ``offset`` on.
    Return the offset after the last one. Contents are not checked."""
    try:
        file = fs.open(path)
    except WrongFileTypeError:
        return offset
    view = file.map(file.size())
    for position, base_offset, last_delta, _, length in scan(view, 0, len(view)):
        if base_offset != offset:
            break
        digest.take(view[position : position + length])
        offset += last_delta + 1
    file.close()
    return offset


def _check(fs: FileSystem, path: str, swap: layout.SwapFileName) -> None:
    """Check every batch of the segment, which must be intact because it was synced before the rename. Raises
    CorruptLogError."""
    try:
        file = fs.open(path)
    except WrongFileTypeError as error:
        raise CorruptLogError(path=path, position=0, expected="a file", actual=error.actual) from error
    view = file.map(file.size())
    position, offset, digest = 0, swap.base_offset, SegmentDigest()
    try:
        while position < len(view):
            length = total_length(view, position)
            batch = view[position : position + length]
            header = check(batch)
            if header.base_offset != offset:
                raise CorruptBatchError(f"base offset {header.base_offset}")
            digest.take(batch)
            position += length
            offset = header.next_offset
    except CorruptBatchError as error:
        raise CorruptLogError(
            path=path,
            position=position,
            expected=f"an intact batch with offset {offset}",
            actual=error.message,
        ) from error
    finally:
        file.close()
    if offset != swap.next_offset:
        raise CorruptLogError(
            path=path,
            position=position,
            expected=f"batches up to {swap.next_offset}",
            actual=f"the end at {offset}",
        )
    if digest.value != swap.content:
        raise CorruptLogError(
            path=path, position=0, expected="the batches that the name identifies", actual="others"
        )
