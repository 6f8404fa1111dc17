"""Admin: topics, their settings, the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kafkalite.client.admin.connection import error_of, raise_first, told
from kafkalite.client.admin.groups import GroupAdmin
from kafkalite.client.admin.transactions import TransactionAdmin
from kafkalite.client.cluster.list_offsets import check_partitions, list_offsets, offsets_for_times
from kafkalite.errors import (
    BrokerError,
    ConnectionFailedError,
    ElectionNotNeededError,
)
from kafkalite.model import EARLIEST, LATEST, MAX_TIMESTAMP, NO_OFFSET, OffsetAndTimestamp, TopicPartition
from kafkalite.protocol.messages import admin as messages
from kafkalite.protocol.messages.data import DeleteRecordsPartition, DeleteRecordsRequest
from kafkalite.protocol.messages.metadata import (
    BrokerDescription,
    DescribeClusterRequest,
    DescribeMetadataRequest,
    DescribeQuorumRequest,
    MetadataRequest,
    TopicMetadata,
)

BROKER_DEFAULT = -1  #: as a number of partitions or replicas: the broker's own setting


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to be created. BROKER_DEFAULT takes num.partitions, or default.replication.factor."""

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
    elr: tuple[int, ...]  #: outside the ISR and still holding everything committed (KIP-966)


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
    is_fenced: bool  #: not alive as far as the controller knows: it leads nothing
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
    match_offset: int  #: its log agrees with the leader's up to here; -1 when not known
    last_contact_ms: int  #: since it was heard of; -1 never


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The controller quorum as ``node_id`` sees it; match offsets are known to the leader alone."""

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
    """Part of the metadata tree: {path: what stands there}; None of a mere directory."""

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


class Admin(GroupAdmin, TransactionAdmin):
    """Looks after a cluster.

    ::

        async with Admin("localhost:9092") as admin:
            await admin.create_topic("orders", partitions=3)

    Methods for one thing raise its BrokerError. Methods for several do all they can and then raise the
    first error, with a note on how many failed; ``return_exceptions=True`` has errors returned as results.
    """

    # --- topics --------------------------------------------------------------------------------

    async def create_topic(
        self,
        name: str,
        partitions: int = BROKER_DEFAULT,
        replication_factor: int = BROKER_DEFAULT,
        *,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> CreatedTopic:
        """Create a topic. Raises TopicAlreadyExistsError, InvalidTopicError, InvalidPartitionsError,
        InvalidReplicationFactorError, InvalidConfigError.
        """
        topic = NewTopic(name, partitions, replication_factor, configs)
        created: CreatedTopic = (await self.create_topics([topic], validate_only=validate_only))[name]
        return created

    async def create_topics(
        self,
        topics: Iterable[NewTopic] | Mapping[str, int],
        *,
        validate_only: bool = False,
        return_exceptions: bool = False,
    ) -> dict[str, Any]:
        """Create topics, given as NewTopic or as {name: number of partitions}; {name: CreatedTopic}."""
        if isinstance(topics, Mapping):
            topics = [NewTopic(name, partitions) for name, partitions in topics.items()]
        new = [
            messages.NewTopic(
                topic.name,
                topic.partitions,
                topic.replication_factor,
                {key: str(value) for key, value in (topic.configs or {}).items()},
            )
            for topic in topics
        ]
        answer = await self._call(messages.CreateTopicsRequest(self._timeout_ms, validate_only, new))
        results: dict[str, CreatedTopic | BrokerError] = {}
        for topic in answer.topics:
            results[topic.name] = error_of(topic, f"topic {topic.name!r}") or CreatedTopic(
                topic.name, topic.topic_id, topic.num_partitions, topic.replication_factor
            )
        return told(results, return_exceptions)

    async def delete_topics(
        self, names: Iterable[str], *, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        """Delete topics and all their records; {name: None}. Raises UnknownTopicOrPartitionError."""
        answer = await self._call(messages.DeleteTopicsRequest(self._timeout_ms, list(names)))
        results = {topic.name: error_of(topic, f"topic {topic.name!r}") for topic in answer.topics}
        return told(results, return_exceptions)

    async def list_topics(self, *, internal: bool = False) -> list[TopicDescription]:
        """Every topic; internal ones only when asked for."""
        answer = await self._call(MetadataRequest(None, False))
        return [_description(topic) for topic in answer.topics if internal or not topic.is_internal]

    async def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        """The topics, in the order of ``names``. Raises UnknownTopicOrPartitionError."""
        answer = await self._call(MetadataRequest(list(names), False))
        described = {}
        for topic in answer.topics:
            error = error_of(topic, f"topic {topic.name!r}")
            if error is not None:
                raise error
            described[topic.name] = _description(topic)
        return [described[name] for name in names]

    async def describe_topic(self, name: str) -> TopicDescription:
        """One topic, with the state of each partition. Raises UnknownTopicOrPartitionError."""
        (description,) = await self.describe_topics([name])
        return description

    async def create_partitions(self, name: str, total_count: int, *, validate_only: bool = False) -> None:
        """Give a topic more partitions: ``total_count`` then. Raises InvalidPartitionsError."""
        request = messages.CreatePartitionsRequest(
            self._timeout_ms, validate_only, [messages.PartitionCount(name, total_count)]
        )
        raise_first((await self._call(request)).topics, f"topic {name!r}")

    # --- settings ------------------------------------------------------------------------------

    async def describe_configs(
        self, resource_type: Literal["topic", "broker"], name: str
    ) -> dict[str, ConfigValue]:
        """Every setting of a topic, or of a broker (its node id), by name."""
        request = messages.DescribeConfigsRequest([messages.ConfigResource(resource_type, str(name))])
        resources = (await self._call(request)).resources
        raise_first(resources, f"{resource_type} {name!r}")
        return {
            entry.name: ConfigValue(
                entry.name, entry.value, entry.source, entry.read_only, entry.documentation
            )
            for entry in resources[0].entries
        }

    async def alter_configs(
        self,
        resource_type: Literal["topic", "broker"],
        name: str,
        changes: Mapping[str, str | None],
        *,
        validate_only: bool = False,
    ) -> None:
        """Set settings; None takes an override away. All or none. Raises InvalidConfigError."""
        request = messages.AlterConfigsRequest(
            validate_only,
            [
                messages.ConfigChange(resource_type, str(name), key, None if value is None else str(value))
                for key, value in changes.items()
            ],
        )
        raise_first((await self._call(request)).resources, f"{resource_type} {name!r}")

    # --- records and offsets -------------------------------------------------------------------

    async def list_offsets(
        self, tps: Iterable[TopicPartition], at: Literal["earliest", "latest", "max-timestamp"] | int
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Where each partition begins, ends (exclusive), or passes a time in ms; offset -1: all are older."""
        self._check_open()
        named = {"earliest": EARLIEST, "latest": LATEST, "max-timestamp": MAX_TIMESTAMP}
        timestamp_ms = named[at] if isinstance(at, str) else at
        wanted = dict.fromkeys(tps, timestamp_ms)
        if timestamp_ms in {EARLIEST, LATEST}:
            listed = await list_offsets(self._cluster, wanted)
            return {
                tp: OffsetAndTimestamp(entry.offset, entry.timestamp_ms, entry.leader_epoch)
                for tp, entry in listed.items()
            }
        found = await offsets_for_times(self._cluster, wanted)
        return {tp: entry or OffsetAndTimestamp(NO_OFFSET, -1, -1) for tp, entry in found.items()}

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, return_exceptions: bool = False
    ) -> dict[TopicPartition, Any]:
        """Delete records below an offset (-1: all that can be read); {partition: its new log start}."""
        self._check_open()
        await check_partitions(self._cluster, before)
        by_leader: dict[int, list[DeleteRecordsPartition]] = {}
        for tp, offset in before.items():
            node_id = self._cluster.metadata.leader(tp).node_id
            by_leader.setdefault(node_id, []).append(DeleteRecordsPartition(*tp, offset))
        results: dict[TopicPartition, int | BrokerError] = {}
        for node_id, partitions in by_leader.items():
            answer = await self._call(
                DeleteRecordsRequest(self._timeout_ms, partitions), node_id=node_id if node_id >= 0 else None
            )
            for deleted in answer.partitions:
                tp = TopicPartition(deleted.topic, deleted.partition)
                results[tp] = error_of(deleted, str(tp)) or deleted.log_start_offset
        return told(results, return_exceptions)

    # --- cluster -------------------------------------------------------------------------------

    async def describe_cluster(self) -> ClusterDescription:
        """Every broker, fenced ones too, and which node is the active controller."""
        answer = await self._call(DescribeClusterRequest())
        return ClusterDescription(
            answer.cluster_id,
            answer.controller_id,
            answer.metadata_offset,
            tuple(_node(broker) for broker in answer.brokers),
        )

    async def describe_quorum(self, node_id: int | None = None) -> QuorumDescription:
        """The controllers' quorum, as its leader sees it if that can be asked, or as ``node_id`` does."""
        answer = await self._call(DescribeQuorumRequest(), node_id=node_id)
        leader_id = answer.leader_id
        if node_id is None and leader_id != answer.node_id and leader_id in self._cluster.metadata.addresses:
            with contextlib.suppress(ConnectionFailedError):  # else what the first one said must do
                answer = await self._call(DescribeQuorumRequest(), node_id=leader_id)
        return QuorumDescription(
            answer.node_id,
            leader_id,
            answer.term,
            answer.commit_offset,
            answer.applied_offset,
            answer.log_end_offset,
            answer.snapshot_offset,
            tuple(QuorumMember(*node) for node in answer.nodes),
        )

    async def describe_metadata(
        self, path: str = "/", *, after_offset: int = -1, max_wait_ms: int = 0
    ) -> MetadataDescription:
        """What stands at ``path`` of the metadata (``/topics/orders/0``), and the names one level below.

        With ``after_offset`` it is told once the metadata log has passed that offset, or as it is after
        ``max_wait_ms``. Raises InvalidRequestError when there is no such path.
        """
        import json

        answer = await self._call(DescribeMetadataRequest(path, after_offset, max_wait_ms))
        nodes = {node.path: json.loads(node.value) if node.value else None for node in answer.nodes}
        return MetadataDescription(answer.metadata_offset, nodes)

    async def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        is_unclean: bool = False,
        return_exceptions: bool = False,
    ) -> dict[TopicPartition, Any]:
        """Let the preferred replicas lead again: of ``partitions``, or wherever another leads; {tp: leader}.

        ``is_unclean`` elects any live replica where none is eligible, though committed records may be lost.
        Raises PreferredLeaderNotAvailableError, EligibleLeadersNotAvailableError.
        """
        chosen = None if partitions is None else [messages.ElectionPartition(*tp) for tp in partitions]
        answer = await self._call(messages.ElectLeadersRequest(self._timeout_ms, is_unclean, chosen))
        results: dict[TopicPartition, int | BrokerError] = {}
        for elected in answer.partitions:
            tp = TopicPartition(elected.topic, elected.partition)
            error = error_of(elected, str(tp))
            is_led_already = isinstance(error, ElectionNotNeededError)
            results[tp] = elected.leader_id if error is None or is_led_already else error
        return told(results, return_exceptions)

    async def controlled_shutdown(self, node_id: int) -> None:
        """Have a broker hand over what it leads, and stop. Returns when it has begun to."""
        await self._call(messages.ControlledShutdownRequest(node_id))

    async def describe_log_dirs(self, topics: Sequence[str] | None = None) -> list[LogDescription]:
        """Every partition's log on every broker, or those of ``topics``."""
        request = messages.DescribeLogDirsRequest(None if topics is None else list(topics))
        nodes = sorted(self._cluster.metadata.addresses)
        answers = await asyncio.gather(*(self._call(request, node_id=node_id) for node_id in nodes))
        return [
            LogDescription(
                node_id,
                answer.path,
                log.topic,
                log.partition,
                log.size_bytes,
                log.segment_count,
                log.log_start_offset,
                log.log_end_offset,
                log.offline_reason,
            )
            for node_id, answer in zip(nodes, answers, strict=True)
            for log in answer.partitions
        ]


def _description(topic: TopicMetadata) -> TopicDescription:
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


def _node(broker: BrokerDescription) -> NodeDescription:
    return NodeDescription(
        broker.node_id,
        broker.address,
        broker.rack,
        broker.broker_epoch,
        broker.is_fenced,
        broker.is_shutting_down,
        broker.registered_ms,
    )
