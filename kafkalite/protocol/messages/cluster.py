"""What the nodes of one cluster say to each other: identity, Raft, registration, replication, forwarding.

Only a connection that has proved to know the cluster's secret (ClusterHello, ClusterProof) may use these.
"""

from __future__ import annotations

from kafkalite.protocol.structs import Struct


class ClusterHelloRequest(Struct):
    """First of two steps of mutual authentication: a challenge. Answered with proof and a challenge back."""

    cluster_id: str
    node_id: int
    nonce: bytes  #: 32 random bytes, never used twice


class ClusterHelloResponse(Struct):
    error_code: int
    error_message: str | None
    node_id: int
    nonce: bytes
    proof: bytes  #: HMAC-SHA256 of both nonces and both ids in the server's role


class ClusterProofRequest(Struct):
    proof: bytes  #: the same in the client's role


class ClusterProofResponse(Struct):
    error_code: int
    error_message: str | None
    node_id: int  #: as whom the connection is now known


class RaftMessagesRequest(Struct):
    """Raft messages from the authenticated node, in order; the payload holds them back to back."""

    lengths_bytes: list[int]


class RaftMessagesResponse(Struct):
    """Tells that the messages arrived, nothing more: Raft's own answers travel the other connection."""

    error_code: int
    error_message: str | None
    received_count: int


class EnvelopeRequest(Struct):
    """A client's admin request, passed on to the active controller. The payload is its encoded body."""

    api_key: int
    api_version: int
    client_id: str | None


class EnvelopeResponse(Struct):
    """The payload is the encoded body of the answer; empty with an error_code."""

    error_code: int
    error_message: str | None
    metadata_offset: int  #: what the forwarding broker must have replayed before it passes the answer on


class DamagedReplica(Struct):
    topic_id: str
    partition: int


class RegisterBrokerRequest(Struct):
    """A broker's new process asks to be part of the cluster (R20)."""

    node_id: int
    incarnation_id: str  #: 32 hex digits, made up at the start of the process
    directory_id: str  #: 32 hex digits, made up when the data directory was formatted
    addresses: list[str]  #: one for each listener, in order
    rack: str | None
    clean_broker_epoch: int  #: of the session that left the clean-shutdown marker; -1 without one (R21)
    counts_synced_only: bool  #: durability=fsync everywhere: an unclean stop has lost nothing committed (R20)
    damaged: list[DamagedReplica]  #: replicas that recovery found damaged (R24)


class RegisterBrokerResponse(Struct):
    error_code: int
    error_message: str | None
    broker_epoch: int
    metadata_offset: int  #: of the registration: until it is replayed here the broker takes no role (R22)


class BrokerHeartbeatRequest(Struct):
    node_id: int
    broker_epoch: int
    metadata_offset: int  #: replayed here
    wants_shutdown: bool  #: controlled shutdown: lead elsewhere, then let me go
    damaged: list[DamagedReplica]  #: replicas that have gone offline since the registration (R26)


class BrokerHeartbeatResponse(Struct):
    error_code: int
    error_message: str | None
    is_fenced: bool
    may_shut_down: bool


class PartitionChange(Struct):
    """A leader's proposal, compared with and set upon the partition epoch (R13)."""

    topic_id: str
    partition: int
    leader_epoch: int
    partition_epoch: int
    isr: list[int]
    isr_broker_epochs: list[int]  #: of each member as seen in its fetch; -1 for the leader itself


class AlterPartitionRequest(Struct):
    node_id: int
    broker_epoch: int
    partitions: list[PartitionChange]


class ChangedPartition(Struct):
    """With error_code 0 and after a refusal alike: the state that now holds, as the controller knows it."""

    topic_id: str
    partition: int
    error_code: int
    error_message: str | None
    leader_id: int
    leader_epoch: int
    isr: list[int]
    partition_epoch: int


class AlterPartitionResponse(Struct):
    error_code: int
    error_message: str | None
    partitions: list[ChangedPartition]


class ReplicaFetchPartition(Struct):
    """R3. In a session only partitions whose fields changed since the last request are listed."""

    topic_id: str
    partition: int
    leader_epoch: int  #: the follower follows in
    fetch_offset: int  #: its log end, inclusive
    last_epoch: int  #: of the last batch in its log; -1 in an empty log
    synced_end_offset: int  #: exclusive (R7)
    log_start_offset: int


class ForgottenPartition(Struct):
    topic_id: str
    partition: int


class ReplicaFetchRequest(Struct):
    """A follower's one outstanding fetch from one leader broker, for all partitions it follows there.

    KIP-227 sessions: ``session_epoch`` 0 opens a session and lists everything; then it counts up, and only
    what changed is listed. The answer holds only partitions with news.
    """

    node_id: int
    broker_epoch: int
    session_id: int  #: 0 opens one
    session_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    max_partition_bytes: int
    partitions: list[ReplicaFetchPartition]
    forgotten: list[ForgottenPartition]


class ReplicaFetchedPartition(Struct):
    topic_id: str
    partition: int
    error_code: int
    error_message: str | None
    leader_epoch: int  #: the leader's: an answer of another epoch than the follower's is not for it
    high_watermark: int  #: exclusive
    log_start_offset: int
    diverging_epoch: int  #: -1 unless the logs diverge (R4); then no bytes come
    diverging_end_offset: int  #: where that epoch ends on the leader, exclusive
    length_bytes: int  #: of its whole batches in the payload


class ReplicaFetchResponse(Struct):
    error_code: int  #: FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH: open a new one
    error_message: str | None
    session_id: int
    partitions: list[ReplicaFetchedPartition]


class PartitionHighWatermark(Struct):
    topic_id: str
    partition: int
    leader_epoch: int
    high_watermark: int


class CheckpointHighWatermarksRequest(Struct):
    """What a leader knows to be committed, changed partitions only: a new leader starts from there."""

    node_id: int
    broker_epoch: int
    partitions: list[PartitionHighWatermark]


class CheckpointHighWatermarksResponse(Struct):
    error_code: int
    error_message: str | None
    recorded_count: int  #: partitions whose checkpoint moved


class AllocateProducerIdsRequest(Struct):
    """A broker asks for a block of producer ids to hand out."""

    node_id: int
    broker_epoch: int


class AllocateProducerIdsResponse(Struct):
    error_code: int
    error_message: str | None
    first_producer_id: int
    id_count: int


class FetchMetadataRequest(Struct):
    """How a broker that is no voter follows the metadata log: committed entries, from any voter."""

    after_offset: int  #: the last entry replayed here; 0 before the first
    leader_id: int  #: who leads, as far as the asker knows, -1: nobody; anything else ends the wait
    max_wait_ms: int
    max_bytes: int


class MetadataEntry(Struct):
    offset: int
    length_bytes: int


class FetchMetadataResponse(Struct):
    """The payload holds the encoded entries back to back.

    When the log begins later, ``is_snapshot``: one entry, at the snapshot's offset, holds the whole state.
    """

    error_code: int
    error_message: str | None
    leader_id: int  #: -1 while there is none
    committed_offset: int
    is_snapshot: bool
    entries: list[MetadataEntry]
