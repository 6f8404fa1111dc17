"""Parses durations such as ``500ms``, ``1h30m`` and ``7d``, and formats them."""

from __future__ import annotations

import re
from typing import Final

_UNIT_MS: Final = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_NUMBER: Final = r"\d{1,15}(?:\.\d+)?"
_PART: Final = re.compile(rf"({_NUMBER})\s*(ms|min|s|m|h|d|w)\s*")
_DURATION: Final = re.compile(rf"(?:{_PART.pattern})+")

DURATION_EXAMPLES: Final = "10s, 500ms, 1h30m, 7d"


def parse_duration(text: str, *, bare_unit: str | None = "s") -> int:
    """Parse a duration such as ``1h30m`` into milliseconds.

    A number without a unit is in ``bare_unit``; if that is None, a unit is required. Raises ValueError.
    """
    cleaned = text.strip().lower()
    if bare_unit is not None and re.fullmatch(_NUMBER, cleaned):
        cleaned += bare_unit
    if _DURATION.fullmatch(cleaned) is None:
        raise ValueError(f"{text!r} is not a duration; write for example {DURATION_EXAMPLES}")
    return round(sum(float(number) * _UNIT_MS[unit] for number, unit in _PART.findall(cleaned)))


def format_duration(duration_ms: int) -> str:
    """Format milliseconds in one or two units: ``340 ms``, ``4.3 s``, ``1h30m``, ``2d5h``."""
    if duration_ms < 1000:
        return f"{duration_ms} ms"
    if duration_ms < 59_950:  # above, it is 60.0 when rounded
        return f"{duration_ms / 1000:.1f} s"
    seconds = max(duration_ms // 1000, 60)
    for unit_s, small_s, unit, small in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "m"), (60, 1, "m", "s")):
        if seconds >= unit_s:
            return f"{seconds // unit_s}{unit}{seconds % unit_s // small_s}{small}"
    raise AssertionError("a minute or more has a unit")
