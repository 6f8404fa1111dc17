"""Requests between the nodes of a cluster: identity, Raft, registration, replication, forwarding.

ClusterHello and ClusterProof authenticate a connection with the cluster's secret. The other requests require
such a connection.
"""

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, DistinctReplicas, Struct


class ClusterHelloRequest(Struct):
    """A challenge, which begins mutual authentication. The response has a proof and another challenge."""

    cluster_id: str
    node_id: int
    nonce: bytes  #: 32 random bytes, never used twice


class ClusterHelloRequestV1(ClusterHelloRequest):
    """The response also has the levels that the listener's program supports."""


class FeatureRange(Struct):
    """The levels of a feature that a node's program supports (KIP-584)."""

    feature: str
    min_level: int  #: inclusive
    max_level: int  #: inclusive


class ClusterHelloResponse(ApiResponse):
    node_id: int
    nonce: bytes
    proof: bytes  #: HMAC-SHA256 of both nonces and both ids in the server's role


class ClusterHelloResponseV1(ClusterHelloResponse):
    features: list[FeatureRange]  #: of the listener's program (R92)


class ClusterProofRequest(Struct):
    proof: bytes  #: HMAC-SHA256 of the same values in the client's role


class ClusterProofResponse(ApiResponse):
    node_id: int  #: the node id for which the connection is now authenticated


class RaftMessagesRequest(Struct):
    """Raft messages from the authenticated node. The payload contains the messages, one after the other."""

    lengths_bytes: list[int]


class RaftMessagesRequestV1(RaftMessagesRequest):
    """The eligibility messages in the payload also have the end of the sender's log (R59, R90)."""


class RaftMessagesResponse(ApiResponse):
    """Confirms only that the messages have arrived. Raft's responses are messages in the other direction."""

    received_count: int


class EnvelopeRequest(Struct):
    """A client's admin request, forwarded to the active controller. The payload is its encoded body."""

    api_key: int
    api_version: int
    client_id: str | None


class EnvelopeResponse(ApiResponse):
    """The result of a forwarded request.

    The payload is the encoded body of the response to the client. It is empty after an error.
    """

    metadata_offset: int  #: the broker replays the log up to this offset before it forwards the response


class ReplicaItem(Struct):
    """The base of structs about one partition, with a topic id instead of a topic name."""

    topic_id: str
    partition: int


class DamagedReplica(ReplicaItem):
    pass


class RegisterBrokerRequest(Struct):
    """Sent by a broker to join the cluster (R20)."""

    node_id: int
    incarnation_id: str  #: 32 hex digits, random, made at the start of the process
    directory_id: str  #: 32 hex digits, random, made when the data directory was formatted
    addresses: list[str]  #: one for each listener, in order
    rack: str | None
    clean_broker_epoch: int  #: of the session that left the clean-shutdown marker; -1 if there is none (R21)
    counts_synced_only: bool  #: durability=fsync everywhere: an unclean stop loses no committed record (R20)
    damaged: DistinctReplicas[DamagedReplica]  #: replicas that recovery found damaged (R24)
    start_count: int  #: starts in the data directory, this one included; lower in an older copy (R51)


class RegisterBrokerRequestV1(RegisterBrokerRequest):
    features: list[FeatureRange]  #: of the broker's program (R92); version 0: it supports the first levels


class RegisterBrokerResponse(ApiResponse):
    broker_epoch: int
    metadata_offset: int  #: of the registration; the broker takes no role until it has replayed it (R22)


class BrokerRequest(Struct):
    """The base of requests that a registered broker sends on its own behalf."""

    node_id: int
    broker_epoch: int


class BrokerHeartbeatRequest(BrokerRequest):
    metadata_offset: int  #: the offset up to which the broker has replayed the metadata log
    wants_shutdown: bool  #: controlled shutdown: requests that its leaderships be transferred
    damaged: DistinctReplicas[DamagedReplica]  #: replicas that have gone offline since the registration (R26)


class BrokerHeartbeatRequestV1(BrokerHeartbeatRequest):
    features: list[FeatureRange]  #: of the broker's program; the controller keeps them in memory only (R92)


class BrokerHeartbeatResponse(ApiResponse):
    is_fenced: bool
    may_shut_down: bool


class PartitionChange(ReplicaItem):
    """An ISR that the leader proposes. Accepted only if ``partition_epoch`` is the current one (R13)."""

    leader_epoch: int
    partition_epoch: int
    isr: list[int]
    isr_broker_epochs: list[int]  #: the epoch in each member's latest fetch; -1 for the leader itself


class AlterPartitionRequest(BrokerRequest):
    partitions: DistinctReplicas[PartitionChange]


class ChangedPartition(ReplicaItem):
    """The result of a proposal, with the controller's current state of the partition if that exists."""

    error_code: int
    error_message: str | None
    leader_id: int
    leader_epoch: int
    isr: list[int]
    partition_epoch: int


class AlterPartitionResponse(ApiResponse):
    partitions: list[ChangedPartition]


class ReplicaFetchPartition(ReplicaItem):
    """A follower's position (R3). Within a session, only positions that have changed are listed."""

    leader_epoch: int  #: the current leader epoch, as the follower knows it
    fetch_offset: int  #: its log end offset: the first offset to return
    last_epoch: int  #: of the last batch in its log; -1 if the log is empty
    synced_end_offset: int  #: exclusive (R7)
    log_start_offset: int


class ForgottenPartition(ReplicaItem):
    pass


class ReplicaFetchRequest(BrokerRequest):
    """A follower's fetch of all partitions that it follows on one leader broker.

    A request with ``session_epoch`` 0 opens a session (KIP-227) and lists all partitions. In each later
    request, the epoch is greater by one, and only changes are listed. A response contains only partitions
    with new data or state.
    """

    session_id: int  #: 0 opens a session
    session_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    max_partition_bytes: int
    partitions: DistinctReplicas[ReplicaFetchPartition]
    forgotten: DistinctReplicas[ForgottenPartition]


class ReplicaFetchedPartition(ReplicaItem):
    error_code: int
    error_message: str | None
    leader_epoch: int  #: of the leader; a follower ignores a response whose epoch is not its own
    high_watermark: int  #: exclusive
    log_start_offset: int
    diverging_epoch: int  #: -1 unless the logs diverge (R4); if they do, there are no batches
    diverging_end_offset: int  #: the exclusive end of that epoch on the leader
    length_bytes: int  #: of the partition's batches in the payload


class ReplicaFetchResponse(ApiResponse):
    """After FETCH_SESSION_ID_NOT_FOUND or INVALID_FETCH_SESSION_EPOCH, the follower opens a new session."""

    session_id: int
    partitions: list[ReplicaFetchedPartition]


class PartitionHighWatermark(ReplicaItem):
    leader_epoch: int
    high_watermark: int


class CheckpointHighWatermarksRequest(BrokerRequest):
    """The changed high watermarks of partitions that the sender leads, for use by their next leaders."""

    partitions: DistinctReplicas[PartitionHighWatermark]


class CheckpointHighWatermarksResponse(ApiResponse):
    recorded_count: int  #: the number of partitions whose checkpoint changed


class ReplicaReport(ReplicaItem):
    """The log of a replica whose partition has no leader, or whose leader lacks committed records."""

    leader_epoch: int  #: of the partition; the report holds for this epoch only
    last_epoch: int  #: of the last batch; -1 in an empty log
    log_end_offset: int  #: exclusive; of a log that a start found damaged, the end of its sound part
    is_damaged: bool
    #: The high watermark that the replica knows, exclusive; of a damaged log at least the end that it had.
    committed_end: int
    refused_offset: int  #: below committed_end: it refused to truncate its log to this offset (R49); or -1


class ReportReplicasRequest(BrokerRequest):
    """Describes a broker's replicas, for the election of leaders after unclean stops (R46)."""

    partitions: DistinctReplicas[ReplicaReport]


class ReportReplicasResponse(ApiResponse):
    received_count: int


class AllocateProducerIdsRequest(BrokerRequest):
    """A broker's request for a block of producer ids."""


class AllocateProducerIdsResponse(ApiResponse):
    first_producer_id: int
    id_count: int


class FetchMetadataRequest(Struct):
    """Requests entries of the metadata log.

    A broker that is not a voter sends it, as a long poll, to any voter.
    """

    after_offset: int  #: the last entry that the sender has replayed; 0 if there is none
    leader_id: int  #: the controller that the sender knows, -1 if none; another controller ends the wait
    max_wait_ms: int
    max_bytes: int


class MetadataEntry(Struct):
    offset: int
    length_bytes: int


class ControllerAddress(Struct):
    node_id: int
    address: str  #: of its controller listener; "" if unknown


class FetchMetadataResponse(ApiResponse):
    """Entries of the metadata log. The payload contains the encoded entries one after the other.

    If ``is_snapshot``, the log no longer has the entry after ``after_offset``, and the only entry in the
    response is a snapshot.
    """

    leader_id: int  #: -1 if there is none
    committed_offset: int
    is_snapshot: bool
    entries: list[MetadataEntry]


class FetchMetadataRequestV1(FetchMetadataRequest):
    pass


class FetchMetadataResponseV1(FetchMetadataResponse):
    voters: list[ControllerAddress]  #: the present voters of the metadata quorum
