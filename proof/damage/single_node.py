"""Runs one case against a real broker on a disk in memory, and judges what its clients see.

The rule: no acknowledged record is missing or changed without notice. A record is served as it was
written, or an error names the cause, the number of records in doubt and the command; or the node refuses
to start and says why. After the command everything that is intact is served.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, NamedTuple

from kafkalite.broker.broker import Broker
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError, StorageError
from kafkalite.model import OffsetAndMetadata, TopicPartition
from kafkalite.records.gaps import is_gap
from kafkalite.records.header import check
from kafkalite.storage.accept_loss import accept_loss
from kafkalite.storage.inspect import verify_data_dir
from kafkalite.storage.layout import parent
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.damage.cases import Case, Layout, damage
from proof.damage.kinds import Tree
from proof.disk_trees import tree_of

DATA: Final = "/data"
ORDERS: Final = (TopicPartition("orders", 0), TopicPartition("orders", 1))
YOUNG: Final = (TopicPartition("young", 0), TopicPartition("young", 1))
LATER: Final = TopicPartition("later", 0)  # a topic that the older copy does not know
GROUP: Final = "readers"
TIMEOUT_MS: Final = 1_500
RECORDS: Final = 90

Records = dict[TopicPartition, dict[int, bytes]]


class Node(NamedTuple):
    """The disk of a node after its end, an older copy of it, and what was acknowledged."""

    tree: Tree
    older: Tree
    names: Layout
    written: Records
    committed: dict[TopicPartition, int]
    topics: frozenset[str]


class Outcome(NamedTuple):
    """``verdict``: whole, offline or refused; or lost or wrong, which are violations."""

    verdict: str
    detail: str


def broker_on(fs: MemoryFileSystem) -> Broker:
    return Broker(
        log_dirs=DATA,
        listeners="inproc://",
        filesystem=fs,
        log_segment_bytes=4096,
        log_index_interval_bytes=256,
        offsets_topic_num_partitions=2,
        metadata_log_max_record_bytes_between_snapshots=2048,
    )


async def prepare(*, is_clean: bool) -> Node:
    """Write records and commit offsets, copy the tree, write more, and end the node."""
    fs = MemoryFileSystem()
    written: Records = {tp: {} for tp in (*ORDERS, *YOUNG, LATER)}
    broker = broker_on(fs)
    async with broker, Admin(bootstrap_servers=broker.address) as admin:
        await admin.create_topic("orders", len(ORDERS))
        await _write(broker, written, ORDERS, 0)
        await admin.delete_records({ORDERS[0]: 1, ORDERS[1]: 2})
        await _commit(admin, 3)
        await broker.housekeeping.record()
    older = _tree(fs)
    broker = broker_on(fs)
    await broker.start()
    async with Admin(bootstrap_servers=broker.address) as admin:
        await admin.create_topic("later", 1)
        await admin.create_topic("young", len(YOUNG))
        for number in range(10):  # enough metadata for a snapshot
            await admin.create_topic(f"filler{number}", 8)
        await admin.create_topic("last", 1)
        await _write(broker, written, (*ORDERS, *YOUNG, LATER), 1000)
        await admin.delete_records({ORDERS[0]: 4, ORDERS[1]: 5})
        committed = await _commit(admin, 40)
        await broker.housekeeping.record()
        names = _names(broker)
        topics = frozenset(broker.image.topics)
    if is_clean:
        await broker.stop()
    else:
        await broker.kill()
    for tp, start in ((ORDERS[0], 4), (ORDERS[1], 5)):
        for offset in range(start):
            del written[tp][offset]
    return Node(_tree(fs), older, names, written, committed, topics)


async def _write(broker: Broker, written: Records, partitions: tuple[TopicPartition, ...], seed: int) -> None:
    async with Producer(bootstrap_servers=broker.address, linger_ms=0) as producer:
        for number in range(RECORDS // 2):
            for tp in partitions:
                value = b"%d-%d-" % (tp.partition, seed + number) + bytes(60)
                metadata = await producer.send(tp.topic, value, partition=tp.partition)
                written[tp][metadata.offset] = value


async def _commit(admin: Admin, offset: int) -> dict[TopicPartition, int]:
    wanted = {tp: offset + tp.partition for tp in ORDERS}
    await admin.alter_group_offsets(GROUP, {tp: OffsetAndMetadata(one) for tp, one in wanted.items()})
    return wanted


def _tree(fs: MemoryFileSystem) -> Tree:
    return {path.removeprefix(f"{DATA}/"): data for path, data in tree_of(fs, DATA).items()}


def _names(broker: Broker) -> Layout:
    def name(tp: TopicPartition) -> str:
        hosted = broker.partitions.find(tp)
        assert hosted is not None
        return hosted.partition.log.directory.rpartition("/")[2]

    groups = [
        tp
        for tp in (TopicPartition("__consumer_offsets", number) for number in range(2))
        if (hosted := broker.partitions.find(tp)) is not None and hosted.log_end_offset
    ]
    return Layout(name(ORDERS[0]), name(ORDERS[1]), name(groups[0]), (name(YOUNG[0]), name(YOUNG[1])))


def disk_of(tree: Tree) -> MemoryFileSystem:
    """Return a disk with the files ``tree``, of a computer that has not been restarted since."""
    fs = MemoryFileSystem()
    fs.make_dirs(DATA)
    for path, data in tree.items():
        fs.make_dirs(parent(f"{DATA}/{path}"))
        fs.open(f"{DATA}/{path}", create=True).write_at(0, data)
    return fs


async def run_case(case: Case, node: Node) -> Outcome | None:
    """Damage a copy of the node's disk and start it. Returns None if the damage would change nothing."""
    tree = dict(node.tree)
    if not damage(case, tree, node.older, node.names):
        return None
    fs = disk_of(tree)
    intact = intact_batches(fs)
    broker = broker_on(fs)
    try:
        await broker.start()
    except (KafkaliteError, OSError) as error:
        return _judge_refusal(error)
    try:
        outcome = await _judge(broker, node)
    finally:
        await broker.stop()
    gone = intact - intact_batches(fs)
    if gone and outcome.verdict != "wrong":
        return Outcome("lost", f"{len(gone)} intact batches were deleted: {outcome}")
    if outcome.verdict == "offline":
        problem = await _accept(fs, node, outcome)
        if problem is not None:
            return Outcome("lost", f"after the command: {problem}")
    return outcome


def _judge_refusal(error: Exception) -> Outcome:
    hint = getattr(error, "hint", "")
    return Outcome("refused" if hint else "lost", f"{error}")


async def _judge(broker: Broker, node: Node) -> Outcome:
    offline: list[str] = []
    missing_topics = node.topics - broker.image.topics.keys()
    if missing_topics:
        return Outcome("lost", f"the topics {sorted(missing_topics)}")
    for tp, records in node.written.items():
        found, problem = await _read(broker, tp)
        for offset, value in found.items():
            if records.get(offset) != value:
                return Outcome(
                    "wrong", f"{tp} at {offset}: {value[:20]!r}, not {records.get(offset, b'')[:20]!r}"
                )
        missing = sorted(records.keys() - found.keys())
        if not missing:
            continue
        if problem is None:
            return Outcome("lost", f"{tp}: {len(missing)} of {len(records)} records from {missing[0]} on")
        if not _is_named(problem, len(missing)):
            return Outcome("lost", f"{tp}: {len(missing)} missing, and the error is {problem}")
        hidden = _hidden(broker, tp)
        if hidden is not None:
            return Outcome("lost", f"{tp}: {hidden}")
        offline.append(problem)
    try:
        async with Admin(bootstrap_servers=broker.address, default_api_timeout_ms=TIMEOUT_MS) as admin:
            committed = {tp: one.offset for tp, one in (await admin.committed_offsets(GROUP)).items()}
    except KafkaliteError as error:
        if not _is_named(str(error), 0):
            return Outcome("lost", f"committed offsets: {error}")
        offline.append(str(error))
    else:
        if committed != node.committed:
            return Outcome("lost", f"committed offsets {committed}, not {node.committed}")
    return Outcome("offline", "; ".join(offline)) if offline else Outcome("whole", "")


def _hidden(broker: Broker, tp: TopicPartition) -> str | None:
    """Return why a part of a damaged log below its sound end cannot be read, or None."""
    hosted = broker.partitions.find(tp)
    if hosted is None or hosted.partition.log.damage is None:
        return None
    log, sound_end = hosted.partition.log, hosted.partition.log.damage.sound_end_offset
    offset = log.log_start_offset
    while offset < sound_end:
        try:
            found = log.read(offset, max_bytes=1000, up_to=sound_end)
        except StorageError as error:
            return f"offset {offset} is below the sound end {sound_end}, but: {error}"
        if found.next_offset <= offset:
            return f"offset {offset} is below the sound end {sound_end}, but there is nothing"
        offset = found.next_offset
    return None


def _is_named(problem: str, missing: int) -> bool:
    """Whether an error names the command and a number of records in doubt that is at most ``missing``."""
    count = re.search(r"(\d+|an unknown number of) records in doubt", problem)
    return count is not None and "kl log accept-loss" in problem


async def _read(broker: Broker, tp: TopicPartition) -> tuple[dict[int, bytes], str | None]:
    """Return the records that a client can read from the start on, and the error that ends them."""
    found: dict[int, bytes] = {}
    try:
        async with Consumer(
            bootstrap_servers=broker.address, auto_offset_reset="earliest", default_api_timeout_ms=TIMEOUT_MS
        ) as consumer:
            consumer.assign([tp])
            (end,) = (await consumer.end_offsets([tp])).values()
            async with asyncio.timeout(TIMEOUT_MS / 1000):
                while (consumer.position(tp) or 0) < end:
                    for record in await consumer.get_many(timeout_ms=50):
                        found[record.offset] = record.value or b""
    except (KafkaliteError, TimeoutError) as error:
        problem = str(error)
    else:
        problem = ""
    hosted = broker.partitions.find(tp)
    if hosted is None:
        return found, None
    reason = hosted.offline_reason
    if reason is None:
        return found, problem or None
    return found, reason


def intact_batches(fs: MemoryFileSystem) -> set[bytes]:
    """Return the batches of records in all files of logs, under any name."""
    found: set[bytes] = set()
    for path, data in tree_of(fs, DATA).items():
        if re.search(r"\d{20}\.(log|torn-)", path):
            found |= set(_batches(memoryview(data)))
    return found


def _batches(view: memoryview) -> list[bytes]:
    from kafkalite.storage.damage import intact_runs

    found: list[bytes] = []
    for run in intact_runs(view, 0, 0):
        position = run.position
        while position < run.end:
            length = int.from_bytes(view[position + 8 : position + 12], "big") + 12
            batch = bytes(view[position : position + length])
            if not is_gap(check(batch)):
                found.append(batch)
            position += length
    return found


async def _accept(fs: MemoryFileSystem, node: Node, outcome: Outcome) -> str | None:
    """Run the command that the errors name, and return what is wrong after it."""
    for directory in dict.fromkeys(re.findall(r"kl log accept-loss (/[\w/-]+)", outcome.detail)):
        try:
            accept_loss(fs, directory)
        except StorageError as error:
            if "rename it to" in error.hint:  # a directory of another log: the command says so
                return None
            return str(error)
    broker = broker_on(fs)
    await broker.start()
    try:
        for tp, records in node.written.items():
            found, problem = await _read(broker, tp)
            if problem is not None:
                return f"{tp}: {problem}"
            if any(records.get(offset) != value for offset, value in found.items()):
                return f"{tp} has other records"
            hosted = broker.partitions.find(tp)
            assert hosted is not None
            if tp not in YOUNG and hosted.log_end_offset < max(records) + 1:
                return f"{tp} ends at {hosted.log_end_offset}: offsets would be used twice"
        async with Producer(bootstrap_servers=broker.address, delivery_timeout_ms=TIMEOUT_MS) as producer:
            for tp in node.written:
                await producer.send(tp.topic, b"more", partition=tp.partition)
    finally:
        await broker.stop()
    return None


def verify(fs: MemoryFileSystem) -> list[Any]:
    """Return the findings of ``kl log verify``."""
    own, verdicts = verify_data_dir(fs, DATA)
    return [*own.findings, *(one for verdict in verdicts for one in verdict.findings)]
