"""Damage to one node's disk between an unclean stop of all nodes and their return.

Each kind of damage (``proof.damage.kinds``) changes the files of one partition, or of the whole node, while
its process is down. A story writes records, kills all nodes, damages one, starts them in some order, and
compares what readers receive with what was acknowledged: nothing may be lost or changed while one sound
copy returns.

``python -m proof.sim.damage`` plays every kind in every order at the leader and at a follower.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.records.header import HEADER_BYTES
from kafkalite.storage import layout
from kafkalite.storage.accept_loss import accept_loss
from kafkalite.storage.damage import find_batch, intact_runs
from kafkalite.storage.filesystem import FileSystem
from kafkalite.testing.sim.simulation import Violation
from proof.damage.kinds import ACTIVE, DIRECTORY, Kind, Tree, copy_tree, damage_log, restore_tree
from proof.sim.nodes import CLUSTER_SECRET, DATA_PATH, SimNode
from proof.sim.stage import Stage, Story, play
from proof.sim.workload import CLIENT_SETTINGS

KEY: Final = TopicPartition("t", 0)
FIRST: Final = 60  #: records before the copy that is restored is made
SECOND: Final = 60
GAP_S: Final = 0.4  #: between the starts of two nodes
EVERYWHERE: Final = (35, 20, 5)  #: the offset of the bad batch in the log of each node
LONG_GAP_S: Final = 3.0  #: long enough for two nodes to elect a leader without the third, if they may

DAMAGES: Final[dict[str, Kind]] = {
    "flip": Kind(ACTIVE, "flip"),
    "flip-last": Kind(ACTIVE, "flip-last"),
    "cut": Kind(ACTIVE, "truncate"),
    "zero": Kind(ACTIVE, "zero"),
    "epoch-up": Kind(ACTIVE, "epoch-up"),
    "epoch-last": Kind(ACTIVE, "epoch-last"),
    "missing": Kind(DIRECTORY, "delete"),
}
METADATA: Final = "__cluster_metadata"
RESTORED: Final = "restored"  #: the node's directory, as the process that was killed had it earlier
RESTORED_EARLIER: Final = "restored-earlier"  #: as an earlier process had it
KINDS: Final = (*DAMAGES, RESTORED, RESTORED_EARLIER)


# --- stories -------------------------------------------------------------------------------------------


async def _write(stage: Stage, count: int, start: int) -> dict[int, str]:
    """Write records one after the other; return the acknowledged ones by offset."""
    told: dict[int, str] = {}
    clock, rng = stage.simulation.host("writer").clock, stage.simulation.rng(f"writer {start}")
    settings = CLIENT_SETTINGS | {"linger_ms": 0}
    async with Producer(stage.bootstrap, clock=clock, rng=rng, **settings) as producer:
        for number in range(start, start + count):
            result = await producer.send(KEY.topic, b"%d" % number, partition=KEY.partition)
            told[result.offset] = str(number)
    return told


def difference(told: dict[int, str], found: Sequence[str]) -> str | None:
    """Return what is wrong with the records that a reader received, in the order of their offsets."""
    lost = set(told.values()).difference(found)
    if lost:
        return f"{len(lost)} of {len(told)} acknowledged records are lost"
    order = [told[offset] for offset in sorted(told)]
    seen = iter(found)
    return None if all(value in seen for value in order) else "acknowledged records changed their order"


async def damaged_copy(
    stage: Stage,
    *,
    kind: str = "cut",
    at_leader: bool = True,
    order: Sequence[int] = (0, 1, 2),
    gap_s: float = GAP_S,
    min_isr: int = 2,
    is_one_behind: bool = False,
) -> str | None:
    """Kill all nodes, damage one copy, start all nodes. Return the violation, or None.

    ``order`` is the order of starts: 0 is the damaged node, 1 and 2 are the others. If ``is_one_behind``,
    node 1 was killed earlier than the others, and lacks records.
    """
    await stage.open(KEY.topic, configs={"min.insync.replicas": str(min_isr)})
    told = await stage.on("writer", _write(stage, FIRST, 0))
    leader = stage.led(KEY.topic)
    victim = leader if at_leader else stage.others(leader)[0]
    tree: Tree = {}
    if kind.startswith(RESTORED):
        tree = copy_tree(victim.host.filesystem, DATA_PATH)
    if kind == RESTORED_EARLIER:
        await stage.restart(victim)
    if is_one_behind:
        behind = stage.others(victim)[0]
        behind.kill()
        await stage.until(
            lambda: behind.node_id not in stage.observer.image.topics[KEY.topic].partitions[0].isr
        )
    told |= await stage.on("writer", _write(stage, SECOND, FIRST))
    for node in stage.nodes:
        node.kill()
    fs: FileSystem = victim.host.filesystem
    if tree:
        if is_one_behind:  # without its metadata, which would take back a vote too
            present = copy_tree(fs, DATA_PATH)
            tree = {path: content for path, content in tree.items() if METADATA not in path}
            tree |= {path: content for path, content in present.items() if METADATA in path}
        restore_tree(fs, DATA_PATH, tree)
    else:
        topic = stage.observer.image.topics[KEY.topic]
        name = layout.log_directory_name(topic.topic_id, KEY.partition)
        damage_log(fs, layout.join(DATA_PATH, name), DAMAGES[kind], stage.simulation.rng("damage"))
    nodes = [victim, *stage.others(victim)]
    for number in order:
        nodes[number].start()
        await stage.pass_time(gap_s)
    await stage.whole()
    await stage.until(lambda: stage.observer.unconverged() is None)
    return difference(told, await stage.on("reader", _read(stage)))


async def older_copy(stage: Stage) -> str | None:
    """Schedule: the directory of a follower is replaced by an older copy while its process is down (R51)."""
    await stage.open(KEY.topic)
    await stage.on("writer", _write(stage, FIRST, 0))
    victim = stage.others(stage.led(KEY.topic))[0]
    fs: FileSystem = victim.host.filesystem
    tree = copy_tree(fs, DATA_PATH)
    await stage.restart(victim)
    victim.kill()
    restore_tree(fs, DATA_PATH, tree)
    victim.start()
    await stage.until(lambda: victim.is_running)
    await stage.whole()
    suffixes = (layout.REPLACED_SUFFIX, layout.DAMAGED_SUFFIX)
    if any(suffix in name for name in fs.list_dir(DATA_PATH) for suffix in suffixes):
        return None
    return f"R51: node {victim.node_id} goes on with the replicas of an older copy"


async def damage_while_leading(stage: Stage) -> str | None:
    """Schedule: a leader finds that its log is damaged, and two sound replicas are in sync (R52)."""
    await stage.open(KEY.topic)
    told = await stage.on("writer", _write(stage, FIRST, 0))
    victim = stage.led(KEY.topic)
    assert victim.live is not None
    log = next(hosted.partition.log for hosted in victim.live.partitions if hosted.key == KEY)
    log.mark_damaged("found by a scrub", sound_end_offset=FIRST // 2)
    try:
        await stage.succeeded(victim, KEY.topic)
    except Violation as violation:
        return f"R52: {violation}"
    told |= await stage.on("writer", _write(stage, SECOND, FIRST))
    await stage.whole()
    await stage.until(lambda: stage.observer.unconverged() is None)
    return difference(told, await stage.on("reader", _read(stage)))


async def damage_out_of_sync(stage: Stage) -> str | None:
    """Schedule: a follower that is no longer in sync finds that its log is damaged (R52)."""
    await stage.open(KEY.topic)
    told = await stage.on("writer", _write(stage, FIRST, 0))
    leader = stage.led(KEY.topic)
    victim = next(node for node in stage.others(leader) if node is not stage.controller())
    stage.cut(victim.host.name, leader.host.name)
    told |= await stage.on("writer", _write(stage, SECOND, FIRST))
    await stage.until(lambda: victim.node_id not in stage.observer.image.topics[KEY.topic].partitions[0].isr)
    assert victim.live is not None
    log = next(hosted.partition.log for hosted in victim.live.partitions if hosted.key == KEY)
    log.mark_damaged("found while it was compared with the leader's", sound_end_offset=FIRST // 2)
    try:
        await stage.whole()
    except Violation as violation:
        return f"R52: {violation}"
    await stage.until(lambda: stage.observer.unconverged() is None)
    return difference(told, await stage.on("reader", _read(stage)))


async def damage_everywhere(stage: Stage) -> str | None:
    """Schedule: each replica's log loses another batch, which only scrubs and fetches find (R52).

    No replica can complete another one. All must wait with their own logs, until an operator accepts the loss
    of one batch in one of them, and lets that replica lead.
    """
    await stage.open(KEY.topic)
    told = await stage.on("writer", _write(stage, FIRST, 0))
    topic = stage.observer.image.topics[KEY.topic]
    directory = layout.join(DATA_PATH, layout.log_directory_name(topic.topic_id, KEY.partition))
    path = layout.join(directory, layout.segment_file_name(0, layout.LOG_SUFFIX))
    for node in stage.nodes:
        await node.stop()
    await stage.until(lambda: all(node.state == "down" for node in stage.nodes))
    for node, number in zip(stage.nodes, EVERYWHERE, strict=True):
        fs: FileSystem = node.host.filesystem
        batch = find_batch(memoryview(fs.read_bytes(path)), 0, number)
        assert batch is not None, f"there is no offset {number} in {path}"
        fs.open(path).write_at(batch.position + HEADER_BYTES, b"\xff")
    intact = [_intact_records(node, path) for node in stage.nodes]
    for node in stage.nodes:
        node.start()
    await stage.until(lambda: stage.leader(KEY.topic) is not None)
    try:
        await stage.until(lambda: stage.leader(KEY.topic) is None)
    except Violation:
        return "R52: a damaged replica leads"
    await stage.pass_time(LONG_GAP_S)
    for node, before in zip(stage.nodes, intact, strict=True):
        left = _intact_records(node, path)
        if left < before:
            return f"R52: the log of node {node.node_id} had {before} intact records and now has {left}"
    chosen = stage.nodes[0]
    await chosen.stop()
    await stage.until(lambda: chosen.state == "down")
    lost = accept_loss(chosen.host.filesystem, directory).lost_records
    chosen.start()
    await stage.until(lambda: chosen.is_running)
    await stage.on("admin", _elect_unclean(stage))
    await stage.whole()
    await stage.until(lambda: stage.observer.unconverged() is None)
    found = await stage.on("reader", _read(stage))
    if (lost, len(found)) != (1, len(told) - 1):
        return f"R52: {len(found)} of {len(told)} records are left, although only one was lost: {found[:1]}"
    return None


async def _elect_unclean(stage: Stage) -> None:
    async with Admin(stage.bootstrap, **CLIENT_SETTINGS) as admin:
        await admin.elect_leaders([KEY], is_unclean=True, cluster_secret=CLUSTER_SECRET)


def _intact_records(node: SimNode, path: str) -> int:
    """Return how many records can be read in a segment, 0 if it does not exist."""
    fs: FileSystem = node.host.filesystem
    if not fs.exists(path):
        return 0
    view = memoryview(fs.read_bytes(path))
    return sum(run.end_offset - run.start_offset for run in intact_runs(view, 0, 0))


async def _read(stage: Stage) -> list[str]:
    try:
        return await stage.read_committed(KEY)
    except KafkaliteError as error:
        return [repr(error)]


def _breaks(rule: str, story: Story) -> str | None:
    """Return the violation that ``story`` or the observer finds, with the number of ``rule``, or None."""
    try:
        found = play(story)
    except Violation as violation:
        found = str(violation)
    return None if found is None else f"{rule}: {found}"


DIRECTED: Final[dict[str, Callable[[], str | None]]] = {
    "R52-same-epoch": partial(play, damage_out_of_sync),
    "R46-first-returns": partial(_breaks, "R46", partial(damaged_copy, gap_s=LONG_GAP_S)),
    "R47-no-wait": partial(
        _breaks,
        "R47",
        partial(damaged_copy, kind=RESTORED, order=(1, 0, 2), gap_s=LONG_GAP_S, is_one_behind=True),
    ),
    "R51-older-copy": partial(play, older_copy),
    "R52-leader-stays": partial(play, damage_while_leading),
    "R52-replaced-for-good": partial(play, damage_everywhere, settings={"log_initial_task_delay_ms": 5_000}),
}


def stories(kinds: Sequence[str]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield (name, story) for each kind of damage, place and order of starts."""
    for kind in kinds:
        for at_leader in (True, False):
            for gap_s in (GAP_S, LONG_GAP_S):
                for order in itertools.permutations(range(3)):
                    arguments: dict[str, Any] = {"kind": kind, "at_leader": at_leader}
                    story: Story = partial(damaged_copy, order=order, gap_s=gap_s, **arguments)
                    place = "leader" if at_leader else "follower"
                    yield f"{kind} at the {place}, started {order} {gap_s} s apart", partial(play, story)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.sim.damage", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; default: all")
    options = parser.parse_args(arguments)
    failed = 0
    for name, story in stories(options.kinds or KINDS):
        started_s = time.monotonic()
        try:
            found = story()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        failed += found is not None
        sys.stdout.write(f"{name:<62} {time.monotonic() - started_s:5.1f} s  {found or 'ok'}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    import logging

    logging.disable(logging.CRITICAL)
    sys.exit(main())
