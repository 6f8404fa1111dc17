"""DeleteTopics: the topics are gone when this is answered; their files follow later.

Errors, per topic: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST, POLICY_VIOLATION (``delete.topic.enable`` is
false); of the whole request NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from collections.abc import Awaitable

from kafkalite.broker.answers import Answer, Reply
from kafkalite.broker.services import Client, Services, submit
from kafkalite.errors import ErrorCode
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import DeleteTopicsRequest, DeleteTopicsResponse, TopicResult


def handle(services: Services, request: Request, _client: Client) -> Answer | Awaitable[Answer]:
    message: DeleteTopicsRequest = request.message
    if not services.config.delete_topic_enable:
        reason = "delete.topic.enable is false on this broker"
        refused = [TopicResult(name, ErrorCode.POLICY_VIOLATION, reason) for name in message.names]
        return Reply(DeleteTopicsResponse(0, None, refused))
    return submit(services, message, timeout_ms=message.timeout_ms)
