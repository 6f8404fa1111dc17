r"""The state of a transactional producer: the permitted operations, and the meaning of a failure. Pure.

::

    none --initialized--> ready --begin--> open --commit--> committing --ended--> ready
                                            |  \---abort--> aborting ----ended--> ready
                                            '--a failure--> abortable --abort--> aborting
    any --fenced--> fenced, for good

A record or an offset that could not be added makes the transaction *abortable*: it accepts nothing more and
cannot be committed, so that it never commits less than the program sent. A commit that the coordinator
refuses with TRANSACTION_ABORTABLE has the same effect. Fencing, for example by another producer with the same
transactional id or by a transaction timeout, is final.

Every transaction that sends a request has its own identity, (producer id, epoch). The response to the request
that ends it contains the identity of the next transaction (KIP-890, R31). Leaders therefore refuse late
requests of an ended transaction, so the producer need not wait for them.
"""

# Tests: tests/client/test_transaction_manager.py

from __future__ import annotations

import enum
from typing import Final

from kafkalite.errors import (
    BrokerError,
    ErrorCode,
    FinishedBatchError,
    InvalidTxnStateError,
    KafkaliteError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionStateError,
)
from kafkalite.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID


class Phase(enum.Enum):
    """The phases of a transactional producer, with the text that errors show."""

    NONE = "not open yet"
    READY = "ready to begin a transaction"
    OPEN = "in a transaction"
    COMMITTING = "committing"
    ABORTING = "aborting"
    ABORTABLE = "in a transaction that can only be aborted"
    FENCED = "fenced"


#: After these errors, another producer owns the id, or the coordinator has ended the transaction.
_FENCING: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
    }
)


def is_fencing(error: BaseException) -> bool:
    """Whether ``error`` means that this producer's identity is no longer valid."""
    return isinstance(error, BrokerError) and error.code in _FENCING


class TransactionState:
    """The state of one transactional producer.

    Invariants: in every phase except NONE and FENCED there is an identity, (producer id, epoch). After
    ``on_initialized``, it changes only at the end of a transaction. ``cause`` is set only in ABORTABLE and
    FENCED.
    """

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.phase = Phase.NONE
        self.producer_id = NO_PRODUCER_ID
        self.producer_epoch = NO_PRODUCER_EPOCH
        self.cause: Exception | None = None
        self.is_flushing = False  #: whether a commit waits for its records, so that no more are accepted
        self.number = 0  #: the number of transactions begun

    def __repr__(self) -> str:
        identity = f"producer {self.producer_id} epoch {self.producer_epoch}"
        return f"<TransactionState of {self.transactional_id!r}: {self.phase.value}, {identity}>"

    def on_initialized(self, producer_id: int, producer_epoch: int) -> None:
        """Record this producer's identity. The coordinator has ended any earlier transaction."""
        assert self.phase is Phase.NONE, "once"
        self._set_identity(producer_id, producer_epoch)

    def begin(self) -> None:
        """Begin a transaction. Raises ProducerFencedError, TransactionStateError."""
        if self.phase is Phase.COMMITTING:
            raise self._refused(
                "begin a transaction",
                "the outcome of the previous commit is unknown: call commit_transaction() again",
            )
        self._require({Phase.READY}, "begin a transaction", "commit or abort the previous one first")
        self.phase = Phase.OPEN
        self.number += 1

    def check_may_send(self, number: int = 0) -> int:
        """Return the number of the open transaction.

        Raises TransactionStateError or the errors of ``raise_if_failed`` if no transaction accepts records.
        Raises TransactionAbortedError if ``number`` is neither 0 nor the number of the open transaction: a
        record that waited in one transaction must not be sent in a later one.
        """
        if self.phase is not Phase.OPEN or self.is_flushing:
            self.raise_if_failed()
            hint = "'async with producer.transaction()' begins a transaction"
            raise self._refused("send", "the transaction is being committed" if self.is_flushing else hint)
        if number not in (0, self.number):
            raise TransactionAbortedError("the transaction that this record belongs to has ended")
        return self.number

    def check_may_commit(self) -> None:
        """Check that a commit may begin or be repeated. Raises TransactionStateError, and the errors of
        ``raise_if_failed``."""
        self.raise_if_failed()
        self._require({Phase.OPEN, Phase.COMMITTING}, "commit", "begin a transaction first")
        if self.is_flushing:
            raise self._refused("commit", "it is being committed already")

    def commit(self) -> None:
        """Begin to commit. Unless the coordinator refuses the commit, an abort is no longer possible.

        Raises the errors of ``raise_if_failed``.
        """
        self.raise_if_failed()
        assert self.phase in {Phase.OPEN, Phase.COMMITTING}, "check_may_commit() first"
        self.phase = Phase.COMMITTING

    def abort(self) -> None:
        """Begin to abort. Raises ProducerFencedError, TransactionStateError."""
        if self.phase is Phase.COMMITTING:
            raise self._refused("abort", "the commit may have been decided: call commit_transaction() again")
        open_phases = {Phase.OPEN, Phase.ABORTABLE, Phase.ABORTING}
        self._require(open_phases, "abort", "there is nothing to abort")
        self.phase = Phase.ABORTING
        self.cause = None

    def on_ended(self, producer_id: int, producer_epoch: int) -> None:
        """Record the end of the transaction (R32) and the next identity. With NO_PRODUCER_ID there is no next
        transaction, and the producer is fenced."""
        assert self.phase in {Phase.COMMITTING, Phase.ABORTING}, "it was committing or aborting"
        if producer_id == NO_PRODUCER_ID:
            self._fence(
                TransactionAbortedError("it has aborted", hint="open a new writer for another attempt")
            )
        else:
            self._set_identity(producer_id, producer_epoch)

    def _set_identity(self, producer_id: int, producer_epoch: int) -> None:
        assert producer_id >= 0 and producer_epoch >= 0, "the coordinator assigns an identity"
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.phase = Phase.READY

    def translate(self, error: Exception) -> Exception:
        """Return the error to raise for a record that failed with ``error``.

        An error of fencing (see ``is_fencing``) is converted to ProducerFencedError. Others are unchanged.
        """
        return self._fenced(error) if is_fencing(error) else error

    def on_failure(self, error: Exception) -> Exception | None:
        """Record the final failure of a record or of an offset commit in the transaction.

        Returns the error with which the transaction's pending records fail. Returns None if the producer was
        fenced before, or if ``error`` is not fencing and the phase is not OPEN.
        """
        if is_fencing(error):
            return self._fence(error)
        if self.phase is not Phase.OPEN:
            return None
        self.phase, self.cause = Phase.ABORTABLE, error
        return self._abortable(error)

    def on_end_failed(self, error: KafkaliteError) -> KafkaliteError:
        """Handle a failed request to end the transaction. Return the error to raise to the caller.

        Without a response the outcome is unknown: the phase does not change, and the same end may be
        requested again.
        """
        if is_fencing(error) or isinstance(error, InvalidTxnStateError):
            return self._fence(error) or self._fenced(error)
        if isinstance(error, TransactionAbortableError) and self.phase is Phase.COMMITTING:
            self.phase, self.cause = Phase.ABORTABLE, error
        return error

    def on_finished(self, error: FinishedBatchError) -> None:
        """Record that the transaction group's batch is already decided, so that nothing may be written."""
        assert self.phase is Phase.NONE, "in place of on_initialized"
        self._fence(error)

    def _fence(self, error: Exception) -> KafkaliteError | None:
        if self.phase is Phase.FENCED:
            return None
        self.phase, self.cause = Phase.FENCED, error
        return self._fenced(error)

    def raise_if_failed(self) -> None:
        """Raise TransactionAbortableError in phase ABORTABLE, ProducerFencedError in phase FENCED.

        A writer of a transaction group may be FENCED by FinishedBatchError or TransactionAbortedError. Then
        an error of the same class is raised.
        """
        if self.cause is not None:
            is_fenced = self.phase is Phase.FENCED
            raise self._fenced(self.cause) if is_fenced else self._abortable(self.cause)

    def _require(self, phases: set[Phase], what: str, hint: str) -> None:
        if self.phase is Phase.FENCED:
            self.raise_if_failed()
        if self.phase not in phases:
            raise self._refused(what, hint)

    def _refused(self, what: str, hint: str) -> TransactionStateError:
        return TransactionStateError(
            f"the producer {self.transactional_id!r} can't {what}: it is {self.phase.value}", hint=hint
        )

    def _abortable(self, cause: Exception) -> TransactionAbortableError:
        error = TransactionAbortableError(
            f"the transaction of {self.transactional_id!r} can't be committed: {_text(cause)}"
        )
        error.__cause__ = cause.with_traceback(None)
        return error

    def _fenced(self, cause: Exception) -> KafkaliteError:
        if isinstance(cause, FinishedBatchError | TransactionAbortedError):
            return type(cause)(cause.message, hint=cause.hint)
        if isinstance(cause, ProducerFencedError) and isinstance(cause.__cause__, BrokerError):
            cause = cause.__cause__  # it is already converted
        error = ProducerFencedError(
            f"the producer {self.transactional_id!r} (id {self.producer_id}, epoch {self.producer_epoch}) is "
            f"fenced: {_text(cause)}",
            hint="another producer has this transactional.id, or the transaction took longer than "
            "transaction.timeout.ms; close this producer and open a new one",
        )
        error.__cause__ = cause.with_traceback(None)
        return error


def _text(error: Exception) -> str:
    return error.message if isinstance(error, KafkaliteError) else str(error) or type(error).__name__
