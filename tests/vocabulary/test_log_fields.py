"""Values in log lines are escaped and cut (S13)."""

from __future__ import annotations

from kafkalite.log_fields import MAX_VALUE_CHARACTERS, Fields, Uncut, printable


def test_fields_print_on_one_line_and_cannot_drive_a_terminal() -> None:
    fields = Fields(topic="orders", client="a\nb\x1b[31m", count=3)
    assert str(fields) == "topic=orders client=a\\nb\\x1b[31m count=3"
    assert len(printable("x" * 70_000)) == MAX_VALUE_CHARACTERS + 1


def test_a_command_is_not_cut() -> None:
    assert printable(Uncut("kl log accept-loss /" + "x" * 4000 + "\n")).endswith("xxx\\n")


def test_a_value_that_has_no_text_is_printed_with_its_type() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    printed = str(Fields(record=1, error=Unspeakable()))
    assert printed == "record=1 error=<Unspeakable: its __str__ raises ZeroDivisionError>"
