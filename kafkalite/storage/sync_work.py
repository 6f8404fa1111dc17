"""Tracks the changes of a log that are not on disk yet, and makes them durable.

``SyncState`` tracks the changes. A ``SyncWork`` makes them durable once, which is called a round.
``run_together`` runs the rounds of several logs and syncs their common parent directory once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kafkalite.model import NO_OFFSET
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    Fingerprint,
    LogState,
    RecoveryPoint,
    encode_leader_epochs,
    encode_log_state,
)
from kafkalite.storage.filesystem import File, FileSystem, run_one
from kafkalite.storage.leader_epochs import EpochEntry
from kafkalite.storage.segment import Segment, read_crc


@dataclass(slots=True, eq=False)
class SyncState:
    """The changes of a log that are not synced yet, except the batches of its active segment.

    Invariants: ``unsynced`` are the closed segments that may have unsynced bytes, in order of offsets.
    ``names_synced`` <= ``names_changed``.
    """

    fs: FileSystem
    directory: str
    unsynced: list[Segment] = field(default_factory=list)
    #: The number of names created in the log's directory. The first ``names_synced`` of them are durable.
    names_changed: int = 0
    names_synced: int = 0
    #: Whether the name of the log's own directory is not durable yet.
    is_parent_unsynced: bool = False
    #: The content of the leader-epochs file, or None if unknown.
    saved_epochs: list[EpochEntry] | None = field(default_factory=list)
    #: The round that is in progress, or None.
    round: SyncWork | None = None

    @property
    def has_unsynced(self) -> bool:
        """Whether there are closed segments or names to sync."""
        return bool(self.unsynced) or self.names_changed > self.names_synced

    def work(
        self,
        active: Segment | None,
        *,
        is_active_unsynced: bool,
        end_offset: int,
        epochs: list[EpochEntry],
        truncations: int,
        log_start_offset: int,
    ) -> SyncWork:
        """Return the work of one round, after which the log is synced below ``end_offset``. ``epochs`` are
        the epochs with a batch below that offset."""
        files = [segment.file for segment in self.unsynced]
        if active is not None and is_active_unsynced:
            files.append(active.file)
        names_changed = self.names_changed > self.names_synced
        return SyncWork(
            self.fs,
            self.directory,
            files,
            are_names_unsynced=names_changed,
            parent=layout.parent(self.directory) if self.is_parent_unsynced and names_changed else None,
            epochs_file=self._epochs_file(epochs, truncations),
            epochs=epochs,
            end_offset=end_offset,
            closed=list(self.unsynced),
            active=active,
            active_position=active.size_bytes if active is not None else 0,
            active_file=active.file if active is not None and active.size_bytes else None,
            last_position=active.last_position if active is not None else NO_OFFSET,
            log_start_offset=log_start_offset,
            truncations=truncations,
            names_changed=self.names_changed,
        )

    def complete(self, work: SyncWork) -> None:
        """Record that the round ``work`` has succeeded, and save the indexes of the segments it has synced,
        except the active one."""
        self.saved_epochs = work.epochs
        self.names_synced = work.names_changed
        if work.names_changed:
            self.is_parent_unsynced = False
        for segment in work.closed:
            if segment in self.unsynced:
                self.unsynced.remove(segment)
                segment.save_indexes(segment.size_bytes, final=True)

    def forget(self) -> None:
        """Record that everything was synced outside of a sync round."""
        self.unsynced.clear()
        self.names_synced = self.names_changed

    def _epochs_file(self, epochs: list[EpochEntry], truncations: int) -> tuple[str, bytes] | None:
        """Return the path and content of the leader-epochs file, or None if it need not be written.

        The file must be durable before batches of a new epoch count as synced, because recovery relies on it.
        The first file of a log is an exception: see ``write_ahead``.
        """
        if epochs == self.saved_epochs:
            return None
        path = layout.join(self.directory, layout.LEADER_EPOCHS_FILE)
        return path, encode_leader_epochs(epochs, truncations, layout.name_of(self.directory))

    def write_ahead(self, epochs: list[EpochEntry], truncations: int) -> None:
        """Write the leader-epochs file before the first batch of its last epoch is appended (R58).

        Nothing is synced here. Before the batch counts as synced, the next round writes the file again and
        syncs it. If the log had no such file, the next round does not do so: without the file, recovery reads
        the epochs from the batches. Raises OSError, StorageExhaustedError.
        """
        path = layout.join(self.directory, layout.LEADER_EPOCHS_FILE)
        data = encode_leader_epochs(epochs, truncations, layout.name_of(self.directory))
        if self.saved_epochs == [] and not self.fs.exists(path):
            write_plain(self.fs, path, data)
            self.saved_epochs = epochs
            return
        if self.round is not None:
            self.round.replace_epochs(path, data)
        else:
            replace_plain(self.fs, path, data)

    def write_epochs(self, epochs: list[EpochEntry], truncations: int) -> None:
        """Write the leader-epochs file durably, outside of a sync round, if its content has changed."""
        epochs_file = self._epochs_file(epochs, truncations)
        self.saved_epochs = epochs
        self.take_over_epochs()
        if epochs_file is not None:
            self.fs.write_atomically(*epochs_file)

    def take_over_epochs(self) -> None:
        """Prevent a running round from writing the leader-epochs file, because the log now writes it
        itself."""
        if self.round is not None:
            self.round.leave_epochs_alone()


@dataclass(slots=True, eq=False)
class SyncWork:
    """One sync round of one log. ``run`` blocks, and may run in any thread.

    The round has references to the files, so that they stay open when the log releases them.
    """

    fs: FileSystem
    directory: str
    files: list[File]
    are_names_unsynced: bool
    #: The parent of the log's directory, if the directory's own name is not durable yet. It is synced last.
    parent: str | None
    #: Path and content of the leader-epochs file, or None if it need not be written.
    epochs_file: tuple[str, bytes] | None
    #: The content of the leader-epochs file after this round.
    epochs: list[EpochEntry]
    end_offset: int  #: after this round, the log is synced below this offset
    closed: list[Segment]
    active: Segment | None
    active_position: int
    active_file: File | None  #: None if the active segment has no batch
    last_position: int  #: of the last batch in the active segment; NO_OFFSET if it is unknown
    log_start_offset: int
    truncations: int
    names_changed: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Write and sync everything. Raises OSError, which is final, or StorageExhaustedError, after which a
        later round retries."""
        self.run_inside()
        if self.parent is not None:
            self.fs.sync_dir(self.parent)

    def run_inside(self) -> None:
        """Do the work of ``run`` except for the sync of ``parent``."""
        with self._lock:
            epochs_file = self.epochs_file
            if epochs_file is not None:
                self.fs.write_atomically(*epochs_file, sync_name=False)
        if self.parent is not None:  # the first round of a new log also syncs its identity
            path = layout.join(self.directory, layout.PARTITION_FILE)
            if self.fs.exists(path):
                file = self.fs.open(path)
                file.sync()
                file.close()
        for file in self.files:
            file.sync()
        if self.are_names_unsynced or epochs_file is not None:
            self.fs.sync_dir(self.directory)

    def point(self) -> RecoveryPoint:
        """Return the recovery point after this round. Reads the CRC fields of two batches."""
        end: Fingerprint | None = None
        if self.active is not None and self.active_file is not None and self.last_position != NO_OFFSET:
            head, tail = (read_crc(self.active_file, position) for position in (0, self.last_position))
            end = Fingerprint(self.active.base_offset, head, self.last_position, tail)
        return RecoveryPoint(self.end_offset, self.truncations, self.log_start_offset, end)

    def leave_epochs_alone(self) -> None:
        """Wait for a running write of the epochs, and prevent this round from writing them later."""
        with self._lock:
            self.epochs_file = None

    def replace_epochs(self, path: str, data: bytes) -> None:
        """Write the newer epochs ``data`` without a sync. If this round was to write older epochs, it writes
        ``data`` instead. Waits for a running write."""
        with self._lock:
            if self.epochs_file is not None:
                self.epochs_file = (path, data)
            replace_plain(self.fs, path, data)


@dataclass(slots=True, eq=False)
class StateWork:
    """The write of a log state. ``run`` blocks and may run in any thread."""

    fs: FileSystem
    directory: str
    state: LogState
    is_parent_unsynced: bool

    def run(self) -> None:
        """Write the state durably. Raises OSError, StorageExhaustedError."""
        if self.is_parent_unsynced:
            self.fs.sync_dir(layout.parent(self.directory))
        path = layout.join(self.directory, layout.LOG_STATE_FILE)
        self.fs.write_atomically(path, encode_log_state(self.state, layout.name_of(self.directory)))


def write_plain(fs: FileSystem, path: str, data: bytes) -> None:
    """Create or overwrite a file without a sync."""
    file = fs.open(path, create=True)
    try:
        file.truncate(0)
        file.write_at(0, data)
    finally:
        file.close()


def replace_plain(fs: FileSystem, path: str, data: bytes) -> None:
    """Replace a file without a sync. If only the process ends, the file has the old or the new bytes; after a
    power loss it may also be damaged."""
    write_plain(fs, path + layout.TEMPORARY_SUFFIX, data)
    fs.rename(path + layout.TEMPORARY_SUFFIX, path)


def run_together(works: Sequence[SyncWork]) -> list[Exception | None]:
    """Run all rounds, and sync each common parent directory only once. Return for each round, in order, its
    exception or None."""
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
