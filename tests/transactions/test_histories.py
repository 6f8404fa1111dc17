"""Random histories of a coordinator, its producers, a group's writers and their logs (R31-R34).

Every message may come late, twice or never; the coordinator may change at any moment, and read the
complete log or a compacted one. The data logs follow the leaders' rules (R27, R28, R31): see
``DataLog``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kafkalite.coordinator_types import Caller, Instant, StateRecord
from kafkalite.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    OutOfOrderSequenceNumberError,
)
from kafkalite.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    EndTxnGroupRequest,
    EndTxnRequest,
    JoinTxnGroupRequest,
    RetireTxnGroupRequest,
    TxnPartition,
    TxnWinner,
)
from kafkalite.transactions.commands import InitProducerId, MarkersWritten, WithReservedId
from kafkalite.transactions.machine import TransactionMachine, TransactionSettings
from kafkalite.transactions.record_codec import GroupResult, parse_record
from kafkalite.transactions.transaction import NO_BATCH, Transaction, TransactionState
from proof import mutants
from proof.durable_state import durable_state

TIMEOUT_MS = 1_000
EXPIRATION_MS = 20_000
WALL_MS = 1_700_000_000_000
PARTITIONS = [TxnPartition("orders", 0), TxnPartition("orders", 1), TxnPartition("stock", 0)]
CALLER = Caller("tests", "127.0.0.1")

S = TransactionState
NEXT_STATES: dict[TransactionState | None, set[TransactionState]] = {
    None: {S.EMPTY, S.ONGOING},
    S.EMPTY: {S.EMPTY, S.ONGOING, S.COMPLETE_COMMIT, S.COMPLETE_ABORT},
    S.ONGOING: {S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT, S.COMPLETE_COMMIT, S.COMPLETE_ABORT},
    S.PREPARE_COMMIT: {S.COMPLETE_COMMIT},
    S.PREPARE_ABORT: {S.COMPLETE_ABORT},
    S.COMPLETE_COMMIT: {S.EMPTY, S.ONGOING, S.COMPLETE_COMMIT, S.COMPLETE_ABORT},
    S.COMPLETE_ABORT: {S.EMPTY, S.ONGOING, S.COMPLETE_COMMIT, S.COMPLETE_ABORT},
}


class Batch(NamedTuple):
    name: str
    producer_id: int
    epoch: int
    partition: TxnPartition
    sequence: int
    tag: int  # unique in the history

    @property
    def identity(self) -> tuple[int, int]:
        return self.producer_id, self.epoch


class DataLog:
    """One partition's log, by its leader's rules for producers and markers."""

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}
        self.next_sequence: dict[int, int] = {}
        self.open: dict[int, int] = {}  # producer id -> epoch of its open transaction
        self.batches: list[Batch] = []

    def append(self, batch: Batch, verify: Callable[[], None]) -> None:
        epoch = self.epochs.get(batch.producer_id, -1)
        if batch.epoch < epoch:
            raise InvalidProducerEpochError
        expected = self.next_sequence.get(batch.producer_id, 0) if batch.epoch == epoch else 0
        if batch.sequence < expected:
            return  # appended before
        if batch.sequence > expected:
            raise OutOfOrderSequenceNumberError
        if batch.producer_id not in self.open:
            verify()
        elif batch.epoch > epoch:
            raise ConcurrentTransactionsError
        self.epochs[batch.producer_id] = batch.epoch
        self.next_sequence[batch.producer_id] = batch.sequence + 1
        self.open[batch.producer_id] = batch.epoch
        self.batches.append(batch)

    def mark(self, producer_id: int, epoch: int) -> int | None:
        """Return the epoch of the transaction that the marker ends."""
        if epoch <= self.epochs.get(producer_id, -1) and "R31-no-epoch-bump" not in mutants.ACTIVE:
            return None
        self.epochs[producer_id] = epoch
        self.next_sequence[producer_id] = 0
        return self.open.pop(producer_id, None)


class Writer:
    """A producer, or a group's writer, with the identity that it received."""

    def __init__(self, name: str, identity: tuple[int, int], member: str = "", batch_id: int = -1) -> None:
        self.name, self.identity, self.member, self.batch_id = name, identity, member, batch_id
        self.sequences: dict[TxnPartition, int] = {}
        self.sent: list[Batch] = []
        self.acknowledged: set[Batch] = set()
        self.ending: EndTxnRequest | None = None

    def batch(self, partition: TxnPartition, tag: int) -> Batch:
        sequence = self.sequences.get(partition, 0)
        self.sequences[partition] = sequence + 1
        self.sent.append(Batch(self.name, *self.identity, partition, sequence, tag))
        return self.sent[-1]

    @property
    def is_flushed(self) -> bool:
        return self.acknowledged == set(self.sent)

    def begin(self, identity: tuple[int, int]) -> None:
        self.__init__(self.name, identity)  # type: ignore[misc]


class World:
    """All parties, with the invariants asserted at every step."""

    def __init__(self) -> None:
        self.machine = self.new_machine()
        self.now_ms = 0
        self.log: list[StateRecord] = []
        self.logs = {partition: DataLog() for partition in PARTITIONS}
        self.spare_id = 100
        self.tag = 0
        self.writers: list[Writer] = []
        self.finished: list[Writer] = []  # writers of a group whose driver has their results
        self.sent_batches: list[Batch] = []
        self.verified: list[Batch] = []  # by the leader; appended later, if at all
        self.requests: list[Any] = []
        self.markers: list[tuple[str, int, int, bool, TxnPartition]] = []
        self.fates: dict[tuple[int, int], set[bool]] = {}  # the outcomes in the markers of each transaction
        self.decisions: dict[tuple[int, int], bool] = {}
        self.promised: dict[tuple[int, int], set[Batch]] = {}  # reported as committed
        self.dropped: set[tuple[int, int]] = set()  # reported as aborted
        self.members: dict[int, set[tuple[int, int]]] = {}  # batch -> every identity that joined it
        self.results: dict[int, list[str]] = {}

    @staticmethod
    def new_machine() -> TransactionMachine:
        return TransactionMachine(TransactionSettings(60_000, EXPIRATION_MS))

    @property
    def now(self) -> Instant:
        return Instant(self.now_ms, WALL_MS + self.now_ms)

    # --- the coordinator ---------------------------------------------------------------------------

    def ask(self, command: Any) -> Any:
        if isinstance(command, JoinTxnGroupRequest | EndTxnRequest):
            self.spare_id += 1
            command = WithReservedId(command, self.spare_id)
        elif isinstance(command, InitProducerId):
            self.spare_id += 1
            command = command._replace(reserved_producer_id=self.spare_id)
        decision = self.machine.decide(command, CALLER, self.now, {})
        self.append(decision.records)
        return decision.reply

    def append(self, records: tuple[StateRecord, ...]) -> None:
        for record in records:
            self.check(record)
            self.log.append(record)
            self.machine.replay(record, self.now)
        for group in self.machine._table.groups.values():
            assert not group.ongoing(group.last_batch_id), "a member of a decided batch is undecided"

    def check(self, record: StateRecord) -> None:
        item = parse_record(record)
        table = self.machine._table
        if isinstance(item, GroupResult):
            group = table.groups.get(item.name)
            if item.last_batch_id == NO_BATCH:
                assert group is not None and group.is_retired and not group.writers, "it may come back"
                self.results.clear()  # the name belongs to a new application
            elif group is not None and item.retired_ms >= 0:
                assert item[:3] == group.result[:3] and not group.is_retired
                assert not group.ongoing(1_000), "retired at work"
            elif group is not None:
                assert item.last_batch_id > group.last_batch_id
            return
        before = table.get(item.key if isinstance(item, Transaction) else item)
        if not isinstance(item, Transaction):
            assert before is None or not before.is_open or before.is_writer
            return
        if item.is_writer and before is not None and item.writer_name != before.writer_name:
            assert not before.is_open
        assert item.state in NEXT_STATES[before and before.state], f"{before} became {item}"
        if before is None:
            return
        if item.producer_id == before.producer_id:
            assert item.producer_epoch >= before.producer_epoch, "an epoch went back"
        else:
            assert (item.producer_id > before.producer_id, item.producer_epoch) == (True, 0)
        if before.state is S.ONGOING and item.state is not S.ONGOING:
            identity = before.producer_id, before.producer_epoch
            assert item.producer_epoch == before.producer_epoch + 1, "the end took no new epoch"
            assert item.state is not S.EMPTY, "an open transaction was left open"
            assert self.decisions.setdefault(identity, item.is_commit) == item.is_commit

    def reload(self, *, is_compacted: bool) -> None:
        state = durable_state(self.machine)
        records = self.log
        if is_compacted:
            latest = {record.key: number for number, record in enumerate(self.log)}
            records = [self.log[number] for number in sorted(latest.values())]
        self.machine = self.new_machine()
        for record in records:
            self.machine.replay(record, self.now)
        self.machine.on_loaded(self.now)
        assert durable_state(self.machine) == state

    def tick(self) -> None:
        for _ in range(100):
            decision = self.machine.tick(self.now, {})
            self.append(decision.records)
            if not decision.records:
                break
        for transaction in self.machine._table:
            if transaction.state is S.ONGOING:
                assert self.now.wall_ms < transaction.start_ms + transaction.timeout_ms
        deadline_ms = self.machine.next_deadline_ms()
        assert deadline_ms is None or deadline_ms > self.now_ms

    # --- the leaders -------------------------------------------------------------------------------

    def verify(self, batch: Batch) -> None:
        self.ask(AddPartitionsToTxnRequest(batch.name, batch.producer_id, batch.epoch, [batch.partition]))

    def deliver(self, batch: Batch) -> bool:
        try:
            self.logs[batch.partition].append(batch, lambda: self.verify(batch))
        except BrokerError:
            return False
        return True

    def write_marker(
        self, name: str, producer_id: int, epoch: int, is_commit: bool, to: TxnPartition
    ) -> None:
        ended = self.logs[to].mark(producer_id, epoch)
        if ended is not None:
            fate = self.fates.setdefault((producer_id, ended), set())
            fate.add(is_commit)
            assert len(fate) == 1, f"producer {producer_id}, epoch {ended}: committed and aborted"
            assert ended == epoch - 1, "a marker ended another transaction than its own"

    def write_markers(self, count: int = 100, *, is_reported: bool = True) -> None:
        for pending in self.machine.pending_markers():
            written = pending.partitions[:count]
            for partition in written:
                self.markers.append((*pending[:4], partition))
                self.write_marker(*self.markers[-1])
            if is_reported:
                self.requests.append(MarkersWritten(*pending[:3], written))
                self.ask(self.requests[-1])

    # --- the producers -----------------------------------------------------------------------------

    def start(self, name: str, known: Writer | None = None) -> Writer | None:
        command = InitProducerId(name, TIMEOUT_MS, *(known.identity if known else (-1, -1)))
        self.requests.append(command)
        try:
            answer = self.ask(command)
        except BrokerError:
            return None
        if answer.error_code:
            return None
        self.writers.append(Writer(name, (answer.producer_id, answer.producer_epoch)))
        return self.writers[-1]

    def join(self, batch_id: int, member: str, *, is_answered: bool = True) -> Writer | None:
        request = JoinTxnGroupRequest("app", batch_id, member, TIMEOUT_MS)
        self.requests.append(request)
        answer = self.ask_join(request)
        if answer is None or not is_answered:
            return None
        self.writers.append(Writer("app", answer, member, batch_id))
        return self.writers[-1]

    def ask_join(self, request: JoinTxnGroupRequest) -> tuple[int, int] | None:
        try:
            answer = self.ask(request)
        except BrokerError:
            return None
        assert answer.is_finished == (answer.producer_id == -1) == (request.batch_id <= answer.last_batch_id)
        if answer.is_finished:
            return None
        identity = answer.producer_id, answer.producer_epoch
        assert not any(identity in joined for joined in self.members.values()), "an identity was given twice"
        self.members.setdefault(request.batch_id, set()).add(identity)
        return identity

    def send(self, writer: Writer, partition: TxnPartition, *, is_delivered: bool = True) -> None:
        if writer.ending is not None:
            return
        self.tag += 1
        batch = writer.batch(partition, self.tag)
        self.sent_batches.append(batch)
        if is_delivered and self.deliver(batch):
            writer.acknowledged.add(batch)

    def flush(self, writer: Writer) -> None:
        for batch in writer.sent:
            if batch not in writer.acknowledged and self.deliver(batch):
                writer.acknowledged.add(batch)

    def end(self, writer: Writer, *, is_commit: bool, is_answered: bool = True) -> None:
        if writer.ending is None:
            is_commit = is_commit and writer.is_flushed and writer.batch_id < 0
            writer.ending = EndTxnRequest(writer.name, *writer.identity, is_commit)
            self.requests.append(writer.ending)
        request = writer.ending
        try:
            answer = self.ask(request)
        except ConcurrentTransactionsError:
            return
        except BrokerError:
            self.discard(writer)
            return
        if not is_answered:
            return
        if request.is_commit:
            self.promised[writer.identity] = set(writer.sent)
        else:
            self.dropped.add(writer.identity)
        if answer.producer_id < 0:
            self.discard(writer)
        else:
            writer.begin((answer.producer_id, answer.producer_epoch))

    def discard(self, writer: Writer) -> None:
        self.writers = [one for one in self.writers if one is not writer]

    def finish(self, batch_id: int, winners: list[Writer]) -> Any:
        """The driver decides for these writers, which have written everything."""
        named = [TxnWinner(one.member, *one.identity) for one in winners]
        request = EndTxnGroupRequest("app", batch_id, named)
        self.requests.append(request)
        return self.ask_finish(request, winners)

    def ask_finish(self, request: EndTxnGroupRequest, winners: list[Writer]) -> Any:
        try:
            answer = self.ask(request)
        except BrokerError:
            return None
        result = self.results.setdefault(request.batch_id, answer.winners)
        assert answer.winners == result, "a batch has two results"
        if not answer.is_repeated:
            won = {(one.producer_id, one.producer_epoch) for one in request.winners}
            for batch_id, joined in self.members.items():
                if batch_id <= request.batch_id:
                    self.dropped |= joined - won - self.promised.keys()
            for writer in winners:
                self.promised[writer.identity] = set(writer.sent)
        return answer

    # --- what must hold ----------------------------------------------------------------------------

    def check_promises(self) -> None:
        for identity in self.promised:
            assert self.fates.get(identity, {True}) == {True}, f"{identity} was told as committed"
        for identity in self.dropped:
            assert self.fates.get(identity, {False}) == {False}, f"{identity} was told as aborted"

    def heal(self) -> None:
        """No more messages are lost: every transaction ends, and every record is committed or aborted."""
        for _ in range(3):
            self.write_markers()
            self.now_ms += TIMEOUT_MS
            self.tick()
        self.write_markers()
        self.check_promises()
        for transaction in self.machine._table:
            assert not transaction.is_open
        for log in self.logs.values():
            assert not log.open, "a transaction hangs"
        stored = [batch for log in self.logs.values() for batch in log.batches]
        visible = [batch for batch in stored if self.fates[batch.identity] == {True}]
        assert len(set(visible)) == len(visible)
        for batches in self.promised.values():
            assert batches <= set(visible), "a committed record is lost"


flags = st.booleans()
numbers = st.integers(0, 30)


class Histories(RuleBasedStateMachine):
    """A number picks an item by its remainder."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def pick(self, things: list[Any], number: int) -> Any:
        return things[-1 - number % len(things)] if things else None

    @rule(name=st.sampled_from(["t0", "t1"]))
    def start(self, name: str) -> None:
        self.world.start(name)

    @rule(number=numbers)
    def start_again(self, number: int) -> None:
        writer = self.pick(self.world.writers, number)
        if writer is not None and writer.batch_id < 0:
            self.world.start(writer.name, writer)

    @rule(number=numbers, to=st.sampled_from(PARTITIONS), is_delivered=flags)
    def send(self, number: int, to: TxnPartition, is_delivered: bool) -> None:
        writer = self.pick(self.world.writers, number)
        if writer is not None:
            self.world.send(writer, to, is_delivered=is_delivered)

    @rule(number=numbers)
    def flush(self, number: int) -> None:
        writer = self.pick(self.world.writers, number)
        if writer is not None:
            self.world.flush(writer)

    @rule(number=numbers, is_commit=flags, is_answered=flags)
    def end(self, number: int, is_commit: bool, is_answered: bool) -> None:
        writer = self.pick(self.world.writers, number)
        if writer is not None:
            self.world.end(writer, is_commit=is_commit, is_answered=is_answered)

    @rule(number=numbers)
    def batch_comes_late(self, number: int) -> None:
        batch = self.pick(self.world.sent_batches, number)
        if batch is not None:
            self.world.deliver(batch)

    @rule(number=numbers)
    def verification_comes_late(self, number: int) -> None:
        batch = self.pick(self.world.sent_batches, number)
        if batch is not None:
            with suppress(BrokerError):
                self.world.verify(batch)
                self.world.verified.append(batch)

    @rule(number=numbers)
    def verified_batch_comes_late(self, number: int) -> None:
        """Anything may happen between the coordinator's response to the leader and the append."""
        batch = self.pick(self.world.verified, number)
        if batch is not None:
            with suppress(BrokerError):
                self.world.logs[batch.partition].append(batch, lambda: None)

    @rule(number=numbers, is_changed=flags)
    def request_comes_late(self, number: int, is_changed: bool) -> None:
        request = self.pick(self.world.requests, number)
        if isinstance(request, JoinTxnGroupRequest):
            self.world.ask_join(request)
        elif isinstance(request, EndTxnGroupRequest):
            if is_changed:
                request = request._replace(winners=request.winners[1:])
            if request.batch_id in self.world.results:
                self.world.ask_finish(request, [])
        elif request is not None:
            self.ask_late(request)

    @rule(number=numbers)
    def the_opposite_comes_late(self, number: int) -> None:
        pending = [writer.ending for writer in self.world.writers]
        ends = [one for one in self.world.requests if isinstance(one, EndTxnRequest) and one not in pending]
        request = self.pick(ends, number)
        if request is not None:
            self.ask_late(request._replace(is_commit=not request.is_commit))

    def ask_late(self, request: Any) -> None:
        with suppress(BrokerError):
            self.world.ask(request)

    @rule(number=numbers)
    def append_fails(self, number: int) -> None:
        """A decision that is not appended changes nothing."""
        request = self.pick(self.world.requests, number)
        if isinstance(request, JoinTxnGroupRequest | EndTxnRequest):
            request = WithReservedId(request, 1)
        state = copy.deepcopy(durable_state(self.world.machine))
        if request is not None:
            with suppress(BrokerError):
                self.world.machine.decide(request, CALLER, self.world.now, {})
        assert durable_state(self.world.machine) == state

    @rule(
        number=numbers,
        to=st.lists(st.sampled_from(PARTITIONS), min_size=1),
        is_commit=flags,
        is_answered=flags,
    )
    def transact(self, number: int, to: list[TxnPartition], is_commit: bool, is_answered: bool) -> None:
        """Run a transaction of a producer, without its markers."""
        writer = self.pick([one for one in self.world.writers if one.batch_id < 0], number)
        writer = writer or self.world.start("t0")
        if writer is not None:
            for partition in to:
                self.world.send(writer, partition)
            self.world.flush(writer)
            self.world.end(writer, is_commit=is_commit, is_answered=is_answered)

    @rule(
        batch_id=st.integers(0, 6),
        to=st.lists(st.lists(st.sampled_from(PARTITIONS), min_size=1), min_size=1, max_size=3),
        lost=st.integers(0, 2),
    )
    def work_as_a_team(self, batch_id: int, to: list[list[TxnPartition]], lost: int) -> None:
        """Writers write; the driver decides on some of them, unless it stops before."""
        team = []
        for member, partitions in zip("abc", to, strict=False):
            writer = self.world.join(batch_id, member)
            for partition in partitions if writer else []:
                self.world.send(writer, partition)
            if writer is not None and writer.is_flushed:
                team.append(writer)
        if lost <= len(team):
            self.world.finish(batch_id, team[lost:])

    @rule(count=st.integers(1, 3), is_reported=flags)
    def write_markers(self, count: int, is_reported: bool) -> None:
        self.world.write_markers(count, is_reported=is_reported)

    @rule(number=numbers)
    def marker_comes_late(self, number: int) -> None:
        marker = self.pick(self.world.markers, number)
        if marker is not None:
            self.world.write_marker(*marker)

    @rule(elapsed_ms=st.sampled_from([1, 10, TIMEOUT_MS // 2, TIMEOUT_MS, EXPIRATION_MS]))
    def time_passes(self, elapsed_ms: int) -> None:
        self.world.now_ms += elapsed_ms
        self.world.tick()

    @rule(is_compacted=flags)
    def coordinator_changes(self, is_compacted: bool) -> None:
        self.world.reload(is_compacted=is_compacted)

    @rule(batch_id=st.integers(0, 6), member=st.sampled_from(["a", "b", "c"]), is_answered=flags)
    def join(self, batch_id: int, member: str, is_answered: bool) -> None:
        self.world.join(batch_id, member, is_answered=is_answered)

    @rule()
    def retire(self) -> None:
        with suppress(BrokerError):
            self.world.ask(RetireTxnGroupRequest("app"))

    @rule(batch_id=st.integers(0, 6), count=st.integers(0, 3))
    def finish(self, batch_id: int, count: int) -> None:
        writers = [one for one in self.world.writers if one.batch_id == batch_id and one.is_flushed]
        winners = {one.member: one for one in writers}  # the latest attempt under each name
        self.world.finish(batch_id, list(winners.values())[:count])

    @invariant()
    def told_is_kept(self) -> None:
        self.world.check_promises()

    def teardown(self) -> None:
        self.world.heal()


def run_histories(examples: int, steps: int, *, shrinks: bool = True) -> None:
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=shrinks,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_promise_is_kept_in_random_histories() -> None:
    run_histories(150, 50)


# --- the rules, one by one -----------------------------------------------------------------------------


def a_late_batch_of_an_ended_transaction(world: World) -> None:
    writer = world.start("t0")
    assert writer is not None
    world.send(writer, PARTITIONS[0])
    world.send(writer, PARTITIONS[0], is_delivered=False)
    world.end(writer, is_commit=False)
    world.write_markers()
    world.send(writer, PARTITIONS[0])
    assert not world.deliver(world.sent_batches[1])


def a_partition_still_without_its_marker(world: World) -> None:
    writer = world.start("t0")
    assert writer is not None
    for partition in PARTITIONS:
        world.send(writer, partition)
    world.end(writer, is_commit=True)
    world.write_markers(1)
    world.send(writer, PARTITIONS[0])
    assert not writer.acknowledged, "the next transaction has begun before the last one was complete"


def a_late_abort_after_a_commit(world: World) -> None:
    writer = world.start("t0")
    assert writer is not None
    world.send(writer, PARTITIONS[0])
    world.send(writer, PARTITIONS[1])
    world.end(writer, is_commit=True, is_answered=False)
    world.write_markers(1)
    with pytest.raises(InvalidTxnStateError):
        world.ask(EndTxnRequest("t0", *writer.identity, False))


def a_producer_that_takes_over(world: World) -> None:
    writer = world.start("t0")
    assert writer is not None
    world.send(writer, PARTITIONS[0])
    assert world.start("t0") is None  # the open transaction is being aborted
    world.write_markers()
    assert world.start("t0") is not None
    world.end(writer, is_commit=True)
    assert not world.promised


def a_producer_that_was_away_for_too_long(world: World) -> None:
    writer = world.start("t0")
    assert writer is not None
    world.send(writer, PARTITIONS[0])
    world.now_ms += TIMEOUT_MS
    world.tick()
    world.write_markers()
    world.end(writer, is_commit=True)
    assert not world.promised


def a_driver_that_comes_back_when_all_is_forgotten(world: World) -> None:
    """It does not know whether its last batch was committed, and writes it again."""
    writer = world.join(0, "a")
    assert writer is not None
    world.finish(0, [writer])
    world.write_markers()
    world.now_ms += EXPIRATION_MS
    world.tick()
    assert world.join(0, "b") is None, "the batch is written twice"


SCHEDULES = {
    "R32-unretired-forgotten": a_driver_that_comes_back_when_all_is_forgotten,
    "R31-no-epoch-bump": a_late_batch_of_an_ended_transaction,
    "R32-complete-early": a_partition_still_without_its_marker,
    "R32-opposite-accepted": a_late_abort_after_a_commit,
    "R34-init-keeps-open": a_producer_that_takes_over,
    "R34-timeout-no-bump": a_producer_that_was_away_for_too_long,
}


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Iterator[str]:
    with mutants.without(request.param):
        yield request.param


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_does_no_harm_while_the_rules_are_in_force(name: str) -> None:
    world = World()
    SCHEDULES[name](world)
    world.heal()


@pytest.mark.parametrize("mutant", SCHEDULES, indirect=True)
def test_a_schedule_finds_the_loss_of_its_rule(mutant: str) -> None:
    world = World()
    with pytest.raises(AssertionError):
        SCHEDULES[mutant](world)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SCHEDULES, indirect=True)
def test_chance_finds_a_missing_rule(mutant: str) -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_histories(400, 50, shrinks=False)
