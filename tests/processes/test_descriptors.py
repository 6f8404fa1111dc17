"""A node whose file descriptors are used up keeps running, and goes on when some are free (R55)."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kafkalite import Admin, Producer
from kafkalite.errors import KafkaliteError
from kafkalite.testing import ProcessCluster
from proof.waiting import eventually

pytestmark = pytest.mark.slow

LIMIT = 256
SETTINGS = {"metadata.log.max.record.bytes.between.snapshots": "1024", "offsets.topic.num.partitions": "2"}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ProcessCluster]:
    """A cluster of three nodes whose snapshots are due soon."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with ProcessCluster(tmp_path, settings=SETTINGS) as cluster:
        for node_id in cluster.nodes:
            # At its start a node raised its limit to the maximum.
            assert resource.prlimit(pid_of(cluster, node_id), resource.RLIMIT_NOFILE) == (hard, hard)
        yield cluster
        assert all(node.is_running for node in cluster.nodes.values())
        assert all(node.log.count("Traceback") == 0 for node in cluster.nodes.values())


def pid_of(cluster: ProcessCluster, node_id: int) -> int:
    process = cluster.nodes[node_id].process
    assert process is not None
    return process.pid


@contextmanager
def no_descriptor_left(pid: int) -> Iterator[None]:
    """Let the process open no further descriptor."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    numbers = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))
    free = next(number for number in range(len(numbers) + 1) if number not in numbers)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def test_a_node_without_free_descriptors_keeps_running_and_goes_on_when_some_are_free(
    cluster: ProcessCluster,
) -> None:
    """New topics, segments, snapshots of the metadata and recovery points need descriptors on every node, and
    each is retried (R55)."""
    async with (
        Admin(cluster.bootstrap_servers) as admin,
        Producer(cluster.bootstrap_servers, acks="all", delivery_timeout_ms=60_000) as producer,
    ):
        await admin.create_topic("known", 3, 3, configs={"segment.bytes": "1024"})
        for partition in range(3):
            await producer.send("known", b"x" * 100, partition=partition)
        with (
            no_descriptor_left(pid_of(cluster, 1)),
            no_descriptor_left(pid_of(cluster, 2)),
            no_descriptor_left(pid_of(cluster, 3)),
        ):
            for number in range(8):  # more metadata than fits before a snapshot is due
                await create(admin, f"new-{number}")
            refused = [
                producer.send_nowait("known", bytes(2_000), partition=partition) for partition in range(3)
            ]
            nodes = cluster.nodes.values()
            await eventually(lambda: all("no file descriptor left" in node.log for node in nodes))
            await eventually(lambda: any("snapshot of the metadata not stored" in node.log for node in nodes))
        for delivery in refused:
            await delivery
        await cluster.wait(is_whole=True, brokers=3)
        for number in range(8):
            await create(admin, f"new-{number}")
            await producer.send(f"new-{number}", b"served")
    assert all("log offline" not in node.log for node in cluster.nodes.values())


async def create(admin: Admin, topic: str) -> None:
    """Create the topic, unless it exists or cannot be created now."""
    with suppress(KafkaliteError):
        await admin.create_topic(topic, 3, 3)


async def test_idle_connections_leave_descriptors_for_files(tmp_path: Path) -> None:
    """A node with LIMIT descriptors refuses connections, not writes, while a client opens more (R55)."""
    command = (
        f"ulimit -n {LIMIT} && exec {sys.executable} -m kafkalite server start --data {tmp_path}/data"
        " --set listeners=127.0.0.1:0 --set metadata.log.max.record.bytes.between.snapshots=1024"
    )
    with (tmp_path / "log").open("wb") as log_file:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=log_file
        )
    idle: list[socket.socket] = []
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        address = line.split()[-1]
        host, _, port = address.rpartition(":")
        async with Admin(address) as admin, Producer(address) as producer:
            await admin.create_topic("first", 1)
            await producer.send("first", b"before")
            for _ in range(2 * LIMIT):
                idle.append(socket.create_connection((host, int(port)), timeout=10))
            for number in range(20):
                await admin.create_topic(f"topic-{number}", 2)
                await producer.send(f"topic-{number}", b"served")
                await producer.send("first", b"served")
            assert "connection refused" in (tmp_path / "log").read_text()
            for each in idle:
                each.close()
            async with Admin(address) as another:
                assert len(await another.list_topics()) == 21
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        log = (tmp_path / "log").read_text()
        assert "offline" not in log
        assert "no file descriptor left" not in log
    finally:
        for each in idle:
            each.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
