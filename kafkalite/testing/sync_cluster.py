"""SyncCluster: a Cluster in a thread of its own, for tests with and without an event loop.

Its brokers listen on ``inproc`` across threads: clients in any event loop of the process reach them at
``bootstrap_servers``.
"""

# Tests: tests/testing/test_cluster.py

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Self, TypeVar

from kafkalite.broker.server.metrics import BrokerStatistics
from kafkalite.loop_thread import LoopThread
from kafkalite.model import Record
from kafkalite.protocol.api import ApiKey
from kafkalite.testing.cluster import READ_TIMEOUT_MS, Cluster
from kafkalite.testing.faults import Fault

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0


class SyncCluster:
    """The blocking twin of Cluster. Takes the same arguments."""

    def __init__(self, brokers: int = 1, **settings: Any) -> None:
        self._cluster = Cluster(brokers, **settings)
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<Sync{repr(self._cluster)[1:]}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def start(self, *node_ids: int) -> None:
        if self._thread is None:
            self._thread = LoopThread("kafkalite-cluster", asyncio.new_event_loop())
        self._run(self._cluster.start(*node_ids))

    def stop(self, *node_ids: int) -> None:
        self._run(self._cluster.stop(*node_ids))

    def restart(self, *node_ids: int) -> None:
        self._run(self._cluster.restart(*node_ids))

    def kill(self, *node_ids: int) -> None:
        self._run(self._cluster.kill(*node_ids))

    def crash(self, *node_ids: int) -> None:
        self._run(self._cluster.crash(*node_ids))

    def close(self) -> None:
        if self._thread is not None:
            try:
                self._run(self._cluster.close())
            finally:
                self._thread.close()
                self._thread = None

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            coroutine.close()
            raise AssertionError("the cluster is not started")
        return self._thread.run(coroutine, CALL_TIMEOUT_S)

    @property
    def cluster(self) -> Cluster:
        """The Cluster inside. It runs in another thread: read it, but change it only through this object."""
        return self._cluster

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all brokers, for clients in any thread and event loop."""
        return self._cluster.bootstrap_servers

    @property
    def address(self) -> str:
        return self._cluster.broker.address

    @property
    def controller_id(self) -> int | None:
        """The active controller; None if there is none."""
        return self._asked(lambda: self._cluster.controller_id)

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the leader of the partition; -1: none."""
        return self._asked(lambda: self._cluster.leader(topic, partition))

    def statistics(self, node_id: int | None = None) -> BrokerStatistics:
        return self._asked(lambda: self._cluster.statistics(node_id))

    def wait_until(
        self, condition: Callable[[Cluster], object], *, timeout_ms: int = READ_TIMEOUT_MS, what: str = ""
    ) -> None:
        """Return when ``condition(cluster)``, run in the cluster's thread, is true. Raises AssertionError."""
        cluster = self._cluster
        self._run(cluster.wait_until(lambda: condition(cluster), timeout_ms=timeout_ms, what=what))

    def _asked(self, question: Callable[[], T]) -> T:
        async def ask() -> T:
            return question()

        return self._run(ask())

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        *,
        replication_factor: int = -1,
    ) -> None:
        self._run(
            self._cluster.create_topic(name, partitions, configs, replication_factor=replication_factor)
        )

    def produce(self, topic: str, values: Iterable[bytes], *, partition: int | None = None) -> None:
        """Send ``values`` and wait until all are acknowledged."""
        self._run(self._cluster.produce(topic, values, partition=partition))

    def records(self, topic: str) -> list[Record]:
        """Return every record of the topic that can be read now, partition by partition."""
        return self._run(self._cluster.records(topic))

    def intercept(self, api: ApiKey, fault: Fault | None, *, node_id: int | None = None) -> None:
        self._asked(lambda: self._cluster.intercept(api, fault, node_id=node_id))

    def advance(self, duration_ms: int) -> None:
        """Advance the virtual clock, which the cluster must have been given."""
        self._run(self._cluster.advance(duration_ms))
