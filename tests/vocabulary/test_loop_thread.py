"""The event loop in a thread that the blocking clients, Raft and the blocking test cluster use."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kafkalite import loop_thread
from kafkalite.errors import ClientError
from kafkalite.loop_thread import LoopThread, shared_loop_thread


def test_results_errors_and_timeouts() -> None:
    thread = LoopThread()

    async def fail() -> None:
        raise ValueError("mine")

    assert thread.run(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="mine"):
        thread.run(fail())
    with pytest.raises(TimeoutError):
        thread.run(asyncio.sleep(60), timeout_s=0.01)
    thread.close()
    assert not thread.is_alive
    thread.close()


def test_calling_from_its_own_thread_raises_instead_of_deadlocking() -> None:
    thread = LoopThread()

    async def inside() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(ClientError, match="would deadlock"):
        thread.run(inside())
    thread.close()


def test_closing_cancels_running_calls() -> None:
    thread = LoopThread()
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    asyncio.run_coroutine_threadsafe(forever(), thread.loop)
    thread.run(asyncio.sleep(0))
    thread.close()
    assert ended.wait(5)


def test_a_process_has_one_and_a_forked_process_another(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = shared_loop_thread()
    assert shared_loop_thread() is thread
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other = shared_loop_thread()
    assert other is not thread
    loop_thread._close_shared()
    assert not other.is_alive
    monkeypatch.undo()
    loop_thread._close_shared()
    assert thread.is_alive, "only what belongs to this process is closed"
    thread.close()
    assert shared_loop_thread().is_alive


def test_uvloop_may_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKALITE_UVLOOP", "0")
    thread = LoopThread()
    assert "uvloop" not in type(thread.loop).__module__
    thread.close()
    monkeypatch.setenv("KAFKALITE_UVLOOP", "1")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    thread = LoopThread()
    assert "uvloop" not in type(thread.loop).__module__
    thread.close()


def test_ctrl_c_ends_a_blocking_call() -> None:
    code = (
        "import asyncio, sys\n"
        "from kafkalite.loop_thread import shared_loop_thread\n"
        "thread = shared_loop_thread()\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    thread.run(asyncio.sleep(60))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert out == "interrupted\n"
    assert process.returncode == 0
    assert time.monotonic() - started < 10


def test_a_signal_that_does_not_wake_the_wait_ends_it_soon() -> None:
    """As if Ctrl-C came just before the wait: Python has noted the signal, and the wait goes on."""
    thread = LoopThread()

    async def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # of the loop's thread
        await asyncio.sleep(60)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(interrupt())
    finally:
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - started < 30
    thread.close()
