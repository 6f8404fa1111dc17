"""Topics, configs and log directories."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NewTopic:
    name: str
    num_partitions: int  #: -1 takes the broker's num.partitions
    replication_factor: int  #: -1 takes the broker's default.replication.factor
    configs: dict[str, str]


@dataclass(frozen=True, slots=True)
class CreateTopicsRequest:
    timeout_ms: int
    validate_only: bool
    topics: list[NewTopic]


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    name: str
    error_code: int
    error_message: str | None
    topic_id: str
    num_partitions: int
    replication_factor: int


@dataclass(frozen=True, slots=True)
class CreateTopicsResponse:
    error_code: int
    error_message: str | None
    topics: list[CreatedTopic]


@dataclass(frozen=True, slots=True)
class DeleteTopicsRequest:
    timeout_ms: int
    names: list[str]


@dataclass(frozen=True, slots=True)
class TopicResult:
    name: str
    error_code: int
    error_message: str | None


@dataclass(frozen=True, slots=True)
class DeleteTopicsResponse:
    error_code: int
    error_message: str | None
    topics: list[TopicResult]


@dataclass(frozen=True, slots=True)
class PartitionCount:
    name: str
    total_count: int  #: the new number of partitions, above the present one


@dataclass(frozen=True, slots=True)
class CreatePartitionsRequest:
    timeout_ms: int
    validate_only: bool
    topics: list[PartitionCount]


@dataclass(frozen=True, slots=True)
class CreatePartitionsResponse:
    error_code: int
    error_message: str | None
    topics: list[TopicResult]


@dataclass(frozen=True, slots=True)
class ConfigResource:
    resource_type: str  #: "topic" or "broker"
    name: str  #: the topic's name, or the broker's node id in decimal


@dataclass(frozen=True, slots=True)
class DescribeConfigsRequest:
    resources: list[ConfigResource]


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    name: str
    value: str | None
    source: str  #: "default", "broker" (the broker's own setting), or "topic"
    read_only: bool
    documentation: str


@dataclass(frozen=True, slots=True)
class DescribedConfig:
    resource_type: str
    name: str
    error_code: int
    error_message: str | None
    entries: list[ConfigEntry]


@dataclass(frozen=True, slots=True)
class DescribeConfigsResponse:
    error_code: int
    error_message: str | None
    resources: list[DescribedConfig]


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """KIP-339: incremental. A None value deletes the override."""

    resource_type: str
    name: str
    key: str
    value: str | None


@dataclass(frozen=True, slots=True)
class AlterConfigsRequest:
    validate_only: bool
    changes: list[ConfigChange]


@dataclass(frozen=True, slots=True)
class AlteredConfig:
    resource_type: str
    name: str
    error_code: int
    error_message: str | None


@dataclass(frozen=True, slots=True)
class AlterConfigsResponse:
    error_code: int
    error_message: str | None
    resources: list[AlteredConfig]


@dataclass(frozen=True, slots=True)
class DescribeLogDirsRequest:
    topics: list[str] | None  #: None asks for all


@dataclass(frozen=True, slots=True)
class LogDirPartition:
    topic: str
    partition: int
    size_bytes: int
    segment_count: int
    log_start_offset: int
    log_end_offset: int  #: exclusive
    offline_reason: str | None  #: why the log takes no more, or None


@dataclass(frozen=True, slots=True)
class DescribeLogDirsResponse:
    error_code: int
    error_message: str | None
    path: str
    partitions: list[LogDirPartition]
