"""Moves logs between the data directories of this broker (AlterReplicaLogDirs, KIP-113), one after the other.

A copy of the log catches up while the log is used. Then the log takes no append for the time of one sync, and
its copy replaces it (``storage/log_copy.py``, R85). A move that fails, or whose partition changes too much,
ends with a log line; a process that ends takes its moves with it.
"""

# Tests: tests/integration/test_moves_between_disks.py

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.tasks import Signal
from kafkalite.clock import Clock
from kafkalite.errors import (
    BrokerError,
    KafkaStorageError,
    LogOfflineError,
    NotLeaderOrFollowerError,
    StorageError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import TopicPartition
from kafkalite.storage.log import Log
from kafkalite.storage.log_copy import MAX_REST_BYTES, STEP_BYTES, LogCopy
from kafkalite.storage.log_dirs import LogDirs

logger = logging.getLogger(__name__)

#: The pause before the log is frozen again, after a copy lacked too much or other work ran.
RETRY_MS: Final = 10


class CopyState(NamedTuple):
    """The copy of a log that moves into the data directory ``path``."""

    key: TopicPartition
    path: str
    log_end_offset: int  #: of the copy, exclusive
    offset_lag: int  #: how many offsets it is behind the log


class Relocation:
    """The job in which a copy replaces a log. ``HostedPartition.relocate`` runs it.

    ``begin``, ``finish`` and ``give_up`` run on the loop, ``run`` in the executor. The result of ``ended`` is
    the error, or None.
    """

    def __init__(self, dirs: LogDirs, key: TopicPartition, copy: LogCopy, now_ms: int) -> None:
        self._dirs = dirs
        self._key = key
        self._copy = copy
        self._now_ms = now_ms
        self.has_run = False
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Freeze the log, and read what the copy lacks. Raises StorageError if that is too much."""
        copy = self._copy
        if not copy.is_valid:
            raise StorageError(f"{self._key} was truncated")
        copy.source.freeze()
        self._rest = copy.read(MAX_REST_BYTES)
        if self._rest.next_offset < copy.source.log_end_offset:
            raise StorageError(f"the copy of {self._key} is too far behind")

    def run(self) -> None:
        """Complete the copy. Raises OSError, StorageError."""
        self.has_run = True
        self._copy.append(self._rest, self._now_ms)
        self._dirs.complete_copy(self._copy)

    def finish(self) -> Log:
        """Use the copy from now on, and return its log."""
        log = self._dirs.replace_by_copy(self._key, self._copy)
        self._end(None)
        return log

    def give_up(self, error: Exception) -> None:
        """Use the log as before."""
        self._copy.source.unfreeze()
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class LogMover:
    """Moves logs that ``move`` names. At most one log moves at a time."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        partitions: Partitions,
        dirs: LogDirs,
        scheduler: SyncScheduler[HostedPartition],
    ) -> None:
        self._config = config
        self._clock = clock
        self._partitions = partitions
        self._dirs = dirs
        self._scheduler = scheduler
        self._wanted: dict[TopicPartition, str] = {}  #: the target of each move, in the order of the moves
        self._current: tuple[TopicPartition, LogCopy] | None = None
        self.has_moves = Signal()  #: set when ``move_forever`` has something to do
        self.moved_count = 0

    def move(self, key: TopicPartition, path: str) -> None:
        """Begin to move the log of ``key`` to the data directory ``path``. If it is there, cancel its move.

        Raises LogDirNotFoundError, NotLeaderOrFollowerError (no replica here), KafkaStorageError (the log is
        offline).
        """
        path = path.rstrip("/")
        self._dirs.check_target(path)
        hosted = self._partitions.find(key)
        if hosted is None:
            raise NotLeaderOrFollowerError(f"this broker has no replica of {key}")
        if self._dirs.path_of(key) == path:
            self._wanted.pop(key, None)
            return
        if hosted.offline_reason is not None:
            raise KafkaStorageError(f"{key} is offline: {hosted.offline_reason}")
        self._wanted[key] = path
        self.has_moves.set()

    def copies(self) -> list[CopyState]:
        """Return the moves that run or wait, by topic and partition."""
        found: list[CopyState] = []
        for key, path in sorted(self._wanted.items()):
            hosted = self._partitions.find(key)
            end, lag = 0, 0 if hosted is None else hosted.log_end_offset - hosted.log_start_offset
            if self._current is not None and self._current[0] == key:
                end, lag = self._current[1].log_end_offset, self._current[1].lag
            found.append(CopyState(key, path, end, lag))
        return found

    async def move_forever(self) -> None:
        """Run the moves."""
        while True:
            await self.has_moves.wait()
            self.has_moves.clear()
            while self._wanted:
                key, path = next(iter(self._wanted.items()))
                await self._move(key, path)
                if self._wanted.get(key) == path:
                    del self._wanted[key]

    async def _move(self, key: TopicPartition, path: str) -> None:
        hosted = self._partitions.find(key)
        if hosted is None:
            return
        begun_ms = self._clock.monotonic_ms()
        source = self._dirs.path_of(key)
        hosted.is_moving = True
        try:
            while self._is_wanted(hosted, path):
                if hosted.idle_log() is None and hosted.offline_reason is None:
                    # A compaction that began before the move would change segments under the copy (R41).
                    await self._clock.sleep_ms(RETRY_MS)
                    continue
                copy = self._dirs.begin_copy(key, path)
                self._current = key, copy
                try:
                    is_moved = await self._copy(hosted, copy, path)
                except (StorageError, BrokerError, OSError):
                    await self._discard(copy)
                    raise
                if is_moved:
                    self.moved_count += 1
                    took_ms = self._clock.monotonic_ms() - begun_ms
                    fields = Fields(partition=key, source=source, to=path, took_ms=took_ms)
                    logger.info("log moved %s", fields)
                    return
                await self._discard(copy)
                await self._clock.sleep_ms(RETRY_MS)  # if the log was truncated, begin again
        except (StorageError, BrokerError, OSError) as error:
            logger.error("log not moved %s", Fields(partition=key, to=path, error=error))
        finally:
            self._current = None
            hosted.is_moving = False

    def _is_wanted(self, hosted: HostedPartition, path: str) -> bool:
        """Whether the move still is to be made: it was not cancelled, and the partition is here."""
        return self._wanted.get(hosted.key) == path and self._partitions.find(hosted.key) is hosted

    async def _copy(self, hosted: HostedPartition, copy: LogCopy, path: str) -> bool:
        """Copy the log, and replace it. Return False if the move was cancelled, or the log was truncated.

        Raises StorageError, OSError.
        """
        await self._run(copy.begin, copy.read(1))
        while self._is_wanted(hosted, path):
            if not hosted.uses(copy.source):
                raise LogOfflineError(f"the log of {hosted.key} was replaced")
            if hosted.is_busy:  # a truncation runs
                await self._clock.sleep_ms(RETRY_MS)
                continue
            if not copy.is_valid:
                return False
            found = copy.read(STEP_BYTES)
            reaches_end = found.next_offset >= copy.source.log_end_offset  # the next read may find more
            if found.size_bytes:
                await self._run(copy.append, found, self._clock.wall_ms())
                await self._clock.sleep_ms(self._pause_ms(found.size_bytes))
                if not reaches_end:
                    continue
            await self._run(copy.sync)
            if not self._is_wanted(hosted, path) or not hosted.uses(copy.source):
                continue
            relocation = Relocation(self._dirs, hosted.key, copy, self._clock.wall_ms())
            if not hosted.relocate(relocation):
                await self._clock.sleep_ms(RETRY_MS)
                continue
            error = await relocation.ended
            if error is None:
                await self._try(copy.sync_retirement)
                return True
            if relocation.has_run:
                raise error
            await self._clock.sleep_ms(RETRY_MS)  # the log could not be frozen now
        return False

    def _pause_ms(self, size_bytes: int) -> int:
        return 1000 * size_bytes // self._config.replica_alter_log_dirs_io_max_bytes_per_second

    async def _discard(self, copy: LogCopy) -> None:
        try:
            await self._run(copy.discard)
            self._dirs.forget_copy(copy)
        except (StorageError, OSError) as error:
            logger.error("files of a copy stay %s", Fields(copy=copy.target_directory, error=error))
            if copy.is_named:  # otherwise the next start removes it
                await self._try(self._dirs.doubt, copy)

    async def _try(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Run a job in the executor. Its error is logged."""
        try:
            await self._run(job, *arguments)
        except (StorageError, OSError) as error:
            logger.error("end of a move not recorded %s", Fields(error=error))

    async def _run(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Run a job in the executor, which waits for the disk."""
        await asyncio.wrap_future(self._scheduler.submit(lambda: job(*arguments)))
