"""EndTxn: commit or abort the open transaction of a transactional id.

Behaviour: answered when the decision is committed, with the identity of the next transaction (R31, R32); the
markers follow. Asked again with the epoch of the same transaction, it answers the same.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, REQUEST_TIMED_OUT (no
producer id in time, after the last epoch), and those of ``transactions.machine``:
INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED, INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE (it was decided
otherwise), CONCURRENT_TRANSACTIONS.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.model import MAX_PRODUCER_EPOCH
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import EndTxnRequest
from kafkalite.transactions.commands import WithSpareId

#: From here on the next epoch may be the last one, so that another producer id must follow.
LATE_EPOCH: Final = MAX_PRODUCER_EPOCH - 2


def handle(
    services: Services, request: Request, client: Client
) -> Answer | Pending | Coroutine[Any, Any, Answer]:
    message: EndTxnRequest = request.message
    name, caller = message.transactional_id, caller_of(client.client_id, client.peer)
    if message.producer_epoch < LATE_EPOCH:
        return services.transactions.submit(name, message, caller)
    return services.transactions.submit_with_spare_id(
        name, lambda spare_id: WithSpareId(message, spare_id), caller
    )
