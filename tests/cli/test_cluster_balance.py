"""kl cluster balance: what it reads from a cluster, its output, and that it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.cli.cluster_load import bytes_written, hosts_of, placed
from kafkalite.client.admin.cluster_health import ClusterView, PlacedPartition
from kafkalite.metadata.balance import Host
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.admin import LogDirPartition
from kafkalite.protocol.messages.metadata import BrokerDescription, PartitionMetadata
from kafkalite.testing import SyncCluster

Kl = Callable[..., Any]


def log(size: int, *, start: int = 0, end: int = 0, segments: int = 1, number: int = 0) -> LogDirPartition:
    return LogDirPartition("t", number, size, segments, start, end, None)


def view(*leaders: int, fenced: tuple[int, ...] = (), leaving: tuple[int, ...] = ()) -> ClusterView:
    brokers = tuple(
        BrokerDescription(n, f"host{n}:9092", "ab"[n % 2], n, n in fenced, n in leaving, 0) for n in (1, 2, 3)
    )
    partitions = tuple(
        PlacedPartition(
            TopicPartition("t", number), PartitionMetadata(0, number, leader, 5, 7, [2, 1], [2], [])
        )
        for number, leader in enumerate(leaders)
    )
    return ClusterView("c", 1, 10, brokers, partitions, 1)


def test_sizes_and_rates_are_those_of_the_leaders() -> None:
    before = {(1, "t", 0): log(100), (2, "t", 0): log(90), (1, "t", 1): log(7, number=1)}
    after = {(1, "t", 0): log(600), (2, "t", 0): log(90), (1, "t", 1): log(7, number=1)}
    found = placed(view(1, -1), before, after, 2.0)
    assert [(each.replicas, each.leader, each.size_bytes, each.rate) for each in found] == [
        ((2, 1), 1, 600, 250.0),
        ((2, 1), -1, 7, 0.0),
    ]
    assert {each.rate for each in placed(view(1, -1), before, after, 0.0)} == {0.0}


def test_replicas_in_sync_are_those_on_live_brokers() -> None:
    assert [each.in_sync for each in placed(view(1), {}, {}, 0.0)] == [(2,)]
    assert [each.in_sync for each in placed(view(1, fenced=(2,)), {}, {}, 0.0)] == [()]


def test_brokers_that_are_fenced_or_leave_are_not_live() -> None:
    assert hosts_of(view(fenced=(1,), leaving=(3,))) == [
        Host(1, "b", is_live=False),
        Host(2, "a"),
        Host(3, "b", is_live=False),
    ]


@pytest.mark.parametrize(
    ("before", "after", "written"),
    [
        (log(100, end=10), log(150, end=12), 50),
        (log(100, end=10), log(100, end=10), 0),
        # Retention removed a segment: 10 of the 40 offsets are new.
        (log(1_000, end=50, segments=3), log(800, start=20, end=60, segments=2), 200),
        # Compaction halved the log meanwhile.
        (log(1_000, end=50, segments=2), log(500, end=100, segments=2), 250),
        # Everything is new.
        (log(100, end=10), log(40, start=20, end=30), 40),
        (log(100, end=10), log(0, start=20, end=20), 0),
    ],
)
def test_bytes_written_do_not_depend_on_removed_records(
    before: LogDirPartition, after: LogDirPartition, written: float
) -> None:
    assert bytes_written(before, after) == written


def test_a_balanced_cluster_has_nothing_to_move(kl: Kl, servers: str) -> None:
    result = kl("cluster", "balance", "-b", servers)
    assert result.code == 0
    assert "nothing to move" in result.told
    assert kl("cluster", "balance", "-b", servers, "-o", "name").text == ""


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--leaders", "--drain", "1"), 2, "--leaders moves no replicas"),
        (("--by", "rates", "--sample", "0s"), 2, "--by rates needs a --sample above 0"),
        (("--drain", "9"), 4, "there is no broker 9"),
    ],
)
def test_misuse_is_explained(kl: Kl, servers: str, arguments: tuple[str, ...], code: int, told: str) -> None:
    result = kl("cluster", "balance", "-b", servers, *arguments)
    assert result.code == code, result.told
    assert told in result.told


def test_it_shows_what_would_move_and_moves_nothing(kl: Kl) -> None:
    with SyncCluster(brokers=3, transport="tcp") as cluster:
        cluster.create_topic("t", partitions=6, replication_factor=1)
        servers = cluster.bootstrap_servers
        by_leader: dict[int, list[int]] = {}
        for number in range(6):
            by_leader.setdefault(cluster.leader("t", number), []).append(number)
        first = min(by_leader)
        for number in by_leader[first]:  # one broker has two large partitions, the others have empty ones
            cluster.produce("t", [bytes(100_000)] * 3, partition=number)
        command = ("cluster", "balance", "-b", servers, "--by", "bytes", "--throttle", "100000")
        table = kl(*command)
        assert table.code == 0, table.told
        assert "NEW REPLICAS" in table.text
        assert "COPIED IN" in table.text
        assert "1 partition to change, 293.1 KiB to copy, 3.0 s at 97.7 KiB/s a broker" in table.text
        document = json.loads(kl(*command, "-o", "json").out)
        assert [move["replicas"] for move in document["moves"]] == [[first]]
        assert document["seconds"] == pytest.approx(3.0, rel=0.01)
        assert document["brokers"][0]["before"]["rate"] is None
        assert sum(host["bytes_in"] for host in document["brokers"]) == document["bytes_to_copy"]
        drained = json.loads(kl("cluster", "balance", "--drain", str(first), "-b", servers, "-o", "json").out)
        assert {tuple(move["replicas"]) for move in drained["moves"]} == {(first,)}
        described = json.loads(kl("topic", "describe", "t", "-b", servers, "-o", "json").out)[0]
        assert {each["partition_epoch"] for each in described["partitions"]} == {0}


def test_bytes_that_clients_write_are_spread_over_the_leaders(kl: Kl) -> None:
    """B17: producers write most bytes to partitions that one broker leads; then the leaders are balanced."""
    with SyncCluster(brokers=3, transport="tcp") as cluster:
        cluster.create_topic("t", partitions=12, replication_factor=3)
        servers = cluster.bootstrap_servers
        hot = cluster.leader("t", 0)
        sizes = {n: 50_000 if cluster.leader("t", n) == hot else 5_000 for n in range(12)}

        def written() -> dict[int, int]:
            """Produce to each partition, and return the bytes that each broker appended as a leader."""
            counts = {node_id: cluster.statistics(node_id).appended_bytes for node_id in (1, 2, 3)}
            for number, size in sizes.items():
                cluster.produce("t", [bytes(size)], partition=number)
            return {
                node_id: cluster.statistics(node_id).appended_bytes - count
                for node_id, count in counts.items()
            }

        before = written()
        assert before[hot] > 200_000
        command = ("cluster", "balance", "--by", "bytes", "--leaders", "--apply", "-b", servers)
        declined = kl(*command, stdin=b"n\n")
        assert declined.code != 0
        assert written() == before
        applied = kl(*command, "-y", "-o", "json")
        assert applied.code == 0, applied.told
        assert json.loads(applied.out)["bytes_to_copy"] == 0
        after = written()
        # Of the four partitions of 50,000 bytes, one broker leads two, and the others share the rest.
        assert sum(after.values()) == sum(before.values())
        assert max(after.values()) < 105_000
        assert min(after.values()) > 50_000


def test_applied_moves_reach_the_stated_distribution(kl: Kl) -> None:
    with SyncCluster(brokers=3, transport="tcp") as cluster:
        cluster.create_topic("t", partitions=6, replication_factor=1)
        servers = cluster.bootstrap_servers
        first = cluster.leader("t", 0)
        for number in range(6):
            if cluster.leader("t", number) == first:
                cluster.produce("t", [bytes(100_000)] * 3, partition=number)
        command = ("cluster", "balance", "--by", "bytes", "-b", servers)
        applied = kl(*command, "--apply", "--yes", "-o", "json", "--throttle", "100000000")
        assert applied.code == 0, applied.told
        assert "the throttle is removed" in applied.told
        document = json.loads(applied.out)
        assert document["moves"]
        for move in document["moves"]:
            assert [cluster.leader("t", move["partition"])] == move["new_replicas"]
        assert "nothing to move" in kl(*command).told
        assert len(cluster.records("t")) == 6
