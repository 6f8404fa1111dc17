"""The leader's side of its followers' fetches: fetch sessions, as in KIP-227.

A follower broker has one session with each broker that leads partitions it replicates. The follower lists a
partition in a request when the position of its replica has changed: log end, synced end, log start or leader
epoch. The leader responds only with partitions that have updates. So an idle follower costs one small request
every ``replica.fetch.wait.max.ms``, regardless of the number of partitions.

When a partition is listed, it gets one response with records, a divergence or an error (R3). Afterwards it
gets none until the follower lists it with another fetch offset or leader epoch, or forgets it and lists it
again. If it is listed again with the same offset and epoch, that only reports how far the follower is synced.
So a follower may send a request while an earlier response is in flight, and no record is sent twice. High
watermarks and log starts are sent whenever they have moved.

Pure: the caller reads the partitions and determines whether there are updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kafkalite.errors import FetchSessionIdNotFoundError, InvalidFetchSessionEpochError
from kafkalite.protocol.messages.cluster import (
    ReplicaFetchedPartition,
    ReplicaFetchPartition,
    ReplicaFetchRequest,
)
from kafkalite.storage.leader_epochs import EpochEnd

PartitionKey = tuple[str, int]
"""(topic id, partition)"""

OPENS: Final = 0  #: the session id and the epoch in a request for a new session
MAX_EPOCH: Final = 2**31 - 1


class Poll(Protocol):
    """A fetch whose response is held until the session has updates."""

    def update(self) -> None:
        """Respond soon, because enough data is available."""
        ...

    def finish(self) -> None:
        """Respond now with the available data."""
        ...


@dataclass(slots=True, eq=False)
class FetchedReplica:
    """One partition in one session: the position that the follower listed, and the offsets sent to it.

    Invariant: the object is in ``session.ready`` or in ``session.throttled`` only if not ``is_sent``, and
    never in both. Both sent offsets are -1 before the
    first response.
    """

    session: FetchSession
    asked: ReplicaFetchPartition
    key: PartitionKey = field(init=False)
    hosted: Any = None  #: the HostedPartition, or None if this broker does not lead it
    is_sent: bool = False  #: whether the last listing has had its response
    diverging: EpochEnd | None = None  #: the divergence at the position that the follower listed
    refusal: ReplicaFetchedPartition | None = None  #: the error result to send
    is_checked: bool = False  #: whether the CRCs of the first batches were checked after the listing (R43)
    sent_high_watermark: int = -1
    sent_log_start: int = -1
    pushed_high_watermark: int = -1  #: the one that was last sent, whatever the follower listed since then
    is_read: bool = False  #: whether consumers were directed to this follower in this leader epoch (R66)

    def __post_init__(self) -> None:
        self.key = (self.asked.topic_id, self.asked.partition)

    def __repr__(self) -> str:
        state = "sent" if self.is_sent else "open"
        where = f"of node {self.session.node_id} at {self.asked.fetch_offset}"
        return f"<FetchedReplica {self.key} {where}, {state}>"

    def on_appended(self, size_bytes: int) -> None:
        if not self.is_sent and self not in self.session.throttled:
            session = self.session
            session.ready[self] = None
            session.on_new_data(size_bytes)

    def on_moved(self) -> None:
        """Send the new high watermark or log start with the next response, at once if consumers read from
        this follower: they wait for it (KIP-392)."""
        session = self.session
        session.moved[self] = None
        if self.is_read:
            session.has_awaited_move = True
            session.on_new_data(0)

    def on_read_near(self, *, is_read: bool = True) -> None:
        """Send the follower each new high watermark at once, and the present one if it was not sent yet. If
        not ``is_read``, stop doing so."""
        if not is_read:
            self.is_read = False
        elif not self.is_read:
            self.is_read = True
            if self in self.session.moved:
                self.on_moved()

    def on_role_changed(self) -> None:
        """Report that this broker no longer leads the partition in this epoch, if a response is still due."""
        self.hosted = None
        self.is_read = False
        self.session.throttled.pop(self, None)
        if not self.is_sent:
            self.session.ready[self] = None
            self.session.on_new_data(0)

    def take(self, asked: ReplicaFetchPartition) -> None:
        """Replace the fetch position, because the follower's request names the partition again."""
        before = self.asked
        self.asked = asked
        self.session.throttled.pop(self, None)
        if asked.fetch_offset != before.fetch_offset or asked.leader_epoch != before.leader_epoch:
            self.is_sent = False
            self.diverging = self.refusal = None
            self.sent_high_watermark = -1  # send it again: the follower may have been unable to use it

    def mark_sent(self) -> None:
        """Record that the follower was sent records, a divergence or an error since it last listed the
        partition."""
        self.is_sent = True
        self.refusal = None
        self.session.ready.pop(self, None)

    def may_learn_high_watermark(self) -> bool:
        """Whether the follower may raise its high watermark now (R10).

        It may not until its log agrees with the leader's: otherwise records that only the follower has would
        count as committed.
        """
        return self.diverging is None


class FetchSession:
    """The session of one follower broker. The next request of the session must state ``epoch``."""

    def __init__(self, session_id: int, node_id: int, broker_epoch: int) -> None:
        self.session_id = session_id
        self.node_id = node_id
        self.broker_epoch = broker_epoch
        self.epoch = OPENS + 1
        self.replicas: dict[PartitionKey, FetchedReplica] = {}
        self.ready: dict[FetchedReplica, None] = {}  #: those with records, a divergence or an error to send
        self.throttled: dict[FetchedReplica, None] = {}  #: those whose records wait for the leader's quota
        self.moved: dict[FetchedReplica, None] = {}  #: those whose high watermark or log start may have moved
        self.poll: Poll | None = None  #: the request that waits for updates
        self.has_awaited_move = False  #: whether consumers of a follower wait for an offset in ``moved``
        self.missing_bytes = 0  #: the number of further bytes after which ``poll`` responds

    def __repr__(self) -> str:
        return f"<FetchSession {self.session_id} of node {self.node_id}, {len(self.replicas)} partitions>"

    def on_new_data(self, size_bytes: int) -> None:
        """Send the held response if it now has enough data.

        Called when ``size_bytes`` more can be sent; 0 means that the response must be sent at once.
        """
        if self.poll is not None and self.missing_bytes > 0:
            self.missing_bytes -= size_bytes or self.missing_bytes
            if self.missing_bytes <= 0:
                self.poll.update()

    def throttle(self, replica: FetchedReplica) -> None:
        """Let the records of ``replica`` wait until ``end_throttling`` (R70)."""
        del self.ready[replica]
        self.throttled[replica] = None

    def end_throttling(self) -> None:
        """Let the records of throttled replicas be sent again, before those of others: a replica that has
        just listed its next position must not use up the quota each time."""
        self.ready = self.throttled | self.ready
        self.throttled = {}

    def end_throttling_of(self, key: PartitionKey) -> None:
        """Send the records of the partition soon if they wait for the leader's quota."""
        replica = self.replicas.get(key)
        if replica is not None and replica in self.throttled:
            del self.throttled[replica]
            self.ready[replica] = None
            self.on_new_data(0)

    def list(self, asked: ReplicaFetchPartition) -> FetchedReplica:
        """Add the partition that ``asked`` names, or update its fetch position. Return its state."""
        replica = self.replicas.get((asked.topic_id, asked.partition))
        if replica is None:
            replica = FetchedReplica(self, asked)
            self.replicas[replica.key] = replica
        else:
            replica.take(asked)
        return replica

    def forget(self, key: PartitionKey) -> FetchedReplica | None:
        """Remove a partition, and return its state, or None if the session did not have the partition.

        Called when the follower no longer fetches the partition, or before it lists the partition again.
        """
        replica = self.replicas.pop(key, None)
        if replica is not None:
            replica.is_sent = True
            self.ready.pop(replica, None)
            self.throttled.pop(replica, None)
            self.moved.pop(replica, None)
        return replica


class FetchSessions:
    """The sessions of this leader, at most one for each follower broker."""

    def __init__(self) -> None:
        self._sessions: dict[int, FetchSession] = {}
        self._last_id = OPENS

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def find(self, request: ReplicaFetchRequest) -> FetchSession | None:
        """Return the session that ``request`` continues, and advance its epoch. Return None if it requests a
        new session.

        Raises FetchSessionIdNotFoundError. Raises InvalidFetchSessionEpochError if the session does not
        expect the request's session epoch or broker epoch, or if a request without a session has an epoch
        other than 0.
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
                f"session {session.session_id} expects epoch {session.epoch}, not {request.session_epoch}"
            )
        session.epoch = OPENS + 1 if session.epoch == MAX_EPOCH else session.epoch + 1
        return session

    def open(self, node_id: int, broker_epoch: int) -> tuple[FetchSession, FetchSession | None]:
        """Return (new session of a broker, the session that it replaces or None)."""
        self._last_id += 1
        replaced = self._sessions.get(node_id)
        session = self._sessions[node_id] = FetchSession(self._last_id, node_id, broker_epoch)
        return session, replaced

    def close(self, session: FetchSession) -> None:
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
