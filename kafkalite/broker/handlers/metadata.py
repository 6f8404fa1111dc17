"""Handlers for metadata: the cluster and its topics, supported versions, the quorum, the metadata tree."""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, Final

from kafkalite.broker.cluster.metadata_tree import describe
from kafkalite.broker.handlers.admin import over_mutation_quota
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import Outcome, translate
from kafkalite.broker.server.responses import HandlerResult, Reply, Response
from kafkalite.broker.server.turns import InTurns, finished
from kafkalite.broker.services import Services
from kafkalite.errors import ErrorCode, InvalidRequestError
from kafkalite.metadata.image import BrokerState, ClusterImage, TopicImage
from kafkalite.model import INTERNAL_PREFIX, topic_name_problem
from kafkalite.protocol.api import ApiKey, supported_ranges
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import CreateTopicsRequest, CreateTopicsResponse, NewTopic
from kafkalite.protocol.messages.metadata import (
    ApiVersionsResponse,
    BrokerDescription,
    BrokerMetadata,
    DescribeClusterResponse,
    DescribeFeaturesRequest,
    DescribeMetadataRequest,
    DescribeMetadataResponse,
    DescribeQuorumRequest,
    DescribeQuorumRequestV1,
    DescribeQuorumResponse,
    DescribeQuorumResponseV1,
    DescribeRecoveryRequest,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
    QuorumDirectory,
    QuorumNode,
    TopicMetadata,
)
from kafkalite.security.acls import Operation, ResourceType
from kafkalite.transport import without_security
from kafkalite.version import VERSION

SOFTWARE_NAME: Final = "kafkalite"
NO_NODE: Final = -1
CREATE_TIMEOUT_MS: Final = 15_000
DESCRIBE_QUORUM_TIMEOUT_MS: Final = 2_000
MAX_METADATA_WAIT_MS: Final = 30_000
#: The number of names, or of topics and partitions, in one step of a Metadata request: about three ms (S24).
TOPICS_PER_TURN: Final = 1_000
#: The number of refused topics in a Metadata response that have an error text. The others have a code.
MAX_TEXTS: Final = 100

_MAX_DESCRIBED: Final = 2_048
#: By topic id: the topic, and what clients see of it. Making it again takes half the time of a response.
_described: dict[str, tuple[TopicImage, TopicMetadata]] = {}


def api_versions(_services: Services, request: Request, client: Client) -> Reply:
    """Return the apis and versions that this broker supports. Clients send this request first."""
    client.client_id = request.client_id
    return Reply(ApiVersionsResponse(0, None, SOFTWARE_NAME, VERSION, supported_ranges()))


def metadata(services: Services, request: Request, client: Client) -> HandlerResult:
    """Return the live brokers, and the leaders and replicas of each topic's partitions.

    Behaviour: this broker's address is the one that the client used, unless ``advertised.listeners`` sets
    another. The address of another broker is the one that it advertises for its listener with the same
    number, or for its last listener if it has fewer. Fenced brokers are omitted. A missing topic is created
    if both ``allow_auto_topic_creation`` and ``auto.create.topics.enable`` allow it and its name is not
    internal; the response waits for the creation.

    Errors, per topic: TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION,
    THROTTLING_QUOTA_EXCEEDED (above controller_mutation_rate), and the errors of creating it; per partition:
    LEADER_NOT_AVAILABLE; of the whole request, if topics are created: NOT_CONTROLLER, REQUEST_TIMED_OUT,
    KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands wait).
    """
    message: MetadataRequest = request.message
    steps = _steps(services, request, client)
    if _size(services.controller.image, message) <= TOPICS_PER_TURN:
        result: HandlerResult = finished(steps)
        return result
    if message.topics is None or not _may_create(services, message):
        return InTurns(services, steps)
    return _run(steps)


def _size(image: ClusterImage, message: MetadataRequest) -> int:
    """Return the number of names in a request, and of partitions in its response."""
    if message.topics is None:
        return sum([1 + len(topic.partitions) for topic in image.topics.values()])
    if len(message.topics) > TOPICS_PER_TURN:
        return len(message.topics)
    found = [image.topics.get(name) for name in message.topics]
    return len(found) + sum([len(topic.partitions) for topic in found if topic is not None])


async def _run(steps: Generator[None, None, Response | Coroutine[Any, Any, Response]]) -> Response:
    """Take the steps in turns with other work (S24), then create topics if necessary."""
    end = await _ended(steps)
    return end if isinstance(end, Reply) else await end


async def _ended(steps: Generator[None, None, Any]) -> Any:
    """Take the steps in turns with other work (S24), and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await asyncio.sleep(0)


def _may_create(services: Services, message: MetadataRequest) -> bool:
    return message.allow_auto_topic_creation and services.config.auto_create_topics_enable


def _steps(services: Services, request: Request, client: Client) -> Generator[None, None, Any]:
    """Serve the request in steps of about TOPICS_PER_TURN topics, all from the same image.

    Returns the response, or a coroutine that creates topics and returns it.
    """
    message: MetadataRequest = request.message
    image = services.controller.image
    refused: dict[str, Outcome] = {}
    if message.topics is None:
        names = sorted(image.topics)
        return Reply((yield from _describe_topics(services, client, image, names, refused)))
    names = list(dict.fromkeys(message.topics))
    denied: list[str] = []
    missing: list[str] = []
    for count, name in enumerate(names, 1):
        if not client.allows(Operation.DESCRIBE, ResourceType.TOPIC, name):
            denied.append(name)
        elif name not in image.topics:
            problem = topic_name_problem(name)
            if problem is not None:
                refused[name] = Outcome(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
            elif not name.startswith(INTERNAL_PREFIX):
                missing.append(name)
        if count % TOPICS_PER_TURN == 0:
            yield
    errors = client.deny_topics(ApiKey.METADATA, Operation.DESCRIBE, denied)
    if errors:
        translated = {error: translate(error) for error in set(errors.values())}  # most have the same error
        refused.update((name, translated[error]) for name, error in errors.items())
        yield
    if missing and _may_create(services, message):
        over = over_mutation_quota(services, request, client, len(missing) * services.config.num_partitions)
        if over is None:
            return _create_and_describe(services, client, names, missing, refused)
        refused.update(dict.fromkeys(missing, Outcome(over.error_code, over.error_message)))
    return Reply((yield from _describe_topics(services, client, image, names, refused)))


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
    image = services.controller.image
    return Reply(await _ended(_describe_topics(services, client, image, names, refused)))


def _describe_topics(
    services: Services,
    client: Client,
    image: ClusterImage,
    names: Iterable[str],
    refused: Mapping[str, Outcome],
) -> Generator[None, None, MetadataResponse]:
    """Return the live brokers, at addresses that ``client`` can use, and the topics ``names``.

    ``refused`` has the error of each topic that the client may not describe, that has an invalid name, or
    that could not be created. The first MAX_TEXTS of them are returned with their texts: the names make the
    response large already.
    """
    node_id = services.config.node_id
    brokers = [
        BrokerMetadata(broker.node_id, address_for(node_id, broker, client), broker.rack)
        for _, broker in sorted(image.brokers.items())
        if not broker.is_fenced
    ]
    unknown = Outcome(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    topics: list[TopicMetadata] = []
    left = TOPICS_PER_TURN
    texts_left = MAX_TEXTS
    for name in names:
        topic = None if name in refused else image.topics.get(name)
        left -= 1
        if topic is not None:
            topics.append(_topic(topic))
            left -= len(topic.partitions)
        else:
            code, text = refused.get(name, unknown)
            if name in refused:
                texts_left -= 1
            topics.append(TopicMetadata(code, text if texts_left >= 0 else None, name, "", False, []))
        if left <= 0:
            left = TOPICS_PER_TURN
            yield
    return MetadataResponse(0, None, services.cluster_id, _controller_id(services), brokers, topics)


def _topic(topic: TopicImage) -> TopicMetadata:
    """Return what clients see of a topic. Each response of the same state has the same object."""
    described = _described.get(topic.topic_id)
    if described is not None and described[0] == topic:
        return described[1]
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
    metadata = TopicMetadata(
        0, None, topic.name, topic.topic_id, topic.name.startswith(INTERNAL_PREFIX), partitions
    )
    if len(_described) >= _MAX_DESCRIBED:
        _described.clear()
    _described[topic.topic_id] = topic, metadata
    return metadata


def _controller_id(services: Services) -> int:
    """Return the id of the active controller; NO_NODE if this broker has no session and may be outdated."""
    controller_id = services.controller.controller_id
    return NO_NODE if controller_id is None or not services.partitions.may_serve() else controller_id


def address_for(node_id: int, broker: BrokerState, client: Client) -> str:
    """Return the address at which ``client`` can connect to ``broker``. ``node_id`` is that of this broker.

    For this broker it is ``client.address``. For another broker it is the address of the listener with the
    number of the client's listener, or of the last listener if that broker has fewer, or "" if it has none.
    """
    if broker.node_id == node_id:
        return client.address
    if not broker.addresses:
        return ""
    return without_security(broker.addresses[min(client.listener, len(broker.addresses) - 1)])


def describe_cluster(services: Services, _request: Request, client: Client) -> Reply:
    """Return all brokers, including fenced ones, the active controller, and the metadata offset."""
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
    """Return the voters, the observers, the leader, and the offsets of the metadata log.

    They are those that this node knows.

    A single-node cluster describes itself as the only voter. Only the leader knows how far the other voters'
    logs match its own. A node that is not a voter forwards the request to the leader.

    Errors: REQUEST_TIMED_OUT (a node that is not a voter cannot reach the leader).
    """
    config, message = services.config, request.message
    if services.raft is not None:
        status = services.raft.status()
        nodes = [
            QuorumNode(
                node.node_id,
                without_security(node.address),
                node.is_voter,
                node.match_offset,
                node.last_contact_ms,
            )
            for node in status.nodes
        ]
        response = DescribeQuorumResponse(
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
        directories = [QuorumDirectory(node.node_id, node.directory.hex()) for node in status.nodes]
        return Reply(_in_version(message, response, directories))
    if config.has_peers:
        return _ask_leader(services, message)
    offset = services.controller.image.metadata_offset
    alone = QuorumNode(config.node_id, "", True, offset, 0)
    response = DescribeQuorumResponse(
        0, None, config.node_id, config.node_id, 0, offset, offset, offset + 1, 0, [alone]
    )
    return Reply(_in_version(message, response, []))


def _in_version(
    message: DescribeQuorumRequest, response: DescribeQuorumResponse, directories: list[QuorumDirectory]
) -> DescribeQuorumResponse:
    """Return the response in the version of the request."""
    if type(message) is not DescribeQuorumRequestV1 or type(response) is DescribeQuorumResponseV1:
        return response
    later: Any = DescribeQuorumResponseV1
    extended: DescribeQuorumResponse = later(*response, directories)
    return extended


async def _ask_leader(services: Services, message: DescribeQuorumRequest) -> Response:
    response: DescribeQuorumResponse = await services.channel.send(message, DESCRIBE_QUORUM_TIMEOUT_MS)
    return Reply(_in_version(message, response, []))


def describe_recovery(services: Services, request: Request, _client: Client) -> HandlerResult:
    """Return the partitions without a leader after unclean stops, and all damaged or unverified replicas.

    Only the active controller knows them. Another broker forwards a client's request to it.

    Errors: NOT_CONTROLLER, REQUEST_TIMED_OUT (no controller can be reached).
    """
    message: DescribeRecoveryRequest = request.message
    if services.controller.is_active or message.node_id != NO_NODE:
        return Reply(services.controller.describe_recovery())
    return _ask_controller(services, message)


def describe_features(services: Services, request: Request, _client: Client) -> HandlerResult:
    """Return the finalised levels of features, and the levels that each node supports (KIP-584).

    Only the active controller knows them. Another broker forwards a client's request to it.

    Errors: NOT_CONTROLLER, REQUEST_TIMED_OUT (no controller can be reached).
    """
    message: DescribeFeaturesRequest = request.message
    if services.controller.is_active or message.node_id != NO_NODE:
        return Reply(services.controller.describe_features())
    return _ask_controller(services, message)


async def _ask_controller(
    services: Services, message: DescribeRecoveryRequest | DescribeFeaturesRequest
) -> Response:
    forwarded = message._replace(node_id=services.config.node_id)
    return Reply(await services.channel.send(forwarded, DESCRIBE_QUORUM_TIMEOUT_MS))


def describe_metadata(services: Services, request: Request, _client: Client) -> HandlerResult:
    """Return a node of this broker's metadata tree and its children. Long poll.

    The response waits until the metadata offset is greater than ``after_offset``, at most ``max_wait_ms``.

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
