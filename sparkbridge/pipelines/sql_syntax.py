"""Checks the syntax of queries with Spark's own parser, in a JVM without a Spark session.

The parser exists only in Java. It needs neither tables nor data, so unknown columns are found only by a run.
"""

# Tests: tests/spark/test_sql_syntax.py

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sparkbridge.local import fast_start
from sparkbridge.local.spark_session import missing_requirements
from sparkbridge.pipelines.spark_errors import cause

#: A short life needs no optimised code. Deeply nested queries need more stack than Java's default.
_JAVA_OPTIONS: Final = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xss4m"]
_END_S: Final = 5.0
_POSITION: Final = "(line "


class SqlSyntax:
    """Checks the syntax of SQL with Spark's parser, in a JVM.

    A context manager. The first check starts the JVM, and the end of the context stops it. If the JVM cannot
    be started or fails, ``unavailable`` is the reason, and no more queries are checked.
    """

    def __init__(self) -> None:
        self.unavailable = ""
        self._parser: Any = None
        self._gateway: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gateway is not None:
            self._gateway.close()
        if self._process is not None:
            assert self._process.stdin is not None, "the JVM ends when it is closed"
            self._process.stdin.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def problem(self, sql: str) -> str:
        """Return the syntax error of ``sql``; "" if there is none, or if the parser is ``unavailable``."""
        if self._parser is None and not self.unavailable:
            self._start()
        if self.unavailable:
            return ""
        from py4j.protocol import Py4JError, Py4JJavaError

        try:
            self._parser.parsePlan(sql)
        except Py4JJavaError as error:
            message = str(error.java_exception.getMessage())
            return _at_line(cause(ValueError(message)), message, sql)
        except (Py4JError, OSError) as error:
            self.unavailable = f"the JVM with Spark's parser failed: {error}"
        return ""

    def _start(self) -> None:
        self.unavailable = "; ".join(missing_requirements())
        java, spark = fast_start.find_java(), find_spec("pyspark")
        if self.unavailable or java is None or spark is None or spark.origin is None:
            return
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        jars = Path(spark.origin).parent / "jars"
        try:
            port, token, self._process = launch_gateway(
                jarpath=str(next(jars.glob("py4j*.jar"))),
                classpath=str(jars / "*"),
                javaopts=_JAVA_OPTIONS,
                java_path=java.command,
                die_on_exit=True,
                redirect_stdout=subprocess.DEVNULL,
                redirect_stderr=subprocess.DEVNULL,
                enable_auth=True,
                return_proc=True,
            )
            # Without memory management, because a finalizer would connect to a JVM that has ended.
            found = GatewayParameters(port=port, auth_token=token, enable_memory_management=False)
            self._gateway = JavaGateway(gateway_parameters=found)
            self._parser = self._gateway.jvm.org.apache.spark.sql.execution.SparkSqlParser()
        except Exception as error:  # py4j lets errors of every kind through
            self.unavailable = f"the JVM with Spark's parser did not start: {error}"


def _at_line(problem: str, message: str, sql: str) -> str:
    """Return ``problem`` with the line of ``sql`` that Spark's ``message`` names, if ``sql`` has several."""
    number = message.partition(_POSITION)[2].partition(",")[0]
    lines = sql.splitlines()
    if len(lines) > 1 and number.isdecimal() and 1 <= int(number) <= len(lines):
        return f"{problem}, in its line {number}: {lines[int(number) - 1].strip()}"
    return problem
