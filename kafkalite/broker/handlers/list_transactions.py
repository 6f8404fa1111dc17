"""ListTransactions: the transactional ids, and members of transaction groups, that this broker coordinates.

Errors: COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE (of any partition that this broker leads).
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.coordination.internal_topics import TRANSACTION
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import (
    ListedTransaction,
    ListTransactionsRequest,
    ListTransactionsResponse,
)


async def handle(services: Services, request: Request, client: Client) -> Answer:
    message: ListTransactionsRequest = request.message
    caller = caller_of(client.client_id, client.peer)
    listed: list[ListedTransaction] = []
    for shard in list(services.coordinators.shards(TRANSACTION)):
        response: ListTransactionsResponse = await shard.ask(message, caller)
        listed += response.transactions
    listed.sort(key=lambda one: (one.transactional_id, one.producer_id))
    return Reply(ListTransactionsResponse(0, None, listed))
