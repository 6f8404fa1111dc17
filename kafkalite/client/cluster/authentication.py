"""Lets two nodes prove to each other that they know the cluster's secret, without sending it (S10).

::

    dialler                                     listener
    ClusterHello(cluster id, node id, nonce)  →
                                              ←  node id, nonce', proof as listener
    ClusterProof(proof as dialler)            →
                                              ←  the connection is authenticated as the dialler's

A proof is the HMAC-SHA256 of everything that identifies this handshake: role, cluster id, both node ids and
both nonces. A proof is therefore invalid for another node, in the other role, or in another handshake. A
listener accepts one proof per challenge: after a wrong proof, the dialler needs a new challenge.

Later messages on the connection are not signed: without TLS, the network between the nodes must be trusted.

An operator's tool that knows the secret authenticates in the same way, with OPERATOR_ID as its node id.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgpack

from kafkalite.client.arguments import checked_name
from kafkalite.client.cluster.connection import Connection, connect
from kafkalite.errors import ClusterAuthorizationFailedError, InconsistentClusterIdError, InvalidRequestError
from kafkalite.protocol.messages.cluster import (
    ClusterHelloRequest,
    ClusterHelloRequestV1,
    ClusterHelloResponse,
    ClusterHelloResponseV1,
    ClusterProofRequest,
    FeatureRange,
)

NONCE_BYTES: Final = 32
OPERATOR_ID: Final = -2  #: takes the place of a node id
_CONTEXT: Final = "kafkalite-cluster-1"

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient
    from kafkalite.client.cluster.login import LoginSteps
    from kafkalite.transport.tls_context import TlsContext

Role = Literal["dialler", "listener"]


class Authenticator:
    """Creates this node's proofs and checks those of other nodes. Immutable, so any thread may use it."""

    def __init__(
        self,
        secret: str,
        cluster_id: str,
        node_id: int,
        random_bytes: Callable[[int], bytes],
        *,
        tls: TlsContext | None = None,
        secret_name: str = "",
        features: Sequence[FeatureRange] = (),
    ) -> None:
        """``tls`` is used by ``dial`` for addresses that begin with ``SSL://`` or ``SASL_SSL://``.

        ``features`` are the levels that this node's program supports, for the nodes that dial it.
        ``secret_name`` names a secret that an operator has given, in the error if it is wrong. "" stands for
        the secret of a node.
        """
        self._key = secret.encode()
        self.cluster_id = cluster_id
        self.node_id = node_id
        self._random_bytes = random_bytes
        self._tls = tls
        self._secret_name = secret_name
        self._features = list(features)

    def __repr__(self) -> str:
        return f"<Authenticator of node {self.node_id} in {self.cluster_id}>"

    def hello(self) -> ClusterHelloRequest:
        return ClusterHelloRequest(self.cluster_id, self.node_id, self._random_bytes(NONCE_BYTES))

    def prove(
        self, hello: ClusterHelloRequest, response: ClusterHelloResponse, expected_node_id: int
    ) -> ClusterProofRequest:
        """Check the listener's proof and return this node's proof.

        Raises ClusterAuthorizationFailedError if the listener's proof is wrong, or if its node id is not
        ``expected_node_id``.
        """
        if response.node_id != expected_node_id:
            raise ClusterAuthorizationFailedError(
                f"node {response.node_id} responded where node {expected_node_id} was expected",
                hint="do two nodes share an address, or a node.id?",
            )
        expected = self._proof("listener", self.node_id, response.node_id, hello.nonce, response.nonce)
        if len(response.nonce) != NONCE_BYTES or not hmac.compare_digest(expected, response.proof):
            if self._secret_name:
                raise ClusterAuthorizationFailedError(
                    f"{self._secret_name} is not the cluster.secret of node {response.node_id}",
                    hint="pass the cluster.secret of the nodes",
                )
            raise ClusterAuthorizationFailedError(
                f"node {response.node_id} does not know this cluster's secret",
                hint="cluster.secret must be the same on every node",
            )
        return ClusterProofRequest(
            self._proof("dialler", self.node_id, response.node_id, hello.nonce, response.nonce)
        )

    async def dial(self, address: str, node_id: int, *, client_id: str, timeout_ms: int) -> Connection:
        """Return a connection to ``node_id`` at ``address`` on which both sides are authenticated.

        Raises ConnectionFailedError and RequestTimeoutError. Raises a BrokerError if the other node refuses
        this node or does not belong to the cluster.
        """
        connection = await connect(address, client_id=client_id, timeout_ms=timeout_ms, tls=self._tls)
        try:
            hello = self.hello()
            if connection.supports(ClusterHelloRequestV1):
                hello = ClusterHelloRequestV1(*hello)
            response = await connection.call(hello, timeout_ms=timeout_ms)
            if isinstance(response.message, ClusterHelloResponseV1):
                connection.peer_features = response.message.features
            proof = self.prove(hello, response.message, node_id)
            await connection.call(proof, timeout_ms=timeout_ms)
        except BaseException:
            connection.close()
            raise
        return connection

    def challenge(self, hello: ClusterHelloRequest) -> tuple[ClusterHelloResponse, Challenge]:
        """Return the response to ``hello`` and the Challenge for the dialler's proof.

        Raises InconsistentClusterIdError for another cluster's id, InvalidRequestError for a nonce of the
        wrong length, and ClusterAuthorizationFailedError for this node's own id.
        """
        if hello.cluster_id != self.cluster_id:
            raise InconsistentClusterIdError(
                f"node {hello.node_id} belongs to another cluster than node {self.node_id}"
            )
        if len(hello.nonce) != NONCE_BYTES:
            raise InvalidRequestError(f"a nonce has {NONCE_BYTES} bytes, not {len(hello.nonce)}")
        if hello.node_id == self.node_id:
            raise ClusterAuthorizationFailedError(f"node id {self.node_id} is this node's own")
        nonce = self._random_bytes(NONCE_BYTES)
        ids = (hello.node_id, self.node_id)
        proof = self._proof("listener", *ids, hello.nonce, nonce)
        expected = self._proof("dialler", *ids, hello.nonce, nonce)
        response = ClusterHelloResponse(0, None, self.node_id, nonce, proof)
        if isinstance(hello, ClusterHelloRequestV1):
            response = ClusterHelloResponseV1(0, None, self.node_id, nonce, proof, self._features)
        return response, Challenge(hello.node_id, expected)

    def _proof(
        self, role: Role, dialler: int, listener: int, dialler_nonce: bytes, listener_nonce: bytes
    ) -> bytes:
        said = msgpack.packb(
            (_CONTEXT, role, self.cluster_id, dialler, listener, dialler_nonce, listener_nonce)
        )
        return hmac.digest(self._key, said, hashlib.sha256)


class OperatorLogin:
    """Logs in the connections of a client with the cluster's secret, in place of a user.

    Such a client may do everything. It can log in before the cluster has users, and create the first one.
    """

    def __init__(self, secret: str, cluster_id: str) -> None:
        self._authenticator = Authenticator(secret, cluster_id, OPERATOR_ID, os.urandom)

    def __repr__(self) -> str:
        return f"<OperatorLogin in {self._authenticator.cluster_id}>"

    async def exchange(self, _timeout_ms: int) -> Authenticator:
        return self._authenticator

    def steps(self, authenticator: Authenticator) -> LoginSteps:
        """Yield the requests that prove that this client knows the secret, and check the peer's proof.

        Raises ClusterAuthorizationFailedError if the peer's proof is wrong.
        """
        hello = authenticator.hello()
        response = yield hello
        yield authenticator.prove(hello, response, response.node_id)
        return 0  # the session has no end


async def call_with_secret(
    cluster: ClusterClient,
    secret: str | None,
    message: Any,
    *,
    node_id: int | None = None,
    secret_name: str = "the given secret",
) -> Any:
    """Return the response of ``node_id`` (None: any broker) to a request that needs the cluster's secret.

    The request is sent once, on a new connection. Raises ClusterAuthorizationFailedError without a secret or
    with a wrong one, which the error calls ``secret_name``. Raises InvalidRequestError if the metadata has no
    such broker, ConnectionFailedError, RequestTimeoutError, and the BrokerError of a refused request.
    """
    if not secret:
        raise ClusterAuthorizationFailedError(
            "this request needs the cluster's secret", hint="pass the cluster.secret of the nodes"
        )
    checked_name("the cluster secret", secret)
    metadata = cluster.metadata
    known = metadata.addresses
    if node_id is None:
        node_id = next(iter(known), OPERATOR_ID)
    if node_id not in known:
        raise InvalidRequestError(f"there is no broker {node_id}")
    timeout_ms = cluster.config.default_api_timeout_ms
    authenticator = Authenticator(
        secret, metadata.cluster_id, OPERATOR_ID, os.urandom, tls=cluster.tls, secret_name=secret_name
    )
    client_id = cluster.config.client_id
    address = cluster.secured(known[node_id])
    connection = await authenticator.dial(address, node_id, client_id=client_id, timeout_ms=timeout_ms)
    try:
        return (await connection.call(message, timeout_ms=timeout_ms)).message
    finally:
        connection.close()


class Challenge:
    """Checks the proof of the dialler ``node_id`` against the proof that the listener expects."""

    __slots__ = ("_expected", "node_id")

    def __init__(self, node_id: int, expected: bytes) -> None:
        self.node_id = node_id
        self._expected = expected

    def is_met_by(self, request: ClusterProofRequest) -> bool:
        return hmac.compare_digest(self._expected, request.proof)
