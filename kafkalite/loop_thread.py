"""An event loop in its own thread, for callers that block.

All blocking clients of a process share one such thread, which is started at its first use. A forked process
starts another thread, because threads do not survive a fork. The loop is uvloop's if uvloop is installed,
unless the environment variable ``KAFKALITE_UVLOOP`` is 0, false, no or off.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kafkalite.errors import ClientError, ForkedClientError

T = TypeVar("T")

_FORBIDDEN: Final = {"0", "false", "no", "off"}
#: How long the exit of the process waits for the thread: longer than the 5 s in which clients are closed that
#: the program did not close (``client.forgotten``).
_EXIT_GRACE_S: Final = 6.0
#: How long a thread waits for this one before it starts its wait again. A signal that arrives just before a
#: wait does not end it: Python runs the handler after the wait. One that arrives during it ends it at once.
SIGNAL_TURN_S: Final = 0.5


class LoopThread:
    """Runs an event loop in its own thread until ``close``, which cancels all tasks of the loop."""

    def __init__(self, name: str = "kafkalite", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.is_forked = False  #: whether the thread was left behind in the parent process
        _threads.add(self)
        self.loop = loop or new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run the coroutine in the loop and return its result, or raise its error.

        Also raises TimeoutError after ``timeout_s`` (None: no limit), KeyboardInterrupt on Ctrl-C, and the
        errors of ``check_outside``. After a timeout or Ctrl-C, the coroutine is cancelled.
        """
        self.check_outside(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        ends_at_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                left_s = ends_at_s - time.monotonic()
                try:
                    return future.result(min(left_s, SIGNAL_TURN_S))
                except TimeoutError:
                    if future.done():
                        return future.result()
                    if left_s <= SIGNAL_TURN_S:
                        raise
        except BaseException:
            future.cancel()
            raise

    def check_outside(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Check that the caller can wait for ``coroutine``. Otherwise close ``coroutine`` and raise an error.

        Raises ClientError if the caller runs in the loop's own thread, where waiting would deadlock, and
        ForkedClientError in a process that was forked after the thread had started.
        """
        if self.is_forked:
            coroutine.close()
            raise forked()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClientError(
                "a blocking call on kafkalite's own event loop would deadlock",
                hint="in a callback, pass the work to another thread or use the async client",
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the loop and cancel its tasks. Wait for the thread up to ``timeout_s`` (None: no limit).

        May be called twice. Has no effect in the loop's own thread.
        """
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)


def forked() -> ForkedClientError:
    """Return the error for the use of a client in a process forked from the one that created the client."""
    return ForkedClientError(
        "this client was opened before the process was forked, and its thread stayed in the parent process",
        hint="open clients after the fork, one in each process, or start processes with 'spawn'",
    )


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Let ``loop`` call ``function`` soon. Returns False if the loop is closed. Any thread may call this."""
    is_running_here = asyncio._get_running_loop() is loop
    try:
        (loop.call_soon if is_running_here else loop.call_soon_threadsafe)(function, *args)
    except RuntimeError:
        assert loop.is_closed()
        return False
    return True


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop loop, or an asyncio loop if uvloop is missing or disabled."""
    if os.environ.get("KAFKALITE_UVLOOP", "1").strip().lower() not in _FORBIDDEN:
        try:
            import uvloop
        except ImportError:
            pass
        else:
            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop
    return asyncio.new_event_loop()


_threads: Final[weakref.WeakSet[LoopThread]] = weakref.WeakSet()


def _mark_forked() -> None:
    for thread in _threads:
        thread.is_forked = True


os.register_at_fork(after_in_child=_mark_forked)

_lock = threading.Lock()
_shared: tuple[int, LoopThread] | None = None  # (id of the process that started the thread, thread)


def shared_loop_thread() -> LoopThread:
    """Return the loop thread that all blocking clients of this process share. Start it if it does not run."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid() or not _shared[1].is_alive:
            _shared = (os.getpid(), LoopThread())
        return _shared[1]


@atexit.register
def _close_shared() -> None:
    if _shared is not None and _shared[0] == os.getpid():
        _shared[1].close(_EXIT_GRACE_S)
