"""Runs the periodic passes of a broker over its logs.

The passes roll and delete segments, remove the files of deleted segments, write recovery points, and retry
failed openings of logs. A pass over thousands of logs lets requests run after every LOGS_PER_TURN logs. Logs
have no timers of their own. The cleaner and the scrubber have modules of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.cleaner import Cleaner
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.scrubber import Scrubber
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.tasks import TaskSet
from kafkalite.clock import Clock
from kafkalite.errors import StorageError
from kafkalite.log_fields import Fields
from kafkalite.storage.log import Log
from kafkalite.storage.log_dirs import LogDirs

logger = logging.getLogger(__name__)

LOGS_PER_TURN: Final = 50

#: The delay after which the synced ends of logs that have moved are recorded on disk (R24).
RECORD_DELAY_MS: Final = 800
RETRY_INTERVAL_MS: Final = 1_000
#: How often a node with several data directories tries to write each of them (R81).
PROBE_INTERVAL_MS: Final = 1_000


class Housekeeping:
    """Runs the periodic passes over all logs of one broker, including its cleaner and its scrubber."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        partitions: Partitions,
        store: LogDirs,
        scheduler: SyncScheduler[HostedPartition],
    ) -> None:
        self._scheduler = scheduler
        self._has_moved = asyncio.Event()
        self._has_moved.set()  # logs were recovered or created before
        self._config = config
        self._clock = clock
        self._partitions = partitions
        self._store = store
        self._is_woken = False  # whether ``_has_moved`` is set or soon will be
        self._retired_files: list[str] = []  #: files of deleted segments, to unlink in the next ``retain``
        self.cleaner: Cleaner | None = None  #: None if log.cleaner.enable=false
        if config.log_cleaner_enable:
            self.cleaner = Cleaner(config, clock, partitions, scheduler)
        self.scrubber = Scrubber(config, clock, partitions, scheduler)

    def start(self, tasks: TaskSet) -> None:
        """Start a task for each periodic pass."""
        tasks.start(self.retain_forever(), name="retention")
        tasks.start(self.record_forever(), name="recovery points")
        tasks.start(self.checkpoint_forever(), name="checkpoints")
        tasks.start_when(self._partitions.has_failed, self.retry_forever, name="retries")
        if self._store.are_several:
            tasks.start(self.probe_forever(), name="disks")
        if self.cleaner is not None:
            tasks.start_when(self._partitions.has_compacted, self.cleaner.clean_forever, name="cleaner")
        if self._config.log_scrub_interval_ms:
            tasks.start(self.scrubber.scrub_forever(), name="scrubber")

    async def retain_forever(self) -> None:
        """Run ``retain`` after ``log.initial.task.delay.ms``, then every ``log.retention.check.interval.ms``,
        or less often while it has nothing to do."""
        pace = self._partitions.activity.every(self._config.log_retention_check_interval_ms)
        await self._clock.sleep_ms(self._config.log_initial_task_delay_ms)
        while True:
            pace.begin()
            await self.retain()
            await pace.rest(self._idle_ms())

    async def record_forever(self) -> None:
        """Write the recovery points that have moved, RECORD_DELAY_MS after the first one moved (R24)."""
        self._store.on_moved = self._on_moved
        while True:
            await self._has_moved.wait()
            await self._clock.sleep_ms(RECORD_DELAY_MS)
            self._has_moved.clear()
            self._is_woken = False
            await self.record()

    def _on_moved(self) -> None:
        """Wake ``record_forever``. Called in any thread, and often: further calls before the next ``record``
        return at once."""
        if not self._is_woken:
            self._is_woken = True
            self._scheduler.call_soon_threadsafe(self._has_moved.set)

    async def record(self) -> None:
        """Write the recovery points that have moved, in the executor. An error is logged, and the write is
        repeated later."""
        work = self._store.begin_checkpoint()
        if work is None:
            return
        try:
            await asyncio.wrap_future(self._scheduler.submit(work))
        except (StorageError, OSError) as error:
            logger.error("recovery points not written %s", Fields(error=error))
            self._has_moved.set()  # try again

    async def checkpoint_forever(self) -> None:
        """Run ``checkpoint`` every ``log.flush.offset.checkpoint.interval.ms``, or less often while it has
        nothing to do.

        Logs with durability=page-cache have no other regular syncs.
        """
        pace = self._partitions.activity.every(self._config.log_flush_offset_checkpoint_interval_ms)
        idle_ms = 0.0
        while True:
            await pace.rest(idle_ms)
            pace.begin()
            idle_ms = 0 if self.checkpoint() else math.inf

    async def retry_forever(self) -> None:
        """Call ``Partitions.retry`` RETRY_INTERVAL_MS after a log was not opened or a role not taken."""
        while True:
            await self._partitions.has_failed.wait()
            await self._clock.sleep_ms(RETRY_INTERVAL_MS)
            self._partitions.retry()

    async def probe_forever(self) -> None:
        """Probe the disks every PROBE_INTERVAL_MS, so that a failed disk is noticed without a write to its
        partitions."""
        while True:
            await self._clock.sleep_ms(PROBE_INTERVAL_MS)
            self._partitions.probe_disks()

    async def retain(self) -> None:
        """Roll segments by age, delete segments beyond retention, forget expired producers, and remove files
        of deleted segments."""
        for number, hosted in enumerate(list(self._partitions), 1):
            if self._guarded(hosted, partial(self._retain_one, hosted)) or number % LOGS_PER_TURN == 0:
                await asyncio.sleep(0)
        try:
            files, self._retired_files = self._retired_files, []
            removal = self._store.begin_removal(self._clock.wall_ms(), files)
            if removal is not None:
                await asyncio.wrap_future(self._scheduler.submit(removal))
            self._store.release_idle()
        except (StorageError, OSError) as error:
            logger.error("housekeeping failed %s", Fields(error=error))

    def _idle_ms(self) -> float:
        """Return for how many ms retention has nothing to do if no log or metadata changes; 0 if unknown."""
        if not self._partitions.activity.may_rest or self._retired_files or self._store.has_retired:
            return 0
        now_ms = self._clock.wall_ms()
        due_ms = math.inf
        for hosted in self._partitions:
            log = hosted.idle_log()
            if log is None:
                return 0
            try:
                due_ms = min(due_ms, log.maintenance_due_ms(now_ms, self._config.producer_id_expiration_ms))
            except (StorageError, OSError):  # the next pass reports it
                return 0
            if due_ms <= now_ms:
                return 0
        return due_ms - now_ms

    def _retain_one(self, hosted: HostedPartition) -> bool:
        """Roll and delete segments. Return whether a deletion was begun, which may have blocked the loop."""
        log = hosted.idle_log()
        if log is None:
            return False
        now_ms = self._clock.wall_ms()
        if log.maybe_roll(now_ms):
            self._partitions.activity.touch()  # the closed segment may be compacted
        log.expire_producers(now_ms, self._config.producer_id_expiration_ms)
        self._retired_files += log.take_retired(now_ms)
        offset = log.retention_offset(now_ms, up_to=hosted.high_watermark)
        if offset <= log.log_start_offset:
            return False
        hosted.delete_before(offset, partial(self._on_deleted, hosted, log, log.segment_count))
        return True

    def _on_deleted(
        self, hosted: HostedPartition, log: Log, segments_before: int, error: Exception | None
    ) -> None:
        if error is not None:
            logger.error("housekeeping failed %s", Fields(partition=hosted.key, error=error))
            return
        count = segments_before - log.segment_count
        start = hosted.log_start_offset
        logger.info("segments deleted %s", Fields(partition=hosted.key, count=count, log_start_offset=start))
        self._retired_files += log.take_retired(self._clock.wall_ms())  # their delay begins now

    def _guarded(self, hosted: HostedPartition, action: Callable[[], bool | None]) -> bool:
        """Call ``action`` and return its result: whether it may have blocked the loop.

        If ``action`` fails with a disk error, log the error and return True.
        """
        try:
            return bool(action())
        except (StorageError, OSError) as error:
            logger.error("housekeeping failed %s", Fields(partition=hosted.key, error=error))
            if hosted.offline_reason is not None:
                hosted.on_offline()
            return True

    def checkpoint(self) -> bool:
        """Mark unsynced logs for the next sync round. Return whether there is such a log."""
        return self._partitions.mark_unsynced()
