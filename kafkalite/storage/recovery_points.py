"""The recovery points of all logs of a data directory: a file, and a copy of it.

Each file begins with a block that has every point. Changes are appended as further blocks, each with its own
CRC; the file is replaced as a whole when the appended blocks have become longer than the first one and than
MIN_APPENDED_BYTES. So the cost of a write depends on the number of changed points, not on that of logs.

If the file is lost or replaced by an older one, together with the end of a log, the copy still shows how far
the log was synced. The copy is written after the file, and blocks are appended to it without a sync. But if a
point is removed, the copy is written first, and synced, so that the point never comes back.

If a point can be read in neither of the files, recovery checks all batches of the log that no index block
proves to be synced (R24, R25).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from kafkalite.errors import StorageExhaustedError, WrongFileTypeError
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


class _BlockFile:
    """One file of recovery points, which consists of blocks. Invariant: unless ``is_stale``, the file has the
    points that were last written."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path
        self._size_bytes = self._first_bytes = 0
        self.is_stale = True  # the file must be replaced
        self.wrong_type: WrongFileTypeError | None = None  #: why ``read`` could not open the file

    def read(self) -> dict[str, RecoveryPoint]:
        """Return the recovery points in the file by log directory name; empty if there is no regular file.

        Something else in the place of the file is reported. If the file is damaged, that is reported, too,
        and the damaged file is first saved under a ``.damaged-`` name.
        """
        if not self._fs.exists(self.path):
            return {}
        try:
            data = self._fs.read_bytes(self.path)
        except WrongFileTypeError as error:  # the next write renames it to a .damaged- name
            self.wrong_type = error
            self._report(error.message, self.path)
            return {}
        found = decode_recovery_points(data)
        if found.problem is not None:
            copy = self.path + layout.DAMAGED_SUFFIX + "1"
            self._fs.write_atomically(copy, data)
            self._report(found.problem, copy)
        return found.points

    def _report(self, problem: str, kept: str) -> None:
        logger.error("recovery points damaged %s", Fields(path=self.path, problem=problem, kept=kept))

    def write(
        self,
        points: Mapping[str, RecoveryPoint],
        changed: Mapping[str, RecoveryPoint | None],
        *,
        is_synced: bool,
    ) -> None:
        """Append a block with ``changed``, or replace the file by one with all ``points``. Raises OSError,
        StorageExhaustedError; the next write then replaces the file."""
        appended = self._size_bytes - self._first_bytes
        if not self.is_stale and not self._is_there():
            logger.error(
                "recovery points file missing or changed %s", Fields(path=self.path, action="written again")
            )
            self.is_stale = True
        if self.is_stale or appended > max(self._first_bytes, MIN_APPENDED_BYTES):
            data = encode_recovery_points(points)
            self.is_stale = True
            self._fs.write_atomically(self.path, data)
            self._size_bytes = self._first_bytes = len(data)
            self.is_stale = False
            return
        data = encode_recovery_points(changed)
        self.is_stale = True
        file = self._fs.open(self.path)
        try:
            file.write_at(self._size_bytes, data)
            if is_synced:
                file.sync()
        finally:
            file.close()
        self._size_bytes += len(data)
        self.is_stale = False

    def _is_there(self) -> bool:
        """Whether the file exists and has the length that the last write gave it."""
        return self._fs.exists(self.path) and self._fs.file_size(self.path) == self._size_bytes


def _newest(
    points: Mapping[str, RecoveryPoint], copied: Mapping[str, RecoveryPoint]
) -> dict[str, RecoveryPoint]:
    """Return the newest point of each log. If both arguments have an equally new point, use ``points``."""
    newest = dict(points)
    for name, point in copied.items():
        known = newest.get(name)
        if known is None or known.age() < point.age():
            newest[name] = point
    return newest


def read_points(fs: FileSystem, directory: str) -> dict[str, RecoveryPoint]:
    """Return the newest recovery point of each log in either file, by log directory name. Nothing is changed
    or logged. Raises OSError."""
    found: list[dict[str, RecoveryPoint]] = []
    for name in (layout.RECOVERY_POINTS_FILE, layout.RECOVERY_POINTS_COPY):
        try:
            data = fs.read_bytes(layout.join(directory, name))
        except (FileNotFoundError, WrongFileTypeError):
            data = b""
        found.append(decode_recovery_points(data).points)
    return _newest(*found)


class RecoveryPointsFile:
    """Reads and writes ``recovery-points`` and its copy. ``write`` may run in any thread; its calls wait for
    each other.

    Invariant: ``points`` are those in the file if the last write has succeeded. Otherwise, and before the
    first write, the next write replaces the file.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._file = _BlockFile(fs, layout.join(directory, layout.RECOVERY_POINTS_FILE))
        self._copy = _BlockFile(fs, layout.join(directory, layout.RECOVERY_POINTS_COPY))
        self.has_failed = False  #: the last write has failed
        self._lock = threading.Lock()
        self.points: dict[str, RecoveryPoint] = {}
        #: By log: the points that were taken from the copy, and whether the file had an older point.
        self._from_copy: dict[str, bool] = {}

    def open(self) -> None:
        """Read the file and the copy, and use the newest point of each log. If part of either cannot be read,
        that is reported, and the damaged file is first saved under a ``.damaged-`` name.

        Raises OSError; WrongFileTypeError if one of the two is not a regular file and no point was read,
        because logs that lost synced records would then be taken for complete ones.
        """
        points = self._file.read()
        self.points = _newest(points, self._copy.read())
        wrong_type = self._file.wrong_type or self._copy.wrong_type
        if wrong_type is not None and not self.points:
            raise wrong_type
        newer = [name for name, point in self.points.items() if point is not points.get(name)]
        self._from_copy = {name: name in points for name in newer}

    def forget_deleted(self, exists: Callable[[str], bool]) -> list[str]:
        """Return the names of the logs whose points must be removed: only the copy has the point, and
        ``exists(name)`` is False. An earlier version of the program, which wrote no copy, deleted these logs.

        All other points that ``open`` took from the copy are reported as lost from the file.
        """
        deleted = sorted(name for name, known in self._from_copy.items() if not known and not exists(name))
        lost = sorted(self._from_copy.keys() - set(deleted))
        self._from_copy.clear()
        if lost:
            logger.error(
                "recovery points lost %s",
                Fields(path=self._file.path, logs=len(lost), first=lost[0], action="taken from the copy"),
            )
        return deleted

    def write(self, changes: Mapping[str, Change]) -> bool:
        """Make the changed points durable. Returns False if nothing had to be written.

        After OSError or StorageExhaustedError, the file may lack the changes. The next write then writes all
        points, with these changes.
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
                if None in changed.values():
                    self._copy.write(self.points, changed, is_synced=True)
                self._file.write(self.points, changed, is_synced=True)
            except (OSError, StorageExhaustedError):
                self._file.is_stale = self._copy.is_stale = self.has_failed = True
                raise
            self.has_failed = False
            if None not in changed.values():
                self._write_copy(changed)
            return True

    def _write_copy(self, changed: Mapping[str, RecoveryPoint | None]) -> None:
        """Write the changed points to the copy. An error is only logged, because the file has the points."""
        try:
            self._copy.write(self.points, changed, is_synced=False)
        except (OSError, StorageExhaustedError) as error:
            logger.warning("recovery points not copied %s", Fields(path=self._copy.path, error=error))
