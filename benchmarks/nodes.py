"""Three nodes as three processes, as ``kl dev -n 3`` starts them: killed, restarted, and observed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from kafkalite.client.admin.admin import Admin
from kafkalite.client.admin.descriptions import ClusterDescription
from kafkalite.errors import KafkaliteError
from kafkalite.transport.free_ports import free_ports

START_LIMIT_S = 60.0
SECRET = "only for measuring on this machine"


class Nodes:
    """``count`` nodes. Invariant: ``processes`` has those that were started and not killed."""

    def __init__(self, directory: str, count: int = 3, **settings: Any) -> None:
        self.directory = Path(directory)
        ports = free_ports(2 * count)
        self.client_ports = dict(enumerate(ports[:count], 1))
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in enumerate(ports[count:], 1))
        self.settings: dict[str, Any] = {
            "default.replication.factor": count,
            "min.insync.replicas": 2 if count > 1 else 1,
        }
        if count > 1:
            self.settings |= {
                "controller.quorum.voters": voters,
                "cluster.id": "benchmark",
                "cluster.secret": SECRET,
            }
        self.settings |= settings
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.client_ports.values())

    def start(self, node_id: int) -> None:
        settings = self.settings | {
            "node.id": node_id,
            "listeners": f"127.0.0.1:{self.client_ports[node_id]}",
            "log.dirs": str(self.directory / f"node-{node_id}"),
        }
        file = self.directory / f"node-{node_id}.toml"
        file.write_text("".join(f'"{name}" = {json.dumps(value)}\n' for name, value in settings.items()))
        with (self.directory / f"node-{node_id}.log").open("ab") as log:
            self.processes[node_id] = subprocess.Popen(
                [sys.executable, "-m", "kafkalite", "server", "start", "--file", str(file)],
                env=os.environ | {"NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, node_id: int) -> None:
        process = self.processes.pop(node_id)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def pause(self, node_id: int) -> None:
        """Stop the process without closing its connections, until ``resume``."""
        self.processes[node_id].send_signal(signal.SIGSTOP)

    def resume(self, node_id: int) -> None:
        self.processes[node_id].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + 20
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def cpu_seconds(self, node_id: int) -> float:
        pid = self.processes[node_id].pid
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self, node_id: int) -> float:
        pid = self.processes[node_id].pid
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextlib.asynccontextmanager
async def running(directory: str, count: int = 3, **settings: Any) -> AsyncIterator[tuple[Nodes, Admin]]:
    """Yield the nodes, all of them alive, and an admin; stop them at the end."""
    nodes = Nodes(directory, count, **settings)
    try:
        for node_id in nodes.client_ports:
            nodes.start(node_id)
        admin = await _reach(nodes)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(admin.close)
            await until(lambda: _all_alive(admin, count), "every broker alive")
            yield nodes, admin
    finally:
        nodes.stop()


async def _reach(nodes: Nodes) -> Admin:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        admin = Admin(nodes.bootstrap_servers)
        try:
            return await admin.start()
        except KafkaliteError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def describe(admin: Admin) -> ClusterDescription:
    return await admin.describe_cluster()


async def _all_alive(admin: Admin, count: int) -> bool:
    brokers = (await admin.describe_cluster()).brokers
    return sum(not broker.is_fenced for broker in brokers) == count


async def whole(admin: Admin, *topics: str, replicas: int = 3) -> bool:
    """Whether every replica of ``topics`` is in sync."""
    described = await admin.describe_topics(topics)
    return all(len(p.isr) == replicas for topic in described for p in topic.partitions)


async def until(
    condition: Callable[[], Awaitable[bool]], what: str, *, limit_s: float = 60, pause_s: float = 0.02
) -> float:
    """Return the seconds until ``condition`` holds; errors meanwhile are ignored."""
    start = time.monotonic()
    while True:
        try:
            if await condition():
                return time.monotonic() - start
        except KafkaliteError:
            pass
        if time.monotonic() - start > limit_s:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        await asyncio.sleep(pause_s)
