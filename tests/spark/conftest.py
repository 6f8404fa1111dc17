"""One Spark session for the whole run, and a broker that it reaches by TCP. It needs Java.

All tests below this directory run in one xdist worker (tests/conftest.py), so there is one JVM however many
workers run. ``KAFKALITE_SPARK_CACHE`` names the cache directory of ``fast_start``, also for programs started
by tests; by default it is in the virtual environment. ``make spark-deployments`` and ``make spark-faults``,
which start many JVMs, add the class archive: it costs as much processor time as ten starts save.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kafkalite.testing.sync_cluster import SyncCluster
from sparkbridge.local import fast_start
from sparkbridge.local.spark_session import missing_requirements, session

HERE = Path(__file__).parent
MASTER = "local[2,4]"  # two tasks at once, each tried four times
#: Objects that pyspark and py4j leave to the garbage collector.
IGNORED = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

_numbers = count(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    os.environ.setdefault(fast_start.CACHE_VARIABLE, str(Path(sys.prefix) / "spark-cache"))
    missing = missing_requirements()
    for item in ours:
        item.add_marker(pytest.mark.spark)
        for ignored in IGNORED:
            item.add_marker(pytest.mark.filterwarnings(ignored))
        if missing:
            item.add_marker(pytest.mark.skip(reason="SPARK TESTS DO NOT RUN: " + "; ".join(missing)))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session of this run, with the recommended settings."""
    scratch = tmp_path_factory.mktemp("spark")
    running = session(
        "kafkalite-tests",
        master=MASTER,
        is_short_lived=True,
        settings={
            "spark.sql.warehouse.dir": scratch / "warehouse",
            "spark.local.dir": scratch / "local",
            "spark.log.level": "OFF",  # tests provoke failures, which would fill the screen
        },
    )
    yield running
    for query in running.streams.active:
        query.stop()
    gateway = running.sparkContext._gateway
    running.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)


@pytest.fixture(autouse=True)
def _no_query_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop the queries that a failed test left running."""
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            with contextlib.suppress(Exception):
                query.stop()


@pytest.fixture(scope="session")
def shared_broker() -> Iterator[SyncCluster]:
    with SyncCluster(transport="tcp") as cluster:
        yield cluster


@pytest.fixture
def broker(shared_broker: SyncCluster) -> SyncCluster:
    """A running broker, shared by all tests that do not stop it: use new topics."""
    return shared_broker


@pytest.fixture
def new_topic_on(broker: SyncCluster) -> Callable[..., str]:
    """Create a topic with a new name on the broker: ``new_topic_on("in", partitions=2)``."""

    def create(hint: str = "topic", partitions: int = 1, **settings: Any) -> str:
        name = f"{hint}-{next(_numbers)}"
        broker.create_topic(name, partitions=partitions, **settings)
        return name

    return create


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A new directory for a query's checkpoint."""
    return str(tmp_path / "checkpoint")
