"""Blocking clients over plain sockets, the same for the bare servers and for the broker.

A frame is encoded once and sent repeatedly, so that the server is measured.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import percentile
from kafkalite.protocol.connection import ClientConnection


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while view:
        n = sock.recv_into(view)
        if n == 0:
            raise ConnectionError("the server closed the connection")
        view = view[n:]


class Session:
    """One handshaken connection to a broker, blocking, over TLS with a context."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        sock = connect(port)
        self.sock = sock if tls is None else tls.wrap_socket(sock, server_hostname="localhost")
        self.connection = ClientConnection("bench")
        _, buffers = self.connection.handshake()
        self.sock.sendall(b"".join(buffers))
        self._receive_one()

    def _receive_one(self) -> Any:
        while True:
            view = self.connection.get_buffer(65536)
            n = self.sock.recv_into(view)
            if n == 0:
                raise ConnectionError("the broker closed the connection")
            responses = self.connection.buffer_updated(n)
            if responses:
                return responses[0]

    def call(self, message: Any, payload: tuple[Any, ...] = ()) -> Any:
        _, buffers = self.connection.send(message, payload)
        self.sock.sendall(b"".join(buffers))
        return self._receive_one()

    def encode(self, message: Any, payload: tuple[Any, ...] = ()) -> bytes:
        """Return the frame's bytes, to be sent any number of times; responses are counted, not matched."""
        _, buffers = self.connection.send(message, payload)
        return b"".join(buffers)

    def close(self) -> None:
        self.sock.close()


def skip_answer(sock: socket.socket, head: bytearray, body: bytearray) -> int:
    """Receive one kafkalite frame and drop it. Return its payload's length."""
    receive_exactly(sock, memoryview(head))
    envelope, payload = map(int, struct.unpack(">II", head))
    left = envelope + payload
    while left:
        n = min(left, len(body))
        receive_exactly(sock, memoryview(body)[:n])
        left -= n
    return payload


def skip_short_answer(sock: socket.socket, head: bytearray, body: bytearray) -> int:
    """Receive one response of a bare server (``u32 length``) and drop it. Return its length."""
    receive_exactly(sock, memoryview(head)[:4])
    length = int.from_bytes(head[:4], "big")
    receive_exactly(sock, memoryview(body)[:length])
    return length


def pump(sock: socket.socket, frames: list[bytes], count: int, window: int, skip: Any) -> tuple[float, int]:
    """Send ``count`` frames, at most ``window`` in flight. Return (seconds, payload bytes received).

    ``skip`` receives and drops one response, as ``skip_answer`` does.
    """
    head, body = bytearray(8), bytearray(1 << 20)
    received = 0
    in_flight = 0
    start = time.perf_counter()
    for i in range(count):
        if in_flight == window:
            received += skip(sock, head, body)
            in_flight -= 1
        sock.sendall(frames[i % len(frames)])
        in_flight += 1
    for _ in range(in_flight):
        received += skip(sock, head, body)
    return time.perf_counter() - start, received


def round_trips(sock: socket.socket, frame: bytes, count: int, skip: Any) -> list[float]:
    """Return the seconds of each of ``count`` round trips, one at a time."""
    head, body = bytearray(8), bytearray(1 << 16)
    samples: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        sock.sendall(frame)
        skip(sock, head, body)
        samples.append(time.perf_counter() - start)
    return samples


def quiet_p99_ms(session: Session, frame: bytes, is_over: Callable[[int], bool]) -> float:
    """Return the 99th percentile, in ms, of the round trips of a client that pauses 5 ms between two.

    ``is_over`` receives their number, and ends the measurement.
    """
    samples: list[float] = []
    while not is_over(len(samples)):
        samples += round_trips(session.sock, frame, 1, skip_answer)
        time.sleep(0.005)
    return percentile(samples, 0.99) * 1e3
