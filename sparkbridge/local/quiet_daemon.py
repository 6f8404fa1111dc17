"""pyspark's daemon of Python workers, without a traceback when the JVM has closed a worker's connection.

A JVM that has all the rows it needs (LIMIT, a stopped query) closes the connection while a worker still
writes. pyspark then ends the worker and prints a BrokenPipeError to the terminal, although nothing failed.
All other errors of workers are reported as usual.

Spark runs it for the workers of tasks, as ``spark.python.daemon.module``; workers that plan a query always
use pyspark's own. Spark runs a copy of this file in a SPARK_HOME of ``fast_start``, where kafkalite may
not be installed. So this module imports only pyspark.
"""

# Tests: tests/sparkbridge/test_spark_session.py

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pyspark import daemon

HUNG_UP = 1  #: a worker's result that ends its process


def quietly(serve: Callable[[Any, bool], int]) -> Callable[[Any, bool], int]:
    """Wrap ``serve`` so that a closed connection is a result instead of an error."""

    def worker(sock: Any, authenticated: bool) -> int:
        try:
            return serve(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError):
            # Since Python 3.13, files report data that they could not write.
            sys.unraisablehook = _say_nothing
            return HUNG_UP

    return worker


def _say_nothing(_: object) -> None:
    """Ignore the unflushed files of a process that ends."""


if __name__ == "__main__":
    daemon.worker = quietly(daemon.worker)
    daemon.manager()
