"""What a handler gives back: a Reply, a Refusal, or a Pending that becomes one of them.

Most answers are ready when the handler returns and are written at once. A Pending costs no task and no
future: whoever completes it calls the connection's continuation directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from kafkalite.errors import ErrorCode


class Reply(NamedTuple):
    """A response message, and the buffers of its payload, to be sent as they are."""

    message: Any
    payload: Sequence[Any] = ()


class Refusal(NamedTuple):
    """The request as a whole failed.

    ``closes``: the connection ends once this is written. ``is_silent``: it is not written (a fault in tests).
    """

    error_code: int
    error_message: str
    closes: bool = False
    is_silent: bool = False


Answer: TypeAlias = Reply | Refusal


class Pending:
    """An answer to come.

    Resolved at most once (a second time is a no-op: an expiry may race with the event it waited for).
    ``on_cancel`` releases what waits for it; it runs once, when the answer is there or no longer wanted.
    """

    __slots__ = ("_continuation", "answer", "is_done", "on_cancel")

    def __init__(self, on_cancel: Callable[[], object] | None = None) -> None:
        self._continuation: Callable[[Answer], None] | None = None
        self.answer: Answer | None = None
        self.is_done = False
        self.on_cancel = on_cancel

    def then(self, continuation: Callable[[Answer], None]) -> None:
        """Call ``continuation`` with the answer: at once if it is there."""
        if self.is_done:
            assert self.answer is not None, "the answer was cancelled"
            continuation(self.answer)
        else:
            self._continuation = continuation

    def resolve(self, answer: Answer) -> None:
        if self.is_done:
            return
        self.is_done = True
        self.answer = answer
        self._release()
        continuation, self._continuation = self._continuation, None
        if continuation is not None:
            continuation(answer)

    def cancel(self) -> None:
        """Nobody waits any more: the continuation is never called."""
        if self.is_done:
            return
        self.is_done = True
        self._continuation = None
        self._release()

    def _release(self) -> None:
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()


SHUTTING_DOWN = Refusal(ErrorCode.SHUTTING_DOWN, "the broker is shutting down; another one will answer")
