"""Reads the files of a data directory without opening it, for ``kl log dump|verify|index``.

Nothing is locked or changed, and damage is returned, not raised. A log that is in use can be inspected too,
but then its last batch may be incomplete, and its last file may end with allocated zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

from kafkalite.errors import CorruptBatchError, CorruptLogError, DataDirectoryError, WrongFileTypeError
from kafkalite.model import NO_EPOCH
from kafkalite.records.gaps import is_gap
from kafkalite.records.header import HEADER_BYTES, BatchHeader, check, parse_header, total_length
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    CleanShutdown,
    LogState,
    PartitionIdentity,
    RecoveryPoint,
    decode_clean_shutdown,
    decode_partition,
)
from kafkalite.storage.compaction_swap import swap_problem
from kafkalite.storage.damage import Damage, repair_hint
from kafkalite.storage.file_check import (
    CORRECTED,
    DAMAGED,
    LOST_BEFORE,
    DirectoryVerdict,
    FileVerdict,
    Finding,
    check_log_files,
    check_node_files,
    is_checked_log_file,
    states_of,
)
from kafkalite.storage.filesystem import File, FileSystem
from kafkalite.storage.index_block import (
    OFFSET_ENTRY_BYTES,
    OFFSET_MAGIC,
    TIME_ENTRY_BYTES,
    TIME_MAGIC,
    decode_blocks,
)
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import may_lack_unsynced
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.recovery import diagnose, read_epochs
from kafkalite.storage.recovery_points import read_points

_OFFSET_ENTRY: Final = struct.Struct(">II")

_TIME_ENTRY: Final = struct.Struct(">qI")


class BatchAt(NamedTuple):
    """A batch of a ``.log`` file. ``problem`` is None if the batch is intact or was not checked.

    If the header is not valid, or the batch extends beyond the end of the file, ``header`` is None, ``data``
    is empty, and no further batch of the file is read.
    """

    position: int
    header: BatchHeader | None
    problem: str | None
    data: memoryview  #: a view of the batch


class IndexEntry(NamedTuple):
    """One entry of block number ``block`` of an index file, with absolute offsets.

    In a ``.index`` file, ``key`` is an offset and ``value`` the position of its batch. In a ``.timeindex``
    file, ``key`` is a timestamp in milliseconds and ``value`` the base offset of the first batch that has it.
    """

    block: int
    key: int
    value: int


class SegmentIndex(NamedTuple):
    """The content of an index file. ``end_offset`` (exclusive) is the end of the offsets that its intact
    blocks cover.

    ``valid_bytes`` is the length of its intact blocks. ``is_whole``: the file ends with its last intact
    block.
    """

    entries: list[IndexEntry]
    end_offset: int
    valid_bytes: int
    is_whole: bool


class LogVerdict(NamedTuple):
    """The result of verifying one log directory. ``log_end_offset`` (exclusive) is the end of the last batch
    whose header can be read."""

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
    damage: Damage | None  #: what the next start of a broker will find
    files: list[FileVerdict]  #: of all files in the directory

    @property
    def is_damaged(self) -> bool:
        return self.damage is not None or any(each.is_damage for each in self.findings)


class ReadOnly:
    """Wraps a file system: ignores the calls that rename, remove or replace files or sync a directory, and
    passes all others on."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        if name in {"unlink", "rename", "write_atomically", "remove_tree", "sync_dir"}:
            return lambda *_, **__: None
        return getattr(self._fs, name)


class DryRun:
    """Wraps a file system: keeps the effects of ``rename``, ``unlink`` and ``write_atomically`` in memory,
    where later reads find them."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._written = MemoryFileSystem()
        #: The file system and the path of each file with a changed name or content; None if it was removed.
        self._places: dict[str, tuple[FileSystem, str] | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def _place(self, path: str) -> tuple[FileSystem, str]:
        place = self._places.get(path, (self._fs, path))
        if place is None:
            raise FileNotFoundError(path)
        return place

    def open(self, path: str) -> File:
        fs, place = self._place(path)
        return fs.open(place)

    def file_size(self, path: str) -> int:
        fs, place = self._place(path)
        return fs.file_size(place)

    def read_bytes(self, path: str) -> bytes:
        fs, place = self._place(path)
        return fs.read_bytes(place)

    def exists(self, path: str) -> bool:
        return self._places[path] is not None if path in self._places else self._fs.exists(path)

    def list_dir(self, path: str) -> list[str]:
        paths = {layout.join(path, name) for name in self._fs.list_dir(path)}
        paths |= {one for one in self._places if layout.parent(one) == path}
        return sorted(layout.name_of(one) for one in paths if self.exists(one))

    def rename(self, old: str, new: str) -> None:
        self._places[new], self._places[old] = self._place(old), None

    def unlink(self, path: str) -> None:
        self._place(path)
        self._places[path] = None

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        self._written.make_dirs(layout.parent(path))
        self._written.write_atomically(path, data)
        self._places[path] = (self._written, path)

    def sync_dir(self, path: str) -> None:
        """Do nothing."""


class LastSession(NamedTuple):
    """The state that the last process left in a data directory, from which the next start recovers its logs.

    The keys of ``points`` and ``clean_ends`` are the names of log directories. Only the logs that an orderly
    stop closed have a clean end. ``may_lack_unsynced``: the system may have lost unsynced bytes of the other
    logs.
    """

    points: Mapping[str, RecoveryPoint]
    clean_ends: Mapping[str, CleanEnd]
    may_lack_unsynced: bool

    def point_of(self, name: str) -> RecoveryPoint:
        """Return the newest recovery point of a log."""
        point = self.points.get(name, RecoveryPoint())
        if name in self.clean_ends:
            point = max(point, self.clean_ends[name].point, key=RecoveryPoint.age)
        return point


def read_last_session(fs: FileSystem, data_directory: str) -> LastSession:
    """Read the state that the last process left in a data directory. Files that are damaged or not regular
    files count as missing. Raises OSError."""
    marker = read_marker(fs, data_directory)
    clean_ends = {} if marker is None else marker.ends
    return LastSession(read_points(fs, data_directory), clean_ends, may_lack_unsynced(fs, data_directory))


def read_marker(fs: FileSystem, data_directory: str) -> CleanShutdown | None:
    """Return the marker of an orderly stop, or None if there is no readable one."""
    path = layout.join(data_directory, layout.CLEAN_SHUTDOWN_FILE)
    try:
        return decode_clean_shutdown(fs.read_bytes(path), path)
    except (FileNotFoundError, CorruptLogError, ValueError):
        return None


def damage_of(fs: FileSystem, directory: str, session: LastSession | None = None) -> Damage | None:
    """Return the damage that the next start would find, or None. Changes nothing.

    ``session`` describes the data directory; if None, it is read.
    """
    data_directory, name = layout.parent(directory), layout.name_of(directory)
    parsed = layout.parse_log_directory_name(name)
    read_only = cast(FileSystem, ReadOnly(fs))
    if session is None:
        session = read_last_session(fs, data_directory)
    point = session.point_of(name)
    is_cut_expected = session.may_lack_unsynced and name not in session.clean_ends
    identity = None
    topic = _topic(fs, directory)
    if parsed is not None and topic is not None:
        identity = PartitionIdentity(topic, *parsed)
    try:
        found = diagnose(read_only, directory, LogConfig(), point, identity, is_cut_expected)
        if found is not None and was_compacted(fs, directory):
            config = LogConfig(is_compacted=True)
            found = diagnose(read_only, directory, config, point, identity, is_cut_expected)
        return found
    except (CorruptLogError, OSError, ValueError) as error:
        return Damage(str(error), 0, None, repair_hint(directory))


def was_compacted(fs: FileSystem, directory: str) -> bool:
    """Whether a compaction may have changed the log: its points are saved, or one of its segments has a gap
    batch.

    The points are saved at the end of the first pass, so a pass that was interrupted leaves only the gaps.
    ``kl log accept-loss`` writes gaps, too. Raises OSError.
    """
    names = fs.list_dir(directory)
    if layout.COMPACTION_FILE in names:
        return True
    unopenable = {path for path, _ in unopenable_files(fs, directory)}
    paths = (layout.join(directory, name) for name in _segment_files(names).values())
    return any(
        one.header is not None and one.problem is None and is_gap(one.header)
        for path in paths
        if path not in unopenable
        for one in iter_batches(fs, path)
    )


def iter_batches(fs: FileSystem, path: str, *, verify: bool = True) -> Iterator[BatchAt]:
    """Yield the batches of a ``.log`` file in order. With ``verify``, check their CRCs and offsets.

    After a complete batch with a valid header, iteration continues even if the batch is damaged. For other
    bytes, one item is yielded, as the last one, and for zeros at the end, none. Raises OSError.
    """
    file = fs.open(path)
    view = file.map(file.size())
    name = layout.parse_segment_file_name(layout.name_of(path))
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
    name = layout.parse_segment_file_name(layout.name_of(path))
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


def unopenable_files(fs: FileSystem, directory: str) -> Iterator[tuple[str, OSError]]:
    """Yield (path, error) for each file of a log that cannot be opened: a segment file, an index file,
    ``log-state`` or ``partition.json``. The error is a WrongFileTypeError if the path is not a regular
    file."""
    for name in fs.list_dir(directory):
        if layout.parse_segment_file_name(name) or name in (layout.LOG_STATE_FILE, layout.PARTITION_FILE):
            path = layout.join(directory, name)
            try:
                fs.open(path).close()
            except OSError as error:
                yield path, error


def _reason(error: OSError) -> str:
    return f"it is {error.actual}" if isinstance(error, WrongFileTypeError) else str(error.strerror)


def verify_log(fs: FileSystem, directory: str, session: LastSession | None = None) -> LogVerdict:
    """Read every batch and every index entry of one log directory. ``session``: as for ``damage_of``. Raises
    DataDirectoryError, OSError."""
    parsed = layout.parse_log_directory_name(layout.name_of(directory.rstrip("/")))
    if parsed is None:
        raise DataDirectoryError(
            f"{directory} is not a log directory", hint="its name is <32 hex digits of topic id>-<partition>"
        )
    try:
        everything = fs.list_dir(directory)
    except WrongFileTypeError as error:
        finding = Finding(directory, 0, f"{_reason(error)}, but must be a directory")
        verdict = [FileVerdict(directory, DAMAGED, finding.problem)]
        damage = damage_of(fs, directory.rstrip("/"), session)
        return LogVerdict(
            directory, None, parsed.topic_id, parsed.partition, 0, 0, 0, 0, 0, 0, [finding], damage, verdict
        )
    findings = [
        Finding(path, 0, f"cannot be opened as a file: {_reason(error)}")
        for path, error in unopenable_files(fs, directory)
    ]
    unopenable = {layout.name_of(one.path) for one in findings}
    names = [name for name in everything if name not in unopenable]
    state = check_log_files(fs, directory, names, findings)
    epochs = _EpochCheck(fs, directory, state)
    refused = {name for name in names if _is_refused(fs, directory, name, names, findings)}
    files = _segment_files([name for name in names if name not in refused])
    bases = sorted(files)
    ends: list[int] = []
    batch_count = record_count = size_bytes = 0
    for number, base_offset in enumerate(bases):
        path = layout.join(directory, files[base_offset])
        tally = _verify_segment(fs, path, base_offset, number == len(bases) - 1, epochs, findings)
        ends.append(tally.end_offset)
        batch_count += tally.batch_count
        record_count += tally.record_count
        size_bytes += tally.size_bytes
    findings += epochs.finish()
    if batch_count and layout.LEADER_EPOCHS_FILE not in names and not unopenable:
        problem = (
            "the file is missing; it will be rebuilt from the batches, and nothing confirms their epochs"
        )
        findings.append(Finding(layout.join(directory, layout.LEADER_EPOCHS_FILE), 0, problem, False))
    for name in names:
        parsed_name = layout.parse_segment_file_name(name)
        if parsed_name is not None and parsed_name.base_offset not in files:
            findings.append(Finding(layout.join(directory, name), 0, "an index without its segment", False))
    for end, base_offset in zip(ends, bases[1:], strict=False):
        if end != base_offset:
            path = layout.join(directory, files[base_offset])
            problem = f"the segment before it ends at offset {end}"
            findings.append(Finding(path, 0, problem, outcome=LOST_BEFORE))
    return LogVerdict(
        directory,
        _topic(fs, directory),
        parsed.topic_id,
        parsed.partition,
        max(state.log_start_offset, bases[0] if bases else 0),
        ends[-1] if ends else state.log_start_offset,
        len(bases),
        batch_count,
        record_count,
        size_bytes,
        findings,
        damage_of(fs, directory.rstrip("/"), session),
        states_of(fs, directory, findings, is_checked_log_file),
    )


def verify_data_dir(fs: FileSystem, path: str) -> tuple[DirectoryVerdict, Iterator[LogVerdict]]:
    """Return (verdict on the node's own files, iterator that verifies the logs one by one).

    The metadata is not checked. Raises DataDirectoryError if ``path`` is not formatted.
    """
    names = fs.list_dir(path)
    if layout.NODE_FILE not in names:
        raise DataDirectoryError(f"{path} is not a data directory: it has no {layout.NODE_FILE}")
    logs = [layout.join(path, name) for name in names if layout.parse_log_directory_name(name)]
    session = read_last_session(fs, path)
    return check_node_files(fs, path), (verify_log(fs, directory, session) for directory in logs)


def _is_refused(fs: FileSystem, directory: str, name: str, names: list[str], findings: list[Finding]) -> bool:
    """Whether a file is a swap file that the next start will set aside. If so, add a finding."""
    if layout.parse_swap_file_name(name) is None:
        return False
    try:
        problem = swap_problem(fs, directory, name, names)
    except CorruptLogError:
        return False  # only this file has its records, so its batches are verified
    if problem is not None:
        problem += "; the next start sets the file aside and keeps the segments"
        findings.append(Finding(layout.join(directory, name), 0, problem, is_damage=False))
    return problem is not None


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


class _EpochCheck:
    """Compares the leader epochs of a log's batches with the leader-epochs file (R58)."""

    def __init__(self, fs: FileSystem, directory: str, state: LogState) -> None:
        saved = read_epochs(fs, directory, state)
        self._path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
        self._epochs = LeaderEpochs(saved.entries if saved else ())
        self._is_ahead = saved is not None and saved.is_ahead
        self._found: list[Finding] = []
        #: The last batches, if their epochs are above the last one in the file.
        self._newer: list[Finding] = []

    def take(self, path: str, position: int, header: BatchHeader) -> None:
        latest = self._epochs.latest_epoch
        if header.leader_epoch > latest != NO_EPOCH:
            problem = f"leader epoch {header.leader_epoch}, but the last recorded one is {latest}"
            self._newer.append(Finding(path, position, problem, outcome=CORRECTED))
            return
        self._found += self._newer
        self._newer = []
        try:
            self._epochs.check(header.leader_epoch, header.last_offset)
        except CorruptBatchError as error:
            self._found.append(Finding(path, position, error.message, outcome=CORRECTED))

    def finish(self) -> list[Finding]:
        """Return the findings. If at least two of the last batches have later epochs than the file, the file
        is an older version."""
        if len(self._newer) > 1 and self._is_ahead:
            problem = "the batches have later epochs; the file will be rebuilt"
            return [*self._found, Finding(self._path, 0, problem, is_damage=False)]
        return self._found + (self._newer if self._is_ahead else [])


class _Tally(NamedTuple):
    end_offset: int
    batch_count: int
    record_count: int
    size_bytes: int


def _verify_segment(
    fs: FileSystem, path: str, base_offset: int, is_last: bool, epochs: _EpochCheck, findings: list[Finding]
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
        if problem is None:
            epochs.take(path, position, header)
        starts[header.base_offset] = position
        timestamps[header.base_offset] = header.max_timestamp_ms
        end_offset = header.next_offset
        size_bytes = position + header.length_bytes
        record_count += 0 if header.is_control else header.record_count
    if path.endswith(layout.SWAP_SUFFIX):
        return _Tally(end_offset, len(starts), record_count, size_bytes)
    for suffix in (layout.OFFSET_INDEX_SUFFIX, layout.TIME_INDEX_SUFFIX):
        index_path = layout.join(layout.parent(path), layout.segment_file_name(base_offset, suffix))
        if fs.exists(index_path) and all(one.path != index_path for one in findings):
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


def _topic(fs: FileSystem, directory: str) -> str | None:
    try:
        identity = decode_partition(fs.read_bytes(layout.join(directory, layout.PARTITION_FILE)))
    except OSError:
        return None
    return None if identity is None else identity.topic
