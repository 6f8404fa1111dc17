"""Interceptors see records that are sent, consumed and committed, and never break the client (KIP-42)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from kafkalite import (
    Broker,
    Consumer,
    ConsumerInterceptor,
    OffsetAndMetadata,
    Producer,
    ProducerInterceptor,
    ProducerRecord,
    Record,
    RecordMetadata,
    TopicPartition,
    serde,
    sync,
)
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    DeliveryFailedError,
    RecordTooLargeError,
    SerializationError,
)
from kafkalite.testing import Cluster, delay_next
from proof.waiting import settle

T0 = TopicPartition("t", 0)


class Stamping(ProducerInterceptor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.results: list[tuple[int, int, str]] = []

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return record._replace(headers=[*record.headers, ("via", self.name)])

    def on_acknowledgement(self, metadata: RecordMetadata, error: Exception | None) -> None:
        self.results.append((metadata.partition, metadata.offset, type(error).__name__ if error else ""))


class Broken(ProducerInterceptor, ConsumerInterceptor):
    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        raise ValueError("on_send")

    def on_acknowledgement(self, metadata: RecordMetadata, error: Exception | None) -> None:
        raise ValueError("on_acknowledgement")

    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        raise ValueError("on_consume")

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        raise ValueError("on_commit")


async def test_a_method_without_a_name_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    failing = ProducerInterceptor()
    failing.on_send = Mock(side_effect=ValueError("no"))  # type: ignore[method-assign]
    async with (
        Broker(listeners="inproc://") as broker,
        Producer(broker.bootstrap_servers, interceptors=[failing]) as producer,
    ):
        assert (await producer.send("t", b"x")).offset == 0
    assert "<Mock" in caplog.text


class Forgetful(ProducerInterceptor, ConsumerInterceptor):
    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return None  # type: ignore[return-value]

    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        return None  # type: ignore[return-value]


async def test_a_method_that_returns_nothing_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async with Broker(listeners="inproc://") as broker:
        async with Producer(broker.bootstrap_servers, interceptors=[Forgetful()]) as producer:
            await producer.send("t", b"x")
        async with Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            interceptors=[Forgetful()],
        ) as consumer:
            assert (await consumer.getone()).value == b"x"
            await consumer.seek(T0, 0)
            async for record in consumer:
                assert record.value == b"x"
                break
    assert caplog.text.count("it returned None") == 3


class Hiding(ConsumerInterceptor):
    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        return [record for record in records if record.value != b"hidden"]


async def test_a_wait_for_records_goes_on_if_an_interceptor_hides_them() -> None:
    async with Broker(listeners="inproc://") as broker, Producer(broker.bootstrap_servers) as producer:
        await producer.send_many("t", [b"hidden", b"hidden", b"shown", b"hidden"])
        async with Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            interceptors=[Hiding()],
        ) as consumer:
            assert (await consumer.getone()).offset == 2
            await consumer.seek(T0, 0)
            assert [record.offset for record in await consumer.get_many(1)] == [2]
            assert await consumer.get_one(timeout_ms=1) is None
            assert consumer.position(T0) == 4


class Doubling(ConsumerInterceptor):
    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        return [record._replace(value=record.value + each) for record in records for each in (b"1", b"2")]


@asynccontextmanager
async def _doubling(**settings: Any) -> AsyncIterator[Consumer]:
    """A consumer of the records a and b that gets a1, a2, b1, b2."""
    async with Broker(listeners="inproc://") as broker, Producer(broker.bootstrap_servers) as producer:
        await producer.send_many("t", [b"a", b"b"], partition=0)
        async with Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            interceptors=[Doubling()],
            **settings,
        ) as consumer:
            yield consumer


async def _first(consumer: Consumer) -> bytes | None:
    """Return the value of the first record of a new loop."""
    async with asyncio.timeout(30):
        async for record in consumer:
            return record.value
    return None


@pytest.mark.parametrize("group_id", [None, "g"])
async def test_a_new_loop_continues_between_the_records_made_of_one(group_id: str | None) -> None:
    async with _doubling(group_id=group_id) as consumer:
        assert [await _first(consumer) for _ in range(4)] == [b"a1", b"a2", b"b1", b"b2"]


@pytest.mark.parametrize("group_id", [None, "g"])
async def test_get_one_returns_every_record_made_of_one(group_id: str | None) -> None:
    async with _doubling(group_id=group_id) as consumer, asyncio.timeout(30):
        assert [(await consumer.getone()).value for _ in range(4)] == [b"a1", b"a2", b"b1", b"b2"]
        assert await consumer.get_one(timeout_ms=1) is None


async def test_get_many_keeps_the_records_above_its_limit() -> None:
    async with _doubling() as consumer, asyncio.timeout(30):
        assert [record.value for record in await consumer.get_many(3)] == [b"a1", b"a2", b"b1"]
        assert await _first(consumer) == b"b2"
        await consumer.seek(T0, 0)
        assert [record.value for record in await consumer.get_many(1)] == [b"a1"]
        await consumer.seek(T0, 0)
        assert [record.value for record in await consumer.get_many()] == [b"a1", b"a2", b"b1", b"b2"]


async def test_records_kept_at_a_close_are_not_committed() -> None:
    async with Broker(listeners="inproc://") as broker, Producer(broker.bootstrap_servers) as producer:
        await producer.send_many("t", [b"a"], partition=0)
        found = []
        for _ in range(2):
            async with Consumer(
                "t",
                bootstrap_servers=broker.bootstrap_servers,
                auto_offset_reset="earliest",
                group_id="g",
                interceptors=[Doubling()],
            ) as consumer:
                async with asyncio.timeout(30):
                    found += [(await consumer.getone()).value for _ in range(1 + len(found))]
    assert found == [b"a1", b"a1", b"a2"]


async def test_a_seek_drops_the_other_records_made_of_one() -> None:
    async with _doubling() as consumer:
        assert await _first(consumer) == b"a1"
        await consumer.seek(T0, 0)
        assert await _first(consumer) == b"a1"
        await consumer.seek(T0, 1)  # the position that it has
        assert await _first(consumer) == b"a2"


async def test_a_pause_does_not_separate_the_records_made_of_one() -> None:
    """If it did, the next record would mark them all as processed."""
    async with _doubling() as consumer:
        assert await _first(consumer) == b"a1"
        consumer.pause()
        assert await _first(consumer) == b"a2"
        waiting = asyncio.ensure_future(_first(consumer))
        await settle()
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        consumer.resume()
        assert await _first(consumer) == b"b1"
    with pytest.raises(ClientClosedError):
        await _first(consumer)


class Watching(ConsumerInterceptor):
    def __init__(self) -> None:
        self.consumed: list[int] = []
        self.committed: list[int] = []

    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        self.consumed += [record.offset for record in records]
        return [record._replace(value=f"<{record.value}>") for record in records if record.value != "hidden"]

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self.committed.append(offsets[T0].offset)


async def test_records_and_their_results_pass_producer_interceptors_in_order(caplog: Any) -> None:
    """Before serialization, once per record, on every way to send; what one raises is logged."""
    first, second = Stamping("first"), Stamping("second")
    async with (
        Broker(listeners="inproc://") as broker,
        Producer(
            broker.bootstrap_servers,
            value_serializer=serde.string,
            interceptors=[first, Broken(), second],
            linger_ms=0,
            max_request_size=1000,
            buffer_memory=2000,
        ) as producer,
    ):
        await producer.send("t", "a", partition=0)
        await producer.send_nowait("t", "b", partition=0)
        await producer.send_many("t", ["c", "d"], partition=0)
        with pytest.raises(RecordTooLargeError):
            await producer.send("t", "x" * 2000, partition=0)
        with pytest.raises(SerializationError):
            await producer.send("t", 5, partition=0)  # type: ignore[arg-type]
        producer.send_nowait("new", "e", partition=9)
        with pytest.raises(DeliveryFailedError):  # an interceptor's look does not count
            await producer.flush()
        async with Consumer(
            "t", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            records = [await consumer.getone() for _ in range(4)]
    assert [record.value for record in records] == [b"a", b"b", b"c", b"d"]
    assert {record.headers for record in records} == {(("via", b"first"), ("via", b"second"))}
    assert first.results == second.results
    assert first.results[:6] == [
        (0, 0, ""),
        (0, 1, ""),
        (0, 2, ""),
        (0, 3, ""),
        (0, -1, "RecordTooLargeError"),
        (0, -1, "SerializationError"),
    ]
    assert [kind for _, _, kind in first.results[6:]] == ["UnknownTopicOrPartitionError"]
    assert "method=Broken.on_send error=ValueError: on_send" in caplog.text
    assert "method=Broken.on_acknowledgement" in caplog.text


async def test_every_record_that_passed_on_send_has_a_result() -> None:
    """The earlier records of a call that is refused, and a record without room in the buffer."""
    stamping = Stamping("all")
    async with (
        Broker(listeners="inproc://") as broker,
        Producer(
            broker.bootstrap_servers,
            value_serializer=serde.string,
            interceptors=[stamping],
            linger_ms=1000,
            max_request_size=1000,
            buffer_memory=2000,
            batch_size=500,
        ) as producer,
    ):
        with pytest.raises(SerializationError):
            await producer.send_many("t", ["a", 5, "b"], partition=0)  # type: ignore[list-item]
        assert stamping.results == [(0, -1, "SerializationError")] * 2
        stamping.results.clear()
        with pytest.raises(RecordTooLargeError):
            await producer.send_many("t", ["a", "x" * 2000], partition=0)
        assert stamping.results == [(0, -1, "RecordTooLargeError")] * 2
        stamping.results.clear()
        sent = 0
        with pytest.raises(BufferFullError):
            while True:
                sent += 1
                producer.send_nowait("t", "x" * 100, partition=0)
        assert stamping.results == [(0, -1, "BufferFullError")]
        await producer.flush()
        assert len(stamping.results) == sent


async def test_a_record_that_loses_its_timestamp_keeps_the_one_of_its_column() -> None:
    class Timeless(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return record._replace(timestamp_ms=None)

    async with (
        Broker(listeners="inproc://") as broker,
        Producer(broker.bootstrap_servers, interceptors=[Timeless()]) as producer,
        Consumer("t", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest") as consumer,
    ):
        await producer.send_many("t", [b"a", b"b"], partition=0, timestamps_ms=[1_000, 2_000])
        assert [(await consumer.getone()).timestamp_ms for _ in range(2)] == [1_000, 2_000]


def test_a_refused_record_of_a_blocking_producer_has_one_result() -> None:
    stamping = Stamping("sync")
    with (
        sync.Broker(listeners="inproc://") as broker,
        sync.Producer(broker.bootstrap_servers, interceptors=[stamping], max_request_size=1000) as producer,
    ):
        with pytest.raises(RecordTooLargeError):
            producer.send("t", b"x" * 2000).result(10)
        assert [kind for _, _, kind in stamping.results] == ["RecordTooLargeError"]


@pytest.mark.parametrize("way", ["get_many", "iteration"])
async def test_consumed_records_and_commits_pass_consumer_interceptors(way: str, caplog: Any) -> None:
    watching = Watching()
    async with Broker(listeners="inproc://") as broker:
        async with Producer(broker.bootstrap_servers, value_serializer=serde.string) as producer:
            await producer.send_many("t", ["a", "hidden", "b"], partition=0)
        async with Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            group_id="g",
            auto_offset_reset="earliest",
            value_deserializer=serde.string,
            interceptors=[Broken(), watching],
        ) as consumer:
            found: list[Any] = []
            if way == "get_many":
                while len(found) < 2:
                    found += [record.value for record in await consumer.get_many()]
            else:
                async for record in consumer:
                    found.append(record.value)
                    if len(found) == 2:
                        break
            await consumer.commit()
    assert found == ["<a>", "<b>"]
    assert watching.consumed == [0, 1, 2]
    assert watching.committed[0] == 3
    for method in ("on_consume", "on_commit"):
        assert f"method=Broken.{method}" in caplog.text


def test_the_blocking_clients_call_them_too() -> None:
    stamping, watching = Stamping("sync"), Watching()
    with sync.Broker(listeners="inproc://") as broker:
        with sync.Producer(
            broker.bootstrap_servers, value_serializer=serde.string, interceptors=[stamping]
        ) as producer:
            producer.send_and_wait("t", "a", partition=0)
        with sync.Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            value_deserializer=serde.string,
            interceptors=[watching],
        ) as consumer:
            record = consumer.getone()
    assert (record.value, record.headers) == ("<a>", (("via", b"sync"),))
    assert stamping.results == [(0, 0, "")]
    assert watching.consumed == [0]


async def test_a_send_that_is_cancelled_reports_its_result_once() -> None:
    """Whether the record was waiting for room, or for its acknowledgement."""
    seen = Stamping("a")
    small = {"max_request_size": 100_000, "buffer_memory": 100_000, "batch_size": 1_000}
    async with Cluster() as cluster, cluster.producer(interceptors=[seen], **small) as producer:
        await cluster.create_topic("t")
        cluster.intercept("Produce", delay_next(1, delay_ms=500))
        placed = asyncio.ensure_future(producer.send("t", b"x" * 90_000))
        async with asyncio.timeout(30):
            while not producer.undelivered():
                await asyncio.sleep(0)
        waiting = asyncio.ensure_future(producer.send("t", b"y" * 90_000))
        for _ in range(20):
            await asyncio.sleep(0)
        for task in (waiting, placed):
            assert not task.done()
            task.cancel()
        await asyncio.wait({waiting, placed})
        assert [name for _, _, name in seen.results] == ["ClientError"], "the other record is in a batch"
    assert [(offset, name) for _, offset, name in seen.results] == [(-1, "ClientError"), (0, "")]


async def test_a_cancelled_send_many_reports_every_record_once() -> None:
    seen = Stamping("a")
    small = {"max_request_size": 100_000, "buffer_memory": 100_000, "batch_size": 1_000}
    async with Cluster() as cluster, cluster.producer(interceptors=[seen], **small) as producer:
        await cluster.create_topic("t")
        cluster.intercept("Produce", delay_next(1, delay_ms=500))
        sending = asyncio.ensure_future(producer.send_many("t", [b"x" * 90_000] * 3))
        async with asyncio.timeout(30):
            while not producer.undelivered():
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
    assert sorted(name for _, _, name in seen.results) == ["", "ClientError", "ClientError"]
