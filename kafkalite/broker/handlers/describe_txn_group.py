"""DescribeTxnGroup: the last batch of an application that was decided, and the writers of the next ones.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, TRANSACTIONAL_ID_NOT_FOUND.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import DescribeTxnGroupRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: DescribeTxnGroupRequest = request.message
    shard = services.coordinators.transactions(message.application_id)
    return shard.submit(message, caller_of(client.client_id, client.peer))
