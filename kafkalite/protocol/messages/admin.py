"""Requests for topics, configs and log directories."""

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, Distinct, PartitionItem, PartitionResult, Struct


class NewTopic(Struct):
    name: str
    num_partitions: int  #: -1 selects the broker's num.partitions
    replication_factor: int  #: -1 selects the broker's default.replication.factor
    configs: dict[str, str]


class CreateTopicsRequest(Struct):
    timeout_ms: int
    validate_only: bool
    topics: list[NewTopic]


class TopicResult(Struct):
    name: str
    error_code: int
    error_message: str | None


class CreatedTopic(TopicResult):
    topic_id: str
    num_partitions: int
    replication_factor: int


class CreateTopicsResponse(ApiResponse):
    topics: list[CreatedTopic]


class DeleteTopicsRequest(Struct):
    timeout_ms: int
    names: list[str]


class DeleteTopicsResponse(ApiResponse):
    topics: list[TopicResult]


class PartitionCount(Struct):
    name: str
    total_count: int  #: the new number of partitions, which must be above the current number


class CreatePartitionsRequest(Struct):
    timeout_ms: int
    validate_only: bool
    topics: list[PartitionCount]


class CreatePartitionsResponse(ApiResponse):
    topics: list[TopicResult]


class ConfigResource(Struct):
    resource_type: str  #: "topic" or "broker"
    name: str  #: the topic's name, or the broker's node id in decimal


class DescribeConfigsRequest(Struct):
    resources: list[ConfigResource]


class ConfigEntry(Struct):
    name: str
    value: str | None
    source: str  #: "default", "broker" (the broker's own setting), or "topic"
    read_only: bool
    documentation: str


class AlteredConfig(ConfigResource):
    error_code: int
    error_message: str | None


class DescribedConfig(AlteredConfig):
    entries: list[ConfigEntry]


class DescribeConfigsResponse(ApiResponse):
    resources: list[DescribedConfig]


class ConfigChange(ConfigResource):
    """A change of one setting (KIP-339). The value None removes the override."""

    key: str
    value: str | None


class AlterConfigsRequest(Struct):
    validate_only: bool
    changes: list[ConfigChange]


class AlterConfigsResponse(ApiResponse):
    resources: list[AlteredConfig]


class DescribeLogDirsRequest(Struct):
    topics: list[str] | None  #: None: all topics


class LogDirPartition(PartitionItem):
    size_bytes: int
    segment_count: int
    log_start_offset: int
    log_end_offset: int  #: exclusive
    offline_reason: str | None  #: why the log refuses appends; None if it accepts them


class DescribeLogDirsResponse(ApiResponse):
    path: str
    partitions: list[LogDirPartition]


class ElectionPartition(PartitionItem):
    pass


class ElectLeadersRequest(Struct):
    timeout_ms: int
    is_unclean: bool  #: False: the preferred replica. True: any live one, even if committed records are lost
    partitions: Distinct[ElectionPartition] | None  #: None: every partition that needs an election


class ElectedPartition(PartitionResult):
    """``error_code`` is ELECTION_NOT_NEEDED if the replica to elect already leads."""

    leader_id: int


class ElectLeadersResponse(ApiResponse):
    partitions: list[ElectedPartition]


class ControlledShutdownRequest(Struct):
    """An operator's request that a broker transfer its leaderships and stop."""

    node_id: int


class ControlledShutdownResponse(ApiResponse):
    node_id: int  #: the broker that has begun to shut down
