"""Snapshots of an embedded broker: topics, records, groups and transactions, taken and restored in memory.

If the state has changed, a restore appends one entry to the metadata log. The entry gives every partition
that has changed since the snapshot its former records in a new leader epoch. For clients, this is a leader
election, because no leader epoch decreases.

If the state of transactions has changed, it is deleted instead of restored: otherwise an open transactional
producer could commit a transaction whose records are gone. A snapshot contains no open transaction.
"""

# Tests: tests/testing/test_snapshots.py

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafkalite.errors import LogOfflineError, TransactionStateError
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.records import (
    BROKER,
    TOPIC,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from kafkalite.model import TRANSACTIONS_TOPIC, TopicPartition
from kafkalite.storage.log import Log

if TYPE_CHECKING:
    from kafkalite.broker.broker import Broker

_NO_CONFIGS: Final[Mapping[str, str]] = {}
_READ_BYTES: Final = 64 << 20


@dataclass(slots=True)
class LogSnapshot:
    """The batches of one partition. ``log`` contained exactly these when the snapshot was taken or last
    restored."""

    epoch: int  #: the highest leader epoch that the partition has had, also after restores
    start: int  #: the log start offset
    first: int  #: the base offset of the first batch, which may be below ``start``
    batches: list[bytes]  #: complete batches, in order
    shape: tuple[int, int, int]  #: start, end (exclusive) and size of ``log``
    log: Log


@dataclass(slots=True)
class Snapshot:
    """The state of a broker, for ``Cluster.restore``. It belongs to the cluster that made it."""

    topics: Mapping[str, TopicImage] = field(default_factory=dict)
    configs: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    logs: dict[TopicPartition, LogSnapshot] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Snapshot of {len(self.topics)} topics>"


def take(broker: Broker) -> Snapshot:
    """Return a copy of the broker's state.

    Raises TransactionStateError if a partition has an open transaction, StorageError if a log can't be read.
    """
    image = broker.image
    logs: dict[TopicPartition, LogSnapshot] = {}
    for hosted in broker.partitions:
        log = hosted.idle_log()
        if log is None:
            raise LogOfflineError(f"{hosted.key} is offline: {hosted.offline_reason}")
        if log.last_stable_offset(log.log_end_offset) < log.log_end_offset:
            raise TransactionStateError(
                f"{hosted.key} has an open transaction", hint="commit or abort it before the snapshot"
            )
        logs[hosted.key] = _copied(log, hosted.leader_epoch)
    topics = {name: topic for name, topic in image.topics.items() if name != TRANSACTIONS_TOPIC}
    return Snapshot(topics, image.configs, logs)


def _shape(log: Log) -> tuple[int, int, int]:
    return log.log_start_offset, log.log_end_offset, log.size_bytes


def _copied(log: Log, epoch: int) -> LogSnapshot:
    start, end = log.log_start_offset, log.log_end_offset
    batches: list[bytes] = []
    offset = first = start
    while offset < end:
        read = log.read(offset, max_bytes=_READ_BYTES, up_to=end)
        if not batches:
            first = int.from_bytes(read.buffers[0][:8], "big")
        batches += map(bytes, read.buffers)
        offset = read.next_offset
    return LogSnapshot(epoch, start, first, batches, _shape(log), log)


class Restoration:
    """One attempt to restore a snapshot. Makes metadata records, and replaces logs when these records are
    replayed.

    The controller calls ``records`` to make the entry. When the entry is replayed, ``prepare`` must be the
    first publisher that is called.
    """

    def __init__(self, broker: Broker, snapshot: Snapshot, now_ms: int) -> None:
        """Prepare to restore ``snapshot``. ``now_ms`` is the wall clock time."""
        self._broker = broker
        self._now_ms = now_ms
        self._snapshot = snapshot
        self._decided_on: ClusterImage | None = None
        self.replaced: list[TopicPartition] = []  #: the partitions whose log ``prepare`` has replaced
        self._removed: list[TopicImage] = []
        self._replaced: list[tuple[TopicPartition, str]] = []

    def records(self, image: ClusterImage) -> list[MetadataRecord]:
        """Return the metadata records that change ``image`` to the snapshot; [] if nothing has changed."""
        snapshot = self._snapshot
        self._decided_on = image
        self._removed, self._replaced = [], []
        changed = self._changed()
        records: list[MetadataRecord] = []
        for name, topic in image.topics.items():
            former = snapshot.topics.get(name)
            if former is topic or (former is not None and _is_same(former, topic)):
                continue
            # The snapshot has no topic of transactions, but their logs.
            is_kept = name == TRANSACTIONS_TOPIC and all(
                (key := TopicPartition(name, number)) in snapshot.logs and key not in changed
                for number in range(len(topic.partitions))
            )
            if not is_kept:
                records.append(RemoveTopicRecord(topic.topic_id))
                self._removed.append(topic)
        has_configured = image.configs is not snapshot.configs
        changed_names = {key.topic for key in changed}
        for name, former in snapshot.topics.items():
            topic = image.topics.get(name, former)
            if topic is former and name in image.topics and name not in changed_names and not has_configured:
                continue
            is_new = name not in image.topics or not _is_same(former, topic)
            if is_new:
                topic = former
                records.append(TopicRecord(former.topic_id, name))
            for number, state in enumerate(topic.partitions):
                key = TopicPartition(name, number)
                if is_new or key in changed or key not in snapshot.logs:
                    self._replaced.append((key, former.topic_id))
                    records.append(self._next_epoch(key, former.topic_id, state))
            if is_new or has_configured:
                former_configs = snapshot.configs.get((TOPIC, name), _NO_CONFIGS)
                configs = _NO_CONFIGS if is_new else image.configs.get((TOPIC, name), _NO_CONFIGS)
                records += _config_changes((TOPIC, name), configs, former_configs)
        for resource in sorted(image.configs.keys() | snapshot.configs.keys()) if has_configured else ():
            if resource[0] == BROKER:
                configs = image.configs.get(resource, _NO_CONFIGS)
                records += _config_changes(resource, configs, snapshot.configs.get(resource, _NO_CONFIGS))
        return records

    def _next_epoch(self, key: TopicPartition, topic_id: str, state: PartitionState) -> PartitionRecord:
        epoch = state.leader_epoch + 1
        saved = self._snapshot.logs.get(key)
        if saved is not None:
            epoch = saved.epoch = max(epoch, saved.epoch + 1)
        changed = state._replace(leader_epoch=epoch, partition_epoch=state.partition_epoch + 1)
        return PartitionRecord(topic_id, key.partition, *changed)

    def _changed(self) -> set[TopicPartition]:
        """Return the partitions whose logs have changed since the snapshot was taken or last restored."""
        changed: set[TopicPartition] = set()
        find = self._broker.partitions.find
        for key, saved in self._snapshot.logs.items():
            hosted, log = find(key), saved.log
            if (
                hosted is None
                or hosted.idle_log() is not log
                or (log.log_start_offset, log.log_end_offset) != saved.shape[:2]
                or (log.config.is_compacted and log.size_bytes != saved.shape[2])
            ):
                changed.add(key)
        return changed

    def prepare(self, delta: Delta, image: ClusterImage) -> None:
        """Replace the logs of this restoration, before other publishers apply its metadata. Has no effect if
        ``delta`` belongs to another entry."""
        if delta.before is not self._decided_on:
            return
        partitions, snapshot = self._broker.partitions, self._snapshot
        self.replaced = [key for key, _ in self._replaced]
        for topic in self._removed:
            for number in range(len(topic.partitions)):
                partitions.remove(TopicPartition(topic.name, number), topic.topic_id)
        for key, topic_id in self._replaced:
            saved = snapshot.logs.get(key)
            log = partitions.replace(key, topic_id, image)
            if saved is not None:
                _fill(log, saved, self._now_ms)
                saved.log, saved.shape = log, _shape(log)


def _is_same(former: TopicImage, topic: TopicImage) -> bool:
    """Whether a topic was neither created again nor given more partitions."""
    return former.topic_id == topic.topic_id and len(former.partitions) == len(topic.partitions)


def _config_changes(
    resource: tuple[str, str], now: Mapping[str, str], former: Mapping[str, str]
) -> Iterator[ConfigRecord]:
    for key in now.keys() - former.keys():
        yield ConfigRecord(*resource, key, None)
    for key, value in former.items():
        if now.get(key) != value:
            yield ConfigRecord(*resource, key, value)


def _fill(log: Log, saved: LogSnapshot, now_ms: int) -> None:
    if saved.first:
        log.reset_to(saved.first)
    for batches in saved.batches:
        log.append_as_follower(batches, now_ms=now_ms)
    log.expire_producers(now_ms, 0)  # the next batch of a connected producer may then have any sequence
    if saved.start > saved.first:
        log.delete_before(saved.start)
