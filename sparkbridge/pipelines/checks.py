"""Checks the output of a pipeline after an available-now run, as declared in ``[check]``.

A function ``check(run)`` receives a CheckRun and raises AssertionError if the output is wrong. It may return
a sentence about the output. CheckRun reads the output with kafkalite's consumer and pyarrow. Spark runs the
queries of ``[check.sql]``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafkalite.model import Record, TopicPartition
from sparkbridge.errors import PipelineError
from sparkbridge.pipelines import demo, frames
from sparkbridge.pipelines.checkpoints import written_files
from sparkbridge.pipelines.definition import Sink
from sparkbridge.pipelines.engine import Run, RunningQuery, with_brokers
from sparkbridge.pipelines.spark_errors import explained, place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RECORDS_PER_READ: Final = 10_000
#: The time limit of one read. It is short, because a partition may end with control records, which are never
#: returned.
_READ_PAUSE_MS: Final = 100
_SHOWN: Final = 3


class Finding(NamedTuple):
    """The result of one check of a pipeline's outputs.

    ``text`` describes the output if the check ``holds``, otherwise why the check failed.
    """

    name: str
    holds: bool
    text: str


@dataclass(frozen=True, slots=True)
class CheckRun:
    """The argument of check functions: the outputs and the demo input of a run."""

    run: Run
    spark: SparkSession

    @property
    def servers(self) -> str:
        return self.run.setting.servers

    def sink(self, name: str = "") -> Sink:
        """Return the sink with this name; "" means the only sink. Raises PipelineError."""
        sinks = {each.name: each for each in self.run.pipeline.sinks}
        if not name and len(sinks) == 1:
            return next(iter(sinks.values()))
        if name not in sinks:
            raise PipelineError(f"a check asks for the sink {name!r}; there are {', '.join(sinks)}")
        return sinks[name]

    def records(self, topic: str) -> list[Record]:
        """Return the records of a topic, without aborted ones, sorted by partition and offset."""
        return _records(topic, self.run.setting.client_settings)

    def rows(self, sink: str = "") -> list[dict[str, Any]]:
        """Return the rows of a sink: its topic's JSON values, parsed, or the rows in its Parquet files."""
        found = self.sink(sink)
        if found.topic:
            return [json.loads(record.value or b"null") for record in self.records(found.topic)]
        import pyarrow.dataset

        home = self.path(sink)
        listed = written_files(home)
        files = pyarrow.dataset.dataset(
            str(home) if listed is None else [str(path) for path in listed],
            format="parquet",
            partitioning="hive",
            partition_base_dir=str(home),
        )
        return list(files.to_table().to_pylist())

    def path(self, sink: str = "") -> Path:
        """Return the directory of a Parquet sink."""
        return Path(self.run.output_path(self.sink(sink)))

    def input(self) -> Iterator[demo.DemoRecord]:
        """Yield the records of the demo input again."""
        return demo.records(self.run.file)

    def equal(self, what: str, got: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
        """Raise AssertionError with ``what`` and the first few differences if the mappings differ."""
        if got != expected:
            raise AssertionError(f"{what}: {_difference(got, expected)}")


def _difference(got: Mapping[Any, Any], expected: Mapping[Any, Any]) -> str:
    wrong = [key for key in got.keys() | expected.keys() if got.get(key) != expected.get(key)]
    wrong.sort(key=repr)
    shown = [f"{key!r} is {got.get(key)!r}, expected {expected.get(key)!r}" for key in wrong[:_SHOWN]]
    rest = f", and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    return f"{len(wrong):,} of {len(expected):,} differ: {'; '.join(shown)}{rest}"


def _records(topic: str, settings: Mapping[str, str]) -> list[Record]:
    from kafkalite.client.blocking.admin import Admin
    from kafkalite.client.blocking.consumer import Consumer

    with Admin(config=settings) as admin:
        count = len(admin.describe_topic(topic).partitions)
    found: list[Record] = []
    with Consumer(config={**settings, "isolation.level": "read_committed"}) as consumer:
        partitions = [TopicPartition(topic, number) for number in range(count)]
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        while any((consumer.position(each) or 0) < ends[each] for each in partitions):
            found += consumer.get_many(_RECORDS_PER_READ, timeout_ms=_READ_PAUSE_MS)
    return sorted(found, key=lambda record: (record.partition, record.offset))


def check(run: Run, spark: SparkSession) -> list[Finding]:
    """Run all checks of the pipeline, even if one fails. Raises PipelineError for a check that cannot run."""
    declared = run.pipeline.check
    findings: list[Finding] = []
    if declared.sql:
        _make_views(run, spark)
        findings += [_sql_finding(spark, name, query) for name, query in declared.sql.items()]
    if declared.python is not None:
        findings.append(_python_finding(CheckRun(run, spark), declared.python.function, run))
    return findings


def _sql_finding(spark: SparkSession, name: str, query: str) -> Finding:
    with explained(f"[check.sql] {name}"):
        rows = spark.sql(query).take(2)
    if len(rows) == 1 and len(rows[0]) == 1 and isinstance(rows[0][0], bool):
        return Finding(name, rows[0][0], "holds" if rows[0][0] else "does not hold")
    answer = ", ".join(str(tuple(row)) for row in rows) or "no row"
    return Finding(name, False, f"must return one row, true or false; it returned {answer}")


def _python_finding(check_run: CheckRun, name: str, run: Run) -> Finding:
    reference = run.pipeline.check.python
    assert reference is not None
    try:
        found = frames.function(run.file, reference)(check_run)
    except AssertionError as problem:
        return Finding(name, False, str(problem) or _line_of(problem))
    except Exception as problem:
        raise PipelineError(
            f"[check] {reference}: {type(problem).__name__}: {problem}{place(problem)}",
            hint="the pipeline itself ran to its end; --no-check leaves the check out",
        ) from problem
    return Finding(name, True, str(found or "holds"))


def _line_of(problem: AssertionError) -> str:
    last = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}: {last.line}"


def _make_views(run: Run, spark: SparkSession) -> None:
    """Create views of the topics and files of the sinks.

    The view of ``[sink]`` is ``output``. The view of ``[sinks.NAME]`` is NAME with ``_`` in place of ``-``,
    and also ``output`` if there is no other sink. Console sinks have no view.
    """
    for each in run.queries:
        if each.sink.console:
            continue
        with explained(f"[check] {each.sink.text}"):
            frame = _output(run, spark, each)
        if len(run.queries) == 1:
            frame.createOrReplaceTempView("output")
        if not run.pipeline.has_one_sink:
            frame.createOrReplaceTempView(each.sink.name.replace("-", "_"))


def _output(run: Run, spark: SparkSession, running: RunningQuery) -> DataFrame:
    from pyspark.sql import functions as sql

    if running.sink.parquet:
        # Without rows there may be no file from which Spark could infer the schema.
        return spark.read.schema(running.schema).parquet(run.output_path(running.sink))
    options = with_brokers({}, {}, run.setting.client_settings)
    reader = spark.read.format("kafkalite").options(**options)
    frame = reader.option("subscribe", running.sink.topic).load()
    if "value" in running.sink.columns:
        return frame
    value = sql.from_json(sql.col("value").cast("string"), running.schema)
    return frame.select(value.alias("value"), "key", "topic", "partition", "offset", "timestamp").select(
        "value.*"
    )
