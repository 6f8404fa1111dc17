"""Converts the filters that Spark pushes to a batch reader into limits of the ranges to read. Pure.

The limits exclude only records that the filters reject. Spark applies all filters to the records again.
Filters are recognized by their class names, so that pyspark is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kafkalite.model import TopicPartition
from sparkbridge.offsets import OffsetRange

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "EqualTo": lambda actual, value: actual == value,
    "EqualNullSafe": lambda actual, value: actual == value,
    "GreaterThan": lambda actual, value: actual > value,
    "GreaterThanOrEqual": lambda actual, value: actual >= value,
    "LessThan": lambda actual, value: actual < value,
    "LessThanOrEqual": lambda actual, value: actual <= value,
    "In": lambda actual, value: actual in value,
}
_TYPES: Final[Mapping[str, type]] = {"topic": str, "partition": int, "offset": int, "timestamp": datetime}


@dataclass(frozen=True, slots=True)
class Pruning:
    """Limits on the records to read, derived from filters that must all hold.

    ``topics`` and ``partitions`` are pairs (class name of a filter, its operand). Offsets are from ``first``
    (inclusive) to ``until`` (exclusive). ``from_ms`` is the minimum timestamp of the wanted records. There is
    no maximum, because the timestamps of a log need not ascend: a record with an earlier timestamp may
    follow.
    """

    topics: tuple[tuple[str, Any], ...] = ()
    partitions: tuple[tuple[str, Any], ...] = ()
    first: int = 0
    until: int | None = None
    from_ms: int | None = None

    @classmethod
    def of(cls, filters: Iterable[Any]) -> Pruning:
        """Return the limits that follow from pyspark's filters. Filters that imply no limit are ignored."""
        pruning = cls()
        for each in filters:
            known = _readable(each)
            if known is not None:
                pruning = pruning._and(*known)
        return pruning

    def _and(self, column: str, name: str, value: Any) -> Pruning:
        if column == "topic":
            return replace(self, topics=(*self.topics, (name, value)))
        if column == "partition":
            return replace(self, partitions=(*self.partitions, (name, value)))
        if name == "In" and not value:
            return replace(self, until=0)  # the list contained only null
        if column == "offset":
            first, until = _interval(name, value)
            ends = [end for end in (self.until, until) if end is not None]
            return replace(self, first=max(self.first, first), until=min(ends, default=None))
        from_ms = _from_ms(name, value)
        times = [time_ms for time_ms in (self.from_ms, from_ms) if time_ms is not None]
        return replace(self, from_ms=max(times, default=None))

    def narrow(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """Return the parts of ``ranges`` that are within the limits of topic, partition and offset."""
        kept: list[OffsetRange] = []
        for range_ in ranges:
            if not all(_COMPARE[name](range_.topic, value) for name, value in self.topics):
                continue
            if not all(_COMPARE[name](range_.partition, value) for name, value in self.partitions):
                continue
            end = range_.end if self.until is None else min(range_.end, self.until)
            start = max(range_.start, self.first)
            if start < end:
                kept.append(range_._replace(start=start, end=end))
        return kept

    def times(self, ranges: Iterable[OffsetRange]) -> dict[TopicPartition, int]:
        """Return {partition: timestamp in ms} for which ``narrow_by_time`` needs the offset."""
        if self.from_ms is None:
            return {}
        return {TopicPartition(range_.topic, range_.partition): self.from_ms for range_ in ranges}

    def narrow_by_time(
        self, ranges: Iterable[OffsetRange], found: Mapping[TopicPartition, int | None]
    ) -> list[OffsetRange]:
        """Return ``ranges`` without offsets below those in ``found``, the results of looking up ``times``.

        If a result is None, all records of the partition are older, so its ranges are omitted. Ranges of
        partitions that are not in ``found`` stay unchanged.
        """
        kept: list[OffsetRange] = []
        for range_ in ranges:
            first = found.get(TopicPartition(range_.topic, range_.partition), range_.start)
            if first is not None and first < range_.end:
                kept.append(range_._replace(start=max(range_.start, first)))
        return kept


def _readable(each: Any) -> tuple[str, str, Any] | None:
    """Return (column, class name, operand) of the filter ``each``, or None if it cannot limit the ranges."""
    name = type(each).__name__
    attribute: tuple[str, ...] = getattr(each, "attribute", ())
    if name not in _COMPARE or len(attribute) != 1 or attribute[0] not in _TYPES:
        return None
    column = attribute[0]
    if name == "In":
        values = tuple(value for value in each.value if value is not None)  # null equals nothing
        return (column, name, values) if all(_is_fit(column, value) for value in values) else None
    return (column, name, each.value) if _is_fit(column, each.value) else None


def _is_fit(column: str, value: Any) -> bool:
    if not isinstance(value, _TYPES[column]) or isinstance(value, bool):
        return False
    return not isinstance(value, datetime) or value.tzinfo is not None


def _interval(name: str, value: Any) -> tuple[int, int | None]:
    """Return (first offset, exclusive end or None) of the offsets that can pass a filter.

    ``name`` is the class name of the filter, such as GreaterThan, and ``value`` is its operand.
    """
    match name:
        case "EqualTo" | "EqualNullSafe":
            return value, value + 1
        case "GreaterThan":
            return value + 1, None
        case "GreaterThanOrEqual":
            return value, None
        case "LessThan":
            return 0, value
        case "LessThanOrEqual":
            return 0, value + 1
    return min(value), max(value) + 1


def _from_ms(name: str, value: Any) -> int | None:
    """Return the minimum timestamp (ms) that can pass a filter; None if there is no minimum.

    ``name`` is the class name of the filter, such as GreaterThan, and ``value`` is its operand. Records
    without a timestamp have -1, so a limit below 0 is ignored.
    """
    match name:
        case "EqualTo" | "EqualNullSafe" | "GreaterThanOrEqual":
            least = -((_EPOCH - value) // _MILLISECOND)  # rounded up: timestamps are whole milliseconds
        case "GreaterThan":
            least = (value - _EPOCH) // _MILLISECOND + 1
        case "In":
            least = -((_EPOCH - min(value)) // _MILLISECOND)
        case _:
            return None
    return least if least >= 0 else None
