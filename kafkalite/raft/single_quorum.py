"""A quorum of one: the node's own journal decides, or nothing but memory does.

Commits that arrive while a sync is under way gather and share the next one. There is one writer: a task
that lives as long as there is something to write. Blocking calls run in an executor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kafkalite.errors import DiskFullError, LogOfflineError, ShuttingDownError
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.journal import Journal
from kafkalite.raft.quorum import LeaderListener, StaleImageError, StateMachine
from kafkalite.storage.filesystem import FileSystem

SNAPSHOT_MIN_BYTES: Final = MIB

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    offset: int
    records: Sequence[MetadataRecord]
    done: asyncio.Future[int]


class SingleQuorum:
    """Invariant: offset <= appended offset; in between stand the entries that wait for their sync.

    The journal is replaced by a snapshot when it has ``snapshot_min_bytes``, and no less than the last
    snapshot: so disk use stays within about twice the state, and each byte is written about twice.
    """

    def __init__(
        self,
        filesystem: FileSystem | None = None,
        directory: str | None = None,
        *,
        node_id: int = 1,
        executor: Executor | None = None,
        snapshot_min_bytes: int = SNAPSHOT_MIN_BYTES,
    ) -> None:
        """Without a file system everything is forgotten at the end. ``executor`` None: the loop's default."""
        self.on_leader_change: list[LeaderListener] = []  # never called: it leads from the start
        self._journal: Journal | None = None
        if filesystem is not None:
            assert directory is not None, "a file system needs a directory"
            self._journal = Journal(filesystem, directory)
        self._node_id = node_id
        self._executor = executor
        self._snapshot_min_bytes = snapshot_min_bytes
        self._next_snapshot_bytes = 0  # after a snapshot failed: not before the journal has this size
        self._machine: StateMachine | None = None
        self._offset = 0
        self._appended_offset = 0
        self._pending: list[_Pending] = []
        self._writer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._is_open = False

    @property
    def leader_id(self) -> int | None:
        return self._node_id

    @property
    def is_leader(self) -> bool:
        return True

    @property
    def offset(self) -> int:
        return self._offset

    def attach(self, machine: StateMachine) -> None:
        assert self._machine is None, "the quorum drives a state machine already"
        self._machine = machine

    async def start(self) -> None:
        """Load the snapshot and the journal. Raises CorruptLogError, StorageError."""
        machine = self._machine
        assert machine is not None, "attach a state machine first"
        if self._journal is not None:
            recovered = await self._in_executor(self._journal.open)
            if recovered.snapshot_offset:
                machine.load(recovered.snapshot_offset, recovered.snapshot_records)
            for offset, records in recovered.entries:
                machine.apply(offset, records)
            self._offset = self._appended_offset = self._journal.last_offset
        self._is_open = True

    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        """See ``Quorum.commit``. Concurrent commits may build on each other's offsets before the sync."""
        self._check_usable()
        if after_offset != self._appended_offset:
            raise StaleImageError(decided_on=after_offset, offset=self._appended_offset)
        self._appended_offset += 1
        pending = _Pending(self._appended_offset, records, asyncio.get_running_loop().create_future())
        if self._journal is None:
            self._deliver([pending])
        else:
            self._pending.append(pending)
            if self._writer is None:
                self._writer = asyncio.create_task(self._write(self._journal), name="metadata log writer")
        return await pending.done

    async def read_index(self) -> int:
        """See ``Quorum.read_index``."""
        self._check_usable()
        return self._offset

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LogOfflineError(f"the metadata log has stopped: {self._failure}") from self._failure
        if not self._is_open:
            raise ShuttingDownError("the metadata log is not open")

    async def _write(self, journal: Journal) -> None:
        """Write until nothing is pending. Ends without raising: a failure is told to everybody waiting."""
        try:
            while self._pending:
                group, self._pending = self._pending, []
                entries = [(pending.offset, pending.records) for pending in group]
                try:
                    await self._in_executor(partial(journal.append, entries))
                except DiskFullError as error:
                    self._refuse(group, error)
                    continue
                except LogOfflineError as error:
                    self._fail(error, group)
                    return
                self._deliver(group)
                if self._failure is None:
                    await self._maybe_snapshot(journal)
        finally:
            self._writer = None

    def _deliver(self, group: list[_Pending]) -> None:
        """Replay committed entries and release those who wait for them."""
        machine = self._machine
        assert machine is not None
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
        """Nothing of the group was written; what waits behind it was decided on it, and goes too."""
        group, self._pending = group + self._pending, []
        self._appended_offset = self._offset
        for pending in group:
            if not pending.done.done():
                pending.done.set_exception(error)

    def _fail(self, error: BaseException, group: list[_Pending]) -> None:
        """Take no more until the next start (R26)."""
        self._failure = error
        offline = LogOfflineError(f"the metadata log has stopped: {error}")
        offline.__cause__ = error
        self._refuse(group, offline)
        assert self._machine is not None
        self._machine.fail(error)

    async def _maybe_snapshot(self, journal: Journal) -> None:
        assert self._machine is not None
        wanted = max(self._snapshot_min_bytes, journal.snapshot_bytes, self._next_snapshot_bytes)
        if journal.size_bytes < wanted:
            return
        offset, records = self._machine.snapshot()
        try:
            await self._in_executor(partial(journal.write_snapshot, offset, records))
        except DiskFullError as error:
            self._next_snapshot_bytes = journal.size_bytes + self._snapshot_min_bytes
            _log.warning("no room for a snapshot of the metadata %s", Fields(error=error))
        except LogOfflineError as error:
            self._fail(error, [])
        else:
            self._next_snapshot_bytes = 0

    async def stop(self) -> None:
        """Write what is pending, then close."""
        self._is_open = False
        if self._writer is not None:
            await self._writer
        if self._journal is not None:
            self._journal.close()

    async def _in_executor(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
