"""A log's producers: snapshots, restarts, truncation, deletion; and resetting a log."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kafkalite.errors import LogOfflineError
from kafkalite.records.control import MARKER_BYTES, build_marker
from kafkalite.records.header import (
    HEADER,
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    MAGIC,
    seal,
    stamp,
    stored_crc,
)
from kafkalite.storage import producer_snapshots
from kafkalite.storage.checkpoints import RecoveryPoint, encode_producers
from kafkalite.storage.inspect import verify_log
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.producer_state import ProducerStates

DIRECTORY = f"/data/{'a' * 32}-0"
CONFIG = LogConfig(
    segment_bytes=1024, index_interval_bytes=100, preallocate_min_bytes=0, file_delete_delay_ms=0
)


def batch(producer: int, sequence: int, count: int = 1, body_bytes: int = 60) -> bytearray:
    data = bytearray(HEADER_BYTES + body_bytes)
    size = len(data) - LENGTH_OVERHEAD_BYTES
    HEADER.pack_into(data, 0, 0, size, 0, MAGIC, 0, 0, count - 1, 5, 5, producer, 0, sequence, count)
    seal(data)
    return data


class Life:
    """A log, and every batch of idempotent producers that is still in it."""

    def __init__(self) -> None:
        self.fs = MemoryFileSystem(crashable=True)
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.log = Log.create(self.fs, DIRECTORY, CONFIG)
        self.fs.sync_dir("/data")
        self.there: list[tuple[int, int, int]] = []  # base offset, producer, sequence; counts are 1
        self.next = {1: 0, 2: 0, -1: -1}

    def append(self, producer: int = 1, count: int = 1) -> None:
        for _ in range(count):
            sequence = self.next[producer]
            appended = self.log.append(batch(producer, sequence), now_ms=9, leader_epoch=0)
            if producer >= 0:
                self.there.append((appended.base_offset, producer, sequence))
                self.next[producer] += 1

    def sync(self) -> None:
        work = self.log.begin_sync()
        if work is not None:
            work.run()
            self.log.finish_sync(work, None)

    def ends_at(self, end: int) -> None:
        self.there = [one for one in self.there if one[0] < end]
        for producer in (1, 2):
            self.next[producer] = sum(one[1] == producer for one in self.there)

    def expected(self) -> ProducerStates:
        states = ProducerStates()
        for offset, producer, sequence in self.there:
            states.note(producer, 0, sequence, offset, offset, 5, 0, stored_crc(batch(producer, sequence)))
        return states

    def snapshots(self) -> list[int]:
        names = self.fs.list_dir(DIRECTORY)
        return [int(name.removesuffix(".producers")) for name in names if name.endswith(".producers")]

    def reopen(self) -> None:
        self.log.close(clean=True)
        end = self.log.clean_end
        assert end is not None
        self.log = Log.open_clean(self.fs, DIRECTORY, CONFIG, end)

    def recover(self, point: RecoveryPoint | None = None) -> None:
        self.log = Log.recover(self.fs, DIRECTORY, CONFIG, point, may_lack_unsynced=True)

    def walked(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Return the number of headers read to restore the producers."""
        seen = 0
        scan = producer_snapshots.scan_producers

        def counting(*arguments: Any) -> Any:
            nonlocal seen
            for found in scan(*arguments):
                seen += 1
                yield found

        monkeypatch.setattr(producer_snapshots, "scan_producers", counting)
        assert self.log.producers == self.expected()
        return seen


@pytest.fixture
def life() -> Life:
    return Life()


def test_a_snapshot_is_written_when_a_segment_is_closed_and_at_an_orderly_stop(life, monkeypatch):
    life.append(1, 20)
    bases = [segment.base_offset for segment in life.log._segments][1:]
    assert life.snapshots() == bases
    life.reopen()
    assert life.snapshots() == [*bases, 20]
    assert life.walked(monkeypatch) == 0


def test_after_a_crash_only_the_active_segment_is_walked(life, monkeypatch):
    life.append(1, 12)
    life.append(2, 8)
    life.sync()
    life.recover()
    assert 0 < life.walked(monkeypatch) <= 20 - life.snapshots()[-1]


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_without_a_snapshot_the_whole_log_is_walked(life, monkeypatch, damage):
    life.append(1, 20)
    life.reopen()
    for offset in life.snapshots():
        path = f"{DIRECTORY}/{offset:020d}.producers"
        if damage == "missing":
            life.fs.unlink(path)
        else:
            life.fs.open(path).truncate(30)
    assert life.walked(monkeypatch) == 20
    assert life.snapshots() == []


def test_r24_a_damaged_marker_found_while_the_producers_load_is_damage(life):
    """A start does not read closed segments, but loading the producers reads the markers in them."""
    life.log.append(build_marker(1, 0, 1, True, 5), now_ms=9, leader_epoch=0)
    life.append(2, 20)
    life.reopen()
    for offset in life.snapshots():
        life.fs.unlink(f"{DIRECTORY}/{offset:020d}.producers")
    path = f"{DIRECTORY}/{0:020d}.log"
    content = bytearray(life.fs.read_bytes(path))
    content[MARKER_BYTES - 20 : MARKER_BYTES] = b"\xff" * 20
    life.fs.open(path).write_at(0, bytes(content))
    with pytest.raises(LogOfflineError, match="a marker"):
        life.log.producers  # noqa: B018
    assert life.log.is_damaged


@pytest.mark.parametrize("is_killed", [False, True])
def test_r42_the_snapshot_of_another_log_is_not_used(life, is_killed, caplog):
    """Two logs of equal length: each snapshot has a correct checksum and the right file name."""
    life.append(1, 20)
    life.reopen()
    offset = life.snapshots()[-1]
    path = f"{DIRECTORY}/{offset:020d}.producers"
    other = path.replace("a" * 32, "b" * 32)
    states = ProducerStates()
    states.note(1, 7, 3, 0, 0, 5, 0, 0)
    life.fs.write_atomically(path, encode_producers(states, 0, other))
    (finding,) = verify_log(life.fs, DIRECTORY).findings
    assert (finding.path, finding.is_damage) == (path, False)
    assert f"log {'b' * 32}-0" in finding.problem
    if is_killed:
        life.recover()
    assert life.log.producers == life.expected()
    assert offset not in life.snapshots()
    assert f"log {'b' * 32}-0" in caplog.text


def test_r42_an_earlier_snapshot_of_the_same_log_is_not_used(life):
    life.append(1, 20)
    life.reopen()
    *_, earlier, last = (f"{DIRECTORY}/{offset:020d}.producers" for offset in life.snapshots())
    life.fs.write_atomically(last, life.fs.read_bytes(earlier))
    (finding,) = verify_log(life.fs, DIRECTORY).findings
    assert (finding.path, finding.is_damage) == (last, False)
    assert life.log.producers == life.expected()


def test_a_log_is_not_walked_before_its_producers_are_needed(life, monkeypatch):
    life.append(-1, 20)
    life.reopen()
    assert not life.log.is_open
    life.append(-1, 3)
    assert life.log._producers.states is None
    assert life.walked(monkeypatch) <= 3 + 20
    life.append(1)
    assert life.log.producers == life.expected()


def test_a_truncation_restores_the_earlier_producers(life):
    life.append(1, 10)
    life.append(2, 10)
    for end in (15, 9, 4, 0):
        life.log.truncate_to(end)
        life.ends_at(end)
        assert life.log.producers == life.expected()
        assert all(offset <= end for offset in life.snapshots())
        life.append(1, 3)
        life.append(2, 2)
        assert life.log.producers == life.expected()


def test_within_a_long_segment_a_snapshot_replaces_the_one_before(life, monkeypatch):
    monkeypatch.setattr(producer_snapshots, "SNAPSHOT_EVERY_BYTES", 300)
    life.append(1, 3)
    life.sync()
    assert life.snapshots() == [3]
    life.append(1, 1)
    life.sync()
    assert life.snapshots() == [3]
    life.append(1, 2)
    life.sync()
    assert life.snapshots() == [6]


def test_snapshots_below_the_log_start_are_removed_but_for_the_newest(life):
    life.append(1, 40)
    last = life.snapshots()[-1]
    life.log.delete_before(39)
    assert life.snapshots() == [last]
    life.recover()
    assert life.log.producers == life.expected()


def test_a_snapshot_that_cannot_be_written_is_only_logged(life, caplog):
    life.append(1, 3)
    life.fs.fail_next_write()
    life.log._save_producers(life.log._segments.last, 0)
    assert "producers not saved" in caplog.text
    life.append(1, 3)
    assert life.log.producers == life.expected()


@pytest.mark.parametrize("seed", range(12))
def test_i9_the_producers_are_a_function_of_the_log_whatever_happens(seed, life):
    rng = random.Random(seed)
    point = RecoveryPoint()
    for _ in range(120):
        choice = rng.random()
        if choice < 0.5:
            life.append(rng.choice([1, 2, -1]), rng.randrange(1, 4))
        elif choice < 0.65:
            life.sync()
        elif choice < 0.7:
            point = life.log.recovery_point
        elif choice < 0.75:
            life.reopen()
        elif choice < 0.83:
            end = max(life.log.log_end_offset - rng.randrange(12), 0)
            life.ends_at(life.log.truncate_to(end))
        elif choice < 0.9:
            life.recover(point)
        elif choice < 0.97:
            life.fs.crash(rng)
            life.recover(point)
            life.ends_at(life.log.log_end_offset)
        if rng.random() < 0.4:
            assert life.log.producers == life.expected()
    assert life.log.producers == life.expected()


def test_verifying_a_log_reports_a_torn_snapshot_but_not_as_damage(life):
    life.append(1, 3)
    life.reopen()
    path = f"{DIRECTORY}/{3:020d}.producers"
    assert not verify_log(life.fs, DIRECTORY).findings
    life.fs.open(path).truncate(30)
    (finding,) = verify_log(life.fs, DIRECTORY).findings
    assert (finding.path, finding.is_damage) == (path, False)


# --- resetting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [100, 3, 0])
@pytest.mark.parametrize("then", ["nothing", "kill", "power", "clean"])
def test_a_reset_is_durable(life, offset, then):
    life.append(1, 20)
    life.sync()
    point = life.log.recovery_point
    life.log.delete_before(5)
    reader = life.log.read(10, max_bytes=1 << 20, up_to=20)
    before = [bytes(view) for view in reader.buffers]
    life.log.reset_to(offset)
    assert [bytes(view) for view in reader.buffers] == before
    if then == "clean":
        life.reopen()
    elif then != "nothing":
        if then == "power":
            life.fs.crash(random.Random(1))
        life.recover(point)
    log = life.log
    assert (log.log_start_offset, log.log_end_offset, log.synced_end_offset) == (offset,) * 3
    assert (log.leader_epochs, len(log.producers)) == ([], 0)
    data = batch(1, 0)
    stamp(data, base_offset=offset, leader_epoch=3)
    log.append_as_follower(data, now_ms=1)
    life.sync()
    life.recover(point)
    assert (life.log.log_end_offset, life.log.leader_epochs) == (offset + 1, [(3, offset)])


def test_a_crash_during_a_reset_leaves_the_old_log_or_the_new_one():
    for operations in range(1, 14):
        life = Life()
        life.append(1, 20)
        life.sync()
        point = life.log.recovery_point
        unlink, left = life.fs.unlink, operations

        def limited(path: str, unlink: Any = unlink) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise InterruptedError("the power fails here")
            unlink(path)

        life.fs.unlink = limited  # type: ignore[method-assign]
        try:
            life.log.reset_to(100)
        except Exception:
            assert life.log.offline_reason is not None
        life.fs.unlink = unlink  # type: ignore[method-assign]
        life.fs.crash(random.Random(operations))
        life.recover(point)
        assert (life.log.log_start_offset, life.log.log_end_offset) == (100, 100)


def test_an_offline_log_refuses_a_reset(life):
    from kafkalite.errors import LogOfflineError

    life.append(1)
    life.log.offline_reason = "write failed"
    with pytest.raises(LogOfflineError):
        life.log.reset_to(5)
