"""Fetch: whole batches from an offset on, as they are stored in the segments."""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import AppendedWaiter, Key, Waiters
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import STOPS, translate
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import HeldResponse, Pending, Reply, Response
from kafkalite.errors import BrokerError, ErrorCode, InvalidRequestError, StorageError
from kafkalite.model import NO_OFFSET, IsolationLevel
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    AbortedTransaction,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchResponse,
)

_IS_READ_COMMITTED: Final = {int(level): level is IsolationLevel.READ_COMMITTED for level in IsolationLevel}


class FetchServices(Protocol):
    """The parts of a broker that this handler uses."""

    config: BrokerConfig
    metrics: Metrics
    partitions: Partitions
    waiters: Waiters
    is_stopping: bool

    def on_broken(self, error: BaseException, /) -> None: ...


class _Read(NamedTuple):
    """A response that could be sent now."""

    reply: Reply
    size_bytes: int
    is_final: bool  #: whether to send it now: a partition failed, or a watched one has data

    def missing_bytes(self, message: FetchRequest) -> int:
        """Return how many more bytes must become readable; 1 if an open transaction holds some back."""
        partitions = self.reply.message.partitions
        if any(one.last_stable_offset < one.high_watermark for one in partitions):
            return min(1, message.min_bytes - self.size_bytes)
        return message.min_bytes - self.size_bytes


def fetch(services: FetchServices, request: Request, _client: Client) -> Reply | Pending:
    """Return record batches from an offset on, as they are stored.

    Behaviour: reads each partition below its high watermark until the response has ``max_bytes``; its first
    batch is complete however large. With fewer than ``min_bytes`` the request waits for more, at most
    ``max_wait_ms``, and reads again. If a partition fails, the response is sent at once with its error and
    the data of the others. The payload consists of views of the segments' maps: nothing is copied here.

    With ``read_committed`` each partition is read below its last stable offset, and the response lists the
    aborted transactions among its batches (R11, R33); the reader filters them out.

    A partition with ``max_bytes`` 0 is only watched: the response has its offsets and no data, and as soon as
    there is a readable batch at or behind ``fetch_offset``, it is sent, whatever ``min_bytes``.

    Deviations from Kafka: a partition with ``max_bytes`` 0 gets no batch. No fetch sessions. Without
    ``read_committed`` the last stable offset is the one known so far: finding it may need a scan of the log,
    which is not started for that.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    OFFSET_NOT_AVAILABLE (a new leader does not know it yet), OFFSET_OUT_OF_RANGE (with the log start and the
    high watermark), KAFKA_STORAGE_ERROR; of the whole request INVALID_REQUEST (an unknown isolation level).
    """
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
    return _hold(services, message, read)


def _hold(services: FetchServices, message: FetchRequest, read: _Read) -> HeldResponse:
    """Hold the response until there may be enough data, then read again; at most ``max_wait_ms``."""
    waiters, find_leader = services.waiters, services.partitions.leader
    keys = [(asked.topic, asked.partition) for asked in message.partitions]
    is_watching = any(asked.max_bytes <= 0 for asked in message.partitions)
    is_committed_only = is_read_committed(message.isolation_level)
    stable_offsets: dict[Key, int] = {}  # the last stable offsets that were read, with read_committed
    waiter: AppendedWaiter

    def has_more_stable(key: Key) -> bool:
        try:
            return find_leader(*key).last_stable_offset > stable_offsets[key]
        except (BrokerError, StorageError):
            return True  # the next read raises the error

    def wait(read: _Read) -> None:
        nonlocal waiter, stable_offsets
        missing_bytes = 1 if is_watching else message.min_bytes - read.size_bytes
        is_readable = None
        if is_committed_only:
            missing_bytes = min(missing_bytes, read.missing_bytes(message))
            partitions = read.reply.message.partitions
            stable_offsets = {(one.topic, one.partition): one.last_stable_offset for one in partitions}
            is_readable = has_more_stable
        waiter = waiters.appended(keys, missing_bytes, held.update, is_readable)

    def ask() -> Response | None:
        try:
            read = _read(services, message)
        except AssertionError as error:
            services.on_broken(error)
            return STOPS
        waiter.cancel()
        is_enough = read.size_bytes >= message.min_bytes or read.is_final
        if not is_enough and not held.is_over and not services.is_stopping:
            wait(read)
            return None
        services.metrics.fetched_bytes += read.size_bytes
        return read.reply

    held = HeldResponse(waiters.loop, message.max_wait_ms, ask, on_cancel=lambda: waiter.cancel())
    wait(read)
    held.offer(None)
    return held


def is_read_committed(isolation_level: int) -> bool:
    """Return whether a request reads committed records only.

    Raises InvalidRequestError for an unknown level.
    """
    is_committed_only = _IS_READ_COMMITTED.get(isolation_level)
    if is_committed_only is None:
        raise InvalidRequestError(f"isolation level {isolation_level} is neither 0 nor 1")
    return is_committed_only


def _read(services: FetchServices, message: FetchRequest) -> _Read:
    left_bytes = min(message.max_bytes, services.config.fetch_max_bytes)
    results: list[FetchedPartition] = []
    buffers: list[Any] = []
    size_bytes = 0
    is_final = False
    is_committed_only = is_read_committed(message.isolation_level)
    for asked in message.partitions:
        try:
            if asked.max_bytes <= 0:
                result, has_data = _watch_partition(services, asked, is_committed_only)
                is_final = is_final or has_data
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
    services: FetchServices,
    asked: FetchPartition,
    left_bytes: int,
    earlier_bytes: int,
    is_committed_only: bool,
) -> tuple[FetchedPartition, list[memoryview]]:
    """Read one partition.

    Unless this is the first data in the response, no batch may exceed ``left_bytes``.
    """
    topic, number, leader_epoch, fetch_offset, max_bytes = asked
    partition = services.partitions.leader(topic, number, leader_epoch)
    read = partition.read(fetch_offset, min(max_bytes, left_bytes), is_committed_only)
    high_watermark = partition.high_watermark
    length_bytes, buffers = read.size_bytes, read.buffers
    if earlier_bytes and length_bytes > left_bytes:
        length_bytes, buffers = 0, []
    aborted: list[AbortedTransaction] = []
    if is_committed_only:
        stable = partition.last_stable_offset
        if buffers:
            found = partition.aborted_between(fetch_offset, read.next_offset)
            aborted = [AbortedTransaction(producer_id, first_offset) for producer_id, first_offset in found]
    else:
        stable = partition.known_stable_offset(high_watermark)
    result = FetchedPartition(
        topic, number, 0, None, high_watermark, stable, partition.log_start_offset, length_bytes, aborted
    )
    return result, buffers


def _watch_partition(
    services: FetchServices, asked: FetchPartition, is_committed_only: bool
) -> tuple[FetchedPartition, bool]:
    """Return the partition's offsets, and whether a batch could be read from ``fetch_offset`` on."""
    topic, number, leader_epoch, fetch_offset, _ = asked
    partition = services.partitions.leader(topic, number, leader_epoch)
    end = partition.readable_end(fetch_offset, is_committed_only)
    high_watermark = partition.high_watermark
    stable = end if is_committed_only else partition.known_stable_offset(high_watermark)
    log_start_offset = partition.log_start_offset
    result = FetchedPartition(topic, number, 0, None, high_watermark, stable, log_start_offset, 0, [])
    return result, fetch_offset < end


def _refused(services: FetchServices, asked: FetchPartition, error: Exception) -> FetchedPartition:
    code, message = translate(error)
    log_start_offset = high_watermark = NO_OFFSET
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        partition = services.partitions.leader(asked.topic, asked.partition)
        log_start_offset, high_watermark = partition.log_start_offset, partition.high_watermark
    return FetchedPartition(
        asked.topic, asked.partition, code, message, high_watermark, high_watermark, log_start_offset, 0, []
    )
