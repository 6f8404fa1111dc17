from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.errors import DataDirectoryError
from kafkalite.model import TopicPartition
from kafkalite.storage import inspect
from kafkalite.storage.index_block import BLOCK_HEADER_BYTES
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.damage.one_log import DIRECTORY as ONE_LOG
from proof.damage.one_log import log_of, open_store
from proof.disk_trees import tree_of

TOPIC_ID = "ab" * 16
DIRECTORY = f"/data/{TOPIC_ID}-3"
CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=512)


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
def store(fs: MemoryFileSystem, make_batch: Any) -> LogStore:
    """Return a closed data directory with one log of 60 batches of two records in three segments."""
    store = LogStore.open(fs, "/data", cluster_id="c", node_id=1)
    log = store.create_log(TopicPartition("orders", 3), TOPIC_ID, CONFIG)
    for number in range(60):
        log.append(make_batch(2, timestamp_ms=1000 + number), now_ms=1, leader_epoch=1)
    log.delete_before(7)
    store.close()
    fs.make_dirs("/data/__cluster_metadata")
    return store


@pytest.fixture
def scribble(fs: MemoryFileSystem, store: LogStore) -> Callable[..., None]:
    def scribble(name: str, position: int, data: bytes = b"\xfe") -> None:
        fs.open(f"{DIRECTORY}/{name}").write_at(position, data)

    return scribble


def findings(fs: MemoryFileSystem) -> list[tuple[str, int, bool]]:
    found = inspect.verify_log(fs, DIRECTORY).findings
    assert all(finding.problem for finding in found)
    return [(finding.path.rpartition("/")[2], finding.position, finding.is_damage) for finding in found]


def test_an_intact_log_has_no_findings(fs: MemoryFileSystem, store: LogStore) -> None:
    before = tree_of(fs)
    verdict = inspect.verify_log(fs, DIRECTORY)
    assert verdict.findings == []
    assert (verdict.topic, verdict.topic_id, verdict.partition) == ("orders", TOPIC_ID, 3)
    assert (verdict.log_start_offset, verdict.log_end_offset) == (7, 120)
    assert (verdict.segment_count, verdict.batch_count, verdict.record_count) == (3, 60, 120)
    assert verdict.size_bytes == 60 * 161
    assert tree_of(fs) == before, "nothing is changed by looking"


def test_batches_are_listed_with_their_headers(fs: MemoryFileSystem, store: LogStore) -> None:
    listed = list(inspect.iter_batches(fs, f"{DIRECTORY}/00000000000000000050.log"))
    assert len(listed) == 25
    assert [(batch.position, batch.problem) for batch in listed] == [(161 * n, None) for n in range(25)]
    assert [batch.header.base_offset for batch in listed if batch.header] == list(range(50, 100, 2))


def test_a_wrong_crc_is_reported_and_the_walk_continues(fs: MemoryFileSystem, scribble: Any) -> None:
    scribble("00000000000000000000.log", 161 * 2 + 100)
    path = f"{DIRECTORY}/00000000000000000000.log"
    listed = list(inspect.iter_batches(fs, path))
    assert len(listed) == 25
    assert [batch.position for batch in listed if batch.problem] == [322]
    assert all(batch.problem is None for batch in inspect.iter_batches(fs, path, verify=False))
    assert findings(fs) == [("00000000000000000000.log", 322, True)]


def test_a_wrong_offset_is_reported(fs: MemoryFileSystem, scribble: Any) -> None:
    scribble("00000000000000000000.log", 161 + 7, b"\x63")
    found = findings(fs)
    assert ("00000000000000000000.log", 161, True) in found
    assert ("00000000000000000000.log", 322, True) in found, "the next one does not follow it either"


def test_a_broken_header_ends_the_walk(fs: MemoryFileSystem, scribble: Any) -> None:
    scribble("00000000000000000050.log", 161 * 3 + 16)
    *_, last = inspect.iter_batches(fs, f"{DIRECTORY}/00000000000000000050.log")
    assert last.position == 483 and last.header is None and "magic" in str(last.problem)
    names = [name for name, _, _ in findings(fs)]
    assert "00000000000000000050.index" in names, "the index tells of more"
    assert "00000000000000000100.log" in names, "the next segment does not follow"


@pytest.mark.parametrize(
    ("tail", "problem"), [(b"\0" * 500, None), (b"\0" * 100 + b"x", "neither"), (b"x" * 5, "neither")]
)
def test_zeros_behind_the_last_batch_are_free_space_and_other_bytes_a_torn_tail(
    tail: bytes, problem: str | None, fs: MemoryFileSystem, scribble: Any
) -> None:
    path = f"{DIRECTORY}/00000000000000000100.log"
    fs.open(path).write_at(fs.file_size(path), tail)
    *_, last = inspect.iter_batches(fs, path)
    assert (last.problem is None) if problem is None else problem in str(last.problem)
    assert [is_damage for _, _, is_damage in findings(fs)] == ([] if problem is None else [False])


def test_a_batch_that_is_cut_off_is_reported(fs: MemoryFileSystem, store: LogStore) -> None:
    path = f"{DIRECTORY}/00000000000000000100.log"
    fs.open(path).truncate(161 * 9 + 100)
    *_, last = inspect.iter_batches(fs, path)
    assert "161 bytes, but only 100 bytes are left" in str(last.problem)


def test_index_entries_are_absolute(fs: MemoryFileSystem, store: LogStore) -> None:
    index = inspect.read_index(fs, f"{DIRECTORY}/00000000000000000050.index")
    assert index.is_whole
    assert index.end_offset == 100
    assert [(entry.key, entry.value) for entry in index.entries] == [
        (50 + 8 * n, 644 * n) for n in range(1, 7)
    ]
    times = inspect.read_index(fs, f"{DIRECTORY}/00000000000000000050.timeindex")
    assert [(entry.key, entry.value) for entry in times.entries][:2] == [(1028, 56), (1032, 64)]
    assert (times.entries[-1].key, times.entries[-1].value) == (1049, 98)


@pytest.mark.parametrize("name", ["00000000000000000050.log", "node.json", "5.index"])
def test_another_file_is_refused_as_an_index(name: str, fs: MemoryFileSystem, store: LogStore) -> None:
    with pytest.raises(DataDirectoryError, match="not an index file"):
        inspect.read_index(fs, f"{DIRECTORY}/{name}")


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_a_cut_index_is_not_damage_and_a_wrong_one_is(
    suffix: str, fs: MemoryFileSystem, store: LogStore, scribble: Any
) -> None:
    first, second = (f"{DIRECTORY}/{offset:020d}.{suffix}" for offset in (0, 50))
    data = fs.read_bytes(second)
    fs.open(second).truncate(len(data) - 1)
    assert findings(fs) == [(second[-len(suffix) - 21 :], BLOCK_HEADER_BYTES, False)]
    fs.open(first).truncate(0)
    fs.open(first).write_at(0, data)
    lying = [finding for finding in findings(fs) if finding[0] == first[-len(suffix) - 21 :]]
    assert lying and all(is_damage for _, _, is_damage in lying)


def test_a_damaged_state_of_a_log_is_reported(fs: MemoryFileSystem, scribble: Any) -> None:
    scribble("log-state", 3)
    assert ("log-state", True) in [(found, is_damage) for found, _, is_damage in findings(fs)]


@pytest.mark.parametrize("is_directory", [False, True])
def test_unreadable_leader_epochs_will_be_rebuilt(
    is_directory: bool, fs: MemoryFileSystem, scribble: Any
) -> None:
    path = f"{DIRECTORY}/leader-epochs"
    if is_directory:
        fs.unlink(path)
        fs.make_dirs(path)
    else:
        scribble("leader-epochs", 3)
    (found,) = inspect.verify_log(fs, DIRECTORY).findings
    assert (found.path, found.is_damage) == (path, False)
    assert found.problem.endswith("; the file will be rebuilt from the batches")
    store = LogStore.open(fs, "/data", cluster_id="c", node_id=1)
    store.load({TopicPartition("orders", 3): (TOPIC_ID, CONFIG)})
    log = store.get(TopicPartition("orders", 3))
    assert log is not None
    assert [tuple(one) for one in log.leader_epochs] == [(1, 7)]


@pytest.mark.parametrize(
    ("removed", "added", "is_missing"),
    [
        ((), (), True),
        (("recovery-points", "recovery-points.copy"), (), True),
        ((), ("start-count",), False),
        ((), ("start-count", "quorum-voters"), True),
    ],
)
def test_missing_metadata_is_damage_if_the_node_must_have_stored_some(
    removed: tuple[str, ...], added: tuple[str, ...], is_missing: bool, fs: MemoryFileSystem, store: LogStore
) -> None:
    """Only voters and nodes without peers store metadata."""
    fs.remove_tree("/data/__cluster_metadata")
    for name in removed:
        fs.unlink(f"/data/{name}")
    for name in added:
        fs.open(f"/data/{name}", create=True).write_at(0, b"1\n")
    own, _ = inspect.verify_data_dir(fs, "/data")
    found = [one.is_damage for one in own.findings if one.path == "/data/__cluster_metadata"]
    assert found == ([True] if is_missing else [])


def test_a_whole_data_directory_is_verified_log_by_log(fs: MemoryFileSystem, store: LogStore) -> None:
    fs.make_dirs(f"/data/{TOPIC_ID}-4")
    own, verdicts = inspect.verify_data_dir(fs, "/data")
    assert own.findings == []
    first, second = verdicts
    assert (first.partition, second.partition) == (3, 4)
    assert (second.topic, second.segment_count, second.log_end_offset) == (None, 0, 0)


@pytest.mark.parametrize("name", ["node.json", "recovery-points", "clean-shutdown"])
def test_damaged_files_of_a_data_directory_are_reported(
    name: str, fs: MemoryFileSystem, store: LogStore
) -> None:
    fs.open(f"/data/{name}").write_at(0, b"\xff\xff")
    own, _ = inspect.verify_data_dir(fs, "/data")
    assert [finding.path for finding in own.findings] == [f"/data/{name}"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["process", "system"])
@pytest.mark.parametrize("is_recorded", [False, True], ids=["synced", "recorded"])
def test_r24_a_missing_last_segment_gets_the_same_verdict_as_from_the_next_start(
    is_restarted: bool, is_recorded: bool, fs: MemoryFileSystem, make_batch: Any, sync: Any
) -> None:
    store = open_store(fs)
    for number in range(30):
        log_of(store).append(make_batch(seed=number), now_ms=1, leader_epoch=1)
        if number == 24:
            sync(log_of(store))
            store.checkpoint()
    if is_recorded:
        sync(log_of(store))
        store.checkpoint()
    store.close(clean=False)
    fs.unlink(f"{ONE_LOG}/{25:020d}.log")
    fs.boot_count += is_restarted
    verdict = inspect.verify_log(fs, ONE_LOG)
    _, (listed, *_) = inspect.verify_data_dir(fs, "/data")
    log = log_of(open_store(fs))
    assert verdict.damage == listed.damage == log.damage
    if is_recorded:
        assert log.damage is not None and log.damage.records_in_doubt == 5
    else:
        assert (log.damage is None) == is_restarted
        assert log.torn_records == is_restarted


def test_r24_a_log_that_was_closed_has_the_same_verdict_after_a_restart_of_the_system(
    fs: MemoryFileSystem, store: LogStore
) -> None:
    """An orderly stop syncs everything, so nothing can be unfinished."""
    (*_, last) = (name for name in fs.list_dir(DIRECTORY) if name.endswith(".log"))
    fs.unlink(f"{DIRECTORY}/{last}")
    fs.unlink("/data/recovery-points")
    fs.unlink("/data/recovery-points.copy")
    fs.boot_count += 1
    verdict = inspect.verify_log(fs, DIRECTORY)
    assert verdict.damage is not None
    assert verdict.damage.records_in_doubt == 120 - int(last.removesuffix(".log"))


def test_a_directory_that_is_neither_a_log_nor_a_data_directory_is_refused(
    fs: MemoryFileSystem, store: LogStore
) -> None:
    with pytest.raises(DataDirectoryError, match="not a log directory"):
        inspect.verify_log(fs, "/data")
    with pytest.raises(DataDirectoryError, match="not a data directory"):
        inspect.verify_data_dir(fs, DIRECTORY)


def test_a_log_in_use_can_be_inspected(fs: MemoryFileSystem, make_batch: Any) -> None:
    log = Log.create(fs, DIRECTORY, CONFIG)
    log.append(make_batch(), now_ms=1, leader_epoch=1)
    assert inspect.verify_log(fs, DIRECTORY).findings == []
    assert inspect.verify_log(fs, DIRECTORY + "/").log_end_offset == 1


def test_text_that_passes_its_crc_but_cannot_be_parsed_is_reported(
    fs: MemoryFileSystem, store: LogStore
) -> None:
    from kafkalite.storage.checkpoints import encode_lines

    fs.write_atomically(f"{DIRECTORY}/log-state", encode_lines("log-state", ["log_start_offset x"]))
    assert [found for found, _, _ in findings(fs)] == ["log-state"]


def test_recovery_points_are_read_once_and_their_damage_is_not_logged(
    fs: MemoryFileSystem, store: LogStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        fs.make_dirs(f"/data/{number:032x}-0")
    fs.open("/data/recovery-points").write_at(0, b"x")
    before = tree_of(fs)
    reads: list[str] = []
    read = fs.read_bytes

    def counting(path: str) -> bytes:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(fs, "read_bytes", counting)
    own, verdicts = inspect.verify_data_dir(fs, "/data")
    assert [verdict.damage for verdict in verdicts if verdict.directory == DIRECTORY] == [None]
    assert ("/data/recovery-points", False) in [(one.path, one.is_damage) for one in own.findings]
    assert reads.count("/data/recovery-points") == 2  # for the points, and for their check
    assert not caplog.records
    assert tree_of(fs) == before
