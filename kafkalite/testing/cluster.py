"""Cluster: real brokers in the running event loop, with storage that survives restarts, and with faults.

One broker, or several that replicate::

    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("orders", partitions=3)
        async with cluster.producer() as producer:
            await producer.send("orders", b"1")
        cluster.intercept(ApiKey.FETCH, drop_next(2))
        await cluster.kill(cluster.leader("orders"))
        assert [record.value for record in await cluster.records("orders")] == [b"1"]
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.metrics import BrokerStatistics
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import ConfigError
from kafkalite.model import Record, TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.rng import Rng, seeded_rng
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.faults import Fault
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.transport.free_ports import free_ports

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.client.producer.producer import Producer

_names = count(1)

READ_TIMEOUT_MS: Final = 10_000
READ_SLICE_MS: Final = 50
FIRST_CONTROLLER_ID: Final = 101
#: Timeouts can be short, because nodes in one process receive each other's messages immediately.
SETTINGS_OF_SEVERAL: Final[dict[str, Any]] = {
    "controller_quorum_election_timeout_ms": 100,
    "controller_quorum_fetch_timeout_ms": 500,
    "broker_heartbeat_interval_ms": 100,
    "broker_session_timeout_ms": 1_000,
    "replica_fetch_backoff_ms": 20,
}
#: The internal topics have as few partitions as on an in-memory Broker, because each costs time at start.
FEW_COORDINATORS: Final[dict[str, Any]] = {
    "offsets_topic_num_partitions": 4,
    "transaction_state_log_num_partitions": 4,
}


class Node:
    """One node of a Cluster: its settings, its disk, and its Broker once it was started."""

    def __init__(self, node_id: int, settings: dict[str, Any], rng: Rng) -> None:
        self.node_id = node_id
        self.settings = settings  #: after the first start they include its addresses, which restarts reuse
        self.rng = rng
        self.filesystem: FileSystem | None = None
        self.broker: Broker | None = None

    def __repr__(self) -> str:
        return f"<Node {self.node_id} {self.broker!r}>"

    @property
    def is_running(self) -> bool:
        return self.broker is not None and self.broker.is_running

    @property
    def is_broker(self) -> bool:
        return "broker" in self.settings.get("process_roles", "broker")


class Cluster:
    """A cluster of brokers numbered from 1. If ``controllers`` is 0, each is also a controller. Otherwise,
    that many separate controllers are numbered from 101.

    With ``storage="memory"``, ``crash`` loses unsynced data. With ``"disk"``, the data is in a temporary
    directory. Other keywords are settings of every node, by Python name. With several brokers, election and
    session timeouts are short, and the default replication factor is min(brokers, 3). If
    ``group_consumer_session_timeout_ms`` is given, the heartbeat interval of group members is derived from
    it.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        controllers: int = 0,
        transport: Literal["inproc", "tcp"] = "inproc",
        storage: Literal["memory", "disk"] = "memory",
        clock: Clock | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        for key, value, is_allowed, allowed in (
            ("brokers", brokers, 1 <= brokers < FIRST_CONTROLLER_ID, f"from 1 to {FIRST_CONTROLLER_ID - 1}"),
            ("controllers", controllers, controllers >= 0, "0 or more"),
            ("transport", transport, transport in {"inproc", "tcp"}, "inproc or tcp"),
            ("storage", storage, storage in {"memory", "disk"}, "memory or disk"),
        ):
            if not is_allowed:
                raise ConfigError(key=key, value=value, allowed=allowed)
        if storage == "memory":
            settings = {**FEW_COORDINATORS, **settings}
        session_ms = settings.get("group_consumer_session_timeout_ms")
        if isinstance(session_ms, int):
            settings.setdefault("group_consumer_heartbeat_interval_ms", max(1, min(session_ms // 5, 5_000)))
        self.clock: Clock = clock or SystemClock()
        self.rng: Rng = seeded_rng(seed)
        self._name = f"cluster-{os.getpid()}-{next(_names)}"
        self._is_memory = storage == "memory"
        self._is_inproc = transport == "inproc"
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._faults: dict[tuple[int | None, int], Fault] = {}
        self.nodes: dict[int, Node] = {}  #: by node id
        #: The ``cluster.secret`` of a multi-node cluster. Requests such as ControlledShutdown need it.
        self.secret = str(settings.get("cluster_secret", "a secret of this test cluster"))
        if brokers == 1 and controllers == 0:
            node_id = int(settings.get("node_id", 1))
            first = {"listeners": self._address(""), **settings}
            self.nodes[node_id] = Node(node_id, first, self.rng)
        elif isinstance(clock, VirtualClock):
            allowed = (
                "for one broker: several run in real time, or all in a simulation (kafkalite.testing.sim)"
            )
            raise ConfigError(key="clock", value=clock, allowed=allowed)
        else:
            self._plan(brokers, controllers, seed, settings)

    def _plan(self, brokers: int, controllers: int, seed: int, settings: dict[str, Any]) -> None:
        """Create the nodes of a multi-node cluster, with the settings that connect them to each other."""
        broker_ids = range(1, brokers + 1)
        controller_ids = range(FIRST_CONTROLLER_ID, FIRST_CONTROLLER_ID + controllers)
        voters = {n: self._address(f"-controller-{n}", fixed=True) for n in controller_ids or broker_ids}
        common = {
            **SETTINGS_OF_SEVERAL,
            "default_replication_factor": min(brokers, 3),
            "cluster_id": self._name,
            "cluster_secret": self.secret,
            "controller_quorum_voters": ",".join(f"{n}@{address}" for n, address in voters.items()),
            **settings,
        }
        for node_id in (*broker_ids, *controller_ids):
            roles = [role for role, ids in (("broker", broker_ids), ("controller", voters)) if node_id in ids]
            own = {
                **common,
                "node_id": node_id,
                "process_roles": ",".join(roles),
                "listeners": self._address(f"-{node_id}"),
            }
            self.nodes[node_id] = Node(node_id, own, seeded_rng(seed * 1_000 + node_id))

    def _address(self, suffix: str, *, fixed: bool = False) -> str:
        """Return an address to listen on. If ``fixed``, its port is chosen before the node starts."""
        if self._is_inproc:
            return f"inproc://{self._name}{suffix}"
        return f"127.0.0.1:{free_ports(1)[0] if fixed else 0}"

    def __repr__(self) -> str:
        return f"<Cluster {', '.join(repr(node.broker) for node in self.nodes.values())}>"

    # --- start and stop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def start(self, *node_ids: int) -> None:
        """Start the named nodes, or all. Skips nodes that run already. A restarted node has its former
        addresses."""
        starting = [
            asyncio.ensure_future(self._start(node)) for node in self._named(node_ids) if not node.is_running
        ]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise

    async def _start(self, node: Node) -> None:
        if self._directory is None and not self._is_memory:
            self._directory = tempfile.TemporaryDirectory(prefix="kafkalite-cluster-")
        if node.filesystem is None:
            node.filesystem = MemoryFileSystem(crashable=True) if self._is_memory else RealFileSystem()
        home = self._directory.name if self._directory is not None else "/cluster"
        log_dirs = home if len(self.nodes) == 1 else f"{home}/node-{node.node_id}"
        broker = Broker(
            clock=self.clock,
            rng=node.rng,
            filesystem=node.filesystem,
            **{"log_dirs": log_dirs, **node.settings},
        )
        await broker.start()
        broker.intercept(lambda request, client: self._intercepted(node, request, client))
        node.broker = broker
        if node.is_broker:
            node.settings["listeners"] = broker.addresses

    async def stop(self, *node_ids: int) -> None:
        """Shut down the named nodes, or all, in an orderly way. Their storage is kept."""
        is_rest = bool(node_ids)
        await self._for_each(node_ids, lambda broker: broker.stop(hands_over=is_rest))

    async def kill(self, *node_ids: int) -> None:
        """End nodes as kill -9 ends a process. Written data is kept, whether synced or not."""
        await self._for_each(node_ids, Broker.kill)

    async def crash(self, *node_ids: int) -> None:
        """Kill nodes. In-memory storage loses unsynced data, as in a power failure."""
        await self.kill(*node_ids)
        for node in self._named(node_ids):
            if isinstance(node.filesystem, MemoryFileSystem):
                node.filesystem.crash(node.rng)

    async def restart(self, *node_ids: int) -> None:
        """Call ``stop`` and ``start``."""
        await self.stop(*node_ids)
        await self.start(*node_ids)

    async def close(self) -> None:
        """Stop all nodes and delete their storage."""
        try:
            await self.stop()
        finally:
            if self._directory is not None:
                self._directory.cleanup()
                self._directory = None

    async def _for_each(
        self, node_ids: Iterable[int], action: Callable[[Broker], Coroutine[Any, Any, None]]
    ) -> None:
        running = [node.broker for node in self._named(node_ids) if node.broker is not None]
        done = await asyncio.gather(*map(action, running), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome

    def _named(self, node_ids: Iterable[int]) -> list[Node]:
        return [self.nodes[node_id] for node_id in node_ids] or list(self.nodes.values())

    # --- state

    @property
    def broker(self) -> Broker:
        """The first running broker, or the first broker if none is running."""
        brokers = self.brokers
        for broker in brokers.values():
            if broker.is_running:
                return broker
        assert brokers, "the cluster is not started"
        return next(iter(brokers.values()))

    @property
    def brokers(self) -> dict[int, Broker]:
        """{node id: broker} of every broker that was started, running or not."""
        return {
            node.node_id: node.broker
            for node in self.nodes.values()
            if node.broker is not None and node.is_broker
        }

    @property
    def controller_id(self) -> int | None:
        """The active controller according to most of the running nodes, or None."""
        seen = [node.broker.controller_id for node in self.nodes.values() if node.broker and node.is_running]
        known = [node_id for node_id in seen if node_id is not None]
        return max(known, key=known.count) if known else None

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the partition's leader according to the node with the newest metadata, or -1."""
        images = [node.broker.image for node in self.nodes.values() if node.broker and node.is_running]
        state = max(images, key=lambda image: image.metadata_offset).partition(topic, partition)
        return -1 if state is None else state.leader

    @property
    def filesystem(self) -> FileSystem:
        """The first node's file system. An in-memory file system can be made to fail."""
        filesystem = next(iter(self.nodes.values())).filesystem
        assert filesystem is not None, "the cluster is not started"
        return filesystem

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of every broker, running or not."""
        assert self.brokers, "the cluster is not started"
        return ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    def statistics(self, node_id: int | None = None) -> BrokerStatistics:
        return (self.broker if node_id is None else self.brokers[node_id]).statistics()

    async def wait_until(
        self, condition: Callable[[], object], *, timeout_ms: int = READ_TIMEOUT_MS, what: str = ""
    ) -> None:
        """Return when ``condition()`` is true. After ``timeout_ms``, raises AssertionError, which names
        ``what``."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        while not condition():
            assert loop.time() < deadline_s, f"not within {timeout_ms} ms: {what or condition}"
            await asyncio.sleep(0.005)

    # --- clients

    def producer(self, **settings: Any) -> Producer:
        """Return a Producer of this cluster, for use with ``async with``."""
        from kafkalite.client.producer.producer import Producer

        return Producer(self.bootstrap_servers, **settings)

    def consumer(self, *topics: str, **settings: Any) -> Consumer:
        """Return a Consumer of this cluster, for use with ``async with``."""
        from kafkalite.client.consumer.consumer import Consumer

        return Consumer(*topics, bootstrap_servers=self.bootstrap_servers, **settings)

    def admin(self, **settings: Any) -> Admin:
        """Return an Admin of this cluster, for use with ``async with``."""
        from kafkalite.client.admin.admin import Admin

        return Admin(self.bootstrap_servers, **settings)

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        *,
        replication_factor: int = -1,
    ) -> None:
        async with self.admin() as admin:
            await admin.create_topic(
                name,
                partitions=partitions,
                replication_factor=replication_factor,
                configs=dict(configs or {}),
            )

    async def produce(self, topic: str, values: Iterable[bytes], *, partition: int | None = None) -> None:
        """Send ``values`` and wait until all are acknowledged."""
        async with self.producer() as producer:
            await producer.send_many(topic, list(values), partition=partition)
            await producer.flush()

    async def records(self, topic: str) -> list[Record]:
        """Return every record of the topic that can be read now, ordered by partition and offset."""
        async with self.admin() as admin:
            described = await admin.describe_topics([topic])
        partitions = [TopicPartition(topic, number) for number in range(len(described[0].partitions))]
        records: list[Record] = []
        async with self.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            starts = await consumer.beginning_offsets(partitions)
            open_ends = {key for key in partitions if starts[key] < ends[key]}
            waited_ms = 0
            while open_ends:
                batch = await consumer.get_many(timeout_ms=READ_SLICE_MS)
                records += [r for r in batch if r.offset < ends[TopicPartition(r.topic, r.partition)]]
                # The last offsets of a partition may be those of markers, which are not returned, but the
                # position advances past them.
                open_ends = {key for key in open_ends if (consumer.position(key) or 0) < ends[key]}
                waited_ms = 0 if batch else waited_ms + READ_SLICE_MS
                assert waited_ms < READ_TIMEOUT_MS, (
                    f"nothing could be read from {open_ends} for {READ_TIMEOUT_MS} ms"
                )
        return sorted(records, key=lambda record: (record.partition, record.offset))

    # --- faults and time

    def intercept(self, api: ApiKey, fault: Fault | None, *, node_id: int | None = None) -> None:
        """Pass every request of ``api`` to ``fault`` first, on ``node_id`` or else on all nodes. If ``fault``
        is None, remove the fault."""
        if fault is None:
            self._faults.pop((node_id, api), None)
        else:
            self._faults[node_id, api] = fault

    def _intercepted(self, node: Node, request: Request, client: Client) -> Response | Pending | None:
        key = request.api_key
        fault = self._faults.get((node.node_id, key)) or self._faults.get((None, key))
        broker = node.broker
        if fault is None or broker is None:
            return None
        return fault(request, lambda: broker.handle(request, client), self.clock)

    async def advance(self, duration_ms: int) -> None:
        """Advance the VirtualClock with which the cluster was created. Raises AssertionError without one."""
        assert isinstance(self.clock, VirtualClock), (
            "only Cluster(clock=VirtualClock()) can advance its clock"
        )
        await self.clock.advance(duration_ms)
