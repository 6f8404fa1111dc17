"""R24: of a damaged log, all batches below the sound end can be read, and no file is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.errors import LogOfflineError
from kafkalite.model import TopicPartition
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem

PATH, ID = "/data", "0" * 32
DIRECTORY = f"{PATH}/{ID}-0"
ORDERS = TopicPartition("orders", 0)
CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=512, preallocate_min_bytes=1024)
BATCH_BYTES, SEGMENT_BATCHES, COUNT, SYNCED = 161, 25, 80, 79
LENGTH_POSITION = 8
Batches = list[tuple[int, bytes]]


def open_log(fs: MemoryFileSystem) -> tuple[LogStore, Log]:
    store = LogStore.open(fs, PATH, cluster_id="c", node_id=1)
    store.load({ORDERS: (ID, CONFIG)})
    log = store.get(ORDERS)
    assert log is not None
    return store, log


@pytest.fixture(params=["clean", "kill"])
def stopped(
    request: pytest.FixtureRequest, make_batch: Any, sync: Any, read_all: Any
) -> tuple[dict[str, bytes], Batches]:
    """The files of a stopped node with 80 batches in four segments and three epochs, all synced but the last,
    and the batches."""
    fs = MemoryFileSystem()
    store, log = open_log(fs)
    for number in range(COUNT):
        log.append(make_batch(seed=number), now_ms=1, leader_epoch=1 + number // 30)
        if number + 1 == SYNCED:
            sync(log)
            store.checkpoint()
    batches: Batches = read_all(log)
    store.close(clean=request.param == "clean")
    own = {name for name in fs.list_dir(PATH) if not DIRECTORY.endswith(name)}
    return {f"{PATH}/{name}": fs.read_bytes(f"{PATH}/{name}") for name in own} | files_of(fs), batches


def files_of(fs: MemoryFileSystem) -> dict[str, bytes]:
    """Return the files of the log by path."""
    paths = (f"{DIRECTORY}/{name}" for name in fs.list_dir(DIRECTORY))
    return {path: fs.read_bytes(path) for path in paths}


def disk_of(files: dict[str, bytes]) -> MemoryFileSystem:
    fs = MemoryFileSystem()
    fs.make_dirs(DIRECTORY)
    for path, content in files.items():
        fs.open(path, create=True).write_at(0, content)
    return fs


def read_sound(log: Log, max_bytes: int, split_batches: Callable[[bytes], Batches]) -> Batches:
    """Read as a client that repeats a failed request once, up to the offset at which it fails again."""
    found: Batches = []
    offset, errors = log.log_start_offset, 0
    while errors < 2:
        try:
            piece = log.read(offset, max_bytes=max_bytes, up_to=log.log_end_offset)
        except LogOfflineError as error:
            assert "kl log accept-loss" in str(error)
            errors += 1
            continue
        assert piece.next_offset > offset, "neither batches nor an error"
        found += split_batches(b"".join(piece.buffers))
        offset, errors = piece.next_offset, 0
    assert log.damage is not None
    assert offset == log.damage.sound_end_offset
    return found


#: {what is damaged: (position in the header, its new bytes for a batch)}
DAMAGES: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "length beyond the file": (LENGTH_POSITION, lambda _: b"\x00\x10\x00\x00"),
    "length of zero": (LENGTH_POSITION, lambda _: bytes(4)),
    "length plus one": (LENGTH_POSITION, lambda _: (BATCH_BYTES - 11).to_bytes(4, "big")),
    "base offset too high": (0, lambda number: (number + 2**20).to_bytes(8, "big")),
    "base offset too low": (0, lambda number: max(number - 2, 0).to_bytes(8, "big")),
}


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("missing", [(), ("index",), ("leader-epochs",)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_r24_a_damaged_header_hides_no_batch_before_it(
    damage: str,
    missing: tuple[str, ...],
    max_bytes: int,
    stopped: tuple[dict[str, bytes], Batches],
    split_batches: Callable[[bytes], Batches],
) -> None:
    files, batches = stopped
    kept = {path: content for path, content in files.items() if not path.endswith(missing or "none")}
    position, content = DAMAGES[damage]
    is_clean = f"{PATH}/clean-shutdown" in files
    for number in (0, 1, 12, 24, 25, 26, 60, 74, 75, 77, *([79] if is_clean else [])):
        if damage == "base offset too low" and number == 0:
            continue
        fs = disk_of(kept)
        base = number // SEGMENT_BATCHES * SEGMENT_BATCHES
        at = (number - base) * BATCH_BYTES + position
        fs.open(f"{DIRECTORY}/{base:020d}.log").write_at(at, content(number))
        before = files_of(fs)
        store, log = open_log(fs)
        assert read_sound(log, max_bytes, split_batches) == batches[:number]
        damage_found = log.damage
        assert damage_found is not None
        assert (damage_found.sound_end_offset, damage_found.records_in_doubt) == (number, 1)
        store.close(clean=True)
        after = files_of(fs)
        if "leader-epochs" in missing:  # written again before the damage is found
            after.pop(f"{DIRECTORY}/leader-epochs", None)
        assert after == before


def test_a_segment_that_is_cut_under_an_open_log_is_damage(tmp_path: Path, make_batch: Any) -> None:
    """Its map failed with a ValueError, which ended the broker at the next retention check."""
    path = str(tmp_path / "orders")
    log = Log.create(RealFileSystem(), path, CONFIG)
    while log.segment_count < 3:
        log.append(make_batch(seed=1), now_ms=1, leader_epoch=0)
    try:
        log.release()
        assert log._segments.segments[0].file.size() > BATCH_BYTES  # opened, and not mapped yet
        os.truncate(min(tmp_path.glob("orders/*.log")), BATCH_BYTES)
        with pytest.raises(LogOfflineError, match=r"expected .* bytes, found the end of the file"):
            log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset)
        assert log.is_damaged
    finally:
        log.close(clean=False)


def test_r43_a_later_epoch_that_is_found_after_a_clean_start_is_damage(make_batch: Any) -> None:
    """The first append failed in an assertion, which ended the broker."""
    fs = MemoryFileSystem()
    store, log = open_log(fs)
    for number in range(3):
        log.append(make_batch(seed=number), now_ms=1, leader_epoch=9 if number == 2 else 1)
    end = log.log_end_offset
    store.close(clean=True)
    _, log = open_log(fs)
    log.start_epoch(2)
    with pytest.raises(LogOfflineError, match="have leader epoch 9, but the partition is in epoch 2"):
        log.append(make_batch(seed=4), now_ms=1, leader_epoch=2)
    assert log.damage is not None
    assert (log.damage.known_end_offset, log.log_end_offset) == (end, end)
    assert log.read(0, max_bytes=1 << 20, up_to=end).size_bytes == 2 * BATCH_BYTES
