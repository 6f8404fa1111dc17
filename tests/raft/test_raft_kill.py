"""All voters killed at once, with real files and threads: nothing acknowledged is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

VOTERS = """
import asyncio, sys
from kafkalite.metadata.records import TopicRecord
from kafkalite.raft.raft_quorum import RaftQuorum
from kafkalite.raft.adapter import RaftSettings
from kafkalite.raft.runner import ThreadRunner
from kafkalite.rng import system_rng
from kafkalite.storage.disk import RealFileSystem

class Machine:
    def __init__(self): self.names, self.offset = [], 0
    def load(self, offset, records): self.names, self.offset = [record.name for record in records], offset
    def apply(self, offset, records): self.names += [record.name for record in records]; self.offset = offset
    def snapshot(self): return self.offset, [TopicRecord("0" * 32, name) for name in self.names]
    def fail(self, error): print("failed", repr(error), flush=True)

class Link:
    def __init__(self, *way): self.way = way
    def send(self, message):
        sender, runner, receive = self.way
        runner.call(receive, sender, message)

async def main(directory):
    settings = RaftSettings(
        election_timeout_ms=200, heartbeat_ms=40, snapshot_min_bytes=5_000, retained_entries=20
    )
    ids, runners, quorums = (1, 2, 3), {}, {}
    for i in ids:
        runner = runners[i] = ThreadRunner()
        runner.start()
        quorums[i] = quorum = RaftQuorum(
            RealFileSystem(), f"{directory}/{i}", node_id=i, voters=ids, runner=runner,
            rng=system_rng(), settings=settings,
        )
        quorum.attach(Machine())
        await quorum.start()
    for a in ids:
        for b in ids:
            if a != b:
                link = Link(a, runners[b], quorums[b].node.transport.receive)
                runners[a].call(quorums[a].node.transport.attach, b, link)
    while not (leader := next((quorum for quorum in quorums.values() if quorum.is_leader), None)):
        await asyncio.sleep(0.005)
    names = leader._machine.names
    print("have", " ".join(names), flush=True)
    while True:
        name = f"t{len(names)}"
        await leader.commit([TopicRecord("0" * 32, name)], leader.offset)
        print("acked", name, flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
def test_killed_at_any_moment_they_keep_acknowledged_commits(tmp_path):
    acked = -1
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", VOTERS, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            words = child.stdout.readline().split()
            assert words[0] == "have", words
            assert words[1:] == [f"t{number}" for number in range(len(words) - 1)]
            assert len(words) - 1 > acked
            deadline = time.monotonic() + random.uniform(0.2, 0.6)
            while time.monotonic() < deadline:
                word, name = child.stdout.readline().split()
                assert word == "acked"
                acked = int(name[1:])
        finally:
            child.kill()
            rest, _ = child.communicate()
        for line in rest.splitlines():
            if line.startswith("acked t") and line[7:].isdigit():
                acked = int(line[7:])
    assert acked > 50
