"""KafkaliteReader: the source of a batch job. The offsets to read are fixed when the job is planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from sparkbridge.options import SourceOptions
from sparkbridge.source import snapshots
from sparkbridge.source.filters import Pruning
from sparkbridge.source.planning import whole_ranges
from sparkbridge.source.schema import check_projection
from sparkbridge.source.splitting import split
from sparkbridge.source.start_and_end import check_order

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from sparkbridge.brokers.cluster import SparkCluster


class _PushFilters:
    """A callable for the reader's ``pushFilters``, with the attribute ``__func__`` that Spark reads.

    If it were a method, Spark would raise an error while filter pushdown is disabled, which is the default.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: KafkaliteReader) -> None:
        self._reader = reader

    def __call__(self, filters: Sequence[Any]) -> list[Any]:
        return self._reader.push(filters)


class KafkaliteReader(DataSourceReader):
    """Plans and reads one batch job. The constructor raises SparkOptionError and SourceSchemaError."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        check_projection(schema)
        self._options = SourceOptions.parse(options, is_stream=False)
        self._schema = schema
        self._pruning = Pruning()
        self.pushFilters = _PushFilters(self)

    @property
    def _cluster(self) -> SparkCluster:
        from sparkbridge.brokers.cluster import SparkCluster

        return SparkCluster.shared(self._options.client)

    def push(self, filters: Sequence[Any]) -> list[Any]:
        """Apply ``filters`` to the ranges to read. Return all filters, so that Spark applies them again."""
        self._pruning = Pruning.of(filters)
        return list(filters)

    def partitions(self) -> list[InputPartition]:
        """Return one range per task. Raises DataLossError, and SparkOptionError (see ``snapshots``)."""
        options, cluster, ending = self._options, self._cluster, self._options.ending
        assert ending is not None, "a batch always has an end"
        snapshot = snapshots.first_snapshot(cluster, options)
        starts, start_losses = snapshots.resolve_start(cluster, options, options.starting, snapshot)
        ends, end_losses = snapshots.resolve_end(cluster, options, ending, snapshot)
        check_order(starts, ends)
        snapshots.report_losses([*start_losses, *end_losses], is_failing=options.fail_on_data_loss)
        ranges, _ = whole_ranges(starts, ends, {}, snapshot)
        ranges = self._pruning.narrow(ranges)
        times = self._pruning.times(ranges)
        if times:
            ranges = self._pruning.narrow_by_time(ranges, cluster.offsets_for_times(times))
        tasks = split(
            ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition
        )
        return [InputPartition(each) for each in tasks]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of one range as Arrow batches. Spark calls this in a task."""
        if partition.value is None:
            return iter(())
        from sparkbridge.source.range_reader import read_range

        return read_range(self._cluster, partition.value, self._options, self._schema)
