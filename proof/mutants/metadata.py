"""Mutants of the rules in this part of the product; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.image import BrokerState
from kafkalite.metadata.records import NO_LEADER
from proof.mutants import Mutant

_EDIT: Final = "kafkalite.metadata.election:PartitionEdit"
_BROKERS: Final = "kafkalite.metadata.broker_commands"


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


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R13-no-cas",
        "an ISR change is accepted for an older partition epoch",
        {"kafkalite.metadata.partition_commands:knows_present_state": _returns(True)},
    ),
    Mutant(
        "R16-no-elr",
        "the last in-sync replica is kept, and no eligible leader replicas are remembered",
        {f"{_EDIT}.keeps_eligible": _returns(False), f"{_EDIT}.fence": _keep_the_last_in_sync},
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
)
