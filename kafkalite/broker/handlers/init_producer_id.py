"""InitProducerId: a producer's identity (KIP-98, KIP-360).

Behaviour: without a transactional id, a producer id of this broker's block, or the next epoch of the one
given. With one, its coordinator gives the next identity; whoever had the last one is fenced by it, and its
open transaction is aborted first (R34): the answer waits for that a little, then tells the client to come
back.

Errors: REQUEST_TIMED_OUT (no controller gave this broker a block in time); with a transactional id
NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, CONCURRENT_TRANSACTIONS, and those
of ``transactions.machine``: INVALID_TRANSACTION_TIMEOUT, PRODUCER_FENCED, INVALID_TXN_STATE.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.model import MAX_PRODUCER_EPOCH
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import InitProducerIdRequest, InitProducerIdResponse
from kafkalite.transactions.commands import InitProducerId

#: How long the coordinator waits for the end of a transaction before it answers CONCURRENT_TRANSACTIONS.
HOLD_MS: Final = 1_000


def handle(
    services: Services, request: Request, client: Client
) -> Answer | Pending | Coroutine[Any, Any, Answer]:
    message: InitProducerIdRequest = request.message
    if message.transactional_id is not None:
        return _begin(services, message, client)
    if message.producer_id >= 0 and 0 <= message.producer_epoch < MAX_PRODUCER_EPOCH - 1:
        return Reply(InitProducerIdResponse(0, None, message.producer_id, message.producer_epoch + 1))
    producer_id = services.producer_ids.take()
    if producer_id is not None:
        return Reply(InitProducerIdResponse(0, None, producer_id, 0))
    return _take(services)


async def _take(services: Services) -> Answer:
    return Reply(InitProducerIdResponse(0, None, await services.producer_ids.next(), 0))


def _begin(
    services: Services, message: InitProducerIdRequest, client: Client
) -> Answer | Pending | Coroutine[Any, Any, Answer]:
    name, timeout_ms, producer_id, producer_epoch = message
    assert name is not None
    return services.transactions.submit_with_spare_id(
        name,
        lambda spare_id: InitProducerId(name, timeout_ms, producer_id, producer_epoch, spare_id),
        caller_of(client.client_id, client.peer),
        hold_ms=HOLD_MS,
    )
