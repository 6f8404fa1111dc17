"""Puts the markers of ended transactions into the partitions that this broker leads, and waits for them.

Each is an ordinary replicated batch: it counts when every replica in sync has it (R33). One that is there
already is not appended again, but waited for. In a partition of ``__consumer_offsets`` the transaction's
offsets take effect in the same step, so they have when the marker is acknowledged (R35).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kafkalite import mutants
from kafkalite.broker.partitions.waiters import ReachedWaiter
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Pending, Reply
from kafkalite.errors import RequestTimedOutError
from kafkalite.protocol.messages.transactions import (
    TxnMarker,
    TxnPartitionResult,
    WriteTxnMarkersResponse,
    WrittenMarker,
)

if TYPE_CHECKING:
    from kafkalite.broker.server.services import Services

#: Who asked asks again for what took longer: it is in the log by then.
COMMIT_TIMEOUT_MS: Final = 1_000


def write_markers(services: Services, markers: Sequence[TxnMarker]) -> Pending:
    """Append all of them. Resolved with a WriteTxnMarkersResponse when each is committed, or was refused.

    Errors of a partition: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, NOT_ENOUGH_REPLICAS,
    KAFKA_STORAGE_ERROR, TRANSACTION_COORDINATOR_FENCED (R32), INVALID_PRODUCER_EPOCH (a later transaction
    of the producer has ended there), REQUEST_TIMED_OUT (appended, and not committed in time).
    """
    writing = _Writing(services, markers)
    return writing.begin()


class _Writing:
    """One request: the result of each marker in each partition, in the request's order."""

    __slots__ = ("_has_begun", "_markers", "_pending", "_results", "_services", "_timer", "_waiting")

    def __init__(self, services: Services, markers: Sequence[TxnMarker]) -> None:
        self._services = services
        self._markers = markers
        self._results: list[TxnPartitionResult] = []
        self._waiting: dict[int, ReachedWaiter] = {}  # by index of the result
        self._has_begun = False
        self._pending = Pending(self._release)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> Pending:
        now_ms = self._services.clock.wall_ms()
        for marker in self._markers:
            for topic, partition in marker.partitions:
                self._results.append(TxnPartitionResult(topic, partition, 0, None))
                self._write(len(self._results) - 1, marker, now_ms)
        self._has_begun = True
        if self._waiting:
            loop = self._services.waiters.loop
            self._timer = loop.call_later(COMMIT_TIMEOUT_MS / 1000, self._expire)
        self._finish_when_complete()
        return self._pending

    def _write(self, index: int, marker: TxnMarker, now_ms: int) -> None:
        services, result = self._services, self._results[index]
        producer_id, producer_epoch, coordinator_epoch, is_commit, _ = marker
        try:
            hosted = services.partitions.leader(result.topic, result.partition)
            appended, acknowledged_end = hosted.append_marker(
                producer_id, producer_epoch, coordinator_epoch, is_commit, now_ms
            )
        except Exception as error:
            self._fail(index, error)
            return
        if not appended.is_duplicate:
            services.coordinators.on_marker(hosted, producer_id, is_commit)
        if acknowledged_end <= appended.last_offset and "R33-marker-uncommitted" not in mutants.ACTIVE:

            def on_reached(error: Exception | None) -> None:
                if self._waiting.pop(index, None) is not None:
                    if error is not None:
                        self._fail(index, error)
                    self._finish_when_complete()

            end_offset = appended.last_offset + 1
            self._waiting[index] = services.waiters.committed(hosted.key, end_offset, on_reached)

    def _fail(self, index: int, error: Exception) -> None:
        topic, partition, _, _ = self._results[index]
        self._results[index] = TxnPartitionResult(topic, partition, *translate(error))

    def _finish_when_complete(self) -> None:
        if self._waiting or not self._has_begun:
            return
        written: list[WrittenMarker] = []
        start = 0
        for marker in self._markers:
            end = start + len(marker.partitions)
            written.append(WrittenMarker(marker.producer_id, 0, None, self._results[start:end]))
            start = end
        self._pending.resolve(Reply(WriteTxnMarkersResponse(0, None, written)))

    def _expire(self) -> None:
        error = RequestTimedOutError(f"not committed within {COMMIT_TIMEOUT_MS} ms; the marker is in the log")
        for index in list(self._waiting):
            self._waiting.pop(index).is_cancelled = True
            self._fail(index, error)
        self._finish_when_complete()

    def _release(self) -> None:
        """Answered, or nobody waits any more: the markers stay."""
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiting.values():
            waiter.is_cancelled = True
        self._waiting.clear()
