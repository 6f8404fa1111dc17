"""OffsetDelete: forget a group's offsets.

Behaviour: answered when that is committed. Offsets that are not there count as deleted.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS; those of
``groups.machine``: INVALID_GROUP_ID, GROUP_ID_NOT_FOUND; per partition GROUP_SUBSCRIBED_TO_TOPIC.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import OffsetDeleteRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: OffsetDeleteRequest = request.message
    shard = services.coordinators.groups(message.group_id)
    return shard.submit(message, caller_of(client.client_id, client.peer))
