"""The controller's decisions: (image, command) → records to commit and the reply to give then.

Commands and replies are the protocol's own structs; ``RegisterBroker`` is the one that no client sends.
Nothing here changes anything: a decision holds only for the very image it was made on, and takes effect
when its records, committed, are replayed (R18). ``now_ms`` is the wall clock, recorded and never compared.

Errors are Kafka's codes, one per item, in the order of the request; an item that is refused does not keep
the others from being done. A name that stands twice in one request is refused both times, as in Kafka.

Deviation from Kafka: topics whose names differ only in ``.`` and ``_`` may exist side by side; Kafka refuses
them because its metric names would collide, and ours keep both characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, assert_never

from kafkalite.errors import BrokerError, ConfigError, ErrorCode, broker_error
from kafkalite.limits import MAX_PARTITIONS_PER_REQUEST, MAX_PARTITIONS_PER_TOPIC, MAX_TOPICS_PER_REQUEST
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage, partition_record
from kafkalite.metadata.placement import leader_position, place
from kafkalite.metadata.records import (
    BROKER,
    TOPIC,
    BrokerRegistrationRecord,
    ConfigRecord,
    MetadataRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from kafkalite.metadata.topic_config import parse_broker_config, parse_topic_config
from kafkalite.model import Step, topic_name_problem
from kafkalite.protocol.messages.admin import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    AlteredConfig,
    ConfigChange,
    CreatedTopic,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    NewTopic,
    PartitionCount,
    TopicResult,
)

if TYPE_CHECKING:
    from kafkalite.rng import Rng

TOPIC_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """What a topic gets whose creator left it open."""

    num_partitions: int = 1
    default_replication_factor: int = 1


@dataclass(frozen=True, slots=True)
class RegisterBroker:
    """A broker's process asks to be part of the cluster. ``addresses`` in the order of its listeners."""

    node_id: int
    addresses: tuple[str, ...]
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class RegisteredBroker:
    broker_epoch: int


Command = (
    CreateTopicsRequest | DeleteTopicsRequest | CreatePartitionsRequest | AlterConfigsRequest | RegisterBroker
)
MetadataStep = Step[MetadataRecord]
Configs = Mapping[str, str | None]


def decide(
    image: ClusterImage,
    command: Command,
    *,
    now_ms: int,
    rng: Rng,
    settings: ControllerSettings,
    ticket: int = 0,
) -> MetadataStep:
    """What ``command`` does to the cluster as ``image`` shows it; the one reply carries ``ticket``."""
    match command:
        case CreateTopicsRequest():
            return create_topics(image, command, rng=rng, settings=settings, ticket=ticket)
        case DeleteTopicsRequest():
            return delete_topics(image, command, ticket=ticket)
        case CreatePartitionsRequest():
            return create_partitions(image, command, ticket=ticket)
        case AlterConfigsRequest():
            return alter_configs(image, command, ticket=ticket)
        case RegisterBroker():
            return register_broker(image, command, now_ms=now_ms, ticket=ticket)
        case _:
            assert_never(command)


def create_topics(
    image: ClusterImage,
    command: CreateTopicsRequest,
    *,
    rng: Rng,
    settings: ControllerSettings,
    ticket: int = 0,
) -> MetadataStep:
    """New topics, each with an id of its own, leaders spread over the brokers.

    INVALID_TOPIC_EXCEPTION, TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS, INVALID_REPLICATION_FACTOR,
    INVALID_CONFIG, POLICY_VIOLATION (too many partitions in one request), INVALID_REQUEST (name twice).
    """
    problem = _too_many(len(command.topics), "topics")
    if problem is not None:
        return _reply(ticket, CreateTopicsResponse(*_outcome(problem), []))
    times = Counter(topic.name for topic in command.topics)
    records: list[MetadataRecord] = []
    results: list[CreatedTopic] = []
    new_ids: set[str] = set()
    left_count = MAX_PARTITIONS_PER_REQUEST
    for wanted in command.topics:
        try:
            _refuse_repeated(wanted.name, times)
            topic = _completed(wanted, settings)
            configs = _check_new_topic(image, topic, left_count)
        except BrokerError as error:
            results.append(CreatedTopic(wanted.name, *_outcome(error), "", -1, -1))
            continue
        left_count -= topic.num_partitions
        topic_id = ""
        if not command.validate_only:
            topic_id = _new_topic_id(image, new_ids, rng)
            records += _new_topic_records(image, topic, topic_id, configs, rng)
        results.append(
            CreatedTopic(topic.name, 0, None, topic_id, topic.num_partitions, topic.replication_factor)
        )
    return _reply(ticket, CreateTopicsResponse(0, None, results), records)


def _new_topic_id(image: ClusterImage, new_ids: set[str], rng: Rng) -> str:
    """An id that no topic has; chance alone would do, were there no generators started from a seed again."""
    while True:
        topic_id = rng.randbytes(TOPIC_ID_BYTES).hex()
        if topic_id not in image.topics_by_id and topic_id not in new_ids:
            new_ids.add(topic_id)
            return topic_id


def _completed(topic: NewTopic, settings: ControllerSettings) -> NewTopic:
    """``topic`` with the broker's defaults where the creator left the choice (-1)."""
    partitions, factor = topic.num_partitions, topic.replication_factor
    return NewTopic(
        topic.name,
        settings.num_partitions if partitions == -1 else partitions,
        settings.default_replication_factor if factor == -1 else factor,
        topic.configs,
    )


def _check_new_topic(image: ClusterImage, topic: NewTopic, left_count: int) -> Configs:
    """The topic's configs as they will be stored. Raises the BrokerError that refuses the topic."""
    problem = topic_name_problem(topic.name)
    if problem is not None:
        raise broker_error(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
    if topic.name in image.topics:
        raise broker_error(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {topic.name!r} already exists")
    _check_partition_count(topic.num_partitions, topic.num_partitions, left_count)
    factor, alive = topic.replication_factor, len(image.brokers)
    if factor < 1:
        raise broker_error(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"replication factor must be 1 or more, or -1 for the broker's default; it is {factor}",
        )
    if factor > alive:
        raise broker_error(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"replication factor {factor} is larger than the number of brokers, {alive}",
        )
    return _parse_configs(parse_topic_config, topic.configs.items())


def _check_partition_count(total_count: int, added_count: int, left_count: int) -> None:
    if not 1 <= total_count <= MAX_PARTITIONS_PER_TOPIC:
        raise broker_error(
            ErrorCode.INVALID_PARTITIONS,
            f"a topic has from 1 to {MAX_PARTITIONS_PER_TOPIC} partitions, not {total_count}",
        )
    if added_count > left_count:
        raise broker_error(
            ErrorCode.POLICY_VIOLATION,
            f"one request can add at most {MAX_PARTITIONS_PER_REQUEST} partitions; send the rest in another",
        )


def _new_topic_records(
    image: ClusterImage, topic: NewTopic, topic_id: str, configs: Configs, rng: Rng
) -> Iterable[MetadataRecord]:
    start = rng.randrange(len(image.brokers))
    partitions = range(topic.num_partitions)
    placed = place(image.brokers.values(), partitions, topic.replication_factor, start=start)
    yield TopicRecord(topic_id, topic.name)
    for partition, replicas in enumerate(placed):
        yield partition_record(topic_id, partition, _first_state(replicas))
    for key, value in configs.items():
        yield ConfigRecord(TOPIC, topic.name, key, value)


def _first_state(replicas: tuple[int, ...]) -> PartitionState:
    return PartitionState(replicas, replicas, replicas[0], leader_epoch=0, partition_epoch=0)


def delete_topics(image: ClusterImage, command: DeleteTopicsRequest, *, ticket: int = 0) -> MetadataStep:
    """Remove topics. UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST (name twice)."""
    problem = _too_many(len(command.names), "topics")
    if problem is not None:
        return _reply(ticket, DeleteTopicsResponse(*_outcome(problem), []))
    times = Counter(command.names)
    records: list[MetadataRecord] = []
    results: list[TopicResult] = []
    for name in command.names:
        try:
            _refuse_repeated(name, times)
            records.append(RemoveTopicRecord(_existing(image, name).topic_id))
            results.append(TopicResult(name, 0, None))
        except BrokerError as error:
            results.append(TopicResult(name, *_outcome(error)))
    return _reply(ticket, DeleteTopicsResponse(0, None, results), records)


def create_partitions(
    image: ClusterImage, command: CreatePartitionsRequest, *, ticket: int = 0
) -> MetadataStep:
    """Let topics grow; the circle of leaders goes on where the topic's last partition stands.

    UNKNOWN_TOPIC_OR_PARTITION, INVALID_PARTITIONS (no increase, or too many), POLICY_VIOLATION,
    INVALID_REPLICATION_FACTOR (fewer brokers than the topic has replicas), INVALID_REQUEST (name twice).
    """
    problem = _too_many(len(command.topics), "topics")
    if problem is not None:
        return _reply(ticket, CreatePartitionsResponse(*_outcome(problem), []))
    times = Counter(topic.name for topic in command.topics)
    records: list[MetadataRecord] = []
    results: list[TopicResult] = []
    left_count = MAX_PARTITIONS_PER_REQUEST
    for wanted in command.topics:
        try:
            _refuse_repeated(wanted.name, times)
            topic = _existing(image, wanted.name)
            _check_growth(image, topic, wanted, left_count)
        except BrokerError as error:
            results.append(TopicResult(wanted.name, *_outcome(error)))
            continue
        left_count -= wanted.total_count - len(topic.partitions)
        if not command.validate_only:
            records += _added_partition_records(image, topic, wanted.total_count)
        results.append(TopicResult(wanted.name, 0, None))
    return _reply(ticket, CreatePartitionsResponse(0, None, results), records)


def _check_growth(image: ClusterImage, topic: TopicImage, wanted: PartitionCount, left_count: int) -> None:
    present_count = len(topic.partitions)
    if wanted.total_count <= present_count:
        raise broker_error(
            ErrorCode.INVALID_PARTITIONS,
            f"topic {topic.name!r} has {present_count} partition{'' if present_count == 1 else 's'};"
            f" {wanted.total_count} would not be an increase",
        )
    _check_partition_count(wanted.total_count, wanted.total_count - present_count, left_count)
    factor, alive = len(topic.partitions[0].replicas), len(image.brokers)
    if factor > alive:
        raise broker_error(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"topic {topic.name!r} has {factor} replicas a partition, and there are {alive} brokers",
        )


def _added_partition_records(
    image: ClusterImage, topic: TopicImage, total_count: int
) -> Iterable[MetadataRecord]:
    present_count = len(topic.partitions)
    brokers = image.brokers.values()
    start = leader_position(brokers, topic.partitions[0].replicas[0])
    factor = len(topic.partitions[0].replicas)
    added = range(present_count, total_count)
    for partition, replicas in zip(added, place(brokers, added, factor, start=start), strict=True):
        yield partition_record(topic.topic_id, partition, _first_state(replicas))


def alter_configs(image: ClusterImage, command: AlterConfigsRequest, *, ticket: int = 0) -> MetadataStep:
    """Set and take away overrides (KIP-339). The changes of one resource are done all or none.

    UNKNOWN_TOPIC_OR_PARTITION, INVALID_CONFIG (name, value, or a key twice), INVALID_REQUEST (a kind of
    resource or a broker that does not exist). One result per resource, in order of first mention.
    """
    problem = _too_many(len(command.changes), "changes")
    if problem is not None:
        return _reply(ticket, AlterConfigsResponse(*_outcome(problem), []))
    by_resource: dict[tuple[str, str], list[ConfigChange]] = {}
    for change in command.changes:
        by_resource.setdefault((change.resource_type, change.name), []).append(change)
    records: list[MetadataRecord] = []
    results: list[AlteredConfig] = []
    for (resource_type, name), changes in by_resource.items():
        try:
            new_records = _alter_one(image, resource_type, name, changes)
        except BrokerError as error:
            results.append(AlteredConfig(resource_type, name, *_outcome(error)))
            continue
        if not command.validate_only:
            records += new_records
        results.append(AlteredConfig(resource_type, name, 0, None))
    return _reply(ticket, AlterConfigsResponse(0, None, results), records)


def _alter_one(
    image: ClusterImage, resource_type: str, name: str, changes: list[ConfigChange]
) -> list[MetadataRecord]:
    """The records of one resource's changes; none for a change that changes nothing. Raises BrokerError."""
    parse = _config_parser(image, resource_type, name)
    wanted = _parse_configs(parse, ((change.key, change.value) for change in changes))
    present = image.configs_of(resource_type, name)
    return [
        ConfigRecord(resource_type, name, key, value)
        for key, value in wanted.items()
        if present.get(key) != value
    ]


_Parser = Callable[[str, str | None], tuple[str, str | None]]


def _config_parser(image: ClusterImage, resource_type: str, name: str) -> _Parser:
    """What checks this resource's configs. Raises BrokerError when there is no such resource."""
    if resource_type == TOPIC:
        _existing(image, name)
        return parse_topic_config
    if resource_type != BROKER:
        raise broker_error(
            ErrorCode.INVALID_REQUEST, f"resource type must be one of topic, broker; it is {resource_type!r}"
        )
    if name not in {str(node_id) for node_id in image.brokers}:
        known = ", ".join(str(node_id) for node_id in sorted(image.brokers))
        raise broker_error(ErrorCode.INVALID_REQUEST, f"there is no broker {name!r}; there are: {known}")
    return parse_broker_config


def _parse_configs(parse: _Parser, configs: Iterable[tuple[str, str | None]]) -> Configs:
    """Overrides by canonical name. INVALID_CONFIG for an unknown name, a bad value, or a name given twice."""
    parsed: dict[str, str | None] = {}
    try:
        for name, text in configs:
            key, value = parse(name, text)
            if key in parsed:
                raise ConfigError(key=key, value=None, allowed="given more than once in one request")
            parsed[key] = value
    except ConfigError as error:
        raise broker_error(ErrorCode.INVALID_CONFIG, str(error)) from error
    return parsed


def register_broker(
    image: ClusterImage, command: RegisterBroker, *, now_ms: int, ticket: int = 0
) -> MetadataStep:
    """Give the broker's new process its epoch (R20): above the offset decided on, and above its last one."""
    earlier = image.brokers.get(command.node_id)
    broker_epoch = image.metadata_offset + 1
    if earlier is not None:
        broker_epoch = max(broker_epoch, earlier.broker_epoch + 1)
    record = BrokerRegistrationRecord(
        command.node_id, broker_epoch, command.addresses, command.rack, registered_ms=now_ms
    )
    return _reply(ticket, RegisteredBroker(broker_epoch), [record])


def _existing(image: ClusterImage, name: str) -> TopicImage:
    topic = image.topics.get(name)
    if topic is None:
        raise broker_error(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r}")
    return topic


def _refuse_repeated(name: str, times: Mapping[str, int]) -> None:
    if times[name] > 1:
        raise broker_error(ErrorCode.INVALID_REQUEST, f"topic {name!r} stands in the request more than once")


def _too_many(count: int, what: str) -> BrokerError | None:
    if count <= MAX_TOPICS_PER_REQUEST:
        return None
    return broker_error(
        ErrorCode.INVALID_REQUEST,
        f"one request has at most {MAX_TOPICS_PER_REQUEST} {what}, this one {count}",
    )


def _outcome(error: BrokerError) -> tuple[int, str]:
    """(error_code, error_message) of a refused item."""
    return int(error.code), error.message


def _reply(ticket: int, response: Any, records: Iterable[MetadataRecord] = ()) -> MetadataStep:
    return Step(tuple(records), ((ticket, response),))
