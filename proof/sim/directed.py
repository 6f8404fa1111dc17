"""Directed schedules for the rules of coordinators in a cluster of real brokers and clients. Each violates a
guarantee if its rule is removed, and none otherwise.

``DIRECTED`` is {mutant: schedule}. A schedule returns the violation, or None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from kafkalite.broker.server.responses import Pending, Response, settled
from kafkalite.client.admin.admin import Admin
from kafkalite.client.cluster.authentication import Authenticator
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import BrokerError, KafkaliteError
from kafkalite.model import NO_EPOCH, OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchPartition, ReplicaFetchRequest
from kafkalite.protocol.messages.data import (
    FetchPartition,
    FetchRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ProducePartition,
    ProduceRequest,
)
from kafkalite.protocol.messages.groups import OffsetFetchRequest
from kafkalite.records.builder import build_batch
from kafkalite.testing.sim.simulation import Violation
from kafkalite.testing.wire import WireClient
from proof.sim import damage, reassignments, throttles
from proof.sim.nodes import CLUSTER_ID, CLUSTER_SECRET, SimNode
from proof.sim.stage import Stage, play, values_of
from proof.sim.workload import CLIENT_SETTINGS

KEY: Final = TopicPartition("t", 0)
GROUP_ID: Final = "g"
TIMEOUT_MS: Final = 2_000  #: of transactions and of requests
_READ: Final = OffsetFetchRequest(GROUP_ID, "", -1, False, None)


# --- groups (R36) ------------------------------------------------------------------------------------------


async def _commit(stage: Stage, offset: int, bootstrap: list[str]) -> bool:
    """Commit an offset. Return whether it was acknowledged."""
    settings = CLIENT_SETTINGS | {"default_api_timeout_ms": TIMEOUT_MS}
    async with Admin(bootstrap, rng=stage.simulation.rng(f"commit {offset}"), **settings) as admin:
        try:
            await admin.alter_group_offsets(GROUP_ID, {KEY: offset})
        except KafkaliteError:
            return False
    return True


async def _committed(stage: Stage, bootstrap: list[str]) -> int:
    async with Admin(bootstrap, rng=stage.simulation.rng("committed"), **CLIENT_SETTINGS) as admin:
        found = (await admin.committed_offsets(GROUP_ID)).get(KEY)
    return -1 if found is None else found.offset


def _ask(coordinators: Any) -> Response | Pending | None:
    """Return a broker's response to an offset fetch, or None if it does not coordinate the group."""
    try:
        answer: Response | Pending = coordinators.groups(GROUP_ID).submit(_READ)
    except BrokerError:
        return None
    return answer


async def _told(answer: Response | Pending | None) -> int | None:
    """Return the offset in the response, -1 if there is none, or None if the response is a refusal."""
    if answer is None:
        return None
    try:
        found = await settled(answer)
    except BrokerError:
        return None
    return next((one.offset for one in found.offsets), -1)


async def _ask_inside(node: SimNode) -> int | None:
    broker = node.live
    return None if broker is None else await _told(_ask(broker.coordinators))


async def answer_uncommitted(stage: Stage) -> str | None:
    """Schedule: a coordinator that is cut off from the other brokers accepts a commit, and is replaced."""
    await stage.open(KEY.topic)
    assert await stage.on("writer", _commit(stage, 10, stage.bootstrap))
    old = stage.led(OFFSETS_TOPIC)
    stage.isolate(old)
    is_told = await stage.on("writer", _commit(stage, 20, [old.address]))
    await stage.succeeded(old, OFFSETS_TOPIC)
    found = await stage.on("reader", _committed(stage, [node.address for node in stage.others(old)]))
    if is_told and found != 20:
        return f"R36: offset 20 was acknowledged as committed, and after a failover it is {found}"
    return None


async def keep_serving(stage: Stage) -> str | None:
    """Schedule: a coordinator that was cut off and replaced returns, and receives a request."""
    await stage.open(KEY.topic)
    assert await stage.on("writer", _commit(stage, 10, stage.bootstrap))
    old = stage.led(OFFSETS_TOPIC)
    stage.isolate(old)
    await stage.succeeded(old, OFFSETS_TOPIC)
    assert await stage.on("writer", _commit(stage, 20, [node.address for node in stage.others(old)]))
    await stage.whole()
    for node in stage.nodes:
        found = await stage.inside(node, _ask_inside(node))
        if found not in (None, 20):
            return f"R36: offset 20 is committed, and node {node.node_id} goes on with {found}"
    return None


async def serve_unloaded(stage: Stage) -> str | None:
    """Schedule: a request arrives at the very moment at which a broker becomes the coordinator."""
    await stage.open(KEY.topic)
    assert await stage.on("writer", _commit(stage, 10, stage.bootstrap))
    old = stage.led(OFFSETS_TOPIC)
    asked: list[asyncio.Task[int | None]] = []
    for node in stage.others(old):
        assert node.live is not None
        coordinators: Any = node.live.coordinators
        coordinators._begin = partial(_begin_and_ask, coordinators, coordinators._begin, asked)
    old.kill()
    await stage.succeeded(old, OFFSETS_TOPIC)
    await stage.until(lambda: asked and all(task.done() for task in asked))
    for task in asked:
        if task.result() not in (None, 10):
            return f"R36: offset 10 is committed, and a new coordinator begins with {task.result()}"
    return None


def _begin_and_ask(
    coordinators: Any, begin: Callable[..., None], asked: list[asyncio.Task[int | None]], *arguments: Any
) -> None:
    begin(*arguments)
    asked.append(asyncio.ensure_future(_told(_ask(coordinators))))


# --- transactions (R31-R33) --------------------------------------------------------------------------------


def _producer(stage: Stage, host: str, bootstrap: list[str] | None = None) -> Producer:
    settings: dict[str, Any] = CLIENT_SETTINGS | {
        "default_api_timeout_ms": TIMEOUT_MS,
        "delivery_timeout_ms": 2 * TIMEOUT_MS,
        "transaction_timeout_ms": TIMEOUT_MS,
    }
    return Producer(
        bootstrap or stage.bootstrap,
        transactional_id="app",
        clock=stage.simulation.host(host).clock,
        rng=stage.simulation.rng(host),
        **settings,
    )


class _Writer:
    """A program that writes one transaction, and waits before it commits."""

    def __init__(self, stage: Stage, partition: int = 0) -> None:
        self.stage = stage
        self.partition = partition
        self.has_written = asyncio.Event()
        self.may_commit = asyncio.Event()
        self.is_told: bool | None = None  #: whether the commit was acknowledged; None before the response

    async def run(self) -> None:
        async with _producer(self.stage, "writer") as producer:
            await producer.begin_transaction()
            await producer.send(KEY.topic, b"whole", partition=self.partition)
            self.has_written.set()
            await self.may_commit.wait()
            try:
                await producer.commit_transaction()
            except KafkaliteError:
                self.is_told = False
            else:
                self.is_told = True


def _begin(stage: Stage, partition: int = 0) -> _Writer:
    writer = _Writer(stage, partition)
    stage.simulation.host("writer").run(writer.run())
    return writer


async def answer_early(stage: Stage) -> str | None:
    """Schedule: a coordinator that is cut off from the other brokers receives a commit, and is replaced."""
    await stage.open(KEY.topic)
    writer = _begin(stage)
    await writer.has_written.wait()
    old = stage.led(TRANSACTIONS_TOPIC)
    stage.isolate(old)
    writer.may_commit.set()
    await stage.until(lambda: writer.is_told is not None)
    old.kill()
    await stage.succeeded(old, TRANSACTIONS_TOPIC)
    await stage.whole()
    await stage.until(lambda: stage.held_back(KEY.topic) is None)  # aborted by timeout, unless committed
    if writer.is_told and not await stage.on("reader", stage.read_committed(KEY)):
        return "R32: a transaction was acknowledged as committed, and after a failover it is aborted"
    return None


async def marker_uncommitted(stage: Stage) -> str | None:
    """Schedule: a partition's leader appends a marker that its follower never receives, and fails
    permanently.
    """
    await stage.open(KEY.topic, partitions=3, replication_factor=2)
    await stage.on("warm-up", _commit_nothing(stage))
    coordinator = stage.led(TRANSACTIONS_TOPIC)
    states = stage.observer.image.topics[KEY.topic].partitions
    number = next(n for n, state in enumerate(states) if coordinator.node_id not in state.replicas)
    leader = stage.led(KEY.topic, number)
    follower = stage.others(coordinator, leader)[0]
    writer = _begin(stage, number)
    await writer.has_written.wait()
    stage.cut(leader.host.name, follower.host.name)
    writer.may_commit.set()
    await stage.until(lambda: writer.is_told is not None)
    await asyncio.sleep(0.2)  # markers
    leader.lose_power()
    await stage.succeeded(leader, KEY.topic, number)
    await stage.whole()
    await asyncio.sleep(2 * TIMEOUT_MS / 1000)
    held = stage.held_back(KEY.topic)
    return held and f"R33: a marker was acknowledged, and is gone: readers are held back in {held}"


async def _commit_nothing(stage: Stage) -> None:
    async with _producer(stage, "warm-up") as producer:
        await producer.begin_transaction()
        await producer.commit_transaction()


async def unverified(stage: Stage) -> str | None:
    """Schedule: a transaction's first batch is in transit when another producer takes over its transactional
    id.
    """
    await stage.open(KEY.topic)
    await stage.on("warm-up", _commit_nothing(stage))
    leader = stage.led(KEY.topic)
    link = stage.simulation.network.link("zombie", leader.host.name)
    is_sending = asyncio.Event()

    async def send_late() -> None:
        async with _producer(stage, "zombie") as producer:
            await producer.begin_transaction()
            link.cut()
            producer.send_nowait(KEY.topic, b"late", partition=0)
            is_sending.set()
            await producer.flush()

    zombie = stage.simulation.host("zombie").run(send_late())
    await is_sending.wait()
    await stage.on("warm-up", _commit_nothing(stage))
    link.heal()
    await asyncio.wait((zombie,))
    zombie.exception()  # it is refused: only the partition's log matters
    await asyncio.sleep(5 * TIMEOUT_MS / 1000)
    held = stage.held_back(KEY.topic)
    return held and f"R31: a batch began a transaction that will never end: readers are held back in {held}"


# --- compacted logs (R41) ----------------------------------------------------------------------------------

_RETENTION_MS: Final = 60_000
_COMPACTED: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": "4096",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": str(_RETENTION_MS),
}


async def forgets_unheard(stage: Stage) -> str | None:
    """Schedule: a replica is absent when a key is deleted, for longer than the others keep the tombstone."""
    stage.observer.compacted_topics = (KEY.topic,)
    await stage.open(KEY.topic, configs=_COMPACTED)
    await stage.on("writer", stage.write_segment(KEY, b"deleted", b"old"))
    away = stage.others(stage.led(KEY.topic))[0]
    away.kill()
    await stage.on("writer", stage.write_segment(KEY, b"deleted", None))
    await _pass_time(stage)
    await stage.whole()
    for node in stage.nodes:
        if _last_value(node, b"deleted") is not None:
            return f"R41: a key that was deleted is back on node {node.node_id}, which may lead"
    await _pass_time(stage)
    for node in stage.nodes:
        assert values_of(node, KEY, b"deleted") == [], f"node {node.node_id} keeps a tombstone that all saw"
    return None


async def _pass_time(stage: Stage) -> None:
    """Wait and write until compaction has removed an old tombstone."""
    for number in range(4):
        await asyncio.sleep(1.1 * _RETENTION_MS / 1000)
        await stage.on("writer", stage.write_segment(KEY, b"other", b"%d" % number))


def _last_value(node: SimNode, key: bytes) -> bytes | None:
    values = values_of(node, KEY, key)
    assert values is not None, f"node {node.node_id} has no replica"
    return next(reversed(values), None)


# --- sessions (R23) ----------------------------------------------------------------------------------------

_RECORDS: Final = bytes(build_batch([b"late"], None, 1))


async def _served(address: str, number: int) -> str | None:
    """Send each kind of request of a client to one broker. Return the first that it does not refuse."""
    async with WireClient(address) as wire:
        asked = ProducePartition(KEY.topic, number, len(_RECORDS))
        requests: dict[str, tuple[Any, bytes]] = {
            "Fetch": (FetchRequest(0, 0, 100, 0, [FetchPartition(KEY.topic, number, -1, 0, 100)]), b""),
            "ListOffsets": (ListOffsetsRequest(0, [ListOffsetsPartition(KEY.topic, number, -1, -1)]), b""),
            "Produce acks=1": (ProduceRequest(1, 100, None, [asked]), _RECORDS),
            "Produce acks=all": (ProduceRequest(-1, 100, None, [asked]), _RECORDS),
        }
        for name, (request, payload) in requests.items():
            answer = await wire.call(request, payload)
            if answer.partitions[0].error_code == 0:
                return name
    return None


async def _ask_when_replaced(stage: Stage, old: SimNode, number: int) -> str | None:
    """Send requests to ``old`` as soon as another broker leads. Return the violation, or None."""
    try:
        await stage.succeeded(old, KEY.topic, number)
        for _ in range(20):
            name = await stage.on("reader", _served(old.address, number))
            if name is not None:
                return f"R23: broker {old.node_id} serves {name} after another one was elected"
            await stage.pass_time(0.05)
    except Violation as violation:
        if violation.check != "I12":
            raise
        return f"R23: {violation}"
    await stage.whole()
    return None


async def isolated_serves(stage: Stage) -> str | None:
    """Schedule: a leader is cut off from the other brokers, but not from clients."""
    await stage.open(KEY.topic)
    old = stage.led(KEY.topic)
    stage.isolate(old)
    return await _ask_when_replaced(stage, old, 0)


async def session_from_receipt(stage: Stage) -> str | None:
    """Schedule: the responses to a leader's heartbeats are slow, and it is cut off just after one has
    arrived.
    """
    await stage.open(KEY.topic, partitions=3)
    old, number = stage.led_apart_from_controller(KEY.topic)
    broker, controller = old.live, stage.controller()
    assert broker is not None
    assert controller is not None
    slow = stage.simulation.network.link(controller.host.name, old.host.name)
    fast, slow.tuning = slow.tuning, replace(slow.tuning, delay_s=0.5)
    await stage.pass_time(3)
    end_ms = broker._node.session_end_ms
    await stage.until(lambda: broker._node.session_end_ms != end_ms)
    stage.isolate(old)
    slow.tuning = fast
    return await _ask_when_replaced(stage, old, number)


async def unconfirmed_controller(stage: Stage) -> str | None:
    """Schedule: a leader whose node is the controller is cut off from the other brokers."""
    await stage.open(KEY.topic, partitions=3)
    old = stage.controller()
    assert old is not None
    number = next(n for n in range(3) if stage.leader(KEY.topic, n) is old)
    stage.isolate(old)
    return await _ask_when_replaced(stage, old, number)


async def endless_session(stage: Stage) -> str | None:
    """Schedule: a leader is killed, and does not return."""
    await stage.open("t")
    leader = stage.led("t")
    leader.kill()
    try:
        await stage.until(lambda: stage.leader("t") not in (None, leader), 10)
    except Violation as violation:
        if violation.check != "stage":
            raise
        return "R23: a dead broker leads for ever"
    return None


# --- fetches of replicas (R10) -----------------------------------------------------------------------------


async def _fetch_with_longer_log(stage: Stage, node: SimNode, leader: SimNode) -> int:
    """As ``node``, list a position with records that the leader lacks, and then only wait for updates.

    Return the greatest high watermark of a response without a divergence, or -1.
    """
    assert leader.live is not None
    (hosted,) = (one for one in leader.live.partitions if one.key == KEY)
    end, topic_id = hosted.log_end_offset + 5, hosted.partition.topic_id
    listed = ReplicaFetchPartition(topic_id, 0, hosted.leader_epoch, end, 0, end, 0)
    broker_epoch = stage.observer.image.brokers[node.node_id].broker_epoch
    random_bytes = stage.simulation.rng("former").randbytes
    dialler = Authenticator(CLUSTER_SECRET, CLUSTER_ID, node.node_id, random_bytes)
    told = -1
    connection = await dialler.dial(
        leader.address, leader.node_id, client_id=f"node-{node.node_id}", timeout_ms=TIMEOUT_MS
    )
    request = ReplicaFetchRequest(node.node_id, broker_epoch, 0, 0, 200, 1, 1 << 20, 1 << 20, [listed], [])
    for session_epoch in range(4):
        request = request._replace(session_epoch=session_epoch)
        response = (await connection.call(request, timeout_ms=TIMEOUT_MS)).message
        for one in response.partitions:
            if one.diverging_epoch == NO_EPOCH:
                told = max(told, one.high_watermark)
        request = request._replace(session_id=response.session_id, partitions=[])
        await stage.on("writer", stage.write_segment(KEY, b"key", b"more"))
    connection.close()
    return told


async def told_diverged(stage: Stage) -> str | None:
    """Schedule: a former leader returns with records of its epoch that the new leader does not have."""
    await stage.open(KEY.topic)
    await stage.on("writer", stage.write_segment(KEY, b"key", b"first"))
    old = stage.led(KEY.topic)
    old.kill()
    new = await stage.succeeded(old, KEY.topic)
    await stage.on("writer", stage.write_segment(KEY, b"key", b"second"))
    told = await stage.on("former", _fetch_with_longer_log(stage, old, new))
    if told >= 0:
        return f"R10: a follower whose log diverges was sent the high watermark {told}"
    await stage.whole()
    return None


DIRECTED: Final[dict[str, Callable[[], str | None]]] = (
    damage.DIRECTED
    | reassignments.DIRECTED
    | throttles.DIRECTED
    | {
        "R10-told-diverged": partial(play, told_diverged),
        "R23-endless-session": partial(play, endless_session),
        "R23-from-receipt": partial(play, session_from_receipt),
        "R23-isolated-serves": partial(play, isolated_serves),
        "R23-unconfirmed": partial(
            play, unconfirmed_controller, settings={"controller_quorum_fetch_timeout_ms": 5_000}
        ),
        "R31-unverified": partial(play, unverified),
        "R32-answer-early": partial(play, answer_early),
        "R33-marker-uncommitted": partial(
            play, marker_uncommitted, settings={"replica_lag_time_max_ms": 30_000}
        ),
        "R36-answer-uncommitted": partial(play, answer_uncommitted),
        "R36-keep-serving": partial(play, keep_serving),
        "R36-serve-unloaded": partial(play, serve_unloaded),
        "R41-forgets-unheard": partial(play, forgets_unheard, settings={"log_cleaner_backoff_ms": 1_000}),
    }
)
