"""Replaces segments by a compacted segment with the same offsets. A crash leaves the old or the new segments.

The new segment is written and synced under a temporary name. Then these steps follow::

    rename it to <base offset>-<next offset>.swap, sync the directory       the swap is decided from here on
    unlink the other segments of these offsets and all their indexes, sync the directory
    rename it to <base offset>.log, replacing the old one, sync the directory

If a start finds a ``.swap`` file, it repeats the second and third step. The second sync ensures that no old
segment reappears beside the new one after a crash.
"""

# Tests: tests/storage/test_compaction.py

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kafkalite.errors import CorruptBatchError, CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.records.header import check, total_length
from kafkalite.storage import layout
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)


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
    truncations: int  #: the log's truncation count when the old segments were read
    is_decided: bool = False
    is_done: bool = False

    def run(self) -> None:
        """Replace the old segments by the new one, which is complete and synced at ``temporary_path``. Raises
        OSError, DiskFullError."""
        fs, new = self.fs, self.new
        name = layout.swap_file_name(new.base_offset, new.next_offset)
        path = layout.join(self.directory, name)
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
        _take_place(fs, self.directory, name, [one for one in names if fs.exists(self._join(one))])

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

    Raises CorruptLogError, with nothing changed, if a ``.swap`` file is damaged.
    """
    swaps = [name for name in names if layout.parse_swap_file_name(name) is not None]
    if not swaps:
        return names
    for name in swaps:
        _check(fs, directory, name)
    for name in swaps:
        swap = layout.parse_swap_file_name(name)
        assert swap is not None
        old = [
            one
            for one in names
            if (parsed := layout.parse_segment_file_name(one)) is not None
            and swap.base_offset <= parsed.base_offset < swap.next_offset
        ]
        logger.warning("compaction finished %s", Fields(path=layout.join(directory, name)))
        _take_place(fs, directory, name, old)
    return fs.list_dir(directory)


def _check(fs: FileSystem, directory: str, name: str) -> None:
    """Check every batch of the segment, which must be intact because it was synced before the rename."""
    swap = layout.parse_swap_file_name(name)
    assert swap is not None
    path = layout.join(directory, name)
    file = fs.open(path)
    view = file.map(file.size())
    position, offset = 0, swap.base_offset
    try:
        while position < len(view):
            length = total_length(view, position)
            header = check(view[position : position + length])
            if header.base_offset != offset:
                raise CorruptBatchError(f"base offset {header.base_offset}")
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
