"""Handlers for offsets in partitions, deletion of records, and producer ids.

Requests for a partition must be sent to its leader. Produce and fetch have their own modules.
"""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

from functools import partial
from typing import Final

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.coordination.producer_ids import ProducerIds
from kafkalite.broker.handlers.fetch import is_read_committed
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import HandlerResult, PendingResults, Reply, Response
from kafkalite.broker.services import Services
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

#: The longest wait for the end of an open transaction before the response CONCURRENT_TRANSACTIONS.
INIT_HOLD_MS: Final = 1_000


def list_offsets(services: Services, request: Request, _client: Client) -> Reply:
    """Return the offset at which a partition begins, ends, or passes a timestamp.

    Behaviour: LATEST is the high watermark. A timestamp of 0 or more finds the first batch below the high
    watermark whose max timestamp is at least that timestamp. The result is the batch's base offset and max
    timestamp, and the client searches the batch for the record. If every record is older, the offset is
    NO_OFFSET (-1). With ``read_committed`` the last stable offset replaces the high watermark. The batch
    found may belong to an aborted transaction, or be a marker.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    OFFSET_NOT_AVAILABLE (a new leader does not yet know which records are committed: R10), INVALID_REQUEST
    (an undefined negative timestamp, or an unknown isolation level), KAFKA_STORAGE_ERROR (also: the log is
    damaged, and the offset would be its end or above the sound records; R24).
    """
    message: ListOffsetsRequest = request.message
    is_committed_only = is_read_committed(message.isolation_level)
    listed = [_list(services, asked, is_committed_only) for asked in message.partitions]
    return Reply(ListOffsetsResponse(0, None, listed))


def _list(services: Services, asked: ListOffsetsPartition, is_committed_only: bool) -> ListedOffset:
    topic, number, leader_epoch, timestamp_ms = asked
    try:
        partition = services.partitions.leader(topic, number, leader_epoch)
        offset, found_ms, found_epoch = partition.list_offset(timestamp_ms, is_committed_only)
        return ListedOffset(topic, number, 0, None, found_ms, offset, found_epoch)
    except Exception as error:
        return ListedOffset(topic, number, *translate(error), NO_TIMESTAMP, NO_OFFSET, NO_EPOCH)


def offsets_for_leader_epoch(services: Services, request: Request, _client: Client) -> Reply:
    """Return the end offset of a leader epoch, by which a follower or consumer detects a divergence.

    Behaviour (KIP-101, KIP-279, R4): the result is the end offset of the largest known epoch that is not
    greater than the requested one, together with that epoch.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    KAFKA_STORAGE_ERROR.
    """
    message: OffsetsForLeaderEpochRequest = request.message
    ends = [_epoch_end(services, asked) for asked in message.partitions]
    return Reply(OffsetsForLeaderEpochResponse(0, None, ends))


def _epoch_end(services: Services, asked: EpochPartition) -> EpochEnd:
    topic, number, current_leader_epoch, leader_epoch = asked
    try:
        partition = services.partitions.leader(topic, number, current_leader_epoch)
        epoch, end_offset = partition.end_offset_for_epoch(leader_epoch)
        return EpochEnd(topic, number, 0, None, epoch, end_offset)
    except Exception as error:
        return EpochEnd(topic, number, *translate(error), NO_EPOCH, NO_OFFSET)


def offsets_for_bytes(services: Services, request: Request, _client: Client) -> Reply:
    """Return the offset up to which the batches in a range of offsets have at most ``max_bytes`` bytes.

    Behaviour: batches are added from the start of the range on, as long as they have at most ``max_bytes`` in
    all. The result is the end of the last one, or the end of the range if all its batches fit. A batch counts
    completely if any of its offsets is in the range. The first batch is always included, however large. The
    range is limited to offsets below the high watermark or, with ``read_committed``, below the last stable
    offset. Deleted records have no bytes. The result is computed from segment sizes and sparse indexes.

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
    services: Services, asked: OffsetsForBytesPartition, is_committed_only: bool
) -> OffsetForBytes:
    topic, number, leader_epoch, start_offset, end_offset, max_bytes = asked
    try:
        partition = services.partitions.leader(topic, number, leader_epoch)
        found = partition.offset_for_bytes(start_offset, end_offset, max_bytes, is_committed_only)
        return OffsetForBytes(topic, number, 0, None, *found)
    except Exception as error:
        return OffsetForBytes(topic, number, *translate(error), NO_OFFSET, 0, 0)


def delete_records(services: Services, request: Request, _client: Client) -> PendingResults:
    """Move the log start of partitions forward.

    Behaviour: ``before_offset`` is the new log start; LATEST (-1) means the high watermark. Segments entirely
    below the log start are deleted, and other records below it can no longer be read. The log start never
    moves back. The response is sent when every in-sync replica has durably moved its log start, so that any
    later leader has moved it too. After ``timeout_ms`` the response is REQUEST_TIMED_OUT, but the other
    replicas still delete the records when they fetch. If the request is repeated, it waits for them again.

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
    """Wait until the other in-sync replicas have deleted the records too.

    Called when the leader's own log has deleted them, or with ``error`` if that failed.
    """
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


def init_producer_id(services: Services, request: Request, client: Client) -> HandlerResult:
    """Assign a producer id and epoch (KIP-98, KIP-360).

    Behaviour: without a transactional id, the result is the next epoch of the given producer id, or a new
    producer id if none is given or its epochs are used up. With a transactional id, its coordinator assigns
    the next producer id and epoch, which fences the previous producer. The coordinator first aborts the
    previous producer's open transaction (R34). The response waits up to ``INIT_HOLD_MS`` for the abort; after
    that it is CONCURRENT_TRANSACTIONS.

    Errors: REQUEST_TIMED_OUT (no block of ids from the controller in time). With a transactional id also
    NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, CONCURRENT_TRANSACTIONS,
    INVALID_TRANSACTION_TIMEOUT, PRODUCER_FENCED, INVALID_TXN_STATE (the id of an application),
    POLICY_VIOLATION (transactional.id.max.count).
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
