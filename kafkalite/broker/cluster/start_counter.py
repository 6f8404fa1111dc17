"""Counts the starts of a node in its data directory, so that an older copy of it is detected (R51).

The count is synced before the process registers. A directory that was restored from a backup has a lower
count than the controller has recorded.
"""

# Tests: tests/broker/test_cluster_parts.py

from __future__ import annotations

import logging

from kafkalite.errors import CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.storage.checkpoints import START_COUNT, decode_lines, encode_lines
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import START_COUNT_FILE, join

logger = logging.getLogger(__name__)


def count_start(filesystem: FileSystem, directory: str) -> int:
    """Increment the count of starts, sync it, and return it; 1 in a new directory.

    An unreadable file counts as 0. Then the controller takes the directory for an older copy, and the node's
    replicas fetch all records again. Raises OSError, DiskFullError.
    """
    path = join(directory, START_COUNT_FILE)
    count = 0
    if filesystem.exists(path):
        try:
            (line,) = decode_lines(START_COUNT, filesystem.read_bytes(path), path)
            count = int(line)
        except (CorruptLogError, ValueError) as error:
            logger.error("count of starts is unreadable %s", Fields(path=path, error=error))
    count += 1
    filesystem.write_atomically(path, encode_lines(START_COUNT, [str(count)]))
    return count
