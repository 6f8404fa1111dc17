"""The index of aborted transactions (R33), compared with a list of all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.storage.producer_state import ProducerStates

PRODUCERS = st.integers(1, 4)
STEPS = st.lists(st.tuples(PRODUCERS, st.sampled_from(["batch", "commit", "abort"])), max_size=60)


def build(steps):
    """Return the states after these steps, one offset each, and every aborted (producer, first, marker)."""
    states, opened, aborted = ProducerStates(), {}, []
    for offset, (producer, what) in enumerate(steps):
        if what == "batch":
            states.note_open(producer, 0, offset, 0)
            opened.setdefault(producer, offset)
        else:
            states.note_marker(producer, 1, 0, offset, 0, is_commit=what == "commit")
            first = opened.pop(producer, None)
            if first is not None and what == "abort":
                aborted.append((producer, first, offset))
    return states, aborted


@settings(derandomize=True, deadline=None, max_examples=300)
@given(STEPS, st.integers(0, 60), st.integers(0, 60))
def test_a_lookup_finds_all_transactions_that_overlap_the_range(steps, first, end):
    states, aborted = build(steps)
    expected = sorted(one[1::-1] for one in aborted if one[2] >= first and one[1] < end)
    assert [(one.first_offset, one.producer_id) for one in states.aborted.between(first, end)] == expected


@settings(derandomize=True, deadline=None, max_examples=100)
@given(STEPS, st.integers(0, 60))
def test_transactions_below_the_log_start_are_forgotten(steps, start):
    states, aborted = build(steps)
    states.aborted.delete_before(start)
    assert [one[:3] for one in states.aborted] == [one for one in aborted if one[2] >= start]
    assert len(states.aborted) == len(list(states.aborted))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(STEPS)
def test_it_is_restored_from_the_lines_of_a_snapshot(steps):
    states, _ = build(steps)
    again = ProducerStates.from_lines(states.lines())
    assert again == states
    assert (again.open, again.ended) == (states.open, states.ended)
    assert list(again.open) == list(states.open)


def test_a_lookup_stops_at_the_bound():
    states = ProducerStates()
    for number in range(1000):
        states.note_open(1, 0, 2 * number, 0)
        states.note_marker(1, 1, 0, 2 * number + 1, 0, is_commit=False)
    looked_at = 0

    class Counting(list):
        def __getitem__(self, number):
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(number)

    states.aborted._bounds = Counting(states.aborted._bounds)
    assert len(states.aborted.between(100, 104)) == 2
    assert looked_at < 10
