"""What the metadata log holds: every change of the cluster's state is one of these records.

A record states the new value of one thing, so replaying a record twice changes nothing. Their bytes are
``record_codec``'s matter, what they add up to is ``delta``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOPIC: Final = "topic"
BROKER: Final = "broker"


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic exists. Its partitions follow, from 0 up, in the same entry."""

    topic_id: str  #: 32 hex digits; never used again after the topic is removed
    name: str


@dataclass(frozen=True, slots=True)
class RemoveTopicRecord:
    """The topic is gone, and with it its partitions and configs."""

    topic_id: str


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """The whole state of one partition. Invariants: isr ⊆ replicas, leader ∈ isr or -1."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...]  #: node ids; the first is the preferred leader
    isr: tuple[int, ...]
    leader: int  #: node id, or -1 when there is none
    leader_epoch: int  #: grows with every election
    partition_epoch: int  #: grows with every change of this record


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


MetadataRecord = TopicRecord | RemoveTopicRecord | PartitionRecord | ConfigRecord | BrokerRegistrationRecord
