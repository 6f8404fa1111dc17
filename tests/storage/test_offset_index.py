from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.storage.offset_index import OffsetIndex

Steps = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 10_000)), max_size=30)


def build(steps: list[tuple[int, int]]) -> tuple[OffsetIndex, list[tuple[int, int]]]:
    index, model, offset, position = OffsetIndex(), [], 0, 0
    for offset_step, position_step in steps:
        offset += offset_step
        position += position_step
        index.append(offset, position)
        model.append((offset, position))
    return index, model


def test_an_empty_index_points_to_the_start() -> None:
    index = OffsetIndex()
    assert len(index) == index.last_position == index.last_relative_offset == 0
    assert index.entry_before_offset(100) == index.entry_before_position(100) == (0, 0)
    assert index.entries(0, 0) == b""


def test_entries_are_big_endian_pairs() -> None:
    index = OffsetIndex()
    index.append(1, 0x01020304)
    assert index.entries(0, 1) == bytes.fromhex("00000001 01020304")


@settings(derandomize=True, deadline=None)
@given(Steps, st.integers(0, 40_000), st.integers(0, 400_000))
def test_lookups_find_what_a_walk_finds(steps: list[tuple[int, int]], offset: int, position: int) -> None:
    index, model = build(steps)
    assert index.entry_before_offset(offset) == max(((p, o) for o, p in model if o <= offset), default=(0, 0))
    before = max(((p, o) for o, p in model if p <= position), default=(0, 0))
    assert index.entry_before_position(position) == before
    assert index.count_up_to_position(position) == sum(p <= position for _, p in model)


@settings(derandomize=True, deadline=None)
@given(Steps, st.integers(0, 40))
def test_entries_saved_in_parts_are_loaded(steps: list[tuple[int, int]], cut: int) -> None:
    index, model = build(steps)
    cut = min(cut, len(model))
    copy = OffsetIndex()
    assert copy.extend(index.entries(0, cut))
    assert copy.extend(index.entries(cut, len(model)))
    assert list(zip(copy.relative_offsets, copy.positions, strict=True)) == model


@settings(derandomize=True, deadline=None)
@given(Steps, st.integers(0, 400_000))
def test_truncation_forgets_batches_from_there_on(steps: list[tuple[int, int]], position: int) -> None:
    index, model = build(steps)
    index.truncate_to_position(position)
    kept = [(o, p) for o, p in model if p < position]
    assert list(zip(index.relative_offsets, index.positions, strict=True)) == kept
    assert index.last_relative_offset == (kept[-1][0] if kept else 0)


def test_entries_that_do_not_continue_the_index_are_refused_whole() -> None:
    index, _ = build([(10, 100), (10, 100)])
    for offsets in ([(20, 300)], [(30, 200)], [(30, 300), (30, 400)], [(30, 300), (40, 300)]):
        pairs = b"".join(o.to_bytes(4, "big") + p.to_bytes(4, "big") for o, p in offsets)
        assert not index.extend(pairs)
        assert len(index) == 2
