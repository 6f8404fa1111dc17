"""ApiVersions, Metadata, DescribeCluster: what a client learns before it can do anything else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiVersionsRequest:
    """The first request of every connection, always version 0."""

    software_name: str
    software_version: str


@dataclass(frozen=True, slots=True)
class ApiVersionRange:
    api_key: int
    min_version: int  #: inclusive
    max_version: int  #: inclusive


@dataclass(frozen=True, slots=True)
class ApiVersionsResponse:
    error_code: int
    error_message: str | None
    software_name: str
    software_version: str
    apis: list[ApiVersionRange]


@dataclass(frozen=True, slots=True)
class MetadataRequest:
    topics: list[str] | None  #: None asks for all
    allow_auto_topic_creation: bool


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    node_id: int
    address: str  #: "host:port", "[v6]:port" or "inproc://name"
    rack: str | None


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    error_code: int
    partition: int
    leader_id: int  #: -1 when there is none
    leader_epoch: int
    replicas: list[int]
    isr: list[int]


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    error_code: int
    error_message: str | None
    name: str
    topic_id: str  #: 32 hex digits
    is_internal: bool
    partitions: list[PartitionMetadata]


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    error_code: int
    error_message: str | None
    cluster_id: str
    controller_id: int
    brokers: list[BrokerMetadata]
    topics: list[TopicMetadata]


@dataclass(frozen=True, slots=True)
class DescribeClusterRequest:
    pass


@dataclass(frozen=True, slots=True)
class DescribeClusterResponse:
    error_code: int
    error_message: str | None
    cluster_id: str
    controller_id: int
    metadata_offset: int
    brokers: list[BrokerMetadata]
