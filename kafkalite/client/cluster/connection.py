"""One connection to one broker: the asyncio shell around ``protocol.connection.ClientConnection``.

A request has a callback that runs inside ``buffer_updated`` as soon as the response is complete, without a
task, a future or another iteration of the loop. ``call`` is the awaitable form. Only this module turns a
response's error code, a lost connection or a missing response into an exception.
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
    from kafkalite.client.cluster.login import Login
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

#: A client logs in again after this part of its session, as Kafka's do (KIP-368).
RENEWAL_FACTOR: Final = 0.85


# (on_response, deadline on the loop's clock in seconds, timeout_ms)
_Pending = tuple[OnResponse, float, int]
# A request that waits for the end of a throttle time: (message, on_response, deadline, payload parts)
_Held = tuple[Any, OnResponse, float, Sequence[Buffer]]


class Connection(asyncio.BufferedProtocol):
    """A connection to one broker. Invariant: the callback of each accepted request is called exactly once."""

    def __init__(
        self, *, client_id: str, address: str, loop: asyncio.AbstractEventLoop, login: Login | None = None
    ) -> None:
        self.address = address
        self._login = login
        self._renewal: asyncio.TimerHandle | None = None  # logs in again before the session ends
        self._renewing: asyncio.Task[None] | None = None
        self._loop = loop
        self._protocol = ClientConnection(client_id)
        self._transport: asyncio.Transport | None = None
        #: Plain attributes, because sending a single record reads each of them.
        self.is_open = False
        #: False while the socket's buffer is above its high-water mark, and while the broker throttles.
        self.can_write = True
        self.pending: dict[int, _Pending] = {}  #: requests in flight by correlation id; read-only for others
        self._sweep: asyncio.TimerHandle | None = None
        self._reason: KafkaliteError | None = None
        #: Called once, after the callbacks of all requests in flight.
        self.on_lost: Callable[[Connection], None] | None = None
        #: Called about every PATIENCE_S while ``is_slow``.
        self.on_slow: Callable[[Connection], None] | None = None
        self.extra_patience_s = 0.0
        self._reported_slow_s = 0.0
        self._is_socket_full = False
        self._throttle: asyncio.TimerHandle | None = None  # ends the throttle time of a quota (KIP-219)
        self._held: deque[_Held] = deque()  # requests that wait for that end
        #: Called when ``can_write`` has become True again.
        self.on_writable: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Connection to {self.address}, {state}, {len(self.pending)} in flight>"

    @property
    def in_flight(self) -> int:
        """The number of requests without a response."""
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
        If that is later than its timeout, it fails with RequestTimeoutError, and the connection stays open.
        Raises ConnectionFailedError if the connection is closed, and LocalProtocolError if client and broker
        have no common version of this API. ``on_response`` is not called in these cases.
        """
        transport = self._transport
        if not self.is_open or transport is None:
            raise self._reason or ConnectionFailedError(f"the connection to {self.address} is closed")
        if self._throttle is not None:
            held = (message, on_response, self._loop.time() + timeout_ms / 1000, payload_parts)
            self._held.append(held)
            if held[2] < self._throttle.when():
                self._loop.call_at(held[2], self._give_up_held, held)
            return
        correlation_id, buffers = self._protocol.send(message, payload_parts)
        self.pending[correlation_id] = (on_response, self._loop.time() + timeout_ms / 1000, timeout_ms)
        transport.writelines(buffers)
        if self._sweep is None:
            self._sweep = self._loop.call_later(min(SWEEP_INTERVAL_S, timeout_ms / 1000), self._sweep_pending)

    async def call(self, message: Any, *, timeout_ms: int, payload_parts: Sequence[Buffer] = ()) -> Response:
        """Send ``message`` and return the response.

        Cancelling the wait leaves the request in flight; its response is dropped. Raises BrokerError,
        RequestTimeoutError, ConnectionFailedError.
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
        """Log in, also again before the session ends. Raises SaslAuthenticationError and as ``call`` does."""
        from kafkalite.client.cluster.login import REFUSALS, raise_refusal

        assert self._login is not None, "there is a login"
        steps = self._login.steps()
        try:
            request = next(steps)
            while True:
                request = steps.send((await self.call(request, timeout_ms=timeout_ms)).message)
        except StopIteration as complete:
            lifetime_ms: int = complete.value
        except REFUSALS as error:
            raise_refusal(self.address, error)
        if lifetime_ms and self.is_open:
            delay_s = lifetime_ms * RENEWAL_FACTOR / 1000
            self._renewal = self._loop.call_later(delay_s, self._renew, timeout_ms)

    def _renew(self, timeout_ms: int) -> None:
        async def renew() -> None:
            try:
                await self._log_in(timeout_ms)
            except KafkaliteError as error:
                self._fail(error)

        self._renewing = self._loop.create_task(renew(), name=f"login at {self.address}")

    def _refused(self, error: BrokerError) -> KafkaliteError:
        """Return the error of a response, and close the connection if the broker will: it requires a login,
        or the session of the last one has ended."""
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
        """Send no request for ``throttle_ms``, because the broker would not read it (KIP-219)."""
        end_s = self._loop.time() + throttle_ms / 1000
        if self._throttle is not None:
            if self._throttle.when() >= end_s:
                return
            self._throttle.cancel()
        logger.debug(
            "throttled %s", Fields(broker=self.address, throttle_ms=throttle_ms, reason="a quota is exceeded")
        )
        self._throttle = self._loop.call_at(end_s, self._end_throttle)
        self.can_write = False
        # The broker has requests in flight unread in the socket: give them as much more time.
        for correlation_id, (on_response, deadline_s, timeout_ms) in self.pending.items():
            self.pending[correlation_id] = (on_response, deadline_s + throttle_ms / 1000, timeout_ms)

    def _end_throttle(self) -> None:
        self._throttle = None
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
            error = RequestTimeoutError(
                f"{self.address} throttles this client, which exceeds a quota, for longer than the request's"
                " timeout",
                hint="'kl quota describe' shows the quotas of a client",
            )
            self._call_back(held[1], None, _NOTHING, error)

    def _update_can_write(self) -> None:
        could_write = self.can_write
        self.can_write = not self._is_socket_full and self._throttle is None
        if self.can_write and not could_write and self.on_writable is not None:
            self.on_writable()

    def _sweep_pending(self) -> None:
        """Close the connection if a request has timed out: the missing response blocks all later ones."""
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
        Throttle times do not count."""
        patience_s = PATIENCE_S + self.extra_patience_s
        for _, deadline_s, timeout_ms in self.pending.values():  # the first is the oldest
            return self._loop.time() - (deadline_s - timeout_ms / 1000) > patience_s
        return False

    def close(self) -> None:
        """Close the connection. Requests in flight fail with ClientClosedError."""
        self._fail(ClientClosedError(f"the connection to {self.address} was closed by this client"))

    def give_up(self) -> None:
        """Close the connection. Requests in flight fail with ConnectionFailedError."""
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
        if self._renewal is not None:
            self._renewal.cancel()
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
    login: Login | None = None,
) -> Connection:
    """Connect to ``address``, negotiate API versions, and log in if there is a ``login``.

    An address that begins with ``SSL://`` or ``SASL_SSL://`` needs ``tls``. Raises SslAuthenticationError if
    a side refuses the other's certificate, SaslAuthenticationError if the broker refuses the login,
    ConnectionFailedError for every other failure, and ConfigError if the files of ``tls`` cannot be used.
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
            raise ConnectionFailedError(late) from None
        if isinstance(error, BrokerError):
            raise ConnectionFailedError(f"{address}: {error.message}", hint=REFUSED_HINT) from error
        if isinstance(error, OSError):
            raise ConnectionFailedError(f"{address}: {error}") from error
        if isinstance(error, ConnectionFailedError) and connection is not None:
            raise type(error)(error.message, hint=error.hint or CLOSED_AT_ONCE_HINT) from error
        raise
    return connection
