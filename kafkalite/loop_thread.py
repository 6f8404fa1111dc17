"""An event loop in its own thread, for callers that block.

The blocking clients share one such thread for the whole process, started at first use. A process forked from
this one starts its own, because threads do not survive a fork. The loop is uvloop's if that is installed and
the environment does not have ``KAFKALITE_UVLOOP=0``.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kafkalite.errors import ClientError

T = TypeVar("T")

_FORBIDDEN: Final = {"0", "false", "no", "off"}
_EXIT_GRACE_S: Final = 1.0


class LoopThread:
    """Runs an event loop in its own thread until ``close``, which cancels all tasks of the loop."""

    def __init__(self, name: str = "kafkalite", loop: asyncio.AbstractEventLoop | None = None) -> None:
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

        Raises TimeoutError after ``timeout_s``. Ctrl-C interrupts the wait. Both cancel the coroutine.
        """
        self.check_outside(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def check_outside(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Raise ClientError and close ``coroutine`` if called in the loop's thread, which would deadlock."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClientError(
                "a blocking call on kafkalite's own event loop would deadlock",
                hint="in a callback, pass the work to another thread or use the async client",
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the loop, cancel its tasks, and wait up to ``timeout_s`` for the thread. Idempotent."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Call ``function`` on ``loop`` soon, from any thread. Return False if the loop is closed."""
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


_lock = threading.Lock()
_shared: tuple[int, LoopThread] | None = None  # (process id that it belongs to, thread)


def shared_loop_thread() -> LoopThread:
    """Return the loop thread that all blocking clients of this process share."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid() or not _shared[1].is_alive:
            _shared = (os.getpid(), LoopThread())
        return _shared[1]


@atexit.register
def _close_shared() -> None:
    if _shared is not None and _shared[0] == os.getpid():
        _shared[1].close(_EXIT_GRACE_S)
