"""Runs a pipeline on a Spark session: one streaming query for each sink, watched until they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparkbridge.listener import BatchProgress
from sparkbridge.pipelines import frames
from sparkbridge.pipelines.definition import AVAILABLE_NOW, Pipeline, Sink
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.progress import Tally
from sparkbridge.pipelines.spark_errors import told

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: How often a query is asked for its progress.
_POLL_SECONDS: Final = 0.1

#: Rows of one batch for the console: sink, batch id, columns, rows (strings).
Show = Callable[[str, int, Sequence[str], Sequence[Sequence[str]]], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a pipeline runs: the brokers, the directory of its checkpoints, the place of relative outputs.

    ``trigger`` replaces that of the file; ``outputs`` None is the file's own directory.
    """

    servers: str
    checkpoint: Path | None = None
    trigger: str = ""
    outputs: Path | None = None


@dataclass(slots=True)
class RunningQuery:
    sink: Sink
    query: StreamingQuery
    schema: str  #: of the view the sink reads, as DDL
    tally: Tally

    def poll(self) -> list[BatchProgress]:
        """The batches finished since the last time."""
        told_ones = [json.loads(each.json) for each in self.query.recentProgress]
        return self.tally.take(told_ones)


@dataclass(slots=True)
class Run:
    """The queries of one pipeline. ``wait`` until they end, or ``stop`` them."""

    file: PipelineFile
    pipeline: Pipeline
    setting: Setting
    queries: list[RunningQuery] = field(default_factory=list)

    @property
    def tallies(self) -> list[Tally]:
        return [each.tally for each in self.queries]

    def wait(
        self, on_batch: Callable[[RunningQuery, BatchProgress], None], on_tick: Callable[[], None]
    ) -> None:
        """Until all have ended. Raises PipelineError for the first that failed, after stopping the others."""
        try:
            alive = list(self.queries)
            while alive:
                for each in list(alive):
                    has_ended = self._has_ended(each, _POLL_SECONDS / len(alive))
                    for batch in each.poll():
                        on_batch(each, batch)
                    if has_ended:
                        alive.remove(each)
                on_tick()
        finally:
            self.stop()

    def _has_ended(self, running: RunningQuery, seconds: float) -> bool:
        with told(f"{self.pipeline.name}: {running.sink.text}"):
            return bool(running.query.awaitTermination(seconds))

    def stop(self) -> None:
        """Stop what still runs; a batch under way is not finished, and is run again by the next start."""
        for each in self.queries:
            if each.query.isActive:
                each.query.stop()

    def output_path(self, sink: Sink) -> str:
        return output_path(self.file, sink, self.setting)


def output_path(file: PipelineFile, sink: Sink, setting: Setting) -> str:
    """Where a Parquet sink writes: a URL as it is, a relative path below ``outputs`` or beside the file."""
    if "://" in sink.parquet:
        return sink.parquet
    return str((setting.outputs or file.directory) / Path(sink.parquet).expanduser())


def source_options(pipeline: Pipeline, sink: Sink, servers: str) -> dict[str, str]:
    """The file's options; the brokers and the group where they name none."""
    options = dict(pipeline.source.options)
    names = {name.lower() for name in options}
    for name, value in (
        ("kafka.bootstrap.servers", servers),
        ("kafka.group.id", pipeline.group_id(sink)),
    ):
        if name not in names:
            options[name] = value
    return options


def start(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, setting: Setting, show: Show | None = None
) -> Run:
    """Start the pipeline's queries. Raises PipelineError that says which part Spark refused, and why."""
    run = Run(file, pipeline, setting)
    try:
        for sink in pipeline.sinks:
            options = source_options(pipeline, sink, setting.servers)
            with told(f"[source] {pipeline.source.text}"):
                columns = frames.wanted_columns(pipeline)
                source = frames.decoded(
                    frames.read_stream(spark, pipeline.source, options, columns), pipeline.source.decode
                )
            views = frames.views(spark, file, pipeline, source)
            with told(f"{pipeline.name}: {sink.text}"):
                run.queries.append(_start_query(run, views[sink.reads], sink, show))
    except BaseException:
        run.stop()
        raise
    return run


def _start_query(run: Run, frame: DataFrame, sink: Sink, show: Show | None) -> RunningQuery:
    schema = ", ".join(f"`{each.name}` {each.dataType.simpleString()}" for each in frame.schema.fields)
    if sink.topic:
        writer = _to_topic(run, frame, sink)
    elif sink.parquet:
        writer = frame.writeStream.format("parquet").option("path", run.output_path(sink))
        writer = writer.options(**dict(sink.options))
        if sink.partition_by:
            writer = writer.partitionBy(*sink.partition_by)
    else:
        writer = frame.writeStream.foreachBatch(_show_batch(sink, show))
    setting = run.setting
    if setting.checkpoint is not None:
        directory = setting.checkpoint if len(run.pipeline.sinks) == 1 else setting.checkpoint / sink.name
        writer = writer.option("checkpointLocation", str(directory))
    trigger = setting.trigger or run.pipeline.trigger
    if trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=trigger)
    query = writer.outputMode(sink.output_mode).queryName(f"{run.pipeline.name}.{sink.name}").start()
    return RunningQuery(
        sink, query, schema, Tally(sink.name if len(run.pipeline.sinks) > 1 else run.pipeline.name)
    )


def _to_topic(run: Run, frame: DataFrame, sink: Sink) -> DataStreamWriter:
    options: dict[str, str] = {"kafka.bootstrap.servers": run.setting.servers, "topic": sink.topic}
    options |= sink.options
    rows = frames.topic_columns(frame, sink)
    if sink.output_mode == "update":  # Spark takes no update mode for a sink in Python
        from sparkbridge import foreach_batch

        given = {name: text for name, text in options.items() if name.lower() != "sinkname"}
        name = next((text for key, text in options.items() if key.lower() == "sinkname"), "")
        name = name or f"{run.pipeline.name}.{sink.name}"
        return rows.writeStream.foreachBatch(foreach_batch(sinkName=name, **given))
    return rows.writeStream.format("kafkalite").options(**options)


def _show_batch(sink: Sink, show: Show | None) -> Callable[[DataFrame, int], None]:
    def on_batch(frame: DataFrame, batch_id: int) -> None:
        rows = frame.limit(sink.rows).collect()
        if show is not None and rows:
            show(
                sink.name,
                batch_id,
                frame.columns,
                [["" if v is None else str(v) for v in row] for row in rows],
            )

    return on_batch
