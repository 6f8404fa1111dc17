"""The awaitables that a producer returns for records and batches.

A ``Delivery`` refers to a batch and to an index in it. A future is created only for a delivery that is
awaited. All deliveries of a batch complete together with the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from kafkalite.client.cluster.signal import Waker
from kafkalite.client.producer.pending_batch import WHOLE_BATCH, PendingBatch
from kafkalite.model import NO_OFFSET, RecordMetadata

R = TypeVar("R")

DeliveryCallback = Callable[["Delivery"], object]
"""Called on the event loop with a record's delivery when the record is acknowledged or has failed."""


class BatchMetadata(NamedTuple):
    """The position of an acknowledged batch. ``base_offset`` is NO_OFFSET (-1) with ``acks=0``."""

    topic: str
    partition: int
    base_offset: int
    record_count: int
    timestamp_ms: int  #: the timestamp of the first record; the append time if the topic uses it

    @property
    def last_offset(self) -> int:
        """The last offset (inclusive); NO_OFFSET with ``acks=0``."""
        return NO_OFFSET if self.base_offset == NO_OFFSET else self.base_offset + self.record_count - 1


class PendingResult(Generic[R]):
    """The result of a record (Delivery) or a batch (BatchDelivery), pending until it succeeds or fails."""

    __slots__ = ("batch",)

    batch: PendingBatch
    index: int  #: of the record, or WHOLE_BATCH

    def done(self) -> bool:
        return self.batch.done

    def result(self) -> R:
        """Return the position in the log. Raises the send's error, or InvalidStateError while pending."""
        error = self.exception()
        if error is not None:
            raise error.with_traceback(None)
        return self._metadata()

    def exception(self) -> Exception | None:
        """Return the send's error, or None if it succeeded. Raises InvalidStateError while pending."""
        if not self.batch.done:
            raise asyncio.InvalidStateError(f"{self!r}: await it, or wait for flush()")
        self._see()
        return self.batch.error

    def _see(self) -> None:
        if self.batch.error is not None:
            self.batch.observe(self.index)

    def _metadata(self) -> R:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, R]:
        if not self.batch.done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.batch.listeners.append((self.index, Waker(waiter)))
            yield from waiter
        return self.result()


class Delivery(PendingResult[RecordMetadata]):
    """The future of one record sent with ``send_nowait``.

    Await it, add a callback, or call ``Producer.flush``. Cancelling a task that awaits it does not cancel the
    record, because other records share its batch. ``flush`` and ``close`` report the record if it fails.
    """

    __slots__ = ("index",)

    index: int

    def __init__(self, batch: PendingBatch, index: int) -> None:
        self.batch = batch
        self.index = index

    def __repr__(self) -> str:
        batch, state = self.batch, "pending"
        if batch.error is not None:
            state = f"failed: {batch.error}"
        elif batch.done:
            state = f"acknowledged at offset {self._metadata().offset}"
        where = batch.topic if batch.partition < 0 else f"{batch.topic}-{batch.partition}"
        return f"<Delivery to {where}, {state}>"

    def add_callback(self, callback: DeliveryCallback) -> None:
        """Call ``callback(delivery)`` after success or failure. ``flush`` and ``close`` then do not report a
        failure of this record."""
        if self.batch.done:
            self._see()
            asyncio.get_running_loop().call_soon(callback, self)
        else:
            self.batch.listeners.append((self.index, partial(callback, self)))

    def _metadata(self) -> RecordMetadata:
        return record_metadata(self.batch, self.index)


def record_metadata(batch: PendingBatch, index: int) -> RecordMetadata:
    """Return the position of a record of a completed batch. The offset is NO_OFFSET if the batch failed, and
    with acks=0."""
    offset = batch.base_offset if batch.base_offset == NO_OFFSET else batch.base_offset + index
    return RecordMetadata(batch.topic, batch.partition, offset, batch.timestamp_ms(index))


class BatchDelivery(PendingResult[BatchMetadata]):
    """The future of one batch queued with ``queue_batch``. Await it, or call ``Producer.flush``."""

    __slots__ = ()

    index = WHOLE_BATCH

    def __init__(self, batch: PendingBatch) -> None:
        self.batch = batch

    def __repr__(self) -> str:
        return f"<BatchDelivery of {self.batch!r}>"

    def _metadata(self) -> BatchMetadata:
        batch = self.batch
        return BatchMetadata(
            batch.topic, batch.partition, batch.base_offset, batch.record_count, batch.timestamp_ms(0)
        )


async def wait_done(batch: PendingBatch) -> None:
    """Wait until ``batch`` is acknowledged or has failed. Cancelling the wait does not affect the batch."""
    if not batch.done:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.listeners.append((WHOLE_BATCH, Waker(waiter)))
        await waiter
