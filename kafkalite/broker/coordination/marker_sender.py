"""Sends the markers of decided transactions (R32).

When all markers of a transaction are written, the coordinator is notified. The coordinator's replayed state
alone determines the markers to send (``TransactionMachine.pending_markers``), so a new coordinator continues
where the previous one ended. Markers are sent after their decision is committed. Each marker is sent to the
leader of its partition, again and again until it is committed there, for as long as this broker coordinates
the transaction. The marker of a deleted partition counts as written.

    pending ──decision committed──► routed by leader ──written──► all partitions: MarkersWritten ──► complete
                                       ▲        └──refused, lost, no leader──► later ──┐
                                       └───────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kafkalite.broker.coordination.shard import Shard
from kafkalite.broker.server.responses import Pending, Refusal, Response
from kafkalite.broker.tasks import TaskSet
from kafkalite.errors import ErrorCode, KafkaliteError
from kafkalite.log_fields import Fields
from kafkalite.metadata.image import ClusterImage
from kafkalite.protocol.messages.transactions import (
    TxnMarker,
    TxnPartition,
    TxnPartitionResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from kafkalite.transactions.commands import MarkersWritten, PendingMarker

logger = logging.getLogger(__name__)

MAX_PARTITIONS_PER_REQUEST: Final = 1_000
#: The maximum of concurrent requests to one broker. Several, so that a slow replica delays few transactions.
MAX_IN_FLIGHT: Final = 4
FIRST_RETRY_MS: Final = 20
MAX_RETRY_MS: Final = 500
#: The attempt, some seconds after the first one, at which a warning is logged.
WARN_ATTEMPT: Final = 12

#: Results that count as written: the partition has this marker, or a marker of a later transaction.
_WRITTEN: Final = frozenset({ErrorCode.NONE, ErrorCode.INVALID_PRODUCER_EPOCH})


Send = Callable[[int, WriteTxnMarkersRequest], Awaitable[WriteTxnMarkersResponse]]
"""Sends a request to the broker with this node id, which writes markers. Raises KafkaliteError."""

_Key = tuple[str, int, int]


@dataclass(slots=True, eq=False)
class _Work:
    """The markers of one transaction.

    ``open`` has the partitions whose marker is not written yet. Once the decision is committed, each of them
    is in a route, in flight or in ``later``.
    """

    shard: Shard
    marker: PendingMarker
    end_offset: int  #: the decision is below this offset in the shard's log
    open: dict[TxnPartition, None]
    later: list[TxnPartition] = field(default_factory=list)
    attempt: int = 0
    reason: object = "no leader"  #: why markers are not written yet
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Ending:
    """The decided but incomplete transactions of one shard.

    ``waiting`` has those whose decision may still be uncommitted, in the order of the decisions.
    """

    works: dict[_Key, _Work] = field(default_factory=dict)
    waiting: deque[_Work] = field(default_factory=deque)
    last_seen: PendingMarker | None = None  #: the newest decision that was added


@dataclass(slots=True, eq=False)
class _Route:
    """The markers that wait to be sent to one broker, and the number of its requests in flight."""

    node_id: int
    waiting: deque[tuple[_Work, TxnPartition]] = field(default_factory=deque)
    in_flight: int = 0


class MarkerSender:
    """Sends the markers of decided transactions that this broker coordinates, until all are written."""

    def __init__(
        self,
        send: Send,
        image: Callable[[], ClusterImage],
        tasks: TaskSet,
        loop: asyncio.AbstractEventLoop,
        on_complete: Callable[[str], None],
    ) -> None:
        """``on_complete(transactional_id)`` is called when all markers of a transaction are written."""
        self._send = send
        self._image = image
        self._tasks = tasks
        self._loop = loop
        self._on_complete = on_complete
        self._endings: dict[Shard, _Ending] = {}
        self._routes: dict[int, _Route] = {}
        self._late: dict[_Work, None] = {}  # transactions with partitions that wait for a retry
        self._topics: object = None

    def __len__(self) -> int:
        """Return the number of transactions that are decided but not complete."""
        return sum(len(ending.works) for ending in self._endings.values())

    def on_change(self, shard: Shard) -> None:
        """Send the markers of newly committed decisions. Called after each change of the shard."""
        if shard.is_closed:
            return
        pending: Sequence[PendingMarker] = shard.machine.pending_markers()
        ending = self._endings.get(shard)
        if ending is None:
            if not pending:
                return
            ending = self._endings[shard] = _Ending()
        if pending and pending[-1] is not ending.last_seen:  # pending is in the order of the log
            self._add_new(shard, ending, pending)
        high_watermark = shard.high_watermark
        while ending.waiting and ending.waiting[0].end_offset <= high_watermark:
            work = ending.waiting.popleft()
            self._route(work, list(work.open))
            self._finish_when_written(work)

    def _add_new(self, shard: Shard, ending: _Ending, pending: Sequence[PendingMarker]) -> None:
        """Add new decisions, which are committed once the high watermark reaches the current log end."""
        ending.last_seen = pending[-1]
        for marker in pending:
            if marker.key not in ending.works:
                work = _Work(shard, marker, shard.end_offset, dict.fromkeys(marker.partitions))
                ending.works[marker.key] = work
                ending.waiting.append(work)

    def on_close(self, shard: Shard) -> None:
        """Stop sending the markers of a shard. The next coordinator of its partition sends them."""
        ending = self._endings.pop(shard, None)
        if ending is not None:
            for work in ending.works.values():
                self._late.pop(work, None)
                if work.timer is not None:
                    work.timer.cancel()

    def on_image(self, image: ClusterImage) -> None:
        """If topics have changed, send all markers that wait for a retry: there may be new leaders."""
        if self._late and image.topics is not self._topics:
            self._topics = image.topics
            for work in list(self._late):
                self._loop.call_soon(self._retry, work)

    def close(self) -> None:
        """Stop sending all markers, because the broker stops."""
        for shard in list(self._endings):
            self.on_close(shard)

    def _route(self, work: _Work, partitions: Sequence[TxnPartition]) -> None:
        topics = self._image().topics
        for at in partitions:
            topic = topics.get(at.topic)
            if topic is None or at.partition >= len(topic.partitions):
                del work.open[at]
                continue
            leader = topic.partitions[at.partition].leader
            if leader < 0:
                self._put_off(work, at)
                continue
            route = self._routes.get(leader)
            if route is None:
                route = self._routes[leader] = _Route(leader)
            route.waiting.append((work, at))
            if len(route.waiting) == 1 and route.in_flight < MAX_IN_FLIGHT:
                self._start(route)

    def _start(self, route: _Route) -> None:
        route.in_flight += 1
        self._tasks.start(self._carry(route), name=f"send markers to broker {route.node_id}")

    async def _carry(self, route: _Route) -> None:
        try:
            await asyncio.sleep(0)  # collects further markers of this iteration of the loop
            while route.waiting:
                batch = self._take(route)
                if not batch:
                    break
                if route.waiting and route.in_flight < MAX_IN_FLIGHT:
                    self._start(route)
                await self._deliver(route.node_id, batch)
        finally:
            route.in_flight -= 1

    def _take(self, route: _Route) -> dict[_Work, list[TxnPartition]]:
        """Remove the markers for the next request from the route, and return them by transaction."""
        batch: dict[_Work, list[TxnPartition]] = {}
        count = 0
        while route.waiting and count < MAX_PARTITIONS_PER_REQUEST:
            work, at = route.waiting.popleft()
            if self._is_current(work) and at in work.open:
                batch.setdefault(work, []).append(at)
                count += 1
        return batch

    async def _deliver(self, node_id: int, batch: dict[_Work, list[TxnPartition]]) -> None:
        request = WriteTxnMarkersRequest(
            [
                TxnMarker(
                    work.marker.producer_id,
                    work.marker.producer_epoch,
                    work.shard.coordinator_epoch,
                    work.marker.is_commit,
                    partitions,
                )
                for work, partitions in batch.items()
            ]
        )
        results: list[Sequence[TxnPartitionResult]]
        reason: object = "no response"
        try:
            response = await self._send(node_id, request)
            results = [written.partitions for written in response.markers]
        except KafkaliteError as error:
            reason = error.message
            results = []
        for number, (work, partitions) in enumerate(batch.items()):
            if self._is_current(work):
                answered = results[number] if number < len(results) else ()
                self._record(work, partitions, answered, reason)

    def _record(
        self,
        work: _Work,
        partitions: Sequence[TxnPartition],
        answered: Sequence[TxnPartitionResult],
        reason: object,
    ) -> None:
        """Process the results ``answered`` for the markers of one transaction that were sent to a broker.

        Markers without a result failed for ``reason``. Markers without a result, and markers whose result is
        not in ``_WRITTEN``, are sent again later.
        """
        outcomes = {(one.topic, one.partition): one for one in answered}
        for at in partitions:
            outcome = outcomes.get((at.topic, at.partition))
            if outcome is not None and outcome.error_code in _WRITTEN:
                work.open.pop(at, None)
            else:
                work.reason = reason if outcome is None else outcome.error_message
                self._put_off(work, at)
        self._finish_when_written(work)

    def _put_off(self, work: _Work, at: TxnPartition) -> None:
        work.later.append(at)
        if work.timer is None:
            self._late[work] = None
            delay_ms = min(FIRST_RETRY_MS << min(work.attempt, 10), MAX_RETRY_MS)
            work.timer = self._loop.call_later(delay_ms / 1000, self._retry, work)

    def _retry(self, work: _Work) -> None:
        self._late.pop(work, None)
        if work.timer is not None:
            work.timer.cancel()
            work.timer = None
        if not self._is_current(work):
            return
        work.attempt += 1
        if work.attempt == WARN_ATTEMPT:
            logger.warning(
                "a transaction still lacks markers %s",
                Fields(name=work.marker.transactional_id, partitions=len(work.open), reason=work.reason),
            )
        partitions, work.later = work.later, []
        self._route(work, partitions)
        self._finish_when_written(work)

    def _is_current(self, work: _Work) -> bool:
        ending = self._endings.get(work.shard)
        return ending is not None and ending.works.get(work.marker.key) is work

    def _finish_when_written(self, work: _Work) -> None:
        if work.open or not self._is_current(work):
            return
        marker, shard = work.marker, work.shard
        response = shard.submit(MarkersWritten(*marker.key, marker.partitions))
        ending = self._endings.get(shard)
        if ending is not None:  # ``submit`` may have closed the shard
            ending.works.pop(marker.key, None)
            if not ending.works:
                del self._endings[shard]
        then = partial(self._on_recorded, work)
        if isinstance(response, Pending):
            response.then(then)
        else:
            then(response)
        self._on_complete(marker.transactional_id)

    def _on_recorded(self, work: _Work, response: Response) -> None:
        """If the coordinator could not record that all markers are written, send them again later."""
        if isinstance(response, Refusal) and not work.shard.is_closed:
            logger.info(
                "completion of a transaction not recorded %s",
                Fields(name=work.marker.transactional_id, reason=response.error_message),
            )
            self._loop.call_later(MAX_RETRY_MS / 1000, self._begin_again, work.shard)

    def _begin_again(self, shard: Shard) -> None:
        ending = self._endings.get(shard)
        if ending is not None:
            ending.last_seen = None
        self.on_change(shard)
