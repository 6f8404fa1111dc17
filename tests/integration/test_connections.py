"""Many clients, slow clients, clients that never read or never finish: the good ones are served."""

from __future__ import annotations

import asyncio
import resource
import struct
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.server import FRAME_DEADLINE_MS, HANDSHAKE_DEADLINE_MS, REAP_INTERVAL_MS
from kafkalite.client.admin.admin import Admin
from kafkalite.errors import ConnectionFailedError, ErrorCode
from kafkalite.protocol.connection import ClientConnection
from kafkalite.protocol.messages import data, metadata
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

Make = Callable[..., Any]

KIB, MIB = 1024, 1024 * 1024
ON_BOTH_LOOPS = True  # each test on asyncio's own loop and on uvloop


async def test_pipelined_requests_are_answered_in_order(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    """Ready answers, durable ones, long polls and tasks, mixed: the order is the requests'."""
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        expected: list[int] = []
        for number in range(300):
            batch = batch_of(b"x" * (number % 7) * 1000)
            if number % 5 == 0:
                expected.append(wire.send(metadata.MetadataRequest([f"auto-{number % 3}"], True)))
            elif number % 5 == 1:
                expected.append(wire.send(fetch(10**6 if number % 2 else 0, max_wait_ms=2)))
            else:
                expected.append(wire.send(produce(batch, acks=(number % 3) - 1), batch))
        received = [(await wire.response()).correlation_id for _ in expected]
        assert received == expected


async def test_offsets_of_pipelined_batches_follow_their_order(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        batch = batch_of(b"x" * 100)
        for _ in range(500):
            wire.send(produce(batch), batch)
        offsets = [(await wire.response()).message.partitions[0].base_offset for _ in range(500)]
        assert offsets == list(range(500))
        assert broker.statistics().sync_rounds < 500  # commits were grouped


async def test_a_client_that_never_reads_stops_being_read(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make, fetch: Make, settled: Make
) -> None:
    async with WireClient(broker.address) as greedy, WireClient(broker.address) as good:
        await good.call(new_topic("t"))
        batch = batch_of(b"x" * 500 * KIB)
        for _ in range(8):
            await good.call(produce(batch), batch)
        greedy.transport.pause_reading()
        frame = greedy.encode(fetch(0, max_bytes=4 * MIB))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(1000):
            greedy.transport.write(frame)  # asks for four gigabytes

        served = -1

        def stands_still() -> bool:
            nonlocal served
            last, served = served, broker.statistics().requests.get("FETCH", 0)
            return 0 < last == served

        await eventually(stands_still)
        assert served < 100
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * KIB  # kibibytes
        for _ in range(10):
            assert (await good.call(fetch(0))).partitions[0].error_code == 0


async def test_five_hundred_half_sent_frames_cost_what_was_sent(settled: Make) -> None:
    """S3: what was announced is not allocated, what was sent is bounded, the good client is served."""
    async with Broker(queued_max_request_bytes=64 * MIB) as broker:
        peers: list[WireClient] = []
        try:
            for _ in range(500):
                peer = WireClient(broker.address)
                await peer.__aenter__()
                peers.append(peer)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for peer in peers:
                peer.send_raw(struct.pack(">II", 30, 100 * MIB), bytes(30), bytes(256 * KIB))
            await settled(
                lambda: (
                    sum(peer.is_closed for peer in peers) > 200 and broker.statistics().connection_count < 300
                )
            )
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 200 * KIB  # kibibytes, the sending side's buffers included
            async with WireClient(broker.address) as good:
                assert (await good.call(metadata.DescribeClusterRequest())).error_code == 0
        finally:
            for peer in peers:
                peer.transport.abort()
            await settled(lambda: all(peer.is_closed for peer in peers))
        await settled(lambda: broker.statistics().connection_count == 0)


async def test_slow_ones_are_reaped_and_others_stay(new_topic: Make, fetch: Make, settled: Make) -> None:
    """S5: no handshake, a frame that drips, and silence end a connection; a long poll does not."""
    clock = VirtualClock()
    async with (
        Broker(clock=clock, connections_max_idle_ms=60_000) as broker,
        WireClient(broker.address, handshake=False) as silent,
        WireClient(broker.address) as dripping,
        WireClient(broker.address) as idle,
        WireClient(broker.address) as polling,
    ):
        await polling.call(new_topic("t"))
        polling.send(fetch(0, max_wait_ms=3_600_000))
        await settled(lambda: broker.statistics().waiting_requests == 1)
        await clock.advance(HANDSHAKE_DEADLINE_MS + REAP_INTERVAL_MS)
        await silent.closed()
        assert not dripping.is_closed
        for _ in range(FRAME_DEADLINE_MS // REAP_INTERVAL_MS + 2):
            if not dripping.is_closed:
                dripping.send_raw(b"\x00")
            await asyncio.sleep(0.005)
            await clock.advance(REAP_INTERVAL_MS)
        await dripping.closed()
        assert not idle.is_closed
        await clock.advance(60_000)
        await idle.closed()
        assert not polling.is_closed
        assert broker.statistics().connections_reaped == 3


async def test_connections_above_the_limit_are_closed_and_room_is_made_again(settled: Make) -> None:
    async with Broker(max_connections=2) as broker:
        async with WireClient(broker.address), WireClient(broker.address):
            with pytest.raises((ConnectionResetError, ConnectionError)):
                async with WireClient(broker.address):
                    pass
        await settled(lambda: broker.statistics().connection_count == 0)
        async with WireClient(broker.address) as wire:
            assert (await wire.call(metadata.DescribeClusterRequest())).error_code == 0
        assert broker.statistics().connections_refused == 1


async def test_large_payloads_arrive_whole(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **{"max.message.bytes": str(64 * MIB)}))
        batch = batch_of(bytes(range(256)) * 4 * 8 * KIB)
        answer = await wire.call(produce(batch), batch)
        assert answer.partitions[0].error_code == 0
        await wire.call(fetch(0))
        assert bytes(wire.last_payload[16:]) == bytes(batch[16:])


@pytest.mark.parametrize("count", [20, 300])
async def test_pipelined_requests_are_answered_when_the_broker_stops(count: int) -> None:
    """With results or SHUTTING_DOWN, in order; then the stream ends, and is not reset."""
    broker = Broker(listeners=("127.0.0.1:0",))
    await broker.start()
    host, _, port = broker.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    wire = ClientConnection("stopping")
    writer.writelines(wire.handshake()[1])
    buffer = wire.get_buffer()
    received = await reader.read(len(buffer))
    buffer[: len(received)] = received
    wire.buffer_updated(len(received))
    sent = []
    for _ in range(count):
        correlation_id, buffers = wire.send(metadata.MetadataRequest([], False))
        sent.append(correlation_id)
        writer.writelines(buffers)
    stopping = asyncio.create_task(broker.stop())
    answers: list[Any] = []
    while received := await asyncio.wait_for(reader.read(1_000), 30):
        buffer = wire.get_buffer()
        while received:
            taken = min(len(buffer), len(received))
            buffer[:taken] = received[:taken]
            answers += wire.buffer_updated(taken)
            received, buffer = received[taken:], wire.get_buffer()
    assert [one.correlation_id for one in answers] == sent
    assert {one.message.error_code for one in answers} <= {0, ErrorCode.SHUTTING_DOWN}
    writer.close()
    await stopping


async def test_a_half_closed_client_still_gets_its_answers(
    broker: Broker, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        batch = batch_of()
        for _ in range(3):
            wire.send(produce(batch), batch)
        wire.transport.write_eof()
        for expected in range(3):
            assert (await wire.response()).message.partitions[0].base_offset == expected
        await wire.closed()


async def test_a_stop_answers_what_is_in_flight_and_refuses_new_connections(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make, settled: Make
) -> None:
    broker = Broker()
    await broker.start()
    address = broker.address
    async with WireClient(address) as poller, WireClient(address) as producer:
        await producer.call(new_topic("t"))
        poller.send(fetch(0, max_wait_ms=60_000))
        await settled(lambda: broker.statistics().waiting_requests == 1)
        batch = batch_of()
        producer.send(data.ProduceRequest(-1, 5000, None, [data.ProducePartition("t", 0, len(batch))]), batch)
        await settled(lambda: broker.statistics().appended_batches == 1)
        await broker.stop()
        assert (await producer.response()).message.partitions[0].base_offset == 0
        assert (await poller.response()).message.partitions[0].error_code == 0
        await poller.closed()
        await producer.closed()
    from kafkalite.errors import ConnectionFailedError

    with pytest.raises(ConnectionFailedError):
        async with WireClient(address):
            pass


async def test_a_client_beyond_the_limit_of_connections_is_told_the_likely_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Broker(listeners="127.0.0.1:0", max_connections=3) as broker:
        host, _, port = broker.address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        with pytest.raises(ConnectionFailedError) as refused:
            async with Admin(broker.address, request_timeout_ms=2_000, default_api_timeout_ms=2_000) as admin:
                await admin.list_topics()
        assert "closed the connection" in refused.value.message
        assert "max.connections" in refused.value.hint
        assert "3 connections are open; raise max.connections" in caplog.text
        for _, writer in idle:
            writer.transport.abort()
