"""Converts records to the output of ``kl consume``: value, json, jsonl, table, or a format. Pure."""

# Tests: tests/cli/test_output.py

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.formats import Render, compile_format
from kafkalite.cli.record_json import to_line
from kafkalite.cli.times import format_time
from kafkalite.model import Record

RECORD_OUTPUTS: Final = ("value", "json", "jsonl", "table")
_SHOWN_KEY: Final = 20
_SHOWN_VALUE: Final = 100
_LINE: Final = "{:<20}  {:>9}  {:>10}  {:<24}  {:<20}  {}"
_TITLES: Final = ("TOPIC", "PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE")
_TABLE_HEAD: Final = (_LINE.format(*_TITLES) + "\n").encode()


class Printer:
    """Produces the output: ``head``, then the result of ``render`` for each record, then ``tail``."""

    def __init__(self, render: Render, head: bytes = b"") -> None:
        self._render = render
        self.head = head

    def body(self, records: Sequence[Record]) -> bytes:
        render = self._render
        return b"".join([render(record) for record in records])

    def tail(self) -> bytes:
        """Return the bytes that follow the last record."""
        return b""


class JsonPrinter(Printer):
    """Prints the records as a JSON array, with one object per line as in jsonl."""

    def __init__(self) -> None:
        super().__init__(lambda record: b",\n " + to_line(record)[:-1], head=b"[")
        self._is_first = True

    def body(self, records: Sequence[Record]) -> bytes:
        lines = super().body(records)
        if self._is_first and lines:
            self._is_first = False
            return lines[1:]
        return lines

    def tail(self) -> bytes:
        return b"]\n" if self._is_first else b"\n]\n"


def _value_line(record: Record) -> bytes:
    """Return the record's value and a newline. A null value becomes an empty line."""
    return (record.value or b"") + b"\n"


def _table_line(record: Record) -> bytes:
    """Return a row of the table. Long keys and values are cut; binary data is shown with Python's escapes."""
    line = _LINE.format(
        record.topic,
        record.partition,
        record.offset,
        format_time(record.timestamp_ms),
        for_eyes(record.key, _SHOWN_KEY),
        for_eyes(record.value, _SHOWN_VALUE),
    )
    return (line.rstrip() + "\n").encode()


def for_eyes(data: bytes | None, most: int) -> str:
    """Return ``data`` as at most ``most`` printable characters; ``-`` for null."""
    if data is None:
        return "-"
    text = data[: 4 * most + 4].decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def make_printer(output: str, text_format: str | None) -> Printer:
    """Return the printer for ``text_format`` or, if that is None, for the output format ``output``.

    Raises UsageError for an invalid ``text_format``.
    """
    if text_format is not None:
        try:
            return Printer(compile_format(text_format))
        except ValueError as problem:
            raise UsageError(str(problem)) from None
    match output:
        case "json":
            return JsonPrinter()
        case "jsonl":
            return Printer(to_line)
        case "table":
            return Printer(_table_line, head=_TABLE_HEAD)
        case _:
            return Printer(_value_line)
