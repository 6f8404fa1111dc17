"""The schema of the source, and its projections."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sparkbridge.errors import SourceSchemaError
from sparkbridge.source.schema import COLUMNS, arrow_schema, check_projection, source_schema

HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])


def schema(*columns: tuple[str, object]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns])  # type: ignore[arg-type]


def test_columns_are_those_of_the_kafka_connector() -> None:
    assert source_schema().simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert all(field.nullable for field in source_schema())


@pytest.mark.parametrize(
    ("as_map", "kind"), [(False, "array<struct<key:string,value:binary>>"), (True, "map<string,binary>")]
)
def test_headers_are_the_last_column(as_map: bool, kind: str) -> None:
    whole = source_schema(include_headers=True, headers_as_map=as_map)
    assert whole.fields[:-1] == source_schema().fields
    assert whole.fields[-1].name == "headers"
    assert whole.fields[-1].dataType.simpleString() == kind


def test_the_source_s_own_schemas_are_projections_of_it() -> None:
    for include_headers in (False, True):
        for as_map in (False, True):
            check_projection(source_schema(include_headers=include_headers, headers_as_map=as_map))


def test_first_type_of_each_column_is_the_source_s() -> None:
    whole = source_schema(include_headers=True)
    assert {field.name: field.dataType.simpleString() for field in whole} == {
        name: types[0] for name, types in COLUMNS.items()
    }


def test_arrow_schema_is_what_spark_checks_batches_against() -> None:
    for as_map in (False, True):
        whole = source_schema(include_headers=True, headers_as_map=as_map)
        assert arrow_schema(whole).equals(to_arrow_schema(whole, timezone="UTC"), check_metadata=True)


@pytest.mark.parametrize(
    "projection",
    [
        schema(("value", BinaryType())),
        schema(("value", StringType()), ("key", StringType())),
        schema(("offset", LongType()), ("timestamp", TimestampType()), ("timestampType", IntegerType())),
        schema(("headers", ArrayType(HEADER))),
        schema(("headers", MapType(StringType(), BinaryType()))),
        StructType([StructField("offset", LongType(), nullable=False)]),
    ],
)
def test_any_columns_in_any_order_are_a_projection(projection: StructType) -> None:
    check_projection(projection)


@pytest.mark.parametrize(
    ("projection", "message"),
    [
        (schema(("vallue", BinaryType())), r"no column 'vallue'; did you mean 'value'\?"),
        (schema(("timestamptype", IntegerType())), r"did you mean 'timestampType'\?"),
        (schema(("zzz", BinaryType())), r"no column 'zzz' \(a schema is a projection of key, value"),
        (schema(("value", IntegerType())), "'value' of the source can't be int .*binary or string"),
        (schema(("offset", IntegerType())), "'offset' of the source can't be int; did you mean 'bigint'"),
        (schema(("headers", ArrayType(StringType()))), "'headers' of the source can't be array<string>"),
        (schema(("key", BinaryType()), ("key", BinaryType())), "'key' twice"),
        (StructType([]), "no columns"),
        (StructType([StructField("value", BinaryType(), nullable=False)]), "'value' can't be NOT NULL"),
        (
            schema(
                ("headers", ArrayType(StructType([HEADER["key"], StructField("value", BinaryType(), False)])))
            ),
            "value of a header can't be NOT NULL",
        ),
        (
            schema(("headers", MapType(StringType(), BinaryType(), valueContainsNull=False))),
            "value of a header can't be NOT NULL",
        ),
    ],
)
def test_an_invalid_projection_is_named(projection: StructType, message: str) -> None:
    with pytest.raises(SourceSchemaError, match=message):
        check_projection(projection)
