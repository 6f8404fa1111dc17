"""The blocking twin of Producer, which uses a Producer in the loop thread.

``Producer.send`` queues a record, and wakes the loop thread once for many records.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from kafkalite.client.blocking.consumer import Consumer
from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.client.cluster.signal import Signal
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.producer import producer as async_producer
from kafkalite.client.producer import transaction_manager
from kafkalite.client.producer.bulk_sender import AnyBatch
from kafkalite.client.producer.delivery import (
    BatchDelivery,
    BatchMetadata,
    Delivery,
    PendingResult,
    wait_done,
)
from kafkalite.client.producer.sender import ProducerStatistics
from kafkalite.client.producer.transaction_manager import GroupConsumer, Offsets
from kafkalite.errors import BufferFullError, ClientClosedError, TransactionAbortedError
from kafkalite.model import GroupMetadata, Headers, OffsetAndMetadata, RecordMetadata, TopicPartition

D = TypeVar("D", bound=PendingResult[Any])
R = TypeVar("R")
T = TypeVar("T")

# At most this many records wait for the loop thread. ``send`` blocks while the queue is full.
MAX_QUEUED_RECORDS: Final = 20_000

_ABORTED_WHILE_QUEUED: Final = "the transaction was aborted while the record was queued"


class _Pending(Generic[D, R]):
    """The pending result of a record or batch. Only the loop thread sets ``_delivery``."""

    __slots__ = ("_delivery", "_producer")

    def __init__(self, producer: Producer, delivery: D | None = None) -> None:
        self._producer = producer
        self._delivery = delivery  # None while the record is queued; set once, in the loop thread

    def __repr__(self) -> str:
        return (
            "<PendingDelivery, queued>" if self._delivery is None else f"<Pending{repr(self._delivery)[1:]}"
        )

    def done(self) -> bool:
        """Whether the record or batch was acknowledged or has failed."""
        return self._delivery is not None and self._delivery.done()

    def result(self, timeout: float | None = None) -> R:
        """Return the log position. Raises the send's error, or TimeoutError after ``timeout`` seconds."""
        result: R = self._wait(timeout).result()
        return result

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Return the send's error, or None if it succeeded. Raises TimeoutError after ``timeout`` seconds."""
        return self._wait(timeout).exception()

    def _wait(self, timeout: float | None) -> D:
        if not self.done():
            self._producer._run(self._until_done(), timeout)
        assert self._delivery is not None, "its record has left the queue"
        return self._delivery

    async def _until_done(self) -> None:
        while self._delivery is None:
            await self._producer._drained.wait()
        while not self._delivery.done():  # a record whose topic was unknown changes its batch once
            await wait_done(self._delivery.batch)


class PendingDelivery(_Pending[Delivery, RecordMetadata]):
    """The future of one record. ``result(timeout)`` waits for its acknowledgement."""

    __slots__ = ("_record",)

    def __init__(self, producer: Producer, record: tuple[Any, ...]) -> None:
        self._producer = producer
        self._record: tuple[Any, ...] | None = record
        self._delivery = None

    def add_callback(self, callback: Callable[[PendingDelivery], object]) -> None:
        """Call ``callback(self)`` in kafkalite's thread after success or failure. It must not block."""
        self._producer._thread.loop.call_soon_threadsafe(self._add_callback, callback)

    def _add_callback(self, callback: Callable[[PendingDelivery], object]) -> None:
        if self._delivery is None:
            self._producer._thread.loop.call_soon(self._add_callback, callback)
        else:
            self._delivery.add_callback(lambda _: callback(self))


class PendingBatchDelivery(_Pending[BatchDelivery, BatchMetadata]):
    """The future of one batch. ``result(timeout)`` waits for its acknowledgement."""

    __slots__ = ()


@twin_of(async_producer.Producer)
class Producer(Twin[async_producer.Producer]):
    """Sends records to topics. The blocking twin of ``kafkalite.Producer``, with the same arguments.

    ::

        with Producer("localhost:9092") as producer:
            pending = producer.send("orders", b"...", key=b"42")
            print(pending.result(timeout=10).offset)

    Several threads may use one producer at once. The records of each thread keep their order.
    """

    @opened_with(async_producer.Producer)
    def __init__(self, original: async_producer.Producer) -> None:
        self._set_up(original)

    def _set_up(self, original: async_producer.Producer) -> None:
        super().__init__(original)
        self._is_transactional = original.config.transactional_id is not None
        self._queue: deque[PendingDelivery] = deque()
        self._is_woken = False  # whether the loop thread will drain the queue soon
        self._drained = Signal()
        self._waiting_for_room: asyncio.Task[None] | None = None
        self._has_room = threading.Condition()
        self._closed = False

    def __repr__(self) -> str:
        return f"<sync {repr(self._original)[1:-1]}, {len(self._queue)} records queued>"

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True
            self._run(self._exit(error))

    async def _exit(self, error: BaseException | None) -> None:
        self._drain()
        await self._original.__aexit__(None, error, None)
        self._refuse_queued()

    def close(self, timeout: float | None = None) -> None:
        """Deliver all accepted records, then close the connections. May be called twice.

        After ``timeout`` seconds (None: the delivery.timeout.ms of each record), undelivered records fail
        with ClientClosedError. An open transaction is aborted. Raises DeliveryFailedError for failed records
        whose errors were not retrieved.
        """
        self._closed = True
        self._run(self._close(timeout))

    async def _close(self, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._drain_all()
        except TimeoutError:
            timeout = 0
        try:
            await self._original.close(None if timeout is None else int(timeout * 1000))
        finally:
            self._refuse_queued()

    def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> PendingDelivery:
        """Queue one record and return at once. ``result()`` waits for its acknowledgement.

        Waits up to max.block.ms while the queue is full, and then raises BufferFullError. The error of a
        record that cannot be sent (too large, not bytes) is raised by ``result()``.
        """
        if self._closed:
            raise ClientClosedError("the producer is closed")
        if self._is_transactional:
            self._original.check_may_send()
        queue = self._queue
        if len(queue) >= MAX_QUEUED_RECORDS:
            self._wait_for_room()
        pending = PendingDelivery(self, (topic, value, key, partition, timestamp_ms, headers))
        queue.append(pending)
        if not self._is_woken:  # set before waking the loop, cleared before draining: no record is missed
            self._is_woken = True
            self._thread.loop.call_soon_threadsafe(self._drain)
        return pending

    def _wait_for_room(self) -> None:
        timeout_s = self._original.config.max_block_ms / 1000
        with self._has_room:
            if not self._has_room.wait_for(lambda: len(self._queue) < MAX_QUEUED_RECORDS, timeout_s):
                raise BufferFullError(
                    f"{len(self._queue)} records are queued and none was sent for {timeout_s:g} s",
                    hint="the brokers are slower than the sender; raise buffer.memory or max.block.ms",
                )

    def _drain(self) -> None:
        """In the loop thread: pass queued records to the producer until its buffer is full."""
        self._is_woken = False
        queue, send_nowait = self._queue, self._original.send_nowait
        while queue:
            pending = queue[0]
            assert pending._record is not None
            topic, value, key, partition, timestamp_ms, headers = pending._record
            try:
                pending._delivery = send_nowait(
                    topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
                )
            except BufferFullError:
                if self._waiting_for_room is None:
                    self._waiting_for_room = asyncio.ensure_future(self._drain_when_there_is_room())
                break
            except Exception as error:
                pending._delivery = self._original.refuse(topic, error)
            pending._record = None
            queue.popleft()
        self._drained.fire()
        with self._has_room:
            self._has_room.notify_all()

    async def _drain_when_there_is_room(self) -> None:
        try:
            await self._original.wait_for_room()
        except BufferFullError as error:
            first = self._queue.popleft()
            first._delivery = self._original.refuse(first._record[0] if first._record else "", error)
        except ClientClosedError:
            return
        finally:
            self._waiting_for_room = None
        self._drain()

    async def _drain_all(self) -> None:
        self._drain()
        while self._queue:
            await self._drained.wait()

    def _run_drained(self, function: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Pass all queued records to the producer, then run the coroutine that ``function`` returns."""

        async def run() -> T:
            await self._drain_all()
            return await function()

        return self._run(run(), timeout)

    def _refuse_queued(self, error: Exception | None = None) -> None:
        error = error or ClientClosedError("the producer was closed while the record was queued")
        while self._queue:
            pending = self._queue.popleft()
            pending._delivery = self._original.refuse(pending._record[0] if pending._record else "", error)
        self._drain()

    def send_and_wait(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timeout: float | None = None,
    ) -> RecordMetadata:
        """Send one record and return when it is acknowledged according to ``acks``.

        Raises the same errors as ``send`` and ``PendingDelivery.result``.
        """
        return self.send(
            topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
        ).result(timeout)

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        headers: Sequence[Headers] | None = None,
        timeout: float | None = None,
    ) -> list[BatchMetadata]:
        return self._run_drained(
            lambda: self._original.send_many(
                topic, values, keys, partition=partition, timestamps_ms=timestamps_ms, headers=headers
            ),
            timeout,
        )

    def send_batch(
        self, topic: str, partition: int, batch: AnyBatch, *, timeout: float | None = None
    ) -> BatchMetadata:
        return self._run_drained(lambda: self._original.send_batch(topic, partition, batch), timeout)

    def queue_batch(
        self, topic: str, partition: int, batch: AnyBatch, *, timeout: float | None = None
    ) -> PendingBatchDelivery:
        """Queue one prebuilt batch, and return when buffer.memory has room for it.

        ``result()`` of the returned object waits until this batch is acknowledged, and ``flush()`` until all
        batches are. Raises BufferFullError after max.block.ms, and TimeoutError after ``timeout`` seconds.
        """
        delivery = self._run_drained(lambda: self._original.queue_batch(topic, partition, batch), timeout)
        return PendingBatchDelivery(self, delivery)

    def flush(self, timeout: float | None = None) -> None:
        """Send all accepted records without lingering, and return when they are acknowledged.

        Raises DeliveryFailedError for failed records whose errors were not retrieved, and TimeoutError after
        ``timeout`` seconds.
        """
        self._run_drained(self._original.flush, timeout)

    # --- transactions --------------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Return a transaction. After its commit, ``read_committed`` consumers receive all of its records.

        ::

            with producer.transaction():
                producer.send("orders", b"...")
                producer.send_offsets(consumer)

        The end of the block commits, or, if a record failed, aborts and raises TransactionAbortableError. An
        exception in the block also aborts the transaction. Raises ProducerFencedError if this producer is
        fenced, and RequestTimeoutError if the outcome is unknown.
        """
        return Transaction(self, self._original.transaction())

    begin_transaction = blocking(async_producer.Producer.begin_transaction)

    def commit_transaction(self, timeout: float | None = None) -> None:
        self._run_drained(self._original.commit_transaction, timeout)

    def abort_transaction(self) -> None:
        async def abort() -> None:
            self._refuse_queued(TransactionAbortedError(_ABORTED_WHILE_QUEUED))
            await self._original.abort_transaction()

        self._run(abort())

    def send_offsets(
        self, offsets: Consumer | GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        if isinstance(offsets, Consumer):
            original, positions = offsets._original, offsets.positions()
            offsets = _ConsumerSnapshot(lambda: positions, original.group_metadata, original.config)
        self._run(self._original.send_offsets(offsets, group))

    partitions_for = blocking(async_producer.Producer.partitions_for)

    def statistics(self) -> ProducerStatistics:
        """Return the producer's current counters."""
        return self._original.statistics()


class _ConsumerSnapshot(NamedTuple):
    """A blocking consumer's positions, and access to its group metadata, for use in the loop thread."""

    positions: Callable[[], Mapping[TopicPartition, int | OffsetAndMetadata]]
    group_metadata: Callable[[], GroupMetadata]
    config: ConsumerConfig


@twin_of(transaction_manager.Transaction)
class Transaction:
    """A transaction for ``with``. The end of the block commits; an exception in the block aborts."""

    def __init__(self, producer: Producer, transaction: transaction_manager.Transaction) -> None:
        self._producer = producer
        self._transaction = transaction

    def __repr__(self) -> str:
        return f"<sync {repr(self._transaction)[1:]}"

    @property
    def is_open(self) -> bool:
        return self._transaction.is_open

    def __enter__(self) -> Self:
        self._producer._run(self._transaction.__aenter__())
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._producer._run(self._leave(error))

    async def _leave(self, error: BaseException | None) -> None:
        if error is None and self._transaction.is_open:
            try:
                await self._producer._drain_all()
            except BaseException as refused:
                await self._leave(refused)
                raise
        elif error is not None:
            self._producer._refuse_queued(TransactionAbortedError(_ABORTED_WHILE_QUEUED))
        await self._transaction.__aexit__(None, error, None)

    def abort(self) -> None:
        self._producer.abort_transaction()

    def send_offsets(
        self, offsets: Consumer | GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        self._producer.send_offsets(offsets, group)
