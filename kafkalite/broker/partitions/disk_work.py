"""Decides which jobs on the disk may run at the same time for one partition, by a table of states. Pure.

Three kinds of jobs run in the executor while the event loop continues:

- A sync round syncs appended batches. The loop continues to use the log.

- A deletion moves the log start or replaces segments by a compacted one. The loop and sync rounds continue to
  use the log.

- An exclusive job truncates a follower's log or moves its log start. It waits for the end of a running
  sync round. Until it has ended, neither the loop nor a sync round may use the log.

The methods return the job that must start now, if any. The caller runs the job and reports its end.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum, auto
from typing import Final, Generic, TypeVar

E = TypeVar("E")
D = TypeVar("D")


class State(IntEnum):
    """The jobs that run or wait in one partition."""

    IDLE = auto()
    SYNCING = auto()
    DELETING = auto()
    SYNCING_AND_DELETING = auto()
    WAITING = auto()  #: an exclusive job waits for the end of a sync round
    EXCLUSIVE = auto()


# The next state after each event. A state without an entry cannot have the event.
_SYNC_BEGUN: Final = {State.IDLE: State.SYNCING, State.DELETING: State.SYNCING_AND_DELETING}
_SYNC_ENDED: Final = {
    State.SYNCING: State.IDLE,
    State.SYNCING_AND_DELETING: State.DELETING,
    State.WAITING: State.EXCLUSIVE,
}
_DELETION_BEGUN: Final = {State.IDLE: State.DELETING, State.SYNCING: State.SYNCING_AND_DELETING}
_DELETION_ENDED: Final = {State.DELETING: State.IDLE, State.SYNCING_AND_DELETING: State.SYNCING}
_EXCLUSIVE_ADDED: Final = {State.IDLE: State.EXCLUSIVE, State.SYNCING: State.WAITING}
_EXCLUSIVE_ENDED: Final = {
    State.EXCLUSIVE: State.IDLE,
    State.WAITING: State.SYNCING,  # ``give_up`` drops an exclusive job that has not begun
}


class DiskWork(Generic[E, D]):
    """The jobs of one partition: at most one exclusive job, and deletions that run one after the other.

    Invariants: ``exclusive`` is set exactly in WAITING and EXCLUSIVE, ``deletion`` exactly in the two states
    that delete. Deletions wait in ``_deletions`` only while ``exclusive`` or ``deletion`` is set.
    """

    __slots__ = ("_deletions", "deletion", "exclusive", "state")

    def __init__(self) -> None:
        self.state = State.IDLE
        #: The exclusive job that runs or waits. Meanwhile neither the loop nor a sync round may use the log.
        self.exclusive: E | None = None
        self.deletion: D | None = None  #: the running deletion
        self._deletions: deque[D] = deque()

    @property
    def is_deleting(self) -> bool:
        return self.deletion is not None or bool(self._deletions)

    @property
    def may_add_exclusive(self) -> bool:
        return self.state in _EXCLUSIVE_ADDED

    def begin_sync(self) -> None:
        """Record that a sync round has begun. Call it only if ``exclusive`` is None and no round runs."""
        self.state = _SYNC_BEGUN[self.state]

    def end_sync(self) -> E | None:
        """Record the end of the sync round. Return the exclusive job that must start now, or None."""
        self.state = _SYNC_ENDED[self.state]
        return self.exclusive

    def add_exclusive(self, job: E) -> E | None:
        """Add an exclusive job. Return it if it must start now, else None. Requires ``may_add_exclusive``."""
        self.state = _EXCLUSIVE_ADDED[self.state]
        self.exclusive = job
        return job if self.state is State.EXCLUSIVE else None

    def end_exclusive(self) -> D | None:
        """Record the end of the exclusive job. Return the deletion that must start now, or None."""
        self.state = _EXCLUSIVE_ENDED[self.state]
        self.exclusive = None
        return self._next_deletion()

    def add_deletion(self, job: D) -> D | None:
        """Add a deletion. Return it if it must start now, or None if it waits for running jobs."""
        self._deletions.append(job)
        return self._next_deletion()

    def end_deletion(self) -> D | None:
        """Record the end of the deletion. Return the next deletion, which must start now, or None."""
        self.state = _DELETION_ENDED[self.state]
        self.deletion = None
        return self._next_deletion()

    def give_up(self) -> tuple[E | None, D | None, list[D]]:
        """Drop all jobs. Return (exclusive job, running deletion, deletions that have not begun).

        The first two may be None. The caller must stop them or wait for their end.
        """
        exclusive, deletion, waiting = self.exclusive, self.deletion, list(self._deletions)
        self._deletions.clear()
        if exclusive is not None:
            self.end_exclusive()
        if deletion is not None:
            self.end_deletion()
        return exclusive, deletion, waiting

    def _next_deletion(self) -> D | None:
        if not self._deletions or self.state not in _DELETION_BEGUN:
            return None
        self.state = _DELETION_BEGUN[self.state]
        self.deletion = self._deletions.popleft()
        return self.deletion
