"""The blocking twins of Producer and Consumer: thin faces over the same objects in a loop thread.

Single records cross between the threads in bulk: what ``Producer.send`` takes is queued and the loop woken
once for many, and a Consumer's iteration fetches records by the thousand.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from kafkalite.client import consumer as async_consumer
from kafkalite.client import producer as async_producer
from kafkalite.client.config import BootstrapServers, ConsumerSettings, ProducerSettings
from kafkalite.client.delivery import BatchMetadata, Delivery, DeliveryCallback, wait_done
from kafkalite.client.fetch_state import FetchedBatch
from kafkalite.client.loop_thread import LoopThread, shared_loop_thread
from kafkalite.client.sender import ProducerStatistics
from kafkalite.clock import Clock
from kafkalite.errors import BufferFullError, ClientClosedError
from kafkalite.model import Headers, OffsetAndTimestamp, Record, RecordMetadata, TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder
from kafkalite.rng import Rng

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")

# Records that wait to cross into the loop; a sender in front of a full line waits too.
MAX_OUTBOX_RECORDS: Final = 20_000
# Records that iteration takes across at once: the crossing costs about 100 microseconds.
ITERATION_RECORDS: Final = 10_000


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
        self._producer = async_producer.Producer(
            bootstrap_servers,
            partitioner=partitioner,
            on_delivery=on_delivery,
            config=config,
            clock=clock,
            rng=rng,
            **settings,
        )
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

    def _refuse_queued(self) -> None:
        error = ClientClosedError("the producer was closed while the record was queued")
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

    def flush(self, timeout: float | None = None) -> None:
        """Return when all that was sent is acknowledged. Raises DeliveryFailedError, TimeoutError."""

        async def flush() -> None:
            await self._all_crossed()
            await self._producer.flush()

        self._run(flush(), timeout)

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        return self._run(self._producer.partitions_for(topic))

    def statistics(self) -> ProducerStatistics:
        return self._producer.statistics()


class Consumer(_Face):
    """Reads records; the blocking twin of ``kafkalite.Consumer``, with the same arguments.

    For one thread at a time.

    ::

        with Consumer("orders", bootstrap_servers="localhost:9092") as consumer:
            for record in consumer:
                print(record.value)
    """

    def __init__(
        self,
        *topics: str,
        bootstrap_servers: BootstrapServers | None = None,
        pattern: str | re.Pattern[str] | None = None,
        config: Mapping[str, Any] | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        super().__init__()
        self._consumer = async_consumer.Consumer(
            *topics, bootstrap_servers=bootstrap_servers, pattern=pattern, config=config, rng=rng, **settings
        )
        # Records that crossed and were not given yet: those left in the iterator over the list.
        self._crossed: list[Record] = []
        self._left: Iterator[Record] = iter(self._crossed)

    def __repr__(self) -> str:
        return f"<sync {repr(self._consumer)[1:]}"

    def start(self) -> Self:
        self._run(self._consumer.start())
        return self

    def close(self) -> None:
        self._run(self._consumer.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what to read --------------------------------------------------------------------------

    def subscribe(self, *topics: str, pattern: str | re.Pattern[str] | None = None) -> None:
        self._give_back()
        self._call(lambda: self._consumer.subscribe(*topics, pattern=pattern))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._give_back()
        self._call(lambda: self._consumer.assign(partitions))

    def assignment(self) -> list[TopicPartition]:
        return self._consumer.assignment()

    def _call(self, function: Callable[[], T]) -> T:
        """Call something that does not wait, in the loop's thread."""

        async def call() -> T:
            return function()

        return self._run(call())

    # --- where to read -------------------------------------------------------------------------

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to be given, or None before it is known."""
        for record in self._crossed[len(self._crossed) - length_hint(self._left) :]:
            if record.partition == tp.partition and record.topic == tp.topic:
                return record.offset
        return self._consumer.position(tp)

    def _give_back(self) -> None:
        """Records that crossed and were not given: stand before them again."""
        firsts: dict[TopicPartition, int] = {}
        for record in self._left:
            firsts.setdefault(TopicPartition(record.topic, record.partition), record.offset)

        async def seek() -> None:
            for tp, offset in firsts.items():
                await self._consumer.seek(tp, offset)

        if firsts:
            self._run(seek())

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self._give_back()
        self._run(self._consumer.seek(tp, offset))

    def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._give_back()
        self._run(self._consumer.seek_to_beginning(*partitions))

    def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._give_back()
        self._run(self._consumer.seek_to_end(*partitions))

    def seek_to_timestamp(self, tp: TopicPartition, timestamp_ms: int) -> None:
        self._give_back()
        self._run(self._consumer.seek_to_timestamp(tp, timestamp_ms))

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._give_back()
        self._call(lambda: self._consumer.pause(*partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._call(lambda: self._consumer.resume(*partitions))

    def paused(self) -> list[TopicPartition]:
        return self._consumer.paused()

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._run(self._consumer.beginning_offsets(partitions))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._run(self._consumer.end_offsets(partitions))

    def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return self._run(self._consumer.offsets_for_times(timestamps_ms))

    def lag(self) -> dict[TopicPartition, int]:
        ends = self.end_offsets(self.assignment())
        behind = self._run(self._consumer.lag())
        for tp in behind:
            position = self.position(tp)
            if position is not None:
                behind[tp] = max(0, ends[tp] - position)
        return behind

    # --- reading -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Record]:
        """Records without end, as they come. A loop may be left and another begun; none is lost by that."""
        while True:
            yield from self._left
            self._cross(ITERATION_RECORDS, None)

    def _cross(self, max_records: int | None, timeout_ms: int | None) -> None:
        """Take records across. They are kept on this object by the loop's thread, so Ctrl-C loses none."""

        async def take() -> None:
            records = await self._consumer.get_many(max_records, timeout_ms=timeout_ms)
            self._crossed, self._left = records, iter(records)

        self._run(take())

    def get_one(self, *, timeout_ms: int | None = None) -> Record | None:
        records = self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    def get_many(self, max_records: int | None = None, *, timeout_ms: int | None = None) -> list[Record]:
        """Up to ``max_records`` records, as ``kafkalite.Consumer.get_many``."""
        limit = max_records if max_records is not None else self._consumer.config.max_poll_records
        if not length_hint(self._left):
            self._cross(limit, timeout_ms)
        return list(islice(self._left, limit))

    def get_batches(self, *, timeout_ms: int | None = None) -> list[FetchedBatch]:
        self._give_back()
        return self._run(self._consumer.get_batches(timeout_ms=timeout_ms))

    def to_arrow(self, *, timeout_ms: int | None = None) -> pyarrow.Table:
        self._give_back()
        return self._run(self._consumer.to_arrow(timeout_ms=timeout_ms))
