"""ClusterHello: another node's challenge. Answered with a proof and a challenge of our own (S10).

Errors: INCONSISTENT_CLUSTER_ID, CLUSTER_AUTHORIZATION_FAILED (this node is no part of a cluster, or the
dialler says to be this very node), INVALID_REQUEST (the nonce).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import ClusterAuthorizationFailedError
from kafkalite.protocol.connection import Request

if TYPE_CHECKING:
    from kafkalite.broker.cluster.authentication import Authenticator


def handle(services: Services, request: Request, client: Client) -> Reply:
    return greet(services.authenticator, request, client)


def greet(authenticator: Authenticator | None, request: Request, client: Client) -> Reply:
    """Answer, and remember on the connection which proof must follow. Forgets who it was known as."""
    client.node_id = client.challenge = None
    if authenticator is None:
        raise ClusterAuthorizationFailedError("this node is no part of a cluster")
    answer, client.challenge = authenticator.challenge(request.message)
    return Reply(answer)
