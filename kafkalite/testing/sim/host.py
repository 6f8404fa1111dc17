"""A simulated host: a disk, clocks, at most one running program, and their faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, Final, ParamSpec, TypeVar

from kafkalite.rng import Rng
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.sim.loop import Process, SimLoop
from kafkalite.testing.sim.network import Network

#: 2026-01-01, so that record timestamps are plausible.
EPOCH_MS: Final = 1_767_225_600_000

A = ParamSpec("A")
T = TypeVar("T")


class HostClock:
    """The Clock of one host. ``monotonic_ms`` never jumps, but the wall clock may."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.offset_ms = 0

    def wall_ms(self) -> int:
        return EPOCH_MS + self.offset_ms + int(self._loop.time() * 1000)

    def monotonic_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def monotonic_ns(self) -> int:
        return int(self._loop.time() * 1_000_000_000)

    async def sleep_ms(self, duration_ms: int) -> None:
        await asyncio.sleep(duration_ms / 1000)


class Disk:
    """The durations of blocking disk calls. The content is in the host's file system."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.sync_s = 0.0005  #: minimum duration
        self.jitter_s = 0.001  #: maximum addition to the minimum
        self.stall_rate = 0.0  #: fraction of the syncs that take up to ``stall_s`` longer
        self.stall_s = 0.5

    def delay_s(self) -> float:
        delay_s = self.sync_s + self.jitter_s * self.rng.random()
        if self.stall_rate and self.rng.random() < self.stall_rate:
            delay_s += self.stall_s * self.rng.random()
        return delay_s


class SimExecutor(Executor):
    """Runs each blocking call after the duration that the disk needs, while the loop continues."""

    def __init__(self, loop: SimLoop, disk: Disk, workers: int = 2) -> None:
        self._loop = loop
        self._disk = disk
        self._free_at_s = [0.0] * workers
        self._pending: dict[Future[Any], Callable[[], None]] = {}

    def submit(self, fn: Callable[A, T], /, *args: A.args, **kwargs: A.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if self._pending.pop(future, None) is None or not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # like a thread pool, let the future raise it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._pending[future] = run
        worker = min(range(len(self._free_at_s)), key=self._free_at_s.__getitem__)
        done_s = max(self._free_at_s[worker], self._loop.time()) + self._disk.delay_s()
        self._free_at_s[worker] = done_s
        self._loop.call_at(done_s, run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pending = list(self._pending.values())
        if cancel_futures:
            self._pending.clear()
        elif wait:
            for run in pending:
                run()


class Host:
    """A simulated machine. Its disk and its name outlive the programs that run on it."""

    def __init__(self, name: str, loop: SimLoop, network: Network, rng: Rng) -> None:
        self.name = name
        self.loop = loop
        self.network = network
        self.rng = rng
        self.clock = HostClock(loop)
        self.disk = Disk(rng)
        self.filesystem = MemoryFileSystem(crashable=True)
        self.process: Process | None = None
        self.run_count = 0

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.process or 'idle'}>"

    def __str__(self) -> str:
        return self.name

    def executor(self) -> SimExecutor:
        """Return an executor for one run of a program. Pending calls are dropped when that run is killed."""
        return SimExecutor(self.loop, self.disk)

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_dead

    @property
    def is_paused(self) -> bool:
        return self.process is not None and self.process.is_paused

    def new_process(self) -> Process:
        """Return a new process, which runs nothing yet. The previous process must have ended. Turns the power
        on."""
        assert not self.is_running, f"{self} runs {self.process}"
        self.run_count += 1
        process = Process(f"{self.name}#{self.run_count}", self.name)
        self.process = process
        if not self.network.has_power(self.name):
            self.network.on_power(self.name)
        return process

    def run(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a program that runs ``main``. The returned task has the result or exception of ``main``."""
        return self.loop.spawn(self.new_process(), main)

    def kill(self) -> None:
        """End the program as SIGKILL does. Its connections are closed, its locks released, and its written
        data is kept."""
        process = self.process
        if process is None or process.is_dead:
            return
        self.loop.kill(process)
        self.network.on_process_death(process)
        self.filesystem.locked.clear()

    def lose_power(self) -> None:
        """Cut the power. Each unsynced part of the disk survives or is lost, as drawn from the seed. Peers
        are not notified."""
        if self.process is not None:
            self.loop.kill(self.process)
        self.network.on_power_loss(self.name)
        self.filesystem.crash(self.rng)

    def pause(self) -> None:
        """Pause the program as SIGSTOP does."""
        if self.process is not None:
            self.loop.pause(self.process)

    def resume(self) -> None:
        if self.process is not None:
            self.loop.resume(self.process)

    def set_clock_ahead(self, offset_ms: int) -> None:
        """Set the wall clock ``offset_ms`` ahead of the true time, or behind it if negative."""
        self.clock.offset_ms = offset_ms

    def fill_disk(self, free_bytes: int = 0) -> None:
        """Fill the disk, so that only ``free_bytes`` more can be written."""
        self.filesystem.capacity_bytes = self.filesystem.used_bytes() + free_bytes

    def replace_disk(self) -> None:
        """Give a stopped host an empty disk. The data of the former disk is lost."""
        assert not self.is_running, f"{self} runs"
        self.filesystem = MemoryFileSystem(crashable=True)

    def free_disk(self) -> None:
        self.filesystem.capacity_bytes = None
