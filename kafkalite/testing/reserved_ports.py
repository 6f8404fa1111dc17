"""Free ports of this machine for servers that start later."""

# Tests: tests/testing/test_process_cluster.py

from __future__ import annotations

import socket
from contextlib import suppress

from kafkalite.transport.free_ports import free_ports


class ReservedPorts:
    """Free ports that ``free_ports`` returns to no other program before ``close``, also while the servers for
    which they are meant have not started yet or are down.

    Servers can listen on them if they set SO_REUSEADDR, as asyncio and uvloop do: each port is held by a
    socket with this option that never listens.
    """

    def __init__(self, count: int) -> None:
        """Reserve ``count`` distinct ports on 127.0.0.1. Raises ListenError."""
        self.ports: list[int] = []
        self._held: list[socket.socket] = []
        while len(self.ports) < count:
            (port,) = free_ports(1)
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.append(holder)
            with suppress(OSError):  # another program was faster
                holder.bind(("127.0.0.1", port))
                self.ports.append(port)

    def close(self) -> None:
        for holder in self._held:
            holder.close()
