"""Requests to a coordinator, which is located when it is first needed and again when it has moved.

The coordinator of a group or a transactional id is the leader of a partition of an internal topic. When that
leader changes, so does the coordinator. ``CoordinatorLink.call`` hides this: it retries with the current
coordinator until a response arrives, an error is final, or the time limit has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import CallPlan, CallRules, judge_by_class
from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.cluster.connection import Connection, Response
from kafkalite.client.cluster.retry import Backoff, is_retriable
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

GROUP_KEY: Final = 0  #: the key is a group id
TRANSACTION_KEY: Final = 1  #: the key is a transactional id, or the application id of a transaction group

# The first pause before the coordinator is located again. It doubles up to retry.backoff.max.ms.
FIRST_PAUSE_MS: Final = 10

# If a response is late by this much, other brokers are asked for the current coordinator.
PATIENCE_S: Final = 2.0

# After these errors, the coordinator is located again, because it may have moved.
_MOVED: Final = (
    NotCoordinatorError,
    CoordinatorNotAvailableError,
    CoordinatorLoadInProgressError,
    ConnectionFailedError,
    RequestTimeoutError,
    ShuttingDownError,
    KafkaStorageError,
)
# Temporary errors of any coordinator. The request is sent to the same one again.
_PASSING: Final = (NotEnoughReplicasError, NotEnoughReplicasAfterAppendError, RequestTimedOutError)


class CoordinatorLink:
    """Sends requests to the coordinator of ``key``.

    ``key_type`` is GROUP_KEY or TRANSACTION_KEY. ``call`` sends a request again if its response is lost, so
    only idempotent requests may be sent with it.
    """

    def __init__(self, cluster: ClusterClient, key_type: int, key: str) -> None:
        self.node_id: int | None = None  #: the coordinator's node id, if known
        self.key_type = key_type
        self.key = key
        self._cluster = cluster
        self._finding: asyncio.Task[int | KafkaliteError] | None = None
        pause_ms = min(FIRST_PAUSE_MS, cluster.config.retry_backoff_ms)
        self._rules = CallRules(
            judge_by_class(_MOVED, _PASSING), Backoff(pause_ms, cluster.config.retry_backoff_max_ms)
        )

    def __repr__(self) -> str:
        kind = "group" if self.key_type == GROUP_KEY else "transactional id"
        return f"<CoordinatorLink of {kind} {self.key!r}, node {self.node_id}>"

    async def call(
        self, request: Any, *, timeout_ms: int | None = None, purpose: Purpose = Purpose.MAIN
    ) -> Any:
        """Send ``request`` and return the response struct.

        Retries while the coordinator moves, loads, is unreachable or cannot write, until ``timeout_ms``
        (None: default.api.timeout.ms) has passed. Then raises RequestTimeoutError, caused by the last error,
        if any. Raises another BrokerError of the response, or of the lookup of the coordinator, at once.
        """
        what = type(request).__name__.removesuffix("Request")
        return await self._drive(what, timeout_ms, request, purpose)

    async def attempt(self, request: Any, *, wait_ms: int = 0, purpose: Purpose = Purpose.MAIN) -> Any:
        """Send ``request`` once, without retries, and return the response struct.

        Use this for requests that must not be sent twice. The coordinator may hold the response for up to
        ``wait_ms``. Raises KafkaliteError.
        """
        try:
            node_id = await self._locate()
            connection = await self._cluster.connection(node_id, purpose)
            response = await self._ask(connection, node_id, request, wait_ms)
        except KafkaliteError as error:
            if is_retriable(error):
                self._cluster.setbacks.note(self, error, self._cluster.now_ms())
            if isinstance(error, _MOVED):
                self.node_id = None
            raise
        self._cluster.setbacks.clear(self)
        return response

    async def find(self) -> int:
        """Return the coordinator's node id. Raises the same errors as ``call``."""
        node_id: int = await self._drive("FindCoordinator", None, None, Purpose.MAIN)
        return node_id

    async def _drive(self, what: str, timeout_ms: int | None, request: Any, purpose: Purpose) -> Any:
        """Send ``request`` with retries and return the response.

        If ``request`` is None, only locates the coordinator and returns its node id. ``what`` names the
        operation in errors.
        """
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
            return await in_time(self._ask(connection, node_id, request, 0)) if connection else node_id

        def timeout_error(_last: KafkaliteError) -> KafkaliteError:
            error = RequestTimeoutError(
                f"{what} did not succeed in time with the coordinator of {self.key!r}: "
                f"{cause or 'it did not respond'}"
            )
            error.__cause__ = cause
            return cluster.explained(error)

        plan = CallPlan(self._rules, now_ms=now_ms, timeout_ms=timeout_ms, timeout_error=timeout_error)
        return await drive(
            plan, locate=locate, dial=dial, send=send, chance=cluster.rng.random, setbacks=cluster.setbacks
        )

    async def _ask(self, connection: Connection, node_id: int, request: Any, wait_ms: int) -> Any:
        """Send ``request`` once and return the response struct. Raises the errors of ``Connection.call``.

        If the response is late and the coordinator has moved, closes the connection, so the request fails.
        """
        asked = asyncio.ensure_future(
            connection.call(request, timeout_ms=self._cluster.config.request_timeout_ms + wait_ms)
        )
        try:
            while not (await asyncio.wait({asked}, timeout=PATIENCE_S + wait_ms / 1000))[0]:
                await self._give_up_if_moved(connection, node_id)
            return asked.result().message
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # retrieves the error, even if the caller was cancelled

    async def _give_up_if_moved(self, connection: Connection, node_id: int) -> None:
        """Close the connection to a slow coordinator if a new lookup returns a different node."""
        self.node_id = None
        try:
            found = await self._locate()
        except KafkaliteError:
            found = node_id
        self.node_id = found
        if found != node_id:
            connection.give_up()

    async def _locate(self) -> int:
        """Return the coordinator's node id. Concurrent callers share one lookup. Raises KafkaliteError."""
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
            # The client was closed; the caller was not cancelled.
            if finding.cancelled() and self._cluster.is_closed:
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
    """Return the error with ``key`` in its message."""
    if key and key not in error.message:
        error.message = f"{key!r}: {error.message}"
    return error
