"""Streams between two protocols in one process: the same bytes, without a socket or the kernel.

A listener registers a name for the whole process. Connecting joins two ends. Each end is an
``asyncio.Transport`` in the event loop of its side. The two loops may run in two threads.

Written data is not copied but queued in ``_arrived`` of the other end, whose loop calls ``_deliver``. That
copies the data into the protocol's buffer, as a kernel would. So a protocol receives data as from a socket,
and never inside a call of its peer's ``write``.

Two threads share an end without a lock. While it is open and its loop runs, only its own thread writes its
fields, except ``_arrived``, ``_is_scheduled`` and ``_was_reset``. A deque's append and popleft are atomic.
Each side first changes its own state and then checks that of the other side. The reader clears
``_is_scheduled`` and then checks the queue; the writer appends to the queue and then checks
``_is_scheduled``. The writer sets ``_is_paused`` and then checks the number of bytes taken; the reader counts
the bytes taken and then checks ``_is_paused``. So no wake-up is lost, and an extra wake-up does nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kafkalite.errors import ConnectionFailedError, ListenError
from kafkalite.limits import MIB
from kafkalite.transport.seam import P, ProtocolFactory
from kafkalite.transport.stream_end import StreamEnd

_SCHEME: Final = "inproc://"

# After this many bytes, the rest is delivered by another callback, so that others of the loop run in between.
_DELIVERY_BYTES: Final = 1 * MIB

_listeners: dict[str, InprocListener] = {}
_numbers = itertools.count(1)

# Marks the end of the stream in the queue. It is distinct from data, which is never empty.
_EOF: Final = memoryview(b"")


class InprocTransport:
    """Connects and listens at ``inproc://name``. Listening at ``inproc://`` chooses a new name."""

    async def connect(self, address: str, protocol_factory: Callable[[], P]) -> P:
        listener = _listeners.get(address)
        if listener is None:
            raise ConnectionFailedError(
                f"cannot connect to {address}: no listener in this process has that name",
                hint="start the broker in this process first, or use its TCP address",
            )
        number = next(_numbers)
        client = InprocEnd(asyncio.get_running_loop(), peername=(address, 0), sockname=(_SCHEME, number))
        server = InprocEnd(listener.loop, peername=(_SCHEME, number), sockname=(address, 0))
        client.join(server)
        protocol = protocol_factory()
        try:
            listener.accept(server)
        except RuntimeError as error:  # the listener's loop is closed
            listener.close()
            raise ConnectionFailedError(
                f"cannot connect to {address}: the event loop of its broker is closed"
            ) from error
        client.open(protocol)
        return protocol

    async def is_refused(self, address: str) -> bool:
        return address not in _listeners

    async def listen(self, address: str, protocol_factory: ProtocolFactory) -> InprocListener:
        loop = asyncio.get_running_loop()
        if address == _SCHEME:
            while (fresh := f"{_SCHEME}{next(_numbers)}") in _listeners:
                pass
            address = fresh
        listener = InprocListener(address, protocol_factory, loop)
        if _listeners.setdefault(address, listener) is not listener:
            raise ListenError(
                f"cannot listen on {address}: the name is in use in this process",
                hint="close the other broker, or listen on inproc:// for a new name",
            )
        return listener


class InprocListener:
    """A registered name that accepts connections."""

    def __init__(self, address: str, factory: ProtocolFactory, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.loop = loop
        self._factory = factory

    def __repr__(self) -> str:
        return f"<InprocListener {self.address}>"

    def accept(self, end: InprocEnd) -> None:
        """Schedule ``end`` to be opened in the listener's loop. Thread-safe.

        Raises RuntimeError if the loop is closed.
        """
        self.loop.call_soon_threadsafe(self._open, end)

    def close(self) -> None:
        if _listeners.get(self.address) is self:
            del _listeners[self.address]

    async def wait_closed(self) -> None:
        return

    def _open(self, end: InprocEnd) -> None:
        if _listeners.get(self.address) is not self:
            end.refuse()
            return
        try:
            end.open(self._factory())
        except Exception:
            end.refuse()
            raise


class InprocEnd(StreamEnd):
    """One end of a stream. Its methods are called in its own loop, unless they are documented otherwise."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peername: tuple[str, int], sockname: tuple[str, int]
    ) -> None:
        super().__init__(loop, contextvars.copy_context(), {"peername": peername, "sockname": sockname})
        self._peer = self
        self._call: Callable[..., Any] = loop.call_soon_threadsafe
        self._is_open = False
        # Also written by the peer's side, like _is_scheduled:
        self._arrived: deque[memoryview] = deque()  # the peer appends, this side removes
        self._was_reset = False  # set by the peer, once

    def __repr__(self) -> str:
        state = "closing" if self._is_closing else "open" if self._is_open else "opening"
        name, number = self.get_extra_info("sockname")
        return f"<InprocEnd {name}#{number} {state}, {self.get_write_buffer_size()} bytes to send>"

    def join(self, peer: InprocEnd) -> None:
        """Connect the two ends to each other, before either end is opened."""
        self._peer, peer._peer = peer, self
        if self._loop is peer._loop:
            # If both ends are in one loop, it is awake, so the cheaper call_soon suffices.
            self._call = peer._call = self._loop.call_soon

    def open(self, protocol: asyncio.BufferedProtocol) -> None:
        self._protocol = protocol
        self._is_open = True
        protocol.connection_made(self)
        if self._arrived:
            self._wake()

    def refuse(self) -> None:
        """Close this end and reset the peer, because the listener does not accept the connection."""
        self._is_closing = True
        self._peer._reset()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue ``data`` for the peer. It is not copied, so the caller must not change it."""
        if self._is_closing or self._has_sent_eof or self._peer._is_closing or not data:
            return
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        self._sent_bytes += view.nbytes
        self._peer._receive(view)
        self._pause_if_full()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def _send_eof(self) -> None:
        self._peer._receive(_EOF)

    def get_write_buffer_size(self) -> int:
        """Return the number of written bytes that are still to be delivered to the peer's protocol.

        Called by either side.
        """
        return 0 if self._peer._is_closing else self._sent_bytes - self._peer._taken_bytes

    def _receive(self, data: memoryview) -> None:
        """Queue data that the peer wrote. Called by the peer's side."""
        if self._is_closing:
            return
        self._arrived.append(data)
        if not self._is_scheduled:
            self._wake()

    def _wake(self) -> None:
        """Schedule ``_deliver`` in this end's loop. Called by either side."""
        self._is_scheduled = True
        try:
            self._call(self._deliver, context=self._context)
        except RuntimeError:  # this end's loop was closed before its connections
            if not self._is_closing:
                self._is_closing = True
                self._peer._reset()

    def _reset(self) -> None:
        """Schedule the end of this connection with ConnectionResetError. Called by the peer's side.

        Data that the peer wrote and that is not delivered yet is dropped.
        """
        self._was_reset = True
        self._wake()

    def _deliver(self) -> None:
        """Deliver arrived data to the protocol, until it pauses reading or has received _DELIVERY_BYTES."""
        self._is_scheduled = False
        left = _DELIVERY_BYTES
        while self._is_open and not self._is_closing:
            if self._was_reset:
                self._end(ConnectionResetError("the other end is closed"))
            elif not self._arrived or not self._is_reading:
                break
            elif left <= 0:
                self._wake()
                break
            elif self._arrived[0]:
                left -= self._fill()
            else:
                self._arrived.popleft()
                self._on_eof()
        self._resume_peer()

    def _resume_peer(self) -> None:
        peer = self._peer
        if peer._is_paused and peer.get_write_buffer_size() <= peer._low_water_bytes:
            try:
                peer._call(peer._resume_if_drained, context=peer._context)
            except RuntimeError:  # the peer's loop is closed
                return

    def _fill(self) -> int:
        """Copy queued data into one buffer of the protocol. Return the number of bytes copied."""
        assert self._protocol is not None
        filled = 0
        try:
            buffer: Any = self._protocol.get_buffer(len(self._arrived[0]))
            size = len(buffer)
            if not size:
                raise RuntimeError("get_buffer() returned an empty buffer")
            while filled < size and self._arrived and (chunk := self._arrived[0]):
                count = min(len(chunk), size - filled)
                if count == len(chunk):
                    buffer[filled : filled + count] = chunk
                    self._arrived.popleft()
                else:
                    buffer[filled : filled + count] = chunk[:count]
                    self._arrived[0] = chunk[count:]
                filled += count
            self._taken_bytes += filled
            self._protocol.buffer_updated(filled)
        except Exception as error:
            self._fail(error)
        return filled

    def _reset_peer(self) -> None:
        self._peer._reset()

    def _end(self, error: Exception | None) -> None:
        self._is_closing = True
        self._arrived.clear()
        self._resume_peer()
        self._loop.call_soon(self._lose, error, context=self._context)

    def _lose(self, error: Exception | None) -> None:
        self._is_open = False
        super()._lose(error)
