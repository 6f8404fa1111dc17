"""Three servers as processes of their own: they find each other, stop on SIGTERM, and can be given up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalite
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log_store import LogStore
from kafkalite.testing.reserved_ports import ReservedPorts
from proof.waiting import eventually

READY_S = 30.0
SECRET = "a secret of these processes"


class Server:
    """One ``kl server start``."""

    def __init__(self, node_id: int, voters: str, port: int, home: Path) -> None:
        self.node_id = node_id
        self.address = f"127.0.0.1:{port}"
        self.data = home / f"node-{node_id}"
        self._log = home / f"node-{node_id}.log"
        settings = {
            "node.id": node_id,
            "cluster.id": "processes",
            "controller.quorum.voters": voters,
            "listeners": self.address,
            "default.replication.factor": 3,
        }
        sets = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
        self._command = [
            sys.executable,
            "-m",
            "kafkalite",
            "server",
            "start",
            "--data",
            str(self.data),
            *sets,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "KAFKALITE_CLUSTER_SECRET": SECRET}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def signal(self, number: int, timeout_s: float = 20.0) -> int:
        """Send it, wait for the end, tell the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while "is up on" not in self.log:
                assert self.process is not None
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.02)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[int, Server]]:
    reserved = ReservedPorts(6)
    ports = reserved.ports
    voters = ",".join(f"{n}@127.0.0.1:{ports[n + 2]}" for n in (1, 2, 3))
    made = {n: Server(n, voters, ports[n - 1], tmp_path) for n in (1, 2, 3)}
    yield made
    for server in made.values():
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
            server.process.wait()
    reserved.close()


async def test_three_servers_serve_stop_in_order_and_start_again(servers: dict[int, Server]) -> None:
    for server in servers.values():
        server.start()
    await asyncio.gather(*(server.ready() for server in servers.values()))
    bootstrap = ",".join(server.address for server in servers.values())
    async with kafkalite.Admin(bootstrap) as admin, kafkalite.Producer(bootstrap) as producer:
        await admin.create_topic("t", partitions=3, configs={"min.insync.replicas": "2"})
        await producer.send_many("t", [b"%d" % n for n in range(100)])
        await producer.flush()
        assert servers[2].signal(signal.SIGTERM) == 0
        store = LogStore.open(RealFileSystem(), str(servers[2].data), node_id=2)
        assert store.clean_start
        assert store.last_broker_epoch > 0
        store.close(clean=True, broker_epoch=store.last_broker_epoch)
        described = (await admin.describe_topics(["t"]))[0]
        assert all(partition.leader_id != 2 for partition in described.partitions)
        await producer.send_many("t", [b"%d" % n for n in range(100, 200)])
        await producer.flush()
        assert servers[1].signal(signal.SIGKILL) == -signal.SIGKILL
        servers[2].start()
        servers[1].start()
        await asyncio.gather(servers[1].ready(), servers[2].ready())
        await producer.send_many("t", [b"%d" % n for n in range(200, 300)])
        await producer.flush()
        async with kafkalite.Consumer(
            "t", bootstrap_servers=bootstrap, auto_offset_reset="earliest"
        ) as consumer:
            read: list[int] = []
            async with asyncio.timeout(30):
                while len(read) < 300:
                    read += [int(record.value or b"") for record in await consumer.get_many(timeout_ms=1_000)]
        assert sorted(read) == list(range(300))
    for server in servers.values():
        assert server.signal(signal.SIGTERM) == 0, server.log


async def test_a_server_that_waits_for_the_others_ends_on_sigterm(servers: dict[int, Server]) -> None:
    servers[1].start()
    async with asyncio.timeout(READY_S):
        await eventually(lambda: "controller not reached" in servers[1].log)
    assert "is up on" not in servers[1].log
    assert servers[1].signal(signal.SIGTERM) == 0, servers[1].log
    assert "Traceback" not in servers[1].log


async def test_a_wrong_secret_is_named_in_the_log(servers: dict[int, Server]) -> None:
    servers[1].start()
    servers[2]._command += ["--set", "cluster.secret=not the secret of the other"]
    servers[2].start()
    async with asyncio.timeout(READY_S):
        await eventually(lambda: "does not know this cluster's secret" in servers[1].log)
    for number in (1, 2):
        assert servers[number].signal(signal.SIGTERM) == 0
        assert SECRET not in servers[number].log
        assert "not the secret" not in servers[number].log
