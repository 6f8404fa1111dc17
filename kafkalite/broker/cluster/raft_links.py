"""The links over which this node sends Raft messages to the other voters and to observers.

Node A sends its messages to B as RaftMessages requests on a connection that A opened. Each response
acknowledges that the messages have arrived. Because Raft sends heartbeats regularly, a missing response
reveals a peer that is down. A link preserves the order of messages and bounds its queue: it drops messages
beyond the bound, which Raft tolerates. Runs on the loop of Raft.
"""

# Tests: tests/broker/test_cluster_parts.py

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kafkalite.broker.tasks import cancel_all
from kafkalite.client.cluster.authentication import Authenticator
from kafkalite.client.cluster.connection import Connection
from kafkalite.errors import BrokerError, KafkaliteError
from kafkalite.limits import MAX_INTEGERS_PER_LIST, MIB
from kafkalite.log_fields import Fields
from kafkalite.protocol.messages.cluster import FeatureRange, RaftMessagesRequest, RaftMessagesRequestV1
from kafkalite.raft.transport import RaftTransport
from kafkalite.rng import Rng

logger = logging.getLogger(__name__)

#: A connection without a response for this long is closed, and its peer dialled again.
ANSWER_TIMEOUT_MS: Final = 4_000
CONNECT_TIMEOUT_MS: Final = 2_000
FIRST_BACKOFF_S: Final = 0.02
MAX_BACKOFF_S: Final = 0.5
MAX_WAITING_BYTES: Final = 32 * MIB
MAX_REQUEST_BYTES: Final = 8 * MIB
MAX_REQUESTS_IN_FLIGHT: Final = 64
DRAIN_INTERVAL_S: Final = 0.005
DRAIN_TRIES: Final = 20
#: While connecting to a peer keeps failing, one failure of this many is logged.
LOG_EVERY: Final = 60
LATE_FAILURES: Final = 5


class RaftLink:
    """A ``PeerLink`` over one connection, with a bounded queue. Its methods never block and never raise."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._request = RaftMessagesRequestV1 if self.version else RaftMessagesRequest
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_scheduled = False
        self.dropped_count = 0

    @property
    def version(self) -> int:
        """The newest version of RaftMessages that this node and the peer support (R90)."""
        return int(self._connection.supports(RaftMessagesRequestV1))

    @property
    def is_busy(self) -> bool:
        """Whether the open connection has messages that are queued or not yet acknowledged."""
        return self._connection.is_open and bool(self._waiting or self._connection.in_flight)

    def send(self, message: bytes) -> None:
        if not self._connection.is_open or self._waiting_bytes + len(message) > MAX_WAITING_BYTES:
            self.dropped_count += 1
            return
        self._waiting.append(message)
        self._waiting_bytes += len(message)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send queued messages in few requests, up to MAX_REQUESTS_IN_FLIGHT."""
        self._is_scheduled = False
        connection = self._connection
        while self._waiting and connection.is_open and connection.in_flight < MAX_REQUESTS_IN_FLIGHT:
            parts: list[bytes] = []
            size_bytes = 0
            while self._waiting and len(parts) < MAX_INTEGERS_PER_LIST:
                if parts and size_bytes + len(self._waiting[0]) > MAX_REQUEST_BYTES:
                    break
                parts.append(self._waiting.popleft())
                size_bytes += len(parts[-1])
            self._waiting_bytes -= size_bytes
            request = self._request([len(part) for part in parts])
            try:
                connection.request(request, self._on_response, ANSWER_TIMEOUT_MS, parts)
            except KafkaliteError:  # the connection was just closed: the link is replaced soon
                return

    def _on_response(self, _message: Any, _payload: memoryview, error: Exception | None) -> None:
        if isinstance(error, BrokerError):  # the peer does not accept this node's identity
            self._connection.close()
        elif self._waiting and error is None:
            self._flush()


class RaftLinks:
    """Keeps a link to every other voter and observer that can be reached."""

    def __init__(
        self,
        transport: RaftTransport,
        *,
        node_id: int,
        voters: Mapping[int, str],
        authenticator: Authenticator,
        rng: Rng,
    ) -> None:
        self._transport = transport
        self._node_id = node_id
        self._first = voters
        self._peers: dict[int, str] = {}
        self._client_id = f"raft-{node_id}"
        self._authenticator = authenticator
        self._rng = rng
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_running = False
        self._links: dict[int, RaftLink] = {}
        #: By id of a connected voter: the feature levels that its program supports. Read in any thread.
        self.features: dict[int, Sequence[FeatureRange] | None] = {}

    async def start(self) -> None:
        """Start dialling. Call it on the Raft loop."""
        self._is_running = True
        self.use(self._first)

    def use(self, addresses: Mapping[int, str]) -> None:
        """Keep links to these nodes, except this one, and no others. Call it on the Raft loop.

        A node without an address is not dialled.
        """
        if not self._is_running:
            return
        wanted = {peer: address for peer, address in sorted(addresses.items()) if address}
        wanted.pop(self._node_id, None)
        for peer_id, address in self._peers.items():
            if wanted.get(peer_id) != address:
                self._tasks.pop(peer_id).cancel()
        loop = asyncio.get_running_loop()
        for peer_id, address in wanted.items():
            if self._peers.get(peer_id) != address:
                self._tasks[peer_id] = loop.create_task(
                    self._keep(peer_id, address), name=f"Raft link to node {peer_id}"
                )
        self._peers = wanted

    async def stop(self) -> None:
        """Wait a short time for queued messages to arrive, then close the links. Call it on the Raft loop."""
        for _ in range(DRAIN_TRIES):
            if not any(link.is_busy for link in self._links.values()):
                break
            await asyncio.sleep(DRAIN_INTERVAL_S)
        self._is_running = False
        await cancel_all(list(self._tasks.values()))
        self._tasks.clear()

    async def _keep(self, peer_id: int, address: str) -> None:
        """Connect to the peer, use the connection until it is lost, and repeat this forever."""
        backoff_s = FIRST_BACKOFF_S
        failures, was_refused = 0, False
        while True:
            try:
                connection = await self._authenticator.dial(
                    address, peer_id, client_id=self._client_id, timeout_ms=CONNECT_TIMEOUT_MS
                )
            except KafkaliteError as error:
                is_refused = isinstance(error, BrokerError)
                if is_refused != was_refused:
                    was_refused, failures = is_refused, 0
                # Log an unreachable node later than a refusal: while a cluster starts, it may not run yet.
                if failures % LOG_EVERY == (0 if is_refused else LATE_FAILURES):
                    logger.warning(
                        "controller not reached %s", Fields(node=peer_id, address=address, error=error)
                    )
                failures += 1
                await asyncio.sleep(backoff_s * (0.5 + self._rng.random()))
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
                continue
            backoff_s, failures = FIRST_BACKOFF_S, 0
            await self._use(peer_id, connection)

    async def _use(self, peer_id: int, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()

        def on_lost(_connection: Connection) -> None:
            if not lost.done():
                lost.set_result(None)

        connection.on_lost = on_lost
        link = RaftLink(connection, loop)
        self._transport.attach(peer_id, link, link.version)
        self._links[peer_id], self.features[peer_id] = link, connection.peer_features
        try:
            if connection.is_open:
                await lost
        finally:
            self._transport.detach(peer_id, link)
            if self._links.get(peer_id) is link:
                del self._links[peer_id]
                del self.features[peer_id]
            connection.close()
