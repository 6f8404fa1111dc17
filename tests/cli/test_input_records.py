"""Input cut into blocks: order is kept, chunk boundaries do not matter, errors have their position."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.cli.input_records import Block, InputError, InputFormat, RecordDefaults, RecordReader


def blocks_of(how: InputFormat, *chunks: bytes, max_records: int = 1000, **defaults: Any) -> list[Block]:
    reader = RecordReader(
        "file",
        how,
        RecordDefaults(**({"topic": "t"} | defaults)),
        now_ms=99,
        parse_timestamp=lambda text: len(text),
    )
    found: list[Block] = []
    for chunk in chunks:
        for blocks in reader.feed(chunk, max_records=max_records):
            found += blocks
    for blocks in reader.finish(max_records=max_records):
        found += blocks
    return found


def values_of(blocks: list[Block]) -> list[bytes | None]:
    return [value for block in blocks for value in block.values]


@given(
    st.binary(max_size=60).map(lambda data: data.replace(b"\x01", b"\n")),
    st.integers(1, 7),
    st.integers(1, 5),
)
@settings(derandomize=True, deadline=None)
def test_lines_do_not_depend_on_chunks(data: bytes, step: int, most: int) -> None:
    chunks = [data[start : start + step] for start in range(0, len(data), step)]
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert values_of(blocks_of("lines", *chunks, max_records=most)) == expected


def test_a_plain_block_has_no_other_columns() -> None:
    assert blocks_of("lines", b"a\nb") == [
        Block("t", None, [b"a"], None, None, None),
        Block("t", None, [b"b"], None, None, None),
    ]


def test_fixed_key_partition_and_headers() -> None:
    (block,) = blocks_of("lines", b"a\nb\n", key=b"k", partition=3, headers=(("h", b"1"),))
    assert block == Block("t", 3, [b"a", b"b"], [b"k", b"k"], None, [(("h", b"1"),), (("h", b"1"),)])


def test_key_separator() -> None:
    (block,) = blocks_of("lines", b"a::1\nb\n::2\nc::\n", key_separator=b"::")
    assert block.keys == [b"a", None, b"", b"c"]
    assert block.values == [b"1", b"b", b"2", b""]


def test_key_separator_with_a_key_for_lines_that_have_none() -> None:
    (block,) = blocks_of("lines", b"a:1\nb\n", key_separator=b":", key=b"k")
    assert block.keys == [b"a", b"k"]


def test_empty_is_null_when_asked() -> None:
    (block,) = blocks_of("lines", b"a:\n:1\n", key_separator=b":", empty_is_null=True)
    assert block.values == [None, b"1"]
    assert block.keys == [b"a", None]
    (block,) = blocks_of("lines", b"\n", empty_is_null=True)
    assert (block.values, block.keys) == ([None], None)


def test_raw_is_one_value() -> None:
    (block,) = blocks_of("raw", b"a\n", b"b\x00", key=b"k", key_separator=b"a")
    assert (block.values, block.keys) == ([b"a\nb\x00"], [b"k"])


def test_lines_need_a_topic() -> None:
    with pytest.raises(InputError, match="only -i json and -i jsonl carry a topic"):
        blocks_of("lines", b"a\n", topic=None)


def test_jsonl_groups_by_topic_and_partition_in_order() -> None:
    blocks = blocks_of(
        "jsonl",
        b'{"topic":"a","partition":0,"timestamp":5,"key":"k","value":"1","headers":[["h","x"]]}\n\n',
        b'{"topic":"a","partition":1,"value":"2"}\n{"topic":"a","partition":0,"value":null}\n',
        b'{"topic":"b","value":"4"}',
        topic=None,
    )
    assert blocks == [
        Block("a", 0, [b"1"], [b"k"], [5], [(("h", b"x"),)]),
        Block("a", 1, [b"2"], None, None, None),
        Block("a", 0, [None], None, None, None),
        Block("b", None, [b"4"], None, None, None),
    ]


def test_the_command_line_wins_over_topic_and_partition_and_adds_headers() -> None:
    line = (
        b'{"topic":"a","partition":0,"value":"1","headers":[["h","x"]]}\n{"value":"2","timestamp":"word"}\n'
    )
    blocks = blocks_of("jsonl", line, partition=7, key=b"k", headers=(("z", None),))
    assert blocks == [
        Block("t", 7, [b"1", b"2"], [b"k", b"k"], [99, 4], [(("h", b"x"), ("z", None)), (("z", None),)])
    ]
    (block,) = blocks_of("jsonl", b'{"partition":0,"value":"1"}\n', any_partition=True)
    assert block.partition is None


@pytest.mark.parametrize(
    "text",
    [
        b'[{"value":"1"},{"value":"2"},{"value":"3"}]',
        b' {"value":"1"} {"value":"2"}\n[{"value":"3"}]\n',
        b'{"value":"1"},{"value":"2"},\n[{"value":"3"}]',
    ],
)
def test_json_is_arrays_or_records_one_after_another(text: bytes) -> None:
    assert values_of(blocks_of("json", text[:5], text[5:], max_records=2)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("how", "data", "problem"),
    [
        ("jsonl", b'{"value":"1"}\n{"key":1}\n', 'file:2: a record needs a "value"'),
        ("jsonl", b"\n\nplain text\n", "file:3: not JSON: Expecting value at column 1"),
        ("jsonl", b"\xff\n", "file:1: not JSON: not UTF-8"),
        ("jsonl", b"[" * 100_000, "file:1: JSON that is nested too deeply"),
        ("json", b'[{"value":"1"},{"key":1}]', 'file: record 2: a record needs a "value"'),
        ("json", b'{"value":"1"', "file: record 1: not JSON"),
        ("json", b"\xff", "file: record 1: not JSON: not UTF-8"),
        ("json", b'{"value":1}' + b"[" * 100_000, "file: record 2: JSON that is nested too deeply"),
    ],
)
def test_an_error_has_its_position(how: InputFormat, data: bytes, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        blocks_of(how, data)
    assert problem in str(refused.value)


def test_line_numbers_count_over_blocks_and_chunks() -> None:
    with pytest.raises(InputError, match="file:4:"):
        blocks_of("jsonl", b'{"value":"1"}\n{"value":"1"}\n', b'{"value":"1"}\n', b"x", max_records=1)


def test_a_json_record_needs_a_topic_from_somewhere() -> None:
    with pytest.raises(InputError, match='has no "topic"'):
        blocks_of("jsonl", b'{"value":"1"}\n', topic=None)
