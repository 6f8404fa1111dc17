"""The Broker: one node. It creates its parts, and starts and stops them in order.

It owns the tasks of requests and of its services. Some parts own further tasks, which end when the part is
closed.
"""

# Long because it connects all parts of a node and starts and stops them in order.

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kafkalite.broker.activity import Activity
from kafkalite.broker.addresses import resolve_overrides
from kafkalite.broker.cluster.controller_channel import ControllerChannel
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.cluster.registration import Registration
from kafkalite.broker.config import EMBEDDED_LISTENERS, BrokerConfig
from kafkalite.broker.coordination.coordinators import Coordinators
from kafkalite.broker.coordination.internal_topics import GROUP, TRANSACTION
from kafkalite.broker.coordination.marker_writer import MarkerWriter
from kafkalite.broker.coordination.producer_ids import ProducerIds
from kafkalite.broker.coordination.transactions import Transactions
from kafkalite.broker.handlers import HANDLERS
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.housekeeping import Housekeeping
from kafkalite.broker.partitions.inline_executor import InlineExecutor
from kafkalite.broker.partitions.log_mover import LogMover
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.sync_scheduler import SyncScheduler
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.quotas.address_limits import AddressLimits, parse_overrides
from kafkalite.broker.quotas.quota_manager import QuotaManager
from kafkalite.broker.replication.near_reads import NearReads
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.descriptors import current_limits
from kafkalite.broker.server.dispatch import Dispatcher, Interceptor
from kafkalite.broker.server.logins import Logins
from kafkalite.broker.server.metrics import BrokerStatistics, Metrics
from kafkalite.broker.server.responses import Pending, Refusal, Reply, Response
from kafkalite.broker.server.server import Server
from kafkalite.broker.services import Services
from kafkalite.broker.tasks import TaskSet
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import BrokerError, ConfigError, KafkaliteError
from kafkalite.log_fields import Fields
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import ClusterImage
from kafkalite.model import NO_BROKER_EPOCH
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.cluster import AllocateProducerIdsRequest, AllocateProducerIdsResponse
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.quorum import Quorum
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.rng import Rng, system_rng
from kafkalite.security.acls import Authorizer
from kafkalite.security.principal_mapping import PrincipalMapping
from kafkalite.storage import layout
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.log_dirs import LogDirs
from kafkalite.storage.sync_work import run_together
from kafkalite.transport import security_scheme, transport_for, without_security
from kafkalite.transport.tls_context import TlsContext

if TYPE_CHECKING:
    from kafkalite.broker.cluster.node import ClusterNode
    from kafkalite.broker.cluster.start_counter import Start
    from kafkalite.client.cluster.authentication import Authenticator

logger = logging.getLogger(__name__)

#: The longest time that a stop waits for requests in flight.
STOP_GRACE_MS: Final = 5_000
TICK_INTERVAL_MS: Final = 100
PRODUCER_IDS_TIMEOUT_MS: Final = 10_000
INCARNATION_ID_BYTES: Final = 16
MEMORY_PATH: Final = "/memory"

Step = tuple[str, Callable[[], Awaitable[None]]]


class Broker:
    """One broker in the running event loop. It installs no signal handlers and sets no loop policy.

    ``Broker()`` keeps everything in memory and listens on a free TCP port; ``Broker(listeners="inproc://")``
    needs no socket. Pass the settings as keyword arguments with Python names, or as one BrokerConfig. Use
    ``async with``, or call ``start`` and ``stop``.
    """

    def __init__(
        self,
        config: BrokerConfig | None = None,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
        filesystem: FileSystem | None = None,
        executor: Executor | None = None,
        **settings: Any,
    ) -> None:
        """Pass ``config`` or ``settings``, not both. Simulations and tests replace the other arguments.

        ``executor`` runs blocking calls instead of the broker's own threads. ``rng`` replaces the system's
        random numbers, so that simulated runs can be repeated. Raises ConfigError.
        """
        if config is None:
            config = BrokerConfig.from_settings({"listeners": EMBEDDED_LISTENERS, **settings})
        elif settings:
            raise TypeError("give a BrokerConfig or settings, not both")
        elif not isinstance(config, BrokerConfig):
            raise TypeError(
                f"Broker takes a BrokerConfig or settings as keywords, not {config!r}; "
                "for example Broker(listeners='127.0.0.1:9092', num_partitions=3)"
            )
        if config.has_peers and config.log_dirs is None and filesystem is None:
            raise ConfigError(
                key="log.dirs",
                value=None,
                allowed="required with controller.quorum.voters: a vote is kept on disk",
            )
        self.config = config
        self._clock = clock or SystemClock()
        self._is_deterministic = rng is not None
        self._rng = rng or system_rng()
        self._filesystem = filesystem
        self._given_executor = executor
        self._node = NodeState(
            self._rng.randbytes(INCARNATION_ID_BYTES).hex(),
            session_end_ms=0 if config.has_peers else math.inf,
        )
        self._cluster: ClusterNode | None = None
        self._registration: Registration | None = None
        self._channels: list[ControllerChannel] = []
        self._controller_addresses: tuple[str, ...] = ()
        self._starter: asyncio.Task[Any] | None = None
        self._hands_over = True
        self._metrics = Metrics()
        self._quotas = QuotaManager()
        self._state = "new"
        self._failure: BaseException | None = None
        self._addresses: tuple[str, ...] = ()
        #: For other nodes, which see from ``SSL://`` that a listener speaks TLS.
        self._registered_addresses: tuple[str, ...] = ()
        self._started: list[Step] = []  # the steps that undo the start, in the order of the start
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._started_ms = 0
        self._start: Start | None = (
            None  #: of this process in the data directory (R51); None on a single node
        )
        self._is_clean = True

    def __repr__(self) -> str:
        return f"<Broker {self.config.node_id} {self._state} at {', '.join(self._addresses) or 'no address'}>"

    # --- for users

    @property
    def address(self) -> str:
        """Return the first of ``addresses``."""
        assert self._addresses, "the broker is not started"
        return self._addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the address of every listener, in the order of ``listeners``, with its actual port. A
        listener that has an advertised address is listed with that address.

        A node that is only a controller returns the addresses of its controller listener.
        """
        return self._addresses

    @property
    def bootstrap_servers(self) -> str:
        """Return the address to pass to clients as ``bootstrap_servers``."""
        return self.address

    @property
    def cluster_id(self) -> str:
        return self._services.cluster_id

    @property
    def image(self) -> ClusterImage:
        """Return the newest cluster metadata that this node has replayed."""
        return self._services.controller.image

    @property
    def controller_id(self) -> int | None:
        """Return the id of the active controller, or None if this node does not know of one."""
        return self._services.controller.controller_id

    @property
    def is_running(self) -> bool:
        return self._state == "running"

    def statistics(self) -> BrokerStatistics:
        """Return the counters since the start of this broker, and current sizes."""
        metrics, services = self._metrics, self._services
        return BrokerStatistics(
            node_id=self.config.node_id,
            cluster_id=services.cluster_id,
            state=self._state,
            uptime_ms=self._clock.monotonic_ms() - self._started_ms,
            connection_count=self._server.connection_count,
            connections_accepted=metrics.connections_accepted,
            connections_refused=metrics.connections_refused,
            connections_reaped=metrics.connections_reaped,
            protocol_errors=metrics.protocol_errors,
            requests={ApiKey(key).name: count for key, count in sorted(metrics.requests.items()) if count},
            failed_requests=metrics.failed_requests,
            topic_count=len(services.controller.image.topics),
            partition_count=len(services.partitions),
            offline_partition_count=services.partitions.offline_count,
            lost_records=sum(hosted.lost_records for hosted in services.partitions),
            damaged_partition_count=services.partitions.damaged_count,
            torn_tail_records=services.partitions.torn_tail_records,
            scrubbed_bytes=self._housekeeping.scrubber.scrubbed_bytes,
            scrubs_completed=self._housekeeping.scrubber.pass_count,
            appended_batches=metrics.appended_batches,
            appended_bytes=metrics.appended_bytes,
            fetched_bytes=metrics.fetched_bytes,
            sync_rounds=self._scheduler.round_count,
            synced_logs=self._scheduler.synced_count,
            group_count=services.coordinators.count(GROUP),
            transaction_count=services.coordinators.count(TRANSACTION),
            waiting_requests=len(services.waiters),
            task_count=len(self._request_tasks) + len(self._service_tasks),
        )

    @property
    def partitions(self) -> Partitions:
        """Return the partitions that this broker hosts, for tests and tools in the same process."""
        return self._services.partitions

    @property
    def controller(self) -> ControllerNode:
        """Return this node's controller, for tests and tools in the same process."""
        return self._services.controller

    @property
    def coordinators(self) -> Coordinators:
        """Return the coordinators of groups and transactions, for tests and tools in the same process."""
        return self._services.coordinators

    @property
    def mover(self) -> LogMover:
        """Return the object that moves logs between data directories, for tests and tools in the same
        process."""
        return self._services.mover

    @property
    def housekeeping(self) -> Housekeeping:
        """Return the object that runs the periodic passes, for tests and tools in the same process."""
        return self._housekeeping

    def intercept(self, interceptor: Interceptor | None) -> None:
        """Call ``interceptor`` with each request before its handler, so that tests can inject faults.

        If it returns a response, the broker sends that response and does not call the handler. It is not
        called for requests that are malformed or lack a required login, nor for handshakes and Raft messages
        at the controller's listener. If ``interceptor`` is None, the current interceptor is removed.
        """
        self._dispatcher.interceptor = interceptor

    def handle(self, request: Request, client: Client) -> Response | Pending:
        """Respond to ``request`` as if ``client`` had sent it, bypassing the interceptor."""
        return self._dispatcher.handle(request, client)

    # --- start and stop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
        if self._failure is not None and error is None:
            raise self._failure

    async def start(self) -> None:
        """Start the broker and return when it serves clients. If a step fails, undo the earlier steps and
        raise its error."""
        assert self._state == "new", "a Broker is started once"
        self._state = "starting"
        self._started_ms = self._clock.monotonic_ms()
        self._starter = asyncio.current_task()
        try:
            await self._open_storage()
            await self._load_metadata()
            await self._join_quorum()
            await self._listen()
            await self._register()
            await self._begin_replication()
            await self._begin_housekeeping()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            starter, self._starter = self._starter, None
            await self._unwind(is_clean=False)
            self._state = "failed"
            if self._failure is not None and isinstance(error, asyncio.CancelledError):
                assert starter is not None, "cancelled by fail()"
                starter.uncancel()
                raise self._failure from None
            raise
        self._starter = None
        self._state = "running"
        self._server.open()
        logger.info(
            "broker started %s",
            Fields(
                node_id=self.config.node_id,
                cluster_id=self.cluster_id,
                addresses=",".join(self._addresses),
                data=self.config.log_dirs or "memory",
                partitions=len(self.partitions),
                took_ms=self._clock.monotonic_ms() - self._started_ms,
            ),
        )

    async def stop(self, *, hands_over: bool = True) -> None:
        """Stop cleanly: transfer leaderships, wait up to STOP_GRACE_MS for requests in flight, sync, and
        write ``clean-shutdown``. After a failure, stop uncleanly.

        Idempotent. If ``hands_over`` is False, leadership is not transferred. Use this when the whole cluster
        stops.
        """
        self._hands_over = hands_over
        await self._stop(is_clean=self._failure is None)

    async def kill(self) -> None:
        """Stop as if the process had crashed: drop connections, do not sync logs of partitions, and do not
        write ``clean-shutdown``."""
        if self._cluster is not None and self._cluster.raft is not None:
            self._cluster.raft.halt()
        await self._stop(is_clean=False)

    async def wait_stopped(self) -> None:
        """Return when the broker, which must have started, has stopped. If a failure stopped it, raise that
        failure."""
        await self._stopped.wait()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Stop uncleanly because of ``error``, unless the broker already stops or has failed."""
        if self._failure is not None or self._state not in {"starting", "running"}:
            return
        self._failure = error
        logger.critical(
            "broker stops %s", Fields(broker=self, error=repr(error)), exc_info=_unexpected(error)
        )
        if self._state == "running":
            self._stopping = asyncio.get_running_loop().create_task(
                self._do_stop(is_clean=False), name="stop after a failure"
            )
        elif self._starter is not None:  # it may wait for an event that will not occur
            self._starter.cancel()

    async def _stop(self, *, is_clean: bool) -> None:
        if self._state in {"new", "stopped", "failed"}:
            return
        if self._stopping is None:
            if not is_clean and self._state == "running":
                self._service_tasks.begin_cancel()  # they end before the stop begins, in the same turn
            self._stopping = asyncio.get_running_loop().create_task(
                self._do_stop(is_clean=is_clean), name="stop"
            )
        await self._stopped.wait()
        await self._stopping  # it has ended, perhaps with an error

    async def _do_stop(self, *, is_clean: bool) -> None:
        self._state = "stopping"
        try:
            await self._hand_over(is_clean=is_clean)
            await self._unwind(is_clean=is_clean)
        finally:
            self._state = "stopped" if self._failure is None else "failed"
            self._stopped.set()
            logger.info("broker stopped %s", Fields(node_id=self.config.node_id, clean=is_clean))

    async def _hand_over(self, *, is_clean: bool) -> None:
        """Transfer this broker's leaderships to other brokers before a clean stop.

        Does nothing if ``controlled.shutdown.enable`` or the argument ``hands_over`` of ``stop`` is False.
        """
        is_wanted = self._hands_over and self.config.controlled_shutdown_enable
        if is_clean and is_wanted and self._registration is not None:
            await self._registration.hand_over()

    async def _unwind(self, *, is_clean: bool) -> None:
        """Undo the steps of the start in reverse order. If undoing a step fails, continue, and raise the
        first such error at the end if ``is_clean``."""
        self._is_clean = is_clean
        failures: list[BaseException] = []
        while self._started:
            name, undo = self._started.pop()
            try:
                await undo()
            except Exception as error:
                fields = Fields(step=name, error=repr(error))
                logger.error("stopping failed %s", fields, exc_info=_unexpected(error))
                failures.append(error)
        if failures and is_clean:
            raise failures[0]

    # --- the steps of a start, each with the step that undoes it

    async def _open_storage(self) -> None:
        loop = asyncio.get_running_loop()
        config = self.config
        filesystem = self._open_filesystem()
        is_memory = filesystem.is_memory
        self._executor: Executor = self._given_executor or (
            InlineExecutor() if is_memory else ThreadPoolExecutor(2, f"kafkalite-sync-{config.node_id}")
        )
        self._started.append(("executor", self._close_executor))
        directories = config.log_directories or (MEMORY_PATH,)
        self._path = directories[0]
        self._store = LogDirs.open(
            filesystem, directories, cluster_id=config.cluster_id, node_id=config.node_id, rng=self._rng
        )
        self._started.append(("log store", self._close_store))
        directory = f"{self._path}/{layout.METADATA_DIRECTORY}"
        is_inline = is_memory or self._given_executor is not None
        if config.has_peers:
            from kafkalite.broker.cluster.node import ClusterNode
            from kafkalite.broker.cluster.start_counter import count_start

            self._start = count_start(filesystem, self._path)
            self._cluster = ClusterNode(
                config,
                filesystem,
                self._path,
                directory,
                cluster_id=self._store.identity.cluster_id,
                clock=self._clock,
                rng=self._rng,
                known_offset=self._store.metadata_offset,
                is_copy=self._start.is_copy,
                is_deterministic=self._is_deterministic,
                is_inline=is_inline,
            )
            self._cluster.start_runner()
            self._started.append(("Raft runner", self._cluster.stop_runner))
            self._started.append(("quorum", self._leave_quorum))
            self._quorum: Quorum = self._cluster.quorum
        else:
            self._quorum = SingleQuorum(
                None if self._filesystem is None and is_memory else filesystem,
                directory,
                node_id=config.node_id,
                executor=self._executor,
                is_inline=isinstance(self._executor, InlineExecutor),
                snapshot_min_bytes=config.metadata_log_max_record_bytes_between_snapshots,
                known_offset=self._store.metadata_offset,
                rng=self._rng,
            )
        self._request_tasks = TaskSet(self.fail)
        self._service_tasks = TaskSet(self.fail)
        self._waiters = Waiters(loop)
        self._activity = Activity(self._clock, may_rest=not config.has_peers)
        self._scheduler: SyncScheduler[HostedPartition] = SyncScheduler(
            loop, self._executor, self.fail, run_together
        )

    def _open_filesystem(self) -> FileSystem:
        if self._filesystem is not None:
            return self._filesystem
        if self.config.log_dirs is None:
            from kafkalite.storage.memory_filesystem import MemoryFileSystem

            return MemoryFileSystem()
        from kafkalite.storage.disk import RealFileSystem

        return RealFileSystem(
            min_free_bytes=self.config.log_dirs_min_free_bytes, owner=f"node {self.config.node_id}"
        )

    async def _close_executor(self) -> None:
        if self._given_executor is None:
            self._executor.shutdown(wait=self._is_clean)

    async def _close_store(self) -> None:
        broker_epoch = self._node.broker_epoch
        self._store.close(clean=self._is_clean and self.may_leave_marker(), broker_epoch=broker_epoch)

    def may_leave_marker(self) -> bool:
        """Whether a clean-shutdown marker may be written: only if this process was registered (R21)."""
        return self._node.broker_epoch != NO_BROKER_EPOCH

    async def _load_metadata(self) -> None:
        config = self.config
        settings = config.controller_settings()
        controller = ControllerNode(
            self._quorum,
            config.node_id,
            self._clock,
            self._rng,
            settings,
            is_refused=_is_refused,
            on_failed=self.fail,
            voter_features=dict if self._cluster is None else self._cluster.voter_features,
        )
        partitions = Partitions(
            self._store,
            config.node_id,
            settings.topic_defaults,
            self._waiters,
            self._scheduler,
            is_volatile=self._filesystem is None and config.log_dirs is None,
            incarnation_id=self._node.incarnation_id,
            node=self._node,
            clock=self._clock,
            activity=self._activity,
        )
        controller.publishers.append(partitions.publish)
        cluster = self._cluster
        channel = self._channel(controller, "broker")
        coordinators = partitions.observer = Coordinators(
            config,
            self._clock,
            self._waiters,
            self._service_tasks,
            channel,
            self.fail,
            self._node,
            partitions.offline_reason,
        )
        controller.publishers.append(coordinators.publish)
        producer_ids = ProducerIds(partial(self._allocate_producer_ids, channel))
        marker_writer = MarkerWriter(partitions, self._waiters, self._clock, coordinators.on_marker)
        authenticator = None if cluster is None else cluster.authenticator
        transactions = Transactions(
            config.node_id,
            asyncio.get_running_loop(),
            self._clock,
            controller=controller,
            coordinators=coordinators,
            partitions=partitions,
            producer_ids=producer_ids,
            marker_writer=marker_writer,
            authenticator=authenticator,
            tasks=self._service_tasks,
        )
        self._services = Services(
            config=config,
            cluster_id=self._store.identity.cluster_id,
            clock=self._clock,
            node=self._node,
            metrics=self._metrics,
            waiters=self._waiters,
            partitions=partitions,
            controller=controller,
            channel=channel,
            producer_ids=producer_ids,
            coordinators=coordinators,
            marker_writer=marker_writer,
            transactions=transactions,
            quotas=self._quotas,
            mover=LogMover(config, self._clock, partitions, self._store, self._scheduler),
            near_reads=NearReads(config, partitions, lambda: controller.image, self._clock),
            logins=Logins(config, self._clock, lambda: controller.image.credentials),
            on_broken=self.fail,
            request_stop=self._request_stop,
            authenticator=authenticator or self._own_authenticator(),
            peers=None if cluster is None else cluster.peers(controller),
            raft=None if cluster is None else cluster.raft,
        )
        self._dispatcher = Dispatcher(self._services, HANDLERS, self._request_tasks, self.fail)
        if config.authorizer_class_name:
            self._dispatcher.authorizer = Authorizer(
                super_users=config.super_user_principals,
                allows_without_rules=config.allow_everyone_if_no_acl_found,
            )
        self._started.append(("controller", self._close_controller))
        await controller.start()
        self._service_tasks.start_when(
            coordinators.has_due, coordinators.keep_time, name="coordinators' time"
        )

    def _publish_limits(self, delta: Delta, image: ClusterImage) -> None:
        """Enforce the access control rules and quotas of a new image, also on connections that are open."""
        before = delta.before
        if self._dispatcher.authorizer is not None and image.acls is not before.acls:
            added, removed = image.acls - before.acls, before.acls - image.acls
            self._dispatcher.authorizer.update(added=added, removed=removed)
        if image.client_quotas is not before.client_quotas:
            self._enforce_quotas(image)

    def _enforce_quotas(self, image: ClusterImage) -> None:
        self._quotas.update(image.client_quotas)
        self._server.quotas = self._quotas if image.client_quotas else None

    def _own_authenticator(self) -> Authenticator | None:
        """Return the authenticator for operators of a single node, or None if cluster.secret is not set."""
        secret = self.config.cluster_secret
        if not secret:
            return None
        from kafkalite.client.cluster.authentication import Authenticator

        return Authenticator(secret, self._store.identity.cluster_id, self.config.node_id, os.urandom)

    def _channel(self, controller: ControllerNode, purpose: str) -> ControllerChannel:
        """Return a new channel to the active controller. ``purpose`` begins the channel's client id."""
        channel = ControllerChannel(
            controller,
            self._clock,
            node_id=self.config.node_id,
            voters=self.config.controllers if self._cluster is None else self._cluster.controllers,
            authenticator=None if self._cluster is None else self._cluster.authenticator,
            client_id=f"{purpose}-{self.config.node_id}",
        )
        self._quorum.on_leader_change.append(channel.on_leader_change)
        self._channels.append(channel)
        return channel

    async def _allocate_producer_ids(self, channel: ControllerChannel) -> AllocateProducerIdsResponse:
        request = AllocateProducerIdsRequest(self.config.node_id, self._node.broker_epoch)
        response: AllocateProducerIdsResponse = await channel.send(request, PRODUCER_IDS_TIMEOUT_MS)
        return response

    async def _close_controller(self) -> None:
        await self._services.coordinators.close()
        await self._services.transactions.close()
        await self._request_tasks.cancel()
        await self._service_tasks.cancel()
        await self._scheduler.drain(discard=not self._is_clean)
        for channel in self._channels:
            channel.close()
        if self._services.peers is not None:
            await self._services.peers.close()
        await self._services.controller.stop()

    async def _join_quorum(self) -> None:
        if self._cluster is None:
            return
        self._controller_addresses = await self._cluster.join(
            self._greet, self._dispatcher.dispatch, self._services.controller.on_disconnect
        )
        if self.config.is_controller:
            self._service_tasks.start(self._tick_forever(), name="controller's tick")

    def _greet(self, request: Request, client: Client) -> Response:
        """Respond to another node's handshake. Runs on the Raft loop, so the handler must not use state that
        belongs to the broker's loop."""
        response = HANDLERS[request.api_key](self._services, request, client)
        assert isinstance(response, Reply | Refusal), "a handshake does not wait"
        return response

    async def _leave_quorum(self) -> None:
        """Close Raft's connections. The controller is stopped before, so that messages that end its
        leadership can still be sent."""
        assert self._cluster is not None
        await self._cluster.leave(is_clean=self._is_clean)

    async def _tick_forever(self) -> None:
        controller = self._services.controller
        while True:
            await self._clock.sleep_ms(TICK_INTERVAL_MS)
            try:
                await controller.tick()
            except BrokerError as error:  # there is no leader
                logger.debug("tick without effect %s", Fields(reason=error.message))

    async def _listen(self) -> None:
        config = self.config
        descriptors = current_limits(config.max_connections)
        self._server = Server(
            self._dispatcher.dispatch,
            self._clock,
            self._metrics,
            max_connections=descriptors.max_connections,
            max_descriptor=descriptors.max_client_descriptor,
            address_limits=AddressLimits(
                config.max_connections_per_ip,
                resolve_overrides(parse_overrides(config.max_connections_per_ip_overrides)),
            ),
            max_idle_ms=config.connections_max_idle_ms,
            max_request_bytes=config.socket_request_max_bytes,
            max_request_partitions=config.max_request_partition_size_limit,
            max_queued_bytes=config.queued_max_request_bytes,
            activity=self._activity,
            tls=TlsContext(config, client_auth=config.ssl_client_auth),
            principals=PrincipalMapping(config.ssl_principal_mapping_rules),
            new_login=self._services.logins.new,
        )
        self._enforce_quotas(self._services.controller.image)
        if self._dispatcher.authorizer is not None:
            self._dispatcher.authorizer.update(added=self._services.controller.image.acls)
        self._services.controller.publishers.append(self._publish_limits)
        self._started.append(("server", self._close_server))
        if not config.is_broker:
            self._addresses = self._controller_addresses
            return
        advertised_addresses = config.advertised_listeners or (None,) * len(config.listeners)
        registered: list[str] = []
        for address, advertised in zip(config.listeners, advertised_addresses, strict=True):
            resolved = await self._server.listen(address, advertised and without_security(advertised))
            registered.append(advertised or f"{security_scheme(address)}{resolved}")
        self._registered_addresses = tuple(registered)
        self._addresses = tuple(map(without_security, registered))

    async def _close_server(self) -> None:
        self._services.logins.close()
        if not self._is_clean:
            await self._server.abort()
            return
        self._services.is_stopping = True
        self._server.end()
        self._waiters.release()
        self._services.coordinators.end()
        self._services.transactions.end()
        await self._server.wait_closed(STOP_GRACE_MS)

    def _missing_at_first_start(self) -> Sequence[int]:
        raft = self._services.raft
        return () if raft is None else raft.status().missing_at_first_start

    async def _register(self) -> None:
        """Register this broker, and wait until the image shows the registration. In a cluster, also wait
        until this broker is unfenced (R20-R23). Does nothing on a node that is only a controller."""
        if not self.config.is_broker:
            if self._start is not None and self._start.is_copy:
                self._service_tasks.start(self._accept_copy(self._start), name="copied directory")
            return
        store = self._store
        registration = Registration(
            self._node,
            self.config,
            self._clock,
            self._services.controller,
            self._channel(self._services.controller, "heartbeat"),
            addresses=self._registered_addresses,
            directory_id=store.identity.directory_id,
            clean_broker_epoch=store.last_broker_epoch if store.clean_start else NO_BROKER_EPOCH,
            start_count=0 if self._start is None else self._start.number,
            damaged=self._services.partitions.damaged,
            on_waiting=self._server.refuse,
            missing_at_first_start=self._missing_at_first_start,
        )
        await registration.register()
        if self._start is not None and self._start.is_copy:
            self._start.accept_copy()  # the image has the registration, so this node has caught up
        if self._cluster is not None:
            await registration.wait_unfenced()
            self._registration = registration
            self._services.partitions.on_offline = registration.hurry
            self._service_tasks.start(registration.heartbeat_forever(), name="heartbeats")

    async def _accept_copy(self, start: Start) -> None:
        """Accept a copied directory when this controller has caught up with a leader (R59)."""
        assert self._cluster is not None
        while not self._cluster.has_caught_up:
            await self._clock.sleep_ms(TICK_INTERVAL_MS)
        start.accept_copy()

    async def _begin_replication(self) -> None:
        services = self._services
        if services.peers is None or not self.config.is_broker:
            return
        from kafkalite.broker.replication.replica_manager import ReplicaManager

        manager = services.replicas = ReplicaManager(services, services.peers, services.channel)
        self._started.append(("replication", manager.stop))
        await manager.start()

    async def _begin_housekeeping(self) -> None:
        self._housekeeping = Housekeeping(
            self.config, self._clock, self._services.partitions, self._store, self._scheduler
        )
        self._housekeeping.start(self._service_tasks)
        mover = self._services.mover
        if self._store.are_several:
            self._service_tasks.start_when(mover.has_moves, mover.move_forever, name="moves")
        self._service_tasks.start_when(self._server.has_connections, self._server.reap_forever, name="reaper")

    def _request_stop(self) -> None:
        """Begin a clean stop in the next iteration of the loop, so that the response to the request for the
        stop is written first."""
        asyncio.get_running_loop().call_soon(self._begin_stop)

    def _begin_stop(self) -> None:
        if self._stopping is None and self._state == "running":
            self._stopping = asyncio.get_running_loop().create_task(
                self._do_stop(is_clean=self._failure is None), name="stop"
            )


async def _is_refused(address: str) -> bool:
    address = without_security(address)
    return await transport_for(address).is_refused(address)


def _unexpected(error: BaseException) -> BaseException | None:
    """Return ``error`` if its traceback must be logged. Return None for a KafkaliteError, whose message
    suffices."""
    return None if isinstance(error, KafkaliteError) else error
