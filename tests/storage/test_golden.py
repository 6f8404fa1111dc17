"""Frozen bytes of every file of a data directory: tests/golden/storage. A change there changes the format.

Each file is hex text under its own name and ``.hex``. ``UPDATE_GOLDEN=1`` writes them again; describe a
difference in the changelog and in docs/storage-format.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafkalite.model import TopicPartition
from kafkalite.records.batch import iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.storage import producer_snapshots
from kafkalite.storage.checkpoints import (
    CompactionPoints,
    LogState,
    NodeIdentity,
    decode_clean_shutdown,
    decode_compaction,
    decode_leader_epochs,
    decode_log_state,
    decode_node,
    decode_partition,
    decode_producers,
    decode_recovery_points,
)
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.inspect import IndexEntry, read_index, verify_data_dir
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.producer_state import UNKNOWN_CRC, EndedTransaction, SequencedBatch
from proof.disk_trees import disk_with_files, tree_of

DATA = "/data/"
ORDERS, STATE = TopicPartition("orders", 0), TopicPartition("state", 7)
ORDERS_ID, STATE_ID = "0123456789abcdef" * 2, "fedcba9876543210" * 2
ORDERS_DIR, STATE_DIR = f"{ORDERS_ID}-0", f"{STATE_ID}-7"
CONFIG = LogConfig(index_interval_bytes=64, segment_bytes=1024)
COMPACTED = replace(CONFIG, is_compacted=True)
WANTED = {ORDERS: (ORDERS_ID, CONFIG), STATE: (STATE_ID, COMPACTED)}
TIME_MS = 1_700_000_000_000


class Ascending:
    """An Rng whose bytes are 00 01 02 …"""

    def randbytes(self, n: int, /) -> bytes:
        return bytes(range(n))

    def random(self) -> float:
        raise NotImplementedError

    def randrange(self, stop: int, /) -> int:
        raise NotImplementedError

    def shuffle(self, x: Any, /) -> None:
        raise NotImplementedError


def sync(log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    work.run()
    log.finish_sync(work, None)


def write_orders(log: Log) -> None:
    """Write a truncation, three leader epochs, an idempotent producer, an aborted and a committed
    transaction."""
    log.append(build_batch([b"hello", b"world"], None, TIME_MS), now_ms=0, leader_epoch=4)
    log.append(build_batch([b"diverged"], None, TIME_MS), now_ms=0, leader_epoch=4)
    sync(log)
    log.truncate_to(2)
    for sequence in (0, 1):
        batch = build_batch(
            [None], [b"k"], TIME_MS + 500, producer_id=5000, producer_epoch=0, base_sequence=sequence
        )
        log.append(batch, now_ms=10, leader_epoch=6)
    log.roll()
    for producer_id, epoch, is_commit in ((7000, 6, False), (7001, 9, True)):
        batch = build_batch(
            [b"part"],
            None,
            TIME_MS + 250,
            producer_id=producer_id,
            producer_epoch=3,
            base_sequence=0,
            transactional=True,
        )
        log.append(batch, now_ms=20, leader_epoch=epoch)
        marker = build_marker(producer_id, 4, 2, is_commit, TIME_MS + 300)
        log.append(marker, now_ms=30, leader_epoch=epoch)
    log.delete_before(1)


def write_state(log: Log) -> None:
    """Write two closed segments, which compaction joins into one with a gap, and an active one."""
    for number in range(4):
        value = b"%d" % number * 40
        log.append(build_batch([value, value], [b"a", b"b"], TIME_MS + number), now_ms=0, leader_epoch=0)
        if number % 2:
            log.roll()
    sync(log)
    work = log.begin_compaction(TIME_MS, log.log_end_offset, 1000)
    assert work is not None
    steps, result = work.steps(), None
    try:
        while True:
            step = steps.send(result)
            if isinstance(step, SwapWork):
                assert log.begin_swap(step) is step
                step.run()
                log.finish_swap(step, None)
                result = None
            else:
                result = step()
    except StopIteration:
        pass
    save = log.finish_compaction(work, TIME_MS + 5000)
    assert save is not None
    save()
    log.append(build_batch([None], [b"a"], TIME_MS + 10), now_ms=0, leader_epoch=0)


def build() -> dict[str, bytes]:
    """Return {path below the data directory: content} as today's code writes them."""
    fs = MemoryFileSystem()
    store = LogStore.open(fs, DATA, cluster_id="golden", node_id=1, rng=Ascending())
    store.load({})
    write_orders(store.create_log(ORDERS, ORDERS_ID, CONFIG))
    write_state(store.create_log(STATE, STATE_ID, COMPACTED))
    store.close(broker_epoch=12)
    files = {path.removeprefix(DATA): data for path, data in tree_of(fs).items()}
    assert files.pop(".lock") == b""
    return {path: data for path, data in files.items() if not path.endswith(".deleted")}


def render(path: str, data: bytes) -> str:
    """Return a comment with the path and any text, then the content in hex, 32 bytes a line."""
    lines = [f"# {path}, {len(data)} bytes"]
    if data.isascii() and b"\0" not in data:
        lines += [f"# {line}" for line in data.decode().splitlines()]
    lines += [data[at : at + 32].hex(" ") for at in range(0, len(data), 32)]
    return "\n".join(lines) + "\n"


def parse(text: str) -> bytes:
    return bytes.fromhex(" ".join(line for line in text.splitlines() if not line.startswith("#")))


@pytest.fixture(scope="session")
def golden(repository: Path) -> Path:
    return repository / "tests" / "golden" / "storage"


@pytest.fixture
def files(golden: Path) -> dict[str, bytes]:
    paths = sorted(golden.rglob("*.hex"))
    return {
        path.relative_to(golden).as_posix().removesuffix(".hex"): parse(path.read_text()) for path in paths
    }


@pytest.fixture
def disk(files: dict[str, bytes]) -> MemoryFileSystem:
    """A disk that holds the golden data directory."""
    return disk_with_files({DATA + path: data for path, data in files.items()})


def test_the_bytes_are_what_they_were(golden: Path) -> None:
    built = build()
    if os.environ.get("UPDATE_GOLDEN"):
        for old in golden.rglob("*.hex"):
            old.unlink()
        for path, data in built.items():
            file = golden / f"{path}.hex"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(render(path, data))
    assert {path.relative_to(golden).as_posix() for path in golden.rglob("*.hex")} == {
        f"{path}.hex" for path in built
    }
    for path, data in built.items():
        text = (golden / f"{path}.hex").read_text()
        assert text == render(path, data), f"{path} differs: the storage format changed"


def records(log: Log) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """Yield (offset, key, value) of every record. Markers and gaps have none."""
    found = log.read(log.log_start_offset, max_bytes=1 << 20, up_to=log.log_end_offset)
    for batch in iter_batches(b"".join(found.buffers)):
        if not batch.header.is_control:
            yield from ((one.offset, one.key, one.value) for one in batch.records("", 0))


@pytest.mark.parametrize("is_clean", [True, False], ids=["after a clean stop", "after a crash"])
def test_the_logs_are_read_back(disk: MemoryFileSystem, is_clean: bool) -> None:
    if not is_clean:
        disk.unlink(f"{DATA}clean-shutdown")
    store = LogStore.open(disk, DATA, cluster_id="golden", node_id=1, format_if_empty=False)
    assert (store.clean_start, store.last_broker_epoch) == ((True, 12) if is_clean else (False, -1))
    store.load(WANTED)
    orders, state = store.logs()[ORDERS], store.logs()[STATE]
    assert (orders.log_start_offset, orders.log_end_offset) == (1, 8)
    assert orders.leader_epochs == [(4, 1), (6, 2), (9, 6)]
    assert list(records(orders)) == [
        (0, None, b"hello"),
        (1, None, b"world"),
        (2, b"k", None),
        (3, b"k", None),
        (4, None, b"part"),
        (6, None, b"part"),
    ]
    assert orders.aborted_between(0, 8) == [(7000, 4)]
    known = orders.producers.get(5000)
    assert known is not None
    assert known.batches == [
        SequencedBatch(0, 0, 2, 2, TIME_MS + 500, 1_619_951_678),
        SequencedBatch(1, 1, 3, 3, TIME_MS + 500, 3_670_098_608),
    ]
    assert orders.offset_for_timestamp(TIME_MS + 500) == (TIME_MS + 500, 2)
    assert (state.log_start_offset, state.log_end_offset) == (0, 9)
    assert list(records(state)) == [(6, b"a", b"3" * 40), (7, b"b", b"3" * 40), (8, b"a", None)]
    assert state.cleanable(TIME_MS, 9).dirty_bytes == 0
    store.close(clean=False)


def test_producers_without_checksums_are_read_back(
    disk: MemoryFileSystem, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before checksums wrote this snapshot of the same log."""
    name = f"{8:020d}.producers"
    earlier = parse((repository / f"tests/golden/storage-without-checksums/{name}.hex").read_text())
    file = disk.open(f"{DATA}{ORDERS_DIR}/{name}")
    file.truncate(0)
    file.write_at(0, earlier)
    monkeypatch.setattr(producer_snapshots, "scan_producers", None)  # nothing is scanned
    store = LogStore.open(disk, DATA, cluster_id="golden", node_id=1, format_if_empty=False)
    store.load(WANTED)
    known = store.logs()[ORDERS].producers.get(5000)
    assert known is not None
    assert known.batches == [
        SequencedBatch(0, 0, 2, 2, TIME_MS + 500, UNKNOWN_CRC),
        SequencedBatch(1, 1, 3, 3, TIME_MS + 500, UNKNOWN_CRC),
    ]
    store.close(clean=False)


def test_producers_that_do_not_name_their_log_are_read_back(
    disk: MemoryFileSystem, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before snapshots named their log wrote this one of the same log."""
    path = f"{DATA}{ORDERS_DIR}/{8:020d}.producers"
    earlier = parse((repository / f"tests/golden/storage-producers-1/{8:020d}.producers.hex").read_text())
    today, truncations = decode_producers(disk.read_bytes(path), path)
    disk.write_atomically(path, earlier)
    monkeypatch.setattr(producer_snapshots, "scan_producers", None)  # nothing is scanned
    store = LogStore.open(disk, DATA, cluster_id="golden", node_id=1, format_if_empty=False)
    store.load(WANTED)
    assert decode_producers(earlier, path) == (store.logs()[ORDERS].producers, truncations)
    assert (store.logs()[ORDERS].producers, truncations) == (today, 1)
    store.close(clean=False)


def test_epochs_that_were_not_written_ahead_are_read_back(disk: MemoryFileSystem, repository: Path) -> None:
    """Versions before R58 wrote this file of the same log."""
    path = f"{DATA}{ORDERS_DIR}/leader-epochs"
    earlier = parse((repository / "tests/golden/storage-epochs-1/leader-epochs.hex").read_text())
    disk.write_atomically(path, earlier)
    assert decode_leader_epochs(earlier, path) == ([(4, 1), (6, 2), (9, 6)], 1, False)
    store = LogStore.open(disk, DATA, cluster_id="golden", node_id=1, format_if_empty=False)
    store.load(WANTED)
    assert store.logs()[ORDERS].leader_epochs == [(4, 1), (6, 2), (9, 6)]
    store.close(clean=False)


def test_no_file_is_damaged(disk: MemoryFileSystem) -> None:
    disk.make_dirs(DATA + "__cluster_metadata")
    own, verdicts = verify_data_dir(disk, DATA.rstrip("/"))
    assert own.findings == []
    assert [verdict.findings for verdict in verdicts] == [[], []]


def test_the_small_files_are_read_back(files: dict[str, bytes]) -> None:
    def content(name: str) -> tuple[bytes, str]:
        return files[name], name

    assert decode_node(*content("node.json")) == NodeIdentity("golden", 1, bytes(range(16)).hex())
    assert decode_partition(files[f"{STATE_DIR}/partition.json"]) == ("state", STATE_ID, 7)
    marker = decode_clean_shutdown(*content("clean-shutdown"))
    orders, state = marker.ends[ORDERS_DIR], marker.ends[STATE_DIR]
    assert (marker.broker_epoch, orders[:3], state[:3]) == (12, (1, 8, 1), (0, 9, 0))
    points = decode_recovery_points(files["recovery-points"])
    assert points.points == {ORDERS_DIR: orders.point, STATE_DIR: state.point}
    assert points.problem is None
    assert decode_log_state(*content(f"{ORDERS_DIR}/log-state")) == LogState(1, 1, 2)
    epochs = decode_leader_epochs(*content(f"{ORDERS_DIR}/leader-epochs"))
    assert epochs == ([(4, 1), (6, 2), (9, 6)], 1, True)
    compaction = CompactionPoints(0, 8, ((8, TIME_MS + 5000),))
    assert decode_compaction(*content(f"{STATE_DIR}/compaction")) == compaction
    states, truncations = decode_producers(*content(f"{ORDERS_DIR}/{8:020d}.producers"))
    assert truncations == 1
    assert states.ended == [EndedTransaction(4, 5), EndedTransaction(6, 7)]
    assert [(one.producer_id, one.first_offset, one.last_offset) for one in states.aborted] == [(7000, 4, 5)]


def test_the_indexes_are_read_back(disk: MemoryFileSystem) -> None:
    index = read_index(disk, f"{DATA}{ORDERS_DIR}/{0:020d}.index")
    assert (index.is_whole, index.entries[0]) == (True, IndexEntry(1, 2, 93))
    times = read_index(disk, f"{DATA}{ORDERS_DIR}/{0:020d}.timeindex")
    assert times.entries == [IndexEntry(1, TIME_MS, 0), IndexEntry(1, TIME_MS + 500, 2)]
