"""Messages about records and offsets, and InitProducerId.

Record batches are never inside a body. The body contains the length of each batch, and the frame's payload
contains the batches one after the other, in the same order.
"""

# Tests: tests/protocol/test_golden.py

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, Distinct, PartitionItem, PartitionResult, Struct


class ProducePartition(PartitionItem):
    length_bytes: int  #: the size of this partition's only record batch in the payload


class ProduceRequest(Struct):
    acks: int  #: 0, 1 or -1 (all)
    timeout_ms: int  #: how long the leader may wait for the in-sync replicas
    transactional_id: str | None  #: the transaction to which transactional batches belong
    partitions: Distinct[ProducePartition]


class ProducedPartition(PartitionResult):
    base_offset: int  #: of the batch; NO_OFFSET after an error
    log_append_time_ms: int  #: NO_TIMESTAMP unless message.timestamp.type is LogAppendTime
    log_start_offset: int


class ProduceResponse(ApiResponse):
    partitions: list[ProducedPartition]


class ReadPartition(PartitionItem):
    """The base of structs about one partition in requests that its leader serves."""

    current_leader_epoch: int  #: NO_EPOCH if the client does not know it


class FetchPartition(ReadPartition):
    fetch_offset: int  #: the first offset to return, inclusive
    max_bytes: int  #: 0: no data, only the partition's offsets; new data ends a long poll


class FetchRequest(Struct):
    max_wait_ms: int  #: long poll: the leader responds after this time at the latest
    min_bytes: int  #: the leader responds as soon as this many bytes are available
    max_bytes: int  #: soft limit of the whole response; the first batch is always complete
    isolation_level: int
    partitions: Distinct[FetchPartition]


class FetchRequestV1(FetchRequest):
    """Version 1 adds the consumer's rack, so that a follower may serve the fetch (KIP-392)."""

    rack_id: str | None  #: None: the consumer reads from leaders only


class AbortedTransaction(Struct):
    """Readers skip the producer's transactional batches from ``first_offset`` to its next abort marker."""

    producer_id: int
    first_offset: int


class FetchedPartition(PartitionResult):
    high_watermark: int  #: exclusive
    last_stable_offset: int  #: exclusive
    log_start_offset: int  #: inclusive
    length_bytes: int  #: of the partition's batches in the payload; the first may begin before fetch_offset
    #: With read_committed: the aborted transactions with batches in this response, by first offset.
    aborted: list[AbortedTransaction]


class FetchResponse(ApiResponse):
    partitions: list[FetchedPartition]


class PreferredReplica(PartitionItem):
    """The replica from which a consumer in ``rack_id`` should read a partition (KIP-392)."""

    node_id: int


class FetchResponseV1(FetchResponse):
    """Version 1 adds the replicas to read from. A partition that is named there has no records here."""

    preferred_read_replicas: list[PreferredReplica]


class ListOffsetsPartition(ReadPartition):
    timestamp_ms: int  #: or EARLIEST (-2), LATEST (-1), MAX_TIMESTAMP (-3)


class ListOffsetsRequest(Struct):
    isolation_level: int
    partitions: Distinct[ListOffsetsPartition]


class ListedOffset(PartitionResult):
    """The offset for a special timestamp such as LATEST, or the batch for a timestamp of 0 or more.

    That batch is the first one whose max timestamp is at least the requested timestamp. ``offset`` is its
    base offset, and ``timestamp_ms`` its max timestamp. The broker does not unpack batches, so the client
    searches the batch for the exact record. ``offset`` is NO_OFFSET if every record is older.
    """

    timestamp_ms: int
    offset: int
    leader_epoch: int


class ListOffsetsResponse(ApiResponse):
    partitions: list[ListedOffset]


class OffsetsForBytesPartition(ReadPartition):
    start_offset: int  #: inclusive
    end_offset: int  #: exclusive
    max_bytes: int


class OffsetsForBytesRequest(Struct):
    isolation_level: int
    partitions: Distinct[OffsetsForBytesPartition]


class OffsetForBytes(PartitionResult):
    """The end of the longest run of batches from ``start_offset`` that has at most ``max_bytes``.

    The first batch is always included, however large it is.
    """

    end_offset: int  #: exclusive: the end of a batch, or of the range; NO_OFFSET after an error
    size_bytes: int  #: the full size of the batches from start_offset to this end_offset
    total_bytes: int  #: of the batches in the whole range


class OffsetsForBytesResponse(ApiResponse):
    partitions: list[OffsetForBytes]


class EpochPartition(ReadPartition):
    leader_epoch: int  #: the epoch whose end is requested


class OffsetsForLeaderEpochRequest(Struct):
    partitions: Distinct[EpochPartition]


class EpochEnd(PartitionResult):
    leader_epoch: int  #: the largest known epoch that is not above the requested epoch
    end_offset: int  #: exclusive


class OffsetsForLeaderEpochResponse(ApiResponse):
    partitions: list[EpochEnd]


class DeleteRecordsPartition(PartitionItem):
    before_offset: int  #: the new log start offset; LATEST (-1) is the high watermark


class DeleteRecordsRequest(Struct):
    timeout_ms: int
    partitions: Distinct[DeleteRecordsPartition]


class DeletedRecords(PartitionResult):
    log_start_offset: int


class DeleteRecordsResponse(ApiResponse):
    partitions: list[DeletedRecords]


class InitProducerIdRequest(Struct):
    """Requests a producer id (KIP-98, KIP-360).

    Without a transactional id, the response has a new producer id, or the next epoch of the given id.
    """

    transactional_id: str | None
    transaction_timeout_ms: int
    producer_id: int  #: NO_PRODUCER_ID: allocate a new id
    producer_epoch: int


class InitProducerIdResponse(ApiResponse):
    producer_id: int
    producer_epoch: int
