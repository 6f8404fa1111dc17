"""The state of the cluster at one offset of the metadata log, as an immutable value.

``delta.Delta`` builds the next image, which shares all unchanged parts with the previous one. Nodes that have
replayed the same records have equal images.
"""

# Tests: tests/metadata/test_delta.py

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kafkalite.metadata.features import METADATA_VERSION, level_of
from kafkalite.metadata.records import (
    TOPIC,
    AclRecord,
    BrokerRegistrationRecord,
    ClientQuotaRecord,
    ConfigRecord,
    FeatureLevelRecord,
    HighWatermarksRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    ScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from kafkalite.model import QuotaEntity
from kafkalite.security.acls import AclBinding
from kafkalite.security.scram import Credential

Resource = tuple[str, str]
"""(resource type, name) of the topic or broker that has a config."""

_NO_CONFIGS: Final[Mapping[str, str]] = {}


class PartitionState(NamedTuple):
    """The state of one partition.

    Invariants: isr, elr and last_known_elr are disjoint subsets of replicas, in the same order; unverified is
    a subset of elr. The leader is in isr, or -1. leader_epoch and partition_epoch never decrease. Every
    member of isr, and every member of elr that is not in unverified, has all committed records (R16, I2). The
    disk of a member of unverified may have lost some unnoticed. While elr has a member, the leader commits
    nothing (R9, R57). Members of last_known_elr have lost their eligibility. idle_epoch is at most the leader
    epoch; while they are equal, the leader has committed nothing since a comparison of logs made it the
    leader (R50).
    """

    replicas: tuple[int, ...]  #: the first is the preferred leader
    isr: tuple[int, ...]
    leader: int  #: node id, or -1 without a leader
    leader_epoch: int
    partition_epoch: int
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()
    unverified: tuple[int, ...] = ()  #: restarted uncleanly; lead only after a comparison of logs (R46)
    loss_epoch: int = -1  #: leader epoch of the latest unclean election; -1: there was none (R49)
    idle_epoch: int = -1  #: epoch of a leader elected by comparison, while it commits nothing; else -1 (R50)
    target_replicas: tuple[int, ...] = ()  #: the replicas after the present reassignment; () without one
    #: (node id, partition epoch of the addition) of each replica that the reassignment has added
    added_replicas: tuple[tuple[int, int], ...] = ()

    @property
    def is_reassigning(self) -> bool:
        return bool(self.target_replicas)

    @property
    def final_replicas(self) -> tuple[int, ...]:
        """Return the replicas after the present reassignment, or the present ones without a reassignment."""
        return self.target_replicas or self.replicas

    @property
    def original_replicas(self) -> tuple[int, ...]:
        """Return the replicas before the reassignment, to which its cancellation returns."""
        added = {node_id for node_id, _ in self.added_replicas}
        return tuple([node_id for node_id in self.replicas if node_id not in added])

    @property
    def adding_replicas(self) -> tuple[int, ...]:
        """Return the replicas that the reassignment adds to the original ones, in the order of its target."""
        original = self.original_replicas
        return tuple([node_id for node_id in self.target_replicas if node_id not in original])

    @property
    def removing_replicas(self) -> tuple[int, ...]:
        """Return the replicas that leave when the reassignment completes."""
        final = self.final_replicas
        return tuple([node_id for node_id in self.replicas if node_id not in final])

    def replica_epoch(self, node_id: int) -> int:
        """Return the partition epoch in which the present reassignment added the replica; 0 if it is an
        original one (R62)."""
        return next((epoch for added, epoch in self.added_replicas if added == node_id), 0)

    def is_only_copy(self, node_id: int) -> bool:
        """Whether no other replica can have records that ``node_id`` lacks: it is the only replica, or all
        others were added by the present reassignment and have no role yet."""
        if self.replicas == (node_id,):
            return True
        members = self.isr + self.elr + self.last_known_elr
        return self.original_replicas == (node_id,) and set(members) <= {node_id}


class TopicImage(NamedTuple):
    """One topic, with at least one partition. ``partitions[n]`` is partition n."""

    topic_id: str
    name: str
    partitions: tuple[PartitionState, ...]


BrokerState = BrokerRegistrationRecord
"""A registered broker including later changes. Invariant: a fenced broker is in no ISR (I10)."""


class BrokerLoad(NamedTuple):
    """How many partitions have a broker as preferred leader, and how many as a replica."""

    preferred_leaders: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ClusterImage:
    """The complete cluster state. Images share their mappings, so never modify a mapping.

    Invariants: ``topics`` and ``topics_by_id`` hold the same objects. Every topic named in ``configs``
    exists.
    """

    metadata_offset: int = 0  #: offset of the last included entry; 0 before the first
    topics: Mapping[str, TopicImage] = field(default_factory=dict)  #: by name
    topics_by_id: Mapping[str, TopicImage] = field(default_factory=dict)
    configs: Mapping[Resource, Mapping[str, str]] = field(default_factory=dict)
    brokers: Mapping[int, BrokerState] = field(default_factory=dict)  #: by node id
    #: (topic id, partition) → checkpointed high watermark (exclusive), if it is above 0
    high_watermarks: Mapping[tuple[str, int], int] = field(default_factory=dict)
    next_producer_id: int = 0  #: all lower ids are allocated
    loads: Mapping[int, BrokerLoad] = field(default_factory=dict)  #: derived from the topics
    acls: frozenset[AclBinding] = frozenset()
    #: (user, mechanism) → credential. The user "" is the decoy, which unknown users seem to have.
    credentials: Mapping[tuple[str, int], Credential] = field(default_factory=dict)
    client_quotas: Mapping[QuotaEntity, Mapping[str, float]] = field(default_factory=dict)  #: by key
    retired_brokers: frozenset[int] = frozenset()  #: node ids that may not register again
    levels: Mapping[str, int] = field(default_factory=dict)  #: feature → finalised level (R91)

    @property
    def metadata_version(self) -> int:
        """The finalised level of metadata.version."""
        return level_of(self.levels, METADATA_VERSION)

    def topic_configs(self, name: str) -> Mapping[str, str]:
        """Return the topic's overrides as {name: text}, empty if it has none."""
        return self.configs.get((TOPIC, name), _NO_CONFIGS)

    def configs_of(self, resource_type: str, name: str) -> Mapping[str, str]:
        """Return the overrides of a resource as {name: text}, empty if it has none."""
        return self.configs.get((resource_type, name), _NO_CONFIGS)

    def partition(self, topic: str, partition: int) -> PartitionState | None:
        """Return the state of one partition, or None if the topic or partition does not exist."""
        found = self.topics.get(topic)
        if found is None or not 0 <= partition < len(found.partitions):
            return None
        return found.partitions[partition]

    def partition_of(self, topic_id: str, partition: int) -> PartitionState | None:
        """Return the state of one partition of the topic with this id, or None if it does not exist."""
        found = self.topics_by_id.get(topic_id)
        return None if found is None else self.partition(found.name, partition)

    def live_brokers(self) -> frozenset[int]:
        """Return the ids of the brokers that may lead and join ISRs: neither fenced nor shutting down."""
        return frozenset(broker.node_id for broker in self.brokers.values() if broker.is_live)

    def to_records(self) -> Iterator[MetadataRecord]:
        """Yield the records that build this image from EMPTY. Their order depends only on the image."""
        for feature in sorted(self.levels):
            yield FeatureLevelRecord(feature, self.levels[feature])
        for node_id in sorted(self.retired_brokers):
            yield UnregisterBrokerRecord(node_id)
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
        for binding in sorted(self.acls):
            yield AclRecord(*binding, True)
        for user, mechanism in sorted(self.credentials):
            yield ScramCredentialRecord(user, *self.credentials[user, mechanism])
        for entity in sorted(self.client_quotas, key=_quota_order):
            for key, bound in sorted(self.client_quotas[entity].items()):
                yield ClientQuotaRecord(*entity, key, bound)


def _quota_order(entity: QuotaEntity) -> tuple[tuple[bool, str], ...]:
    return tuple((name is not None, name or "") for name in entity)


EMPTY: Final = ClusterImage()
