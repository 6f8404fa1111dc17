"""OffsetsForLeaderEpoch: where the log of a leadership ends, so that a follower or consumer finds divergence.

Behaviour: KIP-101, KIP-279 (R4): the largest known epoch not above the one asked for, and where it ends.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH.
"""

from __future__ import annotations

from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.model import NO_EPOCH, NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    EpochEnd,
    EpochPartition,
    OffsetsForLeaderEpochRequest,
    OffsetsForLeaderEpochResponse,
)


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: OffsetsForLeaderEpochRequest = request.message
    ends = [_end(services, asked) for asked in message.partitions]
    return Reply(OffsetsForLeaderEpochResponse(0, None, ends))


def _end(services: Services, asked: EpochPartition) -> EpochEnd:
    topic, number, current_leader_epoch, leader_epoch = asked
    try:
        hosted = services.partitions.leader(topic, number, current_leader_epoch)
        epoch, end_offset = hosted.partition.end_offset_for_epoch(leader_epoch)
        return EpochEnd(topic, number, 0, None, epoch, end_offset)
    except Exception as error:
        return EpochEnd(topic, number, *translate(error), NO_EPOCH, NO_OFFSET)
