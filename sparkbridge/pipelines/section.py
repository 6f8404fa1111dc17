"""Reads one table of a pipeline's file key by key and collects its problems. Pure."""

# Tests: tests/sparkbridge/pipelines/test_definition.py

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from sparkbridge.option_values import option_text

T = TypeVar("T")

_KINDS: Final = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A validation error or warning about ``key`` in ``table``, whose name is for example ``sinks.counts``.

    A problem of the whole table has the key "". A warning does not prevent a pipeline from running. ``line``
    counts from 1; 0 means unknown.
    """

    table: str
    key: str
    message: str
    hint: str = ""
    is_warning: bool = False
    line: int = 0

    @property
    def place(self) -> str:
        """Return the table and the key, such as ``[source] topic``. Either may be missing."""
        if not self.table:
            return self.key
        return f"[{self.table}] {self.key}".rstrip()


class Section:
    """Reads each key of a table. ``finish`` reports the keys that were not read.

    A key that is absent or of a wrong type gets its default value, so that the other keys are checked.
    """

    def __init__(self, name: str, values: Mapping[str, Any], problems: list[Problem]) -> None:
        self.name = name
        self.values = values
        self.problems = problems
        self._known: list[str] = []

    def error(self, key: str, message: str, hint: str = "") -> None:
        """Report an error. An error that was already reported, because a key is read twice, is ignored."""
        if not any(
            (each.table, each.key, each.message) == (self.name, key, message) for each in self.problems
        ):
            self.problems.append(Problem(self.name, key, message, hint))

    def warn(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(self.name, key, message, hint, is_warning=True))

    def has(self, key: str) -> bool:
        return key in self.values

    def has_nearly(self, keys: Sequence[str]) -> bool:
        """Whether a key that has not been read is probably a misspelling of one of ``keys``."""
        return any(key not in keys and nearest(key, keys) for key in self.values if key not in self._known)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """Return the value or, if it is absent or not of type ``kind``, ``default``.

        Reports a value of another type as an error. A boolean is not a number.
        """
        self._known.append(key)
        if key not in self.values:
            return default
        value = self.values[key]
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        self.error(key, f"is {_shown(value)}, but must be {_KINDS[kind]}")
        return default

    def text(self, key: str, default: str = "", *, required: str = "") -> str:
        """Return the string or, if it is absent, blank or of another type, ``default``.

        Reports a blank value and another type as an error. If ``required`` is not "", an absent key is an
        error, too, with ``required`` as its hint.
        """
        found = self.get(key, str, default)
        if key in self.values:
            if isinstance(self.values[key], str) and not found.strip():
                self.error(key, "is empty", required)
                return default
        elif required:
            self.error(key, "is missing", required)
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings that are not blank; () if the key is absent or has another value."""
        listed = self.get(key, list, [])
        if all(isinstance(item, str) and item.strip() for item in listed):
            return tuple(listed)
        self.error(key, "must be a list of strings")
        return ()

    def number(self, key: str, default: int, *, minimum: int) -> int:
        found = self.get(key, int, default)
        if found < minimum:
            self.error(key, f"is {found}, but must be {minimum} or more")
            return default
        return found

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        """Return one of ``allowed``, compared case-insensitively, or ``default``."""
        found = self.text(key, default)
        for each in allowed:
            if each.lower() == found.lower():
                return each
        self.error(key, f"is {found!r}, but must be one of {', '.join(allowed)}", nearest(found, allowed))
        return default

    def parsed(self, key: str, parse: Callable[[str], T], default: T) -> T:
        """Return the result of ``parse``, or ``default``. A ValueError is reported as a problem."""
        text = self.text(key)
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as problem:
            self.error(key, str(problem))
            return default

    def settings(self, key: str) -> dict[str, str]:
        """Return a table of options for Spark. Numbers and booleans are converted to strings."""
        found: dict[str, str] = {}
        for name, value in self.get(key, dict, {}).items():
            if isinstance(value, str | int | float):
                found[name] = option_text(value)
            elif isinstance(value, dict):  # kafka.group.id = "x", a key with dots and without quotes
                for rest, inner in _flat(value, name):
                    found[rest] = option_text(inner)
            else:
                self.error(f"{key}.{name}", f"is {_shown(value)}, but must be a string or a number")
        return found

    def table(self, key: str) -> Section | None:
        """Return the table ``key`` inside this one, or None if the key is absent."""
        if key not in self.values:
            self._known.append(key)
            return None
        return Section(self.inside(key), self.get(key, dict, {}), self.problems)

    def tables(self, key: str) -> dict[str, Section]:
        """Return the tables ``[key.NAME]`` by name."""
        found: dict[str, Section] = {}
        for name, value in self.get(key, dict, {}).items():
            if isinstance(value, dict):
                found[name] = Section(f"{self.inside(key)}.{name}", value, self.problems)
            else:
                self.error(
                    f"{key}.{name}", f"is {_shown(value)}, but must be a table [{self.inside(key)}.{name}]"
                )
        return found

    def listed_tables(self, key: str) -> list[Section]:
        """Return an array of tables, ``[[key]]``. Each is named by its number, from 1."""
        value = self.values.get(key, [])
        self._known.append(key)
        if isinstance(value, dict):
            self.error(key, f"is one table, but must be a list of them: write [[{key}]]")
            value = [value]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.error(key, f"must be tables, each headed [[{key}]]")
            return []
        return [
            Section(f"{self.inside(key)} {number}", item, self.problems)
            for number, item in enumerate(value, 1)
        ]

    def inside(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def finish(self) -> None:
        for key in self.values:
            if key not in self._known:
                hint = nearest(key, self._known) or f"it has {', '.join(sorted(set(self._known)))}"
                self.error(key, "is not known here", hint)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as ``did you mean topic?``, or "" if no name is similar."""
    folded = {each.lower(): each for each in names}
    near = get_close_matches(name.lower(), folded, n=1)
    return f"did you mean {folded[near[0]]}?" if near else ""


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        dotted = f"{prefix}.{name}"
        found += _flat(value, dotted) if isinstance(value, dict) else [(dotted, value)]
    return found


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return option_text(value)
    return repr(value) if isinstance(value, str | int | float) else _KINDS.get(type(value), "something else")
