"""A compacted segment takes the place of those whose offsets it has: so that a crash at any point leaves
either.

The new segment is written and synced under a temporary name. Then::

    rename it to <base offset>-<next offset>.swap, sync the directory       from here on the swap is decided
    unlink the other segments of these offsets, and all their indexes, sync the directory
    rename it to <base offset>.log, over the old one, sync the directory

A start that finds a ``.swap`` file takes the same steps again from the second on. The second sync is why no
segment can come back beside the new one that has its offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kafkalite.errors import CorruptBatchError, CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.records.header import check, total_length
from kafkalite.storage import layout
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)


class SwapWork:
    """One swap. ``run`` blocks, in any thread, while nobody else removes anything of the log.

    ``old`` are the segments to be replaced by ``new``, in order. ``is_decided``: it can't be taken back any
    more; ``is_done``: the log has taken the new segment over.
    """

    __slots__ = ("_directory", "_fs", "is_decided", "is_done", "new", "old", "temporary_path", "truncations")

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        old: Sequence[Segment],
        new: Segment,
        temporary_path: str,
        truncations: int,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self.old = list(old)
        self.new = new
        self.temporary_path = temporary_path
        self.truncations = truncations  #: of the log when the old segments were read
        self.is_decided = False
        self.is_done = False

    def run(self) -> None:
        """Raises OSError, DiskFullError. The synced new segment stands under ``temporary_path``."""
        fs, new = self._fs, self.new
        name = layout.swap_file_name(new.base_offset, new.next_offset)
        path = layout.join(self._directory, name)
        try:
            fs.rename(self.temporary_path, path)
        finally:
            self.is_decided = fs.exists(path)
        fs.sync_dir(self._directory)
        names = [
            layout.segment_file_name(segment.base_offset, suffix)
            for segment in self.old
            for suffix in layout.SEGMENT_SUFFIXES
        ]
        _take_place(fs, self._directory, name, [one for one in names if fs.exists(self._join(one))])

    def _join(self, name: str) -> str:
        return layout.join(self._directory, name)


def _take_place(fs: FileSystem, directory: str, swap_name: str, names: Sequence[str]) -> None:
    """From the second step on; ``names`` are the files of the old segments."""
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
    """Do what a crash has kept from being done; ``names`` are those in the directory. Returns those there
    then.

    Raises CorruptLogError, with nothing changed, if a decided segment is not intact.
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
    """Every batch of the segment: it was synced before it had this name, so it must be whole."""
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
