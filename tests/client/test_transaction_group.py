"""Transaction groups (many writers, one decision), and blocking transactions: with a real broker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from kafkalite import Broker, Consumer, Producer, TransactionGroup, TransactionGroupWriter, sync
from kafkalite.client.producer.transaction_group import NO_BATCH, GroupResult, PreparedWriter
from kafkalite.errors import (
    CommitFailedError,
    FinishedBatchError,
    InvalidTxnStateError,
    KafkaliteError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionalIdNotFoundError,
    TransactionStateError,
)
from kafkalite.model import TopicPartition

T0 = TopicPartition("t", 0)


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(listeners="inproc://") as running:
        yield running


def _writer(
    broker: Any, batch: int, member: str, app: str = "app", **settings: Any
) -> TransactionGroupWriter:
    return TransactionGroupWriter(app, batch, member, broker.bootstrap_servers, linger_ms=0, **settings)


def _group(broker: Any, app: str = "app") -> TransactionGroup:
    return TransactionGroup(app, broker.bootstrap_servers)


async def _write(broker: Any, batch: int, member: str, *values: bytes) -> PreparedWriter:
    async with _writer(broker, batch, member) as writer:
        await writer.send_many("t", list(values))
        prepared = await writer.prepare()
        assert prepared is not None
        return prepared


async def _committed(broker: Any, count: int, topic: str = "t") -> list[bytes | None]:
    """Return the ``count`` records that a read_committed consumer receives, and check that there are no
    more.
    """
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    values: list[bytes | None] = []
    async with Consumer(topic, bootstrap_servers=broker.bootstrap_servers, **settings) as consumer:
        while len(values) < count:
            records = await consumer.get_many(timeout_ms=3000)
            assert records, f"only {values}"
            values += [record.value for record in records]
        values += [record.value for record in await consumer.get_many(timeout_ms=20)]
    return values


async def test_winners_are_committed_and_all_others_aborted(broker: Any) -> None:
    first, loser, second = [
        await _write(broker, 0, name, name.encode()) for name in ("task-0-0", "task-1-0", "task-1-1")
    ]
    assert PreparedWriter(*json.loads(json.dumps(loser))) == loser, "it can be serialised for the driver"
    async with _group(broker) as group:
        assert "app" in repr(group)
        assert await group.last_batch_id() == NO_BATCH
        result = await group.finish(0, [first, second], wait_ms=3000)
        assert result == GroupResult(0, ("task-0-0", "task-1-1"), False, True)
        assert await _committed(broker, 2) == [b"task-0-0", b"task-1-1"]
        assert await group.last_batch_id() == 0


async def test_a_batch_is_decided_once(broker: Any) -> None:
    prepared = await _write(broker, 3, "w", b"1")
    async with _group(broker) as group:
        await group.finish(3, [prepared])
        again = await group.finish(3, [], wait_ms=3000)
        assert (again.winners, again.is_repeated, again.is_complete) == (("w",), True, True)
        async with _writer(broker, 3, "late") as late:
            assert late.is_finished
            with pytest.raises(FinishedBatchError, match="batch 3"):
                late.send_nowait("t", b"late")
            assert await late.prepare() is None
        with pytest.raises(FinishedBatchError):
            await group.finish(2, [])
        await group.finish(5, [await _write(broker, 5, "w", b"2"), None])
        assert await _committed(broker, 2) == [b"1", b"2"]


async def test_an_application_without_another_batch_is_retired(broker: Any) -> None:
    async with _group(broker) as group:
        with pytest.raises(TransactionalIdNotFoundError):
            await group.retire()
        async with _writer(broker, 0, "w") as writer:
            with pytest.raises(InvalidTxnStateError, match="no batch"):
                await group.retire()
            prepared = await writer.prepare()
        await group.finish(0, [prepared], wait_ms=3000)
        assert [await group.retire(), await group.retire()] == [0, 0]
        again = await group.finish(0, [])
        assert (again.winners, again.is_repeated) == (("w",), True)


async def test_a_new_attempt_replaces_the_previous_one(broker: Any) -> None:
    async with _group(broker) as group, _writer(broker, 0, "w") as zombie:
        await zombie.send("t", b"zombie")
        stale = await _write(broker, 0, "w", b"second")
        with pytest.raises(ProducerFencedError):
            await zombie.send("t", b"zombie")
        fresh = await _write(broker, 0, "w", b"third")
        with pytest.raises(InvalidTxnStateError):
            await group.finish(0, [stale])
        await group.finish(0, [fresh])
    assert await _committed(broker, 1) == [b"third"]


async def test_a_writer_that_does_not_prepare_aborts_what_it_wrote(broker: Any) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with _writer(broker, 0, "fails") as writer:
            await writer.send("t", b"no")
            raise ValueError("mine")
    async with _writer(broker, 0, "forgets") as writer:
        await writer.send("t", b"no")
    async with _writer(broker, 0, "thinks again") as writer:
        await writer.send("t", b"no")
        await writer.abort_transaction()
        with pytest.raises(TransactionAbortedError, match="open a new writer"):
            await writer.send("t", b"no")
    async with Producer(broker.bootstrap_servers) as plain:
        await plain.send("t", b"plain")
    assert await _committed(broker, 1) == [b"plain"], "nothing holds the last stable offset back"


async def test_calls_that_a_writer_refuses(broker: Any) -> None:
    async with _writer(broker, 0, "w", max_request_size=1000) as writer:
        for call in (writer.begin_transaction(), writer.commit_transaction(), writer.send_offsets({}, "g")):
            with pytest.raises(TransactionStateError, match="group"):
                await call
        await writer.send("t", b"1")
        prepared = await writer.prepare()
        assert await writer.prepare() == prepared
        with pytest.raises(TransactionStateError):
            await writer.send("t", b"2")
    with pytest.raises(InvalidTxnStateError, match="application"):
        await Producer(broker.bootstrap_servers, transactional_id="app").start()


async def test_a_writer_with_a_failed_record_can_not_prepare(broker: Any) -> None:
    async with _writer(broker, 0, "w") as writer:
        with pytest.raises(KafkaliteError):
            await writer.send("t", b"1", partition=0)
            await writer.send("no/topic", b"1")
        with pytest.raises(TransactionAbortableError):
            await writer.prepare()


async def test_consume_transform_produce(broker: Any) -> None:
    """Offsets as a mapping, for a group without members (R35): visible after the commit, never after an
    abort.
    """
    async with Producer(broker.bootstrap_servers, transactional_id="ctp", linger_ms=0) as producer:
        async with producer.transaction():
            await producer.send("out", b"1")
            await producer.partitions_for("t")
            await producer.send_offsets({T0: 5}, "readers")
        with pytest.raises(ValueError, match="mine"):
            async with producer.transaction():
                await producer.send("out", b"2")
                await producer.send_offsets({T0: 9}, "readers")
                raise ValueError("mine")
    assert await _committed(broker, 1, "out") == [b"1"]


async def test_exactly_once_through_a_group_of_consumers(broker: Any) -> None:
    """Consume, transform, produce (KIP-447): a failure leaves neither records nor offsets."""
    servers = broker.bootstrap_servers
    async with Producer(servers, linger_ms=0) as source:
        await source.send_many("in", [b"%d" % number for number in range(100)])
    settings: dict[str, Any] = {
        "group_id": "transformers",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "isolation_level": "read_committed",
        "max_poll_records": 10,
    }
    attempts = written = 0
    while written < 100:
        async with (
            Consumer("in", bootstrap_servers=servers, **settings) as consumer,
            Producer(servers, transactional_id="transformer", linger_ms=0) as producer,
        ):
            with contextlib.suppress(ZeroDivisionError):
                while written < 100:
                    records = await consumer.get_many(timeout_ms=3000)
                    async with producer.transaction():
                        attempts += 1
                        for record in records:
                            producer.send_nowait("out", (record.value or b"") + b"!")
                        await producer.send_offsets(consumer)
                        if attempts % 3 == 0:
                            raise ZeroDivisionError  # the consumer starts again at the committed offsets
                    written += len(records)
    assert attempts > 10
    assert await _committed(broker, 100, "out") == [b"%d!" % number for number in range(100)]


async def test_a_consumer_with_auto_commit_is_refused(broker: Any) -> None:
    servers = broker.bootstrap_servers
    async with Producer(servers, transactional_id="z", linger_ms=0) as producer:
        await producer.partitions_for("in")
        consumer = Consumer("in", bootstrap_servers=servers, group_id="g")
        async with consumer, producer.transaction():
            with pytest.raises(TransactionStateError, match="enable_auto_commit=False"):
                await producer.send_offsets(consumer)


async def test_offsets_of_an_expelled_member_are_refused_r35(broker: Any) -> None:
    servers = broker.bootstrap_servers
    async with Producer(servers, transactional_id="z", linger_ms=0) as producer:
        async with producer.transaction():
            await producer.send("in", b"1")
        consumer = Consumer("in", bootstrap_servers=servers, group_id="g", auto_offset_reset="earliest")
        async with consumer:
            assert await consumer.get_one(timeout_ms=3000) is not None
            zombie = consumer.group_metadata()
            positions = consumer.positions()
        with pytest.raises(CommitFailedError, match="refused"):
            async with producer.transaction():
                await producer.send("out", b"no")
                await producer.send_offsets(positions, zombie)
        async with producer.transaction():
            await producer.send("out", b"yes")
    assert await _committed(broker, 1, "out") == [b"yes"]


async def test_two_producers_of_one_id_one_after_the_other(broker: Any) -> None:
    async with Producer(broker.bootstrap_servers, transactional_id="one", linger_ms=0) as first:
        await first.begin_transaction()
        await first.send("t", b"first")
        async with Producer(broker.bootstrap_servers, transactional_id="one", linger_ms=0) as second:
            async with second.transaction():
                await second.send("t", b"second")
            with pytest.raises(ProducerFencedError):
                await first.commit_transaction()
    assert await _committed(broker, 1) == [b"second"]


async def test_many_transactions_in_a_row(broker: Any) -> None:
    async with Producer(broker.bootstrap_servers, transactional_id="row") as producer:
        deliveries = []
        for number in range(50):
            async with producer.transaction() as transaction:
                deliveries += [producer.send_nowait("t", b"%d" % number) for _ in range(3)]
                if number % 5 == 0:
                    await transaction.abort()
    for number, delivery in enumerate(deliveries):
        error = delivery.exception()
        assert error is None or (isinstance(error, TransactionAbortedError) and number // 3 % 5 == 0)
    expected = [b"%d" % number for number in range(50) if number % 5 for _ in range(3)]
    assert await _committed(broker, len(expected)) == expected


async def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced_r34(broker: Any) -> None:
    slow = Producer(broker.bootstrap_servers, transactional_id="slow", transaction_timeout_ms=1, linger_ms=0)
    async with slow as producer:
        await producer.begin_transaction()
        await producer.send("t", b"no")
        async with Producer(broker.bootstrap_servers) as plain:
            await plain.send("t", b"yes")
        assert await _committed(broker, 1) == [b"yes"]
        with pytest.raises(ProducerFencedError, match="fenced"):
            await producer.commit_transaction()


# --- blocking --------------------------------------------------------------------------------------


@pytest.fixture
def blocking() -> Iterator[sync.Broker]:
    with sync.Broker(listeners="inproc://") as running:
        yield running


def _read(broker: sync.Broker, count: int) -> list[bytes | None]:
    with sync.Consumer(
        "t",
        bootstrap_servers=broker.bootstrap_servers,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    ) as consumer:
        values: list[bytes | None] = []
        while len(values) < count:
            records = consumer.get_many(timeout_ms=3000)
            assert records
            values += [record.value for record in records]
    return values


def test_blocking_transactions(blocking: sync.Broker) -> None:
    with sync.Producer(blocking.bootstrap_servers, transactional_id="s") as producer:
        with pytest.raises(TransactionStateError):
            producer.send("t", b"outside")
        with producer.transaction() as transaction:
            assert transaction.is_open and "in a transaction" in repr(transaction)
            sent = [producer.send("t", b"%d" % number) for number in range(100)]
        assert [pending.result(0).offset for pending in sent] == list(range(100))
        with pytest.raises(ValueError, match="mine"), producer.transaction():
            pending = producer.send("t", b"no")
            raise ValueError("mine")
        assert isinstance(pending.exception(1), TransactionAbortedError)
        with producer.transaction() as transaction:
            producer.send("t", b"no")
            transaction.abort()
        producer.begin_transaction()
        producer.send("t", b"last")
        producer.send_offsets({T0: 3}, "readers")
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send("t", b"no")
        producer.abort_transaction()
    assert _read(blocking, 101) == [*[b"%d" % number for number in range(100)], b"last"]


def test_offsets_of_a_blocking_consumer_follow_returned_records(blocking: sync.Broker) -> None:
    servers = blocking.bootstrap_servers
    settings: dict[str, Any] = {
        "bootstrap_servers": servers,
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with sync.Producer(servers, transactional_id="s") as producer:
        with producer.transaction():
            producer.send_many("t", [b"%d" % number for number in range(10)])
        with sync.Consumer("t", **settings) as consumer, producer.transaction():
            for record in consumer:
                producer.send("out", record.value)
                if record.offset == 3:
                    break
            producer.send_offsets(consumer)
    with sync.Consumer("t", **settings) as consumer:
        record = consumer.get_one(timeout_ms=3000)
        assert record is not None and record.offset == 4


def test_a_blocking_transaction_with_a_failed_record_is_aborted(blocking: sync.Broker) -> None:
    with sync.Producer(blocking.bootstrap_servers, transactional_id="s") as producer:
        with pytest.raises(TransactionAbortableError), producer.transaction():
            producer.send("t", b"no")
            producer.send("t", "text")  # type: ignore[arg-type]
        with producer.transaction():
            producer.send("t", b"yes")
    assert _read(blocking, 1) == [b"yes"]


def test_a_blocking_group(blocking: sync.Broker) -> None:
    servers = blocking.bootstrap_servers
    prepared = []
    for task in range(2):
        with sync.TransactionGroupWriter("app", 0, f"task-{task}", servers) as writer:
            assert not writer.is_finished
            writer.send("t", b"%d" % task)
            writer.send_many("t", [b"many"])
            prepared.append(writer.prepare())
    with sync.TransactionGroup("app", servers) as group:
        assert group.finish(0, prepared[:1], wait_ms=3000).is_complete
        assert group.last_batch_id() == 0
        assert "app" in repr(group)
    assert _read(blocking, 2) == [b"0", b"many"]
