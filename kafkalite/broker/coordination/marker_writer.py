"""Appends the markers of ended transactions to the partitions that this broker leads.

Each marker is an ordinary replicated batch. It is acknowledged when every in-sync replica has it (R33). If
the log already has the marker, it is not appended again, but its commit is awaited. A commit marker in
``__consumer_offsets`` puts the transaction's offsets into effect when it is appended, which is before its
acknowledgement (R35).
"""

# Tests: tests/broker/test_transactions.py

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import PendingResults, Reply
from kafkalite.clock import Clock
from kafkalite.protocol.messages.transactions import (
    TxnMarker,
    TxnPartitionResult,
    WriteTxnMarkersResponse,
    WrittenMarker,
)
from kafkalite.replication.partition import Partition

#: A marker that is not committed in this time stays in the log, and the coordinator sends it again.
COMMIT_TIMEOUT_MS: Final = 1_000

OnMarker = Callable[[Partition, int, bool], None]
"""Called with a partition, a producer id, and whether its transaction is committed."""


class MarkerWriter:
    """Appends markers and waits until they are committed."""

    def __init__(self, partitions: Partitions, waiters: Waiters, clock: Clock, on_marker: OnMarker) -> None:
        """``on_marker`` applies or drops a transaction's offsets. It is called after each appended marker."""
        self._partitions = partitions
        self._waiters = waiters
        self._clock = clock
        self._on_marker = on_marker

    def write(self, markers: Sequence[TxnMarker]) -> PendingResults:
        """Append all markers. The result is a WriteTxnMarkersResponse when each is committed or has failed.

        Errors of a partition: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, NOT_ENOUGH_REPLICAS,
        KAFKA_STORAGE_ERROR, TRANSACTION_COORDINATOR_FENCED (R32), INVALID_PRODUCER_EPOCH (the log has a later
        transaction of the producer), REQUEST_TIMED_OUT (appended, but not committed in time).
        """
        results = [
            TxnPartitionResult(topic, partition, 0, None)
            for marker in markers
            for topic, partition in marker.partitions
        ]

        def respond(results: Sequence[TxnPartitionResult]) -> Reply:
            written: list[WrittenMarker] = []
            start = 0
            for marker in markers:
                end = start + len(marker.partitions)
                written.append(WrittenMarker(marker.producer_id, 0, None, list(results[start:end])))
                start = end
            return Reply(WriteTxnMarkersResponse(0, None, written))

        waiting = PendingResults(self._waiters.loop, results, _failed, respond)
        now_ms = self._clock.wall_ms()
        index = 0
        for marker in markers:
            for _ in marker.partitions:
                self._append(waiting, index, marker, now_ms)
                index += 1
        return waiting.begin(COMMIT_TIMEOUT_MS, "not committed within %d ms; the marker is in the log")

    def _append(self, waiting: PendingResults, index: int, marker: TxnMarker, now_ms: int) -> None:
        producer_id, producer_epoch, coordinator_epoch, is_commit, _ = marker
        result: TxnPartitionResult = waiting.results[index]
        try:
            partition = self._partitions.leader(result.topic, result.partition)
            appended = partition.append_marker(
                producer_id, producer_epoch, coordinator_epoch, is_commit, now_ms
            )
        except Exception as error:
            waiting.results[index] = _failed(result, error)
            return
        if not appended.is_duplicate:
            self._on_marker(partition, producer_id, is_commit)
        end_offset = appended.last_offset + 1
        if not self.is_committed(end_offset, partition.high_watermark):
            waiting.wait(index, self._waiters.committed, partition.key, end_offset)

    @staticmethod
    def is_committed(end_offset: int, high_watermark: int) -> bool:
        """Whether a marker is committed. Only then may its transaction complete (R33)."""
        return end_offset <= high_watermark


def _failed(result: TxnPartitionResult, error: Exception) -> TxnPartitionResult:
    return TxnPartitionResult(result.topic, result.partition, *translate(error))
