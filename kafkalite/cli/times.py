"""Parses times as people write them, and formats times.

A time without a zone is local time, as in ``date`` and ``journalctl --since``.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Final

from kafkalite.durations import parse_duration

_EPOCH = re.compile(r"0|[0-9]{9,16}")
_CLOCK_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")
_FIRST_EPOCH_IN_MS: Final = 10**11  # in seconds, this is the year 5138; in milliseconds, 1973

TIME_EXAMPLES: Final = "2015-05-17, 2015-05-17T10:05:03Z, 1431857103, -1h, today, 09:30"


def parse_time(text: str, *, now_ms: int, zone: tzinfo | None = None) -> int:
    """Parse a time into milliseconds since the Unix epoch. Raises ValueError.

    Accepts RFC 3339, dates, ``09:30`` (today), epoch seconds or milliseconds, ``-1h`` and ``+5m`` from now,
    ``now``, ``today``, ``yesterday``, ``tomorrow``. A ``zone`` of None is the system's time zone.
    """
    cleaned = text.strip()
    if cleaned[:1] in {"-", "+"}:
        with suppress(ValueError):
            duration_ms = parse_duration(cleaned[1:], bare_unit=None)
            return now_ms - duration_ms if cleaned[0] == "-" else now_ms + duration_ms
    if _EPOCH.fullmatch(cleaned):
        number = int(cleaned)
        return number if number >= _FIRST_EPOCH_IN_MS else number * 1000
    word = _named_time(cleaned.lower(), now_ms, zone)
    if word is not None:
        return word
    try:
        moment = datetime.fromisoformat(cleaned)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write for example {TIME_EXAMPLES}") from None
    return _to_ms(moment, zone)


def _named_time(word: str, now_ms: int, zone: tzinfo | None) -> int | None:
    if word == "now":
        return now_ms
    today = datetime.fromtimestamp(now_ms / 1000, zone).replace(tzinfo=None)
    midnight = datetime.combine(today.date(), time())
    day = {"yesterday": -1, "today": 0, "tomorrow": 1}.get(word)
    if day is not None:
        return _to_ms(midnight + timedelta(days=day), zone)
    clock_time = _CLOCK_TIME.fullmatch(word)
    if clock_time is not None:
        hour, minute, second = (int(part or 0) for part in clock_time.groups())
        return _to_ms(midnight.replace(hour=hour, minute=minute, second=second), zone)
    return None


def _to_ms(moment: datetime, zone: tzinfo | None) -> int:
    if moment.tzinfo is None and zone is not None:
        moment = moment.replace(tzinfo=zone)
    return round(moment.timestamp() * 1000)


def format_time(timestamp_ms: int) -> str:
    """Return milliseconds since the epoch as RFC 3339 in UTC; ``-`` for a negative or too large number."""
    if timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return "-"
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{timestamp_ms % 1000:03d}Z"
