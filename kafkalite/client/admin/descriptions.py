"""Argument and result types of Admin, and the conversion of responses to result types. Pure."""

# Tests: tests/client/test_admin.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_type_hints

from kafkalite.model import NO_OFFSET, OffsetAndMetadata, TopicPartition
from kafkalite.protocol.messages.groups import AssignedTopic
from kafkalite.protocol.messages.metadata import FeatureDescription as FeatureMessage
from kafkalite.protocol.messages.metadata import TopicMetadata
from kafkalite.protocol.messages.transactions import ActiveProducer, TxnPartition

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

_SOURCE: Final = "source"  # the key of a field's metadata for its name in the message, if it is another
BROKER_DEFAULT = -1  #: selects the broker's own setting for the number of partitions or replicas


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. BROKER_DEFAULT selects the broker's num.partitions or default.replication.factor."""

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
    leader_id: int  #: -1 while there is no leader
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
    is_fenced: bool  #: not live according to the controller, so that it leads no partition
    is_shutting_down: bool  #: about to stop; if ``is_fenced``, it has stopped in order
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
    address: str  #: of its controller listener; "" if it is not known
    is_voter: bool
    match_offset: int  #: the offset up to which its log matches the leader's; -1 if unknown
    last_contact_ms: int  #: time since its last message; -1 if there was none
    directory_id: str  #: of its metadata directory; "" if it is not known


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The state of the controller quorum that ``node_id`` reports. Only the leader reports match offsets."""

    node_id: int
    leader_id: int  #: -1 while there is no leader
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    members: tuple[QuorumMember, ...] = field(metadata={_SOURCE: "nodes"})


@dataclass(frozen=True, slots=True)
class ReassignmentDescription:
    """A reassignment in progress: node ids. It ends when the adding replicas are in ``isr``."""

    replicas: tuple[int, ...]  #: the present replicas, those that are removed at the end included
    adding_replicas: tuple[int, ...]
    removing_replicas: tuple[int, ...]
    isr: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeatureDescription:
    """A feature: the finalised level, and the levels that nodes support (KIP-584)."""

    feature: str  #: such as metadata.version
    finalized_level: int  #: the level that the cluster uses; it is never lowered
    #: Of each broker and voter: the lowest and highest level that its program supports, or None if the node
    #: does not run, or runs a version that does not say it.
    nodes: dict[int, tuple[int, int] | None]

    @property
    def common_level(self) -> int:
        """The highest level that may be finalised now, because all nodes support it."""
        if None in self.nodes.values():
            return self.finalized_level
        highest = [levels[1] for levels in self.nodes.values() if levels is not None]
        return max(self.finalized_level, min(highest, default=self.finalized_level))


def feature_description(message: FeatureMessage) -> FeatureDescription:
    """Convert a feature in a DescribeFeatures response."""
    return FeatureDescription(
        message.feature,
        message.finalized_level,
        {
            node.node_id: (node.min_level, node.max_level) if node.max_level else None
            for node in message.nodes
        },
    )


@dataclass(frozen=True, slots=True)
class MetadataDescription:
    """A part of the metadata tree at ``metadata_offset``. ``nodes`` maps each path to its value, if any."""

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
class DirectoryDescription:
    """One data directory of a broker. The bytes are those of its disk, or -1 if they are unknown."""

    path: str
    directory_id: str  #: empty if the directory could not be opened
    failure: str | None  #: why the directory is not used; None if it works
    total_bytes: int
    free_bytes: int
    size_bytes: dict[TopicPartition, int]  #: the bytes of each log in the directory
    #: The copies of logs that move into the directory: how many offsets each is behind its log.
    copies: dict[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class GroupListing:
    group_id: str
    state: str  #: Empty, Assigning, Reconciling, Stable, Dead
    group_epoch: int  #: the generation
    member_count: int
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """One member of a group. Its partitions are sorted."""

    member_id: str
    instance_id: str | None  #: group.instance.id of a static member
    member_epoch: int
    client_id: str
    host: str
    subscribed_topics: tuple[str, ...]
    subscribed_pattern: str | None
    assignment: tuple[TopicPartition, ...]  #: the partitions that it owns
    target: tuple[TopicPartition, ...]  #: the partitions that it is assigned
    awaited_revocation: tuple[TopicPartition, ...]  #: to be revoked before another member can own them
    last_heartbeat_ms_ago: int
    state: str  #: Stable, Unrevoked, Unreleased


@dataclass(frozen=True, slots=True)
class Generation:
    """An entry of a group's journal: one generation (group epoch), and the cause of its rebalance."""

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
    group_epoch: int  #: the epoch of the members and subscriptions
    assignment_epoch: int  #: the epoch from which the target assignment was computed
    assignor: str
    members: tuple[MemberDescription, ...]
    journal: tuple[Generation, ...]  #: oldest first; empty unless it was requested


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """A group's lag in one partition.

    ``committed`` is None if the group has no committed offset in the partition. ``end_offset`` is None if the
    partition was deleted.
    """

    partition: TopicPartition
    committed: OffsetAndMetadata | None
    commit_ms: int | None  #: the time of the commit (wall clock); None if ``committed`` is
    end_offset: int | None
    member: MemberDescription | None  #: the member that owns it

    @property
    def lag(self) -> int | None:
        if self.committed is None or self.end_offset is None:
            return None
        return max(0, self.end_offset - self.committed.offset)


@dataclass(frozen=True, slots=True)
class TransactionListing:
    transactional_id: str
    producer_id: int
    state: str
    duration_ms: int  #: since the open transaction began; 0 if none is open
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int  #: wall clock; NO_TIMESTAMP if no transaction is open
    partitions: tuple[TopicPartition, ...]
    coordinator_epoch: int


@dataclass(frozen=True, slots=True)
class ProducerDescription:
    """A producer whose state the partition's leader keeps."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int | None  #: the first offset of its open transaction; None if none is open


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in a partition but unknown to every coordinator, so that it never ends."""

    partition: TopicPartition
    producer: ProducerDescription


@dataclass(frozen=True, slots=True)
class TransactionGroupWriter:
    writer: str = field(metadata={_SOURCE: "member"})
    batch_id: int
    producer_id: int
    producer_epoch: int
    state: str
    start_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class TransactionGroupDescription:
    application_id: str
    last_batch_id: int  #: the last decided batch; -1 if none is decided
    last_winners: tuple[str, ...]
    #: Writers whose transactions have not ended in every partition.
    writers: tuple[TransactionGroupWriter, ...] = field(metadata={_SOURCE: "members"})


def described(kind: type[D], message: Any, **converted: Any) -> D:
    """Return an instance of the description class ``kind`` with the values of the fields of ``message``.

    Lists become tuples. If the type of the field in ``kind`` is a tuple of a description class, the items of
    the list are converted to that class. If it is a tuple of TopicPartition, the tuple is sorted.
    ``converted`` gives the values of fields that are not copied from ``message``.
    """
    for name, (source, item) in _fields(kind).items():
        if name not in converted:
            value = getattr(message, source)
            converted[name] = _items(value, item) if isinstance(value, list) else value
    return kind(**converted)


@cache
def _fields(kind: type[DataclassInstance]) -> dict[str, tuple[str, Any]]:
    """Return {field of ``kind``: (field name in the message, type of the items if the field is a tuple)}."""
    hints = get_type_hints(kind)
    return {
        field.name: (field.metadata.get(_SOURCE, field.name), next(iter(get_args(hints[field.name])), None))
        for field in fields(kind)
    }


def _items(values: list[Any], kind: Any) -> tuple[Any, ...]:
    if kind is TopicPartition:
        return tuple(sorted(tp for one in values for tp in _partitions(one)))
    if isinstance(kind, type) and is_dataclass(kind):
        return tuple(described(kind, one) for one in values)
    return tuple(values)


def _partitions(item: AssignedTopic | TxnPartition) -> list[TopicPartition]:
    numbers = item.partitions if isinstance(item, AssignedTopic) else (item.partition,)
    return [TopicPartition(item.topic, number) for number in numbers]


def topic_description(topic: TopicMetadata) -> TopicDescription:
    description = described(TopicDescription, topic)
    return replace(description, partitions=tuple(sorted(description.partitions, key=attrgetter("partition"))))


def producer_description(producer: ActiveProducer) -> ProducerDescription:
    start_offset = producer.transaction_start_offset
    start = None if start_offset == NO_OFFSET else start_offset
    return described(ProducerDescription, producer, transaction_start_offset=start)
