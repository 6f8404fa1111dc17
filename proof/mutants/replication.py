"""Mutants of the rules of replication; ``proof.mutants`` explains them.

R49 keeps a follower from truncating committed records, whatever else is wrong. A mutant whose harm is such a
truncation removes R49 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_OFFSET
from kafkalite.replication.follower import FetchPosition, PartitionFollower
from kafkalite.replication.leader import PartitionLeader
from kafkalite.replication.partition import Partition, ReplicaFetchResult
from kafkalite.storage.aborted_index import AbortedIndex
from kafkalite.storage.log import Appended, Slice
from kafkalite.storage.producer_state import ProducerStates, SequencedBatch
from proof.mutants import Mutant

_FOLLOWER: Final = "kafkalite.replication.follower:PartitionFollower"
_LEADER: Final = "kafkalite.replication.leader:PartitionLeader"
_PARTITION: Final = "kafkalite.replication.partition:Partition"
_FETCHER: Final = "kafkalite.broker.replication.fetcher:Fetcher"
_CONSUMER: Final = "kafkalite.client.consumer.assigned_partitions:AssignedPartitions"


def _accepts_any_response(self: PartitionFollower, leader_epoch: int, asked: FetchPosition | None) -> bool:
    return leader_epoch == self.leader_epoch


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _truncate_on_following(
    self: Partition, state: PartitionState, *, original: Callable[..., None], **known: int
) -> None:
    version, high_watermark = self._version, self.high_watermark
    original(self, state, **known)
    if self._version != version and self.log.offline_reason is None:
        self.log.truncate_to(high_watermark)


def _counts_diverging_fetch(
    self: Partition, replica_id: int, *, original: Callable[..., ReplicaFetchResult], **asked: Any
) -> ReplicaFetchResult:
    result = original(self, replica_id, **asked)
    if result.diverging is None:
        return result
    leader = self._leading()
    fetch_offset, synced = asked["fetch_offset"], asked["synced_end_offset"]
    moved = leader.on_fetch(
        replica_id,
        broker_epoch=asked["broker_epoch"],
        progress=min(fetch_offset, synced) if self.is_synced_only else fetch_offset,
        synced_end_offset=min(fetch_offset, synced),
        log_start_offset=asked["log_start_offset"],
        leader_end_offset=self.log.log_end_offset,
        now_ms=asked["now_ms"],
    )
    return result._replace(moved=moved, may_join=leader.may_join(replica_id))


def _revert_to_the_isr_in_force(self: PartitionLeader) -> None:
    self._pending = None
    self._take_quorum()


def _forget_producers(
    self: Partition, state: PartitionState, *rest: Any, original: Callable[..., bool]
) -> bool:
    ProducerStates.__init__(self.log.producers)
    return original(self, state, *rest)


def _forget_aborted(
    self: Partition, state: PartitionState, *rest: Any, original: Callable[..., bool]
) -> bool:
    self.log.producers.aborted = AbortedIndex()
    return original(self, state, *rest)


def _acknowledge_at_once(
    self: Partition, batch: SequencedBatch, *, original: Callable[[Partition, SequencedBatch], Appended]
) -> Appended:
    return original(self, batch)._replace(last_offset=NO_OFFSET)


def _to_log_end(
    self: Partition, offset: int, is_committed_only: bool = False, *, original: Callable[..., int]
) -> int:
    original(self, offset, is_committed_only)
    return self.log_end_offset


def _read_to_log_end(
    self: Partition,
    offset: int,
    max_bytes: int,
    is_committed_only: bool = False,
    *,
    original: Callable[..., Slice],
) -> Slice:
    original(self, offset, max_bytes, is_committed_only)
    return self.log.read(offset, max_bytes=max_bytes, up_to=self.log_end_offset)


def _beyond_the_end(self: PartitionFollower, leader_high_watermark: int, log_end_offset: int) -> bool:
    has_moved = leader_high_watermark > self.high_watermark
    self.high_watermark = max(leader_high_watermark, self.high_watermark)
    return has_moved


def _always_enough(self: PartitionLeader, original: Callable[[PartitionLeader], bool]) -> bool:
    moved = original(self)
    self.has_enough_in_sync = True
    return moved


def _joins_behind(self: PartitionLeader, replica_id: int) -> bool:
    progress = self._progress.get(replica_id, -1)
    return replica_id not in self.isr and self._pending is None and self.has_epoch_start(progress)


def _caught_up(self: Any, progress: int, leader_end_offset: int, now_ms: int) -> None:
    self.caught_up_ms = now_ms


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R3-any-answer",
        "a follower applies any fetch response, not only that to its one outstanding fetch",
        {
            f"{_FOLLOWER}.accepts": _accepts_any_response,
            f"{_FOLLOWER}.may_truncate": _yes,
            "kafkalite.broker.replication.fetcher:Fetcher.is_of_this_session": lambda self, generation: True,
        },
    ),
    Mutant(
        "R3-epoch-unchecked",
        "a leader takes a fetch of another leader epoch",
        {
            f"{_PARTITION}.check_leader_epoch": lambda self, current_leader_epoch: None,
            f"{_FOLLOWER}.youngest_epoch": lambda self: None,
            f"{_FOLLOWER}.may_truncate": _yes,
        },
    ),
    Mutant(
        "R4-truncate-to-hw",
        "a follower truncates to its high watermark instead of by epochs",
        {
            f"{_PARTITION}.become_follower": _truncate_on_following,
            f"{_FOLLOWER}.truncation_offset": lambda self, response: self.high_watermark,
        },
    ),
    Mutant(
        "R4-divergent-counts",
        "a fetch that diverges counts as progress",
        {f"{_PARTITION}.on_replica_fetch": _counts_diverging_fetch},
    ),
    Mutant(
        "R4-divergence-unseen",
        "a leader does not notice that a follower's log diverges",
        {"kafkalite.replication.partition:diverging_at": lambda last_epoch, fetch_offset, leaders: None},
    ),
    Mutant(
        "R4-own-epoch-ignored",
        "a follower truncates to the leader's end of an epoch, even if its own ends earlier",
        {
            "kafkalite.replication.follower:truncation_target": (
                lambda leaders_end_offset, own, log_end_offset: min(leaders_end_offset, log_end_offset)
            )
        },
    ),
    Mutant(
        "R6-ack-early",
        "acks=all is acknowledged at the leader's log end",
        {f"{_PARTITION}.acknowledged_end": lambda self, acks: self.log_end_offset},
    ),
    Mutant(
        "R6-too-few-in-sync",
        "acks=all is accepted with fewer replicas in sync than min.insync.replicas",
        {f"{_LEADER}._take_quorum": _always_enough},
    ),
    Mutant(
        "R7-follower-leo",
        "a follower reports its log end as synced",
        {f"{_FOLLOWER}.reported_synced_end": lambda self: self.log.log_end_offset},
    ),
    Mutant(
        "R7-leader-unsynced",
        "a leader counts its own unsynced tail",
        {f"{_PARTITION}.counts_only_synced": lambda config: False},
    ),
    Mutant(
        "R8-current-isr-only",
        "the high watermark leaves out replicas whose admission is under way",
        {f"{_LEADER}.maximal_isr": lambda self: self.isr},
    ),
    Mutant(
        "R9-below-min-isr",
        "the high watermark moves with fewer in-sync replicas than min.insync.replicas",
        {f"{_LEADER}.may_move_high_watermark": lambda self: True},
    ),
    Mutant(
        "R57-unconfirmed",
        "a leader commits in an ISR that the controller has made smaller, while others are eligible",
        {f"{_LEADER}.waits_for_confirmation": lambda self: False},
    ),
    Mutant(
        "R10-always-settled",
        "a new leader answers monotonic requests before it knows what is committed",
        {f"{_LEADER}.is_settled": lambda self: True},
    ),
    Mutant(
        "R10-beyond-end",
        "a follower's high watermark passes its log end",
        {f"{_FOLLOWER}.advance": _beyond_the_end},
    ),
    Mutant(
        "R10-told-diverged",
        "a leader sends its high watermark to a follower whose log diverges",
        {
            "kafkalite.broker.replication.fetch_sessions:FetchedReplica.may_learn_high_watermark": (
                lambda self: True
            )
        },
    ),
    Mutant(
        "R11-beyond-high-watermark",
        "consumers read up to the log end",
        {f"{_PARTITION}.readable_end": _to_log_end, f"{_PARTITION}.read": _read_to_log_end},
    ),
    Mutant(
        "R11-open-read",
        "read_committed consumers read up to the high watermark",
        {
            f"{_PARTITION}.last_stable_offset": lambda self: self.high_watermark,
            "kafkalite.storage.log:Log.last_stable_offset": lambda self, high_watermark: high_watermark,
        },
    ),
    Mutant(
        "R65-to-log-end",
        "a follower serves consumers up to its log end",
        {f"{_FOLLOWER}.readable_end": lambda self: self.log.log_end_offset},
    ),
    Mutant(
        "R66-out-of-sync",
        "a leader names a follower that is not in sync",
        {f"{_LEADER}.is_in_sync": lambda self, replica_id: replica_id in self._followers},
    ),
    Mutant(
        "R67-follower-believed",
        "a consumer resets its position because a follower answers OFFSET_OUT_OF_RANGE",
        {f"{_CONSUMER}.must_ask_leader": lambda wanted: False},
    ),
    Mutant(
        "R70-leader-unlimited",
        "a leader sends to throttled replicas without a limit",
        {"kafkalite.broker.handlers.replica_fetch:_Updates.is_throttled": lambda self, replica: False},
    ),
    Mutant(
        "R70-follower-unlimited",
        "a follower fetches for throttled replicas without a limit",
        {f"{_FETCHER}.is_throttled": lambda self, followed: False},
    ),
    Mutant(
        "R70-leader-limits-in-sync",
        "a leader throttles replicas that its high watermark waits for",
        {f"{_LEADER}.awaits": lambda self, replica_id: False},
    ),
    Mutant(
        "R70-follower-limits-in-sync",
        "a follower throttles replicas in sync",
        {
            "kafkalite.broker.replication.replica_manager:ReplicaManager._is_in_sync": lambda self, hosted: (
                False
            ),
            f"{_FETCHER}.is_awaited": lambda self, followed, position: False,
        },
    ),
    Mutant(
        "R12-behind-high-watermark",
        "a replica joins the ISR before it has reached the high watermark",
        {f"{_LEADER}.may_join": _joins_behind},
    ),
    Mutant(
        "R12-no-epoch-start",
        "a replica joins the ISR before it has reached the start of the leader's epoch",
        {f"{_LEADER}.has_epoch_start": lambda self, progress: True},
    ),
    Mutant(
        "R68-joins-unsynced",
        "a replica joins the ISR with old records that it has not synced",
        {f"{_LEADER}.has_synced": _yes},
    ),
    Mutant(
        "R69-two-leaders",
        "a compacted log is filled from two leaders, of which one has removed a tombstone",
        {f"{_PARTITION}.must_start_over": lambda self, filled_from, leader_id: False},
    ),
    Mutant(
        "R13-no-broker-epoch",
        "a replica's earlier incarnation joins the ISR",
        {
            f"{_LEADER}.is_live_incarnation": lambda broker_epoch, seen_broker_epoch: (
                broker_epoch is not None
            ),
            "kafkalite.metadata.partition_commands:is_present_incarnation": lambda broker, epoch: True,
        },
    ),
    Mutant(
        "R14-revert",
        "a leader falls back to the old ISR when a change is refused or its response is lost",
        {
            f"{_LEADER}.on_undecided": _revert_to_the_isr_in_force,
            "kafkalite.metadata.partition_commands:record_refusal": lambda edit: None,
        },
    ),
    Mutant(
        "R15-any-fetch",
        "every fetch counts as having caught up",
        {"kafkalite.replication.leader:_Follower.reach": _caught_up},
    ),
    Mutant(
        "R27-no-rebuild",
        "a new leader does not know the producers of its log",
        {f"{_PARTITION}._begin_leading": _forget_producers},
    ),
    Mutant(
        "R28-ack-uncommitted",
        "a repeated batch is acknowledged before the first one is committed",
        {f"{_PARTITION}._appended_before": _acknowledge_at_once},
    ),
    Mutant(
        "R49-any-truncation",
        "a follower truncates committed records because its leader lacks them",
        {f"{_FOLLOWER}.may_truncate": _yes},
    ),
    Mutant(
        "R33-index-forgotten",
        "a new leader does not know the aborted transactions of its log",
        {f"{_PARTITION}._begin_leading": _forget_aborted},
    ),
)
