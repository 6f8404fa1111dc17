"""Fetched batches as one Arrow table. Imported when it is first asked for: it needs pyarrow."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow

from kafkalite.client.consumer.fetched_batch import FetchedBatch
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch


def table(batches: Sequence[FetchedBatch]) -> pyarrow.Table:
    """One table of all ``batches``, in their order; each column of each batch stays where it was received."""
    parts = [_with_address(batch) for batch in batches]
    if not parts:
        # The schema of a table without rows is that of any batch.
        sample = FetchedBatch("", 0, RecordBatch(build_batch([None])), 0)
        return pyarrow.Table.from_batches([_with_address(sample)]).slice(0, 0)
    return pyarrow.Table.from_batches(parts)


def _with_address(batch: FetchedBatch) -> pyarrow.RecordBatch:
    """The batch's columns behind two for its topic (dictionary-encoded) and partition."""
    columns = batch.to_arrow()
    count = columns.num_rows
    indices = pyarrow.array([0] * count, pyarrow.int32())
    topic = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([batch.topic]))
    partition = pyarrow.array([batch.partition] * count, pyarrow.int32())
    names = ["topic", "partition", *columns.schema.names]
    return pyarrow.RecordBatch.from_arrays([topic, partition, *columns.columns], names=names)
