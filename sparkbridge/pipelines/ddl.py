"""Parses schemas as Spark writes them (``id BIGINT, tags ARRAY<STRING>``), without Spark. Pure."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Final, NamedTuple

_SIMPLE: Final = frozenset(
    [
        "boolean",
        "byte",
        "tinyint",
        "short",
        "smallint",
        "int",
        "integer",
        "long",
        "bigint",
        "float",
        "real",
        "double",
        "date",
        "timestamp",
        "timestamp_ntz",
        "timestamp_ltz",
        "string",
        "binary",
        "variant",
        "interval",
    ]
)
_WITH_NUMBERS: Final = re.compile(
    r"(?:(?:decimal|dec|numeric)(?:\(\d+(?:,-?\d+)?\))?|(?:char|character|varchar)\(\d+\))"
)
_NAMES: Final = (*sorted(_SIMPLE), "decimal", "array", "map", "struct", "char", "varchar")
_OPENING: Final = "<("
_CLOSING: Final = ">)"
_FIELD: Final = re.compile(
    r"\s*(?:`(?P<quoted>[^`]+)`|(?P<plain>[A-Za-z_]\w*))\s*(?::\s*|\s+)(?P<type>.+)", re.S
)
_TRAILER: Final = re.compile(r"\s+(?:NOT\s+NULL|COMMENT\s+'[^']*')\s*$", re.I)


class Field(NamedTuple):
    name: str
    type: str  #: lower case, without spaces


def parse_schema(text: str) -> list[Field]:
    """Return the fields of a schema in order. Raises ValueError with the invalid field and the reason."""
    fields = [_field(part) for part in _parts(text)]
    seen: set[str] = set()
    for field in fields:
        if field.name.lower() in seen:
            raise ValueError(f"two fields have the name {field.name!r}")
        seen.add(field.name.lower())
    return fields


def _field(text: str) -> Field:
    while (shorter := _TRAILER.sub("", text)) != text:
        text = shorter
    match = _FIELD.fullmatch(text)
    if match is None:
        raise ValueError(f"{text.strip()!r} is not a name and a type, such as 'id BIGINT'")
    name = match["quoted"] or match["plain"]
    return Field(name, _checked_type(match["type"], name))


def _checked_type(text: str, field: str) -> str:
    written = text.strip().lower()
    compact = re.sub(r"\s*([(),<>:])\s*", r"\1", written)
    if compact in _SIMPLE or _WITH_NUMBERS.fullmatch(compact):
        return compact
    outer, bracket, inner = written.partition("<")
    outer = outer.strip()
    if bracket and inner.endswith(">") and outer in {"array", "map", "struct"}:
        parts = _parts(inner[:-1])
        if outer == "struct":
            return f"struct<{','.join(f'{name}:{kind}' for name, kind in map(_field, parts))}>"
        wanted = 1 if outer == "array" else 2
        if len(parts) == wanted:
            return f"{outer}<{','.join(_checked_type(part, field) for part in parts)}>"
        raise ValueError(
            f"{field}: {outer} has {wanted} type{'s' * (wanted > 1)} inside its <>, not {len(parts)}"
        )
    near = get_close_matches(re.split(r"[<(\s]", written, maxsplit=1)[0], _NAMES, n=1)
    advice = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{field}: Spark has no type {text.strip()!r}{advice}")


def _parts(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes.

    Raises ValueError for unbalanced brackets and for an empty part.
    """
    parts = [""]
    depth = 0
    is_quoted = False
    for character in text:
        is_quoted ^= character in "'`"
        if not is_quoted:
            depth += (character in _OPENING) - (character in _CLOSING)
            if depth < 0:
                raise ValueError(f"a bracket too many in {text.strip()!r}")
            if character == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += character
    if depth:
        raise ValueError(f"a bracket is not closed in {text.strip()!r}")
    if not all(part.strip() for part in parts):
        raise ValueError("a field is missing between two commas" if len(parts) > 1 else "it names no field")
    return parts
