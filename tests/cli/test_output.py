"""Listings, percentiles and units."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest
import yaml

import kafkalite.cli
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


def test_control_characters_of_clients_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """S13: a group id must not clear the screen of an administrator, or look like another line."""
    evil, shown = "g\x1b[2J\nkl: done", "g\\x1b[2J\\nkl: done"
    columns = (Column("name", "NAME"), Column("ids", "IDS"), Column("of", "OF", show=str))
    rows = [{"name": evil, "ids": [evil, {"a": evil}["a"]], "of": evil}]
    print_listing(rows, columns, "table")
    assert capsys.readouterr().out.splitlines()[1].split("  ") == [shown, f"{shown},{shown}", shown]
    print_listing(rows, columns, "name")
    assert capsys.readouterr().out == f"{shown}\n"
    print_document({"group": evil, "of": {"a": evil}}, "table")
    assert capsys.readouterr().out == f"group  {shown}\nof     a={shown}\n"


@pytest.mark.parametrize("how", ["json", "jsonl"])
def test_json_has_no_control_characters_for_a_terminal(capsys: pytest.CaptureFixture[str], how: str) -> None:
    """S13: U+009B begins a command as ESC [ does. JSON leaves it and DEL unescaped."""
    evil = "g\x9b2J\x7f\x85é\x1b"
    print_listing([{"name": evil}], (Column("name", "NAME"),), how)
    text = capsys.readouterr().out
    assert r"g\u009b2J\u007f\u0085é\u001b" in text
    assert json.loads(text) in ([{"name": evil}], {"name": evil})


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


def test_tables_for_people_have_no_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    print_document({"bytes_in": 5}, "table")
    assert capsys.readouterr().out == "bytes in  5\n"
    titles = set()
    for module in pkgutil.iter_modules(kafkalite.cli.__path__):
        for value in vars(importlib.import_module(f"kafkalite.cli.{module.name}")).values():
            if isinstance(value, tuple):
                titles |= {each.title for each in value if isinstance(each, Column)}
    assert "MEMBERS" in titles and len(titles) > 50
    assert not [title for title in titles if "_" in title or title != title.upper()]


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
