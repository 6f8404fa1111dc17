"""What a leader remembers of its followers' fetches: sessions, as Kafka's KIP-227 has them.

A follower broker has one session with each broker that leads partitions it replicates. It lists a partition
when its position there is another one than before; the leader answers only partitions with news. So an idle
follower costs one tiny request every ``replica.fetch.wait.max.ms``, whatever the number of partitions.

One listing is one question, and is answered with records, a divergence or an error once (R3). After that the
partition is silent until it is listed with another fetch offset, or forgotten and listed anew. A listing
that repeats the fetch offset only tells how far the follower is synced. So a follower may send a request
while the answer to an earlier one is on its way, and no record is sent twice. The high watermark and the
log start are told along, as often as they move.

Pure: what news there is, is worked out by who reads the partitions.
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

OPENS: Final = 0  #: the session id, and epoch, that ask for a new session
MAX_EPOCH: Final = 2**31 - 1


class Poll(Protocol):
    """A request of a session that waits."""

    def update(self) -> None:
        """Answer soon: there is enough."""
        ...

    def finish(self) -> None:
        """Answer now, with what there is."""
        ...


class FetchedReplica:
    """One partition in one session.

    Invariant: in ``session.ready`` only while its question is open. Both told offsets are -1 before the
    first answer.
    """

    __slots__ = (
        "asked",
        "diverging",
        "hosted",
        "is_answered",
        "key",
        "refusal",
        "session",
        "told_high_watermark",
        "told_log_start",
    )

    def __init__(self, session: FetchSession, asked: ReplicaFetchPartition) -> None:
        self.session = session
        self.key = (asked.topic_id, asked.partition)
        self.asked = asked
        self.hosted: Any = None  #: what leads it, for the reader; None when it is not led here
        self.is_answered = False
        self.diverging: EpochEnd | None = None  #: to be answered
        self.refusal: ReplicaFetchedPartition | None = None  #: to be answered as it is
        self.told_high_watermark = self.told_log_start = -1

    def __repr__(self) -> str:
        state = "answered" if self.is_answered else "open"
        where = f"of node {self.session.node_id} at {self.asked.fetch_offset}"
        return f"<FetchedReplica {self.key} {where}, {state}>"

    # --- what happens to the partition

    def on_appended(self, size_bytes: int) -> None:
        if not self.is_answered:
            session = self.session
            session.ready[self] = None
            session.on_news(size_bytes)

    def on_moved(self) -> None:
        """The high watermark or the log start moved: that goes along with the next answer."""
        self.session.moved[self] = None

    def on_role_changed(self) -> None:
        """It is not led here any more, or in another epoch: the next answer says so."""
        self.hosted = None
        if not self.is_answered:
            self.session.ready[self] = None
            self.session.on_news(0)

    # --- what the reader says

    def take(self, asked: ReplicaFetchPartition) -> None:
        """It is listed again."""
        before = self.asked
        self.asked = asked
        if asked.fetch_offset != before.fetch_offset or asked.leader_epoch != before.leader_epoch:
            self.is_answered = False
            self.diverging = self.refusal = None
            self.told_high_watermark = -1  # it may have been told too early to be believed

    def settle(self) -> None:
        """Records, a divergence or an error were answered."""
        self.is_answered = True
        self.diverging = self.refusal = None
        self.session.ready.pop(self, None)


class FetchSession:
    """One follower broker's session. ``epoch`` is what its next request must carry."""

    def __init__(self, session_id: int, node_id: int, broker_epoch: int) -> None:
        self.session_id = session_id
        self.node_id = node_id
        self.broker_epoch = broker_epoch
        self.epoch = OPENS + 1
        self.replicas: dict[PartitionKey, FetchedReplica] = {}
        self.ready: dict[FetchedReplica, None] = {}  #: with records, a divergence or an error to answer
        self.moved: dict[FetchedReplica, None] = {}  #: whose high watermark or log start may be news
        self.poll: Poll | None = None  #: the request that waits for news
        self.missing_bytes = 0  #: of appends, before it is woken

    def __repr__(self) -> str:
        return f"<FetchSession {self.session_id} of node {self.node_id}, {len(self.replicas)} partitions>"

    def on_news(self, size_bytes: int) -> None:
        """``size_bytes`` more may be answered; 0 stands for what must not wait."""
        if self.poll is not None and self.missing_bytes > 0:
            self.missing_bytes -= size_bytes or self.missing_bytes
            if self.missing_bytes <= 0:
                self.poll.update()

    def list(self, asked: ReplicaFetchPartition) -> FetchedReplica:
        """Take the follower's new position in a partition."""
        replica = self.replicas.get((asked.topic_id, asked.partition))
        if replica is None:
            replica = FetchedReplica(self, asked)
            self.replicas[replica.key] = replica
        else:
            replica.take(asked)
        return replica

    def forget(self, key: PartitionKey) -> FetchedReplica | None:
        """The follower fetches that partition no more, or wants to begin anew."""
        replica = self.replicas.pop(key, None)
        if replica is not None:
            replica.is_answered = True
            self.ready.pop(replica, None)
            self.moved.pop(replica, None)
        return replica


class FetchSessions:
    """All sessions of a leader: at most one of a follower broker, the latest."""

    def __init__(self) -> None:
        self._sessions: dict[int, FetchSession] = {}
        self._last_id = OPENS

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def find(self, request: ReplicaFetchRequest) -> FetchSession | None:
        """The session ``request`` is the next one of; None: it opens one.

        Raises FetchSessionIdNotFoundError, InvalidFetchSessionEpochError: a request was lost or repeated.
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
        """A new session, and the one of the same broker that it replaces."""
        self._last_id += 1
        replaced = self._sessions.get(node_id)
        session = self._sessions[node_id] = FetchSession(self._last_id, node_id, broker_epoch)
        return session, replaced

    def close(self, session: FetchSession) -> None:
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
