"""Requests for topics, configs, quotas, log directories, leader elections and the shutdown of a broker."""

from __future__ import annotations

from typing import Annotated

from kafkalite.limits import (
    MAX_FEATURES_PER_REQUEST,
    MAX_QUOTA_PARTS,
    MAX_RESOURCES_PER_REQUEST,
    MAX_TOPICS_PER_REQUEST,
)
from kafkalite.protocol.structs import ApiResponse, AtMost, Distinct, PartitionItem, PartitionResult, Struct


class NewTopic(Struct):
    name: str
    num_partitions: int  #: -1 selects the broker's num.partitions
    replication_factor: int  #: -1 selects the broker's default.replication.factor
    configs: dict[str, str]


class CreateTopicsRequest(Struct):
    timeout_ms: int
    validate_only: bool
    topics: Annotated[list[NewTopic], AtMost(MAX_TOPICS_PER_REQUEST)]


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
    names: Annotated[list[str], AtMost(MAX_TOPICS_PER_REQUEST)]


class DeleteTopicsResponse(ApiResponse):
    topics: list[TopicResult]


class PartitionCount(Struct):
    name: str
    total_count: int  #: the new number of partitions, which must be above the current number


class CreatePartitionsRequest(Struct):
    timeout_ms: int
    validate_only: bool
    topics: Annotated[list[PartitionCount], AtMost(MAX_TOPICS_PER_REQUEST)]


class CreatePartitionsResponse(ApiResponse):
    topics: list[TopicResult]


class ConfigResource(Struct):
    resource_type: str  #: "topic" or "broker"
    name: str  #: the topic's name, or the broker's node id in decimal


class DescribeConfigsRequest(Struct):
    resources: Annotated[list[ConfigResource], AtMost(MAX_RESOURCES_PER_REQUEST)]


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
    changes: Annotated[list[ConfigChange], AtMost(MAX_TOPICS_PER_REQUEST)]


class AlterConfigsResponse(ApiResponse):
    resources: list[AlteredConfig]


class QuotaEntityName(Struct):
    """One part of the entity of a quota."""

    entity_type: str  #: "user", "client-id" or "ip"
    name: str | None  #: None: the default of all names without a quota of their own


class QuotaFilter(QuotaEntityName):
    """A condition on one part of an entity. ``name`` is None unless ``match_type`` is 0."""

    match_type: int  #: 0: this name; 1: the default; 2: any name or the default


class DescribeClientQuotasRequest(Struct):
    """Requests the quotas of each entity that matches all ``components``, which may be empty (KIP-546)."""

    components: Annotated[list[QuotaFilter], AtMost(MAX_QUOTA_PARTS)]
    strict: bool  #: only entities without other parts


class DescribedClientQuota(Struct):
    entity: list[QuotaEntityName]
    values: dict[str, str]  #: {key: decimal number}


class DescribeClientQuotasResponse(ApiResponse):
    entries: list[DescribedClientQuota]


class ClientQuotaChange(Struct):
    """A change of one quota of an entity. The value None removes the quota."""

    key: str
    value: str | None  #: a decimal number from 0.001 to 2^63


class ClientQuotaAlteration(Struct):
    """Changes of one entity, which are applied together or not at all."""

    entity: Annotated[list[QuotaEntityName], AtMost(MAX_QUOTA_PARTS)]
    changes: Annotated[list[ClientQuotaChange], AtMost(MAX_QUOTA_PARTS)]


class AlterClientQuotasRequest(Struct):
    validate_only: bool
    entries: Annotated[list[ClientQuotaAlteration], AtMost(MAX_TOPICS_PER_REQUEST)]


class AlteredClientQuota(Struct):
    entity: list[QuotaEntityName]
    error_code: int
    error_message: str | None


class AlterClientQuotasResponse(ApiResponse):
    entries: list[AlteredClientQuota]


class DescribeLogDirsRequest(Struct):
    topics: Annotated[list[str], AtMost(MAX_TOPICS_PER_REQUEST)] | None  #: None: all topics


class LogDirPartition(PartitionItem):
    size_bytes: int
    segment_count: int
    log_start_offset: int
    log_end_offset: int  #: exclusive
    offline_reason: str | None  #: why the log refuses appends; None if it accepts them


class DescribeLogDirsResponse(ApiResponse):
    path: str
    partitions: list[LogDirPartition]


class DescribeLogDirsRequestV1(DescribeLogDirsRequest):
    pass


class LogDirItem(PartitionItem):
    pass


class LogDirCopy(PartitionItem):
    """A copy of a log that moves into the directory (AlterReplicaLogDirs)."""

    log_end_offset: int  #: exclusive
    offset_lag: int  #: how many offsets the copy is behind the log


class LogDirectory(Struct):
    """A data directory of the broker. The bytes are those of its disk; -1 if they are unknown."""

    path: str
    directory_id: str  #: 32 hex digits; empty if the directory could not be opened
    failure: str | None  #: why the directory is not used; None if it works
    total_bytes: int
    free_bytes: int
    partitions: list[LogDirItem]
    copies: list[LogDirCopy]


class DescribeLogDirsResponseV1(DescribeLogDirsResponse):
    directories: list[LogDirectory]  #: in the order of log.dirs, those that could not be opened last


class ReplicaLogDir(PartitionItem):
    path: str  #: the data directory to which the log moves; the one that it is in: cancel its move


class AlterReplicaLogDirsRequest(Struct):
    partitions: Distinct[ReplicaLogDir]


class AlterReplicaLogDirsResponse(ApiResponse):
    partitions: list[PartitionResult]


class ElectionPartition(PartitionItem):
    pass


class ElectLeadersRequest(Struct):
    timeout_ms: int
    is_unclean: bool  #: False: the preferred replica. True: any live one, even if committed records are lost
    partitions: Distinct[ElectionPartition] | None  #: None: every partition that needs an election


class ElectedPartition(PartitionResult):
    """``error_code`` is ELECTION_NOT_NEEDED if the preferred replica leads already or, in an unclean
    election, if any replica leads."""

    leader_id: int


class ElectLeadersResponse(ApiResponse):
    partitions: list[ElectedPartition]


class PartitionReassignment(PartitionItem):
    replicas: list[int] | None  #: the replicas afterwards, the preferred leader first; None: cancel (KIP-455)


class AlterPartitionReassignmentsRequest(Struct):
    timeout_ms: int
    allow_replication_factor_change: bool  #: False: refuse another number of replicas (KIP-860)
    partitions: Distinct[PartitionReassignment]


class AlterPartitionReassignmentsResponse(ApiResponse):
    partitions: list[PartitionResult]


class ReassignedPartition(PartitionItem):
    pass


class ListPartitionReassignmentsRequest(Struct):
    timeout_ms: int
    partitions: Distinct[ReassignedPartition] | None  #: None: every partition that is being reassigned


class OngoingReassignment(PartitionItem):
    replicas: list[int]  #: the present replicas, those to be removed included
    adding_replicas: list[int]
    removing_replicas: list[int]
    isr: list[int]


class ListPartitionReassignmentsResponse(ApiResponse):
    partitions: list[OngoingReassignment]


class UnregisterBrokerRequest(Struct):
    """A request to remove a broker without replicas from the cluster, and to retire its node id."""

    node_id: int


class UnregisterBrokerResponse(ApiResponse):
    node_id: int  #: the retired id


class FeatureUpdate(Struct):
    feature: str
    level: int  #: to finalise; a finalised level is never lowered


class UpdateFeaturesRequest(Struct):
    """A request to finalise levels of features (KIP-584)."""

    timeout_ms: int
    validate_only: bool
    updates: Annotated[list[FeatureUpdate], AtMost(MAX_FEATURES_PER_REQUEST)]


class UpdatedFeature(Struct):
    feature: str
    error_code: int
    error_message: str | None


class UpdateFeaturesResponse(ApiResponse):
    results: list[UpdatedFeature]


class AddRaftVoterRequest(Struct):
    """A request to make an observer of the metadata quorum a voter (KIP-853)."""

    node_id: int
    directory_id: str  #: of its metadata directory, in hex; "" accepts any
    timeout_ms: int


class AddRaftVoterResponse(ApiResponse):
    node_id: int  #: the new voter


class RemoveRaftVoterRequest(Struct):
    """A request to remove a voter from the metadata quorum (KIP-853)."""

    node_id: int
    directory_id: str  #: of its metadata directory, in hex; "" accepts any
    timeout_ms: int


class RemoveRaftVoterResponse(ApiResponse):
    node_id: int  #: the former voter


class ControlledShutdownRequest(Struct):
    """An operator's request that a broker transfer its leaderships and stop."""

    node_id: int


class ControlledShutdownResponse(ApiResponse):
    node_id: int  #: the broker that has begun to shut down
