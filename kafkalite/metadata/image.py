"""The cluster's state at one offset of the metadata log, as a value.

An image never changes: ``delta.Delta`` makes the next one and shares with the old one all that stayed the
same. Two nodes that have replayed the same records have equal images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kafkalite.metadata.records import (
    TOPIC,
    BrokerRegistrationRecord,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    TopicRecord,
)

Resource = tuple[str, str]
"""(resource type, name): whom a config belongs to."""

_NO_CONFIGS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition. Invariants: isr ⊆ replicas, leader ∈ isr or -1, both epochs only grow."""

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int


@dataclass(frozen=True, slots=True)
class TopicImage:
    """One topic. Invariant: at least one partition; partition n stands at ``partitions[n]``."""

    topic_id: str
    name: str
    partitions: tuple[PartitionState, ...]


@dataclass(frozen=True, slots=True)
class BrokerState:
    """A registered broker, as its latest registration told."""

    node_id: int
    broker_epoch: int
    addresses: tuple[str, ...]
    rack: str | None
    registered_ms: int


@dataclass(frozen=True, slots=True)
class ClusterImage:
    """All cluster state. The mappings are shared between images: never change one.

    Invariant: ``topics`` and ``topics_by_id`` hold the same objects; every topic named in ``configs``
    exists.
    """

    metadata_offset: int = 0  #: of the last entry that is in here; 0 before the first
    topics: Mapping[str, TopicImage] = field(default_factory=dict)  #: by name
    topics_by_id: Mapping[str, TopicImage] = field(default_factory=dict)
    configs: Mapping[Resource, Mapping[str, str]] = field(default_factory=dict)
    brokers: Mapping[int, BrokerState] = field(default_factory=dict)  #: by node id

    def topic_configs(self, name: str) -> Mapping[str, str]:
        """The topic's overrides, name → text; empty when it has none."""
        return self.configs.get((TOPIC, name), _NO_CONFIGS)

    def configs_of(self, resource_type: str, name: str) -> Mapping[str, str]:
        """The overrides of any resource, name → text; empty when it has none."""
        return self.configs.get((resource_type, name), _NO_CONFIGS)

    def partition(self, topic: str, partition: int) -> PartitionState | None:
        """The state of one partition, or None when there is no such topic or partition."""
        found = self.topics.get(topic)
        if found is None or not 0 <= partition < len(found.partitions):
            return None
        return found.partitions[partition]

    def to_records(self) -> Iterator[MetadataRecord]:
        """Records that make this image out of EMPTY; in one order for one image."""
        for node_id in sorted(self.brokers):
            broker = self.brokers[node_id]
            yield BrokerRegistrationRecord(
                node_id, broker.broker_epoch, broker.addresses, broker.rack, broker.registered_ms
            )
        for name in sorted(self.topics):
            topic = self.topics[name]
            yield TopicRecord(topic.topic_id, name)
            for partition, state in enumerate(topic.partitions):
                yield partition_record(topic.topic_id, partition, state)
        for resource_type, name in sorted(self.configs):
            for key, value in sorted(self.configs[resource_type, name].items()):
                yield ConfigRecord(resource_type, name, key, value)


EMPTY: Final = ClusterImage()


def partition_record(topic_id: str, partition: int, state: PartitionState) -> PartitionRecord:
    """The record that says ``state``."""
    return PartitionRecord(
        topic_id,
        partition,
        state.replicas,
        state.isr,
        state.leader,
        state.leader_epoch,
        state.partition_epoch,
    )
