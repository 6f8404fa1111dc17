"""The metadata log of one directory: a journal, and the snapshot that it continues.

A single node (``SingleQuorum``) and a voter (``RaftNode``) use the same files. The bootstrap voters in the
journal determine which of them may use the directory, and how::

    bootstrap voters        single node             one of several voters
    none: never voted       refused                 abstains, see ``eligibility``
    this node alone         continues               abstains until the other voters have its log
    several nodes           refused                 continues if they are the configured voters

Blocking and not thread-safe: use it in one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.log_fields import Fields
from kafkalite.raft import legacy_journal
from kafkalite.raft.entries import FIRST_ENTRY, NO_OP, Entry
from kafkalite.raft.frames import REPAIR_HINT
from kafkalite.raft.intact_metadata import in_doubt, read_intact_metadata
from kafkalite.raft.journal import JOURNAL_FILE, Identity, Journal
from kafkalite.raft.snapshot_store import SNAPSHOT_FILE, Snapshot, SnapshotStore
from kafkalite.raft.voter_set import VoterSet
from kafkalite.storage.filesystem import FileSystem

DIRECTORY_ID_BYTES: Final = 16

FIRST_TERM: Final = 1  # the term of a single node, which always leads

_log = logging.getLogger(__name__)


class MetadataLog:
    """The journal and the snapshot store of one directory. Invariant after ``open``: if there is a snapshot,
    the journal contains its last two entries."""

    def __init__(
        self,
        filesystem: FileSystem,
        directory: str,
        *,
        node_id: int,
        voters: Iterable[int] | None = None,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """``voters``: those of the first format; none if the node joins a quorum as an observer. If
        ``voters`` is None, the node is a single-node cluster."""
        self.journal = Journal(filesystem, directory)
        self.snapshots = snapshots or SnapshotStore(filesystem, directory)
        self.is_created = False  #: whether ``open`` has created the journal
        self._filesystem = filesystem
        self._directory = directory
        self._node_id = node_id
        self._voters = None if voters is None else sorted(voters)
        self._is_alone = self._voters is None or self._voters == [node_id]

    def open(
        self, new_directory_id: bytes, *, allow_new: bool = True, known_offset: int | None = None
    ) -> None:
        """Read the files and truncate a torn tail; create or convert the files if necessary.

        If ``allow_new`` is False, a directory without a journal is refused, unless it has the files of an
        older version. ``known_offset``, if given, is the offset that this node's metadata had reached before:
        a log that ends below it is an older copy, and is refused (R25). If this node is the only voter and
        its metadata is damaged, missing or older, the hint of the error has the number of records in doubt
        and the command that accepts their loss (R45).

        Raises CorruptLogError, StorageError, DataDirectoryError, StorageExhaustedError, LogOfflineError.
        """
        try:
            self._open(new_directory_id, known_offset, allow_new=allow_new)
        except CorruptLogError as error:
            if self._is_alone:
                error.hint = self._way_out(known_offset)
            raise
        last, path = self.journal.last_index, self._directory
        if known_offset is not None and last < known_offset:
            raise DataDirectoryError(
                f"the metadata in {path} ends at offset {last}, but this node had it up to {known_offset}: it"
                f" is an older copy, {in_doubt(known_offset - last)}",
                hint=self._way_out(known_offset),
            )

    def _way_out(self, known_offset: int | None) -> str:
        state = read_intact_metadata(self._filesystem, self._directory, self._node_id)
        count = in_doubt(state.records_in_doubt(known_offset or 0))
        path = self._directory
        return (
            f"{count}: restore the newest copy of {path}, or accept the loss with 'kl log accept-loss"
            f" {path}': the intact metadata is kept, and the topics that it lacks are made from their logs"
        )

    def _open(self, new_directory_id: bytes, known_offset: int | None, *, allow_new: bool) -> None:
        journal, snapshots = self.journal, self.snapshots
        if journal.exists:
            journal.open(self._node_id)
            legacy_journal.remove(self._filesystem, self._directory)  # a conversion was interrupted
        elif legacy_journal.exists(self._filesystem, self._directory):
            self._convert(new_directory_id)
        else:
            self._create(new_directory_id, known_offset, allow_new=allow_new)
            self.is_created = True
        self._check_bootstrap_voters()
        snapshots.open()
        if snapshots.current is not None:
            snapshot = snapshots.current
            journal.align(snapshot.previous, snapshot.last, snapshot.voters)
        elif journal.first_index != FIRST_ENTRY[1]:
            raise DataDirectoryError(
                f"{self._directory} has a {JOURNAL_FILE} from {journal.first_index} on, and no snapshot",
                hint=self._way_out(known_offset) if self._is_alone else REPAIR_HINT,
            )
        self._check_alone()

    def _check_alone(self) -> None:
        """Raise DataDirectoryError if a node without configured voters would use the log of a quorum that has
        grown to several voters: it would commit without them (R93)."""
        latest = self.journal.voters.latest
        if self._voters is None and latest is not None and latest.voters.keys() != {self._node_id}:
            raise DataDirectoryError(
                f"{self._directory} holds the metadata of a cluster whose voters are {sorted(latest.voters)}",
                hint="set controller.quorum.voters as it was, or controller.quorum.bootstrap.servers",
            )

    def _create(self, directory_id: bytes, known_offset: int | None, *, allow_new: bool) -> None:
        if self.snapshots.exists or not allow_new:
            found = (
                f"{SNAPSHOT_FILE} without {JOURNAL_FILE}" if self.snapshots.exists else f"no {JOURNAL_FILE}"
            )
            if self._is_alone:  # a single node must not start over its logs (R25)
                raise DataDirectoryError(
                    f"{self._directory} has {found}, but the data directory has logs of an earlier session",
                    hint=self._way_out(known_offset),
                )
            raise DataDirectoryError(
                f"{self._directory} has {found}, though this node has voted before",
                hint="restore the directory; if its disk is lost, start the node with --rejoin: it then"
                " copies the log of the other voters, and votes again once it has all of it",
            )
        if self._voters is None:
            self._create_alone(directory_id, [FIRST_ENTRY])
        else:
            identity = Identity(self._node_id, directory_id, is_voter=False, bootstrap_voters={})
            self.journal.create(identity, [FIRST_ENTRY], term=0, vote=None)

    def _create_alone(self, directory_id: bytes, entries: list[Entry]) -> None:
        own = {self._node_id: directory_id}
        identity = Identity(self._node_id, directory_id, is_voter=True, bootstrap_voters=own)
        self.journal.create(identity, entries, term=FIRST_TERM, vote=self._node_id)

    def _convert(self, directory_id: bytes) -> None:
        """Store the state of a legacy journal as a snapshot with the same offset, and create the journal.

        The legacy files are removed last. If a crash interrupts the conversion, the next start completes it.
        """
        offset, records = legacy_journal.read(self._filesystem, self._directory)
        entries: list[Entry] = [FIRST_ENTRY]
        if offset > 0:
            entries = [(bytes((NO_OP,)), index, FIRST_TERM) for index in (offset, offset + 1)]
            self.snapshots.store(Snapshot(entries[0], entries[1], offset, records))
        self._create_alone(directory_id, entries)
        legacy_journal.remove(self._filesystem, self._directory)
        fields = Fields(path=self._directory, offset=offset)
        _log.info("converted the metadata log of an older version %s", fields)

    def _check_bootstrap_voters(self) -> None:
        """Raise DataDirectoryError if the configured voters may not use this directory: majorities of two
        different voter sets need not overlap."""
        known = sorted(self.journal.identity.bootstrap_voters)
        if self._voters is None and known != [self._node_id]:
            raise DataDirectoryError(
                f"{self._directory} holds the metadata of a node of a cluster, with the voters {known}",
                hint="set controller.quorum.voters as it was, or use another data directory",
            )
        if self._voters and known not in ([], [self._node_id], self._voters):
            raise DataDirectoryError(
                f"the voters of this cluster are the nodes {known}, and not {self._voters}",
                hint="set controller.quorum.voters back; the voters are fixed when a cluster is bootstrapped",
            )

    def store_snapshot(self, snapshot: Snapshot, first_index: int) -> None:
        """Store a snapshot with the voters in force after it, then drop the entries before ``first_index``.

        Raises StorageExhaustedError, which leaves the files usable, and LogOfflineError.
        """
        voters = self.voters_of_snapshot(snapshot.last_index)
        self.snapshots.store(snapshot._replace(voters=voters))
        if voters is not None:
            self.journal.voters.rebase(voters)
        self.journal.compact(first_index)

    def voters_of_snapshot(self, index: int) -> VoterSet | None:
        """Return the voter set to keep in a snapshot of the entries up to ``index`` (R93)."""
        return self.journal.voters.at(index)
