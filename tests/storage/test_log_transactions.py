"""Transactions in a log: open, stable and aborted, over restarts, truncation, deletion, power loss.

The stateful test compares a log, on a disk in memory that can lose power, with a plain list of batches.
Other tests of ``producer_state`` are in test_producer_state.py.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kafkalite.errors import CorruptBatchError
from kafkalite.model import NO_OFFSET
from kafkalite.records import control
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.header import check, seal, stamp, stored_crc
from kafkalite.storage import producer_snapshots
from kafkalite.storage.inspect import verify_log
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.mutants import without

DIRECTORY = f"/data/{'a' * 32}-0"
CONFIG = LogConfig(
    segment_bytes=1024, index_interval_bytes=100, preallocate_min_bytes=0, file_delete_delay_ms=0
)
PRODUCERS = st.integers(1, 3)


class Stored(NamedTuple):
    """One batch of the model. ``kind``: plain, part, commit or abort."""

    base_offset: int
    last_offset: int
    producer_id: int
    epoch: int
    sequence: int
    kind: str


class Transaction(NamedTuple):
    producer_id: int
    first_offset: int
    marker_offset: int  #: NO_OFFSET: open
    is_commit: bool


def transactions(batches: list[Stored]) -> list[Transaction]:
    """Return all transactions of a list of batches."""
    opened: dict[int, int] = {}
    found = []
    for one in batches:
        if one.kind == "part":
            opened.setdefault(one.producer_id, one.base_offset)
        elif one.kind in ("commit", "abort") and one.producer_id in opened:
            first = opened.pop(one.producer_id)
            found.append(Transaction(one.producer_id, first, one.base_offset, one.kind == "commit"))
    return [*found, *(Transaction(one, first, NO_OFFSET, False) for one, first in opened.items())]


def stable_offset(batches: list[Stored], high_watermark: int, start: int) -> int:
    """Return the last stable offset by its definition."""
    held_back = [
        one.first_offset
        for one in transactions(batches)
        if one.marker_offset == NO_OFFSET or one.marker_offset >= high_watermark
    ]
    return max(min([high_watermark, *held_back]), start)


class TransactionalLog(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fs = MemoryFileSystem(crashable=True)
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.log = Log.create(self.fs, DIRECTORY, CONFIG)
        self.fs.sync_dir("/data")
        self.batches: list[Stored] = []
        self.high_watermark = 0
        self.point = None
        self.leader_epoch = 0

    @initialize(every=st.sampled_from([200, 400, 10**9]))
    def snapshots(self, every):
        self.every, producer_snapshots.SNAPSHOT_EVERY_BYTES = producer_snapshots.SNAPSHOT_EVERY_BYTES, every

    def teardown(self):
        producer_snapshots.SNAPSHOT_EVERY_BYTES = self.every

    def state(self, producer):
        """Return (epoch, next sequence, whether a transaction is open) from the batches."""
        epoch, sequence = 0, 0
        for one in self.batches:
            if one.producer_id == producer:
                if one.kind in ("commit", "abort"):
                    epoch, sequence = one.epoch, 0
                else:
                    sequence = (
                        one.sequence + one.last_offset - one.base_offset + 1 if one.sequence >= 0 else 0
                    )
        is_open = any(
            one.producer_id == producer and one.marker_offset == NO_OFFSET
            for one in transactions(self.batches)
        )
        return epoch, sequence, is_open

    def put(self, batch, kind, *, as_follower):
        header = check(batch)
        if as_follower:
            stamp(batch, base_offset=self.log.log_end_offset, leader_epoch=max(self.leader_epoch, 0))
            self.log.append_as_follower(bytes(batch), now_ms=7)
        else:
            self.log.append(batch, now_ms=7, leader_epoch=self.leader_epoch)
        last = self.log.log_end_offset - 1
        self.batches.append(
            Stored(
                last - header.last_offset_delta,
                last,
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                kind,
            )
        )

    @rule(count=st.integers(1, 3), as_follower=st.booleans())
    def plain(self, count, as_follower):
        self.put(build_batch([b"x" * 60] * count, timestamps_ms=5), "plain", as_follower=as_follower)

    @rule(producer=PRODUCERS, count=st.integers(1, 3), as_follower=st.booleans(), is_state=st.booleans())
    def part(self, producer, count, as_follower, is_state):
        epoch, sequence, _ = self.state(producer)
        batch = build_batch(
            [b"x" * 40] * count,
            timestamps_ms=5,
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=-1 if is_state and not sequence else sequence,
            transactional=True,
        )
        self.put(batch, "part", as_follower=as_follower)

    @rule(producer=PRODUCERS, is_commit=st.booleans(), as_follower=st.booleans())
    def marker(self, producer, is_commit, as_follower):
        epoch, _, _ = self.state(producer)
        batch = build_marker(producer, epoch + 1, 3, is_commit, 5)
        self.put(batch, "commit" if is_commit else "abort", as_follower=as_follower)

    @rule()
    def roll(self):
        self.log.roll()

    @rule()
    def sync(self):
        work = self.log.begin_sync()
        if work is not None:
            work.run()
            self.log.finish_sync(work, None)
        self.point = self.log.recovery_point

    @rule(part=st.floats(0, 1))
    def commit(self, part):
        """Move the high watermark: everything below it is final on leaders and followers."""
        ends = [one.last_offset + 1 for one in self.batches]
        ends = [end for end in ends if self.high_watermark < end <= self.log.synced_end_offset]
        if ends:
            self.high_watermark = ends[int(part * (len(ends) - 1))]
        self.log.forget_stable_transactions(self.high_watermark)

    @rule()
    def restart(self):
        self.log.close(clean=True)
        self.log = Log.open_clean(self.fs, DIRECTORY, CONFIG, self.log.clean_end)

    @rule()
    def kill(self):
        self.log = Log.recover(self.fs, DIRECTORY, CONFIG, self.point, may_lack_unsynced=True)

    @rule(seed=st.integers(0, 2**16))
    def lose_power(self, seed):
        self.fs.crash(random.Random(seed))
        self.log = Log.recover(self.fs, DIRECTORY, CONFIG, self.point, may_lack_unsynced=True)
        self.ends()

    @precondition(lambda self: self.log.log_end_offset > self.high_watermark)
    @rule(part=st.floats(0, 1))
    def truncate(self, part):
        end = self.log.log_end_offset
        target = self.high_watermark + int(part * (end - self.high_watermark))
        if target >= self.log.log_start_offset:
            self.log.truncate_to(target)
            self.ends()

    def ends(self):
        end = self.log.log_end_offset
        self.batches = [one for one in self.batches if one.last_offset < end]
        assert end >= self.high_watermark or not self.batches

    @rule(part=st.floats(0, 1))
    def delete(self, part):
        """Delete up to the first open transaction, so that all replicas agree on the remaining ones."""
        stable = stable_offset(self.batches, self.high_watermark, self.log.log_start_offset)
        self.log.delete_before(int(self.log.log_start_offset + part * (stable - self.log.log_start_offset)))

    @invariant()
    def tells_what_the_list_tells(self):
        log, start, end = self.log, self.log.log_start_offset, self.log.log_end_offset
        told = transactions(self.batches)
        assert log.last_stable_offset(self.high_watermark) == stable_offset(
            self.batches, self.high_watermark, start
        )
        opened = sorted((one.first_offset, one.producer_id) for one in told if one.marker_offset == NO_OFFSET)
        assert [(one.start_offset, one.producer_id) for one in log.producers.open_transactions()] == opened
        aborted = [one for one in told if one.marker_offset >= start and not one.is_commit]
        for first, last in ((start, end), (start, (start + end) // 2), ((start + end) // 2, end), (end, end)):
            expected = [
                (one.first_offset, one.producer_id)
                for one in aborted
                if one.marker_offset >= first and one.first_offset < last
            ]
            found = log.aborted_between(first, last)
            assert [(offset, producer) for producer, offset in found] == sorted(expected)
        for producer in (1, 2, 3):
            state = log.producers.get(producer)
            if state is not None:
                epoch, sequence, _ = self.state(producer)
                assert state.epoch == epoch
                next_sequence = state.batches[-1].last_sequence + 1 if state.batches else 0
                assert next_sequence == sequence or not sequence


TestTransactionalLog = TransactionalLog.TestCase
TestTransactionalLog.settings = settings(
    derandomize=True, deadline=None, max_examples=60, stateful_step_count=40
)


# --- directed ------------------------------------------------------------------------------------------


@pytest.fixture
def fs():
    fs = MemoryFileSystem(crashable=True)
    fs.make_dirs("/data")
    return fs


@pytest.fixture
def log(fs):
    return Log.create(fs, DIRECTORY, CONFIG)


def part(producer=1, epoch=0, sequence=0):
    return build_batch(
        [b"x" * 40],
        timestamps_ms=5,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=True,
    )


def append(log, *batches):
    for batch in batches:
        log.append(batch, now_ms=7, leader_epoch=0)


def test_r33_the_marker_must_be_committed_before_the_transaction_is_stable(log):
    append(log, part(), build_batch([b"v"]), build_marker(1, 1, 0, False, 5))
    assert [log.last_stable_offset(high_watermark) for high_watermark in (0, 1, 2, 3)] == [0, 0, 0, 3]
    with without("R33-lso-uncommitted-marker"):
        log._producers.states = None
        assert log.last_stable_offset(2) == 2


def test_r33_an_open_transaction_holds_back_what_follows(log):
    append(log, build_batch([b"v"]), part(1), part(2), build_marker(1, 1, 0, True, 5), build_batch([b"v"]))
    assert log.last_stable_offset(5) == 2
    append(log, build_marker(2, 1, 0, True, 5))
    assert log.last_stable_offset(6) == 6
    append(log, part(3))
    with without("R33-lso-ignores-open"):
        assert log.last_stable_offset(7) == 7


def test_the_last_stable_offset_is_at_least_the_log_start(log):
    append(log, part(1), *(build_batch([b"v" * 200]) for _ in range(20)))
    log.delete_before(10)
    assert log.last_stable_offset(21) == 10
    append(log, build_marker(1, 1, 0, False, 5))
    assert log.last_stable_offset(22) == 22
    assert log.aborted_between(10, 22) == [(1, 0)]
    log.delete_before(22)
    assert log.aborted_between(22, 30) == []
    assert len(log.producers.aborted) == 0


def test_a_marker_fits_into_a_topic_of_small_batches(fs):
    log = Log.create(fs, DIRECTORY, LogConfig(max_message_bytes=60, preallocate_min_bytes=0))
    append(log, build_marker(1, 1, 0, False, 5))
    assert log.log_end_offset == 1


def test_r29_a_producer_with_an_open_transaction_is_never_forgotten(log):
    append(log, part(1), part(2), build_marker(2, 1, 4, True, 5))
    assert log.expire_producers(10**12, 1) == 1
    assert log.producers.get(1) is not None
    append(log, build_marker(1, 1, 4, True, 5))
    assert log.expire_producers(10**12, 1) == 1


def test_r29_a_marker_counts_as_activity(log):
    log.append(part(1), now_ms=0, leader_epoch=0)
    log.append(build_marker(1, 1, 4, True, 5), now_ms=9_000, leader_epoch=0)
    assert log.expire_producers(10_000, 5_000) == 0
    assert log.producers.get(1).coordinator_epoch == 4


def test_a_follower_refuses_a_control_batch_that_is_not_a_marker(log):
    batch = build_marker(1, 1, 0, False, 5)
    batch[control._KEY_AT + 3] = 9  # type 9
    seal(batch)
    stamp(batch, base_offset=0, leader_epoch=0)
    with pytest.raises(CorruptBatchError, match="marker"):
        log.append_as_follower(bytes(batch), now_ms=1)
    assert log.log_end_offset == 0


def test_a_snapshot_keeps_aborted_transactions_and_uncommitted_markers(fs, log):
    append(log, part(1), build_marker(1, 1, 0, False, 5), part(2), build_marker(2, 1, 0, True, 5), part(3))
    log.forget_stable_transactions(2)
    log.close(clean=True)
    data = fs.read_bytes(f"{DIRECTORY}/{5:020d}.producers").decode().splitlines()
    assert data[4:-1] == [
        "1 1 7 0 -1",
        "2 1 7 0 -1",
        f"3 0 7 -1 4 0:0:4:4:5:{stored_crc(part(3))}",
        "ended 2 3",
        "aborted 1 0 1 2",
    ]
    again = Log.open_clean(fs, DIRECTORY, CONFIG, log.clean_end)
    assert [again.last_stable_offset(high_watermark) for high_watermark in (3, 4, 5)] == [2, 4, 4]
    assert again.aborted_between(0, 5) == [(1, 0)]
    assert not verify_log(fs, DIRECTORY).findings


def test_a_reset_forgets_all_producers_and_transactions(log):
    append(log, part(1), part(2), build_marker(2, 1, 0, False, 5))
    log.reset_to(50)
    assert log.last_stable_offset(50) == 50
    assert (log.aborted_between(0, 100), log.producers.open) == ([], {})
