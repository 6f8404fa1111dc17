"""One partition on this broker: its role joined to its log.

Everything is synchronous. What can't be done is a BrokerError of the code that a client is to see; what
the disk refuses stays a StorageError, for the dispatcher to translate. As yet the only role is leader: a
partition without one answers NOT_LEADER_OR_FOLLOWER.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalite.errors import (
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidTimestampError,
    KafkaStorageError,
    MessageTooLargeError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    UnknownLeaderEpochError,
)
from kafkalite.metadata.image import PartitionState
from kafkalite.model import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    NO_EPOCH,
    NO_OFFSET,
    NO_TIMESTAMP,
    Acks,
    OffsetAndTimestamp,
    TimestampType,
    TopicPartition,
)
from kafkalite.records.header import CONTROL_BIT, TIMESTAMP_TYPE_BIT, TRANSACTIONAL_BIT, BatchHeader
from kafkalite.replication.leader import PartitionLeader

if TYPE_CHECKING:
    from kafkalite.storage.log import Appended, Log, Slice
    from kafkalite.storage.log_config import LogConfig

_NOT_FROM_CLIENTS: Final = TRANSACTIONAL_BIT | CONTROL_BIT | TIMESTAMP_TYPE_BIT
_NOTHING_CAN_BE_OLDER: Final = 2**63 - 1
_ACKS_ALL: Final = int(Acks.ALL)


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """What a topic's configuration says beyond its log: Kafka's options of the same names."""

    min_insync_replicas: int = 1
    message_timestamp_before_max_ms: int = _NOTHING_CAN_BE_OLDER
    message_timestamp_after_max_ms: int = 3_600_000


class Partition:
    """A replica. Invariant: log start offset <= high watermark <= log end offset."""

    __slots__ = (
        "_after_max_ms",
        "_before_max_ms",
        "_broker_id",
        "_counts_synced",
        "_is_create_time",
        "_leader",
        "_max_message_bytes",
        "_resigned_high_watermark",
        "log",
        "partition_epoch",
        "settings",
        "topic_id",
        "topic_partition",
    )

    def __init__(
        self,
        topic_partition: TopicPartition,
        topic_id: str,
        log: Log,
        *,
        broker_id: int,
        settings: PartitionSettings | None = None,
    ) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.log = log
        self.partition_epoch = NO_EPOCH
        self._broker_id = broker_id
        self._leader: PartitionLeader | None = None
        self._resigned_high_watermark = log.log_start_offset
        self._take_settings(settings or PartitionSettings())

    def _take_settings(self, settings: PartitionSettings) -> None:
        config = self.log.config
        self.settings = settings
        self._before_max_ms = settings.message_timestamp_before_max_ms
        self._after_max_ms = settings.message_timestamp_after_max_ms
        self._counts_synced = config.synced_only
        self._is_create_time = config.timestamp_type is TimestampType.CREATE_TIME
        self._max_message_bytes = config.max_message_bytes

    def reconfigure(self, config: LogConfig, settings: PartitionSettings) -> bool:
        """The topic's configuration changed. Returns whether the high watermark moved."""
        self.log.reconfigure(config)
        self._take_settings(settings)
        if self._leader is None:
            return False
        moved = self._leader.configure(self._leader.isr, settings.min_insync_replicas)
        return self.on_synced() or moved

    # --- role ------------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self._leader is not None

    @property
    def leader_epoch(self) -> int:
        """The epoch this replica leads in; NO_EPOCH when it does not."""
        return NO_EPOCH if self._leader is None else self._leader.leader_epoch

    @property
    def high_watermark(self) -> int:
        """Consumers read below it: exclusive. The last known one when this replica does not lead."""
        return self._resigned_high_watermark if self._leader is None else self._leader.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Where read_committed ends, exclusive. Without transactions that is the high watermark."""
        return self.high_watermark

    def become_leader(self, state: PartitionState) -> bool:
        """Lead as the metadata says, or take a changed in-sync set while leading in the same epoch.

        Returns whether the high watermark moved. A first leadership on an empty disk, like one after a
        restart, starts from what the log itself has for sure.
        """
        assert state.leader == self._broker_id, f"{self.topic_partition} is led by {state.leader}"
        assert state.partition_epoch >= self.partition_epoch, f"{self.topic_partition}: {state} is outdated"
        self.partition_epoch = state.partition_epoch
        leader = self._leader
        if leader is not None and leader.leader_epoch == state.leader_epoch:
            return leader.configure(state.isr, self.settings.min_insync_replicas)
        log = self.log
        # Nothing came before epoch 0, so it needs no entry (R2); and asking a log for its latest epoch
        # opens its files, which a start of thousands of partitions must not do.
        if state.leader_epoch > 0 and state.leader_epoch > log.latest_epoch:
            log.start_epoch(state.leader_epoch)
        self._leader = PartitionLeader(
            self._broker_id,
            leader_epoch=state.leader_epoch,
            isr=state.isr,
            epoch_start_offset=log.log_end_offset,
            high_watermark=max(self.high_watermark, log.log_start_offset),
            min_insync_replicas=self.settings.min_insync_replicas,
        )
        return self.on_synced()

    def resign(self) -> None:
        """Stop leading: every request is answered NOT_LEADER_OR_FOLLOWER from now on."""
        self._resigned_high_watermark = self.high_watermark
        self._leader = None

    def check_leader_epoch(self, current_leader_epoch: int) -> None:
        """Fence a client by the leader epoch it knows; NO_EPOCH knows none (R3).

        Raises NotLeaderOrFollowerError, FencedLeaderEpochError (the client's is older),
        UnknownLeaderEpochError (it is newer: this broker is behind).
        """
        leader_epoch = self._leading().leader_epoch
        if current_leader_epoch in (leader_epoch, NO_EPOCH):
            return
        kind = FencedLeaderEpochError if current_leader_epoch < leader_epoch else UnknownLeaderEpochError
        raise kind(
            f"{self.topic_partition} is led in epoch {leader_epoch}, the request knows {current_leader_epoch}"
        )

    def _leading(self) -> PartitionLeader:
        if self._leader is None:
            raise NotLeaderOrFollowerError(f"broker {self._broker_id} does not lead {self.topic_partition}")
        return self._leader

    # --- data ------------------------------------------------------------------------------------------

    def append(
        self,
        batch: bytearray | memoryview,
        header: BatchHeader,
        now_ms: int,
        *,
        acks: int = _ACKS_ALL,
    ) -> Appended:
        """Append one batch from a client; offset and leader epoch are stamped into ``batch`` itself.

        ``header`` is what ``records.header.check`` returned for it, ``now_ms`` the wall clock. With
        ``durability=fsync`` the high watermark follows after the sync (``on_synced``), otherwise at once.
        Raises NotLeaderOrFollowerError, KafkaStorageError (log offline), MessageTooLargeError,
        InvalidRecordError, InvalidTimestampError, NotEnoughReplicasError (acks=all, R6), and the log's
        StorageErrors.
        """
        leader = self._leader or self._leading()
        log = self.log
        if log.offline_reason is not None:
            raise KafkaStorageError(f"{self.topic_partition} is offline: {log.offline_reason}")
        if header.length_bytes > self._max_message_bytes:
            raise MessageTooLargeError(
                f"a batch of {header.length_bytes} bytes for {self.topic_partition},"
                f" whose max.message.bytes is {self._max_message_bytes}"
            )
        if header.attributes & _NOT_FROM_CLIENTS:
            self._refuse_attributes(header)
        if self._is_create_time:
            too_late = header.max_timestamp_ms - now_ms > self._after_max_ms
            if too_late or now_ms - header.base_timestamp_ms > self._before_max_ms:
                self._refuse_timestamps(header, now_ms)
        if acks == _ACKS_ALL and not leader.has_enough_in_sync:
            raise NotEnoughReplicasError(
                f"{self.topic_partition} has {len(leader.isr)} replicas in sync,"
                f" and min.insync.replicas is {self.settings.min_insync_replicas}"
            )
        appended = log.append(batch, now_ms=now_ms, leader_epoch=leader.leader_epoch, header=header)
        if not self._counts_synced:
            leader.on_progress(self._broker_id, appended.log_end_offset)
        return appended

    def _refuse_attributes(self, header: BatchHeader) -> None:
        if header.is_control or header.is_transactional:
            raise InvalidRecordError(f"clients can't write control or transactional batches here: {header}")
        raise InvalidTimestampError("only the broker may set the timestamp type LogAppendTime of a batch")

    def _refuse_timestamps(self, header: BatchHeader, now_ms: int) -> None:
        """KIP-937. Of the records only the batch's base and largest timestamp are looked at."""
        if header.base_timestamp_ms == NO_TIMESTAMP and header.max_timestamp_ms == NO_TIMESTAMP:
            return
        raise InvalidTimestampError(
            f"a batch for {self.topic_partition} has timestamps from {header.base_timestamp_ms} to"
            f" {header.max_timestamp_ms} ms; by the broker's clock, {now_ms} ms, they may lie"
            f" {self._before_max_ms} ms before and {self._after_max_ms} ms after it",
            hint="see message.timestamp.before.max.ms and message.timestamp.after.max.ms",
        )

    def on_synced(self) -> bool:
        """The log's synced end may have moved. Returns whether the high watermark did."""
        if self._leader is None:
            return False
        log = self.log
        progress = log.synced_end_offset if self._counts_synced else log.log_end_offset
        return self._leader.on_progress(self._broker_id, progress)

    def read(self, offset: int, max_bytes: int) -> Slice:
        """Whole batches from the one that holds ``offset`` on, below the high watermark (R11).

        Empty when there are none yet. The first batch comes whole even if it alone has more than
        ``max_bytes``. Raises OffsetOutOfRangeError, NotLeaderOrFollowerError, OffsetNotAvailableError.
        """
        leader = self._leader or self._leading()
        log = self.log
        if offset > log.log_end_offset and not leader.is_settled:
            raise self._unsettled()
        return log.read(offset, max_bytes=max_bytes, up_to=leader.high_watermark)

    def _unsettled(self) -> OffsetNotAvailableError:
        return OffsetNotAvailableError(
            f"{self.topic_partition}: the new leader does not know yet what is on all in-sync replicas"
        )

    def list_offset(self, timestamp_ms: int) -> OffsetAndTimestamp:
        """The offset for a timestamp, or for EARLIEST, LATEST, MAX_TIMESTAMP; see ``ListedOffset``.

        NO_OFFSET when every readable record is older. Raises InvalidRequestError for another negative
        number, NotLeaderOrFollowerError, OffsetNotAvailableError (R10).
        """
        leader = self._leading()
        log = self.log
        if timestamp_ms == EARLIEST:
            return OffsetAndTimestamp(log.log_start_offset, NO_TIMESTAMP, leader.leader_epoch)
        if not leader.is_settled:
            raise self._unsettled()
        if timestamp_ms == LATEST:
            return OffsetAndTimestamp(leader.high_watermark, NO_TIMESTAMP, leader.leader_epoch)
        if timestamp_ms < 0 and timestamp_ms != MAX_TIMESTAMP:
            raise InvalidRequestError(f"no offset is defined for the timestamp {timestamp_ms}")
        found = (
            log.max_timestamp() if timestamp_ms == MAX_TIMESTAMP else log.offset_for_timestamp(timestamp_ms)
        )
        if found is None or found[1] >= leader.high_watermark:
            return OffsetAndTimestamp(NO_OFFSET, NO_TIMESTAMP, leader.leader_epoch)
        return OffsetAndTimestamp(found[1], found[0], leader.leader_epoch)

    def end_offset_for_epoch(self, leader_epoch: int) -> tuple[int, int]:
        """(largest known epoch not above ``leader_epoch``, where it ends, exclusive): R4."""
        self._leading()
        return self.log.end_offset_for_epoch(leader_epoch)

    def delete_records(self, before_offset: int) -> int:
        """Make ``before_offset`` the log start; LATEST means the high watermark. Returns the log start.

        An offset below the log start changes nothing. Raises OffsetOutOfRangeError above the high
        watermark, NotLeaderOrFollowerError, and the log's StorageErrors.
        """
        high_watermark = self._leading().high_watermark
        if before_offset == LATEST:
            before_offset = high_watermark
        if not 0 <= before_offset <= high_watermark:
            raise OffsetOutOfRangeError(
                f"records of {self.topic_partition} can be deleted up to its high watermark,"
                f" {high_watermark}, not {before_offset}"
            )
        if before_offset <= self.log.log_start_offset:
            return self.log.log_start_offset
        return self.log.delete_before(before_offset)
