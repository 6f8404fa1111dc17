"""Reduces garbage collection in Spark's Python workers.

Spark makes a worker collect garbage after every task and every call of the driver, which scans all loaded
modules: some 20 ms of a core that the next step of the micro-batch needs. When a worker does something for
the second time, all of its current objects are excluded from then on.
"""

from __future__ import annotations

import gc
import os
from typing import Literal

Use = Literal["plan", "read", "write", "commit"]

_uses: dict[Use, int] = {}


def spare_collections(use: Use) -> None:
    """Call this at the start of each ``use`` of a process. It does nothing if Spark does not reuse workers.

    Current objects that become cyclic garbage later are never freed: so this is done once per use.
    """
    if not os.environ.get("SPARK_REUSE_WORKER"):
        return
    count = _uses[use] = _uses.get(use, 0) + 1
    if count == 2:  # the first use has done its imports
        gc.collect()
        gc.freeze()
