"""LogDirs: directories have ids, logs are found wherever they are, and a lost directory is not empty."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from kafkalite.errors import DataDirectoryError, LogOfflineError, StorageExhaustedError
from kafkalite.model import NO_BROKER_EPOCH, TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.storage.accept_loss import accept_loss
from kafkalite.storage.checkpoints import KnownDirectory, decode_log_dirs, encode_log_dirs
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.filesystem import Space
from kafkalite.storage.layout import LOG_DIR_FILE, LOG_DIR_STARTS_FILE, LOG_DIRS_FILE
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_dirs import LogDirs
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.mutants import without

A, B, C = "/disks/a", "/disks/b", "/disks/c"
CONFIG = LogConfig()
TPS = [TopicPartition("t", number) for number in range(6)]
TOPIC_ID = f"{1:032x}"
WANTED = dict.fromkeys(TPS, (TOPIC_ID, CONFIG))
RNG = random.Random(1)  # one for all, so that all ids differ


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem(crashable=True)


def open_dirs(fs: Any, *paths: str, wanted: Any = None, **how: Any) -> LogDirs:
    settings = {"cluster_id": "c", "node_id": 1, "rng": RNG} | how
    dirs = LogDirs.open(fs, paths or (A, B), **settings)
    dirs.load(WANTED if wanted is None else wanted)
    return dirs


def append(log: Log, count: int = 1, epoch: int = 0) -> None:
    for _ in range(count):
        log.append(bytearray(build_batch([b"x"])), now_ms=0, leader_epoch=epoch)
    work = log.begin_sync()
    assert work is not None
    work.run()
    log.finish_sync(work, None)


def fill(dirs: LogDirs) -> None:
    """Append a record to each log."""
    for tp in TPS:
        log = dirs.get(tp)
        assert log is not None
        append(log)


def log_of(dirs: LogDirs, number: int) -> Log:
    log = dirs.get(TPS[number])
    assert log is not None
    return log


def homes(dirs: LogDirs) -> dict[str, list[int]]:
    return {state.path: [tp.partition for tp in state.logs] for state in dirs.states()}


def ends(dirs: LogDirs) -> list[int]:
    return [log.log_end_offset for tp in TPS if (log := dirs.get(tp)) is not None]


def damaged(dirs: LogDirs) -> list[int]:
    return [tp.partition for tp in TPS if (log := dirs.get(tp)) is not None and log.is_damaged]


def checkpoint(dirs: LogDirs) -> None:
    work = dirs.begin_checkpoint()
    if work is not None:
        work()


class TestPlacing:
    def test_new_logs_are_spread_over_the_directories(self, fs: MemoryFileSystem) -> None:
        assert homes(open_dirs(fs)) == {A: [0, 2, 4], B: [1, 3, 5]}

    def test_new_logs_are_placed_by_free_space(self, fs: MemoryFileSystem) -> None:
        fs.spaces = {A: Space(100, 10), B: Space(100, 60)}
        dirs = open_dirs(fs, wanted={})
        for tp in TPS:
            dirs.create_log(tp, TOPIC_ID, CONFIG)
        assert homes(dirs) == {A: [5], B: [0, 1, 2, 3, 4]}

    def test_logs_stay_where_they_are(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        before = homes(dirs)
        dirs.close()
        fs.spaces = {A: Space(100, 0), B: Space(100, 60)}
        again = open_dirs(fs)
        assert (homes(again), ends(again)) == (before, [1] * len(TPS))

    def test_a_second_directory_can_be_added(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs, A)
        fill(dirs)
        dirs.close(broker_epoch=7)
        again = open_dirs(fs, A, B)
        assert (again.clean_start, again.last_broker_epoch) == (True, 7)
        assert homes(again) == {A: list(range(6)), B: []}
        again.create_log(TopicPartition("u", 0), f"{2:032x}", CONFIG)
        assert again.path_of(TopicPartition("u", 0)) == B

    def test_one_directory_is_as_before(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs, A)
        assert not dirs.are_several
        assert dirs.probes() == {}
        dirs.close()
        assert not {LOG_DIRS_FILE, LOG_DIR_FILE, LOG_DIR_STARTS_FILE} & set(fs.list_dir(A))

    def test_the_checkpoints_of_all_directories_are_written(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        work = dirs.begin_checkpoint()
        assert work is not None
        work()
        assert dirs.begin_checkpoint() is None
        dirs.close(clean=False)
        assert (ends(open_dirs(fs))) == [1] * len(TPS)


class TestIdentity:
    """R80"""

    def test_a_directory_of_another_node_is_refused(self, fs: MemoryFileSystem) -> None:
        open_dirs(fs, A, B).close()
        other = MemoryFileSystem()
        open_dirs(fs, C, "/disks/d", node_id=2).close()
        with pytest.raises(DataDirectoryError, match=f"{B} belongs to node 1, not 2"):
            open_dirs(fs, C, B, node_id=2)
        with pytest.raises(DataDirectoryError, match=f"{C} is the first data directory of node 2"):
            open_dirs(fs, A, C)
        open_dirs(other, A, B, cluster_id="d").close()

    def test_a_directory_of_another_cluster_is_refused(self, fs: MemoryFileSystem) -> None:
        open_dirs(fs, A, B).close()
        open_dirs(fs, C, cluster_id="d").close()
        with pytest.raises(DataDirectoryError, match=f"{B} belongs to cluster c, not d"):
            open_dirs(fs, C, B, cluster_id=None)

    def test_the_first_directory_in_another_place_is_refused(self, fs: MemoryFileSystem) -> None:
        open_dirs(fs, A, B).close()
        with pytest.raises(DataDirectoryError, match=f"{B} is a further data directory of a node") as refused:
            open_dirs(fs, B, A, C)
        assert "first in log.dirs" in refused.value.hint
        assert fs.locked == set()

    def test_a_replaced_first_directory_is_not_formatted_beside_logs(self, fs: MemoryFileSystem) -> None:
        open_dirs(fs, A, B).close()
        fs.replace_disk(A)
        with pytest.raises(
            DataDirectoryError, match=f"{A} has no node.json, but {B} has logs of node 1"
        ) as refused:
            open_dirs(fs, A, B)
        assert "kl server format --data /disks/a --cluster-id c --node-id 1" in refused.value.hint

    def test_a_directory_that_is_given_twice_is_refused(self, tmp_path: Any) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "b")
        paths = [str(tmp_path / name) for name in ("a", "b", "link")]
        with pytest.raises(DataDirectoryError, match="are the same data directory"):
            LogDirs.open(RealFileSystem(), paths, node_id=1)
        LogDirs.open(RealFileSystem(), paths[:2], node_id=1).close()

    def test_further_directories_may_change_places(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs, A, B, C)
        fill(dirs)
        before = homes(dirs)
        dirs.close(broker_epoch=3)
        again = open_dirs(fs, A, C, B)
        assert homes(again) == before
        assert (again.clean_start, again.last_broker_epoch) == (True, 3)

    def test_the_list_is_read_back(self) -> None:
        known = [KnownDirectory("0" * 32, 4, "/a directory/b"), KnownDirectory("1" * 32, 1, "/c")]
        assert decode_log_dirs(encode_log_dirs(known), "x") == known


class TestLostDirectory:
    """R82"""

    def test_the_logs_of_a_replaced_directory_are_damaged(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close(broker_epoch=7)
        fs.replace_disk(B)
        again = open_dirs(fs)
        assert damaged(again) == [1, 3, 5]
        assert homes(again) == {A: [0, 2, 4], B: [1, 3, 5]}
        assert (again.clean_start, again.last_broker_epoch) == (False, 7)

    def test_that_is_so_after_further_starts_too(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.replace_disk(B)
        for clean in (False, True, False):
            again = open_dirs(fs)
            assert damaged(again) == [1, 3, 5]
            again.close(clean=clean)

    def test_a_start_that_ended_before_the_logs_were_loaded_changes_nothing(
        self, fs: MemoryFileSystem
    ) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.replace_disk(B)
        LogDirs.open(fs, [A, B], node_id=1).close(clean=False)
        some = LogDirs.open(fs, [A, B], node_id=1)
        some.load({TPS[1]: WANTED[TPS[1]]}, are_all=False)
        some.close(clean=False)
        assert damaged(open_dirs(fs)) == [1, 3, 5]

    def test_a_removed_directory_is_a_lost_one(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        again = open_dirs(fs, A)
        assert damaged(again) == [1, 3, 5]
        assert homes(again) == {A: [0, 1, 2, 3, 4, 5]}

    def test_a_damaged_log_is_replaced_in_the_new_directory(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.replace_disk(B)
        again = open_dirs(fs)
        exchange = again.begin_replace(TPS[1])
        exchange.run()
        exchange.finish(CONFIG)
        log = again.create_log(TPS[1], TOPIC_ID, CONFIG)
        assert (log.log_end_offset, again.path_of(TPS[1])) == (0, B)
        append(log)
        again.close()
        assert damaged(open_dirs(fs)) == [3, 5]

    @pytest.mark.parametrize("known_end", [0, 7])
    def test_the_loss_of_an_only_copy_can_be_accepted(self, fs: MemoryFileSystem, known_end: int) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.replace_disk(B)
        again = LogDirs.open(fs, [A, B], node_id=1, rng=RNG)
        again.load(WANTED, committed={(TOPIC_ID, 1): known_end})
        again.close()
        for number in (1, 3, 5):
            accept_loss(fs, f"{B}/{TOPIC_ID}-{number}")
        after = open_dirs(fs)
        assert (damaged(after), ends(after)) == ([], [1, known_end, 1, 0, 1, 0])
        append(log_of(after, 1))

    def test_a_damaged_list_of_directories_hides_no_loss(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.replace_disk(B)
        fs.write_atomically(f"{A}/{LOG_DIRS_FILE}", b"garbage")
        assert damaged(open_dirs(fs)) == [1, 3, 5]

    def test_a_missing_list_of_directories_hides_no_loss(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs, A, B, C)
        fill(dirs)
        dirs.close()
        fs.replace_disk(C)
        fs.unlink(f"{A}/{LOG_DIRS_FILE}")
        again = open_dirs(fs, A, B, C)
        assert damaged(again) == [2, 5]
        assert not again.clean_start

    def test_a_log_is_new_if_nothing_is_lost(self, fs: MemoryFileSystem) -> None:
        open_dirs(fs, wanted={}).close()
        dirs = open_dirs(fs)
        assert (damaged(dirs), ends(dirs)) == ([], [0] * len(TPS))

    def test_the_mutant_begins_with_empty_logs(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.replace_disk(B)
        with without("R82-lost-is-new"):
            assert damaged(open_dirs(fs)) == []


class TestFailedDirectory:
    """R81"""

    def test_a_directory_that_cannot_be_opened_takes_only_its_logs(
        self, fs: MemoryFileSystem, caplog: pytest.LogCaptureFixture
    ) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close(broker_epoch=7)
        fs.fail_disk(B)
        again = open_dirs(fs)
        assert homes(again) == {A: [0, 2, 4], B: []}
        assert ends(again) == [1, 1, 1]
        assert "data directory not opened" in caplog.text
        assert not again.clean_start
        with pytest.raises(LogOfflineError, match=f"may be in the data directory {B}, which has failed"):
            again.create_log(TPS[1], TOPIC_ID, CONFIG)
        other = TopicPartition("new", 0)
        again.create_log(other, f"{2:032x}", CONFIG)
        assert again.path_of(other) == A
        again.close()
        fs.heal()
        healed = open_dirs(fs)
        assert (damaged(healed), ends(healed)) == ([], [1] * len(TPS))

    def test_a_disk_that_fails_takes_only_its_logs(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        fs.fail_disk(B)
        probes = dirs.probes()
        probes[A]()
        with pytest.raises(OSError, match="simulated failure"):
            probes[B]()
        assert dirs.fail(B, "EIO") == [TPS[1], TPS[3], TPS[5]]
        reasons = [log.offline_reason for tp in TPS if (log := dirs.get(tp)) is not None]
        assert [reason is None for reason in reasons] == [True, False] * 3
        assert reasons[1] == f"the data directory {B} has failed: EIO"
        assert list(dirs.probes()) == [A]
        dirs.close(broker_epoch=7)
        fs.heal()
        again = open_dirs(fs)
        assert (again.clean_start, damaged(again), ends(again)) == (False, [], [1] * len(TPS))

    @pytest.mark.parametrize("is_recorded", [True, False])
    @pytest.mark.parametrize("fails_first", [True, False])
    def test_a_log_that_is_opened_again_does_not_begin_empty_elsewhere(
        self, fs: MemoryFileSystem, is_recorded: bool, fails_first: bool
    ) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        if is_recorded:
            work = dirs.begin_checkpoint()
            assert work is not None
            work()
        if not fails_first:
            dirs.release_log(TPS[1])
        fs.fail_disk(B)
        dirs.fail(B, "EIO")
        if fails_first:
            dirs.release_log(TPS[1])
        with pytest.raises(LogOfflineError, match=f"may be in the data directory {B}, which has failed"):
            dirs.create_log(TPS[1], TOPIC_ID, CONFIG)

    def test_a_log_that_lacked_disk_space_at_the_start_does_not_begin_empty_elsewhere(
        self, fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close(clean=False)
        again = LogDirs.open(fs, [A, B], node_id=1)

        def lack(*_arguments: Any, **_settings: Any) -> Any:
            raise StorageExhaustedError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(Log, "begin_recovery", lack)
            with pytest.raises(StorageExhaustedError):
                again.create_log(TPS[1], TOPIC_ID, CONFIG)
        fs.fail_disk(B)
        again.fail(B, "EIO")
        with pytest.raises(LogOfflineError, match="which has failed"):
            again.create_log(TPS[1], TOPIC_ID, CONFIG)

    def test_a_log_that_must_be_opened_again_is_offline_if_its_disk_fails(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        log = dirs.get(TPS[1])
        assert log is not None
        log.must_reopen = True
        dirs.fail(B, "EIO")
        assert not log.must_reopen

    def test_a_log_that_has_left_a_failed_disk_is_opened_again(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        copy = dirs.begin_copy(TPS[1], A)
        copy.begin(copy.read(1))
        copy.append(copy.read(), 0)
        copy.source.freeze()
        dirs.complete_copy(copy)
        dirs.replace_by_copy(TPS[1], copy)
        fs.fail_disk(B)
        dirs.fail(B, "EIO")
        dirs.release_log(TPS[1])
        assert dirs.create_log(TPS[1], TOPIC_ID, CONFIG).log_end_offset == 1

    def test_a_full_disk_has_not_failed(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fs.capacity_bytes = fs.used_bytes()
        for probe in dirs.probes().values():
            probe()


class TestOlderCopy:
    """R83"""

    def test_an_older_copy_of_one_directory_is_noticed(
        self, fs: MemoryFileSystem, caplog: pytest.LogCaptureFixture
    ) -> None:
        open_dirs(fs).close()
        older = fs.read_bytes(f"{B}/{LOG_DIR_STARTS_FILE}")
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close(broker_epoch=7)
        fs.write_atomically(f"{B}/{LOG_DIR_STARTS_FILE}", older)
        with caplog.at_level(logging.ERROR):
            again = open_dirs(fs)
        assert "data directory may be an older copy" in caplog.text
        assert (again.is_from_older_copy(TPS[1]), again.is_from_older_copy(TPS[0])) == (True, False)
        assert not again.clean_start

    def older(self, fs: MemoryFileSystem) -> None:
        """Leave directories of which B may be an older copy."""
        open_dirs(fs).close()
        older = fs.read_bytes(f"{B}/{LOG_DIR_STARTS_FILE}")
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        fs.write_atomically(f"{B}/{LOG_DIR_STARTS_FILE}", older)

    def test_an_older_copy_is_noticed_until_its_logs_were_fetched_again(self, fs: MemoryFileSystem) -> None:
        self.older(fs)
        for clean in (True, False, True):
            dirs = open_dirs(fs)
            assert dirs.is_from_older_copy(TPS[1])
            dirs.close(clean=clean)
        dirs = open_dirs(fs)
        log = dirs.get(TPS[1])
        assert log is not None
        log.mark_damaged("an older copy")
        dirs.distrust([TPS[1]])
        checkpoint(dirs)
        dirs.close()
        dirs = open_dirs(fs)
        assert dirs.is_from_older_copy(TPS[1])  # nothing was fetched
        log = dirs.get(TPS[1])
        assert log is not None
        log.mark_damaged("an older copy")
        dirs.distrust([TPS[1]])
        exchange = dirs.begin_replace(TPS[1])
        exchange.run()
        exchange.finish(CONFIG)
        append(dirs.create_log(TPS[1], TOPIC_ID, CONFIG))
        checkpoint(dirs)
        assert dirs.is_from_older_copy(TPS[1])  # the damaged log can be put back (R52)
        dirs.keep_replacement(TPS[1])
        checkpoint(dirs)
        dirs.close()
        assert not open_dirs(fs).is_from_older_copy(TPS[1])

    def test_an_older_copy_without_suspect_logs_is_trusted(self, fs: MemoryFileSystem) -> None:
        self.older(fs)
        dirs = open_dirs(fs)
        dirs.distrust([])
        checkpoint(dirs)
        dirs.close()
        assert not open_dirs(fs).is_from_older_copy(TPS[1])

    def test_an_unknown_directory_is_noticed_by_each_start(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close()
        open_dirs(fs, A).close()
        for _ in range(3):
            again = open_dirs(fs)
            assert again.is_from_older_copy(TPS[1])
            again.close()

    def test_a_full_disk_hides_no_older_copy(
        self, fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.older(fs)

        def lack(*_arguments: Any) -> None:
            raise StorageExhaustedError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(LogDirs, "_write_starts", lack)
            open_dirs(fs).close()
        assert open_dirs(fs).is_from_older_copy(TPS[1])

    def test_a_directory_that_missed_starts_is_none(self, fs: MemoryFileSystem) -> None:
        open_dirs(fs).close()
        fs.fail_disk(B)
        for _ in range(3):
            open_dirs(fs).close()
        fs.heal()
        assert not open_dirs(fs).is_from_older_copy(TPS[1])

    def test_a_directory_that_was_not_named_for_a_while_may_be_one(self, fs: MemoryFileSystem) -> None:
        dirs = open_dirs(fs)
        fill(dirs)
        dirs.close(broker_epoch=7)
        open_dirs(fs, A).close(broker_epoch=8)
        again = open_dirs(fs)
        assert (again.is_from_older_copy(TPS[1]), ends(again)) == (True, [1] * len(TPS))
        assert again.last_broker_epoch == NO_BROKER_EPOCH
        work = again.begin_checkpoint()
        assert work is not None
        work()  # A has no record of the logs in B any more
        again.close()
        assert damaged(open_dirs(fs)) == []


class TestTwoLogsOfAPartition:
    """R84"""

    def copied(self, fs: MemoryFileSystem, first: int, second: int) -> LogDirs:
        """Return directories of which A has ``first`` and B ``second`` records of one partition."""
        for path, count in ((A, first), (B, second)):
            fs.spaces = {A: Space(9, 9 * (path == A)), B: Space(9, 9 * (path == B))}
            dirs = open_dirs(fs, wanted={})
            log = dirs.create_log(TPS[0], TOPIC_ID, CONFIG)
            append(log, count)
            dirs.close(clean=False)
            if path == A:
                fs.rename(f"{A}/{TOPIC_ID}-0", f"{A}/hidden")
        fs.rename(f"{A}/hidden", f"{A}/{TOPIC_ID}-0")
        return open_dirs(fs, wanted={TPS[0]: WANTED[TPS[0]]})

    @pytest.mark.parametrize(("first", "second", "home"), [(3, 2, A), (2, 3, B), (2, 2, A)])
    def test_the_longer_log_is_used_and_the_other_one_kept(
        self, fs: MemoryFileSystem, first: int, second: int, home: str
    ) -> None:
        dirs = self.copied(fs, first, second)
        assert dirs.path_of(TPS[0]) == home
        log = dirs.get(TPS[0])
        assert log is not None
        assert log.log_end_offset == max(first, second)
        other = B if home == A else A
        assert f"{TOPIC_ID}-0.damaged-1" in fs.list_dir(other)
        dirs.close()
        assert open_dirs(fs, wanted={TPS[0]: WANTED[TPS[0]]}).path_of(TPS[0]) == home

    def test_a_shorter_sound_log_is_damaged_where_the_longer_damaged_one_continued(
        self, fs: MemoryFileSystem
    ) -> None:
        dirs = self.copied(fs, 3, 2)
        checkpoint(dirs)
        dirs.close(clean=False)
        fs.rename(f"{B}/{TOPIC_ID}-0.damaged-1", f"{B}/{TOPIC_ID}-0")
        (segment,) = [name for name in fs.list_dir(f"{A}/{TOPIC_ID}-0") if name.endswith(".log")]
        file = fs.open(f"{A}/{TOPIC_ID}-0/{segment}")
        file.write_at(30, b"damage")
        file.close()
        for clean in (True, False, True):
            again = open_dirs(fs, wanted={TPS[0]: WANTED[TPS[0]]})
            log = again.get(TPS[0])
            assert log is not None
            assert (again.path_of(TPS[0]), log.log_end_offset, log.is_damaged) == (B, 2, True)
            assert log.damage is not None
            assert log.damage.known_end_offset == 3
            checkpoint(again)
            again.close(clean=clean)
