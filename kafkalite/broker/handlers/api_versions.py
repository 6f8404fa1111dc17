"""ApiVersions: what this broker speaks. The first request of every connection."""

from __future__ import annotations

from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.api import APIS
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.metadata import ApiVersionRange, ApiVersionsResponse

SOFTWARE_NAME = "kafkalite"


def handle(_services: Services, request: Request, client: Client) -> Reply:
    return greet(request, client)


def greet(request: Request, client: Client) -> Reply:
    from kafkalite import __version__

    client.client_id = request.client_id
    ranges = [ApiVersionRange(int(api.key), api.min_version, api.max_version) for api in APIS.values()]
    return Reply(ApiVersionsResponse(0, None, SOFTWARE_NAME, __version__, ranges))
