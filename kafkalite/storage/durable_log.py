"""DurableLog: what a log is made of, what of it is durable, and whether it still works.

The part of a log that opens and closes it, syncs it, knows its producers and takes it offline; ``log.Log``
adds what is done with one. Only ``SyncWork.run`` may run in another thread than the owner's. A write or
sync that fails for another reason than a full disk takes the log offline for the rest of the process (R26);
reading goes on. Damage ends reading too (R24).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Final, Self

from kafkalite.errors import CorruptLogError, DiskFullError, LogOfflineError, StorageError
from kafkalite.log_fields import Fields
from kafkalite.model import NO_EPOCH
from kafkalite.records.control import parse_marker
from kafkalite.records.header import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader
from kafkalite.storage import layout
from kafkalite.storage.aborted_index import AbortedIndex
from kafkalite.storage.checkpoints import (
    CleanEnd,
    LogState,
    RecoveryPoint,
    encode_leader_epochs,
)
from kafkalite.storage.filesystem import Buffer, FileSystem
from kafkalite.storage.leader_epochs import EpochEntry, LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_producers import LogProducers
from kafkalite.storage.producer_state import ProducerStates
from kafkalite.storage.recovery import OpenedLog, RecoverySync, open_clean, recover
from kafkalite.storage.segment import Segment
from kafkalite.storage.segment_list import SegmentList
from kafkalite.storage.sync_work import StateWork, SyncWork

logger = logging.getLogger(__name__)

_TRANSACTION_BITS: Final = TRANSACTIONAL_BIT | CONTROL_BIT

#: No failed writes: a process without descriptors or memory couldn't begin one.
_PASSING: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class DurableLog:
    """Invariant: log_start_offset <= synced_end_offset <= log_end_offset, except that records may be
    deleted before they are synced. ``offline_reason`` is None until the log goes offline, for good."""

    __slots__ = (
        "_active",
        "_clean_end",
        "_config",
        "_directory",
        "_directory_changes",
        "_directory_changes_synced",
        "_epoch_to_start",
        "_epochs",
        "_epochs_saved",
        "_fs",
        "_is_closed",
        "_is_damaged",
        "_latest_epoch",
        "_parent_unsynced",
        "_producers",
        "_segments",
        "_state",
        "_sync",
        "_syncs",
        "_unsynced",
        "log_end_offset",
        "log_start_offset",
        "offline_reason",
        "synced_end_offset",
    )

    def __init__(
        self, fs: FileSystem, directory: str, config: LogConfig, *, start: int = 0, end: int = 0
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._clean_end: CleanEnd | None = None
        self._segments = SegmentList(fs, directory)
        self._active: Segment | None = None
        self._unsynced: list[Segment] = []
        self._epochs = LeaderEpochs()
        self._epochs_saved: list[EpochEntry] | None = []
        self._latest_epoch = NO_EPOCH
        self._epoch_to_start = NO_EPOCH  # of a leadership that began before the log was opened
        self._producers = LogProducers(fs, directory)
        self._state = LogState()
        self._sync: SyncWork | None = None
        self._directory_changes = self._directory_changes_synced = 0
        self._parent_unsynced = False
        self._syncs = 0
        self.log_start_offset = start
        self.log_end_offset = end
        self.synced_end_offset = end
        self.offline_reason: str | None = None
        self._is_damaged = False
        self._is_closed = False
        self._config = config

    def __repr__(self) -> str:
        offline = f" offline: {self.offline_reason}" if self.offline_reason else ""
        return f"<Log {self._directory} [{self.log_start_offset}, {self.log_end_offset}){offline}>"

    # --- opening and closing ---------------------------------------------------------------------------

    @classmethod
    def create(cls, fs: FileSystem, directory: str, config: LogConfig) -> Self:
        """A new log in a directory of its own, which is made. Nothing is synced before the first sync."""
        fs.make_dirs(directory)
        log = cls(fs, directory, config)
        log._parent_unsynced = True
        return log

    @classmethod
    def recover(
        cls, fs: FileSystem, directory: str, config: LogConfig, point: RecoveryPoint | None = None
    ) -> Self:
        """Open after anything but an orderly stop. Raises CorruptLogError, OSError."""
        log, unsynced = cls.begin_recovery(fs, directory, config, point)
        if unsynced is not None:
            unsynced.run()
        return log

    @classmethod
    def begin_recovery(
        cls, fs: FileSystem, directory: str, config: LogConfig, point: RecoveryPoint | None = None
    ) -> tuple[Self, RecoverySync | None]:
        """``recover``, but for the syncs: they must have run, without an error, before the log is used."""
        opened = recover(fs, directory, config, point or RecoveryPoint())
        log = cls(fs, directory, config)
        log._take(opened)
        return log, opened.unsynced

    @classmethod
    def open_clean(cls, fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd) -> Self:
        """Open after an orderly stop that left the log at ``end``. Touches no file before it is used."""
        log = cls(fs, directory, config, start=end.log_start_offset, end=end.log_end_offset)
        log._clean_end = end
        return log

    @classmethod
    def damaged(cls, fs: FileSystem, directory: str, config: LogConfig, reason: str) -> Self:
        """A log that can't be opened: it answers every call with LogOfflineError."""
        log = cls(fs, directory, config)
        log._is_damaged = True
        log._go_offline(reason)
        return log

    def _take(self, opened: OpenedLog) -> None:
        self._segments = SegmentList(self._fs, self._directory, opened.segments)
        self._state = opened.state
        self._epochs = opened.epochs
        self._epochs_saved = opened.epochs.entries() if opened.epochs_saved else None
        self._latest_epoch = opened.epochs.latest_epoch
        self._producers = LogProducers(self._fs, self._directory, opened.producers_offsets)
        self.log_start_offset = opened.state.log_start_offset
        self.log_end_offset = self.synced_end_offset = opened.log_end_offset

    def _open(self) -> None:
        """Find out what a cleanly closed log consists of, now that it is used."""
        if self._is_damaged:
            raise self._offline_error()
        if self._clean_end is None:
            return
        try:
            self._take(open_clean(self._fs, self._directory, self._config, self._clean_end))
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        self._clean_end = None
        if self._epoch_to_start > self._latest_epoch:
            self._epochs.assign(self._epoch_to_start, self.log_end_offset)
            self._latest_epoch = self._epoch_to_start

    def close(self, *, clean: bool) -> None:
        """Let go of everything; with ``clean``, sync first. Raises OSError and DiskFullError then."""
        self._active = None
        self._is_closed = True
        self._take_over_epochs()
        try:
            if clean and self.offline_reason is None and self._clean_end is None:
                if len(self._segments) and self._segments.last.has_space_ahead:
                    self._segments.last.close_for_append()
                work = self._sync_work()
                work.run()
                self._synced(work)
                if len(self._segments) and self._segments.last.indexes_loaded:
                    last = self._segments.last
                    last.save_indexes(last.size_bytes, final=True)
                if len(self._segments):
                    self._save_producers(self._segments.last, self._segments.last.base_offset)
        except OSError as error:
            self._go_offline(f"sync failed: {error}")
            raise
        finally:
            self._segments.release()

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def is_damaged(self) -> bool:
        """Whether what the log had is lost or can't be told from what it should be: not a failed disk."""
        return self._is_damaged

    @property
    def is_open(self) -> bool:
        """Whether the log was used, so that its recovery point may have moved."""
        return self._clean_end is None and not self._is_damaged

    @property
    def clean_end(self) -> CleanEnd | None:
        """What a clean-shutdown marker may say of this log: None unless all of it is synced."""
        if self.offline_reason is not None or self.has_unsynced:
            return None
        return CleanEnd(self.log_start_offset, self.log_end_offset)

    @property
    def recovery_point(self) -> RecoveryPoint:
        self._open()
        return RecoveryPoint(self.synced_end_offset, self._state.truncations)

    # --- syncing ---------------------------------------------------------------------------------------

    @property
    def has_unsynced(self) -> bool:
        """Whether there are records, segments or names that a sync would make durable."""
        return (
            self.synced_end_offset < self.log_end_offset
            or bool(self._unsynced)
            or self._directory_changes > self._directory_changes_synced
        )

    def begin_sync(self) -> SyncWork | None:
        """What is to be synced now, or None: nothing, or a round is under way, or the log is offline.

        The caller runs it, in a thread if it likes, and then calls ``finish_sync`` in its own. Appending
        goes on meanwhile; it is for the next round.
        """
        if self._sync is not None or self.offline_reason is not None or not self.has_unsynced:
            return None
        try:
            self._sync = self._sync_work()
        except OSError as error:
            raise self._write_failed(error) from error
        return self._sync

    def _sync_work(self) -> SyncWork:
        active = self._segments.last if len(self._segments) else None
        files = [segment.file for segment in self._unsynced]
        if active is not None and self.synced_end_offset < self.log_end_offset:
            files.append(active.file)
        names_changed = self._directory_changes > self._directory_changes_synced
        epochs, epochs_file = self._epochs_to_save()
        return SyncWork(
            self._fs,
            directory=self._directory,
            files=files,
            is_parent_unsynced=self._parent_unsynced and names_changed,
            epochs_file=epochs_file,
            epochs=epochs,
            end_offset=self.log_end_offset,
            names_changed=names_changed,
            closed=list(self._unsynced),
            active=active,
            truncations=self._state.truncations,
            directory_changes=self._directory_changes,
        )

    def _epochs_to_save(self) -> tuple[list[EpochEntry], tuple[str, bytes] | None]:
        """The epochs that have a batch, and the file to write if it doesn't say so already.

        It must be durable before batches of a new epoch count as synced: recovery relies on that.
        """
        epochs = [entry for entry in self._epochs.entries() if entry.start_offset < self.log_end_offset]
        if epochs == self._epochs_saved:
            return epochs, None
        path = layout.join(self._directory, layout.LEADER_EPOCHS_FILE)
        return epochs, (path, encode_leader_epochs(epochs, self._state.truncations))

    def _take_over_epochs(self) -> None:
        """Before writing epochs outside of a round: a round in another thread must not write them as well."""
        if self._sync is not None:
            self._sync.leave_epochs_alone()

    def finish_sync(self, work: SyncWork, error: BaseException | None) -> None:
        """Take the outcome of ``work.run()``. A failed sync is final: the log goes offline (R26).

        DiskFullError is no failed sync: nothing was counted, and the next round tries again.
        """
        self._sync = None
        if self._is_closed:
            return  # closing has synced what was to be synced; a deleted log's files may be gone
        if isinstance(error, DiskFullError):
            logger.warning("sync postponed %s", Fields(directory=self._directory, error=error))
        elif error is not None:
            self._go_offline(f"sync failed: {error}")
        elif work.truncations == self._state.truncations and self.offline_reason is None:
            self._synced(work)

    def _synced(self, work: SyncWork) -> None:
        self._syncs += 1
        self._epochs_saved = work.epochs
        self._directory_changes_synced = work.directory_changes
        if work.directory_changes:
            self._parent_unsynced = False
        self.synced_end_offset = max(self.synced_end_offset, work.end_offset)
        for segment in work.closed:
            if segment in self._unsynced:
                self._unsynced.remove(segment)
                segment.save_indexes(segment.size_bytes, final=True)
        if work.active is self._active and work.active is not None:
            work.active.save_indexes(work.active_position, final=False)
            if self._producers.is_due(work.active.size_bytes):
                self._save_producers(work.active, work.active.base_offset)

    def _save_producers(self, active: Segment, keep_from: int) -> None:
        self._producers.save(self.log_end_offset, self._state.truncations, active.size_bytes, keep_from)

    # --- letting go ----------------------------------------------------------------------------------

    def remove_retired(self, now_ms: int) -> None:
        """Unlink the files of segments retired ``file.delete.delay.ms`` before."""
        self._removing(lambda: self._segments.remove_retired(now_ms, self._config.file_delete_delay_ms))

    def release_idle(self) -> int:
        """Let go of files and maps not used since the last call. Returns how many segments that were."""
        return 0 if self.has_unsynced else self._segments.release_idle()

    def _removing(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise self._write_failed(error) from error

    # --- producers -------------------------------------------------------------------------------------

    @property
    def producers(self) -> ProducerStates:
        """The idempotent producers of all batches here, the uncommitted ones too (R27).

        Found when first asked for, by a walk over the headers behind the newest snapshot.
        """
        states = self._producers.states
        if states is not None and self._clean_end is None:
            return states
        self._open()
        try:
            states = self._producers.states
            if states is None:
                states = self._producers.load(
                    self._segments, self._state, self.log_start_offset, self.log_end_offset
                )
            return states
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error

    def _note_producer(
        self, header: BatchHeader, batch: Buffer, base_offset: int, max_timestamp_ms: int, now_ms: int
    ) -> None:
        """``batch`` was appended at ``base_offset``. To states not known yet a walk will add it."""
        states = self._producers.states
        if states is None:
            self.producers  # noqa: B018 - looked up now, so that a takeover need not walk far
            return
        producer_id, epoch = header.producer_id, header.producer_epoch
        if header.attributes & _TRANSACTION_BITS:
            if header.is_control:
                is_commit, coordinator_epoch = parse_marker(batch)
                states.note_marker(
                    producer_id, epoch, coordinator_epoch, base_offset, now_ms, is_commit=is_commit
                )
                return
            states.note_open(producer_id, epoch, base_offset, now_ms)
            if header.base_sequence < 0:
                return
        last_offset = base_offset + header.last_offset_delta
        states.note(
            producer_id, epoch, header.base_sequence, base_offset, last_offset, max_timestamp_ms, now_ms
        )

    def last_stable_offset(self, high_watermark: int) -> int:
        """Up to where the outcome of every transaction is known, exclusive: the high watermark, or the first
        offset of one that is open, or whose marker is not below the high watermark (R33)."""
        states = self.producers
        if not states.open and not states.ended:
            return high_watermark
        return max(states.last_stable_offset(high_watermark), self.log_start_offset)

    def known_stable_offset(self, high_watermark: int) -> int:
        """As ``last_stable_offset`` if that is known without a walk, else the high watermark."""
        states = self._producers.states
        if states is None or not (states.open or states.ended):
            return high_watermark
        return self.last_stable_offset(high_watermark)

    def settle_transactions(self, high_watermark: int) -> None:
        """What lies below ``high_watermark`` is committed: of transactions that end there less is kept."""
        states = self._producers.states
        if states is not None and states.ended:
            states.settle(high_watermark)

    def aborted_between(self, first: int, end: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of the aborted transactions with offsets in [``first``, ``end``), by
        first offset."""
        found = self.producers.aborted.between(first, end)
        return [(one.producer_id, one.first_offset) for one in found]

    def expire_producers(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers that were idle for ``expiration_ms`` (R29). Returns how many."""
        states = self._producers.states
        return 0 if states is None else states.expire(now_ms, expiration_ms)

    def lose_producers(self) -> None:
        """What R27 forbids: know nothing of the producers in the log. Only a test asks for it."""
        self._producers.states = ProducerStates()

    def lose_aborted(self) -> None:
        """What R33 forbids: know nothing of the aborted transactions. Only a test asks for it."""
        self.producers.aborted = AbortedIndex()

    # --- failing ---------------------------------------------------------------------------------------

    def _write_state(self, state: LogState) -> None:
        """Make ``state`` durable. On a full disk the space allocated ahead is given up for it (R26)."""
        work = self._state_work(state)
        try:
            try:
                work.run()
            except DiskFullError:
                if self._active is None:
                    raise
                self._active.close_for_append()
                work.run()
        except OSError as error:
            raise self._write_failed(error) from error
        self._take_state(state)

    def _state_work(self, state: LogState) -> StateWork:
        return StateWork(self._fs, self._directory, state, is_parent_unsynced=self._parent_unsynced)

    def _take_state(self, state: LogState) -> None:
        """``state`` is durable."""
        self._parent_unsynced = False
        self._state = state
        self._segments.set_state(state)

    def _offline_error(self) -> LogOfflineError:
        return LogOfflineError(
            f"the log in {self._directory} is offline: {self.offline_reason}",
            hint="restart the broker once the disk is repaired; see its log",
        )

    def _go_offline(self, reason: str) -> None:
        if self.offline_reason is None:
            self.offline_reason = reason
            logger.error("log offline %s", Fields(directory=self._directory, reason=reason))
        self._active = None

    def _write_failed(self, error: BaseException) -> StorageError:
        """A failed write is final (R26), unless it could not even be begun."""
        if isinstance(error, OSError) and error.errno in _PASSING:
            return StorageError(f"the log in {self._directory} can't be written now: {error}")
        self._go_offline(f"write failed: {error}")
        return self._offline_error()

    def _read_failed(self, error: CorruptLogError | OSError) -> StorageError:
        """Damage takes the log offline, for reading too (R24); another failure may pass."""
        if not isinstance(error, CorruptLogError):
            return StorageError(f"the log in {self._directory} can't be read now: {error}")
        self._is_damaged = True
        self._go_offline(str(error))
        return self._offline_error()
