"""Following: one fetcher for each broker that leads partitions replicated here.

A fetcher keeps a request waiting at the leader, and sends the next one as soon as there is something to
tell: it appended what came, or a sync made it durable. An answer is taken straight from the connection's
buffer: records go from the frame to the file, without a task or a copy between. What the leader remembers
between the requests is described in ``fetch_sessions``.

R3: an answer counts if it belongs to this session and the replica is as it was when it asked. Whatever goes
wrong with one partition is waited out and asked anew; with the connection, everything is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from kafkalite import mutants
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.replication.fetch_sessions import MAX_EPOCH, OPENS, PartitionKey
from kafkalite.client.cluster.connection import Connection
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, KafkaliteError, StorageError
from kafkalite.limits import KIB
from kafkalite.log_fields import Fields
from kafkalite.protocol.messages.cluster import (
    ForgottenPartition,
    ReplicaFetchedPartition,
    ReplicaFetchPartition,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)
from kafkalite.replication.follower import FetchPosition, FollowerStep

logger = logging.getLogger(__name__)

MAX_LISTED: Final = 2_000  # partitions in one request; the others follow in the next
MAX_IN_FLIGHT: Final = 4
#: After a small answer the next request waits for the sync that it is to tell of, at most this long...
HOLD_S: Final = 0.005
#: ...but not after a large one: more lies ready, and comes while this is synced.
LARGE_ANSWER_BYTES: Final = 128 * KIB
#: On top of the leader's wait, before the connection counts as dead.
ANSWER_GRACE_MS: Final = 5_000
#: A first failure is often only that the leader has not heard yet that it leads.
FIRST_BACKOFF_MS: Final = 5


class FetchSettings:
    """Kafka's ``replica.fetch.*`` and who fetches."""

    __slots__ = (
        "backoff_ms",
        "max_bytes",
        "max_partition_bytes",
        "max_wait_ms",
        "min_bytes",
        "node_id",
    )

    def __init__(
        self,
        node_id: int,
        *,
        max_wait_ms: int = 500,
        min_bytes: int = 1,
        max_bytes: int = 10 * 2**20,
        max_partition_bytes: int = 2**20,
        backoff_ms: int = 100,
    ) -> None:
        self.node_id = node_id
        self.max_wait_ms = max_wait_ms
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.max_partition_bytes = max_partition_bytes
        self.backoff_ms = backoff_ms


class Followed:
    """One partition that a fetcher fetches, in one leader epoch."""

    __slots__ = ("asked", "failures", "fetcher", "hosted", "is_afresh", "key", "leader_epoch", "retry_s")

    def __init__(self, fetcher: Fetcher, hosted: HostedPartition) -> None:
        self.fetcher = fetcher
        self.hosted = hosted
        self.key: PartitionKey = (hosted.partition.topic_id, hosted.key.partition)
        self.leader_epoch = hosted.partition.leader_epoch
        self.asked: FetchPosition | None = None  #: as last listed in this session
        self.is_afresh = False  #: the leader is to forget what it answered
        self.failures = 0  #: one after the other
        self.retry_s = 0.0  #: while it waits after a failure: until when

    def on_synced(self) -> None:
        if self.asked is not None and not self.retry_s:
            self.fetcher.note(self)


class Fetcher:
    """All that is fetched from one leader broker. ``start`` is implied by the first ``add``."""

    def __init__(
        self,
        leader_id: int,
        settings: FetchSettings,
        clock: Clock,
        connect: Callable[[int], Awaitable[Connection]],
        broker_epoch: Callable[[], int],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self.leader_id = leader_id
        self._settings = settings
        self._clock = clock
        self._connect = connect
        self._broker_epoch = broker_epoch
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._followed: dict[PartitionKey, Followed] = {}
        self._news: dict[Followed, None] = {}  # to be listed in the next request
        self._forgotten: dict[PartitionKey, None] = {}
        self._paused: dict[Followed, None] = {}
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._generation = 0  # of the session: answers of an earlier one are nobody's
        self._session_id = OPENS
        self._session_epoch = OPENS
        self._in_flight = 0
        self._is_sending_soon = False
        self._is_urgent = False  # there is news beyond appends that are being synced
        self._held: asyncio.TimerHandle | None = None
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._complaint = ""

    def __repr__(self) -> str:
        return f"<Fetcher from node {self.leader_id}, {len(self._followed)} partitions>"

    def __len__(self) -> int:
        return len(self._followed)

    # --- what to fetch

    def add(self, hosted: HostedPartition) -> None:
        """Fetch for ``hosted`` from now on; if it was fetched for already, in its new epoch."""
        followed = Followed(self, hosted)
        before = self._followed.get(followed.key)
        if before is not None:
            if before.hosted is hosted and before.leader_epoch == followed.leader_epoch:
                return
            self._drop(before)
        self._followed[followed.key] = followed
        hosted.on_follower_synced = followed.on_synced
        self.note(followed)

    def remove(self, hosted: HostedPartition) -> None:
        """Fetch for it no more; answers under way are ignored."""
        followed = self._followed.get((hosted.partition.topic_id, hosted.key.partition))
        if followed is None or followed.hosted is not hosted:
            return
        self._drop(followed)
        if followed.asked is not None or followed.is_afresh:
            self._forgotten[followed.key] = None
            self._send_soon()

    def _drop(self, followed: Followed) -> None:
        del self._followed[followed.key]
        self._news.pop(followed, None)
        self._paused.pop(followed, None)
        followed.hosted.on_follower_synced = None

    def close(self) -> None:
        """Fetch nothing any more."""
        self._is_closed = True
        self._generation += 1
        for followed in list(self._followed.values()):
            self._drop(followed)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._resuming is not None:
            self._resuming.cancel()
        self._release()

    def note(self, followed: Followed) -> None:
        """There is something to tell the leader about that partition."""
        self._news[followed] = None
        self._send_soon()

    # --- asking

    def _send_soon(self) -> None:
        self._is_urgent = True
        if not self._is_sending_soon and not self._is_closed:
            self._is_sending_soon = True
            self._loop.call_soon(self._send_now)

    def _send_now(self) -> None:
        self._is_sending_soon = False
        try:
            self._send()
        except AssertionError as error:
            self._on_broken(error)

    def _release(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None

    def _send(self) -> None:
        """Send the next request, unless there is nothing to tell and one is waiting already."""
        self._release()
        if self._is_closed or not (self._followed or self._forgotten):
            return
        if self._connection is None:
            self._begin_connecting()
            return
        is_opening = self._session_id == OPENS
        if self._in_flight and (is_opening or not (self._news or self._forgotten)):
            return
        if self._in_flight >= MAX_IN_FLIGHT:
            return
        settings = self._settings
        listed = self._list()
        request = ReplicaFetchRequest(
            settings.node_id,
            self._broker_epoch(),
            self._session_id,
            self._session_epoch,
            settings.max_wait_ms,
            settings.min_bytes,
            settings.max_bytes,
            settings.max_partition_bytes,
            listed,
            [ForgottenPartition(*key) for key in self._forgotten],
        )
        self._forgotten.clear()
        try:
            self._connection.request(
                request, partial(self._on_answer, self._generation), settings.max_wait_ms + ANSWER_GRACE_MS
            )
        except KafkaliteError as error:
            self._start_over(error, keep_connection=False)
            return
        self._in_flight += 1
        if not is_opening:
            self._session_epoch = OPENS + 1 if self._session_epoch == MAX_EPOCH else self._session_epoch + 1
            if self._news:  # more than one request lists
                self._send_soon()

    def _list(self) -> list[ReplicaFetchPartition]:
        """The positions that are news; what fails to tell its own is left for later."""
        listed: list[ReplicaFetchPartition] = []
        for followed in list(self._news)[:MAX_LISTED]:
            del self._news[followed]
            if followed.hosted.is_busy:
                continue  # it is noted again when the disk is done
            try:
                position = followed.hosted.partition.fetch_position()
            except (BrokerError, StorageError) as error:
                self._on_failed(followed, error)
                continue
            if followed.is_afresh:
                followed.is_afresh = False
                self._forgotten[followed.key] = None
            followed.asked = position
            followed.hosted.told_epoch = position.leader_epoch
            listed.append(
                ReplicaFetchPartition(
                    *followed.key,
                    position.leader_epoch,
                    position.fetch_offset,
                    position.last_epoch,
                    position.synced_end_offset,
                    position.log_start_offset,
                )
            )
        return listed

    # --- being answered

    def _on_answer(self, generation: int, message: Any, payload: memoryview, error: Exception | None) -> None:
        if generation != self._generation and "R3-any-answer" not in mutants.ACTIVE:
            return
        self._in_flight -= 1
        if error is not None:
            # What the leader refuses as a whole is about the session or this broker's epoch.
            self._start_over(error, keep_connection=isinstance(error, BrokerError))
            return
        try:
            self._is_sending_soon, self._is_urgent = True, False  # nothing is sent in between
            self._take(message, payload)
            self._is_sending_soon = False
            if self._is_urgent or not self._news or len(payload) >= LARGE_ANSWER_BYTES:
                self._send()
            elif self._held is None:
                self._held = self._loop.call_later(HOLD_S, self._send_now)
        except AssertionError as broken:
            self._on_broken(broken)

    def _take(self, message: ReplicaFetchResponse, payload: memoryview) -> None:
        if self._session_id == OPENS:
            self._session_id, self._session_epoch = message.session_id, OPENS + 1
            self._complaint = ""
        wall_ms = self._clock.wall_ms()
        start = 0
        for answer in message.partitions:
            end = start + answer.length_bytes
            followed = self._followed.get((answer.topic_id, answer.partition))
            if followed is not None and followed.asked is not None:
                followed.hosted.on_fetched(
                    answer,
                    payload[start:end],
                    followed.asked,
                    wall_ms,
                    partial(self._on_applied, followed, answer),
                )
            start = end

    def _on_applied(
        self,
        followed: Followed,
        answer: ReplicaFetchedPartition,
        step: FollowerStep | None,
        error: Exception | None,
    ) -> None:
        """What an answer came to, at once or after the disk was done with it."""
        if step is None:
            if error is None or isinstance(error, AssertionError):
                self._on_broken(error or AssertionError("neither a step nor an error"))
            else:
                self._on_failed(followed, error)
            return
        if self._followed.get(followed.key) is not followed:
            return
        followed.failures = 0
        if step.truncated_to is not None:
            logger.info(
                "log truncated %s",
                Fields(partition=followed.hosted.key, to=step.truncated_to, epoch=answer.diverging_epoch),
            )
            followed.is_afresh = True
        elif not step.appended_bytes:
            # The leader waits for another log start to be here; and a sync that ended while the disk was
            # busy with that has not been told. Nor was an answer that was ignored meanwhile asked for again.
            followed.is_afresh = followed.is_afresh or step.is_ignored
            if not followed.is_afresh and not step.log_start_moved:
                return
        elif followed.hosted.log.config.synced_only:
            self._news[followed] = None  # its sync will tell
            return
        self.note(followed)

    def _on_failed(self, followed: Followed, error: Exception) -> None:
        """Leave the partition alone for a while, then ask as if for the first time."""
        if self._followed.get(followed.key) is not followed:
            return
        if followed.hosted.log.offline_reason is not None:
            self._drop(followed)
            self._forgotten[followed.key] = None
            return
        pause_ms = min(FIRST_BACKOFF_MS << min(followed.failures, 16), self._settings.backoff_ms)
        followed.failures += 1
        if pause_ms == self._settings.backoff_ms:
            logger.log(
                logging.WARNING if followed.failures % 50 == 6 else logging.DEBUG,
                "partition not fetched %s",
                Fields(partition=followed.hosted.key, leader=self.leader_id, reason=error),
            )
        followed.retry_s = self._loop.time() + pause_ms / 1000
        followed.is_afresh = True
        followed.asked = None
        self._news.pop(followed, None)
        self._paused[followed] = None
        if self._resuming is None or self._resuming.when() > followed.retry_s:
            self._resume_at(followed.retry_s)

    def _resume_at(self, when_s: float) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        self._resuming = self._loop.call_at(when_s, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        now_s = self._loop.time() + 0.001
        later_s = 0.0
        for followed in list(self._paused):
            if followed.retry_s <= now_s:
                del self._paused[followed]
                followed.retry_s = 0.0
                self.note(followed)
            else:
                later_s = min(later_s or followed.retry_s, followed.retry_s)
        if later_s:
            self._resume_at(later_s)

    # --- the connection and the session

    def _start_over(self, error: Exception, *, keep_connection: bool) -> None:
        """The session is lost: open another one, after a while."""
        self._generation += 1
        self._session_id = self._session_epoch = OPENS
        self._in_flight = 0
        self._forgotten.clear()
        for followed in self._followed.values():
            followed.asked = None
            followed.is_afresh = False
            if followed not in self._paused:
                self._news[followed] = None
        connection, self._connection = self._connection, None
        if connection is not None and not keep_connection:
            connection.close()
        self._complain(error)
        self._begin_connecting(self._settings.backoff_ms)

    def _complain(self, error: Exception) -> None:
        """Once for each new reason."""
        complaint = str(error)
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning("not fetching %s", Fields(leader=self.leader_id, reason=complaint))

    def _begin_connecting(self, delay_ms: int = 0) -> None:
        if self._connecting is None and not self._is_closed:
            self._connecting = self._loop.create_task(
                self._open(delay_ms), name=f"connect to leader {self.leader_id}"
            )

    async def _open(self, delay_ms: int) -> None:
        """Connect, trying again until it succeeds or nothing is to be fetched."""
        try:
            while True:
                if delay_ms:
                    await asyncio.sleep(delay_ms / 1000)
                if self._is_closed or not self._followed:
                    return
                try:
                    self._connection = await self._connect(self.leader_id)
                    break
                except KafkaliteError as error:
                    self._complain(error)
                    delay_ms = self._settings.backoff_ms
        finally:
            self._connecting = None
        self._send_soon()
