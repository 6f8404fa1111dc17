"""Finds the cause of a Spark error and describes it in one sentence."""

# Tests: tests/sparkbridge/pipelines/test_progress.py

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kafkalite.errors import KafkaliteError
from sparkbridge.errors import PipelineError

_OURS: Final = re.compile(
    r"^(?:kafkalite|sparkbridge)\.[\w.]*?(?P<name>\w+Error): (?P<text>.+)$", re.MULTILINE
)
_PYTHON: Final = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit)): (?P<text>.+)$", re.MULTILINE
)
_CONDITION: Final = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_.]{3,})\] (?=(?P<text>[^\n]+))")
_WRAPPERS: Final = (
    "STREAM_FAILED",
    "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR",
    "PYTHON_DATA_SOURCE_ERROR",
    "TASK_WRITE_FAILED",
    "FOREACH_BATCH_USER_FUNCTION_ERROR",
)
_FRAME: Final = re.compile(r'^\s*File "([^"<>]+)", line (\d+)', re.MULTILINE)
_OF_THE_JVM: Final = ("py4j.", "org.", "java.", "scala.", "com.")
_WRONG_QUERY: Final = frozenset({"AnalysisException", "ParseException"})
USER_MODULE: Final = "kafkalite_pipeline_"  #: the prefix of the module names of a pipeline's Python files
_JAVA: Final = re.compile(
    r"^(?:Caused by)?: (?:[\w$]+\.)*(?P<name>[\w$]+(?:Exception|Error)): (?P<text>[^\n]+)", re.MULTILINE
)
_OTHER_STATE: Final = re.compile(
    r"\[(?:STATE_STORE_(?:KEY|VALUE)_SCHEMA_NOT_COMPATIBLE|STREAMING_STATEFUL_OPERATOR_NOT_MATCH)"
)
_UNCAUGHT: Final = re.compile(r"^Exception in thread \S+ [\w.$]+: (?P<text>[^\n]+)", re.MULTILINE)
_CHATTER: Final = re.compile(r"^WARNING|^Using |^Setting |^To adjust | WARN | INFO ")
SEE_LOG: Final = "--spark-log FILE writes Spark's log to a file"
JVM_END_S: Final = 2.0  #: how long to wait for a JVM that closed its connections to end, in seconds
#: The beginning of py4j's message for a failed call. The message contains "Trace:" if the JVM has responded.
_NO_RESPONSE: Final = "An error occurred while calling"
_TAIL: Final = re.compile(r"(?:\s*SQLSTATE: \w+)*[;.]?\s*(?:line \d+,? pos \d+)?;?\s*$")


def cause(error: BaseException) -> str:
    """Return the cause of ``error`` as one line of text.

    Searches the error's full text for the last kafkalite or sparkbridge error, then the last Python error of
    a traceback, then the first Spark error condition that is not in _WRAPPERS, then the last Java exception.
    Otherwise returns the first line.
    """
    text = _all_text(error)
    if ours := _last(_OURS, text):
        return ours["text"].strip()
    conditions = [m for m in _CONDITION.finditer(text) if not m["name"].startswith(_WRAPPERS)]
    python = [m for m in _PYTHON.finditer(text) if not m["name"].startswith(_OF_THE_JVM)]
    if python and ("Traceback (most recent call last)" in text):
        where = _place_in_worker(text[: python[-1].start()])
        return f"{python[-1]['name'].rpartition('.')[2]}: {python[-1]['text'].strip()}{where}"
    if conditions:
        sentence = re.sub(r"\s*SQLSTATE: \w+(?= \()", "", _TAIL.sub("", conditions[0]["text"]))
        return f"{sentence} ({conditions[0]['name']})"
    if java := _last(_JAVA, text):
        return f"{java['name']}: {java['text'].strip()}"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first or type(error).__name__


def hint(error: BaseException) -> str:
    """Return advice on the error; "" if ``cause`` names the reason. Call this while Spark's JVM runs."""
    if _OTHER_STATE.search(_all_text(error)):
        return "the checkpoint belongs to other steps: use another --checkpoint DIR to start again"
    return "" if _is_named(error) else SEE_LOG


def _is_named(error: BaseException) -> bool:
    """Whether ``cause(error)`` already names the reason.

    This is so for an error of kafkalite, an invalid query, and an error at a line of the user's file.
    """
    if type(error).__name__ in _WRONG_QUERY or place(error):
        return True
    return _OURS.search(_all_text(error)) is not None


def last_words(log: str) -> str:
    """Return the line of a JVM's output ``log`` that explains its early end; "" if there is none."""
    if uncaught := _UNCAUGHT.search(log):
        return uncaught["text"].strip()
    lines = (line.strip() for line in log.splitlines())
    return next((line for line in lines if line and not _CHATTER.search(line)), "")


def place(error: BaseException) -> str:
    """Return where the user's Python code failed, such as `` (transform.py:12)``.

    Returns "" if the traceback has no line of that code.
    """
    trace, found = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith(USER_MODULE):
            found = f" ({Path(code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _place_in_worker(traceback: str) -> str:
    """Return the last place in the traceback, such as `` (transform.py:12)``, or "" if it is in a library."""
    frames = _FRAME.findall(traceback)
    if not frames or any(part in frames[-1][0] for part in ("site-packages", "pyspark", "kafkalite")):
        return ""
    path, line = frames[-1]
    return f" ({Path(path).name}:{line})"


def _all_text(error: BaseException) -> str:
    parts = [str(error)]
    stack = getattr(error, "_stackTrace", None) or getattr(error, "stackTrace", None)
    if isinstance(stack, str):
        parts.append(stack)
    return "\n".join(parts)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return found[-1] if found else None


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Convert errors other than KafkaliteError to a PipelineError with the text ``where: cause``.

    If the connection to Spark's JVM broke, the text is that of ``jvm_end``, followed by ``where``.
    """
    try:
        yield
    except KafkaliteError:
        raise
    except Exception as problem:
        if is_connection_to_jvm(problem):
            text = f"{jvm_end(_jvm_exit_code())} ({where})"
            raise PipelineError(text, hint=SEE_LOG) from problem
        name = "" if _is_spark(problem) else f"{type(problem).__name__}: "
        text = f"{where}: {name}{cause(problem)}{place(problem)}"
        raise PipelineError(text, hint=hint(problem) if _is_spark(problem) else "") from problem


def is_connection_to_jvm(error: BaseException) -> bool:
    """Whether py4j lost the connection to Spark's JVM, or could not open one.

    An OSError counts only if it was raised inside py4j: a user's function that cannot reach another server
    raises an OSError, too.
    """
    kind = type(error).__name__
    if kind == "Py4JNetworkError":
        return True
    if kind == "Py4JError" and "Trace:" not in str(error):
        # A call without a response. A name that the JVM lacks raises a Py4JError as well, while the JVM runs.
        has_process = _jvm_process() is not None
        return _jvm_exit_code() is not None if has_process else str(error).startswith(_NO_RESPONSE)
    trace, is_in_py4j = error.__traceback__, False
    while trace is not None:
        is_in_py4j |= str(trace.tb_frame.f_globals.get("__name__", "")).startswith("py4j.")
        trace = trace.tb_next
    return is_in_py4j and isinstance(error, OSError)


def jvm_end(exit_code: int | None) -> str:
    """Return a sentence on the end of Spark's JVM. ``exit_code`` is -N for signal N, or None if unknown."""
    if exit_code is None:
        return "Spark's JVM does not respond: it was killed, crashed or ran out of memory"
    if exit_code >= 0:
        return f"Spark's JVM ended with exit code {exit_code}"
    by_system = ", as the system does when memory is short" if -exit_code == signal.SIGKILL else ""
    return f"Spark's JVM was killed by {signal.Signals(-exit_code).name}{by_system}"


def _jvm_exit_code() -> int | None:
    """Return the exit code of the JVM that pyspark started. Wait up to JVM_END_S for its end.

    Returns None if the JVM still runs, or if pyspark started none.
    """
    process = _jvm_process()
    if process is None:
        return None
    try:
        return int(process.wait(JVM_END_S))
    except subprocess.TimeoutExpired:
        return None


def _jvm_process() -> subprocess.Popen[bytes] | None:
    """Return the process of the JVM that pyspark started; None if it started none."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def _is_spark(error: BaseException) -> bool:
    return type(error).__module__.startswith(("pyspark", "py4j"))
