"""The declaration of a pipeline as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from sparkbridge.pipelines.ddl import Field

AVAILABLE_NOW: Final = "available-now"
DecodeFormat = Literal["none", "json", "text"]
OutputMode = Literal["append", "complete", "update"]
Mode = Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"]
TableFormat = Literal["csv", "json", "parquet"]

_UNITS_MS: Final = {"millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_INTERVAL: Final = re.compile(r"\s*(\d+)\s*([a-z]+?)s?\s*", re.I)


class FunctionRef(NamedTuple):
    """A function in a file, ``file.py:function``. The path is relative to the pipeline's file."""

    path: str
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"


@dataclass(frozen=True, slots=True)
class Decode:
    """How the value of a record is decoded into columns.

    If ``format`` is "text", ``pattern`` is a regular expression, and ``groups`` maps fields to group numbers.
    """

    format: DecodeFormat = "none"
    schema: str = ""
    fields: tuple[Field, ...] = ()
    pattern: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    mode: Mode = "PERMISSIVE"


@dataclass(frozen=True, slots=True)
class Source:
    """A pipeline's source. Exactly one of ``subscribe`` and ``subscribe_pattern`` is not empty."""

    subscribe: tuple[str, ...] = ()
    subscribe_pattern: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    decode: Decode = Decode()

    @property
    def text(self) -> str:
        return ",".join(self.subscribe) or f"/{self.subscribe_pattern}/"


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    format: TableFormat
    path: str
    schema: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


class Watermark(NamedTuple):
    column: str
    delay: str


@dataclass(frozen=True, slots=True)
class Step:
    """A transform, in either ``sql`` or ``python``. Its result is a view called ``name``."""

    name: str
    sql: str = ""
    python: FunctionRef | None = None
    watermark: Watermark | None = None


@dataclass(frozen=True, slots=True)
class Sink:
    """A destination for the rows of the view ``reads``: one of ``topic``, ``parquet`` and ``console`` is set.

    For a topic, ``columns`` maps names among key, value, headers, partition and timestamp to SQL expressions.
    If value is not among them, it is a JSON object of ``json_columns`` (empty: of all columns).
    """

    name: str
    reads: str
    output_mode: OutputMode = "append"
    topic: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    json_columns: tuple[str, ...] = ()
    parquet: str = ""
    partition_by: tuple[str, ...] = ()
    console: bool = False
    rows: int = 20
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def table(self) -> str:
        """Return the name of the sink's table in the file: ``sink`` or ``sinks.NAME``."""
        return "sink" if self.name == "sink" else f"sinks.{self.name}"

    @property
    def text(self) -> str:
        if self.topic:
            return f"topic {self.topic}"
        return f"parquet {self.parquet}" if self.parquet else "console"


@dataclass(frozen=True, slots=True)
class Check:
    """Checks of the output of an available-now run: SQL queries by name, and a Python function."""

    sql: Mapping[str, str] = field(default_factory=dict)
    python: FunctionRef | None = None

    def __bool__(self) -> bool:
        return bool(self.sql) or self.python is not None


@dataclass(frozen=True, slots=True)
class Demo:
    """Demo input. ``load`` generates the records. ``topics`` maps each topic to its partition count."""

    load: FunctionRef
    topics: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    name: str
    source: Source
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    description: str = ""
    trigger: str = AVAILABLE_NOW
    checkpoint: str = ""
    tables: tuple[Table, ...] = ()
    check: Check = Check()
    demo: Demo | None = None
    spark: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_one_sink(self) -> bool:
        """Whether the file declares ``[sink]``, or only a sink with the name ``sink``."""
        return [sink.name for sink in self.sinks] == ["sink"]

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a run needs ``--checkpoint``: the file names no checkpoint, and a sink stores its rows."""
        return not self.checkpoint and not all(sink.console for sink in self.sinks)

    def group_id(self, sink: Sink) -> str:
        """Return the default consumer group of the query of ``sink``."""
        return self.name if self.has_one_sink else f"{self.name}.{sink.name}"


def parse_interval_ms(text: str) -> int:
    """Parse an interval such as ``5 seconds`` into milliseconds. Raises ValueError."""
    match = _INTERVAL.fullmatch(text)
    unit_ms = _UNITS_MS.get(match[2].lower()) if match else None
    if match is None or unit_ms is None:
        raise ValueError(f"is {text!r}, but must be a number and a unit, such as '10 seconds' or '5 minutes'")
    return int(match[1]) * unit_ms


def parse_trigger(text: str) -> str:
    """Return ``available-now``, or the text of an interval without surrounding spaces. Raises ValueError."""
    cleaned = text.strip()
    if re.sub(r"[-_ ]", "", cleaned.lower()) == "availablenow":
        return AVAILABLE_NOW
    try:
        parse_interval_ms(cleaned)
    except ValueError:
        raise ValueError(
            f"is {text!r}, but must be {AVAILABLE_NOW!r} or an interval such as '5 seconds'"
        ) from None
    return cleaned


def parse_function(text: str) -> FunctionRef:
    """Parse a reference such as ``check.py:check``. Raises ValueError."""
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ValueError(
            f"is {text!r}, but must be a file and a function in it, such as 'transform.py:enrich'"
        )
    return FunctionRef(path, name)
