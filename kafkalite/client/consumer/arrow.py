"""Combines fetched batches into one Arrow table. Imported on first use, because it needs pyarrow."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow

from kafkalite.client.consumer.fetched_batch import FetchedBatch
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch


def table(batches: Sequence[FetchedBatch]) -> pyarrow.Table:
    """Return one table of all ``batches``, in order. No column is copied."""
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
