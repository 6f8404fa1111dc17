"""RaftMessages: answered by the controller's own listener, on the Raft loop; nowhere else."""

from __future__ import annotations

from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidRequestError
from kafkalite.protocol.connection import Request


def handle(_services: Services, _request: Request, _client: Client) -> Reply:
    raise InvalidRequestError("Raft messages go to a controller's own listener")
