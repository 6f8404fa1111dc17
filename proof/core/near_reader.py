"""A consumer of the core model that reads near: the real state machine of a consumer against real partitions.

The consumer is in the rack of one broker. Its metadata is late, its requests and responses are delayed or
lost, and its user seeks. These parts are real: ``AssignedPartitions``, the handler of Fetch, and the
partitions of the world. Invariants: the consumer reads only committed records (R65), is directed only to live
replicas in sync (R66), and resets its position only if a leader has refused it (R67). Records that it has
read are never lost, and none is skipped (I6).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from kafkalite.broker.handlers.fetch import _read
from kafkalite.broker.replication.near_reads import is_near
from kafkalite.client.cluster.routing import NO_NODE, Leader
from kafkalite.client.config import consumer_config
from kafkalite.client.consumer.assigned_partitions import AssignedPartitions, FetchPlan
from kafkalite.errors import BrokerError, ErrorCode, NotLeaderOrFollowerError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import EARLIEST, LATEST, NO_EPOCH, IsolationLevel
from kafkalite.protocol.messages.data import EpochEnd, FetchRequest, FetchRequestV1
from kafkalite.records.header import HEADER_BYTES
from kafkalite.replication.partition import Partition
from proof.core.parts import TP, Broker, ViolationError

if TYPE_CHECKING:
    from proof.core.world import World

MAX_BYTES = 400


class _Answer(NamedTuple):
    plan: FetchPlan
    is_of_leader: bool
    message: Any
    payload: bytes


class NearReader:
    """Reads the partition of ``world`` from the rack of broker ``node_id``."""

    def __init__(self, world: World, node_id: int) -> None:
        self._world = world
        self._rack = rack_of(node_id)
        config = consumer_config(
            {
                "auto.offset.reset": "earliest",
                "client.rack": self._rack,
                "metadata.max.age.ms": 200,
                "retry.backoff.ms": 2,
                "retry.backoff.max.ms": 10,
            }
        )
        self._assigned = AssignedPartitions(config)
        self._assigned.assign({TP: "earliest"})
        self._state = self._assigned.partitions[TP]
        self._leader = Leader(-1, NO_EPOCH)
        self._answer: _Answer | None = None
        self._expected: int | None = None  # the next offset to read
        self._may_reset = True  # whether a leader has refused the position
        self.values: dict[int, int] = {}  #: the value read at each offset
        self.follower_reads = 0  #: responses of followers with records

    def step(self) -> None:
        """Let one thing happen: new metadata, a seek, a request, or its response."""
        rng = self._world.rng
        if rng.random() < 0.3:
            self._refresh()
        if rng.random() < (0.02 if self._state.near.node_id == NO_NODE else 0.2):
            self._seek()
        if self._answer is not None:
            answer, self._answer = self._answer, None
            if rng.random() < 0.1:
                self._assigned.on_fetch_failed(answer.plan.requested, self._world.now_ms, 0.5)
            else:
                self._take(answer)
        elif self._state.needs_offset:
            self._reset()
        else:
            self._ask()

    def read(self) -> None:
        """Learn the newest metadata, and let both the leader and a follower that it names serve a fetch."""
        self._take_leader(self._world.state)
        for _ in range(3):
            self._world.now_ms += 10
            if self._state.needs_offset:
                self._reset()
            self._ask()
            if self._answer is not None:
                answer, self._answer = self._answer, None
                self._take(answer)

    def seek_to_end(self) -> None:
        """Seek to the end of the partition, as the leader lists it."""
        partition = self._led()
        assert partition is not None, "there is a leader"
        self._expected = partition.list_offset(LATEST).offset
        self._state.seek(self._expected)

    def _refresh(self) -> None:
        images, state = self._world.images, None
        while state is None:
            state = self._world.rng.choice(images[-6:]).partition(*TP)
        self._take_leader(state)

    def _take_leader(self, state: PartitionState) -> None:
        if state.leader_epoch >= self._leader.leader_epoch:
            self._leader = Leader(state.leader, state.leader_epoch)
            self._assigned.on_leaders(lambda _: self._leader)

    def _led(self) -> Partition | None:
        broker = self._world.brokers.get(self._leader.node_id)
        return broker.partition if broker is not None and broker.leads else None

    def _seek(self) -> None:
        """Seek to the end, as the leader lists it, or to its log end, the offset of a record with acks=1, or
        back to an offset that was read."""
        partition, offset = self._led(), None
        chance = self._world.rng.random()
        try:
            if partition is not None and chance < 0.7:
                is_listed = chance < 0.4
                offset = partition.list_offset(LATEST).offset if is_listed else partition.log_end_offset
        except BrokerError:
            return
        if offset is None and self.values:
            offset = self._world.rng.choice(list(self.values))
        if offset is not None:
            self._state.seek(offset)
            self._expected = offset

    def _reset(self) -> None:
        """Begin at the first offset, as the leader lists it. Only a leader's refusal may lead here (R67)."""
        if not self._may_reset:
            raise ViolationError(f"R67: position {self._expected} was reset, and no leader had refused it")
        partition = self._led()
        if partition is None:
            return
        self._expected = partition.list_offset(EARLIEST).offset
        self._state.seek(self._expected)
        self._may_reset = False

    def _ask(self) -> None:
        now_ms = self._world.now_ms
        for node_id, questions in self._assigned.checks(now_ms, lambda _: self._leader).items():
            self._check_epoch(node_id, questions)
        plans, _ = self._assigned.plan(now_ms, lambda _: self._leader, lambda _: False)
        for plan in plans:
            broker = self._world.brokers[plan.node_id]
            if not broker.is_registered:
                self._assigned.on_fetch_failed(plan.requested, now_ms, 0.5)
                continue
            fields = (0, 1, MAX_BYTES, int(IsolationLevel.READ_UNCOMMITTED), plan.partitions)
            states_rack = plan.states_rack or plan.is_near
            request = FetchRequestV1(*fields, self._rack) if states_rack else FetchRequest(*fields)
            is_of_leader = broker.partition.is_leader
            reply = _read(self._services(broker), request, plan.partitions, _CLIENT).reply
            payload = b"".join(reply.payload)
            self._answer = _Answer(plan, is_of_leader, reply.message, payload)
            self._judge(broker, reply.message, len(payload))

    def _check_epoch(self, node_id: int, questions: dict[Any, Any]) -> None:
        requested = {tp: at for tp, (_, at) in questions.items()}
        ((asked, _),) = questions.values()
        broker = self._world.brokers[node_id]
        try:
            if not broker.is_registered:
                raise NotLeaderOrFollowerError("down")
            broker.partition.check_leader_epoch(asked.current_leader_epoch)
            end = EpochEnd(*TP, 0, None, *broker.partition.end_offset_for_epoch(asked.leader_epoch))
        except BrokerError as error:
            end = EpochEnd(*TP, int(error.code), "", NO_EPOCH, -1)
        self._assigned.on_checked(requested, [end], self._world.now_ms, 0.5)

    def _services(self, broker: Broker) -> Any:
        image = next(one for one in reversed(self._world.images) if one.metadata_offset <= broker.replayed)
        partition = broker.partition

        def leader(_topic: str, _number: int, epoch: int = NO_EPOCH) -> Partition:
            partition.check_leader_epoch(epoch)
            return partition

        def readable(_topic: str, _number: int, epoch: int = NO_EPOCH) -> Partition:
            if partition.is_leader:
                return leader(_topic, _number, epoch)
            partition.check_serves_near(epoch)
            return partition

        def preferred(_partition: Partition, rack: str, offset: int) -> int | None:
            if rack_of(broker.node_id) == rack:
                return None
            return partition.near_replica(offset, lambda one: is_near(image.brokers.get(one), rack))

        return SimpleNamespace(
            partitions=SimpleNamespace(leader=leader, readable=readable),
            near_reads=SimpleNamespace(preferred=preferred),
            config=SimpleNamespace(fetch_max_bytes=MAX_BYTES),
        )

    def _judge(self, broker: Broker, message: Any, size_bytes: int) -> None:
        """Check a response at the moment in which it is sent."""
        for preferred in getattr(message, "preferred_read_replicas", ()):
            if preferred.node_id not in broker.partition.in_sync_replicas:
                raise ViolationError(
                    f"R66: leader {broker.node_id} names {preferred.node_id}, which is not in sync"
                )
        for one in message.partitions:
            if one.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and broker.partition.is_leader:
                self._may_reset = True
        if size_bytes and not broker.partition.is_leader:
            self.follower_reads += 1

    def _take(self, answer: _Answer) -> None:
        now_ms, assigned = self._world.now_ms, self._assigned
        payload = memoryview(answer.payload)
        assigned.on_fetched(answer.plan.requested, answer.message.partitions, payload, now_ms, 0.5)
        assigned.on_preferred(
            answer.plan.requested, getattr(answer.message, "preferred_read_replicas", ()), now_ms
        )
        while (batch := assigned.next_batch()) is not None:
            header = batch.batch.header
            if batch.from_offset != self._expected:
                raise ViolationError(
                    f"I6: the near consumer reads {batch.from_offset}, and {self._expected} is next"
                )
            if header.next_offset > self._world.committed_end:
                raise ViolationError(
                    f"R65: records below {header.next_offset} were read,"
                    f" and those below {self._world.committed_end} are committed"
                )
            value = int.from_bytes(batch.batch.buffer[HEADER_BYTES : HEADER_BYTES + 8], "big")
            for offset in range(batch.from_offset, header.next_offset):
                if self.values.setdefault(offset, value) != value:
                    raise ViolationError(f"I6: offset {offset} has changed after it was read")
            self._expected = header.next_offset

    def check(self, first: int, value_of: Callable[[int], int | None]) -> None:
        """Raise ViolationError if a leader's log, which begins at ``first``, lacks a record that was read."""
        for offset, value in self.values.items():
            if offset >= first and value_of(offset) != value:
                raise ViolationError(f"I6: the record at {offset} was read near, and is gone")


def rack_of(node_id: int) -> str:
    return f"rack-{node_id}"


_CLIENT: Any = SimpleNamespace(authorizer=None, sent_ends={}, node_id=None)
