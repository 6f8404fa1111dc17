"""Deliveries: awaited, with callbacks, inspected; and which failures count as seen."""

from __future__ import annotations

import asyncio

import pytest

from kafkalite.client.producer.delivery import BatchDelivery, BatchMetadata, Delivery, wait_done
from kafkalite.client.producer.pending_batch import PendingBatch
from kafkalite.client.producer.sender import MAX_REMEMBERED_FAILURES, FailureLedger
from kafkalite.errors import ClientClosedError, DeliveryFailedError
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, RecordMetadata


def _batch(count: int = 2, partition: int = 0) -> PendingBatch:
    batch = PendingBatch("t", partition, limit_bytes=1000, limit_records=100)
    for index in range(count):
        batch.append(b"x", None, 100 + index, (), 10)
    batch.close()
    return batch


def _settle(batch: PendingBatch, base_offset: int = NO_OFFSET, error: Exception | None = None) -> None:
    batch.complete(base_offset, NO_TIMESTAMP, error)
    for _, listener in batch.listeners:
        listener()


async def test_all_deliveries_of_a_batch_resolve_together() -> None:
    batch = _batch()
    deliveries = [Delivery(batch, 0), Delivery(batch, 1)]
    waiting = [asyncio.ensure_future(_await(delivery)) for delivery in deliveries]
    await asyncio.sleep(0)
    _settle(batch, 40)
    assert await asyncio.gather(*waiting) == [
        RecordMetadata("t", 0, 40, 100),
        RecordMetadata("t", 0, 41, 101),
    ]
    assert await deliveries[0] == deliveries[0].result(), "awaiting what is done returns at once"


async def _await(delivery: Delivery) -> RecordMetadata:
    return await delivery


async def test_cancelling_one_waiter_leaves_the_others() -> None:
    batch = _batch()
    first, second = (asyncio.ensure_future(_await(Delivery(batch, index))) for index in (0, 1))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    _settle(batch, 7)
    assert (await second).offset == 8
    assert first.cancelled()


async def test_callbacks_are_called_once_with_the_delivery() -> None:
    batch = _batch()
    delivery = Delivery(batch, 1)
    called: list[Delivery] = []
    delivery.add_callback(called.append)
    _settle(batch, 3)
    assert called == [delivery]
    delivery.add_callback(called.append)
    assert called == [delivery]
    await asyncio.sleep(0)
    assert called == [delivery, delivery]


def test_a_pending_delivery_has_no_result() -> None:
    delivery = Delivery(_batch(), 0)
    assert not delivery.done()
    with pytest.raises(asyncio.InvalidStateError, match="await it"):
        delivery.result()


def test_acks_0_has_no_offset() -> None:
    batch = _batch()
    _settle(batch)
    assert Delivery(batch, 1).result().offset == NO_OFFSET
    assert BatchDelivery(batch).result().last_offset == NO_OFFSET


def test_batch_metadata() -> None:
    batch = _batch()
    _settle(batch, 9)
    assert BatchDelivery(batch).result() == BatchMetadata("t", 0, 9, 2, 100)
    assert BatchDelivery(batch).result().last_offset == 10


def test_repr_has_the_state() -> None:
    batch = _batch()
    assert repr(Delivery(batch, 0)) == "<Delivery to t-0, pending>"
    _settle(batch, 9)
    assert repr(Delivery(batch, 1)) == "<Delivery to t-0, acknowledged at offset 10>"
    failed = _batch(partition=-1)
    _settle(failed, error=ClientClosedError("over"))
    assert repr(Delivery(failed, 1)) == "<Delivery to t, failed: over>"


async def test_waiting_for_a_batch_does_not_mark_its_records_as_seen() -> None:
    batch = _batch()
    waiting = asyncio.ensure_future(wait_done(batch))
    await asyncio.sleep(0)
    _settle(batch, error=ClientClosedError("over"))
    await waiting
    await wait_done(batch)
    assert batch.unobserved_count() == 2


async def test_only_unseen_failures_are_reported() -> None:
    ledger = FailureLedger()
    batch = _batch(5)
    Delivery(batch, 0).add_callback(lambda delivery: None)
    waiting = asyncio.ensure_future(_await(Delivery(batch, 1)))
    await asyncio.sleep(0)
    _settle(batch, error=ClientClosedError("over"))
    ledger.add(batch)
    with pytest.raises(ClientClosedError):
        await waiting
    assert isinstance(Delivery(batch, 2).exception(), ClientClosedError)
    Delivery(batch, 3).add_callback(lambda delivery: None)
    with pytest.raises(DeliveryFailedError, match="1 record was not delivered") as failure:
        ledger.raise_unseen()
    assert failure.value.counts == {("t", 0): 1}
    assert isinstance(failure.value.__cause__, ClientClosedError)
    ledger.raise_unseen()


async def test_a_record_whose_waiter_was_cancelled_is_reported() -> None:
    ledger = FailureLedger()
    batch = _batch(3)
    waiting = [asyncio.ensure_future(_await(Delivery(batch, index))) for index in range(3)]
    await asyncio.sleep(0)
    for task in waiting[:2]:
        task.cancel()
    _settle(batch, error=ClientClosedError("over"))
    ledger.add(batch)
    await asyncio.wait(waiting)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    assert isinstance(waiting[2].exception(), ClientClosedError)
    with pytest.raises(DeliveryFailedError, match=r"2 records were not delivered \(t-0: 2\)"):
        ledger.raise_unseen()


def test_a_batch_that_failed_as_a_whole_is_seen_as_a_whole() -> None:
    ledger = FailureLedger()
    batch = _batch(5)
    _settle(batch, error=ClientClosedError("over"))
    ledger.add(batch)
    with pytest.raises(ClientClosedError):
        BatchDelivery(batch).result()
    ledger.raise_unseen()


def test_the_ledger_is_bounded_and_counts_all_the_same() -> None:
    ledger = FailureLedger()
    for partition in range(MAX_REMEMBERED_FAILURES + 50):
        batch = _batch(2, partition % 10)
        _settle(batch, error=ClientClosedError("over"))
        ledger.add(batch)
    with pytest.raises(DeliveryFailedError, match="and 5 more partitions") as failure:
        ledger.raise_unseen()
    assert failure.value.record_count == 2 * (MAX_REMEMBERED_FAILURES + 50)
