from __future__ import annotations

import warnings

import pytest

pytest.importorskip("pyspark")
from pyspark.sql.types import StructType

from sparkbridge.errors import SinkSchemaError, UnknownSparkOptionWarning
from sparkbridge.sink.schema import SinkColumns, sink_columns


def schema(text: str) -> StructType:
    """Make a schema from names and types: Spark's DDL parser needs a JVM."""
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        IntegerType,
        LongType,
        MapType,
        StringType,
        StructField,
        TimestampNTZType,
        TimestampType,
    )

    header = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    kinds = {
        "string": StringType(),
        "binary": BinaryType(),
        "int": IntegerType(),
        "bigint": LongType(),
        "timestamp": TimestampType(),
        "timestamp_ntz": TimestampNTZType(),
        "headers": ArrayType(header),
        "map": MapType(StringType(), BinaryType()),
        "headers_of_text": ArrayType(
            StructType([StructField("key", StringType()), StructField("value", StringType())])
        ),
    }
    fields = [part.split() for part in text.split(",") if part]
    return StructType([StructField(name, kinds[kind]) for name, kind in fields])


def test_all_columns_are_found_in_any_order() -> None:
    columns = sink_columns(
        schema("timestamp timestamp,topic string,key string,headers headers,value binary,partition int"), None
    )
    assert columns == SinkColumns(value=4, key=2, headers=3, topic=1, partition=5, timestamp=0)


def test_value_alone_is_enough_with_a_topic() -> None:
    assert sink_columns(schema("value string"), "out") == SinkColumns(value=0)


def test_the_topic_option_overrides_the_column() -> None:
    assert sink_columns(schema("value string,topic string"), "out").topic is None


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("value bigint", "string or binary"),
        ("key int", "string or binary"),
        ("headers map", "array<struct<key: string, value: binary>>"),
        ("headers headers_of_text", "array<struct<key: string, value: binary>>"),
        ("topic binary", "must be string"),
        ("partition bigint", "must be int"),
        ("timestamp bigint", "timestamp_millis"),
        ("timestamp timestamp_ntz", "must be timestamp"),
    ],
)
def test_a_column_of_a_wrong_type_is_named(column: str, says: str) -> None:
    rest = "" if column.startswith("value") else ",value string"
    with pytest.raises(SinkSchemaError) as caught:
        sink_columns(schema(column + rest), "out")
    assert repr(column.split()[0]) in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_value_is_reported_with_the_existing_columns() -> None:
    with pytest.raises(SinkSchemaError, match="no column 'value', only 'a', 'b'"):
        sink_columns(schema("a string,b string"), "out")


@pytest.mark.parametrize("slip", ["vlaue", "Value", "values"])
def test_a_typing_error_of_value_is_reported(slip: str) -> None:
    with pytest.raises(SinkSchemaError, match=f"did you mean column '{slip}'"):
        sink_columns(schema(f"{slip} string"), "out")


def test_no_topic_anywhere() -> None:
    with pytest.raises(SinkSchemaError, match="neither an option nor a column 'topic'"):
        sink_columns(schema("value string"), None)


def test_a_typing_error_of_topic_is_reported() -> None:
    with pytest.raises(SinkSchemaError, match="did you mean column 'topics'"):
        sink_columns(schema("value string,topics string"), None)


def test_two_columns_of_one_name() -> None:
    with pytest.raises(SinkSchemaError, match="two columns are named 'key'"):
        sink_columns(schema("value string,key string,key string"), "out")


def test_other_columns_are_ignored_as_by_the_connector() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns = sink_columns(schema("value string,offset bigint,timestampType int,customer string"), "out")
    assert columns == SinkColumns(value=0)


@pytest.mark.parametrize(("slip", "meant"), [("Key", "key"), ("partion", "partition"), ("header", "headers")])
def test_a_column_that_looks_like_a_typing_error_causes_a_warning(slip: str, meant: str) -> None:
    with pytest.warns(UnknownSparkOptionWarning, match=f"'{slip}' is not written; if '{meant}' is meant"):
        sink_columns(schema(f"value string,{slip} string"), "out")


def test_a_column_similar_to_an_existing_one_is_no_typing_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink_columns(schema("value string,key string,keys string"), "out")
