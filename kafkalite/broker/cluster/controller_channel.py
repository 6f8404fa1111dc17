"""Sends requests to the active controller, which may be in this process or on another node.

A request is sent to the leader of the metadata quorum. If there is no leader, or that node is not the
controller any more or cannot be reached, the request is sent again until its timeout: after a short backoff,
or as soon as this node knows a new leader. A client's command is not sent again if its connection is lost,
because its outcome is unknown. When leadership moves, the connection to the former leader is closed, so that
no request waits for a node that is stopped, partitioned or no longer leads.

A connection returns responses in the order of its requests. So a request that must not wait for others needs
its own channel.
"""

# Tests: tests/broker/test_cluster_parts.py, tests/integration/test_cluster_metadata.py

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import FINAL, RELOCATE, CallPlan, CallRules, Verdict
from kafkalite.client.cluster.retry import Backoff
from kafkalite.clock import Clock
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    ClusterAuthorizationFailedError,
    ConnectionFailedError,
    KafkaliteError,
    LogOfflineError,
    NotControllerError,
    RequestTimedOutError,
    RequestTimeoutError,
    ShuttingDownError,
    broker_error,
)
from kafkalite.limits import bounded_wait_ms
from kafkalite.protocol import codec
from kafkalite.protocol.api import API_BY_REQUEST, API_KEY_BY_REQUEST, APIS
from kafkalite.protocol.messages.cluster import (
    BrokerHeartbeatRequest,
    EnvelopeRequest,
    RegisterBrokerRequest,
    ReportReplicasRequest,
)
from kafkalite.protocol.messages.metadata import DescribeFeaturesRequest, DescribeRecoveryRequest
from kafkalite.raft.controller_node import ControllerNode

if TYPE_CHECKING:
    from kafkalite.client.cluster.authentication import Authenticator
    from kafkalite.client.cluster.connection import Connection

T = TypeVar("T")

CONNECT_TIMEOUT_MS: Final = 2_000
BACKOFF: Final = Backoff(10, 250)
#: The timeout of commands whose client sets none.
DEFAULT_TIMEOUT_MS: Final = 30_000

#: Errors of a node that is not the controller. The request may be sent to the next leader.
_ELSEWHERE: Final = (NotControllerError, ShuttingDownError, ClientError, ClusterAuthorizationFailedError)


class _OutcomeUnknownError(KafkaliteError):
    """The connection was lost while a command was in flight, or no response arrived in time."""


class ControllerChannel:
    """Sends requests to the controller, over one connection. Belongs to the broker's event loop."""

    def __init__(
        self,
        controller: ControllerNode,
        clock: Clock,
        *,
        node_id: int,
        voters: Mapping[int, str],
        authenticator: Authenticator | None,
        client_id: str,
    ) -> None:
        """``voters``: {node id: address} of the controllers, which the caller keeps current."""
        self._controller = controller
        self._clock = clock
        self._node_id = node_id
        self._voters = voters
        self._authenticator = authenticator
        self._client_id = client_id
        self._connection: Connection | None = None
        self._connected_to: int | None = None
        self._connecting = asyncio.Lock()
        self._leader_known = asyncio.Event()
        self._is_closed = False
        self._rules = CallRules(self._judge, BACKOFF, can_wake=True)
        #: Called when the connection to the controller is lost.
        self.on_lost: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<ControllerChannel of node {self._node_id} to {self._connected_to}>"

    async def send(self, request: Any, timeout_ms: int) -> Any:
        """Send a request and return the active controller's response.

        The request must be idempotent, because it may be sent several times. Raises the BrokerError of the
        response, and RequestTimedOutError if no controller responded in time.
        """
        return await self._until(timeout_ms, partial(self._send_once, request))

    async def decide(self, command: Any, *, timeout_ms: int) -> Any:
        """Return the controller's reply to a client's command, as soon as this node's image shows the effect.

        Waits for ``timeout_ms``, but at most MAX_WAIT_MS; for DEFAULT_TIMEOUT_MS if ``timeout_ms`` is 0 or
        less. Raises RequestTimedOutError after that time and if the outcome is unknown, and the BrokerError
        of a refusal.
        """
        timeout_ms = bounded_wait_ms(timeout_ms) if timeout_ms > 0 else DEFAULT_TIMEOUT_MS
        if self._controller.controller_id == self._node_id and self._authenticator is None:
            return await self._locally(self._controller.submit(command), timeout_ms)
        try:
            return await self._until(timeout_ms, partial(self._decide_once, command))
        except _OutcomeUnknownError as error:
            raise RequestTimedOutError(error.message) from error

    async def execute(self, message: Any) -> Any:
        """Have this node's controller decide a request of any node of the cluster, and return the reply.

        Raises NotControllerError, BrokerError. If the controller's log has failed, NotControllerError is
        raised although the outcome is unknown. This is safe because these requests are idempotent, and the
        sender repeats them at the next controller.
        """
        try:
            if isinstance(message, BrokerHeartbeatRequest):
                reply: Any = await self._controller.heartbeat(message, self._clock.monotonic_ms())
            elif isinstance(message, ReportReplicasRequest):
                reply = await self._controller.report_replicas(message)
            elif isinstance(message, DescribeRecoveryRequest):
                reply = self._controller.describe_recovery()
            elif isinstance(message, DescribeFeaturesRequest):
                reply = self._controller.describe_features()
            elif isinstance(message, RegisterBrokerRequest) and self._controller.is_single_node:
                reply = await self._controller.decide_at_once(message)
            else:
                reply = await self._controller.submit(message)
        except LogOfflineError as error:
            raise NotControllerError(error.message) from error
        if reply.error_code:
            raise broker_error(reply.error_code, reply.error_message or "")
        return reply

    def on_leader_change(self, leader_id: int | None, _term: int) -> None:
        """Close the connection if it is not to the new leader, and wake the requests that wait for a
        leader."""
        if self._connection is not None and self._connected_to != leader_id:
            self._connection.close()
        self._leader_known.set()

    def close(self) -> None:
        self._is_closed = True
        self._leader_known.set()
        if self._connection is not None:
            self._connection.close()

    async def _until(self, timeout_ms: int, send: Callable[[Connection | None, int], Awaitable[T]]) -> T:
        """Return the result of ``send(connection, left_ms)``, called with a connection to the controller and
        the time that is left.

        ``connection`` is None if this node is the controller. Raises RequestTimedOutError after
        ``timeout_ms``.
        """
        loop = asyncio.get_running_loop()
        now_ms = int(loop.time() * 1000)

        async def locate() -> int:
            self._leader_known.clear()
            if self._controller.controller_id is None:
                raise NotControllerError("no controller is known")
            return self._controller.controller_id

        async def dial(leader_id: int | None) -> Connection | None:
            if leader_id is None or leader_id == self._node_id:
                return None
            left_ms = now_ms + timeout_ms - int(loop.time() * 1000)
            return await self._connect(leader_id, max(left_ms, 1))

        async def pause(duration_ms: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(duration_ms / 1000):
                    await self._leader_known.wait()

        def timeout_error(last: KafkaliteError) -> KafkaliteError:
            return RequestTimedOutError(f"no controller responded in {timeout_ms} ms: {last.message}")

        plan = CallPlan(self._rules, now_ms=now_ms, timeout_ms=timeout_ms, timeout_error=timeout_error)
        return await drive(plan, locate=locate, dial=dial, send=send, pause=pause)

    def _judge(self, error: KafkaliteError) -> Verdict:
        """Return how to continue after ``error``.

        RELOCATE means to send the request again, to the node that is the controller by then. It is returned
        if ``error`` means that another node may be the controller. Any other error is final, and so is every
        error of a closed channel.
        """
        if not isinstance(error, _ELSEWHERE):
            return FINAL
        return Verdict(limit_ms=0) if self._is_closed else RELOCATE

    async def _locally(self, awaitable: Awaitable[T], timeout_ms: int) -> T:
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
                return await awaitable
        except TimeoutError:
            raise RequestTimedOutError(f"the controller did not respond within {timeout_ms} ms") from None

    async def _send_once(self, request: Any, connection: Connection | None, left_ms: int) -> Any:
        if connection is None:
            return await self._locally(self.execute(request), left_ms)
        return (await connection.call(readable(request, connection), timeout_ms=left_ms)).message

    async def _decide_once(self, command: Any, connection: Connection | None, left_ms: int) -> Any:
        if connection is None:
            return await self._locally(self._controller.submit(command), left_ms)
        api = APIS[API_KEY_BY_REQUEST[type(command)]]
        envelope = EnvelopeRequest(int(api.key), api.max_version, self._client_id)
        try:
            response = await connection.call(
                envelope, timeout_ms=left_ms, payload_parts=[codec.encode(command)]
            )
        except (ConnectionFailedError, ClientClosedError, RequestTimeoutError) as error:
            raise _OutcomeUnknownError(
                f"the connection to the controller was lost; the outcome is not known: {error.message}"
            ) from error
        reply = codec.decode(api.response, bytes(response.payload))
        await self._locally(self._controller.wait_for_offset(response.message.metadata_offset), left_ms)
        return reply

    async def _connect(self, leader_id: int, left_ms: int) -> Connection:
        """Return a connection to the controller ``leader_id``. Raises ConnectionFailedError, BrokerError."""
        if self._authenticator is None:
            raise NotControllerError(
                f"node {leader_id} is the controller, and this node is not part of its cluster"
            )
        async with self._connecting:
            connection = self._connection
            if connection is not None and connection.is_open and self._connected_to == leader_id:
                return connection
            if connection is not None:
                connection.close()
            address = self._voters.get(leader_id)
            if address is None:
                raise NotControllerError(f"the address of controller {leader_id} is not known yet")
            timeout_ms = min(CONNECT_TIMEOUT_MS, left_ms)
            connection = await self._authenticator.dial(
                address, leader_id, client_id=self._client_id, timeout_ms=timeout_ms
            )
            if self._is_closed:
                connection.close()
                raise ShuttingDownError("this node stops")
            connection.on_lost = self._lost
            self._connection, self._connected_to = connection, leader_id
            return connection

    def _lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = self._connected_to = None
            if self.on_lost is not None and not self._is_closed:
                self.on_lost()


def readable(request: Any, connection: Connection) -> Any:
    """Return ``request`` in version 0, without the fields of its version, if the controller at the other end
    does not support that version (R90)."""
    api = API_BY_REQUEST[type(request)]
    if api.version == 0 or connection.supports(type(request)):
        return request
    earlier = APIS[api.key].request
    return earlier(*request[: len(earlier._fields)])
