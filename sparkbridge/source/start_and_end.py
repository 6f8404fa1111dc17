"""Resolves start and end specifications to offsets with a snapshot of the topics. Pure.

``needed_lookups`` returns the required look-ups (offsets for times, committed offsets of a group).
``resolve_starting`` and ``resolve_ending`` then compute the positions from the snapshot and the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kafkalite.model import TopicPartition
from sparkbridge.errors import SparkOptionError
from sparkbridge.offsets import Loss, Positions, Snapshot
from sparkbridge.position_specs import EndingSpec, PositionSpec, StartingSpec, Where


class StartOffsetMismatchError(SparkOptionError):
    """An option with positions as JSON does not name exactly the partitions that are read."""


class NoOffsetForTimeError(SparkOptionError):
    """A partition has no record at or after its starting time, and the strategy is ``error``.

    The strategy is the option startingOffsetsByTimestampStrategy.
    """


class StartAfterEndError(SparkOptionError):
    """In a partition, the start of a batch job is after its end."""


class Lookups(NamedTuple):
    """The look-ups to make: the offsets for ``times`` (ms) and, if wanted, the group's committed offsets."""

    times: dict[TopicPartition, int]
    is_group_wanted: bool = False

    def __bool__(self) -> bool:
        return bool(self.times) or self.is_group_wanted


class LookupResults(NamedTuple):
    """The results of look-ups: offsets by partition. In ``times``, None means that all records are older."""

    times: Mapping[TopicPartition, int | None] = {}
    committed: Mapping[TopicPartition, int] = {}


NO_RESULTS: Final = LookupResults()


class Resolved(NamedTuple):
    positions: Positions
    losses: list[Loss]


class Bounds(NamedTuple):
    """The readable offsets of a partition: ``start`` inclusive, ``end`` exclusive."""

    start: int
    end: int

    def nearest(self, offset: int | None) -> int:
        """Return the readable position nearest to ``offset``, or the end if ``offset`` is None."""
        return self.end if offset is None else min(max(self.start, offset), self.end)


def assigned(
    snapshot: Snapshot, assign: Mapping[str, Sequence[int]] | None = None
) -> dict[TopicPartition, Bounds]:
    """Return the bounds of the partitions in ``assign`` (None: all) that ``snapshot`` has, in order.

    If an open transaction holds the last stable offset below the log start, the end is the log start.
    """
    found: dict[TopicPartition, Bounds] = {}
    for topic, known in sorted(snapshot.items()):
        numbers = range(len(known.starts)) if assign is None else sorted(assign.get(topic, ()))
        for number in numbers:
            if number < len(known.starts) and known.starts[number] >= 0:
                start, end = known.starts[number], known.ends[number]
                found[TopicPartition(topic, number)] = Bounds(start, max(start, end))
    return found


def check_match(spec: PositionSpec, partitions: Mapping[TopicPartition, Bounds]) -> None:
    """Raise StartOffsetMismatchError unless ``spec`` has a position for exactly ``partitions``."""
    topics = {tp.topic for tp in partitions}
    missing = [str(tp) for tp in partitions if spec.where(tp) is None]
    foreign = sorted(str(tp) for tp in spec.partitions if tp not in partitions)
    foreign += sorted(topic for topic in spec.topics if topic not in topics)
    if missing or foreign:
        lacks = f"lacks {_listed(missing)}" if missing else ""
        names = f"names {_listed(foreign)}, which is not read" if foreign else ""
        raise StartOffsetMismatchError(
            f"{spec.option} must name exactly the partitions that are read: it "
            f"{' and '.join(part for part in (lacks, names) if part)}",
            hint="the partitions are: " + (_listed([str(tp) for tp in partitions]) or "none"),
        )


def needed_lookups(spec: PositionSpec, partitions: Mapping[TopicPartition, Bounds], now_ms: int) -> Lookups:
    """Return the look-ups that are required to resolve the spec. Raises StartOffsetMismatchError."""
    check_match(spec, partitions)
    times: dict[TopicPartition, int] = {}
    is_group_wanted = False
    for tp in partitions:
        where = spec.where(tp)
        assert where is not None, "check_match() saw it"
        timestamp_ms = time_of(where, now_ms)
        if timestamp_ms is not None:
            times[tp] = timestamp_ms
        is_group_wanted = is_group_wanted or where.kind == "group"
    return Lookups(times, is_group_wanted)


def time_of(where: Where, now_ms: int) -> int | None:
    """Return the time (ms) to look up for the position ``where``; None if it needs no look-up."""
    if where.kind == "ago":
        return max(0, now_ms - where.value)
    return where.value if where.kind == "time" else None


def resolve_starting(
    spec: StartingSpec, partitions: Mapping[TopicPartition, Bounds], results: LookupResults = NO_RESULTS
) -> Resolved:
    """Return the start positions.

    A requested offset outside the log is replaced by the nearest position in it and reported as a loss. With
    ``group``, a partition without a committed offset starts at its log start, so that no record is skipped.
    Raises StartOffsetMismatchError and NoOffsetForTimeError.
    """
    check_match(spec, partitions)
    positions: Positions = {}
    losses: list[Loss] = []
    for tp, bounds in partitions.items():
        wanted = requested_offset(spec, tp, bounds, results)
        is_time = tp in results.times
        if wanted is None and is_time and not spec.is_latest_without_match:
            raise NoOffsetForTimeError(
                f"{spec.option}: no record of {tp} has that time or a later one",
                hint="startingOffsetsByTimestampStrategy=latest starts at the end there",
            )
        positions[tp] = bounds.nearest(wanted)
        if wanted is not None and wanted != positions[tp] and not is_time:
            losses.append(_outside(spec, tp, wanted, positions[tp]))
    return Resolved(positions, losses)


def resolve_ending(
    spec: EndingSpec, partitions: Mapping[TopicPartition, Bounds], results: LookupResults = NO_RESULTS
) -> Resolved:
    """Return the exclusive ends of a batch. A requested end beyond the end of the log is reported as a loss.

    Raises StartOffsetMismatchError.
    """
    check_match(spec, partitions)
    positions: Positions = {}
    losses: list[Loss] = []
    for tp, bounds in partitions.items():
        wanted = requested_offset(spec, tp, bounds, results)
        positions[tp] = bounds.nearest(wanted)
        # A record found by its time may have been written after the snapshot.
        if wanted is not None and wanted > bounds.end and tp not in results.times:
            losses.append(_outside(spec, tp, wanted, bounds.end))
    return Resolved(positions, losses)


def requested_offset(
    spec: PositionSpec, tp: TopicPartition, bounds: Bounds, results: LookupResults
) -> int | None:
    """Return the requested offset in ``tp``; None for ``latest``, or for a time after all records."""
    match spec.where(tp):
        case Where("earliest"):
            return bounds.start
        case Where("offset", offset):
            return offset
        case Where("back", count):
            return max(bounds.start, bounds.end - count)
        case Where("group"):
            return results.committed.get(tp, bounds.start)
        case Where("time" | "ago"):
            return results.times[tp]
    return None


def check_order(starting: Mapping[TopicPartition, int], ending: Mapping[TopicPartition, int]) -> None:
    """Raise StartAfterEndError for the first partition whose start is after its end."""
    for tp, end in sorted(ending.items()):
        start = starting.get(tp, 0)
        if start > end:
            raise StartAfterEndError(
                f"{tp} would start at offset {start} and end at {end}",
                hint="compare the starting options with the ending ones",
            )


def _outside(spec: PositionSpec, tp: TopicPartition, wanted: int, position: int) -> Loss:
    side = "before the log start" if wanted < position else "beyond the end"
    why = f"{spec.option} asks for offset {wanted}, which is {side}; {position} is used"
    return Loss(tp.topic, tp.partition, min(wanted, position), max(wanted, position), why)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
