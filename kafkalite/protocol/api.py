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


#: Used between nodes, only on a connection that has proved to know the cluster's secret (S10).
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


APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in (
        Api(ApiKey.PRODUCE, data.ProduceRequest, data.ProduceResponse, 0, 0),
        Api(ApiKey.FETCH, data.FetchRequest, data.FetchResponse, 0, 0),
        Api(ApiKey.LIST_OFFSETS, data.ListOffsetsRequest, data.ListOffsetsResponse, 0, 0),
        Api(ApiKey.METADATA, metadata.MetadataRequest, metadata.MetadataResponse, 0, 0),
        Api(ApiKey.API_VERSIONS, metadata.ApiVersionsRequest, metadata.ApiVersionsResponse, 0, 0),
        Api(ApiKey.CREATE_TOPICS, admin.CreateTopicsRequest, admin.CreateTopicsResponse, 0, 0),
        Api(ApiKey.DELETE_TOPICS, admin.DeleteTopicsRequest, admin.DeleteTopicsResponse, 0, 0),
        Api(ApiKey.DELETE_RECORDS, data.DeleteRecordsRequest, data.DeleteRecordsResponse, 0, 0),
        Api(
            ApiKey.OFFSETS_FOR_LEADER_EPOCH,
            data.OffsetsForLeaderEpochRequest,
            data.OffsetsForLeaderEpochResponse,
            0,
            0,
        ),
        Api(ApiKey.DESCRIBE_CONFIGS, admin.DescribeConfigsRequest, admin.DescribeConfigsResponse, 0, 0),
        Api(ApiKey.DESCRIBE_LOG_DIRS, admin.DescribeLogDirsRequest, admin.DescribeLogDirsResponse, 0, 0),
        Api(ApiKey.CREATE_PARTITIONS, admin.CreatePartitionsRequest, admin.CreatePartitionsResponse, 0, 0),
        Api(ApiKey.ALTER_CONFIGS, admin.AlterConfigsRequest, admin.AlterConfigsResponse, 0, 0),
        Api(ApiKey.DESCRIBE_CLUSTER, metadata.DescribeClusterRequest, metadata.DescribeClusterResponse, 0, 0),
        Api(
            ApiKey.CONTROLLED_SHUTDOWN,
            admin.ControlledShutdownRequest,
            admin.ControlledShutdownResponse,
            0,
            0,
        ),
        Api(ApiKey.INIT_PRODUCER_ID, data.InitProducerIdRequest, data.InitProducerIdResponse, 0, 0),
        Api(ApiKey.ELECT_LEADERS, admin.ElectLeadersRequest, admin.ElectLeadersResponse, 0, 0),
        Api(ApiKey.DESCRIBE_QUORUM, metadata.DescribeQuorumRequest, metadata.DescribeQuorumResponse, 0, 0),
        Api(ApiKey.ALTER_PARTITION, cluster.AlterPartitionRequest, cluster.AlterPartitionResponse, 0, 0),
        Api(ApiKey.ENVELOPE, cluster.EnvelopeRequest, cluster.EnvelopeResponse, 0, 0),
        Api(ApiKey.BROKER_REGISTRATION, cluster.RegisterBrokerRequest, cluster.RegisterBrokerResponse, 0, 0),
        Api(ApiKey.BROKER_HEARTBEAT, cluster.BrokerHeartbeatRequest, cluster.BrokerHeartbeatResponse, 0, 0),
        Api(
            ApiKey.ALLOCATE_PRODUCER_IDS,
            cluster.AllocateProducerIdsRequest,
            cluster.AllocateProducerIdsResponse,
            0,
            0,
        ),
        Api(ApiKey.CLUSTER_HELLO, cluster.ClusterHelloRequest, cluster.ClusterHelloResponse, 0, 0),
        Api(ApiKey.CLUSTER_PROOF, cluster.ClusterProofRequest, cluster.ClusterProofResponse, 0, 0),
        Api(ApiKey.RAFT_MESSAGES, cluster.RaftMessagesRequest, cluster.RaftMessagesResponse, 0, 0),
        Api(ApiKey.REPLICA_FETCH, cluster.ReplicaFetchRequest, cluster.ReplicaFetchResponse, 0, 0),
        Api(
            ApiKey.CHECKPOINT_HIGH_WATERMARKS,
            cluster.CheckpointHighWatermarksRequest,
            cluster.CheckpointHighWatermarksResponse,
            0,
            0,
        ),
        Api(
            ApiKey.DESCRIBE_METADATA,
            metadata.DescribeMetadataRequest,
            metadata.DescribeMetadataResponse,
            0,
            0,
        ),
        Api(ApiKey.FETCH_METADATA, cluster.FetchMetadataRequest, cluster.FetchMetadataResponse, 0, 0),
        Api(ApiKey.FIND_COORDINATOR, groups.FindCoordinatorRequest, groups.FindCoordinatorResponse, 0, 0),
        Api(
            ApiKey.CONSUMER_GROUP_HEARTBEAT,
            groups.ConsumerGroupHeartbeatRequest,
            groups.ConsumerGroupHeartbeatResponse,
            0,
            0,
        ),
        Api(ApiKey.OFFSET_COMMIT, groups.OffsetCommitRequest, groups.OffsetCommitResponse, 0, 0),
        Api(ApiKey.OFFSET_FETCH, groups.OffsetFetchRequest, groups.OffsetFetchResponse, 0, 0),
        Api(ApiKey.OFFSET_DELETE, groups.OffsetDeleteRequest, groups.OffsetDeleteResponse, 0, 0),
        Api(ApiKey.LIST_GROUPS, groups.ListGroupsRequest, groups.ListGroupsResponse, 0, 0),
        Api(ApiKey.DESCRIBE_GROUPS, groups.DescribeGroupsRequest, groups.DescribeGroupsResponse, 0, 0),
        Api(ApiKey.DELETE_GROUPS, groups.DeleteGroupsRequest, groups.DeleteGroupsResponse, 0, 0),
        Api(ApiKey.TXN_OFFSET_COMMIT, groups.TxnOffsetCommitRequest, groups.TxnOffsetCommitResponse, 0, 0),
        Api(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            transactions.AddPartitionsToTxnRequest,
            transactions.AddPartitionsToTxnResponse,
            0,
            0,
        ),
        Api(ApiKey.END_TXN, transactions.EndTxnRequest, transactions.EndTxnResponse, 0, 0),
        Api(
            ApiKey.WRITE_TXN_MARKERS,
            transactions.WriteTxnMarkersRequest,
            transactions.WriteTxnMarkersResponse,
            0,
            0,
        ),
        Api(
            ApiKey.LIST_TRANSACTIONS,
            transactions.ListTransactionsRequest,
            transactions.ListTransactionsResponse,
            0,
            0,
        ),
        Api(
            ApiKey.DESCRIBE_TRANSACTIONS,
            transactions.DescribeTransactionsRequest,
            transactions.DescribeTransactionsResponse,
            0,
            0,
        ),
        Api(
            ApiKey.DESCRIBE_PRODUCERS,
            transactions.DescribeProducersRequest,
            transactions.DescribeProducersResponse,
            0,
            0,
        ),
        Api(
            ApiKey.ABORT_TRANSACTION,
            transactions.AbortTransactionRequest,
            transactions.AbortTransactionResponse,
            0,
            0,
        ),
        Api(ApiKey.JOIN_TXN_GROUP, transactions.JoinTxnGroupRequest, transactions.JoinTxnGroupResponse, 0, 0),
        Api(ApiKey.OFFSETS_FOR_BYTES, data.OffsetsForBytesRequest, data.OffsetsForBytesResponse, 0, 0),
        Api(ApiKey.END_TXN_GROUP, transactions.EndTxnGroupRequest, transactions.EndTxnGroupResponse, 0, 0),
        Api(
            ApiKey.DESCRIBE_TXN_GROUP,
            transactions.DescribeTxnGroupRequest,
            transactions.DescribeTxnGroupResponse,
            0,
            0,
        ),
        Api(
            ApiKey.RETIRE_TXN_GROUP,
            transactions.RetireTxnGroupRequest,
            transactions.RetireTxnGroupResponse,
            0,
            0,
        ),
    )
}

API_KEY_BY_REQUEST: Final[dict[type[Struct], ApiKey]] = {api.request: api.key for api in APIS.values()}


def supported_ranges() -> list[metadata.ApiVersionRange]:
    """Return the versions of this build as an ApiVersions response lists them, by ascending key."""
    return [metadata.ApiVersionRange(int(key), *APIS[key][3:]) for key in sorted(APIS)]
