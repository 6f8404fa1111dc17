"""A member's heartbeats: one request on its way to the coordinator at any time, answered when there is news.

Here nothing happens that the user could notice: answers go into ``Membership``, and who owns this is told
that there may be something to do, that the member was expelled, or that no heartbeat can mend it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.cluster.connection import wake
from kafkalite.client.cluster.coordinator import FIRST_PAUSE_MS, CoordinatorLink
from kafkalite.client.cluster.retry import Backoff, is_retriable
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

# What a farewell may take: of a consumer that closes, and of one that goes on and will come back.
CLOSE_LEAVE_MS: Final = 1_000
LEAVE_MS: Final = 5_000

# How long a coordinator is expected to hold an answer at most.
_LONG_POLL_MS: Final = 10_000


class _Call(NamedTuple):
    request: ConsumerGroupHeartbeatRequest
    sent_ms: int
    responded: asyncio.Task[ConsumerGroupHeartbeatResponse]


class Heartbeats:
    """Keeps one member in its group, from ``start`` to ``stop``.

    While it ``is_away``, or after an ``error``, there are none: the member is out of the group.
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
        self.is_away = False  #: left for as long as the user does not ask for records
        self.error: KafkaliteError | None = None  #: why we can't be a member
        cluster.long_poll_ms[Purpose.HEARTBEAT] = _LONG_POLL_MS
        self._cluster = cluster
        self._config = config
        self._link = link
        self._on_assignment = on_assignment
        self._on_expelled = on_expelled
        self._on_failed = on_failed
        self._poked = asyncio.Event()
        self._epoch_waiters: list[asyncio.Future[None]] = []  # wait for another epoch
        self._task: asyncio.Task[None] | None = None
        self._farewell: asyncio.Task[None] | None = None
        self._sent_ms = 0
        self._is_join_under_way = False  # sent, and not answered: we may be a member without knowing it
        self._last_could_wait = self._last_had_changes = False  # of the last answer
        self._last_error: KafkaliteError | None = None

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, if not begun."""
        if self._task is None:
            self._task = self._cluster.spawn(self._run())

    def poke(self) -> None:
        """There may be something to tell the coordinator."""
        self._poked.set()

    async def stop(self) -> None:
        """End, and say good-bye: a static member for a while, others for good."""
        if self._task is not None:
            self._task.cancel()
        if self.membership.is_member or self._is_join_under_way:
            await self._send_leave(self.membership.leave_request(is_for_good=False), CLOSE_LEAVE_MS)

    def leave(self) -> None:
        """Leave for good, in the background; the heartbeats begin anew when it ``is_away`` no more."""
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
        """Return when we are a member. Raises why we can't be one."""
        limit_ms = self._config.default_api_timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                while not self.membership.is_member:
                    if self.error is not None:
                        raise self.error.with_traceback(None)
                    await self._next_epoch()
        except TimeoutError:
            if isinstance(self._last_error, UnreleasedInstanceIdError):
                raise self._last_error.with_traceback(None) from None
            reason = "its coordinator did not answer" if self._last_error is None else self._last_error
            raise RequestTimeoutError(
                f"group {self._config.group_id!r} was not joined within {limit_ms} ms: {reason}",
                hint="see default.api.timeout.ms; is __consumer_offsets led everywhere?",
            ) from self._last_error

    async def wait_for_new_epoch(self, epoch: int, deadline_ms: int) -> bool:
        """Wait until the member's epoch is another one. False when it was not in time."""
        self.poke()
        while self.membership.epoch == epoch:
            try:
                async with asyncio.timeout(max(0, deadline_ms - self._cluster.now_ms()) / 1000):
                    await self._next_epoch()
            except TimeoutError:
                return False
        return self.membership.is_member

    async def _next_epoch(self) -> None:
        """Return when the epoch has changed, or when there will be no other."""
        moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._epoch_waiters.append(moved)
        await moved

    def notify_new_epoch(self) -> None:
        """The epoch has changed."""
        moved, self._epoch_waiters = self._epoch_waiters, []
        for future in moved:
            wake(future)

    # --- the loop ------------------------------------------------------------------------------

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
                # A predecessor that died without a word is a member until its session ends.
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
        logger.error("not a member %s", Fields(group=self._config.group_id, error=error))
        self._on_failed(error)
        self.notify_new_epoch()

    async def _until_wanted(self) -> None:
        """Wait while we are to be no member; then for the last farewell to be said."""
        while self.is_away or self.error is not None:
            self._poked.clear()
            await self._poked.wait()
        if self._farewell is not None:
            await asyncio.wait({self._farewell})
            self._farewell = None

    async def _heartbeat(self, *, is_retry: bool) -> None:
        """A heartbeat and the pause after it. Raises what it failed with.

        What the user does meanwhile is told by a second one, which ends the wait of the first; the answers
        are taken in in order.
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
        """Take it in. Raises RequestTimeoutError for one that is read when the session may have ended."""
        membership, request, response = self.membership, call.request, call.responded.result()
        took_ms = self._cluster.now_ms() - call.sent_ms
        if (
            took_ms >= response.session_timeout_ms
        ):  # this process stood still; another may have the partitions
            raise RequestTimeoutError(
                f"the answer to a heartbeat of group {request.group_id!r} was read after {took_ms} ms, later "
                f"than the session of {response.session_timeout_ms} ms allows",
                hint="the process or the network stood still; the member asks again, or joins anew",
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
            self.notify_new_epoch()
        self._on_assignment()

    async def _pause(self) -> None:
        """Until the next heartbeat is due: at once, unless the user or the coordinator takes its time."""
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
