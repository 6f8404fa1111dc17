"""Reports the progress of streaming queries as values: the rows, lag and durations of each batch.

::

    listener = ProgressListener(print)
    spark.streams.addListener(listener)
"""

# Tests: tests/sparkbridge/test_datasource.py

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.streaming import StreamingQueryListener

from sparkbridge.offsets import OffsetFormatError, Positions, StreamOffset


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Spark's report on one finished batch, or on a trigger that ran no batch."""

    query_id: str
    run_id: str
    name: str | None
    batch_id: int
    timestamp: str  #: when the batch started, in ISO 8601
    row_count: int
    rows_per_second: float  #: rows processed per second of the batch's duration
    durations_ms: Mapping[str, int]  #: the durations by Spark's names, such as triggerExecution and addBatch
    positions: Positions = field(default_factory=dict)  #: the end of the batch in each kafkalite partition
    ends: Positions = field(default_factory=dict)  #: the log ends when the query last fetched them
    #: Rows dropped by the watermark. Spark counts them after a partial aggregation, so it may report fewer.
    late_count: int = 0

    @property
    def lag(self) -> int:
        """The sum of the distances from the query's positions (0 if unknown) to the log ends, in offsets."""
        return sum(max(0, end - self.positions.get(tp, 0)) for tp, end in self.ends.items())

    @property
    def batch_ms(self) -> int:
        return self.durations_ms.get("triggerExecution", 0)

    @classmethod
    def parse(cls, progress: Mapping[str, Any]) -> BatchProgress:
        """Parse a progress report in Spark's JSON form."""
        positions: Positions = {}
        ends: Positions = {}
        for source in progress.get("sources", ()):
            positions |= _positions(source.get("endOffset"))
            ends |= _positions(source.get("latestOffset"))
        return cls(
            query_id=str(progress["id"]),
            run_id=str(progress["runId"]),
            name=progress.get("name"),
            batch_id=int(progress.get("batchId", -1)),
            timestamp=str(progress.get("timestamp", "")),
            row_count=sum(int(source.get("numInputRows", 0)) for source in progress.get("sources", ())),
            rows_per_second=float(progress.get("processedRowsPerSecond") or 0.0),
            durations_ms={name: int(ms) for name, ms in (progress.get("durationMs") or {}).items()},
            positions=positions,
            ends=ends,
            late_count=sum(
                int(each.get("numRowsDroppedByWatermark", 0)) for each in progress.get("stateOperators", ())
            ),
        )


def _positions(offset: Any) -> Positions:
    """Parse an offset in a progress report: an object or JSON text. Return {} if it has another format."""
    try:
        progress = json.loads(offset) if isinstance(offset, str) else offset
        return StreamOffset.parse(progress).positions if isinstance(progress, Mapping) else {}
    except (ValueError, OffsetFormatError):
        return {}


class ProgressListener(StreamingQueryListener):
    """Calls ``on_progress`` for every finished batch of every query of the session.

    ``on_end`` receives the run id of a query that has ended, and its error or None. Both callbacks run in a
    thread of py4j, and Spark logs the exceptions that they raise.
    """

    def __init__(
        self,
        on_progress: Callable[[BatchProgress], object],
        on_end: Callable[[str, str | None], object] | None = None,
    ) -> None:
        super().__init__()
        self._on_progress = on_progress
        self._on_end = on_end

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        self._on_progress(BatchProgress.parse(json.loads(event.progress.json)))

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        if self._on_end is not None:
            self._on_end(str(event.runId), event.exception)
