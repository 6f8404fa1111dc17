"""An event loop with virtual time, in which every callback belongs to a process.

The loop never waits: if no callback is ready, time jumps to the next timer. A ``Process`` is one run of a
program on a simulated host. A context variable holds the process of the running code, and every callback that
this code schedules inherits it. Therefore the loop can hold back all callbacks of a process (a pause, as by
SIGSTOP), or drop them permanently (a kill, as by SIGKILL, after which no ``finally`` or ``except`` runs
until ``dispose``).

Callbacks of one process run in the order in which they were scheduled, as asyncio guarantees. The order
between processes is drawn from the seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from kafkalite.rng import Rng

#: The virtual duration of one turn of a process, so that a program that never waits cannot stop time.
TURN_S: Final = 20e-6
START_S: Final = 1_000.0

#: The process of the running code. Outside of any program it is the simulation itself.
current_process: contextvars.ContextVar[Process] = contextvars.ContextVar("current_process")


class Deadlock(Exception):
    """Raised if all tasks wait and none of them waits for a timer."""


class Process:
    """One run of a program on a host. Invariant: a dead process has no callbacks."""

    __slots__ = ("host_name", "is_dead", "is_paused", "name", "ready")

    def __init__(self, name: str, host_name: str) -> None:
        self.name = name
        self.host_name = host_name
        self.ready: deque[asyncio.Handle] = deque()
        self.is_paused = False
        self.is_dead = False

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "paused" if self.is_paused else "running"
        return f"<Process {self.name} {state}>"

    def context(self) -> contextvars.Context:
        """Return a new context. Code that runs in it belongs to this process."""
        context = contextvars.copy_context()
        context.run(current_process.set, self)
        return context


class SimTask(asyncio.Task[Any]):
    """A task that knows its process and is ordered in sets in the same way in every run."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: SimLoop, **kwargs: Any) -> None:
        self.number = next(loop.task_numbers)
        context = kwargs.get("context")
        root = loop.root
        self.process = current_process.get(root) if context is None else context.get(current_process, root)
        super().__init__(coro, loop=loop, **kwargs)
        if self.process.is_dead:  # killed by the current callback, whose remaining code still runs
            self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """The event loop. Invariant: ``_active`` has exactly the processes that are not paused and have ready
    callbacks."""

    def __init__(self, rng: Rng) -> None:
        super().__init__()
        self.set_debug(False)
        self.rng = rng
        self.root = Process("simulation", "")
        self.task_numbers = count(1)
        self.turn_count = 0
        self.network: object = None  #: the Network that connects the hosts of this loop
        self._now_s = START_S
        self._active: list[Process] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Process]] = []
        self._order = count()
        self._remains: list[SimTask] = []  # tasks of killed processes, which must not be finalized
        self._is_disposed = False

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        process = context.get(current_process, self.root)
        if not process.is_dead and not self._is_disposed:
            ready = process.ready
            if not ready and not process.is_paused:
                self._active.append(process)
            ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if context is None:
            context = contextvars.copy_context()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        process = context.get(current_process, self.root)
        if not process.is_dead and not self._is_disposed:
            heapq.heappush(self._timers, (when, next(self._order), timer, process))
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        kwargs.pop("eager_start", None)
        return SimTask(coro, loop=self, **kwargs)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        if executor is None:
            raise RuntimeError("a simulated process has no threads: pass a SimExecutor to run_in_executor")
        return super().run_in_executor(executor, func, *args)

    async def getaddrinfo(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise RuntimeError: connections and listeners of TCP, which begin with this, need sockets."""
        raise RuntimeError(
            "no sockets in a simulation: connect to the given cluster, or use addresses inproc://NAME"
        )

    create_connection = create_server = getaddrinfo

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # a cancelled timer is dropped when it is due

    def _process_events(self, event_list: Any) -> NoReturn:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        """Run one turn of one process: the callbacks that are ready now, but not those that they schedule."""
        timers = self._timers
        active = self._active
        if not active and not self._stopping:  # type: ignore[attr-defined]
            self._skip_to_next_timer()
        now_s = self._now_s = self._now_s + TURN_S
        while timers and timers[0][0] <= now_s:
            _, _, timer, process = heapq.heappop(timers)
            if not timer.cancelled() and not process.is_dead:
                if not process.ready and not process.is_paused:
                    active.append(process)
                process.ready.append(timer)
        if not active:
            return
        process = active.pop(self.rng.randrange(len(active)) if len(active) > 1 else 0)
        ready = process.ready
        self.turn_count += 1
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
                if process.is_paused or process.is_dead:
                    break
        if ready and not process.is_paused and process not in active:
            active.append(process)  # else a callback has already added it, when ``ready`` was empty

    def _skip_to_next_timer(self) -> None:
        timers = self._timers
        while timers and (timers[0][2].cancelled() or timers[0][3].is_dead):
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing is ready and no timer is set at {self._now_s:.6f} s")
        self._now_s = max(self._now_s, timers[0][0])

    def spawn(self, process: Process, coro: Coroutine[Any, Any, Any], name: str = "main") -> SimTask:
        """Start ``coro`` as a task of ``process``."""
        return SimTask(coro, loop=self, name=f"{process.name} {name}", context=process.context())

    def pause(self, process: Process) -> None:
        """Run no callbacks of the process until ``resume``. Its timers still expire, and its data arrives."""
        if not process.is_paused and not process.is_dead:
            process.is_paused = True
            if process in self._active:
                self._active.remove(process)

    def resume(self, process: Process) -> None:
        if process.is_paused and not process.is_dead:
            process.is_paused = False
            if process.ready:
                self._active.append(process)

    def kill(self, process: Process) -> None:
        """Drop all present and future callbacks of the process."""
        if process.is_dead:
            return
        for task in asyncio.all_tasks(self):
            if isinstance(task, SimTask) and task.process is process:
                task._log_destroy_pending = False
                self._remains.append(task)
        process.is_dead = True
        process.ready.clear()
        if process in self._active:
            self._active.remove(process)

    def dispose(self) -> None:
        """Drop all callbacks, close the coroutines of all tasks, and silence the warnings of finalizers."""
        self._is_disposed = True
        self._active.clear()
        self._timers.clear()
        old_hook = sys.unraisablehook
        sys.unraisablehook = lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for task in sorted(asyncio.all_tasks(self), key=hash):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _close(task.get_coro())
                self._remains.clear()
                gc.collect()  # finalizers of dropped tasks run here, where their warnings are not logged
                self.close()
        finally:
            sys.unraisablehook = old_hook


def _close(coro: Any) -> None:
    try:
        coro.close()
    except BaseException:  # cleanup code of a program may fail because its loop is gone
        return
