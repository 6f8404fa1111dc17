"""Connections to other nodes of the cluster. Both sides first prove that they know the cluster's secret."""

# Tests: tests/broker/test_marker_sender.py, tests/integration/test_cluster_metadata.py

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from kafkalite.broker.tasks import SharedTasks
from kafkalite.client.cluster.authentication import Authenticator
from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import RELOCATE, CallPlan, CallRules, Verdict
from kafkalite.client.cluster.connection import Connection
from kafkalite.client.cluster.retry import Backoff
from kafkalite.errors import ConnectionFailedError, KafkaliteError, ShuttingDownError
from kafkalite.metadata.image import ClusterImage
from kafkalite.protocol.messages.cluster import (
    ControllerAddress,
    FetchMetadataRequest,
    FetchMetadataRequestV1,
    FetchMetadataResponse,
    FetchMetadataResponseV1,
)

CONNECT_TIMEOUT_MS: Final = 5_000
TRIES_PER_VOTER: Final = 2
#: The time limit of all attempts to connect together.
CONNECT_LIMIT_MS: Final = 60_000
BACKOFF: Final = Backoff(20, 100)
#: A connection is closed if a response is later than its long poll's maximum wait by this much.
POLL_GRACE_MS: Final = 2_000


class PeerConnections:
    """Keeps one shared connection to every other broker, opened at the first use and again after a loss.

    Responses arrive in the order of the requests, so a long poll delays the responses to later requests.
    """

    def __init__(
        self, image: Callable[[], ClusterImage], authenticator: Authenticator, client_id: str
    ) -> None:
        self._image = image
        self._authenticator = authenticator
        self._client_id = client_id
        self._open: dict[int, tuple[str, Connection]] = {}
        self._dialling: SharedTasks[int, Connection] = SharedTasks()
        self._is_closed = False

    async def connection(self, node_id: int) -> Connection:
        """Return the shared connection to broker ``node_id``. Raises ConnectionFailedError, BrokerError."""
        known = self._open.get(node_id)
        if known is not None:
            address, connection = known
            if connection.is_open and address == self._address(node_id):
                return connection
            del self._open[node_id]
            connection.close()
        return await self._dialling.run(node_id, partial(self._keep, node_id), name=f"dial node {node_id}")

    async def dial(self, node_id: int) -> Connection:
        """Return a new connection that the caller must close. Raises the same errors as ``connection``."""
        address = self._address(node_id)
        return await self._authenticator.dial(
            address, node_id, client_id=self._client_id, timeout_ms=CONNECT_TIMEOUT_MS
        )

    async def close(self) -> None:
        self._is_closed = True
        await self._dialling.close()
        for _, connection in self._open.values():
            connection.close()
        self._open.clear()

    async def _keep(self, node_id: int) -> Connection:
        if self._is_closed:
            raise ShuttingDownError("this node stops")
        address = self._address(node_id)
        connection = await self.dial(node_id)
        self._open[node_id] = (address, connection)
        return connection

    def _address(self, node_id: int) -> str:
        broker = self._image().brokers.get(node_id)
        if broker is None or not broker.addresses:
            raise ConnectionFailedError(f"broker {node_id} has no registered address")
        return broker.addresses[0]


class MetadataSource:
    """Fetches the metadata log from any reachable voter, for a node that does not vote.

    The voters return the addresses of the present voters, which take the place of the configured ones.
    """

    def __init__(self, voters: Mapping[int, str], authenticator: Authenticator, client_id: str) -> None:
        #: {node id: address} of the voters as far as they are known. Kept current.
        self.controllers = dict(voters)
        self._last_voter = -1
        self._authenticator = authenticator
        self._client_id = client_id
        self._connection: Connection | None = None
        self._rules = CallRules(_try_next_voter, BACKOFF, max_failures=TRIES_PER_VOTER * len(voters))

    async def fetch(self, request: FetchMetadataRequest) -> tuple[FetchMetadataResponse, memoryview]:
        """Send ``request`` on the open connection, or on a new one if none is open.

        Returns (response, payload). Raises ConnectionFailedError, RequestTimeoutError, BrokerError. After an
        error, the next call connects to the next voter.
        """
        try:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self._connect()
            if self._connection.supports(FetchMetadataRequestV1):
                request = FetchMetadataRequestV1(*request)
            response = await self._connection.call(request, timeout_ms=request.max_wait_ms + POLL_GRACE_MS)
        except KafkaliteError:
            self.close()
            raise
        if isinstance(response.message, FetchMetadataResponseV1):
            self._use_voters(response.message.voters)
        return response.message, response.payload

    def _use_voters(self, voters: Sequence[ControllerAddress]) -> None:
        listed = {voter.node_id: voter.address for voter in voters if voter.address}
        if listed:
            self.controllers.clear()
            self.controllers.update(sorted(listed.items()))

    async def _connect(self) -> Connection:
        """Return a connection to the next voter that can be reached."""

        async def next_voter() -> int:
            later = [node for node in self.controllers if node > self._last_voter]
            self._last_voter = min(later or self.controllers)
            return self._last_voter

        async def dial_voter(node_id: int | None) -> Connection:
            assert node_id is not None, "next_voter names one"
            address = self.controllers[node_id]
            return await self._authenticator.dial(
                address, node_id, client_id=self._client_id, timeout_ms=CONNECT_TIMEOUT_MS
            )

        async def use(connection: Connection, _timeout_ms: int) -> Connection:
            return connection

        now_ms = int(asyncio.get_running_loop().time() * 1000)
        plan = CallPlan(self._rules, now_ms=now_ms, timeout_ms=CONNECT_LIMIT_MS)
        return await drive(plan, locate=next_voter, dial=dial_voter, send=use)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _try_next_voter(_error: KafkaliteError) -> Verdict:
    return RELOCATE
