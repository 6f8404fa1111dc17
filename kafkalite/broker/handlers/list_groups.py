"""ListGroups: the groups that this broker coordinates.

Errors: COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE (of any partition that this broker leads).
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.coordination.internal_topics import GROUP
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import ListedGroup, ListGroupsRequest, ListGroupsResponse


async def handle(services: Services, request: Request, client: Client) -> Answer:
    message: ListGroupsRequest = request.message
    caller = caller_of(client.client_id, client.peer)
    groups: list[ListedGroup] = []
    for shard in list(services.coordinators.shards(GROUP)):
        response: ListGroupsResponse = await shard.ask(message, caller)
        groups += response.groups
    groups.sort(key=lambda group: group.group_id)
    return Reply(ListGroupsResponse(0, None, groups))
