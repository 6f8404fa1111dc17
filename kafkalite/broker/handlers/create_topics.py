"""CreateTopics: decided by the controller; answered when this broker hosts what it shall host.

Errors, per topic: INVALID_TOPIC_EXCEPTION (an internal name) and those of
``metadata.controller.create_topics``; of the whole request NOT_CONTROLLER, REQUEST_TIMED_OUT (``timeout_ms``
passed; the topics may come into being all the same), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services, submit
from kafkalite.errors import InvalidTopicError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import CreatedTopic, CreateTopicsRequest, CreateTopicsResponse


def handle(services: Services, request: Request, _client: Client) -> Coroutine[Any, Any, Answer]:
    message: CreateTopicsRequest = request.message
    refused: dict[str, CreatedTopic] = {}
    for topic in message.topics:
        try:
            refuse_internal(topic.name)
        except InvalidTopicError as error:
            refused[topic.name] = CreatedTopic(topic.name, *translate(error), "", -1, -1)
    if refused:
        return _create_others(services, message, refused)
    return submit(services, message, timeout_ms=message.timeout_ms)


async def _create_others(
    services: Services, message: CreateTopicsRequest, refused: dict[str, CreatedTopic]
) -> Answer:
    """What may be created is; the answer has all, in the order they were asked for."""
    others = [topic for topic in message.topics if topic.name not in refused]
    response = CreateTopicsResponse(0, None, [])
    if others:
        command = message._replace(topics=others)
        response = await services.channel.decide(command, timeout_ms=message.timeout_ms)
    created = iter(response.topics)
    results = [refused.get(topic.name) or next(created, None) for topic in message.topics]
    return Reply(response._replace(topics=[result for result in results if result is not None]))
