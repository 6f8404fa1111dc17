"""DescribeProducers: whom a partition's leader remembers, and whose transactions are open there (KIP-664).

Behaviour: each partition is on its own. Every producer that the log still knows, by its id; with the
first offset of its transaction when one is open, which is what holds back readers of committed records.

Errors, per partition: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR.
"""

from __future__ import annotations

from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.model import NO_SEQUENCE, NO_TIMESTAMP
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import (
    ActiveProducer,
    DescribedProducers,
    DescribeProducersRequest,
    DescribeProducersResponse,
    TxnPartition,
)
from kafkalite.storage.producer_state import ProducerState


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: DescribeProducersRequest = request.message
    return Reply(DescribeProducersResponse(0, None, [_describe(services, one) for one in message.partitions]))


def _describe(services: Services, asked: TxnPartition) -> DescribedProducers:
    topic, number = asked
    try:
        states = services.partitions.leader(topic, number).log.producers
        producers = [_active(producer_id, state) for producer_id, state in sorted(states)]
        return DescribedProducers(topic, number, 0, None, producers)
    except Exception as error:
        return DescribedProducers(topic, number, *translate(error), [])


def _active(producer_id: int, state: ProducerState) -> ActiveProducer:
    last_sequence, last_ms = NO_SEQUENCE, state.last_append_ms
    if state.batches:
        last_sequence = state.batches[-1].last_sequence
        if last_ms == NO_TIMESTAMP:  # found in the log: as the records are dated
            last_ms = state.batches[-1].max_timestamp_ms
    return ActiveProducer(
        producer_id,
        state.epoch,
        last_sequence,
        last_ms,
        state.coordinator_epoch,
        state.transaction_start_offset,
    )
