"""OffsetsForBytes: how far a number of bytes reaches in a range of offsets.

Behaviour: the largest end of a batch in the range such that the batches from its start to there have at
most ``max_bytes``; the range's own end when all of it has no more. A batch counts whole when any offset of it
is in the range, and the first is taken however large. The range is cut at the high watermark, with
``read_committed`` at the last stable offset. What was deleted has no bytes. The answer comes from segment
sizes and sparse indexes: it costs the same for every range.

Deviations from Kafka: it has no such API.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
OFFSET_NOT_AVAILABLE (a new leader does not know yet what is committed: R10), OFFSET_OUT_OF_RANGE (the range
begins above what is readable), INVALID_REQUEST (a negative offset, an end before the start; an isolation
level nobody knows), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services, is_read_committed
from kafkalite.model import NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    OffsetForBytes,
    OffsetsForBytesPartition,
    OffsetsForBytesRequest,
    OffsetsForBytesResponse,
)


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: OffsetsForBytesRequest = request.message
    is_committed_only = is_read_committed(message.isolation_level)
    found = [_find(services, asked, is_committed_only) for asked in message.partitions]
    return Reply(OffsetsForBytesResponse(0, None, found))


def _find(services: Services, asked: OffsetsForBytesPartition, is_committed_only: bool) -> OffsetForBytes:
    topic, number, leader_epoch, start_offset, end_offset, max_bytes = asked
    try:
        partition = services.partitions.leader(topic, number, leader_epoch).partition
        found = partition.offset_for_bytes(start_offset, end_offset, max_bytes, is_committed_only)
        return OffsetForBytes(topic, number, 0, None, *found)
    except Exception as error:
        return OffsetForBytes(topic, number, *translate(error), NO_OFFSET, 0, 0)
