"""Streams over TCP, on the running event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

from kafkalite.errors import HOST_NAME_HINT, ConfigError, ConnectionFailedError, ListenError
from kafkalite.transport.seam import Listener, P, ProtocolFactory

# The number of connections that may wait to be accepted. Many clients may reconnect at once after a restart.
_BACKLOG: Final = 1024

# A silent peer is detected after 60 s and six probes, two minutes in all. The kernel's default is two hours.
_KEEPALIVE_IDLE_S: Final = 60
_KEEPALIVE_INTERVAL_S: Final = 10
_KEEPALIVE_PROBES: Final = 6

_REASONS: Final = {
    errno.EADDRINUSE: ("the port is in use", "stop the process that uses it, or choose another port"),
    errno.EACCES: ("permission denied", "ports below 1024 need root; choose a higher one"),
    errno.EADDRNOTAVAIL: ("this machine does not have the address", "listen on 0.0.0.0 or 127.0.0.1"),
}
_NOT_REACHED_HINT: Final = "is a broker running there? Check the address and any firewall"


def parse_address(address: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[IPv6 address]:port`` into (host, port). Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(
            key="address", value=address, allowed="host:port, [IPv6 address]:port or inproc://name"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return the address as text, in the form that ``parse_address`` parses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class TcpTransport:
    """Connects and listens over TCP. Its sockets have TCP_NODELAY and SO_KEEPALIVE."""

    async def connect(self, address: str, protocol_factory: Callable[[], P]) -> P:
        host, port = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.create_connection(protocol_factory, host, port)
        except (OSError, UnicodeError) as error:
            is_unknown = isinstance(error, socket.gaierror | UnicodeError)
            raise ConnectionFailedError(
                f"cannot connect to {address}: {reason_of(error)}",
                hint=HOST_NAME_HINT if is_unknown else _NOT_REACHED_HINT,
            ) from error
        opened = transport.get_extra_info("socket")
        if opened is not None:
            _tune(opened)
        return protocol

    async def is_refused(self, address: str) -> bool:
        host, port = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return False
        for family, kind, protocol, _, place in found:
            with socket.socket(family, kind, protocol) as dialling:
                dialling.setblocking(False)
                try:
                    await loop.sock_connect(dialling, place)
                except ConnectionRefusedError:
                    continue
                except OSError:
                    return False
                return False
        return True

    async def listen(self, address: str, protocol_factory: ProtocolFactory) -> Listener:
        host, port = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # A name such as localhost has an IPv4 and an IPv6 address. Clients try both; listen on IPv4.
            family, kind, protocol, _, place = min(found, key=lambda info: info[0] != socket.AF_INET)
            listening = socket.socket(family, kind, protocol)
        except (OSError, UnicodeError) as error:
            raise listen_error(address, error) from error
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            _tune(listening)  # accepted sockets inherit the options
            listening.setblocking(False)
            listening.bind(place)
            server = await loop.create_server(protocol_factory, sock=listening, backlog=_BACKLOG)
        except OSError as error:
            listening.close()
            raise listen_error(address, error) from error
        host, port = listening.getsockname()[:2]
        return TcpListener(server, format_address(host, port))


class TcpListener:
    def __init__(self, server: asyncio.Server, address: str) -> None:
        self._server = server
        self._is_closing = False
        self.address = address

    def __repr__(self) -> str:
        return f"<TcpListener {self.address}>"

    def close(self) -> None:
        """Accept no further connection. The port is free in the next iteration of the loop.

        asyncio attaches a connection to its server in the callback after the one that accepts it. If the
        server closes in between, asyncio drops the connection without closing its socket.
        """
        loop = self._server.get_loop()
        if self._is_closing or not isinstance(loop, asyncio.SelectorEventLoop):
            self._server.close()
            return
        self._is_closing = True
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        loop.call_soon(self._server.close)

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)
        await self._server.wait_closed()


def _tune(opened: socket.socket) -> None:
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        option = getattr(socket, name, None)  # not every system has all three options
        if option is not None:
            opened.setsockopt(socket.IPPROTO_TCP, option, value)


def reason_of(error: Exception) -> str:
    """Return the text of an OSError or UnicodeError of a socket, or of the resolver, for an error message."""
    if isinstance(error, UnicodeError):
        return "the host name is not valid"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def listen_error(address: str, error: Exception) -> ListenError:
    """Return the ListenError that states why listening on ``address`` failed with ``error``."""
    reason, hint = _REASONS.get(getattr(error, "errno", None) or 0, (reason_of(error), ""))
    return ListenError(f"cannot listen on {address}: {reason}", hint=hint)
