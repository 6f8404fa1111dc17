"""Where to start and where to end: what the user may write, and what it means against a snapshot.

Two steps, both pure. ``questions`` tells which look-ups the answer needs (offsets of times, offsets of a
group); ``resolve_starting`` and ``resolve_ending`` then make positions of the snapshot and the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from kafkalite.model import TopicPartition, topic_name_problem
from sparkbridge.errors import SparkOptionError
from sparkbridge.source.offsets import Loss, Positions, Snapshot, partition_number

Kind = Literal["earliest", "latest", "offset", "back", "group", "time", "ago"]


class Where(NamedTuple):
    """One place in a partition. ``value`` is an offset, a count back from the end, or milliseconds."""

    kind: Kind
    value: int = 0


EARLIEST: Final = Where("earliest")
LATEST: Final = Where("latest")
GROUP: Final = Where("group")


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """A place for every partition, or by topic, or by partition; the option it was read from, for errors."""

    option: str
    everywhere: Where | None = None
    topics: Mapping[str, Where] = field(default_factory=dict, hash=False)
    partitions: Mapping[TopicPartition, Where] = field(default_factory=dict, hash=False)

    def where(self, tp: TopicPartition) -> Where | None:
        """The nearest word on ``tp``; None when there is none."""
        return self.partitions.get(tp) or self.topics.get(tp.topic) or self.everywhere

    def places(self) -> Iterator[Where]:
        if self.everywhere is not None:
            yield self.everywhere
        yield from self.topics.values()
        yield from self.partitions.values()


@dataclass(frozen=True, slots=True)
class StartingSpec(PositionSpec):
    """Where a query begins. ``is_latest_without_match``: a time later than every record means the end."""

    is_latest_without_match: bool = False


@dataclass(frozen=True, slots=True)
class EndingSpec(PositionSpec):
    """Where a batch, or a bounded stream, ends. A time later than every record means the end."""


class StartOffsetMismatchError(SparkOptionError):
    """Offsets by json must name exactly the partitions that are read."""


class NoOffsetForTimeError(SparkOptionError):
    """Every record is older than the time to start at, and the strategy is ``error``."""


class StartAfterEndError(SparkOptionError):
    """A batch that begins behind its end."""


# --- reading the options ---------------------------------------------------------------------------
_BACK = re.compile(r"-(\d{1,19})")
_AGO = re.compile(r"-((?:\d{1,15}(?:\.\d+)?(?:ms|min|s|m|h|d|w))+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|s|m|h|d|w)")
_MILLISECONDS = re.compile(r"[0-9]{1,19}")
_UNIT_MS: Final = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
_MAX_LONG: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_OFFSET_EXAMPLES: Final = 'earliest, latest, group, "-100" (that many before the end), {"t":{"0":23,"1":-2}}'
_END_EXAMPLES: Final = 'latest, "-100" (that many before the end), {"t":{"0":23,"1":-1}}'
_TIME_EXAMPLES: Final = "1431857103000 (milliseconds), 2015-05-17T10:05:03Z, -10m"


def parse_starting_offsets(text: str, option: str = "startingOffsets") -> StartingSpec:
    """``earliest``, ``latest``, ``group``, ``-100``, or json of these. Raises SparkOptionError."""
    return StartingSpec(option, *_parse(text, option, _starting_place, _OFFSET_EXAMPLES))


def parse_ending_offsets(text: str, option: str = "endingOffsets") -> EndingSpec:
    """``latest``, ``-100``, or json of these and of offsets. Raises SparkOptionError."""
    return EndingSpec(option, *_parse(text, option, _ending_place, _END_EXAMPLES))


def parse_starting_times(text: str, option: str, *, is_latest_without_match: bool) -> StartingSpec:
    """One time, or json of times by topic or by partition. Raises SparkOptionError."""
    places = _parse(text, option, _time_place, _TIME_EXAMPLES)
    return StartingSpec(option, *places, is_latest_without_match=is_latest_without_match)


def parse_ending_times(text: str, option: str) -> EndingSpec:
    return EndingSpec(option, *_parse(text, option, _time_place, _TIME_EXAMPLES))


def _parse(
    text: str, option: str, read: Any, examples: str
) -> tuple[Where | None, dict[str, Where], dict[TopicPartition, Where]]:
    """(everywhere, by topic, by partition). ``read`` makes a place of a text or number, or None."""

    def place(value: Any, whose: str) -> Where:
        is_readable = isinstance(value, str | int) and not isinstance(value, bool)
        where: Where | None = read(value) if is_readable else None
        if where is None:
            raise SparkOptionError(
                f"{option} has {value!r} for {whose}, which is no place there",
                hint=f"write for example {examples}",
            )
        return where

    cleaned = text.strip()
    if not cleaned.startswith("{"):
        return place(cleaned, "all partitions"), {}, {}
    topics: dict[str, Where] = {}
    partitions: dict[TopicPartition, Where] = {}
    for topic, value in _parse_object(cleaned, option, examples).items():
        problem = topic_name_problem(topic)
        if problem is not None:
            raise SparkOptionError(f"{option}: {problem}", hint=f"write for example {examples}")
        if not isinstance(value, Mapping):
            topics[topic] = place(value, f"topic {topic}")
            continue
        for key, each in value.items():
            number = partition_number(key)
            if number is None:
                raise SparkOptionError(
                    f"{option} has the partition {key!r} of topic {topic}",
                    hint='partitions are numbers in quotes: {"t":{"0":23}}',
                )
            partitions[TopicPartition(topic, number)] = place(each, f"{topic}-{number}")
    return None, topics, partitions


def _parse_object(text: str, option: str, examples: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise SparkOptionError(
            f"{option} is {text[:200]!r}, which is no json: {cause}", hint=f"write for example {examples}"
        ) from cause
    assert isinstance(told, dict), "json that begins with a brace is an object"
    return told


def _starting_place(value: str | int) -> Where | None:
    if value == "earliest" or value == -2:
        return EARLIEST
    if value == "group":
        return GROUP
    return _ending_place(value)


def _ending_place(value: str | int) -> Where | None:
    """Everything but ``earliest`` and ``group``: a batch does not end there."""
    if isinstance(value, int):
        return LATEST if value == -1 else Where("offset", value) if 0 <= value <= _MAX_LONG else None
    if value == "latest":
        return LATEST
    back = _BACK.fullmatch(value)
    return Where("back", int(back[1])) if back is not None else None


def _time_place(value: str | int) -> Where | None:
    """Milliseconds since the epoch, ISO 8601 (UTC where no zone is told), or ``-10m``: so long ago."""
    if isinstance(value, int):
        return Where("time", value) if 0 <= value <= _MAX_LONG else None
    if _MILLISECONDS.fullmatch(value):
        return _time_place(int(value))
    ago = _AGO.fullmatch(value.lower())
    if ago is not None:
        return Where(
            "ago", round(sum(float(number) * _UNIT_MS[unit] for number, unit in _PART.findall(ago[1])))
        )
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    timestamp_ms = -((_EPOCH - moment) // _MILLISECOND)  # rounded up: no record before it is wanted
    return Where("time", timestamp_ms) if timestamp_ms >= 0 else None


# --- resolving them --------------------------------------------------------------------------------
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
