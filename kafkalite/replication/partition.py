"""One partition on this broker: its role joined to its log.

``replica.Replica`` has the role and follows; here is what a leader does for clients and for followers. Who
does not lead answers NOT_LEADER_OR_FOLLOWER. Everything is synchronous. What can't be done is a BrokerError
of the code that a client is to see; what the disk refuses stays a StorageError, for the dispatcher to
translate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalite import mutants
from kafkalite.errors import (
    InvalidRecordError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    InvalidTimestampError,
    InvalidTxnStateError,
    KafkaStorageError,
    MessageTooLargeError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    StaleBrokerEpochError,
)
from kafkalite.model import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    NO_EPOCH,
    NO_OFFSET,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    Acks,
    OffsetAndTimestamp,
)
from kafkalite.protocol.messages.cluster import ChangedPartition, PartitionChange
from kafkalite.records.control import build_marker
from kafkalite.records.header import (
    CONTROL_BIT,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    parse_header,
)
from kafkalite.replication.follower import diverging_at
from kafkalite.replication.leader import PartitionLeader, ProposedIsr, ReplicaLag
from kafkalite.replication.replica import PartitionSettings, Replica
from kafkalite.storage.leader_epochs import EpochEnd
from kafkalite.storage.log import Appended

if TYPE_CHECKING:
    from kafkalite.storage.log import Slice
    from kafkalite.storage.producer_state import OpenTransaction, SequencedBatch
    from kafkalite.storage.segment_list import BytesEnd

__all__ = ["Partition", "PartitionSettings", "ReplicaFetchResult"]

#: What a client's batch has only as part of a transaction, or never.
_SPECIAL: Final = TRANSACTIONAL_BIT | CONTROL_BIT | TIMESTAMP_TYPE_BIT
_ACKS_ALL: Final = int(Acks.ALL)


class ReplicaFetchResult(NamedTuple):
    """What a leader makes of a follower's fetch. With ``diverging`` no records may be answered (R4)."""

    diverging: EpochEnd | None
    moved: bool  #: the high watermark
    may_join: bool  #: if it is alive, ``propose_isr`` would let the follower in now, or wait for it


class Partition(Replica):
    """A replica that can lead: what clients and followers may ask of it."""

    __slots__ = ()

    # --- data ------------------------------------------------------------------------------------------

    def append(
        self,
        batch: bytearray | memoryview,
        header: BatchHeader,
        now_ms: int,
        *,
        acks: int = _ACKS_ALL,
        is_verified: bool = False,
    ) -> Appended:
        """Append one batch from a client; offset and leader epoch are stamped into ``batch`` itself.

        ``header`` is what ``records.header.check`` returned for it, ``now_ms`` the wall clock. With
        ``durability=fsync`` the high watermark follows after the sync (``on_synced``), otherwise at once.
        ``is_verified``: the coordinator has added this partition to the batch's transaction (R31).
        Raises NotLeaderOrFollowerError, KafkaStorageError (log offline), MessageTooLargeError,
        InvalidRecordError, InvalidTimestampError, NotEnoughReplicasError (acks=all, R6), for batches of
        idempotent producers what ``ProducerStates.check`` and ``check_open`` raise, for transactional ones
        also InvalidRequiredAcksError and InvalidTxnStateError, and the log's StorageErrors.
        """
        leader = self._leader or self._leading()
        log = self.log
        if log.offline_reason is not None:
            raise self._offline()
        if header.length_bytes > self._max_message_bytes:
            raise MessageTooLargeError(
                f"a batch of {header.length_bytes} bytes for {self.topic_partition},"
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
            repeated = producers.check(header)
            if repeated is not None:
                return self._appended_before(repeated)
        appended = log.append(batch, now_ms=now_ms, leader_epoch=leader.leader_epoch, header=header)
        if not self._counts_synced:
            leader.on_progress(self._broker_id, appended.log_end_offset)
        return appended

    def _appended_before(self, batch: SequencedBatch) -> Appended:
        """R28: the batch's first offsets. They are acknowledged when they are committed, as any."""
        time_ms = NO_TIMESTAMP if self._is_create_time else batch.max_timestamp_ms
        last_offset = NO_OFFSET if "R28-ack-uncommitted" in mutants.ACTIVE else batch.last_offset
        return Appended(batch.base_offset, last_offset, time_ms, self.log.log_end_offset, is_duplicate=True)

    def _offline(self) -> KafkaStorageError:
        return KafkaStorageError(f"{self.topic_partition} is offline: {self.log.offline_reason}")

    def _not_enough_replicas(self, leader: PartitionLeader) -> NotEnoughReplicasError:
        return NotEnoughReplicasError(
            f"{self.topic_partition} has {len(leader.isr)} replicas in sync,"
            f" and min.insync.replicas is {self.settings.min_insync_replicas}"
        )

    def _check_attributes(self, header: BatchHeader, acks: int, is_verified: bool) -> None:
        """Refuse what clients may not send; let part of a transaction pass that is known to be one."""
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
                f" {self.topic_partition}, and its coordinator did not confirm one"
            )

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

    def read(self, offset: int, max_bytes: int, is_committed_only: bool = False) -> Slice:
        """Whole batches from the one that holds ``offset`` on, below the high watermark (R11).

        ``is_committed_only``: below the last stable offset, so that every transaction's outcome is known;
        ``Log.aborted_between`` tells which were aborted. Empty when there are none yet. The first batch comes
        whole even if it alone has more than ``max_bytes``. Raises OffsetOutOfRangeError,
        NotLeaderOrFollowerError, OffsetNotAvailableError.
        """
        leader = self._leader or self._leading()
        log = self.log
        if offset > log.log_end_offset and not leader.is_settled:
            raise self._unsettled()
        end = leader.high_watermark
        if is_committed_only:
            end = log.last_stable_offset(end)
        return log.read(offset, max_bytes=max_bytes, up_to=end)

    def readable_end(self, offset: int, is_committed_only: bool = False) -> int:
        """Where a ``read`` from ``offset`` on would have to stop, exclusive. Raises as ``read``."""
        leader = self._leader or self._leading()
        log = self.log
        if offset > log.log_end_offset and not leader.is_settled:
            raise self._unsettled()
        log.read(offset, max_bytes=0, up_to=offset)  # nothing to read, but whether one may is told
        end = leader.high_watermark
        return log.last_stable_offset(end) if is_committed_only else end

    def offset_for_bytes(
        self, start_offset: int, end_offset: int, max_bytes: int, is_committed_only: bool = False
    ) -> BytesEnd:
        """As ``Log.offset_for_bytes``, up to the high watermark or the last stable offset.

        Raises InvalidRequestError for a range that is none, OffsetOutOfRangeError when it begins above what
        is readable, NotLeaderOrFollowerError, OffsetNotAvailableError (R10).
        """
        leader = self._leading()
        if not 0 <= start_offset <= end_offset:
            raise InvalidRequestError(f"[{start_offset}, {end_offset}) is no range of offsets")
        if not leader.is_settled:
            raise self._unsettled()
        log = self.log
        end = leader.high_watermark
        if is_committed_only:
            end = log.last_stable_offset(end)
        if start_offset > end:
            raise OffsetOutOfRangeError(f"{self.topic_partition} is readable up to {end}, not {start_offset}")
        return log.offset_for_bytes(start_offset, min(end_offset, end), max_bytes)

    def _unsettled(self) -> OffsetNotAvailableError:
        return OffsetNotAvailableError(
            f"{self.topic_partition}: the new leader does not know yet what is on all in-sync replicas"
        )

    def list_offset(self, timestamp_ms: int, is_committed_only: bool = False) -> OffsetAndTimestamp:
        """The offset for a timestamp, or for EARLIEST, LATEST, MAX_TIMESTAMP; see ``ListedOffset``.

        With ``is_committed_only`` the readable part ends at the last stable offset. NO_OFFSET when every
        readable record is older. Raises InvalidRequestError for another negative number,
        NotLeaderOrFollowerError, OffsetNotAvailableError (R10).
        """
        leader = self._leading()
        log = self.log
        if timestamp_ms == EARLIEST:
            return OffsetAndTimestamp(log.log_start_offset, NO_TIMESTAMP, leader.leader_epoch)
        if not leader.is_settled:
            raise self._unsettled()
        end = leader.high_watermark
        if is_committed_only:
            end = log.last_stable_offset(end)
        if timestamp_ms == LATEST:
            return OffsetAndTimestamp(end, NO_TIMESTAMP, leader.leader_epoch)
        if timestamp_ms < 0 and timestamp_ms != MAX_TIMESTAMP:
            raise InvalidRequestError(f"no offset is defined for the timestamp {timestamp_ms}")
        found = (
            log.max_timestamp() if timestamp_ms == MAX_TIMESTAMP else log.offset_for_timestamp(timestamp_ms)
        )
        if found is None or found[1] >= end:
            return OffsetAndTimestamp(NO_OFFSET, NO_TIMESTAMP, leader.leader_epoch)
        return OffsetAndTimestamp(found[1], found[0], leader.leader_epoch)

    def end_offset_for_epoch(self, leader_epoch: int) -> tuple[int, int]:
        """(largest known epoch not above ``leader_epoch``, where it ends, exclusive): R4."""
        self._leading()
        return self.log.end_offset_for_epoch(leader_epoch)

    def delete_records(self, before_offset: int) -> int:
        """Make ``before_offset`` the log start; LATEST means the high watermark. Returns the log start.

        An offset below the log start changes nothing. Raises as ``deletion_end``, and the log's errors.
        """
        before_offset = self.deletion_end(before_offset)
        if before_offset <= self.log.log_start_offset:
            return self.log.log_start_offset
        return self.log.delete_before(before_offset)

    def deletion_end(self, before_offset: int) -> int:
        """Where a DeleteRecords before that offset deletes up to, exclusive; LATEST means the high watermark.

        Raises OffsetOutOfRangeError above the high watermark, NotLeaderOrFollowerError.
        """
        high_watermark = self._leading().high_watermark
        if before_offset == LATEST:
            before_offset = high_watermark
        if not 0 <= before_offset <= high_watermark:
            raise OffsetOutOfRangeError(
                f"records of {self.topic_partition} can be deleted up to its high watermark,"
                f" {high_watermark}, not {before_offset}"
            )
        return before_offset

    # --- transactions and coordinators -----------------------------------------------------------------

    def needs_verification(self, header: BatchHeader) -> bool:
        """Whether the coordinator must add this partition to the batch's transaction before it is appended,
        because it would be the transaction's first one here (R31). Raises NotLeaderOrFollowerError."""
        self._leading()
        if not header.is_transactional or header.is_control or header.producer_id < 0:
            return False
        return self.log.producers.needs_verification(header.producer_id, header.producer_epoch)

    def append_state(self, batch: bytearray | memoryview, header: BatchHeader, now_ms: int) -> Appended:
        """Append a coordinator's own batch, as with acks=all.

        A transactional one is of a transaction known to include this partition, and has no sequence. Raises
        NotLeaderOrFollowerError, KafkaStorageError, NotEnoughReplicasError, InvalidRecordError (a control
        batch), what ``ProducerStates.check_open`` raises, and the log's StorageErrors.
        """
        leader = self._appending()
        if header.is_control:
            raise InvalidRecordError(f"markers are appended by append_marker: {header}")
        if header.producer_id != NO_PRODUCER_ID:
            self.log.producers.check_open(header)
        return self._append_own(leader, batch, header, now_ms)

    def append_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, is_commit: bool, now_ms: int
    ) -> Appended:
        """Append the marker that ends the producer's transaction here, as with acks=all (R33).

        ``producer_epoch`` is the one after that of the transaction, and from now on the producer's (R31).
        When the marker stands in the log already, nothing is appended: what is returned ends with the log,
        so that it counts as committed when the marker surely is. Raises NotLeaderOrFollowerError,
        KafkaStorageError, NotEnoughReplicasError, TransactionCoordinatorFencedError (R32),
        InvalidProducerEpochError, and the log's StorageErrors.
        """
        leader = self._appending()
        log = self.log
        if not log.producers.check_marker(producer_id, producer_epoch, coordinator_epoch):
            last_offset = log.log_end_offset - 1
            return Appended(last_offset, last_offset, NO_TIMESTAMP, log.log_end_offset, is_duplicate=True)
        log.settle_transactions(leader.high_watermark)
        batch = build_marker(producer_id, producer_epoch, coordinator_epoch, is_commit, now_ms)
        return self._append_own(leader, batch, parse_header(batch), now_ms)

    def _appending(self) -> PartitionLeader:
        """This leadership, if it may append as with acks=all."""
        leader = self._leading()
        if self.log.offline_reason is not None:
            raise self._offline()
        if not leader.has_enough_in_sync:
            raise self._not_enough_replicas(leader)
        return leader

    def _append_own(
        self, leader: PartitionLeader, batch: bytearray | memoryview, header: BatchHeader, now_ms: int
    ) -> Appended:
        appended = self.log.append(batch, now_ms=now_ms, leader_epoch=leader.leader_epoch, header=header)
        if not self._counts_synced:
            leader.on_progress(self._broker_id, appended.log_end_offset)
        return appended

    def open_transactions(self) -> list[OpenTransaction]:
        """Those without a marker here, by first offset. Raises NotLeaderOrFollowerError."""
        self._leading()
        return self.log.producers.open_transactions()

    # --- leading: followers ----------------------------------------------------------------------------

    @property
    def acknowledgement_error(self) -> NotEnoughReplicasAfterAppendError | None:
        """Why what waits for acks=all must be told now, since the high watermark stands still (R6, R9)."""
        leader = self._leader
        if leader is None or leader.has_enough_in_sync:
            return None
        return NotEnoughReplicasAfterAppendError(
            f"{self.topic_partition} has {len(leader.isr)} replicas in sync since the batch was appended,"
            f" and min.insync.replicas is {self.settings.min_insync_replicas}; the batch is in the log"
        )

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
        """Take what a follower tells of itself (R3, R4, R7, R8).

        A fetch that diverges, or is refused, counts as nothing. Raises NotLeaderOrFollowerError (also for
        a stranger), FencedLeaderEpochError, UnknownLeaderEpochError, StaleBrokerEpochError (of an earlier
        life of that broker), OffsetOutOfRangeError: the follower ends before this log starts.
        """
        leader = self._leading()
        if leader_epoch != leader.leader_epoch and "R3-epoch-unchecked" not in mutants.ACTIVE:
            self.check_leader_epoch(leader_epoch)
        if not leader.is_follower(replica_id):
            raise NotLeaderOrFollowerError(f"broker {replica_id} has no replica of {self.topic_partition}")
        if broker_epoch < leader.seen_broker_epoch(replica_id):
            raise StaleBrokerEpochError(
                f"broker {replica_id} fetched {self.topic_partition} with a later epoch than {broker_epoch}"
            )
        log = self.log
        diverging: EpochEnd | None = None
        if last_epoch != NO_EPOCH:
            diverging = diverging_at(last_epoch, fetch_offset, log.end_offset_for_epoch(last_epoch))
        if diverging is not None and "R4-divergent-counts" not in mutants.ACTIVE:
            return ReplicaFetchResult(diverging, moved=False, may_join=False)
        if diverging is None and not log.log_start_offset <= fetch_offset <= log.log_end_offset:
            raise OffsetOutOfRangeError(
                f"{self.topic_partition} has offsets from {log.log_start_offset} to {log.log_end_offset};"
                f" broker {replica_id} asks for {fetch_offset}"
            )
        moved = leader.on_fetch(
            replica_id,
            broker_epoch=broker_epoch,
            progress=min(fetch_offset, synced_end_offset) if self.log.config.synced_only else fetch_offset,
            log_end_offset=fetch_offset,
            synced_end_offset=synced_end_offset,
            log_start_offset=log_start_offset,
            leader_end_offset=log.log_end_offset,
            now_ms=now_ms,
        )
        may_join = leader.may_join(replica_id) or leader.is_close(replica_id, now_ms)
        return ReplicaFetchResult(diverging, moved, may_join)

    def forget_follower(self, replica_id: int) -> None:
        """A follower says that it fetches no more, or anew. Until it fetches again it does not count."""
        if self._leader is not None:
            self._leader.forget_follower(replica_id)

    def note_idle_fetch(self, replica_id: int, now_ms: int) -> None:
        """A follower's request left this partition out: it stands where it stood (R15).

        Not needed for one that has everything: ``propose_isr`` sees that by itself.
        """
        if self._leader is not None:
            self._leader.on_idle(replica_id, self.log.log_end_offset, now_ms)

    def read_for_replica(self, offset: int, max_bytes: int) -> Slice:
        """As ``read``, up to the log end (R11)."""
        self._leading()
        return self.log.read(offset, max_bytes=max_bytes, up_to=self.log.log_end_offset)

    def propose_isr(
        self, now_ms: int, *, lag_time_max_ms: int, live: Callable[[int], int | None]
    ) -> PartitionChange | None:
        """The change of the in-sync set to ask the controller for, or None (R12, R15).

        ``live`` tells a node's current broker epoch if it is unfenced and not shutting down. While an answer
        is due, there is nothing more to ask. Every proposal must be followed by ``on_partition_changed``.
        """
        leader = self._leader
        if leader is None:
            return None
        proposed = leader.propose(
            now_ms, lag_time_max_ms=lag_time_max_ms, leader_end_offset=self.log.log_end_offset, live=live
        )
        return None if proposed is None else self._change(leader, proposed)

    @property
    def is_awaiting_replica(self) -> bool:
        """Whether the high watermark waits for a replica about to join: call ``end_waits`` soon."""
        return self._leader is not None and self._leader.is_waiting

    def end_waits(self, now_ms: int) -> bool:
        """Wait no more for who joined, or did not in time. Returns whether the high watermark moved."""
        return self._leader is not None and self._leader.end_waits(now_ms)

    def _change(self, leader: PartitionLeader, proposed: ProposedIsr) -> PartitionChange:
        return PartitionChange(
            self.topic_id,
            self.topic_partition.partition,
            leader.leader_epoch,
            proposed.partition_epoch,
            list(proposed.isr),
            list(proposed.broker_epochs),
        )

    def on_partition_changed(self, answer: ChangedPartition | None) -> bool:
        """The controller's answer to a proposal; None for an error or a timeout of the whole request (R14).

        Only a state of a greater partition epoch settles it; otherwise it stands, and the next
        ``propose_isr`` gives it again. Returns whether the high watermark moved.
        """
        leader = self._leader
        if leader is None:
            return False
        if answer is not None and answer.error_code and "R14-revert" in mutants.ACTIVE:
            return leader.forget_proposal()
        if (
            answer is None
            or (answer.leader_id, answer.leader_epoch) != (self._broker_id, leader.leader_epoch)
            or answer.partition_epoch <= leader.partition_epoch
        ):
            leader.on_unanswered()
            return False
        moved = leader.take_state(answer.partition_epoch, answer.isr)
        self.partition_epoch = leader.partition_epoch
        return moved

    @property
    def in_sync_replicas(self) -> frozenset[int]:
        """As far as this leader knows; empty when it does not lead."""
        return frozenset() if self._leader is None else self._leader.isr

    @property
    def low_watermark(self) -> int:
        """What was deleted below it stays deleted whoever of the in-sync replicas leads next: what a
        DeleteRecords may wait for. The log start when this replica does not lead."""
        start = self.log.log_start_offset
        return start if self._leader is None else self._leader.low_watermark(start)

    def follower_lags(self, now_ms: int) -> dict[int, ReplicaLag]:
        """How far each follower is, by its node id; empty when this replica does not lead."""
        if self._leader is None:
            return {}
        end = self.log.log_end_offset
        lags = self._leader.lags()
        for replica_id in lags:
            self._leader.on_idle(replica_id, end, now_ms)
        return self._leader.lags()
