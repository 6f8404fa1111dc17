"""Makes transactional batches wait until the coordinator has added their partition to the transaction (R31).

The first batch of a transaction in a partition waits until the coordinator has added the partition durably.
From then on the end of the transaction is certain to write a marker there. If the transaction has ended
before the batch is appended, the marker's epoch fences the batch. So no late batch can stay in a transaction
that never ends, or become part of the next one (KIP-890). Later batches of the same producer wait in order
behind the first. A batch does not wait if the log has an open transaction of its producer and epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.tasks import TaskSet
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, KafkaliteError, NotLeaderOrFollowerError
from kafkalite.model import TopicPartition
from kafkalite.records.header import BatchHeader
from kafkalite.replication.partition import Partition
from kafkalite.storage.log import Appended

Then: TypeAlias = "Callable[[Appended | None, Exception | None], None]"
"""Called with the result of ``Partition.append``, or with the exception that it raised."""

Verify: TypeAlias = Callable[[str, int, int, Sequence[TopicPartition]], Awaitable[None]]
"""Requests the coordinator of a (transactional id, producer id, producer epoch) to add partitions. Raises
BrokerError."""


class Owner(NamedTuple):
    """Identifies the transaction to which a batch belongs. Each transaction has its own epoch."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class _Waiting(NamedTuple):
    owner: Owner
    partition: Partition
    batch: memoryview
    header: BatchHeader
    acks: int
    then: Then


_Place: TypeAlias = tuple[TopicPartition, int]
"""A partition and a producer id. Batches with the same place keep their order."""


class Verifications:
    """Queues the batches that wait for a coordinator, by place: (partition, producer id).

    Invariant: a place has a queue exactly while the transaction of its first batch is being verified.
    """

    def __init__(self, verify: Verify, partitions: Partitions, clock: Clock, tasks: TaskSet) -> None:
        self._verify = verify
        self._partitions = partitions
        self._clock = clock
        self._tasks = tasks
        self._queues: dict[_Place, deque[_Waiting]] = {}
        # Partitions to verify in the next iteration of the loop.
        self._gathered: dict[Owner, dict[TopicPartition, None]] = {}

    def __len__(self) -> int:
        """Return the number of waiting batches."""
        return sum(map(len, self._queues.values()))

    def append(
        self,
        partition: Partition,
        batch: memoryview,
        header: BatchHeader,
        transactional_id: str,
        acks: int,
        then: Then,
    ) -> Appended | None:
        """Append a batch now, or after its transaction has been verified.

        Returns the result of ``Partition.append``, or None if the batch must wait. A waiting batch must not
        change until ``then`` is called, once, with the result or an error; a stop of the broker drops the
        batch without a call. Raises the errors of ``Partition.append``.
        """
        place = (partition.key, header.producer_id)
        queue = self._queues.get(place)
        owner = Owner(transactional_id, header.producer_id, header.producer_epoch)
        if queue is not None:
            queue.append(_Waiting(owner, partition, batch, header, acks, then))
            return None
        if not partition.needs_verification(header):
            return partition.append(batch, header, self._clock.wall_ms(), acks)
        self._queues[place] = deque([_Waiting(owner, partition, batch, header, acks, then)])
        self._gather(owner, partition.key)
        return None

    def _gather(self, owner: Owner, key: TopicPartition) -> None:
        """Verify partition ``key`` in the next iteration of the loop, together with the transaction's other
        partitions that are gathered until then."""
        gathered = self._gathered.get(owner)
        if gathered is None:
            self._gathered[owner] = {key: None}
            self._tasks.start(self._ask(owner), name=f"verify a transaction of {owner.transactional_id}")
        else:
            gathered[key] = None

    async def _ask(self, owner: Owner) -> None:
        await asyncio.sleep(0)  # collects the other partitions of this iteration of the loop
        keys = list(self._gathered.pop(owner))
        error: Exception | None = None
        try:
            await self._verify(*owner, keys)
        except KafkaliteError as refusal:
            error = refusal
        except asyncio.CancelledError:
            for key in keys:
                self._forget((key, owner.producer_id))
            raise
        for key in keys:
            self._release(key, owner, error)

    def _release(self, key: TopicPartition, owner: Owner, error: Exception | None) -> None:
        """Append, in order, the batches of ``owner`` that wait for partition ``key``. If ``error`` is not
        None, fail them with that error instead."""
        place = (key, owner.producer_id)
        queue = self._queues[place]
        while queue and queue[0].owner == owner:
            waiting = queue.popleft()
            if error is not None:
                waiting.then(None, error)
                continue
            try:
                appended = self._append(waiting)
            except AssertionError:
                raise
            except Exception as refusal:
                if isinstance(refusal, BrokerError) and refusal.retriable:
                    error = refusal  # fail the later batches too: they would be out of sequence
                waiting.then(None, refusal)
            else:
                waiting.then(appended, None)
        if queue:
            self._gather(queue[0].owner, key)
        else:
            del self._queues[place]

    def _append(self, waiting: _Waiting) -> Appended:
        partition = self._partitions.leader(*waiting.partition.key)
        if partition is not waiting.partition:
            raise NotLeaderOrFollowerError(f"{partition.key} was created again; refresh its metadata")
        now_ms = self._clock.wall_ms()
        return partition.append(waiting.batch, waiting.header, now_ms, waiting.acks, is_verified=True)

    def _forget(self, place: _Place) -> None:
        """Drop the batches that wait at ``place`` (partition, producer id), because the broker stops and its
        clients lose their connections."""
        self._queues.pop(place, None)
