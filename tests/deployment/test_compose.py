"""The real docker-compose.yml on a real engine: up, produce from outside, stop a node, go on, start it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

TOPIC = "purchases"
PARTITIONS = 3

Compose = Any
Kl = Callable[..., str]


@pytest.fixture(scope="module")
def compose(repository: Path, base_image: ModuleType, engine: ModuleType) -> Iterator[Compose]:
    """The cluster, up; gone afterwards with its volumes. Building images takes longer than a test may."""
    engine.skip_unless_there(base_image)
    running = engine.Compose(repository, base_image.ensure())
    running("build", "node1", limit_s=engine.BUILD_LIMIT_S)
    try:
        running("up", "-d", limit_s=engine.BUILD_LIMIT_S)
        yield running
    finally:
        log = running("logs", "--no-color", "--tail", "50", check=False)
        running("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
        print(log)


@pytest.fixture
def kl(engine: ModuleType) -> Kl:
    run: Kl = engine.kl
    return run


def sell(kl: Kl, first: int, count: int) -> None:
    """Purchases first … first + count - 1, on every partition, each acknowledged by all in sync."""
    lines = b"".join(b"%d\n" % number for number in range(first, first + count))
    kl("produce", TOPIC, "-q", stdin=lines)


def sold(kl: Kl) -> list[int]:
    return sorted(map(int, kl("consume", TOPIC, "-e").split()))


def leaders(kl: Kl) -> list[int | None]:
    (described,) = json.loads(kl("topic", "describe", TOPIC, "-o", "json"))
    return [partition["leader"] for partition in described["partitions"]]


def test_the_cluster_serves_the_host_and_its_neighbours_and_outlives_a_node(
    compose: Compose, kl: Kl, engine: ModuleType
) -> None:
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    assert [row["address"] for row in json.loads(kl("cluster", "brokers", "-o", "json"))] == list(
        engine.ADDRESSES
    )
    kl("topic", "create", TOPIC, "-p", str(PARTITIONS))
    kl("cluster", "wait", "--topic", TOPIC, "--whole")
    assert sorted(leaders(kl)) == [1, 2, 3]

    sell(kl, 0, 300)
    inside = compose("run", "--rm", "-T", "kl", "consume", TOPIC, "-e")
    assert sorted(map(int, inside.split())) == list(range(300))
    brokers = json.loads(compose("run", "--rm", "-T", "kl", "cluster", "brokers", "-o", "json"))
    assert [row["address"] for row in brokers] == ["node1:9092", "node2:9092", "node3:9092"]

    compose("stop", "node2")
    assert compose.inspect("node2")["ExitCode"] == 0, "the stop signal is a controlled shutdown"
    assert 2 not in leaders(kl)
    sell(kl, 300, 300)
    assert sold(kl) == list(range(600))

    compose("start", "node2")
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    sell(kl, 600, 300)
    assert sold(kl) == list(range(900))


def test_the_nodes_are_healthy_and_not_root(compose: Compose, kl: Kl) -> None:
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    assert compose("exec", "-T", "node1", "id", "-u").strip() == "10001"
    for number in (1, 2, 3):
        compose(
            "exec", "-T", f"node{number}", "kl", "cluster", "wait", "--this-node", "-q", "--timeout", "10s"
        )
        health = compose.inspect(f"node{number}").get("Health")
        assert isinstance(health, dict)
        assert health["Status"] in {"healthy", "starting"}, health
