"""Declares and reads options: names, defaults, bounds, and one warning for each option without effect.

Keys are case-insensitive, because Spark lower-cases them.
"""

# Tests: tests/sparkbridge/test_options.py

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final, Literal

from kafkalite.errors import ConfigError
from kafkalite.options import Kind, Option, OptionRegistry
from sparkbridge.errors import SparkOptionError, UnknownSparkOptionWarning

Applies = Literal["both", "stream", "batch"]

# Options that Spark sets itself or uses itself, so that they need no warning.
_OF_SPARK: Final = {"path", "paths", "checkpointlocation", "queryname", "outputmode", "header"}
_SECURITY: Final = re.compile(r"kafka\.(sasl|ssl|security)\.")


# --- declarations ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SparkOption:
    """One row of the documentation's table. ``default`` is written as a user would write it."""

    name: str
    default: str
    applies: Applies
    doc: str
    option: Option
    convert: Callable[[Any, str], Any] | None = None  #: (parsed value, name) -> value

    def parse(self, text: str) -> Any:
        """Return the value. Raises SparkOptionError, also for blank text."""
        try:
            value = self.option.parse(text)
        except ConfigError as cause:
            raise SparkOptionError(str(cause), hint=self.doc) from cause
        if isinstance(value, str) and not value.strip():
            raise SparkOptionError(f"{self.name} is empty", hint=self.doc)
        return value if self.convert is None else self.convert(value, self.name)


def row(
    name: str,
    kind: Kind,
    doc: str,
    *,
    default: str = "",
    applies: Applies = "both",
    convert: Callable[[Any, str], Any] | None = None,
    **bounds: Any,
) -> SparkOption:
    """Declare an option. ``convert`` makes its value from (parsed value, name); ``bounds`` are Option's."""
    return SparkOption(name, default, applies, doc, Option(name, kind, None, doc, **bounds), convert)


def declared(*rows: SparkOption) -> Any:
    """Return a dataclass field made from these options. With one option, its value is the field's."""
    return field(metadata={"options": rows})


def option(name: str, kind: Kind, doc: str, **more: Any) -> Any:
    """Return a dataclass field that has the value of one option."""
    return declared(row(name, kind, doc, **more))


def rows_of(cls: Any) -> tuple[SparkOption, ...]:
    """Return the options that a dataclass declares, in the order of its fields."""
    return tuple(each for found in fields(cls) for each in found.metadata.get("options", ()))


# --- reading ---------------------------------------------------------------------------------------


class OptionReader:
    """The options of one source or sink, by lower-case name. ``registry`` defines its client's settings."""

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
        self._known: set[str] = set()  # client settings, with their prefix "kafka."
        self._refused: Collection[str] = ()

    def has(self, name: str) -> bool:
        return name.lower() in self.values

    def value(self, name: str) -> Any:
        """Return the typed value or the default; None if the default is empty. Raises SparkOptionError."""
        found = self.rows[name.lower()]
        text = self.values.get(name.lower(), found.default or None)
        return None if text is None else found.parse(text)

    def values_of(self, cls: Any) -> dict[str, Any]:
        """Return the value of each field of ``cls`` that is declared with one option."""
        single = {each.name: each.metadata.get("options", ()) for each in fields(cls)}
        return {name: self.value(rows[0].name) for name, rows in single.items() if len(rows) == 1}

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Raise SparkOptionError for options in ``refused`` (name: what to do) and for security settings."""
        self._refused = refused
        for name in sorted(self.values):
            if name in refused:
                raise SparkOptionError(f"{name} is not supported by the {self.kind}", hint=refused[name])
            if name == "kafka.security.protocol" and self.values[name].upper() == "PLAINTEXT":
                self._known.add(name)
            elif _SECURITY.match(name):
                raise SparkOptionError(
                    f"{name} is set, but this client supports plain TCP only",
                    hint="leave it out, and keep the brokers in a network that you trust",
                )

    def client_settings(self) -> dict[str, str]:
        """Return the ``kafka.`` options that the client has, without the prefix. Raises SparkOptionError."""
        settings: dict[str, str] = {}
        for name, value in self.values.items():
            dotted = name.removeprefix("kafka.")
            if dotted == name or dotted not in self.registry:
                continue
            try:
                self.registry.get(dotted).parse(value)
            except ConfigError as cause:
                raise SparkOptionError(
                    f"kafka.{cause}", hint=f"it is a setting of the {self.kind}'s Kafka client"
                ) from cause
            settings[self.registry.get(dotted).name] = value
            self._known.add(name)
        return settings

    def ignored(self, name: str, why: str) -> None:
        """Warn that ``name`` has no effect, if it is set."""
        if self.has(name):
            self._warnings.append(f"{name} is ignored: {why}")

    def warn(
        self, others: Iterable[SparkOption], other_registry: OptionRegistry, silent: Collection[str] = ()
    ) -> None:
        """Issue one warning for each option that has no effect, with the most similar name.

        ``others`` are the options of the sink (for a source) or of the source (for a sink).
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
