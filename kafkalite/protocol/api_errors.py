"""The error codes that each API may return, and the condition of a code if its name does not state it.

A response has a code for the request as a whole, and may have one in each *item*: a topic, a partition or
another resource in a list of the response. The tables of codes in ``docs/protocol.json`` and
``docs/protocol.md`` are made from these declarations. ``kl conformance`` reports a response with an
undeclared code as a violation.
"""

# Long because the tables list every API.
# Tests: tests/protocol/test_api_errors.py

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.structs import Struct

Codes = Mapping[ErrorCode, str]
"""{error code: the condition in words, or "" if the name of the code states it}."""


class ApiErrors(NamedTuple):
    """The codes of one API. ``whole`` does not include the codes of ``ANY_REQUEST``."""

    whole: Codes  #: of the request as a whole
    item: Codes  #: of one topic, partition or other resource


def _codes(*parts: Codes, **conditions: str) -> Codes:
    """Return the codes in ``parts``, and those given by keyword, such as ``NOT_CONTROLLER="condition"``."""
    merged: dict[ErrorCode, str] = {}
    for part in parts:
        merged.update(part)
    merged.update({ErrorCode[name]: condition for name, condition in conditions.items()})
    return MappingProxyType(merged)


_NO_CODES: Final[Codes] = _codes()

#: The codes with which a request of any API may fail as a whole.
ANY_REQUEST: Final = _codes(
    UNKNOWN_API="there is no such API key",
    UNSUPPORTED_VERSION="the API has no such version",
    INVALID_REQUEST="the body is not its struct, or a value is outside its limits",
    CLUSTER_AUTHORIZATION_FAILED="without proof of the cluster's secret: a request of section 7, and any at a"
    " controller's own listener; and if no access control rule allows it",
    TOPIC_AUTHORIZATION_FAILED="no access control rule allows it, likewise below",
    GROUP_AUTHORIZATION_FAILED="",
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED="",
    ILLEGAL_SASL_STATE="the listener requires a login, or the session has expired; the broker closes",
    SHUTTING_DOWN="the broker stops",
    UNKNOWN_SERVER_ERROR="a bug; the broker's log has the traceback",
)
COORDINATOR: Final = _codes(
    NOT_COORDINATOR="find the coordinator again",
    COORDINATOR_NOT_AVAILABLE="its log accepts no records now",
    COORDINATOR_LOAD_IN_PROGRESS="a new coordinator reads its log",
)
CONTROLLER: Final = _codes(
    NOT_CONTROLLER="",
    REQUEST_TIMED_OUT="no controller responded in time; the change may still be made",
    KAFKA_STORAGE_ERROR="the controller's log has failed",
    THROTTLING_QUOTA_EXCEEDED="too many commands wait for the controller, or the client is above its"
    " controller_mutation_rate",
)
_TO_CONTROLLER: Final = _codes(
    NOT_CONTROLLER="",
    CLUSTER_AUTHORIZATION_FAILED="also if the request names another node than the connection",
)
_DEBTOR: Final = _codes(
    THROTTLING_QUOTA_EXCEEDED="the first of a connection, while the client's other connections have exceeded"
    " its quota: nothing was done; repeat it after the throttle time"
)
_LEADER: Final = _codes(
    UNKNOWN_TOPIC_OR_PARTITION="",
    NOT_LEADER_OR_FOLLOWER="also while the broker reaches no controller",
    KAFKA_STORAGE_ERROR="the log is offline or damaged",
)
_LEADER_IN_EPOCH: Final = _codes(
    _LEADER,
    FENCED_LEADER_EPOCH="the request has an older leader epoch",
    UNKNOWN_LEADER_EPOCH="the request has a newer leader epoch",
)
_UNSETTLED: Final = _codes(OFFSET_NOT_AVAILABLE="a new leader does not know yet which records are committed")
_ISOLATION: Final = _codes(INVALID_REQUEST="the isolation level is neither 0 nor 1")
_TRANSACTION: Final = _codes(
    INVALID_PRODUCER_EPOCH="",
    PRODUCER_FENCED="another producer has started with this transactional id",
    INVALID_TXN_STATE="",
    INVALID_PRODUCER_ID_MAPPING="the transactional id has another producer id",
    CONCURRENT_TRANSACTIONS="the markers of the previous transaction are being written: send it again",
)
_MEMBER: Final = _codes(
    INVALID_GROUP_ID="it has 1 to 255 characters",
    UNKNOWN_MEMBER_ID="",
    FENCED_INSTANCE_ID="another member has the instance id now",
    STALE_MEMBER_EPOCH="take the epoch of the next heartbeat, then repeat",
)
_OFFSET: Final = _codes(
    UNKNOWN_TOPIC_OR_PARTITION="",
    UNKNOWN_TOPIC_ID="the topic was created again",
    OFFSET_METADATA_TOO_LARGE="",
    INVALID_REQUEST="a negative offset",
    POLICY_VIOLATION="the group would exceed group.max.offsets",
)
_TOPIC: Final = _codes(
    INVALID_TOPIC_EXCEPTION="",
    INVALID_REQUEST="a name twice, or a request over its limits",
    POLICY_VIOLATION="max.topics, max.partitions or delete.topic.enable",
)

API_ERRORS: Final[Mapping[ApiKey, ApiErrors]] = MappingProxyType(
    {
        # --- data
        ApiKey.PRODUCE: ApiErrors(
            _codes(_DEBTOR, INVALID_REQUIRED_ACKS="acks is none of 0, 1, -1"),
            _codes(
                _LEADER,
                _TRANSACTION,
                COORDINATOR,
                CORRUPT_MESSAGE="header, length, CRC, columns",
                UNSUPPORTED_COMPRESSION_TYPE="",
                UNSUPPORTED_FOR_MESSAGE_FORMAT="the body is Kafka's rows",
                MESSAGE_TOO_LARGE="above max.message.bytes, or it declares more than 16 MiB unpacked",
                INVALID_TIMESTAMP="attribute bit 3, or a time outside message.timestamp.before.max.ms"
                " and message.timestamp.after.max.ms",
                INVALID_RECORD="a control batch, a producer id without epoch or sequence, or a"
                " transactional batch without a producer id or without a transactional id",
                INVALID_TOPIC_EXCEPTION="an internal topic",
                TOPIC_AUTHORIZATION_FAILED="no rule allows Write",
                INVALID_REQUIRED_ACKS="a transactional batch with acks other than -1",
                NOT_ENOUGH_REPLICAS="nothing was appended",
                NOT_ENOUGH_REPLICAS_AFTER_APPEND="appended, then the in-sync set shrank",
                REQUEST_TIMED_OUT="appended, not acknowledged within timeout_ms",
                OUT_OF_ORDER_SEQUENCE_NUMBER="section 5.1",
                UNKNOWN_PRODUCER_ID="section 5.1",
                POLICY_VIOLATION="the partition has too many idempotent producers",
            ),
        ),
        ApiKey.FETCH: ApiErrors(
            _codes(_DEBTOR, _ISOLATION),
            _codes(
                _LEADER_IN_EPOCH,
                OFFSET_NOT_AVAILABLE="a new leader does not know yet which records are committed, or a "
                "follower does not know that the offset is",
                TOPIC_AUTHORIZATION_FAILED="no rule allows Read",
                OFFSET_OUT_OF_RANGE="below the log start or above the high watermark",
            ),
        ),
        ApiKey.LIST_OFFSETS: ApiErrors(
            _ISOLATION,
            _codes(_LEADER_IN_EPOCH, _UNSETTLED, INVALID_REQUEST="a negative time other than -1, -2, -3"),
        ),
        ApiKey.OFFSETS_FOR_BYTES: ApiErrors(
            _ISOLATION,
            _codes(
                _LEADER_IN_EPOCH,
                _UNSETTLED,
                INVALID_REQUEST="a negative offset, or an end before the start",
                OFFSET_OUT_OF_RANGE="the range begins above the last readable offset",
            ),
        ),
        ApiKey.OFFSETS_FOR_LEADER_EPOCH: ApiErrors(_NO_CODES, _LEADER_IN_EPOCH),
        ApiKey.DELETE_RECORDS: ApiErrors(
            _NO_CODES,
            _codes(
                _LEADER,
                OFFSET_OUT_OF_RANGE="below -1 or above the high watermark",
                REQUEST_TIMED_OUT="deleted at the leader, not yet at every in-sync replica",
                INVALID_TOPIC_EXCEPTION="an internal topic",
            ),
        ),
        ApiKey.INIT_PRODUCER_ID: ApiErrors(
            _codes(
                COORDINATOR,
                REQUEST_TIMED_OUT="no controller responded with a block of ids",
                CONCURRENT_TRANSACTIONS="the open transaction is being aborted: send it again",
                INVALID_TRANSACTION_TIMEOUT="not 1 to transaction.max.timeout.ms",
                PRODUCER_FENCED="",
                INVALID_TXN_STATE="the name is an application's, see JoinTxnGroup",
                POLICY_VIOLATION="transactional.id.max.count is reached",
            ),
            _NO_CODES,
        ),
        # --- admin
        ApiKey.CREATE_TOPICS: ApiErrors(
            CONTROLLER,
            _codes(
                _TOPIC,
                TOPIC_ALREADY_EXISTS="",
                INVALID_PARTITIONS="",
                INVALID_REPLICATION_FACTOR="",
                INVALID_CONFIG="",
            ),
        ),
        ApiKey.DELETE_TOPICS: ApiErrors(CONTROLLER, _codes(_TOPIC, UNKNOWN_TOPIC_OR_PARTITION="")),
        ApiKey.CREATE_PARTITIONS: ApiErrors(
            CONTROLLER,
            _codes(
                _TOPIC, UNKNOWN_TOPIC_OR_PARTITION="", INVALID_PARTITIONS="", INVALID_REPLICATION_FACTOR=""
            ),
        ),
        ApiKey.DESCRIBE_CONFIGS: ApiErrors(
            _codes(INVALID_REQUEST="too many resources"),
            _codes(UNKNOWN_TOPIC_OR_PARTITION="", INVALID_REQUEST="another broker, or another resource type"),
        ),
        ApiKey.ALTER_CONFIGS: ApiErrors(
            CONTROLLER,
            _codes(
                UNKNOWN_TOPIC_OR_PARTITION="",
                INVALID_CONFIG="",
                INVALID_REQUEST="",
                INVALID_TOPIC_EXCEPTION="an internal topic",
            ),
        ),
        ApiKey.DESCRIBE_CLIENT_QUOTAS: ApiErrors(
            _codes(INVALID_REQUEST="an unknown or repeated entity type, or an unknown match type"), _NO_CODES
        ),
        ApiKey.ALTER_CLIENT_QUOTAS: ApiErrors(
            CONTROLLER,
            _codes(
                INVALID_REQUEST="no such entity, an entity twice, or too many changes",
                INVALID_CONFIG="an unknown or repeated key, or a value that is no number from 0.001 to 2^63",
            ),
        ),
        ApiKey.DESCRIBE_LOG_DIRS: ApiErrors(_NO_CODES, _NO_CODES),
        ApiKey.ALTER_REPLICA_LOG_DIRS: ApiErrors(
            _NO_CODES,
            _codes(
                LOG_DIR_NOT_FOUND="the broker has no such data directory, or it has failed",
                NOT_LEADER_OR_FOLLOWER="the broker has no replica of the partition",
                KAFKA_STORAGE_ERROR="the log is offline",
            ),
        ),
        # --- security
        ApiKey.SASL_HANDSHAKE: ApiErrors(
            _codes(
                ILLEGAL_SASL_STATE="the listener requires no login, or a login has begun; the broker closes",
                UNSUPPORTED_SASL_MECHANISM="the broker closes",
            ),
            _NO_CODES,
        ),
        ApiKey.SASL_AUTHENTICATE: ApiErrors(
            _codes(
                ILLEGAL_SASL_STATE="no SaslHandshake came before; the broker closes",
                SASL_AUTHENTICATION_FAILED="sent after a delay; the broker closes",
            ),
            _NO_CODES,
        ),
        ApiKey.CREATE_ACLS: ApiErrors(
            _codes(CONTROLLER, INVALID_REQUEST="too many ACLs"),
            _codes(
                INVALID_REQUEST="the ACL could never apply",
                POLICY_VIOLATION="the cluster has the maximum of ACLs",
            ),
        ),
        ApiKey.DELETE_ACLS: ApiErrors(
            _codes(
                CONTROLLER, INVALID_REQUEST="too many selections, or too many ACLs selected; none is removed"
            ),
            _NO_CODES,
        ),
        ApiKey.DESCRIBE_ACLS: ApiErrors(
            _codes(INVALID_REQUEST="more ACLs than a response can have"), _NO_CODES
        ),
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: ApiErrors(
            _codes(CONTROLLER, INVALID_REQUEST="too many changes, or a user without a name"),
            _codes(
                INVALID_REQUEST="the user's name, an unknown mechanism, or two changes of one credential",
                UNACCEPTABLE_CREDENTIAL="salt, iterations or length",
                RESOURCE_NOT_FOUND="nothing to delete",
                POLICY_VIOLATION="the cluster has the maximum of credentials",
            ),
        ),
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: ApiErrors(
            _NO_CODES, _codes(RESOURCE_NOT_FOUND="there is no such user")
        ),
        ApiKey.ELECT_LEADERS: ApiErrors(
            _codes(
                CONTROLLER,
                CLUSTER_AUTHORIZATION_FAILED="an unclean election without proof of the cluster's secret:"
                " ClusterHello, ClusterProof, with -2 as the node id of an operator",
            ),
            _codes(
                UNKNOWN_TOPIC_OR_PARTITION="",
                ELECTION_NOT_NEEDED="that replica leads already",
                PREFERRED_LEADER_NOT_AVAILABLE="",
                ELIGIBLE_LEADERS_NOT_AVAILABLE="",
                INVALID_REQUEST="a partition twice",
            ),
        ),
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: ApiErrors(
            _codes(CONTROLLER, UNSUPPORTED_VERSION="the finalised level of metadata.version is too low"),
            _codes(
                UNKNOWN_TOPIC_OR_PARTITION="",
                NO_REASSIGNMENT_IN_PROGRESS="there is nothing to cancel",
                INVALID_REPLICA_ASSIGNMENT="no replica, a broker twice, or one that is not registered",
                INVALID_REPLICATION_FACTOR="another number of replicas without"
                " allow_replication_factor_change, or fewer than min.insync.replicas",
            ),
        ),
        ApiKey.LIST_PARTITION_REASSIGNMENTS: ApiErrors(_codes(CONTROLLER), _NO_CODES),
        ApiKey.UPDATE_FEATURES: ApiErrors(
            _codes(CONTROLLER),
            _codes(
                INVALID_UPDATE_VERSION="an unknown feature, a lower level than the finalised one, or a"
                " level that a broker or voter does not support; the message names them"
            ),
        ),
        ApiKey.UNREGISTER_BROKER: ApiErrors(
            _codes(
                CONTROLLER,
                UNSUPPORTED_VERSION="as in AlterPartitionReassignments",
                BROKER_ID_NOT_REGISTERED="",
                INVALID_REQUEST="it is a voter of the metadata quorum, or has replicas: move them first",
            ),
            _NO_CODES,
        ),
        ApiKey.ADD_RAFT_VOTER: ApiErrors(
            _codes(
                CONTROLLER,
                INVALID_REQUEST="the node is a cluster of its own, or there are too many voters",
                DUPLICATE_VOTER="the node is a voter already, maybe with another directory",
                VOTER_NOT_FOUND="the node does not follow the log as an observer",
                INVALID_VOTER_KEY="the observer has another directory",
                VOTER_NOT_CAUGHT_UP="the observer lacks committed entries",
                VOTER_CHANGE_PENDING="another change is not committed yet",
            ),
            _NO_CODES,
        ),
        ApiKey.REMOVE_RAFT_VOTER: ApiErrors(
            _codes(
                CONTROLLER,
                INVALID_REQUEST="it is the only voter, or the node is a cluster of its own",
                VOTER_NOT_FOUND="",
                INVALID_VOTER_KEY="the voter has another directory",
                VOTER_CHANGE_PENDING="another change is not committed yet",
            ),
            _NO_CODES,
        ),
        ApiKey.CONTROLLED_SHUTDOWN: ApiErrors(
            _codes(
                INVALID_REQUEST="no such broker",
                REQUEST_TIMED_OUT="",
                CLUSTER_AUTHORIZATION_FAILED="as in ElectLeaders",
            ),
            _NO_CODES,
        ),
        # --- metadata
        ApiKey.API_VERSIONS: ApiErrors(
            _codes(LEADER_NOT_AVAILABLE="the broker is starting, and reaches no controller; it closes"),
            _NO_CODES,
        ),
        ApiKey.METADATA: ApiErrors(
            _codes(CONTROLLER, INVALID_REQUEST="too many topics"),
            _codes(
                _TOPIC,
                TOPIC_AUTHORIZATION_FAILED="no rule allows Describe",
                UNKNOWN_TOPIC_OR_PARTITION="",
                LEADER_NOT_AVAILABLE="of a partition",
                THROTTLING_QUOTA_EXCEEDED="the client is above its controller_mutation_rate",
                INVALID_REPLICATION_FACTOR="the topic could not be created",
                INVALID_PARTITIONS="the topic could not be created",
            ),
        ),
        ApiKey.DESCRIBE_CLUSTER: ApiErrors(_NO_CODES, _NO_CODES),
        ApiKey.DESCRIBE_QUORUM: ApiErrors(
            _codes(NOT_CONTROLLER="", REQUEST_TIMED_OUT="the node is no voter and reaches no leader"),
            _NO_CODES,
        ),
        ApiKey.DESCRIBE_METADATA: ApiErrors(_codes(INVALID_REQUEST="there is no such path"), _NO_CODES),
        ApiKey.DESCRIBE_RECOVERY: ApiErrors(
            _codes(NOT_CONTROLLER="", REQUEST_TIMED_OUT="no controller can be reached"), _NO_CODES
        ),
        ApiKey.DESCRIBE_FEATURES: ApiErrors(
            _codes(NOT_CONTROLLER="", REQUEST_TIMED_OUT="no controller can be reached"), _NO_CODES
        ),
        # --- groups
        ApiKey.FIND_COORDINATOR: ApiErrors(
            _codes(INVALID_REQUEST="another key type, or too many keys"),
            _codes(
                COORDINATOR_NOT_AVAILABLE="the topic is being created, or its partition has no leader now",
                INVALID_REQUEST="an empty key",
            ),
        ),
        ApiKey.CONSUMER_GROUP_HEARTBEAT: ApiErrors(
            _codes(
                COORDINATOR,
                INVALID_GROUP_ID="it has 1 to 255 characters",
                UNKNOWN_MEMBER_ID="the member was expelled: it drops its partitions and joins again",
                FENCED_MEMBER_EPOCH="as UNKNOWN_MEMBER_ID",
                FENCED_INSTANCE_ID="another member has the instance id now",
                UNRELEASED_INSTANCE_ID="the instance id's member has not left",
                UNSUPPORTED_ASSIGNOR="",
                INVALID_REGULAR_EXPRESSION="",
                GROUP_MAX_SIZE_REACHED="",
                POLICY_VIOLATION="group.max.count is reached",
                INVALID_REQUEST="ids, epochs, time-outs or partitions that are not valid",
            ),
            _NO_CODES,
        ),
        ApiKey.OFFSET_COMMIT: ApiErrors(
            _codes(
                COORDINATOR,
                _MEMBER,
                POLICY_VIOLATION="group.max.count is reached",
                INVALID_REQUEST="the member has committed on a newer connection",
            ),
            _OFFSET,
        ),
        ApiKey.OFFSET_FETCH: ApiErrors(
            _codes(COORDINATOR, UNKNOWN_MEMBER_ID="", STALE_MEMBER_EPOCH=""),
            _codes(UNSTABLE_OFFSET_COMMIT="with require_stable: an open transaction has an offset"),
        ),
        ApiKey.OFFSET_DELETE: ApiErrors(
            _codes(COORDINATOR, GROUP_ID_NOT_FOUND=""),
            _codes(GROUP_SUBSCRIBED_TO_TOPIC="a member of the group subscribes to it"),
        ),
        ApiKey.TXN_OFFSET_COMMIT: ApiErrors(
            _codes(
                COORDINATOR,
                _MEMBER,
                _TRANSACTION,
                UNKNOWN_TOPIC_OR_PARTITION="the coordinator's topic is not known there yet: send it again",
                POLICY_VIOLATION="group.max.count is reached",
            ),
            _OFFSET,
        ),
        ApiKey.LIST_GROUPS: ApiErrors(COORDINATOR, _NO_CODES),
        ApiKey.DESCRIBE_GROUPS: ApiErrors(
            _codes(INVALID_REQUEST="too many groups"), _codes(COORDINATOR, GROUP_ID_NOT_FOUND="")
        ),
        ApiKey.DELETE_GROUPS: ApiErrors(
            _codes(INVALID_REQUEST="too many groups"),
            _codes(COORDINATOR, GROUP_ID_NOT_FOUND="", NON_EMPTY_GROUP=""),
        ),
        # --- transactions
        ApiKey.END_TXN: ApiErrors(
            _codes(
                COORDINATOR,
                PRODUCER_FENCED="another producer has started, or the transaction timed out and was aborted",
                INVALID_PRODUCER_ID_MAPPING="the transactional id has another producer id",
                INVALID_TXN_STATE="the opposite was decided; or only EndTxnGroup decides the transaction",
                CONCURRENT_TRANSACTIONS="the markers of the previous transaction are being written",
                REQUEST_TIMED_OUT="the epochs are used up, and no controller responded with another id",
            ),
            _NO_CODES,
        ),
        ApiKey.JOIN_TXN_GROUP: ApiErrors(
            _codes(
                COORDINATOR,
                INVALID_REQUEST="a name or a batch id that is not valid",
                INVALID_TRANSACTION_TIMEOUT="not 1 to transaction.max.timeout.ms",
                INVALID_TXN_STATE="a plain transactional id, or a group with the maximum number of writers",
                CONCURRENT_TRANSACTIONS="the earlier attempt is being aborted: send it again",
                POLICY_VIOLATION="transactional.id.max.count is reached",
                REQUEST_TIMED_OUT="no controller responded with a block of ids",
            ),
            _NO_CODES,
        ),
        ApiKey.END_TXN_GROUP: ApiErrors(
            _codes(
                COORDINATOR,
                FINISHED_BATCH="a later batch is already decided",
                INVALID_REQUEST="a name or a batch id that is not valid",
                INVALID_TXN_STATE="a winner's transaction timed out or was restarted: nothing was decided,"
                " write the batch again",
                CONCURRENT_TRANSACTIONS="",
                POLICY_VIOLATION="transactional.id.max.count is reached",
            ),
            _NO_CODES,
        ),
        ApiKey.RETIRE_TXN_GROUP: ApiErrors(
            _codes(
                COORDINATOR,
                TRANSACTIONAL_ID_NOT_FOUND="",
                INVALID_TXN_STATE="no batch is decided, a writer of a next batch has joined, or the name is a"
                " plain transactional id",
            ),
            _NO_CODES,
        ),
        ApiKey.DESCRIBE_TXN_GROUP: ApiErrors(_codes(COORDINATOR, TRANSACTIONAL_ID_NOT_FOUND=""), _NO_CODES),
        ApiKey.LIST_TRANSACTIONS: ApiErrors(_codes(COORDINATOR, INVALID_REQUEST="no such state"), _NO_CODES),
        ApiKey.DESCRIBE_TRANSACTIONS: ApiErrors(
            _codes(INVALID_REQUEST="too many ids"),
            _codes(
                COORDINATOR,
                TRANSACTIONAL_ID_NOT_FOUND="",
                INVALID_TXN_STATE="an application: see DescribeTxnGroup",
            ),
        ),
        ApiKey.DESCRIBE_PRODUCERS: ApiErrors(_NO_CODES, _LEADER),
        ApiKey.ABORT_TRANSACTION: ApiErrors(
            _codes(
                _LEADER,
                INVALID_TXN_STATE="no such transaction is open",
                NOT_ENOUGH_REPLICAS="",
                REQUEST_TIMED_OUT="the marker is not committed yet: repeat",
            ),
            _NO_CODES,
        ),
        # --- between the nodes of a cluster
        ApiKey.CLUSTER_HELLO: ApiErrors(
            _codes(
                INCONSISTENT_CLUSTER_ID="",
                CLUSTER_AUTHORIZATION_FAILED="the node has no secret, or the dialler claims its id",
                INVALID_REQUEST="a nonce that is not 32 bytes",
            ),
            _NO_CODES,
        ),
        ApiKey.CLUSTER_PROOF: ApiErrors(
            _codes(CLUSTER_AUTHORIZATION_FAILED="and the connection is closed"), _NO_CODES
        ),
        ApiKey.RAFT_MESSAGES: ApiErrors(
            _codes(INVALID_REQUEST="not at a controller's own listener"), _NO_CODES
        ),
        ApiKey.FETCH_METADATA: ApiErrors(_codes(INVALID_REQUEST="the node is no voter"), _NO_CODES),
        ApiKey.BROKER_REGISTRATION: ApiErrors(
            _codes(
                _TO_CONTROLLER,
                INCONSISTENT_CLUSTER_ID="",
                DUPLICATE_BROKER_REGISTRATION="another live process has this node id",
                POLICY_VIOLATION="the node id was retired by UnregisterBroker",
                UNSUPPORTED_VERSION="the broker's program does not support a finalised level",
            ),
            _NO_CODES,
        ),
        ApiKey.BROKER_HEARTBEAT: ApiErrors(
            _codes(_TO_CONTROLLER, STALE_BROKER_EPOCH="", BROKER_ID_NOT_REGISTERED=""), _NO_CODES
        ),
        ApiKey.ENVELOPE: ApiErrors(
            _codes(
                NOT_CONTROLLER="",
                INVALID_REQUEST="an API that is not forwarded",
                REQUEST_TIMED_OUT="the outcome is unknown",
                THROTTLING_QUOTA_EXCEEDED="too many commands wait for the controller",
            ),
            _NO_CODES,
        ),
        ApiKey.ALTER_PARTITION: ApiErrors(
            _codes(_TO_CONTROLLER, STALE_BROKER_EPOCH="", BROKER_ID_NOT_REGISTERED=""),
            _codes(
                UNKNOWN_TOPIC_ID="",
                UNKNOWN_TOPIC_OR_PARTITION="",
                NOT_LEADER_OR_FOLLOWER="",
                FENCED_LEADER_EPOCH="",
                INVALID_UPDATE_VERSION="",
                INELIGIBLE_REPLICA="",
                NEW_LEADER_ELECTED="",
                INVALID_REQUEST="",
            ),
        ),
        ApiKey.REPLICA_FETCH: ApiErrors(
            _codes(
                CLUSTER_AUTHORIZATION_FAILED="also if the request names another node than the connection",
                STALE_BROKER_EPOCH="",
                FETCH_SESSION_ID_NOT_FOUND="",
                INVALID_FETCH_SESSION_EPOCH="",
                INVALID_REQUEST="the broker does not replicate",
            ),
            _codes(_LEADER_IN_EPOCH, UNKNOWN_TOPIC_ID="", OFFSET_OUT_OF_RANGE="", STALE_BROKER_EPOCH=""),
        ),
        ApiKey.CHECKPOINT_HIGH_WATERMARKS: ApiErrors(
            _codes(_TO_CONTROLLER, STALE_BROKER_EPOCH="", BROKER_ID_NOT_REGISTERED=""), _NO_CODES
        ),
        ApiKey.REPORT_REPLICAS: ApiErrors(
            _codes(_TO_CONTROLLER, STALE_BROKER_EPOCH="", BROKER_ID_NOT_REGISTERED=""), _NO_CODES
        ),
        ApiKey.ALLOCATE_PRODUCER_IDS: ApiErrors(
            _codes(_TO_CONTROLLER, STALE_BROKER_EPOCH="", BROKER_ID_NOT_REGISTERED=""), _NO_CODES
        ),
        ApiKey.ADD_PARTITIONS_TO_TXN: ApiErrors(
            _codes(COORDINATOR, _TRANSACTION, UNKNOWN_TOPIC_OR_PARTITION="missing in this broker's metadata"),
            _NO_CODES,
        ),
        ApiKey.WRITE_TXN_MARKERS: ApiErrors(
            _NO_CODES,
            _codes(
                _LEADER,
                TRANSACTION_COORDINATOR_FENCED="",
                INVALID_PRODUCER_EPOCH="the log has a later transaction of the producer",
                NOT_ENOUGH_REPLICAS="",
                REQUEST_TIMED_OUT="appended, not committed in time",
            ),
        ),
    }
)

assert API_ERRORS.keys() == set(ApiKey), "every API declares its errors"


def allowed_codes(api_key: ApiKey) -> tuple[frozenset[ErrorCode], frozenset[ErrorCode]]:
    """Return the codes that a response may have: (for the request as a whole, for an item).

    Both sets include NONE. The first also includes the codes of ``ANY_REQUEST``.
    """
    errors = API_ERRORS[api_key]
    whole = {ErrorCode.NONE, *ANY_REQUEST, *errors.whole}
    return frozenset(whole), frozenset({ErrorCode.NONE, *errors.item})


def undeclared_codes(api_key: ApiKey, response: Struct) -> list[str]:
    """Return a line for each error code in ``response`` that the API does not declare.

    The line has the API, the code, the name of the struct that contains the code, and the error message in
    that struct.
    """
    whole, item = _allowed_numbers(api_key)
    found: list[str] = []

    def visit(value: Struct, allowed: frozenset[int]) -> None:
        code = getattr(value, "error_code", 0)
        if code not in allowed:
            message = getattr(value, "error_message", None)
            found.append(f"{api_key.name}: {code} in {type(value).__name__}: {message}")
        for field in value:
            if type(field) is list and field and isinstance(field[0], Struct):
                for each in field:
                    visit(each, item)

    visit(response, whole)
    return found


@cache
def _allowed_numbers(api_key: ApiKey) -> tuple[frozenset[int], frozenset[int]]:
    whole, item = allowed_codes(api_key)
    return frozenset(map(int, whole)), frozenset(map(int, item))
