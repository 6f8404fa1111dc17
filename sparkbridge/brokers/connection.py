"""One blocking connection to one broker: a socket around ``kafkalite.protocol.connection.ClientConnection``.

``send`` hands a request over and returns at once, ``receive`` waits for its answer; several requests may be
on their way, and their answers come in the order of the requests. Whoever drops its ``Reply`` drops the
answer with it. Every wait ends at a deadline on the monotonic clock, in seconds.

The one place where a response's error code, a lost connection and a missing answer become exceptions.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
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


class Reply:
    """What becomes of one request. Invariant: once ``is_done``, either ``error`` is set or ``message`` is."""

    __slots__ = ("error", "is_done", "message", "payload")

    def __init__(self) -> None:
        self.is_done = False
        self.message: Any = None
        self.payload = _NOTHING
        self.error: KafkaliteError | None = None

    def fail(self, error: KafkaliteError) -> None:
        self.is_done = True
        self.error = error


class WireConnection:
    """An open connection with its versions agreed. ``WireConnection.open`` makes one.

    Invariant: a Reply that ``send`` returned is done after the connection is closed.
    """

    def __init__(self, sock: socket.socket, address: str, client_id: str) -> None:
        self.address = address
        self._sock = sock
        self._protocol = ClientConnection(client_id)
        self._pending: dict[int, Reply] = {}  #: by correlation id, the oldest first
        self._reason: KafkaliteError | None = None  #: why it is closed

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<WireConnection to {self.address}, {state}, {len(self._pending)} in flight>"

    @classmethod
    def open(cls, address: str, *, client_id: str, deadline_s: float) -> WireConnection:
        """Connect and agree on versions. Raises ConnectionFailedError, whatever went wrong."""
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            sock = socket.create_connection(_host_and_port(address), timeout=left_s)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConnectionFailedError(
                f"can't connect to {address}: {reason}",
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
        """Requests sent and not answered."""
        return len(self._pending)

    @property
    def is_stale(self) -> bool:
        """Whether the other side hung up, or spoke unasked, while nothing was awaited."""
        if self._pending:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        return self._sock.fileno()

    # --- requests ------------------------------------------------------------------------------

    def send(self, message: Any, deadline_s: float, payload_parts: Sequence[Buffer] = ()) -> Reply:
        """Write a request; its Reply is to be given to ``receive``.

        Raises ConnectionFailedError, RequestTimeoutError, and LocalProtocolError when the broker has no
        version of this API in common.
        """
        if self._reason is not None:
            raise self._reason
        correlation_id, buffers = self._protocol.send(message, payload_parts)
        return self._request(correlation_id, buffers, deadline_s)

    def _request(self, correlation_id: int, buffers: Sequence[Buffer], deadline_s: float) -> Reply:
        reply = self._pending[correlation_id] = Reply()
        try:
            for buffer in buffers:
                self._sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                self._sock.sendall(buffer)
        except TimeoutError:
            raise self._fail(RequestTimeoutError(f"{self.address} took no more requests in time")) from None
        except OSError as error:
            raise self._fail(self._lost(error)) from error
        except BaseException:  # a signal: a part of a request may be on its way
            self._fail(ConnectionFailedError(f"writing to {self.address} was interrupted"))
            raise
        return reply

    def receive(self, reply: Reply, deadline_s: float) -> Reply:
        """Wait for the answer: ``reply``, done and without an error.

        Raises BrokerError, ConnectionFailedError; RequestTimeoutError at ``deadline_s``, which closes the
        connection, since every later answer is behind this one.
        """
        if not self.wait(reply, deadline_s):
            self._fail(RequestTimeoutError(f"{self.address} did not answer in time"))
        if reply.error is not None:
            raise reply.error
        return reply

    def wait(self, reply: Reply, deadline_s: float) -> bool:
        """Whether the reply is done by ``deadline_s``; raises nothing, and leaves the connection open."""
        while not reply.is_done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._read_some(left_s):
                break
        return reply.is_done

    def call(self, message: Any, deadline_s: float) -> Reply:
        """``send`` and ``receive``."""
        return self.receive(self.send(message, deadline_s), deadline_s)

    def read_ready(self) -> None:
        """Take in what a selector said is there. Raises nothing: what is lost shows in the replies."""
        self._read_some(1.0)

    def _read_some(self, timeout_s: float) -> bool:
        """Receive once; False when nothing came within ``timeout_s``."""
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
        except BaseException:  # a signal between the socket and the frames: what came may be lost
            self._fail(ConnectionFailedError(f"reading from {self.address} was interrupted"))
            raise
        return True

    def _take(self, received: int) -> None:
        """Let the answers that ``received`` bytes complete be known. Raises ProtocolError."""
        if received == 0:
            self._fail(ConnectionFailedError(f"{self.address} closed the connection"))
            return
        for correlation_id, _, message, payload in self._protocol.buffer_updated(received):
            reply = self._pending.pop(correlation_id)
            if message.error_code:
                reply.fail(broker_error(message.error_code, message.error_message or ""))
            else:
                reply.message, reply.payload, reply.is_done = message, payload, True

    # --- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close now; what is in flight fails. May be called twice, and in a child after a fork.

        The socket is closed and not shut down: a parent that holds it too may go on.
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
    """``host:port`` or ``[v6 address]:port``. Raises ConnectionFailedError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConnectionFailedError(f"{address!r} is no address", hint="kafka.bootstrap.servers is host:port")
    return host, int(port)
