"""The schema of the protocol: structs, APIs, errors, limits and deadlines, as one JSON document.

Limits and deadlines are read from the code that enforces them, so they cannot differ from the broker's.
``docs/protocol.json`` is this document, and the tables of ``docs/protocol.md`` are made from it. The command
``kl conformance --schema`` prints it.
"""

# Tests: tests/conformance/test_schema.py

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from kafkalite import errors, limits
from kafkalite.broker.cluster.controller_channel import DEFAULT_TIMEOUT_MS
from kafkalite.broker.config import BROKER_OPTIONS
from kafkalite.broker.coordination import shard, transactions
from kafkalite.broker.coordination.internal_topics import TOPICS
from kafkalite.broker.handlers import cluster, data, metadata, replica_fetch
from kafkalite.broker.handlers import transactions as transaction_handlers
from kafkalite.broker.server import server
from kafkalite.errors import ErrorCode
from kafkalite.groups.heartbeat import MAX_NAME_LENGTH
from kafkalite.groups.member import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH
from kafkalite.metadata.topic_config import TOPIC_OPTIONS
from kafkalite.model import (
    EARLIEST,
    LATEST,
    MAX_PRODUCER_EPOCH,
    MAX_TIMESTAMP,
    Acks,
    IsolationLevel,
    TimestampType,
)
from kafkalite.protocol.api import APIS, CLUSTER_APIS, LATER_APIS
from kafkalite.protocol.api_errors import ANY_REQUEST, API_ERRORS, Codes
from kafkalite.protocol.codec import MAX_INT
from kafkalite.protocol.connection import MAX_CORRELATION_ID
from kafkalite.protocol.structs import AtMost, Struct
from kafkalite.records import header
from kafkalite.records.partitioners import MURMUR2_M, MURMUR2_R, MURMUR2_SEED
from kafkalite.storage.producer_state import KEPT_BATCHES, SEQUENCES

VERSION: Final = 1  #: of the schema's own layout


class Bound(NamedTuple):
    """A limit or deadline of the broker. Either ``value`` or ``option`` is set."""

    what: str
    value: int | None
    unit: str
    beyond: str  #: what the broker does beyond the bound: an error name, ``close`` or other words
    option: str = ""  #: the option of a broker or topic that sets it
    name: str = ""  #: of the constant, for programs


_REFUSED: Final = "INVALID_REQUEST"
_CLOSED: Final = "close"
_CUT: Final = "cut to it"


def schema() -> dict[str, Any]:
    """Return the document. It contains only types of JSON."""
    return {
        "schema_version": VERSION,
        "types": {
            "int": {"min": -MAX_INT - 1, "max": MAX_INT},
            "bool": {},
            "str": {"encoding": "utf-8"},
            "bytes": {"msgpack": "bin"},
            "[T]": {"max_items_in_one_request": limits.MAX_ITEMS_PER_REQUEST},
            "[int]": {"max_items": limits.MAX_INTEGERS_PER_LIST},
            "{str: str}": {"max_entries": limits.MAX_ENTRIES_PER_MAP, "duplicate_keys": "refused"},
            "T?": "T or nil",
        },
        "envelopes": {
            "frame": ["envelope_bytes: u32", "payload_bytes: u32", "envelope", "payload"],
            "request": ["api_key: int", "api_version: int", "correlation_id: int", "client_id: str?", "body"],
            "response": ["correlation_id: int", "throttle_ms: int", "body"],
            "failed_body": ["error_code: int", "error_message: str?"],
            "correlation_id": {"min": 0, "max": MAX_CORRELATION_ID},
        },
        "apis": [_api(key) for key in sorted(APIS)],
        "structs": _structs(),
        "errors": [_error(code) for code in sorted(ErrorCode)],
        "errors_of_any_request": _conditions(ANY_REQUEST),
        "limits": [_bound(one) for one in LIMITS],
        "deadlines": [_bound(one) for one in DEADLINES],
        "record_batch": _record_batch(),
        "values": _values(),
    }


# --- APIs and structs --------------------------------------------------------------------------------


def _api(key: int) -> dict[str, Any]:
    api = APIS[key]
    declared = API_ERRORS[api.key]
    return {
        "key": int(api.key),
        "name": api.request.__name__.removesuffix("Request"),
        "min_version": api.min_version,
        "max_version": api.max_version,
        "request": api.request.__name__,
        "response": api.response.__name__,
        **_later_versions(key),
        "between_nodes": api.key in CLUSTER_APIS,
        "errors": {"whole": _conditions(declared.whole), "item": _conditions(declared.item)},
    }


def _later_versions(key: int) -> dict[str, Any]:
    """Return the structs of the versions after 0, if there are any, as the entry ``later_versions``."""
    later = [
        {"version": api.version, "request": api.request.__name__, "response": api.response.__name__}
        for (found, _), api in LATER_APIS.items()
        if found == key
    ]
    return {"later_versions": later} if later else {}


def _conditions(codes: Codes) -> dict[str, str]:
    return {code.name: condition for code, condition in codes.items()}


def _structs() -> dict[str, list[dict[str, Any]]]:
    """Return {struct name: its fields in order}. A struct that is part of others comes after the first of
    them."""
    found: dict[str, list[dict[str, Any]]] = {}

    def visit(hint: Any) -> None:
        if isinstance(hint, type) and issubclass(hint, Struct):
            if hint.__name__ in found:
                return
            hints = get_type_hints(hint, include_extras=True)
            found[hint.__name__] = [_field(hint, name, hints[name]) for name in hint._fields]
            for name in hint._fields:
                visit(hints[name])
        for argument in get_args(hint):
            visit(argument)

    for key in sorted(APIS):
        visit(APIS[key].request)
        visit(APIS[key].response)
    for api in LATER_APIS.values():
        visit(api.request)
        visit(api.response)
    return found


def _field(cls: type[Struct], name: str, hint: Any) -> dict[str, Any]:
    field: dict[str, Any] = {"name": name, "type": notation(hint)}
    optional, *_ = get_args(hint) or (None,)
    annotated = optional if get_origin(optional) is Annotated else hint
    if get_origin(annotated) is Annotated:
        marker = get_args(annotated)[1]
        field.update({"max_items": marker.max_items} if isinstance(marker, AtMost) else _DISTINCT)
    declared = next((base.__name__ for base in cls.__mro__ if (base.__name__, name) in _FIELD_BOUNDS), "")
    bound = _FIELD_BOUNDS.get((declared, name)) or _FIELD_BOUNDS.get(("", name))
    if bound is not None and "Request" in cls.__name__:
        field.update(bound)
    return field


_DISTINCT: Final[Mapping[str, Any]] = {"distinct_partitions": True}


def notation(hint: Any) -> str:
    """Return the type as the document writes it: ``[ProducePartition]``, ``str?``."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return notation(arguments[0])
    if get_origin(hint) is list:
        return f"[{notation(arguments[0])}]"
    if get_origin(hint) is dict:
        return f"{{{notation(arguments[0])}: {notation(arguments[1])}}}"
    if arguments:
        return notation(arguments[0]) + "?"
    return str(hint.__name__)


def _cut_at(limit_ms: int) -> dict[str, Any]:
    return {"max": limit_ms, "beyond": "cut"}


#: {(request, field): bounds}. The request "" stands for every request that has the field.
_FIELD_BOUNDS: Final[Mapping[tuple[str, str], dict[str, Any]]] = {
    ("", "isolation_level"): {"values": sorted(map(int, IsolationLevel))},
    ("", "timeout_ms"): _cut_at(limits.MAX_WAIT_MS),
    ("", "transactional_id"): {"max_characters": limits.MAX_TRANSACTIONAL_ID_LENGTH},
    ("", "application_id"): {"min_characters": 1, "max_characters": limits.MAX_TRANSACTIONAL_ID_LENGTH},
    ("", "group_id"): {"min_characters": 1, "max_characters": MAX_NAME_LENGTH},
    ("", "batch_id"): {"min": 0},
    ("ProduceRequest", "acks"): {"values": sorted(map(int, Acks))},
    ("FetchRequest", "max_wait_ms"): _cut_at(limits.MAX_WAIT_MS),
    ("DescribeMetadataRequest", "max_wait_ms"): _cut_at(metadata.MAX_METADATA_WAIT_MS),
    ("ReplicaFetchRequest", "max_wait_ms"): _cut_at(replica_fetch.MAX_WAIT_MS),
    ("FetchMetadataRequest", "max_wait_ms"): _cut_at(cluster.MAX_FETCH_WAIT_MS),
    ("FindCoordinatorRequest", "key_type"): {"values": sorted(TOPICS)},
    ("ConsumerGroupHeartbeatRequest", "member_id"): {"min_characters": 1, "max_characters": MAX_NAME_LENGTH},
    ("ConsumerGroupHeartbeatRequest", "instance_id"): {
        "min_characters": 1,
        "max_characters": MAX_NAME_LENGTH,
    },
    ("ConsumerGroupHeartbeatRequest", "member_epoch"): {"min": STATIC_LEAVE_EPOCH},
    ("ConsumerGroupHeartbeatRequest", "rebalance_timeout_ms"): _cut_at(limits.MAX_REBALANCE_TIMEOUT_MS),
    ("JoinTxnGroupRequest", "member"): {
        "min_characters": 1,
        "max_characters": limits.MAX_TRANSACTIONAL_ID_LENGTH,
    },
    ("JoinTxnGroupRequest", "timeout_ms"): {"min": 1, "max_option": "transaction.max.timeout.ms"},
    ("InitProducerIdRequest", "transaction_timeout_ms"): {
        "min": 1,
        "max_option": "transaction.max.timeout.ms",
    },
}


def _error(code: ErrorCode) -> dict[str, Any]:
    error = None if code is ErrorCode.NONE else errors.broker_error(code)
    return {
        "code": int(code),
        "name": code.name,
        "retry": error is not None and error.retriable,
        "refresh": error is not None and error.refresh_metadata,
    }


# --- limits and deadlines ----------------------------------------------------------------------------


def _limit(name: str, what: str, unit: str, beyond: str = _REFUSED) -> Bound:
    """Return the constant ``name`` of ``kafkalite.limits`` as a Bound."""
    return Bound(what, int(getattr(limits, name)), unit, beyond, name=name)


def _option(what: str, option: str, unit: str, beyond: str) -> Bound:
    return Bound(what, None, unit, beyond, option)


LIMITS: Final = (
    _limit("MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE", "envelope before ApiVersions", "bytes", _CLOSED),
    _limit("MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE", "payload before ApiVersions", "bytes", _CLOSED),
    _limit("MAX_ENVELOPE_BYTES", "envelope", "bytes", _CLOSED),
    _limit("MAX_PAYLOAD_BYTES", "payload", "bytes", _CLOSED),
    _option("payload of a request", "socket.request.max.bytes", "bytes", _CLOSED),
    _limit("MAX_ITEMS_PER_REQUEST", "elements in all arrays of one request", "elements", _CLOSED),
    _limit("MAX_INTEGERS_PER_LIST", "elements of an `[int]`", "elements"),
    _limit("MAX_ENTRIES_PER_MAP", "entries of a `{str: str}`", "entries"),
    _option(
        "partitions of one request, each once", "max.request.partition.size.limit", "partitions", _REFUSED
    ),
    _limit(
        "MAX_IN_FLIGHT_PER_CONNECTION",
        "requests of one connection without a response",
        "requests",
        "reading pauses",
    ),
    _option("connections", "max.connections", "connections", _CLOSED),
    _option(
        "bytes of all connections' incomplete frames",
        "queued.max.request.bytes",
        "bytes",
        "the connections whose frames have stood still longest are closed",
    ),
    _limit("MAX_CLIENT_ID_LENGTH", "client id", "characters"),
    _limit(
        "MAX_TOPIC_NAME_LENGTH",
        "topic name, of `[a-zA-Z0-9._-]`, not `.` or `..`",
        "characters",
        "INVALID_TOPIC_EXCEPTION",
    ),
    Bound(
        "group id, member id, instance id",
        MAX_NAME_LENGTH,
        "characters",
        "INVALID_GROUP_ID, INVALID_REQUEST",
        name="MAX_NAME_LENGTH",
    ),
    _limit("MAX_TRANSACTIONAL_ID_LENGTH", "transactional id, application id, name of a writer", "characters"),
    _limit("MAX_ERROR_MESSAGE_LENGTH", "error message", "characters", _CUT),
    _limit("MAX_RECORDS_PER_BATCH", "records of a batch", "records", "CORRUPT_MESSAGE"),
    _limit(
        "MAX_HEADERS_PER_RECORD",
        "headers of a record",
        "headers",
        "readers refuse the batch; the broker does not look",
    ),
    _limit(
        "MAX_DECOMPRESSED_BYTES", "bytes that a compressed batch unpacks to", "bytes", "MESSAGE_TOO_LARGE"
    ),
    _option("batch", "max.message.bytes", "bytes", "MESSAGE_TOO_LARGE"),
    Bound(
        "batches of a producer that the leader remembers, per partition",
        KEPT_BATCHES,
        "batches",
        "section 5.1",
        name="KEPT_BATCHES",
    ),
    _limit(
        "MAX_PRODUCERS_PER_PARTITION",
        "idempotent producers of a partition, until they expire",
        "producers",
        "POLICY_VIOLATION",
    ),
    Bound(
        "producer epoch",
        MAX_PRODUCER_EPOCH,
        "",
        "InitProducerId or EndTxn returns another producer id",
        name="MAX_PRODUCER_EPOCH",
    ),
    _option("`max_bytes` of a Fetch", "fetch.max.bytes", "bytes", _CUT),
    _limit(
        "MAX_TOPICS_PER_REQUEST", "topics of a Metadata, DescribeLogDirs or ConsumerGroupHeartbeat", "topics"
    ),
    _limit("MAX_OWNED_PER_REQUEST", "`owned` of a ConsumerGroupHeartbeat", "items"),
    _limit(
        "MAX_TOPICS_PER_REQUEST",
        "topics to create, delete or extend, configuration changes, and entities of quotas, of one request",
        "items",
    ),
    _limit("MAX_PARTITIONS_PER_REQUEST", "new partitions of one request", "partitions", "POLICY_VIOLATION"),
    _limit("MAX_PARTITIONS_PER_TOPIC", "partitions of a topic", "partitions", "INVALID_PARTITIONS"),
    _option("topics of a cluster", "max.topics", "topics", "POLICY_VIOLATION"),
    _option("partitions of a cluster", "max.partitions", "partitions", "POLICY_VIOLATION"),
    _limit("MAX_RESOURCES_PER_REQUEST", "resources of a DescribeConfigs", "resources"),
    _limit("MAX_FEATURES_PER_REQUEST", "levels to finalise in one request", "items"),
    _limit("MAX_QUOTA_PARTS", "parts of a quota's entity or filter, and changes of an entity", "items"),
    _limit("MAX_KEYS", "keys of a FindCoordinator", "keys"),
    _limit("MAX_GROUPS_PER_REQUEST", "groups of a DescribeGroups or DeleteGroups", "groups"),
    _limit("MAX_STATES_PER_REQUEST", "states of a ListGroups or ListTransactions", "states"),
    _limit("MAX_USERS_PER_REQUEST", "users of a DescribeUserScramCredentials", "users"),
    _limit("MAX_ACLS_PER_REQUEST", "ACLs or credentials that a request changes", "items"),
    _limit("MAX_ACLS", "ACLs of a cluster", "ACLs", "POLICY_VIOLATION"),
    _limit("MAX_CREDENTIALS", "SCRAM credentials of a cluster", "credentials", "POLICY_VIOLATION"),
    _limit("MAX_USER_NAME_BYTES", "name of a user, in UTF-8", "bytes"),
    _limit("MAX_IDS", "ids of a DescribeTransactions", "ids"),
    _limit("MAX_TXN_GROUP_MEMBERS", "winners of an EndTxnGroup", "writers"),
    _option("groups of a coordinator", "group.max.count", "groups", "POLICY_VIOLATION"),
    _option("members of a group", "group.max.size", "members", "GROUP_MAX_SIZE_REACHED"),
    _option("committed offsets of a group", "group.max.offsets", "offsets", "POLICY_VIOLATION"),
    _option(
        "metadata of a committed offset", "offset.metadata.max.bytes", "bytes", "OFFSET_METADATA_TOO_LARGE"
    ),
    _option(
        "transactional ids and transaction groups of a coordinator",
        "transactional.id.max.count",
        "names",
        "POLICY_VIOLATION",
    ),
    _limit("MAX_TXN_GROUP_MEMBERS", "open writers of a transaction group", "writers", "INVALID_TXN_STATE"),
)

DEADLINES: Final = (
    Bound(
        "ApiVersions after connecting",
        server.HANDSHAKE_DEADLINE_MS,
        "ms",
        _CLOSED,
        name="HANDSHAKE_DEADLINE_MS",
    ),
    Bound(
        "the rest of a frame that has begun",
        server.FRAME_DEADLINE_MS,
        "ms",
        f"{_CLOSED}; plus 1,000 ms for each {server.FRAME_PROGRESS_BYTES:,} bytes that have arrived",
        name="FRAME_DEADLINE_MS",
    ),
    _option("a connection on which nothing moves", "connections.max.idle.ms", "ms", _CLOSED),
    Bound(
        "between two passes that enforce these three",
        server.REAP_INTERVAL_MS,
        "ms",
        "a connection may live longer by this",
        name="REAP_INTERVAL_MS",
    ),
    Bound(
        "between the end of a stopping broker's stream and its closing",
        server.LINGER_MS,
        "ms",
        _CLOSED,
        name="LINGER_MS",
    ),
    Bound(
        "a connection above the connection_creation_rate of its address, which is not served",
        server.MAX_CONNECTION_THROTTLE_MS,
        "ms",
        _CLOSED,
        name="MAX_CONNECTION_THROTTLE_MS",
    ),
    _limit("MAX_WAIT_MS", "`timeout_ms` and `max_wait_ms` of a request", "ms", _CUT),
    Bound(
        "`max_wait_ms` of DescribeMetadata",
        metadata.MAX_METADATA_WAIT_MS,
        "ms",
        _CUT,
        name="MAX_METADATA_WAIT_MS",
    ),
    Bound("`max_wait_ms` of ReplicaFetch", replica_fetch.MAX_WAIT_MS, "ms", _CUT, name="REPLICA_MAX_WAIT_MS"),
    Bound("`max_wait_ms` of FetchMetadata", cluster.MAX_FETCH_WAIT_MS, "ms", _CUT, name="MAX_FETCH_WAIT_MS"),
    _option(
        "`max_wait_ms` of ConsumerGroupHeartbeat: half of it", "group.consumer.session.timeout.ms", "ms", _CUT
    ),
    Bound(
        "`timeout_ms` 0 of a command to the controller",
        DEFAULT_TIMEOUT_MS,
        "ms",
        "REQUEST_TIMED_OUT",
        name="DEFAULT_TIMEOUT_MS",
    ),
    Bound(
        "the creation of a topic by Metadata",
        metadata.CREATE_TIMEOUT_MS,
        "ms",
        "REQUEST_TIMED_OUT",
        name="CREATE_TIMEOUT_MS",
    ),
    Bound(
        "the commit of a coordinator's decision",
        shard.COMMIT_TIMEOUT_MS,
        "ms",
        "COORDINATOR_NOT_AVAILABLE",
        name="COMMIT_TIMEOUT_MS",
    ),
    Bound(
        "InitProducerId, for the end of an open transaction",
        data.INIT_HOLD_MS,
        "ms",
        "CONCURRENT_TRANSACTIONS",
        name="INIT_HOLD_MS",
    ),
    Bound(
        "JoinTxnGroup, for the end of an earlier attempt",
        transaction_handlers.JOIN_HOLD_MS,
        "ms",
        "CONCURRENT_TRANSACTIONS",
        name="JOIN_HOLD_MS",
    ),
    Bound(
        "EndTxn and EndTxnGroup, for the markers of the previous transaction",
        transactions.HOLD_MS,
        "ms",
        "CONCURRENT_TRANSACTIONS",
        name="HOLD_MS",
    ),
    Bound(
        "the first batch of a transaction, for the markers of the previous one",
        transactions.CONCURRENT_TIMEOUT_MS,
        "ms",
        "CONCURRENT_TRANSACTIONS",
        name="CONCURRENT_TIMEOUT_MS",
    ),
    Bound(
        "the first batch of a transaction, for its coordinator",
        transactions.VERIFY_TIMEOUT_MS,
        "ms",
        "COORDINATOR_NOT_AVAILABLE",
        name="VERIFY_TIMEOUT_MS",
    ),
    _option(
        "between heartbeats of a member",
        "group.consumer.heartbeat.interval.ms",
        "ms",
        "advice, sent in each response",
    ),
    _option("a member without a heartbeat", "group.consumer.session.timeout.ms", "ms", "it is expelled"),
    _limit("MAX_REBALANCE_TIMEOUT_MS", "`rebalance_timeout_ms` of a member", "ms", _CUT),
    _option(
        "`timeout_ms` of a transaction", "transaction.max.timeout.ms", "ms", "INVALID_TRANSACTION_TIMEOUT"
    ),
    _option("a producer without a batch", "producer.id.expiration.ms", "ms", "the partition forgets it"),
    _option(
        "a transactional id without use", "transactional.id.expiration.ms", "ms", "the coordinator forgets it"
    ),
)


def _bound(bound: Bound) -> dict[str, Any]:
    entry: dict[str, Any] = {"what": bound.what, "unit": bound.unit, "beyond": bound.beyond}
    if bound.option:
        return entry | {"option": bound.option, "default": _default(bound.option)}
    return entry | {"name": bound.name, "value": bound.value}


def _default(option: str) -> Any:
    registry = BROKER_OPTIONS if option in BROKER_OPTIONS else TOPIC_OPTIONS
    return registry.get(option).default


# --- record batches ----------------------------------------------------------------------------------

_HEADER_FIELDS: Final = (
    ("base_offset", 8),
    ("batch_length", 4),
    ("partition_leader_epoch", 4),
    ("magic", 1),
    ("crc", 4),
    ("attributes", 2),
    ("last_offset_delta", 4),
    ("base_timestamp", 8),
    ("max_timestamp", 8),
    ("producer_id", 8),
    ("producer_epoch", 2),
    ("base_sequence", 4),
    ("record_count", 4),
)


def _header_fields() -> Iterator[dict[str, Any]]:
    position = 0
    for name, size in _HEADER_FIELDS:
        yield {"name": name, "position": position, "bytes": size, "signed": name != "crc"}
        position += size
    assert position == header.HEADER_BYTES, "the fields fill the header"


def _record_batch() -> dict[str, Any]:
    return {
        "header": list(_header_fields()),
        "byte_order": "big",
        "length_excludes_bytes": header.LENGTH_OVERHEAD_BYTES,
        "crc": {"algorithm": "CRC-32C", "from_position": header.ATTRIBUTES_POSITION},
        "magic": header.MAGIC,
        "attributes": {
            "body_mask": header.CODEC_MASK,
            "columnar": header.COLUMNAR,
            "timestamp_type_bit": header.TIMESTAMP_TYPE_BIT,
            "transactional_bit": header.TRANSACTIONAL_BIT,
            "control_bit": header.CONTROL_BIT,
            "codec_shift": header.COLUMN_CODEC_SHIFT,
        },
        "codecs": {str(codec): int(codec) for codec in header.Codec},
        "body": ["timestamps", "keys", "values", "headers"],
        "sequences": SEQUENCES,
    }


def _values() -> dict[str, Any]:
    return {
        "acks": {"none": int(Acks.NONE), "leader": int(Acks.LEADER), "all": int(Acks.ALL)},
        "isolation_level": {level.name.lower(): int(level) for level in IsolationLevel},
        "timestamp_type": {kind.name.lower(): int(kind) for kind in TimestampType},
        "list_offsets": {"latest": LATEST, "earliest": EARLIEST, "max_timestamp": MAX_TIMESTAMP},
        "member_epoch": {"join": JOIN_EPOCH, "leave": LEAVE_EPOCH, "static_leave": STATIC_LEAVE_EPOCH},
        "key_type": {topic: kind for kind, topic in TOPICS.items()},
        "absent": -1,
        "murmur2": {"seed": MURMUR2_SEED, "m": MURMUR2_M, "r": MURMUR2_R},
    }
