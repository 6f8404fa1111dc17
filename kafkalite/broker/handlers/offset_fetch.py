"""OffsetFetch: how far a group has read, as far as that is committed (R40).

Behaviour: without ``partitions`` all that have an offset. A partition without one has NO_OFFSET.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS; those of
``groups.machine``: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH; per partition
UNSTABLE_OFFSET_COMMIT (``require_stable``: an offset of an open transaction, R35).
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import OffsetFetchRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: OffsetFetchRequest = request.message
    shard = services.coordinators.groups(message.group_id)
    return shard.submit(message, caller_of(client.client_id, client.peer))
