"""Produce: one record batch per partition, appended as it came.

Behaviour: each partition is on its own; one that is refused does not keep the others from being appended.
``acks=0`` is answered when the batch is handed to the operating system, though its producer does not wait;
``acks=1`` when the leader has it, ``all`` when every replica in sync has it: with ``durability=fsync`` on
the disk. Or after ``timeout_ms`` with REQUEST_TIMED_OUT: the batch stays in the log, and may be
acknowledged to one who sends it again (R6, R28). A repeated batch is answered with its first offset. The
first batch of a transaction in a partition is appended when the coordinator of ``transactional_id`` has
added the partition to the transaction (R31).

Deviation from Kafka: ``acks=0`` is answered too, and so tells of errors.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER (also when the leadership ended while the batch
waited), CORRUPT_MESSAGE (header, length, CRC), UNSUPPORTED_COMPRESSION_TYPE, MESSAGE_TOO_LARGE,
INVALID_TIMESTAMP, INVALID_RECORD (a control batch, or a transactional one without a transactional id),
NOT_ENOUGH_REPLICAS (nothing appended), NOT_ENOUGH_REPLICAS_AFTER_APPEND, OUT_OF_ORDER_SEQUENCE_NUMBER,
UNKNOWN_PRODUCER_ID, INVALID_PRODUCER_EPOCH, KAFKA_STORAGE_ERROR (disk full, log offline),
REQUEST_TIMED_OUT; of transactional batches also INVALID_REQUIRED_ACKS (not all), INVALID_TXN_STATE,
INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED, CONCURRENT_TRANSACTIONS, COORDINATOR_NOT_AVAILABLE; of the
whole request INVALID_REQUIRED_ACKS.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.waiters import ReachedWaiter, Waiters
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Pending, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import (
    CorruptBatchError,
    InvalidRecordError,
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
    acks, timeout_ms, transactional_id, partitions = message
    if acks not in _ACKS:
        raise InvalidRequiredAcksError(f"acks must be one of 0, 1, -1 (all); it is {acks}")
    if transactional_id is not None:
        return _produce_transactional(services, message, request.payload, transactional_id)
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


def _produce_transactional(
    services: Services, message: ProduceRequest, payload: memoryview, transactional_id: str
) -> Pending:
    """As ``handle``, with batches among them that may have to wait for their transaction's coordinator."""
    acks, timeout_ms, _, partitions = message
    results = [
        ProducedPartition(topic, number, 0, None, NO_OFFSET, NO_TIMESTAMP, NO_OFFSET)
        for topic, number, _ in partitions
    ]
    waiting = _Acknowledgement(services.waiters, acks, results)
    start = 0
    for index, (_, _, length_bytes) in enumerate(partitions):
        end = start + length_bytes
        _append_transactional(services, waiting, index, payload[start:end], transactional_id, acks)
        start = end
    return waiting.begin(timeout_ms)


def _append_transactional(
    services: Services,
    waiting: _Acknowledgement,
    index: int,
    batch: memoryview,
    transactional_id: str,
    acks: int,
) -> None:
    """Append one batch when its coordinator knows of it: at once, if it does; ``waiting`` hears of it."""
    topic, number = waiting.expect(index)
    try:
        refuse_internal(topic)  # before its coordinator takes the partition for a part of the transaction
        hosted = services.partitions.leader(topic, number)
        header = check(batch)
    except Exception as error:
        waiting.on_refused(index, error)
        return

    def on_appended(appended: tuple[Appended, int] | None, error: Exception | None) -> None:
        if appended is None:
            assert error is not None, "one of the two"
            waiting.on_refused(index, error)
            return
        services.metrics.appended_batches += 1
        services.metrics.appended_bytes += len(batch)
        waiting.on_appended(index, hosted, *appended)

    try:
        appended = services.transactions.verifications.append(
            hosted, batch, header, transactional_id, acks, on_appended
        )
    except Exception as error:
        waiting.on_refused(index, error)
    else:
        if appended is not None:
            on_appended(appended, None)


def append(hosted: HostedPartition, batch: memoryview, now_ms: int, acks: int) -> tuple[Appended, int]:
    """Check one batch and append it; with the end of what is acknowledged already.

    Raises what the module's errors say.
    """
    header = check(batch)
    if header.attributes & batch_header.TRANSACTIONAL_BIT:
        raise InvalidRecordError("a transactional batch comes with its producer's transactional id")
    return hosted.append(batch, header, now_ms, acks)


def check(batch: memoryview) -> batch_header.BatchHeader:
    """The header of one whole batch. Raises CorruptBatchError, UnsupportedCompressionTypeError."""
    try:
        return batch_header.check(batch)
    except CorruptBatchError as error:
        raise _unknown_codec(batch) or error from None


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

    __slots__ = ("_has_begun", "_loop", "_pending", "_results", "_timer", "_wait", "_waiting")

    def __init__(self, waiters: Waiters, acks: int, results: list[ProducedPartition]) -> None:
        self._loop = waiters.loop
        self._wait = waiters.committed if acks == _ACKS_ALL else waiters.synced
        self._results = results
        #: By index of the result; None: not appended yet, it waits for a coordinator (R31).
        self._waiting: dict[int, ReachedWaiter | None] = {}
        self._has_begun = False
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

    def expect(self, index: int) -> tuple[str, int]:
        """``results[index]`` is told by ``on_appended`` or ``on_refused``. Returns its topic and
        partition."""
        self._waiting[index] = None
        topic, number, *_ = self._results[index]
        return topic, number

    def on_refused(self, index: int, error: Exception) -> None:
        """A batch that was expected is not in the log."""
        if self._take(index):
            self._fail(index, error)
            self._finish_when_complete()

    def on_appended(
        self, index: int, hosted: HostedPartition, appended: Appended, acknowledged_end: int
    ) -> None:
        """A batch that was expected is in the log, acknowledged up to ``acknowledged_end``."""
        if self._take(index):
            base_offset, last_offset, append_time_ms, _, _ = appended
            log_start_offset = hosted.log.log_start_offset
            self._results[index] = ProducedPartition(
                *hosted.key, 0, None, base_offset, append_time_ms, log_start_offset
            )
            if acknowledged_end <= last_offset:
                self.add(hosted, last_offset + 1, index)
            self._finish_when_complete()

    def _take(self, index: int) -> bool:
        """Whether somebody still waits for what was expected; if so, not any more."""
        if self._waiting.get(index, self) is None:
            del self._waiting[index]
            return True
        return False

    def begin(self, timeout_ms: int) -> Pending:
        """All is appended or expected: the answer, which comes after ``timeout_ms`` at the latest."""
        self._has_begun = True
        if self._waiting:
            seconds = min(max(timeout_ms, 0), MAX_TIMEOUT_MS) / 1000
            self._timer = self._loop.call_later(seconds, self._expire, timeout_ms)
        self._finish_when_complete()
        return self._pending

    def _finish_when_complete(self) -> None:
        if self._has_begun and not self._waiting:
            self._pending.resolve(Reply(ProduceResponse(0, None, self._results)))

    def _expire(self, timeout_ms: int) -> None:
        error = RequestTimedOutError(f"not acknowledged within {timeout_ms} ms; the batch is in the log")
        for index, waiter in self._waiting.items():
            if waiter is None:
                self._fail(index, RequestTimedOutError(f"no coordinator answered within {timeout_ms} ms"))
            else:
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
            if waiter is not None:
                waiter.is_cancelled = True
        self._waiting.clear()
