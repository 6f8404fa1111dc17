"""Invalid input gets a named error or a closed connection, disturbs no other client, and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import resource
import struct
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite import Consumer, Producer
from kafkalite.broker.broker import Broker
from kafkalite.errors import CorruptBatchError, ErrorCode, RecordError
from kafkalite.limits import MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE, MAX_HEADERS_PER_RECORD
from kafkalite.model import TopicPartition
from kafkalite.protocol.connection import ClientConnection, RequestError
from kafkalite.protocol.messages import data, metadata
from kafkalite.records.builder import build_batch
from kafkalite.records.header import seal
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually, settle

Make = Callable[..., Any]

KIB, MIB = 1024, 1024 * 1024
ON_BOTH_LOOPS = True  # each test on asyncio's own loop and on uvloop


def _header(envelope_bytes: int, payload_bytes: int) -> bytes:
    return struct.pack(">II", envelope_bytes & 0xFFFFFFFF, payload_bytes & 0xFFFFFFFF)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(_header(-1, 0), id="negative envelope"),
        pytest.param(_header(100, -1), id="negative payload"),
        pytest.param(_header(2**31 - 1, 2**31 - 1), id="two gigabytes"),
        pytest.param(_header(0, 0), id="empty"),
        pytest.param(_header(MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE + 1, 0), id="too large for a stranger"),
        pytest.param(_header(100, 1), id="a payload before the handshake"),
    ],
)
async def test_impossible_frames_close_the_connection(broker: Broker, settled: Make, header: bytes) -> None:
    async with WireClient(broker.address, handshake=False) as wire:
        wire.send_raw(header)
        await wire.closed()
    await settled(lambda: broker.statistics().connection_count == 0)
    assert broker.statistics().protocol_errors == 1


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(_header(5 * MIB, 0), id="envelope"),
        pytest.param(_header(100, 101 * MIB), id="payload over socket.request.max.bytes"),
        pytest.param(_header(-1, -1), id="negative"),
    ],
)
async def test_oversize_frames_of_a_known_client_close_it(broker: Broker, header: bytes) -> None:
    async with WireClient(broker.address) as wire:
        wire.send_raw(header)
        await wire.closed()
    assert broker.statistics().protocol_errors == 1


async def test_a_frame_cut_off_by_the_end_is_noticed(broker: Broker, settled: Make) -> None:
    async with WireClient(broker.address) as wire:
        frame = wire.encode(metadata.MetadataRequest(None, False))
        wire.send_raw(frame[:-1])
        await settle()
        wire.transport.write_eof()
        await wire.closed()
    await settled(lambda: broker.statistics().connection_count == 0)
    assert broker.statistics().protocol_errors == 1


async def test_unknown_apis_and_versions_are_named_and_the_connection_lives(broker: Broker) -> None:
    async with WireClient(broker.address) as wire:
        ask = metadata.DescribeClusterRequest()
        frame = wire.encode(ask)
        assert frame[9:11] == bytes([60, 0]), "the envelope is [api key, version, ...]"
        unknown = bytearray(frame)
        unknown[9] = 127
        wire.send_raw(unknown)
        refused = (await wire.response()).message
        assert isinstance(refused, RequestError)
        assert refused.error_code == ErrorCode.UNKNOWN_API
        other = bytearray(wire.encode(ask))
        other[10] = 99
        wire.send_raw(other)
        refused = (await wire.response()).message
        assert refused.error_code == ErrorCode.UNSUPPORTED_VERSION
        assert "versions 0 to 0, not 99" in refused.error_message
        assert (await wire.call(ask)).error_code == 0


async def test_a_client_without_a_handshake_gets_an_error_and_is_closed(broker: Broker) -> None:
    async with WireClient(broker.address, handshake=False) as wire:
        wire._wire._versions = {60: 0}
        refused = await wire.call(metadata.DescribeClusterRequest())
        assert refused.error_code == ErrorCode.INVALID_REQUEST
        assert "ApiVersions" in refused.error_message
        await wire.closed()


async def test_batches_that_are_not_what_they_say_are_refused(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))

        async def code(batch: bytearray, topic: str = "t", partition: int = 0) -> int:
            answer = await wire.call(produce(batch, topic, partition), batch)
            found: int = answer.partitions[0].error_code
            return found

        wrong_crc = batch_of(b"x")
        wrong_crc[-1] ^= 1
        assert await code(wrong_crc) == ErrorCode.CORRUPT_MESSAGE
        wrong_codec = batch_of(b"x")
        wrong_codec[21:23] = (7 | 5 << 8).to_bytes(2, "big")
        seal(wrong_codec)
        assert await code(wrong_codec) == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
        assert await code(batch_of(b"x") + batch_of(b"y")) == ErrorCode.CORRUPT_MESSAGE  # two are not one
        assert await code(batch_of(b"x")[:-1]) == ErrorCode.CORRUPT_MESSAGE
        assert await code(batch_of(b"x"), "nothing") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await code(batch_of(b"x"), "../x") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await code(batch_of(b"x"), "t", 1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await code(batch_of(b"x"), "t", -1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await code(batch_of(b"x" * 2 * MIB)) == ErrorCode.MESSAGE_TOO_LARGE
        assert (await wire.call(fetch(0))).partitions[0].high_watermark == 0  # nothing of it was stored
        assert await code(batch_of(b"good")) == 0


async def test_a_body_that_lies_about_its_payload_is_refused_whole(
    broker: Broker, new_topic: Make, batch_of: Make
) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        batch = batch_of(b"x")
        for lie in (len(batch) + 1, len(batch) - 1, 0, -1, 2**40):
            refused = await wire.call(
                data.ProduceRequest(1, 1000, None, [data.ProducePartition("t", 0, lie)]), batch
            )
            assert isinstance(refused, RequestError)
            assert refused.error_code == ErrorCode.INVALID_REQUEST
        assert (await wire.call(metadata.DescribeClusterRequest())).error_code == 0


async def test_a_decompression_bomb_is_never_unpacked_by_the_broker(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    """The broker refuses it by its declared size, and readers as well (S4, S22)."""
    from kafkalite.errors import BatchTooLargeError
    from kafkalite.records.batch import RecordBatch
    from kafkalite.records.compression import compress
    from kafkalite.records.header import Codec

    bomb = bytearray(batch_of(b"x")[:61]) + bytearray(compress(Codec.ZSTD, bytes(200 * MIB), None))
    bomb[8:12] = (len(bomb) - 12).to_bytes(4, "big")
    bomb[21:23] = (7 | int(Codec.ZSTD) << 8).to_bytes(2, "big")
    seal(bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        (result,) = (await wire.call(produce(bomb), bomb)).partitions
        assert result.error_code == ErrorCode.MESSAGE_TOO_LARGE
        with pytest.raises(BatchTooLargeError):
            RecordBatch(bytes(bomb)).columns()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 * KIB  # kibibytes


_FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda envelope, payload: _header(len(envelope), len(payload)) + envelope + payload,
            st.binary(min_size=1, max_size=200),
            st.binary(max_size=50),
        ),
        st.builds(
            lambda key, version, correlation, junk: _envelope(key, version, correlation, junk),
            st.integers(0, 127),
            st.integers(0, 3),
            st.integers(0, 127),
            st.binary(max_size=100),
        ),
    ),
    min_size=1,
    max_size=5,
)


def _envelope(key: int, version: int, correlation: int, junk: bytes) -> bytes:
    """A frame whose envelope begins like a request's, and goes on as it likes."""
    body = bytes([0x95, key, version, correlation, 0xC0]) + (junk or b"\x90")
    return _header(len(body), 0) + body


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_random_frames_leave_nothing_behind(new_loop: Make) -> None:
    """S20: connections, tasks and waiters are back where they were, and a good client is served."""
    loop = new_loop()

    async def attack(broker: Broker, frames: list[bytes], handshake: bool) -> None:
        host, port = broker.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            if handshake:
                writer.writelines(ClientConnection("fuzz").handshake()[1])
            for frame in frames:
                writer.write(frame)
            writer.write_eof()
            async with asyncio.timeout(30):
                while await reader.read(65536):
                    pass
        except (ConnectionResetError, BrokenPipeError):
            pass
        finally:
            writer.close()

    @settings(max_examples=150, derandomize=True, deadline=None, database=None)
    @given(frames=_FRAMES, handshake=st.booleans())
    def fuzz(frames: list[bytes], handshake: bool) -> None:
        loop.run_until_complete(attack(broker, frames, handshake))

    async def after() -> None:
        async with asyncio.timeout(30):
            await eventually(lambda: not broker.statistics().connection_count)
        async with WireClient(broker.address) as wire:
            assert (await wire.call(metadata.DescribeClusterRequest())).error_code == 0
        await eventually(lambda: not broker.statistics().connection_count)

    broker = Broker()
    try:
        loop.run_until_complete(broker.start())
        loop.run_until_complete(after())  # some tasks start with the first connection
        tasks = broker.statistics().task_count
        fuzz()
        loop.run_until_complete(after())
        assert broker.statistics().task_count == tasks
        assert broker.statistics().waiting_requests == 0
        assert broker.is_running
    finally:
        loop.run_until_complete(broker.stop())
        loop.close()
    gc.collect()


async def test_a_record_with_1001_headers_is_refused_by_the_producer_and_skipped_by_a_consumer(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not look into batches, so another producer's are acknowledged."""
    headers = [("n", b"v")] * (MAX_HEADERS_PER_RECORD + 1)
    async with Producer(broker.address, linger_ms=0) as producer:
        with pytest.raises(RecordError, match="a record has at most 1000 headers, this one 1001"):
            await producer.send("t", b"0", headers=headers)
        assert (await producer.send("t", b"0", headers=headers[1:])).offset == 0
        with monkeypatch.context() as patch:
            patch.setattr("kafkalite.records.columns.MAX_HEADERS_PER_RECORD", 2_000)
            foreign = build_batch([b"1", b"2"], headers=[headers, []])
        assert (await producer.send_batch("t", 0, foreign)).base_offset == 1
        await producer.send("t", b"3")
    settings = {"bootstrap_servers": broker.address, "auto_offset_reset": "earliest"}
    async with Consumer("t", **settings) as consumer, asyncio.timeout(30):
        record = await consumer.get_one()
        assert record is not None and len(record.headers) == MAX_HEADERS_PER_RECORD
        with pytest.raises(CorruptBatchError, match=r"t-0: the batch at offset 1 .*1001 exceeds") as refused:
            await consumer.get_one()
        error = refused.value
        assert (error.topic_partition, error.offset, error.next_offset) == (TopicPartition("t", 0), 1, 3)
        await consumer.seek(TopicPartition("t", 0), 3)
        record = await consumer.get_one()
        assert record is not None and record.value == b"3"
