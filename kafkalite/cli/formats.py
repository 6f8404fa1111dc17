r"""Converts records to bytes by format strings, with kcat's letters or Python's braces. Pure.

::

    %t topic   %p partition   %o offset   %T timestamp (ms)   %h headers (name=value,name=value)
    %k key     %K its length  %s value    %S its length (-1 for null)      %% a percent sign
    %k{hex} %s{base64} %s{json} %T{iso} %T{strftime[%H:%M]}    a modifier follows its letter
    \n \t \r \0 \\ \xNN                                        escapes

A format with one of these letters is kcat's. It should end with ``\n``, because no newline is added. Other
formats are Python's, and a newline is added: ``{topic}[{partition}]@{offset} {key}: {value.amount:>8}``.
``.name`` or ``[name]`` selects a field of the JSON in ``value`` or ``key``, or a header. A missing field is
empty.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from string import Formatter
from typing import Any, Final

from kafkalite.cli.output import json_text
from kafkalite.cli.times import format_time
from kafkalite.model import Record

Render = Callable[[Record], bytes]

LETTERS: Final = "tpoTkKsSh"
FIELDS: Final = ("topic", "partition", "offset", "timestamp", "time", "key", "value", "headers")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "a": "\a", "e": "\x1b"}
_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # without those that stand for undecodable bytes
_DIRECTIVE = re.compile(r"%(%|[" + LETTERS + r"])(?:\{(hex|base64|json|iso|strftime\[[^\]]*\])\})?")


def unescape(text: str) -> str:
    r"""Replace escapes such as ``\n``, ``\t`` and ``\xNN`` with their characters. Keep unknown escapes."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if len(name) == 3:
            return chr(int(name[1:], 16))
        return _ESCAPED.get(name, match.group(0))

    return _ESCAPE.sub(replace, text)


def _encoded(text: str) -> bytes:
    r"""Return ``text`` in UTF-8. Undecodable bytes are restored; other halves of surrogate pairs are escaped.

    JSON may contain such a half as an escape, and it remains one: ``\ud800``.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        escaped = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
        return escaped.encode("utf-8", "surrogateescape")


def compile_format(text: str) -> Render:
    """Return a function that renders a record in the format ``text``. Raises ValueError if it is invalid."""
    if re.search(r"(?<!%)(?:%%)*%[" + LETTERS + "]", text):
        unknown = re.search(r"%([a-zA-Z])", _DIRECTIVE.sub("", text))
        if unknown is not None:
            letters = " ".join(f"%{letter}" for letter in LETTERS)
            raise ValueError(
                f"%{unknown[1]} is no field of a record; letters: {letters}; %% is a percent sign"
            )
        return _compile_letters(text)
    if "{" in text:
        return _compile_braces(text)
    raise ValueError(
        f"format {text!r} selects no field of a record; letters: "
        + " ".join(f"%{letter}" for letter in LETTERS)
        + ", or braces: "
        + " ".join(f"{{{field}}}" for field in FIELDS)
    )


def _length(data: bytes | None) -> bytes:
    return b"-1" if data is None else b"%d" % len(data)


def _headers_text(record: Record) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers)


_BY_LETTER: Final[dict[str, Render]] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "T": lambda record: b"%d" % record.timestamp_ms,
    "k": lambda record: record.key or b"",
    "K": lambda record: _length(record.key),
    "s": lambda record: record.value or b"",
    "S": lambda record: _length(record.value),
    "h": _headers_text,
}


def _modified(letter: str, modifier: str) -> Render:
    if letter == "T":
        if modifier == "iso":
            return lambda record: format_time(record.timestamp_ms).encode()
        if modifier.startswith("strftime["):
            pattern = modifier[len("strftime[") : -1]
            return lambda record: _encoded(_strftime(record.timestamp_ms, pattern))
    elif letter in "ksh" and modifier in {"hex", "base64", "json"}:
        plain = _BY_LETTER[letter]
        match modifier:
            case "hex":
                return lambda record: plain(record).hex().encode()
            case "base64":
                return lambda record: base64.b64encode(plain(record))
            case _:
                return lambda record: _as_json(plain(record))
    raise ValueError(
        f"%{letter} takes no {{{modifier}}}; hex, base64, json are for k s h, iso, strftime[…] for T"
    )


def _as_json(data: bytes) -> bytes:
    """Return ``data`` without optional spaces if it is JSON, otherwise as a JSON string.

    JSON that is nested too deeply, or that has half of a surrogate pair, is also returned as a JSON string.
    """
    text = data.decode(errors="replace")
    try:
        return json_text(json.loads(text), separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return json_text(text).encode()


def _strftime(timestamp_ms: int, pattern: str) -> str:
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return "-"


def _literal(text: str) -> Render:
    data = _encoded(unescape(text))
    return lambda record: data


def _compile_letters(text: str) -> Render:
    parts: list[Render] = []
    position = 0
    for match in _DIRECTIVE.finditer(text):
        if match.start() > position:
            parts.append(_literal(text[position : match.start()]))
        letter, modifier = match.groups()
        if letter == "%":
            parts.append(_literal("%" if modifier is None else match.group(0)[1:]))
        else:
            parts.append(_BY_LETTER[letter] if modifier is None else _modified(letter, modifier))
        position = match.end()
    if position < len(text):
        parts.append(_literal(text[position:]))
    return lambda record: b"".join([part(record) for part in parts])


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "surrogateescape")


def _headers_mapping(record: Record) -> dict[str, str]:
    return {name: _text(value) for name, value in record.headers}


_BY_NAME: Final[dict[str, Callable[[Record], Any]]] = {
    "topic": lambda record: record.topic,
    "partition": lambda record: record.partition,
    "offset": lambda record: record.offset,
    "timestamp": lambda record: record.timestamp_ms,
    "time": lambda record: format_time(record.timestamp_ms),
    "key": lambda record: _text(record.key),
    "value": lambda record: _text(record.value),
    "headers": lambda record: _text(_headers_text(record)),
}


def _entered(record: Record, name: str, path: list[str]) -> Any:
    """Return the value at ``path`` inside the record's field ``name``, or "" if there is none."""
    if name == "headers":
        current: Any = _headers_mapping(record)
    else:
        try:
            current = json.loads(_text(record.value if name == "value" else record.key))
        except (ValueError, RecursionError):
            return ""
    for step in path:
        if isinstance(current, dict):
            current = current.get(step, "")
        elif isinstance(current, list) and re.fullmatch(r"-?\d+", step):
            index = int(step)
            current = current[index] if -len(current) <= index < len(current) else ""
        else:
            return ""
    if current is None:
        return ""
    if not isinstance(current, bool | dict | list):
        return current
    try:
        return json_text(current)
    except RecursionError:
        return ""


def _compile_braces(text: str) -> Render:
    parts: list[Callable[[Record], str]] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as problem:
        raise ValueError(f"format {text!r}: {problem}; write a literal brace twice: {{{{ or }}}}") from None
    for literal, field, spec, conversion in parsed:
        if literal:
            parts.append(_constant(unescape(literal).replace("%%", "%")))
        if field is not None:
            parts.append(_brace(field, spec or "", conversion))
    return lambda record: _encoded("".join([part(record) for part in parts]) + "\n")


def _constant(text: str) -> Callable[[Record], str]:
    return lambda record: text


def _brace(field: str, spec: str, conversion: str | None) -> Callable[[Record], str]:
    name, *path = [step for step in re.split(r"[.\[\]]+", field) if step] or [""]
    if name not in FIELDS:
        raise ValueError(f"{{{field}}} is not a field of a record; fields: {', '.join(FIELDS)}")
    if path and name not in {"key", "value", "headers"}:
        raise ValueError(f"{{{field}}}: only key, value and headers have fields")

    def render(record: Record) -> str:
        found = _entered(record, name, path) if path else _BY_NAME[name](record)
        if conversion == "r":
            found = repr(found)
        try:
            return format(found, spec)
        except (ValueError, TypeError):  # a number format applied to a text or a missing field
            return str(found)

    return render
