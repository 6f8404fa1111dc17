"""kl cluster reassign, kl cluster decommission, kl topic alter -r."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafkalite.cli import cluster_reassign
from kafkalite.cli.cluster_reassign import _parsed
from kafkalite.cli.exit_codes import UsageError
from kafkalite.model import TopicPartition
from kafkalite.testing import SyncCluster

Kl = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=3, controllers=1, transport="tcp", broker_session_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
def at(kl: Kl, cluster: SyncCluster) -> Callable[..., Any]:
    return lambda *words, **more: kl(*words, "-b", cluster.bootstrap_servers, **more)


def replicas(at: Kl, topic: str) -> list[list[int]]:
    (described,) = json.loads(at("topic", "describe", topic, "-o", "json").out)
    return [each["replicas"] for each in described["partitions"]]


def test_a_plan_is_applied(at: Kl, cluster: SyncCluster, tmp_path: Any) -> None:
    cluster.create_topic("planned", partitions=4, replication_factor=1)
    plan = at("cluster", "reassign", "plan", "planned", "--brokers", "2,3")
    assert plan.code == 0, plan.told
    moves = json.loads(plan.out)["partitions"]
    assert moves
    assert all(set(move["replicas"]) <= {2, 3} for move in moves)
    file = tmp_path / "plan.json"
    file.write_bytes(plan.out)
    applied = at("cluster", "reassign", "apply", str(file), "--wait")
    assert applied.code == 0, applied.told
    assert f"{len(moves)} reassignment" in applied.text
    assert "0 partitions left to move" in applied.told
    assert {node_id for (node_id,) in replicas(at, "planned")} <= {2, 3}
    nothing = at("cluster", "reassign", "status")
    assert (nothing.code, nothing.text) == (0, "")
    assert "nothing is being moved" in nothing.told
    assert at("cluster", "reassign", "apply", "-", stdin=b"[]").code == 2


def test_a_topic_gets_more_replicas_and_fewer_only_on_request(at: Kl, cluster: SyncCluster) -> None:
    cluster.create_topic("grows", partitions=2, replication_factor=1)
    assert at("topic", "alter", "grows", "-r", "3").code == 0
    assert at("cluster", "reassign", "apply", "-", "--wait", stdin=b'{"partitions": []}').code == 0
    assert [sorted(each) for each in replicas(at, "grows")] == [[1, 2, 3], [1, 2, 3]]
    assert at("topic", "alter", "grows", "-r", "2").code == 2
    assert at("topic", "alter", "grows", "-r", "2", "--allow-replication-factor-change").code == 0
    assert [len(each) for each in replicas(at, "grows")] == [2, 2]
    assert at("topic", "alter", "grows", "-r", "9").code == 2


def test_a_move_is_cancelled(at: Kl, cluster: SyncCluster) -> None:
    cluster.create_topic("stays", partitions=1, replication_factor=1)
    ((home,),) = replicas(at, "stays")
    away = home % 3 + 1
    cluster.stop(away)
    plan = json.dumps({"partitions": [{"topic": "stays", "partition": 0, "replicas": [away]}]})
    assert at("cluster", "reassign", "apply", "-", stdin=plan.encode()).code == 0
    (row,) = json.loads(at("cluster", "reassign", "status", "-o", "json").out)
    assert (row["name"], row["adding_replicas"], row["removing_replicas"]) == ("stays-0", [away], [home])
    assert at("cluster", "reassign", "cancel").code == 2
    assert at("cluster", "reassign", "cancel", "stays").text == "1 reassignment accepted\n"
    assert replicas(at, "stays") == [[home]]
    assert at("cluster", "reassign", "cancel", "--all").text == "nothing to move\n"
    cluster.start(away)


def test_a_broker_is_decommissioned(kl: Kl) -> None:
    with SyncCluster(brokers=3, controllers=1, transport="tcp") as cluster:
        cluster.create_topic("t", partitions=6, replication_factor=2)
        servers = ("-b", cluster.bootstrap_servers)
        dry = kl("cluster", "decommission", "3", "--dry-run", *servers)
        assert json.loads(dry.out)["partitions"]
        asked = kl("cluster", "decommission", "3", *servers, stdin=b"n\n")
        assert asked.code == 1
        assert "remove it for ever?" in asked.told
        done = kl("cluster", "decommission", "3", "-y", "--throttle", "100000000", *servers)
        assert done.code == 0, done.told
        assert "the throttle is removed" in done.told
        assert throttles(lambda *words: kl(*words, *servers), "t", 1) == {}
        assert done.text.endswith("node 3: removed; its id is retired\n")
        assert all(3 not in each for each in replicas(lambda *words: kl(*words, *servers), "t"))
        assert kl("cluster", "decommission", "3", "-y", *servers).code == 4


def test_a_broker_with_the_last_copy_is_not_decommissioned(kl: Kl) -> None:
    """Nothing can be copied from a node that is down, so its id must not be retired."""
    with SyncCluster(brokers=3, controllers=1, transport="tcp") as cluster:
        cluster.create_topic("t", partitions=6, replication_factor=1)
        servers = ("-b", cluster.bootstrap_servers)
        lost = [f"t-{number}" for number in range(6) if cluster.leader("t", number) == 3]
        cluster.stop(3)
        for option in ("-y", "--dry-run"):
            refused = kl("cluster", "decommission", "3", option, *servers)
            assert (refused.code, refused.text) == (9, "")
            assert f"node 3 may have the last copy of {', '.join(lost)}: without a leader" in refused.told
        assert kl("cluster", "reassign", "status", "-o", "name", *servers).text == ""
        plan = kl("cluster", "reassign", "plan", "t", "--brokers", "1,2", *servers)
        assert f"nothing can be copied, so these stay: {', '.join(lost)}" in plan.told


def test_a_replica_that_came_meanwhile_stops_a_decommission(
    at: Kl, cluster: SyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_topic("returns", partitions=1, replication_factor=1)
    ((home,),) = replicas(at, "returns")
    finished = cluster_reassign.finished

    async def finished_and_undone(client: Any, partitions: Any) -> None:
        await finished(client, partitions)
        await cluster_reassign.alter(client, {TopicPartition("returns", 0): [home]})
        await finished(client)

    monkeypatch.setattr(cluster_reassign, "finished", finished_and_undone)
    monkeypatch.setattr(cluster_reassign, "LAG_S", 0.0)
    failed = at("cluster", "decommission", str(home), "-y")
    assert failed.code == 9, failed.told
    assert f"node {home} still has replicas of returns-0: a move was cancelled" in failed.told
    assert f"hint: run 'kl cluster decommission {home}' again" in failed.told


def test_nothing_is_planned_on_the_replicas_of_a_move(at: Kl, cluster: SyncCluster) -> None:
    """They are those before and after together: a plan would count, drain or keep the wrong ones."""
    cluster.create_topic("busy", partitions=1, replication_factor=1)
    ((home,),) = replicas(at, "busy")
    away, other = home % 3 + 1, (home + 1) % 3 + 1
    cluster.stop(away)
    target = json.dumps({"partitions": [{"topic": "busy", "partition": 0, "replicas": [away]}]})
    assert at("cluster", "reassign", "apply", "-", stdin=target.encode()).code == 0
    for command in (
        ("topic", "alter", "busy", "-r", "1"),
        ("topic", "alter", "busy", "-r", "2"),
        ("cluster", "reassign", "plan", "busy", "--brokers", str(other)),
        ("cluster", "decommission", str(home), "-y"),
        ("cluster", "balance", "--apply", "-y"),
    ):
        refused = at(*command)
        assert (refused.code, refused.text) == (9, ""), refused.told
        assert "busy-0: being moved already; nothing was changed" in refused.told
    dry = at("cluster", "balance")
    assert dry.code == 0
    assert "busy-0: being moved now, and planned with the replicas before and after together" in dry.told
    assert at("cluster", "reassign", "cancel", "busy").code == 0
    assert at("cluster", "reassign", "plan", "busy", "--brokers", str(other)).code == 0
    cluster.start(away)


def test_a_throttle_lasts_as_long_as_its_moves(at: Kl, cluster: SyncCluster) -> None:
    cluster.create_topic("slow", partitions=1, replication_factor=1)
    ((home,),) = replicas(at, "slow")
    away = home % 3 + 1
    plan = json.dumps({"partitions": [{"topic": "slow", "partition": 0, "replicas": [away]}]}).encode()
    cluster.stop(away)
    applied = at("cluster", "reassign", "apply", "-", "--throttle", "1000000", stdin=plan)
    assert applied.code == 0, applied.told
    assert "'kl cluster reassign status' removes the throttle" in applied.told
    assert throttles(at, "slow", home) == {
        "leader.replication.throttled.replicas": f"0:{home}",
        "follower.replication.throttled.replicas": f"0:{away}",
        "leader.replication.throttled.rate": "1000000",
        "follower.replication.throttled.rate": "1000000",
    }
    assert "at most 976.6 KiB/s of moves" in at("cluster", "reassign", "status").told
    cancelled = at("cluster", "reassign", "cancel", "slow")
    assert "the throttle is removed" in cancelled.told
    assert throttles(at, "slow", home) == {}
    assert at("cluster", "reassign", "apply", "-", "--throttle", "1000000", stdin=plan).code == 0
    cluster.start(away)
    assert at("cluster", "reassign", "apply", "-", "--wait", stdin=plan).code == 0
    assert throttles(at, "slow", home) == {}


def test_status_removes_the_throttle_of_completed_moves(at: Kl, cluster: SyncCluster) -> None:
    cluster.create_topic("done", partitions=1, replication_factor=1)
    at("config", "set", "topic", "done", "leader.replication.throttled.replicas=*")
    assert "the throttle" not in at("cluster", "reassign", "status", "--preserve-throttles").told
    assert throttles(at, "done", 1)
    assert "the throttle is removed" in at("cluster", "reassign", "status").told
    assert throttles(at, "done", 1) == {}
    assert "the throttle" not in at("cluster", "reassign", "status").told


def test_a_refused_move_leaves_no_throttle(at: Kl, cluster: SyncCluster) -> None:
    cluster.create_topic("refused", partitions=1, replication_factor=1)
    plan = json.dumps({"partitions": [{"topic": "refused", "partition": 0, "replicas": [1, 2]}]}).encode()
    assert at("cluster", "reassign", "apply", "-", "--throttle", "1000", stdin=plan).code != 0
    assert throttles(at, "refused", 1) == {}


def throttles(at: Kl, topic: str, node_id: int) -> dict[str, str]:
    """Return the throttles that are set for a topic and a broker, as {option: value}."""
    found = {}
    for words in (("topic", topic), ("broker", str(node_id))):
        shown = json.loads(at("config", "show", *words, "-o", "json").out)
        found |= {each["name"]: each["value"] for each in shown if ".throttled." in each["name"]}
    return found


def test_replicas_are_changed_for_topics_not_partitions(at: Kl, cluster: SyncCluster) -> None:
    cluster.create_topic("parts", partitions=2, replication_factor=1)
    refused = at("topic", "alter", "parts-0", "-r", "2")
    assert refused.code == 4
    assert "there is no topic 'parts-0'" in refused.told
    assert [len(each) for each in replicas(at, "parts")] == [1, 1]


def test_plans_of_other_tools_are_read() -> None:
    kafka = {"version": 1, "partitions": [{"topic": "t", "partition": 2, "replicas": [1, 2]}]}
    balance = {"moves": [{"topic": "t", "partition": 2, "replicas": [3, 2], "new_replicas": [1, 2]}]}
    for document in (kafka, balance):
        assert _parsed(json.dumps(document)) == {TopicPartition("t", 2): [1, 2]}
    for text in ("", "[]", "{}", '{"partitions": [{}]}'):
        with pytest.raises(UsageError, match="this is no plan"):
            _parsed(text)
