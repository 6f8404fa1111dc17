"""ElectLeaders: let preferred replicas lead again, or, unclean, any live one. Decided by the controller.

Errors, per partition: those of deciding it; of the whole request NOT_CONTROLLER, REQUEST_TIMED_OUT.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.server.responses import Answer
from kafkalite.broker.server.services import Client, Services, submit
from kafkalite.protocol.connection import Request


def handle(services: Services, request: Request, _client: Client) -> Coroutine[Any, Any, Answer]:
    return submit(services, request.message, timeout_ms=request.message.timeout_ms)
