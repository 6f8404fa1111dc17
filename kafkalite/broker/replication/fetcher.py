"""Fetches the partitions that this broker follows, with one fetcher for each broker that leads some of them.

A fetcher keeps a request waiting at the leader, and sends the next one soon after a position has changed
because records were appended or a sync made them durable. Records are appended to the log from the
connection's receive buffer, without a task or a copy. ``fetch_sessions`` describes the state that the leader
keeps between requests.

R3: a response is applied only if it belongs to this session and the replica has not changed since the
request. After an error of one partition, that partition is fetched again after a pause. After an error of the
connection or of a whole request, all partitions are fetched again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.quotas.replication_quota import ReplicationQuota
from kafkalite.broker.replication.fetch_sessions import MAX_EPOCH, OPENS, PartitionKey
from kafkalite.client.cluster.connection import Connection
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, KafkaliteError, ShortLeaderError, StorageError
from kafkalite.limits import KIB
from kafkalite.log_fields import Fields
from kafkalite.model import NO_OFFSET
from kafkalite.protocol.messages.cluster import (
    ForgottenPartition,
    ReplicaFetchPartition,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)
from kafkalite.replication.follower import FetchPosition, NextFetch

logger = logging.getLogger(__name__)

MAX_LISTED: Final = 2_000  # partitions in one request; further ones follow in the next request
MAX_IN_FLIGHT: Final = 4
#: After a small response, the next request waits at most this long for the sync that it will report.
HOLD_S: Final = 0.005
#: After a response of at least this size, the next request is sent at once, before the sync has ended.
LARGE_RESPONSE_BYTES: Final = 128 * KIB
#: A connection is given up if a response is later than the leader's maximum wait by this much.
RESPONSE_GRACE_MS: Final = 5_000
#: The pause after a first error. Short, because the leader often only lacks the newest metadata.
FIRST_BACKOFF_MS: Final = 5


class Followed:
    """One partition that a fetcher fetches, in one leader epoch."""

    __slots__ = (
        "asked",
        "failures",
        "fetcher",
        "high_watermark",
        "hosted",
        "is_repeated",
        "key",
        "leader_epoch",
        "reserved_bytes",
        "retry_s",
    )

    def __init__(self, fetcher: Fetcher, hosted: HostedPartition) -> None:
        self.fetcher = fetcher
        self.hosted = hosted
        self.key: PartitionKey = (hosted.topic_id, hosted.key.partition)
        self.leader_epoch = hosted.leader_epoch
        self.asked: FetchPosition | None = None  #: the position that was last listed in this session
        self.is_repeated = False  #: whether the leader must send its last response again
        self.failures = 0  #: consecutive failures
        self.high_watermark = NO_OFFSET  #: the leader's in its last response; -1 before the first
        self.reserved_bytes = 0  #: spent in advance for a response to come, while this replica is throttled
        self.retry_s = 0.0  #: loop time at which the pause after an error ends; 0 without one

    def on_progress(self, outcome: NextFetch | Exception) -> None:
        """Implements ``FetchListener.on_progress``."""
        self.fetcher.on_progress(self, outcome)


class Fetcher:
    """Fetches partitions from one leader broker. It connects at the first ``add``."""

    def __init__(
        self,
        leader_id: int,
        config: BrokerConfig,
        clock: Clock,
        connect: Callable[[int], Awaitable[Connection]],
        broker_epoch: Callable[[], int],
        on_broken: Callable[[BaseException], None],
        on_short_leader: Callable[[HostedPartition, ShortLeaderError], None],
        quota: ReplicationQuota,
        is_in_sync: Callable[[HostedPartition], bool],
    ) -> None:
        self.leader_id = leader_id
        self._config = config
        self._clock = clock
        self._connect = connect
        self._broker_epoch = broker_epoch
        self._on_broken = on_broken
        self._on_short_leader = on_short_leader
        self._quota = quota
        self._is_in_sync = is_in_sync
        self._loop = asyncio.get_running_loop()
        self._followed: dict[PartitionKey, Followed] = {}
        self._due: dict[Followed, None] = {}  # partitions to list in the next request
        self._forgotten: dict[PartitionKey, None] = {}
        self._paused: dict[Followed, None] = {}
        self._throttled: dict[Followed, None] = {}  # partitions to list when the quota allows it
        self._throttle_timer: asyncio.TimerHandle | None = None
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._generation = 0  # the number of the session; responses of earlier ones are dropped
        self._session_id = OPENS
        self._session_epoch = OPENS
        self._in_flight = 0
        self._is_sending_soon = False
        self._is_urgent = False  # whether to send the next request without waiting for a sync
        self._held: asyncio.TimerHandle | None = None
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._reported_error = ""

    def __repr__(self) -> str:
        return f"<Fetcher from node {self.leader_id}, {len(self._followed)} partitions>"

    def __len__(self) -> int:
        return len(self._followed)

    # --- the partitions

    def add(self, hosted: HostedPartition) -> None:
        """Fetch for ``hosted`` from now on, in its current leader epoch."""
        followed = Followed(self, hosted)
        before = self._followed.get(followed.key)
        if before is not None:
            if before.hosted is hosted and before.leader_epoch == followed.leader_epoch:
                return
            self._drop(before)
        self._followed[followed.key] = followed
        hosted.listener = followed
        self._report_soon(followed)

    def remove(self, hosted: HostedPartition) -> None:
        """Stop fetching for ``hosted``. Results for it in responses in flight are ignored."""
        followed = self._followed.get((hosted.topic_id, hosted.key.partition))
        if followed is None or followed.hosted is not hosted:
            return
        self._drop(followed)
        if followed.asked is not None or followed.is_repeated:
            self._forgotten[followed.key] = None
            self._send_soon()

    def _drop(self, followed: Followed) -> None:
        del self._followed[followed.key]
        self._due.pop(followed, None)
        self._paused.pop(followed, None)
        self._throttled.pop(followed, None)
        self._settle(followed, 0)
        followed.hosted.listener = None

    def close(self) -> None:
        """Stop fetching all partitions."""
        self._is_closed = True
        self._generation += 1
        for followed in list(self._followed.values()):
            self._drop(followed)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._resuming is not None:
            self._resuming.cancel()
        if self._throttle_timer is not None:
            self._throttle_timer.cancel()
        self._release()

    def on_progress(self, followed: Followed, outcome: NextFetch | Exception) -> None:
        """Schedule the next fetch of the partition as ``outcome`` requires, or handle ``outcome`` if it is an
        exception.

        Called after a sync, and when an exclusive job (a truncation or a change of the log start) has ended
        or was dropped.
        """
        if isinstance(outcome, AssertionError):
            self._on_broken(outcome)
        elif self._followed.get(followed.key) is not followed:
            return
        elif isinstance(outcome, Exception):
            self._on_failed(followed, outcome)
        elif not followed.retry_s:
            self._report(followed, outcome)

    def _report(self, followed: Followed, next_fetch: NextFetch) -> None:
        if next_fetch is NextFetch.NOT_DUE:
            return
        if next_fetch is NextFetch.AFTER_SYNC:
            self._due[followed] = None
            return
        if next_fetch is NextFetch.REPEATED:
            followed.is_repeated = True
        self._report_soon(followed)

    def _report_soon(self, followed: Followed) -> None:
        self._due[followed] = None
        self._send_soon()

    # --- requests

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
        """Send the next request, or begin to connect if there is no connection.

        Send nothing while the request for a new session is in flight, while MAX_IN_FLIGHT requests are, or
        while a request waits at the leader and nothing has changed.
        """
        self._release()
        if self._is_closed or not (self._followed or self._forgotten):
            return
        if self._connection is None:
            self._begin_connecting()
            return
        is_opening = self._session_id == OPENS
        if self._in_flight and (is_opening or not (self._due or self._forgotten)):
            return
        if self._in_flight >= MAX_IN_FLIGHT:
            return
        config = self._config
        listed = self._list()
        if self._in_flight and not (listed or self._forgotten):
            return
        request = ReplicaFetchRequest(
            config.node_id,
            self._broker_epoch(),
            self._session_id,
            self._session_epoch,
            config.replica_fetch_wait_max_ms,
            config.replica_fetch_min_bytes,
            config.replica_fetch_response_max_bytes,
            config.replica_fetch_max_bytes,
            listed,
            [ForgottenPartition(*key) for key in self._forgotten],
        )
        self._forgotten.clear()
        try:
            self._connection.request(
                request,
                partial(self._on_response, self._generation),
                config.replica_fetch_wait_max_ms + RESPONSE_GRACE_MS,
            )
        except KafkaliteError as error:
            self._start_over(error, keep_connection=False)
            return
        self._in_flight += 1
        if not is_opening:
            self._session_epoch = OPENS + 1 if self._session_epoch == MAX_EPOCH else self._session_epoch + 1
            if self._due:  # more than one request can list
                self._send_soon()

    def _list(self) -> list[ReplicaFetchPartition]:
        """Return the positions for the next request. A partition whose position cannot be read is retried
        later."""
        listed: list[ReplicaFetchPartition] = []
        for followed in list(self._due)[:MAX_LISTED]:
            del self._due[followed]
            try:
                position = followed.hosted.fetch_position()
            except (BrokerError, StorageError) as error:
                self._on_failed(followed, error)
                continue
            if position is None:
                continue  # an exclusive job runs; ``on_progress`` is called at its end
            if self._must_wait(followed, position):
                self._throttled[followed] = None
                self._await_quota()
                continue
            self._throttled.pop(followed, None)
            if followed.is_repeated:
                followed.is_repeated = False
                self._forgotten[followed.key] = None
            followed.asked = position
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

    # --- the quota of throttled replicas

    def is_throttled(self, followed: Followed) -> bool:
        """Whether records of the partition count against this broker's quota: it is listed, and this replica
        is not in sync (R70)."""
        key = followed.hosted.key
        if not self._quota.is_limited:
            return False
        return self._quota.covers(key.topic, key.partition) and not self._is_in_sync(followed.hosted)

    def is_awaited(self, followed: Followed, position: FetchPosition) -> bool:
        """Whether the leader's high watermark may wait for this replica, because it has reached it (R70)."""
        return 0 <= followed.high_watermark <= position.fetch_offset

    def _must_wait(self, followed: Followed, position: FetchPosition) -> bool:
        """Whether the partition may not be listed now. If it may and a response with records can follow,
        spend the bytes of the largest one in advance.

        A position that only reports another synced end offset brings no records.
        """
        asked = followed.asked
        is_report = asked is not None and (asked.fetch_offset, asked.leader_epoch) == (
            position.fetch_offset,
            position.leader_epoch,
        )
        if is_report and not followed.is_repeated:
            return False
        if not self.is_throttled(followed) or self.is_awaited(followed, position):
            return False
        now_ms = self._clock.monotonic_ms()
        if not self._quota.allowed_bytes(now_ms):
            return True
        self._settle(followed, 0)
        followed.reserved_bytes = self._config.replica_fetch_max_bytes
        self._quota.spend(followed.reserved_bytes, now_ms)
        return False

    def _settle(self, followed: Followed, size_bytes: int) -> None:
        """Count the bytes of a response, and return those that were spent for it in advance."""
        if size_bytes != followed.reserved_bytes:
            self._quota.spend(size_bytes - followed.reserved_bytes, self._clock.monotonic_ms())
        followed.reserved_bytes = 0

    def _await_quota(self) -> None:
        if self._throttle_timer is None:
            wait_ms = self._quota.wait_ms(self._clock.monotonic_ms())
            self._throttle_timer = self._loop.call_later(wait_ms / 1000, self.end_throttling)

    def end_throttling(self) -> None:
        """List the throttled partitions as far as the quota allows it now.

        Called when the wait of the first one is over, or when the throttle was changed.
        """
        if self._throttle_timer is not None:
            self._throttle_timer.cancel()
            self._throttle_timer = None
        is_allowed = self._quota.allowed_bytes(self._clock.monotonic_ms()) > 0
        for followed in list(self._throttled):
            if is_allowed or not self.is_throttled(followed):
                del self._throttled[followed]
                self._report_soon(followed)
        if self._throttled:
            self._await_quota()

    # --- responses

    def _on_response(
        self, generation: int, message: Any, payload: memoryview, error: Exception | None
    ) -> None:
        if not self.is_of_this_session(generation):
            return
        self._in_flight -= 1
        if error is not None:
            # An error of the whole request concerns the session or this broker's epoch.
            self._start_over(error, keep_connection=isinstance(error, BrokerError))
            return
        try:
            self._is_sending_soon, self._is_urgent = True, False  # send nothing while the response is applied
            self._take(message, payload)
            self._is_sending_soon = False
            if self._is_urgent or not self._due or len(payload) >= LARGE_RESPONSE_BYTES:
                self._send()
            elif self._held is None:
                self._held = self._loop.call_later(HOLD_S, self._send_now)
        except AssertionError as broken:
            self._on_broken(broken)

    def is_of_this_session(self, generation: int) -> bool:
        """Whether ``generation``, the session of a response, is the current session (R3)."""
        return generation == self._generation

    def _take(self, message: ReplicaFetchResponse, payload: memoryview) -> None:
        if self._session_id == OPENS:
            self._session_id, self._session_epoch = message.session_id, OPENS + 1
            self._reported_error = ""
        wall_ms = self._clock.wall_ms()
        start = 0
        for response in message.partitions:
            end = start + response.length_bytes
            followed = self._followed.get((response.topic_id, response.partition))
            if followed is not None and followed.asked is not None:
                if response.high_watermark >= 0:
                    followed.high_watermark = response.high_watermark
                if followed.reserved_bytes or (response.length_bytes and self.is_throttled(followed)):
                    self._settle(followed, response.length_bytes)
                    if self._throttled and self._quota.allowed_bytes(self._clock.monotonic_ms()):
                        self.end_throttling()  # before this partition, which would use up the quota each time
                try:
                    next_fetch = followed.hosted.on_fetched(
                        response, payload[start:end], followed.asked, wall_ms
                    )
                except AssertionError:
                    raise
                except Exception as error:
                    self._on_failed(followed, error)
                else:
                    followed.failures = 0
                    if next_fetch is not None:
                        self._report(followed, next_fetch)
            start = end

    def _on_failed(self, followed: Followed, error: Exception) -> None:
        """After an error of one partition, pause, and then list the partition in a request again. If its log
        is offline, stop fetching it instead."""
        if followed.hosted.offline_reason is not None:
            self._drop(followed)
            self._forgotten[followed.key] = None
            return
        if isinstance(error, ShortLeaderError):
            self._on_short_leader(followed.hosted, error)
        pause_ms = min(FIRST_BACKOFF_MS << min(followed.failures, 16), self._config.replica_fetch_backoff_ms)
        followed.failures += 1
        if pause_ms == self._config.replica_fetch_backoff_ms:
            logger.log(
                logging.WARNING if followed.failures % 50 == 6 else logging.DEBUG,
                "partition not fetched %s",
                Fields(partition=followed.hosted.key, leader=self.leader_id, reason=error),
            )
        followed.retry_s = self._loop.time() + pause_ms / 1000
        followed.is_repeated = True
        followed.asked = None
        self._settle(followed, 0)
        self._due.pop(followed, None)
        self._throttled.pop(followed, None)
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
                self._report_soon(followed)
            else:
                later_s = min(later_s or followed.retry_s, followed.retry_s)
        if later_s:
            self._resume_at(later_s)

    # --- the connection and the session

    def _start_over(self, error: Exception, *, keep_connection: bool) -> None:
        """After an error of the whole session, pause, and then open a new session."""
        self._generation += 1
        self._session_id = self._session_epoch = OPENS
        self._in_flight = 0
        self._forgotten.clear()
        self._throttled.clear()
        for followed in self._followed.values():
            self._settle(followed, 0)
            followed.asked = None
            followed.is_repeated = False
            if followed not in self._paused:
                self._due[followed] = None
        connection, self._connection = self._connection, None
        if connection is not None and not keep_connection:
            connection.close()
        self._log_once(error)
        self._begin_connecting(self._config.replica_fetch_backoff_ms)

    def _log_once(self, error: Exception) -> None:
        """Log an error, unless it equals the last logged error."""
        reason = str(error)
        if reason != self._reported_error:
            self._reported_error = reason
            logger.warning("not fetching %s", Fields(leader=self.leader_id, reason=reason))

    def _begin_connecting(self, delay_ms: int = 0) -> None:
        if self._connecting is None and not self._is_closed:
            self._connecting = self._loop.create_task(
                self._open(delay_ms), name=f"connect to leader {self.leader_id}"
            )

    async def _open(self, delay_ms: int) -> None:
        """Connect after ``delay_ms``. Retry until it succeeds or no partition is left to fetch."""
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
                    self._log_once(error)
                    delay_ms = self._config.replica_fetch_backoff_ms
        finally:
            self._connecting = None
        self._send_soon()
