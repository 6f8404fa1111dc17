"""The interface of a transport: connect and listen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

P = TypeVar("P", bound=asyncio.BufferedProtocol)
ProtocolFactory: TypeAlias = Callable[[], asyncio.BufferedProtocol]


class SecuredProtocol(asyncio.BufferedProtocol):
    """A protocol that is notified when the TLS handshake of its connection is complete."""

    def connection_secured(self) -> None:
        """Called once if the connection uses TLS, before any bytes arrive. May close the connection."""


class Listener(Protocol):
    """An address that accepts connections until it is closed."""

    @property
    def address(self) -> str:
        """The address to connect to. Port 0 or an empty inproc name is replaced by the chosen one."""
        ...

    def close(self) -> None:
        """Stop accepting connections. Those already accepted stay open. May be called twice."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the address is free after ``close``.

        Close the accepted connections first, because some event loops also wait for their end.
        """
        ...


class Transport(Protocol):
    """Opens and accepts streams.

    Each connection gets an ``asyncio.BufferedProtocol`` from the factory and calls it as asyncio's own
    transports do: ``connection_made`` with an ``asyncio.Transport``, then ``get_buffer`` and
    ``buffer_updated`` for arriving bytes, ``pause_writing`` and ``resume_writing`` for back-pressure,
    ``eof_received``, and ``connection_lost`` once.
    """

    async def connect(self, address: str, protocol_factory: Callable[[], P]) -> P:
        """Return the connected protocol after its ``connection_made`` was called.

        Raises ConnectionFailedError, for example if there is no listener, and ConfigError if ``address`` is
        malformed. There is no timeout; cancel the call instead.
        """
        ...

    async def is_refused(self, address: str) -> bool:
        """Whether the host at ``address`` responds that no process listens there.

        Return False if the host cannot be reached. There is no timeout; cancel the call instead.
        """
        ...

    async def listen(self, address: str, protocol_factory: ProtocolFactory) -> Listener:
        """Accept connections in the running event loop, with a new protocol for each connection.

        Raises ListenError if the address is in use or unavailable, and ConfigError if it is malformed.
        """
        ...
