"""DeleteRecords: move a partition's log start forward.

Behaviour: ``before_offset`` is exclusive, LATEST (-1) means the high watermark. Whole segments below it go;
the rest can't be read any more. Never moves back.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, OFFSET_OUT_OF_RANGE (above the high watermark or
below -1), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from kafkalite.broker.answers import Reply
from kafkalite.broker.outcomes import translate
from kafkalite.broker.services import Client, Services
from kafkalite.model import NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    DeletedRecords,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
)


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: DeleteRecordsRequest = request.message
    return Reply(DeleteRecordsResponse(0, None, [_delete(services, asked) for asked in message.partitions]))


def _delete(services: Services, asked: DeleteRecordsPartition) -> DeletedRecords:
    topic, number, before_offset = asked
    try:
        hosted = services.partitions.leader(topic, number)
        log_start_offset = hosted.partition.delete_records(before_offset)
        hosted.on_log_start_moved()
        return DeletedRecords(topic, number, 0, None, log_start_offset)
    except Exception as error:
        return DeletedRecords(topic, number, *translate(error), NO_OFFSET)
