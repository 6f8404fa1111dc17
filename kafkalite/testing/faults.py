"""Faults in request handling, for ``Cluster.intercept(api, fault)``.

Each fault applies to the next ``count`` requests of the api. Later requests are handled normally.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from kafkalite.broker.server.responses import Pending, Refusal, Response
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode
from kafkalite.protocol.connection import Request

#: Handles the intercepted request and returns its response.
Proceed: TypeAlias = Callable[[], "Response | Pending"]

#: Returns the response itself, or None to let the broker handle the request.
Fault: TypeAlias = "Callable[[Request, Proceed, Clock], Response | Pending | None]"


class _Disconnection(Pending):
    """A response that is never sent. Its connection is aborted when ``done`` is resolved, or at once if
    ``done`` is None.

    The server's continuation is an object with a ``connection``, which is how the connection is found.
    """

    def __init__(self, done: Pending | None = None) -> None:
        super().__init__(done.cancel if done is not None else None)
        self._done = done

    def then(self, continuation: Any) -> None:
        super().then(continuation)
        if self._done is None:
            continuation.connection.abort()
        else:
            self._done.then(lambda _response: continuation.connection.abort())


def _limited(count: int, act: Callable[[Request, Proceed, Clock], Response | Pending]) -> Fault:
    left = count

    def fault(request: Request, proceed: Proceed, clock: Clock) -> Response | Pending | None:
        nonlocal left
        if left <= 0:
            return None
        left -= 1
        return act(request, proceed, clock)

    return fault


def drop_next(count: int = 1) -> Fault:
    """Return a fault that never responds to the next ``count`` requests. Later responses on the same
    connection are not sent either, because responses keep the order of requests."""
    return _limited(count, lambda request, proceed, clock: Pending())


def fail_next(count: int = 1, error_code: ErrorCode = ErrorCode.NOT_LEADER_OR_FOLLOWER) -> Fault:
    """Return a fault that refuses the next ``count`` requests as a whole with ``error_code``."""
    refusal = Refusal(int(error_code), "refused by a test")
    return _limited(count, lambda request, proceed, clock: refusal)


def disconnect_next(count: int = 1, *, after: bool = False) -> Fault:
    """Return a fault that aborts the connection instead of handling a request. If ``after``, the request is
    handled, and the connection is aborted instead of responding."""

    def act(_request: Request, proceed: Proceed, _clock: Clock) -> Response | Pending:
        done = proceed() if after else None
        return _Disconnection(done if isinstance(done, Pending) else None)

    return _limited(count, act)


def delay_next(count: int = 1, *, delay_ms: int) -> Fault:
    """Return a fault that handles each request ``delay_ms`` later, on the broker's clock."""

    def act(_request: Request, proceed: Proceed, clock: Clock) -> Response | Pending:
        pending = Pending()

        async def wait() -> None:
            await clock.sleep_ms(delay_ms)
            pending.on_cancel = None
            response = proceed()
            if isinstance(response, Pending):
                pending.on_cancel = response.cancel
                response.then(pending.resolve)
            else:
                pending.resolve(response)

        task = asyncio.get_running_loop().create_task(wait(), name="delayed request")
        pending.on_cancel = task.cancel
        return pending

    return _limited(count, act)
