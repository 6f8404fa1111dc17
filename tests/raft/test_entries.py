"""A change takes effect only on the state that it was decided on."""

from __future__ import annotations

from kafkalite.raft.entries import FIRST_ENTRY, NO_OP, change_after, effective_records


def test_a_change_is_void_on_another_state():
    change = change_after(7, b"records")
    assert effective_records(change, 7) == b"records"
    assert effective_records(change, 6) is effective_records(change, 8) is None


def test_every_log_begins_with_the_same_no_op():
    assert (bytes([NO_OP]), 1, 0) == FIRST_ENTRY
