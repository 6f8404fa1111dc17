"""Dispatches requests to their handlers, if the client may send them, and translates the handlers' errors.

Every request that reaches a handler passes ``Dispatcher.handle``, which enforces the access control rules
(S9).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from kafkalite.broker.server.audited import changes_of
from kafkalite.broker.server.client import Client, audit
from kafkalite.broker.server.error_responses import STOPS, refusal
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import SHUTTING_DOWN, HandlerResult, Pending, Refusal, Reply, Response
from kafkalite.broker.server.turns import InTurns, Steps, TurnServices
from kafkalite.broker.tasks import TaskSet
from kafkalite.client.cluster.authentication import OPERATOR_ID
from kafkalite.errors import ErrorCode
from kafkalite.log_fields import Fields
from kafkalite.protocol.api import APIS, CLUSTER_APIS, LOGIN_APIS, ApiKey
from kafkalite.protocol.connection import BadRequest, Request
from kafkalite.security.acls import Authorizer, Operation, label, refusal_of
from kafkalite.security.required import (
    ERRORS,
    REQUIRED,
    Denial,
    denials,
    is_decided_by_item,
    permitted,
    visible,
)

logger = logging.getLogger(__name__)

Interceptor: TypeAlias = Callable[[Request, Client], "Response | Pending | None"]
"""Called with each request before its handler. Returns the response, or None to call the handler."""

FORBIDDEN: Final = Refusal(
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    "only nodes that have proved to belong to this cluster may send this",
)
#: The principal in the audit of who has proved to know the cluster's secret.
OPERATOR: Final = "cluster.secret"
_CHANGES: Final = frozenset({Operation.CREATE, Operation.DELETE, Operation.ALTER, Operation.ALTER_CONFIGS})
#: The APIs whose allowed requests are audited: they change topics, configurations, rules or users, or stop
#: a broker.
AUDITED: Final = {ApiKey.CONTROLLED_SHUTDOWN} | {
    key for key, one in REQUIRED.items() if any(need.operation in _CHANGES for need in one.needs)
}


class DispatchServices(TurnServices, Protocol):
    """The parts of a broker that the dispatcher itself uses."""

    metrics: Metrics
    is_stopping: bool


S = TypeVar("S", bound=DispatchServices)


class Dispatcher(Generic[S]):
    """Calls the handler for each request's api. A handler returns a response, a Pending or a coroutine."""

    def __init__(
        self,
        services: S,
        handlers: Mapping[int, Callable[[S, Request, Client], HandlerResult]],
        tasks: TaskSet,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._services = services
        self._handlers = handlers
        self._tasks = tasks
        self._on_broken = on_broken
        self._counts = services.metrics.requests
        self.interceptor: Interceptor | None = None
        self.authorizer: Authorizer | None = None  #: None allows every client everything

    def dispatch(self, request: Request | BadRequest, client: Client) -> Response | Pending:
        """Return the response to one request. An exception of its handler becomes a Refusal."""
        problem = None if client.login is None else client.login_problem
        if problem is not None and request.api_key in APIS and request.api_key not in LOGIN_APIS:
            return self._refuse_before_login(request, client, problem)
        if isinstance(request, BadRequest):
            refused = self._refuse(request, client)
            return refused if problem is None else refused._replace(closes=True)
        if self.interceptor is not None:
            intercepted = self.interceptor(request, client)
            if intercepted is not None:
                return intercepted
        return self.handle(request, client)

    def handle(self, request: Request, client: Client) -> Response | Pending:
        """Return the response to one request, without calling the interceptor."""
        api_key = request.api_key
        self._counts[api_key] += 1
        if self._services.is_stopping:
            return SHUTTING_DOWN
        if client.node_id is None:
            if api_key in CLUSTER_APIS:
                return self._forbid(request, client)
            if self.authorizer is not None:
                return self._handle_authorized(request, client, self.authorizer)
        else:
            client.authorizer = None  # the nodes of the cluster are trusted
            if client.node_id == OPERATOR_ID and api_key in AUDITED:
                _audit_allowed(request, client)
        return self._call(request, client)

    def _handle_authorized(
        self, request: Request, client: Client, authorizer: Authorizer
    ) -> Response | Pending:
        """Return the response to a request, or a refusal if the client may not send it.

        Items that the client may not describe are removed from the lists in the response (``visible``).
        """
        client.authorizer = authorizer
        if request.api_key not in AUDITED and is_decided_by_item(request.api_key, request.message):
            return self._call(request, client)
        steps = self._authorized(request, client)
        try:
            next(steps)
        except StopIteration as end:
            response: Response | Pending = end.value
            return response
        # Thousands of names. Later requests keep their order, except that none waits for a held heartbeat.
        is_exclusive = request.api_key != ApiKey.CONSUMER_GROUP_HEARTBEAT
        return InTurns(self._services, steps, is_exclusive=is_exclusive)

    def _authorized(self, request: Request, client: Client) -> Steps:
        api_key, message = request.api_key, request.message
        denied = yield from denials(api_key, message, client, is_whole=True)
        if denied is None or denied:
            return self._deny(request, client, denied)
        if api_key in AUDITED:
            _audit_allowed(request, client)
        may = yield from permitted(message, client)
        if may is not message:
            request = request._replace(message=may)
        response = self._call(request, client)
        if not REQUIRED[api_key].lists:
            return response
        if isinstance(response, Pending):
            return _Pruned(self._services, response, partial(_prune, request, client))
        return (yield from _prune(request, client, response))

    def _deny(self, request: Request, client: Client, denied: list[Denial] | None) -> Refusal:
        """Return the refusal of a request that access control rules do not allow."""
        self._services.metrics.failed_requests += 1
        if not denied:  # the table has no entry
            audit.warning("request denied %s", _audited(request, client, reason="no entry"))
            return Refusal(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "no permission is defined for this API")
        operation, resource_type, name = denied[0]
        fields = _audited(
            request,
            client,
            operation=label(operation),
            resource_type=label(resource_type),
            resource=name,
            count=len(denied),
        )
        audit.warning("request denied %s", fields)
        message = refusal_of(client.principal, *denied[0])
        if len(denied) > 1:
            message += f"; {len(denied) - 1} more resources are refused"
        return Refusal(ERRORS[resource_type], message)

    def _call(self, request: Request, client: Client) -> Response | Pending:
        """Call the handler of a request that the client may send."""
        api_key = request.api_key
        try:
            response = self._handlers[api_key](self._services, request, client)
        except Exception as error:
            return self._failed(error)
        if isinstance(response, (Reply, Pending, Refusal)):
            return response
        pending = Pending()
        task = self._tasks.start(self._finish(response, pending), name=f"request of api {api_key}")
        # If the task is cancelled before its first step, it never awaits the coroutine, so close it here.
        task.add_done_callback(lambda _: response.close())
        return pending

    async def _finish(self, handler: Coroutine[Any, Any, Response], pending: Pending) -> None:
        """Await a handler to its end even if the client is gone, because its changes may be committed."""
        try:
            response = await handler
        except Exception as error:
            response = self._failed(error)
        pending.resolve(response)

    def _forbid(self, request: Request, client: Client) -> Refusal:
        """Return the refusal of a request that only nodes of the cluster may send (S10)."""
        self._services.metrics.failed_requests += 1
        logger.warning(
            "request refused %s", Fields(peer=client.peer, api_key=request.api_key, reason="no proof")
        )
        return FORBIDDEN

    def _refuse_before_login(self, request: Request | BadRequest, client: Client, problem: str) -> Refusal:
        """Return the refusal, which closes the connection, of a request outside of a session (S1, S8)."""
        self._services.metrics.failed_requests += 1
        logger.info(
            "request refused %s", Fields(peer=client.peer, api_key=request.api_key, reason="no login")
        )
        return Refusal(ErrorCode.ILLEGAL_SASL_STATE, problem, closes=True)

    def _failed(self, error: Exception) -> Refusal:
        self._services.metrics.failed_requests += 1
        if isinstance(error, AssertionError):
            self._on_broken(error)
            return STOPS
        return refusal(error)

    def _refuse(self, bad: BadRequest, client: Client) -> Refusal:
        self._services.metrics.failed_requests += 1
        logger.info(
            "request refused %s",
            Fields(peer=client.peer, api_key=bad.api_key, version=bad.api_version, reason=bad.error_message),
        )
        return Refusal(bad.error_code, bad.error_message, bad.fatal)


class _Pruned(Pending):
    """A response without the items that the client may not describe, when another response is ready."""

    __slots__ = ("busy_ns",)

    def __init__(self, services: TurnServices, pending: Pending, prune: Callable[[Response], Steps]) -> None:
        super().__init__(pending.cancel)
        self.busy_ns = 0

        def on_response(response: Response) -> None:
            steps = InTurns(services, prune(response))
            self.on_cancel = steps.cancel
            steps.then(lambda response: self._on_pruned(pending.busy_ns + steps.busy_ns, response))

        pending.then(on_response)

    def _on_pruned(self, busy_ns: int, response: Response) -> None:
        self.busy_ns = busy_ns
        self.resolve(response)


def _prune(request: Request, client: Client, response: Response) -> Steps:
    if isinstance(response, Refusal):
        return response
    message = yield from visible(request.api_key, request.message, response.message, client)
    return response._replace(message=message)


def _audit_allowed(request: Request, client: Client) -> None:
    fields = _audited(request, client, **changes_of(request.api_key, request.message))
    audit.info("request allowed %s", fields)


def _audited(request: Request, client: Client, **more: str | int) -> Fields:
    principal = client.principal if client.node_id is None else OPERATOR
    return Fields(principal=principal, host=client.host, api=ApiKey(request.api_key).name, **more)
