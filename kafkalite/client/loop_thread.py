"""The event loop behind the blocking clients: one thread for the whole process, made at first use.

It runs uvloop where that is installed; ``KAFKALITE_UVLOOP=0`` in the environment forbids it. A process forked
from this one gets a thread of its own, for threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from kafkalite.errors import ClientError

T = TypeVar("T")

_FORBIDDEN: Final = {"0", "false", "no", "off"}
_EXIT_GRACE_S: Final = 1.0


class LoopThread:
    """Runs coroutines for callers that block. Ctrl-C interrupts a call; its coroutine is cancelled then."""

    def __init__(self, name: str = "kafkalite") -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The coroutine's result. Raises what it raises, and TimeoutError after ``timeout_s``."""
        self.check_outside(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def check_outside(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Raises ClientError in the loop's own thread, which can't wait for itself."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClientError(
                "a blocking call from kafkalite's own event loop would wait for itself",
                hint="in a callback, hand the work to another thread or use the async client",
            )

    def close(self) -> None:
        """Stop the loop; what runs in it is cancelled."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_EXIT_GRACE_S)


def _new_loop() -> asyncio.AbstractEventLoop:
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
_shared: tuple[int, LoopThread] | None = None  # with the process it belongs to


def shared_loop_thread() -> LoopThread:
    """The process's one loop thread."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid() or not _shared[1].is_alive:
            _shared = (os.getpid(), LoopThread())
        return _shared[1]


@atexit.register
def _close_shared() -> None:
    if _shared is not None and _shared[0] == os.getpid():
        _shared[1].close()
