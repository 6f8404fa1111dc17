"""The leader's state of one partition: each replica's progress, the high watermark, the in-sync set.

A replica's *progress* is the exclusive offset up to which it holds the log durably: its synced end, or
its log end with ``durability=page-cache`` (R7). The rules:

R8  high watermark := max(high watermark, least progress over the *maximal* in-sync set and the leader);
    maximal is the current set united with the proposed one, because the controller may decide for either
R9  the high watermark does not move while fewer replicas than min.insync.replicas are in sync, whatever the
    acks
R57 the high watermark does not move either while a replica outside the in-sync set is eligible to lead. If
    enough replicas are in sync, the leader then proposes the in-sync set even if it has not changed. The
    eligibility ends when the controller accepts the proposal
R10 until the high watermark has reached the offset where this epoch started, it may be lower than the
    previous leader's. Requests for offsets that must never decrease are refused until then
R12 a replica joins once its progress, reported in this epoch, has reached the high watermark and the start of
    the epoch. Under load, faster replicas could always keep the high watermark just ahead of a replica that
    keeps up. The high watermark waits for such a replica, briefly and not often (Kafka's
    shouldWaitForReplicaToJoinIsr)
R13 a replica joins as the incarnation that has fetched: its broker epoch is part of the proposal
R14 a proposal is pending until a greater partition epoch is known; an error or a timeout does not end it
R15 a replica leaves if it has not reached the leader's log end within replica.lag.time.max.ms
R68 a replica joins only after it has synced the records that it had when it first reached the high watermark,
    also with durability=page-cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kafkalite.model import NO_BROKER_EPOCH, NO_EPOCH

#: The high watermark waits at most this long for a replica that was caught up within the same time.
JOIN_WAIT_MS: Final = 500
#: The minimum time between two such waits: a replica that never joins delays acknowledgements by a tenth.
JOIN_PAUSE_MS: Final = 10 * JOIN_WAIT_MS


class ProposedIsr(NamedTuple):
    """The in-sync set ``isr`` that the leader proposes in place of the in-sync set of ``partition_epoch``.
    ``broker_epochs`` is in the order of ``isr``."""

    partition_epoch: int
    isr: tuple[int, ...]
    broker_epochs: tuple[int, ...]  #: of each replica's latest fetch; -1: no fetch, or the leader itself


class _Follower:
    """The progress of one follower during this leadership.

    ``target_ms`` is the time of the last call of ``reach`` with at least the previous target, and
    ``target_offset`` is the leader's log end at that time. At first, they are the time and the log end at
    which the leadership began. A follower that reaches the target counts as caught up as of ``target_ms``. A
    follower that reaches the leader's present log end counts as caught up now.

    ``join_offset`` is the progress with which the follower has first reached the high watermark and the start
    of the epoch since it left the in-sync set or lagged too far behind; -1 if it has not, or is in sync. It
    must be synced before the follower joins (R68).
    """

    __slots__ = (
        "broker_epoch",
        "caught_up_ms",
        "has_caught_up",
        "join_offset",
        "log_start_offset",
        "synced_end_offset",
        "target_ms",
        "target_offset",
    )

    def __init__(self, now_ms: int, leader_end_offset: int) -> None:
        self.broker_epoch = NO_BROKER_EPOCH
        self.log_start_offset = self.join_offset = self.synced_end_offset = -1
        self.caught_up_ms = self.target_ms = now_ms
        # Whether the follower has caught up in this leadership; until then caught_up_ms is a grace period.
        self.has_caught_up = False
        self.target_offset = leader_end_offset

    def reach(self, progress: int, leader_end_offset: int, now_ms: int) -> None:
        if progress >= leader_end_offset:
            self.caught_up_ms = now_ms
        elif progress >= self.target_offset:
            self.caught_up_ms = max(self.caught_up_ms, self.target_ms)
        else:
            return
        self.has_caught_up = True
        self.target_offset, self.target_ms = leader_end_offset, now_ms


class PartitionLeader:
    """The state of a partition's leader during one leader epoch.

    Invariants: ``high_watermark`` never moves back. ``isr`` is the in-sync set of ``partition_epoch``, and a
    pending proposal is to replace that set. ``_quorum`` includes ``isr`` and the proposed set.
    """

    __slots__ = (
        "_broker_id",
        "_followers",
        "_has_eligible",
        "_is_alone",
        "_is_pending_sent",
        "_joining",
        "_may_move",
        "_may_wait_again_ms",
        "_min_insync_replicas",
        "_pending",
        "_progress",
        "_quorum",
        "epoch_start_offset",
        "has_enough_in_sync",
        "high_watermark",
        "isr",
        "leader_epoch",
        "partition_epoch",
    )

    def __init__(
        self,
        broker_id: int,
        *,
        leader_epoch: int,
        isr: Iterable[int],
        epoch_start_offset: int,
        high_watermark: int,
        min_insync_replicas: int,
        has_eligible: bool = False,
        partition_epoch: int = NO_EPOCH,
        replicas: Iterable[int] = (),
        now_ms: int = 0,
    ) -> None:
        """``epoch_start_offset`` is the log end at the moment of becoming leader.

        ``high_watermark`` is the high watermark that this replica knew when it became the leader.
        ``has_eligible`` is whether replicas outside ``isr`` are eligible leaders (R57).
        """
        self.leader_epoch = leader_epoch
        self.partition_epoch = partition_epoch
        self.epoch_start_offset = epoch_start_offset
        self.high_watermark = high_watermark
        self._broker_id = broker_id
        self._progress: dict[int, int] = {}
        self._followers = {
            replica_id: _Follower(now_ms, epoch_start_offset)
            for replica_id in replicas
            if replica_id != broker_id
        }
        self._pending: ProposedIsr | None = None
        self._is_pending_sent = False
        self._joining: dict[int, int] = {}  # replica that the high watermark waits for -> end of the wait
        self._may_wait_again_ms = now_ms
        self._has_eligible = has_eligible
        self.configure(isr, min_insync_replicas)

    def configure(self, isr: Iterable[int], min_insync_replicas: int) -> bool:
        """Set the in-sync set and ``min.insync.replicas``. Returns whether the high watermark moved."""
        self.isr = frozenset(isr)
        self._min_insync_replicas = min_insync_replicas
        return self._take_quorum()

    def set_min_insync_replicas(self, min_insync_replicas: int) -> bool:
        """Set ``min.insync.replicas``. Return whether the high watermark moved."""
        return self.configure(self.isr, min_insync_replicas)

    def take_state(
        self,
        partition_epoch: int,
        isr: Iterable[int],
        *,
        has_eligible: bool = False,
        added: Iterable[int] = (),
        leader_end_offset: int = 0,
        now_ms: int = 0,
    ) -> bool:
        """Apply the committed in-sync set. ``has_eligible``: replicas outside it are eligible to lead (R57).

        ``added`` has replicas that may be new followers. A replica is removed only with a new leader epoch
        (R61), so followers never become fewer. A state whose ``partition_epoch`` does not exceed the current
        one is ignored. Any other state ends the pending proposal, whatever the controller has decided (R14).
        Returns whether the high watermark moved.
        """
        if partition_epoch <= self.partition_epoch:
            return False
        self.partition_epoch = partition_epoch
        self._pending = None
        for replica_id in added:
            if replica_id != self._broker_id and replica_id not in self._followers:
                self._followers[replica_id] = _Follower(now_ms, leader_end_offset)
        self._has_eligible = has_eligible
        moved = self.configure(isr, self._min_insync_replicas)
        for replica_id in self.isr & self._followers.keys():
            self._followers[replica_id].join_offset = -1
        return moved

    def _take_quorum(self) -> bool:
        quorum = self.maximal_isr() | {self._broker_id} | self._joining.keys()
        self._quorum = tuple(sorted(quorum))
        #: Whether min.insync.replicas are in sync: otherwise acks=all is refused (R6).
        self.has_enough_in_sync = len(self.isr) >= self._min_insync_replicas
        self._may_move = self.may_move_high_watermark()
        self._is_alone = self._may_move and len(quorum) == 1
        return self._advance()

    @property
    def replica_count(self) -> int:
        """Return the number of the partition's replicas, in sync or not, including the leader."""
        return len(self._followers) + 1

    def maximal_isr(self) -> frozenset[int]:
        """Return the current in-sync set united with the proposed one: either may be decided (R8)."""
        return self.isr if self._pending is None else self.isr.union(self._pending.isr)

    def may_move_high_watermark(self) -> bool:
        """Whether the high watermark may move: enough replicas are in sync (R9), and no replica outside the
        in-sync set is eligible to lead (R57)."""
        return self.has_enough_in_sync and not self.waits_for_confirmation()

    def waits_for_confirmation(self) -> bool:
        """Whether the leader must not commit yet, because a replica outside the in-sync set is eligible to
        lead (R57).

        The replica loses its eligibility when this leader proposes an in-sync set of at least
        min.insync.replicas members and the controller accepts it.
        """
        return self._has_eligible

    @property
    def is_settled(self) -> bool:
        """Whether the high watermark has reached the start of this epoch (R10)."""
        return self.high_watermark >= self.epoch_start_offset

    def has_epoch_start(self, progress: int) -> bool:
        """Whether a replica with this progress has all records from before this epoch (R12)."""
        return progress >= self.epoch_start_offset

    def has_all(self, progress: int) -> bool:
        """Whether a replica with this progress has reached the high watermark and the start of this epoch."""
        return progress >= self.high_watermark and self.has_epoch_start(progress)

    @staticmethod
    def is_live_incarnation(broker_epoch: int | None, seen_broker_epoch: int) -> bool:
        """Whether the broker process that has fetched is the process that may join the in-sync set (R13).

        ``broker_epoch`` is the epoch of the registered process, or None if that process must not join.
        ``seen_broker_epoch`` is the epoch of the process that has fetched.
        """
        return broker_epoch is not None and broker_epoch == seen_broker_epoch

    def on_progress(self, broker_id: int, offset: int) -> bool:
        """Record ``offset`` as the progress of a replica, possibly this one. Returns whether the high
        watermark moved."""
        if self._is_alone and broker_id == self._broker_id:
            self._progress[broker_id] = offset
            if offset <= self.high_watermark:
                return False
            self.high_watermark = offset
            return True
        before = self._progress.get(broker_id, 0)
        self._progress[broker_id] = offset
        if before > self.high_watermark:
            return False  # the progress of another replica limits the high watermark
        return self._advance()

    def on_fetch(
        self,
        replica_id: int,
        *,
        broker_epoch: int,
        progress: int,
        synced_end_offset: int,
        log_start_offset: int,
        leader_end_offset: int,
        now_ms: int,
    ) -> bool:
        """Record the progress and the synced end that a follower's fetch reports. Returns whether the high
        watermark moved.

        Call it only if the follower's log does not diverge.
        """
        follower = self._followers[replica_id]
        follower.broker_epoch = broker_epoch
        follower.log_start_offset = log_start_offset
        follower.synced_end_offset = synced_end_offset
        follower.reach(progress, leader_end_offset, now_ms)
        moved = self.on_progress(replica_id, progress)
        if replica_id in self.isr:
            follower.join_offset = -1
        elif follower.join_offset < 0 and self.has_all(progress):
            follower.join_offset = progress
        return moved

    def forget_follower(self, replica_id: int) -> None:
        """Discard the progress of a follower that stops or opens a new session (R12)."""
        if self._progress.pop(replica_id, None) is not None:
            self._followers[replica_id].join_offset = -1

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    def is_follower(self, replica_id: int) -> bool:
        return replica_id in self._followers

    def seen_broker_epoch(self, replica_id: int) -> int:
        """The broker epoch of the follower's latest fetch; NO_BROKER_EPOCH before its first one."""
        return self._followers[replica_id].broker_epoch

    def may_be_read(self, replica_id: int, offset: int) -> bool:
        """Whether a consumer may be directed to a follower for ``offset``: the follower is in sync, and its
        log has that offset (R66)."""
        if not self.is_in_sync(replica_id):
            return False
        start = self._followers[replica_id].log_start_offset
        return 0 <= start <= offset <= self._progress.get(replica_id, -1)

    def awaits(self, replica_id: int) -> bool:
        """Whether the high watermark waits for the replica."""
        return replica_id in self._quorum

    def is_in_sync(self, replica_id: int) -> bool:
        """Whether a follower is in the current in-sync set."""
        return replica_id in self.isr and replica_id in self._followers

    def near_replica(self, offset: int, is_near: Callable[[int], bool]) -> int | None:
        """Return the follower with the most progress that may be read at ``offset`` (R66), or None.

        ``is_near`` returns whether a node is live and in the consumer's rack.
        """
        found = [one for one in self._followers if self.may_be_read(one, offset) and is_near(one)]
        return max(found, key=lambda one: (self._progress[one], -one), default=None)

    def low_watermark(self, own_log_start_offset: int) -> int:
        """Return the lowest log start offset of the leader, the maximal in-sync set, and the replicas for
        which the high watermark waits. Return -1 if one of these replicas has not fetched yet."""
        others = (self._followers[one].log_start_offset for one in self._quorum if one in self._followers)
        return min((own_log_start_offset, *others))

    def _advance(self) -> bool:
        if not self._may_move:
            return False
        progress = self._progress
        least = min(progress.get(broker_id, 0) for broker_id in self._quorum)
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True

    def may_join(self, replica_id: int) -> bool:
        """Whether a follower has fetched far enough to join the in-sync set (R12). If so, ``propose`` adds
        the follower if its broker is live. False for an in-sync replica, and while a proposal is pending."""
        if replica_id in self.isr or self._pending is not None:
            return False
        progress = self._progress.get(replica_id, -1)
        return self.has_all(progress) and self.has_synced(replica_id)

    def has_synced(self, replica_id: int) -> bool:
        """Whether a follower outside the in-sync set has synced the records that it had when it reached the
        high watermark (R68).

        With ``durability=fsync`` always true. With ``page-cache``, the records that it has copied may be old
        and synced on replicas that leave when it has joined.
        """
        follower = self._followers[replica_id]
        synced = follower.synced_end_offset
        return synced >= self._progress.get(replica_id, 0) or 0 <= follower.join_offset <= synced

    def is_close(self, replica_id: int, now_ms: int) -> bool:
        """Whether the high watermark should wait for a follower, because the follower will probably join the
        in-sync set soon (R12)."""
        if replica_id in self.isr or self._pending is not None or now_ms < self._may_wait_again_ms:
            return False
        progress = self._progress.get(replica_id, -1)
        if not self.epoch_start_offset <= progress < self.high_watermark:
            return False
        follower = self._followers[replica_id]
        if follower.join_offset >= 0 and not self.has_synced(replica_id):
            return False  # the sync may take longer than the wait
        return follower.has_caught_up and now_ms - follower.caught_up_ms <= JOIN_WAIT_MS

    @property
    def is_waiting(self) -> bool:
        """Whether the high watermark waits for a replica about to join. If so, call ``end_waits`` soon."""
        return bool(self._joining)

    def _await_joining(self, replica_id: int, now_ms: int) -> None:
        self._joining[replica_id] = now_ms + JOIN_WAIT_MS
        self._may_wait_again_ms = now_ms + JOIN_PAUSE_MS
        self._take_quorum()

    def end_waits(self, now_ms: int) -> bool:
        """End the waits for replicas that have joined, or have not joined in time. Returns whether the high
        watermark moved."""
        over = [one for one, until_ms in self._joining.items() if now_ms >= until_ms or one in self.isr]
        for replica_id in over:
            del self._joining[replica_id]
        return self._take_quorum() if over else False

    def propose(
        self, now_ms: int, *, lag_time_max_ms: int, leader_end_offset: int, live: Callable[[int], int | None]
    ) -> ProposedIsr | None:
        """Return the in-sync set to request from the controller. Return None if neither a change nor a
        confirmation (R57) is due, and while the controller's response is awaited.

        ``live`` returns a node's broker epoch if the node is unfenced and not shutting down, else None. After
        ``on_undecided``, the pending proposal is returned again, unchanged (R14).
        """
        if self._pending is not None:
            if self._is_pending_sent:
                return None
            self._is_pending_sent = True
            return self._pending
        isr = set(self.isr)
        for replica_id, follower in self._followers.items():
            if replica_id in self._progress:
                follower.reach(self._progress[replica_id], leader_end_offset, now_ms)
            if now_ms - follower.caught_up_ms > lag_time_max_ms:
                isr.discard(replica_id)
                follower.join_offset = -1
            if replica_id in self.isr:
                continue
            may_join = self.may_join(replica_id)
            if not may_join and not self.is_close(replica_id, now_ms):
                continue
            if self.is_live_incarnation(live(replica_id), follower.broker_epoch):
                if may_join:
                    isr.add(replica_id)
                else:
                    self._await_joining(replica_id, now_ms)
        must_confirm = self.has_enough_in_sync and self.waits_for_confirmation()
        return None if isr == self.isr and not must_confirm else self._begin_proposal(isr)

    def _begin_proposal(self, isr: Iterable[int]) -> ProposedIsr:
        """Make ``isr`` the pending proposal, which counts beside the current set until it is decided (R8)."""
        replica_ids = tuple(sorted(isr))
        followers = self._followers
        epochs = tuple(
            followers[one].broker_epoch if one in followers else NO_BROKER_EPOCH for one in replica_ids
        )
        self._pending = ProposedIsr(self.partition_epoch, replica_ids, epochs)
        self._is_pending_sent = True
        self._take_quorum()
        return self._pending

    def on_undecided(self) -> None:
        """Make ``propose`` return the pending proposal again, after a refusal or a lost response (R14)."""
        self._is_pending_sent = False
