"""CreatePartitions: let topics grow.

Errors, per topic: INVALID_TOPIC_EXCEPTION (an internal one, whose keys would be in other partitions then) and
those of ``metadata.controller.create_partitions``; of the whole request NOT_CONTROLLER, REQUEST_TIMED_OUT,
KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidTopicError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    TopicResult,
)


async def handle(services: Services, request: Request, _client: Client) -> Answer:
    message: CreatePartitionsRequest = request.message
    refused: dict[str, TopicResult] = {}
    for topic in message.topics:
        try:
            refuse_internal(topic.name)
        except InvalidTopicError as error:
            refused[topic.name] = TopicResult(topic.name, *translate(error))
    command = message._replace(topics=[topic for topic in message.topics if topic.name not in refused])
    response = CreatePartitionsResponse(0, None, [])
    if command.topics or not refused:
        response = await services.channel.decide(command, timeout_ms=message.timeout_ms)
    grown = iter(response.topics)
    results = [refused.get(topic.name) or next(grown, None) for topic in message.topics]
    return Reply(response._replace(topics=[result for result in results if result is not None]))
