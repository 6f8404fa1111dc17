"""A transaction as an immutable value. The methods for state transitions return the changed transaction.

    Empty ──begin──► Ongoing ──prepare──► PrepareCommit ──complete──► CompleteCommit ──begin──► …
                             └─────────► PrepareAbort  ──complete──► CompleteAbort  ──begin──► …

Each transaction has its own (producer id, epoch) (KIP-890, R31). The transition "prepare" increments the
epoch. The markers have the new epoch. The next transaction has it too, unless the producer is initialized
again first or needs another producer id. So late requests and batches of an earlier transaction are
recognized by their epoch and refused.

===============  ====================================================================================
Empty            has an identity, but nothing is written; AddPartitions begins a transaction
Ongoing          AddPartitions adds partitions; EndTxn, a new producer or the timeout triggers "prepare"
PrepareX         decided (R32), and markers are being written; a repeated EndTxn gets the first
                 response, and the producer must retry any other request
CompleteX        all markers are written; like Empty, and a repeated EndTxn gets the first response
===============  ====================================================================================
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
"""(name, NO_PRODUCER_ID) for a transactional id, (application id, producer id) for a group's writer."""


class TransactionState(enum.Enum):
    """The states by the protocol's names. Each is stored as its position here, so never reorder them."""

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
    """A producer id and one of its epochs."""

    producer_id: int
    producer_epoch: int


NO_IDENTITY: Final = Identity(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class Transaction(NamedTuple):
    """The latest transaction of a transactional id or of a group's writer.

    Invariants: ``partitions`` and ``start_ms`` are set only while the transaction is open (Ongoing or
    prepared), and ``next_producer_id`` only while it is prepared.
    """

    name: str  #: the transactional id; for a group's writer, the application id
    producer_id: int
    producer_epoch: int  #: of its batches if Ongoing, of its markers if prepared, else of the next batches
    state: TransactionState
    timeout_ms: int  #: an Ongoing transaction is aborted when it lasts longer
    start_ms: int  #: wall clock; NO_TIMESTAMP if no transaction is open
    update_ms: int  #: wall clock of the last record
    partitions: frozenset[TxnPartition] = frozenset()  #: the partitions that need a marker
    #: The sender of the request that decided the transaction or created this identity. If the sender repeats
    #: the request, it gets the same response. NO_IDENTITY if a timeout or a newer producer aborted the
    #: transaction.
    ended: Identity = NO_IDENTITY
    next_producer_id: int = NO_PRODUCER_ID  #: if no epoch is left: the id that is used next, from epoch 0
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
        """The producer id and epoch that a request must state to be accepted now."""
        if self.next_producer_id != NO_PRODUCER_ID:
            return Identity(self.next_producer_id, 0)
        return Identity(self.producer_id, self.producer_epoch)

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_commit(self) -> bool:
        """Whether a decided transaction is committed rather than aborted."""
        return self.state in COMMITTING

    @property
    def needs_producer_id(self) -> bool:
        """Whether at most one higher epoch is left, so that another producer id is needed next (KIP-360).

        The last epoch is reserved for markers, so that a decision can always increment the epoch.
        """
        return self.producer_epoch + 1 >= MAX_PRODUCER_EPOCH

    def with_partitions(self, partitions: Iterable[TxnPartition], wall_ms: int) -> Transaction:
        """Return the transaction in state Ongoing, with ``partitions`` added."""
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
        """The producer epoch after the decision to commit or abort (R31)."""
        return self.producer_epoch + 1

    def prepared(
        self,
        wall_ms: int,
        *,
        is_commit: bool,
        ended: Identity = NO_IDENTITY,
        next_producer_id: int = NO_PRODUCER_ID,
    ) -> Transaction:
        """Return the transaction as decided, with the next epoch (R31). If no partition needs a marker, it is
        complete. ``ended`` and ``next_producer_id`` are described at the fields with these names."""
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
        """Return the prepared transaction as complete. Call it only if all markers are written."""
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
        """Return an Empty transaction for a new producer of this transactional id (R34).

        It has the next epoch; if ``needs_producer_id``, it has ``reserved_producer_id`` with epoch 0 instead.
        """
        identity = Identity(self.producer_id, self.producer_epoch + 1)
        if self.needs_producer_id:
            identity = Identity(reserved_producer_id, 0)
        return Transaction(
            self.name, *identity, TransactionState.EMPTY, timeout_ms, NO_TIMESTAMP, wall_ms, ended=requester
        )
