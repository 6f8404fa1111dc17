"""Envelope: a client's admin request, passed on by the broker that got it. For the active controller.

Errors: NOT_CONTROLLER, INVALID_REQUEST (an api that is not passed on, or no request of that api),
REQUEST_TIMED_OUT (the outcome is not known).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidRequestError, LogOfflineError, RequestTimedOutError
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.cluster import EnvelopeRequest, EnvelopeResponse

#: What brokers pass on: the commands that clients may give to the controller.
FORWARDED: Final = frozenset(
    {
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.ELECT_LEADERS,
    }
)


def handle(services: Services, request: Request, _client: Client) -> Coroutine[Any, Any, Answer]:
    message: EnvelopeRequest = request.message
    if message.api_key not in FORWARDED:
        raise InvalidRequestError(f"api {message.api_key} is not passed on")
    api = APIS[message.api_key]
    if not api.min_version <= message.api_version <= api.max_version:
        raise InvalidRequestError(f"{api.key.name} has no version {message.api_version} here")
    command = codec.decode(api.request, bytes(request.payload))
    return _decide(services, command)


async def _decide(services: Services, command: Any) -> Answer:
    try:
        reply = await services.controller.submit(command)
    except LogOfflineError as error:
        raise RequestTimedOutError(
            f"the controller stops; the outcome is not known: {error.message}"
        ) from error
    offset = services.controller.image.metadata_offset
    return Reply(EnvelopeResponse(0, None, offset), [codec.encode(reply)])
