"""A query that is killed at named points, on broker processes. ``make spark-faults`` has more."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite.testing.process_cluster import ProcessCluster
from proof.processes.transactions import CLUSTER_SETTINGS
from proof.spark.faults import Outcome, Round
from proof.spark.rounds import STOPPED

pytestmark = pytest.mark.slow

#: Drivers are started many times, and the machine may be busy.
LIMIT_S = 280
DRIVER = ("latest-start", "before-commit", "after-commit")
WORKERS = ("task-fails", "writer-killed", "writer-killed-late", "reader-killed")
BROKERS = ("leader-killed", "coordinator-killed")


@pytest.fixture(autouse=True)
def _bounded_in_time() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _quiet_clients() -> Iterator[None]:
    """Silence the clients: brokers are killed on purpose."""
    logger = logging.getLogger("kafkalite")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


async def live(
    spark: Any, directory: Path, points: tuple[str, ...], *, brokers: int, at_least_once: bool = False
) -> Outcome:
    """Return the outcome of a round, of which the runs that kill no driver are on the shared session."""
    settings = CLUSTER_SETTINGS | {"durability": "page-cache"}
    async with ProcessCluster(directory / "nodes", brokers=brokers, settings=settings) as cluster:
        life = Round(
            cluster, directory / "round", seed=1, points=points, at_least_once=at_least_once, session=spark
        )
        return await life.run()


async def test_driver_and_workers_killed(spark: Any, tmp_path: Path) -> None:
    outcome = await live(spark, tmp_path, (*DRIVER, *WORKERS), brokers=1)
    assert outcome.problems == []
    assert outcome.struck.keys() >= {*DRIVER, *WORKERS}
    assert outcome.doubled == 0
    assert outcome.records > 0


async def test_brokers_killed_and_the_query_started_again(spark: Any, tmp_path: Path) -> None:
    outcome = await live(spark, tmp_path, (*BROKERS, "stream-reader-killed", STOPPED), brokers=3)
    assert outcome.problems == []
    assert outcome.struck.keys() >= {*BROKERS, "stream-reader-killed", STOPPED}
    assert outcome.doubled == 0


async def test_at_least_once_duplicates_and_loses_nothing(spark: Any, tmp_path: Path) -> None:
    """The same fault as in the exactly-once test; here it duplicates records."""
    outcome = await live(spark, tmp_path, ("task-fails",), brokers=1, at_least_once=True)
    assert outcome.problems == []
    assert outcome.doubled > 0
