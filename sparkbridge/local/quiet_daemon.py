"""pyspark's daemon of Python workers, without a traceback when the JVM closes a worker's connection.

A JVM that has received all the rows it needs (LIMIT, a stopped query) closes the connection while a worker is
still writing. pyspark then ends the worker and prints a BrokenPipeError to the terminal, although nothing
failed. All other errors of workers are reported as usual.

The setting ``spark.python.daemon.module`` names this module for the workers of tasks. Workers that plan a
query always use pyspark's own daemon. Spark runs a copy of this file, which ``fast_start`` puts into a
SPARK_HOME. The copy must work where kafkalite is not installed, so this module imports only pyspark and the
standard library.
"""

# Tests: tests/sparkbridge/test_spark_session.py

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pyspark import daemon

HUNG_UP = 1  #: the exit status of a worker whose connection the JVM closed


def quietly(serve: Callable[[Any, bool], int]) -> Callable[[Any, bool], int]:
    """Wrap ``serve`` to return HUNG_UP instead of raising BrokenPipeError or ConnectionResetError."""

    def worker(sock: Any, authenticated: bool) -> int:
        try:
            return serve(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError):
            # Since Python 3.13, a file that cannot write its remaining data when it is finalized reports the
            # error.
            sys.unraisablehook = _say_nothing
            return HUNG_UP

    return worker


def _say_nothing(_: object) -> None:
    """Ignore the unraisable error of a file that cannot be flushed when the process ends."""


if __name__ == "__main__":
    daemon.worker = quietly(daemon.worker)
    daemon.manager()
