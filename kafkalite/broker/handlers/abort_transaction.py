"""AbortTransaction: end a transaction that hangs in one partition (KIP-664). For operators; the leader
answers.

Behaviour: appends an abort marker if the producer's transaction that is open here began at ``start_offset``;
answered when it is committed. The coordinator is not asked: if the transaction is not hanging but open, its
producer is fenced from this partition, and the end of the transaction will not bring back what was aborted.

Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, INVALID_TXN_STATE (no such transaction is open),
NOT_ENOUGH_REPLICAS, KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT.
"""

from __future__ import annotations

from kafkalite.broker.coordination.marker_writer import write_markers
from kafkalite.broker.coordination.shard import settled
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidTxnStateError, broker_error
from kafkalite.model import NO_EPOCH
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import (
    AbortTransactionResponse,
    TxnMarker,
    TxnPartition,
)


async def handle(services: Services, request: Request, _client: Client) -> Answer:
    topic, number, producer_id, start_offset = request.message
    hosted = services.partitions.leader(topic, number)
    found = [one for one in hosted.partition.open_transactions() if one.producer_id == producer_id]
    if not found or found[0].start_offset != start_offset:
        raise InvalidTxnStateError(
            f"producer {producer_id} has no transaction open in {hosted.key} since offset {start_offset}",
            hint="'kl txn find-hanging' shows those there are",
        )
    epoch = found[0].producer_epoch + 1
    states = dict(hosted.log.producers)
    coordinator_epoch = max(states[producer_id].coordinator_epoch, NO_EPOCH)
    marker = TxnMarker(producer_id, epoch, coordinator_epoch, False, [TxnPartition(topic, number)])
    response = await settled(write_markers(services, [marker]))
    result = response.markers[0].partitions[0]
    if result.error_code:
        raise broker_error(result.error_code, result.error_message or "")
    return Reply(AbortTransactionResponse(0, None, producer_id, epoch))
