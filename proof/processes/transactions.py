"""Faults on real processes while jobs and producers use transactions. The result must be exactly once.

::

    python -m proof.processes.faults --transactions --rounds 20 --seed 7
    python -m proof.processes.faults --transactions --fault kill-group-coordinator

In each round a fault occurs and ends. Then all replicas must be in sync again, and both the jobs and the
transactional producers must make progress. At the end the output must be f(input), and every transaction must
exist completely or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.rng import Rng, seeded_rng
from kafkalite.testing.process_cluster import ProcessCluster
from proof.console import tell
from proof.histories.history import Anomaly
from proof.processes.faults import HEALING_LIMIT_S
from proof.processes.transaction_workload import LEDGER, PARTITIONS, TransactionWorkload
from proof.processes.transform_job import GROUP, INPUT, OUTPUT, SETTINGS

SESSION_S: Final = 1.5
#: A job that was replaced must be refused within this time if it has any input.
REFUSAL_LIMIT_S: Final = 5
#: Dead members are expelled quickly, and open transactions of dead producers are aborted quickly.
CLUSTER_SETTINGS: Final[dict[str, Any]] = {
    "group.consumer.session.timeout.ms": int(SESSION_S * 1000),
    "group.consumer.heartbeat.interval.ms": 300,
    "offsets.topic.num.partitions": 3,
    "transaction.state.log.num.partitions": 3,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
}

Fault = Callable[[ProcessCluster, TransactionWorkload, Rng], Awaitable[str]]
"""Causes a fault, ends it, and returns a short description. Afterwards everything runs again."""


async def _down(cluster: ProcessCluster, rng: Rng, node_id: int) -> None:
    await cluster.kill(node_id)
    await asyncio.sleep(2 * rng.random())
    await cluster.start_node(node_id)


async def _leader_of(cluster: ProcessCluster, tp: TopicPartition) -> int:
    view = await cluster.view()
    for each in view.partitions:
        if each.name == tp and each.state.leader_id > 0:
            return each.state.leader_id
    return 1


async def kill_leader(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    topic = (OUTPUT, LEDGER)[rng.randrange(2)]
    tp = TopicPartition(topic, rng.randrange(PARTITIONS))
    victim = await _leader_of(cluster, tp)
    await _down(cluster, rng, victim)
    return f"node {victim} killed, leader of {tp}"


async def kill_group_coordinator(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    async with Admin(cluster.bootstrap_servers, **SETTINGS) as admin:
        found = [each.coordinator_id for each in await admin.list_groups() if each.group_id == GROUP]
    victim = found[0] if found else 1
    await _down(cluster, rng, victim)
    return f"node {victim} killed, coordinator of group {GROUP}"


async def kill_transaction_coordinator(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    async with Admin(cluster.bootstrap_servers, **SETTINGS) as admin:
        listed = await admin.list_transactions()
    chosen = listed[rng.randrange(len(listed))] if listed else None
    victim = chosen.coordinator_id if chosen is not None else 1
    await _down(cluster, rng, victim)
    return f"node {victim} killed, coordinator of {chosen.transactional_id if chosen else 'nothing'}"


async def kill_all(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    await cluster.kill(*cluster.nodes)
    await asyncio.gather(*map(cluster.start_node, cluster.nodes))
    return "all nodes killed"


async def kill_job(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    job = load.jobs[rng.randrange(len(load.jobs))]
    await job.end(signal.SIGKILL)
    await job.start()
    return f"{job.name} killed"


async def pause_job(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    """Stop a job by SIGSTOP for longer than its session, so that its partitions move to the other job."""
    job = load.jobs[rng.randrange(len(load.jobs))]
    seconds = SESSION_S * (1.2 + rng.random())
    job.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    job.send_signal(signal.SIGCONT)
    return f"{job.name} stood still for {seconds:.1f} s"


async def replace_job(cluster: ProcessCluster, load: TransactionWorkload, rng: Rng) -> str:
    """Stop a job by SIGSTOP, let another process take over its transactional id, and resume the job."""
    number = rng.randrange(len(load.jobs))
    job = load.jobs[number]
    heir = load.jobs[number] = job.double()
    refused = job.refusals.total()
    job.send_signal(signal.SIGSTOP)
    try:
        await heir.start()
        await asyncio.sleep(SESSION_S * (1.2 + rng.random()))
        job.send_signal(signal.SIGCONT)
        for _ in range(REFUSAL_LIMIT_S * 20):
            if job.refusals.total() > refused:
                break
            await asyncio.sleep(0.05)
    finally:
        await job.end(signal.SIGKILL)
    return f"{job.name} stood still and found itself replaced"


FAULTS: Final[Mapping[str, Fault]] = {
    "kill-leader": kill_leader,
    "kill-group-coordinator": kill_group_coordinator,
    "kill-transaction-coordinator": kill_transaction_coordinator,
    "kill-all": kill_all,
    "kill-job": kill_job,
    "pause-job": pause_job,
    "replace-job": replace_job,
}


@dataclass(slots=True)
class TransactionReport:
    rounds: list[tuple[str, float]] = field(
        default_factory=list
    )  #: the fault, and the seconds until all was served again
    committed: int = 0  #: transactions whose producers received the acknowledgement
    transformed: int = 0  #: records of the jobs' output
    refused: Counter[str] = field(
        default_factory=Counter
    )  #: errors that ended a run of a job or of a producer
    anomalies: list[Anomaly] = field(default_factory=list)


async def run(
    directory: Path | str,
    faults: Sequence[str],
    *,
    rounds: int,
    seed: int,
    load_s: float = 0.5,
    tell: Callable[[str], None] = lambda text: None,
) -> TransactionReport:
    """Start a cluster of three nodes, cause ``rounds`` faults out of ``faults``, and check the histories.

    Raises TimeoutError if the cluster, the jobs or the producers make no progress within
    HEALING_LIMIT_S.
    """
    rng = seeded_rng(seed)
    report = TransactionReport()
    async with ProcessCluster(directory, brokers=3, settings=CLUSTER_SETTINGS) as cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            for topic in (INPUT, OUTPUT, LEDGER):
                await admin.create_topic(topic, PARTITIONS, 3, configs={"min.insync.replicas": "2"})
        await cluster.wait(is_whole=True, brokers=3, topics=[INPUT, OUTPUT, LEDGER])
        load = TransactionWorkload(lambda: cluster.bootstrap_servers, Path(directory), rng)
        async with load:
            await load.until_served(HEALING_LIMIT_S)
            for number in range(rounds):
                await asyncio.sleep(load_s * (0.5 + rng.random()))
                what = await FAULTS[faults[number % len(faults)]](cluster, load, rng)
                began_s = time.monotonic()
                await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
                await load.until_served(HEALING_LIMIT_S)
                report.rounds.append((what, time.monotonic() - began_s))
                tell(
                    f"{number + 1:>3}  {what:<52} served {report.rounds[-1][1]:5.2f} s  "
                    f"{load.history.committed:>6,} transactions committed"
                )
            await load.finish(HEALING_LIMIT_S)
    report.committed = load.history.committed
    report.transformed = load.transformed
    report.refused = sum((job.refusals for job in load.jobs), Counter(load.refused))
    report.anomalies = load.check()
    return report


# --- command line ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if everything was done exactly once, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.processes.faults --transactions", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=len(FAULTS))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--fault", action="append", choices=sorted(FAULTS), help="only these; may be repeated"
    )
    parser.add_argument("--directory", help="keep the nodes' data and logs here")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 1_000_000
    faults = chosen.fault or sorted(FAULTS)
    if not chosen.fault:
        seeded_rng(seed).shuffle(faults)
    directory = chosen.directory or tempfile.mkdtemp(prefix="kafkalite-transactions-")
    tell(f"seed {seed}, nodes in {directory}")
    try:
        report = asyncio.run(run(directory, faults, rounds=chosen.rounds, seed=seed, tell=tell))
    except (KafkaliteError, TimeoutError, AssertionError) as error:
        tell(f"FAILED: {error}\nthe logs are in {directory}")
        return 1
    for anomaly in report.anomalies:
        tell(str(anomaly))
    served = sorted(seconds for _, seconds in report.rounds)
    tell(
        f"\nrounds        {len(report.rounds)}\n"
        f"transactions  {report.committed:,} committed\n"
        f"transformed   {report.transformed:,} records\n"
        f"refused       {', '.join(f'{name} {n}' for name, n in report.refused.most_common()) or 'none'}\n"
        f"anomalies     {len(report.anomalies)}\n"
        f"served after  p50 {served[len(served) // 2]:.2f} s, worst {served[-1]:.2f} s"
    )
    if report.anomalies:
        tell(f"the logs are in {directory}")
        return 1
    if not chosen.directory:
        import shutil

        shutil.rmtree(directory, ignore_errors=True)
    return 0
