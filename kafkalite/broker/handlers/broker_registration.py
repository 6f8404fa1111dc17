"""BrokerRegistration: a broker's new process becomes part of the cluster (R20). For the active controller.

Errors: NOT_CONTROLLER, CLUSTER_AUTHORIZATION_FAILED (in another node's name), and those of deciding it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.server.responses import Answer
from kafkalite.broker.server.services import Client, Services, decide_for
from kafkalite.protocol.connection import Request


def handle(services: Services, request: Request, client: Client) -> Coroutine[Any, Any, Answer]:
    return decide_for(services, request.message, client)
