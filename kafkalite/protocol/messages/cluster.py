"""Requests between the nodes of a cluster: identity, Raft, registration, replication, forwarding.

They need a connection that was authenticated with the cluster's secret (ClusterHello, ClusterProof).
"""

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, Struct


class ClusterHelloRequest(Struct):
    """First of two steps of mutual authentication: a challenge. The response has a proof and a challenge."""

    cluster_id: str
    node_id: int
    nonce: bytes  #: 32 random bytes, never used twice


class ClusterHelloResponse(ApiResponse):
    node_id: int
    nonce: bytes
    proof: bytes  #: HMAC-SHA256 of both nonces and both ids in the server's role


class ClusterProofRequest(Struct):
    proof: bytes  #: the same in the client's role


class ClusterProofResponse(ApiResponse):
    node_id: int  #: the node id that the connection is now authenticated for


class RaftMessagesRequest(Struct):
    """Raft messages from the authenticated node, in order, back to back in the payload."""

    lengths_bytes: list[int]


class RaftMessagesResponse(ApiResponse):
    """Confirms arrival only: Raft's own responses travel on the other connection."""

    received_count: int


class EnvelopeRequest(Struct):
    """A client's admin request, forwarded to the active controller. The payload is its encoded body."""

    api_key: int
    api_version: int
    client_id: str | None


class EnvelopeResponse(ApiResponse):
    """The payload is the encoded body of the response; empty with an error_code."""

    metadata_offset: int  #: to be replayed by the forwarding broker before it passes the response on


class DamagedReplica(Struct):
    topic_id: str
    partition: int


class RegisterBrokerRequest(Struct):
    """Sent by a broker's new process to join the cluster (R20)."""

    node_id: int
    incarnation_id: str  #: 32 hex digits, random, made at the start of the process
    directory_id: str  #: 32 hex digits, random, made when the data directory was formatted
    addresses: list[str]  #: one for each listener, in order
    rack: str | None
    clean_broker_epoch: int  #: of the session that left the clean-shutdown marker; -1 without one (R21)
    counts_synced_only: bool  #: durability=fsync everywhere: an unclean stop has lost nothing committed (R20)
    damaged: list[DamagedReplica]  #: replicas that recovery found damaged (R24)


class RegisterBrokerResponse(ApiResponse):
    broker_epoch: int
    metadata_offset: int  #: of the registration; until it is replayed here the broker takes no role (R22)


class BrokerHeartbeatRequest(Struct):
    node_id: int
    broker_epoch: int
    metadata_offset: int  #: replayed here
    wants_shutdown: bool  #: controlled shutdown: the broker asks for its leaderships to move
    damaged: list[DamagedReplica]  #: replicas that have gone offline since the registration (R26)


class BrokerHeartbeatResponse(ApiResponse):
    is_fenced: bool
    may_shut_down: bool


class PartitionChange(Struct):
    """A leader's proposed ISR, a compare-and-set on the partition epoch (R13)."""

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
    """The partition's current state on the controller, with error_code 0 as well as after a refusal."""

    topic_id: str
    partition: int
    error_code: int
    error_message: str | None
    leader_id: int
    leader_epoch: int
    isr: list[int]
    partition_epoch: int


class AlterPartitionResponse(ApiResponse):
    partitions: list[ChangedPartition]


class ReplicaFetchPartition(Struct):
    """A follower's position (R3). In a session, only partitions whose fields have changed are listed."""

    topic_id: str
    partition: int
    leader_epoch: int  #: the epoch that the follower is in
    fetch_offset: int  #: its log end, inclusive
    last_epoch: int  #: of the last batch in its log; -1 in an empty log
    synced_end_offset: int  #: exclusive (R7)
    log_start_offset: int


class ForgottenPartition(Struct):
    topic_id: str
    partition: int


class ReplicaFetchRequest(Struct):
    """A follower's one outstanding fetch from a leader broker, for all partitions it follows there.

    KIP-227 sessions: ``session_epoch`` 0 opens a session and lists everything; then it counts up, and
    only changes are listed. The response contains only partitions with new data or state.
    """

    node_id: int
    broker_epoch: int
    session_id: int  #: 0 opens a session
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
    leader_epoch: int  #: the leader's; a follower ignores a response of another epoch than its own
    high_watermark: int  #: exclusive
    log_start_offset: int
    diverging_epoch: int  #: -1 unless the logs diverge (R4), in which case there are no batches
    diverging_end_offset: int  #: the end of that epoch on the leader, exclusive
    length_bytes: int  #: of its batches in the payload


class ReplicaFetchResponse(ApiResponse):
    """After FETCH_SESSION_ID_NOT_FOUND and INVALID_FETCH_SESSION_EPOCH the follower opens a new session."""

    session_id: int
    partitions: list[ReplicaFetchedPartition]


class PartitionHighWatermark(Struct):
    topic_id: str
    partition: int
    leader_epoch: int
    high_watermark: int


class CheckpointHighWatermarksRequest(Struct):
    """The high watermarks of a leader's changed partitions, from which the next leader starts."""

    node_id: int
    broker_epoch: int
    partitions: list[PartitionHighWatermark]


class CheckpointHighWatermarksResponse(ApiResponse):
    recorded_count: int  #: partitions whose checkpoint changed


class AllocateProducerIdsRequest(Struct):
    """A broker's request for a block of producer ids."""

    node_id: int
    broker_epoch: int


class AllocateProducerIdsResponse(ApiResponse):
    first_producer_id: int
    id_count: int


class FetchMetadataRequest(Struct):
    """A long poll by which a broker that is not a voter follows the metadata log; any voter serves it."""

    after_offset: int  #: the last entry replayed here; 0 before the first
    leader_id: int  #: the controller known to the sender, -1: none; a different controller ends the wait
    max_wait_ms: int
    max_bytes: int


class MetadataEntry(Struct):
    offset: int
    length_bytes: int


class FetchMetadataResponse(ApiResponse):
    """The payload holds the encoded entries back to back.

    ``is_snapshot``: the log begins later, and one entry at the snapshot's offset holds the whole state.
    """

    leader_id: int  #: -1: none
    committed_offset: int
    is_snapshot: bool
    entries: list[MetadataEntry]
