"""Peers that do not finish what they begin: slow connections, and half-sent frames (S3, S5)."""

# Tests: tests/processes/test_memory.py

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kafkalite.protocol.api import ApiKey
from proof.processes.drawn_requests import frame_of

#: Announced, and never sent; below socket.request.max.bytes, so the announcement is no error.
DECLARED_BYTES: Final = 100_000_000
_AT_ONCE: Final = 50  # connections that are opened concurrently
_BURST: Final = 10  # bytes that are sent at once, each on another connection
_LONG: Final = "x" * 10_000
_HANDSHAKE: Final = frame_of(ApiKey.API_VERSIONS, 0, ["slow", _LONG[:200]])
_LOGIN: Final = frame_of(ApiKey.SASL_AUTHENTICATE, 1, [_LONG.encode()])
_REQUEST: Final = frame_of(ApiKey.METADATA, 1, [[_LONG], False])


class SlowPeers:
    """Peers of one broker. ``addresses``: of its listeners in plain text, with logins, and with TLS.

    A quarter of the slow connections each sends, a byte at a time: the handshake; a request; a message of a
    login; a request over TLS.
    """

    def __init__(self, addresses: Sequence[str], tls: ssl.SSLContext) -> None:
        self._plain, self._login, self._encrypted = addresses
        self._tls = tls
        self._slow: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._half: list[asyncio.StreamWriter] = []
        self._sent = 0  # bytes that each slow connection has sent

    async def open(self, count: int, *, per_second: float = 2_000.0) -> None:
        """Open ``count`` slow connections, at most ``per_second``."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            async with room:
                self._slow.append(await self._open_slow(number))

        async with asyncio.TaskGroup() as opening:
            for number in range(count):
                await asyncio.sleep(max(0.0, begun_s + number / per_second - loop.time()))
                opening.create_task(one(number))

    async def _open_slow(self, number: int) -> tuple[asyncio.StreamWriter, bytes]:
        match number % 4:
            case 0:
                return await self._open(self._plain, shakes_hands=False), _HANDSHAKE
            case 1:
                return await self._open(self._plain), _REQUEST
            case 2:
                return await self._open(self._login), _LOGIN
            case _:
                return await self._open(self._encrypted, self._tls), _REQUEST

    async def _open(
        self, address: str, tls: ssl.SSLContext | None = None, *, shakes_hands: bool = True
    ) -> asyncio.StreamWriter:
        host, _, port = address.rpartition(":")
        name = None if tls is None else "localhost"
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=name)
        if shakes_hands:
            writer.write(_HANDSHAKE)
            await reader.readexactly(8)
        return writer

    async def drip(self, seconds: float = 0.0) -> None:
        """Send the next byte on each slow connection, in about ``seconds``."""
        pause_s = seconds * _BURST / max(len(self._slow), 1)
        for number, (writer, frame) in enumerate(self._slow):
            if not writer.is_closing():
                writer.write(frame[self._sent : self._sent + 1])
            if number % _BURST == 0:
                await asyncio.sleep(pause_s)
        self._sent += 1

    async def send_halves(self, count: int, sent_bytes: int) -> None:
        """Announce ``count`` frames of DECLARED_BYTES at once, and send the first ``sent_bytes`` of each."""
        for first in range(0, count, _AT_ONCE):
            opening = (self._open(self._plain) for _ in range(min(_AT_ONCE, count - first)))
            self._half += await asyncio.gather(*opening)
        beginning = struct.pack(">II", 30, DECLARED_BYTES) + bytes(30 + sent_bytes)
        for writer in self._half:
            writer.write(beginning)
        for writer in self._half:
            with suppress(ConnectionError):  # the broker closes connections beyond its budget
                await writer.drain()

    @property
    def closed_requests(self) -> int:
        """The number of slow requests of which the broker has closed the connection.

        The deadline of a request is 30 s. That of handshakes and logins, which are not counted, is 10 s.
        """
        return sum(writer.is_closing() for writer, frame in self._slow if frame is _REQUEST)

    def close(self) -> None:
        """Reset all connections."""
        for writer in (*(writer for writer, _ in self._slow), *self._half):
            writer.transport.abort()
