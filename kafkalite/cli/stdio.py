"""Reads stdin and writes stdout beside an event loop. Reads can be cancelled; closed pipes are detected.

Pipes and terminals are read on a daemon thread. They must not be made non-blocking, because the shell shares
them, and a thread of the loop's executor would delay Ctrl-C until the next line.
"""

# Tests: tests/cli/test_processes.py

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kafkalite.cli.printers import Printer
    from kafkalite.model import Record

CHUNK_BYTES: Final = 1 << 20
_CHUNKS_AHEAD: Final = 4
_CLOSED: Final = "stdout was closed"


async def file_chunks(path: Path) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, or of stdin if ``path`` is ``-``, as they arrive. Raises OSError."""
    if str(path) != "-":
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
        return
    descriptor = sys.stdin.fileno()
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        while chunk := os.read(descriptor, CHUNK_BYTES):
            yield chunk
        return
    async for chunk in _threaded_chunks(descriptor):
        yield chunk


async def _threaded_chunks(descriptor: int) -> AsyncIterator[bytes]:
    import asyncio

    loop = asyncio.get_running_loop()
    room = threading.Semaphore(_CHUNKS_AHEAD)
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()

    def read() -> None:
        try:
            while True:
                room.acquire()
                try:
                    item: bytes | OSError = os.read(descriptor, CHUNK_BYTES)
                except OSError as error:
                    item = error
                loop.call_soon_threadsafe(chunks.put_nowait, item)
                if not isinstance(item, bytes) or not item:
                    return
        except RuntimeError:  # the loop was closed during the read
            return

    threading.Thread(target=read, name="kl-stdin", daemon=True).start()
    while True:
        item = await chunks.get()
        room.release()
        if isinstance(item, OSError):
            raise item
        if not item:
            return
        yield item


def silence_stdout() -> None:
    """Redirect stdout to /dev/null, so that the flush at exit does not fail: the failure is reported."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    except (OSError, ValueError):  # stdout has no file descriptor
        return


@contextmanager
def printing(printer: Printer) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Print the head on entry and the tail on exit. Yield a function that prints records and flushes."""
    sys.stdout.flush()
    stream = sys.stdout.buffer

    def show(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    show(printer.head)
    try:
        yield lambda records: show(printer.body(records))
    finally:
        show(printer.tail())


async def until_pipe_closes(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``. If the reader of stdout closes the pipe, cancel ``work`` and raise BrokenPipeError.

    So ``kl consume events | head -1`` ends when head ends, not only when the next event is written. Raises
    OSError at once if stdout is closed or open only for reading.
    """
    import asyncio

    try:
        os.write(sys.stdout.fileno(), b"")
    except OSError:
        work.close()
        raise
    task = asyncio.current_task()
    assert task is not None, "called from a task"
    _watch_stdout(lambda: task.cancel(_CLOSED))
    try:
        await work
    except asyncio.CancelledError as cancelled:
        if cancelled.args == (_CLOSED,):
            raise BrokenPipeError from None
        raise


def _watch_stdout(on_closed: Callable[[], object]) -> None:
    """If stdout is a pipe or socket, call ``on_closed`` on the loop when its reader closes it."""
    import asyncio

    descriptor = sys.stdout.fileno()
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return
    loop = asyncio.get_running_loop()

    def watch() -> None:
        import select

        poller = select.poll()
        poller.register(descriptor, 0)  # errors and hang-ups are always reported
        poller.poll()
        with suppress(RuntimeError):  # the command has ended
            loop.call_soon_threadsafe(on_closed)

    threading.Thread(target=watch, name="kl-stdout", daemon=True).start()
