"""BrokerHeartbeat: a registered broker is alive, and perhaps wants to go. For the active controller.

The connection it comes on counts as the broker's session: when it closes, the controller need not wait for
the whole session timeout to find the broker gone. An earlier one counts no more: its end may be seen late.

Errors: NOT_CONTROLLER, STALE_BROKER_EPOCH, BROKER_ID_NOT_REGISTERED, CLUSTER_AUTHORIZATION_FAILED (in another
node's name).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.server.responses import Answer
from kafkalite.broker.server.services import Client, Services, decide_for
from kafkalite.protocol.connection import Request


def handle(services: Services, request: Request, client: Client) -> Coroutine[Any, Any, Answer]:
    if not client.is_session and client.node_id is not None:
        former = services.sessions.get(client.node_id)
        if former is not None:
            former.is_session = False
        services.sessions[client.node_id] = client
        client.is_session = True
    return decide_for(services, request.message, client)
