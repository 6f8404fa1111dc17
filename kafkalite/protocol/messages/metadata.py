"""ApiVersions, Metadata, DescribeCluster: what a client learns before it can do anything else."""

from __future__ import annotations

from kafkalite.protocol.structs import Struct


class ApiVersionsRequest(Struct):
    """The first request of every connection, always version 0."""

    software_name: str
    software_version: str


class ApiVersionRange(Struct):
    api_key: int
    min_version: int  #: inclusive
    max_version: int  #: inclusive


class ApiVersionsResponse(Struct):
    error_code: int
    error_message: str | None
    software_name: str
    software_version: str
    apis: list[ApiVersionRange]


class MetadataRequest(Struct):
    topics: list[str] | None  #: None asks for all
    allow_auto_topic_creation: bool


class BrokerMetadata(Struct):
    node_id: int
    address: str  #: "host:port", "[v6]:port" or "inproc://name"
    rack: str | None


class PartitionMetadata(Struct):
    error_code: int
    partition: int
    leader_id: int  #: -1 when there is none
    leader_epoch: int
    partition_epoch: int  #: grows with every change of this state
    replicas: list[int]  #: the first is the preferred leader
    isr: list[int]
    elr: list[int]  #: KIP-966: outside the ISR and still holding everything committed


class TopicMetadata(Struct):
    error_code: int
    error_message: str | None
    name: str
    topic_id: str  #: 32 hex digits
    is_internal: bool
    partitions: list[PartitionMetadata]


class MetadataResponse(Struct):
    error_code: int
    error_message: str | None
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
    broker_epoch: int  #: grows with every registration
    is_fenced: bool  #: not alive as far as the controller knows: it leads nothing
    is_shutting_down: bool
    registered_ms: int  #: wall clock


class DescribeClusterResponse(Struct):
    error_code: int
    error_message: str | None
    cluster_id: str
    controller_id: int
    metadata_offset: int
    brokers: list[BrokerDescription]


class DescribeQuorumRequest(Struct):
    pass


class QuorumNode(Struct):
    node_id: int
    address: str  #: of its controller listener; "" when it is not known
    is_voter: bool
    match_offset: int  #: the leader knows its log to agree up to here; -1 when not known
    last_contact_ms: int  #: since it was last heard of; -1 never


class DescribeQuorumResponse(Struct):
    """As the answering node sees it; match offsets are known to the leader alone."""

    error_code: int
    error_message: str | None
    node_id: int  #: who answers
    leader_id: int  #: -1 while there is none
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    nodes: list[QuorumNode]


class DescribeMetadataRequest(Struct):
    """The metadata as a tree of paths (``/topics/orders/0``): what is at ``path``, now or after an offset."""

    path: str
    after_offset: int  #: -1: the present state; otherwise wait for the log to pass it
    max_wait_ms: int


class MetadataNode(Struct):
    path: str
    value: str  #: JSON; "" of a mere directory


class DescribeMetadataResponse(Struct):
    error_code: int
    error_message: str | None
    metadata_offset: int
    nodes: list[MetadataNode]  #: at ``path`` itself first, then one level below, sorted
