"""Random histories of one group: late, expelled and replaced members, their offsets (R35, R38 to R40, R56).

The coordinator is the real state machine on its log, and is sometimes replaced by another one. Whether it
must accept a request follows from its own description of the group. ``run_group_seed`` returns the violation
of a seed, or None.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from kafkalite.errors import BrokerError, ErrorCode
from kafkalite.groups.settings import GroupSettings
from kafkalite.protocol.messages.groups import (
    CommittedOffset,
    DescribedMember,
    GroupPartition,
    OffsetCommitRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)
from proof.core.parts import ViolationError
from proof.groups.world import Consumer, Coordinator, topic_id

STEPS: Final = 250
PARTITIONS: Final = 4
_TOPIC: Final = "t"
_UNSTABLE: Final = int(ErrorCode.UNSTABLE_OFFSET_COMMIT)
_NOTHING: Final = (-1, -1, None)
_Value = tuple[int, int, str | None]


class Commit(NamedTuple):
    """A commit in transit. ``producer_id`` is -1 outside of transactions."""

    member_id: str
    member_epoch: int
    partition: int
    value: _Value
    producer_id: int
    connection: int


class World:
    """One group of at most four members, a client that is no member, and transactions with offsets."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.coordinator = Coordinator(GroupSettings(session_timeout_ms=1_000), t=PARTITIONS)
        self.members = [Consumer(self.coordinator, f"m{number}", _TOPIC) for number in range(4)]
        self.heard_ms: dict[str, int] = {}  # when each member received its last response
        self.transit: list[Commit] = []
        self.committed: dict[int, _Value] = {}
        #: {producer id: {partition: (its place in the log, value)} of its open transaction}
        self.pending: dict[int, dict[int, tuple[int, _Value]]] = {}
        self.connection = 1  # the newest; members use it, and what they sent before is in transit
        #: the newest connection of an accepted commit by (member id, epoch), since the coordinator loaded
        self.newest: dict[tuple[str, int], int] = {}
        self.places = 0
        self.values = 0
        self.producers = 7_000

    def step(self) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.beat, 30),
            (self.revoke, 20),
            (self.send, 12),
            (self.deliver, 20),
            (self.wait, 10),
            (self.leave, 2),
            (self.end, 6),
            (self.reconnect, 2),
            (self.replace_coordinator, 1),
        ]
        calls, weights = zip(*steps, strict=True)
        self.rng.choices(calls, weights)[0]()
        self.check()

    def beat(self) -> None:
        member = self.rng.choice(self.members)
        is_lost = self.rng.random() < 0.1
        try:
            member.beat(is_lost=is_lost)
        except BrokerError:
            member.on_expelled()
            return
        if not is_lost:
            self.heard_ms[member.member_id] = self.coordinator.now.monotonic_ms

    def revoke(self) -> None:
        member = self.rng.choice(self.members)
        if self.rng.random() < 0.3:
            member.give_back()
        else:
            member.settle()

    def leave(self) -> None:
        member = self.rng.choice(self.members)
        if member.epoch > 0:
            with suppress(BrokerError):
                member.leave()

    def wait(self) -> None:
        self.coordinator.advance(self.rng.choice([10, 100, 400, 1_200]))

    def send(self) -> None:
        """Send a commit, from a member with its current epoch, no member, or an unknown member."""
        self.values += 1
        value = (self.values, self.rng.randrange(5), self.rng.choice([None, "", "told"]))
        member = self.rng.choice(self.members)
        who = self.rng.choice(
            [(member.member_id, member.epoch), (member.member_id, member.epoch), ("", -1), ("stranger", 3)]
        )
        producer_id = -1
        if self.rng.random() < 0.4:
            self.producers += self.rng.random() < 0.5
            producer_id = self.producers
        self.transit.append(Commit(*who, self.rng.randrange(PARTITIONS), value, producer_id, self.connection))

    def reconnect(self) -> None:
        self.connection += 1

    def deliver(self) -> None:
        if not self.transit:
            return
        commit = self.transit.pop(self.rng.randrange(len(self.transit)))
        present = {one.member_id: one.member_epoch for one in self._members()}
        is_allowed = present.get(commit.member_id) == commit.member_epoch or (
            not present and commit.member_epoch < 0
        )
        offset, epoch, metadata = commit.value
        entry = CommittedOffset(
            _TOPIC, commit.partition, offset, epoch, metadata, 0, topic_id(_TOPIC), 0, None
        )
        rest = ("g", commit.member_id, commit.member_epoch, None, [entry])
        try:
            if commit.producer_id < 0:
                self.coordinator.ask(OffsetCommitRequest(*rest), connection=commit.connection)
            else:
                self.coordinator.ask(TxnOffsetCommitRequest("txn", commit.producer_id, 0, *rest))
        except BrokerError as error:
            if is_allowed and not self._is_late(commit, {epoch for _, epoch in self.newest}):
                raise ViolationError(f"L2: {commit} was refused: {error}") from error
            return
        if not is_allowed:
            rule = "R39" if commit.producer_id < 0 else "R35"
            raise ViolationError(f"{rule}: {commit} was accepted; the members are {present}")
        self.places += 1
        if commit.producer_id < 0 and commit.member_id:
            if self._is_late(commit, {commit.member_epoch}):
                raise ViolationError(f"R56: {commit} was accepted; its member has committed since, elsewhere")
            self.newest[commit.member_id, commit.member_epoch] = commit.connection
        if commit.producer_id < 0:
            self._take(commit.partition, self.places, commit.value)
        else:
            self.pending.setdefault(commit.producer_id, {})[commit.partition] = (self.places, commit.value)

    def _is_late(self, commit: Commit, epochs: set[int]) -> bool:
        """Whether the member has committed at one of ``epochs`` on a newer connection."""
        newest = [self.newest.get((commit.member_id, epoch), 0) for epoch in epochs]
        return commit.producer_id < 0 and commit.connection < max(newest, default=0)

    def _take(self, partition: int, place: int, value: _Value) -> None:
        """Apply an offset. It replaces all offsets before it in the log, also those of open transactions."""
        self.committed[partition] = value
        for offsets in self.pending.values():
            if partition in offsets and offsets[partition][0] < place:
                del offsets[partition]

    def end(self) -> None:
        """Deliver the marker of an open transaction."""
        if self.pending:
            producer_id = self.rng.choice(list(self.pending))
            offsets, is_commit = self.pending.pop(producer_id), self.rng.random() < 0.6
            self.coordinator.end_transaction(producer_id, is_commit=is_commit)
            for partition, (place, value) in offsets.items() if is_commit else ():
                self._take(partition, place, value)

    def replace_coordinator(self) -> None:
        self.coordinator.reload()
        self.newest.clear()

    def _members(self) -> list[DescribedMember]:
        try:
            return self.coordinator.describe().members
        except (BrokerError, IndexError):
            return []

    def check(self) -> None:
        now_ms, owners = self.coordinator.now.monotonic_ms, dict[tuple[str, int], str]()
        for member in self.members:
            heard_ms = self.heard_ms.get(member.member_id, -1_000)
            if now_ms - heard_ms < self.coordinator.settings.session_timeout_ms:
                for partition in member.owned:
                    other = owners.setdefault(partition, member.member_id)
                    if other != member.member_id:
                        raise ViolationError(f"R38: {other} and {member.member_id} own {partition}")
        unstable = {partition for offsets in self.pending.values() for partition in offsets}
        wanted = [GroupPartition(_TOPIC, number) for number in range(PARTITIONS)]
        for is_stable in (False, True):
            asked = OffsetFetchRequest("g", "", -1, is_stable, wanted)
            for found in self.coordinator.ask(asked).offsets:
                if is_stable and found.partition in unstable:
                    if found.error_code != _UNSTABLE:
                        raise ViolationError(f"R35: {found} while a transaction has an offset of it open")
                    continue
                value = (found.offset, found.leader_epoch, found.metadata)
                expected = self.committed.get(found.partition, _NOTHING)
                if found.error_code or value != expected:
                    raise ViolationError(f"R40: {found}, and committed is {expected}")


def run_group_seed(seed: int, steps: int = STEPS) -> str | None:
    """Return the violation of one seed's history, or None."""
    world = World(seed)
    try:
        for _ in range(steps):
            world.step()
    except (ViolationError, AssertionError) as error:
        return str(error)
    return None
