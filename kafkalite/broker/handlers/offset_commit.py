"""OffsetCommit: how far a group, or somebody in its name, has read.

Behaviour: answered when the offsets are committed to the log of the internal topic (R39). A member commits
with its epoch; without a member id the group must have no members.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS; those of
``groups.machine``: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, FENCED_MEMBER_EPOCH; per
partition OFFSET_METADATA_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.responses import Answer, Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import OffsetCommitRequest


def handle(services: Services, request: Request, client: Client) -> Answer | Pending:
    message: OffsetCommitRequest = request.message
    shard = services.coordinators.groups(message.group_id)
    return shard.submit(message, caller_of(client.client_id, client.peer))
