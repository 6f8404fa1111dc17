"""Profile ``spark`` of the real docker-compose.yml on a real engine: master, two workers, one pipeline."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

LIMIT_S = 300
PARTITIONS = 4
RECORDS = 2_000
PIPELINE = """
[pipeline]
name = "shout"
trigger = "available-now"

[source]
topic = "said"
options = { startingOffsets = "earliest", maxOffsetsPerTrigger = "500" }
decode = "none"

[[transform]]
name = "shouted"
sql = "SELECT key, upper(string(value)) AS value FROM source"

[sink]
topic = "shouted"
key = "key"
value = "value"
"""


@pytest.fixture(autouse=True)
def _bounded_in_time() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def compose(
    repository: Path, base_image: ModuleType, engine: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The nodes and the Spark cluster, up, and a pipeline to be submitted; all gone afterwards."""
    engine.skip_unless_there(base_image)
    pipelines = tmp_path_factory.mktemp("pipelines")
    pipelines.chmod(0o755)  # the containers run as somebody else
    (pipelines / "shout.toml").write_text(PIPELINE)
    base = base_image.ensure(base_image.SPARK)
    environment = {
        "KAFKALITE_SPARK_BASE_IMAGE": base,
        "KAFKALITE_SPARK_IMAGE": "kafkalite-spark:test",
        "KAFKALITE_PIPELINES": str(pipelines),
        "KAFKALITE_PIPELINE": "shout.toml",
    }
    running = engine.Compose(repository, base, environment, profile="spark")
    for service in ("node1", "spark-master"):
        running("build", service, limit_s=engine.BUILD_LIMIT_S)
    try:
        running("up", "-d", "node1", "node2", "node3", "spark-worker1", "spark-worker2")
        yield running
    finally:
        print(running("logs", "--no-color", "--tail", "60", check=False))
        running("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


def test_a_pipeline_runs_on_the_workers(compose: Any, engine: ModuleType) -> None:
    kl = engine.kl
    kl("cluster", "wait", "--brokers", "3", "--whole", "--timeout", "60s")
    for topic in ("said", "shouted"):
        kl("topic", "create", topic, "-p", str(PARTITIONS))
    for partition in range(PARTITIONS):
        words = b"".join(b"word %d\n" % number for number in range(partition, RECORDS, PARTITIONS))
        kl("produce", "said", "-q", "-p", str(partition), stdin=words)

    compose("up", "--no-color", "pipeline", limit_s=240)
    assert compose.inspect("pipeline")["ExitCode"] == 0
    shouted = kl("consume", "shouted", "-e", "-X", "isolation.level=read_committed").splitlines()
    assert sorted(shouted) == sorted(f"WORD {number}" for number in range(RECORDS))
    for worker in ("spark-worker1", "spark-worker2"):
        assert "launch executor app-" in compose("logs", "--no-color", worker), f"{worker} had nothing to do"
    lag = json.loads(kl("group", "lag", "shout", "-o", "json"))
    assert [row["lag"] for row in lag] == [0] * PARTITIONS
