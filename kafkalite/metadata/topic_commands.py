"""Decisions that create topics, add partitions, and delete topics."""

# Tests: tests/metadata/test_controller.py

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalite.errors import (
    BrokerError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    PolicyViolationError,
    TopicAlreadyExistsError,
)
from kafkalite.limits import MAX_PARTITIONS_PER_REQUEST, MAX_PARTITIONS_PER_TOPIC
from kafkalite.metadata.decision import (
    Configs,
    ControllerSettings,
    Decision,
    existing_topic,
    outcome,
    parse_configs,
    too_many,
)
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.placement import place
from kafkalite.metadata.records import (
    TOPIC,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from kafkalite.metadata.topic_config import TOPIC_OPTIONS, parse_topic_config, value_text
from kafkalite.model import topic_name_problem
from kafkalite.protocol.messages.admin import (
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

T = TypeVar("T")

TOPIC_ID_BYTES: Final = 16
MIN_INSYNC_REPLICAS: Final = "min.insync.replicas"


def create_topics(
    image: ClusterImage, command: CreateTopicsRequest, *, rng: Rng, settings: ControllerSettings
) -> Decision:
    """Create topics, each with a new id. ``placement`` chooses the brokers.

    Errors: INVALID_TOPIC_EXCEPTION, TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS, INVALID_REPLICATION_FACTOR,
    INVALID_CONFIG, POLICY_VIOLATION (too many partitions in one request, or too many topics or partitions in
    the cluster: S26), INVALID_REQUEST (repeated name); of the whole request INVALID_REQUEST (too many
    topics).
    """
    new_ids: set[str] = set()
    room = _Room(image, settings)

    def create(wanted: NewTopic) -> tuple[CreatedTopic, Iterable[MetadataRecord]]:
        topic = _completed(wanted, settings)
        configs = _check_new_topic(image, topic, room)
        result = CreatedTopic(topic.name, 0, None, "", topic.num_partitions, topic.replication_factor)
        if command.validate_only:
            return result, ()
        topic_id = _new_topic_id(image, new_ids, rng)
        configs = {**_agreed_configs(settings), **configs}
        return result._replace(topic_id=topic_id), _new_topic_records(image, topic, topic_id, configs, rng)

    def refused(name: str, error: BrokerError) -> CreatedTopic:
        return CreatedTopic(name, *outcome(error), "", -1, -1)

    return _decide_each(
        [(topic.name, topic) for topic in command.topics], CreateTopicsResponse, create, refused
    )


def _refused(name: str, error: BrokerError) -> TopicResult:
    return TopicResult(name, *outcome(error))


def _decide_each(
    topics: Sequence[tuple[str, T]],
    response: Callable[[int, str | None, list[Any]], Any],
    decide: Callable[[T], tuple[TopicResult, Iterable[MetadataRecord]]],
    refused: Callable[[str, BrokerError], TopicResult] = _refused,
) -> Decision:
    """Decide each (name, item) of a request in order by ``decide(item)``. If ``decide`` raises an error or
    the name is repeated, the item's result is that of ``refused``. ``response`` makes the reply from the
    results."""
    problem = too_many(len(topics), "topics")
    if problem is not None:
        return Decision(response(*outcome(problem), []))
    times = Counter(name for name, _ in topics)
    records: list[MetadataRecord] = []
    results: list[TopicResult] = []
    for name, item in topics:
        try:
            if times[name] > 1:
                raise InvalidRequestError(f"the request names topic {name!r} more than once")
            result, changes = decide(item)
        except BrokerError as error:
            result, changes = refused(name, error), ()
        records += changes
        results.append(result)
    return Decision(response(0, None, results), records)


def _new_topic_id(image: ClusterImage, new_ids: set[str], rng: Rng) -> str:
    """Return an unused topic id. A seeded generator may repeat ids after a restart."""
    while True:
        topic_id = rng.randbytes(TOPIC_ID_BYTES).hex()
        if topic_id not in image.topics_by_id and topic_id not in new_ids:
            new_ids.add(topic_id)
            return topic_id


def _completed(topic: NewTopic, settings: ControllerSettings) -> NewTopic:
    """Return ``topic`` with -1 replaced by the default partition count and replication factor."""
    partitions, factor = topic.num_partitions, topic.replication_factor
    return NewTopic(
        topic.name,
        settings.num_partitions if partitions == -1 else partitions,
        settings.default_replication_factor if factor == -1 else factor,
        topic.configs,
    )


class _Room:
    """The number of topics and partitions that a request may still add (S25, S26)."""

    def __init__(self, image: ClusterImage, settings: ControllerSettings) -> None:
        self._settings = settings
        self._topics = settings.max_topics - len(image.topics)
        self._partitions = settings.max_partitions - sum(
            load.preferred_leaders for load in image.loads.values()
        )
        self._partitions_of_request = MAX_PARTITIONS_PER_REQUEST

    def take(self, partitions: int, *, topics: int = 0) -> None:
        """Count the addition of ``partitions`` and ``topics``. Raises PolicyViolationError if they exceed a
        limit."""
        if partitions > self._partitions_of_request:
            raise PolicyViolationError(
                f"one request can add at most {MAX_PARTITIONS_PER_REQUEST} partitions;"
                " send the rest in another"
            )
        if topics > self._topics:
            raise PolicyViolationError(f"the cluster may have max.topics={self._settings.max_topics} topics")
        if partitions > self._partitions:
            raise PolicyViolationError(
                f"{partitions} more partitions would exceed max.partitions={self._settings.max_partitions} of"
                f" the cluster; {max(self._partitions, 0)} can be added"
            )
        self._topics -= topics
        self._partitions -= partitions
        self._partitions_of_request -= partitions


def _check_new_topic(image: ClusterImage, topic: NewTopic, room: _Room) -> Configs:
    """Return the topic's configs in stored form. Raises BrokerError if the topic is invalid."""
    problem = topic_name_problem(topic.name)
    if problem is not None:
        raise InvalidTopicError(problem)
    if topic.name in image.topics:
        raise TopicAlreadyExistsError(f"topic {topic.name!r} already exists")
    _check_partition_count(topic.num_partitions)
    factor = topic.replication_factor
    if factor < 1:
        raise InvalidReplicationFactorError(
            f"replication factor must be 1 or more, or -1 for the broker's default; it is {factor}"
        )
    _check_enough_live(image, factor, f"replication factor {factor}")
    configs = parse_configs(parse_topic_config, topic.configs.items())
    room.take(topic.num_partitions, topics=1)
    return configs


def _check_partition_count(total_count: int) -> None:
    if not 1 <= total_count <= MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitionsError(
            f"a topic has from 1 to {MAX_PARTITIONS_PER_TOPIC} partitions, not {total_count}"
        )


def _check_enough_live(image: ClusterImage, factor: int, what: str) -> None:
    """Raise InvalidReplicationFactorError unless ``factor`` brokers are live. Replicas on other brokers would
    start out of sync."""
    live = image.live_brokers()
    if factor <= len(live):
        return
    gone = ", ".join(str(node_id) for node_id in sorted(image.brokers.keys() - live))
    raise InvalidReplicationFactorError(
        f"{what} is larger than the number of live brokers, {len(live)}"
        + (f" (not alive or shutting down: {gone})" if gone else "")
    )


def _agreed_configs(settings: ControllerSettings) -> Configs:
    """Return the overrides that every new topic gets unless the request sets them.

    The controller decides eligibility by min.insync.replicas (R16), and each leader acts on its own broker's
    value (R9). An override in the topic makes both use the same value.
    """
    default = settings.topic_defaults.get(MIN_INSYNC_REPLICAS)
    if default is None or default == TOPIC_OPTIONS.get(MIN_INSYNC_REPLICAS).default:
        return {}
    return {MIN_INSYNC_REPLICAS: value_text(default)}


def _new_topic_records(
    image: ClusterImage, topic: NewTopic, topic_id: str, configs: Configs, rng: Rng
) -> Iterable[MetadataRecord]:
    brokers = [broker for broker in image.brokers.values() if broker.is_live]
    start = rng.randrange(len(brokers))
    placed = place(brokers, topic.num_partitions, topic.replication_factor, start=start, loads=image.loads)
    yield TopicRecord(topic_id, topic.name)
    for partition, replicas in enumerate(placed):
        yield PartitionRecord(topic_id, partition, *_first_state(replicas))
    for key, value in configs.items():
        yield ConfigRecord(TOPIC, topic.name, key, value)


def _first_state(replicas: tuple[int, ...]) -> PartitionState:
    return PartitionState(replicas, replicas, replicas[0], leader_epoch=0, partition_epoch=0)


def delete_topics(image: ClusterImage, command: DeleteTopicsRequest) -> Decision:
    """Remove topics. Errors: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST (repeated name); of the whole
    request INVALID_REQUEST (too many topics)."""

    def delete(name: str) -> tuple[TopicResult, Iterable[MetadataRecord]]:
        return TopicResult(name, 0, None), [RemoveTopicRecord(existing_topic(image, name).topic_id)]

    return _decide_each([(name, name) for name in command.names], DeleteTopicsResponse, delete)


def create_partitions(
    image: ClusterImage, command: CreatePartitionsRequest, settings: ControllerSettings
) -> Decision:
    """Add partitions to topics. ``placement`` chooses the brokers.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, INVALID_PARTITIONS (no increase, or too many), POLICY_VIOLATION (too
    many partitions in one request or in the cluster: S26), INVALID_REPLICATION_FACTOR (a partition of the
    topic has more replicas than brokers are live), INVALID_REQUEST (repeated name); of the whole request
    INVALID_REQUEST (too many topics).
    """
    room = _Room(image, settings)

    def grow(wanted: PartitionCount) -> tuple[TopicResult, Iterable[MetadataRecord]]:
        topic = existing_topic(image, wanted.name)
        _check_growth(image, topic, wanted, room)
        added = () if command.validate_only else _added_partition_records(image, topic, wanted.total_count)
        return TopicResult(wanted.name, 0, None), added

    return _decide_each([(topic.name, topic) for topic in command.topics], CreatePartitionsResponse, grow)


def _check_growth(image: ClusterImage, topic: TopicImage, wanted: PartitionCount, room: _Room) -> None:
    present_count = len(topic.partitions)
    if wanted.total_count <= present_count:
        raise InvalidPartitionsError(
            f"topic {topic.name!r} has {present_count} partition{'' if present_count == 1 else 's'};"
            f" {wanted.total_count} would not be an increase"
        )
    _check_partition_count(wanted.total_count)
    factor = len(topic.partitions[0].final_replicas)
    _check_enough_live(image, factor, f"topic {topic.name!r} has {factor} replicas a partition, which")
    room.take(wanted.total_count - present_count)


def _added_partition_records(
    image: ClusterImage, topic: TopicImage, total_count: int
) -> Iterable[MetadataRecord]:
    present_count = len(topic.partitions)
    placed = place(
        [broker for broker in image.brokers.values() if broker.is_live],
        total_count - present_count,
        len(topic.partitions[0].final_replicas),
        present=[state.final_replicas for state in topic.partitions],
        loads=image.loads,
    )
    for partition, replicas in enumerate(placed, present_count):
        yield PartitionRecord(topic.topic_id, partition, *_first_state(replicas))
