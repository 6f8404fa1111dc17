"""Transactional batches: none is appended before its transaction's coordinator knows of the partition (R31).

The first batch of a transaction in a partition waits until the coordinator has added the partition, durably:
from then on the transaction's end will put a marker there, or has put one there, and then its epoch refuses
the batch. So nothing late can hang in the log, or slip into the next transaction (KIP-890). Batches of the
same producer that come meanwhile wait behind, so that they keep their order. A batch of a transaction that
is open in the log needs nothing and waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kafkalite.broker.server.tasks import TaskSet
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, KafkaliteError, NotLeaderOrFollowerError
from kafkalite.model import TopicPartition
from kafkalite.records.header import BatchHeader
from kafkalite.replication.partition import Partition
from kafkalite.storage.log import Appended

Then: TypeAlias = "Callable[[Appended | None, Exception | None], None]"
"""What became of a batch: what ``Partition.append`` returned, or what was raised instead."""

Verify: TypeAlias = Callable[[str, int, int, Sequence[TopicPartition]], Awaitable[None]]
"""Has the coordinator add partitions to (transactional id, producer id, producer epoch). Raises
BrokerError."""


class Leaders(Protocol):
    """``Partitions``, as far as it matters here."""

    def leader(self, topic: str, partition: int) -> Partition: ...


class Owner(NamedTuple):
    """Whose transaction a batch is part of. Each transaction has an epoch of its own, so this names it."""

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
"""A partition and a producer id: what order must be kept in."""


class Verifications:
    """The batches that wait for a coordinator.

    Invariant: there is a queue for a place exactly while its first batch's transaction is gathered or asked
    for.
    """

    def __init__(self, verify: Verify, leaders: Leaders, clock: Clock, tasks: TaskSet) -> None:
        self._verify = verify
        self._leaders = leaders
        self._clock = clock
        self._tasks = tasks
        self._queues: dict[_Place, deque[_Waiting]] = {}
        self._gathered: dict[Owner, dict[TopicPartition, None]] = {}  # to be asked for in the next turn

    def __len__(self) -> int:
        """How many batches wait."""
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
        """``Partition.append``, or None: then ``then`` is called later, once.

        ``batch`` must stay as it is till then. Raises as ``Partition.append``.
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
        """Ask for ``key`` in the next turn of the loop, together with the transaction's other partitions."""
        gathered = self._gathered.get(owner)
        if gathered is None:
            self._gathered[owner] = {key: None}
            self._tasks.start(self._ask(owner), name=f"verify a transaction of {owner.transactional_id}")
        else:
            gathered[key] = None

    async def _ask(self, owner: Owner) -> None:
        await asyncio.sleep(0)  # what else there is of this turn of the loop
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
        """Append what waits for ``owner`` at ``key``, in order, or have it refused with ``error``."""
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
                    error = refusal  # what follows would be out of sequence
                waiting.then(None, refusal)
            else:
                waiting.then(appended, None)
        if queue:
            self._gather(queue[0].owner, key)
        else:
            del self._queues[place]

    def _append(self, waiting: _Waiting) -> Appended:
        partition = self._leaders.leader(*waiting.partition.key)
        if partition is not waiting.partition:
            raise NotLeaderOrFollowerError(f"{partition.key} is another one now; ask for its metadata again")
        now_ms = self._clock.wall_ms()
        return partition.append(waiting.batch, waiting.header, now_ms, waiting.acks, is_verified=True)

    def _forget(self, place: _Place) -> None:
        """The broker stops: whoever waits has lost the connection, or is told so by it."""
        self._queues.pop(place, None)
