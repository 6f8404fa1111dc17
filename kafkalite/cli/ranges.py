"""The grammar of offset ranges: ``start``, ``:end``, ``-10``, ``42:50``, ``@-1h``, ``@T1:T2``. Pure.

::

    range  = bound [ ":" [bound] ] | ":" bound                       a range of offsets
           | "@" time [ ":" [time | "end"] ] | "@:" (time | "end")   a range of times
    bound  = "start" | "end" | N | "+N" | "-N"           +N: N after the log start; -N: N before the log end

The left bound is inclusive, and the right bound is exclusive. A range without a right bound has no end.
``:end`` stops at the log end at the time of resolution. Both times may be relative to now (``-1h``). A right
time such as ``+5m`` is relative to the left time, if there is one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Final

from kafkalite.cli.times import parse_time
from kafkalite.durations import parse_duration

EXAMPLES: Final = "start, end, :end, +10, -10, 42, 42:50, @-1h, @2015-05-17:2015-05-18"
_MAX_OFFSET_DIGITS: Final = 18


class Anchor(enum.Enum):
    START = "start"
    END = "end"
    OFFSET = "offset"
    AFTER_START = "after start"
    BEFORE_END = "before end"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Bound:
    """One side of a range. ``number`` is an offset, a count or ms since 1970, depending on ``anchor``."""

    anchor: Anchor
    number: int = 0


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """A range of offsets or times. ``first`` is inclusive; ``stop`` is exclusive, or None for no end."""

    first: Bound
    stop: Bound | None = None

    @property
    def timestamps_ms(self) -> tuple[int, ...]:
        """The timestamps among the bounds, in ms. ``resolve`` needs their offsets."""
        sides = (self.first, self.stop)
        return tuple(side.number for side in sides if side is not None and side.anchor is Anchor.TIME)


START: Final = Bound(Anchor.START)
END: Final = Bound(Anchor.END)


def parse_range(text: str, *, now_ms: int, zone: tzinfo | None = None) -> OffsetRange:
    """Parse a range. Raises ValueError for an invalid text, and as ``check_order``."""
    cleaned = text.strip()
    if cleaned.startswith("@"):
        found = _time_range(cleaned[1:], now_ms, zone)
    else:
        left, colon, right = cleaned.partition(":")
        first = _bound(left) if left else START
        stop = _bound(right) if right else None
        bad = first is None or (right and stop is None) or not cleaned or cleaned == ":"
        found = None if bad or first is None else OffsetRange(first, stop if colon else None)
    if found is None:
        raise ValueError(f"{text!r} is not a range; write for example {EXAMPLES}")
    check_order(found)
    return found


def check_order(wanted: OffsetRange) -> None:
    """Raise ValueError if both bounds have the same anchor, and ``stop`` is before ``first``."""
    first, stop = wanted.first, wanted.stop
    if stop is None or first.anchor is not stop.anchor:
        return
    is_backwards = (
        first.number < stop.number if first.anchor is Anchor.BEFORE_END else first.number > stop.number
    )
    if is_backwards:
        raise ValueError("the range ends before it begins; the first bound is the earlier one")


def parse_limit(text: str, *, now_ms: int, zone: tzinfo | None = None) -> Bound:
    """Parse the value of ``--from`` or ``--to``: ``start``, ``end``, or a time with or without ``@``.

    Raises ValueError for another text.
    """
    cleaned = text.strip()
    if cleaned in {"start", "end"}:
        return START if cleaned == "start" else END
    return Bound(Anchor.TIME, parse_time(cleaned.removeprefix("@"), now_ms=now_ms, zone=zone))


def _bound(text: str) -> Bound | None:
    if text in {"start", "end"}:
        return START if text == "start" else END
    sign, digits = (text[0], text[1:]) if text[:1] in {"+", "-"} else ("", text)
    if re.fullmatch(r"[0-9]+", digits) is None or len(digits) > _MAX_OFFSET_DIGITS:
        return None
    anchor = {"": Anchor.OFFSET, "+": Anchor.AFTER_START, "-": Anchor.BEFORE_END}[sign]
    return Bound(anchor, int(digits))


def _time_range(text: str, now_ms: int, zone: tzinfo | None) -> OffsetRange | None:
    """Return the range of times ``text``, from which ``@`` was removed; None if it is invalid.

    If the whole text is a time, such as ``09:30``, the range has no end. Otherwise the text is split at the
    first colon between two valid bounds. One of the two may be empty.
    """
    whole = _time(text, now_ms, zone)
    if whole is not None:
        return OffsetRange(Bound(Anchor.TIME, whole))
    for match in re.finditer(":", text):
        left, right = text[: match.start()], text[match.end() :]
        first_ms = _time(left, now_ms, zone)
        if (first_ms is None and left) or not (left or right):
            continue
        first = START if first_ms is None else Bound(Anchor.TIME, first_ms)
        if not right:
            return OffsetRange(first)
        if right == "end":
            return OffsetRange(first, END)
        stop_ms = _stop_time(right, first_ms, now_ms, zone)
        if stop_ms is not None:
            return OffsetRange(first, Bound(Anchor.TIME, stop_ms))
    return None


def _stop_time(text: str, first_ms: int | None, now_ms: int, zone: tzinfo | None) -> int | None:
    if text.startswith("+") and first_ms is not None:
        try:
            return first_ms + parse_duration(text[1:])
        except ValueError:
            return None
    return _time(text, now_ms, zone)


def _time(text: str, now_ms: int, zone: tzinfo | None) -> int | None:
    try:
        return parse_time(text, now_ms=now_ms, zone=zone)
    except ValueError:
        return None


def resolve(
    bound: Bound, *, log_start_offset: int, log_end_offset: int, offset_at: Mapping[int, int | None]
) -> int:
    """Return the offset of ``bound`` in one partition, limited to the log start and the log end.

    ``offset_at`` maps each timestamp to the first offset at or after it, or to None if all records are older.
    """
    match bound.anchor:
        case Anchor.START:
            offset = log_start_offset
        case Anchor.END:
            offset = log_end_offset
        case Anchor.OFFSET:
            offset = bound.number
        case Anchor.AFTER_START:
            offset = log_start_offset + bound.number
        case Anchor.BEFORE_END:
            offset = log_end_offset - bound.number
        case Anchor.TIME:
            at = offset_at[bound.number]
            offset = log_end_offset if at is None else at
    return max(log_start_offset, min(offset, log_end_offset))
