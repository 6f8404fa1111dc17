"""FaultyProxy: each fault acts in its direction and on its link, and heals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.protocol.connection import ClientConnection
from kafkalite.testing.proxy import ANY_CLIENT, FaultyProxy, client_id_of

PATIENCE_S = 10
SHORT_S = 0.15  # nothing may arrive within this time


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[str]:
    """Yield the address of a server that sends back all that it receives."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)


@pytest_asyncio.fixture
async def proxy(echo: str) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(echo) as running:
        yield running


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), PATIENCE_S)

    async def echoed(self, data: bytes) -> bytes:
        self.send(data)
        return await self.receive(len(data))

    async def assert_silent(self) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(self.reader.read(1), SHORT_S)

    async def assert_reset(self) -> None:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await self.receive(1)


@pytest_asyncio.fixture
async def dial() -> AsyncIterator[Any]:
    callers: list[Caller] = []

    async def connect(proxy: FaultyProxy) -> Caller:
        host, _, port = proxy.address.rpartition(":")
        callers.append(Caller(*await asyncio.open_connection(host, int(port))))
        return callers[-1]

    yield connect
    for caller in callers:
        caller.writer.transport.abort()
    await asyncio.sleep(0)


async def test_a_healthy_link_passes_everything(proxy: FaultyProxy, dial: Any) -> None:
    caller = await dial(proxy)
    data = bytes(range(256)) * 4096
    assert await caller.echoed(data) == data
    assert proxy.link().there.passed_bytes == proxy.link().back.passed_bytes == len(data)
    caller.writer.write_eof()
    assert await asyncio.wait_for(caller.reader.read(), PATIENCE_S) == b""


async def test_a_black_hole_loses_one_direction(proxy: FaultyProxy, dial: Any) -> None:
    caller = await dial(proxy)
    assert await caller.echoed(b"before") == b"before"
    proxy.link().back.black_hole()
    caller.send(b"lost on the way back")
    await caller.assert_silent()
    assert proxy.link().there.passed_bytes == len(b"beforelost on the way back")
    assert proxy.link().back.lost_bytes == len(b"lost on the way back")


async def test_a_stream_with_a_gap_is_reset_when_the_link_heals(proxy: FaultyProxy, dial: Any) -> None:
    caller, unhurt = await dial(proxy), await dial(proxy)
    assert await unhurt.echoed(b"x") == b"x"
    proxy.link().cut()
    caller.send(b"gone")
    await caller.assert_silent()
    proxy.heal()
    await caller.assert_reset()
    assert await unhurt.echoed(b"as if nothing had been") == b"as if nothing had been"
    assert await (await dial(proxy)).echoed(b"new") == b"new"


async def test_a_stall_loses_nothing(proxy: FaultyProxy, dial: Any) -> None:
    caller = await dial(proxy)
    proxy.link().there.stall()
    caller.send(b"later")
    await caller.assert_silent()
    proxy.heal()
    assert await caller.receive(5) == b"later"


async def test_a_reset_reaches_both_sides_and_new_connections_are_accepted(
    proxy: FaultyProxy, dial: Any
) -> None:
    caller = await dial(proxy)
    assert await caller.echoed(b"x") == b"x"
    proxy.link().reset()
    await caller.assert_reset()
    assert await (await dial(proxy)).echoed(b"y") == b"y"


async def test_refused_connections_are_reset(proxy: FaultyProxy, dial: Any) -> None:
    caller = await dial(proxy)
    assert await caller.echoed(b"x") == b"x"
    proxy.link().refuse()
    await caller.assert_reset()
    await (await dial(proxy)).assert_reset()
    proxy.heal()
    assert await (await dial(proxy)).echoed(b"y") == b"y"


async def test_a_cut_comes_after_a_number_of_bytes(proxy: FaultyProxy, dial: Any) -> None:
    caller = await dial(proxy)
    proxy.link().back.cut_after(10)
    caller.send(b"0123456789abcdef")
    got = b""
    with pytest.raises(ConnectionResetError):
        while True:
            piece = await asyncio.wait_for(caller.reader.read(100), PATIENCE_S)
            if not piece:
                raise ConnectionResetError
            got += piece
    assert b"0123456789".startswith(got)  # a reset may overtake data that was sent before it
    assert await (await dial(proxy)).echoed(b"only once, more than ten") == b"only once, more than ten"


async def test_delay_and_throttle(proxy: FaultyProxy, dial: Any) -> None:
    caller = await dial(proxy)
    proxy.link().back.delay(100)
    began = time.monotonic()
    assert await caller.echoed(b"x") == b"x"
    assert time.monotonic() - began >= 0.1
    proxy.heal()
    proxy.link().there.throttle(1_000_000)
    began = time.monotonic()
    assert len(await caller.echoed(bytes(300_000))) == 300_000
    assert time.monotonic() - began >= 0.15  # all but the last pieces were held back


async def test_each_client_has_a_link_of_its_own(echo: str, dial: Any) -> None:
    def greeting(client_id: str) -> bytes:
        _, buffers = ClientConnection(client_id).handshake()
        return b"".join(map(bytes, buffers))

    async with FaultyProxy(echo, source_of=client_id_of) as proxy:
        proxy.link("raft-2").cut()
        one, two = await dial(proxy), await dial(proxy)
        assert await one.echoed(greeting("raft-1")) == greeting("raft-1")
        two.send(greeting("raft-2"))
        await two.assert_silent()
        assert {link.source for link in proxy.links} == {"raft-1", "raft-2"}
        assert proxy.link("raft-2").there.lost_bytes == len(greeting("raft-2"))


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 40])
def test_a_client_without_an_id_has_the_common_link(garbage: bytes) -> None:
    assert client_id_of(garbage) == ANY_CLIENT


async def test_an_unreachable_target_closes_the_connection(dial: Any) -> None:
    async with FaultyProxy("127.0.0.1:1") as proxy:
        caller = await dial(proxy)
        await caller.assert_reset()
