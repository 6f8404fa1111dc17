"""The parts specific to TCP: addresses, socket options, named errors."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kafkalite.errors import ConfigError, ConnectionFailedError, ListenError
from kafkalite.transport.tcp import TcpTransport, format_address, parse_address
from proof.waiting import settle


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:9092", ("127.0.0.1", 9092)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9092", ("::1", 9092)),
        ("broker-1.example.com:65535", ("broker-1.example.com", 65535)),
    ],
)
def test_addresses_both_ways(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed
    assert format_address(*parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9092",
        "localhost",
        "localhost:",
        "localhost:x",
        "localhost:-1",
        "localhost:65536",
        "::1:9092",
        "h:９",
    ],
)
def test_an_invalid_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be host:port, \[IPv6 address\]:port or inproc://name"):
        parse_address(text)


async def test_sockets_are_tuned_on_both_sides(recorder: Any) -> None:
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    class Server(recorder):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            accepted.set_result(self)

    listener = await TcpTransport().listen("localhost:0", Server)
    client = await TcpTransport().connect(listener.address, recorder)
    server = await accepted
    for end in (client, server):
        opened = end.transport.get_extra_info("socket")
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        end.transport.abort()
        await end.lost
    listener.close()
    await listener.wait_closed()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6(recorder: Any) -> None:
    try:
        listener = await TcpTransport().listen("[::1]:0", recorder)
    except ListenError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    assert listener.address.startswith("[::1]:")
    client = await TcpTransport().connect(listener.address, recorder)
    client.transport.abort()
    await client.lost
    listener.close()
    await listener.wait_closed()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (
            "192.0.2.1:9092",
            r"cannot listen on 192\.0\.2\.1:9092: this machine does not have the address \(listen on",
        ),
        ("no-such-host.invalid:9092", r"cannot listen on no-such-host\.invalid:9092: "),
        (f"{'x' * 64}.invalid:9092", "cannot listen on x"),
    ],
)
async def test_an_unavailable_address(recorder: Any, address: str, reason: str) -> None:
    with pytest.raises(ListenError, match=reason):
        await TcpTransport().listen(address, recorder)


async def test_the_hint_says_what_to_do(recorder: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError) as raised:
            await TcpTransport().listen(f"127.0.0.1:{port}", recorder)
    assert str(raised.value) == (
        f"cannot listen on 127.0.0.1:{port}: the port is in use "
        "(stop the process that uses it, or choose another port)"
    )


async def test_a_refused_connection_is_named(recorder: Any) -> None:
    reason = r"cannot connect to 127\.0\.0\.1:1: .*is a broker running there"
    with pytest.raises(ConnectionFailedError, match=reason):
        await TcpTransport().connect("127.0.0.1:1", recorder)
    for host in ("no-such-host.invalid", f"{'x' * 64}.invalid"):
        with pytest.raises(ConnectionFailedError, match=r"cannot connect to .*:9092: .*check the host name"):
            await TcpTransport().connect(f"{host}:9092", recorder)
    with pytest.raises(ConfigError):
        await TcpTransport().connect("nowhere", recorder)


async def test_an_address_is_refused_only_if_its_host_says_so(recorder: Any) -> None:
    listener = await TcpTransport().listen("localhost:0", recorder)
    _, port = parse_address(listener.address)
    assert not await TcpTransport().is_refused(listener.address)
    assert not await TcpTransport().is_refused(f"localhost:{port}")  # one of two families is refused
    listener.close()
    await listener.wait_closed()
    assert await TcpTransport().is_refused(listener.address)
    assert await TcpTransport().is_refused(f"localhost:{port}")
    assert not await TcpTransport().is_refused("no-such-host.invalid:9092")


async def test_a_connection_accepted_just_before_the_listener_closes_is_made(recorder: Any) -> None:
    """asyncio would drop it without closing its socket: 'unclosed transport' is an error in tests."""
    made: list[Any] = []

    class Server(recorder):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.append(self)

    loop = asyncio.get_running_loop()
    for _ in range(20):
        listener = await TcpTransport().listen("127.0.0.1:0", Server)
        with socket.create_connection(parse_address(listener.address)):
            accepting = loop.create_task(asyncio.sleep(0))  # the loop accepts before this continues
            await accepting
            listener.close()
            await settle()
            (server,) = made
            server.transport.abort()
            await server.lost
            await listener.wait_closed()
        made.clear()
