"""Records waiting to be sent, partition by partition: batches, memory, order, retries, deadlines.

Pure: the clock and chance are arguments, and what is finished comes back as values. The life of a
batch::

    open --close--> closed --drain--> shipped --on_acknowledged--> done (offsets known)
                                        |  ^
                                        |  '-- on_failed, retriable: the same bytes once more, after a pause
                                        '----- on_failed, for good, or expire: done (error known)

Order. A partition has one *shipment* at a time, in flight or waiting for its retry; batches behind it
wait. So a retry can never overtake or be overtaken (B7), at any number of requests in flight. What this
costs is won back by *coalescing*: the closed batches that had to wait travel as one record batch.

Memory. A batch reserves ``batch.size`` of ``buffer.memory`` when it opens, keeps what it uses when it closes,
and gives it back when it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kafkalite.client.pending_batch import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    PartitionQueue,
    PendingBatch,
    Shipment,
)
from kafkalite.client.retry import Backoff, is_retriable
from kafkalite.errors import DeliveryTimeoutError, MessageTooLargeError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, TopicPartition
from kafkalite.records.single import build_single


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings the accumulator works by; names and units are the options'."""

    batch_size: int
    batch_max_messages: int
    max_request_size: int
    buffer_memory: int
    linger_ms: int
    delivery_timeout_ms: int
    retries: int
    backoff: Backoff

    @property
    def records_per_batch(self) -> int:
        return min(self.batch_max_messages or MAX_RECORDS_PER_BATCH, MAX_RECORDS_PER_BATCH)


@dataclass(slots=True)
class _Filling:
    """The request being filled for one node. ``room``: how many more the node takes."""

    room: int
    shipments: list[Shipment] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(slots=True)
class Drained:
    """What to send now: (node, shipments of one request). ``leaderless``: somebody must fetch metadata."""

    requests: list[tuple[int, list[Shipment]]] = field(default_factory=list)
    leaderless: bool = False


class Accumulator:
    """All that a producer has accepted and not yet seen acknowledged.

    Invariants: ``free_bytes`` + reservations of the incomplete batches = buffer.memory (it may dip below
    zero only by one record larger than the room); every batch in ``incomplete`` is open, closed or shipped,
    and not done.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.free_bytes = limits.buffer_memory
        #: In order of opening, therefore of deadline.
        self.incomplete: dict[PendingBatch, None] = {}
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._lingering: deque[tuple[PendingBatch, PartitionQueue]] = deque()
        #: Queues that may have something to send now, in the order they got ready.
        self.ready: dict[PartitionQueue, None] = {}
        self._retrying: dict[PartitionQueue, None] = {}

    def queue(self, tp: TopicPartition) -> PartitionQueue:
        queue = self._queues.get(tp)
        if queue is None:
            queue = self._queues[tp] = PartitionQueue(tp)
        return queue

    # --- taking records in ---------------------------------------------------------------------

    def open_batch(
        self, queue: PartitionQueue, first_size_bytes: int, now_ms: int, *, forced: bool = False
    ) -> PendingBatch | None:
        """A new open batch for ``queue`` with room for a first record, or None when buffer.memory has no
        room.

        ``forced`` takes it whatever the room: the record was let in before, while its topic was not known.
        """
        assert queue.open is None, "close the open batch first"
        limits = self.limits
        need = max(limits.batch_size, first_size_bytes + BATCH_OVERHEAD_BYTES)
        if need > self.free_bytes and self.incomplete and not forced:
            return None
        batch = PendingBatch(
            queue.tp.topic,
            queue.tp.partition,
            limit_bytes=limits.batch_size,
            limit_records=limits.records_per_batch,
        )
        self._accept(batch, need, now_ms)
        queue.open = batch
        if limits.linger_ms > 0:
            self._forget_closed_lingerers()
            self._lingering.append((batch, queue))
        else:
            self._maybe_ready(queue, now_ms)
        return batch

    def _accept(self, batch: PendingBatch, reserved_bytes: int, now_ms: int) -> None:
        batch.linger_until_ms = now_ms + self.limits.linger_ms
        batch.deadline_ms = now_ms + self.limits.delivery_timeout_ms
        batch.reserved_bytes = reserved_bytes
        self.free_bytes -= reserved_bytes
        self.incomplete[batch] = None

    def close_batch(self, queue: PartitionQueue, now_ms: int) -> None:
        """Close the open batch, if any: it takes no more records and may be sent."""
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
        self, queue: PartitionQueue, value: bytes, key: bytes | None, timestamp_ms: int, now_ms: int
    ) -> Shipment | None:
        """A batch of one record, encoded and on its way; None if something is before it or there is no room.

        In one step what ``open_batch``, ``close_batch`` and ``take`` do for a record that need not wait.
        """
        size_bytes = len(value) + BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD_BYTES
        if key is not None:
            size_bytes += len(key)
        if (
            queue.shipment is not None
            or queue.open is not None
            or queue.closed
            or size_bytes > self.free_bytes
            or size_bytes > self.limits.max_request_size
        ):
            return None
        topic, partition = queue.tp
        batch = PendingBatch(topic, partition, limit_bytes=0, limit_records=0)
        batch.timestamps.append(timestamp_ms)
        batch.size_bytes = batch.reserved_bytes = size_bytes
        batch.record_count = 1
        batch.closed = True
        batch.deadline_ms = now_ms + self.limits.delivery_timeout_ms
        self.free_bytes -= size_bytes
        self.incomplete[batch] = None
        shipment = queue.shipment = Shipment(queue, [batch], size_bytes, True)
        shipment.encoded = build_single(value, key, timestamp_ms)
        return shipment

    def has_room(self, size_bytes: int) -> bool:
        """Whether a whole batch of ``size_bytes`` may come in.

        One alone always may: it has the buffer to itself.
        """
        return size_bytes <= self.free_bytes or not self.incomplete

    def add_batch(self, queue: PartitionQueue, batch: PendingBatch, now_ms: int) -> None:
        """Take a prebuilt batch (send_many, send_batch). It goes behind what the partition has already."""
        assert batch.prebuilt is not None and batch.closed, "built and closed by the caller"
        self.close_batch(queue, now_ms)
        self._accept(batch, batch.size_bytes, now_ms)
        queue.closed.append(batch)
        self._maybe_ready(queue, now_ms)

    def _maybe_ready(self, queue: PartitionQueue, now_ms: int) -> None:
        if queue.shipment is not None:
            return
        if queue.closed or (queue.open is not None and queue.open.linger_until_ms <= now_ms):
            self.ready[queue] = None

    # --- time ----------------------------------------------------------------------------------

    def on_tick(self, now_ms: int) -> list[PendingBatch]:
        """Close what has lingered, free retries whose pause is over, expire.

        Returns the batches that expired.
        """
        self._forget_closed_lingerers()
        while self._lingering and self._lingering[0][0].linger_until_ms <= now_ms:
            _, queue = self._lingering.popleft()
            self._maybe_ready(queue, now_ms)
            self._forget_closed_lingerers()
        for queue in [queue for queue in self._retrying if _retry_at(queue) <= now_ms]:
            del self._retrying[queue]
            self.ready[queue] = None
        return self.expire(now_ms)

    def next_deadline_ms(self) -> int | None:
        """When ``on_tick`` has something to do, or None while nothing waits."""
        deadline_ms = None
        for batch in self.incomplete:  # the first has the earliest
            deadline_ms = batch.deadline_ms
            break
        self._forget_closed_lingerers()
        if self._lingering:  # these are incomplete too, so there is a deadline
            linger_until_ms = self._lingering[0][0].linger_until_ms
            deadline_ms = linger_until_ms if deadline_ms is None else min(deadline_ms, linger_until_ms)
        for queue in self._retrying:
            retry_at_ms = _retry_at(queue)
            if deadline_ms is None or retry_at_ms < deadline_ms:
                deadline_ms = retry_at_ms
        return deadline_ms

    @property
    def deadlines_only_recede(self) -> bool:
        """Whether the next deadline can't be nearer than it was: nothing lingers, nothing is retried."""
        return not self._lingering and not self._retrying

    def _forget_closed_lingerers(self) -> None:
        while self._lingering and self._lingering[0][0].closed:
            self._lingering.popleft()

    def close_all(self, now_ms: int) -> None:
        """Close every open batch, whether it has lingered or not (flush)."""
        for queue in self._queues.values():
            self.close_batch(queue, now_ms)

    def expire(self, now_ms: int) -> list[PendingBatch]:
        """Fail every batch whose delivery.timeout.ms has passed, in flight or not; returns them."""
        expired = []
        for batch in self.incomplete:
            if batch.deadline_ms > now_ms:
                break
            expired.append(batch)
        for batch in expired:
            self._drop(batch, _delivery_timeout(batch, self.limits.delivery_timeout_ms), now_ms)
        return expired

    def abort_all(self, error: Exception, now_ms: int) -> list[PendingBatch]:
        """Fail all that is incomplete with ``error``; returns the batches."""
        aborted = list(self.incomplete)
        for batch in aborted:
            self._drop(batch, error, now_ms)
        return aborted

    def _drop(self, batch: PendingBatch, error: Exception, now_ms: int) -> None:
        """Fail ``batch`` wherever it stands.

        One in flight keeps its partition muted until the answer comes.
        """
        queue = self._queues[TopicPartition(batch.topic, batch.partition)]
        if queue.open is batch:
            self.close_batch(queue, now_ms)
        if batch in queue.closed:
            queue.closed.remove(batch)
        self._fail(batch, error)
        shipment = queue.shipment
        if shipment is not None and not shipment.in_flight and all(batch.done for batch in shipment.batches):
            self._end_shipment(queue, now_ms)
        if queue.shipment is None and not queue.closed and queue.open is None:
            self.ready.pop(queue, None)

    # --- sending -------------------------------------------------------------------------------

    def drain(
        self, now_ms: int, leader_of: Callable[[TopicPartition], int], room: Callable[[int], int]
    ) -> Drained:
        """Take what can be sent now, grouped into requests of at most max.request.size.

        ``leader_of`` gives a node id, negative when nobody is known to lead; ``room`` how many more
        requests a node takes. What is taken is in flight until ``on_acknowledged`` or ``on_failed``.
        """
        drained = Drained()
        filling: dict[int, _Filling] = {}
        for queue in list(self.ready):
            node_id = leader_of(queue.tp)
            if node_id < 0:
                drained.leaderless = True
                continue
            request = filling.get(node_id)
            if request is None:
                request = filling[node_id] = _Filling(room(node_id))
            if request.room <= 0 and not request.shipments:
                continue
            shipment = self._next_shipment(queue, now_ms)
            if shipment is None:
                del self.ready[queue]
                continue
            if request.shipments and request.size_bytes + shipment.size_bytes > self.limits.max_request_size:
                if request.room <= 0:
                    continue  # made up already; it goes first next time
                request.shipments, request.size_bytes = [], 0
            if not request.shipments:
                drained.requests.append((node_id, request.shipments))
                request.room -= 1
            request.shipments.append(shipment)
            request.size_bytes += shipment.size_bytes
            shipment.in_flight = True
            del self.ready[queue]
        return drained

    def take(self, queue: PartitionQueue, now_ms: int) -> Shipment | None:
        """``drain`` for one queue that is ready, when the caller knows that its leader has room."""
        shipment = self._next_shipment(queue, now_ms)
        del self.ready[queue]
        if shipment is not None:
            shipment.in_flight = True
        return shipment

    def _next_shipment(self, queue: PartitionQueue, now_ms: int) -> Shipment | None:
        """The shipment to send for ``queue``.

        The one to retry, or one made of closed batches; None without any.
        """
        if queue.shipment is not None:
            assert not queue.shipment.in_flight, "a partition has one shipment in flight"
            return queue.shipment
        closed = queue.closed
        if not closed:
            if queue.open is None or queue.open.linger_until_ms > now_ms:
                return None
            self.close_batch(queue, now_ms)
        first = closed.popleft()
        if closed and queue.coalesce and first.prebuilt is None:
            queue.shipment = self._coalesce(queue, first)
        else:
            queue.shipment = Shipment(queue, [first], first.size_bytes)
        return queue.shipment

    def _coalesce(self, queue: PartitionQueue, first: PendingBatch) -> Shipment:
        """``first`` and as many closed batches behind it as one record batch may hold."""
        limits = self.limits
        batches, size_bytes, record_count = [first], first.size_bytes, first.record_count
        while queue.closed:
            more = queue.closed[0]
            size_bytes += more.size_bytes
            record_count += more.record_count
            if (
                more.prebuilt is not None
                or size_bytes > limits.max_request_size
                or record_count > limits.records_per_batch
            ):
                size_bytes -= more.size_bytes
                break
            batches.append(queue.closed.popleft())
        return Shipment(queue, batches, size_bytes)

    def on_acknowledged(
        self, shipment: Shipment, base_offset: int, log_append_time_ms: int, now_ms: int
    ) -> list[PendingBatch]:
        """The broker has it at ``base_offset`` (NO_OFFSET with acks=0).

        Returns the batches that are done by this.
        """
        offset = base_offset
        finished = []
        for batch in shipment.batches:
            if not batch.done:
                self._finish(batch, offset, log_append_time_ms, None)
                finished.append(batch)
            if base_offset != NO_OFFSET:
                offset += batch.record_count
        self._end_shipment(shipment.queue, now_ms)
        return finished

    def on_failed(
        self, shipment: Shipment, error: Exception, now_ms: int, chance: float
    ) -> list[PendingBatch]:
        """An error or no answer. Retries when that may help and attempts and time are left.

        Returns the batches that failed for good by this; none when the shipment will be retried or split.
        """
        shipment.in_flight = False
        queue = shipment.queue
        live = [batch for batch in shipment.batches if not batch.done]
        if not live:
            self._end_shipment(queue, now_ms)
            return []
        if isinstance(error, MessageTooLargeError) and len(live) > 1:
            # Coalescing was ours, not the user's: undo it, for this partition from now on.
            queue.coalesce = False
            queue.closed.extendleft(reversed(live))
            self._end_shipment(queue, now_ms)
            return []
        shipment.failures += 1
        if is_retriable(error) and shipment.failures <= self.limits.retries:
            shipment.retry_at_ms = now_ms + self.limits.backoff.delay_ms(shipment.failures, chance)
            self._retrying[queue] = None
            return []
        for batch in live:
            self._fail(batch, error)
        self._end_shipment(queue, now_ms)
        return live

    def retry_now(self) -> None:
        """Cut every pause short: the metadata just changed, so the cause may be gone."""
        self.ready.update(self._retrying)
        self._retrying.clear()

    def _end_shipment(self, queue: PartitionQueue, now_ms: int) -> None:
        queue.shipment = None
        if self._retrying:
            self._retrying.pop(queue, None)
        self.ready.pop(queue, None)
        self._maybe_ready(queue, now_ms)

    def _fail(self, batch: PendingBatch, error: Exception) -> None:
        self._finish(batch, NO_OFFSET, NO_TIMESTAMP, error)

    def _finish(
        self, batch: PendingBatch, base_offset: int, log_append_time_ms: int, error: Exception | None
    ) -> None:
        batch.settle(base_offset, log_append_time_ms, error)
        self.free_bytes += batch.reserved_bytes
        batch.reserved_bytes = 0
        del self.incomplete[batch]


def _retry_at(queue: PartitionQueue) -> int:
    assert queue.shipment is not None, "a queue that retries has a shipment"
    return queue.shipment.retry_at_ms


def _delivery_timeout(batch: PendingBatch, timeout_ms: int) -> DeliveryTimeoutError:
    return DeliveryTimeoutError(
        f"{batch.topic}-{batch.partition}: no acknowledgement for {batch.record_count} records "
        f"within {timeout_ms} ms; they may or may not be in the log",
        hint="see whether the partition has a leader, or raise delivery.timeout.ms",
    )
