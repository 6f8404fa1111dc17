"""Group commit: syncs logs by ``fdatasync``, one round at a time.

A round syncs every log that was marked since the previous round began. Appends during a round are synced in
the next one. A round runs in the executor, and the result of each log is reported on the loop. A failed sync
is final for its log (R26), except if it lacked disk space or descriptors (R55).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final, Generic, Protocol, TypeVar

from kafkalite.broker.partitions.inline_executor import InlineExecutor
from kafkalite.log_fields import Fields

logger = logging.getLogger(__name__)

#: The time until a sync is repeated that lacked disk space or descriptors (R55).
RETRY_S: Final = 1.0


class SyncWork(Protocol):
    """The sync that ``Log.begin_sync`` has prepared. ``run`` blocks, and may be called in any thread."""

    def run(self) -> None: ...


class Syncable(Hashable, Protocol):
    """The methods of a log that the scheduler calls."""

    def begin_sync(self) -> SyncWork | None: ...

    def finish_sync(self, work: SyncWork, error: Exception | None) -> None:
        """Process the result of a sync and notify waiters. Called on the loop.

        ``error`` is the exception of the sync, or None. Must not raise it.
        """
        ...


S = TypeVar("S", bound=Syncable)
T = TypeVar("T")


class SyncScheduler(Generic[S]):
    """Syncs marked logs in rounds. With an InlineExecutor (disks in memory) rounds run on the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        on_broken: Callable[[BaseException], None],
        run_round: Callable[[Sequence[Any]], list[Exception | None]] | None = None,
    ) -> None:
        """``on_broken`` is called with an exception of ``begin_sync`` or ``finish_sync``, to stop the broker.

        ``run_round`` runs the SyncWork objects of a round, blocks until all have ended, and returns the error
        of each, or None if it succeeded.
        """
        self._run_round = run_round or _run_each
        self._loop = loop
        self._executor = executor
        self._on_broken = on_broken
        self._dirty: dict[S, None] = {}
        self._postponed: dict[S, None] = {}
        self._is_busy = False
        self._idle_callbacks: list[asyncio.Future[None]] = []
        self.round_count = 0
        #: The sum of the numbers of logs in all rounds. Divided by ``round_count``, it is the mean per round.
        self.synced_count = 0

    def mark(self, log: S) -> None:
        """Mark ``log`` for the next round, which starts in the next iteration of the loop or later."""
        self._dirty[log] = None
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._start_round)

    def postpone(self, log: S) -> None:
        """Mark ``log`` after at most RETRY_S, because its sync lacked disk space or descriptors."""
        if not self._postponed:
            self._loop.call_later(RETRY_S, self._mark_postponed)
        self._postponed[log] = None

    def _mark_postponed(self) -> None:
        postponed, self._postponed = self._postponed, {}
        for log in postponed:
            self.mark(log)

    def forget(self, log: S) -> None:
        """Unmark ``log``, also if it was postponed. A running sync of the log continues."""
        self._dirty.pop(log, None)
        self._postponed.pop(log, None)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` in the executor."""
        return self._executor.submit(job)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the broker's loop. May be called from any thread."""
        self._loop.call_soon_threadsafe(callback)

    async def drain(self, *, discard: bool = False) -> None:
        """Drop postponed logs, then return when no round runs and no log is marked. With ``discard``, unmark
        all logs first."""
        self._postponed.clear()
        if discard:
            self._dirty.clear()
        if self._is_busy:
            idle = self._loop.create_future()
            self._idle_callbacks.append(idle)
            await idle

    def _start_round(self) -> None:
        works: list[tuple[S, SyncWork]] = []
        dirty, self._dirty = self._dirty, {}
        try:
            for log in dirty:
                work = log.begin_sync()
                if work is not None:
                    works.append((log, work))
        except BaseException as error:
            self._on_broken(error)
            raise
        if not works:
            self._finish_round([])
        elif isinstance(self._executor, InlineExecutor):  # a future would cost more than the round itself
            self._finish_round(self._run(works))
        else:
            future = self._executor.submit(self._run, works)
            future.add_done_callback(
                lambda done: self._loop.call_soon_threadsafe(self._finish_round, done.result())
            )

    def _run(self, works: list[tuple[S, SyncWork]]) -> list[tuple[S, SyncWork, Exception | None]]:
        """Run one round. Return (log, its work, error or None) for each work."""
        errors = self._run_round([work for _, work in works])
        return [(log, work, error) for (log, work), error in zip(works, errors, strict=True)]

    def _finish_round(self, outcomes: list[tuple[S, SyncWork, Exception | None]]) -> None:
        self.round_count += 1
        self.synced_count += len(outcomes)
        try:
            for log, work, error in outcomes:
                if error is not None:
                    logger.error("sync failed %s", Fields(error=repr(error)))
                log.finish_sync(work, error)
        except BaseException as error:
            self._on_broken(error)
            raise
        finally:
            if self._dirty:
                self._loop.call_soon(self._start_round)
            else:
                self._is_busy = False
                idle, self._idle_callbacks = self._idle_callbacks, []
                for future in idle:
                    if not future.done():
                        future.set_result(None)


def _run_each(works: Sequence[SyncWork]) -> list[Exception | None]:
    """Run the works one after the other, even if some fail. Return the error of each, or None."""
    outcomes: list[Exception | None] = []
    for work in works:
        try:
            work.run()
        except Exception as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    return outcomes
