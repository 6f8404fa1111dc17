"""What a transport is: connect and listen. One interface, a real and an in-process implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

P = TypeVar("P", bound=asyncio.BufferedProtocol)
ProtocolFactory: TypeAlias = Callable[[], asyncio.BufferedProtocol]


class Listener(Protocol):
    """An address that accepts connections until it is closed."""

    @property
    def address(self) -> str:
        """Where clients connect to: port 0 and the empty inproc name are resolved."""
        ...

    def close(self) -> None:
        """Accept no more, free the address. What was accepted lives on. May be called twice."""
        ...

    async def wait_closed(self) -> None:
        """Return when the address is free. Close the accepted connections first: some loops wait for them."""
        ...


class Transport(Protocol):
    """Opens and accepts streams. Has no state of its own: any two instances of a kind are alike.

    Each connection gets an ``asyncio.BufferedProtocol`` from the factory and calls it as asyncio's own
    transports do: ``connection_made`` with an ``asyncio.Transport``, then ``get_buffer`` and
    ``buffer_updated`` for what arrives, ``pause_writing`` and ``resume_writing`` for what does not leave,
    ``eof_received``, and ``connection_lost`` once.
    """

    async def connect(self, address: str, protocol_factory: Callable[[], P]) -> P:
        """The connected protocol; its ``connection_made`` was called.

        Raises ConnectionFailedError when nothing answers there, ConfigError when ``address`` is no address.
        Has no timeout of its own: a caller who wants one cancels.
        """
        ...

    async def listen(self, address: str, protocol_factory: ProtocolFactory) -> Listener:
        """Accept connections, each with a protocol of its own, in the running event loop.

        Raises ListenError when the address is taken or not to be had, ConfigError when it is no address.
        """
        ...
