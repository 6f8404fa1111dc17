"""The coordinators of this broker: one shard for each partition of an internal topic that this broker leads.

When this broker becomes the leader of such a partition, ``Coordinators`` creates a shard, which replays the
log and then serves. When the leadership ends, the shard is closed. One task calls ``Shard.tick`` when a
deadline of a shard, such as a session timeout, has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.coordination.held_heartbeats import HeldHeartbeats
from kafkalite.broker.coordination.internal_topics import (
    GROUP,
    KINDS,
    TOPICS,
    TRANSACTION,
    TopicCreation,
    TopicShapes,
    partition_of,
)
from kafkalite.broker.coordination.loader import load
from kafkalite.broker.coordination.shard import Machine, Shard
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.tasks import Signal, TaskSet, first_of
from kafkalite.clock import Clock
from kafkalite.coordinator_types import Topics
from kafkalite.errors import CoordinatorNotAvailableError, NotCoordinatorError, StorageError
from kafkalite.log_fields import Fields
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import ClusterImage
from kafkalite.model import TopicPartition
from kafkalite.replication.partition import Partition

if TYPE_CHECKING:
    from kafkalite.broker.cluster.controller_channel import ControllerChannel

logger = logging.getLogger(__name__)

LOAD_RETRY_MS: Final = 1_000
#: {kind of coordinator: function that returns the number of groups or transactional ids of a machine}
_COUNTS: Final[Mapping[int, Callable[[Any], int]]] = {
    GROUP: len,
    TRANSACTION: attrgetter("transaction_count"),
}

#: A callback that receives a changed or closed shard.
OnChange = Callable[[Shard], None]


class Coordinators:
    """Owns the shards of this broker, one for each partition of an internal topic that this broker leads."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        waiters: Waiters,
        tasks: TaskSet,
        channel: ControllerChannel,
        on_broken: Callable[[BaseException], None],
        node: NodeState,
        offline_reason: Callable[[TopicPartition], str],
        machines: Mapping[int, Callable[[], Machine]] | None = None,
    ) -> None:
        """``offline_reason`` returns why this broker cannot lead a partition that it should lead, or "".

        ``machines`` is {kind: factory of state machines}, for kinds that do not use the standard machine.
        """
        self.creation = TopicCreation(config, channel, clock)  #: creates the internal topics
        #: Group heartbeats whose responses wait for an update for the member.
        self.heartbeats = HeldHeartbeats(waiters.loop, config.group_consumer_session_timeout_ms)
        self._config = config
        self._clock = clock
        self._waiters = waiters
        self._tasks = tasks
        self.on_broken = on_broken
        self.node = node
        self._offline_reason = offline_reason
        self._machines = {**_product_machines(config), **(machines or {})}
        self._shards: dict[tuple[str, int], Shard] = {}
        self._image = ClusterImage()
        #: {topic: its id and number of partitions}. A new object if a topic was created, deleted or extended.
        self.topics: Topics = TopicShapes({})
        self._on_change: dict[int, list[OnChange]] = {GROUP: [], TRANSACTION: []}
        self._on_close: dict[int, list[OnChange]] = {GROUP: [self.heartbeats.on_close], TRANSACTION: []}
        self._changed: dict[Shard, None] = {}  # their callbacks run in the next iteration of the loop
        self._due_ms: dict[Shard, int] = {}
        self._wakes_ms: int | None = None  # when ``keep_time`` will wake
        self.has_due = Signal()  #: set when ``keep_time`` must wake
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Coordinators {list(self._shards.values())}>"

    def groups(self, group_id: str) -> Shard:
        """Return the shard that coordinates a group. Raises the same errors as ``shard_of``."""
        return self.shard_of(GROUP, group_id)

    def transactions(self, transactional_id: str) -> Shard:
        """Return the shard of a transactional id, or of the application id of a transaction group. Raises the
        same errors as ``shard_of``."""
        return self.shard_of(TRANSACTION, transactional_id)

    def shard_of(self, kind: int, key: str) -> Shard:
        """Return the shard that serves ``key`` of ``kind`` GROUP or TRANSACTION.

        Raises CoordinatorNotAvailableError if the internal topic of that kind does not exist or the shard
        could not be loaded. Also raises NotCoordinatorError and CoordinatorLoadInProgressError.
        """
        shard = self.find(kind, self.partition_of(kind, key))
        shard.check()
        return shard

    def partition_of(self, kind: int, key: str) -> int:
        """Return the number of the partition that ``key`` hashes to, in the internal topic of ``kind``.

        Raises CoordinatorNotAvailableError if the topic does not exist yet.
        """
        topic = self._image.topics.get(TOPICS[kind])
        if topic is None:
            raise CoordinatorNotAvailableError(
                f"{TOPICS[kind]} does not exist yet; FindCoordinator creates it"
            )
        return partition_of(key, len(topic.partitions))

    def find(self, kind: int, partition: int) -> Shard:
        """Return the shard of a partition, even if it is still loading. Raises NotCoordinatorError."""
        topic = TOPICS[kind]
        shard = self._shards.get((topic, partition))
        if shard is None:
            state = self._image.partition(topic, partition)
            leader = "no broker" if state is None or state.leader < 0 else f"broker {state.leader}"
            if state is not None and state.leader == self._config.node_id:
                reason = self._offline_reason(TopicPartition(topic, partition)) or "it has no role yet"
                raise NotCoordinatorError(f"{leader} cannot lead {topic}-{partition} now: {reason}")
            raise NotCoordinatorError(f"{topic}-{partition} is led by {leader}, not by this broker")
        return shard

    def shards(self, kind: int) -> Iterator[Shard]:
        """Yield the shards of one kind by ascending partition, including those that are still loading."""
        topic = TOPICS[kind]
        for key in sorted(self._shards):
            if key[0] == topic:
                yield self._shards[key]

    def count(self, kind: int) -> int:
        """Return the number of groups in the loaded shards if ``kind`` is GROUP, otherwise the number of
        transactional ids and writers."""
        count = _COUNTS[kind]
        return sum(count(shard.machine) for shard in self.shards(kind) if shard.is_loaded)

    def on_change(self, kind: int, callback: OnChange) -> None:
        """Register ``callback``, which is called with a shard after its state or high watermark has changed.

        It is called once, in the next iteration of the loop, for all changes of the shard up to then.
        """
        self._on_change[kind].append(callback)

    def on_close(self, kind: int, callback: OnChange) -> None:
        """Register ``callback``, which is called with each shard that has been closed."""
        self._on_close[kind].append(callback)

    def on_marker(self, partition: Partition, producer_id: int, is_commit: bool) -> None:
        """Apply or drop a transaction's pending records, because ``partition`` now has its marker (R35).

        Has no effect if ``partition`` has no shard.
        """
        shard = self._shards.get(partition.key)
        if shard is not None and shard.partition is partition:
            shard.on_marker(producer_id, is_commit=is_commit)

    def on_leading(self, partition: Partition) -> None:
        """Create a shard for ``partition``, which this broker leads, unless there is one of the same leader
        epoch. Close a shard of an earlier leader epoch. Ignore partitions of topics that are not internal."""
        kind = KINDS.get(partition.key.topic)
        if kind is None or self._is_closed:
            return
        shard = self._shards.get(partition.key)
        if shard is not None:
            if shard.partition is partition and shard.coordinator_epoch == partition.leader_epoch:
                return
            self._close(shard)
        self._begin(kind, partition)

    def on_not_leading(self, partition: Partition) -> None:
        """Close the shard of ``partition``, if any, because this broker does not lead it (R36)."""
        shard = self._shards.get(partition.key)
        if shard is not None and shard.partition is partition:
            self._close(shard)

    def _begin(self, kind: int, partition: Partition) -> None:
        shard = Shard(partition, self._machines[kind](), self, self._waiters, self._clock)
        self._shards[partition.key] = shard
        self._tasks.start(self._load(kind, shard), name=f"load {partition.key}")

    def _close(self, shard: Shard) -> None:
        key = shard.partition.key
        del self._shards[key]
        self._due_ms.pop(shard, None)
        self._changed.pop(shard, None)
        shard.close()
        logger.debug("coordinator ended %s", Fields(partition=key, epoch=shard.coordinator_epoch))
        for callback in self._on_close[KINDS[key.topic]]:
            callback(shard)

    async def _load(self, kind: int, shard: Shard) -> None:
        key, began_ms = shard.partition.key, self._clock.monotonic_ms()
        try:
            record_count = await load(shard)
        except AssertionError:
            raise
        except Exception as error:
            if shard.is_closed:
                return
            shard.failure = error
            is_ours = not isinstance(error, (StorageError, OSError))
            logger.error(
                "coordinator not loaded %s", Fields(partition=key, reason=repr(error)), exc_info=is_ours
            )
            # A damaged log stays so until an operator repairs it (R44).
            is_damaged = shard.partition.damage is not None
            if not is_ours and not is_damaged:  # possibly temporary, for example too many open files
                await self._clock.sleep_ms(LOAD_RETRY_MS)
                if not shard.is_closed:
                    self._close(shard)
                    self._begin(kind, shard.partition)
            return
        if shard.is_loaded:
            logger.log(
                logging.INFO if record_count else logging.DEBUG,  # most partitions are usually empty
                "coordinator loaded %s",
                Fields(
                    partition=key,
                    epoch=shard.coordinator_epoch,
                    records=record_count,
                    took_ms=self._clock.monotonic_ms() - began_ms,
                ),
            )

    def publish(self, delta: Delta, image: ClusterImage) -> None:
        """Use a new image. If it adds, removes or extends topics, schedule a tick of every loaded shard."""
        before, self._image = self._image, image
        if image.topics is not before.topics and delta.has_reshaped_topics():
            self.topics = TopicShapes(image.topics)
            for shard in self._shards.values():
                shard.tick_soon()

    def on_ticked(self, shard: Shard) -> None:
        """Implements ``ShardOwner.on_ticked``."""
        self.heartbeats.on_ticked(shard)
        self.on_changed(shard)

    def on_changed(self, shard: Shard) -> None:
        """Implements ``ShardOwner.on_changed``."""
        if not self._on_change[KINDS[shard.partition.key.topic]]:
            return
        if not self._changed:
            self._waiters.loop.call_soon(self._notify_changes)
        self._changed[shard] = None

    def _notify_changes(self) -> None:
        changed, self._changed = self._changed, {}
        for shard in changed:
            if shard.is_closed:
                continue
            for callback in self._on_change[KINDS[shard.partition.key.topic]]:
                callback(shard)

    def wake_at(self, shard: Shard, due_ms: int | None) -> None:
        """Implements ``ShardOwner.wake_at``."""
        if due_ms is None:
            self._due_ms.pop(shard, None)
            return
        self._due_ms[shard] = due_ms
        if self._wakes_ms is None or due_ms < self._wakes_ms:
            self.has_due.set()

    async def keep_time(self) -> None:
        """Call ``tick`` of each shard at the time that the shard passed to ``wake_at``. Runs until
        cancelled."""
        while True:
            now_ms = self._clock.monotonic_ms()
            for shard, due_ms in list(self._due_ms.items()):
                if due_ms <= now_ms and not shard.is_closed:
                    shard.tick()
            self.has_due.clear()
            if not self._due_ms:
                self._wakes_ms = None
                await self.has_due.wait()
                continue
            self._wakes_ms = min(self._due_ms.values())
            sleep_ms = max(self._wakes_ms - self._clock.monotonic_ms(), 1)
            await first_of(self._clock.sleep_ms(sleep_ms), self.has_due.wait())

    async def close(self) -> None:
        """Close all shards, which respond NOT_COORDINATOR to held requests. Cancel the creation of topics."""
        self.end()
        await self.creation.close()

    def end(self) -> None:
        """Close all shards, and create no more."""
        self._is_closed = True
        for shard in list(self._shards.values()):
            self._close(shard)


def _product_machines(config: BrokerConfig) -> dict[int, Callable[[], Machine]]:
    """Return {kind: factory of its state machines}. The factories import their modules when called."""

    def group_machine() -> Machine:
        from kafkalite.groups.machine import GroupMachine
        from kafkalite.groups.settings import GroupSettings

        settings = GroupSettings(
            session_timeout_ms=config.group_consumer_session_timeout_ms,
            heartbeat_interval_ms=config.group_consumer_heartbeat_interval_ms,
            assignors=config.group_consumer_assignors,
            max_size=config.group_max_size,
            max_count=config.group_max_count,
            max_offsets=config.group_max_offsets,
            offsets_retention_ms=config.offsets_retention_minutes * 60_000,
            retention_check_interval_ms=config.offsets_retention_check_interval_ms,
            offset_metadata_max_bytes=config.offset_metadata_max_bytes,
        )
        machine: Machine = GroupMachine(settings)
        return machine

    def transaction_machine() -> Machine:
        from kafkalite.transactions.machine import TransactionMachine, TransactionSettings

        settings = TransactionSettings(
            max_timeout_ms=config.transaction_max_timeout_ms,
            max_count=config.transactional_id_max_count,
            transactional_id_expiration_ms=config.transactional_id_expiration_ms,
        )
        machine: Machine = TransactionMachine(settings)
        return machine

    return {GROUP: group_machine, TRANSACTION: transaction_machine}
