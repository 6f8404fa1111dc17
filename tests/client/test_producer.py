"""The producer against a broker with faults."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kafkalite.client.cluster import connection as connection_module
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    ClientError,
    ConfigError,
    ConnectionFailedError,
    CorruptBatchError,
    DeliveryFailedError,
    DeliveryTimeoutError,
    ErrorCode,
    InvalidTopicError,
    MessageTooLargeError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceNumberError,
    PolicyViolationError,
    RecordError,
    RecordTooLargeError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import NO_OFFSET, RecordMetadata, TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.rng import seeded_rng
from proof.waiting import eventually, settle

FAST = {
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 5,
    "reconnect_backoff_ms": 1,
    "reconnect_backoff_max_ms": 5,
}


def _producer(broker: Any, **settings: Any) -> Producer:
    return Producer(broker.address, rng=seeded_rng(1), **{"linger_ms": 0, **FAST, **settings})


# --- sending -------------------------------------------------------------------------------------


async def test_send_returns_the_records_position(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        first = await producer.send("t", b"a", timestamp_ms=5)
        second = await producer.send("t", b"b", key=b"k", headers=[("h", b"1")])
    assert first == RecordMetadata("t", 0, 0, 5)
    assert second.offset == 1
    records = fake_broker.records("t", 0)
    assert [(r.value, r.key, r.headers) for r in records] == [(b"a", None, ()), (b"b", b"k", (("h", b"1"),))]


async def test_a_topic_that_is_not_text_is_refused_at_once(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        with pytest.raises(ClientError, match="topic b't' is not a str"):
            await producer.send(b"t", b"a")
        with pytest.raises(ClientError, match="topic b't' is not a str"):
            await producer.send_many(b"t", [b"a"])
        assert (await producer.send("t", b"a")).offset == 0


async def test_records_of_an_unknown_topic_wait_for_its_metadata_in_order(fake_broker: Any) -> None:
    fake_broker.auto_create = 3
    async with _producer(fake_broker) as producer:
        deliveries = [producer.send_nowait("new", b"%d" % i, partition=1) for i in range(20)]
        called: list[Any] = []
        deliveries[3].add_callback(called.append)
        waiting = asyncio.ensure_future(_result(deliveries[4]))
        await producer.flush()
        assert [delivery.result().offset for delivery in deliveries] == list(range(20))
        assert called == [deliveries[3]]
        assert (await waiting).offset == 4
    assert fake_broker.values("new", 1) == [b"%d" % i for i in range(20)]


async def _result(delivery: Any) -> RecordMetadata:
    return await delivery


async def test_a_parked_record_for_a_missing_partition_fails_alone(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        good = producer.send_nowait("new", b"good")
        bad = producer.send_nowait("new", b"bad", partition=7)
        worse = producer.send_nowait("new", b"worse", partition=8)
        waiting = asyncio.ensure_future(_result(bad))
        with pytest.raises(DeliveryFailedError) as failure:
            await producer.flush()
        assert failure.value.record_count == 1, "the other was awaited"
        assert good.result().offset == 0
        with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 0, not 7"):
            await waiting
        assert isinstance(worse.exception(), UnknownTopicOrPartitionError)


async def test_an_invalid_topic_fails_its_records(fake_broker: Any, make_fault: Any) -> None:
    async with _producer(fake_broker) as producer:
        fake_broker.always[ApiKey.METADATA] = make_fault(code=int(ErrorCode.INVALID_TOPIC_EXCEPTION))
        with pytest.raises(InvalidTopicError):
            await producer.send("b@d", b"x")
        with pytest.raises(InvalidTopicError):
            await producer.send_many("b@d", [b"x"])


async def test_a_topic_that_does_not_come_within_max_block_ms(fake_broker: Any) -> None:
    fake_broker.auto_create = 0
    async with _producer(fake_broker, max_block_ms=30) as producer:
        with pytest.raises(UnknownTopicOrPartitionError):
            await producer.send("never", b"x")


async def test_linger_gathers_and_the_timer_sends(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, linger_ms=20) as producer:
        await producer.partitions_for("t")
        deliveries = [producer.send_nowait("t", b"%d" % i) for i in range(50)]
        assert fake_broker.count(ApiKey.PRODUCE) == 0
        metadata = await deliveries[-1]
        assert metadata.offset == 49
        assert fake_broker.count(ApiKey.PRODUCE) == 1
        assert producer.statistics().requests == 1


async def test_flush_does_not_linger(fake_broker: Any) -> None:
    async with _producer(fake_broker, linger_ms=60_000) as producer:
        delivery = producer.send_nowait("t", b"x")
        async with asyncio.timeout(30):
            await producer.flush()
        assert delivery.result().offset == 0


async def test_every_kind_of_record_by_the_fast_path_and_around_it(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    sent = []
    async with _producer(fake_broker, linger_ms=5) as producer:
        await producer.partitions_for("t")
        for i in range(200):
            kind = i % 8
            value = [
                b"v%d" % i,
                None,
                b"",
                bytearray(b"ba%d" % i),
                memoryview(b"mv%d" % i),
                b"v",
                b"v",
                b"v",
            ][kind]
            key = [None, None, b"k", b"k", None, bytearray(b"bk"), b"", b"k%d" % i][kind]
            headers = [("a", b"1"), ("b", None)] if i % 13 == 0 else ()
            producer.send_nowait(
                "t", value, key, headers=headers, timestamp_ms=1000 + i if i % 5 == 0 else None
            )
            sent.append(
                (None if value is None else bytes(value), None if key is None else bytes(key), tuple(headers))
            )
        await producer.flush()
    records = fake_broker.records("t", 0)
    assert [(r.value, r.key, r.headers) for r in records] == sent
    assert [r.timestamp_ms for r in records[::5]] == [1000 + i for i in range(0, 200, 5)]


@pytest.mark.parametrize("partitioner", ["roundrobin", "sticky", "random", "hash"])
async def test_partitioners(fake_broker: Any, partitioner: str) -> None:
    fake_broker.topics["t"] = 3
    async with _producer(fake_broker, partitioner=partitioner, batch_size=400, linger_ms=5) as producer:
        for i in range(300):
            producer.send_nowait("t", b"v" * 20, key=b"%d" % i if i % 2 or partitioner == "hash" else None)
        await producer.flush()
    assert all(fake_broker.values("t", partition) for partition in range(3))


async def test_aiokafkas_name(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 2
    async with _producer(fake_broker) as producer:
        sent = await producer.send_and_wait(
            "t", b"v", b"k", partition=1, timestamp_ms=5, headers=[("h", "text")]
        )
    assert (sent.topic, sent.partition, sent.offset, sent.timestamp_ms) == ("t", 1, 0, 5)
    assert fake_broker.values("t", 1) == [b"v"]


async def test_round_robin_goes_batch_by_batch(fake_broker: Any) -> None:
    """B2"""
    fake_broker.topics["t"] = 3
    async with _producer(fake_broker, batch_size=1000, linger_ms=5) as producer:
        for _ in range(9000):
            producer.send_nowait("t", b"x" * 10)
        await producer.flush()
    counts = [len(fake_broker.values("t", partition)) for partition in range(3)]
    assert sum(counts) == 9000
    assert max(counts) - min(counts) <= 1000 // 28


async def test_a_function_chooses_the_partition(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 3

    def choose(topic: str, key: bytes | None, value: bytes | None, count: int) -> int | None:
        return None if value == b"any" else int(value or b"0")

    async with _producer(fake_broker, partitioner=choose) as producer:
        assert (await producer.send("t", b"2")).partition == 2
        assert {(await producer.send("t", b"any")).partition for _ in range(6)} == {0, 1, 2}
        with pytest.raises(RecordError, match="partitioner chose 5"):
            await producer.send("t", b"5")
        found = await producer.send_many("t", [b"0", b"1", b"0"])
        assert [(batch.partition, batch.record_count) for batch in found] == [(0, 2), (1, 1)]


async def test_partitions_added_later_are_used(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, metadata_max_age_ms=5) as producer:
        assert (await producer.send("t", b"x", key=b"key")).partition == 0
        fake_broker.topics["t"] = 50
        await eventually(lambda: len(producer._sender.cluster.metadata.topics["t"].leaders) == 50)
        assert (await producer.send("t", b"x", partition=49)).partition == 49
        assert (await producer.send("t", b"x", key=b"key")).partition != 0


# --- refused records -----------------------------------------------------------------------------


async def test_invalid_records_are_refused_by_send(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, max_request_size=1000, buffer_memory=10_000) as producer:
        for bad, match in (
            ({"value": "text"}, "value of a record must be bytes"),
            ({"key": "text"}, "key of a record must be bytes"),
            ({"value": 5}, "not int"),
            ({"headers": [("a", 5)]}, "header 'a' is int, not bytes"),
            ({"headers": [("a",)]}, "headers must be"),
            ({"headers": 7}, "headers must be"),
        ):
            with pytest.raises(RecordError, match=match):
                producer.send_nowait("t", **bad)
        with pytest.raises(RecordTooLargeError, match=r"max\.request\.size is 1000"):
            producer.send_nowait("t", b"x" * 990)
        with pytest.raises(RecordTooLargeError, match="record 1 has"):
            await producer.send_many("t", [b"x", b"x" * 990])
        with pytest.raises(UnknownTopicOrPartitionError):
            await producer.send("t", b"x", partition=1)
        with pytest.raises(RecordError, match="1 keys for 2 values"):
            await producer.send_many("t", [b"x", b"y"], [b"k"])
        assert await producer.send_many("t", []) == []
        assert (await producer.send("t", b"fine")).offset == 0
    assert fake_broker.values("t") == [b"fine"]


async def test_an_unknown_partitioner_is_named() -> None:
    with pytest.raises(ConfigError, match="partitioner"):
        Producer(partitioner="lucky")


async def test_a_producer_opens_once(fake_broker: Any) -> None:
    producer = _producer(fake_broker)
    with pytest.raises(ClientClosedError, match="the producer is new"):
        producer.send_nowait("t", b"x")
    await producer.close()
    async with producer:
        assert repr(producer) == "<Producer open, 0 topics @ 1 brokers, 0 batches waiting>"
        with pytest.raises(ClientClosedError, match="starts once"):
            await producer.start()
    await producer.close()
    for late in (producer.flush(), producer.send("t", b"x"), producer.partitions_for("t")):
        with pytest.raises(ClientClosedError, match="the producer is closed"):
            await late


async def test_no_broker_to_connect_to() -> None:
    producer = Producer("inproc://nobody", **FAST)
    with pytest.raises(ConnectionFailedError, match="kl dev"):
        await producer.start()


async def test_a_producer_left_open_is_a_resource_warning(fake_broker: Any) -> None:
    producer = await _producer(fake_broker).start()
    guard = producer._guard
    assert guard is not None
    producer.send_nowait("t", b"x")
    del producer
    gc.collect()
    guard.cancel()
    with pytest.warns(ResourceWarning, match="never closed"):
        await asyncio.wait({guard})
    assert fake_broker.values("t") == [b"x"]


# --- acknowledgements and failures ---------------------------------------------------------------


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_acks(fake_broker: Any, acks: Any) -> None:
    async with _producer(fake_broker, acks=acks) as producer:
        metadata = await producer.send("t", b"x")
        assert metadata.offset == (NO_OFFSET if acks == 0 else 0)
        many = await producer.send_many("t", [b"y", b"z"])
        assert many[0].base_offset == (NO_OFFSET if acks == 0 else 1)
        await eventually(lambda: len(fake_broker.values("t")) == 3)


async def test_with_acks_0_no_response_is_needed(fake_broker: Any, make_fault: Any) -> None:
    """B13"""
    fake_broker.always[ApiKey.PRODUCE] = make_fault(drop=True)
    async with _producer(fake_broker, acks=0, request_timeout_ms=200) as producer:
        assert (await producer.send("t", b"x")).offset == NO_OFFSET
        await producer.flush()


async def test_with_acks_0_an_error_looks_for_the_new_leader(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, acks=0) as producer:
        await producer.send("t", b"0")
        before = fake_broker.count(ApiKey.METADATA)
        fake_broker.fault(ApiKey.PRODUCE, make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER)))
        await producer.send("t", b"1")
        await eventually(lambda: fake_broker.count(ApiKey.METADATA) > before)


async def test_temporary_errors_are_retried_and_metadata_refreshed(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker) as producer:
        await producer.send("t", b"0")
        before = fake_broker.count(ApiKey.METADATA)
        fake_broker.fault(ApiKey.PRODUCE, make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER)), times=3)
        assert (await producer.send("t", b"1")).offset == 1
        assert producer.statistics().retries == 3
        await eventually(lambda: fake_broker.count(ApiKey.METADATA) > before)


async def test_the_client_goes_to_the_new_leader(fake_cluster: list[Any]) -> None:
    """B16"""
    first, second = fake_cluster
    first.topics["t"] = 2
    first.leaders |= {("t", 0): 1, ("t", 1): 2}
    async with _producer(first) as producer:
        assert (await producer.send("t", b"a", partition=0)).offset == 0
        assert (await producer.send("t", b"b", partition=1)).offset == 0
        first.leaders[("t", 0)] = 2
        first.epochs[("t", 0)] = 2
        assert (await producer.send("t", b"c", partition=0)).offset == 1
    assert second.count(ApiKey.PRODUCE) == 2


async def test_a_partition_without_a_leader_waits_for_one(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    fake_broker.leaders[("t", 0)] = -1
    async with _producer(fake_broker) as producer:
        waiting = asyncio.ensure_future(producer.send("t", b"x"))
        await eventually(lambda: fake_broker.count(ApiKey.METADATA) > 1)
        assert not waiting.done()
        fake_broker.leaders[("t", 0)] = 1
        fake_broker.epochs[("t", 0)] = 2
        assert (await waiting).offset == 0


async def test_order_under_forced_retries_and_five_in_flight(fake_broker: Any, make_fault: Any) -> None:
    """B7: lost requests, lost responses and refusals; offsets grow in the order of sending."""
    fake_broker.topics["t"] = 2
    rng = seeded_rng(7)
    faults = [
        make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER)),
        make_fault(code=int(ErrorCode.NOT_ENOUGH_REPLICAS), only=("t", 0)),
        make_fault(close=True),
        make_fault(close=True, serve_first=True),
        make_fault(refuse=int(ErrorCode.SHUTTING_DOWN)),
        None,
        None,
    ]
    fake_broker.fault(ApiKey.PRODUCE, *(faults[rng.randrange(len(faults))] for _ in range(60)))
    async with _producer(fake_broker, batch_size=300, linger_ms=1) as producer:
        deliveries = []
        for i in range(3000):
            deliveries.append(producer.send_nowait("t", b"%d" % i, partition=i % 2))
            if i % 50 == 0:
                await asyncio.sleep(0.001)
        await producer.flush()
        for partition in range(2):
            own = [delivery.result() for delivery in deliveries[partition::2]]
            offsets = [metadata.offset for metadata in own]
            assert offsets == sorted(set(offsets))
            stored = fake_broker.values("t", partition)
            assert [stored[offset] for offset in offsets] == [b"%d" % i for i in range(partition, 3000, 2)]
        assert producer.statistics().retries > 10
    assert len(fake_broker.faults[ApiKey.PRODUCE]) < 45


async def test_a_broker_that_restarts_is_found_again(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        await producer.send("t", b"0")
        await fake_broker.stop()
        waiting = asyncio.ensure_future(producer.send("t", b"1"))
        await settle()
        assert not waiting.done()
        await fake_broker.start()
        assert (await waiting).offset == 1


async def test_a_final_error_reaches_only_the_waiting_callers(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.PRODUCE, make_fault(code=int(ErrorCode.MESSAGE_TOO_LARGE)))
        with pytest.raises(MessageTooLargeError, match="t-0: by the test"):
            await producer.send("t", b"x")
        await producer.flush()
        fake_broker.fault(ApiKey.PRODUCE, make_fault(refuse=int(ErrorCode.INVALID_REQUEST)))
        producer.send_nowait("t", b"x")
        with pytest.raises(DeliveryFailedError, match=r"1 record was not delivered \(t-0: 1\)"):
            await producer.flush()
        await producer.flush()


async def test_retries_may_be_bounded(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.always[ApiKey.PRODUCE] = make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    async with _producer(fake_broker, retries=2) as producer:
        with pytest.raises(NotLeaderOrFollowerError):
            await producer.send("t", b"x")
        assert fake_broker.count(ApiKey.PRODUCE) == 3


async def test_a_delivery_timeout_has_an_unknown_outcome(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.always[ApiKey.PRODUCE] = make_fault(drop=True, serve_first=True)
    async with _producer(fake_broker, delivery_timeout_ms=40) as producer:
        with pytest.raises(DeliveryTimeoutError, match="may or may not be in the log"):
            await producer.send("t", b"x")


async def test_a_request_without_a_response_is_sent_again(
    fake_broker: Any, make_fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SWEEP_INTERVAL_S", 0.01)
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, request_timeout_ms=30) as producer:
        fake_broker.fault(ApiKey.PRODUCE, make_fault(drop=True))
        assert (await producer.send("t", b"x")).offset == 0
        assert fake_broker.count(ApiKey.PRODUCE) == 2


async def test_a_response_that_omits_a_partition(fake_broker: Any) -> None:
    fake_broker.missing_outcomes = True
    async with _producer(fake_broker) as producer:
        with pytest.raises(UnknownServerError, match="omits this partition"):
            await producer.send("t", b"x")


async def test_a_topic_with_a_small_message_limit_takes_batches_one_by_one(
    fake_broker: Any, make_fault: Any
) -> None:
    fake_broker.topics["t"] = 1
    held = asyncio.Event()
    async with _producer(fake_broker, batch_size=200) as producer:
        await producer.partitions_for("t")
        fake_broker.fault(
            ApiKey.PRODUCE, make_fault(hold=held), make_fault(code=int(ErrorCode.MESSAGE_TOO_LARGE))
        )
        deliveries = [producer.send_nowait("t", b"%03d" % i * 30) for i in range(10)]
        held.set()
        await producer.flush()
        assert [delivery.result().offset for delivery in deliveries] == list(range(10))
        assert fake_broker.count(ApiKey.PRODUCE) == 11


async def test_a_missing_codec_fails_its_records(fake_broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kafkalite.client.producer import partition_queue

    def refuse(*_: object, **__: object) -> bytes:
        raise ConfigError(key="compression.type", value="zstd", allowed="installed")

    monkeypatch.setattr(partition_queue, "build_batch", refuse)
    async with _producer(fake_broker, compression_type="zstd") as producer:
        with pytest.raises(ConfigError):
            await producer.send("t", b"x")


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_compression(fake_broker: Any, codec: str) -> None:
    async with _producer(fake_broker, compression_type=codec, linger_ms=5) as producer:
        for _ in range(100):
            producer.send_nowait("t", b"word " * 10)
        await producer.flush()
        await producer.send_many("t", [b"word " * 10] * 100)
    assert fake_broker.values("t") == [b"word " * 10] * 200
    headers = [RecordBatch(batch).header for batch in fake_broker.logs["t", 0].batches]
    assert {str(header.codec) for header in headers} == {codec}


# --- callbacks -----------------------------------------------------------------------------------


async def test_callbacks_come_once_whatever_happens(fake_broker: Any, make_fault: Any) -> None:
    """B9"""
    fake_broker.topics["t"] = 1
    told: list[tuple[bytes, Any]] = []
    fake_broker.fault(
        ApiKey.PRODUCE,
        make_fault(close=True, serve_first=True),
        make_fault(code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER)),
        None,
        make_fault(code=int(ErrorCode.MESSAGE_TOO_LARGE)),
    )
    async with _producer(fake_broker) as producer:
        for name in (b"good", b"bad"):
            delivery = producer.send_nowait("t", name)
            delivery.add_callback(lambda done, name=name: told.append((name, done.exception())))
            await producer.flush()
    assert [(name, type(error)) for name, error in told] == [
        (b"good", type(None)),
        (b"bad", MessageTooLargeError),
    ]


async def test_on_delivery_sees_every_record(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    seen: list[Any] = []
    async with _producer(fake_broker, on_delivery=seen.append, linger_ms=5) as producer:
        for _ in range(10):
            producer.send_nowait("t", b"x")
        await producer.flush()
        fake_broker.fault(ApiKey.PRODUCE, make_fault(code=int(ErrorCode.MESSAGE_TOO_LARGE)))
        producer.send_nowait("t", b"x")
        await producer.flush()
    assert [delivery.exception() is None for delivery in seen] == [True] * 10 + [False]
    assert [delivery.result().offset for delivery in seen[:10]] == list(range(10))


async def test_on_delivery_of_send_many_has_the_timestamp_of_each_record(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    seen: list[Any] = []
    async with _producer(fake_broker, on_delivery=seen.append) as producer:
        await producer.send_many("t", [b"a", b"b", b"c"], partition=0, timestamps_ms=[1_000, 3_000, 2_000])
        await producer.send_many("t", [b"d", b"e"], partition=0, timestamps_ms=7_000)
    assert [each.result().timestamp_ms for each in seen] == [1_000, 3_000, 2_000, 7_000, 7_000]


async def test_a_callback_that_fails_is_reported(fake_broker: Any) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )
    async with _producer(fake_broker) as producer:
        await producer.partitions_for("t")
        producer.send_nowait("t", b"x").add_callback(lambda delivery: 1 / 0)
        await producer.flush()
    assert [type(error) for error in reported] == [ZeroDivisionError]


async def test_cancelling_a_send_does_not_cancel_the_record(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    held = asyncio.Event()
    async with _producer(fake_broker) as producer:
        await producer.partitions_for("t")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(hold=held))
        sends = [asyncio.ensure_future(producer.send("t", b"%d" % i)) for i in range(3)]
        await eventually(lambda: fake_broker.count(ApiKey.PRODUCE))
        sends[0].cancel()
        sends[1].cancel()
        held.set()
        assert (await sends[2]).offset == 2
    assert fake_broker.values("t") == [b"0", b"1", b"2"]


# --- back-pressure -------------------------------------------------------------------------------


async def test_send_nowait_raises_when_the_buffer_is_full_and_send_waits(
    fake_broker: Any, make_fault: Any
) -> None:
    fake_broker.topics["t"] = 1
    held = asyncio.Event()
    settings = {"buffer_memory": 4000, "max_request_size": 2000, "batch_size": 1000}
    async with _producer(fake_broker, **settings) as producer:
        await producer.partitions_for("t")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(hold=held))
        count = 0
        with pytest.raises(BufferFullError, match="wait_for_room"):
            while True:
                producer.send_nowait("t", b"x" * 100)
                count += 1
        waiting = [asyncio.ensure_future(producer.send("t", b"late %d" % i)) for i in range(3)]
        roomless = asyncio.ensure_future(producer.wait_for_room(timeout_ms=10))
        with pytest.raises(BufferFullError, match="stayed full for 10 ms"):
            await roomless
        assert not any(task.done() for task in waiting)
        held.set()
        offsets = [(await task).offset for task in waiting]
        assert offsets == sorted(offsets)
        assert len(fake_broker.values("t")) == count + 3
        await producer.wait_for_room()
        assert producer.statistics().free_bytes == 4000


async def test_send_gives_up_after_max_block_ms(fake_broker: Any, make_fault: Any) -> None:
    settings = {"buffer_memory": 1000, "max_request_size": 1000, "batch_size": 1000, "max_block_ms": 20}
    held = asyncio.Event()
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, **settings) as producer:
        await producer.partitions_for("t")
        fake_broker.always[ApiKey.PRODUCE] = make_fault(hold=held)
        producer.send_nowait("t", b"x" * 600)
        for waiting in (producer.send("t", b"y" * 600), producer.send_many("t", [b"y" * 600])):
            with pytest.raises(BufferFullError, match="stayed full for 20 ms"):
                await waiting
        held.set()


async def test_parked_records_count_against_the_buffer(fake_broker: Any) -> None:
    fake_broker.auto_create = 0
    settings = {"buffer_memory": 1000, "max_request_size": 1000, "batch_size": 100}
    producer = await _producer(fake_broker, **settings).start()
    with pytest.raises(BufferFullError):
        for _ in range(100):
            producer.send_nowait("later", b"x" * 100)
    fake_broker.auto_create = 1
    await producer.close()
    assert len(fake_broker.values("later")) > 5
    assert producer.statistics().free_bytes == 1000


async def test_closing_wakes_callers_that_wait_for_room(fake_broker: Any, make_fault: Any) -> None:
    settings = {"buffer_memory": 1000, "max_request_size": 1000, "batch_size": 1000}
    fake_broker.topics["t"] = 1
    producer = await _producer(fake_broker, **settings).start()
    await producer.partitions_for("t")
    fake_broker.always[ApiKey.PRODUCE] = make_fault(drop=True)
    first = asyncio.ensure_future(producer.send("t", b"x" * 600))
    second = asyncio.ensure_future(producer.send("t", b"x" * 600))
    third = asyncio.ensure_future(producer.send_many("t", [b"x" * 600]))
    await eventually(lambda: fake_broker.count(ApiKey.PRODUCE))
    await producer.close(timeout_ms=10)
    for waiting in (first, second, third):
        with pytest.raises(ClientClosedError):
            await waiting


@pytest.mark.parametrize("ends", ["cancelled", "late", "first in line"])
async def test_a_caller_that_was_woken_and_gives_up_wakes_the_next_one(fake_broker: Any, ends: str) -> None:
    settings = {"buffer_memory": 1000, "max_request_size": 1000, "batch_size": 1000, "linger_ms": 60_000}
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, **settings) as producer:
        sender = producer._sender
        is_full = True
        sender.accumulator.has_room = lambda _: not is_full  # type: ignore[method-assign]
        first = asyncio.ensure_future(sender.wait_for_bytes(10, 10 if ends == "late" else None))
        second = asyncio.ensure_future(sender.wait_for_bytes(10))
        await eventually(lambda: len(sender._room_waiters) == 2)
        is_full = False  # for less than the first one needs, in the last case
        if ends == "late":
            deadline_s = asyncio.get_running_loop().time() + 0.02
            while asyncio.get_running_loop().time() < deadline_s:
                pass  # the timeout is due before the first caller runs
        if ends != "first in line":
            sender._wake_for_room()
        if ends != "late":
            first.cancel()
        await asyncio.wait_for(second, 30)
        await asyncio.wait([first])


# --- many at once --------------------------------------------------------------------------------


async def test_send_many_splits_by_size_and_returns_every_batch(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 3
    values = [b"%05d" % i * 10 for i in range(1000)]
    async with _producer(fake_broker, max_request_size=10_000, buffer_memory=20_000) as producer:
        batches = await producer.send_many("t", values, timestamps_ms=list(range(1000)))
        assert sum(batch.record_count for batch in batches) == 1000
        assert {batch.partition for batch in batches} == {0, 1, 2}
        first = batches[0]
        assert (first.topic, first.base_offset, first.timestamp_ms) == ("t", 0, 0)
        assert producer.statistics().free_bytes == 20_000
    stored = [value for partition in range(3) for value in fake_broker.values("t", partition)]
    assert sorted(stored) == values


async def test_send_many_keeps_keys_together_and_in_order(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 4
    keys: list[bytes | None] = [b"%d" % (i % 37) if i % 10 else None for i in range(1000)]
    async with _producer(fake_broker) as producer:
        await producer.send_many(
            "t", [b"%d" % i for i in range(1000)], keys, headers=[(("n", b"%d" % i),) for i in range(1000)]
        )
        alone = await producer.send("t", b"x", key=b"5")
    by_key: dict[bytes | None, set[int]] = {}
    for partition in range(4):
        last: dict[bytes | None, int] = {}
        for record in fake_broker.records("t", partition)[: -1 if partition == alone.partition else None]:
            by_key.setdefault(record.key, set()).add(partition)
            assert int(record.value or b"") > last.get(record.key, -1)
            last[record.key] = int(record.value or b"")
            assert record.headers == (("n", record.value),)
    assert all(len(partitions) == 1 for partitions in by_key.values())
    assert by_key[b"5"] == {alone.partition}


async def test_send_many_goes_behind_single_records_of_its_partition(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 1
    async with _producer(fake_broker, linger_ms=1000) as producer:
        await producer.partitions_for("t")
        before = producer.send_nowait("t", b"1")
        await producer.send_many("t", [b"2", b"3"], partition=0)
        assert before.result().offset == 0
    assert fake_broker.values("t") == [b"1", b"2", b"3"]


async def test_send_many_raises_what_failed_when_all_is_done(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 2
    fake_broker.fault(ApiKey.PRODUCE, make_fault(code=int(ErrorCode.MESSAGE_TOO_LARGE), only=("t", 0)))
    async with _producer(fake_broker) as producer:
        await producer.partitions_for("t")
        with pytest.raises(MessageTooLargeError):
            await producer.send_many("t", [b"x"] * 100, [b"%d" % i for i in range(100)])
        await producer.flush()


async def test_batches_built_elsewhere(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 2
    builder = RecordBatchBuilder()
    builder.append(b"a", timestamp_ms=7)
    built = build_batch([b"b", b"c"], None, 8)
    async with _producer(fake_broker, max_request_size=1000, buffer_memory=10_000) as producer:
        first = await producer.send_batch("t", 1, builder)
        second = await producer.send_batch("t", 1, built)
        third = await producer.send_batch("t", 1, RecordBatch(bytes(built)))
        fourth = await producer.send_batch("t", 1, memoryview(built))
        assert [b.base_offset for b in (first, second, third, fourth)] == [0, 1, 3, 5]
        assert (second.record_count, second.timestamp_ms) == (2, 8)
        with pytest.raises(CorruptBatchError):
            await producer.send_batch("t", 1, b"no batch at all")
        with pytest.raises(RecordTooLargeError, match="build smaller batches"):
            await producer.send_batch("t", 1, build_batch([b"x" * 2000]))
        with pytest.raises(UnknownTopicOrPartitionError):
            await producer.send_batch("t", 2, built)
    assert fake_broker.values("t", 1) == [b"a", b"b", b"c", b"b", b"c", b"b", b"c"]


# --- closing -------------------------------------------------------------------------------------


async def test_leaving_the_block_delivers_everything(fake_broker: Any) -> None:
    async with _producer(fake_broker, linger_ms=60_000) as producer:
        for i in range(100):
            producer.send_nowait("t", b"%d" % i)
    assert len(fake_broker.values("t")) == 100


async def test_close_raises_for_undelivered_records(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    producer = await _producer(fake_broker).start()
    await producer.partitions_for("t")
    fake_broker.always[ApiKey.PRODUCE] = make_fault(drop=True)
    deliveries = [producer.send_nowait("t", b"x") for _ in range(5)]
    parked = producer.send_nowait("other", b"y", partition=3)
    fake_broker.always[ApiKey.METADATA] = make_fault(drop=True)
    with pytest.raises(DeliveryFailedError) as failure:
        await producer.close(timeout_ms=20)
    assert failure.value.record_count == 6
    for delivery in (*deliveries, parked):
        assert isinstance(delivery.exception(), ClientClosedError | UnknownTopicOrPartitionError)
    await producer.close()


async def test_an_exception_is_not_delayed_and_has_a_note(
    fake_broker: Any, make_fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalite.client.producer.producer.CLOSE_AFTER_ERROR_MS", 20)
    fake_broker.topics["t"] = 1
    with pytest.raises(ValueError, match="mine") as failure:
        async with _producer(fake_broker) as producer:
            await producer.partitions_for("t")
            fake_broker.always[ApiKey.PRODUCE] = make_fault(drop=True)
            producer.send_nowait("t", b"x")
            raise ValueError("mine")
    assert any("1 record was not delivered" in note for note in failure.value.__notes__)


async def test_an_exception_leaves_nothing_undelivered_in_a_healthy_cluster(fake_broker: Any) -> None:
    with pytest.raises(ValueError, match="mine") as failure:
        async with _producer(fake_broker, linger_ms=10_000) as producer:
            producer.send_nowait("t", b"x")
            raise ValueError("mine")
    assert not hasattr(failure.value, "__notes__")
    assert fake_broker.values("t") == [b"x"]


async def test_callbacks_may_send_during_a_flush(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        left = 20

        def again(delivery: Any) -> None:
            nonlocal left
            if left:
                left -= 1
                producer.send_nowait("t", b"again").add_callback(again)

        producer.send_nowait("t", b"first").add_callback(again)
        while left:
            await producer.flush()
    assert len(fake_broker.values("t")) == 21


async def test_debug_mode_finds_nothing(fake_broker: Any) -> None:
    asyncio.get_running_loop().set_debug(True)
    async with _producer(fake_broker) as producer:
        await asyncio.gather(*(producer.send("t", b"%d" % i) for i in range(50)))
    assert len(fake_broker.values("t")) == 50


async def test_partitions_for(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 2
    async with _producer(fake_broker) as producer:
        assert await producer.partitions_for("t") == [TopicPartition("t", 0), TopicPartition("t", 1)]


# --- idempotence and leaders ---------------------------------------------------------------------


async def test_a_lost_response_makes_no_duplicate(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.fault(ApiKey.PRODUCE, make_fault(close=True, serve_first=True), None, times=5)
    async with _producer(fake_broker) as producer:
        offsets = [(await producer.send("t", b"%d" % number)).offset for number in range(10)]
    assert offsets == list(range(10)), "a repeated batch returns its first offset"
    assert fake_broker.values("t") == [b"%d" % number for number in range(10)]


async def test_large_in_flight_batches_survive_lost_responses_in_order(
    fake_broker: Any, make_fault: Any
) -> None:
    fake_broker.fault(ApiKey.PRODUCE, None, make_fault(close=True, serve_first=True), None, None, times=4)
    values = [b"%d" % number for number in range(3000)]
    async with _producer(fake_broker, max_request_size=4096) as producer:
        placed = await producer.send_many("t", values)
    assert fake_broker.values("t") == values
    assert [batch.base_offset for batch in placed] == sorted(batch.base_offset for batch in placed)


async def test_without_idempotence_a_lost_response_may_duplicate(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.fault(ApiKey.PRODUCE, make_fault(close=True, serve_first=True))
    async with _producer(fake_broker, enable_idempotence=False) as producer:
        await producer.send("t", b"x")
    assert fake_broker.values("t") == [b"x"] * 2
    assert fake_broker.count(ApiKey.INIT_PRODUCER_ID) == 0


async def test_the_producer_id_is_allocated_once_and_again_if_necessary(
    fake_broker: Any, make_fault: Any
) -> None:
    fake_broker.fault(ApiKey.INIT_PRODUCER_ID, make_fault(refuse=int(ErrorCode.REQUEST_TIMED_OUT)), times=3)
    async with _producer(fake_broker) as producer:
        for _ in range(5):
            await producer.send("t", b"x")
    assert fake_broker.count(ApiKey.INIT_PRODUCER_ID) == 4


async def test_records_fail_loudly_when_there_can_be_no_producer_id(
    fake_broker: Any, make_fault: Any
) -> None:
    fake_broker.always[ApiKey.INIT_PRODUCER_ID] = make_fault(refuse=int(ErrorCode.POLICY_VIOLATION))
    async with _producer(fake_broker) as producer:
        with pytest.raises(PolicyViolationError):
            await producer.send("t", b"x")
        del fake_broker.always[ApiKey.INIT_PRODUCER_ID]
        await producer.send("t", b"y")
    assert fake_broker.values("t") == [b"y"]


async def test_lost_records_raise_their_error(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        for number in range(3):
            await producer.send("t", b"%d" % number)
        log = fake_broker.logs["t", 0]
        log.producers.note(*_only_producer(log), 0, 0, 0, 0, 0)  # as if it had only the first
        with pytest.raises(OutOfOrderSequenceNumberError):
            await producer.send("t", b"lost")
        await producer.send("t", b"next")
    assert fake_broker.values("t")[-1] == b"next"


def _only_producer(log: Any) -> tuple[int, int]:
    ((producer_id, state),) = log.producers._producers.items()
    del log.producers._producers[producer_id]
    return producer_id, state.epoch


async def test_sending_continues_at_the_new_leader(fake_cluster: list[Any]) -> None:
    first = fake_cluster[0]
    async with _producer(first) as producer:
        for number in range(40):
            if number % 10 == 9:
                first.leaders["t", 0] = 3 - first.leaders.get(("t", 0), 1)
                first.epochs["t", 0] = first.epochs.get(("t", 0), 1) + 1
            assert (await producer.send("t", b"%d" % number)).offset == number


async def test_a_silent_leader_is_abandoned_for_the_new_one(fake_cluster: list[Any], make_fault: Any) -> None:
    first = fake_cluster[0]
    async with _producer(first) as producer:
        await producer.send("t", b"0")
        for api in (ApiKey.PRODUCE, ApiKey.METADATA):
            first.always[api] = make_fault(drop=True)
        waiting = asyncio.ensure_future(producer.send("t", b"1"))
        await eventually(lambda: first.count(ApiKey.PRODUCE) > 1)
        first.leaders["t", 0], first.epochs["t", 0] = 2, 2
        async with asyncio.timeout(30):
            assert (await waiting).offset == 1


async def test_a_record_larger_than_a_batch_waits_for_room_without_blocking_the_event_loop() -> None:
    """The free memory had room for a batch, but not for the record: the wait never waited."""
    from kafkalite.testing import Cluster

    small = {"max_request_size": 100_000, "buffer_memory": 100_000, "batch_size": 1_000}
    async with Cluster() as cluster, cluster.producer(**small) as producer:
        await cluster.create_topic("t")
        async with asyncio.timeout(20):
            sent = await asyncio.gather(*(producer.send("t", b"x" * 90_000) for _ in range(5)))
            assert sorted(one.offset for one in sent) == [0, 1, 2, 3, 4]
            # Records of topics that are not known yet hold memory, too.
            sent = await asyncio.gather(*(producer.send(f"new-{n}", b"x" * 90_000) for n in range(5)))
            assert [one.offset for one in sent] == [0] * 5


async def test_send_many_takes_keys_that_are_not_hashable(fake_broker: Any) -> None:
    async with _producer(fake_broker) as producer:
        keys = [bytearray(b"k"), memoryview(b"k"), None, b"k"]
        batches = await producer.send_many("t", [b"1", b"2", b"3", b"4"], keys=keys)
        assert sum(batch.record_count for batch in batches) == 4
