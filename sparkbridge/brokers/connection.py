"""One blocking connection to one broker: a socket around ``kafkalite.protocol.connection.ClientConnection``.

The socket may be encrypted by TLS, and the connection may have a login (SASL), which ``send`` renews.

``send`` writes a request and returns a ``Reply``; ``receive`` waits for the response. Several requests may be
in flight; their responses arrive in the order of the requests. A caller may drop a ``Reply`` instead of
receiving it. Deadlines are in seconds of the monotonic clock.

This module turns the error code of a whole response, a lost connection and a missing response into
exceptions. Callers must check the error codes of the partitions in a response.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kafkalite.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionFailedError,
    ErrorCode,
    KafkaliteError,
    ProtocolError,
    RequestTimeoutError,
    SaslAuthenticationError,
    broker_error,
)
from kafkalite.protocol.connection import ClientConnection

if TYPE_CHECKING:
    import ssl

    from kafkalite.client.cluster.login import Login
    from kafkalite.client.cluster.security import ConnectionSecurity
    from kafkalite.protocol.structs import Struct

Buffer = bytes | bytearray | memoryview

_NOTHING: Final = memoryview(b"")


@dataclass(slots=True, eq=False)
class Reply:
    """The result of one request. If ``is_done``, either ``error`` or ``message`` is set."""

    is_done: bool = False
    message: Any = None
    payload: memoryview = _NOTHING
    error: KafkaliteError | None = None

    def fail(self, error: KafkaliteError) -> None:
        self.is_done = True
        self.error = error


class BrokerConnection:
    """A connection with negotiated API versions. ``BrokerConnection.open`` makes one.

    Invariant: after the connection is closed, every Reply that ``send`` returned is done.
    """

    def __init__(
        self, sock: socket.socket, address: str, client_id: str, security: ConnectionSecurity | None = None
    ) -> None:
        self.address = address
        self._sock = sock
        self._tls: ssl.SSLSocket | None = None  #: the same socket as ``_sock``, if it is encrypted
        self._security = security
        self._is_logged_in = False
        self._login_due_s = math.inf  # of the monotonic clock: when to log in again (KIP-368)
        self._protocol = ClientConnection(client_id)
        self._pending: dict[int, Reply] = {}  #: by correlation id, the oldest first
        self._throttled_until_s = 0.0  # of the monotonic clock; the broker reads no request before (KIP-219)
        self._reason: KafkaliteError | None = None  #: why the connection was closed; None while it is open

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<BrokerConnection to {self.address}, {state}, {len(self._pending)} in flight>"

    @classmethod
    def open(
        cls, address: str, *, client_id: str, deadline_s: float, security: ConnectionSecurity | None = None
    ) -> BrokerConnection:
        """Connect and negotiate API versions. TLS and a login are used if ``security`` has them.

        Raises SslAuthenticationError if client and broker do not agree on TLS, for example on a certificate,
        SaslAuthenticationError if the login fails, ConfigError if the files of certificates cannot be used,
        and ConnectionFailedError for every other failure.
        """
        host, port = _host_and_port(address)
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            sock = socket.create_connection((host, port), timeout=left_s)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if isinstance(error, UnicodeError):
                reason = "the host name is not valid"
            raise ConnectionFailedError(
                f"cannot connect to {address}: {reason}",
                hint="is a broker running there? Check the address and any firewall",
            ) from error
        connection = cls(sock, address, client_id, security)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if security is not None and security.tls is not None:
                sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                connection._sock = connection._tls = security.encrypted(sock, address, host)
            correlation_id, buffers = connection._protocol.handshake()
            connection.receive(connection._request(correlation_id, buffers, deadline_s), deadline_s)
            if security is not None and security.login is not None:
                connection._log_in(security.login, deadline_s)
        except (AuthenticationError, ConfigError):
            connection.close()
            raise
        except (KafkaliteError, OSError) as error:
            connection.close()
            raise ConnectionFailedError(f"{address}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def supports(self, request: type[Struct]) -> bool:
        """Whether the broker knows the version that ``request`` is of."""
        return self._protocol.supports(request)

    def _log_in(self, login: Login, deadline_s: float) -> None:
        """Log in, for the first time or again. Raises SaslAuthenticationError and the errors of ``call``."""
        import asyncio  # not needed by other tasks of Spark

        from kafkalite.client.cluster.login import REFUSALS, RENEWAL_FACTOR, raise_refusal

        self._is_logged_in = False
        self._login_due_s = math.inf
        left_ms = max(1, round((deadline_s - time.monotonic()) * 1000))
        steps = login.steps(asyncio.run(login.exchange(left_ms)))
        try:
            request = next(steps)
            while True:
                request = steps.send(self.call(request, deadline_s).message)
        except StopIteration as complete:
            self._is_logged_in = True
            if complete.value:
                self._login_due_s = time.monotonic() + complete.value * RENEWAL_FACTOR / 1000
        except REFUSALS as error:
            raise_refusal(self.address, error)

    @property
    def is_open(self) -> bool:
        return self._reason is None

    @property
    def in_flight(self) -> int:
        """The number of requests without a response."""
        return len(self._pending)

    @property
    def is_stale(self) -> bool:
        """Whether the broker closed this connection, or sent data, while no request was in flight."""
        if self._pending:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any, deadline_s: float, payload_parts: Sequence[Buffer] = ()) -> Reply:
        """Write a request and return the Reply to pass to ``receive``.

        Logs in again first if the session of the last login ends soon. While the broker throttles this client
        because of a quota, waits before writing, at most until ``deadline_s``.

        Raises ConnectionFailedError, RequestTimeoutError, LocalProtocolError if broker and client have no
        common version of this API, and SaslAuthenticationError if the new login fails. On a closed
        connection, raises the error that closed it.
        """
        if self._reason is not None:
            raise self._reason
        if time.monotonic() >= self._login_due_s:
            assert self._security is not None and self._security.login is not None, "it has logged in"
            try:
                self._log_in(self._security.login, deadline_s)
            except KafkaliteError as error:
                raise self._fail(error) from error
        wait_s = min(self._throttled_until_s, deadline_s) - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        correlation_id, buffers = self._protocol.send(message, payload_parts)
        return self._request(correlation_id, buffers, deadline_s)

    def _request(self, correlation_id: int, buffers: Sequence[Buffer], deadline_s: float) -> Reply:
        reply = self._pending[correlation_id] = Reply()
        try:
            for buffer in buffers:
                self._sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                self._sock.sendall(buffer)
        except TimeoutError:
            raise self._fail(
                RequestTimeoutError(f"{self.address} accepted no more requests in time")
            ) from None
        except OSError as error:
            raise self._fail(self._lost(error)) from error
        except BaseException:  # a signal; a part of the request may have been written
            self._fail(ConnectionFailedError(f"writing to {self.address} was interrupted"))
            raise
        return reply

    def receive(self, reply: Reply, deadline_s: float) -> Reply:
        """Wait for the response and return ``reply``.

        Raises BrokerError, ConnectionFailedError, and RequestTimeoutError at ``deadline_s``. A timeout also
        closes the connection, because the missing response blocks all later ones.
        """
        if not self.wait(reply, deadline_s):
            self._fail(RequestTimeoutError(f"{self.address} did not respond in time"))
        if reply.error is not None:
            raise reply.error
        return reply

    def wait(self, reply: Reply, deadline_s: float) -> bool:
        """Wait for ``reply``, at most until ``deadline_s``. Return whether it is done, even with an error."""
        while not reply.is_done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._read_some(left_s):
                break
        return reply.is_done

    def call(self, message: Any, deadline_s: float) -> Reply:
        """Send a request and wait for its response. Raises the errors of ``send`` and ``receive``."""
        return self.receive(self.send(message, deadline_s), deadline_s)

    def read_ready(self) -> None:
        """Read from a socket that has data. Errors are stored in the replies instead of raised."""
        self._read_some(1.0)

    def _read_some(self, timeout_s: float) -> bool:
        """Read the received bytes. Return False if none arrived within ``timeout_s``."""
        try:
            self._sock.settimeout(timeout_s)
            self._take(self._sock.recv_into(self._protocol.get_buffer()))
            while self._tls is not None and self._tls.pending():  # decrypted bytes, which select does not see
                self._take(self._sock.recv_into(self._protocol.get_buffer()))
        except TimeoutError:
            return False
        except OSError as error:
            self._fail(self._lost(error))
        except ProtocolError as broken:
            self._fail(ConnectionFailedError(f"{self.address} broke the protocol: {broken}"))
        except BaseException:  # a signal; bytes that were already received may be lost
            self._fail(ConnectionFailedError(f"reading from {self.address} was interrupted"))
            raise
        return True

    def _take(self, received: int) -> None:
        """Complete the replies whose responses end in the ``received`` new bytes. Raises ProtocolError.

        If ``received`` is 0, the broker has closed the connection, and the pending replies fail.
        """
        if received == 0:
            self._fail(ConnectionFailedError(f"{self.address} closed the connection"))
            return
        for correlation_id, throttle_ms, message, payload in self._protocol.buffer_updated(received):
            if throttle_ms:
                until_s = time.monotonic() + throttle_ms / 1000
                self._throttled_until_s = max(self._throttled_until_s, until_s)
            reply = self._pending.pop(correlation_id)
            if message.error_code:
                reply.fail(self._error_of(message))
            else:
                reply.message, reply.payload, reply.is_done = message, payload, True

    def _error_of(self, message: Any) -> KafkaliteError:
        error = broker_error(message.error_code, message.error_message or "")
        if message.error_code == ErrorCode.ILLEGAL_SASL_STATE:
            if self._security is None or self._security.login is None:  # the listener requires a login
                return SaslAuthenticationError(f"{self.address}: {error.message}")
            if self._is_logged_in:  # the session has ended
                return ConnectionFailedError(f"{self.address}: {error.message}")
        return error

    def close(self) -> None:
        """Close the connection. Requests in flight fail. May be called again.

        The socket is closed without a shutdown, so a child process can close its copy after a fork while the
        parent uses the connection.
        """
        self._fail(ConnectionFailedError(f"the connection to {self.address} was closed by this client"))

    def _lost(self, error: OSError) -> ConnectionFailedError:
        if self._security is not None and (refusal := self._security.refusal(error, self.address)):
            return refusal
        return ConnectionFailedError(f"the connection to {self.address} broke: {error.strerror or error}")

    def _fail(self, reason: KafkaliteError) -> KafkaliteError:
        if self._reason is None:
            self._reason = reason
        with contextlib.suppress(OSError):
            self._sock.close()
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply.fail(self._reason)
        return self._reason


def _host_and_port(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[IPv6 address]:port``. Raises ConnectionFailedError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConnectionFailedError(
            f"{address!r} is not an address", hint="kafka.bootstrap.servers is host:port"
        )
    return host, int(port)
