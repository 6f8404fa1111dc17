"""Compacts this broker's logs, one at a time.

A compaction computes on the event loop for a few milliseconds, sleeps about as long, and continues. A thread
would block the loop for longer at a time (GIL). Disk work runs in the executor. Leaders and followers compact
independently, each below its own high watermark. While a replica is out of sync, tombstones and markers are
kept: that replica may still have the deleted records or the open transactions, and it fetches only from its
log end on (R41). A pass that removes some ends when a replica leaves the in-sync set or is added: that
replica may fetch an old record before segments are replaced, and would not receive the tombstone after it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import Future
from typing import Any, Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, CorruptLogError, StorageError
from kafkalite.limits import KIB
from kafkalite.log_fields import Fields
from kafkalite.storage.compaction import BYTES_PER_KEY
from kafkalite.storage.compaction_pass import CHUNK_BYTES, CompactionPass
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.log import Log

logger = logging.getLogger(__name__)

#: The number of logs examined in one iteration of the loop in search of the next one to compact.
LOGS_PER_TURN: Final = 20
#: The pause after each CHUNK_BYTES, which take 1 to 4 ms. A step that reads nothing is counted as STEP_BYTES.
REST_MS: Final = 2
STEP_BYTES: Final = 4 * KIB


class Cleaner:
    """Compacts logs in the order of their dirty ratios, the largest first."""

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
        self._backoff_ms = config.log_cleaner_backoff_ms
        self._max_keys = config.log_cleaner_dedupe_buffer_size // BYTES_PER_KEY
        self._uncleanable: dict[HostedPartition, None] = {}  # damaged logs, skipped until a restart
        self._may_change = False  # whether ``clean`` may find work later without any activity
        self.pass_count = 0
        self.bytes_freed = 0

    async def clean_forever(self) -> None:
        """Run ``clean`` every ``log.cleaner.backoff.ms``, or less often while it has nothing to do. Pause
        while no topic is compacted."""
        has_compacted = self._partitions.has_compacted
        pace = self._partitions.activity.every(self._backoff_ms)
        idle_ms = 0.0
        while True:
            await has_compacted.wait()
            await pace.rest(idle_ms)
            pace.begin()
            if any(hosted.is_compacted for hosted in self._partitions):
                idle_ms = 0 if await self.clean() else math.inf
            else:
                has_compacted.clear()

    async def clean(self) -> bool:
        """Compact the logs whose dirty ratio is at least ``min.cleanable.dirty.ratio``, the dirtiest first.

        Logs with closed segments that are not synced are marked for the next sync round, so that a later call
        can compact those segments. Return whether a later call may find work even without any request, append
        or metadata change.
        """
        self._may_change = False
        for unsynced in self._partitions:
            log = unsynced.idle_log() if unsynced.is_compacted else None
            if log is not None and log.has_unsynced_segments:
                unsynced.mark_unsynced()
                self._may_change = True
        done: set[HostedPartition] = set()
        while (hosted := await self._dirtiest(done)) is not None:
            self._may_change = True
            if not await self._compact(hosted):
                done.add(hosted)
        return self._may_change

    async def _dirtiest(self, done: set[HostedPartition]) -> HostedPartition | None:
        """Return the dirtiest log that must be compacted and is not in ``done``, or None."""
        hosts = list(self._partitions)
        self._uncleanable = {hosted: None for hosted in hosts if hosted in self._uncleanable}
        best: tuple[float, HostedPartition] | None = None
        seen = 0
        for hosted in hosts:
            if not hosted.is_compacted or hosted in done or hosted in self._uncleanable:
                continue
            seen += 1
            if seen % LOGS_PER_TURN == 0:
                await asyncio.sleep(0)
            ratio = self._dirty_ratio(hosted)
            if ratio > 0 and (best is None or ratio > best[0]):
                best = ratio, hosted
        return None if best is None else best[1]

    def _dirty_ratio(self, hosted: HostedPartition) -> float:
        """Return the log's dirty ratio, or 0 if it is too small or the log cannot be compacted now."""
        log = None if hosted.is_moving else hosted.idle_log()
        if log is None or log.config.min_compaction_lag_ms:
            self._may_change = True
        if log is None:
            return 0.0
        try:
            cleanable = log.cleanable(self._clock.wall_ms(), hosted.high_watermark)
        except (StorageError, OSError) as error:
            if log.is_damaged:
                self._give_up(hosted, error)
            else:  # the error may be temporary, so the log is tried again
                self._may_change = True
                logger.warning("compaction postponed %s", Fields(partition=hosted.key, error=error))
            return 0.0
        ratio = cleanable.dirty_ratio
        return ratio if ratio >= log.config.min_cleanable_dirty_ratio else 0.0

    async def _compact(self, hosted: HostedPartition) -> bool:
        """Compact the log. Return whether another pass is needed, because not all keys fitted in memory."""
        begun_ms = self._clock.monotonic_ms()
        log = hosted.idle_log()
        if log is None:
            return False
        work: CompactionPass | None = None
        forgets = self.may_forget(hosted)
        try:
            work = log.begin_compaction(
                self._clock.wall_ms(), hosted.high_watermark, self._max_keys, may_forget=forgets
            )
            if work is None:
                return False
            await self._run(hosted, log, work, forgets=forgets)
            if hosted.is_busy or not work.is_complete:
                return False
            save = log.finish_compaction(work, self._clock.wall_ms())
            if save is not None:
                await self._wait(self._scheduler.submit(save))
        except CorruptLogError as error:
            if work is None or (log.fits(work) and not hosted.is_busy):
                self._give_up(hosted, error)
            return False  # if the log is not given up, it was truncated during the pass
        except (StorageError, BrokerError, OSError) as error:  # a full disk, or a changed role
            logger.warning("compaction ended early %s", Fields(partition=hosted.key, error=error))
            return False
        except AssertionError:
            raise
        except Exception as error:  # for example a batch that cannot be decoded; the log is unchanged
            logger.exception("compaction failed %s", Fields(partition=hosted.key))
            self._give_up(hosted, error)
            return False
        self.pass_count += 1
        freed = work.bytes_before - work.bytes_after
        self.bytes_freed += freed
        logger.info(
            "log compacted %s",
            Fields(
                partition=hosted.key,
                compacted_to=work.compacted_to,
                records_removed=work.removed_records,
                bytes=work.bytes_before,
                bytes_freed=freed,
                took_ms=self._clock.monotonic_ms() - begun_ms,
            ),
        )
        return work.has_more

    def may_forget(self, hosted: HostedPartition) -> bool:
        """Whether tombstones and markers may be removed, because every replica is in sync (R41)."""
        return self._partitions.may_serve() and self._partitions.is_fully_in_sync(hosted.key)

    def _give_up(self, hosted: HostedPartition, error: Exception) -> None:
        self._uncleanable[hosted] = None
        logger.error("log can't be compacted any more %s", Fields(partition=hosted.key, error=error))
        if hosted.offline_reason is not None:
            hosted.on_offline()

    async def _run(self, hosted: HostedPartition, log: Log, work: CompactionPass, *, forgets: bool) -> None:
        """Run all steps of a compaction, or return early if the log was deleted or truncated meanwhile, or if
        the pass ``forgets`` tombstones and a replica is out of sync before segments are replaced (R41).

        Raises the errors of the steps and of replacing segments.
        """
        steps = work.steps()
        try:
            result: bytes | None = None
            work_bytes = 0
            while True:
                try:
                    step = steps.send(result)
                except StopIteration:
                    return
                if isinstance(step, SwapWork):
                    if forgets and not self.may_forget(hosted):
                        return
                    await self._swap(hosted, log, step)
                    result = None
                else:
                    result = await self._wait(self._scheduler.submit(step))
                work_bytes += STEP_BYTES if result is None else len(result)
                if work_bytes >= CHUNK_BYTES:
                    work_bytes = 0
                    await self._clock.sleep_ms(REST_MS)
                else:
                    await asyncio.sleep(0)
                if not self._is_hosted(hosted) or not log.fits(work):
                    return
        except (StorageError, BrokerError, OSError):
            if not self._is_hosted(hosted):
                return  # the partition's topic was deleted
            raise
        finally:
            steps.close()

    def _is_hosted(self, hosted: HostedPartition) -> bool:
        return self._partitions.find(hosted.key) is hosted

    async def _swap(self, hosted: HostedPartition, log: Log, swap: SwapWork) -> None:
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def then(error: Exception | None) -> None:
            log.give_up_swap(swap)
            if not done.done():
                done.set_result(error)

        hosted.swap(swap, then)
        try:
            error = await done
        except asyncio.CancelledError:
            hosted.complete_work()
            raise
        if error is not None:
            raise error

    async def _wait(self, future: Future[Any]) -> Any:
        """Return the result of ``future``.

        If this task is cancelled, first wait until the running job has ended.
        """
        if future.done():
            return future.result()
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait([waiter])
            raise
