from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kafkalite.errors import DataDirectoryError, DiskFullError, LogOfflineError, WrongFileTypeError
from kafkalite.model import NO_BROKER_EPOCH, TopicPartition
from kafkalite.storage import recovery, segment
from kafkalite.storage.accept_loss import accept_loss
from kafkalite.storage.checkpoints import decode_recovery_points, encode_recovery_points
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.inspect import verify_data_dir
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore, format_data_dir, read_identity
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of
from proof.recording_filesystem import RecordingFileSystem, crash_states

PATH = "/var/data"
CONFIG = LogConfig(segment_bytes=4096, preallocate_min_bytes=1024)
IDS = [f"{number:032x}" for number in range(10)]
ORDERS = TopicPartition("orders", 0)
TRADES = TopicPartition("trades", 1)
WANTED = {ORDERS: (IDS[0], CONFIG), TRADES: (IDS[1], CONFIG)}


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem(crashable=True)


def open_store(fs: Any, wanted: Any = None, **how: Any) -> LogStore:
    settings = {"cluster_id": "c", "node_id": 1, "rng": random.Random(1)} | how
    store = LogStore.open(fs, PATH, **settings)
    store.load(WANTED if wanted is None else wanted)
    return store


def offline(store: LogStore) -> dict[TopicPartition, str]:
    """{topic and partition: reason} of the logs that are offline."""
    return {tp: log.offline_reason for tp, log in store.logs().items() if log.offline_reason is not None}


def replace_damaged(store: LogStore) -> Log:
    exchange = store.begin_replace(ORDERS)
    exchange.run()
    exchange.finish(CONFIG)
    return store.create_log(ORDERS, IDS[0], CONFIG)


def reinstate_damaged(store: LogStore) -> Log:
    exchange = store.begin_reinstate(ORDERS)
    exchange.run()
    exchange.finish(CONFIG)
    return get(store)


def get(store: LogStore, tp: TopicPartition = ORDERS) -> Log:
    log = store.get(tp)
    assert log is not None
    return log


@pytest.fixture
def write(make_batch: Any, sync: Any) -> Any:
    def write(log: Log, count: int = 1, *, synced: bool = True) -> None:
        for _ in range(count):
            log.append(make_batch(seed=log.log_end_offset), now_ms=1, leader_epoch=1)
        if synced:
            sync(log)

    return write


def test_a_process_killed_during_recovery_leaves_the_loss_of_a_power_failure_to_the_next_one(
    fs: MemoryFileSystem, write: Any
) -> None:
    """Only a power failure may leave a complete but wrong last batch. It is no damage, however often the
    recovery is interrupted (R24)."""

    def damage_second() -> None:
        file = fs.open(f"{log.directory}/{0:020d}.log")
        file.write_at(first_bytes + 70, b"\xff")

    log = get(open_store(fs))
    write(log)
    first_bytes = log.size_bytes
    write(log, synced=False)
    fs.boot_count += 1
    damage_second()
    for _ in range(2):
        fs.locked.clear()
        LogStore.open(fs, PATH, cluster_id="c", node_id=1)  # and killed before its logs are recovered
    fs.locked.clear()
    log = get(open_store(fs))
    assert (log.offline_reason, log.log_end_offset) == (None, 1)
    write(log, synced=False)
    damage_second()
    fs.locked.clear()  # killed, and the system goes on: it has all bytes
    assert ORDERS in offline(open_store(fs))


# --- identity ------------------------------------------------------------------------------------------


def test_a_directory_is_formatted_once(fs: MemoryFileSystem) -> None:
    identity = format_data_dir(fs, PATH, cluster_id="c", node_id=7, rng=random.Random(1))
    assert identity.cluster_id == "c" and identity.node_id == 7 and len(identity.directory_id) == 32
    assert read_identity(fs, PATH) == identity
    with pytest.raises(DataDirectoryError, match="already formatted"):
        format_data_dir(fs, PATH, cluster_id="c", node_id=7)
    store = LogStore.open(fs, PATH, node_id=7)
    assert store.identity == identity
    assert "node 7" in repr(store)


def test_without_a_cluster_id_a_new_cluster_begins(fs: MemoryFileSystem) -> None:
    first = format_data_dir(fs, "/a", cluster_id=None, node_id=1)
    second = format_data_dir(fs, "/b", cluster_id=None, node_id=1)
    assert first.cluster_id != second.cluster_id
    assert first.directory_id != second.directory_id


def test_a_directory_that_is_not_empty_is_not_formatted(fs: MemoryFileSystem) -> None:
    fs.make_dirs(PATH + "/thesis")
    with pytest.raises(DataDirectoryError, match="thesis"):
        open_store(fs)
    assert fs.list_dir(PATH) == ["thesis"]


@pytest.mark.parametrize(
    ("how", "match"), [({"cluster_id": "other"}, "cluster c, not other"), ({"node_id": 2}, "node 1, not 2")]
)
def test_a_directory_of_another_node_is_refused_and_unchanged(
    how: dict[str, Any], match: str, fs: MemoryFileSystem
) -> None:
    open_store(fs).close()
    before = tree_of(fs)
    with pytest.raises(DataDirectoryError, match=match):
        open_store(fs, **how)
    assert tree_of(fs) == before
    assert open_store(fs).clean_start


def test_another_version_is_refused(fs: MemoryFileSystem) -> None:
    open_store(fs).close()
    path = PATH + "/node.json"
    fs.write_atomically(path, fs.read_bytes(path).replace(b'"format_version": 1', b'"format_version": 9'))
    with pytest.raises(DataDirectoryError, match="version 9"):
        open_store(fs)


def test_formatting_can_be_disabled(fs: MemoryFileSystem) -> None:
    with pytest.raises(DataDirectoryError, match="not formatted"):
        open_store(fs, format_if_empty=False)


def test_an_interrupted_format_can_be_repeated() -> None:
    """After a power loss at any point the directory is formatted completely, or can be formatted again."""
    recording = RecordingFileSystem(MemoryFileSystem(crashable=True))
    identity = format_data_dir(recording, "/a/b/c", cluster_id="c", node_id=1)
    recording.note("returned")
    cut_short = 0
    for state in crash_states(recording.operations):
        disk = disk_with_files(state.files, state.directories)
        found = read_identity(disk, "/a/b/c")
        if found is None:
            assert state.note != "returned", f"formatting is durable: {state.label}"
            cut_short += 1
            again = format_data_dir(disk, "/a/b/c", cluster_id="c", node_id=1)
            assert read_identity(disk, "/a/b/c") == again
        else:
            assert found == identity
    assert cut_short > 1


def test_two_processes_do_not_share_a_directory(fs: MemoryFileSystem, tmp_path: Path) -> None:
    store = open_store(fs)
    with pytest.raises(DataDirectoryError, match="in use"):
        open_store(fs)
    store.close()
    open_store(fs).close()
    disk = RealFileSystem()
    real = LogStore.open(disk, str(tmp_path / "d"), node_id=1)
    with pytest.raises(DataDirectoryError, match="in use by"):
        LogStore.open(disk, str(tmp_path / "d"), node_id=1)
    real.close()
    LogStore.open(disk, str(tmp_path / "d") + "/", node_id=1).close()


# --- starting and stopping -----------------------------------------------------------------------------


def test_r21_a_clean_stop_is_marked_and_the_next_start_removes_the_marker(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    assert not store.clean_start
    write(get(store), 60)
    write(get(store, TRADES), 3, synced=False)
    store.close(broker_epoch=42)
    store.close()
    assert fs.exists(PATH + "/clean-shutdown")
    store = open_store(fs)
    assert store.clean_start
    assert store.last_broker_epoch == 42
    for seed in range(5):
        disk = MemoryFileSystem(crashable=True)
        disk._root = fs._root
        disk.crash(random.Random(seed))
        assert not disk.exists(PATH + "/clean-shutdown"), "removed durably before anything is appended"
    assert len(read_all(get(store))) == 60
    assert len(read_all(get(store, TRADES))) == 3
    store.close(clean=False)
    again = open_store(fs)
    assert not again.clean_start
    assert len(read_all(get(again))) == 60


def test_r21_a_stop_that_could_not_sync_everything_is_not_clean(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    write(get(store), 60)
    write(get(store, TRADES), 3, synced=False)
    fs.fail_next_sync()
    store.close(broker_epoch=42)
    store = open_store(fs)
    assert store.last_broker_epoch == NO_BROKER_EPOCH
    assert len(read_all(get(store))) == 60


def test_a_start_after_a_clean_stop_opens_no_log(
    fs: MemoryFileSystem, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(fs)
    write(get(store), 60)
    store.close()
    touched: list[str] = []
    for name in ("open", "read_bytes", "list_dir"):
        real = getattr(fs, name)
        monkeypatch.setattr(
            fs, name, lambda path, *a, real=real, **k: touched.append(path) or real(path, *a, **k)
        )
    checks = []
    monkeypatch.setattr(segment, "check", checks.append)
    monkeypatch.setattr(recovery, "check", checks.append)
    store = open_store(fs)
    assert get(store).log_end_offset == 60
    assert not get(store).is_open
    assert checks == [], "sizes and fingerprints are compared, no batch is read"
    touched.clear()
    store.checkpoint()
    store.close()
    assert not [path for path in touched if IDS[0] in path]


def test_an_untouched_log_stays_marked_over_many_stops(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    write(get(store), 10)
    store.close()
    for _ in range(3):
        open_store(fs).close()
    open_store(fs, wanted={}).close()
    store = open_store(fs)
    assert len(read_all(get(store))) == 10


def test_a_damaged_marker_is_ignored(fs: MemoryFileSystem, write: Any, read_all: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    store.close()
    fs.open(PATH + "/clean-shutdown").write_at(5, b"x")
    store = open_store(fs)
    assert not store.clean_start
    assert len(read_all(get(store))) == 10


def test_r25_damaged_recovery_points_are_reported_and_the_logs_read_completely(
    fs: MemoryFileSystem, write: Any, read_all: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(fs)
    write(get(store), 10)
    store.close()
    content = b"x" + fs.read_bytes(PATH + "/recovery-points")[1:]
    fs.write_atomically(PATH + "/recovery-points", content)
    for clean in (True, False):
        store = open_store(fs)
        assert "recovery points damaged" in caplog.text
        assert fs.read_bytes(PATH + "/recovery-points.damaged-1") == content
        assert len(read_all(get(store))) == 10
        write(get(store), 1, synced=False)
        assert offline(store) == {}
        store.close(clean=clean)
        fs.write_atomically(PATH + "/recovery-points", content)
        caplog.clear()
        break


def test_r24_a_damaged_log_is_replaced_by_a_new_one_and_its_files_are_kept(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    write(get(store), 10)
    store.checkpoint()
    store.close(clean=False)
    for number in (1, 2):
        fs.open(f"{PATH}/{IDS[0]}-0/00000000000000000000.log").write_at(30, b"damage")
        store = open_store(fs)
        log = replace_damaged(store)
        assert (log.log_end_offset, log.offline_reason) == (0, None)
        sync = store.keep_replacement(ORDERS)
        assert sync is not None
        sync()
        assert fs.exists(f"{PATH}/{IDS[0]}-0.damaged-{number}/00000000000000000000.log")
        write(log, 3)
        store.close(clean=number == 1)
        again = open_store(fs)
        assert not offline(again), "the old recovery point is forgotten"
        assert len(read_all(get(again))) == 3
        assert again.unknown_directories == []
        again.checkpoint()
        again.close(clean=False)


@pytest.mark.parametrize("clean", [False, True])
def test_r52_a_replaced_log_can_be_put_back_also_after_a_restart(
    fs: MemoryFileSystem, write: Any, read_all: Any, clean: bool
) -> None:
    store = open_store(fs)
    write(get(store), 10)
    get(store).mark_damaged("found by a scrub", sound_end_offset=4, records_in_doubt=1)
    write(replace_damaged(store), 3)
    for _ in range(2):
        store.close(clean=clean)
        store = open_store(fs)
        assert store.replaced_end(ORDERS) == 10
        assert len(read_all(get(store))) == 3
    log = reinstate_damaged(store)
    assert (log.log_end_offset, log.is_damaged, store.replaced_end(ORDERS)) == (10, True, None)
    assert fs.exists(f"{PATH}/{IDS[0]}-0.damaged-1/00000000000000000000.log"), "nothing is deleted"
    store.close(clean=clean)
    again = open_store(fs)
    assert len(read_all(get(again))) == 10, "the files have no damage"
    again.close()


def test_r52_a_crash_while_a_log_is_replaced_or_put_back_loses_neither(
    fs: MemoryFileSystem, write: Any
) -> None:
    store = open_store(fs)
    write(get(store), 10)
    get(store).mark_damaged("found by a scrub", sound_end_offset=4)
    replace_damaged(store)
    store.close(clean=False)
    fs.rename(f"{PATH}/{IDS[0]}-0", f"{PATH}/{IDS[0]}-0.damaged-1")  # the first step of ``begin_reinstate``
    store = open_store(fs)
    assert store.replaced_end(ORDERS) == 10
    assert reinstate_damaged(store).log_end_offset == 10
    store.close()


def test_r52_a_replaced_log_of_a_deleted_topic_is_never_put_back(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    get(store).mark_damaged("found by a scrub", sound_end_offset=4)
    replace_damaged(store)
    store.delete_log(ORDERS, IDS[0])
    store.close()
    again = open_store(fs)
    assert again.replaced_end(ORDERS) is None
    assert fs.exists(f"{PATH}/{IDS[0]}-0.damaged-1/00000000000000000000.log")
    again.close()


def test_r24_only_a_damaged_log_is_replaced(fs: MemoryFileSystem) -> None:
    store = open_store(fs)
    with pytest.raises(AssertionError, match="not damaged"):
        replace_damaged(store)


def test_r25_before_the_metadata_is_complete_no_directory_is_unknown(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    write(get(store), 2)
    store.close(clean=False)
    store = LogStore.open(fs, PATH, cluster_id="c", node_id=1)
    store.load({TRADES: WANTED[TRADES]}, are_all=False)
    assert store.unknown_directories == []
    store.load({ORDERS: WANTED[ORDERS]}, are_all=True)
    assert len(read_all(get(store))) == 2


def test_a_log_whose_last_sync_failed_is_left_out_of_the_marker(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    write(get(store), 10)
    write(get(store), 1, synced=False)
    write(get(store, TRADES), 1)
    fs.fail_next_sync()
    store.close()
    marker = fs.read_bytes(PATH + "/clean-shutdown").decode()
    assert IDS[0] not in marker and IDS[1] in marker
    store = open_store(fs)
    assert len(read_all(get(store))) >= 10


def test_a_marker_without_disk_space_is_not_written(fs: MemoryFileSystem, write: Any, read_all: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    get(store).close(clean=True)
    fs.capacity_bytes = fs.used_bytes()
    store.close()
    fs.capacity_bytes = None
    store = open_store(fs)
    assert not store.clean_start
    assert len(read_all(get(store))) == 10


# --- logs ----------------------------------------------------------------------------------------------


def test_logs_are_created_and_found_by_topic_and_partition(fs: MemoryFileSystem) -> None:
    store = open_store(fs, wanted={})
    log = store.create_log(ORDERS, IDS[0], CONFIG)
    assert store.create_log(ORDERS, IDS[0], CONFIG) is log is store.get(ORDERS)
    assert dict(store.logs()) == {ORDERS: log}
    assert store.get(TRADES) is None
    with pytest.raises(DataDirectoryError, match="delete that one first"):
        store.create_log(ORDERS, IDS[1], CONFIG)
    assert b'"topic": "orders"' in fs.read_bytes(f"{PATH}/{IDS[0]}-0/partition.json")
    store.load({ORDERS: (IDS[0], CONFIG)})
    assert store.get(ORDERS) is log


def test_creating_a_log_that_exists_opens_it(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 3)
    store.close()
    store = open_store(fs, wanted={})
    assert store.create_log(ORDERS, IDS[0], CONFIG).log_end_offset == 3


def test_a_bad_topic_id_names_no_directory(fs: MemoryFileSystem) -> None:
    store = open_store(fs, wanted={})
    with pytest.raises(DataDirectoryError):
        store.create_log(ORDERS, "../x", CONFIG)


def test_r25_unknown_directories_are_left_alone_and_reported_once(
    fs: MemoryFileSystem, write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(fs)
    write(get(store), 3)
    store.close(clean=False)
    caplog.set_level(logging.WARNING)
    store = open_store(fs, wanted={TRADES: WANTED[TRADES]})
    store.load({})
    assert store.unknown_directories == [f"{IDS[0]}-0"]
    assert sum("unknown directory" in record.getMessage() for record in caplog.records) == 1
    store.close()
    store = open_store(fs)
    assert get(store).log_end_offset == 3


def test_r24_a_damaged_log_is_offline_and_the_others_are_used(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    write(get(store, TRADES), 5)
    store.checkpoint()
    store.close(clean=False)
    fs.open(f"{PATH}/{IDS[0]}-0/00000000000000000000.log").write_at(300, b"damage")
    store = open_store(fs)
    assert list(offline(store)) == [ORDERS]
    assert "damaged at position 161" in offline(store)[ORDERS]
    assert get(store).read(0, max_bytes=1, up_to=1).next_offset == 1
    with pytest.raises(LogOfflineError, match="at least 1 records in doubt"):
        get(store).read(1, max_bytes=1, up_to=2)
    write(get(store, TRADES), 1)
    store.checkpoint()
    store.close()
    points = decode_recovery_points(fs.read_bytes(PATH + "/recovery-points")).points
    assert points[f"{IDS[0]}-0"].recovery_point == 10, "the proof of the damage is kept"
    assert list(offline(open_store(fs))) == [ORDERS]


def test_r24_a_missing_log_with_records_is_offline_not_new(fs: MemoryFileSystem, write: Any) -> None:
    for clean in (False, True):
        store = open_store(fs)
        write(get(store), 10)
        store.checkpoint()
        store.close(clean=clean)
        fs.rename(f"{PATH}/{IDS[0]}-0", f"{PATH}/away")
        store = open_store(fs)
        assert "missing" in offline(store)[ORDERS]
        assert not fs.exists(f"{PATH}/{IDS[0]}-0")
        store.close(clean=False)
        fs.rename(f"{PATH}/away", f"{PATH}/{IDS[0]}-0")


def test_deleting_a_log_is_durable_and_its_files_are_removed_later(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    store.checkpoint()
    with pytest.raises(DataDirectoryError, match="not one of topic id"):
        store.delete_log(ORDERS, IDS[5])
    store.delete_log(ORDERS, IDS[0])
    store.delete_log(ORDERS)
    assert store.get(ORDERS) is None
    name = f"{IDS[0]}-0.deleted"
    assert store.begin_removal(1000) is store.begin_removal(60_999) is None
    assert name in fs.list_dir(PATH)
    removal = store.begin_removal(61_000)
    assert removal is not None
    removal()
    assert name not in fs.list_dir(PATH)
    store.checkpoint()
    assert f"{IDS[0]}-0" not in decode_recovery_points(fs.read_bytes(PATH + "/recovery-points")).points
    log = store.create_log(ORDERS, IDS[3], CONFIG)
    assert log.log_end_offset == 0


def test_a_log_deleted_in_an_earlier_session_is_removed_after_the_delay(
    fs: MemoryFileSystem, write: Any
) -> None:
    store = open_store(fs)
    write(get(store), 1)
    store.delete_log(ORDERS)
    store.close()
    fs.make_dirs(PATH + "/not-ours.deleted")
    store = open_store(fs, wanted={})
    assert store.has_retired and store.begin_removal(1_000) is None
    assert f"{IDS[0]}-0.deleted" in fs.list_dir(PATH)
    removal = store.begin_removal(61_000)
    assert removal is not None
    removal()
    assert f"{IDS[0]}-0.deleted" not in fs.list_dir(PATH)
    assert "not-ours.deleted" in fs.list_dir(PATH)


@pytest.mark.parametrize("how", ["loaded", "unloaded", "discarded"])
def test_r71_a_log_that_may_have_lost_records_is_set_aside(
    fs: MemoryFileSystem, write: Any, how: str
) -> None:
    store = open_store(fs)
    write(get(store), 1)
    if how == "loaded":
        store.delete_log(ORDERS, IDS[0], is_kept=True)
    else:
        store.close()
        store = LogStore.open(fs, PATH, node_id=1)
        if how == "unloaded":
            store.delete_unloaded(ORDERS, IDS[0], is_kept=True)
        else:
            store.discard_earlier(ORDERS, IDS[0], 7, is_kept=True)
    assert not store.has_retired
    assert f"{IDS[0]}-0.damaged-1" in fs.list_dir(PATH)
    assert f"{IDS[0]}-0" not in fs.list_dir(PATH)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_log_that_is_created_and_deleted_again_before_its_old_files_are_removed(
    tmp_path: Path, is_restarted: bool
) -> None:
    disk, path = RealFileSystem(), str(tmp_path / "d")
    store = LogStore.open(disk, path, node_id=1)
    store.create_log(ORDERS, IDS[0], CONFIG)
    store.delete_log(ORDERS)
    if is_restarted:
        store.close()
        store = LogStore.open(disk, path, node_id=1)  # it replays the creation and the deletion
    store.create_log(ORDERS, IDS[0], CONFIG)
    store.delete_log(ORDERS, IDS[0])
    names = [f"{IDS[0]}-0.deleted", f"{IDS[0]}-0.deleted.deleted"]
    assert [name for name in sorted(os.listdir(path)) if name.startswith(IDS[0])] == names
    if is_restarted:
        store.load({})
    assert store.begin_removal(1_000) is None
    removal = store.begin_removal(61_000)
    assert removal is not None
    removal()
    assert [name for name in os.listdir(path) if name.startswith(IDS[0])] == []
    store.close()


# --- passes --------------------------------------------------------------------------------------------


def test_r24_checkpoints_have_the_synced_offsets(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 5)
    write(get(store), 2, synced=False)
    store.checkpoint()
    points = decode_recovery_points(fs.read_bytes(PATH + "/recovery-points")).points
    assert points[f"{IDS[0]}-0"][:2] == (5, 0)
    fs.unlink(PATH + "/recovery-points")
    store.checkpoint()
    assert not fs.exists(PATH + "/recovery-points"), "nothing has moved"
    get(store).truncate_to(3)
    store.checkpoint()
    points = decode_recovery_points(fs.read_bytes(PATH + "/recovery-points")).points
    assert points[f"{IDS[0]}-0"][:2] == (3, 1)


def test_a_failed_checkpoint_is_written_again(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 5)
    fs.capacity_bytes = fs.used_bytes()
    with pytest.raises(DiskFullError):
        store.checkpoint()
    fs.capacity_bytes = None
    store.checkpoint()
    assert fs.exists(PATH + "/recovery-points")


def test_idle_logs_are_closed(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 1)
    store.release_idle()
    assert store.release_idle() == 1


def test_r24_a_recovered_log_survives_the_next_power_loss(
    fs: MemoryFileSystem, write: Any, read_all: Any
) -> None:
    store = open_store(fs)
    write(get(store), 10, synced=False)
    store.close(clean=False)  # killed: nothing was synced, not even the name of the log's directory
    open_store(fs)
    for seed in range(20):
        disk = MemoryFileSystem(crashable=True)
        disk._root = fs._root
        disk.crash(random.Random(seed))
        assert len(read_all(get(open_store(disk)))) == 10


@pytest.mark.parametrize("name", ["__cluster_metadata", "recovery-points", f"{'0f' * 16}-0"])
def test_r25_the_data_of_a_node_without_its_identity_is_not_formatted(name):
    fs = MemoryFileSystem()
    fs.make_dirs(PATH)
    fs.write_atomically(f"{PATH}/{name}", b"")
    with pytest.raises(DataDirectoryError, match=r"has the data of a node, but no node\.json") as refused:
        format_data_dir(fs, PATH, cluster_id="c", node_id=7)
    assert "restore node.json" in refused.value.hint


def test_a_log_that_an_older_version_deleted_does_not_come_back_from_the_copy(
    fs: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/deleted"
    ids = {
        TopicPartition("gone", 0): ("1" * 32, LogConfig()),
        TopicPartition("kept", 0): ("2" * 32, LogConfig()),
    }
    store = LogStore.open(fs, path, cluster_id="c", node_id=1)
    store.load(ids)
    store.checkpoint()
    store.close()
    name = "1" * 32 + "-0"
    assert name in store._points.points
    points = {one: point for one, point in store._points.points.items() if one != name}
    fs.write_atomically(f"{path}/recovery-points", encode_recovery_points(points))
    fs.remove_tree(f"{path}/{name}")
    del ids[TopicPartition("gone", 0)]
    fs.locked.clear()
    store = LogStore.open(fs, path, cluster_id="c", node_id=1)
    store.load(ids)
    store.close()
    assert "recovery points lost" not in caplog.text
    for file in ("recovery-points", "recovery-points.copy"):
        assert name not in decode_recovery_points(fs.read_bytes(f"{path}/{file}")).points


def test_a_missing_log_that_only_the_copy_lists_is_damaged(
    fs: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/lost"
    ids = {TopicPartition("lost", 0): ("1" * 32, LogConfig())}
    store = LogStore.open(fs, path, cluster_id="c", node_id=1)
    store.load(ids)
    store.checkpoint()
    store.close(clean=False)
    fs.unlink(f"{path}/recovery-points")
    fs.remove_tree(f"{path}/" + "1" * 32 + "-0")
    fs.locked.clear()
    store = LogStore.open(fs, path, cluster_id="c", node_id=1)
    store.load(ids)
    log = store.get(TopicPartition("lost", 0))
    assert log is not None and log.damage is not None
    assert "recovery points lost" in caplog.text


def test_r24_recovery_points_that_are_no_files_do_not_hide_a_loss(
    fs: MemoryFileSystem, make_batch: Any, sync: Any
) -> None:
    """With an older log, the recovery points alone show that records are missing."""
    store = open_store(fs)
    log = get(store)
    log.append(make_batch(), now_ms=1, leader_epoch=1)
    sync(log)
    paths = [f"{log.directory}/{name}" for name in fs.list_dir(log.directory)]
    older = {path: fs.read_bytes(path) for path in paths}
    log.append(make_batch(), now_ms=1, leader_epoch=1)
    sync(log)
    store.checkpoint()
    store.close(clean=False)
    for path, content in older.items():
        fs.write_atomically(path, content)
    points = [f"{PATH}/recovery-points", f"{PATH}/recovery-points.copy"]
    fs.unlink(points[0])
    fs.make_dirs(points[0])
    store = open_store(fs)
    assert list(offline(store)) == [ORDERS], "the copy shows it"
    store.close(clean=False)
    fs.unlink(points[1])
    for path in points:
        if not fs.exists(path):
            fs.make_dirs(path)
    before = tree_of(fs)
    own, _ = verify_data_dir(fs, PATH)
    assert [one.is_damage for one in own.findings if one.path in points] == [True, True]
    with pytest.raises(WrongFileTypeError, match="recovery-points is a directory") as refused:
        open_store(fs)
    assert "move it away" in refused.value.hint
    with pytest.raises(WrongFileTypeError, match="recovery-points is a directory"):
        accept_loss(fs, log.directory)
    assert tree_of(fs) == before


def test_r62_the_files_of_a_replica_from_before_it_was_added_again_are_not_used(
    fs: MemoryFileSystem, write: Any
) -> None:
    """Nor is the recovery point, which would make the new log a damaged one."""
    store = open_store(fs, wanted={})
    old = store.create_log(ORDERS, IDS[0], CONFIG)
    write(old, 3)
    store.close(clean=True)
    store = open_store(fs, wanted={})
    assert store.is_earlier(IDS[0], 0, 7)
    store.discard_earlier(ORDERS, IDS[0], 7)
    assert f"{IDS[0]}-0.deleted" in fs.list_dir(PATH)
    new = store.create_log(ORDERS, IDS[0], CONFIG, replica_epoch=7)
    assert new.log_end_offset == 0
    write(new, 1)
    store.checkpoint()
    fs.crash(random.Random(1))
    store = open_store(fs, wanted={})
    assert not store.is_earlier(IDS[0], 0, 7)
    store.discard_earlier(ORDERS, IDS[0], 7)
    assert store.create_log(ORDERS, IDS[0], CONFIG, replica_epoch=7).log_end_offset == 1
    assert not offline(store)


def test_r62_a_missing_log_of_an_earlier_replica_is_not_damage(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs, wanted={})
    write(store.create_log(ORDERS, IDS[0], CONFIG), 3)
    store.checkpoint()
    store.close(clean=False)
    fs.rename(f"{PATH}/{IDS[0]}-0", f"{PATH}/{IDS[0]}-0.deleted")  # the deletion of the log, before a crash
    store = LogStore.open(fs, PATH, node_id=1)
    store.discard_earlier(ORDERS, IDS[0], 7)
    store.create_log(ORDERS, IDS[0], CONFIG, replica_epoch=7)
    store.load({ORDERS: (IDS[0], CONFIG)})
    assert not offline(store)
    store.close(clean=False)
    store = open_store(fs, wanted={ORDERS: (IDS[0], CONFIG)})
    assert not offline(store)


@pytest.mark.parametrize("clean", [True, False])
def test_r63_an_unloaded_log_makes_room_for_another_topic_of_its_name(
    fs: MemoryFileSystem, write: Any, read_all: Any, clean: bool
) -> None:
    """It can be loaded again or deleted, whichever log has its name meanwhile."""
    store = open_store(fs)
    write(get(store), 3)
    store.close(clean=clean)
    store = LogStore.open(fs, PATH, node_id=1)
    store.load(WANTED, are_all=False)
    store.unload_log(ORDERS)
    assert store.get(ORDERS) is None
    store.load(WANTED, are_all=False)
    assert len(read_all(get(store))) == 3
    store.unload_log(ORDERS)
    other = store.create_log(ORDERS, IDS[5], CONFIG)
    assert (other.log_end_offset, store.find(ORDERS, IDS[5])) == (0, other)
    assert store.find(ORDERS, IDS[0]) is None
    write(other, 1)
    store.delete_unloaded(ORDERS, IDS[0])
    assert f"{IDS[0]}-0" not in fs.list_dir(PATH)
    assert f"{IDS[0]}-0.deleted" in fs.list_dir(PATH)
    store.close()
    again = open_store(fs, wanted={ORDERS: (IDS[5], CONFIG)})
    assert get(again).log_end_offset == 1
    assert f"{IDS[0]}-0" not in decode_recovery_points(fs.read_bytes(PATH + "/recovery-points")).points
    again.close()


def test_r63_an_unloaded_log_keeps_the_log_that_it_has_replaced(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    get(store).mark_damaged("found by a scrub", sound_end_offset=4)
    replace_damaged(store)
    store.unload_log(ORDERS)
    store.create_log(ORDERS, IDS[5], CONFIG)
    assert store.replaced_end(ORDERS) is None, "it is another topic's"
    store.unload_log(ORDERS)
    store.load(WANTED, are_all=False)
    assert store.replaced_end(ORDERS) == 10
    store.unload_log(ORDERS)
    store.delete_unloaded(ORDERS, IDS[0])
    assert f"{IDS[0]}-0.damaged-1" in fs.list_dir(PATH)
    assert f"{IDS[0]}-0.replaced-10" not in fs.list_dir(PATH)
    store.close()


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("is_put_back", [True, False])
def test_r52_the_exchange_of_a_deleted_log_leaves_the_next_one_alone(
    fs: MemoryFileSystem, write: Any, read_all: Any, is_put_back: bool, is_late: bool
) -> None:
    """A replica is removed and added again while its log is being replaced, or put back. ``is_late``: the
    exchange runs only after that."""
    store = open_store(fs)
    write(get(store), 10)
    get(store).mark_damaged("found by a scrub", sound_end_offset=4)
    if is_put_back:
        replace_damaged(store)
    exchange = store.begin_reinstate(ORDERS) if is_put_back else store.begin_replace(ORDERS)
    if not is_late:
        exchange.run()
    store.delete_log(ORDERS, IDS[0])
    store.discard_earlier(ORDERS, IDS[0], 7)
    write(store.create_log(ORDERS, IDS[0], CONFIG, replica_epoch=7), 2)
    if is_late:
        exchange.run()
    assert store.replaced_end(ORDERS) is None
    store.close()
    again = open_store(fs)
    assert (len(read_all(get(again))), again.replaced_end(ORDERS)) == (2, None)
    again.close()


def test_r62_a_replaced_log_of_an_earlier_replica_is_never_put_back(fs: MemoryFileSystem, write: Any) -> None:
    store = open_store(fs)
    write(get(store), 10)
    get(store).mark_damaged("found by a scrub", sound_end_offset=4)
    store.begin_replace(ORDERS).run()
    store.close(clean=False)  # a crash before the new log is made
    store = LogStore.open(fs, PATH, node_id=1)
    store.discard_earlier(ORDERS, IDS[0], 7)
    store.create_log(ORDERS, IDS[0], CONFIG, replica_epoch=7)
    store.close()
    store = open_store(fs)
    assert store.replaced_end(ORDERS) is None
    assert f"{IDS[0]}-0.damaged-1" in fs.list_dir(PATH)
    get(store).mark_damaged("found by a scrub", sound_end_offset=0)
    replace_damaged(store)
    store.discard_earlier(ORDERS, IDS[0], 7)
    assert store.replaced_end(ORDERS) == 0, "it is the present replica's"
    store.close()
