"""The blocking classes, against a blocking broker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from kafkalite import sync
from kafkalite.client.blocking import producer as module
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    ClientError,
    ConnectionFailedError,
    DeliveryFailedError,
    RecordError,
    RecordTooLargeError,
    TopicAlreadyExistsError,
)
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.testing import SyncCluster, drop_next

T0 = TopicPartition("t", 0)


@pytest.fixture
def broker() -> Iterator[sync.Broker]:
    with sync.Broker(listeners="inproc://") as running:
        yield running


@pytest.fixture
def producer(broker: sync.Broker) -> Iterator[sync.Producer]:
    with sync.Producer(broker.bootstrap_servers, linger_ms=0) as opened:
        yield opened


def _consumer(broker: sync.Broker, *topics: Any, **settings: Any) -> sync.Consumer:
    settings = {"auto_offset_reset": "earliest", **settings}
    return sync.Consumer(*topics, bootstrap_servers=broker.bootstrap_servers, **settings)


def test_the_broker() -> None:
    broker = sync.Broker(listeners="inproc://")
    assert repr(broker) == "<sync Broker new>"
    assert not broker.is_running
    broker.stop()
    with broker:
        assert broker.is_running
        assert broker.addresses == (broker.address,)
        assert broker.statistics().topic_count == 0
        assert "sync Broker 1 running" in repr(broker)
    assert not broker.is_running


def test_sending(producer: sync.Producer) -> None:
    pending = producer.send("t", b"1", key=b"k", headers=[("h", b"x")], timestamp_ms=5)
    metadata = pending.result(10)
    assert (metadata.topic, metadata.partition, metadata.offset) == ("t", 0, 0)
    assert pending.done() and pending.exception() is None
    assert producer.send_and_wait("t", b"2", timeout=10).offset == 1
    assert [batch.record_count for batch in producer.send_many("t", [b"3", b"4"], timeout=10)] == [2]
    assert producer.send_batch("t", 0, build_batch([b"5"]), timeout=10).base_offset == 4
    assert producer.partitions_for("t") == [T0]
    assert producer.statistics().acknowledged_batches == 4
    assert "acknowledged at offset 0" in repr(pending)
    assert "0 records queued" in repr(producer)


def test_many_single_records_keep_their_order(producer: sync.Producer, broker: sync.Broker) -> None:
    pendings = [producer.send("t", b"%d" % i) for i in range(30_000)]
    producer.flush(30)
    assert [pending.result().offset for pending in pendings] == list(range(30_000))
    with _consumer(broker, "t") as consumer:
        values = [int(record.value or b"") for record in itertools.islice(consumer, 30_000)]
    assert values == list(range(30_000))


def test_threads_may_share_a_producer(producer: sync.Producer, broker: sync.Broker) -> None:
    def send(name: int) -> None:
        for i in range(500):
            producer.send("t", b"%d %d" % (name, i))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush(30)
    last: dict[int, int] = {}
    with _consumer(broker, "t") as consumer:
        for record in itertools.islice(consumer, 2000):
            name, number = map(int, (record.value or b"").split())
            assert number == last.get(name, -1) + 1
            last[name] = number


def test_invalid_records_fail_their_results(producer: sync.Producer) -> None:
    with pytest.raises(RecordError, match="must be bytes"):
        producer.send("t", "text").result(10)  # type: ignore[arg-type]
    producer.send("t", b"x" * 2_000_000)
    with pytest.raises(DeliveryFailedError) as failure:
        producer.flush(10)
    assert isinstance(failure.value.__cause__, RecordTooLargeError)


def test_callbacks(producer: sync.Producer) -> None:
    caught: list[sync.PendingDelivery] = []
    event = threading.Event()

    def tell(pending: sync.PendingDelivery) -> None:
        caught.append(pending)
        event.set()

    pending = producer.send("t", b"x")
    pending.add_callback(tell)
    assert event.wait(10)
    assert caught == [pending]
    event.clear()
    pending.add_callback(tell)
    assert event.wait(10)


def test_deliveries_work_with_concurrent_futures(producer: sync.Producer) -> None:
    sent = [producer.send("t", b"%d" % i, headers=[("n", "é")]) for i in range(100)]
    done, not_done = concurrent.futures.wait(sent, timeout=10)
    assert (len(done), not_done) == (100, set())
    assert {future.result().offset for future in concurrent.futures.as_completed(sent, 10)} == set(range(100))
    late = producer.send("t", b"x")
    called: SimpleQueue[Any] = SimpleQueue()
    late.add_done_callback(called.put)
    assert called.get(timeout=10) is late
    late.add_done_callback(called.put)
    assert called.get(timeout=10) is late
    refused = producer.send("t", object())  # type: ignore[arg-type]
    assert concurrent.futures.wait([refused], timeout=10).done == {refused}
    assert isinstance(refused.exception(), RecordError)
    assert not refused.cancel() and not refused.cancelled() and not refused.running()
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        late.other  # type: ignore[attr-defined]  # noqa: B018
    batch = producer.queue_batch("t", 0, build_batch([b"a", b"b"]))
    assert [one.result().record_count for one in concurrent.futures.as_completed([batch], 10)] == [2]


def test_other_threads_see_the_state_of_a_future_at_once(
    producer: sync.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = producer.send("t", b"x")
    done.result(timeout=10)
    seen: list[bool] = []

    def watched(name: str) -> None:
        original = getattr(concurrent.futures.Future, name)

        def call(self: Any, *arguments: Any) -> Any:
            original(self, *arguments)
            seen.append("_condition" in vars(done))

        monkeypatch.setattr(concurrent.futures.Future, name, call)

    watched("__init__")
    watched("set_result")
    assert concurrent.futures.wait([done], timeout=10).done == {done}
    assert seen == [False, False]


def test_a_failure_that_was_only_waited_for_is_still_reported(producer: sync.Producer) -> None:
    concurrent.futures.wait([producer.send("t", b"x", partition=99)], timeout=10)
    with pytest.raises(DeliveryFailedError):
        producer.flush()


async def test_a_delivery_is_awaitable_in_another_event_loop(broker: sync.Broker) -> None:
    def make() -> sync.Producer:
        return sync.Producer(broker.bootstrap_servers).start()

    producer = await asyncio.to_thread(make)
    metadata = await asyncio.wrap_future(producer.send("t", b"x"))
    assert metadata.offset == 0
    await asyncio.to_thread(producer.stop)


def test_aiokafkas_names(producer: sync.Producer, broker: sync.Broker) -> None:
    producer.send_and_wait("t", b"x", headers=[("h", "text"), ("n", None)])
    consumer = _consumer(broker, ["t"], group_id="g").start()
    assert consumer.subscription() == ["t"]
    record = consumer.getone()
    assert record.headers == (("h", b"text"), ("n", None))
    with consumer.processing(record):
        consumer.commit()
    consumer.seek_to_beginning()
    assert consumer.getmany(timeout_ms=5000, max_records=5) == {T0: [record]}
    consumer.seek_to_beginning()
    assert {tp: at and at.offset for tp, at in consumer.seek_to_committed().items()} == {T0: 1}
    assert consumer.position(T0) == 1
    consumer.stop()


def test_a_blocking_call_in_a_callback_is_an_error(producer: sync.Producer) -> None:
    failed: list[Exception] = []
    event = threading.Event()

    def block(pending: sync.PendingDelivery) -> None:
        try:
            producer.flush()
        except ClientError as error:
            failed.append(error)
        event.set()

    producer.send("t", b"x").add_callback(block)
    assert event.wait(10)
    assert "would deadlock" in str(failed[0])


def test_more_than_the_buffer_holds(broker: sync.Broker) -> None:
    settings = {"buffer_memory": 20_000, "max_request_size": 10_000, "batch_size": 2000}
    with sync.Producer(broker.bootstrap_servers, linger_ms=0, **settings) as producer:
        pendings = [producer.send("t", b"x" * 500) for _ in range(500)]
        producer.flush(30)
    assert [pending.result().offset for pending in pendings] == list(range(500))


def test_a_full_queue_blocks_the_sender_and_then_raises(
    broker: sync.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_RECORDS", 10)
    with sync.Producer(broker.bootstrap_servers, max_block_ms=10_000) as producer:
        for _ in range(100):
            producer.send("t", b"x")
        producer.flush(10)
    with sync.Producer(broker.bootstrap_servers, max_block_ms=50) as producer:
        monkeypatch.setattr(producer, "_is_woken", True)  # as if the loop had not run
        with pytest.raises(BufferFullError, match="10 records are queued"):
            for _ in range(11):
                producer.send("t", b"x")


def test_a_buffer_that_stays_full_fails_records_one_by_one() -> None:
    settings = {"buffer_memory": 1000, "max_request_size": 1000, "batch_size": 1000, "max_block_ms": 20}
    with (
        SyncCluster() as cluster,
        sync.Producer(cluster.bootstrap_servers, request_timeout_ms=200, **settings) as producer,
    ):
        cluster.create_topic("t")
        producer.partitions_for("t")
        cluster.intercept("Produce", drop_next(None))  # the first record stays in the buffer
        first, second, third = (producer.send("t", letter * 900) for letter in (b"x", b"y", b"z"))
        for pending in (second, third):
            assert isinstance(pending.exception(10), BufferFullError)
        cluster.intercept("Produce", None)
        assert first.exception(10) is None


def test_an_exception_in_the_block(broker: sync.Broker) -> None:
    with pytest.raises(ValueError, match="mine"), sync.Producer(broker.bootstrap_servers) as producer:
        pending = producer.send("t", b"x")
        raise ValueError("mine")
    assert pending.result(1).offset == 0
    with pytest.raises(ClientClosedError):
        producer.send("t", b"x")


def test_closing_with_something_queued(broker: sync.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = sync.Producer(broker.bootstrap_servers).start()
    monkeypatch.setattr(producer, "_is_woken", True)
    pending = producer.send("t", b"x")
    assert repr(pending) == "<PendingDelivery, queued>"
    producer.close(10)
    assert pending.result(1).offset == 0


@pytest.mark.parametrize(
    ("drains_for_s", "timeout", "least", "most"), [(0.2, 10, 0, 9_800), (60, 0.05, 0, 0)]
)
def test_a_timeout_of_close_is_for_all_of_it(
    broker: sync.Broker,
    monkeypatch: pytest.MonkeyPatch,
    drains_for_s: float,
    timeout: float,
    least: int,
    most: int,
) -> None:
    producer = sync.Producer(broker.bootstrap_servers).start()
    given: list[int] = []
    close = producer._original.close

    async def drain() -> None:
        await asyncio.sleep(drains_for_s)

    async def note(timeout_ms: int) -> None:
        given.append(timeout_ms)
        await close(timeout_ms)

    monkeypatch.setattr(producer, "_drain_all", drain)
    monkeypatch.setattr(producer._original, "close", note)
    producer.close(timeout)
    assert least <= given[0] <= most


def test_no_broker_at_the_address() -> None:
    with pytest.raises(ConnectionFailedError):
        sync.Producer("inproc://missing", reconnect_backoff_ms=1).start()


# --- consuming -----------------------------------------------------------------------------------


def test_iteration_and_its_position(producer: sync.Producer, broker: sync.Broker) -> None:
    producer.send_many("t", [b"%d" % i for i in range(100)], partition=0)
    with _consumer(broker, "t") as consumer:
        assert [record.offset for record in itertools.islice(consumer, 10)] == list(range(10))
        assert consumer.position(T0) == 10
        assert consumer.lag() == {T0: 90}
        assert [record.offset for record in consumer.get_many(5)] == list(range(10, 15))
        one = consumer.get_one()
        assert one is not None and one.offset == 15
        assert consumer.position(T0) == 16
        (batch,) = consumer.get_batches(timeout_ms=5000)
        assert batch.from_offset == 16
        assert consumer.position(T0) == 100
        consumer.seek(T0, 50)
        assert next(iter(consumer)).offset == 50
        consumer.pause(T0)
        assert consumer.paused() == [T0]
        assert consumer.get_many(timeout_ms=20) == []
        consumer.resume(T0)
        assert next(iter(consumer)).offset == 51
        consumer.seek_to_beginning()
        assert consumer.get_many(timeout_ms=5000)[0].offset == 0
        consumer.seek_to_end(T0)
        assert consumer.get_one(timeout_ms=20) is None
        consumer.seek_to_timestamp(T0, 0)
        assert consumer.position(T0) == 0
        assert consumer.beginning_offsets([T0]) == {T0: 0}
        assert consumer.end_offsets([T0]) == {T0: 100}
        assert consumer.offsets_for_times({T0: 0})[T0] is not None
        assert "sync Consumer open" in repr(consumer)


def test_assigning_and_subscribing(producer: sync.Producer, broker: sync.Broker) -> None:
    producer.send_many("t", [b"x"] * 10, partition=0)
    producer.send_many("u", [b"y"] * 10, partition=0)
    with _consumer(broker) as consumer:
        consumer.assign([T0])
        assert consumer.assignment() == [T0]
        assert next(iter(consumer)).topic == "t"
        consumer.subscribe("u")
        assert next(iter(consumer)).topic == "u"


def test_arrow(producer: sync.Producer, broker: sync.Broker) -> None:
    pytest.importorskip("pyarrow")
    producer.send_many("t", [b"x"] * 10)
    with _consumer(broker, "t") as consumer:
        assert consumer.to_arrow(timeout_ms=5000).num_rows == 10


def test_admin(broker: sync.Broker, producer: sync.Producer) -> None:
    with sync.Admin(broker.bootstrap_servers) as admin:
        assert admin.create_topic("t", 2).num_partitions == 2
        with pytest.raises(TopicAlreadyExistsError):
            admin.create_topic("t")
        admin.create_topics({"u": 1}, return_exceptions=True)
        assert sorted(topic.name for topic in admin.list_topics()) == ["t", "u"]
        admin.create_partitions("u", 2)
        assert len(admin.describe_topics(["u"])[0].partitions) == 2
        admin.alter_configs("topic", "t", {"retention.ms": "5"})
        assert admin.describe_configs("topic", "t")["retention.ms"].value == "5"
        producer.send_many("t", [b"x"] * 5, partition=0)
        assert admin.list_offsets([T0], "latest")[T0].offset == 5
        assert admin.delete_records({T0: 2}) == {T0: 2}
        assert admin.describe_cluster().controller_id == 1
        assert len(admin.describe_log_dirs(["t"])) == 2
        assert admin.delete_topics(["u"]) == {"u": None}
        assert "sync Admin open" in repr(admin)
