"""Makes Arrow tables. Imported on first use, because it needs pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kafkalite.client.consumer.fetched_batch import FetchedBatch
from kafkalite.errors import MissingExtraError, RecordError
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch

try:
    import pyarrow
except ModuleNotFoundError as missing:
    raise MissingExtraError("Arrow data", "pyarrow", "arrow") from missing


def table(batches: Sequence[FetchedBatch]) -> pyarrow.Table:
    """Return one table of all ``batches``, in order. The columns of the batches are not copied."""
    parts = [_with_address(batch) for batch in batches]
    if not parts:
        # A table without rows gets the schema from any batch.
        sample = FetchedBatch("", 0, RecordBatch(build_batch([None])), 0)
        return pyarrow.Table.from_batches([_with_address(sample)]).slice(0, 0)
    return pyarrow.Table.from_batches(parts)


def _with_address(batch: FetchedBatch) -> pyarrow.RecordBatch:
    """Return the batch as Arrow columns, with the columns topic (dictionary-encoded) and partition first."""
    columns = batch.to_arrow()
    count = columns.num_rows
    indices = pyarrow.array([0] * count, pyarrow.int32())
    topic = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([batch.topic]))
    partition = pyarrow.array([batch.partition] * count, pyarrow.int32())
    names = ["topic", "partition", *columns.schema.names]
    return pyarrow.RecordBatch.from_arrays([topic, partition, *columns.columns], names=names)


def table_of_rows(keys: list[Any], values: list[Any], key_column: str) -> pyarrow.Table:
    """Return the rows of a ``Table`` for ``Table.to_arrow``, which documents the columns and errors."""
    columns = {"value": values}
    if values and all(isinstance(value, Mapping) for value in values):
        fields = dict.fromkeys(name for value in values for name in value)
        columns = {name: [value.get(name) for value in values] for name in fields}
    if values and key_column in columns:
        raise RecordError(
            f"the values have a column {key_column!r}, like the column of the keys",
            hint="name another key_column",
        )
    arrays = {}
    for name, column in ({key_column: keys} | columns).items():
        try:
            arrays[name] = pyarrow.array(column)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise RecordError(f"the column {name!r} can't be an Arrow array: {error}") from error
    return pyarrow.table(arrays)
