"""One partition on this broker: its role (leader, follower or none) together with its log.

All methods are synchronous. An operation that the role does not allow raises NotLeaderOrFollowerError or has
no effect. Other refusals are BrokerErrors with the code for the client. StorageErrors of the log pass
through, for the dispatcher to translate. Uncommitted records survive a change of role; only a leader's
response truncates a log (R4).
"""

# Long because one object is the interface of a partition to clients, followers and the leader. The
# leader's arithmetic is in `leader`, the handling of a follower's log in `follower`.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from kafkalite.errors import (
    ErrorCode,
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    InvalidTimestampError,
    InvalidTopicError,
    InvalidTxnStateError,
    KafkaStorageError,
    LogOfflineError,
    MessageTooLargeError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    PolicyViolationError,
    StaleBrokerEpochError,
    StorageError,
    UnknownLeaderEpochError,
    broker_error,
)
from kafkalite.limits import MAX_PRODUCERS_PER_PARTITION
from kafkalite.metadata.image import PartitionState
from kafkalite.model import (
    EARLIEST,
    INTERNAL_PREFIX,
    LATEST,
    MAX_TIMESTAMP,
    NO_EPOCH,
    NO_OFFSET,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    Acks,
    OffsetAndTimestamp,
    TimestampType,
    TopicPartition,
)
from kafkalite.protocol.messages.cluster import PartitionChange, ReplicaFetchedPartition
from kafkalite.records.control import build_marker
from kafkalite.records.header import (
    CONTROL_BIT,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    parse_header,
)
from kafkalite.replication.follower import (
    IGNORED,
    FetchPosition,
    FollowerStep,
    PartitionFollower,
    diverging_at,
)
from kafkalite.replication.leader import PartitionLeader
from kafkalite.storage.leader_epochs import EpochEnd
from kafkalite.storage.log import Appended

if TYPE_CHECKING:
    from kafkalite.storage.damage import Damage
    from kafkalite.storage.log import Log, Slice
    from kafkalite.storage.log_config import LogConfig
    from kafkalite.storage.producer_state import OpenTransaction, ProducerState, SequencedBatch
    from kafkalite.storage.segment_list import BytesEnd

Role = Literal["leader", "follower", "none"]

#: A client may set these attributes only in a batch of a transaction, or not at all.
_SPECIAL: Final = TRANSACTIONAL_BIT | CONTROL_BIT | TIMESTAMP_TYPE_BIT
_ACKS_ALL: Final = int(Acks.ALL)
_ACKS_LEADER: Final = int(Acks.LEADER)
_NOTHING_CAN_BE_OLDER: Final = 2**63 - 1
_NO_BROKER: Final = -1


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """The topic options that a partition uses in addition to those of its log, under Kafka's names."""

    min_insync_replicas: int = 1
    message_timestamp_before_max_ms: int = _NOTHING_CAN_BE_OLDER
    message_timestamp_after_max_ms: int = 3_600_000


class ReplicaFetchResult(NamedTuple):
    """The effect of a follower's fetch. If ``diverging`` is set, no records may be sent (R4). ``moved``: the
    high watermark moved. ``may_join``: the follower has fetched far enough to join the in-sync set, or soon
    will have."""

    diverging: EpochEnd | None
    moved: bool  #: whether the high watermark moved
    may_join: bool  #: ``propose_isr`` would admit the follower if it is live, or wait for it


class Observer(Protocol):
    """Receives the events of a partition."""

    def on_appended(self, last_offset: int, size_bytes: int, high_watermark: int) -> None:
        """Notify readers and schedule a sync. Called after every append as leader that is not a duplicate."""
        ...

    def on_high_watermark_moved(self) -> None:
        """Notify readers. Called only if ``propose_isr`` moved the high watermark."""
        ...


class Partition:
    """A replica of a partition on this broker: its log and its present role.

    Invariant: log start offset <= high watermark <= log end offset.
    """

    __slots__ = (
        "_after_max_ms",
        "_before_max_ms",
        "_broker_id",
        "_counts_synced",
        "_filled_from",
        "_follower",
        "_is_create_time",
        "_leader",
        "_max_message_bytes",
        "_resigned_high_watermark",
        "_version",
        "is_internal",
        "is_synced_only",
        "key",
        "log",
        "observer",
        "partition_epoch",
        "settings",
        "topic_id",
    )

    def __init__(
        self,
        key: TopicPartition,
        topic_id: str,
        log: Log,
        *,
        broker_id: int,
        settings: PartitionSettings | None = None,
        is_replacement: bool = False,
    ) -> None:
        """``is_replacement``: the log has replaced a damaged one and has not been in sync since."""
        self.key = key
        self.topic_id = topic_id
        self.is_internal = key.topic.startswith(INTERNAL_PREFIX)  #: no client may write to it
        self.log = log  #: only for this package and the partition's owner; others use the operations below
        self.observer: Observer | None = None
        self.partition_epoch = NO_EPOCH
        self._broker_id = broker_id
        self._leader: PartitionLeader | None = None
        self._follower: PartitionFollower | None = None
        self._version = 0  # of the latest FetchPosition in earlier roles
        self._resigned_high_watermark = log.log_start_offset
        self._filled_from = _NO_BROKER if is_replacement else None  # as ``PartitionFollower.filled_from``
        self._take_settings(settings or PartitionSettings())

    def __str__(self) -> str:
        return str(self.key)

    def _take_settings(self, settings: PartitionSettings) -> None:
        config = self.log.config
        self.settings = settings
        self._before_max_ms = settings.message_timestamp_before_max_ms
        self._after_max_ms = settings.message_timestamp_after_max_ms
        self.is_synced_only = config.synced_only  #: ``durability=fsync``
        self._counts_synced = self.counts_only_synced(config)
        self._is_create_time = config.timestamp_type is TimestampType.CREATE_TIME
        self._max_message_bytes = config.max_message_bytes

    def reconfigure(self, config: LogConfig, settings: PartitionSettings) -> bool:
        """Apply the topic's changed configuration. Returns whether the high watermark moved."""
        self.log.reconfigure(config)
        self._take_settings(settings)
        if self._leader is None:
            return False
        moved = self._leader.set_min_insync_replicas(settings.min_insync_replicas)
        return self.on_synced() or moved

    @staticmethod
    def counts_only_synced(config: LogConfig) -> bool:
        """Whether the leader's own progress is its synced end rather than its log end (R7)."""
        return config.synced_only

    # --- state -----------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self._leader is not None

    @property
    def leads_followers(self) -> bool:
        return self._leader is not None and self._leader.has_followers

    @property
    def role(self) -> Role:
        if self._leader is not None:
            return "leader"
        return "none" if self._follower is None else "follower"

    @property
    def leader_id(self) -> int:
        """Return the leader's broker id: this broker, the leader that it follows, or -1."""
        if self._leader is not None:
            return self._broker_id
        return _NO_BROKER if self._follower is None else self._follower.leader_id

    @property
    def leader_epoch(self) -> int:
        """The epoch that this replica leads or follows in; NO_EPOCH without a role."""
        if self._leader is not None:
            return self._leader.leader_epoch
        return NO_EPOCH if self._follower is None else self._follower.leader_epoch

    @property
    def in_sync_replicas(self) -> frozenset[int]:
        """Return the in-sync set as this leader knows it; empty if this replica does not lead."""
        return frozenset() if self._leader is None else self._leader.isr

    def awaits(self, node_id: int) -> bool:
        """Whether this broker leads, and the high watermark waits for the replica of ``node_id``: it is in
        sync, proposed for the in-sync set, or about to join it."""
        return self._leader is not None and self._leader.awaits(node_id)

    @property
    def high_watermark(self) -> int:
        """The exclusive end of the committed records. Without a role, the last known high watermark."""
        if self._leader is not None:
            return self._leader.high_watermark
        return self._resigned_high_watermark if self._follower is None else self._follower.high_watermark

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    @property
    def offline_reason(self) -> str | None:
        """The reason why the log accepts no more writes; None while it is online."""
        return self.log.offline_reason

    @property
    def damage(self) -> Damage | None:
        """The damage of the log; None while it is sound. A damaged log can be read up to its sound end."""
        return self.log.damage

    @property
    def last_stable_offset(self) -> int:
        """The last stable offset (exclusive), up to which read_committed consumers can read (R33).

        This is the lowest of the high watermark and the first offsets of all transactions that are open or
        whose marker is not committed. May read headers; raises the log's StorageErrors.
        """
        return self.log.last_stable_offset(self.high_watermark)

    def known_stable_offset(self, high_watermark: int) -> int:
        """Return ``last_stable_offset`` if no headers must be read for it, else ``high_watermark``."""
        return self.log.known_stable_offset(high_watermark)

    @property
    def low_watermark(self) -> int:
        """The offset below which no in-sync replica has records. Records below it stay deleted, whichever
        in-sync replica leads next. -1 if an in-sync replica has not fetched yet. The log start if this
        replica does not lead."""
        start = self.log.log_start_offset
        return start if self._leader is None else self._leader.low_watermark(start)

    def acknowledged_end(self, acks: int) -> int:
        """Return the offset (exclusive) up to which batches that were sent with these ``acks`` (1 or all) are
        acknowledged."""
        if acks == _ACKS_LEADER:
            log = self.log
            return log.synced_end_offset if self.is_synced_only else log.log_end_offset
        return self.high_watermark

    # --- role ------------------------------------------------------------------------------------------

    def become_leader(self, state: PartitionState, *, now_ms: int = 0, known_high_watermark: int = 0) -> bool:
        """Lead in the epoch of ``state``. If this replica leads in that epoch already, only apply the in-sync
        set and the added replicas of ``state``, unless ``state`` is older than the current one.

        ``known_high_watermark`` is the high watermark in the metadata. A log that ends below that high
        watermark has lost committed records, and goes offline as damaged (R48). Otherwise the leader begins
        with the largest high watermark that it knows. Returns whether the high watermark moved.
        """
        assert state.leader == self._broker_id, f"{self.key} is led by {state.leader}"
        leader = self._leader
        if leader is not None and leader.leader_epoch == state.leader_epoch:
            moved = leader.take_state(
                state.partition_epoch,
                state.isr,
                has_eligible=bool(state.elr),
                added=state.replicas,
                leader_end_offset=self.log.log_end_offset,
                now_ms=now_ms,
            )
            self.partition_epoch = leader.partition_epoch
            return moved
        return self._begin_leading(state, now_ms, known_high_watermark)

    def _begin_leading(self, state: PartitionState, now_ms: int, known_high_watermark: int) -> bool:
        """Become leader in the epoch of ``state``. Return whether the high watermark has moved.

        First mark the log as damaged if it ends below ``known_high_watermark`` (R48), or if it has batches of
        a later epoch than that of ``state`` (R43). The producers' states and the aborted transactions need no
        change: followers keep them too (R27, R33).
        """
        assert state.leader_epoch >= self.leader_epoch, f"{self.key}: {state} is outdated"
        log = self.log
        if log.is_open and log.offline_reason is None:
            log.refuse_epochs_above(state.leader_epoch)
        if log.offline_reason is None and self.lacks_committed(known_high_watermark):
            log.mark_damaged(
                f"ends at {log.log_end_offset} below the committed offset {known_high_watermark}",
                sound_end_offset=log.log_end_offset,
                records_in_doubt=known_high_watermark - log.log_end_offset,
            )
        certain = max(
            self.high_watermark, log.log_start_offset, min(known_high_watermark, log.log_end_offset)
        )
        # No batch is older than epoch 0, so epoch 0 needs no entry (R2).
        if state.leader_epoch > 0 and log.offline_reason is None:
            log.start_epoch(state.leader_epoch)
        self.resign()
        self.partition_epoch = state.partition_epoch
        self._leader = PartitionLeader(
            self._broker_id,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=state.isr,
            epoch_start_offset=log.log_end_offset,
            high_watermark=certain,
            min_insync_replicas=self.settings.min_insync_replicas,
            has_eligible=bool(state.elr),
            now_ms=now_ms,
        )
        return self.on_synced()

    def lacks_committed(self, known_high_watermark: int) -> bool:
        """Whether the log ends below ``known_high_watermark``. If so, and this replica is in the ISR or ELR,
        it has lost committed records (R48)."""
        return self.log.log_end_offset < known_high_watermark

    def become_follower(self, state: PartitionState, *, known_high_watermark: int = 0) -> None:
        """Follow ``state.leader``, or wait for a leader if it is -1. Uncommitted records stay until the new
        leader's response shows where the logs diverge (R4).

        ``known_high_watermark`` is the high watermark in the metadata. If the logs diverge, this replica does
        not truncate below its own high watermark and, if it is in the ISR or ELR, not below
        ``known_high_watermark``, except after an unclean election (R49). A log that must start over (R69)
        goes offline as damaged instead if it may have records that an unclean election has lost (R71).
        """
        assert state.leader != self._broker_id, f"{self.key} is led here"
        follower = self._follower
        if follower is not None and (follower.leader_epoch, follower.leader_id) == (
            state.leader_epoch,
            state.leader,
        ):
            if state.partition_epoch >= self.partition_epoch:
                self.partition_epoch = state.partition_epoch
                follower.is_in_sync = self._broker_id in state.isr
                if follower.is_in_sync:
                    follower.filled_from = None
            return
        assert state.leader_epoch >= self.leader_epoch, f"{self.key}: {state} is outdated"
        high_watermark = self.high_watermark
        may_have_lost = state.loss_epoch > NO_EPOCH and self.may_have_lost_records(state.loss_epoch)
        self.resign()
        filled_from = self._filled_by(state)
        must_start_over = self.must_start_over(filled_from, state.leader)
        if must_start_over and may_have_lost and self.log.offline_reason is None:
            # An empty log replaces it, and its files are kept (R71).
            self.log.mark_damaged(
                f"may have committed records that the unclean election in epoch {state.loss_epoch} has lost",
                sound_end_offset=self.log.log_end_offset,
            )
        if state.leader >= 0 and filled_from not in (None, state.leader):
            filled_from = _NO_BROKER
        self.partition_epoch = state.partition_epoch
        if self.log.offline_reason is None:
            self.log.forget_empty_epoch()
        self._follower = PartitionFollower(
            self.key,
            self.log,
            leader_id=state.leader,
            leader_epoch=state.leader_epoch,
            high_watermark=min(high_watermark, self.log.log_end_offset),
            version=self._version,
            committed_floor=self.committed_floor(state, known_high_watermark),
            loss_epoch=state.loss_epoch,
            is_in_sync=self._broker_id in state.isr,
            filled_from=filled_from,
            must_start_over=must_start_over,
        )

    def _filled_by(self, state: PartitionState) -> int | None:
        """Return ``PartitionFollower.filled_from`` for a role that begins with ``state`` (R69).

        After a restart it is not known for a replica that a reassignment has added and that has no role.
        """
        if self._broker_id in (*state.isr, *state.elr, *state.last_known_elr):
            return None
        if self.log.log_start_offset == self.log.log_end_offset:
            return state.leader
        if self.partition_epoch == NO_EPOCH and state.replica_epoch(self._broker_id):
            return _NO_BROKER
        return self._filled_from

    def must_start_over(self, filled_from: int | None, leader_id: int) -> bool:
        """Whether a role as follower of ``leader_id`` begins with an empty log (R69), because this compacted
        log was partly filled from another broker.

        The other one may not have removed yet the old record of a deleted key, and the leader may have
        removed the tombstone already. A log with both parts would have the deleted key again.
        """
        return self.log.config.is_compacted and filled_from is not None and filled_from != leader_id >= 0

    def committed_floor(self, state: PartitionState, known_high_watermark: int) -> int:
        """Return the exclusive end of the records in this log that are committed according to the metadata
        (R49). Return 0 if this replica is in neither the ISR nor the ELR."""
        is_member = self._broker_id in state.isr or self._broker_id in state.elr
        return min(known_high_watermark, self.log.log_end_offset) if is_member else 0

    def may_have_lost_records(self, loss_epoch: int) -> bool:
        """Whether this log may have committed records that the unclean election in ``loss_epoch`` has lost
        (R71).

        That is so if it has no later batch, unless a leader since then has compared its log with this one.
        """
        log, follower = self.log, self._follower
        if follower is not None and follower.agrees and follower.leader_epoch >= loss_epoch:
            return False
        try:
            return log.log_start_offset < log.log_end_offset and log.latest_epoch < loss_epoch
        except StorageError:
            return True

    @property
    def committed_end(self) -> int:
        """Return the exclusive end of the records in this log that are known to be committed."""
        return self.high_watermark if self._follower is None else self._follower.committed_end

    def replace_log(self, log: Log) -> bool:
        """Use ``log`` from now on: a synced copy that has exactly the batches of the present log (R85).

        The role stays. Return whether the high watermark moved.
        """
        old = self.log
        assert (log.log_start_offset, log.log_end_offset) == (old.log_start_offset, old.log_end_offset)
        leader_epoch = NO_EPOCH if self._leader is None else self._leader.leader_epoch
        if leader_epoch > 0:
            log.start_epoch(leader_epoch)
        self.log = log
        if self._follower is not None:
            self._follower.log = log
        return self._leader is not None and self.on_synced()

    def resign(self) -> None:
        """Give up the role. Until the next role, requests are refused with NOT_LEADER_OR_FOLLOWER."""
        self._resigned_high_watermark = self.high_watermark
        self._version = 1 + (self._version if self._follower is None else self._follower.version)
        if self._follower is not None:
            self._filled_from = self._follower.filled_from
        elif self._leader is not None:
            self._filled_from = None
        self._leader = self._follower = None

    def check_leader_epoch(self, current_leader_epoch: int) -> None:
        """Fence a request by the leader epoch that the client expects; NO_EPOCH accepts any (R3).

        Raises NotLeaderOrFollowerError, FencedLeaderEpochError (the request's epoch is older),
        UnknownLeaderEpochError (it is newer, and this broker has not replayed it yet).
        """
        self._leading()
        self._check_epoch(current_leader_epoch)

    def _check_epoch(self, current_leader_epoch: int) -> None:
        leader_epoch = self.leader_epoch
        if current_leader_epoch in (leader_epoch, NO_EPOCH):
            return
        kind = FencedLeaderEpochError if current_leader_epoch < leader_epoch else UnknownLeaderEpochError
        raise kind(f"{self.key} is led in epoch {leader_epoch}, the request expects {current_leader_epoch}")

    def _leading(self) -> PartitionLeader:
        if self._leader is None:
            raise NotLeaderOrFollowerError(f"broker {self._broker_id} does not lead {self.key}")
        return self._leader

    def on_synced(self) -> bool:
        """Record the log's synced end (the log end with durability=page-cache) as the leader's own progress.
        Returns whether the high watermark moved."""
        if self._leader is None:
            return False
        log = self.log
        progress = log.synced_end_offset if self._counts_synced else log.log_end_offset
        return self._leader.on_progress(self._broker_id, progress)

    # --- leading: appends ------------------------------------------------------------------------------

    def append(
        self,
        batch: bytearray | memoryview,
        header: BatchHeader,
        now_ms: int,
        acks: int = _ACKS_ALL,
        is_verified: bool = False,
    ) -> Appended:
        """Append one batch from a client. The offset, the leader epoch and, with LogAppendTime, the timestamp
        are written into ``batch`` itself.

        ``header`` is the result of ``records.header.check`` for the batch, ``now_ms`` the wall clock. With
        ``durability=fsync``, the batch counts as this replica's progress after the sync (``on_synced``),
        otherwise at once. A batch that its producer repeats is not appended again (R28).
        ``is_verified``: the coordinator has added this partition to the batch's transaction
        (R31). Raises InvalidTopicError (an internal topic), NotLeaderOrFollowerError, KafkaStorageError
        (log offline), MessageTooLargeError, InvalidRecordError, InvalidTimestampError,
        NotEnoughReplicasError (acks=all, R6), for idempotent producers the errors of
        ``ProducerStates.check`` and ``check_open``, for transactional batches also
        InvalidRequiredAcksError and InvalidTxnStateError, PolicyViolationError (too many producers: S26), and
        the log's StorageErrors.
        """
        if self.is_internal:
            raise InvalidTopicError(f"{self.key} is internal: only brokers write to it")
        leader = self._leader or self._leading()
        log = self.log
        if log.offline_reason is not None:
            raise self._offline()
        if header.length_bytes > self._max_message_bytes:
            raise MessageTooLargeError(
                f"a batch of {header.length_bytes} bytes for {self.key},"
                f" whose max.message.bytes is {self._max_message_bytes}"
            )
        if header.attributes & _SPECIAL:
            self._check_attributes(header, acks, is_verified)
        if self._is_create_time:
            too_late = header.max_timestamp_ms - now_ms > self._after_max_ms
            if too_late or now_ms - header.base_timestamp_ms > self._before_max_ms:
                self._refuse_timestamps(header, now_ms)
        if acks == _ACKS_ALL and not leader.has_enough_in_sync:
            raise self._not_enough_replicas(leader)
        if header.producer_id != NO_PRODUCER_ID:
            producers = log.producers
            if header.producer_id in producers.open:
                producers.check_open(header)
            repeated = producers.check(header, batch)
            if repeated is not None:
                return self._appended_before(repeated)
            if len(producers) >= MAX_PRODUCERS_PER_PARTITION and producers.get(header.producer_id) is None:
                raise PolicyViolationError(
                    f"{self.key} has {len(producers)} idempotent producers, which is the limit",
                    hint="use fewer producers, or wait for producer.id.expiration.ms",
                )
        return self._write(leader, batch, header, now_ms)

    def append_state(self, batch: bytearray | memoryview, header: BatchHeader, now_ms: int) -> Appended:
        """Append a coordinator's own batch, as with acks=all.

        A transactional batch must have no sequence, and belong to a transaction that already includes this
        partition. Raises NotLeaderOrFollowerError, KafkaStorageError, NotEnoughReplicasError,
        InvalidRecordError (a control batch), the errors of ``ProducerStates.check_open``, and the log's
        StorageErrors.
        """
        leader = self._appending()
        if header.is_control:
            raise InvalidRecordError(f"markers are appended by append_marker: {header}")
        if header.producer_id != NO_PRODUCER_ID:
            self.log.producers.check_open(header)
        return self._write(leader, batch, header, now_ms)

    def append_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, is_commit: bool, now_ms: int
    ) -> Appended:
        """Append the marker that ends the producer's transaction here, as with acks=all (R33).

        ``producer_epoch`` is the transaction's epoch plus one, and becomes the producer's epoch (R31). If the
        log already has the marker, nothing is appended, and the result has the last offset of the log: when
        that offset is committed, so is the marker. Raises NotLeaderOrFollowerError, KafkaStorageError,
        NotEnoughReplicasError, TransactionCoordinatorFencedError (R32), InvalidProducerEpochError, and the
        log's StorageErrors.
        """
        leader = self._appending()
        log = self.log
        if not log.producers.check_marker(producer_id, producer_epoch, coordinator_epoch):
            last_offset = log.log_end_offset - 1
            return Appended(last_offset, last_offset, NO_TIMESTAMP, log.log_end_offset, is_duplicate=True)
        log.forget_stable_transactions(leader.high_watermark)
        batch = build_marker(producer_id, producer_epoch, coordinator_epoch, is_commit, now_ms)
        return self._write(leader, batch, parse_header(batch), now_ms)

    def _appending(self) -> PartitionLeader:
        """Return the leader's state. Raises an error unless this replica leads and may append as with
        acks=all."""
        leader = self._leading()
        if self.log.offline_reason is not None:
            raise self._offline()
        if not leader.has_enough_in_sync:
            raise self._not_enough_replicas(leader)
        return leader

    def _write(
        self, leader: PartitionLeader, batch: bytearray | memoryview, header: BatchHeader, now_ms: int
    ) -> Appended:
        appended = self.log.append(batch, now_ms=now_ms, leader_epoch=leader.leader_epoch, header=header)
        if not self._counts_synced:
            leader.on_progress(self._broker_id, appended.log_end_offset)
        if self.observer is not None:
            self.observer.on_appended(appended.last_offset, len(batch), leader.high_watermark)
        return appended

    def _appended_before(self, batch: SequencedBatch) -> Appended:
        """Return the offsets of a repeated batch (R28)."""
        time_ms = NO_TIMESTAMP if self._is_create_time else batch.max_timestamp_ms
        return Appended(
            batch.base_offset, batch.last_offset, time_ms, self.log.log_end_offset, is_duplicate=True
        )

    def _offline(self) -> KafkaStorageError:
        # The message has the hint of the damage, because a response has no other place for it.
        return KafkaStorageError(f"{self.key} is offline: {self.log.offline_reason}", hint="")

    def _not_enough_replicas(self, leader: PartitionLeader) -> NotEnoughReplicasError:
        return NotEnoughReplicasError(self._shortage(leader))

    def _shortage(self, leader: PartitionLeader) -> str:
        """Return why acks=all is refused. If waiting cannot help, the message contains the hint, because a
        response has no other place for it."""
        minimum, count = self.settings.min_insync_replicas, leader.replica_count
        if count >= minimum:
            return f"{self.key} has {len(leader.isr)} replicas in sync, and min.insync.replicas is {minimum}"
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return (
            f"{self.key} has {replicas}, fewer than min.insync.replicas {minimum}: acks=all is refused until"
            f" 'kl topic alter {self.key.topic} -c min.insync.replicas={count}'"
        )

    def _check_attributes(self, header: BatchHeader, acks: int, is_verified: bool) -> None:
        """Raise a BrokerError for attributes that clients may not set, and for a transactional batch that has
        no producer, has acks other than all, or whose transaction has not been verified."""
        if header.is_control:
            raise InvalidRecordError(f"clients can't write control batches: {header}")
        if header.attributes & TIMESTAMP_TYPE_BIT:
            raise InvalidTimestampError("only the broker may set the timestamp type LogAppendTime of a batch")
        if header.producer_id < 0 or header.producer_epoch < 0:
            raise InvalidRecordError(f"a transactional batch without a producer: {header}")
        if acks != _ACKS_ALL:
            raise InvalidRequiredAcksError(f"a transactional batch needs acks=all; its acks are {acks}")
        if not is_verified and self.needs_verification(header):
            raise InvalidTxnStateError(
                f"producer {header.producer_id} in epoch {header.producer_epoch} has no transaction open in"
                f" {self.key}, and its coordinator did not confirm one"
            )

    def _refuse_timestamps(self, header: BatchHeader, now_ms: int) -> None:
        """Raise InvalidTimestampError for timestamps out of bounds (KIP-937). Accept a batch without
        timestamps."""
        if header.base_timestamp_ms == NO_TIMESTAMP and header.max_timestamp_ms == NO_TIMESTAMP:
            return
        raise InvalidTimestampError(
            f"a batch for {self.key} has timestamps from {header.base_timestamp_ms} to"
            f" {header.max_timestamp_ms} ms; by the broker's clock, {now_ms} ms, they may lie"
            f" {self._before_max_ms} ms before and {self._after_max_ms} ms after it",
            hint="see message.timestamp.before.max.ms and message.timestamp.after.max.ms",
        )

    def needs_verification(self, header: BatchHeader) -> bool:
        """Whether the coordinator must add this partition to the batch's transaction before the batch is
        appended, because the batch would be the transaction's first one here (R31).

        Raises NotLeaderOrFollowerError.
        """
        self._leading()
        if not header.is_transactional or header.is_control or header.producer_id < 0:
            return False
        return self.log.producers.needs_verification(header.producer_id, header.producer_epoch)

    @property
    def acknowledgement_error(self) -> NotEnoughReplicasAfterAppendError | None:
        """The error for requests that wait for acks=all while fewer than min.insync.replicas are in sync (R6,
        R9); None otherwise."""
        leader = self._leader
        if leader is None or leader.has_enough_in_sync:
            return None
        return NotEnoughReplicasAfterAppendError(f"{self._shortage(leader)}; the batch is in the log")

    # --- leading: reads --------------------------------------------------------------------------------

    def read(self, offset: int, max_bytes: int, is_committed_only: bool = False) -> Slice:
        """Return whole batches below the high watermark, beginning with the batch that contains ``offset``
        (R11).

        If ``is_committed_only``, return only batches below the last stable offset, so that every
        transaction's outcome is known; ``aborted_between`` returns the aborted transactions. The result is
        empty if no batch is readable there yet. The first batch is returned whole even if it alone has more
        than ``max_bytes``. Raises OffsetOutOfRangeError, NotLeaderOrFollowerError, OffsetNotAvailableError,
        and the log's StorageErrors.
        """
        leader = self._leader or self._leading()
        log = self.log
        if offset > log.log_end_offset and not leader.is_settled:
            raise self._unsettled()
        end = leader.high_watermark
        if is_committed_only:
            end = log.last_stable_offset(end)
            log.check_growth(offset, end)
        return log.read(offset, max_bytes=max_bytes, up_to=end)

    def check_again(self, offset: int, max_bytes: int) -> None:
        """Check the CRCs of the batches that a read from ``offset`` returns, because a reader may have found
        one of them damaged (R43). Raises OffsetOutOfRangeError and the log's StorageErrors."""
        log = self.log
        log.check_again(log.read(offset, max_bytes=max_bytes, up_to=log.log_end_offset))

    def readable_end(self, offset: int, is_committed_only: bool = False) -> int:
        """Return the exclusive end of the offsets that ``read`` can return from ``offset`` on. Raises the
        same errors as ``read``."""
        leader = self._leader or self._leading()
        log = self.log
        if offset > log.log_end_offset and not leader.is_settled:
            raise self._unsettled()
        log.read(offset, max_bytes=0, up_to=offset)  # reads nothing, but raises for an offset out of range
        end = leader.high_watermark
        if is_committed_only:
            end = log.last_stable_offset(end)
            log.check_growth(offset, end)
        return end

    def _settled_end(self, is_committed_only: bool) -> int:
        """Return the exclusive end of the readable offsets. Raises OffsetNotAvailableError while that end may
        be lower than the previous leader's (R10)."""
        leader = self._leading()
        if not leader.is_settled:
            raise self._unsettled()
        end = leader.high_watermark
        return self.log.last_stable_offset(end) if is_committed_only else end

    def _unsettled(self) -> OffsetNotAvailableError:
        return OffsetNotAvailableError(
            f"{self.key}: the new leader does not know yet what is on all in-sync replicas"
        )

    def near_replica(self, offset: int, is_near: Callable[[int], bool]) -> int | None:
        """Return the follower from which a consumer should read ``offset`` (R66, KIP-392), or None.

        It is the most caught-up one for which ``is_near`` returns True: whether a node is live and in the
        consumer's rack. None also for an offset that cannot be read, and if this replica does not lead.
        """
        leader = self._leader
        if leader is None or not self.log.log_start_offset <= offset <= leader.high_watermark:
            return None
        return leader.near_replica(offset, is_near)

    def aborted_between(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (producer id, first offset) of the aborted transactions that overlap [first, end)."""
        return self.log.aborted_between(first, end)

    def offset_for_bytes(
        self, start_offset: int, end_offset: int, max_bytes: int, is_committed_only: bool = False
    ) -> BytesEnd:
        """Return how far the range [start_offset, end_offset) can be read with at most ``max_bytes`` of
        batches, as ``Log.offset_for_bytes`` does.

        The range ends at the high watermark at the latest, or at the last stable offset if
        ``is_committed_only``.

        Raises InvalidRequestError for a bad range, OffsetOutOfRangeError if the range begins above the
        readable end, NotLeaderOrFollowerError, OffsetNotAvailableError (R10), and the log's StorageErrors.
        """
        self._leading()
        if not 0 <= start_offset <= end_offset:
            raise InvalidRequestError(f"[{start_offset}, {end_offset}) is no range of offsets")
        end = self._settled_end(is_committed_only)
        if start_offset > end:
            raise OffsetOutOfRangeError(f"{self.key} is readable up to {end}, not {start_offset}")
        return self.log.offset_for_bytes(start_offset, min(end_offset, end), max_bytes)

    def list_offset(self, timestamp_ms: int, is_committed_only: bool = False) -> OffsetAndTimestamp:
        """Return the offset for a timestamp, or for EARLIEST, LATEST, MAX_TIMESTAMP; see ``ListedOffset``.

        With ``is_committed_only``, the readable part ends at the last stable offset. Returns NO_OFFSET if
        every readable record is older than the timestamp or, with MAX_TIMESTAMP, if the record with the
        largest timestamp is not readable. Raises InvalidRequestError for another negative number,
        NotLeaderOrFollowerError, OffsetNotAvailableError (R10), KafkaStorageError if the log is damaged and
        the result depends on the unknown part above its sound end (R24), and the log's StorageErrors.
        """
        epoch = self._leading().leader_epoch
        log = self.log
        if timestamp_ms == EARLIEST:
            return OffsetAndTimestamp(log.log_start_offset, NO_TIMESTAMP, epoch)
        end, damage = self._settled_end(is_committed_only), log.damage
        if timestamp_ms == LATEST:
            if damage is not None:
                raise self._offline()
            return OffsetAndTimestamp(end, NO_TIMESTAMP, epoch)
        if timestamp_ms < 0 and timestamp_ms != MAX_TIMESTAMP:
            raise InvalidRequestError(f"no offset is defined for the timestamp {timestamp_ms}")
        found = (
            log.max_timestamp() if timestamp_ms == MAX_TIMESTAMP else log.offset_for_timestamp(timestamp_ms)
        )
        if damage is not None and (
            timestamp_ms == MAX_TIMESTAMP or found is None or found[1] >= damage.sound_end_offset
        ):
            raise self._offline()
        if found is None or found[1] >= end:
            return OffsetAndTimestamp(NO_OFFSET, NO_TIMESTAMP, epoch)
        return OffsetAndTimestamp(found[1], found[0], epoch)

    def end_offset_for_epoch(self, leader_epoch: int) -> EpochEnd:
        """Return the largest known epoch that is at most ``leader_epoch``, and its end, exclusive (R4)."""
        self._leading()
        return self.log.end_offset_for_epoch(leader_epoch)

    def deletion_end(self, before_offset: int) -> int:
        """Return the new log start for a DeleteRecords request. If ``before_offset`` is LATEST, return the
        high watermark. Raises OffsetOutOfRangeError (negative, or above the high watermark),
        NotLeaderOrFollowerError."""
        high_watermark = self._leading().high_watermark
        if before_offset == LATEST:
            before_offset = high_watermark
        if not 0 <= before_offset <= high_watermark:
            raise OffsetOutOfRangeError(
                f"records of {self.key} can be deleted up to its high watermark,"
                f" {high_watermark}, not {before_offset}"
            )
        return before_offset

    def producers(self) -> list[tuple[int, ProducerState]]:
        """Return (producer id, state) of the log's idempotent producers. Raises the log's StorageErrors."""
        return list(self.log.producers)

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions that have no marker in this log yet, by first offset.

        Raises NotLeaderOrFollowerError.
        """
        self._leading()
        return self.log.producers.open_transactions()

    # --- leading: followers ----------------------------------------------------------------------------

    def on_replica_fetch(
        self,
        replica_id: int,
        *,
        broker_epoch: int,
        leader_epoch: int,
        fetch_offset: int,
        last_epoch: int,
        synced_end_offset: int,
        log_start_offset: int,
        now_ms: int,
    ) -> ReplicaFetchResult:
        """Record the position that a follower reports (R3, R4, R7, R8).

        A diverging or refused fetch does not count. Raises LogOfflineError instead of a divergence if this
        log is offline: its epochs may be damaged. Raises NotLeaderOrFollowerError (also for a broker
        without a replica), FencedLeaderEpochError, UnknownLeaderEpochError, StaleBrokerEpochError (an earlier
        incarnation of the broker), OffsetOutOfRangeError (the follower's log end is outside this log).
        """
        leader = self._leading()
        if leader_epoch != leader.leader_epoch:
            self.check_leader_epoch(leader_epoch)
        if not leader.is_follower(replica_id):
            raise NotLeaderOrFollowerError(f"broker {replica_id} has no replica of {self.key}")
        if broker_epoch < leader.seen_broker_epoch(replica_id):
            raise StaleBrokerEpochError(
                f"broker {replica_id} fetched {self.key} with a later epoch than {broker_epoch}"
            )
        log = self.log
        if last_epoch != NO_EPOCH:
            diverging = diverging_at(last_epoch, fetch_offset, log.end_offset_for_epoch(last_epoch))
            if diverging is not None:
                if log.offline_reason is not None:  # damage here must not remove records there
                    raise LogOfflineError(f"{self.key} is offline: {log.offline_reason}")
                return ReplicaFetchResult(diverging, moved=False, may_join=False)
        if not log.log_start_offset <= fetch_offset <= log.log_end_offset:
            raise OffsetOutOfRangeError(
                f"{self.key} has offsets from {log.log_start_offset} to {log.log_end_offset};"
                f" broker {replica_id} asks for {fetch_offset}"
            )
        moved = leader.on_fetch(
            replica_id,
            broker_epoch=broker_epoch,
            progress=min(fetch_offset, synced_end_offset) if self.is_synced_only else fetch_offset,
            synced_end_offset=min(fetch_offset, synced_end_offset),
            log_start_offset=log_start_offset,
            leader_end_offset=log.log_end_offset,
            now_ms=now_ms,
        )
        may_join = leader.may_join(replica_id) or leader.is_close(replica_id, now_ms)
        return ReplicaFetchResult(None, moved, may_join)

    def forget_follower(self, replica_id: int) -> None:
        """Discard the progress of a follower that stops or opens a new session."""
        if self._leader is not None:
            self._leader.forget_follower(replica_id)

    def read_for_replica(self, offset: int, max_bytes: int, *, is_checked: bool = True) -> Slice:
        """Return whole batches as ``read`` does, but up to the log end, for a follower (R11). Unless
        ``is_checked``, check their CRCs (R43)."""
        self._leading()
        found = self.log.read(offset, max_bytes=max_bytes, up_to=self.log.log_end_offset)
        if not is_checked:
            self.log.check_again(found)
        return found

    def propose_isr(
        self, now_ms: int, *, lag_time_max_ms: int, live: Callable[[int], int | None]
    ) -> PartitionChange | None:
        """Return the change of the in-sync set to request from the controller, or None (R12, R15).

        First ends the waits for replicas that have joined or are late. Returns None also while the
        controller's response is awaited; if the response is lost or is a refusal, call ``on_undecided``.
        ``live`` returns a node's broker epoch if the node is unfenced and not shutting down, else None.
        """
        leader = self._leader
        if leader is None:
            return None
        if leader.is_waiting and leader.end_waits(now_ms) and self.observer is not None:
            self.observer.on_high_watermark_moved()
        proposed = leader.propose(
            now_ms, lag_time_max_ms=lag_time_max_ms, leader_end_offset=self.log.log_end_offset, live=live
        )
        if proposed is None:
            return None
        return PartitionChange(
            self.topic_id,
            self.key.partition,
            leader.leader_epoch,
            proposed.partition_epoch,
            list(proposed.isr),
            list(proposed.broker_epochs),
        )

    def on_undecided(self) -> None:
        """Make ``propose_isr`` return the proposal again, after a refusal or a lost response (R14)."""
        if self._leader is not None:
            self._leader.on_undecided()

    @property
    def is_awaiting_replica(self) -> bool:
        """Whether the high watermark waits for a replica that is about to join: call ``propose_isr`` soon."""
        return self._leader is not None and self._leader.is_waiting

    # --- following -------------------------------------------------------------------------------------

    @property
    def syncs_appends(self) -> bool:
        """Whether appended batches must be synced as soon as possible: with ``durability=fsync`` always, and
        otherwise in a follower that is not in sync, because it joins by its synced end (R68)."""
        return self.is_synced_only or (self._follower is not None and not self._follower.is_in_sync)

    def check_serves_near(self, current_leader_epoch: int) -> None:
        """Raise an error unless consumers may read from this follower (R65); NO_EPOCH accepts any epoch.

        Raises NotLeaderOrFollowerError if it does not follow a leader or is not in sync, KafkaStorageError if
        the log is offline, FencedLeaderEpochError, UnknownLeaderEpochError, and OffsetNotAvailableError until
        the leader has compared the logs in this epoch.
        """
        follower = self._following()
        self._check_epoch(current_leader_epoch)
        if not follower.is_in_sync or follower.leader_id < 0:
            raise NotLeaderOrFollowerError(f"broker {self._broker_id} is not in sync for {self.key}")
        if not follower.may_serve():
            raise OffsetNotAvailableError(f"{self.key}: this follower was not compared with its leader yet")

    def read_as_follower(self, offset: int, max_bytes: int, is_committed_only: bool = False) -> Slice:
        """Return whole batches as ``read`` does, below the high watermark that this follower knows (R65).

        Call ``check_serves_near`` before. Raises the same errors as ``readable_end_as_follower``.
        """
        end = self.readable_end_as_follower(offset, is_committed_only)
        return self.log.read(offset, max_bytes=max_bytes, up_to=end)

    def readable_end_as_follower(self, offset: int, is_committed_only: bool = False) -> int:
        """Return the exclusive end of the offsets that ``read_as_follower`` can return from ``offset`` on.

        Raises OffsetNotAvailableError if ``offset`` is in the log, but this follower does not know it to be
        committed, OffsetOutOfRangeError if it is outside this log (the leader's may have it), and the
        errors of ``check_serves_near`` and of the log.
        """
        end = self._following().readable_end()
        log = self.log
        if end < offset <= log.log_end_offset:
            raise OffsetNotAvailableError(
                f"{self.key}: this follower knows records below {end} to be committed, not {offset}"
            )
        log.read(offset, max_bytes=0, up_to=offset)  # reads nothing, but raises for an offset out of range
        return log.last_stable_offset(end) if is_committed_only else end

    def fetch_position(self) -> FetchPosition:
        """Return the position to report in the next fetch, and to pass to ``on_fetched`` with its
        response.

        Raises NotLeaderOrFollowerError if not following, KafkaStorageError if the log is offline.
        """
        return self._following().position()

    def _following(self) -> PartitionFollower:
        if self._follower is None:
            raise NotLeaderOrFollowerError(f"broker {self._broker_id} does not follow {self.key}")
        if self.log.offline_reason is not None:
            raise self._offline()
        return self._follower

    def waits_for_disk(self, response: ReplicaFetchedPartition, batches: memoryview) -> bool:
        """Whether ``on_fetched`` may sync before it returns, because the response may truncate the log or
        move its start."""
        return self._follower is not None and self._follower.waits_for_disk(response, batches)

    def on_fetched(
        self,
        response: ReplicaFetchedPartition,
        batches: memoryview,
        *,
        now_ms: int,
        asked: FetchPosition | None = None,
    ) -> FollowerStep:
        """Apply the leader's response: append its batches (R1), or truncate or empty the log (R4).

        ``asked`` is the position that the fetch reported; if this replica has changed since, the response is
        ignored (R3). A truncation is durable on return. ``now_ms`` is the wall clock. Raises the BrokerError
        of the response's error code, KafkaStorageError if the log is offline, ShortLeaderError if the leader
        lacks committed records (R49), CorruptBatchError for invalid batches, and the log's StorageErrors.
        """
        follower = self._follower
        if follower is None or (asked is not None and not follower.accepts(asked.leader_epoch, asked)):
            return IGNORED
        self._following()
        if response.error_code and response.error_code != ErrorCode.OFFSET_OUT_OF_RANGE:
            raise broker_error(response.error_code, response.error_message or "")
        if not follower.accepts(response.leader_epoch, asked):
            return IGNORED
        return follower.apply(response, batches, now_ms)
