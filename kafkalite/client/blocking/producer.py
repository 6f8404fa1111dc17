"""The blocking twin of Producer, which uses a Producer in the loop thread.

``Producer.send`` queues a record, and wakes the loop thread once for many records.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar, Unpack

from kafkalite.client.blocking.consumer import Consumer
from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.client.cluster.signal import Signal
from kafkalite.client.config import BootstrapServers, ConfigSource, ConsumerConfig, ProducerSettings
from kafkalite.client.forgotten import CLOSE_FORGOTTEN_MS
from kafkalite.client.interceptors import ProducerInterceptor
from kafkalite.client.producer import producer as async_producer
from kafkalite.client.producer import transaction_manager
from kafkalite.client.producer.bulk_sender import AnyBatch
from kafkalite.client.producer.delivery import (
    BatchDelivery,
    BatchMetadata,
    Delivery,
    DeliveryCallback,
    PendingResult,
    wait_done,
)
from kafkalite.client.producer.sender import ProducerStatistics
from kafkalite.client.producer.transaction_manager import GroupConsumer, Offsets
from kafkalite.clock import Clock
from kafkalite.errors import BufferFullError, ClientClosedError, KafkaliteError, TransactionAbortedError
from kafkalite.loop_thread import SIGNAL_TURN_S, forked
from kafkalite.model import (
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    RecordHeaders,
    RecordMetadata,
    TopicPartition,
)
from kafkalite.rng import Rng
from kafkalite.serde import AnySerializer, K, V

logger = logging.getLogger(__name__)

D = TypeVar("D", bound=PendingResult[Any])
R = TypeVar("R")
T = TypeVar("T")

# At most this many records wait for the loop thread. ``send`` blocks while the queue is full.
MAX_QUEUED_RECORDS: Final = 20_000

_open: Final[weakref.WeakSet[Producer[Any, Any]]] = weakref.WeakSet()


# Functions registered later run earlier: this one must run before the loop thread is closed at exit.
@atexit.register
def _close_forgotten() -> None:
    """Deliver the records of producers that were never closed. Log the errors of lost records."""
    closing: list[Future[None]] = []
    for producer in list(_open):
        if producer._is_open and producer._original.is_open:
            producer._is_open = False
            close = producer._close(CLOSE_FORGOTTEN_MS / 1000)
            closing.append(asyncio.run_coroutine_threadsafe(close, producer._thread.loop))
    for future in closing:  # in parallel, so that several unreachable clusters delay the exit only once
        try:
            future.result()
        except KafkaliteError as error:
            logger.error("a producer was never closed, and at the end of the process %s", error)


def _close_forked() -> None:
    for producer in list(_open):
        producer._is_open = False


os.register_at_fork(after_in_child=_close_forked)

# The attributes of an initialized Future, and the lock that guards their creation in a ``_Pending``.
_FUTURE_STATE: Final = frozenset(vars(Future()))
_creating_state: Final = threading.Lock()

_ABORTED_WHILE_QUEUED: Final = "the transaction was aborted while the record was queued"


class _Pending(Future[R], Generic[D, R]):
    """The future of a record or batch. Only the loop thread sets ``_delivery`` of a queued record.

    The state that ``concurrent.futures`` needs (a lock, callbacks) is expensive, so it is created when
    ``wait``, ``as_completed`` or ``add_done_callback`` first uses it. A callback of ``add_done_callback`` is
    called in kafkalite's thread, or at once if the future is done. Such a callback does not keep ``flush``
    from reporting the future's error.
    """

    _producer: Producer[Any, Any]
    _delivery: D | None  #: None while the record is queued; set once

    def __init__(self, producer: Producer[Any, Any], delivery: D | None = None) -> None:
        self._producer = producer
        self._delivery = delivery

    def __repr__(self) -> str:
        return (
            "<PendingDelivery, queued>" if self._delivery is None else f"<Pending{repr(self._delivery)[1:]}"
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _FUTURE_STATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        fresh: Future[R] = Future()
        is_settled = self.done()
        if is_settled:
            self._settle(fresh)
        state = vars(fresh)
        with _creating_state:  # other threads see all of the state at once
            is_first = name not in self.__dict__
            if is_first:
                self.__dict__.update(state)
        if is_first and not is_settled:
            self._settling = asyncio.run_coroutine_threadsafe(
                self._settle_when_done(), self._producer._thread.loop
            )
        return self.__dict__[name]

    async def _settle_when_done(self) -> None:
        await self._until_done()
        self._settle(self)

    def _settle(self, future: Future[R]) -> None:
        """Set the result or error of ``future``, on which functions of ``concurrent.futures`` may wait."""
        assert self._delivery is not None, "it is done"
        error = self._delivery.batch.error
        if error is None:
            future.set_result(self._delivery.result())
        else:
            future.set_exception(error)

    def done(self) -> bool:
        """Whether the record or batch was acknowledged or has failed."""
        return self._delivery is not None and self._delivery.done()

    def cancel(self) -> bool:
        """Return False: an accepted record can't be cancelled, because other records share its batch."""
        return False

    def result(self, timeout: float | None = None) -> R:
        """Wait, and return the position in the log. Raises the send's error, or TimeoutError.

        TimeoutError is raised after ``timeout`` seconds (None: no limit).
        """
        result: R = self._wait(timeout).result()
        return result

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, and return the send's error, or None if it succeeded.

        Raises TimeoutError after ``timeout`` seconds (None: no limit).
        """
        return self._wait(timeout).exception()

    def _wait(self, timeout: float | None) -> D:
        if not self.done():
            self._producer._run(self._until_done(), timeout)
        assert self._delivery is not None, "its record has left the queue"
        return self._delivery

    async def _until_done(self) -> None:
        while self._delivery is None:
            await self._producer._drained.wait()
        while not self._delivery.done():  # a record of a new topic moves to another batch once
            await wait_done(self._delivery.batch)


class PendingDelivery(_Pending[Delivery, RecordMetadata]):
    """The ``concurrent.futures.Future`` of one record. ``result(timeout)`` waits for its acknowledgement."""

    def __init__(self, producer: Producer[Any, Any], record: tuple[Any, ...]) -> None:
        self._producer = producer
        self._record: tuple[Any, ...] | None = record
        self._delivery = None

    def add_callback(self, callback: Callable[[PendingDelivery], object]) -> None:
        """Call ``callback(self)`` in kafkalite's thread after success or failure.

        The callback must not block. A failure of this record is then not reported by ``flush``.
        """
        asyncio.run_coroutine_threadsafe(self._add_callback(callback), self._producer._thread.loop)

    async def _add_callback(self, callback: Callable[[PendingDelivery], object]) -> None:
        while self._delivery is None:
            await self._producer._drained.wait()
        self._delivery.add_callback(lambda _: callback(self))


class PendingBatchDelivery(_Pending[BatchDelivery, BatchMetadata]):
    """The ``concurrent.futures.Future`` of one batch. ``result(timeout)`` waits for its acknowledgement."""


@twin_of(async_producer.Producer)
class Producer(Twin[async_producer.Producer[K, V]], Generic[K, V]):
    """Sends records to topics. The blocking twin of ``kafkalite.Producer``, with the same arguments.

    ::

        with Producer("localhost:9092") as producer:
            pending = producer.send("orders", b"...", key=b"42")
            print(pending.result(timeout=10).offset)

    Several threads may use one producer at once. The records of each thread keep their order. A producer that
    is never closed is closed at the end of the process. After a fork, the child process must open its own
    producer: ``send`` and ``flush``, for example, raise ForkedClientError on one that the parent opened.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            bootstrap_servers: BootstrapServers | None = None,
            *,
            partitioner: async_producer.PartitionerChoice | None = None,
            on_delivery: DeliveryCallback | None = None,
            key_serializer: AnySerializer[K] | None = None,
            value_serializer: AnySerializer[V] | None = None,
            interceptors: Sequence[ProducerInterceptor] = (),
            config: ConfigSource | None = None,
            clock: Clock | None = None,
            rng: Rng | None = None,
            **settings: Unpack[ProducerSettings],
        ) -> None: ...
    else:

        @opened_with(async_producer.Producer)
        def __init__(self, original):
            self._set_up(original)

    def _set_up(self, original: async_producer.Producer[K, V]) -> None:
        super().__init__(original)
        has_prepared = original.outgoing is not None
        self._pass_on: Callable[..., Delivery] = (
            original.put_prepared if has_prepared else original.send_nowait
        )
        self._is_transactional = original.config.transactional_id is not None
        self._queue: deque[PendingDelivery] = deque()
        self._is_woken = False  # whether the loop thread will drain the queue soon
        self._drained = Signal()
        self._waiting_for_room: asyncio.Task[None] | None = None
        self._has_room = threading.Condition()
        self._is_open: bool | None = None  # None before the start
        _open.add(self)

    def __repr__(self) -> str:
        return f"<sync {repr(self._original)[1:-1]}, {len(self._queue)} records queued>"

    def start(self) -> Self:
        super().start()
        self._is_open = True
        return self

    def stop(self) -> None:
        self.close()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._is_open = False
            self._run(self._exit(error))

    async def _exit(self, error: BaseException | None) -> None:
        self._drain()
        await self._original.__aexit__(None, error, None)
        self._refuse_queued()

    def close(self, timeout: float | None = None) -> None:
        """Deliver all accepted records, then close the connections. May be called twice.

        After ``timeout`` seconds, undelivered records fail with ClientClosedError. If ``timeout`` is None,
        only the timeouts of the records themselves limit the time. An open transaction is aborted, and its
        undelivered records fail. Raises DeliveryFailedError for failed records whose errors were not
        retrieved.
        """
        self._is_open = False
        if not self._thread.is_forked:
            self._run(self._close(timeout))

    async def _close(self, timeout: float | None) -> None:
        end = None if timeout is None else asyncio.get_running_loop().time() + timeout
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await self._drain_all()
        left_ms = None
        if end is not None:
            left_ms = max(0, int((end - asyncio.get_running_loop().time()) * 1000))
        try:
            await self._original.close(left_ms)
        finally:
            self._refuse_queued()

    def send(
        self,
        topic: str | ProducerRecord,
        value: V | None = None,
        key: K | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> PendingDelivery:
        """Queue one record and return at once. ``result()`` waits for its acknowledgement.

        Interceptors and serializers are called in this thread before ``send`` returns, so ``send`` itself
        raises SerializationError. Waits up to max.block.ms while the queue is full, and then raises
        BufferFullError. The error of a record that cannot be sent (too large, not bytes) is raised by
        ``result()``. Raises ClientClosedError if the producer is not open.
        """
        if not self._is_open:
            raise self._refusal()
        if self._is_transactional:
            self._original.check_may_send()
        queue = self._queue
        if len(queue) >= MAX_QUEUED_RECORDS:
            self._wait_for_room()
        record: tuple[Any, ...] = (topic, value, key, partition, timestamp_ms, headers)
        if self._original.outgoing is not None or isinstance(topic, ProducerRecord):
            record = self._original.prepare_record(topic, value, key, partition, timestamp_ms, headers)
        pending = PendingDelivery(self, record)
        queue.append(pending)
        if not self._is_woken:  # set before waking the loop, cleared before draining: no record is missed
            self._is_woken = True
            self._thread.loop.call_soon_threadsafe(self._drain)
        return pending

    def _refusal(self) -> KafkaliteError:
        if self._thread.is_forked:
            return forked()
        if self._is_open is None:
            return ClientClosedError("the producer is new", hint="open it with 'with' or start()")
        return ClientClosedError("the producer is closed")

    def _wait_for_room(self) -> None:
        timeout_s = self._original.config.max_block_ms / 1000
        ends_at_s = time.monotonic() + timeout_s
        with self._has_room:
            while len(self._queue) >= MAX_QUEUED_RECORDS:
                left_s = ends_at_s - time.monotonic()
                if left_s <= 0:
                    raise BufferFullError(
                        f"{len(self._queue)} records are queued and none was sent for {timeout_s:g} s",
                        hint="the brokers are slower than the sender; raise buffer.memory or max.block.ms",
                    )
                self._has_room.wait(min(left_s, SIGNAL_TURN_S))

    def _drain(self) -> None:
        """In the loop thread: pass queued records to the producer until its buffer is full."""
        self._is_woken = False
        queue, pass_on = self._queue, self._pass_on
        while queue:
            pending = queue[0]
            assert pending._record is not None
            topic, value, key, partition, timestamp_ms, headers = pending._record
            try:
                pending._delivery = pass_on(
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
        topic: str | ProducerRecord,
        value: V | None = None,
        key: K | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
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
        values: Sequence[V | None],
        keys: Sequence[K | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        headers: Sequence[RecordHeaders] | None = None,
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
        self, offsets: Consumer[Any, Any] | GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        if isinstance(offsets, Consumer):
            original, positions = offsets._original, offsets.positions()
            offsets = _ConsumerSnapshot(lambda: positions, original.group_metadata, original.config)
        self._run(self._original.send_offsets(offsets, group))

    def send_offsets_to_transaction(
        self, offsets: Consumer[Any, Any] | GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        self.send_offsets(offsets, group)

    partitions_for = blocking(async_producer.Producer.partitions_for)

    @property
    def is_open(self) -> bool:
        return self._original.is_open and bool(self._is_open)

    def undelivered(self) -> dict[str, int]:
        """Return the number of records of each topic that are neither acknowledged nor failed."""

        async def ask() -> dict[str, int]:
            return self._original.undelivered()

        return self._run_drained(ask)

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

    def __init__(self, producer: Producer[Any, Any], transaction: transaction_manager.Transaction) -> None:
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
        self, offsets: Consumer[Any, Any] | GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        self._producer.send_offsets(offsets, group)
