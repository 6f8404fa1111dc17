"""Mutants of the rules of transactions; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kafkalite.coordinator_types import Decision, Instant
from kafkalite.errors import InvalidTxnStateError
from kafkalite.model import NO_PRODUCER_ID
from kafkalite.protocol.messages.transactions import EndTxnRequest
from kafkalite.transactions import machine
from kafkalite.transactions.commands import MarkersWritten
from kafkalite.transactions.table import TransactionTable
from kafkalite.transactions.transaction import DECIDED, Identity, Transaction
from proof.mutants import Mutant

_MACHINE: Final = "kafkalite.transactions.machine"
_TRANSACTION: Final = "kafkalite.transactions.transaction:Transaction"


def _same_epoch(self: Transaction) -> int:
    return self.producer_epoch


def _abort_in_the_same_epoch(transaction: Transaction, wall_ms: int) -> Transaction:
    aborted = transaction.prepared(wall_ms, is_commit=False)
    return aborted._replace(producer_epoch=transaction.producer_epoch)


def _decide_again(
    self: machine.TransactionMachine,
    request: EndTxnRequest,
    reserved_id: int,
    now: Instant,
    original: Callable[..., Decision],
) -> Decision:
    transaction = self._table.transactions.get(request.transactional_id)
    requester = Identity(request.producer_id, request.producer_epoch)
    try:
        return original(self, request, reserved_id, now)
    except InvalidTxnStateError:
        if transaction is None or transaction.state not in DECIDED or requester != transaction.ended:
            raise
        decided = transaction.prepared(now.wall_ms, is_commit=request.is_commit, ended=requester)
        decided = decided._replace(producer_epoch=transaction.producer_epoch)
        return Decision((machine._latest(decided),), machine._ended(decided))


def _count_late_reports(
    self: machine.TransactionMachine, command: MarkersWritten, now: Instant, original: Callable[..., Decision]
) -> Decision:
    pending = self._table.pending.get((command.transactional_id, NO_PRODUCER_ID))
    if pending is not None:
        command = command._replace(producer_id=pending.producer_id, producer_epoch=pending.producer_epoch)
    return original(self, command, now)


def _nothing_due(self: TransactionTable, now: Instant) -> Iterator[Transaction]:
    return iter(())


def _same_producer_epoch(transaction: Transaction, requester: Identity) -> bool:
    return requester.producer_epoch == transaction.identity.producer_epoch


def _is_any_group(self: TransactionTable, name: str) -> bool:
    return name in self.groups


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "S26-names-unlimited",
        "a coordinator has any number of transactional ids",
        {f"{_MACHINE}:TransactionMachine._check_room": lambda self: None},
    ),
    Mutant(
        "R37-any-producer-id",
        "a producer uses a transactional id with a producer id that is not of this transactional id",
        {
            f"{_MACHINE}:belongs_to": lambda transaction, producer_id: True,
            f"{_MACHINE}:is_present_producer": _same_producer_epoch,
        },
    ),
    Mutant(
        "R31-no-epoch-bump",
        "the end of a transaction leaves the producer's epoch as it was",
        {f"{_TRANSACTION}.epoch_after_end": _same_epoch},
    ),
    Mutant(
        "R32-complete-early",
        "a transaction is complete before every partition has its marker",
        {f"{_MACHINE}:may_complete": lambda remaining: True},
    ),
    Mutant(
        "R32-late-report",
        "a report about the markers of an earlier transaction counts for the present one",
        {f"{_MACHINE}:TransactionMachine._on_markers_written": _count_late_reports},
    ),
    Mutant(
        "R32-unretired-forgotten",
        "the decisions of an application that may come back are forgotten",
        {"kafkalite.transactions.table:TransactionTable.is_over": _is_any_group},
    ),
    Mutant(
        "R32-opposite-accepted",
        "a repeated end of a transaction may decide the opposite",
        {f"{_MACHINE}:TransactionMachine._end": _decide_again},
    ),
    Mutant(
        "R34-never-overdue",
        "a transaction has no timeout",
        {"kafkalite.transactions.table:TransactionTable.overdue": _nothing_due},
    ),
    Mutant(
        "R34-begins-before-markers",
        "a transaction begins before the markers of the previous one are written",
        {f"{_MACHINE}:_check_not_ending": lambda transaction: None},
    ),
    Mutant(
        "R34-init-keeps-open",
        "a new producer of a transactional id leaves the open transaction open",
        {f"{_MACHINE}:must_abort_first": lambda transaction: False},
    ),
    Mutant(
        "R34-timeout-no-bump",
        "a transaction is aborted by timeout without a new epoch",
        {f"{_MACHINE}:abort_overdue": _abort_in_the_same_epoch},
    ),
)
