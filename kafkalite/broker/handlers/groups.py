"""Handlers for consumer groups and their offsets, and for finding a coordinator.

The rules of a group are those of ``groups.machine``. Errors of the coordinator, in every handler that needs
one: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS.
"""

from __future__ import annotations

from typing import Final, Protocol

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.coordination.coordinators import Coordinators
from kafkalite.broker.coordination.internal_topics import GROUP, OFFSETS_TOPIC, TOPICS
from kafkalite.broker.coordination.transactions import Transactions
from kafkalite.broker.handlers.metadata import NO_NODE, address_for
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import Outcome, translate
from kafkalite.broker.server.responses import HandlerResult, Pending, Reply, Response
from kafkalite.errors import BrokerError, CoordinatorNotAvailableError, InvalidRequestError
from kafkalite.limits import MAX_GROUPS_PER_REQUEST
from kafkalite.model import NO_EPOCH, TopicPartition
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
from kafkalite.raft.controller_node import ControllerNode

MAX_KEYS: Final = 1_000


class GroupServices(Protocol):
    """The parts of a broker that these handlers use."""

    config: BrokerConfig
    controller: ControllerNode
    coordinators: Coordinators
    transactions: Transactions


# --- finding a coordinator


def find_coordinator(services: GroupServices, request: Request, client: Client) -> HandlerResult:
    """Return which broker coordinates a group, a transactional id, or a transaction group.

    Behaviour: that broker leads the partition of the internal topic to which the key hashes. The first
    request for a coordinator creates the topic; the response waits for it.

    Errors, per key: COORDINATOR_NOT_AVAILABLE (the topic could not be created, or the partition has no leader
    now), INVALID_REQUEST (an empty key); of the whole request INVALID_REQUEST (key type, too many keys).
    """
    message: FindCoordinatorRequest = request.message
    kind, keys = message
    if kind not in TOPICS:
        known = ", ".join(map(str, TOPICS))
        raise InvalidRequestError(f"key type {kind} is unknown; expected one of {known}")
    if len(keys) > MAX_KEYS:
        raise InvalidRequestError(f"at most {MAX_KEYS} keys in one request")
    if TOPICS[kind] not in services.controller.image.topics and any(keys):
        return _create_and_find(services, message, client)
    return Reply(_find_all(services, message, client))


async def _create_and_find(
    services: GroupServices, message: FindCoordinatorRequest, client: Client
) -> Response:
    try:
        await services.coordinators.creation.ensure(message.key_type, services.controller.image)
    except BrokerError as error:
        outcome = translate(error)
        return Reply(FindCoordinatorResponse(0, None, [_not_found(key, outcome) for key in message.keys]))
    return Reply(_find_all(services, message, client))


def _find_all(
    services: GroupServices, message: FindCoordinatorRequest, client: Client
) -> FindCoordinatorResponse:
    found: list[Coordinator] = []
    for key in message.keys:
        try:
            found.append(_find(services, message.key_type, key, client))
        except BrokerError as error:
            found.append(_not_found(key, translate(error)))
    return FindCoordinatorResponse(0, None, found)


def _find(services: GroupServices, kind: int, key: str, client: Client) -> Coordinator:
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


# --- members


def consumer_group_heartbeat(services: GroupServices, request: Request, client: Client) -> Response | Pending:
    """Let a member join, stay alive, acquire and release partitions, or leave (KIP-848).

    Behaviour: the heartbeat takes effect when it arrives. The response may wait up to ``max_wait_ms``
    until there is an update for the member; a later heartbeat of the same member ends the wait.

    Deviation from Kafka: the response may wait.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH, UNRELEASED_INSTANCE_ID,
    FENCED_INSTANCE_ID, GROUP_MAX_SIZE_REACHED, UNSUPPORTED_ASSIGNOR, INVALID_REGULAR_EXPRESSION,
    INVALID_REQUEST.
    """
    message: ConsumerGroupHeartbeatRequest = request.message
    coordinators = services.coordinators
    return coordinators.heartbeats.submit(coordinators.groups(message.group_id), message, client.caller)


# --- offsets


def offset_commit(services: GroupServices, request: Request, client: Client) -> Response | Pending:
    """Commit offsets of a group.

    Behaviour: the response is sent when the offsets are committed to the log of the internal topic (R39). A
    member commits with its epoch. Without a member id the group must have no members.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, FENCED_MEMBER_EPOCH; per partition
    OFFSET_METADATA_TOO_LARGE, UNKNOWN_TOPIC_OR_PARTITION.
    """
    message: OffsetCommitRequest = request.message
    return services.coordinators.groups(message.group_id).submit(message, client.caller)


def offset_fetch(services: GroupServices, request: Request, client: Client) -> Response | Pending:
    """Return the committed offsets of a group (R40).

    Behaviour: without ``partitions``, all committed offsets. NO_OFFSET for a partition that has none.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH; per partition
    UNSTABLE_OFFSET_COMMIT (``require_stable``: an offset of an open transaction, R35).
    """
    message: OffsetFetchRequest = request.message
    return services.coordinators.groups(message.group_id).submit(message, client.caller)


def offset_delete(services: GroupServices, request: Request, client: Client) -> Response | Pending:
    """Delete offsets of a group.

    Behaviour: the response is sent when the deletion is committed. Offsets that do not exist count as
    deleted.

    Errors: INVALID_GROUP_ID, GROUP_ID_NOT_FOUND; per partition GROUP_SUBSCRIBED_TO_TOPIC.
    """
    message: OffsetDeleteRequest = request.message
    return services.coordinators.groups(message.group_id).submit(message, client.caller)


async def txn_offset_commit(services: GroupServices, request: Request, client: Client) -> Response:
    """Commit offsets that take effect with a transaction (KIP-98, KIP-447, R35).

    Behaviour: the transaction's coordinator adds this group's partition to the transaction (R31); then the
    offsets are appended as part of it. They are pending until its marker is in the partition.

    Errors: INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, STALE_MEMBER_EPOCH, FENCED_MEMBER_EPOCH; those of the
    transaction: INVALID_PRODUCER_EPOCH, PRODUCER_FENCED, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING,
    CONCURRENT_TRANSACTIONS.
    """
    message: TxnOffsetCommitRequest = request.message
    coordinators = services.coordinators
    coordinators.groups(message.group_id)  # fail before the transaction's coordinator is involved
    partition = TopicPartition(OFFSETS_TOPIC, coordinators.partition_of(GROUP, message.group_id))
    await services.transactions.verify(
        message.transactional_id, message.producer_id, message.producer_epoch, [partition]
    )
    shard = coordinators.groups(message.group_id)
    return Reply(await shard.ask(message, client.caller))


# --- groups


async def list_groups(services: GroupServices, request: Request, client: Client) -> Response:
    """Return the groups that this broker coordinates, in the order of their ids.

    Errors: COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE (of any partition that this broker leads).
    """
    message: ListGroupsRequest = request.message
    groups: list[ListedGroup] = []
    for shard in list(services.coordinators.shards(GROUP)):
        response: ListGroupsResponse = await shard.ask(message, client.caller)
        groups += response.groups
    groups.sort(key=lambda group: group.group_id)
    return Reply(ListGroupsResponse(0, None, groups))


async def describe_groups(services: GroupServices, request: Request, client: Client) -> Response:
    """Return the members of groups, their current and target assignments, and the reason of each generation.

    Errors, per group: those of the coordinator, INVALID_GROUP_ID, GROUP_ID_NOT_FOUND; of the whole request
    INVALID_REQUEST (too many groups).
    """
    message: DescribeGroupsRequest = request.message
    _check_count(message.group_ids)
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


async def delete_groups(services: GroupServices, request: Request, client: Client) -> Response:
    """Delete groups without members and their offsets. The response is sent when the deletion is
    committed.

    Errors, per group: those of the coordinator, INVALID_GROUP_ID, GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP;
    of the whole request INVALID_REQUEST (too many groups).
    """
    message: DeleteGroupsRequest = request.message
    _check_count(message.group_ids)
    deleted: list[DeletedGroup] = []
    for group_id in message.group_ids:
        try:
            shard = services.coordinators.groups(group_id)
            response: DeleteGroupsResponse = await shard.ask(DeleteGroupsRequest([group_id]), client.caller)
            deleted += response.groups
        except BrokerError as error:
            deleted.append(DeletedGroup(group_id, *translate(error)))
    return Reply(DeleteGroupsResponse(0, None, deleted))


def _check_count(group_ids: list[str]) -> None:
    if len(group_ids) > MAX_GROUPS_PER_REQUEST:
        raise InvalidRequestError(f"at most {MAX_GROUPS_PER_REQUEST} groups in one request")
