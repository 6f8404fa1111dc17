"""The write-ahead journal of the metadata: entries, term and vote, and whether this node may vote.

A node on its own and a voter of several write the same file, so a node can start alone and become a voter::

    raft.log        first frame:  ["kafkalite-raft-log", 1, node, directory, is_voter, voters, term, vote]
                    then frames:  [change, …]                       everything that one sync made durable
    change          [1, index, term, command]      an entry; replaces the entry of its index and all after it
                    [2, term, vote]                 vote nil: none yet in this term
                    [3]                             all entries are gone: a snapshot replaces them
                    [4, is_voter, voters]
    voters          [[node, directory], …], the bootstrap voters: see ``eligibility``

The frames are those of ``raft.frames``. Compaction writes a new file and renames it.

pysyncobj uses the object as its own journal and calls it by the camel-case names. Two of them do something
else here, because the library's behavior is unsafe: ``add`` addresses an entry by its index and truncates
only where the logs conflict, so ``deleteEntriesFrom`` does nothing.

Blocking and not thread-safe: one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, overload

from kafkalite.errors import DataDirectoryError, DiskFullError, LogOfflineError, StorageError
from kafkalite.log_fields import Fields
from kafkalite.raft.eligibility import BootstrapVoters
from kafkalite.raft.entries import Entry
from kafkalite.raft.frames import check_version, corrupt, frame, read_frames
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join, parent

JOURNAL_FILE: Final = "raft.log"

_FORMAT: Final = "kafkalite-raft-log"
_VERSION: Final = 1
_ENTRY, _TERM_AND_VOTE, _RESET, _ELIGIBILITY = 1, 2, 3, 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a journal, and whether it may vote."""

    node_id: int
    directory: bytes  #: a random id, generated with the journal; a replaced disk has another id
    is_voter: bool
    bootstrap_voters: BootstrapVoters


class Journal:
    """A node's journal. Invariant: all state reported as durable is in the file; ``sync`` writes the rest."""

    def __init__(self, filesystem: FileSystem, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._path = join(directory, JOURNAL_FILE)
        self._log: list[Entry] = []
        self._unsynced: list[list[Any]] = []
        self._term = 0
        self._vote: int | None = None
        self._commit_index = 1
        self.size_bytes = 0
        self.identity: Identity

    @property
    def exists(self) -> bool:
        return self._filesystem.exists(self._path)

    # --- opening ---------------------------------------------------------------------------------------

    def create(self, identity: Identity, entries: Sequence[Entry], *, term: int, vote: int | None) -> None:
        """Write a new journal in a directory without one. Raises DiskFullError, LogOfflineError."""
        self._filesystem.make_dirs(self._directory)
        self._filesystem.sync_dir(parent(self._directory))
        self.identity = identity
        self._log = list(entries)
        self._term, self._vote = term, vote
        self._rewrite()

    def open(self, node_id: int) -> None:
        """Read the file, truncate a torn tail, and prepare to append.

        Raises CorruptLogError for damage, StorageError for another version, DataDirectoryError for the
        journal of another node.
        """
        data = self._filesystem.read_bytes(self._path)
        ((_, header), *frames), end = read_frames(data, self._path)
        self._read_header(header, node_id)
        for position, changes in frames:
            for change in changes:
                self._replay(change, position)
        self._file = self._filesystem.open(self._path)
        if end < len(data):
            self._file.truncate(end)
            self._file.sync()
            fields = Fields(path=self._path, position=end, cut_bytes=len(data) - end)
            _log.warning("truncated the torn tail of the metadata journal %s", fields)
        self.size_bytes = end

    def _read_header(self, header: list[Any], node_id: int) -> None:
        check_version(header, self._path, _FORMAT, _VERSION)
        match header[2:]:
            case [int(owner), bytes(directory), bool(is_voter), [*voters], int(term), int() | None as vote]:
                if owner != node_id:
                    raise DataDirectoryError(
                        f"{self._path} belongs to node {owner}, not to node {node_id}",
                        hint="set node.id back, or use that node's own data directory",
                    )
                self.identity = Identity(owner, directory, is_voter, _bootstrap_voters(voters))
                self._term, self._vote = term, vote
            case _:
                raise corrupt(self._path, 0, "a header of this format", str(header)[:80])

    def _replay(self, change: Any, position: int) -> None:
        match change:
            case [1, int(index), int(term), bytes(command)]:
                first = self._log[0][1] if self._log else index
                if not first <= index <= first + len(self._log):
                    raise corrupt(self._path, position, "an entry that follows the others", f"entry {index}")
                del self._log[index - first :]
                self._log.append((command, index, term))
            case [2, int(term), int() | None as vote]:
                self._term, self._vote = term, vote
            case [3]:
                self._log.clear()
            case [4, bool(is_voter), [*voters]]:
                self.identity = replace(
                    self.identity, is_voter=is_voter, bootstrap_voters=_bootstrap_voters(voters)
                )
            case _:
                raise corrupt(self._path, position, "a change of a known kind", str(change)[:80])

    def align(self, previous: Entry, last: Entry) -> None:
        """Make the log agree with a stored snapshot, which ends with these two entries.

        A log that contains both entries is kept completely: a crash between a snapshot and the
        compaction leaves a log that begins earlier, and a snapshot from the leader may end before
        entries that this node has acknowledged (R17). Any other log is replaced by the two entries.
        """
        log, index = self._log, last[1]
        if log and log[0][1] > index:
            raise corrupt(
                self._path, 0, f"a log that begins at {index} or before, as its snapshot ends", str(log[0][1])
            )
        if self.contains_end_of_snapshot(previous, last):
            self._commit_index = index
            return
        self.clear()
        self.add(*previous)
        self.add(*last)
        self._commit_index = index
        self.sync()

    def contains_end_of_snapshot(self, previous: Entry, last: Entry) -> bool:
        """Whether to keep the log beside a snapshot that ends with these two entries (R17)."""
        at = previous[1] - self._log[0][1] if self._log else -1
        return at >= 0 and [entry[1:] for entry in self._log[at : at + 2]] == [previous[1:], last[1:]]

    # --- writing ---------------------------------------------------------------------------------------

    def add(self, command: bytes, index: int, term: int) -> None:
        """Set entry ``index``. An existing entry of the same term stays, with all entries after it."""
        log = self._log
        at = index - log[0][1] if log else 0
        assert 0 <= at <= len(log), f"entry {index} does not follow the log's {len(log)} entries"
        if at < len(log):
            if log[at][2] == term:
                return
            assert index > self._commit_index, f"the leader would replace entry {index}, which is committed"
            del log[at:]
        log.append((command, index, term))
        self._unsynced.append([_ENTRY, index, term, command])

    def sync(self) -> None:
        """Make all changes durable.

        Raises DiskFullError, with the file unchanged, and LogOfflineError if the disk fails and the
        outcome is unknown: then the journal must not be used any more (R26).
        """
        if not self._unsynced:
            return
        framed = frame(self._unsynced)
        try:
            self._file.write_at(self.size_bytes, framed)
        except DiskFullError:
            self._undo_write()
            raise
        except (OSError, StorageError) as error:
            raise self._offline("written", error) from error
        try:
            self._file.sync()
        except (OSError, StorageError) as error:
            raise self._offline("synced", error) from error
        self._unsynced.clear()
        self.size_bytes += len(framed)

    def _undo_write(self) -> None:
        try:
            self._file.truncate(self.size_bytes)
        except (OSError, StorageError) as error:
            raise self._offline("truncated", error) from error

    def discard_unsynced(self, last_index: int) -> None:
        """Drop the entries after ``last_index``, none of which was ever synced."""
        del self._log[last_index + 1 - self.first_index :]
        self._unsynced.clear()

    def set_eligibility(self, *, is_voter: bool, bootstrap_voters: BootstrapVoters) -> None:
        """Store the eligibility. Durable on return. Raises the same errors as ``sync``."""
        self.identity = replace(self.identity, is_voter=is_voter, bootstrap_voters=bootstrap_voters)
        self._unsynced.append([_ELIGIBILITY, is_voter, list(bootstrap_voters.items())])
        self.sync()

    def compact(self, first_index: int) -> None:
        """Drop the entries before ``first_index``, which a durable snapshot covers.

        Raises DiskFullError, with the file unchanged, and LogOfflineError.
        """
        self.sync()
        del self._log[: max(0, first_index - self._log[0][1])]
        self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by the current entries, term and identity."""
        identity = self.identity
        header = [
            _FORMAT,
            _VERSION,
            identity.node_id,
            identity.directory,
            identity.is_voter,
            list(identity.bootstrap_voters.items()),
            self._term,
            self._vote,
        ]
        entries = [[_ENTRY, index, term, command] for command, index, term in self._log]
        data = frame(header) + (frame(entries) if entries else b"")
        try:
            self._filesystem.write_atomically(self._path, data)
            self._file = self._filesystem.open(self._path)
        except DiskFullError:
            raise
        except (OSError, StorageError) as error:
            raise self._offline("replaced", error) from error
        self.size_bytes = len(data)

    def _offline(self, verb: str, error: Exception) -> LogOfflineError:
        return LogOfflineError(
            f"the metadata journal {self._path} could not be {verb}: {error}",
            hint="check the disk, then start the node again",
        )

    def close(self) -> None:
        self._file.close()

    # --- methods that pysyncobj calls, by its names --------------------------------------------------------

    def clear(self) -> None:
        self._log.clear()
        self._unsynced.append([_RESET])

    def deleteEntriesFrom(self, start: int) -> None:  # noqa: N802
        """Do nothing: pysyncobj truncates at every overlap, ``add`` only where the logs conflict (R17)."""

    def deleteEntriesTo(self, count: int) -> None:  # noqa: N802
        raise AssertionError("RaftNode compacts the log, not pysyncobj")

    def setCurrentTerm(self, term: int, vote: int | None) -> None:  # noqa: N802
        """Store the term, durable on return, before any message carries it (R17). Raises as ``sync``."""
        if (term, vote) == (self._term, self._vote):
            return
        assert term >= self._term, f"term {self._term} would go back to {term}"
        self._term, self._vote = term, vote
        self._unsynced.append([_TERM_AND_VOTE, term, vote])
        self.sync()

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._term

    def getVotedForNodeId(self) -> int | None:  # noqa: N802
        return self._vote

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802
        """Set the commit index in memory. It starts as the snapshot's until the leader sends a newer one."""
        self._commit_index = max(self._commit_index, index)

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return self._commit_index

    def onOneSecondTimer(self) -> None:  # noqa: N802
        pass

    def _destroy(self) -> None:
        pass

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> list[Entry]: ...
    def __getitem__(self, at: int | slice) -> Entry | list[Entry]:
        return self._log[at]

    def __len__(self) -> int:
        return len(self._log)

    # --- reading ---------------------------------------------------------------------------------------

    @property
    def first_index(self) -> int:
        return self._log[0][1]

    @property
    def last_index(self) -> int:
        return self._log[-1][1]

    @property
    def last_term(self) -> int:
        return self._log[-1][2]

    def entry(self, index: int) -> Entry | None:
        """Return the entry at ``index``, or None if the log does not hold it."""
        at = index - self._log[0][1]
        return self._log[at] if 0 <= at < len(self._log) else None


def _bootstrap_voters(pairs: list[Any]) -> BootstrapVoters:
    return {int(node): bytes(directory) for node, directory in pairs}
