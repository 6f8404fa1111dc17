"""Request → handler → answer. The one place that sees every request, and every failure of a handler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias

from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import SHUTTING_DOWN, Answer, Pending, Refusal, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.broker.server.tasks import TaskSet
from kafkalite.errors import ErrorCode
from kafkalite.log_fields import Fields
from kafkalite.protocol.api import CLUSTER_APIS
from kafkalite.protocol.connection import BadRequest, Request

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Services, Request, Client], "Answer | Pending | Coroutine[Any, Any, Answer]"]

Interceptor: TypeAlias = Callable[[Request, Client], "Answer | Pending | None"]
"""Sees a request before its handler does. None lets it pass; anything else is the answer. For faults."""


FORBIDDEN: Final = Refusal(
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only a node that has proved to be of this cluster may ask this"
)


class Dispatcher:
    """Calls the handler of a request's api. A handler may answer, promise (Pending) or be a coroutine."""

    def __init__(
        self,
        services: Services,
        handlers: Mapping[int, Handler],
        tasks: TaskSet,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._services = services
        self._handlers = handlers
        self._tasks = tasks
        self._on_broken = on_broken
        self._counts = services.metrics.requests
        self.interceptor: Interceptor | None = None

    def dispatch(self, request: Request | BadRequest, client: Client) -> Answer | Pending:
        """The answer to one request; never raises."""
        if isinstance(request, BadRequest):
            return self._refuse(request, client)
        if self.interceptor is not None:
            intercepted = self.interceptor(request, client)
            if intercepted is not None:
                return intercepted
        return self.handle(request, client)

    def handle(self, request: Request, client: Client) -> Answer | Pending:
        """``dispatch`` past the interceptor."""
        api_key = request.api_key
        self._counts[api_key] += 1
        if self._services.is_stopping:
            return SHUTTING_DOWN
        if client.node_id is None and api_key in CLUSTER_APIS:
            return self._forbid(request, client)
        try:
            answer = self._handlers[api_key](self._services, request, client)
        except Exception as error:
            return self._failed(error)
        if isinstance(answer, (Reply, Pending, Refusal)):
            return answer
        pending = Pending()
        task = self._tasks.start(self._finish(answer, pending), name=f"request of api {api_key}")
        # Cancelled before its first step, ``_finish`` never awaits the handler: say that nobody will.
        task.add_done_callback(lambda _: answer.close())
        return pending

    async def _finish(self, handler: Coroutine[Any, Any, Answer], pending: Pending) -> None:
        """Await a handler to its end, whether its client still waits or not: what it commits, it commits."""
        try:
            answer = await handler
        except Exception as error:
            answer = self._failed(error)
        pending.resolve(answer)

    def _forbid(self, request: Request, client: Client) -> Refusal:
        """What only nodes of the cluster may ask was asked by somebody who has not proved to be one (S10)."""
        self._services.metrics.failed_requests += 1
        logger.warning(
            "request refused %s", Fields(peer=client.peer, api_key=request.api_key, reason="no proof")
        )
        return FORBIDDEN

    def _failed(self, error: Exception) -> Refusal:
        self._services.metrics.failed_requests += 1
        if isinstance(error, AssertionError):
            self._on_broken(error)
            return Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker stops: an invariant is broken", True)
        code, message = translate(error)
        return Refusal(code, message or "")

    def _refuse(self, bad: BadRequest, client: Client) -> Refusal:
        self._services.metrics.failed_requests += 1
        logger.info(
            "request refused %s",
            Fields(peer=client.peer, api_key=bad.api_key, version=bad.api_version, reason=bad.error_message),
        )
        return Refusal(bad.error_code, bad.error_message, bad.fatal)
