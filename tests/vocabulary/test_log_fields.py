"""Values in log lines are escaped and cut (S13)."""

from __future__ import annotations

from kafkalite.log_fields import MAX_VALUE_CHARACTERS, Fields, printable


def test_fields_print_on_one_line_and_cannot_drive_a_terminal() -> None:
    fields = Fields(topic="orders", client="a\nb\x1b[31m", count=3)
    assert str(fields) == "topic=orders client=a\\nb\\x1b[31m count=3"
    assert len(printable("x" * 70_000)) == MAX_VALUE_CHARACTERS + 1
