"""Connections: receives requests, writes responses in the order of the requests, and limits both.

A ``Connection`` is an ``asyncio.BufferedProtocol`` around a sans-IO ``ServerConnection``. If a response is
ready at once and no earlier request waits, it is written in the same callback, without a task or a future.
Otherwise the request is queued, and its response is written when the request has reached the head of the
queue.

Reading pauses while the peer does not read its responses, while too many requests have no response, and for
the throttle time of a client over its quota. Such a client gets its response at once, and the broker reads no
further request until the throttle time is over (KIP-219).

A connection is closed if it violates the protocol, has no traffic for ``connections.max.idle.ms``, does not
complete the handshake, or a required proof or login, within HANDSHAKE_DEADLINE_MS, or leaves a frame
incomplete for too long.
"""

# Long because a connection and the server share the order of responses, the turns, and the budget of bytes.

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

from kafkalite.broker.activity import Activity
from kafkalite.broker.quotas.address_limits import AddressLimits, canonical
from kafkalite.broker.quotas.quota_manager import QuotaManager
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import without_texts
from kafkalite.broker.server.heap import release_free_memory
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import Pending, Refusal, Reply, Response
from kafkalite.broker.tasks import Signal
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from kafkalite.limits import KIB, MAX_IN_FLIGHT_PER_CONNECTION, MAX_ITEMS_PER_REQUEST, MIB
from kafkalite.log_fields import Fields
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import BadRequest, Request, ServerConnection
from kafkalite.protocol.messages.data import FetchResponse
from kafkalite.security.principal_mapping import KEY as RULES_KEY
from kafkalite.security.principal_mapping import PrincipalMapping
from kafkalite.security.sasl import Login
from kafkalite.transport import Listener, has_own_name, is_tls, needs_login, transport_for, without_security
from kafkalite.transport.certificates import CertificateError
from kafkalite.transport.seam import SecuredProtocol
from kafkalite.transport.tls import TlsTransport, peer_subject
from kafkalite.transport.tls_context import TlsContext

logger = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_MS: Final = 10_000
FRAME_DEADLINE_MS: Final = 30_000  # plus one second for each FRAME_PROGRESS_BYTES received
FRAME_PROGRESS_BYTES: Final = 64 * KIB
REAP_INTERVAL_MS: Final = 5_000
LINGER_MS: Final = 500  # between the end of our stream and closing
WRITE_BUFFER_HIGH_BYTES: Final = 4 * MIB
WRITE_BUFFER_LOW_BYTES: Final = 1 * MIB
FLUSH_BYTES: Final = 1 * MIB  # size of the responses that are collected before they are written
# The number of requests of one connection that are served before the next connection is: usually less than
# a millisecond.
REQUESTS_PER_TURN: Final = 16
UNHURRIED_REQUESTS: Final = 8  # a connection with at most this many requests at once never waits for a turn
RELEASE_BYTES: Final = 16 * MIB  # of freed abandoned frames; then free memory is returned to the system
TURN_BYTES: Final = 1 * MIB  # of requests that span several reads, received from one connection in a turn
#: The number of bytes after which a request is received in turns while other connections wait.
LARGE_REQUEST_BYTES: Final = 64 * KIB
#: The estimated cost of a request in microseconds. Each KiB that it receives or sends adds one microsecond.
REQUEST_COST: Final = 20
#: A connection whose requests cost this many microseconds in HEAVY_SECONDS is heavy: it waits while others
#: wait.
HEAVY_COST: Final = 2_000
HEAVY_SECONDS: Final = 0.1
#: A connection with a longer throttle time can become idle: the broker does not read from it, so it does not
#: notice that the client has closed it.
MAX_BRIEF_THROTTLE_S: Final = 600
_CHARGED_APIS: Final = frozenset({ApiKey.PRODUCE, ApiKey.FETCH})  #: their bytes have quotas
#: A connection beyond connection_creation_rate is closed after its throttle time, at most this.
MAX_CONNECTION_THROTTLE_MS: Final = 1_000


class Dispatch(Protocol):
    def __call__(self, request: Request | BadRequest, client: Client, /) -> Response | Pending: ...


@dataclass(slots=True, eq=False)
class _Slot:
    """A request in the queue. Calling the slot with a response stores it and notifies the connection."""

    connection: Connection
    request: Request | BadRequest
    pending: Pending | None = None
    response: Response | None = None
    is_ready: bool = False

    def __call__(self, response: Response) -> None:
        self.response = response
        self.is_ready = True
        was_exclusive = self.pending is not None and self.pending.is_exclusive
        if self.pending is not None:
            self.connection.bill(self.pending.busy_ns)
        self.pending = None
        if isinstance(response, Refusal) and response.closes:
            self.connection.serve_no_more()
            was_exclusive = False
        self.connection.on_response(self)
        if was_exclusive:
            self.connection.unblock()


class Connection(SecuredProtocol):
    """One client's connection.

    Invariant: responses are written in the order in which requests arrived. ``_queue`` has the requests that
    were passed to their handlers, and ``_backlog`` has later ones that were not.
    """

    def __init__(
        self, server: Server, advertised: str | None, listener: int = 0, login: Login | None = None
    ) -> None:
        self._server = server
        self._dispatch = server.dispatch
        self._wire = ServerConnection(
            max_payload_bytes=server.max_request_bytes,
            max_partitions=server.max_request_partitions,
            requests_per_turn=REQUESTS_PER_TURN,
            needs_login=login is not None,
        )
        self.get_buffer = self._wire.get_buffer  # type: ignore[assignment]  # one call less per read
        self._transport: Any = None
        self._queue: deque[_Slot] = deque()
        self._backlog: deque[Request | BadRequest] = deque()
        self._receiving_bytes = 0  # bytes of a frame that spans several reads
        self._held_bytes = 0  # the buffers of that frame, which grow as its bytes arrive
        self._has_completed = False  # whether the peer has completed such a frame
        self._turn_bytes = 0  # of frames that spanned several reads, since the last turn for them
        self._is_reading = True
        self._is_writable = server.is_open  # while False, received bytes are kept
        self._is_ending = False  # whether reading has ended, so that the last response closes the connection
        self._is_read_in_turn = False  # whether a large request is received in turns
        self._max_in_flight = MAX_IN_FLIGHT_PER_CONNECTION  # 0 while a request is served alone
        self._is_drained = False  # whether the end of the stream follows the last response
        self._is_final = False  # whether the connection's last response is written or queued
        self._is_lost = False
        self._made_ms = self._moved_ms = server.clock.monotonic_ms()
        self._transferred = (0, 0)  # received and unsent bytes at the last pass of the reaper
        self._frame_ms: int | None = None  # when the current frame was first seen incomplete
        self._checked_ms = 0  # when ``overdue`` was last called
        self._frame_requests = self._frame_bytes = 0  # received when it was first seen incomplete
        self._advertised = advertised
        self._listener = listener
        self._login = login
        self.host: str | None = None  #: the peer's address, or None without a socket
        self._muting: asyncio.TimerHandle | None = None  # ends the throttle time of a client over its quota
        #: Those of _CHARGED_APIS of which a request was admitted, or refused for what other connections owe.
        self._admitted_apis: frozenset[int] = frozenset()
        self._metered_ns: int | None = None  # when the metered callback began, or its last response
        self._unbilled_ns = 0  # for which earlier callbacks used the event loop after their last response
        self.is_busy = False  # whether further requests wait for a turn
        self.is_waiting = False  # whether the connection waits for its turn
        self.is_heavy = False  # costs more than a small share of the event loop's time
        self._cost = 0  # of its requests since ``_cost_since``
        self._cost_since = 0.0  # in the event loop's time, or 0 before the first measurement
        self.client = Client("", "")
        self.received_bytes = 0
        self.received_requests = 0

    def __repr__(self) -> str:
        return f"<Connection {self.client.peer} {len(self._queue)} unanswered, {len(self._backlog)} waiting>"

    # --- called by asyncio

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop. Before Python 3.12, each get_running_loop() costs a system call."""
        return asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        local = _socket_address(transport.get_extra_info("sockname"))
        match peer:
            case (str() as host, int() as port, *_):
                self.host = canonical(host)
                peer = self.host, port
        self.client = Client(_socket_address(peer), self._advertised or local, listener=self._listener)
        if self._login is not None:
            self.client.login, self.client.on_authenticated = self._login, self._wire.open_limits
        socket = transport.get_extra_info("socket")
        if not self._server.admit(self, None if socket is None else socket.fileno()):
            self._is_lost = True
            self._transport.abort()
            return
        self._is_writable = self._server.is_open  # may have changed since the connection was accepted
        wait_ms = self._server.connection_throttle_ms(self.host)
        if wait_ms:
            logger.warning(
                "connection refused %s", Fields(peer=self.client.peer, reason="connection_creation_rate")
            )
            self._is_ending = True
            self._update_reading()
            self._loop.call_later(wait_ms / 1000, self.abort)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, WRITE_BUFFER_LOW_BYTES)

    def connection_secured(self) -> None:
        """Derive the principal from the client's certificate. Close the connection if no rule yields one.

        Has no effect if the client must log in: the login proves the principal.
        """
        if self._login is not None:
            return
        try:
            subject = peer_subject(self._transport)
            principal = self._server.principals.principal(subject)
            reason = f"no rule of {RULES_KEY} yields a principal for {subject}"
        except CertificateError as error:
            principal, reason = None, error.message
        if principal is None:
            logger.warning("connection refused %s", Fields(peer=self.client.peer, reason=reason))
            self.abort()
        else:
            self.client.principal = principal
            fields = Fields(peer=self.client.peer, principal=principal)
            logger.debug("connection secured %s", fields)

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_lost or self._is_ending:
            return
        wire, server = self._wire, self._server
        if server.quotas is not None and self._metered_ns is None:
            self._meter(self.buffer_updated, nbytes)
            return
        self.received_bytes += nbytes
        if server.activity.may_be_resting:
            server.activity.touch()
        self._cost += nbytes >> 10
        if self._cost > HEAVY_COST or (self.is_heavy and not self._receiving_bytes):
            self._weigh()
        if self.is_busy or (self.is_heavy and server.is_crowded(self)):
            wire.hold(nbytes)
            requests = []
        else:
            try:
                requests = wire.buffer_updated(nbytes)
            except RemoteProtocolError as error:
                self._on_protocol_error(error)
                return
        count = len(requests)
        if wire.has_more or count > UNHURRIED_REQUESTS:
            server.wait_for_turn(self)
        elif not count:
            self._keep_receiving(nbytes)
            return
        self.received_requests += count
        if self._receiving_bytes:
            server.free_bytes += self._held_bytes
            server.receivers[self._has_completed].pop(self, None)
            self._has_completed = self._has_completed or self._held_bytes > 0
            self._turn_bytes += self._receiving_bytes + nbytes
            if self._turn_bytes >= TURN_BYTES:
                self._turn_bytes = 0
                server.wait_for_turn(self)
            self._receiving_bytes = self._held_bytes = 0
        if (
            count == 1
            and self._is_writable
            and not self._queue
            and not self._backlog
            and server.quotas is None
        ):
            self._serve_one(requests[0])
        elif self._backlog or not self._has_room():
            self._hold_back(requests)
            if server.refusal is not None:
                self.refuse(server.refusal)
        elif requests:
            self._serve(requests)
        if self._queue or self._backlog or not self._is_writable or wire.has_more:
            self._update_reading()

    @property
    def has_more(self) -> bool:
        """Whether there are received requests to decode and serve; False if the connection is lost."""
        return self._wire.has_more and not self._is_lost

    def take_turn(self) -> None:
        """Serve the next requests. Called by the server some time after ``wait_for_turn`` (S24)."""
        if self._server.quotas is not None and self._metered_ns is None:
            self._meter(self.take_turn)
            return
        wire = self._wire
        if self._is_read_in_turn:
            self._is_read_in_turn = False
            self._update_reading()
        if self._backlog:
            self._serve_backlog()
        elif wire.has_more and self._has_room() and not self._is_lost:
            requests = wire.next_requests()
            self.received_requests += len(requests)
            self._serve(requests)
            if wire.has_more:
                self._server.wait_for_turn(self)
            self._update_reading()

    def _weigh(self) -> None:
        """Decide whether this connection is heavy: its requests cost over HEAVY_COST in HEAVY_SECONDS (S24).

        Connections of other nodes are never heavy, because producers with acks=all wait for their fetches.
        """
        now = self._loop.time()
        is_soon = now - self._cost_since < HEAVY_SECONDS
        if is_soon and self._cost <= HEAVY_COST:
            return
        self._set_heavy(is_soon and self.client.node_id is None)
        self._cost_since = now
        self._cost = 0

    def _set_heavy(self, is_heavy: bool) -> None:
        self._server.heavy_count += is_heavy - self.is_heavy
        self.is_heavy = is_heavy

    def _keep_receiving(self, nbytes: int) -> None:
        """Count the buffers of an unfinished frame against the limit that all connections share (S3).

        If the limit is exceeded, the server closes connections, which may include this one.
        """
        self._receiving_bytes += nbytes
        server, held_bytes = self._server, self._wire.held_bytes
        server.free_bytes -= held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if held_bytes:
            receivers = server.receivers[self._has_completed]
            receivers.pop(self, None)
            receivers[self] = None
        limit = server.max_unproven_bytes
        if limit is not None and self.client.node_id is None and self._receiving_bytes > limit:
            logger.warning("connection closed %s", Fields(peer=self.client.peer, reason="no proof"))
            self.abort()
        elif server.free_bytes < 0:
            server.make_room()
        elif (
            server.has_turns_before(self)
            if self._receiving_bytes >= LARGE_REQUEST_BYTES
            else held_bytes and not self._has_completed and server.is_flooded(self)
        ):
            self._is_read_in_turn = True
            server.wait_for_turn(self)
            self._update_reading()

    def _abandon_frame(self) -> None:
        """Free the buffers of an unfinished frame, and no longer count them."""
        server, held_bytes, self._held_bytes = self._server, self._held_bytes, 0
        self._wire.abandon_frame()
        server.receivers[self._has_completed].pop(self, None)
        server.free_bytes += held_bytes
        server.abandoned_bytes += held_bytes

    def give_way(self) -> None:
        """Close the connection, and free the share of its unfinished frame at once (S3)."""
        reason = "queued.max.request.bytes is used up"
        logger.warning("connection closed %s", Fields(peer=self.client.peer, reason=reason))
        self._abandon_frame()
        self.abort()

    def eof_received(self) -> bool:
        """Return True, which keeps the connection open, while requests of the peer have no response yet."""
        try:
            self._wire.eof()
        except RemoteProtocolError as error:
            self._on_protocol_error(error)
            return False
        if not self._queue and not self._backlog and not self._wire.has_more:
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
        if self._muting is not None:
            self._muting.cancel()
        self._set_heavy(False)
        self._server.forget(self)
        self._abandon_frame()
        queue, self._queue = self._queue, deque()
        self._backlog.clear()
        for slot in queue:
            if slot.pending is not None:
                slot.pending.cancel()

    # --- requests and responses

    def refuse(self, refusal: Refusal) -> None:
        """Respond to the first waiting request, if any, with ``refusal``, which closes the connection."""
        if self._backlog and not self._is_lost:
            out: list[Any] = []
            self._encode(self._backlog.popleft(), refusal, out)
            self._write(out)

    def _has_room(self) -> bool:
        return self._is_writable and len(self._queue) < self._max_in_flight and self._muting is None

    def _hold_back(self, requests: Iterable[Request | BadRequest]) -> None:
        """Queue requests for later. Reading pauses, so they are at most those of one receive buffer."""
        if not self._is_final:
            self._backlog.extend(requests)

    def _serve_one(self, request: Request | BadRequest) -> None:
        """Serve a single request when the queue is empty. Same as ``_serve``, but faster."""
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
        """Call the handlers of requests in order, and write the responses that are ready."""
        out: list[Any] = []
        gathered_bytes = 0
        is_turn_over = False
        queue = self._queue
        quotas = None if self.client.node_id is not None else self._server.quotas
        remaining = iter(requests)
        for request in remaining:
            refused = None if quotas is None else self._refuse_debtor(quotas, request)
            response: Response | Pending
            if refused is not None:
                response = refused
            else:
                response = self._dispatch(request, self.client)
                if quotas is not None and request.api_key == ApiKey.PRODUCE and isinstance(request, Request):
                    self._charge_request(quotas, request)
            if queue or isinstance(response, Pending):
                if out and not self._is_lost:  # this request's response may be written at once
                    self._write_lines(out)
                    out, gathered_bytes = [], 0
                self._enqueue(request, response)
            else:
                gathered_bytes += self._encode(request, response, out)
                if gathered_bytes >= FLUSH_BYTES:
                    self._write_lines(out)
                    out, gathered_bytes = [], 0
                    is_turn_over = self.is_heavy
            if self._is_final:
                break
            if is_turn_over:
                self._server.wait_for_turn(self)
            if is_turn_over or not self._has_room():
                self._hold_back(remaining)
                break
        self._write(out)

    def _enqueue(self, request: Request | BadRequest, response: Response | Pending) -> None:
        slot = _Slot(self, _without_body(request))
        self._queue.append(slot)
        if isinstance(response, Pending):
            slot.pending = response
            if response.is_exclusive and not response.is_done:
                self._max_in_flight = 0
            response.then(slot)
        else:
            slot.response, slot.is_ready = response, True
            if isinstance(response, Refusal) and response.closes:
                self.serve_no_more()

    def serve_no_more(self) -> None:
        """Drop later requests, because the response to an earlier one will close the connection."""
        self._is_final = self._is_ending = True
        self._backlog.clear()

    def unblock(self) -> None:
        """Serve the requests that waited because the request before them had to be served alone."""
        self._max_in_flight = MAX_IN_FLIGHT_PER_CONNECTION
        self._serve_backlog()

    def on_response(self, slot: _Slot) -> None:
        """Write all ready responses at the head of the queue. Called when ``slot`` becomes ready."""
        if self._is_lost or not self._queue or self._queue[0] is not slot:
            return
        if self._server.quotas is not None and self._metered_ns is None:
            self._meter(self._send_ready)
        else:
            self._send_ready()

    def _send_ready(self) -> None:
        self._server.activity.touch()
        out: list[Any] = []
        queue = self._queue
        while queue and queue[0].is_ready:
            ready = queue.popleft()
            assert ready.response is not None
            self._encode(ready.request, ready.response, out)
        self._write(out)
        self._serve_backlog()

    def _encode(self, request: Request | BadRequest, response: Reply | Refusal, out: list[Any]) -> int:
        """Append the buffers of the response to ``out``. Return the size of its payload in bytes."""
        self._cost += REQUEST_COST
        throttle_ms = 0
        # Before its login, a client has no user: its requests must not use up the quota that all share.
        if (
            self._server.quotas is not None
            and self.client.node_id is None
            and self.client.login_problem is None
        ):
            client_id = request.client_id if isinstance(request, Request) else self.client.client_id
            throttle_ms = self._charge_response(self._server.quotas, client_id, response)
        else:
            self._unbilled_ns = 0
        if isinstance(response, Reply):
            assert isinstance(request, Request)
            try:
                out += self._send(request, response, throttle_ms)
            except LocalProtocolError as error:
                message = f"the response cannot be sent: {error}"
                out += self._wire.send_error(request, ErrorCode.UNKNOWN_SERVER_ERROR, message)
                return 0
            size_bytes = sum(map(len, response.payload)) if response.payload else 0
            self._cost += size_bytes >> 10
            return size_bytes
        out += self._wire.send_error(
            request, response.error_code, response.error_message, throttle_ms=throttle_ms
        )
        if response.closes:
            self.serve_no_more()
            self._queue.clear()
        return 0

    def _send(self, request: Request, response: Reply, throttle_ms: int) -> list[Any]:
        """Return the buffers of a response. If it is too large, leave out error texts of its items.

        Raises LocalProtocolError if it is still too large.
        """
        message, payload = response
        try:
            return self._wire.send(request, message, payload, throttle_ms=throttle_ms)
        except LocalProtocolError:
            return self._wire.send(request, without_texts(message), payload, throttle_ms=throttle_ms)

    # --- quotas

    def _meter(self, work: Callable[..., None], *arguments: int) -> None:
        """Call ``work``, and bill the client for the time that it uses the event loop."""
        clock = self._server.clock
        self._metered_ns = clock.monotonic_ns()
        try:
            work(*arguments)
        finally:
            self._unbilled_ns += clock.monotonic_ns() - self._metered_ns
            self._metered_ns = None

    def bill(self, busy_ns: int) -> None:
        """Bill the client for time that a request used the event loop outside of the connection's calls."""
        self._unbilled_ns += busy_ns

    def _refuse_debtor(self, quotas: QuotaManager, request: Request | BadRequest) -> Refusal | None:
        """Return the refusal of a connection's first Produce or Fetch if its client owes a throttle time.

        Otherwise a client would exceed its quota with one request on each of many new connections. The
        request is not held: its payload would use memory for as long.
        """
        api_key = request.api_key
        if (
            api_key not in _CHARGED_APIS
            or api_key in self._admitted_apis
            or isinstance(request, BadRequest)
            or self.client.login_problem is not None
        ):
            return None
        self._admitted_apis |= {api_key}
        owed_ms = quotas.owed_ms(
            self.client.user,
            request.client_id or "",
            self._server.clock.monotonic_ms(),
            is_fetch=api_key == ApiKey.FETCH,
        )
        if not owed_ms:
            return None
        self._mute(owed_ms)
        return Refusal(
            ErrorCode.THROTTLING_QUOTA_EXCEEDED,
            f"the client has exceeded its quota on other connections; repeat the request after {owed_ms} ms",
        )

    def _charge_request(self, quotas: QuotaManager, request: Request) -> None:
        """Charge the client for the bytes that it produces. A throttle time begins before the response."""
        now_ms = self._server.clock.monotonic_ms()
        size_bytes = len(request.payload)
        self._mute(
            quotas.charge(self.client.user, request.client_id or "", now_ms, produced_bytes=size_bytes)
        )

    def _charge_response(self, quotas: QuotaManager, client_id: str | None, response: Response) -> int:
        """Charge the client for fetched bytes and event loop time. Return its throttle time left in ms."""
        clock = self._server.clock
        busy_ns, self._unbilled_ns = self._unbilled_ns, 0
        if self._metered_ns is not None:
            now_ns = clock.monotonic_ns()
            busy_ns += now_ns - self._metered_ns
            self._metered_ns = now_ns
        fetched_bytes = 0
        if isinstance(response, Refusal):
            self._mute(response.throttle_ms)
        elif isinstance(response.message, FetchResponse):
            fetched_bytes = sum(map(len, response.payload))
        now_ms = clock.monotonic_ms()
        user = self.client.user
        self._mute(quotas.charge(user, client_id or "", now_ms, fetched_bytes=fetched_bytes, busy_ns=busy_ns))
        if self._muting is None:
            return 0
        return max(0, math.ceil((self._muting.when() - self._loop.time()) * 1000))

    def _mute(self, throttle_ms: int) -> None:
        """Read no request for ``throttle_ms``. A throttle time that ends later stays in effect."""
        if not throttle_ms or self._is_lost:
            return
        end = self._loop.time() + throttle_ms / 1000
        if self._muting is not None and self._muting.when() >= end:
            return
        if self._muting is not None:
            self._muting.cancel()
        self._muting = self._loop.call_at(end, self._unmute)
        self._update_reading()

    def _unmute(self) -> None:
        if self._muting is not None:
            self._muting.cancel()
            self._muting = None
            self._serve_backlog()

    def _write(self, out: list[Any]) -> None:
        if out and not self._is_lost:
            if len(out) == 1:
                self._transport.write(out[0])
            else:
                self._write_lines(out)
        if self._is_ending and not self._queue and not self._backlog and not self._is_lost:
            if not self._wire.has_more or self._is_final:
                self._transport.close()
        elif self._is_drained:
            self._half_close_if_answered()

    def _write_lines(self, out: list[Any]) -> None:
        """Call the transport's ``writelines``, and make sure that the transport calls ``pause_writing`` if
        its buffer is full.

        Since Python 3.12, ``writelines`` alone may omit that call.
        """
        transport = self._transport
        transport.writelines(out)
        if self._is_writable and transport.get_write_buffer_size() > WRITE_BUFFER_HIGH_BYTES:
            # Setting the limits makes the transport check its buffer again.
            transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, WRITE_BUFFER_LOW_BYTES)

    def _serve_backlog(self) -> None:
        if self._server.quotas is not None and self._metered_ns is None:
            self._meter(self._serve_backlog)
            return
        if self._backlog and not self._is_lost and not self.is_waiting and self._has_room():
            requests, self._backlog = self._backlog, deque()
            self._serve(requests)
        if self._has_room() and (self._wire.has_more or self._backlog):
            self._server.wait_for_turn(self)
        self._update_reading()

    def _update_reading(self) -> None:
        has_waiting = self._backlog or self._wire.has_more or self._is_read_in_turn
        should_read = not has_waiting and not self._is_ending and self._has_room()
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
        """Close at once. Responses that are not yet sent are lost."""
        if not self._is_lost:
            self._transport.abort()

    def end(self) -> None:
        """Respond to the requests that have arrived, then send the end of the stream.

        Requests that have arrived but are not handled yet get SHUTTING_DOWN. Bytes that arrive afterwards
        are dropped until the peer closes the connection, or until this side does after LINGER_MS: closing a
        socket with unread bytes resets it, and the peer would lose the responses.
        """
        self._unmute()
        self._serve_backlog()
        self._drain(self.received_bytes, 0)

    def _drain(self, received_bytes: int, quiet_iterations: int) -> None:
        """Wait until no bytes were received in a few iterations of the loop in a row (quiet iterations). Then
        end the stream when every request has a response.

        The arguments are the received bytes and the number of quiet iterations at the previous call.
        """
        if self._is_lost or self._is_ending:
            return
        is_quiet = received_bytes == self.received_bytes and not self._wire.has_more
        quiet_iterations = quiet_iterations + 1 if is_quiet else 0
        if quiet_iterations <= 2:
            self._loop.call_soon(self._drain, self.received_bytes, quiet_iterations)
        else:
            self._is_drained = True
            self._half_close_if_answered()

    def _half_close_if_answered(self) -> None:
        if self._is_drained and not self._queue and not self._backlog and not self._is_lost:
            self._is_drained = False
            self._is_ending = True
            self._loop.call_later(LINGER_MS / 1000, self._transport.close)
            with contextlib.suppress(OSError):  # the peer has reset the connection; connection_lost follows
                self._transport.write_eof()

    def overdue(self, now_ms: int, idle_ms: int) -> str | None:
        """Return why this connection must be closed now, as text, or None.

        Each call compares counters with those of the previous call, so that requests need no timers.
        """
        if now_ms - self._made_ms >= HANDSHAKE_DEADLINE_MS:
            if not self._wire.has_handshake:
                return f"no handshake in {HANDSHAKE_DEADLINE_MS} ms"
            if not self._has_proof:
                return f"no {'proof' if self._login is None else 'login'} in {HANDSHAKE_DEADLINE_MS} ms"
        checked_ms, self._checked_ms = self._checked_ms, now_ms
        if not self._is_mid_frame():
            self._frame_ms = None
        elif not self._is_reading:
            if self._frame_ms is not None:  # the time without reading does not count
                self._frame_ms += now_ms - checked_ms
        elif self._frame_ms is None or self._frame_requests != self.received_requests:
            self._frame_ms, self._frame_requests = now_ms, self.received_requests
            self._frame_bytes = self.received_bytes
        else:
            progress = (self.received_bytes - self._frame_bytes) // FRAME_PROGRESS_BYTES
            if now_ms - self._frame_ms >= FRAME_DEADLINE_MS + 1000 * progress:
                return f"a frame stayed incomplete for {now_ms - self._frame_ms} ms"
        unsent_bytes = 0 if self._is_writable else self._transport.get_write_buffer_size()
        transferred = (self.received_bytes, unsent_bytes)
        if (
            transferred != self._transferred
            or self._is_briefly_muted()
            or (self._queue and self._is_writable)
        ):  # the peer waits for the broker
            self._transferred = transferred
            self._moved_ms = now_ms
        elif 0 <= idle_ms <= now_ms - self._moved_ms:
            return f"nothing moved for {now_ms - self._moved_ms} ms"
        return None

    def _is_briefly_muted(self) -> bool:
        return self._muting is not None and self._muting.when() - self._loop.time() <= MAX_BRIEF_THROTTLE_S

    def idle_ms(self, now_ms: int, max_idle_ms: int) -> float:
        """Return for how many ms this connection cannot become overdue if it has no traffic.

        Call it after ``overdue`` has returned None.
        """
        if not self._wire.has_handshake or not self._has_proof or self._frame_ms is not None:
            return 0
        return math.inf if max_idle_ms < 0 else self._moved_ms + max_idle_ms - now_ms

    @property
    def _has_proof(self) -> bool:
        """Whether the peer has proved its identity, as a node or by a login, or need not do so."""
        if self.client.node_id is not None:
            return True
        return self._server.max_unproven_bytes is None and (
            self._login is None or self._login.username is not None
        )

    def _is_mid_frame(self) -> bool:
        try:
            self._wire.eof()
        except RemoteProtocolError:
            return True
        return False


class Server:
    """Owns the listeners of a broker and their connections."""

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
        max_request_partitions: int = MAX_ITEMS_PER_REQUEST,
        max_unproven_bytes: int | None = None,
        max_descriptor: int | None = None,
        address_limits: AddressLimits | None = None,
        on_closed: Callable[[Client], None] | None = None,
        activity: Activity | None = None,
        tls: TlsContext | None = None,
        principals: PrincipalMapping | None = None,
        new_login: Callable[[bool], Login] | None = None,
    ) -> None:
        """``tls`` is required if a listener's address begins with ``SSL://`` or ``SASL_SSL://``.
        ``new_login`` is required if a listener requires logins; its argument is whether the listener has TLS.
        ``principals`` derives the principals of clients from their certificates; None uses the distinguished
        name.

        ``on_closed`` is called with the client of each connection, also of a refused one, after its end.

        ``max_unproven_bytes`` limits the size of an unfinished frame of a peer until the peer has proved to
        be a node of the cluster (S1, S3), which it must do within HANDSHAKE_DEADLINE_MS. None requires no
        proof.
        A connection whose descriptor is ``max_descriptor`` or above is refused (R55); None allows any.
        ``address_limits`` limits the connections of each address; None does not.
        """
        self.dispatch = dispatch
        self._on_closed = on_closed
        self.clock = clock
        self.metrics = metrics
        self.activity = activity or Activity(clock, may_rest=False)
        self.max_request_bytes = max_request_bytes
        self.max_request_partitions = max_request_partitions
        self.max_unproven_bytes = max_unproven_bytes
        self.quotas: QuotaManager | None = None  #: None while no quota is set
        self.is_open = False
        self.refusal: Refusal | None = None  #: the response to every connection until ``open``
        self._tls = tls
        self.principals = principals or PrincipalMapping()
        self._new_login = new_login
        self._max_connections = max_connections
        self._max_descriptor = sys.maxsize if max_descriptor is None else max_descriptor
        self._address_limits = address_limits
        self._max_idle_ms = max_idle_ms
        #: The number of bytes that unfinished frames of all connections may still use.
        self.free_bytes = max_queued_bytes
        #: The connections with such a frame, by whether they have completed one before. The first of each has
        #: received nothing for the longest time.
        self.receivers: dict[bool, dict[Connection, None]] = {False: {}, True: {}}
        self.abandoned_bytes = 0  #: of frames that were never completed, since memory was last released
        self._busy: list[Connection] = []
        self._turns: deque[Connection] = deque()
        self.is_turning = False  # whether a turn is scheduled
        self.heavy_count = 0
        self._last_heavy: Connection | None = None  # the last heavy connection that was served at once
        self._last_heavy_at = 0.0  # the event loop's time at which it was served
        self._last_receiver: Connection | None = None  # of a part of a large request, without a turn
        self._last_part_at = 0.0  # the event loop's time at which it received the part
        self._listeners: list[Listener] = []
        self._is_closed = False  # whether the listeners are closed
        self._connections: dict[Connection, None] = {}  # in the order of arrival
        self.has_connections = Signal()  #: set while there are connections
        self._has_none = asyncio.Event()
        self._has_none.set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all listeners, with their actual ports."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def listen(self, address: str, advertised: str | None) -> str:
        """Open a listener and return its address with its actual port, without ``SSL://`` and the like.

        Raises ListenError, and ConfigError if the address is malformed or the files of a listener with TLS
        cannot be used.
        """
        listener: Listener | None = None
        is_encrypted, has_logins, address = is_tls(address), needs_login(address), without_security(address)
        transport = transport_for(address)
        if is_encrypted:
            assert self._tls is not None, "a listener with TLS needs a TLS context"
            transport = TlsTransport(transport, self._tls.for_logins() if has_logins else self._tls)
        new_login = self._new_login if has_logins else None
        assert new_login is not None or not has_logins, "a listener with logins needs new_login"
        number = len(self._listeners)

        def accept() -> Connection:
            assert listener is not None
            own_name = listener.address if has_own_name(listener.address) else None
            login = None if new_login is None else new_login(is_encrypted)
            return Connection(self, advertised or own_name, number, login)

        listener = await transport.listen(address, accept)
        self._listeners.append(listener)
        return listener.address

    def open(self) -> None:
        """Begin to serve requests, including those of connections that were accepted since ``listen``."""
        self.is_open = True
        self.refusal = None
        for connection in list(self._connections):
            connection.resume_writing()

    def refuse(self, reason: str) -> None:
        """Refuse the handshakes of all connections with ``reason`` until ``open``."""
        self.refusal = Refusal(ErrorCode.LEADER_NOT_AVAILABLE, reason, closes=True)
        for connection in list(self._connections):
            connection.refuse(self.refusal)

    def admit(self, connection: Connection, descriptor: int | None) -> bool:
        """Register the connection and return True, or return False if the broker stops or a limit is reached.

        ``descriptor`` is the file descriptor of its socket, or None if it has no socket.
        """
        reason = None
        if self._is_closed:
            reason = "the broker stops"
        elif len(self._connections) >= self._max_connections:
            reason = f"{self._max_connections} connections are open; raise max.connections or 'ulimit -n'"
        elif descriptor is not None and descriptor >= self._max_descriptor:
            reason = "the other descriptors are reserved; raise 'ulimit -n'"
        elif not self._admits_address(connection.host):
            reason = f"all connections of {connection.host} are open; raise max.connections.per.ip"
        if reason is not None:
            self.metrics.connections_refused += 1
            logger.warning("connection refused %s", Fields(peer=connection.client.peer, reason=reason))
            return False
        self.metrics.connections_accepted += 1
        connection.client.number = self.metrics.connections_accepted
        self.activity.touch()
        self._connections[connection] = None
        self.has_connections.set()
        self._has_none.clear()
        return True

    def _admits_address(self, host: str | None) -> bool:
        """Count a connection from ``host`` and return True, or return False if its limit is reached."""
        return self._address_limits is None or host is None or self._address_limits.admit(host)

    def connection_throttle_ms(self, host: str | None) -> int:
        """Return 0 if ``host`` is None or connection_creation_rate admits a connection from ``host``.

        Otherwise return the time in ms after which to close the connection. The client then does not connect
        again at once.
        """
        if host is None or self.quotas is None:
            return 0
        wait_ms = self.quotas.admit_connection(host, self.clock.monotonic_ms())
        self.metrics.connections_refused += wait_ms > 0
        return min(wait_ms, MAX_CONNECTION_THROTTLE_MS)

    def make_room(self) -> None:
        """Close connections until the unfinished frames of the others keep to their limit (S3).

        Otherwise frames that are never completed would shut out all clients with large requests. Connections
        that have never completed such a frame are closed first, in the order of ``receivers``.
        """
        while self.free_bytes < 0:
            next(iter(self.receivers[False] or self.receivers[True])).give_way()
        if self.abandoned_bytes >= RELEASE_BYTES:
            self.abandoned_bytes = 0
            release_free_memory()

    def wait_for_turn(self, connection: Connection) -> None:
        """Queue ``connection``: its next requests are served after the connections queued before it (S24).

        In each iteration of the event loop, one queued connection is served. Until the queue is empty,
        further requests of ``connection`` wait for a turn, too. A connection that was not queued waits only
        if it is heavy (``is_crowded``) or sends a large request.
        """
        if not connection.is_busy:
            connection.is_busy = True
            self._busy.append(connection)
        if not connection.is_waiting:
            connection.is_waiting = True
            self._turns.append(connection)
            if not self.is_turning:
                self.is_turning = True
                asyncio.get_running_loop().call_soon(self._next_turn)

    def has_turns_before(self, connection: Connection) -> bool:
        """Whether other connections wait for a turn."""
        return len(self._turns) > connection.is_waiting

    def is_flooded(self, connection: Connection) -> bool:
        """Whether a part of a large request of another connection was received in this iteration of the loop.

        Otherwise a burst of frames that are never completed would hold the event loop (S24). Iterations are
        told apart as by ``is_crowded``.
        """
        now = asyncio.get_running_loop().time()
        if now == self._last_part_at and self._last_receiver is not connection:
            return True
        self._last_part_at, self._last_receiver = now, connection
        return False

    def is_crowded(self, connection: Connection) -> bool:
        """Whether ``connection``, which is heavy, must wait for a turn (S24).

        It must wait if a turn is scheduled, or if another heavy connection was served at once in this
        iteration of the event loop. Calls are in the same iteration if the loop's time is the same: uvloop
        updates it once in each iteration.
        """
        if self.is_turning:
            return True
        if self.heavy_count == 1:
            return False
        now = asyncio.get_running_loop().time()
        if now == self._last_heavy_at and self._last_heavy is not connection:
            return True
        self._last_heavy_at, self._last_heavy = now, connection
        return False

    def _next_turn(self) -> None:
        connection = self._turns.popleft()
        connection.is_waiting = False
        connection.take_turn()
        if self._turns:
            asyncio.get_running_loop().call_soon(self._next_turn)
        else:
            self.is_turning = False
            busy, self._busy = self._busy, []
            for connection in busy:
                connection.is_busy = connection.has_more
                if connection.is_busy:
                    self._busy.append(connection)

    def forget(self, connection: Connection) -> None:
        was_admitted = connection in self._connections
        self._connections.pop(connection, None)
        if was_admitted and self._address_limits is not None and connection.host is not None:
            self._address_limits.forget(connection.host)
        if self._last_heavy is connection:
            self._last_heavy = None
        if self._last_receiver is connection:
            self._last_receiver = None
        if self._on_closed is not None:
            self._on_closed(connection.client)
        if not self._connections:
            self.has_connections.clear()
            self._has_none.set()

    async def reap_forever(self) -> None:
        """Close overdue connections every REAP_INTERVAL_MS while there are connections, until cancelled."""
        pace = self.activity.every(REAP_INTERVAL_MS)
        idle_ms = 0.0
        while True:
            await self.has_connections.wait()
            await pace.rest(idle_ms)
            pace.begin()
            idle_ms = self.reap(self.clock.monotonic_ms())

    def reap(self, now_ms: int) -> float:
        """Close overdue connections. Return for how many ms no other connection can become overdue if it has
        no traffic.

        Also returns free memory to the system after large frames were abandoned.
        """
        idle_ms = math.inf
        for connection in list(self._connections):
            reason = connection.overdue(now_ms, self._max_idle_ms)
            if reason is None:
                idle_ms = min(idle_ms, connection.idle_ms(now_ms, self._max_idle_ms))
            else:
                self.metrics.connections_reaped += 1
                logger.info("connection closed %s", Fields(peer=connection.client.peer, reason=reason))
                connection.abort()
        if self.abandoned_bytes >= RELEASE_BYTES:
            self.abandoned_bytes = 0
            release_free_memory()
        return idle_ms

    def close_listeners(self) -> None:
        """Stop accepting connections. Those whose ``connection_made`` was not called yet are refused."""
        self._is_closed = True
        for listener in self._listeners:
            listener.close()

    def end(self) -> None:
        """Stop accepting connections. Each connection ends when all requests that arrived have responses."""
        self.close_listeners()
        for connection in list(self._connections):
            connection.end()

    async def wait_closed(self, grace_ms: int, *, level: int = logging.WARNING) -> None:
        """Return when all connections are closed. After ``grace_ms``, log and abort those still open."""
        try:
            async with asyncio.timeout(grace_ms / 1000):
                await self._has_none.wait()
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
        """Abort every connection and return when all are closed."""
        self.close_listeners()
        for connection in list(self._connections):
            connection.abort()
        await self._has_none.wait()


_NO_PAYLOAD: Final = memoryview(b"")


def _without_body(request: Request | BadRequest) -> Request | BadRequest:
    """Return the request without body and payload, so that these can be freed before the response."""
    if isinstance(request, BadRequest):
        return request
    key, version, correlation_id, client_id = request[:4]
    return Request(key, version, correlation_id, client_id, None, _NO_PAYLOAD)


def _socket_address(name: object) -> str:
    """Return a socket name as text: ``[::1]:9092`` for ``("::1", 9092, 0, 0)``. Return a str unchanged."""
    match name:
        case (str() as host, int() as port, *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        case str():
            return name
        case _:
            return "unknown"
