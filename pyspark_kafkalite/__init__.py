"""Registers the format ``kafkalite``. Spark imports every installed module named ``pyspark_*``.

The implementation is in ``sparkbridge``. The import of this module must be quick and must never fail.
"""

from __future__ import annotations

from sparkbridge.datasource import KafkaliteDataSource

__all__ = ["DefaultSource"]


class DefaultSource(KafkaliteDataSource):
    """The data source that Spark finds for ``format("kafkalite")``, for batches and streams."""
