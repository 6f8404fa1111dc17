"""Errors and warnings of the bridge.

Spark shows a Python exception of a data source as text, so each message is complete: the failure, the value,
and in the hint what to do.
"""

# Tests: tests/sparkbridge/test_options.py

from __future__ import annotations

from kafkalite.errors import KafkaliteError


class SparkBridgeError(KafkaliteError):
    """The base of the errors that the bridge raises."""


class SparkOptionError(SparkBridgeError):
    """An invalid option of ``spark.read``, ``readStream``, ``write`` or ``writeStream``."""


class SourceSchemaError(SparkBridgeError):
    """A schema given by the user names a column or type that the source does not have."""


class SinkSchemaError(SparkBridgeError):
    """The DataFrame lacks a column that the sink needs, or has one of a wrong type."""


class DataLossError(SparkBridgeError):
    """Records that the query has not read yet were deleted, and failOnDataLoss is true."""


class SinkCommitError(SparkBridgeError):
    """A batch could not be committed; none of its rows becomes visible."""


class PipelineError(SparkBridgeError):
    """An invalid pipeline file, or a pipeline whose own check failed."""


class FastStartError(SparkBridgeError):
    """The archive of Java classes that makes Spark start quickly could not be made."""


class UnknownSparkOptionWarning(UserWarning):
    """An option without effect."""


class DataLossWarning(UserWarning):
    """Records were deleted before they were read, and the query continues because failOnDataLoss is false."""
