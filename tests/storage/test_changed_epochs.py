"""R58: the leader epoch of a stored batch, which its CRC does not cover, is compared with leader-epochs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.errors import DiskFullError, LogOfflineError
from kafkalite.storage.accept_loss import right_epochs
from kafkalite.storage.checkpoints import SavedEpochs, decode_leader_epochs, encode_lines
from kafkalite.storage.damage import Damage
from kafkalite.storage.inspect import verify_log
from kafkalite.storage.leader_epochs import EpochEntry, LeaderEpochs
from kafkalite.storage.log import Log
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.segment import Segment
from proof.damage.one_log import DIRECTORY, PATH, TOPIC_ID, accept_as_expected, log_of, open_store

EPOCHS_FILE = f"{DIRECTORY}/leader-epochs"
BATCH_BYTES, SEGMENT_BATCHES = 161, 25
EPOCHS = [(1, 0), (2, 30), (3, 55), (5, 70)]
COUNT, SYNCED = 80, 72
Batches = list[tuple[int, bytes]]


def epoch_of(number: int) -> int:
    return LeaderEpochs(EPOCHS).epoch_at(number)


class Node:
    """A node with 80 batches in four segments and four epochs. The last eight are not proven to be synced."""

    def __init__(self, make_batch: Any, sync: Any, read_all: Callable[[Log], Batches]) -> None:
        self.fs = MemoryFileSystem(crashable=True)
        self.read_all = read_all
        self.make_batch = make_batch
        self.store = open_store(self.fs)
        log = log_of(self.store)
        for number in range(COUNT):
            log.append(make_batch(seed=number), now_ms=1, leader_epoch=epoch_of(number))
            if number + 1 == SYNCED:
                sync(log)
                self.store.checkpoint()
        self.batches = read_all(log)

    def stop(self, how: str) -> None:
        self.store.close(clean=how == "clean", broker_epoch=7 if how == "clean" else -1)
        if how == "power":
            self.fs.crash(random.Random(1))

    def set_epoch(self, number: int, epoch: int) -> None:
        base = number // SEGMENT_BATCHES * SEGMENT_BATCHES
        file = self.fs.open(f"{DIRECTORY}/{base:020d}.log")
        at = (number - base) * BATCH_BYTES + 12
        assert file.read_at(at, 4) == epoch_of(number).to_bytes(4, "big")
        file.write_at(at, epoch.to_bytes(4, "big", signed=True))

    def start(self) -> Log:
        self.store = open_store(self.fs)
        return log_of(self.store)

    def find_damage(self, log: Log) -> Damage:
        """Return the damage that the start or a reader finds."""
        if log.damage is None:
            with pytest.raises(LogOfflineError, match="kl log accept-loss"):
                self.read_all(log)
        assert log.damage is not None
        return log.damage


@pytest.fixture
def node(make_batch: Any, sync: Any, read_all: Any) -> Node:
    return Node(make_batch, sync, read_all)


#: (batch, its new epoch): up to a later one, down, to none, to one between; the first, the last, at bounds
CHANGES = [
    (0, 2), (0, 5), (7, 3), (24, 2), (25, 0), (29, 2), (30, 1), (30, 3), (40, -1), (49, 1), (50, 3),
    (54, 4), (55, 2), (60, 2), (69, 5), (70, 3), (73, 7), (74, 6), (75, 3), (77, 4), (79, 3), (79, 4),
    (79, 6), (79, 7),
]  # fmt: skip


@pytest.mark.parametrize("how", ["clean", "kill"])
@pytest.mark.parametrize(("number", "epoch"), CHANGES)
def test_r58_a_changed_epoch_is_damage_and_is_corrected_without_a_loss(
    number: int, epoch: int, how: str, node: Node
) -> None:
    node.stop(how)
    node.set_epoch(number, epoch)
    findings = [one.problem for one in verify_log(node.fs, DIRECTORY).findings if one.is_damage]
    assert any(f"leader epoch {epoch}" in one for one in findings)
    log = node.start()
    damage = node.find_damage(log)
    assert (damage.sound_end_offset, damage.records_in_doubt) == (number, 0)
    assert f"leader epoch {epoch}" in damage.cause
    node.store.close(clean=how == "clean")
    node.fs.locked.clear()
    done = accept_as_expected(node.fs, DIRECTORY)
    assert (done.corrected_batches, done.lost_records, done.damage) == (1, 0, None)
    assert len(done.kept) == 1
    log = node.start()
    assert node.read_all(log) == node.batches
    assert [tuple(one) for one in log.leader_epochs] == EPOCHS
    assert log.append(node.make_batch(), now_ms=1, leader_epoch=9).base_offset == COUNT
    node.store.close()
    assert [one for one in verify_log(node.fs, DIRECTORY).findings if one.is_damage] == []


@pytest.mark.parametrize(("number", "epoch"), [(5, 2), (26, 0), (60, 5), (76, 3), (79, 7)])
def test_r58_the_scrub_of_a_running_node_finds_a_changed_epoch(number: int, epoch: int, node: Node) -> None:
    log = log_of(node.store)
    node.set_epoch(number, epoch)
    offset = 0
    while log.damage is None and (work := log.begin_scrub(offset)) is not None:
        while not work.is_complete:
            work.run()
        log.finish_scrub(work)
        offset = work.end_offset
    assert log.damage is not None
    assert (log.damage.sound_end_offset, log.damage.records_in_doubt) == (number, 0)


@pytest.mark.parametrize("number", range(SYNCED - 4, COUNT))
def test_r58_the_file_has_an_epoch_before_its_first_batch(number: int, node: Node) -> None:
    """Whatever process ends after whatever batch: the epochs of all batches are in the file."""
    fs = MemoryFileSystem(crashable=True)
    store = open_store(fs)
    log = log_of(store)
    for at in range(number):
        log.append(node.make_batch(seed=at), now_ms=1, leader_epoch=epoch_of(at))
    store.close(clean=False)
    saved = decode_leader_epochs(fs.read_bytes(EPOCHS_FILE), EPOCHS_FILE)
    assert saved.is_ahead
    assert LeaderEpochs(saved.entries).epoch_at(number - 1) == epoch_of(number - 1)


def test_r58_a_follower_writes_epochs_ahead_too(fs_log: tuple[MemoryFileSystem, Log], node: Node) -> None:
    fs, log = fs_log
    log.append_as_follower(b"".join(batch for _, batch in node.batches), now_ms=1)
    saved = decode_leader_epochs(fs.read_bytes(EPOCHS_FILE), EPOCHS_FILE)
    assert [tuple(one) for one in saved.entries] == EPOCHS


@pytest.mark.parametrize("how", ["clean", "kill"])
def test_r58_an_epoch_that_was_removed_is_written_ahead_again(
    how: str, make_batch: Any, sync: Any, read_all: Callable[[Log], Batches], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower lacks the room for the first batch of epoch 5, follows the leader of epoch 6, and fetches
    the batch again."""
    leader = log_of(open_store(MemoryFileSystem()))
    for number, epoch in enumerate((4, 5, 6)):
        leader.append(make_batch(seed=number), now_ms=1, leader_epoch=epoch)
    first, second, third = (data for _, data in read_all(leader))
    fs = MemoryFileSystem(crashable=True)
    store = open_store(fs)
    log = log_of(store)
    log.append_as_follower(first, now_ms=1, leader_epoch=5)

    def full(*_: object) -> None:
        raise DiskFullError("full")

    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(Segment, "append", full)
        log.append_as_follower(second, now_ms=1, leader_epoch=5)
    log.forget_empty_epoch()
    log.append_as_follower(second, now_ms=1, leader_epoch=6)
    log.append_as_follower(third, now_ms=1, leader_epoch=6)
    assert log.leader_epochs == leader.leader_epochs == [(4, 0), (5, 1), (6, 2)]
    sync(log)
    store.close(clean=how == "clean", broker_epoch=7 if how == "clean" else -1)
    again = log_of(open_store(fs))
    assert [data for _, data in read_all(again)] == [first, second, third]
    assert again.damage is None


@pytest.fixture
def fs_log() -> tuple[MemoryFileSystem, Log]:
    fs = MemoryFileSystem()
    return fs, log_of(open_store(fs))


def test_a_power_loss_may_leave_older_epochs_than_batches(node: Node) -> None:
    """The file is synced with the first batch of an epoch, not before it."""
    log = log_of(node.store)
    log.append(node.make_batch(), now_ms=1, leader_epoch=6)
    older = node.fs.read_bytes(EPOCHS_FILE)
    log.append(node.make_batch(), now_ms=1, leader_epoch=8)
    segment = node.fs.read_bytes(f"{DIRECTORY}/{75:020d}.log")
    node.stop("power")
    node.fs.write_atomically(EPOCHS_FILE, older)
    node.fs.write_atomically(f"{DIRECTORY}/{75:020d}.log", segment)
    log = node.start()
    assert log.damage is None
    assert [tuple(one) for one in log.leader_epochs] == [*EPOCHS, (6, 80), (8, 81)]


@pytest.mark.parametrize("how", ["clean", "kill"])
def test_files_of_earlier_versions_are_used(how: str, node: Node) -> None:
    node.stop(how)
    lines = node.fs.read_bytes(EPOCHS_FILE).splitlines()
    entries = [line.decode() for line in lines[3:-1]]
    if how == "kill":
        entries.pop()  # an earlier version wrote it with the next sync
        node.fs.unlink(f"{PATH}/recovery-points")
    node.fs.write_atomically(EPOCHS_FILE, encode_lines("leader-epochs", ["truncations 0", *entries]))
    log = node.start()
    assert node.read_all(log) == node.batches
    assert [tuple(one) for one in log.leader_epochs] == EPOCHS
    log.append(node.make_batch(), now_ms=1, leader_epoch=5)
    assert node.fs.read_bytes(EPOCHS_FILE).splitlines()[0] == b"kafkalite leader-epochs 2"


@pytest.mark.parametrize("how", ["clean", "kill"])
def test_an_older_version_of_the_file_is_rebuilt(
    how: str, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Several batches with later epochs are not all damaged: the file is."""
    log = log_of(node.store)
    older = node.fs.read_bytes(EPOCHS_FILE)
    for _ in range(30):
        log.append(node.make_batch(), now_ms=1, leader_epoch=8)
    node.batches = node.read_all(log)
    node.stop(how)
    node.fs.write_atomically(EPOCHS_FILE, older)
    found = [one for one in verify_log(node.fs, DIRECTORY).findings if one.path == EPOCHS_FILE]
    assert [one.is_damage for one in found] == [False]
    log = node.start()
    assert node.read_all(log) == node.batches
    assert [tuple(one) for one in log.leader_epochs] == [*EPOCHS, (8, 80)]
    assert "leader epochs rebuilt" in caplog.text


@pytest.mark.parametrize("how", ["clean", "kill"])
@pytest.mark.parametrize("content", [None, b"", b"\0" * 90, b"kafkalite leader-epochs 2\n"])
def test_a_missing_or_damaged_file_is_rebuilt(how: str, content: bytes | None, node: Node) -> None:
    node.stop(how)
    node.fs.unlink(EPOCHS_FILE)
    if content is not None:
        node.fs.write_atomically(EPOCHS_FILE, content)
    log = node.start()
    assert node.read_all(log) == node.batches
    assert [tuple(one) for one in log.leader_epochs] == EPOCHS


def test_r42_the_epochs_of_another_log_are_not_used(node: Node) -> None:
    node.stop("clean")
    content = node.fs.read_bytes(EPOCHS_FILE).replace(f"{TOPIC_ID}-0".encode(), f"{TOPIC_ID}-1".encode())
    lines = [line.decode() for line in content.splitlines()[1:-1]]
    node.fs.write_atomically(EPOCHS_FILE, encode_lines("leader-epochs", [*lines[:2], "1 0"], 2))
    log = node.start()
    assert node.read_all(log) == node.batches


def test_batches_above_a_truncation_that_was_interrupted_are_not_judged(node: Node) -> None:
    """The log state is written first; then the file still has the epochs of the removed batches."""
    log = log_of(node.store)
    log.truncate_to(60)
    for number in range(20):
        log.append(node.make_batch(seed=number), now_ms=1, leader_epoch=6)
    batches = node.read_all(log)
    node.stop("kill")
    log = node.start()
    assert node.read_all(log) == batches
    assert [tuple(one) for one in log.leader_epochs] == [(1, 0), (2, 30), (3, 55), (6, 60)]


@pytest.mark.parametrize(
    ("own", "saved", "expected"),
    [
        ([1, 1, 3, 2, 2], None, [1, 1, 2, 2, 2]),
        ([2, 2, 1, 2], None, [2, 2, 2, 2]),
        ([1, 1, 2, 2], None, [1, 1, 2, 2]),
        ([1, 9, 2, 2], SavedEpochs([EpochEntry(1, 0), EpochEntry(2, 2)], 0), [1, 1, 2, 2]),
        ([1, 1, 2, 9], SavedEpochs([EpochEntry(1, 0), EpochEntry(2, 2)], 0), [1, 1, 2, 2]),
        ([1, 1, 9, 9], SavedEpochs([EpochEntry(1, 0), EpochEntry(2, 2)], 0), [1, 1, 9, 9]),
        ([1, 1, 2, 9], SavedEpochs([EpochEntry(1, 0), EpochEntry(2, 2)], 0, False), [1, 1, 2, 9]),
        ([0, 1, 2, 2], SavedEpochs([EpochEntry(1, 1), EpochEntry(2, 2)], 0), [0, 1, 2, 2]),
    ],
)
def test_the_epochs_that_batches_must_have(
    own: list[int], saved: SavedEpochs | None, expected: list[int]
) -> None:
    assert right_epochs(own, list(range(len(own))), saved) == expected


@pytest.mark.parametrize("numbers", [[79], [78, 79], [72, 75], [0, 79]])
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_r58_later_epochs_without_a_file_are_corrected_by_the_epoch_of_the_partition(
    numbers: list[int], is_rebuilt: bool, node: Node
) -> None:
    """The file is missing, and only the metadata knows that no leader had the epoch of a batch."""
    node.stop("kill")
    node.fs.unlink(EPOCHS_FILE)
    for number in numbers:
        node.set_epoch(number, 9)
    findings = [one.problem for one in verify_log(node.fs, DIRECTORY).findings if one.path == EPOCHS_FILE]
    assert any("the file is missing" in one for one in findings)
    if is_rebuilt:
        log = node.start()
        log.refuse_epochs_above(5)
        damage = node.find_damage(log)
        if (
            numbers[-1] == 79 and numbers[0] > 0
        ):  # with a sound batch behind it, recovery finds the damage itself
            assert damage.sound_end_offset == numbers[0]
            assert damage.hint.endswith(f"'kl log accept-loss {DIRECTORY} --leader-epoch 5'")
        node.store.close(clean=False)
    node.fs.locked.clear()
    done = accept_as_expected(node.fs, DIRECTORY, 5)
    assert (done.lost_records, done.corrected_batches) == (0, len(numbers))
    log = node.start()
    log.refuse_epochs_above(5)
    assert log.damage is None
    assert node.read_all(log) == node.batches
