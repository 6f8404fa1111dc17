"""One blocking connection to one broker: a socket around ``kafkalite.protocol.connection.ClientConnection``.

``send`` writes a request and returns a ``Reply``; ``receive`` waits for the response. Several requests may be
in flight; their responses arrive in the order of the requests. A caller may drop a ``Reply`` instead of
receiving it. Every wait ends at a deadline, given in seconds of the monotonic clock.

This module turns error codes of responses, lost connections and missing responses into exceptions.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafkalite.errors import (
    ConnectionFailedError,
    KafkaliteError,
    ProtocolError,
    RequestTimeoutError,
    broker_error,
)
from kafkalite.protocol.connection import ClientConnection

Buffer = bytes | bytearray | memoryview

_NOTHING: Final = memoryview(b"")


@dataclass(slots=True, eq=False)
class Reply:
    """The response to one request, once it has arrived. If ``is_done``, ``error`` or ``message`` is set."""

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

    def __init__(self, sock: socket.socket, address: str, client_id: str) -> None:
        self.address = address
        self._sock = sock
        self._protocol = ClientConnection(client_id)
        self._pending: dict[int, Reply] = {}  #: by correlation id, the oldest first
        self._throttled_until_s = 0.0  # of the monotonic clock; the broker reads no request before (KIP-219)
        self._reason: KafkaliteError | None = None  #: why the connection was closed; None while it is open

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<BrokerConnection to {self.address}, {state}, {len(self._pending)} in flight>"

    @classmethod
    def open(cls, address: str, *, client_id: str, deadline_s: float) -> BrokerConnection:
        """Connect and negotiate API versions. Raises ConnectionFailedError for every failure."""
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            sock = socket.create_connection(_host_and_port(address), timeout=left_s)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConnectionFailedError(
                f"cannot connect to {address}: {reason}",
                hint="is a broker running there? Check the address and any firewall",
            ) from error
        connection = cls(sock, address, client_id)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            correlation_id, buffers = connection._protocol.handshake()
            connection.receive(connection._request(correlation_id, buffers, deadline_s), deadline_s)
        except (KafkaliteError, OSError) as error:
            connection.close()
            raise ConnectionFailedError(f"{address}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        return self._reason is None

    @property
    def in_flight(self) -> int:
        """The number of requests without a response."""
        return len(self._pending)

    @property
    def is_stale(self) -> bool:
        """Whether the broker closed this idle connection or sent data that no request is waiting for."""
        if self._pending:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any, deadline_s: float, payload_parts: Sequence[Buffer] = ()) -> Reply:
        """Write a request and return the Reply to pass to ``receive``.

        While the broker throttles this client because of a quota, waits first, at most until ``deadline_s``.

        Raises ConnectionFailedError, RequestTimeoutError, and LocalProtocolError if broker and client have no
        common version of this API.
        """
        if self._reason is not None:
            raise self._reason
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
        """Wait until ``deadline_s`` and return whether the reply is done. Errors are stored in the reply."""
        while not reply.is_done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._read_some(left_s):
                break
        return reply.is_done

    def call(self, message: Any, deadline_s: float) -> Reply:
        """Send a request and wait for its response. Raises the errors of ``send`` and ``receive``."""
        return self.receive(self.send(message, deadline_s), deadline_s)

    def read_ready(self) -> None:
        """Read once from a socket that has data. Errors are stored in the replies instead of raised."""
        self._read_some(1.0)

    def _read_some(self, timeout_s: float) -> bool:
        """Read once. Return False if nothing arrived within ``timeout_s``."""
        try:
            self._sock.settimeout(timeout_s)
            received = self._sock.recv_into(self._protocol.get_buffer())
            self._take(received)
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
        """Complete the replies whose responses end in the ``received`` new bytes. Raises ProtocolError."""
        if received == 0:
            self._fail(ConnectionFailedError(f"{self.address} closed the connection"))
            return
        for correlation_id, throttle_ms, message, payload in self._protocol.buffer_updated(received):
            if throttle_ms:
                until_s = time.monotonic() + throttle_ms / 1000
                self._throttled_until_s = max(self._throttled_until_s, until_s)
            reply = self._pending.pop(correlation_id)
            if message.error_code:
                reply.fail(broker_error(message.error_code, message.error_message or ""))
            else:
                reply.message, reply.payload, reply.is_done = message, payload, True

    def close(self) -> None:
        """Close the connection. Requests in flight fail. May be called twice, and in a child after a fork.

        The socket is closed without a shutdown, because a parent process may still use it.
        """
        self._fail(ConnectionFailedError(f"the connection to {self.address} was closed by this client"))

    def _lost(self, error: OSError) -> ConnectionFailedError:
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
