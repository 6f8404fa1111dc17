"""The Spark source and sink of kafkalite, with the format name ``kafkalite``.

They need no jar and exchange Arrow data with Spark. Streams are written exactly once unless the option
``exactlyOnce`` is false. If the package is installed on the driver and all workers, Spark finds the format by
itself::

    from sparkbridge import session

    spark = session("orders")
    lines = spark.readStream.format("kafkalite").option("kafka.bootstrap.servers", "localhost:9092")
    lines = lines.option("subscribe", "lines").load()

If the workers do not have the package, ``install(spark)`` ships it to them.

Names are loaded on first use: ``import sparkbridge`` loads neither pyspark nor pyarrow. The first use of a
name raises MissingExtraError if its module imports pyspark or pyarrow and that package is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkbridge.datasource import KafkaliteDataSource
    from sparkbridge.local.spark_session import session
    from sparkbridge.shipping import install
    from sparkbridge.sink.foreach import foreach_batch

__all__ = ["KafkaliteDataSource", "foreach_batch", "install", "session"]

_HOMES = {
    "KafkaliteDataSource": "sparkbridge.datasource",
    "foreach_batch": "sparkbridge.sink.foreach",
    "install": "sparkbridge.shipping",
    "session": "sparkbridge.local.spark_session",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in {"pyspark", "pyarrow"}:
            raise
        from kafkalite.errors import MissingExtraError

        package = missing.name.partition(".")[0]
        raise MissingExtraError(f"sparkbridge.{name}", package, "spark") from missing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
