"""Records as JSON and back, exactly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.cli.record_json import Draft, from_document, to_line
from kafkalite.model import Record, TimestampType

RECORD = Record("t", 1, 7, 1431857103000, TimestampType.CREATE_TIME, b"k", b"v", (("h", b"1"), ("h", None)))


def no_times(text: str) -> int:
    raise ValueError(f"{text!r} is not a time")


def draft(document: object) -> Draft:
    return from_document(document, no_times)


def test_a_line_is_one_object_in_a_fixed_order() -> None:
    assert to_line(RECORD) == (
        b'{"topic":"t","partition":1,"offset":7,"timestamp":1431857103000,'
        b'"key":"k","value":"v","headers":[["h","1"],["h",null]]}\n'
    )


def test_binary_data_is_base64_and_null_is_null() -> None:
    line = json.loads(to_line(RECORD._replace(key=None, value=b"\xff\x00", headers=())))
    assert line["key"] is None
    assert line["value"] == {"b64": "/wA="}
    assert line["headers"] == []


binary = st.one_of(st.none(), st.binary(max_size=20), st.text(max_size=10).map(str.encode))
records = st.builds(
    Record,
    topic=st.just("t"),
    partition=st.integers(0, 9),
    offset=st.integers(0, 2**62),
    timestamp_ms=st.integers(0, 2**62),
    timestamp_type=st.just(TimestampType.CREATE_TIME),
    key=binary,
    value=binary,
    headers=st.lists(st.tuples(st.text(max_size=5), binary), max_size=3).map(tuple),
)


@given(records)
@settings(derandomize=True, deadline=None)
def test_any_record_survives_the_round_trip(record: Record) -> None:
    line = to_line(record)
    assert line.count(b"\n") == 1
    assert not any(code < 32 or 127 <= code < 160 for code in map(ord, line.decode().removesuffix("\n")))
    assert draft(json.loads(line)) == (
        record.topic,
        record.partition,
        record.timestamp_ms,
        record.key,
        record.value,
        record.headers,
    )


def test_only_a_value_is_required() -> None:
    assert draft({"value": "v"}) == Draft(None, None, None, None, b"v", ())
    assert draft({"value": None, "key": None, "headers": None}) == Draft(None, None, None, None, None, ())


def test_any_other_json_is_stored_in_its_shortest_form() -> None:
    assert draft({"key": 7, "value": {"a": [1, "é"]}})[3:5] == (b"7", '{"a":[1,"é"]}'.encode())
    assert draft({"value": {"b64": "YQ==", "more": 1}}).value == b'{"b64":"YQ==","more":1}'


def test_headers_may_be_an_object() -> None:
    assert draft({"value": "v", "headers": {"a": "1", "b": None}}).headers == (("a", b"1"), ("b", None))


def test_a_timestamp_may_be_text_and_minus_one_is_none() -> None:
    assert from_document({"value": "v", "timestamp": "then"}, lambda text: len(text)).timestamp_ms == 4
    assert draft({"value": "v", "timestamp": -1}).timestamp_ms is None


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "a record is a JSON object"),
        ({"value": "v", "vlaue": 1}, "'vlaue' is not a field of a record"),
        ({"key": "k"}, 'a record needs a "value"'),
        ({"value": {"b64": "!"}}, "value holds"),
        ({"value": {"b64": 5}}, "value holds"),
        ({"value": "v", "partition": -1}, "partition must be 0 or more"),
        ({"value": "v", "partition": True}, "partition must be 0 or more"),
        ({"value": "v", "topic": 5}, "topic must be text"),
        ({"value": "v", "timestamp": 1.5}, "timestamp must be milliseconds"),
        ({"value": "v", "timestamp": -2}, "timestamp must be milliseconds"),
        ({"value": "v", "timestamp": "noon"}, "'noon' is not a time"),
        ({"value": "v", "headers": "x"}, "headers must be pairs"),
        ({"value": "v", "headers": [["a"]]}, "headers must be pairs"),
        ({"value": "v", "headers": [[1, "a"]]}, "headers must be pairs"),
        ({"value": "v", "headers": [["a", {"b64": "!"}]]}, "header 'a' holds"),
    ],
)
def test_an_invalid_record_is_refused_with_a_reason(document: object, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        draft(document)
    assert problem in str(refused.value)
