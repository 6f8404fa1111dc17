"""Producer: the public class.

``accumulator`` decides which batches are sent and retried, ``placement`` chooses a record's batch, and
``sender`` sends the requests. ``send_nowait`` handles the common case (a record of bytes, and an open batch
with room) in one function without calls into other modules. ``_put`` handles all other cases.
"""

# Long because Producer is one class: its methods repeat the arguments of a record.

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Self, Unpack, cast

from kafkalite.client.arguments import checked_int, checked_name, checked_number, takes_one
from kafkalite.client.config import (
    PRODUCER_OPTIONS,
    BootstrapServers,
    ConfigSource,
    ProducerSettings,
    merged,
    producer_config,
)
from kafkalite.client.forgotten import Forgettable, guard
from kafkalite.client.interceptors import ProducerInterceptor
from kafkalite.client.producer.bulk_sender import AnyBatch, BulkSender
from kafkalite.client.producer.columns import RecordColumns
from kafkalite.client.producer.delivery import (
    BatchDelivery,
    BatchMetadata,
    Delivery,
    DeliveryCallback,
    wait_done,
)
from kafkalite.client.producer.outgoing import Outgoing
from kafkalite.client.producer.pending_batch import RECORD_OVERHEAD_BYTES, record_size
from kafkalite.client.producer.placement import OutgoingRecord, Placement
from kafkalite.client.producer.sender import ProducerStatistics, Sender
from kafkalite.client.producer.transaction_manager import (
    GroupConsumer,
    Offsets,
    Transaction,
    TransactionManager,
)
from kafkalite.clock import Clock
from kafkalite.errors import (
    BufferFullError,
    ClientClosedError,
    ClientError,
    KafkaliteError,
    RecordTooLargeError,
    TransactionStateError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import GroupMetadata, ProducerRecord, RecordHeaders, RecordMetadata, TopicPartition
from kafkalite.records.builder import own_bytes
from kafkalite.records.columns import checked_headers
from kafkalite.records.compression import check_installed
from kafkalite.records.partitioners import PartitionFunction, make_partitioner
from kafkalite.rng import Rng, system_rng
from kafkalite.serde import AnySerializer, K, V

logger = logging.getLogger(__name__)

PartitionerChoice = str | PartitionFunction
"""The name of a partitioner (``records.partitioners``), or a function that returns a partition.

The function receives (topic, key, value, partition count).
"""

# After an exception in the body of ``async with``, accepted records may be delivered for this time. It is
# enough for a healthy cluster, and it does not delay the exception or Ctrl-C much if the cluster fails.
CLOSE_AFTER_ERROR_MS: Final = 1_000


class Producer(Generic[K, V]):
    """Sends records to topics.

    ::

        async with Producer("localhost:9092") as producer:
            metadata = await producer.send("orders", b"...", key=b"42")     # acknowledged
            delivery = producer.send_nowait("orders", b"...")               # batched; await it or flush()

    The settings are those of ``config.PRODUCER_OPTIONS``. They are given as keyword arguments, or in
    ``config`` as a mapping from dotted names such as "linger.ms". If ``config`` is "environment", they are
    read from variables such as ``KAFKALITE_CLIENT_LINGER_MS``. Keyword arguments take precedence.

    ``key_serializer`` and ``value_serializer`` are functions that return bytes, or objects such as those of
    ``kafkalite.serde``; without them, keys and values are bytes. ``interceptors`` are passed every record
    before it is serialized, and later its result. Of prebuilt batches (``send_batch``, ``queue_batch``), they
    are passed only the results. ``send`` also takes a ``ProducerRecord`` instead of a topic and a value.

    ``flush`` and ``close`` raise DeliveryFailedError for records that failed, except those that were awaited
    or had a callback, and those whose transaction was aborted. Leaving ``async with`` normally delivers all
    records and closes. After an exception, accepted records may be delivered for CLOSE_AFTER_ERROR_MS; if
    some are not, a note on the exception gives their number. A producer that is never closed is closed at the
    end of ``asyncio.run``, with a ResourceWarning.

    With a ``transactional_id``, records are sent only in transactions (see ``transaction``): consumers with
    ``read_committed`` receive either all records of a transaction or none.
    """

    _opener: str = "'async with'"  # the statement that opens it, for hints

    @takes_one('Producer("{servers}"), and send("{topic}", ...) with it')
    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        partitioner: PartitionerChoice | None = None,
        on_delivery: DeliveryCallback | None = None,
        key_serializer: AnySerializer[K] | None = None,
        value_serializer: AnySerializer[V] | None = None,
        interceptors: Sequence[ProducerInterceptor] = (),
        config: ConfigSource | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        named = None if callable(partitioner) else partitioner
        self.config = producer_config(
            merged(
                config,
                {"bootstrap_servers": bootstrap_servers, "partitioner": named, **settings},
                PRODUCER_OPTIONS,
            )
        )
        if not (on_delivery is None or callable(on_delivery)):
            raise ClientError(f"on_delivery {on_delivery!r} is not a function")
        rng = rng or system_rng()
        chosen = partitioner if callable(partitioner) else self.config.partitioner
        self._sender = Sender(self.config, on_delivery=on_delivery, on_change=self._on_change, rng=rng)
        chooser = make_partitioner(
            chosen, rng, switch_ms=self.config.partitioner_switch_ms, now_ms=self._sender.now_ms
        )
        self._placement = Placement(self._sender, chooser)
        self._bulk = BulkSender(self._sender, self._placement, self.check_may_send)
        self._transactions: TransactionManager | None = None
        if self.config.transactional_id is not None:
            self._transactions = self._manager(self.config.transactional_id)
        self._time_ns = time.time_ns if clock is None else lambda: clock.wall_ms() * 1_000_000
        self._state = "new"
        self._guard: asyncio.Task[None] | None = None
        self._sends_alone = False  # False until the producer is open
        # The dictionaries that the fast path reads. They belong to the placement; closing empties them.
        self._keyless: dict[Any, Any] = self._placement.keyless
        self._keyed: dict[Any, Any] = self._placement.keyed
        self.outgoing: Outgoing | None = None  #: None without serializers and interceptors
        if key_serializer is not None or value_serializer is not None or interceptors:
            self.outgoing = Outgoing(key_serializer, value_serializer, interceptors)
            self._sender.on_done = self.outgoing.on_done
            self._keyless, self._keyed = {}, {}  # no record takes the fast path

    def _manager(self, transactional_id: str) -> TransactionManager:
        return TransactionManager(self._sender, self._placement, transactional_id)

    def __repr__(self) -> str:
        brokers = len(self._sender.cluster.metadata.addresses)
        waiting = len(self._sender.accumulator.incomplete)
        topics = len(self._placement.topics)
        return f"<Producer {self._state}, {topics} topics @ {brokers} brokers, {waiting} batches waiting>"

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect to the cluster. ``async with`` calls this. Raises ConnectionFailedError, and
        MissingExtraError if the package of the compression type is not installed.

        With a ``transactional_id``, abort the open transaction of the id's previous producer and fence that
        producer. Raises the coordinator's BrokerError, and RequestTimeoutError after default.api.timeout.ms.
        """
        if self._state != "new":
            raise ClientClosedError(f"a producer starts once; this one is {self._state}")
        check_installed(self.config.codec)
        self._state = "starting"
        try:
            await self._sender.start()
            if self._transactions is not None:
                await self._transactions.initialize()
        except BaseException as error:
            self._state = "closed"
            if self._transactions is not None:
                await self._sender.close(ClientClosedError(f"the producer did not open: {error}"))
            raise
        self._state = "open"
        self._guard = guard(Forgettable("producer", self, lambda: self.is_open, self.close, self.undelivered))
        try:
            await asyncio.sleep(0)  # the guard begins to wait; a task that has not begun can't handle its end
        except BaseException:
            await self.close(timeout_ms=0)
            raise
        self._sends_alone = self._placement.sends_alone and not (self._transactions or self.outgoing)
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close(timeout_ms=CLOSE_AFTER_ERROR_MS)
        except KafkaliteError as undelivered:
            error.add_note(f"kafkalite: {undelivered}")

    async def close(self, timeout_ms: int | None = None) -> None:
        """Deliver all accepted records, then close the connections. May be called twice.

        After ``timeout_ms``, undelivered records fail with ClientClosedError. If it is None, only the
        timeouts of the records themselves limit the time. An open transaction is aborted, and its undelivered
        records fail. Raises DeliveryFailedError for failed records whose errors were not seen.
        """
        if self._state != "open":
            return
        limit_s = None if timeout_ms is None else checked_number("timeout_ms", timeout_ms) / 1000
        self._state = "closing"
        self._sends_alone = False
        try:
            async with asyncio.timeout(limit_s):
                if self._transactions is not None:
                    await self._close_transactions(self._transactions)
                await self._wait_all()
                await self._sender.wait_answered()
        except TimeoutError:
            pass
        finally:
            self._state = "closed"
            error = ClientClosedError("the producer was closed before the broker acknowledged the record")
            self._placement.fail_all_parked(error)
            await self._sender.close(error)
            self._keyless.clear()
            self._keyed.clear()
            if self._guard is not None and self._guard is not asyncio.current_task():
                self._guard.cancel()
                await asyncio.wait({self._guard})
        self._sender.failures.raise_unseen()

    @property
    def is_open(self) -> bool:
        """Whether records are accepted: after ``start`` and before ``close``."""
        return self._state == "open"

    def undelivered(self) -> dict[str, int]:
        """Return the number of records of each topic that are neither acknowledged nor failed."""
        counts = Counter(self._placement.parked_counts())
        for batch in self._sender.accumulator.incomplete:
            counts[batch.topic] += len(batch.values) or batch.record_count
        return dict(counts)

    async def stop(self) -> None:
        """Close the producer, as ``close`` does. This is aiokafka's name."""
        await self.close()

    async def flush(self) -> None:
        """Send all records accepted so far without lingering, and return when all are acknowledged or failed.

        Raises DeliveryFailedError for failed records that were not awaited and had no callback.
        """
        self._check_open()
        await self._wait_all()
        self._sender.failures.raise_unseen()

    async def _wait_all(self) -> None:
        while parked := self._placement.parked_batches:
            await wait_done(parked[0])
        accumulator = self._sender.accumulator
        accumulator.close_all(self._sender.now_ms())
        self._sender.drain()
        for batch in list(accumulator.incomplete):
            await wait_done(batch)

    async def _close_transactions(self, transactions: TransactionManager) -> None:
        try:
            async with asyncio.timeout(CLOSE_AFTER_ERROR_MS / 1000):
                await transactions.close()
        except (KafkaliteError, TimeoutError) as error:
            logger.info(
                "closed with an open transaction, which its coordinator will abort %s",
                Fields(transactional_id=self.config.transactional_id, error=error or "no response in time"),
            )

    def statistics(self) -> ProducerStatistics:
        return self._sender.statistics()

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of ``topic`` in order. Raises its BrokerError if it does not exist."""
        self._check_open()
        return [queue.tp for queue in (await self._placement.topic(topic)).queues]

    def _check_open(self) -> None:
        if self._state != "open":
            hint = f"open it with {self._opener} or start()" if self._state in {"new", "starting"} else ""
            raise ClientClosedError(f"the producer is {self._state}", hint=hint)

    def check_may_send(self, number: int = 0) -> int:
        """Raise the error that a send would raise now: ClientClosedError, or a transaction error.

        Returns the number of the open transaction, or 0 without a transactional_id. After a wait, pass this
        result as ``number``, to check that the same transaction is open. 0 omits that check.
        """
        self._check_open()
        return 0 if self._transactions is None else self._transactions.state.check_may_send(number)

    def _on_change(self) -> None:
        """Place parked records and send the batches that have become ready.

        Called when metadata arrives, or when a connection opens, closes or accepts data again.
        """
        if self._state in {"open", "closing"}:
            self._placement.on_cluster_change()
            self._sender.on_cluster_change()

    # --- transactions --------------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Return a transaction for ``async with``.

        Consumers with ``read_committed`` receive its records after it is committed.

        ::

            async with producer.transaction() as transaction:
                producer.send_nowait("orders", b"...")
                await transaction.send_offsets(consumer)

        The end of the block commits, or, if a record failed, aborts and raises TransactionAbortableError. An
        exception or a cancellation in the block also aborts the transaction. The end of the block raises
        ProducerFencedError if this producer is fenced, and RequestTimeoutError if the outcome is unknown.
        """
        manager = self._transactional()
        return Transaction(manager, self.begin_transaction, self.commit_transaction, self.abort_transaction)

    async def begin_transaction(self) -> None:
        """Begin a transaction. If an abort has not ended, finish it first.

        Raises ProducerFencedError, TransactionStateError, and RequestTimeoutError.
        """
        transactions = self._transactional()
        self._check_open()
        await transactions.begin()
        self._sends_alone = self._placement.sends_alone and not self.outgoing

    async def commit_transaction(self) -> None:
        """Deliver all records of the transaction and commit it.

        Raises TransactionAbortableError if a record or ``send_offsets`` has failed: nothing is committed, and
        ``abort_transaction`` must be called. Raises ProducerFencedError, TransactionStateError. Raises
        RequestTimeoutError if the outcome is unknown: call this method again, which never commits twice.
        """
        transactions = self._transactional()
        self._check_open()
        self._sends_alone = False
        await transactions.commit(self._wait_all)

    async def abort_transaction(self) -> None:
        """Abort the transaction. Its records are never visible to ``read_committed`` consumers.

        Records that were not sent yet are not sent. Raises ProducerFencedError, TransactionStateError, and
        RequestTimeoutError, after which it may be called again.
        """
        transactions = self._transactional()
        self._check_open()
        self._sends_alone = False
        await transactions.abort()

    async def send_offsets(
        self, offsets: GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        """Commit consumed offsets as part of the open transaction (KIP-447).

        ``offsets`` is a consumer, or a mapping of partitions to the next offset to read. The consumer must
        have a group and no auto-commit; its own positions are sent. With a mapping, ``group`` is the result
        of ``Consumer.group_metadata()`` or the name of a group without members. Raises CommitFailedError if
        the consumer was expelled from its group, and the same errors as ``commit_transaction``. If the
        request fails or is cancelled, the transaction cannot be committed.
        """
        transactions = self._transactional()
        self._check_open()
        await transactions.send_offsets(offsets, group)

    async def send_offsets_to_transaction(
        self, offsets: GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        """Commit consumed offsets in the transaction, as ``send_offsets`` does. This is Kafka's name."""
        await self.send_offsets(offsets, group)

    def _transactional(self) -> TransactionManager:
        if self._transactions is None:
            raise TransactionStateError(
                "this producer has no transactions", hint="give it a transactional_id of its own"
            )
        return self._transactions

    # --- one record ----------------------------------------------------------------------------

    async def send(
        self,
        topic: str | ProducerRecord,
        value: V | None = None,
        key: K | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> RecordMetadata:
        """Send one record and return when it is acknowledged according to ``acks``.

        If ``partition`` is None, the partitioner chooses the partition, by default from ``key``. If
        ``timestamp_ms`` is None, the record gets the current time. Waits up to max.block.ms for room in the
        buffer, and then raises BufferFullError. Raises the other errors of ``send_nowait``, and the
        BrokerError or DeliveryTimeoutError of its batch. Once the record is in the buffer, cancelling the
        call does not cancel the record.
        """
        if (
            self._sends_alone
            and topic.__class__ is _str
            and partition is None
            and timestamp_ms is None
            and not headers
            and value.__class__ is _bytes
            and (key is None or key.__class__ is _bytes)
        ):
            batch = self._placement.send_alone(
                cast(Any, topic), cast(Any, value), cast(Any, key), self._time_ns() // 1_000_000
            )
            if batch is not None:
                return await Delivery(batch, 0)
        put: Callable[..., Delivery] = self.send_nowait
        record: ProducerRecord | None = None
        if self.outgoing is not None or isinstance(topic, ProducerRecord):
            record = self.prepare_record(topic, value, key, partition, timestamp_ms, headers)
            topic, value, key, partition, timestamp_ms, headers = record
            put = self.put_prepared
        try:
            while True:
                try:
                    delivery = put(
                        topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
                    )
                    break
                except BufferFullError:
                    number = self.check_may_send()
                    await self.wait_for_room()
                    self.check_may_send(number)
        except KafkaliteError as error:
            self._on_refused(record, error)
            raise
        except asyncio.CancelledError:
            self._on_refused(record, ClientError("the send was cancelled while it waited for room"))
            raise
        return await delivery

    async def send_and_wait(
        self,
        topic: str | ProducerRecord,
        value: V | None = None,
        key: K | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> RecordMetadata:
        """Send one record and return when it is acknowledged, as ``send`` does. This is aiokafka's name."""
        return await self.send(
            topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
        )

    def send_nowait(
        self,
        topic: str | ProducerRecord,
        value: V | None = None,
        key: K | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> Delivery:
        """Add one record to its partition's batch, which is sent after linger.ms or when it is full.

        The arguments are those of ``send``. Returns without waiting. Raises BufferFullError (see
        ``wait_for_room``), RecordTooLargeError, ClientClosedError, RecordError, SerializationError,
        UnknownTopicOrPartitionError, and the errors of transactions. Later failures are raised by the
        delivery, or by flush() and close().
        """
        if partition is None and timestamp_ms is None and not headers and value.__class__ is _bytes:
            try:
                if key is None:
                    batch: Any = self._keyless[topic]
                    size_bytes = batch.size_bytes + len(value) + _OVERHEAD  # type: ignore[arg-type]
                else:
                    batch = self._keyed[topic][key].open
                    size_bytes = batch.size_bytes + len(value) + len(key) + _OVERHEAD  # type: ignore[arg-type]
                values = batch.values
                index = len(values)
                if size_bytes <= batch.limit_bytes and index < batch.limit_records and batch.is_plain:
                    keys = batch.keys
                    if keys is not None:
                        keys.append(key)
                    elif key is not None:
                        batch.keys = [None] * index
                        batch.keys.append(key)
                    values.append(value)
                    batch.timestamps.append(self._time_ns() // 1_000_000)
                    batch.size_bytes = size_bytes
                    delivery = _new(Delivery)
                    delivery.batch = batch
                    delivery.index = index
                    return delivery
            except (KeyError, AttributeError, TypeError):
                pass  # a new topic or key, no open batch, or a key that is not bytes; ``_put`` handles these
        if self.outgoing is None and not isinstance(topic, ProducerRecord):
            return self._put(topic, value, key, partition, timestamp_ms, headers)
        record = self.prepare_record(topic, value, key, partition, timestamp_ms, headers)
        try:
            return self._put(*record)
        except KafkaliteError as error:
            self._on_refused(record, error)
            raise

    def _on_refused(self, record: ProducerRecord | None, error: KafkaliteError) -> None:
        if self.outgoing is not None and record is not None:
            self.outgoing.on_refused(record, error)

    def prepare_record(
        self,
        topic: str | ProducerRecord,
        value: Any,
        key: Any,
        partition: int | None,
        timestamp_ms: int | None,
        headers: RecordHeaders,
    ) -> ProducerRecord:
        """Return the record to send after interceptors and serializers. Raises SerializationError."""
        if isinstance(topic, ProducerRecord):
            record = topic
        else:
            record = ProducerRecord(topic, value, key, partition, timestamp_ms, headers)
        return record if self.outgoing is None else self.outgoing.prepare(record)

    def put_prepared(
        self,
        topic: str,
        value: Any,
        key: Any,
        *,
        partition: int | None,
        timestamp_ms: int | None,
        headers: RecordHeaders,
    ) -> Delivery:
        """Add a record that ``prepare_record`` has returned. Raises the errors of ``send_nowait``.

        These errors are not reported to the interceptors: the caller either tries again or reports them.
        """
        return self._put(topic, value, key, partition, timestamp_ms, headers)

    def _put(
        self,
        topic: Any,
        value: Any,
        key: Any,
        partition: int | None,
        timestamp_ms: int | None,
        headers: RecordHeaders,
    ) -> Delivery:
        """Implement ``send_nowait`` for all cases, such as unknown topics, full batches and bytearrays."""
        if self._state != "open" or self._transactions is not None:
            self.check_may_send()
        if value.__class__ is not bytes:
            value = own_bytes(value, "value")
        if key is not None and key.__class__ is not bytes:
            key = own_bytes(key, "key")
        if topic.__class__ is not str:
            topic = checked_name("topic", topic)
        if partition is not None:
            checked_int("partition", partition)
        if timestamp_ms is not None:
            checked_int("timestamp_ms", timestamp_ms)
        pairs = checked_headers(headers) if headers else ()
        size_bytes = record_size(value, key, pairs)
        if size_bytes > self.config.max_request_size:
            raise self._too_large(topic, size_bytes)
        if timestamp_ms is None:
            timestamp_ms = self._time_ns() // 1_000_000
        record = OutgoingRecord(value, key, partition, timestamp_ms, pairs, size_bytes)
        try:
            return self._placement.put(topic, record)
        finally:
            self._sender.drain()

    def _too_large(self, topic: str, size_bytes: int) -> RecordTooLargeError:
        limit_bytes = self.config.max_request_size
        return RecordTooLargeError(
            f"a record of {size_bytes} bytes for topic {topic!r}; max.request.size is {limit_bytes}",
            hint="raise max.request.size, and the topic's max.message.bytes with it",
        )

    def refuse(self, topic: str, error: Exception) -> Delivery:
        """Return a delivery that has already failed. flush() and close() report it like any other failure."""
        return self._placement.refuse(topic, error)

    async def wait_for_room(self, timeout_ms: int | None = None) -> None:
        """Wait until buffer.memory has room for a batch, or for the last refused record if that is larger.

        Raises BufferFullError after ``timeout_ms`` (None: max.block.ms).
        """
        self._check_open()
        if timeout_ms is not None:
            checked_number("timeout_ms", timeout_ms)
        accumulator = self._sender.accumulator
        needed, accumulator.refused_bytes = max(self.config.batch_size, accumulator.refused_bytes), 0
        await self._sender.wait_for_bytes(needed, timeout_ms)

    # --- many records --------------------------------------------------------------------------

    async def send_many(
        self,
        topic: str,
        values: Sequence[V | None],
        keys: Sequence[K | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        headers: Sequence[RecordHeaders] | None = None,
    ) -> list[BatchMetadata]:
        """Send columns of records, and return when all are acknowledged.

        This is the fast path for many records: they become batches of up to max.request.size. If
        ``partition`` is None, the partitioner chooses the partitions; by default, keyless records go to one
        partition per batch. The records of a partition keep their order. Waits for room as ``send`` does.
        Returns one entry per batch. Raises RecordError for invalid records, and RecordTooLargeError. If a
        batch cannot be sent or fails, waits for the batches sent so far and raises the error; some of these
        batches may be in the log.
        """
        number = self.check_may_send()
        if timestamps_ms is None:
            timestamps_ms = self._time_ns() // 1_000_000
        if partition is not None:
            checked_int("partition", partition)
        columns = RecordColumns(cast(Any, values), cast(Any, keys), timestamps_ms, headers)
        columns.check()
        if not len(columns):
            return []
        if self.outgoing is not None:
            columns = self.outgoing.prepare_columns(topic, columns, partition)
        return await self._bulk.send_columns(topic, columns, partition, number)

    async def send_batch(self, topic: str, partition: int, batch: AnyBatch) -> BatchMetadata:
        """Send one prebuilt batch and return when it is acknowledged.

        ``batch`` is sent unchanged, except for the producer identity and the transactional flag, which are
        replaced in a copy. The caller must not change its buffer until this method returns. Raises
        CorruptBatchError if the header is invalid, RecordTooLargeError if ``batch`` exceeds max.request.size,
        ClientError if ``batch`` has the wrong type, and the same errors as ``send``.
        """
        return await (await self.queue_batch(topic, partition, batch))

    async def queue_batch(self, topic: str, partition: int, batch: AnyBatch) -> BatchDelivery:
        """Queue one prebuilt batch, and return when buffer.memory has room for it.

        The arguments and errors are those of ``send_batch``, except that a failure of the batch is raised by
        the delivery, or by flush() and close(). Batches of one partition are sent in the order of the calls,
        if each call returns before the next one.
        """
        return BatchDelivery(await self._bulk.queue(topic, partition, batch))


# As module globals, they cost the fast path only one cached lookup.
_OVERHEAD: Final = RECORD_OVERHEAD_BYTES
_new: Final = object.__new__
_str: Final[Any] = str
_bytes: Final[Any] = bytes  # Any, because a type checker knows only the types K and V
