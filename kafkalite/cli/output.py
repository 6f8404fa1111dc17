"""Prints listings and documents in the format of -o: table, wide, name, json, jsonl or yaml."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafkalite.log_fields import escaped

Row = Mapping[str, Any]

_BOLD: Final = "\x1b[1m"
_RESET: Final = "\x1b[0m"
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a listing. JSON and YAML print it under ``key``; tables print it if it has a ``title``.

    A table contains ``wide`` columns only with -o wide. ``show`` converts a value to its text in the table.
    ``read`` is a function that returns the value of an item, or the name of an attribute (default: ``key``),
    which may be dotted. If an attribute before a dot is None, the value is None.
    """

    key: str
    title: str = ""
    wide: bool = False
    show: Callable[[Any], str] | None = None
    read: str | Callable[[Any], Any] = ""

    def value_of(self, item: Any) -> Any:
        if callable(self.read):
            return self.read(item)
        for name in (self.read or self.key).split("."):
            item = None if item is None else getattr(item, name)
        return item


def rows_of(items: Iterable[Any], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return one row per item: {key of each column: value}."""
    return [{column.key: column.value_of(item) for column in columns} for item in items]


def coloured(stream: Any) -> bool:
    """Whether ``stream`` is a terminal, and neither NO_COLOR nor TERM=dumb disables colours."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_listing(
    rows: Iterable[Row], columns: Sequence[Column], output: str, *, name_key: str = "name", if_empty: str = ""
) -> None:
    """Print rows in the format ``output``. Only tables depend on ``columns``.

    json, jsonl and yaml contain every value of the rows, and name contains the values of ``name_key``. If a
    table has no rows, ``if_empty`` is printed on stderr.
    """
    listed = list(rows)
    if if_empty and not listed and output in {"table", "wide"}:
        sys.stderr.write(f"kl: {if_empty}\n")
    match output:
        case "json" | "yaml":
            text = _encoded(listed, output)
        case "jsonl":
            text = "".join(_encoded(row, output) for row in listed)
        case "name":
            text = "".join(f"{escaped(str(row[name_key]))}\n" for row in listed)
        case _:
            shown = [column for column in columns if column.title and (output == "wide" or not column.wide)]
            text = _table(listed, shown)
    write(text)


def print_document(document: Mapping[str, Any], output: str) -> None:
    """Print one object as json, jsonl or yaml, or else as one line for each name and value."""
    match output:
        case "json" | "jsonl" | "yaml":
            text = _encoded(document, output)
        case _:
            named = {name.replace("_", " "): value for name, value in document.items()}
            width = max((len(name) for name in named), default=0)
            text = "".join(f"{name.ljust(width)}  {_cell(value)}\n" for name, value in named.items())
    write(text)


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def json_text(document: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return ``document`` as JSON, with all control characters in its strings escaped."""
    return escape_json(json.dumps(document, indent=indent, separators=separators, ensure_ascii=False))


def escape_json(text: str) -> str:
    """Return the JSON ``text`` with DEL and U+0080 to U+009F escaped, too: a terminal may obey them (S13)."""
    return text if text.isprintable() else text.translate(_JSON_ESCAPES)


def _encoded(document: Any, output: str) -> str:
    if output != "yaml":
        return json_text(document, indent=2 if output == "json" else None) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, default_flow_style=False))


def _cell(value: Any) -> str:
    """Return the value on one line. Clients choose names, so control characters are escaped (S13)."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return escaped(",".join(f"{name}={item}" for name, item in value.items())) or "-"
    if isinstance(value, list | tuple):
        return escaped(",".join(str(item) for item in value)) or "-"
    return escaped(str(value))


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return titles and rows as aligned columns; "" without rows. Numbers are aligned to the right."""
    if not rows:
        return ""
    numeric = [
        all(isinstance(row[c.key], int | float) or row[c.key] is None for row in rows) for c in columns
    ]
    grid = [
        [
            escaped(column.show(row[column.key])) if column.show else _cell(row[column.key])
            for column in columns
        ]
        for row in rows
    ]
    titles = [column.title for column in columns]
    widths = [max(len(title), *(len(line[i]) for line in grid)) for i, title in enumerate(titles)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ).rstrip()

    head = line(titles)
    if coloured(sys.stdout):
        head = f"{_BOLD}{head}{_RESET}"
    return "\n".join([head, *(line(cells) for cells in grid)]) + "\n"


def human_bytes(count: int) -> str:
    """Return a size in bytes as text, such as ``1.5 KiB`` for 1536."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def pick(source: Any, *names: str) -> dict[str, Any]:
    """Return {name: value} for these attributes of ``source``."""
    return {name: getattr(source, name) for name in names}


def names_of(partitions: Iterable[object]) -> list[str]:
    """Return ``TOPIC-PARTITION`` of each partition."""
    return [str(partition) for partition in partitions]


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least ``percent`` % of all samples do not exceed (nearest rank).

    Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show_ms(seconds: float) -> str:
    """Return a duration as text in µs, ms or s, such as ``1.23 ms`` for 0.00123."""
    if seconds < 0.0001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_rate(count: float, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "-"
