"""The state of a consumer's partitions: positions, fetched batches, and the next requests. Pure.

Metadata, responses and the user's calls are inputs; requests, batches and errors are results. Per partition::

    position         the next offset to return to the user; the result of ``position()``
    fetch_offset     the next offset to fetch
    buffered         the fetched batches that are not unpacked yet

The leader epoch of the last batch before the fetch offset is stored with that offset. Before fetching from a
new leader, the consumer requests the offset at which this epoch ends in the leader's log (KIP-320). If the
epoch ends before the fetch offset, records that this consumer has fetched were lost.

Control batches, and with ``read_committed`` also batches of aborted transactions (see ``isolation``), are
dropped when they arrive. The position moves past them.

A partition is fetched from its leader, or from the follower that the leader has named (``near_replica``). An
error of a follower only ends reading from it: what it lacks, the leader may have (R67).

A *seek* discards the buffer and invalidates responses in flight. A partition is fetched only while less than
max.partition.fetch.bytes of it, and less than fetch.max.bytes of all partitions, are buffered. There is one
exception: if a call reads only some partitions, those of them without buffered records are fetched even while
fetch.max.bytes are buffered.
"""

# Long because metadata, requests, responses and seeks change one state per partition.

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from kafkalite.client.cluster.retry import STORAGE_ERROR_PATIENCE_MS, Backoff
from kafkalite.client.cluster.routing import NO_NODE, Leader
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.consumer.decoding import Decode
from kafkalite.client.consumer.fetched_batch import FetchedBatch, RecordCursor, unreadable
from kafkalite.client.consumer.isolation import FLAGS, FLAGS_POSITION, AbortedFilter
from kafkalite.client.consumer.near_replica import NearReplica
from kafkalite.errors import (
    BrokerError,
    CorruptBatchError,
    KafkaliteError,
    KafkaStorageError,
    LogTruncationError,
    NoOffsetError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RecordError,
    broker_error,
)
from kafkalite.log_fields import Fields
from kafkalite.model import EARLIEST, LATEST, NO_EPOCH, NO_OFFSET, IsolationLevel, TopicPartition
from kafkalite.protocol.messages.data import (
    AbortedTransaction,
    EpochEnd,
    EpochPartition,
    FetchedPartition,
    FetchPartition,
    PreferredReplica,
)
from kafkalite.records.batch import RecordBatch
from kafkalite.records.header import LENGTH_OVERHEAD_BYTES, scan

logger = logging.getLogger(__name__)

_INT32: Final = Struct(">i")
# The maximum wait of a fetch while other partitions have buffered records. It is short, because those
# partitions may need a fetch soon.
SHORT_WAIT_MS: Final = 10


@dataclass(slots=True)
class PartitionState:
    """The state of one assigned partition.

    Invariants: if ``buffered`` is not empty, it begins with a batch. The offsets in ``cursor`` are below
    those of the batches in ``buffered``, and all of them are below ``fetch_offset``.
    """

    tp: TopicPartition
    reset: str  #: auto.offset.reset for this partition: earliest, latest or none
    base_position: int | None = None  #: the position while no cursor is open
    fetch_offset: int = 0
    #: Batches. An (offset, leader epoch) after a batch means that records below this offset are skipped.
    buffered: deque[memoryview | tuple[int, int]] = field(default_factory=deque)
    buffered_bytes: int = 0
    cursor: RecordCursor | None = None
    paused: bool = False
    error: KafkaliteError | None = None
    failures: int = 0
    #: Why the last fetch got no records, if an error that is retried or an open transaction is the reason.
    delayed_by: BrokerError | str | None = None
    retry_at_ms: int = 0
    #: When the leader began to respond with only KAFKA_STORAGE_ERROR (R24).
    storage_error_ms: int | None = None
    #: The exclusive end in the last fetch: the last stable offset with read_committed, else the high
    #: watermark.
    readable_end: int | None = None
    seek_count: int = 0
    batch_epoch: int = NO_EPOCH  #: the leader epoch of the last batch before fetch_offset, if known
    base_epoch: int = NO_EPOCH  #: the leader epoch of the last batch before base_position, if known
    #: The epoch of the leader whose log is known to contain all records below fetch_offset.
    checked_epoch: int = NO_EPOCH
    seen_epoch: int = NO_EPOCH  #: the leader's epoch in the latest metadata
    #: The position at which a damaged batch was received, and fetched again, last.
    repeated_at: int = NO_OFFSET
    near: NearReplica = field(default_factory=NearReplica)

    @property
    def position(self) -> int | None:
        return self.base_position if self.cursor is None else self.cursor.position

    @property
    def position_epoch(self) -> int:
        """The leader epoch to commit with the position (R40), if known.

        It is the epoch of the batch that ``cursor`` reads, or else of the last batch before the position. If
        an older epoch were committed, the next owner would find that the older epoch ends before the
        position, and wrongly infer a truncation.
        """
        cursor = self.cursor
        if cursor is None or not cursor.remaining:
            return self.base_epoch
        return cursor.batch.batch.header.leader_epoch

    @property
    def has_records(self) -> bool:
        return bool(self.buffered) or (self.cursor is not None and self.cursor.has_more)

    @property
    def needs_offset(self) -> bool:
        """Whether the start offset must be looked up."""
        return self.base_position is None and self.error is None

    def seek(self, offset: int, batch_epoch: int = NO_EPOCH) -> None:
        """Set the position to ``offset`` and discard the fetched records.

        ``batch_epoch`` is the leader epoch of the batch before ``offset``, or NO_EPOCH if it is unknown.
        """
        self.forget()
        self.base_position = self.fetch_offset = offset
        self.batch_epoch = self.base_epoch = batch_epoch

    def skip_to(self, next_offset: int, leader_epoch: int) -> None:
        """Move the position to ``next_offset`` after the buffered records have been returned.

        ``leader_epoch`` is the epoch of the last skipped batch.
        """
        if self.buffered:
            if isinstance(self.buffered[-1], tuple):
                self.buffered.pop()
            self.buffered.append((next_offset, leader_epoch))
            return
        self.base_epoch = leader_epoch
        if self.cursor is not None:
            self.cursor.next_offset = next_offset
        else:
            self.base_position = next_offset

    def must_check(self, leader_epoch: int) -> bool:
        """Whether the log of this epoch's leader must be checked for truncation before a fetch (KIP-320)."""
        return self.batch_epoch != NO_EPOCH and leader_epoch > self.checked_epoch

    def forget(self) -> None:
        """Discard the position, records and error, and ignore the responses of requests in flight."""
        if self.cursor is not None:
            self.cursor.drop()
        self.cursor = None
        self.buffered.clear()
        self.buffered_bytes = 0
        self.base_position = None
        self.error = None
        self.failures = self.retry_at_ms = 0
        self.storage_error_ms = None
        self.batch_epoch = self.checked_epoch = NO_EPOCH
        self.seek_count += 1


@dataclass(frozen=True, slots=True)
class Requested:
    """A partition's state when a request was sent, which shows later whether the response is still valid."""

    fetch_offset: int
    seek_count: int
    leader_epoch: int = NO_EPOCH
    follower: int = NO_NODE  #: the follower that was asked; NO_NODE: the leader

    @property
    def is_near(self) -> bool:
        """Whether a follower was asked."""
        return self.follower != NO_NODE

    def is_from(self, near: NearReplica) -> bool:
        """Whether the follower that was asked is still the one from which the partition is read."""
        return self.is_near and self.follower == near.node_id

    def is_of(self, state: PartitionState) -> bool:
        """Whether the response is valid for ``state``.

        It is invalid if, after the request was sent, the fetch offset changed, there was a seek, or a newer
        leader was checked.
        """
        return (
            self.fetch_offset == state.fetch_offset
            and self.seek_count == state.seek_count
            and self.leader_epoch >= state.checked_epoch
        )


@dataclass(slots=True)
class FetchPlan:
    """A fetch to send to one broker. ``states_rack``: the broker may name followers, or serves as one.

    ``movable`` are the partitions for which a leader may name a follower.
    """

    node_id: int
    max_wait_ms: int
    partitions: list[FetchPartition]
    requested: dict[TopicPartition, Requested]
    states_rack: bool = True
    is_near: bool = False  #: whether the broker is asked as a follower
    movable: list[TopicPartition] = field(default_factory=list)

    def divide(self, due: Callable[[TopicPartition], bool]) -> None:
        """Decide whether to state the rack. A leader may name a follower for any partition of a request that
        states it, but not for those whose follower has just failed.

        So if there are such partitions, a fetch without them asks first, and does not wait, provided that
        ``due`` returns True for another partition; otherwise the leader serves all.
        """
        if self.is_near or len(self.movable) == len(self.partitions):
            return
        asked = {tp for tp in self.movable if due(tp)}
        self.states_rack = bool(asked)
        if asked:
            self.max_wait_ms = 0
            self.partitions = [one for one in self.partitions if one[:2] in asked]
            self.requested = {tp: at for tp, at in self.requested.items() if tp in asked}


class AssignedPartitions:
    """Owns the assigned partitions of one consumer.

    Partitions are read in turn: after a batch of a partition was returned, it moves behind all others.
    """

    def __init__(self, config: ConsumerConfig, decode: Decode | None = None) -> None:
        self._config = config
        self._decode = decode
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._is_read_committed = config.isolation_level is IsolationLevel.READ_COMMITTED
        self.partitions: dict[TopicPartition, PartitionState] = {}

    # --- assignment ----------------------------------------------------------------------------

    def assign(self, wanted: dict[TopicPartition, str]) -> None:
        """Set the assignment, {partition: auto.offset.reset}. Partitions assigned before keep their state."""
        for tp in [tp for tp in self.partitions if tp not in wanted]:
            self.partitions.pop(tp).forget()
        for tp, reset in wanted.items():
            if tp not in self.partitions:
                self.partitions[tp] = PartitionState(tp, reset)

    def restart(self, replaced: dict[TopicPartition, str]) -> None:
        """Start again in ``replaced``, {partition: auto.offset.reset}: their topics were created again."""
        for tp, reset in replaced.items():
            state = self.partitions.get(tp)
            if state is not None:
                state.forget()
                state.reset = reset
                state.seen_epoch = NO_EPOCH
                state.readable_end = None
                state.near = NearReplica()

    def without_offset(self) -> dict[TopicPartition, int]:
        """Return the partitions that need ListOffsets, with the timestamp to request.

        If auto.offset.reset is none, the partition is omitted, and reading it raises NoOffsetError.
        """
        wanted = {}
        for tp, state in self.partitions.items():
            if not state.needs_offset:
                continue
            if state.reset == "none":
                state.error = _no_offset(tp, f"{tp} has no position", "seek() first")
            else:
                wanted[tp] = EARLIEST if state.reset == "earliest" else LATEST
        return wanted

    # --- reading -------------------------------------------------------------------------------

    def has_records_or_error(self, only: frozenset[TopicPartition] | None = None) -> bool:
        """Whether a partition in ``only`` (None: all) that is not paused has records or an error."""
        return any(state.has_records or state.error for state in self._readable(only))

    def _readable(self, only: frozenset[TopicPartition] | None) -> list[PartitionState]:
        states = self.partitions.values()
        return [state for state in states if not state.paused and (only is None or state.tp in only)]

    def next_batch(self, only: frozenset[TopicPartition] | None = None) -> FetchedBatch | None:
        """Return the next batch of the least recently read partition that has one, or None if none has.

        Reads only partitions in ``only`` (None: all) that are not paused. Moves the position past the batch.
        Raises a partition's error after its earlier batches were returned.
        """
        for state in self._readable(only):
            batch = self._take_batch(state)
            if batch is None and state.error is None:
                continue
            self._move_to_end(state)
            if batch is not None:
                return batch
            error = state.error
            assert error is not None
            if isinstance(error, KafkaStorageError):  # the next call fetches again
                state.error = state.storage_error_ms = None
            raise error.with_traceback(None)
        return None

    def next_cursor(self, only: frozenset[TopicPartition] | None = None) -> RecordCursor | None:
        """Return an open cursor with records, or else a new cursor over ``next_batch(only)``.

        Returns None if there is no batch. The partition's position moves as records are taken from the
        cursor. Raises the errors of ``next_batch``, and RecordError for a batch or record that cannot be
        read.
        """
        for state in self._readable(only):
            if state.cursor is not None and state.cursor.has_more:
                if state.cursor.remaining:
                    return state.cursor
                failure = state.cursor.failure
                assert failure is not None, "there is more"
                self._fail_batch(state, state.cursor.position, failure)
                raise failure.with_traceback(None)
        batch = self.next_batch(only)
        if batch is None:
            return None
        state = self.partitions[TopicPartition(batch.topic, batch.partition)]
        try:
            state.cursor = RecordCursor(batch, self._decode)
            assert state.base_position is not None, "the batch was taken from a position"
            state.cursor.next_offset = state.base_position  # include skipped batches after it
        except RecordError as error:
            self._fail_batch(state, batch.from_offset, error)
            raise
        return state.cursor

    def _take_batch(self, state: PartitionState) -> FetchedBatch | None:
        """Return the next batch of ``state`` with records at or after its position, or None if there is none.

        Also returns None if the batch cannot be read. The batch is then fetched again, or ``error`` is set.
        """
        if state.cursor is not None:
            cursor, state.cursor = state.cursor, None
            from_offset = cursor.position
            has_more = cursor.has_more
            cursor.drop()
            state.base_position = cursor.next_offset
            if has_more:
                return FetchedBatch(*state.tp, cursor.batch.batch, from_offset)
        while state.buffered:
            buffer = state.buffered.popleft()
            assert isinstance(buffer, memoryview), "offsets follow batches"
            state.buffered_bytes -= len(buffer)
            position = state.base_position
            assert position is not None, "records are only fetched from a position"
            try:
                batch = RecordBatch(buffer, check_crc=self._config.check_crcs)
            except RecordError as error:
                if isinstance(error, CorruptBatchError) and state.repeated_at != position:
                    self._fetch_again(state, position, error)
                    return None
                ((_, base_offset, last_offset_delta, *_),) = scan(buffer, 0, len(buffer))
                next_offset = base_offset + last_offset_delta + 1
                failed = unreadable(error, state.tp, position, next_offset)
                failed.__cause__ = error
                self._fail_batch(state, position, failed)
                return None
            header = batch.header
            state.base_position = max(position, header.next_offset)
            state.base_epoch = header.leader_epoch
            while state.buffered and isinstance(passed := state.buffered[0], tuple):
                state.base_position = max(state.base_position, passed[0])
                state.base_epoch = passed[1]
                state.buffered.popleft()
            if header.next_offset > position:
                return FetchedBatch(*state.tp, batch, position)
        return None

    def _fail_batch(self, state: PartitionState, position: int, error: RecordError) -> None:
        """Stop at ``position``, which cannot be read. Reading raises ``error`` until a seek."""
        state.forget()
        state.base_position = state.fetch_offset = position
        state.error = error

    def _fetch_again(self, state: PartitionState, position: int, error: CorruptBatchError) -> None:
        """Fetch from ``position`` on once more, because the batch there is damaged.

        If the batch was damaged in transit, the next response has it intact. Otherwise the leader checks a
        batch that is fetched again and responds with KAFKA_STORAGE_ERROR, or another replica leads (R43).
        """
        logger.warning(
            "damaged batch fetched again %s", Fields(partition=state.tp, offset=position, error=error)
        )
        state.forget()
        state.base_position = state.fetch_offset = state.repeated_at = position

    def _move_to_end(self, state: PartitionState) -> None:
        del self.partitions[state.tp]
        self.partitions[state.tp] = state

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Return no more records of these partitions. Fetched records are kept."""
        for tp in tps:
            state = self.partitions[tp]
            state.paused = True
            if state.cursor is not None:
                state.cursor.detach()

    # --- what to fetch -------------------------------------------------------------------------

    def plan(
        self,
        now_ms: int,
        leader_of: Callable[[TopicPartition], Leader],
        busy: Callable[[int], bool],
        only: frozenset[TopicPartition] | None = None,
        is_open: Callable[[int], bool] = lambda _: True,
        is_asked: Callable[[int, TopicPartition], bool] = lambda *_: False,
    ) -> tuple[list[FetchPlan], bool]:
        """Return (fetches to send, whether a partition to fetch has no known leader).

        ``is_open`` returns whether there is a connection to a follower. ``is_asked`` returns whether a fetch
        of a partition is in flight to a broker: then the fetch from a follower waits for its response.

        There is at most one fetch per broker, and none for a broker for which ``busy(node_id)`` is True.
        ``only`` are the partitions that the caller reads (None: all). While fetch.max.bytes are buffered, the
        only partitions fetched are those in ``only`` without records, because the caller does not empty the
        buffers of other partitions. If ``only`` is None, none is fetched then.
        """
        config = self._config
        is_full = sum(state.buffered_bytes for state in self.partitions.values()) >= config.fetch_max_bytes
        if is_full and only is None:
            return [], False
        leaderless = False
        has_records = any(state.has_records and not state.paused for state in self.partitions.values())
        max_wait_ms = (
            min(SHORT_WAIT_MS, config.fetch_max_wait_ms) if has_records else config.fetch_max_wait_ms
        )
        plans: dict[int, FetchPlan] = {}
        for tp, state in self.partitions.items():
            if not self.is_wanted(state, now_ms):
                continue
            if is_full and only is not None and (tp not in only or state.has_records):
                continue
            leader = leader_of(tp)
            if leader.node_id < 0:
                leaderless = True
                continue
            if state.must_check(leader.leader_epoch):
                continue
            state.checked_epoch = max(state.checked_epoch, leader.leader_epoch)
            near, node_id = state.near, self.source(state, leader, now_ms, is_open)
            is_near = node_id != leader.node_id
            if is_near and is_asked(leader.node_id, tp):
                continue
            if not busy(node_id):
                plan = plans.get(node_id)
                if plan is None:
                    plan = plans[node_id] = FetchPlan(node_id, max_wait_ms, [], {})
                plan.is_near |= is_near
                if near.may_move(now_ms):
                    plan.movable.append(tp)
                plan.partitions.append(
                    FetchPartition(
                        tp.topic,
                        tp.partition,
                        leader.leader_epoch,
                        state.fetch_offset,
                        config.max_partition_fetch_bytes,
                    )
                )
                plan.requested[tp] = Requested(
                    state.fetch_offset, state.seek_count, leader.leader_epoch, node_id if is_near else NO_NODE
                )
        if config.client_rack is not None:
            for plan in plans.values():
                plan.divide(lambda tp: self.partitions[tp].near.asks_apart(now_ms))
        return list(plans.values()), leaderless

    def source(
        self, state: PartitionState, leader: Leader, now_ms: int, is_open: Callable[[int], bool]
    ) -> int:
        """Return the node to fetch from: the near follower, or the leader if there is none or the connection
        to it takes long."""
        follower = state.near.follower(leader, now_ms)
        if follower != NO_NODE and (now_ms < state.near.connects_until_ms or is_open(follower)):
            return follower
        return leader.node_id

    def near_nodes(self) -> set[int]:
        """Return the followers from which partitions are read."""
        return {state.near.node_id for state in self.partitions.values()} - {NO_NODE}

    def leave_follower(self, node_id: int, now_ms: int) -> None:
        """Read from the leaders instead of a follower that cannot be reached or is not live."""
        for state in self.partitions.values():
            if state.near.node_id == node_id:
                state.near.leave(now_ms, self._config.metadata_max_age_ms)

    def on_preferred(
        self, requested: dict[TopicPartition, Requested], preferred: Iterable[PreferredReplica], now_ms: int
    ) -> None:
        """Read partitions from the followers that their leaders have named in a response (R66)."""
        for one in preferred:
            tp = TopicPartition(one.topic, one.partition)
            state, wanted = self.partitions.get(tp), requested.get(tp)
            if state is not None and wanted is not None and not wanted.is_near and wanted.is_of(state):
                max_age_ms = self._config.metadata_max_age_ms
                state.near.prefer(one.node_id, wanted.leader_epoch, now_ms, max_age_ms)

    def is_wanted(self, state: PartitionState, now_ms: int) -> bool:
        """Whether more records of this partition should be fetched."""
        if (
            state.paused
            or state.base_position is None
            or state.error is not None
            or state.retry_at_ms > now_ms
        ):
            return False
        if not state.has_records:
            return True
        # While records are buffered, fetch only offsets that exist, because a seek cannot cancel a long poll.
        is_behind = state.readable_end is not None and state.fetch_offset < state.readable_end
        return is_behind and state.buffered_bytes < self._config.max_partition_fetch_bytes

    def covers(
        self,
        requested: dict[TopicPartition, Requested],
        now_ms: int,
        is_read: Callable[[TopicPartition], bool],
    ) -> bool:
        """Whether a fetch in flight to a broker includes each wanted partition that is read from the broker.

        ``requested`` are the partitions of the fetch. A partition counts only if it was requested at its
        current fetch offset. ``is_read`` returns whether a partition is read from the broker.
        """
        return all(
            (at := requested.get(tp)) is not None
            and (at.fetch_offset, at.seek_count) == (state.fetch_offset, state.seek_count)
            for tp, state in self.partitions.items()
            if self.is_wanted(state, now_ms) and is_read(tp)
        )

    def next_retry_ms(self, now_ms: int) -> int | None:
        """Return the earliest time at which a retry pause, or the wait for a connection to a follower, ends;
        None if there is none."""
        pauses = [s.retry_at_ms for s in self.partitions.values() if s.retry_at_ms > now_ms]
        if self._config.client_rack is not None:
            nears = [state.near for state in self.partitions.values()]
            pauses += [near.connects_until_ms for near in nears if near.connects_until_ms > now_ms]
        return min(pauses, default=None)

    # --- responses -----------------------------------------------------------------------------

    def on_fetched(
        self,
        requested: dict[TopicPartition, Requested],
        results: Iterable[FetchedPartition],
        payload: memoryview,
        now_ms: int,
        chance: float,
    ) -> bool:
        """Add the records of a response. Return whether metadata must be fetched again.

        ``chance`` in [0, 1) sets the jitter of a retry pause.
        """
        position = 0
        stale_metadata = False
        for result in results:
            data = payload[position : position + result.length_bytes]
            position += result.length_bytes
            tp = TopicPartition(result.topic, result.partition)
            state = self.partitions.get(tp)
            wanted = requested.get(tp)
            if state is None or wanted is None or not wanted.is_of(state):
                continue  # no longer assigned, moved by a seek, or a response of a former leader
            if result.error_code:
                error = broker_error(result.error_code, result.error_message or "", about=str(tp))
                if isinstance(error, OffsetOutOfRangeError) and wanted.leader_epoch < state.seen_epoch:
                    error = NotLeaderOrFollowerError(error.message)  # this broker may lag behind
                stale_metadata |= error.refresh_metadata
                if self.must_ask_leader(wanted):
                    if wanted.is_from(state.near):
                        self._on_near_error(state, error, now_ms, chance)
                else:
                    self._on_error(state, error, now_ms, chance)
            else:
                if wanted.is_from(state.near):
                    state.near.on_records()
                is_committed_only = self._is_read_committed
                state.readable_end = result.last_stable_offset if is_committed_only else result.high_watermark
                state.failures = 0
                state.storage_error_ms = None
                self._buffer(state, data, result.aborted if is_committed_only else ())
                state.delayed_by = _held_back(state, result) if is_committed_only else None
        return stale_metadata

    def _buffer(self, state: PartitionState, data: memoryview, aborted: Sequence[AbortedTransaction]) -> None:
        end = last_start = 0
        isolation = AbortedFilter(aborted)
        for start, base_offset, last_offset_delta, _, length in scan(data, 0, len(data)):
            end, last_start = start + length, start
            next_offset = base_offset + last_offset_delta + 1
            flags = data[start + FLAGS_POSITION] & FLAGS
            is_dropped = flags and isolation.drops(data, start, flags, next_offset)
            if next_offset > state.fetch_offset:
                state.fetch_offset = next_offset
                if is_dropped:
                    (leader_epoch,) = _INT32.unpack_from(data, start + LENGTH_OVERHEAD_BYTES)
                    state.skip_to(next_offset, leader_epoch)
                else:
                    state.buffered.append(data[start:end])
                    state.buffered_bytes += length
        if end:
            (state.batch_epoch,) = _INT32.unpack_from(data, last_start + LENGTH_OVERHEAD_BYTES)
        if end < len(data) and state.error is None:
            error = CorruptBatchError(
                f"{state.tp}: {len(data) - end} bytes of the response at offset {state.fetch_offset} "
                "are not a record batch",
                hint="seek() past them, or restore the partition from a replica",
            )
            error.topic_partition, error.offset = state.tp, state.fetch_offset
            state.error = error

    @staticmethod
    def must_ask_leader(wanted: Requested) -> bool:
        """Whether an error is that of a follower, so that the leader must be asked before it counts (R67)."""
        return wanted.is_near

    def _on_near_error(self, state: PartitionState, error: BrokerError, now_ms: int, chance: float) -> None:
        """Return to the leader, or ask the follower again soon if it only learns of commits late."""
        if isinstance(error, OffsetNotAvailableError) and state.near.is_patient():
            self._on_error(state, error, now_ms, chance)
            return
        logger.info("follower left %s", Fields(partition=state.tp, node_id=state.near.node_id, error=error))
        state.near.leave(now_ms, self._config.metadata_max_age_ms)
        state.failures = state.retry_at_ms = 0

    def _on_error(self, state: PartitionState, error: BrokerError, now_ms: int, chance: float) -> None:
        if error.retriable:
            state.failures += 1
            state.delayed_by = error
            state.retry_at_ms = now_ms + self._backoff.delay_ms(state.failures, chance)
            if not isinstance(error, KafkaStorageError):
                state.storage_error_ms = None
            elif state.storage_error_ms is None:
                state.storage_error_ms = now_ms
            elif now_ms - state.storage_error_ms >= STORAGE_ERROR_PATIENCE_MS:
                error.topic_partition = state.tp
                state.error = error
        elif isinstance(error, OffsetOutOfRangeError):
            self._on_out_of_range(state, error)
        else:
            state.error = error

    def _on_out_of_range(self, state: PartitionState, error: OffsetOutOfRangeError) -> None:
        """Apply auto.offset.reset, but only after all buffered records have been returned."""
        if state.has_records:
            state.readable_end = None  # stops fetching until the user has read the buffered records
            return
        if state.reset != "none":
            state.forget()
            return
        state.error = _no_offset(
            state.tp,
            f"{state.tp}: offset {state.fetch_offset} is out of range",
            "records were deleted, or the topic was created again or its cluster lost its data; seek to an "
            "existing offset: beginning_offsets() and end_offsets() return the range",
        )
        state.error.__cause__ = error

    def on_fetch_failed(self, requested: dict[TopicPartition, Requested], now_ms: int, chance: float) -> None:
        """Handle a failed fetch or truncation check: a lost connection, a timeout, or a failed request.

        ``chance`` in [0, 1) sets the jitter of the retry pause.
        """
        for tp, at in requested.items():
            state = self.partitions.get(tp)
            if state is not None and at.is_near:
                if at.is_from(state.near):
                    state.near.leave(now_ms, self._config.metadata_max_age_ms)
            elif state is not None:
                state.failures += 1
                state.retry_at_ms = now_ms + self._backoff.delay_ms(state.failures, chance)

    # --- leader epochs -------------------------------------------------------------------------

    def on_leaders(self, leader_of: Callable[[TopicPartition], Leader]) -> None:
        """Handle new metadata: end the retry pause of partitions that have a new leader."""
        for tp, state in self.partitions.items():
            epoch = leader_of(tp).leader_epoch
            if epoch > state.seen_epoch:
                state.seen_epoch = epoch
                state.failures = state.retry_at_ms = 0

    def checks(
        self, now_ms: int, leader_of: Callable[[TopicPartition], Leader]
    ) -> dict[int, dict[TopicPartition, tuple[EpochPartition, Requested]]]:
        """Return the truncation checks (KIP-320) that must precede fetches from new leaders.

        The result is {leader's node id: {partition: (entry of the request, argument of ``on_checked``)}}.
        """
        wanted: dict[int, dict[TopicPartition, tuple[EpochPartition, Requested]]] = {}
        for tp, state in self.partitions.items():
            leader = leader_of(tp)
            if leader.node_id < 0 or not state.must_check(leader.leader_epoch):
                continue
            if self.is_wanted(state, now_ms):
                question = EpochPartition(tp.topic, tp.partition, leader.leader_epoch, state.batch_epoch)
                requested = Requested(state.fetch_offset, state.seek_count, leader.leader_epoch)
                wanted.setdefault(leader.node_id, {})[tp] = (question, requested)
        return wanted

    def on_checked(
        self, requested: dict[TopicPartition, Requested], ends: Iterable[EpochEnd], now_ms: int, chance: float
    ) -> bool:
        """Apply the responses to truncation checks. Return whether metadata must be fetched again.

        ``chance`` in [0, 1) sets the jitter of a retry pause.
        """
        stale_metadata = False
        for end in ends:
            tp = TopicPartition(end.topic, end.partition)
            state, wanted = self.partitions.get(tp), requested.get(tp)
            if state is None or wanted is None or not wanted.is_of(state):
                continue
            if end.error_code:
                error = broker_error(end.error_code, end.error_message or "", about=str(tp))
                stale_metadata |= error.refresh_metadata
                self._on_error(state, error, now_ms, chance)
            elif 0 <= end.end_offset < state.fetch_offset:
                self._on_truncated(state, end.end_offset)
            else:
                state.checked_epoch = wanted.leader_epoch
                state.failures = 0
        return stale_metadata

    def _on_truncated(self, state: PartitionState, diverging_offset: int) -> None:
        """Discard the fetched records, because the leader's log differs at and after ``diverging_offset``.

        Continues at the position or, if ``diverging_offset`` is below the position, at ``diverging_offset``.
        In the second case, if auto.offset.reset is none, the position stays, and reading raises
        LogTruncationError until a seek.
        """
        position = state.position
        assert position is not None, "only a partition with a position is checked"
        if position <= diverging_offset:
            state.seek(position)
            return
        state.seek(position if state.reset == "none" else diverging_offset)
        lost = f"{state.tp}: records from offset {diverging_offset} to {position} were read and then lost"
        if state.reset == "none":
            state.error = LogTruncationError(
                f"{lost}; auto.offset.reset is none", diverging_offset=diverging_offset
            )
        else:
            logger.warning(
                "records were read and then lost by an unclean leader election %s",
                Fields(partition=state.tp, first_lost=diverging_offset, read_up_to=position),
            )


def _no_offset(tp: TopicPartition, problem: str, hint: str) -> NoOffsetError:
    error = NoOffsetError(f"{problem} and auto.offset.reset is none", hint=hint)
    error.topic_partition = tp
    return error


def _held_back(state: PartitionState, result: FetchedPartition) -> str | None:
    """Return the warning of an open transaction that holds back all further records, or None."""
    stable_offset = result.last_stable_offset
    if result.length_bytes or not state.fetch_offset >= stable_offset < result.high_watermark:
        return None
    return (
        f"{state.tp}: an open transaction holds back the records from offset {stable_offset} on; "
        "see 'kl txn list'"
    )
