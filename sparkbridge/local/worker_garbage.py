"""Reduces garbage collection in Spark's Python workers.

Spark makes a worker collect garbage after every task and every call of the driver, which scans all loaded
modules: about 20 ms of a core that the next step of the micro-batch needs. When a worker does something
for the second time, all of its current objects are excluded from later collections.
"""

from __future__ import annotations

import gc
import os
from typing import Literal

Use = Literal["plan", "read", "write", "commit"]

_uses: dict[Use, int] = {}


def spare_collections(use: Use) -> None:
    """Count a ``use`` of this process, at its start. Does nothing if Spark does not reuse workers.

    Current objects that become cyclic garbage later are never freed, so they are excluded once per use.
    """
    if not os.environ.get("SPARK_REUSE_WORKER"):
        return
    count = _uses[use] = _uses.get(use, 0) + 1
    if count == 2:  # the first use has done its imports
        gc.collect()
        gc.freeze()
