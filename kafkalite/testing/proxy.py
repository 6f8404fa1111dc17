"""FaultyProxy: a TCP proxy that can lose, stall and slow down the data of each link, and reset connections.

::

    async with FaultyProxy("127.0.0.1:9092") as proxy:
        producer = Producer(proxy.address)
        proxy.link().there.black_hole()      # requests are lost; responses still arrive
        proxy.heal()

A connection belongs to the *link* of the client that opened it. By default there is one link for all clients.
With ``source_of=client_id_of`` there is a link for each client id, so that the proxy of a node can cut off
one peer of the node and serve the others. A link has two directions: ``there`` is towards the target,
``back`` is from the target.

Faults resemble those of a network. Bytes that are lost in a black hole are never delivered, so a connection
that lost any bytes is reset when its link heals. A stall only delays bytes. Faults also apply to connections
that are opened later.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Final, Self

from kafkalite.errors import KafkaliteError
from kafkalite.limits import FRAME_HEADER_BYTES, KIB
from kafkalite.protocol import codec
from kafkalite.transport.tcp import format_address, parse_address

ANY_CLIENT: Final = ""
_CHUNK_BYTES: Final = 64 * KIB
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

SourceOf = Callable[[bytes], str]
"""Returns the source (the name of the link) of a connection, given the first bytes that it sent."""


def client_id_of(first_bytes: bytes) -> str:
    """Return the client id in the first request of a kafkalite connection; ANY_CLIENT if there is none."""
    envelope_bytes = int.from_bytes(first_bytes[:4], "big")
    envelope = first_bytes[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + envelope_bytes]
    try:
        return codec.decode_request_head(envelope).client_id or ANY_CLIENT
    except KafkaliteError:
        return ANY_CLIENT


class Direction:
    """One direction of a link and its faults, which can be combined. ``heal`` ends all of them."""

    def __init__(self) -> None:
        self._is_black_hole = False
        self._is_stalled = False
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._bytes_until_cut: int | None = None
        self._changed = asyncio.Event()
        self.passed_bytes = 0
        self.lost_bytes = 0

    def black_hole(self) -> None:
        """Lose all data from now on. The sender only notices that responses are missing."""
        self._set(_is_black_hole=True)

    def stall(self) -> None:
        """Deliver nothing until ``heal``, but lose nothing. The sender's buffers fill up."""
        self._set(_is_stalled=True)

    def delay(self, delay_ms: float) -> None:
        """Deliver each piece of data ``delay_ms`` later."""
        self._set(_delay_s=delay_ms / 1000)

    def throttle(self, bytes_per_s: float) -> None:
        """Limit the data of each connection to about ``bytes_per_s`` from now on."""
        self._set(_bytes_per_s=bytes_per_s)

    def cut_after(self, count_bytes: int) -> None:
        """Pass ``count_bytes`` more bytes, then reset the connection that carried the last of them.

        That most likely cuts a frame in two.
        """
        self._set(_bytes_until_cut=count_bytes)

    def heal(self) -> None:
        self._set(
            _is_black_hole=False, _is_stalled=False, _delay_s=0.0, _bytes_per_s=None, _bytes_until_cut=None
        )

    def _set(self, **faults: Any) -> None:
        for name, value in faults.items():
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pass(self, data: bytes, connection: _Connection, writer: asyncio.StreamWriter) -> bool:
        """Deliver ``data`` with the faults applied. Return False if a fault has reset the connection."""
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        while self._is_stalled and not self._is_black_hole:
            await self._changed.wait()
        if self._is_black_hole:
            self.lost_bytes += len(data)
            connection.has_lost = True
            return True
        if connection.has_lost:  # the link has healed, but bytes are missing in the stream
            connection.reset()
            return False
        if self._bytes_until_cut is not None:
            left, self._bytes_until_cut = self._bytes_until_cut, self._bytes_until_cut - len(data)
            if left <= len(data):
                self._bytes_until_cut = None
                writer.write(data[:left])
                with suppress(TimeoutError):  # a peer that does not read must not block the proxy
                    async with asyncio.timeout(1):
                        await writer.drain()
                connection.reset()
                return False
        writer.write(data)
        await writer.drain()
        self.passed_bytes += len(data)
        if self._bytes_per_s is not None:
            await asyncio.sleep(len(data) / self._bytes_per_s)
        return True


class Link:
    """All connections of one source to the proxy's target, and their faults. ``source`` is a result of the
    proxy's ``source_of``, such as a client id, or ANY_CLIENT if the proxy has no ``source_of``."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.there = Direction()
        self.back = Direction()
        self.is_refused = False
        self._connections: dict[_Connection, None] = {}

    def __repr__(self) -> str:
        return f"<Link {self.source or 'of all sources'}, {self.connection_count} connections>"

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def cut(self) -> None:
        """Lose all data in both directions from now on."""
        self.there.black_hole()
        self.back.black_hole()

    def reset(self) -> None:
        """Reset every connection (RST). New connections are accepted."""
        for connection in list(self._connections):
            connection.reset()

    def refuse(self) -> None:
        """Reset every connection, and each new one as soon as its source is identified."""
        self.is_refused = True
        self.reset()

    def heal(self) -> None:
        """End all faults. Connections that lost bytes are reset."""
        self.is_refused = False
        self.there.heal()
        self.back.heal()
        for connection in list(self._connections):
            if connection.has_lost:
                connection.reset()


class _Connection:
    """An accepted connection, and the connection to the target that belongs to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.target: asyncio.StreamWriter | None = None
        self.has_lost = False
        self.task = asyncio.current_task()

    def reset(self) -> None:
        """Send RST to both sides."""
        for writer in (self.writer, self.target):
            if writer is None or writer.transport.is_closing():
                continue
            opened = writer.get_extra_info("socket")
            with suppress(OSError):
                opened.setsockopt(SOL_SOCKET, SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        if self.task is not None:
            self.task.cancel()


class FaultyProxy:
    """Listens at ``address`` and forwards to ``target`` with the faults applied."""

    def __init__(
        self, target: str, *, listen: str = "127.0.0.1:0", source_of: SourceOf | None = None
    ) -> None:
        self.target = target
        self.address = listen
        self._source_of = source_of
        self._links: dict[str, Link] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<FaultyProxy {self.address} to {self.target}>"

    async def start(self) -> Self:
        """Start listening. Raises OSError."""
        host, port = parse_address(self.address)
        self._server = await asyncio.start_server(self._accepted, host, port)
        self.address = format_address(*self._server.sockets[0].getsockname()[:2])
        return self

    async def close(self) -> None:
        """Reset every connection and stop listening."""
        if self._server is None:
            return
        self._server.close()
        for link in self._links.values():
            link.reset()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def link(self, source: str = ANY_CLIENT) -> Link:
        """Return the link of ``source``, even before the source has connected."""
        if source not in self._links:
            self._links[source] = Link(source)
        return self._links[source]

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    def heal(self) -> None:
        for link in self.links:
            link.heal()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(reader, writer)
        try:
            await self._serve(connection)
        except asyncio.CancelledError:  # the connection is reset, or the proxy closes
            pass
        except OSError:  # one side has closed, so close the other
            pass
        finally:
            self._tasks.discard(task)
            for each in (connection.writer, connection.target):
                if each is not None:
                    each.transport.abort()

    async def _serve(self, connection: _Connection) -> None:
        first = b""
        source = ANY_CLIENT
        if self._source_of is not None:
            first = await connection.reader.read(_CHUNK_BYTES)
            source = self._source_of(first)
        link = self.link(source)
        link._connections[connection] = None
        try:
            if link.is_refused:
                connection.reset()
                return
            reader, connection.target = await asyncio.open_connection(*parse_address(self.target))
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(_pump(link.there, connection, connection.reader, connection.target, first))
                pumps.create_task(_pump(link.back, connection, reader, connection.writer, b""))
        except* OSError:
            pass
        finally:
            link._connections.pop(connection, None)


async def _pump(
    direction: Direction,
    connection: _Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    first: bytes,
) -> None:
    data = first or await reader.read(_CHUNK_BYTES)
    while data:
        if not await direction._pass(data, connection, writer):
            return
        data = await reader.read(_CHUNK_BYTES)
    if not writer.transport.is_closing():
        writer.write_eof()
