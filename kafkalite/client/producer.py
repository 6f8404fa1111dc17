"""Producer: records in, acknowledgements out.

The shell around ``accumulator``: it reads the clock, talks to the brokers and wakes who waits; what is sent
when, and what is retried, is decided there.

``send_nowait`` is one flat function. Its first half handles the common record (bytes, open batch, room
left) with a dozen operations and no call into another module; everything else goes to ``_append``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack

from kafkalite.client.accumulator import (
    RECORD_OVERHEAD_BYTES,
    WHOLE_BATCH,
    Accumulator,
    Limits,
    PartitionQueue,
    PendingBatch,
    Shipment,
    record_size,
)
from kafkalite.client.cluster import ClusterClient
from kafkalite.client.config import BootstrapServers, ProducerSettings, producer_config
from kafkalite.client.connection import Answer
from kafkalite.client.delivery import BatchMetadata, Delivery, DeliveryCallback, batch_metadata, wait_done, wake
from kafkalite.client.retry import Backoff, needs_metadata
from kafkalite.clock import Clock
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    DeliveryFailedError,
    KafkaliteError,
    RecordTooLargeError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    broker_error,
)
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, Acks, Headers, RecordMetadata, TopicPartition
from kafkalite.protocol.messages.data import ProducedPartition, ProducePartition, ProduceRequest
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder
from kafkalite.records.partitioners import (
    Hash,
    Partitioner,
    RoundRobinPerBatch,
    Sticky,
    make_partitioner,
)
from kafkalite.rng import Rng, system_rng

from kafkalite.client.columns import ColumnChunk, split_columns, split_prebuilt

logger = logging.getLogger(__name__)

PartitionerChoice = str | Callable[[str, bytes | None, bytes | None, int], int]
"""``roundrobin``, ``sticky``, ``random``, ``hash``, or a function (topic, key, value, partition count) -> partition."""

RecordHeaders = Sequence[tuple[str, bytes | None]]

# When the body of ``async with`` raised, what was accepted gets this long to be delivered: enough for a
# healthy cluster, and an exception or Ctrl-C is not held up by a sick one.
CLOSE_AFTER_ERROR_MS: Final = 1_000

_MAX_REMEMBERED_KEYS: Final = 100_000
_MAX_REMEMBERED_FAILURES: Final = 1_000


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    requests: int  #: produce requests sent
    batches: int  #: record batches in them, retries included
    acknowledged_batches: int
    failed_batches: int
    retries: int
    waiting_batches: int  #: accepted, not yet acknowledged
    free_bytes: int  #: of buffer.memory


class _Topic:
    """One queue per partition. Invariant: ``queues[n].tp.partition == n``."""

    __slots__ = ("name", "queues")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queues: list[PartitionQueue] = []


class _Parked:
    """Records of a topic whose metadata has not come yet. ``batch`` only carries their listeners."""

    __slots__ = ("batch", "deadline_ms", "records", "reserved_bytes")

    def __init__(self, topic: str, deadline_ms: int) -> None:
        self.batch = PendingBatch(topic, -1, limit_bytes=0, limit_records=0)
        self.deadline_ms = deadline_ms
        self.records: list[tuple[Delivery, _Record]] = []
        self.reserved_bytes = 0


@dataclass(frozen=True, slots=True)
class _Record:
    value: bytes | None
    key: bytes | None
    partition: int | None
    timestamp_ms: int
    headers: Headers
    size_bytes: int


class Producer:
    """Sends records to topics.

    ::

        async with Producer("localhost:9092") as producer:
            metadata = await producer.send("orders", b"...", key=b"42")     # acknowledged
            delivery = producer.send_nowait("orders", b"...")               # batched; await it or flush()

    Settings are those of ``config.PRODUCER_OPTIONS``, as arguments or, dotted, in ``config``; arguments win.

    Nothing is lost silently: ``flush`` and ``close`` raise DeliveryFailedError when records failed whose
    failure nobody awaited and no callback was told. Leaving ``async with`` normally closes, which flushes.
    Leaving it by an exception gives what was accepted CLOSE_AFTER_ERROR_MS, and notes on the exception how
    many records were left undelivered.
    """

    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        partitioner: PartitionerChoice | None = None,
        on_delivery: DeliveryCallback | None = None,
        config: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        named = partitioner if isinstance(partitioner, str) else None
        given = {"bootstrap_servers": bootstrap_servers, "partitioner": named, **settings}
        self.config = producer_config(_merged(config, given))
        self._rng = rng or system_rng()
        chosen = partitioner if callable(partitioner) else self.config.partitioner
        self._partitioner: Partitioner = make_partitioner(chosen, self._rng)
        self._on_delivery = on_delivery
        self._time_ns = time.time_ns if clock is None else lambda: clock.wall_ms() * 1_000_000
        self._cluster = ClusterClient(
            self.config, allow_auto_topic_creation=True, on_change=self._on_cluster_change, rng=self._rng
        )
        self._accumulator = Accumulator(_limits(self.config))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._topics: dict[str, _Topic] = {}
        # What the fast path looks at: per topic the batch that keyless records go to, and each key's queue.
        self._keyless: dict[str, PendingBatch] = {}
        self._keyed: dict[str, dict[bytes, PartitionQueue]] = {}
        self._is_keyless_by_batch = isinstance(self._partitioner, RoundRobinPerBatch | Sticky)
        self._is_keyed_by_hash = isinstance(self._partitioner, RoundRobinPerBatch | Sticky | Hash)
        self._parked: dict[str, _Parked] = {}
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0
        self._failed: list[PendingBatch] = []
        self._forgotten_failures: Counter[tuple[str, int]] = Counter()
        self._forgotten_error: Exception | None = None
        self._requests = self._batches = self._acknowledged = self._failures = self._retries = 0

    def __repr__(self) -> str:
        brokers = len(self._cluster.metadata.addresses)
        waiting = len(self._accumulator.incomplete)
        return f"<Producer {self._state}, {len(self._topics)} topics @ {brokers} brokers, {waiting} batches waiting>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_state", "new") == "open":
            _warn(f"{self!r} was never closed; use 'async with'", ResourceWarning, source=self, stacklevel=2)

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Reach the cluster. Raises ConnectionFailedError. ``async with`` does this."""
        if self._state != "new":
            raise ClientClosedError(f"a producer starts once; this one is {self._state}")
        self._loop = asyncio.get_running_loop()
        self._state = "open"
        try:
            await self._cluster.start()
        except BaseException:
            self._state = "closed"
            raise
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close(timeout_ms=CLOSE_AFTER_ERROR_MS)
        except KafkaliteError as undelivered:
            error.add_note(f"kafkalite: {undelivered}")

    async def close(self, timeout_ms: int | None = None) -> None:
        """Deliver what was accepted, then close the connections. May be called twice.

        ``timeout_ms`` bounds the wait (None: each record's delivery.timeout.ms does); what is undelivered then fails
        with ClientClosedError. Raises DeliveryFailedError when records failed and nobody has looked.
        """
        if self._state != "open":
            self._state = "closed"
            return
        self._state = "closing"
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await self._wait_all()
        except TimeoutError:
            pass
        finally:
            self._abort()
            self._state = "closed"
            await self._cluster.close()
        self._raise_failures()

    def _abort(self) -> None:
        """Fail what is left, and wake everybody who waits."""
        error = ClientClosedError("the producer was closed before the broker acknowledged; the record may be lost")
        for topic in list(self._parked):
            self._fail_parked(topic, error)
        self._finish(self._accumulator.abort_all(error, self._now_ms()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._room_waiters:
            wake(self._room_waiters.popleft())

    async def flush(self) -> None:
        """Send all that was accepted until now without lingering, and return when it is acknowledged.

        Raises DeliveryFailedError when records failed whose deliveries nobody awaited or gave a callback.
        """
        self._check_open()
        await self._wait_all()
        self._raise_failures()

    async def _wait_all(self) -> None:
        while self._parked:
            await wait_done_or_moved(next(iter(self._parked.values())).batch)
        self._accumulator.close_all(self._now_ms())
        self._drain()
        for batch in list(self._accumulator.incomplete):
            await wait_done(batch)

    def _raise_failures(self) -> None:
        """Raise DeliveryFailedError for failures not seen so far; they count as seen then."""
        counts, first_error = self._forgotten_failures, self._forgotten_error
        for batch in self._failed:
            unobserved = batch.unobserved_count()
            if unobserved:
                counts[batch.topic, batch.partition] += unobserved
                first_error = first_error or batch.error
                batch.observe_all()
        self._failed = []
        self._forgotten_failures, self._forgotten_error = Counter(), None
        if first_error is not None:
            raise DeliveryFailedError(counts, first_error)

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(
            requests=self._requests,
            batches=self._batches,
            acknowledged_batches=self._acknowledged,
            failed_batches=self._failures,
            retries=self._retries,
            waiting_batches=len(self._accumulator.incomplete),
            free_bytes=self._accumulator.free_bytes,
        )

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """The partitions of ``topic``. Raises its BrokerError when there is no such topic."""
        self._check_open()
        deadline_ms = self._now_ms() + self.config.max_block_ms
        count = await self._cluster.topic_partition_count(topic, deadline_ms)
        return [TopicPartition(topic, partition) for partition in range(count)]

    def _check_open(self) -> None:
        if self._state != "open":
            hint = "open it with 'async with' or start()" if self._state == "new" else ""
            raise ClientClosedError(f"the producer is {self._state}", hint=hint)

    def _now_ms(self) -> int:
        """The loop's monotonic clock, for every interval and deadline."""
        assert self._loop is not None
        return int(self._loop.time() * 1000)

    # --- sending one record --------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> RecordMetadata:
        """Send one record and return when it is acknowledged as ``acks`` says.

        Waits up to max.block.ms for room in the buffer, then raises BufferFullError. Raises the BrokerError or
        DeliveryTimeoutError of its batch. Cancelling the wait does not take the record back.
        """
        try:
            delivery = self.send_nowait(
                topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
            )
        except BufferFullError:
            await self.wait_for_room()
            return await self.send(
                topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
            )
        return await delivery

    def send_nowait(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
        # Bound at definition: locals in the fast path.
        _new: Any = object.__new__,
        _delivery: type[Delivery] = Delivery,
        _overhead: int = RECORD_OVERHEAD_BYTES,
    ) -> Delivery:
        """Put one record into its partition's batch, which leaves after linger.ms or when it is full.

        Returns at once. Raises BufferFullError (see ``wait_for_room``), RecordTooLargeError, ClientClosedError,
        TypeError. Everything later is told by the delivery, or by flush() and close().
        """
        if partition is None and timestamp_ms is None and not headers and value.__class__ is bytes:
            try:
                if key is None:
                    batch = self._keyless[topic]
                    size_bytes = batch.size_bytes + len(value) + _overhead  # type: ignore[arg-type]
                    keys = batch.keys
                else:
                    batch = self._keyed[topic][key].open  # type: ignore[assignment]
                    size_bytes = batch.size_bytes + len(value) + len(key) + _overhead  # type: ignore[arg-type]
                    keys = batch.keys
                    if keys is None:
                        raise KeyError  # the first key of a batch: the column has to be made
                index = len(batch.values)
                if size_bytes <= batch.limit_bytes and index < batch.limit_records and batch.headers is None:
                    batch.size_bytes = size_bytes
                    batch.values.append(value)
                    batch.timestamps.append(self._time_ns() // 1_000_000)
                    if keys is not None:
                        keys.append(key)
                    delivery: Delivery = _new(_delivery)
                    delivery.batch = batch
                    delivery.index = index
                    return delivery
            except (KeyError, AttributeError):
                pass
        return self._append(topic, value, key, partition, timestamp_ms, headers)

    def _append(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int | None,
        headers: RecordHeaders,
    ) -> Delivery:
        """The whole of send_nowait: checks, unknown topics, opening and closing of batches, sending."""
        self._check_open()
        value = _as_bytes("value", value)
        key = _as_bytes("key", key)
        checked = _as_headers(headers) if headers else ()
        size_bytes = record_size(value, key, checked)
        if size_bytes > self.config.max_request_size:
            raise RecordTooLargeError(
                f"a record of {size_bytes} bytes for topic {topic!r}; max.request.size is {self.config.max_request_size}",
                hint="raise max.request.size, and the topic's max.message.bytes with it",
            )
        if timestamp_ms is None:
            timestamp_ms = self._time_ns() // 1_000_000
        record = _Record(value, key, partition, timestamp_ms, checked, size_bytes)
        known = self._topics.get(topic) or self._know(topic)
        if known is None or topic in self._parked:
            return self._park(topic, record)
        batch, index = self._place(known, record, forced=False)
        if self._accumulator.has_ready:
            self._drain()
        else:
            self._arm_timer()
        return Delivery(batch, index)

    def _place(self, topic: _Topic, record: _Record, *, forced: bool) -> tuple[PendingBatch, int]:
        """Choose a partition, and append to its open batch or to a new one. Raises BufferFullError."""
        accumulator, now_ms = self._accumulator, self._now_ms()
        queue = topic.queues[self._partition(topic, record.key, record.value, record.partition)]
        batch = queue.open
        if batch is not None and not batch.has_room(record.size_bytes):
            accumulator.close_batch(queue, now_ms)
            batch = None
            if record.key is None and record.partition is None:
                # A full batch is when a keyless record moves on to the next partition.
                queue = topic.queues[self._partition(topic, None, record.value, None)]
                batch = queue.open
                if batch is not None and not batch.has_room(record.size_bytes):
                    accumulator.close_batch(queue, now_ms)
                    batch = None
        if batch is None:
            batch = accumulator.open_batch(queue, record.size_bytes, now_ms, forced=forced)
            if batch is None:
                self._drain()
                raise BufferFullError(
                    f"buffer.memory ({self.config.buffer_memory} bytes) is full of records not yet acknowledged",
                    hint="await wait_for_room() or flush(), or raise buffer.memory",
                )
        if record.partition is None:
            if record.key is None:
                if self._is_keyless_by_batch:
                    self._keyless[topic.name] = batch
            elif self._is_keyed_by_hash:
                self._remember_key(topic.name, record.key, queue)
        return batch, batch.append(record.value, record.key, record.timestamp_ms, record.headers, record.size_bytes)

    def _remember_key(self, topic: str, key: bytes, queue: PartitionQueue) -> None:
        queues = self._keyed.setdefault(topic, {})
        if len(queues) >= _MAX_REMEMBERED_KEYS:
            queues.clear()
        queues[key] = queue

    def _partition(self, topic: _Topic, key: bytes | None, value: bytes | None, partition: int | None) -> int:
        """The partition of one record. Raises UnknownTopicOrPartitionError for one that does not exist."""
        count = len(topic.queues)
        if partition is None:
            if key is None:
                self._note_closed(topic.name)
            partition = self._partitioner.partition(topic.name, key, value, count)
        if not 0 <= partition < count:
            self._cluster.request_refresh()
            raise UnknownTopicOrPartitionError(
                f"topic {topic.name!r} has partitions 0 to {count - 1}, not {partition}"
            )
        return partition

    def _note_closed(self, topic: str) -> None:
        """Tell the partitioner when the batch it sent keyless records to has closed since."""
        batch = self._keyless.get(topic)
        if batch is not None and batch.closed:
            del self._keyless[topic]
            self._partitioner.on_batch_closed(topic, batch.partition)

    # --- topics not known yet ------------------------------------------------------------------

    def _know(self, name: str) -> _Topic | None:
        """The topic's queues, made when its metadata is there; None, and asked for, when not."""
        count = self._cluster.metadata.partition_count(name)
        if count is None:
            self._cluster.track(name)
            return None
        self._cluster.track(name)
        topic = self._topics.setdefault(name, _Topic(name))
        for partition in range(len(topic.queues), count):
            topic.queues.append(self._accumulator.queue(TopicPartition(name, partition)))
        self._keyed.pop(name, None)
        return topic

    def _park(self, topic: str, record: _Record) -> Delivery:
        accumulator = self._accumulator
        if not accumulator.has_room(record.size_bytes):
            raise BufferFullError(
                f"buffer.memory ({self.config.buffer_memory} bytes) is full while topic {topic!r} is looked up",
                hint="await wait_for_room() or flush(), or raise buffer.memory",
            )
        parked = self._parked.get(topic)
        if parked is None:
            parked = self._parked[topic] = _Parked(topic, self._now_ms() + self.config.max_block_ms)
            self._cluster.request_refresh(urgent=True)
        accumulator.free_bytes -= record.size_bytes
        parked.reserved_bytes += record.size_bytes
        delivery = Delivery(parked.batch, len(parked.records))
        parked.records.append((delivery, record))
        self._arm_timer()
        return delivery

    def _unpark(self, name: str, topic: _Topic) -> None:
        """Move the records of a topic just learned to where they belong, in the order they came."""
        parked = self._parked.pop(name)
        self._accumulator.free_bytes += parked.reserved_bytes
        refused: list[tuple[Delivery, Exception]] = []
        for delivery, record in parked.records:
            try:
                delivery.batch, delivery.index = self._place(topic, record, forced=True)
            except Exception as error:  # of this record only: no such partition, or the user's partitioner
                refused.append((delivery, error))
        for index, listener in parked.batch.listeners:
            if index == WHOLE_BATCH:
                listener()
                continue
            delivery = parked.records[index][0]
            if delivery.batch is not parked.batch:
                delivery.batch.listeners.append((delivery.index, listener))
        for delivery, error in refused:
            self._refuse(delivery, parked.batch, error)

    def _refuse(self, delivery: Delivery, parked: PendingBatch, error: Exception) -> None:
        """Fail one parked record on its own."""
        batch = PendingBatch(parked.topic, -1, limit_bytes=0, limit_records=0)
        batch.close()
        batch.record_count = 1
        batch.listeners = [(0, listener) for index, listener in parked.listeners if index == delivery.index]
        delivery.batch, delivery.index = batch, 0
        batch.settle(error=error)
        self._finish([batch])

    def _fail_parked(self, topic: str, error: Exception) -> None:
        parked = self._parked.pop(topic)
        self._accumulator.free_bytes += parked.reserved_bytes
        parked.batch.close()
        parked.batch.record_count = len(parked.records)
        parked.batch.settle(error=error)
        self._finish([parked.batch])

    def _on_cluster_change(self) -> None:
        """Metadata came, or a connection came or went."""
        if self._state not in {"open", "closing"} or self._loop is None:
            return
        metadata = self._cluster.metadata
        for name, known in list(self._topics.items()):
            if (metadata.partition_count(name) or 0) > len(known.queues):
                self._know(name)
        for name in list(self._parked):
            topic = self._know(name)
            fatal = metadata.fatal_error(name)
            if topic is not None:
                self._unpark(name, topic)
            elif fatal is not None:
                self._fail_parked(name, broker_error(*fatal))
            else:
                self._cluster.request_refresh()
        self._drain()

    # --- room ----------------------------------------------------------------------------------

    async def wait_for_room(self, timeout_ms: int | None = None) -> None:
        """Return when buffer.memory has room for another batch. Raises BufferFullError after max.block.ms."""
        self._check_open()
        if timeout_ms is None:
            timeout_ms = self.config.max_block_ms
        await self._wait_for_bytes(self.config.batch_size, self._now_ms() + timeout_ms)

    async def _wait_for_bytes(self, size_bytes: int, deadline_ms: int) -> None:
        """Return when ``size_bytes`` are free. Whoever came first goes first."""
        assert self._loop is not None
        first = True
        while not self._accumulator.has_room(size_bytes) or (first and self._room_waiters):
            waiter: asyncio.Future[None] = self._loop.create_future()
            if first:
                self._room_waiters.append(waiter)
            else:
                self._room_waiters.appendleft(waiter)
            first = False
            try:
                async with asyncio.timeout(max(0, deadline_ms - self._now_ms()) / 1000):
                    await waiter
            except TimeoutError:
                raise BufferFullError(
                    f"buffer.memory ({self.config.buffer_memory} bytes) stayed full for max.block.ms",
                    hint="the broker takes less than you send; raise buffer.memory or max.block.ms",
                ) from None
            finally:
                if waiter in self._room_waiters:
                    self._room_waiters.remove(waiter)
            self._check_open()
        self._wake_for_room()

    def _wake_for_room(self) -> None:
        """Wake the first in line; it wakes the next when it has what it needs."""
        while self._room_waiters:
            waiter = self._room_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    # --- sending many --------------------------------------------------------------------------

    async def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> list[BatchMetadata]:
        """Send columns of records, and return when all are acknowledged.

        The fast path: records become batches of up to max.request.size without an object each. Keyless records go
        to one partition per batch; keyed ones to the partition of their key, in order. Waits for room as
        ``send``. Returns one entry per batch; raises the first error, and then what was acknowledged stays.
        """
        self._check_open()
        if not values:
            return []
        count = await self._partition_count(topic)
        if timestamps_ms is None:
            timestamps_ms = self._time_ns() // 1_000_000
        chunk = ColumnChunk(partition, list(values), _as_list(keys), _as_column(timestamps_ms), _as_list(headers))
        chunk.check()
        batches = []
        try:
            for part in split_columns(chunk, self._partition_column(topic, chunk, count), self.config.max_request_size):
                batches.append(await self._send_chunk(topic, part))
        finally:
            for batch in batches:
                await wait_done(batch)
        for batch in batches:
            if batch.error is not None:
                batch.observe_all()
        return [batch_metadata(batch) for batch in batches]
