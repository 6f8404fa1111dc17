"""Handlers for consumer groups and their offsets, and for finding a coordinator.

``groups.machine`` has the rules of groups. Every handler that needs a coordinator may return the errors of a
coordinator: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS.
"""

from __future__ import annotations

from kafkalite.broker.coordination.internal_topics import GROUP, TOPICS
from kafkalite.broker.handlers.metadata import NO_NODE, address_for
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import Outcome, translate
from kafkalite.broker.server.responses import HandlerResult, Pending, Reply, Response
from kafkalite.broker.services import Services
from kafkalite.errors import BrokerError, CoordinatorNotAvailableError, InvalidRequestError
from kafkalite.model import NO_EPOCH, OFFSETS_TOPIC, TopicPartition
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    Coordinator,
    DeletedGroup,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)


def find_coordinator(services: Services, request: Request, client: Client) -> HandlerResult:
    """Return the broker that coordinates a group, a transactional id, or a transaction group.

    Behaviour: this is the leader of the internal topic's partition to which the key hashes. If the topic is
    missing, the request creates it, and the response waits for the creation.

    Errors, per key: COORDINATOR_NOT_AVAILABLE (the topic could not be created, or the partition has no leader
    now), INVALID_REQUEST (an empty key); of the whole request INVALID_REQUEST (key type).
    """
    message: FindCoordinatorRequest = request.message
    kind, keys = message
    if kind not in TOPICS:
        known = ", ".join(map(str, TOPICS))
        raise InvalidRequestError(f"key type {kind} is unknown; expected one of {known}")
    if TOPICS[kind] not in services.controller.image.topics and any(keys):
        return _create_and_find(services, message, client)
    return Reply(_find_all(services, message, client))


async def _create_and_find(services: Services, message: FindCoordinatorRequest, client: Client) -> Response:
    try:
        await services.coordinators.creation.ensure(message.key_type, services.controller.image)
    except BrokerError as error:
        outcome = translate(error)
        return Reply(FindCoordinatorResponse(0, None, [_not_found(key, outcome) for key in message.keys]))
    return Reply(_find_all(services, message, client))


def _find_all(services: Services, message: FindCoordinatorRequest, client: Client) -> FindCoordinatorResponse:
    found: list[Coordinator] = []
    for key in message.keys:
        try:
            found.append(_find(services, message.key_type, key, client))
        except BrokerError as error:
            found.append(_not_found(key, translate(error)))
    return FindCoordinatorResponse(0, None, found)


def _find(services: Services, kind: int, key: str, client: Client) -> Coordinator:
    if not key:
        raise InvalidRequestError("a key has at least one character")
    image, topic = services.controller.image, TOPICS[kind]
    partition = services.coordinators.partition_of(kind, key)
    state = image.partition(topic, partition)
    broker = None if state is None else image.brokers.get(state.leader)
    if broker is None or broker.is_fenced:
        raise CoordinatorNotAvailableError(f"{topic}-{partition} has no leader now")
    address = address_for(services.config.node_id, broker, client)
    return Coordinator(key, 0, None, broker.node_id, address, partition)


def _not_found(key: str, outcome: Outcome) -> Coordinator:
    return Coordinator(key, *outcome, NO_NODE, "", -1)


def consumer_group_heartbeat(services: Services, request: Request, client: Client) -> Response | Pending:
    """Let a member join, stay alive, acquire and release partitions, or leave (KIP-848).

    Behaviour: the heartbeat takes effect when it arrives. The response may wait up to ``max_wait_ms`` until
    there is an update for the member; a later heartbeat of the same member ends the wait.

    Deviation from Kafka: the response may wait.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH, UNRELEASED_INSTANCE_ID,
    FENCED_INSTANCE_ID, GROUP_MAX_SIZE_REACHED, UNSUPPORTED_ASSIGNOR, INVALID_REGULAR_EXPRESSION,
    INVALID_REQUEST, POLICY_VIOLATION (group.max.count).
    """
    message: ConsumerGroupHeartbeatRequest = request.message
    coordinators = services.coordinators
    return coordinators.heartbeats.submit(coordinators.groups(message.group_id), message, client.caller)


def offset_commit(services: Services, request: Request, client: Client) -> Response | Pending:
    """Commit offsets of a group.

    Behaviour: the response is sent when the offset records are committed, that is, replicated (R39). A member
    must send its current epoch, on the connection of its previous commit or a newer one (R56). A request
    without a member id is accepted only if the group has no members.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, FENCED_INSTANCE_ID, INVALID_REQUEST (a
    commit of this member has arrived on a newer connection), POLICY_VIOLATION (group.max.count); per
    partition OFFSET_METADATA_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID, INVALID_REQUEST (a
    negative offset), POLICY_VIOLATION (group.max.offsets).
    """
    message: OffsetCommitRequest = request.message
    return services.coordinators.groups(message.group_id).submit(message, client.caller)


def offset_fetch(services: Services, request: Request, client: Client) -> Response | Pending:
    """Return the committed offsets of a group (R40).

    Behaviour: without ``partitions`` the response has all committed offsets. A requested partition that has
    none gets NO_OFFSET.

    Errors: UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH; per partition UNSTABLE_OFFSET_COMMIT
    (with ``require_stable``, if an open transaction has an offset of the partition, R35).
    """
    message: OffsetFetchRequest = request.message
    return services.coordinators.groups(message.group_id).submit(message, client.caller)


def offset_delete(services: Services, request: Request, client: Client) -> Response | Pending:
    """Delete offsets of a group.

    Behaviour: the response is sent when the deletion is committed. It is no error if a partition has no
    offset.

    Errors: GROUP_ID_NOT_FOUND; per partition GROUP_SUBSCRIBED_TO_TOPIC.
    """
    message: OffsetDeleteRequest = request.message
    return services.coordinators.groups(message.group_id).submit(message, client.caller)


async def txn_offset_commit(services: Services, request: Request, client: Client) -> Response:
    """Commit offsets as part of a transaction (KIP-98, KIP-447, R35).

    Behaviour: the transaction's coordinator first adds the ``__consumer_offsets`` partition of this group to
    the transaction (R31). Then the offsets are appended there as a transactional batch. They take effect when
    the commit marker is appended to that partition.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, FENCED_INSTANCE_ID, POLICY_VIOLATION
    (group.max.count); those of the transaction: INVALID_PRODUCER_EPOCH, PRODUCER_FENCED, INVALID_TXN_STATE,
    INVALID_PRODUCER_ID_MAPPING, CONCURRENT_TRANSACTIONS, UNKNOWN_TOPIC_OR_PARTITION (the transaction's
    coordinator does not know ``__consumer_offsets`` yet); per partition those of OffsetCommit.
    """
    message: TxnOffsetCommitRequest = request.message
    coordinators = services.coordinators
    coordinators.groups(message.group_id)  # raises before the transaction's coordinator is involved
    partition = TopicPartition(OFFSETS_TOPIC, coordinators.partition_of(GROUP, message.group_id))
    await services.transactions.verify(
        message.transactional_id, message.producer_id, message.producer_epoch, [partition]
    )
    shard = coordinators.groups(message.group_id)
    return Reply(await shard.ask(message, client.caller))


async def list_groups(services: Services, request: Request, client: Client) -> Response:
    """Return the groups that this broker coordinates, sorted by id.

    Errors: COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE (if any coordinator on this broker cannot
    serve).
    """
    message: ListGroupsRequest = request.message
    groups: list[ListedGroup] = []
    for shard in list(services.coordinators.shards(GROUP)):
        response: ListGroupsResponse = await shard.ask(message, client.caller)
        groups += response.groups
    groups.sort(key=lambda group: group.group_id)
    return Reply(ListGroupsResponse(0, None, groups))


async def describe_groups(services: Services, request: Request, client: Client) -> Response:
    """Return the members of groups, their current and target assignments, and causes of recent rebalances.

    Errors, per group: those of the coordinator, GROUP_ID_NOT_FOUND.
    """
    message: DescribeGroupsRequest = request.message
    groups: list[DescribedGroup] = []
    for group_id in message.group_ids:
        try:
            shard = services.coordinators.groups(group_id)
            command = DescribeGroupsRequest([group_id], message.include_journal)
            response: DescribeGroupsResponse = await shard.ask(command, client.caller)
            groups += response.groups
        except BrokerError as error:
            code, text = translate(error)
            groups.append(DescribedGroup(group_id, code, text, "Dead", NO_EPOCH, NO_EPOCH, "", [], []))
    return Reply(DescribeGroupsResponse(0, None, groups))


async def delete_groups(services: Services, request: Request, client: Client) -> Response:
    """Delete groups without members, and their offsets. The response is sent when the deletion is committed.

    Errors, per group: those of the coordinator, GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP.
    """
    message: DeleteGroupsRequest = request.message
    deleted: list[DeletedGroup] = []
    for group_id in message.group_ids:
        try:
            shard = services.coordinators.groups(group_id)
            response: DeleteGroupsResponse = await shard.ask(DeleteGroupsRequest([group_id]), client.caller)
            deleted += response.groups
        except BrokerError as error:
            deleted.append(DeletedGroup(group_id, *translate(error)))
    return Reply(DeleteGroupsResponse(0, None, deleted))
