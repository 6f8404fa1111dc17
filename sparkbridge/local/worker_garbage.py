"""Less garbage collection in Spark's Python workers.

Spark has a worker collect garbage after every task and every call of the driver's. That goes over all that is
loaded, some 20 ms of a core, while the micro-batch's next step wants the core, and often the worker. What a
worker holds when it does something for the second time, modules above all, is left out from then on.
"""

from __future__ import annotations

import gc
import os
from typing import Literal

Use = Literal["plan", "read", "write", "commit"]

_uses: dict[Use, int] = {}


def spare_collections(use: Use) -> None:
    """Called at the begin of each ``use`` of a process. Nothing where Spark does not use workers again.

    Cycles that become garbage later, of what is there now, are never found: so this is done once per use.
    """
    if not os.environ.get("SPARK_REUSE_WORKER"):
        return
    count = _uses[use] = _uses.get(use, 0) + 1
    if count == 2:  # by now the first one's imports are done
        gc.collect()
        gc.freeze()
