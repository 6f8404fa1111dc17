"""Format strings: kcat's letters, Python's braces."""

from __future__ import annotations

import pytest

from kafkalite.cli.formats import compile_format, unescape
from kafkalite.model import Record, TimestampType

RECORD = Record(
    "orders",
    2,
    42,
    1431857103007,
    TimestampType.CREATE_TIME,
    b"alice",
    b'{"amount": 9.5, "who": {"name": "Al"}, "tags": ["a", "b"]}',
    (("source", b"web"), ("empty", None)),
)
NULLS = RECORD._replace(key=None, value=None, headers=())
BINARY = RECORD._replace(key=b"\xff\x00", value=b"\xfe")


def shown(text: str, record: Record = RECORD) -> bytes:
    return compile_format(text)(record)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%t %p %o\\n", b"orders 2 42\n"),
        ("%k=%K", b"alice=5"),
        ("%S", b"58"),
        ("%T", b"1431857103007"),
        ("%h", b"source=web,empty="),
        ("100%% %k", b"100% alice"),
        ('{"k":"%k"}\\n', b'{"k":"alice"}\n'),
        ("\\t%k\\x41\\\\", b"\talice\x41\\"),
        ("%k{hex}", b"616c696365"),
        ("%k{base64}", b"YWxpY2U="),
        ("%k{json}", b'"alice"'),
        ("%s{json}", b'{"amount":9.5,"who":{"name":"Al"},"tags":["a","b"]}'),
        ("%T{iso}", b"2015-05-17T10:05:03.007Z"),
        ("%T{strftime[%Y/%m/%d %H:%M]}", b"2015/05/17 10:05"),
        ("%k 5% %%x", b"alice 5% %x"),
        ("%%{hex} %k", b"%{hex} alice"),
    ],
)
def test_letters(text: str, expected: bytes) -> None:
    assert shown(text) == expected


def test_letters_of_nulls() -> None:
    assert shown("%k|%K|%s|%S|%h", NULLS) == b"|-1||-1|"


def test_letters_keep_bytes_as_they_are() -> None:
    assert shown("%k%s", BINARY) == b"\xff\x00\xfe"
    assert shown("é%k", BINARY) == "é".encode() + b"\xff\x00"


def test_no_timestamp_formats_as_a_dash() -> None:
    assert shown("%T{strftime[%Y]}", RECORD._replace(timestamp_ms=2**62)) == b"-"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{topic}[{partition}]@{offset} {key}", b"orders[2]@42 alice\n"),
        ("{value.amount:>8}|", b"     9.5|\n"),
        ("{value.amount:.2f}", b"9.50\n"),
        ("{value.who.name}", b"Al\n"),
        ("{value[who][name]}", b"Al\n"),
        ("{value.who}", b'{"name": "Al"}\n'),
        ("{value.tags[0]}{value.tags.-1}{value.tags[9]}{value.tags.x}", b"ab\n"),
        ("{value.missing:.2f}{value.amount.deeper}", b"\n"),
        ("{headers.source} {headers[empty]}.", b"web .\n"),
        ("{headers}", b"source=web,empty=\n"),
        ("{timestamp} {time}", b"1431857103007 2015-05-17T10:05:03.007Z\n"),
        ("{key!r}", b"'alice'\n"),
        ("{{{key}}}\\t100%", b"{alice}\t100%\n"),
        ("{key.name}", b"\n"),
        ("{key:.2f}", b"alice\n"),
    ],
)
def test_braces(text: str, expected: bytes) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize(("value", "expected"), [(b"null", b"\n"), (b"true", b"true\n"), (b"0", b"0\n")])
def test_braces_print_values_of_json_as_json_and_null_as_nothing(value: bytes, expected: bytes) -> None:
    assert shown("{value.a}", RECORD._replace(value=b'{"a":' + value + b"}")) == expected


def test_json_that_is_nested_too_deeply_is_formatted_like_text() -> None:
    """At some depths, the JSON can be read but not written."""
    for depth in (*range(800, 1000), 100_000):
        value = b"[" * depth + b"]" * depth
        record = RECORD._replace(value=value)
        assert shown("%s{json}", record) in {value, b'"' + value + b'"'}
        assert shown("{value[0]}", record) in {value[1:-1] + b"\n", b"\n"}


def test_json_with_half_of_a_character_is_formatted_like_text() -> None:
    assert shown("%s{json}", RECORD._replace(value=b'"\\ud800"')) == b'"\\"\\\\ud800\\""'


def test_half_of_a_character_remains_an_escape() -> None:
    half = RECORD._replace(value=b'{"a": "x\\ud800", "b": ["\\udfff"], "\\ud83d": 1}', key=b"\xff")
    assert shown("{value.a}", half) == b"x\\ud800\n"
    assert shown("{value.a:>3}|{value.b}{key}", half) == b' x\\ud800|["\\udfff"]\xff\n'
    assert shown("{value[a]!r}", half) == b"'x\\ud800'\n"
    assert shown("\ud800%s", NULLS) == b"\\ud800"


def test_braces_of_nulls_and_bytes() -> None:
    assert shown("{key}|{value}", NULLS) == b"|\n"
    assert shown("{value.x}", NULLS) == b"\n"
    assert shown("{key}|{value}", BINARY) == b"\xff\x00|\xfe\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "selects no field of a record"),
        ("%k{iso}", "%k takes no {iso}"),
        ("%T{hex}", "%T takes no {hex}"),
        ("%o{hex}", "%o takes no {hex}"),
        ("%k %q", "%q is no field of a record; letters: %t"),
        ("{amount}", "{amount} is not a field of a record; fields: topic"),
        ("{}", "is not a field"),
        ("{offset.x}", "only key, value and headers have fields"),
        ("{key", "write a literal brace twice"),
    ],
)
def test_an_invalid_format_is_refused_with_what_is_allowed(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        compile_format(text)
    assert problem in str(refused.value)


def test_unescape() -> None:
    assert unescape(r"a\n\t\r\0\\\x41\q") == "a\n\t\r\0\\A\\q"
