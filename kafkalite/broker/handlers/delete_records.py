"""DeleteRecords: move a partition's log start forward.

Behaviour: ``before_offset`` is exclusive, LATEST (-1) means the high watermark. Whole segments below it go;
the rest can't be read any more. Never moves back. Answered when every replica in sync has moved its log
start, durably, so that whoever leads next starts there too; or after ``timeout_ms`` with REQUEST_TIMED_OUT:
the records are deleted here, and elsewhere a little later. Asked again, it waits for that.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, OFFSET_OUT_OF_RANGE (above the high watermark or
below -1), KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT, INVALID_TOPIC_EXCEPTION (an internal topic).
"""

from __future__ import annotations

import asyncio
from functools import partial

from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.waiters import ReachedWaiter, Waiters
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Pending, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import RequestTimedOutError
from kafkalite.model import NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    DeletedRecords,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
)

MAX_TIMEOUT_MS = 2**31 - 1


def handle(services: Services, request: Request, _client: Client) -> Pending:
    message: DeleteRecordsRequest = request.message
    deletion = _Deletion(services.waiters, message.partitions)
    for number, asked in enumerate(message.partitions):
        try:
            refuse_internal(asked.topic)
            hosted = services.partitions.leader(asked.topic, asked.partition)
            deletion.begin(number, hosted, hosted.partition.deletion_end(asked.before_offset))
        except Exception as error:
            deletion.finish(number, error, None)
    return deletion.wait(message.timeout_ms)


class _Deletion:
    """One request: each partition is first deleted from here, then waits for its replicas in sync."""

    __slots__ = ("_asked", "_open", "_pending", "_results", "_timer", "_waiters")

    def __init__(self, waiters: Waiters, asked: list[DeleteRecordsPartition]) -> None:
        self._waiters = waiters
        self._asked = asked
        self._results: list[DeletedRecords | None] = [None] * len(asked)
        self._open: dict[int, ReachedWaiter | None] = dict.fromkeys(range(len(asked)))
        self._pending = Pending(self._release)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, number: int, hosted: HostedPartition, offset: int) -> None:
        hosted.delete_before(offset, partial(self._on_deleted, number, hosted, offset))

    def _on_deleted(self, number: int, hosted: HostedPartition, offset: int, error: Exception | None) -> None:
        """From this broker's log, or not."""
        if number not in self._open:
            return
        if error is not None or hosted.partition.low_watermark >= offset:
            self.finish(number, error, hosted)
            return
        then = partial(self.finish, number, hosted=hosted)
        self._open[number] = self._waiters.deleted(hosted.key, offset, then)

    def finish(self, number: int, error: Exception | None, hosted: HostedPartition | None) -> None:
        """It is known how it went for a partition."""
        if number not in self._open:
            return
        del self._open[number]
        topic, partition, _ = self._asked[number]
        if error is None and hosted is not None:
            deleted = DeletedRecords(topic, partition, 0, None, hosted.log_start_offset)
        else:
            assert error is not None
            deleted = DeletedRecords(topic, partition, *translate(error), NO_OFFSET)
        self._results[number] = deleted
        self._answer()

    def _answer(self) -> None:
        if not self._open:
            results = [result for result in self._results if result is not None]
            self._pending.resolve(Reply(DeleteRecordsResponse(0, None, results)))

    def wait(self, timeout_ms: int) -> Pending:
        if self._open:
            seconds = min(max(timeout_ms, 0), MAX_TIMEOUT_MS) / 1000
            self._timer = self._waiters.loop.call_later(seconds, self._expire, timeout_ms)
        else:
            self._answer()
        return self._pending

    def _expire(self, timeout_ms: int) -> None:
        error = RequestTimedOutError(
            f"not every replica in sync has deleted the records within {timeout_ms} ms; it will"
        )
        for number, waiter in list(self._open.items()):
            if waiter is not None:
                waiter.is_cancelled = True
            self.finish(number, error, None)

    def _release(self) -> None:
        """Answered, or the client is gone: what has begun goes on."""
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._open.values():
            if waiter is not None:
                waiter.is_cancelled = True
        self._open.clear()
