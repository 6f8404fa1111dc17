"""The awaitables that a producer returns for records and batches.

A ``Delivery`` is a batch and an index in it. A future is created only when one is awaited. All
deliveries of a batch complete with the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

from kafkalite.client.cluster.connection import wake
from kafkalite.client.producer.pending_batch import (
    WHOLE_BATCH,
    PendingBatch,
)
from kafkalite.model import NO_OFFSET, RecordMetadata

DeliveryCallback = Callable[["Delivery"], object]
"""Called once per record, on the event loop, with its delivery, which is done by then."""


class BatchMetadata(NamedTuple):
    """The position of an acknowledged batch. ``base_offset`` is NO_OFFSET (-1) with ``acks=0``."""

    topic: str
    partition: int
    base_offset: int
    record_count: int
    timestamp_ms: int  #: of its first record; the append time if the topic uses it

    @property
    def last_offset(self) -> int:
        """Return the last offset, inclusive; NO_OFFSET with ``acks=0``."""
        return NO_OFFSET if self.base_offset == NO_OFFSET else self.base_offset + self.record_count - 1


class Delivery:
    """The future of one record sent with ``send_nowait``.

    Await it, add a callback, or leave it to flush(). Cancelling a task that awaits it does not cancel
    the record, which shares a batch with others.
    """

    __slots__ = ("batch", "index")

    batch: PendingBatch
    index: int

    def __init__(self, batch: PendingBatch, index: int) -> None:
        self.batch = batch
        self.index = index

    def __repr__(self) -> str:
        batch = self.batch
        if not batch.done:
            return f"<Delivery to {_place(batch)}, pending>"
        if batch.error is not None:
            return f"<Delivery to {_place(batch)}, failed: {batch.error}>"
        return f"<Delivery to {_place(batch)}, acknowledged at offset {self._offset()}>"

    def done(self) -> bool:
        return self.batch.done

    def result(self) -> RecordMetadata:
        """Return the position. Raises the record's error, or asyncio.InvalidStateError while pending."""
        error = self.exception()
        if error is not None:
            raise error.with_traceback(None)
        return self._metadata()

    def exception(self) -> Exception | None:
        """Return the error, or None if acknowledged. Raises InvalidStateError while pending."""
        batch = self.batch
        if not batch.done:
            raise asyncio.InvalidStateError(f"{self!r}: await it, or wait for flush()")
        self._see()
        return batch.error

    def add_callback(self, callback: DeliveryCallback) -> None:
        """Call ``callback(delivery)`` once the record is acknowledged or failed. The error counts as seen."""
        if self.batch.done:
            self._see()
            asyncio.get_running_loop().call_soon(callback, self)
        else:
            self.batch.listeners.append((self.index, partial(callback, self)))

    def _see(self) -> None:
        if self.batch.error is not None:
            self.batch.observed.add(self.index)

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        if not self.batch.done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.batch.listeners.append((self.index, partial(wake, waiter)))
            yield from waiter
        return self.result()

    def _offset(self) -> int:
        base_offset = self.batch.base_offset
        return base_offset if base_offset == NO_OFFSET else base_offset + self.index

    def _metadata(self) -> RecordMetadata:
        batch = self.batch
        return RecordMetadata(batch.topic, batch.partition, self._offset(), batch.timestamp_ms(self.index))


class BatchDelivery:
    """The future of one batch queued with ``queue_batch``. Await it, or leave it to flush()."""

    __slots__ = ("batch",)

    def __init__(self, batch: PendingBatch) -> None:
        self.batch = batch

    def __repr__(self) -> str:
        return f"<BatchDelivery of {self.batch!r}>"

    def done(self) -> bool:
        return self.batch.done

    def result(self) -> BatchMetadata:
        """Return the batch's position. Raises its error, or asyncio.InvalidStateError while it is pending."""
        if not self.batch.done:
            raise asyncio.InvalidStateError(f"{self!r}: await it, or wait for flush()")
        return batch_metadata(self.batch)

    def exception(self) -> Exception | None:
        """Return the error, or None if acknowledged. Raises InvalidStateError while pending."""
        if not self.batch.done:
            raise asyncio.InvalidStateError(f"{self!r}: await it, or wait for flush()")
        if self.batch.error is not None:
            self.batch.observe_all()
        return self.batch.error

    def __await__(self) -> Generator[Any, None, BatchMetadata]:
        yield from wait_done(self.batch).__await__()
        return batch_metadata(self.batch)


def _place(batch: PendingBatch) -> str:
    return batch.topic if batch.partition < 0 else f"{batch.topic}-{batch.partition}"


async def wait_done(batch: PendingBatch) -> None:
    """Return when ``batch`` is done, with or without an error. Cancelling this does not affect the batch."""
    if not batch.done:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.listeners.append((WHOLE_BATCH, partial(wake, waiter)))
        await waiter


def batch_metadata(batch: PendingBatch) -> BatchMetadata:
    """Return the metadata of a completed batch. Raises its error, which then counts as seen."""
    assert batch.done, "wait for it first"
    if batch.error is not None:
        batch.observe_all()
        raise batch.error.with_traceback(None)
    return BatchMetadata(
        batch.topic, batch.partition, batch.base_offset, batch.record_count, batch.timestamp_ms(0)
    )
