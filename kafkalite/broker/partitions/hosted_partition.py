"""One partition of this broker, with those who wait for it, those who replicate it, and what syncs it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from kafkalite.broker.partitions.sync_scheduler import SyncScheduler, SyncWork
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.errors import (
    BrokerError,
    InvalidTopicError,
    LogOfflineError,
    NotLeaderOrFollowerError,
    StorageError,
)
from kafkalite.log_fields import Fields
from kafkalite.metadata.image import PartitionState
from kafkalite.model import INTERNAL_PREFIX, NO_EPOCH, Acks
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.control import MARKER_BYTES
from kafkalite.records.header import BatchHeader
from kafkalite.replication.follower import IGNORED, FetchPosition, FollowerStep
from kafkalite.replication.partition import Partition
from kafkalite.storage.compaction_swap import SwapWork as SegmentSwap
from kafkalite.storage.log import Appended
from kafkalite.storage.sync_work import StateWork

logger = logging.getLogger(__name__)

_ACKS_LEADER: Final = int(Acks.LEADER)


class Watcher(Protocol):
    """A follower elsewhere that is to hear of what happens to this partition."""

    def on_appended(self, size_bytes: int) -> None: ...

    def on_moved(self) -> None:
        """The high watermark or the log start is another one."""
        ...

    def on_role_changed(self) -> None: ...


class _Errand:
    """What is done to a follower's log in another thread."""

    __slots__ = ("future", "job", "then")

    def __init__(
        self,
        job: Callable[[], FollowerStep],
        then: Callable[[FollowerStep | None, Exception | None], None],
    ) -> None:
        self.job = job
        self.then = then
        self.future: Future[FollowerStep] | None = None  #: None: a sync of the log has to end first


class _Removal:
    """A log start to be moved, or segments to be replaced by a compacted one: one at a time, beside the loop.

    ``begin`` gives what is to be run, or None; ``finish`` takes its outcome. Both may raise, and are the
    loop's. ``then`` is called with what went wrong.
    """

    __slots__ = ("begin", "finish", "future", "then", "work")

    def __init__(
        self,
        begin: Callable[[], StateWork | SegmentSwap | None],
        finish: Callable[[Any, Exception | None], None],
        then: Callable[[Exception | None], None],
    ) -> None:
        self.begin = begin
        self.finish = finish
        self.then = then
        self.work: StateWork | SegmentSwap | None = None
        self.future: Future[None] | None = None


class HostedPartition:
    """A partition here.

    Invariants: only one with the role of leader has watchers; only a follower is busy; while it is, nobody
    but the errand's thread touches the log.
    """

    __slots__ = (
        "_errand",
        "_is_syncing",
        "_removals",
        "_scheduler",
        "_unread_bytes",
        "_waiters",
        "is_internal",
        "key",
        "log",
        "on_follower_synced",
        "partition",
        "replica_count",
        "told_epoch",
        "watchers",
    )

    def __init__(
        self, partition: Partition, waiters: Waiters, scheduler: SyncScheduler[HostedPartition]
    ) -> None:
        self.partition = partition
        self.log = partition.log
        self.key = partition.topic_partition
        self.is_internal = self.key.topic.startswith(INTERNAL_PREFIX)  #: no client may write to it
        self.replica_count = 1
        self.watchers: dict[int, Watcher] = {}  #: by the follower's node id
        self.on_follower_synced: Callable[[], None] | None = None  #: the fetcher's, while following
        self.told_epoch = NO_EPOCH  #: the leader epoch in which a leader was last told where this one stands
        self._waiters = waiters
        self._scheduler = scheduler
        self._unread_bytes = 0  # appended since the high watermark was last at the log end
        self._is_syncing = False
        self._errand: _Errand | None = None
        self._removals: deque[_Removal] = deque()  # the first one is under way

    def __str__(self) -> str:
        return str(self.key)

    @property
    def high_watermark(self) -> int:
        return self.partition.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """``Partition.last_stable_offset``."""
        return self.partition.last_stable_offset

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    # --- leading

    def append(
        self,
        batch: bytearray | memoryview,
        header: BatchHeader,
        now_ms: int,
        acks: int,
        is_verified: bool = False,
    ) -> tuple[Appended, int]:
        """``Partition.append``; tells followers and readers, at once or when the batch is on the disk.

        Returns with it up to where the log counts as acknowledged now for a producer with these ``acks``.
        Raises InvalidTopicError for a partition of an internal topic.
        """
        if self.is_internal:
            raise InvalidTopicError(f"{self.key} is internal: only brokers write to it")
        appended = self.partition.append(batch, header, now_ms, acks=acks, is_verified=is_verified)
        high_watermark = self._on_appended(appended, len(batch))
        if acks == _ACKS_LEADER:
            log = self.log
            return appended, log.synced_end_offset if log.config.synced_only else log.log_end_offset
        return appended, high_watermark

    def append_state(
        self, batch: bytearray | memoryview, header: BatchHeader, now_ms: int
    ) -> tuple[Appended, int]:
        """``Partition.append_state``; the rest as ``append``, with acks=all."""
        appended = self.partition.append_state(batch, header, now_ms)
        return appended, self._on_appended(appended, len(batch))

    def append_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, is_commit: bool, now_ms: int
    ) -> tuple[Appended, int]:
        """``Partition.append_marker``; the rest as ``append``, with acks=all."""
        appended = self.partition.append_marker(
            producer_id, producer_epoch, coordinator_epoch, is_commit, now_ms
        )
        return appended, self._on_appended(appended, MARKER_BYTES)

    def _on_appended(self, appended: Appended, size_bytes: int) -> int:
        """Tell whoever waits for records, and have them synced. Returns the high watermark."""
        high_watermark = self.partition.high_watermark
        if not appended.is_duplicate:
            if high_watermark > appended.last_offset:
                self._unread_bytes = 0
                self._waiters.on_high_watermark(self.key, high_watermark, size_bytes)
            else:
                self._unread_bytes += size_bytes
                if self.log.config.synced_only:
                    self._scheduler.mark(self)
            if self.watchers:
                for watcher in self.watchers.values():
                    watcher.on_appended(size_bytes)
        return high_watermark

    def on_high_watermark_moved(self) -> None:
        """Tell whoever waits for it. The bytes told may be more than can be read: readers look again."""
        high_watermark = self.partition.high_watermark
        readable_bytes = self._unread_bytes
        if high_watermark >= self.log.log_end_offset:
            self._unread_bytes = 0
        self._waiters.on_high_watermark(self.key, high_watermark, readable_bytes)
        for watcher in self.watchers.values():
            watcher.on_moved()

    def on_in_sync_changed(self, *, moved: bool) -> None:
        """The in-sync set or its minimum is another one; ``moved``: and so is the high watermark."""
        if moved:
            self.on_high_watermark_moved()
        error = self.partition.acknowledgement_error
        if error is not None:
            self._waiters.on_uncommittable(self.key, error)
        self.on_low_watermark()

    def delete_before(self, offset: int, then: Callable[[Exception | None], None]) -> None:
        """Move the log start up to ``offset``, durably, beside the loop; ``then`` with what went wrong."""
        self._remove(_Removal(partial(self.log.begin_delete, offset), self._finish_delete, then))

    def _finish_delete(self, work: StateWork, failure: Exception | None) -> None:
        self.log.finish_delete(work, failure)
        self._on_log_start_moved()

    def swap(self, work: SegmentSwap, then: Callable[[Exception | None], None]) -> None:
        """Have a compacted segment take its place, beside the loop; ``then`` with what went wrong."""
        self._remove(_Removal(partial(self.log.begin_swap, work), self.log.finish_swap, then))

    def _remove(self, removal: _Removal) -> None:
        self._removals.append(removal)
        if len(self._removals) == 1 and self._errand is None:
            self._begin_removals()

    def _begin_removals(self) -> None:
        while self._removals:
            removal = self._removals[0]
            try:
                work = removal.work = removal.begin()
            except (BrokerError, StorageError, OSError) as error:
                self._removals.popleft()
                self._check_offline()
                removal.then(error)
                continue
            if work is None:
                self._removals.popleft()
                removal.then(None)
                continue
            future = removal.future = self._scheduler.submit(work.run)
            if not future.done():
                future.add_done_callback(partial(self._on_removal_run, removal))
                return
            self._finish_removal(removal)

    def _on_removal_run(self, removal: _Removal, _: Future[None]) -> None:
        """In the executor's thread."""
        self._scheduler.call_soon_threadsafe(partial(self._go_on_removing, removal))

    def _go_on_removing(self, removal: _Removal) -> None:
        assert removal.future is not None
        if self._removals and self._removals[0] is removal and not removal.future.cancelled():
            self._finish_removal(removal)
            self._begin_removals()

    def _finish_removal(self, removal: _Removal) -> None:
        self._removals.popleft()
        assert removal.future is not None
        failure = removal.future.exception()
        if failure is not None and not isinstance(failure, BrokerError | StorageError | OSError):
            raise failure
        error: Exception | None = None
        try:
            removal.finish(removal.work, failure)
        except (BrokerError, StorageError, OSError) as refusal:
            error = refusal
            self._check_offline()
        removal.then(error)

    def _settle_removals(self) -> None:
        """Return when the log belongs to the loop; what has not begun is given up."""
        if not self._removals:
            return
        first = self._removals[0]
        if first.future is not None and not first.future.cancel():
            wait((first.future,))
            self._finish_removal(first)
        given_up, self._removals = self._removals, deque()
        for removal in given_up:
            removal.then(NotLeaderOrFollowerError(f"the role of {self.key} changes; ask its leader again"))

    @property
    def is_deleting(self) -> bool:
        """Whether the log start is being moved, or segments are being replaced."""
        return bool(self._removals)

    def _on_log_start_moved(self) -> None:
        for watcher in self.watchers.values():
            watcher.on_moved()
        self.on_low_watermark()

    def on_low_watermark(self) -> None:
        """A log start, here or at a follower, or the in-sync set has changed: tell whose deletion waits."""
        if self._waiters.awaits_deletion(self.key):
            self._waiters.on_low_watermark(self.key, self.partition.low_watermark)

    # --- roles

    def lead(self, state: PartitionState, *, now_ms: int, known_high_watermark: int) -> None:
        """``Partition.become_leader``. Who waits for a batch of an earlier epoch is told that it ended."""
        self.settle()
        partition = self.partition
        self.replica_count = len(state.replicas)
        if partition.is_leader and partition.leader_epoch != state.leader_epoch:
            self._end_leadership(state)
        moved = partition.become_leader(state, now_ms=now_ms, known_high_watermark=known_high_watermark)
        self.on_in_sync_changed(moved=moved)

    def follow(self, state: PartitionState) -> None:
        """``Partition.become_follower``; whoever waits is sent elsewhere."""
        self.settle()
        was_leader = self.partition.is_leader
        self.replica_count = len(state.replicas)
        self.partition.become_follower(state)
        if was_leader:
            self._end_leadership(state)

    def resign(self, error: Exception) -> None:
        """Have no role; whoever waits hears ``error``."""
        self.settle()
        self.partition.resign()
        self._waiters.on_failed(self.key, error)
        self._dismiss_watchers()

    def _end_leadership(self, state: PartitionState) -> None:
        self._unread_bytes = 0
        message = f"{self.key} is led by broker {state.leader} in epoch {state.leader_epoch} now"
        self._waiters.on_failed(self.key, NotLeaderOrFollowerError(message))
        self._dismiss_watchers()

    def _dismiss_watchers(self) -> None:
        watchers, self.watchers = self.watchers, {}
        for watcher in watchers.values():
            watcher.on_role_changed()

    # --- following

    def on_fetched(
        self,
        answer: ReplicaFetchedPartition,
        batches: memoryview,
        asked: FetchPosition,
        wall_ms: int,
        then: Callable[[FollowerStep | None, Exception | None], None],
    ) -> None:
        """``Partition.on_fetched``, and ``then`` with its step or what it raised.

        Records are written at once, and synced in the next round. What syncs by itself, a truncation or
        another log start, runs beside the loop; nobody else may touch the log until ``then``. An answer that
        comes meanwhile is ignored, and so asked for again.
        """
        syncs = answer.error_code or (
            answer.diverging_epoch != NO_EPOCH
            or answer.log_start_offset > self.log.log_start_offset
            or self.partition.is_overlapped(batches)
        )
        if self._errand is not None or (syncs and self._removals):
            then(IGNORED, None)
            return
        job = partial(self.partition.on_fetched, answer, batches, now_ms=wall_ms, asked=asked)
        if syncs:
            self._errand = _Errand(job, then)
            if not self._is_syncing:
                self._run_errand(self._errand)
            return
        try:
            step = job()
        except Exception as error:
            self._check_offline()
            self._sync_rest()
            then(None, error)
        else:
            if step.appended_bytes and self.log.config.synced_only:
                self._scheduler.mark(self)
            then(step, None)

    @property
    def is_busy(self) -> bool:
        """Whether the log is another thread's for now."""
        return self._errand is not None

    def settle(self) -> None:
        """Return when the log belongs to the loop: an errand that has not begun is given up."""
        self._settle_removals()
        errand = self._errand
        if errand is None:
            return
        self._errand = None
        if errand.future is None or errand.future.cancel():
            errand.then(None, StorageError("it was not done, for the replica's role changes"))
        else:
            wait((errand.future,))
            self._finish_errand(errand)

    def _run_errand(self, errand: _Errand) -> None:
        future = errand.future = self._scheduler.submit(errand.job)
        if future.done():
            self._on_errand_done(errand)
        else:
            future.add_done_callback(
                lambda _: self._scheduler.call_soon_threadsafe(partial(self._on_errand_done, errand))
            )

    def _on_errand_done(self, errand: _Errand) -> None:
        if self._errand is errand:
            self._errand = None
            self._finish_errand(errand)
            if self._removals and self._errand is None:
                self._begin_removals()

    def _finish_errand(self, errand: _Errand) -> None:
        assert errand.future is not None
        error = errand.future.exception()
        self._check_offline()
        self._sync_rest()
        if error is None:
            errand.then(errand.future.result(), None)
        elif isinstance(error, Exception):
            errand.then(None, error)
        else:
            raise error

    def _sync_rest(self) -> None:
        """Have synced what was written, also before something failed."""
        if self.log.config.synced_only and self.log.has_unsynced and self.log.offline_reason is None:
            self._scheduler.mark(self)

    # --- what the sync scheduler calls

    def begin_sync(self) -> SyncWork | None:
        if self._errand is not None:
            return None
        work = self.log.begin_sync()
        self._is_syncing = work is not None
        return work

    def finish_sync(self, work: Any, error: Exception | None) -> None:
        self._is_syncing = False
        log = self.log
        log.finish_sync(work, error)
        if log.offline_reason is not None:
            self.on_offline()
        elif error is not None:  # the disk is full: not durable, not lost; a later round tries again
            self._waiters.on_failed(self.key, error)
        elif self.partition.is_leader:
            self._waiters.on_synced(self.key, log.synced_end_offset)
            if self.partition.on_synced():
                self.on_high_watermark_moved()
        elif self.on_follower_synced is not None:
            self.on_follower_synced()
        if self._errand is not None and self._errand.future is None:
            self._run_errand(self._errand)

    def _check_offline(self) -> None:
        if self.log.offline_reason is not None:
            self.on_offline()

    def on_offline(self) -> None:
        """The log takes no more: whoever waits hears of it now."""
        reason = self.log.offline_reason
        logger.error("partition offline %s", Fields(partition=self.key, reason=reason))
        self._waiters.on_failed(self.key, LogOfflineError(f"{self.key} is offline: {reason}"))

    # --- what is asked of it

    def stored(self) -> StoredPartition:
        """What there is of it on the disk; of a log that can't be read, only why."""
        log = self.log
        try:
            size_bytes, segment_count = log.size_bytes, log.segment_count
        except StorageError as error:
            return StoredPartition(*self.key, 0, 0, 0, 0, log.offline_reason or str(error))
        return StoredPartition(
            *self.key,
            size_bytes,
            segment_count,
            log.log_start_offset,
            log.log_end_offset,
            log.offline_reason,
        )


class StoredPartition(NamedTuple):
    """What this broker has of one partition on its disk."""

    topic: str
    partition: int
    size_bytes: int
    segment_count: int
    log_start_offset: int
    log_end_offset: int
    offline_reason: str | None
