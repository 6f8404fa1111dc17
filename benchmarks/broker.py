"""The broker against bare loops: ingest, cached fetch, round trip, end to end."""

from __future__ import annotations

import asyncio
import os
import struct
import time

import msgpack

from benchmarks import wire
from benchmarks.harness import Row, paired, percentile, plain_row, rate_row, scratch_dir, server, time_row
from kafkalite.protocol.messages import admin, data
from kafkalite.records.builder import build_batch

KB = 1000
MIB = 1024 * 1024


def _create(session: wire.Session, topic: str, configs: dict[str, str] | None = None) -> None:
    answer = session.call(
        admin.CreateTopicsRequest(10_000, False, [admin.NewTopic(topic, 1, 1, configs or {})])
    ).message
    assert answer.topics[0].error_code in (0, 36), answer


def _opaque_batch(size_bytes: int) -> bytes:
    """Return one record in a batch of about ``size_bytes``, which the broker never unpacks."""
    return bytes(build_batch([os.urandom(size_bytes - 80)], timestamps_ms=1))


def ingest() -> list[Row]:
    rows: list[Row] = []
    with scratch_dir() as path:
        for name, size, count, window in (("1 MiB", MIB, 600, 4), ("100 KB", 100 * KB, 5000, 16)):
            batch = _opaque_batch(size)
            with (
                server("bare-append", "--dir", path) as bare,
                server("kafkalite", "--dir", f"{path}/{size}") as ours,
            ):
                bare_sock = wire.connect(bare.port)
                bare_frame = struct.pack(">I", len(batch)) + batch
                session = wire.Session(ours.port)
                _create(session, "ingest", {"max.message.bytes": str(16 * MIB)})
                frame = session.encode(
                    data.ProduceRequest(1, 10_000, None, [data.ProducePartition("ingest", 0, len(batch))]),
                    (batch,),
                )

                def bare_rate() -> float:
                    seconds, _ = wire.pump(bare_sock, [bare_frame], count, window, wire.skip_short_answer)
                    return count * len(batch) / seconds / 1e9

                def our_rate() -> float:
                    seconds, _ = wire.pump(session.sock, [frame], count, window, wire.skip_answer)
                    return count * len(batch) / seconds / 1e9

                bare_rate(), our_rate()
                yardstick, value = paired(bare_rate, our_rate, 5)
                rows.append(
                    rate_row(
                        f"broker ingest, {name} batches",
                        f"one connection, {window} in flight, page-cache, acks=1; against receive, CRC-32C, pwrite",
                        value,
                        "GB/s",
                        yardstick=yardstick,
                        at_least=0.6,
                    )
                )
                bare_sock.close()
                session.close()
    return rows


def fetch() -> list[Row]:
    with (
        scratch_dir() as path,
        server("bare-send", "--dir", path) as bare,
        server("kafkalite", "--dir", f"{path}/k") as ours,
    ):
        session = wire.Session(ours.port)
        _create(session, "fetch")
        batch = _opaque_batch(100 * KB)
        produce = session.encode(
            data.ProduceRequest(1, 10_000, None, [data.ProducePartition("fetch", 0, len(batch))]), (batch,)
        )
        wire.pump(session.sock, [produce], 640, 8, wire.skip_answer)
        step = MIB // len(batch)
        frames = [
            session.encode(
                data.FetchRequest(500, 1, 64 * MIB, 0, [data.FetchPartition("fetch", 0, -1, offset, MIB)])
            )
            for offset in range(0, 620, step)
        ]
        bare_sock = wire.connect(bare.port)
        bare_frames = [struct.pack(">Q", i * MIB) for i in range(60)]

        def bare_rate() -> float:
            seconds, received = wire.pump(bare_sock, bare_frames, 1500, 4, wire.skip_answer)
            return received / seconds / 1e9

        def our_rate() -> float:
            seconds, received = wire.pump(session.sock, frames, 1500, 4, wire.skip_answer)
            return received / seconds / 1e9

        bare_rate(), our_rate()
        yardstick, value = paired(bare_rate, our_rate, 5)
        session.close()
        bare_sock.close()
        return [
            rate_row(
                "fetch of cached segments",
                "1 MiB a request, 4 in flight, 64 MB of 100 KB batches; against a bare send of mapped pages",
                value,
                "GB/s",
                yardstick=yardstick,
                at_least=0.6,
            )
        ]


async def _client_round_trips(port: int, count: int) -> list[float]:
    from kafkalite.client.producer.producer import Producer

    samples: list[float] = []
    async with Producer(f"127.0.0.1:{port}", acks=1, linger_ms=0) as producer:
        value = b"x" * 100
        for _ in range(200):
            await producer.send("rtt", value)
        for _ in range(count):
            start = time.perf_counter()
            await producer.send("rtt", value)
            samples.append(time.perf_counter() - start)
    return samples


async def _end_to_end(port: int, count: int) -> list[float]:
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.client.producer.producer import Producer

    samples: list[float] = []
    async with (
        Producer(f"127.0.0.1:{port}", acks=1, linger_ms=0) as producer,
        Consumer("e2e", bootstrap_servers=f"127.0.0.1:{port}", auto_offset_reset="earliest") as consumer,
    ):
        records = aiter(consumer)
        for i in range(count + 100):
            waiting = asyncio.ensure_future(anext(records))
            await asyncio.sleep(0.001)  # let the long poll reach the broker
            start = time.perf_counter()
            producer.send_nowait("e2e", b"x" * 100)
            await waiting
            if i >= 100:
                samples.append(time.perf_counter() - start)
    return samples


async def _bare_round_trips(port: int, count: int) -> list[float]:
    """Measure the bare RPC with a plain asyncio client, for comparison with the client library."""
    loop = asyncio.get_running_loop()

    class Client(asyncio.Protocol):
        answer: asyncio.Future[None]

        def data_received(self, received: bytes) -> None:
            (length,) = struct.unpack_from(">I", received)
            msgpack.unpackb(received[4 : 4 + length])
            self.answer.set_result(None)

    transport, client = await loop.create_connection(Client, "127.0.0.1", port)
    samples: list[float] = []
    for _ in range(count + 200):
        start = time.perf_counter()
        body = msgpack.packb([0, 0, 7, "bench", [1, 30_000, [["rtt", 0, 180]]]])
        client.answer = loop.create_future()
        transport.write(struct.pack(">I", len(body)) + body)
        await client.answer
        samples.append(time.perf_counter() - start)
    transport.close()
    return samples[200:]


def latency() -> list[Row]:
    import uvloop

    with scratch_dir() as path, server("bare-rpc") as bare, server("kafkalite", "--dir", path) as ours:
        session = wire.Session(ours.port)
        _create(session, "rtt")
        _create(session, "e2e")
        session.close()

        def bare_p50() -> float:
            return percentile(uvloop.run(_bare_round_trips(bare.port, 4000)), 0.5) * 1e6

        def our_p50() -> float:
            return percentile(uvloop.run(_client_round_trips(ours.port, 4000)), 0.5) * 1e6

        def end_to_end_p50() -> float:
            return percentile(uvloop.run(_end_to_end(ours.port, 1000)), 0.5) * 1e6

        yardstick, value = paired(bare_p50, our_p50, 5)
        bare_again, e2e = paired(bare_p50, end_to_end_p50, 3)
        return [
            plain_row("bare msgpack RPC p50", "two processes, uvloop both sides", yardstick, "µs"),
            time_row(
                "produce round trip p50",
                "one 100-byte record, acks=1, page-cache, linger 0, Producer.send; against the bare RPC",
                value,
                "µs",
                yardstick=yardstick,
                at_most=3,
            ),
            time_row(
                "produce → consume p50",
                "one 100-byte record through a parked long poll; against the bare RPC",
                e2e,
                "µs",
                yardstick=bare_again,
                at_most=5,
            ),
        ]


def durable() -> list[Row]:
    """Measure the cost of fsync: produce with durability=fsync, beside a bare pwrite + fdatasync."""
    with scratch_dir() as path:
        batch = _opaque_batch(100 * KB)

        def bare_rate() -> float:
            fd = os.open(f"{path}/bare", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, 64 * MIB)
            start = time.perf_counter()
            for i in range(200):
                os.pwrite(fd, batch, i * len(batch))
                os.fdatasync(fd)
            seconds = time.perf_counter() - start
            os.close(fd)
            return 200 * len(batch) / seconds / 1e6

        with server("kafkalite", "--dir", f"{path}/k", "--durability", "fsync") as ours:
            session = wire.Session(ours.port)
            _create(session, "durable")
            frame = session.encode(
                data.ProduceRequest(-1, 10_000, None, [data.ProducePartition("durable", 0, len(batch))]),
                (batch,),
            )

            def our_rate() -> float:
                seconds, _ = wire.pump(session.sock, [frame], 400, 16, wire.skip_answer)
                return 400 * len(batch) / seconds / 1e6

            yardstick, value = paired(bare_rate, our_rate)
            session.close()
        return [
            Row(
                "durable ingest, 100 KB batches",
                "acks=all, durability=fsync, 16 in flight (group commit); against pwrite + fdatasync one by one",
                value,
                "MB/s",
                yardstick,
                value / yardstick,
            )
        ]


def run() -> list[Row]:
    return [*ingest(), *fetch(), *latency(), *durable()]
