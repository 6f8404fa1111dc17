"""Metadata: the brokers, and for each topic who leads its partitions.

Behaviour: this broker goes by the address the client used, unless ``advertised.listeners`` says otherwise;
the others by what they advertise for their listener of the same number. Fenced brokers are left out. A topic
that is not there is created when both ``allow_auto_topic_creation`` and ``auto.create.topics.enable`` say so,
and its name is not internal; the answer waits for it.

Errors, per topic: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, and what creating it may answer; per
partition: LEADER_NOT_AVAILABLE; of the whole request INVALID_REQUEST (too many topics).
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from kafkalite.broker.server.error_responses import Outcome
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import ErrorCode, InvalidRequestError
from kafkalite.limits import MAX_TOPICS_PER_REQUEST
from kafkalite.metadata.image import BrokerState, ClusterImage, TopicImage
from kafkalite.model import INTERNAL_PREFIX, topic_name_problem
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import CreateTopicsRequest, CreateTopicsResponse, NewTopic
from kafkalite.protocol.messages.metadata import (
    BrokerMetadata,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)

NO_NODE: Final = -1
CREATE_TIMEOUT_MS: Final = 15_000


def handle(services: Services, request: Request, client: Client) -> Answer | Coroutine[Any, Any, Answer]:
    message: MetadataRequest = request.message
    image = services.controller.image
    if message.topics is None:
        return Reply(describe(services, client, sorted(image.topics), {}))
    if len(message.topics) > MAX_TOPICS_PER_REQUEST:
        raise InvalidRequestError(f"at most {MAX_TOPICS_PER_REQUEST} topics in one request")
    names = list(dict.fromkeys(message.topics))
    refused: dict[str, Outcome] = {}
    missing: list[str] = []
    for name in names:
        if name not in image.topics:
            problem = topic_name_problem(name)
            if problem is not None:
                refused[name] = Outcome(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
            elif not name.startswith(INTERNAL_PREFIX):
                missing.append(name)
    may_create = message.allow_auto_topic_creation and services.config.auto_create_topics_enable
    if missing and may_create:
        return _create_and_describe(services, client, names, missing, refused)
    return Reply(describe(services, client, names, refused))


async def _create_and_describe(
    services: Services,
    client: Client,
    names: Sequence[str],
    missing: Sequence[str],
    refused: dict[str, Outcome],
) -> Answer:
    command = CreateTopicsRequest(0, False, [NewTopic(name, -1, -1, {}) for name in missing])
    created: CreateTopicsResponse = await services.channel.decide(command, timeout_ms=CREATE_TIMEOUT_MS)
    for topic in created.topics:
        if topic.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            refused[topic.name] = Outcome(topic.error_code, topic.error_message)
    return Reply(describe(services, client, names, refused))


def describe(
    services: Services, client: Client, names: Iterable[str], refused: Mapping[str, Outcome]
) -> MetadataResponse:
    """The cluster as ``client`` may reach it, and the topics ``names``."""
    image = services.controller.image
    unknown = Outcome(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    topics: list[TopicMetadata] = []
    for name in names:
        topic = image.topics.get(name)
        if topic is None:
            topics.append(TopicMetadata(*refused.get(name, unknown), name, "", False, []))
        else:
            topics.append(_topic(topic))
    controller_id = services.controller.controller_id
    return MetadataResponse(
        0,
        None,
        services.cluster_id,
        NO_NODE if controller_id is None else controller_id,
        brokers(services, image, client),
        topics,
    )


def brokers(services: Services, image: ClusterImage, client: Client) -> list[BrokerMetadata]:
    """Every broker that is alive, as far as this one knows, in the order of their ids."""
    return [
        BrokerMetadata(node_id, address_for(services, broker, client), broker.rack)
        for node_id, broker in sorted(image.brokers.items())
        if not broker.is_fenced
    ]


def address_for(services: Services, broker: BrokerState, client: Client) -> str:
    """Where ``client`` reaches ``broker``: this one where it just did, others at the same listener."""
    if broker.node_id == services.config.node_id:
        return client.address
    if not broker.addresses:
        return ""
    return broker.addresses[min(client.listener, len(broker.addresses) - 1)]


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
