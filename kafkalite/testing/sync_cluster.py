"""SyncCluster: a Cluster in its own thread, for tests with and without an event loop.

By default, its brokers listen on ``inproc`` across threads, so that clients in any event loop of the process
can connect to ``bootstrap_servers``.
"""

# Tests: tests/testing/test_cluster.py

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.loop_thread import LoopThread
from kafkalite.testing.clients import READ_TIMEOUT_MS
from kafkalite.testing.cluster import Cluster
from kafkalite.testing.requests import RequestLog

P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0


def in_loop(method: Callable[Concatenate[Cluster, P], T]) -> Callable[Concatenate[SyncCluster, P], T]:
    """Return a method that runs ``method``, which is not async, in the cluster's thread, and returns its
    result."""

    @wraps(method)
    def call(twin: SyncCluster, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def called() -> T:
            return method(twin.cluster, *args, **kwargs)

        return twin._run(called())

    return call


@twin_of(Cluster)
class SyncCluster(Twin[Cluster]):
    """A Cluster with blocking methods. It takes the same arguments."""

    @opened_with(Cluster)
    def __init__(self, original: Cluster) -> None:
        self._original = original
        self._own_thread: LoopThread | None = None

    def start(self, *node_ids: int) -> Self:
        if self._own_thread is None:
            self._own_thread = LoopThread("kafkalite-cluster", asyncio.new_event_loop())
        self._run(self._original.start(*node_ids))
        return self

    def close(self) -> None:
        if self._own_thread is not None:
            try:
                super().close()
            finally:
                self._own_thread.close()
                self._own_thread = None

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = CALL_TIMEOUT_S) -> T:
        if self._own_thread is None:
            coroutine.close()
            raise AssertionError("the cluster is not started")
        return self._own_thread.run(coroutine, timeout_s)

    stop = blocking(Cluster.stop)
    restart = blocking(Cluster.restart)
    kill = blocking(Cluster.kill)
    crash = blocking(Cluster.crash)
    create_topic = blocking(Cluster.create_topic)
    produce = blocking(Cluster.produce)  # type: ignore[type-var]
    records = blocking(Cluster.records)  # type: ignore[type-var]
    advance = blocking(Cluster.advance)
    snapshot = blocking(Cluster.snapshot)
    restore = blocking(Cluster.restore)
    reset = blocking(Cluster.reset)
    add_user = blocking(Cluster.add_user)
    login = in_loop(Cluster.login)
    leader = in_loop(Cluster.leader)
    statistics = in_loop(Cluster.statistics)
    intercept = in_loop(Cluster.intercept)

    @property
    def cluster(self) -> Cluster:
        """The original Cluster. It runs in another thread, so only read it; change it through this object."""
        return self._original

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all brokers that were started, for clients in any thread and event loop of the
        process."""
        return self._original.bootstrap_servers

    @property
    def client_settings(self) -> dict[str, Any]:
        """The settings, by Python name, that every client of this cluster needs."""
        return self._original.client_settings

    @property
    def address(self) -> str:
        return self._original.broker.address

    @property
    def requests(self) -> RequestLog:
        """The newest 10,000 requests of clients, including those that a fault refused."""
        return self._original.requests

    @property
    def controller_id(self) -> int | None:
        """The node id of the active controller according to most of the running nodes; None if no running
        node knows it."""
        found: int | None = in_loop(lambda cluster: cluster.controller_id)(self)
        return found

    def wait_until(
        self, condition: Callable[[Cluster], object], *, timeout_ms: int = READ_TIMEOUT_MS, what: str = ""
    ) -> None:
        """Return when ``condition(cluster)``, which runs in the cluster's thread, is true. Raises
        AssertionError after ``timeout_ms``; its message names ``what``, the awaited state."""
        cluster = self._original
        self._run(cluster.wait_until(lambda: condition(cluster), timeout_ms=timeout_ms, what=what))
