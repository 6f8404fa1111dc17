"""The columns of the source, in Spark and in Arrow.

They are the columns of Spark's Kafka connector. The user may give a schema with some of them in any order.
Other columns are then neither built nor sent to the JVM. ``key`` and ``value`` may be requested as strings,
and ``headers`` as an array of all headers, or as a map with the last header of each name.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sparkbridge.errors import SourceSchemaError

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

HEADERS_ARRAY: Final = "array<struct<key:string,value:binary>>"
HEADERS_MAP: Final = "map<string,binary>"

#: {column name: its allowed types, as Spark writes them}. The first type is the default.
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "offset": ("bigint",),
    "timestamp": ("timestamp",),
    "timestampType": ("int",),
    "headers": (HEADERS_ARRAY, HEADERS_MAP),
}
#: Columns that may be null.
NULLABLE: Final = ("key", "value", "headers")


@lru_cache(maxsize=4)
def source_schema(*, include_headers: bool = False, headers_as_map: bool = False) -> StructType:
    """Return all columns of the source, with ``headers`` if ``include_headers``: an array, or a map.

    The result is cached and must not be modified.
    """
    from pyspark.sql import types as spark

    header = spark.StructType().add("key", "string").add("value", "binary")
    known: tuple[spark.DataType, ...] = (
        spark.BinaryType(),
        spark.StringType(),
        spark.IntegerType(),
        spark.LongType(),
        spark.TimestampType(),
        spark.ArrayType(header),
        spark.MapType(spark.StringType(), spark.BinaryType()),
    )
    by_name = {each.simpleString(): each for each in known}
    wanted = {name: types[0] for name, types in COLUMNS.items() if name != "headers"}
    if include_headers:
        wanted["headers"] = HEADERS_MAP if headers_as_map else HEADERS_ARRAY
    return spark.StructType([spark.StructField(name, by_name[kind]) for name, kind in wanted.items()])


def check_projection(schema: StructType) -> None:
    """Raise SourceSchemaError unless ``schema`` has only columns of the source, with allowed types.

    Raises it also for a schema without columns, for a column that occurs twice, and for a column or header
    value that is NOT NULL although a record may lack it.
    """
    if not schema.fields:
        raise SourceSchemaError("the schema given to the source has no columns", hint=_choice())
    seen: set[str] = set()
    for field in schema.fields:
        if field.name not in COLUMNS:
            near = _nearest(field.name, list(COLUMNS))
            raise SourceSchemaError(f"the source has no column {field.name!r}{near}", hint=_choice())
        if field.name in seen:
            raise SourceSchemaError(f"the schema given to the source names column {field.name!r} twice")
        seen.add(field.name)
        found, allowed = field.dataType.simpleString(), COLUMNS[field.name]
        if found not in allowed:
            near = _nearest(found, allowed)
            raise SourceSchemaError(
                f"column {field.name!r} of the source can't be {found}{near}",
                hint=f"it is {' or '.join(allowed)}; cast it in a select()",
            )
        if not field.nullable and field.name in NULLABLE:
            raise SourceSchemaError(
                f"column {field.name!r} can't be NOT NULL: a record may be without one",
                hint="leave NOT NULL out, and filter with IS NOT NULL",
            )
        if field.name == "headers" and not _header_value_is_nullable(field.dataType):
            raise SourceSchemaError(
                "the value of a header can't be NOT NULL: a header may be without one",
                hint="leave NOT NULL out, or valueContainsNull=False",
            )


def _header_value_is_nullable(kind: Any) -> bool:
    """Whether a type that is allowed for ``headers`` has nullable values."""
    if kind.typeName() == "map":
        return bool(kind.valueContainsNull)
    return bool(kind.elementType["value"].nullable)


def arrow_schema(schema: StructType) -> pyarrow.Schema:
    """Return the Arrow schema that Spark requires for the batches of a source with this ``schema``."""
    from pyspark.sql.pandas.types import to_arrow_schema

    converted: Any = to_arrow_schema(schema, timezone="UTC")
    return converted


def _nearest(name: str, names: Sequence[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def _choice() -> str:
    return f"a schema is a projection of {', '.join(COLUMNS)}"
