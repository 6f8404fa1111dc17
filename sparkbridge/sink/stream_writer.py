"""The sink of a stream: writes each micro-batch exactly once, or at least once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sparkbridge.errors import SinkCommitError
from sparkbridge.local.worker_garbage import spare_collections
from sparkbridge.options import SinkOptions
from sparkbridge.sink.abort import abort_batch, checkpoint_mark
from sparkbridge.sink.commit import Written, commit_batch
from sparkbridge.sink.schema import sink_columns
from sparkbridge.sink.task_writer import TaskIdentity, check_settings, write_task


class KafkaliteStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. Spark pickles one instance for the tasks and creates another for each commit.

    Instances exchange only the messages of tasks. ``overwrite`` is true in complete mode; the whole result is
    then appended, as in Spark's Kafka connector. The constructor raises SparkOptionError and SinkSchemaError.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> None:
        self.options = SinkOptions.parse(options, is_stream=True)
        check_settings(self.options)
        self.columns = sink_columns(schema, self.options.topic)
        self.mark = checkpoint_mark(options, self.options.topic)
        spare_collections("plan")

    def write(self, iterator: Iterator[Any]) -> Written:
        """Write the rows of one task attempt (see ``task_writer``)."""
        return write_task(iterator, self.columns, self.options, _task_identity(self.options, self.mark))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Make the batch visible to readers. May be repeated. Raises SinkCommitError."""
        commit_batch(self.options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Abort the transactions of a batch that failed or was stopped."""
        name = self.options.sink_name
        sink_id = None if name is None else f"{self.options.transactional_id_prefix}-{name}"
        abort_batch(self.options, messages, self.mark, sink_id=sink_id, batch_id=batchId)


def _task_identity(options: SinkOptions, mark: str) -> TaskIdentity:
    from pyspark import TaskContext

    context = TaskContext.get()
    query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    batch_id = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    if context is None or query_id is None or batch_id is None:
        raise SinkCommitError(
            "this is not a task of a streaming query: Spark passed no query and batch",
            hint="write with df.writeStream, or with df.write for a batch",
        )
    run_id = context.getLocalProperty("spark.jobGroup.id") or ""
    attempt = f"{run_id}-{context.partitionId()}-{context.attemptNumber()}-{context.taskAttemptId()}-{mark}"
    sink_id = f"{options.transactional_id_prefix}-{options.sink_name or query_id}"
    return TaskIdentity(sink_id, int(batch_id), query_id, attempt, context.partitionId())
