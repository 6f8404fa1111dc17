"""Faults on real processes under load, judged by the history checker.

::

    python -m proof.processes.faults --rounds 20 --seed 7     # faults of all kinds
    python -m proof.processes.faults --fault kill-all --rounds 50
    python -m proof.processes.faults --transactions           # exactly once: proof.processes.transactions

Each round: a fault strikes while clients write and read, and ends; then all replicas must be in sync
again within a bound, and every partition must be served. At the end every history is checked. The seed
decides on faults, victims and pauses, but not on what the machine does with them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import KafkaliteError
from kafkalite.rng import Rng, seeded_rng
from kafkalite.testing.process_cluster import ProcessCluster
from proof.histories.history import Anomaly, check
from proof.processes.workload import Workload

TOPIC: Final = "ledger"
PARTITIONS: Final = 3
#: After the end of a fault, all replicas must be in sync and all partitions served within this time.
HEALING_LIMIT_S: Final = 60.0

Fault = Callable[[ProcessCluster, Rng], Awaitable[str]]
"""Strikes, repairs, and returns a few words about it. Afterwards every node runs and every link works."""


async def _leader_of(cluster: ProcessCluster, partition: int) -> int:
    view = await cluster.view()
    leaders = {
        each.name.partition: each.state.leader_id for each in view.partitions if each.name.topic == TOPIC
    }
    return leaders[partition] if leaders.get(partition, -1) > 0 else 1


async def _down_for(cluster: ProcessCluster, node_ids: Sequence[int], seconds: float) -> None:
    await cluster.kill(*node_ids)
    await asyncio.sleep(seconds)
    await asyncio.gather(*(cluster.start_node(node_id) for node_id in node_ids))


def _any_broker(cluster: ProcessCluster, rng: Rng) -> int:
    brokers = [node_id for node_id, node in cluster.nodes.items() if node.is_broker]
    return brokers[rng.randrange(len(brokers))]


async def kill_one(cluster: ProcessCluster, rng: Rng) -> str:
    victim = _any_broker(cluster, rng)
    await _down_for(cluster, [victim], 2 * rng.random())
    return f"node {victim} killed"


async def kill_leader(cluster: ProcessCluster, rng: Rng) -> str:
    partition = rng.randrange(PARTITIONS)
    victim = await _leader_of(cluster, partition)
    await _down_for(cluster, [victim], 2 * rng.random())
    return f"node {victim} killed, leader of {TOPIC}-{partition}"


async def kill_controller(cluster: ProcessCluster, rng: Rng) -> str:
    victim = (await cluster.view()).controller_id
    await _down_for(cluster, [victim], 2 * rng.random())
    return f"node {victim} killed, the controller"


async def kill_all(cluster: ProcessCluster, rng: Rng) -> str:
    await _down_for(cluster, list(cluster.nodes), 0.0)
    return "all nodes killed"


async def kill_two(cluster: ProcessCluster, rng: Rng) -> str:
    victims = list(cluster.nodes)
    rng.shuffle(victims)
    await _down_for(cluster, victims[:2], 2 * rng.random())
    return f"nodes {victims[0]} and {victims[1]} killed"


async def pause(cluster: ProcessCluster, rng: Rng) -> str:
    """Stop a leader by SIGSTOP, sometimes for longer than its session: it wakes up deposed."""
    victim = await _leader_of(cluster, rng.randrange(PARTITIONS))
    seconds = 0.5 + 5 * rng.random()
    cluster.pause(victim)
    await asyncio.sleep(seconds)
    cluster.resume(victim)
    return f"node {victim} stood still for {seconds:.1f} s"


async def isolate_leader(cluster: ProcessCluster, rng: Rng) -> str:
    victim = await _leader_of(cluster, rng.randrange(PARTITIONS))
    seconds = 1 + 5 * rng.random()
    cluster.isolate(victim)
    await asyncio.sleep(seconds)
    cluster.heal()
    return f"node {victim} cut off for {seconds:.1f} s"


async def cut_one_way(cluster: ProcessCluster, rng: Rng) -> str:
    nodes = list(cluster.nodes)
    rng.shuffle(nodes)
    seconds = 1 + 4 * rng.random()
    cluster.cut(nodes[0], nodes[1])
    await asyncio.sleep(seconds)
    cluster.heal()
    return f"nothing from node {nodes[0]} to node {nodes[1]} for {seconds:.1f} s"


async def bad_links(cluster: ProcessCluster, rng: Rng) -> str:
    """Slow all links down, reset some in mid-frame and some at once."""
    links = [link for a in cluster.nodes for b in cluster.nodes if a != b for link in cluster.links(a, b)]
    for link in links:
        link.there.delay(20 * rng.random())
    for _ in range(20):
        link = links[rng.randrange(len(links))]
        if rng.random() < 0.7:
            link.there.cut_after(rng.randrange(5_000))
        else:
            link.reset()
        await asyncio.sleep(0.1)
    cluster.heal()
    return "links slow and torn for 2 s"


async def restart_in_turn(cluster: ProcessCluster, rng: Rng) -> str:
    """Restart the nodes one by one, each when the one before is back."""
    for node_id in list(cluster.nodes):
        code = await cluster.terminate(node_id)
        if code != 0:
            raise AssertionError(f"node {node_id} ended with exit code {code} on SIGTERM")
        await cluster.start_node(node_id)
        await cluster.wait(is_whole=True, brokers=len(cluster.nodes), limit_s=HEALING_LIMIT_S)
    return "all nodes restarted in turn"


FAULTS: Final[Mapping[str, Fault]] = {
    "kill-one": kill_one,
    "kill-leader": kill_leader,
    "kill-controller": kill_controller,
    "kill-two": kill_two,
    "kill-all": kill_all,
    "pause": pause,
    "isolate-leader": isolate_leader,
    "cut-one-way": cut_one_way,
    "bad-links": bad_links,
    "rolling-restart": restart_in_turn,
}


@dataclass(slots=True)
class Round:
    fault: str
    what: str
    whole_s: float  #: from the end of the fault until every replica was in sync
    served_s: float  #: and until every partition had acknowledged a new record
    pause_s: float  #: the longest time in which some partition acknowledged nothing
    acknowledged: int  #: since the start


@dataclass(slots=True)
class Report:
    rounds: list[Round] = field(default_factory=list)
    sent: int = 0
    acknowledged: int = 0
    anomalies: list[Anomaly] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return sum(each.kind in {"lost-write", "unseen", "vanished"} for each in self.anomalies)


async def run(
    directory: Path | str,
    faults: Sequence[str],
    *,
    rounds: int,
    seed: int,
    settings: Mapping[str, Any] | None = None,
    load_s: float = 0.5,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Start a cluster of three, let ``rounds`` faults out of ``faults`` strike, check the histories of the
    clients.

    Raises TimeoutError if the cluster does not heal in HEALING_LIMIT_S.
    """
    rng = seeded_rng(seed)
    report = Report()
    cluster = ProcessCluster(directory, brokers=3, proxied=True, settings=settings)
    async with cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic(TOPIC, PARTITIONS, 3, configs={"min.insync.replicas": "2"})
        await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])
        async with Workload(lambda: cluster.bootstrap_servers, TOPIC, PARTITIONS) as load:
            for number in range(rounds):
                await asyncio.sleep(load_s * (0.5 + rng.random()))
                name = faults[number % len(faults)]
                load.take_longest_pause_s()
                what = await FAULTS[name](cluster, rng)
                began_s = time.monotonic()
                await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
                whole_s = time.monotonic() - began_s
                await load.until_served(HEALING_LIMIT_S)
                served_s = time.monotonic() - began_s
                pause_s = load.take_longest_pause_s()
                report.rounds.append(Round(name, what, whole_s, served_s, pause_s, load.history.acknowledged))
                tell(
                    f"{number + 1:>3}  {what:<44} in sync {whole_s:5.2f} s  served {served_s:5.2f} s  "
                    f"pause {pause_s:5.2f} s  {load.history.acknowledged:>8,} acknowledged"
                )
            await load.stop()
        await load.read_finally()
    report.sent = len(load.history.sends)
    report.acknowledged = load.history.acknowledged
    report.anomalies = check(load.history)
    if report.anomalies:
        with (Path(directory) / "history.jsonl").open("w") as file:
            load.history.dump(file)
    return report


# --- command line ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if no history has an anomaly, else 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--transactions" in words:
        from proof.processes import transactions as process_transactions

        return process_transactions.main([word for word in words if word != "--transactions"])
    parser = argparse.ArgumentParser(prog="python -m proof.processes.faults", description=__doc__)
    parser.add_argument(
        "--transactions", action="store_true", help="with jobs and producers that work in transactions"
    )
    parser.add_argument("--rounds", type=int, default=len(FAULTS))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--fault", action="append", choices=sorted(FAULTS), help="only these; may be repeated"
    )
    parser.add_argument("--durability", choices=("fsync", "page-cache"), default="fsync")
    parser.add_argument("--directory", help="keep the nodes' data and logs here")
    chosen = parser.parse_args(words)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 1_000_000
    faults = chosen.fault or sorted(FAULTS)
    if chosen.durability == "page-cache" and not chosen.fault:
        faults.remove(
            "kill-all"
        )  # after it no replica may lead without an operator: kl cluster elect --unclean
    if not chosen.fault:
        seeded_rng(seed).shuffle(faults)
    directory = chosen.directory or tempfile.mkdtemp(prefix="kafkalite-faults-")
    _print(f"seed {seed}, durability {chosen.durability}, nodes in {directory}")
    try:
        report = asyncio.run(
            run(
                directory,
                faults,
                rounds=chosen.rounds,
                seed=seed,
                settings={"durability": chosen.durability},
                tell=_print,
            )
        )
    except (KafkaliteError, TimeoutError, AssertionError) as error:
        _print(f"FAILED: {error}\nthe nodes' logs are in {directory}")
        return 1
    _print_report(report)
    if report.anomalies:
        _print(f"the history is {directory}/history.jsonl")
        return 1
    if not chosen.directory:
        import shutil

        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _print_report(report: Report) -> None:
    whole = sorted(each.whole_s for each in report.rounds)
    served = sorted(each.served_s for each in report.rounds)
    pauses = sorted(each.pause_s for each in report.rounds)
    for anomaly in report.anomalies:
        _print(str(anomaly))
    _print(
        f"\nrounds        {len(report.rounds)}\n"
        f"sent          {report.sent:,}\n"
        f"acknowledged  {report.acknowledged:,}\n"
        f"lost          {report.lost}\n"
        f"anomalies     {len(report.anomalies)}\n"
        f"in sync after p50 {whole[len(whole) // 2]:.2f} s, worst {whole[-1]:.2f} s\n"
        f"served after  p50 {served[len(served) // 2]:.2f} s, worst {served[-1]:.2f} s\n"
        f"longest pause p50 {pauses[len(pauses) // 2]:.2f} s, worst {pauses[-1]:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
