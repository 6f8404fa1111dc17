"""Decides which segments retention removes. Pure: takes summaries, the policy and the time, returns a plan.

Kafka's rules: only whole segments below ``up_to`` (the high watermark) are removed, oldest first. A segment
is removed if it is below the log start, if its largest timestamp is older than ``retention.ms``, or if the
rest of the log still has at least ``retention.bytes``. The active segment is planned for removal only
together with a roll, so that a log always has a segment. A segment without any timestamp is never older than
``retention.ms``. A segment without records, left by compaction, is also removed if the next segment that has
records is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kafkalite.model import NO_TIMESTAMP


class SegmentSummary(NamedTuple):
    """The properties of one segment. ``next_offset`` is exclusive. ``max_timestamp_ms`` may be NO_TIMESTAMP.

    ``is_gap``: the segment contains no records.
    """

    base_offset: int
    next_offset: int
    size_bytes: int
    max_timestamp_ms: int
    is_gap: bool = False


class RetiredPaths:
    """Paths to remove after a delay, which begins with the first ``due`` call after their ``add``."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[str, int | None] = {}  # by path, in order; None before the delay begins

    def add(self, path: str) -> None:
        self._due[path] = None

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, path: str) -> bool:
        return path in self._due

    def due(self, now_ms: int, delay_ms: int) -> list[str]:
        """Remove and return the paths whose delay has passed."""
        due = {path: now_ms + delay_ms if due_ms is None else due_ms for path, due_ms in self._due.items()}
        self._due = {path: due_ms for path, due_ms in due.items() if due_ms > now_ms}
        return [path for path, due_ms in due.items() if due_ms <= now_ms]


class RetentionPlan(NamedTuple):
    """The number of oldest segments to remove and the resulting log start. Removing all requires a roll."""

    segment_count: int
    log_start_offset: int


def plan_retention(
    segments: Iterable[SegmentSummary],
    *,
    log_size_bytes: int,
    log_start_offset: int,
    up_to: int,
    retention_ms: int,
    retention_bytes: int,
    now_ms: int,
) -> RetentionPlan:
    """Return the plan for ``segments``, oldest first and active last. Reads only as many as needed.

    ``log_size_bytes`` is the size of all segments. ``up_to`` (exclusive) is the high watermark; only segments
    below it are removed. -1 for ``retention_ms`` or ``retention_bytes`` disables that rule. ``now_ms`` is
    wall clock time, like the records' timestamps.
    """
    count, start = 0, log_start_offset
    excess_bytes = log_size_bytes - retention_bytes
    for number, segment in enumerate(segments, 1):
        if segment.next_offset > up_to or segment.next_offset == segment.base_offset:
            break
        passed = segment.next_offset <= log_start_offset
        aged = 0 <= retention_ms < now_ms - segment.max_timestamp_ms
        expired = aged and segment.max_timestamp_ms != NO_TIMESTAMP
        oversize = retention_bytes >= 0 and excess_bytes >= segment.size_bytes
        excess_bytes -= segment.size_bytes
        if passed or expired or oversize:
            start = max(start, segment.next_offset)
            count = number
        elif not segment.is_gap:
            break
    return RetentionPlan(count, start)
