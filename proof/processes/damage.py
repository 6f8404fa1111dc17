"""Damage to the copies of a node that is down, with real processes: ``python -m proof.processes.damage``.

::

    python -m proof.processes.damage --cases 300 --seed 7
    python -m proof.processes.damage --case kill/active.flip/leader/first/together --seed 7
    python -m proof.processes.damage --self-test

A case names how the nodes stop, the kind of damage (``proof.damage.kinds``), the damaged copy, the position
of its node in the order of starts, and whether the nodes start together or apart. Cases with the same stop
share one *life* of a cluster: write records, stop, damage, start, judge. Each case has partitions of its own.

The judge compares the records that a reader receives with those that were acknowledged. While one sound
in-sync copy returns, none may be lost or changed, every partition must be in sync and accept records, and
all replicas must be equal on disk. If the sound copy is still missing, the partition must wait, and the
status of the cluster must state for what.
"""

# Long because it has the cases, the life of a cluster, and the judge of one programme.

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kafkalite.broker.coordination.internal_topics import partition_of
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError, UnknownTopicOrPartitionError
from kafkalite.model import OFFSETS_TOPIC, TopicPartition
from kafkalite.rng import Rng, seeded_rng
from kafkalite.storage import layout
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.inspect import iter_batches
from kafkalite.storage.recovery_points import read_points
from kafkalite.testing.process_cluster import SECRET, NodeFailedError, ProcessCluster
from proof.console import tell
from proof.damage.kinds import (
    ACTIVE,
    DIRECTORY,
    EARLIER,
    LOG_KINDS,
    NODE,
    NODE_KINDS,
    OLDER,
    SWAP,
    Kind,
    Tree,
    copy_tree,
    damage_log,
    damage_node,
)
from proof.waiting import eventually

KILL, CLEAN, ROLLING = STOPS = ("kill", "clean", "rolling")
LEADER, FOLLOWER, TWO_NODES, TWO_COPIES, WHOLE_NODE = (
    "leader",
    "follower",
    "two-nodes",
    "two-copies",
    "node",
)
POSITIONS: Final = ("first", "middle", "last")
TOGETHER, APART = GAPS = ("together", "apart")

FIRST_RECORDS: Final = 50  #: of each partition, before the copies for OLDER are made
MORE_RECORDS: Final = 10
RECORD_BYTES: Final = 600
SEGMENT_BYTES: Final = 16_384  #: so each partition has two closed segments
APART_S: Final = 4.0  #: long enough for two nodes to elect a leader without the third, if they may
HEALING_LIMIT_S: Final = 60.0
READ_LIMIT_S: Final = 30.0
EQUAL_LIMIT_S: Final = 30.0
MAX_CASES_OF_LIFE: Final = 10
OFFSETS: Final = "offsets"  #: the log of __consumer_offsets, as a file of a Kind
OFFSETS_KINDS: Final = tuple(
    Kind(f"{OFFSETS}-{file}", operation)
    for file, operation in ((ACTIVE, "flip"), (ACTIVE, "zero"), (ACTIVE, "truncate"), (DIRECTORY, "delete"))
)
#: Kinds that leave no sound copy of the records on a node, and that a start must notice.
OBVIOUS: Final = (Kind(ACTIVE, "zero"), Kind(ACTIVE, "truncate"), Kind(DIRECTORY, "delete"))
#: Every batch is read soon after a start and then again and again, so that replicas become equal.
SETTINGS: Final = {
    "offsets.topic.num.partitions": "3",
    "log.initial.task.delay.ms": "2000",
    "log.scrub.interval.ms": "3000",
}


class Case(NamedTuple):
    """A case of damage. ``position`` is the place of the (first) damaged node in the order of starts."""

    stop: str
    kind: Kind
    place: str
    position: str
    gap: str

    def __str__(self) -> str:
        return "/".join(map(str, self))  # --case takes it

    @classmethod
    def parse(cls, text: str) -> Case:
        stop, kind, place, position, gap = text.split("/")
        return cls(stop, Kind(*kind.split(".")), place, position, gap)


def case_kinds() -> list[tuple[str, Kind, tuple[str, ...]]]:
    """Return (stop, kind, possible places) of every combination of stop and kind."""
    found: list[tuple[str, Kind, tuple[str, ...]]] = []
    for stop in STOPS:
        found += [(stop, kind, (LEADER, FOLLOWER, TWO_NODES)) for kind in LOG_KINDS]
        found += [(stop, kind, (LEADER, FOLLOWER)) for kind in OFFSETS_KINDS]
        found += [(stop, kind, (WHOLE_NODE,)) for kind in NODE_KINDS]
        if stop != ROLLING:
            found += [(stop, kind, (TWO_COPIES,)) for kind in OBVIOUS]
    return found


def draw_cases(count: int, rng: Rng) -> list[Case]:
    """Draw cases so that every combination of stop and kind occurs before one occurs again.

    Only a third of the cases that damage a whole node are drawn, because each needs a life of its own.
    """
    found: list[Case] = []
    while len(found) < count:
        kinds = case_kinds()
        rng.shuffle(kinds)
        whole = sum(places == (WHOLE_NODE,) for _, _, places in kinds)
        for stop, kind, places in kinds:
            # A case of a whole node is a life of its own: one in three is drawn in each turn.
            if places == (WHOLE_NODE,) and rng.randrange(whole) >= whole // 3:
                continue
            place = places[rng.randrange(len(places))]
            gap = TOGETHER if stop == ROLLING else APART if place == TWO_COPIES else GAPS[rng.randrange(2)]
            position = "first" if place == TWO_COPIES else POSITIONS[rng.randrange(3)]
            found.append(Case(stop, kind, place, position, gap))
    return found[:count]


def lives_of(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Yield the cases in groups that can share a life of a cluster."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.place == WHOLE_NODE:
            yield [case]
        else:
            groups.setdefault((case.stop, case.gap), []).append(case)
    for group in groups.values():
        for start in range(0, len(group), MAX_CASES_OF_LIFE):
            yield group[start : start + MAX_CASES_OF_LIFE]


class Site(NamedTuple):
    """A copy that is damaged. ``sibling`` is another partition of the same node, for SWAP."""

    partition: TopicPartition
    node_id: int
    sibling: TopicPartition | None


@dataclass(slots=True)
class Life:
    """One life of a cluster: its cases, their sites, and what was acknowledged."""

    cases: list[Case]
    topic: str
    order: list[int]
    sites: dict[int, list[Site]] = field(default_factory=dict)  #: by index of the case
    #: by partition: {offset: digest} of the acknowledged records
    told: dict[TopicPartition, dict[int, str]] = field(default_factory=dict)
    directories: dict[TopicPartition, str] = field(default_factory=dict)
    trees: dict[tuple[int, TopicPartition | None], Tree] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)  #: offset by group
    undecided: list[TopicPartition] = field(default_factory=list)  #: their only sound copy was not in sync
    failures: dict[Case, list[str]] = field(default_factory=dict)

    def fail(self, problem: str, *partitions: TopicPartition) -> None:
        """Note a problem for the cases of ``partitions``, or for all cases if none are given."""
        hit = False
        for index, case in enumerate(self.cases):
            own = {each for site in self.sites.get(index, ()) for each in (site.partition, site.sibling)}
            if not partitions or own.intersection(partitions):
                self.failures.setdefault(case, []).append(problem)
                hit = True
        if not hit:  # an undamaged partition
            self.fail(problem)


class Programme:
    """Runs lives of clusters, one after the other in each worker."""

    def __init__(self, directory: Path, seed: int, *, tell: Any = print) -> None:
        self._directory = directory
        self._seed = seed
        self._fs = RealFileSystem()
        self._tell = tell
        self._numbers = itertools.count(1)
        self.results: dict[Case, list[str]] = {}
        self.not_applicable: list[Case] = []
        self.is_sabotaged = False  #: for the self-test: damage all copies, and make them look sound

    async def run(self, lives: Sequence[list[Case]], *, jobs: int) -> None:
        queue = list(lives)[::-1]

        async def work() -> None:
            cluster: ProcessCluster | None = None
            try:
                while queue:
                    cases = queue.pop()
                    if cluster is None:
                        cluster = ProcessCluster(
                            self._directory / f"cluster-{next(self._numbers)}", settings=SETTINGS
                        )
                        await cluster.start()
                    began_s = time.monotonic()
                    failures = await self._live(cluster, cases)
                    for case in cases:
                        problem = failures.get(case, [])
                        self.results[case] = problem
                        self._tell(f"{'FAILED' if problem else 'ok':<7} {case}")
                        for each in problem[:3]:
                            self._tell(f"        {each}")
                    nodes = f" in {cluster.directory}" if failures else ""
                    self._tell(f"        {len(cases)} cases in {time.monotonic() - began_s:.1f} s{nodes}")
                    if failures:
                        await cluster.close()
                        cluster = None
            finally:
                if cluster is not None:
                    await cluster.close()

        await asyncio.gather(*(work() for _ in range(jobs)))

    async def _live(self, cluster: ProcessCluster, cases: list[Case]) -> dict[Case, list[str]]:
        number = next(self._numbers)
        rng = seeded_rng(zlib.crc32(f"{self._seed} {cases[0]}".encode()))
        order = list(cluster.nodes)
        rng.shuffle(order)
        life = Life(cases, f"life-{number}", order)
        try:
            await self._prepare(cluster, life)
            if cases[0].stop == ROLLING:
                await self._roll(cluster, life)
            else:
                await self._stop_and_start(cluster, life)
            await self._judge(cluster, life)
        except NodeFailedError as error:
            life.fail(f"a node ended: {error}")
        except (KafkaliteError, TimeoutError, AssertionError) as error:
            life.fail(f"{type(error).__name__}: {error}")
        for node in cluster.nodes.values():
            if "Traceback" in node.log:
                life.fail(f"node {node.node_id} has logged a traceback")
        if not life.failures:
            with suppress(KafkaliteError):
                async with Admin(cluster.bootstrap_servers) as admin:
                    await admin.delete_topics([life.topic])
        return life.failures

    # --- before the stop

    async def _prepare(self, cluster: ProcessCluster, life: Life) -> None:
        await self._create(cluster, life)
        async with (
            Producer(cluster.bootstrap_servers, linger_ms=0, acks="all") as producer,
            Admin(cluster.bootstrap_servers) as admin,
        ):
            await self._write(producer, life, FIRST_RECORDS)
            await self._trim(admin, life, 3)
            await self._copy(cluster, life)
            await self._trim(admin, life, 5)
            await self._write(producer, life, MORE_RECORDS)
            for group_id in life.committed:
                offset = life.committed[group_id] = 7 + next(self._numbers)
                await self._set_offset(admin, group_id, TopicPartition(life.topic, 0), offset)

    async def _set_offset(self, admin: Admin, group_id: str, key: TopicPartition, offset: int) -> None:
        """Commit ``offset``. Retry while the group's coordinator lacks the new topic in its metadata."""

        async def is_set() -> bool:
            try:
                await admin.alter_group_offsets(group_id, {key: offset})
            except UnknownTopicOrPartitionError:
                return False
            return True

        await eventually(is_set, f"{key} is known to the coordinator of {group_id}")

    async def _create(self, cluster: ProcessCluster, life: Life) -> None:
        """Create the topic, with enough partitions led by each node, and choose the sites of each case."""
        wanted: list[tuple[int, int, int]] = []  # index of the case, leader, damaged node
        nodes = life.order
        for index, case in enumerate(life.cases):
            at = POSITIONS.index(case.position)
            victim, other = nodes[at], nodes[(at + 1) % 3]
            wanted += {
                LEADER: [(index, victim, victim)],
                FOLLOWER: [(index, other, victim)],
                TWO_NODES: [(index, victim, victim), (index, other, other)],
                TWO_COPIES: [(index, victim, victim), (index, victim, other)],
                WHOLE_NODE: [],
            }[case.place]
        most = max(Counter(leader for _, leader, _ in wanted).values(), default=0)
        count = 3 * max(2 * most, 1)  # as many again as siblings
        configs = {"min.insync.replicas": "2", "segment.bytes": str(SEGMENT_BYTES)}
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic(life.topic, count, 3, configs=configs)
            await self._set_offset(admin, "first", TopicPartition(life.topic, 0), 1)
            view = await cluster.wait(is_whole=True, brokers=3, topics=[life.topic, OFFSETS_TOPIC])
            ids = {name: (await admin.describe_topic(name)).topic_id for name in (life.topic, OFFSETS_TOPIC)}
        pool: dict[tuple[str, int], list[TopicPartition]] = {}
        for each in view.partitions:
            if each.name.topic not in ids:
                continue
            pool.setdefault((each.name.topic, each.state.leader_id), []).append(each.name)
            life.directories[each.name] = layout.log_directory_name(ids[each.name.topic], each.name.partition)
            if each.name.topic == life.topic:
                life.told[each.name] = {}
        for index, leader, victim in wanted:
            case = life.cases[index]
            if case.kind.file.startswith(OFFSETS):
                life.sites.setdefault(index, []).append(offsets_site(pool, life, leader, victim))
                continue
            if case.place == TWO_COPIES and index in life.sites:
                key = life.sites[index][0].partition
            else:
                key = pool[life.topic, leader].pop()
            # Any partition of the topic has a copy on the victim, and is damaged nowhere else.
            sibling = pool[life.topic, leader].pop() if case.kind.operation == SWAP else None
            life.sites.setdefault(index, []).append(Site(key, victim, sibling))

    async def _write(self, producer: Producer, life: Life, count: int) -> None:
        """Write ``count`` batches of one record to each partition."""

        async def write(key: TopicPartition) -> None:
            told = life.told[key]
            value = f"{key} {len(told)} ".encode().ljust(RECORD_BYTES, b".")
            receipt = await producer.send(key.topic, value, partition=key.partition)
            told[receipt.offset] = digest(value)

        for _ in range(count):
            await asyncio.gather(*(write(key) for key in life.told))

    async def _trim(self, admin: Admin, life: Life, offset: int) -> None:
        """Delete the records below ``offset`` in the partitions whose log state is damaged."""
        keys = {
            key
            for index, sites in life.sites.items()
            for site in sites
            for key in (site.partition, site.sibling)
            if life.cases[index].kind.file == "state" and key is not None
        }
        await admin.delete_records(dict.fromkeys(keys, offset))
        for key in keys:
            life.told[key] = {at: digest for at, digest in life.told[key].items() if at >= offset}

    async def _copy(self, cluster: ProcessCluster, life: Life) -> None:
        """Copy what OLDER and EARLIER restore, from a process that stands still."""
        for index, case in enumerate(life.cases):
            if case.kind.operation not in (OLDER, EARLIER):
                continue
            sites = life.sites.get(index, [])
            node_id = life.order[POSITIONS.index(case.position)]
            copies: list[tuple[int, TopicPartition | None]] = [(one.node_id, one.partition) for one in sites]
            for each, key in copies or [(node_id, None)]:
                path = self._data(cluster, each)
                cluster.pause(each)
                inner = layout.join(path, life.directories[key]) if key is not None else path
                life.trees[each, key] = copy_tree(self._fs, inner)
                cluster.resume(each)
            if case.kind.operation == EARLIER:
                await cluster.restart(node_id)
                await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)

    @staticmethod
    def _data(cluster: ProcessCluster, node_id: int) -> str:
        return str(cluster.nodes[node_id].directory)

    # --- stop, damage, start

    async def _stop_and_start(self, cluster: ProcessCluster, life: Life) -> None:
        case = life.cases[0]
        waiting = [
            life.sites[index][0].partition
            for index, each in enumerate(life.cases)
            if each.place == TWO_COPIES and index in life.sites
        ]
        for key in waiting:
            # Within a second after the acknowledgement, two copies that lost the same end look intact (R24).
            await eventually(partial(self._is_end_durable, cluster, life, key), f"ends of {key} are durable")
        if case.stop == KILL:
            await cluster.kill(*cluster.nodes)
        else:
            codes = await cluster.stop()
            assert set(codes.values()) == {0}, f"exit codes on SIGTERM: {codes}"
        for node_id in cluster.nodes:
            self._damage(cluster, life, node_id)
        for number, node_id in enumerate(life.order):
            await cluster.start_node(node_id)
            if number == 1 and waiting:
                await self._judge_waiting(cluster, life, waiting)
            elif number < 2 and case.gap == APART:
                await asyncio.sleep(APART_S)
        for key in life.undecided:
            await self._elect_as_operator(cluster, key)

    def _is_end_durable(self, cluster: ProcessCluster, life: Life, key: TopicPartition) -> bool:
        """Whether each node has stored that its log of ``key`` was synced up to the last acknowledged
        record."""
        name, end = life.directories[key], max(life.told[key], default=-1) + 1
        directories = [self._data(cluster, node_id) for node_id in cluster.nodes]
        points = [read_points(self._fs, directory).get(name) for directory in directories]
        return all(point is not None and point.recovery_point >= end for point in points)

    async def _roll(self, cluster: ProcessCluster, life: Life) -> None:
        for node_id in life.order:
            code = await cluster.terminate(node_id)
            assert code == 0, f"node {node_id} ended with exit code {code} on SIGTERM"
            self._damage(cluster, life, node_id)
            await cluster.start_node(node_id)
            if not await self._until_whole(cluster, life):
                return

    def _damage(self, cluster: ProcessCluster, life: Life, node_id: int) -> None:
        """Damage the copies of one node."""
        data = self._data(cluster, node_id)
        for index, case in enumerate(life.cases):
            rng = seeded_rng(zlib.crc32(f"{self._seed} {case} {node_id}".encode()))
            is_done: list[bool] = []
            if case.place == WHOLE_NODE and life.order[POSITIONS.index(case.position)] == node_id:
                tree = life.trees.get((node_id, None))
                kind = Kind(NODE, OLDER) if case.kind.operation == EARLIER else case.kind
                is_done.append(damage_node(self._fs, data, kind, rng, earlier=tree))
            for site in life.sites.get(index, ()):
                if site.node_id == node_id or self.is_sabotaged:
                    path = layout.join(data, life.directories[site.partition])
                    sibling = layout.join(data, life.directories[site.sibling]) if site.sibling else ""
                    kind = Kind(case.kind.file.removeprefix(f"{OFFSETS}-"), case.kind.operation)
                    tree = life.trees.get((node_id, site.partition))
                    is_done.append(damage_log(self._fs, path, kind, rng, sibling=sibling, earlier=tree))
            if not all(is_done):
                self.not_applicable.append(case)

    # --- judging

    async def _judge_waiting(
        self, cluster: ProcessCluster, life: Life, waiting: Sequence[TopicPartition]
    ) -> None:
        """Check that partitions without a sound copy have no leader, and that the status states why.

        A sound copy that had left the ISR and ELR at an orderly stop needs an operator's election.
        """
        await cluster.wait(brokers=2, limit_s=HEALING_LIMIT_S)
        await asyncio.sleep(APART_S)
        view = await cluster.view()
        for each in view.partitions:
            if each.name in waiting and not each.is_leaderless:
                life.fail(f"{each.name} is led by {each.state.leader_id} without a sound copy", each.name)
            if each.name in waiting and life.order[-1] not in (*each.state.isr, *each.state.elr):
                life.undecided.append(each.name)
        status = await kl("cluster", "status", "-b", cluster.running_addresses[0])
        for key in waiting:
            if f"{key.topic}-{key.partition} waits" not in status:
                life.fail(f"{key.topic}-{key.partition}: the status does not state why it waits", key)

    async def _elect_as_operator(self, cluster: ProcessCluster, key: TopicPartition) -> None:
        """If the partition does not find a leader, elect one with the command that the status names."""
        name = f"{key.topic}-{key.partition}"

        async def is_decided() -> bool:
            view = await cluster.view()
            if key not in {each.name for each in view.leaderless}:
                return True
            status = await kl("cluster", "status", "-b", cluster.running_addresses[0])
            if f"{name} has no leader and no complete replica" not in status:
                return False
            self._tell(await kl("cluster", "elect", "--unclean", "-y", name, "-b", cluster.bootstrap_servers))
            return True

        await eventually(is_decided, f"{name} has a leader or needs one", limit_s=HEALING_LIMIT_S)

    async def _until_whole(self, cluster: ProcessCluster, life: Life) -> bool:
        """Wait until all replicas are in sync. Return False, and note the partitions, if that takes too long.

        A node whose own directory was damaged may refuse to start; it is then replaced as documented.
        """
        try:
            for node in cluster.nodes.values():
                if node.process is not None and not node.is_running:
                    raise NodeFailedError(f"node {node.node_id} ended:\n{node.tail()}")
            await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
        except NodeFailedError:
            if life.cases[0].place != WHOLE_NODE:
                raise
            await self._replace_refusing(cluster, life)
        except TimeoutError as error:
            status = (await kl("cluster", "status", "-b", cluster.running_addresses[0])).splitlines()
            view = await cluster.view()
            bad = {each.name for each in (*view.leaderless, *view.under_replicated)}
            for key in bad:
                about = [line for line in status if f"{key.topic}-{key.partition}" in line]
                life.fail(f"{key} not in sync after {HEALING_LIMIT_S:g} s: {' '.join(about)}", key)
            if not bad:
                life.fail(str(error))
            return False
        return True

    async def _replace_refusing(self, cluster: ProcessCluster, life: Life) -> None:
        """Let a node that refuses to start begin with an empty directory, as the documents say."""
        victim = life.order[POSITIONS.index(life.cases[0].position)]
        others = [node for node in cluster.nodes.values() if node.node_id != victim]
        if cluster.nodes[victim].is_running or not all(node.is_running for node in others):
            raise NodeFailedError("\n".join(node.tail(5) for node in cluster.nodes.values()))
        last = cluster.nodes[victim].tail(3)
        self._tell(f"        node {victim} refuses: {last.splitlines()[-1] if last else ''}")
        if not last.strip():
            life.fail(f"node {victim} refuses to start and does not state why")
        shutil.rmtree(self._data(cluster, victim), ignore_errors=True)
        await cluster.start_node(victim, "--rejoin")
        await cluster.wait(is_whole=True, brokers=3, limit_s=HEALING_LIMIT_S)
        await self._until_all_vote(cluster)

    @staticmethod
    async def _until_all_vote(cluster: ProcessCluster) -> None:
        """Wait until the replaced controller votes again. If the next case damaged another controller before
        that, two of three voters would be lost, and no controller could be elected."""

        async def do_all_vote() -> bool:
            quorum = await admin.describe_quorum()
            followers = [
                each for each in quorum.members if each.is_voter and each.node_id != quorum.leader_id
            ]
            # The leader counts no acknowledgement of a controller that does not vote yet.
            return quorum.leader_id == quorum.node_id and all(each.match_offset > 0 for each in followers)

        async with Admin(cluster.bootstrap_servers) as admin:
            await eventually(do_all_vote, "all controllers vote", limit_s=HEALING_LIMIT_S)

    async def _judge(self, cluster: ProcessCluster, life: Life) -> None:
        await self._until_whole(cluster, life)
        if self.is_sabotaged:
            keys = [f"{site.partition.topic}-{site.partition.partition}" for site in life.sites[0]]
            self._tell(
                await kl("cluster", "elect", "--unclean", "-y", *keys, "-b", cluster.bootstrap_servers)
            )
        await self._judge_served(cluster, life)
        await asyncio.gather(*(self._judge_records(cluster, life, key) for key in life.told))
        await self._judge_offsets(cluster, life)
        await self._judge_equal(cluster, life)

    async def _judge_served(self, cluster: ProcessCluster, life: Life) -> None:
        """Check that every partition acknowledges a record again."""
        settings: dict[str, Any] = {"linger_ms": 0, "acks": "all", "delivery_timeout_ms": 20_000}
        async with Producer(cluster.bootstrap_servers, **settings) as producer:

            async def write(key: TopicPartition) -> None:
                try:
                    receipt = await producer.send(key.topic, b"after", partition=key.partition)
                except KafkaliteError as error:
                    life.fail(f"no record is accepted: {error}", key)
                else:
                    if receipt.offset in life.told[key]:
                        life.fail(f"offset {receipt.offset} is used again: the record there is lost", key)
                    else:
                        life.told[key][receipt.offset] = digest(b"after")

            await asyncio.gather(*(write(key) for key in life.told))

    async def _judge_records(self, cluster: ProcessCluster, life: Life, key: TopicPartition) -> None:
        problem: str | None = "not read"
        until_s = time.monotonic() + READ_LIMIT_S
        while problem is not None and time.monotonic() < until_s:
            try:
                problem = difference(life.told[key], await read(cluster.bootstrap_servers, key))
                if problem is not None:
                    break
            except (KafkaliteError, TimeoutError) as error:
                problem = f"cannot be read: {type(error).__name__}: {error}"
                await asyncio.sleep(0.5)
        if problem is not None:
            life.fail(f"{key.topic}-{key.partition}: {problem}", key)

    async def _judge_offsets(self, cluster: ProcessCluster, life: Life) -> None:
        async with Admin(cluster.bootstrap_servers) as admin:
            for group_id, offset in life.committed.items():
                key = TopicPartition(
                    OFFSETS_TOPIC, partition_of(group_id, int(SETTINGS["offsets.topic.num.partitions"]))
                )
                try:
                    found = await admin.committed_offsets(group_id)
                except KafkaliteError as error:
                    life.fail(f"the offset of {group_id} cannot be read: {error}", key)
                    continue
                one = found.get(TopicPartition(life.topic, 0))
                if one is None or one.offset != offset:
                    life.fail(f"{group_id} had committed {offset}, and has {one}", key)

    async def _judge_equal(self, cluster: ProcessCluster, life: Life) -> None:
        """Check that all replicas have the same batches on disk."""
        left = dict(life.directories)
        problems: dict[TopicPartition, str] = {}
        until_s = time.monotonic() + EQUAL_LIMIT_S
        while left:
            for key, name in list(left.items()):
                copies = {each: layout.join(self._data(cluster, each), name) for each in cluster.nodes}
                problem = unequal(self._fs, copies)
                if problem is None:
                    del left[key]
                else:
                    problems[key] = problem
            if left and time.monotonic() > until_s:
                break
            await asyncio.sleep(0.5 if left else 0)
        for key in left:
            life.fail(f"{key.topic}-{key.partition}: replicas differ: {problems[key]}", key)


def offsets_site(
    pool: Mapping[tuple[str, int], Sequence[TopicPartition]], life: Life, leader: int, victim: int
) -> Site:
    """Return a copy of __consumer_offsets, and note a group with offsets in it.

    No partition is damaged on two nodes: if each has a damaged copy on another node, a damaged copy is
    damaged once more.
    """
    damaged = {
        site.partition: site.node_id
        for sites in life.sites.values()
        for site in sites
        if site.partition.topic == OFFSETS_TOPIC
    }
    known = [
        key
        for led_by in (leader, *life.order)
        for key in pool.get((OFFSETS_TOPIC, led_by), ())
        if damaged.get(key, victim) == victim
    ] or list(damaged)
    groups = (f"{life.topic}-group-{number}" for number in itertools.count())
    count = int(SETTINGS["offsets.topic.num.partitions"])
    life.committed[next(one for one in groups if partition_of(one, count) == known[0].partition)] = 0
    return Site(known[0], damaged.get(known[0], victim), None)


def difference(told: Mapping[int, str], found: Mapping[int, str]) -> str | None:
    """Return what is wrong with the records that a reader received, {offset: digest}, or None."""
    lost = [offset for offset in told if offset not in found]
    if lost:
        return f"LOST {len(lost)} of {len(told)} acknowledged records: offsets {min(lost)} to {max(lost)}"
    changed = [offset for offset in told if found[offset] != told[offset]]
    if changed:
        return f"CHANGED {len(changed)} of {len(told)} acknowledged records, the first at offset {changed[0]}"
    return None


def unequal(fs: RealFileSystem, copies: Mapping[int, str]) -> str | None:
    """Return how the batches of these log directories differ above the greatest log start, or None."""
    batches = {node_id: _batches(fs, directory) for node_id, directory in copies.items()}
    for node_id, found in batches.items():
        if isinstance(found, str):
            return f"node {node_id}: {found}"
    lists = {node_id: found for node_id, found in batches.items() if not isinstance(found, str)}
    start = max((min(found, default=0) for found in lists.values()), default=0)
    contents = {
        node_id: {offset: each for offset, each in found.items() if offset >= start}
        for node_id, found in lists.items()
    }
    (first, expected), *others = contents.items()
    for node_id, found in others:
        if found != expected:
            offset = min(set(found.items()) ^ set(expected.items()))[0]
            return f"nodes {first} and {node_id} from offset {offset} on"
    return None


def _batches(fs: RealFileSystem, directory: str) -> dict[int, tuple[int, int]] | str:
    """Return {base offset: (leader epoch, CRC)}, or the problem of a batch."""
    found: dict[int, tuple[int, int]] = {}
    try:
        for name in sorted(fs.list_dir(directory)):
            if name.endswith(layout.LOG_SUFFIX):
                for at in iter_batches(fs, layout.join(directory, name)):
                    if at.problem is not None or at.header is None:
                        return f"{name}: {at.problem}"
                    found[at.header.base_offset] = (at.header.leader_epoch, at.header.crc)
    except OSError as error:
        return str(error)
    return found


async def read(servers: str, key: TopicPartition) -> dict[int, str]:
    """Return {offset: digest} of all records of a partition. Raises KafkaliteError, TimeoutError."""
    found: dict[int, str] = {}
    async with Consumer(bootstrap_servers=servers, request_timeout_ms=5_000) as consumer:
        consumer.assign([key])
        await consumer.seek_to_beginning()
        async with asyncio.timeout(READ_LIMIT_S / 2):
            end = (await consumer.end_offsets([key]))[key]
            while (consumer.position(key) or 0) < end:
                for record in await consumer.get_many(timeout_ms=500):
                    found[record.offset] = digest(record.value or b"")
    return found


async def kl(*words: str) -> str:
    """Return all output of ``kl`` with these words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kafkalite",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "KAFKALITE_CLUSTER_SECRET": SECRET},
    )
    output, _ = await process.communicate()
    return output.decode()


def digest(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest()


# --- command line ----------------------------------------------------------------------------------------


def run_cases(
    cases: Sequence[Case], directory: Path, *, seed: int, jobs: int = 1, tell: Any = print
) -> dict[Case, list[str]]:
    """Run the cases, and return the problems of each."""
    programme = Programme(directory, seed, tell=tell)
    asyncio.run(programme.run(list(lives_of(cases)), jobs=jobs))
    return programme.results


def self_test(directory: Path, tell: Any = print) -> bool:
    """Whether the judge finds a real loss: all copies are damaged, and an operator accepts that."""
    programme = Programme(directory, 1, tell=tell)
    programme.is_sabotaged = True
    case = Case(KILL, Kind(ACTIVE, "truncate"), LEADER, "first", TOGETHER)
    asyncio.run(programme.run([[case]], jobs=1))
    return any("LOST" in problem for problem in programme.results[case])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if no case failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proof.processes.damage", description=__doc__)
    parser.add_argument("--cases", type=int, default=40, help="how many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="clusters at a time")
    parser.add_argument("--directory", help="keep the nodes' data and logs here")
    parser.add_argument("--self-test", action="store_true", help="check that the judge finds a real loss")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 1_000_000
    directory = Path(chosen.directory or tempfile.mkdtemp(prefix="kafkalite-damage-"))
    if chosen.self_test:
        is_found = self_test(directory, tell)
        tell("the judge found the loss" if is_found else "FAILED: the judge did not find the loss")
        return 0 if is_found else 1
    cases = [Case.parse(each) for each in chosen.case or ()] or draw_cases(chosen.cases, seeded_rng(seed))
    tell(f"seed {seed}, {len(cases)} cases, nodes in {directory}")
    began_s = time.monotonic()
    results = run_cases(cases, directory, seed=seed, jobs=chosen.jobs, tell=tell)
    failed = {case: problems for case, problems in results.items() if problems}
    texts = [text for problems in failed.values() for text in problems]
    tell(
        f"\n{len(cases)} cases in {time.monotonic() - began_s:.0f} s: {len(failed)} failed,"
        f" {sum('LOST' in text for text in texts)} lost, {sum('CHANGED' in text for text in texts)} changed"
    )
    for case, problems in failed.items():
        tell(f"{case}\n    {problems[0]}")
        tell(f"    again: python -m proof.processes.damage --seed {seed} --case {case}")
    if not failed and not chosen.directory:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
