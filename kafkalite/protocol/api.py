"""The APIs: key, versions, and the request and response struct of each.

Keys are Kafka's if Kafka has the API.
"""

from __future__ import annotations

import enum
from typing import Final

from kafkalite.protocol.messages import admin, cluster, data, groups, metadata, transactions
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
    DESCRIBE_CONFIGS = 32
    DESCRIBE_LOG_DIRS = 35
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    ALTER_CONFIGS = 44  # Kafka's IncrementalAlterConfigs
    OFFSET_DELETE = 47
    DESCRIBE_QUORUM = 55
    ALTER_PARTITION = 56
    ENVELOPE = 58
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    BROKER_REGISTRATION = 62
    BROKER_HEARTBEAT = 63
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    ALLOCATE_PRODUCER_IDS = 67
    CONSUMER_GROUP_HEARTBEAT = 68
    DESCRIBE_GROUPS = 69  # Kafka's ConsumerGroupDescribe
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


#: Used between nodes, only on a connection that was authenticated with the cluster's secret (S10).
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
        ApiKey.FETCH_METADATA,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.WRITE_TXN_MARKERS,
    }
)


class Api(Struct):
    key: ApiKey
    request: type[Struct]
    response: type[Struct]
    min_version: int  #: inclusive
    max_version: int  #: inclusive


def _api(key: ApiKey, request: type[Struct], response: type[Struct], max_version: int = 0) -> Api:
    return Api(key, request, response, 0, max_version)


APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in (
        _api(ApiKey.PRODUCE, data.ProduceRequest, data.ProduceResponse),
        _api(ApiKey.FETCH, data.FetchRequest, data.FetchResponse),
        _api(ApiKey.LIST_OFFSETS, data.ListOffsetsRequest, data.ListOffsetsResponse),
        _api(ApiKey.METADATA, metadata.MetadataRequest, metadata.MetadataResponse),
        _api(ApiKey.API_VERSIONS, metadata.ApiVersionsRequest, metadata.ApiVersionsResponse),
        _api(ApiKey.CREATE_TOPICS, admin.CreateTopicsRequest, admin.CreateTopicsResponse),
        _api(ApiKey.DELETE_TOPICS, admin.DeleteTopicsRequest, admin.DeleteTopicsResponse),
        _api(ApiKey.DELETE_RECORDS, data.DeleteRecordsRequest, data.DeleteRecordsResponse),
        _api(
            ApiKey.OFFSETS_FOR_LEADER_EPOCH,
            data.OffsetsForLeaderEpochRequest,
            data.OffsetsForLeaderEpochResponse,
        ),
        _api(ApiKey.DESCRIBE_CONFIGS, admin.DescribeConfigsRequest, admin.DescribeConfigsResponse),
        _api(ApiKey.DESCRIBE_LOG_DIRS, admin.DescribeLogDirsRequest, admin.DescribeLogDirsResponse),
        _api(ApiKey.CREATE_PARTITIONS, admin.CreatePartitionsRequest, admin.CreatePartitionsResponse),
        _api(ApiKey.ALTER_CONFIGS, admin.AlterConfigsRequest, admin.AlterConfigsResponse),
        _api(ApiKey.DESCRIBE_CLUSTER, metadata.DescribeClusterRequest, metadata.DescribeClusterResponse),
        _api(ApiKey.CONTROLLED_SHUTDOWN, admin.ControlledShutdownRequest, admin.ControlledShutdownResponse),
        _api(ApiKey.INIT_PRODUCER_ID, data.InitProducerIdRequest, data.InitProducerIdResponse),
        _api(ApiKey.ELECT_LEADERS, admin.ElectLeadersRequest, admin.ElectLeadersResponse),
        _api(ApiKey.DESCRIBE_QUORUM, metadata.DescribeQuorumRequest, metadata.DescribeQuorumResponse),
        _api(ApiKey.ALTER_PARTITION, cluster.AlterPartitionRequest, cluster.AlterPartitionResponse),
        _api(ApiKey.ENVELOPE, cluster.EnvelopeRequest, cluster.EnvelopeResponse),
        _api(ApiKey.BROKER_REGISTRATION, cluster.RegisterBrokerRequest, cluster.RegisterBrokerResponse),
        _api(ApiKey.BROKER_HEARTBEAT, cluster.BrokerHeartbeatRequest, cluster.BrokerHeartbeatResponse),
        _api(
            ApiKey.ALLOCATE_PRODUCER_IDS,
            cluster.AllocateProducerIdsRequest,
            cluster.AllocateProducerIdsResponse,
        ),
        _api(ApiKey.CLUSTER_HELLO, cluster.ClusterHelloRequest, cluster.ClusterHelloResponse),
        _api(ApiKey.CLUSTER_PROOF, cluster.ClusterProofRequest, cluster.ClusterProofResponse),
        _api(ApiKey.RAFT_MESSAGES, cluster.RaftMessagesRequest, cluster.RaftMessagesResponse),
        _api(ApiKey.REPLICA_FETCH, cluster.ReplicaFetchRequest, cluster.ReplicaFetchResponse),
        _api(
            ApiKey.CHECKPOINT_HIGH_WATERMARKS,
            cluster.CheckpointHighWatermarksRequest,
            cluster.CheckpointHighWatermarksResponse,
        ),
        _api(ApiKey.DESCRIBE_METADATA, metadata.DescribeMetadataRequest, metadata.DescribeMetadataResponse),
        _api(ApiKey.FETCH_METADATA, cluster.FetchMetadataRequest, cluster.FetchMetadataResponse),
        _api(ApiKey.FIND_COORDINATOR, groups.FindCoordinatorRequest, groups.FindCoordinatorResponse),
        _api(
            ApiKey.CONSUMER_GROUP_HEARTBEAT,
            groups.ConsumerGroupHeartbeatRequest,
            groups.ConsumerGroupHeartbeatResponse,
        ),
        _api(ApiKey.OFFSET_COMMIT, groups.OffsetCommitRequest, groups.OffsetCommitResponse),
        _api(ApiKey.OFFSET_FETCH, groups.OffsetFetchRequest, groups.OffsetFetchResponse),
        _api(ApiKey.OFFSET_DELETE, groups.OffsetDeleteRequest, groups.OffsetDeleteResponse),
        _api(ApiKey.LIST_GROUPS, groups.ListGroupsRequest, groups.ListGroupsResponse),
        _api(ApiKey.DESCRIBE_GROUPS, groups.DescribeGroupsRequest, groups.DescribeGroupsResponse),
        _api(ApiKey.DELETE_GROUPS, groups.DeleteGroupsRequest, groups.DeleteGroupsResponse),
        _api(ApiKey.TXN_OFFSET_COMMIT, groups.TxnOffsetCommitRequest, groups.TxnOffsetCommitResponse),
        _api(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            transactions.AddPartitionsToTxnRequest,
            transactions.AddPartitionsToTxnResponse,
        ),
        _api(ApiKey.END_TXN, transactions.EndTxnRequest, transactions.EndTxnResponse),
        _api(
            ApiKey.WRITE_TXN_MARKERS,
            transactions.WriteTxnMarkersRequest,
            transactions.WriteTxnMarkersResponse,
        ),
        _api(
            ApiKey.LIST_TRANSACTIONS,
            transactions.ListTransactionsRequest,
            transactions.ListTransactionsResponse,
        ),
        _api(
            ApiKey.DESCRIBE_TRANSACTIONS,
            transactions.DescribeTransactionsRequest,
            transactions.DescribeTransactionsResponse,
        ),
        _api(
            ApiKey.DESCRIBE_PRODUCERS,
            transactions.DescribeProducersRequest,
            transactions.DescribeProducersResponse,
        ),
        _api(
            ApiKey.ABORT_TRANSACTION,
            transactions.AbortTransactionRequest,
            transactions.AbortTransactionResponse,
        ),
        _api(ApiKey.JOIN_TXN_GROUP, transactions.JoinTxnGroupRequest, transactions.JoinTxnGroupResponse),
        _api(ApiKey.OFFSETS_FOR_BYTES, data.OffsetsForBytesRequest, data.OffsetsForBytesResponse),
        _api(ApiKey.END_TXN_GROUP, transactions.EndTxnGroupRequest, transactions.EndTxnGroupResponse),
        _api(
            ApiKey.DESCRIBE_TXN_GROUP,
            transactions.DescribeTxnGroupRequest,
            transactions.DescribeTxnGroupResponse,
        ),
        _api(
            ApiKey.RETIRE_TXN_GROUP, transactions.RetireTxnGroupRequest, transactions.RetireTxnGroupResponse
        ),
    )
}

API_KEY_BY_REQUEST: Final[dict[type[Struct], ApiKey]] = {api.request: api.key for api in APIS.values()}


def supported_ranges() -> list[metadata.ApiVersionRange]:
    """Return the versions of this build as an ApiVersions response lists them, by ascending key."""
    return [metadata.ApiVersionRange(int(key), *APIS[key][3:]) for key in sorted(APIS)]
