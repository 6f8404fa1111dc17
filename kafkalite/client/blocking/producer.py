"""The blocking twin of Producer: a thin face over the same object in a loop thread.

Single records cross between the threads in bulk: what ``Producer.send`` takes is queued and the loop woken
once for many.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from kafkalite.client.blocking.consumer import Consumer as Consumer
from kafkalite.client.blocking.transaction import ABORTED_WHILE_QUEUED, GivenPositions, Transaction
from kafkalite.client.config import BootstrapServers, ProducerSettings
from kafkalite.client.producer import producer as async_producer
from kafkalite.client.producer.delivery import (
    BatchDelivery,
    BatchMetadata,
    Delivery,
    DeliveryCallback,
    wait_done,
)
from kafkalite.client.producer.sender import ProducerStatistics
from kafkalite.client.producer.transaction_manager import GroupConsumer, Offsets
from kafkalite.clock import Clock
from kafkalite.errors import BufferFullError, ClientClosedError, TransactionAbortedError
from kafkalite.loop_thread import LoopThread, shared_loop_thread
from kafkalite.model import GroupMetadata, Headers, RecordMetadata, TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder
from kafkalite.rng import Rng

T = TypeVar("T")

# Records that wait to cross into the loop; a sender in front of a full line waits too.
MAX_OUTBOX_RECORDS: Final = 20_000


class _Face:
    """What the twins share: the loop thread, and opening and closing."""

    def __init__(self) -> None:
        self._thread: LoopThread = shared_loop_thread()

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return self._thread.run(coroutine, timeout_s)


class PendingDelivery:
    """The future of one record: ``result(timeout)`` waits for its acknowledgement."""

    __slots__ = ("_delivery", "_producer", "_record")

    def __init__(self, producer: Producer, record: tuple[Any, ...]) -> None:
        self._producer = producer
        self._record: tuple[Any, ...] | None = record
        self._delivery: Delivery | None = None  # set in the loop thread, once

    def __repr__(self) -> str:
        return (
            "<PendingDelivery, queued>" if self._delivery is None else f"<Pending{repr(self._delivery)[1:]}"
        )

    def done(self) -> bool:
        return self._delivery is not None and self._delivery.done()

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record stands. Raises its error, and TimeoutError after ``timeout`` seconds."""
        return self._wait(timeout).result()

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Why the record failed, or None. Raises TimeoutError after ``timeout`` seconds."""
        return self._wait(timeout).exception()

    def add_callback(self, callback: Callable[[PendingDelivery], object]) -> None:
        """Have ``callback(self)`` called once, in kafkalite's thread: it must not block."""
        self._producer._thread.loop.call_soon_threadsafe(self._add_callback, callback)

    def _add_callback(self, callback: Callable[[PendingDelivery], object]) -> None:
        if self._delivery is None:
            self._producer._thread.loop.call_soon(self._add_callback, callback)
        else:
            self._delivery.add_callback(lambda _: callback(self))

    def _wait(self, timeout: float | None) -> Delivery:
        if not self.done():
            self._producer._run(self._until_done(), timeout)
        assert self._delivery is not None, "its record has crossed"
        return self._delivery

    async def _until_done(self) -> None:
        while self._delivery is None:
            await self._producer._next_crossing()
        while not self._delivery.done():  # a record of a topic not known yet changes its batch once
            await wait_done(self._delivery.batch)


class PendingBatchDelivery:
    """The future of one batch: ``result(timeout)`` waits for its acknowledgement."""

    __slots__ = ("_delivery", "_producer")

    def __init__(self, producer: Producer, delivery: BatchDelivery) -> None:
        self._producer = producer
        self._delivery = delivery

    def __repr__(self) -> str:
        return f"<Pending{repr(self._delivery)[1:]}"

    def done(self) -> bool:
        return self._delivery.done()

    def result(self, timeout: float | None = None) -> BatchMetadata:
        """Where the batch stands. Raises its error, and TimeoutError after ``timeout`` seconds."""
        self._wait(timeout)
        return self._delivery.result()

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Why the batch failed, or None. Raises TimeoutError after ``timeout`` seconds."""
        self._wait(timeout)
        return self._delivery.exception()

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            self._producer._run(wait_done(self._delivery.batch), timeout)


class Producer(_Face):
    """Sends records to topics; the blocking twin of ``kafkalite.Producer``, with the same arguments.

    ::

        with Producer("localhost:9092") as producer:
            pending = producer.send("orders", b"...", key=b"42")
            print(pending.result(timeout=10).offset)

    May be used by several threads at once; the records of each keep their order.
    """

    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        partitioner: async_producer.PartitionerChoice | None = None,
        on_delivery: DeliveryCallback | None = None,
        config: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        super().__init__()
        self._begin_with(
            async_producer.Producer(
                bootstrap_servers,
                partitioner=partitioner,
                on_delivery=on_delivery,
                config=config,
                clock=clock,
                rng=rng,
                **settings,
            )
        )

    def _begin_with(self, producer: async_producer.Producer) -> None:
        self._producer = producer
        self._outbox: deque[PendingDelivery] = deque()
        self._is_crossing = False
        self._crossed: asyncio.Future[None] | None = None
        self._waiting_for_room: asyncio.Task[None] | None = None
        self._has_room = threading.Condition()
        self._closed = False

    def __repr__(self) -> str:
        return f"<sync {repr(self._producer)[1:-1]}, {len(self._outbox)} records queued>"

    def start(self) -> Self:
        self._run(self._producer.start())
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True
            self._run(self._exit(kind, error, trace))

    async def _exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cross()
        await self._producer.__aexit__(kind, error, trace)
        self._refuse_queued()

    def close(self, timeout: float | None = None) -> None:
        """Deliver what was accepted, then close, as ``kafkalite.Producer.close``. ``timeout`` in seconds."""
        self._closed = True
        self._run(self._close(timeout))

    async def _close(self, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._all_crossed()
        except TimeoutError:
            timeout = 0
        try:
            await self._producer.close(None if timeout is None else int(timeout * 1000))
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
        """Queue one record and return at once; ``result()`` waits for its acknowledgement.

        Waits while the queue is full, up to max.block.ms, then raises BufferFullError. A record that can't be
        sent (too large, not bytes) tells so by its result.
        """
        if self._closed:
            raise ClientClosedError("the producer is closed")
        if self._producer.config.transactional_id is not None:
            self._producer.check_may_send()
        outbox = self._outbox
        if len(outbox) >= MAX_OUTBOX_RECORDS:
            self._wait_for_room()
        pending = PendingDelivery(self, (topic, value, key, partition, timestamp_ms, headers))
        outbox.append(pending)
        if not self._is_crossing:  # set before the loop is woken, cleared before it looks: none is missed
            self._is_crossing = True
            self._thread.loop.call_soon_threadsafe(self._cross)
        return pending

    def _wait_for_room(self) -> None:
        timeout_s = self._producer.config.max_block_ms / 1000
        with self._has_room:
            if not self._has_room.wait_for(lambda: len(self._outbox) < MAX_OUTBOX_RECORDS, timeout_s):
                raise BufferFullError(
                    f"{len(self._outbox)} records are queued and none went for {timeout_s:g} s",
                    hint="the brokers take less than is sent; raise buffer.memory or max.block.ms",
                )

    def _cross(self) -> None:
        """In the loop: hand queued records to the producer, as long as it takes them."""
        self._is_crossing = False
        outbox, send_nowait = self._outbox, self._producer.send_nowait
        while outbox:
            pending = outbox[0]
            assert pending._record is not None
            topic, value, key, partition, timestamp_ms, headers = pending._record
            try:
                pending._delivery = send_nowait(
                    topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
                )
            except BufferFullError:
                if self._waiting_for_room is None:
                    self._waiting_for_room = asyncio.ensure_future(self._cross_when_there_is_room())
                break
            except Exception as error:
                pending._delivery = self._producer.refuse(topic, error)
            pending._record = None
            outbox.popleft()
        crossed, self._crossed = self._crossed, None
        if crossed is not None and not crossed.done():
            crossed.set_result(None)
        with self._has_room:
            self._has_room.notify_all()

    async def _cross_when_there_is_room(self) -> None:
        try:
            await self._producer.wait_for_room()
        except BufferFullError as error:
            first = self._outbox.popleft()
            first._delivery = self._producer.refuse(first._record[0] if first._record else "", error)
        except ClientClosedError:
            return
        finally:
            self._waiting_for_room = None
        self._cross()

    async def _next_crossing(self) -> None:
        if self._crossed is None:
            self._crossed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._crossed)

    async def _all_crossed(self) -> None:
        self._cross()
        while self._outbox:
            await self._next_crossing()

    def _refuse_queued(self, error: Exception | None = None) -> None:
        error = error or ClientClosedError("the producer was closed while the record was queued")
        while self._outbox:
            pending = self._outbox.popleft()
            pending._delivery = self._producer.refuse(pending._record[0] if pending._record else "", error)
        self._cross()

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
        """Send one record and return when it is acknowledged as ``acks`` says."""
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
        """Send columns of records behind what is queued, and return when all are acknowledged."""

        async def send() -> list[BatchMetadata]:
            await self._all_crossed()
            return await self._producer.send_many(
                topic, values, keys, partition=partition, timestamps_ms=timestamps_ms, headers=headers
            )

        return self._run(send(), timeout)

    def send_batch(
        self,
        topic: str,
        partition: int,
        batch: RecordBatchBuilder | RecordBatch | bytes | bytearray | memoryview,
        *,
        timeout: float | None = None,
    ) -> BatchMetadata:
        """Send a batch built elsewhere behind what is queued, and return when it is acknowledged."""

        async def send() -> BatchMetadata:
            await self._all_crossed()
            return await self._producer.send_batch(topic, partition, batch)

        return self._run(send(), timeout)

    def queue_batch(
        self,
        topic: str,
        partition: int,
        batch: RecordBatchBuilder | RecordBatch | bytes | bytearray | memoryview,
        *,
        timeout: float | None = None,
    ) -> PendingBatchDelivery:
        """As ``send_batch``, but return as soon as buffer.memory has room for the batch.

        ``result()`` of what is returned waits for the acknowledgement, ``flush()`` for that of everything.
        Raises BufferFullError after max.block.ms.
        """

        async def queue() -> BatchDelivery:
            await self._all_crossed()
            return await self._producer.queue_batch(topic, partition, batch)

        return PendingBatchDelivery(self, self._run(queue(), timeout))

    def flush(self, timeout: float | None = None) -> None:
        """Return when all that was sent is acknowledged. Raises DeliveryFailedError, TimeoutError."""

        async def flush() -> None:
            await self._all_crossed()
            await self._producer.flush()

        self._run(flush(), timeout)

    # --- transactions --------------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """``with producer.transaction():``, as ``kafkalite.Producer.transaction``."""
        return Transaction(self._producer.transaction(), self._run, self._all_crossed, self._refuse_queued)

    def begin_transaction(self) -> None:
        self._run(self._producer.begin_transaction())

    def commit_transaction(self, timeout: float | None = None) -> None:
        """As ``kafkalite.Producer.commit_transaction``, of all that was sent until now."""

        async def commit() -> None:
            await self._all_crossed()
            await self._producer.commit_transaction()

        self._run(commit(), timeout)

    def abort_transaction(self) -> None:
        """As ``kafkalite.Producer.abort_transaction``; what is queued is not sent."""

        async def abort() -> None:
            self._refuse_queued(TransactionAbortedError(ABORTED_WHILE_QUEUED))
            await self._producer.abort_transaction()

        self._run(abort())

    def send_offsets(
        self, offsets: Consumer | GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        """As ``kafkalite.Producer.send_offsets``; of a blocking Consumer, what it has given."""
        if isinstance(offsets, Consumer):
            offsets = GivenPositions(
                offsets.positions(), offsets._consumer.group_metadata, offsets._consumer.config
            )
        self._run(self._producer.send_offsets(offsets, group))

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        return self._run(self._producer.partitions_for(topic))

    def statistics(self) -> ProducerStatistics:
        return self._producer.statistics()
