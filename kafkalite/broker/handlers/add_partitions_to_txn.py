"""AddPartitionsToTxn: a leader is about to append the first batch of a transaction (R31). From brokers only.

Behaviour: answered when the partitions are part of the transaction for good: whatever ends it puts a marker
there. All of them, or none.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, UNKNOWN_TOPIC_OR_PARTITION
(not heard of here yet), CONCURRENT_TRANSACTIONS (the transaction before is not complete), and those of
``transactions.machine``: INVALID_PRODUCER_ID_MAPPING, INVALID_PRODUCER_EPOCH, PRODUCER_FENCED,
INVALID_TXN_STATE.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    return services.transactions.add_partitions(request.message, caller_of(client.client_id, client.peer))
