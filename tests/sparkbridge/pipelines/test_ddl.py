"""Schemas as text: those that Spark accepts are accepted, others are refused with a reason."""

from __future__ import annotations

import pytest

from sparkbridge.pipelines.ddl import parse_schema


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("id BIGINT", [("id", "bigint")]),
        ("id: bigint, name string", [("id", "bigint"), ("name", "string")]),
        ("price DECIMAL(6, 2) NOT NULL", [("price", "decimal(6,2)")]),
        ("a INT COMMENT 'one, two', b DATE", [("a", "int"), ("b", "date")]),
        ("`odd name` VARCHAR(10)", [("odd name", "varchar(10)")]),
        ("tags ARRAY<STRING>, m MAP<STRING, INT>", [("tags", "array<string>"), ("m", "map<string,int>")]),
        ("s STRUCT<a: INT, b: ARRAY<STRUCT<c: DATE>>>", [("s", "struct<a:int,b:array<struct<c:date>>>")]),
    ],
)
def test_schemas_that_spark_accepts(text: str, fields: list[tuple[str, str]]) -> None:
    assert [tuple(field) for field in parse_schema(text)] == fields


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no field"),
        ("id", "'id' is not a name and a type"),
        ("id BIGINT,, b INT", "missing between two commas"),
        ("id BIGNIT", "no type 'BIGNIT'; did you mean bigint?"),
        ("id INT, ID STRING", "two fields have the name 'ID'"),
        ("a ARRAY<STRING", "not closed"),
        ("a ARRAY<STRING>>", "a bracket too many"),
        ("a MAP<STRING>", "map has 2 types inside its <>, not 1"),
        ("a ARRAY<STRNG>", "did you mean string?"),
        ("s STRUCT<a>", "'a' is not a name and a type"),
        ("p DECIMAL(two)", "no type 'DECIMAL(two)'"),
    ],
)
def test_schemas_that_spark_refuses(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_schema(text)
    assert reason in str(caught.value)
