"""Start and end positions as users write them in options. Pure.

``source.start_and_end`` resolves these specifications to offsets.
"""

# Tests: tests/sparkbridge/test_start_and_end.py

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from kafkalite.durations import parse_duration
from kafkalite.model import TopicPartition, topic_name_problem
from sparkbridge.errors import SparkOptionError
from sparkbridge.offsets import partition_number

Kind = Literal["earliest", "latest", "offset", "back", "group", "time", "ago"]


class Where(NamedTuple):
    """A position in a partition. The meaning of ``value`` depends on ``kind``.

    ``value`` is an offset (offset), a number of offsets before the end (back), a time in ms (time), or an age
    in ms (ago). The other kinds have no value.
    """

    kind: Kind
    value: int = 0


EARLIEST: Final = Where("earliest")
LATEST: Final = Where("latest")
GROUP: Final = Where("group")


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """The positions that the option ``option`` requests: for all partitions, by topic or by partition."""

    option: str
    everywhere: Where | None = None
    topics: Mapping[str, Where] = field(default_factory=dict, hash=False)
    partitions: Mapping[TopicPartition, Where] = field(default_factory=dict, hash=False)

    def where(self, tp: TopicPartition) -> Where | None:
        """Return the most specific position for ``tp``, or None."""
        return self.partitions.get(tp) or self.topics.get(tp.topic) or self.everywhere

    def places(self) -> Iterator[Where]:
        if self.everywhere is not None:
            yield self.everywhere
        yield from self.topics.values()
        yield from self.partitions.values()


@dataclass(frozen=True, slots=True)
class StartingSpec(PositionSpec):
    """Where a query starts.

    If all records are older than the starting time, the start is the log end if ``is_latest_without_match``;
    otherwise that is an error.
    """

    is_latest_without_match: bool = False


@dataclass(frozen=True, slots=True)
class EndingSpec(PositionSpec):
    """Where a batch job, or a bounded stream, ends. A time after the last record means the log end."""


_BACK = re.compile(r"-(\d{1,19})")
_MILLISECONDS = re.compile(r"[0-9]{1,19}")
_MAX_LONG: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_OFFSET_EXAMPLES: Final = 'earliest, latest, group, "-100" (that many before the end), {"t":{"0":23,"1":-2}}'
_END_EXAMPLES: Final = 'latest, "-100" (that many before the end), {"t":{"0":23,"1":-1}}'
_TIME_EXAMPLES: Final = "1431857103000 (milliseconds), 2015-05-17T10:05:03Z, -10m"


def parse_starting_offsets(text: str, option: str = "startingOffsets") -> StartingSpec:
    """Parse a position (earliest, latest, group, -100), or JSON of positions by topic or partition.

    Raises SparkOptionError.
    """
    return StartingSpec(option, *_parse(text, option, _starting_place, _OFFSET_EXAMPLES))


def parse_ending_offsets(text: str, option: str = "endingOffsets") -> EndingSpec:
    """Parse a position (latest, -100), or JSON of positions by topic or partition.

    Raises SparkOptionError.
    """
    return EndingSpec(option, *_parse(text, option, _ending_place, _END_EXAMPLES))


def parse_starting_times(text: str, option: str, *, is_latest_without_match: bool) -> StartingSpec:
    """Parse one time, or JSON of times by topic or partition. Raises SparkOptionError."""
    places = _parse(text, option, _time_place, _TIME_EXAMPLES)
    return StartingSpec(option, *places, is_latest_without_match=is_latest_without_match)


def parse_ending_times(text: str, option: str) -> EndingSpec:
    return EndingSpec(option, *_parse(text, option, _time_place, _TIME_EXAMPLES))


def _parse(
    text: str, option: str, read: Any, examples: str
) -> tuple[Where | None, dict[str, Where], dict[TopicPartition, Where]]:
    """Return (the position for all partitions, positions by topic, positions by partition).

    ``read`` parses one position, and returns None if it is invalid. Raises SparkOptionError.
    """

    def place(value: Any, whose: str) -> Where:
        is_readable = isinstance(value, str | int) and not isinstance(value, bool)
        where: Where | None = read(value) if is_readable else None
        if where is None:
            raise SparkOptionError(
                f"{option} has {value!r} for {whose}, which is not a valid place",
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
        parsed = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise SparkOptionError(
            f"{option} is {text[:200]!r}, which is not json: {cause}", hint=f"write for example {examples}"
        ) from cause
    assert isinstance(parsed, dict), "json that begins with a brace is an object"
    return parsed


def _starting_place(value: str | int) -> Where | None:
    value = value.lower() if isinstance(value, str) else value  # any case, as in Spark's connector
    if value == "earliest" or value == -2:
        return EARLIEST
    if value == "group":
        return GROUP
    return _ending_place(value)


def _ending_place(value: str | int) -> Where | None:
    """Parse an end position. Return None for other values, such as ``earliest`` and ``group``."""
    if isinstance(value, int):
        return LATEST if value == -1 else Where("offset", value) if 0 <= value <= _MAX_LONG else None
    if value.lower() == "latest":
        return LATEST
    back = _BACK.fullmatch(value)
    return Where("back", int(back[1])) if back is not None else None


def _time_place(value: str | int) -> Where | None:
    """Parse ms since 1970, ISO 8601 (UTC by default), or ``-10m`` (10 minutes ago). None if invalid."""
    if isinstance(value, int):
        return Where("time", value) if 0 <= value <= _MAX_LONG else None
    if _MILLISECONDS.fullmatch(value):
        return _time_place(int(value))
    if value.startswith("-"):
        try:
            return Where("ago", parse_duration(value[1:], bare_unit=None))
        except ValueError:
            return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    timestamp_ms = -((_EPOCH - moment) // _MILLISECOND)  # rounded up, so that no earlier record is included
    return Where("time", timestamp_ms) if timestamp_ms >= 0 else None
