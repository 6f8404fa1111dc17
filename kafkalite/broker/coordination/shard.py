"""One coordinator: a state machine for a partition that this broker leads in an internal topic.

Each request is decided on the state at the end of the log. The records of the decision are appended as one
batch and replayed at once. The response is sent when the high watermark has reached the new log end. So no
response, including errors and reads, depends on records that may still be lost (R36, R39, R40). When the
leadership ends, held requests get NOT_COORDINATOR, and the shard is discarded with its machine. The next
leader replays the whole log before it serves.
"""

# Tests: tests/broker/test_coordinators.py

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final, Protocol, TypeAlias

from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.partitions.waiters import ReachedWaiter, Waiters
from kafkalite.broker.server.error_responses import refusal
from kafkalite.broker.server.responses import Pending, Reply, Response, settled
from kafkalite.clock import Clock
from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, Topics
from kafkalite.errors import (
    BrokerError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    KafkaStorageError,
    LogOfflineError,
    NotCoordinatorError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import NO_PRODUCER_ID
from kafkalite.records.builder import build_batch
from kafkalite.records.header import parse_header
from kafkalite.replication.partition import Partition

logger = logging.getLogger(__name__)

#: How long a response waits for the in-sync replicas (Kafka's offsets.commit.timeout.ms).
COMMIT_TIMEOUT_MS: Final = 5_000
#: The delay of the next tick after a tick whose records could not be written.
TICK_RETRY_MS: Final = 500
#: The shortest time between two ticks, in case a deadline has passed but ``tick`` decides nothing.
MIN_TICK_INTERVAL_MS: Final = 10
NO_CALLER: Final = Caller("", "")

_GONE: Final = (NotLeaderOrFollowerError, UnknownTopicOrPartitionError)
_UNAVAILABLE: Final = (
    KafkaStorageError,
    LogOfflineError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    StorageError,
    OSError,
)


class Machine(Protocol):
    """The pure state machine of a coordinator. It decides requests; its state is replayed from records."""

    def decide(self, command: Any, caller: Caller, now: Instant, topics: Topics) -> Decision: ...

    def tick(self, now: Instant, topics: Topics) -> Decision: ...

    def next_deadline_ms(self) -> int | None: ...

    def replay(self, record: StateRecord, now: Instant, *, producer_id: int = NO_PRODUCER_ID) -> None: ...

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None: ...

    def on_loaded(self, now: Instant) -> None: ...


class ShardOwner(Protocol):
    """The methods of ``Coordinators`` that its shards call."""

    topics: Topics  #: all topics of the cluster
    node: NodeState

    def wake_at(self, shard: Shard, due_ms: int | None) -> None:
        """Call ``shard.tick()`` at ``due_ms`` (monotonic), or never if None. Replaces an earlier call."""
        ...

    def on_ticked(self, shard: Shard) -> None:
        """Do what ``on_changed`` does, and check the held heartbeats of the shard for updates.

        Called instead of ``on_changed`` if a tick or the end of loading has changed the state.
        """
        ...

    def on_changed(self, shard: Shard) -> None:
        """Notify the callbacks of ``Coordinators.on_change`` soon. Must not call ``submit``.

        Called when the shard's state or its high watermark has changed.
        """
        ...

    def on_broken(self, error: BaseException) -> None:
        """Stop the broker, because an invariant is violated."""
        ...


_Held: TypeAlias = tuple[int, float, Response, Pending]
"""A held response: the end offset (exclusive) that the high watermark must reach before it is sent, its
deadline in seconds of the loop's time, the response, and the Pending to resolve with it."""


class Shard:
    """Coordinates the groups or transactions whose names hash to one partition of an internal topic.

    Invariants: while the shard is loaded and open, the machine's state is the replay of the whole log. The
    end offsets in ``_held`` never decrease. While responses are held, ``_waiter`` is registered or a call of
    ``_flush`` is scheduled.
    """

    def __init__(
        self, partition: Partition, machine: Machine, owner: ShardOwner, waiters: Waiters, clock: Clock
    ) -> None:
        self.partition = partition
        self.machine: Any = machine
        self.coordinator_epoch = partition.leader_epoch  #: the leader epoch in which this shard serves
        self.is_loaded = False
        self.is_closed = False
        self.failure: Exception | None = None  #: the error if loading failed
        self._owner = owner
        self._waiters = waiters
        self._clock = clock
        self._held: deque[_Held] = deque()
        self._waiter: ReachedWaiter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_working = False
        self._is_flush_due = False
        self._is_tick_due = False
        self._due_ms: int | None = None

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "loaded" if self.is_loaded else "loading"
        return f"<Shard of {self.partition.key} epoch {self.coordinator_epoch} {state}>"

    @property
    def end_offset(self) -> int:
        """The log end offset (exclusive). The state of a loaded shard includes all records below it."""
        return self.partition.log_end_offset

    @property
    def high_watermark(self) -> int:
        """The offset below which all records are committed."""
        return self.partition.high_watermark

    def now(self) -> Instant:
        return Instant(self._clock.monotonic_ms(), self._clock.wall_ms())

    def check(self) -> None:
        """Raise if the shard cannot serve now.

        Raises NotCoordinatorError, CoordinatorNotAvailableError or CoordinatorLoadInProgressError.
        """
        if self.is_closed:
            raise NotCoordinatorError(f"this broker does not coordinate {self.partition.key} any more")
        if not self.may_serve():
            if self.failure is not None:
                hint = getattr(self.failure, "hint", "") or "the broker's log has the traceback"
                raise CoordinatorNotAvailableError(
                    f"{self.partition.key} could not be loaded: {self.failure}", hint=hint
                )
            raise CoordinatorLoadInProgressError(f"{self.partition.key} is being loaded; retry soon")

    def may_serve(self) -> bool:
        """Whether the whole log was replayed. Otherwise the state may lack committed records (R36)."""
        return self.is_loaded

    def may_send(self, response: Response) -> bool:
        """Whether the whole log, and so each record that ``response`` depends on, is committed (R32, R36)."""
        return self.high_watermark >= self.end_offset

    # --- requests

    def submit(self, command: Any, caller: Caller = NO_CALLER) -> Response | Pending:
        """Return the response to ``command``, held until all records that the response depends on are
        committed.

        Raises only AssertionErrors: any other error becomes a Refusal with the machine's error code,
        NOT_COORDINATOR, COORDINATOR_LOAD_IN_PROGRESS or COORDINATOR_NOT_AVAILABLE, for example. After
        COORDINATOR_NOT_AVAILABLE the client must retry, because the command may or may not take effect.
        """
        try:
            self.check()
        except BrokerError as error:
            return refusal(error)
        assert not self._is_working, f"{self} was called from within its own decision"
        self._is_working = True
        response: Response
        try:
            now = self.now()
            if now.monotonic_ms >= self._owner.node.session_end_ms:
                self._claim(now)
            decision = self.machine.decide(command, caller, now, self._owner.topics)
            if decision.records:
                self._write(decision, now)
            response = Reply(decision.reply)
        except NotCoordinatorError as error:
            return refusal(error)
        except Exception as error:
            decision = None
            response = refusal(error)
        finally:
            self._is_working = False
        if decision is not None and decision.records:
            self._schedule()
            self._owner.on_changed(self)
        elif self._due_ms is None:
            self._schedule()
        return self._hold(response)

    async def ask(self, command: Any, caller: Caller = NO_CALLER) -> Any:
        """Submit ``command`` and return the message of the response. Raises the BrokerError of a refusal."""
        return await settled(self.submit(command, caller))

    def _claim(self, now: Instant) -> None:
        """Append an empty record, so that the response to the current request waits for its commit.

        Called while this broker has no session, so that another broker may be the coordinator (R23) and the
        state here may be outdated. If the record is committed, this broker is still the leader. Nothing is
        appended if no other replica is in sync, because no other replica can then lead.
        """
        if len(self.partition.in_sync_replicas) > 1:
            self._append(build_batch([None], None, now.wall_ms), now)

    def _write(self, decision: Decision, now: Instant) -> None:
        """Append a decision's records as one batch and replay them.

        If the append raises, nothing has changed. If a replay fails, raises AssertionError.
        """
        keys, values = zip(*decision.records, strict=True)
        producer_id, producer_epoch = decision.producer_id, decision.producer_epoch
        batch = build_batch(
            values,
            keys,
            now.wall_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            transactional=producer_id != NO_PRODUCER_ID,
        )
        self._append(batch, now)
        replay = self.machine.replay
        try:
            for record in decision.records:
                replay(record, now, producer_id=producer_id)
        except Exception as error:
            message = f"a record that was appended to {self.partition.key} can't be replayed: {error!r}"
            raise AssertionError(message) from error

    def _append(self, batch: bytearray, now: Instant) -> None:
        """Append a batch. Raises errors of the log as the errors that clients receive for them."""
        try:
            self.partition.append_state(batch, parse_header(batch), now.wall_ms)
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        """Return the error that clients receive for an error of the log. Return any other error unchanged."""
        if isinstance(error, _GONE):
            return NotCoordinatorError(f"this broker does not lead {self.partition.key} any more")
        if isinstance(error, _UNAVAILABLE):
            return CoordinatorNotAvailableError(f"{self.partition.key} accepts no records now: {error}")
        return error

    def on_marker(self, producer_id: int, *, is_commit: bool) -> None:
        """Apply or drop the pending records of a transaction whose marker was appended.

        During loading this call does nothing, because the loader replays the marker.
        """
        if self.is_loaded and not self.is_closed:
            self.machine.end_transaction(producer_id, is_commit=is_commit)
            self._schedule()
            self._await_commitment()
            self._owner.on_changed(self)

    # --- responses wait for the high watermark

    def _hold(self, response: Response) -> Response | Pending:
        """Return ``response`` if all records in the log are committed. Otherwise return a Pending.

        The Pending is resolved with ``response`` when the records that are in the log now are committed.
        """
        if self.may_send(response):
            if self._held:
                self._flush()
            else:
                self._await_commitment()
            return response
        pending = Pending()
        deadline_s = self._waiters.loop.time() + COMMIT_TIMEOUT_MS / 1000
        self._held.append((self.end_offset, deadline_s, response, pending))
        self._await_commitment()
        if self._timer is None:
            self._timer = self._waiters.loop.call_at(deadline_s, self._expire)
        return pending

    def _await_commitment(self) -> None:
        """Ensure that ``_on_reached`` is called when the next held response may be sent.

        Without held responses, it is called when the current end of the log is committed.
        """
        if self._waiter is not None or self.is_closed:
            return
        end_offset = self._held[0][0] if self._held else self.end_offset
        if self.high_watermark < end_offset:
            self._waiter = self._waiters.committed(self.partition.key, end_offset, self._on_reached)

    def _on_reached(self, error: Exception | None) -> None:
        self._waiter = None
        if self.is_closed:
            return
        if error is not None:
            self._fail(self._translated(error))
            if not isinstance(error, _GONE):
                self._waiters.loop.call_later(TICK_RETRY_MS / 1000, self._flush)
            return
        if self._is_working:  # called from within an append, whose records are not replayed yet
            if not self._is_flush_due:
                self._is_flush_due = True
                self._waiters.loop.call_soon(self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        """Send the held responses whose records are committed."""
        self._is_flush_due = False
        if self.is_closed:
            return
        high_watermark = self.high_watermark
        held = self._held
        while held and held[0][0] <= high_watermark:
            _, _, response, pending = held.popleft()
            pending.resolve(response)
        self._await_commitment()
        self._owner.on_changed(self)

    def _expire(self) -> None:
        """Fail responses past their deadline. Clients retry, because the records may still be committed."""
        self._timer = None
        now_s, held = self._waiters.loop.time(), self._held
        error = CoordinatorNotAvailableError(
            f"not committed to {self.partition.key} in {COMMIT_TIMEOUT_MS} ms; it may still be committed"
        )
        while held and (held[0][1] <= now_s or held[0][3].is_done):
            held.popleft()[3].resolve(refusal(error))
        if held:
            self._timer = self._waiters.loop.call_at(held[0][1], self._expire)

    def _fail(self, error: Exception) -> None:
        response = refusal(error)
        held, self._held = self._held, deque()
        for _, _, _, pending in held:
            pending.resolve(response)

    # --- time and topics

    def tick(self) -> None:
        """Append and replay the machine's records for deadlines that have passed and for changed topics, such
        as the records that expel a member.

        Each call appends at most one batch, and schedules another call if it has appended one.
        """
        if self.is_closed or not self.is_loaded:
            return
        self._is_tick_due = False
        now = self.now()
        self._is_working = True
        try:
            decision = self.machine.tick(now, self._owner.topics)
            if decision.records:
                self._write(decision, now)
        except AssertionError as error:
            self._owner.on_broken(error)
            return
        except Exception as error:
            is_ours = not isinstance(error, (BrokerError, StorageError, OSError))
            reason = Fields(partition=self.partition.key, reason=repr(error))
            logger.warning("coordinator's tick failed %s", reason, exc_info=is_ours)
            self._wake_at(now.monotonic_ms + TICK_RETRY_MS)
            return
        finally:
            self._is_working = False
        if decision.records:
            self._await_commitment()
            self._owner.on_ticked(self)
            self.tick_soon()
        self._schedule(not_before_ms=now.monotonic_ms + MIN_TICK_INTERVAL_MS)

    def tick_soon(self) -> None:
        """Call ``tick`` once in the next iteration of the loop."""
        if not self._is_tick_due and self.is_loaded and not self.is_closed:
            self._is_tick_due = True
            self._waiters.loop.call_soon(self.tick)

    def _schedule(self, not_before_ms: int = 0) -> None:
        due_ms = self.machine.next_deadline_ms()
        self._wake_at(None if due_ms is None else max(due_ms, not_before_ms))

    def _wake_at(self, due_ms: int | None) -> None:
        if due_ms != self._due_ms:
            self._due_ms = due_ms
            self._owner.wake_at(self, due_ms)

    # --- start and stop

    def finish_loading(self) -> None:
        """Begin to serve, because the whole log has just been replayed."""
        self.is_loaded = True
        self.machine.on_loaded(self.now())
        self._schedule()
        self._await_commitment()
        self.tick_soon()
        self._owner.on_ticked(self)

    def close(self) -> None:
        """Stop serving. Held requests get NOT_COORDINATOR."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._waiter is not None:
            self._waiter.is_cancelled = True
            self._waiter = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fail(NotCoordinatorError(f"this broker does not coordinate {self.partition.key} any more"))
