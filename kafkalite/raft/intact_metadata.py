"""Reads the intact part of a single node's metadata, and counts the records in doubt (R25, R45).

Records in doubt are those that the node had stored, and that the intact part lacks. Used to describe a
refusal at a start, by ``kl log verify`` and by ``kl log accept-loss``. Nothing is changed. Blocking.
"""

# Tests: tests/raft/test_older_metadata.py, tests/cli/test_log.py

from __future__ import annotations

from dataclasses import dataclass, field

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.raft import legacy_journal
from kafkalite.raft.entries import FIRST_ENTRY, NO_OP, Entry
from kafkalite.raft.frames import REPAIR_HINT
from kafkalite.raft.journal import JOURNAL_FILE, Identity, Journal
from kafkalite.raft.snapshot_store import SNAPSHOT_FILE, Snapshot, SnapshotStore
from kafkalite.storage import layout
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join


@dataclass(slots=True)
class IntactMetadata:
    """The entries before the first damage, and the snapshot that they continue.

    ``entries`` is never empty. If there is no snapshot, it begins at index 1. There is one exception: for
    files of an older version, it is a single entry with the last index that the converted log will have.
    ``damage``: the problem of each damaged or missing file, by path. ``newest_index``: the highest index of
    an intact entry of the journal, also after the damage.
    """

    identity: Identity | None = None
    term: int = 0
    vote: int | None = None
    snapshot: Snapshot | None = None
    entries: list[Entry] = field(default_factory=lambda: [FIRST_ENTRY])
    newest_index: int = 0
    damage: dict[str, str] = field(default_factory=dict)
    voters: frozenset[int] | None = None  #: after the last change of the voters; None without a change (R93)

    @property
    def last_index(self) -> int:
        return self.entries[-1][1]

    def is_older_than(self, known_offset: int) -> bool:
        """Whether ``entries`` ends before ``known_offset``, which the node's metadata had reached."""
        return self.last_index < known_offset

    def records_in_doubt(self, known_offset: int) -> int | None:
        """Return how many entries the node is known to have had after ``entries``, given that its metadata
        had reached ``known_offset``. Return None if there is damage, but no such entry is known."""
        missing = max(known_offset, self.newest_index) - self.last_index
        if missing > 0:
            return missing
        return None if self.damage else 0


def in_doubt(count: int | None) -> str:
    """Return the text for a result of ``records_in_doubt``."""
    if count is None:
        return "an unknown number of records in doubt"
    return f"at least {count} record{'' if count == 1 else 's'} in doubt"


def read_intact_metadata(fs: FileSystem, directory: str, node_id: int) -> IntactMetadata:
    """Return the intact part of the metadata in ``directory``.

    Raises DataDirectoryError if another node wrote it, StorageError for another version, OSError.
    """
    state = IntactMetadata()
    journal, snapshots = Journal(fs, directory), SnapshotStore(fs, directory)
    journal_path, snapshot_path = join(directory, JOURNAL_FILE), join(directory, SNAPSHOT_FILE)
    log: list[Entry] = []
    if not fs.exists(directory):
        state.damage[directory] = "the directory is missing"
    elif journal.exists:
        try:
            damage, state.newest_index = journal.read_intact(node_id)
        except CorruptLogError as error:  # no regular file
            damage = error
        if damage is not None:
            state.damage[journal_path] = damage.message
        state.identity = getattr(journal, "identity", None)
        state.term, state.vote = journal.getCurrentTerm(), journal.getVotedForNodeId()
        log = journal[:]
    elif legacy_journal.exists(fs, directory):
        try:
            offset, _ = legacy_journal.read(fs, directory)
            return IntactMetadata(entries=[(bytes((NO_OP,)), offset + 1, 1)])  # as it will be converted
        except CorruptLogError as error:
            state.damage[error.path] = error.message
    else:
        state.damage[journal_path] = "the file is missing"
    try:
        snapshots.open()
    except CorruptLogError as error:
        state.damage[snapshot_path] = error.message
    state.snapshot = snapshots.current
    if state.snapshot is not None:
        previous, last = state.snapshot.previous, state.snapshot.last
        is_behind = bool(log) and log[0][1] > last[1]
        if is_behind:
            state.damage[journal_path] = (
                f"{journal_path} begins at {log[0][1]}, its snapshot ends at {last[1]}"
            )
        if is_behind or not log or not journal.contains_end_of_snapshot(previous, last):
            log = [previous, last]
        if state.snapshot.voters is not None:
            journal.voters.rebase(state.snapshot.voters)
    elif log and log[0][1] != FIRST_ENTRY[1]:
        state.damage.setdefault(snapshot_path, f"the file is missing, and {JOURNAL_FILE} continues it")
        state.damage.setdefault(journal_path, f"it begins at {log[0][1]}, after a snapshot that is lost")
        log = []
    state.entries = log or state.entries
    if journal.voters.latest is not None:
        state.voters = frozenset(journal.voters.latest.voters)
    return state


def check_alone(fs: FileSystem, data_directory: str, node_id: int, state: IntactMetadata) -> None:
    """Raise DataDirectoryError if ``data_directory`` is that of a node of a cluster. Such a node can copy the
    metadata from other nodes."""
    path = join(data_directory, layout.VOTERS_FILE)
    identity = state.identity
    voters: set[str] = set()
    if state.voters is not None:
        voters = {str(one) for one in state.voters}
    elif fs.exists(path):
        voters = set(fs.read_bytes(path).decode(errors="replace").strip().split(","))
    elif identity is not None and identity.bootstrap_voters:
        voters = {str(one) for one in identity.bootstrap_voters}
    elif fs.exists(join(data_directory, layout.START_COUNT_FILE)):
        voters = {"others"}
    if voters - {str(node_id)}:
        raise DataDirectoryError(
            f"{data_directory} is not the directory of a single node, and other nodes have its metadata",
            hint=REPAIR_HINT,
        )
