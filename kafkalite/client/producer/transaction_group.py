"""Transaction groups: transactions of many processes that are committed together.

They are for systems that process batches on many machines (Spark). Every writer joins the batch (application
id, batch id) with a unique name and writes its part. The driver names the winning writers in one repeatable
call. The records of the winners are committed, and those of all other writers of the batch are aborted::

    async with TransactionGroupWriter("app", 7, "task-3-attempt-0", "localhost:9092") as writer:
        await writer.send_many("orders", values)
        prepared = await writer.prepare()                   # send it to the driver

    async with TransactionGroup("app", "localhost:9092") as group:
        await group.finish(7, [prepared, ...])

A decision is final. Finishing the last decided batch again returns the first decision, and ``is_finished`` is
True for writers that join the batch later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, NoReturn, Self, Unpack

from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import TRANSACTION_KEY, CoordinatorLink
from kafkalite.client.cluster.retry import CONCURRENT_BACKOFF
from kafkalite.client.config import (
    ADMIN_OPTIONS,
    BootstrapServers,
    CommonSettings,
    ConfigSource,
    ProducerSettings,
    admin_config,
    merged,
)
from kafkalite.client.producer.placement import Placement
from kafkalite.client.producer.producer import Producer
from kafkalite.client.producer.sender import Sender
from kafkalite.client.producer.transaction_manager import TransactionManager, call_coordinator
from kafkalite.client.producer.transaction_state import Phase
from kafkalite.clock import Clock
from kafkalite.errors import FinishedBatchError, TransactionalIdNotFoundError, TransactionStateError
from kafkalite.protocol.messages.transactions import (
    DescribeTxnGroupRequest,
    EndTxnGroupRequest,
    JoinTxnGroupRequest,
    RetireTxnGroupRequest,
    TxnWinner,
)
from kafkalite.rng import Rng

NO_BATCH = -1


class PreparedWriter(NamedTuple):
    """Identifies a writer that has prepared: all its records are acknowledged, but not committed."""

    writer: str
    producer_id: int
    producer_epoch: int


class GroupResult(NamedTuple):
    """The decided outcome of a batch, as returned by ``TransactionGroup.finish``."""

    batch_id: int
    winners: tuple[str, ...]  #: the writers that were committed: the winners of the call that decided
    is_repeated: bool  #: whether an earlier call decided the batch
    is_complete: bool  #: whether every partition has its transaction markers


class _GroupTransaction(TransactionManager):
    """The transaction of one writer of a batch. The writer may abort it, else the coordinator ends it."""

    def __init__(
        self, sender: Sender, placement: Placement, application_id: str, batch_id: int, writer: str
    ) -> None:
        super().__init__(sender, placement, application_id)
        self.batch_id = batch_id
        self.writer = writer
        self.is_finished = False
        self.is_prepared = False

    async def initialize(self) -> None:
        """Join the batch, and begin the transaction unless the batch is finished. The records of an earlier
        writer with the same name are aborted."""
        timeout_ms = self._config.transaction_timeout_ms
        request = JoinTxnGroupRequest(self.state.transactional_id, self.batch_id, self.writer, timeout_ms)
        response = await call_coordinator(self._cluster, self.coordinator, request)
        if response.is_finished:
            self.is_finished = True
            self.state.on_finished(
                FinishedBatchError(
                    f"batch {self.batch_id} of {self.state.transactional_id!r} is decided: the last one is "
                    f"{response.last_batch_id}",
                    hint="check is_finished before writing",
                )
            )
        else:
            self.state.on_initialized(response.producer_id, response.producer_epoch)
            await super().begin()

    async def prepare(self, flush: Callable[[], Awaitable[None]]) -> PreparedWriter:
        """Deliver all records with ``flush``, and accept no more. If the call is cancelled, records are
        accepted again.

        Raises the errors of ``TransactionState.check_may_commit``.
        """
        if not self.is_prepared:
            self.state.check_may_commit()
            self.state.is_flushing = True
            try:
                await self._flush(flush)
                self.state.raise_if_failed()
                self.is_prepared = True
            finally:
                self.state.is_flushing = self.is_prepared
        return PreparedWriter(self.writer, self.state.producer_id, self.state.producer_epoch)

    async def close(self) -> None:
        """Abort the open transaction, unless the writer has prepared. ``TransactionGroup.finish`` decides on
        prepared writers."""
        if not self.is_prepared and self.state.phase in {Phase.OPEN, Phase.ABORTABLE}:
            await self.abort()


class TransactionGroupWriter(Producer):
    """Writes one part of a batch, in a transaction that ``TransactionGroup.finish`` ends.

    It has the settings of a producer, except ``transactional_id``, which is the application id. ``writer`` is
    the name of this writer: a later writer of the same name replaces it. Closing without ``prepare`` aborts
    the records. If the batch is not decided within transaction.timeout.ms, the coordinator aborts them.
    """

    def __init__(
        self,
        application_id: str,
        batch_id: int,
        writer: str,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: ConfigSource | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        self.application_id = application_id
        self.batch_id = batch_id
        self.writer = writer
        settings["transactional_id"] = application_id
        super().__init__(bootstrap_servers, config=config, clock=clock, rng=rng, **settings)

    def _manager(self, transactional_id: str) -> TransactionManager:
        self._group_transaction = _GroupTransaction(
            self._sender, self._placement, transactional_id, self.batch_id, self.writer
        )
        return self._group_transaction

    async def start(self) -> Self:
        """Join the batch. Raises the same errors as ``Producer.start``."""
        await super().start()
        self._sends_alone = self._placement.sends_alone and not self.is_finished
        return self

    @property
    def is_finished(self) -> bool:
        """Whether this or a later batch was decided before this writer joined. If so, sending raises
        FinishedBatchError."""
        return self._group_transaction.is_finished

    async def prepare(self) -> PreparedWriter | None:
        """Deliver all records and return the input of ``TransactionGroup.finish``.

        The caller can then close the writer. Returns None if ``is_finished``. Raises
        TransactionAbortableError if a record failed, ProducerFencedError if this writer was replaced or the
        coordinator aborted its transaction, and TransactionStateError.
        """
        self._check_open()
        self._sends_alone = False
        return None if self.is_finished else await self._group_transaction.prepare(self._wait_all)

    async def begin_transaction(self) -> NoReturn:
        """Not available, because the transaction is already open. Raises TransactionStateError."""
        self._not_here("begin another transaction")

    async def commit_transaction(self) -> NoReturn:
        """Not available, because the group commits. Raises TransactionStateError."""
        self._not_here("commit")

    async def send_offsets(self, offsets: Any, group: Any = None) -> NoReturn:
        """Not available. Raises TransactionStateError."""
        self._not_here("send offsets")

    def _not_here(self, what: str) -> NoReturn:
        raise TransactionStateError(
            f"writer {self.writer!r} of {self.application_id!r} can't {what}: its group ends its transaction",
            hint="prepare(), then TransactionGroup.finish()",
        )


class TransactionGroup:
    """Commits an application's batches, which TransactionGroupWriters write. Has the settings of an Admin."""

    def __init__(
        self,
        application_id: str,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: ConfigSource | None = None,
        rng: Rng | None = None,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.application_id = application_id
        self._cluster = ClusterClient(
            admin_config(merged(config, {"bootstrap_servers": bootstrap_servers, **settings}, ADMIN_OPTIONS)),
            rng=rng,
        )
        self._coordinator = CoordinatorLink(self._cluster, TRANSACTION_KEY, application_id)

    def __repr__(self) -> str:
        return f"<TransactionGroup {self.application_id!r}>"

    async def start(self) -> Self:
        """Connect to the cluster. ``async with`` calls this. Raises ConnectionFailedError."""
        await self._cluster.start()
        return self

    async def close(self) -> None:
        await self._cluster.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def finish(
        self, batch_id: int, winners: Iterable[PreparedWriter | None], *, wait_ms: int = 0
    ) -> GroupResult:
        """Commit the records of the winners. Abort those of all other writers of this and earlier batches.

        May be repeated: if this batch is already decided, the winners of the first call are returned,
        regardless of ``winners``. None in ``winners`` stands for a writer that found the batch finished.
        Waits up to ``wait_ms`` until every partition has its markers.

        Raises InvalidTxnStateError if a winner was replaced or aborted: nothing is decided, and the batch
        must be run again. Raises FinishedBatchError if a later batch is already decided.
        """
        request = EndTxnGroupRequest(
            self.application_id, batch_id, [TxnWinner(*winner) for winner in winners if winner is not None]
        )
        deadline_ms = self._cluster.now_ms() + wait_ms
        response = await call_coordinator(self._cluster, self._coordinator, request)
        is_repeated, rounds = response.is_repeated, 0
        while not response.is_complete and self._cluster.now_ms() < deadline_ms:
            rounds += 1
            await asyncio.sleep(CONCURRENT_BACKOFF.delay_ms(rounds, self._cluster.rng.random()) / 1000)
            response = await call_coordinator(self._cluster, self._coordinator, request)
        return GroupResult(response.batch_id, tuple(response.winners), is_repeated, response.is_complete)

    async def last_batch_id(self) -> int:
        """Return the id of the last decided batch, or NO_BATCH (-1) if none is decided."""
        try:
            response = await call_coordinator(
                self._cluster, self._coordinator, DescribeTxnGroupRequest(self.application_id)
            )
        except TransactionalIdNotFoundError:
            return NO_BATCH
        last: int = response.last_batch_id
        return last

    async def retire(self) -> int:
        """Declare that no batch follows the last decided batch, and return the id of that batch.

        The brokers then forget the application after transactional.id.expiration.ms without use. Until then,
        ``finish`` of the last batch returns its result again. Without ``retire``, brokers keep the decision
        for ever. A later batch revokes the declaration. May be repeated.

        Raises InvalidTxnStateError if no batch is decided or writers of a later batch are active, and
        TransactionalIdNotFoundError if the application is unknown.
        """
        request = RetireTxnGroupRequest(self.application_id)
        response = await call_coordinator(self._cluster, self._coordinator, request)
        last: int = response.last_batch_id
        return last
