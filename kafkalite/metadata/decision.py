"""The parts that decisions have in common: the type of a decision, controller settings, topic configs."""

# Tests: tests/metadata/test_controller.py

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kafkalite.errors import (
    BrokerError,
    ConfigError,
    InvalidConfigError,
    InvalidRequestError,
    UnknownTopicOrPartitionError,
)
from kafkalite.limits import MAX_TOPICS_PER_REQUEST
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.records import BROKER, HighWatermarksRecord, MetadataRecord, PartitionRecord
from kafkalite.metadata.topic_config import topic_defaults

Configs = Mapping[str, str | None]
ConfigParser = Callable[[str, str | None], tuple[str, str | None]]


class Decision(NamedTuple):
    """The reply to a command, and the records that must be committed before the reply is sent."""

    reply: Any
    records: Sequence[MetadataRecord] = ()


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The settings of the node on which the controller runs, as far as decisions depend on them."""

    num_partitions: int = 1  #: for a topic that is created without a partition count
    default_replication_factor: int = 1
    topic_defaults: Mapping[str, Any] = field(default_factory=dict)  #: typed, by topic option name
    node_id: int = -1  #: the broker whose overrides in the image apply
    is_single_node: bool = False  #: the controller is also the only broker, so there are no heartbeats
    session_timeout_ms: int = 3_000  #: a broker without a heartbeat for longer is fenced
    auto_leader_rebalance: bool = True
    imbalance_check_interval_ms: int = 300_000
    imbalance_per_broker_percentage: int = 10
    auto_rebalance: bool = False  #: replicas move by themselves to brokers with fewer
    unclean_recovery_strategy: str = "balanced"  #: none, balanced or aggressive (R47)
    unclean_recovery_timeout_ms: int = 300_000
    #: (name, replication factor) of the internal topics, which get more replicas when brokers join
    internal_topics: tuple[tuple[str, int], ...] = ()
    voters: frozenset[int] = frozenset()  #: node ids of the metadata quorum, which stay registered
    max_topics: int = 50_000
    max_partitions: int = 100_000  #: of all topics together


def min_insync_replicas(image: ClusterImage, topic: TopicImage) -> int:
    """Return the number of in-sync replicas below which the topic's leader certainly does not commit.

    This is the topic's own override. Without an override the result is 1, because each leader uses its
    broker's configuration, which the controller does not know. A result that is too small keeps fewer
    replicas eligible, which is safe.
    """
    text = image.topic_configs(topic.name).get("min.insync.replicas")
    return 1 if text is None else int(text)


def copies_to_keep(image: ClusterImage, topic: TopicImage, settings: ControllerSettings) -> int:
    """Return min.insync.replicas as the topic's leader uses it, if its broker has the same configuration as
    the controller's node: the number of in-sync replicas that a reassignment must leave (R60).

    Here a result that is too great only delays the end of a reassignment.
    """
    overrides = image.configs_of(BROKER, str(settings.node_id))
    value = topic_defaults(overrides).get("min.insync.replicas") if overrides else None
    default = settings.topic_defaults.get("min.insync.replicas", 1) if value is None else value
    text = image.topic_configs(topic.name).get("min.insync.replicas")
    return int(default if text is None else text)


def allows_unclean_election(image: ClusterImage, topic: TopicImage, settings: ControllerSettings) -> bool:
    """Whether a replica that may lack committed records may become the topic's leader."""
    option = "unclean.leader.election.enable"
    text = image.topic_configs(topic.name).get(option)
    if text is not None:
        return text == "true"
    overrides = image.configs_of(BROKER, str(settings.node_id))
    value = topic_defaults(overrides).get(option) if overrides else None
    return bool(settings.topic_defaults.get(option, False) if value is None else value)


def edit_partitions(
    image: ClusterImage,
    is_affected: Callable[[TopicImage, PartitionState], bool],
    edit: Callable[[TopicImage, int, PartitionEdit], None],
) -> list[MetadataRecord]:
    """Call ``edit(topic, partition number, change)`` for each partition for which ``is_affected`` returns
    True. Return the records that store the changes that ``edit`` made."""
    records: list[MetadataRecord] = []
    for topic in image.topics.values():
        min_isr: int | None = None
        for number, state in enumerate(topic.partitions):
            if not is_affected(topic, state):
                continue
            if min_isr is None:
                min_isr = min_insync_replicas(image, topic)
            change = PartitionEdit(state, min_isr)
            edit(topic, number, change)
            records += edit_records(image, topic.topic_id, number, change)
    return records


def edit_records(
    image: ClusterImage, topic_id: str, number: int, change: PartitionEdit
) -> list[MetadataRecord]:
    """Return the records that store ``change``, or an empty list if it changes nothing.

    After an unclean election, the records also remove the checkpointed high watermark, because committed
    records may be lost.
    """
    state = change.build()
    if state is None:
        return []
    records: list[MetadataRecord] = [PartitionRecord(topic_id, number, *state)]
    if change.is_unclean and (topic_id, number) in image.high_watermarks:
        records.append(HighWatermarksRecord(((topic_id, number, 0),)))
    return records


def parse_configs(parse: ConfigParser, configs: Iterable[tuple[str, str | None]]) -> Configs:
    """Return {canonical name: text}. Raises INVALID_CONFIG for an unknown or repeated name or a bad value."""
    parsed: dict[str, str | None] = {}
    try:
        for name, text in configs:
            key, value = parse(name, text)
            if key in parsed:
                raise ConfigError(key=key, value=None, allowed="given more than once in one request")
            parsed[key] = value
    except ConfigError as error:
        raise InvalidConfigError(str(error)) from error
    return parsed


def existing_topic(image: ClusterImage, name: str) -> TopicImage:
    """Return the topic. Raises UNKNOWN_TOPIC_OR_PARTITION if it does not exist."""
    topic = image.topics.get(name)
    if topic is None:
        raise UnknownTopicOrPartitionError(f"there is no topic {name!r}")
    return topic


def too_many(count: int, what: str) -> BrokerError | None:
    """Return an InvalidRequestError if ``count`` exceeds the limit of one request, otherwise None."""
    if count <= MAX_TOPICS_PER_REQUEST:
        return None
    return InvalidRequestError(f"one request has at most {MAX_TOPICS_PER_REQUEST} {what}, this one {count}")


def outcome(error: BrokerError) -> tuple[int, str]:
    """Return (error code, error message), as the result for a refused item."""
    return int(error.code), error.message
