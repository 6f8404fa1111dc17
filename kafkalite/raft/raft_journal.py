"""A voter's memory: its log, its term and vote, and whether it may vote; on disk before anybody hears of it.

::

    raft.log        first frame:  ["kafkalite-raft-log", 1, node, directory, is_voter, founders, term, vote]
                    then frames:  [change, …]                       everything that one sync made durable
    change          [1, index, term, command]      an entry; it replaces one with its index and what follows
                    [2, term, vote]                 vote nil: none yet in this term
                    [3]                             all entries are gone: a snapshot replaces them
                    [4, is_voter, founders]         founders [[node, directory], …]

Frames are those of ``raft.frames``; each is synced before the next is begun, so at most the last can be torn,
and nobody has been told of what it holds. Compaction writes a new file and renames it.

The object is at the same time the log that the Raft library works on: it has the methods of the library's
own journal, whose meaning differs where the library's is unsafe. ``add`` is addressed by index and cuts
only what contradicts; ``deleteEntriesFrom`` does nothing, because of that.

Blocking and not thread-safe: it lives on the Raft loop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Final, overload

import msgpack

from kafkalite import mutants
from kafkalite.errors import CorruptLogError, DataDirectoryError, LogOfflineError, StorageError
from kafkalite.log_fields import Fields
from kafkalite.raft.frames import HEADER_BYTES, frame, next_whole_frame, payload_at
from kafkalite.raft.raft_messages import NO_OP, Entry
from kafkalite.raft.standing import Founders
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join, parent

RAFT_LOG_FILE: Final = "raft.log"

_FORMAT: Final = "kafkalite-raft-log"
_VERSION: Final = 1
_ENTRY, _HARD, _RESET, _STANDING = 1, 2, 3, 4
_REPAIR_HINT: Final = "restore the file, or give the node an empty metadata directory and --rejoin"

#: What every log begins with, before any leader has written to it.
FIRST_ENTRY: Final[Entry] = (bytes((NO_OP,)), 1, 0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a journal says of its node, besides the log."""

    node_id: int
    directory: bytes  #: made up with the journal; another disk has another
    is_voter: bool
    founders: Founders


class RaftJournal:
    """Invariant: what has been handed out as durable is in the file; ``sync`` makes the rest so."""

    def __init__(self, filesystem: FileSystem, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._path = join(directory, RAFT_LOG_FILE)
        self._log: list[Entry] = []
        self._unsynced: list[list[Any]] = []
        self._term = 0
        self._vote: int | None = None
        self._commit_index = 1
        self.size_bytes = 0
        self.sync_count = 0
        self.identity: Identity

    @property
    def exists(self) -> bool:
        return self._filesystem.exists(self._path)

    # --- opening ---------------------------------------------------------------------------------------

    def create(self, node_id: int, directory_id: bytes) -> None:
        """A new journal, for a directory that has none."""
        self._filesystem.make_dirs(self._directory)
        self._filesystem.sync_dir(parent(self._directory))
        self.identity = Identity(node_id, directory_id, is_voter=False, founders={})
        self._log = [FIRST_ENTRY]
        self._rewrite()

    def open(self, node_id: int) -> None:
        """Read the file, cut a torn tail, be ready to append.

        Raises CorruptLogError for damage, StorageError for another version, DataDirectoryError for the
        journal of another node.
        """
        data = self._filesystem.read_bytes(self._path)
        payload = payload_at(data, 0)
        if payload is None:
            raise self._damaged(0, "a whole header", "none")
        self._read_header(payload, node_id)
        position = HEADER_BYTES + len(payload)
        self._file = self._filesystem.open(self._path)
        while position < len(data):
            payload = payload_at(data, position)
            if payload is None:
                self._cut_tail(data, position)
                break
            for change in self._unpack(payload, position):
                self._replay(change, position)
            position += HEADER_BYTES + len(payload)
        self.size_bytes = position

    def _read_header(self, payload: bytes, node_id: int) -> None:
        match self._unpack(payload, 0):
            case [format_name, int(version), *_] if format_name == _FORMAT and version != _VERSION:
                raise StorageError(
                    f"{self._path} has format version {version}, and this program reads version {_VERSION}",
                    hint="a newer kafkalite wrote it; start that version again",
                )
            case [
                format_name,
                _,
                int(owner),
                bytes(directory),
                bool(is_voter),
                [*founders],
                int(term),
                vote,
            ] if format_name == _FORMAT:
                if owner != node_id:
                    raise DataDirectoryError(
                        f"{self._path} belongs to node {owner}, not to node {node_id}",
                        hint="set node.id back, or use that node's own data directory",
                    )
                self.identity = Identity(owner, directory, is_voter, _founders(founders))
                self._term, self._vote = term, vote
            case _:
                raise self._damaged(0, "a header of this format", "something else with a good checksum")

    def _replay(self, change: Any, position: int) -> None:
        match change:
            case [1, int(index), int(term), bytes(command)]:
                first = self._log[0][1] if self._log else index
                if not first <= index <= first + len(self._log):
                    raise self._damaged(position, "an entry that follows the others", f"entry {index}")
                del self._log[index - first :]
                self._log.append((command, index, term))
            case [2, int(term), int() | None as vote]:
                self._term, self._vote = term, vote
            case [3]:
                self._log.clear()
            case [4, bool(is_voter), [*founders]]:
                self.identity = replace(self.identity, is_voter=is_voter, founders=_founders(founders))
            case _:
                raise self._damaged(position, "a change of a known kind", str(change)[:80])

    def _unpack(self, payload: bytes, position: int) -> Any:
        try:
            value = msgpack.unpackb(payload)
        except (ValueError, msgpack.UnpackException) as error:
            raise self._damaged(position, "msgpack", str(error)) from error
        if not isinstance(value, list):
            raise self._damaged(position, "an array", type(value).__name__)
        return value

    def _cut_tail(self, data: bytes, position: int) -> None:
        """Cut off what a crash left half-written. Raises CorruptLogError if it was written whole once."""
        later = next_whole_frame(data, position + 1)
        if later is not None:
            raise self._damaged(
                position, f"a whole frame, since the one at {later} was written after it", "a bad checksum"
            )
        self._file.truncate(position)
        self._file.sync()
        _log.warning(
            "torn tail of the Raft log cut %s",
            Fields(path=self._path, position=position, cut_bytes=len(data) - position),
        )

    def _damaged(self, position: int, expected: str, actual: str) -> CorruptLogError:
        return CorruptLogError(
            path=self._path, position=position, expected=expected, actual=actual, hint=_REPAIR_HINT
        )

    def align(self, previous: Entry, last: Entry) -> None:
        """Let the log agree with a stored snapshot. A log that does keeps all it has.

        A crash between a snapshot and its compaction leaves a longer log, and a snapshot from the leader
        may end before what this node has acknowledged: neither must be lost (R17).
        """
        log = self._log
        index = last[1]
        if "RAFT-tail-dropped" in mutants.ACTIVE and log[:2] != [previous, last]:
            self.clear()
        if log and log[0][1] > index:
            raise self._damaged(
                0, f"a log that begins at {index} or before, as its snapshot ends", str(log[0][1])
            )
        if log and log[0][1] < index <= log[-1][1]:
            at = index - log[0][1]
            if log[at - 1][1:] == previous[1:] and log[at][1:] == last[1:]:
                self._commit_index = index
                return
        self.clear()
        self.add(*previous)
        self.add(*last)
        self._commit_index = index
        self.sync()

    # --- writing ---------------------------------------------------------------------------------------

    def add(self, command: bytes, index: int, term: int) -> None:
        """Make entry ``index`` this one. What is there already and agrees stays, with all that follows it."""
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
        """Make all of it durable. Raises LogOfflineError: nothing may be said any more after that (R26)."""
        if not self._unsynced:
            return
        framed = frame(self._unsynced)
        try:
            self._file.write_at(self.size_bytes, framed)
            self._file.sync()
        except (OSError, StorageError) as error:
            raise self._offline(error) from error
        self._unsynced.clear()
        self.size_bytes += len(framed)
        self.sync_count += 1

    def set_standing(self, *, is_voter: bool, founders: Founders) -> None:
        """Durable on return."""
        self.identity = replace(self.identity, is_voter=is_voter, founders=founders)
        self._unsynced.append([_STANDING, is_voter, list(founders.items())])
        self.sync()

    def compact(self, first_index: int) -> None:
        """Forget what lies before ``first_index``. A durable snapshot covers it."""
        self.sync()
        del self._log[: max(0, first_index - self._log[0][1])]
        self._rewrite()

    def _rewrite(self) -> None:
        """The whole file anew, without what has been replaced since."""
        identity = self.identity
        header = frame(
            [
                _FORMAT,
                _VERSION,
                identity.node_id,
                identity.directory,
                identity.is_voter,
                list(identity.founders.items()),
                self._term,
                self._vote,
            ]
        )
        entries = [[_ENTRY, index, term, command] for command, index, term in self._log]
        data = header + (frame(entries) if entries else b"")
        try:
            self._filesystem.write_atomically(self._path, data)
            self._file = self._filesystem.open(self._path)
        except (OSError, StorageError) as error:
            raise self._offline(error) from error
        self.size_bytes = len(data)

    def _offline(self, error: Exception) -> LogOfflineError:
        return LogOfflineError(
            f"the Raft log {self._path} could not be written: {error}",
            hint="see to the disk, then start the node again",
        )

    def close(self) -> None:
        self._file.close()

    # --- what the library calls (its names) --------------------------------------------------------------

    def clear(self) -> None:
        self._log.clear()
        self._unsynced.append([_RESET])

    def deleteEntriesFrom(self, start: int) -> None:  # noqa: N802
        """Nothing: the library cuts on every overlap, ``add`` only where the logs contradict (R17)."""
        if "RAFT-truncate-overlap" in mutants.ACTIVE:
            kept = self._log[:start]
            self.clear()
            for entry in kept:
                self.add(*entry)

    def deleteEntriesTo(self, count: int) -> None:  # noqa: N802
        raise AssertionError("compaction is ours")

    def setCurrentTerm(self, term: int, vote: int | None) -> None:  # noqa: N802
        """Durable on return: before any message that tells of it (R17)."""
        if (term, vote) == (self._term, self._vote):
            return
        assert term >= self._term, f"term {self._term} would go back to {term}"
        self._term, self._vote = term, vote
        if "RAFT-vote-forgotten" in mutants.ACTIVE:
            return
        self._unsynced.append([_HARD, term, vote])
        self.sync()

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._term

    def getVotedForNodeId(self) -> int | None:  # noqa: N802
        return self._vote

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802
        """Not stored: after a start it is the snapshot's until the leader tells a newer one."""
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
        """The entry at ``index``, None when the log does not hold it."""
        at = index - self._log[0][1]
        return self._log[at] if 0 <= at < len(self._log) else None


def _founders(pairs: list[Any]) -> Founders:
    return {int(node): bytes(directory) for node, directory in pairs}
