"""One round of syncing one log: what is to be made durable, and up to where the log is synced then."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kafkalite.storage.filesystem import File, FileSystem
from kafkalite.storage.leader_epochs import EpochEntry
from kafkalite.storage.segment import Segment


class SyncWork:
    """``run`` blocks and may run in any thread; everything else is for the log that made it.

    It holds the files themselves, so that they stay open whatever the log does meanwhile.
    """

    __slots__ = (
        "_directories",
        "_epochs_file",
        "_files",
        "_fs",
        "_lock",
        "active",
        "active_position",
        "closed",
        "directory_changes",
        "end_offset",
        "epochs",
        "truncations",
    )

    def __init__(
        self,
        fs: FileSystem,
        *,
        files: Sequence[File],
        directories: Sequence[str],
        epochs_file: tuple[str, bytes] | None,
        epochs: list[EpochEntry],
        end_offset: int,
        closed: list[Segment],
        active: Segment | None,
        truncations: int,
        directory_changes: int,
    ) -> None:
        self._fs = fs
        self._files = files
        self._directories = directories
        self._epochs_file = epochs_file
        self._lock = threading.Lock()
        self.epochs = epochs
        self.end_offset = end_offset  #: exclusive
        self.closed = closed
        self.active = active
        self.active_position = active.size_bytes if active is not None else 0
        self.truncations = truncations
        self.directory_changes = directory_changes

    def run(self) -> None:
        """Sync. Raises OSError, which is final; or DiskFullError, which the next round may overcome."""
        with self._lock:
            if self._epochs_file is not None:
                self._fs.write_atomically(*self._epochs_file)
        for file in self._files:
            file.sync()
        for directory in self._directories:
            self._fs.sync_dir(directory)

    def leave_epochs_alone(self) -> None:
        """From now on the log writes its epochs itself: waits for a write under way, prevents a later one."""
        with self._lock:
            self._epochs_file = None
