"""Returns free memory of the C heap to the system.

The C library keeps freed blocks below the top of its heap for later use. After many large frames that were
never completed, it would keep as much memory as all of them together.
"""

# Tests: tests/processes/test_memory.py

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Return all free pages of the heap to the system. Has no effect if the C library is not glibc.

    The call takes about 0.1 ms for each MiB that is returned.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
