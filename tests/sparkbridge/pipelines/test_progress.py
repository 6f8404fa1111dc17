"""Batches are counted once, and an error of Spark becomes one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines.progress import Tally, line_of
from sparkbridge.pipelines.spark_errors import SEE_LOG, USER_MODULE, cause, explained, hint, last_words


def progress(batch_id: int, second: int, rows: int, *, is_idle: bool = False, end: int = 0) -> dict[str, Any]:
    source = {
        "description": "PythonMicroBatchStream (kafkalite)",
        "endOffset": {"t": {"0": end, "1": 5}, "@ids": {"t": "x"}},
        "latestOffset": {"t": {"0": 10, "1": 5}},
        "numInputRows": rows,
    }
    return {
        "id": "q",
        "runId": "r",
        "batchId": batch_id,
        "timestamp": f"2026-01-01T00:00:{second:02}.000Z",
        "durationMs": {"triggerExecution": 50} if is_idle else {"triggerExecution": 500, "addBatch": 300},
        "processedRowsPerSecond": rows * 2.0,
        "sources": [source],
    }


def test_a_batch_is_counted_once() -> None:
    tally = Tally("orders")
    assert line_of([tally]) == "orders: starting"
    first, second = progress(0, 1, 100, end=4), progress(1, 2, 50, end=10)
    assert [batch.batch_id for batch in tally.take([first])] == [0]
    assert tally.lag == 6
    assert [batch.batch_id for batch in tally.take([first, second])] == [1]
    assert tally.take([first, second, progress(2, 3, 0, is_idle=True, end=10)]) == []
    assert (tally.batches, tally.rows, tally.busy_ms, tally.lag) == (2, 150, 1000, 0)
    assert tally.rows_per_second == 150
    assert tally.batch_ms == 500


def test_late_rows_are_counted() -> None:
    tally = Tally("t")
    operators = [{"numRowsDroppedByWatermark": 3}, {"numRowsDroppedByWatermark": 1}, {}]
    first, second = progress(0, 1, 10), progress(1, 2, 10) | {"stateOperators": operators}
    assert [batch.late_count for batch in tally.take([first, second])] == [0, 4]
    assert tally.late == 4


def test_the_line() -> None:
    one, other = Tally("a"), Tally("b")
    one.take([progress(3, 1, 12_000, end=4)])
    assert line_of([one, other]) == "a: 12,000 rows, 24,000/s, lag 6, batch 3 in 500 ms  |  b: starting"


def test_json_of_offsets_as_text() -> None:
    told_one = progress(0, 1, 1, end=3)
    for key in ("endOffset", "latestOffset"):
        told_one["sources"][0][key] = json.dumps(told_one["sources"][0][key])
    tally = Tally("t")
    tally.take([told_one])
    assert tally.lag == 7


OURS = """[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted
Traceback (most recent call last):
  File "worker.py", line 3, in main
sparkbridge.errors.DataLossError: t-0: records 3 to 7 are gone (failOnDataLoss=false goes on)
 SQLSTATE: XXKST"""
PYTHON = """[STREAM_FAILED] Query terminated with exception: An exception was thrown from Python:
Traceback (most recent call last):
  File "x.py", line 3, in f
ValueError: not a number: 'x'
"""
CONDITION = """[STREAM_FAILED] Query [id = 5] terminated: [DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012
== SQL (line 1, position 8) =="""


FOREACH_BATCH = """[STREAM_FAILED] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] Reason: An
Traceback (most recent call last):
  File "x.py", line 3, in f
py4j.protocol.Py4JJavaError: An error occurred while calling o230.collectToPython.
: org.apache.spark.SparkException: [MALFORMED_RECORD] Malformed records are detected: [null].
Caused by: com.fasterxml.jackson.core.JsonParseException: Unexpected character
org.apache.spark.sql.streaming.StreamingQueryException: An exception was raised. Return Message: Traceb
"""
REFUSED = """[UNRESOLVED_COLUMN.WITH_SUGGESTION] No column `x`. Is it `y`? SQLSTATE: 42703; line 1 pos 7;
'Project ['x]"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (OURS, "t-0: records 3 to 7 are gone (failOnDataLoss=false goes on)"),
        (PYTHON, "ValueError: not a number: 'x' (x.py:3)"),
        (PYTHON.replace("x.py", "/x/site-packages/pyspark/x.py"), "ValueError: not a number: 'x'"),
        (CONDITION, "Division by zero. (DIVIDE_BY_ZERO)"),
        (REFUSED, "No column `x`. Is it `y`? (UNRESOLVED_COLUMN.WITH_SUGGESTION)"),
        (
            "[PARSE_SYNTAX_ERROR] Syntax error at or near 'SELEC'. SQLSTATE: 42601 (line 1, pos 0)",
            "Syntax error at or near 'SELEC'. (line 1, pos 0) (PARSE_SYNTAX_ERROR)",
        ),
        (
            "x\nCaused by: java.io.IOException: No space left on device\n\tat a.b",
            "IOException: No space left on device",
        ),
        (
            "An error occurred while calling o131.start.\n: java.io.IOException: mkdir of /x failed\n",
            "IOException: mkdir of /x failed",
        ),
        (
            "[STREAM_FAILED] Query: [TASK_WRITE_FAILED] Task failed. SQLSTATE: 58030 SQLSTATE: XX\n"
            "Caused by: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed. SQLSTATE: 58030\n"
            "Caused by: java.io.IOException: Mkdirs failed to create file:/x\n",
            "IOException: Mkdirs failed to create file:/x",
        ),
        (FOREACH_BATCH, "Malformed records are detected: [null] (MALFORMED_RECORD)"),
        ("[A_CONDITION] Words. SQLSTATE: 58030 SQLSTATE: XXKST", "Words. (A_CONDITION)"),
        ("plain words\nand more", "plain words"),
        ("", "RuntimeError"),
    ],
)
def test_one_sentence(text: str, sentence: str) -> None:
    assert cause(RuntimeError(text)) == sentence


def test_only_our_errors_need_no_hint() -> None:
    assert hint(RuntimeError(OURS)) == ""
    assert hint(RuntimeError(PYTHON)) == SEE_LOG


def test_a_checkpoint_of_other_steps_has_a_hint() -> None:
    text = "[STREAM_FAILED] Query: [STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match"
    assert "another --checkpoint DIR" in hint(RuntimeError(text))


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            'WARNING: x\nException in thread "main" a.b.SparkException: Master must be\n\tat a',
            "Master must be",
        ),
        ("Invalid maximum heap size: -Xmx90x\nError: Could not create", "Invalid maximum heap size: -Xmx90x"),
        ("26/11/21 14:38:43 WARN Utils: x\n", ""),
        ("", ""),
    ],
)
def test_why_a_jvm_ended_at_once(log: str, words: str) -> None:
    assert last_words(log) == words


def test_the_hint_is_found_while_the_jvm_runs() -> None:
    """py4j's errors ask the JVM for their text; it has ended when the error has reached the command."""

    class Py4JJavaError(Exception):
        is_there = True

        def __str__(self) -> str:
            if not self.is_there:
                raise ConnectionRefusedError(111, "Connection refused")
            return "x\nCaused by: java.io.IOException: No space left on device\n"

    Py4JJavaError.__module__ = "py4j.protocol"
    error = Py4JJavaError()
    with pytest.raises(PipelineError, match="No space left on device") as caught, explained("[sink]"):
        raise error
    error.is_there = False
    assert caught.value.hint == SEE_LOG


def test_a_wrong_query_needs_no_hint() -> None:
    class AnalysisException(Exception): ...

    assert hint(AnalysisException("no column")) == ""


def test_the_place_is_named() -> None:
    with pytest.raises(PipelineError, match=r"^\[sink\]: KeyError: 'x'$"), explained("[sink]"):
        raise KeyError("x")
    with pytest.raises(PipelineError, match=r"^as it was$"), explained("[sink]"):
        raise PipelineError("as it was")


def test_the_line_of_the_pipelines_own_python_is_named() -> None:
    module: dict[str, Any] = {"__name__": f"{USER_MODULE}_work_transform"}
    exec(compile("def price(row):\n    return row['x']\n", "/work/transform.py", "exec"), module)
    with (
        pytest.raises(PipelineError, match=r"^\[transform 1\]: KeyError: 'x' \(transform\.py:2\)$"),
        explained("[transform 1]"),
    ):
        module["price"]({})
