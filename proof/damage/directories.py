"""Schedules that find the mutants of the rules about several data directories (R80 to R85).

``DIRECTED`` is {mutant: schedule}; a schedule returns None, or the violation.
"""

# Tests: tests/sim/test_mutants.py

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from kafkalite.broker.partitions.housekeeping import PROBE_INTERVAL_MS
from kafkalite.errors import DataDirectoryError, LogMovingError, LogOfflineError
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.rng import seeded_rng
from kafkalite.storage.filesystem import FileSystem, Space
from kafkalite.storage.layout import LOG_DIR_STARTS_FILE
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_dirs import LogDirs
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.cluster import Cluster
from kafkalite.testing.virtual_clock import VirtualClock
from proof.disk_trees import disk_with_files
from proof.recording_filesystem import RecordingFileSystem, crash_states
from proof.waiting import settle

A: Final = "/disks/a"
B: Final = "/disks/b"
CONFIG: Final = LogConfig()
TOPIC_ID: Final = f"{1:032x}"
#: Directory A has the first, B the second.
TPS: Final = (TopicPartition("t", 0), TopicPartition("t", 1))


def open_dirs(fs: FileSystem, *paths: str, node_id: int = 1, seed: int = 1) -> LogDirs:
    dirs = LogDirs.open(fs, paths or (A, B), cluster_id="c", node_id=node_id, rng=seeded_rng(seed))
    dirs.load(dict.fromkeys(TPS, (TOPIC_ID, CONFIG)))
    return dirs


def append(dirs: LogDirs, tp: TopicPartition) -> None:
    log = dirs.get(tp)
    assert log is not None
    log.append(bytearray(build_batch([b"x"])), now_ms=0, leader_epoch=0)
    work = log.begin_sync()
    assert work is not None
    work.run()
    log.finish_sync(work, None)


def prepared() -> MemoryFileSystem:
    """Return a disk with the directories of a node that has stopped cleanly, and a record in each log."""
    fs = MemoryFileSystem()
    dirs = open_dirs(fs)
    for tp in TPS:
        append(dirs, tp)
    dirs.close(broker_epoch=1)
    return fs


def _refuses_another_node() -> str | None:
    try:
        open_dirs(prepared(), "/disks/c", B, node_id=2)
    except DataDirectoryError:
        return None
    return "node 2 uses a data directory of node 1"


def _keeps_other_directories() -> str | None:
    dirs = open_dirs(prepared())
    dirs.fail(B, "failed")
    log = dirs.get(TPS[0])
    assert log is not None
    return None if log.offline_reason is None else "a log on another disk went offline"


def _notices_a_failed_disk() -> str | None:
    async def run() -> bool:
        clock = VirtualClock()
        async with Cluster(disks=2, clock=clock) as cluster:
            await cluster.create_topic("t", 2)
            cluster.fail_disk(1, 2)
            await clock.advance(PROBE_INTERVAL_MS)
            await settle()
            return cluster.broker.partitions.offline_count > 0

    return None if asyncio.run(run()) else "nothing noticed the failed disk"


def _creates_no_second_log() -> str | None:
    fs = prepared()
    fs.fail_disk(B)
    dirs = open_dirs(fs)
    try:
        dirs.create_log(TPS[1], TOPIC_ID, CONFIG)
    except LogOfflineError:
        return None
    return "an empty log was made of a partition whose log is on a failed disk"


def _opens_no_second_log() -> str | None:
    fs = prepared()
    dirs = open_dirs(fs)
    dirs.release_log(TPS[1])
    fs.fail_disk(B)
    dirs.fail(B, "failed")
    try:
        dirs.create_log(TPS[1], TOPIC_ID, CONFIG)
    except LogOfflineError:
        return None
    return "an empty log was made of a partition whose log is on a disk that has failed"


def _takes_lost_logs_for_damaged() -> str | None:
    fs = prepared()
    fs.replace_disk(B)
    log = open_dirs(fs, seed=2).get(TPS[1])
    assert log is not None
    return None if log.is_damaged else "the log of a replaced disk begins empty, and is sound"


def _recognises_an_older_copy() -> str | None:
    fs = prepared()
    older = fs.read_bytes(f"{B}/{LOG_DIR_STARTS_FILE}")
    open_dirs(fs).close()
    fs.write_atomically(f"{B}/{LOG_DIR_STARTS_FILE}", older)
    dirs = open_dirs(fs)
    is_noticed = dirs.is_from_older_copy(TPS[1]) and not dirs.clean_start
    return None if is_noticed else "an older copy of a directory was used"


def _recognises_it_again() -> str | None:
    fs = prepared()
    older = fs.read_bytes(f"{B}/{LOG_DIR_STARTS_FILE}")
    open_dirs(fs).close()
    fs.write_atomically(f"{B}/{LOG_DIR_STARTS_FILE}", older)
    dirs = open_dirs(fs)
    dirs.distrust([TPS[1]])
    work = dirs.begin_checkpoint()
    if work is not None:
        work()
    dirs.close()
    is_noticed = open_dirs(fs).is_from_older_copy(TPS[1])
    return None if is_noticed else "an older copy of a directory was trusted by the next start"


def _with_two_logs(first: int, second: int) -> MemoryFileSystem:
    """Return a disk whose directory A has ``first`` records of a partition, and B ``second``."""
    fs = MemoryFileSystem()
    for path, count in ((A, first), (B, second)):
        fs.spaces = {one: Space(9, 9 * (one == path)) for one in (A, B)}
        dirs = LogDirs.open(fs, (A, B), cluster_id="c", node_id=1, rng=seeded_rng(1))
        dirs.create_log(TPS[0], TOPIC_ID, CONFIG)
        for _ in range(count):
            append(dirs, TPS[0])
        checkpoint = dirs.begin_checkpoint()
        assert checkpoint is not None
        checkpoint()
        dirs.close(clean=False)
        if path == A:
            fs.rename(f"{A}/{TOPIC_ID}-0", f"{A}/hidden")
    fs.rename(f"{A}/hidden", f"{A}/{TOPIC_ID}-0")
    return fs


def _uses_the_longer_log() -> str | None:
    log = open_dirs(_with_two_logs(1, 2)).get(TPS[0])
    assert log is not None
    return (
        None if log.log_end_offset == 2 else f"the log ends at {log.log_end_offset}; another one ended at 2"
    )


def _misses_the_end_of_a_damaged_log() -> str | None:
    fs = _with_two_logs(2, 1)
    (segment,) = [name for name in fs.list_dir(f"{A}/{TOPIC_ID}-0") if name.endswith(".log")]
    file = fs.open(f"{A}/{TOPIC_ID}-0/{segment}")
    file.write_at(30, b"damage")
    file.close()
    log = open_dirs(fs).get(TPS[0])
    assert log is not None
    return (
        None if log.is_damaged else f"the log that ends at {log.log_end_offset} is sound; 2 records existed"
    )


def move(dirs: LogDirs, tp: TopicPartition, path: str) -> None:
    """Move a log to another directory, as LogMover does."""
    copy = dirs.begin_copy(tp, path)
    copy.begin(copy.read(1))
    while copy.lag:
        copy.append(copy.read(1000), 0)
    copy.source.freeze()
    dirs.complete_copy(copy)
    dirs.replace_by_copy(tp, copy)


def losses_of_a_move() -> Iterator[str]:
    """Move a log, and yield each power loss after which an acknowledged record is missing."""
    recording = RecordingFileSystem(MemoryFileSystem(crashable=True))
    dirs: Any = open_dirs(recording)
    for _ in range(4):
        append(dirs, TPS[0])
    recording.note(4)
    move(dirs, TPS[0], B)
    for job in (dirs.begin_checkpoint(), dirs.begin_removal(0) or dirs.begin_removal(10**9)):
        assert job is not None
        job()
    append(dirs, TPS[0])
    recording.note(5)
    for state in crash_states(recording.operations, latest=2):
        if state.note:
            log = open_dirs(disk_with_files(state.files, state.directories)).get(TPS[0])
            assert log is not None
            if log.is_damaged or log.log_end_offset < state.note:
                yield f"{state.label} after {state.after}: the log ends at {log.log_end_offset}: {log.damage}"


def _syncs_the_copy() -> str | None:
    return next(losses_of_a_move(), None)


def _freezes_the_log() -> str | None:
    dirs = open_dirs(prepared())
    copy = dirs.begin_copy(TPS[0], B)
    copy.begin(copy.read(1))
    copy.append(copy.read(1000), 0)
    copy.source.freeze()
    dirs.complete_copy(copy)
    try:
        append(dirs, TPS[0])
    except LogMovingError:
        return None
    dirs.replace_by_copy(TPS[0], copy)
    return "a record was acknowledged that the copy lacks"


DIRECTED: Final = {
    "R80-any-directory": _refuses_another_node,
    "R81-takes-all": _keeps_other_directories,
    "R81-unnoticed": _notices_a_failed_disk,
    "R81-created-again": _creates_no_second_log,
    "R81-begun-again": _opens_no_second_log,
    "R82-lost-is-new": _takes_lost_logs_for_damaged,
    "R83-older-is-current": _recognises_an_older_copy,
    "R83-forgotten": _recognises_it_again,
    "R84-first-found": _uses_the_longer_log,
    "R84-damaged-forgotten": _misses_the_end_of_a_damaged_log,
    "R85-unsynced-copy": _syncs_the_copy,
    "R85-not-frozen": _freezes_the_log,
}
