"""Prints records for ``kl consume`` and ``kl fetch``: value, json, jsonl, table, or a format. Pure."""

# Tests: tests/cli/test_output.py

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kafkalite.cli.formats import compile_format
from kafkalite.cli.record_json import to_line
from kafkalite.cli.times import format_time
from kafkalite.model import Record

RECORD_OUTPUTS: Final = ("value", "json", "jsonl", "table")
_SHOWN_KEY: Final = 20
_SHOWN_VALUE: Final = 100


class Printer(Protocol):
    """Returns the bytes to print before, for and after the records."""

    def head(self) -> bytes: ...

    def body(self, records: Sequence[Record]) -> bytes: ...

    def tail(self) -> bytes: ...


class _PerRecord:
    """Base of printers that write nothing before and after the records."""

    def head(self) -> bytes:
        return b""

    def tail(self) -> bytes:
        return b""


class ValuePrinter(_PerRecord):
    """Prints the value and a newline; a null value is an empty line."""

    def body(self, records: Sequence[Record]) -> bytes:
        return b"".join([(record.value or b"") + b"\n" for record in records])


class JsonlPrinter(_PerRecord):
    def body(self, records: Sequence[Record]) -> bytes:
        return b"".join([to_line(record) for record in records])


class JsonPrinter:
    """Prints a JSON array of the same objects as jsonl, one per line."""

    def __init__(self) -> None:
        self._is_first = True

    def head(self) -> bytes:
        return b"["

    def body(self, records: Sequence[Record]) -> bytes:
        lines = b"".join([b",\n " + to_line(record)[:-1] for record in records])
        if self._is_first and lines:
            self._is_first = False
            return lines[1:]
        return lines

    def tail(self) -> bytes:
        return b"]\n" if self._is_first else b"\n]\n"


class TablePrinter:
    """Prints a table. Long keys and values are cut, binary data is shown with Python's escapes."""

    _LINE: Final = "{:<20}  {:>9}  {:>10}  {:<24}  {:<20}  {}"

    def head(self) -> bytes:
        titles = ("TOPIC", "PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE")
        return (self._LINE.format(*titles) + "\n").encode()

    def body(self, records: Sequence[Record]) -> bytes:
        return "".join([self._line(record) for record in records]).encode()

    def tail(self) -> bytes:
        return b""

    def _line(self, record: Record) -> str:
        line = self._LINE.format(
            record.topic,
            record.partition,
            record.offset,
            format_time(record.timestamp_ms),
            for_eyes(record.key, _SHOWN_KEY),
            for_eyes(record.value, _SHOWN_VALUE),
        )
        return line.rstrip() + "\n"


class FormatPrinter(_PerRecord):
    def __init__(self, text: str) -> None:
        self._render = compile_format(text)

    def body(self, records: Sequence[Record]) -> bytes:
        render = self._render
        return b"".join([render(record) for record in records])


def for_eyes(data: bytes | None, most: int) -> str:
    """Return at most ``most`` printable characters; ``-`` for null."""
    if data is None:
        return "-"
    text = data[: 4 * most + 4].decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def make_printer(output: str, text_format: str | None) -> Printer:
    """Return the printer for an output format. Raises ValueError for an invalid ``text_format``."""
    if text_format is not None:
        return FormatPrinter(text_format)
    match output:
        case "json":
            return JsonPrinter()
        case "jsonl":
            return JsonlPrinter()
        case "table":
            return TablePrinter()
        case _:
            return ValuePrinter()
