"""ReplicaFetch: a follower broker's fetch of all that it replicates from here.

Behaviour: the request tells where the follower stands in the partitions it lists, which counts at once: it
may move the high watermark, and bring the follower into the ISR. The answer has the partitions with news:
records up to the log end, a divergence (R4), an error, or else another high watermark. Without the former
three it waits, at most ``max_wait_ms``. The next request of the session ends the wait of the one before. So a
follower tells how far it is synced the moment it knows, and no producer waits for a poll.

Errors: of the whole request CLUSTER_AUTHORIZATION_FAILED, STALE_BROKER_EPOCH, FETCH_SESSION_ID_NOT_FOUND,
INVALID_FETCH_SESSION_EPOCH; of a partition UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER,
FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, OFFSET_OUT_OF_RANGE (with the log start), KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.replication.fetch_sessions import FetchedReplica, FetchSession
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Pending, Refusal, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import (
    ClusterAuthorizationFailedError,
    ErrorCode,
    InvalidRequestError,
    NotLeaderOrFollowerError,
    StaleBrokerEpochError,
)
from kafkalite.model import NO_EPOCH, NO_OFFSET
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.cluster import (
    ReplicaFetchedPartition,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)

MAX_WAIT_MS: Final = 60_000
MAX_PARTITIONS_PER_ANSWER: Final = 5_000


def handle(services: Services, request: Request, client: Client) -> Reply | Pending:
    message: ReplicaFetchRequest = request.message
    if services.replicas is None:
        raise InvalidRequestError("this broker does not replicate")
    if client.node_id != message.node_id:
        raise ClusterAuthorizationFailedError(f"node {client.node_id} fetches as node {message.node_id}")
    _check_broker_epoch(services, message)
    session, is_new = _session(services, message)
    for topic_id, number in message.forgotten:
        forgotten = session.forget((topic_id, number))
        if forgotten is not None:
            _forget(forgotten)
    now_ms = services.clock.monotonic_ms()
    for asked in message.partitions:
        _take(services, session.list(asked), now_ms)
    answer = _Answer(services, session, message)
    may_wait = message.max_wait_ms > 0 and not services.replicas.is_stopping and not is_new
    if may_wait and not answer.is_due:
        return _Poll(services, session, message).begin(answer.missing_bytes)
    return answer.reply()


def _check_broker_epoch(services: Services, message: ReplicaFetchRequest) -> None:
    broker = services.controller.image.brokers.get(message.node_id)
    if broker is None or broker.broker_epoch != message.broker_epoch:
        known = None if broker is None else broker.broker_epoch
        raise StaleBrokerEpochError(
            f"broker {message.node_id} fetches in broker epoch {message.broker_epoch}; here it has {known}"
        )


def _session(services: Services, message: ReplicaFetchRequest) -> tuple[FetchSession, bool]:
    """The session, with no request waiting in it any more; and whether it is a new one."""
    sessions = services.replicas.sessions
    session: FetchSession | None = sessions.find(message)
    if session is None:
        session, replaced = sessions.open(message.node_id, message.broker_epoch)
        if replaced is not None:
            end_session(replaced)
        return session, True
    if session.poll is not None:
        session.poll.finish()
    return session, False


def end_session(session: FetchSession) -> None:
    """Nobody asks in it any more."""
    for replica in session.replicas.values():
        _forget(replica)
    if session.poll is not None:
        session.poll.finish()


def _forget(replica: FetchedReplica) -> None:
    """Whether the follower still has what it told of is not known until it lists the partition again."""
    hosted: HostedPartition | None = replica.hosted
    if hosted is not None:
        hosted.partition.forget_follower(replica.session.node_id)
    unwatch(replica)


def unwatch(replica: FetchedReplica) -> None:
    hosted: HostedPartition | None = replica.hosted
    node_id = replica.session.node_id
    if hosted is not None and hosted.watchers.get(node_id) is replica:
        del hosted.watchers[node_id]
    replica.hosted = None


def _take(services: Services, replica: FetchedReplica, now_ms: int) -> None:
    """Count where the follower stands in a partition (R7, R8), and find out what is news to it."""
    session, asked = replica.session, replica.asked
    hosted: HostedPartition | None = None
    try:
        hosted = services.partitions.by_id(asked.topic_id, asked.partition)
        result = hosted.partition.on_replica_fetch(
            session.node_id,
            broker_epoch=session.broker_epoch,
            leader_epoch=asked.leader_epoch,
            fetch_offset=asked.fetch_offset,
            last_epoch=asked.last_epoch,
            synced_end_offset=asked.synced_end_offset,
            log_start_offset=asked.log_start_offset,
            now_ms=now_ms,
        )
    except AssertionError:
        raise
    except Exception as error:
        unwatch(replica)
        if not replica.is_answered:
            replica.refusal = _refusal(replica, error, hosted)
            session.ready[replica] = None
        return
    if replica.hosted is not hosted:
        unwatch(replica)
        replica.hosted = hosted
        hosted.watchers[session.node_id] = replica
    if result.moved:
        hosted.on_high_watermark_moved()
    hosted.on_low_watermark()
    if not replica.is_answered:
        replica.diverging = result.diverging
        if result.diverging is not None or hosted.log.log_end_offset > asked.fetch_offset:
            session.ready[replica] = None
        else:
            session.ready.pop(replica, None)
    if replica.told_high_watermark != hosted.high_watermark:
        session.moved[replica] = None
    if result.may_join:
        services.replicas.on_caught_up(hosted)


def _refusal(
    replica: FetchedReplica, error: Exception, hosted: HostedPartition | None
) -> ReplicaFetchedPartition:
    """Who is out of range is told where this log starts: it may have to begin there."""
    code, text = translate(error)
    leader_epoch, log_start = NO_EPOCH, NO_OFFSET
    if code == ErrorCode.OFFSET_OUT_OF_RANGE and hosted is not None:
        leader_epoch, log_start = hosted.partition.leader_epoch, hosted.log_start_offset
    return ReplicaFetchedPartition(
        *replica.key, code, text, leader_epoch, NO_OFFSET, log_start, NO_EPOCH, NO_OFFSET, 0
    )


class _Answer:
    """What there is to answer in a session now. Only ``reply`` counts it as answered."""

    __slots__ = ("_buffers", "_partitions", "_session", "_settled", "has_urgent", "missing_bytes")

    def __init__(self, services: Services, session: FetchSession, message: ReplicaFetchRequest) -> None:
        self._session = session
        self._partitions: list[ReplicaFetchedPartition] = []
        self._settled: list[FetchedReplica] = []
        self._buffers: list[Any] = []
        self.has_urgent = False  #: an error or a divergence
        self.missing_bytes = max(message.min_bytes, 1)
        left_bytes = min(message.max_bytes, services.config.replica_fetch_response_max_bytes)
        for replica in list(session.ready):
            if len(self._partitions) >= MAX_PARTITIONS_PER_ANSWER:
                break
            size_bytes = self._add(replica, min(left_bytes, message.max_partition_bytes))
            left_bytes -= size_bytes
            self.missing_bytes -= size_bytes
            if left_bytes <= 0:
                break

    @property
    def is_due(self) -> bool:
        return self.has_urgent or self.missing_bytes <= 0

    def _add(self, replica: FetchedReplica, max_bytes: int) -> int:
        """One partition's part; how many bytes of records it has."""
        hosted: HostedPartition | None = replica.hosted
        refusal = replica.refusal
        if refusal is None and hosted is not None:
            try:
                return self._add_news(replica, hosted, max_bytes)
            except AssertionError:
                raise
            except Exception as error:
                refusal = _refusal(replica, error, hosted)
        if refusal is None:
            refusal = _refusal(replica, NotLeaderOrFollowerError("that leadership has ended"), None)
        self.has_urgent = True
        self._settled.append(replica)
        self._partitions.append(refusal)
        return 0

    def _add_news(self, replica: FetchedReplica, hosted: HostedPartition, max_bytes: int) -> int:
        partition = hosted.partition
        diverging = replica.diverging
        if diverging is not None:
            self.has_urgent = True
            self._append(replica, hosted, diverging.leader_epoch, diverging.end_offset, 0)
            self._settled.append(replica)
            return 0
        read = partition.read_for_replica(replica.asked.fetch_offset, max_bytes)
        size_bytes = read.size_bytes
        if not size_bytes:  # the question stays open
            del self._session.ready[replica]
            return 0
        if size_bytes > max_bytes and self._buffers:
            return max_bytes  # a batch that only fits into an answer of its own: the next one
        self._append(replica, hosted, NO_EPOCH, NO_OFFSET, size_bytes)
        self._buffers += read.buffers
        self._settled.append(replica)
        return size_bytes

    def _append(
        self,
        replica: FetchedReplica,
        hosted: HostedPartition,
        diverging_epoch: int,
        diverging_end: int,
        size_bytes: int,
    ) -> None:
        topic_id, number = replica.key
        high_watermark, log_start = hosted.high_watermark, hosted.log_start_offset
        replica.told_high_watermark, replica.told_log_start = high_watermark, log_start
        self._partitions.append(
            ReplicaFetchedPartition(
                topic_id,
                number,
                0,
                None,
                hosted.partition.leader_epoch,
                high_watermark,
                log_start,
                diverging_epoch,
                diverging_end,
                size_bytes,
            )
        )

    def reply(self) -> Reply:
        """The answer, with high watermarks and log starts that moved without anything else."""
        session = self._session
        for replica in self._settled:
            replica.settle()
            session.moved.pop(replica, None)
        for replica in list(session.moved):
            if len(self._partitions) >= MAX_PARTITIONS_PER_ANSWER:
                break
            del session.moved[replica]
            hosted: HostedPartition | None = replica.hosted
            if hosted is None or replica.diverging is not None:
                continue
            told = (replica.told_high_watermark, replica.told_log_start)
            if told != (hosted.high_watermark, hosted.log_start_offset):
                self._append(replica, hosted, NO_EPOCH, NO_OFFSET, 0)
        message = ReplicaFetchResponse(0, None, session.session_id, self._partitions)
        return Reply(message, self._buffers)


class _Poll:
    """A request that waits for news: until there are ``min_bytes``, the next request, or time is over."""

    __slots__ = ("_message", "_pending", "_services", "_session", "_timer")

    def __init__(self, services: Services, session: FetchSession, message: ReplicaFetchRequest) -> None:
        self._services = services
        self._session = session
        self._message = message._replace(partitions=[], forgotten=[])
        self._pending = Pending(self._release)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, missing_bytes: int) -> Pending:
        session, loop = self._session, self._services.waiters.loop
        self._timer = loop.call_later(min(self._message.max_wait_ms, MAX_WAIT_MS) / 1000, self.finish)
        session.poll = self
        session.missing_bytes = missing_bytes
        return self._pending

    def wake(self) -> None:
        """There is enough: answer in a later turn of the loop, with what else comes in this one."""
        self._services.waiters.loop.call_soon(self.finish)

    def finish(self) -> None:
        """Answer with what there is."""
        if self._pending.is_done:
            return
        try:
            answer = _Answer(self._services, self._session, self._message)
            self._pending.resolve(answer.reply())
        except AssertionError as error:
            self._services.on_broken(error)
            self._pending.resolve(Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker stops", closes=True))

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._session.poll is self:
            self._session.poll = None
