"""Finds and checks free ports for servers that must know their ports before they start, such as voters."""

# Tests: tests/testing/test_process_cluster.py

from __future__ import annotations

import socket
from typing import Final

from kafkalite.errors import ListenError
from kafkalite.rng import Rng, system_rng
from kafkalite.transport.tcp import listen_error, parse_address

# Below the range of outgoing connections, so that a server that restarts finds its port free again.
_FIRST: Final = 20_000
_STOP: Final = 32_000


def free_ports(count: int, *, host: str = "127.0.0.1", rng: Rng | None = None) -> list[int]:
    """Return ``count`` distinct random ports that are free on ``host`` now. Raises ListenError."""
    rng = rng or system_rng()
    found: dict[int, None] = {}
    for _ in range(100 * count + 1):
        if len(found) == count:
            return list(found)
        port = _FIRST + rng.randrange(_STOP - _FIRST)
        if port not in found and _is_free(host, port):
            found[port] = None
    raise ListenError(f"cannot find {count} free ports between {_FIRST} and {_STOP}")


def check_free(address: str) -> None:
    """Raise ListenError if a server could not listen on ``address`` (host:port) now."""
    host, port = parse_address(address)
    with _probe(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server, past closed connections
        try:
            probe.bind((host, port))
        except OSError as error:
            raise listen_error(address, error) from error


def _is_free(host: str, port: int) -> bool:
    with _probe(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _probe(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
