"""Connections: bytes in, responses out in the order of their requests, and the limits on both.

A ``Connection`` is an ``asyncio.BufferedProtocol`` around a sans-IO ``ServerConnection``. If a response
is ready at once and no request is queued before it, it is written in the same callback: no task, no
future. Otherwise the request waits in a queue, and its response is written when it has reached the
head.

Reading pauses while the peer does not read its responses, and while too many requests are unanswered. A
connection is closed if it breaks the protocol, has no traffic for ``connections.max.idle.ms``, does not
complete the handshake or a required proof within HANDSHAKE_DEADLINE_MS, or leaves a frame incomplete
for too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kafkalite.broker.server.client import Client
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import Pending, Refusal, Reply, Response
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from kafkalite.limits import KIB, MAX_IN_FLIGHT_PER_CONNECTION, MIB
from kafkalite.log_fields import Fields
from kafkalite.protocol.connection import BadRequest, Request, ServerConnection
from kafkalite.transport import Listener, has_own_name, transport_for

logger = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_MS: Final = 10_000
FRAME_DEADLINE_MS: Final = 30_000  # and one second more for each FRAME_PROGRESS_BYTES received
FRAME_PROGRESS_BYTES: Final = 64 * KIB
REAP_INTERVAL_MS: Final = 5_000
WRITE_BUFFER_HIGH_BYTES: Final = 4 * MIB
WRITE_BUFFER_LOW_BYTES: Final = 1 * MIB
FLUSH_BYTES: Final = 1 * MIB  # responses gathered before they are written


class Dispatch(Protocol):
    def __call__(self, request: Request | BadRequest, client: Client, /) -> Response | Pending: ...


@dataclass(slots=True, eq=False)
class _Slot:
    """One unanswered request. It is called with its response."""

    connection: Connection
    request: Request | BadRequest
    pending: Pending | None = None
    response: Response | None = None
    is_ready: bool = False

    def __call__(self, response: Response) -> None:
        self.response = response
        self.is_ready = True
        self.pending = None
        self.connection.on_response(self)


class Connection(asyncio.BufferedProtocol):
    """One client's connection.

    Invariant: responses are written in the order of ``_queue`` (requests in progress), followed by
    ``_backlog`` (requests received and not started).
    """

    def __init__(self, server: Server, advertised: str | None, listener: int = 0) -> None:
        self._server = server
        self._dispatch = server.dispatch
        self._wire = ServerConnection(max_payload_bytes=server.max_request_bytes)
        self.get_buffer = self._wire.get_buffer  # type: ignore[assignment]  # one call less per read
        self._transport: Any = None
        self._queue: deque[_Slot] = deque()
        self._backlog: deque[Request | BadRequest] = deque()
        self._receiving_bytes = 0  # bytes of a frame that spans several reads
        self._is_reading = True
        self._is_writable = server.is_open  # until then, received bytes are kept
        self._is_ending = False  # nothing more is read; closes after the last response
        self._is_final = False  # the last response of the connection is written or queued
        self._is_lost = False
        self._made_ms = self._moved_ms = server.clock.monotonic_ms()
        self._activity = (0, 0)  # received and unsent bytes at the last pass of the reaper
        self._frame_ms: int | None = None  # when this frame was first seen incomplete
        self._frame_requests = self._frame_bytes = 0  # received when that frame was first seen incomplete
        self._advertised = advertised
        self._listener = listener
        self.client = Client("", "")
        self.received_bytes = 0
        self.received_requests = 0

    def __repr__(self) -> str:
        return f"<Connection {self.client.peer} {len(self._queue)} unanswered, {len(self._backlog)} waiting>"

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        peer = _socket_address(transport.get_extra_info("peername"))
        local = _socket_address(transport.get_extra_info("sockname"))
        self.client = Client(peer, self._advertised or local, listener=self._listener)
        if not self._server.admit(self):
            self._is_lost = True
            self._transport.abort()
            return
        self._is_writable = self._server.is_open  # it may have opened since the connection was accepted
        self._transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, WRITE_BUFFER_LOW_BYTES)

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_lost or self._is_ending:
            return
        self.received_bytes += nbytes
        try:
            requests = self._wire.buffer_updated(nbytes)
        except RemoteProtocolError as error:
            self._on_protocol_error(error)
            return
        if not requests:
            self._keep_receiving(nbytes)
            return
        count = len(requests)
        self.received_requests += count
        if self._receiving_bytes:
            self._server.free_bytes += self._receiving_bytes
            self._receiving_bytes = 0
        if count == 1 and self._is_writable and not self._queue and not self._backlog:
            self._serve_one(requests[0])
        elif self._backlog or not self._has_room():
            self._hold_back(requests)
        else:
            self._serve(requests)
        if self._queue or not self._is_writable:
            self._update_reading()

    def _keep_receiving(self, nbytes: int) -> None:
        """Charge ``nbytes`` of an unfinished frame to the budget that all connections share (S3)."""
        self._receiving_bytes += nbytes
        self._server.free_bytes -= nbytes
        limit = self._server.max_unproven_bytes
        if limit is not None and self.client.node_id is None and self._receiving_bytes > limit:
            logger.warning("connection closed %s", Fields(peer=self.client.peer, reason="no proof"))
            self.abort()
        elif self._server.free_bytes < 0:
            logger.warning(
                "connection closed %s",
                Fields(peer=self.client.peer, reason="queued.max.request.bytes is used up"),
            )
            self.abort()

    def eof_received(self) -> bool:
        """Keep the connection while requests are unanswered, although the peer sends no more."""
        try:
            self._wire.eof()
        except RemoteProtocolError as error:
            self._on_protocol_error(error)
            return False
        if not self._queue and not self._backlog:
            return False
        self._is_ending = True
        return True

    def pause_writing(self) -> None:
        self._is_writable = False
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._serve_backlog()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._server.forget(self)
        if self._receiving_bytes:
            self._server.free_bytes += self._receiving_bytes
            self._receiving_bytes = 0
        queue, self._queue = self._queue, deque()
        self._backlog.clear()
        for slot in queue:
            if slot.pending is not None:
                slot.pending.cancel()

    # --- requests and responses

    def _has_room(self) -> bool:
        return self._is_writable and len(self._queue) < MAX_IN_FLIGHT_PER_CONNECTION

    def _hold_back(self, requests: Iterable[Request | BadRequest]) -> None:
        """Queue requests for later: at most those of one receive buffer, as reading pauses now."""
        if not self._is_final:
            self._backlog.extend(requests)

    def _serve_one(self, request: Request | BadRequest) -> None:
        """Do ``_serve`` for a single request with none before it."""
        response = self._dispatch(request, self.client)
        if isinstance(response, Pending):
            self._enqueue(request, response)
        else:
            out: list[Any] = []
            self._encode(request, response, out)
            if len(out) == 1 and not self._is_final:
                self._transport.write(out[0])
            else:
                self._write(out)

    def _serve(self, requests: Iterable[Request | BadRequest]) -> None:
        """Start requests in order, and write the responses that are ready."""
        out: list[Any] = []
        gathered_bytes = 0
        queue = self._queue
        remaining = iter(requests)
        for request in remaining:
            response = self._dispatch(request, self.client)
            if queue or isinstance(response, Pending):
                self._enqueue(request, response)
            else:
                gathered_bytes += self._encode(request, response, out)
                if gathered_bytes >= FLUSH_BYTES:
                    self._write_lines(out)
                    out, gathered_bytes = [], 0
            if self._is_final:
                break
            if not self._has_room():
                self._hold_back(remaining)
                break
        self._write(out)

    def _enqueue(self, request: Request | BadRequest, response: Response | Pending) -> None:
        slot = _Slot(self, _without_body(request))
        self._queue.append(slot)
        if isinstance(response, Pending):
            slot.pending = response
            response.then(slot)
        else:
            slot.response, slot.is_ready = response, True
            if isinstance(response, Refusal) and response.closes:
                self._is_final = self._is_ending = True

    def on_response(self, slot: _Slot) -> None:
        """Write the responses at the head of the queue, after a queued request received its response."""
        if self._is_lost or not self._queue or self._queue[0] is not slot:
            return
        out: list[Any] = []
        queue = self._queue
        while queue and queue[0].is_ready:
            ready = queue.popleft()
            assert ready.response is not None
            self._encode(ready.request, ready.response, out)
        self._write(out)
        self._serve_backlog()

    def _encode(self, request: Request | BadRequest, response: Reply | Refusal, out: list[Any]) -> int:
        """Append the response's buffers to ``out``. Return the number of bytes of its payload."""
        if isinstance(response, Reply):
            assert isinstance(request, Request)
            try:
                out += self._wire.send(request, response.message, response.payload)
            except LocalProtocolError as error:
                message = f"the response cannot be sent: {error}"
                out += self._wire.send_error(request, ErrorCode.UNKNOWN_SERVER_ERROR, message)
                return 0
            return sum(map(len, response.payload)) if response.payload else 0
        out += self._wire.send_error(request, response.error_code, response.error_message)
        if response.closes:
            self._is_final = self._is_ending = True
            self._backlog.clear()
            self._queue.clear()
        return 0

    def _write(self, out: list[Any]) -> None:
        if out and not self._is_lost:
            if len(out) == 1:
                self._transport.write(out[0])
            else:
                self._write_lines(out)
        if self._is_ending and not self._queue and not self._backlog and not self._is_lost:
            self._transport.close()

    def _write_lines(self, out: list[Any]) -> None:
        """Call ``writelines``, then ``pause_writing`` if needed: asyncio omits it from Python 3.12 on."""
        transport = self._transport
        transport.writelines(out)
        if self._is_writable and transport.get_write_buffer_size() > WRITE_BUFFER_HIGH_BYTES:
            # Setting the limits checks the buffer again.
            transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, WRITE_BUFFER_LOW_BYTES)

    def _serve_backlog(self) -> None:
        if self._backlog and not self._is_lost and self._has_room():
            requests, self._backlog = self._backlog, deque()
            self._serve(requests)
        self._update_reading()

    def _update_reading(self) -> None:
        should_read = not self._backlog and not self._is_ending and self._has_room()
        if should_read == self._is_reading or self._is_lost:
            return
        self._is_reading = should_read
        if should_read:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # --- closing

    def _on_protocol_error(self, error: RemoteProtocolError) -> None:
        self._server.metrics.protocol_errors += 1
        logger.info("connection closed %s", Fields(peer=self.client.peer, reason=error))
        self.abort()

    def abort(self) -> None:
        """Close at once. Unsent responses are lost."""
        if not self._is_lost:
            self._transport.abort()

    def end(self) -> None:
        """Stop reading, finish the requests in progress, then close."""
        self._is_ending = True
        self._backlog.clear()
        self._update_reading()
        self._write([])

    def overdue(self, now_ms: int, idle_ms: int) -> str | None:
        """Return why this connection should be closed now, or None.

        Decided from counters at each pass of the reaper; no request is timed.
        """
        server = self._server
        if now_ms - self._made_ms >= HANDSHAKE_DEADLINE_MS:
            if not self._wire.has_handshake:
                return f"no handshake in {HANDSHAKE_DEADLINE_MS} ms"
            if server.max_unproven_bytes is not None and self.client.node_id is None:
                return f"no proof in {HANDSHAKE_DEADLINE_MS} ms"
        if not self._is_reading or not self._is_mid_frame():
            self._frame_ms = None
        elif self._frame_ms is None or self._frame_requests != self.received_requests:
            self._frame_ms, self._frame_requests = now_ms, self.received_requests
            self._frame_bytes = self.received_bytes
        else:
            progress = (self.received_bytes - self._frame_bytes) // FRAME_PROGRESS_BYTES
            if now_ms - self._frame_ms >= FRAME_DEADLINE_MS + 1000 * progress:
                return f"a frame stayed incomplete for {now_ms - self._frame_ms} ms"
        unsent_bytes = 0 if self._is_writable else self._transport.get_write_buffer_size()
        activity = (self.received_bytes, unsent_bytes)
        if activity != self._activity or (self._queue and self._is_writable):  # the broker owes a response
            self._activity = activity
            self._moved_ms = now_ms
        elif 0 <= idle_ms <= now_ms - self._moved_ms:
            return f"nothing moved for {now_ms - self._moved_ms} ms"
        return None

    def _is_mid_frame(self) -> bool:
        try:
            self._wire.eof()
        except RemoteProtocolError:
            return True
        return False


class Server:
    """Listeners and their connections."""

    def __init__(
        self,
        dispatch: Dispatch,
        clock: Clock,
        metrics: Metrics,
        *,
        max_connections: int,
        max_idle_ms: int,
        max_request_bytes: int,
        max_queued_bytes: int,
        max_unproven_bytes: int | None = None,
        on_closed: Callable[[Client], None] | None = None,
    ) -> None:
        """``on_closed`` is called with every connection that was served, after it has closed.

        ``max_unproven_bytes`` limits an unfinished frame of a peer that has not proved to be a node of
        the cluster (S1, S3), which it must do within HANDSHAKE_DEADLINE_MS. None: no proof is required.
        """
        self.dispatch = dispatch
        self._on_closed = on_closed
        self.clock = clock
        self.metrics = metrics
        self.max_request_bytes = max_request_bytes
        self.max_unproven_bytes = max_unproven_bytes
        self.is_open = False
        self._max_connections = max_connections
        self._max_idle_ms = max_idle_ms
        #: Bytes that unfinished frames may still use, over all connections.
        self.free_bytes = max_queued_bytes
        self._listeners: list[Listener] = []
        self._connections: dict[Connection, None] = {}  # in the order of their arrival
        self._has_connections = asyncio.Event()
        self._has_none = asyncio.Event()
        self._has_none.set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all listeners, with ports resolved."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def listen(self, address: str, advertised: str | None) -> str:
        """Open a listener and return its address with the port resolved. Raises ListenError."""
        listener: Listener | None = None
        number = len(self._listeners)

        def accept() -> Connection:
            assert listener is not None
            own_name = listener.address if has_own_name(listener.address) else None
            return Connection(self, advertised or own_name, number)

        listener = await transport_for(address).listen(address, accept)
        self._listeners.append(listener)
        return listener.address

    def open(self) -> None:
        """Start to serve, also the connections accepted since ``listen``."""
        self.is_open = True
        for connection in list(self._connections):
            connection.resume_writing()

    def admit(self, connection: Connection) -> bool:
        if len(self._connections) >= self._max_connections:
            self.metrics.connections_refused += 1
            logger.warning(
                "connection refused %s",
                Fields(peer=connection.client.peer, max_connections=self._max_connections),
            )
            return False
        self.metrics.connections_accepted += 1
        self._connections[connection] = None
        self._has_connections.set()
        self._has_none.clear()
        return True

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        if self._on_closed is not None:
            self._on_closed(connection.client)
        if not self._connections:
            self._has_connections.clear()
            self._has_none.set()

    async def reap_forever(self) -> None:
        """Close overdue connections every REAP_INTERVAL_MS, as long as there are connections."""
        while True:
            await self._has_connections.wait()
            await self.clock.sleep_ms(REAP_INTERVAL_MS)
            self.reap(self.clock.monotonic_ms())

    def reap(self, now_ms: int) -> None:
        for connection in list(self._connections):
            reason = connection.overdue(now_ms, self._max_idle_ms)
            if reason is not None:
                self.metrics.connections_reaped += 1
                logger.info("connection closed %s", Fields(peer=connection.client.peer, reason=reason))
                connection.abort()

    def close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def end(self) -> None:
        """Stop accepting and reading. Each connection closes when its requests are answered."""
        self.close_listeners()
        for connection in list(self._connections):
            connection.end()

    async def wait_closed(self, grace_ms: int, *, level: int = logging.WARNING) -> None:
        """Return when every connection is closed. After ``grace_ms`` they are aborted, which is logged."""
        try:
            await asyncio.wait_for(self._has_none.wait(), grace_ms / 1000)
        except TimeoutError:
            logger.log(
                level,
                "connections closed unanswered %s",
                Fields(count=len(self._connections), grace_ms=grace_ms),
            )
            await self.abort()
        for listener in self._listeners:
            await listener.wait_closed()

    async def abort(self) -> None:
        """Drop every connection. Return when they are closed."""
        self.close_listeners()
        for connection in list(self._connections):
            connection.abort()
        await self._has_none.wait()


_NO_PAYLOAD: Final = memoryview(b"")


def _without_body(request: Request | BadRequest) -> Request | BadRequest:
    """Return the fields needed to respond to ``request`` later, so that its payload may be freed."""
    if isinstance(request, BadRequest):
        return request
    key, version, correlation_id, client_id = request[:4]
    return Request(key, version, correlation_id, client_id, None, _NO_PAYLOAD)


def _socket_address(name: object) -> str:
    """Return ``[::1]:9092`` for ``("::1", 9092, 0, 0)``; text is returned unchanged."""
    match name:
        case (str() as host, int() as port, *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        case str():
            return name
        case _:
            return "unknown"
