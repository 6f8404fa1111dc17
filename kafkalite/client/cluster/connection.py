"""One connection to one broker: the asyncio shell around ``protocol.connection.ClientConnection``.

A request has a callback that runs inside ``buffer_updated`` as soon as the response is complete, without a
task, a future or another iteration of the loop. ``call`` is the awaitable form. An error code of the whole
response, a lost connection and a missing response become exceptions here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from kafkalite.errors import (
    BrokerError,
    ClientClosedError,
    ConnectionFailedError,
    ErrorCode,
    KafkaliteError,
    ProtocolError,
    RequestTimeoutError,
    SaslAuthenticationError,
    broker_error,
)
from kafkalite.log_fields import Fields
from kafkalite.protocol.connection import ClientConnection
from kafkalite.transport import is_tls, transport_for, without_security

if TYPE_CHECKING:
    from kafkalite.client.cluster.login import ConnectionLogin
    from kafkalite.protocol.messages.cluster import FeatureRange
    from kafkalite.protocol.structs import Struct
    from kafkalite.transport.tls_context import TlsContext

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

# How often pending requests are checked. A timeout is detected late by at most this time. There is one timer
# per connection, and none while no request is in flight.
SWEEP_INTERVAL_S: Final = 0.25

# A broker that does not respond for longer may be dead without having closed the connection, so other brokers
# should be asked for the new leader. The wait of a long poll is added to this time.
PATIENCE_S: Final = 1.0


class Response(NamedTuple):
    """A successful response. Its message may still contain errors of single partitions or items."""

    message: Any
    payload: memoryview


OnResponse = Callable[[Any, memoryview, Exception | None], None]
"""Called with (message, payload, None) or, if the request failed, with (any, any, error)."""

_NOTHING: Final = memoryview(b"")


# (on_response, deadline on the loop's clock in seconds, timeout_ms)
_Pending = tuple[OnResponse, float, int]
# A request that waits for the end of a throttle time, or for a login:
# (message, on_response, deadline, payload parts)
_Held = tuple[Any, OnResponse, float, Sequence[Buffer]]


class Connection(asyncio.BufferedProtocol):
    """A connection to one broker.

    Invariant: if ``request`` does not raise, its callback is called exactly once.
    """

    def __init__(
        self,
        *,
        client_id: str,
        address: str,
        loop: asyncio.AbstractEventLoop,
        login: ConnectionLogin | None = None,
    ) -> None:
        self.address = address
        self._login = login
        self._renewal: asyncio.TimerHandle | None = None  # logs in again before the session ends
        self._renewing: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None  # begins to keep requests before the session ends
        self._is_session_ending = False  # whether requests wait for the login that renews the session
        self._loop = loop
        self._protocol = ClientConnection(client_id)
        self._transport: asyncio.Transport | None = None
        #: Plain attributes, because sending a single record reads each of them.
        self.is_open = False
        #: False while the socket's buffer is above its high-water mark, and while requests are kept.
        self.can_write = True
        self.pending: dict[int, _Pending] = {}  #: requests in flight by correlation id; read-only for others
        self._sweep: asyncio.TimerHandle | None = None
        self._reason: KafkaliteError | None = None
        #: Called once, after the callbacks of all requests in flight.
        self.on_lost: Callable[[Connection], None] | None = None
        #: Called about every PATIENCE_S while ``is_slow``.
        self.on_slow: Callable[[Connection], None] | None = None
        #: The levels that the node at the other end supports, if it said so (``Authenticator.dial``).
        self.peer_features: Sequence[FeatureRange] | None = None
        self.extra_patience_s = 0.0
        self._reported_slow_s = 0.0
        self._is_socket_full = False
        self._throttle: asyncio.TimerHandle | None = None  # ends the throttle time of a quota (KIP-219)
        self._held: deque[_Held] = deque()  # requests that wait for that end, or for a login
        #: Called when ``can_write`` has become True again.
        self.on_writable: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Connection to {self.address}, {state}, {len(self.pending)} in flight>"

    @property
    def in_flight(self) -> int:
        """The number of sent requests without a response."""
        return len(self.pending)

    @property
    def peer(self) -> str:
        """The peer's host:port according to the operating system, or else the dialled address."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        if not isinstance(name, tuple):
            return self.address
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def request(
        self, message: Any, on_response: OnResponse, timeout_ms: int, payload_parts: Sequence[Buffer] = ()
    ) -> None:
        """Send ``message``. ``on_response`` is called once, but never from inside this call.

        While the broker throttles this client, the request is kept and sent at the end of the throttle time.
        Shortly before the end of a session, it is kept until the login that renews the session is complete.
        If the request's timeout passes before that, ``on_response`` receives RequestTimeoutError, and the
        connection stays open. If the connection is closed, raises the error that closed it, or
        ConnectionFailedError. Raises LocalProtocolError if client and broker have no common version of this
        API; for a kept request, ``on_response`` receives this error. If this call raises an exception,
        ``on_response`` is not called.
        """
        if self.is_open and (self._throttle is not None or self._is_session_ending):
            held = (message, on_response, self._loop.time() + timeout_ms / 1000, payload_parts)
            self._held.append(held)
            if self._throttle is None or held[2] < self._throttle.when():
                self._loop.call_at(held[2], self._give_up_held, held)
            return
        self._send(message, on_response, timeout_ms, payload_parts)

    def _send(
        self,
        message: Any,
        on_response: OnResponse,
        timeout_ms: int,
        payload_parts: Sequence[Buffer] = (),
        *,
        begins_s: float = 0.0,
    ) -> None:
        """Same as ``request``, but never keeps the request. The timeout begins now, or at ``begins_s`` of the
        loop's clock if that is later."""
        transport = self._transport
        if not self.is_open or transport is None:
            raise self._reason or ConnectionFailedError(f"the connection to {self.address} is closed")
        correlation_id, buffers = self._protocol.send(message, payload_parts)
        deadline_s = max(begins_s, self._loop.time()) + timeout_ms / 1000
        self.pending[correlation_id] = (on_response, deadline_s, timeout_ms)
        transport.writelines(buffers)
        if self._sweep is None:
            self._sweep = self._loop.call_later(min(SWEEP_INTERVAL_S, timeout_ms / 1000), self._sweep_pending)

    def supports(self, request: type[Struct]) -> bool:
        """Whether the broker knows the version that ``request`` is of."""
        return self._protocol.supports(request)

    async def call(self, message: Any, *, timeout_ms: int, payload_parts: Sequence[Buffer] = ()) -> Response:
        """Send ``message`` and return the response.

        Cancelling the wait leaves the request in flight; its response is dropped. Raises the BrokerError of
        the whole response, RequestTimeoutError, ConnectionFailedError, ClientClosedError if this client
        closed the connection, and LocalProtocolError.
        """
        responded: asyncio.Future[Response] = self._loop.create_future()
        self.request(message, partial(_resolve, responded), timeout_ms, payload_parts)
        return await responded

    async def _handshake(self, timeout_ms: int) -> None:
        """Negotiate the API versions. Raises the same errors as ``call``."""
        greeted: asyncio.Future[Response] = self._loop.create_future()
        transport = self._transport
        assert transport is not None, "connected before the handshake"
        correlation_id, buffers = self._protocol.handshake()
        deadline_s = self._loop.time() + timeout_ms / 1000
        self.pending[correlation_id] = (partial(_resolve, greeted), deadline_s, timeout_ms)
        transport.writelines(buffers)
        await greeted

    async def _log_in(self, timeout_ms: int) -> None:
        """Log in, and schedule the next login if the session ends (KIP-368).

        Raises SaslAuthenticationError and the errors of ``call``.
        """
        from kafkalite.client.cluster.login import (
            MIN_SESSION_MS,
            PAUSE_FACTOR,
            REFUSALS,
            RENEWAL_FACTOR,
            raise_refusal,
        )
        from kafkalite.security.oauth import MAX_SESSION_MS

        assert self._login is not None, "there is a login"
        steps = self._login.steps(await self._login.exchange(timeout_ms))
        try:
            request = next(steps)
            while True:
                request = steps.send((await self._call_at_once(request, timeout_ms)).message)
        except StopIteration as complete:
            lifetime_ms: int = complete.value
        except REFUSALS as error:
            raise_refusal(self.address, error)
        if self._pause is not None:
            self._pause.cancel()
        self._is_session_ending = False
        if lifetime_ms and self.is_open:
            # The server may be false.
            lifetime_s = min(max(lifetime_ms, MIN_SESSION_MS), MAX_SESSION_MS) / 1000
            self._renewal = self._loop.call_later(lifetime_s * RENEWAL_FACTOR, self._renew, timeout_ms)
            self._pause = self._loop.call_later(lifetime_s * PAUSE_FACTOR, self._pause_requests)
        self._send_held()

    async def _call_at_once(self, message: Any, timeout_ms: int) -> Response:
        """Send a message of a login, which is not kept while other requests are, and return the response.

        ``timeout_ms`` begins when the broker may respond: after the throttle time, and after its responses to
        the requests in flight.
        """
        begins_s = max((deadline_s for _, deadline_s, _ in self.pending.values()), default=0.0)
        if self._throttle is not None:
            begins_s = max(begins_s, self._throttle.when())
        responded: asyncio.Future[Response] = self._loop.create_future()
        self._send(message, partial(_resolve, responded), timeout_ms, begins_s=begins_s)
        return await responded

    def _pause_requests(self) -> None:
        """Keep further requests until the login that renews the session is complete."""
        self._is_session_ending = True
        self._update_can_write()

    def _renew(self, timeout_ms: int) -> None:
        async def renew() -> None:
            try:
                await self._log_in(timeout_ms)
            except KafkaliteError as error:
                self._fail(error)

        self._renewing = self._loop.create_task(renew(), name=f"login at {self.address}")

    def _refused(self, error: BrokerError) -> KafkaliteError:
        """Return the error to report for a response with ``error``, which is ILLEGAL_SASL_STATE.

        Closes the connection if there is no login or a session has ended, because the broker does, too.
        """
        if self._login is None:
            reason: KafkaliteError = SaslAuthenticationError(f"{self.address}: {error.message}")
        elif self._renewing is None and self._renewal is None:
            return error  # of a login
        else:
            reason = ConnectionFailedError(f"{self.address}: {error.message}")
        self._fail(reason)
        return reason

    # --- throttling

    def _begin_throttle(self, throttle_ms: int) -> None:
        """Keep new requests for ``throttle_ms``, because the broker would not read them (KIP-219)."""
        end_s = self._loop.time() + throttle_ms / 1000
        if self._throttle is not None:
            before_s = self._throttle.when()
            if before_s >= end_s:
                return
            self._throttle.cancel()
            for held in self._held:
                if before_s <= held[2] < end_s:  # an earlier deadline has its timer
                    self._loop.call_at(held[2], self._give_up_held, held)
        logger.debug(
            "throttled %s", Fields(broker=self.address, throttle_ms=throttle_ms, reason="a quota is exceeded")
        )
        self._throttle = self._loop.call_at(end_s, self._end_throttle)
        self.can_write = False
        # The broker has requests in flight unread in the socket: give them as much more time.
        for correlation_id, (on_response, deadline_s, timeout_ms) in self.pending.items():
            self.pending[correlation_id] = (on_response, deadline_s + throttle_ms / 1000, timeout_ms)

    def _end_throttle(self) -> None:
        assert self._throttle is not None, "the timer of a throttle time"
        ended_s, self._throttle = self._throttle.when(), None
        if self._is_session_ending:
            for held in self._held:
                if held[2] >= ended_s:  # an earlier deadline has its timer
                    self._loop.call_at(held[2], self._give_up_held, held)
        self._send_held()

    def _send_held(self) -> None:
        """Send the requests that were kept, unless they must be kept longer."""
        if self._throttle is not None or self._is_session_ending:
            return
        held, self._held = self._held, deque()
        for message, on_response, deadline_s, payload_parts in held:
            left_ms = max(1, round((deadline_s - self._loop.time()) * 1000))
            try:
                self.request(message, on_response, left_ms, payload_parts)
            except KafkaliteError as error:
                self._call_back(on_response, None, _NOTHING, error)
        self._update_can_write()

    def _give_up_held(self, held: _Held) -> None:
        if held in self._held:
            self._held.remove(held)
            if self._throttle is not None:
                error = RequestTimeoutError(
                    f"{self.address} throttles this client, which exceeds a quota, for longer than the"
                    " request's timeout",
                    hint="'kl quota describe' shows the quotas of a client",
                )
            else:
                error = RequestTimeoutError(
                    f"the login that renews the session at {self.address} takes longer than the request's"
                    " timeout"
                )
            self._call_back(held[1], None, _NOTHING, error)

    def _update_can_write(self) -> None:
        could_write = self.can_write
        is_kept = self._throttle is not None or self._is_session_ending
        self.can_write = not self._is_socket_full and not is_kept
        if self.can_write and not could_write and self.on_writable is not None:
            self.on_writable()

    def _sweep_pending(self) -> None:
        """Close the connection if a request has timed out, because later responses arrive only after its own.

        Otherwise call ``on_slow`` if it is due.
        """
        self._sweep = None
        now_s = self._loop.time()
        for _, deadline_s, timeout_ms in self.pending.values():
            if deadline_s <= now_s:
                self._fail(
                    RequestTimeoutError(
                        f"{self.address} did not respond within {timeout_ms} ms",
                        hint="the connection is closed; raise request.timeout.ms if the broker is only slow",
                    )
                )
                return
        if self.on_slow is not None and self.is_slow and now_s - self._reported_slow_s >= PATIENCE_S:
            self._reported_slow_s = now_s
            self.on_slow(self)
        if self.pending:
            self._sweep = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep_pending)

    @property
    def is_slow(self) -> bool:
        """Whether the oldest request has been pending for longer than PATIENCE_S plus ``extra_patience_s``.

        Throttle times do not count.
        """
        patience_s = PATIENCE_S + self.extra_patience_s
        for _, deadline_s, timeout_ms in self.pending.values():  # the first is the oldest
            return self._loop.time() - (deadline_s - timeout_ms / 1000) > patience_s
        return False

    def close(self) -> None:
        """Close the connection. Requests without a response fail with ClientClosedError."""
        self._fail(ClientClosedError(f"the connection to {self.address} was closed by this client"))

    def give_up(self) -> None:
        """Close the connection. Requests without a response fail with ConnectionFailedError."""
        self._fail(ConnectionFailedError(f"{self.address} does not respond, and other brokers lead now"))

    def _fail(self, reason: KafkaliteError) -> None:
        self.is_open = False
        if self._reason is None:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()
        self._fail_pending(self._reason)

    def _fail_pending(self, error: KafkaliteError) -> None:
        pending, self.pending = self.pending, {}
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._throttle is not None:
            self._throttle.cancel()
            self._throttle = None
        held, self._held = self._held, deque()
        for on_response in [*(one[0] for one in pending.values()), *(one[1] for one in held)]:
            self._call_back(on_response, None, _NOTHING, error)

    def _call_back(
        self, on_response: OnResponse, message: Any, payload: memoryview, error: Exception | None
    ) -> None:
        try:
            on_response(message, payload, error)
        except Exception as failure:
            self._loop.call_exception_handler(
                {"message": f"the handler of a response from {self.address} failed", "exception": failure}
            )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._protocol.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            responses = self._protocol.buffer_updated(nbytes)
        except ProtocolError as broken:
            message = f"{self.address} broke the protocol: {broken.message}"
            self._fail(ConnectionFailedError(message, hint=broken.hint or FOREIGN_HINT))
            return
        for correlation_id, throttle_ms, message, payload in responses:
            pending = self.pending.pop(correlation_id, None)
            if throttle_ms:
                self._begin_throttle(throttle_ms)
            if pending is None:
                continue
            error: KafkaliteError | None = None
            if message.error_code:
                error = broker_error(message.error_code, message.error_message or "")
                if message.error_code == ErrorCode.ILLEGAL_SASL_STATE:
                    error = self._refused(error)
            self._call_back(pending[0], message, payload, error)

    def eof_received(self) -> bool:
        self.is_open = False
        return False  # close the transport; connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.is_open = False
        for scheduled in (self._renewal, self._renewing, self._pause):
            if scheduled is not None:
                scheduled.cancel()
        if self._reason is None and isinstance(exc, ConnectionFailedError):  # TLS knows the reason
            self._reason = type(exc)(f"{self.address}: {exc.message}", hint=exc.hint)
        elif self._reason is None:
            cause = f": {exc}" if exc is not None else ""
            self._reason = ConnectionFailedError(f"{self.address} closed the connection{cause}")
        self._fail_pending(self._reason)
        if self.on_lost is not None:
            self.on_lost(self)

    def pause_writing(self) -> None:
        self._is_socket_full = True
        self.can_write = False

    def resume_writing(self) -> None:
        self._is_socket_full = False
        self._update_can_write()


def _resolve(
    responded: asyncio.Future[Response], message: Any, payload: memoryview, error: Exception | None
) -> None:
    if responded.done():
        return  # the waiter was cancelled
    if error is not None:
        responded.set_exception(error)
    else:
        responded.set_result(Response(message, payload))


FOREIGN_HINT: Final = "another program listens there; check the address, and the port of the broker"
#: A program that accepts a connection, but does not respond.
SILENT_HINT: Final = "another program may listen there; check the address, and the port of the broker"
#: A broker at its limit of connections closes a new one without a response.
CLOSED_AT_ONCE_HINT: Final = (
    "something listens there, but closes new connections: the broker's log says 'connection refused' if it"
    " has reached max.connections or its limit of open files; end idle clients, or raise the limit"
)

REFUSED_HINT: Final = "a broker runs there; its log says more"


async def connect(
    address: str,
    *,
    client_id: str,
    timeout_ms: int,
    tls: TlsContext | None = None,
    login: ConnectionLogin | None = None,
) -> Connection:
    """Connect to ``address``, negotiate API versions, and log in if there is a ``login``.

    An address that begins with ``SSL://`` or ``SASL_SSL://`` needs ``tls``. Raises SslAuthenticationError if
    the client or the broker refuses the TLS handshake, SaslAuthenticationError if the broker refuses the
    login or there is no token for it, ConnectionFailedError if the connection fails for another reason, and
    ConfigError if the address is invalid or the files of ``tls`` cannot be used.
    """
    loop = asyncio.get_running_loop()
    is_encrypted, address = is_tls(address), without_security(address)
    transport = transport_for(address)
    if is_encrypted:
        from kafkalite.transport.tls import TlsTransport

        assert tls is not None, "TLS needs a context"
        transport = TlsTransport(transport, tls)

    def make() -> Connection:
        return Connection(client_id=client_id, address=address, loop=loop, login=login)

    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            connection = cast(Connection, await transport.connect(address, make))
            await connection._handshake(timeout_ms)
            if login is not None:
                await connection._log_in(timeout_ms)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, TimeoutError):
            late = f"{address} did not complete a connection within {timeout_ms} ms"
            raise ConnectionFailedError(late, hint="" if connection is None else SILENT_HINT) from None
        if isinstance(error, BrokerError):
            raise ConnectionFailedError(f"{address}: {error.message}", hint=REFUSED_HINT) from error
        if isinstance(error, OSError):
            raise ConnectionFailedError(f"{address}: {error}") from error
        if type(error) is ConnectionFailedError and connection is not None:
            raise ConnectionFailedError(error.message, hint=error.hint or CLOSED_AT_ONCE_HINT) from error
        raise
    return connection
