"""One task attempt of the sink: sends Arrow batches as record batches to the leaders of their partitions.

With exactly once, the attempt is a writer of the batch's transaction group. Its records become visible if the
driver names it as a winner. With at least once, it uses a producer that the process shares between tasks, and
all records are acknowledged before the task ends. No record is processed alone, and buffer.memory limits the
unacknowledged records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

from kafkalite.client.blocking.admin import Admin
from kafkalite.client.blocking.producer import Producer
from kafkalite.client.blocking.transaction_group import TransactionGroup, TransactionGroupWriter
from kafkalite.client.config import producer_config
from kafkalite.client.producer.transaction_group import PreparedWriter
from kafkalite.errors import (
    ConfigError,
    InvalidProducerEpochError,
    InvalidTransactionTimeoutError,
    KafkaliteError,
    ProducerFencedError,
    TransactionAbortedError,
)
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.records.builder import RecordBatchBuilder
from kafkalite.records.partitioners import Partitioner, make_partitioner
from kafkalite.rng import system_rng
from sparkbridge.errors import SinkCommitError, SparkOptionError
from sparkbridge.local.worker_garbage import spare_collections
from sparkbridge.options import SinkOptions
from sparkbridge.sink.columns import (
    BATCH_BYTES,
    NO_PARTITION,
    PartitionSlice,
    Records,
    Splitter,
    cut,
    joined,
    record_overhead,
)
from sparkbridge.sink.commit import Written, driver_config, older_batch_error, started, writer_name
from sparkbridge.sink.schema import SinkColumns

#: If the records in the open batches of a task exceed this size, the largest batch is sent.
MAX_OPEN_BYTES: Final = 32 << 20
#: The approximate memory of an Arrow slice besides its data. In a slice with few rows it is the larger part.
PIECE_BYTES: Final = 2_048
SMALL_PIECE_BYTES: Final = 8 * PIECE_BYTES
#: How long a topic's max.message.bytes is cached. A failed task also clears the cache.
LIMITS_MAX_AGE_S: Final = 300


class TaskIdentity(NamedTuple):
    """Identifies a task attempt. ``sink_id`` and ``batch_id`` name its batch; ``attempt`` is unique."""

    sink_id: str
    batch_id: int
    query_id: str
    attempt: str
    partition: int  #: the number of Spark's partition that the task processes


def write_task(
    batches: Iterator[Any], columns: SinkColumns, options: SinkOptions, task: TaskIdentity
) -> Written:
    """Write all rows, unless the batch is already committed, and return the message for the driver.

    Raises SinkCommitError and client errors.
    """
    spare_collections("write")
    batches = (batch for batch in batches if batch.num_rows)
    prepared: PreparedWriter | None = None
    rows = 0
    first = next(batches, None)
    if first is not None:  # without rows, no connection is needed
        write = _write_exactly_once if options.exactly_once else _write_at_least_once
        try:
            rows, prepared = write(chain([first], batches), columns, options, task)
        except BaseException:
            _limits.clear()  # a cached limit may be out of date
            raise
    return Written(
        task.sink_id,
        task.batch_id,
        task.query_id,
        rows,
        None if prepared is None else (prepared.writer, prepared.producer_id, prepared.producer_epoch),
    )


def _write_at_least_once(
    batches: Iterator[Any], columns: SinkColumns, options: SinkOptions, task: TaskIdentity
) -> tuple[int, None]:
    producer = _pooled_producer(options)
    try:
        rows = TopicWriter(producer, columns, options, task).write_all(batches)
        producer.flush()
    except BaseException:
        _forget_producer(producer)
        raise
    return rows, None


def _write_exactly_once(
    batches: Iterator[Any], columns: SinkColumns, options: SinkOptions, task: TaskIdentity
) -> tuple[int, PreparedWriter | None]:
    try:
        with _joined_writer(options, task) as writer:
            if writer.is_finished:
                _check_is_last(options, task)
                return sum(batch.num_rows for batch in batches), None
            rows = TopicWriter(writer, columns, options, task).write_all(batches)
            return rows, writer.prepare()
    except (ProducerFencedError, InvalidProducerEpochError, TransactionAbortedError) as error:
        raise _aborted(error, options, task) from error


def _aborted(error: KafkaliteError, options: SinkOptions, task: TaskIdentity) -> SinkCommitError:
    return SinkCommitError(
        f"the transaction of task {task.partition} in batch {task.batch_id} of {task.sink_id!r} is aborted: "
        f"{error}",
        hint="if it was open for longer than kafka.transaction.timeout.ms, now "
        f"{options.transaction_timeout_ms}, raise that (and transaction.max.timeout.ms of the brokers), or "
        "make batches smaller",
    )


def _check_is_last(options: SinkOptions, task: TaskIdentity) -> None:
    """Raise SinkCommitError if a later batch than the task's batch is already committed.

    Spark repeats only the last batch of a query, so such a task is not a repetition; ``older_batch_error``
    names the possible causes.
    """
    with TransactionGroup(task.sink_id, config=driver_config(options, 60_000)) as group:
        last = group.last_batch_id()
    if last > task.batch_id:
        raise older_batch_error(task.sink_id, task.batch_id, f"the last one is {last}")


# --- producers ---------------------------------------------------------------------------------------


def check_settings(options: SinkOptions) -> None:
    """Raise SparkOptionError if the producer would refuse the settings among the options."""
    settings = _settings(options)
    if options.exactly_once:
        settings |= {"transactional.id": "any", "transaction.timeout.ms": options.transaction_timeout_ms}
    try:
        producer_config(settings)
    except ConfigError as cause:
        raise SparkOptionError(f"kafka.{cause}", hint="it is a setting of the sink's Kafka client") from cause


def _settings(options: SinkOptions) -> dict[str, Any]:
    client = options.client
    return {
        **client.producer,
        **client.security,
        "bootstrap.servers": client.bootstrap_servers,
        "client.id": client.client_id,
        "request.timeout.ms": str(client.request_timeout_ms),
    }


@contextlib.contextmanager
def _joined_writer(options: SinkOptions, task: TaskIdentity) -> Iterator[TransactionGroupWriter]:
    """Yield a writer that has joined the batch, and close it. If the block raises, abort its transaction."""
    writer = _joined(options, task)
    try:
        yield writer
    except BaseException as error:
        writer.__exit__(type(error), error, error.__traceback__)
        raise
    else:
        writer.close()


def _joined(options: SinkOptions, task: TaskIdentity) -> TransactionGroupWriter:
    timeout_ms = options.transaction_timeout_ms
    try:
        return _join(options, task, timeout_ms)
    except InvalidTransactionTimeoutError:  # use the maximum of the brokers, which is lower
        with Admin(config=driver_config(options, 60_000)) as admin:
            node_id = admin.describe_cluster().brokers[0].node_id
            allowed = admin.describe_configs("broker", str(node_id))["transaction.max.timeout.ms"].value
        return _join(options, task, min(timeout_ms, int(allowed or timeout_ms)))


def _join(options: SinkOptions, task: TaskIdentity, timeout_ms: int) -> TransactionGroupWriter:
    def make() -> TransactionGroupWriter:
        return TransactionGroupWriter(
            task.sink_id,
            task.batch_id,
            writer_name(task.query_id, task.attempt),
            config={**_settings(options), "transaction.timeout.ms": timeout_ms},
        )

    return started(make, options.client.request_timeout_ms)


_producers: dict[tuple[Any, ...], Producer] = {}


def _pooled_producer(options: SinkOptions) -> Producer:
    """Return the producer with the settings of ``options``, which all tasks of this process share."""
    settings = _settings(options)
    key = (os.getpid(), *sorted(settings.items()))
    producer = _producers.get(key)
    if producer is None:
        for other in [other for other in _producers if other[0] != os.getpid()]:
            del _producers[other]  # inherited from the parent by a fork
        producer = started(lambda: Producer(config=settings), options.client.request_timeout_ms)
        _producers[key] = producer
    return producer


def _forget_producer(producer: Producer) -> None:
    """Drop a failed producer from the pool. Its batches in flight may still be written (at least once)."""
    for key, pooled in list(_producers.items()):
        if pooled is producer:
            del _producers[key]
    with contextlib.suppress(KafkaliteError, TimeoutError):
        producer.close(timeout=0)


# --- limits ------------------------------------------------------------------------------------------

_limits: dict[tuple[int, str, str], tuple[float, int]] = {}


def _max_message_bytes(options: SinkOptions, topic: str) -> int:
    """Return the topic's max.message.bytes, cached per process for LIMITS_MAX_AGE_S."""
    key = (os.getpid(), options.client.bootstrap_servers, topic)
    known = _limits.get(key)
    now_s = time.monotonic()
    if known is None or known[0] < now_s:
        with Admin(config=driver_config(options, 60_000)) as admin:
            value = admin.describe_configs("topic", topic)["max.message.bytes"].value
        known = _limits[key] = (now_s + LIMITS_MAX_AGE_S, int(value or 0))
    return known[1]


# --- topic writer ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _OpenBatch:
    """Records of one partition, gathered until they fill a batch."""

    records: list[Records] = field(default_factory=list)
    row_count: int = 0
    size_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.size_bytes + len(self.records) * PIECE_BYTES

    def add(self, piece: Records, size_bytes: int) -> None:
        self.records.append(piece)
        self.row_count += piece.row_count
        self.size_bytes += size_bytes

    def own(self) -> None:
        """Copy the last of ``records`` into new memory, so that its Arrow batch can be freed.

        If there are many small items, the copy also includes preceding items, as long as they have no more
        rows than the items after them together.
        """
        last = [self.records.pop()]
        row_count = last[0].row_count
        if self.size_bytes < len(self.records) * SMALL_PIECE_BYTES:
            while self.records and self.records[-1].row_count <= row_count:
                last.append(self.records.pop())
                row_count += last[-1].row_count
        self.records.append(joined(last[::-1]).copy())

    def has_room(self, row_count: int, size_bytes: int, limit_records: int, limit_bytes: int) -> bool:
        return self.size_bytes + size_bytes <= limit_bytes and self.row_count + row_count <= limit_records


class BatchSender(Protocol):
    """The methods of a producer that TopicWriter uses."""

    def partitions_for(self, topic: str) -> list[Any]: ...
    def queue_batch(self, topic: str, partition: int, batch: RecordBatchBuilder) -> Any: ...


class TopicWriter:
    """Gathers partition slices into batches within the topic's size limit, and passes them to the producer.

    Invariant: in each partition, records with a key or a given partition are sent in input order. Records
    with neither are sent in input order among themselves. In a topic with one partition, all records are sent
    in input order.
    """

    def __init__(
        self, producer: BatchSender, columns: SinkColumns, options: SinkOptions, task: TaskIdentity
    ) -> None:
        self._producer = producer
        self._options = options
        self._config = producer_config(_settings(options))
        self._overhead = record_overhead(columns)
        self._first = task.partition + task.batch_id  # tasks of one batch begin with different partitions
        self._counts: dict[str, int] = {}
        self._chosen: dict[str, int] = {}  # the partition for rows without a key, before _first is added
        self._mixed: set[str] = set()  # topics with rows with and without keys in the current Arrow batch
        self._limit_bytes: dict[str, int] = {}
        self._limit_records = self._config.batch_max_messages or MAX_RECORDS_PER_BATCH
        self._open: dict[tuple[str, int], _OpenBatch] = {}
        self._open_bytes = 0
        self._partitioner: Partitioner = make_partitioner(options.partitioner, system_rng())
        self._splitter = Splitter(
            columns, options.topic, options.partitioner, self._partition_count, self._keyless_among_others
        )

    def write_all(self, batches: Iterator[Any]) -> int:
        """Pass all rows to the producer and return their number. They are not acknowledged yet."""
        rows = 0
        for batch in batches:
            self.write(batch)
            rows += batch.num_rows
        self.flush()
        return rows

    def write(self, batch: Any) -> None:
        """Add the rows of a pyarrow.RecordBatch."""
        now_ms = time.time_ns() // 1_000_000
        for slice_ in self._splitter.split(batch, now_ms):
            self._add(slice_)
        for topic in self._mixed:
            self._go_on(topic, batch.num_rows)
        self._mixed.clear()
        while self._open_bytes > MAX_OPEN_BYTES:
            self._send(*max(self._open, key=lambda key: self._open[key].held_bytes))

    def flush(self) -> None:
        """Pass all open batches to the producer."""
        while self._open:
            self._send(*next(iter(self._open)))

    def _add(self, slice_: PartitionSlice) -> None:
        topic, partition, records = slice_
        limit_bytes = self._limit(topic) - BATCH_BYTES
        waiting = self._open.get((topic, partition))
        limit_records = self._limit_records
        for piece, size_bytes in cut(records, limit_bytes, limit_records, self._overhead):
            if waiting is not None and not waiting.has_room(
                piece.row_count, size_bytes, limit_records, limit_bytes
            ):
                self._send(topic, partition)
                waiting = None
            if waiting is None:
                waiting = self._open[topic, partition] = _OpenBatch()
            self._open_bytes -= waiting.held_bytes
            waiting.add(piece, size_bytes)
            self._open_bytes += waiting.held_bytes
        if waiting is None:
            return
        if waiting.size_bytes * 4 > limit_bytes * 3:
            self._send(topic, partition)
        else:
            self._open_bytes -= waiting.held_bytes
            waiting.own()
            self._open_bytes += waiting.held_bytes

    def _send(self, topic: str, partition: int) -> None:
        waiting = self._open.pop((topic, partition))
        self._open_bytes -= waiting.held_bytes
        if partition == NO_PARTITION:
            partition = self._keyless(topic)
            self._go_on(topic, sum(records.row_count for records in waiting.records))
            if (topic, partition) in self._open:  # the rows of that open batch precede these
                self._send(topic, partition)
        builder = RecordBatchBuilder(codec=self._config.codec, level=self._config.compression_level)
        now_ms = time.time_ns() // 1_000_000
        values, keys, timestamps, headers = joined(waiting.records)
        builder.extend_arrow(values, keys, now_ms if timestamps is None else timestamps, headers)
        self._producer.queue_batch(topic, partition, builder)

    # --- topics ------------------------------------------------------------------------------------

    def _partition_count(self, topic: str) -> int:
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = len(self._producer.partitions_for(topic))
        return count

    def _limit(self, topic: str) -> int:
        limit_bytes = self._limit_bytes.get(topic)
        if limit_bytes is None:
            limit_bytes = min(self._config.max_request_size, _max_message_bytes(self._options, topic))
            self._limit_bytes[topic] = limit_bytes
        return limit_bytes

    def _keyless(self, topic: str) -> int:
        """Return the partition that the partitioner now chooses for records without a key."""
        count = self._partition_count(topic)
        chosen = self._partitioner.partition(topic, None, None, count)
        assert chosen is not None, "only a function may leave the choice"
        self._chosen[topic] = chosen
        return (chosen + self._first) % count

    def _keyless_among_others(self, topic: str) -> int:
        if (topic, NO_PARTITION) in self._open:  # the rows of that open batch precede the current ones
            self._send(topic, NO_PARTITION)
        self._mixed.add(topic)
        return self._keyless(topic)

    def _go_on(self, topic: str, record_count: int) -> None:
        """Report ``record_count`` records to the partitioner, so that it may choose another partition.

        The number may include records with a key from the same Arrow batch.
        """
        self._partitioner.on_batch_closed(topic, self._chosen[topic], record_count)
