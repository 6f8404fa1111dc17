"""Fetch: whole batches from an offset on, as they lie in the segments.

Behaviour: reads each partition below its high watermark until ``max_bytes`` are there; the first batch of the
answer comes whole however large. With fewer than ``min_bytes``, the request waits for more, at most
``max_wait_ms``, and reads again. A partition that fails is answered at once with its error, next to
the data of the others. The payload is views of the segments' maps: nothing is copied here.

With ``read_committed`` each partition is read below its last stable offset, and the answer tells which of the
transactions among its batches were aborted (R11, R33); the reader leaves those out.

A partition with ``max_bytes`` 0 is only watched: it is told where it stands and sends no data, and as soon as
there is a batch to be read at ``fetch_offset`` or behind, the request is answered, whatever ``min_bytes``.

Deviations from Kafka: a partition with ``max_bytes`` 0 gets no batch. No fetch sessions. Without
``read_committed`` the last stable offset is told as far as it is known: finding it may need a walk over the
log, which is not begun for that.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
OFFSET_NOT_AVAILABLE (a new leader does not know yet), OFFSET_OUT_OF_RANGE (with the log start and the high
watermark), KAFKA_STORAGE_ERROR; of the whole request INVALID_REQUEST (an isolation level nobody knows).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kafkalite.broker.partitions.waiters import AppendedWaiter, Key
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Pending, Refusal, Reply
from kafkalite.broker.server.services import Client, Services, is_read_committed
from kafkalite.errors import BrokerError, ErrorCode, StorageError
from kafkalite.model import NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    AbortedTransaction,
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
    is_final: bool  #: a partition has failed, or one that is only watched has something: nothing to wait for

    def missing_bytes(self, message: FetchRequest) -> int:
        """How many more must become readable; 1 if some are there that an open transaction holds back."""
        partitions = self.reply.message.partitions
        if any(one.last_stable_offset < one.high_watermark for one in partitions):
            return min(1, message.min_bytes - self.size_bytes)
        return message.min_bytes - self.size_bytes


def handle(services: Services, request: Request, _client: Client) -> Reply | Pending:
    message: FetchRequest = request.message
    read = _read(services, message)
    if (
        read.size_bytes >= message.min_bytes
        or read.is_final
        or message.max_wait_ms <= 0
        or services.is_stopping
    ):
        services.metrics.fetched_bytes += read.size_bytes
        return read.reply
    return _Poll(services, message).begin(read)


class _Poll:
    """A fetch that waits for more: reads again when there may be enough, and when time is over."""

    __slots__ = (
        "_deadline_s",
        "_is_watching",
        "_keys",
        "_message",
        "_pending",
        "_services",
        "_stable",
        "_waiter",
    )

    def __init__(self, services: Services, message: FetchRequest) -> None:
        self._services = services
        self._message = message
        self._keys = [(asked.topic, asked.partition) for asked in message.partitions]
        self._is_watching = any(asked.max_bytes <= 0 for asked in message.partitions)
        self._deadline_s = services.waiters.loop.time() + min(message.max_wait_ms, MAX_WAIT_MS) / 1000
        self._stable: dict[Key, int] = {}  # the last stable offsets that were read, with read_committed
        self._waiter: AppendedWaiter | None = None
        self._pending = Pending(self._cancel)

    def begin(self, read: _Read) -> Pending:
        self._wait(read, self._deadline_s - self._services.waiters.loop.time())
        return self._pending

    def _wait(self, read: _Read, left_s: float) -> None:
        waiters = self._services.waiters
        missing_bytes = 1 if self._is_watching else self._message.min_bytes - read.size_bytes
        is_readable = None
        if is_read_committed(self._message.isolation_level):
            missing_bytes = min(missing_bytes, read.missing_bytes(self._message))
            partitions = read.reply.message.partitions
            self._stable = {(one.topic, one.partition): one.last_stable_offset for one in partitions}
            is_readable = self._has_more_stable
        self._waiter = waiters.appended(self._keys, missing_bytes, left_s, self._on_woken, is_readable)

    def _has_more_stable(self, key: Key) -> bool:
        try:
            return self._services.partitions.leader(*key).last_stable_offset > self._stable[key]
        except (BrokerError, StorageError):
            return True  # reading again tells

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
        if missing_bytes > 0 and not read.is_final and not services.is_stopping:
            left_s = self._deadline_s - services.waiters.loop.time()
            if left_s > CLOCK_GRAIN_S:
                self._wait(read, left_s)
                return
        services.metrics.fetched_bytes += read.size_bytes
        self._pending.resolve(read.reply)


def _read(services: Services, message: FetchRequest) -> _Read:
    left_bytes = min(message.max_bytes, services.config.fetch_max_bytes)
    results: list[FetchedPartition] = []
    buffers: list[Any] = []
    size_bytes = 0
    is_final = False
    is_committed_only = is_read_committed(message.isolation_level)
    for asked in message.partitions:
        try:
            if asked.max_bytes <= 0:
                result, has_news = _watch_partition(services, asked, is_committed_only)
                is_final = is_final or has_news
                results.append(result)
                continue
            result, parts = _read_partition(services, asked, left_bytes, size_bytes, is_committed_only)
        except Exception as error:
            is_final = True
            results.append(_refused(services, asked, error))
            continue
        results.append(result)
        if parts:
            buffers += parts
            size_bytes += result.length_bytes
            left_bytes -= result.length_bytes
    return _Read(Reply(FetchResponse(0, None, results), buffers), size_bytes, is_final)


def _read_partition(
    services: Services, asked: FetchPartition, left_bytes: int, earlier_bytes: int, is_committed_only: bool
) -> tuple[FetchedPartition, list[memoryview]]:
    """One partition's part of the answer. Not its first data: then no batch beyond ``left_bytes``."""
    topic, number, leader_epoch, fetch_offset, max_bytes = asked
    hosted = services.partitions.leader(topic, number, leader_epoch)
    log = hosted.log
    read = hosted.partition.read(fetch_offset, min(max_bytes, left_bytes), is_committed_only)
    high_watermark = hosted.high_watermark
    length_bytes, buffers = read.size_bytes, read.buffers
    if earlier_bytes and length_bytes > left_bytes:
        length_bytes, buffers = 0, []
    aborted: list[AbortedTransaction] = []
    if is_committed_only:
        stable = log.last_stable_offset(high_watermark)
        if buffers:
            found = log.aborted_between(fetch_offset, read.next_offset)
            aborted = [AbortedTransaction(producer_id, first_offset) for producer_id, first_offset in found]
    else:
        stable = log.known_stable_offset(high_watermark)
    result = FetchedPartition(
        topic, number, 0, None, high_watermark, stable, hosted.log_start_offset, length_bytes, aborted
    )
    return result, buffers


def _watch_partition(
    services: Services, asked: FetchPartition, is_committed_only: bool
) -> tuple[FetchedPartition, bool]:
    """Where the partition stands, and whether a batch could be read from ``fetch_offset`` on."""
    topic, number, leader_epoch, fetch_offset, _ = asked
    hosted = services.partitions.leader(topic, number, leader_epoch)
    end = hosted.partition.readable_end(fetch_offset, is_committed_only)
    high_watermark = hosted.high_watermark
    stable = end if is_committed_only else hosted.log.known_stable_offset(high_watermark)
    result = FetchedPartition(topic, number, 0, None, high_watermark, stable, hosted.log_start_offset, 0, [])
    return result, fetch_offset < end


def _refused(services: Services, asked: FetchPartition, error: Exception) -> FetchedPartition:
    code, message = translate(error)
    log_start_offset = high_watermark = NO_OFFSET
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        hosted = services.partitions.leader(asked.topic, asked.partition)
        log_start_offset, high_watermark = hosted.log_start_offset, hosted.high_watermark
    return FetchedPartition(
        asked.topic, asked.partition, code, message, high_watermark, high_watermark, log_start_offset, 0, []
    )
