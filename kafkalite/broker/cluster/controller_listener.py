"""The controller's listener, at which other nodes of the cluster connect. It runs on the loop of Raft.

After a handshake, in which a node proves that it knows the cluster's secret, its other requests are served.
Handshakes and Raft messages are handled on this loop. Every other request is dispatched on the broker's loop,
and its response returns to this loop. If both are the same loop, the request is dispatched directly.
"""

# Tests: tests/client/test_authentication.py

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from kafkalite.broker.server.client import Client
from kafkalite.broker.server.descriptors import current_limits
from kafkalite.broker.server.error_responses import refusal
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import SHUTTING_DOWN, Pending, Refusal, Reply, Response
from kafkalite.broker.server.server import Server
from kafkalite.broker.tasks import cancel_all
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode
from kafkalite.limits import KIB, MIB
from kafkalite.log_fields import Fields
from kafkalite.loop_thread import call_on
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import BadRequest, Request
from kafkalite.protocol.messages.cluster import RaftMessagesRequest, RaftMessagesResponse
from kafkalite.raft.transport import RaftTransport
from kafkalite.transport.tls_context import TlsContext

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS: Final = 1_000
MAX_IDLE_MS: Final = 600_000
MAX_REQUEST_BYTES: Final = 32 * MIB
MAX_QUEUED_BYTES: Final = 256 * MIB
#: The maximum size of a request of a node that has not proved yet that it knows the cluster's secret.
MAX_UNPROVEN_BYTES: Final = 64 * KIB
#: How long a stop waits for responses: enough for decisions in progress, but not for long polls.
STOP_GRACE_MS: Final = 100

#: The requests that a node may send before it is authenticated.
_HANDSHAKE_APIS: Final = frozenset({ApiKey.API_VERSIONS, ApiKey.CLUSTER_HELLO, ApiKey.CLUSTER_PROOF})


async def run_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call ``work`` on ``loop``, which may belong to another thread, and return the result of its coroutine.

    The coroutine is created on ``loop``, so that none is left unawaited if ``loop`` closes first. Raises
    RuntimeError if the loop is closed.
    """
    if loop is asyncio.get_running_loop():
        return await work()
    result: Future[T] = Future()
    begun: list[asyncio.Task[T]] = []

    def begin() -> None:
        if not result.cancelled():
            begun.append(task := loop.create_task(work()))
            task.add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        if task.cancelled():
            result.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            result.set_exception(error)
        else:
            result.set_result(task.result())

    loop.call_soon_threadsafe(begin)
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError:
        call_on(loop, lambda: [task.cancel() for task in begun])
        raise


class ControllerListener:
    """Serves the controller's listener on the Raft loop, and passes requests to the broker's dispatcher."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: RaftTransport,
        greet: Callable[[Request, Client], Response],
        dispatch: Callable[[Request, Client], Response | Pending],
        on_session_lost: Callable[[int], None],
        clock: Clock,
        tls: TlsContext,
    ) -> None:
        """``loop`` is Raft's, and ``greet`` responds to handshakes on it.

        The other callbacks are called on the loop that is running now: ``dispatch`` with each request of an
        authenticated node except handshakes and Raft messages, and ``on_session_lost`` with the id of a
        broker when the connection of its heartbeats has closed. ``tls`` is for an address that begins with ``SSL://``.
        """
        self._loop = loop
        self._broker_loop = asyncio.get_running_loop()
        self._transport = transport
        self._greet = greet
        self._dispatch = dispatch
        self._on_session_lost = on_session_lost
        self.metrics = Metrics()
        descriptors = current_limits(MAX_CONNECTIONS)
        self._server = Server(
            self._on_request,
            clock,
            self.metrics,
            max_connections=descriptors.max_connections,
            max_descriptor=descriptors.max_peer_descriptor,
            max_idle_ms=MAX_IDLE_MS,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_queued_bytes=MAX_QUEUED_BYTES,
            max_unproven_bytes=MAX_UNPROVEN_BYTES,
            on_closed=self._on_closed,
            tls=tls,
        )
        self._reaper: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._server.addresses

    async def start(self, addresses: Sequence[str]) -> None:
        """Listen and serve requests. Call it on the Raft loop. Raises ListenError."""
        for address in addresses:
            await self._server.listen(address, None)
        self._server.open()
        self._reaper = asyncio.get_running_loop().create_task(
            self._server.reap_forever(), name="reaper of the controller's listener"
        )

    async def stop(self, *, is_clean: bool) -> None:
        """Close the connections. If ``is_clean``, first wait up to STOP_GRACE_MS for pending responses. Call
        it on the Raft loop."""
        if self._reaper is not None:
            await cancel_all([self._reaper])
        if is_clean:
            self._server.end()
            await self._server.wait_closed(STOP_GRACE_MS, level=logging.DEBUG)
        else:
            await self._server.abort()

    def _on_request(self, request: Request | BadRequest, client: Client) -> Response | Pending:
        if isinstance(request, BadRequest):
            return Refusal(request.error_code, request.error_message, request.fatal)
        key = request.api_key
        try:
            if key in _HANDSHAKE_APIS:
                return self._greet(request, client)
            if client.node_id is None:
                logger.warning("request refused %s", Fields(peer=client.peer, api_key=key, reason="no proof"))
                return self._refusal()
            if key == ApiKey.RAFT_MESSAGES:
                return self._receive(request, client.node_id)
        except Exception as error:
            return refusal(error)
        return self._cross(request, client)

    def _refusal(self) -> Refusal:
        """Return the response to a request of a peer that has not proved that it is a node of the cluster."""
        return Refusal(
            ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            f"{', '.join(self.addresses)} is a controller's listener, for the nodes of its cluster; brokers "
            "listen at other addresses",
            True,
        )

    def _receive(self, request: Request, node_id: int) -> Reply:
        message: RaftMessagesRequest = request.message
        payload, start = request.payload, 0
        for length_bytes in message.lengths_bytes:
            self._transport.receive(node_id, bytes(payload[start : start + length_bytes]))
            start += length_bytes
        return Reply(RaftMessagesResponse(0, None, len(message.lengths_bytes)))

    def _cross(self, request: Request, client: Client) -> Response | Pending:
        """Dispatch the request on the broker's loop, and return its response on this loop."""
        if self._loop is self._broker_loop:
            return self._dispatch(request, client)
        crossing = Pending()
        return (
            crossing if call_on(self._broker_loop, self._arrive, request, client, crossing) else SHUTTING_DOWN
        )

    def _on_closed(self, client: Client) -> None:
        if client.is_session and client.node_id is not None:
            call_on(self._broker_loop, self._on_session_lost, client.node_id)

    def _arrive(self, request: Request, client: Client, crossing: Pending) -> None:
        def resolve(response: Response) -> None:
            call_on(self._loop, crossing.resolve, response)

        response = self._dispatch(request, client)
        if isinstance(response, Pending):
            response.then(resolve)
        else:
            resolve(response)
