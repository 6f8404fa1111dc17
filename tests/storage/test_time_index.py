from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import NO_TIMESTAMP
from kafkalite.storage.time_index import TimeIndex

Entries = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=30)


def build(steps: list[tuple[int, int]]) -> tuple[TimeIndex, list[tuple[int, int]]]:
    """Return the largest timestamps so far, and the entries that the steps must add."""
    index, model, offset, largest = TimeIndex(), [], 0, NO_TIMESTAMP
    for timestamp, step in steps:
        offset += step
        if timestamp > largest:
            largest = timestamp
            model.append((timestamp, offset))
        index.maybe_append(timestamp, offset)
    return index, model


def as_list(index: TimeIndex) -> list[tuple[int, int]]:
    return list(zip(index.timestamps, index.relative_offsets, strict=True))


def test_an_empty_index_finds_no_time() -> None:
    index = TimeIndex()
    assert len(index) == 0
    assert index.last_timestamp_ms == NO_TIMESTAMP
    assert index.last_relative_offset == 0
    assert index.first_not_below(0) is None


def test_entries_are_big_endian() -> None:
    index = TimeIndex()
    index.maybe_append(0x0102030405060708, 9)
    assert index.entries(0, 1) == bytes.fromhex("0102030405060708 00000009")


@settings(derandomize=True, deadline=None)
@given(Entries, st.integers(0, 60), st.integers(0, 300))
def test_only_growing_timestamps_are_indexed(
    steps: list[tuple[int, int]], timestamp: int, offset: int
) -> None:
    index, model = build(steps)
    assert as_list(index) == model
    assert index.first_not_below(timestamp) == next((o for t, o in model if t >= timestamp), None)
    assert index.count_below_offset(offset) == sum(o < offset for _, o in model)
    index.truncate_to_offset(offset)
    assert as_list(index) == [(t, o) for t, o in model if o < offset]


@settings(derandomize=True, deadline=None)
@given(Entries, st.integers(0, 40))
def test_entries_saved_in_parts_are_loaded(steps: list[tuple[int, int]], cut: int) -> None:
    index, model = build(steps)
    cut = min(cut, len(model))
    copy = TimeIndex()
    assert copy.extend(index.entries(0, cut)) and copy.extend(index.entries(cut, len(model)))
    assert as_list(copy) == model


def test_entries_that_do_not_continue_the_index_are_refused_whole() -> None:
    index, _ = build([(10, 1), (20, 1)])
    for entries in ([(20, 3)], [(30, 2)], [(30, 3), (30, 4)], [(30, 3), (40, 3)]):
        data = b"".join(t.to_bytes(8, "big") + o.to_bytes(4, "big") for t, o in entries)
        assert not index.extend(data)
        assert len(index) == 2
