"""One group coordinator on its log, with members that behave like consumers, for tests and schedules.

Records of the coordinator are appended and replayed at once, as in the broker, and the next coordinator can
load the log. The test decides which member receives which response, and when.
"""

from __future__ import annotations

from typing import Any, Final

from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, TopicShape
from kafkalite.groups.machine import GroupMachine
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_PRODUCER_ID
from kafkalite.protocol.messages.groups import (
    AssignedTopic,
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DescribedGroup,
    DescribeGroupsRequest,
    GroupPartition,
    OffsetCommitRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)
from proof.durable_state import durable_state

CALLER: Final = Caller("app", "10.0.0.1")
Owned = frozenset[tuple[str, int]]
"""(topic, partition)"""


def topic_id(name: str, incarnation: int = 0) -> str:
    return f"{name:x<28}{incarnation:04d}"


class Coordinator:
    """One state machine on one log. Its records are appended and replayed at once, as in the broker."""

    def __init__(self, settings: GroupSettings | None = None, **topics: int) -> None:
        self.settings = settings or GroupSettings()
        self.now = Instant(1_000_000, 1_700_000_000_000)
        self.topics = {name: TopicShape(topic_id(name), count) for name, count in topics.items()}
        self.log: list[tuple[int, StateRecord] | tuple[int, bool]] = []  # a record, or a marker
        self.machine = self._new_machine()

    def _new_machine(self) -> GroupMachine:
        machine = GroupMachine(self.settings)
        for producer_id, entry in self.log:
            if isinstance(entry, bool):
                machine.end_transaction(producer_id, is_commit=entry)
            else:
                machine.replay(entry, self.now, producer_id=producer_id)
        machine.on_loaded(self.now)
        return machine

    def reload(self) -> None:
        """Replace the coordinator by another one that loads the log. Both must have the same state."""
        before = durable_state(self.machine)
        self.machine = self._new_machine()
        assert durable_state(self.machine) == before

    def compact(self) -> None:
        """Keep only the last record of each key, and no tombstones. Requires that no transaction is open."""
        plain = {entry.key: entry for _, entry in self.log if isinstance(entry, StateRecord)}
        order = {
            entry.key: index for index, (_, entry) in enumerate(self.log) if isinstance(entry, StateRecord)
        }
        kept = sorted(
            (key for key, record in plain.items() if record.value is not None), key=order.__getitem__
        )
        self.log = [(NO_PRODUCER_ID, plain[key]) for key in kept]

    def take(self, decision: Decision) -> Any:
        for record in decision.records:
            self.log.append((decision.producer_id, record))
            self.machine.replay(record, self.now, producer_id=decision.producer_id)
        return decision.reply

    def ask(self, request: Any, *, connection: int = 0) -> Any:
        """Return the response to a request that arrives on the connection with this number."""
        caller = CALLER._replace(connection=connection)
        return self.take(self.machine.decide(request, caller, self.now, self.topics))

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        self.log.append((producer_id, is_commit))
        self.machine.end_transaction(producer_id, is_commit=is_commit)

    def advance(self, ms: int) -> None:
        """Advance the time, and apply everything that becomes due."""
        self.now = Instant(self.now.monotonic_ms + ms, self.now.wall_ms + ms)
        self.tick()

    def tick(self) -> int:
        """Apply everything that is due. Return the number of ticks that wrote records."""
        for count in range(1_000):
            due_ms = self.machine.next_deadline_ms()
            decision = self.machine.tick(self.now, self.topics)
            if not decision.records:
                after_ms = self.machine.next_deadline_ms()
                assert after_ms is None or due_ms is None or after_ms > self.now.monotonic_ms or after_ms == 0
                if after_ms != 0:
                    return count
            self.take(decision)
        raise AssertionError("ticking does not end")

    def set_topics(self, **topics: int | tuple[int, int]) -> None:
        """Set partition counts, or (partition count, incarnation), by topic name."""
        shapes = {}
        for name, shape in topics.items():
            count, incarnation = shape if isinstance(shape, tuple) else (shape, 0)
            shapes[name] = TopicShape(topic_id(name, incarnation), count)
        self.topics = shapes
        self.tick()

    # --- shorthands

    def commit(
        self,
        offsets: dict[tuple[str, int], int],
        *,
        group_id: str = "g",
        member_id: str = "",
        epoch: int = -1,
        instance_id: str | None = None,
        producer_id: int | None = None,
        metadata: str | None = None,
        topic_id: str = "",
        connection: int = 0,
    ) -> list[int]:
        """Commit offsets. Return the error code of each."""
        entries = [
            CommittedOffset(topic, partition, offset, 7, metadata, 0, topic_id, 0, None)
            for (topic, partition), offset in offsets.items()
        ]
        if producer_id is None:
            request: Any = OffsetCommitRequest(group_id, member_id, epoch, instance_id, entries)
        else:
            request = TxnOffsetCommitRequest(
                "txn", producer_id, 0, group_id, member_id, epoch, instance_id, entries
            )
        return [entry.error_code for entry in self.ask(request, connection=connection).offsets]

    def committed(
        self,
        *partitions: tuple[str, int],
        group_id: str = "g",
        require_stable: bool = False,
        member_id: str = "",
        epoch: int = -1,
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """Return {partition: (offset, error code)} of the given partitions, or of all that have an offset."""
        wanted = [GroupPartition(*partition) for partition in partitions] or None
        response = self.ask(OffsetFetchRequest(group_id, member_id, epoch, require_stable, wanted))
        return {(e.topic, e.partition): (e.offset, e.error_code) for e in response.offsets}

    def describe(self, group_id: str = "g") -> DescribedGroup:
        group: DescribedGroup = self.ask(DescribeGroupsRequest([group_id], True)).groups[0]
        return group

    @property
    def state(self) -> str:
        return self.describe().state

    @property
    def causes(self) -> list[str]:
        return [event.cause for event in self.describe().journal]


def flatten(topics: list[AssignedTopic]) -> Owned:
    return frozenset((topic.topic_id, number) for topic in topics for number in topic.partitions)


def as_topics(owned: Owned) -> list[AssignedTopic]:
    numbers: dict[str, list[int]] = {}
    for id_, number in sorted(owned):
        numbers.setdefault(id_, []).append(number)
    return [AssignedTopic(id_, "", part) for id_, part in numbers.items()]


class Consumer:
    """A member that behaves like the client library. ``owned`` are the partitions that it reads."""

    def __init__(
        self,
        coordinator: Coordinator,
        member_id: str,
        *topics: str,
        instance_id: str | None = None,
        pattern: str | None = None,
        assignor: str | None = None,
        rebalance_timeout_ms: int = 60_000,
        group_id: str = "g",
    ) -> None:
        self.coordinator = coordinator
        self.group_id = group_id
        self.member_id = member_id
        self.instance_id = instance_id
        self.topics = list(topics)
        self.pattern = pattern
        self.assignor = assignor
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.epoch = 0
        self.assigned: Owned = frozenset()
        self.owned: Owned = frozenset()
        self.is_owned_told = False
        self.is_behind = False  # whether a response was lost, so that the next heartbeat is a full one

    def request(self, epoch: int | None = None) -> ConsumerGroupHeartbeatRequest:
        epoch = self.epoch if epoch is None else epoch
        is_joining = epoch == 0
        says_owned = epoch > 0 and (not self.is_owned_told or self.is_behind)
        return ConsumerGroupHeartbeatRequest(
            self.group_id,
            self.member_id,
            epoch,
            self.instance_id,
            self.rebalance_timeout_ms if is_joining else -1,
            self.topics if is_joining else None,
            (self.pattern or "") if is_joining else None,
            self.assignor if is_joining else None,
            as_topics(self.owned) if says_owned else ([] if is_joining else None),
            0,
        )

    def on_answer(
        self, request: ConsumerGroupHeartbeatRequest, answer: ConsumerGroupHeartbeatResponse
    ) -> None:
        self.is_behind = False
        self.is_owned_told = answer.member_epoch == request.member_epoch and (
            request.owned is not None or self.is_owned_told
        )
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            self.assigned = flatten(answer.assignment)

    def beat(self, *, is_lost: bool = False) -> ConsumerGroupHeartbeatResponse:
        """Send a heartbeat and return its response. If ``is_lost``, the member does not receive it."""
        request = self.request()
        answer: ConsumerGroupHeartbeatResponse = self.coordinator.ask(request)
        if is_lost:
            self.is_behind = True
        else:
            self.on_answer(request, answer)
        return answer

    join = beat

    def give_back(self) -> None:
        """Revoke the partitions that are no longer assigned."""
        self._own(self.owned & self.assigned)

    def settle(self) -> None:
        """Revoke the partitions that are no longer assigned, and add the new ones."""
        self._own(self.assigned)

    def _own(self, owned: Owned) -> None:
        if owned != self.owned:
            self.owned = owned
            self.is_owned_told = False

    def leave(self, epoch: int = -1) -> None:
        self.coordinator.ask(self.request(epoch))
        self.on_expelled()

    def on_expelled(self) -> None:
        """Stop reading: the member was expelled."""
        self.epoch = 0
        self.assigned = self.owned = frozenset()
        self.is_owned_told = self.is_behind = False

    @property
    def numbers(self) -> list[int]:
        return sorted(number for _, number in self.owned)


def settle(*consumers: Consumer) -> int:
    """Send heartbeats until no consumer receives an update. Return their number."""
    for beats in range(10_000):
        busy = [c for c in consumers if not c.is_owned_told or c.coordinator.machine.has_update(c.request())]
        if not busy:
            return beats
        consumer = busy[beats % len(busy)]
        consumer.beat()
        consumer.settle()
    raise AssertionError("the group does not settle")
