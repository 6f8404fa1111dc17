"""The write-ahead journal of the metadata log: entries, term and vote, and eligibility to vote.

A single node and a voter use the same format, so a single node can become one of several voters::

    raft.log        first frame:  ["kafkalite-raft-log", 1, node, directory, is_voter, voters, term, vote]
                    then frames:  [change, …]                       all changes of one sync
    change          [1, index, term, command]      an entry; replaces the entries from its index on
                    [2, term, vote]                 a nil vote: none yet in this term
                    [3]                             removes all entries; a snapshot replaces them
                    [4, is_voter, voters]
    voters          [[node, directory], …], the bootstrap voters; see ``eligibility``

``raft.frames`` defines the frames. Compaction writes a new file and renames it to ``raft.log``.

A second file has the position after the last synced frame, so that the later loss of a synced frame is not
mistaken for an interrupted write (R25)::

    raft.end        "KLRE" | u32 CRC-32C of the journal's header frame | u64 end | u32 CRC-32C of all before

``raft.end`` is written after each sync of the journal, but not synced. Before a new file replaces the
journal, ``raft.end`` is durably overwritten with zeros. A ``raft.end`` that is missing, has a bad checksum or
has only zeros is ignored.

pysyncobj uses a ``Journal`` as its log. Two methods differ from the library's own journal, whose behavior is
unsafe: ``add`` addresses an entry by its index and truncates only where the logs conflict. Therefore
``deleteEntriesFrom`` does nothing.

Blocking and not thread-safe: use it in one thread at a time.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, overload

import msgpack

from kafkalite.errors import (
    CorruptLogError,
    DataDirectoryError,
    DiskFullError,
    LogOfflineError,
    RemoteProtocolError,
    StorageError,
    StorageExhaustedError,
)
from kafkalite.log_fields import Fields
from kafkalite.raft.eligibility import BootstrapVoters
from kafkalite.raft.entries import VOTERS, Entry
from kafkalite.raft.frames import check_version, corrupt, frame, frames_after, read_frames, read_intact_frames
from kafkalite.raft.voter_set import VoterHistory, VoterSet, voters_in
from kafkalite.records.checksum import crc32c
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join, parent

JOURNAL_FILE: Final = "raft.log"
END_FILE: Final = "raft.end"

_FORMAT: Final = "kafkalite-raft-log"
_VERSION: Final = 1
_END: Final = struct.Struct(">4sIQ")
_CRC: Final = struct.Struct(">I")
_END_MAGIC: Final = b"KLRE"
_ENTRY, _TERM_AND_VOTE, _RESET, _ELIGIBILITY = 1, 2, 3, 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """The node and directory that own a journal, whether the node may vote, and the bootstrap voters."""

    node_id: int
    directory: bytes  #: a random id, generated with the journal, so that a replaced disk has another id
    is_voter: bool
    bootstrap_voters: BootstrapVoters


class RecordedEnd(NamedTuple):
    """The content of ``raft.end``: the journal's synced end (in bytes), and the CRC of its header frame."""

    header_crc: int
    position: int


def parse_end(data: bytes, path: str) -> RecordedEnd | None:
    """Return the content of ``raft.end``, or None if ``data`` is empty or all zeros. Raises CorruptLogError
    for any other ``data`` with a wrong length or checksum."""
    fixed = data[: _END.size]
    if len(data) == _END.size + _CRC.size and _CRC.pack(crc32c(fixed)) == data[_END.size :]:
        return RecordedEnd(*_END.unpack(fixed)[1:])
    if any(data):
        raise corrupt(path, 0, "the recorded end of the journal", "a bad checksum")
    return None


def check_end(path: str, header_crc: int, end: int, recorded: RecordedEnd | None) -> int:
    """Return the synced end of the journal at ``path``, whose frames end at ``end``; 0 if it is not known.

    ``header_crc`` is the CRC of the journal's header frame. Raises CorruptLogError if the journal lacks
    synced frames, or if ``recorded`` is the end of another journal.
    """
    if recorded is None:
        return 0
    if header_crc != recorded.header_crc:
        raise corrupt(path, 0, f"the journal that {END_FILE} describes", "another one")
    if end < recorded.position:
        raise corrupt(path, end, f"frames up to position {recorded.position}, which were synced", "the end")
    return recorded.position


def check_journal(data: bytes, path: str, recorded: RecordedEnd | None) -> int:
    """Return the end (in bytes) of the intact frames of a journal file. Bytes after that end are a torn tail.

    ``recorded`` is the content of ``raft.end``, or None. Raises CorruptLogError, StorageError.
    """
    ((_, header), *frames), end = read_frames(data, path)
    check_version(header, path, _FORMAT, _VERSION)
    check_end(path, crc32c(data[: frames[0][0] if frames else end]), end, recorded)
    return end


class Journal:
    """A node's write-ahead journal. Invariant: the file has all changes that were reported as durable."""

    def __init__(self, filesystem: FileSystem, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._path = join(directory, JOURNAL_FILE)
        self._log: list[Entry] = []
        #: The voter sets in the log, and the one of the snapshot that it continues.
        self.voters = VoterHistory()
        self._unsynced: list[list[Any]] = []
        self._term = 0
        self._vote: int | None = None
        self._commit_index = 1
        self._end_path = join(directory, END_FILE)
        self._header_crc = 0  #: the CRC of the header frame; with the end, it identifies a rewrite
        self.size_bytes = 0
        self._is_open = False
        self.identity: Identity

    @property
    def exists(self) -> bool:
        return self._filesystem.exists(self._path)

    def create(self, identity: Identity, entries: Sequence[Entry], *, term: int, vote: int | None) -> None:
        """Write a new journal, which replaces an existing one. Raises StorageExhaustedError,
        LogOfflineError."""
        self._filesystem.make_dirs(self._directory)
        self._filesystem.sync_dir(parent(self._directory))
        self.identity = identity
        self._log = list(entries)
        for command, index, _ in entries:
            self._note_voters(command, index)
        self._term, self._vote = term, vote
        self._rewrite()

    def open(self, node_id: int) -> None:
        """Read the file, truncate a torn tail, and prepare to append.

        Raises CorruptLogError if the file is damaged, or if ``raft.end`` shows that it lacks synced frames or
        is another journal. Raises StorageError for another version, and DataDirectoryError for the journal of
        another node.
        """
        data = self._filesystem.read_bytes(self._path)
        ((_, header), *frames), end = read_frames(data, self._path)
        self._header_crc = crc32c(data[: frames[0][0] if frames else end])
        self._read_header(header, node_id)
        synced = self._check_end(end)
        for position, changes in frames:
            for change in changes:
                self._replay(change, position)
        self._file = self._filesystem.open(self._path)
        self._is_open = True
        if end > synced:
            # The bytes after ``synced`` may be only in the system's page cache. If their sync has failed, the
            # system may count them as written, and another sync would do nothing. So write them again.
            self._file.write_at(synced, data[synced:end])
            self._file.sync()
        if end < len(data):
            self._file.truncate(end)
            self._file.sync()
            fields = Fields(path=self._path, position=end, cut_bytes=len(data) - end)
            _log.warning("truncated the torn tail of the metadata journal %s", fields)
        self.size_bytes = end
        self._note_end()

    def read_intact(self, node_id: int) -> tuple[CorruptLogError | None, int]:
        """Load the changes before the first damage, without changing the file. Return (the damage, or None;
        the highest index of an intact entry).

        Entries after the damage count for the highest index, which is 0 if no entry is intact. If the header
        is damaged, nothing is loaded. Raises DataDirectoryError for the journal of another node, StorageError
        for another version, OSError.
        """
        data = self._filesystem.read_bytes(self._path)
        damage: CorruptLogError | None = None
        newest = 0
        try:
            frames, end = read_intact_frames(data, self._path)
            if not frames:
                raise corrupt(self._path, 0, "an intact header", "none")
            (_, header), *frames = frames
            self._header_crc = crc32c(data[: frames[0][0] if frames else end])
            self._read_header(header, node_id)
            for position, changes in frames:
                for change in changes:
                    self._replay(change, position)
            newest = self._log[-1][1] if self._log else 0
            read_frames(data, self._path)
            self._check_end(end)
        except CorruptLogError as error:
            damage = error
            for _, payload in frames_after(data, 0):
                newest = max(newest, *_indexes(payload))
        return damage, newest

    def _check_end(self, end: int) -> int:
        """Return the position up to which the frames were synced; 0 if that is not known.

        Raises CorruptLogError if frames after position ``end`` were synced, or if ``raft.end`` belongs to
        another journal.
        """
        if not self._filesystem.exists(self._end_path):
            return 0
        try:
            recorded = parse_end(self._filesystem.read_bytes(self._end_path), self._end_path)
        except CorruptLogError as error:
            _log.warning("the recorded end of the metadata journal is unreadable %s", Fields(error=error))
            return 0
        return check_end(self._path, self._header_crc, end, recorded)

    def _note_end(self) -> None:
        """Write the journal's synced end to ``raft.end``. An error is only logged: the file is a hint."""
        fixed = _END.pack(_END_MAGIC, self._header_crc, self.size_bytes)
        try:
            file = self._filesystem.open(self._end_path, create=True)
            file.write_at(0, fixed + _CRC.pack(crc32c(fixed)))
            file.close()
        except (OSError, StorageError) as error:
            _log.warning("the end of the metadata journal is not recorded %s", Fields(error=error))

    def _forget_end(self) -> None:
        """Durably overwrite ``raft.end`` with zeros, before another file replaces the journal."""
        if self._filesystem.exists(self._end_path):
            file = self._filesystem.open(self._end_path, create=True)
            file.write_at(0, bytes(_END.size + _CRC.size))
            file.sync()
            file.close()

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
                self._truncate(index)
                self._log.append((command, index, term))
                try:
                    self._note_voters(command, index)
                except RemoteProtocolError as error:
                    raise corrupt(self._path, position, "a list of voters", error.message) from error
            case [2, int(term), int() | None as vote]:
                self._term, self._vote = term, vote
            case [3]:
                self._truncate(0)
            case [4, bool(is_voter), [*voters]]:
                self.identity = replace(
                    self.identity, is_voter=is_voter, bootstrap_voters=_bootstrap_voters(voters)
                )
            case _:
                raise corrupt(self._path, position, "a change of a known kind", str(change)[:80])

    def _truncate(self, index: int) -> None:
        """Drop the entries from ``index`` on, and the voter sets that they list (R93)."""
        if self._log:
            del self._log[max(0, index - self._log[0][1]) :]
        self.roll_back_voters(index)

    def roll_back_voters(self, index: int) -> None:
        self.voters.truncate(index)

    def _note_voters(self, command: bytes, index: int) -> None:
        if command[0] == VOTERS:
            self.voters.append(index, voters_in(command))

    def align(self, previous: Entry, last: Entry, voters: VoterSet | None = None) -> None:
        """Make the log agree with a stored snapshot, whose last two entries are ``previous`` and ``last``.

        ``voters`` is the voter set of the snapshot, or None if its voters are those of the first format.

        A log that contains both entries is kept completely, because this node may have acknowledged later
        entries (R17). Any other log is replaced by the two entries. Raises CorruptLogError if the log begins
        after ``last``. Raises the errors of ``sync``.
        """
        log, index = self._log, last[1]
        if log and log[0][1] > index:
            raise corrupt(
                self._path, 0, f"a log that begins at {index} or before, as its snapshot ends", str(log[0][1])
            )
        is_kept = self.contains_end_of_snapshot(previous, last)
        if not is_kept:
            self.clear()
            self.add(*previous)
            self.add(*last)
        if voters is not None:
            self.voters.rebase(voters)
        self._commit_index = index
        if not is_kept:
            self.sync()

    def contains_end_of_snapshot(self, previous: Entry, last: Entry) -> bool:
        """Whether the log contains the last two entries of a snapshot. If so, the log must be kept (R17)."""
        at = previous[1] - self._log[0][1] if self._log else -1
        return at >= 0 and [entry[1:] for entry in self._log[at : at + 2]] == [previous[1:], last[1:]]

    def add(self, command: bytes, index: int, term: int) -> None:
        """Set entry ``index``, which is durable only after ``sync``. If the log has an entry of the same term
        at this index, keep that entry and all later ones. If it has an entry of another term there, drop that
        entry and all later ones first."""
        log = self._log
        at = index - log[0][1] if log else 0
        assert 0 <= at <= len(log), f"entry {index} does not follow the log's {len(log)} entries"
        if at < len(log):
            if log[at][2] == term:
                return
            assert index > self._commit_index, f"the leader would replace entry {index}, which is committed"
            self._truncate(index)
        log.append((command, index, term))
        self._note_voters(command, index)
        self._unsynced.append([_ENTRY, index, term, command])

    def sync(self) -> None:
        """Make all changes durable.

        Raises StorageExhaustedError, which leaves the file unchanged. Raises LogOfflineError if the disk
        fails: the outcome is unknown, and the journal must not be used again (R26).
        """
        if not self._unsynced:
            return
        if not self._is_open:
            self._open_file()
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
        self._note_end()

    def _undo_write(self) -> None:
        try:
            self._file.truncate(self.size_bytes)
        except (OSError, StorageError) as error:
            raise self._offline("truncated", error) from error

    def discard_unsynced(self, last_index: int) -> None:
        """Drop all unsynced changes and the entries after ``last_index``. None of these entries may have been
        synced."""
        self._truncate(last_index + 1)
        self._unsynced.clear()

    def set_eligibility(self, *, is_voter: bool, bootstrap_voters: BootstrapVoters) -> None:
        """Store the eligibility. It is durable on return. Raises the same errors as ``sync``."""
        self.identity = replace(self.identity, is_voter=is_voter, bootstrap_voters=bootstrap_voters)
        self._unsynced.append([_ELIGIBILITY, is_voter, list(bootstrap_voters.items())])
        self.sync()

    def compact(self, first_index: int) -> None:
        """Drop the entries before ``first_index``. A durable snapshot must cover them.

        Raises StorageExhaustedError, which leaves the file usable, and LogOfflineError.
        """
        self.sync()
        del self._log[: max(0, first_index - self._log[0][1])]
        self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by one with the current entries, term, vote and identity."""
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
        framed = frame(header)
        data = framed + (frame(entries) if entries else b"")
        try:
            self._forget_end()
            self._filesystem.write_atomically(self._path, data)
        except StorageExhaustedError:
            raise
        except (OSError, StorageError) as error:
            raise self._offline("replaced", error) from error
        self.close()  # the old file no longer has a name
        self.size_bytes = len(data)
        self._header_crc = crc32c(framed)
        self._open_file()
        self._note_end()

    def _open_file(self) -> None:
        """Open the file to append to it. Raises StorageExhaustedError, after which the next ``sync`` opens
        the file (R55), and LogOfflineError."""
        try:
            self._file = self._filesystem.open(self._path)
        except StorageExhaustedError:
            raise
        except (OSError, StorageError) as error:
            raise self._offline("opened", error) from error
        self._is_open = True

    def _offline(self, verb: str, error: Exception) -> LogOfflineError:
        return LogOfflineError(
            f"the metadata journal {self._path} could not be {verb}: {error}",
            hint="check the disk, then start the node again",
        )

    def close(self) -> None:
        """Close the file, if the journal was opened or created."""
        if self._is_open:
            self._is_open = False
            self._file.close()

    def clear(self) -> None:
        self._truncate(0)
        self._unsynced.append([_RESET])

    def deleteEntriesFrom(self, start: int) -> None:  # noqa: N802
        """Do nothing. pysyncobj truncates at every overlap; ``add`` truncates only at a conflict (R17)."""

    def deleteEntriesTo(self, count: int) -> None:  # noqa: N802
        raise AssertionError("RaftNode compacts the log, not pysyncobj")

    def setCurrentTerm(self, term: int, vote: int | None) -> None:  # noqa: N802
        """Store term and vote durably, before any message has them (R17). Raises the errors of ``sync``."""
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
        """Raise the commit index to ``index``, in memory only; a lower index has no effect. When the metadata
        log is opened, the commit index is the last index of the snapshot, or 1 without a snapshot."""
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
        """Return the entry at ``index``, or None if the log does not contain it."""
        at = index - self._log[0][1]
        return self._log[at] if 0 <= at < len(self._log) else None


def _indexes(payload: bytes) -> list[int]:
    """Return the indexes of the entries in a frame, and 0."""
    try:
        changes = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException):
        return [0]
    if not isinstance(changes, list):
        return [0]
    entries = [one for one in changes if isinstance(one, list) and len(one) == 4 and one[0] == _ENTRY]
    return [0, *(int(one[1]) for one in entries)]


def _bootstrap_voters(pairs: list[Any]) -> BootstrapVoters:
    return {int(node): bytes(directory) for node, directory in pairs}
