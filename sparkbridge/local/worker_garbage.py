"""Reduces garbage collection in Spark's Python workers.

After every task and every call of the driver, Spark makes a worker collect garbage. The collection scans all
loaded modules: about 20 ms of a core that the next step of the micro-batch needs. When a worker runs the same
kind of task for the second time, its current objects are excluded from later collections.
"""

from __future__ import annotations

import gc
import os
from typing import Literal

Use = Literal["plan", "read", "write", "commit"]

_uses: dict[Use, int] = {}


def spare_collections(use: Use) -> None:
    """Record that this process starts a task of the kind ``use``. The second time, freeze all objects.

    Frozen objects are excluded from garbage collection, so cycles among them are never freed. Therefore later
    tasks of the same kind freeze nothing. Does nothing if Spark reuses no workers.
    """
    if not os.environ.get("SPARK_REUSE_WORKER"):
        return
    count = _uses[use] = _uses.get(use, 0) + 1
    if count == 2:  # the imports were done during the first use
        gc.collect()
        gc.freeze()
