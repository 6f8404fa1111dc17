"""DescribeGroups: the members of groups, what each holds and shall hold, and why there is each generation.

Errors, per group: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, INVALID_GROUP_ID,
GROUP_ID_NOT_FOUND; of the whole request INVALID_REQUEST (too many groups).
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import BrokerError, InvalidRequestError
from kafkalite.limits import MAX_GROUPS_PER_REQUEST
from kafkalite.model import NO_EPOCH
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import (
    DescribedGroup,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)


async def handle(services: Services, request: Request, client: Client) -> Answer:
    message: DescribeGroupsRequest = request.message
    if len(message.group_ids) > MAX_GROUPS_PER_REQUEST:
        raise InvalidRequestError(f"at most {MAX_GROUPS_PER_REQUEST} groups in one request")
    caller = caller_of(client.client_id, client.peer)
    groups: list[DescribedGroup] = []
    for group_id in message.group_ids:
        try:
            shard = services.coordinators.groups(group_id)
            command = DescribeGroupsRequest([group_id], message.include_journal)
            response: DescribeGroupsResponse = await shard.ask(command, caller)
            groups += response.groups
        except BrokerError as error:
            code, text = translate(error)
            groups.append(DescribedGroup(group_id, code, text, "Dead", NO_EPOCH, NO_EPOCH, "", [], []))
    return Reply(DescribeGroupsResponse(0, None, groups))
