"""ConsumerGroupHeartbeat: a member joins, lives, takes and gives back partitions, leaves (KIP-848).

Behaviour: what the heartbeat says takes effect when it comes. With ``max_wait_ms`` the answer waits for news
for the member, at most so long; a later heartbeat of the same member is the end of that wait. The group's
rules are those of ``groups.machine``.

Deviation from Kafka: the answer may wait.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS; those of
``groups.machine``: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH, UNRELEASED_INSTANCE_ID,
FENCED_INSTANCE_ID, GROUP_MAX_SIZE_REACHED, UNSUPPORTED_ASSIGNOR, INVALID_REGULAR_EXPRESSION,
INVALID_REQUEST.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import ConsumerGroupHeartbeatRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: ConsumerGroupHeartbeatRequest = request.message
    coordinators = services.coordinators
    shard = coordinators.groups(message.group_id)
    return coordinators.polls.submit(shard, message, caller_of(client.client_id, client.peer))
