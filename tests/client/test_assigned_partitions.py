"""Assigned partitions alone: what is fetched, what is returned, what a seek invalidates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.client.cluster.retry import STORAGE_ERROR_PATIENCE_MS
from kafkalite.client.cluster.routing import Leader
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.consumer.assigned_partitions import (
    SHORT_WAIT_MS,
    AssignedPartitions,
    FetchPlan,
    Requested,
)
from kafkalite.errors import (
    CorruptBatchError,
    ErrorCode,
    KafkaStorageError,
    LogTruncationError,
    NoOffsetError,
    OffsetOutOfRangeError,
    UnsupportedVersionError,
)
from kafkalite.model import EARLIEST, LATEST, IsolationLevel, TopicPartition
from kafkalite.protocol.messages.data import EpochEnd, EpochPartition, FetchedPartition, FetchPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.header import ATTRIBUTES_POSITION, CONTROL_BIT, seal, stamp

T0, T1, T2 = (TopicPartition("t", number) for number in range(3))
CONFIG = ConsumerConfig(
    fetch_max_wait_ms=500, fetch_max_bytes=10_000, max_partition_fetch_bytes=1_000, check_crcs=True
)


def _state(
    *tps: TopicPartition, reset: str = "earliest", config: ConsumerConfig = CONFIG
) -> AssignedPartitions:
    state = AssignedPartitions(config)
    state.assign(dict.fromkeys(tps, reset))
    for tp in tps:
        state.partitions[tp].seek(0)
    return state


def _batch(base_offset: int, *values: bytes, control: bool = False, leader_epoch: int = 1) -> bytearray:
    batch = build_batch(list(values), None, 1)
    stamp(batch, base_offset=base_offset, leader_epoch=leader_epoch)
    if control:
        batch[ATTRIBUTES_POSITION + 1] |= CONTROL_BIT
        seal(batch)
    return batch


def _plan(state: AssignedPartitions, now_ms: int = 0) -> list[FetchPlan]:
    return state.plan(now_ms, lambda tp: Leader(1, 7), lambda node: False)[0]


def _answer(
    state: AssignedPartitions,
    plan: FetchPlan,
    data: dict[TopicPartition, bytes | bytearray],
    *,
    end: int = 1_000_000,
    code: int = 0,
    now_ms: int = 0,
) -> bool:
    results = [
        FetchedPartition(*tp, code, "why" if code else None, end, end, 0, len(data.get(tp, b"")), [])
        for tp in plan.requested
    ]
    payload = memoryview(b"".join(bytes(data.get(tp, b"")) for tp in plan.requested))
    return state.on_fetched(plan.requested, results, payload, now_ms, 0.5)


def _fetch(
    state: AssignedPartitions, data: dict[TopicPartition, bytes | bytearray], *, end: int = 1_000_000
) -> None:
    (plan,) = _plan(state)
    _answer(state, plan, data, end=end)


def _take_all(state: AssignedPartitions, count: int = 1000) -> list[bytes | None]:
    values: list[bytes | None] = []
    while len(values) < count and (cursor := state.next_cursor()) is not None:
        values += [record.value for record in cursor.take(count - len(values))]
    return values


def test_it_fetches_from_its_position_with_the_leaders_epoch() -> None:
    state = _state(T0)
    state.partitions[T0].seek(42)
    (plan,) = _plan(state)
    (asked,) = plan.partitions
    assert (plan.node_id, plan.max_wait_ms) == (1, 500)
    assert (asked.topic, asked.partition, asked.current_leader_epoch) == ("t", 0, 7)
    assert (asked.fetch_offset, asked.max_bytes) == (42, 1000)


def test_records_come_in_order_and_move_the_position() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a", b"b", b"c") + _batch(3, b"d")})
    cursor = state.next_cursor()
    assert cursor is not None
    assert [record.value for record in cursor.take(2)] == [b"a", b"b"]
    assert state.partitions[T0].position == 2
    assert _take_all(state) == [b"c", b"d"]
    assert state.partitions[T0].position == 4


@pytest.mark.parametrize("take", [1, 2, 3, 4])
def test_the_epoch_before_the_position_is_that_of_the_last_returned_batch(take: int) -> None:
    """R40. An older epoch would look like a truncation, and the records would be returned twice."""
    state = _state(T0)
    dropped = _batch(4, b"marker", control=True, leader_epoch=5)
    _fetch(
        state, {T0: _batch(0, b"a", b"b", leader_epoch=2) + _batch(2, b"c", b"d", leader_epoch=3) + dropped}
    )
    partition = state.partitions[T0]
    assert len(_take_all(state, take)) == take
    position, epoch = {1: (1, 2), 2: (2, 2), 3: (3, 3), 4: (5, 5)}[take]
    assert (partition.position, partition.position_epoch) == (position, epoch)


def test_whole_batches_move_the_epoch_too() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a", leader_epoch=2) + _batch(1, b"b", leader_epoch=4)})
    assert state.next_batch() is not None
    assert state.partitions[T0].position_epoch == 2
    assert state.next_batch() is not None
    assert state.partitions[T0].position_epoch == 4


def test_a_fetched_batch_may_begin_before_the_position() -> None:
    state = _state(T0)
    state.partitions[T0].seek(5)
    _fetch(state, {T0: _batch(0, b"0", b"1") + _batch(2, *(b"%d" % i for i in range(2, 8)))})
    assert _take_all(state) == [b"5", b"6", b"7"]


def test_control_batches_are_skipped() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a") + _batch(1, b"commit", control=True) + _batch(2, b"b")})
    assert _take_all(state) == [b"a", b"b"]
    assert state.partitions[T0].position == 3
    _fetch(state, {T0: _batch(3, b"commit", control=True)})
    assert state.next_cursor() is None
    assert state.partitions[T0].position == 4


def test_partitions_take_turns() -> None:
    state = _state(T0, T1)
    _fetch(state, {T0: _batch(0, b"a") + _batch(1, b"b"), T1: _batch(0, b"1") + _batch(1, b"2")})
    assert _take_all(state) == [b"a", b"1", b"b", b"2"]


def test_the_next_fetch_goes_out_while_records_wait_but_not_beyond_the_bounds() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"x" * 300)})
    (plan,) = _plan(state)
    assert plan.partitions[0].fetch_offset == 1
    assert plan.max_wait_ms == SHORT_WAIT_MS
    _answer(state, plan, {T0: _batch(1, b"x" * 800)})
    assert _plan(state) == [], "max.partition.fetch.bytes wait"
    state.next_batch()
    assert len(_plan(state)) == 1


def test_all_that_is_fetched_ahead_is_bounded() -> None:
    state = _state(T0, T1, config=replace(CONFIG, fetch_max_bytes=1000))
    _fetch(state, {T0: _batch(0, b"x" * 900), T1: _batch(0, b"y" * 100)})
    assert _plan(state) == []


def test_no_long_poll_while_records_are_buffered() -> None:
    """A seek can't cancel a long poll, so only existing records are fetched ahead."""
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a")}, end=1)
    assert _plan(state) == []
    assert _take_all(state) == [b"a"]
    (plan,) = _plan(state)
    assert plan.max_wait_ms == 500


def test_paused_partitions_are_neither_fetched_nor_returned() -> None:
    state = _state(T0, T1)
    _fetch(state, {T0: _batch(0, b"a", b"b"), T1: _batch(0, b"1", b"2")})
    cursor = state.next_cursor()
    assert cursor is not None
    iterator = cursor.iterator
    assert next(iterator).value == b"a"
    state.pause([T0])
    assert list(iterator) == [], "a loop that was on its way ends"
    assert _take_all(state) == [b"1", b"2"]
    assert state.partitions[T0].position == 1
    state.partitions[T0].paused = False
    assert _take_all(state) == [b"b"]
    state.pause([T0, T1])
    assert _plan(state) == []


def test_a_seek_invalidates_responses_in_flight() -> None:
    state = _state(T0)
    (plan,) = _plan(state)
    state.partitions[T0].seek(0)
    assert not state.covers(plan.requested, 0, lambda tp: True)
    _answer(state, plan, {T0: _batch(0, b"old")})
    assert state.next_cursor() is None
    _fetch(state, {T0: _batch(0, b"new")})
    assert _take_all(state) == [b"new"]


def test_a_seek_ends_a_running_loop() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a", b"b", b"c")})
    cursor = state.next_cursor()
    assert cursor is not None
    iterator = cursor.iterator
    next(iterator)
    state.partitions[T0].seek(0)
    assert list(iterator) == []
    assert state.partitions[T0].position == 0


def test_a_fetch_in_flight_covers_its_brokers_partitions() -> None:
    state = _state(T0)
    (plan,) = _plan(state)
    assert state.covers(plan.requested, 0, lambda tp: True)
    state.assign({T0: "earliest", T1: "earliest"})
    state.partitions[T1].seek(0)
    assert state.covers(plan.requested, 0, lambda tp: tp == T0), "another leads the new one"
    assert not state.covers(plan.requested, 0, lambda tp: True)


def test_unassigned_partitions_are_dropped_and_others_keep_their_state() -> None:
    state = _state(T0, T1)
    (plan,) = _plan(state)
    state.partitions[T0].seek(5)
    state.assign({T0: "latest", T2: "latest"})
    assert list(state.partitions) == [T0, T2]
    assert state.partitions[T0].position == 5
    assert state.partitions[T2].position is None
    _answer(state, plan, {T1: _batch(0, b"late")})
    assert state.next_batch() is None


def test_busy_brokers_and_missing_leaders() -> None:
    state = _state(T0, T1, T2)
    leaders = {T0: Leader(1, 0), T1: Leader(2, 0), T2: Leader(-1, -1)}
    plans, leaderless = state.plan(0, leaders.__getitem__, lambda node: node == 2)
    assert [plan.node_id for plan in plans] == [1]
    assert leaderless


def test_where_to_start() -> None:
    state = AssignedPartitions(CONFIG)
    state.assign({T0: "earliest", T1: "latest", T2: "none"})
    assert state.without_offset() == {T0: EARLIEST, T1: LATEST}
    assert _plan(state) == [], "no position, no fetch"
    with pytest.raises(NoOffsetError, match="t-2 has no position"):
        state.next_batch()
    state.partitions[T2].seek(3)
    assert state.without_offset() == {T0: EARLIEST, T1: LATEST}
    assert state.next_batch() is None


def test_out_of_range_follows_the_reset_policy() -> None:
    state = _state(T0, reset="latest")
    (plan,) = _plan(state)
    _answer(state, plan, {}, code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
    assert state.without_offset() == {T0: LATEST}


def test_out_of_range_without_a_policy_is_an_error_after_what_was_fetched() -> None:
    state = _state(T0, reset="none")
    _fetch(state, {T0: _batch(0, b"a")})
    (plan,) = _plan(state)
    _answer(state, plan, {}, code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
    assert _plan(state) == [], "not asked again before the user has what there is"
    assert _take_all(state) == [b"a"]
    (plan,) = _plan(state)
    _answer(state, plan, {}, code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
    for _ in range(2):
        with pytest.raises(NoOffsetError, match="offset 1 is out of range") as failure:
            state.next_cursor()
    assert isinstance(failure.value.__cause__, OffsetOutOfRangeError)
    state.partitions[T0].seek(7)
    assert state.next_cursor() is None


def test_temporary_errors_pause_and_request_metadata() -> None:
    state = _state(T0)
    (plan,) = _plan(state)
    assert _answer(state, plan, {}, code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER), now_ms=10)
    assert _plan(state, 109) == []
    assert state.next_retry_ms(10) == 110
    (plan,) = _plan(state, 110)
    assert not _answer(state, plan, {}, code=int(ErrorCode.UNKNOWN_LEADER_EPOCH), now_ms=110)
    assert state.next_retry_ms(110) == 310
    (plan,) = _plan(state, 310)
    _answer(state, plan, {T0: _batch(0, b"a")}, now_ms=310)
    assert state.partitions[T0].failures == 0
    assert state.next_retry_ms(310) is None


def test_an_open_transaction_delays_only_a_fetch_that_it_leaves_without_records() -> None:
    config = replace(CONFIG, isolation_level=IsolationLevel.READ_COMMITTED)
    state = _state(T0, config=config)

    def fetch(data: bytes | bytearray, stable_offset: int) -> object:
        (plan,) = _plan(state)
        result = FetchedPartition(*T0, 0, None, 9, stable_offset, 0, len(data), [])
        state.on_fetched(plan.requested, [result], memoryview(bytes(data)), 0, 0.5)
        _take_all(state)
        return state.partitions[T0].delayed_by

    assert fetch(_batch(0, b"a"), 1) is None, "it has records"
    assert "t-0: an open transaction holds back the records from offset 1 on" in str(fetch(b"", 1))
    assert fetch(b"", 2) is None, "the response had no room for the record before the transaction"
    assert fetch(_batch(1, b"b"), 9) is None
    assert fetch(b"", 9) is None, "it is at the end of the log"


def test_r24_a_storage_error_that_stays_is_raised_and_then_tried_again() -> None:
    state, code, patience_ms = _state(T0), int(ErrorCode.KAFKA_STORAGE_ERROR), STORAGE_ERROR_PATIENCE_MS

    def fail_at(now_ms: int, code: int = code) -> None:
        (plan,) = _plan(state, now_ms)
        _answer(state, plan, {}, code=code, now_ms=now_ms)

    fail_at(0)
    fail_at(patience_ms - 1)
    assert state.next_batch() is None
    fail_at(2 * patience_ms, int(ErrorCode.LEADER_NOT_AVAILABLE))  # the leader changes
    fail_at(3 * patience_ms)
    assert state.next_batch() is None
    fail_at(4 * patience_ms)
    with pytest.raises(KafkaStorageError, match="t-0: why"):
        state.next_batch()
    assert state.next_batch() is None
    fail_at(5 * patience_ms)
    fail_at(6 * patience_ms)
    with pytest.raises(KafkaStorageError):
        state.next_batch()
    (plan,) = _plan(state, 7 * patience_ms)
    _answer(state, plan, {T0: _batch(0, b"a")}, now_ms=7 * patience_ms)
    assert _take_all(state) == [b"a"]


def test_a_lost_fetch_is_tried_again_after_a_pause() -> None:
    state = _state(T0)
    (plan,) = _plan(state)
    state.assign({T0: "earliest"})
    state.on_fetch_failed({**plan.requested, T1: plan.requested[T0]}, 0, 0.5)
    assert _plan(state, 99) == []
    assert len(_plan(state, 100)) == 1


def test_a_final_error_is_raised_in_turn_and_other_partitions_continue() -> None:
    state = _state(T0, T1)
    (plan,) = _plan(state)
    results = [
        FetchedPartition(*T0, int(ErrorCode.UNSUPPORTED_VERSION), None, 0, 0, 0, 0, []),
        FetchedPartition(*T1, 0, None, 10, 10, 0, len(_batch(0, b"1")), []),
    ]
    state.on_fetched(plan.requested, results, memoryview(_batch(0, b"1")), 0, 0.5)
    with pytest.raises(UnsupportedVersionError, match="t-0"):
        state.next_batch()
    assert _take_all(state, 1) == [b"1"]
    with pytest.raises(UnsupportedVersionError, match="t-0"):
        state.next_batch()
    state.pause([T0])
    assert state.next_batch() is None, "who knows of it may go on with the others"


def test_a_damaged_batch_stops_its_partition_before_it() -> None:
    state = _state(T0)
    damaged = _batch(1, b"bad")
    damaged[-3] ^= 1
    _fetch(state, {T0: _batch(0, b"good") + damaged + _batch(2, b"after")})
    assert _take_all(state, 1) == [b"good"]
    assert state.next_cursor() is None, "it is fetched again"
    _fetch(state, {T0: damaged + _batch(2, b"after")})
    for _ in range(2):
        with pytest.raises(CorruptBatchError, match="t-0: the batch at offset 1 can't be read") as raised:
            state.next_cursor()
    error = raised.value
    assert (error.topic_partition, error.offset, error.next_offset) == (T0, 1, 2)
    assert state.partitions[T0].position == 1
    assert _plan(state) == []
    state.partitions[T0].seek(error.next_offset)
    _fetch(state, {T0: _batch(2, b"after")})
    assert _take_all(state) == [b"after"]


def test_r43_a_batch_that_was_damaged_on_the_way_is_fetched_again() -> None:
    state = _state(T0)
    damaged = _batch(1, b"1")
    damaged[-3] ^= 1
    _fetch(state, {T0: _batch(0, b"0") + damaged + _batch(2, b"2")})
    assert _take_all(state) == [b"0"]
    (plan,) = _plan(state)
    assert [one.fetch_offset for one in plan.partitions] == [1]
    _fetch(state, {T0: _batch(1, b"1") + _batch(2, b"2")})
    assert _take_all(state) == [b"1", b"2"]


def test_without_check_crcs_only_the_body_must_be_readable() -> None:
    state = _state(T0, config=replace(CONFIG, check_crcs=False))
    damaged = _batch(0, b"bad")
    damaged[-3] ^= 1
    _fetch(state, {T0: damaged})
    (value,) = _take_all(state)
    assert value != b"bad"
    unreadable = _batch(1, b"bad")
    unreadable[61] = 0
    _fetch(state, {T0: unreadable})
    with pytest.raises(CorruptBatchError, match="offset 1"):
        state.next_cursor()


def test_bytes_that_are_not_a_batch_are_an_error() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"good") + b"\x00" * 80})
    assert _take_all(state, 1) == [b"good"]
    with pytest.raises(CorruptBatchError, match="80 bytes") as raised:
        state.next_cursor()
    error = raised.value
    assert (error.topic_partition, error.offset, error.next_offset) == (T0, 1, None)


def test_batches_and_records_may_be_taken_in_turn() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a", b"b", b"c") + _batch(3, b"d")})
    cursor = state.next_cursor()
    assert cursor is not None
    cursor.take(1)
    first = state.next_batch()
    assert first is not None
    assert (len(first), [record.value for record in first.records()]) == (2, [b"b", b"c"])
    assert state.partitions[T0].position == 3
    second = state.next_batch()
    assert second is not None and len(second) == 1
    assert state.next_batch() is None


def test_an_exhausted_cursor_is_not_returned_again() -> None:
    state = _state(T0)
    _fetch(state, {T0: _batch(0, b"a")}, end=1)
    cursor = state.next_cursor()
    assert cursor is not None
    cursor.take(10)
    assert state.next_batch() is None
    assert state.partitions[T0].position == 1


def test_arrow_holds_the_requested_records() -> None:
    pytest.importorskip("pyarrow")
    state = _state(T0)
    state.partitions[T0].seek(1)
    _fetch(state, {T0: _batch(0, b"a", b"b", b"c")})
    batch = state.next_batch()
    assert batch is not None
    assert batch.to_arrow().to_pydict()["value"] == [b"b", b"c"]


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_whatever_the_user_does_the_records_are_those_of_the_log(data: st.DataObject) -> None:
    """Random takes, seeks, pauses and fetches, against a plain list per partition."""
    logs: dict[TopicPartition, list[bytes]] = {}
    stored: dict[TopicPartition, list[tuple[int, bytearray]]] = {}
    for tp in (T0, T1):
        sizes = data.draw(st.lists(st.integers(1, 5), max_size=6))
        values = [b"%d-%d" % (tp.partition, i) for i in range(sum(sizes))]
        logs[tp], stored[tp], start = values, [], 0
        for size in sizes:
            stored[tp].append((start + size, _batch(start, *values[start : start + size])))
            start += size
    state = _state(T0, T1, config=replace(CONFIG, max_partition_fetch_bytes=200))
    expected = dict.fromkeys((T0, T1), 0)
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["fetch", "take", "seek", "pause", "resume", "batch"]))
        tp = data.draw(st.sampled_from([T0, T1]))
        if action == "fetch":
            for plan in _plan(state):
                found = {}
                for asked in plan.partitions:
                    key = TopicPartition(asked.topic, asked.partition)
                    parts = [batch for end, batch in stored[key] if end > asked.fetch_offset][:2]
                    found[key] = b"".join(parts)
                _answer(state, plan, found, end=max(map(len, logs.values())))
        elif action == "seek":
            expected[tp] = data.draw(st.integers(0, len(logs[tp])))
            state.partitions[tp].seek(expected[tp])
        elif action == "pause":
            state.pause([tp])
        elif action == "resume":
            state.partitions[tp].paused = False
        else:
            records = []
            if action == "take" and (cursor := state.next_cursor()) is not None:
                records = cursor.take(data.draw(st.integers(1, 7)))
            elif action == "batch" and (batch := state.next_batch()) is not None:
                records = batch.records()
            for record in records:
                key = TopicPartition(record.topic, record.partition)
                assert not state.partitions[key].paused
                assert record.offset == expected[key]
                assert record.value == logs[key][record.offset]
                expected[key] += 1
        for key, offset in expected.items():
            assert state.partitions[key].position == offset


# --- leader epochs -------------------------------------------------------------------------------


def _led(epoch: int) -> Leader:
    return Leader(1, epoch)


def _read_in_epoch_1(reset: str = "earliest", *, taken: bool = True) -> AssignedPartitions:
    """A partition fetched up to offset 2 from the leader of epoch 1."""
    state = _state(T0, reset=reset)
    (plan,), _ = state.plan(0, lambda tp: _led(1), lambda node: False)
    _answer(state, plan, {T0: _batch(0, b"a", b"b")}, end=2)
    if taken:
        assert state.next_batch() is not None
    state.on_leaders(lambda tp: _led(2))
    return state


def _check(state: AssignedPartitions, end_offset: int, *, code: int = 0, epoch: int = 2) -> bool:
    ((node_id, questions),) = state.checks(0, lambda tp: _led(epoch)).items()
    ((question, asked),) = questions.values()
    assert (node_id, question) == (1, EpochPartition("t", 0, epoch, 1))
    end = EpochEnd("t", 0, code, None, 1, end_offset)
    return state.on_checked({T0: asked}, [end], 0, 0.5)


def test_a_new_leaders_epochs_are_checked_before_a_fetch() -> None:
    state = _read_in_epoch_1()
    assert state.plan(0, lambda tp: _led(2), lambda node: False) == ([], False)
    assert not _check(state, 2)
    (plan,), _ = state.plan(0, lambda tp: _led(2), lambda node: False)
    assert (plan.partitions[0].fetch_offset, plan.partitions[0].current_leader_epoch) == (2, 2)
    assert state.checks(0, lambda tp: _led(2)) == {}


def test_without_anything_read_there_is_nothing_to_check() -> None:
    state = _state(T0)
    (plan,), _ = state.plan(0, lambda tp: _led(5), lambda node: False)
    assert plan.partitions[0].current_leader_epoch == 5
    state.partitions[T0].seek(77)
    assert state.checks(0, lambda tp: _led(6)) == {}


def test_after_lost_records_the_consumer_continues_where_the_logs_diverge(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = _read_in_epoch_1()
    _check(state, 1)
    assert state.partitions[T0].position == 1
    assert "were read and then lost" in caplog.text


def test_lost_records_are_an_error_without_a_reset_policy() -> None:
    state = _read_in_epoch_1("none")
    _check(state, 1)
    with pytest.raises(LogTruncationError, match="from offset 1 to 2") as caught:
        state.next_batch()
    assert caught.value.diverging_offset == 1
    assert state.partitions[T0].position == 2
    state.partitions[T0].seek(1)
    assert state.next_batch() is None


def test_lost_records_that_were_not_returned_are_fetched_again() -> None:
    state = _read_in_epoch_1("none", taken=False)
    state.partitions[T0].readable_end = 9  # more is wanted although something is buffered
    _check(state, 1)
    assert state.partitions[T0].position == 0
    assert state.next_batch() is None, "what was buffered is void"


def test_a_check_that_fails_is_tried_again() -> None:
    state = _read_in_epoch_1()
    assert _check(state, -1, code=int(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    assert state.checks(0, lambda tp: _led(2)) == {}
    assert state.next_retry_ms(0) == 100
    state.on_leaders(lambda tp: _led(3))
    assert not _check(state, 2, epoch=3)


def test_a_response_of_a_former_leader_is_ignored() -> None:
    state = _read_in_epoch_1()
    (old,) = [FetchPlan(1, 500, [FetchPartition("t", 0, 1, 2, 1000)], {T0: Requested(2, 1, 1)})]
    _check(state, 2)
    state.on_fetched(
        old.requested, [FetchedPartition("t", 0, 0, None, 9, 9, 0, 0, [])], memoryview(b""), 0, 0.5
    )
    assert state.partitions[T0].readable_end == 2
    assert state.on_checked({T0: Requested(2, 1, 1)}, [EpochEnd("t", 0, 0, None, 0, 0)], 0, 0.5) is False
    assert state.partitions[T0].position == 2


def test_only_a_current_leader_knows_what_is_out_of_range() -> None:
    state = _state(T0)
    (plan,), _ = state.plan(0, lambda tp: _led(1), lambda node: False)
    state.on_leaders(lambda tp: _led(2))
    assert _answer(state, plan, {}, code=int(ErrorCode.OFFSET_OUT_OF_RANGE)), "metadata is stale"
    assert state.partitions[T0].position == 0
    (plan,), _ = state.plan(500, lambda tp: _led(2), lambda node: False)
    _answer(state, plan, {}, code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
    assert state.partitions[T0].position is None
