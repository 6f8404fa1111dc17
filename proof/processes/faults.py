"""Faults on real processes under load. The history checker judges the result.

::

    python -m proof.processes.faults --rounds 20 --seed 7     # faults of all kinds
    python -m proof.processes.faults --fault kill-all --rounds 50
    python -m proof.processes.faults --fault move --rounds 5  # brokers join and leave
    python -m proof.processes.faults --transactions           # exactly once: proof.processes.transactions

In each round a fault occurs while clients write and read, and ends. Then all replicas must be in sync again
within a time limit, and every partition must be served. At the end all histories are checked. The seed
determines faults, victims and pauses, but not their effects on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import KafkaliteError
from kafkalite.rng import Rng, seeded_rng
from kafkalite.storage import layout
from kafkalite.storage.disk import RealFileSystem
from kafkalite.testing.process_cluster import ProcessCluster
from proof.console import tell
from proof.damage.kinds import LOG_KINDS, OLDER, damage_log
from proof.histories.history import Anomaly, check
from proof.processes.moves import move
from proof.processes.workload import Workload

TOPIC: Final = "ledger"
PARTITIONS: Final = 3
#: After the end of a fault, all replicas must be in sync and all partitions served within this time.
HEALING_LIMIT_S: Final = 60.0
FULL_DISK: Final = "full-disk"
SMALL_DISK_NODE: Final = 3  #: its data is on a disk in memory, where full-disk can fill it
SMALL_DISK_BYTES: Final = 512 * 2**20

Fault = Callable[[ProcessCluster, Rng], Awaitable[str]]
"""Causes a fault, repairs it, and returns a short description. Then every node runs and every link works."""


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
    """Stop a leader by SIGSTOP, sometimes longer than its session, so that it is deposed when it resumes."""
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
    """Slow all links down. Reset some connections in the middle of a frame and some at once."""
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


async def cut_one_link(cluster: ProcessCluster, rng: Rng) -> str:
    """Cut one link in both directions. All other links work."""
    nodes = list(cluster.nodes)
    rng.shuffle(nodes)
    seconds = 1 + 6 * rng.random()
    cluster.cut(nodes[0], nodes[1])
    cluster.cut(nodes[1], nodes[0])
    await asyncio.sleep(seconds)
    cluster.heal()
    return f"nodes {nodes[0]} and {nodes[1]} cut from each other for {seconds:.1f} s"


async def damage_one(cluster: ProcessCluster, rng: Rng) -> str:
    """Damage a log of a node that was killed."""
    victim = _any_broker(cluster, rng)
    await cluster.kill(victim)
    what = _damage_a_log(cluster, victim, rng)
    await cluster.start_node(victim)
    return f"node {victim} killed, {what}"


async def damage_after_kill_all(cluster: ProcessCluster, rng: Rng) -> str:
    """Damage a log of one node after all were killed, and start them in any order."""
    nodes = list(cluster.nodes)
    rng.shuffle(nodes)
    await cluster.kill(*nodes)
    what = _damage_a_log(cluster, nodes[0], rng)
    rng.shuffle(nodes)
    for node_id in nodes:
        await cluster.start_node(node_id)
        await asyncio.sleep(4 * rng.random())
    return f"all killed, {what}"


def _damage_a_log(cluster: ProcessCluster, node_id: int, rng: Rng) -> str:
    """Damage one log, or two of which files are swapped, in a way that is drawn."""
    fs, data = RealFileSystem(), cluster.nodes[node_id].settings["log.dirs"]
    logs = sorted(name for name in fs.list_dir(data) if layout.parse_log_directory_name(name))
    rng.shuffle(logs)
    kinds = [kind for kind in LOG_KINDS if kind.operation != OLDER]
    while True:
        kind = kinds[rng.randrange(len(kinds))]
        if damage_log(fs, layout.join(data, logs[0]), kind, rng, sibling=layout.join(data, logs[1])):
            return f"{kind} at node {node_id}"


async def few_descriptors(cluster: ProcessCluster, rng: Rng) -> str:
    """Leave a node a few free descriptors, and take them with connections."""
    victim = _any_broker(cluster, rng)
    node = cluster.nodes[victim]
    assert node.process is not None
    pid, seconds = node.process.pid, 2 + 3 * rng.random()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_open_descriptors(pid) + rng.randrange(8), limits[1]))
    host, port = node.address.split(":")
    opened = await asyncio.gather(
        *(asyncio.open_connection(host, int(port)) for _ in range(40)), return_exceptions=True
    )
    await asyncio.sleep(seconds)
    for each in opened:
        if not isinstance(each, BaseException):
            each[1].close()
    if node.is_running:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    return f"node {victim} without descriptors for {seconds:.1f} s"


def _open_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def full_disk(cluster: ProcessCluster, rng: Rng) -> str:
    """Fill the small disk of the node that has one."""
    victim = SMALL_DISK_NODE
    disk = Path(cluster.nodes[victim].settings["log.dirs"]).parent
    ballast, seconds = disk / "ballast", 2 + 4 * rng.random()
    _fill(ballast)
    await asyncio.sleep(seconds)
    ballast.unlink()
    return f"the disk of node {victim} full for {seconds:.1f} s"


def _fill(file: Path) -> None:
    """Write until no byte is free."""
    with file.open("wb", buffering=0) as stream:
        for size in (65_536, 1):
            with suppress(OSError):
                while True:
                    stream.write(bytes(size))


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """Mount a small disk in memory, and yield its path; None if that is not allowed here."""
    place.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def restart_in_turn(cluster: ProcessCluster, rng: Rng) -> str:
    """Restart the nodes one by one, each when the previous one is back."""
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
    "cut-one-link": cut_one_link,
    "damage-one": damage_one,
    "damage-after-kill-all": damage_after_kill_all,
    "few-descriptors": few_descriptors,
    FULL_DISK: full_disk,
    "move": move,
}


@dataclass(slots=True)
class Round:
    fault: str
    what: str
    whole_s: float  #: seconds from the end of the fault until every replica was in sync
    served_s: float  #: seconds until every partition had acknowledged a new record
    pause_s: float  #: the longest time in which some partition acknowledged nothing
    acknowledged: int  #: records acknowledged since the start


@dataclass(slots=True)
class Report:
    rounds: list[Round] = field(default_factory=list)
    sent: int = 0
    acknowledged: int = 0
    anomalies: list[Anomaly] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return sum(each.kind in {"lost-write", "unseen", "vanished"} for each in self.anomalies)


@asynccontextmanager
async def _cluster(
    directory: Path, faults: Sequence[str], settings: Mapping[str, Any] | None, tell: Callable[[str], None]
) -> AsyncIterator[tuple[ProcessCluster, Sequence[str]]]:
    """Start a cluster of three. Yield it with the faults that are possible here."""
    with small_disk(directory / "small-disk") if FULL_DISK in faults else nullcontext(None) as disk:
        if disk is None and FULL_DISK in faults:
            tell("NO DISK IN MEMORY CAN BE MOUNTED HERE: full-disk is left out")
            faults = [fault for fault in faults if fault != FULL_DISK] or ["kill-one"]
        on_disk = {SMALL_DISK_NODE: {"log.dirs": str(disk / "node")}} if disk is not None else None
        async with ProcessCluster(
            directory, brokers=3, proxied=True, settings=settings, node_settings=on_disk
        ) as cluster:
            yield cluster, faults


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
    """Start a cluster of three nodes, cause ``rounds`` faults out of ``faults``, check the clients'
    histories.

    Raises TimeoutError if the cluster does not heal in HEALING_LIMIT_S.
    """
    rng = seeded_rng(seed)
    report = Report()
    async with _cluster(Path(directory), faults, settings, tell) as (cluster, faults):
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
    tell(f"seed {seed}, durability {chosen.durability}, nodes in {directory}")
    try:
        report = asyncio.run(
            run(
                directory,
                faults,
                rounds=chosen.rounds,
                seed=seed,
                settings={"durability": chosen.durability},
                tell=tell,
            )
        )
    except (KafkaliteError, TimeoutError, AssertionError) as error:
        tell(f"FAILED: {error}\nthe nodes' logs are in {directory}")
        return 1
    _print_report(report)
    if report.anomalies:
        tell(f"the history is {directory}/history.jsonl")
        return 1
    if not chosen.directory:
        import shutil

        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _print_report(report: Report) -> None:
    whole = sorted(each.whole_s for each in report.rounds)
    served = sorted(each.served_s for each in report.rounds)
    pauses = sorted(each.pause_s for each in report.rounds)
    for anomaly in report.anomalies:
        tell(str(anomaly))
    tell(
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
