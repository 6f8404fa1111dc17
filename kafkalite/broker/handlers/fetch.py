"""Fetch: whole batches from an offset on, as they lie in the segments.

Behaviour: reads each partition below its high watermark until ``max_bytes`` are there; the first batch of the
answer comes whole however large. With fewer than ``min_bytes``, the request waits for more, at most
``max_wait_ms``, and reads again. A partition that fails is answered at once with its error, next to
the data of the others. The payload is views of the segments' maps: nothing is copied here.

Deviations from Kafka: no fetch sessions. Without transactions both isolation levels read the same.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
OFFSET_NOT_AVAILABLE (a new leader does not know yet), OFFSET_OUT_OF_RANGE (with the log start and the high
watermark), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kafkalite.broker.answers import Pending, Refusal, Reply
from kafkalite.broker.outcomes import translate
from kafkalite.broker.services import Client, Services
from kafkalite.broker.waiters import AppendedWaiter
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
CLOCK_GRAIN_S: Final = 0.001  # a timer may come this much early


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
    return _Poll(services, message).begin(message.min_bytes - read.size_bytes)


class _Poll:
    """A fetch that waits for more: reads again when there may be enough, and when time is over."""

    __slots__ = ("_deadline_s", "_keys", "_message", "_pending", "_services", "_waiter")

    def __init__(self, services: Services, message: FetchRequest) -> None:
        self._services = services
        self._message = message
        self._keys = [(asked.topic, asked.partition) for asked in message.partitions]
        self._deadline_s = services.waiters.loop.time() + min(message.max_wait_ms, MAX_WAIT_MS) / 1000
        self._waiter: AppendedWaiter | None = None
        self._pending = Pending(self._cancel)

    def begin(self, missing_bytes: int) -> Pending:
        self._wait(missing_bytes, self._deadline_s - self._services.waiters.loop.time())
        return self._pending

    def _wait(self, missing_bytes: int, left_s: float) -> None:
        self._waiter = self._services.waiters.appended(self._keys, missing_bytes, left_s, self._on_woken)

    def _cancel(self) -> None:
        if self._waiter is not None:
            self._waiter.cancel()

    def _on_woken(self) -> None:
        services, message = self._services, self._message
        if self._pending.is_done:
            return
        try:
            read = _read(services, message)
        except AssertionError as error:
            services.on_broken(error)
            self._pending.resolve(Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker stops", closes=True))
            return
        missing_bytes = message.min_bytes - read.size_bytes
        if missing_bytes > 0 and not read.has_error and not services.is_stopping:
            left_s = self._deadline_s - services.waiters.loop.time()
            if left_s > CLOCK_GRAIN_S:
                self._wait(missing_bytes, left_s)
                return
        services.metrics.fetched_bytes += read.size_bytes
        self._pending.resolve(read.reply)


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
