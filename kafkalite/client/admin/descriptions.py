"""Argument and result types of Admin, and their conversion from responses. Pure."""

# Tests: tests/client/test_admin.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kafkalite.model import NO_OFFSET, OffsetAndMetadata, TopicPartition
from kafkalite.protocol.messages.groups import AssignedTopic, DescribedGroup
from kafkalite.protocol.messages.metadata import (
    DescribeClusterResponse,
    DescribeQuorumResponse,
    TopicMetadata,
)
from kafkalite.protocol.messages.transactions import (
    ActiveProducer,
    DescribedTransaction,
    DescribeTxnGroupResponse,
    TxnPartition,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

BROKER_DEFAULT = -1  #: use the broker's own setting for the number of partitions or replicas


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. BROKER_DEFAULT means num.partitions, or default.replication.factor."""

    name: str
    partitions: int = BROKER_DEFAULT
    replication_factor: int = BROKER_DEFAULT
    configs: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    name: str
    topic_id: str
    num_partitions: int
    replication_factor: int


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    partition: int
    leader_id: int  #: -1 while there is none
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    partition_epoch: int  #: grows with every change of leader, replicas or ISR
    elr: tuple[int, ...]  #: replicas outside the ISR that still have every committed record (KIP-966)


@dataclass(frozen=True, slots=True)
class TopicDescription:
    name: str
    topic_id: str
    is_internal: bool
    partitions: tuple[PartitionDescription, ...]  #: the index is the partition


@dataclass(frozen=True, slots=True)
class ConfigValue:
    name: str
    value: str | None
    source: str  #: "default", "broker" or "topic"
    read_only: bool
    documentation: str


@dataclass(frozen=True, slots=True)
class NodeDescription:
    node_id: int
    address: str
    rack: str | None
    broker_epoch: int  #: grows with every registration
    is_fenced: bool  #: not live according to the controller, so it leads no partition
    is_shutting_down: bool
    registered_ms: int  #: wall clock


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    cluster_id: str
    controller_id: int
    metadata_offset: int
    brokers: tuple[NodeDescription, ...]


@dataclass(frozen=True, slots=True)
class QuorumMember:
    node_id: int
    address: str  #: of its controller listener; "" when it is not known
    is_voter: bool
    match_offset: int  #: the offset up to which its log matches the leader's; -1 if unknown
    last_contact_ms: int  #: time since the last message from it; -1 if never


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The controller quorum as ``node_id`` sees it. Only the leader knows match offsets."""

    node_id: int
    leader_id: int  #: -1 while there is none
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    members: tuple[QuorumMember, ...]


@dataclass(frozen=True, slots=True)
class MetadataDescription:
    """Part of the metadata tree: {path: value}; None for a directory."""

    metadata_offset: int
    nodes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LogDescription:
    """One partition's log on one broker."""

    node_id: int
    path: str
    topic: str
    partition: int
    size_bytes: int
    segment_count: int
    log_start_offset: int
    log_end_offset: int  #: exclusive
    offline_reason: str | None


@dataclass(frozen=True, slots=True)
class GroupListing:
    group_id: str
    state: str  #: Empty, Assigning, Reconciling, Stable, Dead
    group_epoch: int  #: the generation
    member_count: int
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """One member of a group. Partitions are in order."""

    member_id: str
    instance_id: str | None  #: group.instance.id of a static member
    member_epoch: int
    client_id: str
    host: str
    subscribed_topics: tuple[str, ...]
    subscribed_pattern: str | None
    assignment: tuple[TopicPartition, ...]  #: the partitions it owns
    target: tuple[TopicPartition, ...]  #: the partitions it is to own
    awaited_revocation: tuple[TopicPartition, ...]  #: to be revoked before another member gets them
    last_heartbeat_ms_ago: int
    state: str  #: Stable, Unrevoked, Unreleased


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a group, and its cause."""

    group_epoch: int
    time_ms: int  #: wall clock
    cause: str
    detail: str
    member_count: int
    partition_count: int


@dataclass(frozen=True, slots=True)
class GroupDescription:
    group_id: str
    state: str
    group_epoch: int  #: of the members and subscriptions
    assignment_epoch: int  #: of the target that was computed from them
    assignor: str
    members: tuple[MemberDescription, ...]
    journal: tuple[Generation, ...]  #: oldest first; empty unless it was asked for


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """A group's lag in one partition. Offsets are those of the next record; None if none is committed."""

    partition: TopicPartition
    committed: OffsetAndMetadata | None
    commit_ms: int | None  #: wall clock
    end_offset: int
    member: MemberDescription | None  #: the member that owns it

    @property
    def lag(self) -> int | None:
        return None if self.committed is None else max(0, self.end_offset - self.committed.offset)


@dataclass(frozen=True, slots=True)
class TransactionListing:
    transactional_id: str
    producer_id: int
    state: str
    duration_ms: int  #: since the open transaction began; 0 without one
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int  #: wall clock; NO_TIMESTAMP without an open one
    partitions: tuple[TopicPartition, ...]
    coordinator_epoch: int


@dataclass(frozen=True, slots=True)
class ProducerDescription:
    """A producer known to a partition's leader."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int | None  #: of its open transaction


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in a partition but unknown to every coordinator, so that it never ends."""

    partition: TopicPartition
    producer: ProducerDescription


@dataclass(frozen=True, slots=True)
class TransactionGroupWriter:
    writer: str
    batch_id: int
    producer_id: int
    producer_epoch: int
    state: str
    start_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class TransactionGroupDescription:
    application_id: str
    last_batch_id: int  #: the last decided batch; -1 before any
    last_winners: tuple[str, ...]
    #: Writers whose transactions have not ended in every partition.
    writers: tuple[TransactionGroupWriter, ...]


def described(kind: type[D], message: Any, **converted: Any) -> D:
    """Return a ``kind`` with the fields of ``message`` that have its names, lists as tuples.

    Lists of partitions become sorted tuples of TopicPartition. ``converted`` takes precedence.
    """
    names = [field.name for field in fields(kind) if field.name not in converted]
    return kind(**{name: _value(getattr(message, name)) for name in names}, **converted)


def _value(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], AssignedTopic):
        return tuple(sorted(TopicPartition(one.topic, number) for one in value for number in one.partitions))
    if value and isinstance(value[0], TxnPartition):
        return tuple(sorted(TopicPartition(one.topic, one.partition) for one in value))
    return tuple(value)


def topic_description(topic: TopicMetadata) -> TopicDescription:
    partitions = sorted(topic.partitions, key=lambda partition: partition.partition)
    of_topic = tuple(described(PartitionDescription, partition) for partition in partitions)
    return described(TopicDescription, topic, partitions=of_topic)


def group_description(group: DescribedGroup) -> GroupDescription:
    members = tuple(described(MemberDescription, member) for member in group.members)
    journal = tuple(Generation(*event) for event in group.journal)
    return described(GroupDescription, group, members=members, journal=journal)


def transaction_description(transaction: DescribedTransaction) -> TransactionDescription:
    return described(TransactionDescription, transaction)


def transaction_group_description(response: DescribeTxnGroupResponse) -> TransactionGroupDescription:
    writers = tuple(described(TransactionGroupWriter, one, writer=one.member) for one in response.members)
    return described(TransactionGroupDescription, response, writers=writers)


def quorum_description(response: DescribeQuorumResponse) -> QuorumDescription:
    return described(
        QuorumDescription, response, members=tuple(QuorumMember(*node) for node in response.nodes)
    )


def cluster_description(response: DescribeClusterResponse) -> ClusterDescription:
    return described(
        ClusterDescription, response, brokers=tuple(NodeDescription(*broker) for broker in response.brokers)
    )


def producer_description(producer: ActiveProducer) -> ProducerDescription:
    start_offset = producer.transaction_start_offset
    description = ProducerDescription(*producer)
    return replace(description, transaction_start_offset=None) if start_offset == NO_OFFSET else description
