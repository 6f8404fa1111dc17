"""DescribeTransactions: where each of some transactional ids stands.

Errors, per id: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS,
TRANSACTIONAL_ID_NOT_FOUND; of the whole request INVALID_REQUEST (too many ids).
"""

from __future__ import annotations

from typing import Final

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import BrokerError, InvalidRequestError
from kafkalite.model import NO_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import (
    DescribedTransaction,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)

MAX_IDS: Final = 1_000


async def handle(services: Services, request: Request, client: Client) -> Answer:
    message: DescribeTransactionsRequest = request.message
    if len(message.transactional_ids) > MAX_IDS:
        raise InvalidRequestError(f"at most {MAX_IDS} transactional ids in one request")
    caller = caller_of(client.client_id, client.peer)
    described: list[DescribedTransaction] = []
    for name in message.transactional_ids:
        try:
            shard = services.coordinators.transactions(name)
            response: DescribeTransactionsResponse = await shard.ask(
                DescribeTransactionsRequest([name]), caller
            )
            described += [
                one._replace(coordinator_epoch=shard.coordinator_epoch) for one in response.transactions
            ]
        except BrokerError as error:
            described.append(_refused(name, error))
    return Reply(DescribeTransactionsResponse(0, None, described))


def _refused(name: str, error: BrokerError) -> DescribedTransaction:
    code, text = translate(error)
    return DescribedTransaction(
        name, code, text, NO_PRODUCER_ID, NO_PRODUCER_EPOCH, "", -1, NO_TIMESTAMP, [], NO_EPOCH
    )
