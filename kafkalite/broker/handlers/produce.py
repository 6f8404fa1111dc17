"""Produce: one record batch per partition, appended as it came.

Behaviour: each partition is on its own; one that is refused does not keep the others from being appended.
``acks=0`` is answered when the batch is handed to the operating system, though its producer does not wait;
``acks=1`` when the leader has it, ``all`` when every replica in sync has it: with ``durability=fsync`` on
the disk. Or after ``timeout_ms`` with REQUEST_TIMED_OUT: the batch stays in the log, and may be
acknowledged to one who sends it again (R6, R28). A repeated batch is answered with its first offset.

Deviation from Kafka: ``acks=0`` is answered too, and so tells of errors.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER (also when the leadership ended while the batch
waited), CORRUPT_MESSAGE (header, length, CRC), UNSUPPORTED_COMPRESSION_TYPE, MESSAGE_TOO_LARGE,
INVALID_TIMESTAMP, INVALID_RECORD (control or transactional batch), NOT_ENOUGH_REPLICAS (nothing appended),
NOT_ENOUGH_REPLICAS_AFTER_APPEND, OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID, INVALID_PRODUCER_EPOCH,
KAFKA_STORAGE_ERROR (disk full, log offline), REQUEST_TIMED_OUT; of the whole request INVALID_REQUIRED_ACKS.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kafkalite.broker.answers import Pending, Reply
from kafkalite.broker.hosted_partition import HostedPartition
from kafkalite.broker.outcomes import translate
from kafkalite.broker.services import Client, Services
from kafkalite.broker.waiters import ReachedWaiter, Waiters
from kafkalite.errors import (
    CorruptBatchError,
    InvalidRequiredAcksError,
    RequestTimedOutError,
    UnsupportedCompressionTypeError,
)
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, Acks
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import ProducedPartition, ProduceRequest, ProduceResponse
from kafkalite.records import header as batch_header
from kafkalite.storage.log import Appended

MAX_TIMEOUT_MS: Final = 2**31 - 1

_ACKS: Final = frozenset(int(acks) for acks in Acks)
_ACKS_ALL: Final = int(Acks.ALL)


def handle(services: Services, request: Request, _client: Client) -> Reply | Pending:
    message: ProduceRequest = request.message
    acks, timeout_ms, partitions = message
    if acks not in _ACKS:
        raise InvalidRequiredAcksError(f"acks must be one of 0, 1, -1 (all); it is {acks}")
    now_ms = services.clock.wall_ms()
    metrics, payload, find = services.metrics, request.payload, services.partitions.leader
    results: list[ProducedPartition] = []
    waiting: _Acknowledgement | None = None
    start = 0
    for topic, number, length_bytes in partitions:
        end = start + length_bytes
        batch = payload[start:end]
        start = end
        try:
            hosted = find(topic, number)
            appended, acknowledged_end = append(hosted, batch, now_ms, acks)
        except Exception as error:
            results.append(_refused(topic, number, error))
            continue
        metrics.appended_batches += 1
        metrics.appended_bytes += length_bytes
        base_offset, last_offset, append_time_ms, _, _ = appended
        if acks and acknowledged_end <= last_offset:
            if waiting is None:
                waiting = _Acknowledgement(services.waiters, acks, results)
            waiting.add(hosted, last_offset + 1, len(results))
        log_start_offset = hosted.log.log_start_offset
        results.append(
            ProducedPartition(topic, number, 0, None, base_offset, append_time_ms, log_start_offset)
        )
    if waiting is None:
        return Reply(ProduceResponse(0, None, results))
    return waiting.begin(timeout_ms)


def append(hosted: HostedPartition, batch: memoryview, now_ms: int, acks: int) -> tuple[Appended, int]:
    """Check one batch and append it; with the end of what is acknowledged already.

    Raises what the module's errors say.
    """
    try:
        header = batch_header.check(batch)
    except CorruptBatchError as error:
        raise _unknown_codec(batch) or error from None
    return hosted.append(batch, header, now_ms, acks)


def _unknown_codec(batch: memoryview) -> UnsupportedCompressionTypeError | None:
    """The better error for a header whose fault is a codec nobody knows."""
    if len(batch) < batch_header.HEADER_BYTES:
        return None
    attributes = int.from_bytes(
        batch[batch_header.ATTRIBUTES_POSITION : batch_header.ATTRIBUTES_POSITION + 2], "big"
    )
    codec = attributes & batch_header.CODEC_MASK
    if codec == batch_header.COLUMNAR:
        codec = attributes >> batch_header.COLUMN_CODEC_SHIFT & batch_header.CODEC_MASK
    if codec < len(batch_header.Codec):
        return None
    known = ", ".join(str(codec) for codec in batch_header.Codec)
    return UnsupportedCompressionTypeError(f"compression codec {codec} is not known; these are: {known}")


def _refused(topic: str, number: int, error: Exception) -> ProducedPartition:
    code, message = translate(error)
    return ProducedPartition(topic, number, code, message, NO_OFFSET, NO_TIMESTAMP, NO_OFFSET)


class _Acknowledgement:
    """A produce request that waits until its batches are acknowledged, as its ``acks`` want it (R6)."""

    __slots__ = ("_loop", "_pending", "_results", "_timer", "_wait", "_waiting")

    def __init__(self, waiters: Waiters, acks: int, results: list[ProducedPartition]) -> None:
        self._loop = waiters.loop
        self._wait = waiters.committed if acks == _ACKS_ALL else waiters.synced
        self._results = results
        self._waiting: dict[int, ReachedWaiter] = {}
        self._pending = Pending(self._release)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, hosted: HostedPartition, offset: int, index: int) -> None:
        """Wait until ``offset`` is passed for ``results[index]``."""

        def on_reached(error: Exception | None) -> None:
            if self._waiting.pop(index, None) is not None:
                if error is not None:
                    self._fail(index, error)
                self._finish_when_complete()

        self._waiting[index] = self._wait(hosted.key, offset, on_reached)

    def begin(self, timeout_ms: int) -> Pending:
        seconds = min(max(timeout_ms, 0), MAX_TIMEOUT_MS) / 1000
        self._timer = self._loop.call_later(seconds, self._expire, timeout_ms)
        return self._pending

    def _finish_when_complete(self) -> None:
        if not self._waiting:
            self._pending.resolve(Reply(ProduceResponse(0, None, self._results)))

    def _expire(self, timeout_ms: int) -> None:
        error = RequestTimedOutError(f"not acknowledged within {timeout_ms} ms; the batch is in the log")
        for index, waiter in self._waiting.items():
            waiter.is_cancelled = True
            self._fail(index, error)
        self._waiting.clear()
        self._finish_when_complete()

    def _fail(self, index: int, error: Exception) -> None:
        result = self._results[index]
        self._results[index] = _refused(result.topic, result.partition, error)

    def _release(self) -> None:
        """Resolved, or the client is gone: the batches stay, nobody is told."""
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiting.values():
            waiter.is_cancelled = True
        self._waiting.clear()
