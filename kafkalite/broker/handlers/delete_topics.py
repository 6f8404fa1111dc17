"""DeleteTopics: the topics are gone when this is answered; their files follow later.

Errors, per topic: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST, POLICY_VIOLATION (``delete.topic.enable`` is
false), INVALID_TOPIC_EXCEPTION (an internal topic); of the whole request NOT_CONTROLLER, REQUEST_TIMED_OUT,
KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidTopicError, PolicyViolationError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import DeleteTopicsRequest, DeleteTopicsResponse, TopicResult


def handle(services: Services, request: Request, _client: Client) -> Answer | Coroutine[Any, Any, Answer]:
    message: DeleteTopicsRequest = request.message
    if not services.config.delete_topic_enable:
        reason = translate(PolicyViolationError("delete.topic.enable is false on this broker"))
        refused = [TopicResult(name, *reason) for name in message.names]
        return Reply(DeleteTopicsResponse(0, None, refused))
    return _delete(services, message)


async def _delete(services: Services, message: DeleteTopicsRequest) -> Answer:
    refused: dict[str, TopicResult] = {}
    for name in message.names:
        try:
            refuse_internal(name)
        except InvalidTopicError as error:
            refused[name] = TopicResult(name, *translate(error))
    command = message._replace(names=[name for name in message.names if name not in refused])
    response = DeleteTopicsResponse(0, None, [])
    if command.names or not refused:
        response = await services.channel.decide(command, timeout_ms=message.timeout_ms)
    deleted = iter(response.topics)
    results = [refused.get(name) or next(deleted, None) for name in message.names]
    return Reply(response._replace(topics=[result for result in results if result is not None]))
