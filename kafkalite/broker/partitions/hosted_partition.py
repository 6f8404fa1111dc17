"""Owns one partition on this broker: changes its role, runs its disk jobs, and notifies waiting requests.

Produce and fetch requests and coordinators use the ``Partition`` itself. Replication, housekeeping and
deletions use its owner. ``disk_work`` decides when a disk job starts; this module runs it in the executor.
"""

# Long because one object owns the role, the disk jobs and the waiting requests of a partition.

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from kafkalite.broker.partitions.disk_work import DiskWork
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler, SyncWork
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.errors import (
    BrokerError,
    LogOfflineError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    StorageError,
    StorageExhaustedError,
)
from kafkalite.log_fields import Fields
from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_EPOCH, NO_OFFSET
from kafkalite.protocol.messages.admin import LogDirPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition, ReplicaFetchPartition, ReplicaReport
from kafkalite.replication.follower import FetchPosition, FollowerStep, NextFetch
from kafkalite.replication.partition import Partition, PartitionSettings, ReplicaFetchResult
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.log import Log, Slice
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.sync_work import StateWork

logger = logging.getLogger(__name__)

_REFUSALS: Final = (BrokerError, StorageError, OSError)
#: More than any fetch waits for. When a role begins, the bytes above the high watermark are not counted.
_UNKNOWN_BYTES: Final = 1 << 62
#: A consumer asks the leader again after metadata.max.age.ms, five minutes by default: twice as long.
READ_NEAR_MS: Final = 600_000


class Watcher(Protocol):
    """A follower on another broker that fetches this partition and is notified of changes."""

    def on_appended(self, size_bytes: int) -> None: ...

    def on_moved(self) -> None:
        """Send the follower the new high watermark or log start. Called when one of them has moved."""
        ...

    def on_read_near(self, *, is_read: bool = True) -> None:
        """Send the follower each new high watermark at once, because consumers read from it (R66), or no
        longer."""
        ...

    def on_role_changed(self) -> None: ...


class FetchListener(Protocol):
    """The fetcher that copies this partition from its leader, while this replica follows."""

    def on_progress(self, outcome: NextFetch | Exception) -> None:
        """Schedule the next fetch as ``outcome`` requires, or handle ``outcome`` if it is an exception.

        Called after a sync, and when an exclusive job has ended or was dropped.
        """
        ...


@dataclass(slots=True, eq=False)
class _Exclusive:
    """An exclusive job (``disk_work``) that applies a leader's response to a follower's log."""

    response: ReplicaFetchedPartition
    run: Callable[[], FollowerStep]
    future: Future[FollowerStep] | None = None  #: None until the work has begun


class Relocation(Protocol):
    """An exclusive job in which a copy in another data directory replaces the log (R85)."""

    def begin(self) -> None:
        """Freeze the log. Called on the loop when no other job uses the log. Raises StorageError, OSError."""
        ...

    def run(self) -> None:
        """Complete the copy. Called in the executor. Raises StorageError, OSError."""
        ...

    def finish(self) -> Log:
        """Return the copy, which replaces the log. Called on the loop after ``run``. Raises StorageError,
        OSError; then the log is used as before."""
        ...

    def give_up(self, error: Exception) -> None:
        """Unfreeze the log. Called on the loop if the job failed or was dropped."""
        ...


@dataclass(slots=True, eq=False)
class _Relocating:
    work: Relocation
    future: Future[None] | None = None  #: None until the work has begun


@dataclass(slots=True, eq=False)
class _Deletion:
    """A job that moves the log start, or replaces segments by a compacted one.

    ``begin`` returns the work for the executor, or None if there is none. ``finish`` receives that work, and
    its error or None. Both run on the loop and may raise. Finally ``then`` receives the error of the job, or
    None if it succeeded.
    """

    begin: Callable[[], StateWork | SwapWork | None]
    finish: Callable[[Any, Exception | None], None]
    then: Callable[[Exception | None], None]
    work: StateWork | SwapWork | None = None
    future: Future[None] | None = None


class HostedPartition:
    """One partition on this broker, with its log, its role and its disk jobs.

    Invariants: only a leader has watchers (followers on other brokers that are notified of appends and of a
    new high watermark). Only a follower has an exclusive job, apart from relocations. While the job runs, no
    sync or deletion does.
    """

    __slots__ = (
        "_disk",
        "_read_near_until_ms",
        "_scheduler",
        "_unread_bytes",
        "_waiters",
        "_watchers",
        "is_moving",
        "key",
        "listener",
        "lost_records",
        "on_disk_failed",
        "on_interrupted",
        "partition",
        "reported_epoch",
        "topic_id",
    )

    def __init__(
        self, partition: Partition, waiters: Waiters, scheduler: SyncScheduler[HostedPartition]
    ) -> None:
        self.partition = partition  #: serves clients' requests
        partition.observer = self
        self.key = partition.key
        self.topic_id = partition.topic_id
        self.listener: FetchListener | None = None  #: the fetcher, while this replica follows
        #: Called when ``must_reopen`` becomes true.
        self.on_interrupted: Callable[[], None] = lambda: None
        #: Called when the log has gone offline for another reason.
        self.on_disk_failed: Callable[[], None] = lambda: None
        #: Whether a copy of the log is made in another data directory, so that no compaction may change it.
        self.is_moving = False
        self.reported_epoch = NO_EPOCH  #: the leader epoch of the last position reported to a leader
        self.lost_records = 0  #: committed records truncated after unclean elections, in this process (R49)
        self._watchers: dict[int, Watcher] = {}  # by node id of the follower
        # Until when consumers may read from the followers to which this leader has directed some.
        self._read_near_until_ms: dict[int, int] = {}
        self._waiters = waiters
        self._scheduler = scheduler
        # The bytes that were appended since the high watermark was last at the log end.
        self._unread_bytes = _UNKNOWN_BYTES
        self._disk: DiskWork[_Exclusive | _Relocating, _Deletion] = DiskWork()

    def __str__(self) -> str:
        return str(self.key)

    # --- state

    @property
    def is_leader(self) -> bool:
        return self.partition.is_leader

    @property
    def leader_id(self) -> int:
        return self.partition.leader_id

    @property
    def leader_epoch(self) -> int:
        return self.partition.leader_epoch

    @property
    def high_watermark(self) -> int:
        return self.partition.high_watermark

    @property
    def log_start_offset(self) -> int:
        return self.partition.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.partition.log_end_offset

    @property
    def offline_reason(self) -> str | None:
        return self.partition.offline_reason

    @property
    def is_damaged(self) -> bool:
        return self.partition.log.is_damaged

    def mark_damaged(self, cause: str) -> None:
        """Take the log offline until it is fetched again or an operator accepts the loss (R24, R45, R52)."""
        self.partition.log.mark_damaged(cause)

    @property
    def must_reopen(self) -> bool:
        """Whether a truncation lacked disk space or descriptors, so that the log must be recovered (R55)."""
        return self.partition.log.must_reopen

    @property
    def torn_records(self) -> int:
        """The number of records that recovery removed from the end of the log when the log was opened."""
        return self.partition.log.torn_records

    @property
    def is_compacted(self) -> bool:
        return self.partition.log.config.is_compacted

    @property
    def min_insync_replicas(self) -> int:
        return self.partition.settings.min_insync_replicas

    @property
    def is_busy(self) -> bool:
        """Whether an exclusive job waits or runs, so that the log must not be used."""
        return self._disk.exclusive is not None

    def uses(self, log: Log) -> bool:
        """Whether ``log`` is still the log of the partition."""
        return self.partition.log is log

    def idle_log(self) -> Log | None:
        """Return the log for maintenance, or None if it is offline or a disk job may change it."""
        log, disk = self.partition.log, self._disk
        may_change = disk.exclusive is not None or disk.is_deleting
        return None if may_change or log.offline_reason is not None else log

    def stored(self) -> LogDirPartition:
        """Return sizes and offsets, and why the log is offline. All numbers are 0 if reading fails."""
        log = self.partition.log
        try:
            size_bytes, segment_count = log.size_bytes, log.segment_count
        except StorageError as error:
            return LogDirPartition(*self.key, 0, 0, 0, 0, log.offline_reason or str(error))
        start, end = log.log_start_offset, log.log_end_offset
        return LogDirPartition(*self.key, size_bytes, segment_count, start, end, log.offline_reason)

    def report(self, refused_offset: int = NO_OFFSET) -> ReplicaReport:
        """Return the report by which the controller compares this log with other replicas (R46).

        ``refused_offset`` is the offset to which the replica refused to truncate its log (R49), or NO_OFFSET.
        """
        partition, log = self.partition, self.partition.log
        try:
            last_epoch = log.latest_epoch
        except StorageError:
            last_epoch = NO_EPOCH
        return ReplicaReport(
            self.topic_id,
            self.key.partition,
            partition.leader_epoch,
            last_epoch,
            log.log_end_offset,
            log.offline_reason is not None,
            max(partition.committed_end, 0 if log.damage is None else log.damage.known_end_offset),
            refused_offset,
        )

    # --- leading

    def on_appended(self, last_offset: int, size_bytes: int, high_watermark: int) -> None:
        """Notify waiting requests and followers of appended records, and mark the log if it needs a sync."""
        if high_watermark > last_offset:
            self._unread_bytes = 0
            self._waiters.on_high_watermark(self.key, high_watermark, size_bytes)
        else:
            self._unread_bytes += size_bytes
            if self.partition.is_synced_only:
                self._scheduler.mark(self)
        if self._watchers:
            for watcher in self._watchers.values():
                watcher.on_appended(size_bytes)

    def on_high_watermark_moved(self) -> None:
        """Notify waiting requests and followers of the new high watermark.

        A fetch that is woken reads again: not all appended bytes may be below the high watermark yet.
        """
        high_watermark = self.partition.high_watermark
        readable_bytes = self._unread_bytes
        if high_watermark >= self.partition.log.log_end_offset:
            self._unread_bytes = 0
        self._waiters.on_high_watermark(self.key, high_watermark, readable_bytes)
        for watcher in self._watchers.values():
            watcher.on_moved()

    def _on_in_sync_changed(self, *, moved: bool) -> None:
        """Notify waiters of a changed ISR or min.insync.replicas. ``moved``: the high watermark has moved."""
        if moved:
            self.on_high_watermark_moved()
        error = self.partition.acknowledgement_error
        if error is not None:
            self._waiters.on_uncommittable(self.key, error)
        self._on_low_watermark()

    def _on_low_watermark(self) -> None:
        """Notify waiting deletions. Called when a replica's log start or the ISR may have changed."""
        if self._waiters.awaits_deletion(self.key):
            self._waiters.on_low_watermark(self.key, self.partition.low_watermark)

    def on_replica_fetch(
        self, node_id: int, broker_epoch: int, asked: ReplicaFetchPartition, watcher: Watcher, now_ms: int
    ) -> ReplicaFetchResult:
        """Call ``Partition.on_replica_fetch``, which may raise. Register ``watcher`` for the follower.

        Raises OffsetNotAvailableError for a follower that is not in sync while segments of a compacted log
        are replaced: it could receive an old record, and not the tombstone that is being removed (R41).
        """
        if self._disk.is_deleting and self.is_compacted and node_id not in self.partition.in_sync_replicas:
            raise OffsetNotAvailableError(f"the log of {self.key} is being changed; fetch it again")
        result = self.partition.on_replica_fetch(
            node_id,
            broker_epoch=broker_epoch,
            leader_epoch=asked.leader_epoch,
            fetch_offset=asked.fetch_offset,
            last_epoch=asked.last_epoch,
            synced_end_offset=asked.synced_end_offset,
            log_start_offset=asked.log_start_offset,
            now_ms=now_ms,
        )
        self._watchers[node_id] = watcher
        if node_id in self._read_near_until_ms:
            is_read = now_ms < self._read_near_until_ms[node_id]
            if not is_read:
                del self._read_near_until_ms[node_id]
            watcher.on_read_near(is_read=is_read)
        if result.moved:
            self.on_high_watermark_moved()
        self._on_low_watermark()
        return result

    def read_for_replica(self, offset: int, max_bytes: int, *, is_checked: bool = True) -> Slice:
        return self.partition.read_for_replica(offset, max_bytes, is_checked=is_checked)

    def awaits(self, node_id: int) -> bool:
        """Whether the high watermark waits for the follower, as ``Partition.awaits``."""
        return self.partition.awaits(node_id)

    def forget_follower(self, node_id: int) -> None:
        """Discard the progress of the follower ``node_id``."""
        self.partition.forget_follower(node_id)

    def near_replica(self, offset: int, is_near: Callable[[int], bool], now_ms: int) -> int | None:
        """Return the follower from which a consumer should read ``offset``, as ``Partition.near_replica``.

        For READ_NEAR_MS that follower receives each new high watermark at once, also if it opens another
        fetch session. Followers that have no fetch session are not considered.
        """
        watchers = self._watchers
        node_id = self.partition.near_replica(offset, lambda one: one in watchers and is_near(one))
        if node_id is not None:
            self._read_near_until_ms[node_id] = now_ms + READ_NEAR_MS
            watchers[node_id].on_read_near()
        return node_id

    def unwatch(self, node_id: int, watcher: Watcher) -> None:
        """Stop notifying ``watcher``, unless another watcher has already replaced it."""
        if self._watchers.get(node_id) is watcher:
            del self._watchers[node_id]

    # --- roles

    def lead(self, state: PartitionState, *, now_ms: int, known_high_watermark: int) -> None:
        """Call ``Partition.become_leader``. Fail requests that have waited since an earlier leader epoch."""
        self.complete_work()
        partition = self.partition
        if partition.is_leader and partition.leader_epoch != state.leader_epoch:
            self._end_leadership(state)
        elif not partition.is_leader:
            self._wake_near_readers()
        was_offline = partition.offline_reason is not None
        moved = partition.become_leader(state, now_ms=now_ms, known_high_watermark=known_high_watermark)
        self._on_in_sync_changed(moved=moved)
        if not was_offline:
            self._check_offline()

    def follow(self, state: PartitionState, *, known_high_watermark: int = 0) -> None:
        """Call ``Partition.become_follower``. If this broker led, fail waiting requests."""
        self.complete_work()
        was_leader = self.partition.is_leader
        self.partition.become_follower(state, known_high_watermark=known_high_watermark)
        if was_leader:
            self._end_leadership(state)
        else:
            self._wake_near_readers()
        self._sync_rest()

    def _wake_near_readers(self) -> None:
        """Let the fetches that wait at this follower read again: its role or in-sync state has changed."""
        self._waiters.on_failed(self.key, NotLeaderOrFollowerError(f"the role of {self.key} changes"))

    def resign(self, error: Exception) -> None:
        """Give up the role, and fail waiting requests with ``error``."""
        self.complete_work()
        self.partition.resign()
        self._waiters.on_failed(self.key, error)
        self._dismiss_watchers()

    def _end_leadership(self, state: PartitionState) -> None:
        self._unread_bytes = _UNKNOWN_BYTES
        message = f"{self.key} is led by broker {state.leader} in epoch {state.leader_epoch} now"
        self._waiters.on_failed(self.key, NotLeaderOrFollowerError(message))
        self._dismiss_watchers()

    def _dismiss_watchers(self) -> None:
        watchers, self._watchers = self._watchers, {}
        self._read_near_until_ms.clear()
        for watcher in watchers.values():
            watcher.on_role_changed()

    def reconfigure(self, config: LogConfig, settings: PartitionSettings) -> None:
        """Apply a changed configuration of the topic."""
        self.complete_work()
        self._on_in_sync_changed(moved=self.partition.reconfigure(config, settings))
        self._sync_rest()

    # --- following

    def check_serves_near(self, current_leader_epoch: int) -> None:
        """Raise an error unless consumers may read from this follower (R65).

        Raises the errors of ``Partition.check_serves_near``, and OffsetNotAvailableError while a truncation
        or a new log start is applied.
        """
        self.partition.check_serves_near(current_leader_epoch)
        if self.is_busy:
            raise OffsetNotAvailableError(f"the log of {self.key} is being changed; read from the leader")

    def fetch_position(self) -> FetchPosition | None:
        """Return the position for the next fetch, or None while an exclusive job waits or runs.

        ``listener`` is called at the end of that job. Raises the errors of ``Partition.fetch_position``.
        """
        if self._disk.exclusive is not None:
            return None
        position = self.partition.fetch_position()
        self.reported_epoch = position.leader_epoch
        return position

    def on_fetched(
        self, response: ReplicaFetchedPartition, batches: memoryview, asked: FetchPosition, wall_ms: int
    ) -> NextFetch | None:
        """Apply a leader's response. Return when to fetch next, or None if ``listener`` is notified later.

        A truncation or a new log start is an exclusive job (``disk_work``). A response that arrives during
        such a job, or requires a job that cannot be added now, is ignored and must be fetched again. Raises
        the errors of ``Partition.on_fetched``.
        """
        if self._disk.exclusive is not None:
            return NextFetch.REPEATED
        apply = partial(self.partition.on_fetched, response, batches, now_ms=wall_ms, asked=asked)
        if self.partition.waits_for_disk(response, batches):
            if not self._disk.may_add_exclusive:
                return NextFetch.REPEATED
            job = _Exclusive(response, apply)
            outcome = self._start_exclusive(job) if self._disk.add_exclusive(job) is job else None
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        try:
            step = apply()
        except Exception:
            self._check_offline()
            self._sync_rest()
            raise
        is_synced_only = self.partition.is_synced_only
        if step.appended_bytes:
            self._unread_bytes += step.appended_bytes
            if self.partition.syncs_appends:
                self._scheduler.mark(self)
        if step.high_watermark_moved:
            self.on_high_watermark_moved()
        return step.next_fetch(is_synced_only=is_synced_only)

    def relocate(self, work: Relocation) -> bool:
        """Replace the log by a nearly complete copy, as soon as no sync round uses it (R85). Return False if
        other work prevents that now."""
        if not self._disk.may_add_exclusive or self._disk.is_deleting:
            return False
        job = _Relocating(work)
        if self._disk.add_exclusive(job) is job:
            self._start_exclusive(job)
        return True

    def _end_relocation(self, job: _Relocating, error: BaseException | None) -> None:
        log: Log | None = None
        if error is None:
            try:
                log = job.work.finish()
            except Exception as failure:
                error = failure
        if log is None:
            assert error is not None, "finish returns the log"
            if isinstance(error, Exception):
                job.work.give_up(error)
            if not isinstance(error, _REFUSALS):
                raise error
            return
        is_higher = self.partition.replace_log(log)
        if self.partition.is_leader:
            self._waiters.on_synced(self.key, self.partition.log.synced_end_offset)
            if is_higher:
                self.on_high_watermark_moved()

    def _start_exclusive(self, job: _Exclusive | _Relocating) -> NextFetch | Exception | None:
        """Run the exclusive job. Return its outcome if it has already ended, else None."""
        future: Future[Any]
        if isinstance(job, _Relocating):
            try:
                job.work.begin()
            except _REFUSALS as error:
                following = self._disk.end_exclusive()
                job.work.give_up(error)
                self._start_deletion(following)
                return NextFetch.NOW
            future = job.future = self._scheduler.submit(job.work.run)
        else:
            future = job.future = self._scheduler.submit(job.run)
        if future.done():
            return self._end_exclusive(job, self._disk.end_exclusive())
        future.add_done_callback(
            lambda _: self._scheduler.call_soon_threadsafe(partial(self._on_exclusive_run, job))
        )
        return None

    def _on_exclusive_run(self, job: _Exclusive | _Relocating) -> None:
        if self._disk.exclusive is job:
            self._notify(self._end_exclusive(job, self._disk.end_exclusive()))

    def _end_exclusive(
        self, job: _Exclusive | _Relocating, following: _Deletion | None
    ) -> NextFetch | Exception:
        assert job.future is not None
        error = job.future.exception()
        if isinstance(job, _Relocating):
            self._end_relocation(job, error)
            self._sync_rest()
            self._start_deletion(following)
            return NextFetch.NOW
        self._check_offline()
        self._sync_rest()
        self._start_deletion(following)
        if isinstance(error, Exception):
            return error
        step = job.future.result()
        self._unread_bytes += step.appended_bytes
        if step.high_watermark_moved:
            self.on_high_watermark_moved()
        if step.truncated_to is not None:
            epoch = job.response.diverging_epoch
            logger.log(
                logging.ERROR if step.lost_records else logging.INFO,
                "log truncated %s",
                Fields(
                    partition=self.key,
                    to=step.truncated_to,
                    epoch=epoch,
                    committed_records_lost=step.lost_records,
                ),
            )
            self.lost_records += step.lost_records
        next_fetch = step.next_fetch(is_synced_only=self.partition.is_synced_only)
        # During the job ``fetch_position`` returned None, so the fetcher must call it again now.
        return NextFetch.NOW if next_fetch is NextFetch.NOT_DUE else next_fetch

    def _notify(self, outcome: NextFetch | Exception) -> None:
        if self.listener is not None:
            self.listener.on_progress(outcome)
        elif isinstance(outcome, AssertionError):
            raise outcome

    # --- deletions

    def delete_before(self, offset: int, then: Callable[[Exception | None], None]) -> None:
        """Move the log start to ``offset`` durably, then call ``then`` with the error, or with None."""
        self._add_deletion(
            _Deletion(lambda: self.partition.log.begin_delete(offset), self._finish_delete, then)
        )

    def _finish_delete(self, work: StateWork, failure: Exception | None) -> None:
        self.partition.log.finish_delete(work, failure)
        for watcher in self._watchers.values():
            watcher.on_moved()
        self._on_low_watermark()

    def swap(self, work: SwapWork, then: Callable[[Exception | None], None]) -> None:
        """Replace segments by a compacted one if ``work`` is still valid. Call ``then`` (error or None)."""
        if self.is_moving:
            then(NotLeaderOrFollowerError(f"the log of {self.key} moves to another disk"))
            return
        log = self.partition.log
        self._add_deletion(_Deletion(partial(log.begin_swap, work), log.finish_swap, then))

    def _add_deletion(self, deletion: _Deletion) -> None:
        self._start_deletion(self._disk.add_deletion(deletion))

    def _start_deletion(self, job: _Deletion | None) -> None:
        """Run the deletion. If it ends at once, run the next one, and so on."""
        while job is not None and self._disk.deletion is job:
            try:
                work = job.work = job.begin()
            except _REFUSALS as error:
                following = self._disk.end_deletion()
                self._check_offline()
                job.then(error)
            else:
                if work is not None:
                    future = job.future = self._scheduler.submit(work.run)
                    if not future.done():
                        future.add_done_callback(partial(self._on_deletion_run, job))
                        return
                following = self._disk.end_deletion()
                self._end_deletion(job)
            job = following

    def _on_deletion_run(self, job: _Deletion, _: Future[None]) -> None:
        """Continue the deletion on the loop. Called in the executor after the deletion's work."""
        self._scheduler.call_soon_threadsafe(partial(self._go_on_deleting, job))

    def _go_on_deleting(self, job: _Deletion) -> None:
        if self._disk.deletion is job:
            following = self._disk.end_deletion()
            self._end_deletion(job)
            self._start_deletion(following)

    def _end_deletion(self, job: _Deletion) -> None:
        error: Exception | None = None
        if job.future is not None:
            failure = job.future.exception()
            if failure is not None and not isinstance(failure, _REFUSALS):
                raise failure
            try:
                job.finish(job.work, failure)
            except _REFUSALS as refusal:
                error = refusal
                self._check_offline()
        job.then(error)

    def complete_work(self) -> None:
        """Block until the running exclusive job and deletion end. Drop the jobs that have not begun.

        A running sync round may continue.
        """
        exclusive, deletion, waiting = self._disk.give_up()
        if deletion is not None:
            if _has_begun(deletion.future):
                self._end_deletion(deletion)
            else:
                waiting.insert(0, deletion)
        for one in waiting:
            one.then(NotLeaderOrFollowerError(f"the role of {self.key} changes; ask its leader again"))
        if exclusive is not None:
            if _has_begun(exclusive.future):
                self._notify(self._end_exclusive(exclusive, None))
            elif isinstance(exclusive, _Relocating):
                exclusive.work.give_up(StorageError(f"the role of {self.key} changes"))
                self._notify(NextFetch.NOW)
            else:
                self._notify(StorageError(f"a response for {self.key} was not applied: its role changes"))

    # --- syncing

    def _sync_rest(self) -> None:
        """Mark the log for the next sync round, if appended batches must be synced soon (R7, R68)."""
        if self.partition.syncs_appends:
            self.mark_unsynced()

    def mark_unsynced(self) -> bool:
        """Mark the log for the next sync round if it has unsynced batches, whatever its durability.

        Return False if it has none or is offline. During an exclusive job, return True without marking it.
        """
        log = self.partition.log
        if not log.has_unsynced or log.offline_reason is not None:
            return False
        if self._disk.exclusive is None:
            self._scheduler.mark(self)
        return True

    def begin_sync(self) -> SyncWork | None:
        """Return the sync work of the log, or None if nothing can be synced now. Called by the scheduler."""
        work = None
        try:
            if self._disk.exclusive is None:
                work = self.partition.log.begin_sync()
        except StorageExhaustedError as error:
            self._postpone_sync(error)
        except LogOfflineError:  # concerns this log alone, as a failed sync does
            self.on_offline()
        if work is not None:
            self._disk.begin_sync()
        return work

    def finish_sync(self, work: Any, error: Exception | None) -> None:
        """Process the result of a sync round. Called by the scheduler."""
        job = self._disk.end_sync()
        partition = self.partition
        log = partition.log
        log.finish_sync(work, error)
        if log.offline_reason is not None:
            self.on_offline()
        elif error is not None:
            if isinstance(error, StorageExhaustedError):  # otherwise the log was closed meanwhile
                self._postpone_sync(error)
        elif partition.is_leader:
            self._waiters.on_synced(self.key, log.synced_end_offset)
            if partition.on_synced():
                self.on_high_watermark_moved()
        else:
            self._notify(NextFetch.NOW)
        if job is not None and self._disk.exclusive is job:
            outcome = self._start_exclusive(job)
            if outcome is not None:
                self._notify(outcome)

    def _postpone_sync(self, error: Exception) -> None:
        self._waiters.on_failed(self.key, error)
        self._scheduler.postpone(self)

    def _check_offline(self) -> None:
        if self.partition.offline_reason is not None:
            self.on_offline()

    def on_offline(self) -> None:
        """Log the failure and fail waiting requests. Called when the log refuses further writes."""
        reason = self.partition.offline_reason
        logger.error("partition offline %s", Fields(partition=self.key, reason=reason))
        self._waiters.on_failed(self.key, LogOfflineError(f"{self.key} is offline: {reason}"))
        if self.must_reopen:
            self.on_interrupted()
        else:
            self.on_disk_failed()


def _has_begun(future: Future[Any] | None) -> bool:
    """Cancel the job if it has not begun, otherwise wait for its end. Return whether it had begun."""
    if future is None or future.cancel():
        return False
    wait((future,))
    return True
