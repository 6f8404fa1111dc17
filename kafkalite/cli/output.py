"""Prints listings as table, wide, name, json, jsonl or yaml, whether stdout is a terminal or not."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]

_BOLD: Final = "\x1b[1m"
_RESET: Final = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a listing. JSON and YAML print it under ``key``; tables show it only with a ``title``.

    ``wide`` columns are printed only with -o wide. ``read`` (default: ``key``) is a function that returns the
    value, or an attribute name, which may be dotted. If a part of a dotted name is None, the value is None.
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
    """Whether ``stream`` is a terminal and colours are not disabled by NO_COLOR."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_listing(
    rows: Iterable[Row], columns: Sequence[Column], output: str, *, name_key: str = "name", if_empty: str = ""
) -> None:
    """Print rows. json, jsonl and yaml contain every value unrounded.

    -o name prints the values of ``name_key``. ``if_empty`` is printed on stderr if a table has no rows.
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
            text = "".join(f"{row[name_key]}\n" for row in listed)
        case _:
            shown = [column for column in columns if column.title and (output == "wide" or not column.wide)]
            text = _table(listed, shown)
    write(text)


def print_document(document: Mapping[str, Any], output: str) -> None:
    """Print one object: ``name: value`` lines, or json, jsonl, yaml."""
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


def _encoded(document: Any, output: str) -> str:
    if output != "yaml":
        return json.dumps(document, indent=2 if output == "json" else None, ensure_ascii=False) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, default_flow_style=False))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "-"
    return str(value)


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return the rows as aligned columns, two spaces apart. Numbers are aligned to the right."""
    if not rows:
        return ""
    numeric = [
        all(isinstance(row[c.key], int | float) or row[c.key] is None for row in rows) for c in columns
    ]
    grid = [
        [column.show(row[column.key]) if column.show else _cell(row[column.key]) for column in columns]
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
    """Return the smallest sample that ``percent`` % of all samples do not exceed (nearest rank).

    Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show_ms(seconds: float) -> str:
    """Return a duration as text, such as ``1.23 ms`` for 0.00123. Below 0.1 ms, the unit is µs."""
    if seconds < 0.0001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_rate(count: float, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "-"
