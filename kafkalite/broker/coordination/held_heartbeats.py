"""Holds the responses to group heartbeats until there is an update, so that a rebalance takes milliseconds.

Every heartbeat is decided, and takes effect, when it arrives. If its response has no update for the member,
and the request allows a wait, the response is held until there is an update, the member sends its next
heartbeat, or the deadline passes. Then a new response is made from the group's state at that time.
"""

# Tests: tests/broker/test_groups.py

from __future__ import annotations

import asyncio
from typing import Final

from kafkalite.broker.coordination.shard import Shard
from kafkalite.broker.server.responses import HeldResponse, Pending, Refusal, Reply, Response
from kafkalite.coordinator_types import Caller
from kafkalite.errors import ErrorCode
from kafkalite.protocol.messages.groups import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

_MOVED: Final = Refusal(ErrorCode.NOT_COORDINATOR, "this broker does not coordinate the group any more")


class HeldHeartbeats:
    """The held heartbeats of one broker. Invariant: each member has at most one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session_timeout_ms: int) -> None:
        """A response is held for at most half of ``session_timeout_ms``, so that no session expires."""
        self._max_wait_ms = session_timeout_ms // 2
        self._loop = loop
        self._by_group: dict[str, dict[str, tuple[Shard, HeldResponse]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_group.values()))

    def submit(
        self, shard: Shard, request: ConsumerGroupHeartbeatRequest, caller: Caller
    ) -> Response | Pending:
        """Submit a heartbeat to ``shard``. Return the response, or a Pending while the response is held."""
        group_id, member_id = request.group_id, request.member_id
        earlier = self._by_group.get(group_id, {}).get(member_id)
        if earlier is not None:
            self._remove(group_id, member_id)
            earlier[1].finish()
        end_offset = shard.end_offset
        response = shard.submit(request, caller)
        if shard.end_offset != end_offset:
            self._update_group(group_id)
        if request.max_wait_ms <= 0 or request.member_epoch <= 0:
            return response
        alive = _only_alive(request)

        def ask() -> Response | Pending | None:
            if not held.is_over and not shard.is_closed and not shard.machine.has_update(alive):
                return None
            held.is_over = True
            return shard.submit(alive, caller)

        def is_due(response: Response) -> bool:
            return _is_new(response, alive) or shard.is_closed or shard.machine.has_update(alive)

        def release() -> None:
            entry = self._by_group.get(group_id, {}).get(member_id)
            if entry is not None and entry[1] is held:
                self._remove(group_id, member_id)

        held = HeldResponse(
            self._loop, min(request.max_wait_ms, self._max_wait_ms), ask, is_due, on_cancel=release
        )
        self._by_group.setdefault(group_id, {})[member_id] = shard, held
        held.offer(response)
        return held if held.response is None else held.response

    def _remove(self, group_id: str, member_id: str) -> None:
        group = self._by_group[group_id]
        del group[member_id]
        if not group:
            del self._by_group[group_id]

    def _update_group(self, group_id: str) -> None:
        for _, held in self._by_group.get(group_id, {}).values():
            held.update()

    def on_ticked(self, shard: Shard) -> None:
        """Check the held responses of a shard for updates again, because its state has changed."""
        for group in self._by_group.values():
            for its_shard, held in group.values():
                if its_shard is shard:
                    held.update()

    def on_close(self, shard: Shard) -> None:
        """Respond NOT_COORDINATOR to the held heartbeats of a closed shard."""
        for group in list(self._by_group.values()):
            for its_shard, held in list(group.values()):
                if its_shard is shard:
                    held.resolve(_MOVED)


def _only_alive(request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatRequest:
    """Return the heartbeat without its changes, so that it only keeps the member's session alive."""
    return request._replace(
        rebalance_timeout_ms=-1,
        subscribed_topics=None,
        subscribed_pattern=None,
        assignor=None,
        owned=None,
        max_wait_ms=0,
    )


def _is_new(response: Response, request: ConsumerGroupHeartbeatRequest) -> bool:
    """Whether ``response`` has an error, an assignment, or an epoch other than that of ``request``."""
    if not isinstance(response, Reply):
        return True
    message: ConsumerGroupHeartbeatResponse = response.message
    return bool(
        message.error_code or message.assignment is not None or message.member_epoch != request.member_epoch
    )
