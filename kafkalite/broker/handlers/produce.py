"""Produce: appends record batches to partitions, and responds as ``acks`` requires."""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.coordination.transactions import Transactions
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.server.client import NOTHING_REFUSED, Client
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import Pending, PendingResults, Reply
from kafkalite.broker.server.turns import TurnServices, is_large, produce_by_turns
from kafkalite.clock import Clock
from kafkalite.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidRequiredAcksError,
    TopicAuthorizationFailedError,
    UnsupportedCompressionTypeError,
)
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, Acks
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    ProducedPartition,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
)
from kafkalite.records import header as batch_header
from kafkalite.records.readable import check_readable
from kafkalite.replication.partition import Partition
from kafkalite.security.acls import Operation
from kafkalite.storage.log import Appended

_new: Final = tuple.__new__  # half the time of a struct's constructor
_ACKS: Final = frozenset(int(acks) for acks in Acks)
_ACKS_ALL: Final = int(Acks.ALL)

_NOT_ACKNOWLEDGED: Final = "not acknowledged within %d ms; the batch is in the log"
_NOT_VERIFIED: Final = "no coordinator responded within %d ms"


class ProduceServices(TurnServices, Protocol):
    """The parts of a broker that this handler uses."""

    clock: Clock
    metrics: Metrics
    partitions: Partitions
    transactions: Transactions
    waiters: Waiters


def produce(services: ProduceServices, request: Request, client: Client) -> Reply | Pending:
    """Append one record batch to each partition.

    Behaviour: each partition has its own result, and an error in one does not affect the others. The response
    is sent when the batch is written to the operating system (``acks=0``), when the leader has it
    (``acks=1``), or when every in-sync replica has it (``all``). With ``durability=fsync`` a broker has a
    batch when it is synced. After ``timeout_ms`` the response is REQUEST_TIMED_OUT; a batch that was appended
    stays in the log, and may be acknowledged when it is sent again (R6, R28). If an idempotent producer
    repeats a batch, the result has the offsets of the first copy. The first batch of a transaction in a
    partition is appended after the coordinator of ``transactional_id`` has added the partition (R31).

    Deviation from Kafka: with ``acks=0`` there is a response too, and it reports errors.

    Errors: TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION (an internal
    topic), NOT_LEADER_OR_FOLLOWER (also if the leadership ended while the batch waited), CORRUPT_MESSAGE
    (header, length, CRC, columns), UNSUPPORTED_COMPRESSION_TYPE, UNSUPPORTED_FOR_MESSAGE_FORMAT (rows),
    MESSAGE_TOO_LARGE, INVALID_TIMESTAMP, INVALID_RECORD (a control batch, or a transactional one without a
    transactional id), NOT_ENOUGH_REPLICAS (nothing appended), NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID, INVALID_PRODUCER_EPOCH, POLICY_VIOLATION (too many
    idempotent producers), KAFKA_STORAGE_ERROR (disk full, log offline), REQUEST_TIMED_OUT; of transactional
    batches also INVALID_REQUIRED_ACKS (not all), INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING,
    PRODUCER_FENCED, CONCURRENT_TRANSACTIONS, COORDINATOR_NOT_AVAILABLE; of the whole request
    INVALID_REQUIRED_ACKS.
    """
    message: ProduceRequest = request.message
    acks, timeout_ms, transactional_id, partitions = message
    if len(partitions) > 1 and is_large(request):
        return produce_by_turns(produce, services, request, client)
    if acks not in _ACKS:
        raise InvalidRequiredAcksError(f"acks must be one of 0, 1, -1 (all); it is {acks}")
    if transactional_id is not None:
        return _produce_transactional(services, message, request.payload, transactional_id, client)
    now_ms = services.clock.wall_ms()
    metrics, payload, find = services.metrics, request.payload, services.partitions.leader
    refused = _refusals(client, partitions)
    results: list[ProducedPartition] = []
    waiting: PendingResults | None = None
    start = 0
    for topic, number, length_bytes in partitions:
        end = start + length_bytes
        batch = payload[start:end]
        start = end
        if topic in refused:
            results.append(_refused(topic, number, refused[topic]))
            continue
        try:
            partition = find(topic, number)
            appended = append(partition, batch, now_ms, acks)
        except Exception as error:
            results.append(_refused(topic, number, _precise(error, batch)))
            continue
        metrics.appended_batches += 1
        metrics.appended_bytes += length_bytes
        base_offset, last_offset, append_time_ms, _, _ = appended
        if acks and partition.acknowledged_end(acks) <= last_offset:
            waiters = services.waiters
            if waiting is None:
                waiting = PendingResults(waiters.loop, results, _failed, _reply)
            register = waiters.committed if acks == _ACKS_ALL else waiters.synced
            waiting.wait(len(results), register, partition.key, last_offset + 1)
        log_start_offset = partition.log_start_offset
        result = (topic, number, 0, None, base_offset, append_time_ms, log_start_offset)
        results.append(_new(ProducedPartition, result))
    if waiting is None:
        return _new(Reply, (_new(ProduceResponse, (0, None, results)), ()))
    return waiting.begin(timeout_ms, _NOT_ACKNOWLEDGED)


def _produce_transactional(
    services: ProduceServices,
    message: ProduceRequest,
    payload: memoryview,
    transactional_id: str,
    client: Client,
) -> PendingResults:
    """Append batches that may have to wait for the coordinator of their transaction."""
    acks, timeout_ms, _, partitions = message
    results = [
        ProducedPartition(topic, number, 0, None, NO_OFFSET, NO_TIMESTAMP, NO_OFFSET)
        for topic, number, _ in partitions
    ]
    waiting = PendingResults(services.waiters.loop, results, _failed, _reply)
    refused = _refusals(client, partitions)
    start = 0
    for index, (topic, number, length_bytes) in enumerate(partitions):
        end = start + length_bytes
        waiting.expect(index)
        batch = payload[start:end]
        start = end
        if topic in refused:
            waiting.set_error(index, refused[topic])
            continue
        try:
            refuse_internal(topic)  # before the coordinator adds the partition to the transaction
            partition = services.partitions.leader(topic, number)
            _append_transactional(services, waiting, index, partition, batch, transactional_id, acks)
        except Exception as error:
            waiting.set_error(index, _precise(error, batch))
    return waiting.begin(timeout_ms, _NOT_ACKNOWLEDGED, _NOT_VERIFIED)


def _append_transactional(
    services: ProduceServices,
    waiting: PendingResults,
    index: int,
    partition: Partition,
    batch: memoryview,
    transactional_id: str,
    acks: int,
) -> None:
    """Append one batch, if necessary after the coordinator has added the partition.

    Raises the errors of ``append``.
    """

    def on_appended(appended: Appended | None, error: Exception | None) -> None:
        if appended is None:
            assert error is not None, "one of the two"
            waiting.set_error(index, error)
            return
        services.metrics.appended_batches += 1
        services.metrics.appended_bytes += len(batch)
        if not waiting.is_expected(index):
            return
        base_offset, last_offset, append_time_ms, _, _ = appended
        result = ProducedPartition(
            *partition.key, 0, None, base_offset, append_time_ms, partition.log_start_offset
        )
        if partition.acknowledged_end(acks) > last_offset:
            waiting.set(index, result)
        else:
            waiting.results[index] = result
            register = services.waiters.committed if acks == _ACKS_ALL else services.waiters.synced
            waiting.wait(index, register, partition.key, last_offset + 1)

    header = batch_header.check(batch)
    check_readable(batch, header)
    verifications = services.transactions.verifications
    appended = verifications.append(partition, batch, header, transactional_id, acks, on_appended)
    if appended is not None:
        on_appended(appended, None)


def append(partition: Partition, batch: memoryview, now_ms: int, acks: int) -> Appended:
    """Check and append one batch. Raises the errors of ``produce``."""
    header = batch_header.check(batch)
    check_readable(batch, header)
    if header.attributes & batch_header.TRANSACTIONAL_BIT:
        raise InvalidRecordError("a transactional batch needs its producer's transactional id in the request")
    return partition.append(batch, header, now_ms, acks)


def _precise(error: Exception, batch: memoryview) -> Exception:
    """Return ``error``, or UnsupportedCompressionTypeError if a corrupt batch names an unknown codec."""
    if not isinstance(error, CorruptBatchError) or len(batch) < batch_header.HEADER_BYTES:
        return error
    attributes = int.from_bytes(
        batch[batch_header.ATTRIBUTES_POSITION : batch_header.ATTRIBUTES_POSITION + 2], "big"
    )
    codec = attributes & batch_header.CODEC_MASK
    if codec == batch_header.COLUMNAR:
        codec = attributes >> batch_header.COLUMN_CODEC_SHIFT & batch_header.CODEC_MASK
    if codec < len(batch_header.Codec):
        return error
    known = ", ".join(str(codec) for codec in batch_header.Codec)
    return UnsupportedCompressionTypeError(f"compression codec {codec} is unknown; expected one of {known}")


def _refusals(
    client: Client, partitions: Sequence[ProducePartition]
) -> Mapping[str, TopicAuthorizationFailedError]:
    if client.authorizer is None:
        return NOTHING_REFUSED
    return client.refusals(ApiKey.PRODUCE, Operation.WRITE, [topic for topic, _, _ in partitions])


def _refused(topic: str, number: int, error: Exception) -> ProducedPartition:
    code, message = translate(error)
    return ProducedPartition(topic, number, code, message, NO_OFFSET, NO_TIMESTAMP, NO_OFFSET)


def _failed(result: ProducedPartition, error: Exception) -> ProducedPartition:
    return _refused(result.topic, result.partition, error)


def _reply(results: list[ProducedPartition]) -> Reply:
    return Reply(ProduceResponse(0, None, results))
