"""Serializers, deserializers, and ProducerRecord: the bytes sent, the objects received, and the errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Broker, Consumer, Producer, ProducerRecord, TopicPartition, serde, sync
from kafkalite.errors import ConfigError, RecordError, SerializationError

ROOT = Path(__file__).resolve().parent.parent.parent
T0 = TopicPartition("t", 0)


class Upper:
    """An object with both methods, which get the topic."""

    def serialize(self, topic: str, value: str) -> bytes:
        return f"{topic}:{value.upper()}".encode()

    def deserialize(self, topic: str, data: bytes) -> str:
        return data.decode().removeprefix(f"{topic}:").lower()


@pytest.mark.parametrize(
    ("one", "value", "data"),
    [
        (serde.json, {"é": [1, None, "x"]}, '{"é":[1,null,"x"]}'.encode()),
        (serde.msgpack, {"a": [1, b"\xff"]}, None),
        (serde.string, "é", "é".encode()),
        (serde.integer, -2, b"\xff" * 7 + b"\xfe"),
        (serde.integer, 2**62, None),
    ],
)
def test_serdes_return_what_they_were_given(one: serde.Serde[Any], value: Any, data: bytes | None) -> None:
    written = one.serialize("t", value)
    assert data is None or written == data
    assert one.deserialize("t", written) == value


def test_integers_of_other_lengths_are_read() -> None:
    assert serde.integer.deserialize("t", b"\x01\x00") == 256


@pytest.mark.parametrize(
    ("serializer", "deserializer", "value"),
    [
        (serde.json, serde.json, {"a": 1}),
        (json.dumps, serde.json, None),
        (lambda value: json.dumps(value).encode(), json.loads, [1]),
        (Upper(), Upper(), "text"),
    ],
)
async def test_values_return_as_they_were_sent(serializer: Any, deserializer: Any, value: Any) -> None:
    """By every way to send and to read. None stays None, and is passed to no function."""
    async with Broker(listeners="inproc://") as broker:
        producer: Producer[Any, Any] = Producer(
            broker.bootstrap_servers, key_serializer=serde.integer, value_serializer=serializer, linger_ms=0
        )
        async with producer:
            await producer.send("t", value, 7, partition=0)
            await producer.send_nowait("t", value, 7, partition=0)
            await producer.send_many("t", [value, None], [7, None], partition=0)
            await producer.send(ProducerRecord("t", value, 7, 0, headers=[("h", "é")]))
        consumer = Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            key_deserializer=serde.integer,
            value_deserializer=deserializer,
        )
        async with consumer:
            records = [await consumer.getone() for _ in range(5)]
    assert [record.value for record in records] == [value, value, value, None, value]
    assert [record.key for record in records] == [7, 7, 7, None, 7]
    assert records[4].headers == (("h", "é".encode()),)


async def test_a_producer_record_needs_no_serializer() -> None:
    async with Broker(listeners="inproc://") as broker, Producer(broker.bootstrap_servers) as producer:
        sent = await producer.send(ProducerRecord("t", b"v", b"k", 0, 5, [("h", None)]))
        assert (sent.offset, sent.timestamp_ms) == (0, 5)
        assert (await producer.send_nowait(ProducerRecord("t", b"v"))).offset == 1


async def test_a_value_that_cannot_be_serialized_is_named_and_nothing_is_sent() -> None:
    async with (
        Broker(listeners="inproc://") as broker,
        Producer(broker.bootstrap_servers, value_serializer=serde.json, linger_ms=0) as producer,
    ):
        for send in (producer.send, producer.send_nowait):
            with pytest.raises(
                SerializationError, match=r"value .* 't' .* by json: TypeError.*is object"
            ) as e:
                await send("t", object(), partition=3)
            assert e.value.topic_partition == TopicPartition("t", 3)
            assert isinstance(e.value.__cause__, TypeError)
        with pytest.raises(SerializationError):
            await producer.send_many("t", [1, object()])
        assert (await producer.send("t", 1)).offset == 0
        wrong = Producer(broker.bootstrap_servers, value_serializer=lambda value: 5)
        async with wrong:
            with pytest.raises(RecordError, match="must be bytes"):
                await wrong.send("t", b"x")


def test_something_that_is_no_serializer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a serializer is 5.*serialize\(topic, value\)"):
        Producer(value_serializer=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a deserializer is 5"):
        Consumer(key_deserializer=5)  # type: ignore[arg-type]


async def _bad_at_2(broker: Broker) -> None:
    async with Producer(broker.bootstrap_servers) as producer:
        await producer.send_many("t", [b"0", b"1", b"{", b"3"], keys=[b"k"] * 4)


def _json_consumer(broker: Broker, **settings: Any) -> Consumer[bytes, Any]:
    return Consumer(
        "t",
        bootstrap_servers=broker.bootstrap_servers,
        auto_offset_reset="earliest",
        value_deserializer=serde.json,
        **settings,
    )


@pytest.mark.parametrize("group_id", [None, "g"])
@pytest.mark.parametrize("way", ["get_many", "get_one", "iteration"])
async def test_a_record_that_cannot_be_deserialized_is_named_and_can_be_skipped(
    group_id: str | None, way: str
) -> None:
    async with Broker(listeners="inproc://") as broker:
        await _bad_at_2(broker)
        async with _json_consumer(broker, group_id=group_id) as consumer, asyncio.timeout(20):
            found: list[Any] = []

            async def read() -> None:
                while len(found) < 3:
                    match way:
                        case "get_many":
                            found.extend(record.value for record in await consumer.get_many())
                        case "get_one":
                            found.append((await consumer.getone()).value)
                        case _:
                            async for record in consumer:
                                found.append(record.value)
                                if len(found) == 3:
                                    break

            for _ in range(2):  # the consumer stays before it
                with pytest.raises(SerializationError, match=r"value of record t-0-2 .* by json") as caught:
                    await read()
                assert found == [0, 1]
                assert consumer.position(T0) == 2
            error = caught.value
            assert (error.topic_partition, error.offset, error.next_offset) == (T0, 2, 3)
            assert error.record is not None
            assert (error.record.key, error.record.value) == (b"k", b"{")
            if group_id is not None:
                await consumer.commit()
                committed = (await consumer.committed())[T0]
                assert committed is not None and committed.offset == 2
            await consumer.seek(T0, 3)
            await read()
            assert found == [0, 1, 3]


async def test_batches_are_bytes_also_after_a_bad_record() -> None:
    async with Broker(listeners="inproc://") as broker:
        await _bad_at_2(broker)
        async with _json_consumer(broker) as consumer:
            assert [record.value for record in await consumer.get_many(2)] == [0, 1]
            (batch,) = await consumer.get_batches()
            assert [record.value for record in batch.records()] == [b"{", b"3"]
            assert consumer.position(T0) == 4


def test_the_blocking_clients_have_them_too() -> None:
    with sync.Broker(listeners="inproc://") as broker:
        producer = sync.Producer(broker.bootstrap_servers, value_serializer=serde.json)
        with producer:
            document = {"a": 1}
            sent = producer.send("t", document)
            document["a"] = 2  # has been serialized
            assert sent.result(10).offset == 0
            assert producer.send(ProducerRecord("t", {"b": 1})).result(10).offset == 1
            with pytest.raises(SerializationError):
                producer.send("t", object())
            producer.send_and_wait("t", None)
        consumer = sync.Consumer(
            "t",
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            value_deserializer=serde.json,
        )
        with consumer:
            assert [consumer.getone().value for _ in range(3)] == [{"a": 1}, {"b": 1}, None]


def test_type_checkers_know_the_types_of_keys_and_values(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
from kafkalite import Consumer, Producer, Record, serde, sync

def shout(data: bytes) -> str:
    return data.decode().upper()

async def read() -> None:
    reveal_type((await Consumer("t").getone()).value)
    consumer = Consumer("t", key_deserializer=serde.integer, value_deserializer=shout, group_id="g")
    async for record in consumer:
        reveal_type((record.key, record.value))
    for found in sync.Consumer("t", value_deserializer=serde.string):
        reveal_type((found.key, found.value))
    producer = Producer(value_serializer=serde.string)
    await producer.send("t", "text")
    await producer.send("t", b"bytes")
    plain: Record = (await Consumer("t").get_many())[0]
"""
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "setup.cfg")]
    command += ["--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line.split("program.py:")[-1] for line in done.stdout.splitlines() if "program.py" in line]
    assert [line for line in lines if "note" in line] == [
        '8: note: Revealed type is "bytes | None"',
        '11: note: Revealed type is "tuple[int | None, str | None]"',
        '13: note: Revealed type is "tuple[bytes | None, str | None]"',
    ]
    errors = [line for line in lines if "error" in line]
    assert len(errors) == 1 and errors[0].startswith('16: error: Argument 2 to "send"'), done.stdout


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_json_refuses_numbers_that_json_does_not_have(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON has no NaN and no infinity: send None instead"):
        serde.json.serialize("t", value)


def test_json_names_other_mistakes_as_python_does() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular"):
        serde.json.serialize("t", circle)
