"""Node processes end with the process that started them, even if that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from proof.waiting import eventually

pytestmark = pytest.mark.slow

CLUSTER = """
import asyncio, sys
from kafkalite.testing import ProcessCluster

async def main():
    async with ProcessCluster(sys.argv[1], brokers=1) as cluster:
        print(cluster.nodes[1].process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("parent", ["ProcessCluster", "kl dev"])
async def test_nodes_end_when_their_parent_is_killed(tmp_path: Path, parent: str) -> None:
    words = ["-c", CLUSTER, str(tmp_path)]
    if parent == "kl dev":
        words = ["-m", "kafkalite", "dev", "-n", "2", "--port", "0", "--data", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pids: list[int] = []
    while not pids or (parent == "kl dev" and len(pids) < 2):
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line, "the parent ended"
        if parent != "kl dev":
            pids.append(int(line))
        elif " pid " in line:
            pids.append(int(line.partition(" pid ")[2].split()[0]))
    try:
        process.kill()
        await process.wait()
        await eventually(lambda: all(map(has_ended, pids)), limit_s=40)
    finally:
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
