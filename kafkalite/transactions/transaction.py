"""One transaction and its states: immutable values. Each transition is a function that returns the next
value.

    Empty ──begin──► Ongoing ──prepare──► PrepareCommit ──complete──► CompleteCommit ──begin──► …
                             └─────────► PrepareAbort  ──complete──► CompleteAbort  ──begin──► …

Each transaction has its own (producer id, epoch) (KIP-890, R31). ``prepare`` moves to the next epoch,
which the markers and the next transaction carry. So late requests and batches of an earlier transaction
are recognized by their epoch and refused.

=============== ========================================================================================
Empty has an identity, nothing written. AddPartitions begins Ongoing AddPartitions adds; EndTxn, a new
producer, or the timeout prepares PrepareX decided (R32). Markers go to every partition; requests to
begin or end must be retried CompleteX every marker is written. As Empty; a repeated EndTxn gets the
first response ===============
========================================================================================
"""

# Tests: tests/transactions/test_machine.py

from __future__ import annotations

import enum
from collections.abc import Iterable
from operator import itemgetter
from typing import Final, NamedTuple

from kafkalite.model import MAX_PRODUCER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.protocol.messages.transactions import TxnPartition

NO_BATCH: Final = -1
NO_WRITER: Final = ""

Key = tuple[str, int]
"""(name, NO_PRODUCER_ID) of a transactional id; (application id, producer id) of a group's writer."""


class TransactionState(enum.Enum):
    """Transaction states with the protocol's names. Their order is the number on disk: never change it."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


PREPARED: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT})
COMMITTING: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT})
DECIDED: Final = PREPARED | {TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT}
OPEN: Final = PREPARED | {TransactionState.ONGOING}
_COMPLETED: Final = {
    TransactionState.PREPARE_COMMIT: TransactionState.COMPLETE_COMMIT,
    TransactionState.PREPARE_ABORT: TransactionState.COMPLETE_ABORT,
}


def in_order(partitions: Iterable[TxnPartition]) -> list[TxnPartition]:
    """Return the partitions sorted by topic, then by number."""
    return sorted(partitions, key=itemgetter(0, 1))


class Identity(NamedTuple):
    """A producer id, and the only epoch that may use the id."""

    producer_id: int
    producer_epoch: int


NO_IDENTITY: Final = Identity(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class Transaction(NamedTuple):
    """The latest transaction of a transactional id or of a group's writer.

    Invariant: only an open transaction has partitions and a start; only a prepared one has a next
    producer id.
    """

    name: str  #: the transactional id; for a group's writer, the application id
    producer_id: int
    producer_epoch: int  #: Ongoing: of its batches. Prepared: of its markers. Else: of the next batches
    state: TransactionState
    timeout_ms: int  #: an open transaction is aborted this long after its start
    start_ms: int  #: wall clock; NO_TIMESTAMP when no transaction is open
    update_ms: int  #: wall clock of the last record
    partitions: frozenset[TxnPartition] = frozenset()  #: the partitions that get a marker
    #: the producer that made the decision or requested the identity; its repeated request gets the same
    #: response. NO_IDENTITY if another party decided: then the producer is fenced
    ended: Identity = NO_IDENTITY
    next_producer_id: int = NO_PRODUCER_ID  #: used after the last epoch: the id whose epoch 0 is next
    writer_name: str = NO_WRITER
    batch_id: int = NO_BATCH

    @property
    def is_writer(self) -> bool:
        return self.batch_id != NO_BATCH

    @property
    def key(self) -> Key:
        return self.name, self.producer_id if self.batch_id != NO_BATCH else NO_PRODUCER_ID

    @property
    def identity(self) -> Identity:
        """The identity whose requests are accepted at present."""
        if self.next_producer_id != NO_PRODUCER_ID:
            return Identity(self.next_producer_id, 0)
        return Identity(self.producer_id, self.producer_epoch)

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_commit(self) -> bool:
        """Whether a decided transaction was committed."""
        return self.state in COMMITTING

    @property
    def needs_producer_id(self) -> bool:
        """Whether the next epoch is the last one, so that another id must follow (KIP-360).

        Only markers use the last epoch, so that an epoch is always left for fencing.
        """
        return self.producer_epoch + 1 >= MAX_PRODUCER_EPOCH

    # --- transitions -----------------------------------------------------------------------------

    def with_partitions(self, partitions: Iterable[TxnPartition], wall_ms: int) -> Transaction:
        """Return the transaction as Ongoing, with these partitions added."""
        begins = self.state is not TransactionState.ONGOING
        return self._replace(
            state=TransactionState.ONGOING,
            start_ms=wall_ms if begins else self.start_ms,
            update_ms=wall_ms,
            partitions=self.partitions.union(partitions),
            ended=NO_IDENTITY,
        )

    @property
    def epoch_after_end(self) -> int:
        """The producer epoch after the decision; every transaction has its own (R31, KIP-890)."""
        return self.producer_epoch + 1

    def prepared(
        self,
        wall_ms: int,
        *,
        is_commit: bool,
        ended: Identity = NO_IDENTITY,
        next_producer_id: int = NO_PRODUCER_ID,
    ) -> Transaction:
        """Return the decided transaction with the next epoch (R31). Without partitions it is complete."""
        state = TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT
        decided = self._replace(
            state=state,
            producer_epoch=self.epoch_after_end,
            update_ms=wall_ms,
            ended=ended,
            next_producer_id=next_producer_id,
        )
        return decided if self.partitions else decided.completed(wall_ms)

    def completed(self, wall_ms: int) -> Transaction:
        """Return the completed transaction. All markers must be written."""
        producer_id, producer_epoch = self.identity
        return self._replace(
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            state=_COMPLETED[self.state],
            start_ms=NO_TIMESTAMP,
            update_ms=wall_ms,
            partitions=frozenset(),
            next_producer_id=NO_PRODUCER_ID,
        )

    def renewed(
        self, wall_ms: int, *, timeout_ms: int, requester: Identity, reserved_producer_id: int
    ) -> Transaction:
        """Return an Empty transaction for a new producer: next epoch, or epoch 0 of the reserved id (R34)."""
        identity = Identity(self.producer_id, self.producer_epoch + 1)
        if self.needs_producer_id:
            identity = Identity(reserved_producer_id, 0)
        return Transaction(
            self.name,
            *identity,
            TransactionState.EMPTY,
            timeout_ms,
            NO_TIMESTAMP,
            wall_ms,
            ended=requester,
        )
