"""Mutants of the rules in ``kafkalite.metadata``; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.image import BrokerState, PartitionState
from kafkalite.metadata.records import NO_LEADER
from kafkalite.metadata.recovery import ReplicaEnd
from proof.mutants import Mutant

_EDIT: Final = "kafkalite.metadata.election:PartitionEdit"
_BROKERS: Final = "kafkalite.metadata.broker_commands"
_RECOVERY: Final = "kafkalite.metadata.recovery"


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def _keep_the_last_in_sync(
    self: PartitionEdit, node_id: int, original: Callable[[PartitionEdit, int], None]
) -> None:
    if self.isr != (node_id,):
        original(self, node_id)
    elif self.leader == node_id:
        self.lead(NO_LEADER)


def _stays_unfenced(earlier: BrokerState | None, settings: ControllerSettings) -> bool:
    return not settings.is_single_node and (earlier is None or earlier.is_fenced)


def _has_only_unverified(state: PartitionState) -> bool:
    return bool(state.elr) and state.elr == state.unverified


def _longest(state: PartitionState, ends: Mapping[int, ReplicaEnd]) -> int:
    return max(ends, key=lambda node_id: ends[node_id].log_end_offset)


def _has_one_in_sync(self: PartitionEdit, copies: int) -> bool:
    return any(node_id in self.isr for node_id in self.target)


def _has_new_in_sync(self: PartitionEdit, copies: int) -> bool:
    original = self.before.original_replicas
    return all(node_id in self.isr for node_id in self.target if node_id not in original)


def _does_nothing(_self: PartitionEdit) -> None:
    pass


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R91-above-level",
        "the controller decides commands whose records nodes of the finalised level do not read",
        {"kafkalite.metadata.features:allows": _returns(True)},
    ),
    Mutant(
        "R92-too-old",
        "a broker registers although its program does not support a finalised level",
        {f"{_BROKERS}:supports": _returns(True)},
    ),
    Mutant(
        "R92-unsupported-level",
        "a level is finalised although a broker or voter does not support it",
        {"kafkalite.metadata.feature_commands:nodes_lacking": lambda nodes, feature, level: []},
    ),
    Mutant(
        "R92-lowered",
        "a finalised level is lowered",
        {"kafkalite.metadata.feature_commands:is_lower": _returns(False)},
    ),
    Mutant(
        "R60-one-is-enough",
        "a reassignment finishes when one replica of its target is in sync",
        {f"{_EDIT}.may_finish_reassignment": _has_one_in_sync},
    ),
    Mutant(
        "R60-too-few",
        "a reassignment finishes with fewer than min.insync.replicas of its target in sync",
        {f"{_EDIT}.may_finish_reassignment": _has_new_in_sync},
    ),
    Mutant(
        "R61-same-epoch",
        "a replica is removed without a new leader epoch, so its earlier position counts when it returns",
        {
            f"{_EDIT}.renew_epoch_for_removal": _does_nothing,
            "kafkalite.metadata.delta:removes_in_new_epoch": _returns(True),
        },
    ),
    Mutant(
        "R13-no-cas",
        "an ISR change is accepted for an older partition epoch",
        {"kafkalite.metadata.partition_commands:knows_present_state": _returns(True)},
    ),
    Mutant(
        "S26-topics-unlimited",
        "a cluster may have any number of topics and partitions",
        {"kafkalite.metadata.topic_commands:_Room.take": lambda self, partitions, *, topics=0: None},
    ),
    Mutant(
        "R16-no-elr",
        "the last in-sync replica is kept, and no eligible leader replicas are remembered",
        {
            f"{_EDIT}.keeps_eligible": _returns(False),
            f"{_EDIT}.keeps_removed": lambda self, *, is_proposed: False,
            f"{_EDIT}.fence": _keep_the_last_in_sync,
        },
    ),
    Mutant(
        "R57-controller-clears",
        "a replica that the controller removes from the ISR is not eligible if enough replicas remain",
        {f"{_EDIT}.keeps_removed": lambda self, *, is_proposed: False},
    ),
    Mutant(
        "R16-elr-stays",
        "replicas stay eligible when enough replicas are in sync again",
        {
            f"{_EDIT}.keeps_eligible": _returns(True),
            "kafkalite.replication.leader:PartitionLeader.waits_for_confirmation": _returns(False),
        },
    ),
    Mutant(
        "R23-endless-session",
        "the session of a dead broker never ends",
        {"kafkalite.metadata.sessions:BrokerSessions.expired": lambda self, now_ms: []},
    ),
    Mutant(
        "R20-no-fencing",
        "a registration does not end the leaderships of the earlier incarnation",
        {
            f"{_BROKERS}:is_fenced_at_registration": _stays_unfenced,
            f"{_BROKERS}:end_earlier_process": _returns(None),
        },
    ),
    Mutant(
        "R20-unclean-stays",
        "a broker that may have lost unsynced records stays eligible",
        {f"{_BROKERS}:has_stopped_cleanly": _returns(True)},
    ),
    Mutant(
        "R46-first-returns",
        "an eligible replica leads after an unclean stop without a comparison of logs",
        {f"{_BROKERS}:mark_unverified": _returns(None)},
    ),
    Mutant(
        "R46-longest",
        "the longest log leads after unclean stops, whatever its last epoch",
        {f"{_RECOVERY}:most_complete": _longest},
    ),
    Mutant(
        "R47-no-wait",
        "the first replica that reports its log leads",
        {f"{_RECOVERY}:is_compared": lambda state, ends, **_: True},
    ),
    Mutant(
        "R48-clamped",
        "a committed offset that the metadata has and the log lacks is no proof of a loss",
        {
            f"{_RECOVERY}:lacks_committed": _returns(False),
            "kafkalite.replication.partition:Partition.lacks_committed": _returns(False),
        },
    ),
    Mutant(
        "R50-short-leader-stays",
        "a leader keeps its role although a replica has committed records that it lacks",
        {f"{_RECOVERY}:has_committed_nothing": _returns(False)},
    ),
    Mutant(
        "R50-restart-hides-commits",
        "an ELR of unverified replicas counts as proof that the leader has committed nothing",
        {f"{_RECOVERY}:has_committed_nothing": _has_only_unverified},
    ),
    Mutant(
        "R52-same-epoch",
        "a damaged replica that is not in sync gets no new leader epoch in which to start again",
        {f"{_BROKERS}:must_renew_epoch": _returns(False)},
    ),
    Mutant(
        "R52-leader-stays",
        "a replica that is found damaged while its broker serves keeps its roles",
        {f"{_BROKERS}:_counts": _returns(False)},
    ),
    Mutant(
        "R52-replaced-for-good",
        "a damaged log stays replaced by a less complete one although no leader is left",
        {"kafkalite.broker.partitions.partitions:Partitions._must_reinstate": _returns(False)},
    ),
    Mutant(
        "R51-older-copy",
        "an older copy of a data directory counts as the latest",
        {f"{_BROKERS}:is_restored_directory": _returns(False)},
    ),
)
