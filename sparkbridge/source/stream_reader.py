"""KafkaliteStreamReader: the source of a stream, as Spark calls it.

Spark creates one instance in the driver's stream process (one per query) and calls its methods for offsets
and partitions. It creates and pickles a second instance in a planning worker. The tasks unpickle this one and
call its ``read`` with an OffsetRange. The instances share no state.

A query waits for data in ``latestOffset``, with long polls: an idle query sends few requests, and new records
are noticed at once. The ``start`` of ``latestOffset`` is the end of the last finished batch. If the query has
a group, this offset is committed for it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from kafkalite.errors import KafkaliteError, OffsetOutOfRangeError, UnknownTopicOrPartitionError
from sparkbridge.errors import DataLossError, SparkBridgeError, SparkOptionError
from sparkbridge.offsets import Positions, Snapshot, StreamOffset, positions_to_json
from sparkbridge.options import SourceOptions
from sparkbridge.source import snapshots
from sparkbridge.source.planning import Proposal, SourcePlan
from sparkbridge.source.schema import check_projection

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from sparkbridge.brokers.cluster import SparkCluster

#: The timeout of a commit of group offsets, and the pause after a failed commit, so that it does not block
#: the query.
GROUP_COMMIT_TIMEOUT_MS: Final = 5_000
GROUP_COMMIT_PAUSE_S: Final = 30.0

#: The pause if new data is not enough for a batch (minOffsetsPerTrigger) or is beyond an ending bound.
UNUSABLE_DATA_PAUSE_S: Final = 0.1

OffsetJson = dict[str, Any]


class KafkaliteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches. The constructor raises SparkOptionError and SourceSchemaError."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        check_projection(schema)
        self._options = SourceOptions.parse(options, is_stream=True)
        self._schema = schema
        self._plan = SourcePlan(self._options)
        self._is_available_now = False
        self._initial: OffsetJson | None = None
        self._initial_error: SparkBridgeError | None = None
        self._seen: Positions | None = None  # the ends of the logs in the last snapshot
        self._planned: tuple[OffsetJson, Snapshot] | None = None  # the last batch's end and snapshot
        self._group_positions: Positions | None = None  # the offsets that this reader last committed
        self._group_commits_from_s = 0.0

    @property
    def _cluster(self) -> SparkCluster:
        from sparkbridge.brokers.cluster import SparkCluster

        return SparkCluster.shared(self._options.client)

    @property
    def _group_cluster(self) -> SparkCluster:
        from sparkbridge.brokers.cluster import SparkCluster

        client = self._options.client
        timeout_ms = min(GROUP_COMMIT_TIMEOUT_MS, client.request_timeout_ms)
        return SparkCluster.shared(replace(client, request_timeout_ms=timeout_ms))

    def initialOffset(self) -> OffsetJson:
        """Return the start offset of a new query.

        Spark calls this twice for a new query. It calls this again after a crash in the first batch, but then
        ignores the result. Therefore a SparkOptionError or DataLossError is stored, and ``latestOffset``
        raises it.
        """
        if self._initial is None:
            try:
                offset = self._resolve_initial()
            except (SparkOptionError, DataLossError) as error:
                self._initial_error = error
                offset = StreamOffset({}, is_initial=True)
            self._initial = offset.to_json()
        return self._initial

    def _resolve_initial(self) -> StreamOffset:
        cluster, options = self._cluster, self._options
        snapshot = snapshots.first_snapshot(cluster, options)
        starting, losses = snapshots.resolve_start(cluster, options, options.starting, snapshot)
        snapshots.report_losses(losses, is_failing=options.fail_on_data_loss)
        return self._plan.initial(snapshot, starting)

    def prepareForTriggerAvailableNow(self) -> None:
        """Let the next ``latestOffset`` fix the end of the query.

        The end is not fixed here, because a batch that a crash interrupted is run before ``latestOffset``.
        """
        self._is_available_now = True
        self._plan.prepare_available_now()

    def getDefaultReadLimit(self) -> Any:
        """Return one of the configured limits or ReadAllAvailable. ``latestOffset`` applies all limits."""
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: OffsetJson, limit: Any) -> OffsetJson:
        """Return the end of the next batch, or ``start`` itself if there is no batch to run now.

        If ``limit`` is ReadAllAvailable (as with Trigger.Once), the limits are not applied. Raises
        DataLossError, and SparkOptionError for a query that cannot start.
        """
        begin = StreamOffset.parse(start)
        if begin.is_initial and self._initial_error is not None:
            raise self._initial_error
        self._commit_group(begin)
        is_limited = not isinstance(limit, ReadAllAvailable)
        snapshot, proposal = self._propose(begin, is_limited=is_limited)
        if not proposal.has_batch and not self._is_available_now and self._wait_for_data(proposal):
            snapshot, proposal = self._propose(begin, is_limited=is_limited)
            if not proposal.has_batch:
                time.sleep(min(UNUSABLE_DATA_PAUSE_S, self._options.latest_offset_max_wait_ms / 1000))
        snapshots.report_losses(proposal.losses, is_failing=self._options.fail_on_data_loss)
        if not proposal.has_batch:
            return start
        end = proposal.end.to_json()
        self._planned = end, snapshot
        return end

    def _propose(self, begin: StreamOffset, *, is_limited: bool) -> tuple[Snapshot, Proposal]:
        for _ in range(self._options.fetch_offset_retries):
            try:
                return self._look(begin, is_limited=is_limited)
            except (OffsetOutOfRangeError, UnknownTopicOrPartitionError):
                continue  # a topic was deleted, or a log truncated, between two requests
        return self._look(begin, is_limited=is_limited)

    def _look(self, begin: StreamOffset, *, is_limited: bool) -> tuple[Snapshot, Proposal]:
        snapshot = snapshots.steady_snapshot(self._cluster, self._options, begin)
        self._seen = snapshots.ends_of(snapshot)
        now_ms = snapshots.now_ms()
        results = snapshots.look_up(self._cluster, self._options, self._plan.needed_lookups(snapshot, now_ms))
        proposal = self._plan.latest(begin, snapshot, now_ms, is_limited=is_limited, results=results)
        wanted = proposal.wants_bytes
        if wanted is not None:
            reached = self._cluster.ends_by_bytes(*wanted)
            proposal = self._plan.cut(proposal, reached)
        return snapshot, proposal

    def _wait_for_data(self, proposal: Proposal) -> bool:
        """Wait up to ``latestOffset.maxWaitMs`` for data beyond the snapshot of ``proposal``.

        Returns whether there may be data, so that another snapshot must be taken.
        """
        max_wait_ms = self._options.latest_offset_max_wait_ms
        if max_wait_ms <= 0:
            return False
        if not proposal.seen:  # no topic matches the pattern yet
            time.sleep(max_wait_ms / 1000)
            return True
        return self._cluster.wait_for_data(proposal.seen, max_wait_ms)

    def reportLatestOffset(self) -> OffsetJson | None:
        """Return the log end offsets in the reader's last snapshot, or None before the first.

        Spark shows them in the query's progress. Sends no request.
        """
        return None if self._seen is None else dict(positions_to_json(self._seen))

    def commit(self, end: OffsetJson) -> None:
        """Commit ``end`` for the group. Spark calls this for a batch when it plans the next one."""
        self._commit_group(StreamOffset.parse(end))

    def stop(self) -> None:
        """Do nothing. Spark usually ends the process without calling this."""

    def _commit_group(self, finished: StreamOffset) -> None:
        """Commit the query's progress for its group. Errors only cause a warning."""
        options = self._options
        if options.group_id is None or not options.commit_group_offsets or finished.is_initial:
            return
        if finished.positions == self._group_positions or time.monotonic() < self._group_commits_from_s:
            return
        try:
            self._group_cluster.commit_offsets(options.group_id, finished.positions)
            self._group_positions = finished.positions
        except (KafkaliteError, OSError) as error:
            self._group_commits_from_s = time.monotonic() + GROUP_COMMIT_PAUSE_S
            warnings.warn(
                f"the offsets of group {options.group_id!r} were not committed, so its lag is wrong; "
                f"the query continues: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def partitions(self, start: OffsetJson, end: OffsetJson) -> Sequence[InputPartition]:
        """Return the ranges of a batch, one per task.

        The same arguments give the same ranges unless records were deleted in between. Raises DataLossError.
        """
        until = StreamOffset.parse(end)
        if self._planned is not None and self._planned[0] == end:
            snapshot = self._planned[1]
        else:  # a batch that is run again after a restart
            snapshot = snapshots.replay_snapshot(self._cluster, self._options, until)
        ranges, losses = self._plan.ranges(StreamOffset.parse(start), until, snapshot)
        snapshots.report_losses(losses, is_failing=self._options.fail_on_data_loss)
        return [InputPartition(each) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of one range as Arrow batches. Spark calls this in a task."""
        from sparkbridge.source.range_reader import read_range

        return read_range(self._cluster, partition.value, self._options, self._schema)
