"""Exit codes of ``kl``, and the mapping from errors to exit codes."""

# Tests: tests/cli/test_cli_page.py

from __future__ import annotations

from typing import Final

from kafkalite.errors import (
    ConfigError,
    ConnectionFailedError,
    CorruptBatchError,
    CorruptLogError,
    DeliveryTimeoutError,
    GroupIdNotFoundError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    KafkaliteError,
    RequestTimedOutError,
    RequestTimeoutError,
    ResourceNotFoundError,
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
HUNG_UP: Final = 129
INTERRUPTED: Final = 130
TERMINATED: Final = 143


class NotFoundError(KafkaliteError):
    """An object that the user named does not exist. Raised if there is no broker's error to raise."""


class ExistsAlreadyError(KafkaliteError):
    """The object to create already exists."""


class TimedOutError(KafkaliteError):
    """The time given by ``--timeout`` has passed."""


class PartialFailureError(KafkaliteError):
    """Some of several items failed. Each failure was reported on stderr."""


class CheckFailedError(KafkaliteError):
    """A check ran and found a problem."""


class UsageError(KafkaliteError):
    """The command line is invalid."""


_BY_CLASS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, USAGE),
    (ConfigError, USAGE),
    (InvalidConfigError, USAGE),
    (InvalidTopicError, USAGE),
    (InvalidPartitionsError, USAGE),
    (InvalidReplicationFactorError, USAGE),
    (ConnectionFailedError, CANNOT_CONNECT),
    (NotFoundError, NOT_FOUND),
    (UnknownTopicOrPartitionError, NOT_FOUND),
    (GroupIdNotFoundError, NOT_FOUND),
    (TransactionalIdNotFoundError, NOT_FOUND),
    (ResourceNotFoundError, NOT_FOUND),
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
