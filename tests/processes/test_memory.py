"""The memory of a broker process while peers send frames and do not complete them (S3)."""

from __future__ import annotations

import asyncio
import re
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from kafkalite import Admin
from kafkalite.limits import MIB
from kafkalite.protocol.connection import ClientConnection
from proof.waiting import eventually

pytestmark = pytest.mark.slow

BUDGET_BYTES = 64 * MIB
#: Buffers that grow, the connections themselves, and what the C library keeps between blocks.
SLACK_BYTES = 48 * MIB
FRAME_BYTES = 4 * MIB
PEERS = 200


class Server:
    """A server process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
        return int(kib) * 1024


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "kafkalite", "server", "start", "--data", str(tmp_path / "data")]
    command += ["--set", "listeners=127.0.0.1:0", "--set", f"queued.max.request.bytes={BUDGET_BYTES}"]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield Server(process, line.decode().split()[-1])
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
