"""Runs that are stopped, or whose JVM ended, without a JVM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JNetworkError

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines import engine, runner
from sparkbridge.pipelines.engine import Run, RunningQuery, Setting
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.parsing import parse_pipeline
from sparkbridge.pipelines.progress import Tally

PIPELINE, _ = parse_pipeline({"pipeline": {"name": "p"}, "source": {"topic": "t"}, "sink": {"console": True}})
FILE = PipelineFile(Path("p.toml"), PIPELINE, ())


class QueryOfADeadJvm:
    """Like py4j's objects: every call asks the JVM."""

    recentProgress = ()

    @property
    def isActive(self) -> bool:
        raise Py4JNetworkError("no answer")

    def awaitTermination(self, seconds: float) -> bool:
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    query: Any = QueryOfADeadJvm()
    setting = Setting("localhost:9092", trigger="1 second")
    run = Run(FILE, PIPELINE, setting, [RunningQuery(PIPELINE.sinks[0], query, "", Tally("p"), "p")])
    monkeypatch.setattr(engine, "start", lambda *_: run)
    return run


def execute(run: Run, *, is_stopping: bool) -> runner.Report:
    spark: Any = SimpleNamespace()
    listener = runner.Listener(is_stopping=lambda: is_stopping)
    return runner.execute(spark, FILE, run.setting, listener=listener)


def test_a_jvm_that_ends_with_the_signal_is_a_stop(run: Run) -> None:
    """SIGTERM for the process group, as sent by a service manager, ends the JVM at the same time."""
    assert execute(run, is_stopping=True).was_stopped


def test_a_jvm_that_ended_is_a_failure(run: Run) -> None:
    with pytest.raises(PipelineError, match=r"^p: console: ConnectionRefusedError"):
        execute(run, is_stopping=False)
