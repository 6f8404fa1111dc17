"""Takes the steps of a ``CallPlan`` on asyncio, for the client and for requests between brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kafkalite.client.cluster.call_plan import CallPlan, Dial, GiveUp, Locate, Pause
from kafkalite.client.cluster.setbacks import Setbacks
from kafkalite.errors import KafkaliteError

C = TypeVar("C")
T = TypeVar("T")


async def _sleep(duration_ms: int) -> None:
    await asyncio.sleep(duration_ms / 1000)


async def drive(
    plan: CallPlan,
    *,
    locate: Callable[[], Awaitable[int | None]],
    dial: Callable[[int | None], Awaitable[C]],
    send: Callable[[C, int], Awaitable[T]],
    pause: Callable[[int], Awaitable[None]] = _sleep,
    chance: Callable[[], float] = lambda: 0.5,
    setbacks: Setbacks | None = None,
) -> T:
    """Take the steps of ``plan`` until ``send`` returns a response, and return it.

    ``locate()`` returns the node id of the current target (None if the target is not a single node).
    ``dial(node_id)`` returns the first argument of ``send``, usually an open connection. ``send(connection,
    timeout_ms)`` returns the response. If one of these functions raises a KafkaliteError, the plan decides
    whether to retry, and its final error is raised; other exceptions are raised at once.
    ``pause(duration_ms)`` may return earlier if the target may have changed. ``chance`` returns a number in
    [0, 1) for the jitter of the pauses. The errors are recorded in ``setbacks`` until this function ends.
    """
    try:
        return await _steps(plan, locate, dial, send, pause, chance, setbacks)
    finally:
        if setbacks:
            setbacks.clear(plan)


async def _steps(
    plan: CallPlan,
    locate: Callable[[], Awaitable[int | None]],
    dial: Callable[[int | None], Awaitable[C]],
    send: Callable[[C, int], Awaitable[T]],
    pause: Callable[[int], Awaitable[None]],
    chance: Callable[[], float],
    setbacks: Setbacks | None,
) -> T:
    loop = asyncio.get_running_loop()
    connection: Any = None
    while True:
        step = plan.next_step(int(loop.time() * 1000))
        try:
            if isinstance(step, Locate):
                plan.located(await locate())
            elif isinstance(step, Dial):
                connection = await dial(step.node_id)
                plan.connected()
            elif isinstance(step, Pause):
                await pause(step.duration_ms)
                plan.wake()
            elif isinstance(step, GiveUp):
                break
            else:
                return await send(connection, step.timeout_ms)
        except KafkaliteError as error:
            now_ms = int(loop.time() * 1000)
            if setbacks is not None:
                setbacks.note(plan, error, now_ms)  # before the plan adds the cause to its last error
            plan.failed(error, now_ms, chance())
    raise step.error
