"""Handlers for administration: topics, configurations, storage, leader elections, shutdown of a broker.

The active controller decides every change of the metadata. The response is sent when this broker's own
metadata image shows the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.config import BROKER_OPTIONS, SECRET_OPTIONS
from kafkalite.broker.coordination.internal_topics import refuse_internal
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.error_responses import Outcome, translate
from kafkalite.broker.server.responses import HandlerResult, Refusal, Reply, Response
from kafkalite.broker.services import Services
from kafkalite.errors import (
    ClusterAuthorizationFailedError,
    ErrorCode,
    InvalidRequestError,
    InvalidTopicError,
    PolicyViolationError,
    UnknownTopicOrPartitionError,
)
from kafkalite.limits import MAX_PARTITIONS_PER_REQUEST
from kafkalite.metadata.quota_commands import find_quotas
from kafkalite.metadata.records import BROKER, TOPIC
from kafkalite.metadata.topic_config import DYNAMIC_BROKER_OPTIONS, TOPIC_OPTIONS, topic_settings, value_text
from kafkalite.model import TopicPartition
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import (
    AddRaftVoterRequest,
    AlterClientQuotasRequest,
    AlterConfigsRequest,
    AlterPartitionReassignmentsRequest,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    ConfigEntry,
    ConfigResource,
    ControlledShutdownRequest,
    ControlledShutdownResponse,
    CreatedTopic,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribedConfig,
    DescribeLogDirsRequest,
    DescribeLogDirsRequestV1,
    DescribeLogDirsResponse,
    DescribeLogDirsResponseV1,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
    LogDirCopy,
    LogDirectory,
    LogDirItem,
    RemoveRaftVoterRequest,
    TopicResult,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from kafkalite.protocol.structs import PartitionResult

if TYPE_CHECKING:
    from kafkalite.broker.cluster.peers import PeerConnections

SHUTDOWN_TIMEOUT_MS: Final = 10_000


async def create_topics(services: Services, request: Request, client: Client) -> Response:
    """Create topics. When the response is sent, this broker has created its own replicas of them.

    Errors, per topic: INVALID_TOPIC_EXCEPTION (an internal name) and those of
    ``metadata.topic_commands.create_topics``; of the whole request NOT_CONTROLLER, REQUEST_TIMED_OUT (after
    ``timeout_ms``; the topics may still be created), KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (above
    controller_mutation_rate, or too many commands wait).
    """
    message: CreateTopicsRequest = request.message
    default = services.config.num_partitions
    count = sum(topic.num_partitions if topic.num_partitions > 0 else default for topic in message.topics)
    refusal = None if message.validate_only else over_mutation_quota(services, request, client, count)
    if refusal is not None:
        return refusal
    names = [topic.name for topic in message.topics]

    def refused(name: str, outcome: Outcome) -> CreatedTopic:
        return CreatedTopic(name, *outcome, "", -1, -1)

    return await _decide(services, message, "topics", names, CreateTopicsResponse(0, None, []), refused)


async def create_partitions(services: Services, request: Request, client: Client) -> Response:
    """Add partitions to topics.

    Errors, per topic: INVALID_TOPIC_EXCEPTION (an internal topic: its keys would hash to other partitions)
    and those of ``metadata.topic_commands.create_partitions``; of the whole request NOT_CONTROLLER,
    REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (above controller_mutation_rate, or too
    many commands wait).
    """
    message: CreatePartitionsRequest = request.message
    topics = services.controller.image.topics
    count = sum(
        max(0, topic.total_count - len(topics[topic.name].partitions))
        for topic in message.topics
        if topic.name in topics
    )
    refusal = None if message.validate_only else over_mutation_quota(services, request, client, count)
    if refusal is not None:
        return refusal
    names = [topic.name for topic in message.topics]
    return await _decide(services, message, "topics", names, CreatePartitionsResponse(0, None, []), _refused)


async def delete_topics(services: Services, request: Request, client: Client) -> Response:
    """Delete topics. When the response is sent, they no longer exist. Their files are removed later.

    Errors, per topic: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST, POLICY_VIOLATION (``delete.topic.enable``
    is false), INVALID_TOPIC_EXCEPTION (an internal topic); of the whole request NOT_CONTROLLER,
    REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (above controller_mutation_rate, or too
    many commands wait).
    """
    message: DeleteTopicsRequest = request.message
    names = message.names
    if not services.config.delete_topic_enable:
        reason = translate(PolicyViolationError("delete.topic.enable is false on this broker"))
        return Reply(DeleteTopicsResponse(0, None, [_refused(name, reason) for name in names]))
    topics = services.controller.image.topics
    count = sum(len(topics[name].partitions) for name in names if name in topics)
    refusal = over_mutation_quota(services, request, client, count)
    if refusal is not None:
        return refusal
    return await _decide(services, message, "names", names, DeleteTopicsResponse(0, None, []), _refused)


def over_mutation_quota(
    services: Services, request: Request, client: Client, partition_count: int
) -> Refusal | None:
    """Return the refusal of a request that creates or deletes partitions beyond the client's
    controller_mutation_rate, or None if the quota admits it.

    Deviation from Kafka: a request is admitted or refused as a whole, and each broker counts for itself. A
    request with more than MAX_PARTITIONS_PER_REQUEST partitions counts as that number, and is refused later.
    """
    partition_count = min(partition_count, MAX_PARTITIONS_PER_REQUEST)
    quotas = services.quotas
    if not quotas.has_quotas or client.node_id is not None:
        return None
    wait_ms = quotas.admit_mutations(
        client.user, request.client_id or "", partition_count, services.clock.monotonic_ms()
    )
    if not wait_ms:
        return None
    return Refusal(
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        f"user {client.user!r} with client id {request.client_id or ''!r} exceeds controller_mutation_rate;"
        f" send the request again after {wait_ms} ms",
        throttle_ms=wait_ms,
    )


def _refused(name: str, outcome: Outcome) -> TopicResult:
    return TopicResult(name, *outcome)


async def _decide(
    services: Services,
    message: Any,
    field: str,
    names: Sequence[str],
    nothing: Any,
    refused: Callable[[str, Outcome], Any],
) -> Reply:
    """Return the controller's response to ``message``, without passing internal topics to the controller.

    ``message`` is a command, and ``names`` are the names of the topics in its list ``field``. Clients must
    not create, change or delete internal topics. The result of an internal topic is ``refused(name, error)``.
    If only internal topics are named, the response is ``nothing`` with these results, and no command is sent.
    """
    results: dict[str, Any] = {}
    left: list[Any] = []
    for name, entry in zip(names, getattr(message, field), strict=True):
        try:
            refuse_internal(name)
            left.append(entry)
        except InvalidTopicError as error:
            results[name] = refused(name, translate(error))
    response = nothing
    if left or not results:
        command = message._replace(**{field: left})
        response = await services.channel.decide(command, timeout_ms=message.timeout_ms)
    decided = iter(response.topics)
    listed = [results.get(name) or next(decided, None) for name in names]
    return Reply(response._replace(topics=[result for result in listed if result is not None]))


async def elect_leaders(services: Services, request: Request, client: Client) -> Response:
    """Elect preferred replicas as leaders, or, in an unclean election, a live replica for a partition without
    a leader.

    An unclean election may lose committed records, so the client must have proved that it knows the cluster's
    secret (S10).

    Errors, per partition: those of ``metadata.partition_commands.elect_leaders``; of the whole request
    NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands
    wait), CLUSTER_AUTHORIZATION_FAILED.
    """
    message: ElectLeadersRequest = request.message
    if message.is_unclean:
        require_secret(client, "an unclean election")
    return Reply(await services.channel.decide(message, timeout_ms=message.timeout_ms))


async def alter_partition_reassignments(services: Services, request: Request, _client: Client) -> Response:
    """Begin, replace or cancel reassignments of partitions (KIP-455).

    The response is sent when they have begun; ListPartitionReassignments shows when they are complete.

    Errors, per partition: those of ``metadata.reassignment_commands.alter_partition_reassignments``; of the
    whole request NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many
    commands wait).
    """
    message: AlterPartitionReassignmentsRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=message.timeout_ms))


async def list_partition_reassignments(services: Services, request: Request, _client: Client) -> Response:
    """Return the reassignments that are in progress, as the active controller knows them (KIP-455).

    Errors: NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many
    commands wait).
    """
    message: ListPartitionReassignmentsRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=message.timeout_ms))


async def unregister_broker(services: Services, request: Request, _client: Client) -> Response:
    """Remove a broker without replicas from the cluster, and retire its node id.

    Errors: those of ``metadata.broker_commands.unregister_broker``; NOT_CONTROLLER, REQUEST_TIMED_OUT,
    KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands wait).
    """
    message: UnregisterBrokerRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=0))


async def update_features(services: Services, request: Request, _client: Client) -> Response:
    """Finalise levels of features (KIP-584). A finalised level is never lowered.

    Errors, per feature: those of ``metadata.feature_commands.update_features``; of the whole request
    NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands
    wait).
    """
    message: UpdateFeaturesRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=message.timeout_ms))


async def add_raft_voter(services: Services, request: Request, _client: Client) -> Response:
    """Make an observer of the metadata quorum a voter. The response is sent when the change is committed.

    Errors: those of ``raft.voter_set.next_voters``; NOT_CONTROLLER, REQUEST_TIMED_OUT (the change may still
    be committed), KAFKA_STORAGE_ERROR.
    """
    message: AddRaftVoterRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=message.timeout_ms))


async def remove_raft_voter(services: Services, request: Request, _client: Client) -> Response:
    """Remove a voter from the metadata quorum. The response is sent when the change is committed.

    Errors: those of ``raft.voter_set.next_voters``; NOT_CONTROLLER, REQUEST_TIMED_OUT (the change may still
    be committed), KAFKA_STORAGE_ERROR.
    """
    message: RemoveRaftVoterRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=message.timeout_ms))


async def alter_configs(services: Services, request: Request, _client: Client) -> Response:
    """Set and remove overrides of topics and brokers (KIP-339). The response is sent when they are in effect.

    Errors, per resource: those of ``metadata.config_commands.alter_configs``; of the whole request
    NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands
    wait).
    """
    message: AlterConfigsRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=0))


def describe_configs(services: Services, request: Request, _client: Client) -> Reply:
    """Return every option of a topic or of this broker with its value and its source. Secrets have no value.

    Errors, per resource: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST (another broker, or an unknown
    resource type).
    """
    message: DescribeConfigsRequest = request.message
    described = [_describe_resource(services, resource) for resource in message.resources]
    return Reply(DescribeConfigsResponse(0, None, described))


def _describe_resource(services: Services, resource: ConfigResource) -> DescribedConfig:
    kind, name = resource
    try:
        if kind == TOPIC:
            entries = _topic_entries(services, name)
        elif kind == BROKER:
            entries = _broker_entries(services, name)
        else:
            raise InvalidRequestError(f"resource type must be one of topic, broker; it is {kind!r}")
        return DescribedConfig(kind, name, 0, None, entries)
    except Exception as error:
        return DescribedConfig(kind, name, *translate(error), [])


def _topic_entries(services: Services, name: str) -> list[ConfigEntry]:
    image = services.controller.image
    if name not in image.topics:
        raise UnknownTopicOrPartitionError(f"there is no topic {name!r}")
    settings = topic_settings(image, name, services.config.topic_defaults(), node_id=services.config.node_id)
    return [
        ConfigEntry(
            option.name,
            value_text(settings[option.name].value),
            settings[option.name].source,
            not option.dynamic,
            option.doc,
        )
        for option in TOPIC_OPTIONS
    ]


def _broker_entries(services: Services, name: str) -> list[ConfigEntry]:
    node_id = services.config.node_id
    if name != str(node_id):
        raise InvalidRequestError(f"this is broker {node_id}; send the request to broker {name}")
    overrides = services.controller.image.configs_of(BROKER, name)
    values = services.config.settings()
    entries: list[ConfigEntry] = []
    for option in BROKER_OPTIONS:
        value = values[option.name]
        text = None if value is None else value_text(value)
        text = overrides.get(option.name, text)
        if option.name in SECRET_OPTIONS:
            text = None
        is_default = option.name not in overrides and value == option.default
        entries.append(
            ConfigEntry(
                option.name,
                text,
                "default" if is_default else "broker",
                option.name not in DYNAMIC_BROKER_OPTIONS,
                option.doc,
            )
        )
    return entries


async def alter_client_quotas(services: Services, request: Request, _client: Client) -> Response:
    """Set and remove quotas of clients (KIP-546). The response is sent when this broker enforces them.

    Errors, per entity: those of ``metadata.quota_commands.alter_client_quotas``; of the whole request
    NOT_CONTROLLER, REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands
    wait).
    """
    message: AlterClientQuotasRequest = request.message
    return Reply(await services.channel.decide(message, timeout_ms=0))


def describe_client_quotas(services: Services, request: Request, _client: Client) -> Reply:
    """Return the quotas that a filter selects (KIP-546).

    Errors: INVALID_REQUEST (an unknown or repeated entity type, an unknown match type).
    """
    message: DescribeClientQuotasRequest = request.message
    return Reply(
        DescribeClientQuotasResponse(0, None, find_quotas(services.controller.image.client_quotas, message))
    )


def describe_log_dirs(services: Services, request: Request, _client: Client) -> Reply:
    """Return the size and offsets of each partition on this broker, and why a log is offline.

    Behaviour: version 1 also returns the data directories, each with its disk and with its partitions of the
    topics. ``path`` is the first directory.
    """
    message: DescribeLogDirsRequest = request.message
    wanted = None if message.topics is None else set(message.topics)
    stored = services.partitions.stored()
    partitions = [one for one in stored if wanted is None or one.topic in wanted]
    states = services.partitions.directories()
    copies = services.mover.copies()
    if type(message) is not DescribeLogDirsRequestV1:
        return Reply(DescribeLogDirsResponse(0, None, states[0].path, partitions))
    directories = [
        LogDirectory(
            one.path,
            one.directory_id,
            one.failure,
            *one.space,
            [LogDirItem(*key) for key in one.logs if wanted is None or key.topic in wanted],
            [
                LogDirCopy(*copy.key, copy.log_end_offset, copy.offset_lag)
                for copy in copies
                if copy.path == one.path and (wanted is None or copy.key.topic in wanted)
            ],
        )
        for one in states
    ]
    return Reply(DescribeLogDirsResponseV1(0, None, states[0].path, partitions, directories))


def alter_replica_log_dirs(services: Services, request: Request, _client: Client) -> Reply:
    """Begin to move logs of this broker to other data directories (KIP-113). DescribeLogDirs shows the moves.

    Errors, per partition: LOG_DIR_NOT_FOUND (no such directory, or it has failed), NOT_LEADER_OR_FOLLOWER (no
    replica here), KAFKA_STORAGE_ERROR (the log is offline).
    """
    message: AlterReplicaLogDirsRequest = request.message
    results: list[PartitionResult] = []
    for topic, number, path in message.partitions:
        try:
            services.mover.move(TopicPartition(topic, number), path)
            results.append(PartitionResult(topic, number, 0, None))
        except Exception as error:
            results.append(PartitionResult(topic, number, *translate(error)))
    return Reply(AlterReplicaLogDirsResponse(0, None, results))


def require_secret(client: Client, what: str) -> None:
    """Raise ClusterAuthorizationFailedError unless ``client`` has proved that it knows the secret (S10)."""
    if client.node_id is None:
        raise ClusterAuthorizationFailedError(
            f"{what} needs the cluster.secret of the nodes: kl reads it from KAFKALITE_CLUSTER_SECRET or"
            " --secret-file; a node without one is stopped by SIGTERM"
        )


def controlled_shutdown(services: Services, request: Request, client: Client) -> HandlerResult:
    """Make a broker transfer its leaderships to other brokers and stop. The response does not wait for that.

    Other brokers forward the request to the broker that it names. The client must have proved that it knows
    the cluster's secret (S10).

    Errors: INVALID_REQUEST (no such broker), REQUEST_TIMED_OUT, CLUSTER_AUTHORIZATION_FAILED, and the errors
    of connecting to the broker.
    """
    require_secret(client, "a controlled shutdown")
    message: ControlledShutdownRequest = request.message
    node_id = message.node_id
    if node_id == services.config.node_id:
        services.request_stop()
        return Reply(ControlledShutdownResponse(0, None, node_id))
    if services.peers is None or node_id not in services.controller.image.brokers:
        raise InvalidRequestError(f"there is no broker {node_id}")
    return _forward_shutdown(services.peers, message)


async def _forward_shutdown(peers: PeerConnections, message: ControlledShutdownRequest) -> Response:
    connection = await peers.dial(message.node_id)
    try:
        return Reply((await connection.call(message, timeout_ms=SHUTDOWN_TIMEOUT_MS)).message)
    finally:
        connection.close()
