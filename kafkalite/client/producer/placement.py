"""Chooses the partition and batch of each record. Records wait here until their topic's metadata is known.

The producer's fast path reads ``keyless`` (topic to batch) and ``keyed`` (topic and key to queue). It uses an
entry only if the open batch has room.
"""

# Tests: tests/client/test_producer.py

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kafkalite.client.producer.delivery import Delivery
from kafkalite.client.producer.partition_queue import PartitionQueue
from kafkalite.client.producer.pending_batch import WHOLE_BATCH, PendingBatch
from kafkalite.client.producer.sender import Sender
from kafkalite.errors import BufferFullError, KafkaliteError, UnknownTopicOrPartitionError, broker_error
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, Headers, TopicPartition
from kafkalite.records.header import Codec
from kafkalite.records.partitioners import Hash, Partitioner, RoundRobinPerBatch, Sticky

MAX_REMEMBERED_KEYS: Final = 100_000  # per topic; above this, all are forgotten and computed again


class OutgoingRecord(NamedTuple):
    """A validated record. ``size_bytes`` is the result of ``pending_batch.record_size``."""

    value: bytes | None
    key: bytes | None
    partition: int | None
    timestamp_ms: int
    headers: Headers
    size_bytes: int


@dataclass(slots=True)
class TopicQueues:
    """The queues of a topic's partitions. Invariant: ``queues[n].tp.partition == n``."""

    name: str
    queues: list[PartitionQueue] = field(default_factory=list)


@dataclass(slots=True)
class _Parked:
    """Records of a topic whose metadata is missing. ``batch`` is never sent; it only holds listeners."""

    batch: PendingBatch
    timer: asyncio.TimerHandle
    records: list[tuple[Delivery, OutgoingRecord]] = field(default_factory=list)
    reserved_bytes: int = 0


class Placement:
    """Puts records into batches of the sender's accumulator.

    The records of a topic are *parked* until its metadata arrives. Invariant: a topic with parked records has
    no records in batches, so that all its records keep their order.
    """

    def __init__(self, sender: Sender, partitioner: Partitioner) -> None:
        self._last_keyless: dict[str, PendingBatch] = {}
        self.keyed: dict[str, dict[bytes, PartitionQueue]] = {}
        self._sender = sender
        self._accumulator = sender.accumulator
        self._cluster = sender.cluster
        self._partitioner = partitioner
        #: Whether the partition of keyless records is chosen per batch instead of per record.
        self.places_batches = isinstance(partitioner, RoundRobinPerBatch | Sticky)
        self.keyless = self._last_keyless if self.places_batches else {}
        self._hashes_keys = isinstance(partitioner, RoundRobinPerBatch | Sticky | Hash)
        config = sender.config
        #: Whether an awaited record may be sent at once without an open batch, see ``send_alone``.
        self.sends_alone = self._hashes_keys and config.linger_ms == 0 and config.codec is Codec.NONE
        self.topics: dict[str, TopicQueues] = {}
        self._parked: dict[str, _Parked] = {}

    def put(self, topic: str, record: OutgoingRecord) -> Delivery:
        """Add ``record`` to its batch, or park it.

        Raises BufferFullError, UnknownTopicOrPartitionError, and the errors of the partitioner.
        """
        known = self.topics.get(topic) or self._know(topic)
        if known is None:
            return self._park(topic, record)
        return Delivery(*self._place(known, record, forced=False))

    def send_alone(
        self, name: str, value: bytes, key: bytes | None, timestamp_ms: int
    ) -> PendingBatch | None:
        """Send one record at once in its own batch, and return the batch. Return None if that is not
        possible.

        With linger.ms=0, this avoids opening and closing a batch for a record that the caller awaits.
        """
        topic = self.topics.get(name)
        if topic is None or not self.sends_alone:
            return None
        partition = self._partitioner.partition(name, key, value, len(topic.queues))
        assert partition is not None, "only a user's function may return None"
        queue = topic.queues[partition]
        sender = self._sender
        node_id = self._cluster.metadata.leader(queue.tp).node_id
        connection = self._cluster.connection_now(node_id) if node_id >= 0 else None
        if connection is None or not sender.has_room(connection):
            return None
        flight = self._accumulator.add_alone(queue, value, key, timestamp_ms, sender.now_ms(), node_id)
        if flight is None:
            return None
        if key is None:
            self._partitioner.on_batch_closed(name, partition, 1)
        batch = flight.batches[0]
        sender.send_alone(connection, flight)
        return batch

    def _place(self, topic: TopicQueues, record: OutgoingRecord, *, forced: bool) -> tuple[PendingBatch, int]:
        """Append ``record`` to its partition's batch. Return (batch, index in it). Raises BufferFullError."""
        value, key, partition, timestamp_ms, headers, size_bytes = record
        accumulator, now_ms = self._accumulator, self._sender.now_ms()
        is_keyless = key is None and partition is None
        queue = topic.queues[self.choose(topic, key, value, partition)]
        batch = queue.open
        if batch is not None and not batch.has_room(size_bytes):
            accumulator.close_batch(queue, now_ms)
            if is_keyless and self.places_batches:  # the batch is full: choose another partition
                queue = topic.queues[self.choose(topic, None, value, None)]
            batch = queue.open
            if batch is not None and not batch.has_room(size_bytes):
                accumulator.close_batch(queue, now_ms)
                batch = None
        if batch is None:
            batch = accumulator.open_batch(queue, size_bytes, now_ms, forced=forced)
            if batch is None:
                raise self._buffer_full()
        if is_keyless:
            self._note_closed(topic.name)
            self._last_keyless[topic.name] = batch
        elif key is not None and partition is None and self._hashes_keys:
            self._remember_key(topic.name, key, queue)
        return batch, batch.append(value, key, timestamp_ms, headers, size_bytes)

    def choose(
        self, topic: TopicQueues, key: bytes | None, value: bytes | None, partition: int | None
    ) -> int:
        """Return ``partition``. If it is None, return the partitioner's choice.

        Raises UnknownTopicOrPartitionError if the partition does not exist, and the errors of the
        partitioner.
        """
        count = len(topic.queues)
        if partition is None:
            if key is None:
                self._note_closed(topic.name)
            partition = self._partitioner.partition(topic.name, key, value, count)
        if partition is None or not 0 <= partition < count:
            self._cluster.request_refresh()
            raise UnknownTopicOrPartitionError(
                f"topic {topic.name!r} has partitions 0 to {count - 1}, not {partition}"
            )
        return partition

    def choose_all(
        self, topic: TopicQueues, keys: Sequence[bytes | None] | None, values: Sequence[bytes | None]
    ) -> list[int]:
        """Return the partition of each record. Raises the errors of ``choose``.

        If the partitioner hashes keys, it is called once for each distinct item of ``keys``.
        """
        if keys is None:
            return [self.choose(topic, None, value, None) for value in values]
        if not self._hashes_keys:
            return [self.choose(topic, key, value, None) for key, value in zip(keys, values, strict=True)]
        try:
            distinct = set(keys)
        except TypeError:  # a bytearray or a memoryview
            keys = [None if key is None else bytes(key) for key in keys]
            distinct = set(keys)
        partition_of = {key: self.choose(topic, key, None, None) for key in distinct}
        return [partition_of[key] for key in keys]

    def next_partition(self, topic: TopicQueues, record_count: int) -> int:
        """Return a partition for a batch of ``record_count`` keyless records, and report to the partitioner
        that the batch is closed."""
        partition = self.choose(topic, None, None, None)
        self._last_keyless.pop(topic.name, None)
        self._partitioner.on_batch_closed(topic.name, partition, record_count)
        return partition

    def _note_closed(self, topic: str) -> None:
        """Notify the partitioner if the newest batch of the topic's keyless records has been closed."""
        batch = self._last_keyless.get(topic)
        if batch is not None and batch.closed:
            del self._last_keyless[topic]
            self._partitioner.on_batch_closed(topic, batch.partition, batch.record_count)

    def _remember_key(self, topic: str, key: bytes, queue: PartitionQueue) -> None:
        queues = self.keyed.setdefault(topic, {})
        if len(queues) >= MAX_REMEMBERED_KEYS:
            queues.clear()
        queues[key] = queue

    async def topic(self, name: str) -> TopicQueues:
        """Return the queues of a topic. Waits for its metadata for at most max.block.ms.

        Raises the topic's error: at once if the topic cannot be used, after max.block.ms if it is unknown.
        """
        deadline_ms = self._sender.now_ms() + self._sender.config.max_block_ms
        await self._cluster.topic_partition_count(name, deadline_ms)
        topic = self.topics.get(name) or self._know(name)
        assert topic is not None, "its partition count is known"
        return topic

    def _know(self, name: str) -> TopicQueues | None:
        """Return the queues of a topic, one per partition, or None if its metadata is unknown.

        Adds the queues of new partitions, and places the parked records.
        """
        self._cluster.track(name)
        count = self._cluster.metadata.partition_count(name)
        if count is None:
            return None
        topic = self.topics.setdefault(name, TopicQueues(name))
        for partition in range(len(topic.queues), count):
            topic.queues.append(self._accumulator.queue(TopicPartition(name, partition)))
        self.keyed.pop(name, None)  # with more partitions, a key may belong to another partition
        if name in self._parked:
            self._unpark(name, topic)
        return topic

    def _shrink(self, topic: TopicQueues, count: int) -> None:
        """Add no more records to partitions from ``count`` on: the topic was deleted, and created again with
        fewer partitions.

        The batches of these partitions wait for the partitions until delivery.timeout.ms.
        """
        del topic.queues[count:]
        self.keyed.pop(topic.name, None)
        batch = self._last_keyless.get(topic.name)
        if batch is not None and batch.partition >= count:
            del self._last_keyless[topic.name]

    def on_cluster_change(self) -> None:
        """Handle new metadata: added and missing partitions, new topics, topics that cannot be used."""
        metadata = self._cluster.metadata
        for name, topic in self.topics.items():
            count = metadata.partition_count(name) or 0
            if count > len(topic.queues):
                self._know(name)
            elif 0 < count < len(topic.queues):
                self._shrink(topic, count)
        for name in list(self._parked):
            if name not in self._parked:
                continue  # it failed together with its transaction
            fatal = metadata.fatal_error(name)
            if fatal is not None:
                self.fail_parked(name, broker_error(*fatal, about=f"topic {name!r}"))
            elif self._know(name) is None:
                self._cluster.request_refresh()

    @property
    def parked_batches(self) -> list[PendingBatch]:
        return [parked.batch for parked in self._parked.values()]

    def parked_counts(self) -> dict[str, int]:
        """Return the number of parked records of each topic."""
        return {topic: len(parked.records) for topic, parked in self._parked.items()}

    def _park(self, topic: str, record: OutgoingRecord) -> Delivery:
        accumulator = self._accumulator
        if not accumulator.has_room(record.size_bytes):
            accumulator.refused_bytes = record.size_bytes
            raise self._buffer_full()
        parked = self._parked.get(topic)
        if parked is None:
            parked = self._parked[topic] = _Parked(PendingBatch(topic, -1), self._give_up_later(topic))
            self._cluster.request_refresh(urgent=True)
        accumulator.free_bytes -= record.size_bytes
        accumulator.parked_bytes += record.size_bytes
        parked.reserved_bytes += record.size_bytes
        delivery = Delivery(parked.batch, len(parked.records))
        parked.records.append((delivery, record))
        return delivery

    def _give_up_later(self, topic: str) -> asyncio.TimerHandle:
        def give_up() -> None:
            self.fail_parked(topic, self._cluster.topic_error(topic))

        return asyncio.get_running_loop().call_later(self._sender.config.max_block_ms / 1000, give_up)

    def _take_parked(self, name: str) -> _Parked:
        parked = self._parked.pop(name)
        parked.timer.cancel()
        self._accumulator.free_bytes += parked.reserved_bytes
        self._accumulator.parked_bytes -= parked.reserved_bytes
        return parked

    def _unpark(self, name: str, topic: TopicQueues) -> None:
        """Move a topic's parked records to batches in the order of their arrival."""
        parked = self._take_parked(name)
        refused: list[tuple[Delivery, Exception]] = []
        for delivery, record in parked.records:
            try:
                delivery.batch, delivery.index = self._place(topic, record, forced=True)
            except (
                Exception
            ) as cause:  # only this record fails: its partition is missing, or the user's partitioner raised
                refused.append((delivery, cause))
        listeners: dict[int, list[Callable[[], object]]] = {}
        for index, listener in parked.batch.listeners:
            listeners.setdefault(index, []).append(listener)
        for delivery, error in refused:
            index = delivery.index
            delivery.batch, delivery.index = PendingBatch(name, -1), 0
            delivery.batch.listeners = [(0, listener) for listener in listeners.pop(index, [])]
            self._fail(delivery.batch, 1, error)
        for index, waiting in listeners.items():
            for listener in waiting:
                if index == WHOLE_BATCH:
                    listener()
                elif (delivery := parked.records[index][0]).batch.done:
                    listener()  # it failed with its transaction because of a refused record
                else:
                    delivery.batch.listeners.append((delivery.index, listener))

    def fail_parked(self, topic: str, error: Exception) -> None:
        parked = self._take_parked(topic)
        self._fail(parked.batch, len(parked.records), error)

    def fail_all_parked(self, error: Exception) -> None:
        while self._parked:
            self.fail_parked(next(iter(self._parked)), error)

    def refuse(self, topic: str, error: Exception) -> Delivery:
        """Return a delivery of one record that has already failed."""
        batch = PendingBatch(topic, -1)
        self._fail(batch, 1, error)
        return Delivery(batch, 0)

    def _fail(self, batch: PendingBatch, record_count: int, error: Exception) -> None:
        batch.closed = True
        batch.record_count = record_count
        batch.complete(NO_OFFSET, NO_TIMESTAMP, error)
        self._sender.finish([batch])

    def _buffer_full(self) -> KafkaliteError:
        return BufferFullError(
            f"buffer.memory ({self._sender.config.buffer_memory} bytes) is full of unacknowledged records",
            hint="await wait_for_room() or flush(), or raise buffer.memory",
        )
