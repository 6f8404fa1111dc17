"""Named clusters of a user: their brokers and client properties, in one TOML file.

The file is ``kafkalite/contexts.toml`` in XDG_CONFIG_HOME, which is ``~/.config`` by default.
"""

# Tests: tests/cli/test_context.py

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kafkalite.cli.exit_codes import NotFoundError, UsageError


@dataclass(frozen=True, slots=True)
class Context:
    """One cluster. ``servers`` are HOST:PORT, separated by commas; ``properties`` are those of ``-X``."""

    servers: str
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Contexts:
    """All contexts by name, and the name of the context in use ("" if none is in use)."""

    known: dict[str, Context] = field(default_factory=dict)
    used: str = ""

    def get(self, name: str) -> Context:
        """Return the context ``name``. Raises NotFoundError."""
        if name not in self.known:
            raise NotFoundError(f"there is no context {name!r}", hint="'kl context list' shows them")
        return self.known[name]


def path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "kafkalite" / "contexts.toml"


def read() -> Contexts:
    """Return the contexts in the user's file, or no contexts if there is no file.

    Raises UsageError if the file is invalid.
    """
    import tomllib

    file = path()
    try:
        document = tomllib.loads(file.read_text("utf-8"))
        known = {
            name: _context(name, _table("contexts." + name, entry))
            for name, entry in _table("contexts", document.get("contexts", {})).items()
        }
        return Contexts(known, _text(document.get("used", "")))
    except FileNotFoundError:
        return Contexts()
    except (ValueError, TypeError) as problem:  # of UTF-8, TOML, or the document
        raise UsageError(f"{file} is no file of contexts: {problem}", hint="mend or remove it") from None


def write(contexts: Contexts) -> None:
    """Write ``contexts`` to the user's file. Raises OSError, and UsageError for text that is not UTF-8."""
    lines = [f"used = {_quoted(contexts.used)}"]
    for name, context in contexts.known.items():
        lines += ["", f"[contexts.{_quoted(name)}]", f"servers = {_quoted(context.servers)}"]
        if context.properties:
            lines.append(f"[contexts.{_quoted(name)}.properties]")
            lines += [f"{_quoted(key)} = {_quoted(value)}" for key, value in context.properties.items()]
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(("\n".join(lines) + "\n").encode())
    new.replace(file)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _table(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a table, and is {value!r}")
    return value


def _context(name: str, entry: dict[str, object]) -> Context:
    if "servers" not in entry:
        raise ValueError(f"contexts.{name} has no servers")
    properties = _table("properties", entry.get("properties", {}))
    return Context(
        _text(entry["servers"]),
        {key: str(each).lower() if isinstance(each, bool) else str(each) for key, each in properties.items()},
    )


def _quoted(text: str) -> str:
    """Return ``text`` as a TOML string: a JSON string in which DEL is escaped, too.

    Raises UsageError for surrogates, which cannot be encoded as UTF-8.
    """
    import json

    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is not UTF-8") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
