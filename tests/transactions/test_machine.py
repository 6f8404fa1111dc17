"""The responses of a transaction coordinator (R31, R32, R34), request by request."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.coordinator_types import Caller, Instant, StateRecord
from kafkalite.errors import (
    ConcurrentTransactionsError,
    CoordinatorNotAvailableError,
    ErrorCode,
    FinishedBatchError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidRequestError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    PolicyViolationError,
    ProducerFencedError,
    TransactionalIdNotFoundError,
)
from kafkalite.limits import MAX_TRANSACTIONAL_ID_LENGTH
from kafkalite.model import MAX_PRODUCER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from kafkalite.protocol.messages.data import InitProducerIdResponse
from kafkalite.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    DescribedTransaction,
    DescribeTransactionsRequest,
    DescribeTxnGroupRequest,
    DescribeTxnGroupResponse,
    EndTxnGroupRequest,
    EndTxnGroupResponse,
    EndTxnRequest,
    EndTxnResponse,
    JoinTxnGroupRequest,
    JoinTxnGroupResponse,
    ListedTransaction,
    ListTransactionsRequest,
    RetireTxnGroupRequest,
    TxnGroupMember,
    TxnPartition,
    TxnWinner,
)
from kafkalite.transactions import machine as machine_module
from kafkalite.transactions.commands import InitProducerId, MarkersWritten, PendingMarker, WithReservedId
from kafkalite.transactions.machine import MAX_RECORDS_PER_TICK, TransactionMachine, TransactionSettings
from kafkalite.transactions.record_codec import transaction_record
from kafkalite.transactions.transaction import Transaction, TransactionState
from proof.durable_state import durable_state

WALL_MS = 1_700_000_000_000
ORDERS = TxnPartition("orders", 0)
STOCK = TxnPartition("stock", 3)
CALLER = Caller("tests", "127.0.0.1")


class Driver:
    """A machine whose decisions are committed at once."""

    def __init__(self) -> None:
        self.log: list[StateRecord] = []
        self.now_ms = 0
        self.wall_ms = WALL_MS
        self.machine = TransactionMachine(TransactionSettings(900_000, 1_000_000))

    @property
    def now(self) -> Instant:
        return Instant(self.now_ms, self.wall_ms)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.wall_ms += ms

    def decide(self, command: Any) -> Any:
        return self.machine.decide(command, CALLER, self.now, {})

    def take(self, records: tuple[StateRecord, ...]) -> None:
        for record in records:
            self.log.append(record)
            self.machine.replay(record, self.now)

    def ask(self, command: Any) -> Any:
        decision = self.decide(command)
        self.take(decision.records)
        return decision.reply

    def tick(self) -> int:
        records = self.machine.tick(self.now, {}).records
        self.take(records)
        return len(records)

    def reload(self) -> None:
        self.machine = TransactionMachine(TransactionSettings(900_000, 1_000_000))
        for record in self.log:
            self.machine.replay(record, self.now)
        self.machine.on_loaded(self.now)

    # --- requests

    def init(self, name: str = "t", spare_id: int = 7, *, timeout_ms: int = 60_000) -> tuple[int, int]:
        answer = self.ask(InitProducerId(name, timeout_ms, reserved_producer_id=spare_id))
        assert answer.error_code == 0
        return answer.producer_id, answer.producer_epoch

    def add(self, producer_id: int, epoch: int, *partitions: TxnPartition, name: str = "t") -> None:
        answer = self.ask(AddPartitionsToTxnRequest(name, producer_id, epoch, list(partitions)))
        assert [result[:3] for result in answer.partitions] == [(*one, 0) for one in partitions]

    def end(self, producer_id: int, epoch: int, *, is_commit: bool = True, spare_id: int = -1) -> Any:
        answer = self.ask(WithReservedId(EndTxnRequest("t", producer_id, epoch, is_commit), spare_id))
        return answer.producer_id, answer.producer_epoch

    def mark(self) -> None:
        for pending in self.machine.pending_markers():
            self.ask(MarkersWritten(*pending[:3], pending.partitions))

    def join(self, writer: str, spare_id: int, *, batch_id: int = 0, timeout_ms: int = 60_000) -> TxnWinner:
        answer = self.ask(WithReservedId(JoinTxnGroupRequest("app", batch_id, writer, timeout_ms), spare_id))
        assert not answer.is_finished
        return TxnWinner(writer, answer.producer_id, answer.producer_epoch)

    def finish(self, batch_id: int, *winners: TxnWinner) -> EndTxnGroupResponse:
        answer: EndTxnGroupResponse = self.ask(EndTxnGroupRequest("app", batch_id, list(winners)))
        return answer

    def retire(self) -> int:
        last: int = self.ask(RetireTxnGroupRequest("app")).last_batch_id
        return last

    def state(self, name: str = "t") -> str:
        (described,) = self.ask(DescribeTransactionsRequest([name])).transactions
        return str(described.state)

    def writers(self) -> dict[str, str]:
        described: DescribeTxnGroupResponse = self.ask(DescribeTxnGroupRequest("app"))
        return {writer.member: writer.state for writer in described.members}


@pytest.fixture
def driver() -> Driver:
    return Driver()


class TestBeginning:
    def test_a_new_name_gets_the_spare_id(self, driver: Driver) -> None:
        assert driver.init("t", 7) == (7, 0)
        assert driver.init("other", 8) == (8, 0)
        assert driver.machine.transaction_count == 2

    def test_the_next_producer_gets_the_next_epoch(self, driver: Driver) -> None:
        driver.init("t", 7)
        assert driver.init("t", 8) == (7, 1)
        with pytest.raises(ProducerFencedError):
            driver.end(7, 0)
        with pytest.raises(InvalidProducerEpochError):
            driver.add(7, 0, ORDERS)

    def test_an_open_transaction_is_aborted_first(self, driver: Driver) -> None:  # R34
        driver.init()
        driver.add(7, 0, ORDERS)
        answer = driver.ask(InitProducerId("t", 60_000))
        assert answer[:1] == (ErrorCode.CONCURRENT_TRANSACTIONS,)
        assert isinstance(answer, InitProducerIdResponse)
        assert driver.machine.pending_markers() == [PendingMarker("t", 7, 1, False, (ORDERS,))]
        with pytest.raises(ConcurrentTransactionsError):
            driver.init()
        driver.mark()
        assert driver.init() == (7, 2)
        with pytest.raises(ProducerFencedError):
            driver.end(7, 0, is_commit=False)

    def test_a_producer_that_wants_its_next_epoch(self, driver: Driver) -> None:  # KIP-360
        driver.init()
        command = InitProducerId("t", 60_000, 7, 0)
        assert driver.ask(command)[2:] == (7, 1)
        assert driver.ask(command)[2:] == (7, 1)  # the response was lost
        driver.add(7, 1, ORDERS)
        with pytest.raises(ProducerFencedError):
            driver.ask(command)
        command = InitProducerId("t", 60_000, 7, 1)
        assert driver.ask(command).error_code == ErrorCode.CONCURRENT_TRANSACTIONS
        driver.mark()
        assert driver.ask(command)[2:] == (7, 3)
        with pytest.raises(ProducerFencedError):
            driver.ask(InitProducerId("t", 60_000, 8, 0))

    @pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
    def test_time_outs_that_are_refused(self, driver: Driver, timeout_ms: int) -> None:
        with pytest.raises(InvalidTransactionTimeoutError, match="900000 ms"):
            driver.init(timeout_ms=timeout_ms)
        with pytest.raises(InvalidTransactionTimeoutError):
            driver.join("a", 7, timeout_ms=timeout_ms)

    @pytest.mark.parametrize("name", ["", "n" * (MAX_TRANSACTIONAL_ID_LENGTH + 1)])
    def test_names_that_are_refused(self, driver: Driver, name: str) -> None:
        with pytest.raises(InvalidRequestError, match=r"transactional.id has 1 to 1000 characters"):
            driver.init(name)
        with pytest.raises(InvalidRequestError, match="writer's name"):
            driver.join(name, 7)
        with pytest.raises(InvalidRequestError, match="application id"):
            driver.ask(JoinTxnGroupRequest(name, 0, "a", 1))

    def test_without_a_reserved_id_the_caller_must_retry(self, driver: Driver) -> None:
        with pytest.raises(CoordinatorNotAvailableError):
            driver.init(spare_id=-1)
        with pytest.raises(CoordinatorNotAvailableError):
            driver.ask(JoinTxnGroupRequest("app", 0, "a", 1))

    def test_an_unknown_command_raises(self, driver: Driver) -> None:
        with pytest.raises(TypeError, match="does not handle str"):
            driver.ask("a string")


class TestPartitions:
    def test_they_begin_a_transaction_and_are_added_once(self, driver: Driver) -> None:
        driver.init()
        driver.add(7, 0, ORDERS)
        assert driver.state() == "Ongoing"
        assert len(driver.log) == 2
        driver.add(7, 0, ORDERS)
        assert len(driver.log) == 2
        driver.add(7, 0, ORDERS, STOCK)
        (described,) = driver.ask(DescribeTransactionsRequest(["t"])).transactions
        assert described.partitions == [ORDERS, STOCK]

    def test_r37_only_of_the_producer_that_has_the_name(self, driver: Driver) -> None:
        with pytest.raises(InvalidProducerIdMappingError):
            driver.add(7, 0, ORDERS)
        driver.init()
        with pytest.raises(InvalidProducerIdMappingError):
            driver.add(8, 0, ORDERS)
        with pytest.raises(InvalidProducerEpochError, match="producer 7 with epoch 1"):
            driver.add(7, 1, ORDERS)

    def test_not_before_the_last_transaction_is_complete(self, driver: Driver) -> None:
        driver.init()
        driver.add(7, 0, ORDERS, STOCK)
        driver.end(7, 0)
        with pytest.raises(ConcurrentTransactionsError):
            driver.add(7, 1, ORDERS)
        driver.ask(MarkersWritten("t", 7, 1, (STOCK,)))
        assert driver.machine.pending_markers() == [PendingMarker("t", 7, 1, True, (ORDERS,))]
        with pytest.raises(ConcurrentTransactionsError):
            driver.add(7, 1, ORDERS)
        driver.ask(MarkersWritten("t", 7, 1, (ORDERS,)))
        driver.add(7, 1, ORDERS)

    def test_a_late_batch_does_not_join_the_next_transaction(self, driver: Driver) -> None:  # R31
        driver.init()
        driver.add(7, 0, ORDERS)
        driver.end(7, 0)
        for _ in range(2):
            with pytest.raises(InvalidProducerEpochError):
                driver.add(7, 0, STOCK)
            driver.mark()


class TestEnding:
    @pytest.mark.parametrize("is_commit", [True, False])
    def test_the_answer_has_the_next_identity(self, driver: Driver, is_commit: bool) -> None:
        driver.init()
        driver.add(7, 0, ORDERS)
        for _ in range(3):  # responses are lost
            assert driver.end(7, 0, is_commit=is_commit) == (7, 1)
        assert driver.machine.pending_markers() == [PendingMarker("t", 7, 1, is_commit, (ORDERS,))]
        with pytest.raises(InvalidTxnStateError, match="committed before" if is_commit else "aborted before"):
            driver.end(7, 0, is_commit=not is_commit)
        driver.mark()
        assert driver.state() == ("CompleteCommit" if is_commit else "CompleteAbort")
        assert driver.end(7, 0, is_commit=is_commit) == (7, 1)
        with pytest.raises(InvalidTxnStateError):
            driver.end(7, 0, is_commit=not is_commit)
        assert driver.machine.pending_markers() == []

    def test_a_late_end_does_not_end_the_next_transaction(self, driver: Driver) -> None:
        driver.init()
        driver.add(7, 0, ORDERS)
        driver.end(7, 0)
        driver.mark()
        driver.add(7, 1, ORDERS)
        with pytest.raises(ProducerFencedError):
            driver.end(7, 0)
        assert driver.state() == "Ongoing"

    def test_nothing_was_written(self, driver: Driver) -> None:
        driver.init()
        assert driver.end(7, 0) == (7, 1)
        assert driver.state() == "CompleteCommit"
        assert driver.end(7, 1, is_commit=False) == (7, 2)
        assert driver.end(7, 1, is_commit=False) == (7, 2)
        driver.add(7, 2, ORDERS)
        assert driver.end(7, 2) == (7, 3)
        with pytest.raises(ConcurrentTransactionsError):
            driver.end(7, 3)

    def test_markers_written_for_an_earlier_transaction_are_ignored(self, driver: Driver) -> None:
        driver.init()
        driver.add(7, 0, ORDERS)
        driver.end(7, 0)
        driver.mark()
        driver.add(7, 1, ORDERS)
        driver.end(7, 1)
        driver.ask(MarkersWritten("t", 7, 1, (ORDERS,)))
        driver.ask(MarkersWritten("nobody", 7, 2, (ORDERS,)))
        assert driver.state() == "PrepareCommit"

    def test_a_completion_that_could_not_be_written_is_asked_for_again(self, driver: Driver) -> None:
        driver.init()
        driver.add(7, 0, ORDERS, STOCK)
        driver.end(7, 0)
        driver.ask(MarkersWritten("t", 7, 1, (ORDERS,)))
        decision = driver.decide(MarkersWritten("t", 7, 1, (ORDERS, STOCK)))
        assert len(decision.records) == 1  # and the log refuses them
        assert driver.machine.pending_markers() == [PendingMarker("t", 7, 1, True, (STOCK,))]
        driver.mark()
        assert driver.state() == "CompleteCommit"

    def test_a_new_coordinator_continues(self, driver: Driver) -> None:  # R36
        driver.init()
        driver.add(7, 0, ORDERS, STOCK)
        driver.end(7, 0)
        driver.ask(MarkersWritten("t", 7, 1, (STOCK,)))
        driver.reload()
        # it writes all markers again: existing ones are not written twice (R33)
        assert driver.machine.pending_markers() == [PendingMarker("t", 7, 1, True, (ORDERS, STOCK))]
        assert driver.end(7, 0) == (7, 1)
        driver.mark()
        assert driver.state() == "CompleteCommit"


class TestTheLastEpoch:
    @pytest.fixture
    def driver(self) -> Driver:
        driver = Driver()
        last = Transaction("t", 7, MAX_PRODUCER_EPOCH - 1, TransactionState.EMPTY, 60_000, -1, WALL_MS)
        driver.take((transaction_record(last),))
        return driver

    def test_the_end_gives_another_id(self, driver: Driver) -> None:
        epoch = MAX_PRODUCER_EPOCH - 1
        driver.add(7, epoch, ORDERS)
        with pytest.raises(CoordinatorNotAvailableError):
            driver.end(7, epoch)
        assert driver.end(7, epoch, spare_id=9) == (9, 0)
        assert driver.end(7, epoch, spare_id=10) == (9, 0)
        assert driver.machine.pending_markers() == [
            PendingMarker("t", 7, MAX_PRODUCER_EPOCH, True, (ORDERS,))
        ]
        with pytest.raises(ConcurrentTransactionsError):
            driver.add(9, 0, ORDERS)
        with pytest.raises(InvalidProducerEpochError):
            driver.add(7, epoch, ORDERS)
        driver.mark()
        assert driver.end(7, epoch, spare_id=10) == (9, 0)
        driver.add(9, 0, ORDERS)
        assert driver.end(9, 0) == (9, 1)

    def test_after_a_time_out_the_next_producer_gets_another_id(self, driver: Driver) -> None:
        driver.add(7, MAX_PRODUCER_EPOCH - 1, ORDERS)
        driver.pass_time(60_000)
        assert driver.tick() == 1
        driver.mark()
        with pytest.raises(InvalidProducerEpochError):
            driver.add(7, MAX_PRODUCER_EPOCH, ORDERS)
        with pytest.raises(CoordinatorNotAvailableError):
            driver.init(spare_id=-1)
        assert driver.init(spare_id=9) == (9, 0)

    def test_r37_nobody_ends_a_transaction_without_a_producer_id(self, driver: Driver) -> None:
        """After a timeout no identity has ended the transaction, and -1 stands for none."""
        driver.add(7, MAX_PRODUCER_EPOCH - 1, ORDERS)
        driver.pass_time(60_000)
        assert driver.tick() == 1
        with pytest.raises(InvalidProducerIdMappingError):
            driver.end(NO_PRODUCER_ID, NO_PRODUCER_EPOCH, is_commit=False)

    def test_a_new_producer_gets_another_id(self, driver: Driver) -> None:
        assert driver.init(spare_id=9) == (9, 0)

    def test_a_writers_id_is_not_used_again(self, driver: Driver) -> None:
        last = Transaction(
            "app",
            8,
            MAX_PRODUCER_EPOCH - 2,
            TransactionState.ONGOING,
            60_000,
            WALL_MS,
            WALL_MS,
            writer_name="a",
            batch_id=0,
        )
        driver.take((transaction_record(last),))
        driver.finish(0)
        assert driver.join("b", 9, batch_id=1) == TxnWinner("b", 9, 0)
        assert driver.machine.transaction_count == 2


class TestTime:
    def test_a_transaction_is_aborted_after_its_time_out(self, driver: Driver) -> None:  # R34
        driver.init(timeout_ms=1_000)
        assert driver.machine.next_deadline_ms() == 1_000_000  # the expiration
        driver.pass_time(500)
        driver.add(7, 0, ORDERS)
        driver.pass_time(500)
        driver.add(7, 0, STOCK)
        assert driver.machine.next_deadline_ms() == 1_500
        driver.pass_time(499)
        assert driver.tick() == 0
        driver.pass_time(1)
        assert driver.tick() == 1
        assert driver.tick() == 0
        assert driver.machine.pending_markers() == [PendingMarker("t", 7, 1, False, (ORDERS, STOCK))]
        for _ in range(2):  # the producer that was away is fenced, whatever it requests
            for is_commit in (True, False):
                with pytest.raises(ProducerFencedError):
                    driver.end(7, 0, is_commit=is_commit)
            driver.mark()

    def test_a_decided_one_is_never_timed_out(self, driver: Driver) -> None:
        driver.init(timeout_ms=1_000)
        driver.add(7, 0, ORDERS)
        driver.end(7, 0)
        driver.pass_time(5_000_000)
        assert driver.tick() == 0
        assert driver.state() == "PrepareCommit"

    def test_the_wall_clock_may_jump(self, driver: Driver) -> None:
        driver.init(timeout_ms=1_000)
        driver.add(7, 0, ORDERS)
        driver.wall_ms += 3_600_000
        assert driver.tick() == 0
        driver.wall_ms -= 7_200_000
        driver.now_ms += 1_000
        assert driver.tick() == 1

    def test_a_new_coordinator_counts_the_time_since_the_start(self, driver: Driver) -> None:
        driver.init(timeout_ms=1_000)
        driver.add(7, 0, ORDERS)
        driver.wall_ms += 400
        driver.now_ms = 50  # another process's clock
        driver.reload()
        assert driver.machine.next_deadline_ms() == 650
        driver.wall_ms += 1_000_000
        driver.reload()
        assert driver.machine.next_deadline_ms() == 50
        driver.wall_ms -= 9_000_000
        driver.reload()
        assert driver.machine.next_deadline_ms() == 1_050

    def test_outdated_deadlines_do_not_pile_up(self, driver: Driver) -> None:
        driver.init()
        for epoch in range(1_000):
            driver.add(7, epoch, ORDERS)
            driver.end(7, epoch)
            driver.mark()
            driver.pass_time(1)
        assert len(driver.machine._table._heap) < 100
        driver.add(7, 1_000, ORDERS)
        assert driver.machine.next_deadline_ms() == 61_000

    def test_many_at_once_take_several_ticks(self, driver: Driver) -> None:
        for number in range(MAX_RECORDS_PER_TICK + 5):
            driver.init(f"t-{number}", number)
            driver.add(number, 0, ORDERS, name=f"t-{number}")
        driver.pass_time(60_000)
        assert [driver.tick() for _ in range(3)] == [MAX_RECORDS_PER_TICK, 5, 0]

    def test_a_ticks_batch_has_a_bounded_size(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_module, "MAX_BYTES_PER_TICK", 1_000)
        for number in range(40):
            name = f"t-{number}-{'x' * 100}"
            driver.init(name, number)
            driver.add(number, 0, ORDERS, name=name)
        driver.pass_time(60_000)
        assert 0 < driver.tick() <= 10

    def test_unused_names_expire(self, driver: Driver) -> None:
        driver.init("t")
        driver.init("open", 8)
        driver.add(8, 0, ORDERS, name="open")
        driver.ask(EndTxnRequest("open", 8, 0, True))
        driver.pass_time(600_000)
        driver.init("busy", 9)
        driver.pass_time(399_999)
        assert driver.tick() == 0
        driver.pass_time(1)
        assert driver.tick() == 1
        assert driver.machine.transaction_count == 2
        assert driver.machine.next_deadline_ms() == 1_600_000
        assert driver.init("t", 10) == (10, 0)
        with pytest.raises(InvalidProducerIdMappingError):
            driver.end(7, 0)

    def test_a_decision_of_an_application_that_may_come_back_is_never_forgotten(self, driver: Driver) -> None:
        winner = driver.join("a", 7)
        driver.finish(0, winner)
        driver.pass_time(1_000_000)
        assert driver.tick() == 1  # the writer's producer id
        assert driver.machine.next_deadline_ms() is None
        driver.reload()
        assert driver.finish(0) == EndTxnGroupResponse(0, None, 0, ["a"], True, True)

    def test_a_group_without_a_decision_is_forgotten(self, driver: Driver) -> None:
        driver.join("a", 7, timeout_ms=1_000)
        driver.pass_time(1_000)
        assert driver.tick() == 1
        driver.pass_time(1_000_000)
        assert driver.tick() == 1
        assert driver.init("app", 8) == (8, 0)


class TestRetirement:
    """A group whose name does not come back is forgotten as a transactional id is (R32)."""

    @pytest.fixture
    def driver(self) -> Driver:
        """Batch 0 is committed, from one of two writers; a marker is still to be written."""
        driver = Driver()
        winner, _ = driver.join("a", 7), driver.join("b", 8)
        driver.add(7, 0, ORDERS, name="app")
        driver.finish(0, winner)
        return driver

    @pytest.mark.parametrize("is_reloaded", [False, True])
    def test_all_of_it_is_forgotten_together(self, driver: Driver, is_reloaded: bool) -> None:
        driver.pass_time(600_000)
        assert driver.retire() == 0
        driver.pass_time(600_000)
        driver.mark()  # the last use
        if is_reloaded:
            driver.reload()
        assert driver.machine.next_deadline_ms() == 2_200_000
        driver.pass_time(999_999)
        assert driver.tick() == 0
        assert driver.finish(0).is_repeated
        driver.pass_time(1)
        if is_reloaded:
            driver.reload()
        assert driver.tick() == 3
        assert driver.tick() == 0
        assert driver.machine.transaction_count == 0
        assert durable_state(driver.machine) == ({}, {})
        assert driver.machine.next_deadline_ms() is None
        latest = {record.key: record.value for record in driver.log}
        assert set(latest.values()) == {None}  # compaction leaves nothing
        driver.reload()
        assert durable_state(driver.machine) == ({}, {})

    def test_nothing_that_is_open_is_forgotten(self, driver: Driver) -> None:
        driver.retire()
        for count in (1, 0):
            driver.pass_time(5_000_000)
            assert driver.tick() == count  # b wrote nothing, and is free
            assert driver.writers() == {"a": "PrepareCommit"}
            compacted = {record.key: record for record in driver.log}
            driver.log = sorted(compacted.values(), key=lambda record: record.key)  # the result first
            driver.reload()

    def test_a_commit_repeated_after_expiration_decides_nothing(self, driver: Driver) -> None:
        """A driver that was paused for eight days repeats its call: the batch is unknown, and nothing is
        committed.
        """
        driver.mark()
        driver.retire()
        driver.pass_time(1_000_000)
        driver.tick()
        with pytest.raises(InvalidTxnStateError, match="nothing was decided"):
            driver.finish(0, TxnWinner("a", 7, 0))
        with pytest.raises(TransactionalIdNotFoundError):
            driver.retire()
        with pytest.raises(InvalidProducerIdMappingError):  # a batch that was delayed for as long
            driver.add(7, 0, ORDERS, name="app")

    def test_until_then_it_is_as_it_was(self, driver: Driver) -> None:
        driver.mark()
        driver.retire()
        before = durable_state(driver.machine)
        driver.pass_time(1_000)
        assert driver.retire() == 0  # its response was lost
        assert durable_state(driver.machine) == before
        assert driver.finish(0) == EndTxnGroupResponse(0, None, 0, ["a"], True, True)
        late = driver.ask(WithReservedId(JoinTxnGroupRequest("app", 0, "c", 1_000), 9))
        assert late.is_finished

    def test_a_batch_that_follows_takes_it_back(self, driver: Driver) -> None:
        driver.mark()
        driver.retire()
        winner = driver.join("c", 9, batch_id=1)
        assert driver.machine.next_deadline_ms() == 60_000  # that of the writer
        driver.pass_time(60_000)
        driver.tick()
        assert driver.machine.next_deadline_ms() == 1_060_000  # decided nothing: it is retired as before
        winner = driver.join("c", 9, batch_id=1)
        driver.finish(1, winner)
        for _ in range(3):
            driver.pass_time(1_000_000)
            driver.tick()
        assert driver.machine.transaction_count == 0
        assert driver.machine.next_deadline_ms() is None
        driver.reload()
        assert driver.finish(1) == EndTxnGroupResponse(0, None, 1, ["c"], True, True)

    def test_a_group_in_use_is_not_retired(self, driver: Driver) -> None:
        driver.join("c", 9, batch_id=1, timeout_ms=1_000)
        with pytest.raises(InvalidTxnStateError, match="in use"):
            driver.retire()
        driver.pass_time(1_000)
        driver.tick()
        assert driver.retire() == 0

    def test_a_group_without_a_decision_is_not_retired(self) -> None:
        driver = Driver()
        with pytest.raises(TransactionalIdNotFoundError):
            driver.retire()
        driver.join("a", 7)
        with pytest.raises(InvalidTxnStateError, match="no batch of 'app' is decided"):
            driver.retire()
        driver.init("t", 8)
        with pytest.raises(InvalidTxnStateError, match="not an application"):
            driver.ask(RetireTxnGroupRequest("t"))

    def test_many_writers_take_several_ticks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = Driver()
        for number in range(5):
            driver.join(str(number), 10 + number)
        driver.finish(0)
        driver.retire()
        driver.init("other", 9)
        driver.pass_time(1_000_000)
        monkeypatch.setattr(machine_module, "MAX_RECORDS_PER_TICK", 2)
        assert [driver.tick() for _ in range(5)] == [2, 2, 2, 1, 0]
        assert durable_state(driver.machine) == ({}, {})


class TestGroups:
    def test_winners_are_committed_and_all_others_aborted(self, driver: Driver) -> None:
        a, b, c = (driver.join(name, number) for name, number in (("a", 7), ("b", 8), ("c", 9)))
        assert (a, b) == (TxnWinner("a", 7, 0), TxnWinner("b", 8, 0))
        for number in (7, 8):
            driver.add(number, 0, ORDERS, name="app")
        driver.add(8, 0, STOCK, name="app")
        count = len(driver.log)
        assert driver.finish(0, b, c) == EndTxnGroupResponse(0, None, 0, ["b", "c"], False, False)
        assert len(driver.log) == count + 4  # the result, and each writer: one decision
        assert driver.machine.pending_markers() == [
            PendingMarker("app", 7, 1, False, (ORDERS,)),
            PendingMarker("app", 8, 1, True, (ORDERS, STOCK)),
        ]
        assert driver.writers() == {"a": "PrepareAbort", "b": "PrepareCommit"}  # c wrote nothing
        assert driver.finish(0, a) == EndTxnGroupResponse(0, None, 0, ["b", "c"], True, False)
        driver.mark()
        assert driver.finish(0, a) == EndTxnGroupResponse(0, None, 0, ["b", "c"], True, True)
        assert driver.writers() == {}

    def test_a_finished_batch_is_not_joined(self, driver: Driver) -> None:
        driver.finish(4)
        for batch_id in (0, 4):
            answer = driver.ask(WithReservedId(JoinTxnGroupRequest("app", batch_id, "a", 1_000), 7))
            assert answer == JoinTxnGroupResponse(0, None, -1, -1, 4, True)
        with pytest.raises(FinishedBatchError, match="batch 4 was decided before"):
            driver.finish(3)
        assert driver.finish(4).is_repeated
        assert driver.join("a", 7, batch_id=9) == TxnWinner("a", 7, 0)

    def test_an_empty_batch_of_an_unknown_application(self, driver: Driver) -> None:
        assert driver.finish(0) == EndTxnGroupResponse(0, None, 0, [], False, True)
        with pytest.raises(InvalidRequestError, match="batch id"):
            driver.finish(-1)
        with pytest.raises(InvalidRequestError, match="batch id"):
            driver.join("a", 7, batch_id=-1)

    def test_earlier_batches_are_decided_too_and_later_ones_are_not(self, driver: Driver) -> None:
        driver.join("a", 7, batch_id=1)
        b = driver.join("b", 8, batch_id=2)
        driver.join("c", 9, batch_id=3)
        for number in (7, 8, 9):
            driver.add(number, 0, ORDERS, name="app")
        driver.finish(2, b)
        assert driver.writers() == {"a": "PrepareAbort", "b": "PrepareCommit", "c": "Ongoing"}

    def test_winners_that_are_none(self, driver: Driver) -> None:
        a = driver.join("a", 7)
        driver.join("b", 8)
        driver.add(7, 0, ORDERS, name="app")
        later = driver.join("c", 9, batch_id=1)
        for wrong in (
            TxnWinner("nobody", 7, 0),
            TxnWinner("a", 8, 0),
            TxnWinner("a", 70, 0),
            TxnWinner("a", 7, 1),
            later,
        ):
            state = durable_state(driver.machine)
            with pytest.raises(InvalidTxnStateError, match="nothing was decided"):
                driver.finish(0, a, wrong)
            assert durable_state(driver.machine) == state
        assert driver.finish(0, a, a).winners == ["a"]

    def test_a_winner_that_timed_out(self, driver: Driver) -> None:
        a = driver.join("a", 7, timeout_ms=1_000)
        b = driver.join("b", 8)
        driver.add(7, 0, ORDERS, name="app")
        driver.pass_time(1_000)
        assert driver.tick() == 1
        with pytest.raises(InvalidTxnStateError):
            driver.finish(0, a, b)
        driver.mark()
        again = driver.join("a", 9)  # another attempt does not become the winner by its name
        assert again == TxnWinner("a", 7, 1)
        with pytest.raises(InvalidTxnStateError):
            driver.finish(0, a, b)
        assert driver.finish(0, again, b).winners == ["a", "b"]

    def test_the_same_name_starts_again(self, driver: Driver) -> None:
        a = driver.join("a", 7)
        driver.add(7, 0, ORDERS, name="app")
        again = driver.join("a", 8)
        assert again == TxnWinner("a", 8, 0)
        assert driver.machine.pending_markers() == [PendingMarker("app", 7, 1, False, (ORDERS,))]
        with pytest.raises(InvalidProducerEpochError):
            driver.add(7, 0, STOCK, name="app")
        with pytest.raises(InvalidTxnStateError):
            driver.finish(0, a)
        driver.mark()
        once_more = driver.join("a", 9)  # nothing was written under 8: it is free at once
        assert once_more == TxnWinner("a", 7, 1)
        with pytest.raises(InvalidTxnStateError):
            driver.finish(0, again)
        assert driver.finish(0, once_more).is_complete

    def test_ids_are_used_again_when_their_markers_are_written(self, driver: Driver) -> None:
        a = driver.join("a", 7)
        driver.add(7, 0, ORDERS, name="app")
        driver.finish(0, a)
        assert driver.join("b", 8, batch_id=1) == TxnWinner("b", 8, 0)
        driver.mark()
        assert driver.join("c", 9, batch_id=1) == TxnWinner("c", 7, 1)
        with pytest.raises(InvalidProducerEpochError):  # a late batch of the former writer
            driver.add(7, 0, STOCK, name="app")
        driver.add(7, 1, ORDERS, name="app")
        assert driver.machine.transaction_count == 2

    def test_a_writer_may_abort_itself_and_only_the_batch_commits_it(self, driver: Driver) -> None:
        driver.join("a", 7)
        driver.add(7, 0, ORDERS, name="app")
        with pytest.raises(InvalidTxnStateError, match="only EndTxnGroup commits it"):
            driver.ask(EndTxnRequest("app", 7, 0, True))
        for _ in range(2):
            assert driver.ask(EndTxnRequest("app", 7, 0, False)) == EndTxnResponse(0, None, -1, -1)
            driver.mark()
        with pytest.raises(InvalidTxnStateError, match="has ended"):
            driver.ask(EndTxnRequest("app", 7, 1, False))
        with pytest.raises(InvalidTxnStateError, match="has ended"):
            driver.add(7, 1, ORDERS, name="app")

    def test_a_name_is_an_application_or_a_producers(self, driver: Driver) -> None:
        driver.join("a", 7)
        with pytest.raises(InvalidTxnStateError, match="is an application"):
            driver.init("app")
        driver.init("plain", 8)
        with pytest.raises(InvalidTxnStateError, match="not an application"):
            driver.ask(JoinTxnGroupRequest("plain", 0, "a", 1_000))
        with pytest.raises(InvalidTxnStateError, match="not an application"):
            driver.ask(EndTxnGroupRequest("plain", 0, []))

    def test_s26_there_are_not_too_many_names(self) -> None:
        driver = Driver()
        driver.machine = TransactionMachine(TransactionSettings(max_count=2))
        driver.init("t", 7)
        driver.join("a", 8)
        with pytest.raises(PolicyViolationError, match=r"transactional\.id\.max\.count=2"):
            driver.init("u", 9)
        with pytest.raises(PolicyViolationError):
            driver.ask(EndTxnGroupRequest("other", 0, []))
        driver.join("b", 9)
        driver.init("t", 10)

    def test_there_are_not_too_many_writers(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_module, "MAX_TXN_GROUP_MEMBERS", 2)
        driver.join("a", 7)
        driver.join("b", 8)
        with pytest.raises(InvalidTxnStateError, match="2 open writers"):
            driver.join("c", 9)
        assert driver.join("b", 9) == TxnWinner("b", 9, 0)


class TestTelling:
    def test_transactions(self, driver: Driver) -> None:
        driver.init("t", 7)
        driver.init("u", 8)
        driver.add(7, 0, STOCK, ORDERS)
        driver.join("a", 9)
        driver.pass_time(250)
        listed = driver.ask(ListTransactionsRequest([], 0)).transactions
        assert listed == [
            ListedTransaction("t", 7, "Ongoing", 250),
            ListedTransaction("u", 8, "Empty", 0),
            ListedTransaction("app", 9, "Ongoing", 250),
        ]
        assert driver.ask(ListTransactionsRequest(["Empty"], 0)).transactions == listed[1:2]
        assert driver.ask(ListTransactionsRequest([], 251)).transactions == []
        with pytest.raises(InvalidRequestError, match="transaction state 'Open' does not exist"):
            driver.ask(ListTransactionsRequest(["Open"], 0))
        t, nobody, app = driver.ask(DescribeTransactionsRequest(["t", "nobody", "app"])).transactions
        assert t == DescribedTransaction("t", 0, None, 7, 0, "Ongoing", 60_000, WALL_MS, [ORDERS, STOCK], -1)
        assert nobody.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
        assert app.error_code == ErrorCode.INVALID_TXN_STATE

    def test_a_group(self, driver: Driver) -> None:
        with pytest.raises(TransactionalIdNotFoundError):
            driver.writers()
        driver.join("a", 9, batch_id=3)
        driver.add(9, 0, ORDERS, name="app")
        writer = TxnGroupMember("a", 3, 9, 0, "Ongoing", WALL_MS, [ORDERS])
        assert driver.ask(DescribeTxnGroupRequest("app")) == DescribeTxnGroupResponse(
            0, None, "app", -1, [], [writer]
        )
