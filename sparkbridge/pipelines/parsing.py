"""Parses the TOML tables of a pipeline file and collects validation errors. Pure.

Other modules make the checks that need files, topics or Spark.
"""

# Tests: tests/sparkbridge/pipelines/test_definition.py

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast, get_args

from kafkalite.model import topic_name_problem
from sparkbridge.errors import SparkOptionError
from sparkbridge.option_reader import SparkOption
from sparkbridge.options import SINK_OPTIONS, SOURCE_OPTIONS, SinkOptions, SourceOptions
from sparkbridge.pipelines import ddl
from sparkbridge.pipelines.definition import (
    AVAILABLE_NOW,
    Check,
    Decode,
    DecodeFormat,
    Demo,
    FunctionRef,
    Mode,
    OutputMode,
    Pipeline,
    Sink,
    Source,
    Step,
    Table,
    TableFormat,
    Watermark,
    parse_function,
    parse_interval_ms,
    parse_trigger,
)
from sparkbridge.pipelines.section import Problem, Section, nearest

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_VIEW: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GROUP: Final = re.compile(r"\(\?P?<([A-Za-z][A-Za-z0-9_]*)>")
_RESERVED_VIEWS: Final = ("input", "source", "output")
_COLUMNS: Final = ("key", "value", "headers", "partition", "timestamp")
_SINK_KINDS: Final = ("topic", "parquet", "console")
_COMMENT: Final = re.compile(r"--[^\n]*|/\*.*?\*/", re.S)
_LITERAL: Final = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"", re.S)
_FROM_INSIDE_CALL: Final = re.compile(
    r"\b(?:extract|trim|substring|substr|overlay|position)\s*\((?:[^()]|\([^()]*\))*\)", re.I
)
_READS: Final = re.compile(
    r"(?<!\bdistinct\s)\b(?:from|join)\s+(?:lateral\s+)?([A-Za-z_]\w*)\b(?!\s*[.(])", re.I
)
_WITH: Final = re.compile(r"(?:\bwith|,)\s+([A-Za-z_]\w*)\s*(?:\([^()]*\)\s*)?as\s*\(", re.I)
_NOT_VIEWS: Final = frozenset({"values", "lateral", "select", "table", "stream"})
_AGGREGATES: Final = re.compile(r"\bgroup\s+by\b", re.I)


def parse_pipeline(document: Mapping[str, Any]) -> tuple[Pipeline, list[Problem]]:
    """Return the pipeline and the problems found. If there are errors, the pipeline must not be run."""
    problems: list[Problem] = []
    return _pipeline(Section("", document, problems)), problems


def _pipeline(root: Section) -> Pipeline:
    head = _required(root, "pipeline", 'begin with [pipeline] and name = "..."')
    name = head.text("name", required='name = "orders-per-minute", also the group that shows its progress')
    if name and not _NAME.fullmatch(name):
        head.error("name", f"{name!r} contains a character outside [a-zA-Z0-9._-]")
    description = head.text("description")
    trigger = head.parsed("trigger", parse_trigger, AVAILABLE_NOW)
    checkpoint = head.text("checkpoint")
    head.finish()

    source = _source(_required(root, "source", '[source] says what is read: topic = "..."'), trigger)
    tables = tuple(_table(section, name) for name, section in root.tables("tables").items())
    steps = _steps(root.listed_tables("transform"), [table.name for table in tables])
    sinks = _sinks(root, steps)
    check = _check(root.table("check"), sinks)
    demo = _demo(root.table("demo"), source)
    spark = root.settings("spark")
    for setting in spark:
        if not setting.startswith(("spark.", "hive.")):
            root.problems.append(
                Problem("spark", setting, "is not a setting of Spark", f"did you mean spark.{setting}?")
            )
    root.finish()
    _warn_of_aggregations(root, steps, sinks)
    _check_targets(root, source, sinks)
    return Pipeline(name, source, steps, sinks, description, trigger, checkpoint, tables, check, demo, spark)


def _required(root: Section, key: str, hint: str) -> Section:
    found = root.table(key)
    if found is None:
        if not root.has_nearly((key,)):
            root.problems.append(Problem(key, "", "is missing", hint))
        return Section(key, {}, [])  # its missing keys are not reported
    return found


# --- source ----------------------------------------------------------------------------------------


def _source(section: Section, trigger: str) -> Source:
    kinds = ("topic", "topics", "topic_pattern")
    keys = [key for key in kinds if section.has(key)]
    topic = section.text("topic")
    topics = section.texts("topics")
    pattern = section.text("topic_pattern")
    if not keys and section.has_nearly(kinds):
        pass
    elif len(keys) != 1 and section.values:
        found = " and ".join(keys) or "nothing"
        section.error("topic", f"give exactly one of topic, topics, topic_pattern; there is {found}")
    elif not section.values and not keys:
        section.error("topic", "is missing", 'topic = "orders"')
    subscribe = (topic,) if topic else topics
    if keys == ["topics"] and section.values["topics"] == []:
        section.error("topics", "is empty", 'topics = ["orders", "returns"]')
    for each in subscribe:
        if problem := topic_name_problem(each):
            section.error(keys[0], problem)
    if pattern:
        _check_pattern(section, "topic_pattern", pattern)
    options = section.settings("options")
    _check_source_options(section, options, trigger)
    decode = _decode(section)
    section.finish()
    return Source(subscribe, pattern, options, decode)


def _check_source_options(section: Section, options: Mapping[str, str], trigger: str) -> None:
    folded = {name.lower(): name for name in options}
    taken = [folded[name] for name in ("subscribe", "assign", "subscribepattern") if name in folded]
    for name in taken:
        section.error(f"options.{name}", "is set by [source] topic, topics or topic_pattern")
    if "kafka.bootstrap.servers" in folded:
        section.warn(f"options.{folded['kafka.bootstrap.servers']}", "overrides -b and KL_BOOTSTRAP_SERVERS")
    _check_known_options(section, options, SOURCE_OPTIONS)
    given = {"kafka.bootstrap.servers": "localhost:9092", "kafka.group.id": "pipeline", **options}
    if not taken:
        _check_parses(section, lambda: SourceOptions.parse({**given, "subscribe": "topic"}, is_stream=True))
    starts = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp")
    if trigger == AVAILABLE_NOW and not any(name in folded for name in starts) and section.values:
        section.warn(
            "options.startingOffsets",
            "is latest by default: the first run of an available-now pipeline reads nothing",
            'options = { startingOffsets = "earliest" }',
        )


def _check_known_options(
    section: Section, options: Mapping[str, str], known_options: Iterable[SparkOption]
) -> None:
    names = [option.name for option in known_options if option.applies != "batch"]
    folded = {name.lower() for name in names}
    for name in options:
        if name.lower() not in folded and not name.lower().startswith("kafka."):
            hint = nearest(name, names) or "docs/spark.md lists them all"
            section.error(f"options.{name}", "is not an option of Spark's streams", hint)


def _check_parses(section: Section, parse: Callable[[], object]) -> None:
    """Call ``parse``, a parser of source or sink options, and report its first error and all its warnings."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            parse()
        except SparkOptionError as problem:
            section.error("options", problem.message, problem.hint)
    for warning in heard:
        if not any(
            each.table == section.name and each.key.startswith("options.") for each in section.problems
        ):
            section.warn("options", str(warning.message))


def _decode(source: Section) -> Decode:
    if isinstance(source.values.get("decode"), str):
        format_ = source.choice("decode", get_args(DecodeFormat), "none")
        if format_ != "none":
            source.error(
                "decode", f"{format_} needs more than its name", f'[source.decode] format = "{format_}" …'
            )
        return Decode()
    section = source.table("decode")
    if section is None:
        return Decode()
    format_ = cast(DecodeFormat, section.choice("format", get_args(DecodeFormat), "none"))
    if not section.has("format"):
        section.error("format", "is missing", f"one of {', '.join(get_args(DecodeFormat))}")
    fields = tuple(section.parsed("schema", ddl.parse_schema, list[ddl.Field]()))
    schema = section.text("schema")
    pattern = section.text("pattern")
    mode = cast(Mode, section.choice("mode", get_args(Mode), "PERMISSIVE"))
    section.finish()
    groups: dict[str, int] = {}
    if format_ == "json" and not section.has("schema"):
        section.error("schema", "is missing", 'schema = "id BIGINT, country STRING"')
    if format_ != "text" and pattern:
        section.error("pattern", 'is for format = "text"')
    if format_ == "none" and schema:
        section.error("schema", 'is for format = "json" and "text"')
    if format_ == "text":
        fields, pattern, groups = _text_fields(section, fields, pattern)
    if any(each.name.lower() == "record" for each in fields):
        section.error("schema", "a field can't be called 'record': that is the column with the whole record")
    return Decode(format_, schema, fields, pattern, groups, mode)


def _text_fields(
    section: Section, fields: tuple[ddl.Field, ...], pattern: str
) -> tuple[tuple[ddl.Field, ...], str, dict[str, int]]:
    """Return (fields, pattern with the names of groups removed, {field: group number}).

    Without a schema, each named group of the pattern is a string field.
    """
    if not pattern:
        if not section.has("pattern"):
            section.error("pattern", "is missing", "a regular expression with a (?<name>…) for each field")
        return fields, pattern, {}
    compiled = _check_pattern(section, "pattern", pattern)
    if compiled is None:
        return fields, pattern, {}
    groups = dict(compiled.groupindex)
    if not groups:
        section.error("pattern", "has no named group", "write (?<status>[0-9]+) for a field called status")
    if not section.has("schema"):
        fields = tuple(ddl.Field(name, "string") for name in groups)
    for each in fields:
        if each.name not in groups:
            section.error(
                "schema", f"field {each.name!r} is not a group of the pattern", nearest(each.name, groups)
            )
        if "<" in each.type or each.type == "binary":
            section.error("schema", f"field {each.name!r}: no {each.type} can be read from text")
    return fields, _GROUP.sub("(", pattern), {each.name: groups.get(each.name, 0) for each in fields}


def _check_pattern(section: Section, key: str, pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(_GROUP.sub(r"(?P<\1>", pattern))
    except re.error as problem:
        section.error(key, f"is not a regular expression: {problem}")
        return None


# --- tables and steps ------------------------------------------------------------------------------


def _table(section: Section, name: str) -> Table:
    formats = [each for each in get_args(TableFormat) if section.has(each)]
    paths = {each: section.text(each) for each in get_args(TableFormat)}
    if len(formats) != 1:
        section.error("", f"give exactly one of {', '.join(get_args(TableFormat))}", 'csv = "prices.csv"')
    _check_view(section, "", name, ())
    section.parsed("schema", ddl.parse_schema, list[ddl.Field]())
    schema = section.text("schema")
    options = section.settings("options")
    section.finish()
    format_ = cast(TableFormat, formats[0] if formats else "csv")
    return Table(name, format_, paths[format_], schema, options)


def _check_view(section: Section, key: str, name: str, taken: Iterable[str]) -> None:
    if not _VIEW.fullmatch(name):
        section.error(key, f"{name!r} is not a valid view name: letters, digits and _")
    elif name.lower() in _RESERVED_VIEWS:
        section.error(key, f"{name!r} is reserved", f"not one of {', '.join(_RESERVED_VIEWS)}")
    elif name.lower() in {each.lower() for each in taken}:
        section.error(key, f"{name!r} is the name of another table or step")


def _steps(sections: list[Section], tables: list[str]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for number, section in enumerate(sections, 1):
        name = section.text("name", f"step_{number}")
        taken = [*tables, *(step.name for step in steps)]
        _check_view(section, "name", name, taken)
        sql = section.text("sql").strip().rstrip(";")
        python = section.parsed("python", parse_function, None)
        if section.has("sql") == section.has("python"):
            section.error("sql", "give exactly one of sql and python", 'sql = "SELECT * FROM input"')
        steps.append(Step(name, sql, python, _watermark(section.table("watermark"))))
        section.finish()
        _check_reads(section, sql, [*taken, *_RESERVED_VIEWS[:2]])
    return tuple(steps)


def _watermark(section: Section | None) -> Watermark | None:
    if section is None:
        return None
    column = section.text("column", required='column = "time"')
    delay = section.text("delay", required='delay = "10 minutes"')
    if delay:
        try:
            parse_interval_ms(delay)
        except ValueError as problem:
            section.error("delay", str(problem))
    section.finish()
    return Watermark(column, delay)


def _bare(sql: str) -> str:
    """Return ``sql`` without comments, literals, and calls such as ``extract(year FROM t)``."""
    return _FROM_INSIDE_CALL.sub("f()", _LITERAL.sub("''", _COMMENT.sub(" ", sql)))


def _check_reads(section: Section, sql: str, views: list[str]) -> None:
    """Report unknown views after FROM and JOIN: as an error if a similar name exists, else as a warning."""
    text = _bare(sql)
    known = {name.lower() for name in views} | {name.lower() for name in _WITH.findall(text)} | _NOT_VIEWS
    for name in dict.fromkeys(_READS.findall(text)):
        if name.lower() in known:
            continue
        hint = nearest(name, views)
        if hint:
            section.error("sql", f"reads {name!r}, which is not a view", hint)
        else:
            section.warn(
                "sql", f"reads {name!r}, which is not a view of this file", f"it has {', '.join(views)}"
            )


# --- sinks -----------------------------------------------------------------------------------------


def _sinks(root: Section, steps: tuple[Step, ...]) -> tuple[Sink, ...]:
    one = root.table("sink")
    several = root.tables("sinks")
    if one is not None and several:
        root.problems.append(Problem("sink", "", "give [sink] or [sinks.NAME], not both"))
    sections = several if one is None else {"sink": one, **several}
    if not sections and not root.has_nearly(("sink", "sinks")):
        root.problems.append(
            Problem("sink", "", "is missing", "[sink] says where to: topic, parquet or console")
        )
    for name, section in sections.items():
        if not _NAME.fullmatch(name):
            section.error("", f"the name {name!r} contains a character outside [a-zA-Z0-9._-]")
    return tuple(_sink(section, name, steps) for name, section in sections.items())


def _sink(section: Section, name: str, steps: tuple[Step, ...]) -> Sink:
    views = ["source", *(step.name for step in steps)]
    reads = section.text("from", views[-1])
    if reads not in views:
        section.error(
            "from", f"{reads!r} is not a view", nearest(reads, views) or f"there are {', '.join(views)}"
        )
    kinds = [key for key in _SINK_KINDS if section.has(key)]
    topic, parquet = section.text("topic"), section.text("parquet")
    console = section.get("console", bool, False)
    if not kinds and section.has_nearly(_SINK_KINDS):
        pass
    elif len(kinds) != 1 or (kinds == ["console"] and section.values["console"] is False):
        found = " and ".join(kinds) or "none"
        section.error("", f"give exactly one of topic, parquet, console = true; there is {found}")
    if topic and (problem := topic_name_problem(topic)):
        section.error("topic", problem)
    default_mode = "append"
    mode = cast(OutputMode, section.choice("output_mode", get_args(OutputMode), default_mode))
    columns, json_columns = _columns(section)
    partition_by = section.texts("partition_by")
    rows = section.number("rows", 20, minimum=1)
    options = section.settings("options")
    kind = kinds[0] if kinds else ""
    for key, owner in (
        *((column, "topic") for column in _COLUMNS),
        ("partition_by", "parquet"),
        ("rows", "console"),
    ):
        if section.has(key) and kind and owner != kind:
            section.error(key, f"is for a sink with {owner}")
    if kind == "parquet" and mode != "append":
        section.error("output_mode", f"is {mode}, but files can only be appended to")
    if kind == "topic":
        _check_known_options(section, options, SINK_OPTIONS)
        given = {"kafka.bootstrap.servers": "localhost:9092", **options}
        _check_parses(section, lambda: SinkOptions.parse(given, is_stream=True))
    section.finish()
    return Sink(
        name, reads, mode, topic, columns, json_columns, parquet, partition_by, console, rows, options
    )


def _columns(section: Section) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a topic's columns as {name: SQL expression}, and the columns of a JSON ``value``."""
    if isinstance(section.values.get("value"), list):
        json_columns = section.texts("value")
        names = [name for name in _COLUMNS if name != "value"]
    else:
        json_columns = ()
        names = list(_COLUMNS)
    given = {name: section.text(name) for name in names}
    return {name: text for name, text in given.items() if section.has(name)}, json_columns


def _warn_of_aggregations(root: Section, steps: tuple[Step, ...], sinks: tuple[Sink, ...]) -> None:
    grouping = next((step for step in steps if _AGGREGATES.search(_bare(step.sql))), None)
    if grouping is None or any(step.watermark or step.python for step in steps):
        return
    for sink in sinks:
        if sink.output_mode == "append":
            message = f"append needs a watermark where {grouping.name!r} groups"
            hint = 'watermark = { column = "…", delay = "10 minutes" } in a step before it, or complete'
            root.problems.append(Problem(sink.table, "output_mode", message, hint, is_warning=True))


def _check_targets(root: Section, source: Source, sinks: tuple[Sink, ...]) -> None:
    """Report sinks that share a directory, and topics that are both read and written.

    If two queries write to one directory, each treats the batches of the other as its own.
    """
    seen: dict[str, Sink] = {}
    for sink in sinks:
        if sink.parquet:
            first = seen.setdefault(sink.parquet.rstrip("/").removeprefix("./"), sink)
            if first is not sink:
                message = f"is the directory of [sinks.{first.name}], too: each needs one of its own"
                root.problems.append(Problem(sink.table, "parquet", message))
        if sink.topic in source.subscribe:
            message = f"is {sink.topic!r}, which [source] reads: its rows come back as input"
            root.problems.append(Problem(sink.table, "topic", message, is_warning=True))


# --- check and demo --------------------------------------------------------------------------------


def _check(section: Section | None, sinks: tuple[Sink, ...]) -> Check:
    if section is None:
        return Check()
    sql: dict[str, str] = {}
    queries = section.table("sql")
    if queries is not None:
        sql = {name: queries.text(name) for name in queries.values}
    python = section.parsed("python", parse_function, None)
    section.finish()
    if not sql and not section.has("python"):
        section.error(
            "", "checks nothing", 'python = "check.py:check", or sql = { "what holds" = "SELECT …" }'
        )
    if all(sink.console for sink in sinks) and sinks:
        section.error("", "needs a sink that stores its rows: a topic or parquet")
    return Check(sql, python)


def _demo(section: Section | None, source: Source) -> Demo | None:
    if section is None:
        return None
    section.text("load", required='load = "load.py:load"')
    load = section.parsed("load", parse_function, FunctionRef("", ""))
    topics: dict[str, int] = {}
    table = section.table("topics")
    if table is not None:
        topics = {name: table.number(name, 1, minimum=1) for name in table.values}
        for name in topics:
            if problem := topic_name_problem(name):
                table.error(name, problem)
    settings = section.settings("settings")
    section.finish()
    return Demo(load, {name: topics.get(name, 1) for name in (*source.subscribe, *topics)}, settings)
