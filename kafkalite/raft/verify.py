"""Checks the files of a metadata directory without changing them, for ``kl log verify``."""

# Tests: tests/cli/test_log_verify.py

from __future__ import annotations

from functools import partial
from typing import Final

from kafkalite.raft import legacy_journal
from kafkalite.raft.journal import END_FILE, JOURNAL_FILE, RecordedEnd, check_journal, parse_end
from kafkalite.raft.snapshot_store import SNAPSHOT_FILE, parse_snapshot
from kafkalite.storage.file_check import DirectoryVerdict, Finding, states_of, try_decode
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join

_LEGACY_FILES: Final = (legacy_journal.LOG_FILE, legacy_journal.SNAPSHOT_FILE)
_KNOWN_FILES: Final = {JOURNAL_FILE, SNAPSHOT_FILE, END_FILE, *_LEGACY_FILES}


def verify_metadata(fs: FileSystem, directory: str) -> DirectoryVerdict:
    """Check the journal, its recorded end and the snapshot. Raises OSError if the directory cannot be
    listed."""
    names = fs.list_dir(directory)
    findings: list[Finding] = []
    recorded: RecordedEnd | None = None
    if END_FILE in names:
        recorded = try_decode(fs, join(directory, END_FILE), parse_end, findings, is_damage=False)
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
    return DirectoryVerdict(
        directory, findings, states_of(fs, directory, findings, _KNOWN_FILES.__contains__)
    )
