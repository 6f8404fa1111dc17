"""Reads the records of one OffsetRange in a task, as Arrow batches in Spark's schema.

The next fetch is sent before the last response is unpacked, so that the broker works while the rows are sent
to the JVM. A task holds one response and has another in flight, each of about ``CHUNK_BYTES`` (or one batch,
if it is larger). In addition, it holds the rows for the next RecordBatch.

Offsets without a record (transaction markers, aborted transactions, compacted records) are not a loss.
Records before the log start, beyond the end of the log, or of a topic that was deleted or created again are
lost. failOnDataLoss decides whether a loss is an error or a warning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kafkalite.client.consumer.isolation import FLAGS, FLAGS_POSITION, AbortedFilter
from kafkalite.errors import (
    ConnectionFailedError,
    CorruptBatchError,
    KafkaliteError,
    OffsetOutOfRangeError,
    RecordError,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
)
from kafkalite.limits import KIB, MIB
from kafkalite.model import TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.header import scan
from sparkbridge.errors import DataLossError
from sparkbridge.local.worker_garbage import spare_collections
from sparkbridge.offsets import Loss, OffsetRange
from sparkbridge.source.schema import arrow_schema
from sparkbridge.source.snapshots import report_losses

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from sparkbridge.brokers.cluster import Fetched, SparkCluster
    from sparkbridge.options import SourceOptions
    from sparkbridge.source.columns import SparkBatchBuilder

#: The size of a fetch in bytes, unless one of the settings ``_LIMITS`` is set.
CHUNK_BYTES: Final = 1 * MIB
_LIMITS: Final = ("max.partition.fetch.bytes", "fetch.max.bytes")
#: Limits of a RecordBatch, unless one record is larger. The JVM is fastest with 5,000 to 10,000 rows.
TARGET_BYTES: Final = 1 * MIB
TARGET_ROWS: Final = 10_000
#: A RecordBatch that is smaller than this, and has few rows, is extended from the next response.
LEAST_BYTES: Final = 512 * KIB

#: How long the broker may hold a fetch while there is no data.
_MAX_WAIT_MS: Final = 500
_RETRY_PAUSE_S: Final = 0.05


def read_range(
    cluster: SparkCluster, range_: OffsetRange, options: SourceOptions, schema: StructType
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of ``range_`` in ``schema``, which has passed ``check_projection``.

    Raises DataLossError, SourceSchemaError, RecordError, CorruptBatchError with the topic, partition and
    offset, and the errors of ``SparkCluster.fetch``. Raises RequestTimeoutError if an offset of the range
    does not become readable within kafkaConsumer.pollTimeoutMs, for example because the partition has no
    leader.
    """
    if range_.start >= range_.end:
        return
    from sparkbridge.source.columns import SparkBatchBuilder

    spare_collections("read")
    builder = SparkBatchBuilder(arrow_schema(schema), range_.topic, range_.partition)
    yield from _RangeReader(cluster, range_, options, builder).batches()


class _RangeReader:
    """Reads one range.

    Invariant between responses: records below ``_position`` were returned, gathered or reported as lost.
    """

    def __init__(
        self, cluster: SparkCluster, range_: OffsetRange, options: SourceOptions, builder: SparkBatchBuilder
    ) -> None:
        self._cluster = cluster
        self._range = range_
        self._tp = TopicPartition(range_.topic, range_.partition)
        self._builder = builder
        self._position = range_.start
        self._options = options
        self._is_read_committed = options.client.is_read_committed
        self._fails_on_loss = options.fail_on_data_loss
        self._poll_timeout_ms = options.poll_timeout_ms
        self._deadline_s = 0.0
        self._is_cut_short = False  # whether the rest of the range was reported lost
        settings = options.client.consumer
        limits = [int(settings[name]) for name in _LIMITS if name in settings]
        self._max_bytes = min(limits, default=CHUNK_BYTES)
        self._max_wait_ms = min(_MAX_WAIT_MS, options.poll_timeout_ms)

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        end, builder = self._range.end, self._builder
        token = self._send_ahead()  # the fetch in flight
        response_count = 0
        self._progressed()
        while self._position < end:
            try:
                fetched = self._cluster.receive_fetch(token if token is not None else self._send())
            except OffsetOutOfRangeError as error:
                token = None
                self._on_out_of_range(error)
                continue
            except UnknownTopicOrPartitionError as error:
                token = None
                self._on_unknown(error)
                continue
            except (ConnectionFailedError, RequestTimeoutError):
                token = None
                if time.monotonic() >= self._deadline_s:
                    raise
                continue  # the partition may be without a leader for longer than kafka.request.timeout.ms
            response_count += 1
            # The topic id is checked after the response: then the response came from the topic with this id.
            if response_count == 1 and not self._has_topic():
                return
            start, token = self._position, None
            spans = self._spans(fetched)
            if self._position == start:
                self._check_time(fetched)
            elif self._position < end:
                token = self._send_ahead()
            for batch in self._readable(fetched, spans):
                if builder.row_count and (
                    builder.size_bytes + batch.size_bytes > TARGET_BYTES
                    or builder.row_count + len(batch) > TARGET_ROWS
                ):
                    yield from self._built()
                self._add(batch, start)
            if builder.size_bytes >= LEAST_BYTES or 2 * builder.row_count >= TARGET_ROWS:
                yield from self._built()
            if self._position > start:
                self._progressed()  # after the rows were yielded: the time that Spark takes does not count
        if builder.row_count:
            yield from self._built()
        if response_count > 1 and not self._is_cut_short:
            self._check_topic()

    def _send(self) -> Any:
        return self._cluster.send_fetch(
            self._tp, self._position, max_bytes=self._max_bytes, max_wait_ms=self._max_wait_ms
        )

    def _send_ahead(self) -> Any:
        """Send the next fetch. If that fails, return None, so that ``batches`` sends it when it is needed."""
        try:
            return self._send()
        except KafkaliteError:
            return None

    def _spans(self, fetched: Fetched) -> list[tuple[int, int, int]]:
        """Return (start byte, end byte, next offset) of each batch. Moves the position past the batches.

        Raises CorruptBatchError for bytes that are not a batch.
        """
        payload = fetched.payload
        spans = [
            (at, at + length, base_offset + last_offset_delta + 1)
            for at, base_offset, last_offset_delta, _, length in scan(payload, 0, len(payload))
        ]
        end = spans[-1][1] if spans else 0
        if end < len(payload):
            next_offset = spans[-1][2] if spans else self._position
            raise CorruptBatchError(
                f"{self._tp}@{next_offset}: {len(payload) - end} bytes of a response are not a record batch",
                hint="restore the partition from a replica, or start the query behind that offset",
            )
        if spans:
            self._position = max(self._position, spans[-1][2])
        return spans

    def _readable(self, fetched: Fetched, spans: list[tuple[int, int, int]]) -> Iterator[RecordBatch]:
        """Yield the batches at ``spans``, except control batches and batches of aborted transactions.

        With read_uncommitted, batches of aborted transactions are included. Raises CorruptBatchError, for
        example for a wrong CRC.
        """
        payload = fetched.payload
        isolation = AbortedFilter(fetched.aborted if self._is_read_committed else ())
        for start, end, next_offset in spans:
            flags = payload[start + FLAGS_POSITION] & FLAGS
            if flags and isolation.drops(payload, start, flags, next_offset):
                continue
            try:
                yield RecordBatch(payload[start:end])
            except CorruptBatchError as error:
                raise self._corrupt(error, payload[start:end]) from error

    def _add(self, batch: RecordBatch, start: int) -> None:
        try:
            self._builder.add(batch, start, self._range.end)
        except RecordError as error:
            raise self._corrupt(error, batch.buffer) from error

    def _corrupt(self, error: RecordError, batch: memoryview) -> RecordError:
        base_offset = int.from_bytes(batch[:8], "big", signed=True)
        return type(error)(
            f"{self._tp}@{base_offset}: the batch can't be read: {error.message}",
            hint=error.hint or "restore the partition from a replica, or start the query behind that offset",
        )

    def _built(self) -> Iterator[pyarrow.RecordBatch]:
        """Yield the gathered rows, in several parts if they far exceed TARGET_BYTES or TARGET_ROWS."""
        size_bytes = self._builder.size_bytes
        rows = self._builder.build()
        count = rows.num_rows
        if size_bytes <= 2 * TARGET_BYTES and count <= 2 * TARGET_ROWS:
            yield rows
            return
        part_count = max(-(-size_bytes // TARGET_BYTES), -(-count // TARGET_ROWS))
        step = max(1, -(-count // part_count))
        for first in range(0, count, step):
            yield rows.slice(first, step)

    def _progressed(self) -> None:
        self._deadline_s = time.monotonic() + self._poll_timeout_ms / 1000

    def _check_time(self, fetched: Fetched) -> None:
        if time.monotonic() < self._deadline_s:
            return
        if fetched.high_watermark < self._range.end:  # the log was longer when the batch was planned
            self._lose(self._range.end, f"the log now ends at {fetched.high_watermark}")
            return
        readable = fetched.last_stable_offset if self._is_read_committed else fetched.high_watermark
        hint = "raise kafkaConsumer.pollTimeoutMs, if the partition's replicas are only slow"
        if readable < fetched.high_watermark:
            hint = "a transaction is open there: 'kl txn list' shows whose, and 'kl txn abort' ends it"
        raise RequestTimeoutError(
            f"{self._tp}: offset {self._position} did not become readable within {self._poll_timeout_ms} ms; "
            f"the batch ends at {self._range.end}, the broker shows records below {readable}",
            hint=hint,
        )

    def _has_topic(self) -> bool:
        """Return whether the topic is the one that the range was planned for. If not, report a loss."""
        found_id = self._found_topic_id()
        if found_id == self._range.topic_id:
            return True
        why = "the topic was deleted"
        self._lose(self._range.end, why if found_id is None else f"{why} and created again")
        return False

    def _check_topic(self) -> None:
        """Raise DataLossError if the topic was created again between the first and the last response.

        It is raised even if failOnDataLoss is false, because rows were already returned. When Spark runs the
        task again, the task detects the loss at its start. Errors of unreachable brokers are ignored.
        """
        range_ = self._range
        try:
            found_id = self._found_topic_id()
        except (ConnectionFailedError, RequestTimeoutError):
            return
        if found_id not in {range_.topic_id, None}:
            raise DataLossError(
                f"{self._tp}: the topic was deleted and created again while offsets {range_.start} to "
                f"{range_.end} were read",
                hint="the rows may be of either topic; the repeated task, or the query, reports the loss",
            )

    def _found_topic_id(self) -> str | None:
        """Return the topic's current id; None if the topic is missing, "" if the range has no id to check."""
        topic, wanted, options = self._range.topic, self._range.topic_id, self._options
        if not wanted:
            return wanted
        for retries_left in range(options.fetch_offset_retries, -1, -1):
            found = self._cluster.topics(names=[topic]).get(topic)
            if found is not None and found.topic_id == wanted:
                break
            if retries_left:  # the broker may not have the topic in its metadata yet
                self._cluster.avoid_last_responder()
                time.sleep(options.fetch_offset_retry_interval_ms / 1000)
        return None if found is None else found.topic_id

    def _on_unknown(self, error: UnknownTopicOrPartitionError) -> None:
        """Report the rest of the range as lost if its topic or partition was deleted.

        If the brokers' metadata still has the partition, its leader lags behind. Then pause and return, so
        that the caller retries, or raise ``error`` if the deadline has passed.
        """
        if not self._has_topic():
            return
        topic, partition = self._tp
        found = self._cluster.topics(names=[topic]).get(topic)
        if found is None or partition >= found.partition_count:
            self._lose(self._range.end, f"the partition was deleted ({error.message})")
        elif time.monotonic() < self._deadline_s:
            time.sleep(_RETRY_PAUSE_S)
        else:
            raise error

    def _on_out_of_range(self, error: OffsetOutOfRangeError) -> None:
        """Report the records that do not exist any more as lost, and move the position past them.

        If no record was lost, pause and return, so that the caller retries, or raise ``error`` if the
        deadline has passed.
        """
        if not self._has_topic():
            return
        topic, partition = self._tp
        found = self._cluster.snapshot({topic: [partition]}).get(topic)
        if found is None or not 0 <= partition < len(found.starts):
            self._lose(self._range.end, "the partition was deleted")
            return
        log_start, log_end = found.starts[partition], found.ends[partition]
        if log_start > self._position:
            self._lose(min(log_start, self._range.end), f"the log now starts at {log_start}")
        elif log_end < self._position:
            self._lose(self._range.end, f"the log now ends at {log_end}")
        elif time.monotonic() < self._deadline_s:
            time.sleep(_RETRY_PAUSE_S)  # a new leader may not know its end yet
        else:
            raise error

    def _lose(self, to: int, why: str) -> None:
        """Report offsets up to ``to`` (exclusive) as lost and continue there. May raise DataLossError."""
        loss = Loss(self._range.topic, self._range.partition, self._position, to, why)
        report_losses([loss], is_failing=self._fails_on_loss)
        self._position = to
        self._is_cut_short = to >= self._range.end
        self._progressed()
