"""ListOffsets: where a partition begins, ends, or passes a time.

Behaviour: LATEST is the high watermark. A time gives the first batch whose max timestamp is not less: its
base offset and max timestamp; the client looks for the record inside. Batches above the high watermark do not
count. NO_OFFSET (-1) when every record is older. With ``read_committed`` the last stable offset takes the
high watermark's place; the batch found may be of an aborted transaction, or a marker.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
OFFSET_NOT_AVAILABLE (a new leader does not know yet what is committed: R10), INVALID_REQUEST (a negative
time without a meaning; an isolation level nobody knows), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services, is_read_committed
from kafkalite.model import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
)


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: ListOffsetsRequest = request.message
    is_committed_only = is_read_committed(message.isolation_level)
    listed = [_list(services, asked, is_committed_only) for asked in message.partitions]
    return Reply(ListOffsetsResponse(0, None, listed))


def _list(services: Services, asked: ListOffsetsPartition, is_committed_only: bool) -> ListedOffset:
    topic, number, leader_epoch, timestamp_ms = asked
    try:
        hosted = services.partitions.leader(topic, number, leader_epoch)
        offset, found_ms, found_epoch = hosted.partition.list_offset(timestamp_ms, is_committed_only)
        return ListedOffset(topic, number, 0, None, found_ms, offset, found_epoch)
    except Exception as error:
        return ListedOffset(topic, number, *translate(error), NO_TIMESTAMP, NO_OFFSET, NO_EPOCH)
