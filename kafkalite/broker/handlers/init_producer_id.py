"""InitProducerId: a producer id of this broker's block, or the next epoch of the one given (KIP-98, KIP-360).

Errors: INVALID_REQUEST (a transactional id: there are no transactions yet), REQUEST_TIMED_OUT (no controller
gave this broker a block in time).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from kafkalite.broker.answers import Answer, Reply
from kafkalite.broker.services import Client, Services
from kafkalite.errors import InvalidRequestError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import InitProducerIdRequest, InitProducerIdResponse

MAX_PRODUCER_EPOCH: Final = 2**15 - 1


def handle(services: Services, request: Request, _client: Client) -> Answer | Awaitable[Answer]:
    message: InitProducerIdRequest = request.message
    if message.transactional_id is not None:
        raise InvalidRequestError("there are no transactions yet: leave out the transactional id")
    if message.producer_id >= 0 and 0 <= message.producer_epoch < MAX_PRODUCER_EPOCH - 1:
        return Reply(InitProducerIdResponse(0, None, message.producer_id, message.producer_epoch + 1))
    producer_id = services.producer_ids.take()
    if producer_id is not None:
        return Reply(InitProducerIdResponse(0, None, producer_id, 0))
    return _take(services)


async def _take(services: Services) -> Answer:
    return Reply(InitProducerIdResponse(0, None, await services.producer_ids.next(), 0))
