"""Mutants of the rules in this part of the product; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_OFFSET
from kafkalite.replication.follower import FetchPosition, PartitionFollower
from kafkalite.replication.leader import PartitionLeader
from kafkalite.replication.partition import Partition, ReplicaFetchResult
from kafkalite.storage.aborted_index import AbortedIndex
from kafkalite.storage.log import Appended
from kafkalite.storage.producer_state import ProducerStates, SequencedBatch
from proof.mutants import Mutant

_FOLLOWER: Final = "kafkalite.replication.follower:PartitionFollower"
_LEADER: Final = "kafkalite.replication.leader:PartitionLeader"
_PARTITION: Final = "kafkalite.replication.partition:Partition"


def _accepts_any_response(self: PartitionFollower, leader_epoch: int, asked: FetchPosition | None) -> bool:
    return leader_epoch == self.leader_epoch


def _truncate_on_following(
    self: Partition, state: PartitionState, *, original: Callable[[Partition, PartitionState], None]
) -> None:
    version, high_watermark = self._version, self.high_watermark
    original(self, state)
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


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R3-any-answer",
        "a follower applies any fetch response, not only that to its one outstanding fetch",
        {
            f"{_FOLLOWER}.accepts": _accepts_any_response,
            "kafkalite.broker.replication.fetcher:Fetcher.is_of_this_session": lambda self, generation: True,
        },
    ),
    Mutant(
        "R3-epoch-unchecked",
        "a leader takes a fetch of another leader epoch",
        {
            f"{_PARTITION}.check_leader_epoch": lambda self, current_leader_epoch: None,
            f"{_FOLLOWER}.youngest_epoch": lambda self: None,
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
        "R12-no-epoch-start",
        "a replica joins the ISR before it has reached the start of the leader's epoch",
        {f"{_LEADER}.has_epoch_start": lambda self, progress: True},
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
        "R33-index-forgotten",
        "a new leader does not know the aborted transactions of its log",
        {f"{_PARTITION}._begin_leading": _forget_aborted},
    ),
)
