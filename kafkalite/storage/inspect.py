"""Reads the files of a data directory without opening it, for ``kl log dump|verify|index``.

It locks and changes nothing, and returns problems as values. A log that is in use can be inspected too, but
then its last batch may be incomplete, and its files end with allocated zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar, cast

from kafkalite.errors import CorruptBatchError, CorruptLogError, DataDirectoryError
from kafkalite.records.header import HEADER_BYTES, BatchHeader, check, parse_header, total_length
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    PartitionIdentity,
    RecoveryPoint,
    decode_clean_shutdown,
    decode_compaction,
    decode_leader_epochs,
    decode_log_state,
    decode_node,
    decode_partition,
    decode_producers,
    decode_recovery_points,
)
from kafkalite.storage.damage import Damage, repair_hint
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.index_block import (
    OFFSET_ENTRY_BYTES,
    OFFSET_MAGIC,
    TIME_ENTRY_BYTES,
    TIME_MAGIC,
    decode_blocks,
)
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.recovery import diagnose

_OFFSET_ENTRY: Final = struct.Struct(">II")
T = TypeVar("T")

_TIME_ENTRY: Final = struct.Struct(">qI")


class Finding(NamedTuple):
    """A problem at a position (in bytes) of a file. ``is_damage``: recovery would not repair it."""

    path: str
    position: int
    problem: str
    is_damage: bool = True


class BatchAt(NamedTuple):
    """A batch of a ``.log`` file. ``problem`` is None if the batch is intact.

    If ``header`` is None, the header cannot be read, and this is the last item.
    """

    position: int
    header: BatchHeader | None
    problem: str | None
    data: memoryview  #: the batch, without a copy; empty without a header


class IndexEntry(NamedTuple):
    """One entry of block number ``block`` of an index file, with absolute offsets.

    In a ``.index`` file, ``key`` is an offset and ``value`` the position of its batch. In a ``.timeindex``
    file, ``key`` is a timestamp in milliseconds and ``value`` the base offset of the first batch that has it.
    """

    block: int
    key: int
    value: int


class SegmentIndex(NamedTuple):
    """The content of an index file. ``end_offset`` (exclusive) is the end of the log that its blocks cover.

    ``is_whole``: the file ends with its last intact block.
    """

    entries: list[IndexEntry]
    end_offset: int
    valid_bytes: int
    is_whole: bool


class LogVerdict(NamedTuple):
    """The result of verifying one log directory. The log's intact batches end at ``log_end_offset``
    (exclusive)."""

    directory: str
    topic: str | None
    topic_id: str
    partition: int
    log_start_offset: int
    log_end_offset: int
    segment_count: int
    batch_count: int
    record_count: int
    size_bytes: int
    findings: list[Finding]
    damage: Damage | None = None  #: what the next start of a broker will find


class _ReadOnly:
    """Passes reads on to a file system, and ignores changes."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        if name in {"unlink", "rename", "write_atomically", "remove_tree", "sync_dir"}:
            return lambda *_, **__: None
        return getattr(self._fs, name)


def damage_of(fs: FileSystem, directory: str) -> Damage | None:
    """Return the damage that a start would find after a crash of the process, not of the system. Changes
    nothing."""
    data_directory, name = layout.parent(directory), directory.rpartition("/")[2]
    parsed = layout.parse_log_directory_name(name)
    point = RecoveryPoint()
    points_path = layout.join(data_directory, layout.RECOVERY_POINTS_FILE)
    if fs.exists(points_path):
        point = decode_recovery_points(fs.read_bytes(points_path)).points.get(name, point)
    identity = None
    topic = _topic(fs, directory)
    if parsed is not None and topic is not None:
        identity = PartitionIdentity(topic, *parsed)
    read_only = cast(FileSystem, _ReadOnly(fs))
    try:
        return diagnose(read_only, directory, LogConfig(), point, identity)
    except (CorruptLogError, OSError, ValueError) as error:
        return Damage(str(error), 0, None, repair_hint(directory))


def iter_batches(fs: FileSystem, path: str, *, verify: bool = True) -> Iterator[BatchAt]:
    """Yield the batches of a ``.log`` file in order. With ``verify``, check their CRCs and offsets.

    A complete but damaged batch is reported, and iteration continues with the next one. Zeros at the end
    are not reported. Other bytes that are not a batch are reported once, as the last item. Raises OSError.
    """
    file = fs.open(path)
    view = file.map(file.size())
    name = layout.parse_segment_file_name(path.rpartition("/")[2])
    expected = name.base_offset if name is not None else None
    position = 0
    while position < len(view):
        try:
            length = _length_at(view, position)
            if length == 0:
                return
            header = parse_header(view, position)
        except CorruptBatchError as error:
            yield BatchAt(position, None, error.message, view[:0])
            return
        data = view[position : position + length]
        yield BatchAt(position, header, _problem(data, header, expected) if verify else None, data)
        expected = header.next_offset
        position += length


def _length_at(view: memoryview, position: int) -> int:
    """Return the length of the batch at ``position``, or 0 if only zeros follow. Raises CorruptBatchError."""
    left = len(view) - position
    length = total_length(view, position) if left >= HEADER_BYTES else 0
    if length == 0 and any(bytes(view[position:]).lstrip(b"\0")):
        raise CorruptBatchError(f"the last {left} bytes are neither a batch nor zeros")
    if length > left:
        raise CorruptBatchError(f"a batch of {length} bytes, but only {left} bytes are left")
    return length


def _problem(batch: memoryview, header: BatchHeader, expected: int | None) -> str | None:
    try:
        check(batch)
    except CorruptBatchError as error:
        return error.message
    if expected is not None and header.base_offset != expected:
        return f"base offset is {header.base_offset}, expected {expected}"
    return None


def read_index(fs: FileSystem, path: str) -> SegmentIndex:
    """Read a ``.index`` or ``.timeindex`` file. Raises DataDirectoryError for another name."""
    name = layout.parse_segment_file_name(path.rpartition("/")[2])
    if name is None or name.suffix == layout.LOG_SUFFIX:
        raise DataDirectoryError(f"{path} is not an index file", hint="its name ends in .index or .timeindex")
    data = fs.read_bytes(path)
    is_offsets = name.suffix == layout.OFFSET_INDEX_SUFFIX
    magic, entry_bytes, entry_struct = (
        (OFFSET_MAGIC, OFFSET_ENTRY_BYTES, _OFFSET_ENTRY)
        if is_offsets
        else (TIME_MAGIC, TIME_ENTRY_BYTES, _TIME_ENTRY)
    )
    entries: list[IndexEntry] = []
    end_offset, valid_bytes, count = name.base_offset, 0, 0
    for block, end in decode_blocks(magic, data, entry_bytes):
        for first, second in entry_struct.iter_unpack(block.entries):
            if is_offsets:
                entries.append(IndexEntry(count, name.base_offset + first, second))
            else:
                entries.append(IndexEntry(count, first, name.base_offset + second))
        end_offset, valid_bytes, count = block.end_offset, end, count + 1
    return SegmentIndex(entries, end_offset, valid_bytes, valid_bytes == len(data))


def verify_log(fs: FileSystem, directory: str) -> LogVerdict:
    """Read every batch and every index entry of one log directory. Raises DataDirectoryError, OSError."""
    parsed = layout.parse_log_directory_name(directory.rstrip("/").rpartition("/")[2])
    if parsed is None:
        raise DataDirectoryError(
            f"{directory} is not a log directory", hint="its name is <32 hex digits of topic id>-<partition>"
        )
    names = fs.list_dir(directory)
    findings: list[Finding] = []
    log_start_offset = _verify_small_files(fs, directory, names, findings)
    files = _segment_files(names)
    bases = sorted(files)
    ends: list[int] = []
    batch_count = record_count = size_bytes = 0
    for number, base_offset in enumerate(bases):
        path = layout.join(directory, files[base_offset])
        tally = _verify_segment(fs, path, base_offset, number == len(bases) - 1, findings)
        ends.append(tally.end_offset)
        batch_count += tally.batch_count
        record_count += tally.record_count
        size_bytes += tally.size_bytes
    for end, base_offset in zip(ends, bases[1:], strict=False):
        if end != base_offset:
            path = layout.join(directory, files[base_offset])
            findings.append(Finding(path, 0, f"the segment before it ends at offset {end}"))
    return LogVerdict(
        directory,
        _topic(fs, directory),
        parsed.topic_id,
        parsed.partition,
        max(log_start_offset, bases[0] if bases else 0),
        ends[-1] if ends else log_start_offset,
        len(bases),
        batch_count,
        record_count,
        size_bytes,
        findings,
        damage_of(fs, directory.rstrip("/")),
    )


def verify_data_dir(fs: FileSystem, path: str) -> tuple[list[Finding], Iterator[LogVerdict]]:
    """Return (problems of the directory's own files, iterator that verifies the logs one by one).

    Raises DataDirectoryError if ``path`` is not formatted.
    """
    names = fs.list_dir(path)
    findings: list[Finding] = []
    node_path = layout.join(path, layout.NODE_FILE)
    if layout.NODE_FILE not in names:
        raise DataDirectoryError(f"{path} is not a data directory: it has no {layout.NODE_FILE}")
    try:
        decode_node(fs.read_bytes(node_path), node_path)
    except DataDirectoryError as error:
        findings.append(Finding(node_path, 0, error.message))
    if layout.CLEAN_SHUTDOWN_FILE in names:
        marker_path = layout.join(path, layout.CLEAN_SHUTDOWN_FILE)
        _try_decode(fs, marker_path, decode_clean_shutdown, findings, is_damage=False)
    if layout.RECOVERY_POINTS_FILE in names:
        points_path = layout.join(path, layout.RECOVERY_POINTS_FILE)
        problem = decode_recovery_points(fs.read_bytes(points_path)).problem
        if problem is not None:
            findings.append(Finding(points_path, 0, problem, is_damage=False))
        for name in decode_recovery_points(fs.read_bytes(points_path)).points:
            if layout.parse_log_directory_name(name) and name not in names:
                missing = layout.join(path, name)
                findings.append(Finding(missing, 0, f"the directory is missing; {repair_hint(missing)}"))
    logs = [layout.join(path, name) for name in names if layout.parse_log_directory_name(name)]
    return findings, (verify_log(fs, directory) for directory in logs)


def _segment_files(names: list[str]) -> dict[int, str]:
    """Return {base offset: file name} of the segments that the next start will use, with swaps completed."""
    files = {
        parsed.base_offset: name
        for name in names
        if (parsed := layout.parse_segment_file_name(name)) is not None and parsed.suffix == layout.LOG_SUFFIX
    }
    for name in names:
        swap = layout.parse_swap_file_name(name)
        if swap is not None:
            for base_offset in [one for one in files if swap.base_offset <= one < swap.next_offset]:
                del files[base_offset]
            files[swap.base_offset] = name
    return files


class _Tally(NamedTuple):
    end_offset: int
    batch_count: int
    record_count: int
    size_bytes: int


def _verify_segment(
    fs: FileSystem, path: str, base_offset: int, is_last: bool, findings: list[Finding]
) -> _Tally:
    """Check batches and index entries, and add findings. Bad bytes at the end of the last segment may be a
    torn tail."""
    starts: dict[int, int] = {}  # base offset -> position
    timestamps: dict[int, int] = {}  # base offset -> max timestamp
    end_offset, size_bytes, record_count = base_offset, 0, 0
    for position, header, problem, _ in iter_batches(fs, path):
        if problem is not None:
            findings.append(Finding(path, position, problem, is_damage=header is not None or not is_last))
        if header is None:
            break
        starts[header.base_offset] = position
        timestamps[header.base_offset] = header.max_timestamp_ms
        end_offset = header.next_offset
        size_bytes = position + header.length_bytes
        record_count += 0 if header.is_control else header.record_count
    if path.endswith(layout.SWAP_SUFFIX):
        return _Tally(end_offset, len(starts), record_count, size_bytes)
    for suffix in (layout.OFFSET_INDEX_SUFFIX, layout.TIME_INDEX_SUFFIX):
        index_path = layout.join(layout.parent(path), layout.segment_file_name(base_offset, suffix))
        if fs.exists(index_path):
            _verify_index(fs, index_path, starts, timestamps, end_offset, findings)
    return _Tally(end_offset, len(starts), record_count, size_bytes)


def _verify_index(
    fs: FileSystem,
    path: str,
    starts: dict[int, int],
    timestamps: dict[int, int],
    end_offset: int,
    findings: list[Finding],
) -> None:
    index = read_index(fs, path)
    if not index.is_whole:
        problem = "bytes that are not an intact block; the index will be rebuilt from here on"
        findings.append(Finding(path, index.valid_bytes, problem, is_damage=False))
    if index.end_offset > end_offset:
        findings.append(Finding(path, 0, f"synced up to offset {index.end_offset}, but the log ends before"))
    if path.endswith(layout.OFFSET_INDEX_SUFFIX):
        for _, offset, position in index.entries:
            if starts.get(offset) != position:
                findings.append(Finding(path, 0, f"no batch with offset {offset} at position {position}"))
    else:
        for _, timestamp_ms, offset in index.entries:
            if timestamps.get(offset) != timestamp_ms:
                findings.append(Finding(path, 0, f"no batch of time {timestamp_ms} at offset {offset}"))
    for before, after in pairwise(index.entries):
        if after.key <= before.key or after.value <= before.value:
            findings.append(Finding(path, 0, f"entries {before.key} and {after.key} do not increase"))


def _verify_small_files(fs: FileSystem, directory: str, names: list[str], findings: list[Finding]) -> int:
    """Check the checkpoints and add findings. Return the log start offset."""
    log_start_offset = 0
    if layout.LEADER_EPOCHS_FILE in names:
        _try_decode(fs, layout.join(directory, layout.LEADER_EPOCHS_FILE), decode_leader_epochs, findings)
    if layout.LOG_STATE_FILE in names:
        path = layout.join(directory, layout.LOG_STATE_FILE)
        state = _try_decode(fs, path, decode_log_state, findings)
        log_start_offset = state.log_start_offset if state is not None else 0
    if layout.COMPACTION_FILE in names:
        path = layout.join(directory, layout.COMPACTION_FILE)
        _try_decode(fs, path, decode_compaction, findings, is_damage=False)
    for name in names:
        if layout.parse_producers_file_name(name) is not None:
            _try_decode(fs, layout.join(directory, name), decode_producers, findings, is_damage=False)
    return log_start_offset


def _try_decode(
    fs: FileSystem,
    path: str,
    decode: Callable[[bytes, str], T],
    findings: list[Finding],
    *,
    is_damage: bool = True,
) -> T | None:
    """Return the decoded content of a file. If it cannot be decoded, add a finding and return None."""
    try:
        return decode(fs.read_bytes(path), path)
    except CorruptLogError as error:
        findings.append(Finding(path, error.position, error.message, is_damage))
    except ValueError as error:
        findings.append(Finding(path, 0, str(error), is_damage))
    return None


def _topic(fs: FileSystem, directory: str) -> str | None:
    try:
        identity = decode_partition(fs.read_bytes(layout.join(directory, layout.PARTITION_FILE)))
    except FileNotFoundError:
        return None
    return None if identity is None else identity.topic
