"""Produce, Fetch, ListOffsets, OffsetsForBytes, OffsetsForLeaderEpoch, DeleteRecords: the data plane.

Record batches are never inside a body. The body has the length of each, and the frame's payload holds
them back to back in the same order.
"""

# Tests: tests/protocol/test_golden.py

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, PartitionResult, Struct


class ProducePartition(Struct):
    topic: str
    partition: int
    length_bytes: int  #: of the one record batch for this partition, in the payload


class ProduceRequest(Struct):
    acks: int  #: 0, 1 or -1 (all)
    timeout_ms: int  #: how long the leader may wait for the in-sync replicas
    transactional_id: str | None  #: of the transaction that the transactional batches belong to
    partitions: list[ProducePartition]


class ProducedPartition(PartitionResult):
    base_offset: int  #: of the batch; NO_OFFSET on error
    log_append_time_ms: int  #: NO_TIMESTAMP unless message.timestamp.type is LogAppendTime
    log_start_offset: int


class ProduceResponse(ApiResponse):
    partitions: list[ProducedPartition]


class FetchPartition(Struct):
    topic: str
    partition: int
    current_leader_epoch: int  #: NO_EPOCH if the client does not know it
    fetch_offset: int  #: the first offset to return, inclusive
    max_bytes: int  #: 0: no data, only the partition's offsets; new data ends a long poll


class FetchRequest(Struct):
    max_wait_ms: int  #: long poll: the latest time of the response
    min_bytes: int  #: respond as soon as this many bytes are available
    max_bytes: int  #: soft limit of the whole response; the first batch is always returned whole
    isolation_level: int
    partitions: list[FetchPartition]


class AbortedTransaction(Struct):
    """Skip the producer's transactional batches from here to its next abort marker, inclusive."""

    producer_id: int
    first_offset: int


class FetchedPartition(PartitionResult):
    high_watermark: int  #: exclusive
    last_stable_offset: int  #: exclusive
    log_start_offset: int  #: inclusive
    length_bytes: int  #: of the partition's batches in the payload; the first may begin before fetch_offset
    #: with read_committed: aborted transactions with batches in this response, by first offset
    aborted: list[AbortedTransaction]


class FetchResponse(ApiResponse):
    partitions: list[FetchedPartition]


class ListOffsetsPartition(Struct):
    topic: str
    partition: int
    current_leader_epoch: int
    timestamp_ms: int  #: or EARLIEST (-2), LATEST (-1), MAX_TIMESTAMP (-3)


class ListOffsetsRequest(Struct):
    isolation_level: int
    partitions: list[ListOffsetsPartition]


class ListedOffset(PartitionResult):
    """For a timestamp: base offset and max timestamp of the first batch whose max timestamp is not less.

    The broker does not unpack batches, so the client searches that batch for the exact record.
    NO_OFFSET if every record is older.
    """

    timestamp_ms: int
    offset: int
    leader_epoch: int


class ListOffsetsResponse(ApiResponse):
    partitions: list[ListedOffset]


class OffsetsForBytesPartition(Struct):
    topic: str
    partition: int
    current_leader_epoch: int
    start_offset: int  #: inclusive
    end_offset: int  #: exclusive
    max_bytes: int


class OffsetsForBytesRequest(Struct):
    isolation_level: int
    partitions: list[OffsetsForBytesPartition]


class OffsetForBytes(PartitionResult):
    """The range that ``max_bytes`` of batches cover. Partial batches count fully; the first always counts."""

    end_offset: int  #: exclusive: the end of a batch, or of the range; NO_OFFSET on error
    size_bytes: int  #: of the batches from start_offset to this end_offset
    total_bytes: int  #: of the batches in the whole range


class OffsetsForBytesResponse(ApiResponse):
    partitions: list[OffsetForBytes]


class EpochPartition(Struct):
    topic: str
    partition: int
    current_leader_epoch: int
    leader_epoch: int  #: the epoch whose end is requested


class OffsetsForLeaderEpochRequest(Struct):
    partitions: list[EpochPartition]


class EpochEnd(PartitionResult):
    leader_epoch: int  #: the largest known epoch not above the requested one
    end_offset: int  #: exclusive


class OffsetsForLeaderEpochResponse(ApiResponse):
    partitions: list[EpochEnd]


class DeleteRecordsPartition(Struct):
    topic: str
    partition: int
    before_offset: int  #: exclusive: the new log start; LATEST (-1) is the high watermark


class DeleteRecordsRequest(Struct):
    timeout_ms: int
    partitions: list[DeleteRecordsPartition]


class DeletedRecords(PartitionResult):
    log_start_offset: int


class DeleteRecordsResponse(ApiResponse):
    partitions: list[DeletedRecords]


class InitProducerIdRequest(Struct):
    """KIP-98, KIP-360. Without a transactional id: a new producer id, or the next epoch of the given one."""

    transactional_id: str | None
    transaction_timeout_ms: int
    producer_id: int  #: NO_PRODUCER_ID: allocate a new one
    producer_epoch: int


class InitProducerIdResponse(ApiResponse):
    producer_id: int
    producer_epoch: int
