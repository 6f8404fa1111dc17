"""Broker: one node. Puts the parts together, starts and stops them in order, and owns every task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self

from kafkalite.broker.answers import Answer, Pending
from kafkalite.broker.config import EMBEDDED_LISTENERS, BrokerConfig
from kafkalite.broker.dispatch import Dispatcher, Interceptor
from kafkalite.broker.events import Fields
from kafkalite.broker.handlers import HANDLERS
from kafkalite.broker.housekeeping import Housekeeping
from kafkalite.broker.inline_executor import InlineExecutor
from kafkalite.broker.metrics import BrokerStatistics, Metrics
from kafkalite.broker.partitions import HostedPartition, Partitions
from kafkalite.broker.server import Server
from kafkalite.broker.services import Client, Services
from kafkalite.broker.sync_scheduler import SyncScheduler
from kafkalite.broker.tasks import TaskSet
from kafkalite.broker.waiters import Waiters
from kafkalite.clock import Clock, SystemClock
from kafkalite.metadata.controller import ControllerSettings, RegisterBroker, RegisteredBroker
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.rng import Rng, system_rng
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.log_store import NO_BROKER_EPOCH, LogStore

logger = logging.getLogger(__name__)

#: How long a stop waits for requests in flight.
STOP_GRACE_MS: Final = 5_000
METADATA_DIRECTORY: Final = "__cluster_metadata"
MEMORY_PATH: Final = "/memory"

Step = tuple[str, Callable[[], Awaitable[None]]]


class Broker:
    """One broker in the running event loop. It never touches signals or loop policies.

    ``Broker()`` keeps everything in memory and listens on a TCP port that the system chooses;
    ``Broker(listeners="inproc://")`` needs no socket. Settings may be given by their Python names, or all at
    once as a BrokerConfig. Opened by ``async with``, or by ``start`` and ``stop``.
    """

    def __init__(
        self,
        config: BrokerConfig | None = None,
        *,
        clock: Clock | None = None,
        rng: Rng | None = None,
        filesystem: FileSystem | None = None,
        **settings: Any,
    ) -> None:
        if config is None:
            config = BrokerConfig.from_settings({"listeners": EMBEDDED_LISTENERS, **settings})
        elif settings:
            raise TypeError("give a BrokerConfig or settings, not both")
        self.config = config
        self._clock = clock or SystemClock()
        self._rng = rng or system_rng()
        self._filesystem = filesystem
        self._metrics = Metrics()
        self._state = "new"
        self._failure: BaseException | None = None
        self._addresses: tuple[str, ...] = ()
        self._started: list[Step] = []  # the ways back, of what was started
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._started_ms = 0
        self._is_clean = True
        self._broker_epoch = NO_BROKER_EPOCH

    def __repr__(self) -> str:
        return f"<Broker {self.config.node_id} {self._state} at {', '.join(self._addresses) or 'no address'}>"

    # --- what users ask

    @property
    def address(self) -> str:
        """The first listener's, as clients connect to it: the port is resolved."""
        assert self._addresses, "the broker is not started"
        return self._addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every listener's, in the order of ``listeners``."""
        return self._addresses

    @property
    def bootstrap_servers(self) -> str:
        """What a client's ``bootstrap_servers`` takes."""
        return self.address

    @property
    def cluster_id(self) -> str:
        return self._services.cluster_id

    @property
    def is_running(self) -> bool:
        return self._state == "running"

    def statistics(self) -> BrokerStatistics:
        """Counts since the start and sizes now."""
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
            appended_batches=metrics.appended_batches,
            appended_bytes=metrics.appended_bytes,
            fetched_bytes=metrics.fetched_bytes,
            sync_rounds=self._scheduler.round_count,
            synced_logs=self._scheduler.synced_count,
            waiting_requests=len(services.waiters),
            task_count=len(self._request_tasks) + len(self._service_tasks),
        )

    @property
    def partitions(self) -> Partitions:
        """What this broker hosts: for tests and tools in the same process."""
        return self._services.partitions

    @property
    def housekeeping(self) -> Housekeeping:
        """The periodic passes, to be run now by tests."""
        return self._housekeeping

    def intercept(self, interceptor: Interceptor | None) -> None:
        """Let ``interceptor`` see every request first (None: no more). For faults in tests."""
        self._dispatcher.interceptor = interceptor

    def handle(self, request: Request, client: Client) -> Answer | Pending:
        """Answer ``request`` past the interceptor, as if ``client`` had sent it."""
        return self._dispatcher.handle(request, client)

    # --- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()
        if self._failure is not None and error is None:
            raise self._failure

    async def start(self) -> None:
        """Return when clients are served. What was started is stopped again if a step fails."""
        assert self._state == "new", "a Broker is started once"
        self._state = "starting"
        self._started_ms = self._clock.monotonic_ms()
        try:
            await self._open_storage()
            await self._load_metadata()
            await self._listen()
            await self._register()
            await self._begin_housekeeping()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self._unwind(is_clean=False)
            self._state = "failed"
            raise
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

    async def stop(self) -> None:
        """Accept no more, answer what is in flight, sync, leave the clean-shutdown marker. Idempotent."""
        await self._stop(is_clean=self._failure is None)

    async def kill(self) -> None:
        """Stop as if the process had died: connections drop, nothing is synced, no marker is left."""
        await self._stop(is_clean=False)

    async def wait_stopped(self) -> None:
        """Return when the broker has stopped. Raises what stopped it, if that was a failure."""
        await self._stopped.wait()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """An invariant is broken, or a part this broker can't be without has ended: stop, uncleanly."""
        if self._failure is not None or self._state not in {"starting", "running"}:
            return
        self._failure = error
        logger.critical("broker stops %s", Fields(broker=self, error=repr(error)), exc_info=error)
        if self._state == "running":
            self._stopping = asyncio.get_running_loop().create_task(
                self._do_stop(is_clean=False), name="stop after a failure"
            )

    async def _stop(self, *, is_clean: bool) -> None:
        if self._state in {"new", "stopped", "failed"}:
            return
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(
                self._do_stop(is_clean=is_clean), name="stop"
            )
        await asyncio.shield(self._stopping)

    async def _do_stop(self, *, is_clean: bool) -> None:
        self._state = "stopping"
        try:
            await self._unwind(is_clean=is_clean)
        finally:
            self._state = "stopped" if self._failure is None else "failed"
            self._stopped.set()
            logger.info("broker stopped %s", Fields(node_id=self.config.node_id, clean=is_clean))

    async def _unwind(self, *, is_clean: bool) -> None:
        """Stop what was started, the last first. A step that fails does not keep the others from running."""
        self._is_clean = is_clean
        failures: list[BaseException] = []
        while self._started:
            name, undo = self._started.pop()
            try:
                await undo()
            except Exception as error:
                logger.exception("stopping failed %s", Fields(step=name))
                failures.append(error)
        if failures and is_clean:
            raise failures[0]

    # --- the steps of a start, each with its way back

    async def _open_storage(self) -> None:
        loop = asyncio.get_running_loop()
        filesystem, is_memory = self._open_filesystem()
        self._executor: Executor = (
            InlineExecutor() if is_memory else ThreadPoolExecutor(2, f"kafkalite-sync-{self.config.node_id}")
        )
        self._started.append(("executor", self._close_executor))
        self._path = self.config.log_dirs or MEMORY_PATH
        self._store = LogStore.open(
            filesystem,
            self._path,
            cluster_id=self.config.cluster_id,
            node_id=self.config.node_id,
            rng=self._rng,
        )
        self._started.append(("log store", self._close_store))
        self._quorum = SingleQuorum(
            None if self._filesystem is None and is_memory else filesystem,
            f"{self._path}/{METADATA_DIRECTORY}",
            node_id=self.config.node_id,
            executor=self._executor,
        )
        self._request_tasks = TaskSet(self.fail)
        self._service_tasks = TaskSet(self.fail)
        self._waiters = Waiters(loop)
        self._scheduler: SyncScheduler[HostedPartition] = SyncScheduler(
            loop, None if is_memory else self._executor, self.fail
        )

    def _open_filesystem(self) -> tuple[FileSystem, bool]:
        """The disk, and whether it is memory: then nothing blocks, and no other thread may touch it."""
        from kafkalite.storage.disk import RealFileSystem
        from kafkalite.storage.memory_filesystem import MemoryFileSystem

        filesystem = self._filesystem
        if filesystem is None:
            filesystem = MemoryFileSystem() if self.config.log_dirs is None else RealFileSystem()
        return filesystem, isinstance(filesystem, MemoryFileSystem)

    async def _close_executor(self) -> None:
        self._executor.shutdown(wait=self._is_clean)

    async def _close_store(self) -> None:
        self._store.close(clean=self._is_clean, broker_epoch=self._broker_epoch)

    async def _load_metadata(self) -> None:
        config = self.config
        settings = ControllerSettings(config.num_partitions, config.default_replication_factor)
        controller = ControllerNode(self._quorum, config.node_id, self._clock, self._rng, settings)
        partitions = Partitions(
            self._store,
            self._path,
            config.node_id,
            config.topic_defaults(),
            self._waiters,
            self._scheduler,
            is_volatile=self._filesystem is None and config.log_dirs is None,
        )
        controller.publishers.append(partitions.publish)
        self._services = Services(
            config,
            self._store.identity.cluster_id,
            self._clock,
            self._metrics,
            self._waiters,
            partitions,
            controller,
            self.fail,
        )
        self._started.append(("controller", self._close_controller))
        await controller.start()
        self._service_tasks.start(controller.watch(), name="watch the controller")

    async def _close_controller(self) -> None:
        await self._request_tasks.cancel()
        await self._service_tasks.cancel()
        await self._scheduler.drain(discard=not self._is_clean)
        await self._services.controller.stop()

    async def _listen(self) -> None:
        config = self.config
        self._dispatcher = Dispatcher(self._services, HANDLERS, self._request_tasks, self.fail)
        self._server = Server(
            self._dispatcher.dispatch,
            self._clock,
            self._metrics,
            max_connections=config.max_connections,
            max_idle_ms=config.connections_max_idle_ms,
            max_request_bytes=config.socket_request_max_bytes,
            max_queued_bytes=config.queued_max_request_bytes,
        )
        self._started.append(("server", self._close_server))
        told = config.advertised_listeners or (None,) * len(config.listeners)
        addresses: list[str] = []
        for address, advertised in zip(config.listeners, told, strict=True):
            resolved = await self._server.listen(address, advertised)
            addresses.append(advertised or resolved)
        self._addresses = tuple(addresses)

    async def _close_server(self) -> None:
        if not self._is_clean:
            await self._server.abort()
            return
        self._services.is_stopping = True
        self._server.end()
        self._waiters.release()
        await self._server.wait_closed(STOP_GRACE_MS)

    async def _register(self) -> None:
        command = RegisterBroker(self.config.node_id, self._addresses, self.config.broker_rack)
        registered: RegisteredBroker = await self._services.controller.submit(command)
        self._broker_epoch = registered.broker_epoch

    async def _begin_housekeeping(self) -> None:
        config = self.config
        self._housekeeping = Housekeeping(
            self._clock,
            self._services.partitions,
            self._store,
            initial_delay_ms=config.log_initial_task_delay_ms,
            retention_interval_ms=config.log_retention_check_interval_ms,
            checkpoint_interval_ms=config.log_flush_offset_checkpoint_interval_ms,
        )
        self._service_tasks.start(self._housekeeping.retain_forever(), name="retention")
        self._service_tasks.start(self._housekeeping.checkpoint_forever(), name="checkpoints")
        self._service_tasks.start(self._server.reap_forever(), name="reaper")
