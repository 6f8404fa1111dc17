"""ProcessCluster: bounded waits, failures with their reason, no process left behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kafkalite.errors import ClientError, ListenError
from kafkalite.testing import ProcessCluster
from kafkalite.testing.process_cluster import NodeFailedError
from kafkalite.testing.reserved_ports import ReservedPorts
from kafkalite.transport import free_ports as module
from kafkalite.transport.free_ports import free_ports
from proof.waiting import eventually


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_free_ports_are_different_and_free() -> None:
    import socket

    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


async def test_reserved_ports_are_free_for_their_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two clusters that start at the same time could choose the same port."""
    reserved = ReservedPorts(3)
    first = min(reserved.ports)
    monkeypatch.setattr(module, "_FIRST", first)
    monkeypatch.setattr(module, "_STOP", first + 1)
    for _ in range(2):  # a server that starts, ends and starts again
        with pytest.raises(ListenError):
            free_ports(1)
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", first)
        server.close()
        await server.wait_closed()
    reserved.close()
    assert free_ports(1) == [first]


async def test_an_unknown_node_is_named(tmp_path: Path) -> None:
    cluster = ProcessCluster(tmp_path, brokers=1)
    for call in (cluster.kill(7), cluster.restart(7), cluster.start_node(7), cluster.view(7)):
        with pytest.raises(ClientError, match="there is no node 7"):
            await call
    for pause in (cluster.pause, cluster.resume):
        with pytest.raises(ClientError, match="there is no node 7"):
            pause(7)


async def test_a_node_that_cannot_start_raises_with_its_log(tmp_path: Path) -> None:
    cluster = ProcessCluster(tmp_path, brokers=1, settings={"num.partitions": "none"})
    with pytest.raises(NodeFailedError, match=r"num\.partitions is 'none'"):
        async with cluster:
            pass
    assert not any(node.is_running for node in cluster.nodes.values())


@pytest.mark.slow
async def test_a_node_lives_dies_and_lives_again(tmp_path: Path) -> None:
    async with ProcessCluster(tmp_path, brokers=1) as cluster:
        node = cluster.nodes[1]
        assert node.process is not None
        first = node.process.pid
        assert (await cluster.view()).controller_id == 1
        with pytest.raises(TimeoutError, match="1 of 2 brokers live"):
            await cluster.wait(brokers=2, limit_s=0.3)

        cluster.pause(1)
        assert cluster.running_addresses == []
        cluster.resume(1)
        await cluster.kill(1)
        assert not is_alive(first)
        await cluster.start()
        assert await cluster.terminate(1) == 0
        await cluster.start()
        last = cluster.nodes[1].process
        assert last is not None
    assert not is_alive(last.pid)
    assert node.log.count("is up on") == 3
    settings = (tmp_path / "node-1.toml").read_text()
    assert "cluster.secret" in settings


@pytest.mark.slow
async def test_an_isolated_node_is_cut_off_in_both_directions_and_found_again(tmp_path: Path) -> None:
    async with ProcessCluster(tmp_path, brokers=3, proxied=True) as cluster:
        view = await cluster.view()
        victim = next(node_id for node_id in cluster.nodes if node_id != view.controller_id)
        others = [node_id for node_id in cluster.nodes if node_id != victim]
        cluster.isolate(victim)

        async def is_cut_off() -> bool:
            live, controller_id = (
                (await cluster.view(others[0])).live,
                (await cluster.view(victim)).controller_id,
            )
            return len(live) == 2 and controller_id < 0

        await eventually(is_cut_off)
        links = [*cluster.links(victim, others[0]), *cluster.links(others[0], victim)]
        assert sum(link.there.lost_bytes + link.back.lost_bytes for link in links) > 0
        cluster.heal()
        await cluster.wait(is_whole=True, brokers=3)
