"""Sends the batches that the accumulator has ready and reports each response to it.

Owns the accumulator, its timer, the queue of callers that wait for buffer memory, and the unreported
failures.
"""

# Tests: tests/client/test_producer.py

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kafkalite.client.cluster.client import ClusterClient, closed_loop_error
from kafkalite.client.cluster.connection import Connection
from kafkalite.client.cluster.retry import is_retriable, needs_metadata
from kafkalite.client.cluster.signal import Signal, wake
from kafkalite.client.config import ProducerConfig
from kafkalite.client.producer.accumulator import Accumulator
from kafkalite.client.producer.delivery import Delivery, DeliveryCallback
from kafkalite.client.producer.partition_queue import InFlightBatch, PartitionQueue
from kafkalite.client.producer.pending_batch import Encoded, PendingBatch
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    ConnectionFailedError,
    DeliveryFailedError,
    DuplicateSequenceNumberError,
    KafkaliteError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    broker_error,
)
from kafkalite.model import NO_OFFSET, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP, TopicPartition
from kafkalite.protocol.messages.data import (
    InitProducerIdRequest,
    ProducedPartition,
    ProducePartition,
    ProduceRequest,
)
from kafkalite.rng import Rng

# The number of failed batches that are kept, so that an error that is read late still counts as seen. Older
# failures are only counted.
MAX_REMEMBERED_FAILURES: Final = 1_000


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    requests: int  #: produce requests sent
    batches: int  #: record batches in these requests, including resent batches
    acknowledged_batches: int  #: batches as filled by send(); several may be sent as one record batch
    acknowledged_records: int
    failed_batches: int
    retries: int
    waiting_batches: int  #: batches that are neither acknowledged nor failed
    free_bytes: int  #: the free part of buffer.memory


class FailureLedger:
    """Keeps failed batches until flush() or close() reports the errors that no caller has seen."""

    def __init__(self) -> None:
        self._batches: deque[PendingBatch] = deque()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._first_error: Exception | None = None

    def add(self, batch: PendingBatch) -> None:
        self._batches.append(batch)
        if len(self._batches) > MAX_REMEMBERED_FAILURES:
            self._count(self._batches.popleft())

    def _count(self, batch: PendingBatch) -> None:
        unobserved = batch.unobserved_count()
        if unobserved:
            self._counts[batch.topic, batch.partition] += unobserved
            self._first_error = self._first_error or batch.error

    def forget(self) -> None:
        """Mark the errors of all failed batches as seen, and remove the batches."""
        for batch in self._batches:
            batch.observe()
        self._batches.clear()
        self._counts, self._first_error = Counter(), None

    def raise_unseen(self) -> None:
        """Remove all failures. Raise DeliveryFailedError if a record has failed with an error that no caller
        has seen."""
        while self._batches:
            self._count(self._batches.popleft())
        counts, error = self._counts, self._first_error
        self._counts, self._first_error = Counter(), None
        if error is not None:
            raise DeliveryFailedError(counts, error)


class Sender:
    """Sends batches to leaders.

    Except after ``send_alone``, the timer fires at the accumulator's next deadline or earlier.
    """

    def __init__(
        self,
        config: ProducerConfig,
        *,
        on_delivery: DeliveryCallback | None,
        on_change: Callable[[], None],
        rng: Rng,
    ) -> None:
        self.config = config
        self.cluster = ClusterClient(config, allow_auto_topic_creation=True, on_change=on_change, rng=rng)
        self.accumulator = Accumulator(config)
        self.failures = FailureLedger()
        #: Called with each failure, before the listeners of the batch are called. It may fail other batches.
        self.on_failure: Callable[[Exception], None] | None = None
        #: Called with each batch that is acknowledged or has failed, for interceptors.
        self.on_done: Callable[[PendingBatch], None] | None = None
        #: Converts an error to the error that callers receive, if set.
        self.translate: Callable[[Exception], Exception] | None = None
        self._on_delivery = on_delivery
        self._rng = rng
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._generation = 0  # the generation of the metadata at the last change
        self._acks = int(config.acks)
        self._unanswered = 0  #: with acks=0, the requests whose response has not arrived
        self._answered = Signal()  #: fired when ``_unanswered`` becomes 0
        self._transactional_id = config.transactional_id
        self._max_in_flight = config.max_in_flight_requests_per_connection
        self._request_timeout_ms = config.request_timeout_ms
        self._is_asking_for_id = False
        self.request_count = self._batches = self._acknowledged = self._acknowledged_records = 0
        self._failed = self._retries = 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.cluster.start()
        if self.accumulator.needs_producer_id:
            self._ask_for_producer_id()

    async def close(self, error: Exception) -> None:
        """Fail all remaining batches with ``error``, wake all waiters and close the connections."""
        self.finish(self.accumulator.abort_all(error, self.now_ms()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._room_waiters:
            wake(self._room_waiters.popleft())
        await self.cluster.close()

    def now_ms(self) -> int:
        """Return the time of the loop's monotonic clock, which is used for all intervals and deadlines."""
        assert self._loop is not None, "start() first"
        return int(self._loop.time() * 1000)

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(
            requests=self.request_count,
            batches=self._batches,
            acknowledged_batches=self._acknowledged,
            acknowledged_records=self._acknowledged_records,
            failed_batches=self._failed,
            retries=self._retries,
            waiting_batches=len(self.accumulator.incomplete),
            free_bytes=self.accumulator.free_bytes,
        )

    # --- requests ------------------------------------------------------------------------------

    def on_cluster_change(self) -> None:
        """Send batches that waited for a connection or leader.

        If there is new metadata, end the retry pauses, and close slow connections to former leaders.
        """
        generation = self.cluster.metadata.generation
        if generation != self._generation:
            self._generation = generation
            for node_id in self.accumulator.nodes_of_old_leaders(self._leader_of):
                self.cluster.give_up(node_id)
            self.accumulator.retry_now()
        self.drain()

    def drain(self) -> None:
        """Send the batches that are due, if connections accept them, and set the timer for the rest.

        Raises ClientClosedError, and fails all batches with it, if the client's event loop was closed.
        """
        accumulator = self.accumulator
        if self._loop is not None and self._loop.is_closed():
            error = closed_loop_error()
            accumulator.abort_all(error, self.now_ms())
            raise error
        ready = accumulator.ready
        if len(ready) == 1:
            for queue in ready:
                self._drain_one(queue)
                break
        elif ready:
            drained = accumulator.drain(self.now_ms(), self._leader_of, self._room)
            for node_id, flights in drained.requests:
                self._send(self.cluster.connection_now(node_id), flights)
            if drained.leaderless:
                for queue in ready:
                    self._note_missing(queue)
                self.cluster.request_refresh()
        if accumulator.needs_producer_id and not self._is_asking_for_id:
            self._ask_for_producer_id()
        if self._timer is None or not accumulator.deadlines_only_recede:
            self.arm_timer()

    def _drain_one(self, queue: PartitionQueue) -> None:
        """Send the batches of ``queue`` as ``drain`` does. For the common case that no other queue is
        ready."""
        node_id = self._leader_of(queue.tp)
        if node_id < 0:
            self._note_missing(queue)
            self.cluster.request_refresh()
            return
        while queue in self.accumulator.ready:
            connection = self.cluster.connection_now(node_id)
            if connection is None or not self.has_room(connection):
                return
            flight = self.accumulator.take(queue, self.now_ms(), node_id)
            if flight is None:
                return
            self._send(connection, [flight])

    def _note_missing(self, queue: PartitionQueue) -> None:
        """If the topic exists without this partition, record that its batches wait for the partition."""
        topic, partition = queue.tp
        count = self.cluster.metadata.partition_count(topic)
        if count is not None and partition >= count:
            existing = "1 partition" if count == 1 else f"{count} partitions"
            queue.last_error = UnknownTopicOrPartitionError(f"{queue.tp}: topic {topic!r} has {existing} now")
            self.cluster.setbacks.note(queue.tp, queue.last_error, self.now_ms())

    def _leader_of(self, tp: TopicPartition) -> int:
        return self.cluster.metadata.leader(tp).node_id

    def _room(self, node_id: int) -> int:
        """Return the number of further requests that may be sent to this broker now. 0 if there is no
        connection, or if it accepts no data."""
        connection = self.cluster.connection_now(node_id)
        if connection is None or not connection.can_write:
            return 0
        return self.config.max_in_flight_requests_per_connection - connection.in_flight

    def has_room(self, connection: Connection) -> bool:
        return connection.can_write and len(connection.pending) < self._max_in_flight

    def _send(self, connection: Connection | None, flights: list[InFlightBatch]) -> None:
        config = self.config
        sendable: list[InFlightBatch] = []
        parts: list[Encoded] = []
        entries: list[ProducePartition] = []
        for flight in flights:
            try:
                encoded = flight.encode(config.codec, config.compression_level)
            except (
                Exception
            ) as error:  # a codec that is not installed, or invalid headers; only these records fail
                self._fail_flight(flight, error, was_sent=False)
                continue
            sendable.append(flight)
            parts.append(encoded)
            topic, partition = flight.queue.tp
            entries.append(ProducePartition(topic, partition, len(encoded)))
        if not sendable:
            return
        self._request(connection, sendable, parts, entries)

    def send_alone(self, connection: Connection, flight: InFlightBatch) -> None:
        """Send one batch that is already encoded."""
        encoded = flight.encoded
        assert encoded is not None, "encoded by the caller"
        topic, partition = flight.queue.tp
        self._request(connection, [flight], [encoded], [ProducePartition(topic, partition, len(encoded))])

    def _request(
        self,
        connection: Connection | None,
        flights: list[InFlightBatch],
        parts: list[Encoded],
        entries: list[ProducePartition],
    ) -> None:
        timeout_ms = self._request_timeout_ms
        on_response = partial(self._on_response, flights) if self._acks else self._on_unawaited_response
        try:
            if connection is None:  # lost after ``drain`` had checked it
                raise ConnectionFailedError("the connection was lost")
            connection.request(
                ProduceRequest(self._acks, timeout_ms, self._transactional_id, entries),
                on_response,
                timeout_ms,
                parts,
            )
        except KafkaliteError as error:
            for flight in flights:
                self._fail_flight(flight, error, was_sent=False)
            return
        self.request_count += 1
        self._batches += len(flights)
        if not self._acks:
            self._unanswered += 1
            for flight in flights:
                self._acknowledge(flight, NO_OFFSET, NO_TIMESTAMP)

    # --- responses -----------------------------------------------------------------------------

    def _on_response(
        self, flights: list[InFlightBatch], message: Any, _: memoryview, error: Exception | None
    ) -> None:
        if error is not None:
            for flight in flights:
                self._fail_flight(flight, error)
        else:
            outcomes = message.partitions
            if len(flights) != 1 or len(outcomes) != 1:
                outcomes = _outcomes(flights, outcomes)
            for flight, outcome in zip(flights, outcomes, strict=True):
                self._on_outcome(flight, outcome)
        if self.accumulator.ready or not self.accumulator.deadlines_only_recede:
            self.drain()

    def _on_unawaited_response(self, message: Any, _: memoryview, error: Exception | None) -> None:
        """Handle the response to a request with acks=0: the broker then accepts another request.

        The request's batches were completed when it was sent. An error is not reported, but causes a metadata
        refresh, because another broker may lead now.
        """
        self._unanswered -= 1
        if error is not None or any(outcome.error_code for outcome in message.partitions):
            self.cluster.request_refresh()
        if self.accumulator.ready:
            self.drain()
        if not self._unanswered:
            self._answered.fire()

    async def wait_answered(self) -> None:
        """Return when no request with acks=0 awaits its response.

        Called before the connections are closed, because closing one could drop such a request.
        """
        while self._unanswered:
            await self._answered.wait()

    def _on_outcome(self, flight: InFlightBatch, outcome: ProducedPartition) -> None:
        topic, partition, error_code, error_message, base_offset, log_append_time_ms, _ = outcome
        if (topic, partition) != flight.queue.tp:
            error_code, error_message = int(UnknownServerError.code), "the response omits this partition"
        if error_code in _WRITTEN:
            self._acknowledge(flight, base_offset, log_append_time_ms)
        else:
            error = broker_error(error_code, error_message or "", about=str(flight.queue.tp))
            self._fail_flight(flight, error)

    def _acknowledge(self, flight: InFlightBatch, base_offset: int, log_append_time_ms: int) -> None:
        done = self.accumulator.on_acknowledged(flight, base_offset, log_append_time_ms, self.now_ms())
        self._acknowledged += len(done)
        for batch in done:
            self._acknowledged_records += batch.record_count
        if self.cluster.setbacks:
            self.cluster.setbacks.clear(flight.queue.tp)
        self.finish(done)

    def _fail_flight(self, flight: InFlightBatch, error: Exception, *, was_sent: bool = True) -> None:
        if needs_metadata(error):
            self.cluster.request_refresh()
        if self.translate is not None:
            error = self.translate(error)
        failed = self.accumulator.on_failed(
            flight, error, self.now_ms(), self._rng.random(), was_sent=was_sent
        )
        if not failed:
            self._retries += 1
            last_error = flight.queue.last_error
            if last_error is not None:
                self.cluster.setbacks.note(flight.queue.tp, last_error, self.now_ms())
        self.finish(failed)

    # --- identity ------------------------------------------------------------------------------

    def _ask_for_producer_id(self) -> None:
        """Request a producer id, which idempotent batches need, in the background."""
        self._is_asking_for_id = True
        self.cluster.spawn(self._get_producer_id())

    async def _get_producer_id(self) -> None:
        try:
            await self._call_for_producer_id()
        finally:
            self._is_asking_for_id = False
        if not self.cluster.is_closed:
            self.drain()

    async def _call_for_producer_id(self) -> None:
        request = InitProducerIdRequest(None, 0, NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        failures = 0
        while True:
            try:
                response = await self.cluster.call(request)
            except KafkaliteError as error:
                if self.cluster.is_closed:
                    return
                if not is_retriable(error):  # a retry cannot help: report the error
                    self.finish(self.accumulator.abort_all(error, self.now_ms()))
                failures += 1
                pause_ms = self.accumulator.backoff.delay_ms(failures, self._rng.random())
                await asyncio.sleep(pause_ms / 1000)
            else:
                self.accumulator.on_producer_id(response.message.producer_id)
                return

    def finish(self, batches: list[PendingBatch]) -> None:
        """Report completed batches: count them, and call ``on_failure``, ``on_done``, the listeners and
        ``on_delivery``. Then wake a caller that waits for buffer memory."""
        if self.on_failure is not None:
            for batch in batches:
                if batch.error is not None:
                    self.on_failure(batch.error)
        for batch in batches:
            if batch.error is not None:
                self._failed += 1
                self.failures.add(batch)
            if self.on_done is not None:
                self.on_done(batch)
            listeners, batch.listeners = batch.listeners, []
            for _, listener in listeners:
                self._call_listener(listener)
            if self._on_delivery is not None:
                batch.observe()
                for index in range(batch.record_count):
                    self._call_listener(partial(self._on_delivery, Delivery(batch, index)))
        if batches and self._room_waiters:
            self._wake_for_room()

    def _call_listener(self, listener: Callable[[], Any]) -> None:
        try:
            listener()
        except Exception as error:
            assert self._loop is not None
            self._loop.call_exception_handler({"message": "a delivery callback failed", "exception": error})

    # --- time ----------------------------------------------------------------------------------

    def arm_timer(self) -> None:
        """Set the timer for the earliest end of a linger, a retry pause or a delivery timeout, unless the
        timer fires earlier."""
        deadline_ms = self.accumulator.next_deadline_ms()
        if deadline_ms is None or (self._timer is not None and self._timer_at_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        self._timer_at_ms = deadline_ms
        self._timer = self._loop.call_at(deadline_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.finish(self.accumulator.on_tick(self.now_ms()))
        self.drain()

    # --- room ----------------------------------------------------------------------------------

    async def wait_for_bytes(self, size_bytes: int, timeout_ms: int | None = None) -> None:
        """Wait until ``size_bytes`` of buffer.memory are free, or buffer.memory is empty.

        Waiters are served in the order of their calls. Raises BufferFullError after ``timeout_ms`` (None:
        max.block.ms), and ClientClosedError if the producer is closed.
        """
        self.drain()
        if timeout_ms is None:
            timeout_ms = self.config.max_block_ms
        assert self._loop is not None
        deadline_ms = self.now_ms() + timeout_ms
        has_waited = False
        while not self.accumulator.has_room(size_bytes) or (self._room_waiters and not has_waited):
            waiter: asyncio.Future[None] = self._loop.create_future()
            if has_waited:  # there is not enough room yet: stay first in line
                self._room_waiters.appendleft(waiter)
            else:
                self._room_waiters.append(waiter)
            has_waited = True
            try:
                async with asyncio.timeout(max(0, deadline_ms - self.now_ms()) / 1000):
                    await waiter
            except (TimeoutError, asyncio.CancelledError) as end:
                if waiter in self._room_waiters:
                    self._room_waiters.remove(waiter)
                self._wake_for_room()  # the next one may need less, or this one was woken
                if isinstance(end, asyncio.CancelledError):
                    raise
                raise BufferFullError(
                    f"buffer.memory ({self.config.buffer_memory} bytes) stayed full for {timeout_ms} ms",
                    hint="the brokers accept less than is sent; raise buffer.memory or max.block.ms",
                ) from None
            if self.cluster.is_closed:
                raise ClientClosedError("the producer was closed while a record waited for room")
        self._wake_for_room()

    def _wake_for_room(self) -> None:
        """Wake the first waiter. It wakes the next one when it has enough room."""
        while self._room_waiters:
            waiter = self._room_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _outcomes(flights: list[InFlightBatch], partitions: list[ProducedPartition]) -> list[ProducedPartition]:
    """Return the result of each of ``flights``, in order. _NO_OUTCOME stands for a missing result."""
    by_partition = {(outcome.topic, outcome.partition): outcome for outcome in partitions}
    return [by_partition.get(flight.queue.tp, _NO_OUTCOME) for flight in flights]


_NO_OUTCOME: Final = ProducedPartition("", -1, 0, None, NO_OFFSET, NO_TIMESTAMP, NO_OFFSET)


#: DUPLICATE_SEQUENCE_NUMBER means a duplicate so old that the leader no longer knows its offset.
_WRITTEN: Final = frozenset({0, int(DuplicateSequenceNumberError.code)})
