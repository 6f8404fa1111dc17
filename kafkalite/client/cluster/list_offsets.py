"""Looks up the first and last offsets of partitions, and offsets by timestamp (ListOffsets)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import CallPlan, Verdict, judge_broker_error
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.retry import STORAGE_ERROR_PATIENCE_MS
from kafkalite.errors import (
    KafkaliteError,
    KafkaStorageError,
    LeaderNotAvailableError,
    UnknownTopicOrPartitionError,
    broker_error,
)
from kafkalite.model import MAX_TIMESTAMP, NO_OFFSET, IsolationLevel, OffsetAndTimestamp, TopicPartition
from kafkalite.protocol.messages.data import (
    FetchPartition,
    FetchRequest,
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
)
from kafkalite.records.batch import RecordBatch
from kafkalite.records.header import total_length

# A missing topic is an error only after this time, because it may be created soon.
MISSING_TOPIC_GRACE_MS: Final = 1_000


async def check_partitions(cluster: ClusterClient, tps: Mapping[TopicPartition, object]) -> None:
    """Raise UnknownTopicOrPartitionError if a key of ``tps`` does not exist.

    Waits up to MISSING_TOPIC_GRACE_MS for the metadata of the topics. Raises the errors of
    ``ClusterClient.topic_partition_count``.
    """
    deadline_ms = cluster.now_ms() + MISSING_TOPIC_GRACE_MS
    for topic in {tp.topic: None for tp in tps}:
        cluster.track(topic)
    for tp in tps:
        count = await cluster.topic_partition_count(tp.topic, deadline_ms)
        if not 0 <= tp.partition < count:
            raise UnknownTopicOrPartitionError(
                f"{tp.topic!r} has partitions 0 to {count - 1}, not {tp.partition}"
            )


async def list_offsets(
    cluster: ClusterClient,
    wanted: Mapping[TopicPartition, int],
    *,
    isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    timeout_ms: int | None = None,
) -> dict[TopicPartition, ListedOffset]:
    """Return the offset that ``wanted`` selects in each partition.

    ``wanted`` is {partition: EARLIEST, LATEST, MAX_TIMESTAMP or a timestamp in ms}. For a timestamp, the
    offset is the base offset of the first batch that has a record at or after the timestamp, or the log start
    offset if that is larger. It is NO_OFFSET if there is no such batch. Retries until ``timeout_ms`` (None:
    default.api.timeout.ms) has passed, but KAFKA_STORAGE_ERROR only for STORAGE_ERROR_PATIENCE_MS. Raises
    BrokerError, ConnectionFailedError, RequestTimeoutError.
    """
    if timeout_ms is None:
        timeout_ms = cluster.config.default_api_timeout_ms
    rules = replace(cluster.call_rules, judge=_judge)
    plan = CallPlan(
        rules,
        now_ms=cluster.now_ms(),
        timeout_ms=timeout_ms,
        is_located=True,
        timeout_error=cluster.explained,
    )
    await check_partitions(cluster, wanted)
    found: dict[TopicPartition, ListedOffset] = {}

    async def locate() -> None:
        cluster.request_refresh()

    async def dial(node_id: int | None) -> None:
        """Do nothing. Each leader is dialled when its request is sent."""

    async def send(_: None, timeout_ms: int) -> dict[TopicPartition, ListedOffset]:
        missing = {tp: time for tp, time in wanted.items() if tp not in found}
        if missing:
            listed, error = await _ask_leaders(cluster, missing, isolation_level, timeout_ms)
            found.update(listed)
            if error is not None:
                raise error
        return {tp: found[tp] for tp in wanted}

    return await drive(
        plan, locate=locate, dial=dial, send=send, chance=cluster.rng.random, setbacks=cluster.setbacks
    )


def _judge(error: KafkaliteError) -> Verdict:
    """Return the verdict of ``judge_broker_error``, with a time limit for retries of KAFKA_STORAGE_ERROR."""
    verdict = judge_broker_error(error)
    is_limited = isinstance(error, KafkaStorageError)
    return replace(verdict, limit_ms=STORAGE_ERROR_PATIENCE_MS) if is_limited else verdict


async def _ask_leaders(
    cluster: ClusterClient,
    wanted: Mapping[TopicPartition, int],
    isolation_level: IsolationLevel,
    timeout_ms: int,
) -> tuple[dict[TopicPartition, ListedOffset], KafkaliteError | None]:
    """Send one request to each leader. Return the results, and an error if a partition has no result."""
    by_leader: dict[int, list[ListOffsetsPartition]] = {}
    error: KafkaliteError | None = None
    for tp, timestamp_ms in wanted.items():
        leader = cluster.metadata.leader(tp)
        if leader.node_id < 0:
            error = LeaderNotAvailableError(f"{tp} has no leader")
            continue
        by_leader.setdefault(leader.node_id, []).append(
            ListOffsetsPartition(tp.topic, tp.partition, leader.leader_epoch, timestamp_ms)
        )

    async def ask(
        node_id: int, partitions: list[ListOffsetsPartition]
    ) -> list[ListedOffset] | KafkaliteError:
        request = ListOffsetsRequest(int(isolation_level), partitions)
        try:
            connection = await cluster.connection(node_id)
            response = await connection.call(request, timeout_ms=timeout_ms)
        except KafkaliteError as failure:
            return failure
        return list(response.message.partitions)

    found: dict[TopicPartition, ListedOffset] = {}
    for result in await asyncio.gather(*(ask(*request) for request in by_leader.items())):
        if isinstance(result, KafkaliteError):
            error = result
            continue
        for listed in result:
            tp = TopicPartition(listed.topic, listed.partition)
            if listed.error_code == 0:
                found[tp] = listed
            else:
                error = broker_error(listed.error_code, listed.error_message or "", about=str(tp))
    if error is None and len(found) < len(wanted):
        error = LeaderNotAvailableError("a broker omitted partitions from its response")
    return found, error


async def offsets_for_times(
    cluster: ClusterClient,
    wanted: Mapping[TopicPartition, int],
    *,
    isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """Return offset and timestamp of each partition's first record at or after the timestamp in ``wanted``.

    The result of a partition is None if all its records are older. For MAX_TIMESTAMP instead of a timestamp,
    the result is the first record with the highest timestamp. Brokers do not unpack batches, so this function
    fetches the record's batch and searches it. Raises the errors of ``list_offsets``, and RecordError for a
    batch that cannot be read.
    """
    listed = await list_offsets(cluster, wanted, isolation_level=isolation_level)
    found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    for tp, timestamp_ms in wanted.items():
        entry = listed[tp]
        found[tp] = None
        if entry.offset != NO_OFFSET:
            found[tp] = await _refine(cluster, tp, timestamp_ms, entry)
    return found


async def _refine(
    cluster: ClusterClient, tp: TopicPartition, timestamp_ms: int, entry: ListedOffset
) -> OffsetAndTimestamp:
    """Return the position of the first matching record in the batch at ``entry.offset``.

    If no record matches, return the position of ``entry``.
    """
    leader = cluster.metadata.leader(tp)
    partition = FetchPartition(tp.topic, tp.partition, leader.leader_epoch, entry.offset, 1)
    request = FetchRequest(0, 0, 1, int(IsolationLevel.READ_UNCOMMITTED), [partition])
    response = await cluster.call(request, node_id=leader.node_id)
    (result,) = response.message.partitions
    if result.error_code:
        raise broker_error(result.error_code, result.error_message or "", about=str(tp))
    if len(response.payload):
        batch = RecordBatch(response.payload[: total_length(response.payload)])
        header = batch.header
        least_ms = header.max_timestamp_ms if timestamp_ms == MAX_TIMESTAMP else timestamp_ms
        for record in batch.records(*tp):
            if record.timestamp_ms >= least_ms and record.offset >= entry.offset:
                return OffsetAndTimestamp(record.offset, record.timestamp_ms, header.leader_epoch)
    return OffsetAndTimestamp(entry.offset, entry.timestamp_ms, entry.leader_epoch)
