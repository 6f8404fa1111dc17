"""pyspark's daemon of Python workers, but a worker whose JVM has hung up ends without a traceback.

A JVM that has all the rows it wants (LIMIT, a query that is stopped) closes the connection while a worker
still writes. pyspark ends such a worker, and prints a BrokenPipeError on the way, to the terminal of whoever
runs the query, for something that is no error. Everything else that goes wrong in a worker is told as ever.

Spark runs it for the workers of tasks, as ``spark.python.daemon.module``; those that plan a query always have
pyspark's own. What runs is a copy beside pyspark, in a SPARK_HOME of ``fast_start``, where kafkalite need not
be. So this imports pyspark alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pyspark import daemon

HUNG_UP = 1  #: a worker's answer that ends its process


def quietly(serve: Callable[[Any, bool], int]) -> Callable[[Any, bool], int]:
    """``serve`` with the end of its connection as an answer instead of an error."""

    def worker(sock: Any, authenticated: bool) -> int:
        try:
            return serve(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError):
            sys.unraisablehook = _say_nothing  # from Python 3.13 on files tell what they can't write any more
            return HUNG_UP

    return worker


def _say_nothing(_: object) -> None:
    """Of what is left over in a process that ends."""


if __name__ == "__main__":
    daemon.worker = quietly(daemon.worker)
    daemon.manager()
