"""The real docker-compose.yml on a real engine: up, produce from outside, stop a node, go on, start it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

ADDRESSES = ("127.0.0.1:19091", "127.0.0.1:19092", "127.0.0.1:19093")
TOPIC = "purchases"
PARTITIONS = 3
BUILD_LIMIT_S = 600
LIMIT_S = 100


def _why_not(base_image: ModuleType) -> str:
    """Why this can't be tested here; empty when it can."""
    for tool in ("docker", "docker-compose"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    if subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode != 0:
        return "no docker engine answers"
    missing: list[str] = base_image.missing_tools()
    if missing:
        return f"without {', '.join(missing)} no base image can be made (apt-get install debootstrap)"
    return ""


class Compose:
    """The project under a name of its own, so that nobody's cluster is touched."""

    def __init__(self, repository: Path, base: str) -> None:
        self.name = f"kafkalite-test-{os.getpid()}"
        self._command = ["docker-compose", "-p", self.name, "-f", str(repository / "docker-compose.yml")]
        self._environment = os.environ | {
            "KAFKALITE_BASE_IMAGE": base,
            "KAFKALITE_IMAGE": "kafkalite:test",
            "DOCKER_BUILDKIT": "0",  # the base image exists nowhere but in this engine
        }

    def __call__(self, *arguments: str, limit_s: float = LIMIT_S, check: bool = True) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=self._environment,
        )
        if check:
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def inspect(self, service: str) -> dict[str, object]:
        container = self("ps", "-q", service).strip()
        shown = subprocess.run(
            ["docker", "inspect", "--format", "{{json .State}}", container],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        state: dict[str, object] = json.loads(shown.stdout)
        return state


@pytest.fixture(scope="module")
def compose(repository: Path, base_image: ModuleType) -> Iterator[Compose]:
    """The cluster, up; gone afterwards with its volumes. Building images takes longer than a test may."""
    reason = _why_not(base_image)
    if reason:
        print(f"\n{'#' * 80}\n# docker-compose.yml IS NOT TESTED: {reason}\n{'#' * 80}", file=sys.stderr)
        pytest.skip(f"docker-compose.yml is not tested: {reason}")
    running = Compose(repository, base_image.ensure())
    running("build", "node1", limit_s=BUILD_LIMIT_S)
    try:
        running("up", "-d", limit_s=BUILD_LIMIT_S)
        yield running
    finally:
        log = running("logs", "--no-color", "--tail", "50", check=False)
        running("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
        print(log)


def kl(*arguments: str, stdin: bytes = b"", servers: str = ",".join(ADDRESSES)) -> str:
    """kl on the host."""
    done = subprocess.run(
        [sys.executable, "-m", "kafkalite", *arguments],
        input=stdin,
        capture_output=True,
        timeout=LIMIT_S,
        env=os.environ | {"KL_BOOTSTRAP_SERVERS": servers},
    )
    assert done.returncode == 0, (arguments, done.stdout.decode()[-2000:], done.stderr.decode()[-2000:])
    return done.stdout.decode()


def sell(first: int, count: int) -> None:
    """Purchases first … first + count - 1, on every partition, each acknowledged by all in sync."""
    lines = b"".join(b"%d\n" % number for number in range(first, first + count))
    kl("produce", TOPIC, "-q", stdin=lines)


def sold() -> list[int]:
    return sorted(map(int, kl("consume", TOPIC, "-e").split()))


def leaders() -> list[int | None]:
    (described,) = json.loads(kl("topic", "describe", TOPIC, "-o", "json"))
    return [partition["leader"] for partition in described["partitions"]]


def test_the_cluster_serves_the_host_and_its_neighbours_and_outlives_a_node(compose: Compose) -> None:
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    assert [row["address"] for row in json.loads(kl("cluster", "brokers", "-o", "json"))] == list(ADDRESSES)
    kl("topic", "create", TOPIC, "-p", str(PARTITIONS))
    kl("cluster", "wait", "--topic", TOPIC, "--whole")
    assert sorted(leaders()) == [1, 2, 3]

    sell(0, 300)
    inside = compose("run", "--rm", "-T", "kl", "consume", TOPIC, "-e")
    assert sorted(map(int, inside.split())) == list(range(300))
    brokers = json.loads(compose("run", "--rm", "-T", "kl", "cluster", "brokers", "-o", "json"))
    assert [row["address"] for row in brokers] == ["node1:9092", "node2:9092", "node3:9092"]

    compose("stop", "node2")
    assert compose.inspect("node2")["ExitCode"] == 0, "the stop signal is a controlled shutdown"
    assert 2 not in leaders()
    sell(300, 300)
    assert sold() == list(range(600))

    compose("start", "node2")
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    sell(600, 300)
    assert sold() == list(range(900))


def test_the_nodes_are_healthy_and_not_root(compose: Compose) -> None:
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    assert compose("exec", "-T", "node1", "id", "-u").strip() == "10001"
    for number in (1, 2, 3):
        compose(
            "exec", "-T", f"node{number}", "kl", "cluster", "wait", "--this-node", "-q", "--timeout", "10s"
        )
        health = compose.inspect(f"node{number}").get("Health")
        assert isinstance(health, dict)
        assert health["Status"] in {"healthy", "starting"}, health
