"""Checks the small files of a data directory, and states for every file whether it is sound.

Nothing is changed. The batches and the indexes of logs are checked by ``inspect``.
"""

# Tests: tests/cli/test_log_verify.py

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from kafkalite.errors import CorruptLogError, StorageError, WrongFileTypeError
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    START_COUNT,
    START_FILE,
    LogState,
    decode_clean_shutdown,
    decode_compaction,
    decode_leader_epochs,
    decode_lines,
    decode_log_state,
    decode_node,
    decode_partition,
    decode_producers,
    decode_recovery_points,
)
from kafkalite.storage.damage import repair_hint
from kafkalite.storage.filesystem import FileSystem

T = TypeVar("T")

SOUND: Final = "sound"
REPAIRED: Final = "repaired at the next start"
DAMAGED: Final = "damaged"
UNCHECKED: Final = "cannot be checked"
UNUSED: Final = "not used"
LOST_THERE: Final = "records there are lost"
LOST_BEFORE: Final = "the records between them are lost, and this segment is kept"
CORRECTED: Final = "it is corrected, no record is lost"


class Finding(NamedTuple):
    """A problem at a position (in bytes) of a file. ``is_damage``: recovery would not repair it.
    ``outcome`` states what ``kl log accept-loss`` would do about it."""

    path: str
    position: int
    problem: str
    is_damage: bool = True
    outcome: str = LOST_THERE

    @property
    def state(self) -> str:
        return DAMAGED if self.is_damage else REPAIRED


class FileVerdict(NamedTuple):
    """The result of the check of one file.

    ``state`` is one of this module's constants, such as SOUND or DAMAGED; ``reason`` is empty if the file is
    sound.
    """

    path: str
    state: str
    reason: str = ""


class DirectoryVerdict(NamedTuple):
    """The result of checking the files of a data directory or of its metadata. Directories in it are not
    checked."""

    directory: str
    findings: list[Finding]
    files: list[FileVerdict]

    @property
    def is_damaged(self) -> bool:
        return any(each.is_damage for each in self.findings)


#: By file name, why the content does not show whether the file is sound.
_UNCHECKED: Final = {
    layout.LOCK_FILE: "only its lock counts, not its content",
    layout.BOOT_ID_FILE: "it has no checksum; a start compares it with the system's boot id",
    layout.VOTERS_FILE: "it has no checksum; a start compares it with controller.quorum.voters",
    layout.PARTITION_FILE: "it has no checksum; a start compares its topic with the metadata",
}
_KEPT: Final = "kept for inspection"
_LEFTOVER: Final = "left over; the next start removes it"
_STRANGE: Final = "no file of a data directory"
_BOOT_ID: Final = re.compile(rb"[!-~]*\n")
_VOTERS: Final = re.compile(rb"\d+(,\d+)*\n")
_KEPT_FILE: Final = re.compile(r".*(\.damaged-|\.torn-|\.repaired)\d*")


def states_of(
    fs: FileSystem,
    directory: str,
    findings: Iterable[Finding],
    known: Callable[[str], bool],
    names: Sequence[str] | None = None,
) -> list[FileVerdict]:
    """Return the verdict on every file in ``directory``, or on the files ``names``.

    ``known(name)`` returns whether a file of this name was checked. A checked file without a finding is
    sound.
    """
    worst: dict[str, Finding] = {}
    for each in findings:
        if each.path not in worst or (each.is_damage and not worst[each.path].is_damage):
            worst[each.path] = each
    found: list[FileVerdict] = []
    for name in fs.list_dir(directory) if names is None else names:
        path = layout.join(directory, name)
        if path in worst:
            found.append(FileVerdict(path, worst[path].state, worst[path].problem))
        elif name in _UNCHECKED:
            found.append(FileVerdict(path, UNCHECKED, _UNCHECKED[name]))
        elif known(name):
            found.append(FileVerdict(path, SOUND))
        elif _KEPT_FILE.fullmatch(name):
            found.append(FileVerdict(path, UNUSED, _KEPT))
        elif layout.is_leftover(name):
            found.append(FileVerdict(path, UNUSED, _LEFTOVER))
        else:
            found.append(FileVerdict(path, UNUSED, _STRANGE))
    return found


def check_node_files(fs: FileSystem, directory: str) -> DirectoryVerdict:
    """Check the files of a data directory that belong to neither a log nor the metadata, and whether any log
    or the metadata are missing."""
    names = fs.list_dir(directory)
    findings: list[Finding] = []

    def path_of(name: str) -> str:
        return layout.join(directory, name)

    logs = set(filter(layout.parse_log_directory_name, names))
    try_decode(fs, path_of(layout.NODE_FILE), decode_node, findings)
    for name, decode in (
        (layout.CLEAN_SHUTDOWN_FILE, decode_clean_shutdown),
        (layout.START_COUNT_FILE, lambda data, path: decode_lines(START_COUNT, data, path)),
        (layout.START_FILE_FILE, lambda data, path: decode_lines(START_FILE, data, path)),
        (layout.BOOT_ID_FILE, _matching(_BOOT_ID, "a boot id")),
    ):
        if name in names:
            try_decode(fs, path_of(name), decode, findings, is_damage=False)
    if layout.VOTERS_FILE in names:
        try_decode(fs, path_of(layout.VOTERS_FILE), _matching(_VOTERS, "the ids of voters"), findings)
    listed: set[str] = set()
    is_wrong_type = False
    for name in (layout.RECOVERY_POINTS_FILE, layout.RECOVERY_POINTS_COPY):
        if name in names:
            found, wrong_type = _check_points(fs, path_of(name), findings)
            listed |= found
            is_wrong_type = is_wrong_type or wrong_type
        elif logs and name == layout.RECOVERY_POINTS_FILE:
            findings.append(Finding(path_of(name), 0, "the file is missing", is_damage=False))
    if is_wrong_type and not listed:  # a start refuses this
        points = {path_of(layout.RECOVERY_POINTS_FILE), path_of(layout.RECOVERY_POINTS_COPY)}
        findings = [one._replace(is_damage=True) if one.path in points else one for one in findings]
    if layout.METADATA_DIRECTORY not in names and _had_metadata(names, listed):
        problem = "the directory is missing, so that the node refuses to start; restore it from a backup"
        if layout.VOTERS_FILE not in names:
            problem += f", or run 'kl log accept-loss {path_of(layout.METADATA_DIRECTORY)}'"
        findings.append(Finding(path_of(layout.METADATA_DIRECTORY), 0, problem))
    for name in sorted(listed):
        if layout.parse_log_directory_name(name) and name not in names:
            missing = path_of(name)
            findings.append(Finding(missing, 0, f"the directory is missing; {repair_hint(missing)}"))
    checked = {
        layout.NODE_FILE,
        layout.CLEAN_SHUTDOWN_FILE,
        layout.START_COUNT_FILE,
        layout.START_FILE_FILE,
        layout.RECOVERY_POINTS_FILE,
        layout.RECOVERY_POINTS_COPY,
    }
    own = [name for name in names if name not in logs and name != layout.METADATA_DIRECTORY]
    return DirectoryVerdict(
        directory, findings, states_of(fs, directory, findings, checked.__contains__, own)
    )


def _had_metadata(names: Iterable[str], listed: Iterable[str]) -> bool:
    """Whether a node with the files ``names`` and the recovery points ``listed`` has stored metadata.

    True for a voter, and for a single node that has run before. In a cluster, a broker that is not a voter
    stores no metadata.
    """
    if layout.VOTERS_FILE in names:
        return True
    has_run = layout.METADATA_DIRECTORY in listed or any(map(layout.parse_log_directory_name, names))
    return has_run and layout.START_COUNT_FILE not in names


def _check_points(fs: FileSystem, path: str, findings: list[Finding]) -> tuple[set[str], bool]:
    """Check a file of recovery points and add findings. Return (names of the logs in it, whether ``path`` is
    not a regular file)."""
    try:
        data = fs.read_bytes(path)
    except WrongFileTypeError as error:
        findings.append(Finding(path, 0, error.message, is_damage=False))
        return set(), True
    except OSError as error:
        findings.append(_unreadable(path, error))
        return set(), False
    points = decode_recovery_points(data)
    if points.problem is not None:
        findings.append(Finding(path, 0, points.problem, is_damage=False))
    elif points.size_bytes < len(data):
        problem = "the last block is not intact; it counts as one whose write was interrupted"
        findings.append(Finding(path, points.size_bytes, problem, is_damage=False))
    return set(points.points), False


def check_log_files(
    fs: FileSystem, directory: str, names: Iterable[str], findings: list[Finding]
) -> LogState:
    """Check the small files of a log and add findings. Return the log's state. If its file is missing or
    damaged, return the state of a new log."""
    state: LogState | None = None
    for name in names:
        path = layout.join(directory, name)
        if name == layout.LEADER_EPOCHS_FILE:
            before = len(findings)
            try_decode(fs, path, decode_leader_epochs, findings, is_damage=False)
            findings[before:] = [_from_batches(one) for one in findings[before:]]
        elif name == layout.LOG_STATE_FILE:
            state = try_decode(fs, path, decode_log_state, findings)
        elif name == layout.COMPACTION_FILE:
            try_decode(fs, path, decode_compaction, findings, is_damage=False)
        elif name == layout.PARTITION_FILE:
            try_decode(fs, path, _check_identity, findings)
        elif layout.parse_producers_file_name(name) is not None:
            try_decode(fs, path, decode_producers, findings, is_damage=False)
    return state or LogState()


def _from_batches(finding: Finding) -> Finding:
    """Add to a finding that the file will be rebuilt from the batches, unless the finding is damage."""
    if finding.is_damage:
        return finding
    return finding._replace(problem=f"{finding.problem}; the file will be rebuilt from the batches")


def is_checked_log_file(name: str) -> bool:
    """Whether ``inspect.verify_log`` reads all of a file of this name."""
    own = {layout.LEADER_EPOCHS_FILE, layout.LOG_STATE_FILE, layout.COMPACTION_FILE}
    parsers = (layout.parse_segment_file_name, layout.parse_swap_file_name, layout.parse_producers_file_name)
    return name in own or any(parse(name) is not None for parse in parsers)


def _check_identity(data: bytes, path: str) -> None:
    found = decode_partition(data)
    if found is None:
        raise CorruptLogError(
            path=path, position=0, expected="the identity of a log", actual="something else"
        )
    here = layout.parse_log_directory_name(layout.name_of(layout.parent(path)))
    if here is not None and found[1:] != here:
        own = f"{found.topic_id}-{found.partition}"
        raise CorruptLogError(path=path, position=0, expected=f"the identity {here}", actual=f"that of {own}")


def _matching(pattern: re.Pattern[bytes], what: str) -> Callable[[bytes, str], None]:
    def check(data: bytes, path: str) -> None:
        if pattern.fullmatch(data) is None:
            raise CorruptLogError(path=path, position=0, expected=what, actual=repr(data[:40]))

    return check


def try_decode(
    fs: FileSystem,
    path: str,
    decode: Callable[[bytes, str], T],
    findings: list[Finding],
    *,
    is_damage: bool = True,
) -> T | None:
    """Return the decoded content of a file. If it cannot be read or decoded, add a finding and return None.

    The finding gets ``is_damage``, except that it is always damage if the operating system refuses the read.
    """
    data = _read(fs, path, findings, is_damage=is_damage)
    if data is None:
        return None
    try:
        return decode(data, path)
    except CorruptLogError as error:
        findings.append(Finding(path, error.position, error.message, is_damage))
    except StorageError as error:
        findings.append(Finding(path, 0, error.message, is_damage))
    except (ValueError, TypeError) as error:
        findings.append(Finding(path, 0, str(error), is_damage))
    return None


def _read(fs: FileSystem, path: str, findings: list[Finding], *, is_damage: bool) -> bytes | None:
    """Return the content of a file. If it cannot be read, add a finding and return None.

    If something other than a regular file is at ``path``, the finding gets ``is_damage``. Any other finding
    is damage.
    """
    try:
        return fs.read_bytes(path)
    except WrongFileTypeError as error:
        findings.append(Finding(path, 0, error.message, is_damage))
    except OSError as error:
        findings.append(_unreadable(path, error))
    return None


def _unreadable(path: str, error: OSError) -> Finding:
    problem = error.message if isinstance(error, StorageError) else f"it cannot be read: {error.strerror}"
    return Finding(path, 0, problem)
