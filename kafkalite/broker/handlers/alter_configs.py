"""AlterConfigs: set and take away overrides of topics and brokers (KIP-339); in force when answered.

Errors, per resource: those of ``metadata.controller.alter_configs``; of the whole request NOT_CONTROLLER,
KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kafkalite.broker.server.responses import Answer
from kafkalite.broker.server.services import Client, Services, submit
from kafkalite.protocol.connection import Request


def handle(services: Services, request: Request, _client: Client) -> Coroutine[Any, Any, Answer]:
    return submit(services, request.message, timeout_ms=0)
