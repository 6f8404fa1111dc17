"""Handlers for the nodes of a cluster: authentication, registration, requests to the active controller.

Of these requests, only ClusterHello and ClusterProof are accepted before the node has proved that it belongs
to the cluster (S10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.server.client import Client, audit
from kafkalite.broker.server.responses import Refusal, Reply, Response
from kafkalite.broker.services import Services
from kafkalite.broker.tasks import first_of
from kafkalite.errors import (
    ClusterAuthorizationFailedError,
    ErrorCode,
    InvalidRequestError,
    LogOfflineError,
    RequestTimedOutError,
)
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.cluster import (
    ClusterProofResponse,
    ControllerAddress,
    EnvelopeRequest,
    EnvelopeResponse,
    FetchMetadataRequest,
    FetchMetadataRequestV1,
    FetchMetadataResponse,
    FetchMetadataResponseV1,
    MetadataEntry,
)

if TYPE_CHECKING:
    from kafkalite.raft.raft_quorum import RaftQuorum


MAX_FETCH_WAIT_MS: Final = 5_000
MAX_FETCH_BYTES: Final = 16 * MIB

#: The client commands that every broker forwards to the active controller.
FORWARDED: Final = frozenset(
    {
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.ELECT_LEADERS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.UPDATE_FEATURES,
        ApiKey.ADD_RAFT_VOTER,
        ApiKey.REMOVE_RAFT_VOTER,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    }
)


def cluster_hello(services: Services, request: Request, client: Client) -> Reply:
    """Respond to another node's challenge with a proof, and challenge that node in turn (S10).

    Revokes an earlier proof of a node on this connection.

    Errors: INCONSISTENT_CLUSTER_ID, CLUSTER_AUTHORIZATION_FAILED (this node is not part of a cluster, or the
    other node claims this node's own id), INVALID_REQUEST (the nonce).
    """
    client.node_id = client.challenge = None
    if services.authenticator is None:
        raise ClusterAuthorizationFailedError("this node is not part of a cluster")
    message, client.challenge = services.authenticator.challenge(request.message)
    return Reply(message)


def cluster_proof(_services: Services, request: Request, client: Client) -> Response:
    """Check the other node's proof that it knows the secret, and authenticate the connection (S10).

    Each proof, valid or not, uses up the challenge.

    Errors: CLUSTER_AUTHORIZATION_FAILED (no challenge, a used challenge, or a wrong proof), which closes the
    connection.
    """
    challenge, client.challenge = client.challenge, None
    if challenge is None or not challenge.is_met_by(request.message):
        fields = Fields(principal=client.principal, host=client.host, reason="it does not know the secret")
        audit.warning("node refused %s", fields)
        return Refusal(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "the proof is wrong", closes=True)
    client.authenticate(node_id=challenge.node_id)
    return Reply(ClusterProofResponse(0, None, challenge.node_id))


def raft_messages(_services: Services, _request: Request, _client: Client) -> Reply:
    """Refuse Raft messages. Only the controller's own listener accepts them, without this handler.

    Errors: INVALID_REQUEST.
    """
    raise InvalidRequestError("Raft messages are accepted only by a controller's own listener")


def decide(services: Services, request: Request, client: Client) -> Coroutine[Any, Any, Response]:
    """Decide a request that another node sends on its own behalf. Only the active controller accepts it.

    - BrokerRegistration: a broker joins the cluster (R20).
    - AlterPartition: a leader proposes a new in-sync set (R13).
    - CheckpointHighWatermarks: a leader reports the high watermarks of its partitions.
    - ReportReplicas: a broker describes the logs of its replicas, for elections after unclean stops (R46).
    - AllocateProducerIds: a broker requests a block of producer ids.

    Errors: NOT_CONTROLLER, CLUSTER_AUTHORIZATION_FAILED (the request names a node other than that of the
    connection), and those of the decision.
    """
    return _decide(services, request.message, client)


def broker_heartbeat(services: Services, request: Request, client: Client) -> Coroutine[Any, Any, Response]:
    """Record that a registered broker is alive, and whether it wants to shut down.

    The broker's session depends on the connection of its last heartbeat: when that connection closes, the
    controller fences the broker without waiting for the session timeout. The end of an earlier connection has
    no effect, because it may be noticed late.

    Errors: NOT_CONTROLLER, STALE_BROKER_EPOCH, BROKER_ID_NOT_REGISTERED, CLUSTER_AUTHORIZATION_FAILED (the
    request names a node other than that of the connection).
    """
    if not client.is_session and client.node_id is not None:
        former = services.sessions.get(client.node_id)
        if former is not None:
            former.is_session = False
        services.sessions[client.node_id] = client
        client.is_session = True
    return _decide(services, request.message, client)


async def _decide(services: Services, message: Any, client: Client) -> Response:
    if client.node_id != message.node_id:
        raise ClusterAuthorizationFailedError(
            f"node {client.node_id} sent a request in the name of node {message.node_id}"
        )
    return Reply(await services.channel.execute(message))


async def envelope(services: Services, request: Request, _client: Client) -> Response:
    """Decide a client's command that another broker forwards. Only the active controller accepts it.

    Errors: NOT_CONTROLLER, INVALID_REQUEST (an api that is not forwarded, or a malformed request),
    REQUEST_TIMED_OUT (the outcome is unknown), THROTTLING_QUOTA_EXCEEDED (too many commands wait).
    """
    message: EnvelopeRequest = request.message
    if message.api_key not in FORWARDED:
        raise InvalidRequestError(f"api {message.api_key} is not forwarded to the controller")
    api = APIS[message.api_key]
    if not api.min_version <= message.api_version <= api.max_version:
        raise InvalidRequestError(f"{api.key.name} has no version {message.api_version} here")
    command: Any = codec.decode(api.request, bytes(request.payload))
    try:
        reply = await services.controller.submit(command)
    except LogOfflineError as error:
        raise RequestTimedOutError(
            f"the controller stops; the outcome is not known: {error.message}"
        ) from error
    offset = services.controller.image.metadata_offset
    return Reply(EnvelopeResponse(0, None, offset), [codec.encode(reply)])


async def fetch_metadata(services: Services, request: Request, _client: Client) -> Response:
    """Return committed entries of the metadata log to a broker that is not a voter. Long poll.

    A change of the leader ends the wait, because such a broker must know the leader.

    Errors: INVALID_REQUEST (this node is not a voter).
    """
    message: FetchMetadataRequest = request.message
    raft = services.raft
    if raft is None:
        raise InvalidRequestError("this node is not a voter")
    knows_leader = message.leader_id == (-1 if raft.leader_id is None else raft.leader_id)
    if message.max_wait_ms > 0 and knows_leader and not services.is_stopping:
        await _wait_for_update(raft, message.after_offset, min(message.max_wait_ms, MAX_FETCH_WAIT_MS))
    chunk = raft.entries_after(message.after_offset, min(message.max_bytes, MAX_FETCH_BYTES))
    leader_id = raft.leader_id
    entries = [MetadataEntry(offset, len(data)) for offset, data in chunk.entries]
    response = FetchMetadataResponse(
        0, None, -1 if leader_id is None else leader_id, raft.offset, chunk.is_snapshot, entries
    )
    payload = [data for _, data in chunk.entries]
    if type(message) is not FetchMetadataRequestV1:
        return Reply(response, payload)
    voters = [ControllerAddress(one.node_id, one.address) for one in raft.status().nodes if one.is_voter]
    later: Any = FetchMetadataResponseV1
    return Reply(later(*response, voters), payload)


async def _wait_for_update(raft: RaftQuorum, after_offset: int, wait_ms: int) -> None:
    """Wait up to ``wait_ms`` for an entry after ``after_offset`` or a change of the leader."""
    changed = asyncio.Event()

    def on_leader_change(_leader_id: int | None, _term: int) -> None:
        changed.set()

    raft.on_leader_change.append(on_leader_change)
    try:
        await first_of(raft.wait_beyond(after_offset, wait_ms), changed.wait())
    finally:
        raft.on_leader_change.remove(on_leader_change)
