"""Checks the columns of a DataFrame before the sink's job starts.

``value`` (string or binary) is required. ``key`` (string or binary), ``headers`` (as in the source),
``topic`` (string), ``partition`` (int) and ``timestamp`` (timestamp) are optional. Other columns are ignored,
as in Spark's Kafka connector, with a warning if the name is similar to one of these that is absent.
"""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

from sparkbridge.errors import SinkSchemaError, UnknownSparkOptionWarning

#: Other columns of the source. A query that copies topics has them, so they cause no warning.
_OF_THE_SOURCE: Final = frozenset({"offset", "timestampType"})
#: {name: (allowed types, an expression of such a type)}
_COLUMNS: Final = {
    "value": ("string or binary", "CAST(value AS STRING) AS value, or to_json(struct(*)) AS value"),
    "key": ("string or binary", "CAST(key AS STRING) AS key"),
    "headers": (
        "array<struct<key: string, value: binary>>",
        "array(struct('name' AS key, CAST('content' AS BINARY) AS value)) AS headers",
    ),
    "topic": ("string", "CAST(topic AS STRING) AS topic"),
    "partition": ("int", "CAST(partition AS INT) AS partition"),
    "timestamp": ("timestamp", "timestamp_millis(timestamp) AS timestamp for milliseconds since 1970"),
}
SINK_COLUMNS: Final = tuple(_COLUMNS)


class SinkColumns(NamedTuple):
    """The index of each column in a row; None if the column is absent or the option topic replaces it."""

    value: int
    key: int | None = None
    headers: int | None = None
    topic: int | None = None
    partition: int | None = None
    timestamp: int | None = None


def sink_columns(schema: StructType, topic: str | None) -> SinkColumns:
    """Return the columns to write. ``topic`` is the value of the option topic, which overrides the column.

    Raises SinkSchemaError.
    """
    names = schema.fieldNames()
    found: dict[str, int] = {}
    for index, field in enumerate(schema.fields):
        if field.name not in _COLUMNS:
            continue
        if field.name in found:
            raise SinkSchemaError(f"two columns are named {field.name!r}", hint="drop one, or rename it")
        if not _fits(field.name, field.dataType):
            allowed, cure = _COLUMNS[field.name]
            raise SinkSchemaError(
                f"column {field.name!r} is {field.dataType.simpleString()}, but must be {allowed}",
                hint=f"for example selectExpr: {cure}",
            )
        found[field.name] = index
    others = [name for name in names if name not in found and name not in _OF_THE_SOURCE]
    if "value" not in found:
        raise SinkSchemaError(
            f"there is no column 'value', only {', '.join(map(repr, names)) or 'none at all'}",
            hint=_rename(_slips("value", others)) or f"for example selectExpr: {_COLUMNS['value'][1]}",
        )
    if topic is None and "topic" not in found:
        raise SinkSchemaError(
            "no topic to write to: there is neither an option nor a column 'topic'",
            hint=_rename(_slips("topic", others)) or 'use .option("topic", "name")',
        )
    _warn_of_slips(others, found)
    if topic is not None:
        found.pop("topic", None)
    return SinkColumns(**found)


def _fits(name: str, data_type: DataType) -> bool:
    if name in {"value", "key"}:
        return isinstance(data_type, StringType | BinaryType)
    if name == "headers":
        return isinstance(data_type, ArrayType) and _is_header(data_type.elementType)
    kinds: dict[str, Any] = {"topic": StringType, "partition": IntegerType, "timestamp": TimestampType}
    return isinstance(data_type, kinds[name])


def _is_header(data_type: DataType) -> bool:
    return (
        isinstance(data_type, StructType)
        and data_type.fieldNames() == ["key", "value"]
        and isinstance(data_type["key"].dataType, StringType)
        and isinstance(data_type["value"].dataType, BinaryType)
    )


def _slips(name: str, others: list[str]) -> list[str]:
    """Return a list with the name in ``others`` that is probably a misspelling of ``name``, or []."""
    lowered = {other.lower(): other for other in others}
    return [lowered[close] for close in get_close_matches(name, lowered, n=1, cutoff=0.75)]


def _rename(slips: list[str]) -> str:
    return f"did you mean column {slips[0]!r}? Rename it" if slips else ""


def _warn_of_slips(others: list[str], found: dict[str, int]) -> None:
    for name in SINK_COLUMNS:
        if name in found:
            continue
        for slip in _slips(name, others):
            warnings.warn(
                f"column {slip!r} is not written; if {name!r} is meant, rename it",
                UnknownSparkOptionWarning,
                stacklevel=4,
            )
