"""Data planes of brokers that replicate among each other: the real wire, one controller in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.handlers import HANDLERS
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.inline_executor import InlineExecutor
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.replication.replica_manager import ReplicaManager
from kafkalite.broker.server.dispatch import Dispatcher
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import Pending
from kafkalite.broker.server.server import Server
from kafkalite.broker.tasks import TaskSet
from kafkalite.client.cluster.connection import Connection, connect
from kafkalite.clock import SystemClock
from kafkalite.errors import ConnectionFailedError, CorruptLogError, ErrorCode, TooManyOpenFilesError
from kafkalite.metadata.broker_commands import FenceBroker, LoseReplicas, UnfenceBroker
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.features import SUPPORTED
from kafkalite.metadata.image import EMPTY
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages import admin, cluster, data
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check
from kafkalite.rng import seeded_rng
from kafkalite.storage.layout import parse_log_directory_name
from kafkalite.storage.log_dirs import LogDirs
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.wire import WireClient
from proof.damage.kinds import truncate
from proof.waiting import eventually, settle

CONTROLLER = 100


class Node:
    """One broker without its control plane."""

    def __init__(self, net: Net, node_id: int, filesystem: MemoryFileSystem) -> None:
        self.net = net
        self.node_id = node_id
        self.filesystem = filesystem
        self.is_cut = False
        self.failures: list[BaseException] = []
        self.address = ""
        self._connections: dict[int, Connection] = {}
        loop = asyncio.get_running_loop()
        self._store = LogDirs.open(filesystem, ["/data"], node_id=node_id, rng=seeded_rng(node_id))
        waiters = Waiters(loop)
        self.scheduler: SyncScheduler[HostedPartition] = SyncScheduler(
            loop, InlineExecutor(), self.failures.append
        )
        config = BrokerConfig.from_settings({"node_id": node_id, **net.settings})
        self.partitions = Partitions(
            self._store, node_id, config.topic_defaults(), waiters, self.scheduler, clock=net.clock
        )
        self.services: Any = SimpleNamespace(
            config=config,
            clock=net.clock,
            metrics=Metrics(),
            waiters=waiters,
            partitions=self.partitions,
            controller=net.controller,
            on_broken=self.failures.append,
            is_stopping=False,
            node=NodeState(""),
        )
        self.manager = self.services.replicas = ReplicaManager(
            self.services,
            SimpleNamespace(connection=self._connect),
            self,  # type: ignore[arg-type]
        )
        tasks = TaskSet(self.failures.append)
        dispatcher = Dispatcher(self.services, HANDLERS, tasks, self.failures.append)

        def dispatch(request: Any, client: Any) -> Any:
            if self.is_cut:
                return Pending()
            if (request.client_id or "").startswith("node-"):
                client.node_id = int(request.client_id[5:])
                if net.nodes[client.node_id].is_cut:
                    return Pending()
            return dispatcher.dispatch(request, client)

        self.server = Server(
            dispatch,
            net.clock,
            Metrics(),
            max_connections=100,
            max_idle_ms=-1,
            max_request_bytes=2**27,
            max_queued_bytes=2**27,
        )

    async def start(self) -> None:
        self.address = await self.server.listen("inproc://", None)
        controller = self.net.controller
        controller.publishers.insert(0, self.partitions.publish)
        registered = await controller.submit(
            cluster.RegisterBrokerRequestV1(
                self.node_id,
                f"{self.node_id}-{time.monotonic_ns()}",
                "d",
                [self.address],
                None,
                -1,
                True,
                [],
                0,
                list(SUPPORTED),
            )
        )
        self.services.node.broker_epoch = registered.broker_epoch
        self.server.open()
        if controller.image.topics:  # what a start publishes as one delta from nothing
            image = controller.image
            delta = Delta.to_snapshot(EMPTY, image.to_records())
            delta.apply(image.metadata_offset)
            self.partitions.publish(delta, image)
        await self.manager.start()

    async def stop(self, *, clean: bool = True) -> None:
        publishers = self.net.controller.publishers
        for publisher in (self.partitions.publish, self.manager._publish):
            if publisher in publishers:
                publishers.remove(publisher)
        await self.manager.stop()
        await self.server.abort()
        for connection in self._connections.values():
            connection.close()
        await self.scheduler.drain(discard=not clean)
        self._store.close(clean=clean)

    async def _connect(self, node_id: int) -> Connection:
        target = self.net.nodes[node_id]
        if self.is_cut or target.is_cut or not target.address:
            raise ConnectionFailedError("cut off")
        known = self._connections.get(node_id)
        if known is None or not known.is_open or known.address != target.address:
            known = await connect(target.address, client_id=f"node-{self.node_id}", timeout_ms=1000)
            self._connections[node_id] = known
        return known

    async def send(self, request: Any, _timeout_ms: int) -> Any:
        """The controller channel."""
        await eventually(lambda: not self.is_cut)
        if isinstance(request, cluster.ReportReplicasRequest):
            return await self.net.controller.report_replicas(request)
        return await self.net.controller.submit(request)

    def hosted(self, topic: str = "t", partition: int = 0) -> HostedPartition:
        topic_id = self.net.controller.image.topics[topic].topic_id
        return self.partitions.by_id(topic_id, partition)

    def log_bytes(self, topic: str = "t", partition: int = 0) -> bytes:
        log = self.hosted(topic, partition).partition.log
        read = log.read(log.log_start_offset, max_bytes=2**30, up_to=log.log_end_offset)
        return b"".join(bytes(buffer) for buffer in read.buffers)


class Net:
    """Three nodes and what joins them."""

    def __init__(self, controller_settings: ControllerSettings | None = None, **settings: Any) -> None:
        self.settings = {"replica_fetch_wait_max_ms": 200, **settings}
        self.clock = SystemClock()
        self.controller = ControllerNode(
            SingleQuorum(node_id=CONTROLLER),
            CONTROLLER,
            self.clock,
            seeded_rng(1),
            controller_settings or ControllerSettings(),
        )
        self.nodes: dict[int, Node] = {}

    async def start(self, count: int = 3) -> None:
        await self.controller.start()
        for node_id in range(1, count + 1):
            self.nodes[node_id] = Node(self, node_id, MemoryFileSystem(crashable=True))
            await self.nodes[node_id].start()

    async def create(self, topic: str = "t", partitions: int = 1, replicas: int = 3, **configs: str) -> None:
        answer = await self.controller.submit(
            admin.CreateTopicsRequest(1000, False, [admin.NewTopic(topic, partitions, replicas, configs)])
        )
        assert answer.topics[0].error_code == 0, answer

    def state(self, topic: str = "t", partition: int = 0) -> Any:
        return self.controller.image.partition(topic, partition)

    def leader(self, topic: str = "t", partition: int = 0) -> Node:
        return self.nodes[self.state(topic, partition).leader]

    def followers(self, topic: str = "t", partition: int = 0) -> list[Node]:
        state = self.state(topic, partition)
        return [self.nodes[node_id] for node_id in state.replicas if node_id != state.leader]

    async def fence(self, node: Node) -> None:
        await self.controller.submit(FenceBroker(node.node_id, node.services.node.broker_epoch))

    async def unfence(self, node: Node) -> None:
        await self.controller.submit(UnfenceBroker(node.node_id, node.services.node.broker_epoch))

    async def kill(self, node: Node) -> None:
        await node.stop(clean=False)
        node.filesystem.crash(seeded_rng(node.node_id))
        await self.fence(node)

    async def restart(self, node: Node) -> Node:
        again = self.nodes[node.node_id] = Node(self, node.node_id, node.filesystem)
        await again.start()
        return again


@asynccontextmanager
async def running(
    controller_settings: ControllerSettings | None = None, **settings: Any
) -> AsyncIterator[Net]:
    net = Net(controller_settings, **settings)
    await net.start()
    try:
        yield net
    finally:
        for node in net.nodes.values():
            await node.stop()
        await net.controller.stop()
        for node in net.nodes.values():
            assert not node.failures


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    async with running() as running_net:
        yield running_net


def batch_of(*values: bytes) -> bytearray:
    return bytearray(build_batch(list(values), timestamps_ms=time.time_ns() // 1_000_000))


async def produce(
    node: Node, *values: bytes, topic: str = "t", partition: int = 0, acks: int = -1, timeout_ms: int = 5000
) -> Any:
    batch = batch_of(*values)
    async with WireClient(node.address) as wire:
        asked = data.ProducePartition(topic, partition, len(batch))
        return (await wire.call(data.ProduceRequest(acks, timeout_ms, None, [asked]), batch)).partitions[0]


async def test_acks_all_is_on_every_replica_byte_for_byte(net: Net) -> None:
    await net.create()
    for number in range(20):
        produced = await produce(net.leader(), b"value-%d" % number)
        assert (produced.error_code, produced.base_offset) == (0, number)
        for node in net.nodes.values():
            assert node.hosted().partition.log.synced_end_offset > number
    assert len({node.log_bytes() for node in net.nodes.values()}) == 1
    await eventually(lambda: all(node.hosted().high_watermark == 20 for node in net.nodes.values()))


async def test_an_acknowledgement_takes_no_poll(net: Net) -> None:
    await net.create()
    await produce(net.leader(), b"warm")
    took_s: list[float] = []
    for _ in range(20):
        started = time.monotonic()
        await produce(net.leader(), b"value")
        took_s.append(time.monotonic() - started)
    assert sorted(took_s)[10] < 0.2, "a missed wake-up costs 0.2 s"


@pytest.mark.parametrize("durability", ["fsync", "page-cache"])
async def test_many_producers_many_partitions(net: Net, durability: str) -> None:
    await net.create(partitions=12, durability=durability)

    async def produce_to(partition: int) -> None:
        for number in range(30):
            produced = await produce(net.leader("t", partition), b"%d" % number * 200, partition=partition)
            assert produced.error_code == 0

    await asyncio.gather(*(produce_to(partition) for partition in range(12)))
    for partition in range(12):
        assert len({node.log_bytes("t", partition) for node in net.nodes.values()}) == 1


async def test_a_dead_follower_is_fenced_and_rejoins_when_it_has_caught_up(net: Net) -> None:
    await net.create(**{"min.insync.replicas": "2"})
    await produce(net.leader(), b"before")
    dead = net.followers()[0]
    await net.kill(dead)
    assert (await produce(net.leader(), b"without")).error_code == 0
    again = await net.restart(dead)
    await eventually(lambda: len(net.state().isr) == 3)
    assert again.log_bytes() == net.leader().log_bytes()
    assert (await produce(net.leader(), b"with")).error_code == 0


async def test_too_few_in_sync_refuses_new_and_fails_waiting_requests(net: Net) -> None:
    await net.create(**{"min.insync.replicas": "2"})
    leader, (one, other) = net.leader(), net.followers()
    await produce(leader, b"before")
    one.is_cut = other.is_cut = True
    waiting = asyncio.create_task(produce(leader, b"in the log"))
    await eventually(lambda: leader.hosted().partition.log.log_end_offset == 2)
    await net.fence(one)
    await net.fence(other)
    assert (await waiting).error_code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    assert (await produce(leader, b"refused")).error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert (await produce(leader, b"one", acks=1)).error_code == 0
    assert leader.hosted().high_watermark == 1


async def test_a_slow_follower_leaves_the_isr_and_comes_back() -> None:
    async with running(replica_lag_time_max_ms=200) as net:
        await net.create()
        leader, (slow, _) = net.leader(), net.followers()
        await produce(leader, b"before")
        slow.is_cut = True
        started = time.monotonic()
        assert (await produce(leader, b"value")).error_code == 0
        assert 0.1 < time.monotonic() - started < 10
        assert slow.node_id not in net.state().isr
        slow.is_cut = False
        for connection in slow._connections.values():
            connection.close()
        await eventually(lambda: slow.node_id in net.state().isr)


async def test_a_cut_off_leader_is_replaced_and_its_tail_is_truncated(net: Net) -> None:
    """Two leaders at one offset: the uncommitted records are removed (R4)."""
    await net.create(**{"min.insync.replicas": "2"})
    old = net.leader()
    for number in range(7):
        await produce(old, b"%d" % number)
    old.is_cut = True
    lonely = batch_of(b"lost")
    old.hosted().partition.append(lonely, _header(lonely), net.clock.wall_ms(), 1)
    net.controller.publishers.remove(old.partitions.publish)
    await net.fence(old)
    new = net.leader()
    assert new is not old
    assert (await produce(new, b"kept")).base_offset == 7
    assert old.hosted().partition.log.log_end_offset == 8
    old.is_cut = False
    old = await _come_back(net, old)
    await eventually(lambda: old.node_id in net.state().isr)
    assert old.log_bytes() == new.log_bytes()
    assert b"kept" in old.log_bytes()
    assert b"lost" not in old.log_bytes()


async def _come_back(net: Net, node: Node) -> Node:
    await node.stop(clean=True)
    return await net.restart(node)


def _header(batch: bytearray) -> Any:
    return check(batch)


async def test_the_leader_fails_over_and_nothing_acknowledged_is_lost(net: Net) -> None:
    await net.create(**{"min.insync.replicas": "2"})
    acknowledged: list[bytes] = []
    for turn in range(4):
        for number in range(5):
            value = b"%d-%d" % (turn, number)
            assert (await produce(net.leader(), value)).error_code == 0
            acknowledged.append(value)
        dead = net.leader()
        await net.kill(dead)
        assert net.leader() is not dead
        await produce(net.leader(), b"meanwhile")
        await net.restart(dead)
        await eventually(lambda: len(net.state().isr) == 3)
    logs = {node.log_bytes() for node in net.nodes.values()}
    assert len(logs) == 1
    for value in acknowledged:
        assert value in next(iter(logs))


async def test_requests_waiting_at_a_former_leader_fail(net: Net) -> None:
    await net.create()
    leader = net.leader()
    for follower in net.followers():
        follower.is_cut = True
    waiting = asyncio.create_task(produce(leader, b"value"))
    await eventually(lambda: leader.hosted().partition.log.log_end_offset == 1)
    await net.fence(leader)
    assert (await waiting).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    for follower in net.followers():
        follower.is_cut = False


async def test_a_large_log_is_caught_up_in_large_responses(net: Net) -> None:
    await net.create(partitions=3, replicas=2)
    victim = net.nodes[3]
    await net.kill(victim)
    for partition in range(3):
        for _ in range(40):
            leader = net.leader("t", partition)
            await produce(leader, b"x" * 100_000, partition=partition)
    counts = {
        node_id: net.nodes[node_id].services.metrics.requests[ApiKey.REPLICA_FETCH] for node_id in (1, 2)
    }
    victim = await net.restart(victim)
    await eventually(lambda: all(len(net.state("t", partition).isr) == 2 for partition in range(3)))
    for partition in range(3):
        if 3 in net.state("t", partition).replicas:
            assert victim.log_bytes("t", partition) == net.leader("t", partition).log_bytes("t", partition)
    for node_id, count in counts.items():
        requests = net.nodes[node_id].services.metrics.requests[ApiKey.REPLICA_FETCH] - count
        assert 0 < requests < 30, "a response has many batches of 100 KB"


async def test_idle_sessions_send_few_and_small_requests(net: Net) -> None:
    await net.create(partitions=200)
    await eventually(
        lambda: all(not f._due for node in net.nodes.values() for f in node.manager._fetchers.values())
    )
    await asyncio.sleep(0.3)  # until the sessions are idle
    before = [node.services.metrics.requests[ApiKey.REPLICA_FETCH] for node in net.nodes.values()]
    began_s = time.monotonic()
    await asyncio.sleep(1.0)  # a rate is measured
    after = [node.services.metrics.requests[ApiKey.REPLICA_FETCH] for node in net.nodes.values()]
    elapsed_s = time.monotonic() - began_s
    for earlier, later in zip(before, after, strict=True):
        # Two followers, five polls a second; a busy machine delays some.
        assert 2 <= later - earlier <= 14 * elapsed_s


async def test_high_watermarks_are_checkpointed_once(net: Net) -> None:
    await net.create(partitions=3)
    await produce(net.leader("t", 1), b"value", partition=1)
    topic_id = net.controller.image.topics["t"].topic_id
    for node in net.nodes.values():
        await node.manager._checkpoint()
    assert net.controller.image.high_watermarks == {(topic_id, 1): 1}
    offset = net.controller.image.metadata_offset
    for node in net.nodes.values():
        await node.manager._checkpoint()
    assert net.controller.image.metadata_offset == offset


async def test_deleted_records_and_deleted_topics_reach_the_followers(net: Net) -> None:
    await net.create()
    for number in range(5):
        await produce(net.leader(), b"%d" % number)
    async with WireClient(net.leader().address) as wire:
        answer = await wire.call(data.DeleteRecordsRequest(1000, [data.DeleteRecordsPartition("t", 0, 3)]))
        assert answer.partitions[0].log_start_offset == 3
    await eventually(
        lambda: all(node.hosted().partition.log_start_offset == 3 for node in net.nodes.values())
    )
    await net.controller.submit(admin.DeleteTopicsRequest(1000, ["t"]))
    assert all(not len(node.partitions) for node in net.nodes.values())
    await net.create()
    assert (await produce(net.leader(), b"again")).base_offset == 0


async def test_a_damaged_replica_is_fetched_again_and_its_bytes_are_kept(net: Net) -> None:
    """R24."""
    await net.create()
    for number in range(5):
        await produce(net.leader(), b"%d" % number)
    victim = net.followers()[0]
    await victim.stop()
    directory = victim.hosted().partition.log.directory
    victim.filesystem.write_atomically(f"{directory}/{0:020d}.log", b"garbage")
    victim.filesystem.unlink("/data/clean-shutdown")
    await net.fence(victim)
    again = await net.restart(victim)
    await produce(net.leader(), b"more")
    await eventually(lambda: len(net.state().isr) == 3)
    assert again.log_bytes() == net.leader().log_bytes()
    assert not again.partitions.damaged()
    assert again.filesystem.exists(f"{directory}.damaged-1")


async def test_a_damaged_replica_that_counts_stays_as_it_is(net: Net) -> None:
    """R24: a log that may be the only copy is kept, and is not mistaken for an empty one."""
    await net.create(replicas=1)
    owner = net.leader()
    await produce(owner, b"0")
    await owner.stop()
    directory = owner.hosted().partition.log.directory
    owner.filesystem.write_atomically(f"{directory}/{0:020d}.log", b"garbage")
    owner.filesystem.unlink("/data/clean-shutdown")
    again = await net.restart(owner)
    assert again.hosted().is_damaged
    assert not again.partitions.damaged(), "it serves what is sound"
    assert net.state().leader == again.node_id
    assert not again.filesystem.exists(f"{directory}.damaged-1")
    assert (await produce(again, b"1")).error_code == ErrorCode.KAFKA_STORAGE_ERROR


async def test_an_empty_log_is_never_mistaken_for_the_one_before_it(net: Net) -> None:
    """R24, R52: the leader begins another epoch, in which it counts no position of the damaged log."""
    await net.create()
    await produce(net.leader(), b"0")
    leader, victim = net.leader(), net.followers()[0]
    log, before = victim.hosted().partition.log, net.state()
    log._read_failed(CorruptLogError(path="00.log", position=0, expected="a batch", actual="none"))
    (damaged,) = victim.partitions.damaged()
    victim.is_cut = True  # the leader does not notice that it restarts
    await net.controller.submit(LoseReplicas(victim.node_id, victim.services.node.broker_epoch, (damaged,)))
    state = net.state()
    assert (state.leader, state.leader_epoch) == (before.leader, before.leader_epoch + 1)
    assert victim.hosted().partition.log is not log
    leader.manager._isr.look_around()
    await settle()
    assert victim.node_id not in net.state().isr
    victim.is_cut = False
    await eventually(lambda: len(net.state().isr) == 3)
    assert victim.log_bytes() == net.leader().log_bytes()


async def test_r52_a_damaged_replica_is_filled_again_from_its_leader(net: Net) -> None:
    await net.create(partitions=3)
    for number in range(5):
        await produce(net.leader(), b"%d" % number)
    leader, victim = net.leader(), net.followers()[0]
    victim.hosted().partition.log.mark_damaged("found by a scrub", sound_end_offset=2)
    (damaged,) = victim.partitions.damaged()
    await net.controller.submit(LoseReplicas(victim.node_id, victim.services.node.broker_epoch, (damaged,)))
    assert victim.node_id not in net.state().isr
    assert (await produce(leader, b"with two")).error_code == 0
    await eventually(lambda: len(net.state().isr) == 3)
    assert victim.log_bytes() == leader.log_bytes()
    assert len(net.state(partition=1).isr) == len(net.state(partition=2).isr) == 3
    assert victim.filesystem.exists(f"{victim.hosted().partition.log.directory}.damaged-1")


async def test_r52_a_damaged_log_is_replaced_beside_the_loop(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waits for no sync: of the names, of the recovery points, or of the log that is kept."""
    await net.create(partitions=2)
    for number in range(5):
        await produce(net.leader(), b"%d" % number)
    victim, topic = net.followers()[0], net.controller.image.topics["t"].topic_id
    sync_dir, loop_thread, elsewhere = victim.filesystem.sync_dir, threading.get_ident(), list[str]()

    def watched(path: str) -> None:
        assert threading.get_ident() != loop_thread, f"the loop syncs {path}"
        elsewhere.append(path)
        sync_dir(path)

    with ThreadPoolExecutor(1) as executor:
        victim.scheduler._executor = executor
        monkeypatch.setattr(victim.filesystem, "sync_dir", watched)
        victim.hosted().partition.log.mark_damaged("found by a scrub", sound_end_offset=2)
        (damaged,) = victim.partitions.damaged()
        epoch = victim.services.node.broker_epoch
        await net.controller.submit(LoseReplicas(victim.node_id, epoch, (damaged,)))
        await eventually(lambda: len(net.state().isr) == 3)
        assert elsewhere
        kept = f"/data/{topic}-0.damaged-1"
        await eventually(lambda: victim.filesystem.exists(kept))
        # A topic that is deleted in the middle of an exchange stays deleted.
        victim.hosted(partition=1).partition.log.mark_damaged("found by a scrub")
        executor.submit(time.sleep, 0.2)
        (damaged,) = victim.partitions.damaged()
        await net.controller.submit(LoseReplicas(victim.node_id, epoch, (damaged,)))
        await net.controller.submit(admin.DeleteTopicsRequest(1000, ["t"]))
        await victim.scheduler.drain()
    await asyncio.sleep(0)
    assert len(victim.partitions) == 0
    assert victim.failures == []
    victim.scheduler._executor = InlineExecutor()


async def test_r43_a_leader_checks_the_batches_that_a_follower_lists_again(net: Net) -> None:
    """Bytes of the leader's active segment change before a follower that was away fetches them."""
    await net.create(**{"min.insync.replicas": "2"})
    leader, (away, other) = net.leader(), net.followers()
    await produce(leader, b"before")
    await net.kill(away)
    for number in range(3):
        assert (await produce(leader, b"%d" % number * 100)).error_code == 0
    log = leader.hosted().partition.log
    leader.filesystem.open(log._segments.last.path()).write_at(log.size_bytes - 50, b"\xff\xfe")
    again = await net.restart(away)
    await eventually(lambda: leader.hosted().is_damaged)
    assert log.damage is not None
    assert (log.damage.sound_end_offset, log.damage.records_in_doubt) == (3, 1)
    (damaged,) = leader.partitions.damaged()
    await net.controller.submit(LoseReplicas(leader.node_id, leader.services.node.broker_epoch, (damaged,)))
    assert net.leader() is other
    await eventually(lambda: len(net.state().isr) == 3)
    assert again.log_bytes() == leader.log_bytes() == other.log_bytes()


async def test_r52_a_leader_that_finds_damage_hands_over_and_is_filled_again(net: Net) -> None:
    await net.create()
    for number in range(5):
        await produce(net.leader(), b"%d" % number)
    victim = net.leader()
    victim.hosted().partition.log.mark_damaged("found by a scrub", sound_end_offset=2)
    (damaged,) = victim.partitions.damaged()
    await net.controller.submit(LoseReplicas(victim.node_id, victim.services.node.broker_epoch, (damaged,)))
    assert net.leader() is not victim
    await eventually(lambda: len(net.state().isr) == 3)
    assert victim.log_bytes() == net.leader().log_bytes()


@pytest.mark.parametrize("restarts", [False, True])
async def test_r52_if_all_replicas_are_damaged_every_replica_keeps_its_more_complete_log(
    net: Net, restarts: bool
) -> None:
    await net.create()
    for number in range(5):
        await produce(net.leader(), b"%d" % number)
    leader, (first, second) = net.leader(), net.followers()
    await eventually(lambda: first.log_bytes() == second.log_bytes() == leader.log_bytes())
    content = first.log_bytes()
    first.is_cut = True  # it fetches nothing into its new log
    for sound_end, node in ((1, first), (2, second)):
        node.hosted().partition.log.mark_damaged("found by a scrub", sound_end_offset=sound_end)
        (damaged,) = node.partitions.damaged()
        await net.controller.submit(LoseReplicas(node.node_id, node.services.node.broker_epoch, (damaged,)))
    assert (first.hosted().is_damaged, first.hosted().log_end_offset) == (False, 0)
    await eventually(lambda: second.node_id in net.state().isr)
    assert second.log_bytes() == content
    if restarts:
        await first.stop()
        first = await net.restart(first)
        assert (first.hosted().is_damaged, first.hosted().log_end_offset) == (False, 0)
        first.is_cut = True
    for node in (second, leader):
        node.hosted().partition.log.mark_damaged("found by a scrub", sound_end_offset=3)
        (damaged,) = node.partitions.damaged()
        await net.controller.submit(LoseReplicas(node.node_id, node.services.node.broker_epoch, (damaged,)))
    assert net.state().leader == -1
    for node in (first, leader):
        (report,) = node.partitions.leaderless()
        assert (report.is_damaged, report.log_end_offset) == (True, 5)
        directory = node.hosted().partition.log.directory
        assert node.filesystem.read_bytes(f"{directory}/{0:020d}.log").startswith(content)


def lose_the_end(node: Node) -> None:
    """Cut a killed node's active segment, as if its disk had lost the end."""
    name = next(name for name in node.filesystem.list_dir("/data") if parse_log_directory_name(name))
    segment = next(each for each in node.filesystem.list_dir(f"/data/{name}") if each.endswith(".log"))
    truncate(node.filesystem, f"/data/{name}/{segment}", seeded_rng(1))


async def test_r46_replicas_report_their_logs_and_the_most_complete_one_leads() -> None:
    async with running() as net:
        await net.create(**{"min.insync.replicas": "2"})
        for number in range(6):
            await produce(net.leader(), b"%d" % number)
        leader = net.leader()
        for node in [*net.followers(), leader]:
            await net.kill(node)
        state = net.state()
        assert state.leader == -1
        assert len(state.elr) >= 2, "three, if no leader confirmed the ISR without its predecessor (R57)"
        lose_the_end(leader)
        await net.restart(leader)
        await settle()
        assert net.state().leader == -1
        for node_id in sorted({1, 2, 3} - {leader.node_id}):
            await net.restart(net.nodes[node_id])
        await eventually(lambda: len(net.state().isr) == 3)
        assert net.state().leader != leader.node_id
        assert net.leader().hosted().log_end_offset == 6
        assert len({node.log_bytes() for node in net.nodes.values()}) == 1


async def test_r50_a_replica_that_never_stopped_replaces_a_leader_that_lost_records() -> None:
    settings = ControllerSettings(unclean_recovery_timeout_ms=0)
    async with running(settings) as net:
        await net.create(**{"min.insync.replicas": "2"})
        for number in range(6):
            await produce(net.leader(), b"%d" % number)
        leader, (complete, absent) = net.leader(), net.followers()
        await eventually(lambda: complete.hosted().high_watermark == 6)
        complete.is_cut = True
        await net.fence(complete)
        await net.kill(absent)
        await net.kill(leader)
        lose_the_end(leader)
        leader = await net.restart(leader)
        await eventually(lambda: net.state().leader == leader.node_id)  # nothing better returned in time
        assert leader.hosted().log_end_offset < 6
        complete.is_cut = False
        await net.unfence(complete)
        await eventually(lambda: net.state().leader == complete.node_id)
        await eventually(lambda: len(net.state().isr) == 2)
        assert complete.hosted().log_end_offset == leader.hosted().log_end_offset == 6
        described = net.controller.describe_recovery().partitions
        assert all(each.leader_id == complete.node_id for each in described)


async def test_truncations_run_beside_the_loop() -> None:
    """Uncommitted records are truncated in another thread."""
    async with running() as net:
        await net.create(**{"min.insync.replicas": "2"})
        old = net.leader()
        await produce(old, b"0")
        with ThreadPoolExecutor(1) as executor:
            for node in net.nodes.values():
                node.scheduler._executor = executor
            old.is_cut = True
            for value in (b"lost", b"too"):
                lonely = batch_of(value)
                old.hosted().partition.append(lonely, _header(lonely), net.clock.wall_ms(), 1)
            net.controller.publishers.remove(old.partitions.publish)
            await net.fence(old)
            new = net.leader()
            await produce(new, b"kept")
            await old.scheduler.drain()
            old.is_cut = False
            delta = Delta.to_snapshot(EMPTY, net.controller.image.to_records())
            delta.apply(net.controller.image.metadata_offset)
            old.partitions._assign(old.partitions._local(net.controller.image), net.controller.image)
            net.controller.publishers.insert(0, old.partitions.publish)
            await net.unfence(old)
            await eventually(lambda: len(net.state().isr) == 3)
            assert old.log_bytes() == new.log_bytes()
            assert not any(node.hosted().is_busy for node in net.nodes.values())
            await asyncio.gather(*(node.scheduler.drain() for node in net.nodes.values()))
        for node in net.nodes.values():
            node.scheduler._executor = None


async def test_r55_a_truncation_that_lacks_descriptors_is_completed_when_there_are_some(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower stays a replica, and neither its records nor its place in the cluster are lost."""
    await net.create(**{"min.insync.replicas": "2"})
    old = net.leader()
    await produce(old, b"0")
    old.is_cut = True
    lonely = batch_of(b"lost")
    old.hosted().partition.append(lonely, _header(lonely), net.clock.wall_ms(), 1)
    net.controller.publishers.remove(old.partitions.publish)
    await net.fence(old)
    new = net.leader()
    await produce(new, b"kept")
    log, sync_dir = old.hosted().partition.log, old.filesystem.sync_dir
    truncations = log.recovery_point.truncations

    def refuse_in_truncation(path: str) -> None:
        if log.recovery_point.truncations > truncations:  # its state is written, and it is not completed
            raise TooManyOpenFilesError(f"no file descriptor left for {path}: simulated")
        sync_dir(path)

    with monkeypatch.context() as patched:
        patched.setattr(old.filesystem, "sync_dir", refuse_in_truncation)
        old.is_cut = False
        delta = Delta.to_snapshot(EMPTY, net.controller.image.to_records())
        delta.apply(net.controller.image.metadata_offset)
        old.partitions._assign(old.partitions._local(net.controller.image), net.controller.image)
        net.controller.publishers.insert(0, old.partitions.publish)
        await net.unfence(old)
        await eventually(lambda: old.hosted().must_reopen)
        assert old.partitions.has_failed.is_set()
        assert old.partitions.damaged() == []
        old.partitions.retry()
        assert old.partitions.offline_count == 1
        assert old.partitions.damaged() == []
    old.partitions.retry()
    await eventually(lambda: len(net.state().isr) == 3)
    assert old.log_bytes() == new.log_bytes()


async def test_strangers_and_former_incarnations_are_refused(net: Net) -> None:
    await net.create()
    leader, follower = net.leader(), net.followers()[0]
    epoch = follower.services.node.broker_epoch

    async def ask(client_id: str, broker_epoch: int, session_id: int = 0, session_epoch: int = 0) -> Any:
        connection = await connect(leader.address, client_id=client_id, timeout_ms=1000)
        request = cluster.ReplicaFetchRequest(
            follower.node_id, broker_epoch, session_id, session_epoch, 0, 1, 2**20, 2**20, [], []
        )
        try:
            return (await connection.call(request, timeout_ms=1000)).message
        except Exception as error:
            return error
        finally:
            connection.close()

    me = f"node-{follower.node_id}"
    assert (await ask("somebody", epoch)).code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert (await ask("node-1" if me != "node-1" else "node-2", epoch)).code in {
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    }
    assert (await ask(me, epoch - 1)).code == ErrorCode.STALE_BROKER_EPOCH
    assert (await ask(me, epoch, 999, 1)).code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    opened = await ask(me, epoch)
    assert opened.error_code == 0
    assert (await ask(me, epoch, opened.session_id, 7)).code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert (await produce(leader, b"the real one opens its session again")).error_code == 0
