"""The leader's side of its followers' fetches: sessions, as in Kafka's KIP-227.

A follower broker has one session with each broker that leads partitions it replicates. It lists a
partition when its position there has changed; the leader responds only with partitions that have new
data. So an idle follower costs one small request every ``replica.fetch.wait.max.ms``, whatever the
number of partitions.

A listing is responded to once, with records, a divergence or an error (R3). After that the partition is
silent until it is listed with another fetch offset, or forgotten and listed again. A listing that
repeats the fetch offset only reports how far the follower is synced. So a follower may send a request
while the response to an earlier one is on its way, and no record is sent twice. The high watermark and
the log start are sent along whenever they move.

Pure: the caller reads the partitions and decides whether there is new data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

from kafkalite.errors import FetchSessionIdNotFoundError, InvalidFetchSessionEpochError
from kafkalite.protocol.messages.cluster import (
    ReplicaFetchedPartition,
    ReplicaFetchPartition,
    ReplicaFetchRequest,
)
from kafkalite.storage.leader_epochs import EpochEnd

PartitionKey = tuple[str, int]
"""Topic id and partition."""

OPENS: Final = 0  #: the session id, and epoch, that request a new session
MAX_EPOCH: Final = 2**31 - 1


class Poll(Protocol):
    """A session's request that waits for data."""

    def update(self) -> None:
        """Respond soon, because enough data is available."""
        ...

    def finish(self) -> None:
        """Respond now, with the available data."""
        ...


class FetchedReplica:
    """One partition in one session.

    Invariant: in ``session.ready`` only while its listing is open. Both sent offsets are -1 before the
    first response.
    """

    __slots__ = (
        "asked",
        "diverging",
        "hosted",
        "is_sent",
        "key",
        "refusal",
        "sent_high_watermark",
        "sent_log_start",
        "session",
    )

    def __init__(self, session: FetchSession, asked: ReplicaFetchPartition) -> None:
        self.session = session
        self.key = (asked.topic_id, asked.partition)
        self.asked = asked
        self.hosted: Any = None  #: the HostedPartition; None if it is not led here
        self.is_sent = False
        self.diverging: EpochEnd | None = None  #: to be sent
        self.refusal: ReplicaFetchedPartition | None = None  #: to be sent as it is
        self.sent_high_watermark = self.sent_log_start = -1

    def __repr__(self) -> str:
        state = "sent" if self.is_sent else "open"
        where = f"of node {self.session.node_id} at {self.asked.fetch_offset}"
        return f"<FetchedReplica {self.key} {where}, {state}>"

    # --- called by the partition

    def on_appended(self, size_bytes: int) -> None:
        if not self.is_sent:
            session = self.session
            session.ready[self] = None
            session.on_new_data(size_bytes)

    def on_moved(self) -> None:
        """Send the high watermark or the log start, which has moved, with the next response."""
        self.session.moved[self] = None

    def on_role_changed(self) -> None:
        """Report in the next response that this broker no longer leads the partition, or in another epoch."""
        self.hosted = None
        if not self.is_sent:
            self.session.ready[self] = None
            self.session.on_new_data(0)

    # --- called by the handler

    def take(self, asked: ReplicaFetchPartition) -> None:
        """Apply another listing of the partition."""
        before = self.asked
        self.asked = asked
        if asked.fetch_offset != before.fetch_offset or asked.leader_epoch != before.leader_epoch:
            self.is_sent = False
            self.diverging = self.refusal = None
            self.sent_high_watermark = -1  # the follower may have received it too early to accept it

    def mark_sent(self) -> None:
        """Record that records, a divergence or an error were sent."""
        self.is_sent = True
        self.diverging = self.refusal = None
        self.session.ready.pop(self, None)


class FetchSession:
    """One follower broker's session. Its next request must carry ``epoch``."""

    def __init__(self, session_id: int, node_id: int, broker_epoch: int) -> None:
        self.session_id = session_id
        self.node_id = node_id
        self.broker_epoch = broker_epoch
        self.epoch = OPENS + 1
        self.replicas: dict[PartitionKey, FetchedReplica] = {}
        self.ready: dict[FetchedReplica, None] = {}  #: with records, a divergence or an error to send
        self.moved: dict[FetchedReplica, None] = {}  #: their high watermark or log start may have moved
        self.poll: Poll | None = None  #: the request that waits for new data
        self.missing_bytes = 0  #: the appended bytes that wake ``poll``

    def __repr__(self) -> str:
        return f"<FetchSession {self.session_id} of node {self.node_id}, {len(self.replicas)} partitions>"

    def on_new_data(self, size_bytes: int) -> None:
        """Called when ``size_bytes`` more can be sent. 0 means that the response must be sent at once."""
        if self.poll is not None and self.missing_bytes > 0:
            self.missing_bytes -= size_bytes or self.missing_bytes
            if self.missing_bytes <= 0:
                self.poll.update()

    def list(self, asked: ReplicaFetchPartition) -> FetchedReplica:
        """Apply the follower's new position in a partition."""
        replica = self.replicas.get((asked.topic_id, asked.partition))
        if replica is None:
            replica = FetchedReplica(self, asked)
            self.replicas[replica.key] = replica
        else:
            replica.take(asked)
        return replica

    def forget(self, key: PartitionKey) -> FetchedReplica | None:
        """Remove a partition that the follower stops fetching or fetches again. Return its state."""
        replica = self.replicas.pop(key, None)
        if replica is not None:
            replica.is_sent = True
            self.ready.pop(replica, None)
            self.moved.pop(replica, None)
        return replica


class FetchSessions:
    """All sessions of a leader: the latest session of each follower broker."""

    def __init__(self) -> None:
        self._sessions: dict[int, FetchSession] = {}
        self._last_id = OPENS

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def find(self, request: ReplicaFetchRequest) -> FetchSession | None:
        """Return the session that ``request`` continues, or None if it opens one.

        Raises FetchSessionIdNotFoundError, InvalidFetchSessionEpochError: a request was lost or
        repeated.
        """
        if request.session_id == OPENS:
            if request.session_epoch != OPENS:
                raise InvalidFetchSessionEpochError("a session is opened with epoch 0")
            return None
        session = self._sessions.get(request.node_id)
        if session is None or session.session_id != request.session_id:
            raise FetchSessionIdNotFoundError(f"there is no fetch session {request.session_id}")
        if session.epoch != request.session_epoch or session.broker_epoch != request.broker_epoch:
            raise InvalidFetchSessionEpochError(
                f"fetch session {session.session_id} goes on at {session.epoch}, not {request.session_epoch}"
            )
        session.epoch = OPENS + 1 if session.epoch == MAX_EPOCH else session.epoch + 1
        return session

    def open(self, node_id: int, broker_epoch: int) -> tuple[FetchSession, FetchSession | None]:
        """Return a new session, and the same broker's session that it replaces."""
        self._last_id += 1
        replaced = self._sessions.get(node_id)
        session = self._sessions[node_id] = FetchSession(self._last_id, node_id, broker_epoch)
        return session, replaced

    def close(self, session: FetchSession) -> None:
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
