"""One round of syncing one log: what is to be made durable, and up to where the log is synced then.

Many logs that are synced in one round share what they can: ``run_together``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from kafkalite.storage import layout
from kafkalite.storage.checkpoints import LogState, encode_log_state
from kafkalite.storage.filesystem import File, FileSystem, run_one
from kafkalite.storage.leader_epochs import EpochEntry
from kafkalite.storage.segment import Segment


class SyncWork:
    """``run`` blocks and may run in any thread; everything else is for the log that made it.

    It holds the files themselves, so that they stay open whatever the log does meanwhile.
    """

    __slots__ = (
        "_directory",
        "_epochs_file",
        "_files",
        "_lock",
        "_names_changed",
        "active",
        "active_position",
        "closed",
        "directory_changes",
        "end_offset",
        "epochs",
        "fs",
        "parent",
        "truncations",
    )

    def __init__(
        self,
        fs: FileSystem,
        *,
        directory: str,
        files: Sequence[File],
        is_parent_unsynced: bool,
        epochs_file: tuple[str, bytes] | None,
        epochs: list[EpochEntry],
        end_offset: int,
        names_changed: bool,
        closed: list[Segment],
        active: Segment | None,
        truncations: int,
        directory_changes: int,
    ) -> None:
        self.fs = fs
        self._directory = directory
        self._files = files
        self._names_changed = names_changed
        #: The directory that holds the log's, if that name isn't durable yet: to be synced last.
        self.parent = layout.parent(directory) if is_parent_unsynced else None
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
        self.run_inside()
        if self.parent is not None:
            self.fs.sync_dir(self.parent)

    def run_inside(self) -> None:
        """``run`` without ``parent``."""
        with self._lock:
            epochs_file = self._epochs_file
            if epochs_file is not None:
                self._write_epochs(*epochs_file)
        for file in self._files:
            file.sync()
        if self._names_changed or epochs_file is not None:
            self.fs.sync_dir(self._directory)

    def _write_epochs(self, path: str, data: bytes) -> None:
        """The first ones are not synced: where they are missing or torn, the batches tell them. Later ones
        are, since an intact file must know every epoch of the batches that count as synced."""
        if self.fs.exists(path):
            self.fs.write_atomically(path, data, sync_name=False)
            return
        file = self.fs.open(path, create=True)
        file.write_at(0, data)
        file.close()

    def leave_epochs_alone(self) -> None:
        """From now on the log writes its epochs itself: waits for a write under way, prevents a later one."""
        with self._lock:
            self._epochs_file = None


class StateWork:
    """A log state to make durable. ``run`` blocks and may run in any thread."""

    __slots__ = ("_data", "_fs", "_parent", "_path", "state")

    def __init__(self, fs: FileSystem, directory: str, state: LogState, *, is_parent_unsynced: bool) -> None:
        self._fs = fs
        self._parent = layout.parent(directory) if is_parent_unsynced else None
        self._path = layout.join(directory, layout.LOG_STATE_FILE)
        self._data = encode_log_state(state)
        self.state = state

    def run(self) -> None:
        """Raises OSError, DiskFullError."""
        if self._parent is not None:
            self._fs.sync_dir(self._parent)
        self._fs.write_atomically(self._path, self._data)


def run_together(works: Sequence[SyncWork]) -> list[Exception | None]:
    """Run all of them in the way that takes the disk the least time: what each raised, in their order."""
    if not works:
        return []
    fs = works[0].fs
    outcomes = fs.run_all([work.run_inside for work in works])
    for parent in dict.fromkeys(work.parent for work in works if work.parent is not None):
        error = run_one(partial(fs.sync_dir, parent))
        if error is not None:
            for number, work in enumerate(works):
                if work.parent == parent:
                    outcomes[number] = outcomes[number] or error
    return outcomes
