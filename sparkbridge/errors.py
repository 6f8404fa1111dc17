"""What can go wrong between Spark and kafkalite, by name.

Spark shows a Python exception of a data source as text, so each message stands by itself: what, where, and
in the hint what to do.
"""

from __future__ import annotations

from kafkalite.errors import KafkaliteError


class SparkBridgeError(KafkaliteError):
    """The root of what the bridge itself raises."""


class SparkOptionError(SparkBridgeError):
    """An option of ``spark.read``, ``readStream``, ``write`` or ``writeStream`` that can't be."""


class SourceSchemaError(SparkBridgeError):
    """A schema given by the user names a column, or a type of one, that the source does not have."""


class SinkSchemaError(SparkBridgeError):
    """The DataFrame lacks a column that the sink needs, or has one of a wrong type."""


class DataLossError(SparkBridgeError):
    """Records that the query had still to read are gone, and failOnDataLoss is true."""


class SinkCommitError(SparkBridgeError):
    """A batch could not be committed; nothing of it will be seen."""


class PipelineError(SparkBridgeError):
    """A pipeline's file that makes no sense, or a pipeline whose own check failed."""


class FastStartError(SparkBridgeError):
    """The archive of Java classes that makes Spark's starts quick can't be made."""


class UnknownSparkOptionWarning(UserWarning):
    """An option that nothing reads."""


class DataLossWarning(UserWarning):
    """Records are gone, failOnDataLoss is false, and the query goes on behind them."""
