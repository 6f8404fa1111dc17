"""R43: bytes that change under a running node, after it has written or checked them, are never served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.errors import LogOfflineError
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem

DIRECTORY = f"/data/{'0' * 32}-0"
CONFIG = LogConfig(segment_bytes=161 * 100, index_interval_bytes=512)
BATCH_BYTES, COUNT = 161, 180  #: a closed segment of 100 batches, and the active one
Batches = list[tuple[int, bytes]]


class File:
    """The two segment files of a log, as an outsider changes them."""

    def __init__(self, fs: MemoryFileSystem) -> None:
        self.fs = fs

    def place(self, number: int) -> tuple[Any, int]:
        """Return the file and the position of batch ``number``."""
        base = number // 100 * 100
        return self.fs.open(f"{DIRECTORY}/{base:020d}.log"), (number - base) * BATCH_BYTES

    def put(self, number: int, at: int, data: bytes) -> None:
        file, position = self.place(number)
        file.write_at(position + at, data)

    def swap(self, one: int, other: int) -> None:
        (file, first), (_, second) = self.place(one), self.place(other)
        batches = file.read_at(first, BATCH_BYTES), file.read_at(second, BATCH_BYTES)
        file.write_at(first, batches[1])
        file.write_at(second, batches[0])


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
def log(fs: MemoryFileSystem, make_batch: Any, sync: Any, read_all: Callable[..., Batches]) -> Log:
    """A running log that has written, synced and read all its batches."""
    log = Log.create(fs, DIRECTORY, CONFIG)
    for number in range(COUNT):
        log.append(make_batch(seed=number, timestamp_ms=1000 + number), now_ms=1, leader_epoch=number // 50)
    sync(log)
    assert len(read_all(log)) == COUNT
    return log


CHANGES = {
    "later offset": lambda file, number: file.put(number, 0, (number + 2).to_bytes(8, "big")),
    "earlier offset": lambda file, number: file.put(number, 0, (number - 1).to_bytes(8, "big")),
    "length": lambda file, number: file.put(number, 8, (200).to_bytes(4, "big")),
    "no length": lambda file, number: file.put(number, 8, (-12).to_bytes(4, "big", signed=True)),
    "epoch": lambda file, number: file.put(number, 12, (number // 50 + 1).to_bytes(4, "big")),
    "magic": lambda file, number: file.put(number, 16, b"\1"),
    "count": lambda file, number: file.put(number, 23, (3).to_bytes(4, "big")),
    "zeros": lambda file, number: file.put(number, 0, bytes(BATCH_BYTES)),
    "two exchanged": lambda file, number: file.swap(number, number + 2),
    "a copy of an earlier one": lambda file, number: file.put(
        number, 0, file.place(number)[0].read_at(file.place(number)[1] - BATCH_BYTES, BATCH_BYTES)
    ),
}


@pytest.mark.parametrize("max_bytes", [1 << 20, 1000, 1])
@pytest.mark.parametrize("number", [7, 97, 141, 177])
@pytest.mark.parametrize("change", CHANGES)
def test_r43_a_batch_at_another_place_is_found_by_the_next_read(
    change: str, number: int, max_bytes: int, log: Log, fs: MemoryFileSystem, read_all: Any, make_batch: Any
) -> None:
    before = read_all(log)
    CHANGES[change](File(fs), number)
    with pytest.raises(LogOfflineError, match="kl log accept-loss"):
        read_all(log, max_bytes)
    assert log.damage is not None
    assert log.damage.sound_end_offset == number
    found = log.read(0, max_bytes=1 << 20, up_to=number)
    assert b"".join(found.buffers) == b"".join(batch for _, batch in before[:number])
    with pytest.raises(LogOfflineError):
        log.append(make_batch(), now_ms=1, leader_epoch=9)


@pytest.mark.parametrize("number", [7, 97, 141, 177])
def test_r43_a_read_that_begins_anywhere_finds_no_batch_at_another_place(
    number: int, log: Log, fs: MemoryFileSystem, make_batch: Any
) -> None:
    """The offset that a batch wrongly claims is not read from it, whatever the reader read before."""
    File(fs).put(number, 0, (number + 2).to_bytes(8, "big"))
    for offset in (number + 2, number, number + 1):
        try:
            found = log.read(offset, max_bytes=1, up_to=COUNT)
        except LogOfflineError:
            continue
        assert b"".join(found.buffers)[61:] == make_batch(seed=offset, timestamp_ms=1000 + offset)[61:]


@pytest.mark.parametrize("number", [7, 97, 141])
def test_r43_a_lookup_by_time_does_not_return_a_wrong_offset(
    number: int, log: Log, fs: MemoryFileSystem
) -> None:
    assert log.offset_for_timestamp(1000 + number) == (1000 + number, number)
    File(fs).put(number, 0, (number + 2).to_bytes(8, "big"))
    with pytest.raises(LogOfflineError, match="kl log accept-loss"):
        log.offset_for_timestamp(1000 + number)


def test_r43_a_read_up_to_an_offset_within_the_log_is_complete(log: Log, read_all: Any) -> None:
    batches = read_all(log)
    for up_to in (1, 99, 100, 101, 179):
        for max_bytes in (0, 1, BATCH_BYTES, BATCH_BYTES + 1, 1000, 1 << 20):
            found = log.read(0, max_bytes=max_bytes, up_to=up_to)
            count = min(max(max_bytes // BATCH_BYTES, 1), up_to)
            assert b"".join(found.buffers) == b"".join(batch for _, batch in batches[:count])
            assert found.next_offset == count
            less = log.read(0, max_bytes=max_bytes, up_to=up_to, at_least_one=False)
            assert less.next_offset == min(max_bytes // BATCH_BYTES, up_to)


_CUT = """
import os, sys
from kafkalite.errors import LogOfflineError
from kafkalite.records.builder import build_batch
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig

directory, cut, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log = Log.create(RealFileSystem(), directory, LogConfig())
for _ in range(20):
    log.append(build_batch([b"x" * 10_000]), now_ms=1, leader_epoch=1)
log.read(0, max_bytes=step, up_to=20)
os.truncate(f"{directory}/{0:020d}.log", cut)
offset = 0
try:
    while offset < 20:
        offset = log.read(offset, max_bytes=step, up_to=20).next_offset
except LogOfflineError:
    print(log.damage.sound_end_offset)
"""


@pytest.mark.parametrize("step", [1 << 20, 30_000, 1])
@pytest.mark.parametrize("cut", [0, 1, 8192, 70_000, 180_000])
def test_a_file_that_is_cut_under_a_running_node_does_not_end_the_process(
    cut: int, step: int, tmp_path: Path
) -> None:
    """An access behind the end of a mapped file would be a SIGBUS."""
    arguments = [sys.executable, "-c", _CUT, f"{tmp_path}/{'0' * 32}-0", str(cut), str(step)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{cut // 10_079}\n"), done.stderr
