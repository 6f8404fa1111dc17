"""Options. Each is declared once, with its name, type, default, bounds and documentation.

There is a registry for each kind of options, such as those of topics or those of producers. Option names are
dotted, as in Kafka. The Python name has underscores instead of dots and hyphens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from kafkalite.durations import parse_duration
from kafkalite.errors import ConfigError
from kafkalite.suggestions import did_you_mean

Kind = Literal["int", "float", "bool", "string", "list", "callable"]

_TRUE: Final = {"true", "yes", "on", "1"}
_FALSE: Final = {"false", "no", "off", "0"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``minimum`` and ``maximum`` are inclusive. ``choices`` are the values that ``parse`` may
    return; None allows any. ``items`` is a list's (regular expression of each item, the items in words)."""

    name: str
    kind: Kind
    default: Any
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()
    dynamic: bool = False
    is_secret: bool = False  #: its value is never shown (S13, S19)
    items: tuple[str, str] | None = None

    @property
    def python_name(self) -> str:
        return self.name.replace(".", "_").replace("-", "_")

    @property
    def allowed(self) -> str:
        """The allowed values in words, for error messages."""
        if self.choices is not None:
            return "one of " + ", ".join(str(choice) or "nothing" for choice in self.choices)
        if self.items is not None:
            return self.items[1]
        if self.kind in {"int", "float"}:
            return self._allowed_numbers + (", or a time such as 90s or 7d" if self._may_have_unit else "")
        words = {"bool": "true or false", "string": "text", "list": "a comma-separated list"}
        return words.get(self.kind, "a function, set in Python")

    @property
    def _allowed_numbers(self) -> str:
        noun = "a whole number" if self.kind == "int" else "a number"
        if self.minimum is not None and self.maximum is not None:
            return f"{noun} from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"{noun}, {self.minimum} or more"
        if self.maximum is not None:
            return f"{noun}, {self.maximum} or less"
        return noun

    @property
    def _may_have_unit(self) -> bool:
        """Whether durations with a unit, such as ``7d``, are allowed beside milliseconds."""
        return self.kind == "int" and self.name.endswith(".ms")

    def parse(self, value: Any, *, source: str = "") -> Any:
        """Convert ``value`` (text, or already typed) to this option's type. Raises ConfigError.

        None is returned unchanged. ``source`` names the origin of the value in errors.
        """
        parsed = self._coerce(value)
        if parsed is None and value is not None:
            raise self._refused(value, source)
        if parsed is None:
            return None
        if self.choices is not None and parsed not in self.choices:
            raise self._refused(value, source)
        if self.items is not None and not all(re.fullmatch(self.items[0], item) for item in parsed):
            raise self._refused(value, source)
        if self.minimum is not None and parsed < self.minimum:
            raise self._refused(value, source)
        if self.maximum is not None and parsed > self.maximum:
            raise self._refused(value, source)
        return parsed

    def _refused(self, value: Any, source: str) -> ConfigError:
        shown = "(not shown)" if self.is_secret else value
        return ConfigError(key=self.name, value=shown, allowed=self.allowed, source=source)

    def _coerce(self, value: Any) -> Any:
        """Convert the value to this option's type. Return None if that is impossible, or for None."""
        if value is None:
            return None
        match self.kind:
            case "int":
                number = _as_number(int, value)
                return _as_ms(value) if number is None and self._may_have_unit else number
            case "float":
                fraction = _as_number(float, value)
                return fraction if fraction is None or math.isfinite(fraction) else None
            case "bool":
                return _as_bool(value)
            case "string":
                return value if isinstance(value, str) else str(value) if isinstance(value, int) else None
            case "list":
                return _as_list(value)
            case "callable":
                return value if callable(value) else None


def _as_number(number: type[int] | type[float], value: Any) -> float | None:
    if isinstance(value, str):
        try:
            return number(value.strip().replace("_", ""))
        except ValueError:
            return None
    return number(value) if isinstance(value, int | number) and not isinstance(value, bool) else None


def _as_ms(value: Any) -> int | None:
    """Return the milliseconds of a duration with a unit, such as ``7d``; None for any other value."""
    try:
        return parse_duration(value, bare_unit=None) if isinstance(value, str) else None
    except ValueError:
        return None


def _as_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _as_list(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(str(part) for part in value)
    return None


class OptionRegistry:
    """Finds options by dotted name, Python name or alias."""

    def __init__(self, options: Iterable[Option]) -> None:
        self._by_name: dict[str, Option] = {}
        self._names: dict[str, str] = {}
        for option in options:
            assert option.name not in self._by_name, f"{option.name} declared twice"
            self._by_name[option.name] = option
            for spelling in (option.name, option.python_name, *option.aliases):
                self._names[spelling] = option.name

    def __iter__(self) -> Iterator[Option]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str, *, source: str = "") -> Option:
        """Return the option with this name or alias. Raise ConfigError if there is none."""
        canonical = self._names.get(name)
        if canonical is None:
            hint = did_you_mean(
                name, self._names, shown=self._names.__getitem__, otherwise="see 'kl config explain'"
            )
            raise ConfigError(key=name, value=None, allowed=f"unknown option; {hint}", source=source)
        return self._by_name[canonical]

    def defaults(self) -> dict[str, Any]:
        return {option.name: option.default for option in self}

    def parse(self, settings: Mapping[str, Any], *, source: str = "") -> dict[str, Any]:
        """Convert settings to {dotted name: typed value}. Raise ConfigError at the first invalid setting."""
        parsed: dict[str, Any] = {}
        for name, value in settings.items():
            option = self.get(name, source=source)
            parsed[option.name] = option.parse(value, source=source)
        return parsed


KINDS: Final[dict[type, Kind]] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    tuple: "list",
    type(None): "string",
}


def option_field(
    default: Any,
    doc: str,
    *,
    name: str = "",
    kind: Kind | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[Any, ...] | None = None,
    aliases: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """Return a dataclass field that declares an option.

    If ``name`` is empty, it is derived from the field's name: ``linger_ms`` declares ``linger.ms``. If
    ``kind`` is None, it is the type of the default, or string if the default is None.
    """
    option = Option(
        name,
        kind or KINDS[type(default)],
        default,
        doc,
        minimum=minimum,
        maximum=maximum,
        choices=choices,
        aliases=aliases,
        is_secret=is_secret,
    )
    return field(default=default, repr=not is_secret, metadata={"option": option})


def options_of(config_class: Any) -> OptionRegistry:
    """Return a registry of the options of a dataclass. Each of its fields must declare an option."""
    return OptionRegistry(
        replace(option, name=option.name or name.replace("_", "."))
        for name, option in ((one.name, one.metadata["option"]) for one in fields(config_class))
    )
