"""Where a transactional producer stands: what it may do now, what a failure means for its transaction. Pure.

::

    none --initialized--> ready --begin--> open --commit--> committing --ended--> ready
                                            |  \\---abort--> aborting ----ended--> ready
                                            '--a failure--> abortable --abort--> aborting
    any --fenced--> fenced, for good

A record or an offset that could not be added makes the transaction *abortable*: nothing more goes into it,
and it can't be committed, so it never holds less than the program believes. What shuts the producer out
(another of the same transactional id, an end of the transaction by time-out) is final.

Every transaction has its own identity, (producer id, epoch): the end of each brings that of the next
(KIP-890, R31). So whatever of it is still on its way somewhere is refused, and need not be waited for.
"""

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
    """The values are how an error names it."""

    NONE = "not open yet"
    READY = "ready to begin a transaction"
    OPEN = "in a transaction"
    COMMITTING = "committing"
    ABORTING = "aborting"
    ABORTABLE = "in a transaction that can only be aborted"
    FENCED = "shut out"


#: After these another one owns the transactional id, or the coordinator has ended the transaction itself.
_FENCING: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
    }
)


def is_fencing(error: BaseException) -> bool:
    """Whether ``error`` says that this producer's identity is no longer valid."""
    return isinstance(error, BrokerError) and error.code in _FENCING


class TransactionState:
    """Invariants: an identity from READY on; ``cause`` in ABORTABLE and FENCED and only there; the identity
    changes only at the end of a transaction.
    """

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.phase = Phase.NONE
        self.producer_id = NO_PRODUCER_ID
        self.producer_epoch = NO_PRODUCER_EPOCH
        self.cause: Exception | None = None
        self.is_flushing = False  #: a commit waits for its records: nothing more goes in
        self.number = 0  #: of the transactions begun

    def __repr__(self) -> str:
        identity = f"producer {self.producer_id} epoch {self.producer_epoch}"
        return f"<TransactionState of {self.transactional_id!r}: {self.phase.value}, {identity}>"

    # --- the way ---------------------------------------------------------------------------------

    def on_initialized(self, producer_id: int, producer_epoch: int) -> None:
        """The coordinator knows this producer, and nothing of an earlier one is open."""
        assert self.phase is Phase.NONE, "once"
        self._set_identity(producer_id, producer_epoch)

    def begin(self) -> None:
        """Raises ProducerFencedError, TransactionStateError."""
        if self.phase is Phase.COMMITTING:
            raise self._refused(
                "begin a transaction",
                "whether the one before was committed is not known: commit_transaction() again tells",
            )
        self._require({Phase.READY}, "begin a transaction", "commit or abort the one before first")
        self.phase = Phase.OPEN
        self.number += 1

    def check_may_send(self, number: int = 0) -> int:
        """Raises ProducerFencedError, TransactionAbortableError, TransactionStateError.

        Returns the transaction's number; TransactionAbortedError when another ``number`` was given: what
        waited to be sent in one transaction goes into no later one.
        """
        if self.phase is not Phase.OPEN or self.is_flushing:
            self._raise_cause()
            hint = "'async with producer.transaction()' begins a transaction"
            raise self._refused("send", "the transaction is being committed" if self.is_flushing else hint)
        if number not in (0, self.number):
            raise TransactionAbortedError("the transaction that this was to be sent in has ended")
        return self.number

    def raise_if_failed(self) -> None:
        """Raises ProducerFencedError, TransactionAbortableError when it can't be committed."""
        self._raise_cause()

    def check_may_commit(self) -> None:
        """Before the flush. Raises as ``check_may_send``."""
        self._raise_cause()
        self._require({Phase.OPEN, Phase.COMMITTING}, "commit", "begin a transaction first")
        if self.is_flushing:
            raise self._refused("commit", "it is being committed already")

    def commit(self) -> None:
        """All of it is in the logs; from here it can't be aborted. Raises as ``check_may_commit``."""
        self._raise_cause()
        assert self.phase in {Phase.OPEN, Phase.COMMITTING}, "check_may_commit() first"
        self.phase = Phase.COMMITTING

    def abort(self) -> None:
        """Raises ProducerFencedError, TransactionStateError."""
        if self.phase is Phase.COMMITTING:
            raise self._refused("abort", "the commit may have been decided: commit_transaction() again tells")
        open_phases = {Phase.OPEN, Phase.ABORTABLE, Phase.ABORTING}
        self._require(open_phases, "abort", "there is nothing to abort")
        self.phase = Phase.ABORTING
        self.cause = None

    def on_ended(self, producer_id: int, producer_epoch: int) -> None:
        """The end is decided (R32). The next transaction has this identity; without one there is none."""
        assert self.phase in {Phase.COMMITTING, Phase.ABORTING}, "something ends that was not ending"
        if producer_id == NO_PRODUCER_ID:
            self._fence(
                TransactionAbortedError("it has aborted", hint="another attempt takes a writer of its own")
            )
        else:
            self._set_identity(producer_id, producer_epoch)

    def _set_identity(self, producer_id: int, producer_epoch: int) -> None:
        assert producer_id >= 0 and producer_epoch >= 0, "the coordinator gives an identity"
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.phase = Phase.READY

    # --- what goes wrong -------------------------------------------------------------------------

    def translate(self, error: Exception) -> Exception:
        """What a record's failure is called here: a fenced producer by that name."""
        return self._fenced(error) if is_fencing(error) else error

    def on_failure(self, error: Exception) -> Exception | None:
        """Something of the open transaction failed for good.

        Returns what all the rest of it fails with, or None when that was clear before.
        """
        if is_fencing(error):
            return self._fence(error)
        if self.phase is not Phase.OPEN:
            return None
        self.phase, self.cause = Phase.ABORTABLE, error
        return self._abortable(error)

    def on_end_failed(self, error: KafkaliteError) -> KafkaliteError:
        """The coordinator refused to end it, or did not answer. Returns what to tell the caller.

        Without an answer the outcome is not known: the phase stays, and the same end may be asked for again.
        """
        if is_fencing(error) or isinstance(error, InvalidTxnStateError):
            return self._fence(error) or self._fenced(error)
        if isinstance(error, TransactionAbortableError) and self.phase is Phase.COMMITTING:
            self.phase, self.cause = Phase.ABORTABLE, error
        return error

    def on_finished(self, error: FinishedBatchError) -> None:
        """There is nothing to write: what would be was decided before."""
        assert self.phase is Phase.NONE, "in place of on_initialized"
        self._fence(error)

    def _fence(self, error: Exception) -> KafkaliteError | None:
        if self.phase is Phase.FENCED:
            return None
        self.phase, self.cause = Phase.FENCED, error
        return self._fenced(error)

    def _raise_cause(self) -> None:
        if self.cause is not None:
            is_fenced = self.phase is Phase.FENCED
            raise self._fenced(self.cause) if is_fenced else self._abortable(self.cause)

    def _require(self, phases: set[Phase], what: str, hint: str) -> None:
        if self.phase is Phase.FENCED:
            self._raise_cause()
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
            cause = cause.__cause__  # it has our words already
        error = ProducerFencedError(
            f"the producer {self.transactional_id!r} (id {self.producer_id}, epoch {self.producer_epoch}) is "
            f"shut out: {_text(cause)}",
            hint="another producer has this transactional.id, or the transaction took longer than "
            "transaction.timeout.ms; close this producer and open a new one",
        )
        error.__cause__ = cause.with_traceback(None)
        return error


def _text(error: Exception) -> str:
    return error.message if isinstance(error, KafkaliteError) else str(error) or type(error).__name__
