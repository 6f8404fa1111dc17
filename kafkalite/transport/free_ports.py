"""Finds free ports for servers that must know their port numbers before they start, such as voters."""

# Tests: tests/testing/test_process_cluster.py

from __future__ import annotations

import socket
from typing import Final

from kafkalite.errors import ListenError
from kafkalite.rng import Rng, system_rng

# Below the range of outgoing connections, so that a server that restarts finds its port free again.
_FIRST: Final = 20_000
_STOP: Final = 32_000


def free_ports(count: int, *, host: str = "127.0.0.1", rng: Rng | None = None) -> list[int]:
    """Return ``count`` random ports that are currently free. Raises ListenError."""
    rng = rng or system_rng()
    found: dict[int, None] = {}
    for _ in range(100 * count):
        if len(found) == count:
            return list(found)
        port = _FIRST + rng.randrange(_STOP - _FIRST)
        if port not in found and _is_free(host, port):
            found[port] = None
    raise ListenError(f"cannot find {count} free ports between {_FIRST} and {_STOP}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
