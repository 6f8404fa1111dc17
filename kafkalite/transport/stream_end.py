"""StreamEnd: the base class of those transports that asyncio does not provide.

It keeps the state of an ``asyncio.Transport``: the protocol, whether reading is paused, the write buffer
limits, and whether the end is closing. Subclasses transfer the bytes: ``InprocEnd`` between two protocols of
one process, ``TlsEnd`` through another transport, ``SimEnd`` between two simulated processes.
"""

# Tests: tests/transport/test_seam.py, tests/sim/test_network.py

from __future__ import annotations

import asyncio
import contextvars
from abc import abstractmethod
from collections import deque
from typing import Any, Final

from kafkalite.limits import KIB

# As in asyncio's transports, writers pause above the first value and resume at or below the second.
_HIGH_WATER_BYTES: Final = 64 * KIB
_LOW_WATER_BYTES: Final = 16 * KIB


class StreamEnd(asyncio.Transport):
    """One end of a stream. It schedules its callbacks in ``loop``, with ``context``."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: contextvars.Context, extra: dict[str, Any]
    ) -> None:
        super().__init__(extra)
        self._loop = loop
        self._context = context
        self._protocol: asyncio.BufferedProtocol | None = None
        self._is_closing = False
        self._is_reading = True
        self._has_sent_eof = False
        self._is_paused = False
        self._arrived: deque[Any] = deque()
        self._is_scheduled = False
        self._sent_bytes = 0
        self._taken_bytes = 0  # the received bytes that the protocol has taken
        self._high_water_bytes = _HIGH_WATER_BYTES
        self._low_water_bytes = _LOW_WATER_BYTES

    @abstractmethod
    def get_write_buffer_size(self) -> int:
        """Return the number of written bytes to which the write buffer limits apply."""

    @abstractmethod
    def _wake(self) -> None:
        """Schedule the delivery of received data."""

    @abstractmethod
    def _send_eof(self) -> None:
        """Send the end of the stream after all written data."""

    @abstractmethod
    def _reset_peer(self) -> None:
        """Break the connection. The peer may not receive all written data."""

    @abstractmethod
    def _end(self, error: Exception | None) -> None:
        """Begin to close this end. ``_lose`` is called later, which calls ``connection_lost``."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None, "the transport is not open"
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            if self._arrived:
                self._wake()

    def _on_eof(self) -> None:
        assert self._protocol is not None
        try:
            keep_open = self._protocol.eof_received()
        except Exception as error:
            self._fail(error)
        else:
            if not keep_open:
                self.close()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._has_sent_eof and not self._is_closing:
            self._has_sent_eof = True
            self._send_eof()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water_bytes, self._high_water_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 4 * low if low is not None else _HIGH_WATER_BYTES
        if low is None:
            low = high // 4
        if not 0 <= low <= high:
            raise ValueError(f"low {low} and high {high} must satisfy 0 <= low <= high")
        self._high_water_bytes, self._low_water_bytes = high, low

    def _pause_if_full(self) -> None:
        if not self._is_paused and self.get_write_buffer_size() > self._high_water_bytes:
            assert self._protocol is not None
            self._is_paused = True
            self._protocol.pause_writing()
            self._resume_if_drained()  # the peer, in another thread, may have taken the data meanwhile

    def _resume_if_drained(self) -> None:
        if self._is_paused and self.get_write_buffer_size() <= self._low_water_bytes:
            self._is_paused = False
            if self._protocol is not None:
                self._protocol.resume_writing()

    def close(self) -> None:
        """Close this end. The peer still receives all written data, and then the end of the stream.

        ``connection_lost`` is called later.
        """
        if not self._is_closing:
            self.write_eof()
            self._end(None)

    def abort(self) -> None:
        """End the stream at once. The peer may lose data that it has not received."""
        if not self._is_closing:
            self._reset_peer()
            self._end(None)

    def _fail(self, error: Exception) -> None:
        """Pass ``error``, which the protocol raised, to the loop's exception handler, and reset the peer."""
        self._loop.call_exception_handler(
            {
                "message": "Fatal error: the protocol failed on received data",
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
        )
        if not self._is_closing:
            self._reset_peer()
            self._end(error)

    def _lose(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)
