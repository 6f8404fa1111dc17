"""Power loss at every point of a recorded trace: no acknowledged batch is lost, no torn batch is returned.

R24, R25; the states are those of ``crash_states``. The expectation for a state is noted in the record
itself, by a model that is updated before and after every step.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kafkalite.model import TopicPartition
from kafkalite.records.header import stamp
from kafkalite.storage.filesystem import unlink_existing
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files
from proof.recording_filesystem import CrashState, RecordingFileSystem, crash_states

CONFIG = LogConfig(
    segment_bytes=2048,
    index_interval_bytes=256,
    preallocate_min_bytes=1024,
    preallocate_max_bytes=2048,
    file_delete_delay_ms=1,
)
LOGS = {TopicPartition(f"topic{number}", number): (f"{number:032x}", CONFIG) for number in range(3)}
PATH = "/data"


@dataclass(slots=True)
class Expected:
    """The expected result of recovering one log. Offsets as in Log; ``allowed`` is {base offset: bodies}."""

    end_at_least: int = 0
    start_at_least: int = 0
    start_at_most: int = 0
    allowed: dict[int, set[bytes]] = field(default_factory=dict)

    def copy(self) -> Expected:
        allowed = {offset: set(bodies) for offset, bodies in self.allowed.items()}
        return Expected(self.end_at_least, self.start_at_least, self.start_at_most, allowed)


class Driver:
    """Runs steps on a recorded store, and notes each change of the expected result."""

    def __init__(self, seed: int, make_batch: Callable[..., bytearray]) -> None:
        self.rng = random.Random(seed)
        self.make_batch = make_batch
        self.fs = RecordingFileSystem(MemoryFileSystem(crashable=True))
        self.expected = {tp: Expected() for tp in LOGS}
        self.epoch = 1
        self.count = 0
        self.note()
        self.store = self.open()

    def open(self) -> LogStore:
        store = LogStore.open(self.fs, PATH, cluster_id="c", node_id=1, rng=random.Random(1))
        store.load(LOGS)
        return store

    def note(self) -> None:
        self.fs.note({tp: expected.copy() for tp, expected in self.expected.items()})

    def log(self) -> tuple[Expected, Log]:
        tp = self.rng.choice(sorted(LOGS))
        log = self.store.get(tp)
        assert log is not None
        return self.expected[tp], log

    def append(self) -> None:
        expected, log = self.log()
        for _ in range(self.rng.randrange(1, 4)):
            self.count += 1
            body_bytes = self.rng.choice([20, 100, 300, 900])
            batch = self.make_batch(
                self.rng.randrange(1, 4), body_bytes=body_bytes, timestamp_ms=self.count, seed=self.count
            )
            base_offset = log.log_end_offset
            stamp(batch, base_offset=base_offset, leader_epoch=self.epoch)
            expected.allowed.setdefault(base_offset, set()).add(bytes(batch))
            self.note()
            assert log.append(batch, now_ms=self.count, leader_epoch=self.epoch).base_offset == base_offset

    def sync(self) -> None:
        expected, log = self.log()
        work = log.begin_sync()
        if work is not None:
            work.run()
            log.finish_sync(work, None)
            expected.end_at_least = log.synced_end_offset
            self.note()

    def roll(self) -> None:
        _, log = self.log()
        log.roll()

    def truncate(self) -> None:
        expected, log = self.log()
        if log.log_end_offset - log.log_start_offset < 4:
            return
        offset = self.rng.randrange(log.log_end_offset - 8, log.log_end_offset)
        offset = max(offset, log.log_start_offset)
        bases = [base for base in expected.allowed if base <= offset]
        target = max(bases, default=0)
        expected.end_at_least = min(expected.end_at_least, target)
        expected.start_at_least = min(expected.start_at_least, target)
        self.note()
        assert log.truncate_to(offset) == target
        expected.allowed = {base: bodies for base, bodies in expected.allowed.items() if base < target}
        expected.end_at_least = target
        expected.start_at_most = min(expected.start_at_most, target)
        self.epoch += 1
        self.note()

    def delete(self) -> None:
        expected, log = self.log()
        offset = log.log_start_offset + self.rng.randrange(6)
        if offset > log.synced_end_offset:
            return
        expected.start_at_most = max(expected.start_at_most, offset)
        self.note()
        expected.start_at_least = log.delete_before(offset)
        self.note()

    def retain(self) -> None:
        expected, log = self.log()
        config = LogConfig(
            **{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | {"retention_bytes": 4096}
        )
        log.reconfigure(config)
        expected.start_at_most = max(expected.start_at_most, log.synced_end_offset)
        self.note()
        log.delete_before(log.retention_offset(self.count, up_to=log.synced_end_offset))
        unlink_existing(log._fs, log.take_retired(self.count))
        log.reconfigure(CONFIG)
        expected.start_at_least = expected.start_at_most = log.log_start_offset
        self.note()

    def checkpoint(self) -> None:
        self.store.checkpoint()

    def restart(self) -> None:
        clean = bool(self.rng.randrange(2))
        self.store.close(clean=clean)
        if clean:
            for tp, log in self.store.logs().items():
                self.expected[tp].end_at_least = log.log_end_offset
            self.note()
        self.store = self.open()
        for tp, log in self.store.logs().items():
            self.expected[tp].end_at_least = log.synced_end_offset
        self.note()

    def run(self, steps: int) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.append, 40),
            (self.sync, 25),
            (self.roll, 3),
            (self.truncate, 5),
            (self.delete, 5),
            (self.retain, 4),
            (self.checkpoint, 8),
            (self.restart, 2),
        ]
        actions = [action for action, weight in kinds for _ in range(weight)]
        for _ in range(steps):
            self.rng.choice(actions)()


def check_log(log: Log, expected: Expected, read_all: Callable[..., list[tuple[int, bytes]]]) -> None:
    assert log.offline_reason is None
    assert expected.start_at_least <= log.log_start_offset <= expected.start_at_most
    assert log.log_end_offset >= max(expected.end_at_least, log.log_start_offset)
    assert log.synced_end_offset == log.log_end_offset
    epochs = LeaderEpochs()
    for base_offset, batch in read_all(log):
        assert batch in expected.allowed[base_offset]
        epochs.assign(int.from_bytes(batch[12:16], "big"), base_offset)
    epochs.truncate_from_start(log.log_start_offset)
    assert log.leader_epochs == epochs.entries()  # I7


def recover(fs: MemoryFileSystem) -> LogStore:
    store = LogStore.open(fs, PATH, cluster_id="c", node_id=1, rng=random.Random(1))
    store.load(LOGS)
    return store


def ends(store: LogStore) -> dict[TopicPartition, tuple[int, int]]:
    return {tp: (log.log_start_offset, log.log_end_offset) for tp, log in store.logs().items()}


def check_state(state: CrashState, read_all: Callable[..., list[tuple[int, bytes]]]) -> None:
    fs = disk_with_files(state.files, state.directories, crashable=False)
    store = recover(fs)
    expected: dict[TopicPartition, Expected] = state.note
    for tp, log in store.logs().items():
        check_log(log, expected[tp], read_all)
    found = ends(store)
    store.close(clean=False)
    if state.number % 3:
        return
    again = recover(fs)  # idempotent: the next start, and a clean one, find the same log
    assert ends(again) == found
    again.close(clean=state.number % 2 == 0)
    third = recover(fs)
    assert ends(third) == found
    for tp, log in third.logs().items():
        check_log(log, expected[tp], read_all)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_every_crash_point_of_a_trace_recovers(
    seed: int, make_batch: Any, read_all: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    driver = Driver(seed, make_batch)
    driver.run(50)
    operations = driver.fs.operations
    changes = [one for one in operations if one.kind != "note"]
    kinds = {one.kind for one in changes}
    assert len(changes) >= 300
    assert kinds >= {"create", "write", "truncate", "allocate", "unlink", "rename", "sync", "sync_dir"}
    checked: set[int] = set()  # many lost operations make no difference, so a third of the states occur twice
    for state in crash_states(operations, latest=4):
        key = hash((id(state.note), frozenset(state.files.items()), frozenset(state.directories)))
        if PATH not in state.directories or key in checked:
            continue
        checked.add(key)
        try:
            check_state(state, read_all)
        except BaseException as error:
            error.add_note(
                f"seed {seed}, after operation {state.after} {operations[state.after][:4]}: {state.label}"
            )
            raise
    assert len(checked) > 1000
