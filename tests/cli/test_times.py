"""Times as people type them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.cli.times import format_time, parse_time

NOW = round(datetime(2015, 5, 17, 10, 5, 3, tzinfo=UTC).timestamp() * 1000)
HOUR = 3_600_000
EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("now", NOW),
        ("-1h", NOW - HOUR),
        ("-1h30m", NOW - HOUR - 30 * 60_000),
        ("+5m", NOW + 300_000),
        ("0", 0),
        ("1431857103", NOW),
        ("1431857103000", NOW),
        ("1431857103123", NOW + 123),
        ("2015-05-17T10:05:03Z", NOW),
        ("2015-05-17T12:05:03+02:00", NOW),
        ("2015-05-17 10:05:03", NOW),
        ("2015-05-17T10:05:03.250Z", NOW + 250),
        ("2015-05-17", NOW - 10 * HOUR - 303_000),
        ("today", NOW - 10 * HOUR - 303_000),
        ("yesterday", NOW - 34 * HOUR - 303_000),
        ("tomorrow", NOW + 14 * HOUR - 303_000),
        ("09:30", NOW - 35 * 60_000 - 3_000),
        ("9:30:03", NOW - 35 * 60_000),
    ],
)
def test_time(text: str, ms: int) -> None:
    assert parse_time(text, now_ms=NOW, zone=UTC) == ms


def test_a_time_without_a_zone_is_local() -> None:
    assert parse_time("2015-05-17T12:05:03", now_ms=NOW, zone=EAST) == NOW
    assert parse_time("today", now_ms=NOW, zone=EAST) == NOW - 12 * HOUR - 303_000
    assert parse_time("2015-05-17T10:05:03Z", now_ms=NOW, zone=EAST) == NOW


def test_the_zone_of_the_system_is_the_default() -> None:
    there = round(datetime(2015, 5, 17, 10, 5, 3).timestamp() * 1000)
    assert parse_time("2015-05-17T10:05:03", now_ms=NOW) == there


@pytest.mark.parametrize("text", ["", "noon", "25:00", "2015-13-01", "12345", "1h", "@-1h", "-"])
def test_an_invalid_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write for example 2015-05-17"):
        parse_time(text, now_ms=NOW, zone=UTC)


def test_format_time() -> None:
    assert format_time(NOW + 7) == "2015-05-17T10:05:03.007Z"
    assert format_time(-1) == "-"
    assert format_time(2**63) == "-"


@given(st.integers(min_value=0, max_value=253_402_300_799_999))
@settings(derandomize=True, deadline=None)
def test_a_formatted_time_parses_to_itself(ms: int) -> None:
    assert parse_time(format_time(ms), now_ms=0) == ms
