"""Messages that describe the cluster: ApiVersions, Metadata, DescribeCluster, DescribeQuorum and others."""

# Tests: tests/protocol/test_golden.py

from __future__ import annotations

from typing import Annotated

from kafkalite.limits import MAX_TOPICS_PER_REQUEST
from kafkalite.protocol.structs import ApiResponse, AtMost, Struct


class ApiVersionsRequest(Struct):
    """The first request of every connection. It always has version 0."""

    software_name: str
    software_version: str


class ApiVersionRange(Struct):
    api_key: int
    min_version: int  #: inclusive
    max_version: int  #: inclusive


class ApiVersionsResponse(ApiResponse):
    software_name: str
    software_version: str
    apis: list[ApiVersionRange]


class MetadataRequest(Struct):
    topics: Annotated[list[str], AtMost(MAX_TOPICS_PER_REQUEST)] | None  #: None: all topics
    allow_auto_topic_creation: bool


class BrokerMetadata(Struct):
    node_id: int
    address: str  #: "host:port", "[IPv6 address]:port" or "inproc://name"
    rack: str | None


class PartitionMetadata(Struct):
    error_code: int
    partition: int
    leader_id: int  #: -1 if there is none
    leader_epoch: int
    partition_epoch: int  #: increases with every change of this state
    replicas: list[int]  #: the first is the preferred leader
    isr: list[int]
    elr: list[int]  #: replicas outside the ISR that have every committed record (KIP-966)


class TopicMetadata(Struct):
    error_code: int
    error_message: str | None
    name: str
    topic_id: str  #: 32 hex digits
    is_internal: bool
    partitions: list[PartitionMetadata]


class MetadataResponse(ApiResponse):
    cluster_id: str
    controller_id: int
    brokers: list[BrokerMetadata]
    topics: list[TopicMetadata]


class DescribeClusterRequest(Struct):
    pass


class BrokerDescription(Struct):
    node_id: int
    address: str
    rack: str | None
    broker_epoch: int  #: increases with every registration
    is_fenced: bool  #: the controller considers the broker dead; it leads no partition
    is_shutting_down: bool
    registered_ms: int  #: wall clock


class DescribeClusterResponse(ApiResponse):
    cluster_id: str
    controller_id: int
    metadata_offset: int
    brokers: list[BrokerDescription]


class DescribeQuorumRequest(Struct):
    pass


class QuorumNode(Struct):
    node_id: int
    address: str  #: of its controller listener; "" if unknown
    is_voter: bool
    match_offset: int  #: the last index at which its log agrees with the leader's; -1 if unknown
    last_contact_ms: int  #: ms since its last message; -1 if there was none


class DescribeQuorumResponse(ApiResponse):
    """The quorum as the responding node knows it. Only the leader knows the match offsets of voters."""

    node_id: int  #: the node that responds
    leader_id: int  #: -1 if there is none
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    nodes: list[QuorumNode]


class DescribeQuorumRequestV1(DescribeQuorumRequest):
    pass


class QuorumDirectory(Struct):
    node_id: int
    directory_id: str  #: of its metadata directory, in hex; "" if unknown


class DescribeQuorumResponseV1(DescribeQuorumResponse):
    directories: list[QuorumDirectory]  #: of the nodes


class DescribeRecoveryRequest(Struct):
    """Requests the RecoveringPartitions of the cluster."""

    node_id: int  #: of the broker that forwards a client's request; -1 from a client


class RecoveringReplica(Struct):
    """A replica that is damaged or unverified, or has sent a ReplicaReport."""

    node_id: int
    state: str  #: damaged, short, unverified, refuses to truncate, or reported
    last_epoch: int  #: of the last batch; -1 if unknown
    log_end_offset: int  #: exclusive; -1 if unknown


class RecoveringPartition(Struct):
    """A partition that waits for a leader after unclean stops, or has damaged or unverified replicas."""

    topic: str
    partition: int
    leader_id: int  #: -1: none
    waited_ms: int  #: since the first report of a replica; -1 if it does not wait
    waits_for: list[int]  #: replicas whose reports are missing
    replicas: list[RecoveringReplica]


class DescribeRecoveryResponse(ApiResponse):
    partitions: list[RecoveringPartition]


class DescribeFeaturesRequest(Struct):
    """Requests the finalised levels of features, and the levels that each node supports (KIP-584)."""

    node_id: int  #: of the broker that forwards a client's request; -1 from a client


class NodeFeature(Struct):
    """The levels that the program of one broker or voter supports."""

    node_id: int
    min_level: int  #: inclusive; 0: unknown, because the node does not run, or does not say it
    max_level: int  #: inclusive; 0: unknown


class FeatureDescription(Struct):
    feature: str
    finalized_level: int
    nodes: list[NodeFeature]  #: all brokers and voters


class DescribeFeaturesResponse(ApiResponse):
    metadata_offset: int  #: Kafka's epoch of the finalised levels: they are those at this offset
    features: list[FeatureDescription]


class DescribeMetadataRequest(Struct):
    """Requests the node at ``path`` of the metadata tree, such as ``/topics/orders/0``. Long poll."""

    path: str
    after_offset: int  #: -1: the current state; otherwise wait until the log has passed this offset
    max_wait_ms: int


class MetadataNode(Struct):
    path: str
    value: str  #: JSON; "" for a directory


class DescribeMetadataResponse(ApiResponse):
    metadata_offset: int
    nodes: list[MetadataNode]  #: ``path`` itself first, then its children, sorted
