"""A replica of one partition: its role joined to its log, and what following means.

``partition.Partition`` adds what a leader does. Everything is synchronous. The role is that of a leader, of
a follower, or none. Uncommitted records outlive a change of role; only a leader's answer cuts a log (R4).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kafkalite import mutants
from kafkalite.errors import (
    CorruptBatchError,
    ErrorCode,
    FencedLeaderEpochError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    UnknownLeaderEpochError,
    broker_error,
)
from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_EPOCH, TimestampType, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.gaps import joined_at
from kafkalite.records.header import check, total_length
from kafkalite.replication.follower import (
    IGNORED,
    FetchPosition,
    FollowerStep,
    PartitionFollower,
    truncation_target,
)
from kafkalite.replication.leader import PartitionLeader
from kafkalite.storage.aborted_index import AbortedIndex
from kafkalite.storage.producer_state import ProducerStates

if TYPE_CHECKING:
    from kafkalite.storage.log import Log
    from kafkalite.storage.log_config import LogConfig

_NOTHING_CAN_BE_OLDER: Final = 2**63 - 1
_NO_BROKER: Final = -1
_BASE_OFFSET: Final = struct.Struct(">q")

Role = Literal["leader", "follower", "none"]


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """What a topic's configuration says beyond its log: Kafka's options of the same names."""

    min_insync_replicas: int = 1
    message_timestamp_before_max_ms: int = _NOTHING_CAN_BE_OLDER
    message_timestamp_after_max_ms: int = 3_600_000


class Replica:
    """A replica. Invariant: log start offset <= high watermark <= log end offset."""

    __slots__ = (
        "_after_max_ms",
        "_before_max_ms",
        "_broker_id",
        "_counts_synced",
        "_follower",
        "_is_create_time",
        "_leader",
        "_max_message_bytes",
        "_resigned_high_watermark",
        "_version",
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
        self._follower: PartitionFollower | None = None
        self._version = 0  # goes up with every change of role and of the log's batches while following
        self._resigned_high_watermark = log.log_start_offset
        self._take_settings(settings or PartitionSettings())

    def _take_settings(self, settings: PartitionSettings) -> None:
        config = self.log.config
        self.settings = settings
        self._before_max_ms = settings.message_timestamp_before_max_ms
        self._after_max_ms = settings.message_timestamp_after_max_ms
        self._counts_synced = config.synced_only and "R7-leader-unsynced" not in mutants.ACTIVE
        self._is_create_time = config.timestamp_type is TimestampType.CREATE_TIME
        self._max_message_bytes = config.max_message_bytes

    def reconfigure(self, config: LogConfig, settings: PartitionSettings) -> bool:
        """The topic's configuration changed. Returns whether the high watermark moved."""
        self.log.reconfigure(config)
        self._take_settings(settings)
        if self._leader is None:
            return False
        moved = self._leader.set_min_insync_replicas(settings.min_insync_replicas)
        return self.on_synced() or moved

    # --- role ------------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self._leader is not None

    @property
    def role(self) -> Role:
        if self._leader is not None:
            return "leader"
        return "none" if self._follower is None else "follower"

    @property
    def leader_id(self) -> int:
        """Whom this replica takes for the leader: itself, the one it follows, or -1."""
        if self._leader is not None:
            return self._broker_id
        return _NO_BROKER if self._follower is None else self._follower.leader_id

    @property
    def leader_epoch(self) -> int:
        """The epoch this replica leads or follows in; NO_EPOCH without a role."""
        if self._leader is not None:
            return self._leader.leader_epoch
        return NO_EPOCH if self._follower is None else self._follower.leader_epoch

    @property
    def high_watermark(self) -> int:
        """Consumers read below it: exclusive. The last known one when this replica has no role."""
        if self._leader is not None:
            return self._leader.high_watermark
        return self._resigned_high_watermark if self._follower is None else self._follower.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Where read_committed ends, exclusive: at the first transaction that has not ended for sure, or the
        high watermark (R33). Raises the log's StorageErrors: the log may have to be walked for it."""
        return self.log.last_stable_offset(self.high_watermark)

    def become_leader(self, state: PartitionState, *, now_ms: int = 0, known_high_watermark: int = 0) -> bool:
        """Lead as the metadata says, or take a changed in-sync set while leading in the same epoch.

        ``known_high_watermark`` is what the metadata knows to be committed. Returns whether the high
        watermark moved. A first leadership on an empty disk, like one after a restart, starts from what
        the log itself has for sure. An older state than one already known, from the answer to a proposal,
        changes nothing.
        """
        assert state.leader == self._broker_id, f"{self.topic_partition} is led by {state.leader}"
        leader = self._leader
        if leader is not None and leader.leader_epoch == state.leader_epoch:
            moved = leader.take_state(state.partition_epoch, state.isr)
            self.partition_epoch = leader.partition_epoch
            return moved
        assert state.leader_epoch >= self.leader_epoch, f"{self.topic_partition}: {state} is outdated"
        log = self.log
        certain = max(
            self.high_watermark, log.log_start_offset, min(known_high_watermark, log.log_end_offset)
        )
        # Nothing came before epoch 0, so it needs no entry (R2).
        if state.leader_epoch > 0 and log.offline_reason is None:
            log.start_epoch(state.leader_epoch)
        if "R27-no-rebuild" in mutants.ACTIVE:
            log._producers.states = ProducerStates()
        if "R33-index-forgotten" in mutants.ACTIVE:
            log.producers.aborted = AbortedIndex()
        self._take_role(state)
        self._leader = PartitionLeader(
            self._broker_id,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=state.isr,
            epoch_start_offset=log.log_end_offset,
            high_watermark=certain,
            min_insync_replicas=self.settings.min_insync_replicas,
            now_ms=now_ms,
        )
        return self.on_synced()

    def become_follower(self, state: PartitionState) -> None:
        """Follow ``state.leader``; when that is -1, wait for one. Uncommitted records stay until the new
        leader's answer says what of them is left (R4)."""
        assert state.leader != self._broker_id, f"{self.topic_partition} is led here"
        follower = self._follower
        if follower is not None and (follower.leader_epoch, follower.leader_id) == (
            state.leader_epoch,
            state.leader,
        ):
            self.partition_epoch = max(self.partition_epoch, state.partition_epoch)
            return
        assert state.leader_epoch >= self.leader_epoch, f"{self.topic_partition}: {state} is outdated"
        high_watermark = self.high_watermark
        self._take_role(state)
        if self.log.offline_reason is None:
            self.log.forget_empty_epoch()
            if "R4-truncate-to-hw" in mutants.ACTIVE:
                self.log.truncate_to(high_watermark)
        self._follower = PartitionFollower(
            leader_id=state.leader,
            leader_epoch=state.leader_epoch,
            high_watermark=min(high_watermark, self.log.log_end_offset),
            version=self._version,
        )

    def _take_role(self, state: PartitionState) -> None:
        self.resign()
        self.partition_epoch = state.partition_epoch

    def resign(self) -> None:
        """Have no role: every request is answered NOT_LEADER_OR_FOLLOWER from now on."""
        self._resigned_high_watermark = self.high_watermark
        self._leader = self._follower = None
        self._version += 1

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

    def on_synced(self) -> bool:
        """The log's synced end may have moved. Returns whether the high watermark did."""
        if self._leader is None:
            return False
        log = self.log
        progress = log.synced_end_offset if self._counts_synced else log.log_end_offset
        return self._leader.on_progress(self._broker_id, progress)

    # --- following -------------------------------------------------------------------------------------

    def fetch_position(self) -> FetchPosition:
        """What to tell the leader in the next fetch, and to hand to ``on_fetched`` with the answer.

        Raises NotLeaderOrFollowerError when not following, KafkaStorageError when the log is offline.
        """
        follower = self._following()
        log = self.log
        end = log.log_end_offset
        synced = end if "R7-follower-leo" in mutants.ACTIVE else log.synced_end_offset
        return FetchPosition(
            follower.leader_epoch, end, log.latest_epoch, synced, log.log_start_offset, follower.version
        )

    def _following(self) -> PartitionFollower:
        if self._follower is None:
            raise NotLeaderOrFollowerError(f"broker {self._broker_id} does not follow {self.topic_partition}")
        if self.log.offline_reason is not None:
            raise KafkaStorageError(f"{self.topic_partition} is offline: {self.log.offline_reason}")
        return self._follower

    def is_overlapped(self, batches: memoryview) -> bool:
        """Whether what a leader sent begins before the end of the log, so that the log may have to be cut."""
        has_offset = len(batches) >= _BASE_OFFSET.size
        return has_offset and _BASE_OFFSET.unpack_from(batches)[0] < self.log.log_end_offset

    def on_fetched(
        self,
        answer: ReplicaFetchedPartition,
        batches: memoryview,
        *,
        now_ms: int,
        asked: FetchPosition | None = None,
    ) -> FollowerStep:
        """Do what the leader's answer says: append its batches as they are (R1), or truncate (R4).

        ``asked`` is the position that was asked with; when this replica has changed since, the answer is
        ignored (R3). A truncation is durable on return. ``now_ms`` is the wall clock. Raises, for another
        try later, the BrokerError of the answer's error code, CorruptBatchError for bytes that were
        damaged on the way, and the log's StorageErrors.
        """
        follower = self._follower
        if follower is None or (asked is not None and not follower.believes(asked.leader_epoch, asked)):
            return IGNORED
        self._following()
        if answer.error_code and answer.error_code != ErrorCode.OFFSET_OUT_OF_RANGE:
            raise broker_error(answer.error_code, answer.error_message or "")
        if not follower.believes(answer.leader_epoch, asked):
            return IGNORED
        if answer.error_code:
            return self._start_over_behind(follower, answer)
        if answer.diverging_epoch != NO_EPOCH:
            return self._truncate(follower, answer)
        return self._extend(follower, answer, batches, now_ms)

    def _extend(
        self, follower: PartitionFollower, answer: ReplicaFetchedPartition, batches: memoryview, now_ms: int
    ) -> FollowerStep:
        log = self.log
        if batches and _BASE_OFFSET.unpack_from(batches)[0] < log.log_end_offset <= answer.log_start_offset:
            # The leader's log starts within its first batch, which therefore begins before the end of what
            # is here; and that was deleted there.
            self._start_over(follower, _BASE_OFFSET.unpack_from(batches)[0])
        before = log.log_end_offset
        if batches:
            if _BASE_OFFSET.unpack_from(batches)[0] < before:
                batches = joined_at(batches, before)  # the leader has compacted beyond this log's end
                if _BASE_OFFSET.unpack_from(batches)[0] < before:
                    return self._join_at(follower, answer, batches)
            try:
                log.append_as_follower(batches, now_ms=now_ms, leader_epoch=follower.youngest_epoch)
            finally:
                if log.log_end_offset != before:
                    self._changed(follower)
        moved = follower.advance(answer.high_watermark, log.log_end_offset)
        if moved:
            log.settle_transactions(follower.high_watermark)
        start = min(answer.log_start_offset, log.log_end_offset)
        is_deleting = start > log.log_start_offset
        if is_deleting:
            log.delete_before(start)
            moved = follower.advance(start, start) or moved
        return FollowerStep(len(batches), None, moved, is_deleting)

    def _join_at(
        self, follower: PartitionFollower, answer: ReplicaFetchedPartition, batches: memoryview
    ) -> FollowerStep:
        """Go back to where the leader's first batch begins, in which this log ends: so it does when it comes
        from another leader, which had compacted that batch. The batch is committed and not whole here, so
        this replica is not in sync, and nothing that counts is cut off (R8). Raises CorruptBatchError.
        """
        log = self.log
        header = check(batches[: total_length(batches)])
        if not log.log_end_offset < header.next_offset <= answer.high_watermark:
            raise CorruptBatchError(
                f"a batch with offsets from {header.base_offset} to {header.last_offset};"
                f" the next has offset {log.log_end_offset}"
            )
        if header.base_offset < log.log_start_offset:
            return self._start_over(follower, header.base_offset)
        self._changed(follower)
        return self._ends_at(follower, log.truncate_to(header.base_offset))

    def _truncate(self, follower: PartitionFollower, answer: ReplicaFetchedPartition) -> FollowerStep:
        log = self.log
        own = log.end_offset_for_epoch(answer.diverging_epoch)
        target = truncation_target(answer.diverging_end_offset, own, log.log_end_offset)
        if "R4-truncate-to-hw" in mutants.ACTIVE:
            target = follower.high_watermark
        if target < log.log_start_offset:
            return self._start_over(follower, answer.log_start_offset)
        self._changed(follower)
        end = log.truncate_to(target)
        return self._ends_at(follower, end)

    def _start_over_behind(
        self, follower: PartitionFollower, answer: ReplicaFetchedPartition
    ) -> FollowerStep:
        """The leader no longer has what comes next here: it was deleted there, and so it is here."""
        log = self.log
        if answer.log_start_offset <= log.log_end_offset and log.latest_epoch != NO_EPOCH:
            raise OffsetOutOfRangeError(
                f"{self.topic_partition} ends at {log.log_end_offset}, which the leader refuses although its"
                f" log starts at {answer.log_start_offset}"
            )
        return self._start_over(follower, answer.log_start_offset)

    def _start_over(self, follower: PartitionFollower, offset: int) -> FollowerStep:
        self._changed(follower)
        self.log.reset_to(offset)
        return self._ends_at(follower, offset)

    def _ends_at(self, follower: PartitionFollower, end: int) -> FollowerStep:
        before = follower.high_watermark
        follower.high_watermark = max(min(before, end), self.log.log_start_offset)
        return FollowerStep(0, end, follower.high_watermark != before)

    def _changed(self, follower: PartitionFollower) -> None:
        self._version += 1
        follower.version = self._version
