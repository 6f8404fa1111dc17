"""kl dev -n 3: the cluster of docker-compose.yml as processes, with the same settings."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kafkalite import Broker
from kafkalite.broker.config import BROKER_OPTIONS, ENVIRONMENT_PREFIX, BrokerConfig
from kafkalite.cli import dev_cluster
from kafkalite.cli.dev_cluster import (
    DevCluster,
    ForeignClusterError,
    Layout,
    StartTimeoutError,
    new_layout,
    node_settings,
    read_or_make_layout,
)
from kafkalite.errors import ConfigError, DiskFullError
from kafkalite.transport.free_ports import free_ports

Kl = Callable[..., Any]
Spawn = Callable[..., "subprocess.Popen[bytes]"]

LIMIT_S = 60
#: Settings that depend on where a node runs: in its own network, or beside the others.
OF_PLACES = {"listeners", "advertised.listeners", "log.dirs", "controller.quorum.voters"}
OF_CLUSTERS = {"cluster.id", "cluster.secret"}


def compose_settings(repository: Path) -> dict[str, dict[str, str]]:
    """Return {service: {dotted name: value}} of the nodes of docker-compose.yml, with the image's
    settings.
    """
    document = yaml.safe_load((repository / "docker-compose.yml").read_text())
    image = re.findall(r"(KAFKALITE_\w+)=(\S+)", (repository / "Dockerfile").read_text())
    nodes = {}
    for name, service in document["services"].items():
        environment = dict(image) | service.get("environment", {})
        if "KAFKALITE_NODE_ID" in environment:
            nodes[name] = {
                BROKER_OPTIONS.get(variable.removeprefix(ENVIRONMENT_PREFIX).lower()).name: value
                for variable, value in environment.items()
                if variable.startswith(ENVIRONMENT_PREFIX)
            }
    return nodes


def test_docker_and_processes_are_in_step(repository: Path, tmp_path: Path) -> None:
    composed = compose_settings(repository)
    layout = new_layout(3, 9092)
    assert list(composed) == ["node1", "node2", "node3"]
    for node_id, theirs in enumerate(composed.values(), 1):
        ours = {
            name: str(value)
            for name, value in node_settings(layout, node_id, "127.0.0.1", tmp_path, {}).items()
        }
        assert ours.keys() | {"advertised.listeners"} == theirs.keys()
        for name in ours.keys() - OF_PLACES - OF_CLUSTERS:
            assert ours[name] == theirs[name], name
        voters = [re.sub("@.*", "", voter) for voter in ours["controller.quorum.voters"].split(",")]
        assert voters == [re.sub("@.*", "", voter) for voter in theirs["controller.quorum.voters"].split(",")]


def test_every_node_of_the_compose_file_is_a_valid_one(repository: Path) -> None:
    for settings in compose_settings(repository).values():
        filled = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in settings.items()}
        config = BrokerConfig.from_settings(filled)
        inside, outside = config.advertised_listeners
        assert inside == f"node{config.node_id}:9092"
        assert outside == f"127.0.0.1:{config.listeners[1].rpartition(':')[2]}"
        assert config.voters[config.node_id] == f"node{config.node_id}:9093"


def test_the_development_secret_is_marked_as_such(repository: Path) -> None:
    (settings, *_) = compose_settings(repository).values()
    assert "development" in settings["cluster.secret"]
    assert "development" in settings["cluster.id"]


def test_a_directory_keeps_its_cluster(tmp_path: Path) -> None:
    first = read_or_make_layout(tmp_path, 3, 0, 9092)
    assert read_or_make_layout(tmp_path, 3, None, 9092) == first
    assert read_or_make_layout(tmp_path, 3, 0, 9092) == first
    assert len(set(first.client_ports + first.controller_ports)) == 6
    assert len(first.cluster_secret) >= 32
    assert (tmp_path / "cluster.toml").stat().st_mode & 0o077 == 0, "only the owner may read the secret"
    with pytest.raises(ConfigError, match="the number of nodes of the cluster"):
        read_or_make_layout(tmp_path, 5, None, 9092)
    with pytest.raises(ConfigError, match="the port of the cluster"):
        read_or_make_layout(tmp_path, 3, 1234, 9092)


def test_ports_follow_the_first() -> None:
    layout = new_layout(3, 9092)
    assert isinstance(layout, Layout)
    assert layout.client_ports == (9092, 9093, 9094)
    assert layout.controller_ports == (9192, 9193, 9194)


def test_a_first_port_without_room_for_the_others_is_refused(kl: Kl, tmp_path: Path) -> None:
    assert new_layout(3, 65_433).controller_ports[-1] == 65_535
    result = kl("dev", "-n", "3", "--port", "65434", "--data", tmp_path)
    assert result.code == 2
    assert "--port is 65434, but must be 0 to 65433" in result.told
    assert not list(tmp_path.glob("*.toml"))


def test_bad_settings_are_refused_before_anything_starts(kl: Kl, tmp_path: Path) -> None:
    result = kl("dev", "-n", "3", "--data", tmp_path / "data", "--set", "num.partitions=none")
    assert result.code == 2
    assert "num.partitions is 'none'" in result.told
    assert not (tmp_path / "data").exists()


def test_more_replicas_than_nodes_are_refused_before_anything_starts(kl: Kl, tmp_path: Path) -> None:
    for nodes, reason in ((1, "5 replicas need as many nodes, and there is 1"), (2, "and there are 2")):
        result = kl("dev", "-n", str(nodes), "--data", tmp_path / "data", "--topic", "a:3:5")
        assert result.code == 2
        assert "--topic a: 5 replicas" in result.told and reason in result.told
        assert not (tmp_path / "data").exists()


def test_the_nodes_have_the_settings_of_the_environment_except_their_own(
    kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[DevCluster] = []

    async def run(cluster: DevCluster, _when_up: Any) -> None:
        found.append(cluster)

    monkeypatch.setattr(dev_cluster, "run", run)
    monkeypatch.setenv("KAFKALITE_LOG_RETENTION_HOURS", "2")
    monkeypatch.setenv("KAFKALITE_NUM_PARTITIONS", "5")
    monkeypatch.setenv("KAFKALITE_NODE_ID", "9")
    result = kl("dev", "-n", "3", "--port", "0", "--data", tmp_path, "--set", "num.partitions=6")
    assert result.code == 0, result
    assert "KAFKALITE_NODE_ID has no effect: kl dev -n sets node.id of each node" in result.told
    (cluster,) = found
    settings = node_settings(cluster.layout, 1, "127.0.0.1", tmp_path, cluster.overrides)
    config = BrokerConfig.from_settings(settings)
    assert (config.num_partitions, config.log_retention_ms, config.node_id) == (6, 7_200_000, 1)


def line_of(process: subprocess.Popen[bytes]) -> str:
    """The next line on stdout."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    assert ready, "nothing was printed"
    return process.stdout.readline().decode()


def servers_of(process: subprocess.Popen[bytes]) -> str:
    return line_of(process).strip().removeprefix("export KL_BOOTSTRAP_SERVERS=")


@pytest.mark.slow
def test_three_nodes_survive_the_loss_of_one_and_start_again(spawn: Spawn, kl: Kl, tmp_path: Path) -> None:
    data = tmp_path / "cluster"
    arguments = ("dev", "-n", "3", "--port", "0", "--data", data, "--topic", "events:3", "--print-env")
    process = spawn(*arguments)
    servers = servers_of(process)
    assert kl("produce", "events", "-b", servers, stdin=b"one\ntwo\nthree\n").code == 0
    brokers = json.loads(kl("cluster", "brokers", "-b", servers, "-o", "json").out)
    assert [(row["node_id"], row["state"], row["replicas"]) for row in brokers] == [
        (1, "live", 3),
        (2, "live", 3),
        (3, "live", 3),
    ]

    refused = kl("cluster", "shutdown", "2", "-b", servers, "--timeout", "30s")
    assert refused.code == 2 and "KAFKALITE_CLUSTER_SECRET" in refused.told
    shutdown = ("cluster", "shutdown", "2", "--secret-file", str(data / "node-1.toml"))
    assert kl(*shutdown, "-b", servers, "--timeout", "30s").text == "node 2: stopped\n"
    assert kl("produce", "events", "-b", servers, stdin=b"four\n").code == 0
    status = kl("cluster", "status", "--check", "-b", servers)
    assert status.code == 9
    assert "broker 2 is stopped" in status.text and "fenced" not in status.text
    under = kl("topic", "describe", "--under-replicated", "-b", servers, "-o", "json")
    assert [len(topic["partitions"]) for topic in json.loads(under.out)] == [3]
    leaderless = kl("topic", "describe", "--leaderless", "-b", servers)
    assert (leaderless.code, leaderless.out) == (0, b"")

    assert process.stderr is not None
    told = ""
    while "node 2 ended" not in told:  # the cluster fences the node before its process ends
        line = process.stderr.readline().decode()
        assert line, told
        told += line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    told += err.decode()
    assert "node 2 ended with exit code 0; restart it with: kl server start -f" in told
    assert told.endswith("stopped.\n")
    assert all("broker stopped" in (data / f"node-{n}.log").read_text() for n in (1, 2, 3))

    again = spawn(*arguments)
    assert servers_of(again) == servers
    assert kl("cluster", "wait", "--brokers", "3", "--whole", "-b", servers, "--timeout", "30s").code == 0
    assert sorted(kl("consume", "events", "-e", "-b", servers).text.split()) == [
        "four",
        "one",
        "three",
        "two",
    ]
    again.terminate()
    again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0


@pytest.mark.slow
def test_a_node_that_cannot_start_is_reported_with_its_log(spawn: Spawn, tmp_path: Path) -> None:
    data = tmp_path / "cluster"
    layout = read_or_make_layout(data_made(data), 3, 0, 9092)
    (data / "node-2").write_text("a file where a directory must be")
    process = spawn("dev", "-n", "3", "--data", data)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert out == b""
    assert "node 2 ended during the start of the cluster" in err.decode()
    assert b"Traceback" not in err
    for port in layout.client_ports:
        assert not is_listening(port), "the others were stopped"


def test_ports_that_another_cluster_uses_are_refused_and_nothing_changes_there(
    spawn: Spawn, kl: Kl, tmp_path: Path
) -> None:
    """Whichever port is in use, the first or another: no node starts, and nothing is stored.

    Another process of this machine may use the ports beside it.
    """
    process = spawn("dev", "--port", "0", "--print-env")
    servers = servers_of(process)
    port = int(servers.rpartition(":")[2])
    for first in (port, port - 2):
        data = tmp_path / f"cluster-{first}"
        refused = kl("dev", "-n", "3", "--port", str(first), "--data", data, "--topic", "intruder")
        assert refused.code == 1
        named = re.search(r"cannot listen on 127.0.0.1:([0-9]+): the port is in use", refused.told)
        assert named, refused.told
        assert int(named[1]) in range(first, port + 1)
        assert "is up" not in refused.text
        assert not (data / "cluster.toml").exists()
    assert kl("topic", "list", "-b", servers).out == b""


async def test_a_foreign_cluster_on_the_ports_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A port that is taken between the check and the start: the ids of the clusters differ."""
    async with Broker(listeners=("127.0.0.1:0",)) as broker:
        port = int(broker.bootstrap_servers.rpartition(":")[2])
        layout = Layout("ours", "secret", (port,), (1,))
        cluster = DevCluster(tmp_path, layout, "127.0.0.1")

        async def spawn_nothing(node_id: int) -> Any:
            return SimpleNamespace(returncode=None)

        monkeypatch.setattr(cluster, "_spawn", spawn_nothing)
        with pytest.raises(ForeignClusterError, match=r"responds on 127\.0\.0\.1.*nothing was changed"):
            await cluster.start()


def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(
    kl: Kl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    data = tmp_path / "cluster"
    refused = kl("dev", "-n", "3", "--port", "0", "--data", data)
    assert refused.code == 1
    assert refused.told.startswith(f"kl: no space left for {data}/cluster.toml"), refused.told
    assert list(data.iterdir()) == []


@pytest.mark.parametrize("free_bytes", [24 << 10, 1 << 30])
async def test_a_start_that_takes_too_long_names_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_bytes: int
) -> None:
    """The nodes cannot write the cause to their logs, which are on the same disk."""
    is_full = free_bytes < 1 << 20
    cluster = DevCluster(tmp_path, Layout("ours", "secret", tuple(free_ports(1)), (1,)), "127.0.0.1")

    async def spawn_nothing(node_id: int) -> Any:
        return SimpleNamespace(returncode=None)

    disk = os.statvfs(tmp_path)
    few = os.statvfs_result((*disk[:4], free_bytes // disk.f_frsize, *disk[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    monkeypatch.setattr(cluster, "_spawn", spawn_nothing)
    monkeypatch.setattr(dev_cluster, "_SHORTAGE_QUIET_S", 0.05)
    monkeypatch.setattr(dev_cluster, "START_LIMIT_S", 0.5)
    text = f"no space left for {tmp_path}/node-1: the disk has 24,576 bytes free there"
    expected = DiskFullError if is_full else StartTimeoutError
    with pytest.raises(expected, match=re.escape(text) if is_full else r"not started within 0\.5 s"):
        await cluster.start()
    assert (text in capsys.readouterr().err) == is_full


@pytest.mark.slow
def test_a_node_that_was_restarted_by_hand_stops_with_the_cluster(
    spawn: Spawn, kl: Kl, tmp_path: Path
) -> None:
    data = tmp_path / "cluster"
    process = spawn("dev", "-n", "3", "--port", "0", "--data", data, "--topic", "events:3", "--print-env")
    servers = servers_of(process)
    pids = [int((data / f"node-{n}" / ".lock").read_text()) for n in (1, 2, 3)]
    os.kill(pids[0], signal.SIGKILL)
    assert process.stderr is not None
    while "node 1 ended by signal 9" not in (line := process.stderr.readline().decode()):
        assert line
    for command in (
        ("topic", "list"),
        ("cluster", "status"),
        ("topic", "describe", "events"),
        ("produce", "events"),
    ):
        done = kl(*command, "-b", servers, stdin=b"x\n")
        assert done.code == 0, "the line to export names all nodes, so kl finds one that lives"
    again = spawn("server", "start", "-f", data / "node-1.toml")
    assert kl("cluster", "wait", "--brokers", "3", "-b", servers, "--timeout", "30s").code == 0
    process.terminate()
    assert process.wait(LIMIT_S) == 0, process.stderr.read()
    assert again.wait(LIMIT_S) == 0, "it was shut down cleanly"


def data_made(data: Path) -> Path:
    data.mkdir()
    return data


def is_listening(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_stop_without_a_quorum_says_why_it_takes_time(spawn: Spawn, tmp_path: Path) -> None:
    data = tmp_path / "cluster"
    process = spawn("dev", "-n", "3", "--port", "0", "--data", data, "--print-env")
    servers_of(process)
    for number in (1, 2):
        os.kill(int((data / f"node-{number}" / ".lock").read_text()), signal.SIGKILL)
    assert process.stderr is not None
    told = [process.stderr.readline().decode() for _ in range(2)]
    while not all("ended by signal 9" in line for line in told[-2:]):
        told.append(process.stderr.readline().decode())
        assert told[-1], told
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == (
        b"stopping 1 node: looking for a controller to hand over partitions, but only 1 of 3 nodes ran;"
        b" Ctrl-C again ends at once\n"
    )
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, b"stopped.\n")
