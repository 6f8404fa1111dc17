"""A quorum of one node, stored in a journal or only in memory.

The node writes a voter's journal without the Raft library, so that it can later become one of several voters.
Commits that arrive during a sync share the next sync. One task writes while entries are pending. Blocking
calls run in an executor, or on the loop if ``is_inline``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kafkalite.errors import LogOfflineError, StorageExhaustedError
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.entries import FIRST_ENTRY, REGULAR, change_after, effective_records
from kafkalite.raft.metadata_log import DIRECTORY_ID_BYTES, MetadataLog
from kafkalite.raft.quorum import Quorum, StaleImageError
from kafkalite.raft.snapshot_store import Snapshot
from kafkalite.rng import Rng, system_rng
from kafkalite.storage.filesystem import FileSystem

SNAPSHOT_MIN_BYTES: Final = MIB

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """The contents of a log: a snapshot, and the later entries that took effect. Without a snapshot,
    ``snapshot_offset`` is 0 and ``snapshot_records`` is empty."""

    snapshot_offset: int
    snapshot_records: list[MetadataRecord]
    entries: list[tuple[int, list[MetadataRecord]]]  #: (offset, records)


class SingleNodeLog:
    """The metadata log of a single node. An entry is committed when it is synced. Blocking.

    Invariant: whenever a call returns, all entries of ``journal`` are synced.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        directory: str,
        node_id: int,
        directory_id: bytes,
        *,
        known_offset: int | None = None,
    ) -> None:
        """``known_offset``: the metadata offset that an earlier run of this node has recorded; None if none
        is recorded."""
        self._known_offset = known_offset
        self._directory = directory
        self._files = MetadataLog(filesystem, directory, node_id=node_id)
        self.journal, self.snapshots = self._files.journal, self._files.snapshots
        self._directory_id = directory_id
        self._offset = 0  # the offset of the last entry that took effect

    def open(self) -> Recovered:
        """Read the files. If they are missing and ``known_offset`` is None, create them. Raises the errors of
        ``MetadataLog.open``.

        These include DataDirectoryError if ``known_offset`` is given, and the log is missing or ends before
        it (R25).
        """
        known_offset = self._known_offset
        self._files.open(self._directory_id, allow_new=known_offset is None, known_offset=known_offset)
        snapshot = self.snapshots.current
        entries = []
        records: list[MetadataRecord] = []
        snapshot_index = 0
        if snapshot is not None:
            records = record_codec.from_bytes(snapshot.records)
            snapshot_index, self._offset = snapshot.last_index, snapshot.offset
        snapshot_offset = self._offset
        for command, index, _ in self.journal[:]:
            if index > snapshot_index and command[0] == REGULAR:
                encoded = effective_records(command[1:], self._offset)
                if encoded is not None:
                    entries.append((index, record_codec.from_bytes(encoded)))
                    self._offset = index
        return Recovered(snapshot_offset, records, entries)

    def append(self, entries: Iterable[tuple[int, Sequence[MetadataRecord]]]) -> None:
        """Write and sync entries (offset, records) with consecutive offsets. They are durable on return.

        Raises StorageExhaustedError, with nothing written, and LogOfflineError, as ``Journal.sync`` does.
        """
        journal, last_index, offset = self.journal, self.journal.last_index, self._offset
        term = max(journal.getCurrentTerm(), journal.last_term)
        for index, records in entries:
            command = bytes((REGULAR,)) + change_after(offset, record_codec.to_bytes(records))
            journal.add(command, index, term)
            offset = index
        try:
            journal.sync()
        except StorageExhaustedError:
            journal.discard_unsynced(last_index)
            raise
        self._offset = offset

    def write_snapshot(self, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Store the state at ``offset``, which must be the offset of the last entry. Then drop all entries
        but the last two.

        Raises StorageExhaustedError, which leaves the log usable, and LogOfflineError.
        """
        journal = self.journal
        last = journal.entry(offset)
        previous = journal.entry(offset - 1)
        assert last is not None and previous is not None, f"a snapshot at {offset} of {journal.last_index}"
        assert offset == journal.last_index, f"a snapshot at {offset} of a log at {journal.last_index}"
        snapshot = Snapshot(previous, last, offset, record_codec.to_bytes(records))
        self._files.store_snapshot(snapshot, offset - 1)

    def close(self) -> None:
        self.journal.close()


class _Pending(NamedTuple):
    offset: int
    records: Sequence[MetadataRecord]
    done: asyncio.Future[int]


class SingleQuorum(Quorum):
    """The quorum of a single node. Invariant: the appended entries after ``offset`` wait for a sync.

    A snapshot is written, and the journal compacted, when the journal has at least ``snapshot_min_bytes`` and
    at least the size of the last snapshot.
    """

    is_single_node = True

    def __init__(
        self,
        filesystem: FileSystem | None = None,
        directory: str | None = None,
        *,
        node_id: int = 1,
        executor: Executor | None = None,
        is_inline: bool = False,
        snapshot_min_bytes: int = SNAPSHOT_MIN_BYTES,
        known_offset: int | None = None,
        rng: Rng | None = None,
    ) -> None:
        """Without a file system nothing is stored. ``executor`` runs blocking calls; None means the loop's
        default executor. If ``is_inline``, blocking calls run on the loop, for file systems in memory.
        ``known_offset`` is as in ``SingleNodeLog``.
        """
        super().__init__(node_id)
        self._leader_id = node_id  # leads from the start, so listeners are never called
        self._disk_log: SingleNodeLog | None = None
        if filesystem is not None:
            assert directory is not None, "a file system needs a directory"
            directory_id = (rng or system_rng()).randbytes(DIRECTORY_ID_BYTES)
            self._disk_log = SingleNodeLog(
                filesystem, directory, node_id, directory_id, known_offset=known_offset
            )
        self._executor = executor
        self._is_inline = is_inline
        self._snapshot_min_bytes = snapshot_min_bytes
        self._next_snapshot_bytes = 0  # after a failed snapshot: the journal size at which to retry
        self._appended_offset = 0
        self._first_offset = FIRST_ENTRY[1] + 1  # a lower bound of the next offset
        self._pending: list[_Pending] = []
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the snapshot and the journal into the machine. Raises the errors of ``SingleNodeLog.open``."""
        machine = self.machine
        if self._disk_log is not None:
            recovered = await self._in_executor(self._disk_log.open)
            self._offset = recovered.snapshot_offset
            if self._offset:
                machine.load(recovered.snapshot_offset, recovered.snapshot_records)
            for offset, records in recovered.entries:
                machine.apply(offset, records)
                self._offset = offset
            self._appended_offset = self._offset
            self._first_offset = self._disk_log.journal.last_index + 1
        self._is_open = True

    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        """Implements ``Quorum.commit``. The entry at ``after_offset`` need not be synced yet."""
        self._check_usable()
        if after_offset != self._appended_offset:
            raise StaleImageError(decided_on=after_offset, offset=self._appended_offset)
        self._appended_offset = max(self._appended_offset + 1, self._first_offset)
        pending = _Pending(self._appended_offset, records, asyncio.get_running_loop().create_future())
        if self._disk_log is None:
            self._deliver([pending])
        else:
            self._pending.append(pending)
            if self._is_inline:
                await self._write(self._disk_log)
            elif self._writer is None:
                self._writer = asyncio.create_task(self._write(self._disk_log), name="metadata log writer")
        return await pending.done

    async def read_index(self) -> int:
        """Implements ``Quorum.read_index``."""
        self._check_usable()
        return self._offset

    async def _write(self, log: SingleNodeLog) -> None:
        """Write pending entries until there are none. If the log fails, the pending commits raise the
        error."""
        try:
            while self._pending:
                group, self._pending = self._pending, []
                entries = [(pending.offset, pending.records) for pending in group]
                try:
                    await self._in_executor(partial(log.append, entries))
                except StorageExhaustedError as error:
                    self._refuse(group, error)
                    continue
                except LogOfflineError as error:
                    self._fail(error, group)
                    return
                self._deliver(group)
                if self._failure is None:
                    await self._maybe_snapshot(log)
        finally:
            self._writer = None

    def _deliver(self, group: list[_Pending]) -> None:
        """Replay committed entries and complete their commits."""
        machine = self.machine
        for index, pending in enumerate(group):
            try:
                machine.apply(pending.offset, pending.records)
            except BaseException as error:
                self._fail(error, group[index:])
                return
            self._offset = pending.offset
            if not pending.done.done():
                pending.done.set_result(pending.offset)

    def _refuse(self, group: list[_Pending], error: Exception) -> None:
        """Fail the commits of ``group`` and all pending commits, which depend on them."""
        group, self._pending = group + self._pending, []
        self._appended_offset = self._offset
        for pending in group:
            if not pending.done.done():
                pending.done.set_exception(error)

    def _fail(self, error: BaseException, group: list[_Pending]) -> None:
        """Fail the commits of ``group``, all pending commits and all later calls (R26)."""
        self._failure = error
        self._refuse(group, self._stopped(error))
        self.machine.fail(error)

    async def _maybe_snapshot(self, log: SingleNodeLog) -> None:
        size_bytes = log.journal.size_bytes
        if size_bytes < max(self._snapshot_min_bytes, log.snapshots.size_bytes, self._next_snapshot_bytes):
            return
        offset, records = self.machine.snapshot()
        try:
            await self._in_executor(partial(log.write_snapshot, offset, records))
        except StorageExhaustedError as error:
            self._next_snapshot_bytes = size_bytes + self._snapshot_min_bytes
            _log.warning("no room for a snapshot of the metadata %s", Fields(error=error))
        except LogOfflineError as error:
            self._fail(error, [])
        else:
            self._next_snapshot_bytes = 0

    async def stop(self) -> None:
        """Write all pending entries, then close the log."""
        self._is_open = False
        if self._writer is not None:
            await self._writer
        if self._disk_log is not None:
            self._disk_log.close()

    async def _in_executor(self, call: Callable[[], T]) -> T:
        if self._is_inline:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
