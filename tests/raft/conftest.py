"""Shared by the raft tests: a disk that loses power, controlled executors, and a log that two nodes share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from kafkalite.errors import DiskFullError
from kafkalite.metadata.records import PartitionRecord, TopicRecord
from kafkalite.raft.quorum import StaleImageError

SECTOR_BYTES = 64


class PowerLoss(BaseException):
    """The disk stops here; nothing after it happens."""


class Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""

    def after_power_loss(self, rng: random.Random) -> Inode:
        """Any of the unsynced sectors may have reached the disk, and the size may be the old or the new
        one.
        """
        after = Inode()
        size = rng.choice([len(self.durable), len(self.data)])
        old, new = self.durable.ljust(size, b"\0"), bytes(self.data).ljust(size, b"\0")
        for start in range(0, size, SECTOR_BYTES):
            source = rng.choice([old, new])
            after.data += source[start : min(start + SECTOR_BYTES, size)]
        after.durable = bytes(after.data)
        return after


class CrashFile:
    def __init__(self, disk: CrashDisk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode

    def write_at(self, position: int, buffer: Any) -> None:
        data = self._inode.data
        if self._disk.full:
            data[position : position + len(buffer)] = bytes(buffer[: len(buffer) // 2])
            raise DiskFullError("no space left")
        self._disk.maybe_fail("write")
        data.extend(bytes(max(0, position - len(data))))
        data[position : position + len(buffer)] = buffer
        self._disk.step()

    def read_at(self, position: int, length: int) -> bytes:
        return bytes(self._inode.data[position : position + length])

    def size(self) -> int:
        return len(self._inode.data)

    def truncate(self, length: int) -> None:
        self._disk.maybe_fail("truncate")
        del self._inode.data[length:]
        self._disk.step()

    def sync(self) -> None:
        self._disk.maybe_fail("sync")
        self._disk.sync_count += 1
        self._disk.step()
        self._inode.durable = bytes(self._inode.data)

    def close(self) -> None:
        pass


class CrashDisk:
    """The part of the FileSystem seam that the journal uses; every step can be the last."""

    def __init__(self) -> None:
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.steps_left: int | None = None
        self.steps = 0
        self.full = False
        self.failing: set[str] = set()
        self.sync_count = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left <= 0:
                raise PowerLoss

    def maybe_fail(self, what: str) -> None:
        if what in self.failing:
            raise OSError(5, "Input/output error")

    def after_power_loss(self, rng: random.Random) -> CrashDisk:
        after = CrashDisk()
        made: dict[int, Inode] = {}
        for name in sorted(self.names.keys() | self.durable_names.keys()):
            inode = rng.choice([self.names.get(name), self.durable_names.get(name)])
            if inode is not None:
                after.names[name] = made.setdefault(id(inode), inode.after_power_loss(rng))
        after.durable_names = dict(after.names)
        return after

    def open(self, path: str, *, create: bool = False) -> CrashFile:
        if create and path not in self.names:
            self.names[path] = Inode()
        return CrashFile(self, self.names[path])

    def exists(self, path: str) -> bool:
        return path in self.names

    def make_dirs(self, path: str) -> None:
        pass

    def sync_dir(self, path: str) -> None:
        self.maybe_fail("sync_dir")
        self.step()
        self.durable_names = dict(self.names)

    def rename(self, old: str, new: str) -> None:
        self.names[new] = self.names.pop(old)
        self.step()

    def unlink(self, path: str) -> None:
        del self.names[path]
        self.step()

    def read_bytes(self, path: str) -> bytes:
        return bytes(self.names[path].data)

    def write_atomically(self, path: str, data: bytes) -> None:
        file = self.open(path + ".tmp", create=True)
        file.truncate(0)
        file.write_at(0, data)
        file.sync()
        self.rename(path + ".tmp", path)
        self.sync_dir("")


class InlineExecutor(Executor):
    """Runs every call at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class HeldExecutor(Executor):
    """Keeps calls until ``run_one``: a slow disk under the test's control."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((lambda: fn(*args, **kwargs), future))
        return future

    def run_one(self) -> None:
        call, future = self.calls.pop(0)
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)


class Machine:
    """A state machine that records its calls."""

    def __init__(self) -> None:
        self.loaded: tuple[int, list[Any]] | None = None
        self.applied: list[tuple[int, list[Any]]] = []
        self.failure: BaseException | None = None
        self.raising: BaseException | None = None

    def load(self, offset: int, records: Iterable[Any]) -> None:
        self.loaded = (offset, list(records))

    def apply(self, offset: int, records: Iterable[Any]) -> None:
        if self.raising is not None:
            raise self.raising
        self.applied.append((offset, list(records)))

    def snapshot(self) -> tuple[int, Iterable[Any]]:
        everything = list(self.loaded[1]) if self.loaded else []
        for _, records in self.applied:
            everything += records
        offset = self.applied[-1][0] if self.applied else 0
        return offset, iter(everything)

    def fail(self, error: BaseException) -> None:
        assert self.failure is None
        self.failure = error

    @property
    def names(self) -> list[str]:
        """The topics created so far, in order."""
        return [record.name for record in self.snapshot()[1] if isinstance(record, TopicRecord)]


class SharedLog:
    """A consensus log whose members all believe to lead, as a deposed leader does.

    An entry gets its place in the log first. Whether it is void is decided when it is delivered, by the
    same comparison on every member. The test decides when a member receives an entry.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.entries: list[tuple[int, int, tuple[Any, ...], asyncio.Future[int]]] = []
        self.next_offset = 1

    def append(self, after_offset: int, records: Iterable[Any]) -> asyncio.Future[int]:
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.entries.append((self.next_offset, after_offset, tuple(records), outcome))
        self.next_offset += self.rng.choice(
            [1, 1, 2, 5]
        )  # other entries of the consensus layer are in between
        return outcome


class Member:
    """One node's Quorum on a shared log."""

    is_single_node = False

    def __init__(self, log: SharedLog, node_id: int) -> None:
        self.leader_id: int | None = node_id
        self.on_leader_change: list[Any] = []
        self.offset = 0
        self.applied: list[tuple[int, int]] = []  # (offset, decided on) of entries that took effect
        self._log = log
        self._delivered = 0
        self._own: list[asyncio.Future[int]] = []
        self._machine: Any = None

    def attach(self, machine: Any) -> None:
        self._machine = machine

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def commit(self, records: Iterable[Any], after_offset: int) -> int:
        outcome = self._log.append(after_offset, records)
        self._own.append(outcome)
        return await outcome

    def voter_ids(self):
        return frozenset()

    async def read_index(self) -> int:
        return self.offset

    @property
    def is_behind(self) -> bool:
        return self._delivered < len(self._log.entries)

    def deliver(self) -> None:
        """Take the next entry of the log."""
        if not self.is_behind:
            return
        offset, decided_on, records, outcome = self._log.entries[self._delivered]
        self._delivered += 1
        if decided_on == self.offset:
            self.applied.append((offset, decided_on))
            self.offset = offset
            self._machine.apply(offset, records)
            if outcome in self._own:
                outcome.set_result(offset)
        elif outcome in self._own:
            outcome.set_exception(StaleImageError(decided_on=decided_on, offset=self.offset))


class RaftKit:
    """The helpers above, for tests that can't import this file."""

    PowerLoss = PowerLoss
    CrashDisk = CrashDisk
    InlineExecutor = InlineExecutor
    HeldExecutor = HeldExecutor
    Machine = Machine
    SharedLog = SharedLog
    Member = Member

    @staticmethod
    def topic(number: int) -> list[Any]:
        """The records of a topic ``t<number>`` with one partition."""
        topic_id = f"{number:032x}"
        return [TopicRecord(topic_id, f"t{number}"), PartitionRecord(topic_id, 0, (1,), (1,), 1, 0, 0)]

    @staticmethod
    async def turn(count: int = 5) -> None:
        """Let everything that is ready run."""
        for _ in range(count):
            await asyncio.sleep(0)


@pytest.fixture(scope="session")
def kit() -> type[RaftKit]:
    return RaftKit


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()
