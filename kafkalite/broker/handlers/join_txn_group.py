"""JoinTxnGroup: become a writer of one batch of an application, with a producer id of one's own.

Behaviour: the same member name again is the same attempt: what it wrote before is aborted, and its earlier
producer fenced. A batch that was decided before needs no writers: it is answered ``is_finished``.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, REQUEST_TIMED_OUT (no
producer id in time), and those of ``transactions.machine``: INVALID_REQUEST, INVALID_TRANSACTION_TIMEOUT,
INVALID_TXN_STATE (the name is a plain transactional id), CONCURRENT_TRANSACTIONS (the earlier attempt is
being aborted).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.handlers.init_producer_id import HOLD_MS
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import JoinTxnGroupRequest
from kafkalite.transactions.commands import WithSpareId


def handle(
    services: Services, request: Request, client: Client
) -> Answer | Pending | Coroutine[Any, Any, Answer]:
    message: JoinTxnGroupRequest = request.message
    return services.transactions.submit_with_spare_id(
        message.application_id,
        lambda spare_id: WithSpareId(message, spare_id),
        caller_of(client.client_id, client.peer),
        hold_ms=HOLD_MS,
    )
