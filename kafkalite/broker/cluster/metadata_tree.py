"""The cluster's metadata as a tree of paths such as ``/topics/orders/0``, for people and tools.

::

    /brokers/<node id>      a registration: addresses, epoch, whether it is fenced
    /topics/<name>          the topic's id and partition count; its children are its partitions
    /configs/<type>/<name>  the overrides of a topic or broker
    /features               the metadata offset, the next producer id, finalised feature levels
"""

# Tests: tests/broker/test_cluster_parts.py

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kafkalite.metadata.features import METADATA_VERSION
from kafkalite.metadata.image import ClusterImage
from kafkalite.protocol.messages.metadata import MetadataNode

ROOTS = ("brokers", "configs", "features", "topics")


def describe(image: ClusterImage, path: str) -> list[MetadataNode]:
    """Return the node at ``path``, then its children sorted by name or number, or [] if ``path`` does not
    exist."""
    parts = [part for part in path.split("/") if part]
    value = _value(image, parts)
    if value is None:
        return []
    prefix = "".join(f"/{part}" for part in parts)
    nodes = [MetadataNode(prefix or "/", value)]
    for name in _children(image, parts):
        below = _value(image, [*parts, name])
        nodes.append(MetadataNode(f"{prefix}/{name}", below or ""))
    return nodes


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= 10  # int() refuses a number of thousands of digits


def _value(image: ClusterImage, parts: list[str]) -> str | None:
    """Return the value of a path as JSON: "" for a directory without a value, None if it does not exist."""
    found: Any = None
    match parts:
        case [] | ["brokers"] | ["topics"] | ["configs"]:
            return ""
        case ["features"]:
            found = {
                "metadata_offset": image.metadata_offset,
                "next_producer_id": image.next_producer_id,
                METADATA_VERSION: image.metadata_version,
            }
        case ["brokers", name] if _is_number(name) and int(name) in image.brokers:
            found = image.brokers[int(name)]._asdict()
        case ["topics", name] if name in image.topics:
            topic = image.topics[name]
            found = {"name": name, "topic_id": topic.topic_id, "partition_count": len(topic.partitions)}
        case ["topics", name, number] if _is_number(number):
            state = image.partition(name, int(number))
            found = None if state is None else state._asdict()
        case ["configs", kind] if any(resource[0] == kind for resource in image.configs):
            return ""
        case ["configs", kind, name] if (kind, name) in image.configs:
            found = dict(image.configs[kind, name])
    return None if found is None else json.dumps(found, sort_keys=True)


def _children(image: ClusterImage, parts: list[str]) -> Iterable[str]:
    match parts:
        case []:
            return ROOTS
        case ["brokers"]:
            return [str(node_id) for node_id in sorted(image.brokers)]
        case ["topics"]:
            return sorted(image.topics)
        case ["topics", name]:
            return map(str, range(len(image.topics[name].partitions)))
        case ["configs"]:
            return sorted({kind for kind, _ in image.configs})
        case ["configs", kind]:
            return sorted(name for found, name in image.configs if found == kind)
    return ()
