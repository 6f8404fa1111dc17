"""kl cluster and kl metadata: their output and exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafkalite.cli.client_warnings import installed
from kafkalite.cli.cluster import _print_status
from kafkalite.cli.metadata import changes
from kafkalite.client.admin.cluster_health import (
    ClusterView,
    PlacedPartition,
    RequestedState,
    counted,
    describe_recovery,
    load_of,
    look_again,
    look_at_disks,
    problems,
    unmet_conditions,
)
from kafkalite.client.cluster import connection
from kafkalite.errors import ConnectionFailedError
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.metadata import (
    BrokerDescription,
    DescribeQuorumResponse,
    PartitionMetadata,
    QuorumNode,
    RecoveringPartition,
    RecoveringReplica,
)
from kafkalite.testing import Cluster, SyncCluster

Kl = Callable[..., Any]


def broker(node_id: int, *, fenced: bool = False, leaving: bool = False) -> BrokerDescription:
    return BrokerDescription(node_id, f"host{node_id}:9092", None, 10 + node_id, fenced, leaving, 0)


def partition(number: int, leader: int, isr: list[int], topic: str = "t") -> PlacedPartition:
    state = PartitionMetadata(0, number, leader, 5, 7, [1, 2, 3], isr, [])
    return PlacedPartition(TopicPartition(topic, number), state)


def view(*partitions: PlacedPartition, brokers: Any = None, controller: int = 1) -> ClusterView:
    found = brokers if brokers is not None else [broker(1), broker(2), broker(3)]
    return ClusterView("c", controller, 42, tuple(found), partitions, 1)


WHOLE = view(partition(0, 1, [1, 2, 3]), partition(1, 2, [2, 3, 1]))
BROKEN = view(
    partition(0, 2, [2, 3]),
    partition(1, -1, []),
    partition(2, 3, [3, 2, 1]),
    brokers=[
        broker(1, fenced=True),
        broker(2),
        broker(3, leaving=True),
        broker(4, fenced=True, leaving=True),
    ],
    controller=-1,
)


def test_a_healthy_cluster_has_no_problems() -> None:
    assert problems(WHOLE) == []
    assert (
        unmet_conditions(WHOLE, RequestedState(3, is_fully_in_sync=True, node_id=2, topics=frozenset({"t"})))
        == []
    )


def test_every_problem_is_named() -> None:
    assert problems(BROKEN) == [
        "no controller: metadata can't change, so neither leaders nor ISRs do",
        "broker 1 is fenced: it was killed, or does not respond",
        "broker 3 is shutting down",
        "broker 4 is stopped",
        "1 partition without a leader (t-1)",
        "2 partitions under-replicated (t-0, t-1)",
    ]
    assert [str(each.name) for each in BROKEN.led_by_others] == ["t-0", "t-2"]


def test_nodes_that_cannot_be_reached_are_named_with_the_majority_that_they_take_away() -> None:
    lost = replace(view(partition(0, 1, [1, 2, 3]), controller=-1), unreachable=frozenset({2, 3}))
    (problem,) = problems(lost)
    assert problem == (
        "the quorum of controllers is lost: 1 of 3 nodes can be reached, and no partition is served; "
        "start node 2 (host2:9092) and node 3 (host3:9092)"
    )
    assert [broker.node_id for broker in lost.live] == [1]
    assert unmet_conditions(lost, RequestedState(3)) == [problem, "1 of 3 brokers live"]


def test_a_broker_that_was_just_killed_is_not_live_although_no_controller_has_fenced_it() -> None:
    just_killed = replace(WHOLE, unreachable=frozenset({1}))
    assert problems(just_killed) == ["broker 1 (host1:9092), the controller, does not respond"]
    assert [broker.node_id for broker in just_killed.live] == [2, 3]
    assert problems(replace(WHOLE, unreachable=frozenset({2}))) == ["broker 2 (host2:9092) does not respond"]


async def test_a_broker_that_was_silent_is_live_in_the_second_look_only_if_it_accepts_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(_address: str, _timeout_ms: int) -> Any:
        raise ConnectionFailedError("connection refused")

    async with Cluster() as cluster, cluster.admin() as admin:
        client = admin._cluster
        assert len((await look_again(client, {1})).live) == 1, "it was only slow"
        monkeypatch.setattr(client, "dial", refuse)
        assert len((await look_again(client, {2})).live) == 1, "only silent brokers are suspected"
        again = await look_again(client, {1})
        assert (again.controller_id, again.live, again.unreachable) == (1, [], frozenset({1}))


def test_leaders_are_those_before_the_controller_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    _print_status(view(partition(0, 1, [1]), controller=-1), ["no partition is served"], [])
    assert "internal; before the controller was lost: 0 without a leader, " in capsys.readouterr().out
    _print_status(view(partition(0, 1, [1])), [], [])
    assert "internal, 0 without a leader, " in capsys.readouterr().out


def test_refusing_logs_are_counted() -> None:
    async def refusals(count: int) -> tuple[list[str], set[int]]:
        offline = [SimpleNamespace(offline_reason="no space left")] * count
        response = SimpleNamespace(message=SimpleNamespace(partitions=offline))

        async def call(_request: Any, *, node_id: int, timeout_ms: int) -> Any:
            assert timeout_ms == 500
            if node_id == 3:
                raise ConnectionFailedError("connection refused")
            return response

        client = SimpleNamespace(call=call, config=SimpleNamespace(default_api_timeout_ms=1_000))
        return await look_at_disks(cast(Any, client), replace(WHOLE, brokers=[broker(2), broker(3)]))

    assert asyncio.run(refusals(1)) == (["broker 2 refuses records in 1 log: no space left"], {3})
    assert asyncio.run(refusals(2)) == (["broker 2 refuses records in 2 logs: no space left"], {3})


@pytest.mark.slow
def test_commands_name_the_dead_nodes_of_a_lost_majority(kl: Kl) -> None:
    with SyncCluster(brokers=3, transport="tcp") as cluster:
        cluster.produce("t", [b"1"])
        servers = cluster.bootstrap_servers
        _, *dead = servers.split(",")
        cluster.kill(2, 3)
        while (
            json.loads(kl("cluster", "status", "-b", servers, "-o", "json").out)["controller_id"] is not None
        ):
            time.sleep(0.1)
        status = kl("cluster", "status", "-b", servers).text
        assert "brokers     1 of 3 live" in status
        assert "before the controller was lost: 0 without a leader" in status
        assert "the quorum of controllers is lost: 1 of 3 nodes can be reached" in status
        assert all(address in status for address in dead)
        assert kl("cluster", "brokers", "-b", servers).text.count("unreachable") == 2
        for arguments, stdin in ((("topic", "ls"), b""), (("produce", "t", "--timeout", "3s"), b"x")):
            if handler := installed():  # of the commands before, which have printed the same warning
                logging.getLogger("kafkalite").removeHandler(handler)
            told = kl(*arguments, "-b", servers, stdin=stdin).told
            assert "the quorum of controllers is lost: 1 of 3 nodes can be reached" in told, told
            assert all(address in told for address in dead)
        waited = kl("cluster", "wait", "-b", servers, "--timeout", "3s")
        start = f"start node 2 ({dead[0]}) and node 3 ({dead[1]})\n"
        reached = "1 of 3 nodes can be reached, and no partition is served"
        cause = f"the quorum of controllers is lost: {reached}; {start}"
        assert waited.code == 7
        assert waited.told.startswith(f"kl: waiting: {cause}"), waited.told
        assert f"kl: not ready after 3 s: {cause}" in waited.told
        for arguments in (
            ("topic", "describe", "t"),
            ("topic", "create", "new"),
            ("consume", "t", "-e"),
            ("group", "lag", "g"),
            ("config", "set", "topic", "t", "retention.ms=1d"),
            ("log", "dirs", "t"),
            ("txn", "list"),
        ):
            told = kl(*arguments, "-b", servers, "-X", "default.api.timeout.ms=1500").told
            cause = next(line for line in told.splitlines() if "; the last error: " in line)
            assert "the quorum of controllers is lost: 1 of 3 nodes can be reached" in cause, told
            assert all(address in cause for address in dead)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (RequestedState(1), ["no controller"]),
        (RequestedState(2), ["no controller", "1 of 2 brokers live"]),
        (RequestedState(1, node_id=1), ["no controller", "broker 1 fenced"]),
        (RequestedState(1, node_id=9), ["no controller", "broker 9 not registered"]),
        (
            RequestedState(1, topics=frozenset({"t", "u"})),
            ["no controller", "t has partitions without a leader", "no topic u"],
        ),
        (
            RequestedState(1, is_fully_in_sync=True),
            [
                "no controller",
                "1 of 4 brokers live",
                "1 partition without a leader (t-1)",
                "2 partitions under-replicated (t-0, t-1)",
            ],
        ),
    ],
)
def test_unmet_conditions_are_named(requested: RequestedState, expected: list[str]) -> None:
    assert unmet_conditions(BROKEN, requested) == expected


def test_a_missing_controller_is_named_once() -> None:
    nodes = [
        QuorumNode(node_id, "", True, offset, ms)
        for node_id, offset, ms in ((1, 5, 0), (2, 5, 80), (9, 1, 9000))
    ]
    seen = DescribeQuorumResponse(0, None, 1, 1, 3, 5, 5, 6, 0, nodes)
    assert problems(WHOLE, seen) == ["controller 9 is silent"]
    by_another = DescribeQuorumResponse(0, None, 2, 1, 3, 5, 5, 6, 0, nodes)
    assert problems(WHOLE, by_another) == [], "only the leader knows"


def test_load_counts_roles() -> None:
    assert load_of(3, BROKEN.partitions) == (1, 3, 2)


def test_many_partitions_are_counted_and_some_named() -> None:
    many = [partition(number, -1, []) for number in range(2000)]
    assert counted(many, "without a leader") == "2,000 partitions without a leader (t-0, t-1, t-2, …)"


def test_changes_of_a_tree() -> None:
    before = {"/a": "", "/a/1": "1", "/a/2": "2"}
    now = {"/a": "", "/a/2": "3", "/a/3": "4"}
    assert changes(before, now) == [("-", "/a/1", "1"), ("~", "/a/2", "3"), ("+", "/a/3", "4")]


# --- against a broker ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def topic(servers: str) -> str:
    from kafkalite import sync

    with sync.Admin(servers) as admin:
        admin.create_topic("shown", 3)
    return "shown"


def test_status(at: Kl, topic: str) -> None:
    result = at("cluster", "status", "--check")
    assert result.code == 0, result.told
    assert "brokers     1 of 1 live" in result.text
    assert result.text.endswith("state       whole\n")
    document = json.loads(at("cluster", "status", "-o", "json").out)
    assert document["is_whole"] is True
    assert document["live_brokers"] == [1]
    assert document["partitions"] == 3


def test_filters_name_partitions(at: Kl, topic: str) -> None:
    result = at("cluster", "status", "--under-replicated", "--leaderless")
    assert (result.code, result.out) == (0, b"")
    assert "none of 3 partitions" in result.told
    assert at("topic", "describe", "--under-replicated", "-o", "json").text == "[]\n"


def test_describe_and_brokers(at: Kl, topic: str) -> None:
    text = at("cluster", "describe").text
    assert "NODE  STATE  ADDRESS" in text
    assert "quorum      term" in text
    (row,) = json.loads(at("cluster", "brokers", "-o", "json").out)
    assert (row["node_id"], row["state"], row["leads"], row["replicas"], row["in_sync"]) == (
        1,
        "live",
        3,
        3,
        3,
    )
    assert at("cluster", "brokers", "-o", "name").text == "1\n"
    assert json.loads(at("cluster", "describe", "-o", "json").out)["quorum"]["leader_id"] == 1


def test_controller(at: Kl) -> None:
    assert at("cluster", "controller", "-o", "name").text == "1\n"


def test_wait(at: Kl, topic: str) -> None:
    result = at("cluster", "wait", "--brokers", "1", "--whole", "--topic", topic, "--node", "1")
    assert result.code == 0
    assert result.text == "ready: 1 live broker, controller 1, 3 partitions\n"
    assert at("cluster", "wait", "-q").out == b""


def test_wait_prints_the_unmet_conditions(at: Kl) -> None:
    result = at("cluster", "wait", "--brokers", "3", "--timeout", "300ms")
    assert result.code == 7
    assert "waiting: 1 of 3 brokers live" in result.told
    assert "not ready after 0.3 s: 1 of 3 brokers live" in result.told
    quiet = at("cluster", "wait", "--brokers", "3", "--timeout", "300ms", "-q")
    assert quiet.code == 7
    assert "waiting" not in quiet.told


def test_wait_without_time(at: Kl) -> None:
    result = at("cluster", "wait", "--brokers", "3", "--timeout", "0s")
    assert result.code == 7
    assert "not ready after 0 s" in result.told


def test_wait_without_a_broker(kl: Kl) -> None:
    result = kl("cluster", "wait", "--timeout", "500ms", "-b", "127.0.0.1:1")
    assert result.code == 7
    assert "not ready after 0.5 s: cannot connect to 127.0.0.1:1" in result.told


def test_wait_for_the_node_of_this_environment(kl: Kl, servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKALITE_LISTENERS", f"0.0.0.0:{servers.rpartition(':')[2]}")
    monkeypatch.setenv("KAFKALITE_NODE_ID", "1")
    assert kl("cluster", "wait", "--this-node").code == 0
    monkeypatch.setenv("KAFKALITE_NODE_ID", "2")
    result = kl("cluster", "wait", "--this-node", "--timeout", "300ms")
    assert result.code == 7
    assert "broker 2 not registered" in result.told


def test_elect(at: Kl, topic: str) -> None:
    result = at("cluster", "elect")
    assert result.code == 0, result.told
    assert "nothing to do" in result.told
    result = at("cluster", "elect", "shown-0", "-o", "json")
    assert result.code == 0
    assert json.loads(result.out) == [{"name": "shown-0", "leader": 1, "result": "leads already"}]


def test_elect_refuses_unknown_names(at: Kl, topic: str) -> None:
    assert at("cluster", "elect", "nothing").code == 4
    result = at("cluster", "elect", "shown-7")
    assert result.code == 4
    assert "its partitions are 0 to 2" in result.told
    assert at("cluster", "elect", "--unclean").code == 2
    asked = at("cluster", "elect", "--unclean", "shown-0", stdin=b"n\n")
    assert asked.code == 1
    assert "Acknowledged records may be lost" in asked.told


def test_shutdown_needs_the_secret(at: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKALITE_CLUSTER_SECRET", raising=False)
    without = at("cluster", "shutdown", "1")
    assert without.code == 2
    assert "--secret-file" in without.told
    empty = tmp_path / "node.toml"
    empty.write_text('"node.id" = 1\n')
    assert "has no cluster.secret" in at("cluster", "shutdown", "1", "--secret-file", str(empty)).told
    for text in ('"cluster.secret" = "not the secret of it"\n', "not the secret of it\n"):
        empty.write_text(text)
        refused = at("cluster", "shutdown", "1", "--secret-file", str(empty))
        assert "CLUSTER_AUTHORIZATION_FAILED" in refused.told or "not part of a cluster" in refused.told
    assert at("cluster", "status").code == 0


def test_a_wrong_secret_is_named_with_its_source(
    kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "secret").write_text("not the secret of it\n")
    with SyncCluster(transport="tcp", cluster_secret="the secret of this cluster") as cluster:
        command = ("cluster", "shutdown", "1", "-b", cluster.bootstrap_servers)
        monkeypatch.setenv("KAFKALITE_CLUSTER_SECRET", "not the secret of it")
        for more, source in ((("--secret-file", str(file)), str(file)), ((), "KAFKALITE_CLUSTER_SECRET")):
            refused = kl(*command, *more)
            assert refused.code == 6, refused.told
            assert f"the secret in {source} is not the cluster.secret of node 1" in refused.told
            assert "not the secret" not in refused.told


def test_shutdown_of_an_unknown_node(at: Kl) -> None:
    result = at("cluster", "shutdown", "9")
    assert result.code == 4
    assert "the brokers are 1" in result.told


def test_commands_without_a_cluster(kl: Kl) -> None:
    for command in (["cluster", "status"], ["metadata", "ls"], ["metadata", "quorum"]):
        result = kl(*command, "-b", "127.0.0.1:1", "--timeout", "2s")
        assert result.code == 3
        assert "Traceback" not in result.told


# --- metadata --------------------------------------------------------------------------------------


def test_metadata_is_a_tree(at: Kl, topic: str) -> None:
    assert "/topics\n" in at("metadata", "ls").text
    assert at("metadata", "ls", "/topics/").text == "/topics/shown\n"
    assert at("metadata", "ls", "topics/shown").text.splitlines()[0].startswith("/topics/shown/")
    value = json.loads(at("metadata", "cat", "/topics/shown/0").out)
    assert (value["leader"], value["isr"]) == (1, [1])
    missing = at("metadata", "cat", "/topics/nothing")
    assert missing.code == 4
    assert "there is nothing at /topics/nothing" in missing.told


def test_metadata_quorum(at: Kl) -> None:
    result = at("metadata", "quorum", "--check")
    assert result.code == 0
    assert "leader     node 1" in result.text
    assert json.loads(at("metadata", "quorum", "-o", "json").out)["nodes"][0]["role"] == "leader"


def test_metadata_tail_of_an_idle_broker_prints_nothing(at: Kl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.2)
    done = at("metadata", "tail", "/topics", "--timeout", "1500ms")
    assert (done.code, done.text) == (7, "")
    assert done.told.splitlines()[0] == "kl: gave up after 1.5 s"


def test_metadata_tail_follows_changes(spawn: Any, at: Kl, servers: str) -> None:
    process = spawn("metadata", "tail", "/topics", "-n", "2", KL_BOOTSTRAP_SERVERS=servers)
    for number in range(300):  # the tail may begin after our first topics
        assert at("topic", "create", f"new-{number}").code == 0
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            break
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    lines = out.decode().splitlines()
    assert len(lines) == 2
    assert " + /topics/new-" in lines[0]


def test_r52_if_all_replicas_are_damaged_the_status_names_their_ends_and_the_commands() -> None:
    replicas = [RecoveringReplica(node_id, "damaged", 7, 60 + node_id) for node_id in (1, 2, 3)]
    text = describe_recovery(RecoveringPartition("t", 0, -1, 1200, [], replicas))
    assert "1 damaged, ends at 61, 2 damaged, ends at 62, 3 damaged, ends at 63" in text
    assert text.index("kl log accept-loss") < text.index("kl cluster elect --unclean")
    sound = RecoveringReplica(3, "reported", 7, 63)
    assert "accept-loss" not in describe_recovery(
        RecoveringPartition("t", 0, -1, 1200, [], [*replicas[:2], sound])
    )
