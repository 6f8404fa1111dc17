"""Where partitions begin and end, and where they pass a time: ListOffsets to the leaders, with retries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.retry import Backoff, is_retriable, needs_metadata
from kafkalite.errors import (
    KafkaliteError,
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

# A topic that the cluster does not know is looked for this long before that is an error: it may be about to
# be created.
MISSING_TOPIC_GRACE_MS: Final = 1_000


async def check_partitions(cluster: ClusterClient, tps: Mapping[TopicPartition, object]) -> None:
    """Raises UnknownTopicOrPartitionError, or a topic's own error, when one of ``tps`` is not there."""
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
    """The answer for each partition at its timestamp (or EARLIEST, LATEST, MAX_TIMESTAMP), by batch.

    What may pass is asked again until ``timeout_ms``. Raises BrokerError, ConnectionFailedError,
    RequestTimeoutError.
    """
    if timeout_ms is None:
        timeout_ms = cluster.config.default_api_timeout_ms
    deadline_ms = cluster.now_ms() + timeout_ms
    await check_partitions(cluster, wanted)
    backoff = Backoff(cluster.config.retry_backoff_ms, cluster.config.retry_backoff_max_ms)
    found: dict[TopicPartition, ListedOffset] = {}
    failures = 0
    while missing := {tp: time for tp, time in wanted.items() if tp not in found}:
        answered, error = await _ask_leaders(cluster, missing, isolation_level, deadline_ms)
        found.update(answered)
        if error is None:
            continue
        failures += 1
        pause_ms = backoff.delay_ms(failures, cluster.rng.random())
        if not is_retriable(error) or cluster.now_ms() + pause_ms >= deadline_ms:
            raise error
        if needs_metadata(error):
            cluster.request_refresh()
        await asyncio.sleep(pause_ms / 1000)
    return {tp: found[tp] for tp in wanted}


async def _ask_leaders(
    cluster: ClusterClient,
    wanted: Mapping[TopicPartition, int],
    isolation_level: IsolationLevel,
    deadline_ms: int,
) -> tuple[dict[TopicPartition, ListedOffset], KafkaliteError | None]:
    """One round: what was answered, and an error if anything was not."""
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
    found: dict[TopicPartition, ListedOffset] = {}
    for node_id, partitions in by_leader.items():
        request = ListOffsetsRequest(int(isolation_level), partitions)
        left_ms = max(1, min(cluster.config.request_timeout_ms, deadline_ms - cluster.now_ms()))
        try:
            connection = await cluster.connection(node_id)
            answer = await connection.call(request, timeout_ms=left_ms)
        except KafkaliteError as failure:
            error = failure
            continue
        for listed in answer.message.partitions:
            tp = TopicPartition(listed.topic, listed.partition)
            if listed.error_code == 0:
                found[tp] = listed
            else:
                error = broker_error(listed.error_code, listed.error_message or "", about=str(tp))
    if error is None and len(found) < len(wanted):
        error = LeaderNotAvailableError("a broker left partitions out of its answer")
    return found, error


async def offsets_for_times(
    cluster: ClusterClient,
    wanted: Mapping[TopicPartition, int],
    *,
    isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    timeout_ms: int | None = None,
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """The first record whose timestamp is not less, to the record; None where all are older.

    For MAX_TIMESTAMP the record with the highest. Brokers unpack no batches, so the batch is fetched here.
    """
    listed = await list_offsets(cluster, wanted, isolation_level=isolation_level, timeout_ms=timeout_ms)
    found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    for tp, timestamp_ms in wanted.items():
        entry = listed[tp]
        found[tp] = None
        if entry.offset != NO_OFFSET:
            found[tp] = await _refine(cluster, tp, timestamp_ms, entry, timeout_ms)
    return found


async def _refine(
    cluster: ClusterClient, tp: TopicPartition, timestamp_ms: int, entry: ListedOffset, timeout_ms: int | None
) -> OffsetAndTimestamp:
    """The exact record within the batch at ``entry.offset``; the batch's start if it can't be found there."""
    leader = cluster.metadata.leader(tp)
    partition = FetchPartition(tp.topic, tp.partition, leader.leader_epoch, entry.offset, 1)
    request = FetchRequest(0, 0, 1, int(IsolationLevel.READ_UNCOMMITTED), [partition])
    answer = await cluster.call(request, node_id=leader.node_id, timeout_ms=timeout_ms)
    (result,) = answer.message.partitions
    if result.error_code:
        raise broker_error(result.error_code, result.error_message or "", about=str(tp))
    if len(answer.payload):
        batch = RecordBatch(answer.payload[: total_length(answer.payload)])
        header = batch.header
        least_ms = header.max_timestamp_ms if timestamp_ms == MAX_TIMESTAMP else timestamp_ms
        for record in batch.records(*tp):
            if record.timestamp_ms >= least_ms and record.offset >= entry.offset:
                return OffsetAndTimestamp(record.offset, record.timestamp_ms, header.leader_epoch)
    return OffsetAndTimestamp(entry.offset, entry.timestamp_ms, entry.leader_epoch)
