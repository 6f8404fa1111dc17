"""The sessions of the live brokers, tracked by the active controller (R23). Pure: time is an argument.

After a heartbeat, a session lasts for the session timeout. The broker itself counts from the sending of the
heartbeat, so the broker considers its session ended before the controller does, and two brokers never serve
the same partition. A session ends earlier only if the broker is permitted to shut down, or if its process is
gone: its heartbeat connection is closed, and its host refuses a new connection. Sessions are not in the
metadata log. A new controller gives every unfenced broker a whole session, because the former controller may
have answered a heartbeat shortly before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# If a check is this late, this process was paused, and unread heartbeats are waiting.
LATE_CHECK_MS: Final = 1_000


@dataclass(slots=True)
class _Session:
    broker_epoch: int
    deadline_ms: int
    metadata_offset: int  #: the last offset that the broker has replayed; -1 before the first heartbeat
    is_connected: bool  #: whether the connection of its last heartbeat is still open


class BrokerSessions:
    """The broker sessions by node id. Invariant: a node has at most one session, for its newest broker
    epoch."""

    def __init__(self, session_timeout_ms: int) -> None:
        self._session_timeout_ms = session_timeout_ms
        self._sessions: dict[int, _Session] = {}
        self._checked_ms: int | None = None

    def on_heartbeat(self, node_id: int, broker_epoch: int, metadata_offset: int, now_ms: int) -> None:
        """Begin or extend the broker's session: it ends a session timeout after ``now_ms``."""
        deadline_ms = now_ms + self._session_timeout_ms
        self._sessions[node_id] = _Session(broker_epoch, deadline_ms, metadata_offset, is_connected=True)

    def on_disconnect(self, node_id: int) -> None:
        """Record that the heartbeat connection has closed. The end of the session does not change."""
        session = self._sessions.get(node_id)
        if session is not None:
            session.is_connected = False

    def on_refused(self, node_id: int, broker_epoch: int, now_ms: int) -> None:
        """End the session if it has no connection, because the broker's host has refused a new connection."""
        session = self._sessions.get(node_id)
        if session is not None and session.broker_epoch == broker_epoch and not session.is_connected:
            session.deadline_ms = min(session.deadline_ms, now_ms)

    def expect(self, node_id: int, broker_epoch: int, now_ms: int) -> None:
        """Give a live broker a session without a connection, unless it has a session of this broker epoch."""
        session = self._sessions.get(node_id)
        if session is None or session.broker_epoch != broker_epoch:
            deadline_ms = now_ms + self._session_timeout_ms
            self._sessions[node_id] = _Session(broker_epoch, deadline_ms, -1, is_connected=False)

    def end(self, node_id: int) -> None:
        self._sessions.pop(node_id, None)

    def clear(self) -> None:
        """Drop all sessions. Called when this controller is not active."""
        self._sessions.clear()
        self._checked_ms = None

    def is_alive(self, node_id: int, broker_epoch: int, now_ms: int) -> bool:
        """Whether the process with this broker epoch has a session that has not expired and whose heartbeat
        connection is open."""
        session = self._sessions.get(node_id)
        return (
            session is not None
            and session.broker_epoch == broker_epoch
            and session.is_connected
            and now_ms < session.deadline_ms
        )

    def unconnected(self) -> list[int]:
        """Return the node ids of the sessions without an open heartbeat connection."""
        return [node_id for node_id, session in sorted(self._sessions.items()) if not session.is_connected]

    def expired(self, now_ms: int) -> list[tuple[int, int]]:
        """Return (node id, broker epoch) of each expired session. Call it about every 100 ms.

        If the previous call is more than LATE_CHECK_MS ago, every session is first extended by the time since
        then, because heartbeats could not be read meanwhile.
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
        """Whether the heartbeats of all these brokers report a metadata offset of at least ``offset``."""
        return all(
            node_id in self._sessions and self._sessions[node_id].metadata_offset >= offset
            for node_id in node_ids
        )
