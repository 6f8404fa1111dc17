"""Capabilities H: clusters of real server processes, which start together, lose nodes and go on."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from kafkalite import Admin, Consumer, Producer, TopicPartition
from kafkalite.errors import KafkaliteError
from kafkalite.parent_pipe import PARENT_PIPE, stdin_for_children
from kafkalite.testing import ProcessCluster
from kafkalite.transport.free_ports import free_ports
from proof.waiting import eventually

pytestmark = pytest.mark.slow

LIMIT_S = 25
#: A node that falls silent is noticed after a session of 3 s. Both are the defaults.
QUICK = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}


async def _brokers(address: str) -> list[tuple[int, bool]]:
    """Return (node id, whether it is fenced) of each broker that the one at ``address`` knows."""
    async with Admin(address, default_api_timeout_ms=2_000) as admin:
        return [(each.node_id, each.is_fenced) for each in (await admin.describe_cluster()).brokers]


async def test_the_compose_file_is_a_cluster_without_another_command(
    repository: Path, tmp_path: Path
) -> None:
    """H1: its three services, started with their own variables as processes of this machine, are a cluster.

    Only addresses and directories are replaced; ``docker compose`` would resolve the names of the nodes.
    """
    document = yaml.safe_load((repository / "docker-compose.yml").read_text())
    image = dict(re.findall(r"(KAFKALITE_\w+)=(\S+)", (repository / "Dockerfile").read_text()))
    services = {
        name: image | service["environment"]
        for name, service in document["services"].items()
        if "KAFKALITE_NODE_ID" in service.get("environment", {})
    }
    assert list(services) == ["node1", "node2", "node3"]
    places: dict[str, str] = {}  # {address in the compose file: address here}

    def here(found: re.Match[str]) -> str:
        return places.setdefault(found[0], f"127.0.0.1:{free_ports(1)[0]}")

    processes = []
    try:
        for name, variables in services.items():
            environment = {**os.environ, PARENT_PIPE: "1"}
            for key, value in variables.items():
                value = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)
                if "LISTENERS" in key or "VOTERS" in key:
                    value = re.sub(r"0\.0\.0\.0|127\.0\.0\.1", name, value)
                    value = re.sub(r"node\d:\d+", here, value)
                environment[key] = value
            environment["KAFKALITE_LOG_DIRS"] = str(tmp_path / name)
            with (tmp_path / f"{name}.log").open("wb") as log:
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "kafkalite", "server", "start"),
                        env=environment,
                        stdin=stdin_for_children(),
                        stdout=log,
                        stderr=log,
                    )
                )

        async def is_whole() -> bool:
            with suppress(KafkaliteError):
                known = [await _brokers(places[f"{name}:9092"]) for name in services]
                return known == [[(1, False), (2, False), (3, False)]] * 3
            return False

        await eventually(is_whole, limit_s=LIMIT_S)
        async with Admin(places["node3:9092"]) as admin:
            await admin.create_topic("t")
            described = await admin.describe_topic("t")
            assert len(described.partitions[0].replicas) == 3, "the default of the compose file"
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_each_node_is_killed_in_turn_and_the_others_go_on(tmp_path: Path) -> None:
    """H2, H4, H6: after the kill of any node, the controller first, the two others agree on a controller and
    on who lives; a new controller has a higher term; all partitions are written to."""
    async with ProcessCluster(tmp_path, brokers=3, settings=QUICK) as cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic("t", 3, 3, configs={"min.insync.replicas": "2"})
        await cluster.wait(is_whole=True, brokers=3)
        first = (await cluster.view()).controller_id
        assert first in cluster.nodes
        async with Producer(cluster.bootstrap_servers) as producer:
            for victim in sorted(cluster.nodes, key=lambda node_id: node_id != first):
                before = (await cluster.view()).controller_id
                term = await _term(cluster)
                await cluster.kill(victim)
                others = set(cluster.nodes) - {victim}

                async def is_agreed(others: set[int] = others) -> bool:
                    with suppress(KafkaliteError):
                        views = [await cluster.view(node_id) for node_id in others]
                        live = [{broker.node_id for broker in view.live} for view in views]
                        controllers = {view.controller_id for view in views}
                        return live == [others] * 2 and len(controllers) == 1 and controllers <= others
                    return False

                await eventually(is_agreed, f"the nodes {others} agree after {victim} is killed")
                if victim == before:
                    assert await _term(cluster) > term
                async with asyncio.timeout(LIMIT_S):
                    for partition in range(3):
                        await producer.send("t", b"x", partition=partition)
                await cluster.start_node(victim)
                await cluster.wait(is_whole=True, brokers=3)


async def _term(cluster: ProcessCluster) -> int:
    async with Admin(cluster.running_addresses) as admin:
        return (await admin.describe_quorum()).term


async def test_a_node_that_falls_silent_is_fenced_and_comes_back(tmp_path: Path) -> None:
    """H4: a paused process keeps its connections; without heartbeats its session ends, both others see it
    fenced, and its partitions have other leaders. When it goes on, it is one of them again."""
    async with ProcessCluster(tmp_path, brokers=3, settings=QUICK) as cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic("t", 3, 3)
        await cluster.wait(is_whole=True, brokers=3)
        controller_id = (await cluster.view()).controller_id
        silent = next(node_id for node_id in cluster.nodes if node_id != controller_id)
        others = set(cluster.nodes) - {silent}
        cluster.pause(silent)
        try:

            async def is_fenced() -> bool:
                views = [await cluster.view(node_id) for node_id in others]
                return all(
                    {broker.node_id for broker in view.live} == others
                    and all(each.state.leader_id in others for each in view.partitions)
                    for view in views
                )

            await eventually(is_fenced, f"broker {silent} fenced")
        finally:
            cluster.resume(silent)
        await cluster.wait(is_whole=True, brokers=3)


async def test_the_nodes_need_no_other_program_and_a_majority_decides(tmp_path: Path) -> None:
    """H7: membership, elections and offsets are in the nodes, which have no child process. Two of three find
    out who lives and change the metadata; one alone refuses to."""
    async with ProcessCluster(tmp_path, brokers=3, settings=QUICK) as cluster:
        for node in cluster.nodes.values():
            assert node.process is not None
            children = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children").read_text()
            assert children == ""
        first, second, last = cluster.nodes
        async with Producer(cluster.bootstrap_servers) as producer:
            await producer.send("t", b"x", partition=0)
        settings: dict = {"group_id": "g", "auto_offset_reset": "earliest"}
        async with Consumer("t", bootstrap_servers=cluster.bootstrap_servers, **settings) as consumer:
            assert await consumer.get_one(timeout_ms=20_000) is not None
            await consumer.commit()
        await cluster.kill(first)

        async def is_noticed() -> bool:
            with suppress(KafkaliteError):
                return {broker.node_id for broker in (await cluster.view(last)).live} == {second, last}
            return False

        await eventually(is_noticed, f"node {first} is fenced")
        async with Admin(cluster.running_addresses) as admin:
            await admin.create_topic("by-two", 2, 2)
            assert (await admin.committed_offsets("g"))[TopicPartition("t", 0)].offset == 1
        await cluster.kill(second)
        async with Admin(cluster.running_addresses, default_api_timeout_ms=3_000) as admin:
            with pytest.raises(KafkaliteError):
                await admin.create_topic("by-one", 1, 1)


async def test_five_thousand_partitions_start_quickly_and_cost_little(tmp_path: Path) -> None:
    """H9: a server with 5,000 partitions, and a record in each twentieth, is up again after 10 s of processor
    time at most, opens no file of an idle partition, serves, and then uses less than 5 % of a core."""
    count = 5_000
    async with ProcessCluster(tmp_path, brokers=1) as cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic("t", count)
        async with Producer(cluster.bootstrap_servers) as producer:
            for partition in range(0, count, 20):
                producer.send_nowait("t", b"%d" % partition, partition=partition)
            await producer.flush()
        assert await cluster.terminate(1) == 0
        await cluster.start()
        process = cluster.nodes[1].process
        assert process is not None
        assert _processor_s(process.pid) < 10
        assert _descriptors(process.pid) < 100
        async with Admin(cluster.bootstrap_servers) as admin:
            ends = await admin.list_offsets([TopicPartition("t", n) for n in range(count)], "latest")
        assert [end.offset for end in ends.values()] == [int(n % 20 == 0) for n in range(count)]
        await asyncio.sleep(1)  # the end of what the request caused
        before_s = _processor_s(process.pid)
        await asyncio.sleep(2)
        assert _processor_s(process.pid) - before_s < 0.05 * 2


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _processor_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
