"""What the number ``kl`` leaves behind means, and which error leaves which."""

from __future__ import annotations

from typing import Final

from kafkalite.errors import (
    ConfigError,
    ConnectionFailedError,
    CorruptBatchError,
    CorruptLogError,
    DeliveryTimeoutError,
    GroupIdNotFoundError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    KafkaliteError,
    RequestTimedOutError,
    RequestTimeoutError,
    TopicAlreadyExistsError,
    TransactionalIdNotFoundError,
    UnknownTopicOrPartitionError,
)

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
CANNOT_CONNECT: Final = 3
NOT_FOUND: Final = 4
ALREADY_EXISTS: Final = 5
NOT_ALLOWED: Final = 6
TIMED_OUT: Final = 7
PARTIAL_FAILURE: Final = 8
CHECK_FAILED: Final = 9
INTERRUPTED: Final = 130

MEANINGS: Final = {
    OK: "ok",
    FAILED: "the operation failed",
    USAGE: "the command line or a setting is wrong",
    CANNOT_CONNECT: "no broker could be reached",
    NOT_FOUND: "a topic, partition, group, record or file is not there",
    ALREADY_EXISTS: "it exists already (0 with --if-not-exists)",
    NOT_ALLOWED: "authentication or authorization refused",
    TIMED_OUT: "timed out; also -n not reached before --timeout",
    PARTIAL_FAILURE: "some of several items failed; stderr lists them",
    CHECK_FAILED: "a check found something wrong (kl log verify)",
    INTERRUPTED: "interrupted by Ctrl-C",
}


class NotFoundError(KafkaliteError):
    """What the user named is not there; for things the broker has no error code for."""


class ExistsAlreadyError(KafkaliteError):
    """What was to be made is there."""


class TimedOutError(KafkaliteError):
    """``--timeout`` passed."""


class PartialFailureError(KafkaliteError):
    """Some items of several failed; each was reported on stderr."""


class CheckFailedError(KafkaliteError):
    """A check did its work and found something wrong."""


class UsageError(KafkaliteError):
    """What was typed can't be meant."""


_BY_CLASS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, USAGE),
    (ConfigError, USAGE),
    (InvalidTopicError, USAGE),
    (InvalidPartitionsError, USAGE),
    (InvalidReplicationFactorError, USAGE),
    (ConnectionFailedError, CANNOT_CONNECT),
    (NotFoundError, NOT_FOUND),
    (UnknownTopicOrPartitionError, NOT_FOUND),
    (GroupIdNotFoundError, NOT_FOUND),
    (TransactionalIdNotFoundError, NOT_FOUND),
    (FileNotFoundError, NOT_FOUND),
    (TopicAlreadyExistsError, ALREADY_EXISTS),
    (ExistsAlreadyError, ALREADY_EXISTS),
    (PermissionError, NOT_ALLOWED),
    (TimedOutError, TIMED_OUT),
    (RequestTimeoutError, TIMED_OUT),
    (RequestTimedOutError, TIMED_OUT),
    (DeliveryTimeoutError, TIMED_OUT),
    (PartialFailureError, PARTIAL_FAILURE),
    (CheckFailedError, CHECK_FAILED),
    (CorruptLogError, CHECK_FAILED),
    (CorruptBatchError, CHECK_FAILED),
)


def exit_code_for(error: BaseException) -> int:
    for cls, code in _BY_CLASS:
        if isinstance(error, cls):
            return code
    return FAILED
