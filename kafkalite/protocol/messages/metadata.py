"""ApiVersions, Metadata, DescribeCluster, DescribeQuorum, DescribeMetadata: the state of the cluster."""

# Tests: tests/protocol/test_golden.py

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, Struct


class ApiVersionsRequest(Struct):
    """The first request of every connection, always version 0."""

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
    topics: list[str] | None  #: None: all
    allow_auto_topic_creation: bool


class BrokerMetadata(Struct):
    node_id: int
    address: str  #: "host:port", "[v6]:port" or "inproc://name"
    rack: str | None


class PartitionMetadata(Struct):
    error_code: int
    partition: int
    leader_id: int  #: -1: none
    leader_epoch: int
    partition_epoch: int  #: increases with every change of this state
    replicas: list[int]  #: the first is the preferred leader
    isr: list[int]
    elr: list[int]  #: KIP-966: outside the ISR, with every committed record


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
    is_fenced: bool  #: considered dead by the controller; it leads nothing
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
    last_contact_ms: int  #: ms since its last message; -1: none yet


class DescribeQuorumResponse(ApiResponse):
    """The quorum as the responding node sees it; only the leader knows match offsets."""

    node_id: int  #: of the node that responds
    leader_id: int  #: -1: none
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    nodes: list[QuorumNode]


class DescribeMetadataRequest(Struct):
    """A request for ``path`` in the metadata as a tree (``/topics/orders/0``), now or after an offset."""

    path: str
    after_offset: int  #: -1: the current state; otherwise wait until the log has passed it
    max_wait_ms: int


class MetadataNode(Struct):
    path: str
    value: str  #: JSON; "" for a directory


class DescribeMetadataResponse(ApiResponse):
    metadata_offset: int
    nodes: list[MetadataNode]  #: ``path`` itself first, then its children, sorted
