"""Cluster: real brokers in your event loop, on storage that survives their restarts, with faults on request.

::

    async with Cluster() as cluster:
        await cluster.create_topic("orders", partitions=3)
        async with cluster.producer() as producer:
            await producer.send("orders", b"1")
        cluster.intercept(ApiKey.FETCH, drop_next(2))
        await cluster.restart()
        assert [record.value for record in await cluster.records("orders")] == [b"1"]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from kafkalite.broker.answers import Answer, Pending
from kafkalite.broker.broker import Broker
from kafkalite.broker.metrics import BrokerStatistics
from kafkalite.broker.services import Client
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

if TYPE_CHECKING:
    from kafkalite.client.admin import Admin
    from kafkalite.client.consumer import Consumer
    from kafkalite.client.producer import Producer

_names = count(1)

READ_TIMEOUT_MS: Final = 10_000


class Cluster:
    """One broker for now; ``brokers`` above 1 is refused until there is replication.

    ``storage="memory"`` forgets on ``crash`` what was not synced; ``"disk"`` is a directory that is removed
    at the end. Any further keyword is a broker setting, by its Python name.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        transport: Literal["inproc", "tcp"] = "inproc",
        storage: Literal["memory", "disk"] = "memory",
        clock: Clock | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if brokers != 1:
            raise ConfigError(
                key="brokers", value=brokers, allowed="1: several brokers need replication, not there yet"
            )
        if transport not in {"inproc", "tcp"}:
            raise ConfigError(key="transport", value=transport, allowed="inproc or tcp")
        if storage not in {"memory", "disk"}:
            raise ConfigError(key="storage", value=storage, allowed="memory or disk")
        self.clock: Clock = clock or SystemClock()
        self.rng: Rng = seeded_rng(seed)
        self._settings = settings
        self._is_memory = storage == "memory"
        self._listeners = (
            f"inproc://cluster-{os.getpid()}-{next(_names)}" if transport == "inproc" else "127.0.0.1:0"
        )
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._filesystem: FileSystem | None = None
        self._broker: Broker | None = None
        self._faults: dict[int, Fault] = {}

    def __repr__(self) -> str:
        return f"<Cluster {self._broker!r}>"

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
        await self.close()

    async def start(self) -> None:
        """Start the broker, or start it again after ``stop`` or ``crash``, at the same address."""
        if self._filesystem is None:
            self._filesystem = MemoryFileSystem(crashable=True) if self._is_memory else RealFileSystem()
            if not self._is_memory:
                self._directory = tempfile.TemporaryDirectory(prefix="kafkalite-cluster-")
        log_dirs = self._directory.name if self._directory is not None else "/cluster"
        broker = Broker(
            clock=self.clock,
            rng=self.rng,
            filesystem=self._filesystem,
            **{"listeners": self._listeners, "log_dirs": log_dirs, **self._settings},
        )
        await broker.start()
        broker.intercept(self._intercepted)
        self._broker = broker
        self._listeners = broker.address

    async def stop(self) -> None:
        """Stop the broker in good order; what it stored stays."""
        if self._broker is not None:
            await self._broker.stop()

    async def crash(self) -> None:
        """Kill the broker. In memory, what it had not synced is lost, as by a power failure."""
        await self.broker.kill()
        if isinstance(self._filesystem, MemoryFileSystem):
            self._filesystem.crash(self.rng)

    async def restart(self) -> None:
        """``stop`` and ``start``."""
        await self.stop()
        await self.start()

    async def close(self) -> None:
        """Stop and forget everything."""
        await self.stop()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    # --- what there is

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "the cluster is not started"
        return self._broker

    @property
    def filesystem(self) -> FileSystem:
        """The broker's disk; the one in memory can be made to fail."""
        assert self._filesystem is not None, "the cluster is not started"
        return self._filesystem

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers

    def statistics(self) -> BrokerStatistics:
        return self.broker.statistics()

    # --- clients

    def producer(self, **settings: Any) -> Producer:
        """A Producer of this cluster, to be opened by ``async with``."""
        from kafkalite.client.producer import Producer

        return Producer(self.bootstrap_servers, **settings)

    def consumer(self, *topics: str, **settings: Any) -> Consumer:
        """A Consumer of this cluster, to be opened by ``async with``."""
        from kafkalite.client.consumer import Consumer

        return Consumer(*topics, bootstrap_servers=self.bootstrap_servers, **settings)

    def admin(self, **settings: Any) -> Admin:
        """An Admin of this cluster, to be opened by ``async with``."""
        from kafkalite.client.admin import Admin

        return Admin(self.bootstrap_servers, **settings)

    async def create_topic(
        self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        async with self.admin() as admin:
            await admin.create_topic(name, partitions=partitions, configs=dict(configs or {}))

    async def produce(self, topic: str, values: Iterable[bytes], *, partition: int | None = None) -> None:
        """Send ``values`` and wait until all are acknowledged."""
        async with self.producer() as producer:
            await producer.send_many(topic, list(values), partition=partition)
            await producer.flush()

    async def records(self, topic: str) -> list[Record]:
        """Every record of the topic that can be read now, partition by partition."""
        async with self.admin() as admin:
            described = await admin.describe_topics([topic])
        partitions = [TopicPartition(topic, number) for number in range(len(described[0].partitions))]
        records: list[Record] = []
        async with self.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            starts = await consumer.beginning_offsets(partitions)
            open_ends = {key for key in partitions if starts[key] < ends[key]}
            while open_ends:
                batch = await consumer.get_many(timeout_ms=READ_TIMEOUT_MS)
                assert batch, f"{open_ends} gave nothing for {READ_TIMEOUT_MS} ms"
                records += [r for r in batch if r.offset < ends[TopicPartition(r.topic, r.partition)]]
                for record in batch:
                    key = TopicPartition(record.topic, record.partition)
                    if record.offset >= ends[key] - 1:
                        open_ends.discard(key)
        return sorted(records, key=lambda record: (record.partition, record.offset))

    # --- faults and time

    def intercept(self, api: ApiKey, fault: Fault | None) -> None:
        """Let ``fault`` judge every request of ``api`` from now on; None: no more."""
        if fault is None:
            self._faults.pop(api, None)
        else:
            self._faults[api] = fault

    def _intercepted(self, request: Request, client: Client) -> Answer | Pending | None:
        fault = self._faults.get(request.api_key)
        if fault is None:
            return None
        return fault(request, lambda: self.broker.handle(request, client), self.clock)

    async def advance(self, duration_ms: int) -> None:
        """Move the virtual clock; the cluster must have been given one."""
        assert isinstance(self.clock, VirtualClock), "Cluster(clock=VirtualClock()) has a clock to move"
        await self.clock.advance(duration_ms)
