"""Translates the exceptions of handlers to error codes.

Expected errors have a code. Any other exception is a bug: the client receives UNKNOWN_SERVER_ERROR with an
id, and the log has the traceback with the same id. AssertionError is not translated, because it stops the
broker.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import Final, NamedTuple

from kafkalite.broker.server.responses import Refusal
from kafkalite.errors import (
    BatchTooLargeError,
    BrokerError,
    ConfigError,
    CorruptBatchError,
    ErrorCode,
    ProtocolError,
    StorageError,
)
from kafkalite.limits import MAX_ERROR_MESSAGE_LENGTH
from kafkalite.log_fields import Fields

logger = logging.getLogger(__name__)

_incidents = count(1)

_CODES: tuple[tuple[type[Exception], ErrorCode], ...] = (
    (CorruptBatchError, ErrorCode.CORRUPT_MESSAGE),
    (BatchTooLargeError, ErrorCode.MESSAGE_TOO_LARGE),
    (StorageError, ErrorCode.KAFKA_STORAGE_ERROR),
    (ConfigError, ErrorCode.INVALID_CONFIG),
    (ProtocolError, ErrorCode.INVALID_REQUEST),
)


class Outcome(NamedTuple):
    error_code: int
    error_message: str | None


#: The response to a request whose handler found a violated invariant.
STOPS: Final = Refusal(
    ErrorCode.UNKNOWN_SERVER_ERROR, "the broker stops: an invariant is broken", closes=True
)


def translate(error: Exception) -> Outcome:
    """Return (error code, message) for the client. An AssertionError is raised again."""
    if isinstance(error, AssertionError):
        raise error
    if isinstance(error, BrokerError):
        return Outcome(int(error.code), error.message[:MAX_ERROR_MESSAGE_LENGTH])
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Outcome(int(code), str(error)[:MAX_ERROR_MESSAGE_LENGTH])
    incident = f"incident-{next(_incidents)}"
    logger.error("unexpected failure %s", Fields(incident=incident, error=repr(error)), exc_info=error)
    return Outcome(
        int(ErrorCode.UNKNOWN_SERVER_ERROR),
        f"the broker failed unexpectedly; its log has the traceback under {incident}",
    )


def refusal(error: Exception) -> Refusal:
    """Return the Refusal for a request that failed as a whole. An AssertionError is raised again."""
    code, message = translate(error)
    return Refusal(code, message or "")
