"""The memory of a broker process: while peers do not complete what they send (S3, S5), and over time."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import ssl
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kafkalite import Admin, Consumer, Producer
from kafkalite.broker.server.descriptors import raise_limit
from kafkalite.limits import KIB, MIB
from kafkalite.protocol.connection import ClientConnection
from proof.certificates import DevCertificates
from proof.processes.slow_peers import SlowPeers
from proof.waiting import eventually

pytestmark = pytest.mark.slow

BUDGET_BYTES = 64 * MIB
#: Buffers that grow, the connections themselves, and what the C library keeps between blocks.
SLACK_BYTES = 48 * MIB
FRAME_BYTES = 4 * MIB
PEERS = 200
SOAK_ROUNDS = 100
SOAK_SLACK_BYTES = 2 * MIB
FEW_DESCRIPTORS = 40
IDLE_PEERS = 500
#: A connection that sends nothing, or a byte now and then: transport, buffer and protocol state.
IDLE_PEER_BYTES = 50_000
SLOW_PEERS = 2_000
HALF_SENT_FRAMES = 500

#: Partitions of one broker, each with a record, and what each may add to the resident memory.
MANY_PARTITIONS = 5_000
PARTITION_BYTES = 20_000


class Server:
    """A server process."""

    def __init__(self, process: asyncio.subprocess.Process, *addresses: str) -> None:
        self.process = process
        self.addresses = addresses
        self.address = addresses[0]

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
        return int(kib) * 1024

    def descriptor_count(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def socket_count(self) -> int:
        """Return the number of descriptors of sockets. Those of files vary: a log may be open twice."""
        count = 0
        for number in os.listdir(directory := f"/proc/{self.process.pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                count += os.readlink(f"{directory}/{number}").startswith("socket:")
        return count


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path, "listeners=127.0.0.1:0") as server:
        yield server


@asynccontextmanager
async def running(tmp_path: Path, *settings: str) -> AsyncIterator[Server]:
    """Run a server process with a budget of BUDGET_BYTES."""
    command = [sys.executable, "-m", "kafkalite", "server", "start", "--data", str(tmp_path / "data")]
    for setting in (f"queued.max.request.bytes={BUDGET_BYTES}", *settings):
        command += ["--set", setting]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield Server(process, *re.findall(r"127\.0\.0\.1:\d+", line.decode()))
    finally:
        process.kill()
        await process.wait()


async def begin_frame(
    address: str, envelope_bytes: int, payload_bytes: int, sent: bytes
) -> asyncio.StreamWriter:
    """Shake hands, announce a frame, and send the beginning of it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    _, hello = ClientConnection("test").handshake()
    writer.writelines(hello)
    await reader.readexactly(8)
    writer.write(struct.pack(">II", envelope_bytes, payload_bytes) + sent)
    with suppress(ConnectionError):  # the broker may close connections beyond its budget
        await writer.drain()
    return writer


@pytest.mark.parametrize("part", ["envelope", "payload"])
async def test_s3_frames_that_are_never_completed_keep_to_the_budget(server: Server, part: str) -> None:
    """Half-sent frames first, then frames of which only some bytes come, which reuse the memory of the first.
    Another client is served all the time, and the memory returns to the system when the peers are gone."""
    before = server.resident_bytes()
    lengths = (FRAME_BYTES, 0) if part == "envelope" else (30, FRAME_BYTES)
    async with Admin(server.address) as admin:
        for sent_bytes in (FRAME_BYTES // 2, 100_000, 1_000):
            peers = await asyncio.gather(
                *(begin_frame(server.address, *lengths, bytes(sent_bytes)) for _ in range(PEERS))
            )
            await admin.create_topic(f"topic-{sent_bytes}", 1)
            assert server.resident_bytes() - before < BUDGET_BYTES + SLACK_BYTES
            for peer in peers:
                peer.transport.abort()
        await eventually(lambda: server.resident_bytes() - before < SLACK_BYTES)


async def test_s5_silent_and_slow_peers_cost_little_and_another_client_is_served(server: Server) -> None:
    """A third of the peers sends nothing, a third shakes hands, and a third begins a frame."""
    before = server.resident_bytes()
    host, _, port = server.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(IDLE_PEERS // 3)]
    peers = [writer for _, writer in silent]
    for sent in (b"", b"\x95"):
        peers += [await begin_frame(server.address, 30, 0, sent) for _ in range(IDLE_PEERS // 3)]
    async with Admin(server.address) as admin:
        await admin.create_topic("served", 1)
    assert server.resident_bytes() - before < IDLE_PEERS * IDLE_PEER_BYTES
    for peer in peers:
        peer.transport.abort()


async def test_2000_slow_connections_and_500_half_sent_frames_cost_no_more_than_the_budget(
    tmp_path: Path, dev_certificates: DevCertificates
) -> None:
    """S3, S5: a client with large requests is served, and memory and descriptors are given back."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * (SLOW_PEERS + HALF_SENT_FRAMES + FEW_DESCRIPTORS):
        pytest.skip(f"the limit of descriptors is {hard}, and max.connections at most half of it")
    raise_limit()
    listeners = "listeners=127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0"
    keystore = f"ssl.keystore.location={dev_certificates / 'broker.pem'}"
    tls = ssl.create_default_context(cafile=dev_certificates / "ca.pem")
    async with running(tmp_path, listeners, keystore) as server:
        served = 0

        async def serve() -> None:
            nonlocal served
            async with Producer(server.address, retries=0, enable_idempotence=False) as producer:
                while True:
                    async with asyncio.timeout(30):
                        await producer.send("good", os.urandom(MIB // 2))
                    served += 1

        good = asyncio.create_task(serve())
        await eventually(lambda: served > 0 or good.done())
        grown, before = [], (server.resident_bytes(), server.socket_count())
        try:
            for _ in range(2):
                peers = SlowPeers(server.addresses, tls)
                await peers.open(SLOW_PEERS)
                # A peer may be connected before the broker has accepted it. On a busy machine, the deadline
                # of 10 s may end handshakes and logins, which half of the peers send, while others connect.
                await eventually(lambda: server.socket_count() >= before[1] + SLOW_PEERS // 2)
                await peers.drip()
                assert server.resident_bytes() - before[0] < SLOW_PEERS * IDLE_PEER_BYTES
                already = served
                await peers.send_halves(HALF_SENT_FRAMES, 256 * KIB)
                for _ in range(5):
                    await peers.drip()
                    grown.append(server.resident_bytes() - before[0])
                await eventually(lambda: served > already + 5 or good.done())  # noqa: B023
                assert peers.closed_requests == 0
                peers.close()
                await eventually(lambda: server.socket_count() <= before[1])
                await eventually(lambda: server.resident_bytes() - before[0] < SLACK_BYTES)
            assert not good.done()
        finally:
            good.cancel()
            await asyncio.gather(good, return_exceptions=True)
        assert max(grown) < BUDGET_BYTES + SLOW_PEERS * IDLE_PEER_BYTES


async def test_clients_that_come_and_go_leave_nothing_behind(server: Server) -> None:
    """A soak in short: memory and descriptors do not grow with what clients have done."""

    async def round_of_clients() -> None:
        async with (
            Producer(server.address) as producer,
            Consumer("soak", bootstrap_servers=server.address, auto_offset_reset="earliest") as consumer,
        ):
            await producer.send("soak", b"x" * 100)
            assert await consumer.get_many(timeout_ms=10_000)

    async with Admin(server.address) as admin:
        await admin.create_topic("soak", 1)
    for _ in range(SOAK_ROUNDS):
        await round_of_clients()
    await eventually(lambda: server.descriptor_count() <= FEW_DESCRIPTORS)
    before = server.resident_bytes()
    for _ in range(3 * SOAK_ROUNDS):
        await round_of_clients()
    await eventually(lambda: server.descriptor_count() <= FEW_DESCRIPTORS)
    assert server.resident_bytes() - before < SOAK_SLACK_BYTES


async def test_memory_is_bounded_with_5000_partitions(server: Server) -> None:
    """After the creation, with a record in each, and with all of them read."""
    before = server.resident_bytes()
    topics = [f"many-{number}" for number in range(5)]
    async with Admin(server.address, request_timeout_ms=60_000) as admin:
        for topic in topics:
            await admin.create_topic(topic, MANY_PARTITIONS // len(topics))
    created = server.resident_bytes() - before
    async with Producer(server.address) as producer:
        for topic in topics:
            for partition in range(MANY_PARTITIONS // len(topics)):
                producer.send_nowait(topic, b"x" * 100, partition=partition)
        await producer.flush()
    written = server.resident_bytes() - before
    count = 0
    async with Consumer(*topics, bootstrap_servers=server.address, auto_offset_reset="earliest") as consumer:
        while count < MANY_PARTITIONS:
            count += len(await consumer.get_many(10_000, timeout_ms=30_000))
    read = server.resident_bytes() - before
    print(f"{MANY_PARTITIONS} partitions: {before=} {created=} {written=} {read=}")
    assert max(created, written, read) < MANY_PARTITIONS * PARTITION_BYTES
