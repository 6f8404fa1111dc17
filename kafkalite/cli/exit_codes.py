"""Exit codes of ``kl``, and the mapping from errors to exit codes."""

# Tests: tests/cli/test_cli_page.py

from __future__ import annotations

from typing import Final

from kafkalite.errors import (
    AuthenticationError,
    ClusterAuthorizationFailedError,
    ConfigError,
    ConnectionFailedError,
    CorruptBatchError,
    CorruptLogError,
    DeliveryTimeoutError,
    GroupAuthorizationFailedError,
    GroupIdNotFoundError,
    InvalidConfigError,
    InvalidGroupIdError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    KafkaliteError,
    RequestTimedOutError,
    RequestTimeoutError,
    ResourceNotFoundError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailedError,
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
    """An object that the command needs does not exist."""


class ExistsAlreadyError(KafkaliteError):
    """The object to create already exists."""


class TimedOutError(KafkaliteError):
    """A time limit of the command has passed, such as ``--timeout``."""


class PartialFailureError(KafkaliteError):
    """Some of several items failed, and others did not."""


class CheckFailedError(KafkaliteError):
    """A check did not pass."""


class UsageError(KafkaliteError):
    """The command line, a file that it names, or the environment is invalid."""


_BY_CLASS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, USAGE),
    (ConfigError, USAGE),
    (InvalidConfigError, USAGE),
    (InvalidTopicError, USAGE),
    (InvalidGroupIdError, USAGE),
    (InvalidPartitionsError, USAGE),
    (InvalidReplicationFactorError, USAGE),
    (AuthenticationError, NOT_ALLOWED),
    (ClusterAuthorizationFailedError, NOT_ALLOWED),
    (TopicAuthorizationFailedError, NOT_ALLOWED),
    (GroupAuthorizationFailedError, NOT_ALLOWED),
    (TransactionalIdAuthorizationFailedError, NOT_ALLOWED),
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
    """Return the exit code for ``error``: FAILED if its class has none.

    If the quorum of controllers is lost, a command retries until its time limit. The class of its last error
    depends on the request that failed last, so the code is TIMED_OUT for all of them.
    """
    if isinstance(error, KafkaliteError) and error.is_quorum_lost:
        return TIMED_OUT
    for cls, code in _BY_CLASS:
        if isinstance(error, cls):
            return code
    return FAILED
