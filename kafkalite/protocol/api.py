"""The APIs: the key, the versions, and the request and response structs of each.

An API that Kafka also has uses Kafka's key.
"""

from __future__ import annotations

import enum
from typing import Final

from kafkalite.protocol.messages import admin, cluster, data, groups, metadata, security, transactions
from kafkalite.protocol.structs import Struct


class ApiKey(enum.IntEnum):
    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    CONTROLLED_SHUTDOWN = 7
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSETS_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    ALTER_CONFIGS = 44  # Kafka's IncrementalAlterConfigs
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_QUORUM = 55
    ALTER_PARTITION = 56
    UPDATE_FEATURES = 57
    ENVELOPE = 58
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    BROKER_REGISTRATION = 62
    BROKER_HEARTBEAT = 63
    UNREGISTER_BROKER = 64
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    ALLOCATE_PRODUCER_IDS = 67
    CONSUMER_GROUP_HEARTBEAT = 68
    DESCRIBE_GROUPS = 69  # Kafka's ConsumerGroupDescribe
    ADD_RAFT_VOTER = 80
    REMOVE_RAFT_VOTER = 81
    CLUSTER_HELLO = 1000
    CLUSTER_PROOF = 1001
    RAFT_MESSAGES = 1002
    REPLICA_FETCH = 1003
    CHECKPOINT_HIGH_WATERMARKS = 1004
    DESCRIBE_METADATA = 1005
    FETCH_METADATA = 1006
    JOIN_TXN_GROUP = 1007
    END_TXN_GROUP = 1008
    DESCRIBE_TXN_GROUP = 1009
    ABORT_TRANSACTION = 1010
    OFFSETS_FOR_BYTES = 1011
    RETIRE_TXN_GROUP = 1012
    REPORT_REPLICAS = 1013
    DESCRIBE_RECOVERY = 1014
    DESCRIBE_FEATURES = 1015


#: Used between nodes, and only on a connection that was authenticated with the cluster's secret (S10).
CLUSTER_APIS: Final = frozenset(
    {
        ApiKey.ALTER_PARTITION,
        ApiKey.ENVELOPE,
        ApiKey.BROKER_REGISTRATION,
        ApiKey.BROKER_HEARTBEAT,
        ApiKey.ALLOCATE_PRODUCER_IDS,
        ApiKey.RAFT_MESSAGES,
        ApiKey.REPLICA_FETCH,
        ApiKey.CHECKPOINT_HIGH_WATERMARKS,
        ApiKey.REPORT_REPLICAS,
        ApiKey.FETCH_METADATA,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.WRITE_TXN_MARKERS,
    }
)


#: Served before the login on a connection whose listener requires one (S1). A node of the cluster may prove
#: that it knows the cluster's secret instead of a login (S10).
LOGIN_APIS: Final = frozenset(
    {
        ApiKey.API_VERSIONS,
        ApiKey.SASL_HANDSHAKE,
        ApiKey.SASL_AUTHENTICATE,
        ApiKey.CLUSTER_HELLO,
        ApiKey.CLUSTER_PROOF,
    }
)


class Api(Struct):
    key: ApiKey
    request: type[Struct]
    response: type[Struct]
    min_version: int  #: inclusive
    max_version: int  #: inclusive
    version: int  #: of ``request`` and ``response``


_MODULES: Final = (admin, cluster, data, groups, metadata, security, transactions)
#: The structs of an API's versions after version 0. Each appends fields to those of the version before.
_LATER: Final[dict[ApiKey, tuple[tuple[type[Struct], type[Struct]], ...]]] = {
    ApiKey.FETCH: ((data.FetchRequestV1, data.FetchResponseV1),),
    ApiKey.DESCRIBE_LOG_DIRS: ((admin.DescribeLogDirsRequestV1, admin.DescribeLogDirsResponseV1),),
    ApiKey.BROKER_REGISTRATION: ((cluster.RegisterBrokerRequestV1, cluster.RegisterBrokerResponse),),
    ApiKey.BROKER_HEARTBEAT: ((cluster.BrokerHeartbeatRequestV1, cluster.BrokerHeartbeatResponse),),
    ApiKey.CLUSTER_HELLO: ((cluster.ClusterHelloRequestV1, cluster.ClusterHelloResponseV1),),
    ApiKey.RAFT_MESSAGES: ((cluster.RaftMessagesRequestV1, cluster.RaftMessagesResponse),),
    ApiKey.DESCRIBE_QUORUM: ((metadata.DescribeQuorumRequestV1, metadata.DescribeQuorumResponseV1),),
    ApiKey.FETCH_METADATA: ((cluster.FetchMetadataRequestV1, cluster.FetchMetadataResponseV1),),
}


def _api(key: ApiKey) -> Api:
    """Return the API with its structs in version 0, whose names are derived from its key: END_TXN has
    EndTxnRequest."""
    name = key.name.title().replace("_", "")
    if key is ApiKey.BROKER_REGISTRATION:
        name = "RegisterBroker"
    module = next(module for module in _MODULES if hasattr(module, f"{name}Request"))
    request, response = getattr(module, f"{name}Request"), getattr(module, f"{name}Response")
    return Api(key, request, response, 0, len(_LATER.get(key, ())), 0)


#: Every API in version 0.
APIS: Final[dict[int, Api]] = {key: _api(key) for key in ApiKey}
#: Every API in each version after 0, by key and version.
LATER_APIS: Final[dict[tuple[int, int], Api]] = {
    (key, version): APIS[key]._replace(request=request, response=response, version=version)
    for key, structs in _LATER.items()
    for version, (request, response) in enumerate(structs, 1)
}
API_BY_REQUEST: Final[dict[type[Struct], Api]] = {
    api.request: api for api in (*APIS.values(), *LATER_APIS.values())
}
API_KEY_BY_REQUEST: Final[dict[type[Struct], ApiKey]] = {
    request: api.key for request, api in API_BY_REQUEST.items()
}


def supported_ranges() -> list[metadata.ApiVersionRange]:
    """Return the supported versions of each API by ascending key, as an ApiVersions response lists them."""
    return [
        metadata.ApiVersionRange(int(key), APIS[key].min_version, APIS[key].max_version)
        for key in sorted(APIS)
    ]
