"""The sink as a function for ``foreachBatch``: for update mode, or several sinks in one query."""

# Tests: tests/spark/test_sink.py

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sparkbridge.errors import SparkOptionError
from sparkbridge.option_values import option_text
from sparkbridge.options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def foreach_batch(
    options: Mapping[str, Any] | None = None, /, *, sinkName: str, **more: Any
) -> Callable[[DataFrame, int], None]:
    """Return a function that writes each micro-batch exactly once, unless ``exactlyOnce`` is false::

        to_counts = foreach_batch(
            {"kafka.bootstrap.servers": "localhost:9092"}, topic="counts", sinkName="counts"
        )
        counts.writeStream.outputMode("update").foreachBatch(to_counts).start()

    Options are those of ``df.write.format("kafkalite")``, without ``txnAppId`` and ``txnVersion``. The
    brokers identify a written batch by ``sinkName`` and its number. So two writes in one batch need two
    names, and a name belongs to one checkpoint. Raises SparkOptionError.
    """
    if not sinkName:
        raise SparkOptionError("sinkName is empty", hint="two writes in one batch need two names")
    given = {name: option_text(value) for name, value in {**(options or {}), **more}.items()}
    refused = sorted({name.lower() for name in given} & {"txnappid", "txnversion"})
    if refused:
        raise SparkOptionError(
            f"{', '.join(refused)} can't be given to foreach_batch",
            hint="they are derived from sinkName and the batch",
        )
    from sparkbridge.sink.task_writer import check_settings

    parsed = SinkOptions.parse(given, is_stream=False)
    check_settings(parsed)
    if parsed.exactly_once:
        given["txnAppId"] = f"{parsed.transactional_id_prefix}-{sinkName}"
        SinkOptions.parse({**given, "txnVersion": "0"}, is_stream=False)

    def write_batch(df: DataFrame, batch_id: int) -> None:
        version = {"txnVersion": str(batch_id)} if "txnAppId" in given else {}
        df.write.format("kafkalite").mode("append").options(**given, **version).save()

    return write_batch
