"""Offsets as json: the connector's form, our keys beside it, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import TopicPartition
from sparkbridge.offsets import (
    Loss,
    OffsetFormatError,
    OffsetRange,
    Positions,
    StreamOffset,
    partition_number,
    positions_from_json,
    positions_to_json,
)

topics = st.text("abcXYZ019._-", min_size=1, max_size=12).filter(lambda name: name not in {".", ".."})
partitions = st.builds(TopicPartition, topics, st.integers(0, 2**31 - 1))
positions = st.dictionaries(partitions, st.integers(0, 2**63 - 1), max_size=8)
stream_offsets = st.builds(
    StreamOffset,
    positions=positions,
    ids=st.dictionaries(topics, st.text(min_size=1, max_size=8), max_size=3),
    from_=positions,
    is_initial=st.booleans(),
)


def test_the_form_is_the_connectors() -> None:
    offset = StreamOffset({TopicPartition("t", 0): 23})
    assert json.dumps(offset.to_json(), separators=(",", ":")) == '{"t":{"0":23}}'


def test_our_keys_are_beside_the_topics() -> None:
    offset = StreamOffset(
        {TopicPartition("t", 0): 150}, {"t": "uuid"}, {TopicPartition("t", 0): 100}, is_initial=True
    )
    assert offset.to_json() == {
        "t": {"0": 150},
        "@ids": {"t": "uuid"},
        "@from": {"t": {"0": 100}},
        "@initial": True,
    }


def test_partitions_are_in_the_order_of_their_numbers() -> None:
    told = positions_to_json(
        {TopicPartition("t", 10): 1, TopicPartition("t", 9): 2, TopicPartition("a", 3): 3}
    )
    assert json.dumps(told) == '{"a": {"3": 3}, "t": {"9": 2, "10": 1}}'


@settings(derandomize=True, deadline=None)
@given(stream_offsets)
def test_json_and_back_is_the_same(offset: StreamOffset) -> None:
    assert StreamOffset.parse(json.loads(json.dumps(offset.to_json()))) == offset


@settings(derandomize=True, deadline=None)
@given(stream_offsets, st.randoms())
def test_equal_values_give_equal_text(offset: StreamOffset, random: Any) -> None:
    def shuffled(values: dict[Any, Any]) -> dict[Any, Any]:
        items = list(values.items())
        random.shuffle(items)
        return dict(items)

    other = StreamOffset(
        shuffled(offset.positions), shuffled(offset.ids), shuffled(offset.from_), offset.is_initial
    )
    assert json.dumps(other.to_json()) == json.dumps(offset.to_json())


@settings(derandomize=True, deadline=None)
@given(positions)
def test_positions_and_back(wanted: Positions) -> None:
    assert positions_from_json(positions_to_json(wanted)) == wanted


@pytest.mark.parametrize(
    "told",
    [
        [],
        "t",
        None,
        {"t": 5},
        {"t": {"0": "5"}},
        {"t": {"0": -1}},
        {"t": {"0": True}},
        {"t": {"0": 1.5}},
        {"t": {"0": 2**63}},
        {"t": {"x": 5}},
        {"t": {"-1": 5}},
        {"t": {"00": 5}},
        {"t": {"2147483648": 5}},
        {"t": {"99999999999": 5}},
        {"t/u": {"0": 5}},
        {"": {"0": 5}},
        {"t": {"0": 5}, "@ids": ["t"]},
        {"t": {"0": 5}, "@ids": {"t": 5}},
        {"t": {"0": 5}, "@from": 5},
        {"t": {"0": 5}, "@from": {"t": {"0": -2}}},
        {"t": {"0": 5}, "@initial": 1},
    ],
    ids=str,
)
def test_an_invalid_offset_is_refused_and_quoted(told: Any) -> None:
    with pytest.raises(OffsetFormatError) as caught:
        StreamOffset.parse(told)
    assert "can't be used" in str(caught.value)
    assert "another source" in caught.value.hint


def test_a_key_of_a_later_version_is_refused() -> None:
    with pytest.raises(OffsetFormatError, match=r"@later.*newer version"):
        StreamOffset.parse({"t": {"0": 5}, "@later": 1})


def test_a_long_offset_is_quoted_partly() -> None:
    with pytest.raises(OffsetFormatError) as caught:
        StreamOffset.parse({f"topic-{i}": {"0": "x"} for i in range(1000)})
    assert len(str(caught.value)) < 500


def test_an_offset_that_is_not_json_is_quoted() -> None:
    with pytest.raises(OffsetFormatError, match="object at"):
        StreamOffset.parse({"t": object()})


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("2147483647", 2**31 - 1)])
def test_partition_numbers(text: str, number: int) -> None:
    assert partition_number(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", "01", " 1", "1.0", "x", "٣", 3, None, "2147483648"])
def test_an_invalid_partition_number(text: Any) -> None:
    assert partition_number(text) is None


def test_a_range_knows_its_size() -> None:
    assert OffsetRange("t", 0, 5, 9).size == 4


def test_a_loss_reads_as_a_sentence() -> None:
    assert str(Loss("t", 3, 5, 9, "gone")) == "t-3 offsets 5 to 9: gone"
