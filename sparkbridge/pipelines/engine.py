"""Runs a pipeline on a Spark session: one streaming query for each sink, until all queries end."""

# Tests: tests/sparkbridge/pipelines/test_runner.py

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from sparkbridge.listener import BatchProgress
from sparkbridge.pipelines import frames
from sparkbridge.pipelines.checkpoints import checkpoint_path, require_own_checkpoint, require_own_output
from sparkbridge.pipelines.definition import AVAILABLE_NOW, Pipeline, Sink
from sparkbridge.pipelines.files import PipelineFile, is_url
from sparkbridge.pipelines.progress import Tally
from sparkbridge.pipelines.spark_errors import explained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

#: The pause between two requests for a query's progress, in seconds.
_POLL_SECONDS: Final = 0.1


class ShownRows(NamedTuple):
    """The first rows of one batch of a console sink: ``rows`` as text, ``documents`` as JSON objects."""

    query: str  #: the displayed name of the query
    batch_id: int
    columns: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    documents: Sequence[str]


Show = Callable[[ShownRows], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a pipeline runs: brokers, checkpoint directory, and the base of relative output paths.

    ``checkpoint`` is a directory or a URL; None sets none. A nonempty ``trigger`` overrides the trigger in
    the file. Relative output paths start at ``outputs`` or, if that is None, at the directory of the pipeline
    file. ``security`` has the settings of clients of ``servers`` for TLS and the login, by dotted name.
    """

    servers: str
    checkpoint: str | None = None
    trigger: str = ""
    outputs: Path | None = None
    security: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def client_settings(self) -> dict[str, str]:
        """The settings of a client of these brokers, by dotted name."""
        return {"bootstrap.servers": self.servers, **self.security}


@dataclass(slots=True)
class RunningQuery:
    sink: Sink
    query: StreamingQuery
    schema: StructType  #: the schema of the view that the sink reads
    tally: Tally
    group_id: str  #: the consumer group to which the query commits its progress

    def poll(self) -> list[BatchProgress]:
        """Return the batches that finished since the last call."""
        progresses = [json.loads(each.json) for each in self.query.recentProgress]
        return self.tally.take(progresses)


@dataclass(slots=True)
class Run:
    """The running queries of one pipeline. ``wait`` returns when they have ended; ``stop`` stops them."""

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
        """Wait until all queries have ended. If one fails, stop the others and raise PipelineError.

        Calls ``on_batch`` for each finished batch, and ``on_tick`` several times a second.
        """
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
        with explained(f"{self.pipeline.name}: {running.sink.text}"):
            return bool(running.query.awaitTermination(seconds))

    def stop(self) -> None:
        """Stop the running queries. With the same checkpoint, the next run repeats an unfinished batch."""
        from py4j.protocol import Py4JError

        for each in self.queries:
            with contextlib.suppress(Py4JError, OSError):  # the JVM has ended, and the queries with it
                if each.query.isActive:
                    each.query.stop()

    def name_of(self, sink: Sink) -> str:
        """Return the displayed name of a query: the pipeline's name for ``[sink]``, else the sink's name."""
        return self.pipeline.name if self.pipeline.has_one_sink else sink.name

    def output_path(self, sink: Sink) -> str:
        return output_path(self.file, sink, self.setting)


def output_path(file: PipelineFile, sink: Sink, setting: Setting) -> str:
    """Return the output path of a Parquet sink.

    Relative paths start at ``setting.outputs`` or, if that is None, at the file's directory.
    """
    if is_url(sink.parquet):
        return sink.parquet
    return str((setting.outputs or file.directory) / Path(sink.parquet).expanduser())


def source_options(pipeline: Pipeline, sink: Sink, setting: Setting) -> dict[str, str]:
    """Return the options of ``[source]``. Add the brokers and the group if the file does not set them."""
    return with_brokers(
        {"kafka.group.id": pipeline.group_id(sink)}, pipeline.source.options, setting.client_settings
    )


def with_brokers(
    defaults: Mapping[str, str], given: Mapping[str, str], client_settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the options ``given`` in the file, with those of ``defaults`` and of the brokers added.

    If the file names brokers of its own, it must also have the settings of TLS and of the login: no password
    is sent to other brokers than those that it is meant for.
    """
    names = {name.lower() for name in given}
    added = dict(defaults)
    if "kafka.bootstrap.servers" not in names:
        added |= {f"kafka.{name}": text for name, text in client_settings.items()}
    return {name: value for name, value in added.items() if name.lower() not in names} | dict(given)


def start(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, setting: Setting, show: Show | None = None
) -> Run:
    """Start the pipeline's queries. Raises PipelineError with the failed part and the reason.

    ``show`` is called with the first rows of each batch of a console sink.
    """
    run = Run(file, pipeline, setting)
    if setting.checkpoint is not None:
        require_own_checkpoint(setting.checkpoint, pipeline)
        for sink in pipeline.sinks:
            if sink.parquet:
                checkpoint = checkpoint_path(setting.checkpoint, pipeline, sink)
                require_own_output(output_path(file, sink, setting), checkpoint)
    try:
        for sink in pipeline.sinks:
            options = source_options(pipeline, sink, setting)
            with explained(f"[source] {pipeline.source.text}"):
                records = frames.read_stream(spark, pipeline.source, options, frames.wanted_columns(pipeline))
                source = frames.decoded(records, pipeline.source.decode, frames.record_columns(pipeline))
            views = frames.views(spark, file, pipeline, source)
            with explained(f"{pipeline.name}: {sink.text}"):
                run.queries.append(_start_query(run, views[sink.reads], sink, show))
    except BaseException:
        run.stop()
        raise
    return run


def _start_query(run: Run, frame: DataFrame, sink: Sink, show: Show | None) -> RunningQuery:
    if sink.topic:
        writer = _to_topic(run, frame, sink)
    elif sink.parquet:
        writer = frame.writeStream.format("parquet").option("path", run.output_path(sink))
        writer = writer.options(**dict(sink.options))
        if sink.partition_by:
            writer = writer.partitionBy(*sink.partition_by)
    else:
        writer = frame.writeStream.foreachBatch(_show_batch(run.name_of(sink), sink.rows, show))
    setting = run.setting
    if setting.checkpoint is not None:
        writer = writer.option("checkpointLocation", checkpoint_path(setting.checkpoint, run.pipeline, sink))
    trigger = setting.trigger or run.pipeline.trigger
    if trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=trigger)
    query = writer.outputMode(sink.output_mode).queryName(f"{run.pipeline.name}.{sink.name}").start()
    return RunningQuery(sink, query, frame.schema, Tally(run.name_of(sink)), run.pipeline.group_id(sink))


def _to_topic(run: Run, frame: DataFrame, sink: Sink) -> DataStreamWriter:
    options = with_brokers({"topic": sink.topic}, sink.options, run.setting.client_settings)
    rows = frames.topic_columns(frame, sink)
    if sink.output_mode == "update":  # Spark supports no update mode for a sink in Python
        from sparkbridge import foreach_batch

        given = {name: text for name, text in options.items() if name.lower() != "sinkname"}
        name = next((text for key, text in options.items() if key.lower() == "sinkname"), "")
        name = name or f"{run.pipeline.name}.{sink.name}"
        return rows.writeStream.foreachBatch(foreach_batch(sinkName=name, **given))
    return rows.writeStream.format("kafkalite").options(**options)


def _show_batch(query: str, count: int, show: Show | None) -> Callable[[DataFrame, int], None]:
    def on_batch(frame: DataFrame, batch_id: int) -> None:
        from pyspark.sql import functions as sql

        names = [f"column_{number}" for number in range(len(frame.columns))]  # column names may occur twice
        document = sql.struct(*[sql.col(n).alias(c) for n, c in zip(names, frame.columns, strict=True)])
        # Spark formats the text, because Python would format times in the time zone of this machine.
        texts = frame.toDF(*names).select(
            *[sql.col(name).cast("string") for name in names],
            sql.to_json(document, {"ignoreNullFields": "false"}),
        )
        # A limit alone reads only some of the partitions, and the others would not commit the state of this
        # batch.
        rows = [tuple(row) for row in texts.orderBy(sql.monotonically_increasing_id()).limit(count).collect()]
        if show is not None and rows:
            values, documents = [row[:-1] for row in rows], [row[-1] for row in rows]
            show(ShownRows(query, batch_id, frame.columns, values, documents))

    return on_batch
