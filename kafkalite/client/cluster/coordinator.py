"""The way to one coordinator: found when it is first needed, found again when another took over.

A group's coordinator, or a transactional id's, leads a partition of an internal topic, and moves when that
partition's leader does. Whoever talks to one need not care: ``CoordinatorLink.call`` asks, and asks again
whoever coordinates by then, until there is an answer or no time left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import CallPlan, CallRules, judge_by_class
from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.cluster.connection import Connection, Response
from kafkalite.client.cluster.retry import Backoff
from kafkalite.errors import (
    BrokerError,
    ClientClosedError,
    ConnectionFailedError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    KafkaliteError,
    KafkaStorageError,
    NotCoordinatorError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    RequestTimedOutError,
    RequestTimeoutError,
    ShuttingDownError,
    broker_error,
)
from kafkalite.protocol.messages.groups import FindCoordinatorRequest

T = TypeVar("T")

GROUP_KEY: Final = 0  #: a group's name
TRANSACTION_KEY: Final = 1  #: a transactional id, or a transaction group's application id

# The first pause before the coordinator is looked for again; it doubles up to retry.backoff.max.ms.
FIRST_PAUSE_MS: Final = 10

# An answer that is late by so much makes us ask the others who coordinates now.
PATIENCE_S: Final = 2.0

# Another may coordinate by now, or this one soon: ask again where it is.
_MOVED: Final = (
    NotCoordinatorError,
    CoordinatorNotAvailableError,
    CoordinatorLoadInProgressError,
    ConnectionFailedError,
    RequestTimeoutError,
    ShuttingDownError,
    KafkaStorageError,
)
# What every coordinator may answer for a while; what is asked of one may be asked twice.
_PASSING: Final = (NotEnoughReplicasError, NotEnoughReplicasAfterAppendError, RequestTimedOutError)


class CoordinatorLink:
    """Requests to whoever coordinates ``key``.

    ``key_type`` is GROUP_KEY or TRANSACTION_KEY. Requests go on ``purpose``, unless a call names another.
    Requests may be sent twice (an answer was lost), so only those that bear it go this way.
    """

    def __init__(
        self, cluster: ClusterClient, key_type: int, key: str, *, purpose: Purpose = Purpose.MAIN
    ) -> None:
        self.node_id: int | None = None  #: of the coordinator as far as we know
        self.key_type = key_type
        self.key = key
        self._cluster = cluster
        self._purpose = purpose
        self._finding: asyncio.Task[int | KafkaliteError] | None = None
        pause_ms = min(FIRST_PAUSE_MS, cluster.config.retry_backoff_ms)
        self._rules = CallRules(
            judge_by_class(_MOVED, _PASSING), Backoff(pause_ms, cluster.config.retry_backoff_max_ms)
        )

    def __repr__(self) -> str:
        kind = "group" if self.key_type == GROUP_KEY else "transactional id"
        return f"<CoordinatorLink of {kind} {self.key!r}, node {self.node_id}>"

    async def call(
        self, request: Any, *, timeout_ms: int | None = None, wait_ms: int = 0, purpose: Purpose | None = None
    ) -> Any:
        """The coordinator's answer to ``request``, a response struct.

        What passes (a coordinator that moves, loads or is away) is tried again until ``timeout_ms``
        (None: default.api.timeout.ms). ``wait_ms`` is how long the coordinator may hold the answer by itself.
        Raises the response's BrokerError; RequestTimeoutError, caused by the last error, when time is up.
        """
        what = type(request).__name__.removesuffix("Request")
        return await self._drive(
            what, timeout_ms, request, wait_ms, self._purpose if purpose is None else purpose
        )

    async def attempt(self, request: Any, *, wait_ms: int = 0, purpose: Purpose | None = None) -> Any:
        """As ``call``, tried once: raises also what may pass. For requests that must not be sent twice."""
        try:
            node_id = await self._locate()
            connection = await self._cluster.connection(
                node_id, self._purpose if purpose is None else purpose
            )
            return await self._ask(connection, node_id, request, wait_ms)
        except _MOVED:
            self.node_id = None
            raise

    async def find(self, *, timeout_ms: int | None = None) -> int:
        """The coordinator's node id. Raises as ``call``."""
        node_id: int = await self._drive("FindCoordinator", timeout_ms, None, 0, self._purpose)
        return node_id

    async def _drive(
        self, what: str, timeout_ms: int | None, request: Any, wait_ms: int, purpose: Purpose
    ) -> Any:
        """Return the response to ``request``; the coordinator's node id if it is None."""
        cluster = self._cluster
        now_ms = cluster.now_ms()
        if timeout_ms is None:
            timeout_ms = cluster.config.default_api_timeout_ms
        cause: KafkaliteError | None = None  # the last error other than the deadline

        async def in_time(step: Awaitable[T]) -> T:
            nonlocal cause
            try:
                async with asyncio.timeout(max(1, now_ms + timeout_ms - cluster.now_ms()) / 1000):
                    return await step
            except TimeoutError:
                raise RequestTimeoutError("the coordinator did not respond") from None
            except KafkaliteError as error:
                cause = error
                if isinstance(error, _MOVED):
                    self.node_id = None
                raise

        async def locate() -> int:
            return await in_time(self._locate())

        async def dial(node_id: int | None) -> tuple[int, Connection | None]:
            assert node_id is not None, "a coordinator is one node"
            return node_id, await in_time(cluster.connection(node_id, purpose)) if request else None

        async def send(to: tuple[int, Connection | None], _timeout_ms: int) -> Any:
            node_id, connection = to
            return await in_time(self._ask(connection, node_id, request, wait_ms)) if connection else node_id

        def timeout_error(_last: KafkaliteError) -> KafkaliteError:
            error = RequestTimeoutError(
                f"{what} did not succeed in time with the coordinator of {self.key!r}: "
                f"{cause or 'it did not respond'}"
            )
            error.__cause__ = cause
            return error

        plan = CallPlan(self._rules, now_ms=now_ms, timeout_ms=timeout_ms, timeout_error=timeout_error)
        return await drive(plan, locate=locate, dial=dial, send=send, chance=cluster.rng.random)

    async def _ask(self, connection: Connection, node_id: int, request: Any, wait_ms: int) -> Any:
        """Send ``request`` once and return the response. Raises any error of the attempt."""
        asked = asyncio.ensure_future(
            connection.call(request, timeout_ms=self._cluster.config.request_timeout_ms + wait_ms)
        )
        try:
            while not (await asyncio.wait({asked}, timeout=PATIENCE_S + wait_ms / 1000))[0]:
                await self._give_up_if_moved(connection, node_id)
            return asked.result().message
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # retrieved, also if the caller is gone

    async def _give_up_if_moved(self, connection: Connection, node_id: int) -> None:
        """Leave a coordinator that does not answer once the others name another one."""
        self.node_id = None
        try:
            found = await self._locate()
        except KafkaliteError:
            found = node_id
        self.node_id = found
        if found != node_id:
            connection.give_up()

    async def _locate(self) -> int:
        """The coordinator's node id, asked for once by all who need it now. Raises KafkaliteError."""
        if self.node_id is not None:
            return self.node_id
        if self._cluster.is_closed:
            raise ClientClosedError("the client is closed")
        if self._finding is None:
            self._finding = self._cluster.spawn(self._find_in_background())
        finding = self._finding
        try:
            outcome = await asyncio.shield(finding)
        except asyncio.CancelledError:
            if finding.cancelled() and self._cluster.is_closed:  # not who waits here was cancelled
                raise ClientClosedError("the client is closed") from None
            raise
        if isinstance(outcome, KafkaliteError):
            raise outcome
        return outcome

    async def _find_in_background(self) -> int | KafkaliteError:
        try:
            response: Response = await self._cluster.call_any_broker(
                FindCoordinatorRequest(self.key_type, [self.key])
            )
            (found,) = response.message.coordinators
            if found.error_code:
                raise _named(broker_error(found.error_code, found.error_message or ""), self.key)
        except KafkaliteError as error:
            return error
        else:
            self._cluster.metadata.addresses.setdefault(found.node_id, found.address)
            self.node_id = int(found.node_id)
            return self.node_id
        finally:
            self._finding = None


def _named(error: BrokerError, key: str) -> BrokerError:
    """The error with the key that was asked for, where it does not say it."""
    if key and key not in error.message:
        error.message = f"{key!r}: {error.message}"
    return error
