"""Damage to the directory of a node without peers: ``python -m proof.processes.lone_damage``.

::

    python -m proof.processes.lone_damage                              # every stop and kind
    python -m proof.processes.lone_damage --case kill/active.truncate

There is no other copy, so records may be lost, but never silently. Each log is repaired, or it is offline,
and then the error of a producer or a reader states the cause, the number of records in doubt, and the command
that accepts the loss. Sound records stay readable before and after that command. The node refuses to start
only with a reason; if its metadata is damaged, also with the number of records in doubt and the command after
which it starts with all sound records.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.model import OFFSETS_TOPIC, TopicPartition
from kafkalite.rng import seeded_rng
from kafkalite.storage import layout
from kafkalite.storage.disk import RealFileSystem
from kafkalite.testing.process_cluster import NodeFailedError, ProcessCluster
from proof.console import tell
from proof.damage.kinds import (
    LOG_KINDS,
    METADATA,
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
from proof.processes.damage import (
    CLEAN,
    FIRST_RECORDS,
    KILL,
    MORE_RECORDS,
    OFFSETS,
    OFFSETS_KINDS,
    RECORD_BYTES,
    SEGMENT_BYTES,
    difference,
    digest,
    kl,
)

TOPIC: Final = "t"
GROUP: Final = "readers"
COMMITTED: Final = 41
STOPS: Final = (KILL, CLEAN)
#: The synced end is durable this long after an acknowledgement (R24).
DURABLE_S: Final = 1.5
START_LIMIT_S: Final = 30.0
READ_LIMIT_S: Final = 10.0
CLIENTS: Final = 12  #: at a time

OF_METADATA: Final = (METADATA, "journal")

REPAIRED, OFFLINE, REFUSED = ("repaired", "offline", "refused")
_IN_DOUBT: Final = re.compile(r"(\d+|an unknown number of) records? in doubt")
_COMMAND: Final = re.compile(r"'kl (log accept-loss) ([^']+)'")


class Case(NamedTuple):
    stop: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stop}/{self.kind}"

    @property
    def is_of_node(self) -> bool:
        return self.kind in NODE_KINDS

    @property
    def is_of_offsets(self) -> bool:
        return self.kind in OFFSETS_KINDS

    @property
    def has_own_node(self) -> bool:
        """Whether the case cannot share a node with others."""
        return self.is_of_node or self.is_of_offsets


@dataclass(slots=True)
class Verdict:
    """``outcome``: REPAIRED, OFFLINE or REFUSED. ``problem``: what breaks the promise, or None."""

    outcome: str
    problem: str | None = None
    detail: str = ""


@dataclass(slots=True)
class Life:
    """One node with all cases of a stop that damage logs, or with one that damages the node's directory."""

    cases: list[Case]
    keys: dict[Case, TopicPartition] = field(default_factory=dict)
    siblings: dict[Case, TopicPartition] = field(default_factory=dict)
    told: dict[TopicPartition, dict[int, str]] = field(default_factory=dict)
    trees: dict[TopicPartition | None, Tree] = field(default_factory=dict)
    names: dict[TopicPartition, str] = field(default_factory=dict)  #: of log directories
    texts: dict[TopicPartition, str] = field(default_factory=dict)  #: what clients were told of a log


def cases() -> list[Case]:
    """Return the cases of every stop and kind, except the replacement of the whole directory.

    A node without peers cannot notice that.
    """
    kinds = (*LOG_KINDS, *OFFSETS_KINDS, *(kind for kind in NODE_KINDS if kind.file != NODE))
    return [Case(stop, kind) for stop in STOPS for kind in kinds]


def lives_of(chosen: Sequence[Case]) -> list[list[Case]]:
    found = [[case] for case in chosen if case.has_own_node]
    for stop in STOPS:
        logs = [case for case in chosen if case.stop == stop and not case.has_own_node]
        found += [logs] if logs else []
    return found


class Programme:
    """Runs lives of nodes. ``verdicts`` are the results."""

    def __init__(self, directory: Path, seed: int, *, tell: Any = print) -> None:
        self._directory = directory
        self._seed = seed
        self._tell = tell
        self._fs = RealFileSystem()
        self.verdicts: dict[Case, Verdict] = {}

    async def run(self, lives: Sequence[list[Case]], *, jobs: int) -> None:
        queue = list(enumerate(lives))[::-1]

        async def work() -> None:
            while queue:
                number, cases_of_life = queue.pop()
                directory = self._directory / f"node-{number}"
                async with ProcessCluster(directory, brokers=1) as cluster:
                    await self._live(cluster, Life(cases_of_life))
                for case in cases_of_life:
                    verdict = self.verdicts[case]
                    word = "FAILED" if verdict.problem else verdict.outcome
                    self._tell(f"{word:<9} {case}  {verdict.problem or verdict.detail[:150]}")

        await asyncio.gather(*(work() for _ in range(jobs)))

    async def _live(self, cluster: ProcessCluster, life: Life) -> None:
        await self._prepare(cluster, life)
        if life.cases[0].stop == KILL:
            await asyncio.sleep(DURABLE_S)
            await cluster.kill(1)
        else:
            await cluster.terminate(1)
        data = str(cluster.nodes[1].directory)
        for case in life.cases:
            self._damage(life, case, data)
        verified = await kl("log", "verify", data)
        await cluster.start_node(1)
        try:
            await cluster.wait(limit_s=START_LIMIT_S)
        except (NodeFailedError, TimeoutError) as error:
            for case in life.cases:
                self.verdicts[case] = _refusal(case, cluster, error)
                if case.kind.file in OF_METADATA and self.verdicts[case].problem is None:
                    self.verdicts[case].problem = await self._accept_refused(cluster, life, case)
            return
        turns = asyncio.Semaphore(CLIENTS)

        async def judge(case: Case) -> None:
            async with turns:
                verdict = await self._judge(cluster, life, life.keys[case])
                if verdict.problem is None and case in life.siblings:
                    sibling = await self._judge(cluster, life, life.siblings[case])
                    verdict.problem = sibling.problem
                if case.has_own_node:
                    await self._judge_offsets(cluster, verdict)
                self.verdicts[case] = verdict

        await asyncio.gather(*map(judge, life.cases))
        if "Traceback" in cluster.nodes[1].log:
            for case in life.cases:
                self.verdicts[case].problem = "the node has logged a traceback"
        self._compare_verified(life, verified)
        await self._accept_losses(cluster, life)

    async def _accept_refused(self, cluster: ProcessCluster, life: Life, case: Case) -> str | None:
        """Run the command that the refusal named. Return what the node lacks afterwards, or None."""
        text = cluster.nodes[1].tail(6)
        command = _COMMAND.search(text)
        if command is None or _IN_DOUBT.search(text) is None:
            return f"no number in doubt or no command: {text}"
        output = await kl(*command[1].split(), "--yes", command[2])
        await cluster.start_node(1)
        try:
            await cluster.wait(limit_s=START_LIMIT_S)
        except (NodeFailedError, TimeoutError):
            return f"the node refuses again: {cluster.nodes[1].tail(6)}; the command printed {output[-300:]}"
        verdict = await self._judge(cluster, life, life.keys[case])
        await self._judge_offsets(cluster, verdict)
        return verdict.problem if verdict.outcome == REPAIRED else f"{verdict.outcome}: {verdict.detail}"

    async def _prepare(self, cluster: ProcessCluster, life: Life) -> None:
        logs = [case for case in life.cases if not case.is_of_node]
        keys = (TopicPartition(TOPIC, number) for number in range(2 * len(life.cases)))
        for case in life.cases:
            life.keys[case] = next(keys)
            if case in logs and case.kind.operation == SWAP:
                life.siblings[case] = next(keys)
        life.told = {key: {} for key in (*life.keys.values(), *life.siblings.values())}
        configs = {"segment.bytes": str(SEGMENT_BYTES)}
        async with (
            Admin(cluster.bootstrap_servers) as admin,
            Producer(cluster.bootstrap_servers, linger_ms=0) as producer,
        ):
            await admin.create_topic(TOPIC, len(life.told), 1, configs=configs)
            topic_id = (await admin.describe_topic(TOPIC)).topic_id
            life.names = {key: layout.log_directory_name(topic_id, key.partition) for key in life.told}
            with_state = [life.keys[case] for case in life.cases if case.kind.file == "state"]
            await _write(producer, life, FIRST_RECORDS)
            await admin.delete_records(dict.fromkeys(with_state, 3))
            data = str(cluster.nodes[1].directory)
            cluster.pause(1)
            for case in life.cases:
                if case.kind.operation == OLDER:
                    key = None if case.is_of_node else life.keys[case]
                    inner = data if key is None else layout.join(data, life.names[key])
                    life.trees[key] = copy_tree(self._fs, inner)
            cluster.resume(1)
            await admin.delete_records(dict.fromkeys(with_state, 5))
            for key in with_state:
                life.told[key] = {at: each for at, each in life.told[key].items() if at >= 5}
            await _write(producer, life, MORE_RECORDS)
            await admin.alter_group_offsets(GROUP, {TopicPartition(TOPIC, 0): COMMITTED})
            if any(case.is_of_offsets for case in life.cases):
                life.names[TopicPartition(OFFSETS_TOPIC, 0)] = (
                    await admin.describe_topic(OFFSETS_TOPIC)
                ).topic_id

    def _damage(self, life: Life, case: Case, data: str) -> None:
        rng = seeded_rng(zlib.crc32(f"{self._seed} {case}".encode()))
        if case.is_of_node:
            damage_node(self._fs, data, case.kind, rng, earlier=life.trees.get(None))
            return
        if case.is_of_offsets:
            topic_id = life.names[TopicPartition(OFFSETS_TOPIC, 0)]
            kind = case.kind._replace(file=case.kind.file.removeprefix(f"{OFFSETS}-"))
            for name in self._fs.list_dir(data):
                if name.startswith(f"{topic_id}-"):
                    damage_log(self._fs, layout.join(data, name), kind, rng)
            return
        key = life.keys[case]
        sibling = life.names.get(life.siblings.get(case, key), "")
        damage_log(
            self._fs,
            layout.join(data, life.names[key]),
            case.kind,
            rng,
            sibling=layout.join(data, sibling),
            earlier=life.trees.get(key),
        )

    # --- judging

    async def _judge(self, cluster: ProcessCluster, life: Life, key: TopicPartition) -> Verdict:
        """Read all readable records, and write one. Check that no record is missing without an error."""
        servers, told = cluster.bootstrap_servers, life.told[key]
        found, read_error = await _read(servers, key)
        wrong = [offset for offset, value in found.items() if told.get(offset, value) != value]
        if wrong:
            return Verdict(
                OFFLINE, f"WRONG {len(wrong)} records are not those written, the first at {wrong[0]}"
            )
        write_error = await _write_one(servers, key, told)
        lost = difference(
            told, found | {at: each for at, each in told.items() if at > max(found, default=-1)}
        )
        missing = len(set(told) - set(found))
        texts = [text for text in (read_error, write_error) if text]
        life.texts[key] = " / ".join(texts)
        if not texts and missing:
            return Verdict(REPAIRED, f"SILENT loss of {missing} of {len(told)} records")
        if not texts:
            return Verdict(REPAIRED)
        if lost is not None:
            return Verdict(OFFLINE, f"a gap in what can be read: {lost}", life.texts[key])
        if not write_error:
            return Verdict(OFFLINE, "writes are accepted behind records that are lost", life.texts[key])
        if not any(_IN_DOUBT.search(text) and _COMMAND.search(text) for text in texts):
            return Verdict(OFFLINE, f"no number in doubt or no command: {life.texts[key][:300]}")
        return Verdict(OFFLINE, None, life.texts[key])

    async def _judge_offsets(self, cluster: ProcessCluster, verdict: Verdict) -> None:
        """Check that the group's offset is the committed one, or that an error states why it is not."""
        try:
            async with Admin(cluster.bootstrap_servers, request_timeout_ms=5_000) as admin:
                found = await admin.committed_offsets(GROUP)
        except KafkaliteError as error:
            text = str(error)
            verdict.outcome, verdict.detail = OFFLINE, text
            if not (_IN_DOUBT.search(text) and _COMMAND.search(text)):
                verdict.problem = (
                    f"the error of OffsetFetch has no number in doubt or no command: {text[:300]}"
                )
            return
        one = found.get(TopicPartition(TOPIC, 0))
        if one is None or one.offset != COMMITTED:
            verdict.problem = f"SILENT loss of the committed offset {COMMITTED}: {one}"

    def _compare_verified(self, life: Life, verified: str) -> None:
        """Check that ``kl log verify`` of the stopped node names each log that was offline."""
        for case in life.cases:
            verdict = self.verdicts[case]
            name = life.names[life.keys[case]]
            if verdict.outcome == OFFLINE and verdict.problem is None and not case.is_of_node:
                lines = [line for line in verified.splitlines() if name in line and "damaged" in line]
                if not lines and not case.is_of_offsets:
                    verdict.problem = "'kl log verify' does not report it"

    async def _accept_losses(self, cluster: ProcessCluster, life: Life) -> None:
        """Run each command that an error named. Afterwards the log takes records, and has the sound ones."""
        offline = [case for case in life.cases if self.verdicts[case].outcome == OFFLINE]
        commands = {
            case: found
            for case in offline
            if (found := _COMMAND.search(life.texts.get(life.keys[case], ""))) is not None
        }
        if not commands:
            return
        before = {case: (await _read(cluster.bootstrap_servers, life.keys[case]))[0] for case in commands}
        await cluster.terminate(1)
        outputs = {
            case: await kl(*found[1].split(), "--yes", *found[2].split()) for case, found in commands.items()
        }
        await cluster.start_node(1)
        await cluster.wait(limit_s=START_LIMIT_S)
        for case, output in outputs.items():
            verdict, key = self.verdicts[case], life.keys[case]
            if "rename it to" in output:  # nothing needs to be lost
                continue
            left, error = await _read(cluster.bootstrap_servers, key)
            problem = error or await _write_one(cluster.bootstrap_servers, key, {})
            if problem or not before[case].items() <= left.items():
                about = f"{problem or 'sound records are gone'}; it printed {output.strip()[-200:]}"
                verdict.problem = verdict.problem or f"after the command: {about}"


def _refusal(case: Case, cluster: ProcessCluster, error: Exception) -> Verdict:
    """Return the verdict on a node that did not start.

    It may refuse only because of damage to its own directory, and must state a reason and a hint.
    """
    tail = cluster.nodes[1].tail(6)
    if isinstance(error, TimeoutError):
        return Verdict(REFUSED, f"neither started nor ended: {error}")
    if not case.is_of_node:
        return Verdict(REFUSED, f"the node ended because of one log: {tail}")
    if "Traceback" in tail or "hint" not in tail:
        return Verdict(REFUSED, f"no reason and hint: {tail}")
    return Verdict(REFUSED, None, " ".join(tail.split()[-40:]))


async def _write(producer: Producer, life: Life, count: int) -> None:
    async def write(key: TopicPartition) -> None:
        told = life.told[key]
        value = f"{key} {len(told)} {time.monotonic_ns()} ".encode().ljust(RECORD_BYTES, b".")
        receipt = await producer.send(key.topic, value, partition=key.partition)
        told[receipt.offset] = digest(value)

    for _ in range(count):
        await asyncio.gather(*map(write, life.told))


async def _write_one(servers: str, key: TopicPartition, told: dict[int, str]) -> str:
    """Write one record. Return the error, or an empty text."""
    try:
        async with Producer(servers, linger_ms=0, delivery_timeout_ms=4_000, request_timeout_ms=2_000) as one:
            receipt = await one.send(key.topic, b"after", partition=key.partition)
    except KafkaliteError as error:
        return str(error)
    return f"offset {receipt.offset} was given twice" if receipt.offset in told else ""


async def _read(servers: str, key: TopicPartition) -> tuple[dict[int, str], str]:
    """Return {offset: digest} of the records up to the end or an error, and the error."""
    found: dict[int, str] = {}
    try:
        async with (
            asyncio.timeout(READ_LIMIT_S),
            Consumer(bootstrap_servers=servers, request_timeout_ms=3_000) as consumer,
        ):
            consumer.assign([key])
            await consumer.seek_to_beginning()
            end = (await consumer.end_offsets([key]))[key]
            while (consumer.position(key) or 0) < end:
                for record in await consumer.get_many(timeout_ms=300):
                    found[record.offset] = digest(record.value or b"")
            await consumer.get_many(timeout_ms=300)  # at the end of the sound part this must fail
    except (KafkaliteError, TimeoutError) as error:
        return found, f"{type(error).__name__}: {error}"
    return found, ""


def run_cases(
    chosen: Sequence[Case], directory: Path, *, seed: int, jobs: int = 1, tell: Any = print
) -> dict[Case, Verdict]:
    """Run the cases and return a verdict for each."""
    programme = Programme(directory, seed, tell=tell)
    asyncio.run(programme.run(lives_of(chosen), jobs=jobs))
    return programme.verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if every case is repaired, or offline or refused with a reason; else 1."""
    parser = argparse.ArgumentParser(prog="python -m proof.processes.lone_damage", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--cases", type=int, help="draw so many of the cases that need a node of their own")
    parser.add_argument("--jobs", type=int, default=2, help="nodes at a time")
    parser.add_argument("--directory", help="keep the nodes' data and logs here")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    directory = Path(chosen.directory or tempfile.mkdtemp(prefix="kafkalite-lone-"))
    wanted = [case for case in cases() if not chosen.case or str(case) in chosen.case]
    if chosen.cases is not None:
        alone = [case for case in wanted if case.has_own_node]
        seeded_rng(chosen.seed).shuffle(alone)
        wanted = [case for case in wanted if case not in alone[chosen.cases :]]
    began_s = time.monotonic()
    verdicts = run_cases(wanted, directory, seed=chosen.seed, jobs=chosen.jobs, tell=tell)
    outcomes = [verdict.outcome for verdict in verdicts.values()]
    problems = [verdict.problem for verdict in verdicts.values() if verdict.problem]
    tell(
        f"\n{len(verdicts)} cases in {time.monotonic() - began_s:.0f} s, nodes in {directory}: "
        + ", ".join(f"{outcomes.count(each)} {each}" for each in (REPAIRED, OFFLINE, REFUSED))
        + f"; {len(problems)} failed, {sum('SILENT' in each for each in problems)} silent losses,"
        f" {sum('WRONG' in each for each in problems)} with wrong records"
    )
    if not problems and not chosen.directory:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
