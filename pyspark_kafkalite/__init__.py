"""Where Spark looks for the format ``kafkalite``: it imports every ``pyspark_*`` module that is installed.

All of it is in ``sparkbridge``; this module must import quickly and never fail.
"""

from __future__ import annotations

from sparkbridge.datasource import KafkaliteDataSource

__all__ = ["DefaultSource"]


class DefaultSource(KafkaliteDataSource):
    """The source and sink that ``spark.read.format("kafkalite")`` and its three siblings use."""
