"""Mutants of the rules in this part of the product; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafkalite.errors import OutOfOrderSequenceNumberError, UnknownProducerIdError
from kafkalite.records.header import BatchHeader
from kafkalite.storage.log import Log
from kafkalite.storage.producer_state import ProducerState, ProducerStates, SequencedBatch
from proof.mutants import Mutant

_STATE: Final = "kafkalite.storage.producer_state:ProducerState"
_STATES: Final = "kafkalite.storage.producer_state:ProducerStates"

Check = Callable[[ProducerStates, BatchHeader], SequencedBatch | None]


def _keep_empty_epoch(self: Log) -> None:
    self._epochs.truncate_from_end(self.log_end_offset + 1)
    self._latest_epoch = self._epochs.latest_epoch


def _accept_repeated(self: ProducerStates, header: BatchHeader, original: Check) -> None:
    original(self, header)


def _accept_gap(self: ProducerStates, header: BatchHeader, original: Check) -> SequencedBatch | None:
    try:
        return original(self, header)
    except (OutOfOrderSequenceNumberError, UnknownProducerIdError):
        return None


def _any_coordinator(self: ProducerState, coordinator_epoch: int) -> bool:
    return True


def _keep_epoch(self: ProducerState, marker_epoch: int) -> None:
    pass


def _high_watermark(self: ProducerStates, high_watermark: int) -> int:
    return high_watermark


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R5-keep-empty-epochs",
        "an epoch without a record stays in the epoch cache of a follower",
        {"kafkalite.storage.log:Log._drop_empty_epochs": _keep_empty_epoch},
    ),
    Mutant("R28-no-dedup", "a repeated batch is appended again", {f"{_STATES}.check": _accept_repeated}),
    Mutant("R28-no-gap-check", "a batch out of sequence is appended", {f"{_STATES}.check": _accept_gap}),
    Mutant(
        "R31-marker-epoch-ignored",
        "a marker does not fence late batches of the transaction that it ended",
        {f"{_STATE}.fence": _keep_epoch},
    ),
    Mutant(
        "R32-old-coordinator",
        "a partition takes a marker of an earlier coordinator",
        {f"{_STATE}.is_from_current_coordinator": _any_coordinator},
    ),
    Mutant(
        "R33-lso-ignores-open",
        "the last stable offset passes the beginning of an open transaction",
        {f"{_STATES}.first_open_offset": _high_watermark},
    ),
    Mutant(
        "R33-lso-uncommitted-marker",
        "the last stable offset passes a transaction whose marker is uncommitted",
        {f"{_STATES}.first_uncommitted_offset": _high_watermark},
    ),
)
