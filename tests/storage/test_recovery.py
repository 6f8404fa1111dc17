"""R24 and R25: the log that a start finds after a crash."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import CorruptLogError, LogOfflineError
from kafkalite.records.header import seal
from kafkalite.storage.checkpoints import LogState, RecoveryPoint, encode_log_state
from kafkalite.storage.damage import Damage
from kafkalite.storage.filesystem import unlink_existing
from kafkalite.storage.log import TORN_KEPT_MS, Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import tree_of

DIRECTORY = "/data/log"
CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=512, preallocate_min_bytes=1024)
BATCH_BYTES = 161
Batches = list[tuple[int, bytes]]


class World:
    """A log with its written batches, on a disk that can be crashed and damaged."""

    def __init__(self, make_batch: Any, sync: Any, read_all: Any) -> None:
        self.fs = MemoryFileSystem(crashable=True)
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.log = Log.create(self.fs, DIRECTORY, CONFIG)
        self.fs.sync_dir("/data")
        self.written: Batches = []
        self._made = 0  # every batch has another content
        self._make_batch = make_batch
        self._sync = sync
        self._read_all = read_all

    def fill(self, count: int, epoch: int = 1) -> None:
        for _ in range(count):
            batch = self._make_batch(seed=self._made, timestamp_ms=1000 + len(self.written))
            self._made += 1
            self.log.append(batch, now_ms=1, leader_epoch=epoch)
            self.written.append((len(self.written), bytes(batch)))

    def sync(self) -> RecoveryPoint:
        self._sync(self.log)
        return self.log.recovery_point

    def path(self, base_offset: int = 0, suffix: str = ".log") -> str:
        return f"{DIRECTORY}/{base_offset:020d}{suffix}"

    def drop_indexes(self) -> None:
        for name in self.fs.list_dir(DIRECTORY):
            if name.endswith("index"):
                self.fs.unlink(f"{DIRECTORY}/{name}")

    def damage(self, position: int, base_offset: int = 0, data: bytes = b"\xff") -> None:
        self.fs.open(self.path(base_offset)).write_at(position, data)

    def recover(self, point: RecoveryPoint | None = None, *, is_killed: bool = False) -> Log:
        """Recover after a power loss, or after the end of the process only."""
        return Log.recover(self.fs, DIRECTORY, CONFIG, point, may_lack_unsynced=not is_killed)

    def damage_of(
        self, point: RecoveryPoint | None = None, *, match: str = "", is_killed: bool = False
    ) -> Damage:
        """Recover a damaged log, and check that its sound part can be read and its files are unchanged."""
        before = tree_of(self.fs)
        log = self.recover(point, is_killed=is_killed)
        damage = log.damage
        assert damage is not None
        assert re.search(match, damage.cause), damage.cause
        assert log.log_end_offset == damage.sound_end_offset
        assert self.contents(log) == self.written[: damage.sound_end_offset]
        assert tree_of(self.fs) == before
        return damage

    def contents(self, log: Log) -> Batches:
        return self._read_all(log)  # type: ignore[no-any-return]


@pytest.fixture
def world(make_batch: Any, sync: Any, read_all: Any) -> World:
    return World(make_batch, sync, read_all)


def test_a_log_that_was_never_written_to_is_empty(world: World) -> None:
    log = world.recover()
    assert (log.log_start_offset, log.log_end_offset, log.segment_count) == (0, 0, 0)


def test_a_killed_process_loses_nothing_and_logs_nothing(world: World, torn_tail_cuts: Any) -> None:
    world.fill(70)
    log = world.recover()
    assert world.contents(log) == world.written
    assert torn_tail_cuts() == []
    allocated_bytes = world.fs.file_size(world.path(50))
    assert allocated_bytes > 20 * BATCH_BYTES, "the space allocated ahead is for what comes next"
    log.close(clean=True)
    assert world.fs.file_size(world.path(50)) == 20 * BATCH_BYTES


@pytest.mark.parametrize("cut", [8, 60, 61, 62, 160])
def test_a_torn_tail_is_cut_with_one_event(cut: int, world: World, torn_tail_cuts: Any) -> None:
    world.fill(10)
    world.damage(9 * BATCH_BYTES + cut, data=bytes(BATCH_BYTES - cut))
    log = world.recover()
    assert world.contents(log) == world.written[:9]
    (event,) = torn_tail_cuts()
    assert "offset=9 " in event and f"position={9 * BATCH_BYTES}" in event and world.path() in event
    assert world.recover().log_end_offset == 9
    assert len(torn_tail_cuts()) == 1, "the next recovery finds nothing to cut"


def test_an_intact_batch_behind_a_torn_one_is_cut_too(world: World, torn_tail_cuts: Any) -> None:
    world.fill(60)
    world.damage(20 * BATCH_BYTES + 100)
    log = world.recover(RecoveryPoint(20))
    assert world.contents(log) == world.written[:20]
    assert [name for name in world.fs.list_dir(DIRECTORY) if name.endswith(".log")] == [world.path()[-24:]]
    assert "segments_removed=2" in torn_tail_cuts()[0]
    kept = [name for name in world.fs.list_dir(DIRECTORY) if ".torn-" in name]
    assert len(kept) == 3, "no intact byte is deleted"
    assert world.written[59][1] in b"".join(world.fs.read_bytes(f"{DIRECTORY}/{name}") for name in kept)


def test_a_tail_that_was_cut_never_comes_back(world: World, make_batch: Any) -> None:
    world.fill(30)
    world.damage(10 * BATCH_BYTES + 100)
    log = world.recover()
    assert log.log_end_offset == 10
    for seed in range(20):
        copy = MemoryFileSystem(crashable=True)
        copy._root = world.fs._root
        copy.crash(random.Random(seed))
        assert Log.recover(copy, DIRECTORY, CONFIG).log_end_offset == 10


def test_r24_damage_below_the_recovery_point_is_reported_and_nothing_changes(
    world: World, torn_tail_cuts: Any
) -> None:
    world.fill(30)
    world.drop_indexes()
    world.damage(10 * BATCH_BYTES + 100)
    before = tree_of(world.fs)
    damage = world.damage_of(
        RecoveryPoint(11), match=f"damaged at position {10 * BATCH_BYTES}: expected an intact batch"
    )
    assert (damage.sound_end_offset, damage.records_in_doubt) == (10, 1)
    assert tree_of(world.fs) == before
    assert torn_tail_cuts() == []


def test_r24_an_end_below_the_recovery_point_is_damage(world: World) -> None:
    world.fill(10)
    world.fs.open(world.path()).truncate(9 * BATCH_BYTES)
    damage = world.damage_of(RecoveryPoint(10), match="batches up to offset 10")
    assert (damage.sound_end_offset, damage.records_in_doubt) == (9, 1)
    assert world.recover(RecoveryPoint(9)).log_end_offset == 9


def test_r24_a_missing_segment_below_the_recovery_point_is_damage(world: World) -> None:
    world.fill(80)
    world.fs.unlink(world.path(25))
    damage = world.damage_of(RecoveryPoint(30))
    assert (damage.sound_end_offset, damage.records_in_doubt) == (25, 25)
    world.fs.unlink(world.path())
    damage = world.damage_of(RecoveryPoint(80))
    assert (damage.sound_end_offset, damage.records_in_doubt) == (0, 50)
    for base_offset in (50, 75):
        world.fs.unlink(world.path(base_offset))
    damage = world.damage_of(RecoveryPoint(80))
    assert (damage.sound_end_offset, damage.records_in_doubt) == (0, 80)
    assert world.recover().log_end_offset == 0


def test_a_missing_segment_above_the_recovery_point_is_a_torn_tail(world: World, torn_tail_cuts: Any) -> None:
    world.fill(60)
    world.fs.unlink(world.path(25))
    log = world.recover(RecoveryPoint(20))
    assert world.contents(log) == world.written[:25]
    assert "base offset 50" in torn_tail_cuts()[0]


def test_an_unproven_log_without_its_first_segment_is_empty(world: World, torn_tail_cuts: Any) -> None:
    world.fill(30)
    world.fs.unlink(world.path())
    assert world.recover().log_end_offset == 0
    assert len(torn_tail_cuts()) == 1


def test_r24_a_closed_segment_is_proven_by_its_index_without_a_checkpoint(world: World) -> None:
    world.fill(60)
    world.sync()
    world.damage(3 * BATCH_BYTES + 100, base_offset=25)
    log = world.recover()  # not read by the start; a reader finds the wrong CRC
    assert log.log_end_offset == 60
    world.fs.open(world.path(25)).truncate(3 * BATCH_BYTES)
    world.fs.unlink(world.path(50))
    damage = world.damage_of()
    assert (damage.sound_end_offset, damage.records_in_doubt) == (28, 22)


def test_a_start_reads_only_what_is_not_proven(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill(200)
    point = world.sync()
    world.fill(3)
    opened: list[str] = []
    real = world.fs.open

    def note(path: str, *, create: bool = False) -> Any:
        opened.append(path)
        return real(path, create=create)

    monkeypatch.setattr(world.fs, "open", note)
    log = world.recover(point)
    logs = {path for path in opened if path.endswith(".log")}
    assert len(logs) == 9, "of every closed segment, the CRC fields of two batches are read"
    assert world.contents(log) == world.written


def test_the_active_segment_is_read_from_the_last_saved_index_entry(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kafkalite.storage import recovery

    config = LogConfig(index_interval_bytes=512)
    world.log.reconfigure(config)
    world.fill(400)
    point = world.sync()
    checked: list[int] = []
    real = recovery.check

    def note(batch: memoryview) -> Any:
        header = real(batch)
        checked.append(header.base_offset)
        return header

    monkeypatch.setattr(recovery, "check", note)
    log = Log.recover(world.fs, DIRECTORY, config, point)
    assert 0 < len(checked) < 140, checked[:1]
    assert world.contents(log) == world.written
    assert log.offset_for_timestamp(1004) == (1004, 4)


def test_a_recovery_point_from_before_a_truncation_is_capped(world: World) -> None:
    world.fill(40)
    old = world.sync()
    world.log.truncate_to(30)
    del world.written[30:]
    assert world.contents(world.recover(old)) == world.written
    world.fill(5, epoch=2)
    world.sync()
    assert world.contents(world.recover(old)) == world.written


@pytest.mark.parametrize("is_killed", [True, False])
def test_r24_a_recovery_point_from_before_two_truncations_proves_nothing(
    is_killed: bool, world: World
) -> None:
    world.fill(1)
    old = world.sync()
    world.log.truncate_to(0)
    world.written.clear()
    world.fill(2, epoch=2)
    world.log.truncate_to(1)  # the log's state has only this end, at which the point would still hold
    del world.written[1:]
    log = world.recover(old, is_killed=is_killed)
    assert log.damage is None
    assert world.contents(log) == world.written


def test_r5_epochs_are_rebuilt_if_the_checkpoint_is_missing_or_damaged(world: World) -> None:
    world.fill(30, epoch=1)
    world.fill(30, epoch=4)
    point = world.sync()
    path = f"{DIRECTORY}/leader-epochs"
    for damage in ("missing", "damaged"):
        if damage == "missing":
            world.fs.unlink(path)
        else:
            world.fs.open(path).write_at(3, b"x")
        log = world.recover(point)
        assert log.leader_epochs == [(1, 0), (4, 30)]
        assert world.fs.exists(path)


def test_r5_damage_found_while_rebuilding_epochs_is_raised(world: World) -> None:
    world.fill(60)
    point = world.sync()
    world.fs.unlink(f"{DIRECTORY}/leader-epochs")
    world.damage(16, data=b"\x07")
    world.damage_of(point, match="position 0")


def test_r5_a_clean_log_without_a_checkpoint_rebuilds_its_epochs(world: World) -> None:
    world.fill(30, epoch=1)
    world.fill(3, epoch=2)
    world.log.close(clean=True)
    world.fs.unlink(f"{DIRECTORY}/leader-epochs")
    end = world.log.clean_end
    assert end is not None
    assert Log.open_clean(world.fs, DIRECTORY, CONFIG, end).leader_epochs == [(1, 0), (2, 30)]


def test_an_epoch_without_batches_is_forgotten(world: World) -> None:
    world.fill(3, epoch=1)
    world.log.start_epoch(2)
    world.sync()
    assert world.recover().leader_epochs == [(1, 0)]


@pytest.mark.parametrize("field", ["offset", "epoch"])
def test_a_batch_with_a_wrong_offset_or_an_older_epoch_is_not_part_of_the_log(
    field: str, world: World, make_batch: Any, torn_tail_cuts: Any
) -> None:
    world.fill(3, epoch=5)
    batch = make_batch(base_offset=9 if field == "offset" else 3, leader_epoch=4 if field == "epoch" else 5)
    world.damage(3 * BATCH_BYTES, data=bytes(batch))
    assert world.recover().log_end_offset == 3
    assert len(torn_tail_cuts()) == 1


def test_zeros_behind_the_last_batch_are_not_a_torn_tail(world: World, torn_tail_cuts: Any) -> None:
    world.fill(3)
    for size in (0, 1, 60, 61, 3_000_000):
        world.fs.open(world.path()).truncate(3 * BATCH_BYTES + size)
        assert world.recover().log_end_offset == 3
    assert torn_tail_cuts() == []


def test_a_few_bytes_that_are_not_zero_are_a_torn_tail(world: World, torn_tail_cuts: Any) -> None:
    world.fill(3)
    world.fs.open(world.path()).truncate(3 * BATCH_BYTES)
    world.damage(3 * BATCH_BYTES, data=b"\0\0x")
    assert world.recover().log_end_offset == 3
    world.damage(3 * BATCH_BYTES + 100, data=b"x")
    assert world.recover().log_end_offset == 3
    assert len(torn_tail_cuts()) == 2


def test_leftovers_and_orphans_are_removed(world: World) -> None:
    world.fill(3)
    for name in (
        "00000000000000000900.index",
        "00000000000000000000.log.deleted",
        "log-state.tmp",
        "keep.txt",
    ):
        world.fs.open(f"{DIRECTORY}/{name}", create=True)
    world.recover()
    names = world.fs.list_dir(DIRECTORY)
    segment = [f"{0:020d}.{suffix}" for suffix in ("index", "log", "timeindex")]
    assert names == [*segment, "keep.txt", "leader-epochs"]


def test_segments_below_the_log_start_are_leftovers_of_a_deletion(world: World) -> None:
    world.fill(80)
    world.sync()
    state = encode_log_state(LogState(log_start_offset=60), "log")
    world.fs.write_atomically(f"{DIRECTORY}/log-state", state)
    log = world.recover()
    assert log.log_start_offset == 60
    assert world.contents(log) == world.written[60:]
    assert not world.fs.exists(world.path()) and not world.fs.exists(world.path(25))


def test_a_log_that_ends_below_its_start_begins_again_there(world: World) -> None:
    world.fill(10)
    world.log.delete_before(10)
    world.fs.open(world.path()).truncate(5 * BATCH_BYTES)
    log = world.recover()
    assert (log.log_start_offset, log.log_end_offset, log.segment_count) == (10, 10, 0)


def test_r25_a_damaged_log_state_is_damage(world: World) -> None:
    world.fill(3)
    world.log.delete_before(1)
    world.fs.open(f"{DIRECTORY}/log-state").write_at(3, b"x")
    with pytest.raises(CorruptLogError, match="log-state"):
        world.recover()
    assert world.recover(RecoveryPoint(3, 0, 1)).log_start_offset == 1, "the recovery point has a copy"
    assert world.recover().log_start_offset == 1


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.integers(0, 10),
    st.lists(st.tuples(st.integers(0, 30 * BATCH_BYTES - 1), st.binary(min_size=1, max_size=40)), max_size=4),
    st.integers(-1, 25),
)
def test_recovery_succeeds_with_any_bytes_above_the_recovery_point(
    make_batch: Callable[..., bytearray],
    sync: Any,
    read_all: Any,
    synced: int,
    scribbles: list[tuple[int, bytes]],
    cut: int,
) -> None:
    """Fuzzing: overwrite bytes anywhere above the recovery point, cut the file anywhere above it."""
    world = World(make_batch, sync, read_all)
    world.fill(20)
    world.drop_indexes()
    floor = synced * BATCH_BYTES
    for position, data in scribbles:
        world.damage(max(position, floor), data=data)
    for number, (_, batch) in enumerate(world.written):  # no CRC covers the leader epochs
        world.fs.open(world.path()).write_at(number * BATCH_BYTES + 12, batch[12:16])
    if cut >= 0:
        world.fs.open(world.path()).truncate(max(cut * BATCH_BYTES + cut, floor))
    log = world.recover(RecoveryPoint(synced))
    assert log.log_end_offset >= synced
    assert world.contents(log) == world.written[: log.log_end_offset]
    again = world.recover(RecoveryPoint(log.log_end_offset))
    assert again.log_end_offset == log.log_end_offset


def test_a_start_with_nothing_unsynced_syncs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill(70)
    point = world.sync()

    def refuse(_path: str) -> None:
        raise AssertionError("nothing is to be synced")

    monkeypatch.setattr(world.fs, "check_sync", refuse)
    monkeypatch.setattr(world.fs, "sync_dir", refuse)
    assert world.contents(world.recover(point)) == world.written


def _remove(world: World, path: str) -> None:
    world.fs.unlink(path)


def _halve(world: World, path: str) -> None:
    world.fs.open(path).truncate(world.fs.file_size(path) // 2)


@pytest.mark.parametrize("spoil", [_remove, _halve])
@pytest.mark.parametrize("with_indexes", [True, False])
@pytest.mark.parametrize("base_offset", [0, 25, 50, 75])
def test_a_closed_segment_that_is_missing_or_short_is_damage(
    spoil: Callable[[World, str], None], with_indexes: bool, base_offset: int, world: World
) -> None:
    """R24: a start does not read proven segments, but checks that they are there."""
    world.fill(110)
    point = world.sync()
    if not with_indexes:
        world.drop_indexes()
    spoil(world, world.path(base_offset))
    damage = world.damage_of(point)
    assert damage.sound_end_offset in (base_offset, base_offset + 12)
    lost = min(25, 110 - base_offset) - (damage.sound_end_offset - base_offset)
    assert damage.records_in_doubt == lost


def test_zeros_behind_a_closed_segment_are_skipped_when_the_epochs_are_rebuilt(world: World) -> None:
    """The process was killed after a roll, before the cut of the old file was durable; then the power
    failed."""
    world.fill(40)
    world.log.roll()
    point = world.sync()
    (first, *_), path = world.log._segments.segments, world.path(0)
    size = first.size_bytes
    world.drop_indexes()
    world.fs.open(path).truncate(size + 500)
    world.fs.unlink(f"{DIRECTORY}/leader-epochs")
    log = world.recover(point)
    read = log.read(0, max_bytes=10 * size, up_to=first.next_offset)
    assert read.size_bytes == log._segments.segments[0].size_bytes == size


# --- R42, R24: a process that ended leaves all that it wrote -----------------------------------------------


def test_r24_an_intact_batch_behind_a_bad_one_is_damage(world: World) -> None:
    world.fill(60)
    world.drop_indexes()
    world.damage(20 * BATCH_BYTES + 100)
    damage = world.damage_of(match="with the intact batch 21 behind it", is_killed=True)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (20, 1)
    assert "kl log accept-loss /data/log" in damage.hint


def test_r24_zeros_with_an_intact_batch_behind_are_damage(world: World) -> None:
    world.fill(20)
    world.damage(5 * BATCH_BYTES, data=bytes(3 * BATCH_BYTES + 50))
    damage = world.damage_of(match="with the intact batch 9 behind it", is_killed=True)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (5, 4)


def test_r24_an_intact_segment_behind_a_bad_place_is_damage(world: World) -> None:
    world.fill(60)
    world.fs.unlink(world.path(25))
    damage = world.damage_of(match="the intact segment 50 behind it", is_killed=True)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (25, 25)


def test_r24_a_bad_batch_of_which_no_byte_is_missing_is_damage(world: World) -> None:
    world.fill(10)
    world.damage(9 * BATCH_BYTES + 80)
    damage = world.damage_of(match="of which no byte is missing", is_killed=True)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (9, 0)


@pytest.mark.parametrize("last", [9, 30], ids=["the first segment", "a later segment"])
@pytest.mark.parametrize("bit", [0, 3, 4, 63])
def test_r24_a_whole_last_batch_with_a_lower_base_offset_is_damage(bit: int, last: int, world: World) -> None:
    """The CRC does not cover the base offset. Bit 63 makes it negative, bit 0 may raise it by one."""
    world.fill(last)
    world.log.append(world._make_batch(count=2, seed=1000), now_ms=1, leader_epoch=1)
    base = 25 if last > 25 else 0
    world.damage((last - base) * BATCH_BYTES, base, data=(last ^ 1 << bit).to_bytes(8, "big"))
    damage = world.damage_of(match="of which no byte is missing", is_killed=True)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (last, 2)
    assert world.recover().log_end_offset == last, "the system may have lost what was not synced"


def test_r24_a_whole_last_batch_that_ends_with_zeros_is_damage(world: World) -> None:
    world.fill(9)
    batch = bytearray(world._make_batch(seed=1000))
    batch[-4:] = bytes(4)
    seal(batch)
    world.log.append(batch, now_ms=1, leader_epoch=1)
    world.damage(9 * BATCH_BYTES, data=(3).to_bytes(8, "big"))
    assert world.damage_of(is_killed=True).sound_end_offset == 9


def test_r24_a_copy_of_an_earlier_batch_behind_the_last_one_is_cut(world: World, torn_tail_cuts: Any) -> None:
    """The copy takes the place of no batch, and no record is lost with it."""
    world.fill(10)
    world.damage(10 * BATCH_BYTES, data=world.fs.read_bytes(world.path())[: 3 * BATCH_BYTES])
    log = world.recover(is_killed=True)
    assert (log.damage, world.contents(log)) == (None, world.written)
    assert len(torn_tail_cuts()) == 1


@pytest.mark.parametrize("cut", [8, 60, 61, 62, 160])
def test_r24_a_write_that_was_cut_off_is_a_torn_tail_whose_bytes_are_kept(
    cut: int, world: World, torn_tail_cuts: Any
) -> None:
    world.fill(10)
    world.damage(9 * BATCH_BYTES + cut, data=bytes(BATCH_BYTES - cut))
    log = world.recover(is_killed=True)
    assert (log.log_end_offset, log.torn_records, log.damage) == (9, 1, None)
    assert "records_in_doubt=1" in torn_tail_cuts()[0]
    kept = world.fs.read_bytes(f"{DIRECTORY}/{9:020d}.torn-1")
    assert kept == world.written[9][1][:cut].rstrip(b"\0")


@pytest.mark.parametrize("is_killed", [True, False])
def test_bytes_behind_a_closed_segment_are_set_aside(is_killed: bool, world: World) -> None:
    world.fill(70)
    point = world.sync()
    _, closed, end, *_ = sorted(
        int(name[:20]) for name in world.fs.list_dir(DIRECTORY) if name.endswith(".log")
    )
    content = world.fs.read_bytes(world.path(closed))
    world.damage(len(content), closed, data=content)
    world.fs.open(world.path(closed)).sync()
    log = world.recover(point, is_killed=is_killed)
    assert (log.damage, world.contents(log)) == (None, world.written)
    assert world.fs.read_bytes(world.path(closed)) == content
    assert world.fs.read_bytes(f"{DIRECTORY}/{end:020d}.torn-1") == content


def test_torn_tails_are_kept_for_a_while_and_not_more_than_four(world: World) -> None:
    world.fill(24)
    for end in range(23, 14, -1):
        world.damage(end * BATCH_BYTES + 100, data=bytes((24 - end) * BATCH_BYTES))
        log = world.recover(is_killed=True)
        assert log.log_end_offset == end
    kept = [name for name in world.fs.list_dir(DIRECTORY) if ".torn-" in name]
    assert kept == [f"{end:020d}.torn-{24 - end}" for end in (15, 16, 17, 18)]
    assert log.take_retired(0) == log.take_retired(TORN_KEPT_MS - 1) == []
    assert world.fs.exists(f"{DIRECTORY}/{kept[0]}")
    unlink_existing(world.fs, log.take_retired(TORN_KEPT_MS))
    assert not [name for name in world.fs.list_dir(DIRECTORY) if ".torn-" in name]


def test_an_interrupted_truncation_is_finished(world: World) -> None:
    """The process was killed while it overwrote the removed batches with zeros, from the first on."""
    world.fill(20)
    world.log.truncate_to(12)
    world.damage(14 * BATCH_BYTES, data=b"".join(batch for _, batch in world.written[14:]))
    log = world.recover(is_killed=True)
    assert (log.log_end_offset, log.damage) == (12, None)


def test_r42_a_segment_of_another_log_is_damage_and_nothing_of_it_is_read(
    world: World, make_batch: Any, sync: Any, read_all: Any
) -> None:
    other = World(make_batch, sync, read_all)
    for number in range(30):
        batch = make_batch(seed=1000 + number, timestamp_ms=5)
        other.log.append(batch, now_ms=1, leader_epoch=1)
    world.fill(30)
    point = world.sync()
    for count in (30, 10):  # as long as the own segment, or shorter
        for base_offset in (0, 25):
            tree = tree_of(world.fs)
            foreign = other.fs.read_bytes(other.path(base_offset))
            world.fs.write_atomically(world.path(base_offset), foreign[: count * BATCH_BYTES])
            damage = world.damage_of(point, is_killed=True)
            assert damage.sound_end_offset == base_offset
            world.fs.write_atomically(world.path(base_offset), tree[world.path(base_offset)])
    assert world.recover(point, is_killed=True).damage is None


def _exchange(fs: MemoryFileSystem, one: str, other: str) -> None:
    content, other_content = fs.read_bytes(one), fs.read_bytes(other)
    fs.write_atomically(one, other_content)
    fs.write_atomically(other, content)


@pytest.mark.parametrize("is_killed", [True, False])
def test_r42_a_segment_of_another_log_is_found_before_any_recovery_point(
    is_killed: bool, world: World, make_batch: Any
) -> None:
    """Neither log was ever synced; each index names the first batch."""
    other = Log.create(world.fs, "/data/other", CONFIG)
    for number in range(30):
        other.append(make_batch(seed=1000 + number, timestamp_ms=5), now_ms=1, leader_epoch=1)
    world.fill(30)
    for base_offset in (0, 25, 0, 25):  # a recovery in between keeps the names
        paths = world.path(base_offset), f"/data/other/{base_offset:020d}.log"
        _exchange(world.fs, *paths)
        damage = world.damage_of(match="the first batch that its index names", is_killed=is_killed)
        assert damage.sound_end_offset == base_offset
        _exchange(world.fs, *paths)
        assert world.contents(world.recover(is_killed=is_killed)) == world.written


def test_r42_a_first_batch_that_was_lost_is_damage_if_only_the_process_ended(world: World) -> None:
    world.fill(30)
    content = world.fs.read_bytes(world.path(25))
    world.fs.open(world.path(25)).write_at(0, bytes(len(content)))
    assert world.damage_of(is_killed=True).sound_end_offset == 25
    world.fs.unlink(world.path(25))
    assert world.damage_of(match="found no file", is_killed=True).sound_end_offset == 25
    log = world.recover()
    assert log.log_end_offset == 25, "the system may have lost what was not synced"


def test_r24_a_lost_segment_is_reported_after_a_restart_of_the_system(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the index of the last segment is there. The recovery point shows whether records were synced."""
    world.fill(25)
    before = world.sync()
    world.fill(5)
    after = world.sync()
    world.fs.unlink(world.path(25))
    damage = world.damage_of(after, match="batches up to offset 30")
    assert (damage.sound_end_offset, damage.records_in_doubt) == (25, 5)
    log = world.recover(before)
    assert (log.damage, log.log_end_offset, log.torn_records) == (None, 25, 1)
    events = [one.getMessage() for one in caplog.records if "torn tail" in one.getMessage()]
    assert len(events) == 1 and world.path(25) in events[0] and "offset=25" in events[0]
    assert world.recover(before).torn_records == 0, "the index is gone"


def test_r42_an_index_that_an_interrupted_truncation_has_left_names_nothing(world: World) -> None:
    world.fill(30)
    world.log._write_state(LogState(0, 1, 5))
    world.fs.unlink(world.path(25))
    log = world.recover(is_killed=True)
    assert log.damage is None
    assert world.contents(log) == world.written[:25]


def test_r42_batches_that_take_the_place_of_others_are_named_again(world: World) -> None:
    """No order of truncations, torn tails and ends of the process makes an honest log a damaged one."""
    world.fill(3)
    world.log.truncate_to(0)
    world.written.clear()
    assert world.recover(is_killed=True).damage is None
    world.fill(4, epoch=2)
    world.log.truncate_to(2)
    del world.written[2:]
    world.log = world.recover(is_killed=True)
    assert world.contents(world.log) == world.written
    world.fs.open(world.path()).write_at(0, bytes(world.fs.file_size(world.path())))
    world.log = world.recover()  # after a restart of the system
    assert world.log.log_end_offset == 0
    world.written.clear()
    assert world.recover(is_killed=True).damage is None
    world.fill(5, epoch=3)
    assert world.contents(world.recover(is_killed=True)) == world.written
    world.fs.open(world.path()).write_at(0, bytes(BATCH_BYTES))
    assert world.recover(is_killed=True).damage is not None


@pytest.mark.parametrize("operation", ["delete", "flip", "cut", "swap"])
def test_r42_a_damaged_index_costs_no_record(operation: str, world: World, make_batch: Any) -> None:
    other = Log.create(world.fs, "/data/other", CONFIG)
    other.append(make_batch(seed=1000), now_ms=1, leader_epoch=1)
    world.fill(10)
    path = world.path(suffix=".index")
    if operation == "delete":
        world.fs.unlink(path)
    elif operation == "swap":
        _exchange(world.fs, path, "/data/other/00000000000000000000.index")
    else:
        file = world.fs.open(path)
        file.truncate(20) if operation == "cut" else file.write_at(33, b"\xff")
    world.log = world.recover(is_killed=True)
    assert world.contents(world.log) == world.written
    world.fill(1)  # the first append names the first batch again
    world.fs.open(world.path()).write_at(17, b"\xff")
    assert world.recover(is_killed=True).damage is not None


@pytest.mark.parametrize("seed", range(40))
def test_r42_no_history_makes_an_honest_log_a_damaged_one(
    seed: int, make_batch: Any, sync: Any, read_all: Any
) -> None:
    """Appends, syncs, truncations, ends of the process and power losses, in random order."""
    world, rng = World(make_batch, sync, read_all), random.Random(seed)
    for epoch in range(1, 25):
        match rng.randrange(7):
            case 0 | 1:
                world.fill(rng.choice((1, 2, 30)), epoch)
            case 2:
                world.sync()
            case 3:
                end = world.log.truncate_to(rng.choice((0, 1, world.log.log_end_offset // 2)))
                del world.written[end:]
            case 4:
                world.log.reset_to(0)
                world.written.clear()
            case 5:
                world.log = world.recover(is_killed=True)
                assert world.contents(world.log) == world.written
            case _:
                world.fs.crash(rng)
                world.log = world.recover()
                del world.written[world.log.log_end_offset :]
        assert world.log.damage is None
        assert world.contents(world.log) == world.written
        active = world.log._active
        if active is not None and active.size_bytes:
            assert active.saved_head_crc() == active.fingerprint(0).head_crc


def test_r42_an_older_version_of_the_active_segment_is_damage(world: World) -> None:
    world.fill(10)
    older = world.fs.read_bytes(world.path())
    world.fill(10)
    point = world.sync()
    world.fs.write_atomically(world.path(), older)
    damage = world.damage_of(point, is_killed=True)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (10, 10)


def test_r42_the_indexes_of_another_log_are_ignored(
    world: World, make_batch: Any, sync: Any, read_all: Any
) -> None:
    fs = MemoryFileSystem()
    other = Log.create(fs, "/data/other", CONFIG)
    for number in range(60):
        other.append(make_batch(seed=number), now_ms=1, leader_epoch=1)
    sync(other)
    world.fill(60)
    point = world.sync()
    for suffix in (".index", ".timeindex"):
        world.fs.write_atomically(world.path(25, suffix), fs.read_bytes(f"/data/other/{25:020d}{suffix}"))
    log = world.recover(point, is_killed=True)
    assert log.damage is None
    assert world.contents(log) == world.written


@pytest.mark.parametrize("base_offset", [0, 25, 50])
@pytest.mark.parametrize("is_synced", [True, False])
def test_r42_a_segment_with_its_indexes_of_another_log_is_damage(
    base_offset: int, is_synced: bool, world: World, make_batch: Any, sync: Any
) -> None:
    fs = MemoryFileSystem()
    other = Log.create(fs, "/data/other", CONFIG)
    for number in range(60):
        other.append(make_batch(seed=1000 + number), now_ms=1, leader_epoch=1)
    sync(other)
    world.fill(60)
    point = world.sync() if is_synced else None
    for suffix in (".log", ".index", ".timeindex"):
        content = fs.read_bytes(f"/data/other/{base_offset:020d}{suffix}")
        world.fs.write_atomically(world.path(base_offset, suffix), content)
    assert world.damage_of(point, is_killed=True).sound_end_offset == base_offset


def test_r42_the_indexes_of_two_segments_that_were_exchanged_are_rebuilt(world: World) -> None:
    world.fill(90)
    point = world.sync()
    saved = {name: world.fs.read_bytes(f"{DIRECTORY}/{name}") for name in world.fs.list_dir(DIRECTORY)}
    for suffixes in ([".index", ".timeindex"], [".index"]):
        for base_offset in (0, 50, 75):
            for name in filter(lambda name: name.endswith("index"), saved):
                world.fs.write_atomically(f"{DIRECTORY}/{name}", saved[name])
            for suffix in suffixes:
                _exchange(world.fs, world.path(25, suffix), world.path(base_offset, suffix))
            log = world.recover(point, is_killed=True)
            assert log.damage is None
            assert world.contents(log) == world.written


def test_r42_a_log_state_of_another_log_or_an_older_one_is_replaced(world: World) -> None:
    world.fill(10)
    world.log.delete_before(2)
    older = world.fs.read_bytes(f"{DIRECTORY}/log-state")
    world.log.delete_before(4)
    point = world.sync()
    for content in (older, encode_log_state(LogState(9), "another"), None):
        if content is None:
            world.fs.unlink(f"{DIRECTORY}/log-state")
        else:
            world.fs.write_atomically(f"{DIRECTORY}/log-state", content)
        log = world.recover(point, is_killed=True)
        assert (log.log_start_offset, log.log_end_offset, log.damage) == (4, 10, None)
        assert world.recover().log_start_offset == 4


def test_r43_a_bad_batch_is_found_when_it_is_first_read(world: World) -> None:
    world.fill(80)
    world.log.close(clean=True)
    end = world.log.clean_end
    assert end is not None
    world.damage(3 * BATCH_BYTES + 100, base_offset=25)
    log = Log.open_clean(world.fs, DIRECTORY, CONFIG, end)
    assert log.read(0, max_bytes=10 * BATCH_BYTES, up_to=80).next_offset == 10
    assert log.read(60, max_bytes=10 * BATCH_BYTES, up_to=80).next_offset == 70
    with pytest.raises(LogOfflineError, match=r"an intact batch.*sound below offset 28, at least 1 records"):
        log.read(25, max_bytes=10 * BATCH_BYTES, up_to=80)
    assert log.read(25, max_bytes=10 * BATCH_BYTES, up_to=80).next_offset == 28


def test_r43_every_batch_is_checked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from kafkalite.storage import segment

    checked: list[int] = []
    real = segment.check

    def note(batch: memoryview) -> Any:
        header = real(batch)
        checked.append(header.base_offset)
        return header

    monkeypatch.setattr(segment, "check", note)
    world.fill(80)
    assert world.contents(world.log) == world.written
    assert checked == [], "batches of this session were checked when they were appended"
    world.log.close(clean=True)
    end = world.log.clean_end
    assert end is not None
    log = Log.open_clean(world.fs, DIRECTORY, CONFIG, end)
    for offset in (30, 10, 20, 60, 10, 0):
        log.read(offset, max_bytes=10 * BATCH_BYTES, up_to=80)
    assert world.contents(log) == world.written
    assert world.contents(log) == world.written
    assert set(checked) == set(range(80))
    assert len(checked) < 120
