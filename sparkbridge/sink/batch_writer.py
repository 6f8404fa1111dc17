"""The sink of a batch job. With exactlyOnce, either all rows of the job become visible, or none."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sparkbridge.errors import SinkCommitError, SparkOptionError
from sparkbridge.local.worker_garbage import spare_collections
from sparkbridge.options import SinkOptions
from sparkbridge.sink.abort import abort_batch
from sparkbridge.sink.commit import Written, commit_batch
from sparkbridge.sink.schema import sink_columns
from sparkbridge.sink.task_writer import TaskIdentity, check_settings, write_task


class KafkaliteWriter(DataSourceArrowWriter):
    """The writer of one job. Spark pickles it for the tasks and for the commit.

    With ``txnAppId`` and ``txnVersion``, a job writes nothing if one with the same pair is already committed.
    With ``sinkName``, a job in foreachBatch writes nothing if the same batch of the stream is already
    committed. The constructor raises SparkOptionError and SinkSchemaError.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> None:
        if overwrite:
            raise SparkOptionError(
                "a topic can't be overwritten, records are only added", hint='use .mode("append")'
            )
        self.options = SinkOptions.parse(options, is_stream=False)
        check_settings(self.options)
        self.columns = sink_columns(schema, self.options.topic)
        spare_collections("plan")
        self.job_id = uuid.uuid4().hex
        self.sink_id = self.options.txn_app_id or f"{self.options.transactional_id_prefix}-{self.job_id}"
        self.batch_id = self.options.txn_version or 0

    def write(self, iterator: Iterator[Any]) -> Written:
        """Write the rows of one task attempt (see ``task_writer``)."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise SinkCommitError("this is not a task of Spark", hint="write with df.write")
        attempt = f"{self.job_id}-{context.partitionId()}-{context.attemptNumber()}-{context.taskAttemptId()}"
        sink_id, batch_id = self.sink_id, self.batch_id
        query_id = context.getLocalProperty("sql.streaming.queryId") or ""  # inside foreachBatch
        options = self.options
        if query_id and options.sink_name is not None and options.txn_app_id is None:
            sink_id = f"{options.transactional_id_prefix}-{options.sink_name}"
            batch_id = int(context.getLocalProperty("streaming.sql.batchId"))
        task = TaskIdentity(sink_id, batch_id, query_id, attempt, context.partitionId())
        return write_task(iterator, self.columns, options, task)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the rows visible to readers. Raises SinkCommitError."""
        sink_ids = {message.sink_id for message in messages if isinstance(message, Written)}
        is_random = self.options.txn_app_id is None and sink_ids == {self.sink_id}
        commit_batch(self.options, messages, is_last=is_random)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort the transactions of the tasks after the job failed or was cancelled."""
        may_be_named = self.options.sink_name is not None and self.options.txn_app_id is None
        sink_id = None if may_be_named else self.sink_id  # only a task knows whether it runs in foreachBatch
        abort_batch(self.options, messages, self.job_id, sink_id=sink_id)
