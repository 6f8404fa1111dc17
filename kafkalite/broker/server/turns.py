"""Serves a large request in steps (turns), one in each iteration of the event loop (S24)."""

# Tests: tests/broker/test_turns.py

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial, wraps
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import STOPS, refusal
from kafkalite.broker.server.responses import HandlerResult, Pending, Refusal, Reply, Response
from kafkalite.clock import Clock
from kafkalite.limits import MIB
from kafkalite.protocol.connection import Request

#: The maximum number of partitions in one step, which then takes about ten milliseconds.
PARTITIONS_PER_TURN: Final = 250
#: The maximum size of the record batches in one step.
BYTES_PER_TURN: Final = 8 * MIB

Steps: TypeAlias = Generator[None, None, Response | Pending]


class TurnServices(Protocol):
    """The part of a broker that this module uses."""

    clock: Clock

    def on_broken(self, error: BaseException, /) -> None: ...


S = TypeVar("S", bound=TurnServices)
T = TypeVar("T")


class InTurns(Pending):
    """The response to a request that a generator serves, one step (``yield``) in each iteration of the loop.

    If ``is_exclusive``, the connection starts no further request before the response is ready.
    """

    __slots__ = ("_services", "_steps", "busy_ns", "is_exclusive")

    def __init__(self, services: TurnServices, steps: Steps, *, is_exclusive: bool = False) -> None:
        super().__init__(steps.close)
        self._services = services
        self._steps = steps
        self.is_exclusive = is_exclusive
        self.busy_ns = 0
        self._step()
        self.busy_ns = 0  # the connection that called the handler counts the first step

    def _next(self) -> None:
        """Run one step, and add its time to ``busy_ns``. The last step raises StopIteration."""
        began_ns = self._services.clock.monotonic_ns()
        try:
            next(self._steps)
        finally:
            self.busy_ns += self._services.clock.monotonic_ns() - began_ns

    def _step(self) -> None:
        if self.is_done:
            return
        try:
            self._next()
        except StopIteration as end:
            response: Response | Pending = end.value
            if isinstance(response, Pending):
                self.on_cancel = response.cancel
                response.then(partial(self._on_response, response))
            else:
                self.resolve(response)
        except AssertionError as error:
            self._services.on_broken(error)
            self.resolve(STOPS)
        except Exception as error:
            self.resolve(refusal(error))
        else:
            asyncio.get_running_loop().call_soon(self._step)

    def _on_response(self, pending: Pending, response: Response) -> None:
        self.busy_ns += pending.busy_ns
        self.resolve(response)


def finished(steps: Generator[None, None, T]) -> T:
    """Take all steps at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class _Joined(Pending):
    """Joins the responses to the parts of one request into one response."""

    __slots__ = ("_count", "_parts", "_responses")

    def __init__(self, parts: Sequence[Response | Pending]) -> None:
        super().__init__(self._cancel_parts)
        self._parts = parts
        self._responses: list[Any] = list(parts)
        self._count = len(parts)
        for index, part in enumerate(parts):
            if isinstance(part, Pending):
                part.then(partial(self._on_response, index))
            else:
                self._on_response(index, part)

    def _cancel_parts(self) -> None:
        for part in self._parts:
            if isinstance(part, Pending):
                part.cancel()

    def _on_response(self, index: int, response: Response) -> None:
        self._responses[index] = response
        self._count -= 1
        if self._count:
            return
        for one in self._responses:
            if isinstance(one, Refusal):
                self.resolve(one)
                return
        first = self._responses[0].message
        partitions = [result for one in self._responses for result in one.message.partitions]
        self.resolve(Reply(first._replace(partitions=partitions)))


def by_turns(
    handler: Callable[[S, Request, Client], HandlerResult],
) -> Callable[[S, Request, Client], HandlerResult]:
    """Return a handler that serves a request with any number of partitions in turns.

    It calls ``handler`` with at most PARTITIONS_PER_TURN partitions at a time, and joins the responses. For
    a part of a request, ``handler`` must not return a coroutine.
    """

    @wraps(handler)
    def handle(services: S, request: Request, client: Client) -> HandlerResult:
        if len(request.message.partitions) <= PARTITIONS_PER_TURN:
            return handler(services, request, client)
        return InTurns(services, _parts(handler, services, request, client))

    return handle


def is_large(request: Request) -> bool:
    """Whether a request has too many partitions or bytes for one turn."""
    return len(request.message.partitions) > PARTITIONS_PER_TURN or len(request.payload) > BYTES_PER_TURN


def produce_by_turns(
    handler: Callable[[S, Request, Client], HandlerResult], services: S, request: Request, client: Client
) -> InTurns:
    """Return the response to a large Produce request, which ``handler`` serves in turns.

    Later requests on the connection wait, so that batches of a partition keep their order.
    """
    return InTurns(services, _parts(handler, services, request, client), is_exclusive=True)


def _parts(
    handler: Callable[[S, Request, Client], HandlerResult], services: S, request: Request, client: Client
) -> Steps:
    parts: list[Any] = []
    start = 0
    items: list[Any] = []
    end = 0
    for item in request.message.partitions:
        length = getattr(item, "length_bytes", 0)
        if items and (len(items) == PARTITIONS_PER_TURN or end + length - start > BYTES_PER_TURN):
            parts.append(handler(services, _part(request, items, start, end), client))
            items, start = [], end
            yield
        items.append(item)
        end += length
    parts.append(handler(services, _part(request, items, start, end), client))
    return _Joined(parts)


def _part(request: Request, items: list[Any], start: int, end: int) -> Request:
    message = request.message._replace(partitions=items)
    return request._replace(message=message, payload=request.payload[start:end])
