"""TxnOffsetCommit: offsets that take effect with a transaction (KIP-98, KIP-447, R35).

Behaviour: the transaction's coordinator is asked to end the transaction in this group's partition too (R31);
then the offsets are appended as a part of it. They are pending until its marker stands in the partition.

Errors: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, INVALID_GROUP_ID; those of
``groups.machine``: UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, FENCED_MEMBER_EPOCH; those of the transaction:
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING,
CONCURRENT_TRANSACTIONS.
"""

from __future__ import annotations

from kafkalite.broker.coordination.coordinators import caller_of
from kafkalite.broker.coordination.internal_topics import GROUP, OFFSETS_TOPIC
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.model import TopicPartition
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import TxnOffsetCommitRequest


async def handle(services: Services, request: Request, client: Client) -> Answer:
    message: TxnOffsetCommitRequest = request.message
    coordinators = services.coordinators
    coordinators.groups(message.group_id)  # before anybody else is asked
    partition = TopicPartition(OFFSETS_TOPIC, coordinators.partition_of(GROUP, message.group_id))
    await services.transactions.verify(
        message.transactional_id, message.producer_id, message.producer_epoch, [partition]
    )
    shard = coordinators.groups(message.group_id)
    return Reply(await shard.ask(message, caller_of(client.client_id, client.peer)))
