"""Log: the segments of one partition, from log_start_offset to log_end_offset.

Synchronous, and owned by one thread; only ``SyncWork.run`` may run in another. Appending never syncs:
the owner gathers, calls ``begin_sync``, lets the work run, and calls ``finish_sync``; only then
``synced_end_offset`` moves (R7). A write or sync that fails for another reason than a full disk takes the
log offline for the rest of the process (R26); reading goes on. Damage ends reading too (R24).

Files are opened when they are first needed: a log that nobody uses holds no descriptor and no map.
Throughout, ``now_ms`` is wall-clock time, as the records' timestamps are.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite import mutants
from kafkalite.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
)
from kafkalite.limits import MAX_SEGMENT_BYTES
from kafkalite.model import NO_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP, TimestampType
from kafkalite.records.control import check_at
from kafkalite.records.header import BatchHeader, check, stamp, stamp_log_append_time
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import LogState
from kafkalite.storage.filesystem import Buffer, FileSystem
from kafkalite.storage.index_block import OFFSET_ENTRY_BYTES
from kafkalite.storage.leader_epochs import EpochEnd, EpochEntry
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.lookup_log import LookupLog
from kafkalite.storage.retention import plan_retention
from kafkalite.storage.segment import Found, Segment
from kafkalite.storage.sync_work import StateWork

_NEVER: Final = 2**63 - 1


class Appended(NamedTuple):
    """``last_offset`` is inclusive; the append time is NO_TIMESTAMP unless the topic uses LogAppendTime.

    ``is_duplicate``: nothing was written now; the offsets are those of the same batch before (R28).
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    log_end_offset: int
    is_duplicate: bool = False


class Slice(NamedTuple):
    """Whole batches, one buffer per segment touched. The first may begin before the offset asked for."""

    buffers: list[memoryview]
    size_bytes: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """Counters since the log was opened, of the segments it still has.

    ``bytes_scanned``: what lookups by offset or timestamp walked from an index entry to their batch;
    ``boundary_bytes_scanned``: what finding the end of a slice walked.
    """

    segment_count: int
    size_bytes: int
    appends: int
    reads: int
    rolls: int
    syncs: int
    segments_deleted: int
    bytes_scanned: int
    boundary_bytes_scanned: int


class Log(LookupLog):
    """Invariant: log_start_offset <= synced_end_offset <= log_end_offset, except that records may be
    deleted before they are synced. ``offline_reason`` is None until the log goes offline, for good."""

    __slots__ = (
        "_appends",
        "_index_full_entries",
        "_log_append_time",
        "_reads",
        "_roll_ms",
        "_roll_offset",
        "_roll_size_bytes",
        "_rolls",
        "_segments_deleted",
    )

    def __init__(
        self, fs: FileSystem, directory: str, config: LogConfig, *, start: int = 0, end: int = 0
    ) -> None:
        super().__init__(fs, directory, config, start=start, end=end)
        self._appends = self._reads = self._rolls = self._segments_deleted = 0
        self._roll_size_bytes = -1
        self._roll_ms = self._roll_offset = _NEVER
        self.reconfigure(config)

    @property
    def config(self) -> LogConfig:
        return self._config

    def reconfigure(self, config: LogConfig) -> None:
        """Use another configuration from now on."""
        self._config = config
        self._log_append_time = config.timestamp_type is TimestampType.LOG_APPEND_TIME
        self._index_full_entries = config.segment_index_bytes // OFFSET_ENTRY_BYTES
        self._roll_size_bytes = -1  # the limits are worked out again at the next append
        self._segments.reconfigure(config)

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

        With ``header`` the caller vouches for the batch (length and CRC). Not synced. Raises
        CorruptBatchError, MessageTooLargeError, DiskFullError (nothing changed, the log stays usable),
        LogOfflineError.
        """
        if header is None:
            header = check(batch)
        size = len(batch)
        if size > self._config.max_message_bytes and not header.is_control:
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
        except OSError as error:
            raise self._write_failed(error) from error
        self.log_end_offset = end = last_offset + 1
        self._appends += 1
        if header.producer_id != NO_PRODUCER_ID:
            self._note_producer(header, batch, base_offset, max_timestamp_ms, now_ms)
        return Appended(base_offset, last_offset, append_time_ms, end)

    def append_as_follower(self, batches: Buffer, *, now_ms: int, leader_epoch: int | None = None) -> None:
        """Write whole batches as a leader sent them, the first with this log's end as base offset (R1).

        Raises CorruptBatchError with nothing written when one is not intact, not the next one, or of a
        younger epoch than ``leader_epoch``, the leader's; else as ``append``, with the batches before the
        failed one written.
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
            if header.leader_epoch != self._latest_epoch:
                self.start_epoch(header.leader_epoch)
            batch = view[position : position + header.length_bytes]
            try:
                segment.append(batch, header.base_offset, header.last_offset, header.max_timestamp_ms)
            except OSError as error:
                raise self._write_failed(error) from error
            self.log_end_offset = header.next_offset
            self._appends += 1
            if header.producer_id != NO_PRODUCER_ID:
                self._note_producer(header, batch, header.base_offset, header.max_timestamp_ms, now_ms)

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
            return self._prepare_segment(size, last_offset, now_ms)
        return segment

    def _prepare_segment(self, size: int, last_offset: int, now_ms: int) -> Segment:
        """As ``_segment_for``, when something has to be opened, worked out or rolled."""
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
            # A batch larger than a whole segment gets one of its own.
            self._roll_size_bytes = max(self._roll_size_bytes, size)
        return segment

    def _arm_roll(self, segment: Segment, now_ms: int) -> None:
        """Work out at which size, time and offset the active segment is full."""
        config = self._config
        if segment.first_append_ms == NO_TIMESTAMP:  # opened, not created: the first batch tells
            first_ms = segment.first_timestamp_ms()
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
        try:
            if not len(self._segments):
                self._create_segment()
            self._segments.last.load_indexes()
        except CorruptLogError as error:
            raise self._read_failed(error) from error
        except OSError as error:
            raise self._write_failed(error) from error
        self._roll_size_bytes = -1
        self._active = self._segments.last
        return self._active

    def _create_segment(self) -> Segment:
        segment = self._segments.create(self.log_end_offset, self._config, self._state)
        self._directory_changes += 1
        return segment

    def roll(self) -> Segment:
        """Begin a new segment, unless the active one is empty. Returns the active one.

        Raises DiskFullError with nothing changed, LogOfflineError.
        """
        old = self._open_active()
        if old.size_bytes == 0:
            return old
        try:
            self._active = self._create_segment()
            self._unsynced.append(old)
            old.close_for_append()
        except OSError as error:
            raise self._write_failed(error) from error
        self._save_producers(self._active, old.base_offset)
        self._roll_size_bytes = -1
        self._roll_ms = self._roll_offset = _NEVER
        self._rolls += 1
        return self._active

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll if the active segment is in use and older than ``segment.ms``. Raises as ``roll``."""
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
        """Whole batches from the one that holds ``offset`` on, all below ``up_to`` (exclusive).

        As many as fit in ``max_bytes``; the first one in any case if ``at_least_one``. The views stay
        valid while they are held, whatever becomes of the files. Raises OffsetOutOfRangeError outside
        [log_start_offset, log_end_offset]; LogOfflineError when damage is met.
        """
        limit = min(up_to, self.log_end_offset)
        if not self.log_start_offset <= offset < limit:
            return self._read_nothing(offset)
        if self._is_damaged or self._clean_end is not None:
            self._open()
        self._reads += 1
        try:
            return Slice(*self._segments.read(offset, max_bytes, limit, at_least_one))
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error

    def _read_nothing(self, offset: int) -> Slice:
        """An empty slice for an offset in range with nothing below the limit, or the error."""
        if self._is_damaged:
            raise self._offline_error()
        if self.log_start_offset <= offset <= self.log_end_offset:
            return Slice([], 0, offset)
        raise OffsetOutOfRangeError(
            f"offset {offset} is outside [{self.log_start_offset}, {self.log_end_offset}]"
        )

    # --- epochs ----------------------------------------------------------------------------------------

    @property
    def latest_epoch(self) -> int:
        """Of the last batch, or of the current leadership; NO_EPOCH (-1) when there is none."""
        if self._clean_end is not None and self.log_start_offset == self.log_end_offset:
            return self._epoch_to_start  # nothing to be found by opening it
        self._open()
        return self._latest_epoch

    @property
    def leader_epochs(self) -> list[EpochEntry]:
        self._open()
        return self._epochs.entries()

    def start_epoch(self, leader_epoch: int) -> None:
        """The batches from the log end on are of ``leader_epoch``: called by a leader taking over (R2).

        A log that nobody has used yet is not opened for that.
        """
        if self._clean_end is not None:
            self._epoch_to_start = leader_epoch
            return
        self._open()
        self._epochs.assign(leader_epoch, self.log_end_offset)
        self._latest_epoch = leader_epoch

    def forget_empty_epoch(self) -> None:
        """Drop the epoch that has no batch, if there is one: called by a replica becoming follower (R5)."""
        self._epoch_to_start = NO_EPOCH
        if self._clean_end is not None:
            return
        self._open()
        kept = 1 if "R5-keep-empty-epochs" in mutants.ACTIVE else 0
        self._epochs.truncate_from_end(self.log_end_offset + kept)
        self._latest_epoch = self._epochs.latest_epoch

    def end_offset_for_epoch(self, leader_epoch: int) -> EpochEnd:
        """(the largest known epoch not above ``leader_epoch``, its end offset, exclusive): R4."""
        self._open()
        return self._epochs.end_offset_for(leader_epoch, self.log_end_offset)

    # --- removing --------------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> int:
        """Cut off the batch that holds ``offset`` and all behind it, durably. Returns the new log end.

        Only a follower that was told to by its leader does this (R4). Raises OffsetOutOfRangeError below
        the log start, DiskFullError with nothing changed, LogOfflineError.
        """
        self._open_active()
        if offset < self.log_start_offset:
            self._read_nothing(offset)
        if offset >= self.log_end_offset:
            self.forget_empty_epoch()
            return self.log_end_offset
        number = self._segments.number_of(offset)
        try:
            found = self._segments.segments[number].find(offset)
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        start = min(self.log_start_offset, found.base_offset)
        # First it is made known that nothing said so far holds above the new end: neither the recovery
        # point nor any index block. From here on a crash leaves the old log or a shorter prefix of it.
        self._write_state(LogState(start, self._state.truncations + 1, found.base_offset))
        self.log_start_offset = start
        try:
            self._cut(number, found)
        except (DiskFullError, OSError) as error:
            raise self._write_failed(error) from error
        return self.log_end_offset

    def _cut(self, number: int, found: Found) -> None:
        """Remove the segments behind ``number`` and the bytes of it from ``found`` on; sync all."""
        segment = self._segments.segments[number]
        closed = [one for one in self._unsynced if one.base_offset < segment.base_offset]
        self._unsynced.clear()
        self._segments.drop_behind(number)
        segment.drop_saved_indexes()
        segment.truncate_to_position(found)
        self._end_at(found.base_offset)
        for one in (*closed, segment):
            one.file.sync()
        self._fs.sync_dir(self._directory)
        for one in closed:
            one.save_indexes(one.size_bytes, final=True)
        self._directory_changes_synced = self._directory_changes
        self._active = segment
        self._roll_size_bytes = -1
        self.synced_end_offset = found.base_offset

    def reset_to(self, offset: int) -> None:
        """Drop everything and begin anew at ``offset``, durably: for a follower whose leader has nothing
        that joins on to this log (R4). Raises DiskFullError with nothing changed, LogOfflineError."""
        if self.offline_reason is not None:
            raise self._offline_error()
        self._open()
        # Nothing that was said so far holds any more. A crash after this leaves nothing below the new
        # start, and above it either nothing or what would be found to diverge again.
        self._write_state(LogState(offset, self._state.truncations + 1, 0))
        self.log_start_offset = offset
        try:
            self._active = None
            self._unsynced.clear()
            self._segments.drop_behind(-1)
            self._epochs.truncate_from_end(0)
            self._end_at(offset)
            self._fs.sync_dir(self._directory)
        except (DiskFullError, OSError) as error:
            raise self._write_failed(error) from error
        self._directory_changes_synced = self._directory_changes
        self._roll_size_bytes = -1
        self.synced_end_offset = offset

    def _end_at(self, offset: int) -> None:
        """The log ends at ``offset`` now: save the epochs that are left."""
        self.log_end_offset = offset
        self._producers.truncate(offset)
        self.forget_empty_epoch()
        self._epochs_saved, epochs_file = self._epochs_to_save()
        self._take_over_epochs()
        if epochs_file is not None:
            self._fs.write_atomically(*epochs_file)

    def delete_before(self, offset: int) -> int:
        """Move the log start up to ``offset``, durably, and retire the segments below it.

        Returns the log start, which never moves back. Raises OffsetOutOfRangeError above the log end,
        DiskFullError with nothing changed, LogOfflineError.
        """
        work = self.begin_delete(offset)
        if work is not None:
            self._write_state(work.state)
            self._delete(offset)
        return self.log_start_offset

    def begin_delete(self, offset: int) -> StateWork | None:
        """``delete_before`` with its waiting apart: what is to be run, in any thread; None: nothing.

        The caller hands it to ``finish_delete``. Appending and syncing go on meanwhile, but nothing else that
        removes something. Raises as ``delete_before``, but for DiskFullError.
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
        """Take the outcome of ``work.run()``. Raises as ``delete_before``."""
        if self._is_closed:
            return
        if self.offline_reason is not None:
            raise self._offline_error()
        if isinstance(error, DiskFullError):
            self._write_state(work.state)
        elif error is not None:
            raise self._write_failed(error) from error
        else:
            self._take_state(work.state)
        self._delete(work.state.log_start_offset)

    def apply_retention(
        self, now_ms: int, wall_ms: int | None = None, *, up_to: int | None = None
    ) -> list[str]:
        """Retire the segments that retention.ms and retention.bytes let go. Returns their file names.

        ``now_ms`` counts for file.delete.delay.ms, ``wall_ms`` (else ``now_ms``) for the records' age.
        ``up_to`` is as in ``retention_offset``. Raises as ``delete_before``.
        """
        if self.offline_reason is not None:
            return []
        offset = self.retention_offset(now_ms if wall_ms is None else wall_ms, up_to=up_to)
        names: list[str] = []
        if offset > self.log_start_offset:
            self._write_state(self._state._replace(log_start_offset=offset))
            names = self._delete(offset)
        self.remove_retired(now_ms)
        return names

    def retention_offset(self, now_ms: int, *, up_to: int | None = None) -> int:
        """Up to where retention.ms and retention.bytes let the log go; if all may, a new segment is begun.

        ``up_to`` is the high watermark, exclusive; without it what is synced, or with page-cache
        durability all, may go. Raises as ``roll``.
        """
        self._open()
        if up_to is None:
            up_to = self.synced_end_offset if self._config.synced_only else self.log_end_offset
        try:
            plan = plan_retention(
                self._segments.summaries(),
                log_size_bytes=self._segments.size_bytes,
                log_start_offset=self.log_start_offset,
                up_to=up_to,
                retention_ms=self._config.retention_ms,
                retention_bytes=self._config.retention_bytes,
                now_ms=now_ms,
            )
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        if not plan.segment_count:
            return self.log_start_offset
        if plan.segment_count == len(self._segments):
            self.roll()
        return plan.log_start_offset

    def _delete(self, log_start_offset: int) -> list[str]:
        """The log starts there, durably: retire the segments below. Their names need no sync: a start
        takes them for left-overs."""
        self.log_start_offset = log_start_offset
        self._epochs.truncate_from_start(log_start_offset)
        retired: list[Segment] = []
        count = max(self._segments.number_of(log_start_offset), 0)
        self._removing(lambda: retired.extend(self._segments.retire(count)))
        self._removing(lambda: self._producers.delete_before(log_start_offset))
        self._unsynced = [segment for segment in self._unsynced if segment not in retired]
        self._segments_deleted += len(retired)
        return [layout.segment_file_name(segment.base_offset, layout.LOG_SUFFIX) for segment in retired]

    # --- state -----------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Of all batches, without space allocated ahead."""
        self._open()
        return self._segments.size_bytes

    @property
    def segment_count(self) -> int:
        self._open()
        return len(self._segments)

    def statistics(self) -> LogStatistics:
        segments = self._segments
        return LogStatistics(
            segment_count=len(segments),
            size_bytes=segments.size_bytes,
            appends=self._appends,
            reads=self._reads,
            rolls=self._rolls,
            syncs=self._syncs,
            segments_deleted=self._segments_deleted,
            bytes_scanned=sum(segment.lookup_bytes_scanned for segment in segments),
            boundary_bytes_scanned=sum(segment.boundary_bytes_scanned for segment in segments),
        )
