"""What a broker does every so often: roll and delete segments, remove retired files, write recovery points.

Every wait goes through the Clock seam. A pass over thousands of logs gives way to requests every
LOGS_PER_TURN logs. No log has a timer of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.cleaner import Cleaner
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.server.tasks import TaskSet
from kafkalite.clock import Clock
from kafkalite.errors import StorageError
from kafkalite.log_fields import Fields
from kafkalite.storage.log_store import LogStore

logger = logging.getLogger(__name__)

LOGS_PER_TURN: Final = 50


class Housekeeping:
    """The periodic passes of one broker."""

    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        store: LogStore,
        *,
        initial_delay_ms: int,
        retention_interval_ms: int,
        checkpoint_interval_ms: int,
        producer_expiration_ms: int,
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._store = store
        self._initial_delay_ms = initial_delay_ms
        self._retention_interval_ms = retention_interval_ms
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._producer_expiration_ms = producer_expiration_ms
        self.cleaner: Cleaner | None = None  #: None with log.cleaner.enable=false

    @classmethod
    def begin(
        cls,
        config: BrokerConfig,
        clock: Clock,
        partitions: Partitions,
        store: LogStore,
        scheduler: SyncScheduler[HostedPartition],
        tasks: TaskSet,
        is_isolated: Callable[[], bool],
    ) -> Housekeeping:
        """Start all passes of a broker as tasks, compaction among them; ``is_isolated`` is the cleaner's."""
        housekeeping = cls(
            clock,
            partitions,
            store,
            initial_delay_ms=config.log_initial_task_delay_ms,
            retention_interval_ms=config.log_retention_check_interval_ms,
            checkpoint_interval_ms=config.log_flush_offset_checkpoint_interval_ms,
            producer_expiration_ms=config.producer_id_expiration_ms,
        )
        tasks.start(housekeeping.retain_forever(), name="retention")
        tasks.start(housekeeping.checkpoint_forever(), name="checkpoints")
        if config.log_cleaner_enable:
            housekeeping.cleaner = Cleaner(
                clock,
                partitions,
                scheduler,
                backoff_ms=config.log_cleaner_backoff_ms,
                buffer_bytes=config.log_cleaner_dedupe_buffer_size,
                is_isolated=is_isolated,
            )
            tasks.start(housekeeping.cleaner.clean_forever(), name="cleaner")
        return housekeeping

    async def retain_forever(self) -> None:
        """The retention pass, every ``log.retention.check.interval.ms``."""
        await self._clock.sleep_ms(self._initial_delay_ms)
        while True:
            await self.retain()
            await self._clock.sleep_ms(self._retention_interval_ms)

    async def checkpoint_forever(self) -> None:
        """Recovery points, every ``log.flush.offset.checkpoint.interval.ms``."""
        while True:
            await self._clock.sleep_ms(self._checkpoint_interval_ms)
            self.checkpoint()

    async def retain(self) -> None:
        """One pass: roll what is old enough, delete what is too old or too much, remove retired files."""
        for number, hosted in enumerate(list(self._partitions), 1):
            has_synced = False
            if hosted.log.offline_reason is None and not hosted.is_busy and not hosted.is_deleting:
                has_synced = self._guarded(hosted, self._retain_one)
            if has_synced or number % LOGS_PER_TURN == 0:
                await asyncio.sleep(0)
        try:
            self._store.remove_retired(self._clock.wall_ms())
            self._store.release_idle()
        except (StorageError, OSError) as error:
            logger.error("housekeeping failed %s", Fields(error=error))

    def _retain_one(self, hosted: HostedPartition) -> bool:
        """Whether something is to be deleted, which waits for the disk."""
        now_ms = self._clock.wall_ms()
        log = hosted.log
        log.maybe_roll(now_ms)
        log.expire_producers(now_ms, self._producer_expiration_ms)
        self._remove_retired(hosted)
        offset = log.retention_offset(now_ms, up_to=hosted.high_watermark)
        if offset <= log.log_start_offset:
            return False
        hosted.delete_before(offset, partial(self._on_deleted, hosted, log.segment_count))
        return True

    def _on_deleted(self, hosted: HostedPartition, segments_before: int, error: Exception | None) -> None:
        if error is not None:
            logger.error("housekeeping failed %s", Fields(partition=hosted.key, error=error))
            return
        count = segments_before - hosted.log.segment_count
        start = hosted.log_start_offset
        logger.info("segments deleted %s", Fields(partition=hosted.key, count=count, log_start_offset=start))
        self._guarded(hosted, self._remove_retired)

    def _remove_retired(self, hosted: HostedPartition) -> bool:
        hosted.log.remove_retired(self._clock.wall_ms())
        return False

    def _guarded(self, hosted: HostedPartition, action: Callable[[HostedPartition], bool]) -> bool:
        """A disk error is one log's; the pass goes on to the next."""
        try:
            return action(hosted)
        except (StorageError, OSError) as error:
            logger.error("housekeeping failed %s", Fields(partition=hosted.key, error=error))
            if hosted.log.offline_reason is not None:
                hosted.on_offline()
            return True

    def checkpoint(self) -> None:
        """Write how far the logs are synced, and let what is not be synced for the next time.

        Not while a log is being truncated: what it says of itself then is half old, half new.
        """
        if any(hosted.is_busy for hosted in self._partitions):
            return
        try:
            self._store.checkpoint()
        except (StorageError, OSError) as error:
            logger.error("recovery points not written %s", Fields(error=error))
        self._partitions.mark_unsynced()
        self._partitions.retry_roles()
