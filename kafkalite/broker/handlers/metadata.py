"""Handlers for metadata: the cluster and its topics, supported versions, the quorum, the metadata tree."""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kafkalite.broker.cluster.metadata_tree import describe
from kafkalite.broker.handlers.admin import over_mutation_quota
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import Outcome, translate
from kafkalite.broker.server.responses import HandlerResult, Reply, Response
from kafkalite.broker.services import Services
from kafkalite.errors import ErrorCode, InvalidRequestError, TopicAuthorizationFailedError
from kafkalite.limits import MAX_TOPICS_PER_REQUEST
from kafkalite.metadata.image import BrokerState, TopicImage
from kafkalite.model import INTERNAL_PREFIX, topic_name_problem
from kafkalite.protocol.api import supported_ranges
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import CreateTopicsRequest, CreateTopicsResponse, NewTopic
from kafkalite.protocol.messages.metadata import (
    ApiVersionsResponse,
    BrokerDescription,
    BrokerMetadata,
    DescribeClusterResponse,
    DescribeMetadataRequest,
    DescribeMetadataResponse,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    DescribeRecoveryRequest,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
    QuorumNode,
    TopicMetadata,
)
from kafkalite.security.acls import Operation
from kafkalite.transport import without_security
from kafkalite.version import VERSION

SOFTWARE_NAME: Final = "kafkalite"
NO_NODE: Final = -1
CREATE_TIMEOUT_MS: Final = 15_000
DESCRIBE_QUORUM_TIMEOUT_MS: Final = 2_000
MAX_METADATA_WAIT_MS: Final = 30_000


def api_versions(_services: Services, request: Request, client: Client) -> Reply:
    """Return the apis and versions that this broker supports. Clients send this request first."""
    client.client_id = request.client_id
    return Reply(ApiVersionsResponse(0, None, SOFTWARE_NAME, VERSION, supported_ranges()))


def metadata(services: Services, request: Request, client: Client) -> HandlerResult:
    """Return the live brokers, and the leaders and replicas of each topic's partitions.

    Behaviour: this broker's address is the one that the client used, unless ``advertised.listeners`` sets
    another. The address of another broker is the one that it advertises for its listener with the same
    number. Fenced brokers are omitted. A missing topic is created if both ``allow_auto_topic_creation`` and
    ``auto.create.topics.enable`` allow it and its name is not internal; the response waits for the creation.

    Errors, per topic: TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION,
    THROTTLING_QUOTA_EXCEEDED (above controller_mutation_rate), and the errors of creating it; per partition:
    LEADER_NOT_AVAILABLE; of the whole request INVALID_REQUEST (too many topics).
    """
    message: MetadataRequest = request.message
    image = services.controller.image
    if message.topics is None:
        return Reply(_describe_topics(services, client, sorted(image.topics), {}))
    if len(message.topics) > MAX_TOPICS_PER_REQUEST:
        raise InvalidRequestError(f"at most {MAX_TOPICS_PER_REQUEST} topics in one request")
    names = list(dict.fromkeys(message.topics))
    refused: dict[str, Outcome] = {}
    missing: list[str] = []
    for name in names:
        try:
            client.check(Operation.DESCRIBE, name)
        except TopicAuthorizationFailedError as error:
            refused[name] = translate(error)
            continue
        if name not in image.topics:
            problem = topic_name_problem(name)
            if problem is not None:
                refused[name] = Outcome(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
            elif not name.startswith(INTERNAL_PREFIX):
                missing.append(name)
    may_create = message.allow_auto_topic_creation and services.config.auto_create_topics_enable
    if missing and may_create:
        over = over_mutation_quota(services, request, client, len(missing) * services.config.num_partitions)
        if over is None:
            return _create_and_describe(services, client, names, missing, refused)
        refused.update(dict.fromkeys(missing, Outcome(over.error_code, over.error_message)))
    return Reply(_describe_topics(services, client, names, refused))


async def _create_and_describe(
    services: Services,
    client: Client,
    names: Sequence[str],
    missing: Sequence[str],
    refused: dict[str, Outcome],
) -> Response:
    command = CreateTopicsRequest(0, False, [NewTopic(name, -1, -1, {}) for name in missing])
    created: CreateTopicsResponse = await services.channel.decide(command, timeout_ms=CREATE_TIMEOUT_MS)
    for topic in created.topics:
        if topic.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            refused[topic.name] = Outcome(topic.error_code, topic.error_message)
    return Reply(_describe_topics(services, client, names, refused))


def _describe_topics(
    services: Services, client: Client, names: Iterable[str], refused: Mapping[str, Outcome]
) -> MetadataResponse:
    """Return the live brokers, at addresses that ``client`` can use, and the topics ``names``.

    ``refused`` has the error of each topic that the client may not describe, that has an invalid name, or
    that could not be created.
    """
    image, node_id = services.controller.image, services.config.node_id
    brokers = [
        BrokerMetadata(broker.node_id, address_for(node_id, broker, client), broker.rack)
        for _, broker in sorted(image.brokers.items())
        if not broker.is_fenced
    ]
    unknown = Outcome(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    topics: list[TopicMetadata] = []
    for name in names:
        topic = None if name in refused else image.topics.get(name)
        if topic is None:
            topics.append(TopicMetadata(*refused.get(name, unknown), name, "", False, []))
        else:
            topics.append(_topic(topic))
    return MetadataResponse(0, None, services.cluster_id, _controller_id(services), brokers, topics)


def _topic(topic: TopicImage) -> TopicMetadata:
    partitions = [
        PartitionMetadata(
            ErrorCode.NONE if state.leader != NO_NODE else ErrorCode.LEADER_NOT_AVAILABLE,
            number,
            state.leader,
            state.leader_epoch,
            state.partition_epoch,
            list(state.replicas),
            list(state.isr),
            list(state.elr),
        )
        for number, state in enumerate(topic.partitions)
    ]
    return TopicMetadata(
        0, None, topic.name, topic.topic_id, topic.name.startswith(INTERNAL_PREFIX), partitions
    )


def _controller_id(services: Services) -> int:
    """Return the id of the active controller; NO_NODE if this broker has no session and may be outdated."""
    controller_id = services.controller.controller_id
    return NO_NODE if controller_id is None or not services.partitions.may_serve() else controller_id


def address_for(node_id: int, broker: BrokerState, client: Client) -> str:
    """Return the address at which ``client`` can connect to ``broker``.

    For this broker it is the address that the client used. For another broker it is the address of its
    listener with the same number, or of its last listener if it has fewer.
    """
    if broker.node_id == node_id:
        return client.address
    if not broker.addresses:
        return ""
    return without_security(broker.addresses[min(client.listener, len(broker.addresses) - 1)])


def describe_cluster(services: Services, _request: Request, client: Client) -> Reply:
    """Return all brokers (also fenced ones), the active controller, and the metadata offset."""
    image, node_id = services.controller.image, services.config.node_id
    brokers = [
        BrokerDescription(
            broker.node_id,
            address_for(node_id, broker, client),
            broker.rack,
            broker.broker_epoch,
            broker.is_fenced,
            broker.is_shutting_down,
            broker.registered_ms,
        )
        for _, broker in sorted(image.brokers.items())
    ]
    return Reply(
        DescribeClusterResponse(
            0, None, services.cluster_id, _controller_id(services), image.metadata_offset, brokers
        )
    )


def describe_quorum(services: Services, request: Request, _client: Client) -> HandlerResult:
    """Return the voters, the leader, and the offsets of the metadata log, as this node knows them.

    A single-node cluster describes itself as the only voter. Only the leader knows how far the other voters'
    logs match its own. A node that is not a voter forwards the request to the leader.

    Errors: REQUEST_TIMED_OUT (a node that is not a voter cannot reach the leader).
    """
    config = services.config
    if services.raft is not None:
        status = services.raft.status()
        voters = config.voters
        nodes = [
            QuorumNode(
                node.node_id,
                without_security(voters.get(node.node_id, "")),
                node.node_id in voters,
                node.match_offset,
                node.last_contact_ms,
            )
            for node in status.nodes
        ]
        return Reply(
            DescribeQuorumResponse(
                0,
                None,
                config.node_id,
                NO_NODE if status.leader_id is None else status.leader_id,
                status.term,
                status.commit_offset,
                status.applied_offset,
                status.log_end_offset,
                status.snapshot_offset,
                nodes,
            )
        )
    if config.has_peers:
        return _ask_leader(services, request.message)
    offset = services.controller.image.metadata_offset
    alone = QuorumNode(config.node_id, "", True, offset, 0)
    return Reply(
        DescribeQuorumResponse(
            0, None, config.node_id, config.node_id, 0, offset, offset, offset + 1, 0, [alone]
        )
    )


async def _ask_leader(services: Services, message: DescribeQuorumRequest) -> Response:
    return Reply(await services.channel.send(message, DESCRIBE_QUORUM_TIMEOUT_MS))


def describe_recovery(services: Services, request: Request, _client: Client) -> HandlerResult:
    """Return the partitions without a leader after unclean stops, and all damaged or unverified replicas.

    Only the active controller knows them. Another broker forwards the request to it, once.

    Errors: NOT_CONTROLLER, REQUEST_TIMED_OUT (no controller can be reached).
    """
    message: DescribeRecoveryRequest = request.message
    if services.controller.is_active or message.node_id != NO_NODE:
        return Reply(services.controller.describe_recovery())
    return _ask_controller(services, message)


async def _ask_controller(services: Services, message: DescribeRecoveryRequest) -> Response:
    forwarded = message._replace(node_id=services.config.node_id)
    return Reply(await services.channel.send(forwarded, DESCRIBE_QUORUM_TIMEOUT_MS))


def describe_metadata(services: Services, request: Request, _client: Client) -> HandlerResult:
    """Return a node of this broker's metadata tree and its children. Long poll.

    Errors: INVALID_REQUEST (there is no such path).
    """
    message: DescribeMetadataRequest = request.message
    if message.after_offset >= services.controller.image.metadata_offset and message.max_wait_ms > 0:
        return _wait_and_describe(services, message)
    return _describe_path(services, message)


async def _wait_and_describe(services: Services, message: DescribeMetadataRequest) -> Response:
    try:
        async with asyncio.timeout(min(message.max_wait_ms, MAX_METADATA_WAIT_MS) / 1000):
            await services.controller.wait_for_offset(message.after_offset + 1)
    except TimeoutError:
        pass  # nothing has changed: return the same state again
    return _describe_path(services, message)


def _describe_path(services: Services, message: DescribeMetadataRequest) -> Reply:
    image = services.controller.image
    nodes = describe(image, message.path)
    if not nodes:
        raise InvalidRequestError(f"there is no path {message.path!r} in the metadata")
    return Reply(DescribeMetadataResponse(0, None, image.metadata_offset, nodes))
