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
    replicas: list[int]
    isr: list[int]


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


class DescribeClusterResponse(Struct):
    error_code: int
    error_message: str | None
    cluster_id: str
    controller_id: int
    metadata_offset: int
    brokers: list[BrokerMetadata]
