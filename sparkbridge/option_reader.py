"""Declares and reads options: names, defaults, bounds, and a warning for each option without effect.

Option names are case-insensitive, because Spark converts them to lower case.
"""

# Tests: tests/sparkbridge/test_options.py

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import chain
from typing import Any, Final, Literal

from kafkalite.client.config import elsewhere
from kafkalite.errors import ConfigError
from kafkalite.options import KINDS, Kind, Option, OptionRegistry
from sparkbridge.errors import SparkOptionError, UnknownSparkOptionWarning
from sparkbridge.option_values import option_text

Applies = Literal["both", "stream", "batch"]

# Options that Spark itself sets or reads. They need no warning.
_OF_SPARK: Final = {"path", "paths", "checkpointlocation", "queryname", "outputmode", "header"}
_SECURITY: Final = re.compile(r"(kafka\.)?(sasl|ssl|security)\.")


@dataclass(frozen=True, slots=True)
class SparkOption:
    """One option, a row of the table in the documentation. ``default`` is the text in the table, or ""."""

    name: str
    default: str
    applies: Applies
    doc: str
    option: Option
    convert: Callable[[Any, str], Any] | None = None  #: maps (parsed value, name) to the value

    def parse(self, text: str) -> Any:
        """Return the value for ``text``. Raises SparkOptionError, also if ``text`` is blank."""
        text = _as_declared(self.option, text)
        try:
            value = self.option.parse(text)
        except ConfigError as cause:
            raise SparkOptionError(str(cause), hint=self.doc) from cause
        if isinstance(value, str) and not value.strip():
            raise SparkOptionError(f"{self.name} is empty", hint=self.doc)
        return value if self.convert is None else self.convert(value, self.name)


def _as_declared(option: Option, text: str) -> str:
    """Return the choice of ``option`` that equals ``text`` except for case and outer spaces, else ``text``.

    Spark's connector accepts choices in any case, too.
    """
    choices = {str(each).lower(): str(each) for each in option.choices or ()}
    return choices.get(text.strip().lower(), text)


def row(
    name: str,
    doc: str,
    *,
    default: bool | int | str = "",
    kind: Kind | None = None,
    applies: Applies = "both",
    convert: Callable[[Any, str], Any] | None = None,
    **bounds: Any,
) -> SparkOption:
    """Declare an option.

    If ``kind`` is None, the kind is that of ``default``. An option whose ``default`` is "" has no default:
    its value is None if it is not set. ``convert(parsed value, name)``, if given, returns the final value.
    ``bounds`` are passed to ``Option``.
    """
    parser = Option(name, kind or KINDS[type(default)], None, doc, **bounds)
    return SparkOption(name, option_text(default), applies, doc, parser, convert)


def declared(*rows: SparkOption) -> Any:
    """Return a dataclass field that declares these options.

    If there is only one option, ``OptionReader.values_of`` returns its value as the value of the field.
    """
    return field(metadata={"options": rows})


def option(doc: str, *, name: str = "", **more: Any) -> Any:
    """Return a dataclass field whose value is the value of one option.

    If ``name`` is empty, it is the field's name in camel case: ``sink_name`` declares ``sinkName``.
    """
    return declared(row(name, doc, **more))


@cache
def rows_by_field(cls: Any) -> dict[str, tuple[SparkOption, ...]]:
    """Return the options that each field of a dataclass declares, by the name of the field."""
    declared_by = {each.name: each.metadata.get("options", ()) for each in fields(cls)}
    return {name: tuple(_named(each, name) for each in rows) for name, rows in declared_by.items()}


def _named(declared: SparkOption, field_name: str) -> SparkOption:
    first, *others = field_name.split("_")
    name = declared.name or first + "".join(word.capitalize() for word in others)
    return replace(declared, name=name, option=replace(declared.option, name=name))


def rows_of(cls: Any) -> tuple[SparkOption, ...]:
    """Return the options that a dataclass declares, in the order of its fields."""
    return tuple(chain.from_iterable(rows_by_field(cls).values()))


class OptionReader:
    """Reads the options of one source or sink. ``registry`` declares the client settings."""

    def __init__(
        self,
        options: Mapping[str, str],
        rows: Iterable[SparkOption],
        registry: OptionRegistry,
        kind: Literal["source", "sink"],
        *,
        is_stream: bool,
    ) -> None:
        self.values = {str(key).lower(): str(value) for key, value in options.items() if value is not None}
        self.rows = {each.name.lower(): each for each in rows if each.name != "kafka.*"}
        self.registry = registry
        self.kind = kind
        self.is_stream = is_stream
        self._warnings: list[str] = []
        self._known: set[str] = set()  # names of valid client settings, with the prefix "kafka."
        self._refused: Collection[str] = ()

    def has(self, name: str) -> bool:
        return name.lower() in self.values

    def value(self, name: str) -> Any:
        """Return the parsed value or default, or None if there is neither. Raises SparkOptionError."""
        found = self.rows[name.lower()]
        text = self.values.get(name.lower(), found.default or None)
        return None if text is None else found.parse(text)

    def values_of(self, cls: Any) -> dict[str, Any]:
        """Return {field name: value} of the fields of ``cls`` that declare exactly one option."""
        rows = rows_by_field(cls).items()
        return {field_name: self.value(only[0].name) for field_name, only in rows if len(only) == 1}

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Raise SparkOptionError for an option in ``refused`` (name: hint) or an unknown security setting.

        A security setting without the prefix ``kafka.`` is unknown, too. If it were only ignored, the client
        could connect without the protection that the user wants.
        """
        self._refused = refused
        for name in sorted(self.values):
            if name in refused:
                raise SparkOptionError(f"{name} is not supported by the {self.kind}", hint=refused[name])
            dotted = name.removeprefix("kafka.")
            if _SECURITY.match(name) and (dotted == name or dotted not in self.registry):
                near = self._nearest(name)
                hint = elsewhere(dotted) or (f"did you mean {near}?" if near else "see docs/spark.md")
                raise SparkOptionError(f"{name} is not an option of the kafkalite {self.kind}", hint=hint)

    def client_settings(self) -> dict[str, str]:
        """Return the ``kafka.`` options that ``registry`` has, without the prefix. Raises SparkOptionError.

        Whole numbers and durations are returned as digits: ``30s`` becomes ``30000`` if the unit of the
        setting is milliseconds.
        """
        settings: dict[str, str] = {}
        for name, value in self.values.items():
            dotted = name.removeprefix("kafka.")
            if dotted == name or dotted not in self.registry:
                continue
            value = _as_declared(self.registry.get(dotted), value)
            try:
                parsed = self.registry.get(dotted).parse(value)
            except ConfigError as cause:
                raise SparkOptionError(
                    f"kafka.{cause}", hint=f"it is a setting of the {self.kind}'s Kafka client"
                ) from cause
            is_number = isinstance(parsed, int) and not isinstance(parsed, bool)
            settings[self.registry.get(dotted).name] = str(parsed) if is_number else value
            self._known.add(name)
        return settings

    def ignored(self, name: str, why: str) -> None:
        """Add a warning that ``name`` has no effect, if the option is set. ``warn`` issues it."""
        if self.has(name):
            self._warnings.append(f"{name} is ignored: {why}")

    def warn(
        self, others: Iterable[SparkOption], other_registry: OptionRegistry, silent: Collection[str] = ()
    ) -> None:
        """Issue the warnings of ``ignored``, and one for each given option that has no effect here.

        If such an option is in ``others`` or ``other_registry``, the warning says so: they are the options
        and client settings of the sink if this reads a source's options, and vice versa. Otherwise it
        suggests a similar name. Unknown options in ``silent``, and Spark's own options, cause no warning.
        """
        of_other = {each.name.lower() for each in others} | {f"kafka.{each.name}" for each in other_registry}
        mode = "stream" if self.is_stream else "batch"
        for each in self.rows.values():
            if each.applies not in {"both", mode}:
                self.ignored(each.name, f"it is an option of {'batch jobs' if self.is_stream else 'streams'}")
        for name in sorted(self.values):
            if name in self.rows or name in self._known or name in silent or name in _OF_SPARK:
                continue
            near = self._nearest(name)
            hint = f"; did you mean {near}?" if near else ""
            if name in of_other:
                hint = f"; it is an option of the {'sink' if self.kind == 'source' else 'source'}"
            self._warnings.append(
                f"{name} is not an option of the kafkalite {self.kind} and is ignored{hint}"
            )
        for text in self._warnings:
            warnings.warn(text, UnknownSparkOptionWarning, stacklevel=3)

    def _nearest(self, name: str) -> str | None:
        spelling = {lower: each.name for lower, each in self.rows.items()}
        settings = [f"kafka.{each.name}" for each in self.registry]
        spelling |= {setting: setting for setting in settings if setting not in self._refused}
        if f"kafka.{name}" in spelling:
            return spelling[f"kafka.{name}"]
        near = get_close_matches(name, spelling, n=1, cutoff=0.75)
        return spelling[near[0]] if near else None
