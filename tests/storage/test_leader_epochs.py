"""R2, R4 and R5 of the epoch cache, compared with a list of the epoch of every offset."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import NO_EPOCH
from kafkalite.storage.leader_epochs import LeaderEpochs

Runs = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), max_size=8)


def build(runs: list[tuple[int, int]]) -> tuple[LeaderEpochs, list[int]]:
    """Return a cache, and the epoch of each offset; ``runs`` are (epoch step, number of records)."""
    epochs, model, epoch = LeaderEpochs(), [], 0
    for step, count in runs:
        epoch += step
        epochs.assign(epoch, len(model))
        model += [epoch] * count
    return epochs, model


def scan(model: list[int], start: int = 0) -> list[tuple[int, int]]:
    found = []
    for offset in range(start, len(model)):
        if not found or model[offset] != found[-1][0]:
            found.append((model[offset], offset))
    return found


@settings(derandomize=True, deadline=None)
@given(Runs, st.integers(0, 25))
def test_r4_the_end_of_an_epoch_is_where_the_next_known_one_starts(
    runs: list[tuple[int, int]], asked: int
) -> None:
    epochs, model = build(runs)
    answer = epochs.end_offset_for(asked, len(model))
    known = [epoch for epoch in model if epoch <= asked]
    if not model:
        assert answer == (asked, 0)
    elif not known:
        assert answer == (asked, 0)  # the lowest known epoch starts the log
    else:
        epoch = max(known)
        end = next((offset for offset, one in enumerate(model) if one > epoch), len(model))
        assert answer == (epoch, end)


@settings(derandomize=True, deadline=None)
@given(Runs, st.integers(0, 45))
def test_r5_truncation_leaves_what_a_scan_finds(runs: list[tuple[int, int]], end: int) -> None:
    epochs, model = build(runs)
    epochs.truncate_from_end(end)
    assert epochs.entries() == scan(model[:end])


@settings(derandomize=True, deadline=None)
@given(Runs, st.integers(0, 45))
def test_deleting_the_front_leaves_what_a_scan_finds(runs: list[tuple[int, int]], start: int) -> None:
    epochs, model = build(runs)
    epochs.truncate_from_start(start)
    if start < len(model):
        assert epochs.entries() == scan(model, start)


def test_r2_an_epoch_without_batches_is_replaced_by_the_next() -> None:
    epochs = LeaderEpochs([(1, 0), (2, 10)])
    epochs.assign(3, 10)
    assert epochs.entries() == [(1, 0), (3, 10)]
    epochs.assign(3, 50)
    assert epochs.entries() == [(1, 0), (3, 10)]
    assert epochs.latest_epoch == 3


def test_r2_an_older_epoch_never_follows() -> None:
    epochs = LeaderEpochs([(5, 0)])
    with pytest.raises(AssertionError):
        epochs.assign(4, 1)


def test_an_empty_cache() -> None:
    epochs = LeaderEpochs()
    assert epochs.latest_epoch == NO_EPOCH
    assert epochs.end_offset_for(7, 0) == (7, 0)
    epochs.truncate_from_end(0)
    epochs.truncate_from_start(0)
    assert epochs.entries() == []


def test_r4_when_every_known_epoch_is_younger_the_log_start_is_the_end() -> None:
    epochs = LeaderEpochs([(5, 30), (6, 40)])
    assert epochs.end_offset_for(3, 50) == (3, 30)
