"""The way to one coordinator: found when it is first needed, found again when another took over.

A group's coordinator, or a transactional id's, leads a partition of an internal topic, and moves when that
partition's leader does. Whoever talks to one need not care: ``CoordinatorLink.call`` asks, and asks again
whoever coordinates by then, until there is an answer or no time left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

from kafkalite.client.cluster.client import MAIN_LANE, ClusterClient
from kafkalite.client.cluster.connection import Answer, Connection
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

    ``key_type`` is GROUP_KEY or TRANSACTION_KEY. Requests go on ``lane``, unless a call names another.
    Requests may be sent twice (an answer was lost), so only those that bear it go this way.
    """

    def __init__(self, cluster: ClusterClient, key_type: int, key: str, *, lane: int = MAIN_LANE) -> None:
        self.node_id: int | None = None  #: of the coordinator as far as we know
        self.key_type = key_type
        self.key = key
        self._cluster = cluster
        self._lane = lane
        self._finding: asyncio.Task[int | KafkaliteError] | None = None
        pause_ms = min(FIRST_PAUSE_MS, cluster.config.retry_backoff_ms)
        self._backoff = Backoff(pause_ms, cluster.config.retry_backoff_max_ms)

    def __repr__(self) -> str:
        kind = "group" if self.key_type == GROUP_KEY else "transactional id"
        return f"<CoordinatorLink of {kind} {self.key!r}, node {self.node_id}>"

    async def call(
        self, request: Any, *, timeout_ms: int | None = None, wait_ms: int = 0, lane: int | None = None
    ) -> Any:
        """The coordinator's answer to ``request``, a response struct.

        What passes (a coordinator that moves, loads or is away) is tried again until ``timeout_ms``
        (None: default.api.timeout.ms). ``wait_ms`` is how long the coordinator may hold the answer by itself.
        Raises the response's BrokerError; RequestTimeoutError, caused by the last error, when time is up.
        """
        deadline_ms = self._deadline_ms(timeout_ms)
        ask = partial(self._ask, request, wait_ms, self._lane if lane is None else lane)
        return await self._until(deadline_ms, ask, type(request).__name__.removesuffix("Request"))

    async def attempt(self, request: Any, *, wait_ms: int = 0, lane: int | None = None) -> Any:
        """As ``call``, tried once: raises also what may pass. For requests that must not be sent twice."""
        try:
            return await self._ask(request, wait_ms, self._lane if lane is None else lane)
        except _MOVED:
            self.node_id = None
            raise

    async def find(self, *, timeout_ms: int | None = None) -> int:
        """The coordinator's node id. Raises as ``call``."""
        return await self._until(self._deadline_ms(timeout_ms), self._find, "FindCoordinator")

    def _deadline_ms(self, timeout_ms: int | None) -> int:
        if timeout_ms is None:
            timeout_ms = self._cluster.config.default_api_timeout_ms
        return self._cluster.now_ms() + timeout_ms

    async def _until(self, deadline_ms: int, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        """What ``attempt`` returns, tried until ``deadline_ms``."""
        cluster = self._cluster
        failures = 0
        cause: KafkaliteError | None = None
        while True:
            try:
                left_s = max(1, deadline_ms - cluster.now_ms()) / 1000
                async with asyncio.timeout(left_s):  # also of a search, or of a connection that hangs
                    return await attempt()
            except (*_MOVED, *_PASSING, TimeoutError) as error:
                if isinstance(error, _MOVED):
                    self.node_id = None
                if isinstance(error, KafkaliteError):
                    cause = error
                failures += 1
                pause_ms = self._backoff.delay_ms(failures, cluster.rng.random())
                if cluster.now_ms() + pause_ms >= deadline_ms:
                    raise RequestTimeoutError(
                        f"{what} came to nothing in time with the coordinator of {self.key!r}: "
                        f"{cause or 'it did not answer'}"
                    ) from cause
                await asyncio.sleep(pause_ms / 1000)

    async def _ask(self, request: Any, wait_ms: int, lane: int) -> Any:
        """One attempt. Raises what went wrong with it."""
        cluster = self._cluster
        node_id = await self._find()
        connection = await cluster.connection(node_id, lane)
        asked = asyncio.ensure_future(
            connection.call(request, timeout_ms=cluster.config.request_timeout_ms + wait_ms)
        )
        try:
            while not (await asyncio.wait({asked}, timeout=PATIENCE_S + wait_ms / 1000))[0]:
                await self._give_up_if_moved(connection, node_id)
            return asked.result().message
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # seen, also when nobody waits any more

    async def _give_up_if_moved(self, connection: Connection, node_id: int) -> None:
        """Leave a coordinator that does not answer once the others name another one."""
        self.node_id = None
        try:
            found = await self._find()
        except KafkaliteError:
            found = node_id
        self.node_id = found
        if found != node_id:
            connection.give_up()

    async def _find(self) -> int:
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
            answer: Answer = await self._cluster.ask_anybody(
                FindCoordinatorRequest(self.key_type, [self.key])
            )
            (found,) = answer.message.coordinators
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
