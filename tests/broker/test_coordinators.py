"""Shards: decide, append, replay, respond when it is committed; load before serving (R36, R39).

Covers ``coordinators.py`` and ``shard.py``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.coordination.internal_topics import GROUP, partition_of
from kafkalite.broker.coordination.shard import Shard
from kafkalite.broker.server.responses import Pending, Refusal, Reply, settled
from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, TopicShape
from kafkalite.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ErrorCode,
    NotCoordinatorError,
    NotEnoughReplicasError,
    PolicyViolationError,
)
from kafkalite.model import NO_PRODUCER_ID, OFFSETS_TOPIC
from kafkalite.protocol.messages import admin, groups
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster, VirtualClock
from kafkalite.testing.wire import WireClient
from proof.mutants import without
from proof.waiting import eventually

CALLER = Caller("test", "here")


class FakeMachine:
    """Takes ``("set", key, value)``, ``("get", key)``, ``("later", key, at_ms)``."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.pending: dict[int, dict[bytes, bytes]] = {}
        self.alarms: dict[bytes, int] = {}
        self.loaded_at: Instant | None = None
        self.topics: list[str] = []
        self.ticks = 0
        self.has_broken_replay = False

    def __len__(self) -> int:
        return len(self.values)

    transaction_count = property(__len__)

    def decide(
        self, command: Any, caller: Caller, now: Instant, topics: Mapping[str, TopicShape]
    ) -> Decision:
        match command:
            case ("set", key, value):
                return Decision((StateRecord(key, value),), ("was", self.values.get(key)))
            case ("txn", producer_id, producer_epoch, key, value):
                return Decision((StateRecord(key, value),), "pending", producer_id, producer_epoch)
            case ("get", key):
                return Decision((), self.values.get(key))
            case ("later", key, at_ms):
                self.alarms[key] = at_ms
                return Decision((), "noted")
            case ("refuse",):
                raise PolicyViolationError(f"{len(self.values)} are enough")
            case ("topics",):
                return Decision((), dict(topics))
            case ("who",):
                return Decision((), caller)
        raise ValueError(command)

    def tick(self, now: Instant, topics: Mapping[str, TopicShape]) -> Decision:
        self.ticks += 1
        self.topics = sorted(topics)
        due = [key for key, at_ms in self.alarms.items() if at_ms <= now.monotonic_ms][:1]
        return Decision(tuple(StateRecord(key, b"rang") for key in due))

    def next_deadline_ms(self) -> int | None:
        return min(self.alarms.values(), default=None)

    def replay(self, record: StateRecord, now: Instant, *, producer_id: int = NO_PRODUCER_ID) -> None:
        if self.has_broken_replay:
            raise KeyError("broken")
        key, value = record
        self.alarms.pop(key, None)
        if producer_id != NO_PRODUCER_ID:
            self.pending.setdefault(producer_id, {})[key] = value or b""
        elif value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        pending = self.pending.pop(producer_id, {})
        if is_commit:
            self.values.update(pending)

    def on_loaded(self, now: Instant) -> None:
        self.loaded_at = now


@pytest.fixture(autouse=True)
def _fake_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kafkalite.broker.coordination.coordinators._product_machines",
        lambda config: {0: FakeMachine, 1: FakeMachine},
    )


@asynccontextmanager
async def a_broker(**settings: Any) -> AsyncIterator[Broker]:
    settings = {"log_dirs": "/broker", "filesystem": MemoryFileSystem(), **settings}
    async with Broker(listeners="inproc://", offsets_topic_num_partitions=2, **settings) as broker:
        await find(broker, "g")
        yield broker


async def find(broker: Broker, key: str, key_type: int = GROUP) -> groups.Coordinator:
    async with WireClient(broker.address) as wire:
        answer = await wire.call(groups.FindCoordinatorRequest(key_type, [key]))
    (found,) = answer.coordinators
    return found


async def loaded(broker: Broker, group: str = "g") -> Shard:
    while True:
        try:
            return broker.coordinators.groups(group)
        except CoordinatorLoadInProgressError:
            await asyncio.sleep(0)


# --- serving ---------------------------------------------------------------------------------------


async def test_a_decision_is_appended_replayed_and_acknowledged_when_it_is_committed() -> None:
    async with a_broker() as broker:
        shard = await loaded(broker)
        answer = shard.submit(("set", b"k", b"1"), CALLER)
        assert isinstance(answer, Pending)  # the batch is not on the disk yet
        assert shard.machine.values == {b"k": b"1"}  # but later decisions rest on it
        assert (shard.high_watermark, shard.end_offset) == (0, 1)
        assert await settled(answer) == ("was", None)
        assert (shard.high_watermark, shard.end_offset) == (1, 1)
        assert await shard.ask(("set", b"k", b"2")) == ("was", b"1")


async def test_reads_and_errors_wait_too() -> None:
    """R40: no response, not even an error, reveals records that may still be lost."""
    async with a_broker() as broker:
        shard = await loaded(broker)
        told: list[Any] = []
        written = shard.submit(("set", b"k", b"1"), CALLER)
        read = shard.submit(("get", b"k"), CALLER)
        refused = shard.submit(("refuse",), CALLER)
        for answer in (written, read, refused):
            assert isinstance(answer, Pending)
            answer.then(told.append)
        assert not told
        await eventually(lambda: len(told) == 3)
        assert [type(answer) for answer in told] == [Reply, Reply, Refusal]
        assert told[1].message == b"1"
        assert told[2].error_code == ErrorCode.POLICY_VIOLATION
        assert isinstance(shard.submit(("get", b"k"), CALLER), Reply)  # nothing is uncommitted any more


async def test_in_memory_everything_is_answered_at_once() -> None:
    async with Broker(listeners="inproc://") as broker:
        await find(broker, "g")
        shard = await loaded(broker)
        assert shard.submit(("set", b"k", b"1"), CALLER) == Reply(("was", None))
        assert len(broker.image.topics[OFFSETS_TOPIC].partitions) == 4


async def test_a_mutant_that_responds_early_is_noticed() -> None:
    async with a_broker() as broker:
        shard = await loaded(broker)
        with without("R36-answer-uncommitted"):
            assert isinstance(shard.submit(("set", b"k", b"1"), CALLER), Reply)
        assert shard.high_watermark == 0


async def test_an_append_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_broker() as broker:
        shard = await loaded(broker)

        refusals: list[None] = []

        def refuse(*_: Any) -> None:
            refusals.append(None)
            raise NotEnoughReplicasError("1 of 2")

        monkeypatch.setattr(type(shard.partition), "append_state", refuse)
        answer = shard.submit(("set", b"k", b"1"), CALLER)
        assert isinstance(answer, Refusal)
        assert answer.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert shard.machine.values == {}


async def test_a_record_that_cannot_be_replayed_stops_the_broker() -> None:
    broker = Broker(listeners="inproc://")
    await broker.start()
    await find(broker, "g")
    shard = await loaded(broker)
    shard.machine.has_broken_replay = True
    with pytest.raises(AssertionError, match="can't be replayed"):
        shard.submit(("set", b"k", b"1"), CALLER)
    await broker.stop()


async def test_the_caller_is_passed_to_the_machine() -> None:
    async with a_broker() as broker:
        shard = await loaded(broker)
        assert await shard.ask(("who",), CALLER) == CALLER


# --- loading ---------------------------------------------------------------------------------------


async def test_a_restarted_broker_loads_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = MemoryFileSystem()
    async with a_broker(filesystem=filesystem) as broker:
        shard = await loaded(broker)
        for number in range(300):
            shard.submit(("set", b"%d" % (number % 100), b"%d" % number), CALLER)
        await shard.ask(("set", b"1", None))
    async with Broker(listeners="inproc://", log_dirs="/broker", filesystem=filesystem) as broker:
        shard = await loaded(broker)
        assert shard.machine.loaded_at is not None
        expected = {b"%d" % (number % 100): b"%d" % number for number in range(300)}
        del expected[b"1"]
        assert shard.machine.values == expected


async def test_while_it_loads_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """R36"""
    gate = asyncio.Event()

    async def load(shard: Shard) -> int:
        await gate.wait()
        shard.finish_loading()
        return 0

    monkeypatch.setattr("kafkalite.broker.coordination.coordinators.load", load)
    async with a_broker() as broker:
        with pytest.raises(CoordinatorLoadInProgressError):
            broker.coordinators.groups("g")
        number = broker.coordinators.partition_of(GROUP, "g")
        shard = broker.coordinators.find(GROUP, number)
        answer = shard.submit(("get", b"k"), CALLER)
        assert isinstance(answer, Refusal)
        assert answer.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        with without("R36-serve-unloaded"):
            assert broker.coordinators.groups("g") is shard
        gate.set()
        assert await (await loaded(broker)).ask(("get", b"k")) is None


async def test_transactions_in_the_log_are_pending_until_their_marker(batch_of: Any) -> None:
    filesystem = MemoryFileSystem()
    async with a_broker(filesystem=filesystem) as broker:
        shard = await loaded(broker)
        for producer_id, key in ((1, b"committed"), (2, b"aborted"), (3, b"open")):
            await shard.ask(("txn", producer_id, 0, key, b"v"))
        for producer_id, is_commit in ((1, True), (2, False)):
            shard.partition.append_marker(producer_id, 1, 0, is_commit, shard.now().wall_ms)
            broker.coordinators.on_marker(shard.partition, producer_id, is_commit)
        assert shard.machine.values == {b"committed": b"v"}
        assert isinstance(shard.submit(("get", b"committed"), CALLER), Pending)
        assert await shard.ask(("get", b"committed")) == b"v"
    async with Broker(listeners="inproc://", log_dirs="/broker", filesystem=filesystem) as broker:
        machine = (await loaded(broker)).machine
        assert machine.values == {b"committed": b"v"}
        assert machine.pending == {3: {b"open": b"v"}}


async def test_a_shard_whose_records_cannot_be_read_is_not_available(
    caplog: pytest.LogCaptureFixture,
) -> None:
    filesystem = MemoryFileSystem()
    async with a_broker(filesystem=filesystem) as broker:
        await (await loaded(broker)).ask(("set", b"k", b"v"))
    broken = FakeMachine()
    broken.has_broken_replay = True
    broker = Broker(listeners="inproc://", log_dirs="/broker", filesystem=filesystem)
    with pytest.MonkeyPatch.context() as patch:
        machines = {0: lambda: broken, 1: FakeMachine}
        patch.setattr("kafkalite.broker.coordination.coordinators._product_machines", lambda config: machines)
        async with broker:
            await eventually(lambda: "coordinator not loaded" in caplog.text)
            with pytest.raises(CoordinatorNotAvailableError, match="could not be loaded"):
                broker.coordinators.groups("g")
    assert "coordinator not loaded" in caplog.text


# --- time and topics -------------------------------------------------------------------------------


async def test_the_machine_is_ticked_at_its_deadline() -> None:
    clock = VirtualClock()
    async with Cluster(clock=clock, offsets_topic_num_partitions=1) as cluster:
        await find(cluster.broker, "g")
        shard = await loaded(cluster.broker)
        now_ms = clock.monotonic_ms()
        await shard.ask(("later", b"second", now_ms + 60_000))
        await shard.ask(("set", b"x", b"y"))
        await shard.ask(("later", b"first", now_ms + 30_000))
        await shard.ask(("set", b"x", b"y"))
        await clock.advance(30_001)
        await asyncio.sleep(0)
        assert b"first" in shard.machine.values
        assert b"second" not in shard.machine.values
        await clock.advance(30_000)
        await asyncio.sleep(0)
        assert b"second" in shard.machine.values


async def test_a_machine_is_ticked_when_topics_change(new_topic: Any) -> None:
    async with a_broker() as broker, WireClient(broker.address) as wire:
        shard = await loaded(broker)
        await wire.call(new_topic("t", 3))
        await eventually(lambda: shard.machine.topics == [OFFSETS_TOPIC, "t"])
        shapes = await shard.ask(("topics",))
        assert shapes["t"] == TopicShape(broker.image.topics["t"].topic_id, 3)
        ticks = shard.machine.ticks
        await wire.call(admin.DeleteTopicsRequest(1000, ["t"]))
        await eventually(lambda: shard.machine.topics == [OFFSETS_TOPIC])
        assert shard.machine.ticks == ticks + 1


async def test_callbacks_run_once_a_turn_and_again_after_the_commit() -> None:
    async with a_broker() as broker:
        shard = await loaded(broker)
        told: list[tuple[int, int]] = []
        broker.coordinators.on_change(
            GROUP, lambda shard: told.append((shard.high_watermark, shard.end_offset))
        )
        first = shard.submit(("set", b"k", b"1"), CALLER)
        second = shard.submit(("set", b"k", b"2"), CALLER)
        await settled(first)
        await settled(second)
        await asyncio.sleep(0)
        assert told[0][1] == 2
        assert told[-1] == (2, 2)


# --- the coordinator of a key ----------------------------------------------------------------------


async def test_the_coordinator_is_found_and_its_topic_created_once() -> None:
    async with Broker(listeners="inproc://", offsets_topic_num_partitions=7) as broker:
        found = await asyncio.gather(*(find(broker, f"g{number}") for number in range(20)))
        assert {one.error_code for one in found} == {0}
        assert {one.node_id for one in found} == {broker.config.node_id}
        assert [one.partition for one in found] == [partition_of(f"g{number}", 7) for number in range(20)]
        assert found[0].address == broker.address
        configs = broker.image.topic_configs(OFFSETS_TOPIC)
        assert configs["min.insync.replicas"] == "1"


async def test_a_group_before_its_topic_exists() -> None:
    async with Broker(listeners="inproc://") as broker:
        with pytest.raises(CoordinatorNotAvailableError, match="FindCoordinator creates it"):
            broker.coordinators.groups("g")
        async with WireClient(broker.address) as wire:
            answer = await wire.call(groups.FindCoordinatorRequest(GROUP, [""]))
            assert answer.coordinators[0].error_code == ErrorCode.INVALID_REQUEST


def test_the_partition_of_a_key_is_kafkas() -> None:
    """As Kafka's clients hash: murmur2("21") is -973932308."""
    assert partition_of("21", 50) == (-973932308 & 0x7FFFFFFF) % 50


async def test_a_stopped_broker_refuses_held_requests() -> None:
    async with a_broker() as broker:
        shard = await loaded(broker)
        answer = shard.submit(("set", b"k", b"1"), CALLER)
        broker.coordinators.end()
        with pytest.raises(NotCoordinatorError):
            await settled(answer)
        assert isinstance(shard.submit(("get", b"k"), CALLER), Refusal)
        with pytest.raises(NotCoordinatorError):
            broker.coordinators.groups("g")


# --- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_acknowledged_decisions_survive_every_crash(seed: int) -> None:
    """R36, R39: no response is ever revoked, on a disk that loses everything that was not synced."""
    rng = random.Random(seed)
    told: dict[bytes, int] = {}  # the least value that may be read
    async with Cluster(seed=seed, offsets_topic_num_partitions=1) as cluster:
        await find(cluster.broker, "g")
        number = 0
        for _ in range(8):
            shard = await loaded(cluster.broker)
            stuck_at = rng.randrange(12)
            for turn in range(12):
                if turn == stuck_at:  # from here on nothing is synced
                    shard.partition.observer = None
                number += 1
                key = b"%d" % rng.randrange(3)
                command = ("get", key) if rng.random() < 0.4 else ("set", key, b"%d" % number)
                answer = shard.submit(command, CALLER)
                note = partial(_note, command, told)
                answer.then(note) if isinstance(answer, Pending) else note(answer)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            await cluster.crash()
            await cluster.start()
        values = (await loaded(cluster.broker)).machine.values
        assert {key: int(values.get(key, b"0")) >= least for key, least in told.items()} == dict.fromkeys(
            told, True
        )
        assert told


def _note(command: tuple[Any, ...], told: dict[bytes, int], answer: Any) -> None:
    """Remember what the response guarantees."""
    if isinstance(answer, Refusal):
        return
    value = command[2] if command[0] == "set" else answer.message
    told[command[1]] = max(told.get(command[1], 0), int(value or b"0"))


async def test_a_response_that_is_never_committed_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalite.broker.coordination.shard.COMMIT_TIMEOUT_MS", 30)
    async with a_broker() as broker:
        shard = await loaded(broker)
        shard.partition.observer = None
        answers = [shard.submit(("set", b"k", b"%d" % number), CALLER) for number in range(3)]
        for answer in answers:
            with pytest.raises(CoordinatorNotAvailableError, match="may still be"):
                await settled(answer)
        assert shard.machine.values == {b"k": b"2"}  # records in the log stay


async def test_an_invariant_that_breaks_in_a_tick_stops_the_broker() -> None:
    broker = Broker(listeners="inproc://")
    await broker.start()
    await find(broker, "g")
    shard = await loaded(broker)
    await shard.ask(("later", b"k", 0))
    shard.machine.has_broken_replay = True
    shard.tick_soon()
    with pytest.raises(AssertionError, match="can't be replayed"):
        await broker.wait_stopped()


async def test_a_tick_that_cannot_be_written_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalite.broker.coordination.shard.TICK_RETRY_MS", 20)
    async with a_broker() as broker:
        shard = await loaded(broker)
        append_state = type(shard.partition).append_state

        refusals: list[None] = []

        def refuse(*_: Any) -> None:
            refusals.append(None)
            raise NotEnoughReplicasError("1 of 2")

        monkeypatch.setattr(type(shard.partition), "append_state", refuse)
        await shard.ask(("later", b"k", 0))
        shard.tick_soon()
        await eventually(lambda: refusals)
        assert shard.machine.values == {}
        monkeypatch.setattr(type(shard.partition), "append_state", append_state)
        await eventually(lambda: shard.machine.values == {b"k": b"rang"})
