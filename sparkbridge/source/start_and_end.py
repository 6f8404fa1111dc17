"""Where to start and where to end, against a snapshot of the topics. Pure.

``questions`` returns the look-ups that are needed (offsets for times, offsets of a group);
``resolve_starting`` and ``resolve_ending`` then make positions from the snapshot and the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kafkalite.model import TopicPartition
from sparkbridge.errors import SparkOptionError
from sparkbridge.offsets import Loss, Positions, Snapshot
from sparkbridge.position_specs import EndingSpec, PositionSpec, StartingSpec, Where


class StartOffsetMismatchError(SparkOptionError):
    """Offsets by json must name exactly the partitions that are read."""


class NoOffsetForTimeError(SparkOptionError):
    """Every record is older than the time to start at, and the strategy is ``error``."""


class StartAfterEndError(SparkOptionError):
    """A batch that begins behind its end."""


class Questions(NamedTuple):
    """Look-ups that a resolution needs: the first offset at or after a time (ms), and a group's offsets."""

    times: dict[TopicPartition, int]
    is_group_wanted: bool = False

    def __bool__(self) -> bool:
        return bool(self.times) or self.is_group_wanted


class Answers(NamedTuple):
    """None for a time: every record is older. A partition that the group never committed is absent."""

    times: Mapping[TopicPartition, int | None] = {}
    committed: Mapping[TopicPartition, int] = {}


NO_ANSWERS: Final = Answers()


class Resolved(NamedTuple):
    positions: Positions
    losses: list[Loss]


class Bounds(NamedTuple):
    """What can be read of a partition now: ``start`` inclusive, ``end`` exclusive."""

    start: int
    end: int


def assigned(
    snapshot: Snapshot, assign: Mapping[str, Sequence[int]] | None = None
) -> dict[TopicPartition, Bounds]:
    """The partitions of a snapshot that are read, in order; with ``assign`` only those.

    No end is before its start: an open transaction may hold the LSO back behind a log start that moved on.
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
    """Raises StartOffsetMismatchError unless the spec has a word on each partition, and on no other."""
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
            hint="read are now: " + (_listed([str(tp) for tp in partitions]) or "none"),
        )


def questions(spec: PositionSpec, partitions: Mapping[TopicPartition, Bounds], now_ms: int) -> Questions:
    """What to look up before the spec can be resolved. Raises StartOffsetMismatchError."""
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
    return Questions(times, is_group_wanted)


def time_of(where: Where, now_ms: int) -> int | None:
    """The time (ms) to look up for a place; None for one that needs none."""
    if where.kind == "ago":
        return max(0, now_ms - where.value)
    return where.value if where.kind == "time" else None


def resolve_starting(
    spec: StartingSpec, partitions: Mapping[TopicPartition, Bounds], answers: Answers = NO_ANSWERS
) -> Resolved:
    """Positions inside what is there; an offset outside of it is told as a loss and moved to the nearer side.

    A partition for which the group has no offset starts at its log start, so nothing is skipped. Raises
    StartOffsetMismatchError and NoOffsetForTimeError.
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
                wanted = answers.committed.get(tp, start)
            case _:  # "time" and "ago"
                found = answers.times[tp]
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
    spec: EndingSpec, partitions: Mapping[TopicPartition, Bounds], answers: Answers = NO_ANSWERS
) -> Resolved:
    """Ends (exclusive) of a batch. An offset that is not written yet is told as a loss.

    Raises StartOffsetMismatchError.
    """
    check_match(spec, partitions)
    positions: Positions = {}
    losses: list[Loss] = []
    for tp, (start, end) in partitions.items():
        wanted = ending_offset(spec, tp, Bounds(start, end), answers)
        if wanted is None:
            wanted = end
        where = spec.where(tp)
        if wanted > end and where is not None and where.kind == "offset":  # a time may be written since
            losses.append(_outside(spec, tp, wanted, end))
        positions[tp] = min(max(start, wanted), end)
    return Resolved(positions, losses)


def ending_offset(spec: EndingSpec, tp: TopicPartition, bounds: Bounds, answers: Answers) -> int | None:
    """The end that is asked for in one partition; None when no record has the time yet, or for ``latest``."""
    where = spec.where(tp)
    match where:
        case Where("offset", offset):
            return offset
        case Where("back", count):
            return max(bounds.start, bounds.end - count)
        case Where("time" | "ago"):
            return answers.times[tp]
    return None


def check_order(starting: Mapping[TopicPartition, int], ending: Mapping[TopicPartition, int]) -> None:
    """Raises StartAfterEndError for the first partition that would be read backwards."""
    for tp, end in sorted(ending.items()):
        start = starting.get(tp, 0)
        if start > end:
            raise StartAfterEndError(
                f"{tp} is to be read from offset {start} to {end}, which is before it",
                hint="compare the starting options with the ending ones",
            )


def _outside(spec: PositionSpec, tp: TopicPartition, wanted: int, position: int) -> Loss:
    side = "before the log start" if wanted < position else "behind the end"
    why = f"{spec.option} asks for offset {wanted}, which is {side}; {position} is taken"
    return Loss(tp.topic, tp.partition, min(wanted, position), max(wanted, position), why)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
