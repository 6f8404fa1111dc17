"""Which work on the disk of one partition may run at the same time: a table of states.

Three kinds of work run in the executor, beside the loop:

- a sync round writes through what was appended; the loop goes on using the log;
- a deletion moves the log start or replaces segments by a compacted one; the loop goes on using the log, and
  rounds go on syncing it;
- exclusive work, a follower's truncation or new log start, has the log for itself: until it has ended,
  neither the loop nor a sync round may use the log. It waits for the end of a sync round under way.

Pure: a method returns the job to start now, if there is one. The caller runs it and reports its end.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final, Generic, TypeVar

E = TypeVar("E")
D = TypeVar("D")


class State(Enum):
    """What of a partition is under way."""

    IDLE = auto()
    SYNCING = auto()
    DELETING = auto()
    SYNCING_AND_DELETING = auto()
    WAITING = auto()  #: exclusive work waits for the end of a sync round
    EXCLUSIVE = auto()


class _Event(Enum):
    SYNC_BEGUN = auto()
    SYNC_ENDED = auto()
    DELETION_BEGUN = auto()
    DELETION_ENDED = auto()
    EXCLUSIVE_ADDED = auto()
    EXCLUSIVE_ENDED = auto()


_NEXT: Final = {
    (State.IDLE, _Event.SYNC_BEGUN): State.SYNCING,
    (State.IDLE, _Event.DELETION_BEGUN): State.DELETING,
    (State.IDLE, _Event.EXCLUSIVE_ADDED): State.EXCLUSIVE,
    (State.SYNCING, _Event.SYNC_ENDED): State.IDLE,
    (State.SYNCING, _Event.DELETION_BEGUN): State.SYNCING_AND_DELETING,
    (State.SYNCING, _Event.EXCLUSIVE_ADDED): State.WAITING,
    (State.DELETING, _Event.SYNC_BEGUN): State.SYNCING_AND_DELETING,
    (State.DELETING, _Event.DELETION_ENDED): State.IDLE,
    (State.SYNCING_AND_DELETING, _Event.SYNC_ENDED): State.DELETING,
    (State.SYNCING_AND_DELETING, _Event.DELETION_ENDED): State.SYNCING,
    (State.WAITING, _Event.SYNC_ENDED): State.EXCLUSIVE,
    (State.WAITING, _Event.EXCLUSIVE_ENDED): State.SYNCING,  # it was given up
    (State.EXCLUSIVE, _Event.EXCLUSIVE_ENDED): State.IDLE,
}
_SYNCS: Final = frozenset(state for state, event in _NEXT if event is _Event.SYNC_BEGUN)
_DELETES: Final = frozenset(state for state, event in _NEXT if event is _Event.DELETION_BEGUN)
_TAKES_EXCLUSIVE: Final = frozenset(state for state, event in _NEXT if event is _Event.EXCLUSIVE_ADDED)


class DiskWork(Generic[E, D]):
    """The jobs of one partition: at most one exclusive job, and deletions one after the other.

    Invariants: ``exclusive`` is set exactly in WAITING and EXCLUSIVE, ``deletion`` in the states that delete.
    Deletions wait in ``_deletions`` only while one of the two is set.
    """

    __slots__ = ("_deletions", "deletion", "exclusive", "state")

    def __init__(self) -> None:
        self.state = State.IDLE
        self.exclusive: E | None = None  #: under way, or the next
        self.deletion: D | None = None  #: under way
        self._deletions: deque[D] = deque()

    @property
    def is_exclusive(self) -> bool:
        """Whether neither the loop nor a sync round may use the log."""
        return self.exclusive is not None

    @property
    def is_deleting(self) -> bool:
        return self.deletion is not None or bool(self._deletions)

    @property
    def may_sync(self) -> bool:
        return self.state in _SYNCS

    @property
    def may_add_exclusive(self) -> bool:
        return self.state in _TAKES_EXCLUSIVE

    def begin_sync(self) -> None:
        """A sync round has begun. Only while ``may_sync``."""
        self._on(_Event.SYNC_BEGUN)

    def end_sync(self) -> E | None:
        """The sync round has ended. Returns the exclusive job that waited for it."""
        self._on(_Event.SYNC_ENDED)
        return self.exclusive

    def add_exclusive(self, job: E) -> E | None:
        """Take an exclusive job, while ``may_add_exclusive``. Returns it if it starts now."""
        self._on(_Event.EXCLUSIVE_ADDED)
        self.exclusive = job
        return job if self.state is State.EXCLUSIVE else None

    def end_exclusive(self) -> D | None:
        """The exclusive job has ended. Returns the deletion to start now."""
        self._on(_Event.EXCLUSIVE_ENDED)
        self.exclusive = None
        return self._next_deletion()

    def add_deletion(self, job: D) -> D | None:
        """Take a deletion. Returns it if it starts now; otherwise it follows the work under way."""
        self._deletions.append(job)
        return self._next_deletion()

    def end_deletion(self) -> D | None:
        """The deletion has ended. Returns the next one, to start now."""
        self._on(_Event.DELETION_ENDED)
        self.deletion = None
        return self._next_deletion()

    def give_up(self) -> tuple[E | None, D | None, list[D]]:
        """Drop all jobs. Returns the exclusive job and the deletion under way, which the caller must end
        itself, and the deletions that have not begun."""
        exclusive, deletion, waiting = self.exclusive, self.deletion, list(self._deletions)
        self._deletions.clear()
        if exclusive is not None:
            self.end_exclusive()
        if deletion is not None:
            self.end_deletion()
        return exclusive, deletion, waiting

    def _next_deletion(self) -> D | None:
        if not self._deletions or self.state not in _DELETES:
            return None
        self._on(_Event.DELETION_BEGUN)
        self.deletion = self._deletions.popleft()
        return self.deletion

    def _on(self, event: _Event) -> None:
        self.state = _NEXT[self.state, event]
