"""What the metadata log holds: every change of the cluster's state is one of these records.

A record states the new value of one thing, so replaying a record twice changes nothing. Their bytes are
``record_codec``'s matter, what they add up to is ``delta``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOPIC: Final = "topic"
BROKER: Final = "broker"
NO_LEADER: Final = -1


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic exists. Its partitions follow, from 0 up, in the same entry."""

    topic_id: str  #: 32 hex digits; never used again after the topic is removed
    name: str


@dataclass(frozen=True, slots=True)
class RemoveTopicRecord:
    """The topic is gone, and with it its partitions, configs and high watermarks."""

    topic_id: str


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """The whole state of one partition. Invariants: as ``image.PartitionState`` has them."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...]  #: node ids; the first is the preferred leader
    isr: tuple[int, ...]  #: in sync
    leader: int  #: node id, or NO_LEADER
    leader_epoch: int  #: grows with every election, and with every loss of the leader
    partition_epoch: int  #: grows with every change of this record
    elr: tuple[int, ...] = ()  #: eligible leader replicas (KIP-966)
    last_known_elr: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigRecord:
    """One override of a topic or a broker. A None value takes the override away."""

    resource_type: str  #: TOPIC or BROKER
    name: str  #: the topic's name, or the broker's node id in decimal
    key: str
    value: str | None


@dataclass(frozen=True, slots=True)
class BrokerRegistrationRecord:
    """A broker's process has come up; earlier processes of the same node are fenced by the epoch (R20)."""

    node_id: int
    broker_epoch: int  #: grows with every registration of this node
    addresses: tuple[str, ...]  #: "host:port", "[v6]:port" or "inproc://name"; the first is the main one
    rack: str | None
    registered_ms: int  #: wall clock, for people; nothing is decided by it
    incarnation_id: str = ""  #: of the process; "" when it told none
    directory_id: str = ""  #: of the data directory; "" when it told none
    registration_offset: int = 0  #: every state at this offset or beyond holds this record (R22)
    is_fenced: bool = False
    is_shutting_down: bool = False


@dataclass(frozen=True, slots=True)
class BrokerChangeRecord:
    """A registered broker has come alive, died, or begun to shut down. Its registration stays as it is."""

    node_id: int
    broker_epoch: int  #: of the registration that this is about
    is_fenced: bool
    is_shutting_down: bool


@dataclass(frozen=True, slots=True)
class HighWatermarksRecord:
    """What leaders knew to be committed, one record for all partitions of a checkpoint. 0 takes one away."""

    high_watermarks: tuple[tuple[str, int, int], ...]  #: (topic id, partition, exclusive end)


@dataclass(frozen=True, slots=True)
class ProducerIdsRecord:
    """All producer ids below ``next_producer_id`` are given out."""

    next_producer_id: int


MetadataRecord = (
    TopicRecord
    | RemoveTopicRecord
    | PartitionRecord
    | ConfigRecord
    | BrokerRegistrationRecord
    | BrokerChangeRecord
    | HighWatermarksRecord
    | ProducerIdsRecord
)
