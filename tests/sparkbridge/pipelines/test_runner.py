"""Runs that are stopped, or whose JVM ended, without a JVM."""

from __future__ import annotations

import logging
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.sql.types import StructType

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines import engine, runner, spark_errors
from sparkbridge.pipelines.engine import Run, RunningQuery, Setting
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.parsing import parse_pipeline
from sparkbridge.pipelines.progress import Tally
from sparkbridge.pipelines.spark_errors import SEE_LOG, explained, jvm_end

PIPELINE, _ = parse_pipeline({"pipeline": {"name": "p"}, "source": {"topic": "t"}, "sink": {"console": True}})
FILE = PipelineFile(Path("p.toml"), PIPELINE, ())


#: Fails as py4j's client does that cannot connect to the JVM, in a function of its module.
CONNECT: dict[str, Any] = {"__name__": "py4j.clientserver"}
exec("def connect(): raise ConnectionRefusedError(111, 'Connection refused')", CONNECT)


class QueryOfADeadJvm:
    """Like py4j's objects: every call asks the JVM."""

    recentProgress = ()

    @property
    def isActive(self) -> bool:
        raise Py4JNetworkError("no answer")

    def awaitTermination(self, seconds: float) -> bool:
        return bool(CONNECT["connect"]())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    query: Any = QueryOfADeadJvm()
    setting = Setting("localhost:9092", trigger="1 second")
    running = RunningQuery(PIPELINE.sinks[0], query, StructType(), Tally("p"), "p")
    run = Run(FILE, PIPELINE, setting, [running])
    monkeypatch.setattr(engine, "start", lambda *_: run)
    return run


def execute(run: Run, *, is_stopping: bool) -> runner.Report:
    spark: Any = SimpleNamespace()
    listener = runner.Listener(is_stopping=lambda: is_stopping)
    return runner.execute(spark, FILE, run.setting, listener=listener)


def test_a_jvm_that_ends_with_the_signal_is_a_stop(run: Run) -> None:
    """SIGTERM for the process group, as sent by a service manager, ends the JVM at the same time."""
    assert execute(run, is_stopping=True).was_stopped


def test_a_jvm_that_ended_is_a_failure_that_names_the_jvm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r"^Spark's JVM does not respond.* \(p: console\)") as failed:
        execute(run, is_stopping=False)
    assert failed.value.hint == SEE_LOG
    killed: Any = SimpleNamespace(proc=subprocess.Popen(["sleep", "60"]))
    killed.proc.kill()
    monkeypatch.setattr(SparkContext, "_gateway", killed)
    with pytest.raises(PipelineError, match=r"^Spark's JVM was killed by SIGKILL.* \(p: console\)"):
        execute(run, is_stopping=False)


def test_a_server_that_refuses_the_users_function_is_not_the_jvm() -> None:
    with pytest.raises(PipelineError, match=r"^\[transform 1\] price: ConnectionRefusedError"):  # noqa: SIM117
        with explained("[transform 1] price"), socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
            closed.close()
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "An error occurred while calling o7.sql",
            r"^Spark's JVM does not respond.* \(\[transform 1\] price\)",
        ),
        ("An error occurred while calling o7.sql. Trace:\nno such method", r"^\[transform 1\] price: "),
    ],
)
def test_a_call_that_a_dead_jvm_did_not_answer_names_the_jvm(
    message: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)  # the JVM of other tests may run
    with pytest.raises(PipelineError, match=told), explained("[transform 1] price"):
        raise Py4JError(message)


def test_a_name_that_a_running_jvm_lacks_is_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "org.example.Missing does not exist in the JVM"
    running: Any = SimpleNamespace(proc=subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(spark_errors, "JVM_END_S", 0.01)
    try:
        for gateway in (None, running):
            monkeypatch.setattr(SparkContext, "_gateway", gateway)
            with pytest.raises(PipelineError, match=r"^p: .*does not exist in the JVM"), explained("p"):
                raise Py4JError(message)
    finally:
        running.proc.kill()
        running.proc.wait()
    with pytest.raises(PipelineError, match=r"^Spark's JVM was killed by SIGKILL"), explained("p"):
        raise Py4JError(message)


def test_messages_of_py4j_about_a_dead_jvm_are_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "spark.log"
    with runner._query_log_to(log):
        try:
            raise ConnectionResetError("reset by peer")
        except ConnectionResetError:
            logging.exception("Exception while sending command.")
        logging.getLogger("kafkalite").warning("no broker")
    assert "ConnectionResetError: reset by peer" in log.read_text()
    assert [record.getMessage() for record in caplog.records] == ["no broker"]


def test_how_a_jvm_ended() -> None:
    assert jvm_end(-9) == "Spark's JVM was killed by SIGKILL, as the system does when memory is short"
    assert jvm_end(-15) == "Spark's JVM was killed by SIGTERM"
    assert jvm_end(134) == "Spark's JVM ended with exit code 134"
    assert "does not respond" in jvm_end(None)
