"""One table of a pipeline's file, read key by key; what is wrong is collected, not raised. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeVar

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
    """What is wrong, and where: ``table`` as TOML heads it (``sinks.counts``), ``key`` in it or empty.

    A warning does not keep a pipeline from running. ``line`` counts from 1; 0 is not known.
    """

    table: str
    key: str
    message: str
    hint: str = ""
    is_warning: bool = False
    line: int = 0

    @property
    def place(self) -> str:
        """``[source] topic``, or empty for the file as a whole."""
        if not self.table:
            return self.key
        return f"[{self.table}] {self.key}".rstrip()


class Section:
    """Reads a table once; ``finish`` complains of the keys that nobody asked for.

    An answer to a key that is absent or of a wrong kind is the default: the rest is still checked.
    """

    def __init__(self, name: str, values: Mapping[str, Any], problems: list[Problem]) -> None:
        self.name = name
        self.values = values
        self.problems = problems
        self._known: list[str] = []

    def error(self, key: str, message: str, hint: str = "") -> None:
        """Once, also of a key that is read twice."""
        if not any(
            (each.table, each.key, each.message) == (self.name, key, message) for each in self.problems
        ):
            self.problems.append(Problem(self.name, key, message, hint))

    def warn(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(self.name, key, message, hint, is_warning=True))

    def has(self, key: str) -> bool:
        return key in self.values

    def has_nearly(self, keys: Sequence[str]) -> bool:
        """Whether an unknown key looks like one of ``keys``: ``finish`` tells of it, which is enough."""
        return any(key not in keys and nearest(key, keys) for key in self.values if key not in self._known)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value if it is of ``kind``; a boolean is no number."""
        self._known.append(key)
        if key not in self.values:
            return default
        value = self.values[key]
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        self.error(key, f"is {_shown(value)}, but must be {_KINDS[kind]}")
        return default

    def text(self, key: str, default: str = "", *, required: str = "") -> str:
        """A string that is not blank. ``required`` says in a hint what to write when it is absent."""
        found = self.get(key, str, default)
        if key in self.values:
            if isinstance(self.values[key], str) and not found.strip():
                self.error(key, "is empty", required)
                return default
        elif required:
            self.error(key, "is missing", required)
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings that are not blank."""
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
        """One of ``allowed``, in any case."""
        found = self.text(key, default)
        for each in allowed:
            if each.lower() == found.lower():
                return each
        self.error(key, f"is {found!r}, but must be one of {', '.join(allowed)}", nearest(found, allowed))
        return default

    def parsed(self, key: str, parse: Callable[[str], T], default: T) -> T:
        """``parse`` raises ValueError, which becomes the complaint."""
        text = self.text(key)
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as problem:
            self.error(key, str(problem))
            return default

    def settings(self, key: str) -> dict[str, str]:
        """A table of options, as Spark takes them: strings; numbers and booleans are written out."""
        found: dict[str, str] = {}
        for name, value in self.get(key, dict, {}).items():
            if isinstance(value, bool):
                found[name] = str(value).lower()
            elif isinstance(value, str | int | float):
                found[name] = str(value)
            elif isinstance(value, dict):  # kafka.group.id = "x" without quotes around the key
                for rest, inner in _flat(value, name):
                    found[rest] = str(inner).lower() if isinstance(inner, bool) else str(inner)
            else:
                self.error(f"{key}.{name}", f"is {_shown(value)}, but must be a string or a number")
        return found

    def table(self, key: str) -> Section | None:
        """A table inside of this one; None when there is none."""
        if key not in self.values:
            self._known.append(key)
            return None
        return Section(self.inside(key), self.get(key, dict, {}), self.problems)

    def tables(self, key: str) -> dict[str, Section]:
        """A table of tables, ``[key.NAME]``."""
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
        """An array of tables, ``[[key]]``; they are told apart by their number, from 1."""
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
                hint = nearest(key, self._known) or f"it has {', '.join(sorted(self._known))}"
                self.error(key, "is not known here", hint)


def nearest(name: str, names: Iterable[str]) -> str:
    """``did you mean topic?``, or empty when nothing is near."""
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
        return str(value).lower()
    return repr(value) if isinstance(value, str | int | float) else _KINDS.get(type(value), "something else")
