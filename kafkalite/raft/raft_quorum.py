"""The quorum of several voters on the broker's loop: implements ``Quorum`` with a ``RaftNode``.

Committed entries arrive from the Raft loop in log order and are applied on the broker's loop. The outcome of
a commit arrives after the entry itself, so when a commit returns, the machine has reached its offset.
``leader_id`` is this node's id only after this node has applied all entries that were committed before its
term.

Recent entries are kept in memory, in encoded form, for brokers that are not voters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kafkalite.errors import (
    BrokerError,
    InvalidRequestError,
    NotControllerError,
    RequestTimedOutError,
    ShuttingDownError,
)
from kafkalite.loop_thread import call_on
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.adapter import RaftSettings
from kafkalite.raft.entries import MAX_COMMAND_BYTES, change_after
from kafkalite.raft.node import Outcome, QuorumStatus, RaftNode
from kafkalite.raft.quorum import OffsetWaiters, Quorum, StaleImageError, complete
from kafkalite.raft.runner import Runner
from kafkalite.raft.voter_set import VoterChange
from kafkalite.rng import Rng
from kafkalite.storage.filesystem import FileSystem

_EVENTS_PER_TURN = 500  # events handled before other callbacks of the loop run


class MetadataChunk(NamedTuple):
    """Committed entries after an offset, or one snapshot, each as (offset, encoded records)."""

    is_snapshot: bool
    entries: Sequence[tuple[int, bytes]]
    committed_offset: int  #: of the last entry that this node has applied
    leader_id: int | None


class RaftQuorum(Quorum):
    """A ``Quorum`` of several voters, of which this node is one or an observer.

    Use it on the broker's loop; its ``node`` runs on the Raft loop.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        directory: str,
        *,
        node_id: int,
        voters: Sequence[int],
        runner: Runner,
        rng: Rng,
        settings: RaftSettings | None = None,
        allow_new: bool = True,
        known_offset: int | None = None,
        is_copy: bool = False,
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        """``voters``, ``addresses`` and ``is_copy`` are those of ``RaftNode``. ``allow_new`` and
        ``known_offset`` are those of ``MetadataLog.open``, which ``start`` calls."""
        super().__init__(node_id)
        self._settings = settings or RaftSettings()
        self._runner = runner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._term = 0
        self._index = 0  # the index of the last committed entry, including void ones
        self._recent: deque[tuple[int, bytes]] = deque()
        self._recent_base = 0  # ``_recent`` has the entries after this offset
        self._recent_bytes = 0
        self._events: deque[tuple[Any, ...]] = deque()
        self._is_draining = False
        #: {node id: address} of the nodes to which this one connects, this node included. Kept current.
        self.addresses: dict[int, str] = dict(addresses or {})
        self._own_address = self.addresses.get(node_id, "")
        self._waiting: dict[asyncio.Future[Any], None] = {}  # commits and reads; failed when the node stops
        self._beyond = OffsetWaiters()
        # (offset, encoded records) of the last requested snapshot
        self._snapshot_bytes: tuple[int, bytes] | None = None
        self.node = RaftNode(
            filesystem,
            directory,
            node_id=node_id,
            voters=voters,
            runner=runner,
            rng=rng,
            settings=self._settings,
            listener=self,
            post=self._post,
            allow_new=allow_new,
            known_offset=known_offset,
            is_copy=is_copy,
            addresses=addresses,
        )

    async def start(self) -> None:
        """Load the snapshot, if there is one. Later entries follow once they are known to be committed.

        Raises CorruptLogError, StorageError, DataDirectoryError.
        """
        assert self.machine is not None
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()

        def open_node() -> None:
            try:
                self.node.open()
            except Exception as error:
                self._post([(complete, opened, error)])
            else:
                self._post([(complete, opened, None)])

        self._runner.call(open_node)
        await opened
        self._is_open = True

    async def stop(self) -> None:
        """If this node leads, request a leadership transfer. Stop the node and refuse new commits. Waiting
        calls raise ShuttingDownError."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            assert self._loop is not None
            stopped: asyncio.Future[None] = self._loop.create_future()
            self._runner.call(self.node.stop, lambda: complete(stopped, None))
            await stopped
        self._release_all(ShuttingDownError("the node stops; the outcome is not known"))

    def halt(self) -> None:
        """Stop immediately without a leadership transfer, as after a crash. The caller must call ``stop``
        next."""
        if self._is_open:
            self._runner.call(self.node.halt)

    def _release_all(self, error: Exception) -> None:
        for waiting in self._waiting:
            complete(waiting, error)
        self._beyond.fail(error)

    def _post(self, events: list[tuple[Any, ...]]) -> None:
        """Schedule ``events``, tuples of a function and its arguments, on the broker's loop. Called on the
        Raft loop."""
        assert self._loop is not None
        call_on(self._loop, self._take, events)

    def _take(self, events: list[tuple[Any, ...]]) -> None:
        self._events += events
        if not self._is_draining:
            self._drain()

    def _drain(self) -> None:
        """Make the posted calls in order. Let other callbacks run after every ``_EVENTS_PER_TURN`` calls."""
        self._is_draining = False
        for _ in range(min(len(self._events), _EVENTS_PER_TURN)):
            function, *arguments = self._events.popleft()
            function(*arguments)
        if self._events:
            assert self._loop is not None
            self._is_draining = True
            self._loop.call_soon(self._drain)

    def on_entry(self, index: int, offset: int, records: bytes) -> None:
        """Implements ``NodeListener.on_entry``."""
        self._index = index
        if self._failure is not None:
            return
        try:
            self.machine.apply(offset, record_codec.from_bytes(records))
        except BaseException as error:
            self._stop_for(error)
            return
        self._offset = offset
        self._recent.append((offset, records))
        self._recent_bytes += len(records)
        while self._recent_bytes > self._settings.recent_bytes:
            self._recent_base, dropped = self._recent.popleft()
            self._recent_bytes -= len(dropped)
        self._beyond.reach(self._offset)

    def on_void(self, index: int) -> None:
        """Implements ``NodeListener.on_void``: the entry ``index`` is committed and has no effect."""
        self._index = index

    def on_snapshot(self, index: int, offset: int, records: bytes) -> None:
        """Implements ``NodeListener.on_snapshot``."""
        self._index = index
        if self._failure is not None:
            return
        try:
            if offset > self._offset:
                self.machine.load(offset, record_codec.from_bytes(records))
        except BaseException as error:
            self._stop_for(error)
            return
        self._offset = self._recent_base = offset
        self._recent.clear()
        self._recent_bytes = 0
        self._beyond.reach(self._offset)

    def on_leader(self, leader_id: int | None, term: int) -> None:
        """Implements ``NodeListener.on_leader``."""
        if self._failure is None:
            self._term = term
            self._set_leader(leader_id, term)

    def on_snapshot_wanted(self) -> None:
        """Implements ``NodeListener.on_snapshot_wanted``."""
        if self._failure is None and self._is_open:
            offset, records = self.machine.snapshot()
            assert offset == self._offset, f"the machine is at {offset}, and the log at {self._offset}"
            self._runner.call(self.node.take_snapshot, self._index, offset, records)

    def on_peers(self, addresses: Mapping[int, str]) -> None:
        """Implements ``NodeListener.on_peers``."""
        self.addresses.clear()
        self.addresses.update(addresses)
        self.addresses[self._node_id] = self._own_address

    def on_failure(self, error: BaseException) -> None:
        """Implements ``NodeListener.on_failure``."""
        self._stop_for(error)

    def _stop_for(self, error: BaseException) -> None:
        """Fail all waiting and all later calls because of ``error`` (R18, R26)."""
        if self._failure is not None:
            return
        self._failure = error
        self._runner.call(self.node.halt)
        self._release_all(self._stopped(error))
        self._set_leader(None, self._term)
        self.machine.fail(error)

    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        """Implements ``Quorum.commit``."""
        self._check_leads()
        if after_offset != self._offset:
            raise StaleImageError(decided_on=after_offset, offset=self._offset)
        change = change_after(after_offset, record_codec.to_bytes(records))
        if len(change) > MAX_COMMAND_BYTES:
            raise InvalidRequestError(f"a change of {len(change)} bytes exceeds {MAX_COMMAND_BYTES} bytes")

        def on_outcome(future: asyncio.Future[Outcome], outcome: Outcome | None, is_known: bool) -> None:
            if outcome is not None:
                complete(future, outcome)
            elif is_known:
                complete(future, self._not_controller())
            else:
                complete(future, RequestTimedOutError("the controller has changed; the outcome is not known"))

        outcome: Outcome = await self._ask(self.node.propose, on_outcome, change)
        if not outcome.took_effect:
            raise StaleImageError(decided_on=after_offset, offset=outcome.offset)
        return outcome.offset

    async def change_voters(self, change: VoterChange) -> None:
        """Implements ``Quorum.change_voters``."""
        self._check_leads()

        def on_outcome(future: asyncio.Future[None], error: BrokerError | None) -> None:
            complete(future, error)

        await self._ask(self.node.change_voters, on_outcome, change)

    def voter_ids(self) -> frozenset[int]:
        return frozenset(one.node_id for one in self.node.status.nodes if one.is_voter)

    async def read_index(self) -> int:
        """Return the offset of this node after it has applied all entries committed before the call (R19).

        Raises NotControllerError, RequestTimedOutError, LogOfflineError, ShuttingDownError.
        """
        self._check_leads()

        def on_result(future: asyncio.Future[None], is_current: bool) -> None:
            complete(future, None if is_current else self._not_controller())

        await self._ask(self.node.read_index, on_result)
        return self._offset

    async def _ask(self, call: Callable[..., None], on_result: Callable[..., None], *args: Any) -> Any:
        """Run ``call`` on the Raft loop, and return the result of the request that it starts.

        ``on_result`` receives a future and the outcome, and completes the future with the result or an error.
        Raises this error, or RequestTimedOutError after ``commit_timeout_ms``.
        """
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[future] = None
        timeout_s = self._settings.commit_timeout_ms / 1000
        late = RequestTimedOutError(f"no majority of the voters responded in {timeout_s:g} s")
        timer = self._loop.call_later(timeout_s, complete, future, late)
        try:
            self._runner.call(call, *args, lambda *result: on_result(future, *result))
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(future, None)

    def _check_leads(self) -> None:
        self._check_usable()
        if not self.is_leader:
            raise self._not_controller()

    def _not_controller(self) -> NotControllerError:
        if self._leader_id is None or self.is_leader:
            return NotControllerError("there is no controller at present")
        return NotControllerError(f"the controller is node {self._leader_id}")

    def status(self) -> QuorumStatus:
        """Return the state of the quorum as this node knew it at its last tick."""
        return self.node.status

    def entries_after(self, offset: int, max_bytes: int) -> MetadataChunk:
        """Return up to ``max_bytes`` of entries after ``offset``, but at least one entry if any exists.

        Returns a snapshot if the entries are no longer in memory. Raises LogOfflineError, ShuttingDownError.
        """
        self._check_usable()
        if offset < self._recent_base:
            return MetadataChunk(True, [self._encoded_snapshot()], self._offset, self._leader_id)
        entries: list[tuple[int, bytes]] = []
        size_bytes = 0
        for entry in self._recent_behind(offset):
            size_bytes += len(entry[1])
            if entries and size_bytes > max_bytes:
                break
            entries.append(entry)
        return MetadataChunk(False, entries, self._offset, self._leader_id)

    def _recent_behind(self, offset: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        for entry in reversed(self._recent):
            if entry[0] <= offset:
                break
            found.append(entry)
        return found[::-1]

    def _encoded_snapshot(self) -> tuple[int, bytes]:
        if self._snapshot_bytes is None or self._snapshot_bytes[0] < self._recent_base:
            offset, records = self.machine.snapshot()
            self._snapshot_bytes = (offset, record_codec.to_bytes(records))
        return self._snapshot_bytes

    async def wait_beyond(self, offset: int, timeout_ms: int) -> bool:
        """Return True once an entry after ``offset`` is applied here, or False after ``timeout_ms``.

        Raises LogOfflineError, ShuttingDownError.
        """
        self._check_usable()
        if self._offset > offset:
            return True
        reached = self._beyond.add(offset + 1)
        timer = reached.get_loop().call_later(timeout_ms / 1000, complete, reached, None)
        try:
            await reached
        finally:
            timer.cancel()
        return self._offset > offset
