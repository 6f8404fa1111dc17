"""Faults on the wire, to be given to ``Cluster.intercept(api, fault)``.

Each is made for the next ``count`` requests of the api and spends itself; then requests pass again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from kafkalite.broker.server.responses import Pending, Refusal, Response
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode
from kafkalite.protocol.connection import Request

Proceed: TypeAlias = Callable[[], "Response | Pending"]
"""Lets the broker answer the intercepted request after all."""

Fault: TypeAlias = "Callable[[Request, Proceed, Clock], Response | Pending | None]"
"""Gives the answer itself, or None to let the request pass."""


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
    """The request is lost: not done, never answered. Later answers of its connection wait behind it."""
    return _limited(count, lambda request, proceed, clock: Pending())


def fail_next(count: int = 1, error_code: ErrorCode = ErrorCode.NOT_LEADER_OR_FOLLOWER) -> Fault:
    """The request is refused as a whole, and not done."""
    refusal = Refusal(int(error_code), "refused by a test")
    return _limited(count, lambda request, proceed, clock: refusal)


def disconnect_next(count: int = 1, *, after: bool = False) -> Fault:
    """The connection breaks. ``after``: only when the request is done, so that its answer is what is lost."""

    def act(_request: Request, proceed: Proceed, _clock: Clock) -> Response | Pending:
        cut = Refusal(int(ErrorCode.UNKNOWN_SERVER_ERROR), "", closes=True, is_silent=True)
        if not after:
            return cut
        done = proceed()
        if not isinstance(done, Pending):
            return cut
        pending = Pending(done.cancel)
        done.then(lambda _answer: pending.resolve(cut))
        return pending

    return _limited(count, act)


def delay_next(count: int = 1, *, delay_ms: int) -> Fault:
    """The request is done ``delay_ms`` later, on the broker's clock."""

    def act(_request: Request, proceed: Proceed, clock: Clock) -> Response | Pending:
        pending = Pending()

        async def wait() -> None:
            await clock.sleep_ms(delay_ms)
            pending.on_cancel = None
            answer = proceed()
            if isinstance(answer, Pending):
                pending.on_cancel = answer.cancel
                answer.then(pending.resolve)
            else:
                pending.resolve(answer)

        task = asyncio.get_running_loop().create_task(wait(), name="delayed request")
        pending.on_cancel = task.cancel
        return pending

    return _limited(count, act)
