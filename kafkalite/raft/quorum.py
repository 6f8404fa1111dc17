"""The interface to the metadata log: it appends entries conditionally, and delivers committed entries.

An entry holds the records of one ``commit``, which take effect together or not at all. Offsets increase and
may have gaps. An entry takes effect only if the state is still the one at ``after_offset``, on which the
entry was decided. Otherwise ``commit`` raises StaleImageError, and its caller decides again. Therefore a
deposed leader that still considers itself the leader cannot change anything.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kafkalite.errors import InvalidRequestError, KafkaliteError, LogOfflineError, ShuttingDownError
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.voter_set import VoterChange


class StaleImageError(KafkaliteError):
    """The image on which the commit was decided is outdated: the newest entry of the log that takes effect is
    at ``offset``."""

    def __init__(self, *, decided_on: int, offset: int) -> None:
        super().__init__(
            f"the decision was made at metadata offset {decided_on}, and the log is now at {offset}",
            hint="decide again on the new image",
        )
        self.decided_on = decided_on
        self.offset = offset


class StateMachine(Protocol):
    """The owner of the state that the log's entries change. Called on the event loop, in log order."""

    def load(self, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Replace the state by the ``records`` of a snapshot at ``offset``."""
        ...

    def apply(self, offset: int, records: Sequence[MetadataRecord]) -> None:
        """Replay one committed entry. An exception stops the quorum (R18)."""
        ...

    def snapshot(self) -> tuple[int, Iterable[MetadataRecord]]:
        """Return (offset, records of the current state). The records may be read later, in another thread."""
        ...

    def fail(self, error: BaseException) -> None:
        """Stop waiting for entries: the quorum has failed and will deliver nothing more."""
        ...


LeaderListener = Callable[[int | None, int], None]
"""Called with (leader id or None, term) on the event loop after every change."""


class Quorum(ABC):
    """A node's access to the metadata log. Invariant: ``offset`` is the offset of the state machine's state,
    and never decreases."""

    is_single_node = False  #: whether this node is the whole cluster

    def __init__(self, node_id: int) -> None:
        self.on_leader_change: list[LeaderListener] = []
        self._node_id = node_id
        self._machine: StateMachine | None = None
        self._leader_id: int | None = None
        self._offset = 0
        self._failure: BaseException | None = None
        self._is_open = False

    @property
    def leader_id(self) -> int | None:
        """The node id of the leader as far as this node knows, or None."""
        return self._leader_id

    @property
    def is_leader(self) -> bool:
        return self._leader_id == self._node_id

    @property
    def offset(self) -> int:
        """The offset of the last entry or snapshot that the machine has received; 0 before the first."""
        return self._offset

    @property
    def machine(self) -> StateMachine:
        assert self._machine is not None, "attach a state machine first"
        return self._machine

    def attach(self, machine: StateMachine) -> None:
        """Register ``machine`` to receive the entries. Call this once, before ``start``."""
        assert self._machine is None, "the quorum has a state machine already"
        self._machine = machine

    @abstractmethod
    async def start(self) -> None:
        """Load the state that is stored on this node, if any, into the machine, and begin to deliver entries.
        Raises StorageError."""

    @abstractmethod
    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        """Append one entry that was decided on the state at ``after_offset``. Return its committed offset.

        After StaleImageError, StorageExhaustedError, NotControllerError and InvalidRequestError (the entry is
        too large) nothing took effect. After RequestTimedOutError, LogOfflineError, ShuttingDownError and
        cancellation the outcome is unknown: the entry may still take effect, unless another entry that was
        decided on the same state takes effect first.
        """

    @abstractmethod
    async def read_index(self) -> int:
        """Confirm that this node leads. Return an offset that covers all entries committed before the call
        (R19).

        Raises NotControllerError, LogOfflineError, ShuttingDownError, or RequestTimedOutError if no majority
        responds.
        """

    async def change_voters(self, change: VoterChange) -> None:
        """Add or remove a voter. Return when the change is committed (R93-R98).

        Raises NotControllerError, and the errors of ``voter_set.next_voters``. After RequestTimedOutError,
        LogOfflineError and ShuttingDownError, the change may still be committed.
        """
        raise InvalidRequestError(
            f"node {self._node_id} has no quorum that could change: it is a cluster of its own",
            hint="start it with controller.quorum.voters, which names only this node, and a cluster.secret",
        )

    def voter_ids(self) -> frozenset[int]:
        """Return the node ids of the present voters; empty if they are the configured ones."""
        return frozenset()

    @abstractmethod
    async def stop(self) -> None:
        """Stop the delivery of entries and refuse new commits. Pending commits are completed or fail."""

    def _set_leader(self, leader_id: int | None, term: int) -> None:
        self._leader_id = leader_id
        for listener in self.on_leader_change:
            listener(leader_id, term)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._stopped(self._failure)
        if not self._is_open:
            raise ShuttingDownError("the metadata log is not open")

    def _stopped(self, failure: BaseException) -> LogOfflineError:
        """Return the error that all calls raise after ``failure`` (R26)."""
        error = LogOfflineError(f"the metadata log has stopped: {failure}")
        error.__cause__ = failure
        return error


class OffsetWaiters:
    """Futures, each of which is completed when an offset is reached."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def add(self, offset: int) -> asyncio.Future[None]:
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [waiter for waiter in self._waiting if not waiter[1].done()]
        self._waiting.append((offset, reached))
        return reached

    def reach(self, offset: int) -> None:
        """Complete the futures that wait for ``offset`` or a lower offset."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter[0] <= offset:
                complete(waiter[1], None)
            else:
                self._waiting.append(waiter)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in all waiting tasks."""
        waiting, self._waiting = self._waiting, []
        for _, reached in waiting:
            complete(reached, error)


def complete(future: asyncio.Future[Any], outcome: Any) -> None:
    """Set ``outcome``, a result or an exception, unless the future is already done or cancelled."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
