"""The grammar of offset ranges."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.cli.ranges import END, START, Anchor, Bound, OffsetRange, parse_limit, parse_range, resolve

NOW = round(datetime(2015, 5, 17, 10, 5, 3, tzinfo=UTC).timestamp() * 1000)
HOUR = 3_600_000
DAY_START = NOW - 10 * HOUR - 303_000


def parsed(text: str) -> OffsetRange:
    return parse_range(text, now_ms=NOW, zone=UTC)


def at(ms: int) -> Bound:
    return Bound(Anchor.TIME, ms)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start", OffsetRange(START)),
        ("end", OffsetRange(END)),
        (":end", OffsetRange(START, END)),
        ("start:end", OffsetRange(START, END)),
        ("+10", OffsetRange(Bound(Anchor.AFTER_START, 10))),
        ("-10", OffsetRange(Bound(Anchor.BEFORE_END, 10))),
        ("-10:end", OffsetRange(Bound(Anchor.BEFORE_END, 10), END)),
        ("42", OffsetRange(Bound(Anchor.OFFSET, 42))),
        ("42:", OffsetRange(Bound(Anchor.OFFSET, 42))),
        ("42:50", OffsetRange(Bound(Anchor.OFFSET, 42), Bound(Anchor.OFFSET, 50))),
        (":50", OffsetRange(START, Bound(Anchor.OFFSET, 50))),
        ("+5:-5", OffsetRange(Bound(Anchor.AFTER_START, 5), Bound(Anchor.BEFORE_END, 5))),
        ("@-1h", OffsetRange(at(NOW - HOUR))),
        ("@-1h:", OffsetRange(at(NOW - HOUR))),
        ("@-1h:end", OffsetRange(at(NOW - HOUR), END)),
        ("@-2h:-1h", OffsetRange(at(NOW - 2 * HOUR), at(NOW - HOUR))),
        ("@:-1h", OffsetRange(START, at(NOW - HOUR))),
        ("@today", OffsetRange(at(DAY_START))),
        ("@yesterday:today", OffsetRange(at(DAY_START - 24 * HOUR), at(DAY_START))),
        ("@09:30", OffsetRange(at(DAY_START + 9 * HOUR + 1_800_000))),
        ("@09:30:10:00", OffsetRange(at(DAY_START + 9 * HOUR + 1_800_000), at(DAY_START + 10 * HOUR))),
        ("@2015-05-17:+1h", OffsetRange(at(DAY_START), at(DAY_START + HOUR))),
        ("@2015-05-17:2015-05-18", OffsetRange(at(DAY_START), at(DAY_START + 24 * HOUR))),
        ("@2015-05-17T09:05:03Z:2015-05-17T10:05:03Z", OffsetRange(at(NOW - HOUR), at(NOW))),
        ("@1431857103", OffsetRange(at(NOW))),
        ("@1431857103:1431857104000", OffsetRange(at(NOW), at(NOW + 1000))),
        (" 42 ", OffsetRange(Bound(Anchor.OFFSET, 42))),
    ],
)
def test_range(text: str, expected: OffsetRange) -> None:
    assert parsed(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "x",
        "1:x",
        "x:1",
        "--1",
        "+",
        "1:2:3",
        "@",
        "@:",
        "@x",
        "@-1h:x",
        "@x:-1h",
        "@:x",
        "@-1h:+x",
        "1" * 19,
    ],
)
def test_an_invalid_range_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a range; write for example start, end"):
        parsed(text)


def test_a_duration_needs_a_start() -> None:
    assert parsed("@:+1h") == OffsetRange(
        START, at(NOW + HOUR)
    )  # relative to now, because there is no left bound


def test_timestamps_to_look_up() -> None:
    assert parsed("@-2h:-1h").timestamps_ms == (NOW - 2 * HOUR, NOW - HOUR)
    assert parsed("@-2h").timestamps_ms == (NOW - 2 * HOUR,)
    assert parsed("42:50").timestamps_ms == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start", START),
        ("end", END),
        ("-1h", at(NOW - HOUR)),
        ("@-1h", at(NOW - HOUR)),
        (" today ", at(DAY_START)),
    ],
)
def test_limit(text: str, expected: Bound) -> None:
    assert parse_limit(text, now_ms=NOW, zone=UTC) == expected


def test_a_limit_is_not_an_offset() -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_limit("42", now_ms=NOW, zone=UTC)


@pytest.mark.parametrize(
    ("bound", "offset"),
    [
        (START, 100),
        (END, 200),
        (Bound(Anchor.OFFSET, 150), 150),
        (Bound(Anchor.OFFSET, 7), 100),
        (Bound(Anchor.OFFSET, 700), 200),
        (Bound(Anchor.AFTER_START, 10), 110),
        (Bound(Anchor.BEFORE_END, 10), 190),
        (Bound(Anchor.BEFORE_END, 1000), 100),
        (at(5), 123),
        (at(6), 200),
    ],
)
def test_resolve(bound: Bound, offset: int) -> None:
    assert resolve(bound, log_start_offset=100, log_end_offset=200, offset_at={5: 123, 6: None}) == offset


@given(st.text(alphabet="0123456789+-:@sendtaryhm TZ", max_size=12))
@settings(derandomize=True, deadline=None)
def test_any_text_is_a_range_or_refused(text: str) -> None:
    try:
        found = parsed(text)
    except ValueError:
        return
    assert isinstance(found, OffsetRange)


@pytest.mark.parametrize("text", ["10:5", "+10:+5", "-5:-10", "@2015-05-18:2015-05-17"])
def test_a_range_that_ends_before_it_begins_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        parse_range(text, now_ms=0)


@pytest.mark.parametrize("text", ["5:5", "5:10", "-10:-5", "+5:+10", "10:+5", "@2015-05-17:2015-05-18"])
def test_other_ranges_are_not_reversed(text: str) -> None:
    parse_range(text, now_ms=0)
