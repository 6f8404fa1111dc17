"""Producer: the public class.

``accumulator`` decides which batches are sent and retried, ``placement`` chooses a record's batch, and
``sender`` sends the requests. ``send_nowait`` handles the common case (a record of bytes, and an open batch
with room) in one function without calls into other modules. ``_put`` handles all other cases.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, Unpack

from kafkalite.client.config import BootstrapServers, ProducerSettings, merged, producer_config
from kafkalite.client.producer.bulk_sender import AnyBatch, BulkSender
from kafkalite.client.producer.columns import RecordColumns
from kafkalite.client.producer.delivery import (
    BatchDelivery,
    BatchMetadata,
    Delivery,
    DeliveryCallback,
    wait_done,
)
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
    KafkaliteError,
    RecordTooLargeError,
    TransactionStateError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import GroupMetadata, Headers, RecordMetadata, TopicPartition
from kafkalite.records.builder import own_bytes
from kafkalite.records.columns import checked_headers
from kafkalite.records.partitioners import PartitionFunction, make_partitioner
from kafkalite.rng import Rng, system_rng

logger = logging.getLogger(__name__)

PartitionerChoice = str | PartitionFunction
"""``roundrobin``, ``sticky``, ``random``, ``hash``, or a function that returns a partition.

The function receives (topic, key, value, partition count).
"""

RecordHeaders = Sequence[tuple[str, bytes | None]]

# After an exception in the body of ``async with``, accepted records may be delivered for this time. It is
# enough for a healthy cluster, and it does not delay the exception or Ctrl-C much if the cluster fails.
CLOSE_AFTER_ERROR_MS: Final = 1_000


class Producer:
    """Sends records to topics.

    ::

        async with Producer("localhost:9092") as producer:
            metadata = await producer.send("orders", b"...", key=b"42")     # acknowledged
            delivery = producer.send_nowait("orders", b"...")               # batched; await it or flush()

    Settings are those of ``config.PRODUCER_OPTIONS``, given as keyword arguments or, by dotted name, in
    ``config``. Keyword arguments take precedence.

    No failure is silent: ``flush`` and ``close`` raise DeliveryFailedError for failed records that were not
    awaited and had no callback. Leaving ``async with`` normally flushes and closes. After an exception,
    accepted records may be delivered for CLOSE_AFTER_ERROR_MS, and a note on the exception gives the number
    of undelivered records.

    With a ``transactional_id``, records are sent only in transactions (see ``transaction``): consumers with
    ``read_committed`` receive either all records of a transaction or none.
    """

    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        partitioner: PartitionerChoice | None = None,
        on_delivery: DeliveryCallback | None = None,
        config: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        named = partitioner if isinstance(partitioner, str) else None
        self.config = producer_config(
            merged(config, {"bootstrap_servers": bootstrap_servers, "partitioner": named, **settings})
        )
        rng = rng or system_rng()
        chosen = partitioner if callable(partitioner) else self.config.partitioner
        self._sender = Sender(self.config, on_delivery=on_delivery, on_change=self._on_change, rng=rng)
        self._placement = Placement(self._sender, make_partitioner(chosen, rng))
        self._bulk = BulkSender(self._sender, self._placement, self.check_may_send)
        self._transactions: TransactionManager | None = None
        if self.config.transactional_id is not None:
            self._transactions = self._manager(self.config.transactional_id)
        self._time_ns = time.time_ns if clock is None else lambda: clock.wall_ms() * 1_000_000
        self._state = "new"
        self._sends_alone = False  # False until the producer is open
        # Read by the fast path. The dictionaries live as long as the placement; closing empties them.
        self._keyless = self._placement.keyless
        self._keyed = self._placement.keyed

    def _manager(self, transactional_id: str) -> TransactionManager:
        return TransactionManager(self._sender, self._placement, transactional_id)

    def __repr__(self) -> str:
        brokers = len(self._sender.cluster.metadata.addresses)
        waiting = len(self._sender.accumulator.incomplete)
        topics = len(self._placement.topics)
        return f"<Producer {self._state}, {topics} topics @ {brokers} brokers, {waiting} batches waiting>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_state", "new") == "open":
            _warn(f"{self!r} was never closed; use 'async with'", ResourceWarning, source=self, stacklevel=2)

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect to the cluster. ``async with`` calls this. Raises ConnectionFailedError.

        With a ``transactional_id``, abort the open transaction of the id's previous producer and fence that
        producer. Raises the coordinator's BrokerError, and RequestTimeoutError after default.api.timeout.ms.
        """
        if self._state != "new":
            raise ClientClosedError(f"a producer starts once; this one is {self._state}")
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
        self._sends_alone = self._placement.sends_alone and self._transactions is None
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

        After ``timeout_ms`` (None: the delivery.timeout.ms of each record), undelivered records fail with
        ClientClosedError. An open transaction is aborted. Raises DeliveryFailedError for failed records whose
        errors were not seen.
        """
        if self._state != "open":
            return
        self._state = "closing"
        self._sends_alone = False
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                if self._transactions is not None:
                    await self._close_transactions(self._transactions)
                await self._wait_all()
        except TimeoutError:
            pass
        finally:
            self._state = "closed"
            error = ClientClosedError("the producer was closed before the broker acknowledged the record")
            self._placement.fail_all_parked(error)
            await self._sender.close(error)
            self._keyless.clear()
            self._keyed.clear()
        self._sender.failures.raise_unseen()

    async def flush(self) -> None:
        """Send all records accepted so far without lingering, and return when they are acknowledged.

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
            hint = "open it with 'async with' or start()" if self._state in {"new", "starting"} else ""
            raise ClientClosedError(f"the producer is {self._state}", hint=hint)

    def check_may_send(self, number: int = 0) -> int:
        """Raise the error that a send would raise now: ClientClosedError, or a transaction error.

        Returns the number of the open transaction, or 0 without a transactional_id. To check after a wait
        that the same transaction is open, pass this ``number``; 0 omits the check.
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
        exception or a cancellation in the block also aborts the transaction. Raises ProducerFencedError if
        this producer is fenced, and RequestTimeoutError if the outcome is unknown.
        """
        manager = self._transactional()
        return Transaction(manager, self.begin_transaction, self.commit_transaction, self.abort_transaction)

    async def begin_transaction(self) -> None:
        """Begin a transaction. Raises ProducerFencedError, TransactionStateError."""
        transactions = self._transactional()
        self._check_open()
        await transactions.begin()
        self._sends_alone = self._placement.sends_alone

    async def commit_transaction(self) -> None:
        """Deliver all records of the transaction and commit it.

        Raises TransactionAbortableError if a part failed: nothing is committed, and ``abort_transaction``
        must be called. Raises ProducerFencedError, TransactionStateError. Raises RequestTimeoutError if the
        outcome is unknown: call this method again, which never commits twice.
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
        the consumer was expelled from its group, and the same errors as ``commit_transaction``. After any
        error, the transaction can only be aborted.
        """
        transactions = self._transactional()
        self._check_open()
        await transactions.send_offsets(offsets, group)

    def _transactional(self) -> TransactionManager:
        if self._transactions is None:
            raise TransactionStateError(
                "this producer has no transactions", hint="give it a transactional_id of its own"
            )
        return self._transactions

    # --- one record ----------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> RecordMetadata:
        """Send one record and return when it is acknowledged according to ``acks``.

        Waits up to max.block.ms for room in the buffer, and then raises BufferFullError. Raises the
        BrokerError or DeliveryTimeoutError of its batch. Cancelling the wait does not cancel the record.
        """
        if (
            self._sends_alone
            and partition is None
            and timestamp_ms is None
            and not headers
            and value.__class__ is bytes
            and (key is None or key.__class__ is bytes)
        ):
            batch = self._placement.send_alone(topic, value, key, self._time_ns() // 1_000_000)
            if batch is not None:
                return await Delivery(batch, 0)
        while True:
            try:
                delivery = self.send_nowait(
                    topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
                )
            except BufferFullError:
                number = self.check_may_send()
                await self.wait_for_room()
                self.check_may_send(number)
            else:
                return await delivery

    def send_nowait(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: RecordHeaders = (),
    ) -> Delivery:
        """Add one record to its partition's batch, which is sent after linger.ms or when it is full.

        Returns without waiting. Raises BufferFullError (see ``wait_for_room``), RecordTooLargeError,
        ClientClosedError, RecordError. Later failures are raised by the delivery, or by flush() and close().
        """
        if partition is None and timestamp_ms is None and not headers and value.__class__ is bytes:
            try:
                if key is None:
                    batch: Any = self._keyless[topic]
                    size_bytes = batch.size_bytes + len(value) + _OVERHEAD
                else:
                    batch = self._keyed[topic][key].open
                    size_bytes = batch.size_bytes + len(value) + len(key) + _OVERHEAD
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
        return self._put(topic, value, key, partition, timestamp_ms, headers)

    def _put(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int | None,
        headers: RecordHeaders,
    ) -> Delivery:
        """Implement ``send_nowait`` for all cases, such as unknown topics, full batches and other buffers."""
        if self._state != "open" or self._transactions is not None:
            self.check_may_send()
        if value.__class__ is not bytes:
            value = own_bytes(value, "value")
        if key is not None and key.__class__ is not bytes:
            key = own_bytes(key, "key")
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
        """Wait for room for one batch. Raises BufferFullError after ``timeout_ms`` (None: max.block.ms)."""
        self._check_open()
        await self._sender.wait_for_bytes(self.config.batch_size, timeout_ms)

    # --- many records --------------------------------------------------------------------------

    async def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> list[BatchMetadata]:
        """Send columns of records, and return when all are acknowledged.

        This is the fast path for many records: they become batches of up to max.request.size without an
        object per record. Keyless records go to one partition per batch, and keyed records to the partition
        of their key, in order. Waits for room as ``send`` does. Returns one entry per batch. Raises
        RecordError and RecordTooLargeError before anything is sent. If a batch fails, waits until all batches
        are done and raises the first error; the other batches are then in the log.
        """
        number = self.check_may_send()
        if timestamps_ms is None:
            timestamps_ms = self._time_ns() // 1_000_000
        columns = RecordColumns(values, keys, timestamps_ms, headers)
        columns.check()
        if not len(columns):
            return []
        return await self._bulk.send_columns(topic, columns, partition, number)

    async def send_batch(self, topic: str, partition: int, batch: AnyBatch) -> BatchMetadata:
        """Send one prebuilt batch and return when it is acknowledged.

        ``batch`` is sent unchanged, except for the producer identity, which is replaced in a copy. The caller
        must not change its buffer until this method returns. Raises CorruptBatchError if ``batch`` is not a
        record batch, RecordTooLargeError if it exceeds max.request.size, and the same errors as ``send``.
        """
        return await (await self.queue_batch(topic, partition, batch))

    async def queue_batch(self, topic: str, partition: int, batch: AnyBatch) -> BatchDelivery:
        """Queue one prebuilt batch, and return when buffer.memory has room for it.

        The delivery, flush() and close() report its result. Batches of one partition are sent in the order of
        the calls, if each call returns before the next one.
        """
        return BatchDelivery(await self._bulk.queue(topic, partition, batch))


# As module globals, they cost the fast path only one cached lookup.
_OVERHEAD: Final = RECORD_OVERHEAD_BYTES
_new: Final = object.__new__
