"""Log: the record batches of one partition, from the log start offset to the log end offset.

A log is synchronous and belongs to one thread. Only the work objects and functions that it returns may run in
another thread. Appending never syncs: the owner calls ``begin_sync``, runs the work and calls
``finish_sync``, which advances ``synced_end_offset`` (R7). A failed write or sync takes the log offline for
the rest of the process (R26), unless a resource was exhausted. An offline log can still be read, a damaged
one up to its sound end (R24). Batches that this process has not written are checked before they are read for
the first time. Every read checks that each batch has the expected offset and epoch (R43).

Files are opened when they are first needed, so an unused log has no open file and no map. ``now_ms`` is
always wall clock time, like the timestamps of records.
"""

# Long because one object owns the offsets and the failure state that all its operations read and change.

from __future__ import annotations

import errno
import logging
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from kafkalite.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    LogMovingError,
    LogOfflineError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
    StorageError,
    StorageExhaustedError,
)
from kafkalite.limits import MAX_SEGMENT_BYTES
from kafkalite.log_fields import Fields, Uncut
from kafkalite.model import NO_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP, TimestampType
from kafkalite.records.control import check_at
from kafkalite.records.gaps import replaced_by
from kafkalite.records.header import (
    CONTROL_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    check,
    stamp,
    stamp_log_append_time,
    stored_crc,
)
from kafkalite.storage.checkpoints import CleanEnd, LogState, PartitionIdentity, RecoveryPoint
from kafkalite.storage.compaction_pass import CompactionPass
from kafkalite.storage.compaction_state import Cleanable, CompactionState
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.damage import Damage, repair_hint
from kafkalite.storage.filesystem import Buffer, FileSystem
from kafkalite.storage.index_block import OFFSET_ENTRY_BYTES
from kafkalite.storage.leader_epochs import EpochEnd, EpochEntry, LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.producer_snapshots import ProducerSnapshots
from kafkalite.storage.producer_state import ProducerStates
from kafkalite.storage.recovery import OpenedLog, RecoverySync, open_clean, recover
from kafkalite.storage.retention import RetiredPaths, plan_retention
from kafkalite.storage.scrub import SegmentScrub
from kafkalite.storage.segment import Found, Segment
from kafkalite.storage.segment_list import BytesEnd, SegmentList
from kafkalite.storage.sync_work import StateWork, SyncState, SyncWork

logger = logging.getLogger(__name__)

#: How long a torn tail is kept beside the log, from the first retention pass of the session on.
TORN_KEPT_MS: Final = 7 * 24 * 3_600_000

_new: Final = tuple.__new__  # takes half the time of a named tuple's constructor
_NEVER: Final = 2**63 - 1
_UNWRITTEN: Final = NO_EPOCH - 1
_TRANSACTION_BITS: Final = TRANSACTIONAL_BIT | CONTROL_BIT


class Appended(NamedTuple):
    """The result of appending a batch. ``last_offset`` is inclusive.

    ``log_append_time_ms`` is NO_TIMESTAMP unless the topic uses LogAppendTime. ``is_duplicate``: the log
    already contained the batch, so nothing was written (R28). ``base_offset`` and ``last_offset`` are then
    those of the batch in the log.
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    log_end_offset: int
    is_duplicate: bool = False


class Slice(NamedTuple):
    """Complete batches, with one buffer for each segment. The first batch may begin before the requested
    offset. ``next_offset`` follows the last batch; it is the requested offset if there is no batch."""

    buffers: list[memoryview]
    size_bytes: int
    next_offset: int


class Log:
    """The batches of one partition, in segments.

    Invariant: log_start_offset <= synced_end_offset <= log_end_offset, unless records were deleted before
    they were synced. The start is inclusive, both ends are exclusive.
    """

    __slots__ = (
        "_active",
        "_clean_end",
        "_closed_end",
        "_compaction",
        "_config",
        "_directory",
        "_epoch_to_start",
        "_epochs",
        "_fs",
        "_index_full_entries",
        "_is_closed",
        "_is_frozen",
        "_latest_epoch",
        "_log_append_time",
        "_producers",
        "_roll_ms",
        "_roll_offset",
        "_roll_size_bytes",
        "_segments",
        "_state",
        "_swap",
        "_sync",
        "_torn",
        "_written_epoch",
        "damage",
        "log_end_offset",
        "log_start_offset",
        "must_reopen",
        "offline_reason",
        "on_moved",
        "synced_end_offset",
        "torn_records",
    )

    def __init__(
        self, fs: FileSystem, directory: str, config: LogConfig, *, start: int = 0, end: int = 0
    ) -> None:
        self._fs = fs
        self._directory = directory
        self.log_start_offset = start
        self.log_end_offset = end
        self.synced_end_offset = end
        #: The reason if the log is offline, which lasts for the rest of the process; else None.
        self.offline_reason: str | None = None
        #: Whether a truncation lacked a resource, so that the log must be recovered from its files (R55).
        self.must_reopen = False
        #: The damage, once records are lost or cannot be trusted; implies ``offline_reason``.
        self.damage: Damage | None = None
        #: The number of records that recovery cut off as a torn tail. None is known to be acknowledged.
        self.torn_records = 0
        self._torn = RetiredPaths()
        #: Called in any thread when the recovery point has moved, with the log's directory and either the new
        #: point or the sync that moved it.
        self.on_moved: Callable[[str, SyncWork | RecoveryPoint], None] | None = None
        self._is_closed = False
        self._is_frozen = False  #: set by ``freeze``
        #: Set until a cleanly closed log is used for the first time. Until then no file is read.
        self._clean_end: CleanEnd | None = None
        self._closed_end: CleanEnd | None = None  #: set by an orderly close of a log that was used
        #: The last segment if it is ready for writing; None before the first write and when offline.
        self._active: Segment | None = None
        #: The durable content of the log-state file.
        self._state = LogState()
        self._epochs = LeaderEpochs()
        self._segments = SegmentList(fs, directory, (), self._epochs)
        #: ``_epochs.latest_epoch``, copied for the append path.
        self._latest_epoch = NO_EPOCH
        #: The last epoch in the leader-epochs file. _UNWRITTEN if the file may lack an epoch.
        self._written_epoch = _UNWRITTEN
        #: The epoch of a leadership that began while ``_clean_end`` was set, or NO_EPOCH.
        self._epoch_to_start = NO_EPOCH
        self._producers = ProducerSnapshots(fs, directory)
        self._sync = SyncState(fs, directory)
        self._compaction = CompactionState(fs, directory)
        #: The swap in progress, or None. While it is set, no segment closes its file.
        self._swap: SwapWork | None = None
        # The size, time and offset at which the active segment is full; a size of -1 is not computed yet.
        self._roll_size_bytes = -1
        self._roll_ms = self._roll_offset = _NEVER
        self.reconfigure(config)

    def __repr__(self) -> str:
        offline = f" offline: {self.offline_reason}" if self.offline_reason else ""
        return f"<Log {self._directory} [{self.log_start_offset}, {self.log_end_offset}){offline}>"

    # --- opening and closing ---------------------------------------------------------------------------

    @classmethod
    def create(cls, fs: FileSystem, directory: str, config: LogConfig) -> Log:
        """Create a log in a new directory. The directory is durable after the log's first sync."""
        fs.make_dirs(directory)
        log = cls(fs, directory, config)
        log._sync.is_parent_unsynced = True
        return log

    @classmethod
    def recover(
        cls,
        fs: FileSystem,
        directory: str,
        config: LogConfig,
        point: RecoveryPoint | None = None,
        *,
        may_lack_unsynced: bool = False,
    ) -> Log:
        """Open a log that was not stopped in an orderly way. ``may_lack_unsynced``: the system, not only the
        process, may have stopped.

        A damaged log is returned with ``damage``, readable up to its sound end. Raises the errors of
        ``recovery.recover``.
        """
        log, unsynced = cls.begin_recovery(fs, directory, config, point, may_lack_unsynced=may_lack_unsynced)
        if unsynced is not None:
            unsynced.run()
        return log

    @classmethod
    def begin_recovery(
        cls,
        fs: FileSystem,
        directory: str,
        config: LogConfig,
        point: RecoveryPoint | None = None,
        identity: PartitionIdentity | None = None,
        *,
        may_lack_unsynced: bool = False,
    ) -> tuple[Log, RecoverySync | None]:
        """Return (the log as ``recover`` returns it, the syncs that must succeed before the log is used). The
        syncs are None if nothing must be synced."""
        opened = recover(fs, directory, config, point or RecoveryPoint(), identity, may_lack_unsynced)
        log = cls(fs, directory, config)
        log._take(opened)
        return log, opened.unsynced

    @classmethod
    def open_clean(cls, fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd) -> Log:
        """Open a log that an orderly stop left at ``end``. No file is read before the first use."""
        log = cls(fs, directory, config, start=end.log_start_offset, end=end.log_end_offset)
        log._clean_end = end
        return log

    @classmethod
    def damaged(cls, fs: FileSystem, directory: str, config: LogConfig, cause: str) -> Log:
        """Return a damaged log without any readable record, for a log that cannot be opened."""
        log = cls(fs, directory, config)
        log.mark_damaged(cause)
        return log

    def mark_damaged(
        self,
        cause: str,
        *,
        sound_end_offset: int | None = None,
        records_in_doubt: int | None = None,
        leader_epoch: int | None = None,
    ) -> Damage:
        """Take the log offline because of damage (R24), and return the damage. If the log was already
        damaged, change nothing and return the earlier damage.

        Records below ``sound_end_offset`` can still be read. If it is None, no record can be trusted, so the
        sound end is the log start. ``records_in_doubt`` is as in ``Damage``. ``leader_epoch``: the leader
        epoch of the partition if the log has batches of a later one, else None.
        """
        if self.damage is None:
            sound_end = self.log_start_offset if sound_end_offset is None else sound_end_offset
            limit = self._limit_to(min(sound_end, self.log_end_offset))
            if records_in_doubt is not None:
                records_in_doubt += min(sound_end, self.log_end_offset) - limit
            hint = repair_hint(self._directory, leader_epoch)
            self.damage = Damage(cause, limit, records_in_doubt, hint)
            self._go_offline(str(self.damage))
        return self.damage

    def _limit_to(self, sound_end: int) -> int:
        """Prevent lookups from using batch headers at or above the sound end of a damaged log (R24). Return
        the end (exclusive) of the batches that can be read: the sound end, or less if the batches below it
        are not contiguous."""
        if not self.log_start_offset < sound_end < self.log_end_offset:
            return sound_end
        self._producers.limit_to(sound_end)
        number = self._segments.number_of(sound_end)
        if number < 0:
            return sound_end
        try:
            return self._segments.segments[number].limit_to(sound_end)
        except (StorageError, OSError) as error:  # a reader gets this error again
            logger.error("sound part not read %s", Fields(directory=self._directory, error=error))
            return sound_end

    def _take(self, opened: OpenedLog) -> None:
        self._segments = SegmentList(self._fs, self._directory, opened.segments, opened.epochs)
        self._state = opened.state
        self._epochs = opened.epochs
        self._latest_epoch = opened.epochs.latest_epoch
        self._written_epoch = _UNWRITTEN
        self._sync.saved_epochs = None
        if opened.epochs_saved:
            self._written_epoch, self._sync.saved_epochs = self._latest_epoch, opened.epochs.entries()
        self._producers = ProducerSnapshots(self._fs, self._directory, opened.producers_offsets)
        self.log_start_offset = opened.state.log_start_offset
        self.log_end_offset = self.synced_end_offset = opened.log_end_offset
        self.torn_records = opened.torn_records
        for path in opened.torn_files:
            self._torn.add(path)
        if opened.damage is not None:
            self.damage = opened.damage
            self._go_offline(str(opened.damage))

    def _open(self) -> None:
        """Read the segments and epochs of a cleanly closed log at its first use."""
        if self._clean_end is None:
            return
        if self.damage is not None:
            raise self._offline_error()
        end = self._clean_end
        with self._reading():
            try:
                self._take(open_clean(self._fs, self._directory, self._config, end))
            except CorruptLogError:  # find the sound part
                opened = recover(self._fs, self._directory, self._config, end.point)
                if opened.unsynced is not None:
                    opened.unsynced.run()
                self._take(opened)
        self._clean_end = None
        if self.is_damaged:
            # The partition may count on the offsets above the sound end: they are offline, not gone.
            self.log_end_offset = self.synced_end_offset = max(self.log_end_offset, end.log_end_offset)
            raise self._offline_error()
        if self._epoch_to_start > self._latest_epoch:
            self._epochs.assign(self._epoch_to_start, self.log_end_offset)
            self._latest_epoch = self._epoch_to_start
        elif self._epoch_to_start != NO_EPOCH:
            self.refuse_epochs_above(self._epoch_to_start)
            if self.is_damaged:
                raise self._offline_error()

    def close(self, *, clean: bool) -> None:
        """Close all files. If ``clean``, first sync the log, unless it is offline or was not used since a
        clean start. Raises OSError or StorageExhaustedError if that fails."""
        self._active = None
        self._is_closed = True
        self._sync.take_over_epochs()
        if not clean:
            self._segments.release()
            return
        try:
            if self.offline_reason is None and self._clean_end is None:
                last = self._segments.last if len(self._segments) else None
                if last is not None and last.has_space_ahead:
                    last.close_for_append()
                work = self._sync_work()
                work.run()
                self._synced(work)
                if last is not None:
                    last.load_indexes()
                    last.save_indexes(last.size_bytes, final=True)
                    self._save_producers(last, last.base_offset)
                self._closed_end = self._end_now()
        except CorruptLogError as error:
            self._read_failed(error)
        except OSError as error:
            self._go_offline(f"sync failed: {error}")
            raise
        finally:
            self._segments.release()

    def _end_now(self) -> CleanEnd:
        """Return the entry for the clean-shutdown marker, with the fingerprint of the last segment."""
        segments = self._segments
        end = None
        if len(segments) and segments.last.size_bytes:
            end = segments.last.fingerprint(segments.last.last_position)
        truncations, size = self._state.truncations, segments.size_bytes
        return CleanEnd(self.log_start_offset, self.log_end_offset, truncations, len(segments), size, end)

    @property
    def config(self) -> LogConfig:
        return self._config

    def reconfigure(self, config: LogConfig) -> None:
        """Use ``config`` from now on."""
        self._config = config
        self._log_append_time = config.timestamp_type is TimestampType.LOG_APPEND_TIME
        self._index_full_entries = config.segment_index_bytes // OFFSET_ENTRY_BYTES
        self._roll_size_bytes = -1  # to be computed at the next append
        self._segments.reconfigure(config)

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def is_damaged(self) -> bool:
        """Whether records are lost or cannot be trusted, as opposed to a disk that fails."""
        return self.damage is not None

    @property
    def is_open(self) -> bool:
        """Whether the log is not damaged, and its files were read. After a clean start, they are read at the
        first use."""
        return self._clean_end is None and self.damage is None

    @property
    def clean_end(self) -> CleanEnd | None:
        """The entry for the clean-shutdown marker. None if the log is offline or has unsynced changes."""
        if self.offline_reason is not None or self.has_unsynced:
            return None
        return self._clean_end or self._closed_end or self._end_now()

    @property
    def recovery_point(self) -> RecoveryPoint:
        """The recovery point at the synced end. It has a fingerprint only if the log ends there, and the
        position of its last batch is known."""
        self._open()
        end = None
        last = self._segments.last if len(self._segments) else None
        if last is not None and last.last_position >= 0 and last.next_offset == self.synced_end_offset:
            end = last.fingerprint(last.last_position) if last.size_bytes else None
        return RecoveryPoint(self.synced_end_offset, self._state.truncations, self.log_start_offset, end)

    def release(self) -> None:
        """Close all files and maps; they are opened again when they are needed."""
        self._segments.release()

    @property
    def size_bytes(self) -> int:
        """The size of all batches, without space allocated ahead."""
        self._open()
        return self._segments.size_bytes

    @property
    def segment_count(self) -> int:
        self._open()
        return len(self._segments)

    # --- appending -------------------------------------------------------------------------------------

    def append(
        self,
        batch: bytearray | memoryview,
        *,
        now_ms: int,
        leader_epoch: int,
        header: BatchHeader | None = None,
    ) -> Appended:
        """Append one batch as the leader. The offset, the epoch and, with LogAppendTime, the timestamp are
        written into ``batch`` itself. Nothing is synced.

        If ``header`` is given, the caller has checked the batch's length and CRC. Raises CorruptBatchError,
        MessageTooLargeError, LogOfflineError; StorageExhaustedError if the batch was not appended, but the
        log stays usable.
        """
        if header is None:
            header = check(batch)
        size = len(batch)
        if size > self._config.max_message_bytes and not header.is_control:
            raise MessageTooLargeError(
                f"a batch of {size} bytes exceeds max.message.bytes={self._config.max_message_bytes}"
            )
        base_offset = self.log_end_offset
        last_offset = base_offset + header.last_offset_delta
        segment = self._segment_for(size, last_offset, now_ms)
        if leader_epoch != self._written_epoch:
            self._write_epoch(leader_epoch)
        stamp(batch, base_offset=base_offset, leader_epoch=leader_epoch)
        append_time_ms, max_timestamp_ms = NO_TIMESTAMP, header.max_timestamp_ms
        if self._log_append_time:
            stamp_log_append_time(batch, now_ms)
            append_time_ms = max_timestamp_ms = now_ms
        try:
            segment.append(batch, base_offset, last_offset, max_timestamp_ms)
        except OSError as error:
            raise self._write_failed(error) from error
        self.log_end_offset = end = last_offset + 1
        if header.producer_id != NO_PRODUCER_ID:
            self._note_producer(header, batch, base_offset, max_timestamp_ms, now_ms)
        return _new(Appended, (base_offset, last_offset, append_time_ms, end, False))

    def append_as_follower(self, batches: Buffer, *, now_ms: int, leader_epoch: int | None = None) -> None:
        """Append complete batches as the leader sent them. The first must begin at this log's end (R1).

        Raises CorruptBatchError, with nothing written, if a batch is damaged, does not begin at the end of
        the previous one, has an older epoch than the previous one, or has a newer epoch than
        ``leader_epoch``, the leader's epoch (None: not checked). Also raises LogOfflineError and
        StorageExhaustedError; then some of the batches may already be written.
        """
        view = memoryview(batches)
        position, offset, epoch = 0, self.log_end_offset, self.latest_epoch
        headers: list[tuple[int, BatchHeader]] = []
        while position < len(view):
            header = check_at(view, position)
            if header.base_offset != offset or header.leader_epoch < epoch:
                raise CorruptBatchError(
                    f"a batch with offset {header.base_offset} and leader epoch {header.leader_epoch};"
                    f" the next has offset {offset} and epoch {epoch} or above"
                )
            headers.append((position, header))
            position += header.length_bytes
            offset, epoch = header.next_offset, header.leader_epoch
        if leader_epoch is not None and epoch > leader_epoch:
            raise CorruptBatchError(f"a batch of leader epoch {epoch} from a leader of epoch {leader_epoch}")
        for position, header in headers:
            segment = self._segment_for(header.length_bytes, header.last_offset, now_ms)
            if header.leader_epoch != self._written_epoch:
                self._write_epoch(header.leader_epoch)
            batch = view[position : position + header.length_bytes]
            try:
                segment.append(batch, header.base_offset, header.last_offset, header.max_timestamp_ms)
            except OSError as error:
                raise self._write_failed(error) from error
            self.log_end_offset = header.next_offset
            if header.producer_id != NO_PRODUCER_ID:
                self._note_producer(header, batch, header.base_offset, header.max_timestamp_ms, now_ms)
            elif header.is_control:
                self._note_gap(header, batch, now_ms)

    def _segment_for(self, size: int, last_offset: int, now_ms: int) -> Segment:
        """Return the segment for a batch of ``size`` bytes. Roll first if the active segment is full."""
        segment = self._active
        if (
            segment is None
            or segment.size_bytes + size > self._roll_size_bytes
            or now_ms >= self._roll_ms
            or last_offset > self._roll_offset
            or len(segment.offset_index.positions) >= self._index_full_entries
        ):
            return self._prepare_segment(size, last_offset, now_ms)
        return segment

    def _prepare_segment(self, size: int, last_offset: int, now_ms: int) -> Segment:
        """Open the active segment, compute its limits, and roll if it is full. The slow path of
        ``_segment_for``."""
        segment = self._open_active()
        if segment.size_bytes and self._roll_size_bytes < 0:
            self._arm_roll(segment, now_ms)
        if segment.size_bytes and (
            segment.size_bytes + size > self._roll_size_bytes
            or now_ms >= self._roll_ms
            or last_offset > self._roll_offset
            or len(segment.offset_index) >= self._index_full_entries
        ):
            segment = self.roll()
        if segment.size_bytes == 0:
            segment.first_append_ms = now_ms
            self._arm_roll(segment, now_ms)
            # A batch larger than a segment gets its own segment.
            self._roll_size_bytes = max(self._roll_size_bytes, size)
        return segment

    def _arm_roll(self, segment: Segment, now_ms: int) -> None:
        """Compute the size, time and offset at which the active segment is full."""
        config = self._config
        if segment.first_append_ms == NO_TIMESTAMP:  # another process created it: use its first timestamp
            first_ms = segment.first_timestamp_ms()
            segment.first_append_ms = first_ms if NO_TIMESTAMP < first_ms < now_ms else now_ms
        jitter_ms = 0
        if config.segment_jitter_ms:  # every segment gets its own jitter, the same after each start
            seed = zlib.crc32(segment.path().encode())
            jitter_ms = seed % min(config.segment_jitter_ms, config.segment_ms)
        self._roll_size_bytes = config.segment_bytes
        self._roll_ms = segment.first_append_ms + config.segment_ms - jitter_ms
        self._roll_offset = segment.base_offset + MAX_SEGMENT_BYTES

    def _open_active(self) -> Segment:
        """Return the active segment, ready for writing. Create the first one if there is none."""
        if self.offline_reason is not None:
            raise self._offline_error()
        if self._active is not None:
            return self._active
        if self._is_frozen:
            raise LogMovingError(f"the log in {self._directory} moves to another disk", hint="try again")
        self._open()
        try:
            if not len(self._segments):
                self._create_segment()
            self._segments.last.load_indexes()
            self._segments.last.ensure_head()
        except CorruptLogError as error:
            raise self._read_failed(error) from error
        except OSError as error:
            raise self._write_failed(error) from error
        self._roll_size_bytes = -1
        self._active = self._segments.last
        return self._active

    def freeze(self) -> None:
        """Refuse appends and truncations with LogMovingError until ``unfreeze``, because a copy replaces the
        log (R85). The log can be read."""
        self._is_frozen = True
        self._active = None  # so that each append opens it, which is refused

    def unfreeze(self) -> None:
        self._is_frozen = False

    @property
    def truncations(self) -> int:
        """The number of truncations that removed a batch, and of resets."""
        self._open()
        return self._state.truncations

    def _create_segment(self) -> Segment:
        segment = self._segments.create(self.log_end_offset, self._config, self._state)
        self._sync.names_changed += 1
        return segment

    def roll(self) -> Segment:
        """Begin a new segment unless the active one is empty. Return the active segment.

        Raises StorageExhaustedError, after which the log stays usable; LogOfflineError.
        """
        old = self._open_active()
        if old.size_bytes == 0:
            return old
        with self._writing():
            self._active = self._create_segment()
            self._sync.unsynced.append(old)
            old.close_for_append()
        self._save_producers(self._active, old.base_offset)
        self._roll_size_bytes = -1
        self._roll_ms = self._roll_offset = _NEVER
        return self._active

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll if the active segment has batches and has reached the age ``segment.ms`` minus its jitter.
        Return whether it rolled.

        Has no effect until the active segment is opened for writing. Raises the errors of ``roll``.
        """
        active = self._active
        if active is None or active.size_bytes == 0 or self.offline_reason is not None:
            return False
        if self._roll_size_bytes < 0:
            self._arm_roll(active, now_ms)
        if now_ms < self._roll_ms:
            return False
        self.roll()
        return True

    # --- reading ---------------------------------------------------------------------------------------

    def read(self, offset: int, *, max_bytes: int, up_to: int, at_least_one: bool = True) -> Slice:
        """Return complete batches below offset ``up_to``, beginning with the one that contains ``offset``.

        Returns as many as fit in ``max_bytes``. If ``at_least_one``, the size of the first one is not
        limited. The views stay valid while held, even if the files are removed.

        Raises OffsetOutOfRangeError outside [log_start_offset, log_end_offset]; LogOfflineError if the log is
        damaged and ``offset`` is at or above its sound end, or if this read finds damage; StorageError.
        """
        limit = min(up_to, self.log_end_offset)
        if self.damage is not None:
            limit = min(limit, self.damage.sound_end_offset)
        if not self.log_start_offset <= offset < limit:
            return self._read_nothing(offset)
        if self._clean_end is not None:
            self._open()
        try:
            return Slice(*self._segments.read(offset, max_bytes, limit, at_least_one))
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error

    def check_again(self, found: Slice) -> None:
        """Check the CRCs of the batches that a read has returned, also of those that this process has checked
        or written (R43). If a batch is damaged, mark the log as damaged and raise LogOfflineError."""
        for view in found.buffers:
            position = 0
            while position < len(view):
                try:
                    position += check_at(view, position).length_bytes
                except CorruptBatchError as error:
                    offset = int.from_bytes(view[position : position + 8], "big")
                    segment = self._segments.segments[self._segments.number_of(offset)]
                    actual = segment.damaged(segment.find(offset).position, "an intact batch", error.message)
                    raise self._read_failed(actual) from error

    def check_growth(self, offset: int, stable_end: int) -> None:
        """Raise LogOfflineError if the log is damaged and ``offset`` is at or above ``stable_end``, its last
        stable offset. A damaged log takes no transaction marker, so ``stable_end`` cannot grow."""
        if self.damage is not None and offset >= stable_end:
            raise self._offline_error()

    def _read_nothing(self, offset: int) -> Slice:
        """Return an empty slice for an offset within the log. Raises OffsetOutOfRangeError for others, and
        LogOfflineError at or above the sound end of a damaged log."""
        if self.damage is not None and offset >= self.damage.sound_end_offset:
            raise self._offline_error()
        if self.log_start_offset <= offset <= self.log_end_offset:
            return Slice([], 0, offset)
        raise OffsetOutOfRangeError(
            f"offset {offset} is outside [{self.log_start_offset}, {self.log_end_offset}]"
        )

    # Each lookup uses the segments' sizes and sparse indexes, and scans at most about one index interval of
    # batch headers, regardless of the length of the log and the requested range.

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """Return (max timestamp, base offset) of the first batch whose max timestamp is at least
        ``timestamp_ms``, or None if there is none. The offset is at least the log start; deleted batches are
        ignored."""
        self._open()
        with self._reading():
            found = self._segments.find_timestamp(timestamp_ms, self.log_start_offset)
        return None if found is None else (found[0], max(found[1], self.log_start_offset))

    def max_timestamp(self) -> tuple[int, int] | None:
        """Return (largest timestamp, base offset of the first batch with it, but at least the log start).
        Return None if no batch has a timestamp, or if the batches with the largest timestamp are below the
        log start."""
        self._open()
        with self._reading():
            largest = self._segments.largest_timestamp_ms()
        return None if largest == NO_TIMESTAMP else self.offset_for_timestamp(largest)

    def offset_for_bytes(self, start_offset: int, end_offset: int, max_bytes: int) -> BytesEnd:
        """Return how far the range [start_offset, end_offset) can be read with at most ``max_bytes`` of
        batches.

        A batch counts completely if any of its offsets is in the range. The first batch is included
        regardless of its size. Offsets outside the log have no bytes. Raises LogOfflineError if the log is
        damaged and the range extends beyond its sound end, or if this lookup finds damage; StorageError.
        """
        self._open()
        start, end = max(start_offset, self.log_start_offset), min(end_offset, self.log_end_offset)
        if start >= end:
            return BytesEnd(end_offset, 0, 0)
        if self.damage is not None and end > self.damage.sound_end_offset:
            raise self._offline_error()
        with self._reading():
            found = self._segments.find_bytes(start, end, max_bytes)
        return found._replace(end_offset=end_offset) if found.end_offset == end else found

    # --- syncing ---------------------------------------------------------------------------------------

    @property
    def has_unsynced(self) -> bool:
        """Whether a sync would make records, segments or file names durable."""
        return self.synced_end_offset < self.log_end_offset or self._sync.has_unsynced

    @property
    def has_unsynced_segments(self) -> bool:
        """Whether a closed segment is not synced, so that no compaction pass covers it."""
        return bool(self._sync.unsynced)

    def begin_sync(self) -> SyncWork | None:
        """Return the work of one sync round, or None if nothing is unsynced, a round runs, or the log is
        offline or closed.

        The caller runs the work in any thread and then calls ``finish_sync`` in the log's thread. Batches
        that are appended meanwhile belong to the next round.

        Raises StorageExhaustedError. If a file cannot be opened for another reason, takes the log offline and
        raises LogOfflineError.
        """
        if self._sync.round is not None or self._is_closed or self.offline_reason is not None:
            return None
        if not self.has_unsynced:
            return None
        try:
            self._sync.round = work = self._sync_work()
        except OSError as error:
            raise self._write_failed(error) from error
        return work

    def _sync_work(self) -> SyncWork:
        active = self._segments.last if len(self._segments) else None
        return self._sync.work(
            active,
            is_active_unsynced=self.synced_end_offset < self.log_end_offset,
            end_offset=self.log_end_offset,
            epochs=self._epochs.entries_below(self.log_end_offset),
            truncations=self._state.truncations,
            log_start_offset=self.log_start_offset,
        )

    def finish_sync(self, work: SyncWork, error: BaseException | None) -> None:
        """Process the result of ``work.run()``; ``error`` is its exception, or None.

        After a StorageExhaustedError nothing counts as synced, and a later round retries. After any other
        error the log is offline permanently (R26).
        """
        self._sync.round = None
        if self._is_closed:
            return  # ``close`` has synced everything, or the log was deleted
        if isinstance(error, StorageExhaustedError):
            logger.warning("sync postponed %s", Fields(directory=self._directory, error=error))
        elif error is not None:
            self._go_offline(f"sync failed: {error}")
        elif work.truncations == self._state.truncations and self.offline_reason is None:
            self._synced(work)

    def _synced(self, work: SyncWork) -> None:
        self._sync.complete(work)
        if self.on_moved is not None:
            self.on_moved(self._directory, work)
        self.synced_end_offset = max(self.synced_end_offset, work.end_offset)
        active = work.active
        if active is self._active and active is not None:
            active.save_indexes(work.active_position, final=False)
            if self._producers.is_due(active.size_bytes):
                self._save_producers(active, active.base_offset)

    # --- epochs ----------------------------------------------------------------------------------------

    @property
    def latest_epoch(self) -> int:
        """The epoch of the last batch, or the later epoch of a leader that has not written yet. NO_EPOCH (-1)
        if there is neither."""
        if self._clean_end is not None and self.log_start_offset == self.log_end_offset:
            return self._epoch_to_start  # an empty log has no other epoch, and need not be opened
        self._open()
        return self._latest_epoch

    @property
    def leader_epochs(self) -> list[EpochEntry]:
        self._open()
        return self._epochs.entries()

    def start_epoch(self, leader_epoch: int) -> None:
        """Begin ``leader_epoch`` at the log end. Called when a leader takes over (R2).

        After a clean stop, a log's files are opened at its first use. If they are not open yet, the epoch is
        assigned when they are.
        """
        if self._clean_end is not None:
            self._epoch_to_start = leader_epoch
            return
        self._open()
        self._epochs.assign(leader_epoch, self.log_end_offset)
        self._latest_epoch = leader_epoch

    def refuse_epochs_above(self, leader_epoch: int) -> None:
        """Mark the log as damaged if it has batches of a later epoch than the partition's ``leader_epoch``
        (R43)."""
        if self.latest_epoch <= leader_epoch:
            return
        newest = self.leader_epochs[-1]
        self.mark_damaged(
            f"batches from offset {newest.start_offset} on have leader epoch {newest.leader_epoch},"
            f" but the partition is in epoch {leader_epoch}",
            sound_end_offset=newest.start_offset,
            records_in_doubt=self.log_end_offset - newest.start_offset,
            leader_epoch=leader_epoch,
        )

    def _write_epoch(self, leader_epoch: int) -> None:
        """Begin ``leader_epoch`` if it is new, and write the leader-epochs file. Called before the first
        batch of the epoch is appended (R58).

        Raises StorageExhaustedError, LogOfflineError.
        """
        if leader_epoch != self._latest_epoch:
            self.start_epoch(leader_epoch)
        with self._writing():
            self._sync.write_ahead(self._epochs.entries(), self._state.truncations)
        self._written_epoch = leader_epoch

    def forget_empty_epoch(self) -> None:
        """Remove the latest leader epoch if it has no batch. Called when the replica becomes a follower, and
        after a truncation (R5)."""
        self._epoch_to_start = NO_EPOCH
        if self._clean_end is None:
            self._open()
            self._drop_empty_epochs()

    def _drop_empty_epochs(self) -> None:
        """Remove the epochs that start at or above the log end, because they have no batch (R5)."""
        self._epochs.truncate_from_end(self.log_end_offset)
        self._latest_epoch = self._epochs.latest_epoch
        if self._written_epoch != self._latest_epoch:
            self._written_epoch = _UNWRITTEN  # if the removed epoch begins again, it must be written again

    def end_offset_for_epoch(self, leader_epoch: int) -> EpochEnd:
        """Return the largest known epoch that is at most ``leader_epoch``, and its end offset (R4). See
        ``LeaderEpochs.end_offset_for`` if there is no such epoch."""
        self._open()
        return self._epochs.end_offset_for(leader_epoch, self.log_end_offset)

    # --- truncating ------------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> int:
        """Durably remove the batch that contains ``offset`` and all later ones. Return the new log end.

        Only a follower does this, if its leader's response requires it (R4). At or above the log end, this
        only forgets an epoch without a batch. Raises OffsetOutOfRangeError below the log start,
        StorageExhaustedError with no batch removed, LogOfflineError.
        """
        self._open_active()
        if offset < self.log_start_offset:
            self._read_nothing(offset)
        if offset >= self.log_end_offset:
            self.forget_empty_epoch()
            return self.log_end_offset
        number = self._segments.number_of(offset)
        with self._reading():
            found = self._segments.segments[number].find(offset)
        start = min(self.log_start_offset, found.base_offset)
        # The state is written first. From then on the recovery point and index blocks are valid only below
        # the new end, so that a crash leaves the old log or a shorter prefix of it.
        self._write_state(LogState(start, self._state.truncations + 1, found.base_offset))
        self.log_start_offset = start
        try:
            self._cut(number, found)
        except (StorageExhaustedError, OSError) as error:
            raise self._write_failed(error, is_partial=True) from error
        return self.log_end_offset

    def _cut(self, number: int, found: Found) -> None:
        """Remove the batches from ``found`` on in the segment with index ``number``, and all later segments.
        Sync the remaining log."""
        segment = self._segments.segments[number]
        closed = [one for one in self._sync.unsynced if one.base_offset < segment.base_offset]
        self._segments.drop_behind(number)
        segment.drop_saved_indexes()
        segment.truncate_to_position(found)
        segment.ensure_head()
        self._end_at(found.base_offset)
        for one in (*closed, segment):
            one.file.sync()
        self._fs.sync_dir(self._directory)
        for one in closed:
            one.save_indexes(one.size_bytes, final=True)
        self._active = segment
        self._synced_all()

    def reset_to(self, offset: int) -> None:
        """Durably remove all batches and continue at ``offset``. Used by a follower if no batch of the
        leader's log continues its own log (R4).

        Raises StorageExhaustedError with no batch removed, LogOfflineError.
        """
        if self.offline_reason is not None:
            raise self._offline_error()
        self._open()
        # The state is written first, which invalidates all checkpoints. After a crash the log then has no
        # batch below the new start. If it has batches above it, they still diverge from the leader's.
        self._write_state(LogState(offset, self._state.truncations + 1, 0))
        self.log_start_offset = offset
        try:
            self._active = None
            self._segments.drop_behind(-1)
            self._epochs.truncate_from_end(0)
            self._end_at(offset)
            self._fs.sync_dir(self._directory)
        except (StorageExhaustedError, OSError) as error:
            raise self._write_failed(error, is_partial=True) from error
        self._synced_all()

    def _end_at(self, offset: int) -> None:
        """Set the log end to ``offset``, and save the epochs below it."""
        self.log_end_offset = offset
        self._written_epoch = _UNWRITTEN
        self._producers.truncate(offset)
        self.forget_empty_epoch()
        self._sync.write_epochs(self._epochs.entries_below(offset), self._state.truncations)

    def _synced_all(self) -> None:
        """Mark the whole log as synced. Called after a truncation, which syncs the remaining bytes."""
        self._sync.forget()
        self._roll_size_bytes = -1
        self.synced_end_offset = self.log_end_offset
        if self.on_moved is not None:
            self.on_moved(self._directory, self.recovery_point)

    # --- deleting --------------------------------------------------------------------------------------

    def delete_before(self, offset: int) -> int:
        """Durably move the log start to ``offset``, and retire the segments below it.

        Returns the log start, which never moves back. Raises OffsetOutOfRangeError above the log end,
        StorageExhaustedError, LogOfflineError.
        """
        work = self.begin_delete(offset)
        if work is not None:
            self._write_state(work.state)
            self._delete(offset)
        return self.log_start_offset

    def begin_delete(self, offset: int) -> StateWork | None:
        """Return the part of ``delete_before`` that waits for the disk, or None if the log start does not
        move.

        The caller runs it in any thread and then calls ``finish_delete``. Appends and syncs continue
        meanwhile, but nothing else may remove records. Raises OffsetOutOfRangeError above the log end,
        LogOfflineError.
        """
        if self.offline_reason is not None:
            raise self._offline_error()
        self._open()
        if offset > self.log_end_offset:
            self._read_nothing(offset)
        if offset <= self.log_start_offset:
            return None
        return self._state_work(self._state._replace(log_start_offset=offset))

    def finish_delete(self, work: StateWork, error: BaseException | None) -> None:
        """Process the result of ``work.run()``; ``error`` is its exception, or None. Raises
        StorageExhaustedError, LogOfflineError."""
        if self._is_closed:
            return
        if self.offline_reason is not None:
            raise self._offline_error()
        if isinstance(error, StorageExhaustedError):
            self._write_state(work.state)
        elif error is not None:
            raise self._write_failed(error) from error
        else:
            self._take_state(work.state)
        self._delete(work.state.log_start_offset)

    def _delete(self, log_start_offset: int) -> None:
        """Retire the segments below the durable log start. Needs no sync: the next start would repeat it."""
        self.log_start_offset = log_start_offset
        self._epochs.truncate_from_start(log_start_offset)
        count = max(self._segments.number_of(log_start_offset), 0)
        with self._writing():
            retired = self._segments.retire(count)
            self._producers.delete_before(log_start_offset)
        self._sync.unsynced = [segment for segment in self._sync.unsynced if segment not in retired]
        if self.on_moved is not None:
            self.on_moved(self._directory, self.recovery_point)

    def retention_offset(self, now_ms: int, *, up_to: int) -> int:
        """Return the log start that retention.ms and retention.bytes require. If all segments may be deleted,
        roll first.

        ``up_to`` is the high watermark (exclusive). Raises the errors of ``roll``.
        """
        self._open()
        with self._reading():
            plan = plan_retention(
                self._segments.summaries(),
                log_size_bytes=self._segments.size_bytes,
                log_start_offset=self.log_start_offset,
                up_to=up_to,
                retention_ms=self._config.retention_ms,
                retention_bytes=self._config.retention_bytes,
                now_ms=now_ms,
            )
        if not plan.segment_count:
            return self.log_start_offset
        if plan.segment_count == len(self._segments):
            self.roll()
        return plan.log_start_offset

    def take_retired(self, now_ms: int) -> list[str]:
        """Return the files that the caller must unlink: those of retired segments after
        ``file.delete.delay.ms``, and torn tails after TORN_KEPT_MS.

        The delay of a file begins with the first call after it was retired or, for a torn tail, after the log
        was opened. Unlinking may take long, so it may run in any thread.
        """
        files = self._segments.take_retired(now_ms, self._config.file_delete_delay_ms)
        return files + self._torn.due(now_ms, TORN_KEPT_MS)

    def release_idle(self) -> int:
        """Close files and maps unused since the last call. Return the number of segments whose files were
        closed. Has no effect while there are unsynced changes or a swap runs."""
        if self.has_unsynced or self._swap is not None:
            return 0
        return self._segments.release_idle()

    def maintenance_due_ms(self, now_ms: int, producer_expiration_ms: int) -> float:
        """Return the wall clock time in milliseconds before which a maintenance pass would change nothing, if
        the log does not change: no roll, no retention, no expired producer, no idle file.

        Returns ``now_ms`` if that time is unknown, and infinity if no pass would change anything. Call it
        after a maintenance pass. Raises StorageError.
        """
        if self.has_unsynced or not self._segments.is_at_rest or len(self._torn) or self._swap is not None:
            return now_ms
        states = self._producers.states
        due_ms = math.inf if states is None else states.expires_ms(producer_expiration_ms)
        active = self._active
        if active is not None and active.size_bytes:
            if self._roll_size_bytes < 0:  # the log was reconfigured after the last pass
                return now_ms
            due_ms = min(due_ms, self._roll_ms)
        if self._config.retention_ms >= 0:
            with self._reading():
                oldest = next(iter(self._segments.summaries()), None)
            if oldest is not None and oldest.is_gap:
                return now_ms  # the segment is removed with the next one, whose age decides
            if oldest is not None and oldest.max_timestamp_ms != NO_TIMESTAMP:
                due_ms = min(due_ms, oldest.max_timestamp_ms + self._config.retention_ms + 1)
        return due_ms

    # --- scrubbing -------------------------------------------------------------------------------------

    def begin_scrub(self, offset: int) -> SegmentScrub | None:
        """Return a check of the first segment with an offset at or above ``offset``; None if there is none
        (R53).

        The caller calls ``run`` of the check, in any thread, until it is complete, and then ``finish_scrub``.
        Other operations continue meanwhile. Raises StorageError, OSError.
        """
        self._open()
        for segment in self._segments:
            if segment.next_offset > offset:
                return SegmentScrub(self._fs, segment, self._state.truncations)
        return None

    def finish_scrub(self, work: SegmentScrub) -> None:
        """Mark the log as damaged if the check has found damage, and the result is still valid: the segment
        is in use, no swap runs, and ``fits`` is true."""
        found = work.finding
        is_current = self._swap is None and work.segment in self._segments.segments
        if found is not None and is_current and self.fits(work):
            self.mark_damaged(
                found.cause, sound_end_offset=found.sound_end_offset, records_in_doubt=found.records_in_doubt
            )

    # --- compacting ------------------------------------------------------------------------------------
    #
    # The owner calls ``begin_compaction`` and runs the steps of the returned pass. For every ``SwapWork``
    # among them it calls ``begin_swap``, ``run`` in any thread, and ``finish_swap``; meanwhile nothing else
    # may remove records. At the end it calls ``finish_compaction``.

    def cleanable(self, now_ms: int, up_to: int) -> Cleanable:
        """Return how many bytes below offset ``up_to`` a compaction pass could cover, and how many of them
        were never compacted. Raises StorageError."""
        return self._compaction.cleanable(self._cleanable_segments(now_ms, up_to), self._state)

    def _cleanable_segments(self, now_ms: int, up_to: int) -> list[Segment]:
        """Return the first segments that a pass may compact: closed, synced, entirely below ``up_to`` and
        older than ``min.compaction.lag.ms``."""
        if not self._config.is_compacted or self.offline_reason is not None or self._clean_end is not None:
            return []  # also for a log that was not opened since a clean start, so that it stays closed
        limit = min(up_to, self.synced_end_offset)
        lag_ms = self._config.min_compaction_lag_ms
        found: list[Segment] = []
        for segment in self._segments.segments[:-1]:
            if segment.next_offset > limit or segment in self._sync.unsynced:
                break
            if lag_ms:
                with self._reading():
                    segment.load_indexes()
                if segment.max_timestamp_ms > now_ms - lag_ms:
                    break
            found.append(segment)
        return found

    def begin_compaction(
        self, now_ms: int, up_to: int, max_keys: int, *, may_forget: bool = True
    ) -> CompactionPass | None:
        """Return a compaction pass over the segments below offset ``up_to`` that may be compacted, or None if
        there are none.

        The pass keeps at most about ``max_keys`` different keys in memory. Unless ``may_forget``, the latest
        tombstone of each key and all markers stay in the log (R41). Raises StorageError.
        """
        segments = self._cleanable_segments(now_ms, up_to)
        if not segments:
            return None
        return self._compaction.begin(
            segments,
            self._state,
            self._config,
            now_ms,
            is_known=self._is_known_producer,
            max_keys=max_keys,
            may_forget=may_forget,
        )

    def _is_known_producer(self, producer_id: int) -> bool:
        """Whether the log has state for a producer id; True while the producers are not loaded."""
        states = self._producers.states
        return states is None or states.get(producer_id) is not None

    def fits(self, work: CompactionPass | SwapWork | SegmentScrub) -> bool:
        """Whether ``work`` is still valid: since it began, the log was not truncated, closed or taken
        offline."""
        is_usable = self.offline_reason is None and not self._is_closed
        return is_usable and work.truncations == self._state.truncations

    def begin_swap(self, work: SwapWork) -> SwapWork | None:
        """Prepare the log for a swap and return ``work``. Return None if ``work`` is no longer valid; the
        caller then gives up the pass.

        The caller runs the work and then calls ``finish_swap`` with its error or None. Raises StorageError.
        """
        if not self.fits(work):
            return None
        listed = self._segments.segments
        number = self._segments.number_of(work.old[0].base_offset)
        if number < 0 or listed[number : number + len(work.old)] != work.old:
            return None
        with self._reading():
            # Open the old files now: readers use them while the swap changes the names.
            for segment in work.old:
                segment.load_indexes()
                segment.view()
        self._swap = work
        return work

    def finish_swap(self, work: SwapWork, error: BaseException | None) -> None:
        """Process the result of ``work.run()``; ``error`` is its exception, or None.

        If the swap was not decided, raises ``error``; nothing has changed then. If it was decided, an error
        leaves the directory inconsistent until the log is opened again: raises LogOfflineError (R26, R55).
        """
        self._swap = None
        if error is not None:
            if work.is_decided:
                raise self._write_failed(error, is_partial=True) from error
            raise error
        new = work.new
        new.state = self._state
        new.reconfigure(self._config)
        self._segments.replace(work.old, new)
        new.save_indexes(new.size_bytes, final=True)
        work.is_done = True

    def give_up_swap(self, work: SwapWork) -> None:
        """Undo ``begin_swap`` for work that will not be run."""
        if self._swap is work:
            self._swap = None

    def finish_compaction(self, done: CompactionPass, now_ms: int) -> Callable[[], None] | None:
        """Record the pass if it is complete and still valid. Return a function that saves the compaction
        points, or None if they have not changed.

        The function may run in any thread. If it fails, a pass after the next start may repeat the work.
        """
        if not self.fits(done) or not done.is_complete:
            return None
        return self._compaction.finish(done, self._state, self._config, now_ms)

    # --- producers and transactions --------------------------------------------------------------------

    @property
    def producers(self) -> ProducerStates:
        """The states of the idempotent producers after all batches in the log, also the uncommitted ones
        (R27).

        They are loaded on first use, from the newest snapshot and the batch headers after it. If the log is
        already damaged at that time, they are the states at its sound end.
        """
        states = self._producers.states
        if states is not None and self._clean_end is None:
            return states
        self._open()
        with self._reading():
            states = self._producers.states
            if states is None:
                end = self.log_end_offset
                if self.damage is not None:
                    end = min(end, self.damage.sound_end_offset)
                states = self._producers.load(self._segments, self._state, self.log_start_offset, end)
        return states

    def _note_producer(
        self, header: BatchHeader, batch: Buffer, base_offset: int, max_timestamp_ms: int, now_ms: int
    ) -> None:
        """Add the batch that was appended at ``base_offset`` to its producer's state."""
        states = self._producers.states
        if states is None:
            self.producers  # noqa: B018 - load the states now, so that a new leader has less to scan
            return
        last_offset = base_offset + header.last_offset_delta
        producer_id, epoch, sequence = header.producer_id, header.producer_epoch, header.base_sequence
        crc = stored_crc(batch)  # differs from the header's CRC if LogAppendTime was stamped
        if not header.attributes & _TRANSACTION_BITS:
            states.note(producer_id, epoch, sequence, base_offset, last_offset, max_timestamp_ms, now_ms, crc)
            return
        rest = (max_timestamp_ms, now_ms, crc)
        states.note_transactional(
            batch, header.attributes, producer_id, epoch, sequence, base_offset, last_offset, *rest
        )

    def _note_gap(self, header: BatchHeader, gap: Buffer, now_ms: int) -> None:
        """Add the batch that ``gap`` describes, if any, to its producer's state."""
        states = self._producers.states
        replaced = replaced_by(gap, 0, header.attributes)
        if replaced is not None and states is not None:
            states.note_replaced(replaced, now_ms)

    def _save_producers(self, active: Segment, keep_from: int) -> None:
        self._producers.save(self.log_end_offset, self._state.truncations, active.size_bytes, keep_from)

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the last stable offset (exclusive), below which the outcome of every transaction is known
        (R33).

        This is the lowest of the high watermark and the first offsets of all transactions that are open or
        whose marker is not below the high watermark. It is not below the log start.
        """
        states = self.producers
        if not states.open and not states.ended:
            return high_watermark
        return max(states.last_stable_offset(high_watermark), self.log_start_offset)

    def known_stable_offset(self, high_watermark: int) -> int:
        """Return ``last_stable_offset`` if the producers are loaded, else the high watermark."""
        states = self._producers.states
        if states is None or not (states.open or states.ended):
            return high_watermark
        return self.last_stable_offset(high_watermark)

    def forget_stable_transactions(self, high_watermark: int) -> None:
        """Forget the ended transactions that are stable: their markers are below ``high_watermark``."""
        states = self._producers.states
        if states is not None and states.ended:
            states.forget_stable(high_watermark)

    def aborted_between(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (producer id, first offset) of the aborted transactions with an offset in [first, end),
        ordered by first offset."""
        found = self.producers.aborted.between(first, end)
        return [(one.producer_id, one.first_offset) for one in found]

    def expire_producers(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers that were idle for ``expiration_ms`` (R29), and return their number."""
        states = self._producers.states
        return 0 if states is None else states.expire(now_ms, expiration_ms)

    # --- failing ---------------------------------------------------------------------------------------

    def _write_state(self, state: LogState) -> None:
        """Write ``state`` durably. If the disk is full, release the space allocated ahead, and try again
        (R26)."""
        work = self._state_work(state)
        with self._writing():
            try:
                work.run()
            except DiskFullError:
                if self._active is None:
                    raise
                self._active.close_for_append()
                work.run()
        self._take_state(state)

    def _state_work(self, state: LogState) -> StateWork:
        return StateWork(self._fs, self._directory, state, is_parent_unsynced=self._sync.is_parent_unsynced)

    def _take_state(self, state: LogState) -> None:
        """Use ``state``, which is now durable, and record that the log directory's name is durable too."""
        self._sync.is_parent_unsynced = False
        self._state = state
        self._segments.set_state(state)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert errors of reading to StorageErrors; see ``_read_failed``."""
        try:
            yield
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an OSError of writing to a StorageError; see ``_write_failed``."""
        try:
            yield
        except OSError as error:
            raise self._write_failed(error) from error

    def _offline_error(self) -> LogOfflineError:
        reason, hint = self.offline_reason, "repair the disk, then restart the broker; see the broker's log"
        if self.damage is not None:
            reason, hint = self.damage.summary, self.damage.hint
        elif self.must_reopen:
            hint = "the broker opens the log again when it can; see the broker's log"
        return LogOfflineError(f"the log in {self._directory} is offline: {reason}", hint=hint)

    def take_offline(self, reason: str) -> None:
        """Refuse further writes for the rest of the process, because the disk has failed (R26). The log is
        not opened again either."""
        self.must_reopen = False
        self._go_offline(reason)

    def _go_offline(self, reason: str) -> None:
        if self.offline_reason is None:
            self.offline_reason = reason
            fields = Fields(directory=self._directory, reason=reason)
            if self.damage is not None:
                summary, hint = self.damage.summary, Uncut(self.damage.hint)
                fields = Fields(directory=self._directory, reason=summary, hint=hint)
            logger.error("log offline %s", fields)
        self._active = None

    def _write_failed(self, error: BaseException, *, is_partial: bool = False) -> StorageError:
        """Return the StorageError for a failed write. ``is_partial``: a change of several steps may be half
        done.

        Unless ``is_partial``, a StorageExhaustedError or a lack of memory leaves the log online. Any other
        failure takes it offline (R26): after a StorageExhaustedError until it is opened again (R55), else
        permanently.
        """
        if not is_partial:
            if isinstance(error, StorageExhaustedError):
                return error
            # The write did not begin for lack of memory.
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                return StorageError(f"the log in {self._directory} cannot be written now: {error}")
        self.must_reopen = isinstance(error, StorageExhaustedError)
        self._go_offline(f"write failed: {error}")
        return self._offline_error()

    def _read_failed(self, error: CorruptLogError | OSError) -> StorageError:
        """Return the StorageError for a failed read. A CorruptLogError marks the log as damaged (R24)."""
        if not isinstance(error, CorruptLogError):
            return StorageError(f"the log in {self._directory} cannot be read now: {error}")
        sound_end, lost = self.log_start_offset, self.log_end_offset - self.log_start_offset
        for segment in self._segments:
            if segment.path() == error.path:
                sound_end, lost = segment.sound_part()
        self.mark_damaged(error.message, sound_end_offset=sound_end, records_in_doubt=lost)
        return self._offline_error()
