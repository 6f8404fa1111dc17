"""The quorum of several voters, as their brokers' loops see it: ``Quorum`` on top of a ``RaftNode``.

What is committed comes from the Raft loop in the log's order and is applied here, on the broker's loop; a
commit's outcome comes behind the entry itself. So whoever awaits a commit finds the machine at its offset,
and ``leader_id`` is this node only once it has seen all that was committed before its time.

The entries of the last while stay here in their encoded form, for the brokers that follow from outside.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kafkalite.clock import Clock
from kafkalite.errors import (
    InvalidRequestError,
    LogOfflineError,
    NotControllerError,
    RequestTimedOutError,
    ShuttingDownError,
)
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.quorum import LeaderListener, StaleImageError, StateMachine
from kafkalite.raft.raft_messages import MAX_COMMAND_BYTES
from kafkalite.raft.raft_node import AFTER_OFFSET, Outcome, QuorumStatus, RaftNode
from kafkalite.raft.raft_settings import RaftSettings
from kafkalite.raft.runner import Runner
from kafkalite.rng import Rng
from kafkalite.storage.filesystem import FileSystem

_EVENTS_PER_TURN = 500  # applied before the loop has its other work done


class MetadataChunk(NamedTuple):
    """Committed entries behind an offset, (offset, encoded records) each; or one that is the whole state."""

    is_snapshot: bool
    entries: Sequence[tuple[int, bytes]]
    committed_offset: int  #: of the last entry known here
    leader_id: int | None


class RaftQuorum:
    """``Quorum`` among ``voters``. All of it on the broker's loop, except ``node``.

    Invariant: ``offset`` is the machine's, and grows.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        directory: str,
        *,
        node_id: int,
        voters: Sequence[int],
        runner: Runner,
        clock: Clock,
        rng: Rng,
        settings: RaftSettings | None = None,
        allow_fresh: bool = True,
    ) -> None:
        """``allow_fresh`` False refuses a directory without a Raft log: for a node that has had one."""
        assert node_id in voters, "a node without a vote observes"
        self.on_leader_change: list[LeaderListener] = []
        self._settings = settings or RaftSettings()
        self._runner = runner
        self._clock = clock
        self._node_id = node_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._machine: StateMachine | None = None
        self._leader_id: int | None = None
        self._term = 0
        self._offset = 0
        self._index = 0  # of the last entry heard of, void ones included
        self._recent: deque[tuple[int, bytes]] = deque()
        self._recent_base = 0  # entries above it are in ``_recent``
        self._recent_bytes = 0
        self._events: deque[tuple[Any, ...]] = deque()
        self._is_draining = False
        self._waiting: dict[asyncio.Future[Any], None] = {}  # commits and reads: ended by a failure or a stop
        self._beyond: list[tuple[int, asyncio.Future[None]]] = []
        self._failure: BaseException | None = None
        self._is_open = False
        self._snapshot_bytes: tuple[int, bytes] | None = None  # offset, encoded: the last one asked for
        self.node = RaftNode(
            filesystem,
            directory,
            node_id=node_id,
            voters=voters,
            runner=runner,
            rng=rng,
            settings=self._settings,
            told=self,
            post=self._post,
            allow_fresh=allow_fresh,
        )

    @property
    def leader_id(self) -> int | None:
        return self._leader_id

    @property
    def is_leader(self) -> bool:
        return self._leader_id == self._node_id

    @property
    def term(self) -> int:
        return self._term

    @property
    def offset(self) -> int:
        return self._offset

    # --- life ------------------------------------------------------------------------------------------

    def attach(self, machine: StateMachine) -> None:
        assert self._machine is None, "the quorum drives a state machine already"
        self._machine = machine

    async def start(self) -> None:
        """Load the snapshot. What follows it comes once a leader has told that it is committed.

        Raises CorruptLogError, StorageError, DataDirectoryError.
        """
        assert self._machine is not None, "attach a state machine first"
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()

        def open_node() -> None:
            try:
                self.node.open()
            except Exception as error:
                self._post([(_release, opened, error)])
            else:
                self._post([(_release, opened, None)])

        self._runner.call(open_node)
        await opened
        self._is_open = True

    async def stop(self) -> None:
        """Let another lead, and take no more."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            assert self._loop is not None
            stopped: asyncio.Future[None] = self._loop.create_future()
            self._runner.call(self.node.stop, lambda: _release(stopped, None))
            await stopped
        self._release_all(ShuttingDownError("the node stops; the outcome is not known"))

    def halt(self) -> None:
        """Take no part any more, as if the process had died: nobody is handed anything. Then ``stop``."""
        if self._is_open:
            self._runner.call(self.node.halt)

    def _release_all(self, error: Exception) -> None:
        for waiting in [*self._waiting, *(future for _, future in self._beyond)]:
            _release(waiting, error)
        self._beyond.clear()

    # --- from the Raft loop ------------------------------------------------------------------------------

    def _post(self, events: list[tuple[Any, ...]]) -> None:
        """On the Raft loop: have these called on the broker's."""
        loop = self._loop
        assert loop is not None
        if loop is self._runner.loop:
            if not loop.is_closed():
                loop.call_soon(self._take, events)
            return
        try:
            loop.call_soon_threadsafe(self._take, events)
        except RuntimeError:
            assert loop.is_closed()  # nobody is left who would want to know

    def _take(self, events: list[tuple[Any, ...]]) -> None:
        self._events += events
        if not self._is_draining:
            self._drain()

    def _drain(self) -> None:
        """Call what has come, in order, and let others have a turn after so many."""
        self._is_draining = False
        for _ in range(min(len(self._events), _EVENTS_PER_TURN)):
            function, *arguments = self._events.popleft()
            function(*arguments)
        if self._events:
            assert self._loop is not None
            self._is_draining = True
            self._loop.call_soon(self._drain)

    def on_entry(self, index: int, offset: int, records: bytes) -> None:
        """``Told.on_entry``: an entry has taken effect."""
        self._index = index
        if self._failure is not None:
            return
        assert self._machine is not None
        try:
            self._machine.apply(offset, record_codec.from_bytes(records))
        except BaseException as error:
            self._stop_for(error)
            return
        self._offset = offset
        self._recent.append((offset, records))
        self._recent_bytes += len(records)
        while self._recent_bytes > self._settings.recent_bytes:
            self._recent_base, dropped = self._recent.popleft()
            self._recent_bytes -= len(dropped)
        self._wake()

    def on_void(self, index: int) -> None:
        """``Told.on_void``: an entry without effect has gone by."""
        self._index = index

    def on_snapshot(self, index: int, offset: int, records: bytes) -> None:
        """``Told.on_snapshot``: the state is this from now on."""
        self._index = index
        if self._failure is not None:
            return
        assert self._machine is not None
        try:
            if offset > self._offset:
                self._machine.load(offset, record_codec.from_bytes(records))
        except BaseException as error:
            self._stop_for(error)
            return
        self._offset = self._recent_base = offset
        self._recent.clear()
        self._recent_bytes = 0
        self._wake()

    def on_leader(self, leader_id: int | None, term: int) -> None:
        """``Told.on_leader``."""
        if self._failure is None:
            self._set_leader(leader_id, term)

    def _set_leader(self, leader_id: int | None, term: int) -> None:
        self._leader_id, self._term = leader_id, term
        for listener in self.on_leader_change:
            listener(leader_id, term)

    def on_snapshot_wanted(self) -> None:
        """``Told.on_snapshot_wanted``: the log has grown."""
        if self._failure is None and self._is_open and self._machine is not None:
            offset, records = self._machine.snapshot()
            assert offset == self._offset, f"the machine is at {offset}, and the log at {self._offset}"
            self._runner.call(self.node.take_snapshot, self._index, offset, records)

    def on_failure(self, error: BaseException) -> None:
        """``Told.on_failure``: the Raft side has stopped for good."""
        self._stop_for(error)

    def _stop_for(self, error: BaseException) -> None:
        """Take no more until the next start (R18, R26)."""
        if self._failure is not None:
            return
        self._failure = error
        self._runner.call(self.node.halt)
        offline = LogOfflineError(f"the metadata log has stopped: {error}")
        offline.__cause__ = error
        self._release_all(offline)
        self._set_leader(None, self._term)
        assert self._machine is not None
        self._machine.fail(error)

    # --- committing and reading --------------------------------------------------------------------------

    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        """See ``Quorum.commit``."""
        self._check_leads()
        if after_offset != self._offset:
            raise StaleImageError(decided_on=after_offset, offset=self._offset)
        command = AFTER_OFFSET.pack(after_offset) + record_codec.to_bytes(records)
        if len(command) > MAX_COMMAND_BYTES:
            raise InvalidRequestError(f"a change of {len(command)} bytes is more than one entry takes")

        def on_outcome(future: asyncio.Future[Outcome], outcome: Outcome | None, is_known: bool) -> None:
            if outcome is not None:
                _release(future, outcome)
            elif is_known:
                _release(future, self._not_controller())
            else:
                _release(future, RequestTimedOutError("the controller has changed; the outcome is not known"))

        outcome: Outcome = await self._ask(self.node.propose, on_outcome, command)
        if not outcome.took_effect:
            raise StaleImageError(decided_on=after_offset, offset=outcome.offset)
        return outcome.offset

    async def read_index(self) -> int:
        """An offset that this node has applied, and no smaller than any committed before the call (R19).

        Raises NotControllerError, RequestTimedOutError.
        """
        self._check_leads()

        def on_answer(future: asyncio.Future[None], is_current: bool) -> None:
            _release(future, None if is_current else self._not_controller())

        await self._ask(self.node.read_index, on_answer)
        return self._offset

    async def _ask(self, question: Callable[..., None], on_answer: Callable[..., None], *args: Any) -> Any:
        """Have the node do something, and wait for what ``on_answer`` makes of it, but not for ever."""
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[future] = None
        timeout_s = self._settings.commit_timeout_ms / 1000
        late = RequestTimedOutError(f"no majority of the voters answered in {timeout_s:g} s")
        timer = self._loop.call_later(timeout_s, _release, future, late)
        try:
            self._runner.call(question, *args, lambda *answer: on_answer(future, *answer))
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(future, None)

    def _check_leads(self) -> None:
        self._check_usable()
        if not self.is_leader:
            raise self._not_controller()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LogOfflineError(f"the metadata log has stopped: {self._failure}") from self._failure
        if not self._is_open:
            raise ShuttingDownError("the metadata log is not open")

    def _not_controller(self) -> NotControllerError:
        if self._leader_id is None or self.is_leader:
            return NotControllerError("there is no controller just now")
        return NotControllerError(f"the controller is node {self._leader_id}")

    # --- for those who follow and look --------------------------------------------------------------------

    def status(self) -> QuorumStatus:
        """As this node sees the quorum. From the Raft loop's side: no more than a moment old, nor exact."""
        return self.node.view

    def entries_after(self, offset: int, max_bytes: int) -> MetadataChunk:
        """Entries behind ``offset``, at least one if there is any, or the whole state if they are gone.

        Raises LogOfflineError, ShuttingDownError.
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
            assert self._machine is not None
            offset, records = self._machine.snapshot()
            self._snapshot_bytes = (offset, record_codec.to_bytes(records))
        return self._snapshot_bytes

    async def wait_beyond(self, offset: int, timeout_ms: int) -> bool:
        """Wait until an entry behind ``offset`` is applied here; False when it took too long.

        Raises LogOfflineError, ShuttingDownError.
        """
        self._check_usable()
        if self._offset > offset:
            return True
        assert self._loop is not None
        reached: asyncio.Future[None] = self._loop.create_future()
        waiter = (offset, reached)
        self._beyond.append(waiter)
        timer = self._loop.call_later(timeout_ms / 1000, _release, reached, None)
        try:
            await reached
        finally:
            timer.cancel()
            if waiter in self._beyond:
                self._beyond.remove(waiter)
        return self._offset > offset

    def _wake(self) -> None:
        if self._beyond:
            waiters, self._beyond = self._beyond, []
            for waiter in waiters:
                if waiter[0] < self._offset:
                    _release(waiter[1], None)
                else:
                    self._beyond.append(waiter)


def _release(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
