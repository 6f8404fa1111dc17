"""EndTxnGroup: decide over all writers of a batch at once: the winners' records are committed, all others
aborted.

Behaviour: answered when the decision is committed; the markers follow, and ``is_complete`` tells whether they
are all written: ask again to learn of it. Asked again for the last batch, it answers the first result.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, and those of
``transactions.machine``: FINISHED_BATCH (a later one was decided), INVALID_TXN_STATE (a winner is unknown
or was aborted: nothing is decided, write the batch again), CONCURRENT_TRANSACTIONS.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import EndTxnGroupRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: EndTxnGroupRequest = request.message
    caller = caller_of(client.client_id, client.peer)
    return services.transactions.submit(message.application_id, message, caller)
