"""ReplicaFetch: a follower fetches, in one request, all partitions that it replicates from this broker."""

# Tests: tests/broker/test_replication.py

from __future__ import annotations

import asyncio
from typing import Any, Final

from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.quotas.replication_quota import ReplicationQuota
from kafkalite.broker.replication.fetch_sessions import FetchedReplica, FetchSession, FetchSessions
from kafkalite.broker.replication.replica_manager import ReplicaManager
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import STOPS, translate
from kafkalite.broker.server.responses import HeldResponse, Pending, Reply, Response
from kafkalite.broker.services import Services
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
from kafkalite.raft.controller_node import ControllerNode

MAX_WAIT_MS: Final = 60_000
MAX_PARTITIONS_PER_RESPONSE: Final = 5_000


def replica_fetch(services: Services, request: Request, client: Client) -> Reply | Pending:
    """Return new records and offsets to a follower broker, for all partitions of its fetch session.

    Behaviour: the request lists partitions with the follower's positions in them. These take effect at once:
    they may move the high watermark and add the follower to the ISR. The response has the partitions of the
    session with updates, as many as its limits allow. An update is records up to the log end, a divergence
    (R4), an error, or a new high watermark or log start. If there are no errors or divergences, and fewer
    than ``min_bytes`` of records, the response waits up to ``max_wait_ms``. It does not wait if a high
    watermark has moved and consumers read from the follower (R66). The next request of the session ends this
    wait. So a follower can report its synced end offset at any time, and no producer waits for a long poll.
    The response to the first request of a session does not wait.

    Errors: of the whole request CLUSTER_AUTHORIZATION_FAILED, STALE_BROKER_EPOCH, FETCH_SESSION_ID_NOT_FOUND,
    INVALID_FETCH_SESSION_EPOCH, INVALID_REQUEST (this broker does not replicate); of a partition
    UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    STALE_BROKER_EPOCH, OFFSET_OUT_OF_RANGE (with the log start), KAFKA_STORAGE_ERROR.
    """
    message: ReplicaFetchRequest = request.message
    followers = services.replicas
    if followers is None:
        raise InvalidRequestError("this broker does not replicate")
    if client.node_id != message.node_id:
        raise ClusterAuthorizationFailedError(f"node {client.node_id} fetches as node {message.node_id}")
    _check_broker_epoch(services.controller, message)
    session, is_new = _session(followers.sessions, message)
    for topic_id, number in message.forgotten:
        forgotten = session.forget((topic_id, number))
        if forgotten is not None:
            _forget(forgotten)
    now_ms = services.clock.monotonic_ms()
    for asked in message.partitions:
        _take(services, followers, session.list(asked), now_ms)
    updates = _updates(services, followers, session, message)
    may_wait = message.max_wait_ms > 0 and not followers.is_stopping and not is_new
    if may_wait and not updates.is_due and not session.has_awaited_move:
        return _hold(services, followers, session, message._replace(partitions=[], forgotten=[]), updates)
    return updates.reply()


def _updates(
    services: Services, followers: ReplicaManager, session: FetchSession, message: ReplicaFetchRequest
) -> _Updates:
    max_bytes = services.config.replica_fetch_response_max_bytes
    return _Updates(session, message, max_bytes, followers.leader_quota, services.clock.monotonic_ms())


def _hold(
    services: Services,
    followers: ReplicaManager,
    session: FetchSession,
    message: ReplicaFetchRequest,
    updates: _Updates,
) -> HeldResponse:
    """Hold the response until updates are due, ``max_wait_ms`` is over, or the next request arrives.

    Records of throttled replicas are due when the leader's quota allows some of them.
    """
    loop = services.waiters.loop
    timer: asyncio.TimerHandle | None = None

    def ask() -> Response:
        try:
            return _updates(services, followers, session, message).reply()
        except AssertionError as error:
            services.on_broken(error)
            return STOPS

    def release() -> None:
        if session.poll is held:
            session.poll = None
        if timer is not None:
            timer.cancel()

    held = HeldResponse(loop, min(message.max_wait_ms, MAX_WAIT_MS), ask, on_cancel=release)
    session.poll = held
    session.missing_bytes = updates.missing_bytes
    held.offer(None)
    if session.throttled:
        wait_ms = followers.leader_quota.wait_ms(services.clock.monotonic_ms())
        timer = loop.call_later(wait_ms / 1000, held.update)
    return held


def _check_broker_epoch(controller: ControllerNode, message: ReplicaFetchRequest) -> None:
    broker = controller.image.brokers.get(message.node_id)
    if broker is None or broker.broker_epoch != message.broker_epoch:
        known = None if broker is None else broker.broker_epoch
        raise StaleBrokerEpochError(
            f"broker {message.node_id} fetches in broker epoch {message.broker_epoch}; here it has {known}"
        )


def _session(sessions: FetchSessions, message: ReplicaFetchRequest) -> tuple[FetchSession, bool]:
    """Return (session, whether it is new). Respond to the session's previous request if it is held."""
    session = sessions.find(message)
    if session is None:
        session, replaced = sessions.open(message.node_id, message.broker_epoch)
        if replaced is not None:
            _end_session(replaced)
        return session, True
    if session.poll is not None:
        session.poll.finish()
    return session, False


def _end_session(session: FetchSession) -> None:
    """End the fetch session: discard the follower's positions, and respond to its held request."""
    for replica in session.replicas.values():
        _forget(replica)
    if session.poll is not None:
        session.poll.finish()


def _forget(replica: FetchedReplica) -> None:
    """Discard the follower's position. The follower lists the partition again to set another one."""
    hosted: HostedPartition | None = replica.hosted
    if hosted is not None:
        hosted.forget_follower(replica.session.node_id)
    _unwatch(replica)


def _unwatch(replica: FetchedReplica) -> None:
    hosted: HostedPartition | None = replica.hosted
    if hosted is not None:
        hosted.unwatch(replica.session.node_id, replica)
    replica.hosted = None


def _take(services: Services, followers: ReplicaManager, replica: FetchedReplica, now_ms: int) -> None:
    """Apply the follower's position in a partition (R7, R8).

    Mark the partition as ready in the session if there are records, a divergence or an error to send. Mark it
    as moved if its high watermark is not the one that was last sent.
    """
    session, asked = replica.session, replica.asked
    hosted: HostedPartition | None = None
    try:
        hosted = services.partitions.by_id(asked.topic_id, asked.partition)
        result = hosted.on_replica_fetch(session.node_id, session.broker_epoch, asked, replica, now_ms)
    except AssertionError:
        raise
    except Exception as error:
        _unwatch(replica)
        if not replica.is_sent:
            replica.refusal = _refusal(replica, error, hosted)
            session.ready[replica] = None
        return
    if replica.hosted is not hosted:
        _unwatch(replica)
        replica.hosted = hosted
    replica.diverging = result.diverging
    if not replica.is_sent:
        if result.diverging is not None or hosted.log_end_offset > asked.fetch_offset:
            session.ready[replica] = None
        else:
            session.ready.pop(replica, None)
    if replica.sent_high_watermark != hosted.high_watermark:
        session.moved[replica] = None
        if replica.is_read and replica.pushed_high_watermark != hosted.high_watermark:
            session.has_awaited_move = True
    if result.may_join:
        followers.on_caught_up(hosted.partition)


def _refusal(
    replica: FetchedReplica, error: Exception, hosted: HostedPartition | None
) -> ReplicaFetchedPartition:
    """Return the result that reports ``error``. With OFFSET_OUT_OF_RANGE it includes the log start."""
    code, text = translate(error)
    leader_epoch, log_start = NO_EPOCH, NO_OFFSET
    if code == ErrorCode.OFFSET_OUT_OF_RANGE and hosted is not None:
        leader_epoch, log_start = hosted.leader_epoch, hosted.log_start_offset
    return ReplicaFetchedPartition(
        *replica.key, code, text, leader_epoch, NO_OFFSET, log_start, NO_EPOCH, NO_OFFSET, 0
    )


class _Updates:
    """Collects the updates of a session's partitions for one response. ``reply`` marks them as sent."""

    __slots__ = (
        "_buffers",
        "_complete",
        "_now_ms",
        "_partitions",
        "_quota",
        "_session",
        "has_urgent",
        "missing_bytes",
    )

    def __init__(
        self,
        session: FetchSession,
        message: ReplicaFetchRequest,
        max_bytes: int,
        quota: ReplicationQuota,
        now_ms: int,
    ) -> None:
        self._session = session
        self._quota = quota
        self._now_ms = now_ms
        self._partitions: list[ReplicaFetchedPartition] = []
        self._complete: list[FetchedReplica] = []
        self._buffers: list[Any] = []
        self.has_urgent = False  #: whether there is an error or a divergence
        self.missing_bytes = max(message.min_bytes, 1)
        left_bytes = min(message.max_bytes, max_bytes)
        if session.throttled and quota.allowed_bytes(now_ms):
            session.end_throttling()
        throttled: list[FetchedReplica] = []
        for replica in list(session.ready):
            if len(self._partitions) >= MAX_PARTITIONS_PER_RESPONSE:
                break
            if self.is_throttled(replica):
                throttled.append(replica)
                continue
            max_bytes = min(left_bytes, message.max_partition_bytes)
            size_bytes = self._add(replica, max_bytes, max_bytes)
            left_bytes -= size_bytes
            self.missing_bytes -= size_bytes
            if left_bytes <= 0:
                break
        if throttled:
            self._add_throttled(throttled, left_bytes, message.max_partition_bytes)

    @property
    def is_due(self) -> bool:
        return self.has_urgent or self.missing_bytes <= 0

    def is_throttled(self, replica: FetchedReplica) -> bool:
        """Whether the records for ``replica`` count against the leader's quota: its partition is listed, and
        the high watermark does not wait for the follower (R70)."""
        hosted: HostedPartition | None = replica.hosted
        if not self._quota.is_limited or hosted is None or replica.diverging is not None:
            return False
        topic, partition = hosted.key
        if not self._quota.covers(topic, partition):
            return False
        return not hosted.awaits(self._session.node_id)

    def _add_throttled(self, replicas: list[FetchedReplica], left_bytes: int, max_bytes: int) -> None:
        """Add the records of ``replicas`` that the quota allows. The others wait.

        If the quota allows anything, one batch is sent, whatever its size: the next records wait longer.
        """
        for replica in replicas:
            allowed = self._quota.allowed_bytes(self._now_ms)
            if allowed <= 0:
                self._session.throttle(replica)
            elif left_bytes > 0 and len(self._partitions) < MAX_PARTITIONS_PER_RESPONSE:
                size_bytes = self._add(replica, min(left_bytes, max_bytes, allowed), left_bytes)
                left_bytes -= size_bytes
                self.missing_bytes -= size_bytes

    def _add(self, replica: FetchedReplica, max_bytes: int, max_batch_bytes: int) -> int:
        """Add the updates of one partition. Return how many bytes of records they have.

        They have about ``max_bytes``, but at least one batch. Unless it is the first data of the response, it
        has at most ``max_batch_bytes``.
        """
        hosted: HostedPartition | None = replica.hosted
        refusal = replica.refusal
        if refusal is None and hosted is not None:
            try:
                return self._add_records(replica, hosted, max_bytes, max_batch_bytes)
            except AssertionError:
                raise
            except Exception as error:
                refusal = _refusal(replica, error, hosted)
        if refusal is None:
            refusal = _refusal(replica, NotLeaderOrFollowerError("this broker led in an earlier epoch"), None)
        self.has_urgent = True
        self._complete.append(replica)
        self._partitions.append(refusal)
        return 0

    def _add_records(
        self, replica: FetchedReplica, hosted: HostedPartition, max_bytes: int, max_batch_bytes: int
    ) -> int:
        diverging = replica.diverging
        if diverging is not None:
            self.has_urgent = True
            self._append(replica, hosted, diverging.leader_epoch, diverging.end_offset, 0)
            self._complete.append(replica)
            return 0
        # A follower that has received a damaged batch lists the partition again (R43).
        read = hosted.read_for_replica(replica.asked.fetch_offset, max_bytes, is_checked=replica.is_checked)
        size_bytes = read.size_bytes
        replica.is_checked = replica.is_checked or size_bytes > 0
        if not size_bytes:  # nothing was sent, so the listing stays open
            del self._session.ready[replica]
            return 0
        if size_bytes > max_batch_bytes and self._buffers:
            return max_batch_bytes  # the batch is too large; it is sent alone in the next response
        if self.is_throttled(replica):
            self._quota.spend(size_bytes, self._now_ms)
        self._append(replica, hosted, NO_EPOCH, NO_OFFSET, size_bytes)
        self._buffers += read.buffers
        self._complete.append(replica)
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
        replica.sent_high_watermark, replica.sent_log_start = high_watermark, log_start
        replica.pushed_high_watermark = high_watermark
        self._partitions.append(
            ReplicaFetchedPartition(
                topic_id,
                number,
                0,
                None,
                hosted.leader_epoch,
                high_watermark,
                log_start,
                diverging_epoch,
                diverging_end,
                size_bytes,
            )
        )

    def reply(self) -> Reply:
        """Return the response. It also has partitions of which only the high watermark or log start moved."""
        session = self._session
        for replica in self._complete:
            replica.mark_sent()
            session.moved.pop(replica, None)
        for replica in list(session.moved):
            if len(self._partitions) >= MAX_PARTITIONS_PER_RESPONSE:
                break
            del session.moved[replica]
            hosted: HostedPartition | None = replica.hosted
            if hosted is None or not replica.may_learn_high_watermark():
                continue
            sent = (replica.sent_high_watermark, replica.sent_log_start)
            if sent != (hosted.high_watermark, hosted.log_start_offset):
                self._append(replica, hosted, NO_EPOCH, NO_OFFSET, 0)
        session.has_awaited_move = bool(session.moved)
        message = ReplicaFetchResponse(0, None, session.session_id, self._partitions)
        return Reply(message, self._buffers)
