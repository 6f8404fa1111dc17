"""The errors of kafkalite's API. Some modules define errors of their own.

::

    KafkaliteError
    ├── ConfigError                  a setting has an invalid value; names key, value and allowed values
    ├── MissingExtraError            an optional package is not installed
    ├── ListenError                  the broker cannot listen on an address
    ├── ProtocolError                bytes or messages violate the protocol
    │   ├── LocalProtocolError       ... and were not sent
    │   └── RemoteProtocolError      ... and came from the peer
    ├── RecordError                  a record or batch cannot be built or read
    │   ├── SerializationError       a key or value can't be serialized or deserialized
    │   ├── CorruptBatchError        the CRC, a length or the layout is wrong
    │   └── BatchTooLargeError       a batch, compressed or decompressed, exceeds a limit
    ├── StorageError                 an error of the log on disk
    │   ├── CorruptLogError          a log is damaged before its end: file, position, expected, actual
    │   │   └── WrongFileTypeError   ... for example, a directory, link or pipe is in the place of a file
    │   ├── StorageExhaustedError    a resource is exhausted; nothing was written, a later attempt may succeed
    │   │   ├── DiskFullError        ... space on the disk
    │   │   └── TooManyOpenFilesError ... file descriptors
    │   ├── LogOfflineError          a write or sync failed earlier; the log refuses appends
    │   ├── ShortLeaderError         a leader lacks committed records that its follower has
    │   └── DataDirectoryError       the directory is locked, or has another cluster id or version
    │       └── DamagedIdentityError ... its node.json is damaged
    ├── ClientError                  raised by producer, consumer, admin
    │   ├── ClientClosedError
    │   ├── ForkedClientError        a blocking client is used in a process forked from its own
    │   ├── ConnectionFailedError    no broker could be reached
    │   │   └── AuthenticationError
    │   │       ├── SslAuthenticationError ... because client and broker did not agree on TLS and certificates
    │   │       └── SaslAuthenticationError ... because the client could not log in
    │   ├── RequestTimeoutError
    │   ├── DeliveryTimeoutError     delivery.timeout.ms passed; the outcome is unknown
    │   ├── DeliveryFailedError      flush() or close() found records that were not delivered
    │   ├── RecordTooLargeError      a record or a prebuilt batch exceeds max.request.size
    │   ├── BufferFullError          buffer.memory stayed full for max.block.ms
    │   ├── NotSubscribedError       a consumer without topics or partitions was asked for records
    │   ├── NoOffsetError            there is no position, and auto.offset.reset is none
    │   ├── LogTruncationError       records that were read are no longer in the log
    │   ├── CommitFailedError        offsets were not committed: for example, the consumer was expelled
    │   │   └── MaxPollIntervalError the application exceeded max.poll.interval.ms; the consumer left
    │   ├── TransactionAbortedError  the transaction of the record was aborted or has ended
    │   └── TransactionStateError    the call is not valid in the state of the transaction
    └── BrokerError                  an error code in a response; one class per code
"""

# Long because it is the one list of all errors.

# Tests: tests/broker/test_error_responses.py

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from kafkalite.model import Record, TopicPartition


class ErrorCode(enum.IntEnum):
    """Error codes on the wire: Kafka's numbers and names, and kafkalite's own from 1000."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    UNACCEPTABLE_CREDENTIAL = 93
    INVALID_UPDATE_VERSION = 95
    UNKNOWN_TOPIC_ID = 100
    DUPLICATE_BROKER_REGISTRATION = 101
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    INELIGIBLE_REPLICA = 107
    NEW_LEADER_ELECTED = 108
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    TRANSACTION_ABORTABLE = 120
    INVALID_VOTER_KEY = 125
    DUPLICATE_VOTER = 126
    VOTER_NOT_FOUND = 127
    INVALID_REGULAR_EXPRESSION = 128
    UNKNOWN_API = 1000
    SHUTTING_DOWN = 1001
    FINISHED_BATCH = 1002
    VOTER_NOT_CAUGHT_UP = 1003
    VOTER_CHANGE_PENDING = 1004


class KafkaliteError(Exception):
    """The base class of kafkalite's errors. ``hint`` states what the user can do; it may be empty."""

    #: Whether a client gave up because the controllers have (probably) lost their majority.
    is_quorum_lost = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(KafkaliteError):
    def __init__(self, *, key: str, value: Any, allowed: str, source: str = "") -> None:
        where = f" (in {source})" if source else ""
        got = f" is {value!r}, but must be" if value is not None else ":"
        super().__init__(f"{key}{got} {allowed}{where}")
        self.key = key
        self.value = value
        self.allowed = allowed
        self.source = source


class MissingExtraError(KafkaliteError):
    """An optional package is not installed. The hint names the extra of kafkalite that contains it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed",
            hint=f"pip install 'kafkalite[{extra}]'",
        )


class ListenError(KafkaliteError): ...


class ProtocolError(KafkaliteError):
    """The base class of LocalProtocolError and RemoteProtocolError. It is never raised itself."""


class LocalProtocolError(ProtocolError): ...


class RemoteProtocolError(ProtocolError): ...


class RecordError(KafkaliteError):
    """A record or batch that cannot be built or read.

    The attributes are set if a consumer raises the error for a fetched batch. Unless ``next_offset`` is None,
    ``seek(error.topic_partition, error.next_offset)`` then skips the batch (SerializationError: the record).
    """

    topic_partition: TopicPartition | None = None
    offset: int | None = None  #: the offset of the first record that the consumer could not return
    next_offset: int | None = None  #: the offset after the batch; None if the batch header is damaged, too


class SerializationError(RecordError):
    """A serializer or deserializer raised ``__cause__``. A consumer's position stays at the record."""

    record: Record | None = None  #: the record with key and value as bytes; None if a serializer failed


class CorruptBatchError(RecordError): ...


class BatchTooLargeError(RecordError): ...


class StorageError(KafkaliteError): ...


class CorruptLogError(StorageError):
    def __init__(self, *, path: str, position: int, expected: str, actual: str, hint: str = "") -> None:
        super().__init__(
            f"{path} is damaged at position {position}: expected {expected}, found {actual}",
            hint=hint or "restore the partition from a replica or a backup; nothing was deleted",
        )
        self.path = path
        self.position = position


class WrongFileTypeError(CorruptLogError, OSError):
    """A path in the data directory has the wrong file type: for example, a directory instead of a file.

    The path could not be opened as the expected type, so the error is an OSError, too.
    """

    def __init__(self, *, path: str, expected: str, actual: str) -> None:
        StorageError.__init__(
            self,
            f"{path} is {actual}, but must be {expected}",
            hint="move it away, and restore the file from a replica or a backup",
        )
        self.path = path
        self.position = 0
        self.actual = actual


class StorageExhaustedError(StorageError):
    """A resource of the node is exhausted. Nothing was written; a later attempt may succeed (R55)."""


class DiskFullError(StorageExhaustedError): ...


class LogMovingError(StorageExhaustedError):
    """A log takes no append for a moment, because its copy in another data directory replaces it (R85)."""


class TooManyOpenFilesError(StorageExhaustedError): ...


class LogOfflineError(StorageError): ...


class ShortLeaderError(StorageError):
    """A follower refuses to truncate committed records that its leader lacks (R49).

    ``offset`` is the offset to which the follower would have to truncate its log, because the leader's log
    ends or differs there. ``committed_end`` is the exclusive end of the records that the follower knows to be
    committed.
    """

    def __init__(self, *, partition: object, leader_id: int, offset: int, committed_end: int) -> None:
        super().__init__(
            f"leader {leader_id} of {partition} lacks {committed_end - offset} committed records from offset"
            f" {offset} on; this replica keeps them",
            hint="the controller gives leadership to a complete replica; if it cannot, choose one with"
            " 'kl cluster elect --unclean'",
        )
        self.offset = offset
        self.committed_end = committed_end


class DataDirectoryError(StorageError): ...


class DamagedIdentityError(DataDirectoryError): ...


class ClientError(KafkaliteError): ...


class ClientClosedError(ClientError): ...


class ForkedClientError(ClientError): ...


class ConnectionFailedError(ClientError): ...


#: The hint of an error that is caused by a name without an address.
HOST_NAME_HINT: Final = "check the host name"

#: The hint of an error that is caused by plain text where TLS is expected, or by TLS where it is not.
TLS_HINT: Final = (
    "security.protocol of the client must be that of the listener: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL"
)


class AuthenticationError(ConnectionFailedError):
    """The TLS handshake or the login failed.

    While a client is being opened, it does not retry after this error. An open client does, because
    certificates may be renewed, and users added.
    """


class SslAuthenticationError(AuthenticationError):
    """Client and broker did not agree on TLS: for example, one of them refused the other's certificate."""


class SaslAuthenticationError(AuthenticationError):
    """The client could not log in: for example, the broker refused its password, or requires a login."""


class RequestTimeoutError(ClientError): ...


class DeliveryTimeoutError(ClientError): ...


class DeliveryFailedError(ClientError):
    """flush() or close() found failed records whose errors the application has not retrieved.

    ``counts`` maps (topic, partition) to the number of those records. The partition is -1 for records that
    were not assigned to one yet. ``__cause__`` is the first error.
    """

    def __init__(self, counts: Mapping[tuple[str, int], int], first_error: Exception) -> None:
        total = sum(counts.values())
        first_five = list(counts.items())[:5]
        shown = ", ".join(
            f"{topic if partition < 0 else f'{topic}-{partition}'}: {count}"
            for (topic, partition), count in first_five
        )
        if len(counts) > len(first_five):
            shown += f" and {len(counts) - len(first_five)} more partitions"
        super().__init__(
            f"{total} {'record was' if total == 1 else 'records were'} not delivered ({shown});"
            f" the first error: {first_error}",
            hint="await the deliveries, or pass on_delivery, to see which records",
        )
        self.counts = dict(counts)
        self.record_count = total
        self.__cause__ = first_error


class RecordTooLargeError(ClientError): ...


class BufferFullError(ClientError): ...


class NotSubscribedError(ClientError): ...


class NoOffsetError(ClientError):
    topic_partition: TopicPartition | None = None  #: the partition without a valid position


class LogTruncationError(ClientError):
    """Records that the consumer had already read are no longer in the log (KIP-320).

    The records below ``diverging_offset`` are still those that were read. From that offset on, the log
    differs.
    """

    def __init__(self, message: str, *, diverging_offset: int, hint: str = "") -> None:
        super().__init__(message, hint=hint or "seek() to the offset to continue at")
        self.diverging_offset = diverging_offset


class CommitFailedError(ClientError):
    """Offsets were not committed: the consumer is no member, or does not own one of the partitions (R39)."""


class MaxPollIntervalError(CommitFailedError):
    """The consumer left its group because the application read no records for max.poll.interval.ms."""


class TransactionAbortedError(ClientError):
    """The transaction of the record was aborted or has ended. No read_committed consumer gets the record."""


class TransactionStateError(ClientError):
    """The call is not valid in the current state of the producer's transaction."""


class BrokerError(KafkaliteError):
    """An error code in a broker's response. Each code except NONE has its own subclass."""

    code: ClassVar[ErrorCode] = ErrorCode.UNKNOWN_SERVER_ERROR
    retriable: ClassVar[bool] = False
    #: Whether the client must refresh its metadata before it retries.
    refresh_metadata: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message or self.code.name, hint=hint or self.default_hint)

    def __init_subclass__(
        cls,
        *,
        code: ErrorCode | None = None,
        retriable: bool = False,
        refresh_metadata: bool = False,
        hint: str = "",
    ) -> None:
        """If ``code`` is None, derive it from the class name: NotControllerError has NOT_CONTROLLER."""
        super().__init_subclass__()
        cls.code = code or ErrorCode[_CAPITAL.sub("_", cls.__name__.removesuffix("Error")).upper()]
        assert cls.code not in _CLASS_BY_CODE, f"{cls.code!r} has two classes"
        cls.retriable, cls.refresh_metadata, cls.default_hint = retriable, refresh_metadata, hint
        _CLASS_BY_CODE[cls.code] = cls


_CLASS_BY_CODE: dict[ErrorCode, type[BrokerError]] = {}
_CAPITAL: Final = re.compile("(?<!^)(?=[A-Z])")


def broker_error(code: int, message: str = "", *, about: str = "") -> BrokerError:
    """Return the exception for an error code other than NONE: UnknownServerError if the code is unknown.

    ``about`` names the affected object, such as a partition; it is put before ``message`` unless ``message``
    contains it. If ``message`` ends with the default hint of the error's class in parentheses, the hint is
    removed from it.
    """
    try:
        cls = _CLASS_BY_CODE[ErrorCode(code)]
    except ValueError:
        cls, message = UnknownServerError, f"error code {code}: {message}"
    message = message.removesuffix(f" ({cls.default_hint})")
    if about and about not in message:
        message = f"{about}: {message or cls.code.name}"
    return cls(message)


class UnknownServerError(
    BrokerError, code=ErrorCode.UNKNOWN_SERVER_ERROR, hint="the broker's log has the cause"
): ...


class OffsetOutOfRangeError(
    BrokerError, hint="seek inside [log start offset, log end offset], or set auto.offset.reset"
): ...


class CorruptMessageError(BrokerError): ...


class UnknownTopicOrPartitionError(
    BrokerError, retriable=True, refresh_metadata=True, hint="see 'kl topic list'"
): ...


class LeaderNotAvailableError(BrokerError, retriable=True, refresh_metadata=True): ...


class NotLeaderOrFollowerError(BrokerError, retriable=True, refresh_metadata=True): ...


class RequestTimedOutError(BrokerError, retriable=True): ...


class MessageTooLargeError(
    BrokerError, hint="raise the topic's max.message.bytes, or send smaller batches"
): ...


class InvalidTopicError(BrokerError, code=ErrorCode.INVALID_TOPIC_EXCEPTION): ...


class NotEnoughReplicasError(BrokerError, retriable=True): ...


class NotEnoughReplicasAfterAppendError(BrokerError, retriable=True): ...


class InvalidRequiredAcksError(BrokerError): ...


class InvalidTimestampError(BrokerError): ...


class UnsupportedVersionError(BrokerError): ...


class TopicAlreadyExistsError(BrokerError): ...


class InvalidPartitionsError(BrokerError): ...


class InvalidReplicationFactorError(BrokerError): ...


class InvalidReplicaAssignmentError(BrokerError): ...


class NoReassignmentInProgressError(BrokerError): ...


class LogDirNotFoundError(BrokerError, hint="'kl log dirs --disks' lists the data directories"): ...


class InvalidConfigError(BrokerError): ...


class NotControllerError(BrokerError, retriable=True, refresh_metadata=True): ...


class InvalidRequestError(BrokerError): ...


class UnsupportedForMessageFormatError(BrokerError): ...


class PolicyViolationError(BrokerError): ...


class KafkaStorageError(
    BrokerError,
    code=ErrorCode.KAFKA_STORAGE_ERROR,
    retriable=True,
    refresh_metadata=True,
    hint="'kl cluster status' shows damaged logs and full disks; see also the broker's log",
):
    """A broker cannot read or write a log: for example, the log is damaged, or its disk is full."""

    topic_partition: TopicPartition | None = None  #: set if a consumer raises the error


class FencedLeaderEpochError(BrokerError, retriable=True, refresh_metadata=True): ...


class UnknownLeaderEpochError(BrokerError, retriable=True): ...


class UnsupportedCompressionTypeError(BrokerError): ...


class OffsetNotAvailableError(BrokerError, retriable=True): ...


class InvalidRecordError(BrokerError): ...


class ThrottlingQuotaExceededError(BrokerError, retriable=True): ...


class InconsistentClusterIdError(BrokerError): ...


class UnknownApiError(BrokerError): ...


class ShuttingDownError(BrokerError, retriable=True, refresh_metadata=True): ...


class ClusterAuthorizationFailedError(BrokerError): ...


class TopicAuthorizationFailedError(BrokerError): ...


class GroupAuthorizationFailedError(BrokerError): ...


class TransactionalIdAuthorizationFailedError(BrokerError): ...


class ResourceNotFoundError(BrokerError, hint="'kl user list' shows the users"): ...


class UnacceptableCredentialError(BrokerError): ...


class UnsupportedSaslMechanismError(
    BrokerError, hint="set sasl.mechanism to one of sasl.enabled.mechanisms of the brokers"
): ...


class IllegalSaslStateError(BrokerError): ...


class SaslAuthenticationFailedError(
    BrokerError, hint="check sasl.username and sasl.password, or the token"
): ...


class OutOfOrderSequenceNumberError(
    BrokerError,
    hint="earlier records were lost or another client used the producer's id; send them with a new producer",
): ...


class DuplicateSequenceNumberError(BrokerError): ...


class InvalidProducerEpochError(BrokerError, hint="another producer has taken over this producer id"): ...


class UnknownProducerIdError(
    BrokerError,
    hint="the broker has forgotten this producer: its records were deleted, or it was idle too long",
): ...


class FetchSessionIdNotFoundError(BrokerError, retriable=True): ...


class InvalidFetchSessionEpochError(BrokerError, retriable=True): ...


class StaleBrokerEpochError(BrokerError): ...


class PreferredLeaderNotAvailableError(BrokerError, retriable=True): ...


class EligibleLeadersNotAvailableError(BrokerError, retriable=True): ...


class ElectionNotNeededError(BrokerError): ...


class InvalidUpdateVersionError(BrokerError): ...


class UnknownTopicIdError(BrokerError, retriable=True, refresh_metadata=True): ...


class DuplicateBrokerRegistrationError(BrokerError, hint="another live process has this node.id"): ...


class BrokerIdNotRegisteredError(BrokerError): ...


class IneligibleReplicaError(BrokerError): ...


class NewLeaderElectedError(BrokerError): ...


class InvalidVoterKeyError(
    BrokerError, hint="'kl metadata quorum' shows the directory ids of voters and observers"
): ...


class DuplicateVoterError(
    BrokerError, hint="if its disk was replaced, remove the voter first, then add it again"
): ...


class VoterNotFoundError(BrokerError, hint="'kl metadata quorum' shows the voters and observers"): ...


class VoterNotCaughtUpError(
    BrokerError, retriable=True, hint="try again when 'kl metadata quorum' shows a small lag"
): ...


class VoterChangePendingError(
    BrokerError, retriable=True, hint="try again; if it stays, a majority of the voters is down"
): ...


class CoordinatorLoadInProgressError(BrokerError, retriable=True): ...


class CoordinatorNotAvailableError(
    BrokerError, retriable=True, hint="the internal topic is being created or has no leader"
): ...


class NotCoordinatorError(BrokerError, retriable=True): ...


class OffsetMetadataTooLargeError(BrokerError, hint="see offset.metadata.max.bytes"): ...


class InvalidGroupIdError(BrokerError): ...


class UnknownMemberIdError(BrokerError, hint="the member was expelled or never joined; it must rejoin"): ...


class InvalidTxnStateError(BrokerError): ...


class InvalidProducerIdMappingError(
    BrokerError, hint="the transactional id belongs to another producer id now, or has expired"
): ...


class InvalidTransactionTimeoutError(
    BrokerError, hint="see transaction.timeout.ms, and transaction.max.timeout.ms of the brokers"
): ...


class ConcurrentTransactionsError(
    BrokerError, retriable=True, hint="the previous transaction is not complete yet"
): ...


class TransactionCoordinatorFencedError(BrokerError): ...


class NonEmptyGroupError(BrokerError, hint="stop the group's consumers first"): ...


class GroupIdNotFoundError(BrokerError, hint="'kl group list' shows the groups"): ...


class GroupMaxSizeReachedError(BrokerError, hint="see group.max.size"): ...


class FencedInstanceIdError(BrokerError, hint="another consumer has taken over this group.instance.id"): ...


class GroupSubscribedToTopicError(BrokerError): ...


class UnstableOffsetCommitError(
    BrokerError, retriable=True, hint="a transaction with an offset of this partition is still open"
): ...


class ProducerFencedError(
    BrokerError, hint="another producer with the same transactional.id has started; close this one"
): ...


class TransactionalIdNotFoundError(BrokerError, hint="'kl txn list' shows the ids"): ...


class FencedMemberEpochError(
    BrokerError, hint="the member was expelled and must rejoin; its partitions may have other owners"
): ...


class UnreleasedInstanceIdError(BrokerError, hint="another live consumer has this group.instance.id"): ...


class UnsupportedAssignorError(BrokerError, hint="uniform or range"): ...


class StaleMemberEpochError(
    BrokerError, hint="the member must receive its new epoch with its next heartbeat first"
): ...


class TransactionAbortableError(BrokerError, hint="abort the transaction; the next one can succeed"): ...


class InvalidRegularExpressionError(BrokerError): ...


class FinishedBatchError(BrokerError, hint="a later batch of this application is already decided"): ...
