"""A transaction group: transactions of many producers of one application, decided by one request.

Batches have ascending numbers. A writer joins a batch under its own name, gets a producer id and epoch, and
writes transactional record batches like any producer. ``EndTxnGroup`` names the winners: the writers whose
records belong to the result. One decision commits them, aborts all other writers of this and earlier batches,
and records the batch as the last decided one. So no batch is decided twice, and a repeated request for the
last decided batch gets the first result.

The last decision is removed some time after the group is retired. After that the group's name is unknown, and
a batch under an unknown name is the first one of a new application. So a retired application must not repeat
its last batch.

A writer that joins reuses the producer id of a completed writer, if there is one, with the next epoch. If
every writer had a new producer id, each would leave producer state in every partition to which it wrote.
"""

# Tests: tests/transactions/test_machine.py, tests/transactions/test_histories.py

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kafkalite.errors import InvalidTxnStateError
from kafkalite.model import NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.protocol.messages.transactions import TxnWinner
from kafkalite.transactions.record_codec import GroupResult
from kafkalite.transactions.transaction import NO_BATCH, PREPARED, Identity, Transaction, TransactionState


class TransactionGroup:
    """The state of one application's transaction group, replayed from its records.

    Invariants: the producer ids of the writers are in ``open`` if their transaction is open, otherwise in
    ``free``. No writer of a batch up to ``last_batch_id`` is Ongoing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_batch_id = NO_BATCH  #: this batch and all lower ones are decided
        self.last_winners: tuple[str, ...] = ()
        self.retired_ms = NO_TIMESTAMP  #: wall clock of the retirement; the next decided batch revokes it
        self.writers: dict[int, Transaction] = {}  #: by producer id
        self.open: dict[int, None] = {}
        self.free: dict[int, None] = {}  #: reusable producer ids; the one unused for longest comes first
        # {(writer, batch): producer id of the Ongoing transaction}
        self._attempts: dict[tuple[str, int], int] = {}

    @property
    def is_empty(self) -> bool:
        return not self.writers and self.last_batch_id == NO_BATCH

    @property
    def is_retired(self) -> bool:
        return self.retired_ms != NO_TIMESTAMP

    @property
    def result(self) -> GroupResult:
        return GroupResult(self.name, self.last_batch_id, self.last_winners, self.retired_ms)

    @property
    def is_complete(self) -> bool:
        """Whether the markers of all transactions in decided batches are written."""
        return not any(
            writer.state in PREPARED and writer.batch_id <= self.last_batch_id
            for writer in self.open_writers()
        )

    def open_writers(self) -> Iterator[Transaction]:
        """Yield the open transactions of the writers."""
        return (self.writers[producer_id] for producer_id in self.open)

    def ongoing(self, batch_id: int) -> list[Transaction]:
        """Return the Ongoing transactions of the writers of this batch and of earlier batches."""
        return [
            writer
            for writer in self.open_writers()
            if writer.state is TransactionState.ONGOING and writer.batch_id <= batch_id
        ]

    def attempt(self, writer: str, batch_id: int) -> Transaction | None:
        """Return the Ongoing transaction of this writer in this batch, or None."""
        producer_id = self._attempts.get((writer, batch_id))
        return None if producer_id is None else self.writers[producer_id]

    def free_identity(self) -> Identity | None:
        """Return the identity for a writer that joins: the producer id of the writer that completed last,
        with the next epoch. Return None if there is no completed writer.

        The producer id that was used last is chosen, so that surplus producer ids stay unused and expire.
        """
        for producer_id in reversed(self.free):
            return self.writers[producer_id].identity
        return None

    def winners(self, batch_id: int, named: Sequence[TxnWinner]) -> dict[int, Transaction]:
        """Return {producer id: transaction} of the writers that a request names as winners of the batch.

        Raises InvalidTxnStateError if a named writer has no Ongoing transaction in this batch with the named
        producer id and epoch, for example because it timed out or the writer joined again.
        """
        found = {}
        for winner in named:
            writer = self.writers.get(winner.producer_id)
            if (
                writer is None
                or (writer.writer_name, writer.batch_id) != (winner.member, batch_id)
                or writer.state is not TransactionState.ONGOING
                or writer.producer_epoch != winner.producer_epoch
            ):
                raise InvalidTxnStateError(
                    f"{winner.member!r} (producer {winner.producer_id}, epoch {winner.producer_epoch}) is "
                    f"no open writer of batch {batch_id} of {self.name!r}: nothing was decided",
                    hint="its transaction timed out, or was started again; write the batch again",
                )
            found[winner.producer_id] = writer
        return found

    def decide(self, result: GroupResult) -> None:
        """Replay the record of the last decided batch."""
        _, self.last_batch_id, self.last_winners, self.retired_ms = result

    def put(self, writer: Transaction) -> None:
        """Replay a transaction record. ``writer`` replaces the earlier transaction of the same producer id,
        if any."""
        producer_id = writer.producer_id
        assert producer_id != NO_PRODUCER_ID
        earlier = self.writers.get(producer_id)
        if earlier is None or earlier.is_open != writer.is_open or not writer.is_open:
            self.remove(producer_id)
        else:
            self._end_attempt(earlier)
        self.writers[producer_id] = writer
        (self.open if writer.is_open else self.free)[producer_id] = None
        if writer.state is TransactionState.ONGOING:
            self._attempts[writer.writer_name, writer.batch_id] = producer_id

    def remove(self, producer_id: int) -> None:
        """Remove a writer's producer id, together with its transaction."""
        earlier = self.writers.pop(producer_id, None)
        if earlier is not None:
            self._end_attempt(earlier)
        self.open.pop(producer_id, None)
        self.free.pop(producer_id, None)

    def _end_attempt(self, writer: Transaction) -> None:
        attempt = writer.writer_name, writer.batch_id
        if self._attempts.get(attempt) == writer.producer_id:
            del self._attempts[attempt]
