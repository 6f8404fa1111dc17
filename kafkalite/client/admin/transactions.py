"""The part of Admin that looks after transactions: which are open, since when; and ends one by force."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kafkalite.client.admin.connection import AdminConnection, error_of, raise_first
from kafkalite.client.cluster.coordinator import TRANSACTION_KEY
from kafkalite.client.cluster.list_offsets import check_partitions
from kafkalite.client.cluster.routing import NO_NODE
from kafkalite.errors import ConcurrentTransactionsError, LeaderNotAvailableError
from kafkalite.model import NO_OFFSET, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, TopicPartition
from kafkalite.protocol.messages.data import InitProducerIdRequest
from kafkalite.protocol.messages.transactions import (
    AbortTransactionRequest,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    DescribeTxnGroupRequest,
    ListTransactionsRequest,
    RetireTxnGroupRequest,
    TxnPartition,
)


@dataclass(frozen=True, slots=True)
class TransactionListing:
    transactional_id: str
    producer_id: int
    state: str
    duration_ms: int  #: since the open transaction began; 0 without one
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int  #: wall clock; NO_TIMESTAMP without an open one
    partitions: tuple[TopicPartition, ...]
    coordinator_epoch: int


@dataclass(frozen=True, slots=True)
class ProducerDescription:
    """A producer that a partition's leader knows."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int | None  #: of its open transaction


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """Open in a partition, and unknown to every coordinator: nobody will end it."""

    partition: TopicPartition
    producer: ProducerDescription


@dataclass(frozen=True, slots=True)
class TransactionGroupMember:
    member: str
    batch_id: int
    producer_id: int
    producer_epoch: int
    state: str
    start_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class TransactionGroupDescription:
    application_id: str
    last_batch_id: int  #: the last one decided; -1 before any
    last_winners: tuple[str, ...]
    members: tuple[TransactionGroupMember, ...]  #: whose records are not ended in every partition


class TransactionAdmin(AdminConnection):
    """Mixed into Admin."""

    async def list_transactions(
        self, states: Sequence[str] = (), *, min_duration_ms: int = 0
    ) -> list[TransactionListing]:
        """Every transactional id, or those in one of ``states`` and open for so long, by name."""
        answers = await self._call_every_broker(ListTransactionsRequest(list(states), min_duration_ms))
        return sorted(
            (
                TransactionListing(one.transactional_id, one.producer_id, one.state, one.duration_ms, node_id)
                for node_id, answer in answers.items()
                for one in answer.transactions
            ),
            key=lambda listing: (listing.transactional_id, listing.producer_id),
        )

    async def describe_transaction(self, transactional_id: str) -> TransactionDescription:
        """Raises TransactionalIdNotFoundError."""
        request = DescribeTransactionsRequest([transactional_id])
        answer = await self._call_coordinator(TRANSACTION_KEY, transactional_id, request)
        raise_first(answer.transactions, f"transactional id {transactional_id!r}")
        one = answer.transactions[0]
        return TransactionDescription(
            one.transactional_id,
            one.producer_id,
            one.producer_epoch,
            one.state,
            one.timeout_ms,
            one.start_ms,
            _partitions(one.partitions),
            one.coordinator_epoch,
        )

    async def describe_transaction_group(self, application_id: str) -> TransactionGroupDescription:
        """Raises TransactionalIdNotFoundError."""
        request = DescribeTxnGroupRequest(application_id)
        answer = await self._call_coordinator(TRANSACTION_KEY, application_id, request)
        return TransactionGroupDescription(
            answer.application_id,
            answer.last_batch_id,
            tuple(answer.last_winners),
            tuple(
                TransactionGroupMember(
                    one.member,
                    one.batch_id,
                    one.producer_id,
                    one.producer_epoch,
                    one.state,
                    one.start_ms,
                    _partitions(one.partitions),
                )
                for one in answer.members
            ),
        )

    async def retire_transaction_group(self, application_id: str) -> int:
        """As ``TransactionGroup.retire``, for an application that is not there any more."""
        request = RetireTxnGroupRequest(application_id)
        answer = await self._call_coordinator(TRANSACTION_KEY, application_id, request)
        last: int = answer.last_batch_id
        return last

    async def abort_transaction(self, transactional_id: str) -> None:
        """Abort what a transactional id has open, and fence its producer (R34).

        Nothing happens, but for the fencing, if nothing is open. Raises TransactionalIdNotFoundError,
        InvalidTxnStateError for the application id of a transaction group.
        """
        described = await self.describe_transaction(transactional_id)
        request = InitProducerIdRequest(
            transactional_id, described.timeout_ms, NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        )
        with contextlib.suppress(ConcurrentTransactionsError):  # it is being ended, and takes a while
            await self._call_coordinator(TRANSACTION_KEY, transactional_id, request)

    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerDescription]]:
        """The producers that the leader of each partition knows (KIP-664)."""
        described: dict[TopicPartition, list[ProducerDescription]] = {}
        for tp in partitions:
            leader = await self._leader(tp)
            answer = await self._call(DescribeProducersRequest([TxnPartition(*tp)]), node_id=leader)
            raise_first(answer.partitions, str(tp))
            described[tp] = [
                ProducerDescription(
                    one.producer_id,
                    one.producer_epoch,
                    one.last_sequence,
                    one.last_timestamp_ms,
                    one.coordinator_epoch,
                    None if one.transaction_start_offset == NO_OFFSET else one.transaction_start_offset,
                )
                for one in answer.partitions[0].producers
            ]
        return described

    async def find_hanging_transactions(
        self, partitions: Iterable[TopicPartition], *, min_age_ms: int
    ) -> list[HangingTransaction]:
        """Transactions open in ``partitions`` that no coordinator knows of (KIP-664).

        Younger ones than ``min_age_ms``, by the timestamp of their last batch, are left out: a coordinator
        may just be learning of them.
        """
        now_ms = self._clock.wall_ms()
        known: set[int] | None = None
        hanging: list[HangingTransaction] = []
        for tp, producers in (await self.describe_producers(partitions)).items():
            for producer in producers:
                is_old = now_ms - producer.last_timestamp_ms >= min_age_ms
                if producer.transaction_start_offset is None or not is_old:
                    continue
                if known is None:
                    open_now = await self.list_transactions()
                    known = {one.producer_id for one in open_now if not _is_at_rest(one.state)}
                if producer.producer_id not in known:
                    hanging.append(HangingTransaction(tp, producer))
        return hanging

    async def abort_hanging_transaction(
        self, tp: TopicPartition, producer_id: int, start_offset: int
    ) -> None:
        """End, as aborted, the transaction that hangs there: of this producer, from this offset on.

        Raises InvalidTxnStateError when there is no such one open.
        """
        request = AbortTransactionRequest(*tp, producer_id, start_offset)
        answer = await self._call(request, node_id=await self._leader(tp))
        error = error_of(answer, str(tp))
        if error is not None:
            raise error

    async def _leader(self, tp: TopicPartition) -> int:
        await check_partitions(self._cluster, {tp: None})
        leader_id = self._cluster.metadata.leader(tp).node_id
        if leader_id == NO_NODE:
            raise LeaderNotAvailableError(f"{tp} has no leader now")
        return leader_id


def _is_at_rest(state: str) -> bool:
    return state == "Empty" or state.startswith("Complete")


def _partitions(partitions: Iterable[TxnPartition]) -> tuple[TopicPartition, ...]:
    return tuple(sorted(TopicPartition(one.topic, one.partition) for one in partitions))
