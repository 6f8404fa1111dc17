"""The source and the sink, killed at the points of a plan: format ``faulty-kafkalite``.

Has every option of format ``kafkalite``, and ``faults.directory`` and ``faults.plan``: see ``points``.
It wraps the bridge's own reader and writer, and only adds the kills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from proof.spark.points import (
    DIRECTORY_OPTION,
    PLAN_OPTION,
    FaultPlan,
    InjectedFailure,
    Planned,
    kill_jvm,
    kill_this_process,
)
from sparkbridge.datasource import KafkaliteDataSource

FORMAT = "faulty-kafkalite"


class FaultyDataSource(KafkaliteDataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def __init__(self, options: Any) -> None:
        self.plan = FaultPlan(options[DIRECTORY_OPTION], options.get(PLAN_OPTION, ""))
        ours = {DIRECTORY_OPTION, PLAN_OPTION}
        super().__init__(
            CaseInsensitiveDict({name: text for name, text in options.items() if name.lower() not in ours})
        )

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return FaultyStreamReader(super().streamReader(schema), self.plan)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return FaultyStreamWriter(super().streamWriter(schema, overwrite), self.plan)


def _batch_id() -> int:
    """Return the batch of the running task."""
    context = TaskContext.get()
    assert context is not None
    return int(context.getLocalProperty("streaming.sql.batchId") or 0)


class FaultyStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, inner: Any, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def initialOffset(self) -> dict[str, Any]:
        offset: dict[str, Any] = self._inner.initialOffset()
        if "latest-start" in self._plan.batches and "latest-start" not in self._plan.struck():
            self._plan.ask("more-input")  # between the choice of the start and the first batch
        return offset

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offset: dict[str, Any] = self._inner.latestOffset(start, limit)
        if offset != start and self._plan.strikes("stream-reader-killed", self._plan.current_batch_id):
            kill_this_process()
        return offset

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Any:
        planned = self._inner.partitions(start, end)
        ranges = tuple(each.value[:4] for each in planned)
        self._plan.record(Planned(end, ranges))
        if ranges:
            for point in ("latest-start", "planned"):
                if self._plan.strikes(point, self._plan.current_batch_id):
                    kill_jvm(and_this_process=True)
        return planned

    def read(self, partition: Any) -> Iterator[Any]:
        for batch in self._inner.read(partition):
            half = batch.num_rows // 2
            yield batch.slice(0, half)
            if half and self._plan.strikes("reader-killed", _batch_id()):
                kill_this_process()
            yield batch.slice(half)

    def prepareForTriggerAvailableNow(self) -> None:
        self._inner.prepareForTriggerAvailableNow()

    def getDefaultReadLimit(self) -> ReadLimit:
        return self._inner.getDefaultReadLimit()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._inner.reportLatestOffset()  # type: ignore[no-any-return]

    def commit(self, end: dict[str, Any]) -> None:
        self._inner.commit(end)

    def stop(self) -> None:
        self._inner.stop()


class FaultyStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, inner: Any, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        batch_id = _batch_id()
        rows = [0]
        message: WriterCommitMessage = self._inner.write(self._struck_within(iterator, batch_id, rows))
        if rows[0]:
            if self._plan.strikes("task-fails", batch_id):
                raise InjectedFailure(f"batch {batch_id} was to fail")
            if self._plan.strikes("writer-killed-late", batch_id):
                kill_this_process()
        return message

    def _struck_within(self, iterator: Iterator[Any], batch_id: int, rows: list[int]) -> Iterator[Any]:
        for batch in iterator:
            half = batch.num_rows // 2
            rows[0] += batch.num_rows
            yield batch.slice(0, half)
            if half:
                self._strike_within(batch_id)
            yield batch.slice(half)

    def _strike_within(self, batch_id: int) -> None:
        if self._plan.strikes("writer-killed", batch_id):
            kill_this_process()
        if self._plan.strikes("executor-killed", batch_id):
            kill_jvm(and_this_process=False)
        if self._plan.strikes("leader-killed", batch_id):
            self._plan.ask("leader-killed")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if self._plan.strikes("coordinator-killed", batchId):
            self._plan.ask("coordinator-killed")
        if self._plan.strikes("before-commit", batchId):
            kill_jvm(and_this_process=True)
        self._inner.commit(messages, batchId)
        if self._plan.strikes("after-commit", batchId):
            kill_jvm(and_this_process=True)
        self._plan.on_committed(batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._inner.abort(messages, batchId)
