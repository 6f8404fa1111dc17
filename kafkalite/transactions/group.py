"""A transaction group: one unit of work of an application, written by many producers, decided by one call.

Batches have ascending numbers. Each writer joins a batch as a writer, under a name of its own, with a
producer id and epoch of its own, and writes transactional batches as any producer does. ``EndTxnGroup`` names
the winners: one decision commits them, aborts every other writer of this and of earlier batches, and says
which batch was decided last. So a batch is decided once: repeated, the call has the first result.

What was decided last is forgotten only of a group that was retired: whoever names a batch of a name that
nobody knows is taken for a new application, so the name must not come back to repeat its last one.

A writer that is done leaves its producer id to the next one that joins, with the next epoch: else each
task of each batch would leave a producer behind in every partition that it wrote to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kafkalite.errors import InvalidTxnStateError
from kafkalite.model import NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.protocol.messages.transactions import TxnWinner
from kafkalite.transactions.record_codec import GroupResult
from kafkalite.transactions.transaction import (
    NO_BATCH,
    PREPARED,
    Identity,
    Transaction,
    TransactionState,
)


class TransactionGroup:
    """What the records say of one application.

    Invariant: ``open`` and ``free`` are the writers' producer ids, by whether the transaction is open.
    Invariant: no writer of a batch up to ``last_batch_id`` is Ongoing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_batch_id = NO_BATCH  #: decided; every lower one is finished too
        self.last_winners: tuple[str, ...] = ()
        self.retired_ms = NO_TIMESTAMP  #: wall clock; since then no batch follows
        self.writers: dict[int, Transaction] = {}  #: by producer id
        self.open: dict[int, None] = {}
        self.free: dict[int, None] = {}  #: the ids to be used again, the longest unused first
        self._attempts: dict[tuple[str, int], int] = {}  # (writer, batch) -> id of the one that is Ongoing

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
        """Whether every marker of the batches decided so far is written."""
        return not any(
            writer.state in PREPARED and writer.batch_id <= self.last_batch_id
            for writer in self.open_writers()
        )

    def open_writers(self) -> Iterator[Transaction]:
        """In the order in which they joined."""
        return (self.writers[producer_id] for producer_id in self.open)

    def ongoing(self, batch_id: int) -> list[Transaction]:
        """The writers of this batch, and of earlier ones, that are not decided."""
        return [
            writer
            for writer in self.open_writers()
            if writer.state is TransactionState.ONGOING and writer.batch_id <= batch_id
        ]

    def attempt(self, writer: str, batch_id: int) -> Transaction | None:
        """The undecided transaction under this name in this batch."""
        producer_id = self._attempts.get((writer, batch_id))
        return None if producer_id is None else self.writers[producer_id]

    def free_identity(self) -> Identity | None:
        """Of the writer that was done last: so those that are too many stay unused, and expire."""
        for producer_id in reversed(self.free):
            return self.writers[producer_id].identity
        return None

    def winners(self, batch_id: int, named: Sequence[TxnWinner]) -> dict[int, Transaction]:
        """The named writers by producer id, each still open and as it was when it had written everything.

        Raises InvalidTxnStateError when one is not: was aborted by time-out, or began anew under its name.
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
                    hint="its transaction timed out, or was begun anew; write the batch again",
                )
            found[winner.producer_id] = writer
        return found

    def durable_state(self) -> Any:
        """What another coordinator must arrive at from the same records."""
        return self.result, self.writers

    def decide(self, result: GroupResult) -> None:
        """Replayed: the latest of the application."""
        _, self.last_batch_id, self.last_winners, self.retired_ms = result

    def put(self, writer: Transaction) -> None:
        """Replayed: the latest of its producer id."""
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
        """Replayed: nothing is known of this producer id any more."""
        earlier = self.writers.pop(producer_id, None)
        if earlier is not None:
            self._end_attempt(earlier)
        self.open.pop(producer_id, None)
        self.free.pop(producer_id, None)

    def _end_attempt(self, writer: Transaction) -> None:
        attempt = writer.writer_name, writer.batch_id
        if self._attempts.get(attempt) == writer.producer_id:
            del self._attempts[attempt]
