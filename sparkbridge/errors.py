"""Errors and warnings of the bridge.

Spark shows a Python exception of a data source as text. So each message names the failure and the offending
value, and its hint says what to do.
"""

# Tests: tests/sparkbridge/test_options.py

from __future__ import annotations

from kafkalite.errors import KafkaliteError


class SparkBridgeError(KafkaliteError):
    """The base class of the errors that the bridge raises."""


class SparkOptionError(SparkBridgeError):
    """An option or the mode of ``spark.read``, ``readStream``, ``write`` or ``writeStream`` is invalid."""


class SourceSchemaError(SparkBridgeError):
    """A schema given by the user does not fit the source, or a record does not fit the schema."""


class SinkSchemaError(SparkBridgeError):
    """The DataFrame lacks a column that the sink needs, or has one twice or of a wrong type."""


class DataLossError(SparkBridgeError):
    """Records were deleted before they were read, and failOnDataLoss is true.

    A task also raises this, whatever failOnDataLoss is, if its topic was created again while the task read.
    """


class SinkCommitError(SparkBridgeError):
    """A batch was not written or not committed, or it is unknown whether it is committed."""


class PipelineError(SparkBridgeError):
    """A pipeline file is invalid, a requirement is not met, or a pipeline or check failed to run."""


class SparkStartError(SparkBridgeError):
    """Spark can't start here, because Java or a package is missing or too old."""


class FastStartError(SparkBridgeError):
    """The archive of Java classes that makes Spark start faster cannot be made, or must not be used."""


class UnknownSparkOptionWarning(UserWarning):
    """An option of the source or sink, or a column of a DataFrame to write, has no effect."""


class DataLossWarning(UserWarning):
    """Records were deleted before they were read, and the query continues because failOnDataLoss is false."""
