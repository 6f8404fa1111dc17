"""Closes the clients that are still open when their event loop ends.

A *guard* is a task that waits until it is cancelled, and then closes the client. ``asyncio.run`` and the
thread of the blocking clients cancel all tasks at their end, while the loop still runs. If a loop is closed
without cancelling its tasks, the client cannot send any more. Records that it has not delivered are reported
at the end of the process.
"""

# Tests: tests/client/test_forgotten.py

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.errors import KafkaliteError

logger = logging.getLogger(__name__)

# How long the end of a loop or process waits for clients that were not closed.
CLOSE_FORGOTTEN_MS: Final = 5_000


@dataclass(frozen=True, eq=False)
class Forgettable:
    """A client that a program may forget to close, and how to close it."""

    kind: str  #: for messages: "producer", "consumer"
    client: object
    is_open: Callable[[], bool]
    close: Callable[[int], Awaitable[None]]  #: takes the time limit in milliseconds
    undelivered: Callable[[], dict[str, int]] = dict  #: the records that would be lost, by topic


class _Guarded(NamedTuple):
    guard: asyncio.Task[None]
    loop: asyncio.AbstractEventLoop
    process_id: int  #: the process that opened the client; a forked process reports nothing


#: The open clients. The references keep a client alive that the program has dropped, until it is closed.
_open: Final[dict[Forgettable, _Guarded]] = {}


def guard(forgettable: Forgettable) -> asyncio.Task[None]:
    """Start and return the guard of a client.

    The caller must keep a reference to the task, and cancel the task after closing the client.
    """
    task = asyncio.get_running_loop().create_task(_close_at_the_end(forgettable))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


async def _close_at_the_end(forgettable: Forgettable) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    _open[forgettable] = _Guarded(task, loop, os.getpid())
    try:
        await loop.create_future()
    except asyncio.CancelledError:
        # Wait for the program's tasks that are being cancelled: they may close the client themselves.
        guards = {guarded.guard for guarded in _open.values()}
        ending = {task for task in asyncio.all_tasks() - guards if task.cancelling()}
        if forgettable.is_open() and ending:
            await asyncio.wait(
                ending, timeout=CLOSE_FORGOTTEN_MS / 1000
            )  # closing the client cancels this wait
        if forgettable.is_open():
            try:
                await forgettable.close(CLOSE_FORGOTTEN_MS)
            except (KafkaliteError, TimeoutError) as error:
                kind = forgettable.kind
                cause = str(error) or f"no broker responded within {CLOSE_FORGOTTEN_MS} ms"
                logger.error("a %s was never closed, and at the end of its event loop %s", kind, cause)
            warnings.warn(
                f"{forgettable.client!r} was never closed; use 'async with'", ResourceWarning, stacklevel=1
            )
        raise
    finally:
        _open.pop(forgettable, None)


@atexit.register
def _report_lost() -> None:
    """Log the number of undelivered records of clients whose event loop ended without cancelling its tasks.

    Skips clients whose loop still runs, such as blocking ones: their guards close them later.
    """
    for forgettable, (_, loop, process_id) in list(_open.items()):
        is_lost = forgettable.is_open() and not loop.is_running() and process_id == os.getpid()
        lost = forgettable.undelivered() if is_lost else {}
        if lost:
            shown = ", ".join(f"{topic}: {count}" for topic, count in sorted(lost.items()))
            logger.error(
                "a %s was never closed, and %d of its records were not acknowledged (%s)",
                forgettable.kind,
                sum(lost.values()),
                shown,
            )
