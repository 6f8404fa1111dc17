"""The accumulator alone: batching, memory, order under retries, deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kafkalite.client.config import ProducerConfig
from kafkalite.client.producer.accumulator import Accumulator
from kafkalite.client.producer.partition_queue import InFlightBatch, PartitionQueue
from kafkalite.client.producer.pending_batch import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    PendingBatch,
    record_size,
)
from kafkalite.errors import (
    BrokerError,
    ClientClosedError,
    DeliveryTimeoutError,
    InvalidRecordError,
    KafkaStorageError,
    MessageTooLargeError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
)
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.header import Codec

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
CONFIG = ProducerConfig(
    batch_size=1000,
    batch_max_messages=0,
    max_request_size=4000,
    buffer_memory=100_000,
    linger_ms=5,
    delivery_timeout_ms=1000,
    retries=3,
)


def _append(
    accumulator: Accumulator, queue: PartitionQueue, value: bytes, now_ms: int = 0, key: bytes | None = None
) -> PendingBatch:
    """Add a record as placement does."""
    size = record_size(value, key)
    if queue.open is not None and not queue.open.has_room(size):
        accumulator.close_batch(queue, now_ms)
    batch = queue.open or accumulator.open_batch(queue, size, now_ms)
    assert batch is not None
    batch.append(value, key, 1000 + now_ms, (), size)
    return batch


def _drain(accumulator: Accumulator, now_ms: int = 0, room: int = 100) -> list[list[InFlightBatch]]:
    return [flights for _, flights in accumulator.drain(now_ms, lambda tp: 1, lambda node: room).requests]


def _values(flight: InFlightBatch) -> list[bytes | None]:
    return [record.value for record in RecordBatch(flight.encode(Codec.NONE, None))]


def test_a_batch_lingers() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"a", now_ms=0)
    _append(accumulator, queue, b"b", now_ms=3)
    assert accumulator.next_deadline_ms() == 5
    assert not accumulator.deadlines_only_recede
    assert accumulator.on_tick(4) == []
    assert _drain(accumulator, 4) == []
    accumulator.on_tick(5)
    ((flight,),) = _drain(accumulator, 5)
    assert _values(flight) == [b"a", b"b"]
    assert accumulator.next_deadline_ms() == 1000, "the delivery timeout is next"


def test_without_linger_a_batch_is_sent_at_once_and_later_records_gather() -> None:
    accumulator = Accumulator(replace(CONFIG, linger_ms=0))
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"a")
    ((first,),) = _drain(accumulator)
    assert _values(first) == [b"a"]
    for value in (b"b", b"c"):
        _append(accumulator, queue, value)
    assert _drain(accumulator) == [], "one flight of a partition at a time"
    accumulator.on_acknowledged(first, 0, NO_TIMESTAMP, 1)
    ((second,),) = _drain(accumulator, 1)
    assert _values(second) == [b"b", b"c"]


def test_a_batch_closes_at_its_size_and_at_its_count() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    first = _append(accumulator, queue, b"x" * 500)
    second = _append(accumulator, queue, b"y" * 500)
    assert first.closed and not second.closed
    accumulator = Accumulator(replace(CONFIG, batch_max_messages=2))
    queue = accumulator.queue(T0)
    batches = [_append(accumulator, queue, b"x") for _ in range(5)]
    assert batches[0] is batches[1] is not batches[2]
    ((flight,),) = _drain(accumulator)
    assert len(_values(flight)) == 2, "coalescing keeps batch.max.messages too"


def test_a_record_above_batch_size_gets_a_batch_of_its_own() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"x" * 2500)
    _append(accumulator, queue, b"y")
    ((flight,),) = _drain(accumulator)
    assert _values(flight) == [b"x" * 2500]


def test_closed_batches_are_sent_together_up_to_the_request_size() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    batches = []
    for i in range(10):
        batch = _append(accumulator, queue, b"%d" % i * 800, key=b"k" if i % 2 else None)
        batches.append(batch)
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    assert len(flight.batches) == 4
    assert flight.size_bytes <= CONFIG.max_request_size
    records = list(RecordBatch(flight.encode(Codec.NONE, None)))
    assert [record.value[:1] for record in records] == [b"0", b"1", b"2", b"3"]
    assert [record.key for record in records] == [None, b"k", None, b"k"]
    done = accumulator.on_acknowledged(flight, 70, NO_TIMESTAMP, 1)
    assert [batch.base_offset for batch in done] == [70, 71, 72, 73]


def test_coalesced_headers_stay_with_their_records() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    for i in range(3):
        batch = accumulator.open_batch(queue, 100, 0)
        assert batch is not None
        batch.append(b"p", None, 1, (), 20)
        batch.append(b"v", None, 1, (("n", b"%d" % i),) if i != 1 else (), 60)
        accumulator.close_batch(queue, 0)
    ((flight,),) = _drain(accumulator)
    found = [record.headers for record in RecordBatch(flight.encode(Codec.NONE, None))]
    assert found == [(), (("n", b"0"),), (), (), (), (("n", b"2"),)]


def test_a_prebuilt_batch_is_sent_alone_and_in_order() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"before")
    built = PendingBatch(*T0, limit_bytes=0, limit_records=0)
    built.prebuilt = build_batch([b"built", b"too"], None, 7)
    built.prebuilt_timestamps_ms = 7
    built.size_bytes = len(built.prebuilt)
    built.close()
    built.record_count = 2
    assert accumulator.has_room(built.size_bytes)
    accumulator.add_batch(queue, built, 0)
    _append(accumulator, queue, b"after")
    accumulator.close_all(0)
    seen = []
    offset = 0
    while requests := _drain(accumulator):
        ((flight,),) = requests
        seen.append(_values(flight))
        accumulator.on_acknowledged(flight, offset, NO_TIMESTAMP, 0)
        offset += 2
    assert seen == [[b"before"], [b"built", b"too"], [b"after"]]
    assert built.timestamp_ms(1) == 7
    assert built.base_offset == 2


def test_requests_gather_partitions_up_to_their_size() -> None:
    accumulator = Accumulator(CONFIG)
    for partition in range(6):
        _append(accumulator, accumulator.queue(TopicPartition("t", partition)), b"x" * 900)
    accumulator.close_all(0)
    requests = _drain(accumulator)
    assert [len(flights) for flights in requests] == [3, 3]


def test_a_broker_without_room_is_sent_nothing_until_it_has_room() -> None:
    accumulator = Accumulator(CONFIG)
    for partition in range(6):
        _append(accumulator, accumulator.queue(TopicPartition("t", partition)), b"x" * 900)
    accumulator.close_all(0)
    assert _drain(accumulator, room=0) == []
    (first,) = _drain(accumulator, room=1)
    (second,) = _drain(accumulator, room=1)
    sent = [flight.queue.tp.partition for flight in [*first, *second]]
    assert sent == [0, 1, 2, 3, 4, 5]


def test_a_partition_without_leader_waits_and_is_reported() -> None:
    accumulator = Accumulator(CONFIG)
    _append(accumulator, accumulator.queue(T0), b"a")
    _append(accumulator, accumulator.queue(T1), b"b")
    accumulator.close_all(0)
    drained = accumulator.drain(0, lambda tp: -1 if tp == T0 else 2, lambda node: 1)
    assert drained.leaderless
    assert [(node, [s.queue.tp for s in sent]) for node, sent in drained.requests] == [(2, [T1])]
    ((late,),) = _drain(accumulator)
    assert late.queue.tp == T0


def test_order_survives_retries() -> None:
    """B7: batches behind one that is resent wait for it."""
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"1")
    accumulator.close_all(0)
    ((first,),) = _drain(accumulator)
    encoded = first.encode(Codec.NONE, None)
    _append(accumulator, queue, b"2")
    accumulator.close_all(0)
    assert accumulator.on_failed(first, NotLeaderOrFollowerError(), 10, 0.5) == []
    assert accumulator.next_deadline_ms() == 110
    assert _drain(accumulator, 10) == []
    accumulator.on_tick(109)
    assert _drain(accumulator, 109) == []
    accumulator.on_tick(110)
    ((again,),) = _drain(accumulator, 110)
    assert again is first and again.encode(Codec.NONE, None) is encoded
    accumulator.on_acknowledged(again, 5, NO_TIMESTAMP, 120)
    ((second,),) = _drain(accumulator, 120)
    assert _values(second) == [b"2"]


def test_new_metadata_ends_the_pause() -> None:
    accumulator = Accumulator(CONFIG)
    _append(accumulator, accumulator.queue(T0), b"1")
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    accumulator.on_failed(flight, NotLeaderOrFollowerError(), 10, 0.5)
    accumulator.retry_now()
    assert _drain(accumulator, 11) == [[flight]]


def test_after_the_last_retry_the_error_is_final() -> None:
    accumulator = Accumulator(CONFIG)
    batch = _append(accumulator, accumulator.queue(T0), b"1")
    accumulator.close_all(0)
    now_ms = 0
    for _ in range(CONFIG.retries):
        ((flight,),) = _drain(accumulator, now_ms)
        assert accumulator.on_failed(flight, NotLeaderOrFollowerError("gone"), now_ms, 0.5) == []
        now_ms = accumulator.next_deadline_ms() or 0
        accumulator.on_tick(now_ms)
    ((flight,),) = _drain(accumulator, now_ms)
    assert accumulator.on_failed(flight, NotLeaderOrFollowerError("gone"), now_ms, 0.5) == [batch]
    assert isinstance(batch.error, NotLeaderOrFollowerError)
    assert accumulator.free_bytes == CONFIG.buffer_memory


def test_a_fatal_error_fails_its_batch_and_the_next_is_sent() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    first = _append(accumulator, queue, b"1")
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    second = _append(accumulator, queue, b"2")
    accumulator.close_all(0)
    assert accumulator.on_failed(flight, InvalidRecordError("no"), 0, 0.5) == [first]
    ((flight,),) = _drain(accumulator)
    assert flight.batches == [second]


def test_a_coalesced_batch_too_large_is_taken_apart() -> None:
    """The producer coalesced them, so a small max.message.bytes must not fail them."""
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    batches = [_append(accumulator, queue, b"%d" % i * 900) for i in range(3)]
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    assert len(flight.batches) == 3
    assert accumulator.on_failed(flight, MessageTooLargeError(), 0, 0.5) == []
    for batch in batches:
        ((alone,),) = _drain(accumulator)
        assert alone.batches == [batch]
        accumulator.on_acknowledged(alone, 0, NO_TIMESTAMP, 0)
    alone_again = _append(accumulator, queue, b"y" * 900)
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    assert accumulator.on_failed(flight, MessageTooLargeError(), 0, 0.5) == [alone_again]


def test_a_delivery_timeout_quotes_the_last_error() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    batch = _append(accumulator, queue, b"1", now_ms=0)
    accumulator.close_batch(queue, 0)
    ((flight,),) = _drain(accumulator)
    accumulator.on_failed(flight, KafkaStorageError("the log is damaged"), 10, 0.5)
    assert accumulator.on_tick(1002) == [batch]
    assert "the log is damaged" in str(batch.error)


@pytest.mark.parametrize("kind", [NotEnoughReplicasError, NotEnoughReplicasAfterAppendError])
def test_a_delivery_timeout_for_too_few_replicas_does_not_suspect_the_leader(kind: type[BrokerError]) -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    batch = _append(accumulator, queue, b"1", now_ms=0)
    accumulator.close_batch(queue, 0)
    ((flight,),) = _drain(accumulator)
    accumulator.on_failed(flight, kind("1 replicas in sync"), 10, 0.5)
    assert accumulator.on_tick(1002) == [batch]
    assert isinstance(batch.error, DeliveryTimeoutError)
    assert "min.insync.replicas" in batch.error.hint
    assert "leader" not in batch.error.hint


def test_delivery_timeout_in_every_state_of_a_batch() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    flying = _append(accumulator, queue, b"1", now_ms=0)
    accumulator.close_batch(queue, 0)
    ((flight,),) = _drain(accumulator)
    closed = _append(accumulator, queue, b"2", now_ms=1)
    accumulator.close_batch(queue, 1)
    still_open = _append(accumulator, queue, b"3", now_ms=2)
    assert accumulator.next_deadline_ms() == 7, "the open batch lingers"
    assert accumulator.on_tick(999) == []
    assert accumulator.on_tick(1002) == [flying, closed, still_open]
    for batch in (flying, closed, still_open):
        assert isinstance(batch.error, DeliveryTimeoutError)
    assert accumulator.free_bytes == CONFIG.buffer_memory
    late = _append(accumulator, queue, b"4", now_ms=1003)
    accumulator.close_all(1003)
    assert _drain(accumulator, 1003) == [], "the first may still be on its way: the partition is muted"
    assert accumulator.on_acknowledged(flight, 8, NO_TIMESTAMP, 1004) == []
    ((flight,),) = _drain(accumulator, 1004)
    assert flight.batches == [late]


def test_an_expired_retry_is_not_sent_again() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"1")
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    accumulator.on_failed(flight, NotLeaderOrFollowerError(), 950, 0.5)
    assert len(accumulator.on_tick(1000)) == 1
    accumulator.on_tick(2000)
    assert _drain(accumulator, 2000) == []
    assert accumulator.next_deadline_ms() is None


def test_a_failed_expired_batch_frees_the_partition() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"1")
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    accumulator.on_tick(1000)
    assert accumulator.on_failed(flight, NotLeaderOrFollowerError(), 1001, 0.5) == []
    assert not queue.in_flight


def test_memory_is_reserved_by_the_batch_and_released() -> None:
    accumulator = Accumulator(replace(CONFIG, buffer_memory=4000))
    queue = accumulator.queue(T0)
    batch = _append(accumulator, queue, b"x")
    assert accumulator.free_bytes == 3000
    accumulator.close_batch(queue, 0)
    used = BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD_BYTES + 1
    assert accumulator.free_bytes == 4000 - used
    for partition in (1, 2, 3):
        accumulator.open_batch(accumulator.queue(TopicPartition("t", partition)), 10, 0)
    full = accumulator.queue(TopicPartition("t", 4))
    assert accumulator.open_batch(full, 10, 0) is None
    assert not accumulator.has_room(1000)
    assert accumulator.open_batch(full, 10, 0, forced=True) is not None
    accumulator.abort_all(ClientClosedError("over"), 0)
    assert accumulator.free_bytes == 4000
    assert isinstance(batch.error, ClientClosedError)


def test_a_single_batch_may_exceed_the_buffer() -> None:
    accumulator = Accumulator(replace(CONFIG, buffer_memory=500))
    assert accumulator.has_room(5000)
    assert accumulator.open_batch(accumulator.queue(T0), 10, 0) is not None


def test_a_single_record_sent_at_once_equals_a_batch() -> None:
    accumulator = Accumulator(replace(CONFIG, linger_ms=0))
    queue = accumulator.queue(T0)
    flight = accumulator.add_alone(queue, b"v", b"k", 1234, 0, 1)
    assert flight is not None and flight.awaits_response
    (record,) = RecordBatch(flight.encode(Codec.NONE, None))
    assert (record.value, record.key, record.timestamp_ms) == (b"v", b"k", 1234)
    assert accumulator.add_alone(queue, b"w", None, 1, 0, 1) is None, "one is before it"
    assert accumulator.on_failed(flight, NotLeaderOrFollowerError(), 0, 0.5) == []
    accumulator.on_tick(100)
    assert _drain(accumulator, 100) == [[flight]]
    (batch,) = accumulator.on_acknowledged(flight, 9, NO_TIMESTAMP, 101)
    assert (batch.base_offset, batch.timestamp_ms(0)) == (9, 1234)
    assert accumulator.free_bytes == CONFIG.buffer_memory
    assert accumulator.add_alone(queue, b"x" * 4000, None, 1, 0, 1) is None, "above max.request.size"


def test_taking_from_an_empty_queue() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    _append(accumulator, queue, b"x")
    accumulator.ready[queue] = None
    assert accumulator.take(queue, 0, 1) is None, "it still lingers"
    accumulator.ready[queue] = None
    assert _drain(accumulator, 0) == []
    assert not accumulator.ready
    accumulator.ready[queue] = None
    flight = accumulator.take(queue, 5, 1)
    assert flight is not None and flight.awaits_response


@pytest.mark.parametrize("codec", list(Codec))
def test_batches_are_encoded_with_the_codec(codec: Codec) -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    for _ in range(3):
        _append(accumulator, queue, b"word " * 20)
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    batch = RecordBatch(flight.encode(codec, None))
    assert batch.header.codec is codec
    assert [record.value for record in batch] == [b"word " * 20] * 3


def test_acks_0_returns_no_offset() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    for _ in range(3):
        _append(accumulator, queue, b"x" * 900)
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    assert [b.base_offset for b in accumulator.on_acknowledged(flight, NO_OFFSET, NO_TIMESTAMP, 0)] == [
        -1
    ] * 3


def test_log_append_time_wins_over_the_records_own() -> None:
    accumulator = Accumulator(CONFIG)
    batch = _append(accumulator, accumulator.queue(T0), b"x", now_ms=5)
    accumulator.close_all(0)
    ((flight,),) = _drain(accumulator)
    assert batch.timestamp_ms(0) == 1005
    accumulator.on_acknowledged(flight, 0, 777, 0)
    assert batch.timestamp_ms(0) == 777


def test_repr_has_the_state() -> None:
    accumulator = Accumulator(CONFIG)
    queue = accumulator.queue(T0)
    batch = _append(accumulator, queue, b"x")
    assert repr(batch) == "<PendingBatch t-0, 1 records, open>"
    accumulator.close_batch(queue, 0)
    assert "closed" in repr(batch)
    ((flight,),) = _drain(accumulator)
    accumulator.on_acknowledged(flight, 3, NO_TIMESTAMP, 0)
    assert "done at offset 3" in repr(batch)
    failed = _append(accumulator, queue, b"y")
    accumulator.abort_all(ClientClosedError("bye"), 0)
    assert "failed: bye" in repr(failed)


def test_a_listener_marks_the_failure_as_seen() -> None:
    accumulator = Accumulator(CONFIG)
    batch = _append(accumulator, accumulator.queue(T0), b"x")
    _append(accumulator, accumulator.queue(T0), b"y")
    batch.listeners.append((1, lambda: None))
    batch.listeners.append((-1, lambda: None))
    accumulator.abort_all(ClientClosedError("bye"), 0)
    assert batch.unobserved_count() == 1
    batch.observe()
    assert batch.unobserved_count() == 0


class AccumulatorMachine(RuleBasedStateMachine):
    """Random sends, responses, failures and time, against a list of the sent records per partition."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = Accumulator(
            replace(CONFIG, buffer_memory=20_000, linger_ms=3, delivery_timeout_ms=10**9, retries=10**9)
        )
        self.now_ms = 0
        self.sent: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        self.log: dict[int, list[bytes | None]] = {0: [], 1: [], 2: []}
        self.batches: list[tuple[PendingBatch, int, bytes]] = []
        self.flying: list[InFlightBatch] = []
        self.number = 0

    @rule(partition=st.integers(0, 2), size=st.integers(0, 600))
    def send(self, partition: int, size: int) -> None:
        queue = self.accumulator.queue(TopicPartition("t", partition))
        value = b"%d:" % self.number + b"x" * size
        need = record_size(value, None)
        if queue.open is not None and not queue.open.has_room(need):
            self.accumulator.close_batch(queue, self.now_ms)
        batch = queue.open or self.accumulator.open_batch(queue, need, self.now_ms)
        if batch is None:
            return
        self.number += 1
        index = batch.append(value, None, 0, (), need)
        self.batches.append((batch, index, value))
        self.sent[partition].append(value)

    @rule(duration_ms=st.integers(0, 400))
    def wait(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        assert self.accumulator.on_tick(self.now_ms) == []

    @rule(room=st.integers(0, 2))
    def drain(self, room: int) -> None:
        drained = self.accumulator.drain(self.now_ms, lambda tp: tp.partition % 2, lambda node: room)
        for _, flights in drained.requests:
            assert sum(s.size_bytes for s in flights) <= CONFIG.max_request_size or len(flights) == 1
            self.flying += flights
        partitions = [flight.queue.tp for flight in self.flying]
        assert len(set(partitions)) == len(partitions), "a partition has one flight in flight"

    @rule()
    def take(self) -> None:
        for queue in self.accumulator.ready:
            flight = self.accumulator.take(queue, self.now_ms, 1)
            if flight is not None:
                assert flight not in self.flying
                self.flying.append(flight)
            break

    @rule(partition=st.integers(0, 2))
    def send_alone(self, partition: int) -> None:
        queue = self.accumulator.queue(TopicPartition("t", partition))
        value = b"%d:alone" % self.number
        flight = self.accumulator.add_alone(queue, value, None, 0, self.now_ms, 1)
        if flight is not None:
            self.number += 1
            self.batches.append((flight.batches[0], 0, value))
            self.sent[partition].append(value)
            self.flying.append(flight)

    @invariant()
    def what_is_ready_is_not_on_its_way(self) -> None:
        for queue in self.accumulator.ready:
            assert not queue.awaits_response

    @rule(data=st.data(), outcome=st.sampled_from(["ok", "lost ack", "refused", "too large"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        if not self.flying:
            return
        flight = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        log = self.log[flight.queue.tp.partition]
        if outcome == "too large" and len(flight.batches) == 1:
            outcome = "refused"
        if outcome in {"ok", "lost ack"}:
            base = len(log)
            log += _values(flight)
        if outcome == "ok":
            self.accumulator.on_acknowledged(flight, base, NO_TIMESTAMP, self.now_ms)
        elif outcome == "too large":
            self.accumulator.on_failed(flight, MessageTooLargeError(), self.now_ms, 0.5)
        else:
            self.accumulator.on_failed(flight, NotLeaderOrFollowerError(), self.now_ms, 0.5)

    @invariant()
    def memory_adds_up(self) -> None:
        reserved = sum(batch.reserved_bytes for batch in self.accumulator.incomplete)
        assert self.accumulator.free_bytes + reserved == self.accumulator.config.buffer_memory

    @invariant()
    def acknowledged_records_stand_where_they_were_told_to(self) -> None:
        for batch, index, value in self.batches:
            if batch.done:
                assert self.log[batch.partition][batch.base_offset + index] == value

    def teardown(self) -> None:
        """Let everything succeed: all records are there in order, duplicated only by lost responses."""
        for _ in range(10_000):
            if not self.accumulator.incomplete:
                break
            for flight in self.flying:
                log = self.log[flight.queue.tp.partition]
                base = len(log)
                log += _values(flight)
                self.accumulator.on_acknowledged(flight, base, NO_TIMESTAMP, self.now_ms)
            self.flying = []
            self.now_ms += 2000
            self.accumulator.close_all(self.now_ms)
            self.accumulator.on_tick(self.now_ms)
            self.drain(2)
        assert not self.accumulator.incomplete
        offsets: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for batch, index, _ in self.batches:
            offsets[batch.partition].append(batch.base_offset + index)
        for partition, found in offsets.items():
            assert found == sorted(found), "acknowledged offsets are in the order of sending"
            assert [self.log[partition][offset] for offset in found] == self.sent[partition]


TestAccumulatorMachine = AccumulatorMachine.TestCase
TestAccumulatorMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=60, stateful_step_count=40
)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=60))
def test_estimates_bound_what_is_encoded(sizes: list[int]) -> None:
    accumulator = Accumulator(replace(CONFIG, buffer_memory=10**9))
    queue = accumulator.queue(T0)
    for size in sizes:
        _append(accumulator, queue, b"x" * size, key=b"k" * (size % 7) if size % 2 else None)
    accumulator.close_all(0)
    while requests := _drain(accumulator):
        ((flight,),) = requests
        assert len(flight.encode(Codec.NONE, None)) <= flight.size_bytes <= CONFIG.max_request_size
        accumulator.on_acknowledged(flight, 0, NO_TIMESTAMP, 0)
