"""The cluster's state at one offset of the metadata log, as a value.

An image never changes: ``delta.Delta`` makes the next one, which shares all unchanged parts. Two nodes
that have replayed the same records have equal images.
"""

# Tests: tests/metadata/test_delta.py

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kafkalite.metadata.records import (
    TOPIC,
    BrokerRegistrationRecord,
    ConfigRecord,
    HighWatermarksRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    TopicRecord,
)

Resource = tuple[str, str]
"""(resource type, name) of the owner of a config."""

_NO_CONFIGS: Final[Mapping[str, str]] = {}


class PartitionState(NamedTuple):
    """One partition.

    Invariants: isr, elr and last_known_elr are disjoint subsets of replicas, in their order; leader ∈ isr or
    -1; both epochs only grow. Every member of isr and elr holds all committed records (R16, I2); with
    min.insync.replicas in sync the elr is empty (I10). A member of last_known_elr has lost
    its eligibility.
    """

    replicas: tuple[int, ...]  #: the first is the preferred leader
    isr: tuple[int, ...]
    leader: int  #: -1 when there is none
    leader_epoch: int
    partition_epoch: int
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()


class TopicImage(NamedTuple):
    """One topic. Invariant: at least one partition; ``partitions[n]`` is partition n."""

    topic_id: str
    name: str
    partitions: tuple[PartitionState, ...]


BrokerState = BrokerRegistrationRecord
"""A registered broker, with later changes. Invariant: a fenced one is in no ISR (I10)."""


class BrokerLoad(NamedTuple):
    """The replicas placed on a broker. Which broker leads at present does not matter."""

    preferred_leaders: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ClusterImage:
    """All cluster state. The mappings are shared between images: never change one.

    Invariant: ``topics`` and ``topics_by_id`` hold the same objects; every topic named in ``configs``
    exists.
    """

    metadata_offset: int = 0  #: offset of the last included entry; 0 before the first
    topics: Mapping[str, TopicImage] = field(default_factory=dict)  #: by name
    topics_by_id: Mapping[str, TopicImage] = field(default_factory=dict)
    configs: Mapping[Resource, Mapping[str, str]] = field(default_factory=dict)
    brokers: Mapping[int, BrokerState] = field(default_factory=dict)  #: by node id
    #: (topic id, partition) → checkpointed exclusive end of the committed records; no entry for 0
    high_watermarks: Mapping[tuple[str, int], int] = field(default_factory=dict)
    next_producer_id: int = 0  #: all lower ids are allocated
    loads: Mapping[int, BrokerLoad] = field(default_factory=dict)  #: derived from the topics

    def topic_configs(self, name: str) -> Mapping[str, str]:
        """Return the topic's overrides, name → text; an empty mapping if it has none."""
        return self.configs.get((TOPIC, name), _NO_CONFIGS)

    def configs_of(self, resource_type: str, name: str) -> Mapping[str, str]:
        """Return the overrides of a resource, name → text; an empty mapping if it has none."""
        return self.configs.get((resource_type, name), _NO_CONFIGS)

    def partition(self, topic: str, partition: int) -> PartitionState | None:
        """Return the state of one partition, or None if the topic or partition does not exist."""
        found = self.topics.get(topic)
        if found is None or not 0 <= partition < len(found.partitions):
            return None
        return found.partitions[partition]

    def partition_of(self, topic_id: str, partition: int) -> PartitionState | None:
        """Return the same as ``partition``, by topic id."""
        found = self.topics_by_id.get(topic_id)
        return None if found is None else self.partition(found.name, partition)

    def live_brokers(self) -> frozenset[int]:
        """Return the brokers that may get a role: not fenced, not shutting down."""
        return frozenset(broker.node_id for broker in self.brokers.values() if broker.is_live)

    def to_records(self) -> Iterator[MetadataRecord]:
        """Yield the records that make this image from EMPTY. The order depends on the image only."""
        for node_id in sorted(self.brokers):
            yield self.brokers[node_id]
        for name in sorted(self.topics):
            topic = self.topics[name]
            yield TopicRecord(topic.topic_id, name)
            for partition, state in enumerate(topic.partitions):
                yield PartitionRecord(topic.topic_id, partition, *state)
        for resource_type, name in sorted(self.configs):
            for key, value in sorted(self.configs[resource_type, name].items()):
                yield ConfigRecord(resource_type, name, key, value)
        if self.high_watermarks:
            yield HighWatermarksRecord(
                tuple(
                    (topic_id, number, end)
                    for (topic_id, number), end in sorted(self.high_watermarks.items())
                )
            )
        if self.next_producer_id:
            yield ProducerIdsRecord(self.next_producer_id)


EMPTY: Final = ClusterImage()
