"""DescribeConfigs: every option of a topic or of this broker, its value in force, and who set it.

Errors, per resource: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST (another broker's, or no kind of resource).
"""

from __future__ import annotations

from kafkalite.broker.config import BROKER_OPTIONS, SECRET_OPTIONS
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidRequestError, UnknownTopicOrPartitionError
from kafkalite.metadata.records import BROKER, TOPIC
from kafkalite.metadata.topic_config import (
    BROKER_DEFAULT_OPTIONS,
    TOPIC_OPTIONS,
    topic_settings,
    value_text,
)
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.admin import (
    ConfigEntry,
    ConfigResource,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribedConfig,
)


def handle(services: Services, request: Request, _client: Client) -> Reply:
    message: DescribeConfigsRequest = request.message
    described = [_describe(services, resource) for resource in message.resources]
    return Reply(DescribeConfigsResponse(0, None, described))


def _describe(services: Services, resource: ConfigResource) -> DescribedConfig:
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
        raise InvalidRequestError(f"this is broker {node_id}; ask broker {name} itself")
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
                option.name not in BROKER_DEFAULT_OPTIONS,
                option.doc,
            )
        )
    return entries
