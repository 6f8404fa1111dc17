"""The partitions of this broker and their roles: leader, follower or none.

Follows the metadata image: ``publish`` applies every change: it opens, assigns roles, reconfigures,
deletes. No role is taken before the image holds the registration of this process (R22). A log that
cannot be opened takes its partition offline, not the broker; clients get KAFKA_STORAGE_ERROR with the
reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import (
    KafkaStorageError,
    NotLeaderOrFollowerError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from kafkalite.log_fields import Fields
from kafkalite.metadata.delta import Delta, LocalPartition
from kafkalite.metadata.image import ClusterImage, PartitionState
from kafkalite.metadata.records import NO_LEADER
from kafkalite.metadata.topic_config import Setting, topic_settings
from kafkalite.model import NO_EPOCH, TimestampType, TopicPartition
from kafkalite.protocol.messages.admin import LogDirPartition
from kafkalite.protocol.messages.cluster import DamagedReplica
from kafkalite.replication.partition import Partition, PartitionSettings
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import PAGE_CACHE, LogConfig
from kafkalite.storage.log_store import LogStore

logger = logging.getLogger(__name__)


class PartitionFetching(Protocol):
    """Fetches for the partitions that follow a leader elsewhere."""

    def follow(self, hosted: HostedPartition, leader_id: int) -> None:
        """Fetch for ``hosted`` from that broker, possibly in another epoch. -1: there is no leader."""
        ...

    def unfollow(self, hosted: HostedPartition) -> None:
        """Stop fetching for ``hosted``. Has no effect if it did not follow."""
        ...


class RoleObserver(Protocol):
    """Acts on the partitions that this broker leads: its coordinators."""

    def on_leading(self, partition: Partition) -> None:
        """Called when this broker begins to lead ``partition``, or when its in-sync set has changed."""
        ...

    def on_not_leading(self, partition: Partition) -> None:
        """Called when this broker does not lead ``partition``, or no longer."""
        ...


class Partitions:
    """{TopicPartition: HostedPartition} of the replicas that the metadata image places here."""

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
        incarnation_id: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``is_volatile``: no data outlives this broker, so that fsync has no effect.

        ``incarnation_id`` is this process's: it takes no role before the image has its registration (R22).
        None for a broker that is its own cluster.
        """
        self._is_volatile = is_volatile
        self._incarnation_id = incarnation_id
        self._clock = clock or SystemClock()
        self.fetching: PartitionFetching | None = None
        self.observer: RoleObserver | None = None
        self._store = store
        self.path = path  #: the data directory
        self._node_id = node_id
        self._topic_defaults = dict(topic_defaults)
        self._waiters = waiters
        self._scheduler = scheduler
        self._hosted: dict[tuple[str, int], HostedPartition] = {}
        self._by_id: dict[tuple[str, int], HostedPartition] = {}  #: the same partitions by topic id
        self._unopened: dict[tuple[str, int], tuple[DamagedReplica, str]] = {}  # with the reason
        self._roleless: dict[TopicPartition, None] = {}  # partitions whose last role assignment failed
        self._image = ClusterImage()
        self.has_compacted = asyncio.Event()  #: set when one is added; the cleaner clears it
        self._is_complete = False  # the image has every partition that an earlier incarnation had here

    def __len__(self) -> int:
        return len(self._hosted) + len(self._unopened)

    def __iter__(self) -> Iterator[HostedPartition]:
        return iter(self._hosted.values())

    def find(self, key: TopicPartition) -> HostedPartition | None:
        """Return the partition in any role, None if it is not open here."""
        return self._hosted.get(key)

    def led(self) -> Iterator[Partition]:
        """Yield the partitions that this broker leads and others replicate."""
        partitions = (hosted.partition for hosted in self)
        return (one for one in partitions if one.leads_followers)

    @property
    def offline_count(self) -> int:
        return len(self._unopened) + sum(hosted.offline_reason is not None for hosted in self)

    def leader(self, topic: str, partition: int, current_leader_epoch: int = NO_EPOCH) -> Partition:
        """Return a partition that this broker leads, in the epoch that the client knows (R3).

        Raises UnknownTopicOrPartitionError, NotLeaderOrFollowerError, FencedLeaderEpochError,
        UnknownLeaderEpochError, KafkaStorageError (its log could not be opened).
        """
        hosted = self._hosted.get((topic, partition))
        if hosted is None:
            raise self._absence(topic, partition)
        found = hosted.partition
        if not found.is_leader:
            raise self._not_led(hosted)
        if current_leader_epoch != NO_EPOCH:
            found.check_leader_epoch(current_leader_epoch)
        return found

    def _not_led(self, hosted: HostedPartition) -> Exception:
        reason, leader_id = hosted.offline_reason, hosted.leader_id
        if reason is not None and leader_id == NO_LEADER:
            return KafkaStorageError(f"{hosted.key} is offline, and no other broker can lead it: {reason}")
        return NotLeaderOrFollowerError(
            f"broker {self._node_id} does not lead {hosted.key}; node {leader_id} may"
        )

    def delete_before(
        self, partition: Partition, offset: int, then: Callable[[Exception | None], None]
    ) -> None:
        """Move the log start of a partition durably, then call ``then`` with the error, or None."""
        self._hosted[partition.key].delete_before(offset, then)

    def by_id(self, topic_id: str, partition: int) -> HostedPartition:
        """Return the partition in any role. Raises UnknownTopicOrPartitionError, KafkaStorageError."""
        hosted = self._by_id.get((topic_id, partition))
        if hosted is None:
            topic = self._image.topics_by_id.get(topic_id)
            if topic is None:
                raise UnknownTopicOrPartitionError(f"there is no topic with the id {topic_id}")
            raise self._absence(topic.name, partition)
        return hosted

    def _absence(self, topic: str, partition: int) -> Exception:
        if (topic, partition) in self._unopened:
            _, reason = self._unopened[topic, partition]
            return KafkaStorageError(f"{topic}-{partition} is offline: {reason}")
        if self._image.partition(topic, partition) is not None:
            return NotLeaderOrFollowerError(f"broker {self._node_id} has no replica of {topic}-{partition}")
        if topic in self._image.topics:
            count = len(self._image.topics[topic].partitions)
            return UnknownTopicOrPartitionError(f"{topic!r} has partitions 0 to {count - 1}, not {partition}")
        return UnknownTopicOrPartitionError(f"there is no topic {topic!r}")

    def stored(self) -> Iterator[LogDirPartition]:
        """Yield every partition here, offline ones too, in order."""
        for key in sorted([*self._hosted, *self._unopened]):
            hosted = self._hosted.get(key)
            if hosted is None:
                yield LogDirPartition(*key, 0, 0, 0, 0, self._unopened[key][1])
            else:
                yield hosted.stored()

    def is_fully_in_sync(self, key: TopicPartition) -> bool:
        """Whether all replicas of a partition are in sync, by the image."""
        state = self._image.partition(*key)
        return state is not None and set(state.isr) == set(state.replicas)

    def damaged(self) -> list[DamagedReplica]:
        """Return the replicas whose log is offline: they must not lead or count as in sync (R24, R26)."""
        found = [replica for replica, _ in self._unopened.values()]
        for hosted in self._hosted.values():
            if hosted.offline_reason is not None:
                found.append(DamagedReplica(hosted.topic_id, hosted.key.partition))
        return found

    # --- following the image

    def publish(self, delta: Delta, image: ClusterImage) -> None:
        """Apply a new image: delete, create, assign roles, reconfigure, in this order."""
        self._image = image
        changes = delta.local_changes(self._node_id)
        takes_roles = self.may_take_roles()
        for local in changes.deleted:
            self._delete(local)
        begins = not self._is_complete and (self._incarnation_id is None or self._is_registered(image))
        if not self._is_complete:
            self._load(changes.created, image)
        for local in changes.created:
            self._create(local, image)
        if begins:
            self._is_complete = True
            self._load(self._local(image), image)
        names = changes.configs_changed
        if changes.broker_configs_changed:
            names = tuple(image.topics)
        for name in names:
            self._reconfigure(name, image, is_early=True)
        if takes_roles:
            self._assign(changes.leaders, image)
            self._assign(changes.followers, image)
        elif begins:
            self._assign(self._local(image), image)
        for name in names:
            self._reconfigure(name, image, is_early=False)

    def _load(self, partitions: Iterable[LocalPartition], image: ClusterImage) -> None:
        """Open logs that may exist already, together. A log that is known to have records is not created
        again (R25).

        Until the image is complete, later images may name directories that this one does not name.
        """
        wanted: dict[TopicPartition, tuple[str, LogConfig]] = {}
        configs: dict[str, LogConfig] = {}
        for key, topic_id, _ in partitions:
            config = configs.get(key.topic)
            if config is None:
                config = configs[key.topic] = self._log_config(self._settings(image, key.topic))
            wanted[key] = (topic_id, config)
        if wanted or self._is_complete:
            self._store.load(wanted, are_all=self._is_complete)

    def may_take_roles(self) -> bool:
        """Whether an earlier image had the registration of this process (R22)."""
        return self._incarnation_id is None or self._is_complete

    def _is_registered(self, image: ClusterImage) -> bool:
        broker = image.brokers.get(self._node_id)
        return broker is not None and broker.incarnation_id == self._incarnation_id

    def _local(self, image: ClusterImage) -> Iterator[LocalPartition]:
        """Yield every partition of the image with a replica here."""
        for name, topic in image.topics.items():
            for number, state in enumerate(topic.partitions):
                if self._node_id in state.replicas:
                    yield LocalPartition(TopicPartition(name, number), topic.topic_id, state)

    def _assign(self, partitions: Iterable[LocalPartition], image: ClusterImage) -> None:
        """Assign each partition the role of its state."""
        now_ms = self._clock.monotonic_ms()
        high_watermarks = image.high_watermarks
        for key, topic_id, state in partitions:
            self._roleless.pop(key, None)
            hosted = self._hosted.get(key)
            if hosted is None:
                continue  # its log could not be created
            try:
                if state.leader == self._node_id:
                    if self.fetching is not None:
                        self.fetching.unfollow(hosted)
                    known = high_watermarks.get((topic_id, key.partition), 0)
                    hosted.lead(state, now_ms=now_ms, known_high_watermark=known)
                    if self.observer is not None:
                        self.observer.on_leading(hosted.partition)
                else:
                    hosted.follow(state)
                    if self.observer is not None:
                        self.observer.on_not_leading(hosted.partition)
                    if hosted.is_damaged and self._may_replace(hosted, state):
                        hosted = self._replace_damaged(hosted, topic_id, image)
                        hosted.follow(state)
                    if self.fetching is not None:
                        self.fetching.follow(hosted, state.leader)
            except (StorageError, OSError) as error:
                logger.error("no role taken %s", Fields(partition=key, error=error))
                self._strip(hosted, error)
                self._roleless[key] = None

    def retry_roles(self) -> None:
        """Assign roles again to partitions whose last assignment failed, maybe temporarily (EMFILE)."""
        if self._roleless:
            local = [one for one in self._local(self._image) if one.topic_partition in self._roleless]
            self._assign(local, self._image)

    def _may_replace(self, hosted: HostedPartition, state: PartitionState) -> bool:
        """Whether this replica may start again with an empty log: another broker leads, and the replica does
        not count as in sync or eligible (R24).

        Not if it has reported a position of its former log in this leader epoch: the leader would take the
        empty log for caught up and admit it to the in-sync set.
        """
        is_counted = self._node_id in (*state.isr, *state.elr) or hosted.reported_epoch == state.leader_epoch
        return state.leader != NO_LEADER and not is_counted

    def _replace_damaged(
        self, hosted: HostedPartition, topic_id: str, image: ClusterImage
    ) -> HostedPartition:
        """Give the replica an empty log; all records will be fetched again."""
        key = hosted.key
        reason = hosted.offline_reason
        settings = self._settings(image, key.topic)
        self._strip(hosted, KafkaStorageError(f"{key} is damaged: {reason}"))
        self._scheduler.forget(hosted)
        log = self._store.replace_damaged(key, topic_id, self._log_config(settings))
        self._host(key, topic_id, log, partition_settings(settings))
        logger.warning("damaged log replaced, all is fetched again %s", Fields(partition=key, reason=reason))
        return self._hosted[key]

    def _strip(self, hosted: HostedPartition, error: Exception) -> None:
        if self.fetching is not None:
            self.fetching.unfollow(hosted)
        hosted.resign(error)
        if self.observer is not None:
            self.observer.on_not_leading(hosted.partition)

    def mark_unsynced(self) -> None:
        """Mark page-cache logs, and logs that a full disk prevented from syncing, for the next round."""
        for hosted in self:
            hosted.mark_unsynced()

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
            self._unopened[key] = DamagedReplica(local.topic_id, key.partition), str(error)
            logger.error("log not opened %s", Fields(partition=key, error=error))
            return
        self._host(key, local.topic_id, log, partition_settings(settings))

    def _host(self, key: TopicPartition, topic_id: str, log: Log, settings: PartitionSettings) -> None:
        partition = Partition(key, topic_id, log, broker_id=self._node_id, settings=settings)
        hosted = HostedPartition(partition, self._waiters, self._scheduler)
        self._hosted[key] = self._by_id[topic_id, key.partition] = hosted
        if log.config.is_compacted:
            self.has_compacted.set()

    def _delete(self, local: LocalPartition) -> None:
        key = local.topic_partition
        self._unopened.pop(key, None)
        self._roleless.pop(key, None)
        hosted = self._hosted.pop(key, None)
        if hosted is None:
            return
        del self._by_id[local.topic_id, key.partition]
        self._strip(hosted, UnknownTopicOrPartitionError(f"topic {key.topic!r} was deleted"))
        self._scheduler.forget(hosted)
        try:
            self._store.delete_log(key, local.topic_id)
        except (StorageError, OSError) as error:
            logger.error("files of a deleted partition stay %s", Fields(partition=key, error=error))

    def _reconfigure(self, topic: str, image: ClusterImage, *, is_early: bool) -> None:
        """Apply a topic's settings. A greater min.insync.replicas is applied early, before the in-sync
        sets of the same image: no record may be committed that the old and the new image would both
        refuse (R9)."""
        settings = self._settings(image, topic)
        config, more = self._log_config(settings), partition_settings(settings)
        if config.is_compacted:
            self.has_compacted.set()
        for number in range(len(image.topics[topic].partitions)):
            hosted = self._hosted.get((topic, number))
            if hosted is None:
                continue
            grows = more.min_insync_replicas > hosted.min_insync_replicas
            if grows == is_early:
                hosted.reconfigure(config, more)


_TIMESTAMP_TYPES: Final = {
    "CreateTime": TimestampType.CREATE_TIME,
    "LogAppendTime": TimestampType.LOG_APPEND_TIME,
}
#: Settings that a log takes as they are, by the names of LogConfig's fields.
_LOG_SETTINGS: Final = (
    "segment_bytes",
    "segment_ms",
    "segment_jitter_ms",
    "index_interval_bytes",
    "max_message_bytes",
    "durability",
    "file_delete_delay_ms",
    "min_cleanable_dirty_ratio",
    "min_compaction_lag_ms",
    "delete_retention_ms",
)


def log_config(settings: Mapping[str, Setting]) -> LogConfig:
    """Return the log's part of a topic's settings in force."""
    values: dict[str, Any] = {name: settings[name.replace("_", ".")].value for name in _LOG_SETTINGS}
    if settings["preallocate"].value:
        values["preallocate_min_bytes"] = values["preallocate_max_bytes"] = values["segment_bytes"]
    policies = settings["cleanup.policy"].value.split(",")
    deletes = "delete" in policies
    return LogConfig(
        segment_index_bytes=max(settings["segment.index.bytes"].value, 8),
        retention_ms=settings["retention.ms"].value if deletes else -1,
        retention_bytes=settings["retention.bytes"].value if deletes else -1,
        timestamp_type=_TIMESTAMP_TYPES[settings["message.timestamp.type"].value],
        is_compacted="compact" in policies,
        **values,
    )


def partition_settings(settings: Mapping[str, Setting]) -> PartitionSettings:
    """Return the part of a topic's settings in force that the partition's role needs."""
    return PartitionSettings(
        min_insync_replicas=settings["min.insync.replicas"].value,
        message_timestamp_before_max_ms=settings["message.timestamp.before.max.ms"].value,
        message_timestamp_after_max_ms=settings["message.timestamp.after.max.ms"].value,
    )
