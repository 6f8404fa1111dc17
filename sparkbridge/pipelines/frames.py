"""Builds the DataFrames of a pipeline: the decoded source, tables, steps, and the columns for a topic."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines.definition import Decode, FunctionRef, Pipeline, Sink, Source, Table
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.spark_errors import USER_MODULE, explained
from sparkbridge.source.schema import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_COLUMN_TYPES: Final = {name: types[0] for name, types in COLUMNS.items() if name != "headers"}
_CORRUPT: Final = "_corrupt_record"
#: The columns that FAILFAST names of a record that it refuses.
_PLACE: Final = ("topic", "partition", "offset")
#: How much of a refused value an error shows, in characters.
_SHOWN_CHARACTERS: Final = 200


def read_stream(
    spark: SparkSession, source: Source, options: Mapping[str, str], columns: str = ""
) -> DataFrame:
    """Return the topics as a streaming DataFrame with the schema ``columns``; "" selects all columns."""
    reader = spark.readStream.format("kafkalite").options(**options)
    if columns:
        reader = reader.schema(columns)
    if source.subscribe_pattern:
        reader = reader.option("subscribePattern", source.subscribe_pattern)
    else:
        reader = reader.option("subscribe", ",".join(source.subscribe))
    return reader.load()


def record_columns(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the columns of the struct ``record`` that steps and sinks use; () if they use none.

    If a step is in Python, or if the whole struct, the headers or an unknown column are used, all columns are
    returned. The column ``value`` is returned only if it is named.
    """
    steps, sinks = pipeline.steps, pipeline.sinks
    texts = [step.sql for step in steps] + [step.watermark.column for step in steps if step.watermark]
    texts += [text for sink in sinks for text in (*sink.columns.values(), *sink.json_columns)]
    named = {name.lower() for name in re.findall(r"\brecord`?\s*(?:\.\s*`?(\w+|\*))?", " ".join(texts), re.I)}
    known = [name for name in _COLUMN_TYPES if name.lower() in named]
    if len(known) == len(named) and not any(step.python for step in steps):
        return tuple(known)
    return tuple(name for name in (*_COLUMN_TYPES, "headers") if name != "value" or name in known)


def wanted_columns(pipeline: Pipeline) -> str:
    """Return the schema of the source columns that the pipeline needs; "" means all columns.

    Spark requests all columns of a Python source, even unused ones. Omitted columns are not built.
    """
    named = record_columns(pipeline)
    decode = pipeline.source.decode
    if decode.format == "none" or "headers" in named:
        return ""
    wanted = {"value", *named, *(_PLACE if decode.mode == "FAILFAST" else ())}
    return ", ".join(f"{name} {kind}" for name, kind in _COLUMN_TYPES.items() if name in wanted)


def decoded(frame: DataFrame, decode: Decode, record_names: Collection[str]) -> DataFrame:
    """Return the fields of the value as columns, and a struct ``record`` of the columns ``record_names``.

    If the format is none, returns ``frame`` unchanged. If ``record_names`` is empty, omits ``record``.
    """
    from pyspark.sql import functions as sql

    if decode.format == "none":
        return frame
    text = sql.col("value").cast("string")
    names = [name for name in frame.columns if name in record_names]
    record = [sql.struct(*names).alias("record")] if names else []
    if decode.format == "json":
        return _from_json(frame, decode, text, record)
    is_match = text.rlike(decode.pattern)
    columns = []
    for field in decode.fields:
        extracted = sql.regexp_extract(text, decode.pattern, decode.groups[field.name])
        column: Column = sql.when(is_match, extracted.try_cast(field.type))
        if decode.mode == "FAILFAST":
            column = column.otherwise(_refusal("does not match the pattern", text))
        columns.append(column.alias(field.name))
    if decode.mode == "DROPMALFORMED":
        frame = frame.where(is_match)
    return frame.select(*columns, *record)


def _from_json(frame: DataFrame, decode: Decode, text: Column, record: list[Column]) -> DataFrame:
    from pyspark.sql import functions as sql

    names = ["record"] if record else []
    if decode.mode == "PERMISSIVE":
        value = sql.from_json(text, decode.schema, {"mode": decode.mode})
        return frame.select(value.alias("value"), *record).select("value.*", *names)
    # Spark's own FAILFAST names neither the record nor its value.
    schema = f"{decode.schema}, {_CORRUPT} STRING"
    value = sql.from_json(text, schema, {"columnNameOfCorruptRecord": _CORRUPT})
    parsed = frame.withColumn("parsed", value)
    is_corrupt = sql.col(f"parsed.{_CORRUPT}").isNotNull()
    if decode.mode == "FAILFAST":
        refused = sql.when(is_corrupt, _refusal("is not JSON of the schema", text))
        good = parsed.withColumn("parsed", refused.otherwise(sql.col("parsed")))
    else:
        good = parsed.where(sql.col("parsed").isNotNull() & ~is_corrupt)
    return good.select("parsed", *record).select("parsed.*", *names).drop(_CORRUPT)


def _refusal(problem: str, text: Column) -> Column:
    """Return an expression that fails with the record's topic, partition and offset, and ``problem``."""
    from pyspark.sql import functions as sql

    shown = sql.left(text, sql.lit(_SHOWN_CHARACTERS))
    message = sql.format_string(f"topic %s, partition %d, offset %d: the value {problem}: %s", *_PLACE, shown)
    return sql.raise_error(message)


def load_table(spark: SparkSession, table: Table, path: str) -> DataFrame:
    reader = spark.read.format(table.format)
    if table.format == "csv":
        reader = reader.option("header", "true")
        if not table.schema:
            reader = reader.option("inferSchema", "true")
    if table.schema:
        reader = reader.schema(table.schema)
    return reader.options(**table.options).load(path)


def function(file: PipelineFile, reference: FunctionRef) -> Callable[..., Any]:
    """Import the function's file once, under a unique name, and return the function. Raises PipelineError.

    Functions that Spark sends to its workers (UDFs) are pickled by value: workers cannot import the file.
    """
    from pyspark import cloudpickle

    path = file.resolve(reference.path)
    name = USER_MODULE + re.sub(r"\W", "_", str(path.with_suffix("")))
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PipelineError(f"{path} can't be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as problem:
            del sys.modules[name]
            raise PipelineError(f"{path} can't be imported: {type(problem).__name__}: {problem}") from problem
        cloudpickle.register_pickle_by_value(module)
    found: Callable[..., Any] = getattr(module, reference.function)
    return found


def views(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: DataFrame
) -> dict[str, DataFrame]:
    """Create the temporary views ``source``, of the tables and of the steps. Return them by name.

    Raises PipelineError with the failed part.
    """
    found: dict[str, DataFrame] = {"source": source}
    for table in pipeline.tables:
        with explained(f"[tables.{table.name}]"):
            found[table.name] = load_table(spark, table, file.locate(table.path))
    for name, frame in found.items():
        frame.createOrReplaceTempView(name)
    latest = source
    for number, step in enumerate(pipeline.steps, 1):
        with explained(f"[transform {number}] {step.name}"):
            latest.createOrReplaceTempView("input")
            if step.python is None:
                latest = spark.sql(step.sql)
            else:
                latest = function(file, step.python)(latest, dict(found))
                if not hasattr(latest, "createOrReplaceTempView"):
                    raise PipelineError(f"{step.python} returned {type(latest).__name__}, not a DataFrame")
            if step.watermark is not None:
                latest = latest.withWatermark(step.watermark.column, step.watermark.delay)
            latest.createOrReplaceTempView(step.name)
        found[step.name] = latest
    return found


def topic_columns(frame: DataFrame, sink: Sink) -> DataFrame:
    """Return the columns to write to a topic: the sink's expressions.

    The default of ``value`` is the row as JSON. A key or value that is neither a string nor binary is cast to
    a string.
    """
    names = sink.json_columns or frame.columns
    value = sink.columns.get("value") or f"to_json(struct({', '.join(map(_quoted, names))}))"
    columns = {**sink.columns, "value": value}
    with explained(f"[{'sink' if sink.name == 'sink' else 'sinks.' + sink.name}]"):
        chosen = frame.selectExpr(
            *[f"({expression}) AS {_quoted(name)}" for name, expression in columns.items()]
        )
        types = {field.name: field.dataType.typeName() for field in chosen.schema.fields}
        as_text = [name for name in ("key", "value") if types.get(name, "string") not in {"string", "binary"}]
        return (
            chosen.withColumns({name: chosen[name].cast("string") for name in as_text}) if as_text else chosen
        )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
