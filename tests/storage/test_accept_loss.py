"""R45: `kl log accept-loss` keeps every intact batch at its offset, and puts gaps in place of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.errors import DataDirectoryError, LogOfflineError
from kafkalite.model import TopicPartition
from kafkalite.records.gaps import is_gap
from kafkalite.records.header import check
from kafkalite.storage.log import Log
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.damage.one_log import (
    CONFIG,
    DIRECTORY,
    ORDERS,
    PATH,
    TOPIC_ID,
    accept_as_expected,
    log_of,
    open_store,
)

BATCH_BYTES = 161
Spoil = Callable[[MemoryFileSystem], None]


def path(base_offset: int) -> str:
    return f"{DIRECTORY}/{base_offset:020d}.log"


def flip(fs: MemoryFileSystem, base_offset: int, number: int) -> None:
    fs.open(path(base_offset)).write_at(number * BATCH_BYTES + 100, b"\xff\xfe\xfd")


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
def written(fs: MemoryFileSystem, make_batch: Any, sync: Any, read_all: Any) -> list[tuple[int, bytes]]:
    """Write 80 batches in four segments, and let the process end."""
    store = open_store(fs)
    log = log_of(store)
    for number in range(80):
        log.append(make_batch(seed=number), now_ms=1, leader_epoch=1 + number // 30)
    sync(log)
    store.checkpoint()
    batches: list[tuple[int, bytes]] = read_all(log)
    store.close(clean=False)
    return batches


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        (lambda fs: flip(fs, 75, 2), [77]),
        (lambda fs: flip(fs, 75, 0), [75]),
        (lambda fs: flip(fs, 75, 4), [79]),
        (lambda fs: fs.unlink(path(50)), list(range(50, 75))),
        (lambda fs: fs.unlink(path(0)), list(range(25))),
        (lambda fs: fs.unlink(path(75)), list(range(75, 80))),
        (lambda fs: fs.open(path(25)).truncate(10 * BATCH_BYTES + 3), list(range(35, 50))),
        (lambda fs: fs.open(path(75)).truncate(3 * BATCH_BYTES + 3), [78, 79]),
        (lambda fs: fs.open(path(75)).write_at(0, bytes(1024)), list(range(75, 80))),
        (lambda fs: fs.remove_tree(DIRECTORY), list(range(80))),
    ],
)
@pytest.mark.parametrize("is_clean", [False, True])
def test_every_intact_batch_stays_and_gaps_take_the_place_of_the_others(
    spoil: Spoil,
    lost: list[int],
    is_clean: bool,
    fs: MemoryFileSystem,
    written: list[tuple[int, bytes]],
    read_all: Any,
    make_batch: Any,
) -> None:
    if is_clean:
        open_store(fs).close(broker_epoch=7)
    spoil(fs)
    store = open_store(fs)
    if log_of(store).damage is None:
        assert is_clean, "a clean start notices changed bits when they are read"
        with pytest.raises(LogOfflineError, match="kl log accept-loss"):
            read_all(log_of(store))
    damage = log_of(store).damage
    assert damage is not None
    assert damage.records_in_doubt == len(lost)
    store.close(clean=is_clean)
    accepted = accept_as_expected(fs, DIRECTORY)
    assert (accepted.lost_records, accepted.log_end_offset) == (len(lost), 80)
    store = open_store(fs)
    log = log_of(store)
    assert log.damage is None
    assert log.log_end_offset == 80
    found = read_all(log)
    assert [one for one in found if not is_gap(check(one[1]))] == [
        one for one in written if one[0] not in lost
    ]
    assert log.append(make_batch(), now_ms=1, leader_epoch=9).base_offset == 80
    store.close()
    assert log_of(open_store(fs)).damage is None
    assert accept_loss_again(fs) == 0


@pytest.mark.parametrize("kind", ["lower offset", "copy"])
def test_the_offsets_of_a_whole_last_batch_are_not_used_again(
    kind: str, fs: MemoryFileSystem, make_batch: Any, read_all: Any
) -> None:
    """Only the base offset of the last batch is damaged, so its record count is known. The bytes behind the
    last batch that are a copy of it are no lost batch."""
    store = open_store(fs)
    for number in range(9):
        log_of(store).append(make_batch(seed=number), now_ms=1, leader_epoch=1)
    log_of(store).append(make_batch(count=3, seed=9), now_ms=1, leader_epoch=1)
    written = read_all(log_of(store))
    store.close(clean=False)
    lost = 3
    if kind == "lower offset":
        fs.open(path(0)).write_at(9 * BATCH_BYTES + 7, b"\x08")
    else:
        put(fs, 0, 10, batch_at(fs, 0, 9))
        flip(fs, 0, 8)
        lost = 1
    store = open_store(fs)
    damage = log_of(store).damage
    assert damage is not None and damage.records_in_doubt == lost
    store.close(clean=False)
    assert accept_as_expected(fs, DIRECTORY).lost_records == lost
    log = log_of(open_store(fs))
    assert (log.damage, log.log_end_offset) == (None, 12)
    kept = [one for one in read_all(log) if not is_gap(check(one[1]))]
    assert kept == (written[:9] if kind == "lower offset" else [*written[:8], written[9]])


def batch_at(fs: MemoryFileSystem, base_offset: int, number: int) -> bytes:
    return fs.open(path(base_offset)).read_at(number * BATCH_BYTES, BATCH_BYTES)


def put(fs: MemoryFileSystem, base_offset: int, number: int, batch: bytes) -> None:
    fs.open(path(base_offset)).write_at(number * BATCH_BYTES, batch)


def exchange_first(fs: MemoryFileSystem, base_offset: int, number: int) -> None:
    first, other = batch_at(fs, base_offset, 0), batch_at(fs, base_offset, number)
    put(fs, base_offset, 0, other)
    put(fs, base_offset, number, first)


def remove_first(fs: MemoryFileSystem, base_offset: int) -> None:
    content = fs.read_bytes(path(base_offset))
    file = fs.open(path(base_offset))
    file.truncate(0)
    file.write_at(0, content[BATCH_BYTES:])


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        (lambda fs, base: exchange_first(fs, base, 1), 0),
        (lambda fs, base: exchange_first(fs, base, 2), 0),
        (lambda fs, base: exchange_first(fs, base, 4 if base == 75 else 24), 0),
        (remove_first, 1),
        (lambda fs, base: put(fs, base, 0, batch_at(fs, base, 1)), 1),
        (lambda fs, base: put(fs, base, 0, batch_at(fs, base, 3)), 1),
        (lambda fs, base: put(fs, base, 0, batch_at(fs, base, 3)[:8] + batch_at(fs, base, 1)[8:]), 1),
        (lambda fs, base: put(fs, base, 0, base.to_bytes(8, "big") + batch_at(fs, base, 1)[8:]), 1),
    ],
)
@pytest.mark.parametrize("base_offset", [0, 25, 75])
@pytest.mark.parametrize("is_clean", [False, True])
def test_another_batch_in_the_first_place_of_a_segment_costs_no_other_one(
    spoil: Callable[[MemoryFileSystem, int], None],
    lost: int,
    base_offset: int,
    is_clean: bool,
    fs: MemoryFileSystem,
    written: list[tuple[int, bytes]],
    read_all: Any,
) -> None:
    """The index names the first batch and the last one, so the file is known by either of them."""
    if is_clean:
        open_store(fs).close(broker_epoch=7)
    spoil(fs, base_offset)
    assert accept_as_expected(fs, DIRECTORY).lost_records == lost
    found = read_all(log_of(open_store(fs)))
    first = {base_offset} if lost else set()
    assert [one for one in found if not is_gap(check(one[1]))] == [
        one for one in written if one[0] not in first
    ]


def accept_loss_again(fs: MemoryFileSystem) -> int:
    fs.locked.clear()
    return accept_as_expected(fs, DIRECTORY).lost_records


def test_the_damaged_files_are_kept(fs: MemoryFileSystem, written: list[tuple[int, bytes]]) -> None:
    flip(fs, 75, 2)
    damaged = fs.read_bytes(path(75))
    (kept,) = accept_as_expected(fs, DIRECTORY).kept
    assert kept == f"{path(75)}.damaged-1"
    assert fs.read_bytes(kept) == damaged


def test_an_interrupted_repair_is_repeated(fs: MemoryFileSystem, written: list[tuple[int, bytes]]) -> None:
    flip(fs, 75, 2)
    real = fs.rename
    for stop_at in (0, 1):
        calls: list[str] = []

        def stop(old: str, new: str, stop_at: int = stop_at, calls: list[str] = calls) -> None:
            if old.startswith(path(75)) and not old.endswith(".tmp"):
                calls.append(old)
                if len(calls) > stop_at:
                    raise OSError(5, "killed")
            real(old, new)

        fs.rename = stop  # type: ignore[method-assign]
        with pytest.raises(OSError, match="killed"):
            accept_as_expected(fs, DIRECTORY)
        fs.rename = real  # type: ignore[method-assign]
    accept_as_expected(fs, DIRECTORY)
    log = log_of(open_store(fs))
    assert (log.log_end_offset, log.damage) == (80, None)


def test_a_directory_in_use_or_of_another_log_is_refused(
    fs: MemoryFileSystem, written: list[tuple[int, bytes]]
) -> None:
    with pytest.raises(DataDirectoryError, match="not the directory of a log"):
        accept_as_expected(fs, PATH)
    with pytest.raises(DataDirectoryError, match="does not list such a log"):
        accept_as_expected(fs, f"{PATH}/{TOPIC_ID}-5")
    store = open_store(fs)
    with pytest.raises(DataDirectoryError, match="in use"):
        accept_as_expected(fs, DIRECTORY)
    store.close(clean=False)
    fs.rename(DIRECTORY, f"{PATH}/{TOPIC_ID}-5")
    with pytest.raises(DataDirectoryError, match="holds the log orders-0"):
        accept_as_expected(fs, f"{PATH}/{TOPIC_ID}-5")


OTHER = TopicPartition("others", 0)
OTHER_ID = "1" * 32
OTHER_DIRECTORY = f"{PATH}/{OTHER_ID}-0"
FILES = (".log", ".index", ".timeindex")


@pytest.fixture
def other(fs: MemoryFileSystem, written: object, make_batch: Any, sync: Any) -> str:
    """Write another partition with segments 0, 24, 48 and 72, and return its directory."""
    store = open_store(fs)
    store.load({ORDERS: (TOPIC_ID, CONFIG), OTHER: (OTHER_ID, CONFIG)})
    log = store.get(OTHER)
    assert log is not None
    log.append(make_batch(seed=999, body_bytes=300), now_ms=1, leader_epoch=1)
    for number in range(89):
        log.append(make_batch(seed=1000 + number), now_ms=1, leader_epoch=1)
    sync(log)
    store.checkpoint()
    store.close(clean=False)
    return OTHER_DIRECTORY


def copy(fs: MemoryFileSystem, source: str, target: str, suffixes: tuple[str, ...] = (".log",)) -> None:
    for suffix in suffixes:
        content = fs.read_bytes(source.removesuffix(".log") + suffix)
        fs.write_atomically(target.removesuffix(".log") + suffix, content)


def exchange(fs: MemoryFileSystem, one: int, two: int, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        paths = [path(base).removesuffix(".log") + suffix for base in (one, two)]
        contents = [fs.read_bytes(name) for name in paths]
        for name, content in zip(paths, reversed(contents), strict=True):
            fs.write_atomically(name, content)


def foreign_path(fs: MemoryFileSystem, number: int) -> str:
    names = sorted(name for name in fs.list_dir(OTHER_DIRECTORY) if name.endswith(".log"))
    return f"{OTHER_DIRECTORY}/{names[number]}"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fs: copy(fs, path(0), path(1)),
        lambda fs: copy(fs, path(25), path(40)),
        lambda fs: copy(fs, foreign_path(fs, 1), path(40)),
        lambda fs: copy(fs, foreign_path(fs, 0), path(1)),
        lambda fs: copy(fs, foreign_path(fs, 2), path(40), FILES),
        lambda fs: fs.write_atomically(path(5), b""),
        lambda fs: exchange(fs, 25, 50, (".log",)),
        lambda fs: exchange(fs, 0, 50, (".log",)),
        lambda fs: exchange(fs, 0, 75, (".log",)),
        lambda fs: exchange(fs, 0, 50, FILES),
        lambda fs: exchange(fs, 25, 50, (".index", ".timeindex")),
        lambda fs: exchange(fs, 25, 75, (".index",)),
    ],
)
def test_files_under_wrong_names_lose_no_intact_batch(
    spoil: Spoil, fs: MemoryFileSystem, written: list[tuple[int, bytes]], other: str, read_all: Any
) -> None:
    fs.locked.clear()
    intact = fs.read_bytes(path(25)), fs.read_bytes(path(75))
    spoil(fs)
    accepted = accept_as_expected(fs, DIRECTORY)
    assert (accepted.lost_records, accepted.damage) == (0, None)
    assert fs.read_bytes(path(25)) == intact[0]
    log = log_of(open_store(fs))
    assert (log.damage, log.log_end_offset) == (None, 80)
    assert read_all(log) == written


@pytest.mark.parametrize("suffixes", [(".log",), FILES])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("base_offset", [0, 25, 50, 75])
def test_batches_of_another_partition_are_never_adopted(
    base_offset: int,
    number: int,
    suffixes: tuple[str, ...],
    fs: MemoryFileSystem,
    written: list[tuple[int, bytes]],
    other: str,
    read_all: Any,
) -> None:
    fs.locked.clear()
    copy(fs, foreign_path(fs, number), path(base_offset), suffixes)
    accepted = accept_as_expected(fs, DIRECTORY)
    lost = range(base_offset, min(base_offset + 25, 80))
    assert (accepted.lost_records, accepted.damage) == (len(lost), None)
    found = read_all(log_of(open_store(fs)))
    assert [one for one in found if not is_gap(check(one[1]))] == [
        one for one in written if one[0] not in lost
    ]


@pytest.mark.parametrize("stop_at", range(7))
def test_an_interrupted_repair_of_exchanged_segments_is_repeated(
    stop_at: int, fs: MemoryFileSystem, written: list[tuple[int, bytes]], read_all: Any
) -> None:
    exchange(fs, 25, 50, (".log",))
    real = fs.rename
    calls: list[str] = []

    def stop(old: str, new: str) -> None:
        calls.append(old)
        if len(calls) > stop_at:
            raise OSError(5, "killed")
        real(old, new)

    fs.rename = stop  # type: ignore[method-assign]
    try:
        accept_as_expected(fs, DIRECTORY)
    except OSError:
        fs.locked.clear()
    fs.rename = real  # type: ignore[method-assign]
    assert accept_as_expected(fs, DIRECTORY).lost_records == 0
    assert read_all(log_of(open_store(fs))) == written


def test_a_base_offset_that_inserted_bytes_made_too_high_is_not_believed(
    fs: MemoryFileSystem, written: list[tuple[int, bytes]], read_all: Any
) -> None:
    content = fs.read_bytes(path(75))
    at = 2 * BATCH_BYTES + 6  # in the base offset of batch 77
    fs.write_atomically(path(75), content[:at] + b"\x55" + content[at:])
    accepted = accept_as_expected(fs, DIRECTORY)
    assert (accepted.lost_records, accepted.log_end_offset) == (1, 80)
    found = read_all(log_of(open_store(fs)))
    assert [one for one in found if not is_gap(check(one[1]))] == [one for one in written if one[0] != 77]


def cut(content: bytes, first: int, count: int) -> bytes:
    return content[: first * BATCH_BYTES] + content[(first + count) * BATCH_BYTES :]


def insert(content: bytes, at: int, other: bytes) -> bytes:
    return content[: at * BATCH_BYTES] + other + content[at * BATCH_BYTES :]


def part(content: bytes, first: int, count: int) -> bytes:
    return content[first * BATCH_BYTES : (first + count) * BATCH_BYTES]


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda one: cut(one, 3, 1), [28]),
        (lambda one: cut(one, 3, 7), list(range(28, 35))),
        (lambda one: cut(cut(one, 9, 1), 3, 1), [28, 34]),
        (lambda one: cut(one, 23, 1), [48]),
        (lambda one: insert(cut(one, 3, 1), 4, part(one, 3, 1)), []),
        (lambda one: insert(cut(one, 3, 5), 8, part(one, 3, 5)), []),
        (lambda one: insert(one, 9, part(one, 3, 5)), []),
        (lambda one: one[:1024] + one[2048:3072] + one[1024:2048] + one[3072:], [31, 37, 44]),
    ],
)
def test_batches_behind_cut_or_exchanged_bytes_stay(
    change: Callable[[bytes], bytes],
    lost: list[int],
    fs: MemoryFileSystem,
    written: list[tuple[int, bytes]],
    read_all: Any,
) -> None:
    fs.write_atomically(path(25), change(fs.read_bytes(path(25))))
    accepted = accept_as_expected(fs, DIRECTORY)
    assert (accepted.lost_records, accepted.log_end_offset, accepted.damage) == (len(lost), 80, None)
    found = read_all(log_of(open_store(fs)))
    assert [one for one in found if not is_gap(check(one[1]))] == [
        one for one in written if one[0] not in lost
    ]


def test_the_line_about_an_offline_log_has_the_whole_command(
    fs: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    directory = "/" + "/".join(["long"] * 60) + f"/{TOPIC_ID}-0"
    Log(fs, directory, CONFIG).mark_damaged("the checksum of a batch in a file with a long name is wrong")
    assert f"'kl log accept-loss {directory}'" in caplog.text
