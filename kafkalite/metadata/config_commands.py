"""Decisions about configs: overrides of topics and brokers, and the partition changes that these require."""

# Tests: tests/metadata/test_controller.py

from __future__ import annotations

from collections.abc import Callable

from kafkalite.errors import BrokerError, InvalidRequestError
from kafkalite.metadata.decision import (
    ControllerSettings,
    Decision,
    allows_unclean_election,
    edit_partitions,
    existing_topic,
    min_insync_replicas,
    outcome,
    parse_configs,
    too_many,
)
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.image import ClusterImage, TopicImage
from kafkalite.metadata.records import BROKER, NO_LEADER, TOPIC, ConfigRecord, MetadataRecord
from kafkalite.metadata.topic_config import parse_broker_config, parse_topic_config
from kafkalite.protocol.messages.admin import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    AlteredConfig,
    ConfigChange,
)


def alter_configs(
    image: ClusterImage, command: AlterConfigsRequest, *, settings: ControllerSettings
) -> Decision:
    """Set and remove overrides (KIP-339). The changes of one resource are applied together or not at all.

    The reply has one result for each resource, in the order in which the request first names them. Errors:
    UNKNOWN_TOPIC_OR_PARTITION, INVALID_CONFIG (bad name or value, or a repeated key), INVALID_REQUEST
    (unknown resource type or broker); of the whole request INVALID_REQUEST (too many changes).
    """
    problem = too_many(len(command.changes), "changes")
    if problem is not None:
        return Decision(AlterConfigsResponse(*outcome(problem), []))
    by_resource: dict[tuple[str, str], list[ConfigChange]] = {}
    for change in command.changes:
        by_resource.setdefault((change.resource_type, change.name), []).append(change)
    records: list[MetadataRecord] = []
    results: list[AlteredConfig] = []
    for (resource_type, name), changes in by_resource.items():
        try:
            new_records = _alter_one(image, resource_type, name, changes)
        except BrokerError as error:
            results.append(AlteredConfig(resource_type, name, *outcome(error)))
            continue
        if not command.validate_only:
            records += new_records
        results.append(AlteredConfig(resource_type, name, 0, None))
    records += _consequences(image, records, settings)
    return Decision(AlterConfigsResponse(0, None, results), records)


def _consequences(
    image: ClusterImage, changes: list[MetadataRecord], settings: ControllerSettings
) -> list[MetadataRecord]:
    """Return the partition records that ``changes`` of configs require. They must be committed in the same
    entry as ``changes``.

    A smaller min.insync.replicas lets a leader commit without replicas that are in the ELR. These replicas
    are removed from the ELR before any leader can use the new value. If unclean elections become allowed,
    leaders are elected for partitions that have none.
    """
    keys = {record.key for record in changes if isinstance(record, ConfigRecord)}
    if not keys & {"min.insync.replicas", "unclean.leader.election.enable"}:
        return []
    after = Delta(image).replay_all(changes).apply(image.metadata_offset)
    live = after.live_brokers()

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        if len(change.isr) >= min_insync_replicas(after, topic):
            change.refresh_eligible()
        change.elect(live, unclean=allows_unclean_election(after, topic, settings))

    return edit_partitions(
        after, lambda _, state: bool(state.elr or state.last_known_elr or state.leader == NO_LEADER), edit
    )


def _alter_one(
    image: ClusterImage, resource_type: str, name: str, changes: list[ConfigChange]
) -> list[MetadataRecord]:
    """Return the records for one resource, without changes that have no effect. Raises BrokerError."""
    parse = _config_parser(image, resource_type, name)
    wanted = parse_configs(parse, ((change.key, change.value) for change in changes))
    present = image.configs_of(resource_type, name)
    return [
        ConfigRecord(resource_type, name, key, value)
        for key, value in wanted.items()
        if present.get(key) != value
    ]


_Parser = Callable[[str, str | None], tuple[str, str | None]]


def _config_parser(image: ClusterImage, resource_type: str, name: str) -> _Parser:
    """Return the parser of this resource's configs. Raises BrokerError if the resource does not exist."""
    if resource_type == TOPIC:
        existing_topic(image, name)
        return parse_topic_config
    if resource_type != BROKER:
        raise InvalidRequestError(f"resource type must be one of topic, broker; it is {resource_type!r}")
    if name not in {str(node_id) for node_id in image.brokers}:
        known = ", ".join(str(node_id) for node_id in sorted(image.brokers))
        raise InvalidRequestError(f"there is no broker {name!r}; there are: {known}")
    return parse_broker_config
