"""A driver that copies one topic to another and changes each record, as a separate program to be killed.

::

    python -m proof.spark.copy_job '{"master": "local[2,4]"}' < orders

It reads orders from standard input, one line of JSON each (``Order``), and responds to each with a line that
begins with ``ANSWER``. The session starts before the first order arrives, so that the next driver can be kept
ready. The end of the input ends the program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from proof.console import tell
from proof.spark.copying import ANSWER, TRANSFORM
from proof.spark.faulty import FORMAT, FaultyDataSource
from sparkbridge.local.spark_session import session

_END_LIMIT_S: Final = 5.0


def run(spark: Any, order: Mapping[str, Any]) -> str:
    """Run one query until the end that the order states. Raises the error that ended the query instead.

    An order has ``source`` and ``sink`` (options), ``checkpoint`` and ``until``: "available-now", "processed"
    (a query that is stopped when it has copied everything), or a batch number (the query is stopped as soon
    as that batch has ended). It may state another ``format`` and ``transform``.
    """
    name = order.get("format", FORMAT)
    frame = spark.readStream.format(name).options(**order["source"]).load()
    frame = frame.selectExpr(*order.get("transform", TRANSFORM))
    writer = frame.writeStream.format(name).options(**order["sink"])
    writer = writer.option("checkpointLocation", order["checkpoint"])
    until = order["until"]
    if until == "available-now":
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
    else:
        query = writer.start()
        if until == "processed":
            query.processAllAvailable()
        else:
            while query.isActive and ((query.lastProgress or {}).get("batchId", -1) < until):
                query.awaitTermination(0.02)  # raises the error that ended the query
        query.stop()
    progress = query.lastProgress
    return f"ended after batch {progress['batchId'] if progress else None}"


def answer(spark: Any, order: Mapping[str, Any]) -> str:
    """Run an order and return its response. Raises the error of a JVM that has died."""
    try:
        return run(spark, order)
    except Exception as error:
        if _is_gone(spark, error):
            raise
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:2000]}"


def _is_gone(spark: Any, error: Exception) -> bool:
    """Whether the error was caused by the death of the JVM."""
    if type(error).__module__.startswith("pyspark."):
        return False  # a response
    try:
        spark.sparkContext._gateway.proc.wait(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> None:
    settings = json.loads(sys.argv[1])
    spark = session("copy", is_short_lived=True, settings=settings)
    spark.dataSource.register(FaultyDataSource)
    tell(ANSWER + spark.sparkContext.applicationId)
    for line in sys.stdin:
        try:
            tell(ANSWER + answer(spark, json.loads(line)))
        except Exception:
            os._exit(3)
    spark.stop()


if __name__ == "__main__":
    main()
