"""Lets child processes end with their parent, even if the parent is killed by SIGKILL.

The parent keeps the write end of a pipe open as long as it lives. Its children get the read end as their
standard input and watch it: the end of the stream shows that the parent has ended. This works on every system
and needs no code between fork and exec.
"""

# Tests: tests/processes/test_parent_pipe.py

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Final

#: The environment variable that makes a server watch its standard input.
PARENT_PIPE: Final = "KL_PARENT_PIPE"
#: The time for an orderly stop after the parent has ended.
STOP_LIMIT_S: Final = 10.0


@functools.cache
def stdin_for_children() -> int:
    """Return the read end of this process's pipe, to use as standard input of children that end with it."""
    read_end, _ = os.pipe()  # the write end is not inherited, and closes when this process ends
    return read_end


def stop_with_parent() -> None:
    """If PARENT_PIPE is set, stop this process when its parent ends.

    The process then receives SIGTERM. If it still runs STOP_LIMIT_S later, it exits with status 1.
    """
    if os.environ.pop(PARENT_PIPE, None):
        threading.Thread(target=_watch, name="parent", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_LIMIT_S)
    os._exit(1)
