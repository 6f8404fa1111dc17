"""One segment: a file of record batches, its map, and its two sparse indexes.

Batches are written with pwrite and read through a shared read-only map. The active segment's file is longer
than its content: space is allocated ahead, in growing steps, so that a full disk is normally reported before
any byte of a batch is written. ``size_bytes`` is the exclusive end of the content.

Indexes are arrays of numbers in memory. Their entries are saved in blocks after syncs, loaded on first use,
and rebuilt from the batch headers that the saved blocks do not cover.
"""

# Long because one object owns a file together with its map, its indexes and the state of its checks.

from __future__ import annotations

import logging
import struct
from typing import Final, NamedTuple

from kafkalite.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    StorageExhaustedError,
    WrongFileTypeError,
)
from kafkalite.limits import KIB
from kafkalite.log_fields import Fields
from kafkalite.model import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP
from kafkalite.records.checksum import crc32c
from kafkalite.records.header import (
    CRC_POSITION,
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    MAGIC,
    MIN_LENGTH,
    PLACE,
    BatchHeader,
    check,
    parse_header,
    scan,
    stored_crc,
    total_length,
)
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import Fingerprint, LogState
from kafkalite.storage.damage import intact_runs
from kafkalite.storage.filesystem import Buffer, File, FileSystem, unlink_existing
from kafkalite.storage.index_block import (
    OFFSET_ENTRY_BYTES,
    OFFSET_MAGIC,
    TIME_ENTRY_BYTES,
    TIME_MAGIC,
    Block,
    decode_blocks,
    encode_block,
)
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.offset_index import OffsetIndex
from kafkalite.storage.time_index import TimeIndex

logger = logging.getLogger(__name__)

#: Save the indexes of the active segment after this many new entries. With one entry for each 4 KiB of log, a
# start after a crash reads at most 256 KiB again; a small batch causes no index write.
SAVE_INDEX_ENTRIES: Final = 64


#: Always allocated behind the last batch, and released if the disk is too full for a small file, such as the
# log state that retention must write before it can free space (R26).
RESERVE_BYTES: Final = 16 * KIB

CRC_BYTES: Final = 4

#: The least number of bytes for which a read that continues the last one checks the length of the file.
SIZE_CHECK_BYTES: Final = 16 * KIB

#: The base offset of an unknown last batch. It is above every offset.
_UNKNOWN: Final = 2**63 - 1


class Found(NamedTuple):
    """The position of a batch in the file, and its base offset."""

    position: int
    base_offset: int


class Run(NamedTuple):
    """Contiguous complete batches. ``next_offset`` is the offset after the last of them. If there are none,
    it is the requested offset, or the base offset of the batch that contains the requested offset."""

    view: memoryview
    next_offset: int


def read_crc(file: File, position: int) -> int:
    """Return the CRC field of the batch at ``position``, unchecked; 0 beyond the end of the file."""
    return int.from_bytes(file.read_at(position + CRC_POSITION, CRC_BYTES), "big")


class Checked(NamedTuple):
    """The end of an intact batch."""

    next_position: int
    next_offset: int


class SoundPart(NamedTuple):
    """The intact start of a segment, up to ``end_offset`` (exclusive). ``lost`` is the number of later
    offsets of the segment that no intact batch contains."""

    end_offset: int
    lost: int


class SavedIndexes(NamedTuple):
    """The result of loading the valid part of the index files.

    ``end_offset`` is a batch boundary at or above the offset of the last entry. The blocks prove that all
    batches of the segment below it are synced. ``is_whole``: the files have nothing but the valid part.
    """

    end_offset: int
    is_whole: bool


class Segment:
    """Batches with offsets in [base_offset, next_offset), at positions [0, size_bytes) of the file.

    Invariants: when the file is open, size_bytes <= allocated_bytes = the length of the file. The indexes, if
    loaded, describe exactly the batches below size_bytes.
    """

    __slots__ = (
        "_config",
        "_directory",
        "_end_limit_offset",
        "_end_limit_position",
        "_file",
        "_fs",
        "_hint_offset",
        "_hint_position",
        "_index_saved_bytes",
        "_index_saved_entries",
        "_indexed_position",
        "_interval_bytes",
        "_last_base_offset",
        "_last_position",
        "_map",
        "_mapped_bytes",
        "_saved_end_position",
        "_time_saved_bytes",
        "_time_saved_entries",
        "_verified_from",
        "_verified_offset",
        "_verified_tail",
        "_verified_to",
        "_writable_bytes",
        "allocated_bytes",
        "base_offset",
        "epochs",
        "first_append_ms",
        "head_crc",
        "indexes_loaded",
        "max_timestamp_ms",
        "max_timestamp_offset",
        "next_offset",
        "offset_index",
        "owner",
        "size_bytes",
        "state",
        "time_index",
        "used",
    )

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        base_offset: int,
        config: LogConfig,
        state: LogState,
        *,
        next_offset: int,
        size_bytes: int,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self.owner = crc32c(layout.name_of(directory).encode())
        self._config = config
        self._interval_bytes = max(config.index_interval_bytes, 1)
        self.state = state
        #: The log's leader epochs, which its batches must have (R58); None if unknown.
        self.epochs: LeaderEpochs | None = None
        self.base_offset = base_offset
        self.next_offset = next_offset
        self.size_bytes = size_bytes
        self._set_allocated(size_bytes)
        self.first_append_ms = NO_TIMESTAMP
        self._file: File | None = None
        self._map = memoryview(b"")
        self._mapped_bytes = 0
        self.used = True
        self._saved_end_position = 0
        self._index_saved_bytes = self._time_saved_bytes = 0
        self._index_saved_entries = self._time_saved_entries = 0
        self._indexed_position = self._last_position = 0
        self._last_base_offset = _UNKNOWN
        self._hint_offset = self._hint_position = NO_OFFSET
        self._end_limit_offset = self._end_limit_position = NO_OFFSET
        # This process has checked or written the batches in two ranges of positions: [_verified_from,
        # _verified_to), and from _verified_tail to the end of the contents.
        self._verified_from = self._verified_to = 0
        self._verified_offset = base_offset  #: the offset of the batch at ``_verified_to``
        self._verified_tail = size_bytes
        self.head_crc = 0  #: the CRC field of the first batch; 0: not read yet
        self.max_timestamp_ms = NO_TIMESTAMP
        self.max_timestamp_offset = NO_OFFSET
        self.offset_index = OffsetIndex()
        self.time_index = TimeIndex()
        self.indexes_loaded = size_bytes == 0

    def __repr__(self) -> str:
        return f"<Segment {self._directory} [{self.base_offset}, {self.next_offset}) {self.size_bytes} bytes>"

    @classmethod
    def create(
        cls, fs: FileSystem, directory: str, base_offset: int, config: LogConfig, state: LogState
    ) -> Segment:
        """Create an empty segment and its file without a sync. Raises StorageExhaustedError, OSError."""
        segment = cls(fs, directory, base_offset, config, state, next_offset=base_offset, size_bytes=0)
        file = segment._file = fs.open(segment.path(), create=True)
        if file.size():  # an earlier process left it; its bytes belong to no log
            file.truncate(0)
        return segment

    def take_file(self, file: File, size_bytes: int, next_offset: int) -> None:
        """Use ``file``, which was written under another name, as the segment's file. The batches must already
        be in the indexes."""
        self._file = file
        self.size_bytes, self.next_offset = size_bytes, next_offset
        self._set_allocated(size_bytes)

    def path(self, suffix: str = layout.LOG_SUFFIX) -> str:
        return layout.join(self._directory, layout.segment_file_name(self.base_offset, suffix))

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._fs.open(self.path())
            self._set_allocated(self._file.size())
        return self._file

    def reconfigure(self, config: LogConfig) -> None:
        self._config = config
        self._interval_bytes = max(config.index_interval_bytes, 1)

    # --- writing ---------------------------------------------------------------------------------------

    def append(self, batches: Buffer, base_offset: int, last_offset: int, max_timestamp_ms: int) -> None:
        """Write a batch at the end of the segment.

        Raises StorageExhaustedError, with no batch added; CorruptLogError; OSError, after which nothing must
        be appended to the segment any more.
        """
        position = self.size_bytes
        end = position + len(batches)
        file = self._file
        if file is None or not self.indexes_loaded:
            self.load_indexes()
            file = self.file
        if end > self._writable_bytes:
            self._grow(end)
        try:
            file.write_at(position, batches)
        except DiskFullError:
            self._zero(position, min(end, self.allocated_bytes))
            raise
        self.note_batch(position, base_offset, max_timestamp_ms)
        self.size_bytes = end
        self.next_offset = last_offset + 1
        self.used = True
        if not position:
            self.head_crc = stored_crc(batches)
            self._save_head()

    def _save_head(self) -> None:
        """Write to the index files a block that identifies the first batch (R42).

        It is written without a sync, after the batch and before the batch is acknowledged. The end position
        in the block is 0, so the block does not prove a sync.
        """
        block = Block(self.state.truncations, self.base_offset, 0, b"", self.owner, self.head_crc)
        self._append_blocks(block, block)

    def ensure_head(self) -> None:
        """Call ``_save_head`` if the segment has a batch, but no saved index block is used. The indexes must
        be loaded."""
        if self.size_bytes and not self._index_saved_bytes:
            self.head_crc = read_crc(self.file, 0)
            self._save_head()

    def saved_head_crc(self) -> int:
        """Return the CRC field of the segment's first batch, from the last index block that has it; 0 if none
        has it (R42). Blocks of another log, and blocks from before a truncation that removed the batch, are
        ignored."""
        head_crc = 0
        for block, _ in self._read_blocks(layout.OFFSET_INDEX_SUFFIX, OFFSET_MAGIC, OFFSET_ENTRY_BYTES):
            is_valid = self.state.cap(self.base_offset + 1, block.truncations) > self.base_offset
            if is_valid and block.owner == self.owner and block.head_crc:
                head_crc = block.head_crc
        return head_crc

    def saved_tails(self) -> set[tuple[int, int]]:
        """Return (CRC field, next offset) of each batch that an index block identifies as the last one.
        Blocks of another log, and blocks whose end a truncation has removed, are ignored."""
        return {
            (block.tail_crc, block.end_offset)
            for block, _ in self._read_blocks(layout.OFFSET_INDEX_SUFFIX, OFFSET_MAGIC, OFFSET_ENTRY_BYTES)
            if block.owner == self.owner
            and block.tail_crc
            and self.state.cap(block.end_offset, block.truncations) == block.end_offset
        }

    def is_foreign(self) -> bool:
        """Whether the segment belongs to another log: a block in its index files is of that log and has the
        CRC of the segment's first batch (R42)."""
        return bool(self.head_owners() - {self.owner})

    def head_owners(self) -> set[int]:
        """Return the owners of all blocks in the segment's index files that have the CRC of its first batch
        (R42). An owner is the CRC-32C of the name of a log's directory."""
        blocks = self._raw_blocks(layout.OFFSET_INDEX_SUFFIX, OFFSET_MAGIC, OFFSET_ENTRY_BYTES)
        blocks += self._raw_blocks(layout.TIME_INDEX_SUFFIX, TIME_MAGIC, TIME_ENTRY_BYTES)
        heads = {(block.owner, block.head_crc) for block, _ in blocks if block.head_crc}
        head_crc = self.fingerprint(0).head_crc if heads else 0
        return {owner for owner, crc in heads if crc == head_crc}

    def note_batch(self, position: int, base_offset: int, max_timestamp_ms: int) -> None:
        """Add the batch at ``position`` to the indexes. Called once for each batch, in order."""
        if position - self._indexed_position >= self._interval_bytes:
            self.offset_index.append(base_offset - self.base_offset, position)
            self._indexed_position = position
            if self.max_timestamp_ms != NO_TIMESTAMP:
                self.time_index.maybe_append(
                    self.max_timestamp_ms, self.max_timestamp_offset - self.base_offset
                )
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms
            self.max_timestamp_offset = base_offset
        self._last_position = position
        self._last_base_offset = base_offset

    def _grow(self, end: int) -> None:
        """Allocate space up to ``end`` and a reserve after it, and more if the disk has room. The reserve is
        released when a full disk has no space for a small file (R26).

        Raises DiskFullError, with nothing changed.
        """
        config, allocated = self._config, self.allocated_bytes
        needed = end + min(RESERVE_BYTES, config.preallocate_min_bytes)
        step = min(max(allocated, config.preallocate_min_bytes), config.preallocate_max_bytes)
        ahead = max(min(allocated + step, config.segment_bytes), needed)
        self._mapped_bytes = 0  # the map may not show bytes that are written after growth
        for length in dict.fromkeys((ahead, needed)):
            try:
                self.file.allocate(length)
            except DiskFullError:
                self.file.truncate(allocated)  # release the partial allocation
                if length == needed:
                    raise
            else:
                self._set_allocated(length)
                return

    def _set_allocated(self, length: int) -> None:
        self.allocated_bytes = length
        self._writable_bytes = length - min(RESERVE_BYTES, self._config.preallocate_min_bytes)

    def _zero(self, position: int, end: int) -> None:
        """Overwrite [position, end) with zeros, so that recovery does not mistake the bytes for a batch."""
        block = bytes(min(max(end - position, 0), 1 << 20))
        while position < end:
            part = block[: end - position]
            self.file.write_at(position, part)
            position += len(part)

    @property
    def has_space_ahead(self) -> bool:
        """Whether space is allocated after the content; False if the file has not been opened yet."""
        return self.allocated_bytes != self.size_bytes

    def close_for_append(self) -> None:
        """Release the space allocated ahead. Views of readers end at ``size_bytes`` and stay valid."""
        file = self.file
        if self.allocated_bytes != self.size_bytes:
            file.truncate(self.size_bytes)
            self._set_allocated(self.size_bytes)
            self._mapped_bytes = 0

    def truncate_to_position(self, found: Found) -> None:
        """Remove the batch at ``found`` and all later ones by overwriting them with zeros, without a sync.

        The file keeps its length, because readers may hold views of it.
        """
        self.load_indexes()
        self._zero(found.position, self.size_bytes)
        self.size_bytes = found.position
        self.next_offset = found.base_offset
        self._verified_tail = min(self._verified_tail, self.size_bytes)
        if not found.position:
            self.head_crc = 0
        self._rebuild_tail()

    def _rebuild_tail(self) -> None:
        """Rebuild the end of the indexes and the largest timestamp after a truncation."""
        self.offset_index.truncate_to_position(self.size_bytes)
        index = self.offset_index
        self.time_index.truncate_to_offset(index.last_relative_offset)
        self._take_tail_from_indexes()
        self._walk(index.last_position, self.base_offset + index.last_relative_offset)

    # --- reading ---------------------------------------------------------------------------------------

    def view(self) -> memoryview:
        """Return a map of the file. Only [0, size_bytes) may be accessed.

        Raises CorruptLogError if a new map is needed, but the file was cut since it was opened; OSError.
        """
        if self._mapped_bytes < self.size_bytes:
            file = self.file
            try:
                self._map = file.map(self.allocated_bytes)
            except ValueError:  # of mmap
                size = file.size()
                raise self.damaged(size, f"{self.allocated_bytes} bytes", "the end of the file") from None
            self._mapped_bytes = self.allocated_bytes
        self.used = True
        return self._map

    def find(self, offset: int) -> Found:
        """Return the batch that contains ``offset``, which must be in [base_offset, next_offset).

        Scans less than one index interval. Raises CorruptLogError.
        """
        if not self.indexes_loaded:
            self.load_indexes()
        if offset >= self._last_base_offset:
            return Found(self._last_position, self._last_base_offset)
        if offset == self._hint_offset:
            return Found(self._hint_position, offset)
        start, relative_offset = self.offset_index.entry_before_offset(offset - self.base_offset)
        expected = self.base_offset + relative_offset
        for position, base_offset, last_delta, _, _ in scan(self.view(), start, self.size_bytes):
            if base_offset != expected:
                raise self._misplaced(position, expected, f"base offset {base_offset}")
            expected += last_delta + 1
            if expected > offset:
                return Found(position, base_offset)
        raise self.damaged(start, f"a batch with offset {offset}", "none")

    def read(self, offset: int, max_bytes: int, up_to: int, at_least_one: bool) -> Run:
        """Return complete batches below offset ``up_to``, beginning with the one that contains ``offset``.

        Returns as many as fit in ``max_bytes``. If ``at_least_one``, the size of the first one is not
        limited. Checks that each batch has the expected offset and leader epoch (R43). Raises
        CorruptLogError, OSError.
        """
        is_in_order = offset == self._hint_offset
        if not is_in_order:
            self._check_size()
        start, start_offset = self.find(offset)
        if up_to >= self.next_offset:
            limit, limit_offset = self.size_bytes, self.next_offset
        elif up_to == self._end_limit_offset:
            limit, limit_offset = self._end_limit_position, up_to
        else:
            limit, limit_offset = self.find(up_to)
            if limit_offset == up_to:
                self._end_limit_offset, self._end_limit_position = up_to, limit
        if limit <= start:
            return Run(memoryview(b""), offset)
        if is_in_order and min(max_bytes, limit - start) >= SIZE_CHECK_BYTES:
            self._check_size()
        view = self._map if self._mapped_bytes >= limit else self.view()
        end, next_offset = self._whole_batches(
            view, start, start_offset, limit, limit_offset, max_bytes, at_least_one
        )
        if start < self._verified_tail and not self._verified_from <= start <= end <= self._verified_to:
            self._verify(view, start, start_offset, end)
        self._hint_offset, self._hint_position = next_offset, end
        self.used = True
        return Run(view[start:end], next_offset)

    def _check_size(self) -> None:
        """Raise CorruptLogError if the file is shorter than its content because it was cut: an access to the
        map after the end of the file would kill the process.

        This takes 0.8 us, so reads of less than SIZE_CHECK_BYTES that continue the last read omit the check.
        """
        size = self.file.size()
        if size < self.size_bytes:
            raise self.damaged(size, f"{self.size_bytes} bytes", "the end of the file")

    def _whole_batches(
        self,
        view: memoryview,
        start: int,
        offset: int,
        limit: int,
        limit_offset: int,
        max_bytes: int,
        at_least_one: bool,
    ) -> Found:
        """Return the end of the batches that begin at position ``start`` with ``offset`` and fit in
        ``max_bytes``: the position and the offset that follow the last of them. If ``at_least_one``, the size
        of the first one is not limited. ``limit`` must be the start of the batch with ``limit_offset`` or the
        end of the segment.

        This compares the fields that the CRC does not cover, in every read: the file may have changed after a
        batch was checked or written (R43). It takes 0.1 us for each batch. Raises CorruptLogError.
        """
        unpack_from, stop = PLACE.unpack_from, max(min(limit, start + max_bytes), start + at_least_one)
        position, epoch = start, NO_EPOCH if self.epochs is None else self.epochs.epoch_at(offset)
        length = last_delta = 0
        try:
            while position < stop:
                base_offset, length, leader_epoch, magic, last_delta = unpack_from(view, position)
                if base_offset != offset or leader_epoch != epoch or magic != MAGIC or length < MIN_LENGTH:
                    self._check_place(position, offset, base_offset, length, leader_epoch, magic, last_delta)
                    epoch = leader_epoch
                position += length + LENGTH_OVERHEAD_BYTES
                offset += last_delta + 1
            if position > stop and not (at_least_one and position == start + length + LENGTH_OVERHEAD_BYTES):
                return Found(position - length - LENGTH_OVERHEAD_BYTES, offset - last_delta - 1)
            # The next batch shows whether the count of the last one is right.
            next_offset = limit_offset if position == limit else unpack_from(view, position)[0]
        except struct.error:
            raise self._misplaced(position, offset, "the end of the file") from None
        if position > limit or offset != next_offset:
            expected = f"a batch that ends at offset {next_offset}"
            raise self.damaged(position, expected, f"the end at offset {offset} and position {position}")
        return Found(position, offset)

    def _check_place(
        self, position: int, offset: int, base: int, length: int, epoch: int, magic: int, last_delta: int
    ) -> None:
        """Raise CorruptLogError unless the header of the batch at ``position`` has the offset ``offset``, a
        possible length and magic, and the leader epoch that is recorded for its offsets (R58)."""
        try:
            if base != offset or magic != MAGIC or length < MIN_LENGTH:
                raise CorruptBatchError(f"base offset {base}, length field {length} and magic {magic}")
            if self.epochs is not None:
                self.epochs.check(epoch, offset + last_delta)
        except CorruptBatchError as error:
            raise self._misplaced(position, offset, error.message) from error

    def _misplaced(self, position: int, offset: int, actual: str) -> CorruptLogError:
        return self.damaged(position, f"an intact batch with offset {offset}", actual)

    def _verify(self, view: memoryview, start: int, offset: int, end: int) -> None:
        """Check the CRCs, offsets and epochs of all batches in [start, end) that were not checked or written
        before, and possibly of others (R43, R58).

        ``offset`` is the offset of the batch at ``start``. Raises CorruptLogError at the first damaged batch.
        """
        position, end = start, min(end, self._verified_tail)
        touches = self._verified_from <= start <= self._verified_to
        if touches and end > self._verified_to:
            position, offset = self._verified_to, self._verified_offset
        while position < end:
            position, offset = self._check_batch(view, position, offset, end)
        if touches:
            if end > self._verified_to:
                self._verified_to, self._verified_offset = end, offset
        elif start <= self._verified_from <= end:
            self._verified_from = start
            if end > self._verified_to:
                self._verified_to, self._verified_offset = end, offset
        else:
            self._verified_from, self._verified_to, self._verified_offset = start, end, offset

    def _check_batch(self, view: memoryview, position: int, offset: int, end: int) -> Checked:
        """Check the batch at ``position``, which must have the base offset ``offset`` and end at or below
        position ``end``. Raises CorruptLogError."""
        try:
            length = total_length(view[:end], position)
            header = check(view[position : min(position + length, end)])
            if header.base_offset != offset:
                raise CorruptBatchError(f"base offset {header.base_offset}")
            if self.epochs is not None:
                self.epochs.check(header.leader_epoch, header.last_offset)
        except CorruptBatchError as error:
            raise self._misplaced(position, offset, error.message) from error
        return Checked(position + length, header.next_offset)

    def note_verified(self, from_position: int) -> None:
        """Record that the CRCs of all batches at or after ``from_position`` were checked."""
        self._verified_tail = from_position

    def sound_part(self) -> SoundPart:
        """Return the end offset of the intact batches at the start of the segment, and the number of later
        offsets that no intact batch contains.

        Reads the whole segment, so call it only for a segment that is known to be damaged.
        """
        position, offset = 0, self.base_offset
        length = min(self.size_bytes, self.file.size())
        view = self.file.map(length)
        while position < length:
            try:
                position, offset = self._check_batch(view, position, offset, length)
            except CorruptLogError:
                break
        intact = sum(run.end_offset - run.start_offset for run in intact_runs(view, position, offset))
        return SoundPart(offset, self.next_offset - offset - intact)

    def end_position(self, found: Found) -> int:
        """Return the end position (exclusive) of the batch at ``found``."""
        for position, _, _, _, length in scan(self.view(), found.position, self.size_bytes):
            return position + length
        raise self.damaged(found.position, f"the batch with offset {found.base_offset}", "none")

    def last_boundary(self, begin: Found, target: int, *, at_least_one: bool) -> Found:
        """Return the last batch that starts at or below position ``target`` and not before the batch
        ``begin``: its position and offset.

        If ``at_least_one`` and this is the batch ``begin``, return the end of the batch instead. Raises
        CorruptLogError.
        """
        start, start_offset = begin
        if not self.indexes_loaded:
            self.load_indexes()
        from_position, relative_offset = self.offset_index.entry_before_position(target)
        offset = self.base_offset + relative_offset
        if from_position < start:
            from_position, offset = start, start_offset
        end, next_offset = start, start_offset
        for position, base_offset, last_delta, _, length in scan(self.view(), from_position, self.size_bytes):
            if position > target:
                break
            end, next_offset = position, offset
            if base_offset != offset:  # damage, which the next read finds
                break
            offset += last_delta + 1
            if position == start and at_least_one:
                # The first batch is included regardless of its size. The loop adds batches that fit after it.
                end, next_offset = position + length, offset
        if at_least_one and end == start:
            raise self.damaged(from_position, "a batch", "none")
        return Found(end, next_offset)

    def find_timestamp(self, timestamp_ms: int, from_offset: int) -> tuple[int, int] | None:
        """Return (max timestamp, base offset) of the first batch whose max timestamp is at least
        ``timestamp_ms``, or None.

        Batches entirely below ``from_offset`` are ignored. Less than one index interval is scanned, unless
        the indexed batch is below ``from_offset``.
        """
        self.load_indexes()
        if timestamp_ms > self.max_timestamp_ms:
            return None
        relative = self.time_index.first_not_below(timestamp_ms)
        offset = self.max_timestamp_offset if relative is None else self.base_offset + relative
        if offset < from_offset:  # the indexed batch was deleted, so the index does not help
            if from_offset >= self.next_offset:
                return None
            start, expected = self.find(from_offset)
        else:
            start, relative_offset = self.offset_index.entry_before_offset(offset - self.base_offset)
            expected = self.base_offset + relative_offset
        for position, base_offset, last_delta, max_ms, _ in scan(self.view(), start, self.size_bytes):
            if base_offset != expected:
                raise self._misplaced(position, expected, f"base offset {base_offset}")
            expected += last_delta + 1
            if max_ms >= timestamp_ms and expected > from_offset:
                return max_ms, base_offset
        if expected != self.next_offset:
            raise self._misplaced(start, expected, "none")
        return None

    # --- indexes ---------------------------------------------------------------------------------------

    def _forget_indexes(self) -> None:
        self.offset_index = OffsetIndex()
        self.time_index = TimeIndex()
        self.indexes_loaded = False
        self._take_tail_from_indexes()

    def _take_tail_from_indexes(self) -> None:
        """Set the largest timestamp and the last indexed position from the indexes, and forget the last batch
        and the read positions. A scan from the last index entry must follow."""
        self._indexed_position = self.offset_index.last_position
        self.max_timestamp_ms = self.time_index.last_timestamp_ms
        self.max_timestamp_offset = (
            self.base_offset + self.time_index.last_relative_offset if len(self.time_index) else NO_OFFSET
        )
        self._last_position = 0
        self._last_base_offset = _UNKNOWN
        self._hint_offset = self._hint_position = NO_OFFSET
        self._end_limit_offset = self._end_limit_position = NO_OFFSET

    def load_indexes(self) -> None:
        """Load the indexes from their files, and index the batches that the files do not cover. Set
        ``size_bytes`` to the end of the batches.

        Raises CorruptLogError if the batches do not end at ``next_offset``; OSError.
        """
        if self.indexes_loaded:
            return
        saved = self.take_saved_indexes(self.next_offset)
        # The blocks may reach beyond the last entry, but a scan from that entry also finds the last batch.
        index, is_whole = self.offset_index, saved.is_whole
        position, reached = self._walk(index.last_position, self.base_offset + index.last_relative_offset)
        if reached != self.next_offset and len(index):
            is_whole = False
            self._forget_indexes()
            position, reached = self._walk(0, self.base_offset)
            if reached == self.next_offset:
                logger.warning("index rebuilt %s", Fields(path=self.path()))
        if reached != self.next_offset:  # the index files stay: they prove how far the batches reached
            raise self.damaged(position, f"the batch with offset {reached}", "none")
        if not is_whole:
            self.drop_saved_indexes()
        self.size_bytes = position  # the file may be longer because of zeros allocated ahead
        self.indexes_loaded = True

    def limit_to(self, end_offset: int) -> int:
        """Use only the batches below ``end_offset``, the sound end of a damaged log, from now on. Return the
        end offset (exclusive) of the batches that were found.

        No file is changed: the batches are indexed in memory. Nothing may be appended any more. Raises
        CorruptLogError, OSError.
        """
        self._forget_indexes()
        self._mapped_bytes = 0
        self._set_allocated(self.file.size())
        self.size_bytes = min(self.size_bytes, self.allocated_bytes)
        self.size_bytes, self.next_offset = self._walk(0, self.base_offset, end_offset)
        self.indexes_loaded = True
        return self.next_offset

    def _walk(self, position: int, offset: int, end_offset: int = _UNKNOWN) -> tuple[int, int]:
        """Index the contiguous batches from ``position`` on, where the offset ``offset`` begins, that end at
        or below ``end_offset``. Return the (position, offset) that follow the last of them."""
        for start, base_offset, last_delta, max_ms, length in scan(self.view(), position, self.size_bytes):
            if base_offset != offset or offset + last_delta >= end_offset:
                break
            self.note_batch(start, base_offset, max_ms)
            offset += last_delta + 1
            position = start + length
        return position, offset

    def take_saved_indexes(self, up_to: int) -> SavedIndexes:
        """Load the entries of the index blocks that end at or below offset ``up_to``, up to the first block
        that is not valid or differs between the two index files.

        If the result is not whole, the caller calls ``drop_saved_indexes`` once the batches are known to be
        intact, so that the entries are written again later.
        """
        self._forget_indexes()
        offset_blocks = self._read_blocks(layout.OFFSET_INDEX_SUFFIX, OFFSET_MAGIC, OFFSET_ENTRY_BYTES)
        time_blocks = self._read_blocks(layout.TIME_INDEX_SUFFIX, TIME_MAGIC, TIME_ENTRY_BYTES)
        end = (self.base_offset, 0)
        whole = len(offset_blocks) == len(time_blocks)
        for (offsets, offsets_end), (times, times_end) in zip(offset_blocks, time_blocks, strict=False):
            block_end = (offsets.end_offset, offsets.end_position)
            trusted = self.state.cap(offsets.end_offset, offsets.truncations)
            is_own = offsets.owner == times.owner == self.owner
            if not is_own or block_end != (times.end_offset, times.end_position) or block_end < end:
                whole = False
                break
            if trusted > up_to and offsets.end_position:
                whole = False
                break
            if trusted < offsets.end_offset or not self._take_entries(offsets.entries, times.entries):
                whole = False
                break
            end = block_end
            self._index_saved_bytes, self._time_saved_bytes = offsets_end, times_end
        self._index_saved_entries = len(self.offset_index)
        self._time_saved_entries = len(self.time_index)
        self._saved_end_position = end[1]
        whole = whole and self._saved_length_is(self._index_saved_bytes, self._time_saved_bytes)
        self._take_tail_from_indexes()
        return SavedIndexes(end[0], whole)

    def _take_entries(self, offset_entries: bytes, time_entries: bytes) -> bool:
        entries = len(self.offset_index)
        if not self.offset_index.extend(offset_entries):
            return False
        if self.time_index.extend(time_entries):
            return True
        last = self.offset_index.positions[entries] if entries < len(self.offset_index) else None
        if last is not None:
            self.offset_index.truncate_to_position(last)
        return False

    def saved_end_offset(self) -> int:
        """Return the largest offset below which an index block proves that the log is synced, or 0."""
        end = 0
        for suffix, magic, entry_bytes in (
            (layout.OFFSET_INDEX_SUFFIX, OFFSET_MAGIC, OFFSET_ENTRY_BYTES),
            (layout.TIME_INDEX_SUFFIX, TIME_MAGIC, TIME_ENTRY_BYTES),
        ):
            for block, _ in self._raw_blocks(suffix, magic, entry_bytes):
                # A block with this owner proves a sync of the log even if it belongs to another segment.
                if block.owner == self.owner and block.end_position:
                    end = max(end, self.state.cap(block.end_offset, block.truncations))
        return end

    def fingerprint(self, position: int) -> Fingerprint:
        """Return the fingerprint of the segment, with the batch at ``position`` as the last one (R42)."""
        if not self.head_crc:
            self.head_crc = read_crc(self.file, 0)
        return Fingerprint(self.base_offset, self.head_crc, position, read_crc(self.file, position))

    @property
    def last_position(self) -> int:
        """The position of the last batch; NO_OFFSET if it is not known."""
        return NO_OFFSET if self._last_base_offset == _UNKNOWN else self._last_position

    def has(self, block: Block) -> bool:
        """Whether the file has the two batches whose CRCs are in ``block`` (R42). Also True if the block
        belongs to another log or has no CRC of a last batch."""
        if block.owner != self.owner or not block.tail_crc:
            return True
        found = self.fingerprint(block.tail_position)
        return (found.head_crc, found.tail_crc) == (block.head_crc, block.tail_crc)

    def _read_blocks(self, suffix: str, magic: bytes, entry_bytes: int) -> list[tuple[Block, int]]:
        """Return the intact blocks of an index file. Return none if the first block was written with the
        first batch of another segment of this log."""
        blocks = self._raw_blocks(suffix, magic, entry_bytes)
        head = blocks[0][0] if blocks else None
        if head is None or head.owner != self.owner or head.end_position:
            return blocks
        return blocks if head.end_offset == self.base_offset else []

    def _raw_blocks(self, suffix: str, magic: bytes, entry_bytes: int) -> list[tuple[Block, int]]:
        try:
            data = self._fs.read_bytes(self.path(suffix))
        except (FileNotFoundError, WrongFileTypeError):
            return []
        return list(decode_blocks(magic, data, entry_bytes))

    def _saved_length_is(self, index_bytes: int, time_bytes: int) -> bool:
        for suffix, length in (
            (layout.OFFSET_INDEX_SUFFIX, index_bytes),
            (layout.TIME_INDEX_SUFFIX, time_bytes),
        ):
            path = self.path(suffix)
            if (self._fs.file_size(path) if self._fs.exists(path) else 0) != length:
                return False
        return True

    def drop_saved_indexes(self) -> None:
        """Remove the index files, so that the next save writes all entries."""
        unlink_existing(self._fs, map(self.path, (layout.OFFSET_INDEX_SUFFIX, layout.TIME_INDEX_SUFFIX)))
        self._index_saved_bytes = self._time_saved_bytes = 0
        self._index_saved_entries = self._time_saved_entries = 0
        self._saved_end_position = 0

    def save_indexes(self, synced_position: int, *, final: bool) -> None:
        """Append new entries to the index files, up to ``synced_position``.

        If ``final``, append all new entries and the end of the segment. Otherwise append only if at least
        SAVE_INDEX_ENTRIES entries are new. Has no effect if the indexes are not loaded. Errors are only
        logged, because indexes can be rebuilt from the log.
        """
        if not self.indexes_loaded:
            return
        index = self.offset_index
        if final:
            assert synced_position == self.size_bytes
            if self._saved_end_position == self.size_bytes:
                return
            if self.max_timestamp_ms != NO_TIMESTAMP:
                self.time_index.maybe_append(
                    self.max_timestamp_ms, self.max_timestamp_offset - self.base_offset
                )
            count, times = len(index), len(self.time_index)
            end_offset, end_position = self.next_offset, self.size_bytes
        else:
            if len(index) - self._index_saved_entries < SAVE_INDEX_ENTRIES:
                return
            count = index.count_up_to_position(synced_position)
            if count - self._index_saved_entries < SAVE_INDEX_ENTRIES:
                return
            relative, end_position = index.relative_offsets[count - 1], index.positions[count - 1]
            times = self.time_index.count_below_offset(relative)
            end_offset = self.base_offset + relative
        offset_entries = index.entries(self._index_saved_entries, count)
        time_entries = self.time_index.entries(self._time_saved_entries, times)
        try:
            marks = self.fingerprint(self._last_position)[1:] if final else (0, 0, 0)
        except (OSError, StorageExhaustedError) as error:
            logger.warning("index not saved %s", Fields(path=self.path(), error=error))
            return
        block = Block(self.state.truncations, end_offset, end_position, offset_entries, self.owner, *marks)
        if self._append_blocks(block, block._replace(entries=time_entries)):
            self._index_saved_entries, self._time_saved_entries = count, times
            self._saved_end_position = end_position

    def _append_blocks(self, offsets: Block, times: Block) -> bool:
        """Append a block to each index file. Return False, with a log line, if that fails."""
        index = encode_block(OFFSET_MAGIC, offsets, OFFSET_ENTRY_BYTES)
        time_index = encode_block(TIME_MAGIC, times, TIME_ENTRY_BYTES)
        try:
            self._write_index(layout.OFFSET_INDEX_SUFFIX, self._index_saved_bytes, index)
            self._write_index(layout.TIME_INDEX_SUFFIX, self._time_saved_bytes, time_index)
        except (OSError, StorageExhaustedError) as error:
            logger.warning("index not saved %s", Fields(path=self.path(), error=error))
            return False
        self._index_saved_bytes += len(index)
        self._time_saved_bytes += len(time_index)
        return True

    def _write_index(self, suffix: str, position: int, data: bytes) -> None:
        file = self._fs.open(self.path(suffix), create=True)
        file.write_at(position, data)
        file.close()

    # --- open and closed -------------------------------------------------------------------------------

    @property
    def is_in_use(self) -> bool:
        """Whether a file or a map is open."""
        return self._file is not None or self._mapped_bytes > 0

    def release(self) -> None:
        """Drop the references to the file and the map, which are opened again when needed. Existing views
        stay valid."""
        self._file = None
        if self._mapped_bytes:
            self._map = memoryview(b"")
            self._mapped_bytes = 0

    def header_at(self, position: int) -> BatchHeader:
        """Return the header of the batch at ``position``. Raises CorruptLogError if it cannot be read."""
        try:
            return parse_header(self.file.read_at(position, HEADER_BYTES))
        except CorruptBatchError as error:
            raise self.damaged(position, "a batch", error.message) from error

    def first_timestamp_ms(self) -> int:
        """Return the largest timestamp of the first batch, or NO_TIMESTAMP if there is no batch."""
        for _, _, _, timestamp_ms, _ in scan(self.view(), 0, self.size_bytes):
            return timestamp_ms
        return NO_TIMESTAMP

    def damaged(self, position: int, expected: str, actual: str) -> CorruptLogError:
        return CorruptLogError(path=self.path(), position=position, expected=expected, actual=actual)
