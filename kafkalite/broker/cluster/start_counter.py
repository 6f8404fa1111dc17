"""Counts the starts of a node in its data directory, so that an older copy of the directory is noticed (R51).

The count is durable before the process registers. A directory that was restored from an earlier time has a
lower count than the controller knows.
"""

# Tests: tests/broker/test_cluster_parts.py

from __future__ import annotations

import logging
from typing import Final

from kafkalite.errors import CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.storage.checkpoints import decode_lines, encode_lines
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join

logger = logging.getLogger(__name__)

START_COUNT_FILE: Final = "start-count"
_KIND: Final = "start-count"


def count_start(filesystem: FileSystem, directory: str) -> int:
    """Add this start to the count, durably, and return it; 1 in a new directory.

    An unreadable file counts as none: the controller then treats the directory as an older copy, and its
    replicas are filled again. Raises OSError, DiskFullError.
    """
    path = join(directory, START_COUNT_FILE)
    count = 0
    if filesystem.exists(path):
        try:
            (line,) = decode_lines(_KIND, filesystem.read_bytes(path), path)
            count = int(line)
        except (CorruptLogError, ValueError) as error:
            logger.error("count of starts is unreadable %s", Fields(path=path, error=error))
    count += 1
    filesystem.write_atomically(path, encode_lines(_KIND, [str(count)]))
    return count
