"""The logs of one data directory through kills, stops, power losses and damage, without a broker.

The next event is random. ``run_disk_seed`` returns one of these violations:

- A record is gone that was synced before a power loss, or written before a kill or a stop (R24).
- A batch differs from the appended one, or records are gone after damage, and the log is not damaged (R24,
  R25, R42, R43).
- After its loss was accepted, a log lacks another batch than the damaged one (R45).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kafkalite.errors import StorageError
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.gaps import is_gap
from kafkalite.records.header import HEADER_BYTES, parse_header, stamp, total_length
from kafkalite.storage import layout
from kafkalite.storage.accept_loss import accept_loss
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.core.parts import ViolationError

STEPS: Final = 60
_PATH: Final = "/data"
_CONFIG: Final = LogConfig(segment_bytes=2048, index_interval_bytes=256, preallocate_min_bytes=0)
_LOGS: Final = {TopicPartition(f"t{number}", 0): (f"{number:032x}", _CONFIG) for number in range(2)}
_CRC_FROM: Final = 21  #: the bytes of a batch that its checksum covers


@dataclass(slots=True)
class _Written:
    """The appended batches of a log by base offset, and the end of those that must be there."""

    batches: dict[int, bytes] = field(default_factory=dict)
    durable_end: int = 0  #: also after a power loss
    recorded_end: int = 0  #: below it, a bad batch can't be a torn tail


class _World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fs = MemoryFileSystem(crashable=True)
        self.written = {tp: _Written() for tp in _LOGS}
        self.is_over = False
        self.flipped: tuple[TopicPartition, int] | None = None
        self.store = self._open()
        steps: dict[Callable[[], None], float] = {
            self._append: 10,
            self._sync: self.rng.choice([1, 5]),
            self._record: self.rng.choice([1, 3]),
            self._roll: 1,
            self._kill: 1,
            self._stop: 0.5,
            self._lose_power: 1,
            self._damage: 0.5,
        }
        self._steps, self._weights = list(steps), list(steps.values())

    def step(self) -> None:
        self.rng.choices(self._steps, self._weights)[0]()

    def _open(self) -> LogStore:
        store = LogStore.open(self.fs, _PATH, cluster_id="c", node_id=1, rng=random.Random(1))
        store.load(_LOGS)
        return store

    def _any(self) -> tuple[_Written, Log]:
        tp = self.rng.choice(list(_LOGS))
        return self.written[tp], self.store.logs()[tp]

    def _append(self) -> None:
        written, log = self._any()
        batch = build_batch([self.rng.randbytes(self.rng.choice([5, 100, 700]))], timestamps_ms=1)
        stamp(batch, base_offset=log.log_end_offset, leader_epoch=1)
        written.batches[log.log_end_offset] = bytes(batch)
        log.append(batch, now_ms=1, leader_epoch=1)

    def _sync(self) -> None:
        written, log = self._any()
        work = log.begin_sync()
        if work is not None:
            work.run()
            log.finish_sync(work, None)
        written.durable_end = log.synced_end_offset

    def _record(self) -> None:
        self.store.checkpoint()
        for written in self.written.values():
            written.recorded_end = written.durable_end

    def _roll(self) -> None:
        self._any()[1].roll()

    def _kill(self) -> None:
        self.store.close(clean=False)
        self._restart()

    def _stop(self) -> None:
        self.store.close()
        for written in self.written.values():
            written.recorded_end = len(written.batches)
        self._restart()

    def _lose_power(self) -> None:
        self.store.close(clean=False)
        self.fs.crash(self.rng)
        for written in self.written.values():
            written.batches = {o: batch for o, batch in written.batches.items() if o < written.durable_end}
        self._restart()

    def _damage(self) -> None:
        """Change the directory of a log while the process is down. A damaged log ends the history."""
        self.store.close(clean=self.rng.random() < 0.3)
        tp = self.rng.choice(list(_LOGS))
        damages: list[Callable[[TopicPartition], None]] = [self._swap_segments]
        if self.written[tp].recorded_end:
            damages += [self._flip, self._delete, self._swap]
        self.rng.choice(damages)(tp)
        self._restart()

    def _flip(self, tp: TopicPartition) -> None:
        directory = _directory(tp)
        places: list[tuple[str, int, int]] = []
        for name in self.fs.list_dir(directory):
            if not name.endswith(layout.LOG_SUFFIX):
                continue
            data, position, offset = self.fs.read_bytes(f"{directory}/{name}"), 0, int(name[:20])
            while offset < len(self.written[tp].batches) and position + HEADER_BYTES <= len(data):
                length = total_length(data, position)
                if length < HEADER_BYTES:
                    break  # space that is reserved
                places.append((name, self.rng.randrange(position + _CRC_FROM, position + length), offset))
                position += length
                offset += 1
        name, position, offset = self.rng.choice(places)
        self.flipped = tp, offset
        file = self.fs.open(f"{directory}/{name}")
        file.write_at(position, bytes([file.read_at(position, 1)[0] ^ 1 << self.rng.randrange(8)]))
        file.close()

    def _delete(self, tp: TopicPartition) -> None:
        self.fs.remove_tree(_directory(tp))

    def _swap(self, _: TopicPartition) -> None:
        first, second = map(_directory, _LOGS)
        self.fs.rename(first, _PATH + "/away")
        self.fs.rename(second, first)
        self.fs.rename(_PATH + "/away", second)

    def _swap_segments(self, _: TopicPartition) -> None:
        """Exchange two segments with the same name that both logs certainly have.

        A power loss may have removed the index blocks that name the first batches.
        """
        one, other = (self._segments(tp) for tp in _LOGS)
        if not self.fs.boot_count and (names := sorted(one & other)):
            name = self.rng.choice(names)
            first, second = (f"{_directory(tp)}/{name}" for tp in _LOGS)
            for path, data in ((first, self.fs.read_bytes(second)), (second, self.fs.read_bytes(first))):
                self.fs.write_atomically(path, data)

    def _segments(self, tp: TopicPartition) -> set[str]:
        """Return the names of the segments with a batch."""
        end, directory = len(self.written[tp].batches), _directory(tp)
        names = self.fs.list_dir(directory) if self.fs.exists(directory) else []
        return {name for name in names if name.endswith(layout.LOG_SUFFIX) and int(name[:20]) < end}

    def _restart(self) -> None:
        self.store = self._open()
        for tp, written in self.written.items():
            log = self.store.logs()[tp]
            self._compare(log, written)
            self.is_over |= log.is_damaged
            written.durable_end = log.synced_end_offset
        if self.is_over and self.flipped is not None:
            self._accept_loss(*self.flipped)

    def _accept_loss(self, tp: TopicPartition, flipped: int) -> None:
        self.store.close(clean=False)
        accept_loss(self.fs, _directory(tp))
        log = self._open().logs()[tp]
        data, position = _content(log), 0
        found: set[int] = set()
        while position < len(data):
            header = parse_header(memoryview(data), position)
            if not is_gap(header):
                found.add(header.base_offset)
            position += total_length(data, position)
        if missing := self.written[tp].batches.keys() - found - {flipped}:
            raise ViolationError(f"{log.directory}: batches {sorted(missing)} were lost with {flipped}")

    def _compare(self, log: Log, written: _Written) -> None:
        try:
            found = _content(log)
        except StorageError:
            found = b""
        offset = position = 0
        while position < len(found):
            length = total_length(found, position)
            # A batch that was never synced may have survived a power loss.
            expected = written.batches.setdefault(offset, found[position : position + length])
            if found[position : position + length] != expected:
                raise ViolationError(f"{log.directory}: the batch at {offset} is another one")
            position += length
            offset += 1
        missing = [one for one in written.batches if one >= offset]
        if missing and not log.is_damaged:
            raise ViolationError(f"{log.directory}: batches {missing} are gone, and it is not damaged")


def _content(log: Log) -> bytes:
    return b"".join(map(bytes, log.read(0, max_bytes=2**30, up_to=log.log_end_offset).buffers))


def _directory(tp: TopicPartition) -> str:
    return layout.join(_PATH, layout.log_directory_name(_LOGS[tp][0], tp.partition))


def run_disk_seed(seed: int) -> str | None:
    """Return the violation of one seed's history, or None."""
    world = _World(seed)
    try:
        for _ in range(STEPS):
            if world.is_over:
                break
            world.step()
    except ViolationError as violation:
        return str(violation)
    return None
