"""Handlers for transactions of producers, for transaction groups, and for requests between brokers.

``transactions.machine`` has the rules of transactions. Every handler that needs a coordinator may return the
errors of a coordinator: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS.
"""

from __future__ import annotations

from typing import Final

from kafkalite.broker.coordination.internal_topics import TRANSACTION
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import HandlerResult, Pending, Reply, Response, settled
from kafkalite.broker.services import Services
from kafkalite.errors import BrokerError, InvalidTxnStateError, broker_error
from kafkalite.model import (
    MAX_PRODUCER_EPOCH,
    NO_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
)
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import (
    AbortTransactionResponse,
    ActiveProducer,
    DescribedProducers,
    DescribedTransaction,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeTxnGroupRequest,
    EndTxnGroupRequest,
    EndTxnRequest,
    JoinTxnGroupRequest,
    ListedTransaction,
    ListTransactionsRequest,
    ListTransactionsResponse,
    RetireTxnGroupRequest,
    TxnMarker,
    TxnPartition,
    WriteTxnMarkersRequest,
)
from kafkalite.storage.producer_state import ProducerState
from kafkalite.transactions.commands import WithReservedId

#: The longest wait for the end of a writer's earlier attempt before the response CONCURRENT_TRANSACTIONS.
JOIN_HOLD_MS: Final = 1_000
#: At this epoch or a later one, the next transaction may need a new producer id.
LATE_EPOCH: Final = MAX_PRODUCER_EPOCH - 2


def end_txn(services: Services, request: Request, client: Client) -> HandlerResult:
    """Commit or abort the open transaction of a transactional id.

    Behaviour: the response is sent when the decision is committed, with the producer id and epoch of the next
    transaction (R31, R32). The markers are written afterwards. A repeated request with the epoch of the same
    transaction gets the same response.

    Errors: REQUEST_TIMED_OUT (no epoch was left, and no new producer id came in time),
    INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED, INVALID_TXN_STATE (the opposite was decided, or only
    EndTxnGroup decides the transaction), CONCURRENT_TRANSACTIONS.
    """
    message: EndTxnRequest = request.message
    transactional_id = message.transactional_id
    if message.producer_epoch < LATE_EPOCH:
        return services.transactions.submit(transactional_id, message, client.caller)
    return services.transactions.submit_with_spare_id(
        transactional_id, lambda spare_id: WithReservedId(message, spare_id), client.caller
    )


async def list_transactions(services: Services, request: Request, client: Client) -> Response:
    """Return the transactional ids, and the writers of transaction groups, that this broker coordinates.

    Errors: INVALID_REQUEST (an unknown state), COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE (if
    any coordinator on this broker cannot serve).
    """
    message: ListTransactionsRequest = request.message
    listed: list[ListedTransaction] = []
    for shard in list(services.coordinators.shards(TRANSACTION)):
        response: ListTransactionsResponse = await shard.ask(message, client.caller)
        listed += response.transactions
    listed.sort(key=lambda one: (one.transactional_id, one.producer_id))
    return Reply(ListTransactionsResponse(0, None, listed))


async def describe_transactions(services: Services, request: Request, client: Client) -> Response:
    """Return the state of the latest transaction of each requested transactional id.

    Errors, per id: those of the coordinator, TRANSACTIONAL_ID_NOT_FOUND, INVALID_TXN_STATE (the name of an
    application).
    """
    message: DescribeTransactionsRequest = request.message
    described: list[DescribedTransaction] = []
    for transactional_id in message.transactional_ids:
        try:
            shard = services.coordinators.transactions(transactional_id)
            response: DescribeTransactionsResponse = await shard.ask(
                DescribeTransactionsRequest([transactional_id]), client.caller
            )
            described += [
                one._replace(coordinator_epoch=shard.coordinator_epoch) for one in response.transactions
            ]
        except BrokerError as error:
            described.append(_not_described(transactional_id, error))
    return Reply(DescribeTransactionsResponse(0, None, described))


def _not_described(transactional_id: str, error: BrokerError) -> DescribedTransaction:
    code, text = translate(error)
    return DescribedTransaction(
        transactional_id, code, text, NO_PRODUCER_ID, NO_PRODUCER_EPOCH, "", -1, NO_TIMESTAMP, [], NO_EPOCH
    )


def join_txn_group(services: Services, request: Request, client: Client) -> HandlerResult:
    """Join one batch of an application as a writer, which gets its own producer id.

    Behaviour: if a writer joins again with the same name, it starts a new attempt: the records of its earlier
    attempt are aborted, and its earlier producer is fenced. If the batch was already decided, the response
    has ``is_finished`` and no producer id.

    Errors: REQUEST_TIMED_OUT (no producer id in time), INVALID_REQUEST, INVALID_TRANSACTION_TIMEOUT,
    INVALID_TXN_STATE (the name is a plain transactional id, or the group has the maximum number of writers),
    CONCURRENT_TRANSACTIONS (the earlier attempt is being aborted), POLICY_VIOLATION
    (transactional.id.max.count).
    """
    message: JoinTxnGroupRequest = request.message
    return services.transactions.submit_with_spare_id(
        message.application_id,
        lambda spare_id: WithReservedId(message, spare_id),
        client.caller,
        hold_ms=JOIN_HOLD_MS,
    )


def end_txn_group(services: Services, request: Request, client: Client) -> Response | Pending:
    """Decide a batch: commit the records of the writers in ``winners``, and abort those of all others.

    Behaviour: the response is sent when the decision is committed. The markers are written afterwards.
    ``is_complete`` states whether all markers are written. A repeated request for the last decided batch gets
    the same decision and the present value of ``is_complete``.

    Errors: FINISHED_BATCH (a later batch was decided), INVALID_TXN_STATE (a winner is unknown or was aborted;
    nothing is decided, and the batch must be written again), INVALID_REQUEST (an invalid name or batch id),
    CONCURRENT_TRANSACTIONS, POLICY_VIOLATION (transactional.id.max.count).
    """
    message: EndTxnGroupRequest = request.message
    return services.transactions.submit(message.application_id, message, client.caller)


def retire_txn_group(services: Services, request: Request, client: Client) -> Response | Pending:
    """Record that an application has no further batches, so that its last decision may be deleted.

    Behaviour: EndTxnGroup for the last batch still returns the same decision. A new batch revokes the
    retirement. The group is deleted once it has not been used for ``transactional.id.expiration.ms``. A
    repeated request gets the same response.

    Errors: TRANSACTIONAL_ID_NOT_FOUND, INVALID_TXN_STATE (no batch was decided, a writer of a later batch has
    joined, or the name is a plain transactional id).
    """
    message: RetireTxnGroupRequest = request.message
    return services.coordinators.transactions(message.application_id).submit(message, client.caller)


def describe_txn_group(services: Services, request: Request, client: Client) -> Response | Pending:
    """Return an application's last decided batch and the writers of later batches.

    Errors: TRANSACTIONAL_ID_NOT_FOUND.
    """
    message: DescribeTxnGroupRequest = request.message
    return services.coordinators.transactions(message.application_id).submit(message, client.caller)


def describe_producers(services: Services, request: Request, _client: Client) -> Reply:
    """Return the state of the producers of partitions that this broker leads (KIP-664).

    Behaviour: the response has each producer whose state the log keeps, by ascending id, with the first
    offset of its open transaction, if any. An open transaction holds back readers of committed records.

    Errors, per partition: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR.
    """
    message: DescribeProducersRequest = request.message
    described = [_describe_producers(services, asked) for asked in message.partitions]
    return Reply(DescribeProducersResponse(0, None, described))


def _describe_producers(services: Services, asked: TxnPartition) -> DescribedProducers:
    topic, number = asked
    try:
        states = services.partitions.leader(topic, number).producers()
        producers = [_active(producer_id, state) for producer_id, state in sorted(states)]
        return DescribedProducers(topic, number, 0, None, producers)
    except Exception as error:
        return DescribedProducers(topic, number, *translate(error), [])


def _active(producer_id: int, state: ProducerState) -> ActiveProducer:
    last_sequence, last_ms = NO_SEQUENCE, state.last_append_ms
    if state.batches:
        last_sequence = state.batches[-1].last_sequence
        if last_ms == NO_TIMESTAMP:  # restored from the log, which has no append times
            last_ms = state.batches[-1].max_timestamp_ms
    return ActiveProducer(
        producer_id,
        state.epoch,
        last_sequence,
        last_ms,
        state.coordinator_epoch,
        state.transaction_start_offset,
    )


async def abort_transaction(services: Services, request: Request, _client: Client) -> Response:
    """Abort a hanging transaction in one partition (KIP-664). The partition's leader responds.

    Behaviour: appends an abort marker if the producer's open transaction in this partition began at
    ``start_offset``. The response is sent when the marker is committed. The coordinator is not involved. If
    the transaction does not hang, its producer is fenced from this partition, and its records in this
    partition stay aborted even if the coordinator commits the transaction.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, INVALID_TXN_STATE (no such transaction is
    open), NOT_ENOUGH_REPLICAS, KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT.
    """
    topic, number, producer_id, start_offset = request.message
    partition = services.partitions.leader(topic, number)
    found = [one for one in partition.open_transactions() if one.producer_id == producer_id]
    if not found or found[0].start_offset != start_offset:
        raise InvalidTxnStateError(
            f"producer {producer_id} has no transaction open in {partition} since offset {start_offset}",
            hint="'kl txn find-hanging' lists the open transactions",
        )
    epoch = found[0].producer_epoch + 1
    states = dict(partition.producers())
    coordinator_epoch = max(states[producer_id].coordinator_epoch, NO_EPOCH)
    marker = TxnMarker(producer_id, epoch, coordinator_epoch, False, [TxnPartition(topic, number)])
    response = await settled(services.marker_writer.write([marker]))
    result = response.markers[0].partitions[0]
    if result.error_code:
        raise broker_error(result.error_code, result.error_message or "")
    return Reply(AbortTransactionResponse(0, None, producer_id, epoch))


def add_partitions_to_txn(services: Services, request: Request, client: Client) -> Response | Pending:
    """Add partitions to a transaction. Their leader requests this before it appends the first batch (R31).

    Behaviour: the response is sent when the partitions are durably part of the transaction. The end of the
    transaction then writes a marker to each of them. Either all or none are added.

    Errors: UNKNOWN_TOPIC_OR_PARTITION (missing in this broker's metadata), CONCURRENT_TRANSACTIONS (the
    previous transaction is not complete), INVALID_PRODUCER_ID_MAPPING, INVALID_PRODUCER_EPOCH,
    PRODUCER_FENCED, INVALID_TXN_STATE.
    """
    return services.transactions.add_partitions(request.message, client.caller)


def write_txn_markers(services: Services, request: Request, _client: Client) -> Pending:
    """Write a coordinator's markers to partitions that this broker leads. Sent by brokers only.

    Behaviour and errors: see ``MarkerWriter.write``.
    """
    message: WriteTxnMarkersRequest = request.message
    return services.marker_writer.write(message.markers)
