"""Resolves where to start and where to end against a snapshot of the topics. Pure.

``needed_lookups`` returns the look-ups that are required (offsets for times, offsets of a group);
``resolve_starting`` and ``resolve_ending`` then make positions from the snapshot and the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kafkalite.model import TopicPartition
from sparkbridge.errors import SparkOptionError
from sparkbridge.offsets import Loss, Positions, Snapshot
from sparkbridge.position_specs import EndingSpec, PositionSpec, StartingSpec, Where


class StartOffsetMismatchError(SparkOptionError):
    """Offsets in json do not name exactly the partitions that are read."""


class NoOffsetForTimeError(SparkOptionError):
    """Every record is older than the time to start at, and the strategy is ``error``."""


class StartAfterEndError(SparkOptionError):
    """A batch would start after its end."""


class Lookups(NamedTuple):
    """Required look-ups: the first offset at or after a time (ms), and a group's offsets."""

    times: dict[TopicPartition, int]
    is_group_wanted: bool = False

    def __bool__(self) -> bool:
        return bool(self.times) or self.is_group_wanted


class LookupResults(NamedTuple):
    """The results of look-ups: None for a time after every record; partitions without a commit are absent."""

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


def assigned(
    snapshot: Snapshot, assign: Mapping[str, Sequence[int]] | None = None
) -> dict[TopicPartition, Bounds]:
    """Return the partitions of a snapshot that are read, in order; with ``assign`` only those.

    No end is before its start: an open transaction may hold the last stable offset behind the log start.
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
    """Raise StartOffsetMismatchError unless the spec covers each partition and no other."""
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
    """Return the time (ms) to look up for a place, or None."""
    if where.kind == "ago":
        return max(0, now_ms - where.value)
    return where.value if where.kind == "time" else None


def resolve_starting(
    spec: StartingSpec, partitions: Mapping[TopicPartition, Bounds], results: LookupResults = NO_RESULTS
) -> Resolved:
    """Return positions within the logs. An offset outside is a loss and is moved to the nearer side.

    A partition for which the group has no offset starts at its log start, so that no record is skipped.
    Raises StartOffsetMismatchError and NoOffsetForTimeError.
    """
    check_match(spec, partitions)
    positions: Positions = {}
    losses: list[Loss] = []
    for tp, (start, end) in partitions.items():
        where = spec.where(tp)
        assert where is not None, "check_match() saw it"
        wanted: int | None
        match where.kind:
            case "earliest":
                wanted = start
            case "latest":
                wanted = end
            case "back":
                wanted = max(start, end - where.value)
            case "offset":
                wanted = where.value
            case "group":
                wanted = results.committed.get(tp, start)
            case _:  # "time" and "ago"
                found = results.times[tp]
                if found is None and not spec.is_latest_without_match:
                    raise NoOffsetForTimeError(
                        f"{spec.option}: no record of {tp} has that time or a later one",
                        hint="startingOffsetsByTimestampStrategy=latest starts at the end there",
                    )
                wanted = end if found is None else min(max(start, found), end)
        position = min(max(start, wanted), end)
        if position != wanted:
            losses.append(_outside(spec, tp, wanted, position))
        positions[tp] = position
    return Resolved(positions, losses)


def resolve_ending(
    spec: EndingSpec, partitions: Mapping[TopicPartition, Bounds], results: LookupResults = NO_RESULTS
) -> Resolved:
    """Return the ends (exclusive) of a batch. An offset that is not written yet is a loss.

    Raises StartOffsetMismatchError.
    """
    check_match(spec, partitions)
    positions: Positions = {}
    losses: list[Loss] = []
    for tp, (start, end) in partitions.items():
        wanted = ending_offset(spec, tp, Bounds(start, end), results)
        if wanted is None:
            wanted = end
        where = spec.where(tp)
        # The record of a time may have been written since the snapshot.
        if wanted > end and where is not None and where.kind == "offset":
            losses.append(_outside(spec, tp, wanted, end))
        positions[tp] = min(max(start, wanted), end)
    return Resolved(positions, losses)


def ending_offset(spec: EndingSpec, tp: TopicPartition, bounds: Bounds, results: LookupResults) -> int | None:
    """Return the requested end of one partition; None for ``latest``, or if no record has the time yet."""
    where = spec.where(tp)
    match where:
        case Where("offset", offset):
            return offset
        case Where("back", count):
            return max(bounds.start, bounds.end - count)
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
