"""Rolling upgrades and rollbacks of three real nodes under load. The history checker judges the result.

::

    python -m proof.processes.upgrade --rounds 10                  # from the newest tag v*
    python -m proof.processes.upgrade --previous 54dc7db --seed 7  # from any revision

In each round, three nodes of the previous version serve clients. Node by node, in any order, they get the
present version, go back, and get it again. Some are killed instead of stopped. While a node of the previous
version runs, no level may be finalised. Then the level is finalised, a partition moves, and a node of the
previous version must refuse to start. All replicas must be in sync after each step, and the histories of the
clients are checked at the end of each round.

The previous version is the package of that revision, with the dependencies of this environment.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import KafkaliteError
from kafkalite.metadata.features import METADATA_VERSION, SUPPORTED
from kafkalite.model import TopicPartition
from kafkalite.rng import Rng, seeded_rng
from kafkalite.testing.process_cluster import ProcessCluster
from proof.console import tell
from proof.histories.history import Anomaly, check
from proof.processes.workload import Workload

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TOPIC: Final = "ledger"
PARTITIONS: Final = 3
HEALING_LIMIT_S: Final = 60.0
#: A node that can't read the log must end within this time.
REFUSAL_LIMIT_S: Final = 60.0
NEWEST: Final = next(each.max_level for each in SUPPORTED if each.feature == METADATA_VERSION)


def newest_tag() -> str | None:
    """Return the newest tag v* before the present revision, or None."""
    words = ["git", "describe", "--tags", "--match", "v*", "--abbrev=0"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def unpack(revision: str, directory: Path) -> Path:
    """Write the package of a revision to ``directory``. Raises CalledProcessError for an unknown one."""
    directory.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(
        ["git", "archive", revision, "kafkalite"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive, check=True)
    return directory


class Upgrade:
    """One round: a cluster, the clients of its topic, and the steps."""

    def __init__(self, directory: Path, previous: Path, rng: Rng, say: Callable[[str], None]) -> None:
        self._previous = previous
        self._rng = rng
        self._say = say
        self._cluster = ProcessCluster(directory, brokers=3)
        self._began_newest = False  # whether the log of the previous version has the newest level

    async def run(self) -> list[Anomaly]:
        """Raises TimeoutError if the cluster does not heal, and AssertionError."""
        cluster = self._cluster
        try:
            await cluster.start(program=self._previous)
            async with Admin(cluster.bootstrap_servers) as admin:
                await admin.create_topic(TOPIC, PARTITIONS, 2, configs={"min.insync.replicas": "2"})
                with suppress(KafkaliteError):  # the previous version may have no levels
                    found = (await admin.describe_features())[METADATA_VERSION]
                    self._began_newest = found.finalized_level == NEWEST
            await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])
            async with Workload(lambda: cluster.bootstrap_servers, TOPIC, PARTITIONS) as load:
                for name, program in (("up", None), ("back", self._previous), ("up again", None)):
                    await self._roll(load, name, program)
                await self._finalize()
                await load.until_served(HEALING_LIMIT_S)
                await load.stop()
            await load.read_finally()
            if not self._began_newest:
                await self._refuses_previous()
        finally:
            await cluster.close()
        return check(load.history)

    async def _roll(self, load: Workload, name: str, program: Path | None) -> None:
        """Give the nodes another program, one after the other."""
        nodes = list(self._cluster.nodes)
        self._rng.shuffle(nodes)
        began_s, killed = time.monotonic(), []
        for number, node_id in enumerate(nodes):
            if self._rng.random() < 0.25:
                killed.append(node_id)
                await self._cluster.kill(node_id)
            else:
                code = await self._cluster.terminate(node_id)
                assert code == 0, f"node {node_id} ended with exit code {code} on SIGTERM"
            self._cluster.nodes[node_id].program = program
            await self._cluster.start_node(node_id)
            await self._cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
            await load.until_served(HEALING_LIMIT_S)
            if name == "up" and number == 1:
                await self._is_not_finalized()
        seconds = time.monotonic() - began_s
        acknowledged = load.history.acknowledged
        self._say(f"  {name:<9} {nodes}, killed {killed}: {seconds:.1f} s, {acknowledged:,} acknowledged")

    async def _is_not_finalized(self) -> None:
        async with Admin(self._cluster.bootstrap_servers) as admin:
            try:
                await admin.update_features({METADATA_VERSION: NEWEST})
            except KafkaliteError:
                return
            assert self._began_newest, "a level is finalised while a node of the previous version runs"

    async def _finalize(self) -> None:
        async with Admin(self._cluster.bootstrap_servers) as admin:
            deadline_s = time.monotonic() + HEALING_LIMIT_S
            while (await admin.describe_features())[METADATA_VERSION].common_level < NEWEST:
                assert time.monotonic() < deadline_s, "not all nodes say that they support the level"
                await asyncio.sleep(0.1)
            await admin.update_features({METADATA_VERSION: NEWEST})
            partition = TopicPartition(TOPIC, 0)
            description = await admin.describe_topic(TOPIC)
            replicas = description.partitions[0].replicas
            other = next(node_id for node_id in self._cluster.nodes if node_id not in replicas)
            await admin.alter_partition_reassignments({partition: [other, replicas[0]]})
            while partition in await admin.list_partition_reassignments():
                assert time.monotonic() < deadline_s, "the partition does not move"
                await asyncio.sleep(0.1)
        await self._cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)

    async def _refuses_previous(self) -> None:
        """Start a node with the previous version, which does not read the finalised level."""
        node = self._cluster.nodes[1]
        await self._cluster.terminate(1)
        node.program = self._previous
        before = len(node.log)
        await self._cluster.start_node(1)
        assert node.process is not None
        try:
            async with asyncio.timeout(REFUSAL_LIMIT_S):
                code = await node.process.wait()
        except TimeoutError:
            raise AssertionError("a node of the previous version runs with a finalised level") from None
        assert code != 0, "exit code 0"
        self._say(f"  refused   {node.log[before:].strip().splitlines()[-1][:150]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if no history has an anomaly, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proof.processes.upgrade", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--previous", default="", help="a git revision; default: the newest tag v*")
    parser.add_argument("--directory", help="keep the nodes' data and logs here")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    previous = chosen.previous or newest_tag()
    if previous is None:
        tell("SKIPPED: there is no tag v*, so there is no previous version: make upgrade PREVIOUS=<revision>")
        return 0
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 1_000_000
    directory = Path(chosen.directory or tempfile.mkdtemp(prefix="kafkalite-upgrade-"))
    program = unpack(previous, directory / "previous")
    tell(f"from {previous}, seed {seed}, nodes in {directory}")
    failures = 0
    for number in range(1, chosen.rounds + 1):
        tell(f"round {number}")
        upgrade = Upgrade(directory / f"round-{number}", program, seeded_rng(seed + number), tell)
        try:
            anomalies = asyncio.run(upgrade.run())
        except (KafkaliteError, TimeoutError, AssertionError) as error:
            tell(f"FAILED: {error}")
            failures += 1
            continue
        for anomaly in anomalies:
            tell(str(anomaly))
        failures += bool(anomalies)
    tell(f"\nrounds {chosen.rounds}, failed {failures}")
    if failures == 0 and not chosen.directory:
        import shutil

        shutil.rmtree(directory, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
