"""A real broker that reports on itself, and a quiet client that measures how it is served.

The broker has a listener without logins and one that requires them. Everybody without a login and the user
ROOT are super users. The user FEW has some rights, the user NOBODY has none.
"""

# Tests: tests/processes/test_fuzz.py

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.protocol.connection import ClientConnection
from kafkalite.protocol.messages.metadata import DescribeClusterRequest
from kafkalite.security.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from kafkalite.testing.wire import WireClient
from kafkalite.transport.free_ports import free_ports
from proof.processes.drawn_logins import FEW, MECHANISMS, PASSWORD, ROOT
from proof.processes.drawn_requests import TOPICS
from proof.token_issuer import AUDIENCE, ISSUER, Issuer
from proof.waiting import eventually

#: What the user FEW may do.
FEW_RIGHTS: Final = (
    (ResourceType.TOPIC, "a", Operation.READ),
    (ResourceType.TOPIC, "a", Operation.WRITE),
    (ResourceType.GROUP, "g", Operation.READ),
    (ResourceType.TRANSACTIONAL_ID, "t-1", Operation.WRITE),
)
PING_PAUSE_S: Final = 0.02
PING_LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.05  #: how often a quiet client that waits looks at the broker
_STACK_AFTER_LOOKS: Final = 5
_TICK_MS: Final = 1_000 / os.sysconf("SC_CLK_TCK")
_SET_UP: Final = "set-up"  #: a group and a transactional id that no script uses


@dataclass(slots=True)
class Observed:
    """A real broker that reports on itself."""

    directory: Path
    address: str = ""  #: of the listener without logins
    login_address: str = ""
    issuer: Issuer = field(default_factory=Issuer)  #: of the tokens that the broker accepts
    process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    async def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        ports = free_ports(3)
        self.address, self.login_address = (f"127.0.0.1:{port}" for port in ports[1:])
        keys = self.directory / "keys.json"
        keys.write_bytes(self.issuer.key_set)
        settings = {
            "node.id": "1",
            "process.roles": "broker,controller",
            "cluster.id": "fuzzed",
            "cluster.secret": "a-secret-for-tests-only",
            "controller.quorum.voters": f"1@127.0.0.1:{ports[0]}",
            "controller.listeners": f"127.0.0.1:{ports[0]}",
            "listeners": f"{self.address},SASL_PLAINTEXT://{self.login_address}",
            "sasl.enabled.mechanisms": ",".join(MECHANISMS),
            "sasl.allow.plain.without.tls": "true",
            "sasl.oauthbearer.jwks.endpoint.url": str(keys),
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "connection.failed.authentication.delay.ms": "5",
            "connections.max.reauth.ms": "2000",
            "authorizer.class.name": "StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{ROOT}",
            "log.dirs": str(self.directory / "data"),
            "durability": "page-cache",
        }
        file = self.directory / "server.toml"
        file.write_text("".join(f'"{name}" = {json.dumps(value)}\n' for name, value in settings.items()))
        words = [sys.executable, "-m", "proof.processes.observed_server", str(self.directory / "report")]
        with (self.directory / "server.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *words, "server", "start", "--file", str(file), stdout=log, stderr=log
            )

        async def is_up() -> bool:
            assert self.process is not None
            if self.process.returncode is not None:
                raise AssertionError(f"the broker ended:\n{self.log[-2000:]}")
            with suppress(OSError, ConnectionError, KafkaliteError):
                async with WireClient(self.address) as wire:
                    return bool((await wire.call(DescribeClusterRequest())).controller_id == 1)
            return False

        await eventually(is_up, "the broker is up", limit_s=60)

    async def report(self) -> dict[str, int]:
        """Return tasks, descriptors and rss_bytes of the broker."""
        path = self.directory / "report"
        path.unlink(missing_ok=True)
        assert self.process is not None
        assert self.process.returncode is None, f"the broker ended:\n{self.log[-2000:]}"
        os.kill(self.process.pid, signal.SIGUSR1)
        await eventually(path.exists, "the report of the broker")
        found: dict[str, int] = json.loads(path.read_text())
        return found

    async def set_up(self) -> None:
        """Create topics, users and rules, and use the coordinators once, so that their logs exist."""
        async with Admin(self.address) as admin:
            await admin.create_topics(dict.fromkeys(TOPICS, 3), return_exceptions=True)
            await admin.alter_group_offsets(_SET_UP, {TopicPartition(TOPICS[0], 0): 0})
            for user in (ROOT, FEW):
                await admin.set_user_password(user, PASSWORD)
            allowed = [
                AclBinding(kind, PatternType.LITERAL, name, f"User:{FEW}", "*", operation, Permission.ALLOW)
                for kind, name, operation in FEW_RIGHTS
            ]
            await admin.create_acls(allowed)
        async with Producer(self.address, transactional_id=_SET_UP) as producer, producer.transaction():
            await producer.send(TOPICS[0], b"x")

    async def tidy(self) -> None:
        """Delete what scripts have created, so that what remains can be compared."""
        async with Admin(self.address) as admin:
            names = [each.name for each in await admin.list_topics() if not each.is_internal]
            await admin.delete_topics(names, return_exceptions=True)
            groups = [each.group_id for each in await admin.list_groups()]
            await admin.delete_groups(groups, return_exceptions=True)
        await self.set_up()

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Pinger(threading.Thread):
    """A quiet client in a thread of its own. ``times_ms``: how long each request took.

    ``holds_ms``: how long the broker's event loop computed or slept during each. The time in which it could
    not run because other processes used the processors is not counted. ``suspects``: the connections that
    were open during the longest one. A broker that takes long is made to log its stack.
    """

    def __init__(self, address: str, pid: int, in_flight: set[int]) -> None:
        super().__init__(daemon=True)
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.settimeout(_LOOK_S)
        self._pid = pid
        self._wire = ClientConnection("quiet")
        self._is_over = threading.Event()
        self._in_flight = in_flight
        self._stat = Path(f"/proc/{pid}/task/{pid}/stat")
        self.times_ms: list[float] = []
        self.holds_ms: list[float] = []
        self.suspects: list[int] = []
        self.problem = ""

    def run(self) -> None:
        try:
            self._call(self._wire.handshake()[1])
            while not self._is_over.wait(PING_PAUSE_S):
                began_s, suspects = time.perf_counter(), list(self._in_flight)
                _, began_ms = self._loop()
                slept_ms = self._call(self._wire.send(DescribeClusterRequest())[1])
                held_ms = slept_ms + self._loop()[1] - began_ms
                if held_ms > max(self.holds_ms, default=0.0):
                    self.suspects = sorted({*suspects, *self._in_flight})
                self.times_ms.append((time.perf_counter() - began_s) * 1000)
                self.holds_ms.append(held_ms)
        except (OSError, KafkaliteError) as error:
            self.problem = f"the quiet client was not served: {error!r}"

    def _loop(self) -> tuple[str, float]:
        """Return the state of the broker's main thread (proc(5)), and the CPU time that it has used in ms."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) * _TICK_MS

    def _call(self, buffers: Sequence[Any]) -> float:
        """Send a request and wait for its response. Return how long the event loop slept meanwhile, in ms."""
        self._socket.sendall(b"".join(bytes(each) for each in buffers))
        limit_s = time.monotonic() + PING_LIMIT_S
        looks = sleeps = 0
        while True:
            try:
                read = self._socket.recv_into(self._wire.get_buffer())
            except TimeoutError:
                if time.monotonic() > limit_s:
                    raise
                looks += 1
                sleeps += self._loop()[0] != "R"
                if looks % _STACK_AFTER_LOOKS == 0:
                    os.kill(self._pid, signal.SIGUSR2)
                continue
            if not read:
                raise ConnectionResetError("the broker closed the connection")
            if self._wire.buffer_updated(read):
                return sleeps * _LOOK_S * 1_000

    def stop(self) -> None:
        self._is_over.set()
        self.join()
        self._socket.close()
