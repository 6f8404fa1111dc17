"""The records of the metadata log: every change of the cluster's state is one of these.

A record contains a complete new value, so replaying it twice changes nothing. ``record_codec`` defines
the bytes of records, ``delta`` their effect.
"""

# Tests: tests/metadata/test_record_codec.py

from __future__ import annotations

from typing import Final, NamedTuple

TOPIC: Final = "topic"
BROKER: Final = "broker"
NO_LEADER: Final = -1


class TopicRecord(NamedTuple):
    """A topic was created. Its partitions follow, from 0 up, in the same entry."""

    topic_id: str  #: 32 hex digits; never used again after the topic is removed
    name: str


class RemoveTopicRecord(NamedTuple):
    """A topic was removed, with its partitions, configs and high watermarks."""

    topic_id: str


class PartitionRecord(NamedTuple):
    """The complete state of one partition, with the invariants of ``image.PartitionState``."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...]  #: node ids; the first is the preferred leader
    isr: tuple[int, ...]  #: in-sync replicas
    leader: int  #: node id, or NO_LEADER
    leader_epoch: int  #: grows with every election, and with every loss of the leader
    partition_epoch: int  #: grows with every change of this record
    elr: tuple[int, ...] = ()  #: eligible leader replicas (KIP-966)
    last_known_elr: tuple[int, ...] = ()


class ConfigRecord(NamedTuple):
    """One override of a topic or a broker. The value None removes the override."""

    resource_type: str  #: TOPIC or BROKER
    name: str  #: the topic name, or the broker's node id in decimal
    key: str
    value: str | None


class BrokerRegistrationRecord(NamedTuple):
    """A broker's process has started; its epoch fences earlier processes of the same node (R20).

    Invariant: a fenced broker is in no ISR (I10).
    """

    node_id: int
    broker_epoch: int  #: grows with every registration of the node
    addresses: tuple[str, ...]  #: "host:port", "[v6]:port" or "inproc://name"; the first is the main one
    rack: str | None
    registered_ms: int  #: wall clock, informational only
    incarnation_id: str = ""  #: of the process; "" if unknown
    directory_id: str = ""  #: of the data directory; "" if unknown
    registration_offset: int = 0  #: every image at this offset or beyond holds this record (R22)
    is_fenced: bool = False  #: may not be alive: no leadership, no ISR membership
    is_shutting_down: bool = False  #: alive, but about to stop: gets no new role

    @property
    def is_live(self) -> bool:
        """Whether the broker may get a role."""
        return not (self.is_fenced or self.is_shutting_down)


class BrokerChangeRecord(NamedTuple):
    """A registered broker was unfenced or fenced, or began to shut down. Its registration does not change."""

    node_id: int
    broker_epoch: int  #: of the registration that is changed
    is_fenced: bool
    is_shutting_down: bool


class HighWatermarksRecord(NamedTuple):
    """Checkpointed high watermarks, one record for all partitions of a checkpoint. 0 removes the entry."""

    high_watermarks: tuple[tuple[str, int, int], ...]  #: (topic id, partition, exclusive end)


class ProducerIdsRecord(NamedTuple):
    """All producer ids below ``next_producer_id`` are allocated."""

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
