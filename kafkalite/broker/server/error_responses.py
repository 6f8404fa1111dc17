"""Translates the exceptions of handlers to error codes.

Expected errors have a code. Any other exception is a bug: the client receives UNKNOWN_SERVER_ERROR with an
id, and the log has the traceback with the same id. AssertionError is not translated, because it stops the
broker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Any, Final, NamedTuple

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
from kafkalite.protocol.structs import Struct

logger = logging.getLogger(__name__)

_incidents = count(1)

_CODES: tuple[tuple[type[Exception], ErrorCode], ...] = (
    (CorruptBatchError, ErrorCode.CORRUPT_MESSAGE),
    (BatchTooLargeError, ErrorCode.MESSAGE_TOO_LARGE),
    (StorageError, ErrorCode.KAFKA_STORAGE_ERROR),
    (ConfigError, ErrorCode.INVALID_CONFIG),
    (ProtocolError, ErrorCode.INVALID_REQUEST),
)


#: The number of items with an error text in a response that would be too large with all texts.
KEPT_TEXTS: Final = 100


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


def without_texts(message: Struct) -> Struct:
    """Return a response whose lists have at most KEPT_TEXTS error messages each; later ones are omitted.

    The texts repeat the names of a request, so a response can be too large even though the request is not.
    """
    fields: list[Any] = list(message)
    for index, items in enumerate(fields):
        if type(items) is list and items and isinstance(items[0], Struct):
            cls = type(items[0])
            if "error_message" in cls._fields:
                fields[index] = _with_few_texts(items, cls, cls._fields.index("error_message"))
    return type(message)(*fields)


def _with_few_texts(items: Sequence[Struct], cls: type[Struct], position: int) -> list[Struct]:
    left = KEPT_TEXTS
    kept: list[Struct] = []
    for item in items:
        if item[position] is not None:
            left -= 1
            if left < 0:
                item = tuple.__new__(cls, (*item[:position], None, *item[position + 1 :]))
        kept.append(item)
    return kept
