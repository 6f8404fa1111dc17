"""Which brokers are alive, as far as the active controller has heard (R23). Pure: time is an argument.

A session lives from a heartbeat for the session timeout. When the connection that its heartbeats came on
closes, as a killed process's does at once, it lives for a short grace only, in which a living process has
sent the next heartbeat on another connection. Nothing of this is in the metadata log: a new controller
begins with a grace for every broker that is not fenced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Longer than the interval of heartbeats: a broker that only lost its connection is heard of in time.
DISCONNECT_GRACE_MS: Final = 600
#: For a broker not heard of by this controller yet: it must find the new controller first.
FIRST_HEARTBEAT_GRACE_MS: Final = 1_000
#: A check this late means that this process stood still, and heartbeats wait unread.
LATE_CHECK_MS: Final = 1_000


@dataclass(slots=True)
class _Session:
    broker_epoch: int
    deadline_ms: int
    metadata_offset: int  #: replayed there; -1 before the first heartbeat
    is_connected: bool  #: heard of, and its connection has not closed since


class BrokerSessions:
    """The sessions by node id. Invariant: at most one a node, of the broker epoch it spoke with last."""

    def __init__(self, session_timeout_ms: int) -> None:
        self._session_timeout_ms = session_timeout_ms
        self._sessions: dict[int, _Session] = {}
        self._checked_ms: int | None = None

    def on_heartbeat(self, node_id: int, broker_epoch: int, metadata_offset: int, now_ms: int) -> None:
        """The broker is alive."""
        deadline_ms = now_ms + self._session_timeout_ms
        self._sessions[node_id] = _Session(broker_epoch, deadline_ms, metadata_offset, is_connected=True)

    def on_disconnect(self, node_id: int, now_ms: int) -> None:
        """The connection that its heartbeats came on has closed."""
        session = self._sessions.get(node_id)
        if session is not None:
            session.is_connected = False
            session.deadline_ms = min(session.deadline_ms, now_ms + DISCONNECT_GRACE_MS)

    def expect(
        self,
        node_id: int,
        broker_epoch: int,
        now_ms: int,
        *,
        grace_ms: int = FIRST_HEARTBEAT_GRACE_MS,
    ) -> None:
        """Give a broker that counts as alive, and has no session with this epoch, time to show itself."""
        session = self._sessions.get(node_id)
        if session is None or session.broker_epoch != broker_epoch:
            self._sessions[node_id] = _Session(broker_epoch, now_ms + grace_ms, -1, is_connected=False)

    def end(self, node_id: int) -> None:
        self._sessions.pop(node_id, None)

    def clear(self) -> None:
        """This controller is not the active one, or not yet."""
        self._sessions.clear()
        self._checked_ms = None

    def is_alive(self, node_id: int, broker_epoch: int, now_ms: int) -> bool:
        """Whether a process with that epoch has been heard of lately, on a connection that is still open."""
        session = self._sessions.get(node_id)
        return (
            session is not None
            and session.broker_epoch == broker_epoch
            and session.is_connected
            and now_ms < session.deadline_ms
        )

    def expired(self, now_ms: int) -> list[tuple[int, int]]:
        """(node id, broker epoch) of every session that is over. To be asked often, every 100 ms or so.

        A check that comes late gives every session the time in which nobody could hear of it.
        """
        checked_ms, self._checked_ms = self._checked_ms, now_ms
        if checked_ms is not None and now_ms - checked_ms > LATE_CHECK_MS:
            for session in self._sessions.values():
                session.deadline_ms += now_ms - checked_ms
        return [
            (node_id, session.broker_epoch)
            for node_id, session in sorted(self._sessions.items())
            if session.deadline_ms <= now_ms
        ]

    def have_replayed(self, node_ids: frozenset[int], offset: int) -> bool:
        """Whether all these brokers told to have replayed the metadata log up to ``offset``."""
        return all(
            node_id in self._sessions and self._sessions[node_id].metadata_offset >= offset
            for node_id in node_ids
        )
