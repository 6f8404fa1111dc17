"""What retention removes: segment summaries, the policy and the time in; a plan out. Nothing is touched.

Kafka's rules: whole segments only, the oldest first, none that reaches above ``up_to`` (the high
watermark). A segment goes when the log start is past it, when its largest timestamp is older than
``retention.ms``, or when the log without it still holds ``retention.bytes``. The active segment is only
planned together with a roll, so that a log always has one. A segment without any timestamp doesn't age;
one in which compaction has left no record goes with the next one that does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kafkalite.model import NO_TIMESTAMP


class SegmentSummary(NamedTuple):
    """``next_offset`` is exclusive; ``max_timestamp_ms`` is NO_TIMESTAMP when no record has one.

    ``is_gap``: there is no record."""

    base_offset: int
    next_offset: int
    size_bytes: int
    max_timestamp_ms: int
    is_gap: bool = False


class RetentionPlan(NamedTuple):
    """Remove so many of the oldest segments, all of them only after a roll; then the log starts there."""

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
    """Plan for ``segments``, oldest first, the active one last; taken from only while one more goes.

    ``log_size_bytes`` is of all of them. -1 switches a rule off. ``now_ms`` is wall-clock time, as the
    records' timestamps; ``up_to`` is exclusive.
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
