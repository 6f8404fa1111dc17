"""RetireTxnGroup: an application has no batch after its last one, so that the result may be forgotten.

Behaviour: the last batch repeated is answered as before, and one that follows takes this back. The group is
forgotten when nobody has used it for ``transactional.id.expiration.ms``. Asked again, it answers the same.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS,
TRANSACTIONAL_ID_NOT_FOUND, INVALID_TXN_STATE (no batch is decided, or a writer of a next one is at work).
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import RetireTxnGroupRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: RetireTxnGroupRequest = request.message
    shard = services.coordinators.transactions(message.application_id)
    return shard.submit(message, caller_of(client.client_id, client.peer))
