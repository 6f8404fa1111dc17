"""``kl`` with a report on demand: ``python -m proof.processes.observed_server FILE server start ...``.

On SIGUSR1 the process replaces FILE by a JSON object: its asyncio tasks, its descriptors of sockets and such,
its open files, and its resident bytes. On SIGUSR2 it writes the stack of its threads to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import sys
from pathlib import Path

from kafkalite.cli.app import run


def report(path: Path) -> None:
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    targets = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    files = sum(target.startswith("/") and not target.startswith("/dev/") for target in targets)
    found = {
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(targets) - files,
        "files": files,
        "rss_bytes": int(rss.split()[1]) * 1024,
    }
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(path)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    faulthandler.register(signal.SIGUSR2)
    signal.signal(signal.SIGUSR1, lambda *_: report(target))
    sys.exit(run(sys.argv[2:]))
