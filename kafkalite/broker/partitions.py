"""The partitions this broker hosts: which there are, who waits for them, what syncs them.

Follows the metadata image: ``publish`` is told of every change and opens, leads, reconfigures and deletes.
A log that can't be opened takes its partition offline, not the broker; clients get KAFKA_STORAGE_ERROR
with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kafkalite.broker.events import Fields
from kafkalite.broker.sync_scheduler import SyncScheduler, SyncWork
from kafkalite.broker.waiters import Waiters
from kafkalite.errors import (
    KafkaStorageError,
    LogOfflineError,
    NotLeaderOrFollowerError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from kafkalite.metadata.delta import Delta, LocalPartition
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.topic_config import Setting, topic_settings
from kafkalite.model import NO_EPOCH, TimestampType, TopicPartition
from kafkalite.records.header import BatchHeader
from kafkalite.replication.partition import Partition, PartitionSettings
from kafkalite.storage.log import Appended, Log
from kafkalite.storage.log_config import PAGE_CACHE, LogConfig
from kafkalite.storage.log_store import LogStore

logger = logging.getLogger(__name__)


class HostedPartition:
    """A partition here, with those who wait for it and the scheduler that syncs it."""

    __slots__ = ("_fresh_bytes", "_scheduler", "_syncing_bytes", "_waiters", "key", "log", "partition")

    def __init__(
        self, partition: Partition, waiters: Waiters, scheduler: SyncScheduler[HostedPartition]
    ) -> None:
        self.partition = partition
        self.log = partition.log
        self.key = partition.topic_partition
        self._waiters = waiters
        self._scheduler = scheduler
        self._fresh_bytes = 0  # appended since the last sync round began
        self._syncing_bytes = 0  # appended before it

    def __str__(self) -> str:
        return str(self.key)

    @property
    def high_watermark(self) -> int:
        return self.partition.high_watermark

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    def append(
        self, batch: bytearray | memoryview, header: BatchHeader, now_ms: int, acks: int
    ) -> tuple[Appended, int]:
        """``Partition.append``; tells the readers at once, or when the batch is on the disk.

        Returns the high watermark with it: what of the log counts as acknowledged now.
        """
        partition = self.partition
        appended = partition.append(batch, header, now_ms, acks=acks)
        high_watermark = partition.high_watermark
        if high_watermark > appended.last_offset:
            self._waiters.on_high_watermark(self.key, high_watermark, len(batch))
        elif self.log.config.synced_only:
            self._fresh_bytes += len(batch)
            self._scheduler.mark(self)
        return appended, high_watermark

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

    # --- what the sync scheduler calls

    def begin_sync(self) -> SyncWork | None:
        self._syncing_bytes, self._fresh_bytes = self._fresh_bytes, 0
        return self.log.begin_sync()

    def finish_sync(self, work: Any, error: Exception | None) -> None:
        self.log.finish_sync(work, error)
        if self.log.offline_reason is not None:
            self.on_offline()
        elif error is not None:  # the disk is full: not durable, not lost; the next round tries again
            self._waiters.on_failed(self.key, error)
        elif self.partition.on_synced():
            self._waiters.on_high_watermark(self.key, self.partition.high_watermark, self._syncing_bytes)

    def on_offline(self) -> None:
        """The log takes no more: whoever waits hears of it now."""
        reason = self.log.offline_reason
        logger.error("partition offline %s", Fields(partition=self.key, reason=reason))
        self._waiters.on_failed(self.key, LogOfflineError(f"{self.key} is offline: {reason}"))


class StoredPartition(NamedTuple):
    """What this broker has of one partition on its disk."""

    topic: str
    partition: int
    size_bytes: int
    segment_count: int
    log_start_offset: int
    log_end_offset: int
    offline_reason: str | None


class Partitions:
    """{TopicPartition: HostedPartition}, as the metadata image says."""

    def __init__(
        self,
        store: LogStore,
        path: str,
        node_id: int,
        topic_defaults: Mapping[str, Any],
        waiters: Waiters,
        scheduler: SyncScheduler[HostedPartition],
        *,
        is_volatile: bool = False,
    ) -> None:
        """``is_volatile``: nothing outlives this broker, so there is nothing to wait for with fsync."""
        self._is_volatile = is_volatile
        self._store = store
        self.path = path  #: the data directory
        self._node_id = node_id
        self._topic_defaults = dict(topic_defaults)
        self._waiters = waiters
        self._scheduler = scheduler
        self._hosted: dict[tuple[str, int], HostedPartition] = {}
        self._unopened: dict[tuple[str, int], str] = {}  # reason
        self._image = ClusterImage()
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._hosted) + len(self._unopened)

    def __iter__(self) -> Iterator[HostedPartition]:
        return iter(self._hosted.values())

    @property
    def offline_count(self) -> int:
        return len(self._unopened) + sum(hosted.log.offline_reason is not None for hosted in self)

    def leader(self, topic: str, partition: int, current_leader_epoch: int = NO_EPOCH) -> HostedPartition:
        """The partition, led by this broker in the epoch the client knows (R3).

        Raises UnknownTopicOrPartitionError, NotLeaderOrFollowerError, FencedLeaderEpochError,
        UnknownLeaderEpochError, KafkaStorageError (its log could not be opened).
        """
        hosted = self._hosted.get((topic, partition))
        if hosted is None:
            raise self._absence(topic, partition)
        if current_leader_epoch != NO_EPOCH:
            hosted.partition.check_leader_epoch(current_leader_epoch)
        return hosted

    def _absence(self, topic: str, partition: int) -> Exception:
        reason = self._unopened.get((topic, partition))
        if reason is not None:
            return KafkaStorageError(f"{topic}-{partition} is offline: {reason}")
        if self._image.partition(topic, partition) is not None:
            return NotLeaderOrFollowerError(f"broker {self._node_id} has no replica of {topic}-{partition}")
        if topic in self._image.topics:
            count = len(self._image.topics[topic].partitions)
            return UnknownTopicOrPartitionError(f"{topic!r} has partitions 0 to {count - 1}, not {partition}")
        return UnknownTopicOrPartitionError(f"there is no topic {topic!r}")

    def stored(self) -> Iterator[StoredPartition]:
        """Every partition here, offline ones too, in order."""
        for key in sorted([*self._hosted, *self._unopened]):
            hosted = self._hosted.get(key)
            if hosted is None:
                yield StoredPartition(*key, 0, 0, 0, 0, self._unopened[key])
            else:
                yield hosted.stored()

    # --- following the image

    def _load(self, image: ClusterImage) -> None:
        """Open all logs that the first image gives this broker, together: some may be missing (R25)."""
        wanted: dict[TopicPartition, tuple[str, LogConfig]] = {}
        for name, topic in image.topics.items():
            config = self._log_config(self._settings(image, name))
            for number, state in enumerate(topic.partitions):
                if self._node_id in state.replicas:
                    wanted[TopicPartition(name, number)] = (topic.topic_id, config)
        self._store.load(wanted)

    def publish(self, delta: Delta, image: ClusterImage) -> None:
        """A new image holds. Deletes, creates, leads, reconfigures, in this order."""
        self._image = image
        if not self._is_loaded:
            self._is_loaded = True
            self._load(image)
        changes = delta.local_changes(self._node_id)
        for local in changes.deleted:
            self._delete(local)
        for local in changes.created:
            self._create(local, image)
        for local in changes.leaders:
            hosted = self._hosted.get(local.topic_partition)
            if hosted is not None and hosted.partition.become_leader(local.state):
                self._waiters.on_high_watermark(hosted.key, hosted.high_watermark, 0)
        names = changes.configs_changed
        if changes.broker_configs_changed:
            names = tuple(image.topics)
        for name in names:
            self._reconfigure(name, image)

    def mark_unsynced(self) -> None:
        """Let the next round sync whatever is not: of page-cache logs, and after a disk was full."""
        for hosted in self:
            if hosted.log.has_unsynced and hosted.log.offline_reason is None:
                self._scheduler.mark(hosted)

    def _settings(self, image: ClusterImage, topic: str) -> dict[str, Setting]:
        return topic_settings(image, topic, self._topic_defaults, node_id=self._node_id)

    def _log_config(self, settings: Mapping[str, Setting]) -> LogConfig:
        config = log_config(settings)
        return replace(config, durability=PAGE_CACHE) if self._is_volatile else config

    def _create(self, local: LocalPartition, image: ClusterImage) -> None:
        key = local.topic_partition
        settings = self._settings(image, key.topic)
        try:
            log = self._store.get(key)
            if log is None:
                log = self._store.create_log(key, local.topic_id, self._log_config(settings))
        except (StorageError, OSError) as error:
            self._unopened[key] = str(error)
            logger.error("log not opened %s", Fields(partition=key, error=error))
            return
        self._host(key, local.topic_id, log, partition_settings(settings))

    def _host(self, key: TopicPartition, topic_id: str, log: Log, settings: PartitionSettings) -> None:
        partition = Partition(key, topic_id, log, broker_id=self._node_id, settings=settings)
        self._hosted[key] = HostedPartition(partition, self._waiters, self._scheduler)

    def _delete(self, local: LocalPartition) -> None:
        key = local.topic_partition
        self._unopened.pop(key, None)
        hosted = self._hosted.pop(key, None)
        if hosted is None:
            return
        hosted.partition.resign()
        self._scheduler.forget(hosted)
        self._waiters.on_failed(key, UnknownTopicOrPartitionError(f"topic {key.topic!r} was deleted"))
        try:
            self._store.delete_log(key, local.topic_id)
        except (StorageError, OSError) as error:
            logger.error("files of a deleted partition stay %s", Fields(partition=key, error=error))

    def _reconfigure(self, topic: str, image: ClusterImage) -> None:
        settings = self._settings(image, topic)
        config, more = self._log_config(settings), partition_settings(settings)
        for number in range(len(image.topics[topic].partitions)):
            hosted = self._hosted.get((topic, number))
            if hosted is not None and hosted.partition.reconfigure(config, more):
                self._waiters.on_high_watermark(hosted.key, hosted.high_watermark, 0)


def log_config(settings: Mapping[str, Setting]) -> LogConfig:
    """What the log needs to know of a topic's settings in force."""
    segment_bytes = settings["segment.bytes"].value
    preallocated: dict[str, int] = {}
    if settings["preallocate"].value:
        preallocated = {"preallocate_min_bytes": segment_bytes, "preallocate_max_bytes": segment_bytes}
    kind = settings["message.timestamp.type"].value
    return LogConfig(
        segment_bytes=segment_bytes,
        segment_ms=settings["segment.ms"].value,
        segment_jitter_ms=settings["segment.jitter.ms"].value,
        segment_index_bytes=max(settings["segment.index.bytes"].value, 8),
        index_interval_bytes=settings["index.interval.bytes"].value,
        retention_ms=settings["retention.ms"].value,
        retention_bytes=settings["retention.bytes"].value,
        max_message_bytes=settings["max.message.bytes"].value,
        timestamp_type=(
            TimestampType.LOG_APPEND_TIME if kind == "LogAppendTime" else TimestampType.CREATE_TIME
        ),
        durability=settings["durability"].value,
        file_delete_delay_ms=settings["file.delete.delay.ms"].value,
        **preallocated,
    )


def partition_settings(settings: Mapping[str, Setting]) -> PartitionSettings:
    """What the partition's role needs to know of a topic's settings in force."""
    return PartitionSettings(
        min_insync_replicas=settings["min.insync.replicas"].value,
        message_timestamp_before_max_ms=settings["message.timestamp.before.max.ms"].value,
        message_timestamp_after_max_ms=settings["message.timestamp.after.max.ms"].value,
    )
