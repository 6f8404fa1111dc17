"""Log: the segments of one partition, from log_start_offset to log_end_offset.

Synchronous, and owned by one thread; only ``SyncWork.run`` may run in another. Appending never syncs:
the owner gathers, calls ``begin_sync``, lets the work run, and calls ``finish_sync``; only then
``synced_end_offset`` moves (R7). A write or sync that fails for another reason than a full disk takes the
log offline for the rest of the process (R26); reading goes on.

Files are opened when they are first needed: a log that nobody uses holds no descriptor and no map.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    LogOfflineError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
)
from kafkalite.limits import MAX_SEGMENT_BYTES
from kafkalite.model import NO_EPOCH, NO_TIMESTAMP, TimestampType
from kafkalite.records.header import (
    BatchHeader,
    check,
    parse_header,
    stamp,
    stamp_log_append_time,
    total_length,
)
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    LogState,
    RecoveryPoint,
    encode_leader_epochs,
    encode_log_state,
)
from kafkalite.storage.filesystem import Buffer, File, FileSystem
from kafkalite.storage.index_block import OFFSET_ENTRY_BYTES
from kafkalite.storage.leader_epochs import EpochEntry, LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.recovery import OpenedLog, open_clean, recover
from kafkalite.storage.retention import SegmentSummary, plan_retention
from kafkalite.storage.segment import Found, Segment

logger = logging.getLogger(__name__)

_NEVER: Final = 2**63 - 1


class Appended(NamedTuple):
    """``last_offset`` is inclusive; the append time is NO_TIMESTAMP unless the topic uses LogAppendTime."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    log_end_offset: int


class Slice(NamedTuple):
    """Whole batches, one buffer per segment touched. The first may begin before the offset asked for."""

    buffers: list[memoryview]
    size_bytes: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """Counters since the log was opened. ``bytes_scanned`` is what lookups by offset or timestamp walked
    from an index entry to the batch; ``boundary_bytes_scanned`` what finding a slice's end walked."""

    segment_count: int
    size_bytes: int
    appends: int
    reads: int
    rolls: int
    syncs: int
    segments_deleted: int
    bytes_scanned: int
    boundary_bytes_scanned: int


class SyncWork:
    """What one round of syncing must do. ``run`` blocks, and may run in any thread."""

    __slots__ = (
        "_directories",
        "_epochs",
        "_files",
        "_fs",
        "active",
        "active_position",
        "closed",
        "directory_changes",
        "end_offset",
        "epochs_version",
        "truncations",
    )

    def __init__(
        self,
        fs: FileSystem,
        files: list[File],
        directories: list[str],
        epochs: tuple[str, bytes] | None,
        *,
        end_offset: int,
        closed: list[Segment],
        active: Segment | None,
        truncations: int,
        directory_changes: int,
        epochs_version: int,
    ) -> None:
        self._fs = fs
        self._files = files
        self._directories = directories
        self._epochs = epochs
        self.end_offset = end_offset
        self.closed = closed
        self.active = active
        self.active_position = active.size_bytes if active is not None else 0
        self.truncations = truncations
        self.directory_changes = directory_changes
        self.epochs_version = epochs_version

    def run(self) -> None:
        """Sync. Raises OSError, after which the log must be told; DiskFullError may be tried again."""
        if self._epochs is not None:
            self._fs.write_atomically(*self._epochs)
        for file in self._files:
            file.sync()
        for directory in self._directories:
            self._fs.sync_dir(directory)


class Log:
    """Invariant: log_start_offset <= synced_end_offset <= log_end_offset, but for records that were
    deleted before they were synced."""

    __slots__ = (
        "_active",
        "_appends",
        "_bases",
        "_clean_end",
        "_config",
        "_directory",
        "_directory_changes",
        "_directory_changes_synced",
        "_epochs",
        "_epochs_version",
        "_epochs_version_saved",
        "_fs",
        "_index_full_entries",
        "_latest_epoch",
        "_log_append_time",
        "_parent_unsynced",
        "_reads",
        "_retired",
        "_roll_ms",
        "_roll_offset",
        "_roll_size_bytes",
        "_rolls",
        "_segments",
        "_segments_deleted",
        "_state",
        "_sync",
        "_syncs",
        "_unsynced",
        "damaged",
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
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self._active: Segment | None = None
        self._unsynced: list[Segment] = []
        self._epochs = LeaderEpochs()
        self._latest_epoch = NO_EPOCH
        self._epochs_version = self._epochs_version_saved = 0
        self._state = LogState()
        self._sync: SyncWork | None = None
        self._directory_changes = self._directory_changes_synced = 0
        self._parent_unsynced = False
        self._retired: list[tuple[str, int | None]] = []
        self._appends = self._reads = self._rolls = self._syncs = self._segments_deleted = 0
        self.log_start_offset = start
        self.log_end_offset = end
        self.synced_end_offset = end
        self.offline_reason: str | None = None
        self.damaged = False
        self._roll_size_bytes = -1
        self._roll_ms = self._roll_offset = _NEVER
        self.reconfigure(config)

    def __repr__(self) -> str:
        offline = f" offline: {self.offline_reason}" if self.offline_reason else ""
        return f"<Log {self._directory} [{self.log_start_offset}, {self.log_end_offset}){offline}>"

    # --- opening and closing ---------------------------------------------------------------------------

    @classmethod
    def create(cls, fs: FileSystem, directory: str, config: LogConfig) -> Log:
        """A new log in a directory of its own, which is made. Nothing is synced before the first sync."""
        fs.make_dirs(directory)
        log = cls(fs, directory, config)
        log._parent_unsynced = True
        return log

    @classmethod
    def recover(
        cls, fs: FileSystem, directory: str, config: LogConfig, point: RecoveryPoint | None = None
    ) -> Log:
        """Open after anything but an orderly stop. Raises CorruptLogError, OSError."""
        log = cls(fs, directory, config)
        log._take(recover(fs, directory, config, point or RecoveryPoint()))
        return log

    @classmethod
    def open_clean(cls, fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd) -> Log:
        """Open after an orderly stop that left the log at ``end``. Touches no file before it is used."""
        log = cls(fs, directory, config, start=end.log_start_offset, end=end.log_end_offset)
        log._clean_end = end
        return log

    @classmethod
    def offline(cls, fs: FileSystem, directory: str, config: LogConfig, reason: str) -> Log:
        """A log that can't be opened: it answers every call with LogOfflineError."""
        log = cls(fs, directory, config)
        log.damaged = True
        log._go_offline(reason)
        return log

    def _take(self, opened: OpenedLog) -> None:
        self._segments = opened.segments
        self._bases = [segment.base_offset for segment in opened.segments]
        self._state = opened.state
        self._epochs = opened.epochs
        self._latest_epoch = opened.epochs.latest_epoch
        if not opened.epochs_saved and len(opened.epochs):
            self._epochs_version += 1
        self.log_start_offset = opened.state.log_start_offset
        self.log_end_offset = self.synced_end_offset = opened.log_end_offset

    def _open(self) -> None:
        """Find out what a cleanly closed log consists of, now that it is used."""
        if self._clean_end is None:
            return
        try:
            self._take(open_clean(self._fs, self._directory, self._config, self._clean_end))
        except (CorruptLogError, OSError) as error:
            raise self._damage(error) from error
        self._clean_end = None

    def close(self, *, clean: bool) -> None:
        """Let go of everything; with ``clean``, sync first. Raises OSError and DiskFullError then."""
        if self._active is not None:
            self._active.close_for_append()
        if clean and self.offline_reason is None:
            work = self._sync_work()
            try:
                if work is not None:
                    work.run()
                    self._finished(work)
                self._save_active_index()
            except OSError as error:
                self._go_offline(f"sync failed: {error}")
                raise
        for segment in self._segments:
            segment.release()
        self._active = None

    def _save_active_index(self) -> None:
        if self._segments and self._segments[-1].indexes_loaded:
            active = self._segments[-1]
            active.save_indexes(active.size_bytes, final=True)

    @property
    def clean_end(self) -> CleanEnd | None:
        """What a clean-shutdown marker may say of this log: None unless all of it is synced."""
        if self.offline_reason is not None or self.has_unsynced:
            return None
        return CleanEnd(self.log_start_offset, self.log_end_offset)

    @property
    def recovery_point(self) -> RecoveryPoint:
        if self._clean_end is not None:
            self._open()
        return RecoveryPoint(self.synced_end_offset, self._state.truncations)

    @property
    def config(self) -> LogConfig:
        return self._config

    def reconfigure(self, config: LogConfig) -> None:
        """Use another configuration from now on."""
        self._config = config
        self._log_append_time = config.timestamp_type is TimestampType.LOG_APPEND_TIME
        self._index_full_entries = config.segment_index_bytes // OFFSET_ENTRY_BYTES
        self._roll_size_bytes = -1  # the limits are worked out again at the next append
        for segment in self._segments:
            segment.reconfigure(config)

    # --- appending -------------------------------------------------------------------------------------

    def append(
        self,
        batch: bytearray | memoryview,
        *,
        now_ms: int,
        leader_epoch: int,
        header: BatchHeader | None = None,
    ) -> Appended:
        """Write one batch at the end, as the leader: its offset and epoch are stamped into it in place.

        ``now_ms`` is wall-clock time. With ``header`` the caller vouches for the batch (length and CRC).
        Not synced. Raises CorruptBatchError, MessageTooLargeError, DiskFullError (nothing changed, the
        log stays usable), LogOfflineError.
        """
        if header is None:
            header = check(batch)
        size = len(batch)
        if size > self._config.max_message_bytes:
            raise MessageTooLargeError(
                f"a batch of {size} bytes; this topic takes {self._config.max_message_bytes}"
            )
        base_offset = self.log_end_offset
        last_offset = base_offset + header.last_offset_delta
        segment = self._segment_for(size, last_offset, now_ms)
        if leader_epoch != self._latest_epoch:
            self.start_epoch(leader_epoch)
        stamp(batch, base_offset=base_offset, leader_epoch=leader_epoch)
        append_time_ms, max_timestamp_ms = NO_TIMESTAMP, header.max_timestamp_ms
        if self._log_append_time:
            stamp_log_append_time(batch, now_ms)
            append_time_ms = max_timestamp_ms = now_ms
        try:
            segment.append(batch, base_offset, last_offset, max_timestamp_ms)
        except DiskFullError:
            raise
        except (OSError, CorruptLogError) as error:
            raise self._write_failed(error) from error
        self.log_end_offset = end = last_offset + 1
        self._appends += 1
        return Appended(base_offset, last_offset, append_time_ms, end)

    def append_as_follower(self, batches: Buffer, *, now_ms: int) -> None:
        """Write whole batches as a leader sent them, the first with this log's end as base offset (R1).

        Raises CorruptBatchError with nothing written when one is not intact or not the next one.
        """
        view = memoryview(batches)
        position, offset, epoch = 0, self.log_end_offset, self.latest_epoch
        headers: list[tuple[int, BatchHeader]] = []
        while position < len(view):
            length = total_length(view, position)
            header = check(view[position : position + length])
            if header.base_offset != offset or header.leader_epoch < epoch:
                raise CorruptBatchError(
                    f"a batch with offset {header.base_offset} and leader epoch {header.leader_epoch};"
                    f" the next has offset {offset} and epoch {epoch} or above"
                )
            headers.append((position, header))
            position += length
            offset, epoch = header.next_offset, header.leader_epoch
        for position, header in headers:
            segment = self._segment_for(header.length_bytes, header.last_offset, now_ms)
            if header.leader_epoch != self._latest_epoch:
                self.start_epoch(header.leader_epoch)
            batch = view[position : position + header.length_bytes]
            try:
                segment.append(batch, header.base_offset, header.last_offset, header.max_timestamp_ms)
            except DiskFullError:
                raise
            except (OSError, CorruptLogError) as error:
                raise self._write_failed(error) from error
            self.log_end_offset = header.next_offset
            self._appends += 1

    def _segment_for(self, size: int, last_offset: int, now_ms: int) -> Segment:
        """The segment to write a batch of ``size`` bytes to, after a roll if one is due."""
        segment = self._active
        if (
            segment is None
            or segment.size_bytes + size > self._roll_size_bytes
            or now_ms >= self._roll_ms
            or last_offset > self._roll_offset
            or len(segment.offset_index.positions) >= self._index_full_entries
        ):
            try:
                return self._prepare_segment(size, last_offset, now_ms)
            except DiskFullError:
                raise
            except (OSError, CorruptLogError) as error:
                raise self._write_failed(error) from error
        return segment

    def _prepare_segment(self, size: int, last_offset: int, now_ms: int) -> Segment:
        """As ``_segment_for``, when something has to be opened, rolled or worked out."""
        segment = self._open_active()
        if segment.size_bytes and self._roll_size_bytes < 0:
            self._arm_roll(segment, now_ms)
        if segment.size_bytes and (
            segment.size_bytes + size > self._roll_size_bytes
            or now_ms >= self._roll_ms
            or last_offset > self._roll_offset
            or len(segment.offset_index) >= self._index_full_entries
        ):
            self.roll()
            segment = self._open_active()
        if segment.size_bytes == 0:
            segment.first_append_ms = now_ms
            self._arm_roll(segment, now_ms)
            # A batch larger than a whole segment gets one of its own.
            self._roll_size_bytes = max(self._roll_size_bytes, size)
        return segment

    def _arm_roll(self, segment: Segment, now_ms: int) -> None:
        """Work out at which size, time and offset the active segment is full."""
        config = self._config
        if segment.first_append_ms == NO_TIMESTAMP:  # opened, not created: the first batch tells
            first_ms = parse_header(segment.view()).max_timestamp_ms
            segment.first_append_ms = first_ms if NO_TIMESTAMP < first_ms < now_ms else now_ms
        jitter_ms = 0
        if config.segment_jitter_ms:  # spread over logs and segments, and the same each time
            seed = zlib.crc32(segment.path().encode())
            jitter_ms = seed % min(config.segment_jitter_ms, config.segment_ms)
        self._roll_size_bytes = config.segment_bytes
        self._roll_ms = segment.first_append_ms + config.segment_ms - jitter_ms
        self._roll_offset = segment.base_offset + MAX_SEGMENT_BYTES

    def _open_active(self) -> Segment:
        """The active segment, ready for writing; the first one is created."""
        if self.offline_reason is not None:
            raise self._offline_error()
        if self._active is not None:
            return self._active
        self._open()
        if not self._segments:
            self._add_segment()
        segment = self._segments[-1]
        segment.load_indexes()
        self._roll_size_bytes = -1
        self._active = segment
        return segment

    def _add_segment(self) -> Segment:
        segment = Segment.create(
            self._fs, self._directory, self.log_end_offset, self._config, self._state
        )
        self._segments.append(segment)
        self._bases.append(segment.base_offset)
        self._directory_changes += 1
        return segment

    def roll(self) -> None:
        """Begin a new segment, unless the active one is empty. Raises DiskFullError with nothing changed."""
        old = self._open_active()
        if old.size_bytes == 0:
            return
        self._active = self._add_segment()
        self._roll_size_bytes = -1
        self._roll_ms = self._roll_offset = _NEVER
        self._unsynced.append(old)
        self._rolls += 1
        old.close_for_append()

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll if the active segment is older than ``segment.ms``. ``now_ms`` is wall-clock time."""
        active = self._active
        if active is None or active.size_bytes == 0 or self.offline_reason is not None:
            return False
        if self._roll_size_bytes < 0:
            self._arm_roll(active, now_ms)
        if now_ms < self._roll_ms:
            return False
        self._guarded_roll()
        return True

    def _guarded_roll(self) -> None:
        try:
            self.roll()
        except DiskFullError:
            raise
        except OSError as error:
            raise self._write_failed(error) from error

    # --- syncing ---------------------------------------------------------------------------------------

    @property
    def has_unsynced(self) -> bool:
        """Whether a sync would make something durable that is not."""
        return (
            self.synced_end_offset < self.log_end_offset
            or bool(self._unsynced)
            or self._directory_changes > self._directory_changes_synced
            or self._epochs_version > self._epochs_version_saved
        )

    def begin_sync(self) -> SyncWork | None:
        """What is to be synced now, or None: nothing, or a round is under way, or the log is offline.

        The caller runs it, in a thread if it likes, and then calls ``finish_sync`` in its own. Appending
        goes on meanwhile; it is for the next round.
        """
        if self._sync is not None or self.offline_reason is not None:
            return None
        self._sync = self._sync_work()
        return self._sync

    def _sync_work(self) -> SyncWork | None:
        if not self.has_unsynced:
            return None
        active = self._segments[-1] if self._segments else None
        files = [segment.file for segment in self._unsynced]
        if active is not None and self.synced_end_offset < self.log_end_offset:
            files.append(active.file)
        directories = []
        if self._directory_changes > self._directory_changes_synced:
            directories.append(self._directory)
        if self._parent_unsynced:
            directories.append(layout.parent(self._directory))
        epochs = None
        if self._epochs_version > self._epochs_version_saved:
            path = layout.join(self._directory, layout.LEADER_EPOCHS_FILE)
            epochs = path, encode_leader_epochs(self._epochs.entries(), self._state.truncations)
        return SyncWork(
            self._fs,
            files,
            directories,
            epochs,
            end_offset=self.log_end_offset,
            closed=list(self._unsynced),
            active=active,
            truncations=self._state.truncations,
            directory_changes=self._directory_changes,
            epochs_version=self._epochs_version,
        )

    def finish_sync(self, work: SyncWork, error: BaseException | None) -> None:
        """Take the outcome of ``work.run()``. A failed sync is final: the log goes offline (R26).

        DiskFullError is no failed sync: nothing was counted, and the next round tries again.
        """
        self._sync = None
        if isinstance(error, DiskFullError):
            logger.warning("event=sync_postponed directory=%s error=%r", self._directory, str(error))
        elif error is not None:
            self._go_offline(f"sync failed: {error}")
        elif work.truncations == self._state.truncations:
            self._finished(work)

    def _finished(self, work: SyncWork) -> None:
        self._syncs += 1
        self._parent_unsynced = False
        self._directory_changes_synced = work.directory_changes
        self._epochs_version_saved = work.epochs_version
        self.synced_end_offset = max(self.synced_end_offset, work.end_offset)
        for segment in work.closed:
            if segment in self._unsynced:
                self._unsynced.remove(segment)
                segment.save_indexes(segment.size_bytes, final=True)
        if work.active is self._active and work.active is not None:
            work.active.save_indexes(work.active_position, final=False)

    # --- reading ---------------------------------------------------------------------------------------

    def read(self, offset: int, *, max_bytes: int, up_to: int, at_least_one: bool = True) -> Slice:
        """Whole batches from the one that holds ``offset`` on, all below ``up_to`` (exclusive).

        As many as fit in ``max_bytes``; the first one in any case if ``at_least_one``. The views stay
        valid while they are held, whatever becomes of the files. Raises OffsetOutOfRangeError outside
        [log_start_offset, log_end_offset]; LogOfflineError when damage is met.
        """
        limit = min(up_to, self.log_end_offset)
        if not self.log_start_offset <= offset < limit:
            return self._read_nothing(offset)
        if self.damaged or self._clean_end is not None:
            self._open_for_reading()
        self._reads += 1
        buffers: list[memoryview] = []
        size_bytes, next_offset = 0, offset
        number = bisect_right(self._bases, offset) - 1
        try:
            while next_offset < limit:
                run = self._segments[number].read(
                    next_offset, max_bytes - size_bytes, limit, at_least_one=at_least_one and not buffers
                )
                if not run.view:
                    break
                buffers.append(run.view)
                size_bytes += len(run.view)
                next_offset = run.next_offset
                number += 1
                if size_bytes >= max_bytes or number == len(self._segments):
                    break
                if next_offset != self._bases[number]:
                    break
        except (CorruptLogError, OSError) as error:
            raise self._damage(error) from error
        return Slice(buffers, size_bytes, next_offset)

    def _read_nothing(self, offset: int) -> Slice:
        """An empty slice for an offset in range with nothing below the limit, or the error."""
        if self.log_start_offset <= offset <= self.log_end_offset:
            return Slice([], 0, offset)
        raise OffsetOutOfRangeError(
            f"offset {offset} is outside [{self.log_start_offset}, {self.log_end_offset}]"
        )

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """(max timestamp, base offset) of the first batch whose max timestamp is not below
        ``timestamp_ms``, or None. Below the log start there is nothing to find."""
        self._open_for_reading()
        start = self.log_start_offset
        try:
            for segment in self._segments:
                if segment.next_offset > start:
                    found = segment.find_timestamp(timestamp_ms, start)
                    if found is not None:
                        return found[0], max(found[1], start)
        except (CorruptLogError, OSError) as error:
            raise self._damage(error) from error
        return None

    def max_timestamp(self) -> tuple[int, int] | None:
        """(largest timestamp, base offset of the first batch that has it), or None in an empty log."""
        self._open_for_reading()
        try:
            for segment in self._segments:
                segment.load_indexes()
        except (CorruptLogError, OSError) as error:
            raise self._damage(error) from error
        largest = max((segment.max_timestamp_ms for segment in self._segments), default=NO_TIMESTAMP)
        return None if largest == NO_TIMESTAMP else self.offset_for_timestamp(largest)

    def _open_for_reading(self) -> None:
        if self.damaged:
            raise self._offline_error()
        self._open()

    # --- epochs ----------------------------------------------------------------------------------------

    @property
    def latest_epoch(self) -> int:
        """Of the last batch, or of the current leadership; NO_EPOCH (-1) when there is none."""
        self._open()
        return self._latest_epoch

    @property
    def leader_epochs(self) -> list[EpochEntry]:
        self._open()
        return self._epochs.entries()

    def start_epoch(self, leader_epoch: int) -> None:
        """The batches from the log end on are of ``leader_epoch``: called by a leader taking over (R2)."""
        self._open()
        if self._epochs.assign(leader_epoch, self.log_end_offset):
            self._latest_epoch = leader_epoch
            self._epochs_version += 1

    def forget_empty_epoch(self) -> None:
        """Drop the epoch that has no batch, if there is one: called by a replica becoming follower (R5)."""
        self._open()
        if self._epochs.truncate_from_end(self.log_end_offset):
            self._latest_epoch = self._epochs.latest_epoch
            self._epochs_version += 1

    def end_offset_for_epoch(self, leader_epoch: int) -> EpochEntry:
        """(the largest known epoch not above ``leader_epoch``, its end offset, exclusive): R4."""
        self._open()
        return self._epochs.end_offset_for(leader_epoch, self.log_end_offset)

    # --- removing --------------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> int:
        """Cut off the batch that holds ``offset`` and all behind it, durably. Returns the new log end.

        Only a follower that was told to by its leader does this (R4). Synced before return. Raises
        OffsetOutOfRangeError below the log start, DiskFullError with nothing changed, LogOfflineError.
        """
        self._open_active()
        if offset < self.log_start_offset:
            self._read_nothing(offset)
        if offset >= self.log_end_offset:
            self.forget_empty_epoch()
            return self.log_end_offset
        number = bisect_right(self._bases, offset) - 1
        segment = self._segments[number]
        try:
            found = segment.find(offset)
            self._truncate(number, found)
        except DiskFullError:
            raise
        except (OSError, CorruptLogError) as error:
            raise self._write_failed(error) from error
        return self.log_end_offset

    def _truncate(self, number: int, found: Found) -> None:
        """In an order that leaves, wherever it is cut, the old log or a shorter prefix of it.

        First the log state says durably that nothing said earlier holds above the new end: neither the
        recovery point nor any index block. Then files go and bytes are zeroed, and that is synced.
        """
        end = found.base_offset
        start = min(self.log_start_offset, end)
        self._write_state(LogState(start, self._state.truncations + 1, end))
        segment = self._segments[number]
        for later in reversed(self._segments[number + 1 :]):
            self._unlink_segment(later)
        del self._segments[number + 1 :]
        del self._bases[number + 1 :]
        segment.drop_saved_indexes()
        segment.truncate_to_position(found)
        for dirty in {*self._unsynced, segment}:
            if dirty in self._segments:
                dirty.file.sync()
        self._fs.sync_dir(self._directory)
        for dirty in self._unsynced:
            if dirty in self._segments and dirty is not segment:
                dirty.save_indexes(dirty.size_bytes, final=True)
        self._unsynced.clear()
        self._directory_changes_synced = self._directory_changes
        self._active = segment
        self._roll_size_bytes = -1
        self.log_start_offset = start
        self.log_end_offset = self.synced_end_offset = end
        self._epochs.truncate_from_end(end)
        self._latest_epoch = self._epochs.latest_epoch
        self._epochs_version += 1

    def delete_before(self, offset: int) -> int:
        """Move the log start up to ``offset``, durably, and retire the segments below it.

        Returns the log start, which never moves back. Raises OffsetOutOfRangeError above the log end,
        DiskFullError with nothing changed, LogOfflineError.
        """
        if self.offline_reason is not None:
            raise self._offline_error()
        self._open_for_reading()
        if offset > self.log_end_offset:
            self._read_nothing(offset)
        if offset > self.log_start_offset:
            count = max(bisect_right(self._bases, offset) - 1, 0)
            self._delete(count, offset)
        return self.log_start_offset

    def apply_retention(
        self, now_ms: int, wall_ms: int | None = None, *, up_to: int | None = None
    ) -> list[str]:
        """Retire the segments that retention.ms and retention.bytes let go. Returns their file names.

        ``now_ms`` counts for file.delete.delay.ms, ``wall_ms`` (else ``now_ms``) for the records' age.
        ``up_to`` is the high watermark, exclusive; without it what is synced, or with page-cache
        durability all, may go. Raises as ``delete_before``.
        """
        if self.offline_reason is not None:
            return []
        self._open_for_reading()
        if up_to is None:
            up_to = self.synced_end_offset if self._config.synced_only else self.log_end_offset
        plan = plan_retention(
            self._summaries(),
            log_size_bytes=self.size_bytes,
            log_start_offset=self.log_start_offset,
            up_to=up_to,
            retention_ms=self._config.retention_ms,
            retention_bytes=self._config.retention_bytes,
            now_ms=now_ms if wall_ms is None else wall_ms,
        )
        names: list[str] = []
        if plan.count:
            if plan.count == len(self._segments):
                self._guarded_roll()
            names = self._delete(plan.count, plan.log_start_offset)
        self._remove_retired(now_ms)
        return names

    def _summaries(self) -> Iterator[SegmentSummary]:
        for segment in self._segments:
            try:
                segment.load_indexes()
            except (CorruptLogError, OSError) as error:
                raise self._damage(error) from error
            yield SegmentSummary(
                segment.base_offset, segment.next_offset, segment.size_bytes, segment.max_timestamp_ms
            )

    def _delete(self, count: int, log_start_offset: int) -> list[str]:
        """Move the log start durably, then retire the ``count`` oldest segments."""
        try:
            self._write_state(self._state._replace(log_start_offset=log_start_offset))
            self.log_start_offset = log_start_offset
            if self._epochs.truncate_from_start(log_start_offset):
                self._epochs_version += 1
            retired = self._segments[:count]
            del self._segments[:count]
            del self._bases[:count]
            for segment in retired:
                self._retire_segment(segment)
            if retired:
                self._fs.sync_dir(self._directory)
        except DiskFullError:
            raise
        except OSError as error:
            raise self._write_failed(error) from error
        return [layout.segment_file_name(segment.base_offset, layout.LOG_SUFFIX) for segment in retired]

    def _retire_segment(self, segment: Segment) -> None:
        """Rename a segment's files, so that they are gone for a start, and keep them for a while."""
        if segment in self._unsynced:
            self._unsynced.remove(segment)
        for suffix in layout.SEGMENT_SUFFIXES:
            path = segment.path(suffix)
            if self._fs.exists(path):
                self._fs.rename(path, path + layout.DELETED_SUFFIX)
                self._retired.append((path + layout.DELETED_SUFFIX, None))
        segment.release()
        self._segments_deleted += 1

    def _remove_retired(self, now_ms: int) -> None:
        """Unlink what was retired ``file.delete.delay.ms`` before; what is new starts waiting."""
        delay_ms = self._config.file_delete_delay_ms
        dated = [(path, now_ms + delay_ms if due is None else due) for path, due in self._retired]
        self._retired = [(path, due) for path, due in dated if due > now_ms]
        for path, due in dated:
            if due <= now_ms:
                self._fs.unlink(path)

    def _unlink_segment(self, segment: Segment) -> None:
        for suffix in layout.SEGMENT_SUFFIXES:
            path = segment.path(suffix)
            if self._fs.exists(path):
                self._fs.unlink(path)
        segment.release()

    def _write_state(self, state: LogState) -> None:
        path = layout.join(self._directory, layout.LOG_STATE_FILE)
        self._fs.write_atomically(path, encode_log_state(state))
        self._state = state
        for segment in self._segments:
            segment.state = state

    # --- state -----------------------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def size_bytes(self) -> int:
        """Of all batches, without space allocated ahead."""
        self._open_for_reading()
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def segment_count(self) -> int:
        self._open_for_reading()
        return len(self._segments)

    def statistics(self) -> LogStatistics:
        segments = self._segments
        return LogStatistics(
            segment_count=len(segments),
            size_bytes=sum(segment.size_bytes for segment in segments),
            appends=self._appends,
            reads=self._reads,
            rolls=self._rolls,
            syncs=self._syncs,
            segments_deleted=self._segments_deleted,
            bytes_scanned=sum(segment.lookup_bytes_scanned for segment in segments),
            boundary_bytes_scanned=sum(segment.boundary_bytes_scanned for segment in segments),
        )

    def release_idle(self) -> int:
        """Let go of files and maps not used since the last call. Returns how many segments that were."""
        released = 0
        for segment in self._segments:
            if segment.used:
                segment.used = False
            elif segment not in self._unsynced and segment is not self._active and segment.release():
                released += 1
        return released

    def _offline_error(self) -> LogOfflineError:
        return LogOfflineError(
            f"the log in {self._directory} is offline: {self.offline_reason}",
            hint="restart the broker once the disk is repaired; see its log",
        )

    def _go_offline(self, reason: str) -> None:
        if self.offline_reason is None:
            self.offline_reason = reason
            logger.error("event=log_offline directory=%s reason=%r", self._directory, reason)
        self._active = None

    def _write_failed(self, error: BaseException) -> LogOfflineError:
        self._go_offline(f"write failed: {error}")
        return self._offline_error()

    def _damage(self, error: BaseException) -> LogOfflineError:
        """Something that was intact when it was written is not: no more reading either (R24)."""
        self.damaged = True
        self._go_offline(str(error))
        return self._offline_error()
