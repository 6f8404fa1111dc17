"""ControlledShutdown: an operator asks one broker to hand over what it leads, and to stop.

Any broker may be asked; it passes the request on to the one that is meant.

Errors: INVALID_REQUEST (there is no such broker), REQUEST_TIMED_OUT, and what keeps it from being reached.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidRequestError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import ControlledShutdownRequest, ControlledShutdownResponse

TIMEOUT_MS: Final = 10_000


def handle(services: Services, request: Request, _client: Client) -> Answer | Coroutine[Any, Any, Answer]:
    message: ControlledShutdownRequest = request.message
    node_id = message.node_id
    if node_id == services.config.node_id:
        services.request_stop()
        return Reply(ControlledShutdownResponse(0, None, node_id))
    if services.peers is None or node_id not in services.controller.image.brokers:
        raise InvalidRequestError(f"there is no broker {node_id}")
    return _pass_on(services, message)


async def _pass_on(services: Services, message: ControlledShutdownRequest) -> Answer:
    assert services.peers is not None
    connection = await services.peers.dial(message.node_id)
    try:
        return Reply((await connection.call(message, timeout_ms=TIMEOUT_MS)).message)
    finally:
        connection.close()
