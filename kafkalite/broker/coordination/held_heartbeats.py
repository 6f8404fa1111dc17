"""Heartbeats of consumer groups that wait for news: a rebalance takes milliseconds, not heartbeat intervals.

Every heartbeat is decided when it comes; what it says takes effect then. Only its answer waits, if it has
nothing to tell the member and the member lets it: until there is news, the member's next heartbeat, or the
time it gave. Then the group is asked again, for what it says by then.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kafkalite.broker.coordination.shard import Shard
from kafkalite.broker.server.responses import Answer, Pending, Refusal, Reply
from kafkalite.coordination import Caller
from kafkalite.errors import ErrorCode
from kafkalite.protocol.messages.groups import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

_MOVED: Final = Refusal(ErrorCode.NOT_COORDINATOR, "this broker does not coordinate the group any more")


class _Poll:
    """One heartbeat whose answer waits. ``request`` says nothing new: what it told was taken in before."""

    __slots__ = ("caller", "pending", "request", "shard", "timer")

    def __init__(self, shard: Shard, request: ConsumerGroupHeartbeatRequest, caller: Caller) -> None:
        self.shard = shard
        self.request = request
        self.caller = caller
        self.pending = Pending()
        self.timer: asyncio.TimerHandle | None = None


class GroupPolls:
    """The held heartbeats of one broker. Invariant: at most one of each member."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session_timeout_ms: int) -> None:
        """No answer waits for longer than half a session: the member must be heard of in time."""
        self._max_wait_ms = session_timeout_ms // 2
        self._loop = loop
        self._by_group: dict[str, dict[str, _Poll]] = {}
        self._changed: dict[str, None] = {}  # groups to be looked at in the next turn of the loop

    def __len__(self) -> int:
        return sum(map(len, self._by_group.values()))

    def submit(
        self, shard: Shard, request: ConsumerGroupHeartbeatRequest, caller: Caller
    ) -> Answer | Pending:
        """Decide a heartbeat; its answer, at once if it tells something, or when there is news."""
        group = self._by_group.get(request.group_id)
        if group is not None and (earlier := group.get(request.member_id)) is not None:
            self._finish(earlier)
        answer = shard.submit(request, caller)
        if request.max_wait_ms <= 0 or request.member_epoch <= 0:
            return answer
        poll = _Poll(shard, _without_news(request), caller)
        if isinstance(answer, Pending):
            answer.then(lambda settled: self._hold(poll, settled, request.max_wait_ms))
        else:
            self._hold(poll, answer, request.max_wait_ms)
        if poll.pending.is_done:
            assert poll.pending.answer is not None
            return poll.pending.answer
        return poll.pending

    def _hold(self, poll: _Poll, answer: Answer, max_wait_ms: int) -> None:
        """Hold back ``answer``, the one to a heartbeat, unless it must be told."""
        shard, request = poll.shard, poll.request
        if (
            _tells(answer, request)
            or shard.is_closed
            or poll.pending.is_done  # its client has gone
            or shard.machine.has_news(request)
        ):
            poll.pending.resolve(answer)
            return
        group = self._by_group.setdefault(request.group_id, {})
        later = group.get(request.member_id)
        if later is not None:  # it came while this one was being committed
            poll.pending.resolve(answer)
            return
        group[request.member_id] = poll
        poll.pending.on_cancel = lambda: self._drop(poll)
        seconds = min(max_wait_ms, self._max_wait_ms) / 1000
        poll.timer = self._loop.call_later(seconds, self._finish, poll)

    def _drop(self, poll: _Poll) -> None:
        """Hold it no more. Harmless when it is not held."""
        if poll.timer is not None:
            poll.timer.cancel()
            poll.timer = None
        group = self._by_group.get(poll.request.group_id)
        if group is not None and group.get(poll.request.member_id) is poll:
            del group[poll.request.member_id]
            if not group:
                del self._by_group[poll.request.group_id]

    def _finish(self, poll: _Poll) -> None:
        """Answer with what the group says now."""
        self._drop(poll)
        poll.pending.on_cancel = None
        if poll.pending.is_done:
            return
        answer = poll.shard.submit(poll.request, poll.caller)
        if isinstance(answer, Pending):
            answer.then(poll.pending.resolve)
        else:
            poll.pending.resolve(answer)

    # --- what wakes them

    def on_replay(self, shard: Shard, command: Any) -> None:
        """A shard's state has changed: look soon at those of the command's group, or of all its groups."""
        group_id = getattr(command, "group_id", None)
        if group_id is not None:
            if group_id in self._by_group and isinstance(command, ConsumerGroupHeartbeatRequest):
                self._mark(group_id)  # else its offsets have changed, which is no member's news
            return
        for held_id, group in self._by_group.items():
            if any(poll.shard is shard for poll in group.values()):
                self._mark(held_id)

    def _mark(self, group_id: str) -> None:
        if not self._changed:
            self._loop.call_soon(self._look)
        self._changed[group_id] = None

    def _look(self) -> None:
        changed, self._changed = self._changed, {}
        for group_id in changed:
            for poll in list(self._by_group.get(group_id, {}).values()):
                if poll.shard.is_closed or poll.shard.machine.has_news(poll.request):
                    self._finish(poll)

    def on_close(self, shard: Shard) -> None:
        """The shard has ended: the members are to find the group's next coordinator."""
        for group in list(self._by_group.values()):
            for poll in list(group.values()):
                if poll.shard is shard:
                    self._drop(poll)
                    poll.pending.resolve(_MOVED)


def _without_news(request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatRequest:
    """The heartbeat of a member that says only that it lives."""
    return request._replace(
        rebalance_timeout_ms=-1,
        subscribed_topics=None,
        subscribed_pattern=None,
        assignor=None,
        owned=None,
        max_wait_ms=0,
    )


def _tells(answer: Answer, request: ConsumerGroupHeartbeatRequest) -> bool:
    """Whether the member does not know yet what ``answer`` says."""
    if not isinstance(answer, Reply):
        return True
    response: ConsumerGroupHeartbeatResponse = answer.message
    return bool(
        response.error_code
        or response.assignment is not None
        or response.member_epoch != request.member_epoch
    )
