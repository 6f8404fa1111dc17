"""Listings, percentiles and units."""

from __future__ import annotations

import json

import pytest
import yaml

from kafkalite.cli import output
from kafkalite.cli.output import (
    Column,
    human_bytes,
    percentile,
    plural,
    print_document,
    print_listing,
    show_ms,
    show_rate,
)
from kafkalite.cli.printers import for_eyes

COLUMNS = (Column("name", "NAME"), Column("size", "SIZE", show=human_bytes), Column("id", "ID", wide=True))
ROWS = [{"name": "a", "size": 10, "id": None}, {"name": "long name", "size": 20480, "id": [1, 2]}]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing(ROWS, COLUMNS, "table")
    assert capsys.readouterr().out == "NAME           SIZE\na              10 B\nlong name  20.0 KiB\n"


def test_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing(ROWS, COLUMNS, "wide")
    assert capsys.readouterr().out.splitlines()[1:] == ["a              10 B  -", "long name  20.0 KiB  1,2"]


def test_an_empty_table_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing([], COLUMNS, "table")
    assert capsys.readouterr().out == ""


def test_machine_formats_hold_everything(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing(ROWS, COLUMNS, "json")
    assert json.loads(capsys.readouterr().out) == ROWS
    print_listing(ROWS, COLUMNS, "jsonl")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS
    print_listing(ROWS, COLUMNS, "yaml")
    assert yaml.safe_load(capsys.readouterr().out) == ROWS
    print_listing(ROWS, COLUMNS, "name")
    assert capsys.readouterr().out == "a\nlong name\n"


def test_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"a": True, "bcd": {"x": 1}, "e": None, "f": []}
    print_document(document, "table")
    assert capsys.readouterr().out == "a    yes\nbcd  x=1\ne    -\nf    -\n"
    print_document(document, "json")
    assert json.loads(capsys.readouterr().out) == document
    print_document(document, "jsonl")
    assert json.loads(capsys.readouterr().out) == document
    print_document(document, "yaml")
    assert yaml.safe_load(capsys.readouterr().out) == document


class Terminal:
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.coloured(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not output.coloured(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.coloured(Terminal())


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30, 2 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]


def test_plural() -> None:
    assert (plural(1, "record"), plural(0, "record"), plural(1000, "record")) == (
        "1 record",
        "0 records",
        "1,000 records",
    )


def test_for_eyes() -> None:
    assert for_eyes(None, 5) == "-"
    assert for_eyes(b"abcdef", 5) == "abcd…"
    assert for_eyes(b"a\nb\xff\x1b", 20) == "a\\nb\\xff\\x1b"


def test_percentile_is_nearest_rank() -> None:
    samples = [float(n) for n in range(100, 0, -1)]
    assert [percentile(samples, p) for p in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_figures() -> None:
    assert [show_ms(s) for s in (0.00002, 0.00123, 2.5)] == ["20 µs", "1.23 ms", "2.50 s"]
    assert (show_rate(1000, 0.5), show_rate(1, 0)) == ("2,000/s", "-")
