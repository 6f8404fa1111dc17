"""Fetch: whole batches from an offset on, as they lie in the segments.

Behaviour: reads each partition below its high watermark until ``max_bytes`` are there; the first batch of the
answer comes whole however large. With fewer than ``min_bytes``, the request waits for appends, at most
``max_wait_ms``, and reads once more. A partition that fails is answered at once with its error, next to
the data of the others. The payload is views of the segments' maps: nothing is copied here.

Deviations from Kafka: no fetch sessions. Without transactions both isolation levels read the same.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
OFFSET_OUT_OF_RANGE (with the log start and the high watermark), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kafkalite.broker.answers import Pending, Refusal, Reply
from kafkalite.broker.outcomes import translate
from kafkalite.broker.services import Client, Services
from kafkalite.errors import ErrorCode
from kafkalite.model import NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchResponse,
)

MAX_WAIT_MS: Final = 2**31 - 1


class _Read(NamedTuple):
    reply: Reply
    size_bytes: int
    has_error: bool


def handle(services: Services, request: Request, _client: Client) -> Reply | Pending:
    message: FetchRequest = request.message
    read = _read(services, message)
    if (
        read.size_bytes >= message.min_bytes
        or read.has_error
        or message.max_wait_ms <= 0
        or services.is_stopping
    ):
        services.metrics.fetched_bytes += read.size_bytes
        return read.reply
    return _wait(services, message, message.min_bytes - read.size_bytes)


def _wait(services: Services, message: FetchRequest, missing_bytes: int) -> Pending:
    """Read once more when there is enough, or when time is over."""

    def on_woken() -> None:
        try:
            read = _read(services, message)
        except AssertionError as error:
            services.on_broken(error)
            pending.resolve(Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker stops", closes=True))
            return
        services.metrics.fetched_bytes += read.size_bytes
        pending.resolve(read.reply)

    keys = [(asked.topic, asked.partition) for asked in message.partitions]
    waiter = services.waiters.appended(keys, missing_bytes, min(message.max_wait_ms, MAX_WAIT_MS), on_woken)
    pending = Pending(waiter.cancel)
    return pending


def _read(services: Services, message: FetchRequest) -> _Read:
    left_bytes = min(message.max_bytes, services.config.fetch_max_bytes)
    results: list[FetchedPartition] = []
    buffers: list[Any] = []
    size_bytes = 0
    has_error = False
    for asked in message.partitions:
        try:
            result, parts = _read_partition(services, asked, left_bytes, size_bytes)
        except Exception as error:
            has_error = True
            results.append(_refused(services, asked, error))
            continue
        results.append(result)
        if parts:
            buffers += parts
            size_bytes += result.length_bytes
            left_bytes -= result.length_bytes
    return _Read(Reply(FetchResponse(0, None, results), buffers), size_bytes, has_error)


def _read_partition(
    services: Services, asked: FetchPartition, left_bytes: int, earlier_bytes: int
) -> tuple[FetchedPartition, list[memoryview]]:
    """One partition's part of the answer. Not its first data: then no batch beyond ``left_bytes``."""
    topic, number, leader_epoch, fetch_offset, max_bytes = asked
    hosted = services.partitions.leader(topic, number, leader_epoch)
    read = hosted.partition.read(fetch_offset, min(max_bytes, left_bytes))
    high_watermark = hosted.high_watermark
    length_bytes, buffers = read.size_bytes, read.buffers
    if earlier_bytes and length_bytes > left_bytes:
        length_bytes, buffers = 0, []
    result = FetchedPartition(
        topic, number, 0, None, high_watermark, high_watermark, hosted.log_start_offset, length_bytes
    )
    return result, buffers


def _refused(services: Services, asked: FetchPartition, error: Exception) -> FetchedPartition:
    code, message = translate(error)
    log_start_offset = high_watermark = NO_OFFSET
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        hosted = services.partitions.leader(asked.topic, asked.partition)
        log_start_offset, high_watermark = hosted.log_start_offset, hosted.high_watermark
    return FetchedPartition(
        asked.topic, asked.partition, code, message, high_watermark, high_watermark, log_start_offset, 0
    )
