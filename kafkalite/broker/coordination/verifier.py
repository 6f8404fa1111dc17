"""Has the coordinator of a transaction add partitions to it, wherever the coordinator is (R31)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import FINAL, RELOCATE, CallPlan, CallRules, Verdict
from kafkalite.client.cluster.retry import Backoff
from kafkalite.errors import (
    ClientError,
    ClusterAuthorizationFailedError,
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    KafkaliteError,
    NotCoordinatorError,
    ProtocolError,
    RequestTimedOutError,
    ShuttingDownError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.transactions import AddPartitionsToTxnRequest, TxnPartition

if TYPE_CHECKING:
    from kafkalite.client.cluster.connection import Connection

#: How long a leader looks for a coordinator that responds; then the producer must try again.
VERIFY_TIMEOUT_MS: Final = 3_000
#: How long it waits until the previous transaction is complete (Kafka's add.partitions.to.txn.retry).
CONCURRENT_TIMEOUT_MS: Final = 500
VERIFY_BACKOFF: Final = Backoff(5, 100)

#: Another broker may be the coordinator, or the same one soon.
_ELSEWHERE: Final = (
    NotCoordinatorError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    RequestTimedOutError,
    ShuttingDownError,
    ClusterAuthorizationFailedError,
    ClientError,
    ProtocolError,  # a broker of an earlier version, which does not know the api
)

#: The previous transaction is not complete yet, or the coordinator does not know the partition yet.
_WAITS: Final = (ConcurrentTransactionsError, UnknownTopicOrPartitionError)


class TransactionCoordinators(Protocol):
    """Reaches the coordinators of transactions: a ``Transactions``."""

    is_closed: bool

    async def locate(self, transactional_id: str, /) -> int: ...

    async def dial(self, node_id: int | None, /) -> Connection | None: ...

    async def send_add(
        self, request: AddPartitionsToTxnRequest, connection: Connection | None, timeout_ms: int, /
    ) -> None: ...


class Verifier:
    """Adds partitions to transactions that are coordinated on any broker."""

    def __init__(self, coordinators: TransactionCoordinators, loop: asyncio.AbstractEventLoop) -> None:
        self._coordinators = coordinators
        self._loop = loop

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
    ) -> None:
        """Return when the coordinator has added ``partitions``: the end of the transaction will reach them.

        Raises the error with which the coordinator refuses, and only retriable errors if that is not known
        (R30): ConcurrentTransactionsError while the previous transaction is not complete,
        CoordinatorNotAvailableError if no coordinator responded in time.
        """
        request = AddPartitionsToTxnRequest(
            transactional_id, producer_id, producer_epoch, [TxnPartition(*key) for key in partitions]
        )

        def timeout_error(last: KafkaliteError) -> KafkaliteError:
            if isinstance(last, _WAITS):
                return last
            return CoordinatorNotAvailableError(
                f"no coordinator of {transactional_id!r} responded: {last.message}"
            )

        plan = CallPlan(
            CallRules(self._judge, VERIFY_BACKOFF),
            now_ms=int(self._loop.time() * 1000),
            timeout_ms=VERIFY_TIMEOUT_MS,
            timeout_error=timeout_error,
        )
        coordinators = self._coordinators
        await drive(
            plan,
            locate=partial(coordinators.locate, transactional_id),
            dial=coordinators.dial,
            send=partial(coordinators.send_add, request),
        )

    def _judge(self, error: KafkaliteError) -> Verdict:
        """Return how to continue after an error of the coordinator."""
        is_closed = self._coordinators.is_closed
        if isinstance(error, _WAITS):
            return Verdict(must_locate=True, limit_ms=0 if is_closed else CONCURRENT_TIMEOUT_MS)
        if isinstance(error, _ELSEWHERE):
            return Verdict(must_locate=True, limit_ms=0) if is_closed else RELOCATE
        return FINAL
