"""Holds a producer's records until they are acknowledged: batches, memory, order, retries, deadlines.

Pure: the time and random numbers are arguments, completed batches are return values. The states of a batch::

    open --close--> closed --drain--> in flight --on_acknowledged--> done (offsets known)
                                        |  ^
                                        |  '-- on_failed, retriable: resend the same bytes after a pause
                                        '----- on_failed, final: done (error known)

A batch in any state is done when it expires or is aborted. A batch that is certainly not written may return
from in flight to closed (see ``partition_queue``).

Order. ``partition_queue`` decides which batches of a partition are sent, and in which order: one batch at a
time, or up to five in flight whose sequence numbers the leader checks. So a retry never reorders records
(B7), with any number of requests in flight. Several closed batches that wait are *coalesced* into one record
batch.

Memory. A batch reserves ``batch.size`` of ``buffer.memory`` when it is opened, or more for a first record
that is larger. It releases the unused part when it is closed, and the rest when it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kafkalite.client.cluster.retry import CONCURRENT_BACKOFF, Backoff
from kafkalite.client.config import ProducerConfig
from kafkalite.client.producer.partition_queue import MAX_IN_FLIGHT, Fate, InFlightBatch, PartitionQueue
from kafkalite.client.producer.pending_batch import BATCH_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES, PendingBatch
from kafkalite.errors import DeliveryTimeoutError, NotEnoughReplicasAfterAppendError, NotEnoughReplicasError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import NO_OFFSET, NO_PRODUCER_ID, NO_TIMESTAMP, TopicPartition
from kafkalite.records.single import build_single


@dataclass(slots=True)
class _Filling:
    """A produce request that is being filled for one node.

    ``room`` is the number of further requests that the node accepts.
    """

    room: int
    flights: list[InFlightBatch] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(slots=True)
class Drained:
    """The produce requests to send now, as (node id, batches), in the order of sending.

    ``leaderless`` means that a partition with batches has no known leader, so metadata must be fetched.
    """

    requests: list[tuple[int, list[InFlightBatch]]] = field(default_factory=list)
    leaderless: bool = False


class Accumulator:
    """Owns all batches of a producer that are neither acknowledged nor failed.

    Invariants: ``free_bytes`` (which may be negative), ``parked_bytes`` and the reservations of the
    incomplete batches add up to buffer.memory. Every batch in ``incomplete`` is open, closed or in flight,
    and not done.
    """

    def __init__(self, config: ProducerConfig) -> None:
        self.config = config
        self.backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self.free_bytes = config.buffer_memory
        self.parked_bytes = 0  #: reserved for records whose topic's metadata is not known yet
        self.refused_bytes = 0  #: the bytes that the last refused record needs
        #: In the order of opening, which is also the order of the deadlines.
        self.incomplete: dict[PendingBatch, None] = {}
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._lingering: deque[tuple[PendingBatch, PartitionQueue]] = deque()
        #: Queues that may have a batch to send now, in the order in which they became ready.
        self.ready: dict[PartitionQueue, None] = {}
        #: The id for partitions without a producer id. While it is missing, ``needs_producer_id`` is set and
        #: these partitions send nothing.
        self.producer_id = NO_PRODUCER_ID
        self._is_idempotent = config.enable_idempotence
        self._is_transactional = config.transactional_id is not None
        self.needs_producer_id = self._is_idempotent and not self._is_transactional
        #: (producer id, epoch) of the open transaction. A transactional producer sends nothing without one.
        self._transaction: tuple[int, int] | None = None
        self._joined: list[PartitionQueue] = []  # the queues that use the transaction's identity
        #: Per partition. Without sequence numbers it is 1, because a retry could otherwise reorder batches.
        self._max_in_flight = (
            min(config.max_in_flight_requests_per_connection, MAX_IN_FLIGHT) if self._is_idempotent else 1
        )
        self._records_per_batch = min(
            config.batch_max_messages or MAX_RECORDS_PER_BATCH, MAX_RECORDS_PER_BATCH
        )
        self._retrying: dict[PartitionQueue, None] = {}

    def queue(self, tp: TopicPartition) -> PartitionQueue:
        queue = self._queues.get(tp)
        if queue is None:
            queue = self._queues[tp] = PartitionQueue(tp, self._max_in_flight)
        return queue

    # --- adding records ------------------------------------------------------------------------

    def open_batch(
        self, queue: PartitionQueue, first_size_bytes: int, now_ms: int, *, forced: bool = False
    ) -> PendingBatch | None:
        """Return a new open batch with room for a first record, or None if buffer.memory has no room for it.

        If ``forced``, the limit is ignored. This is for records that were accepted before the topic's
        metadata arrived.
        """
        assert queue.open is None, "close the open batch first"
        config = self.config
        need = max(config.batch_size, first_size_bytes + BATCH_OVERHEAD_BYTES)
        if not (forced or self.has_room(need)):
            self.refused_bytes = need
            return None
        batch = PendingBatch(*queue.tp, limit_bytes=config.batch_size, limit_records=self._records_per_batch)
        self._accept(batch, need, now_ms)
        queue.open = batch
        if config.linger_ms > 0:
            self._forget_closed_lingerers()
            self._lingering.append((batch, queue))
        else:
            self._maybe_ready(queue, now_ms)
        return batch

    def _accept(self, batch: PendingBatch, reserved_bytes: int, now_ms: int) -> None:
        batch.linger_until_ms = now_ms + self.config.linger_ms
        batch.deadline_ms = now_ms + self.config.delivery_timeout_ms
        batch.reserved_bytes = reserved_bytes
        self.free_bytes -= reserved_bytes
        self.incomplete[batch] = None

    def close_batch(self, queue: PartitionQueue, now_ms: int) -> None:
        """Close the open batch, if any. It then accepts no more records and may be sent."""
        batch = queue.open
        if batch is None:
            return
        queue.open = None
        batch.close()
        unused = batch.reserved_bytes - batch.size_bytes
        batch.reserved_bytes -= unused
        self.free_bytes += unused
        queue.closed.append(batch)
        self._maybe_ready(queue, now_ms)

    def add_alone(
        self,
        queue: PartitionQueue,
        value: bytes,
        key: bytes | None,
        timestamp_ms: int,
        now_ms: int,
        node_id: int,
    ) -> InFlightBatch | None:
        """Return a batch of one record, encoded and marked as sent.

        Return None if the partition has other batches or lacks a producer id that it needs, or if the batch
        exceeds the free part of buffer.memory or max.request.size. Replaces ``open_batch``, ``close_batch``
        and ``take`` for a record that is sent without lingering.
        """
        size_bytes = len(value) + BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD_BYTES
        if key is not None:
            size_bytes += len(key)
        if (
            queue.in_flight
            or queue.open is not None
            or queue.closed
            or size_bytes > self.free_bytes
            or size_bytes > self.config.max_request_size
            or (self._is_idempotent and not self._has_identity(queue))
        ):
            return None
        topic, partition = queue.tp
        batch = PendingBatch(
            topic,
            partition,
            values=[value],  # encoded again if the producer gets a new identity
            keys=None if key is None else [key],
            timestamps=[timestamp_ms],
            size_bytes=size_bytes,
            reserved_bytes=size_bytes,
            record_count=1,
            closed=True,
            deadline_ms=now_ms + self.config.delivery_timeout_ms,
        )
        self.free_bytes -= size_bytes
        self.incomplete[batch] = None
        flight = InFlightBatch(queue, [batch], size_bytes)
        queue.mark_sent(flight, node_id)
        flight.encoded = build_single(value, key, timestamp_ms, flight.producer, queue.is_transactional)
        return flight

    def has_room(self, size_bytes: int) -> bool:
        """Whether buffer.memory has room for ``size_bytes`` more. Always True if buffer.memory is empty."""
        return size_bytes <= self.free_bytes or not (self.incomplete or self.parked_bytes)

    def add_batch(self, queue: PartitionQueue, batch: PendingBatch, now_ms: int) -> None:
        """Close the open batch of the partition, and append a prebuilt batch to its closed batches."""
        assert batch.prebuilt is not None and batch.closed, "the caller builds and closes it"
        self.close_batch(queue, now_ms)
        self._accept(batch, batch.size_bytes, now_ms)
        queue.closed.append(batch)
        self._maybe_ready(queue, now_ms)

    def _maybe_ready(self, queue: PartitionQueue, now_ms: int) -> None:
        if queue.may_send(now_ms):
            self.ready[queue] = None

    # --- time ----------------------------------------------------------------------------------

    def on_tick(self, now_ms: int) -> list[PendingBatch]:
        """Fail and return expired batches. Mark as ready the queues whose linger or retry pause is over."""
        self._forget_closed_lingerers()
        while self._lingering and self._lingering[0][0].linger_until_ms <= now_ms:
            _, queue = self._lingering.popleft()
            self._maybe_ready(queue, now_ms)
            self._forget_closed_lingerers()
        expired = self.expire(now_ms)
        for queue in [queue for queue in self._retrying if queue.retry_at_ms <= now_ms]:
            self._release(queue)
        return expired

    def _release(self, queue: PartitionQueue) -> None:
        """End the retry pause of ``queue``, so that its batches are resent."""
        del self._retrying[queue]
        queue.is_held = False
        self.ready[queue] = None

    def next_deadline_ms(self) -> int | None:
        """Return the time of the next required call of ``on_tick``, or None if there is no deadline."""
        deadline_ms = None
        for batch in self.incomplete:  # the first has the earliest deadline
            deadline_ms = batch.deadline_ms
            break
        self._forget_closed_lingerers()
        if self._lingering:  # lingering batches are incomplete, so there is a deadline
            linger_until_ms = self._lingering[0][0].linger_until_ms
            deadline_ms = linger_until_ms if deadline_ms is None else min(deadline_ms, linger_until_ms)
        for queue in self._retrying:
            if deadline_ms is None or queue.retry_at_ms < deadline_ms:
                deadline_ms = queue.retry_at_ms
        return deadline_ms

    @property
    def deadlines_only_recede(self) -> bool:
        """Whether no batch lingers or waits for a retry. Then ``next_deadline_ms`` is the end of a delivery
        timeout, or None."""
        return not self._lingering and not self._retrying

    def _forget_closed_lingerers(self) -> None:
        while self._lingering and self._lingering[0][0].closed:
            self._lingering.popleft()

    def close_all(self, now_ms: int) -> None:
        """Close every open batch, even if it still lingers (flush)."""
        for queue in self._queues.values():
            self.close_batch(queue, now_ms)

    def expire(self, now_ms: int) -> list[PendingBatch]:
        """Fail every batch whose delivery.timeout.ms has passed, and return these batches."""
        expired = []
        for batch in self.incomplete:
            if batch.deadline_ms > now_ms:
                break
            expired.append(batch)
        for batch in expired:
            last_error = self._queues[TopicPartition(batch.topic, batch.partition)].last_error
            error = _delivery_timeout(batch, self.config.delivery_timeout_ms, last_error)
            self._drop(batch, error, now_ms)
        return expired

    def abort_all(self, error: Exception, now_ms: int) -> list[PendingBatch]:
        """Fail all incomplete batches with ``error``, and return them."""
        aborted = list(self.incomplete)
        for batch in aborted:
            self._drop(batch, error, now_ms)
        return aborted

    @property
    def awaits_response(self) -> bool:
        """Whether any batch in flight awaits a response."""
        return any(queue.awaits_response for queue in self._joined or self._queues.values())

    # --- transactions --------------------------------------------------------------------------

    def begin_transaction(self, producer_id: int, producer_epoch: int) -> None:
        """Use this identity for all batches added from now on, from sequence 0 in each partition."""
        assert not self.incomplete and not self._joined, "the previous transaction has ended"
        self._transaction = producer_id, producer_epoch

    def end_transaction(self, error: Exception) -> list[PendingBatch]:
        """Drop the transaction's identity, fail all incomplete batches with ``error``, and return them.

        Responses that arrive later for batches in flight are ignored.
        """
        for queue in self._queues.values() if self.incomplete else self._joined:
            if queue.open is not None:
                queue.open.close()
                queue.open = None
            queue.closed.clear()
            queue.leave_transaction()
        ended = list(self.incomplete)
        for batch in ended:
            self._fail(batch, error)
        self._lingering.clear()
        self._retrying.clear()
        self.ready.clear()
        self._joined.clear()
        self._transaction = None
        return ended

    def _drop(self, batch: PendingBatch, error: Exception, now_ms: int) -> None:
        """Fail ``batch``, which may be open, closed or in flight.

        If it is part of an in-flight batch that awaits no response and has no other pending records, the
        in-flight batch is abandoned.
        """
        queue = self._queues[TopicPartition(batch.topic, batch.partition)]
        if queue.open is batch:
            self.close_batch(queue, now_ms)
        if batch in queue.closed:
            queue.closed.remove(batch)
        self._fail(batch, error)
        for flight in [flight for flight in queue.in_flight if batch in flight.batches]:
            if not flight.awaits_response and not flight.is_abandoned and flight.all_done:
                queue.abandon(flight)
        self._resume(queue, now_ms, 0)

    # --- sending -------------------------------------------------------------------------------

    def drain(
        self, now_ms: int, leader_of: Callable[[TopicPartition], int], room: Callable[[int], int]
    ) -> Drained:
        """Take the batches that can be sent now, grouped into requests.

        The batches of a request have at most max.request.size together, unless there is only one.
        ``leader_of`` returns the leader's node id, or a negative number if no leader is known. ``room``
        returns how many more requests a node accepts. The caller reports the result of each returned batch
        with ``on_acknowledged`` or ``on_failed``.
        """
        drained = Drained()
        filling: dict[int, _Filling] = {}
        due = list(self.ready)
        while due:  # a request holds one batch of each partition, so there may be several rounds
            due = [queue for queue in due if self._fill(queue, now_ms, leader_of, room, filling, drained)]
            for request in filling.values():
                request.flights = []
        return drained

    def _fill(
        self,
        queue: PartitionQueue,
        now_ms: int,
        leader_of: Callable[[TopicPartition], int],
        room: Callable[[int], int],
        filling: dict[int, _Filling],
        drained: Drained,
    ) -> bool:
        """Add the next batch of ``queue`` to a request. Return whether ``queue`` may have another batch."""
        node_id = leader_of(queue.tp)
        if node_id < 0:
            drained.leaderless = True
            return False
        if not self._may_go_to(queue, node_id):
            return False
        request = filling.get(node_id)
        if request is None:
            request = filling[node_id] = _Filling(room(node_id))
        if request.room <= 0 and not request.flights:
            return False
        room_bytes = self.config.max_request_size - request.size_bytes if request.flights else _ANY_BYTES
        flight = self._next_flight(queue, now_ms, room_bytes if request.room <= 0 else _ANY_BYTES)
        if flight is None:
            if not queue.may_send(now_ms):
                self.ready.pop(queue, None)
            return False
        if not request.flights or flight.size_bytes > room_bytes:
            request.flights, request.size_bytes = [], 0
            drained.requests.append((node_id, request.flights))
            request.room -= 1
        request.flights.append(flight)
        request.size_bytes += flight.size_bytes
        self._mark_sent(queue, flight, node_id, now_ms)
        return queue in self.ready

    def take(self, queue: PartitionQueue, now_ms: int, node_id: int) -> InFlightBatch | None:
        """Take the next batch of one queue as ``drain`` does, or return None if no batch can be sent now.

        ``node_id`` is the leader. The caller ensures that it accepts a further request.
        """
        if not self._may_go_to(queue, node_id):
            return None
        flight = self._next_flight(queue, now_ms, _ANY_BYTES)
        if flight is None:
            if not queue.may_send(now_ms):
                self.ready.pop(queue, None)
        else:
            self._mark_sent(queue, flight, node_id, now_ms)
        return flight

    def _may_go_to(self, queue: PartitionQueue, node_id: int) -> bool:
        """Whether sending to this node keeps the order, and ``queue`` has the producer id that it needs. If
        possible, a missing producer id is assigned."""
        if queue.node_id != node_id and queue.awaits_response:
            return False  # responses of the former leader are outstanding
        return not self._is_idempotent or self._has_identity(queue)

    def _has_identity(self, queue: PartitionQueue) -> bool:
        if queue.producer_id != NO_PRODUCER_ID and not queue.needs_producer_id:
            return True
        if queue.in_flight:
            return queue.producer_id != NO_PRODUCER_ID  # batches are resent with the identity that they have
        if self._is_transactional:
            if self._transaction is None or queue.needs_producer_id:
                return False
            queue.join_transaction(*self._transaction)
            self._joined.append(queue)
            return True
        if self.producer_id in {NO_PRODUCER_ID, queue.producer_id}:
            self.producer_id = NO_PRODUCER_ID
            self.needs_producer_id = True
            return False
        queue.assign_producer_id(self.producer_id)
        return True

    def on_producer_id(self, producer_id: int) -> None:
        """Use this newly allocated producer id for the partitions that need one."""
        self.producer_id = producer_id
        self.needs_producer_id = False

    def _mark_sent(self, queue: PartitionQueue, flight: InFlightBatch, node_id: int, now_ms: int) -> None:
        queue.mark_sent(flight, node_id)
        if not queue.may_send(now_ms):
            self.ready.pop(queue, None)

    def _next_flight(self, queue: PartitionQueue, now_ms: int, room_bytes: int) -> InFlightBatch | None:
        """Return the batch to send next for ``queue``: a retry, or a batch made of closed batches.

        Return None if there is no such batch, or if the batch is larger than ``room_bytes``.
        """
        again = queue.next_resend()
        if again is not None:
            return again if again.size_bytes <= room_bytes else None
        closed = queue.closed
        if not closed:
            if queue.open is None or queue.open.linger_until_ms > now_ms:
                return None
            self.close_batch(queue, now_ms)
        if closed[0].size_bytes > room_bytes:
            return None
        first = closed.popleft()
        if closed and queue.coalesce and first.prebuilt is None:
            return self._coalesce(queue, first, min(self.config.max_request_size, room_bytes))
        return InFlightBatch(queue, [first], first.size_bytes)

    def _coalesce(self, queue: PartitionQueue, first: PendingBatch, limit_bytes: int) -> InFlightBatch:
        """Combine ``first`` with as many of the following closed batches as one record batch may hold."""
        batches, size_bytes, record_count = [first], first.size_bytes, first.record_count
        while queue.closed:
            more = queue.closed[0]
            size_bytes += more.size_bytes
            record_count += more.record_count
            if (
                more.prebuilt is not None
                or size_bytes > limit_bytes
                or record_count > self._records_per_batch
            ):
                size_bytes -= more.size_bytes
                break
            batches.append(queue.closed.popleft())
        return InFlightBatch(queue, batches, size_bytes)

    def on_acknowledged(
        self, flight: InFlightBatch, base_offset: int, log_append_time_ms: int, now_ms: int
    ) -> list[PendingBatch]:
        """Complete the pending batches of ``flight`` that are not done yet, and return them.

        ``base_offset`` is NO_OFFSET with acks=0.
        """
        if not flight.awaits_response:
            return []  # its transaction has ended
        offset = base_offset
        finished = []
        for batch in flight.batches:
            if not batch.done:
                self._finish(batch, offset, log_append_time_ms, None)
                finished.append(batch)
            if base_offset != NO_OFFSET:
                offset += batch.record_count
        queue = flight.queue
        queue.last_error = None
        queue.acknowledge(flight)
        self._resume(queue, now_ms, 0.5)
        return finished

    def on_failed(
        self, flight: InFlightBatch, error: Exception, now_ms: int, chance: float, *, was_sent: bool = True
    ) -> list[PendingBatch]:
        """Retry, split or fail ``flight`` after an error or a missing response. Return the pending batches
        that failed.

        ``chance`` in [0, 1) sets the jitter of the retry pause. ``was_sent`` is False if the batch was not
        written to a connection.
        """
        if not flight.awaits_response:
            return []  # its transaction has ended
        queue = flight.queue
        live = [batch for batch in flight.batches if not batch.done]
        fate = queue.judge(flight, error, self.config.retries, was_sent=was_sent)
        if fate is not Fate.RESEND_IN_ORDER:  # otherwise the error of the batch before it is the cause
            queue.last_error = error
        if fate is not Fate.FAIL:
            failed = []
        else:
            failed = live
            for batch in failed:
                self._fail(batch, error)
        if flight.all_done:
            queue.abandon(flight)
        self._resume(queue, now_ms, chance)
        return failed

    def nodes_of_old_leaders(self, leader_of: Callable[[TopicPartition], int]) -> list[int]:
        """Return the nodes that have not responded to batches for partitions that another node now leads."""
        nodes: dict[int, None] = {}
        for queue in self._queues.values():
            if queue.awaits_response and leader_of(queue.tp) not in {queue.node_id, -1}:
                nodes[queue.node_id] = None
        return list(nodes)

    def retry_now(self) -> None:
        """End every retry pause. Called when the metadata has changed."""
        for queue in list(self._retrying):
            self._release(queue)

    def _resume(self, queue: PartitionQueue, now_ms: int, chance: float) -> None:
        """After a response or a failure, let ``queue`` resend its batches or send its next ones.

        ``chance`` in [0, 1) sets the jitter of the retry pause.
        """
        self.ready.pop(queue, None)
        if queue.must_resolve:
            if queue.resolve():
                if queue not in self._retrying:
                    self._pause(queue, now_ms, chance)
                return
            self._retrying.pop(queue, None)
        self._maybe_ready(queue, now_ms)

    def _pause(self, queue: PartitionQueue, now_ms: int, chance: float) -> None:
        """Pause ``queue`` for the longest backoff of its failed batches.

        If no batch has failed, pause for the backoff of the batches that were refused because the previous
        transaction had not ended. If there are none of these either, do not pause. ``chance`` in [0, 1) sets
        the jitter.
        """
        failures = max(flight.failures for flight in queue.in_flight)
        collisions = max(flight.collisions for flight in queue.in_flight)
        pause_ms = self.backoff.delay_ms(failures, chance) if failures else 0
        if collisions and not failures:
            pause_ms = CONCURRENT_BACKOFF.delay_ms(collisions, chance)
        queue.retry_at_ms = now_ms + pause_ms
        self._retrying[queue] = None
        if not pause_ms:
            self._release(queue)

    def _fail(self, batch: PendingBatch, error: Exception) -> None:
        self._finish(batch, NO_OFFSET, NO_TIMESTAMP, error)

    def _finish(
        self, batch: PendingBatch, base_offset: int, log_append_time_ms: int, error: Exception | None
    ) -> None:
        batch.complete(base_offset, log_append_time_ms, error)
        self.free_bytes += batch.reserved_bytes
        batch.reserved_bytes = 0
        del self.incomplete[batch]


# No size limit.
_ANY_BYTES: Final = 2**62


def _delivery_timeout(
    batch: PendingBatch, timeout_ms: int, last_error: Exception | None
) -> DeliveryTimeoutError:
    reason = f"; the last attempt failed: {last_error}" if last_error is not None else ""
    check = "whether the partition has a leader"
    if isinstance(last_error, NotEnoughReplicasError | NotEnoughReplicasAfterAppendError):
        check = f"replicas and min.insync.replicas with 'kl topic describe {batch.topic}'"
    return DeliveryTimeoutError(
        f"{batch.topic}-{batch.partition}: no acknowledgement for {batch.record_count} records "
        f"within {timeout_ms} ms; they may or may not be in the log{reason}",
        hint=f"check {check}, or raise delivery.timeout.ms",
    )
