"""The partitions of this broker and their roles: leader, follower or none.

``publish`` applies each metadata image: it opens and deletes logs, assigns roles and reconfigures. This
broker takes no role before an image contains the registration of its process (R22). If a log cannot be
opened, only its partition is offline, and clients get KAFKA_STORAGE_ERROR with the reason.
"""

# Long because all changes of the hosted partitions keep the same tables consistent.

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Final, Protocol

from kafkalite.broker.activity import Activity
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.tasks import Signal
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import (
    KafkaStorageError,
    NotLeaderOrFollowerError,
    StorageError,
    StorageExhaustedError,
    UnknownTopicOrPartitionError,
)
from kafkalite.log_fields import Fields
from kafkalite.metadata.delta import Delta, LocalPartition
from kafkalite.metadata.image import ClusterImage, PartitionState
from kafkalite.metadata.records import NO_LEADER
from kafkalite.metadata.topic_config import Setting, topic_settings
from kafkalite.model import NO_EPOCH, NO_OFFSET, TimestampType, TopicPartition
from kafkalite.protocol.messages.admin import LogDirPartition
from kafkalite.protocol.messages.cluster import DamagedReplica, ReplicaReport
from kafkalite.replication.partition import Partition, PartitionSettings
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import PAGE_CACHE, LogConfig
from kafkalite.storage.log_dirs import DirectoryState, LogDirs
from kafkalite.storage.log_store import LogExchange

logger = logging.getLogger(__name__)


class PartitionFetching(Protocol):
    """Copies records from other brokers for the partitions that this broker follows."""

    def follow(self, hosted: HostedPartition, leader_id: int) -> None:
        """Fetch from broker ``leader_id`` in the current leader epoch. -1 means that there is no leader."""
        ...

    def unfollow(self, hosted: HostedPartition) -> None:
        """Stop fetching for ``hosted``. Has no effect if it is not being fetched."""
        ...


class RoleObserver(Protocol):
    """Is notified when the role of this broker in a partition may have changed.

    ``Coordinators`` implements it.
    """

    def on_leading(self, partition: Partition) -> None:
        """Serve ``partition`` as its leader.

        Called when this broker begins to lead it, and again when its state in the metadata changes.
        """
        ...

    def on_not_leading(self, partition: Partition) -> None:
        """Stop serving ``partition`` as its leader. Called when this broker follows it or has no role."""
        ...


class Partitions:
    """The replicas that the metadata image assigns to this broker. ``find`` returns one by TopicPartition.

    Iteration yields the HostedPartitions whose log is open and not being replaced. ``len`` counts all
    replicas.
    """

    def __init__(
        self,
        store: LogDirs,
        node_id: int,
        topic_defaults: Mapping[str, Any],
        waiters: Waiters,
        scheduler: SyncScheduler[HostedPartition],
        *,
        is_volatile: bool = False,
        incarnation_id: str | None = None,
        node: NodeState | None = None,
        clock: Clock | None = None,
        activity: Activity | None = None,
    ) -> None:
        """``is_volatile`` means that no data outlives this broker, so all logs have durability=page-cache.

        ``incarnation_id`` identifies this process, which takes no role before an image contains its
        registration (R22); None, in tests, is for one that needs none. ``node`` has the end of the session
        (R23); if it is None, this broker needs no session.
        """
        self._is_volatile = is_volatile
        self._incarnation_id = incarnation_id
        self._node = node
        self._clock = clock or SystemClock()
        #: Its ``touch`` is called when a log changes or an image is published, which wakes the periodic
        #: tasks.
        self.activity = activity or Activity(self._clock, may_rest=False)
        waiters.on_change = self.activity.touch
        self.fetching: PartitionFetching | None = None
        self.observer: RoleObserver | None = None
        self._store = store
        self._node_id = node_id
        self._topic_defaults = dict(topic_defaults)
        self._waiters = waiters
        self._scheduler = scheduler
        self._hosted: dict[tuple[str, int], HostedPartition] = {}
        self._by_id: dict[tuple[str, int], HostedPartition] = {}  #: the same partitions by topic id
        self._unopened: dict[TopicPartition, tuple[DamagedReplica, Exception]] = {}
        self._leaderless: dict[TopicPartition, None] = {}  # partitions without a leader in the image
        #: Partitions whose last role assignment failed, with the error.
        self._roleless: dict[TopicPartition, Exception | None] = {}
        self._exchanging: dict[TopicPartition, HostedPartition] = {}  # logs that ``_exchange`` replaces
        #: Called when a log has gone offline, so that the controller can be told at once (R81).
        self.on_offline: Callable[[], None] = lambda: None
        self._probing: set[str] = set()  #: the data directories whose disks are being probed
        #: The replicas whose removal was replayed before ``_is_complete``, by topic id and partition (R63),
        #: whether their files are kept, and the leader epoch of the latest unclean election then (R71).
        self._removed: dict[tuple[str, int], tuple[TopicPartition, bool, int]] = {}
        self._image = ClusterImage()
        self.has_compacted = Signal()  #: set when a compacted topic is added; cleared by the cleaner
        self.has_failed = Signal()  #: set when ``retry`` has something to do
        self._is_complete = False  # whether an image has contained this process's registration

    def __len__(self) -> int:
        return len(self._hosted) + len(self._unopened)

    def __iter__(self) -> Iterator[HostedPartition]:
        if not self._exchanging:
            return iter(self._hosted.values())
        return iter([one for one in self._hosted.values() if one.key not in self._exchanging])

    def find(self, key: TopicPartition) -> HostedPartition | None:
        """Return the partition in any role, or None if this broker has not opened it."""
        return self._hosted.get(key)

    def led(self) -> Iterator[Partition]:
        """Yield the partitions that this broker leads and that have followers."""
        partitions = (hosted.partition for hosted in self)
        return (one for one in partitions if one.leads_followers)

    @property
    def offline_count(self) -> int:
        unusable = len(self._unopened) + len(self._exchanging)
        return unusable + sum(hosted.offline_reason is not None for hosted in self)

    @property
    def damaged_count(self) -> int:
        return sum(hosted.is_damaged for hosted in self)

    @property
    def torn_tail_records(self) -> int:
        """The number of records that recoveries removed from torn ends of the present logs (R24)."""
        return sum(hosted.torn_records for hosted in self)

    def leader(self, topic: str, partition: int, current_leader_epoch: int = NO_EPOCH) -> Partition:
        """Return a partition that this broker leads. The client's leader epoch, if any, must be current (R3).

        Raises UnknownTopicOrPartitionError, NotLeaderOrFollowerError (also if this broker has no session),
        FencedLeaderEpochError, UnknownLeaderEpochError, KafkaStorageError (the log could not be opened, or it
        is offline and the partition has no leader).
        """
        hosted = self._hosted.get((topic, partition))
        if hosted is None:
            raise self._absence(topic, partition)
        found = hosted.partition
        if not found.is_leader:
            raise self._not_led(hosted)
        if not self.may_serve():
            raise NotLeaderOrFollowerError(
                f"broker {self._node_id} reaches no controller; another broker may lead {hosted.key}"
            )
        if current_leader_epoch != NO_EPOCH:
            found.check_leader_epoch(current_leader_epoch)
        return found

    def readable(self, topic: str, partition: int, current_leader_epoch: int = NO_EPOCH) -> Partition:
        """Return a partition that a consumer may read here: this broker leads it, or follows and is in sync
        (R65). The client's leader epoch, if any, must be current (R3).

        Raises the errors of ``leader``, and OffsetNotAvailableError for a follower that cannot serve now.
        """
        hosted = self._hosted.get((topic, partition))
        if hosted is None or hosted.is_leader or hosted.leader_id == NO_LEADER or not self.may_serve():
            return self.leader(topic, partition, current_leader_epoch)
        hosted.check_serves_near(current_leader_epoch)
        return hosted.partition

    def may_serve(self) -> bool:
        """Whether this broker has a session, so that no other broker may lead its partitions (R23)."""
        if self._node is None or self._node.session_end_ms == inf:  # without peers
            return True
        return self._clock.monotonic_ms() < self._node.session_end_ms

    def _not_led(self, hosted: HostedPartition) -> Exception:
        reason, leader_id = hosted.offline_reason, hosted.leader_id
        if reason is not None and leader_id == NO_LEADER:
            return KafkaStorageError(f"{hosted.key} is offline, and no other broker can lead it: {reason}")
        failure = self._roleless.get(hosted.key)
        if failure is not None:
            return NotLeaderOrFollowerError(f"broker {self._node_id} cannot lead {hosted.key} now: {failure}")
        return NotLeaderOrFollowerError(
            f"broker {self._node_id} does not lead {hosted.key}; node {leader_id} may"
        )

    def offline_reason(self, key: TopicPartition) -> str:
        """Return why this broker's replica of a partition is offline or has no role, or the empty string."""
        unopened, hosted = self._unopened.get(key), self._hosted.get(key)
        if unopened is not None:
            return str(unopened[1])
        error = self._roleless.get(key)
        if error is not None:
            return str(error)
        return "" if hosted is None else hosted.offline_reason or ""

    def delete_before(
        self, partition: Partition, offset: int, then: Callable[[Exception | None], None]
    ) -> None:
        """Move the log start of a partition durably, then call ``then`` with the error, or with None."""
        self._hosted[partition.key].delete_before(offset, then)

    def by_id(self, topic_id: str, partition: int) -> HostedPartition:
        """Return the partition in any role.

        Raises UnknownTopicOrPartitionError, NotLeaderOrFollowerError (no replica here), KafkaStorageError
        (the log could not be opened).
        """
        hosted = self._by_id.get((topic_id, partition))
        if hosted is None:
            topic = self._image.topics_by_id.get(topic_id)
            if topic is None:
                raise UnknownTopicOrPartitionError(f"there is no topic with the id {topic_id}")
            raise self._absence(topic.name, partition)
        return hosted

    def _absence(self, topic: str, partition: int) -> Exception:
        unopened = self._unopened.get(TopicPartition(topic, partition))
        if unopened is not None:
            _, reason = unopened
            return KafkaStorageError(f"{topic}-{partition} is offline: {reason}")
        if self._image.partition(topic, partition) is not None:
            return NotLeaderOrFollowerError(f"broker {self._node_id} has no replica of {topic}-{partition}")
        if topic in self._image.topics:
            count = len(self._image.topics[topic].partitions)
            return UnknownTopicOrPartitionError(f"{topic!r} has partitions 0 to {count - 1}, not {partition}")
        return UnknownTopicOrPartitionError(f"there is no topic {topic!r}")

    def stored(self) -> Iterator[LogDirPartition]:
        """Yield the sizes and offsets of every partition here, including offline ones, sorted by key.

        While the disk is full or descriptors are exhausted, ``offline_reason`` reports that for each
        partition that is not offline (R54, R55).
        """
        shortages = self._store.shortages()
        for key in sorted([*self._hosted, *self._unopened]):
            hosted = self._hosted.get(key)
            if hosted is None:
                yield LogDirPartition(*key, 0, 0, 0, 0, str(self._unopened[TopicPartition(*key)][1]))
            else:
                stored = hosted.stored()
                if shortages and stored.offline_reason is None:
                    shortage = shortages.get(self._store.path_of(hosted.key) or "")
                    stored = stored._replace(offline_reason=shortage)
                yield stored

    def directories(self) -> list[DirectoryState]:
        """Return the state of each data directory of this node."""
        return self._store.states()

    def is_fully_in_sync(self, key: TopicPartition) -> bool:
        """Whether all replicas of a partition are in its ISR according to the newest image."""
        state = self._image.partition(*key)
        return state is not None and set(state.isr) == set(state.replicas)

    def damaged(self) -> list[DamagedReplica]:
        """Return the replicas whose log is offline. They must not lead or be in the ISR (R24, R26).

        The damaged log of a partition with only one replica is omitted: its records before the damage can
        still be read, and there is no better replica. A log that will soon be opened again (R55) is omitted,
        too.
        """
        found = [
            replica
            for replica, error in self._unopened.values()
            if not isinstance(error, StorageExhaustedError)
        ]
        for hosted in self._hosted.values():
            is_offline = hosted.offline_reason is not None and not hosted.must_reopen
            if is_offline and not (hosted.is_damaged and self._is_alone(hosted)):
                found.append(DamagedReplica(hosted.topic_id, hosted.key.partition))
        return found

    def _is_alone(self, hosted: HostedPartition) -> bool:
        state = self._image.partition(*hosted.key)
        return state is not None and state.is_only_copy(self._node_id)

    @property
    def has_leaderless(self) -> bool:
        """Whether a partition with a replica here has no leader."""
        return bool(self._leaderless)

    def leaderless(self) -> Iterator[ReplicaReport]:
        """Yield the reports of the replicas here whose partitions have no leader (R46).

        Omits replicas whose log may still change, such as those that are still in an earlier leader epoch.
        """
        for key in self._leaderless:
            state, hosted = self._image.partition(*key), self._hosted.get(key)
            if state is None or state.leader != NO_LEADER:
                continue
            if hosted is not None and (hosted.is_busy or hosted.must_reopen or key in self._exchanging):
                continue
            if hosted is not None and hosted.leader_epoch == state.leader_epoch:
                yield hosted.report()
            elif hosted is None and key in self._unopened:
                replica, error = self._unopened[key]
                if not isinstance(error, StorageExhaustedError):
                    yield ReplicaReport(
                        replica.topic_id, key.partition, state.leader_epoch, NO_EPOCH, 0, True, 0, NO_OFFSET
                    )

    # --- following the image

    def publish(self, delta: Delta, image: ClusterImage) -> None:
        """Apply a new image: delete and create partitions, assign roles, and reconfigure."""
        self._image = image
        self.activity.touch()
        self._store.note_metadata_offset(image.metadata_offset)
        changes = delta.local_changes(self._node_id)
        takes_roles = self.may_take_roles()
        for local in changes.deleted:
            if self.is_removed_for_good(local, image):
                self._delete(local, image)
            else:
                self._unload(local, image)
        begins = not self._is_complete and (self._incarnation_id is None or self._is_registered(image))
        if not self._is_complete:
            self._load(changes.created, image)
        for local in changes.created:
            self._create(local, image)
        if begins:
            self._is_complete = True
            self._drop_removed(image)
            self._load(self._local(image), image)
            if self._incarnation_id is not None and image.brokers[self._node_id].is_restored:
                self._distrust_all(image)
            elif self._store.are_several:
                self._distrust_older(self._local(image))
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

    def is_removed_for_good(self, local: LocalPartition, image: ClusterImage) -> bool:
        """Whether a removal deletes the log when it is replayed (R63).

        True if the topic was deleted, or if the image is not older than this process's registration. An older
        image may be followed by one that adds the replica again, and its log may be the only one with
        committed records.
        """
        return self._is_complete or local.topic_id not in image.topics_by_id

    def _unload(self, local: LocalPartition, image: ClusterImage) -> None:
        """Close the log of a replica that old metadata remove, and keep its files (R63). A later image may
        have another topic of the same name, whose log must take its place."""
        key = local.topic_partition
        state = image.partition_of(local.topic_id, key.partition)
        loss_epoch = NO_EPOCH if state is None else state.loss_epoch
        self._removed[local.topic_id, key.partition] = key, self._must_keep(local, image), loss_epoch
        if self._take_out(local) is not None:
            self._store.unload_log(key)

    def _drop_removed(self, image: ClusterImage) -> None:
        """Delete the logs of removed replicas, when the first image with this process's registration is
        published.

        Earlier images delete none of them (R63). Topics that were deleted since then have none here either.
        Replicas that were added again begin with an empty log (R62).
        """
        for (topic_id, number), (key, is_kept, loss_epoch) in self._removed.items():
            state = image.partition_of(topic_id, number)
            if state is None or self._node_id not in state.replicas:
                is_kept = is_kept or self.has_lost_since(state, loss_epoch)
                delete = partial(self._store.delete_unloaded, is_kept=is_kept)
                self._delete_files(delete, key, topic_id)
        self._removed.clear()
        for local in list(self._local(image)):
            key, topic_id, state = local
            if not self._is_new_replica(state) or self._store.find(key, topic_id) is None:
                continue
            if self._store.is_earlier(topic_id, key.partition, state.replica_epoch(self._node_id)):
                self._delete(local, image)
                self._create(local, image)

    def _is_new_replica(self, state: PartitionState) -> bool:
        """Whether a reassignment has added this broker's replica, and it has no role yet. Only then may files
        of an earlier replica be retired (R62). False while the image may be an old one."""
        members = (*state.isr, *state.elr, *state.last_known_elr)
        is_added = state.replica_epoch(self._node_id) > 0 and self._node_id not in members
        return self._is_complete and is_added

    def _load(self, partitions: Iterable[LocalPartition], image: ClusterImage) -> None:
        """Open the logs of ``partitions`` together, and create missing logs.

        A log that is missing although it has had records is offline instead (R25). Until an image contains
        this process's registration, directories of unknown partitions are not reported, because a later image
        may have them.
        """
        partitions = list(partitions)
        wanted: dict[TopicPartition, tuple[str, LogConfig]] = {}
        configs: dict[str, LogConfig] = {}
        for key, topic_id, _ in partitions:
            config = configs.get(key.topic)
            if config is None:
                config = configs[key.topic] = self._log_config(image, key.topic)
            wanted[key] = (topic_id, config)
        for local in partitions:
            if self._is_new_replica(local.state):  # ``load`` would open the files of an earlier replica
                self._open(local, self._settings(image, local.topic_partition.topic), image)
                del wanted[local.topic_partition]
        if wanted or self._is_complete:
            self._store.load(wanted, are_all=self._is_complete, committed=image.high_watermarks)

    def _distrust_all(self, image: ClusterImage) -> None:
        """Mark each replica of a partition with several replicas as damaged, because this directory is an
        older copy (R51)."""
        logger.error(
            "data directory is an older copy, all replicas are fetched again %s",
            Fields(path=self._store.path),
        )
        found = self._distrust(self._local(image), lambda _key: True)
        self._store.distrust(key for key in found if self._store.is_from_older_copy(key))

    def _distrust_older(self, partitions: Iterable[LocalPartition]) -> None:
        """As ``_distrust_all``, for replicas in further data directories that may be older copies (R83)."""
        self._store.distrust(self._distrust(partitions, self._store.is_from_older_copy))

    def _distrust(
        self, partitions: Iterable[LocalPartition], is_suspect: Callable[[TopicPartition], bool]
    ) -> list[TopicPartition]:
        """Mark the suspect replicas of partitions with several replicas as damaged. Return them."""
        found: list[TopicPartition] = []
        for key, _, state in partitions:
            hosted = self._hosted.get(key)
            if hosted is not None and not state.is_only_copy(self._node_id) and is_suspect(key):
                hosted.mark_damaged("the data directory was replaced by an older copy")
                found.append(key)
        return found

    def may_take_roles(self) -> bool:
        """Whether this broker may lead or follow: an image has shown this process's registration (R22)."""
        return self._incarnation_id is None or self._is_complete

    def _is_registered(self, image: ClusterImage) -> bool:
        broker = image.brokers.get(self._node_id)
        return broker is not None and broker.incarnation_id == self._incarnation_id

    def _local(self, image: ClusterImage) -> Iterator[LocalPartition]:
        """Yield every partition of the image that has a replica on this broker."""
        for name, topic in image.topics.items():
            for number, state in enumerate(topic.partitions):
                if self._node_id in state.replicas:
                    yield LocalPartition(TopicPartition(name, number), topic.topic_id, state)

    def _assign(self, partitions: Iterable[LocalPartition], image: ClusterImage) -> None:
        """Give each partition the role that its state in the image requires."""
        now_ms = self._clock.monotonic_ms()
        high_watermarks = image.high_watermarks
        for key, topic_id, state in partitions:
            self._roleless.pop(key, None)
            if state.leader == NO_LEADER:
                self._leaderless[key] = None
            else:
                self._leaderless.pop(key, None)
            hosted = self._hosted.get(key)
            if hosted is None:
                continue  # its log could not be opened
            if key in self._exchanging:
                continue  # ``_on_exchanged`` assigns it
            known = high_watermarks.get((topic_id, key.partition), 0)
            try:
                if self._node_id in state.isr:
                    sync = self._store.keep_replacement(key)
                    if sync is not None:
                        self._scheduler.submit(sync)
                if state.leader == self._node_id:
                    if self.fetching is not None:
                        self.fetching.unfollow(hosted)
                    hosted.lead(state, now_ms=now_ms, known_high_watermark=known)
                    if self.observer is not None:
                        self.observer.on_leading(hosted.partition)
                else:
                    hosted.follow(state, known_high_watermark=known)
                    if self.observer is not None:
                        self.observer.on_not_leading(hosted.partition)
                    if hosted.is_damaged and self._may_replace(hosted, state):
                        begin = partial(self._store.begin_replace, key)
                        self._exchange(hosted, begin, "damaged log replaced, all is fetched again")
                    elif self._must_reinstate(hosted, state):
                        begin = partial(self._store.begin_reinstate, key)
                        self._exchange(hosted, begin, "damaged log put back, no leader has all its records")
                    elif self.fetching is not None:
                        self.fetching.follow(hosted, state.leader)
            except (StorageError, OSError) as error:
                logger.error("no role taken %s", Fields(partition=key, error=error))
                self._strip(hosted, error)
                self._roleless[key] = error
                self.has_failed.set()

    def retry(self) -> None:
        """Open the logs that lacked disk space or descriptors (R55), and repeat failed role assignments."""
        self.has_failed.clear()
        for hosted in [one for one in self if one.must_reopen]:
            self._reopen(hosted)
        exhausted = [
            key for key, (_, error) in self._unopened.items() if isinstance(error, StorageExhaustedError)
        ]
        for key in exhausted:
            topic_id = self._unopened[key][0].topic_id
            state = self._image.partition(*key)
            assert state is not None, f"{key} was deleted"
            self._create(LocalPartition(key, topic_id, state), self._image)
            if key in self._hosted:
                del self._unopened[key]
                self._roleless[key] = None
                if self._is_complete and self._store.is_from_older_copy(key):
                    self._distrust_older([LocalPartition(key, topic_id, state)])
        if self._roleless and self.may_take_roles():
            local = [one for one in self._local(self._image) if one.topic_partition in self._roleless]
            self._assign(local, self._image)

    def _reopen(self, hosted: HostedPartition) -> None:
        """Recover a log whose truncation failed (R55), as if the process had ended during the truncation."""
        key, topic_id, reason = hosted.key, hosted.topic_id, hosted.offline_reason
        state = self._image.partition(*key)
        assert state is not None, f"{key} was deleted"
        self._strip(hosted, KafkaStorageError(f"{key} is opened again: {reason}"))
        self._scheduler.forget(hosted)
        del self._hosted[key], self._by_id[topic_id, key.partition]
        self._store.release_log(key)
        self._create(LocalPartition(key, topic_id, state), self._image)
        self._roleless[key] = None
        logger.warning("log opened again %s", Fields(partition=key, reason=reason))

    def _may_replace(self, hosted: HostedPartition, state: PartitionState) -> bool:
        """Whether an empty log may replace the damaged log of ``hosted`` (R24).

        Another broker must lead, and this replica must be neither in the ISR nor in the ELR. It must not have
        reported a position in its damaged log in this leader epoch: the leader would count the empty log as
        caught up.
        """
        is_counted = self._node_id in (*state.isr, *state.elr) or hosted.reported_epoch == state.leader_epoch
        return state.leader != NO_LEADER and not is_counted

    def _must_reinstate(self, hosted: HostedPartition, state: PartitionState) -> bool:
        """Whether the damaged log that was replaced by an empty one must be put back (R52).

        That is so if the damaged log ends after the new log, and the new log cannot be completed: there is no
        leader, and no replica that could become leader without an operator.
        """
        end = self._store.replaced_end(hosted.key)
        may_return = state.leader != NO_LEADER or state.isr or state.elr or state.last_known_elr
        return end is not None and not may_return and hosted.log_end_offset < end

    def _exchange(self, hosted: HostedPartition, begin: Callable[[], LogExchange], event: str) -> None:
        """Replace a damaged log by an empty one, or put the damaged log back (R52).

        ``begin`` returns the LogExchange, which runs in the executor. Until it has ended, the replica has no
        role. ``event`` is the text that is logged.
        """
        key, reason = hosted.key, hosted.offline_reason
        self._strip(hosted, KafkaStorageError(f"{key}: {event}"))
        self._scheduler.forget(hosted)
        self._exchanging[key] = hosted
        exchange = begin()
        logger.warning("%s %s", event, Fields(partition=key, ends_at=hosted.log_end_offset, reason=reason))
        future = self._scheduler.submit(exchange.run)
        done = partial(self._on_exchanged, hosted, exchange, future)
        if future.done():
            done()
        else:
            future.add_done_callback(lambda _: self._scheduler.call_soon_threadsafe(done))

    def _on_exchanged(self, hosted: HostedPartition, exchange: LogExchange, future: Future[None]) -> None:
        key, topic_id, error = hosted.key, hosted.topic_id, future.exception()
        if self._exchanging.get(key) is not hosted or self._store.is_closed:
            return  # the topic was deleted meanwhile, or the broker stops
        del self._exchanging[key]
        if isinstance(error, StorageError | OSError):
            logger.error("no role taken %s", Fields(partition=key, error=error))
            self._roleless[key] = error
            self.has_failed.set()
            return
        if error is not None:
            raise error
        exchange.finish(self._log_config(self._image, key.topic))
        state = self._image.partition(*key)
        assert state is not None, f"{key} was deleted"
        del self._hosted[key], self._by_id[topic_id, key.partition]
        local = LocalPartition(key, topic_id, state)
        self._create(local, self._image)
        self._assign([local], self._image)

    def _strip(self, hosted: HostedPartition, error: Exception) -> None:
        if self.fetching is not None:
            self.fetching.unfollow(hosted)
        hosted.resign(error)
        if self.observer is not None:
            self.observer.on_not_leading(hosted.partition)

    def remove(self, key: TopicPartition, topic_id: str) -> None:
        """Delete the log of a partition before an image without its topic is published.

        Waiting requests receive UNKNOWN_TOPIC_OR_PARTITION. For tools in the same process.
        """
        state = self._image.partition(*key)
        assert state is not None, f"{key} does not exist"
        self._delete(LocalPartition(key, topic_id, state), ClusterImage())

    def replace(self, key: TopicPartition, topic_id: str, image: ClusterImage) -> Log:
        """Replace the log of a partition, if there is one, by an empty log. Return the empty log.

        Call it before ``image``, in which the partition has a higher leader epoch, is published. Until then
        the partition has no role, and waiting requests receive NOT_LEADER_OR_FOLLOWER. For tools in the same
        process.
        """
        self._exchanging.pop(key, None)
        hosted = self._hosted.pop(key, None)
        if hosted is not None:
            del self._by_id[topic_id, key.partition]
            self._strip(hosted, NotLeaderOrFollowerError(f"the log of {key} was replaced"))
            self._scheduler.forget(hosted)
            self._store.delete_log(key, topic_id)
        settings = self._settings(image, key.topic)
        log = self._store.create_log(key, topic_id, self._log_config(image, key.topic, settings))
        if self._image.partition_of(topic_id, key.partition) is not None:  # else ``image`` creates it
            self._host(key, topic_id, log, partition_settings(settings))
        return log

    def mark_unsynced(self) -> bool:
        """Mark every log that has unsynced batches for the next sync round, whatever its durability.

        Offline logs are omitted. Return whether there is such a log, even if it cannot be synced now.
        """
        return sum(hosted.mark_unsynced() for hosted in self) > 0

    def _settings(self, image: ClusterImage, topic: str) -> dict[str, Setting]:
        return topic_settings(image, topic, self._topic_defaults, node_id=self._node_id)

    def _log_config(
        self, image: ClusterImage, topic: str, settings: Mapping[str, Setting] | None = None
    ) -> LogConfig:
        """Return the configuration of the topic's logs. ``settings`` saves computing ``_settings`` again."""
        state = image.topics.get(topic)
        partition_count = 1 if state is None else len(state.partitions)
        config = log_config(settings or self._settings(image, topic), partition_count)
        return replace(config, durability=PAGE_CACHE) if self._is_volatile else config

    def _create(self, local: LocalPartition, image: ClusterImage) -> None:
        key = local.topic_partition
        settings = self._settings(image, key.topic)
        log = self._open(local, settings, image)
        if log is not None:
            self._host(key, local.topic_id, log, partition_settings(settings))

    def _open(
        self, local: LocalPartition, settings: Mapping[str, Setting], image: ClusterImage
    ) -> Log | None:
        """Return the replica's log, created if there is none. Return None if that fails: then the replica is
        offline."""
        key, topic_id, state = local
        log = self._store.find(key, topic_id)
        if log is not None:
            return log
        epoch = state.replica_epoch(self._node_id)
        try:
            if self._is_new_replica(state):
                is_kept = state.loss_epoch > NO_EPOCH  # what the files contain is not known
                self._store.discard_earlier(key, topic_id, epoch, is_kept=is_kept)
            config = self._log_config(image, key.topic, settings)
            return self._store.create_log(key, topic_id, config, replica_epoch=epoch)
        except (StorageError, OSError) as error:
            if key not in self._unopened:
                logger.error("log not opened %s", Fields(partition=key, error=error))
            self._unopened[key] = DamagedReplica(topic_id, key.partition), error
            if isinstance(error, StorageExhaustedError):
                self.has_failed.set()
            elif isinstance(error, OSError):
                self.probe_disks()
            return None

    def _host(self, key: TopicPartition, topic_id: str, log: Log, settings: PartitionSettings) -> None:
        partition = Partition(
            key,
            topic_id,
            log,
            broker_id=self._node_id,
            settings=settings,
            is_replacement=self._store.replaced_end(key) is not None,
        )
        hosted = HostedPartition(partition, self._waiters, self._scheduler)
        hosted.on_interrupted = self.has_failed.set
        hosted.on_disk_failed = self._on_disk_failed
        self._hosted[key] = self._by_id[topic_id, key.partition] = hosted
        if log.config.is_compacted:
            self.has_compacted.set()

    # --- failed disks

    def _on_disk_failed(self) -> None:
        self.on_offline()
        self.probe_disks()

    def probe_disks(self) -> None:
        """Find out, in the executor, which data directories cannot be written, and take the logs in them
        offline (R81). Has no effect on a node with one directory: then only logs fail."""
        for path, probe in self._store.probes().items():
            if path not in self._probing:
                self._probing.add(path)
                future = self._scheduler.submit(probe)
                done = partial(self._on_probed, path, future)
                if future.done():
                    done()
                else:
                    future.add_done_callback(
                        lambda _, done=done: self._scheduler.call_soon_threadsafe(done)  # type: ignore[misc]
                    )

    def _on_probed(self, path: str, future: Future[None]) -> None:
        self._probing.discard(path)
        error = future.exception()
        if error is None or self._store.is_closed:
            return
        if not isinstance(error, OSError):
            raise error
        was_online = {hosted for hosted in self._hosted.values() if hosted.offline_reason is None}
        for key in self._store.fail(path, str(error)):
            hosted = self._hosted.get(key)
            if hosted in was_online:
                hosted.on_offline()
        self.on_offline()

    def _must_keep(self, local: LocalPartition, image: ClusterImage) -> bool:
        """Whether the log of a removed replica is set aside instead of deleted, because it may have the only
        copy of committed records (R71)."""
        state = image.partition_of(local.topic_id, local.topic_partition.partition)
        hosted = self._hosted.get(local.topic_partition)
        return state is not None and hosted is not None and self.is_better_log(hosted.partition, state)

    @staticmethod
    def has_lost_since(state: PartitionState | None, loss_epoch: int) -> bool:
        """Whether an unclean election after that in ``loss_epoch`` may have lost committed records (R71)."""
        return state is not None and state.loss_epoch > loss_epoch

    @staticmethod
    def is_better_log(partition: Partition, state: PartitionState) -> bool:
        """Whether a log may have committed records that the unclean election before ``state`` lost (R71)."""
        return state.loss_epoch > NO_EPOCH and partition.may_have_lost_records(state.loss_epoch)

    def _delete(self, local: LocalPartition, image: ClusterImage) -> None:
        delete = partial(self._store.delete_log, is_kept=self._must_keep(local, image))
        if self._take_out(local) is not None:
            self._delete_files(delete, local.topic_partition, local.topic_id)

    def _delete_files(
        self, delete: Callable[[TopicPartition, str], object], key: TopicPartition, topic_id: str
    ) -> None:
        """Delete the files of a log with ``delete``. If that fails, log the error: the files stay."""
        try:
            delete(key, topic_id)
        except (StorageError, OSError) as error:
            logger.error("files of a deleted partition stay %s", Fields(partition=key, error=error))

    def _take_out(self, local: LocalPartition) -> HostedPartition | None:
        """Forget a replica. Return it if it was hosted: then the caller closes its log."""
        key = local.topic_partition
        self._unopened.pop(key, None)
        self._leaderless.pop(key, None)
        self._roleless.pop(key, None)
        self._exchanging.pop(key, None)
        hosted = self._hosted.pop(key, None)
        if hosted is None:
            return None
        del self._by_id[local.topic_id, key.partition]
        if self._image.partition_of(local.topic_id, key.partition) is None:
            reason: Exception = UnknownTopicOrPartitionError(f"topic {key.topic!r} was deleted")
        else:
            reason = NotLeaderOrFollowerError(f"broker {self._node_id} has no replica of {key} any more")
        self._strip(hosted, reason)
        self._scheduler.forget(hosted)
        return hosted

    def _reconfigure(self, topic: str, image: ClusterImage, *, is_early: bool) -> None:
        """Apply a topic's settings. Called before and after the ISRs of an image are applied.

        If min.insync.replicas becomes greater, the settings are applied before the ISRs (``is_early``),
        otherwise after. So a record is committed only if the old or the new image allows it (R9).
        """
        settings = self._settings(image, topic)
        config, more = self._log_config(image, topic, settings), partition_settings(settings)
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
#: The settings that a log uses without conversion, by field name of LogConfig.
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


def log_config(settings: Mapping[str, Setting], partition_count: int) -> LogConfig:
    """Return the configuration of each log of a topic from the topic's effective settings.

    Each of the ``partition_count`` partitions has an equal share of ``retention.topic.bytes``.
    """
    values: dict[str, Any] = {name: settings[name.replace("_", ".")].value for name in _LOG_SETTINGS}
    if settings["preallocate"].value:
        values["preallocate_min_bytes"] = values["preallocate_max_bytes"] = values["segment_bytes"]
    policies = settings["cleanup.policy"].value.split(",")
    deletes = "delete" in policies
    share = settings["retention.topic.bytes"].value // partition_count  # -1 stays -1
    limits = [limit for limit in (settings["retention.bytes"].value, share) if limit >= 0]
    return LogConfig(
        segment_index_bytes=max(settings["segment.index.bytes"].value, 8),
        retention_ms=settings["retention.ms"].value if deletes else -1,
        retention_bytes=min(limits, default=-1) if deletes else -1,
        timestamp_type=_TIMESTAMP_TYPES[settings["message.timestamp.type"].value],
        is_compacted="compact" in policies,
        **values,
    )


def partition_settings(settings: Mapping[str, Setting]) -> PartitionSettings:
    """Return the settings that a leader or follower uses, from the topic's effective settings."""
    return PartitionSettings(
        min_insync_replicas=settings["min.insync.replicas"].value,
        message_timestamp_before_max_ms=settings["message.timestamp.before.max.ms"].value,
        message_timestamp_after_max_ms=settings["message.timestamp.after.max.ms"].value,
    )
