"""Reads and checks every batch on this broker's disk from time to time, slowly (R53).

Damage is handled as if a reader had found it (R43): in a cluster another replica leads and this one is
fetched again (R52); a log without another replica refuses writes and can be read up to the damage.
Reading and checking run in the executor, a part at a time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.clock import Clock
from kafkalite.errors import StorageError
from kafkalite.log_fields import Fields
from kafkalite.storage.log import Log
from kafkalite.storage.scrub import CHUNK_BYTES, SegmentScrub

logger = logging.getLogger(__name__)

#: The pause before a busy log is tried again, and the shortest pause between two checks of all logs.
PAUSE_MS: Final = 100


class Scrubber:
    """Checks all logs, one after the other."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        partitions: Partitions,
        scheduler: SyncScheduler[HostedPartition],
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._scheduler = scheduler
        self._delay_ms = config.log_initial_task_delay_ms
        self._interval_ms = config.log_scrub_interval_ms
        self._bytes_per_second = config.log_scrub_max_bytes_per_second
        self._unpaused_bytes = 0  # read since the last pause
        self.scrubbed_bytes = 0
        self.pass_count = 0

    async def scrub_forever(self) -> None:
        """Run ``scrub`` after ``log.initial.task.delay.ms``, then every ``log.scrub.interval.ms``."""
        await self._clock.sleep_ms(self._delay_ms)
        while True:
            begun_ms = self._clock.monotonic_ms()
            await self.scrub()
            took_ms = self._clock.monotonic_ms() - begun_ms
            await self._clock.sleep_ms(max(self._interval_ms - took_ms, PAUSE_MS))

    async def scrub(self) -> None:
        """Check every log once. Logs that are offline, or become so, are skipped."""
        begun_ms, before, damaged = self._clock.monotonic_ms(), self.scrubbed_bytes, 0
        for hosted in list(self._partitions):
            try:
                await self._scrub_log(hosted)
            except (StorageError, OSError) as error:
                logger.warning("scrub put off %s", Fields(partition=hosted.key, error=error))
                if hosted.offline_reason is not None:
                    hosted.on_offline()
            damaged += hosted.is_damaged
        self.pass_count += 1
        logger.info(
            "logs scrubbed %s",
            Fields(
                bytes=self.scrubbed_bytes - before,
                damaged_partitions=damaged,
                took_ms=self._clock.monotonic_ms() - begun_ms,
            ),
        )

    async def _scrub_log(self, hosted: HostedPartition) -> None:
        offset = 0
        while (log := await self._idle_log(hosted)) is not None:
            work = log.begin_scrub(offset)
            if work is None:
                return
            await self._run(work)
            if await self._idle_log(hosted) is log:
                log.finish_scrub(work)
                if log.is_damaged:
                    hosted.on_offline()
            offset = work.end_offset

    async def _run(self, work: SegmentScrub) -> None:
        while not work.is_complete:
            size_bytes = await asyncio.wrap_future(self._scheduler.submit(work.run))
            self.scrubbed_bytes += size_bytes
            self._unpaused_bytes += size_bytes
            if self._unpaused_bytes >= CHUNK_BYTES:
                pause_ms, self._unpaused_bytes = self._unpaused_bytes * 1000 // self._bytes_per_second, 0
                await self._clock.sleep_ms(max(pause_ms, 1))

    async def _idle_log(self, hosted: HostedPartition) -> Log | None:
        """Return the log when no disk job may change it, or None when it is offline or was removed."""
        while self._partitions.find(hosted.key) is hosted and hosted.offline_reason is None:
            log = hosted.idle_log()
            if log is not None:
                return log
            await self._clock.sleep_ms(PAUSE_MS)
        return None
