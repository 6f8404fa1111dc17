"""Sends a transactional producer's requests to its coordinator, if ``transaction_state`` permits them.

Beginning a transaction needs no request. Records are sent to the leaders, which register their partitions
with the coordinator. Offsets are sent to the coordinator of their group. EndTxnRequest ends a transaction in
which something was sent. This request may be repeated: the coordinator returns its first response again
(R32).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, Self, TypeVar

from kafkalite.client.arguments import checked_offsets
from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.cluster.coordinator import GROUP_KEY, TRANSACTION_KEY, CoordinatorLink
from kafkalite.client.cluster.retry import CONCURRENT_BACKOFF
from kafkalite.client.group.commits import to_commit
from kafkalite.client.producer.placement import Placement
from kafkalite.client.producer.sender import Sender
from kafkalite.client.producer.transaction_state import Phase, TransactionState, is_fencing
from kafkalite.errors import (
    BrokerError,
    ClientClosedError,
    CommitFailedError,
    ConcurrentTransactionsError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    KafkaliteError,
    ProducerFencedError,
    RequestTimeoutError,
    StaleMemberEpochError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionStateError,
    UnknownMemberIdError,
    UnstableOffsetCommitError,
    broker_error,
)
from kafkalite.model import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    GroupMetadata,
    OffsetAndMetadata,
    TopicPartition,
)
from kafkalite.protocol.messages.data import InitProducerIdRequest
from kafkalite.protocol.messages.groups import TxnOffsetCommitRequest
from kafkalite.protocol.messages.transactions import EndTxnRequest

T = TypeVar("T")

# How long ``async with producer.transaction()`` waits for the abort after an exception. The abort then
# continues in the background, so that it does not delay the exception or Ctrl-C. The next transaction waits
# for it.
ABORT_AFTER_ERROR_MS: Final = 1_000

# How long offsets are resent after temporary errors. A member whose epoch is older than the coordinator's
# will soon receive the newer epoch.
OFFSETS_PATIENCE_MS: Final = 5_000
OFFSETS_PAUSE_MS: Final = 20

#: The member may not commit any more, because other members may own its partitions (R35, KIP-447).
_EXPELLED: Final = (
    FencedInstanceIdError,
    FencedMemberEpochError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)


class GroupConsumer(Protocol):
    """The methods of a consumer that ``send_offsets`` uses."""

    def positions(self) -> Mapping[TopicPartition, int | OffsetAndMetadata]: ...
    def group_metadata(self) -> GroupMetadata: ...


Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]


async def call_coordinator(
    cluster: ClusterClient, link: CoordinatorLink, request: Any, *, purpose: Purpose = Purpose.MAIN
) -> Any:
    """Send ``request`` with ``link`` and return the response.

    Retries while the previous transaction of the same transactional id is ending, or while offsets are
    pending in a transaction. Raises RequestTimeoutError, caused by the last error, after
    default.api.timeout.ms, and the errors of ``CoordinatorLink.call``.
    """
    deadline_ms = cluster.now_ms() + cluster.config.default_api_timeout_ms
    collisions = 0
    while True:
        try:
            return await link.call(
                request, timeout_ms=max(1, deadline_ms - cluster.now_ms()), purpose=purpose
            )
        except (ConcurrentTransactionsError, UnstableOffsetCommitError) as error:
            collisions += 1
            pause_ms = CONCURRENT_BACKOFF.delay_ms(collisions, cluster.rng.random())
            if cluster.now_ms() + pause_ms >= deadline_ms:
                raise RequestTimeoutError(
                    f"the previous transaction of {link.key!r} has not ended yet: {error}",
                    hint="check whether all brokers that it wrote to are up",
                ) from error
            await asyncio.sleep(pause_ms / 1000)


class TransactionManager:
    """Runs a producer's transactions.

    When a transaction begins, the accumulator has no batches and no producer identity.
    """

    def __init__(self, sender: Sender, placement: Placement, transactional_id: str) -> None:
        self.state = TransactionState(transactional_id)
        self._sender = sender
        self._placement = placement
        self._cluster = sender.cluster
        self._config = sender.config
        self.coordinator = CoordinatorLink(self._cluster, TRANSACTION_KEY, transactional_id)
        self._groups: dict[str, CoordinatorLink] = {}
        self._ending: asyncio.Task[KafkaliteError | None] | None = None
        self._sent_before = 0  # the number of produce requests before the transaction began
        self._has_offsets = False
        self._offsets_under_way = 0
        self._end_purpose = Purpose.MAIN
        sender.on_failure = self._on_failure
        sender.translate = self.state.translate

    # --- life ------------------------------------------------------------------------------------

    async def initialize(self) -> None:
        """Register as the only producer of the transactional id.

        The coordinator aborts the open transaction of an earlier producer (R34). Raises the coordinator's
        BrokerError, and RequestTimeoutError after default.api.timeout.ms.
        """
        config = self._config
        request = InitProducerIdRequest(
            self.state.transactional_id, config.transaction_timeout_ms, NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        )
        response = await call_coordinator(self._cluster, self.coordinator, request)
        self.state.on_initialized(response.producer_id, response.producer_epoch)

    async def close(self) -> None:
        """Abort the open transaction, or wait until a transaction that is ending has ended."""
        if self.state.phase in {Phase.OPEN, Phase.ABORTABLE}:
            await self.abort()
        elif self._ending is not None:
            await asyncio.wait({self._ending})

    # --- a transaction ---------------------------------------------------------------------------

    async def begin(self) -> None:
        """Begin a transaction. If an abort has not ended, finish it first.

        Raises ProducerFencedError, TransactionStateError, and the errors of ``abort``.
        """
        if self._ending is not None:  # the caller of the abort was cancelled
            await asyncio.wait({self._ending})
        if self.state.phase is Phase.ABORTING:
            await self._end(is_commit=False)
        self.state.begin()
        self._sender.accumulator.begin_transaction(self.state.producer_id, self.state.producer_epoch)
        self._sent_before = self._sender.request_count
        self._has_offsets = False
        self._end_purpose = Purpose.MAIN

    async def commit(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Deliver all records with ``flush``, then commit.

        Raises TransactionAbortableError if a record or ``send_offsets`` has failed: nothing is committed, and
        the transaction must be aborted. Raises ProducerFencedError, TransactionStateError, and
        RequestTimeoutError if the outcome is unknown; the caller must then commit again.
        """
        try:
            await self._deliver(flush)
            await self._end(is_commit=True)
        except (ProducerFencedError, TransactionAbortableError):
            self._sender.failures.forget()  # the error covers these failures
            raise

    async def _deliver(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Flush all records, wait for their acknowledgements, and enter the phase COMMITTING.

        Raises ProducerFencedError, TransactionAbortableError, TransactionStateError.
        """
        state = self.state
        state.check_may_commit()
        if self._offsets_under_way:
            raise TransactionStateError("send_offsets() has not returned yet", hint="await it first")
        if state.phase is Phase.OPEN:
            state.is_flushing = True
            try:
                await self._flush(flush)
            finally:
                state.is_flushing = False
        state.commit()

    async def _flush(self, flush: Callable[[], Awaitable[None]]) -> None:
        while self._placement.parked_batches or self._sender.accumulator.incomplete:
            await flush()

    async def abort(self) -> None:
        """Abort the transaction. Pending records fail with TransactionAbortedError.

        Raises ProducerFencedError, TransactionStateError, RequestTimeoutError.
        """
        self._begin_abort()
        await self._end(is_commit=False)

    async def abort_for(self, error: BaseException) -> None:
        """Abort the open transaction because of ``error``. Waits at most ABORT_AFTER_ERROR_MS.

        If the abort fails or takes longer, a note is added to ``error``.
        """
        if self.state.phase not in {Phase.OPEN, Phase.ABORTABLE}:
            if self.state.phase is Phase.FENCED:
                self._sender.failures.forget()
            return
        self._begin_abort()
        ending = asyncio.ensure_future(self._end(is_commit=False))
        await asyncio.wait({ending}, timeout=ABORT_AFTER_ERROR_MS / 1000)
        problem = ending.exception() if ending.done() and not ending.cancelled() else None
        if not ending.done():
            ending.cancel()  # cancels only the wait; the abort continues
            error.add_note("kafkalite: the transaction's abort continues in the background")
        elif problem is not None:
            error.add_note(f"kafkalite: the transaction could not be aborted: {problem}")

    def _begin_abort(self) -> None:
        """Mark the transaction as aborting and fail all its pending records."""
        self.state.abort()
        self._fail_all(
            TransactionAbortedError(
                f"the transaction of {self.state.transactional_id!r} was aborted before this was acknowledged"
            )
        )
        self._sender.failures.forget()  # the abort covers these failures

    def _fail_all(self, error: Exception) -> None:
        if self._sender.accumulator.awaits_response or self._offsets_under_way:
            self._end_purpose = Purpose.ABORT  # responses arrive in order, and the pending ones may take long
        self._placement.fail_all_parked(error)
        self._sender.finish(self._sender.accumulator.end_transaction(error))

    def _on_failure(self, error: Exception) -> None:
        """Handle the final failure of a batch or of offsets: fail the transaction's pending records."""
        rest = self.state.on_failure(error)
        if rest is not None:
            self._fail_all(rest)

    # --- end -------------------------------------------------------------------------------------

    async def _end(self, *, is_commit: bool) -> None:
        """Commit or abort, with a request to the coordinator if anything was sent. If an end is already in
        progress, wait for it instead. The end continues if the caller is cancelled."""
        if self._ending is None:
            self._ending = self._cluster.spawn(self._end_in_background(is_commit))
        error = await self._finished(self._ending)
        if error is not None:
            raise error.with_traceback(None)

    async def _end_in_background(self, is_commit: bool) -> KafkaliteError | None:
        state = self.state
        try:
            producer_id, producer_epoch = state.producer_id, state.producer_epoch
            if self._has_offsets or self._sender.request_count != self._sent_before:
                request = EndTxnRequest(state.transactional_id, producer_id, producer_epoch, is_commit)
                response = await call_coordinator(
                    self._cluster, self.coordinator, request, purpose=self._end_purpose
                )
                producer_id, producer_epoch = response.producer_id, response.producer_epoch
        except KafkaliteError as error:
            return state.on_end_failed(error)
        else:
            self._fail_all(TransactionAbortedError("the transaction had already ended"))
            state.on_ended(producer_id, producer_epoch)
            return None
        finally:
            self._ending = None

    async def _finished(self, task: asyncio.Task[T]) -> T:
        """Return the result of a background task. Raises ClientClosedError if closing cancelled the task."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._cluster.is_closed:
                raise ClientClosedError("the producer was closed while a transaction ended") from None
            raise

    # --- offsets ---------------------------------------------------------------------------------

    async def send_offsets(self, offsets: GroupConsumer | Offsets, group: GroupMetadata | str | None) -> None:
        """Commit consumed offsets as part of the open transaction, as ``Producer.send_offsets`` documents."""
        state = self.state
        state.check_may_send()
        who, positions = _committer_and_offsets(offsets, group)
        number = state.number
        self._offsets_under_way += 1
        try:
            if positions:
                await self._send_offsets(who, positions)
        except BaseException as error:
            # Also after a cancellation, because it is unknown whether the offsets are part of the
            # transaction.
            if state.number == number:
                self._on_failure(_failure(error))
            if is_fencing(error):
                state.check_may_send()
            raise
        finally:
            self._offsets_under_way -= 1

    async def _send_offsets(self, who: Callable[[], GroupMetadata], positions: Offsets) -> None:
        cluster = self._cluster
        # The identity of this transaction, even if it is aborted and the next one begins meanwhile.
        identity = (self.state.transactional_id, self.state.producer_id, self.state.producer_epoch)
        offsets = [to_commit(tp, position) for tp, position in positions.items()]
        patience_until_ms = cluster.now_ms() + OFFSETS_PATIENCE_MS
        while True:
            member = who()
            link = self._groups.get(member.group_id)
            if link is None:
                link = self._groups[member.group_id] = CoordinatorLink(cluster, GROUP_KEY, member.group_id)
            self._has_offsets = True
            request = TxnOffsetCommitRequest(
                *identity, member.group_id, member.member_id, member.member_epoch, member.instance_id, offsets
            )
            try:
                response = await call_coordinator(cluster, link, request)
                for outcome in response.offsets:
                    if outcome.error_code:
                        where = f"{outcome.topic}-{outcome.partition}"
                        raise broker_error(outcome.error_code, outcome.error_message or "", about=where)
                return
            except BrokerError as error:
                # The member will soon receive the newer epoch.
                is_stale = isinstance(error, StaleMemberEpochError)
                if cluster.now_ms() >= patience_until_ms or not (error.retriable or is_stale):
                    refused = _offsets_refused(member, error)
                    raise refused from (error if refused is not error else None)
                if is_stale and who() != member:
                    continue
            await asyncio.sleep(OFFSETS_PAUSE_MS / 1000)


def _offsets_refused(member: GroupMetadata, error: BrokerError) -> KafkaliteError:
    if not isinstance(error, _EXPELLED):
        return error
    return CommitFailedError(
        f"offsets of group {member.group_id!r} were refused: {error.message}",
        hint="abort the transaction; another consumer processes the same records now",
    )


def _failure(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    return TransactionStateError(
        "send_offsets() was cancelled: it is unknown whether the offsets are in the transaction"
    )


def _committer_and_offsets(
    offsets: GroupConsumer | Offsets, group: GroupMetadata | str | None
) -> tuple[Callable[[], GroupMetadata], Offsets]:
    """Return (a function that returns the committing member's current metadata, the offsets)."""
    given = GroupMetadata(group) if isinstance(group, str) else group
    if isinstance(offsets, Mapping):
        if given is None:
            raise TransactionStateError(
                "send_offsets() of a mapping needs the group", hint="pass its group_id"
            )
        return lambda: given, checked_offsets(offsets)
    config = getattr(offsets, "config", None)
    if config is not None and config.enable_auto_commit:
        raise TransactionStateError(
            "this consumer commits automatically, also the input of an aborted transaction",
            hint="open it with enable_auto_commit=False",
        )
    who = offsets.group_metadata if given is None else lambda: given
    return who, _known(offsets.positions())


def _known(positions: Mapping[TopicPartition, int | OffsetAndMetadata | None]) -> Offsets:
    return {tp: position for tp, position in positions.items() if position is not None}


class Transaction:
    """One transaction: ``async with producer.transaction() as transaction``.

    Commits at the end of the block. Aborts if the commit is refused, if the block is cancelled, or if it
    raises any exception other than GeneratorExit.
    """

    def __init__(
        self,
        manager: TransactionManager,
        begin: Callable[[], Coroutine[Any, Any, None]],
        commit: Callable[[], Coroutine[Any, Any, None]],
        abort: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._manager = manager
        self._begin, self._commit, self._abort = begin, commit, abort
        self._number = 0

    def __repr__(self) -> str:
        return f"<Transaction {self._number}, {self._manager.state!r}>"

    @property
    def is_open(self) -> bool:
        """Whether the transaction has begun and has not failed, and is neither ended nor being ended."""
        state = self._manager.state
        return state.phase is Phase.OPEN and state.number == self._number

    async def __aenter__(self) -> Self:
        await self._begin()
        self._number = self._manager.state.number
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        state = self._manager.state
        if state.number != self._number:
            return
        if isinstance(error, GeneratorExit):  # the generator is closing: awaiting is not possible
            return
        if error is not None:
            await self._manager.abort_for(error)
        elif state.phase is not Phase.READY:  # in phase READY, it was ended inside the block
            try:
                await self._commit()
            except BaseException as refused:
                await self._manager.abort_for(refused)
                raise

    async def send_offsets(
        self, offsets: GroupConsumer | Offsets, group: GroupMetadata | str | None = None
    ) -> None:
        """Commit consumed offsets as part of this transaction, as ``Producer.send_offsets`` does."""
        await self._manager.send_offsets(offsets, group)

    async def abort(self) -> None:
        """Abort the transaction. The block continues, but nothing more can be sent in this transaction."""
        await self._abort()
