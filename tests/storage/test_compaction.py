"""Compaction of a log: which records stay, and that a crash at any point leaves the old or the new
segment.

The final state of a log is the result of replaying it: {key: value} of plain and committed records,
later records replacing earlier ones. Compaction must not change it.

Tests compaction.py, compaction_pass.py, compaction_state.py and compaction_swap.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    LogOfflineError,
    OutOfOrderSequenceNumberError,
)
from kafkalite.records.batch import RecordBatch, iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker, parse_marker
from kafkalite.records.gaps import DESCRIBED_GAP_BYTES, GAP_BYTES, build_gap, is_gap, joined_at
from kafkalite.records.header import Codec, check, total_length
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import RecoveryPoint, decode_compaction
from kafkalite.storage.compaction_swap import SegmentDigest, SwapWork
from kafkalite.storage.filesystem import FileSystem, unlink_existing
from kafkalite.storage.inspect import LastSession, verify_log
from kafkalite.storage.inspect import iter_batches as iter_stored
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.recovery_points import RecoveryPointsFile
from proof.compaction import run_pass
from proof.damage.one_log import accept_as_expected
from proof.disk_trees import disk_with_files
from proof.recording_filesystem import RecordingFileSystem, crash_states

DIRECTORY = f"/data/{'c' * 32}-0"
CONFIG = LogConfig(
    segment_bytes=2048,
    index_interval_bytes=256,
    preallocate_min_bytes=1024,
    preallocate_max_bytes=2048,
    file_delete_delay_ms=0,
    is_compacted=True,
    delete_retention_ms=100,
)

Value = bytes | None
LONG = bytes(300)  # a record whose removal makes a batch smaller


def keyed(pairs: Sequence[tuple[Value, Value]], **options: Any) -> bytearray:
    """Return a batch of (key, value) pairs."""
    options.setdefault("timestamps_ms", 1000)
    return build_batch([value for _, value in pairs], [key for key, _ in pairs], **options)


def sync(log: Log) -> None:
    work = log.begin_sync()
    if work is not None:
        work.run()
        log.finish_sync(work, None)


def compact(log: Log, now_ms: int = 1, *, max_keys: int = 1000) -> bool:
    """Run one pass over everything that may be compacted. Return whether there was anything."""
    done = log.begin_compaction(now_ms, log.synced_end_offset, max_keys)
    return done is not None and run_pass(log, done, now_ms)


def batches(log: Log, up_to: int | None = None) -> list[RecordBatch]:
    found: list[RecordBatch] = []
    offset, end = log.log_start_offset, log.log_end_offset if up_to is None else up_to
    while offset < end:
        piece = log.read(offset, max_bytes=1000, up_to=end)
        if not piece.buffers:
            break
        for buffer in piece.buffers:
            found += iter_batches(bytes(buffer))
        offset = piece.next_offset
    return found


def dense(log: Log) -> None:
    """Assert that every offset of the log is in one batch."""
    found = batches(log)
    for before, after in pairwise(found):
        assert after.header.base_offset == before.header.next_offset
    if found:
        assert found[0].header.base_offset <= log.log_start_offset
        assert found[-1].header.next_offset == log.log_end_offset


def records(log: Log) -> list[tuple[int, Value, Value]]:
    """Return (offset, key, value) of all records that are neither undecided nor aborted."""
    pending: dict[int, list[tuple[int, Value, Value]]] = {}
    seen: list[tuple[int, Value, Value]] = []
    for batch in batches(log):
        header = batch.header
        if is_gap(header):
            continue
        if header.is_control:
            ended = pending.pop(header.producer_id, [])
            if parse_marker(batch.buffer).is_commit:
                seen += ended
            continue
        columns = batch.columns()
        keys = columns.keys or [None] * len(batch)
        rows = list(zip(columns.offsets, keys, columns.values, strict=True))
        if header.is_transactional:
            pending.setdefault(header.producer_id, []).extend(rows)
        else:
            seen += rows
    return sorted(seen, key=lambda row: row[0])


def meaning(log: Log) -> dict[bytes, bytes]:
    """Return the final state of the log."""
    found: dict[bytes, bytes] = {}
    for _, key, value in records(log):
        if key is not None:
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
    return found


class Writers:
    """Plain, idempotent and transactional producers that write random batches to one log."""

    def __init__(self, seed: int, key_count: int = 6) -> None:
        self.rng = random.Random(seed)
        self.key_count = key_count
        self.leader_epoch = 0
        self.now_ms = 1000
        self.count = 0
        self.sequences: dict[int, int] = {}  # idempotent producers 0 to 2
        self.epochs: dict[int, int] = {}  # transactional producers 10 to 12
        self.open: dict[int, int] = {}  # their next sequences, while a transaction is open

    def pairs(self, pad_bytes: int) -> list[tuple[Value, Value]]:
        found: list[tuple[Value, Value]] = []
        for _ in range(self.rng.randrange(1, 6)):
            self.count += 1
            key: Value = b"key%d" % self.rng.randrange(self.key_count)
            if self.rng.randrange(4) == 0:
                key = (key or b"") * 20  # too long to be a map key itself
            if self.rng.randrange(12) == 0:
                key = None
            value = (
                None
                if self.rng.randrange(4) == 0
                else b"value%d" % self.count + bytes(self.rng.randrange(pad_bytes))
            )
            found.append((key, value))
        return found

    def append(self, log: Log) -> None:
        """Append one batch of a random producer, or the end of a transaction."""
        self.now_ms += self.rng.randrange(3)
        kind = self.rng.randrange(10)
        if kind < 4:
            self._append(log, codec=self.rng.choice([Codec.NONE, Codec.GZIP]))
        elif kind < 6:
            producer = self.rng.randrange(3)
            sequence = self.sequences.get(producer, 0)
            count = self._append(log, 200, producer_id=producer, producer_epoch=0, base_sequence=sequence)
            self.sequences[producer] = sequence + count
        elif kind < 8:
            producer = 10 + self.rng.randrange(3)
            sequence = self.open.get(producer, 0)
            self.open[producer] = sequence + self._append(
                log,
                producer_id=producer,
                producer_epoch=self.epochs.get(producer, 0),
                base_sequence=sequence,
                transactional=True,
            )
        elif self.open:
            self.end(log, self.rng.choice(sorted(self.open)), is_commit=bool(self.rng.randrange(3)))
        if self.rng.randrange(25) == 0:
            self.leader_epoch += 1

    def end(self, log: Log, producer: int, *, is_commit: bool) -> None:
        del self.open[producer]
        self.epochs[producer] = self.epochs.get(producer, 0) + 1
        marker = build_marker(producer, self.epochs[producer], 1, is_commit, self.now_ms)
        log.append(marker, now_ms=self.now_ms, leader_epoch=self.leader_epoch)

    def _append(self, log: Log, pad_bytes: int = 40, **options: Any) -> int:
        pairs = self.pairs(pad_bytes)
        batch = keyed(pairs, timestamps_ms=[self.now_ms + n for n in range(len(pairs))], **options)
        log.append(batch, now_ms=self.now_ms, leader_epoch=self.leader_epoch)
        return len(pairs)


def new_log(fs: Any = None) -> Log:
    fs = fs or MemoryFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    log = Log.create(fs, DIRECTORY, CONFIG)
    fs.sync_dir("/data")
    return log


def put(log: Log, *pairs: tuple[Value, Value], **options: Any) -> None:
    log.append(keyed(pairs, **options), now_ms=1000, leader_epoch=0)


def close_segment(log: Log) -> None:
    log.roll()
    sync(log)


def stored(log: Log) -> list[tuple[int, Value, Value]]:
    return records(log)


# --- what stays


def test_the_latest_record_of_each_key_stays_where_it_was() -> None:
    log = new_log()
    put(log, (b"a", LONG), (b"b", LONG), (b"c", b"1"))
    put(log, (b"a", b"2"))
    put(log, (b"b", b"2"))
    close_segment(log)
    put(log, (b"c", b"2"))  # the active segment is never compacted, and does not count
    assert compact(log)
    assert stored(log) == [(2, b"c", b"1"), (3, b"a", b"2"), (4, b"b", b"2"), (5, b"c", b"2")]
    dense(log)
    first = batches(log)[0].header
    assert is_gap(first)
    assert (first.base_offset, first.next_offset) == (0, 2)


def test_offset_for_bytes_counts_what_compaction_has_left() -> None:
    log = new_log()
    for number in range(20):
        put(log, (b"a", LONG), (b"%d" % (number % 3), LONG))
        close_segment(log)
    before = log.offset_for_bytes(0, log.log_end_offset, 1 << 20)
    assert compact(log)
    found = batches(log)
    sizes = [(one.header.next_offset, one.size_bytes) for one in found]
    whole = log.offset_for_bytes(0, log.log_end_offset, 1 << 20)
    assert whole == (log.log_end_offset, log.size_bytes, sum(size for _, size in sizes))
    assert whole.total_bytes < before.total_bytes
    for limit in range(0, whole.total_bytes, 37):
        reached, taken = sizes[0]
        for next_offset, size in sizes[1:]:
            if taken + size > limit:
                break
            reached, taken = next_offset, taken + size
        assert log.offset_for_bytes(0, log.log_end_offset, limit) == (reached, taken, whole.total_bytes)


def test_records_without_a_key_stay() -> None:
    log = new_log()
    put(log, (None, b"1"), (b"a", LONG), (None, b"2"))
    put(log, (None, b"3"))
    put(log, (b"a", b"2"))
    close_segment(log)
    assert compact(log)
    assert stored(log) == [(0, None, b"1"), (2, None, b"2"), (3, None, b"3"), (4, b"a", b"2")]


def test_a_batch_that_would_not_become_smaller_stays_whole_and_its_keys_keep_their_tombstones() -> None:
    log = new_log()
    put(log, (b"a", b"1"), (b"b", b"1"), (b"a2", b"1"))
    put(log, (b"b", None))
    close_segment(log)
    put(log, (b"x", b"1"))
    close_segment(log)
    assert compact(log, now_ms=1)
    whole = [(0, b"a", b"1"), (1, b"b", b"1"), (2, b"a2", b"1"), (3, b"b", None), (4, b"x", b"1")]
    assert stored(log) == whole
    for round_number in range(3):
        put(log, (b"y", b"1"))
        close_segment(log)
        assert compact(log, now_ms=10_000 + round_number)  # long after delete.retention.ms
        assert meaning(log).get(b"b") is None, "without its tombstone the old record would be back"


def test_a_tombstone_is_removed_after_its_retention_and_not_before() -> None:
    log = new_log()
    put(log, (b"a", bytes(300)))
    put(log, (b"a", None))
    close_segment(log)
    assert compact(log, now_ms=1000)
    assert stored(log) == [(1, b"a", None)]
    put(log, (b"b", b"1"))
    close_segment(log)
    assert compact(log, now_ms=1099)
    assert stored(log) == [(1, b"a", None), (2, b"b", b"1")]
    for key in (b"c", b"d"):  # the first of these passes remembers it, the second one may remove it
        put(log, (key, b"1"))
        close_segment(log)
        assert compact(log, now_ms=1100)
    assert stored(log) == [(2, b"b", b"1"), (3, b"c", b"1"), (4, b"d", b"1")]


def test_only_committed_records_of_transactions_stay_and_lose_their_producer() -> None:
    log = new_log()
    put(log, (b"a", b"1"))
    put(log, (b"a", b"aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    put(log, (b"b", b"committed"), producer_id=8, producer_epoch=0, base_sequence=0, transactional=True)
    log.append(build_marker(7, 1, 1, False, 1000), now_ms=1000, leader_epoch=0)
    log.append(build_marker(8, 1, 1, True, 1000), now_ms=1000, leader_epoch=0)
    close_segment(log)
    before = log.producers.get(7), log.producers.get(8)
    assert compact(log)
    assert stored(log) == [(0, b"a", b"1"), (2, b"b", b"committed")]
    kinds = [(one.header.base_offset, one.header.producer_id, one.header.is_control) for one in batches(log)]
    assert kinds == [(0, -1, False), (1, -1, True), (2, -1, False), (3, 7, True), (4, 8, True)]
    again = Log.recover(log._fs, DIRECTORY, CONFIG)
    assert (again.producers.get(7), again.producers.get(8)) == before


def test_nothing_changes_from_the_first_undecided_transaction_on() -> None:
    log = new_log()
    put(log, (b"a", b"1"))
    put(log, (b"a", b"2"))
    put(log, (b"b", b"1"), producer_id=8, producer_epoch=0, base_sequence=0, transactional=True)
    put(log, (b"a", b"3"))
    close_segment(log)
    assert compact(log)
    assert [offset for offset, _, _ in stored(log)] == [1, 3]
    assert batches(log)[2].header.producer_id == 8
    assert log.cleanable(1, log.log_end_offset).dirty_bytes == 0, "and it is not tried again and again"
    log.append(build_marker(8, 1, 1, True, 1000), now_ms=1000, leader_epoch=0)
    close_segment(log)
    assert log.cleanable(1, log.log_end_offset).dirty_bytes > 0
    assert compact(log)
    assert [offset for offset, _, _ in stored(log)] == [2, 3]


def test_a_commit_marker_is_removed_a_day_later_if_another_follows_and_an_abort_marker_never() -> None:
    log = new_log()
    for epoch, is_commit in ((0, True), (1, True), (2, False), (3, True)):
        put(
            log,
            (b"a", b"%d" % epoch),
            producer_id=8,
            producer_epoch=epoch,
            base_sequence=0,
            transactional=True,
        )
        log.append(build_marker(8, epoch + 1, 1, is_commit, 1000), now_ms=1000, leader_epoch=0)
    close_segment(log)

    def markers() -> list[int]:
        return [one.header.base_offset for one in batches(log) if one.header.is_transactional]

    day_ms = 24 * 3600 * 1000
    assert compact(log, now_ms=1)
    assert markers() == [1, 3, 5, 7]
    for now_ms, left in ((day_ms, [1, 3, 5, 7]), (day_ms + 1, [3, 5, 7])):
        put(log, (b"b", b"1"))
        close_segment(log)
        assert compact(log, now_ms=now_ms)
        assert markers() == left
    state = log.producers.get(8)
    assert Log.recover(log._fs, DIRECTORY, CONFIG).producers.get(8) == state


def test_a_replica_that_was_away_for_days_in_a_transaction_does_not_take_a_later_abort_for_its_end() -> None:
    leader, follower = new_log(), new_log()
    for epoch, is_commit in ((0, True), (1, True), (2, False)):
        key = b"%d" % epoch
        put(leader, (key, b"1"), producer_id=8, producer_epoch=epoch, base_sequence=0, transactional=True)
        leader.append(build_marker(8, epoch + 1, 1, is_commit, 1000), now_ms=1000, leader_epoch=0)
    follower.append_as_follower(bytes(batches(leader, 1)[0].buffer), now_ms=5)
    for now_ms in (1, 24 * 3600 * 1000 + 1):
        close_segment(leader)
        assert compact(leader, now_ms)
        put(leader, (b"z", b"1"))
    assert is_gap(batches(leader)[1].header), "the marker of its transaction is gone"
    piece = leader.read(1, max_bytes=1 << 20, up_to=leader.log_end_offset)
    data = joined_at(memoryview(b"".join(piece.buffers)), 1)
    follower.append_as_follower(data, now_ms=5)
    assert meaning(follower) == meaning(leader)
    assert follower.aborted_between(0, 1) == []


def test_r28_a_small_batch_that_a_producers_state_refers_to_stays_whole() -> None:
    log = new_log()
    for sequence in range(8):
        put(log, (b"a", b"%d" % sequence), producer_id=5, producer_epoch=0, base_sequence=sequence)
    close_segment(log)
    assert compact(log)
    assert [offset for offset, _, _ in stored(log)] == [3, 4, 5, 6, 7]
    again = Log.recover(log._fs, DIRECTORY, CONFIG)
    assert again.producers.get(5) == log.producers.get(5)
    log.expire_producers(1000, 0)
    log.expire_producers(2000, 0)
    put(log, (b"b", b"1"))
    close_segment(log)
    assert compact(log)
    assert stored(log) == [(7, b"a", b"7"), (8, b"b", b"1")]


@pytest.mark.parametrize("producer_count", [1, 4, 20])
def test_batches_of_known_producers_are_reduced_to_the_latest_of_each_key(producer_count: int) -> None:
    log = new_log()
    log.reconfigure(replace(CONFIG, segment_bytes=20_000))
    each = 20 // producer_count
    sent: list[bytearray] = []
    for number in range(20):
        pairs = [(b"k%d" % (one % 50), b"%d" % number + bytes(80)) for one in range(200)]
        sequence = {"producer_epoch": 0, "base_sequence": number % each * 200}
        sent.append(keyed(pairs, producer_id=number // each, **sequence))
        log.append(bytearray(sent[-1]), now_ms=1000, leader_epoch=0)
    sync(log)
    size_bytes = log.size_bytes
    assert compact(log)
    assert len(stored(log)) == 250, "50 keys in the closed segments, 200 records in the active one"
    assert log.size_bytes < size_bytes / 10
    dense(log)
    states = producers(log, range(producer_count))
    assert [len(one.batches) for one in states] == [min(each, 5)] * producer_count
    follower = new_log()
    for batch in batches(log):
        follower.append_as_follower(bytes(batch.buffer), now_ms=5)
    log.close(clean=False)
    for name in log._fs.list_dir(DIRECTORY):
        if name.endswith(".producers"):
            log._fs.unlink(f"{DIRECTORY}/{name}")
    for one in (Log.recover(log._fs, DIRECTORY, CONFIG), follower):
        assert producers(one, range(producer_count)) == states
        repeated = sent[18] if each == 1 else sent[-2]
        known = one.producers.check(check(repeated), repeated)
        assert known is not None, "a repetition is still recognized"
        assert known.base_offset == 18 * 200
        header = check(repeated)
        options = {"producer_id": header.producer_id, "base_sequence": header.base_sequence}
        other = keyed([(b"k1", b"other" + bytes(80))] * 200, producer_epoch=0, **options)
        with pytest.raises(OutOfOrderSequenceNumberError, match="another batch"):
            one.producers.check(check(other), other)


def test_the_description_of_a_replaced_batch_is_removed_when_its_producer_expires() -> None:
    log = new_log()
    put(log, (b"a", b"1" + LONG), producer_id=5, producer_epoch=0, base_sequence=0)
    put(log, (b"a", b"2" + LONG))
    close_segment(log)
    assert compact(log)
    assert batches(log)[0].header.length_bytes == DESCRIBED_GAP_BYTES
    log.expire_producers(1000, 0)
    log.expire_producers(2000, 0)
    put(log, (b"b", b"1"))
    close_segment(log)
    assert compact(log)
    assert batches(log)[0].header.length_bytes == GAP_BYTES


def test_long_keys_and_compressed_batches() -> None:
    log = new_log()
    for number in range(6):
        noise = random.Random(number)
        pairs = [(b"k" * 40 + b"%d" % (one % 3), noise.randbytes(90)) for one in range(9)]
        put(
            log,
            *pairs,
            codec=(Codec.NONE, Codec.GZIP)[number % 2],
            timestamps_ms=[1000 + one for one in range(9)],
        )
    close_segment(log)
    assert compact(log)
    assert [offset for offset, _, _ in stored(log)] == [51, 52, 53]
    last = next(one for one in batches(log) if one.header.base_offset == 51)
    assert last.header.codec is Codec.GZIP
    assert last.columns().timestamps == [1006, 1007, 1008]


def test_a_batch_that_cannot_be_read_stays_and_keeps_the_tombstones_behind_it() -> None:
    log = new_log()
    rows = keyed([(b"a", b"1")])
    rows[22] &= 0xF8  # Kafka's rows
    from kafkalite.records.header import seal

    seal(rows)
    log.append(rows, now_ms=1000, leader_epoch=0)
    put(log, (b"a", bytes(200)))
    put(log, (b"a", None))
    close_segment(log)
    for now_ms in (1000, 5000, 5001, 5002):
        assert compact(log, now_ms=now_ms)
        put(log, (b"b", b"1"))
        close_segment(log)
    assert check(batches(log)[0].buffer).is_columnar is False
    assert [one.header.base_offset for one in batches(log) if not one.header.is_control][:2] == [0, 2]


def test_small_segments_are_joined_and_leader_epochs_are_kept() -> None:
    log = new_log()
    for epoch in range(6):
        for number in range(5):
            batch = keyed([(b"k%d" % number, bytes(200))])
            log.append(batch, now_ms=1000, leader_epoch=epoch)
        log.roll()
    sync(log)
    epochs = log.leader_epochs
    assert log.segment_count == 7
    assert compact(log)
    assert compact(log) is True
    log.append(keyed([(b"z", b"")]), now_ms=1000, leader_epoch=5)
    close_segment(log)
    assert compact(log)
    assert log.segment_count == 2
    log.close(clean=False)
    log._fs.unlink(f"{DIRECTORY}/leader-epochs")
    again = Log.recover(log._fs, DIRECTORY, CONFIG)
    assert again.leader_epochs[:6] == epochs[:6]
    assert verify_log(log._fs, DIRECTORY).findings == []


def test_the_lag_and_the_dirty_ratio() -> None:
    log = new_log()
    put(log, (b"a", b"1"), timestamps_ms=5000)
    close_segment(log)
    log.reconfigure(LogConfig(is_compacted=True, min_compaction_lag_ms=100))
    assert log.cleanable(5050, 99).total_bytes == 0
    assert log.cleanable(5100, 99).dirty_ratio == 1.0
    assert log.cleanable(5100, 0).total_bytes == 0, "nothing above the high watermark"
    assert compact(log, now_ms=5100)
    assert log.cleanable(5100, 99).dirty_ratio == 0.0
    log.reconfigure(LogConfig())
    assert log.begin_compaction(9999, 99, 10) is None


def test_more_keys_than_fit_take_several_passes() -> None:
    log = new_log()
    for number in range(40):
        put(log, (b"%d" % (number % 20), b"v%d" % number + bytes(60)))
    close_segment(log)
    expected = meaning(log)
    passes = 0
    while log.cleanable(1, log.log_end_offset).dirty_bytes and compact(log, max_keys=7):
        passes += 1
    assert passes >= 3
    assert meaning(log) == expected
    assert [offset for offset, _, _ in stored(log)] == list(range(20, 40))


def test_compaction_never_makes_a_log_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalite.storage.compaction._MAX_PINNED_KEYS", 10)
    log = new_log()
    for number in range(20):  # every other record of the first batches is superseded by the last ones
        first = number % 10 * 20
        keys = range(first, first + 20, 1 + number // 10)
        put(log, *[(b"%d" % key, b"%d" % number) for key in keys])
    close_segment(log)
    put(log, *[(b"%d" % (number * 20), None) for number in range(10)])
    close_segment(log)
    expected, size_bytes = meaning(log), log.size_bytes
    for now_ms in (1, 1000, 1001, 1002):
        assert compact(log, now_ms)
        assert meaning(log) == expected, "more keys than are remembered: then all tombstones stay"
        assert log.size_bytes <= size_bytes
        put(log, (b"last", b"%d" % now_ms))
        close_segment(log)
        expected, size_bytes = meaning(log), log.size_bytes


def test_a_segment_without_records_does_not_hold_up_retention() -> None:
    log = new_log()
    for key in (b"a", b"b", b"c"):
        put(log, (key, bytes(1900)))  # too large for the gap to be joined to
        close_segment(log)
    put(log, (b"a", b"2"))
    close_segment(log)
    put(log, (b"d", b"1"), timestamps_ms=10**6)
    assert compact(log)
    assert is_gap(batches(log)[0].header)
    log.reconfigure(replace(CONFIG, retention_ms=1000))
    assert log.retention_offset(1500, up_to=log.synced_end_offset) == 0
    segment_count = log.segment_count
    log.delete_before(log.retention_offset(10**6, up_to=log.synced_end_offset))
    assert log.segment_count == segment_count - 4
    assert stored(log) == [(4, b"d", b"1")]


def test_zeros_behind_a_closed_segment_after_a_power_loss_are_not_damage() -> None:
    log = new_log()
    put(log, (b"a", LONG))
    put(log, (b"a", b"2"))
    close_segment(log)
    put(log, (b"b", b"1"))
    file = log._fs.open(f"{DIRECTORY}/{0:020d}.log")
    file.allocate(file.size() + 100)
    log.close(clean=True)
    end = log.clean_end
    assert end is not None
    again = Log.open_clean(log._fs, DIRECTORY, CONFIG, end)
    assert again.leader_epochs, "it is used"
    assert compact(again)
    assert stored(again) == [(1, b"a", b"2"), (2, b"b", b"1")]
    dense(again)


def test_damage_ends_a_pass_and_changes_nothing() -> None:
    log = new_log()
    put(log, (b"a", b"1"), (b"b", b"1"))
    put(log, (b"a", b"2"))
    close_segment(log)
    file = log._fs.open(f"{DIRECTORY}/{0:020d}.log")
    byte = file.read_at(80, 1)
    file.write_at(80, bytes([byte[0] ^ 1]))
    before = log._fs.list_dir(DIRECTORY)
    with pytest.raises(CorruptLogError, match="is damaged at position 0"):
        compact(log)
    assert log._fs.list_dir(DIRECTORY) == before


def test_a_wrong_base_offset_which_no_crc_covers_is_damage() -> None:
    log = new_log()
    put(log, (b"a", b"1"), (b"b", b"1"))
    put(log, (b"a", b"2"))
    close_segment(log)
    second = batches(log)[0].size_bytes
    log._fs.open(f"{DIRECTORY}/{0:020d}.log").write_at(second + 7, b"\x05")
    with pytest.raises(CorruptLogError, match="base offset 5 where 2 is next"):
        compact(log)


def test_r24_damage_of_a_compacted_segment_is_found() -> None:
    log = new_log()
    for number in range(30):
        put(log, (b"%d" % (number % 3), bytes(50)))
    close_segment(log)
    assert compact(log)
    point = log.recovery_point
    path = f"{DIRECTORY}/{0:020d}.log"
    log.close(clean=False)
    log._fs.unlink(f"{DIRECTORY}/{0:020d}.index")
    log._fs.open(path).truncate(GAP_BYTES - 1)
    damaged = Log.recover(log._fs, DIRECTORY, CONFIG, point)
    assert damaged.damage is not None
    assert damaged.damage.sound_end_offset == 0


# --- beside other things


def closed_after_its_point() -> tuple[Log, RecoveryPoint]:
    """Return a log of 12 records in a closed segment, and its recovery point from before it was closed."""
    log = new_log()
    for number in range(12):
        put(log, (b"%d" % (number % 3), bytes(50)))
    sync(log)
    point = log.recovery_point
    close_segment(log)
    return log, point


@pytest.mark.parametrize("are_points_saved", [True, False])
def test_r24_a_segment_that_was_compacted_since_its_recovery_point_is_no_damage_in_a_verdict(
    are_points_saved: bool,
) -> None:
    log, point = closed_after_its_point()
    put(log, (b"0", b"last"))
    sync(log)
    assert compact(log)
    log.close(clean=False)
    fs = log._fs
    if not are_points_saved:  # the pass was interrupted after its first swap
        fs.unlink(f"{DIRECTORY}/compaction")
    session = LastSession({layout.name_of(DIRECTORY): point}, {}, may_lack_unsynced=False)
    assert not verify_log(fs, DIRECTORY, session).is_damaged
    assert Log.recover(fs, DIRECTORY, CONFIG, point).damage is None


@pytest.mark.parametrize("is_indexed", [True, False])
def test_r24_the_sound_part_of_a_segment_that_was_compacted_since_its_recovery_point_is_read(
    is_indexed: bool,
) -> None:
    log, point = closed_after_its_point()
    put(log, (b"0", b"last"))
    sync(log)
    assert compact(log)
    log.close(clean=False)
    fs, path = log._fs, f"{DIRECTORY}/{layout.segment_file_name(0, '.log')}"
    if not is_indexed:
        for suffix in layout.SEGMENT_SUFFIXES[1:]:
            fs.unlink(f"{DIRECTORY}/{layout.segment_file_name(0, suffix)}")
    *_, before, last = (one.header for one in iter_stored(fs, path))
    assert before is not None and last is not None
    fs.open(path).truncate(fs.file_size(path) - 1)
    damaged = Log.recover(fs, DIRECTORY, CONFIG, point)
    assert damaged.damage is not None
    assert (damaged.damage.sound_end_offset, damaged.damage.records_in_doubt) == (
        before.next_offset,
        last.next_offset - before.next_offset,
    )


def test_r45_accept_loss_keeps_a_segment_that_was_compacted_since_its_recovery_point() -> None:
    log, point = closed_after_its_point()
    put(log, (b"0", b"sound"))
    put(log, (b"0", b"damaged"))
    put(log, (b"1", b"sound"))
    sync(log)
    assert compact(log)
    before = meaning(log)
    log.close(clean=False)
    fs = log._fs
    for suffix in layout.SEGMENT_SUFFIXES[1:]:  # the process ended before it saved the new indexes
        unlink_existing(fs, [f"{DIRECTORY}/{layout.segment_file_name(0, suffix)}"])
    points = RecoveryPointsFile(fs, "/data")
    points.open()
    points.write({layout.name_of(DIRECTORY): point})
    path = f"{DIRECTORY}/{layout.segment_file_name(12, '.log')}"
    second = next(iter_stored(fs, path)).data.nbytes
    fs.open(path).write_at(second + 70, b"\xff")
    damaged = Log.recover(fs, DIRECTORY, CONFIG, point)
    assert damaged.damage is not None
    assert damaged.damage.records_in_doubt == 1
    damaged.release()
    assert accept_as_expected(fs, DIRECTORY).lost_records == 1
    kept = Log.recover(fs, DIRECTORY, CONFIG)
    assert kept.damage is None
    assert meaning(kept) == before | {b"0": b"sound"}


def test_readers_keep_their_views_during_a_swap() -> None:
    log = new_log()
    for number in range(10):
        put(log, (b"a", b"%d" % number + bytes(100)))
    close_segment(log)
    held = log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset).buffers[0]
    kept = bytes(held)
    assert compact(log)
    assert bytes(held) == kept
    piece = log.read(
        4, max_bytes=1, up_to=log.log_end_offset
    )  # in the middle of a gap: the whole gap is returned
    assert is_gap(check(piece.buffers[0]))
    assert piece.next_offset == 9
    assert log.read(9, max_bytes=1, up_to=log.log_end_offset).next_offset == 10


@pytest.mark.parametrize("change", ["truncate", "delete", "close"])
def test_a_pass_is_given_up_if_the_log_changes_meanwhile(change: str) -> None:
    log = new_log()
    for number in range(10):
        put(log, (b"a", b"%d" % number + bytes(300)))
    close_segment(log)
    work = log.begin_compaction(1, log.log_end_offset, 100)
    assert work is not None
    steps = work.steps()
    result: bytes | None = None
    while not isinstance(step := steps.send(result), SwapWork):
        result = step()
    if change == "truncate":
        log.truncate_to(8)
    elif change == "delete":
        log.delete_before(8)
    else:
        log.close(clean=False)
    assert log.begin_swap(step) is None
    with pytest.raises(StopIteration):
        steps.send(None)
    assert work.is_given_up
    assert log.finish_compaction(work, 1) is None
    assert not [name for name in log._fs.list_dir(DIRECTORY) if name.endswith((".tmp", ".swap"))]


def test_a_truncation_voids_the_compaction_points_above_it() -> None:
    log = new_log()
    for number in range(10):
        put(log, (b"a", b"%d" % number + bytes(300)))
    close_segment(log)
    assert compact(log)
    assert decode_compaction(log._fs.read_bytes(f"{DIRECTORY}/compaction"), "").compacted_to == 10
    log.truncate_to(9)
    put(log, (b"a", b"x"))
    close_segment(log)
    assert compact(log)
    assert stored(log) == [(9, b"a", b"x")]


@pytest.mark.parametrize("error", [OSError("no such device"), DiskFullError("full")])
def test_r26_a_swap_that_fails_half_way_takes_the_log_offline(error: Exception) -> None:
    """R55: after a lack of space until the log is opened again, which completes the swap."""
    log = new_log()
    for number in range(10):
        put(log, (b"a", b"%d" % number + bytes(300)))
    close_segment(log)
    expected = stored(log)
    work = log.begin_compaction(1, log.log_end_offset, 100)
    assert work is not None
    steps = work.steps()
    result: bytes | None = None
    while not isinstance(step := steps.send(result), SwapWork):
        result = step()
    assert log.begin_swap(step) is step
    step.is_decided = True
    with pytest.raises(LogOfflineError):
        log.finish_swap(step, error)
    steps.close()
    assert log.must_reopen == isinstance(error, DiskFullError)
    assert log.offline_reason is not None
    assert stored(log) == expected


def test_a_gap_that_begins_below_a_followers_end_is_shortened() -> None:
    gap, rest = build_gap(10, 20, 3), keyed([(b"a", b"1")], base_offset=30)
    batches = memoryview(bytes(gap) + bytes(rest))
    joined = joined_at(batches, 17)
    first = check(joined[:GAP_BYTES])
    assert (first.base_offset, first.next_offset, first.leader_epoch) == (17, 30, 3)
    assert is_gap(first)
    assert bytes(joined[GAP_BYTES:]) == bytes(rest)
    assert joined_at(batches, 10) is batches
    assert joined_at(batches, 30) is batches
    other = memoryview(keyed([(b"a", b"1"), (b"b", b"1")], base_offset=10))
    assert joined_at(other, 11) is other  # not a gap: the log refuses it
    broken = bytearray(gap)
    broken[-1] ^= 1
    with pytest.raises(CorruptBatchError):
        joined_at(memoryview(broken), 17)


# --- any history


def producers(log: Log, ids: Sequence[int]) -> list[Any]:
    return [log.producers.get(one) for one in ids]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_compaction_changes_neither_the_final_state_nor_the_producers(seed: int) -> None:
    writers, log = Writers(seed), new_log()
    rng, now_ms = writers.rng, 1
    for _ in range(rng.randrange(10, 120)):
        writers.append(log)
        if rng.randrange(8) == 0:
            close_segment(log)
        if rng.randrange(12) == 0:
            now_ms += rng.choice([0, 60, 200, 100_000_000])
            before, end = meaning(log), log.log_end_offset
            compact(log, now_ms, max_keys=rng.choice([3, 1000]))
            assert meaning(log) == before
            assert log.log_end_offset == end
            dense(log)
    sync(log)
    heads = [one.header for one in batches(log)]
    for timestamp_ms in range(1000, writers.now_ms + 2, 7):
        first = next((one for one in heads if one.max_timestamp_ms >= timestamp_ms), None)
        expected = None if first is None else (first.max_timestamp_ms, first.base_offset)
        assert log.offset_for_timestamp(timestamp_ms) == expected
    ids = [*range(3), *range(10, 13)]
    epochs, states = log.leader_epochs, producers(log, ids)
    follower = new_log()
    for batch in batches(log):
        follower.append_as_follower(bytes(batch.buffer), now_ms=5)
    assert meaning(follower) == meaning(log)
    assert producers(follower, ids) == states
    log.close(clean=False)
    for name in log._fs.list_dir(DIRECTORY):
        if name.endswith(".producers") or name == layout.LEADER_EPOCHS_FILE:
            log._fs.unlink(f"{DIRECTORY}/{name}")
    found = verify_log(log._fs, DIRECTORY).findings
    assert [layout.name_of(one.path) for one in found] == [layout.LEADER_EPOCHS_FILE]
    assert not found[0].is_damage
    again = Log.recover(log._fs, DIRECTORY, CONFIG, RecoveryPoint(log.synced_end_offset))
    assert again.leader_epochs == epochs
    assert producers(again, ids) == states
    assert meaning(again) == meaning(log)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_follower_that_fell_behind_continues_from_a_compacted_leader(seed: int) -> None:
    writers, leader, follower = Writers(seed), new_log(), new_log()
    rng = writers.rng
    for _ in range(rng.randrange(20, 100)):
        writers.append(leader)
        if rng.randrange(6) == 0:
            close_segment(leader)
            compact(leader, 1)
        if rng.randrange(6) == 0 and follower.log_end_offset < leader.log_end_offset:
            piece = leader.read(follower.log_end_offset, max_bytes=300, up_to=leader.log_end_offset)
            data = joined_at(memoryview(b"".join(piece.buffers)), follower.log_end_offset)
            follower.append_as_follower(data, now_ms=5)
            if rng.randrange(3) == 0:
                close_segment(follower)
                compact(follower, 1)
    while follower.log_end_offset < leader.log_end_offset:
        piece = leader.read(follower.log_end_offset, max_bytes=300, up_to=leader.log_end_offset)
        data = joined_at(memoryview(b"".join(piece.buffers)), follower.log_end_offset)
        follower.append_as_follower(data, now_ms=5)
    dense(follower)
    assert meaning(follower) == meaning(leader)
    assert follower.leader_epochs == leader.leader_epochs


# --- crashes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_every_crash_point_of_a_compaction_recovers(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    fs = RecordingFileSystem(MemoryFileSystem(crashable=True))
    writers = Writers(seed, key_count=3)
    fs.note(None)
    log = new_log(fs)
    for number in range(40):
        writers.append(log)
        if number % 6 == 5:
            close_segment(log)
    sync(log)
    expected = meaning(log), log.log_start_offset, log.log_end_offset
    fs.note(expected)
    for now_ms in (1, 200_000_000):
        assert compact(log, now_ms)
        for _ in range(3):
            writers.append(log)
        close_segment(log)
        expected = meaning(log), log.log_start_offset, log.log_end_offset
        fs.note(expected)
    states = swaps = 0
    for state in crash_states(fs.operations, latest=4):
        if state.note is None:
            continue
        states += 1
        disk = disk_with_files(state.files, state.directories, crashable=False)
        if any(name.endswith(".swap") for name in disk.list_dir(DIRECTORY)):
            swaps += 1
            findings = verify_log(disk, DIRECTORY).findings
            assert [one for one in findings if one.path.endswith((".log", ".swap")) and one.is_damage] == []
        point = RecoveryPoint(state.note[2] if state.number % 2 else 0)  # the checkpoint may be an old one
        found = Log.recover(disk, DIRECTORY, CONFIG, point, may_lack_unsynced=True)
        assert found.log_end_offset >= state.note[2], state.label
        dense(found)
        if found.log_end_offset == state.note[2]:
            assert meaning(found) == state.note[0], (state.label, fs.operations[state.after][:3])
        if state.number % 3 == 0:
            found.close(clean=True)
            end = found.clean_end
            assert end is not None
            again = Log.open_clean(disk, DIRECTORY, CONFIG, end)
            dense(again)
            assert compact(again, 300_000_000) or True
            dense(again)
        assert not [name for name in disk.list_dir(DIRECTORY) if name.endswith((".swap", ".tmp"))]
    assert states > 300
    assert swaps > 20


def stop_at_swap(log: Log) -> SwapWork:
    """Run a pass until its first swap is decided, then crash: the swap file has its name, and nothing else
    has changed."""
    work = log.begin_compaction(1, log.log_end_offset, 1000)
    assert work is not None
    steps = work.steps()
    result: bytes | None = None
    while not isinstance(step := steps.send(result), SwapWork):
        result = step()
    log._fs.rename(step.temporary_path, layout.join(DIRECTORY, step.swap_name))
    steps.close()
    log.close(clean=False)
    return step


def three_segments(seed: int = 0) -> Log:
    """Return a log with three segments, of which a pass joins the first two."""
    log = new_log()
    for number in range(12):
        put(log, (b"a%d" % (number % 3), b"%d-%d" % (seed, number) + bytes(150)))
        if number in {3, 7}:
            close_segment(log)
    sync(log)
    return log


def contents(fs: FileSystem) -> dict[str, bytes]:
    return {name: fs.read_bytes(layout.join(DIRECTORY, name)) for name in fs.list_dir(DIRECTORY)}


def assert_set_aside(
    fs: FileSystem, name: str, data: bytes, caplog: pytest.LogCaptureFixture, *, is_compacted: bool = True
) -> None:
    """Assert that ``kl log verify`` reports the swap file ``name`` with ``data``, and that a start sets it
    aside with one error and changes nothing else."""
    fs.open(layout.join(DIRECTORY, name), create=True).write_at(0, data)
    before = contents(fs)
    assert [one.path for one in verify_log(fs, DIRECTORY).findings] == [layout.join(DIRECTORY, name)]
    caplog.clear()
    found = Log.recover(fs, DIRECTORY, replace(CONFIG, is_compacted=is_compacted))
    assert found.damage is None
    dense(found)
    events = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert len(events) == 1
    assert name in events[0]
    before[f"{name}.damaged-1"] = before.pop(name)
    assert contents(fs) == before


@pytest.mark.parametrize("is_compacted", [True, False])
@pytest.mark.parametrize("is_old_name", [True, False])
def test_r42_a_swap_file_of_another_log_is_set_aside(
    is_compacted: bool, is_old_name: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other, log = three_segments(seed=1), three_segments()
    swap = stop_at_swap(other)
    data = other._fs.read_bytes(layout.join(DIRECTORY, swap.swap_name))
    log.close(clean=False)
    name = f"{0:020d}-{8:020d}.swap" if is_old_name else swap.swap_name
    assert_set_aside(log._fs, name, data, caplog, is_compacted=is_compacted)


def test_r42_a_swap_file_whose_segments_were_replaced_since_is_set_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swap = stop_at_swap(log := three_segments())
    data = log._fs.read_bytes(layout.join(DIRECTORY, swap.swap_name))
    log = Log.recover(log._fs, DIRECTORY, CONFIG)
    put(log, (b"a1", b"later" + bytes(300)))
    close_segment(log)
    assert compact(log)
    log.close(clean=False)
    assert_set_aside(log._fs, swap.swap_name, data, caplog)


def test_r42_the_digest_of_replaced_segments_names_the_log(caplog: pytest.LogCaptureFixture) -> None:
    swap = stop_at_swap(log := three_segments())
    data = log._fs.read_bytes(layout.join(DIRECTORY, swap.swap_name))
    log._fs.unlink(layout.join(DIRECTORY, swap.swap_name))
    replaced = SegmentDigest(f"{'c' * 32}-1")
    for batch in batches(log):
        if batch.header.base_offset < 4:
            replaced.take(batch.buffer)
    parsed = layout.parse_swap_file_name(swap.swap_name)
    assert parsed is not None
    name = layout.swap_file_name(0, 8, replaced.value, parsed.content)
    assert name != swap.swap_name
    assert_set_aside(log._fs, name, data, caplog)


@pytest.mark.parametrize("removed", [(), ("4.log",), ("4.timeindex", "4.index", "4.log", "0.index")])
@pytest.mark.parametrize("is_compacted", [True, False])
def test_a_decided_swap_is_completed_after_a_crash_at_any_step(
    removed: tuple[str, ...], is_compacted: bool
) -> None:
    log = three_segments()
    expected = meaning(log)
    swap = stop_at_swap(log)
    fs = log._fs
    data = fs.read_bytes(layout.join(DIRECTORY, swap.swap_name))
    for name in removed:
        fs.unlink(layout.join(DIRECTORY, name.rjust(len(name) + 19, "0")))
    assert [one for one in verify_log(fs, DIRECTORY).findings if one.path.endswith(".swap")] == []
    found = Log.recover(fs, DIRECTORY, replace(CONFIG, is_compacted=is_compacted))
    assert meaning(found) == expected
    assert found.log_end_offset == 12
    assert fs.read_bytes(layout.join(DIRECTORY, f"{0:020d}.log")) == data
    assert not [name for name in fs.list_dir(DIRECTORY) if ".swap" in name]


@pytest.mark.parametrize("removed", [(), ("4.log", "4.index", "4.timeindex")])
def test_r45_accept_loss_completes_a_decided_swap(removed: tuple[str, ...]) -> None:
    """Some of the segments may already be removed, so that only the swap file has their records."""
    found: list[list[tuple[int, Value, Value]]] = []
    for is_damaged in (False, True):
        log = three_segments()
        swap = stop_at_swap(log)
        fs = log._fs
        for name in removed:
            fs.unlink(layout.join(DIRECTORY, name.rjust(len(name) + 19, "0")))
        if is_damaged:
            file = fs.open(layout.join(DIRECTORY, f"{8:020d}.log"))
            length = total_length(file.map(file.size()), 0)
            file.write_at(length - 1, b"\xff")
            assert accept_as_expected(fs, DIRECTORY).lost_records == 1
        log = Log.recover(fs, DIRECTORY, CONFIG)
        assert log.damage is None
        assert swap.swap_name not in fs.list_dir(DIRECTORY)
        found.append(records(log))
    whole, left = found
    assert left == [one for one in whole if one[0] != 8]


@pytest.mark.parametrize("change", ["cut", "flip", "others"])
def test_a_damaged_swap_file_is_set_aside_while_the_segments_are_there(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    swap = stop_at_swap(log := three_segments())
    assert_set_aside(log._fs, swap.swap_name, spoil(log, swap, change), caplog)


@pytest.mark.parametrize("change", ["cut", "flip", "others"])
def test_a_damaged_swap_file_is_damage_of_the_log_if_segments_are_removed(change: str) -> None:
    swap = stop_at_swap(log := three_segments())
    fs = log._fs
    spoiled = spoil(log, swap, change)
    fs.open(layout.join(DIRECTORY, swap.swap_name), create=True).write_at(0, spoiled)
    fs.unlink(layout.join(DIRECTORY, f"{4:020d}.log"))
    before = contents(fs)
    assert verify_log(fs, DIRECTORY).is_damaged
    with pytest.raises(CorruptLogError, match=swap.swap_name):
        Log.recover(fs, DIRECTORY, CONFIG)
    assert contents(fs) == before


def test_a_swap_file_of_an_earlier_version_is_damage_of_the_log_if_segments_are_removed() -> None:
    swap = stop_at_swap(log := three_segments())
    fs = log._fs
    old_name = f"{0:020d}-{8:020d}.swap"
    fs.rename(layout.join(DIRECTORY, swap.swap_name), layout.join(DIRECTORY, old_name))
    fs.unlink(layout.join(DIRECTORY, f"{4:020d}.log"))
    before = contents(fs)
    with pytest.raises(CorruptLogError, match=old_name):
        Log.recover(fs, DIRECTORY, CONFIG)
    assert contents(fs) == before


@pytest.mark.parametrize("offsets", [(0, 4), (2, 6), (4, 30), (50, 60)])
def test_r42_a_swap_file_with_any_offsets_is_set_aside(
    offsets: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    log = three_segments()
    log.close(clean=False)
    name = layout.swap_file_name(*offsets, "0" * 16, "0" * 16)
    data = bytes(build_gap(offsets[0], offsets[1] - offsets[0], 0))
    assert_set_aside(log._fs, name, data, caplog)


def spoil(log: Log, swap: SwapWork, change: str) -> bytes:
    """Unlink the swap file and return a damaged version of its content."""
    path = layout.join(DIRECTORY, swap.swap_name)
    data = log._fs.read_bytes(path)
    log._fs.unlink(path)
    if change == "cut":
        return data[:-1]
    if change == "flip":
        return data[:-1] + bytes([data[-1] ^ 1])
    return bytes(build_gap(0, 8, 0))
