"""The object that Spark makes for the format, how it is found and shipped, and progress; without a JVM."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource

import sparkbridge
from pyspark_kafkalite import DefaultSource
from sparkbridge.datasource import KafkaliteDataSource
from sparkbridge.errors import SparkBridgeError, SparkOptionError, UnknownSparkOptionWarning
from sparkbridge.listener import BatchProgress
from sparkbridge.shipping import PACKAGES, install, pack

OPTIONS = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}


def source(**options: str) -> KafkaliteDataSource:
    return DefaultSource(CaseInsensitiveDict({**OPTIONS, **options}))


def test_spark_finds_the_format_by_the_name_of_the_module() -> None:
    """An editable install must put the package itself on the path, or Spark does not find it."""
    done = subprocess.run(
        [sys.executable, "-c", "import pkgutil; print([m.name for m in pkgutil.iter_modules()])"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert "'pyspark_kafkalite'" in done.stdout
    assert "pyspark_kafkalite" in {module.name for module in pkgutil.iter_modules()}


def test_the_class_has_the_interface_that_spark_requires() -> None:
    assert issubclass(DefaultSource, DataSource)
    assert inspect.ismethod(DefaultSource.name)
    assert DefaultSource.name() == "kafkalite"
    for method in (DefaultSource.writer, DefaultSource.streamWriter):
        assert list(inspect.signature(method).parameters) == ["self", "schema", "overwrite"]
    for method in (DefaultSource.reader, DefaultSource.streamReader):
        assert list(inspect.signature(method).parameters) == ["self", "schema"]


def test_creating_pickling_and_reading_the_schema_sends_no_request() -> None:
    """No broker listens at that address."""
    copied = cloudpickle.loads(cloudpickle.dumps(source()))
    assert copied.schema().fieldNames() == [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestampType",
    ]
    assert source(includeHeaders="true").schema().fieldNames()[-1] == "headers"
    cloudpickle.dumps(copied.streamReader(schema=copied.schema()))
    cloudpickle.dumps(copied.reader(schema=copied.schema()))


def test_invalid_options_fail_at_load() -> None:
    with pytest.raises(SparkOptionError, match="exactly one of assign, subscribe and subscribePattern"):
        DefaultSource(CaseInsensitiveDict({"kafka.bootstrap.servers": "h:1"})).schema()
    with pytest.raises(SparkOptionError, match="maxOffsetsPerTrigger"):
        source(maxOffsetsPerTrigger="many").schema()
    source(startingOffsets="latest").schema()  # valid in a stream, not in a batch: the reader will raise it


def test_a_table_of_a_catalog_is_refused_when_it_is_created() -> None:
    """Spark adds these two to the options of CREATE TABLE, and passes no option to the table's reader."""
    with pytest.raises(SparkOptionError, match=r"CREATE TABLE .* CREATE TEMPORARY VIEW"):
        source(provider="kafkalite", owner="root").schema()


def test_the_reader_warns_once_of_an_unknown_option() -> None:
    made = source(startingOfsets="earliest")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema = made.schema()
    with pytest.warns(UnknownSparkOptionWarning, match="startingOffsets") as told:
        made.streamReader(schema=schema)
    assert len(told) == 1


def test_the_package_loads_its_names_on_first_use() -> None:
    assert sparkbridge.KafkaliteDataSource is KafkaliteDataSource
    for name in sparkbridge.__all__:
        assert callable(getattr(sparkbridge, name))
        assert name in dir(sparkbridge)


# --- shipping -------------------------------------------------------------------------------------------


def test_the_package_is_shipped_from_a_zip_as_spark_imports_it(tmp_path: Path) -> None:
    """``--py-files kafkalite.zip``, and then ``install(spark)``."""
    first, second = tmp_path / "first.zip", tmp_path / "second.zip"
    pack(first)
    code = (
        f"import sys; sys.path.insert(0, {str(first)!r})\n"
        "from pathlib import Path\n"
        "from sparkbridge import shipping\n"
        f"assert shipping.__file__.startswith({str(first)!r})\n"
        f"shipping.pack(Path({str(second)!r}))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        assert sorted(other.namelist()) == sorted(one.namelist())
        assert other.read("sparkbridge/shipping.py") == one.read("sparkbridge/shipping.py")


def test_the_shipped_package_imports_by_itself(tmp_path: Path) -> None:
    """From the zip alone: nothing is imported from the checkout, nothing is compiled."""
    archive = tmp_path / "kafkalite.zip"
    pack(archive)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import pyspark_kafkalite, kafkalite.client.blocking.producer
import sparkbridge.source.stream_reader, sparkbridge.source.batch_reader
import sparkbridge.source.range_reader, sparkbridge.source.columns
import sparkbridge.brokers.cluster, sparkbridge.sink.foreach
import sparkbridge.sink.stream_writer, sparkbridge.sink.batch_writer
for module in (pyspark_kafkalite, kafkalite.client.blocking.producer, sparkbridge.source.stream_reader):
    assert module.__file__.startswith(sys.argv[1]) and module.__file__.endswith('.pyc'), module.__file__
print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[2:])))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(archive), *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(PACKAGES))


def test_a_connect_session_has_a_hint() -> None:
    with pytest.raises(SparkBridgeError, match=r"Spark Connect.*pip install"):
        install(object())


# --- progress -------------------------------------------------------------------------------------------


def progress(**changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": "q",
        "runId": "r",
        "name": None,
        "batchId": 3,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "processedRowsPerSecond": 50.0,
        "durationMs": {"triggerExecution": 80, "addBatch": 60},
        "sources": [
            {
                "description": "PythonMicroBatchStream",
                "endOffset": {"t": {"0": 10, "1": 5}, "@ids": {"t": "x"}},
                "latestOffset": {"t": {"0": 25, "1": 5}},
                "numInputRows": 4,
            }
        ],
    }
    return told | changes


def test_progress_has_rows_lag_and_time() -> None:
    batch = BatchProgress.parse(progress())
    assert (batch.batch_id, batch.row_count, batch.rows_per_second, batch.batch_ms) == (3, 4, 50.0, 80)
    assert batch.lag == 15


@pytest.mark.parametrize(
    "offset", [None, "null", '{"sourceVersion":1}', "17", {"sourceVersion": 1}, "rate", json.dumps({"t": 3})]
)
def test_progress_of_another_source_has_no_lag(offset: Any) -> None:
    others = [{"description": "Rate", "endOffset": offset, "latestOffset": offset, "numInputRows": 2}]
    batch = BatchProgress.parse(progress(sources=others))
    assert (batch.row_count, batch.lag, batch.positions) == (2, 0, {})


def test_progress_of_a_query_before_its_first_batch() -> None:
    bare = {"id": "q", "runId": "r", "batchId": 0, "sources": [], "processedRowsPerSecond": None}
    assert BatchProgress.parse(bare).lag == 0
