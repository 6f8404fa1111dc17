"""The file with the recovery points of all logs of a data directory.

The file begins with a block that has every point. Changes are appended as further blocks, each with its own
CRC, and synced; the file is replaced as a whole when the appended blocks have become longer than the first.
So a write costs what has changed, however many logs there are.

If a block cannot be read, its points are missing: recovery then reads those logs completely (R24, R25).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final

from kafkalite.errors import StorageExhaustedError
from kafkalite.limits import KIB
from kafkalite.log_fields import Fields
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import RecoveryPoint, decode_recovery_points, encode_recovery_points
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.sync_work import SyncWork

logger = logging.getLogger(__name__)

#: The appended blocks may reach this size, or that of the first block, before the file is replaced.
MIN_APPENDED_BYTES: Final = 64 * KIB

#: A point, or the sync that moved it there; None removes the log.
Change = SyncWork | RecoveryPoint | None


class RecoveryPointsFile:
    """Reads and writes ``recovery-points``. ``write`` may run in any thread; calls wait for each other.

    Invariant: ``points`` are those in the file, unless the last write has failed; then the next write
    replaces the file.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._path = layout.join(directory, layout.RECOVERY_POINTS_FILE)
        self._size_bytes = self._first_bytes = 0
        self._is_stale = True  # the file must be replaced
        self.has_failed = False  #: the last write has failed
        self._lock = threading.Lock()
        self.points: dict[str, RecoveryPoint] = {}

    def open(self) -> None:
        """Read the file. An unreadable part is reported, and a copy of the file is kept. Raises OSError."""
        if not self._fs.exists(self._path):
            return
        data = self._fs.read_bytes(self._path)
        found = decode_recovery_points(data)
        self.points = found.points
        if found.problem is not None:
            copy = self._path + layout.DAMAGED_SUFFIX + "1"
            self._fs.write_atomically(copy, data)
            logger.error(
                "recovery points damaged %s",
                Fields(path=self._path, problem=found.problem, kept=copy, action="logs are read completely"),
            )

    def write(self, changes: Mapping[str, Change]) -> bool:
        """Make the changed points durable. Returns False if nothing had to be written.

        After OSError or StorageExhaustedError the file has the old points; the next write adds ``changes``.
        """
        with self._lock:
            changed: dict[str, RecoveryPoint | None] = {}
            for name, change in changes.items():
                point = change.point() if isinstance(change, SyncWork) else change
                if point != self.points.get(name):
                    changed[name] = point
            if not changed and not self.has_failed:
                return False
            for name, point in changed.items():
                if point is None:
                    self.points.pop(name, None)
                else:
                    self.points[name] = point
            try:
                self._write(changed)
            except (OSError, StorageExhaustedError):
                self._is_stale = self.has_failed = True
                raise
            self.has_failed = False
            return True

    def _is_there(self) -> bool:
        """Whether the file has the length that the last write gave it."""
        return self._fs.exists(self._path) and self._fs.file_size(self._path) == self._size_bytes

    def _write(self, changed: Mapping[str, RecoveryPoint | None]) -> None:
        appended = self._size_bytes - self._first_bytes
        if not self._is_stale and not self._is_there():
            logger.error(
                "recovery points file missing or changed %s", Fields(path=self._path, action="written again")
            )
            self._is_stale = True
        if self._is_stale or appended > max(self._first_bytes, MIN_APPENDED_BYTES):
            data = encode_recovery_points(self.points)
            self._fs.write_atomically(self._path, data)
            self._size_bytes = self._first_bytes = len(data)
            self._is_stale = False
            return
        data = encode_recovery_points(changed)
        file = self._fs.open(self._path)
        try:
            file.write_at(self._size_bytes, data)
            file.sync()
        finally:
            file.close()
        self._size_bytes += len(data)
