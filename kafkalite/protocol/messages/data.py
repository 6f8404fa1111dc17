"""Produce, Fetch, ListOffsets, OffsetsForLeaderEpoch, DeleteRecords: the data plane.

Record batches never stand inside a body. A body tells the length of each, and the frame's payload holds
them back to back in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProducePartition:
    topic: str
    partition: int
    length_bytes: int  #: of the one record batch for this partition, in the payload


@dataclass(frozen=True, slots=True)
class ProduceRequest:
    acks: int  #: 0, 1 or -1 (all)
    timeout_ms: int  #: how long the leader may wait for the in-sync replicas
    partitions: list[ProducePartition]


@dataclass(frozen=True, slots=True)
class ProducedPartition:
    topic: str
    partition: int
    error_code: int
    error_message: str | None
    base_offset: int  #: of the batch; NO_OFFSET on error
    log_append_time_ms: int  #: NO_TIMESTAMP unless message.timestamp.type is LogAppendTime
    log_start_offset: int


@dataclass(frozen=True, slots=True)
class ProduceResponse:
    error_code: int
    error_message: str | None
    partitions: list[ProducedPartition]


@dataclass(frozen=True, slots=True)
class FetchPartition:
    topic: str
    partition: int
    current_leader_epoch: int  #: NO_EPOCH when the client does not know it
    fetch_offset: int  #: first offset wanted, inclusive
    max_bytes: int


@dataclass(frozen=True, slots=True)
class FetchRequest:
    max_wait_ms: int  #: long poll: answer at the latest then
    min_bytes: int  #: answer as soon as this many bytes are there
    max_bytes: int  #: soft limit of the whole answer; the first batch always comes whole
    isolation_level: int
    partitions: list[FetchPartition]


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    topic: str
    partition: int
    error_code: int
    error_message: str | None
    high_watermark: int  #: exclusive
    last_stable_offset: int  #: exclusive
    log_start_offset: int  #: inclusive
    length_bytes: (
        int  #: of this partition's whole batches in the payload; the first may begin before fetch_offset
    )


@dataclass(frozen=True, slots=True)
class FetchResponse:
    error_code: int
    error_message: str | None
    partitions: list[FetchedPartition]


@dataclass(frozen=True, slots=True)
class ListOffsetsPartition:
    topic: str
    partition: int
    current_leader_epoch: int
    timestamp_ms: int  #: or EARLIEST (-2), LATEST (-1), MAX_TIMESTAMP (-3)


@dataclass(frozen=True, slots=True)
class ListOffsetsRequest:
    isolation_level: int
    partitions: list[ListOffsetsPartition]


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """For a timestamp: the base offset and max timestamp of the first batch whose max timestamp is not less.

    The broker does not unpack batches, so the client looks for the exact record inside that one. NO_OFFSET
    when every record is older.
    """

    topic: str
    partition: int
    error_code: int
    error_message: str | None
    timestamp_ms: int
    offset: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class ListOffsetsResponse:
    error_code: int
    error_message: str | None
    partitions: list[ListedOffset]


@dataclass(frozen=True, slots=True)
class EpochPartition:
    topic: str
    partition: int
    current_leader_epoch: int
    leader_epoch: int  #: the epoch whose end is asked for


@dataclass(frozen=True, slots=True)
class OffsetsForLeaderEpochRequest:
    partitions: list[EpochPartition]


@dataclass(frozen=True, slots=True)
class EpochEnd:
    topic: str
    partition: int
    error_code: int
    error_message: str | None
    leader_epoch: int  #: largest known epoch not above the one asked for
    end_offset: int  #: exclusive


@dataclass(frozen=True, slots=True)
class OffsetsForLeaderEpochResponse:
    error_code: int
    error_message: str | None
    partitions: list[EpochEnd]


@dataclass(frozen=True, slots=True)
class DeleteRecordsPartition:
    topic: str
    partition: int
    before_offset: int  #: exclusive: the new log start; LATEST (-1) is the high watermark


@dataclass(frozen=True, slots=True)
class DeleteRecordsRequest:
    timeout_ms: int
    partitions: list[DeleteRecordsPartition]


@dataclass(frozen=True, slots=True)
class DeletedRecords:
    topic: str
    partition: int
    error_code: int
    error_message: str | None
    log_start_offset: int


@dataclass(frozen=True, slots=True)
class DeleteRecordsResponse:
    error_code: int
    error_message: str | None
    partitions: list[DeletedRecords]
