"""DescribeLogDirs: what this broker stores of each partition, and which logs are offline, with the reason."""

from __future__ import annotations

from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import (
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    LogDirPartition,
)


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: DescribeLogDirsRequest = request.message
    wanted = None if message.topics is None else set(message.topics)
    partitions = [
        LogDirPartition(
            stored.topic,
            stored.partition,
            stored.size_bytes,
            stored.segment_count,
            stored.log_start_offset,
            stored.log_end_offset,
            stored.offline_reason,
        )
        for stored in services.partitions.stored()
        if wanted is None or stored.topic in wanted
    ]
    return Reply(DescribeLogDirsResponse(0, None, services.partitions.path, partitions))
