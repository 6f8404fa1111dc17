"""Sends a member's heartbeats. The coordinator may hold a response until the assignment changes.

``Membership`` handles the responses. Callbacks report a new assignment, an expulsion, and errors that further
heartbeats cannot resolve.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.cluster.coordinator import FIRST_PAUSE_MS, CoordinatorLink
from kafkalite.client.cluster.retry import Backoff, is_retriable
from kafkalite.client.cluster.signal import Signal
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.group.membership import JOINING, Membership
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    FencedMemberEpochError,
    KafkaliteError,
    RequestTimeoutError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from kafkalite.log_fields import Fields
from kafkalite.protocol.messages.groups import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

logger = logging.getLogger(__name__)

EXPELLED: Final = (UnknownMemberIdError, FencedMemberEpochError)

# The time limits, in milliseconds, for leaving the group: when the consumer closes, and when it continues and
# will join again.
CLOSE_LEAVE_MS: Final = 1_000
LEAVE_MS: Final = 5_000

# The longest time for which a coordinator is expected to hold a response.
_LONG_POLL_MS: Final = 10_000


class _Call(NamedTuple):
    request: ConsumerGroupHeartbeatRequest
    sent_ms: int
    responded: asyncio.Task[ConsumerGroupHeartbeatResponse]


class Heartbeats:
    """Keeps one member in its group, from ``start`` to ``stop``.

    While ``is_away`` or ``error`` is set, the consumer sends no heartbeats and does not join the group.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        config: ConsumerConfig,
        link: CoordinatorLink,
        membership: Membership,
        *,
        on_assignment: Callable[[], None],
        on_expelled: Callable[[KafkaliteError], None],
        on_failed: Callable[[KafkaliteError], None],
    ) -> None:
        self.membership = membership
        #: The consumer has left the group because it has not read records for max.poll.interval.ms, or has
        #: unsubscribed.
        self.is_away = False
        self.error: KafkaliteError | None = None  #: why this consumer cannot be a member
        cluster.long_poll_ms[Purpose.HEARTBEAT] = _LONG_POLL_MS
        self._cluster = cluster
        self._config = config
        self._link = link
        self._on_assignment = on_assignment
        self._on_expelled = on_expelled
        self._on_failed = on_failed
        self._poked = asyncio.Event()
        #: Fired when the epoch has changed, or will not change any more.
        self.epoch_changed = Signal()
        self._task: asyncio.Task[None] | None = None
        self._farewell: asyncio.Task[None] | None = None
        self._sent_ms = 0
        # A join was sent and has no response yet. The coordinator may have added the member.
        self._is_join_under_way = False
        # whether the last response could be held by the coordinator, and whether it had changes
        self._last_could_wait = self._last_had_changes = False
        self._last_error: KafkaliteError | None = None
        self._waiting_count = 0  #: how many calls of ``joined`` wait, which raise ``error``

    def start(self) -> None:
        """Start the background task, if it has not been started."""
        if self._task is None:
            self._task = self._cluster.spawn(self._run())

    def poke(self) -> None:
        """End the pause before the next heartbeat.

        If a response is awaited and the member has changes to report, send another heartbeat now, unless the
        user's next call must add or revoke partitions first.
        """
        self._poked.set()

    async def stop(self) -> None:
        """Stop, and leave the group: temporarily if the member is static, otherwise for good."""
        if self._task is not None:
            self._task.cancel()
        if self.membership.is_member or self._is_join_under_way:
            await self._send_leave(self.membership.leave_request(is_for_good=False), CLOSE_LEAVE_MS)

    def leave(self) -> None:
        """Leave the group in the background. A static member gives up its partitions, too.

        To join again, clear ``is_away`` and call ``poke``.
        """
        self.is_away = True
        leave = self.membership.leave_request(is_for_good=True)
        self._farewell = self._cluster.spawn(self._send_leave(leave, LEAVE_MS))
        self.poke()

    async def _send_leave(self, leave: ConsumerGroupHeartbeatRequest, timeout_ms: int) -> None:
        try:
            await self._link.call(leave, timeout_ms=timeout_ms, purpose=Purpose.HEARTBEAT)
        except KafkaliteError as error:
            logger.info("group left without notice %s", Fields(group=leave.group_id, error=error))

    async def joined(self) -> None:
        """Wait until this consumer is a member.

        Raises the error that prevents joining, or RequestTimeoutError after default.api.timeout.ms.
        """
        self._waiting_count += 1
        try:
            await self._until_joined()
        finally:
            self._waiting_count -= 1

    async def _until_joined(self) -> None:
        limit_ms = self._config.default_api_timeout_ms
        deadline_ms = self._cluster.now_ms() + limit_ms
        while not self.membership.is_member:
            if self.error is not None:
                raise self.error.with_traceback(None)
            if await self._wait_for_epoch(deadline_ms):
                continue
            if isinstance(self._last_error, UnreleasedInstanceIdError):
                raise self._last_error.with_traceback(None)
            last = self._last_error
            reason = "its coordinator did not respond" if last is None else last.message
            late = RequestTimeoutError(
                f"group {self._config.group_id!r} was not joined within {limit_ms} ms: {reason}",
                hint="'kl cluster status' shows what is wrong; default.api.timeout.ms limits the wait",
            )
            raise self._cluster.explained(late) from last

    async def wait_for_new_epoch(self, epoch: int, deadline_ms: int) -> bool:
        """Return True when the member epoch is not ``epoch``; False after ``deadline_ms`` or an expulsion."""
        self.poke()
        while self.membership.epoch == epoch:
            if not await self._wait_for_epoch(deadline_ms):
                return False
        return self.membership.is_member

    async def _wait_for_epoch(self, deadline_ms: int) -> bool:
        return await self.epoch_changed.wait(max(0, deadline_ms - self._cluster.now_ms()) / 1000)

    async def _run(self) -> None:
        backoff = Backoff(
            min(FIRST_PAUSE_MS, self._config.retry_backoff_ms), self._config.retry_backoff_max_ms
        )
        failures = 0
        unreleased_since_ms: int | None = None
        while True:
            await self._until_wanted()
            try:
                await self._heartbeat(is_retry=failures > 0)
                failures, unreleased_since_ms = 0, None
                continue
            except ClientClosedError:
                return
            except EXPELLED as error:
                self._on_expelled(error)
            except UnreleasedInstanceIdError as error:
                # A predecessor that crashed stays a member until its session times out.
                now_ms = self._cluster.now_ms()
                self._last_error = error
                if unreleased_since_ms is None:
                    unreleased_since_ms = now_ms
                    logger.warning(
                        "group.instance.id is in use, retrying %s",
                        Fields(group=self._config.group_id, error=error),
                    )
                elif now_ms - unreleased_since_ms > self._config.default_api_timeout_ms:
                    self._fail(error)
            except KafkaliteError as error:
                self._last_error = error
                if not is_retriable(error):
                    self._fail(error)
                elif failures == 0:
                    logger.info("heartbeat failed %s", Fields(group=self._config.group_id, error=error))
            except Exception as error:
                logger.exception("heartbeats ended %s", Fields(group=self._config.group_id))
                self._fail(ClientError(f"the heartbeats have ended: {error!r}", hint="this is a bug"))
            failures += 1
            await asyncio.sleep(backoff.delay_ms(failures, self._cluster.rng.random()) / 1000)

    def _fail(self, error: KafkaliteError) -> None:
        self.error = error
        level = logging.INFO if self._waiting_count else logging.ERROR  # a waiting caller receives the error
        logger.log(level, "not a member %s", Fields(group=self._config.group_id, error=error))
        self._on_failed(error)
        self.epoch_changed.fire()

    async def _until_wanted(self) -> None:
        """Wait until this consumer may join the group, and until the last leave request is done."""
        while self.is_away or self.error is not None:
            self._poked.clear()
            await self._poked.wait()
        if self._farewell is not None:
            await asyncio.wait({self._farewell})
            self._farewell = None

    async def _heartbeat(self, *, is_retry: bool) -> None:
        """Send a heartbeat, handle its response and pause. Raises the error of the heartbeat.

        If the member changes while the coordinator holds the response, a second request is sent, and the
        coordinator then responds to the first at once. Responses are handled in order.
        """
        membership = self.membership
        interval_ms = membership.heartbeat_interval_ms
        calls: deque[_Call] = deque()
        try:
            calls.append(self._send(0 if is_retry or membership.waits_for_user else interval_ms))
            while calls:
                poked = asyncio.ensure_future(self._poked.wait())
                try:
                    await asyncio.wait({calls[0].responded, poked}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    poked.cancel()
                if self.is_away or self.error is not None:
                    return
                while calls and calls[0].responded.done():
                    self._on_response(calls.popleft())
                if calls and self._poked.is_set():
                    self._poked.clear()
                    if membership.has_changes_to_send and not membership.waits_for_user:
                        calls.append(self._send(interval_ms))
        except KafkaliteError:
            membership.on_failure()
            raise
        finally:
            for call in calls:
                call.responded.cancel()
        await self._pause()

    def _send(self, wait_ms: int) -> _Call:
        self._poked.clear()
        self._sent_ms = self._cluster.now_ms()
        request = self.membership.request(wait_ms)
        self._is_join_under_way = request.member_epoch == JOINING
        call = self._link.attempt(request, wait_ms=request.max_wait_ms, purpose=Purpose.HEARTBEAT)
        return _Call(request, self._sent_ms, asyncio.ensure_future(call))

    def _on_response(self, call: _Call) -> None:
        """Handle the response to ``call``, or raise the error of ``call``.

        Raises RequestTimeoutError if the response is read after the session may have ended.
        """
        membership, request, response = self.membership, call.request, call.responded.result()
        took_ms = self._cluster.now_ms() - call.sent_ms
        # This process was suspended, and another member may own the partitions.
        if took_ms >= response.session_timeout_ms:
            raise RequestTimeoutError(
                f"a heartbeat of group {request.group_id!r} was answered after {took_ms} ms, later "
                f"than the session of {response.session_timeout_ms} ms allows",
                hint="the process or the network was stopped; the member retries or joins again",
            )
        before = membership.epoch
        self._is_join_under_way = False
        self._last_had_changes = membership.on_response(request, response) or membership.epoch != before
        self._last_could_wait = request.max_wait_ms > 0
        if membership.epoch != before:
            logger.debug(
                "member epoch changed %s",
                Fields(group=request.group_id, member_id=response.member_id, member_epoch=membership.epoch),
            )
            self.epoch_changed.fire()
        self._on_assignment()

    async def _pause(self) -> None:
        """Wait until the next heartbeat is due. ``poke`` ends the wait.

        The heartbeat is due at once if the member has changes to report, if the last response had changes, or
        if the coordinator held that response or was not allowed to hold it. Otherwise, and always while the
        user's next call must add or revoke partitions, the heartbeat is due one heartbeat interval after the
        last one was sent.
        """
        membership = self.membership
        interval_ms = membership.heartbeat_interval_ms
        took_ms = self._cluster.now_ms() - self._sent_ms
        if not membership.waits_for_user:
            was_held = not self._last_could_wait or took_ms >= interval_ms // 2
            if membership.has_changes_to_send or self._last_had_changes or was_held:
                return
        try:
            async with asyncio.timeout(max(0, interval_ms - took_ms) / 1000):
                await self._poked.wait()
        except TimeoutError:
            pass
