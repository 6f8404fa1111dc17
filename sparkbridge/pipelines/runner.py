"""Runs a pipeline file from start to end in one call: session, demo input, queries, checks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sparkbridge.errors import PipelineError
from sparkbridge.listener import BatchProgress
from sparkbridge.local.spark_session import is_local, missing_requirements, session
from sparkbridge.pipelines import checks, demo, engine
from sparkbridge.pipelines.definition import AVAILABLE_NOW
from sparkbridge.pipelines.engine import Run, RunningQuery, Setting, Show
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.spark_errors import explained, last_words

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_QUERY_LOGGER: Final = "SQLQueryContextLogger"  #: pyspark's logger of errors in queries


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks during a run. ``on_tick`` is called several times a second.

    ``is_stopping`` returns whether the user is stopping the run. If so, failures of queries are not raised,
    because a signal to the whole process group also ends Spark's JVM.
    """

    on_start: Callable[[Run], None] = _nothing
    on_batch: Callable[[RunningQuery, BatchProgress], None] = _nothing
    on_tick: Callable[[Run], None] = _nothing
    on_rows: Show = _nothing
    is_stopping: Callable[[], bool] = bool


@dataclass(slots=True)
class Report:
    """The result of a run. ``was_stopped`` is True if the run was stopped before its end."""

    run: Run
    findings: list[checks.Finding] = field(default_factory=list)
    was_stopped: bool = False

    @property
    def failed(self) -> list[checks.Finding]:
        return [finding for finding in self.findings if not finding.holds]


def require_spark() -> None:
    """Raise PipelineError with advice if Spark's requirements are not met."""
    missing = missing_requirements()
    if missing:
        raise PipelineError("; ".join(missing))


@contextlib.contextmanager
def spark_session(
    name: str, *, master: str = "local[*]", settings: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[SparkSession]:
    """Start a session, and end it and its JVM after the block. Raises PipelineError if it cannot start.

    The JVM and its workers write their messages to ``log`` (None: to stderr).
    """
    require_spark()
    defaults = {"spark.sql.session.timeZone": "UTC", "spark.log.level": "WARN"}
    with _last_words_of(log), explained(f"Spark did not start ({master})"), _stderr_to(log):
        spark = session(
            name, master=master, settings={**defaults, **(settings or {})}, is_short_lived=is_local(master)
        )
    gateway = spark.sparkContext._gateway
    try:
        if not is_local(master):
            from sparkbridge import install

            install(spark)
        with _query_log_to(log):
            yield spark
    finally:
        with contextlib.suppress(Exception):
            spark.stop()
        if gateway is not None:
            with contextlib.suppress(Exception):
                gateway.shutdown()
                gateway.proc.stdin.close()
                gateway.proc.wait(timeout=10)


@contextlib.contextmanager
def _last_words_of(log: Path | None) -> Iterator[None]:
    """If the JVM ends during its start, add the reason from ``log`` to the PipelineError of the block."""
    before_bytes = log.stat().st_size if log is not None and log.exists() else 0
    try:
        yield
    except PipelineError as error:
        is_gone = "JAVA_GATEWAY_EXITED" in error.message
        said = log.read_bytes()[before_bytes:].decode(errors="replace") if is_gone and log is not None else ""
        if words := last_words(said):
            raise PipelineError(f"{error.message}: {words}", hint=error.hint) from error
        raise


@contextlib.contextmanager
def _stderr_to(log: Path | None) -> Iterator[None]:
    """Redirect stderr, also of child processes that are started inside the context, to ``log``."""
    if log is None:
        yield
        return
    sys.stderr.flush()
    ours = os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(target, 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(target)


@contextlib.contextmanager
def _query_log_to(log: Path | None) -> Iterator[None]:
    """Redirect pyspark's log of failed queries, which includes JVM stack traces, from stderr to ``log``.

    Also redirects the messages of py4j about a JVM that has ended, which it sends to the root logger itself.
    """
    if log is None:
        yield
        return
    from pyspark.logger import PySparkLogger

    handlers = PySparkLogger.getLogger(_QUERY_LOGGER).handlers
    streams = [each for each in handlers if isinstance(each, logging.StreamHandler)]
    with log.open("a") as file:
        before = [(each, each.setStream(file)) for each in streams]
        to_file = logging.StreamHandler(file)

        def redirect(record: logging.LogRecord) -> bool:
            to_file.emit(record)
            return False

        root = logging.getLogger()
        root.addFilter(redirect)  # a logger's filter does not see the messages of other loggers
        try:
            yield
        finally:
            root.removeFilter(redirect)
            for each, stream in before:
                if stream is not None:
                    each.setStream(stream)


def execute(
    spark: SparkSession,
    file: PipelineFile,
    setting: Setting,
    *,
    has_checks: bool = True,
    listener: Listener | None = None,
) -> Report:
    """Run a pipeline until its queries end or Ctrl-C stops them.

    Then run its checks if ``has_checks``, the trigger is available-now and the run was not stopped. Raises
    PipelineError if a query or check cannot run, or if a query fails.
    """
    listener = listener or Listener()
    pipeline = file.pipeline
    if pipeline is None:
        raise PipelineError(f"{file.path} is not a valid pipeline")
    run = engine.start(spark, file, pipeline, setting, listener.on_rows)
    report = Report(run)
    try:
        listener.on_start(run)
        run.wait(listener.on_batch, lambda: listener.on_tick(run))
    except (KeyboardInterrupt, PipelineError) as end:
        if isinstance(end, PipelineError) and not listener.is_stopping():
            raise
        report.was_stopped = True
        run.stop()
        return report
    is_bounded = (setting.trigger or pipeline.trigger) == AVAILABLE_NOW
    if has_checks and is_bounded:
        report.findings = checks.check(run, spark)
    return report


@contextlib.contextmanager
def demo_setting(servers: str, security: Mapping[str, str] | None = None) -> Iterator[Setting]:
    """Yield a Setting with trigger available-now, and checkpoints and outputs in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="kafkalite-pipeline-") as directory:
        home = Path(directory)
        yield Setting(servers, str(home / "checkpoint"), AVAILABLE_NOW, home, security or {})


def execute_demo(
    spark: SparkSession,
    file: PipelineFile,
    setting: Setting,
    *,
    has_checks: bool = True,
    listener: Listener | None = None,
    on_filled: Callable[[dict[str, int]], None] = _nothing,
) -> Report:
    """Send the demo's input to ``setting.servers``, then run the pipeline as ``execute`` does.

    Between these two steps, passes the number of records of each topic to ``on_filled``.
    """
    on_filled(demo.fill(file, setting.client_settings))
    return execute(spark, file, setting, has_checks=has_checks, listener=listener)
