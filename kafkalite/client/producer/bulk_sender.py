"""Sends many records at once: columns of records, or prebuilt batches.

Every call waits for room in buffer.memory. Within a call, the records of each partition keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kafkalite.client.arguments import checked_int
from kafkalite.client.producer.columns import RecordColumns, split_by_partition, split_by_size
from kafkalite.client.producer.delivery import BatchDelivery, BatchMetadata, wait_done
from kafkalite.client.producer.pending_batch import Encoded, PendingBatch
from kafkalite.client.producer.placement import Placement, TopicQueues
from kafkalite.client.producer.sender import Sender
from kafkalite.errors import ClientError, RecordTooLargeError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.header import parse_header

AnyBatch = RecordBatchBuilder | RecordBatch | Encoded
"""A built batch, the bytes of a batch, or a builder."""


class BulkSender:
    """Sends columns and batches.

    After each wait for metadata or for room in the buffer, calls ``Producer.check_may_send`` with the
    transaction number that it returned before the wait.
    """

    def __init__(self, sender: Sender, placement: Placement, check_may_send: Callable[[int], int]) -> None:
        self._sender = sender
        self._placement = placement
        self._check_may_send = check_may_send
        self.config = sender.config

    async def send_columns(
        self, topic: str, columns: RecordColumns, partition: int | None, number: int
    ) -> list[BatchMetadata]:
        """Send columns of records as ``Producer.send_many`` does.

        ``number`` is the result of the caller's call of ``Producer.check_may_send``.
        """
        plan: list[tuple[int | None, RecordColumns]] = [(partition, columns)]
        batches: list[PendingBatch] = []
        try:
            target = await self._placement.topic(topic)
            self._check_may_send(number)
            try:
                plan = self._plan(target, columns, partition)
            except (TypeError, ValueError, AttributeError):
                columns.check_items()  # checking before would read every record twice
                raise
            for chosen, part in plan:
                encoded = build_batch(
                    part.values,
                    part.keys,
                    part.timestamps_ms,
                    part.headers,
                    codec=self.config.codec,
                    level=self.config.compression_level,
                    is_sealed=not self.config.enable_idempotence,  # else sealed when the sequence is known
                )
                if chosen is None:
                    chosen = self._placement.next_partition(target, len(part))
                batches.append(
                    await self._send_built(topic, chosen, encoded, len(part), part.timestamps_ms, is_own=True)
                )
        except BaseException as error:
            if self._sender.on_done is not None:
                cancelled = ClientError("send_many was cancelled before it sent the record")
                reason = error if isinstance(error, Exception) else cancelled
                for chosen, part in plan[len(batches) :]:
                    self._sender.on_done(_refused(topic, chosen, part, reason))
            raise
        finally:
            for batch in batches:
                await wait_done(batch)
        for batch in batches:
            batch.observe()
        return [BatchDelivery(batch).result() for batch in batches]

    async def queue(self, topic: str, partition: int, batch: AnyBatch) -> PendingBatch:
        """Queue one prebuilt batch as ``Producer.queue_batch`` does, and return its PendingBatch."""
        number = self._check_may_send(0)
        encoded: Encoded
        is_own = isinstance(batch, RecordBatchBuilder)
        if isinstance(batch, RecordBatchBuilder):
            encoded = batch.build()
        elif isinstance(batch, RecordBatch):
            encoded = batch.buffer
        elif isinstance(batch, bytes | bytearray | memoryview):
            encoded = batch
        else:
            raise ClientError(
                f"{type(batch).__name__} is not a record batch",
                hint="pass a RecordBatchBuilder, a RecordBatch, or the bytes of a batch",
            )
        header = parse_header(encoded)
        checked_int("partition", partition)
        if len(encoded) > self.config.max_request_size:
            raise RecordTooLargeError(
                f"a batch of {len(encoded)} bytes; max.request.size is {self.config.max_request_size}",
                hint="build smaller batches, or raise max.request.size and the topic's max.message.bytes",
            )
        target = await self._placement.topic(topic)
        self._placement.choose(target, None, None, partition)
        self._check_may_send(number)
        return await self._send_built(
            topic, partition, encoded, header.record_count, header.base_timestamp_ms, is_own=is_own
        )

    def _plan(
        self, topic: TopicQueues, columns: RecordColumns, partition: int | None
    ) -> list[tuple[int | None, RecordColumns]]:
        """Return (partition, records) of each batch. If the partition is None, it is chosen when the batch is
        sent."""
        by_partition: list[tuple[int | None, RecordColumns]] = []
        if partition is not None:
            by_partition.append((self._placement.choose(topic, None, None, partition), columns))
        elif columns.keys is None and self._placement.places_batches:
            by_partition.append((None, columns))
        else:
            chosen = self._placement.choose_all(topic, columns.keys, columns.values)
            by_partition.extend(split_by_partition(columns, chosen))
        limit_records = self.config.batch_max_messages or MAX_RECORDS_PER_BATCH
        return [
            (chosen_partition, part)
            for chosen_partition, share in by_partition
            for part in split_by_size(share, self.config.max_request_size, limit_records)
        ]

    async def _send_built(
        self,
        topic: str,
        partition: int,
        encoded: Encoded,
        record_count: int,
        timestamps_ms: int | Sequence[int],
        *,
        is_own: bool,
    ) -> PendingBatch:
        """Wait for room in buffer.memory, then send a batch.

        ``is_own`` means that the caller keeps no reference to ``encoded``, so it may be changed in place.
        """
        sender = self._sender
        if not sender.accumulator.has_room(len(encoded)):
            number = self._check_may_send(0)
            await sender.wait_for_bytes(len(encoded))
            self._check_may_send(number)
        batch = PendingBatch(
            topic,
            partition,
            prebuilt_timestamps_ms=timestamps_ms,
            prebuilt=encoded,
            owns_prebuilt=is_own,
            size_bytes=len(encoded),
            record_count=record_count,
            closed=True,
        )
        queue = sender.accumulator.queue(TopicPartition(topic, partition))
        sender.accumulator.add_batch(queue, batch, sender.now_ms())
        sender.drain()
        return batch


def _refused(topic: str, partition: int | None, columns: RecordColumns, error: Exception) -> PendingBatch:
    """Return a failed batch of records that are not sent."""
    stamps = columns.timestamps_ms
    return PendingBatch(
        topic,
        -1 if partition is None else partition,
        timestamps=[stamps] * len(columns) if isinstance(stamps, int) else list(stamps),
        record_count=len(columns),
        closed=True,
        done=True,
        error=error,
    )
