"""The results of handlers: a Reply, a Refusal, or a Pending that is later resolved with one of these.

Most responses are ready when the handler returns, and are written at once. A Pending needs neither a task nor
a future: when it is resolved, it calls a continuation of the connection directly. Two kinds of Pending have a
deadline. PendingResults collects one result for each item of a request. HeldResponse computes its response
again after each update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias

from kafkalite.errors import ErrorCode, RequestTimedOutError, broker_error
from kafkalite.limits import bounded_wait_ms


class Reply(NamedTuple):
    """A response message, and the buffers of its payload, which are sent unchanged."""

    message: Any
    payload: Sequence[Any] = ()


class Refusal(NamedTuple):
    """An error for the whole request. If ``closes``, the connection closes after the response is written.

    ``throttle_ms`` is the time for which the connection is then throttled.
    """

    error_code: int
    error_message: str
    closes: bool = False
    throttle_ms: int = 0


Response: TypeAlias = Reply | Refusal

SHUTTING_DOWN: Final = Refusal(
    ErrorCode.SHUTTING_DOWN, "the broker is shutting down; send the request to another broker"
)


class Pending:
    """A response that is not ready yet.

    It is resolved at most once. Later calls of ``resolve`` have no effect, because a timeout may race with
    the awaited event. ``on_cancel`` is called once, when the response is ready or no longer wanted, to
    release resources.
    """

    __slots__ = ("_continuation", "is_done", "on_cancel", "response")

    #: Whether the connection starts no further request before the response is ready.
    is_exclusive: bool = False
    #: How long later steps of the request have used the event loop, in nanoseconds.
    busy_ns: int = 0

    def __init__(self, on_cancel: Callable[[], object] | None = None) -> None:
        self._continuation: Callable[[Response], None] | None = None
        self.response: Response | None = None
        self.is_done = False
        self.on_cancel = on_cancel

    def then(self, continuation: Callable[[Response], None]) -> None:
        """Call ``continuation`` with the response: at once if it is ready, else when it is resolved."""
        if self.is_done:
            assert self.response is not None, "the response was cancelled"
            continuation(self.response)
        else:
            self._continuation = continuation

    def resolve(self, response: Response) -> None:
        """Set the response and call the continuation. Has no effect if it was resolved or cancelled."""
        if self.is_done:
            return
        self.is_done = True
        self.response = response
        self._release()
        continuation, self._continuation = self._continuation, None
        if continuation is not None:
            continuation(response)

    def cancel(self) -> None:
        """Drop the response, so that the continuation is never called. Has no effect if it was resolved."""
        if self.is_done:
            return
        self.is_done = True
        self._continuation = None
        self._release()

    def _release(self) -> None:
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()


HandlerResult: TypeAlias = Response | Pending | Coroutine[Any, Any, Response]


async def settled(response: Response | Pending) -> Any:
    """Wait for the response and return its message. Raises the BrokerError of a Refusal."""
    if isinstance(response, Pending):
        done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def on_response(outcome: Response) -> None:
            if not done.done():
                done.set_result(outcome)

        response.then(on_response)
        response = await done
    if isinstance(response, Refusal):
        raise broker_error(response.error_code or ErrorCode.UNKNOWN_SERVER_ERROR, response.error_message)
    return response.message


class OffsetWaiter(Protocol):
    """A callback registered for an offset of a partition. Setting ``is_cancelled`` removes it."""

    is_cancelled: bool


Register: TypeAlias = Callable[[Any, int, Callable[[Exception | None], None]], OffsetWaiter]
"""Registers a callback for an offset of a partition: a method of ``Waiters`` such as ``committed``."""


class PendingResults(Pending):
    """A response with one result for each item of a request, sent when all are known or at a deadline.

    Invariant: the keys of ``_waiting`` are the indexes whose results are unknown. A value is the waiter that
    will provide the result, or None.
    """

    __slots__ = ("_deadline", "_fail", "_loop", "_respond", "_timer", "_waiting", "results")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        results: list[Any],
        fail: Callable[[Any, Exception], Any],
        respond: Callable[[list[Any]], Reply],
    ) -> None:
        """``results`` has the initial result of each item.

        ``fail(result, error)`` returns the result of an item that failed, made from its earlier result.
        ``respond`` returns the response with the final results.
        """
        super().__init__()
        self.results = results
        self._loop = loop
        self._fail = fail
        self._respond = respond
        self._waiting: dict[int, OffsetWaiter | None] = {}
        self._deadline: tuple[int, str, str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, index: int) -> None:
        """Declare that ``set``, ``set_error`` or ``wait`` will be called for an item later."""
        self._waiting[index] = None

    def wait(self, index: int, register: Register, key: Any, offset: int) -> None:
        """Make ``results[index]`` final when the partition ``key`` has reached ``offset``.

        ``register`` registers the callback for that. If the callback receives an error, the item fails.
        """

        def on_reached(error: Exception | None) -> None:
            if self._waiting.pop(index, None) is not None:
                if error is not None:
                    self.results[index] = self._fail(self.results[index], error)
                self._finish_if_complete()

        self._waiting[index] = register(key, offset, on_reached)

    def is_expected(self, index: int) -> bool:
        """Whether an item has no final result yet. False after the deadline or a cancellation."""
        return index in self._waiting

    def set(self, index: int, result: Any) -> None:
        """Record the result of one item. Ignored after the deadline or a cancellation."""
        if index in self._waiting:
            del self._waiting[index]
            self.results[index] = result
            self._finish_if_complete()

    def set_error(self, index: int, error: Exception) -> None:
        """Record the failure of one item. Ignored after the deadline or a cancellation."""
        if index in self._waiting:
            self.set(index, self._fail(self.results[index], error))

    def begin(self, timeout_ms: int, late: str, unregistered: str = "") -> Self:
        """Start the deadline, and return this response. Call it when each item is set, expected or waiting.

        The deadline is in ``timeout_ms``, at most MAX_WAIT_MS. Then items without a final result fail with
        REQUEST_TIMED_OUT and the message ``late``, in which ``%d`` stands for that time. If ``unregistered``
        is given, it replaces ``late`` for items that are expected, but do not wait for an offset yet.
        """
        timeout_ms = bounded_wait_ms(max(timeout_ms, 0))
        self._deadline = (timeout_ms, late, unregistered)
        if self._waiting:
            self._timer = self._loop.call_later(timeout_ms / 1000, self._expire)
        self._finish_if_complete()
        return self

    def _finish_if_complete(self) -> None:
        if self._deadline is not None and not self._waiting:
            self.resolve(self._respond(self.results))

    def _expire(self) -> None:
        assert self._deadline is not None, "the timer is set by begin()"
        timeout_ms, late, unregistered = self._deadline
        for index, waiter in self._waiting.items():
            text = late
            if waiter is not None:
                waiter.is_cancelled = True
            elif unregistered:
                text = unregistered
            self.results[index] = self._fail(self.results[index], RequestTimedOutError(text % timeout_ms))
        self._waiting.clear()
        self._finish_if_complete()

    def _release(self) -> None:
        """Remove the registered callbacks, because the response is sent or no longer wanted."""
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiting.values():
            if waiter is not None:
                waiter.is_cancelled = True
        self._waiting.clear()


class HeldResponse(Pending):
    """A response that is held until it is due, or until its deadline.

    ``ask`` is called after ``update`` and at the deadline. It returns the current response, possibly a
    Pending, or None if no response is due. While ``is_over`` is True, ``ask`` must return a response.
    """

    __slots__ = (
        "_ask",
        "_is_asking",
        "_is_due",
        "_is_outdated",
        "_is_scheduled",
        "_loop",
        "_timer",
        "_wait_ms",
        "is_over",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        wait_ms: int,
        ask: Callable[[], Response | Pending | None],
        is_due: Callable[[Response], bool] | None = None,
        on_cancel: Callable[[], object] | None = None,
    ) -> None:
        """The deadline is ``wait_ms``, at most MAX_WAIT_MS, after ``offer`` first sends no response.

        ``is_due`` returns whether a response of ``ask`` may be sent before the deadline; by default every
        response may.
        """
        super().__init__(on_cancel)
        self.is_over = wait_ms <= 0  #: whether the deadline has passed, so that the next response is sent
        self._loop = loop
        self._wait_ms = wait_ms
        self._ask = ask
        self._is_due = is_due
        self._is_asking = False  # whether a Pending that ``ask`` returned is not resolved yet
        self._is_outdated = False  # whether ``update`` was called since then
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, response: Response | Pending | None) -> None:
        """Send ``response`` if it is due or the deadline has passed. Otherwise drop it, because ``ask`` will
        return a newer one. A Pending is treated in this way when it is resolved."""
        if isinstance(response, Pending):
            self._is_asking = True
            response.then(self._on_response)
        elif response is not None and (self.is_over or self._is_due is None or self._is_due(response)):
            self.resolve(response)
        elif self._timer is None and not self.is_done:
            self._timer = self._loop.call_later(bounded_wait_ms(self._wait_ms) / 1000, self.finish)

    def _on_response(self, response: Response) -> None:
        self._is_asking = False
        self.offer(response)
        if self._is_outdated and not self.is_done:
            self._is_outdated = False
            self.offer(self._ask())

    def update(self) -> None:
        """Call ``ask`` in a later iteration of the loop, once for all updates until then."""
        if not self._is_scheduled and not self.is_done:
            self._is_scheduled = True
            self._loop.call_soon(self._on_update)

    def _on_update(self) -> None:
        self._is_scheduled = False
        if self._is_asking:
            self._is_outdated = True
        elif not self.is_done:
            self.offer(self._ask())

    def finish(self) -> None:
        """End the wait and send the current response. If ``ask`` has returned a Pending that is not resolved
        yet, its response is sent when it is resolved."""
        self.is_over = True
        if not self._is_asking and not self.is_done:
            self.offer(self._ask())

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ask, self._is_due = _never_asked, None  # breaks the reference cycle with their owner
        super()._release()


def _never_asked() -> None:
    return None
