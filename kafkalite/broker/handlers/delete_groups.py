"""DeleteGroups: forget groups without members, and their offsets; answered when that is committed.

Errors, per group: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, INVALID_GROUP_ID,
GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP; of the whole request INVALID_REQUEST (too many groups).
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import BrokerError, InvalidRequestError
from kafkalite.limits import MAX_GROUPS_PER_REQUEST
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import DeletedGroup, DeleteGroupsRequest, DeleteGroupsResponse


async def handle(services: Services, request: Request, client: Client) -> Answer:
    message: DeleteGroupsRequest = request.message
    if len(message.group_ids) > MAX_GROUPS_PER_REQUEST:
        raise InvalidRequestError(f"at most {MAX_GROUPS_PER_REQUEST} groups in one request")
    caller = caller_of(client.client_id, client.peer)
    deleted: list[DeletedGroup] = []
    for group_id in message.group_ids:
        try:
            shard = services.coordinators.groups(group_id)
            response: DeleteGroupsResponse = await shard.ask(DeleteGroupsRequest([group_id]), caller)
            deleted += response.groups
        except BrokerError as error:
            deleted.append(DeletedGroup(group_id, *translate(error)))
    return Reply(DeleteGroupsResponse(0, None, deleted))
