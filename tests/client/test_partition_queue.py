"""Idempotent producing (R28, KIP-98, KIP-360): sequences, in-flight batches, epochs; against a model
leader.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kafkalite.client.config import ProducerConfig
from kafkalite.client.producer import partition_queue
from kafkalite.client.producer.accumulator import Accumulator
from kafkalite.client.producer.partition_queue import (
    PIPELINED_BYTES,
    SEQUENCES,
    InFlightBatch,
    PartitionQueue,
)
from kafkalite.client.producer.pending_batch import PendingBatch, record_size
from kafkalite.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    ConnectionFailedError,
    DeliveryTimeoutError,
    InvalidProducerEpochError,
    InvalidRecordError,
    MessageTooLargeError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceNumberError,
    RequestTimedOutError,
    UnknownProducerIdError,
)
from kafkalite.model import MAX_PRODUCER_EPOCH, NO_OFFSET, NO_TIMESTAMP, TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.header import BatchHeader, Codec
from kafkalite.storage.producer_state import ProducerStates

T0 = TopicPartition("t", 0)
CONFIG = ProducerConfig(
    batch_size=1000,
    batch_max_messages=0,
    max_request_size=4000,
    buffer_memory=10_000_000,
    linger_ms=0,
    delivery_timeout_ms=1000,
    retries=10**9,
    enable_idempotence=True,
)


def check_queue(queue: PartitionQueue) -> None:
    """Assert the invariants of a partition queue; called after every step."""
    sequence = None
    for flight in queue.in_flight:
        assert flight.has_position and not (flight.is_abandoned and flight.awaits_response)
        if flight.is_sequenced:
            assert flight.producer[:2] == (queue.producer_id, queue.producer_epoch)
            assert _follows(sequence, flight.producer[2]), "out of order"
            sequence = flight.next_sequence
    assert _follows(sequence, queue.next_sequence), "a sequence would be used twice"
    assert len(queue.in_flight) <= queue.max_in_flight
    if not queue.is_held:
        flights = [flight.awaits_response for flight in queue.in_flight if not flight.is_abandoned]
        assert flights == sorted(flights, reverse=True), "something overtook what is before it"


def _follows(end: int | None, sequence: int) -> bool:
    """Whether ``sequence`` is at or after ``end``, modulo the number of sequences."""
    return end is None or (sequence - end) % SEQUENCES < SEQUENCES // 2


def _accumulator(config: ProducerConfig = CONFIG) -> Accumulator:
    accumulator = Accumulator(config)
    assert accumulator.needs_producer_id
    accumulator.on_producer_id(7)
    return accumulator


def _add(accumulator: Accumulator, queue: PartitionQueue, value: bytes, now_ms: int = 0) -> PendingBatch:
    """Add a prebuilt batch, which is not coalesced."""
    batch = PendingBatch(queue.tp.topic, queue.tp.partition, limit_bytes=0, limit_records=0)
    batch.prebuilt = build_batch([value])
    batch.size_bytes = len(batch.prebuilt)
    batch.close()
    batch.record_count = 1
    accumulator.add_batch(queue, batch, now_ms)
    return batch


def _drain(accumulator: Accumulator, now_ms: int = 0, room: int = 100) -> list[InFlightBatch]:
    requests = accumulator.drain(now_ms, lambda tp: 1, lambda node: room).requests
    for flight in [flight for _, flights in requests for flight in flights]:
        flight.encode(Codec.NONE, None)
        check_queue(flight.queue)
    return [flight for _, flights in requests for flight in flights]


def _header(flight: InFlightBatch) -> BatchHeader:
    return RecordBatch(flight.encode(Codec.NONE, None)).header


def _identity(flight: InFlightBatch) -> tuple[int, int, int]:
    header = _header(flight)
    return header.producer_id, header.producer_epoch, header.base_sequence


def _values(flight: InFlightBatch) -> list[bytes | None]:
    return [record.value for record in RecordBatch(flight.encode(Codec.NONE, None))]


def test_nothing_is_sent_without_a_producer_id() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a")
    assert _drain(accumulator) == []
    assert accumulator.add_alone(accumulator.queue(TopicPartition("t", 1)), b"x", None, 1, 0, 1) is None
    accumulator.on_producer_id(7)
    (flight,) = _drain(accumulator)
    assert _identity(flight) == (7, 0, 0)


def test_sequences_count_the_records_of_a_partition() -> None:
    accumulator = _accumulator()
    queue, other = accumulator.queue(T0), accumulator.queue(TopicPartition("t", 1))
    for value in (b"a", b"b", b"c"):
        _add(accumulator, queue, value)
    _add(accumulator, other, b"x")
    flights = _drain(accumulator)
    found = [(s.queue.tp.partition, _identity(s)) for s in flights]
    assert sorted(found) == [(0, (7, 0, 0)), (0, (7, 0, 1)), (0, (7, 0, 2)), (1, (7, 0, 0))]
    first = flights[0]
    assert first.producer[2] == 0
    accumulator.on_acknowledged(first, 0, NO_TIMESTAMP, 0)
    batch = PendingBatch("t", 0, limit_bytes=10**6, limit_records=100)
    assert batch.closed is False
    alone = accumulator.add_alone(accumulator.queue(TopicPartition("t", 2)), b"v", b"k", 1, 0, 1)
    assert alone is not None and _identity(alone) == (7, 0, 0)


def test_sequences_wrap() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    queue.assign_producer_id(7)
    queue.next_sequence = SEQUENCES - 1
    _add(accumulator, queue, b"a")
    _add(accumulator, queue, b"b")
    first, second = _drain(accumulator)
    assert (_identity(first)[2], _identity(second)[2]) == (SEQUENCES - 1, 0)


def test_five_are_in_flight_and_small_ones_are_coalesced() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    for number in range(7):
        _add(accumulator, queue, b"%d" % number)
    assert len(_drain(accumulator)) == 5
    accumulator = _accumulator(replace(CONFIG, batch_size=40_000, max_request_size=10**6))
    queue = accumulator.queue(T0)

    def send(size: int) -> None:
        batch = accumulator.open_batch(queue, size, 0)
        assert batch is not None
        batch.append(b"x" * size, None, 0, (), record_size(b"x" * size, None))
        accumulator.close_batch(queue, 0)

    send(10)
    (first,) = _drain(accumulator)
    send(1000)
    assert _drain(accumulator) == [], "a little waits for the answer"
    for _ in range(PIPELINED_BYTES // 39_000 + 1):
        send(39_000)
    (second,) = _drain(accumulator)
    assert len(second.batches) == 5
    send(10)
    accumulator.on_acknowledged(first, 0, NO_TIMESTAMP, 0)
    assert _drain(accumulator) == []
    accumulator.on_acknowledged(second, 1, NO_TIMESTAMP, 0)
    assert len(_drain(accumulator)) == 1


def test_a_retry_sends_the_same_bytes_in_order() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    for value in (b"a", b"b", b"c"):
        _add(accumulator, queue, value)
    flights = _drain(accumulator)
    sent = [bytes(flight.encode(Codec.NONE, None)) for flight in flights]
    _add(accumulator, queue, b"d")
    (fourth,) = _drain(accumulator)
    accumulator.on_failed(flights[0], NotLeaderOrFollowerError(), 0, 0.5)
    assert accumulator.next_deadline_ms() == 1000, "no retry before the others are back"
    accumulator.on_failed(flights[1], OutOfOrderSequenceNumberError(), 0, 0.5)
    accumulator.on_failed(flights[2], OutOfOrderSequenceNumberError(), 0, 0.5)
    assert _drain(accumulator) == []
    accumulator.on_failed(fourth, OutOfOrderSequenceNumberError(), 0, 0.5)
    assert accumulator.next_deadline_ms() == 100
    accumulator.on_tick(100)
    again = _drain(accumulator, 100)
    assert again == [*flights, fourth]
    assert [bytes(flight.encode(Codec.NONE, None)) for flight in again[:3]] == sent
    for offset, flight in enumerate(again):
        accumulator.on_acknowledged(flight, offset, NO_TIMESTAMP, 100)
    assert not accumulator.incomplete


def test_a_batch_is_resent_while_the_leader_remembers_it() -> None:
    """R28: leaders remember five batches, including those that were acknowledged after it."""
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    for number in range(8):
        _add(accumulator, queue, b"%d" % number)
    first, *others = _drain(accumulator)
    accumulator.on_failed(first, ConnectionFailedError("gone"), 0, 0.5)
    for offset, flight in enumerate(others, 1):
        accumulator.on_acknowledged(flight, offset, NO_TIMESTAMP, 0)
    accumulator.retry_now()
    assert _drain(accumulator) == [first], (
        "four were stored after it; a fifth could make the leader forget it"
    )
    accumulator.on_acknowledged(first, 0, NO_TIMESTAMP, 0)
    assert len(_drain(accumulator)) == 3


def test_a_new_leader_waits_for_responses_of_the_old_one() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a")
    (first,) = _drain(accumulator)
    _add(accumulator, queue, b"b")
    moved = accumulator.drain(0, lambda tp: 2, lambda node: 9)
    assert moved.requests == []
    accumulator.on_failed(first, ConnectionFailedError("gone"), 0, 0.5)
    accumulator.retry_now()
    requests = accumulator.drain(0, lambda tp: 2, lambda node: 9).requests
    assert [(node, [s.producer[2] for s in flights]) for node, flights in requests] == [(2, [0]), (2, [1])]


def test_batches_to_resend_wait_for_room_and_keep_their_positions() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    for value in (b"a", b"b", b"c"):
        _add(accumulator, queue, value)
    flights = _drain(accumulator)
    for flight in flights:
        accumulator.on_failed(flight, ConnectionFailedError("gone"), 0, 0.5)
    accumulator.retry_now()
    assert _drain(accumulator, 0, room=2) == flights[:2]
    assert _drain(accumulator, 0, room=0) == []
    accumulator.on_acknowledged(flights[0], 0, NO_TIMESTAMP, 0)
    assert _drain(accumulator, 0, room=1) == flights[2:]


def test_an_expired_batch_leaves_a_gap_unless_a_later_one_is_acknowledged() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a", 0)
    _add(accumulator, queue, b"b", 500)
    first, second = _drain(accumulator, 500)
    for flight in (first, second):
        accumulator.on_failed(flight, ConnectionFailedError("gone"), 900, 0.5)
    (expired,) = accumulator.on_tick(1000)
    assert isinstance(expired.error, DeliveryTimeoutError)
    late = _add(accumulator, queue, b"c", 1000)
    assert _drain(accumulator, 1000) == [second], "in doubt, so it goes as it was; nothing new behind a hole"
    accumulator.on_acknowledged(second, 1, NO_TIMESTAMP, 1001)  # so the first is in the log, too
    (third,) = _drain(accumulator, 1001)
    assert third.batches == [late] and _identity(third) == (7, 0, 2)


def test_behind_a_gap_the_next_epoch_begins() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a")
    (first,) = _drain(accumulator)
    accumulator.on_failed(first, ConnectionFailedError("gone"), 990, 0.5)
    accumulator.on_tick(1000)
    _add(accumulator, queue, b"b", 1000)
    (second,) = _drain(accumulator, 1000)
    assert _identity(second) == (7, 1, 0)


def test_maybe_written_batches_behind_a_gap_fail() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a", 0)
    doubtful = _add(accumulator, queue, b"b", 500)
    first, second = _drain(accumulator, 500)
    for flight in (first, second):
        accumulator.on_failed(flight, ConnectionFailedError("gone"), 900, 0.5)
    accumulator.on_tick(1000)
    assert _drain(accumulator, 1000) == [second]
    assert accumulator.on_failed(second, OutOfOrderSequenceNumberError(), 1001, 0.5) == [doubtful]
    assert isinstance(doubtful.error, OutOfOrderSequenceNumberError)
    _add(accumulator, queue, b"c", 1001)
    (third,) = _drain(accumulator, 1001)
    assert _identity(third) == (7, 1, 0)


def test_unwritten_batches_continue_in_the_next_epoch() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    bad, good = _add(accumulator, queue, b"bad"), _add(accumulator, queue, b"good")
    first, second = _drain(accumulator)
    assert accumulator.on_failed(first, InvalidRecordError(), 0, 0.5) == [bad]
    assert accumulator.on_failed(second, OutOfOrderSequenceNumberError(), 0, 0.5) == []
    (again,) = _drain(accumulator)
    assert again.batches == [good] and _identity(again) == (7, 1, 0)
    assert _values(again) == [b"good"]


def test_batches_behind_an_unwritten_one_are_unwritten() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"bad")
    good = _add(accumulator, queue, b"good")
    first, second = _drain(accumulator)
    accumulator.on_failed(first, InvalidRecordError(), 0, 0.5)
    assert accumulator.on_failed(second, ConnectionFailedError("gone"), 0, 0.5) == []
    (again,) = _drain(accumulator)
    assert again.batches == [good] and _identity(again) == (7, 1, 0)


def test_a_forgotten_producer_continues_and_a_loss_is_reported() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a")
    (first,) = _drain(accumulator)
    accumulator.on_acknowledged(first, 0, NO_TIMESTAMP, 0)
    kept = _add(accumulator, queue, b"b")
    (second,) = _drain(accumulator)
    assert accumulator.on_failed(second, UnknownProducerIdError(), 0, 0.5) == []
    (again,) = _drain(accumulator)
    assert again.batches == [kept] and _identity(again) == (7, 1, 0)
    accumulator.on_acknowledged(again, 1, NO_TIMESTAMP, 0)
    lost = _add(accumulator, queue, b"c")
    (third,) = _drain(accumulator)
    assert accumulator.on_failed(third, OutOfOrderSequenceNumberError(), 0, 0.5) == [lost]
    _add(accumulator, queue, b"d")
    (fourth,) = _drain(accumulator)
    assert _identity(fourth) == (7, 2, 0)


@pytest.mark.parametrize("error", [UnknownProducerIdError(), OutOfOrderSequenceNumberError()])
def test_a_refused_first_sequence_is_not_retried_forever(error: BrokerError) -> None:
    accumulator = _accumulator()
    batch = _add(accumulator, accumulator.queue(T0), b"a")
    (flight,) = _drain(accumulator)
    assert accumulator.on_failed(flight, error, 0, 0.5) == [batch]


def test_a_fenced_partition_gets_a_new_producer_id() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    fenced = _add(accumulator, queue, b"a")
    (first,) = _drain(accumulator)
    assert accumulator.on_failed(first, InvalidProducerEpochError(), 0, 0.5) == [fenced]
    _add(accumulator, queue, b"b")
    assert _drain(accumulator) == []
    assert accumulator.needs_producer_id
    accumulator.on_producer_id(8)
    (second,) = _drain(accumulator)
    assert _identity(second) == (8, 0, 0)


def test_epochs_end() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    queue.assign_producer_id(7)
    queue.producer_epoch = MAX_PRODUCER_EPOCH
    _add(accumulator, queue, b"a")
    (first,) = _drain(accumulator)
    accumulator.on_failed(first, InvalidRecordError(), 0, 0.5)
    _add(accumulator, queue, b"b")
    assert _drain(accumulator) == []
    accumulator.on_producer_id(9)
    (second,) = _drain(accumulator)
    assert _identity(second) == (9, 0, 0)


def test_a_batch_of_another_producer_gets_this_ones_identity_in_a_copy() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    foreign = bytes(build_batch([b"x"], producer_id=99, producer_epoch=3, base_sequence=44))
    batch = _add(accumulator, queue, b"")
    batch.prebuilt = foreign
    (flight,) = _drain(accumulator)
    assert _identity(flight) == (7, 0, 0)
    assert RecordBatch(foreign).header.producer_id == 99
    plain = Accumulator(replace(CONFIG, enable_idempotence=False))
    batch = _add(plain, plain.queue(T0), b"")
    batch.prebuilt = foreign
    (flight,) = _drain(plain)
    assert _identity(flight) == (-1, -1, -1)


def test_a_coalesced_batch_that_is_too_large_is_split_in_order() -> None:
    accumulator = _accumulator()
    queue = accumulator.queue(T0)
    for size in (900, 901, 902):
        batch = accumulator.open_batch(queue, size, 0)
        assert batch is not None
        batch.append(b"x" * size, None, 0, (), record_size(b"x" * size, None))
        accumulator.close_batch(queue, 0)
    (large,) = _drain(accumulator)
    assert len(large.batches) == 3
    _add(accumulator, queue, b"after")
    (after,) = _drain(accumulator)
    assert accumulator.on_failed(large, MessageTooLargeError(), 0, 0.5) == []
    assert accumulator.on_failed(after, OutOfOrderSequenceNumberError(), 0, 0.5) == []
    seen = []
    while flights := _drain(accumulator):
        for flight in flights:
            seen.append((flight.record_count, _identity(flight)))
            accumulator.on_acknowledged(flight, len(seen), NO_TIMESTAMP, 0)
    assert seen == [(1, (7, 1, sequence)) for sequence in range(4)]


@dataclass
class Attempt:
    """One send of an in-flight batch, on its way to the leader or waiting there to be committed."""

    flight: InFlightBatch
    data: bytes
    offset: int = NO_OFFSET


class LeaderMachine(RuleBasedStateMachine):
    """A real accumulator against a model of one partition's leader, with all faults in between.

    The model is the log of R28: uncommitted records are lost or kept at a change of leader, responses
    are lost, connections break with requests that may arrive later, appends are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        partition_queue.PIPELINED_BYTES = 100  # small batches may be in flight, too
        self.accumulator = Accumulator(replace(CONFIG, delivery_timeout_ms=600, linger_ms=1, batch_size=200))
        self.queue = self.accumulator.queue(T0)
        self.now_ms = 0
        self.number = 0
        self.sent: list[tuple[PendingBatch, int, bytes]] = []
        self.log: list[tuple[bytes, bytes]] = []  # (value, the batch that contained it)
        self.committed = 0
        self.producers = ProducerStates()
        self.wire: deque[Attempt] = deque()  # requests in the connection
        self.parked: deque[Attempt] = deque()  # appended, without a response
        self.answers: deque[tuple[Attempt, Exception | None]] = deque()
        self.ghosts: list[bytes] = []  # in a broken connection; they may still arrive
        self.next_id = 100

    # --- the producer

    @rule(count=st.integers(1, 4), size=st.integers(0, 150))
    def send(self, count: int, size: int) -> None:
        for _ in range(count):
            value = b"%d:" % self.number + b"x" * size
            need = record_size(value, None)
            if self.queue.open is not None and not self.queue.open.has_room(need):
                self.accumulator.close_batch(self.queue, self.now_ms)
            batch = self.queue.open or self.accumulator.open_batch(self.queue, need, self.now_ms)
            assert batch is not None
            self.number += 1
            self.sent.append((batch, batch.append(value, None, 0, (), need), value))

    @rule()
    def send_built(self) -> None:
        value = b"%d:built" % self.number
        self.number += 1
        self.sent.append((_add(self.accumulator, self.queue, value, self.now_ms), 0, value))

    @rule()
    def send_alone(self) -> None:
        value = b"%d:alone" % self.number
        flight = self.accumulator.add_alone(self.queue, value, None, 0, self.now_ms, 1)
        if flight is not None:
            self.number += 1
            self.sent.append((flight.batches[0], 0, value))
            self._leave([flight])

    @rule(room=st.integers(0, 5), alone=st.booleans())
    def drain(self, room: int, alone: bool) -> None:
        self.accumulator.close_all(self.now_ms)
        if alone and self.queue in self.accumulator.ready and room:
            flight = self.accumulator.take(self.queue, self.now_ms, 1)
            self._leave([flight] if flight is not None else [])
        else:
            drained = self.accumulator.drain(self.now_ms, lambda tp: 1, lambda node: room)
            self._leave([flight for _, flights in drained.requests for flight in flights])
        if self.accumulator.needs_producer_id:
            self.accumulator.on_producer_id(self.next_id)
            self.next_id += 1

    def _leave(self, flights: list[InFlightBatch]) -> None:
        for flight in flights:
            self.wire.append(Attempt(flight, bytes(flight.encode(Codec.NONE, None))))

    @rule(
        arrives=st.integers(0, 5),
        outcome=st.sampled_from(["commit", "time out", "leader", "cut", "cut, arrives", "nothing"]),
        answers=st.integers(0, 5),
        duration_ms=st.sampled_from([0, 50, 150, 300]),
    )
    def exchange(self, arrives: int, outcome: str, answers: int, duration_ms: int) -> None:
        """Many steps at once, because single random steps seldom reach all states of in-flight batches."""
        self.wait(duration_ms)
        self.send_built()
        self.accumulator.retry_now()
        self.drain(5, False)
        for _ in range(arrives):
            self.arrive(None)
        match outcome:
            case "commit":
                self.commit()
            case "time out":
                self.time_out()
            case "leader":
                self.change_leaders(1, True, False)
            case "cut" | "cut, arrives":
                self.break_connection(outcome != "cut")
        for _ in range(answers):
            self.response()

    @rule(duration_ms=st.integers(0, 300))
    def wait(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        for batch in self.accumulator.on_tick(self.now_ms):
            assert isinstance(batch.error, DeliveryTimeoutError)

    @rule()
    def learn_of_a_change(self) -> None:
        self.accumulator.retry_now()

    @rule()
    def response(self) -> None:
        if not self.answers:
            return
        attempt, error = self.answers.popleft()
        if error is None:
            self.accumulator.on_acknowledged(attempt.flight, attempt.offset, NO_TIMESTAMP, self.now_ms)
        else:
            self.accumulator.on_failed(attempt.flight, error, self.now_ms, 0.5)

    # --- the leader

    def _append(self, data: bytes) -> int:
        """Return the base offset. Raises the error of the sequence."""
        batch = RecordBatch(data)
        repeated = self.producers.check(batch.header, data)
        if repeated is not None:
            return repeated.base_offset
        base = len(self.log)
        self.log += [(record.value or b"", data) for record in batch]
        header = batch.header
        self._note(header, base)
        return base

    def _note(self, header: BatchHeader, base: int) -> None:
        self.producers.note(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            base,
            base + header.record_count - 1,
            0,
            0,
        )

    @rule(fault=st.sampled_from([None] * 6 + ["too large", "not enough", "invalid"]))
    def arrive(self, fault: str | None) -> None:
        """The leader handles the next request. Responses keep the order of requests."""
        if not self.wire:
            return
        attempt = self.wire.popleft()
        error: Exception | None = None
        if fault == "too large" and _header_of(attempt.data).record_count > 2:
            error = MessageTooLargeError()
        elif fault == "not enough":
            error = NotEnoughReplicasError()
        elif fault == "invalid" and b"7" in attempt.data:
            error = InvalidRecordError()
        else:
            try:
                attempt.offset = self._append(attempt.data)
            except BrokerError as refused:
                error = refused
        if error is None:
            self.parked.append(attempt)
        else:
            self._flush_parked(RequestTimedOutError())
            self.answers.append((attempt, error))

    def _flush_parked(self, error: Exception) -> None:
        self.answers.extend((attempt, error) for attempt in self.parked)
        self.parked.clear()

    @rule()
    def commit(self) -> None:
        self.committed = len(self.log)
        self.answers.extend((attempt, None) for attempt in self.parked)
        self.parked.clear()

    @rule()
    def time_out(self) -> None:
        self._flush_parked(RequestTimedOutError())

    @rule(kept=st.integers(0, 10), answers=st.booleans(), broken=st.booleans())
    def change_leaders(self, kept: int, answers: bool, broken: bool) -> None:
        """The new leader has all committed records, and maybe more; its producer state is that of its log
        (R27).
        """
        self._flush_parked(NotLeaderOrFollowerError())
        while len(self.log) > self.committed + kept:
            last = self.log[-1][1]
            while self.log and self.log[-1][1] == last:  # whole batches
                self.log.pop()
        self.committed = min(self.committed, len(self.log))
        self.producers = ProducerStates()
        base = 0
        while base < len(self.log):
            header = _header_of(self.log[base][1])
            self._note(header, base)
            base += header.record_count
        if broken:
            self.break_connection(answers)

    @rule(arrives=st.booleans())
    def break_connection(self, arrives: bool) -> None:
        """All requests in flight fail, but may still be handled, now or later."""
        if arrives:
            for attempt in self.wire:
                self.ghosts.append(attempt.data)
        lost = [attempt for attempt, _ in self.answers] + [*self.parked, *self.wire]
        self.answers.clear()
        self.parked.clear()
        self.wire.clear()
        for attempt in lost:
            self.accumulator.on_failed(attempt.flight, ConnectionFailedError("cut"), self.now_ms, 0.5)

    @rule()
    @precondition(lambda self: self.ghosts)
    def ghost_arrives(self) -> None:
        with contextlib.suppress(BrokerError):
            self._append(self.ghosts.pop(0))

    @rule()
    @precondition(lambda self: not (self.wire or self.ghosts or self.parked or self.answers))
    def forget_the_producer(self) -> None:
        """Retention after a quiet day: nothing is in flight and nothing waits to be resent."""
        if not self.queue.in_flight:
            self.producers = ProducerStates()

    # --- invariants

    @invariant()
    def the_queue_is_in_order(self) -> None:
        check_queue(self.queue)

    @invariant()
    def nothing_is_there_twice(self) -> None:
        values = [value for value, _ in self.log]
        assert len(values) == len(set(values)), "a duplicate"

    @invariant()
    def the_log_is_in_the_order_of_sending(self) -> None:
        numbers = [int(value.split(b":")[0]) for value, _ in self.log]
        assert numbers == sorted(numbers), "a record overtook another"

    @invariant()
    def what_is_acknowledged_is_where_it_was_told_to_be(self) -> None:
        for batch, index, value in self.sent:
            if batch.done and batch.error is None and batch.base_offset != NO_OFFSET:
                assert self.log[batch.base_offset + index][0] == value

    @invariant()
    def nothing_is_acknowledged_that_is_not_there(self) -> None:
        values = {value for value, _ in self.log}
        for batch, _, value in self.sent:
            assert not (batch.done and batch.error is None) or value in values

    def settle(self, is_enough: Callable[[], bool]) -> None:
        """Let everything sent arrive, be committed and responded to, round after round."""
        for _ in range(60):
            if is_enough():
                break
            self.now_ms += 20
            self.wait(0)
            self.accumulator.retry_now()
            self.drain(5, False)
            while self.wire:
                self.arrive(None)
            self.commit()
            while self.answers:
                self.response()
            check_queue(self.queue)

    def teardown(self) -> None:
        """Without further faults everything is decided soon, without another expiry."""
        partition_queue.PIPELINED_BYTES = PIPELINED_BYTES
        self.ghosts.clear()
        self.accumulator.expire(self.now_ms)
        undecided = dict(self.accumulator.incomplete)
        have_left = {batch for flight in self.queue.in_flight for batch in flight.batches}
        self.settle(lambda: not self.accumulator.incomplete)
        assert not self.accumulator.incomplete
        for batch in undecided:
            assert not isinstance(batch.error, DeliveryTimeoutError) or batch.deadline_ms <= self.now_ms
            is_late = batch.deadline_ms <= self.now_ms
            assert batch.error is None or is_late or batch in have_left, "nothing ever happened to it"
        self.nothing_is_there_twice()
        self.the_log_is_in_the_order_of_sending()
        self.nothing_is_acknowledged_that_is_not_there()


def _header_of(data: bytes) -> BatchHeader:
    return RecordBatch(data, check_crc=False).header


TestLeaderMachine = LeaderMachine.TestCase
TestLeaderMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=60
)


def test_a_record_sent_alone_is_sent_again_under_a_new_producer_identity() -> None:
    """The leader has forgotten the producer (R29), so its next batch is encoded a second time."""
    world = LeaderMachine()
    world.exchange(arrives=0, outcome="commit", answers=0, duration_ms=0)
    world.exchange(arrives=2, outcome="commit", answers=0, duration_ms=0)
    world.response()
    world.response()
    world.forget_the_producer()
    world.send_alone()
    world.teardown()
    assert [value for value, _ in world.log][-1].endswith(b":alone")


def run_history(seed: int, steps: int = 60) -> None:
    """The same machine with random steps, weighted towards long sequences."""
    rng = random.Random(seed)
    machine = LeaderMachine()
    outcomes = ["commit", "time out", "leader", "cut", "cut, arrives", "nothing"]
    favourite = rng.choice(outcomes)
    try:
        for _ in range(steps):
            match rng.randrange(8):
                case 0 | 1 | 2 | 3:
                    outcome = favourite if rng.random() < 0.6 else rng.choice(outcomes)
                    machine.exchange(
                        rng.choice([0, 1, 2, 5]), outcome, rng.choice([0, 1, 2, 5]), rng.choice([0, 50, 150])
                    )
                case 4:
                    machine.send(rng.randint(1, 4), rng.randint(0, 150))
                case 5:
                    machine.wait(rng.randint(0, 300))
                case 6:
                    machine.arrive(rng.choice([None, None, "too large", "not enough", "invalid"]))
                case 7 if machine.ghosts:
                    machine.ghost_arrives()
                case _:
                    machine.change_leaders(rng.randint(0, 3), True, rng.random() < 0.5)
            machine.the_queue_is_in_order()
            machine.nothing_is_there_twice()
            machine.the_log_is_in_the_order_of_sending()
            machine.what_is_acknowledged_is_where_it_was_told_to_be()
            machine.nothing_is_acknowledged_that_is_not_there()
    finally:
        partition_queue.PIPELINED_BYTES = PIPELINED_BYTES
    machine.teardown()


def test_random_histories() -> None:
    for seed in range(150):
        try:
            run_history(seed)
        except Exception as failure:
            failure.add_note(f"seed {seed}")
            raise


# --- in transactions -------------------------------------------------------------------------------

TRANSACTIONAL = replace(CONFIG, transactional_id="app")


def _in_transaction(epoch: int = 3, config: ProducerConfig = TRANSACTIONAL) -> Accumulator:
    accumulator = Accumulator(config)
    assert not accumulator.needs_producer_id, "the coordinator gives the identity"
    accumulator.begin_transaction(7, epoch)
    return accumulator


def test_a_transactions_identity_and_sequences_from_0_r31() -> None:
    accumulator = Accumulator(TRANSACTIONAL)
    queue = accumulator.queue(T0)
    batch = _add(accumulator, queue, b"outside")
    assert _drain(accumulator) == [], "nothing leaves without a transaction"
    assert accumulator.end_transaction(ConnectionFailedError("over")) == [batch]
    for epoch in (3, 4):
        accumulator.begin_transaction(7, epoch)
        _add(accumulator, queue, b"a")
        _add(accumulator, queue, b"b")
        first, second = _drain(accumulator)
        assert (_identity(first), _identity(second)) == ((7, epoch, 0), (7, epoch, 1))
        assert _header(first).is_transactional
        for flight in (first, second):
            accumulator.on_acknowledged(flight, 0, NO_TIMESTAMP, 0)
        assert accumulator.end_transaction(ConnectionFailedError("over")) == []
        check_queue(queue)


def test_responses_after_the_end_of_a_transaction_are_ignored() -> None:
    accumulator = _in_transaction()
    queue = accumulator.queue(T0)
    for value in (b"a", b"b", b"c"):
        _add(accumulator, queue, value)
    old = _drain(accumulator)
    accumulator.on_failed(old[2], NotEnoughReplicasError(), 0, 0.5)
    assert len(accumulator.end_transaction(ConnectionFailedError("aborted"))) == 3
    assert accumulator.free_bytes == CONFIG.buffer_memory
    accumulator.begin_transaction(7, 4)
    _add(accumulator, queue, b"d")
    (new,) = _drain(accumulator)
    assert _identity(new) == (7, 4, 0)
    assert accumulator.on_acknowledged(old[0], 0, NO_TIMESTAMP, 0) == []
    assert accumulator.on_failed(old[1], InvalidProducerEpochError(), 0, 0.5) == []
    assert list(queue.in_flight) == [new]
    (done,) = accumulator.on_acknowledged(new, 5, NO_TIMESTAMP, 0)
    assert done.base_offset == 5


def test_repacked_batches_reuse_their_sequences_in_a_transaction() -> None:
    accumulator = _in_transaction(config=replace(TRANSACTIONAL, max_in_flight_requests_per_connection=1))
    queue = accumulator.queue(T0)
    for number in range(3):
        batch = accumulator.open_batch(queue, 100, 0)
        assert batch is not None
        batch.append(b"%d" % number, None, 0, (), 20)
        accumulator.close_batch(queue, 0)
    (large,) = _drain(accumulator)
    assert large.record_count == 3
    assert accumulator.on_failed(large, MessageTooLargeError(), 0, 0.5) == []
    seen = []
    while flights := _drain(accumulator):
        for flight in flights:
            seen.append(_identity(flight))
            accumulator.on_acknowledged(flight, len(seen), NO_TIMESTAMP, 0)
    assert seen == [(7, 3, sequence) for sequence in range(3)]


@pytest.mark.parametrize("error", [OutOfOrderSequenceNumberError(), UnknownProducerIdError()])
def test_a_gap_in_a_transaction_is_a_loss_r29(error: BrokerError) -> None:
    accumulator = _in_transaction()
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a")
    (first,) = _drain(accumulator)
    accumulator.on_acknowledged(first, 0, NO_TIMESTAMP, 0)
    batch = _add(accumulator, queue, b"b")
    (second,) = _drain(accumulator)
    assert accumulator.on_failed(second, error, 0, 0.5) == [batch]
    _add(accumulator, queue, b"c")
    assert _drain(accumulator) == [], "nothing goes behind it"


def test_waiting_for_the_previous_transaction_takes_milliseconds() -> None:
    accumulator = _in_transaction(config=replace(TRANSACTIONAL, retries=0))
    queue = accumulator.queue(T0)
    _add(accumulator, queue, b"a")
    now_ms, pauses = 0, []
    for _ in range(4):
        (flight,) = _drain(accumulator, now_ms)
        assert accumulator.on_failed(flight, ConcurrentTransactionsError(), now_ms, 0.5) == []
        pauses.append(queue.retry_at_ms - now_ms)
        now_ms = queue.retry_at_ms
        accumulator.on_tick(now_ms)
    assert pauses == [2, 4, 8, 16]


class TransactionLeaderMachine(LeaderMachine):
    """The same leader, accepting only the epoch of the open transaction, as markers and verification do."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = Accumulator(replace(self.accumulator.config, transactional_id="app"))
        self.queue = self.accumulator.queue(T0)
        self.epoch = 0
        self.first = 0  # of ``sent``, in this transaction
        self.committed_values: list[bytes] = []
        self.accumulator.begin_transaction(7, 0)

    def _append(self, data: bytes) -> int:
        if _header_of(data).producer_epoch != self.epoch:
            raise InvalidProducerEpochError
        return super()._append(data)

    @property
    def is_doomed(self) -> bool:
        return any(batch.error is not None for batch, _, _ in self.sent[self.first :])

    def end_transaction(self, *, is_commit: bool) -> None:
        self.settle(lambda: not is_commit or self.is_doomed or not self.accumulator.incomplete)
        if is_commit and not self.is_doomed:
            assert not self.accumulator.incomplete
            written = [value for value, data in self.log if _header_of(data).producer_epoch == self.epoch]
            assert written == [value for _, _, value in self.sent[self.first :]], "exactly once, in order"
            assert all(_header_of(data).is_transactional for _, data in self.log)
        self.accumulator.end_transaction(ConnectionFailedError("the end"))
        assert self.accumulator.free_bytes == CONFIG.buffer_memory
        self.first = len(self.sent)
        self.epoch += 1
        self.accumulator.begin_transaction(7, self.epoch)


def run_transactions(seed: int, steps: int = 60) -> int:
    """Return how many of the transactions were committed."""
    rng = random.Random(seed)
    machine = TransactionLeaderMachine()
    outcomes = ["commit", "time out", "leader", "cut", "cut, arrives", "nothing"]
    favourite = rng.choice(outcomes)
    count = 0
    try:
        for _ in range(steps):
            match rng.randrange(8):
                case 0 | 1 | 2:
                    outcome = favourite if rng.random() < 0.6 else rng.choice(outcomes)
                    machine.exchange(rng.choice([0, 1, 2, 5]), outcome, rng.choice([0, 1, 5]), 50)
                case 3:
                    machine.send(rng.randint(1, 4), rng.randint(0, 150))
                case 4:
                    machine.arrive(rng.choice([None, None, "too large", "not enough", "invalid"]))
                case 5 if machine.ghosts:
                    machine.ghost_arrives()
                case 6:
                    is_commit = rng.random() < 0.7
                    count += is_commit and not machine.is_doomed
                    machine.end_transaction(is_commit=is_commit)
                case _:
                    machine.change_leaders(rng.randint(0, 3), True, rng.random() < 0.5)
            machine.the_queue_is_in_order()
            machine.nothing_is_there_twice()
            machine.the_log_is_in_the_order_of_sending()
            machine.what_is_acknowledged_is_where_it_was_told_to_be()
        machine.end_transaction(is_commit=True)
    finally:
        partition_queue.PIPELINED_BYTES = PIPELINED_BYTES
    return count


def test_random_transactions() -> None:
    count = 0
    for seed in range(150):
        try:
            count += run_transactions(seed)
        except Exception as failure:
            failure.add_note(f"seed {seed}")
            raise
    assert count > 300, "most are committed"
