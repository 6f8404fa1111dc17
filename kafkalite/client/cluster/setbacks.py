"""Warns while the work of a client is delayed by retriable errors.

Retries are silent, because most succeed at once. If the same piece of work, such as the batches of one
partition, one request or one connection, still fails LATE_MS after its first failure, the latest error or its
probable cause is logged as a warning. So the log shows what the application waits for: for example a full
disk, a lost quorum, a missing topic, or a server that is no broker.
"""

# Tests: tests/client/test_setbacks.py

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

from kafkalite.errors import (
    ClientClosedError,
    ConnectionFailedError,
    CoordinatorNotAvailableError,
    KafkaliteError,
    RequestTimeoutError,
)

logger = logging.getLogger(__name__)

#: If work has been failing for this time, the next failure logs a warning: with the pauses between retries,
#: within two seconds of the first failure.
LATE_MS: Final = 700
#: A warning is logged if a server has not responded for this time while a connection is opened.
SILENT_MS: Final = 1_000
#: The same warning is repeated after this time, while the work still fails.
REPEAT_MS: Final = 10_000
#: If the last failure of some work is older than this, the next failure counts as its first.
_FORGOTTEN_MS: Final = 5_000
#: Errors that a lost quorum causes. Without it, no coordinator is elected and no internal topic is created.
_CAUSED: Final = (ConnectionFailedError, RequestTimeoutError, CoordinatorNotAvailableError)


def lost_quorum(lost: Sequence[str], node_count: int, *, is_certain: bool = True) -> str:
    """Return a sentence that says why no broker reaches a controller, and what to do.

    ``lost`` names those of the ``node_count`` nodes that can't be reached. If ``lost`` is not empty and
    ``is_certain`` is False, the sentence calls the quorum probably lost.
    """
    if not lost:
        return "no broker reaches a controller, and no partition is served: start the controllers"
    if not is_certain:
        head = "the quorum of controllers is probably lost"
    elif 2 * len(lost) >= node_count:
        head = "the quorum of controllers is lost"
    else:
        head = "no broker reaches a controller"
    reached = f"{node_count - len(lost)} of {node_count} nodes can be reached, and no partition is served"
    return f"{head}: {reached}; start {' and '.join(lost)}"


class _Setback(NamedTuple):
    first_ms: int
    last_ms: int


class Setbacks:
    """Tracks the pieces of work that have failed and are being retried. ``bool`` is False if there are none.

    ``cause`` returns the probable cause of lost connections, missing responses and missing coordinators, or
    the empty string. A cause is logged in place of such an error. All times are milliseconds of the client's
    monotonic clock.
    """

    def __init__(self, cause: Callable[[], str] = str) -> None:
        self._cause = cause
        self._failing: dict[Hashable, _Setback] = {}
        self._warned: dict[str, int] = {}  # when each text was logged

    def __bool__(self) -> bool:
        return bool(self._failing)

    def note(self, work: Hashable, error: object, now_ms: int, *, late_ms: int = LATE_MS) -> None:
        """Record that ``work`` failed with ``error`` and is retried. Ignores ClientClosedError.

        Logs a warning, as ``warn`` does, if the first failure was at least ``late_ms`` ago.
        """
        if isinstance(error, ClientClosedError):
            return
        known = self._failing.get(work)
        is_new = known is None or now_ms - known.last_ms > _FORGOTTEN_MS
        first_ms = now_ms if is_new or known is None else known.first_ms
        self._failing[work] = _Setback(first_ms, now_ms)
        if now_ms - first_ms >= late_ms:
            cause = self._cause() if isinstance(error, _CAUSED) else ""
            self.warn(cause or (error.message if isinstance(error, KafkaliteError) else str(error)), now_ms)

    def clear(self, work: Hashable) -> None:
        """Record that ``work`` has succeeded, failed for good, or is no longer wanted."""
        self._failing.pop(work, None)

    def warn(self, text: str, now_ms: int) -> None:
        """Log ``text`` as a warning, but at most once in REPEAT_MS."""
        self._warned = {known: ms for known, ms in self._warned.items() if now_ms - ms < REPEAT_MS}
        if text not in self._warned:
            self._warned[text] = now_ms
            logger.warning("waiting: %s", text)
