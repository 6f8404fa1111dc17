"""The same end-to-end copy under each kind of master, with a driver each; and its memory use."""

from __future__ import annotations

import faulthandler
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kafkalite.testing.sync_cluster import SyncCluster
from proof.spark import topics
from proof.spark.drivers import Driver
from proof.spark.memory import measure
from proof.spark.standalone import StandaloneCluster
from proof.spark.verdict import check_copy
from sparkbridge.local import fast_start

# Each test starts a driver: .ci/run runs them with make spark-deployments.
pytestmark = [pytest.mark.deployment, pytest.mark.slow]

LIMIT_S = 280
PARTITIONS = 2
SETTINGS = {"spark.log.level": "OFF", "spark.driver.memory": "512m", "spark.executor.memory": "512m"}


@pytest.fixture(autouse=True)
def _bounded_in_time() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def archive() -> Path:
    """The class archive, with which the JVMs of this module start."""
    return fast_start.make_class_archive()


def jvms_of(process_id: int) -> list[Path]:
    """Return the /proc directories of the JVMs in a process group."""
    found: list[Path] = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, fields = (directory / "stat").read_text().rpartition(") ")
            if name.endswith("(java") and int(fields.split()[2]) == process_id:
                found.append(directory)
    return found


async def copy_twice(broker: SyncCluster, directory: Path, driver: Driver, archive: Path) -> None:
    """Copy the existing records, then later ones from the checkpoint; the output must be f(input).

    All JVMs that the driver starts must use the archive.
    """
    source, target = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("in", "out"))
    servers = broker.address
    for topic in (source, target):
        broker.create_topic(topic, PARTITIONS)
    order: dict[str, Any] = {
        "format": "kafkalite",
        "source": {
            "kafka.bootstrap.servers": servers,
            "subscribe": source,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "500",
            "minPartitions": "3",
        },
        "sink": {"kafka.bootstrap.servers": servers, "topic": target},
        "checkpoint": str(directory / "checkpoint"),
        "until": "available-now",
    }
    await driver.start()
    try:
        for first in (0, 400):
            await topics.fill(servers, source, PARTITIONS, 400, first=first)
            answer = await driver.run(order)
            assert answer.startswith("ended"), f"{answer}\n{driver.tail()}"
        jvms = jvms_of(driver.process_id)
        assert jvms
        assert all(str(archive) in (jvm / "maps").read_text() for jvm in jvms)
    finally:
        await driver.close()
    inputs = await topics.read_all(servers, source, PARTITIONS)
    assert len(inputs) == 800 * PARTITIONS
    assert check_copy(inputs, await topics.read_all(servers, target, PARTITIONS)) == []
    assert await topics.open_transactions(servers, target, PARTITIONS, 5.0) == []


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
async def test_exactly_once_on_this_machine(
    broker: SyncCluster, tmp_path: Path, archive: Path, master: str
) -> None:
    settings: Mapping[str, str] = {**SETTINGS, "spark.master": master}
    await copy_twice(broker, tmp_path, Driver(settings, tmp_path / "driver.log"), archive)


async def test_exactly_once_on_a_standalone_cluster(
    broker: SyncCluster, tmp_path: Path, archive: Path
) -> None:
    with StandaloneCluster(tmp_path / "cluster", workers=2) as cluster:
        settings = {**cluster.driver_settings, **SETTINGS}
        driver = Driver(settings, tmp_path / "driver.log", cluster.environment)
        await copy_twice(broker, tmp_path, driver, archive)
        for number in (1, 2):
            executors = list((tmp_path / "cluster" / f"work-{number}").glob("app-*/*"))
            assert executors, f"worker {number} started no executor"


async def test_memory_of_python_workers_is_bounded(tmp_path: Path) -> None:
    """In one batch, each of two tasks reads and writes 50 MB."""
    usage = await measure(tmp_path, megabytes=100, value_bytes=1_000)
    assert usage.output == usage.input
    assert usage.output.records == 100_000
    assert usage.largest < 180, f"MiB by process: {sorted(usage.peak.values())}"
