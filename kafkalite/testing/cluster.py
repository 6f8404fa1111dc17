"""Cluster: real brokers in the running event loop, with storage that survives restarts, and with faults.

One broker, or several that replicate::

    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("orders", partitions=3)
        async with cluster.producer() as producer:
            await producer.send("orders", b"1")
        cluster.intercept("Fetch", drop_next(2), topic="orders")
        await cluster.kill(cluster.leader("orders"))
        assert [record.value for record in await cluster.records("orders")] == [b"1"]
"""

# Long because one object starts the nodes, injects their faults and shows their state.

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from sys import intern
from typing import Any, Final, Literal, Self

from kafkalite.broker.broker import Broker
from kafkalite.broker.config import EMBEDDED_LISTENERS, BrokerConfig
from kafkalite.broker.coordination.internal_topics import GROUP, TRANSACTION
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.metrics import BrokerStatistics
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import ClientError, ConfigError, InvalidReplicationFactorError
from kafkalite.metadata.records import ProducerIdsRecord
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.rng import Rng, seeded_rng
from kafkalite.security.scram import MIN_ITERATIONS
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.clients import READ_TIMEOUT_MS, Clients
from kafkalite.testing.faults import Aim, Fault, Faults
from kafkalite.testing.requests import RequestLog, api_key_of, name_of, names_in
from kafkalite.testing.snapshots import Restoration, Snapshot, take
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.tls_options import PLAINTEXT, SECURITY_PROTOCOLS, SSL, WITH_LOGIN, WITH_TLS, SecurityProtocol
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, make_dev_certificates
from kafkalite.transport.free_ports import free_ports

_names = count(1)

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

#: The cluster's secret, and the user of its clients if they log in.
DEFAULT_SECRET: Final = "a secret of this test cluster"
CLIENT_USER: Final = "client"

#: How long ``create_topic`` waits for running brokers that are fenced. They send heartbeats all the time.
UNFENCED_WITHIN_MS: Final = 5_000


class Node:
    """One node of a Cluster: its settings, its file system, and its Broker (None before ``start``)."""

    def __init__(self, node_id: int, settings: dict[str, Any], rng: Rng) -> None:
        self.node_id = node_id
        #: By Python name. The first start adds the node's addresses, so that restarts reuse them.
        self.settings = settings
        self.rng = rng
        self.log_dirs = ""  #: set by the first start
        self.filesystem: FileSystem | None = None
        self.broker: Broker | None = None
        self._config: tuple[dict[str, Any], BrokerConfig] | None = None

    def config(self, log_dirs: str) -> BrokerConfig:
        """Return the parsed settings. Caches the result until the settings change."""
        settings = {"listeners": EMBEDDED_LISTENERS, "log_dirs": log_dirs, **self.settings}
        if self._config is None or self._config[0] != settings:
            self._config = settings, BrokerConfig.from_settings(settings)
        return self._config[1]

    def __repr__(self) -> str:
        return f"<Node {self.node_id} {self.broker!r}>"

    @property
    def is_running(self) -> bool:
        return self.broker is not None and self.broker.is_running

    @property
    def is_broker(self) -> bool:
        return "broker" in self.settings.get("process_roles", "broker")


class Cluster(Clients):
    """A cluster of brokers with node ids from 1. If ``controllers`` is 0, each broker is also a controller.
    Otherwise, there are ``controllers`` separate controllers with node ids from 101.

    If ``security_protocol`` is ``"SSL"`` or ``"SASL_SSL"``, clients, brokers and controllers connect over
    TLS, with certificates that ``start`` makes. This needs the package ``cryptography``. With ``"SASL_SSL"``
    or ``"SASL_PLAINTEXT"``, clients log in as the user ``client``, or as a user that ``add_user`` has added:
    ``cluster.producer(**cluster.login("alice"))``. ``client_settings`` has the settings that clients need.

    With ``storage="memory"``, ``crash`` may lose unsynced data. With ``"disk"``, the data is in a temporary
    directory. ``disks`` is the number of data directories of each node, which ``fail_disk`` and
    ``replace_disk`` count from 1. Other keywords are settings of every node, by Python name. With several
    nodes, election and session timeouts are short, and the default replication factor is min(brokers, 3). If
    ``group_consumer_session_timeout_ms`` is given, the default heartbeat interval of group members is a fifth
    of it, at most 5 s.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        controllers: int = 0,
        transport: Literal["inproc", "tcp"] = "inproc",
        storage: Literal["memory", "disk"] = "memory",
        disks: int = 1,
        security_protocol: SecurityProtocol = "PLAINTEXT",
        clock: Clock | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.nodes: dict[int, Node] = {}  #: by node id; first, because __repr__ needs it after an error
        for key, number in (("brokers", brokers), ("controllers", controllers)):
            if not isinstance(number, int):
                raise ConfigError(
                    key=key, value=number, allowed="a number of nodes, as in Cluster(brokers=3)"
                )
        for key, value, is_allowed, allowed in (
            ("brokers", brokers, 1 <= brokers < FIRST_CONTROLLER_ID, f"from 1 to {FIRST_CONTROLLER_ID - 1}"),
            ("controllers", controllers, controllers >= 0, "0 or more"),
            ("transport", transport, transport in {"inproc", "tcp"}, "inproc or tcp"),
            ("storage", storage, storage in {"memory", "disk"}, "memory or disk"),
            ("disks", disks, isinstance(disks, int) and disks >= 1, "1 or more"),
            (
                "security_protocol",
                security_protocol,
                security_protocol in SECURITY_PROTOCOLS,
                ", ".join(SECURITY_PROTOCOLS),
            ),
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
        self._disk_count = disks
        self._is_inproc = transport == "inproc"
        self._protocol = security_protocol
        self._scheme = "" if security_protocol == PLAINTEXT else f"{security_protocol}://"
        self._passwords: dict[str, str] = {}  # by user
        if security_protocol in WITH_LOGIN:
            settings = {"cluster_secret": DEFAULT_SECRET, **settings}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._certificates: tempfile.TemporaryDirectory[str] | None = None
        self._faults = Faults(seeded_rng(seed))
        #: The newest 10,000 requests of clients, including those that a fault refused.
        self.requests = RequestLog()
        #: The ``cluster.secret`` of a multi-node cluster. Requests such as ControlledShutdown need it.
        self.secret = str(settings.get("cluster_secret", DEFAULT_SECRET))
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
        for node in self.nodes.values():
            node.settings["listeners"] = f"{self._scheme}{node.settings['listeners']}"

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
        """Return an address to listen on. A TCP port is 0 or, if ``fixed``, a free port that is chosen now.

        ``suffix`` is appended to the cluster's name in an ``inproc`` address.
        """
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
        """Start the nodes ``node_ids`` (default: all). Nodes that run already are skipped. A restarted node
        has its former addresses."""
        if self._protocol in WITH_TLS and self._certificates is None:
            self._make_certificates()
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
        if self._protocol in WITH_LOGIN and not self._passwords:
            await self.add_user(CLIENT_USER)

    async def add_user(self, name: str, password: str = "") -> None:
        """Add the user ``name``, or replace the user's password. The default password is random.
        ``login(name)`` returns the settings of the user's clients."""
        from kafkalite.client.admin.admin import Admin
        from kafkalite.client.cluster.authentication import OperatorLogin

        password = password or secrets.token_urlsafe()
        async with Admin(
            self.bootstrap_servers,
            operator=OperatorLogin(self.secret, self.broker.cluster_id),
            config=self._tls_settings,
            security_protocol=SSL if self._protocol in WITH_TLS else PLAINTEXT,
        ) as admin:
            await admin.set_user_password(name, password, iterations=MIN_ITERATIONS)
        self._passwords[name] = password

    def login(self, name: str) -> dict[str, Any]:
        """Return the settings of a client that logs in as the user ``name``, which ``add_user`` has added.

        Raises ConfigError if there is no such user.
        """
        if name not in self._passwords:
            raise ConfigError(key="name", value=name, allowed="a user that add_user has added")
        return {**self.client_settings, "sasl_username": name, "sasl_password": self._passwords[name]}

    def _make_certificates(self) -> None:
        """Issue certificates for the nodes and for clients, and let every node use them."""
        self._certificates = tempfile.TemporaryDirectory(prefix="kafkalite-certificates-")
        directory = Path(self._certificates.name)
        make_dev_certificates(directory, ["broker"], ["client"], ["localhost", "127.0.0.1"])
        for node in self.nodes.values():
            node.settings = {
                "ssl_keystore_location": f"{directory}/broker.pem",
                "ssl_truststore_location": f"{directory}/{CA_CERTIFICATE}",
                "listener_security_protocol_map": "CONTROLLER:SSL",
                **node.settings,
            }

    @property
    def client_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {**self._tls_settings}
        if self._scheme:
            settings["security_protocol"] = self._protocol
        if CLIENT_USER in self._passwords:
            settings.update(sasl_username=CLIENT_USER, sasl_password=self._passwords[CLIENT_USER])
        return settings

    @property
    def _tls_settings(self) -> dict[str, Any]:
        if self._certificates is None:
            return {}
        return {
            "ssl_keystore_location": f"{self._certificates.name}/client.pem",
            "ssl_truststore_location": f"{self._certificates.name}/{CA_CERTIFICATE}",
        }

    async def _start(self, node: Node) -> None:
        if self._directory is None and not self._is_memory:
            self._directory = tempfile.TemporaryDirectory(prefix="kafkalite-cluster-")
        if node.filesystem is None:
            node.filesystem = MemoryFileSystem(crashable=True) if self._is_memory else RealFileSystem()
        node.log_dirs = node.log_dirs or ",".join(self.directories(node.node_id))
        broker = Broker(
            node.config(node.log_dirs), clock=self.clock, rng=node.rng, filesystem=node.filesystem
        )
        await broker.start()
        broker.intercept(lambda request, client: self._intercepted(node, request, client))
        node.broker = broker
        if node.is_broker:
            node.settings["listeners"] = tuple(f"{self._scheme}{address}" for address in broker.addresses)

    async def stop(self, *node_ids: int) -> None:
        """Shut down the nodes ``node_ids`` (default: all) in an orderly way. Their storage is kept."""
        is_rest = bool(node_ids)
        await self._for_each(node_ids, lambda broker: broker.stop(hands_over=is_rest))

    async def kill(self, *node_ids: int) -> None:
        """End the nodes ``node_ids`` (default: all) as kill -9 does. Written data is kept, synced or not."""
        await self._for_each(node_ids, Broker.kill)

    async def crash(self, *node_ids: int) -> None:
        """Kill the nodes ``node_ids`` (default: all). In-memory storage may lose unsynced data, as in a power
        failure."""
        await self.kill(*node_ids)
        for node in self._named(node_ids):
            if isinstance(node.filesystem, MemoryFileSystem):
                node.filesystem.crash(node.rng)

    def directories(self, node_id: int) -> list[str]:
        """Return the paths of the data directories of a node."""
        home = self._directory.name if self._directory is not None else "/cluster"
        own = home if len(self.nodes) == 1 else f"{home}/node-{node_id}"
        return [own] if self._disk_count == 1 else [f"{own}/disk-{n + 1}" for n in range(self._disk_count)]

    def fail_disk(self, node_id: int, disk: int) -> None:
        """Make everything on a disk of a node fail, until ``replace_disk``. Only with storage="memory"."""
        self._disks_of(node_id).fail_disk(self.directories(node_id)[disk - 1])

    def replace_disk(self, node_id: int, disk: int) -> None:
        """Put an empty disk in the place of a disk of a node, which is not running. Only with
        storage="memory"."""
        self._disks_of(node_id).replace_disk(self.directories(node_id)[disk - 1])

    def _disks_of(self, node_id: int) -> MemoryFileSystem:
        (node,) = self._named([node_id])
        if not isinstance(node.filesystem, MemoryFileSystem):
            raise ConfigError(key="storage", value=repr(self), allowed="memory, and a started cluster")
        return node.filesystem

    async def restart(self, *node_ids: int) -> None:
        """Call ``stop`` and ``start`` for the nodes ``node_ids`` (default: all)."""
        await self.stop(*node_ids)
        await self.start(*node_ids)

    async def close(self) -> None:
        """Stop all nodes. Delete the temporary directories of the data and of the certificates."""
        try:
            await self.stop()
        finally:
            if self._directory is not None:
                self._directory.cleanup()
                self._directory = None
            if self._certificates is not None:
                self._certificates.cleanup()

    async def _for_each(
        self, node_ids: Iterable[int], action: Callable[[Broker], Coroutine[Any, Any, None]]
    ) -> None:
        running = [node.broker for node in self._named(node_ids) if node.broker is not None]
        done = await asyncio.gather(*map(action, running), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome

    def _named(self, node_ids: Iterable[int]) -> list[Node]:
        """Return the nodes ``node_ids``, all if there are none. Raises ClientError for an unknown id."""
        for node_id in node_ids:
            if node_id not in list(self.nodes):
                known = ", ".join(map(str, self.nodes))
                raise ClientError(f"there is no node {node_id!r}", hint=f"the nodes of the cluster: {known}")
        return [self.nodes[node_id] for node_id in node_ids] or list(self.nodes.values())

    # --- state

    @property
    def broker(self) -> Broker:
        """The first running broker, or the first started one if none is running."""
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
        """The node id of the active controller according to most of the running nodes; None if no running
        node knows it."""
        seen = [node.broker.controller_id for node in self.nodes.values() if node.broker and node.is_running]
        known = [node_id for node_id in seen if node_id is not None]
        return max(known, key=known.count) if known else None

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the node id of the partition's leader according to the newest metadata of the running nodes,
        or -1 if there is none. Raises AssertionError if no node is running."""
        images = [node.broker.image for node in self.nodes.values() if node.broker and node.is_running]
        assert images, "no node of the cluster is running"
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
        """The addresses of every broker that was started, running or not."""
        assert self.brokers, "the cluster is not started"
        return ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    def statistics(self, node_id: int | None = None) -> BrokerStatistics:
        if node_id is None:
            return self.broker.statistics()
        self._named([node_id])  # raises if there is no such node
        return self.brokers[node_id].statistics()

    async def wait_until(
        self, condition: Callable[[], object], *, timeout_ms: int = READ_TIMEOUT_MS, what: str = ""
    ) -> None:
        """Return when ``condition()`` is true. Raises AssertionError after ``timeout_ms``; its message names
        ``what``, the awaited state."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        while not condition():
            assert loop.time() < deadline_s, f"not within {timeout_ms} ms: {what or condition}"
            await asyncio.sleep(0.005)

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        *,
        replication_factor: int = -1,
    ) -> None:
        """Create a topic. The replication factor -1 selects the cluster's default.

        The sessions of brokers expire while this process is paused. Therefore, if too few brokers are live,
        waits up to UNFENCED_WITHIN_MS until all running brokers are unfenced, and tries once more. Raises the
        errors of ``Admin.create_topic``.
        """
        create = super().create_topic
        try:
            await create(name, partitions, configs, replication_factor=replication_factor)
        except InvalidReplicationFactorError:
            with suppress(AssertionError):
                await self.wait_until(self._are_unfenced, timeout_ms=UNFENCED_WITHIN_MS)
            await create(name, partitions, configs, replication_factor=replication_factor)

    def _are_unfenced(self) -> bool:
        running = {node_id for node_id, broker in self.brokers.items() if broker.is_running}
        return running <= self.broker.image.live_brokers()

    # --- snapshots

    async def snapshot(self) -> Snapshot:
        """Return the state of the broker: topics with records and configs, groups, transactions.

        Raises ConfigError unless the cluster is one broker with ``storage="memory"``. Raises
        TransactionStateError if a transaction is open, and StorageError if a log cannot be read.
        """
        broker = self._only_broker()
        await _settled(broker, list(broker.partitions))
        return take(broker)

    async def restore(self, snapshot: Snapshot) -> None:
        """Set the broker back to the state of ``snapshot``, which this cluster must have made. A snapshot may
        be restored several times.

        If the state of transactions has changed since the snapshot, it is deleted instead of restored.
        Removes all faults, also those of the file system, and clears ``requests``. Clients stay connected:
        for them, the partitions that have changed since the snapshot have a new leader epoch. The clock and
        the producer ids are not set back. Raises ConfigError as ``snapshot`` does, ClientError for any other
        object than a Snapshot, and StorageError.
        """
        if not isinstance(snapshot, Snapshot):
            raise ClientError(f"{snapshot!r} is no Snapshot", hint="pass the result of snapshot()")
        broker = self._only_broker()
        if isinstance(self.filesystem, MemoryFileSystem):
            self.filesystem.heal()
        restoration = Restoration(broker, snapshot, self.clock.wall_ms())
        publishers = broker.controller.publishers
        publishers.insert(0, restoration.prepare)
        try:
            await broker.controller.change(restoration.records)
        finally:
            publishers.remove(restoration.prepare)
        self._faults.clear()
        self.requests.clear()
        found = map(broker.partitions.find, restoration.replaced)
        await _settled(broker, [hosted for hosted in found if hosted is not None])

    async def reset(self) -> None:
        """Replace the broker by an empty one with the same address and cluster id.

        Removes all faults and clears ``requests``. Connections break, and clients connect again. The new
        broker never assigns a producer id that the former broker assigned. Of the users, only ``client``
        remains, with its password. Raises ConfigError as ``snapshot`` does.
        """
        before = self._only_broker()
        (node,) = self.nodes.values()
        node.settings.setdefault("cluster_id", before.cluster_id)
        next_producer_id = before.image.next_producer_id
        await before.kill()
        node.filesystem = None
        await self._start(node)
        if next_producer_id:
            await self.broker.controller.change(lambda _: [ProducerIdsRecord(next_producer_id)])
        passwords, self._passwords = self._passwords, {}
        if CLIENT_USER in passwords:
            await self.add_user(CLIENT_USER, passwords[CLIENT_USER])
        self._faults.clear()
        self.requests.clear()

    def _only_broker(self) -> Broker:
        if len(self.nodes) > 1 or not self._is_memory:
            raise ConfigError(key="snapshot", value=repr(self), allowed="of one broker with storage='memory'")
        return self.broker

    # --- faults and time

    def intercept(
        self,
        api: ApiKey | str,
        fault: Fault | None,
        *,
        topic: str | None = None,
        partition: int | None = None,
        probability: float = 1.0,
        node_id: int | None = None,
    ) -> None:
        """Pass requests of ``api`` ("Produce", ApiKey.PRODUCE) to ``fault`` before they are handled.

        ``topic``, ``partition`` and ``node_id`` (None: any) restrict the requests to those that name the
        topic and partition and that arrive at this node. Each of these requests is passed with
        ``probability``, drawn from the cluster's seed, unless another fault has responded to it: faults with
        more of these conditions receive a request first. The ``count`` of the fault counts only the requests
        that are passed to it.

        A later fault with the same API and conditions replaces this one. If ``fault`` is None, removes the
        faults that were set for this API, with the same ``node_id``, for ``topic`` and ``partition`` (None:
        for any). Raises ConfigError for an unknown API or node, for a topic or partition if requests of this
        API name none, and for an invalid fault or probability.
        """
        if node_id is not None and node_id not in self.nodes:
            known = ", ".join(map(str, self.nodes))
            raise ConfigError(key="node_id", value=node_id, allowed=f"one of {known}, or None")
        self._faults.set(Aim(api_key_of(api), node_id, topic, partition), fault, probability)

    def _intercepted(self, node: Node, request: Request, client: Client) -> Response | Pending | None:
        if client.node_id is None:  # not a node of the cluster
            key = ApiKey(request.api_key)
            named = names_in(request.message)
            client_id = intern(request.client_id or "")
            self.requests.add((name_of(key), client_id, *named, self.clock.wall_ms(), node.node_id))
        broker = node.broker
        if broker is None:
            return None
        return self._faults.respond(request, node.node_id, lambda: broker.handle(request, client), self.clock)

    async def advance(self, duration_ms: int) -> None:
        """Advance the VirtualClock with which the cluster was created. Raises AssertionError without one."""
        assert isinstance(self.clock, VirtualClock), (
            "only Cluster(clock=VirtualClock()) can advance its clock"
        )
        await self.clock.advance(duration_ms)


async def _settled(broker: Broker, hosted: Sequence[HostedPartition]) -> None:
    """Return when the high watermark of each of these partitions is its log end, unless the partition is
    offline, and when no coordinator is loading."""
    for one in hosted:
        one.mark_unsynced()
    shards = [shard for kind in (GROUP, TRANSACTION) for shard in broker.coordinators.shards(kind)]
    for one in hosted:
        while one.offline_reason is None and not _is_at_rest(one):  # noqa: ASYNC110
            await asyncio.sleep(0)
    for shard in shards:
        while not (shard.is_loaded or shard.is_closed or shard.failure):  # noqa: ASYNC110
            await asyncio.sleep(0)


def _is_at_rest(hosted: HostedPartition) -> bool:
    return hosted.high_watermark == hosted.log_end_offset and hosted.idle_log() is not None
