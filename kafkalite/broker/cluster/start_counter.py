"""Counts a node's starts in its data directory, and detects copies of the directory (R51, R59).

The count is synced before the process registers. If a directory is replaced by a copy that was made before
the last start, the count at the next start is not greater than the one that the controller has recorded.

The file of the count is a new one at each start, and ``start-file`` has its ``file_id``. In a copy of the
directory the ids differ, also in one that was made after the last start. The directory counts as a copy until
the node has caught up with the others, and after a kill between the two writes.
"""

# Tests: tests/broker/test_cluster_parts.py

from __future__ import annotations

import logging
from typing import NamedTuple

from kafkalite.errors import CorruptLogError, StorageExhaustedError
from kafkalite.log_fields import Fields
from kafkalite.storage.checkpoints import START_COUNT, START_FILE, decode_lines, encode_lines
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import START_COUNT_FILE, START_FILE_FILE, join

logger = logging.getLogger(__name__)

_COPIED = "a copy"  #: instead of a file id, until the copy is accepted


class Start(NamedTuple):
    """One start of a node."""

    number: int  #: 1 for the first start in the directory
    is_copy: bool  #: whether the directory was copied since the node last used it
    filesystem: FileSystem
    directory: str

    def accept_copy(self) -> None:
        """Take the directory for the original from now on. Call it when the node has caught up.

        An error is only logged: the next start then takes the directory for a copy again.
        """
        path = join(self.directory, START_COUNT_FILE)
        try:
            _write_id(self.filesystem, self.directory, self.filesystem.file_id(path))
        except (OSError, StorageExhaustedError) as error:
            logger.warning("copied data directory not accepted %s", Fields(path=self.directory, error=error))


def count_start(filesystem: FileSystem, directory: str) -> Start:
    """Increment the count of starts, and sync it.

    An unreadable file counts as 0. If the node has registered before, the controller then takes the directory
    for an older copy (R51). Raises OSError, DiskFullError.
    """
    path = join(directory, START_COUNT_FILE)
    count = _line_of(filesystem, path, START_COUNT)
    number = int(count) + 1 if count.isdecimal() else 1
    present_id = filesystem.file_id(path) if filesystem.exists(path) else ""
    is_copy = is_copied(_line_of(filesystem, join(directory, START_FILE_FILE), START_FILE), present_id)
    if is_copy:
        logger.warning("data directory was copied, missing voters are awaited %s", Fields(path=directory))
    filesystem.write_atomically(path, encode_lines(START_COUNT, [str(number)]))
    _write_id(filesystem, directory, _COPIED if is_copy else filesystem.file_id(path))
    return Start(number, is_copy, filesystem, directory)


def is_copied(known_id: str, present_id: str) -> bool:
    """Whether the count of starts is in another file than at the last start. An empty ``known_id`` is
    unknown."""
    return known_id not in ("", present_id)


def _line_of(filesystem: FileSystem, path: str, kind: str) -> str:
    """Return the line in a file; "" if there is no such file, or it is unreadable."""
    if not filesystem.exists(path):
        return ""
    try:
        (line,) = decode_lines(kind, filesystem.read_bytes(path), path)
    except (CorruptLogError, ValueError) as error:
        logger.error("count of starts is unreadable %s", Fields(path=path, error=error))
        return ""
    return line


def _write_id(filesystem: FileSystem, directory: str, file_id: str) -> None:
    filesystem.write_atomically(join(directory, START_FILE_FILE), encode_lines(START_FILE, [file_id]))
