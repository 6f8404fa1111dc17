"""The transaction coordinator for one partition of ``__transaction_state``. Pure.

A transactional id has one producer at a time. An application has a transaction group (``group``): many
producers, whose transactions are decided together. Transactional ids and application ids share one name
space: a name that is in use as one of the two cannot be used as the other.

These rules handle late, repeated and lost requests (KIP-890, R31, R32, R34):

- AddPartitionsToTxn and EndTxn take effect only if they state the current producer id and epoch, and each
  decision increments the epoch. So a late request of an earlier transaction never affects a later one.
- A transaction is committed or aborted once. Until the producer begins another transaction or is initialized
  again, a repeated request gets the first response, and a request for the opposite outcome is refused.
- A producer's next transaction begins only after all markers of its previous one are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kafkalite.coordinator_types import Caller, Decision, Instant, StateRecord, Topics
from kafkalite.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    CoordinatorNotAvailableError,
    ErrorCode,
    FinishedBatchError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidRequestError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    PolicyViolationError,
    ProducerFencedError,
    TransactionalIdNotFoundError,
)
from kafkalite.limits import MAX_TRANSACTIONAL_ID_LENGTH, MAX_TXN_GROUP_MEMBERS
from kafkalite.model import MAX_PRODUCER_EPOCH, NO_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.protocol.messages.data import InitProducerIdResponse
from kafkalite.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    DescribedTransaction,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeTxnGroupRequest,
    DescribeTxnGroupResponse,
    EndTxnGroupRequest,
    EndTxnGroupResponse,
    EndTxnRequest,
    EndTxnResponse,
    JoinTxnGroupRequest,
    JoinTxnGroupResponse,
    ListedTransaction,
    ListTransactionsRequest,
    ListTransactionsResponse,
    RetireTxnGroupRequest,
    RetireTxnGroupResponse,
    TxnGroupMember,
    TxnPartitionResult,
)
from kafkalite.transactions.commands import InitProducerId, MarkersWritten, PendingMarker, WithReservedId
from kafkalite.transactions.group import TransactionGroup
from kafkalite.transactions.record_codec import GroupResult, removal, result_record, transaction_record
from kafkalite.transactions.table import TransactionTable
from kafkalite.transactions.transaction import (
    DECIDED,
    NO_BATCH,
    NO_IDENTITY,
    NO_WRITER,
    PREPARED,
    Identity,
    Transaction,
    TransactionState,
    in_order,
)

MAX_RECORDS_PER_TICK: Final = 1_000
#: The records of one tick form one batch, so this is far below any max.message.bytes.
MAX_BYTES_PER_TICK: Final = 256 * 1024
_OK: Final[tuple[int, str | None]] = (int(ErrorCode.NONE), None)


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """The broker options of a transaction coordinator. The comment of each field has the option's name."""

    max_timeout_ms: int = 900_000  #: transaction.max.timeout.ms
    transactional_id_expiration_ms: int = 604_800_000  #: transactional.id.expiration.ms
    max_count: int = 10_000  #: transactional.id.max.count, of one coordinator and with transaction groups


class TransactionMachine:
    """The state machine of one coordinator. ``kafkalite.coordinator_types`` describes how to use it."""

    def __init__(self, settings: TransactionSettings | None = None) -> None:
        self._settings = settings or TransactionSettings()
        self._table = TransactionTable(self._settings.transactional_id_expiration_ms)

    @property
    def transaction_count(self) -> int:
        """The number of transactional ids plus the number of producer ids of writers in groups."""
        return len(self._table.transactions) + sum(
            len(group.writers) for group in self._table.groups.values()
        )

    # --- deciding ----------------------------------------------------------------------------------

    def decide(self, command: Any, caller: Caller, now: Instant, topics: Topics) -> Decision:
        """Return the records and the reply for a command. Raises a BrokerError if it is refused."""
        reserved_id = NO_PRODUCER_ID
        if isinstance(command, WithReservedId):
            command, reserved_id = command
        match command:
            case AddPartitionsToTxnRequest():
                return self._add_partitions(command, now)
            case InitProducerId():
                return self._init_producer_id(command, now)
            case EndTxnRequest():
                return self._end(command, reserved_id, now)
            case MarkersWritten():
                return self._on_markers_written(command, now)
            case JoinTxnGroupRequest():
                return self._join(command, reserved_id, now)
            case EndTxnGroupRequest():
                return self._end_group(command, now)
            case RetireTxnGroupRequest():
                return self._retire_group(command, now)
            case DescribeTxnGroupRequest():
                return Decision(reply=self._describe_group(command))
            case ListTransactionsRequest():
                return Decision(reply=self._list(command, now))
            case DescribeTransactionsRequest():
                described = [self._describe(name) for name in command.transactional_ids]
                return Decision(reply=DescribeTransactionsResponse(*_OK, described))
        raise TypeError(f"a transaction coordinator does not handle {type(command).__name__}")

    def tick(self, now: Instant, topics: Topics) -> Decision:
        """Return records that abort overdue transactions (R34), and that remove expired transactional ids,
        writers and retired groups. If there are many, later calls return the rest."""
        records: list[StateRecord] = []
        size_bytes = 0
        for record in self._due_records(now):
            records.append(record)
            size_bytes += len(record.key) + len(record.value or b"")
            if len(records) >= MAX_RECORDS_PER_TICK or size_bytes >= MAX_BYTES_PER_TICK:
                break
        return Decision(tuple(records))

    def next_deadline_ms(self) -> int | None:
        """Return the monotonic time at which ``tick`` must run next, or None if nothing is scheduled."""
        return self._table.next_deadline_ms()

    def pending_markers(self) -> list[PendingMarker]:
        """Return the decided transactions that may lack markers, in the order of the decisions."""
        return list(self._table.pending.values())

    # --- replaying ---------------------------------------------------------------------------------

    def replay(self, record: StateRecord, now: Instant, *, producer_id: int = NO_PRODUCER_ID) -> None:
        """Replay a record of the log. Raises StorageError if the record cannot be decoded."""
        self._table.replay(record, now)

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        """Do nothing, because this log has no transactional batches."""

    def on_loaded(self, now: Instant) -> None:
        """Do nothing, because a transaction's timeout always counts from the transaction's start."""

    # --- one producer ------------------------------------------------------------------------------

    def _init_producer_id(self, command: InitProducerId, now: Instant) -> Decision:
        name = command.transactional_id
        self._check_name(name, "transactional.id")
        self._check_timeout(command.timeout_ms)
        if name in self._table.groups:
            raise InvalidTxnStateError(f"{name!r} is an application with a transaction group")
        requester = Identity(command.producer_id, command.producer_epoch)
        if command.producer_id == NO_PRODUCER_ID:
            requester = NO_IDENTITY
        transaction = self._table.transactions.get(name)
        if transaction is None:
            self._check_room()
            identity = Identity(_reserved(command.reserved_producer_id), 0)
            transaction = Transaction(
                name, *identity, TransactionState.EMPTY, command.timeout_ms, NO_TIMESTAMP, now.wall_ms
            )
            return _initialized(transaction)
        if requester not in (NO_IDENTITY, transaction.identity, transaction.ended):
            raise _fenced(name, requester)
        _check_not_ending(transaction)
        if must_abort_first(transaction):
            aborted = transaction.prepared(now.wall_ms, is_commit=False, ended=requester)
            error = ConcurrentTransactionsError(f"the open transaction of {name!r} is being aborted")
            return Decision(
                (transaction_record(aborted),),
                InitProducerIdResponse(int(error.code), str(error), NO_PRODUCER_ID, NO_PRODUCER_EPOCH),
            )
        if (
            requester != NO_IDENTITY
            and transaction.state is TransactionState.EMPTY
            and requester == transaction.ended
        ):
            return Decision(
                reply=InitProducerIdResponse(*_OK, *transaction.identity)
            )  # a repeated request, whose first response was lost
        if transaction.needs_producer_id:
            _reserved(command.reserved_producer_id)
        return _initialized(
            transaction.renewed(
                now.wall_ms,
                timeout_ms=command.timeout_ms,
                requester=requester,
                reserved_producer_id=command.reserved_producer_id,
            )
        )

    def _add_partitions(self, request: AddPartitionsToTxnRequest, now: Instant) -> Decision:
        requester = Identity(request.producer_id, request.producer_epoch)
        transaction = self._find(request.transactional_id, requester)
        if not is_present_producer(transaction, requester):
            raise InvalidProducerEpochError(
                f"{transaction.name!r} has producer {transaction.identity.producer_id} with epoch "
                f"{transaction.identity.producer_epoch} now; the request names producer "
                f"{requester.producer_id} with epoch {requester.producer_epoch}"
            )
        _check_not_ending(transaction)
        if transaction.identity.producer_epoch >= MAX_PRODUCER_EPOCH:
            raise InvalidProducerEpochError(f"{transaction.name!r} must get its next producer id first")
        results = [TxnPartitionResult(asked.topic, asked.partition, *_OK) for asked in request.partitions]
        reply = AddPartitionsToTxnResponse(*_OK, results)
        if transaction.state is TransactionState.ONGOING and transaction.partitions.issuperset(
            request.partitions
        ):
            return Decision(reply=reply)
        begun = transaction.with_partitions(request.partitions, now.wall_ms)
        return Decision((transaction_record(begun),), reply)

    def _end(self, request: EndTxnRequest, reserved_id: int, now: Instant) -> Decision:
        requester = Identity(request.producer_id, request.producer_epoch)
        transaction = self._find(request.transactional_id, requester)
        if transaction.is_writer and request.is_commit:
            raise InvalidTxnStateError(
                f"{transaction.writer_name!r} is a writer of a batch of {transaction.name!r}: "
                "only EndTxnGroup commits it"
            )
        if requester == transaction.ended and transaction.state in DECIDED:
            if transaction.is_commit == request.is_commit:
                return Decision(reply=_ended(transaction))  # a repeated request: its response was lost
            outcome = "committed" if transaction.is_commit else "aborted"
            raise InvalidTxnStateError(f"{transaction.name!r}: the transaction was {outcome} before")
        if not is_present_producer(transaction, requester):
            raise _fenced(transaction.name, requester)
        _check_not_ending(transaction)
        next_id = NO_PRODUCER_ID
        if transaction.needs_producer_id and not transaction.is_writer:
            next_id = _reserved(reserved_id)
        decided = transaction.prepared(
            now.wall_ms, is_commit=request.is_commit, ended=requester, next_producer_id=next_id
        )
        return Decision((_latest(decided),), _ended(decided))

    def _on_markers_written(self, command: MarkersWritten, now: Instant) -> Decision:
        for key in (
            (command.transactional_id, NO_PRODUCER_ID),
            (command.transactional_id, command.producer_id),
        ):
            pending = self._table.pending.get(key)
            if pending is None or pending.key != command[:3]:  # the command is for an earlier transaction
                continue
            written = frozenset(command.partitions)
            remaining = tuple(one for one in pending.partitions if one not in written)
            if not may_complete(remaining):
                self._table.pending[key] = pending._replace(partitions=remaining)
                return Decision()
            transaction = self._table.get(key)
            assert transaction is not None
            return Decision((_latest(transaction.completed(now.wall_ms)),))
        return Decision()

    # --- groups ------------------------------------------------------------------------------------

    def _join(self, request: JoinTxnGroupRequest, reserved_id: int, now: Instant) -> Decision:
        name, batch_id = request.application_id, request.batch_id
        self._check_group_name(name)
        self._check_timeout(request.timeout_ms)
        _check_batch(batch_id)
        self._check_name(request.member, "writer's name")
        group = self._table.groups.get(name) or self._new_group(name)
        if batch_id <= group.last_batch_id:
            return Decision(
                reply=JoinTxnGroupResponse(*_OK, NO_PRODUCER_ID, NO_PRODUCER_EPOCH, group.last_batch_id, True)
            )
        records = []
        earlier = group.attempt(request.member, batch_id)
        if earlier is not None:
            records.append(_latest(earlier.prepared(now.wall_ms, is_commit=False)))
        elif len(group.open) >= MAX_TXN_GROUP_MEMBERS:
            raise InvalidTxnStateError(
                f"{name!r} has {len(group.open)} open writers, which is the limit",
                hint="end the batches that are written, or wait until they time out",
            )
        identity = group.free_identity() or Identity(_reserved(reserved_id), 0)
        writer = Transaction(
            name,
            *identity,
            TransactionState.ONGOING,
            request.timeout_ms,
            now.wall_ms,
            now.wall_ms,
            writer_name=request.member,
            batch_id=batch_id,
        )
        records.append(transaction_record(writer))
        return Decision(tuple(records), JoinTxnGroupResponse(*_OK, *identity, group.last_batch_id, False))

    def _end_group(self, request: EndTxnGroupRequest, now: Instant) -> Decision:
        name, batch_id = request.application_id, request.batch_id
        self._check_group_name(name)
        _check_batch(batch_id)
        group = self._table.groups.get(name) or self._new_group(name)
        if batch_id == group.last_batch_id:
            return Decision(
                reply=EndTxnGroupResponse(*_OK, batch_id, list(group.last_winners), True, group.is_complete)
            )
        if batch_id < group.last_batch_id:
            raise FinishedBatchError(
                f"batch {batch_id} of {name!r}: batch {group.last_batch_id} was decided before"
            )
        winners = group.winners(batch_id, request.winners)
        names = tuple(dict.fromkeys(winner.member for winner in request.winners))
        records = [result_record(GroupResult(name, batch_id, names))]
        is_complete = group.is_complete
        for writer in group.ongoing(batch_id):
            decided = writer.prepared(now.wall_ms, is_commit=writer.producer_id in winners)
            is_complete = is_complete and not decided.is_open
            records.append(_latest(decided))
        return Decision(tuple(records), EndTxnGroupResponse(*_OK, batch_id, list(names), False, is_complete))

    def _retire_group(self, request: RetireTxnGroupRequest, now: Instant) -> Decision:
        name = request.application_id
        self._check_group_name(name)
        group = self._group(name)
        if group.last_batch_id == NO_BATCH:
            raise InvalidTxnStateError(
                f"no batch of {name!r} is decided", hint="undecided batches are removed when they expire"
            )
        if any(writer.state is TransactionState.ONGOING for writer in group.open_writers()):
            raise InvalidTxnStateError(
                f"{name!r} is in use: writers of a batch after {group.last_batch_id} are open",
                hint="stop it, and wait until they are aborted; 'kl txn describe' shows them",
            )
        reply = RetireTxnGroupResponse(*_OK, group.last_batch_id)
        if group.is_retired:
            return Decision(reply=reply)
        return Decision((result_record(group.result._replace(retired_ms=now.wall_ms)),), reply)

    def _describe_group(self, request: DescribeTxnGroupRequest) -> DescribeTxnGroupResponse:
        group = self._group(request.application_id)
        writers = [
            TxnGroupMember(
                writer.writer_name,
                writer.batch_id,
                writer.producer_id,
                writer.producer_epoch,
                writer.state.value,
                writer.start_ms,
                in_order(writer.partitions),
            )
            for writer in group.open_writers()
        ]
        return DescribeTxnGroupResponse(
            *_OK, group.name, group.last_batch_id, list(group.last_winners), writers
        )

    # --- listing and describing ---------------------------------------------------------------------

    def _list(self, request: ListTransactionsRequest, now: Instant) -> ListTransactionsResponse:
        known = [state.value for state in TransactionState]
        for state in request.states:
            if state not in known:
                raise InvalidRequestError(
                    f"transaction state {state!r} does not exist; these do: {', '.join(known)}"
                )
        listed = []
        for transaction in self._table:
            lasted_ms = max(now.wall_ms - transaction.start_ms, 0) if transaction.is_open else 0
            is_asked_for = not request.states or transaction.state.value in request.states
            if is_asked_for and lasted_ms >= request.min_duration_ms:
                listed.append(
                    ListedTransaction(
                        transaction.name, transaction.producer_id, transaction.state.value, lasted_ms
                    )
                )
        return ListTransactionsResponse(*_OK, listed)

    def _describe(self, name: str) -> DescribedTransaction:
        """Return the description of a transactional id, without the coordinator epoch."""
        known = self._table.transactions.get(name)
        outcome, state = _OK, "" if known is None else known.state.value
        if known is None:
            error: BrokerError = TransactionalIdNotFoundError(f"there is no transactional id {name!r}")
            if name in self._table.groups:
                error = InvalidTxnStateError(f"{name!r} is an application: ask for its transaction group")
            outcome = (int(error.code), str(error))
            known = Transaction(name, *NO_IDENTITY, TransactionState.EMPTY, 0, NO_TIMESTAMP, NO_TIMESTAMP)
        partitions = in_order(known.partitions)
        identity = (known.producer_id, known.producer_epoch)
        times = (known.timeout_ms, known.start_ms)
        return DescribedTransaction(name, *outcome, *identity, state, *times, partitions, NO_EPOCH)

    # --- time --------------------------------------------------------------------------------------

    def _due_records(self, now: Instant) -> Any:
        for transaction in self._table.overdue(now):
            yield _latest(abort_overdue(transaction, now.wall_ms))
        yield from self._table.expired(now)

    # --- checks ------------------------------------------------------------------------------------

    def _group(self, name: str) -> TransactionGroup:
        """Return the group. Raises TransactionalIdNotFoundError if it does not exist."""
        group = self._table.groups.get(name)
        if group is None:
            raise TransactionalIdNotFoundError(f"there is no transaction group {name!r}")
        return group

    def _find(self, name: str, requester: Identity) -> Transaction:
        """Return the transaction of the transactional id ``name``. If ``name`` is an application id, return
        the transaction of the writer with the requester's producer id.

        Raises InvalidProducerIdMappingError if there is none, or if the requester's producer id does not
        belong to the transactional id (R37).
        """
        group = self._table.groups.get(name)
        if group is not None:
            transaction = group.writers.get(requester.producer_id)
        else:
            transaction = self._table.transactions.get(name)
            if transaction is not None and not belongs_to(transaction, requester.producer_id):
                transaction = None
        if transaction is None:
            raise InvalidProducerIdMappingError(f"{name!r} does not have producer id {requester.producer_id}")
        return transaction

    def _check_name(self, name: str, what: str) -> None:
        if not 0 < len(name) <= MAX_TRANSACTIONAL_ID_LENGTH:
            raise InvalidRequestError(
                f"a {what} has 1 to {MAX_TRANSACTIONAL_ID_LENGTH} characters, not {len(name)}"
            )

    def _check_group_name(self, name: str) -> None:
        self._check_name(name, "application id")
        if name in self._table.transactions:
            raise InvalidTxnStateError(f"{name!r} is a producer's transactional.id, not an application")

    def _new_group(self, name: str) -> TransactionGroup:
        self._check_room()
        return TransactionGroup(name)

    def _check_room(self) -> None:
        """Raise PolicyViolationError if no further transactional id or group may be added (S26)."""
        if len(self._table.transactions) + len(self._table.groups) >= self._settings.max_count:
            raise PolicyViolationError(
                f"this coordinator has transactional.id.max.count={self._settings.max_count} names",
                hint="reuse transactional ids; unused ones expire after transactional.id.expiration.ms",
            )

    def _check_timeout(self, timeout_ms: int) -> None:
        if not 0 < timeout_ms <= self._settings.max_timeout_ms:
            raise InvalidTransactionTimeoutError(
                f"a transaction may take 1 to {self._settings.max_timeout_ms} ms, not {timeout_ms}"
            )


def belongs_to(transaction: Transaction, producer_id: int) -> bool:
    """Whether ``producer_id`` belongs to the transactional id of ``transaction`` (R37): it is the present
    producer id, the next producer id, or the producer id in ``ended``."""
    known = (transaction.producer_id, transaction.identity.producer_id, transaction.ended.producer_id)
    return producer_id != NO_PRODUCER_ID and producer_id in known


def is_present_producer(transaction: Transaction, requester: Identity) -> bool:
    """Whether the requester has the present producer id (R37) and epoch (R31) of the transactional id."""
    return requester == transaction.identity


def _check_not_ending(transaction: Transaction) -> None:
    """Raise ConcurrentTransactionsError while markers are being written, or InvalidTxnStateError if
    ``transaction`` belongs to a group's writer and has ended."""
    if transaction.state in PREPARED:
        raise ConcurrentTransactionsError(
            f"the markers of {transaction.name!r}'s last transaction are being written"
        )
    if transaction.is_writer and transaction.state is not TransactionState.ONGOING:
        raise InvalidTxnStateError(f"the transaction of {transaction.writer_name!r} has ended")


def must_abort_first(transaction: Transaction) -> bool:
    """Whether a new producer of this transactional id must wait until the transaction is aborted (R34)."""
    return transaction.state is TransactionState.ONGOING


def may_complete(remaining: tuple[object, ...]) -> bool:
    """Whether a decided transaction may become complete (R32). ``remaining`` are the partitions that lack its
    marker."""
    return not remaining


def abort_overdue(transaction: Transaction, wall_ms: int) -> Transaction:
    """Return an overdue transaction as aborted, with a new epoch that fences its producer (R34)."""
    return transaction.prepared(wall_ms, is_commit=False)


def _latest(transaction: Transaction) -> StateRecord:
    """Return the record that stores the transaction. If it is the completed transaction of a group's writer,
    and its producer id has no epoch left for another transaction, return its tombstone instead."""
    if transaction.is_writer and not transaction.is_open and transaction.needs_producer_id:
        return removal(transaction.key)
    return transaction_record(transaction)


def _initialized(transaction: Transaction) -> Decision:
    return Decision((transaction_record(transaction),), InitProducerIdResponse(*_OK, *transaction.identity))


def _ended(transaction: Transaction) -> EndTxnResponse:
    """Return the response with the producer's next identity, or NO_IDENTITY for a group's writer."""
    return EndTxnResponse(
        *_OK, *(NO_IDENTITY if transaction.writer_name != NO_WRITER else transaction.identity)
    )


def _fenced(name: str, requester: Identity) -> ProducerFencedError:
    return ProducerFencedError(
        f"producer {requester.producer_id}, epoch {requester.producer_epoch} no longer belongs to {name!r}"
    )


def _reserved(reserved_producer_id: int) -> int:
    """Return ``reserved_producer_id``. Raises CoordinatorNotAvailableError (retriable) if it is
    NO_PRODUCER_ID."""
    if reserved_producer_id == NO_PRODUCER_ID:
        raise CoordinatorNotAvailableError("no producer id is available at present")
    return reserved_producer_id


def _check_batch(batch_id: int) -> None:
    if batch_id < 0:
        raise InvalidRequestError(f"a batch id must be 0 or more, not {batch_id}")
