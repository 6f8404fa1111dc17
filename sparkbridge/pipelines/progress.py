"""The progress of a pipeline's queries: totals of Spark's progress reports, and a line of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkbridge.listener import BatchProgress


@dataclass(slots=True)
class Tally:
    """The totals of one query. A batch is counted once, even if Spark reports it several times."""

    name: str
    batches: int = 0
    rows: int = 0
    busy_ms: int = 0
    late: int = 0  #: rows dropped by the watermark, counted after a partial aggregation
    last: BatchProgress | None = None  #: the latest report, also of a trigger without data

    def take(self, progresses: Iterable[Mapping[str, Any]]) -> list[BatchProgress]:
        """Count and return the new batches. ``progresses`` are in order and may repeat earlier reports."""
        fresh: list[BatchProgress] = []
        for document in progresses:
            progress = BatchProgress.parse(document)
            if self.last is not None and progress.timestamp <= self.last.timestamp:
                continue
            self.last = progress
            if "addBatch" not in progress.durations_ms:
                continue
            self.batches += 1
            self.rows += progress.row_count
            self.busy_ms += progress.batch_ms
            self.late += progress.late_count
            fresh.append(progress)
        return fresh

    @property
    def lag(self) -> int | None:
        """Return the lag in the latest progress report; None before the first report."""
        return None if self.last is None else self.last.lag

    @property
    def rows_per_second(self) -> float:
        """Return the number of rows per second spent in batches; 0 without a batch."""
        return self.rows * 1000 / self.busy_ms if self.busy_ms else 0.0

    @property
    def batch_ms(self) -> float:
        """Return the mean duration of a batch in milliseconds; 0 without a batch."""
        return self.busy_ms / self.batches if self.batches else 0.0


def line_of(tallies: Iterable[Tally]) -> str:
    """Return ``counts: 12,345 rows, 61,000/s, lag 0, batch 3 in 202 ms``, with ``|`` between queries."""
    return "  |  ".join(map(_part, tallies))


def _part(tally: Tally) -> str:
    last = tally.last
    if last is None:
        return f"{tally.name}: starting"
    return (
        f"{tally.name}: {tally.rows:,} rows, {last.rows_per_second:,.0f}/s, lag {last.lag:,},"
        f" batch {last.batch_id:,} in {last.batch_ms:,} ms"
    )
