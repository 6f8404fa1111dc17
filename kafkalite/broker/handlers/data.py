"""Handlers for offsets in partitions, for deleting records, and for producer ids.

The leader of a partition responds. Produce and fetch have modules of their own.
"""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.coordination.producer_ids import ProducerIds
from kafkalite.broker.coordination.transactions import Transactions
from kafkalite.broker.handlers.fetch import is_read_committed
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import HandlerResult, PendingResults, Reply, Response
from kafkalite.model import MAX_PRODUCER_EPOCH, NO_EPOCH, NO_OFFSET, NO_TIMESTAMP
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    DeletedRecords,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    EpochEnd,
    EpochPartition,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForBytes,
    OffsetsForBytesPartition,
    OffsetsForBytesRequest,
    OffsetsForBytesResponse,
    OffsetsForLeaderEpochRequest,
    OffsetsForLeaderEpochResponse,
)
from kafkalite.replication.partition import Partition
from kafkalite.transactions.commands import InitProducerId

#: How long the coordinator waits for the end of a transaction before it responds CONCURRENT_TRANSACTIONS.
INIT_HOLD_MS: Final = 1_000


class DataServices(Protocol):
    """The parts of a broker that these handlers use."""

    partitions: Partitions
    waiters: Waiters
    producer_ids: ProducerIds
    transactions: Transactions


# --- offsets


def list_offsets(services: DataServices, request: Request, _client: Client) -> Reply:
    """Return the offset at which a partition begins, ends, or passes a timestamp.

    Behaviour: LATEST is the high watermark. A timestamp finds the first batch whose max timestamp is not
    less: its base offset and max timestamp; the client looks for the record inside. Batches above the high
    watermark do not count. NO_OFFSET (-1) if every record is older. With ``read_committed`` the last stable
    offset takes the place of the high watermark; the batch found may belong to an aborted transaction, or be
    a marker.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    OFFSET_NOT_AVAILABLE (a new leader does not know yet which records are committed: R10), INVALID_REQUEST (a
    negative timestamp without a meaning; an unknown isolation level), KAFKA_STORAGE_ERROR.
    """
    message: ListOffsetsRequest = request.message
    is_committed_only = is_read_committed(message.isolation_level)
    listed = [_list(services, asked, is_committed_only) for asked in message.partitions]
    return Reply(ListOffsetsResponse(0, None, listed))


def _list(services: DataServices, asked: ListOffsetsPartition, is_committed_only: bool) -> ListedOffset:
    topic, number, leader_epoch, timestamp_ms = asked
    try:
        partition = services.partitions.leader(topic, number, leader_epoch)
        offset, found_ms, found_epoch = partition.list_offset(timestamp_ms, is_committed_only)
        return ListedOffset(topic, number, 0, None, found_ms, offset, found_epoch)
    except Exception as error:
        return ListedOffset(topic, number, *translate(error), NO_TIMESTAMP, NO_OFFSET, NO_EPOCH)


def offsets_for_leader_epoch(services: DataServices, request: Request, _client: Client) -> Reply:
    """Return where the log of a leader epoch ends, so that a follower or consumer finds a divergence.

    Behaviour: KIP-101, KIP-279 (R4): the largest known epoch not above the requested one, and its end offset.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH.
    """
    message: OffsetsForLeaderEpochRequest = request.message
    ends = [_epoch_end(services, asked) for asked in message.partitions]
    return Reply(OffsetsForLeaderEpochResponse(0, None, ends))


def _epoch_end(services: DataServices, asked: EpochPartition) -> EpochEnd:
    topic, number, current_leader_epoch, leader_epoch = asked
    try:
        partition = services.partitions.leader(topic, number, current_leader_epoch)
        epoch, end_offset = partition.end_offset_for_epoch(leader_epoch)
        return EpochEnd(topic, number, 0, None, epoch, end_offset)
    except Exception as error:
        return EpochEnd(topic, number, *translate(error), NO_EPOCH, NO_OFFSET)


def offsets_for_bytes(services: DataServices, request: Request, _client: Client) -> Reply:
    """Return how far a number of bytes reaches in a range of offsets.

    Behaviour: the largest end of a batch in the range such that the batches from its start up to there have
    at most ``max_bytes``; the end of the range if all of it has no more. A batch counts completely if any of
    its offsets is in the range, and the first batch is included however large. The range is cut at the high
    watermark, with ``read_committed`` at the last stable offset. Deleted records have no bytes. The result is
    computed from segment sizes and sparse indexes, at the same cost for every range.

    Deviation from Kafka: it has no such API.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    OFFSET_NOT_AVAILABLE (a new leader does not know yet which records are committed: R10),
    OFFSET_OUT_OF_RANGE (the range begins above the readable records), INVALID_REQUEST (a negative offset, an
    end before the start; an unknown isolation level), KAFKA_STORAGE_ERROR.
    """
    message: OffsetsForBytesRequest = request.message
    is_committed_only = is_read_committed(message.isolation_level)
    found = [_offset_for_bytes(services, asked, is_committed_only) for asked in message.partitions]
    return Reply(OffsetsForBytesResponse(0, None, found))


def _offset_for_bytes(
    services: DataServices, asked: OffsetsForBytesPartition, is_committed_only: bool
) -> OffsetForBytes:
    topic, number, leader_epoch, start_offset, end_offset, max_bytes = asked
    try:
        partition = services.partitions.leader(topic, number, leader_epoch)
        found = partition.offset_for_bytes(start_offset, end_offset, max_bytes, is_committed_only)
        return OffsetForBytes(topic, number, 0, None, *found)
    except Exception as error:
        return OffsetForBytes(topic, number, *translate(error), NO_OFFSET, 0, 0)


# --- deletion


def delete_records(services: DataServices, request: Request, _client: Client) -> PendingResults:
    """Move the log start of partitions forward.

    Behaviour: ``before_offset`` is exclusive; LATEST (-1) means the high watermark. Whole segments below it
    are deleted; the other records below it can no longer be read. The log start never moves back. The
    response is sent when every in-sync replica has moved its log start, durably, so that any next leader
    starts there too; or after ``timeout_ms`` with REQUEST_TIMED_OUT: the records are deleted on the leader,
    and on the other replicas a little later. A repeated request waits for that.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, OFFSET_OUT_OF_RANGE (above the high watermark
    or below -1), KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT, INVALID_TOPIC_EXCEPTION (an internal topic).
    """
    message: DeleteRecordsRequest = request.message
    results = [DeletedRecords(topic, number, 0, None, NO_OFFSET) for topic, number, _ in message.partitions]
    waiting = PendingResults(services.waiters.loop, results, _deletion_error, _deletion_reply)
    for index, asked in enumerate(message.partitions):
        waiting.expect(index)
        try:
            refuse_internal(asked.topic)
            partition = services.partitions.leader(asked.topic, asked.partition)
            offset = partition.deletion_end(asked.before_offset)
            then = partial(_on_deleted, services.waiters, waiting, index, partition, offset)
            services.partitions.delete_before(partition, offset, then)
        except Exception as error:
            waiting.set_error(index, error)
    return waiting.begin(
        message.timeout_ms, "not every in-sync replica deleted the records within %d ms; they will be deleted"
    )


def _on_deleted(
    waiters: Waiters,
    waiting: PendingResults,
    index: int,
    partition: Partition,
    offset: int,
    error: Exception | None,
) -> None:
    """Wait for the in-sync replicas after the deletion from the leader's own log."""
    if error is not None:
        waiting.set_error(index, error)
    elif waiting.is_expected(index):
        result = DeletedRecords(*partition.key, 0, None, partition.log_start_offset)
        if partition.low_watermark >= offset:
            waiting.set(index, result)
        else:
            waiting.results[index] = result
            waiting.wait(index, waiters.deleted, partition.key, offset)


def _deletion_error(result: DeletedRecords, error: Exception) -> DeletedRecords:
    return DeletedRecords(result.topic, result.partition, *translate(error), NO_OFFSET)


def _deletion_reply(results: list[DeletedRecords]) -> Reply:
    return Reply(DeleteRecordsResponse(0, None, results))


# --- producer ids


def init_producer_id(services: DataServices, request: Request, client: Client) -> HandlerResult:
    """Assign a producer id and epoch (KIP-98, KIP-360).

    Behaviour: without a transactional id, a producer id of this broker's block, or the next epoch of the
    given one. With a transactional id, its coordinator assigns the next producer id and epoch. That fences
    the producer that had the last ones; its open transaction is aborted first (R34). The response waits for
    the abort for ``INIT_HOLD_MS``, and then is CONCURRENT_TRANSACTIONS.

    Errors: REQUEST_TIMED_OUT (no controller gave this broker a block in time); with a transactional id
    NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, CONCURRENT_TRANSACTIONS, and
    those of ``transactions.machine``: INVALID_TRANSACTION_TIMEOUT, PRODUCER_FENCED, INVALID_TXN_STATE.
    """
    message: InitProducerIdRequest = request.message
    transactional_id, timeout_ms, producer_id, producer_epoch = message
    if transactional_id is not None:
        return services.transactions.submit_with_spare_id(
            transactional_id,
            lambda spare_id: InitProducerId(
                transactional_id, timeout_ms, producer_id, producer_epoch, spare_id
            ),
            client.caller,
            hold_ms=INIT_HOLD_MS,
        )
    if producer_id >= 0 and 0 <= producer_epoch < MAX_PRODUCER_EPOCH - 1:
        return Reply(InitProducerIdResponse(0, None, producer_id, producer_epoch + 1))
    free_id = services.producer_ids.take()
    if free_id is not None:
        return Reply(InitProducerIdResponse(0, None, free_id, 0))
    return _wait_for_block(services.producer_ids)


async def _wait_for_block(producer_ids: ProducerIds) -> Response:
    return Reply(InitProducerIdResponse(0, None, await producer_ids.next(), 0))
