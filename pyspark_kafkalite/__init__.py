"""Registers the format ``kafkalite``. Spark imports every installed module named ``pyspark_*``.

The implementation is in ``sparkbridge``. Keep the import of this module quick and free of errors.
"""

from __future__ import annotations

from sparkbridge.datasource import KafkaliteDataSource

__all__ = ["DefaultSource"]


class DefaultSource(KafkaliteDataSource):
    """The data source that Spark finds for ``format("kafkalite")``, for batches and streams."""
