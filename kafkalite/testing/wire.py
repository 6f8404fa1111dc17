"""WireClient: one connection to a broker, used message by message, or byte by byte for invalid input."""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Self

from kafkalite.protocol.connection import ClientConnection, Response
from kafkalite.transport import transport_for

RESPONSE_TIMEOUT_S: Final = 30.0


class WireClient(asyncio.BufferedProtocol):
    """Sends and receives single messages, without retries, metadata or batching."""

    def __init__(self, address: str, *, handshake: bool = True) -> None:
        self._address = address
        self._wants_handshake = handshake
        self._wire = ClientConnection("wire-client")
        self._responses: deque[Response] = deque()
        self._wakers: list[asyncio.Future[None]] = []
        self.transport: Any = None
        self.is_closed = False  #: whether either side has closed the connection
        self.last_payload: memoryview = memoryview(b"")

    async def __aenter__(self) -> Self:
        await transport_for(self._address).connect(self._address, lambda: self)
        if self._wants_handshake:
            _, buffers = self._wire.handshake()
            self.send_raw(*buffers)
            await self.response()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.transport.abort()
        await self.closed()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._wire.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._responses += self._wire.buffer_updated(nbytes)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            if not waker.done():
                waker.set_result(None)

    async def _wait(self) -> None:
        waker = asyncio.get_running_loop().create_future()
        self._wakers.append(waker)
        await waker

    def send_raw(self, *buffers: Any) -> None:
        """Send the bytes of ``buffers`` unchanged."""
        for buffer in buffers:
            self.transport.write(bytes(buffer))

    def encode(self, message: Any, *payload: Any) -> bytes:
        """Return the frame of a request, which the caller must send. ``response`` returns the response as for
        ``send``."""
        return b"".join(self._wire.send(message, payload)[1])

    def send(self, message: Any, *payload: Any) -> int:
        """Send a request without waiting. Return its correlation id."""
        correlation_id, buffers = self._wire.send(message, payload)
        self.transport.writelines(buffers)
        return correlation_id

    async def response(self) -> Response:
        """Return the next response. Raises ConnectionResetError if the connection is closed, and TimeoutError
        after RESPONSE_TIMEOUT_S."""
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            while not self._responses:
                if self.is_closed:
                    raise ConnectionResetError("the broker closed the connection")
                await self._wait()
        return self._responses.popleft()

    async def call(self, message: Any, *payload: Any) -> Any:
        """Send one request and return the message of its response. The payload of the response is stored in
        ``last_payload``."""
        self.send(message, *payload)
        response = await self.response()
        self.last_payload = response.payload
        return response.message

    async def closed(self) -> None:
        """Return when the connection is closed. Raises TimeoutError after RESPONSE_TIMEOUT_S."""
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            while not self.is_closed:
                await self._wait()
