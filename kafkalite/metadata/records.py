"""The records of the metadata log. Every change of the cluster's state is one of these records.

A record contains new values, not differences from earlier values. ``record_codec`` defines the encoding of
records, ``delta`` their effect.
"""

# Tests: tests/metadata/test_record_codec.py

from __future__ import annotations

from typing import Final, NamedTuple

from kafkalite.security.acls import AclBinding
from kafkalite.security.scram import Credential

TOPIC: Final = "topic"
BROKER: Final = "broker"
NO_LEADER: Final = -1


class TopicRecord(NamedTuple):
    """A topic was created. The records of its partitions follow in the same entry, from partition 0."""

    topic_id: str  #: 32 hex digits; not reused after the topic is removed
    name: str


class RemoveTopicRecord(NamedTuple):
    """A topic was removed together with its partitions, configs and high watermarks."""

    topic_id: str


class PartitionRecord(NamedTuple):
    """The complete state of one partition, with the invariants of ``image.PartitionState``."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...]  #: node ids; the first is the preferred leader
    isr: tuple[int, ...]  #: in-sync replicas
    leader: int  #: node id, or NO_LEADER
    leader_epoch: int  #: incremented by every change of the leader, also to NO_LEADER
    partition_epoch: int  #: incremented by every change of this record
    elr: tuple[int, ...] = ()  #: eligible leader replicas (KIP-966)
    last_known_elr: tuple[int, ...] = ()
    unverified: tuple[int, ...] = ()  #: restarted uncleanly; lead only after a comparison of logs (R46)
    loss_epoch: int = -1  #: leader epoch of the latest unclean election; -1: there was none (R49)
    idle_epoch: int = -1  #: epoch of a leader elected by comparison, while it commits nothing; else -1 (R50)
    target_replicas: tuple[int, ...] = ()  #: the replicas after the present reassignment; () without one
    added_replicas: tuple[tuple[int, int], ...] = ()  #: (node id, partition epoch) of replicas that it added


class ConfigRecord(NamedTuple):
    """One override of a topic or broker. The value None removes the override."""

    resource_type: str  #: TOPIC or BROKER
    name: str  #: the topic name, or the broker's node id in decimal
    key: str
    value: str | None


class BrokerRegistrationRecord(NamedTuple):
    """A broker process has registered. Its broker epoch fences earlier processes of this node id (R20).

    Invariant: a fenced broker is in no ISR (I10).
    """

    node_id: int
    broker_epoch: int  #: increases with every registration of the node
    addresses: tuple[str, ...]  #: "host:port", "[v6]:port" or "inproc://name"; clients use the first
    rack: str | None
    registered_ms: int  #: wall clock, informational only
    incarnation_id: str = ""  #: identifies the process; "" if unknown
    directory_id: str = ""  #: identifies the data directory; "" if unknown
    registration_offset: int = 0  #: images at this offset or later contain this record (R22)
    is_fenced: bool = False  #: leads no partition and is in no ISR, because it may not be alive
    is_shutting_down: bool = False  #: about to stop, so that it gets no new role; if fenced, it has stopped
    start_count: int = 0  #: starts of a process in the data directory, this one included; 0: unknown (R51)
    is_restored: bool = False  #: the data directory is an older copy; all its replicas are damaged (R51)

    @property
    def is_live(self) -> bool:
        """Whether the broker may lead and join ISRs: it is neither fenced nor shutting down."""
        return not (self.is_fenced or self.is_shutting_down)


class BrokerChangeRecord(NamedTuple):
    """A broker was fenced or unfenced, or has begun to shut down. Replaces two fields
    of its BrokerRegistrationRecord."""

    node_id: int
    broker_epoch: int  #: of the registration that this record changes
    is_fenced: bool
    is_shutting_down: bool


class UnregisterBrokerRecord(NamedTuple):
    """A broker was removed from the cluster. Its node id is retired: no process may register with it."""

    node_id: int


class HighWatermarksRecord(NamedTuple):
    """High watermarks that leaders have checkpointed. A value of 0 removes the entry of a partition."""

    high_watermarks: tuple[tuple[str, int, int], ...]  #: (topic id, partition, exclusive end)


class ProducerIdsRecord(NamedTuple):
    """All producer ids below ``next_producer_id`` are allocated."""

    next_producer_id: int


class AclRecord(NamedTuple):
    """An access control rule was added or removed. The fields before the last are those of ``AclBinding``."""

    resource_type: int
    pattern_type: int
    name: str
    principal: str
    host: str
    operation: int
    permission: int
    is_present: bool  #: False: the rule was removed

    @property
    def binding(self) -> AclBinding:
        return AclBinding(*self[:-1])


class ScramCredentialRecord(NamedTuple):
    """A user's credential for one SCRAM mechanism was set or removed. ``repr`` shows no secret (S19)."""

    user: str  #: as SASLprep normalises it; "": the decoy for unknown users
    mechanism: int  #: a ``scram.Mechanism``
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int  #: 0: the credential was removed

    def __repr__(self) -> str:
        return f"ScramCredentialRecord({self.user!r}, {self.mechanism}, iterations={self.iterations})"

    @property
    def credential(self) -> Credential | None:
        """The credential, or None if it was removed."""
        return Credential(*self[1:]) if self.iterations else None


class ClientQuotaRecord(NamedTuple):
    """One quota of an entity (``model.QuotaEntity``, KIP-546). The value None removes the quota."""

    user: str | None  #: "" is the default of all users; None: the entity has no user
    client_id: str | None  #: likewise
    ip: str | None  #: likewise
    key: str  #: of ``client_quotas.CLIENT_KEYS`` or ``IP_KEYS``
    value: float | None


class FeatureLevelRecord(NamedTuple):
    """A level of a feature was finalised (KIP-584). Every later record is one that this level allows."""

    feature: str  #: such as ``features.METADATA_VERSION``
    level: int  #: never lower than before


MetadataRecord = (
    TopicRecord
    | RemoveTopicRecord
    | PartitionRecord
    | ConfigRecord
    | BrokerRegistrationRecord
    | BrokerChangeRecord
    | UnregisterBrokerRecord
    | HighWatermarksRecord
    | ProducerIdsRecord
    | AclRecord
    | ScramCredentialRecord
    | ClientQuotaRecord
    | FeatureLevelRecord
)
