"""The values that Admin takes and returns, and how they are made from responses. Pure."""

# Tests: tests/client/test_admin.py

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kafkalite.model import NO_OFFSET, OffsetAndMetadata, TopicPartition
from kafkalite.protocol.messages.groups import AssignedTopic, DescribedGroup, DescribedMember
from kafkalite.protocol.messages.metadata import TopicMetadata
from kafkalite.protocol.messages.transactions import (
    ActiveProducer,
    DescribedTransaction,
    DescribeTxnGroupResponse,
    TxnPartition,
)

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
    is_fenced: bool  #: not live according to the controller: leads no partition
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
    """Why a group has a generation."""

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
    last_batch_id: int  #: the last one decided; -1 before any
    last_winners: tuple[str, ...]
    writers: tuple[TransactionGroupWriter, ...]  #: those with transactions that have not ended everywhere


def topic_description(topic: TopicMetadata) -> TopicDescription:
    partitions = sorted(topic.partitions, key=lambda partition: partition.partition)
    return TopicDescription(
        topic.name,
        topic.topic_id,
        topic.is_internal,
        tuple(
            PartitionDescription(
                partition.partition,
                partition.leader_id,
                partition.leader_epoch,
                tuple(partition.replicas),
                tuple(partition.isr),
                partition.partition_epoch,
                tuple(partition.elr),
            )
            for partition in partitions
        ),
    )


def group_description(group: DescribedGroup) -> GroupDescription:
    return GroupDescription(
        group.group_id,
        group.state,
        group.group_epoch,
        group.assignment_epoch,
        group.assignor,
        tuple(_member(member) for member in group.members),
        tuple(Generation(*event) for event in group.journal),
    )


def _member(member: DescribedMember) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.instance_id,
        member.member_epoch,
        member.client_id,
        member.host,
        tuple(member.subscribed_topics),
        member.subscribed_pattern,
        _assigned(member.assignment),
        _assigned(member.target),
        _assigned(member.awaited_revocation),
        member.last_heartbeat_ms_ago,
        member.state,
    )


def _assigned(topics: Iterable[AssignedTopic]) -> tuple[TopicPartition, ...]:
    return tuple(sorted(TopicPartition(one.topic, number) for one in topics for number in one.partitions))


def transaction_description(one: DescribedTransaction) -> TransactionDescription:
    return TransactionDescription(
        one.transactional_id,
        one.producer_id,
        one.producer_epoch,
        one.state,
        one.timeout_ms,
        one.start_ms,
        _partitions(one.partitions),
        one.coordinator_epoch,
    )


def transaction_group_description(response: DescribeTxnGroupResponse) -> TransactionGroupDescription:
    return TransactionGroupDescription(
        response.application_id,
        response.last_batch_id,
        tuple(response.last_winners),
        tuple(
            TransactionGroupWriter(
                one.member,
                one.batch_id,
                one.producer_id,
                one.producer_epoch,
                one.state,
                one.start_ms,
                _partitions(one.partitions),
            )
            for one in response.members
        ),
    )


def producer_description(producer: ActiveProducer) -> ProducerDescription:
    start_offset = producer.transaction_start_offset
    description = ProducerDescription(*producer)
    return replace(description, transaction_start_offset=None) if start_offset == NO_OFFSET else description


def _partitions(partitions: Iterable[TxnPartition]) -> tuple[TopicPartition, ...]:
    return tuple(sorted(TopicPartition(one.topic, one.partition) for one in partitions))
