"""The leader's account of one partition: how far each replica is, what that makes of the high watermark,
and who is in sync.

A replica's *progress* is the exclusive offset up to which it holds the log for good: its synced end, or its
log end with ``durability=page-cache`` (R7). The rules, by their numbers in the list of protocol rules:

R8  high watermark := max(high watermark, least progress over the *maximal* in-sync set and the leader);
    maximal is the set in force together with the one proposed, for nobody knows yet which of them holds
R9  it does not move while there are fewer in-sync replicas than min.insync.replicas, whatever the acks
R10 nothing monotonic may be answered from it before it has reached the offset where this epoch started
R12 a replica joins by what it fetched in this epoch: past the high watermark and the start of the epoch.
    Under load one that keeps up might for ever be a moment behind a high watermark that faster ones move:
    so it waits for such a replica, shortly and not often (Kafka's shouldWaitForReplicaToJoinIsr)
R14 a proposal stands until a greater partition epoch is known; an error or a timeout says nothing
R15 a replica leaves when it has not had, for replica.lag.time.max.ms, what the leader's log held
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kafkalite import mutants
from kafkalite.model import NO_BROKER_EPOCH, NO_EPOCH

#: A replica outside the in-sync set that was caught up so short a time ago is waited for, as long at most...
JOIN_WAIT_MS: Final = 500
#: ...and not again before this has passed: one that never makes it delays acknowledgements by a tenth.
JOIN_PAUSE_MS: Final = 10 * JOIN_WAIT_MS


class ReplicaLag(NamedTuple):
    """How far a follower is. At ``caught_up_ms`` the leader's log ended no later than what it has now."""

    log_end_offset: int
    synced_end_offset: int
    caught_up_ms: int
    log_start_offset: int


class ProposedIsr(NamedTuple):
    """An in-sync set that replaces the one of ``partition_epoch``; both tuples run in the same order."""

    partition_epoch: int
    isr: tuple[int, ...]
    broker_epochs: tuple[int, ...]  #: as seen in each member's fetches; -1: none, or the leader itself


class _Follower:
    """One follower as this leadership has seen it.

    ``(target_offset, target_ms)`` is where the leader's log ended at some time that the follower has not
    reached yet; when it does, it was caught up as of then.
    """

    __slots__ = (
        "broker_epoch",
        "caught_up_ms",
        "has_caught_up",
        "log_end_offset",
        "log_start_offset",
        "synced_end_offset",
        "target_ms",
        "target_offset",
    )

    def __init__(self, now_ms: int, leader_end_offset: int) -> None:
        self.broker_epoch = NO_BROKER_EPOCH
        self.log_end_offset = self.synced_end_offset = self.log_start_offset = -1
        self.caught_up_ms = self.target_ms = now_ms
        self.has_caught_up = False  # in this leadership; until then caught_up_ms is a grace
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
    """One leadership: from becoming leader in ``leader_epoch`` to the next epoch.

    Invariants: ``high_watermark`` never goes back; ``isr`` is that of ``partition_epoch``; a pending
    proposal is one for ``partition_epoch``; whoever is in ``isr`` or proposed is in ``_quorum``.
    """

    __slots__ = (
        "_broker_id",
        "_followers",
        "_has_enough_in_sync",
        "_is_alone",
        "_is_pending_sent",
        "_joining",
        "_may_wait_again_ms",
        "_min_insync_replicas",
        "_pending",
        "_progress",
        "_quorum",
        "epoch_start_offset",
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
        partition_epoch: int = NO_EPOCH,
        replicas: Iterable[int] = (),
        now_ms: int = 0,
    ) -> None:
        """``epoch_start_offset`` is the log end at the moment of becoming leader.

        ``high_watermark`` is what this replica knows already: of that much is certain.
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
        self._joining: dict[int, int] = {}  # whom the high watermark waits for, and until when
        self._may_wait_again_ms = now_ms
        self.configure(isr, min_insync_replicas)

    def configure(self, isr: Iterable[int], min_insync_replicas: int) -> bool:
        """Take another in-sync set or minimum. Returns whether the high watermark moved."""
        self.isr = frozenset(isr)
        self._min_insync_replicas = min_insync_replicas
        return self._take_quorum()

    def set_min_insync_replicas(self, min_insync_replicas: int) -> bool:
        return self.configure(self.isr, min_insync_replicas)

    def take_state(self, partition_epoch: int, isr: Iterable[int]) -> bool:
        """What is committed now. An older state than the known one is ignored, whoever told it first.

        A greater partition epoch than the pending proposal's ends that one, however it was decided (R14).
        Returns whether the high watermark moved.
        """
        if partition_epoch <= self.partition_epoch:
            return False
        self.partition_epoch = partition_epoch
        self._pending = None
        return self.configure(isr, self._min_insync_replicas)

    def _take_quorum(self) -> bool:
        quorum = self.isr | {self._broker_id}
        if self._pending is not None and "R8-current-isr-only" not in mutants.ACTIVE:
            quorum |= set(self._pending.isr)
        quorum |= self._joining.keys()
        self._quorum = tuple(sorted(quorum))
        self._has_enough_in_sync = len(self.isr) >= self._min_insync_replicas
        can_move = self._has_enough_in_sync or "R9-below-min-isr" in mutants.ACTIVE
        self._is_alone = can_move and len(quorum) == 1
        return self._advance()

    @property
    def has_enough_in_sync(self) -> bool:
        """Whether there are min.insync.replicas: otherwise acks=all is refused (R6)."""
        return self._has_enough_in_sync

    @property
    def is_settled(self) -> bool:
        """Whether the high watermark has reached the start of this epoch (R10)."""
        return self.high_watermark >= self.epoch_start_offset

    # --- progress --------------------------------------------------------------------------------------

    def on_progress(self, broker_id: int, offset: int) -> bool:
        """A replica, this one too, holds all below ``offset``. Returns whether the high watermark moved."""
        if self._is_alone and broker_id == self._broker_id:
            self._progress[broker_id] = offset
            if offset <= self.high_watermark:
                return False
            self.high_watermark = offset
            return True
        before = self._progress.get(broker_id, 0)
        self._progress[broker_id] = offset
        if before > self.high_watermark:
            return False  # another one holds it back
        return self._advance()

    def on_fetch(
        self,
        replica_id: int,
        *,
        broker_epoch: int,
        progress: int,
        log_end_offset: int,
        synced_end_offset: int,
        log_start_offset: int,
        leader_end_offset: int,
        now_ms: int,
    ) -> bool:
        """A follower has fetched in this epoch, undiverged. Returns whether the high watermark moved."""
        follower = self._followers[replica_id]
        follower.broker_epoch = broker_epoch
        follower.log_end_offset = log_end_offset
        follower.synced_end_offset = synced_end_offset
        follower.log_start_offset = log_start_offset
        follower.reach(progress, leader_end_offset, now_ms)
        return self.on_progress(replica_id, progress)

    def on_idle(self, replica_id: int, leader_end_offset: int, now_ms: int) -> None:
        """The follower stands where its last fetch said."""
        follower = self._followers.get(replica_id)
        if follower is not None and replica_id in self._progress:
            follower.reach(self._progress[replica_id], leader_end_offset, now_ms)

    def forget_follower(self, replica_id: int) -> None:
        """The follower fetches no more, or anew: where it stood says nothing of where it stands (R12)."""
        self._progress.pop(replica_id, None)

    def is_follower(self, replica_id: int) -> bool:
        return replica_id in self._followers

    def seen_broker_epoch(self, replica_id: int) -> int:
        """Of the follower's latest fetch; NO_BROKER_EPOCH before the first one of this leadership."""
        return self._followers[replica_id].broker_epoch

    def lags(self) -> dict[int, ReplicaLag]:
        return {
            replica_id: ReplicaLag(
                one.log_end_offset, one.synced_end_offset, one.caught_up_ms, one.log_start_offset
            )
            for replica_id, one in self._followers.items()
        }

    def low_watermark(self, own_log_start_offset: int) -> int:
        """Below it no replica in sync, or proposed to be, has records any more; -1 while one of them was not
        heard of."""
        others = (self._followers[one].log_start_offset for one in self._quorum if one in self._followers)
        return min((own_log_start_offset, *others))

    def _advance(self) -> bool:
        if not self._has_enough_in_sync and "R9-below-min-isr" not in mutants.ACTIVE:
            return False
        progress = self._progress
        least = min(progress.get(broker_id, 0) for broker_id in self._quorum)
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True

    # --- the in-sync set -------------------------------------------------------------------------------

    def may_join(self, replica_id: int) -> bool:
        """Whether a follower has what R12 asks, so that ``propose`` would let it in if it is alive."""
        if replica_id in self.isr or self._pending is not None:
            return False
        progress = self._progress.get(replica_id, -1)
        if progress < self.high_watermark:
            return False
        return progress >= self.epoch_start_offset or "R12-no-epoch-start" in mutants.ACTIVE

    def is_close(self, replica_id: int, now_ms: int) -> bool:
        """Whether a follower lacks nothing but the last moment's records to join."""
        if replica_id in self.isr or self._pending is not None or now_ms < self._may_wait_again_ms:
            return False
        progress = self._progress.get(replica_id, -1)
        if not self.epoch_start_offset <= progress < self.high_watermark:
            return False
        follower = self._followers[replica_id]
        return follower.has_caught_up and now_ms - follower.caught_up_ms <= JOIN_WAIT_MS

    @property
    def is_waiting(self) -> bool:
        """Whether the high watermark waits for one about to join: call ``end_waits`` soon."""
        return bool(self._joining)

    def _await_joining(self, replica_id: int, now_ms: int) -> None:
        self._joining[replica_id] = now_ms + JOIN_WAIT_MS
        self._may_wait_again_ms = now_ms + JOIN_PAUSE_MS
        self._take_quorum()

    def end_waits(self, now_ms: int) -> bool:
        """Wait no more for who joined, or did not in time. Returns whether the high watermark moved."""
        over = [one for one, until_ms in self._joining.items() if now_ms >= until_ms or one in self.isr]
        for replica_id in over:
            del self._joining[replica_id]
        return self._take_quorum() if over else False

    def propose(
        self,
        now_ms: int,
        *,
        lag_time_max_ms: int,
        leader_end_offset: int,
        live: Callable[[int], int | None],
    ) -> ProposedIsr | None:
        """The in-sync set to ask the controller for, or None: all is well, or an answer is due.

        ``live`` tells a node's broker epoch if it may be in sync at all: unfenced and not shutting down.
        A proposal of which nothing was heard comes again, the same (R14).
        """
        if self._pending is not None:
            if self._is_pending_sent:
                return None
            self._is_pending_sent = True
            return self._pending
        isr = set(self.isr)
        for replica_id, follower in self._followers.items():
            self.on_idle(replica_id, leader_end_offset, now_ms)
            if replica_id in isr:
                if now_ms - follower.caught_up_ms > lag_time_max_ms:
                    isr.remove(replica_id)
            elif self.may_join(replica_id) and self._is_alive(live(replica_id), follower.broker_epoch):
                isr.add(replica_id)
            elif self.is_close(replica_id, now_ms) and self._is_alive(
                live(replica_id), follower.broker_epoch
            ):
                self._await_joining(replica_id, now_ms)
        return None if isr == self.isr else self.begin_proposal(isr)

    @staticmethod
    def _is_alive(broker_epoch: int | None, seen: int) -> bool:
        if broker_epoch is None:
            return False
        return broker_epoch == seen or "R13-no-broker-epoch" in mutants.ACTIVE

    def begin_proposal(self, isr: Iterable[int]) -> ProposedIsr:
        """From now on ``isr`` counts beside the set in force, until it is known which of them holds."""
        members = tuple(sorted(isr))
        followers = self._followers
        epochs = tuple(
            followers[member].broker_epoch if member in followers else NO_BROKER_EPOCH for member in members
        )
        self._pending = ProposedIsr(self.partition_epoch, members, epochs)
        self._is_pending_sent = True
        self._take_quorum()
        return self._pending

    def on_unanswered(self) -> None:
        """The proposal's fate is not known: it stands, and may be sent again (R14)."""
        self._is_pending_sent = False

    def forget_proposal(self) -> bool:
        """What R14 forbids; here so that a test can show why. Returns whether the high watermark moved."""
        self._pending = None
        return self._take_quorum()
