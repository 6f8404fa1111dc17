"""The grammar of durations."""

from __future__ import annotations

import pytest

from kafkalite.durations import format_duration, parse_duration

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("10", 10_000),
        ("0.5", 500),
        ("10s", 10_000),
        ("500ms", 500),
        ("1h30m", HOUR + 30 * 60_000),
        ("1.5h", HOUR + 30 * 60_000),
        ("2min", 120_000),
        ("7d", 7 * 24 * HOUR),
        ("2w", 14 * 24 * HOUR),
        (" 1H ", HOUR),
        ("1h 30m", HOUR + 30 * 60_000),
        ("10 s", 10_000),
    ],
)
def test_duration(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize("text", ["", "h", "1x", "-1h", "1h 30", "1 0s", "1e3", "∞"])
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write for example 10s, 500ms"):
        parse_duration(text)


def test_a_number_without_a_unit_is_in_the_callers_unit() -> None:
    assert parse_duration("5", bare_unit="ms") == 5
    with pytest.raises(ValueError, match="'5' is not a duration"):
        parse_duration("5", bare_unit=None)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (340, "340 ms"),
        (4321, "4.3 s"),
        (59_949, "59.9 s"),
        (59_950, "1m0s"),
        (90 * 60_000, "1h30m"),
        (53 * HOUR, "2d5h"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(ms: int, text: str) -> None:
    assert format_duration(ms) == text
