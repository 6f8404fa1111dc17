"""A protocol that records the calls of its transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafkalite.transport import inproc


class Recorder(asyncio.BufferedProtocol):
    """Keeps received data, and each call by name. ``buffer_bytes`` is the size of its receive buffer."""

    def __init__(self, buffer_bytes: int = 1 << 16) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.calls: list[str] = []
        self.hints: list[int] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.keep_open_at_eof = False
        self.on_data: Callable[[Recorder, bytes], None] = lambda recorder, data: None
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._waiting: list[tuple[int, asyncio.Future[bytes]]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.calls.append("made")
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        self.hints.append(sizehint)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        self.received += data
        self.on_data(self, data)
        for size, future in self._waiting:
            if len(self.received) >= size and not future.done():
                future.set_result(bytes(self.received))

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.keep_open_at_eof

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")
        self.lost.set_result(exc)

    async def read(self, size: int) -> bytes:
        """Return everything received, once there are ``size`` bytes."""
        if len(self.received) < size:
            future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, future))
            await future
        return bytes(self.received)


@pytest.fixture(scope="session")
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture(autouse=True)
def _no_registration_leaks() -> Iterator[None]:
    before = dict(inproc._listeners)
    yield
    assert inproc._listeners == before
