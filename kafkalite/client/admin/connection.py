"""What every part of Admin stands on: the connection to the cluster, and how results and errors are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import CoordinatorLink
from kafkalite.client.config import BootstrapServers, CommonSettings, admin_config, merged
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import BrokerError, ClientClosedError, broker_error
from kafkalite.rng import Rng

T = TypeVar("T")

WAY_BACK_MS: Final = 500  #: for an answer, at most


class AdminConnection:
    """Opened by ``async with``, or by ``start`` and ``close``."""

    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.config = admin_config(merged(config, {"bootstrap_servers": bootstrap_servers, **settings}))
        self._cluster = ClusterClient(self.config, rng=rng)
        self._clock = clock or SystemClock()
        self._state = "new"

    def __repr__(self) -> str:
        return f"<Admin {self._state}, {len(self._cluster.metadata.addresses)} brokers>"

    async def start(self) -> Self:
        """Reach the cluster. Raises ConnectionFailedError. ``async with`` does this."""
        if self._state != "new":
            raise ClientClosedError(f"an admin starts once; this one is {self._state}")
        self._state = "closed"
        await self._cluster.start()
        self._state = "open"
        return self

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        self._state = "closed"
        await self._cluster.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClientClosedError(
                f"the admin is {self._state}", hint="open it with 'async with' or start()"
            )

    async def _call(self, request: Any, *, node_id: int | None = None) -> Any:
        self._check_open()
        return (await self._cluster.call(request, node_id=node_id)).message

    async def _call_coordinator(self, key_type: int, key: str, request: Any) -> Any:
        """Ask who coordinates ``key``. Raises the answer's BrokerError."""
        self._check_open()
        return await CoordinatorLink(self._cluster, key_type, key).call(request)

    async def _call_every_broker(self, request: Any) -> dict[int, Any]:
        """{node id: its answer} of every broker that is alive. Raises what one of them raises."""
        self._check_open()
        nodes = sorted(self._cluster.metadata.addresses)
        answers = await asyncio.gather(*(self._call(request, node_id=node_id) for node_id in nodes))
        for node_id, answer in zip(nodes, answers, strict=True):
            raise_first([answer], f"broker {node_id}")
        return dict(zip(nodes, answers, strict=True))

    @property
    def _timeout_ms(self) -> int:
        """How long a broker may take: it is to answer before request.timeout.ms ends the waiting."""
        timeout_ms = self.config.request_timeout_ms
        return max(timeout_ms - WAY_BACK_MS, (timeout_ms + 1) // 2)


def error_of(result: Any, what: str) -> BrokerError | None:
    """The error that a result of an answer tells, about ``what``; None without one."""
    if result.error_code == 0:
        return None
    return broker_error(result.error_code, result.error_message or "", about=what)


def raise_first(results: Iterable[Any], what: str) -> None:
    """Raise the first error among ``results``."""
    for result in results:
        error = error_of(result, what)
        if error is not None:
            raise error


def told(results: dict[T, Any], return_exceptions: bool) -> dict[T, Any]:
    """The results, or the first error with a note on the others."""
    errors = [result for result in results.values() if isinstance(result, BrokerError)]
    if errors and not return_exceptions:
        if len(results) > 1:
            errors[0].add_note(f"{len(errors)} of {len(results)} failed")
        raise errors[0]
    return results
