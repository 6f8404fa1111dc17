"""ClusterProof: the dialler's proof that it knows the secret; the connection is that node's then (S10).

Errors: CLUSTER_AUTHORIZATION_FAILED (no challenge, one used before, a wrong proof); the connection is closed.
"""

from __future__ import annotations

import logging

from kafkalite.broker.server.responses import Answer, Refusal, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import ErrorCode
from kafkalite.log_fields import Fields
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.cluster import ClusterProofResponse

logger = logging.getLogger(__name__)


def handle(_services: Services, request: Request, client: Client) -> Answer:
    return judge(request, client)


def judge(request: Request, client: Client) -> Answer:
    """Accept the proof that the connection's challenge asks for; any proof ends the challenge."""
    challenge, client.challenge = client.challenge, None
    if challenge is None or not challenge.is_met_by(request.message):
        logger.warning("node refused %s", Fields(peer=client.peer, reason="it does not know the secret"))
        return Refusal(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "the proof is wrong", closes=True)
    client.node_id = challenge.node_id
    return Reply(ClusterProofResponse(0, None, challenge.node_id))
