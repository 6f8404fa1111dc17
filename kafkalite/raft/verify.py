"""Checks the files of a metadata directory without changing them, for ``kl log verify``."""

# Tests: tests/cli/test_log_verify.py

from __future__ import annotations

from functools import partial
from typing import Final

from kafkalite.errors import StorageError
from kafkalite.raft import legacy_journal
from kafkalite.raft.intact_metadata import check_alone, in_doubt, read_intact_metadata
from kafkalite.raft.journal import END_FILE, JOURNAL_FILE, RecordedEnd, check_journal, parse_end
from kafkalite.raft.snapshot_store import SNAPSHOT_FILE, parse_snapshot
from kafkalite.storage import layout
from kafkalite.storage.file_check import DirectoryVerdict, Finding, states_of, try_decode
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join
from kafkalite.storage.log_store import read_identity
from kafkalite.storage.recovery_points import read_points

_LEGACY_FILES: Final = (legacy_journal.LOG_FILE, legacy_journal.SNAPSHOT_FILE)
_KNOWN_FILES: Final = {JOURNAL_FILE, SNAPSHOT_FILE, END_FILE, *_LEGACY_FILES}


def verify_metadata(fs: FileSystem, directory: str) -> DirectoryVerdict:
    """Check the journal, its recorded end, the snapshot, and files of an older version.

    If they are intact and belong to a single node, also check whether the node would refuse to start with
    them, because they are incomplete or an older copy. Raises OSError if the directory cannot be listed.
    """
    names = fs.list_dir(directory)
    findings: list[Finding] = []
    recorded: RecordedEnd | None = None
    if END_FILE in names:
        recorded = try_decode(fs, join(directory, END_FILE), parse_end, findings, is_damage=False)
    known_offset = _known_offset(fs, directory)  # before the journal, to which a running broker may append
    path = join(directory, JOURNAL_FILE)
    if JOURNAL_FILE in names:
        end = try_decode(fs, path, partial(check_journal, recorded=recorded), findings)
        if end is not None and end < fs.file_size(path):
            problem = "the rest is not an intact frame; it counts as one whose write was interrupted"
            findings.append(Finding(path, end, problem, is_damage=False))
    elif not any(name in names for name in _LEGACY_FILES):
        findings.append(Finding(path, 0, "the file is missing"))
    if SNAPSHOT_FILE in names:
        try_decode(fs, join(directory, SNAPSHOT_FILE), parse_snapshot, findings)
    if legacy_journal.LOG_FILE in names:
        legacy = join(directory, legacy_journal.LOG_FILE)
        try_decode(fs, legacy, lambda _data, _path: legacy_journal.read(fs, directory), findings)
    if not any(one.is_damage for one in findings):
        findings += _lost(fs, directory, known_offset)
    return DirectoryVerdict(
        directory, findings, states_of(fs, directory, findings, _KNOWN_FILES.__contains__)
    )


def _known_offset(fs: FileSystem, directory: str) -> int:
    try:
        point = read_points(fs, layout.parent(directory)).get(layout.METADATA_DIRECTORY)
    except OSError:
        return 0
    return 0 if point is None else point.recovery_point


def _lost(fs: FileSystem, directory: str, known_offset: int) -> list[Finding]:
    """Return the reasons for which a single node would refuse to start with the metadata. Return an empty
    list if the data directory is not that of a single node."""
    data_directory = layout.parent(directory)
    try:
        identity = read_identity(fs, data_directory)
        if identity is None:
            return []
        state = read_intact_metadata(fs, directory, identity.node_id)
        check_alone(fs, data_directory, identity.node_id, state)
    except (StorageError, OSError):
        return []  # of a node of a cluster, or its identity is reported by another check
    found = [Finding(path, 0, problem) for path, problem in state.damage.items()]
    if state.is_older_than(known_offset):
        count = in_doubt(state.records_in_doubt(known_offset))
        problem = (
            f"the metadata ends at offset {state.last_index}, but this node had it up to {known_offset}: it"
            f" is an older copy, {count}; restore the newest, or run 'kl log accept-loss {directory}'"
        )
        found.append(Finding(join(directory, JOURNAL_FILE), 0, problem))
    return found
