"""The columns of a record that are read, by the names in a pipeline, without a JVM."""

from __future__ import annotations

import tomllib

import pytest

pytest.importorskip("pyspark")

from sparkbridge.pipelines.frames import record_columns, wanted_columns
from sparkbridge.pipelines.parsing import parse_pipeline

TEXT = """
[pipeline]
name = "p"
trigger = "1 second"
[source]
topic = "t"
decode = { format = "json", schema = "id BIGINT" }
"""
EVERYTHING = ("key", "topic", "partition", "offset", "timestamp", "timestampType", "headers")


@pytest.mark.parametrize(
    ("rest", "columns"),
    [
        ('[sink]\ntopic = "o"', ()),
        ('[[transform]]\nsql = "SELECT * FROM source WHERE id > 0"\n[sink]\ntopic = "o"', ()),
        (
            '[[transform]]\nsql = "SELECT *, Record.TIMESTAMP AS t FROM source"\n[sink]\ntopic = "o"',
            ("timestamp",),
        ),
        ('[[transform]]\nsql = "SELECT id, `record`.`offset` FROM source"\n[sink]\ntopic = "o"', ("offset",)),
        ('[sink]\ntopic = "o"\nkey = "record.key"\nvalue = "record.value"', ("key", "value")),
        ('[[transform]]\nsql = "SELECT id, record FROM source"\n[sink]\ntopic = "o"', EVERYTHING),
        ('[[transform]]\nsql = "SELECT record.headers FROM source"\n[sink]\ntopic = "o"', EVERYTHING),
        (
            '[[transform]]\nsql = "SELECT record.*, record.value FROM source"\n[sink]\ntopic = "o"',
            ("key", "value", *EVERYTHING[1:]),
        ),
        ('[[transform]]\npython = "a.py:b"\n[sink]\ntopic = "o"', EVERYTHING),
    ],
)
def test_the_record_has_the_named_columns(rest: str, columns: tuple[str, ...]) -> None:
    """Other columns are neither read nor written: ``SELECT *`` of decoded values is their fields."""
    pipeline, problems = parse_pipeline(tomllib.loads(TEXT + rest))
    assert not any(each for each in problems if not each.is_warning), problems
    assert record_columns(pipeline) == columns
    wanted = [part.split()[0] for part in wanted_columns(pipeline).split(", ") if part]
    assert set(wanted) == (set() if "headers" in columns else {"value", *columns})


def test_failfast_reads_the_columns_that_name_a_record() -> None:
    document = tomllib.loads(
        TEXT.replace('"id BIGINT"', '"id BIGINT", mode = "FAILFAST"') + "[sink]\nconsole = true"
    )
    pipeline, _ = parse_pipeline(document)
    assert {part.split()[0] for part in wanted_columns(pipeline).split(", ")} == {
        "value",
        "topic",
        "partition",
        "offset",
    }
