"""Mistakes in a pipeline's file, and how they are reported: all of them at once."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from sparkbridge.pipelines.definition import (
    AVAILABLE_NOW,
    FunctionRef,
    Pipeline,
    Watermark,
    parse_interval_ms,
    parse_trigger,
)
from sparkbridge.pipelines.parsing import parse_pipeline
from sparkbridge.pipelines.section import Problem

GOOD = """
[pipeline]
name = "orders"
trigger = "5 seconds"

[source]
topic = "orders"
options = { startingOffsets = "earliest" }

[source.decode]
format = "json"
schema = "id BIGINT, country STRING"

[tables.prices]
csv = "prices.csv"

[[transform]]
name = "priced"
sql = "SELECT * FROM source JOIN prices USING (id)"

[sink]
topic = "priced"
key = "country"
"""


def parsed(text: str) -> tuple[Pipeline, list[Problem]]:
    return parse_pipeline(tomllib.loads(text))


def good(text: str) -> Pipeline:
    pipeline, problems = parsed(text)
    assert not any(not each.is_warning for each in problems), problems
    return pipeline


def problems_of(text: str) -> str:
    """Return every problem on a line: ``[table] key message (hint)``."""
    _, problems = parsed(text)
    return "\n".join(f"{each.place} {each.message} ({each.hint})" for each in problems)


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_good_file() -> None:
    pipeline, problems = parsed(GOOD)
    assert problems == []
    assert pipeline.source.subscribe == ("orders",)
    assert pipeline.source.options == {"startingOffsets": "earliest"}
    assert [field.name for field in pipeline.source.decode.fields] == ["id", "country"]
    assert (pipeline.tables[0].name, pipeline.tables[0].format) == ("prices", "csv")
    (sink,) = pipeline.sinks
    assert (sink.reads, sink.topic, sink.columns, sink.output_mode) == (
        "priced",
        "priced",
        {"key": "country"},
        "append",
    )
    assert pipeline.group_id(sink) == "orders"


def test_the_shortest_file() -> None:
    pipeline = good('[pipeline]\nname = "p"\n[source]\ntopics = ["a", "b"]\n[sink]\nconsole = true')
    assert pipeline.trigger == AVAILABLE_NOW
    assert pipeline.source.text == "a,b"
    assert pipeline.sinks[0].reads == "source"
    assert pipeline.source.decode.format == "none"


def test_each_of_several_sinks_has_a_group() -> None:
    text = changed("[sink]\n", "[sinks.priced]\n") + '\n[sinks.raw]\nfrom = "source"\nparquet = "raw"\n'
    pipeline = good(text)
    assert [(sink.name, sink.reads, pipeline.group_id(sink)) for sink in pipeline.sinks] == [
        ("priced", "priced", "orders.priced"),
        ("raw", "source", "orders.raw"),
    ]


def test_two_sinks_into_one_directory() -> None:
    """Spark would take the batches of one query for those of the other, and skip them."""
    text = changed('[sink]\ntopic = "priced"\nkey = "country"', '[sinks.a]\nparquet = "out"\n[sinks.b]\n')
    assert problems_of(text + 'parquet = "./out/"') == (
        "[sinks.b] parquet is the directory of [sinks.a], too: each needs one of its own ()"
    )
    good(text + 'parquet = "out/b"')


def test_a_wrong_kind_is_one_mistake() -> None:
    for old, new in (
        ('topic = "orders"', "topics = 'a'"),
        ('topic = "priced"\nkey = "country"', "console = 1"),
    ):
        assert len(problems_of(changed(old, new)).splitlines()) == 1


def test_a_single_named_sink_is_named_as_among_several() -> None:
    pipeline = good(changed("[sink]\n", "[sinks.priced]\n"))
    assert pipeline.group_id(pipeline.sinks[0]) == "orders.priced"


def test_the_keys_of_a_table_are_listed_once() -> None:
    text = """
    [pipeline]
    name = "p"
    [source]
    topic = "a"
    [source.decode]
    format = "json"
    schema = "a INT"
    zzz = 1
    [sink]
    console = true
    """
    (line,) = (line for line in problems_of(text).splitlines() if "zzz" in line)
    assert line.count("schema") == 1


def test_all_mistakes_are_reported_at_once() -> None:
    text = """
    [pipelin]
    [source]
    topc = "a"
    [[transform]]
    [sink]
    topic = "t"
    parquet = "p"
    output_mode = "apend"
    """
    lines = problems_of(text)
    for part in (
        "[source] topc is not known here (did you mean topic?)",
        "[transform 1] sql give exactly one of sql and python",
        "exactly one of topic, parquet, console = true; there is topic and parquet",
        "[sink] output_mode is 'apend', but must be one of append, complete, update (did you mean append?)",
        "pipelin is not known here (did you mean pipeline?)",
    ):
        assert part in lines


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('name = "orders"\n', "", "[pipeline] name is missing"),
        ('name = "orders"\n', 'name = "or ders"\n', "outside [a-zA-Z0-9._-]"),
        ('key = "country"', 'kye = "country"', "[sink] kye is not known here (did you mean key?)"),
        ('topic = "priced"', 'topic = "orders"', "[sink] topic is 'orders', which [source] reads"),
        (
            "[sink]",
            "[spark]\nsql.shuffle.partitions = 4\n[sink]",
            "did you mean spark.sql.shuffle.partitions?",
        ),
        ('name = "orders"\n', "name = 7\n", "[pipeline] name is 7, but must be a string"),
        ('"5 seconds"', '"5 secnds"', "[pipeline] trigger is '5 secnds', but must be 'available-now' or"),
        ("trigger", "triger", "triger is not known here (did you mean trigger?)"),
        ('topic = "orders"', 'topic = "or/ders"', "contains a character outside"),
        ('topic = "orders"', 'topic = "a"\ntopics = ["b"]', "there is topic and topics"),
        ('topic = "orders"', 'topic_pattern = "a("', "topic_pattern is not a regular expression"),
        ('topic = "orders"', "topics = []", "topics is empty"),
        ("startingOffsets", "startingOffset", "startingOffset is not an option"),
        ("startingOffsets", "startingOffset", "did you mean startingOffsets?"),
        ('startingOffsets = "earliest"', 'startingOffsets = "first"', "[source] options startingOffsets"),
        ('startingOffsets = "earliest"', 'maxOffsetsPerTrigger = "many"', "maxOffsetsPerTrigger"),
        ('startingOffsets = "earliest"', 'subscribe = "x"', "options.subscribe is set by [source] topic"),
        ('format = "json"', 'format = "jsn"', "must be one of none, json, text (did you mean json?)"),
        ('format = "json"\n', "", "[source.decode] format is missing"),
        (
            "id BIGINT",
            "id BIGNT",
            "[source.decode] schema id: Spark has no type 'BIGNT'; did you mean bigint?",
        ),
        ("country STRING", "record STRING", "a field can't be called 'record'"),
        ('schema = "id BIGINT, country STRING"', "", "[source.decode] schema is missing"),
        ('csv = "prices.csv"', 'cvs = "prices.csv"', "give exactly one of csv, json, parquet"),
        ("[tables.prices]", "[tables.source]", "'source' is reserved"),
        ("[[transform]]", "[transform]", "write [[transform]]"),
        ('name = "priced"', 'name = "prices"', "'prices' is the name of another table or step"),
        ("JOIN prices", "JOIN price", "reads 'price', which is not a view (did you mean prices?)"),
        ("FROM source", "FROM sorce", "reads 'sorce', which is not a view (did you mean source?)"),
        ('sql = "', 'python = "a.py:b"\nsql = "', "give exactly one of sql and python"),
        ("[sink]", '[sink]\nfrom = "pricd"', "from 'pricd' is not a view (did you mean priced?)"),
        ("[sink]", "[sinkk]", "sinkk is not known here (did you mean sink"),
        ('topic = "priced"', 'parquet = "x"', "key is for a sink with topic"),
        (
            'topic = "priced"',
            'topic = "priced"\npartition_by = ["a"]',
            "partition_by is for a sink with parquet",
        ),
        ('topic = "priced"', 'topic = "p"\noptions = { exactlyOnse = true }', "did you mean exactlyOnce?"),
        ('topic = "priced"', 'topic = "p"\noptions = { exactlyOnce = "perhaps" }', "exactlyOnce"),
        ('key = "country"', 'key = ""', "[sink] key is empty"),
        ('key = "country"', "value = [1]", "value must be a list of strings"),
    ],
)
def test_a_mistake(old: str, new: str, expected: str) -> None:
    assert expected in problems_of(changed(old, new))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("[check]\n", "[check] checks nothing"),
        ('[check]\npython = "check"\n', "must be a file and a function in it"),
        ('[check]\nsql = "SELECT 1"\n', "[check] sql is 'SELECT 1', but must be a table"),
        ("[demo]\n", "[demo] load is missing"),
        (
            '[demo]\nload = "load.py:load"\ntopics = { a = 0 }\n',
            "[demo.topics] a is 0, but must be 1 or more",
        ),
        ("[spark]\na = [1]\n", "spark.a is a list, but must be a string or a number"),
        ("[tabels]\n", "tabels is not known here (did you mean tables?)"),
    ],
)
def test_a_mistake_in_an_optional_part(extra: str, expected: str) -> None:
    assert expected in problems_of(GOOD + extra)


def test_files_can_only_be_appended_to() -> None:
    text = changed('topic = "priced"\nkey = "country"', 'parquet = "x"\noutput_mode = "complete"')
    assert "files can only be appended to" in problems_of(text)


def test_a_check_needs_a_sink_that_stores_rows() -> None:
    text = changed('topic = "priced"\nkey = "country"', "console = true") + '[check]\npython = "c.py:check"'
    assert "[check] needs a sink that stores its rows" in problems_of(text)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT extract(hour FROM time) AS hour FROM source",
        "SELECT trim(BOTH 'x' FROM country) FROM source -- FROM nowhere",
        "WITH few AS (SELECT * FROM source LIMIT 1) SELECT * FROM few",
        "SELECT 'from nowhere' FROM source WHERE id IS NOT DISTINCT FROM other",
        "SELECT * FROM source JOIN LATERAL (SELECT explode(tags)) JOIN prices USING (id)",
        "SELECT * FROM range(10) JOIN `source`",
        "SELECT * FROM input",
        "SELECT * FROM global_temp.rates",
    ],
)
def test_sql_that_reads_only_views(sql: str) -> None:
    text = changed("SELECT * FROM source JOIN prices USING (id)", sql)
    assert problems_of(text) == ""


def test_an_unknown_view_is_a_warning() -> None:
    text = changed("JOIN prices", "JOIN warehouse_stock")
    pipeline, (problem,) = parsed(text)
    assert pipeline is not None
    assert problem.is_warning
    assert "reads 'warehouse_stock'" in problem.message


def test_an_append_sink_after_an_aggregation_needs_a_watermark() -> None:
    grouped = changed(
        "SELECT * FROM source JOIN prices USING (id)", "SELECT count(*) FROM source GROUP BY id"
    )
    assert "[sink] output_mode append needs a watermark where 'priced' groups" in problems_of(grouped)
    with_one = grouped.replace("[sink]", 'watermark = { column = "time", delay = "1 minute" }\n[sink]')
    assert problems_of(with_one) == ""
    assert good(with_one).steps[0].watermark == Watermark("time", "1 minute")
    assert problems_of(grouped.replace("[sink]", '[sink]\noutput_mode = "complete"')) == ""


def test_a_watermark_has_a_delay() -> None:
    text = changed("[sink]", 'watermark = { column = "time", dely = "1 minute" }\n[sink]')
    assert "[transform 1.watermark] delay is missing" in problems_of(text)
    assert "dely is not known here (did you mean delay?)" in problems_of(text)
    text = changed("[sink]", 'watermark = { column = "time", delay = "soon" }\n[sink]')
    assert "delay is 'soon', but must be a number and a unit" in problems_of(text)


def test_available_now_from_latest_reads_nothing() -> None:
    text = changed('options = { startingOffsets = "earliest" }\n', "").replace("5 seconds", "available-now")
    pipeline, (problem,) = parsed(text)
    assert pipeline is not None
    assert problem.is_warning
    assert "reads nothing" in problem.message


TEXT = """
[pipeline]
name = "log"
trigger = "1 minute"
[source]
topic = "log"
[source.decode]
format = "text"
pattern = '''^(?<client>\\S+) (?:-|x)(?P<status>\\d+)'''
SCHEMA
[sink]
console = true
"""


def test_text_by_named_groups() -> None:
    decode = good(TEXT.replace("SCHEMA", 'schema = "status INT, client STRING"')).source.decode
    assert decode.groups == {"status": 2, "client": 1}
    assert decode.pattern == r"^(\S+) (?:-|x)(\d+)"
    everything = good(TEXT.replace("SCHEMA", "")).source.decode
    assert [tuple(field) for field in everything.fields] == [("client", "string"), ("status", "string")]


def test_text_and_its_mistakes() -> None:
    assert "'sttus' is not a group of the pattern (did you mean status?)" in problems_of(
        TEXT.replace("SCHEMA", 'schema = "sttus INT"')
    )
    assert "no array<int> can be read from text" in problems_of(
        TEXT.replace("SCHEMA", 'schema = "status ARRAY<INT>"')
    )
    unclosed = TEXT.replace("SCHEMA", "").replace("(?P<status>", "((?P<status>")
    assert "pattern is not a regular expression" in problems_of(unclosed)
    nameless = TEXT.replace("SCHEMA", "").replace("?P<status>", "").replace("?<client>", "")
    assert "has no named group" in problems_of(nameless)
    assert "mode is 'DROP', but must be one of" in problems_of(TEXT.replace("SCHEMA", 'mode = "DROP"'))
    assert good(TEXT.replace("SCHEMA", 'mode = "dropmalformed"')).source.decode.mode == "DROPMALFORMED"


def test_options_with_dots_need_no_quotes() -> None:
    text = changed(
        'startingOffsets = "earliest"', 'kafka.fetch.max.bytes = 1000, startingOffsets = "earliest"'
    )
    assert good(text).source.options["kafka.fetch.max.bytes"] == "1000"
    assert good(GOOD + "[spark]\nspark.sql.shuffle.partitions = 3\nspark.ui.enabled = false\n").spark == {
        "spark.sql.shuffle.partitions": "3",
        "spark.ui.enabled": "false",
    }


def test_columns_of_a_topic() -> None:
    text = changed('key = "country"', 'key = "country"\nvalue = ["id"]\ntimestamp = "now()"')
    (sink,) = good(text).sinks
    assert sink.json_columns == ("id",)
    assert sink.columns == {"key": "country", "timestamp": "now()"}
    (sink,) = good(changed('key = "country"', 'value = "CAST(id AS STRING)"')).sinks
    assert (sink.json_columns, sink.columns) == ((), {"value": "CAST(id AS STRING)"})


def test_functions_and_their_files() -> None:
    text = changed('sql = "SELECT * FROM source JOIN prices USING (id)"', 'python = "../t/x.py:price"')
    assert good(text).steps[0].python == FunctionRef("../t/x.py", "price")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("available-now", AVAILABLE_NOW),
        ("availableNow", AVAILABLE_NOW),
        (" 10  Seconds", "10  Seconds"),
        ("0 seconds", "0 seconds"),
    ],
)
def test_triggers(text: str, expected: str) -> None:
    assert parse_trigger(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("1 day", 86_400_000), ("250 milliseconds", 250), ("2hours", 7_200_000)]
)
def test_intervals(text: str, expected: int) -> None:
    assert parse_interval_ms(text) == expected


@pytest.mark.parametrize(
    "document", [{}, {"pipeline": 1}, {"sink": []}, {"transform": "x"}, {"source": {"options": 1}}]
)
def test_no_document_makes_the_parser_raise(document: dict[str, Any]) -> None:
    _, problems = parse_pipeline(document)
    assert any(not each.is_warning for each in problems)
