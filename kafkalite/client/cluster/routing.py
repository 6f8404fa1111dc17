"""The client's metadata: brokers, topics, and the leader of each partition. Pure.

While a topic keeps its id, an older leader epoch never replaces a newer one (KIP-320): a broker that lags
behind cannot direct the client to a former leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kafkalite.errors import ErrorCode
from kafkalite.model import NO_EPOCH, TopicPartition
from kafkalite.protocol.messages.metadata import MetadataResponse, PartitionMetadata, TopicMetadata

NO_NODE: Final = -1

# A topic with one of these errors may be usable soon: it is being created, or has no leader yet.
_PASSING: Final = frozenset({ErrorCode.LEADER_NOT_AVAILABLE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of a partition. ``node_id`` is NO_NODE if there is no leader, or it is unknown."""

    node_id: int
    leader_epoch: int


_NO_LEADER: Final = Leader(NO_NODE, NO_EPOCH)


@dataclass(slots=True)
class KnownTopic:
    """A topic in the metadata. ``leaders`` has one entry per partition, by partition number."""

    name: str
    topic_id: str
    is_internal: bool
    leaders: list[Leader] = field(default_factory=list)

    @property
    def partition_count(self) -> int:
        return len(self.leaders)


@dataclass(slots=True, eq=False)
class MetadataCache:
    """The content of the latest metadata responses.

    ``generation`` grows with every change that can affect routing: brokers, partition counts, leaders.
    """

    cluster_id: str = ""
    controller_id: int = NO_NODE
    addresses: dict[int, str] = field(default_factory=dict)
    topics: dict[str, KnownTopic] = field(default_factory=dict)
    #: The error of each requested topic that cannot be used now.
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    generation: int = 0
    #: The number of responses from brokers that knew a controller. Other brokers may be partitioned and out
    #: of date.
    response_count: int = 0

    def update(self, response: MetadataResponse, *, complete: bool) -> bool:
        """Apply a successful response and return whether ``generation`` grew.

        ``complete`` means that the response lists every topic; then other topics are removed.
        """
        before = self.generation
        addresses = {broker.node_id: broker.address for broker in response.brokers}
        if addresses != self.addresses:
            self.addresses = addresses
            self.generation += 1
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        self.response_count += response.controller_id != NO_NODE
        if complete:
            self._forget_all_but({topic.name for topic in response.topics})
        for topic in response.topics:
            self._update_topic(topic)
        return self.generation != before

    def _forget_all_but(self, names: set[str]) -> None:
        for name in [name for name in self.topics if name not in names]:
            del self.topics[name]
            self.generation += 1
        for name in [name for name in self.errors if name not in names]:
            del self.errors[name]

    def _update_topic(self, topic: TopicMetadata) -> None:
        if topic.error_code != ErrorCode.NONE:
            self.errors[topic.name] = (topic.error_code, topic.error_message or "")
            if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and topic.name in self.topics:
                del self.topics[topic.name]
                self.generation += 1
            return
        self.errors.pop(topic.name, None)
        known = self.topics.get(topic.name)
        if known is None or known.topic_id != topic.topic_id:
            known = KnownTopic(topic.name, topic.topic_id, topic.is_internal)
            self.topics[topic.name] = known
            self.generation += 1
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition):
            self._update_partition(known, partition)

    def _update_partition(self, topic: KnownTopic, partition: PartitionMetadata) -> None:
        leader = Leader(partition.leader_id, partition.leader_epoch)
        if partition.partition < topic.partition_count:
            known = topic.leaders[partition.partition]
            if known == leader or leader.leader_epoch < known.leader_epoch:
                return
            topic.leaders[partition.partition] = leader
        elif partition.partition == topic.partition_count:
            topic.leaders.append(leader)
        else:  # a gap: the partitions in between have no known leader
            missing = partition.partition - topic.partition_count
            topic.leaders.extend([_NO_LEADER] * missing)
            topic.leaders.append(leader)
        self.generation += 1

    def leader(self, tp: TopicPartition) -> Leader:
        """Return the leader of ``tp``, with NO_NODE if the topic, the partition or its leader is unknown."""
        name, partition = tp
        topic = self.topics.get(name)
        if topic is None or not 0 <= partition < len(topic.leaders):
            return _NO_LEADER
        return topic.leaders[partition]

    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions of ``topic``, or None if no partition of it is known."""
        known = self.topics.get(topic)
        return known.partition_count if known is not None and known.leaders else None

    def partitions(self, topics: Iterable[str]) -> list[TopicPartition]:
        """Return every known partition of ``topics``, in the given order of topics, then by number."""
        return [
            TopicPartition(name, partition)
            for name in topics
            for partition in range(self.partition_count(name) or 0)
        ]

    def knows(self, tp: TopicPartition) -> bool:
        return 0 <= tp.partition < (self.partition_count(tp.topic) or 0)

    def fatal_error(self, topic: str) -> tuple[int, str] | None:
        """Return (code, message) if ``topic`` cannot be used and a retry cannot help; None otherwise."""
        error = self.errors.get(topic)
        return None if error is None or error[0] in _PASSING else error
