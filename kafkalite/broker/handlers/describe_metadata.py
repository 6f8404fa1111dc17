"""DescribeMetadata: the metadata as a tree of paths, as this node shows it.

Errors: INVALID_REQUEST (there is no such path).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.cluster.metadata_tree import describe
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidRequestError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.metadata import DescribeMetadataRequest, DescribeMetadataResponse

MAX_WAIT_MS: Final = 30_000


def handle(services: Services, request: Request, _client: Client) -> Answer | Coroutine[Any, Any, Answer]:
    message: DescribeMetadataRequest = request.message
    image = services.controller.image
    if message.after_offset >= image.metadata_offset and message.max_wait_ms > 0:
        return _wait(services, message)
    return _describe(services, message)


async def _wait(services: Services, message: DescribeMetadataRequest) -> Answer:
    try:
        async with asyncio.timeout(min(message.max_wait_ms, MAX_WAIT_MS) / 1000):
            await services.controller.wait_for_offset(message.after_offset + 1)
    except TimeoutError:
        pass  # nothing new: the same state again
    return _describe(services, message)


def _describe(services: Services, message: DescribeMetadataRequest) -> Reply:
    image = services.controller.image
    nodes = describe(image, message.path)
    if not nodes:
        raise InvalidRequestError(f"there is no {message.path!r} in the metadata")
    return Reply(DescribeMetadataResponse(0, None, image.metadata_offset, nodes))
